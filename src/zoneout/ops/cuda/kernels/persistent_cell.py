"""Any cell with a matrix for h: all steps in one launch, with W_h on the chip.

The plans are those of `persistent`.
"""

from __future__ import annotations

from ...backend import Loop, LoopGrads
from ...run import Run
from ..runtime.compiler import Ready
from . import persistent
from .own_cell import OwnArguments, known_streams, step_text, with_dense_weight


def fits(r: Run, loops: int) -> bool:
    """Return True if both passes of a run fit with `loops` concurrent loops, and that is faster."""
    return r.cell.has_r and not r.cell.products and persistent.fits(r, loops)


def ready(loop: Loop, back: LoopGrads | None, loops: int) -> Ready | None:
    """Prepare a loop as one launch, with `loops` running concurrently; None if it does not fit."""
    if (
        not loop.cell.has_r
        or loop.cell.products
        or persistent.plan_for(loop, back is not None, loops) is None
    ):
        return None
    loop = with_dense_weight(loop)
    streams, step = known_streams(loop), step_text(loop)
    return persistent.ready_with(loop, back, loops, lambda: OwnArguments(loop, back), streams, step)
