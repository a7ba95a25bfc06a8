"""The published cells against NumPy, written from the equations of their papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import products
import pytest
import torch
from products import authors_gru, low_rank

import zoneout as zo
from zoneout import cells
from zoneout.definition.checks import check_derivative, check_trace
from zoneout.ops import cpu

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


def slstm(x, r, h, c, n, m, drop=False):
    i, f, z, o = (a + b for a, b in zip(x, r))
    log_f = np.log(sigma(f))
    new_m = np.where(drop, 0, np.where(n == 0, i, np.maximum(log_f + m, i)))
    keep, put = np.exp(log_f + m - new_m), np.exp(i - new_m)
    new_c, new_n = (np.where(drop, 0, v) for v in (keep * c + put * np.tanh(z), keep * n + put))
    return sigma(o) * new_c / np.where(new_n == 0, 1, new_n), new_c, new_n, new_m


def mgu(x, r, h, u_f, u_n):
    f = sigma(x[0] + h @ u_f.T)
    return ((1 - f) * h + f * np.tanh(x[1] + (f * h) @ u_n.T),)


def mogrifier_lstm(x, r, h, c, q1, r2, q3, r4, q5, w, u, *biases):
    (x,) = x
    x = 2 * sigma(h @ q1.T) * x
    h = 2 * sigma(x @ r2.T) * h
    x = 2 * sigma(h @ q3.T) * x
    h = 2 * sigma(x @ r4.T) * h
    x = 2 * sigma(h @ q5.T) * x
    i, f, g, o = np.split(x @ w.T + h @ u.T + np.concatenate(biases), 4, axis=1)
    new = sigma(f) * c + sigma(i) * np.tanh(g)
    return sigma(o) * np.tanh(new), new


EQUATIONS: dict[str, Callable[..., tuple[Array, ...]]] = {
    f.__name__: f
    for f in (
        *(peephole_lstm, coupled_lstm, capped_lstm, janet, ligru, indrnn),
        *(mingru, minlstm, sru, cfc, slstm, mgu, mogrifier_lstm),
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


# --- products inside the step ---------------------------------------------------------------------


def test_reset_before_the_product():
    """The authors' GRU is not its equation, or zoneout keeps other units than its masks say."""
    noise = zo.Zoneout(hidden=0.3)
    layer = zo.Recurrent(authors_gru, INPUT, HIDDEN, noise=noise, dtype=torch.float64)
    w, b, u, u_n = (p.detach().numpy() for p in layer.parameters())
    assert u.shape == (2 * HIDDEN, HIDDEN) and u_n.shape == (HIDDEN, HIDDEN)
    x, h = torch.randn(STEPS, BATCH, INPUT, dtype=torch.float64), np.zeros((BATCH, HIDDEN))
    masks = zo.masks(noise, 3, STEPS, BATCH, HIDDEN, cell=authors_gru)["h"].numpy()
    y, _ = layer(x, seed=3)
    for t in range(STEPS):
        xs = np.split(x[t].numpy() @ w.T + b, 3, axis=1)
        r, z = (sigma(a + c) for a, c in zip(xs, np.split(h @ u.T, 2, axis=1)))
        new = z * h + (1 - z) * np.tanh(xs[2] + (r * h) @ u_n.T)
        h = np.where(masks[t], h, new)
        np.testing.assert_allclose(y[t].detach().numpy(), h, rtol=1e-10, atol=1e-12)


def test_lem():
    """Long Expressive Memory is not its equation: W_y meets the old z, or a gate another state."""
    layer = zo.Recurrent(products.lem, INPUT, HIDDEN, dtype=torch.float64)
    w, b, u, u_y = (p.detach().numpy() for p in layer.parameters())
    x, y, z = torch.randn(STEPS, BATCH, INPUT, dtype=torch.float64), *np.zeros((2, BATCH, HIDDEN))
    found, _ = layer(x)
    for t in range(STEPS):
        v = np.split(x[t].numpy() @ w.T + b, 4, axis=1)
        a1, a2, a3 = (p + q for p, q in zip(v, np.split(y @ u.T, 3, axis=1)))
        z = (1 - 0.5 * sigma(a1)) * z + 0.5 * sigma(a1) * np.tanh(a3)
        y = (1 - 0.5 * sigma(a2)) * y + 0.5 * sigma(a2) * np.tanh(v[3] + z @ u_y.T)
        np.testing.assert_allclose(found[t].detach().numpy(), y, rtol=1e-10, atol=1e-12)


