"""The loop over time on NVIDIA GPUs.

All steps run in one kernel launch if the weights fit on the chip, else step by step. The weights,
biases, h0, `gates`, `y` and the gradients of the gates have the dtype of the input. Sums, c, `gh`,
moments, dh and dc are float32. Rows stay in the caller's layout, so nothing here waits for the GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ...definition.storage import MOST_SLOTS
from ...draws import Draw
from .. import recording
from ..backend import Loop, LoopGrads, by_gate
from ..backend import by_unit as to_units
from ..run import Run
from ..sequence.products import FEW, register
from .kernels import (
    any_cell,
    batch,
    cell_steps,
    diagonal,
    persistent,
    persistent_cell,
    small,
    small_cell,
    steps,
    warpgroup,
)
from .pointwise import dropout, norms, rows
from .runtime import blas, compiler, side_streams
from .runtime.arguments import CELLS, TYPES
from .runtime.arguments import common_defines as common_defines
from .runtime.compiler import Ready
from .runtime.compiler import add_source as add_source
from .runtime.compiler import load as load
from .runtime.compiler import shared_by as shared_by
from .runtime.exclusive import turns as turns

register(gpu_product=blas.times, gpu_rows=blas.by_rows, gpu_split=rows.split_columns)

# The first path that supports a loop runs it. The hand-written kernels run the cells whose graph
# equals a built-in one; generated kernels run all others.
PATHS = (batch, small, warpgroup, persistent, steps)
GENERATED_PATHS = (diagonal, small_cell, persistent_cell, cell_steps)
ROWS = rows.Padded
IN_FLOAT32 = False  # half-precision operands enter the products unconverted
# Gate values computed at once if there is no backward pass: all, in one launch.
GATES_AT_ONCE = 2**62


def settings() -> tuple[Any, ...]:
    """Return the settings that a pass depends on besides its run."""
    at, capturing = torch.cuda.current_device(), torch.cuda.is_current_stream_capturing()
    return at, capturing, compiler.tf32(), compiler.sharers(), blas.batch_invariant()


def check(r: Run) -> None:
    """Raise if the kernels do not support the dtype or the cell of a run."""
    if r.h0.dtype not in TYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)
        raise ValueError(
            f"backend: 'cuda' takes {known}, got {r.h0.dtype}; backend='reference' takes every type"
        )
    if not _has_kernels(r):
        raise ValueError(f"backend: 'cuda' {_why_not(r)}; backend='reference' takes every cell")


def is_available(like: Tensor) -> bool:
    """Return True if the tensor's GPU is from NVIDIA and the kernels' libraries are installed.

    A build of torch for another maker's GPU also says "cuda"; `torch.version.cuda` is None there.
    """
    return torch.version.cuda is not None and (
        torch.compiler.is_compiling() or _complete(like.get_device())
    )


@cache
def _complete(device: int) -> bool:
    """Return True if all libraries are found and support the chip; else warn, once per device."""
    try:
        compiler.library(), compiler.compiler(), blas.library("Lt"), blas.library()
        compiler.architecture(torch.cuda.get_device_capability(device))
    except RuntimeError as error:
        warnings.warn(
            f"{error}; the layers run in a loop of torch calls instead, which is many times slower",
            stacklevel=2,
        )
        return False
    return True


def supports(r: Run) -> bool:
    """Return True if the kernels support a run: NVIDIA GPU, dtype and cell."""
    if r.h0.dtype not in TYPES or not is_available(r.h0):
        return False
    if not _has_kernels(r) and not torch.compiler.is_compiling():
        _warn_slow(_why_not(r))
    return _has_kernels(r)


def _has_kernels(r: Run) -> bool:
    if r.extra is not None and r.norm is not None:
        return False
    given = any(draw.given is not None for draw in r.draws)
    return (r.cell in CELLS and not given) or any_cell.supports(r)


def _why_not(r: Run) -> str:
    return (
        f"has no kernels for the cell {r.cell.name!r} with a norm, a projection, more than "
        f"{MOST_SLOTS} stored values per unit beside its gates, or as many products in its step "
        "(for a built-in cell: with a norm or a projection and masks that are given)"
    )


@cache
def _warn_slow(reason: str) -> None:
    warnings.warn(
        f"zoneout {reason}; it runs in a loop of torch calls, many times slower", stacklevel=2
    )


def has_kernel(x: Tensor) -> bool:
    """Return True if dropout of this tensor, or noise on it, runs as one kernel."""
    return (
        x.is_cuda
        and x.dtype in TYPES
        and is_available(x)
        and not torch._C._are_functorch_transforms_active()
    )


def draws_bits(examples: Tensor) -> bool:
    """Return True if the random bits of masks for these rows are drawn by one kernel."""
    transformed = torch._C._are_functorch_transforms_active()
    return examples.is_cuda and is_available(examples) and not transformed


def scratch(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return uninitialised workspace for one call."""
    return like.new_empty(shape, dtype=dtype)


