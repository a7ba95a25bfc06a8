"""With `recompute=True` a way back runs the steps again, piece by piece, and finds what it finds
otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_backends import INPUT, LAYERS, NOISES, STATES, everything

import zoneout as zo
from zoneout.ops.sequence import checkpointing as pieces
from zoneout.ops.sequence import passes

STEPS, BATCH, HIDDEN = 23, 5, 6


def two(name: str, dtype: torch.dtype, noise: Any, **options: Any) -> tuple[Any, Any]:
    """A layer that keeps, and the same one that runs again."""
    options = {"noise": noise, "dtype": dtype, **options}
    keeps, again = (
        LAYERS[name](INPUT, HIDDEN, recompute=recompute, **options) for recompute in (False, True)
    )
    again.load_state_dict(keeps.state_dict())
    return keeps, again


def states(layer: Any) -> Any:
    """Random ones to begin with."""
    count = len(layer.suffixes())
    h, c = (torch.randn(count, BATCH, size) for size in (layer.output_size, HIDDEN))
    h, c = h.to(layer.weight_hh_l0), c.to(layer.weight_hh_l0)
    return (h, c) if layer.kind == "lstm" else h


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "lengths": {"lengths": [STEPS, 4, 0, 17, 9]},
    "packed": {"packed": [STEPS, 4, 1, 17, 9]},
    "resets": {
        "resets": torch.rand(STEPS, BATCH, generator=torch.Generator().manual_seed(3)) < 0.3
    },
    "places": {"examples": [4, 9, 1, 0, 7], "first_step": 11},
}
WITH: dict[str, dict[str, Any]] = {
    "one layer": {},
    "layers and directions": {
        "num_layers": 2,
        "bidirectional": True,
        "dropout": 0.3,
        "learn_initial_state": True,
    },
    "layer norm": {"norm": "layer"},
    "batch norm": {"norm": zo.RecurrentBatchNorm(STEPS)},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("options", WITH)
@pytest.mark.parametrize(
    ("name", "noise"),
    [
        ("lstm", "zoneout-unit"),
        ("lstm", "held-gate"),
        *((name, "together") for name in ("lstm", "gru", "rnn")),
    ],
)
def test_finds_the_same(name: str, noise: str, options: str, how: str) -> None:
    """A piece begins at the wrong step, state or length, or a derivative misses a piece."""
    torch.manual_seed(0)
    keeps, again = two(name, torch.float64, NOISES[noise](STATES[name]), **WITH[options])
    x, hx = torch.randn(STEPS, BATCH, INPUT, dtype=torch.float64), states(keeps)
    want, got = (everything(layer, x, hx, HOW[how]) for layer in (keeps, again))
    assert want.keys() == got.keys()
    for key, value in want.items():
        torch.testing.assert_close(
            got[key], value, rtol=1e-9, atol=1e-11, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("one_hot", [False, True])
def test_other_types(dtype: torch.dtype, one_hot: bool) -> None:
    """In half types, with a projection or of one-hot rows a derivative is rounded more than it
    has to be, or lost.
    """
    keeps, again = two("lstm", dtype, zo.Zoneout(cell=0.5, hidden=0.2), proj_size=4)
    x: Any = (
        torch.randint(INPUT, (STEPS, BATCH))
        if one_hot
        else torch.randn(STEPS, BATCH, INPUT).to(dtype)
    )
    x = x if one_hot else x.requires_grad_()
    grads = []
    for layer in (keeps, again):
        y, (h, c), cells = layer(x, seed=1, return_cells=True)
        wanted = [*([] if one_hot else [x]), *layer.parameters()]
        grads.append(torch.autograd.grad(y.sum() + h.sum() + c.sum() + cells.sum(), wanted))
    for want, got in zip(*grads, strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        assert (got - want).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * want.norm()


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """A GPU's loop, whose states and numbers differ in type, is cut where it cannot be."""
    keeps, again = two(name, dtype, NOISES["zoneout-unit"](STATES[name]))
    x, hx = torch.randn(STEPS, BATCH, INPUT).to(dtype), states(keeps)
    want, got = (everything(layer, x, hx, {}) for layer in (keeps, again))
    for key, value in want.items():
        assert (got[key] - value).norm() <= (
            1e-5 if dtype == torch.float32 else 1e-2
        ) * value.norm(), key
    assert (
        torch.equal(got["y"], want["y"]) or name == "gru"
    )  # whose h is a mixture of the one before, which is rounded


def kept_numbers(layer: Any, x: Any) -> int:
    """How many numbers of four bytes a call keeps for its way back, beside its parameters and
    its input.
    """
    found: dict[int, int] = {}
    own = {v.untyped_storage().data_ptr() for v in (x, *layer.parameters())}

    def pack(v: torch.Tensor) -> torch.Tensor:
        memory = v.untyped_storage()  # all of what a view is one of
        if memory.data_ptr() not in own:
            found[memory.data_ptr()] = memory.nbytes() // 4
        return v

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        layer(x)
    return sum(found.values())


