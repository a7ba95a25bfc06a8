"""Every gradient of the reference by finite differences: each cell × noise × norm, initial states
included.

The other backends' gradients are held to the oracle's in `test_oracle.py` and to the reference's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

import zoneout as zo

KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
T, B, I, H, P = (
    3,
    3,
    2,
    3,
    2,
)  # three rows: two, normalised over the batch, are always near 1 and −1
SEED = 12

NORMS: dict[str, Any] = {
    "plain": None,
    "layer": "layer",
    "batch": zo.RecurrentBatchNorm(steps=4, eps=0.1),
}
LENGTHS = [2, 3, 1]
RESETS = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 1]], dtype=torch.bool)


def noises(kind: str) -> dict[str, Any]:
    lstm, gated = kind == "lstm", kind in ("lstm", "gru")
    state: dict[str, Any] = dict(cell=0.4, hidden=0.4) if lstm else dict(hidden=0.4)
    out: dict[str, Any] = {"none": None}
    for mask in ("unit", "shared", "step", "sequence", "static"):
        seed: dict[str, Any] = {"seed": 3} if mask == "static" else {}
        out[f"zoneout-{mask}"] = zo.Zoneout(**state, mask=mask, **seed)
        out[f"state-dropout-{mask}"] = zo.StateDropout(**state, mask=mask, **seed)
    if gated:
        out["recurrent-dropout"] = zo.RecurrentDropout(rate=0.4)
        out["zoneout+recurrent-dropout"] = [
            zo.Zoneout(**state),
            zo.RecurrentDropout(rate=0.4, mask="sequence"),
        ]
    if lstm:
        out["hold"] = zo.RecurrentDropout(rate=0.4, hold_output_gate=True)
        out["zoneout-cell+zero-hidden"] = [zo.Zoneout(cell=0.4), zo.StateDropout(hidden=0.4)]
        out["zero-cell+zoneout-hidden"] = [zo.StateDropout(cell=0.4), zo.Zoneout(hidden=0.4)]
    out["variational"] = zo.VariationalDropout(input=0.4, hidden=0.4)
    out["weight-drop"] = zo.WeightDrop(rate=0.3)
    out["weight-noise"] = zo.WeightNoise(std=0.1)
    out["all"] = [zo.Zoneout(**state), out["variational"], out["weight-drop"], out["weight-noise"]]
    return out


def make(kind: str, **options: Any) -> Any:
    """A layer with random parameters, statistics too."""
    classes: dict[str, Any] = {"lstm": zo.LSTM, "gru": zo.GRU}
    if kind not in classes:
        options["nonlinearity"] = kind.removeprefix("rnn_")
    layer = classes.get(kind, zo.RNN)(I, H, dtype=torch.float64, backend="reference", **options)
    generator = torch.Generator().manual_seed(21)
    with torch.no_grad():
        for name, value in layer.state_dict().items():
            random = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value.copy_(random.abs() + 0.3 if name.startswith("var_") else 0.6 * random)
    return layer


def randn(*shape: int, seed: int = 22) -> Tensor:
    """Random numbers, the same in every run, that ask for a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def function_of(layer: Any, given_state: bool = True, **call: Any) -> tuple[Any, list[Tensor]]:
    """A layer as a function of x, its initial states and all its parameters, and a point to take
    it at.
    """
    lstm = layer.mode == "LSTM"
    call = {"seed": SEED} | call
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    shapes = [(T, B, I)]
    if given_state:
        shapes += [(count, B, layer.proj_size or H)] + ([(count, B, H)] if lstm else [])
    leaves = [randn(*shape, seed=k) for k, shape in enumerate(shapes)]
    names = [name for name, _ in layer.named_parameters()]
    leaves += [p.detach().clone().requires_grad_() for p in layer.parameters()]

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        x, state, rest = values[0], values[1 : len(shapes)], values[len(shapes) :]
        hx = None if not state else tuple(state) if lstm else state[0]
        parameters = dict(zip(names, rest, strict=True))
        out = functional_call(layer, parameters, (x, hx), {"return_cells": lstm} | call)
        return (out[0], *out[1], out[2]) if lstm else out

    return function, leaves


