"""Cells and whole layers against the paper's equations, written out in NumPy (`oracle.py`).

Everything is float64. Every whole-layer test runs on every backend whose device is here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import zoneout as zo
from zoneout import cells, ops
from zoneout.draws import Draw
from zoneout.ops.dropout import dropout
from zoneout.streams import Rule

KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
MASKS = ("unit", "shared", "step", "sequence", "static")
MODES = ("train", "expectation", "off", "sample")
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float64: dict(rtol=1e-10, atol=1e-11),
    torch.float32: dict(rtol=2e-5, atol=1e-5),  # what a GPU's kernels compute in
}
T, B, I, H, P = 5, 3, 2, 5, 3  # an odd number of units: four share a draw, the last is left over
SEED = 2024


def on_gpu(backend: str | None) -> bool:
    return backend == "cuda"


BACKENDS = [
    pytest.param(name, marks=[pytest.mark.gpu] if on_gpu(name) else []) for name in ops.BACKENDS
]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
in_float64 = pytest.mark.parametrize("backend", [name for name in ops.BACKENDS if not on_gpu(name)])


# --- making layers and calling them ---------------------------------------------------------------


def make(
    kind: str, noise: Any = None, mode: str = "train", backend: Any = None, **options: Any
) -> Any:
    """A layer with every parameter and statistic random, so that nothing hides behind a zero or
    a one.
    """
    if mode not in ("train", "expectation"):
        noise = tuple(dataclasses.replace(one, at_eval=mode) for one in as_tuple(noise))
    classes = {"lstm": zo.LSTM, "gru": zo.GRU}
    if kind not in classes:
        options["nonlinearity"] = kind.removeprefix("rnn_")
    sizes = (options.pop("input_size", I), options.pop("hidden_size", H))
    device = "cuda" if on_gpu(backend) else "cpu"
    dtype = torch.float32 if on_gpu(backend) else torch.float64
    layer = classes.get(kind, zo.RNN)(
        *sizes, noise=noise, backend=backend, dtype=dtype, device=device, **options
    )
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, value in layer.state_dict().items():
            random = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value.copy_(random.abs() + 0.3 if name.startswith("var_") else 0.6 * random)
    return layer.train(mode == "train")


def as_tuple(noise: Any) -> tuple[Any, ...]:
    return () if noise is None else tuple(noise) if isinstance(noise, (list, tuple)) else (noise,)


def inputs(layer: Any, steps: int = T, batch: int = B, given_state: bool = True) -> tuple[Any, Any]:
    """Random x [T, B, input] and a state, as arrays."""
    rng = np.random.default_rng(5)
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    x = rng.standard_normal((steps, batch, layer.input_size))
    h0 = 0.7 * rng.standard_normal((count, batch, layer.proj_size or layer.hidden_size))
    c0 = 0.7 * rng.standard_normal((count, batch, layer.hidden_size))
    return x, (None if not given_state else (h0, c0) if layer.mode == "LSTM" else h0)


def tensors(layer: Any, arrays: Any) -> Any:
    if arrays is None:
        return None
    if isinstance(arrays, tuple):
        return tuple(tensors(layer, one) for one in arrays)
    values = torch.tensor(arrays, device=layer.weight_ih_l0.device)
    return values.to(layer.weight_ih_l0.dtype) if values.is_floating_point() else values


def call(
    layer: Any, x: Any, hx: Any, resets: Any = None, seed: int = SEED, **options: Any
) -> dict[str, Any]:
    """What a layer returns, as arrays [T, B, ·]."""
    swap = (lambda v: v.transpose(0, 1)) if layer.batch_first else (lambda v: v)
    if resets is not None:
        options["resets"] = swap(tensors(layer, np.asarray(resets)))
    lstm = layer.mode == "LSTM"
    with torch.no_grad():
        out = layer(
            swap(tensors(layer, x)), tensors(layer, hx), seed=seed, return_cells=lstm, **options
        )
    h, c = out[1] if lstm else (out[1], None)
    got = {"y": swap(out[0]), "h": h}
    if lstm:
        got |= {"c": c, "cells": swap(out[2])}
    return {name: value.cpu().numpy() for name, value in got.items()}


def tolerance(layer: Any) -> dict[str, Any]:
    return TOLERANCES[layer.weight_ih_l0.dtype]


def check(layer: Any, x: Any, hx: Any, **options: Any) -> None:
    """A layer returns what the oracle says."""
    options = {"seed": SEED} | options
    want = oracle.expected(layer, x, hx, **options)
    for name, value in call(layer, x, hx, **options).items():
        np.testing.assert_allclose(value, getattr(want, name), **tolerance(layer), err_msg=name)


# --- what is tested -------------------------------------------------------------------------------


def of_mask(kind: type, mask: str, **options: Any) -> Any:
    return kind(mask=mask, **({"seed": 77} if mask == "static" else {}), **options)


def all_noises(kind: str) -> dict[str, Any]:
    """Every method that a cell can have, with every kind of mask, and some of them together."""
    lstm, gated = kind == "lstm", kind in ("lstm", "gru")
    state: dict[str, Any] = dict(cell=0.4, hidden=0.3) if lstm else dict(hidden=0.4)
    noises: dict[str, Any] = {"none": None}
    for mask in MASKS:
        noises[f"zoneout-{mask}"] = of_mask(zo.Zoneout, mask, **state)
        noises[f"state-dropout-{mask}"] = of_mask(zo.StateDropout, mask, **state)
        if gated and mask != "shared":
            noises[f"recurrent-dropout-{mask}"] = of_mask(zo.RecurrentDropout, mask, rate=0.4)
        if lstm and mask != "shared":
            noises[f"hold-{mask}"] = of_mask(
                zo.RecurrentDropout, mask, rate=0.4, hold_output_gate=True
            )
    noises |= {
        "variational-input": zo.VariationalDropout(input=0.4),
        "variational-hidden": zo.VariationalDropout(hidden=0.4),
        "variational": zo.VariationalDropout(input=0.3, hidden=0.4),
        "weight-drop": zo.WeightDrop(rate=0.3),
        "weight-noise": zo.WeightNoise(std=0.2),
        "zoneout-always": zo.Zoneout(hidden=1.0),
        "zoneout+variational+weights": [
            zo.Zoneout(**state),
            zo.VariationalDropout(input=0.2, hidden=0.3),
            zo.WeightDrop(rate=0.2),
            zo.WeightNoise(std=0.1),
        ],
    }
    if gated:
        noises |= {
            "zoneout+recurrent-dropout": [zo.Zoneout(**state), zo.RecurrentDropout(rate=0.4)],
            "state-dropout+recurrent-dropout": [
                zo.StateDropout(hidden=0.3),
                zo.RecurrentDropout(rate=0.4),
            ],
        }
    if lstm:
        noises |= {
            "zoneout-cell": zo.Zoneout(cell=0.5),
            "zoneout-hidden": zo.Zoneout(hidden=0.5),
            "rnn-drop": zo.StateDropout(cell=0.4, mask="sequence"),
            "state-dropout-hidden": zo.StateDropout(hidden=0.4),
            "zoneout-cell+zero-hidden": [zo.Zoneout(cell=0.4), zo.StateDropout(hidden=0.3)],
            "zero-cell+zoneout-hidden+hold": [
                zo.StateDropout(cell=0.3, mask="sequence"),
                zo.Zoneout(hidden=0.4, mask="step"),
                zo.RecurrentDropout(rate=0.4, hold_output_gate=True),
            ],
            "shared+shared": [
                zo.Zoneout(cell=0.4, mask="shared"),
                zo.StateDropout(hidden=0.4, mask="shared"),
            ],
        }
    return noises


NOISES = [(kind, name) for kind in KINDS for name in all_noises(kind)]

RICH: dict[str, Any] = dict(num_layers=2, bidirectional=True, dropout=0.3)
RICH_CALL: dict[str, Any] = dict(
    lengths=[4, 5, 2],
    resets=np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0], [1, 1, 1], [0, 0, 1]], dtype=bool),
    first_step=3,
    examples=[9, 2, 70_000],
)


def rich(kind: str) -> dict[str, Any]:
    return RICH | ({"proj_size": P} if kind == "lstm" else {})


# --- the step functions ---------------------------------------------------------------------------


STREAMS = ("cell", "hidden", "zero_cell", "zero_hidden", "update")


def step_noise(
    kind: str, units: dict[str, int], mode: str, rng: Any
) -> tuple[cells.Keep, oracle.Noise]:
    """A random mask (or a rate in its place) for everything that a step can replace, in both
    forms.
    """
    if mode == "nothing":
        return cells.Keep(), oracle.Noise()
    streams = [s for s in STREAMS if kind == "lstm" or "cell" not in s]
    streams = [s for s in streams if s != "update" or kind in ("lstm", "gru")]
    masks, noise = {}, oracle.Noise()
    for stream in streams:
        shape = (1, B, units[stream])
        d = rng.random(shape) < 0.4 if mode == "mask" else rng.random(shape)
        masks[stream] = torch.tensor(d[0])
        setattr(noise, stream, d * 1.0)
    states = {"h": "hidden", "c": "cell"}
    zone, zero = (
        {
            state: masks[before + stream]
            for state, stream in states.items()
            if before + stream in masks
        }
        for before in ("", "zero_")
    )
    return cells.Keep(zone, zero, masks.get("update")), noise


@pytest.mark.parametrize("mode", ["nothing", "mask", "rate"])
@pytest.mark.parametrize("hold", [False, True])
def test_lstm_step(mode, hold):
    """The LSTM's step function is not the paper's: a gate, a mask or the projection is in the
    wrong place.
    """
    rng = np.random.default_rng(1)
    gates, c, h = (
        rng.standard_normal((B, 4 * H)),
        rng.standard_normal((B, H)),
        rng.standard_normal((B, P)),
    )
    w_hr, held, scale = rng.standard_normal((P, H)), rng.random((B, H)), rng.standard_normal(H)
    units = dict.fromkeys(("cell", "zero_cell", "update"), H) | dict.fromkeys(
        ("hidden", "zero_hidden"), P
    )
    keep, noise = step_noise("lstm", units, mode, rng)
    r = rng.standard_normal((B, 4 * H))
    states, gate = cells.step(
        cells.lstm,
        torch.tensor(gates - r),
        torch.tensor(r),
        [torch.tensor(h), torch.tensor(c)],
        keep=keep,
        held=cells.Held(torch.tensor(held)) if hold else None,
        expose=lambda v: v * torch.tensor(scale) + 0.1,
        project=lambda v: v @ torch.tensor(w_hr).T,
    )
    assert (gate is not None) == hold
    got = [*states, *([] if gate is None else [gate])]
    for b in range(B):
        d = noise.at(0, b)
        new_c, o = oracle.lstm_candidate(gates[b], c[b], d)
        candidate = oracle.lstm_exposed(o, held[b] if hold else None, new_c * scale + 0.1, d, w_hr)
        want = oracle.zoned(candidate, h[b], d.hidden), oracle.zoned(new_c, c[b], d.cell), o
        for ours, theirs in zip(got, want):
            np.testing.assert_allclose(ours[b].numpy(), theirs, **TOLERANCES[torch.float64])


@pytest.mark.parametrize("mode", ["nothing", "mask", "rate"])
def test_gru_step(mode):
    """The GRU's step function is not torch's equations with the masks where FACTS puts them."""
    rng = np.random.default_rng(2)
    gx, gh, h = (
        rng.standard_normal((B, 3 * H)),
        rng.standard_normal((B, 3 * H)),
        rng.standard_normal((B, H)),
    )
    units = dict.fromkeys(STREAMS, H)
    keep, noise = step_noise("gru", units, mode, rng)
    (got,), _ = cells.step(
        cells.gru, torch.tensor(gx), torch.tensor(gh), [torch.tensor(h)], keep=keep
    )
    for b in range(B):
        d = noise.at(0, b)
        want = oracle.zoned(oracle.gru_candidate(gx[b], gh[b], h[b], d), h[b], d.hidden)
        np.testing.assert_allclose(got[b].numpy(), want, **TOLERANCES[torch.float64])


@pytest.mark.parametrize("mode", ["nothing", "mask", "rate"])
@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_rnn_step(mode, nonlinearity):
    """The plain RNN's step function is not h = f(gates) with the masks after it."""
    rng = np.random.default_rng(3)
    gates, h = rng.standard_normal((B, H)), rng.standard_normal((B, H))
    units = dict.fromkeys(STREAMS, H)
    keep, noise = step_noise("rnn", units, mode, rng)
    definition, theirs = (
        cells.CELLS[f"rnn_{nonlinearity}"],
        np.tanh if nonlinearity == "tanh" else oracle.relu,
    )
    r = rng.standard_normal((B, H))
    (got,), _ = cells.step(
        definition, torch.tensor(gates - r), torch.tensor(r), [torch.tensor(h)], keep=keep
    )
    for b in range(B):
        d = noise.at(0, b)
        want = oracle.zoned(oracle.rnn_candidate(gates[b], d, theirs), h[b], d.hidden)
        np.testing.assert_allclose(got[b].numpy(), want, **TOLERANCES[torch.float64])


