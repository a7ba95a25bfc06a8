"""Section 3 of the paper: one step of each cell, as a pure function.

Every function takes the products with the weights (`gates`, or `gx` and `gh` where they enter apart), the
states of the step before, and a `Keep`: for each stream, where the old value (or zero) takes the place of
the new one. In training that is a bool mask; at evaluation it is the mask's expectation, the rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Keep(NamedTuple):
    """What is replaced in one step: a bool mask, its rate in its place, or None for nothing."""

    cell: Tensor | None = None  # c keeps its previous value
    hidden: Tensor | None = None  # h keeps its previous value
    zero_cell: Tensor | None = None  # the candidate c is set to zero
    zero_hidden: Tensor | None = None  # the candidate h is set to zero
    update: Tensor | None = None  # the update of c (in a GRU of h) is set to zero


NOTHING = Keep()


def zone(new: Tensor, old: Tensor, keep: Tensor | None) -> Tensor:
    """T = d ⊙ identity + (1 − d) ⊙ T̃: the new value, or the old one where `keep` says so."""
    if keep is None:
        return new
    if keep.dtype == torch.bool:
        return torch.where(keep, old, new)
    mixed = torch.lerp(new, old, keep.to(new.dtype))  # 0 · ∞ in it is nothing that anybody asked for
    return torch.where(keep == 0, new, torch.where(keep == 1, old, mixed))


def drop(new: Tensor, zero: Tensor | None) -> Tensor:
    """T = (1 − d) ⊙ T̃: the new value, or zero where `zero` says so."""
    if zero is None:
        return new
    if zero.dtype == torch.bool:
        return new.masked_fill(zero, 0.0)
    return new * (1 - zero).to(new.dtype)


def same(x: Tensor) -> Tensor:
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
    """One LSTM step: h, c and the output gate o.

    The candidate h is made from the candidate c, before zoning out. `held` is the output gate that a unit
    shows where its update was dropped; `expose` normalises c where it feeds h; `project` is W_hr.
    """
    i, f, g, o = gates.chunk(4, dim=-1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c_new = drop(f * c + drop(i * g, keep.update), keep.zero_cell)
    shown = o if held is None else zone(o, held, keep.update)
    h_new = drop(project(shown * expose(c_new).tanh()), keep.zero_hidden)
    return zone(h_new, h, keep.hidden), zone(c_new, c, keep.cell), o


def gru(gx: Tensor, gh: Tensor, h: Tensor, keep: Keep = NOTHING) -> Tensor:
    """One GRU step; `gx` and `gh` [B, 3H] are W_x x + b_x and W_h h + b_h, in the order r, z, n."""
    (rx, zx, nx), (rh, zh, nh) = gx.chunk(3, dim=-1), gh.chunk(3, dim=-1)
    r, z = (rx + rh).sigmoid(), (zx + zh).sigmoid()
    n = (nx + r * nh).tanh()
    h_new = drop(z * h + drop((1 - z) * n, keep.update), keep.zero_hidden)
    return zone(h_new, h, keep.hidden)


def rnn(
    gates: Tensor, h: Tensor, keep: Keep = NOTHING, *, nonlinearity: Callable[[Tensor], Tensor] = torch.tanh
) -> Tensor:
    """One step of a plain RNN."""
    return zone(drop(nonlinearity(gates), keep.zero_hidden), h, keep.hidden)