def test_cornn():
    """The coupled oscillators are not their equation."""
    layer = zo.Recurrent(products.cornn, INPUT, HIDDEN, dtype=torch.float64)
    w, u, b, b_h, u_z = (p.detach().numpy() for p in layer.parameters())
    x, y, z = torch.randn(STEPS, BATCH, INPUT, dtype=torch.float64), *np.zeros((2, BATCH, HIDDEN))
    found, _ = layer(x)
    for t in range(STEPS):
        force = np.tanh(x[t].numpy() @ w.T + b + b_h + y @ u.T + z @ u_z.T)
        z = z + 0.1 * (force - 2 * y - 0.5 * z)
        y = y + 0.1 * z
        np.testing.assert_allclose(found[t].detach().numpy(), y, rtol=1e-10, atol=1e-12)


def test_low_rank():
    """rank= gives another shape, or the two matrices are applied in another order."""
    layer = zo.Recurrent(low_rank, INPUT, HIDDEN, dtype=torch.float64)
    a, b, c = layer.a_l0, layer.b_l0, layer.c_l0
    assert [*a.shape, *b.shape, *c.shape] == [2 * HIDDEN, 3, 3, HIDDEN, HIDDEN, 3]
    h0 = torch.randn(1, BATCH, HIDDEN, dtype=torch.float64)
    x = torch.randn(1, BATCH, INPUT, dtype=torch.float64)
    one, two = (h0[0] @ (a @ b).T).chunk(2, dim=1)
    inner = one + two * h0[0] + h0[0] ** 2 @ (c @ b).T
    want = x[0] @ layer.weight_ih_l0.T + layer.bias_ih_l0 + inner
    torch.testing.assert_close(layer(x, h0)[0][0], want.tanh())


def test_the_text_of_a_product():
    """A definition with products is saved as another one, or a text with a wrong one is read."""
    for d in (authors_gru, low_rank, cells.mgu, cells.mogrifier_lstm):
        again = type(d).from_text(d.text)
        assert again == d and again.matrices == d.matrices
    for old, new in (("product:H", "product:x"), ("part:1", "part:7"), ("product:2H", "product:H")):
        assert old in authors_gru.text
        with pytest.raises(ValueError):
            type(authors_gru).from_text(authors_gru.text.replace(old, new))


@zo.cell(gates=1)
def with_shown(x, r, h, w):
    return zo.shown(x[0] + r[0] + zo.product(w, h)).tanh()


@zo.cell(gates=1, recurrence="none")
def seventeen(x, h, w):
    for _ in range(17):
        h = zo.product(w, h)
    return (x[0] + h).tanh()


def test_products_that_the_loop_has_no_room_for():
    """The compiled loop runs a cell that it has no room for, or nobody is told that it is slow."""
    x = torch.randn(STEPS, BATCH, INPUT)
    for cell, norm, why in (
        (with_shown, "layer", "and the layer a norm"),
        (seventeen, None, "more"),
    ):
        cpu._say_once.cache_clear()
        with pytest.warns(UserWarning, match=f"'{cell.name}' has .*{why}.* the reference runs it"):
            layer = zo.Recurrent(cell, INPUT, HIDDEN, norm=norm)
            want = layer(x, lengths=[5, 3, 2])[0]
        found = layer(torch.nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2]))[0]
        found, _ = torch.nn.utils.rnn.pad_packed_sequence(found)
        torch.testing.assert_close(found, want)
        with pytest.raises(ValueError, match=f"backend: .*'{cell.name}' has .*{why}"):
            zo.Recurrent(cell, INPUT, HIDDEN, norm=norm, backend="cpu")(x)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda x, h, w: x[0] + zo.product(w, h) * w, "w is a matrix, and only zo.product"),
        (lambda x, h, w: x[0] + zo.product(w, h, rank=2), "only zo.product takes it"),
        (lambda x, h, w: x[0] + zo.product(h, w), "a parameter of the cell first, got the state h"),
        (lambda x, h, w: x[0] + zo.product(2 * w, h), "first, got the result of mul; make it an"),
        (lambda x, h, w: x[0] + zo.product(w, 1.0), "expected one value second, got a float"),
        (lambda x, h, w: x[0] + zo.product(w, x), "second, got a tuple; x and r are tuples"),
        (lambda x, h, w: x[0] + zo.product(w, h > 0), "second, got the result of gt"),
        (lambda x, h, w: x[0] + zo.product(w, h, parts=2), "given a tuple of 2 values; take one"),
        (lambda x, h, w: x[0] + w @ h, r"write zo.product\(W, v\) for another one"),
        (
            lambda x, h, w: x[0] + zo.product(w, h, parts=33)[0],
            "parts: expected at most 32, got 33",
        ),
        (lambda x, h, w: x[0] + zo.product(w, h, parts=0)[0], "expected a number from 1"),
        (
            lambda x, h, w: x[0] + zo.product(w, h) + zo.product(w, h, parts=2)[0],
            "the matrix w is used in two shapes",
        ),
    ],
)
def test_errors(function, sentence):
    """A wrong product is traced, and fails in a layer with torch's words."""
    with pytest.raises(zo.DefinitionError, match=sentence):
        zo.cell(gates=1, recurrence="none")(function)