# --- whole layers ---------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind, noise", NOISES)
def test_layer(kind, noise, mode, backend):
    """A method does something else than its equation says: in training, or at evaluation."""
    layer = make(kind, all_noises(kind)[noise], mode, backend)
    check(layer, *inputs(layer))


@every_backend
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind, noise", NOISES)
def test_rich_layer(kind, noise, mode, backend):
    """A method is wrong in a stack, a direction, a projection, a short sequence or at a cut."""
    layer = make(kind, all_noises(kind)[noise], mode, backend, **rich(kind))
    check(layer, *inputs(layer), **RICH_CALL)


@every_backend
@pytest.mark.parametrize("shape", ["simple", "rich"])
@pytest.mark.parametrize("mode", ["train", "expectation"])
@pytest.mark.parametrize("noise", ["none", "zoneout", "all"])
@pytest.mark.parametrize("norm", ["layer", "batch", "batch-at-eval"])
@pytest.mark.parametrize("kind", KINDS)
def test_norm(kind, norm, noise, mode, shape, backend):
    """A norm takes the wrong moments, normalises the wrong thing, or meets the noise in the
    wrong order.
    """
    norms = {
        "layer": "layer",
        "batch": zo.RecurrentBatchNorm(steps=6, eps=1e-3),
        "batch-at-eval": zo.RecurrentBatchNorm(steps=6, at_eval="batch"),
    }
    state: dict[str, Any] = dict(cell=0.4, hidden=0.3) if kind == "lstm" else dict(hidden=0.4)
    every: list[Any] = [
        zo.Zoneout(**state),
        zo.VariationalDropout(input=0.3, hidden=0.3),
        zo.WeightDrop(rate=0.2),
    ]
    if kind in ("lstm", "gru"):
        every.append(zo.RecurrentDropout(rate=0.3, hold_output_gate=kind == "lstm"))
    noises = {"none": None, "zoneout": zo.Zoneout(**state), "all": every}
    options = rich(kind) if shape == "rich" else {}
    layer = make(kind, noises[noise], mode, backend, norm=norms[norm], **options)
    check(layer, *inputs(layer), **(RICH_CALL if shape == "rich" else {}))


