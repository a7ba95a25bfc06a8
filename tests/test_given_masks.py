"""Masks that are not drawn inside the loop: rates of each step, clocks, swapout, and depth.

Values are those of the equations in NumPy, and derivatives those of complex steps through them.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import emulator  # noqa: F401 (the fixture `emulated`)
import numpy as np
import oracle
import philox_numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import zoneout as zo
from zoneout.cells import PUBLISHED
from zoneout.draws import Draw
from zoneout.ops import cpu, cuda
from zoneout.ops.cpu import native
from zoneout.ops.cpu.masks import bits_of
from zoneout.streams import Rule

T, B, I, H = 6, 4, 3, 8
LENGTHS = [6, 2, 5, 1]
KINDS: dict[str, Any] = {"lstm": zo.LSTM, "gru": zo.GRU, "rnn_tanh": zo.RNN}
DEVICES = ["reference", "cpu", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def make(request, monkeypatch):
    """A function that makes a layer of a backend, in the best precision that it has."""
    name = request.param
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee")
    if name == "emulated":
        request.getfixturevalue("emulated")
    if name == "cpu" and native.load() is None:
        pytest.skip(f"no compiled loop here: {native.why_not()}")

    def made(kind: Any, *sizes: int, **options: Any) -> Any:
        backend = {"emulated": "cpu"}.get(name, name)
        layer = kind(*sizes, backend=backend, **options)
        return layer.cuda() if name == "cuda" else layer.double() if name != "emulated" else layer

    made.tolerance = 1e-9 if name in ("reference", "cpu") else 1e-5  # type: ignore[attr-defined]
    return made


def states_of(kind: str) -> tuple[str, ...]:
    return ("hidden", "cell") if kind == "lstm" else ("hidden",)


def numpy_run(layer: Any, x: Tensor, noise: oracle.Noise, **call: Any) -> Any:
    """One layer forwards in NumPy."""
    a = oracle.values(layer)
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    weights = oracle.Weights(*(a[n] for n in names))
    cell = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "rnn_tanh"}[layer.mode]
    zero = np.zeros((x.shape[1], layer.hidden_size))
    return oracle.run(
        cell, x.detach().cpu().double().numpy(), zero, zero if cell == "lstm" else None, weights,
        noise, **call,
    )  # fmt: skip


def close(got: Tensor, want: Any, tolerance: float) -> None:
    torch.testing.assert_close(
        got.detach().cpu().double(), torch.as_tensor(want).double(), rtol=tolerance, atol=tolerance
    )


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


SHAPES = [(T, B, H), (T, 1, H), (1, B, 1), (T, B, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rates_of_each_step(kind, shape, make):
    """A rate belongs to another step, row or unit; or the gradient of a rate is wrong."""
    layer = make(KINDS[kind], I, H, noise=zo.Zoneout(mask="rate"))
    like = layer.weight_ih_l0
    x = uniform(T, B, I).to(like)
    rates = {
        name: (uniform(*shape) * (k + 1) / 2).to(like) for k, name in enumerate(states_of(kind))
    }
    leaves = {name: v.clone().requires_grad_() for name, v in rates.items()}
    weights = uniform(T, B, H).to(like)
    for training in (True, False):  # the rate is the mask in both
        layer.train(training)
        y = layer(x, rates=leaves)[0]
        every = {
            name: np.broadcast_to(v.cpu().double().numpy(), (T, B, H)) for name, v in rates.items()
        }
        close(y, numpy_run(layer, x, oracle.Noise(**every)).y, make.tolerance)
        grads = torch.autograd.grad((y * weights).sum(), [*leaves.values()])
        for name, grad in zip(rates, grads):
            direction = torch.randn(shape, dtype=torch.float64)
            moved = every | {
                name: every[name] + 1e-30j * np.broadcast_to(direction.numpy(), (T, B, H))
            }
            slope = (
                numpy_run(layer, x, oracle.Noise(**moved)).y.imag / 1e-30 * weights.cpu().numpy()
            ).sum()
            got = (grad.cpu().double() * direction).sum()
            close(got, slope, 10 * make.tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_masks_of_such_rates(kind, make):
    """The mask of a rate that changes from step to step is not the one of the project's rule."""
    layer = make(KINDS[kind], I, H, noise=zo.Zoneout(hidden=0.1))
    like = layer.weight_ih_l0
    x, ids = uniform(T, B, I).to(like), [7, 3, 11, 0]
    rates = {name: uniform(T, B, H).to(like) for name in states_of(kind)}
    y = layer(x, seed=5, examples=ids, first_step=9, rates=rates)[0]
    bits = {n: philox_numpy.bits(n, "unit", 5, range(9, 9 + T), ids, H) for n in rates}
    masks = {n: bits[n] < np.rint(v.cpu().double().numpy() * 65536) for n, v in rates.items()}
    close(
        y,
        numpy_run(layer, x, oracle.Noise(**{n: m * 1.0 for n, m in masks.items()})).y,
        make.tolerance,
    )
    layer.eval()
    noise = oracle.Noise(**{n: v.cpu().double().numpy() for n, v in rates.items()})
    close(layer(x, rates=rates)[0], numpy_run(layer, x, noise).y, make.tolerance)


