"""One step of each cell as a pure function (section 3 of the zoneout paper).

Each function takes the products with the weights, the states of the previous step and a `Keep`. The
products are `gates`, or `gx` and `gh` if the cell does not simply add them. `Keep` says which units
get their old value (or zero) instead of the new value. In training it holds bool masks. In
evaluation it holds the expectation of each mask, which is the rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Keep(NamedTuple):
    """The units that are replaced in one step.

    Each field is a bool mask (training), a rate (evaluation), or None if nothing is replaced.
    """

    cell: Tensor | None = None  # c keeps its previous value
    hidden: Tensor | None = None  # h keeps its previous value
    zero_cell: Tensor | None = None  # the candidate c is set to zero
    zero_hidden: Tensor | None = None  # the candidate h is set to zero
    update: Tensor | None = None  # the update of c (in a GRU: of h) is set to zero


NOTHING = Keep()


def zone(new: Tensor, old: Tensor, keep: Tensor | None) -> Tensor:
    """Return `new`, replaced by `old` where the mask `keep` is True.

    A rate in place of the mask gives the expectation.
    In the paper: T = d ⊙ identity + (1 − d) ⊙ T̃.
    """
    if keep is None:
        return new
    if keep.dtype == torch.bool:
        return torch.where(keep, old, new)
    mixed = torch.lerp(new, old, keep.to(new.dtype))
    # At the rates 0 and 1 the lerp could give NaN (0 · ∞), so one of the two values is selected.
    return torch.where(keep == 0, new, torch.where(keep == 1, old, mixed))


def drop(new: Tensor, zero: Tensor | None) -> Tensor:
    """Return `new`, set to zero where the mask `zero` is True.

    A rate in place of the mask gives the expectation.
    In the paper: T = (1 − d) ⊙ T̃.
    """
    if zero is None:
        return new
    if zero.dtype == torch.bool:
        return new.masked_fill(zero, 0.0)
    return new * (1 - zero).to(new.dtype)


def same(x: Tensor) -> Tensor:
    """Return `x` unchanged."""
    return x


def lstm(
    gates: Tensor,  # [B, 4H]
    h: Tensor,
    c: Tensor,
    keep: Keep = NOTHING,
    *,
    held: Tensor | None = None,
    expose: Callable[[Tensor], Tensor] = same,
    project: Callable[[Tensor], Tensor] = same,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one LSTM step and return h, c and the output gate o.

    The candidate h is computed from the candidate c, before zoneout.

    Args:
        gates: the sum of both products and biases, [B, 4H], in the order i, f, g, o.
        h: the previous hidden state.
        c: the previous cell state.
        keep: the units to replace.
        held: the output gate used instead of o for units whose update is dropped.
        expose: the normalisation of c where c feeds h.
        project: the projection W_hr.
    """
    i, f, g, o = gates.chunk(4, dim=-1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c_new = drop(f * c + drop(i * g, keep.update), keep.zero_cell)
    shown = o if held is None else zone(o, held, keep.update)
    h_new = drop(project(shown * expose(c_new).tanh()), keep.zero_hidden)
    return zone(h_new, h, keep.hidden), zone(c_new, c, keep.cell), o


def gru(gx: Tensor, gh: Tensor, h: Tensor, keep: Keep = NOTHING) -> Tensor:
    """Run one GRU step and return h.

    `gx` and `gh` [B, 3H] are W_x x + b_x and W_h h + b_h. Their gates are in the order r, z, n.
    """
    (rx, zx, nx), (rh, zh, nh) = gx.chunk(3, dim=-1), gh.chunk(3, dim=-1)
    r, z = (rx + rh).sigmoid(), (zx + zh).sigmoid()
    n = (nx + r * nh).tanh()
    h_new = drop(z * h + drop((1 - z) * n, keep.update), keep.zero_hidden)
    return zone(h_new, h, keep.hidden)


def rnn(
    gates: Tensor, h: Tensor, keep: Keep = NOTHING, *, nonlinearity: Callable[[Tensor], Tensor] = torch.tanh
) -> Tensor:
    """Run one step of a plain RNN and return h; `gates` is [B, H]."""
    return zone(drop(nonlinearity(gates), keep.zero_hidden), h, keep.hidden)
