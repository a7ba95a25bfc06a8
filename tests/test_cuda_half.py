"""TF32 in half precision: what TF32 gets right has to stay right, whatever the sizes of derivatives
and weights are.

Half precision has the ten bits of TF32 and not its range, so derivatives and W_h enter products
times powers of two. On a GPU where there is one, else on the CPU, thread by thread; against the
reference in float64.
"""

from __future__ import annotations

import pytest
import torch
from test_backends import LAYERS, NOISES
from test_cuda import compare

from zoneout import Zoneout
from zoneout.cells import CELLS
from zoneout.ops import cuda
from zoneout.ops.cuda.runtime import compiler

HIDDEN = 40
ON = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if ON == "cuda" else []
gated = pytest.mark.parametrize("name", ["lstm", "gru"])


@pytest.fixture
def tf32(request, poisoned):
    """Products of float32 in TF32, on a GPU or as on one."""
    if ON == "cpu":
        request.getfixturevalue("emulated")
    before = torch.backends.cudnn.rnn.fp32_precision
    torch.backends.cudnn.rnn.fp32_precision = "tf32"
    yield
    torch.backends.cudnn.rnn.fp32_precision = before


@pytest.fixture(params=[cuda.persistent, cuda.steps], ids=["persistent", "steps"])
def path(request, tf32, monkeypatch):
    """Loops run in one path alone, all of whose products are in half precision."""
    monkeypatch.setattr(cuda, "PATHS", (request.param,))
    monkeypatch.setattr(cuda.persistent, "FEWEST_STEPS", 1)
    made, load = [], request.param.load

    def and_keep(device, source, names, defines, step=""):
        made.append(dict(defines))
        return load(device, source, names, defines, step)

    monkeypatch.setattr(request.param, "load", and_keep)
    cuda.persistent._kernel.cache_clear()
    yield request.param
    assert made and all(defines["HALF"] for defines in made), (
        "it goes in TF32, and so shows nothing"
    )


def twins(name, noise=None, change=lambda layer: None, hidden=HIDDEN):
    """A layer whose kernels are emulated, and the same one in float64 in the reference."""
    torch.manual_seed(0)
    ours = LAYERS[name](3, hidden, noise=noise, backend=ON)
    with torch.no_grad():
        change(ours)
    ours.to(ON)
    theirs = LAYERS[name](3, hidden, noise=noise, dtype=torch.float64, backend="reference")
    theirs.load_state_dict({key: value.double() for key, value in ours.state_dict().items()})
    return ours, theirs


def gradients(layer, x, dy, seed=1, **call):
    """Those of x [T, B, 3], the initial h [B, H] and W_h, for these of the outputs."""
    w = layer.weight_hh_l0
    x = x.to(w.device, w.dtype, copy=True).requires_grad_()
    h = x.new_zeros(1, x.shape[1], layer.hidden_size).requires_grad_()
    y, _ = layer(x, (h, torch.zeros_like(h)) if layer.kind == "lstm" else h, seed=seed, **call)
    dx, dh, dw = (d.cpu() for d in torch.autograd.grad(y, [x, h, w], dy.to(x)))
    return {"x": dx, "h0": dh[0], "w_hh": dw}


def far(got, want, *kept):
    """How far from the truth, relative to it: of all numbers, or of each along the axes that are
    kept.
    """
    others = [axis for axis in range(want.dim()) if axis not in kept]
    size = torch.linalg.vector_norm(want.double(), dim=others)
    assert (size > 0).all(), "there is nothing to be seen"
    return torch.linalg.vector_norm(got.double() - want, dim=others) / size


def are_near(got, want, tolerance=1e-3):
    for key, value in want.items():
        assert far(got[key], value) < tolerance, (key, far(got[key], value))


@pytest.mark.parametrize(
    ("name", "hidden"), [("lstm", 40), ("lstm", 38), ("lstm", 136), ("gru", 40), ("gru", 136)]
)
def test_equals_the_reference(path, name, hidden):
    """Half precision is less than TF32, for units side by side or alone, in one warp or more."""
    given = dict(sizes=(7, 5, 3, hidden), cells=False, device=ON)
    for noise, training in (("zoneout-unit", True), ("zoneout-unit", False), ("none", True)):
        compare(name, NOISES[noise], {}, training, (torch.float32, 1e-3), **given)