def test_the_gradient_of_a_drawn_mask_is_straight_through(make):
    """A learned rate gets another gradient than its mask; or a detached one gets any."""
    layer = make(zo.LSTM, I, H, noise=zo.Zoneout(hidden=0.1, cell=0.1))
    x = uniform(T, B, I).to(layer.weight_ih_l0)
    rates = {n: uniform(T, B, H).to(x).requires_grad_() for n in ("hidden", "cell")}
    y = layer(x, seed=5, rates=rates)[0]
    drawn = torch.autograd.grad(y.square().sum(), [*rates.values()])
    masks = {
        n: torch.from_numpy(
            philox_numpy.bits(n, "unit", 5, range(T), range(B), H)
            < np.rint(v.detach().cpu().double().numpy() * 65536)
        ).to(x).requires_grad_()
        for n, v in rates.items()
    }  # fmt: skip
    layer.noise = zo.Zoneout(mask="rate")
    again = layer(x, rates=masks)[0]
    assert torch.equal(again, y)
    given = torch.autograd.grad(again.square().sum(), [*masks.values()])
    assert all(map(torch.equal, drawn, given))
    assert all(v.abs().sum() > 0 for v in given)
    layer.noise = zo.Zoneout(hidden=0.1)
    y = layer(x, seed=5, rates={n: v.detach() for n, v in rates.items() if n == "hidden"})[0]
    assert torch.autograd.grad(y.sum(), rates["hidden"], allow_unused=True) == (None,)


def periods() -> Tensor:
    return torch.tensor([1, 1, 2, 2, 3, 3, 7, 7])


