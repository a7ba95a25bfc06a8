"""A pass in pieces of a few steps, so that what a way back needs of every step is never there whole.

Without derivatives nothing is kept at all (`run`). With them (`recompute`) the state before every piece is, and on the
way back each piece is run forwards again: masks are functions of their coordinates, so it finds the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..norm import Moments
from . import passes
from .interface import Result, Run, Weights
from .passes import DIFFERENTIABLE, Back, Kept, wide

LEAST = 8  # steps of a piece, for which making ready what they share is little
FEW = 8  # pieces that a pass is cut into where it is to be run again

_SUMMED = [name not in ("x", "h0", "c0") for name in DIFFERENTIABLE]  # a piece has only a part of their derivatives


def run(*runs: Run) -> list[Result]:
    """Run over time where nobody will go back; a piece has as many steps as the device wants to have the gates of."""
    if all(r.steps <= _most(r) or not _comes_apart(r) for r in runs):
        return [result(kept, r) for kept, r in zip(passes.forward(*runs), runs)]
    return [forward(r, _most(r)).result for r in runs]


class Passed(NamedTuple):
    """What a pass in pieces gives, and the state before each of them, in the order in which they were run."""

    result: Result
    states: list[Tensor]  # h, and of an LSTM c


def forward(r: Run, steps: int | None = None) -> Passed:
    """Run over time, so many steps at once: by default few enough for a way back that takes little memory."""
    steps = _for_the_way_back(r) if steps is None else steps
    dtype, states = r.h0.dtype, []
    if steps >= r.steps:
        return Passed(result(passes.forward(r)[0], r), [v for v in (r.h0, r.c0) if v is not None])
    y = r.h0.new_empty(r.steps, *r.h0.shape)
    cells = None
    if r.return_cells and r.c0 is not None:
        cells = r.c0.new_empty(r.steps, *r.c0.shape, dtype=passes.state_type(dtype))
    r = _ready(r)
    h, c = r.h0, r.c0
    for own in _cuts(r, steps):
        states += [h] if c is None else [h, c]
        part = _part(r, own, h, c)
        (kept,) = passes.forward(part)
        y[own] = kept.y
        h, c = kept.h, _end_of_cells(kept, part)
        if cells is not None and kept.cells is not None:
            cells[own] = kept.cells
        del kept  # before the next piece takes as much
    return Passed(Result(y, h.to(dtype), None if c is None else c.to(dtype), cells, None), states)


def backward(
    r: Run, states: Sequence[Tensor], d: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The derivatives of `DIFFERENTIABLE`, as `passes.backward` gives them, each piece run forwards once more."""
    each = 1 if r.c0 is None else 2
    if len(states) <= each:
        return passes.backward(Back(r, passes.forward(r)[0], d, needs))[0]
    narrow, (dy, dh, dc, dcells) = r.h0.dtype, d
    dx = torch.empty_like(r.x, memory_format=torch.contiguous_format) if needs[0] else None
    total: list[Tensor | None] = [None] * len(DIFFERENTIABLE)
    ready, begins = _ready(r), [*zip(*[iter(states)] * each)]
    for k, own in reversed([*enumerate(_cuts(r, _for_the_way_back(r)))]):
        part = _part(ready, own, *begins[k])
        wanted = [needed or (k > 0 and name in ("h0", "c0")) for needed, name in zip(needs, DIFFERENTIABLE)]
        mine = (None if dy is None else dy[own], dh, dc, None if dcells is None else dcells[own])
        (found,) = passes.derivatives(Back(part, passes.forward(part)[0], mine, wanted))
        dh, dc = found[1], found[2]
        if dx is not None and found[0] is not None:
            dx[own], found[0] = found[0], dx
        total = [_added(old, new) if summed else new for old, new, summed in zip(total, found, _SUMMED)]
    return [None if v is None or not needed else v.to(narrow) for v, needed in zip(total, needs)]


def backward_anew(r: Run, d: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    """The same where the states have not been kept either: they are found in a pass of their own."""
    r = r._replace(return_cells=False)
    return backward(r, () if _for_the_way_back(r) >= r.steps else forward(r).states, d, needs)


def _added(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """A sum of many parts is taken in the precision of states, in the memory of the first."""
    if old is None or new is None:
        return wide(new) if old is None else old
    return old.add_(new)


# --- pieces ----------------------------------------------------------------------------------------


def _most(r: Run) -> int:
    """How many steps the device wants to have the gates of at once."""
    return max(LEAST, passes.LOOPS[r.x.device.type].PIECE // max(1, r.batch * r.weights.w_hh.shape[0]))


def _for_the_way_back(r: Run) -> int:
    """How many steps are run again at once.

    All, where the pass has less than twice as many rows as the weights have columns: their derivatives, of which every
    piece has a part, would take more memory than the pieces save.
    """
    columns = r.weights.w_ih.shape[1] + r.weights.w_hh.shape[1]
    few = not _comes_apart(r) or r.steps * r.batch < 2 * columns
    return r.steps if few else max(LEAST, min(_most(r), -(-r.steps // FEW)))


def _comes_apart(r: Run) -> bool:
    """Whether a step sees nothing of the others but the state.

    A batch norm has moments of every step, packed rows lie one behind the other, backwards a reset belongs to the
    step above, and a gate that is held is no part of the state.
    """
    by_units = r.norm is None or r.norm.over == "units"
    holds = any(draw.rule.holds_gate for draw in r.draws)
    return by_units and not holds and r.counts is None and not (r.reverse and r.resets is not None)


def _cuts(r: Run, steps: int) -> Iterator[slice]:
    """The pieces, in the order in which they are run."""
    begins = range(0, r.steps, steps)
    return (slice(begin, begin + steps) for begin in (reversed(begins) if r.reverse else begins))


def _ready(r: Run) -> Run:
    """Made ready once for all pieces. Between them, too, the state keeps its precision."""
    w, states = r.weights, {name: wide(getattr(r, name)) for name in ("c0", "reset_c")}
    if passes.LOOPS[r.x.device.type].WIDE:
        w = Weights(*map(wide, w))  # type: ignore[arg-type]
        states |= {name: wide(getattr(r, name)) for name in ("h0", "reset_h")}
    if not r.x.is_floating_point():
        w = w._replace(w_ih=w.w_ih.t().contiguous().t())  # the table of rows by number
    return r._replace(weights=w, **states)  # type: ignore[arg-type]


def _part(r: Run, own: slice, h: Tensor, c: Tensor | None = None) -> Run:
    """The steps of one piece, from a state on."""
    x: Any = r.x[own]
    return r._replace(
        x=x.to(h.dtype) if x.is_floating_point() else x, h0=h, c0=c, first_step=r.first_step + own.start,
        lengths=None if r.lengths is None else (r.lengths - own.start).clamp(0, len(x)),
        resets=None if r.resets is None else r.resets[own],
    )  # fmt: skip


def _end_of_cells(kept: Kept, part: Run) -> Tensor | None:
    """c after a piece, in the precision of states."""
    if kept.c is None or kept.cells is None or kept.c.dtype == kept.cells.dtype:
        return kept.c
    assert kept.rows is not None and part.c0 is not None
    return kept.rows.final([(kept.cells.flatten(0, 1), part.c0)], kept.cells.dtype)[0]


def result(kept: Kept, r: Run) -> Result:
    """What a run gives, of what a pass gives."""
    seen = Moments(*kept.moments) if passes.gives_moments(r) else None  # type: ignore[arg-type]
    return Result(kept.y, kept.h, kept.c, kept.cells if r.return_cells else None, seen)