@pytest.mark.parametrize("size", [1e-36, 1e-25, 1e-3, 1e20, 1e36])
@gated
def test_derivatives_of_any_size(path, name, size):
    """Derivatives vanish or overflow, far back or where little comes in."""
    layers = twins(
        name, change=lambda layer: layer.weight_hh_l0.mul_(0.3)
    )  # what comes back shrinks with every step
    x, dy = torch.randn(25, 5, 3), torch.zeros(25, 5, HIDDEN)
    dy[-1], dy[6] = size * torch.randn(5, HIDDEN), 1e-6 * size * torch.randn(5, HIDDEN)
    got, want = (gradients(layer, x, dy) for layer in layers)
    assert want["x"][0].norm() < 1e-3 * want["x"][-1].norm(), (
        "it does not vanish, and so shows nothing"
    )
    if size > 1e-30:  # else what is far back is too small for float32
        assert (far(got["x"], want["x"], 0) < 5e-3).all(), far(got["x"], want["x"], 0)
        assert far(got["h0"], want["h0"]) < 2e-3
    assert far(got["x"], want["x"]) < 1e-3 and far(got["w_hh"], want["w_hh"]) < 1e-3


@gated
def test_steps_that_are_held(path, name):
    """Where zoneout holds every unit nothing enters the product; at the step before, all that
    went by does.
    """
    rates = dict(cell=0.8, hidden=0.8) if name == "lstm" else dict(hidden=0.8)
    layers = twins(name, Zoneout(**rates, mask="step"))
    x, dy = (
        torch.randn(25, 1, 3),
        torch.randn(25, 1, HIDDEN) * torch.logspace(0, -6, 25)[:, None, None],
    )
    dy[-1] = 1e3 * torch.randn(1, HIDDEN)
    for seed in (1, 2):
        got, want = (gradients(layer, x, dy, seed) for layer in layers)
        assert 5 < (want["x"].flatten(1).norm(dim=1) == 0).sum() < 25, (
            "too few steps are held, or all"
        )
        are_near(got, want)


@gated
def test_gates_that_are_shut(path, name):
    """Where gates are shut next to nothing enters the product; at the step before, all that went
    by does.
    """
    signs = {"lstm": (-1, 1, 0, -1), "gru": (0, 1, 0)}[
        name
    ]  # i and o are shut and f is open; a GRU's z is open

    def by_the_first_input(layer):
        for sign, gate in zip(signs, layer.weight_ih_l0.chunk(len(signs))):
            gate[:, 0] = sign

    layers = twins(name, change=by_the_first_input)
    x, dy = torch.randn(20, 3, 3), torch.zeros(20, 3, HIDDEN)
    x[..., 0], dy[-1] = 0.0, torch.randn(3, HIDDEN)
    x[10:15, :, 0] = 25.0
    got, want = (gradients(layer, x, dy) for layer in layers)
    assert 0 < want["x"][12].norm() < 1e-6 * want["x"][9].norm(), "the gates are not shut"
    are_near(got, want)


@gated
@pytest.mark.parametrize("nonsense", [torch.nan, torch.inf, 1e30])
def test_padding_does_not_matter(name, nonsense, tf32, monkeypatch):
    """What lies past the ends of sequences gets into the derivatives of those that are there."""
    monkeypatch.setattr(
        cuda, "PATHS", (cuda.persistent,)
    )  # step by step, loops with lengths are in TF32
    ours, theirs = twins(name)
    lengths = torch.tensor([7, 3, 1, 5])
    x, dy = torch.randn(7, 4, 3), torch.randn(7, 4, HIDDEN)
    past = torch.arange(7)[:, None] >= lengths
    dy[past] = 0.0
    want = gradients(ours, x, dy, lengths=lengths)
    are_near(want, gradients(theirs, x, dy, lengths=lengths))
    dy[past] = nonsense
    for key, value in gradients(ours, x, dy, lengths=lengths).items():
        assert torch.equal(value, want[key]), key