@pytest.mark.parametrize("kind", KINDS)
def test_a_clock(kind, make):
    """A unit is updated at other steps than the multiples of its period, or only in training."""
    layer = make(KINDS[kind], I, H, noise=zo.Zoneout(mask="clock", periods=periods()))
    x = uniform(T, B, I).to(layer.weight_ih_l0)
    for first_step in (0, 4):
        step = np.arange(first_step, first_step + T)[:, None, None]
        held = np.broadcast_to(step % periods().numpy() != 0, (T, B, H)) * 1.0
        noise = oracle.Noise(**dict.fromkeys(states_of(kind), held))
        want = numpy_run(layer, x, noise, lengths=LENGTHS).y
        for training in (True, False):
            layer.train(training)
            y = layer(x, lengths=LENGTHS, first_step=first_step)[0]
            close(y, want, make.tolerance)
    drawn = zo.masks(layer.noise, 1, T, B, H, first_step=4, cell=layer.definition)
    assert all(np.array_equal(mask, held) for mask in drawn.values())
    packed = pack_padded_sequence(x, torch.tensor(LENGTHS), enforce_sorted=False)
    assert torch.equal(pad_packed_sequence(layer(packed, first_step=4)[0])[0], y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", ["unit", "step", "shared"])
def test_swapout(kind, mask, make):
    """One of the two masks is applied to the wrong value, or is that of another state."""
    rates = {"hidden_old": 0.6, "hidden_new": 0.4}
    rates |= {"cell_old": 0.3, "cell_new": 0.2} if kind == "lstm" else {}
    layer = make(KINDS[kind], I, H, noise=zo.Swapout(**rates, mask=mask))
    x = uniform(T, B, I).to(layer.weight_ih_l0)
    masks = zo.masks(layer.noise, 5, T, B, H)
    for name, rate in rates.items():
        state, _, value = name.rpartition("_")
        stream = state if value == "old" else f"drop_{state}"
        want = philox_numpy.mask(stream, mask, rate, 5, range(T), range(B), H)
        assert np.array_equal(masks[stream], np.broadcast_to(want, (T, B, H)))
    terms = {
        (
            "add_" + n.removesuffix("_old")
            if n.endswith("_old")
            else "drop_" + n.removesuffix("_new")
        ): n
        for n in rates
    }
    drawn = {
        term: masks[
            n.removesuffix("_old") if n.endswith("_old") else f"drop_{n.removesuffix('_new')}"
        ].numpy()
        * 1.0
        for term, n in terms.items()
    }
    close(layer(x, seed=5)[0], numpy_run(layer, x, oracle.Noise(**drawn)).y, make.tolerance)
    layer.eval()
    mean = {term: np.full((T, B, H), rates[n]) for term, n in terms.items()}
    close(layer(x)[0], numpy_run(layer, x, oracle.Noise(**mean)).y, make.tolerance)


def test_learned_rates_of_swapout(make):
    """The gradient of one of the two masks is that of the other, or of another state."""
    rates = {"hidden_old": 0.6, "hidden_new": 0.4, "cell_old": 0.3, "cell_new": 0.2}
    layer = make(zo.LSTM, I, H, noise=zo.Swapout(**rates)).eval()
    x = uniform(T, B, I).to(layer.weight_ih_l0)
    terms = dict(zip(("hidden", "drop_hidden", "cell", "drop_cell"),
                     ("add_hidden", "drop_hidden", "add_cell", "drop_cell")))  # fmt: skip
    leaves = {n: (uniform(T, B, H) / (k + 1)).to(x).requires_grad_() for k, n in enumerate(terms)}
    y = layer(x, rates=leaves)[0]
    every = {terms[n]: v.detach().cpu().double().numpy() for n, v in leaves.items()}
    close(y, numpy_run(layer, x, oracle.Noise(**every)).y, make.tolerance)
    weights = uniform(T, B, H)
    for name, grad in zip(
        leaves, torch.autograd.grad((y * weights.to(y)).sum(), [*leaves.values()])
    ):
        way = torch.randn(T, B, H, dtype=torch.float64)
        moved = every | {terms[name]: every[terms[name]] + 1e-30j * way.numpy()}
        slope = numpy_run(layer, x, oracle.Noise(**moved)).y.imag / 1e-30
        close(
            (grad.cpu().double() * way).sum(), (slope * weights.numpy()).sum(), 10 * make.tolerance
        )


def test_special_cases_of_swapout():
    """Zoneout, dropout of the new value and the residual recurrence are not what they should be."""
    plain = zo.GRU(I, H)
    x = torch.randn(T, B, I)

    def same(noise: Any, other: Any) -> bool:
        one, two = copy.deepcopy(plain), copy.deepcopy(plain)
        one.noise, two.noise = noise, other
        return torch.allclose(one(x, seed=5)[0], two(x, seed=5)[0], atol=1e-6)

    assert same(
        zo.Swapout(hidden_old=0.4, hidden_new=0.4, mask="shared"),
        zo.Zoneout(hidden=0.4, mask="shared"),
    )
    assert same(zo.Swapout(), None)
    assert same(zo.Swapout(hidden_old=1.0, hidden_new=1.0), zo.Zoneout(hidden=1.0))
    plain.noise = zo.Swapout(hidden_old=1.0)  # h = old + new
    h, total = torch.zeros(1, B, H), torch.zeros(1, B, H)
    y = plain(x)[0]
    step = copy.deepcopy(plain)
    step.noise = None
    for t in range(T):
        total = step(x[t : t + 1], h)[0] + h
        assert torch.allclose(y[t], total[0], atol=1e-6)
        h = total


@pytest.mark.parametrize("bidirectional", [False, True])
def test_depth(bidirectional):
    """The outputs of a layer are replaced by others than its inputs, or in the first layer too."""
    noise = zo.Zoneout(depth=[0.9, 0.4, 0.7], hidden=0.1)
    layer = zo.LSTM(I, H, 3, bidirectional=bidirectional, dropout=0.2, noise=noise).double()
    x, directions = uniform(T, B, I), 2 if bidirectional else 1
    y = layer(x, seed=5)[0]
    parts = []
    for k in range(3):
        one = zo.LSTM(I if k == 0 else H * directions, H, bidirectional=bidirectional).double()
        names = {
            n.replace(f"_l{k}", "_l0"): v for n, v in layer.state_dict().items() if f"_l{k}" in n
        }
        one.load_state_dict(names)
        parts.append(one)
    below = None
    for k, one in enumerate(parts):  # the layers one by one, with the masks of the stack
        masks = [
            {n: torch.as_tensor(philox_numpy.mask(n, "unit", rate, 5, range(T), range(B), H, k, d))
             for n, rate in (("hidden", 0.1), ("depth", noise.depth[k]), ("dropout", 0.2))}
            for d in range(directions)
        ]  # fmt: skip
        inputs = x
        if below is not None:
            kept = torch.cat(
                [
                    ~torch.as_tensor(
                        philox_numpy.mask(
                            "dropout", "unit", 0.2, 5, range(T), range(B), H, k - 1, d
                        )
                    )
                    for d in range(directions)
                ],
                -1,
            )
            inputs = below * kept * (65536 / (65536 - round(0.2 * 65536)))
        halves = []
        for d in range(directions):
            alone = zo.LSTM(one.input_size, H, noise=zo.Zoneout(mask="rate")).double()
            alone.load_state_dict(
                {
                    n: v
                    for n, v in (
                        (m.replace("_reverse", ""), w)
                        for m, w in one.state_dict().items()
                        if m.endswith("_reverse") == bool(d)
                    )
                }
            )
            h = masks[d]["hidden"].double()
            flip = (lambda v: v.flip(0)) if d else (lambda v: v)
            out = flip(alone(flip(inputs), rates={"hidden": flip(h)})[0])
            if below is not None:
                out = torch.where(masks[d]["depth"], below[..., d * H : (d + 1) * H], out)
            halves.append(out)
        below = torch.cat(halves, -1)
    close(y, below.detach(), 1e-9)
    layer.eval()
    layer.noise = zo.Swapout(depth_old=1.0, depth_new=0.0)  # residual over depth
    first, *others = parts
    below = first.eval()(x)[0]
    for one in others:
        below = below + one.eval()(below)[0]
    close(layer(x)[0], below.detach(), 1e-9)


# --- forms of a rate ------------------------------------------------------------------------------


def test_layouts_of_rates():
    """A rate is read in another layout than the input."""
    layer = zo.LSTM(I, H, noise=zo.Zoneout(hidden=0.1)).double()
    x, rate = uniform(T, B, I), uniform(T, B, H)
    want = layer(x, seed=5, rates={"hidden": rate})[0]
    turned = copy.deepcopy(layer)
    turned.batch_first = True
    got = turned(x.transpose(0, 1), seed=5, rates={"hidden": rate.transpose(0, 1)})[0]
    assert torch.equal(got.transpose(0, 1), want)
    alone = layer(x[:, 2], seed=5, examples=[2], rates={"hidden": rate[:, 2]})[0]
    assert torch.allclose(alone, want[:, 2])
    lengths = torch.tensor([2, 6, 1, 5])
    padded = layer(x, seed=5, lengths=lengths, rates={"hidden": rate})[0]
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    got = pad_packed_sequence(layer(packed, seed=5, rates={"hidden": rate})[0])[0]
    assert torch.allclose(got, padded)
    assert torch.equal(layer(x, seed=5, rates={"h": rate})[0], want)  # by the state's name
    half = rate[:, :, :1].round()  # a mask
    bools, numbers = (layer(x, rates={"hidden": v})[0] for v in (half.bool(), half))
    assert torch.equal(bools, numbers)


def test_one_rate_a_layer_and_direction():
    """A stack reads one layer's rates in another, or the reversed direction from the wrong end."""
    layer = zo.GRU(I, H, 2, bidirectional=True, noise=zo.Zoneout(hidden=0.3)).double()
    x, rate = uniform(T, B, I), uniform(T, B, H)
    y = layer(x, seed=5, rates={"hidden": [rate, 0.25]})[0]
    first = zo.GRU(I, H, bidirectional=True, noise=zo.Zoneout(hidden=0.3)).double()
    first.load_state_dict({n: v for n, v in layer.state_dict().items() if "_l0" in n})
    below = first(x, seed=5, rates={"hidden": rate})[0]
    masks = [philox_numpy.bits("hidden", "unit", 5, range(T), range(B), H, 0, d) for d in (0, 1)]
    limits = np.rint(rate.numpy() * 65536)
    first.noise = zo.Zoneout(mask="rate")
    for d in (0, 1):
        given = torch.from_numpy((masks[d] < limits) * 1.0)
        half = first(x, rates={"hidden": given})[0]
        assert torch.allclose(half[..., d * H : (d + 1) * H], below[..., d * H : (d + 1) * H])
    second = zo.GRU(2 * H, H, bidirectional=True, noise=zo.Zoneout(hidden=[0.25])).double()
    second.load_state_dict(
        {n.replace("_l1", "_l0"): v for n, v in layer.state_dict().items() if "_l1" in n}
    )
    draws = {
        d: philox_numpy.mask("hidden", "unit", 0.25, 5, range(T), range(B), H, 1, d) for d in (0, 1)
    }
    second.noise = zo.Zoneout(mask="rate")
    for d in (0, 1):
        half = second(below, rates={"hidden": torch.from_numpy(draws[d] * 1.0)})[0]
        assert torch.allclose(half[..., d * H : (d + 1) * H], y[..., d * H : (d + 1) * H])


def test_a_module_computes_the_rate():
    """A module is called with something else than the layer's input, or gets no gradient."""
    gate = nn.Sequential(nn.Linear(I, H), nn.Sigmoid())
    layer = zo.LSTM(I, H, noise=zo.Zoneout(mask="rate"))
    x = torch.randn(T, B, I)
    y = layer(x, rates={"hidden": gate})[0]
    y.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in gate.parameters())
    assert torch.equal(y, layer(x, rates={"hidden": gate(x)})[0])
    step = zo.LSTMCell(I, H, noise=zo.Zoneout(mask="rate"))
    step.load_state_dict({n.removesuffix("_l0"): v for n, v in layer.state_dict().items()})
    state = None
    for t in range(T):
        state = step(x[t], state, rates={"hidden": gate})
        assert torch.allclose(state[0], y[t], atol=1e-6)