def release(*buffers: Tensor | None) -> None:
    """Do nothing: torch's allocator caches GPU memory itself."""


def partial_sums() -> int:
    """Return the number of partial sums in a gradient of a norm's scale or shift."""
    return 1


def prepare(*tensors: Tensor | None) -> None:
    """Do nothing: GPU memory needs no first touch."""


def hidden_scale(draw: Draw, examples: Tensor, units: int, dtype: torch.dtype) -> Tensor:
    """Return [B, units], the factor of h before it enters the gates: one mask for all steps."""
    return dropout.dropout(
        examples.new_ones(1, len(examples), units, dtype=dtype), draw, examples, 0
    )[0]


def narrow_products(dtype: torch.dtype) -> bool:
    """Return False: no tensor was cast to float32, so the backward pass casts none back."""
    return False


def fuse_weight_grads(rows: int, gates: int, outputs: int, inputs: int) -> bool:
    """Return True if one product for dW_h and dW_x is faster, despite concatenating h and x.

    It saves a launch. A separate product with few inputs would also not use the tensor cores.
    """
    return rows * (outputs + inputs) <= 2**20 or inputs < FEW


def by_unit(r: Run) -> bool:
    """Return True if the gate layout is [unit][gate].

    This is so for the batch norm kernel, in which a block owns a few units of the whole batch.
    """
    return (
        r.norm is not None and r.norm.over == "examples" and r.norm.given is None and batch.fits(r)
    )


def multiplies_x(w_ih: Tensor) -> bool:
    """Return False: the loop never computes x·Wx, since one large product before it is faster."""
    return False


def side_by_side(runs: Sequence[Run]) -> bool:
    """Return True if the loops of these runs can run concurrently, each on a part of the chip."""
    if any(draw.given is not None for r in runs for draw in r.draws):
        return False
    if runs[0].cell not in CELLS:
        return all(
            diagonal.fits(r) or small_cell.fits(r, len(runs)) or persistent_cell.fits(r, len(runs))
            for r in runs
        )
    return all(
        by_unit(r) or small.fits(r, len(runs)) or persistent.fits(r, len(runs)) for r in runs
    )


def forward(loops: Sequence[Loop]) -> None:
    """Run the forward pass of loops: write gates, states and saved tensors into each loop."""
    jobs = []
    for loop in loops:
        if loop.lengths is not None:
            rows.clear(loop.lengths, loop.steps, *loop.states, loop.hats, *loop.slots)
            for inner in loop.inner:
                rows.clear(loop.lengths, loop.steps, inner)
        if loop.steps == 0 or loop.batch == 0:
            continue
        if loop.norm is not None:
            norms.forward(loop)
        jobs.append((loop, None))
    _run_all(jobs)


