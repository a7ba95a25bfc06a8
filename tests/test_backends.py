"""Every fused backend against the reference: outputs, final states, every gradient and batch norm's
statistics.

The CPU's loop is run both ways, compiled and in torch calls. Memory that is handed out unwritten is
filled with NaN.
"""

import copy
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import zoneout as zo
from zoneout import cells
from zoneout.ops import TOLERANCES, cpu, reference
from zoneout.ops import build_cache as kept
from zoneout.ops.cpu import native
from zoneout.ops.cuda.pointwise.rows import Padded
from zoneout.ops.cuda.runtime import compiler
from zoneout.ops.sequence import rows

STEPS, BATCH, INPUT = 7, 5, 3
LAYERS: dict[str, Any] = {
    "lstm": zo.LSTM,
    "gru": zo.GRU,
    "rnn": zo.RNN,
    "relu": lambda *a, **k: zo.RNN(*a, nonlinearity="relu", **k),
}
STATES = {
    "lstm": dict(cell=0.5, hidden=0.2),
    "gru": dict(hidden=0.3),
    "rnn": dict(hidden=0.3),
    "relu": dict(hidden=0.3),
}
NOISES: dict[str, Any] = {
    "none": lambda states: None,
    **{
        f"zoneout-{mask}": lambda states, mask=mask: zo.Zoneout(
            **states, mask=mask, seed=3 if mask == "static" else None
        )
        for mask in ("unit", "shared", "step", "sequence", "static")
    },
    "zoneout-units": lambda states: zo.Zoneout(hidden=torch.linspace(0, 1, 37)),
    "state-dropout": lambda states: zo.StateDropout(**states),
    "divided": lambda states: [zo.Zoneout(hidden=0.3), zo.StateDropout(cell=0.4)],
    "recurrent-dropout": lambda states: zo.RecurrentDropout(rate=0.4),
    "held-gate": lambda states: zo.RecurrentDropout(rate=0.4, hold_output_gate=True),
    "variational": lambda states: zo.VariationalDropout(input=0.3, hidden=0.4),
    "together": lambda states: [
        zo.Zoneout(**states),
        zo.VariationalDropout(input=0.1, hidden=0.3),
        zo.WeightDrop(rate=0.2),
    ],
}
NOT_IN = {"gru": ("held-gate", "divided"), "rnn": ("held-gate", "recurrent-dropout", "divided")}
CASES = [
    pytest.param(layer, noise, id=f"{layer}-{noise}")
    for layer in LAYERS
    for noise in NOISES
    if noise not in NOT_IN.get({"relu": "rnn"}.get(layer, layer), ())
]
NORMS = {"plain": None, "layer-norm": "layer", "batch-norm": zo.RecurrentBatchNorm(5)}
CALLS: dict[str, dict[str, Any]] = {
    "whole": {},
    "lengths": dict(lengths=[3, 7, 1, 0, 5]),
    "resets": dict(
        resets=torch.rand(STEPS, BATCH, generator=torch.Generator().manual_seed(1)) < 0.3
    ),
}
PLACES = dict(first_step=4, examples=[9, 3, 5, 1, 100])
CALLS["all"] = CALLS["lengths"] | CALLS["resets"] | PLACES
CALLS["packed"] = dict(packed=[3, 7, 1, 2, 5]) | CALLS["resets"] | PLACES


@pytest.fixture(params=["compiled", "torch calls"])
def loop(request, monkeypatch):
    """The CPU's loop in both forms; a machine without a compiler has one of them."""
    if request.param == "torch calls":
        monkeypatch.setattr(native, "load", lambda: None)
        monkeypatch.setattr("zoneout.ops.cpu._say_once", lambda reason: None)
        monkeypatch.setattr("zoneout.ops.cpu.chunks._NUMBERS", 2 * BATCH * 37)  # two steps at once
    elif native.load() is None:
        pytest.skip(f"no compiled loop here: {native.why_not()}")
    return request.param


def everything(
    layer: Any, x: Tensor, hx: Any, call: dict[str, Any], cells: bool = True
) -> dict[str, Tensor]:
    """All that a call and its way back give, by name; of an LSTM also every c, unless that is
    not wanted.
    """
    x = x.clone().requires_grad_()
    call = dict(call)
    lengths = call.pop("packed", None)  # the lengths of what is to be packed
    given = (
        x
        if lengths is None
        else pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    )
    states = [s.clone().requires_grad_() for s in (hx if isinstance(hx, tuple) else (hx,))]
    more = {"return_cells": True} if layer.kind == "lstm" and cells else {}
    y, ended, *every_c = layer(
        given, tuple(states) if layer.kind == "lstm" else states[0], seed=5, **more, **call
    )
    out = {
        "y": y,
        **{f"end {k}": s for k, s in enumerate(ended if layer.kind == "lstm" else [ended])},
    }
    out |= {"cells": every_c[0]} if every_c else {}
    out = {name: v.data if isinstance(v, PackedSequence) else v for name, v in out.items()}
    weights = torch.Generator().manual_seed(1)
    loss = sum(
        (v * torch.randn(v.shape, generator=weights, dtype=torch.float64).to(v)).sum()
        for v in out.values()
    )
    layer.zero_grad()
    loss.backward()
    grads: dict[str, Any] = {"x": x.grad} | {f"hx {k}": s.grad for k, s in enumerate(states)}
    grads |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    out |= {f"of {name}": grad for name, grad in grads.items()}
    return out | {name: b.clone() for name, b in layer.named_buffers() if b.is_floating_point()}


