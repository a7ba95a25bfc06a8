"""The norm of x·Wx for all steps at once: before the forward loop and after the backward loop.

One kernel for each pass reads and writes the data once. Each block writes its partial sum over
rows, and a small kernel adds the partial sums in a fixed order. Nothing waits for the GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...backend import Loop, LoopGrads
from ...memory import is_aligned
from ..runtime.arguments import TYPES, Arguments
from ..runtime.compiler import Kernel, load

THREADS = 256  # per block, if the plan may choose
# Threads of a block that adds partial sums: columns, and partial sums at once.
FINISH = (8, 32)
# Layer norm: elements of a row that a thread keeps in registers. False: forward, True: backward.
MOST_HELD = {False: 32, True: 16}
# Batch norm: vectors that a thread keeps in registers, forward and backward.
MOST_EXAMPLES = {False: 8, True: 4}

_i64, _p = ctypes.c_int64, ctypes.c_void_p


class Norms(ctypes.Structure):
    """`Norms` of norms.cu."""

    _fields_ = [
        *((name, _i64) for name in ("steps", "batch", "width", "reverse", "given", "tiles")),
        ("eps", ctypes.c_double),
        *(
            (name, _p)
            for name in ("lengths", "scale", "bias", "mean", "var", "v", "d", "dh", "gh", "parts")
        ),
    ]


class Sums(ctypes.Structure):
    """`Sums` of norms.cu."""

    _fields_ = [
        *((name, _p) for name in ("d", "hat", "parts")),
        *((name, _i64) for name in ("rows", "width", "count")),
        *((name, _p) for name in ("first", "second")),
    ]


@dataclass(frozen=True)
class Plan:
    """How the elements are split over blocks and threads: see norms.cu."""

    layer: bool  # True: layer norm, False: batch norm
    vector: int  # adjacent elements that are read at once
    threads: tuple[int, int]  # per block
    bound: int  # upper bound of the threads of a block, known to the compiler
    team: int  # layer norm: threads per row
    each: int  # vectors per thread; 0 if not held
    held: bool  # the vectors stay in registers
    tiles: int  # batch norm: blocks across a row

    def groups(self, loop: Loop) -> int:
        """Return the number of row groups, the units of work of a block."""
        return -(-loop.steps * loop.batch * self.team // self.bound) if self.layer else loop.steps


@lru_cache(1024)
def plan(layer: bool, size: int, width: int, batch: int, vector: int, back: bool) -> Plan:
    """Return the plan for rows of `width` elements of `size` bytes, read `vector` at a time."""
    across = width // vector
    if layer:
        team = 32 if width <= 512 else 128 if width <= 2048 else 256 if width <= 4096 else 512
        threads, each = THREADS if team == 32 else team, -(-across // team)
        held = each * vector <= MOST_HELD[back]
        return Plan(True, vector, (threads, 1), threads, team, each if held else 0, held, 1)
    # Whole cache lines, and few unused columns.
    least = min(32, 128 // (vector * size))
    x = min(across, min(range(least, 2 * least + 1, 2), key=lambda x: -across % x))
    bound = THREADS if -(-batch // (THREADS // x)) <= MOST_EXAMPLES[back] else 2 * THREADS
    y = min(batch, bound // x)
    each = -(-batch // y)
    held = each <= MOST_EXAMPLES[back]
    return Plan(False, vector, (x, y), bound, 0, each if held else 0, held, -(-across // x))


def defines_of(
    dtype: torch.dtype, made: Plan, back: bool, ends: bool, apart: bool = False, cell: int = 1
) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernels are compiled with.

    `apart`: dsh is not dgx. `cell`: elements of a row of c that are read at once.
    """
    return (
        ("CELL", 0), ("TYPE", TYPES[dtype]), ("FAST", 1), ("LAYER", int(made.layer)),
        ("BACK", int(back)), ("V", made.vector), ("VC", cell), ("THREADS", made.bound),
        ("TEAM", made.team), ("R", made.each), ("HELD", int(made.held)), ("ENDS", int(ends)),
        ("APART", int(apart)),
    )  # fmt: skip


def forward(loop: Loop) -> None:
    """Normalise, scale and shift x's part of the gates in place.

    The moments are written to the loop unless they are given.
    """
    given, dtype, device = _arguments(loop, loop.gates), loop.gates.dtype, loop.gates.get_device()
    given.put("bias", loop.b_x, dtype)
    made = _plan(loop, given, False)
    with torch.cuda.device(device):
        (kernel,) = load(
            device,
            "norms.cu",
            ("forward",),
            defines_of(dtype, made, False, loop.lengths is not None),
        )
        kernel.launch(made.groups(loop) * made.tiles, made.threads, (given.struct,))


