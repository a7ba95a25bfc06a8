"""Layers of several sizes and systems as models, and the schedule that waits for a plateau."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoneout as zo
from zoneout.paper.training.config import (
    Batches,
    Config,
    Data,
    Evaluation,
    Model,
    Optimizer,
    Protocol,
    Schedule,
    System,
    Zoneout,
    change,
)
from zoneout.paper.training.feeds import make_feed
from zoneout.paper.training.models import build, noises
from zoneout.paper.training.processes import Processes
from zoneout.paper.training.runs import read_metrics
from zoneout.paper.training.step import Step, learning_rates
from zoneout.paper.training.train import State, load_data, train

SYMBOLS = 7
TOKENS = torch.randint(0, SYMBOLS, (6, 3), generator=torch.Generator().manual_seed(0))
TINY = Config(
    data=Data(str(Path(__file__).parent / "golden" / "text.txt"), limit=1200),
    batches=Batches("chunks", size=8, length=12),
    model=Model(hidden=4, embedding=0),
    evaluation=Evaluation(Protocol("chunks", length=12), Protocol("whole", length=50)),
    device="cpu",
)

pytestmark = pytest.mark.usefixtures("one_thread")


def in_pieces(model: Any) -> Tensor:
    first = model(TOKENS[:2], model.initial_state(3))
    return torch.cat([first.logits, model(TOKENS[2:], first.state, first_step=2).logits])


def test_layers_of_several_sizes_are_layers_one_after_the_other() -> None:
    """A layer reads another layer, keeps another's state, or has another's rate."""
    config = Config(
        model=Model(sizes=(5, 4, 3), embedding=3, tied=True, init="orthogonal"),
        zoneout=Zoneout(cell=(0.5, 0.25, 0.0), hidden=0.05),
        weight_drop=(0.0, 0.5, 0.5),
    )
    model: Any = build(config, SYMBOLS).eval()
    y, layers = model.embedding(TOKENS), model.recurrent.layers
    for layer in layers:
        y = layer(y)[0]
    whole = model(TOKENS).logits
    torch.testing.assert_close(whole, y @ model.embedding.weight.t() + model.softmax.bias)
    torch.testing.assert_close(in_pieces(model), whole)
    assert [layer.hidden_size for layer in layers] == [5, 4, 3]
    assert [layer.noise[0] for layer in layers] == [
        zo.Zoneout(cell=rate, hidden=0.05) for rate in (0.5, 0.25, 0.0)
    ]
    assert [one.rate for layer in layers[1:] for one in layer.noise[1:]] == [0.5, 0.5]
    assert all(layer.bias_ih_l0[layer.hidden_size :].max() > 0.9 for layer in layers)


@pytest.mark.parametrize("units", [(5, 4), (4, 4), (4,)])
def test_an_output_layer_sees_all_layers(units: tuple[int, ...]) -> None:
    """The softmax sees the last layer alone, or a gate is that of another layer."""
    config = Config(model=Model(sizes=units, embedding=3, output=6, init="orthogonal"))
    model: Any = build(config, SYMBOLS).eval()
    y, found = model.embedding(TOKENS), []
    layers = model.recurrent.layers if len(units) > 1 else [model.recurrent]
    for layer in layers:
        y = layer(y)[0]
        found.append(y)
    gates = torch.sigmoid(torch.cat(found, -1) @ model.output.gates.weight.t())
    sums = [
        gates[..., k : k + 1] * (h @ model.output.layers[k].weight.t()) for k, h in enumerate(found)
    ]
    want = torch.relu(torch.stack(sums).sum(0))
    assert [layer.hidden_size for layer in layers] == list(units) and want.any()
    output = model(TOKENS)
    torch.testing.assert_close(output.hidden, want)
    torch.testing.assert_close(output.logits, want @ model.softmax.weight.t() + model.softmax.bias)
    torch.testing.assert_close(in_pieces(model), output.logits)
    output.logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.output.parameters())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data.name": "mnist"}, "model.output: expected 0 for images, got 6"),
        ({"weight_noise": 0.1}, "model.output: expected 0 with noise on weights"),
        ({"model.layers": 2, "zoneout.depth": 0.1}, "model.output: expected 0 with noise over"),
        (
            {"model.cell": "surprisal-lstm", "model.embedding": 0},
            "model.output: expected 0 with surprisal-lstm, whose softmax is inside the step, got 6",
        ),
        ({"model.tied": True}, r"size of the softmax's input \(6\)"),
    ],
)
def test_an_output_layer_that_cannot_be(changes: dict[str, Any], says: str) -> None:
    """A model has no such layer, though it was asked for."""
    with pytest.raises(ValueError, match=says):
        change(Config(model=Model(output=6)), changes)


def test_layers_of_a_stack_draw_apart() -> None:
    """All layers would keep the same units at the same steps."""
    config = Config(
        model=Model(sizes=(8, 9), dropout=0.5, embedding=0), zoneout=Zoneout(hidden=0.5)
    )
    model: Any = build(config, SYMBOLS)
    seeds: list[int] = []
    for layer in model.recurrent.layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: seeds.append(int(kwargs["seed"])), with_kwargs=True
        )
    y = model(TOKENS, seed=3).logits
    assert len(set(seeds)) == 2
    assert torch.equal(model(TOKENS, seed=3).logits, y)
    assert not torch.equal(model(TOKENS, seed=4).logits, y)


@pytest.mark.parametrize("cell", ["adaptive-lstm", "hyper-lstm", "hm-lstm", "surprisal-lstm"])
def test_a_system_is_a_layer_of_a_model(cell: Any) -> None:
    """A text in pieces is another text, or the softmax is not that of the prediction."""
    zoneout = Zoneout(cell=0.5, hidden=0.05) if cell == "adaptive-lstm" else Zoneout()
    layers = 2 if cell == "hm-lstm" else 1
    model: Any = build(
        Config(
            model=Model(
                cell, hidden=6, layers=layers, embedding=0, output=0 if cell[0] == "s" else 5
            ),
            zoneout=zoneout,
            system=System(hyper=3, least=0.3),
        ),
        SYMBOLS,
    ).eval()
    whole = model(TOKENS).logits
    torch.testing.assert_close(in_pieces(model), whole)
    assert all(state.shape[:2] == (1, 3) for state in model(TOKENS).state)
    if cell == "surprisal-lstm":
        assert model.softmax is model.recurrent.inner.softmax and model.recurrent.inner.least == 0.3
        torch.testing.assert_close(model.recurrent.inner(TOKENS)[0], whole)


def test_systems_keep_their_own_initial_values() -> None:
    """The scales of a norm, or heads that start at zero, would be orthogonal."""
    model: Any = build(
        Config(
            model=Model("adaptive-lstm", hidden=8, init="orthogonal", one_bias=True, embedding=0),
            zoneout=Zoneout(cell=0.5, hidden=0.05),
            system=System(hyper=4),
        ),
        SYMBOLS,
    )
    inner = model.recurrent.inner
    assert not inner.rates["cell"].weight.any() and inner.hyper.norm_hh_l0.eq(1).all()
    matrix = inner.main.weight_hh_l0
    torch.testing.assert_close(matrix.t() @ matrix, torch.eye(8))
    assert inner.main.bias_ih_l0[8:16].eq(1).all() and not inner.main.bias_hh_l0.requires_grad
    clock: Any = build(
        Config(model=Model("rnn", hidden=6, init="orthogonal", modules=(1, 2), embedding=0)), 7
    )
    matrix = clock.recurrent.parametrizations.weight_hh_l0.original
    torch.testing.assert_close(matrix.t() @ matrix, torch.eye(6))


def test_rates_inspired_by_clockwork_are_of_groups_of_units() -> None:
    """A unit would have the rate of another period."""
    (noise,) = noises(Config(model=Model(hidden=4, embedding=0), zoneout=Zoneout(periods=(1, 4))))
    rates = torch.tensor([0.0, 0.0, 0.75, 0.75])
    assert noise == zo.Zoneout(cell=rates, hidden=rates)


GPU = {  # models whose update has to be the same in a graph
    "adaptive": {"model.cell": "adaptive-lstm", "zoneout.cell": 0.5, "zoneout.hidden": 0.1},
    "hyper": {"model.cell": "hyper-lstm", "recurrent_dropout.rate": 0.2},
    "hm": {"model.cell": "hm-lstm", "model.layers": 3, "model.embedding": 6},
    "surprisal": {"model.cell": "surprisal-lstm"},
    "clockwork": {"model.cell": "rnn", "model.norm": "layer", "model.modules": [1, 2, 4]},
    "hierarchical": {"model.layers": 2, "zoneout.mask": "clock", "zoneout.periods": [1, 2]},
    "swapout": {"swapout.hidden_old": 0.3, "swapout.hidden_new": 0.1},
    "fast dropout": {"fast_dropout.hidden": 0.3},
    "awd": {
        "model.sizes": [16, 8],
        "model.embedding": 8,
        "model.tied": True,
        "weight_drop": 0.5,
        "variational_dropout.input": [0.2, 0.4],
        "variational_dropout.words": 0.1,
        "activation_penalty": 2.0,
        "change_penalty": 1.0,
        "batches.spread": 2.0,
        "optimizer.average_after": 1,
    },
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU)
def test_an_update_in_a_graph_is_the_update(name: str) -> None:
    """A graph cannot be captured, or computes other updates than the same calls without one."""
    changes = {
        "device": "cuda",
        "model.hidden": 16,
        "model.embedding": 0,
        "batches.kind": "streams",
    } | GPU[name]
    config = change(TINY, changes)
    data, cuda = load_data(config), torch.device("cuda")
    found = []
    for captured in (False, True):
        model = build(config, len(data.vocabulary)).to(cuda)  # type: ignore[union-attr]
        step = Step(model, make_feed(config, data, cuda), config, Processes(cuda))
        step.begin(0, 0, 0)
        if captured:
            step.capture()
        losses = []
        for number in range(4):
            if number == 2:  # the next updates are of another graph
                step.average.start()
            step()
            losses.append(step.nats.item())
        averages = (value.square().mean().item() for value in step.average.values.values())
        found.append([*losses, *averages])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


# --- schedules and epochs


def test_milestones_and_plateaus_divide_the_learning_rate() -> None:
    """A rate is divided one epoch too early or too late, or is not divided again."""
    lr = Optimizer(lr=1.0)
    config = Config(optimizer=lr, schedule=Schedule("milestones", at=(2, 3), by=10.0))
    rates = [learning_rates(config, epoch, 0, 1).item() for epoch in range(5)]
    assert rates == pytest.approx([1, 1, 0.1, 0.01, 0.01])
    config = Config(optimizer=lr, schedule=Schedule("plateau", after=2, by=50.0))
    assert learning_rates(config, 9, 0, 2, plateaus=2).tolist() == pytest.approx([1 / 2500] * 2)


def test_a_plateau_is_some_validations_without_a_new_best(tmp_path: Path) -> None:
    """The rate falls while validation improves, or a continued run has forgotten the plateau."""
    config = replace(
        TINY,
        optimizer=Optimizer("sgd", lr=1e-30),  # the first validation stays the best
        schedule=Schedule("plateau", after=2, by=10.0),
        epochs=6,
        log_every=1,
    )
    train(replace(config, epochs=3), tmp_path / "run")
    train(config, tmp_path / "run", resume=True)
    lines = [row for row in read_metrics(tmp_path / "run") if row["kind"] == "train"]
    rates = {row["epoch"]: row["lr"] for row in lines}
    updates = len(lines) // 6
    per_epoch = [lines[epoch * updates]["lr"] / 1e-30 for epoch in range(6)]
    assert rates and per_epoch == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01])


def test_a_checkpoint_from_before_plateaus_still_loads() -> None:
    """A run of an older version could not be continued."""
    assert State.from_json({"digest": "d", "update": 3}).plateaus == 0


def test_an_epoch_moves_the_slope_of_an_hm_lstm() -> None:
    """Its boundaries would stay soft for the whole training."""
    config = replace(TINY, model=Model("hm-lstm", hidden=4, layers=2, embedding=0))
    data: Any = load_data(config)
    model: Any = build(config, len(data.vocabulary))
    cpu = torch.device("cpu")
    Step(model, make_feed(config, data, cpu), config, Processes(cpu)).begin(10, 0, 0)
    assert model.recurrent.inner.slope.item() == pytest.approx(1.4)
