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
    CELLS,
    TYPES,
    Arguments,
    Defines,
    Exchange,
    has,
    loop_arguments,
)
from ..runtime.compiler import Kernel, Ready, chip, load, tf32

WARPS = 8
THREADS = 32 * WARPS
UNITS = (8, 12, 16, 24, 32)  # possible numbers of units in a block
# Registers of a thread for weights, sums and loaded values: see `layout`.
ALL, SOME, MOST = 176, 144, 200
STAGES = 128 * 1024  # maximum bytes in flight


class Layout(NamedTuple):
    """Where a block stores its weights, and how it reads the values that blocks exchange."""

    resident: int  # k-steps with their weights in registers
    pairs: int  # pairs of k-steps in one batch of loads
    in_flight: int  # batches of loads in flight to shared memory
    parts: int  # sets of sums, used in alternation
    shared: int  # shared memory of a block, bytes


@dataclass(frozen=True)
class Plan:
    """The tiles of a launch: see persistent.cu."""

    half: bool  # the product's float32 operands are exchanged in half precision
    blocks: int  # blocks that share the units
    groups: int  # groups of blocks that share the rows
    units: int  # per block
    tiles: int  # tiles of 16 rows
    eights: int  # groups of 8 rows that are read
    k_steps: int  # per warp
    fold: int  # k-steps with the same scale factor
    makers: int  # blocks whose scale factors a warp reads; 0 without scaling
    layout: Layout

    @property
    def rows(self) -> int:
        return 16 * self.tiles

    @property
    def padded_units(self) -> int:
        return 8 if self.units <= 8 else 16 if self.units <= 16 else 32

    @property
    def size(self) -> int:
        """The exchange buffer of a group in bytes: values, and scale factors of all blocks.

        The factors include those of every block that a warp may read.
        """
        numbers, last = (
            self.rows * WARPS * self.k_steps * 32,
            (WARPS - 1) * self.k_steps // (self.units // 4),
        )
        return numbers + (factor_bytes(last + self.makers, self.eights) if self.makers else 0)


def exchanged(cell: Definition) -> int:
    """Return the gradients of a unit in what goes around: one, or 8 or 16 bytes of half types."""
    return 1 if cell.gates == 1 else 4 if cell.gates <= 4 else 8


def in_half(cell: Definition, dtype: torch.dtype, hidden: int, back: bool) -> bool:
    """Return True if TF32 operands may be exchanged in half precision: both have 10 mantissa bits.

    * h may: it is between -1 and 1, unless it is given from outside. The h of a ReLU may not: it
      can have any size.
    * Gradients may: each block scales them by a power of two for each row of each step. Those of
      cells with one gate may not, because a k-step has values of more than one block, nor those of
      cells with more than four, whose k-steps have another size.

    Values too small for half precision are lost. For h that is at most 3e-8, added to values near
    one. For gradients, and for W_h with them, it is at most 4e-12 of the largest value. One value
    in four loses its last bit, which would show in a sum of few terms.
    """
    may = exchanged(cell) == 4 if back else cell.bounded
    return dtype == torch.float32 and may and hidden >= 32


def folds(units: int, k_steps: int) -> tuple[int, int]:
    """Return (k-steps of a warp that surely come from one block, maximum blocks of all k-steps).

    A k-step has the values of four units. The offset of a warp's first k-step within a block
    depends on the warp.
    """
    of_block = units // 4
    fold = math.gcd(k_steps, of_block)
    return fold, (of_block - fold + k_steps - 1) // of_block + 1


def factor_bytes(makers: int, eights: int) -> int:
    """Return the bytes of the scale factors of `makers` blocks: one float for each row."""
    return makers * eights * 8 * 4


