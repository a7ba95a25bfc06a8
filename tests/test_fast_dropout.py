"""Fast dropout: products that are Gaussian numbers.

The NumPy side draws them from its equation: mean Σ (1 − p) w x, variance Σ p (1 − p) w² x².
"""

from __future__ import annotations

import copy
from typing import Any

import emulator  # noqa: F401 (the fixture `emulated`)
import numpy as np
import philox_numpy
import pytest
import torch
from test_given_masks import close, make, uniform  # noqa: F401 (`make` is a fixture)
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import zoneout as zo
from zoneout.definition.gaussian import with_gaussian_product
from zoneout.ops.cuda.pointwise.normals import normals

T, B, I, H = 5, 4, 3, 8
GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1}


def normal_numbers(
    stream: str, seed: int, steps: Any, examples: Any, units: int, layer=0, direction=0
):
    """Box and Muller's, from the words of a coordinate: [steps, examples, units]."""
    group = philox_numpy.GROUPS[stream][0]
    out = np.zeros((len(steps), len(examples), -(-units // 4) * 4))
    for t, step in enumerate(steps):
        for b, example in enumerate(examples):
            last = 2 * layer + direction + 65536 * group
            counters = [[four, example, step, last] for four in range(-(-units // 4))]
            words = philox_numpy.philox(np.array(counters), philox_numpy.key_of(seed))
            u = (words.astype(np.float64) + 0.5) / 2**32
            for k in (0, 2):
                radius = np.sqrt(-2 * np.log(u[:, k]))
                out[t, b, k::4] = radius * np.cos(2 * np.pi * u[:, k + 1])
                out[t, b, k + 1 :: 4] = radius * np.sin(2 * np.pi * u[:, k + 1])
    return out[..., :units]


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


def numpy_layer(
    layer: Any, x: Any, p_x: float, p_h: float, seed: int, drawn: bool, first: int, ids: Any
):
    """One layer in NumPy: every product is drawn from its mean and variance."""
    a = {n: v.detach().cpu().double().numpy() for n, v in layer.state_dict().items()}
    w_x, w_h, b_x, b_h = (
        a[n] for n in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    )
    width, steps = len(w_x), range(first, first + len(x))
    noise = {
        "fast_input": normal_numbers("fast_input", seed, steps, ids, width) * drawn,
        "fast_hidden": normal_numbers("fast_hidden", seed, steps, ids, width) * drawn,
    }

    def product(w, v, p, e):
        mean, variance = ((1 - p) * w) @ v, (p * (1 - p) * w * w) @ (v * v)
        return mean + np.sqrt(variance + 1e-12 * (p > 0)) * e * (p > 0)

    y = np.zeros((len(x), x.shape[1], H))
    for b in range(x.shape[1]):
        h, c = np.zeros(H), np.zeros(H)
        for t in range(len(x)):
            g_x = product(w_x, x[t, b], p_x, noise["fast_input"][t, b]) + b_x
            g_h = product(w_h, h, p_h, noise["fast_hidden"][t, b]) + b_h
            if layer.mode == "LSTM":
                i, f, g, o = np.split(g_x + g_h, 4)
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
                h = sigmoid(o) * np.tanh(c)
            elif layer.mode == "GRU":
                (r_x, z_x, n_x), (r_h, z_h, n_h) = np.split(g_x, 3), np.split(g_h, 3)
                z = sigmoid(z_x + z_h)
                h = z * h + (1 - z) * np.tanh(n_x + sigmoid(r_x + r_h) * n_h)
            else:
                h = np.tanh(g_x + g_h)
            y[t, b] = h
    return y


@pytest.mark.parametrize("kind", [zo.LSTM, zo.GRU, zo.RNN], ids=["lstm", "gru", "rnn"])
@pytest.mark.parametrize(("p_x", "p_h"), [(0.3, 0.0), (0.0, 0.4), (0.3, 0.4)])
def test_products_are_drawn(kind, p_x, p_h, make):  # noqa: F811
    """A product has another mean or variance, or the normal numbers of another place."""
    layer = make(kind, I, H, noise=zo.FastDropout(input=p_x, hidden=p_h))
    x, ids = uniform(T, B, I).to(layer.weight_ih_l0) + 0.5, [7, 0, 3, 100]
    numbers = x.cpu().double().numpy()
    y = layer(x, seed=5, examples=ids, first_step=6)[0]
    close(y, numpy_layer(layer, numbers, p_x, p_h, 5, True, 6, ids), 20 * make.tolerance)
    layer.eval()
    close(layer(x)[0], numpy_layer(layer, numbers, p_x, p_h, 5, False, 0, ids), make.tolerance)
    layer.noise = zo.FastDropout(input=p_x, hidden=p_h, at_eval="off")
    plain = copy.deepcopy(layer)
    plain.noise = None
    close(layer(x)[0], plain(x)[0].detach().cpu(), make.tolerance)


def test_gradients():
    """A derivative of a drawn product is not that of finite differences."""
    for kind in (zo.LSTM, zo.GRU):
        for backend in ("reference", "cpu"):
            layer = kind(
                I, 4, noise=zo.FastDropout(input=0.3, hidden=0.4), backend=backend
            ).double()
            x = (uniform(3, 2, I) + 0.5).requires_grad_()
            shape = (1, 2, 4)
            hx = (uniform(*shape) + 0.5).requires_grad_()
            names, values = zip(*layer.named_parameters())

            def call(x, h, *values, layer=layer, names=names):
                state = (h, h) if layer.mode == "LSTM" else h
                given = dict(zip(names, values))
                return torch.func.functional_call(layer, given, (x, state), {"seed": 5})[0]

            assert torch.autograd.gradcheck(call, (x, hx, *values))


def test_squares_of_float16():
    """The variance of a row of zeros has no derivative, or that of large numbers is infinite."""
    layer = zo.LSTM(I, H, noise=zo.FastDropout(input=0.3))
    x = torch.full((T, B, I), 300.0)
    x[:, 1] = 0
    half = copy.deepcopy(layer).half()
    y = half(x.half(), seed=5)[0]
    close(y, layer(x, seed=5)[0].detach(), 1e-2)
    grads = torch.autograd.grad(y.float().sum(), [*half.parameters()])
    assert all(g.isfinite().all() for g in grads)
    with torch.autocast("cpu", torch.float16):
        close(layer(x, seed=5)[0], y.detach(), 1e-2)


def test_the_reference_in_float16():
    """The least variance is zero in float16, so its root has no derivative where h is zero."""
    layer = zo.LSTM(I, H, noise=zo.FastDropout(hidden=0.3), dtype=torch.float16)
    x, found = uniform(T, B, I).half(), []
    for layer.backend in ("cpu", "reference"):
        y = layer(x, seed=5)[0]
        found.append([y.detach(), *torch.autograd.grad(y.float().sum(), [*layer.parameters()])])
    for fast, slow in zip(*found):
        close(slow, fast, 1e-3)


def test_packed_lengths_and_directions(make):  # noqa: F811
    """A row of a packed or reversed sequence has the normal numbers of another."""
    layer = make(zo.LSTM, I, H, 2, bidirectional=True, noise=zo.FastDropout(input=0.3, hidden=0.2))
    x = uniform(T, B, I).to(layer.weight_ih_l0)
    lengths = torch.tensor([2, 5, 1, 4])
    padded = layer(x, seed=5, lengths=lengths, first_step=3)[0]
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    again = pad_packed_sequence(layer(packed, seed=5, first_step=3)[0])[0]
    close(again, padded.detach().cpu(), 10 * make.tolerance)
    alone = layer(x[:4, 3:], seed=5, examples=3, first_step=3)[0]
    close(alone, padded[:4, 3:].detach().cpu(), 10 * make.tolerance)


def test_recomputed_steps():
    """A pass in pieces adds the noise of other steps, or loses its gradient."""
    noise = zo.FastDropout(input=0.3, hidden=0.2)
    layer = zo.LSTM(I, H, noise=noise).double()
    again = zo.LSTM(I, H, noise=noise, recompute=True).double()
    again.load_state_dict(layer.state_dict())
    x, results = uniform(64, B, I).requires_grad_(), []
    for one in (layer, again):
        y = one(x, seed=5)[0]
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *one.parameters()])))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_it_is_what_dropout_is_on_average():
    """Mean or variance of a gate is not that of many dropped products."""
    torch.manual_seed(1)
    w, x, p = torch.randn(1, 200), torch.randn(200), 0.3
    layer = zo.RNN(200, 1, nonlinearity="relu", noise=zo.FastDropout(input=p))
    with torch.no_grad():
        layer.weight_ih_l0.copy_(w), layer.bias_ih_l0.fill_(200.0)  # relu is the identity
        layer.weight_hh_l0.zero_(), layer.bias_hh_l0.zero_()
        y = layer(x.expand(1, 20_000, 200), seed=3)[0].flatten() - 200
    dropped = (torch.rand(20_000, 200) >= p).float() * x @ w[0]
    assert abs(y.mean() - dropped.mean()) < 0.3 and abs(y.std() / dropped.std() - 1) < 0.03


def test_the_cell_is_made_once_and_keeps_its_marks():
    """Other noises would not apply to the cell that draws its products."""
    made = zo.cells.CELLS["lstm"].variant(with_gaussian_product)
    assert made is zo.cells.CELLS["lstm"].variant(with_gaussian_product)
    assert made.gates == 8 and made.marks == {"update", "shown", "held"}
    noise = [
        zo.FastDropout(hidden=0.2),
        zo.Zoneout(hidden=0.5, cell=0.5),
        zo.RecurrentDropout(rate=0.3),
    ]
    layer = zo.LSTM(I, H, noise=noise)
    slow = zo.LSTM(I, H, noise=noise, backend="reference")
    slow.load_state_dict(layer.state_dict())
    x = torch.randn(T, B, I)
    assert torch.allclose(layer(x, seed=1)[0], slow(x, seed=1)[0], atol=1e-5)


def test_fast_dropout_in_a_compiled_layer():
    """torch.compile cannot trace the layer, or draws other numbers."""
    layer = zo.LSTM(I, H, noise=zo.FastDropout(input=0.3, hidden=0.3))
    x, seed = torch.randn(T, B, I), torch.tensor(5)
    want = layer(x, seed=seed)[0]
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, seed=seed)[0], want)