def compare(
    name: str,
    make: Any,
    call: dict[str, Any],
    training: bool,
    dtype: torch.dtype,
    hidden: int = 37,
    **options: Any,
) -> None:
    """One layer in the fused backend and in the reference, same weights, same seed."""
    torch.manual_seed(0)
    ours = LAYERS[name](
        INPUT, hidden, noise=make(STATES[name]), dtype=dtype, backend="cpu", **options
    )
    theirs = LAYERS[name](
        INPUT, hidden, noise=make(STATES[name]), dtype=dtype, backend="reference", **options
    )
    theirs.load_state_dict(ours.state_dict())
    ours.train(training), theirs.train(training)
    x = torch.randn(STEPS, BATCH, INPUT, dtype=dtype)
    count = len(ours.suffixes())
    h = torch.randn(count, BATCH, ours.output_size, dtype=dtype)
    hx = (h, torch.randn(count, BATCH, hidden, dtype=dtype)) if name == "lstm" else h
    want, got = everything(theirs, x, hx, call), everything(ours, x, hx, call)
    assert want.keys() == got.keys()
    for key, value in want.items():
        error = (got[key] - value).norm() / value.norm().clamp(min=1e-30)
        assert error <= TOLERANCES[dtype], f"{key}: {error:.1e} from the reference"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("name", "noise"), CASES)
def test_equals_the_reference(loop, poisoned, name, noise, norm, call):
    """A fused path computes something else than the cells of the paper, or reads what nobody
    wrote.
    """
    for training in (True, False):
        compare(name, NOISES[noise], CALLS[call], training, torch.float64, norm=NORMS[norm])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", LAYERS)
def test_float32(loop, name, call):
    """Single precision, where the compiled loop has its own exp and tanh, is off by more than
    rounding.
    """
    for noise in ("zoneout-unit", "variational"):
        compare(name, NOISES[noise], CALLS[call], True, torch.float32)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_directions_and_layers(loop, poisoned, name, norm, call):
    """A reversed direction, a second layer, a missing bias or a learned state goes wrong."""
    rich: dict[str, Any] = dict(num_layers=2, bidirectional=True, dropout=0.3, norm=NORMS[norm])
    for options in (
        rich,
        dict(bias=False, norm=NORMS[norm]),
        dict(learn_initial_state=True, bidirectional=True),
    ):
        compare(name, NOISES["zoneout-unit"], CALLS[call], True, torch.float64, **options)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("noise", ["zoneout-unit", "together", "held-gate", "state-dropout"])
def test_projections(loop, poisoned, noise, norm, call):
    """With `proj_size` a gradient misses the projection, or a mask its size."""
    compare("lstm", NOISES[noise], CALLS[call], True, torch.float64, norm=NORMS[norm], proj_size=5)


@pytest.mark.parametrize("lengths", [[7, 5, 3, 2, 1], [7] * 5, [1] * 5, [1, 1, 7, 1, 1]])
@pytest.mark.parametrize("name", LAYERS)
def test_packed_lengths(loop, poisoned, name, lengths):
    """Packed rows of equal, ordered or single steps are taken for others, or without resets for
    a whole batch.
    """
    for options in (dict(), dict(num_layers=2, bidirectional=True, dropout=0.3)):
        compare(name, NOISES["together"], dict(packed=lengths), True, torch.float64, **options)


def test_packed_rows_are_not_padded(monkeypatch):
    """On the CPU a packed batch would be copied into a padded one and back, with outputs and
    gradients.
    """
    monkeypatch.setattr("zoneout.sequence_layer.padded", lambda *_: pytest.fail("it was padded"))
    packed = pack_padded_sequence(
        torch.randn(STEPS, BATCH, INPUT), torch.tensor([1, 7, 1, 1, 1]), enforce_sorted=False
    )
    for make in LAYERS.values():
        y = make(INPUT, 8, 2, bidirectional=True, dropout=0.5, norm="layer")(packed)[0]
        assert y.data.shape == (11, 16) and torch.equal(y.batch_sizes, packed.batch_sizes)


