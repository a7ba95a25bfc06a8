"""All steps in one launch, the recurrent weights on the chip: where they fit, and which tiles they take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from ..interface import Run
from ..loop import GATES, Backward, Loop
from .arguments import CELLS, TYPES, Arguments, Exchange, has, loop_arguments
from .compiler import Kernel, Ready, chip, load, pack, tf32

WARPS = 8
THREADS = 32 * WARPS
UNITS = (8, 12, 16, 24, 32)  # that a block may have
ALL, SOME, MOST = 176, 144, 200  # registers of a thread for weights, sums and what is read: see `layout`
STAGES = 128 * 1024  # bytes in flight, at most


class Layout(NamedTuple):
    """Where a block has its weights, and how it reads what goes around."""

    resident: int  # k-steps with their weights in registers
    pairs: int  # of k-steps of a batch
    in_flight: int  # batches on the way to shared memory
    parts: int  # sets of sums that take turns
    shared: int  # bytes


@dataclass(frozen=True)
class Plan:
    """The tiles of a launch: see persistent.cu."""

    half: bool  # what enters the product goes in half precision though it is of float32
    blocks: int  # that share the units
    groups: int  # that share the rows
    units: int  # of a block
    tiles: int  # of 16 rows each
    eights: int  # of rows that are read
    k_steps: int  # of a warp
    fold: int  # k-steps with the same factor
    makers: int  # blocks whose factors a warp reads; 0 where there are none
    layout: Layout

    @property
    def rows(self) -> int:
        return 16 * self.tiles

    @property
    def padded_units(self) -> int:
        return 8 if self.units <= 8 else 16 if self.units <= 16 else 32

    @property
    def size(self) -> int:
        """Bytes of what goes around in a group: the numbers, and the factors of all blocks that a warp may look for."""
        numbers, last = self.rows * WARPS * self.k_steps * 32, (WARPS - 1) * self.k_steps // (self.units // 4)
        return numbers + (factor_bytes(last + self.makers, self.eights) if self.makers else 0)


def in_half(cell: str, dtype: torch.dtype, hidden: int, back: bool) -> bool:
    """Whether what enters a product in TF32 may go in half precision, which has the same ten bits of mantissa.

    h may, being between -1 and 1 wherever it is not given from outside; that of a ReLU may be of any size. Derivatives
    may, being sent times a power of two that each block finds for each row of each step; but not those of plain RNNs,
    where a k-step is of more than one block. What is too small for half precision is lost: of h at most 3e-8, which is
    added to others near one; of derivatives and, with them, of W_h at most 4e-12 of the largest. One number in four has
    its last bit taken, which a sum of a few would notice.
    """
    may = cell in ("lstm", "gru") if back else cell != "rnn_relu"
    return dtype == torch.float32 and may and hidden >= 32


def folds(units: int, k_steps: int) -> tuple[int, int]:
    """k-steps of a warp that are of one block for certain, and of how many blocks all of them are at most.

    A k-step has the numbers of four units. Where a warp begins among those of a block depends on the warp.
    """
    of_block = units // 4
    fold = math.gcd(k_steps, of_block)
    return fold, (of_block - fold + k_steps - 1) // of_block + 1


def factor_bytes(makers: int, eights: int) -> int:
    """Of so many blocks: one float a row."""
    return makers * eights * 8 * 4


def layout(columns: int, tiles: int, k_steps: int, back: bool, shared: int, factors: int) -> Layout | None:
    """Of a block with so many columns of weights in eights, and bytes of factors; None where it has not enough memory.

    With many weights in registers the rest of the loop has too few. So more than ALL are not taken if some of them
    can lie in shared memory, and then SOME leave more to it than they have to.
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