def backward(loops: Sequence[tuple[Loop, LoopGrads]]) -> None:
    """Run the backward pass of loops: write the gradients into each loop's `LoopGrads`."""
    jobs = []
    for loop, grads in loops:
        if loop.lengths is not None:
            outputs = (grads.dgx, grads.dgh, grads.dsh, grads.du, grads.u, grads.dnc, grads.chat)
            rows.clear(loop.lengths, loop.steps, *outputs)
            for pair in zip(grads.dinner, grads.ins):
                rows.clear(loop.lengths, loop.steps, *pair)
        if loop.steps > 0 and loop.batch > 0:
            jobs.append((loop, grads))
    _run_all(jobs)
    for loop, grads in jobs:
        if loop.norm is not None:
            norms.backward(loop, grads)


def _run_all(jobs: Sequence[tuple[Loop, LoopGrads | None]]) -> None:
    """Run loops: the first on the current stream, each other one on a side stream if it can."""
    if not jobs:
        return
    device = jobs[0][0].gates.get_device()
    on_other_device = device != torch.cuda.current_device()
    if on_other_device:
        recording.refuse("another GPU than the current one")
    with torch.cuda.device(device) if on_other_device else nullcontext():
        loops = [_ready(loop, grads, len(jobs)) for loop, grads in jobs]
        turn = turns(device).take if any(loop.fills_chip for loop in loops) else nullcontext
        with recording.within(turn):
            if len(loops) == 1:
                return loops[0].start(None)
            fork = partial(side_streams.fork, device, len(loops) - 1)
            with recording.within(fork) as streams:
                for loop, side_stream in zip(loops, (None, *streams)):
                    loop.start(side_stream)


def _ready(loop: Loop, grads: LoopGrads | None, concurrent: int) -> Ready:
    """Prepare a loop with the first path that supports it; `concurrent` loops run at once."""
    paths = PATHS if loop.cell in CELLS else GENERATED_PATHS
    for path in (cell_steps,) if loop.masks else paths:
        if (path is batch) == loop.by_unit:
            prepared = path.ready(loop, grads, concurrent)
            if prepared is not None:
                return prepared
    if loop.by_unit:
        return Ready(lambda side_stream: _run_by_gate(loop, grads))
    raise RuntimeError("backend: no kernel of 'cuda' supports this loop")


def _run_by_gate(loop: Loop, grads: LoopGrads | None) -> None:
    """Run a loop of layout [unit][gate] on copies in layout [gate][unit].

    All kernels but the batch norm kernel need the second layout. The results are copied back.
    """
    assert loop.norm is not None and loop.norm.scale_h is not None

    def reordered(of: Loop | LoopGrads, names: Sequence[str], dim: int) -> dict[str, Any]:
        values = {name: getattr(of, name) for name in names}
        return {
            name: v if v is None else by_gate(v, loop.cell.gates, dim) for name, v in values.items()
        }

    stored = reordered(loop, ("gates", "hats", "mean_h", "var_h"), 1)
    weights = reordered(loop, ("w_hh", "b_h"), 0)
    norm = loop.norm._replace(scale_h=by_gate(loop.norm.scale_h, loop.cell.gates))
    copy = replace(loop, by_unit=False, norm=norm, **stored, **weights)
    outputs: tuple[Loop | LoopGrads, dict[str, Any]] = (loop, stored)
    if grads is None:
        _run_all([(copy, None)])
    else:
        if loop.c is not None:
            grads.dnc, grads.chat = torch.zeros_like(loop.c), torch.zeros_like(loop.c)
        computed = reordered(grads, ("dgx", "dgh"), 1)
        computed["dsh"] = (
            computed["dgx"] if grads.dsh is grads.dgx else by_gate(grads.dsh, loop.cell.gates, 1)
        )
        _run_all([(copy, replace(grads, **computed))])
        outputs = (grads, computed)
    for name, value in outputs[1].items():
        if value is not None:
            getattr(outputs[0], name).copy_(to_units(value, loop.cell.gates, 1))