@every_backend
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options, calls",
    [
        (dict(num_layers=2), {}),
        (dict(num_layers=2, dropout=0.5), {}),
        (dict(num_layers=2, dropout=0.5, bidirectional=True), {}),
        (dict(bidirectional=True), {}),
        (dict(batch_first=True), {}),
        (dict(batch_first=True, bidirectional=True), RICH_CALL),
        (dict(bias=False, num_layers=2), {}),
        (dict(bias=False, norm="layer"), {}),
        (dict(learn_initial_state=True), dict(resets=RICH_CALL["resets"])),
        (dict(learn_initial_state=True, num_layers=2, bidirectional=True), RICH_CALL),
        ({}, dict(lengths=[2, 0, 5])),
        (dict(bidirectional=True), dict(lengths=[2, 0, 5])),
        ({}, dict(resets=RICH_CALL["resets"])),
        (dict(bidirectional=True), dict(resets=RICH_CALL["resets"])),
        (dict(bidirectional=True), dict(resets=RICH_CALL["resets"], lengths=[5, 1, 3])),
        ({}, dict(first_step=2**20)),
        ({}, dict(examples=6)),
        (dict(bidirectional=True), dict(examples=[5, 5, 2**32 - 1], first_step=1)),
        ({}, dict(seed=-1)),
        ({}, dict(seed=2**63 - 1)),
    ],
    ids=str,
)  # fmt: skip
def test_shapes_and_coordinates(kind, options, calls, backend):
    """A constructor option or a coordinate of the draws means something else than it says."""
    state: dict[str, Any] = dict(cell=0.4, hidden=0.3) if kind == "lstm" else dict(hidden=0.4)
    noise = [zo.Zoneout(**state), zo.VariationalDropout(input=0.3, hidden=0.3)]
    layer = make(kind, noise, "train", backend, **options)
    check(layer, *inputs(layer, given_state="learn_initial_state" not in options), **calls)
    check(layer, *inputs(layer, given_state=False), **calls)
    layer.eval()
    check(layer, *inputs(layer), **calls)