def test_spare_memory():
    """Memory of another size or type is handed out, the same to two calls, or it is kept without
    bound.
    """
    spare = cpu._Spare(100)
    one = torch.empty(10)
    spare.keep(one)
    assert spare.take(torch.float32, 9) is None and spare.take(torch.int32, 10) is None
    assert (
        spare.take(torch.float32, 10) is one
        and spare.take(torch.float32, 10) is None
        and spare.bytes == 0
    )
    for size in (10, 10, 11):  # 124 bytes
        spare.keep(torch.empty(size))
    assert spare.bytes == 0 and spare.take(torch.float32, 11) is None


def test_padding_is_no_work_for_each_length():
    """Where packed rows are padded, a batch takes as many calls as it has lengths, as it does in
    torch's own way.
    """

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def ours(packed):
        sequences = zo.LSTM(INPUT, 8, backend="reference")._sequences(packed, None, None)
        return sequences.outputs(sequences.x).data

    def torchs(packed):
        padded, lengths = pad_packed_sequence(packed)
        return pack_padded_sequence(padded, lengths, enforce_sorted=False).data

    def calls(there_and_back, steps):
        x = torch.randn(steps, steps, INPUT, requires_grad=True)
        packed = pack_padded_sequence(x, torch.arange(steps) + 1, enforce_sorted=False)
        with Count() as count:
            y = there_and_back(packed)
        assert torch.equal(y, packed.data)
        with count:
            torch.autograd.grad(y.sum(), packed.data)
        return count.calls

    assert calls(ours, 40) == calls(ours, 4)
    assert calls(torchs, 40) > 5 * calls(torchs, 4), "it was no trial"


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (2, 1, 3, 50), (3, 9, 1, 300), (1, 33, 2, 16), (4, 2, 5, 513)]
)
@pytest.mark.parametrize("name", LAYERS)
def test_odd_sizes(loop, name, sizes):
    """A size that is no multiple of a vector, a tile or a chunk is computed wrongly at its edge."""
    steps, batch, input, hidden = sizes
    torch.manual_seed(0)
    noise = zo.Zoneout(**STATES[name])
    layer = LAYERS[name](input, hidden, noise=noise, backend="cpu", dtype=torch.float64)
    x = torch.randn(steps, batch, input, dtype=torch.float64)
    h = torch.randn(1, batch, hidden, dtype=torch.float64)
    hx = (h, h.clone()) if name == "lstm" else h
    got = everything(layer, x, hx, {})
    layer.backend = "reference"
    for key, value in everything(layer, x, hx, {}).items():
        assert (got[key] - value).norm() <= 1e-10 * value.norm().clamp(min=1e-30), key


