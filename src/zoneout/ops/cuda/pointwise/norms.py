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
from ..runtime.arguments import Arguments, common_defines
from ..runtime.compiler import Kernel, load

THREADS = 256  # per block, if the plan may choose
# Threads of a block that adds partial sums: columns, and partial sums at once.
FINISH = (8, 32)
# Layer norm: elements of a row that a thread keeps in registers. False: forward, True: backward.
MOST_ELEMENTS = {False: 32, True: 16}
# Batch norm: vectors that a thread keeps in registers, forward and backward.
MOST_VECTORS = {False: 8, True: 4}

_i64, _p = ctypes.c_int64, ctypes.c_void_p


class Norms(ctypes.Structure):
    """`Norms` of norms.cu."""

    _fields_ = [
        *((name, _i64) for name in ("steps", "batch", "width", "reverse", "given", "tiles")),
        ("eps", ctypes.c_double),
        *(
            (name, _p)
            for name in (
                "lengths",
                "scale",
                "bias",
                "mean",
                "var",
                "v",
                "d",
                "dh",
                "gh",
                "partial_sums",
            )
        ),
    ]


class Sums(ctypes.Structure):
    """`Sums` of norms.cu."""

    _fields_ = [
        *((name, _p) for name in ("d", "hat", "partial_sums")),
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
    vectors_per_thread: int  # vectors per thread; 0 if not held
    in_registers: bool  # the vectors stay in registers
    tiles: int  # batch norm: blocks across a row

    def groups(self, loop: Loop) -> int:
        """Return the number of row groups, the units of work of a block."""
        return -(-loop.steps * loop.batch * self.team // self.bound) if self.layer else loop.steps


@lru_cache(1024)
def plan(layer: bool, size: int, width: int, batch: int, vector: int, backward: bool) -> Plan:
    """Return the plan for rows of `width` elements of `size` bytes, read `vector` at a time."""
    across = width // vector
    if layer:
        team = 32 if width <= 512 else 128 if width <= 2048 else 256 if width <= 4096 else 512
        threads, vectors_per_thread = THREADS if team == 32 else team, -(-across // team)
        in_registers = vectors_per_thread * vector <= MOST_ELEMENTS[backward]
        return Plan(
            True,
            vector,
            (threads, 1),
            threads,
            team,
            vectors_per_thread if in_registers else 0,
            in_registers,
            1,
        )
    # Whole cache lines, and few unused columns.
    fewest = min(32, 128 // (vector * size))
    x = min(across, min(range(fewest, 2 * fewest + 1, 2), key=lambda x: -across % x))
    bound = THREADS if -(-batch // (THREADS // x)) <= MOST_VECTORS[backward] else 2 * THREADS
    y = min(batch, bound // x)
    vectors_per_thread = -(-batch // y)
    in_registers = vectors_per_thread <= MOST_VECTORS[backward]
    return Plan(
        False,
        vector,
        (x, y),
        bound,
        0,
        vectors_per_thread if in_registers else 0,
        in_registers,
        -(-across // x),
    )


def defines_of(
    dtype: torch.dtype,
    tiling: Plan,
    backward: bool,
    ragged: bool,
    separate_grads: bool = False,
    cell: int = 1,
) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernels are compiled with.

    `apart`: dsh is not dgx. `cell`: elements of a row of c that are read at once.
    """
    return (
        *common_defines(None, dtype),
        ("LAYER", int(tiling.layer)),
        ("BACKWARD", int(backward)),
        ("VECTOR", tiling.vector),
        ("CELL_VECTOR", cell),
        ("THREADS", tiling.bound),
        ("TEAM", tiling.team),
        ("VECTORS_PER_THREAD", tiling.vectors_per_thread),
        ("IN_REGISTERS", int(tiling.in_registers)),
        ("RAGGED", int(ragged)),
        ("SEPARATE_GRADS", int(separate_grads)),
    )


def forward(loop: Loop) -> None:
    """Normalise, scale and shift x's part of the gates in place.

    The moments are written to the loop unless they are given.
    """
    arguments = _arguments(loop, loop.gates)
    dtype = loop.gates.dtype
    device = loop.gates.get_device()
    arguments.put("bias", loop.b_x, dtype)
    tiling = _plan(loop, arguments, False)
    with torch.cuda.device(device):
        (kernel,) = load(
            device,
            "norms.cu",
            ("forward",),
            defines_of(dtype, tiling, False, loop.lengths is not None),
        )
        kernel.launch(tiling.groups(loop) * tiling.tiles, tiling.threads, (arguments.struct,))


def backward(loop: Loop, grads: LoopGrads) -> None:
    """Compute the gradient of x·Wx from that of its normalised form.

    Also compute the gradients of the scales and shifts of all norms.
    """
    assert grads.dx is not None
    dtype, device, (rows, width) = grads.dx.dtype, grads.dx.get_device(), grads.dx.shape
    arguments, separate_grads = _arguments(loop, grads.dx), grads.dsh is not grads.dgx
    arguments.put("d", grads.dgx, dtype)
    arguments.put("gh", loop.gh, torch.float32)
    if separate_grads:
        arguments.put("dh", grads.dsh, dtype)
    tiling, gates, cell = _plan(loop, arguments, True), Arguments(Sums), Arguments(Sums)
    _put(gates, first=grads.dscale_x, second=grads.dscale_h)
    _put(cell, d=grads.dnc, hat=grads.chat, first=grads.dscale_c, second=grads.dshift_c)
    vector = _vector(loop.hidden, cell.alive, 4)
    threads, tiles = sum_tiles(loop.hidden // vector)
    with torch.cuda.device(device):
        defines = defines_of(dtype, tiling, True, loop.lengths is not None, separate_grads, vector)
        kernels = _backward_kernels(device, defines, tiling.threads, threads)
        count = _put_partial_sums(
            gates, grads.dx, width, tiling.groups(loop), kernels.resident // tiling.tiles
        )
        arguments.put("partial_sums", gates.alive[-1])
        kernels.backward.launch(count * tiling.tiles, tiling.threads, (arguments.struct,))
        if grads.dnc is not None:
            count = _put_partial_sums(
                cell,
                grads.dx,
                loop.hidden,
                -(-rows // threads[1]),
                kernels.resident_sums // 2 // tiles,
            )
            cell.struct.rows = rows
            kernels.sums.launch(count * tiles, threads, (cell.struct,))
        columns = 2 * (width + (0 if grads.dnc is None else loop.hidden))
        kernels.finish.launch(-(-columns // FINISH[0]), FINISH, (gates.struct, cell.struct))


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
    arguments = Arguments(Norms)
    s = arguments.struct
    s.steps, s.batch, s.width, s.reverse = loop.steps, loop.batch, v.shape[1], loop.reverse
    s.given, s.eps = loop.given, loop.norm.eps
    arguments.put("lengths", loop.lengths, torch.int64)
    arguments.put("scale", loop.norm.scale_x, torch.float32)
    arguments.put("mean", loop.mean_x, torch.float32)
    arguments.put("var", loop.var_x, torch.float32)
    arguments.put("v", v)
    return arguments


def _plan(loop: Loop, arguments: Arguments, backward: bool) -> Plan:
    """Return the plan of a loop, and set its number of tiles in the arguments."""
    assert loop.norm is not None
    size, width = loop.gates.element_size(), loop.gates.shape[1]
    vector = _vector(width, arguments.alive, 16 // size)
    tiling = plan(loop.norm.over == "units", size, width, loop.batch, vector, backward)
    arguments.struct.tiles = tiling.tiles
    return tiling


def _vector(width: int, tensors: Iterable[Tensor], most: int) -> int:
    """Return how many adjacent elements alignment allows to read at once.

    The result is `most`, halved until it divides the width and fits every tensor's alignment.
    """
    values = [v for v in tensors if v.is_floating_point()]
    while width % most or not all(is_aligned(v, min(16, most * v.element_size())) for v in values):
        most //= 2
    return most


def _put(arguments: Arguments, **tensors: Tensor | None) -> None:
    for name, value in tensors.items():
        arguments.put(name, value, torch.float32)


def _put_partial_sums(sums: Arguments, like: Tensor, width: int, most: int, wanted: int) -> int:
    """Allocate partial sums and return their number: `wanted`, but at least 1.

    `most` limits it: the number of row groups, since each partial sum needs one.
    """
    count = max(1, min(most, wanted))
    sums.struct.width, sums.struct.count = width, count
    sums.put("partial_sums", like.new_empty(count, 2, width, dtype=torch.float32))
    return count


class _BackwardKernels(NamedTuple):
    """The kernels of the backward pass.

    `resident` and `resident_sums`: blocks of the first two that fit on the device at once.
    """

    backward: Kernel
    sums: Kernel
    finish: Kernel
    resident: int
    resident_sums: int


@lru_cache(1024)
def _backward_kernels(
    device: int,
    defines: tuple[tuple[str, int], ...],
    threads: tuple[int, int],
    sum_threads: tuple[int, int],
) -> _BackwardKernels:
    backward, sums, finish = load(
        device, "norms.cu", ("backward", "sum_products", "finish"), defines
    )
    (x, y), (across, down) = threads, sum_threads
    return _BackwardKernels(
        backward,
        sums,
        finish,
        backward.resident_blocks(x * y, 0),
        sums.resident_blocks(across * down, 0),
    )
