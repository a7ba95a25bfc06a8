"""Any cell in which no unit sees another (`recurrence="diagonal"` or `"none"`), in one launch.

One thread has a unit of a row over all steps.
"""

from __future__ import annotations

from typing import Any

import torch

from ....definition import Definition
from ...backend import Loop, LoopGrads
from ...run import Run
from ..runtime.arguments import Defines, features_of, loop_arguments
from ..runtime.compiler import Ready, load
from .any_cell import AnyCellArguments, defines_of, noise_defines, step_text

THREADS = 64  # per block
AHEAD = 16  # steps between a load and its use, if the registers suffice
MOST_NUMBERS = 2**30  # gate values of a step: distances in bytes are 32 bits wide
REGISTERS = 88  # of a thread, for loads under way; several steps are computed at once


def fits(loop: Loop | Run) -> bool:
    """Return True if this kernel supports a run: no unit of its cell sees another."""
    plain = not loop.cell.has_r and not loop.cell.products
    return plain and loop.batch * loop.width < MOST_NUMBERS


def ready(loop: Loop, grads: LoopGrads | None, concurrent: int) -> Ready | None:
    """Prepare a loop, if no unit of its cell sees another."""
    if not fits(loop):
        return None
    cell = loop.cell
    common, extra = loop_arguments(loop, grads), AnyCellArguments(loop, grads)
    name = "forward" if grads is None else "backward"
    full = loop.hidden % THREADS == 0
    defines = diagonal_defines(
        cell, loop.gates.dtype, grads is not None, features_of(loop, grads), full
    )
    defines += noise_defines(loop)
    (kernel,) = load(loop.gates.get_device(), "diagonal.cu", (name,), defines, step_text(loop))
    blocks = loop.batch * -(-loop.hidden // THREADS)

    arguments = (common.struct, extra.struct)

    def start(side_stream: Any) -> None:
        kernel.launch(blocks, THREADS, arguments, stream=side_stream)

    return Ready(start)


def diagonal_defines(
    cell: Definition, dtype: torch.dtype, backward: bool, features: int, full: bool = False
) -> Defines:
    """Return the macros that the kernel of a pass is compiled with.

    `features`: see `features_of`. `full`: the units are a multiple of THREADS.
    """
    macros = (
        ("BACKWARD", int(backward)),
        ("THREADS", THREADS),
        ("AHEAD", ahead(cell, backward, bool(features & 8))),
        ("FULL", int(full)),
    )
    return (*defines_of(dtype), ("FEATURES", features), *macros)


def ahead(cell: Definition, backward: bool, seen: bool = False) -> int:
    """Return how many steps a load is issued before its use: a multiple of 4, at most AHEAD.

    `seen`: the states are returned at every step, and have gradients.
    """
    states = len(cell.states)
    numbers = cell.gates
    if backward:
        numbers += len(cell.storage.slots) + 1 + states + (states - 1) * seen
    return min(AHEAD, max(4, REGISTERS // numbers // 4 * 4))