@pytest.mark.parametrize(
    "noise",
    [
        zo.Zoneout(hidden=0.1, cell=0.2),
        zo.Zoneout(mask="clock", periods=3),
        zo.Swapout(hidden_old=0.5, cell_new=0.5),
    ],
)
def test_cells_make_the_steps_of_a_layer(noise):
    """A decoder draws other masks than the layer."""
    layer, step = zo.LSTM(I, H, noise=noise), zo.LSTMCell(I, H, noise=noise)
    step.load_state_dict({n.removesuffix("_l0"): v for n, v in layer.state_dict().items()})
    x, rate = torch.randn(T, B, I), torch.rand(T, B, H)
    changing = isinstance(noise, zo.Zoneout) and noise.mask == "unit"
    y = layer(x, seed=5, rates={"cell": rate} if changing else None)[0]
    state = None
    for t in range(T):
        rates = {"cell": rate[t]} if changing else None
        state = step(x[t], state, seed=5, step=t, rates=rates)
        assert torch.allclose(state[0], y[t], atol=1e-6)
    one = step(
        x[0, 1], seed=5, step=0, examples=[1], rates={"cell": rate[0, 1]} if changing else None
    )
    assert torch.allclose(one[0], y[0, 1], atol=1e-6)


# --- torch's tools --------------------------------------------------------------------------------


