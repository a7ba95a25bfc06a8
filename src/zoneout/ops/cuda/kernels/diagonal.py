"""Any cell in which no unit sees another (`recurrence="diagonal"` or `"none"`), in one launch.

One thread has a unit of a row over all steps.
"""

from __future__ import annotations

from typing import Any

import torch

from ....definition import Definition
from ...backend import Loop, LoopGrads
from ...run import Run
from ..runtime.arguments import Defines, has, loop_arguments
from ..runtime.compiler import Ready, load
from .own_cell import OwnArguments, defines_of, known_streams, step_text

THREADS = 64  # per block
AHEAD = 16  # steps between a load and its use, if the registers suffice
MOST_NUMBERS = 2**30  # gate values of a step: distances in bytes are 32 bits wide
REGISTERS = 88  # of a thread, for loads under way; several steps are computed at once


def fits(of: Loop | Run) -> bool:
    """Return True if this kernel supports a run: no unit of its cell sees another."""
    alone = not of.cell.has_r and not of.cell.products
    return alone and of.batch * of.width < MOST_NUMBERS


def ready(loop: Loop, back: LoopGrads | None, loops: int) -> Ready | None:
    """Prepare a loop, if no unit of its cell sees another."""
    if not fits(loop):
        return None
    cell = loop.cell
    loop_struct, own = loop_arguments(loop, back), OwnArguments(loop, back)
    name = "forward" if back is None else "backward"
    full = loop.hidden % THREADS == 0
    defines = diagonal_defines(cell, loop.gates.dtype, back is not None, has(loop, back), full)
    defines += known_streams(loop)
    (kernel,) = load(loop.gates.get_device(), "diagonal.cu", (name,), defines, step_text(loop))
    blocks = loop.batch * -(-loop.hidden // THREADS)

    arguments = (loop_struct.struct, own.struct)

    def start(lane: Any) -> None:
        kernel.launch(blocks, THREADS, arguments, stream=lane)

    return Ready(start)


def diagonal_defines(
    cell: Definition, dtype: torch.dtype, back: bool, features: int, full: bool = False
) -> Defines:
    """Return the macros that the kernel of a pass is compiled with.

    `features`: see `has`. `full`: the units are a multiple of THREADS.
    """
    own = (
        ("BACK", int(back)),
        ("THREADS", THREADS),
        ("AHEAD", ahead(cell, back, bool(features & 8))),
        ("FULL", int(full)),
    )
    return (*defines_of(dtype), ("HAS", features), *own)


def ahead(cell: Definition, back: bool, seen: bool = False) -> int:
    """Return how many steps a load is issued before its use: a multiple of 4, at most AHEAD.

    `seen`: the states at every step have gradients.
    """
    states = len(cell.states)
    numbers = cell.gates
    if back:
        numbers += len(cell.storage.slots) + 1 + states + (states - 1) * seen
    return min(AHEAD, max(4, REGISTERS // numbers // 4 * 4))
