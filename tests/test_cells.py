"""The published cells against NumPy, written from the equations of their papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

import zoneout as zo
from zoneout import cells
from zoneout.definition.checks import check_derivative, check_trace

Array = np.ndarray
STEPS, BATCH, INPUT, HIDDEN = 5, 3, 4, 8


def sigma(v: Array) -> Array:
    return 1 / (1 + np.exp(-v))


def peephole_lstm(x, r, h, c, p_i, p_f, p_o):
    i = sigma(x[0] + r[0] + p_i * c)
    f = sigma(x[1] + r[1] + p_f * c)
    new = f * c + i * np.tanh(x[2] + r[2])
    return sigma(x[3] + r[3] + p_o * new) * np.tanh(new), new


def coupled_lstm(x, r, h, c):
    f = sigma(x[0] + r[0])
    new = f * c + (1 - f) * np.tanh(x[1] + r[1])
    return sigma(x[2] + r[2]) * np.tanh(new), new


def capped_lstm(x, r, h, c):
    i, f = sigma(x[0] + r[0]), sigma(x[1] + r[1])
    new = f * c + np.minimum(i, 1 - f) * np.tanh(x[2] + r[2])
    return sigma(x[3] + r[3]) * np.tanh(new), new


def janet(x, r, h):
    s = x[0] + r[0]
    return (sigma(s) * h + (1 - sigma(s - 1)) * np.tanh(x[1] + r[1]),)


def ligru(x, r, h):
    z = sigma(x[0] + r[0])
    return (z * h + (1 - z) * np.maximum(x[1] + r[1], 0),)


def indrnn(x, r, h, u):
    return (np.maximum(x[0] + u * h, 0),)


def mingru(x, r, h):
    z = sigma(x[0])
    return ((1 - z) * h + z * x[1],)


def minlstm(x, r, h):
    f, i = sigma(x[0]), sigma(x[1])
    return ((f * h + i * x[2]) / (f + i),)


def sru(x, r, h, c, v_f, v_r):
    f = sigma(x[0] + v_f * c)
    reset = sigma(x[1] + v_r * c)
    new = f * c + (1 - f) * x[2]
    return reset * new + (1 - reset) * x[3], new


def cfc(x, r, h):
    f, g, n = (a + b for a, b in zip(x, r))
    return (sigma(-f) * np.tanh(g) + (1 - sigma(-f)) * np.tanh(n),)


def slstm(x, r, h, c, n, m):
    i, f, z, o = (a + b for a, b in zip(x, r))
    log_f = np.log(sigma(f))
    new_m = np.where(n == 0, i, np.maximum(log_f + m, i))
    keep, put = np.exp(log_f + m - new_m), np.exp(i - new_m)
    new_c, new_n = keep * c + put * np.tanh(z), keep * n + put
    return sigma(o) * new_c / new_n, new_c, new_n, new_m


EQUATIONS: dict[str, Callable[..., tuple[Array, ...]]] = {
    f.__name__: f
    for f in (
        *(peephole_lstm, coupled_lstm, capped_lstm, janet, ligru, indrnn),
        *(mingru, minlstm, sru, cfc, slstm),
    )
}
every_cell = pytest.mark.parametrize("name", cells.PUBLISHED)


def test_every_cell_has_an_equation():
    """A published cell is tested against nothing."""
    assert list(EQUATIONS) == list(cells.PUBLISHED)
    assert all(getattr(zo.cells, name) is d for name, d in cells.PUBLISHED.items())


def gates_of(v: Array, w: Array, bias: Array, gates: int, heads: int) -> list[Array]:
    """Each gate's product with v; in a block-diagonal matrix, head by head."""
    found = []
    for w_q, b_q in zip(np.split(w, gates), np.split(bias, gates)):
        blocks = zip(np.split(v, heads, axis=1), np.split(w_q, heads))
        found.append(np.concatenate([v_k @ w_k.T for v_k, w_k in blocks], axis=1) + b_q)
    return found