def backward(loop: Loop, back: LoopGrads) -> None:
    """Compute the gradient of x·Wx from that of its normalised form.

    Also compute the gradients of the scales and shifts of all norms.
    """
    assert back.dx is not None
    dtype, device, (rows, width) = back.dx.dtype, back.dx.get_device(), back.dx.shape
    given, apart = _arguments(loop, back.dx), back.dsh is not back.dgx
    given.put("d", back.dgx, dtype)
    given.put("gh", loop.gh, torch.float32)
    if apart:
        given.put("dh", back.dsh, dtype)
    made, gates, cell = _plan(loop, given, True), Arguments(Sums), Arguments(Sums)
    _put(gates, first=back.dscale_x, second=back.dscale_h)
    _put(cell, d=back.dnc, hat=back.chat, first=back.dscale_c, second=back.dshift_c)
    vector = _vector(loop.hidden, cell.alive, 4)
    threads, tiles = sum_tiles(loop.hidden // vector)
    with torch.cuda.device(device):
        defines = defines_of(dtype, made, True, loop.lengths is not None, apart, vector)
        ready = _ready(device, defines, made.threads, threads)
        many = _parts(gates, back.dx, width, made.groups(loop), ready.resident // made.tiles)
        given.put("parts", gates.alive[-1])
        ready.backward.launch(many * made.tiles, made.threads, (given.struct,))
        if back.dnc is not None:
            many = _parts(
                cell,
                back.dx,
                loop.hidden,
                -(-rows // threads[1]),
                ready.resident_sums // 2 // tiles,
            )
            cell.struct.rows = rows
            ready.sums.launch(many * tiles, threads, (cell.struct,))
        columns = 2 * (width + (0 if back.dnc is None else loop.hidden))
        ready.finish.launch(-(-columns // FINISH[0]), FINISH, (gates.struct, cell.struct))


def sum_tiles(across: int) -> tuple[tuple[int, int], int]:
    """Return the threads of a block and the number of blocks across a row of `across` vectors.

    These blocks sum products over rows.
    """
    tiles = -(-across // 64)
    x = -(-across // tiles)
    return (x, THREADS // x), tiles


# --- arguments ---


def _arguments(loop: Loop, v: Tensor) -> Arguments:
    """Return the arguments that both passes need."""
    assert loop.norm is not None
    made = Arguments(Norms)
    s = made.struct
    s.steps, s.batch, s.width, s.reverse = loop.steps, loop.batch, v.shape[1], loop.reverse
    s.given, s.eps = loop.given, loop.norm.eps
    made.put("lengths", loop.lengths, torch.int64)
    made.put("scale", loop.norm.scale_x, torch.float32)
    made.put("mean", loop.mean_x, torch.float32)
    made.put("var", loop.var_x, torch.float32)
    made.put("v", v)
    return made


def _plan(loop: Loop, given: Arguments, back: bool) -> Plan:
    """Return the plan of a loop, and set its number of tiles in the arguments."""
    assert loop.norm is not None
    size, width = loop.gates.element_size(), loop.gates.shape[1]
    vector = _vector(width, given.alive, 16 // size)
    made = plan(loop.norm.over == "units", size, width, loop.batch, vector, back)
    given.struct.tiles = made.tiles
    return made


def _vector(width: int, given: Iterable[Tensor], most: int) -> int:
    """Return how many adjacent elements alignment allows to read at once.

    The result is `most`, halved until it divides the width and fits every tensor's alignment.
    """
    numbers = [v for v in given if v.is_floating_point()]
    while width % most or not all(is_aligned(v, min(16, most * v.element_size())) for v in numbers):
        most //= 2
    return most


def _put(made: Arguments, **tensors: Tensor | None) -> None:
    for name, value in tensors.items():
        made.put(name, value, torch.float32)


def _parts(made: Arguments, like: Tensor, width: int, most: int, wanted: int) -> int:
    """Allocate partial sums and return their number: `wanted`, but at least 1.

    `most` limits it: the number of row groups, since each partial sum needs one.
    """
    count = max(1, min(most, wanted))
    made.struct.width, made.struct.count = width, count
    made.put("parts", like.new_empty(count, 2, width, dtype=torch.float32))
    return count


class _Ready(NamedTuple):
    """The kernels of the backward pass.

    `resident` and `resident_sums`: blocks of the first two that fit on the device at once.
    """

    backward: Kernel
    sums: Kernel
    finish: Kernel
    resident: int
    resident_sums: int


@lru_cache(1024)
def _ready(
    device: int,
    defines: tuple[tuple[str, int], ...],
    threads: tuple[int, int],
    sum_threads: tuple[int, int],
) -> _Ready:
    back, sums, finish = load(device, "norms.cu", ("backward", "sum_products", "finish"), defines)
    (x, y), (across, down) = threads, sum_threads
    return _Ready(
        back, sums, finish, back.resident_blocks(x * y, 0), sums.resident_blocks(across * down, 0)
    )
