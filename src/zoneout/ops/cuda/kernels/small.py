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
    Arguments,
    Defines,
    common_defines,
    features_of,
    loop_arguments,
    mode_defines,
    modes_of,
    norm_arguments,
)
from ..runtime.compiler import Kernel, Ready, chip, load, processors, tf32
from .persistent import values_per_unit

# Registers per lane in one of the four partitions of a multiprocessor.
REGISTERS = 16384 // 32
# Registers of a thread that hold no weights: for one row, in addition for a norm, and for each
# further row.
OTHER_REGISTERS, NORM_REGISTERS, ROW_REGISTERS = 76, 32, 20
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


def registers_beyond_lstm(cell: Definition) -> int:
    """Return the registers that a row of a cell needs beyond those of an LSTM."""
    gates, states = max(0, cell.gates - 4), max(0, len(cell.states) - 2)
    slots = len(cell.storage.slots) * (cell not in CELLS)
    return 4 * (gates + slots + parts_of(cell)) + 8 * states


def parts_of(cell: Definition) -> int:
    """Return the number of matrices [H, H] of the products inside a step."""
    return sum(product.parts for product in cell.products)


def pitch(k_steps: int) -> int:
    """Return the words of a row in shared memory: adjacent rows use different banks."""
    return (k_steps * 8 + 15) // 32 * 32 + 16


@lru_cache(1024)
def plan(
    cell: Definition,
    size: int,
    hidden: int,
    batch: int,
    backward: bool,
    processors: int,
    most_shared: int,
    norm: int = 0,
) -> Plan | None:
    """Return the tiles for a shape and device, or None if the loop does not fit.

    `size` is the size of an element, `most_shared` that of shared memory, in bytes.
    """
    gates, values_per_k_step = cell.gates, 32 // size
    warps, tiles = -(-hidden // 16), 1 if backward else gates
    depth = hidden * (values_per_unit(cell) if backward else 1)
    k_steps = -(-depth // values_per_k_step) if cell.has_r else 1
    rows = min(COSTS, key=lambda rows: -(-batch // (2 * rows * processors)) * COSTS[rows])
    registers = (
        min(REGISTERS // -(-warps // 4) // 8 * 8, 255)
        - OTHER_REGISTERS
        - ROW_REGISTERS * (rows - 1)
        - NORM_REGISTERS * (norm > 0)
        - rows * registers_beyond_lstm(cell)
    )
    resident = min(k_steps, max(0, registers) // (4 * tiles))
    shared = (k_steps - resident) * tiles * warps * 512
    if warps > 16 or resident == 0 or shared > MOST_SHARED:
        return None
    if norm == 1:
        shared += 2 * (2 * rows) * warps * 8
    if cell.products:  # their matrices, and the values that they read
        steps_of_units = -(-hidden // values_per_k_step)
        operands = parts_of(cell) if backward else len(cell.products)
        shared += parts_of(cell) * steps_of_units * warps * 512
        shared += operands * 2 * rows * pitch(steps_of_units) * 4
    entering = 2 * (2 * rows) * (8 * k_steps + 32) * 4
    if shared + entering + max(256, 64 * (len(cell.states) + 2)) * warps > most_shared:
        return None
    return Plan(hidden, -(-batch // (2 * rows)), warps, k_steps, resident, rows, norm, shared)


def plan_for(loop: Loop | Run, backward: bool, concurrent: int) -> Plan | None:
    """Return the plan of a loop or of a run's loop, or None if this kernel does not support it.

    `concurrent` is the number of loops that run at once.
    """
    dtype, norm = loop.h0.dtype, loop.norm
    if loop.w_hr is not None or (
        norm is not None and norm.over == "examples" and norm.given is None
    ):
        return None
    if dtype == torch.float32 and not tf32():
        return None
    device = loop.h0.get_device()
    gpu = chip(device)
    if gpu.major < 8 or loop.steps * loop.batch * loop.width >= MOST_NUMBERS:
        return None
    norm_kind = 0 if norm is None else 1 if norm.over == "units" else 2
    processors_per_loop = max(1, processors(device) // concurrent)
    return plan(
        loop.cell,
        dtype.itemsize,
        loop.hidden,
        loop.batch,
        backward,
        processors_per_loop,
        gpu.shared,
        norm_kind,
    )


def fits(r: Run, concurrent: int) -> bool:
    """Return True if this kernel supports both passes of a run, with `concurrent` loops at once."""
    return all(plan_for(r, back, concurrent) is not None for back in (False, True))


def ready(loop: Loop, grads: LoopGrads | None, concurrent: int) -> Ready | None:
    """Prepare a loop as one launch, with `concurrent` at once; None if it does not fit."""
    noise_defines = mode_defines(modes_of(loop.draws))
    return ready_with(loop, grads, concurrent, lambda: norm_arguments(loop, grads), noise_defines)


def ready_with(
    loop: Loop,
    grads: LoopGrads | None,
    concurrent: int,
    second_argument: Callable[[], Arguments],
    noise_defines: Defines,
    step: str = "",
) -> Ready | None:
    """As `ready`, with the second argument of the kernel.

    `noise_defines`: macros for what is known about the noise. `step`: the step of any cell.
    """
    tiles = plan_for(loop, grads is not None, concurrent)
    if tiles is None:
        return None
    features = features_of(loop, grads)
    kernel = _kernel(
        loop.gates.get_device(),
        loop.cell,
        loop.gates.dtype,
        grads is not None,
        tiles,
        features,
        noise_defines,
        step,
    )
    arguments, second = loop_arguments(loop, grads), second_argument()

    def start(side_stream: Any) -> None:
        structs = (arguments.struct, second.struct)
        kernel.launch(tiles.blocks, 32 * tiles.warps, structs, tiles.shared, stream=side_stream)

    return Ready(start)


def defines_of(
    cell: Definition,
    dtype: torch.dtype,
    backward: bool,
    tiles: Plan,
    features: int,
    noise_defines: Defines = (),
) -> Defines:
    """Return the macros that the kernel is compiled with."""
    return (
        *common_defines(cell, dtype),
        ("BACKWARD", int(backward)),
        ("APPROXIMATE", 1),
        ("HIDDEN", tiles.hidden),
        ("WARPS", tiles.warps),
        ("K_STEPS", tiles.k_steps),
        ("RESIDENT_K_STEPS", tiles.resident),
        ("ROWS_PER_THREAD", tiles.rows),
        ("NORM", tiles.norm),
        ("FEATURES", features),
        *noise_defines,
    )


@lru_cache(1024)
def _kernel(
    device: int,
    cell: Definition,
    dtype: torch.dtype,
    backward: bool,
    tiles: Plan,
    features: int,
    noise_defines: Defines = (),
    step: str = "",
) -> Kernel:
    defines = defines_of(cell, dtype, backward, tiles, features, noise_defines)
    source = "small_cell.cu" if step else "small.cu"
    names = ("backward" if backward else "forward",)
    (kernel,) = load(device, source, names, defines, step)
    with torch.cuda.device(device):
        kernel.allow_shared(tiles.shared)
    return kernel
