"""All steps forwards in one launch for many rows of an LSTM: W_h spread over the chip, multiplied by warpgroups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ..loop import Backward, Loop
from ..memory import is_aligned
from . import rows
from .arguments import CELLS, TYPES, Arguments, Exchange, known, loop_arguments, modes_of
from .compiler import Kernel, Ready, chip, load, pack
from .persistent import plan_for as other_plan

OWNED = 16  # units of a block
ROWS = 64  # of a turn
STEP = 32 * ROWS  # bytes of a k-step
THREADS = 384
MOST_TURNS = 2
CHUNK = 8  # k-steps that are brought in together
RESIDENT = 32  # k-steps of a warpgroup that its registers have room for


@dataclass(frozen=True)
class Plan:
    """The tiles of a launch: see wide.cu."""

    k_steps: int  # and blocks that share the units
    groups: int  # of blocks, that share the rows
    turns: int  # of 64 rows
    stages: int
    resident: int  # k-steps of a warpgroup with their weights in registers
    shared: int  # bytes
    size: int  # bytes of what goes around in a group


@cache
def plan(hidden: int, batch: int, processors: int, shared: int) -> Plan | None:
    """Tiles for a shape and device, or None where the weights do not fit."""
    k_steps = -(-hidden // OWNED)
    if k_steps > processors or hidden % 8:  # units are read and written eight at a time
        return None
    groups = min(processors // k_steps, -(-batch // ROWS))
    turns = -(-batch // (ROWS * groups))
    groups = -(-batch // (ROWS * turns))
    if turns > MOST_TURNS:
        return None
    chunks = -(-k_steps // CHUNK)
    of_group = chunks * CHUNK // 2
    resident = min(RESIDENT // (CHUNK // 2) * (CHUNK // 2), of_group)
    rest = 2 * (of_group - resident) * STEP + 2 * 4 * 128 * 16  # weights, sums
    rest += turns * ROWS * (4 * 32 + 4) + STEP  # gates, examples, h
    stages = min((shared - rest) // (CHUNK * STEP + 16), 2 * chunks)
    if stages < 2:
        return None
    size = 2 * turns * chunks * CHUNK * STEP + -(-turns * k_steps * 4 // 128) * 128
    return Plan(k_steps, groups, turns, stages, resident, rest + stages * (CHUNK * STEP + 16), size)


def plan_for(loop: Loop) -> Plan | None:
    """The plan of a loop, or None where this kernel does not take it."""
    if loop.cell != "lstm" or loop.norm is not None or loop.w_hr is not None:
        return None
    of = chip(loop.gates.get_device())
    if loop.gates.dtype == torch.float32 or of.major != 9:
        return None
    other = other_plan(loop, back=False)
    if other is not None and other.tiles < 4:  # there a block reads few rows: faster, as measured on an H200
        return None
    return plan(loop.hidden, loop.batch, of.processors, of.shared)


def ready(loop: Loop, back: Backward | None, loops: int) -> Ready | None:
    """The loop in one launch; None where it does not fit, goes backwards or is to leave room for others."""
    apart = back is not None or loop.reverse or loop.resets is not None or loop.scale_h is not None or loops > 1
    tiles, modes = (None, None) if apart else (plan_for(loop), modes_of(loop.draws))
    if tiles is None or modes is None:
        return None
    arguments, exchange = loop_arguments(loop, None), Arguments(Exchange)
    numbers = (loop.gates.dtype, torch.float32)
    if not all(is_aligned(value, 16) for value in arguments.alive if value.dtype in numbers):
        return None
    kernel = _kernel(loop.gates.get_device(), loop.gates.dtype, tiles, modes)
    if kernel is None:
        return None
    exchange.put("buffer", torch.zeros(tiles.groups * tiles.size, dtype=torch.uint8, device=loop.gates.device))
    exchange.struct.size, exchange.struct.blocks = tiles.size, tiles.k_steps
    blocks, shared = tiles.groups * tiles.k_steps, tiles.shared

    def start(lane: None) -> None:
        kernel.launch(blocks, THREADS, pack((arguments.struct, exchange.struct)), shared, cooperative=True)
        if loop.lengths is not None:  # the kernel has no register left to look at them: all rows go on
            rows.clear(loop.lengths, loop.steps, loop.y, loop.c)

    return Ready(start, fills=True)


def defines_of(dtype: torch.dtype, tiles: Plan, modes: tuple[int, int]) -> tuple[tuple[str, int], ...]:
    """What the kernel is compiled with."""
    return (
        ("CELL", CELLS.index("lstm")), ("TYPE", TYPES[dtype]), ("FAST", 1), ("HAS", 0), ("KS", tiles.k_steps),
        ("TURNS", tiles.turns), ("CK", CHUNK), ("STAGES", tiles.stages), ("KR", tiles.resident),
        *known(modes),
    )  # fmt: skip


@cache
def _kernel(device: int, dtype: torch.dtype, tiles: Plan, modes: tuple[int, int]) -> Kernel | None:
    """The compiled kernel, or None where its blocks do not all fit on the device at once."""
    (kernel,) = load(device, "wide.cu", ("forward",), defines_of(dtype, tiles, modes))
    with torch.cuda.device(device):
        kernel.allow_shared(tiles.shared)
        return kernel if kernel.fits(tiles.groups * tiles.k_steps, THREADS, tiles.shared) else None
