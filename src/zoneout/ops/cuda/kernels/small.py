"""All steps in one launch for small hidden sizes.

A block holds all of W_h, and the batch is split over blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ....definition import Definition
from ...backend import Loop, LoopGrads
from ...run import Run
from ..runtime.arguments import (
    CELLS,
    TYPES,
    Arguments,
    Defines,
    has,
    known,
    loop_arguments,
    modes_of,
    norm_arguments,
)
from ..runtime.compiler import Kernel, Ready, chip, load, processors, tf32
from .persistent import exchanged

# Registers per lane in one of the four partitions of a multiprocessor.
REGISTERS = 16384 // 32
# Registers of a thread that hold no weights: with one row, more for a norm, more per extra row.
OWN, OWN_NORM, OWN_ROW = 76, 32, 20
# Maximum bytes of weights in shared memory. With more, reading them at each step takes longer than
# an exchange between blocks.
MOST_SHARED = 160 * 1024
MOST_NUMBERS = 2**31  # elements of the gates: offsets are 32 bits wide
COSTS = {1: 1.0, 2: 1.7}  # relative time of a step, by the rows of a thread


@dataclass(frozen=True)
class Plan:
    """The tiles of a launch: see small.cu."""

    hidden: int
    blocks: int
    warps: int
    k_steps: int  # per warp
    resident: int  # k-steps with their weights in registers
    rows: int  # per thread; a block has twice as many
    norm: int  # 0 none, 1 over the units, 2 over the examples with given moments
    shared: int  # shared memory of a block for weights and a norm's sums, bytes


def beyond_lstm(cell: Definition) -> int:
    """Return the registers that a row of a cell needs beyond those of an LSTM."""
    gates, states = max(0, cell.gates - 4), max(0, len(cell.states) - 2)
    return 4 * gates + 8 * states + 4 * len(cell.storage.slots) * (cell not in CELLS)


@lru_cache(1024)
def plan(
    cell: Definition,
    size: int,
    hidden: int,
    batch: int,
    back: bool,
    processors: int,
    most: int,
    norm: int = 0,
) -> Plan | None:
    """Return the tiles for a shape and device, or None if the loop does not fit.

    `size` is the size of an element and `most` that of shared memory, in bytes.
    """
    gates, each = cell.gates, 32 // size
    warps, tiles = -(-hidden // 16), 1 if back else gates
    depth = hidden * (exchanged(cell) if back else 1)
    k_steps = -(-depth // each)
    rows = min(COSTS, key=lambda rows: -(-batch // (2 * rows * processors)) * COSTS[rows])
    registers = (
        min(REGISTERS // -(-warps // 4) // 8 * 8, 255)
        - OWN
        - OWN_ROW * (rows - 1)
        - OWN_NORM * (norm > 0)
        - rows * beyond_lstm(cell)
    )
    resident = min(k_steps, max(0, registers) // (4 * tiles))
    shared = (k_steps - resident) * tiles * warps * 512
    if warps > 16 or resident == 0 or shared > MOST_SHARED:
        return None
    if norm == 1:
        shared += 2 * (2 * rows) * warps * 8
    entering = 2 * (2 * rows) * (8 * k_steps + 32) * 4
    if shared + entering + max(256, 64 * (len(cell.states) + 2)) * warps > most:
        return None
    return Plan(hidden, -(-batch // (2 * rows)), warps, k_steps, resident, rows, norm, shared)


def plan_for(of: Loop | Run, back: bool, loops: int) -> Plan | None:
    """Return the plan of a loop or of a run's loop, or None if this kernel does not support it.

    `loops` is the number of loops that run concurrently.
    """
    w_hh, norm = of.recurrent_weight, of.norm
    if of.w_hr is not None or (norm is not None and norm.over == "examples" and norm.given is None):
        return None
    if w_hh.dtype == torch.float32 and not tf32():
        return None
    device = w_hh.get_device()
    on = chip(device)
    if on.major < 8 or of.steps * of.batch * of.width >= MOST_NUMBERS:
        return None
    kind = 0 if norm is None else 1 if norm.over == "units" else 2
    share = max(1, processors(device) // loops)
    return plan(of.cell, w_hh.element_size(), of.hidden, of.batch, back, share, on.shared, kind)


def fits(r: Run, loops: int) -> bool:
    """Return True if this kernel supports both passes of a run, with `loops` concurrent loops."""
    return all(plan_for(r, back, loops) is not None for back in (False, True))


def ready(loop: Loop, back: LoopGrads | None, loops: int) -> Ready | None:
    """Prepare a loop as one launch, with `loops` running concurrently; None if it does not fit."""
    streams = known(modes_of(loop.draws))
    return ready_with(loop, back, loops, lambda: norm_arguments(loop, back), streams)


def ready_with(
    loop: Loop,
    back: LoopGrads | None,
    loops: int,
    own: Callable[[], Arguments],
    streams: Defines,
    step: str = "",
) -> Ready | None:
    """As `ready`, with the second argument of the kernel.

    `streams`: macros that say what is known of the noise. `step`: the step of any cell.
    """
    tiles = plan_for(loop, back is not None, loops)
    if tiles is None:
        return None
    beyond = has(loop, back)
    kernel = _kernel(
        loop.gates.get_device(),
        loop.cell,
        loop.gates.dtype,
        back is not None,
        tiles,
        beyond,
        streams,
        step,
    )
    arguments, more = loop_arguments(loop, back), own()

    def start(lane: Any) -> None:
        structs = (arguments.struct, more.struct)
        kernel.launch(tiles.blocks, 32 * tiles.warps, structs, tiles.shared, stream=lane)

    return Ready(start)


def defines_of(
    cell: Definition,
    dtype: torch.dtype,
    back: bool,
    tiles: Plan,
    beyond: int,
    streams: Defines = (),
) -> Defines:
    """Return the macros that the kernel is compiled with."""
    return (
        ("CELL", CELLS.index(cell) if cell in CELLS else 0), ("TYPE", TYPES[dtype]), ("FAST", 1),
        ("BACK", int(back)), ("QUICK", 1), ("HIDDEN", tiles.hidden), ("WARPS", tiles.warps),
        ("KS", tiles.k_steps), ("KR", tiles.resident), ("NC", tiles.rows), ("NORM", tiles.norm),
        ("HAS", beyond), *streams,
    )  # fmt: skip


@lru_cache(1024)
def _kernel(
    device: int,
    cell: Definition,
    dtype: torch.dtype,
    back: bool,
    tiles: Plan,
    beyond: int,
    streams: Defines = (),
    step: str = "",
) -> Kernel:
    defines = defines_of(cell, dtype, back, tiles, beyond, streams)
    source, names = "small_cell.cu" if step else "small.cu", ("backward" if back else "forward",)
    (kernel,) = load(device, source, names, defines, step)
    with torch.cuda.device(device):
        kernel.allow_shared(tiles.shared)
    return kernel
