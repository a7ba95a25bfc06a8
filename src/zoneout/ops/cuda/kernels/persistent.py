"""All steps in one launch with the recurrent weights on the chip.

This module decides if they fit, and into which tiles they are split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ....definition import Definition
from ...backend import Loop, LoopGrads
from ...run import Run
from ..runtime.arguments import (
    Arguments,
    Defines,
    Exchange,
    common_defines,
    features_of,
    loop_arguments,
)
from ..runtime.compiler import Kernel, Ready, chip, load, tf32

FEWEST_STEPS = 2  # a single step has nothing to exchange: a product and a kernel are less work
WARPS = 8
THREADS = 32 * WARPS
UNITS = (8, 12, 16, 24, 32)  # possible numbers of units in a block
# Registers of a thread for weights, sums and loaded values: see `layout`.
ALL_RESIDENT, SOME_IN_SHARED, MOST_RESIDENT = 176, 144, 200
MOST_BYTES_IN_FLIGHT = 128 * 1024  # maximum bytes in flight


class Layout(NamedTuple):
    """Where a block stores its weights, and how it reads the values that blocks exchange."""

    resident: int  # k-steps with their weights in registers
    pairs_per_chunk: int  # pairs of k-steps in a chunk: what a warp loads together
    chunks_in_flight: int  # chunks on their way to shared memory
    sum_buffers: int  # sets of sums, used in alternation
    shared: int  # shared memory of a block, bytes


@dataclass(frozen=True)
class Plan:
    """The tiles of a launch: see exchange.cuh."""

    half: bool  # the product's float32 operands are exchanged in half precision
    blocks: int  # blocks of a group; each has some of the units
    groups: int  # groups of blocks; each has some of the rows
    units: int  # per block
    tiles: int  # tiles of 16 rows in a group of blocks
    row_octets: int  # groups of 8 rows that are read
    k_steps: int  # per warp
    k_steps_per_factor: int  # k-steps with the same scale factor
    source_blocks: int  # blocks whose scale factors a warp reads; 0 without scaling
    layout: Layout

    @property
    def rows(self) -> int:
        return 16 * self.tiles

    @property
    def rounded_units(self) -> int:
        return 8 if self.units <= 8 else 16 if self.units <= 16 else 32

    @property
    def buffer_bytes(self) -> int:
        """The exchange buffer of a group in bytes: values, and scale factors of all blocks.

        The factors include those of every block that a warp may read.
        """
        value_bytes = self.rows * WARPS * self.k_steps * 32
        last = (WARPS - 1) * self.k_steps // (self.units // 4)
        return value_bytes + (
            factor_bytes(last + self.source_blocks, self.row_octets) if self.source_blocks else 0
        )


def values_per_unit(cell: Definition) -> int:
    """Return the exchanged gradients of a unit: one, or 8 or 16 bytes of half types."""
    return 1 if cell.gates == 1 else 4 if cell.gates <= 4 else 8


def in_half(cell: Definition, dtype: torch.dtype, hidden: int, backward: bool) -> bool:
    """Return True if TF32 operands may be exchanged in half precision: both have 10 mantissa bits.

    * h may, as it is between -1 and 1, unless it is an initial state. The h of a ReLU may not: it
      can have any size.
    * Gradients may: each block scales them by a power of two for each row of each step. Those of
      cells with one gate may not, because a k-step has values of more than one block, nor those of
      cells with more than four, whose k-steps have another size.

    Values too small for half precision are lost. For h that is at most 3e-8, added to values near
    one. For gradients, and for W_h with them, it is at most 4e-12 of the largest value. One value
    in four loses its last bit, which would show in a sum of few terms.
    """
    can_be_half = values_per_unit(cell) == 4 if backward else cell.bounded
    return dtype == torch.float32 and can_be_half and hidden >= 32


def factor_groups(units: int, k_steps: int) -> tuple[int, int]:
    """Return (k-steps of a warp that share a scale factor, maximum source blocks of a warp).

    K-steps share a factor if all of them have values of the same block. A k-step has the values of
    four units. The offset of a warp's first k-step within a block depends on the warp.
    """
    k_steps_per_block = units // 4
    k_steps_per_factor = math.gcd(k_steps, k_steps_per_block)
    beyond_first = k_steps_per_block - k_steps_per_factor + k_steps - 1
    return k_steps_per_factor, beyond_first // k_steps_per_block + 1


def factor_bytes(source_blocks: int, row_octets: int) -> int:
    """Return the bytes of the scale factors of `source_blocks` blocks: one float for each row."""
    return source_blocks * row_octets * 8 * 4


def layout(
    columns: int, tiles: int, k_steps: int, backward: bool, shared: int, factors: int
) -> Layout | None:
    """Return the layout of a block, or None if the block has not enough memory.

    `columns` counts groups of 8 columns of weights; `factors` is the bytes of scale factors. Too
    many registers for weights leave too few for the rest of the loop. So the three limits are
    tried in this order:

    * ALL_RESIDENT: all weights are in registers.
    * SOME_IN_SHARED: some weights are in shared memory, more than necessary.
    * MOST_RESIDENT: all weights are in registers, beyond ALL_RESIDENT.
    """
    pairs_per_chunk = min(2 if backward and tiles == 1 else 1, k_steps // 2)
    other_registers = 4 * tiles * columns + 8 * pairs_per_chunk * tiles
    chunks = -(-k_steps // (2 * pairs_per_chunk))
    stage_bytes = WARPS * pairs_per_chunk * tiles * 1024
    most_in_flight = min(MOST_BYTES_IN_FLIGHT // stage_bytes, chunks if chunks < 3 else chunks - 1)
    sums = WARPS * 16 * tiles * 4 * (columns * 8 + (0 if columns % 2 else 8))
    for registers in (ALL_RESIDENT, SOME_IN_SHARED, MOST_RESIDENT):
        resident = min(k_steps, (registers - other_registers) // (2 * columns))
        if resident < (1 if registers == SOME_IN_SHARED else k_steps):
            continue
        shared_weights = WARPS * (k_steps - resident) * columns * 256
        for sum_buffers in (2, 1):
            other_shared = sum_buffers * sums + shared_weights + factors
            chunks_in_flight = min((shared - other_shared) // stage_bytes, most_in_flight)
            if chunks_in_flight >= min(2, most_in_flight):
                return Layout(
                    resident,
                    pairs_per_chunk,
                    chunks_in_flight,
                    sum_buffers,
                    other_shared + chunks_in_flight * stage_bytes,
                )
    return None


@lru_cache(1024)
def plan(
    cell: Definition,
    dtype: torch.dtype,
    hidden: int,
    batch: int,
    backward: bool,
    processors: int,
    shared: int,
) -> Plan | None:
    """Return the tiles for a shape and device, or None if the weights do not fit."""
    gates = cell.gates
    depth = hidden * (values_per_unit(cell) if backward else 1)
    half = in_half(cell, dtype, hidden, backward)
    k_steps = -(-depth // (WARPS * 64 // (2 if half else dtype.itemsize))) * 2
    best: Plan | None = None
    for units in UNITS:
        blocks = -(-hidden // units)
        if blocks > processors:
            continue
        groups = min(processors // blocks, -(-batch // 16))
        tiles = -(-batch // (16 * groups))
        tiles = tiles if tiles <= 2 else 4
        groups = -(-batch // (16 * tiles))
        row_octets = 2 * tiles if groups > 1 else -(-batch // 8)
        k_steps_per_factor, source_blocks = (
            factor_groups(units, k_steps) if half and backward else (1, 0)
        )
        factors = WARPS * factor_bytes(source_blocks, row_octets)
        block_layout = layout(
            -(-(units if backward else units * gates) // 8),
            tiles,
            k_steps,
            backward,
            shared,
            factors,
        )
        if block_layout is None or groups * blocks > processors:
            continue
        candidate = Plan(
            half,
            blocks,
            groups,
            units,
            tiles,
            row_octets,
            k_steps,
            k_steps_per_factor,
            source_blocks,
            block_layout,
        )
        # Prefer few rows, since a block reads all of its rows; then many weights in registers.
        if best is None or (candidate.tiles, -block_layout.resident) < (
            best.tiles,
            -best.layout.resident,
        ):
            best = candidate
    return best


def plan_for(loop: Loop | Run, backward: bool, concurrent: int = 1) -> Plan | None:
    """Return the plan of a loop or of a run's loop, or None if it must run step by step.

    `concurrent` is the number of loops that run at once.
    """
    w_hh = loop.recurrent_weight
    if loop.norm is not None or loop.w_hr is not None or loop.steps < FEWEST_STEPS:
        return None
    if w_hh.dtype == torch.float32 and not tf32():
        return None
    gpu = chip(w_hh.get_device())
    if gpu.major < 8:
        return None
    tiles = plan(
        loop.cell,
        w_hh.dtype,
        loop.hidden,
        loop.batch,
        backward,
        gpu.processors // concurrent,
        gpu.shared,
    )
    return tiles if tiles is not None and is_faster(tiles, w_hh.dtype, backward) else None


def fits(r: Run, concurrent: int) -> bool:
    """Return True if both passes of a run fit with `concurrent` at once, and that is faster.

    Concurrent loops are faster than sequential ones if a block has few rows, though not always by
    much. On an H200 two loops took 1.2 to 2.0 times as long as one. They took 2.3 times as long
    with four tiles of sixteen rows per block.
    """
    plans = [plan_for(r, back, concurrent) for back in (False, True)]
    return all(tiles is not None and tiles.tiles <= 2 for tiles in plans)


def is_faster(tiles: Plan, dtype: torch.dtype, backward: bool) -> bool:
    """Return True if one launch for all steps is faster than two launches for each step.

    A block reads all of its rows at every step, and `k_steps` of each row. Measured on an H200 at H
    from 256 to 2048 and batches from 8 to 256, against the products of cuBLAS 13.0.
    """
    reads = tiles.tiles * tiles.k_steps
    few = tiles.tiles == 1 or (tiles.tiles == 2 and (dtype == torch.float32 or reads <= 16))
    return few if backward else reads <= 64


def ready(loop: Loop, grads: LoopGrads | None, concurrent: int) -> Ready | None:
    """Prepare a loop as one launch, with `concurrent` at once; None if it does not fit."""
    return ready_with(loop, grads, concurrent)


def ready_with(
    loop: Loop,
    grads: LoopGrads | None,
    concurrent: int,
    cell_arguments: Callable[[], Arguments] | None = None,
    noise_defines: Defines = (),
    step: str = "",
) -> Ready | None:
    """As `ready`; for any cell with its own arguments and the text of its step.

    `noise_defines`: macros for what is known about the noise.
    """
    tiles, features = plan_for(loop, grads is not None, concurrent), features_of(loop, grads)
    if tiles is None:
        return None
    device = loop.gates.device
    kernel = _kernel(
        loop.gates.get_device(),
        loop.cell,
        loop.gates.dtype,
        grads is not None,
        tiles,
        features,
        concurrent,
        noise_defines,
        step,
    )
    if kernel is None:
        return None
    exchange = Arguments(Exchange)
    exchange.put(
        "buffer",
        torch.zeros(2 * tiles.groups * tiles.buffer_bytes, dtype=torch.uint8, device=device),
    )
    exchange.struct.size, exchange.struct.blocks = tiles.buffer_bytes, tiles.blocks
    if tiles.source_blocks:
        exchange.put("peak", torch.linalg.vector_norm(loop.recurrent_weight, math.inf))
    arguments = [
        loop_arguments(loop, grads),
        *([cell_arguments()] if cell_arguments else []),
        exchange,
    ]
    blocks, shared = tiles.groups * tiles.blocks, tiles.layout.shared

    def start(side_stream: Any) -> None:
        structs = [each.struct for each in arguments]
        kernel.launch(blocks, THREADS, structs, shared, cooperative=True, stream=side_stream)

    return Ready(start, fills_chip=True)


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
        ("UNITS_PER_BLOCK", tiles.units),
        ("ROUNDED_UNITS", tiles.rounded_units),
        ("K_STEPS", tiles.k_steps),
        ("RESIDENT_K_STEPS", tiles.layout.resident),
        ("PAIRS_PER_CHUNK", tiles.layout.pairs_per_chunk),
        ("CHUNKS_IN_FLIGHT", tiles.layout.chunks_in_flight),
        ("ROW_TILES", tiles.tiles),
        ("ROW_OCTETS", tiles.row_octets),
        ("SUM_BUFFERS", tiles.layout.sum_buffers),
        ("HALF", int(tiles.half)),
        ("K_STEPS_PER_FACTOR", tiles.k_steps_per_factor),
        ("SOURCE_BLOCKS", tiles.source_blocks),
        ("FEATURES", features),
        ("APPROXIMATE", 1),
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
    concurrent: int,
    noise_defines: Defines = (),
    step: str = "",
) -> Kernel | None:
    """Return the compiled kernel, or None if the blocks of all loops do not fit on the device."""
    (kernel,) = load(
        device,
        "persistent_cell.cu" if step else "persistent.cu",
        ("backward" if backward else "forward",),
        defines_of(cell, dtype, backward, tiles, features, noise_defines),
        step,
    )
    with torch.cuda.device(device):
        kernel.allow_shared(tiles.layout.shared)
        if not kernel.fits(concurrent * tiles.groups * tiles.blocks, THREADS, tiles.layout.shared):
            return None
    return kernel
