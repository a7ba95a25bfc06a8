"""The loop over time on NVIDIA GPUs: all steps in one launch where the weights fit on the chip, else step by step.

The weights, biases, h0, `gates`, `y` and the derivatives of the gates are in the input's type; sums, c, `gh`, moments,
dh and dc are in float32. Rows lie as the caller has them, so that nothing here waits for the GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...draws import Draw
from ..interface import Run
from ..loop import Backward, Loop, by_gate
from ..loop import by_unit as to_units
from ..products import FEW
from . import batch, blas, compiler, dropout, lanes, norms, persistent, rows, small, steps, wide
from .arguments import TYPES
from .compiler import Ready
from .turns import turns

PATHS = (batch, small, wide, persistent, steps)  # the first that can take a loop runs it
ROWS = rows.Padded
WIDE = False  # half types enter the products as they are
PIECE = 2**62  # numbers of gates at once where nobody will go back: all, in one launch


def check(r: Run) -> None:
    """An error where the kernels cannot take a run."""
    if r.h0.dtype not in TYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)
        raise ValueError(f"backend: 'cuda' takes {known}, got {r.h0.dtype}; backend='reference' takes every type")


def there(like: Tensor) -> bool:
    """Whether that is on NVIDIA's, and not another maker's under its name, with the libraries that the kernels need."""
    return torch.version.cuda is not None and (torch.compiler.is_compiling() or _complete(like.get_device()))


@cache
def _complete(device: int) -> bool:
    """Whether the libraries are there, and know the chip; where one is not or does not, it is said once."""
    try:
        compiler.library(), compiler.compiler(), blas.library("Lt"), blas.library()
        compiler.architecture(torch.cuda.get_device_capability(device))
    except RuntimeError as error:
        warnings.warn(
            f"{error}; the layers run in a loop of torch calls instead, which is many times slower", stacklevel=2
        )
        return False
    return True


def takes(r: Run) -> bool:
    """Whether the kernels can take a run: an NVIDIA GPU and a type they know."""
    return r.h0.dtype in TYPES and there(r.h0)


def has_kernel(x: Tensor) -> bool:
    """Whether dropout of this tensor, or noise on it, is one kernel."""
    return x.is_cuda and x.dtype in TYPES and there(x) and not torch._C._are_functorch_transforms_active()


def scratch(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Unwritten memory for the length of one call."""
    return like.new_empty(shape, dtype=dtype)


def give_back(*buffers: Tensor | None) -> None:
    """Nothing to do: torch keeps a GPU's memory itself."""


def PARTS() -> int:
    """How many parts the sums of a norm's derivatives come in."""
    return 1


def prepare(*tensors: Tensor | None) -> None:
    """Nothing to do: a GPU's memory needs no first touch."""


def scale_of(draw: Draw, examples: Tensor, units: int, dtype: torch.dtype) -> Tensor:
    """[B, units]: what h is multiplied with before it enters the gates, one mask for all steps."""
    return dropout.dropout(examples.new_ones(1, len(examples), units, dtype=dtype), draw, examples, 0)[0]


def narrow_products(dtype: torch.dtype) -> bool:
    """Whether products that were taken in float32 go on in a half type: here they never were."""
    return False


def joins(rows: int, gates: int, outputs: int, inputs: int) -> bool:
    """Whether one product for dW_h and dW_x gains more than laying h and x side by side costs.

    One launch less; and that of few inputs alone would not be taken by the matrix units.
    """
    return rows * (outputs + inputs) <= 2**20 or inputs < FEW


def by_unit(r: Run) -> bool:
    """Whether the gates lie unit by unit: where a block has few units of the whole batch."""
    return r.norm is not None and r.norm.over == "examples" and r.norm.given is None and batch.fits(r)


def takes_x(w_ih: Tensor) -> bool:
    """Whether the loop takes x·Wx itself: never, one large product before it is faster."""
    return False


def together(runs: Sequence[Run]) -> bool:
    """Whether the loops of these runs go side by side: where each leaves the others room on the chip."""
    return all(by_unit(r) or small.fits(r, len(runs)) or persistent.fits(r, len(runs)) for r in runs)


def forward(loops: Sequence[Loop]) -> None:
    """Run loops forwards: gates, states and what the way back needs are written into each."""
    due = []
    for loop in loops:
        if loop.lengths is not None:
            rows.clear(loop.lengths, loop.steps, loop.y, loop.c, loop.gh)
        if loop.steps == 0 or loop.batch == 0:
            continue
        if loop.norm is not None:
            norms.forward(loop)
        due.append((loop, None))
    _run_all(due)


def backward(loops: Sequence[tuple[Loop, Backward]]) -> None:
    """Run loops backwards: the derivatives are written into each one's `Backward`."""
    due = []
    for loop, back in loops:
        if loop.lengths is not None:
            written = (back.dgx, back.dgh, back.dsh, back.du, back.u, back.dnc, back.chat)
            rows.clear(loop.lengths, loop.steps, *written)
        if loop.steps > 0 and loop.batch > 0:
            due.append((loop, back))
    _run_all(due)
    for loop, back in due:
        if loop.norm is not None:
            norms.backward(loop, back)


def _run_all(due: Sequence[tuple[Loop, Backward | None]]) -> None:
    """Run loops: the first in the current stream, each other in a lane beside it, if it can be there."""
    if not due:
        return
    device = due[0][0].gates.get_device()
    elsewhere = device != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        loops = [_ready(loop, back, len(due)) for loop, back in due]
        with turns(device).take() if any(loop.fills for loop in loops) else nullcontext():
            if len(loops) == 1:
                return loops[0].start(None)
            with lanes.beside(device, len(loops) - 1) as others:
                for loop, lane in zip(loops, (None, *others)):
                    loop.start(lane)


def _ready(loop: Loop, back: Backward | None, loops: int) -> Ready:
    """A loop by the first path that can take it, with so many side by side."""
    for path in PATHS:
        if (path is batch) == loop.by_unit and (found := path.ready(loop, back, loops)) is not None:
            return found
    if loop.by_unit:
        return Ready(lambda lane: _run_by_gate(loop, back))
    raise RuntimeError("backend: no kernel of 'cuda' takes this loop")


def _run_by_gate(loop: Loop, back: Backward | None) -> None:
    """Run a loop whose gates lie unit by unit with copies that all other kernels can take."""
    assert loop.norm is not None and loop.norm.scale_h is not None

    def turned(of: Loop | Backward, names: Sequence[str], dim: int) -> dict[str, Any]:
        given = {name: getattr(of, name) for name in names}
        return {name: v if v is None else by_gate(v, loop.cell, dim) for name, v in given.items()}

    here = turned(loop, ("gates", "gh", "mean_h", "var_h"), 1)
    weights = turned(loop, ("w_hh", "b_h"), 0)
    norm = loop.norm._replace(scale_h=by_gate(loop.norm.scale_h, loop.cell))
    other = replace(loop, by_unit=False, norm=norm, **here, **weights)
    written: tuple[Loop | Backward, dict[str, Any]] = (loop, here)
    if back is None:
        _run_all([(other, None)])
    else:
        if loop.c is not None:
            back.dnc, back.chat = torch.zeros_like(loop.c), torch.zeros_like(loop.c)
        there = turned(back, ("dgx", "dgh"), 1)
        there["dsh"] = there["dgx"] if back.dsh is back.dgx else by_gate(back.dsh, loop.cell, 1)
        _run_all([(other, replace(back, **there))])
        written = (back, there)
    for name, value in written[1].items():
        if value is not None:
            getattr(written[0], name).copy_(to_units(value, loop.cell, 1))