def learned(layer: Any, x: Tensor, rate: Tensor) -> Tensor:
    return layer(x, seed=5, rates={"hidden": rate})[0].square().sum()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, of forward mode
def test_compile_vmap_and_transforms():
    """A compiler or a transform loses the gradient of a rate."""
    layer = zo.GRU(I, H, noise=zo.Zoneout(hidden=0.1))
    x, rate = torch.randn(T, B, I), torch.rand(T, B, H, requires_grad=True)
    (want,) = torch.autograd.grad(learned(layer, x, rate), rate)
    compiled = torch.compile(learned, fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(layer, x, rate), rate)
    assert torch.allclose(got, want, atol=1e-6)
    got = torch.func.grad(lambda r: learned(layer, x, r))(rate.detach())
    assert torch.allclose(got, want, atol=1e-6)
    many = torch.stack([rate.detach(), rate.detach() / 2])
    both = torch.func.vmap(lambda r: learned(layer, x, r))(many)
    assert torch.allclose(both, torch.stack([learned(layer, x, r) for r in many]))
    slow = zo.GRU(I, H, noise=zo.Zoneout(mask="rate"), backend="reference")
    slow.load_state_dict(layer.state_dict())
    change = torch.randn(T, B, H)
    _, slope = torch.func.jvp(lambda r: learned(slow, x, r), (rate.detach(),), (change,))
    exact = torch.autograd.grad(learned(slow, x, rate), rate)[0]
    assert torch.allclose(slope, (exact * change).sum(), rtol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_gradcheck(backend):
    """A derivative of a learned rate is not that of finite differences."""
    layer = zo.LSTM(I, H, noise=zo.Zoneout(mask="rate"), backend=backend).double()
    x = uniform(3, 2, I).requires_grad_()
    rates = [uniform(3, 2, H).requires_grad_(), uniform(3, 1, 1).requires_grad_()]
    call = lambda x, h, c: layer(x, rates={"hidden": h, "cell": c})[0]  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, *rates))
    if backend == "reference":
        assert torch.autograd.gradgradcheck(call, (x, *rates))