@gated
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(path, name, wrong):
    """A NaN or an infinity in one row spoils the others, or becomes a finite number."""
    ours, _ = twins(name)
    x, dy = torch.randn(6, 5, 3), torch.randn(6, 5, HIDDEN)
    want = gradients(ours, x, dy)
    dy[4, 2, 13] = wrong
    got = gradients(ours, x, dy)
    others = torch.arange(5) != 2
    assert torch.equal(got["x"][:, others], want["x"][:, others])
    assert torch.equal(got["h0"][others], want["h0"][others])
    assert torch.equal(got["x"][5], want["x"][5])
    assert not got["x"][:4, 2].isfinite().any() and not got["h0"][2].isfinite().any()


def test_one_number_overflows(path):
    """An infinity becomes the largest number of half precision, where its last bit is taken to
    tell the turn.
    """

    def change(
        layer,
        # n = tanh(x + r·v - 500) with r = 1/2 and v = 1000: of r alone the derivative is 250 times
        # n's
    ):
        layer.weight_ih_l0[:HIDDEN] = layer.bias_ih_l0[:HIDDEN] = layer.bias_hh_l0[:HIDDEN] = 0.0
        layer.bias_ih_l0[2 * HIDDEN :], layer.bias_hh_l0[2 * HIDDEN :] = -500.0, 1000.0

    ours, _ = twins("gru", change=change)
    x, dy = 0.1 * torch.randn(1, 3, 3), torch.randn(1, 3, HIDDEN)
    want = gradients(ours, x, dy)["h0"]
    dy[0, 1, 13] = 1e38
    got = gradients(ours, x, dy)["h0"]
    assert not got[1].isfinite().any() and torch.equal(got[::2], want[::2])


@gated
def test_rows_of_different_sizes(path, name):
    """A row whose derivatives are small beside another's loses their last bits, or all; one of
    zeros gets some.
    """
    layers = twins(name, hidden=136)
    sizes = torch.tensor([1.0, 1e-6, 1e-8, 1e-30, 0.0, 1e12, 1.0])
    x, dy = torch.randn(6, len(sizes), 3), torch.randn(6, len(sizes), 136) * sizes[:, None]
    dy[:, -1, :130] *= 1e-8  # the largest are those of the last units
    got, want = (gradients(layer, x, dy) for layer in layers)
    some = sizes > 0
    assert (far(got["x"][:, some], want["x"][:, some], 1) < 2e-3).all()
    assert (far(got["h0"][some], want["h0"][some], 0) < 2e-3).all()
    assert (got["x"][:, ~some] == 0).all() and (got["h0"][~some] == 0).all()


@gated
@pytest.mark.parametrize("how", ["weights", "derivatives", "in halves", "by turns"])
def test_units_of_different_sizes(path, name, how):
    """What is small beside the largest number of W_h or of a row loses its bits, where nothing
    large covers it.
    """
    small = torch.arange(HIDDEN) >= 20 if how != "by turns" else torch.arange(HIDDEN) % 2 == 1

    def change(layer):
        w = layer.weight_hh_l0.view(-1, HIDDEN, HIDDEN)
        if how == "weights":
            w[..., small] *= 1e-6
        elif how == "derivatives":
            w[:, ~small] = 0.0  # from units whose derivatives are large
        else:
            w *= small[:, None] == small  # each kind is alone with its own
        if name == "gru":
            layer.bias_ih_l0[
                HIDDEN : 2 * HIDDEN
            ] = -30.0  # what goes to the h before goes through the product

    layers = twins(name, change=change)
    x, dy = torch.randn(2, 3, 3), torch.randn(2, 3, HIDDEN)
    if how != "weights":
        dy[..., small] *= 1e-6
    got, want = (gradients(layer, x, dy)["h0"] for layer in layers)
    for units in (small, ~small):
        assert far(got[:, units], want[:, units]) < 2e-3