@pytest.mark.parametrize(
    ("name", "noise", "hidden", "options"),
    [
        ("lstm", "variational", 300, {}),  # backwards, over 4 · 300 gates
        ("gru", "none", 1030, {}),  # forwards, over the units
        ("rnn", "none", 1030, {"norm": "layer"}),  # both ways, over the units
        ("lstm", "none", 1030, {"proj_size": 3}),  # the projection
    ],
)
def test_products_that_are_taken_in_parts(loop, name, noise, hidden, options):
    """Of a product over more than 1,024 numbers only the last part is left, where nothing is
    there to be added to.
    """
    compare(name, NOISES[noise], {}, True, torch.float64, hidden, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_half_types(loop, name, dtype):
    """In half precision a backend keeps its states in too few bits: it is held to the reference
    in float32.
    """
    torch.manual_seed(0)
    layer = LAYERS[name](INPUT, 37, noise=zo.Zoneout(**STATES[name])).to(dtype)
    x = torch.randn(40, BATCH, INPUT).to(dtype)
    layer.backend = "cpu"
    y = layer(x, seed=1)[0]
    assert y.dtype == dtype
    y.float().square().sum().backward()
    got = {name: p.grad.float() for name, p in layer.named_parameters()}
    layer = layer.float()
    layer.backend = "reference"
    layer.zero_grad()
    want = layer(x.float(), seed=1)[0]
    want.square().sum().backward()
    assert (y.float() - want).norm() <= TOLERANCES[dtype] * want.norm()
    for key, p in layer.named_parameters():
        assert (got[key] - p.grad).norm() <= TOLERANCES[dtype] * p.grad.norm(), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("call", ["whole", "all", "packed"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_half_types_of_the_reference(name, norm, call, dtype):
    """The reference rounds inside a step, or returns a value of a step in another type."""
    torch.manual_seed(0)
    half = LAYERS[name](
        INPUT, 8, noise=zo.Zoneout(**STATES[name]), norm=NORMS[norm], backend="reference"
    ).to(dtype)
    x, states = torch.randn(STEPS, BATCH, INPUT).to(dtype), torch.randn(2, 1, BATCH, 8).to(dtype)
    found = []
    for layer, kind in ((half, dtype), (copy.deepcopy(half).float(), torch.float32)):
        hx = tuple(states.to(kind))
        found.append(everything(layer, x.to(kind), hx if name == "lstm" else hx[0], CALLS[call]))
    for (key, value), exact in zip(found[0].items(), found[1].values()):
        assert value.dtype == dtype, key
        if key.split()[0] in ("y", "end", "cells"):
            assert torch.equal(value, exact.to(dtype)), key
        else:  # everything's loss and the statistics are rounded themselves
            assert (value - exact).norm() <= 2 * torch.finfo(dtype).eps * exact.norm(), key


@pytest.mark.parametrize("call", ["whole", "all", "packed"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_bfloat16_products(monkeypatch, name, norm, call):
    """Products of the way back, taken in bfloat16, miss a mask, a reset or a row, or add up
    their rounding.
    """
    torch.manual_seed(0)
    options = dict(proj_size=5) if name == "lstm" else {}
    noise = [zo.Zoneout(**STATES[name]), zo.VariationalDropout(input=0.1, hidden=0.3)]
    layer = LAYERS[name](
        INPUT, 37, bidirectional=True, noise=noise, norm=NORMS[norm], **options
    ).bfloat16()
    x, h = (
        torch.randn(STEPS, BATCH, INPUT).bfloat16(),
        torch.randn(2, BATCH, layer.output_size).bfloat16(),
    )
    hx = (h, torch.randn(2, BATCH, 37).bfloat16()) if name == "lstm" else h
    found = []
    for narrow in (True, False):
        monkeypatch.setattr(cpu, "narrow_products", lambda dtype, narrow=narrow: narrow)
        found.append(everything(copy.deepcopy(layer), x, hx, CALLS[call]))
    got, want = found
    for key, value in want.items():
        error = (got[key] - value).float().norm() / value.float().norm().clamp(min=1e-30)
        assert error <= TOLERANCES[torch.bfloat16], (
            f"{key}: {error:.1e} from the product in float32"
        )


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_the_same_bits_twice(name, threads):
    """The same seed gives other numbers the second time, or on another number of threads another
    mask.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        layer = LAYERS[name](INPUT, 100, noise=zo.Zoneout(**STATES[name]), norm="layer")
        x = torch.randn(20, 6, INPUT)
        h = torch.randn(1, 6, 100)
        hx = (h, h.clone()) if name == "lstm" else h
        first, second = everything(layer, x, hx, {}), everything(layer, x, hx, {})
        assert all(torch.equal(first[key], second[key]) for key in first)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_threads(name, threads, norm):
    """Threads that share the steps, or that have rows of their own, get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for batch, call in (
            (13, {}),
            (13, {"resets": torch.rand(6, 13) < 0.3}),
            (13, {"lengths": [6] * 5 + [3] * 8}),
            (13, {"packed": [6] * 5 + [3] * 8}),
            (2, {}),
        ):
            torch.manual_seed(0)
            noise = [zo.Zoneout(**STATES[name]), zo.VariationalDropout(hidden=0.2)]
            layer = LAYERS[name](
                INPUT, 70, noise=noise, norm=NORMS[norm], dtype=torch.float64, backend="cpu"
            )
            exact = copy.deepcopy(layer)
            exact.backend = "reference"
            x, h = (
                torch.randn(6, batch, INPUT, dtype=torch.float64),
                torch.randn(1, batch, 70, dtype=torch.float64),
            )
            hx = (h, h.clone()) if name == "lstm" else h
            want, got = everything(exact, x, hx, call), everything(layer, x, hx, call)
            for key, value in want.items():
                assert (got[key] - value).norm() <= 1e-10 * value.norm().clamp(min=1e-30), (
                    key,
                    batch,
                    call.keys(),
                )
    finally:
        torch.set_num_threads(before)


def of_rows_that_begin_alike(
    backend: str, device: str, dtype: torch.dtype, lengths: Any
) -> dict[str, Tensor]:
    """Derivatives of a layer with batch norm and learned states, for rows that differ from their
    third step on.
    """
    torch.manual_seed(0)
    layer = zo.LSTM(
        1, 32, norm=zo.RecurrentBatchNorm(12), learn_initial_state=True, backend=backend
    )
    assert isinstance(layer.h0, Tensor) and isinstance(layer.c0, Tensor)
    with torch.no_grad():
        layer.h0.normal_(), layer.c0.normal_()
    x, dy = torch.rand(12, 64, 1), torch.randn(64, 32)
    x[:2] = 1.0
    layer = layer.to(device, dtype)
    _, (h, _) = layer(x.to(device, dtype), lengths=lengths)
    names = (
        "weight_hh_l0",
        "weight_ih_l0",
        "norm_hh_l0",
        "norm_cell_l0",
        "norm_cell_shift_l0",
        "bias_ih_l0",
        "h0",
    )
    found = torch.autograd.grad(
        h[0], [getattr(layer, name) for name in names], dy.to(device, dtype)
    )
    return {name: value.double().cpu() for name, value in zip(names, found)}


def check_rows_that_begin_alike(
    got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float
) -> None:
    """An error where a derivative is what rounding leaves of sums that should cancel."""
    far = {name: float((got[name] - value).norm() / value.norm()) for name, value in want.items()}
    for name in ("weight_hh_l0", "weight_ih_l0", "norm_hh_l0", "norm_cell_l0"):
        assert far[name] <= tolerance, name
    # These two are sums that nearly cancel, and float32 has no more of them.
    assert far["norm_cell_shift_l0"] <= max(tolerance, 2e-3) and far["bias_ih_l0"] <= 0.3, far
    assert (
        got["h0"].norm() <= want["weight_hh_l0"].norm()
    )  # truly zero; with the sum left in, a hundred times as much


@pytest.mark.parametrize("lengths", [None, [12] * 40 + [7] * 24], ids=["whole", "ragged"])
def test_batch_norm_of_rows_that_begin_alike(loop, lengths):
    """The norm makes their derivatives huge, and the weights' is what rounding leaves of sums
    that should cancel.
    """
    want = of_rows_that_begin_alike("reference", "cpu", torch.float64, lengths)
    got = of_rows_that_begin_alike("cpu", "cpu", torch.float32, lengths)
    check_rows_that_begin_alike(got, want, 1e-3)
    rough = of_rows_that_begin_alike("reference", "cpu", torch.float32, lengths)
    assert (rough["weight_hh_l0"] - want["weight_hh_l0"]).norm() > 0.1 * want[
        "weight_hh_l0"
    ].norm(), "it was no trial"


def outputs_of_rows_alike(
    backend: str, device: str, dtype: torch.dtype, lengths: Any, hidden: int = 16
) -> Tensor:
    """Of a new layer whose rows are alike for four steps, but that noise on h alone would tell
    them apart.
    """
    torch.manual_seed(0)
    layer = zo.LSTM(
        1, hidden, norm=zo.RecurrentBatchNorm(12), noise=zo.Zoneout(hidden=0.15), backend=backend
    )
    x = torch.rand(12, 50, 1)
    x[:4] = 0.0
    y, _ = layer.to(device, dtype)(x.to(device, dtype), lengths=lengths, seed=1)
    return y.detach().double().cpu()


RAGGED = [0] * 20 + [12] * 13 + [7] * 17


@pytest.mark.parametrize("lengths", [None, RAGGED], ids=["whole", "ragged"])
def test_the_mean_of_rows_that_are_alike_is_that_row(loop, lengths):
    """What is left of c less its mean becomes h, which noise makes differ, and grows a hundred
    times a step.
    """
    want = outputs_of_rows_alike("reference", "cpu", torch.float64, lengths)
    got = outputs_of_rows_alike("cpu", "cpu", torch.float32, lengths)
    assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("numbers", [256, 257])
def test_one_hot_rows_that_begin_alike(loop, numbers):
    """The weights of a first symbol that all rows have get what rounding leaves of a sum that
    should be zero.
    """
    found = {}
    for backend, dtype in (("reference", torch.float64), ("cpu", torch.float32)):
        torch.manual_seed(0)
        layer = zo.LSTM(
            numbers, 16, norm=zo.RecurrentBatchNorm(9), learn_initial_state=True, backend=backend
        )
        x = torch.randint(numbers, (9, 40))
        x[:2] = 5
        y, _ = layer.to(dtype)(x)
        y.backward(torch.randn(9, 40, 16).to(dtype))
        found[backend] = layer.weight_ih_l0.grad.double()
    assert (found["cpu"] - found["reference"]).norm() <= 1e-4 * found["reference"].norm()


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "reversed"])
@pytest.mark.parametrize("lengths", [None, [3, 6, 0, 5, 6]], ids=["whole", "ragged"])
@pytest.mark.usefixtures("emulated")  # the rows of a GPU
@pytest.mark.parametrize(
    ("rows", "dtype", "off"),
    [(rows.Packed, torch.float64, 1e-12), (Padded, torch.float32, 1e-5)],
    ids=["cpu", "cuda"],
)
def test_differences_of_h_give_the_same_where_derivatives_cancel(
    rows, dtype, off, lengths, reverse
):
    """What is taken off is of another step than what it is taken from: a reversed row begins at
    its own end.
    """
    steps, batch, units = 6, 5, 4
    torch.manual_seed(0)
    ends = None if lengths is None else torch.tensor(lengths)
    lie = rows(ends, steps, batch, reverse)
    d, y, h0 = (
        torch.randn(*shape, dtype=dtype)
        for shape in ((steps, batch, 3), (steps, batch, units), (batch, units))
    )
    for row, end in enumerate(lengths or [steps] * batch):
        d[end:, row] = y[end:, row] = 0.0
    for step in range(steps):  # as they are processed
        alive = [
            (end - 1 - step if reverse else step, row)
            for row, end in enumerate(lengths or [steps] * batch)
            if step < end
        ]
        at, row = (torch.tensor(v) for v in zip(*alive))
        d[at, row] -= d[at, row].mean(0)
    given: dict[str, Any] = dict(
        y=lie.pack(y),
        h0=lie.sort(h0),
        resets=None,
        reset_h=None,
        scale_h=None,
        outputs=units,
        cell=cells.lstm,
    )
    given |= dict(steps=steps, batch=batch)
    plain, apart = (
        lie.grad_w_hh(lie.pack(d), SimpleNamespace(**given, balanced=b)) for b in (False, True)
    )
    assert torch.allclose(plain, apart, rtol=0, atol=off)


@pytest.mark.parametrize("name", LAYERS)
def test_saturated_gates_are_exact(name):
    """A shut gate lets a little through: a unit that was to keep its value would drift."""
    layer = LAYERS[name](1, 16, backend="cpu")
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.bias_ih_l0.fill_(-1000.0)
    y, _ = layer(torch.zeros(3, 2, 1))
    layer.backend = "reference"
    assert torch.equal(y, layer(torch.zeros(3, 2, 1))[0])


@pytest.mark.parametrize(
    ("rate", "x", "h", "want"), [(1 / 65536, 0, math.inf, 0), (1, math.inf, 3, 3)]
)
def test_what_is_not_chosen_is_not_seen(rate, x, h, want):
    """An infinite value that zoneout does not choose turns the other one into NaN."""
    layer = zo.RNN(
        1, 1, nonlinearity="relu", bias=False, noise=zo.Zoneout(hidden=rate), backend="cpu"
    )
    with torch.no_grad():
        layer.weight_ih_l0.fill_(1), layer.weight_hh_l0.fill_(-1)
    y, _ = layer(torch.full((2, 1, 1), float(x)), torch.full((1, 1, 1), float(h)), seed=1)
    assert y.flatten().tolist() == [want, want]


@zo.cell(gates=1, recurrence="none", checked=False)
def passing(x, h):
    return x[0]


LARGEST = 3e38  # the difference of two such numbers of either sign is infinite
ENDS = [(0.0, math.inf), (math.inf, 0.0), (math.inf, math.inf), (-math.inf, 1.0)]
ENDS += [(LARGEST, -LARGEST), (-LARGEST, LARGEST)]


def check_mixed_ends(rate: float, backend: str) -> None:
    """Mix values of which no difference can be taken, as a layer does in evaluation."""
    layer = zo.Recurrent(passing, 1, 1, bias=False, noise=zo.Zoneout(hidden=rate), backend=backend)
    torch.nn.init.ones_(layer.weight_ih_l0)
    new, old = torch.tensor(ENDS).t()[..., None]
    y, _ = layer.eval()(new[None], old[None])
    want = [(1 - rate) * a + rate * b for a, b in ENDS]
    torch.testing.assert_close(y.flatten(), torch.tensor(want), rtol=1e-5, atol=1e-5 * LARGEST)
    bare = zo.zoneout(new, old, rate, training=False)
    torch.testing.assert_close(bare.flatten(), y.flatten(), rtol=1e-5, atol=1e-5 * LARGEST)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7])
def test_mixed_ends(rate, backend):
    """The expectation of an infinite or a very large value is NaN or infinite."""
    check_mixed_ends(rate, backend)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", LAYERS)
def test_opcheck(name, norm, packed):
    """The operator tells torch.compile other shapes than it returns, changes an input, or hides
    one in an output.
    """
    seen: list[Any] = []
    run = torch.ops.zoneout.run.default
    layer = LAYERS[name](
        INPUT, 8, noise=zo.Zoneout(**STATES[name]), norm=NORMS[norm], backend="cpu"
    )

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is run:
                seen.append(args)
            return function(*args, **(kwargs or {}))

    x, lengths = torch.randn(4, 3, INPUT), torch.tensor([4, 2, 1])
    with Spy(), torch.no_grad():
        layer(pack_padded_sequence(x, lengths), seed=1) if packed else layer(
            x, seed=1, lengths=lengths
        )
    (args,) = seen
    fresh = tuple(
        v.detach().clone().requires_grad_(1 <= k <= 14) if isinstance(v, Tensor) else v
        for k, v in enumerate(args)
    )
    torch.library.opcheck(run, fresh)


def test_second_derivative_is_refused_under_a_dispatch_mode():
    """A second derivative through the operator, which computes numbers, would be silently wrong."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    layer, x = zo.LSTM(2, 3), torch.randn(4, 1, 2, requires_grad=True)
    with Mode():
        (grad,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="backend='reference'"):
        grad.sum().backward()


def test_a_backend_for_another_device_is_refused():
    """backend="cpu" would quietly run something else on a tensor that is not there."""
    layer = zo.LSTM(2, 3, device="meta", backend="cpu")
    with pytest.raises(ValueError, match="backend"):
        layer(torch.empty(4, 1, 2, device="meta"))


def test_fused_backend_never_falls_back(monkeypatch):
    """backend="cpu" would run the slow reference without saying so."""
    monkeypatch.setattr(reference, "run", lambda r: pytest.fail("the reference was run"))
    for name, make in LAYERS.items():
        make(INPUT, 8, noise=zo.Zoneout(**STATES[name]), norm="layer", backend="cpu")(
            torch.randn(3, 2, INPUT)
        )


def test_without_a_compiler_it_says_so_once(tmp_path):
    """Somebody without a compiler would wonder why it is slow, or be told at every call."""
    code = (
        "import sys, warnings, torch, zoneout as zo\n"
        "sys.modules['ziglang'] = None  # the compiler of the extra is not installed\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(3): zo.LSTM(2, 3)(torch.randn(4, 1, 2))[0].sum().backward()\n"
        "print([str(w.message) for w in caught])"
    )
    for wrong, reason in (
        (dict(ZONEOUT_NATIVE="0"), "ZONEOUT_NATIVE=0"),
        (
            dict(PATH="", CC="no-such-compiler"),
            "no-such-compiler: not found; cc: not found; gcc: not found",
        ),
        (dict(PATH="", CC="/bin/false"), "/bin/false: exit status 1; cc: not found"),
        (dict(PATH="", CC="cc '"), "No closing quotation"),
    ):
        environment = {**os.environ, "ZONEOUT_CACHE": str(tmp_path), **wrong}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("compiled loop is not available") == 1 and reason in done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the compiled loop has been kept."""
    folder = tmp_path_factory.mktemp("cache") / "kept"
    load_with(ZONEOUT_CACHE=str(folder))
    return folder


# how fast it is, is not asked
QUICKLY = "from zoneout.ops.cpu.native import build; build.FLAGS = ('-O0', *build.FLAGS[1:])\n"
LOADED = "from zoneout.ops.cpu import native; assert native.load() is not None, native.why_not()"


def load_with(**environment: str) -> None:
    """Load the compiled loop in a process of its own."""
    if native.load() is None:
        pytest.skip(f"no compiled loop here: {native.why_not()}")
    done = subprocess.run(
        [sys.executable, "-c", QUICKLY + LOADED],
        env={**os.environ, **environment},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_library_is_built_where_it_is_told_and_kept(built):
    """It would be compiled anew in every process."""
    (kept,) = built.glob("loop-*")
    stamp = kept.stat().st_mtime_ns
    load_with(ZONEOUT_CACHE=str(built))
    assert [kept] == list(built.glob("loop-*")) and kept.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("wrong", ["no-such-compiler", "/bin/false", "cc '"])
def test_a_wrong_compiler_is_passed_over(wrong, built):
    """Somebody whose $CC is meant for something else would get the slow loop, with a compiler at
    hand.
    """
    load_with(CC=wrong, ZONEOUT_CACHE=str(built))


def test_a_library_that_was_cut_short_is_built_anew(built, tmp_path):
    """Loading it would end Python with SIGBUS at every start, until somebody finds out which
    file to delete.
    """
    (kept,) = built.glob("loop-*")
    (tmp_path / kept.name).write_bytes(kept.read_bytes()[:3000])
    load_with(ZONEOUT_CACHE=str(tmp_path))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [kept.read_bytes()]


def test_nothing_is_left_behind_without_a_cache(tmp_path):
    """Every process of somebody with a read-only home would leave a folder in /tmp."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    load_with(ZONEOUT_CACHE=str(tmp_path / "file" / "cache"), TMPDIR=str(tmp_path / "tmp"))
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.skipif(os.name != "posix", reason="folders and rights as in Unix")
def test_a_cache_that_is_no_use(tmp_path):
    """A file in the place of the folder, or a user without a home, means the slow loop, or an
    error at every call.
    """
    (tmp_path / "file").touch()
    load_with(ZONEOUT_CACHE=str(tmp_path / "file"))
    nobody = (
        "import pathlib\ndef home(): raise RuntimeError('Could not determine home directory.')\n"
        f"pathlib.Path.home = home\n{QUICKLY}{LOADED}"
    )
    environment = {
        k: v for k, v in os.environ.items() if k not in ("ZONEOUT_CACHE", "XDG_CACHE_HOME")
    }
    done = subprocess.run([sys.executable, "-c", nobody], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_cache_named_from_here(built, monkeypatch):
    """A library in a folder named from here is not found, and so built anew in every process."""
    monkeypatch.chdir(built)
    monkeypatch.setenv("ZONEOUT_CACHE", ".")
    (path,) = built.glob("loop-*")
    assert kept.find(path.name.rpartition("-")[0], ".so") == path.read_bytes()


def test_a_kernel_that_was_cut_short_is_compiled_anew(tmp_path, monkeypatch):
    """The driver, which is not told where an image ends, would be given half of one at every
    start.
    """
    made = []
    monkeypatch.setenv("ZONEOUT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_version", lambda: (13, 0))
    monkeypatch.setattr(
        compiler, "compiled", lambda *source: made.append(source) or (b"machine code", "")
    )
    for damage in (None, b"machine", b""):
        for _ in range(2):
            assert compiler.machine_code((9, 0), "dropout.cu", []) == b"machine code"
        assert len(made) == 1, "compiled again though it was kept"
        made.clear()
        (kept,) = tmp_path.iterdir()
        kept.write_bytes(damage or b"")


def test_the_struct_is_the_one_of_the_header():
    """The two descriptions of what the compiled loop is given have drifted apart."""
    import re

    header = (native.HERE / "loop.h").read_text()
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    for struct, cls in (("Stream", native.Stream), ("Loop", native.Loop)):
        body = re.search(
            r"typedef struct \{((?:(?!typedef struct).)*?)\} " + struct + ";", text, re.S
        )
        assert body is not None
        names = [
            re.sub(r"\[\w+\]", "", name).strip(" *\n")
            for declaration in body[1].split(";")
            for name in re.sub(r"^\s*(const )?(\w+)\s", "", declaration.strip() + " ").split(",")
            if name.strip(" *\n")
        ]
        assert names == [field[0] for field in cls._fields_], struct


@pytest.mark.parametrize("name", ["bias_ih_l0", "bias_hh_l0", "norm_ih_l0"])
@pytest.mark.parametrize("how", ["column", "expanded"])
def test_parameters_that_lie_apart(loop, name, how):
    """A bias that is a column of something larger is refused, or read as if it lay in one piece."""
    ours, theirs = (zo.GRU(3, 4, norm="layer", backend=backend) for backend in ("cpu", "reference"))
    values = {key: value.detach() for key, value in ours.named_parameters()}
    apart = (
        torch.randn(len(values[name]), 2)[:, 0]
        if how == "column"
        else torch.randn(1).expand(len(values[name]))
    )
    got, want = (
        torch.func.functional_call(layer, values | {name: apart}, torch.ones(5, 2, 3))
        for layer in (ours, theirs)
    )
    torch.testing.assert_close(got[0], want[0])


def test_a_seed_that_counts_on():
    """A seed kept in a tensor, and counted on after the call, is not what the way back draws
    from.
    """
    layer, seed, x = (
        zo.LSTM(3, 4, noise=zo.Zoneout(cell=0.3, hidden=0.3)),
        torch.tensor(5),
        torch.randn(9, 2, 3),
    )
    y, _ = layer(x, seed=seed)
    seed += 1
    (got,) = torch.autograd.grad(y.sum(), layer.weight_hh_l0)
    (want,) = torch.autograd.grad(layer(x, seed=5)[0].sum(), layer.weight_hh_l0)
    assert torch.equal(got, want)


def test_the_last_step_there_is():
    """The number of a last step that fits into 32 bits is refused."""
    layer, x = zo.LSTM(3, 4, noise=zo.Zoneout(cell=0.3, hidden=0.3)), torch.randn(5, 2, 3)
    layer(x, seed=1, first_step=2**32 - 5)
    with pytest.raises(ValueError, match="first_step"):
        layer(x, seed=1, first_step=2**32 - 4)


def test_batch_norm_of_many_rows(loop):
    """Sums over rows get worse with their number: float32 added up one by one."""
    found = {}
    for backend, dtype in (("reference", torch.float64), ("cpu", torch.float32)):
        torch.manual_seed(0)
        layer = zo.LSTM(4, 8, norm=zo.RecurrentBatchNorm(5), backend=backend)
        found[backend] = layer.to(dtype)(torch.randn(5, 16_000, 4).to(dtype))[0].detach().double()
    assert (found["cpu"] - found["reference"]).norm() <= 8e-7 * found["reference"].norm()