def test_recomputed_steps():
    """A pass in pieces reads the rates of other steps, or adds up their gradients."""
    steps = 64
    layer = zo.LSTM(I, H, noise=zo.Zoneout(mask="rate")).double()
    again = zo.LSTM(I, H, noise=zo.Zoneout(mask="rate"), recompute=True).double()
    again.load_state_dict(layer.state_dict())
    x, rate = uniform(steps, B, I).requires_grad_(), uniform(steps, B, H).requires_grad_()
    lengths = torch.tensor([64, 3, 40, 17])
    for call in ({}, {"lengths": lengths}):
        results = []
        for one in (layer, again):
            y = one(x, rates={"cell": rate}, **call)[0]
            results.append((y, *torch.autograd.grad(y.square().sum(), [x, rate])))
        for a, b in zip(*results):
            torch.testing.assert_close(a, b)


def test_half_precision_and_autocast():
    """A mask in half precision would keep other units than one in float32."""
    layer = zo.LSTM(I, H, noise=zo.Zoneout(hidden=0.1))
    x, rate = torch.randn(T, B, I), torch.rand(T, B, H)
    whole = layer(x, seed=5, rates={"hidden": rate})[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = layer(x, seed=5, rates={"hidden": rate})[0]
    half = copy.deepcopy(layer).bfloat16()(x.bfloat16(), seed=5, rates={"hidden": rate})[0]
    for got in (mixed, half):
        assert torch.allclose(got.float(), whole, atol=0.03)


def test_copies_and_pickles():
    """A layer with a clock or with swapout does not come back from a copy."""
    for noise in (
        zo.Zoneout(mask="clock", periods=[2, torch.arange(1, H + 1)]),
        zo.Swapout(hidden_old=0.5),
    ):
        layer = zo.GRU(I, H, 2, noise=noise)
        x = torch.randn(T, B, I)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert other.noise == noise and torch.equal(other(x, seed=1)[0], layer(x, seed=1)[0])
        assert not list(layer.buffers())


@pytest.mark.parametrize("kind", ["unit", "shared", "step", "sequence"])
def test_bits_drawn_in_c(kind):
    """The bits of another coordinate are compared with a rate, in rows of many units or few."""
    ids = torch.tensor([3, 0, 7])
    rate = torch.tensor(0.5, dtype=torch.float64)
    for units in (5, 1030):
        draw = Draw(Rule("hidden", "previous", kind, "expectation"), rate, torch.tensor(11), 3)
        got = bits_of(draw, torch.arange(2, 6), ids, units)
        want = philox_numpy.bits("hidden", kind, 11, range(2, 6), ids.numpy(), units, 1, 1)
        assert np.array_equal(np.broadcast_to(got, want.shape), want)


@pytest.mark.parametrize("mask", ["unit", "shared", "step", "sequence", "static"])
def test_masks_over_depth_are_those_of_zo_masks(mask):
    """C compares the rate with the other half of a word than the rest of the package does."""
    noise = zo.Zoneout(depth=0.5, mask=mask, seed=3 if mask == "static" else None)
    layer = zo.GRU(H, H, 2, noise=noise)
    below = zo.GRU(H, H)
    below.load_state_dict({n: v for n, v in layer.state_dict().items() if "_l0" in n})
    x = torch.randn(T, B, H)
    kept = layer(x, seed=5)[0] == below(x)[0]
    assert torch.equal(kept, zo.masks(noise, 5, T, B, H, layer=1)["depth"])


# --- what runs where ------------------------------------------------------------------------------


def test_the_compiled_loop_runs_them(monkeypatch):
    """A layer with given masks would run in the reference, many times slower."""
    if native.load() is None:
        pytest.skip(f"no compiled loop here: {native.why_not()}")
    ran = []
    whole = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda loops: (ran.extend(loops), whole(loops))[1])
    x, rate = torch.randn(T, B, I), torch.rand(T, B, H, requires_grad=True)
    for layer in (
        zo.LSTM(I, H, noise=zo.Zoneout(mask="clock", periods=2), norm="layer"),
        zo.LSTM(I, H, noise=zo.Swapout(hidden_old=0.5)),
        zo.Recurrent(zo.cells.mingru, I, H, noise=zo.Zoneout(hidden=0.5)),
    ):
        fixed = getattr(layer.noise, "mask", "") == "clock" or isinstance(layer.noise, zo.Swapout)
        layer(x, rates=None if fixed else {"hidden": rate})[0].sum().backward()
        assert len(ran) == 1 and ran.pop().masks


