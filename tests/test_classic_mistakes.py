"""The three classic mistakes of zoneout implementations, each by name, looked for in every backend.

The oracle is torch's own cell in a plain loop, with `torch.where` and the masks that `masks()`
shows. For each mistake the mistaken loop is built too, and must lie far from the right one: it
would be noticed.
"""

import pytest
import torch
from backends import Backend
from torch import nn

import zoneout as zo

SEED, STEPS, BATCH, UNITS = 11, 6, 5, 8
LAYERS = {"lstm": zo.LSTM, "gru": zo.GRU, "rnn": zo.RNN}
CELLS = {"lstm": zo.LSTMCell, "gru": zo.GRUCell, "rnn": zo.RNNCell}
TORCH = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}
NOISE = {
    "lstm": zo.Zoneout(hidden=0.4, cell=0.5),
    "gru": zo.Zoneout(hidden=0.4),
    "rnn": zo.Zoneout(hidden=0.4),
}
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
both_ways = pytest.mark.parametrize("direction", [0, 1], ids=["forwards", "backwards"])


@pytest.fixture(params=LAYERS)
def kind(request):
    return request.param


def make(kind, backend, layers=1, directions=1):
    """A layer with noise in all its layers, an input, and an initial state (h,) or (h, c)."""
    torch.manual_seed(0)
    device = backend.device
    layer = LAYERS[kind](
        UNITS, UNITS, layers, bidirectional=directions == 2, noise=NOISE[kind], backend=backend.name
    )
    for parameter in layer.parameters():  # large, so that what a mask changes is far from rounding
        nn.init.uniform_(parameter, -0.8, 0.8)
    states = 2 if kind == "lstm" else 1
    x = torch.randn(STEPS, BATCH, UNITS)
    state = torch.randn(states, layers * directions, BATCH, UNITS)
    return (
        layer.to(device),
        x.to(device).requires_grad_(),
        tuple(state.to(device).requires_grad_().unbind()),
    )


def as_hx(state):
    return state[0] if len(state) == 1 else state


def as_tuple(hx):
    return hx if isinstance(hx, tuple) else (hx,)


def run(layer, x, state, **more):
    """The layer's outputs and its last state (h,) or (h, c)."""
    y, ended = layer(x, as_hx(state), seed=SEED, **more)
    return y, as_tuple(ended)


def masks_of(kind, like, direction=0):
    """The masks of (h,) or (h, c), [T, B, units] each."""
    masks = zo.masks(NOISE[kind], SEED, STEPS, BATCH, UNITS, direction=direction)
    return tuple(
        masks[stream].to(like.device) for stream in ("hidden", "cell")[: 1 + (kind == "lstm")]
    )


def by_hand(
    layer, x, state, masks, direction=0, zone=torch.where, show=lambda t, candidate, zoned: zoned
):
    """One layer and direction in a plain loop: what is shown of h at each step, and the last
    state.
    """
    cell = TORCH[layer.kind](UNITS, UNITS, device=x.device)
    weights = {name: getattr(layer, name + ("_l0", "_l0_reverse")[direction]) for name in WEIGHTS}
    shown = {}
    for t in range(STEPS) if direction == 0 else reversed(range(STEPS)):
        new = as_tuple(torch.func.functional_call(cell, weights, (x[t], as_hx(state))))
        state = tuple(
            zone(mask[t], old, now) for mask, old, now in zip(masks, state, new, strict=True)
        )
        shown[t] = show(t, new[0], state[0])
    return torch.stack([shown[t] for t in range(STEPS)]), state


def assert_close(a, b, what=""):
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, msg=lambda text: f"{what}: {text}")


def assert_far(a, b):
    assert (a - b).abs().max().item() > 0.1


# --- 1. the backward pass uses each step's own mask -----------------------------------------------


@both_ways
def test_backward_uses_each_steps_own_mask(backend, kind, direction):
    """If this fails, gradients flow where no value flowed: a step's backward used another step's
    mask.
    """
    layer, x, state = make(kind, backend, directions=2)
    weigh = torch.linspace(-1, 2, x.numel(), device=x.device).view(STEPS, BATCH, UNITS)

    def gradients(y, ended):
        """The gradient of every output and last state with respect to everything that came in."""
        weights = {
            name: getattr(layer, name + ("_l0", "_l0_reverse")[direction]) for name in WEIGHTS
        }
        wanted = dict(zip(("h0", "c0"), state)) | weights | {"x": x}
        loss = (y * weigh).sum() + sum(s.square().sum() for s in ended)
        return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()))))

    y, ended = run(layer, x, state)
    ours = gradients(y.chunk(2, -1)[direction], [s[direction] for s in ended])
    start = [s[direction] for s in state]
    right = gradients(*by_hand(layer, x, start, masks_of(kind, x, direction), direction))
    for name in right:
        assert_close(ours[name], right[name], f"gradient of {name}")


class ZoneWithWrongBackward(torch.autograd.Function):
    """`torch.where(mask, old, new)`, with the gradient that another mask would have."""

    @staticmethod
    def forward(ctx, mask, wrong, old, new):
        ctx.save_for_backward(wrong)
        return torch.where(mask, old, new)

    @staticmethod
    def backward(ctx, grad):
        (wrong,) = ctx.saved_tensors
        return None, None, grad * wrong, grad * ~wrong


