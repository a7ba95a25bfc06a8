"""The cells of torch.nn, each as its equation (Section 3 of the paper).

A cell is a definition (`zoneout.definition`): a function of one unit's numbers, written once. `x`
and `r` are the products W_x x_t + b_x and W_h h_{t−1} + b_h, one entry per gate, in torch's order
of gates.
"""

from __future__ import annotations

from ..definition import Definition, candidate, cell, held, shown, update

# mypy: disable-error-code="no-untyped-def"


@cell(gates=4, states=("h", "c"), bounded=True, checked=False)
def lstm(x, r, h, c):
    """torch's LSTM. h is computed from the candidate c, before zoneout."""
    i, f, g, o = (a + b for a, b in zip(x, r))
    c = candidate("c", f.sigmoid() * c + update(i.sigmoid() * g.tanh()))
    return held(o.sigmoid()) * shown(c).tanh(), c


@cell(gates=3, bounded=True, checked=False)
def gru(x, r, h):
    """torch's GRU: the reset gate is applied to the product W_h h."""
    (reset_x, z_x, n_x), (reset_r, z_r, n_r) = x, r
    reset, z = (reset_x + reset_r).sigmoid(), (z_x + z_r).sigmoid()
    n = (n_x + reset * n_r).tanh()
    return z * h + update((1 - z) * n)


@cell(gates=1, bounded=True, checked=False)
def rnn_tanh(x, r, h):
    """torch's RNN with `nonlinearity="tanh"`."""
    return (x[0] + r[0]).tanh()


@cell(gates=1, checked=False)
def rnn_relu(x, r, h):
    """torch's RNN with `nonlinearity="relu"`."""
    return (x[0] + r[0]).relu()


CELLS: dict[str, Definition] = {
    "lstm": lstm,
    "gru": gru,
    "rnn_tanh": rnn_tanh,
    "rnn_relu": rnn_relu,
}
