"""A pass whose derivatives nobody will want, in pieces: what a way back would need is never there whole."""

from __future__ import annotations

from dataclasses import replace

from ..norm import Moments
from . import passes
from .interface import Result, Run, Weights
from .passes import wide

LEAST = 8  # steps of a piece, for which making ready what they share is little


def run(r: Run) -> Result:
    """Run over time; a piece has as many steps as the device wants to have the gates of at once."""
    steps = max(LEAST, passes.LOOPS[r.x.device.type].PIECE // max(1, r.batch * r.weights.w_hh.shape[0]))
    if r.steps <= steps or not _comes_apart(r):
        return _whole(r)
    y = r.h0.new_empty(r.steps, *r.h0.shape)
    cells = r.c0.new_empty(r.steps, *r.c0.shape) if r.return_cells and r.c0 is not None else None
    # Between pieces, too, the state keeps its precision.
    states = {name: wide(getattr(r, name)) for name in ("h0", "c0", "reset_h", "reset_c")}
    w = Weights(*map(wide, r.weights))  # type: ignore[arg-type]
    if not r.x.is_floating_point():
        w = w._replace(w_ih=w.w_ih.t().contiguous().t())  # the table of rows by number, made once
    r = replace(r, weights=w, **states)  # type: ignore[arg-type]
    h, c = r.h0, r.c0
    begins = range(0, r.steps, steps)
    for begin in reversed(begins) if r.reverse else begins:
        own = slice(begin, begin + begins.step)
        x = r.x[own]
        part = replace(
            r, x=x.to(h.dtype) if x.is_floating_point() else x, h0=h, c0=c, first_step=r.first_step + begin,
            lengths=None if r.lengths is None else (r.lengths - begin).clamp(0, len(x)),
            resets=None if r.resets is None else r.resets[own],
        )  # fmt: skip
        y[own], h, c, its_cells, _ = _whole(part)
        if cells is not None and its_cells is not None:
            cells[own] = its_cells
    return Result(y, h.to(y.dtype), None if c is None else c.to(y.dtype), cells, None)


def _comes_apart(r: Run) -> bool:
    """Whether a step sees nothing of the others but the state.

    A batch norm has moments of every step, packed rows lie one behind the other, and backwards a reset belongs to the
    step above.
    """
    by_units = r.norm is None or r.norm.over == "units"
    return by_units and r.counts is None and not (r.reverse and r.resets is not None)


def _whole(r: Run) -> Result:
    kept = passes.forward(r)
    seen = Moments(*kept.moments) if passes.gives_moments(r) else None  # type: ignore[arg-type]
    return Result(kept.y, kept.h, kept.c, passes.as_outputs(kept.cells, kept.y) if r.return_cells else None, seen)