@pytest.mark.usefixtures("emulated")
def test_normal_numbers_of_the_kernel():
    """A GPU draws other numbers than a CPU."""
    rows, seed = torch.tensor([4, 1, 9]), torch.tensor(3)
    got = normals(rows, seed, 65536 * 4097 + 5, 2, 4, 37)
    want = normal_numbers("fast_hidden", 3, range(2, 6), rows.tolist(), 37, 2, 1)
    close(got, want, 1e-5)


ERRORS: dict[str, Any] = {
    "does not apply to products that are normalised": lambda: zo.LSTM(
        I, H, norm="layer", noise=zo.FastDropout(input=0.1)
    ),
    "does not apply to an h that is projected": lambda: zo.LSTM(
        I, H, proj_size=3, noise=zo.FastDropout(hidden=0.1)
    ),
    "has no recurrent weight matrix": lambda: zo.Recurrent(
        zo.cells.mingru, I, H, noise=zo.FastDropout(hidden=0.1)
    ),
    "more than 4 gates or no dense": lambda: zo.Recurrent(
        zo.cells.slstm, I, H, noise=zo.FastDropout(hidden=0.1)
    ),
    "replace the input": lambda: zo.LSTM(
        I, H, noise=[zo.FastDropout(input=0.1), zo.VariationalDropout(input=0.1)]
    ),
    "expected a rate between 0 and 1": lambda: zo.FastDropout(hidden=1.5),
    "write FastDropout(input=0.1, hidden=0.1)": lambda: zo.FastDropout(0.1),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_arguments(message):
    """A bad argument runs, or is refused without saying what was expected."""
    with pytest.raises((ValueError, TypeError)) as error:
        ERRORS[message]()
    assert message in str(error.value)
