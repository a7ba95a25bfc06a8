"""The config: to and from JSON, and a sentence for everything that is wrong."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoneout.paper.console import CONTROL
from zoneout.paper.experiments.recipes import RECIPES
from zoneout.paper.experiments.trials import Trial
from zoneout.paper.training import config as configs
from zoneout.paper.training import unused_options as rules
from zoneout.paper.training.config import (
    MOST,
    Batches,
    Config,
    Data,
    Evaluation,
    Model,
    Optimizer,
    Protocol,
    Schedule,
    Zoneout,
    change,
    from_json,
    names,
    to_json,
)
from zoneout.paper.training.unused_options import unread

WORD_PTB = Config(
    data=Data("word-ptb", by="word"),
    batches=Batches("streams", size=20, length=35),
    model=Model(
        hidden=1500, layers=2, embedding=1500, dropout=0.65, init="uniform", forget_bias=0.0
    ),
    zoneout=Zoneout(cell=0.25, hidden=0.025),
    optimizer=Optimizer("sgd", lr=1.0, clip_gradient=10.0),
    schedule=Schedule("divide", after=14, by=1.15),
    evaluation=Evaluation(Protocol("streams", size=20, length=35), Protocol("whole", length=1000)),
    loss="sum",
    epochs=55,
)
PMNIST = Config(
    data=Data("mnist", order="paper"),
    batches=Batches(size=100),
    model=Model(hidden=100, norm="batch", init="identity", one_bias=True, learn_initial_state=True),
    zoneout=Zoneout(cell=0.15, hidden=0.15, mask="shared"),
    optimizer=Optimizer("rmsprop", paper=True, lr=0.001, decay=0.5, clip_gradient=1.0),
    epochs=150,
)


@pytest.mark.parametrize(
    "config", [Config(), WORD_PTB, PMNIST], ids=["default", "word-ptb", "pmnist"]
)
def test_json_there_and_back_loses_nothing(config: Config) -> None:
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


NAMES = st.text(min_size=1).filter(lambda text: not CONTROL.search(text))


@given(
    st.fixed_dictionaries(
        {
            "zoneout.cell": st.floats(0, 1),
            "model.hidden": st.integers(1, MOST),
            "data.name": NAMES,
            "data.limit": st.none() | st.integers(1, 2**70),
            "optimizer.betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
            "optimizer.eps": st.none() | st.floats(1e-300, 1e300),
            "seed": st.integers(-(2**63), 2**64 - 1),
            "batches.offset": st.booleans(),
            "backend": st.none() | NAMES,
        }
    )
)
def test_any_values_there_and_back(values: dict[str, Any]) -> None:
    config = change(Config(), {n: v for n, v in values.items() if not isinstance(v, str)})
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, name=values["data.name"])
    )
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_a_new_default_leaves_the_digests_of_older_runs() -> None:
    """Runs and sweeps of an earlier version could not be continued."""
    older = change(Config(), configs.FIRST_DEFAULTS | {"zoneout.cell": 0.5})
    assert Trial(older, ("zoneout.cell", "seed")).digest == "e5256b2e"
    assert Trial(Config(), ("seed",)).digest != Trial(change(older, {"zoneout.cell": 0}), ()).digest


def test_a_field_that_is_left_out_has_its_default() -> None:
    assert from_json({"zoneout": {"cell": 0.5}}) == Config(zoneout=Zoneout(cell=0.5))


@pytest.mark.parametrize(
    "values, sentence",
    [
        ({"zonout": {}}, r"zonout: there is no such field; the nearest are zoneout"),
        ({"model": {"hiden": 3}}, r"model\.hiden: there is no such field; the nearest are hidden"),
        ({"model": {"hidden": "3"}}, r"model\.hidden: expected a whole number, got '3'"),
        ({"model": {"hidden": 2.5}}, r"model\.hidden: expected a whole number, got 2\.5"),
        ({"model": {"hidden": True}}, r"model\.hidden: expected a whole number, got True"),
        ({"model": {"hidden": 0}}, r"model\.hidden: expected a number above 0, got 0"),
        (
            {"model": {"cell": "lstn"}},
            r"model\.cell: expected one of lstm, gru, .*, surprisal-lstm, got 'lstn'",
        ),
        ({"model": {"tied": 1}}, r"model\.tied: expected true or false, got 1"),
        ({"model": {"tied": True}}, r"model\.tied: .* try --model\.embedding 256"),
        ({"model": 3}, r"model: expected named fields in braces, got 3"),
        ({"data": {"limit": "all"}}, r"data\.limit: expected a whole number or null, got 'all'"),
        ({"data": {"limit": 0}}, r"data\.limit: expected a number above 0, or none, got 0"),
        ({"zoneout": {"cell": 1.5}}, r"zoneout\.cell: expected a rate between 0 and 1, got 1\.5"),
        (
            {"zoneout": {"cell": float("nan")}},
            r"zoneout\.cell: expected a rate between 0 and 1, got nan",
        ),
        ({"optimizer": {"betas": [0.9]}}, r"optimizer\.betas: expected 2 numbers, got \[0\.9\]"),
        (
            {"optimizer": {"betas": [0.9, 1.0]}},
            r"optimizer\.betas: expected a number from 0 to below 1, got 1\.0",
        ),
        (
            {"optimizer": {"lr": float("inf")}},
            r"optimizer\.lr: expected a finite number, 0 or more, got inf",
        ),
        ({"optimizer": {"momentum": 0.9}}, r"optimizer\.momentum: expected 0 with rule adam"),
        (
            {"data": {"name": "mnist"}, "model": {"hidden": 128, "tied": True}},
            r"model\.tied: expected none without an embedding of symbols",
        ),
        (
            {"evaluation": {"valid": {"length": 1}}},
            r"length: expected at least 2 for chunks, got 1",
        ),
        (
            {"evaluation": {"test": {"kind": "whole", "length": 0}}},
            r"length: expected at least 1 for whole, got 0",
        ),
        (
            {"model": {"norm": "batch"}, "batches": {"size": 1}},
            r"batches\.size: expected at least 2 with batch norm, got 1",
        ),
        ({"zoneout": {"cell": [0.1, 2]}}, r"zoneout\.cell: expected a rate between 0 and 1, got 2"),
        ({"zoneout": {"cell": [0.1]}, "model": {"layers": 2}}, r"zoneout\.cell: .* or 2, one for"),
        ({"zoneout": {"cell": ["x"]}}, r"zoneout\.cell: expected a number or a list of numbers"),
        ({"zoneout": {"cell": (0.1, 0.2)}}, r"zoneout\.cell: expected one number, got 2$"),
        ({"zoneout": {"mask": "clock"}}, r"zoneout\.periods: expected one for each layer"),
        ({"zoneout": {"periods": [0]}}, r"zoneout\.periods: expected periods of at least 1"),
        ({"zoneout": {"periods": [2], "cell": 0.1}}, r"periods: expected them in place of rates"),
        ({"model": {"modules": [0, 1]}}, r"model\.modules: expected periods of at least 1, got 0"),
        ({"model": {"sizes": [4, 0]}}, r"model\.sizes: expected a number above 0, got 0"),
        (
            {"model": {"sizes": [4, 3]}, "zoneout": {"depth": 0.1}},
            r"model\.sizes: expected layers of one size with noise over depth, .* got \[4, 3\]",
        ),
        ({"model": {"cell": "hyper-lstm", "layers": 2}}, r"model\.layers: expected 1 with hyper"),
        ({"model": {"cell": "hm-lstm"}}, r"model\.layers: expected at least 2 with hm-lstm"),
        (
            {"model": {"cell": "hm-lstm", "layers": 2, "norm": "layer"}},
            r"norm: expected none with hm",
        ),
        (
            {"model": {"cell": "surprisal-lstm", "embedding": 8}},
            r"model\.embedding: expected 0 with surprisal-lstm",
        ),
        (
            {"model": {"cell": "adaptive-lstm"}},
            r"zoneout\.cell: expected a rate above 0 and below 1 with adaptive-lstm, got 0",
        ),
        (
            {"model": {"cell": "hyper-lstm"}, "weight_drop": 0.5},
            r"weight_drop: expected no such noise with hyper-lstm",
        ),
        (
            {"model": {"cell": "hyper-lstm"}, "data": {"name": "mnist"}},
            r"model\.cell: expected lstm, gru, rnn or rnn-relu, got hyper-lstm",
        ),
        (
            {"model": {"cell": "hyper-lstm"}, "recurrent_dropout": {"rate": 0.1, "mask": "step"}},
            r"recurrent_dropout\.mask: expected unit with hyper-lstm, got 'step'",
        ),
        (
            {
                "model": {"cell": "hyper-lstm"},
                "recurrent_dropout": {"rate": 0.1, "hold_output_gate": True},
            },
            r"recurrent_dropout\.hold_output_gate: expected false with hyper-lstm",
        ),
        (
            {"model": {"cell": "hm-lstm", "layers": 2, "init": "identity"}},
            r"model\.init: expected another with hm-lstm, .*, got identity; try --model",
        ),
        (
            {"schedule": {"kind": "milestones"}},
            r"schedule\.at: expected the numbers of some epochs with milestones, got none",
        ),
        (
            {
                "model": {"cell": "rnn", "modules": [1, 2, 4, 6]},
                "batches": {"kind": "streams", "length": 100},
            },
            r"batches\.length: expected a multiple of 12, .*, got 100; try 96",
        ),
        (
            {
                "model": {"layers": 2},
                "zoneout": {"mask": "clock", "periods": [1, 8]},
                "batches": {"kind": "streams", "length": 5},
            },
            r"batches\.length: expected a multiple of 8, .*, got 5; try 8",
        ),
        (
            {
                "model": {"cell": "rnn", "modules": [1, 2]},
                "batches": {"kind": "streams", "length": 100, "halved": 0.1},
            },
            r"batches\.halved, batches\.spread: expected 0 with a clock",
        ),
        ({"optimizer": {"l2": -1.0}}, r"optimizer\.l2: expected a finite number, 0 or more"),
        ({"model": {"input_dropout": 1.5}}, r"model\.input_dropout: expected a rate between 0"),
        ({"system": {"scales": 0}}, r"system\.scales: expected a number above 0, got 0"),
        ({"schedule": {"kind": "plateau", "after": 0}}, r"schedule\.after: expected at least 1"),
        ({"seed": 2**64}, r"seed: expected an integer of at most 64 bits"),
        ([], r"config: expected named fields in braces, got \[\]"),
    ],
)
def test_what_is_wrong_gets_a_sentence(values: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        from_json(values)


def test_change_reads_strings_as_the_fields_type() -> None:
    """A sweep names fields and values on the command line."""
    changed = change(
        Config(),
        {
            "zoneout.cell": "0.5",
            "data.limit": "none",
            "data.name": "123",
            "batches.offset": "false",
            "seed": "7",
        },
    )
    assert changed.zoneout.cell == 0.5 and changed.data.limit is None and changed.data.name == "123"
    assert changed.batches.offset is False and changed.seed == 7
    with pytest.raises(
        ValueError, match=r"zoneout\.cel: there is no such field; the nearest are zoneout\.cell"
    ):
        change(Config(), {"zoneout.cel": 1})
    with pytest.raises(ValueError, match=r"zoneout\.cell: expected a number or .*, got 'half'"):
        change(Config(), {"zoneout.cell": "half"})


STRANGE = change(
    PMNIST,
    {
        "data.name": "-a 'text' of $HOME/ours.txt",
        "data.valid": "its valid.txt",
        "batches.offset": False,
        "optimizer.betas": [0.5, 0.9],
        "optimizer.eps": 1e-30,
        "model.forget_bias": -1e-5,
        "seed": -3,
    },
)


@pytest.mark.parametrize(
    "config", [Config(), WORD_PTB, PMNIST, STRANGE], ids=["default", "words", "pmnist", "strange"]
)
def test_the_command_line_takes_the_flags(config: Config) -> None:
    """A command that is shown is refused, or makes another run."""
    cli = pytest.importorskip("zoneout.paper.cli.main")
    shown = shlex.join(configs.flags(configs.changed(config)))
    assert cli.parse("train", shlex.split(shown)).config == config
    recipe = RECIPES["pmnist_zoneout"]
    back = shlex.join(configs.flags(configs.changed(config, recipe.make())))
    assert (
        cli.parse("sweep", [recipe.name, *shlex.split(back)]).config == config
    )  # None and False, where it has others


def test_every_field_has_help() -> None:
    """The command line shows the string below a field; one without it would have an empty help."""
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(configs))
    bare = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for one, after in zip(node.body, [*node.body[1:], None]):
                group = isinstance(one, ast.AnnAssign) and ast.unparse(one.annotation) in vars(
                    configs
                )
                helped = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if isinstance(one, ast.AnnAssign) and not helped and not group:
                    bare.append(f"{node.name}.{ast.unparse(one.target)}")
    assert not bare


def test_the_command_line_reads_it() -> None:
    tyro = pytest.importorskip("tyro")
    words = "--zoneout.cell 0.5 --model.hidden 1000 --optimizer.betas 0.5 0.9 --data.name char-ptb"
    config = tyro.cli(Config, args=[*words.split(), "--evaluation.test.kind", "whole"])
    assert config == change(
        Config(),
        {
            "zoneout.cell": 0.5,
            "model.hidden": 1000,
            "optimizer.betas": [0.5, 0.9],
            "data.name": "char-ptb",
        },
    )
    assert {"zoneout.cell", "evaluation.valid.length", "seed"} <= names().keys()


# --- settings that nobody reads -------------------------------------------------------------------

HYPER: dict[str, Any] = {"model.cell": "hyper-lstm"}
SURPRISAL: dict[str, Any] = {"model.cell": "surprisal-lstm", "model.embedding": 0}
READ = [  # a field, settings with which it is read, and with which it is not
    ("schedule.by", {"schedule.kind": "divide"}, {"schedule.kind": "cosine"}),
    ("schedule.by", {"schedule.kind": "milestones", "schedule.at": [2]}, {}),
    ("schedule.after", {"schedule.kind": "divide"}, {}),
    (
        "schedule.after",
        {"schedule.kind": "plateau"},
        {"schedule.kind": "milestones", "schedule.at": [2]},
    ),
    (
        "schedule.at",
        {"schedule.kind": "milestones", "schedule.at": [2]},
        {"schedule.kind": "plateau"},
    ),
    (
        "schedule.at",
        {"schedule.kind": "milestones", "schedule.at": [2, 19], "epochs": 20},
        {"schedule.kind": "milestones", "schedule.at": [2, 20], "epochs": 20},
    ),
    ("model.init", SURPRISAL | {"model.init": "uniform"}, SURPRISAL),
    ("model.hidden", {}, {"model.sizes": [3, 4]}),
    ("model.layers", {}, {"model.sizes": [3, 4]}),
    ("model.one_bias", {}, HYPER),
    ("system.hyper", HYPER, {}),
    ("system.scales", HYPER, {}),
    ("model.output", {}, {"data.name": "mnist"}),
    ("model.input_dropout", {}, {"data.name": "mnist"}),
    ("system.least", SURPRISAL, HYPER),
    ("system.compile", HYPER, {}),
    ("swapout.mask", {"swapout.hidden_old": 0.1}, {}),
    ("optimizer.decay", {"optimizer.rule": "rmsprop"}, {"optimizer.rule": "adam"}),
    ("optimizer.betas", {"optimizer.rule": "adam"}, {"optimizer.rule": "rmsprop"}),
    ("optimizer.eps", {"optimizer.rule": "adam"}, {"optimizer.rule": "sgd"}),
    ("optimizer.paper", {"optimizer.rule": "rmsprop"}, {"optimizer.rule": "sgd"}),
    ("model.init_bound", {"model.init": "uniform"}, {"model.init": "orthogonal"}),
    ("model.forget_bias", {"model.cell": "lstm"}, {"model.cell": "gru"}),
    ("variational_dropout.tied", {"variational_dropout.input": 0.1}, {}),
    ("variational_dropout.tied", {"variational_dropout.hidden": 0.1}, {}),
    ("model.output_bias", {"model.cell": "lstm"}, {"model.cell": "rnn"}),
    ("model.norm_momentum", {"model.norm": "batch"}, {"model.norm": "layer"}),
    ("evaluation.statistics_also", {"model.norm": "batch"}, {"model.norm": "layer"}),
    *[
        (name, {"model.layers": 2, name: 0.1}, {name: 0.1})
        for name in ("zoneout.depth", "swapout.depth_old", "swapout.depth_new")
    ],
    ("zoneout.mask", {"zoneout.cell": 0.1}, {}),
    ("zoneout.mask", {"zoneout.hidden": [0.0, 0.1], "model.layers": 2}, {}),
    ("recurrent_dropout.mask", {"recurrent_dropout.rate": 0.1}, {}),
    ("recurrent_dropout.hold_output_gate", {"recurrent_dropout.rate": 0.1}, {}),
    ("state_dropout.mask", {"state_dropout.hidden": 0.1}, {}),
    ("batches.offset", {"batches.kind": "chunks"}, {"batches.kind": "streams"}),
    ("batches.offset", {}, {"data.name": "mnist"}),
    ("batches.halved", {"batches.kind": "streams"}, {}),
    ("batches.spread", {"batches.kind": "streams"}, {}),
    ("model.embedding_bound", {"model.embedding": 8}, {"model.embedding": 0}),
    ("evaluation.temperature", {}, {"data.name": "mnist"}),
    ("evaluation.statistics", {"model.norm": "batch"}, {}),
    (
        "evaluation.statistics_size",
        {"model.norm": "batch"},
        {"model.norm": "batch", "batches.kind": "streams"},
    ),
    (
        "evaluation.statistics_size",
        {"model.norm": "batch", "data.name": "mnist", "batches.kind": "streams"},
        {},
    ),
    ("model.embedding", {}, {"data.name": "mnist"}),
    ("data.order", {"data.name": "mnist"}, {}),
    ("data.preparation", {"data.name": "char-ptb"}, {"data.name": "word-ptb"}),
    (
        "data.by",
        {"data.name": "word-ptb", "data.by": "word"},
        {"data.name": "char-ptb", "data.by": "word"},
    ),
    ("data.by", {"data.name": "my.txt", "data.by": "word"}, {"data.name": "mnist"}),
    *[(f"batches.{name}", {}, {"data.name": "mnist"}) for name in ("length", "kind")],
    *[(f"data.{name}", {}, {"data.name": "mnist"}) for name in ("words", "valid", "test")],
    *[
        (f"evaluation.{p}.{n}", {}, {"data.name": "mnist"})
        for p in ("valid", "test")
        for n in ("kind", "length")
    ],
    ("loss", {}, {"data.name": "mnist"}),
]


@pytest.mark.parametrize(("name", "read", "not_read"), READ)
def test_what_is_read(name: str, read: dict[str, Any], not_read: dict[str, Any]) -> None:
    """An option that does something is refused, or one that does nothing is taken."""
    assert name not in unread(change(Config(), read))
    assert name in unread(change(Config(), not_read))


def test_every_field_that_may_go_unread_is_looked_at() -> None:
    """A rule is there that no test knows."""
    ruled = {name for names, _, _ in rules._RULES for name in names}
    assert ruled == {name for name, _, _ in READ} and ruled <= set(names())