@pytest.mark.parametrize("shift", [1, -1], ids=["step_before", "step_after"])
def test_another_steps_mask_in_backward_would_be_noticed(kind, shift):
    """If this fails, the test above has no power: the mistake leaves the gradients as they are."""
    layer, x, state = make(kind, Backend("reference", "cpu"))
    masks, start = masks_of(kind, x), [s[0] for s in state]
    wrong = iter([mask.roll(shift, 0)[t] for t in range(STEPS) for mask in masks])
    right, _ = by_hand(layer, x, start, masks)
    mistaken, _ = by_hand(
        layer,
        x,
        start,
        masks,
        zone=lambda *a: ZoneWithWrongBackward.apply(a[0], next(wrong), *a[1:]),
    )
    assert torch.equal(mistaken, right), "the outputs do not show it"
    assert_far(torch.autograd.grad(mistaken.sum(), x)[0], torch.autograd.grad(right.sum(), x)[0])


def test_way_back_in_time_is_the_masks_between(backend, kind):
    """If this fails, the gradient of an output reaches a step from which no value came, or
    misses one.
    """
    layer, x, state = make(kind, backend)
    gates = {"lstm": (1e3, -1e3, 0, 1e3), "gru": (1e3, -1e3, 0), "rnn": (0,)}[kind]
    with (
        torch.no_grad()
    ):  # candidates see the input alone: the old value is the only way through time
        layer.weight_hh_l0.zero_()
        layer.bias_hh_l0.zero_()
        layer.bias_ih_l0.copy_(torch.tensor(gates, device=x.device).repeat_interleave(UNITS))
    weight = layer.weight_ih_l0.chunk(len(gates))[2 if len(gates) > 1 else 0]
    candidate = (x @ weight.t()).tanh()
    slope = (1 - candidate**2) * (
        1 - candidate.tanh() ** 2 if kind == "lstm" else 1
    )  # [T, B, units]
    kept = masks_of(kind, x)[0]

    y, _ = run(layer, x, state)
    for end in range(STEPS):
        (grad,) = torch.autograd.grad(y[end].sum(), x, retain_graph=True)
        for t in range(end + 1):  # written at t, and kept at every step since
            came = ~kept[t] & kept[t + 1 : end + 1].all(0)
            assert_close(grad[t], (came * slope[t]) @ weight, f"y[{end}] to x[{t}]")
        assert not grad[end + 1 :].any()


# --- 2. the output returned is the zoned state ----------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("directions", [1, 2])
def test_last_output_is_the_last_state(backend, kind, layers, directions):
    """If this fails, the output shows the candidate where the state shows the old value."""
    layer, x, state = make(kind, backend, layers, directions)
    y, (h, *_) = run(layer, x, state)
    ends = (y[-1], y[0])  # where each direction ends
    for direction in range(directions):
        assert torch.equal(
            ends[direction].chunk(directions, -1)[direction], h[direction - directions]
        )


def test_output_is_the_zoned_state(backend, kind):
    """If this fails, the output of some step is its candidate, which the next step never sees."""
    layer, x, state = make(kind, backend)
    y, ended = run(layer, x, state)
    masks, start = masks_of(kind, x), [s[0] for s in state]
    right, last = by_hand(layer, x, start, masks)
    assert_close(y, right)
    for a, b in zip(ended, last, strict=True):
        assert_close(a[0], b)
    mistaken, _ = by_hand(layer, x, start, masks, show=lambda t, candidate, zoned: candidate)
    assert_far(mistaken, right)


def test_output_is_the_state_that_cells_carry(backend, kind):
    """If this fails, a decoder that steps by cells sees other outputs than the layer it was
    trained as.
    """
    layer, x, state = make(kind, backend, layers=2)
    y, ended = run(layer, x, state)
    below = list(x)
    for k in range(2):
        cell = CELLS[kind](UNITS, UNITS, noise=NOISE[kind], layer=k, backend=backend.name).to(
            x.device
        )
        cell.load_state_dict({name: getattr(layer, f"{name}_l{k}") for name in WEIGHTS})
        carried = tuple(s[k] for s in state)
        for t in range(STEPS):
            carried = as_tuple(cell(below[t], as_hx(carried), seed=SEED, step=t))
            below[t] = carried[0]
        for a, b in zip(carried, ended, strict=True):
            assert_close(a, b[k])
    assert_close(torch.stack(below), y)


# --- 3. output and carried state use the same mask ------------------------------------------------


@pytest.mark.parametrize("cut", range(1, STEPS))
def test_output_and_carried_state_use_the_same_mask(backend, kind, cut):
    """If this fails, going on from the state that the outputs show is not what the layer itself
    did.
    """
    layer, x, state = make(kind, backend)
    y, ended, *cells = layer(x, as_hx(state), seed=SEED, return_cells=kind == "lstm")
    shown = tuple(v[cut - 1][None] for v in (y, *cells))
    later, ended_later = run(layer, x[cut:], shown, first_step=cut)
    assert_close(later, y[cut:])
    for a, b in zip(ended_later, as_tuple(ended), strict=True):
        assert_close(a, b)


@both_ways
def test_outputs_have_no_mask_of_their_own(backend, kind, direction):
    """If this fails, the output is zoned out by one mask and the carried state by another."""
    layer, x, state = make(kind, backend, directions=2)
    y = run(layer, x, state)[0].chunk(2, -1)[direction]
    masks, start = masks_of(kind, x, direction), [s[direction] for s in state]
    assert_close(y, by_hand(layer, x, start, masks, direction)[0])
    second = zo.masks(NOISE[kind], SEED + 1, STEPS, BATCH, UNITS)["hidden"].to(x.device)
    mistaken, _ = by_hand(
        layer,
        x,
        start,
        masks,
        direction,
        show=lambda t, candidate, zoned: torch.where(second[t], zoned, candidate),
    )
    assert_far(mistaken, y)