@cache
def plan(
    cell: str, dtype: torch.dtype, hidden: int, batch: int, back: bool, processors: int, shared: int
) -> Plan | None:
    """Tiles for a shape and device, or None where the weights do not fit."""
    gates = GATES[cell]
    depth = hidden * (1 if not back else 4 if gates == 3 else gates)
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
        laid = layout(-(-(units if back else units * gates) // 8), tiles, k_steps, back, shared, factors)
        if laid is None or groups * blocks > processors:
            continue
        made = Plan(half, blocks, groups, units, tiles, eights, k_steps, fold, makers, laid)
        # Few rows, since a block reads all of its rows; then most of its weights in registers.
        if best is None or (made.tiles, -laid.resident) < (best.tiles, -best.layout.resident):
            best = made
    return best


def plan_for(of: Loop | Run, back: bool, loops: int = 1) -> Plan | None:
    """The plan of a loop, or of that of a run, with so many side by side; None where it has to go step by step."""
    w_hh = of.w_hh
    if of.norm is not None or of.w_hr is not None:
        return None
    if w_hh.dtype == torch.float32 and not tf32():
        return None
    on = chip(w_hh.get_device())
    if on.major < 8:
        return None
    hidden = w_hh.shape[0] // GATES[of.cell]
    made = plan(of.cell, w_hh.dtype, hidden, of.batch, back, on.processors // loops, on.shared)
    return made if made is not None and pays(made, w_hh.dtype, back) else None


def fits(r: Run, loops: int) -> bool:
    """Whether this kernel takes such a run both ways, with so many side by side, and that is faster than in turn.

    With few rows a block it is, though it may not be by much: on an H200 two took 1.2 to 2.0 times as long as one, and
    2.3 times where a block had four times sixteen rows.
    """
    plans = [plan_for(r, back, loops) for back in (False, True)]
    return all(made is not None and made.tiles <= 2 for made in plans)


def pays(made: Plan, dtype: torch.dtype, back: bool) -> bool:
    """Whether a launch for all steps is faster than two for each.

    A block reads all of its rows at every step; what it reads of a row is `k_steps`. Measured on an H200 at H from 256
    to 2048 and batches from 8 to 256, against the products of cuBLAS 13.0.
    """
    reads = made.tiles * made.k_steps
    few = made.tiles == 1 or (made.tiles == 2 and (dtype == torch.float32 or reads <= 16))
    return few if back else reads <= 64


def ready(loop: Loop, back: Backward | None, loops: int) -> Ready | None:
    """The loop in one launch, with so many side by side; None where it does not fit."""
    tiles, beyond = plan_for(loop, back is not None, loops), has(loop, back)
    if tiles is None:
        return None
    device = loop.gates.device
    kernel = _kernel(loop.gates.get_device(), loop.cell, loop.gates.dtype, back is not None, tiles, beyond, loops)
    if kernel is None:
        return None
    arguments, exchange = loop_arguments(loop, back), Arguments(Exchange)
    exchange.put("buffer", torch.zeros(2 * tiles.groups * tiles.size, dtype=torch.uint8, device=device))
    exchange.struct.size, exchange.struct.blocks = tiles.size, tiles.blocks
    if tiles.makers:
        exchange.put("peak", torch.linalg.vector_norm(loop.w_hh, math.inf))
    blocks, shared = tiles.groups * tiles.blocks, tiles.layout.shared

    def start(lane: Any) -> None:
        kernel.launch(blocks, THREADS, pack((arguments.struct, exchange.struct)), shared, cooperative=True, stream=lane)

    return Ready(start, fills=True)


def defines_of(cell: str, dtype: torch.dtype, back: bool, tiles: Plan, beyond: int) -> tuple[tuple[str, int], ...]:
    """What the kernel is compiled with."""
    return (
        ("CELL", CELLS.index(cell)), ("TYPE", TYPES[dtype]), ("FAST", 1), ("BACK", int(back)),
        ("U", tiles.units), ("UP", tiles.padded_units), ("KS", tiles.k_steps), ("KR", tiles.layout.resident),
        ("BB", tiles.layout.pairs), ("D", tiles.layout.in_flight), ("MT", tiles.tiles), ("EIGHTS", tiles.eights),
        ("PARTS", tiles.layout.parts), ("HALF", int(tiles.half)), ("FOLD", tiles.fold), ("MAKERS", tiles.makers),
        ("HAS", beyond),
    )  # fmt: skip


@cache
def _kernel(
    device: int, cell: str, dtype: torch.dtype, back: bool, tiles: Plan, beyond: int, loops: int
) -> Kernel | None:
    """The compiled kernel, or None where the blocks of so many loops do not all fit on the device at once."""
    (kernel,) = load(
        device, "persistent.cu", ("backward" if back else "forward",), defines_of(cell, dtype, back, tiles, beyond)
    )
    with torch.cuda.device(device):
        kernel.allow_shared(tiles.layout.shared)
        if not kernel.fits(loops * tiles.groups * tiles.blocks, THREADS, tiles.layout.shared):
            return None
    return kernel
