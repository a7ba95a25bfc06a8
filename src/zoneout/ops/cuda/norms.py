"""The norm of x·Wx, for all steps at once: before the loop, and after it on the way back.

One kernel each way reads and writes the data once; sums over all rows come in parts, one for each block, that a small
kernel adds up in a fixed order. Nothing waits for the GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..loop import Backward, Loop
from ..memory import is_aligned
from .arguments import TYPES, Arguments
from .compiler import Kernel, load, pack

THREADS = 256  # of a block, where it may choose
FINISH = (8, 32)  # of a block that adds up the parts: columns, and parts at once
MOST_HELD = {False: 32, True: 16}  # layer norm: numbers of a row that a thread keeps, forwards and backwards
MOST_EXAMPLES = {False: 8, True: 4}  # batch norm: vectors that a thread keeps

_i64, _p = ctypes.c_int64, ctypes.c_void_p


class Norms(ctypes.Structure):
    """`Norms` of norms.cu."""

    _fields_ = [
        *((name, _i64) for name in ("steps", "batch", "width", "reverse", "given", "tiles")),
        ("eps", ctypes.c_double),
        *((name, _p) for name in ("lengths", "scale", "bias", "mean", "var", "v", "d", "dh", "gh", "parts")),
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
    """How the numbers are shared out: see norms.cu."""

    layer: bool
    vector: int
    threads: tuple[int, int]  # of a block
    bound: int  # at least as many, known to the compiler
    team: int  # layer norm: threads of a row
    each: int  # vectors of a thread
    held: bool
    tiles: int  # batch norm: blocks across a row

    def groups(self, loop: Loop) -> int:
        """How many groups of rows there are that blocks can take."""
        return -(-loop.steps * loop.batch * self.team // self.bound) if self.layer else loop.steps


@cache
def plan(layer: bool, size: int, width: int, batch: int, vector: int, back: bool) -> Plan:
    """How to share out rows of `width` numbers, `vector` of them read at once; `size` is that of a number in bytes."""
    across = width // vector
    if layer:
        team = 32 if width <= 512 else 128 if width <= 2048 else 256 if width <= 4096 else 512
        threads, each = THREADS if team == 32 else team, -(-across // team)
        held = each * vector <= MOST_HELD[back]
        return Plan(True, vector, (threads, 1), threads, team, each if held else 0, held, 1)
    least = min(32, 128 // (vector * size))  # whole lines of the cache, and few columns to spare
    x = min(across, min(range(least, 2 * least + 1, 2), key=lambda x: -across % x))
    bound = THREADS if -(-batch // (THREADS // x)) <= MOST_EXAMPLES[back] else 2 * THREADS
    y = min(batch, bound // x)
    each = -(-batch // y)
    held = each <= MOST_EXAMPLES[back]
    return Plan(False, vector, (x, y), bound, 0, each if held else 0, held, -(-across // x))


def defines_of(
    dtype: torch.dtype, made: Plan, back: bool, ends: bool, apart: bool = False, cell: int = 1
) -> tuple[tuple[str, int], ...]:
    """What the kernels are compiled with. `apart`: dsh is not dgx; `cell`: numbers of a row of c read at once."""
    return (
        ("CELL", 0), ("TYPE", TYPES[dtype]), ("FAST", 1), ("LAYER", int(made.layer)), ("BACK", int(back)),
        ("V", made.vector), ("VC", cell), ("THREADS", made.bound), ("TEAM", made.team), ("R", made.each),
        ("HELD", int(made.held)), ("ENDS", int(ends)), ("APART", int(apart)),
    )  # fmt: skip


def forward(loop: Loop) -> None:
    """Normalise, scale and shift x's part of the gates in place; its moments are written unless they are given."""
    given, dtype, device = _arguments(loop, loop.gates), loop.gates.dtype, loop.gates.get_device()
    given.put("bias", loop.b_x, dtype)
    made = _plan(loop, given, False)
    with torch.cuda.device(device):
        (kernel,) = load(device, "norms.cu", ("forward",), defines_of(dtype, made, False, loop.lengths is not None))
        kernel.launch(made.groups(loop) * made.tiles, made.threads, pack((given.struct,)))


def backward(loop: Loop, back: Backward) -> None:
    """Of x·Wx, from that of its normalised form; and of all the norms' scales and shifts."""
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
        ready.backward.launch(many * made.tiles, made.threads, pack((given.struct,)))
        if back.dnc is not None:
            many = _parts(cell, back.dx, loop.hidden, -(-rows // threads[1]), ready.resident_sums // 2 // tiles)
            cell.struct.rows = rows
            ready.sums.launch(many * tiles, threads, pack((cell.struct,)))
        columns = 2 * (width + (0 if back.dnc is None else loop.hidden))
        ready.finish.launch(-(-columns // FINISH[0]), FINISH, pack((gates.struct, cell.struct)))


def sum_tiles(across: int) -> tuple[tuple[int, int], int]:
    """The threads of a block that adds up products over rows of so many vectors, and the blocks across a row."""
    tiles = -(-across // 64)
    x = -(-across // tiles)
    return (x, THREADS // x), tiles


# --- arguments -------------------------------------------------------------------------------------


def _arguments(loop: Loop, v: Tensor) -> Arguments:
    """What both ways need."""
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
    """How the numbers of a loop are shared out."""
    assert loop.norm is not None
    size, width = loop.gates.element_size(), loop.gates.shape[1]
    vector = _vector(width, given.alive, 16 // size)
    made = plan(loop.norm.over == "units", size, width, loop.batch, vector, back)
    given.struct.tiles = made.tiles
    return made


def _vector(width: int, given: Iterable[Tensor], most: int) -> int:
    """How many neighbours can be read at once, wherever they lie: `most`, or half of that, …"""
    numbers = [v for v in given if v.is_floating_point()]
    while width % most or not all(is_aligned(v, min(16, most * v.element_size())) for v in numbers):
        most //= 2
    return most


def _put(made: Arguments, **tensors: Tensor | None) -> None:
    for name, value in tensors.items():
        made.put(name, value, torch.float32)


def _parts(made: Arguments, like: Tensor, width: int, most: int, wanted: int) -> int:
    """Memory for sums in parts, and how many: as many as are wanted, but at most one for each that is added."""
    count = max(1, min(most, wanted))
    made.struct.width, made.struct.count = width, count
    made.put("parts", like.new_empty(count, 2, width, dtype=torch.float32))
    return count


class _Ready(NamedTuple):
    """The kernels of the way back, and how many blocks of the first two fit on the device at once."""

    backward: Kernel
    sums: Kernel
    finish: Kernel
    resident: int
    resident_sums: int


@cache
def _ready(
    device: int, defines: tuple[tuple[str, int], ...], threads: tuple[int, int], sum_threads: tuple[int, int]
) -> _Ready:
    back, sums, finish = load(device, "norms.cu", ("backward", "sum_products", "finish"), defines)
    (x, y), (across, down) = threads, sum_threads
    return _Ready(back, sums, finish, back.resident_blocks(x * y, 0), sums.resident_blocks(across * down, 0))