# A norm meets the mask, not what its draw has seen: the other kinds of masks are checked without a
# norm.
CASES = [
    (kind, noise, norm)
    for kind in KINDS
    for noise in noises(kind)
    for norm in NORMS
    if norm == "plain" or not noise.endswith(("-shared", "-step", "-sequence", "-static"))
]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind, noise, norm", CASES)
def test_gradient(kind, noise, norm, training):
    """A gradient is not the slope: a noise, a norm or a state is left out of the graph or enters
    it twice.
    """
    layer = make(kind, noise=noises(kind)[noise], norm=NORMS[norm]).train(training)
    function, point = function_of(layer)
    assert gradcheck(function, point, fast_mode=True)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_jacobian(kind, training):
    """Single entries of a Jacobian are wrong where a random projection of it would not show it."""
    layer = make(kind, noise=noises(kind)["zoneout-unit"]).train(training)
    function, point = function_of(layer)
    assert gradcheck(function, point)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options, call",
    [
        ({}, dict(lengths=LENGTHS)),
        ({}, dict(resets=RESETS)),
        (dict(bidirectional=True), {}),
        (dict(bidirectional=True), dict(lengths=LENGTHS, resets=RESETS)),
        (dict(num_layers=2, dropout=0.4), dict(first_step=2, examples=5)),
        (dict(bias=False), {}),
    ],
    ids=[
        "lengths",
        "resets",
        "bidirectional",
        "bidirectional-lengths-resets",
        "stacked",
        "no-bias",
    ],
)
def test_gradient_of_shapes(kind, options, call, norm, training):
    """A gradient crosses a cut, leaks from padding, or is lost between layers or directions."""
    layer = make(kind, noise=noises(kind)["all"], norm=NORMS[norm], **options).train(training)
    function, point = function_of(layer, **call)
    assert gradcheck(function, point, fast_mode=True)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_learned_initial_states(kind, training):
    """The learned h0 and c0 do not get their gradient from every example and every reset."""
    layer = make(
        kind, noise=noises(kind)["zoneout-unit"], learn_initial_state=True, bidirectional=True
    )
    function, point = function_of(
        layer.train(training), given_state=False, resets=RESETS, lengths=LENGTHS
    )
    assert gradcheck(function, point, fast_mode=True)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("noise", ["zoneout-unit", "state-dropout-step", "hold", "all"])
def test_gradient_of_projections(noise, norm):
    """The projection's matrix, or what comes through it, has the wrong gradient."""
    layer = make("lstm", noise=noises("lstm")[noise], norm=NORMS[norm], proj_size=P, num_layers=2)
    function, point = function_of(layer)
    assert gradcheck(function, point, fast_mode=True)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "kind, noise, norm",
    [
        ("lstm", "zoneout-unit", "plain"),
        ("lstm", "hold", "layer"),
        ("lstm", "variational", "batch"),
        ("gru", "zoneout+recurrent-dropout", "plain"),
        ("rnn_tanh", "state-dropout-unit", "plain"),
    ],
)
def test_second_derivative(kind, noise, norm, training):
    """A second derivative (a gradient penalty's) of the reference is wrong."""
    layer = make(kind, noise=noises(kind)[noise], norm=NORMS[norm]).train(training)
    function, point = function_of(layer, lengths=LENGTHS)
    assert gradgradcheck(function, point, fast_mode=True)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_at_evaluation(kind, norm):
    """`backward` fails, or leaves a parameter out, when the layer is in evaluation mode."""
    layer = make(
        kind, noise=noises(kind)["all"], norm=NORMS[norm], num_layers=2, learn_initial_state=True
    )
    x = randn(T, B, I)
    y, _ = layer.eval()(x)
    y.square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_stops_the_gradient(kind):
    """Something crosses a cut: an output after it depends on an input before it, in either
    direction.
    """
    layer = make(kind, noise=noises(kind)["zoneout-unit"], bidirectional=True)
    x = randn(4, 1, I)
    cut = torch.tensor([[False], [False], [True], [False]])
    y = layer(x, resets=cut, seed=SEED)[0]
    (gradient,) = torch.autograd.grad(y[2:].square().sum(), x, retain_graph=True)
    assert (gradient[:2] == 0).all() and (gradient[2:] != 0).any()
    (gradient,) = torch.autograd.grad(y[:2].square().sum(), x)
    assert (gradient[2:] == 0).all() and (gradient[:2] != 0).any()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_padding_gets_no_gradient(kind, norm):
    """What stands past a sequence's end moves an output, or gets a gradient."""
    layer = make(kind, noise=noises(kind)["all"], bidirectional=True, norm=NORMS[norm])
    x = randn(T, B, I)
    y, _ = layer(x, lengths=LENGTHS, seed=SEED)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    alive = torch.arange(T)[:, None] < torch.tensor(LENGTHS)
    assert (gradient[~alive] == 0).all() and (y[~alive] == 0).all()
    other = torch.where(alive[..., None], x, 1e3).detach()
    torch.testing.assert_close(
        layer(other, lengths=LENGTHS, seed=SEED)[0], y, rtol=1e-12, atol=1e-12
    )


def test_zoned_units_pass_the_gradient_unchanged():
    """Zoneout's identity connection is not one: a kept unit's gradient shrinks on its way."""
    noise = zo.Zoneout(cell=0.5, hidden=1.0)
    layer = make("lstm", noise=noise)
    x, h0, c0 = randn(1, B, I, seed=0), randn(1, B, H, seed=1), randn(1, B, H, seed=2)
    _, (h, c) = layer(x, (h0, c0), seed=SEED)
    kept = zo.masks(noise, SEED, 1, B, H)["cell"]
    assert kept.any() and not kept.all()
    (of_c0,) = torch.autograd.grad(c.sum(), c0, retain_graph=True)
    assert (of_c0[kept] == 1).all() and (of_c0[~kept] < 1).all()
    (of_h0,) = torch.autograd.grad(h.sum(), h0)
    assert (of_h0 == 1).all()