def layout(
    columns: int, tiles: int, k_steps: int, back: bool, shared: int, factors: int
) -> Layout | None:
    """Return the layout of a block, or None if the block has not enough memory.

    `columns` counts groups of 8 columns of weights; `factors` is the bytes of scale factors. Too
    many registers for weights leave too few for the rest of the loop. So the three limits are
    tried in this order:

    * ALL: all weights are in registers.
    * SOME: some weights are in shared memory, more than necessary.
    * MOST: all weights are in registers, beyond ALL.
    """
    pairs = min(2 if back and tiles == 1 else 1, k_steps // 2)
    busy = 4 * tiles * columns + 8 * pairs * tiles
    batches, stage = -(-k_steps // (2 * pairs)), WARPS * pairs * tiles * 1024
    most = min(STAGES // stage, batches if batches < 3 else batches - 1)
    sums = WARPS * 16 * tiles * 4 * (columns * 8 + (0 if columns % 2 else 8))
    for registers in (ALL, SOME, MOST):
        resident = min(k_steps, (registers - busy) // (2 * columns))
        if resident < (1 if registers == SOME else k_steps):
            continue
        rest = WARPS * (k_steps - resident) * columns * 256
        for parts in (2, 1):
            others = parts * sums + rest + factors
            in_flight = min((shared - others) // stage, most)
            if in_flight >= min(2, most):
                return Layout(resident, pairs, in_flight, parts, others + in_flight * stage)
    return None


@lru_cache(1024)
def plan(
    cell: Definition,
    dtype: torch.dtype,
    hidden: int,
    batch: int,
    back: bool,
    processors: int,
    shared: int,
) -> Plan | None:
    """Return the tiles for a shape and device, or None if the weights do not fit."""
    gates = cell.gates
    depth = hidden * (exchanged(cell) if back else 1)
    half = in_half(cell, dtype, hidden, back)
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
        eights = 2 * tiles if groups > 1 else -(-batch // 8)
        fold, makers = folds(units, k_steps) if half and back else (1, 0)
        factors = WARPS * factor_bytes(makers, eights)
        laid = layout(
            -(-(units if back else units * gates) // 8), tiles, k_steps, back, shared, factors
        )
        if laid is None or groups * blocks > processors:
            continue
        made = Plan(half, blocks, groups, units, tiles, eights, k_steps, fold, makers, laid)
        # Prefer few rows, since a block reads all of its rows; then many weights in registers.
        if best is None or (made.tiles, -laid.resident) < (best.tiles, -best.layout.resident):
            best = made
    return best


def plan_for(of: Loop | Run, back: bool, loops: int = 1) -> Plan | None:
    """Return the plan of a loop or of a run's loop, or None if it must run step by step.

    `loops` is the number of loops that run concurrently.
    """
    w_hh = of.recurrent_weight
    if of.norm is not None or of.w_hr is not None:
        return None
    if w_hh.dtype == torch.float32 and not tf32():
        return None
    on = chip(w_hh.get_device())
    if on.major < 8:
        return None
    made = plan(of.cell, w_hh.dtype, of.hidden, of.batch, back, on.processors // loops, on.shared)
    return made if made is not None and pays(made, w_hh.dtype, back) else None


def fits(r: Run, loops: int) -> bool:
    """Return True if both passes of a run fit with `loops` concurrent loops, and that is faster.

    Concurrent loops are faster than sequential ones if a block has few rows, though not always by
    much. On an H200 two loops took 1.2 to 2.0 times as long as one. They took 2.3 times as long
    with four tiles of sixteen rows per block.
    """
    plans = [plan_for(r, back, loops) for back in (False, True)]
    return all(made is not None and made.tiles <= 2 for made in plans)


def pays(made: Plan, dtype: torch.dtype, back: bool) -> bool:
    """Return True if one launch for all steps is faster than two launches for each step.

    A block reads all of its rows at every step, and `k_steps` of each row. Measured on an H200 at H
    from 256 to 2048 and batches from 8 to 256, against the products of cuBLAS 13.0.
    """
    reads = made.tiles * made.k_steps
    few = made.tiles == 1 or (made.tiles == 2 and (dtype == torch.float32 or reads <= 16))
    return few if back else reads <= 64


def ready(loop: Loop, back: LoopGrads | None, loops: int) -> Ready | None:
    """Prepare a loop as one launch, with `loops` running concurrently; None if it does not fit."""
    return ready_with(loop, back, loops)


def ready_with(
    loop: Loop,
    back: LoopGrads | None,
    loops: int,
    own: Callable[[], Arguments] | None = None,
    streams: Defines = (),
    step: str = "",
) -> Ready | None:
    """As `ready`; for any cell with its own arguments and the text of its step.

    `streams`: macros that say what is known of the noise.
    """
    tiles, beyond = plan_for(loop, back is not None, loops), has(loop, back)
    if tiles is None:
        return None
    device = loop.gates.device
    kernel = _kernel(
        loop.gates.get_device(),
        loop.cell,
        loop.gates.dtype,
        back is not None,
        tiles,
        beyond,
        loops,
        streams,
        step,
    )
    if kernel is None:
        return None
    exchange = Arguments(Exchange)
    exchange.put(
        "buffer", torch.zeros(2 * tiles.groups * tiles.size, dtype=torch.uint8, device=device)
    )
    exchange.struct.size, exchange.struct.blocks = tiles.size, tiles.blocks
    if tiles.makers:
        exchange.put("peak", torch.linalg.vector_norm(loop.recurrent_weight, math.inf))
    arguments = [loop_arguments(loop, back), *([own()] if own else []), exchange]
    blocks, shared = tiles.groups * tiles.blocks, tiles.layout.shared

    def start(lane: Any) -> None:
        structs = [one.struct for one in arguments]
        kernel.launch(blocks, THREADS, structs, shared, cooperative=True, stream=lane)

    return Ready(start, fills=True)


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
        ("BACK", int(back)), ("U", tiles.units), ("UP", tiles.padded_units), ("KS", tiles.k_steps),
        ("KR", tiles.layout.resident), ("BB", tiles.layout.pairs), ("D", tiles.layout.in_flight),
        ("MT", tiles.tiles), ("EIGHTS", tiles.eights), ("PARTS", tiles.layout.parts),
        ("HALF", int(tiles.half)), ("FOLD", tiles.fold), ("MAKERS", tiles.makers), ("HAS", beyond),
        ("QUICK", 1), *streams,
    )  # fmt: skip


@lru_cache(1024)
def _kernel(
    device: int,
    cell: Definition,
    dtype: torch.dtype,
    back: bool,
    tiles: Plan,
    beyond: int,
    loops: int,
    streams: Defines = (),
    step: str = "",
) -> Kernel | None:
    """Return the compiled kernel, or None if the blocks of all loops do not fit on the device."""
    (kernel,) = load(
        device,
        "persistent_cell.cu" if step else "persistent.cu",
        ("backward" if back else "forward",),
        defines_of(cell, dtype, back, tiles, beyond, streams),
        step,
    )
    with torch.cuda.device(device):
        kernel.allow_shared(tiles.layout.shared)
        if not kernel.fits(loops * tiles.groups * tiles.blocks, THREADS, tiles.layout.shared):
            return None
    return kernel
