"""Any cell with a dense matrix for h: all steps in one launch, with W_h on the chip.

The plans are those of `persistent`.
"""

from __future__ import annotations

from ...backend import Loop, LoopGrads
from ...run import Run
from ..runtime.compiler import Ready
from . import persistent
from .own_cell import OwnArguments, step_text


def fits(r: Run, loops: int) -> bool:
    """Return True if both passes of a run fit with `loops` concurrent loops, and that is faster."""
    return r.cell.recurrence == "dense" and persistent.fits(r, loops)


def ready(loop: Loop, back: LoopGrads | None, loops: int) -> Ready | None:
    """Prepare a loop as one launch, with `loops` running concurrently; None if it does not fit."""
    if loop.cell.recurrence != "dense":
        return None
    return persistent.ready_with(
        loop, back, loops, lambda: OwnArguments(loop, back), step_text(loop)
    )
