"""Published cells, each as its equation. `zo.Recurrent(zo.cells.janet, 64, 256)` is a layer of one.

The equations are those of the papers, with a bias for every gate. A docstring names the paper, and
says what a cell leaves out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..definition import Definition, candidate, cell, held, product, shown, update

# mypy: disable-error-code="no-untyped-def"


@cell(gates=4, states=("h", "c"), bounded=True, checked=False)
def peephole_lstm(x, r, h, c, p_i, p_f, p_o):
    """The gates also see c: i and f the old one, o the new one.

    Gers, Schraudolph and Schmidhuber, "Learning Precise Timing with LSTM Recurrent Networks", 2002.
    """
    i, f, g, o = (a + b for a, b in zip(x, r))
    i, f = (i + p_i * c).sigmoid(), (f + p_f * c).sigmoid()
    c = candidate("c", f * c + update(i * g.tanh()))
    return held((o + p_o * c).sigmoid()) * shown(c).tanh(), c


@cell(gates=3, states=("h", "c"), bounded=True, checked=False)
def coupled_lstm(x, r, h, c):
    """The input gate is 1 − f (CIFG).

    Greff et al., "LSTM: A Search Space Odyssey", 2017.
    """
    f, g, o = (a + b for a, b in zip(x, r))
    f = f.sigmoid()
    c = candidate("c", f * c + update((1 - f) * g.tanh()))
    return held(o.sigmoid()) * shown(c).tanh(), c


@cell(gates=4, states=("h", "c"), bounded=True, checked=False)
def capped_lstm(x, r, h, c):
    """The input gate is min(i, 1 − f), so that |c| ≤ 1.

    Melis, Dyer and Blunsom, "On the State of the Art of Evaluation in Neural Language Models",
    2018.
    """
    i, f, g, o = (a + b for a, b in zip(x, r))
    i, f = i.sigmoid(), f.sigmoid()
    c = candidate("c", f * c + update(torch.minimum(i, 1 - f) * g.tanh()))
    return held(o.sigmoid()) * shown(c).tanh(), c


@cell(gates=2, checked=False)
def janet(x, r, h):
    """An LSTM with a forget gate only, and β = 1.

    Van der Westhuizen and Lasenby, "The unreasonable effectiveness of the forget gate", 2018.
    """
    s, g = (a + b for a, b in zip(x, r))
    return s.sigmoid() * h + update((1 - (s - 1).sigmoid()) * g.tanh())


@cell(gates=2, checked=False)
def ligru(x, r, h):
    """A GRU without reset gate, with ReLU. The paper's batch norm of W x is left out.

    Ravanelli et al., "Light Gated Recurrent Units for Speech Recognition", 2018.
    """
    z, n = (a + b for a, b in zip(x, r))
    z = z.sigmoid()
    return z * h + update((1 - z) * n.relu())


@cell(gates=1, recurrence="diagonal", checked=False)
def indrnn(x, h, u):
    """Each unit sees itself alone.

    Li et al., "Independently Recurrent Neural Network (IndRNN)", 2018.
    """
    return (x[0] + u * h).relu()


@cell(gates=2, recurrence="none", checked=False)
def mingru(x, h):
    """The gates do not see h.

    Feng et al., "Were RNNs All We Needed?", 2024 (the sequential form, not that in log space).
    """
    z = x[0].sigmoid()
    return (1 - z) * h + update(z * x[1])


@cell(gates=3, recurrence="none", checked=False)
def minlstm(x, h):
    """The gates do not see h, and sum to one.

    Feng et al., "Were RNNs All We Needed?", 2024 (the sequential form, not that in log space).
    """
    f, i = x[0].sigmoid(), x[1].sigmoid()
    return f / (f + i) * h + update(i / (f + i) * x[2])


@cell(gates=4, states=("h", "c"), recurrence="diagonal", checked=False)
def sru(x, h, c, v_f, v_r):
    """Both gates see c, and h is mixed with the input. x[3] is the projected input, for any size.

    Lei et al., "Simple Recurrent Units for Highly Parallelizable Recurrence", 2018 (α = 1).
    """
    f, r = (x[0] + v_f * c).sigmoid(), (x[1] + v_r * c).sigmoid()
    c = candidate("c", f * c + update((1 - f) * x[2]))
    return r * c + (1 - r) * x[3], c


@cell(gates=3, bounded=True, checked=False)
def cfc(x, r, h):
    """Closed-form continuous time, with one unit of time between steps and no backbone network.

    Hasani et al., "Closed-form Continuous-time Neural Networks", 2022 (equation 3, t = 1).
    """
    f, g, n = (a + b for a, b in zip(x, r))
    f = (-f).sigmoid()
    return f * g.tanh() + update((1 - f) * n.tanh())


@cell(gates=4, states=("h", ("c", "n", "m")), recurrence="blocks", heads=4, checked=False)
def slstm(x, r, h, c, n, m):
    """Exponential input gate, normaliser n and stabiliser m. Start with zeros: then n ≥ 1 follows.

    Beck et al., "xLSTM: Extended Long Short-Term Memory", 2024 (forget gate σ, 4 heads;
    `with_heads` changes their number). As in the authors' code, m = i where n is still zero.
    Where n is dropped, h is zero.
    """
    i, f, z, o = (a + b for a, b in zip(x, r))
    kept = m - F.softplus(-f)  # log σ(f) + m
    m = candidate("m", torch.where(n == 0, i, torch.maximum(kept, i)))
    f, i = (kept - m).exp(), (i - m).exp()
    c = candidate("c", f * c + i * z.tanh())
    n = candidate("n", f * n + i)
    return o.sigmoid() * c / torch.where(n == 0, 1.0, n), c, n, m


@cell(gates=2, recurrence="none", bounded=True, checked=False)
def mgu(x, h, u_f, u_n):
    """One gate, which also resets h before its product.

    Zhou et al., "Minimal Gated Unit for Recurrent Neural Networks", 2016.
    """
    f = (x[0] + product(u_f, h)).sigmoid()
    return (1 - f) * h + update(f * (x[1] + product(u_n, f * h)).tanh())


@cell(gates=1, states=("h", "c"), recurrence="none", bounded=True, checked=False)
def mogrifier_lstm(x, h, c, q1, r2, q3, r4, q5, w, u, b_i, b_f, b_g, b_o):
    """An LSTM whose x and h gate each other first, five times. x is projected to H numbers before.

    Melis, Kočiský and Blunsom, "Mogrifier LSTM", 2020 (full rank).
    """
    (x,) = x
    for q, r in ((q1, r2), (q3, r4), (q5, None)):
        x = 2 * product(q, h).sigmoid() * x
        h = h if r is None else 2 * product(r, x).sigmoid() * h
    sums = zip(product(w, x, parts=4), product(u, h, parts=4), (b_i, b_f, b_g, b_o))
    i, f, g, o = (a + b + bias for a, b, bias in sums)
    c = candidate("c", f.sigmoid() * c + update(i.sigmoid() * g.tanh()))
    return held(o.sigmoid()) * c.tanh(), c


PUBLISHED: dict[str, Definition] = {
    d.name: d
    for d in (
        *(peephole_lstm, coupled_lstm, capped_lstm, janet, ligru, indrnn),
        *(mingru, minlstm, sru, cfc, slstm, mgu, mogrifier_lstm),
    )
}
