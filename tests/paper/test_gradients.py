"""Gradient flow: that the derivatives are those of the state at each step, through everything
after it.
"""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoneout as zo
from zoneout.paper import disk
from zoneout.paper.cli import main
from zoneout.paper.experiments import gradient_flow
from zoneout.paper.experiments.gradient_flow import (
    flow,
    gradients_of,
    half_in_last,
    mean_norms,
    measure,
    watched,
)
from zoneout.paper.experiments.recipes import RECIPES
from zoneout.paper.training import exit_codes
from zoneout.paper.training.config import (
    Batches,
    Config,
    Data,
    Evaluation,
    Model,
    Optimizer,
    Protocol,
    Zoneout,
    change,
)
from zoneout.paper.training.feeds import make_feed
from zoneout.paper.training.models import build, loss_of
from zoneout.paper.training.step import update_seeds
from zoneout.paper.training.train import load_data, train

TEXT = str(Path(__file__).parent / "golden" / "text.txt")
TINY = Config(
    data=Data(TEXT, limit=3000),
    batches=Batches(size=8, length=15),
    model=Model(hidden=6, layers=2, embedding=5),
    zoneout=Zoneout(cell=0.5, hidden=0.1),
    optimizer=Optimizer("adam", lr=0.01),
    evaluation=Evaluation(Protocol("chunks", length=15), Protocol("chunks", length=15)),
    epochs=1,
    updates=6,
    device="cpu",
)
T, B, I, H = 7, 3, 4, 5


pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