def test_keeps_little() -> None:
    """It keeps gates, cells or outputs of all steps after all."""
    keeps, again = two("lstm", torch.float32, zo.Zoneout(cell=0.5, hidden=0.05))
    x = torch.randn(400, BATCH, INPUT, requires_grad=True)
    each = BATCH * HIDDEN
    assert kept_numbers(keeps, x) >= 400 * each * 6  # h, c and four gates
    assert kept_numbers(again, x) <= 2 * pieces.FEW * each + 4 * each + 100


@pytest.mark.usefixtures("emulated")
def test_keeps_little_on_a_gpu() -> None:
    """The state before a piece is a view of all states of the piece before."""
    keeps, again = two("lstm", torch.bfloat16, zo.Zoneout(cell=0.5, hidden=0.05))
    x = torch.randn(100, BATCH, INPUT, dtype=torch.bfloat16, requires_grad=True)
    each = BATCH * HIDDEN
    assert kept_numbers(keeps, x) >= 100 * each * 3  # gates and h in half as many bytes
    assert kept_numbers(again, x) <= 2 * pieces.FEW * each + 4 * each + 100


def test_runs_the_steps_again_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way back has the gates of all steps at once."""
    seen = []
    forward = passes.forward
    monkeypatch.setattr(passes, "forward", lambda r: seen.append(r.steps) or forward(r))
    layer = zo.LSTM(3, HIDDEN, recompute=True)
    y, _ = layer(torch.randn(100, BATCH, 3))
    assert seen == [13] * 7 + [9]
    y.sum().backward()
    assert seen[8:] == [9] + [13] * 7


def test_few_rows_of_large_weights_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of the weights' derivatives for every piece takes more memory than the pieces save."""
    seen = []
    forward = passes.forward
    monkeypatch.setattr(passes, "forward", lambda r: seen.append(r.steps) or forward(r))
    layer = zo.LSTM(60, 70, recompute=True)
    layer(torch.randn(129, 2, 60))[0].sum().backward()  # 258 rows, 130 columns
    assert seen == [129, 129]
    layer(torch.randn(130, 2, 60))[0].sum().backward()
    assert len(seen) > 4


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("lstm", torch.float32, {}),
        ("lstm", torch.bfloat16, {"num_layers": 2}),
        ("gru", torch.float32, {"norm": zo.RecurrentBatchNorm(60)}),
    ],
    ids=["plain", "half type", "batch norm"],
)
def test_compiled(name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """A compiled model keeps what its steps found after all, or takes the derivatives of another
    pass.
    """
    torch._dynamo.reset()
    keeps, again = two(name, dtype, NOISES["zoneout-unit"](STATES[name]), **options)
    compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
    for steps in (40, 60, 50):  # from the second on they are a symbol
        x, hx = torch.randn(steps, BATCH, INPUT).to(dtype), states(keeps)
        call = {"lengths": torch.tensor([steps, 4, 0, 17, 9])}
        want, got = (everything(layer, x, hx, call) for layer in (keeps, compiled))
        got = {key.replace("_orig_mod.", ""): value for key, value in got.items()}
        for key, value in want.items():
            assert (got[key] - value).norm() <= (
                1e-5 if dtype == torch.float32 else 1e-2
            ) * value.norm(), key
    x = torch.randn(60, BATCH, INPUT, dtype=dtype, requires_grad=True)
    between = (
        60 * BATCH * HIDDEN * (options.get("num_layers", 1) - 1)
    )  # the outputs of a layer are the next one's input
    assert (
        kept_numbers(compiled, x) <= between + 4 * BATCH * HIDDEN + 100 < kept_numbers(keeps, x) / 3
    )


def test_transformed() -> None:
    """`torch.func` takes the derivatives of another pass."""
    keeps, again = two("lstm", torch.float64, zo.Zoneout(cell=0.5, hidden=0.2))
    x = torch.randn(4, STEPS, 1, INPUT, dtype=torch.float64)

    def loss(layer: Any, weights: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        y, _ = torch.func.functional_call(layer, weights, (one,), {"seed": 3})
        return y.square().sum()

    def each(layer: Any) -> dict[str, torch.Tensor]:
        gradient = torch.func.grad(lambda weights, one: loss(layer, weights, one))
        return torch.func.vmap(gradient, in_dims=(None, 0))(dict(layer.named_parameters()), x)

    want, got = each(keeps), each(again)
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-11)


def test_is_an_option_like_others() -> None:
    """It cannot be seen, set later, copied, or refuses what a layer without it refuses."""
    layer = zo.GRU(3, 4, recompute=True)
    assert "recompute=True" in repr(layer) and "recompute" not in repr(zo.GRU(3, 4))
    layer.recompute = False
    assert "recompute" not in repr(layer)
    layer.recompute = True
    x = torch.randn(30, 2, 3, requires_grad=True)
    y, _ = layer(x)
    rows = torch.eye(3, dtype=y.dtype)[:, None, None, :1].expand(3, *y.shape[:2], 4)
    (many,) = torch.autograd.grad(y, x, rows, is_grads_batched=True)
    assert many.shape == (3, *x.shape)
