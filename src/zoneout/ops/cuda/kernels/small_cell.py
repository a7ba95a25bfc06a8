"""Any cell with matrices, for small hidden sizes: every block has all of them.

The plans are those of `small`. Besides W_h these are the matrices of products inside the step. A
product of several matrices is one with their product.
"""

from __future__ import annotations

from torch import Tensor

from ...backend import Loop, LoopGrads
from ...run import Run
from ..runtime.compiler import Ready
from . import small
from .any_cell import AnyCellArguments, noise_defines, step_text, with_dense_weight


def fits(r: Run, concurrent: int) -> bool:
    """Return True if this kernel supports both passes of a run, with `concurrent` loops at once."""
    return bool(r.cell.has_r or r.cell.products) and small.fits(r, concurrent)


def ready(loop: Loop, grads: LoopGrads | None, concurrent: int) -> Ready | None:
    """Prepare a loop as one launch, with `concurrent` at once; None if it does not fit."""
    has_matrices = loop.cell.has_r or loop.cell.products
    if not has_matrices or small.plan_for(loop, grads is not None, concurrent) is None:
        return None
    loop = with_dense_weight(loop)
    streams, step = noise_defines(loop), step_text(loop)
    return small.ready_with(loop, grads, concurrent, lambda: _arguments(loop, grads), streams, step)


def _arguments(loop: Loop, grads: LoopGrads | None) -> AnyCellArguments:
    """Return the second argument of the kernel, with the products inside the step."""
    arguments = AnyCellArguments(loop, grads)
    for k, matrix in enumerate(_matrices(loop)):
        arguments.put(f"matrix{k}", matrix, loop.gates.dtype)
        arguments.put(f"inner{k}", loop.inner[k])
        if grads is not None:
            arguments.put(f"dinner{k}", grads.dinner[k])
            arguments.put(f"ins{k}", grads.ins[k])
    return arguments


def _matrices(loop: Loop) -> list[Tensor]:
    """Return the matrix [parts · H, H] of each product."""
    by_name = dict(zip(loop.cell.matrices, loop.matrices))
    found: list[Tensor] = []
    for product in loop.cell.products:
        first, *others = (by_name[name] for name in product.matrices)
        for other in others:
            first = other @ first
        found.append(first.contiguous())
    return found