@gated
@pytest.mark.parametrize(
    ("weights", "size"),
    [
        (1e-6, 1.0),
        (1e-30, 1e-4),
        (1e-36, 1e5),
        (1e-12, 1e-20),
        (1.0, 1e36),
        (1e6, 1.0),
        (1e8, 1e25),
        (1e30, 1e-20),
    ],
)
def test_weights_of_any_size(path, name, weights, size):
    """Small weights lose their last bits, or large ones or their products overflow, in half
    precision or on the way.
    """

    def change(layer):
        layer.weight_hh_l0.mul_(weights)
        layer.weight_hh_l0[:, ::4] = (
            0.0  # forwards every fourth h may be 6e-8 instead of 0: one bit tells the turn
        )
        if name == "gru":
            layer.bias_ih_l0[HIDDEN : 2 * HIDDEN] = -87.0  # nothing goes straight to h0

    layers = twins(name, change=change)
    x, dy = torch.randn(1, 3, 3), size * torch.randn(1, 3, HIDDEN)
    got, want = (gradients(layer, x, dy)["h0"] for layer in layers)
    assert far(got, want) < 2e-3, far(got, want)


@gated
def test_weights_of_zero(path, name):
    """Nothing times infinity."""
    layers = twins(name, change=lambda layer: layer.weight_hh_l0.zero_())
    x, dy = torch.randn(5, 3, 3), torch.randn(5, 3, HIDDEN)
    got, want = (gradients(layer, x, dy) for layer in layers)
    assert far(got["x"], want["x"]) < 1e-3
    assert (got["h0"] == 0).all() if name == "lstm" else far(got["h0"], want["h0"]) < 1e-3


@gated
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite(path, name, value):
    """A NaN or an infinity in W_h becomes a finite number on the way back."""

    def spoil(layer):
        layer.weight_hh_l0[7, 5] = value

    ours, _ = twins(name, change=spoil)
    assert (
        not gradients(ours, torch.randn(3, 2, 3), torch.randn(3, 2, HIDDEN))["h0"].isfinite().any()
    )


def test_weights_that_half_precision_has():
    """They are scaled by something else than a power of two: weights that TF32 leaves as they
    are become others.
    """
    w = torch.randint(-1000, 1001, (40, 30)) * 2.0**-30
    scaled, back = cuda.steps._scaled(w)
    torch.testing.assert_close(scaled.float() * back, w, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_an_initial_state_of_any_size(path, name):
    """An h0 that is too large for half precision becomes infinite, at once or while zoneout
    holds it.
    """
    h0 = torch.randn(1, 3, HIDDEN)
    h0[0, 1, 4] = h0[0, 1, 20] = 1e9
    with torch.no_grad():
        ours, theirs = (
            layer(
                torch.ones(5, 3, 3).to(h), (h, torch.zeros_like(h)) if name == "lstm" else h, seed=5
            )[0]
            for layer, h in zip(twins(name, Zoneout(hidden=0.8)), (h0.to(ON), h0.double()))
        )
    torch.testing.assert_close(ours.double().cpu(), theirs, rtol=2e-3, atol=2e-3)


@gated
@pytest.mark.parametrize(
    ("hidden", "batch", "processors"),
    [(40, 20, 4), (40, 20, 8), (100, 5, 9), (100, 20, 9), (130, 3, 9), (257, 3, 22)],
)
def test_blocks_and_warps_that_do_not_meet(name, hidden, batch, processors, tf32, monkeypatch):
    """A factor is taken for numbers of another block where the parts of warps end within one, or
    of another row.
    """
    chip = compiler.Chip(processors, 232448, 9)
    tiles = cuda.persistent.plan(
        CELLS[name], torch.float32, hidden, batch, True, chip.processors, chip.shared
    )
    assert tiles is not None and tiles.half and tiles.units > 8
    monkeypatch.setattr(cuda, "PATHS", (cuda.persistent,))
    monkeypatch.setattr(cuda.persistent, "chip", lambda device: chip)
    layers = twins(name, hidden=hidden)
    x, dy = torch.randn(4, batch, 3), torch.randn(4, batch, hidden)
    dy *= 10.0 ** torch.linspace(-4, 4, batch)[:, None] * 10.0 ** torch.linspace(
        -5, 3, hidden
    )  # each block its own
    got, want = (gradients(layer, x, dy) for layer in layers)
    assert (far(got["x"], want["x"], 1) < 2e-3).all()
    assert (far(got["h0"], want["h0"], 0) < 2e-3).all()
