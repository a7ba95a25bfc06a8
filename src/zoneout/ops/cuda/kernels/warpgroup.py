"""The forward pass of an LSTM with many rows in one launch.

W_h is spread over the chip, and warpgroups compute the products.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from .... import cells
from ...backend import Loop, LoopGrads
from ...memory import is_aligned
from ..pointwise import rows
from ..runtime.arguments import (
    Arguments,
    Exchange,
    common_defines,
    loop_arguments,
    mode_defines,
    modes_of,
)
from ..runtime.compiler import Kernel, Ready, chip, load
from .persistent import plan_for as persistent_plan

UNITS_PER_BLOCK = 16  # units per block
ROWS = 64  # rows of a slab
K_STEP_BYTES = 32 * ROWS  # bytes of a k-step
THREADS = 384
MOST_SLABS = 2  # per block
K_STEPS_PER_CHUNK = 8  # k-steps that are loaded together
MOST_RESIDENT = 32  # k-steps of a warpgroup whose weights fit in its registers


@dataclass(frozen=True)
class Plan:
    """The tiles of a launch: see warpgroup.cu."""

    k_steps: int  # also the number of blocks that share the units
    groups: int  # groups of blocks that share the rows
    slabs: int  # slabs of 64 rows that a block processes one after another
    stages: int  # chunks in flight to shared memory
    resident: int  # k-steps of a warpgroup with their weights in registers
    shared: int  # shared memory of a block, bytes
    size: int  # exchange buffer of a group, bytes


@lru_cache(1024)
def plan(hidden: int, batch: int, processors: int, shared: int) -> Plan | None:
    """Return the tiles for a shape and device, or None if the weights do not fit."""
    k_steps = -(-hidden // UNITS_PER_BLOCK)
    if k_steps > processors or hidden % 8:  # the kernel reads and writes eight units at a time
        return None
    groups = min(processors // k_steps, -(-batch // ROWS))
    slabs = -(-batch // (ROWS * groups))
    groups = -(-batch // (ROWS * slabs))
    if slabs > MOST_SLABS:
        return None
    chunks = -(-k_steps // K_STEPS_PER_CHUNK)
    k_steps_per_warpgroup = chunks * K_STEPS_PER_CHUNK // 2
    resident = min(
        MOST_RESIDENT // (K_STEPS_PER_CHUNK // 2) * (K_STEPS_PER_CHUNK // 2), k_steps_per_warpgroup
    )
    other_shared = 2 * (k_steps_per_warpgroup - resident) * K_STEP_BYTES  # weights
    other_shared += 2 * 4 * 128 * 16  # sums
    other_shared += slabs * ROWS * (4 * 32 + 4) + K_STEP_BYTES  # gates, examples, h
    stages = min((shared - other_shared) // (K_STEPS_PER_CHUNK * K_STEP_BYTES + 16), 2 * chunks)
    if stages < 2:
        return None
    size = (
        2 * slabs * chunks * K_STEPS_PER_CHUNK * K_STEP_BYTES + -(-slabs * k_steps * 4 // 128) * 128
    )
    return Plan(
        k_steps,
        groups,
        slabs,
        stages,
        resident,
        other_shared + stages * (K_STEPS_PER_CHUNK * K_STEP_BYTES + 16),
        size,
    )


def plan_for(loop: Loop) -> Plan | None:
    """Return the plan of a loop, or None if this kernel does not support it."""
    if loop.cell != cells.lstm or loop.norm is not None or loop.w_hr is not None:
        return None
    gpu = chip(loop.gates.get_device())
    if loop.gates.dtype == torch.float32 or gpu.major != 9:
        return None
    persistent = persistent_plan(loop, backward=False)
    # With few rows per block the persistent kernel is faster, as measured on an H200.
    if persistent is not None and persistent.tiles < 4:
        return None
    return plan(loop.hidden, loop.batch, gpu.processors, gpu.shared)


def ready(loop: Loop, grads: LoopGrads | None, concurrent: int) -> Ready | None:
    """Prepare a loop as one launch, or return None.

    None: the loop does not fit, is a backward pass, uses options that this kernel lacks, or must
    share the chip with concurrent loops.
    """
    unsupported = (
        grads is not None
        or loop.reverse
        or loop.resets is not None
        or loop.scale_h is not None
        or concurrent > 1
    )
    tiles, modes = (None, None) if unsupported else (plan_for(loop), modes_of(loop.draws))
    if tiles is None or modes is None:
        return None
    arguments, exchange = loop_arguments(loop, None), Arguments(Exchange)
    dtypes = (loop.gates.dtype, torch.float32)
    if not all(is_aligned(value, 16) for value in arguments.alive if value.dtype in dtypes):
        return None
    kernel = _kernel(loop.gates.get_device(), loop.gates.dtype, tiles, modes)
    if kernel is None:
        return None
    exchange.put(
        "buffer",
        torch.zeros(tiles.groups * tiles.size, dtype=torch.uint8, device=loop.gates.device),
    )
    exchange.struct.size, exchange.struct.blocks = tiles.size, tiles.k_steps
    blocks, shared = tiles.groups * tiles.k_steps, tiles.shared

    def start(side_stream: None) -> None:
        kernel.launch(
            blocks, THREADS, (arguments.struct, exchange.struct), shared, cooperative=True
        )
        # The kernel has no register left for lengths: it runs all rows to the last step.
        if loop.lengths is not None:
            rows.clear(loop.lengths, loop.steps, loop.y, loop.c)

    return Ready(start, fills_chip=True)


def defines_of(
    dtype: torch.dtype, tiles: Plan, modes: tuple[int, int]
) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernel is compiled with."""
    return (
        *common_defines(cells.lstm, dtype),
        ("FEATURES", 0),
        ("K_STEPS", tiles.k_steps),
        ("SLABS", tiles.slabs),
        ("K_STEPS_PER_CHUNK", K_STEPS_PER_CHUNK),
        ("STAGES", tiles.stages),
        ("RESIDENT_K_STEPS", tiles.resident),
        *mode_defines(modes),
    )


@lru_cache(1024)
def _kernel(device: int, dtype: torch.dtype, tiles: Plan, modes: tuple[int, int]) -> Kernel | None:
    """Return the compiled kernel, or None if its blocks do not all fit on the device at once."""
    (kernel,) = load(device, "warpgroup.cu", ("forward",), defines_of(dtype, tiles, modes))
    with torch.cuda.device(device):
        kernel.allow_shared(tiles.shared)
        return kernel if kernel.fits(tiles.groups * tiles.k_steps, THREADS, tiles.shared) else None