def test_the_reference_runs_the_rest(monkeypatch):
    """Masks with a gradient beside a norm, or without a compiler, would be ignored or fail."""
    monkeypatch.setattr(cpu, "_say_once", lambda reason: None)
    x, rate = torch.randn(T, B, I), torch.rand(T, B, H, requires_grad=True)
    for options in ({"norm": "layer"}, {"proj_size": 3}):
        layer = zo.LSTM(I, H, noise=zo.Zoneout(mask="rate"), **options)
        slow = zo.LSTM(I, H, noise=zo.Zoneout(mask="rate"), backend="reference", **options)
        slow.load_state_dict(layer.state_dict())
        rates = {"cell": rate}
        grads = [
            torch.autograd.grad(one(x, rates=rates)[0].sum(), rate)[0] for one in (layer, slow)
        ]
        assert torch.allclose(*grads, atol=1e-6)
        with pytest.raises(ValueError, match="masks that are given"):
            zo.LSTM(I, H, noise=zo.Zoneout(mask="rate"), backend="cpu", **options)(x, rates=rates)
    monkeypatch.setattr(native, "load", lambda: None)
    layer = zo.GRU(I, H, noise=zo.Swapout(hidden_old=0.5, hidden_new=0.5))
    assert layer(x)[0].shape == (T, B, H)


def test_export_to_onnx_refuses():
    """A file would be written without the clock."""
    layer = zo.LSTM(I, H, noise=zo.Zoneout(mask="clock", periods=2)).eval()
    with pytest.raises(ValueError, match="that the ONNX export does not support: a clock's"):
        zo.onnx.export(layer, (torch.randn(T, B, I),), "/dev/null")


# --- errors ---------------------------------------------------------------------------------------


def rated(**rates: Any) -> Any:
    return zo.LSTM(I, H, noise=zo.Zoneout(hidden=0.1))(torch.zeros(T, B, I), rates=rates)