def test_the_stabiliser():
    """Large gates of an sLSTM overflow, or small ones divide zero by zero."""
    layer = zo.Recurrent(cells.slstm, INPUT, HIDDEN)
    for size in (1e4, -1e4):
        torch.nn.init.constant_(layer.bias_ih_l0, size)
        y, _ = layer(torch.randn(STEPS, BATCH, INPUT))
        y.sum().backward()
        assert y.isfinite().all() and layer.weight_ih_l0.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("mask", ["unit", "sequence"])
def test_dropped_normaliser(mask, backend):
    """Dropout of an sLSTM's c, n and m divides zero by zero, in outputs or in gradients."""
    noise = zo.StateDropout(cell=0.4, mask=mask, at_eval="sample")
    layer = zo.Recurrent(
        cells.slstm, INPUT, HIDDEN, noise=noise, backend=backend, dtype=torch.float64
    )
    w, u, b, b_u = (p.detach().numpy() for p in layer.parameters())
    x = torch.randn(STEPS, BATCH, INPUT, dtype=torch.float64, requires_grad=True)
    masks = zo.masks(noise, 3, STEPS, BATCH, HIDDEN, cell=cells.slstm)["c"].numpy()
    y, _ = layer(x, seed=3)
    y.sum().backward()
    states = [np.zeros((BATCH, HIDDEN))] * 4
    for t in range(STEPS):
        x_t = gates_of(x[t].detach().numpy(), w, b, 4, 1)
        states = slstm(x_t, gates_of(states[0], u, b_u, 4, 4), *states, drop=masks[t])
        np.testing.assert_allclose(y[t].detach().numpy(), states[0], rtol=1e-10, atol=1e-12)
    assert all(v.grad.isfinite().all() for v in (x, *layer.parameters()))
    assert torch.equal(layer.eval()(x, seed=3)[0], y)


def test_another_number_of_heads():
    """`with_heads` keeps the old blocks, or changes the cell that it is called on."""
    two = cells.slstm.with_heads(2)
    assert (two.heads, cells.slstm.heads, two.recurrence) == (2, 4, "blocks")
    assert two != cells.slstm and two == cells.slstm.with_heads(2)
    assert zo.Recurrent(two, INPUT, HIDDEN).weight_hh_l0.shape == (4 * HIDDEN, HIDDEN // 2)
    assert zo.Recurrent(cells.lstm.with_heads(4), 3, 8).weight_hh_l0.shape == (32, 2)
    with pytest.raises(zo.DefinitionError, match="heads: expected 1 with recurrence='none'"):
        cells.mingru.with_heads(2)


@pytest.mark.parametrize("rows", [0, 2])
def test_heads_without_rows(rows):
    """The gradient of block-diagonal weights cannot be computed from nothing."""
    layer = zo.Recurrent(zo.cells.slstm, 3, 8)
    y, _ = layer(torch.randn(3, rows, 3), lengths=[0] * rows)
    y.sum().backward()
    assert all((p.grad == 0).all() for p in layer.parameters())
