"""Any cell with a matrix for h, for small hidden sizes: every block has all of W_h.

The plans are those of `small`.
"""

from __future__ import annotations

from ...backend import Loop, LoopGrads
from ...run import Run
from ..runtime.compiler import Ready
from . import small
from .any_cell import AnyCellArguments, noise_defines, step_text, with_dense_weight


def fits(r: Run, concurrent: int) -> bool:
    """Return True if this kernel supports both passes of a run, with `concurrent` loops at once."""
    return r.cell.has_r and not r.cell.products and small.fits(r, concurrent)


def ready(loop: Loop, grads: LoopGrads | None, concurrent: int) -> Ready | None:
    """Prepare a loop as one launch, with `concurrent` at once; None if it does not fit."""
    if (
        not loop.cell.has_r
        or loop.cell.products
        or small.plan_for(loop, grads is not None, concurrent) is None
    ):
        return None
    loop = with_dense_weight(loop)
    streams, step = noise_defines(loop), step_text(loop)
    return small.ready_with(
        loop, grads, concurrent, lambda: AnyCellArguments(loop, grads), streams, step
    )