ERRORS: dict[str, Any] = {
    "expected periods of at least 1, got 0": lambda: zo.Zoneout(mask="clock", periods=[2, 0]),
    "expected a whole number, a list": lambda: zo.Zoneout(mask="clock"),
    "expected a tensor with one whole number a unit": lambda: zo.Zoneout(
        mask="clock", periods=torch.ones(3)
    ),
    "expected periods in place of rates, got hidden": lambda: zo.Zoneout(
        mask="clock", periods=2, hidden=0.1
    ),
    "expected mask='clock' with periods": lambda: zo.Zoneout(periods=2),
    "draws nothing and is the same": lambda: zo.Zoneout(mask="rate", at_eval="sample"),
    "expected one of unit, shared": lambda: zo.Swapout(mask="clock"),
    "expected a rate between 0 and 1, got 1.5": lambda: zo.Swapout(hidden_old=1.5),
    "Swapout(hidden_old=0.1": lambda: zo.Swapout(0.1),
    "Zoneout(cell=0.1, hidden=0.1)": lambda: zo.Zoneout(0.1),
    "expected rates between 0 and 1, got -1": lambda: rated(hidden=-torch.ones(T, B, H)),
    "got nan": lambda: rated(hidden=torch.full((T, B, H), torch.nan)),
    r"expected a tensor \[T, B, units\] = \(6, 4, 8\)": lambda: rated(hidden=torch.ones(T, B, 3)),
    r"expected \[T, B, units\], got shape \(6, 8\)": lambda: rated(hidden=torch.ones(T, H)),
    "expected floating-point numbers or a mask": lambda: rated(hidden=torch.ones(T, B, H).long()),
    "expected a function that returns a tensor": lambda: rated(hidden=lambda x: 0.5),
    "expected one rate for each of 1 layers": lambda: rated(hidden=[torch.ones(T, B, H)] * 2),
    "expected none, since the layer's noise has periods": lambda: zo.GRU(
        I, H, noise=zo.Zoneout(mask="clock", periods=2)
    )(torch.zeros(T, B, I), rates={"hidden": 0.5}),
    "expected a rate that is the same at all steps": lambda: zo.GRU(
        I, H, noise=zo.VariationalDropout(hidden=0.2)
    )(torch.zeros(T, B, I), rates={"variational_hidden": torch.ones(T, B, H)}),
    "expected one rate for each of 8 units, got 3": lambda: zo.GRU(
        I, H, noise=zo.Zoneout(mask="clock", periods=torch.ones(3).long())
    ),
    "a clock tells which units": lambda: zo.GRUCell(
        I, H, noise=zo.Zoneout(mask="clock", periods=2)
    )(torch.zeros(B, I)),
    "a cell has no layer below": lambda: zo.GRUCell(I, H, noise=zo.Swapout(depth_old=0.5)),
    "a GRU has no cell": lambda: zo.GRU(I, H, noise=zo.Swapout(cell_old=0.5)),
    "both .* replace the hidden": lambda: zo.GRU(
        I, H, noise=[zo.Swapout(hidden_old=0.5), zo.Zoneout(hidden=0.1)]
    ),
    "whose mask is the rate itself": lambda: zo.masks(
        zo.Zoneout(hidden=0.1, mask="rate"), 1, T, B, H
    ),
    r"expected a tensor \[B, units\]": lambda: zo.LSTMCell(I, H, noise=zo.Zoneout(hidden=0.1))(
        torch.zeros(B, I), rates={"hidden": torch.ones(1, B, H)}
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_arguments(message):
    """A bad argument runs, or is refused without saying what was expected."""
    with pytest.raises(
        (ValueError, TypeError), match=message if "\\" in message or ".*" in message else None
    ) as error:
        ERRORS[message]()
    assert "\\" in message or ".*" in message or message in str(error.value)


def test_depth_without_a_stack_warns():
    """Noise over depth of one layer would silently do nothing."""
    with pytest.warns(UserWarning, match="num_layers is 1"):
        zo.LSTM(I, H, noise=zo.Zoneout(depth=0.1))


def test_the_gpu_runs_them_step_by_step(emulated, monkeypatch):
    """A kernel that draws its own masks would ignore the given ones."""
    ran = []
    whole = cuda.cell_steps.ready
    monkeypatch.setattr(cuda.cell_steps, "ready", lambda *given: (ran.append(1), whole(*given))[1])
    layer = zo.LSTM(I, H, noise=zo.Zoneout(hidden=0.2))
    layer(torch.randn(T, B, I), rates={"hidden": torch.rand(T, B, H)})
    assert ran


@pytest.mark.filterwarnings("ignore:zoneout:UserWarning")  # some cells run in the reference
@pytest.mark.parametrize("name", PUBLISHED)
def test_learned_rates_of_every_cell(name):
    """The backward pass reads values that the variant of the forward pass has not stored."""
    torch.manual_seed(0)
    cell = PUBLISHED[name]
    noise = zo.Zoneout(states={cell.states[0]: 0.5})
    layer = zo.Recurrent(cell, 3, 8, noise=noise, dtype=torch.float64)
    reference = copy.deepcopy(layer)
    reference.backend = "reference"
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    rate = uniform(3, 4, 8).requires_grad_()
    found = []
    for one in (layer, reference):
        y, _ = one(x, seed=1, rates={cell.states[0]: rate})
        found.append([y, *torch.autograd.grad(y.square().sum(), [rate, *one.parameters()])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("compiler", [True, False], ids=["compiled", "torch calls"])
@pytest.mark.parametrize(
    "options",
    [{}, {"norm": "layer"}, {"proj_size": 2}, {"norm": zo.RecurrentBatchNorm(3)}],
    ids=["plain", "layer norm", "projection", "batch norm"],
)
@pytest.mark.parametrize(
    "noise",
    [zo.Swapout(hidden_old=0.5, hidden_new=0.2), zo.Zoneout(mask="clock", periods=2)],
    ids=["swapout", "clock"],
)
@pytest.mark.filterwarnings("ignore:zoneout")
def test_packed_rows_of_runs_for_the_reference(noise, options, compiler, monkeypatch):
    """The reference takes the number of packed rows for that of the steps."""
    if not compiler:
        monkeypatch.setattr(native, "load", lambda: None)
    layer = zo.LSTM(3, 4, noise=noise, **options)
    reference = copy.deepcopy(layer)
    reference.backend = "reference"
    packed = pack_padded_sequence(torch.randn(3, 2, 3), torch.tensor([3, 2]))
    (y, state), (want, ends) = layer(packed, seed=1), reference(packed, seed=1)
    for a, b in zip((y.data, *state), (want.data, *ends), strict=True):
        torch.testing.assert_close(a, b)