def numpy_layer(name: str, values: dict[str, Array]) -> list[Array]:
    """Return y, then the final states; `values` has x, the states and the parameters."""
    d = cells.PUBLISHED[name]
    states: Sequence[Array] = [values[f"state {s}"] for s in d.states]
    own = [values[f"{p}_l0"] for p in d.parameters]
    every = []
    for x_t in values["x"]:
        x = gates_of(x_t, values["weight_ih_l0"], values["bias_ih_l0"], d.gates, 1)
        r = None
        if d.has_r:
            recurrent = values["weight_hh_l0"], values["bias_hh_l0"]
            r = gates_of(states[0], *recurrent, d.gates, d.heads)
        states = EQUATIONS[name](x, r, *states, *own)
        every.append(states[0])
    return [np.stack(every), *states]


def values_of(name: str, zeros: bool) -> tuple[zo.Recurrent, dict[str, torch.Tensor]]:
    layer = zo.Recurrent(cells.PUBLISHED[name], INPUT, HIDDEN, dtype=torch.float64)
    g = torch.Generator().manual_seed(1)
    values: dict[str, torch.Tensor] = {}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    for key, p in layer.named_parameters():
        p.data.copy_(draw(*p.shape))
        values[key] = p
    values["x"] = draw(STEPS, BATCH, INPUT).requires_grad_()
    for state in layer.definition.states:  # n of an sLSTM is positive after its first step
        start = draw(1, BATCH, HIDDEN).abs() + 0.5
        values[f"state {state}"] = (start * 0 if zeros else start).requires_grad_()
    return layer, values


@every_cell
@pytest.mark.parametrize("zeros", [False, True], ids=["from states", "from zeros"])
def test_outputs_states_and_gradients(name, zeros):
    """A published cell does not compute its paper's equation, or has another derivative."""
    layer, values = values_of(name, zeros)
    start = [values[f"state {s}"] for s in layer.definition.states]
    y, end = layer(values["x"], tuple(start) if len(start) > 1 else start[0])
    found = [y, *(v[0] for v in (end if isinstance(end, tuple) else (end,)))]
    arrays = {
        key: (v[0] if key.startswith("state") else v).detach().numpy() for key, v in values.items()
    }
    for ours, theirs in zip(found, numpy_layer(name, arrays), strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-10, atol=1e-12)

    by = [np.random.default_rng(k).standard_normal(v.shape) for k, v in enumerate(found)]

    def loss(changed: dict[str, Array]) -> float:
        return float(sum((w * v).sum() for w, v in zip(by, numpy_layer(name, changed))))

    sum((torch.from_numpy(w) * v).sum() for w, v in zip(by, found)).backward()
    for k, (key, value) in enumerate(values.items()):
        if key.startswith("state") and zeros:
            continue  # n of an sLSTM is compared with zero
        grad = value.grad.numpy().reshape(arrays[key].shape)
        way = np.random.default_rng(100 + k).standard_normal(grad.shape)
        size = 1e-6
        above, below = (loss(arrays | {key: arrays[key] + s * way}) for s in (size, -size))
        np.testing.assert_allclose(
            (grad * way).sum(), (above - below) / (2 * size), rtol=1e-5, atol=1e-6, err_msg=key
        )


@every_cell
def test_traces_and_derivatives(name):
    """The checks that a user's cell gets when it is decorated find a mistake in this one."""
    d = cells.PUBLISHED[name]
    check_trace(d, d.function)
    check_derivative(d)


def test_the_stabiliser():
    """Large gates of an sLSTM overflow, or small ones divide zero by zero."""
    layer = zo.Recurrent(cells.slstm, INPUT, HIDDEN)
    for size in (1e4, -1e4):
        torch.nn.init.constant_(layer.bias_ih_l0, size)
        y, _ = layer(torch.randn(STEPS, BATCH, INPUT))
        y.sum().backward()
        assert y.isfinite().all() and layer.weight_ih_l0.grad.isfinite().all()


def test_another_number_of_heads():
    """`with_heads` keeps the old blocks, or changes the cell that it is called on."""
    two = cells.slstm.with_heads(2)
    assert (two.heads, cells.slstm.heads, two.recurrence) == (2, 4, "blocks")
    assert two != cells.slstm and two == cells.slstm.with_heads(2)
    assert zo.Recurrent(two, INPUT, HIDDEN).weight_hh_l0.shape == (4 * HIDDEN, HIDDEN // 2)
    assert zo.Recurrent(cells.lstm.with_heads(4), 3, 8).weight_hh_l0.shape == (32, 2)
    with pytest.raises(zo.DefinitionError, match="heads: expected 1 with recurrence='none'"):
        cells.mingru.with_heads(2)
