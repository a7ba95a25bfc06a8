"""Cells with products inside their step: published ones that `zo.cells` has not, and odd ones."""

from __future__ import annotations

import torch

import zoneout as zo


@zo.cell(gates=3, recurrence="none")
def authors_gru(x, h, u, u_n):
    """Cho et al. 2014: the reset gate is applied before the product."""
    r, z = ((a + b).sigmoid() for a, b in zip(x, zo.product(u, h, parts=2)))
    n = (x[2] + zo.product(u_n, r * h)).tanh()
    return z * h + zo.update((1 - z) * n)


@zo.cell(gates=4, states=("y", "z"), recurrence="none")
def lem(x, y, z, w, w_y):
    """Rusch et al., "Long Expressive Memory for Sequence Modeling", 2022, with Δt = 0.5."""
    a, b, c = (u + v for u, v in zip(x, zo.product(w, y, parts=3)))
    a, b = 0.5 * a.sigmoid(), 0.5 * b.sigmoid()
    z = zo.candidate("z", (1 - a) * z + zo.update(a * c.tanh()))
    return (1 - b) * y + b * (x[3] + zo.product(w_y, z)).tanh(), z


@zo.cell(gates=1, states=("y", "z"))
def cornn(x, r, y, z, w_z):
    """Rusch and Mishra, "Coupled Oscillatory Recurrent Neural Network", 2021: W_h is that of y."""
    force = (x[0] + r[0] + zo.product(w_z, z)).tanh()
    z = zo.candidate("z", z + 0.1 * (force - 2.0 * y - 0.5 * z))
    return y + 0.1 * z, z


@zo.cell(gates=1, recurrence="none")
def low_rank(x, h, a, b, c):
    """The value between a and b is taken twice; c has a rank of its own."""
    inner = zo.product(b, h, rank=3)
    one, two = zo.product(a, inner, parts=2)
    return (x[0] + one + two * h + zo.product(c, zo.product(b, h * h, rank=3))).tanh()


@zo.cell(gates=2, recurrence="none")
def nested(x, h, a, b):
    """A product of a product, with nothing between them and with something."""
    twice = zo.product(a, zo.product(b, h))
    return zo.update((x[0] + twice).tanh()) + 0.5 * (x[1] + zo.product(a, twice.sigmoid())).tanh()


@zo.cell(gates=2, recurrence="none")
def of_gates(x, h, w, b, v):
    """Products of x alone and of a parameter alone, and a bias; one part is never used."""
    gate = zo.product(w, x[0].sigmoid()) + b
    _, of_b = zo.product(v, b, parts=2)
    return (gate + of_b).sigmoid() * h + zo.update(x[1].tanh() * 0.5)


@zo.cell(gates=2, states=("h", "c"))
def shared(x, r, h, c, w):
    """One matrix in two products, and r that meets x in two ways."""
    one, two = zo.product(w, h), zo.product(w, c)
    c = zo.candidate("c", (x[0] * r[0] + one).sigmoid() * c + zo.update((x[1] + r[1]).tanh()))
    return (two + c).tanh() * (one + r[1]).sigmoid(), c


@zo.cell(gates=4, states=("h", "c"))
def marked(x, r, h, c, w, p):
    """Products of the values that noise replaces: candidate, update and held gate."""
    i, f, g, o = (a + b for a, b in zip(x, r))
    new = zo.update(i.sigmoid() * g.tanh())
    c = zo.candidate("c", f.sigmoid() * c + new + 0.1 * zo.product(p, new))
    o = zo.held((o + zo.product(w, c)).sigmoid())
    return zo.shown(c + 0.1 * zo.product(p, o)).tanh() * o, c


@zo.cell(gates=1, recurrence="blocks", heads=2, states=("h", ("c", "n")))
def in_groups(x, r, h, c, n, w):
    both = zo.product(w, torch.where(h > 0, h, c), parts=2)
    c = zo.candidate("c", 0.5 * c + zo.update((x[0] + r[0]).tanh() * both[0].sigmoid()))
    n = zo.candidate("n", 0.5 * n + both[1].sigmoid())
    return c / (1 + abs(n)), c, n


BY_NAME = {
    d.name: d
    for d in (
        *(authors_gru, lem, cornn),
        *(low_rank, nested, of_gates, shared, marked, in_groups),
    )
}
