"""Any cell with a dense matrix for h, for small hidden sizes: every block has all of W_h.

The plans are those of `small`.
"""

from __future__ import annotations

from ...backend import Loop, LoopGrads
from ...run import Run
from ..runtime.compiler import Ready
from . import small
from .own_cell import OwnArguments, step_text


def fits(r: Run, loops: int) -> bool:
    """Return True if this kernel supports both passes of a run, with `loops` concurrent loops."""
    return r.cell.recurrence == "dense" and small.fits(r, loops)


def ready(loop: Loop, back: LoopGrads | None, loops: int) -> Ready | None:
    """Prepare a loop as one launch, with `loops` running concurrently; None if it does not fit."""
    if loop.cell.recurrence != "dense":
        return None
    return small.ready_with(loop, back, loops, lambda: OwnArguments(loop, back), step_text(loop))
