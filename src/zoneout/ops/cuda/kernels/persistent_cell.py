"""Any cell with a matrix for h: all steps in one launch, with W_h on the chip.

The plans are those of `persistent`.
"""

from __future__ import annotations

from ...backend import Loop, LoopGrads
from ...run import Run
from ..runtime.compiler import Ready
from . import persistent
from .any_cell import AnyCellArguments, noise_defines, step_text, with_dense_weight


def fits(r: Run, concurrent: int) -> bool:
    """Return True if both passes of a run fit with `concurrent` at once, and that is faster."""
    return r.cell.has_r and not r.cell.products and persistent.fits(r, concurrent)


def ready(loop: Loop, grads: LoopGrads | None, concurrent: int) -> Ready | None:
    """Prepare a loop as one launch, with `concurrent` at once; None if it does not fit."""
    if (
        not loop.cell.has_r
        or loop.cell.products
        or persistent.plan_for(loop, grads is not None, concurrent) is None
    ):
        return None
    loop = with_dense_weight(loop)
    streams, step = noise_defines(loop), step_text(loop)
    return persistent.ready_with(
        loop, grads, concurrent, lambda: AnyCellArguments(loop, grads), streams, step
    )