@every_backend
@pytest.mark.parametrize("mode", ["train", "expectation"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("proj_size", [0, P])
def test_rates_of_layers_and_units(mask, mode, proj_size, backend):
    """A list of rates does not go to its layers, or a tensor of rates not to its units."""
    cell, hidden = torch.linspace(0, 1, H), torch.linspace(1, 0, proj_size or H)
    noise = [
        of_mask(zo.Zoneout, mask, cell=[cell, 0.3], hidden=[0.0, hidden]),
        zo.VariationalDropout(input=[torch.tensor([0.2, 0.9]), 0.0], hidden=[0.5, hidden]),
        zo.WeightDrop(rate=[0.0, 0.4]),
        zo.WeightNoise(std=[0.3, 0.0]),
    ]
    layer = make("lstm", noise, mode, backend, num_layers=2, proj_size=proj_size)
    check(layer, *inputs(layer))


@every_backend
@pytest.mark.parametrize("mode", ["train", "expectation"])
@pytest.mark.parametrize("mask", ["unit", "step", "sequence", "static"])
def test_rates_of_units_on_the_update(mask, mode, backend):
    """Recurrent dropout with a rate for each unit drops, or holds the gate of, other units."""
    noise = of_mask(zo.RecurrentDropout, mask, rate=torch.linspace(0, 1, H), hold_output_gate=True)
    check(make("lstm", noise, mode, backend), *inputs(make("lstm")))


@every_backend
@pytest.mark.parametrize("hidden_size", [1, 3, 4, 8, 9])
def test_odd_and_even_sizes(hidden_size, backend):
    """Units that share a draw, or the last ones left over, take each other's bits."""
    noise = [
        zo.Zoneout(cell=0.5, hidden=0.5),
        zo.RecurrentDropout(rate=0.5),
        zo.VariationalDropout(input=0.5, hidden=0.5),
    ]
    layer = make(
        "lstm", noise, "train", backend, hidden_size=hidden_size, input_size=hidden_size + 2
    )
    check(layer, *inputs(layer))
    check(layer, *inputs(layer, steps=1, batch=1))


@every_backend
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_is_padded(kind, bidirectional, backend):
    """A packed batch, sorted or not, is not what the equations give in the caller's order of
    rows.
    """
    state: dict[str, Any] = dict(cell=0.4, hidden=0.3) if kind == "lstm" else dict(hidden=0.4)
    layer = make(kind, zo.Zoneout(**state), "train", backend, bidirectional=bidirectional)
    x, hx = inputs(layer)
    lengths = [2, 5, 4]
    packed = pack_padded_sequence(tensors(layer, x), torch.tensor(lengths), enforce_sorted=False)
    resets = tensors(layer, RICH_CALL["resets"])
    with torch.no_grad():
        y, state_n = layer(packed, tensors(layer, hx), seed=SEED, resets=resets)
    want = oracle.expected(layer, x, hx, lengths=lengths, seed=SEED, resets=RICH_CALL["resets"])
    np.testing.assert_allclose(pad_packed_sequence(y)[0].cpu().numpy(), want.y, **tolerance(layer))
    h = state_n[0] if kind == "lstm" else state_n
    np.testing.assert_allclose(h.cpu().numpy(), want.h, **tolerance(layer))
    if want.c is not None:
        np.testing.assert_allclose(state_n[1].cpu().numpy(), want.c, **tolerance(layer))


@every_backend
@pytest.mark.parametrize("kind", KINDS)
def test_unbatched(kind, backend):
    """A sequence without a batch dimension is not a batch of one."""
    state: dict[str, Any] = dict(cell=0.4, hidden=0.3) if kind == "lstm" else dict(hidden=0.4)
    layer = make(kind, zo.Zoneout(**state), "train", backend, bidirectional=True)
    x, hx = inputs(layer, batch=1)
    resets = RICH_CALL["resets"][:, :1]
    one = tuple(v[:, 0] for v in hx) if kind == "lstm" else hx[:, 0]
    with torch.no_grad():
        arguments = (tensors(layer, v) for v in (x[:, 0], one))
        y, h = layer(*arguments, seed=SEED, resets=tensors(layer, resets[:, 0]), examples=4)
    want = oracle.expected(layer, x, hx, seed=SEED, resets=resets, examples=4)
    np.testing.assert_allclose(y.cpu().numpy(), want.y[:, 0], **tolerance(layer))
    for ours, theirs in zip(h if kind == "lstm" else (h,), (want.h, want.c)):
        np.testing.assert_allclose(ours.cpu().numpy(), theirs[:, 0], **tolerance(layer))


@every_backend
@pytest.mark.parametrize("kind", KINDS)
def test_cells_step_by_step(kind, backend):
    """A cell called step by step with the layer's seed does not do what the layer does."""
    state: dict[str, Any] = dict(cell=0.4, hidden=0.3) if kind == "lstm" else dict(hidden=0.4)
    noise = [
        zo.Zoneout(**state),
        zo.VariationalDropout(input=0.3, hidden=0.3),
        zo.WeightDrop(rate=0.2),
        zo.WeightNoise(std=0.1),
    ]
    layer = make(kind, noise, "train", backend, norm="layer")
    x, hx = inputs(layer)
    classes = {"lstm": zo.LSTMCell, "gru": zo.GRUCell}
    options = {} if kind in classes else {"nonlinearity": kind.removeprefix("rnn_")}
    cell = classes.get(kind, zo.RNNCell)(
        I, H, noise=noise, norm="layer", backend=backend, **options
    ).to(layer.weight_ih_l0)
    cell.load_state_dict(
        {name.removesuffix("_l0"): value for name, value in layer.state_dict().items()}
    )
    want = oracle.expected(layer, x, hx, seed=SEED, examples=3, first_step=2)
    now = tensors(layer, tuple(v[0] for v in hx) if kind == "lstm" else hx[0])
    for t, x_t in enumerate(tensors(layer, x)):
        with torch.no_grad():
            now = cell(x_t, now, seed=SEED, step=t + 2, examples=3)
        h = now[0] if kind == "lstm" else now
        np.testing.assert_allclose(h.cpu().numpy(), want.y[t], **tolerance(layer))


# --- any combination ------------------------------------------------------------------------------


@st.composite
def combinations(draw):
    """A layer and a call of it, of any kind."""
    kind = draw(st.sampled_from(KINDS))
    lstm, gated = kind == "lstm", kind in ("lstm", "gru")
    rate = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])

    def mask(names: Any) -> dict[str, Any]:
        name = draw(st.sampled_from(names))
        return dict(mask=name) | (dict(seed=draw(st.integers(0, 99))) if name == "static" else {})

    states: dict[Any, dict[str, Any]] = {zo.Zoneout: mask(MASKS), zo.StateDropout: mask(MASKS)}
    for state in ("cell", "hidden") if lstm else ("hidden",):
        states[draw(st.sampled_from(list(states)))][state] = draw(rate)
    noise = [kind(**settings) for kind, settings in states.items()]
    if gated and draw(st.booleans()):
        hold = lstm and draw(st.booleans())
        masks = ("unit", "step", "sequence", "static")
        noise.append(zo.RecurrentDropout(rate=draw(rate), hold_output_gate=hold, **mask(masks)))
    if draw(st.booleans()):
        noise.append(zo.VariationalDropout(input=draw(rate), hidden=draw(rate)))
    if draw(st.booleans()):
        noise.append(zo.WeightDrop(rate=draw(st.sampled_from([0.1, 0.5]))))
    at_eval = st.sampled_from(["running", "batch"])
    batch_norm = st.builds(zo.RecurrentBatchNorm, steps=st.integers(1, 5), at_eval=at_eval)
    options: dict[str, Any] = dict(
        num_layers=draw(st.integers(1, 2)),
        bidirectional=draw(st.booleans()),
        batch_first=draw(st.booleans()),
        bias=draw(st.booleans()),
        learn_initial_state=draw(st.booleans()),
        norm=draw(st.none() | st.just("layer") | batch_norm),
        hidden_size=draw(st.integers(1, 6)),
        input_size=draw(st.integers(1, 5)),
    )
    if options["num_layers"] == 2:
        options["dropout"] = draw(st.sampled_from([0.0, 0.5]))
    if lstm and options["hidden_size"] > 1 and draw(st.booleans()):
        options["proj_size"] = options["hidden_size"] - 1
    least = 2 if isinstance(options["norm"], zo.RecurrentBatchNorm) else 1
    steps, batch = draw(st.integers(1, 4)), draw(st.integers(least, 3))

    def one_a_row(most: int) -> Any:
        return st.lists(st.integers(0, most), min_size=batch, max_size=batch)

    calls: dict[str, Any] = dict(
        first_step=draw(st.integers(0, 4)),
        examples=draw(st.none() | st.integers(0, 9) | one_a_row(99)),
        lengths=draw(st.none() | one_a_row(steps)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
    )
    if draw(st.booleans()):
        bits = draw(st.lists(st.booleans(), min_size=steps * batch, max_size=steps * batch))
        calls["resets"] = np.array(bits).reshape(steps, batch)
    mode = draw(st.sampled_from(MODES))
    return kind, noise, mode, options, steps, batch, draw(st.booleans()), calls


@every_backend
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(combination=combinations())
def test_any_combination(backend, combination):
    """Two things that are right alone are wrong together."""
    kind, noise, mode, options, steps, batch, given_state, calls = combination
    layer = make(kind, noise, mode, backend, **options)
    check(layer, *inputs(layer, steps, batch, given_state), **calls)


# --- gradients ------------------------------------------------------------------------------------


def slopes(
    layer: Any, x: Any, hx: Any, weights: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """For all that a call depends on: a random direction, and the loss's derivative in it by the
    oracle.
    """
    parameters = [name for name, _ in layer.named_parameters()]
    point = oracle.values(layer) | {"x": x}
    if hx is not None:
        point |= {"h0": hx[0], "c0": hx[1]} if layer.mode == "LSTM" else {"h0": hx}
    rng = np.random.default_rng(8)
    out = {}
    for name in (
        ["x"] + [n for n in ("h0", "c0") if n in point and n not in parameters] + parameters
    ):
        v = rng.standard_normal(point[name].shape)
        moved = point | {name: point[name] + 1e-30j * v}
        state = (
            None
            if hx is None
            else (moved["h0"], moved["c0"])
            if layer.mode == "LSTM"
            else moved["h0"]
        )
        got = oracle.expected(layer, moved["x"], state, arrays=moved, **options)
        loss = sum(np.sum(weight * getattr(got, of)) for of, weight in weights.items())
        out[name] = (v, np.imag(loss) * 1e30)
    return out


def check_gradients(layer: Any, hx_given: bool = True, **options: Any) -> None:
    """The gradients of a random function of everything a layer returns, in random directions."""
    x, hx = inputs(layer, given_state=hx_given)
    options = {"seed": SEED} | options
    rng = np.random.default_rng(9)
    shapes = call(layer, x, hx, **options)
    weights = {name: rng.standard_normal(value.shape) for name, value in shapes.items()}
    want = slopes(layer, x, hx, weights, options)

    lstm = layer.mode == "LSTM"
    leaves = {"x": tensors(layer, x).requires_grad_()}
    if hx is not None:
        states = hx if lstm else (hx,)
        leaves |= {n: tensors(layer, s).requires_grad_() for n, s in zip(("h0", "c0"), states)}
    given_state = None if hx is None else (leaves["h0"], leaves["c0"]) if lstm else leaves["h0"]
    if "resets" in options:
        options = options | {"resets": tensors(layer, options["resets"])}
    layer.zero_grad()
    out = layer(leaves["x"], given_state, return_cells=lstm, **options)
    parts = {"y": out[0], "h": out[1][0] if lstm else out[1]}
    if lstm:
        parts |= {"c": out[1][1], "cells": out[2]}
    sum((parts[n] * tensors(layer, w)).sum() for n, w in weights.items()).backward()
    leaves |= dict(layer.named_parameters())
    for name, (v, slope) in want.items():
        ours = np.sum(leaves[name].grad.cpu().numpy() * v)
        exact = layer.weight_ih_l0.dtype == torch.float64
        np.testing.assert_allclose(
            ours, slope, rtol=1e-9 if exact else 1e-4, atol=1e-10 if exact else 1e-4, err_msg=name
        )


@every_backend
@pytest.mark.parametrize("mode", ["train", "expectation"])
@pytest.mark.parametrize("kind, noise", NOISES)
def test_gradients(kind, noise, mode, backend):
    """A gradient (of x, a state, a weight) is not the derivative of the method's equations."""
    check_gradients(make(kind, all_noises(kind)[noise], mode, backend))


@every_backend
@pytest.mark.parametrize("mode", ["train", "expectation"])
@pytest.mark.parametrize(
    "norm", [None, "layer", zo.RecurrentBatchNorm(6)], ids=["plain", "layer", "batch"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_rich_layers(kind, norm, mode, backend):
    """A gradient is lost or made up at a layer, a direction, a norm, a short sequence or a cut."""
    state: dict[str, Any] = dict(cell=0.4, hidden=0.3) if kind == "lstm" else dict(hidden=0.4)
    noise = [
        zo.Zoneout(**state),
        zo.VariationalDropout(input=0.3, hidden=0.3),
        zo.WeightDrop(rate=0.2),
        zo.WeightNoise(std=0.1),
    ]
    layer = make(kind, noise, mode, backend, norm=norm, **rich(kind))
    check_gradients(layer, **RICH_CALL)
    learned = make(
        kind, noise, mode, backend, norm=norm, learn_initial_state=True, bidirectional=True
    )
    check_gradients(learned, hx_given=False, **RICH_CALL)


# --- the draws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer, direction", [(0, 0), (0, 1), (3, 1)])
def test_masks_lie_where_the_design_puts_them(layer, direction):
    """`masks` does not follow the documented layout, so another backend would draw other masks."""
    noises = {
        "cell": zo.Zoneout(cell=0.5),
        "hidden": zo.Zoneout(hidden=0.5),
        "update": zo.RecurrentDropout(rate=0.5),
        "input": zo.VariationalDropout(input=0.5),
        "variational_hidden": zo.VariationalDropout(hidden=0.5),
    }
    seed, ids = 2**40 + 3, [0, 7, 2**32 - 1]
    for stream, noise in noises.items():
        steps = [0] * 4 if isinstance(noise, zo.VariationalDropout) else range(2, 6)
        got = zo.masks(
            noise,
            seed,
            4,
            3,
            H,
            layer=layer,
            direction=direction,
            examples=torch.tensor(ids),
            first_step=2,
        )
        want = oracle.keeps(seed, stream, 0.5, steps, ids, H, layer, direction)
        np.testing.assert_array_equal(got[stream].numpy(), want, err_msg=stream)


@pytest.mark.parametrize(
    "mask, stream",
    [(mask, stream) for mask in MASKS for stream in ("cell", "hidden")]
    + [
        (mask, "update") for mask in MASKS if mask != "shared"
    ],  # it has nothing to share a mask with
)
def test_masks_see_what_the_design_lets_them_see(mask, stream):
    """A kind of mask depends on a coordinate that it must not see, or not on one that it must."""
    kind, name = (zo.RecurrentDropout, "rate") if stream == "update" else (zo.Zoneout, stream)
    got = zo.masks(of_mask(kind, mask, **{name: 0.5}), SEED, T, B, H, examples=4, first_step=2)[
        stream
    ]
    bits = "cell" if mask == "shared" else stream  # the low ones, for both states
    steps = [0] * T if mask == "sequence" else range(2, 2 + T)
    ids = [0] * B if mask == "static" else range(4, 4 + B)
    units = 1 if mask == "step" else H
    want = oracle.keeps(77 if mask == "static" else SEED, bits, 0.5, steps, ids, units, 0, 0)
    np.testing.assert_array_equal(got.numpy(), np.broadcast_to(want, (T, B, H)))


@in_float64
def test_weight_drop_is_read_back(backend):
    """Weight drop drops other elements of weight_hh, scales them otherwise, or drops input
    weights.
    """
    rate = 0.25
    layer = make("rnn_relu", zo.WeightDrop(rate=rate), "train", backend, hidden_size=9)
    w_ih, w_hh, bias = read_matrices(layer)
    dropped = oracle.keeps(
        SEED, "weight", rate, [0], [0], 81, 0, 0
    )  # a unit is an element of weight_hh
    want = layer.weight_hh_l0.detach().cpu().numpy() * (1 - dropped.reshape(9, 9)) / (1 - rate)
    np.testing.assert_allclose(w_hh, want, rtol=0, atol=1e-10)
    np.testing.assert_allclose(w_ih, layer.weight_ih_l0.detach().cpu().numpy(), rtol=0, atol=1e-10)
    np.testing.assert_allclose(bias, 1000, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rate", [0.999, 0.99999])
def test_scaling_keeps_the_mean_of_what_is_drawn(rate):
    """Inverted scaling divides by another rate than the one drawn: the mean is 1.007 or 1.53
    times too large.
    """
    drawn = round(rate * 65536)
    y = dropout(
        torch.ones(4, 8, 2**15, dtype=torch.float64), rate, torch.tensor(SEED), 0, torch.arange(8)
    )
    kept = y[y != 0]
    assert len(kept) > 5 and (kept == 65536 / (65536 - drawn)).all()
    rule = Rule("weight", "scaled zero", "sequence", "expectation")
    draw = Draw(rule, torch.tensor([rate, 0.0, 0.5, 1.0], dtype=torch.float64), None, 0)
    assert (draw.scale * (65536 - draw.threshold) / 65536).tolist() == [1.0, 1.0, 1.0, 0.0]


@every_backend
def test_a_scaled_rate_of_one_leaves_nothing(backend):
    """What is all dropped is divided by zero: NaN, there or in the gradients, where torch's
    dropout gives zeros.
    """
    noise = [zo.VariationalDropout(input=1.0, hidden=[0.0, 1.0]), zo.WeightDrop(rate=1.0)]
    layer = make("lstm", noise, "train", backend, num_layers=2, dropout=1.0)
    bare = make("lstm", None, "train", backend, num_layers=2)
    x = torch.randn(
        T, B, I, dtype=layer.bias_ih_l0.dtype, device=layer.bias_ih_l0.device, requires_grad=True
    )
    y = layer(x, seed=SEED)[0]
    with torch.no_grad():
        for name, value in bare.named_parameters():
            value.mul_(0.0 if name.startswith("weight") else 1.0)
        want = bare(x)[0]
    torch.testing.assert_close(y, want)
    y.square().sum().backward()
    for name, value in (("x", x), *layer.named_parameters()):
        assert value.grad.isfinite().all(), name
    assert (
        not x.grad.any() and not layer.weight_hh_l0.grad.any() and not layer.weight_ih_l1.grad.any()
    )
    assert layer.bias_ih_l1.grad.any()


def read_matrices(layer: Any, seed: int | None = SEED) -> tuple[Any, Any, Any]:
    """What one call uses as weight_ih, weight_hh and the bias: a ReLU that is always on is
    linear.
    """
    with torch.no_grad():
        layer.bias_ih_l0.fill_(1000.0)
        layer.bias_hh_l0.zero_()
    units = layer.hidden_size
    x = np.concatenate([np.eye(I), np.zeros((units + 1, I))])[None]
    h = np.concatenate([np.zeros((I, units)), np.eye(units), np.zeros((1, units))])[None]
    with torch.no_grad():
        y = layer(tensors(layer, x), tensors(layer, h), seed=seed)[0][0].cpu().numpy()
    bias = y[-1]
    return (y[:I] - bias).T, (y[I:-1] - bias).T, bias


@in_float64
def test_weight_noise_is_read_back(backend):
    """Weight noise is not N(0, std), is the same in two matrices, or falls on a bias."""
    std = 0.075
    layer = make("rnn_relu", zo.WeightNoise(std=std), "train", backend, hidden_size=60)
    w_ih, w_hh, bias = read_matrices(layer)
    on_ih = (w_ih - layer.weight_ih_l0.detach().cpu().numpy()) / std
    on_hh = (w_hh - layer.weight_hh_l0.detach().cpu().numpy()) / std
    np.testing.assert_allclose(bias, 1000, rtol=0, atol=1e-10)
    np.testing.assert_allclose(
        on_ih.ravel(), oracle.normal_numbers(SEED, 60 * I, 0, 0, 0), atol=1e-9
    )
    np.testing.assert_allclose(on_hh.ravel(), oracle.normal_numbers(SEED, 3600, 1, 0, 0), atol=1e-9)
    z = on_hh.ravel()
    assert abs(z.mean()) < 4 / 60
    assert abs(z.std() - 1) < 4 / np.sqrt(2 * 3600)
    assert abs((np.abs(z) < 1).mean() - 0.6827) < 4 * np.sqrt(0.6827 * 0.3173 / 3600)
    assert abs((z**4).mean() - 3) < 4 * np.sqrt(96 / 3600)
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 4 / 60
    assert abs(np.corrcoef(on_ih.ravel(), z[: 60 * I])[0, 1]) < 4 / np.sqrt(60 * I)


@in_float64
def test_weight_noise_of_a_seed(backend):
    """The same seed gives other weight noise, another seed the same, or evaluation any at all."""
    layer = make("rnn_relu", zo.WeightNoise(std=0.1), "train", backend)
    first, again, other = (read_matrices(layer, seed)[1] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (np.abs(first - other) > 1e-6).all()
    torch.manual_seed(3)
    fresh = [read_matrices(layer, None)[1] for _ in range(2)]
    assert (np.abs(fresh[0] - fresh[1]) > 1e-6).all()
    torch.manual_seed(3)
    np.testing.assert_array_equal(read_matrices(layer, None)[1], fresh[0])
    layer.eval()
    np.testing.assert_allclose(
        read_matrices(layer)[1], layer.weight_hh_l0.detach().cpu().numpy(), rtol=0, atol=1e-10
    )


@in_float64
def test_weight_noise_is_one_draw_a_call(backend):
    """Weight noise changes from step to step, or from example to example."""
    layer = make("rnn_relu", zo.WeightNoise(std=0.1), "train", backend)
    w_ih, _, _ = read_matrices(layer)
    x = (
        np.eye(I).repeat(B, 0).reshape(I, B, I).repeat(3, 0)
    )  # each feature at several steps, in every row
    with torch.no_grad():
        layer.weight_hh_l0.zero_()
        noisy = layer(tensors(layer, x), None, seed=SEED)[0].cpu().numpy()
        layer.noise = None
    # The recurrent matrix is noise alone. The oracle uses the same one at every step.
    w_hh = 0.1 * oracle.normal_numbers(SEED, H * H, 1, 0, 0).reshape(H, H)
    a = oracle.values(layer) | {"weight_ih_l0": w_ih, "weight_hh_l0": w_hh}
    want = oracle.expected(layer, x, arrays=a).y
    np.testing.assert_allclose(noisy, want, rtol=1e-10)


@every_backend
def test_noise_may_be_replaced_between_calls(backend):
    """A schedule of rates does not take effect, or leaves something of the old noise behind."""
    layer = make("lstm", zo.Zoneout(cell=0.1, hidden=0.9, mask="static", seed=5), "train", backend)
    x, hx = inputs(layer)
    for noise in (
        zo.Zoneout(cell=0.6, hidden=0.9, mask="static", seed=6),
        zo.Zoneout(cell=0.6),
        [zo.RecurrentDropout(rate=0.5, hold_output_gate=True), zo.VariationalDropout(hidden=0.2)],
        zo.Zoneout(hidden=torch.linspace(0, 1, H)),
        None,
    ):
        layer.noise = noise
        check(layer, x, hx)
