"""All steps in one launch with recurrent batch norm.

A block owns a few units for the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ....definition import Definition
from ...backend import Loop, LoopGrads
from ...memory import is_aligned
from ...run import Run
from ..runtime.arguments import CELLS, TYPES, has, known, loop_arguments, modes_of, norm_arguments
from ..runtime.compiler import Kernel, Ready, chip, load, tf32
from .small import MOST_NUMBERS

MOST_BLOCKS = 16  # maximum in a cluster
MOST_WARPS = 8  # maximum in a block: with more, a thread has too few registers
# Pieces of the weights that fit in registers, by (backward pass, no optional features).
PIECES = {(False, True): 52, (False, False): 16, (True, True): 26, (True, False): 0}


@dataclass(frozen=True)
class Plan:
    """The tiles of a launch: see batch.cu."""

    hidden: int
    blocks: int  # blocks in the only cluster
    parts: int  # groups of 8 units in a block
    bands: int  # groups of 16 rows
    resident: int  # pieces of weights in registers
    shared: int  # shared memory of a block, bytes

    @property
    def threads(self) -> int:
        return 32 * self.parts * self.bands


@lru_cache(1024)
def plan(
    cell: Definition, size: int, hidden: int, batch: int, back: bool, plain: bool, most: int
) -> Plan | None:
    """Return the tiles for a shape and device, or None if the loop does not fit.

    `size` is the size of an element and `most` that of shared memory, in bytes. `plain`: the loop
    uses no optional features.
    """
    parts, bands = 1 if hidden <= 8 * MOST_BLOCKS else 2, -(-batch // 16)
    if hidden > 16 * MOST_BLOCKS or parts * bands > MOST_WARPS:
        return None
    blocks, threads = -(-hidden // (8 * parts)), 32 * parts * bands
    # Blocks then exchange half-precision values, scaled by powers of two.
    factors = back and size == 4 and parts == 1
    if factors or (not back and cell.bounded):
        size = 2
    each, numbers = 4 // size, 1 if not back else cell.gates + cell.storage.apart
    words = -(-2 * numbers // each)  # 4-byte words of two units of a row
    k_part = -(-words // 2)
    k_steps = parts * k_part if back else -(-blocks * parts * words // 2)
    pieces = k_steps * (blocks if back else cell.gates)
    resident = min(pieces, PIECES[back, plain])
    shared = 2 * blocks * threads * (8 if size == 2 else 16)  # values sent between blocks
    shared += 16 * (k_part * threads if back and parts > 1 else 1)
    shared += 128 * (bands if factors else 1)
    # Sums, lengths and counters.
    shared += (24 if back else 16) * threads + 64 * bands + 16 * parts * bands
    shared += parts * (pieces - resident) * 256
    return Plan(hidden, blocks, parts, bands, resident, shared) if shared <= most else None


def fits(r: Run) -> bool:
    """Return True if both passes of a layer with batch norm fit these kernels, with any noise."""
    of, size = chip(r.h0.get_device()), r.h0.element_size()
    if r.weights.w_hr is not None or of.major < 9 or r.steps * r.batch * r.width >= MOST_NUMBERS:
        return False
    each = ((back, plain) for back in (False, True) for plain in (False, True))
    return all(plan(r.cell, size, r.hidden, r.batch, *how, of.shared) is not None for how in each)


def plan_for(loop: Loop, back: bool, plain: bool) -> Plan | None:
    """Return the plan of a loop, or None if this kernel does not support it."""
    if loop.gates.dtype == torch.float32 and not tf32():
        return None
    most = chip(loop.gates.get_device()).shared
    return plan(loop.cell, loop.gates.element_size(), loop.hidden, loop.batch, back, plain, most)


def ready(loop: Loop, back: LoopGrads | None, loops: int) -> Ready | None:
    """Prepare a loop as one launch, with `loops` running concurrently; None if it does not fit."""
    beyond, modes = has(loop, back), modes_of(loop.draws)
    tiles = plan_for(loop, back is not None, not beyond and modes is not None)
    if tiles is None:
        return None
    arguments, norm = loop_arguments(loop, back), norm_arguments(loop, back)
    paired = pairs_lie_even(loop, [*arguments.alive, *norm.alive])
    kernel = _kernel(
        loop.gates.get_device(),
        loop.cell,
        loop.gates.dtype,
        back is not None,
        tiles,
        paired,
        beyond,
        modes,
    )
    if kernel is None:
        return None
    if back is not None:
        back.db_x = loop.recurrent_weight.new_empty(len(loop.recurrent_weight), dtype=torch.float32)
        back.db_h = torch.empty_like(back.db_x) if loop.cell.storage.apart else back.db_x
        norm.put_all(back, ("db_x", "db_h"), torch.float32)

    def start(lane: Any) -> None:
        kernel.launch(
            tiles.blocks,
            tiles.threads,
            (arguments.struct, norm.struct),
            tiles.shared,
            stream=lane,
        )

    return Ready(start)


def pairs_lie_even(loop: Loop, given: list[Tensor]) -> bool:
    """Return True if alignment allows reading two adjacent units, and all their gates, at once."""
    numbers = (loop.gates.dtype, torch.float32)
    each = (value for value in given if value.dtype in numbers)
    return loop.hidden % 2 == 0 and all(is_aligned(value, 16) for value in each)


def defines_of(
    cell: Definition,
    dtype: torch.dtype,
    back: bool,
    tiles: Plan,
    paired: bool,
    beyond: int,
    modes: tuple[int, int] | None,
) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernel is compiled with."""
    return (
        ("CELL", CELLS.index(cell)), ("TYPE", TYPES[dtype]), ("FAST", 1), ("BACK", int(back)),
        ("HIDDEN", tiles.hidden), ("BLOCKS", tiles.blocks), ("PARTS", tiles.parts),
        ("BANDS", tiles.bands), ("OWN", tiles.resident), ("PAIRED", int(paired)), ("HAS", beyond),
        *known(modes),
    )  # fmt: skip


@lru_cache(1024)
def _kernel(
    device: int,
    cell: Definition,
    dtype: torch.dtype,
    back: bool,
    tiles: Plan,
    paired: bool,
    beyond: int,
    modes: tuple[int, int] | None,
) -> Kernel | None:
    """Return the compiled kernel, or None if its cluster does not fit on the device."""
    defines = defines_of(cell, dtype, back, tiles, paired, beyond, modes)
    (kernel,) = load(device, "batch.cu", ("backward" if back else "forward",), defines)
    with torch.cuda.device(device):
        kernel.allow_shared(tiles.shared)
        return (
            kernel if kernel.fits(tiles.blocks, tiles.threads, tiles.shared, tiles.blocks) else None
        )