LAYERS: dict[str, Any] = {
    "plain": lambda: zo.LSTM(I, H, dtype=torch.float64),
    "zoneout": lambda: zo.LSTM(I, H, noise=zo.Zoneout(cell=0.5, hidden=0.2), dtype=torch.float64),
    "state dropout": lambda: zo.LSTM(I, H, noise=zo.StateDropout(cell=0.5), dtype=torch.float64),
    "learned start": lambda: zo.LSTM(
        I, H, noise=zo.RecurrentDropout(rate=0.5), learn_initial_state=True, dtype=torch.float64
    ),
    "two layers": lambda: zo.LSTM(
        I, H, 2, dropout=0.3, noise=zo.Zoneout(cell=0.5, hidden=0.2), dtype=torch.float64
    ),
    "both ways": lambda: zo.LSTM(
        I, H, bidirectional=True, noise=zo.Zoneout(cell=0.5), dtype=torch.float64
    ),
    "layer norm": lambda: zo.LSTM(
        I, H, norm="layer", noise=zo.Zoneout(cell=0.5), dtype=torch.float64
    ),
    "batch norm": lambda: zo.LSTM(I, H, norm=zo.RecurrentBatchNorm(T, 0.1), dtype=torch.float64),
    "GRU": lambda: zo.GRU(
        I, H, noise=[zo.Zoneout(hidden=0.2), zo.WeightNoise(std=0.1)], dtype=torch.float64
    ),
    "RNN": lambda: zo.RNN(
        I, H, noise=zo.VariationalDropout(input=0.3, hidden=0.3), dtype=torch.float64
    ),
    "reference": lambda: zo.LSTM(
        I, H, noise=zo.Zoneout(cell=0.5), backend="reference", dtype=torch.float64
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_watched_layer_computes_what_it_always_does(name: str) -> None:
    """The gradients are those of another model than the one that was trained."""
    layer, x = LAYERS[name](), inputs(T, B, I)
    twin = LAYERS[name]()
    twin.load_state_dict(layer.state_dict())
    y, state = layer(x, seed=9, examples=4, first_step=0)
    with watched(twin) as states:
        z, other = twin(x, seed=9, examples=4, first_step=0)
    torch.testing.assert_close(z, y, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(other, state, rtol=1e-10, atol=1e-12)
    for buffer in dict(layer.named_buffers()):  # batch norm has seen the same
        torch.testing.assert_close(
            twin.get_buffer(buffer), layer.get_buffer(buffer), rtol=1e-10, atol=1e-12
        )
    assert all(len(each) == T for each in states.values())
    assert "_run" not in vars(twin)


def test_lengths_and_resets_are_kept() -> None:
    """A padded batch, or one that is cut, gives other outputs while it is watched."""
    layer, x = LAYERS["zoneout"](), inputs(T, B, I)
    cuts = torch.zeros(T, B, dtype=torch.bool)
    cuts[3, 1] = True
    for options in (
        {"lengths": [7, 2, 4]},
        {"resets": cuts},
        {"lengths": [7, 2, 4], "return_cells": True},
    ):
        expected = layer(x, seed=1, **options)
        with watched(layer):
            found = layer(x, seed=1, **options)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def slowly(layer: Any, x: Tensor, seed: int, read: Tensor) -> dict[str, Tensor]:
    """The same by the obvious loop: single cells, states kept by hand, one layer above another
    at every step.
    """
    cells = [
        zo.LSTMCell(size, H, noise=layer.noise, layer=number, dtype=torch.float64)
        for number, size in enumerate([I] + [H] * (layer.num_layers - 1))
    ]
    for number, cell in enumerate(cells):
        for name, parameter in cell.named_parameters():
            parameter.data = getattr(layer, f"{name}_l{number}").data
    states = [(torch.zeros(B, H, dtype=torch.float64, requires_grad=True),) * 2 for _ in cells]
    kept: dict[str, list[Tensor]] = {f"l{n}.{s}": [] for n in range(len(cells)) for s in "hc"}
    loss = torch.zeros((), dtype=torch.float64)
    for t in range(T):
        below = x[t]
        for number, cell in enumerate(cells):
            h, c = (s.clone() for s in cell(below, states[number], seed=seed, step=t))
            for name, state in (("h", h), ("c", c)):
                state.retain_grad()
                kept[f"l{number}.{name}"].append(state)
            states[number], below = (h, c), h
        loss = loss + (below * read[t]).sum()
    loss.backward()
    return {
        n: torch.stack([torch.zeros(B, H) if s.grad is None else s.grad for s in each])
        for n, each in kept.items()
    }


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    "noise", [None, zo.Zoneout(cell=0.5, hidden=0.2), zo.StateDropout(cell=0.5)]
)
def test_the_gradients_are_those_of_the_obvious_loop(layers: int, noise: Any) -> None:
    """A path is left out, such as that through the layer above, or one is counted twice."""
    layer, x, read = (
        zo.LSTM(I, H, layers, noise=noise, dtype=torch.float64),
        inputs(T, B, I),
        inputs(T, B, H),
    )
    with watched(layer) as states:
        loss = (layer(x, seed=3)[0] * read).sum()
    found = gradients_of(loss, states)
    expected = slowly(layer, x, 3, read)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name].double(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    "noise", [None, zo.Zoneout(cell=0.5, hidden=0.2), zo.StateDropout(cell=0.5)]
)
def test_the_gradients_are_what_a_small_change_of_the_state_does(backend: str, noise: Any) -> None:
    """They are derivatives of something else: of the candidate, or without what follows from it."""
    layer = zo.LSTM(I, H, noise=noise, backend=backend, dtype=torch.float64)
    x, read, t, eps = inputs(T, B, I), inputs(T, B, H), 2, 1e-6
    with watched(layer) as states:
        loss = (layer(x, seed=3)[0] * read).sum()
    found = gradients_of(loss, states)
    with torch.no_grad():
        before, (h, c) = layer(x[: t + 1], seed=3)

        def rest(dh: Tensor, dc: Tensor) -> Tensor:
            """The loss when the state after step t is a little different; h_t is also what is
            read there.
            """
            y, _ = layer(x[t + 1 :], (h + dh, c + dc), seed=3, first_step=t + 1)
            return (
                (before[:t] * read[:t]).sum()
                + ((before[t] + dh) * read[t]).sum()
                + (y * read[t + 1 :]).sum()
            )

        zero = torch.zeros_like(h)
        assert abs(rest(zero, zero) - loss) < 1e-10
        for name, which in (("l0.h", 0), ("l0.c", 1)):
            for unit in range(H):
                move = zero.clone()
                move[..., unit] = eps
                up = rest(*((move, zero) if which == 0 else (zero, move)))
                down = rest(*((-move, zero) if which == 0 else (zero, -move)))
                slope = found[name][t][:, unit].sum().item()
                assert math.isclose(
                    slope, ((up - down) / (2 * eps)).item(), rel_tol=1e-6, abs_tol=1e-8
                )


def test_a_gradient_that_is_known() -> None:
    """The norms are not L2 norms over units, or not averaged over the batch, or the shares not
    of their sum.
    """
    layer = zo.RNN(1, 2, nonlinearity="relu", bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight_hh_l0.copy_(torch.eye(2) / 2)  # every step back halves the gradient
        layer.weight_ih_l0.fill_(1.0)
    with watched(layer) as states:
        y, _ = layer(torch.ones(3, 2, 1, dtype=torch.float64))
        loss = (y[-1] * torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)).sum()
    norms = mean_norms(gradients_of(loss, states)["l0.h"])
    assert norms.tolist() == [0.75, 1.5, 3.0]  # the mean of 5 and 1, halved and halved again
    assert flow(norms) == {"sum": 5.25, "share": [0.142857, 0.285714, 0.571429]}
    assert flow(torch.zeros(3)) == {"sum": 0.0, "share": [0.0, 0.0, 0.0]}
    with pytest.raises(disk.RunError, match="not finite"):
        flow(torch.tensor([math.nan]))
    assert half_in_last([0.0, 0.0]) == 0


def test_a_model_of_ones_own() -> None:
    """Only the models of the paper can be looked into, or only those whose weights are trained."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.GRU(4, 6))
    with pytest.raises(ValueError, match=r"zoneout\.convert"), watched(model):
        pass
    zo.convert(model, zo.Zoneout(hidden=0.1))
    model.requires_grad_(False)
    with watched(model) as states:
        loss = model(torch.randint(9, (11, 2)))[0][-1].square().sum()
    gradient = gradients_of(loss, states)["1.l0.h"]
    assert gradient.shape == (11, 2, 6) and gradient.abs().sum() > 0
    with pytest.raises(ValueError, match="one number"):
        gradients_of(torch.zeros(2), states)


def test_what_cannot_be_watched_says_so() -> None:
    """Wrong numbers come out without a word."""
    held = zo.LSTM(I, H, noise=zo.RecurrentDropout(rate=0.5, hold_output_gate=True))
    with pytest.raises(ValueError, match="output gate"), watched(held):
        held(torch.randn(T, B, I))
    both = zo.LSTM(I, H, bidirectional=True)
    with pytest.raises(ValueError, match="bidirectional"), watched(both):
        both(torch.randn(T, B, I), lengths=[7, 2, 4])
    assert both(torch.randn(T, B, I), lengths=[7, 2, 4])[0].shape == (T, B, 2 * H)


@pytest.mark.parametrize("kind", ["chunks", "streams"])
def test_the_batches_are_averaged(kind: str) -> None:
    """Only one batch counts, streams do not carry their state, or the model is measured without
    its masks.
    """
    config = change(TINY, {"batches.kind": kind, "model.layers": 1})
    data = load_data(config)
    model = build(config, len(data.vocabulary))  # type: ignore[union-attr]
    feed = make_feed(config, data, torch.device("cpu"))
    seeds = update_seeds(config.seed, config.epochs * feed.updates(), 2)
    model.train()
    state, each = None, []
    for row, seed in zip(feed.order(config.epochs), seeds):
        tokens, targets = feed.batch(row)
        with watched(model) as states:
            output = model(tokens, state, seed=seed, examples=0)
            loss, _ = loss_of(output, targets, config)
        each.append(mean_norms(gradients_of(loss, states)["recurrent.l0.c"]))
        state = tuple(s.detach() for s in output.state) if kind == "streams" else None
    found = measure(model, config, data, batches=2).norms["recurrent.l0.c"]
    torch.testing.assert_close(found, (each[0] + each[1]) / 2)
    with pytest.raises(ValueError, match="batches"):
        measure(model, config, data, batches=0)
    every = measure(model, config, data, batches=10**6)
    assert every.batches == feed.updates() and every.rows == feed.all_rows, (
        "what was asked for is not what was taken"
    )


# --- from the command line ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gradients") / "a run"
    train(TINY, folder)
    return folder


def test_of_a_run(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command measures something else than it says, or the file cannot be read again."""
    arguments = [str(trained), "--batches", "2", "--device", "cpu"]
    assert main.main(["gradients", *arguments, "--picture", str(tmp_path / "flow.svg")]) == 0
    said = capsys.readouterr().out
    assert "half of the norm lies in the last" in said and str(trained) in said
    record = gradient_flow.read_record(trained / "gradients.json")
    assert list(record["layers"]) == ["l0", "l1"] and list(record["layers"]["l1"]) == [
        "hidden",
        "cell",
    ]
    share = record["layers"]["l1"]["hidden"]["share"]
    assert len(share) == 14 and abs(sum(share) - 1) < 1e-4
    command = ["zoneout", "gradients", str(trained), "--weights", "best", "--batches", "2"]
    assert shlex.split(record["command"]) == command
    assert (tmp_path / "flow.svg").read_text().count("<svg") == 1

    first = (trained / "gradients.json").read_bytes()
    assert main.main(["gradients", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [json.loads(first)]
    assert (
        trained / "gradients.json"
    ).read_bytes() == first  # the same weights give the same numbers
    assert main.main(["gradients", *arguments, "--seed", "3"]) == exit_codes.WRONG_USE
    assert "--seed: it is for recipes" in capsys.readouterr().err
    assert (
        main.main(["gradients", *arguments, "--picture", str(tmp_path / "flow.jpg")])
        == exit_codes.WRONG_USE
    )
    said = capsys.readouterr()
    assert (
        "flow.jpg: expected a name that ends in .png" in said.err and not said.out
    )  # before the work, and not after


def test_of_a_recipe(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flow of a recipe's run goes where nobody looks for it, or one that is not there, or a
    trial, for it.
    """
    out, results = tmp_path / "out", tmp_path / "res"
    where = ["--out", str(out), "--results", str(results), "--batches", "1", "--device", "cpu"]
    assert main.main(["gradients", "gradient-flow", *where]) == exit_codes.FAILED
    assert "zoneout reproduce gradient_flow_unregularised --first-seed 1" in capsys.readouterr().err
    for name in (name for name in RECIPES if name.startswith("gradient_flow")):
        (out / name).mkdir(parents=True)
        (out / name / "seed-1").symlink_to(trained)
    assert main.main(["gradients", "gradient-flow", *where]) == exit_codes.FAILED
    assert (
        "is a trial of gradient_flow_unregularised" in capsys.readouterr().err
        and not results.exists()
    )
    monkeypatch.setattr(gradient_flow, "changes", lambda ours, theirs: [])
    assert main.main(["gradients", "gradient-flow", *where]) == 0
    record = gradient_flow.read_record(results / "gradient_flow_zoneout" / "gradients-seed-1.json")
    assert record["recipe"] == "gradient_flow_zoneout"
    assert record["command"].startswith("zoneout gradients gradient_flow_zoneout --seed 1")
    assert main.main(["gradients", "nonsense"]) == exit_codes.WRONG_USE
    assert "got 'nonsense'" in capsys.readouterr().err


def test_a_damaged_record_is_a_sentence(tmp_path: Path) -> None:
    """A file that was cut off shows as a traceback, or as an empty figure."""
    path = tmp_path / "gradients.json"
    for text in (
        "{",
        "[]",
        '{"format": 1, "layers": {}}',
        '{"format": 1, "layers": {"l0": {}}}',
        '{"format": 2}',
        '{"format": 1, "layers": {"l0": {"cell": {"share": ["a"]}}}}',
    ):
        path.write_text(text)
        with pytest.raises(disk.RunError, match="not a gradient flow that can be read"):
            gradient_flow.read_record(path)
