"""The loop over time on the CPU: in C where a compiler is found, else in torch calls."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..cells import CELLS
from ..draws import Draw
from . import native, plain
from .interface import Run
from .loop import Backward, Loop
from .masks import masks_of, stream_of
from .memory import address
from .reference import kept_scale
from .rows import Packed

ROWS = Packed
WIDE = True  # half types are worked on in float32
PIECE = 2**22  # numbers of gates at once where nobody will go back


def check(r: Run) -> None:
    """Everything runs here."""


@cache
def narrow_products(dtype: torch.dtype) -> bool:
    """Whether the large products of the way back are taken in the half type that was asked for: where it is faster."""
    return dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def joins(rows: int, gates: int, outputs: int, inputs: int) -> bool:
    """Whether one product for dW_h and dW_x gains more than laying h and x side by side costs."""
    return rows * (outputs + inputs) <= 2**20 and gates > outputs + inputs


def scale_of(draw: Draw, examples: Tensor, units: int, dtype: torch.dtype) -> Tensor:
    """[B, units]: what h is multiplied with before it enters the gates, one mask for all steps."""
    (mask,) = masks_of([draw], examples.new_zeros(1), examples, units)
    return kept_scale(draw, mask, dtype)[0].contiguous()


def scratch(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Unwritten memory for the length of one call: what an earlier call gave back, or new."""
    if not torch.are_deterministic_algorithms_enabled():  # those fill new memory with NaN, to find mistakes
        kept = _spare.take(dtype, math.prod(shape))
        if kept is not None:
            return kept.view(shape)
    new = like.new_empty(shape, dtype=dtype)
    prepare(new)
    return new


def give_back(*buffers: Tensor | None) -> None:
    """Keep scratch memory for the next call: its pages have been touched, which is half of what a small call costs."""
    for buffer in {id(b): b for b in buffers if b is not None}.values():
        if not buffer.is_inference():  # one that was made in inference mode can be written to nowhere else
            _spare.keep(buffer.view(-1))


class _Spare:
    """Memory between calls, by type and size; all of it is let go once it is much."""

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0
        self._by_size: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, dtype: torch.dtype, size: int) -> Tensor | None:
        with self._lock:
            same = self._by_size.get((dtype, size))
            if not same:
                return None
            self.bytes -= dtype.itemsize * size
            return same.pop()

    def keep(self, buffer: Tensor) -> None:
        with self._lock:
            self._by_size.setdefault((buffer.dtype, len(buffer)), []).append(buffer)
            self.bytes += buffer.nbytes
            if self.bytes > self.most:
                self._by_size.clear()
                self.bytes = 0


_spare = _Spare(2**26)


def by_unit(r: Run) -> bool:
    """Whether the gates lie unit by unit: never."""
    return False


def takes_x(w_ih: Tensor) -> bool:
    """Whether x·Wx is better taken inside the loop: where the weights stay in the cache beside those of h."""
    return native.load() is not None and w_ih.nbytes <= 2**19


PARTS = torch.get_num_threads  # how many partial sums the way back makes


def together(runs: Sequence[Run]) -> bool:
    """Whether loops gain by running side by side: never, one has all threads."""
    return False


def forward(loops: Sequence[Loop]) -> None:
    """Run loops forwards: gates, states and what the way back needs are written into each."""
    library = native.load()
    for loop in loops:
        if library is None:
            _say_once(native.why_not())
            plain.forward(loop)
        else:
            _call(library, "forward", loop, None)


def backward(loops: Sequence[tuple[Loop, Backward]]) -> None:
    """Run loops backwards: the derivatives are written into each one's `Backward`."""
    library = native.load()
    for loop, back in loops:
        if library is None:
            plain.backward(loop, back)
        else:
            _call(library, "backward", loop, back)


def product(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Write a·b to `out`, every row by itself, its bits whatever rows and threads there are; False: not possible here.

    torch's product takes one row, a few and many in different ways, which round differently.
    """
    library = native.load()
    if library is None or a.dtype not in (torch.float32, torch.float64):
        return False
    kind, (rows, depth), columns = "double" if a.dtype == torch.float64 else "float", a.shape, b.shape[1]
    if depth == 0 or out.numel() == 0:
        out.zero_()
        return True
    size = getattr(library, f"zoneout_packed_size_{kind}")(rows, depth, columns)
    packed = scratch(a, size + 64 // a.element_size(), dtype=a.dtype) if size else None
    at = 0 if packed is None else (address(packed, "packed") + 63) // 64 * 64
    left, right = address(a, "a", a.dtype, -1), address(b, "b", a.dtype, -1, gaps=True)
    getattr(library, f"zoneout_product_{kind}")(
        rows, depth, columns, left, right, *b.stride(), address(out, "out", a.dtype, -1), at, torch.get_num_threads()
    )
    give_back(packed)
    return True


def prepare(*buffers: Tensor | None) -> None:
    """Make ready buffers that were just allocated and will be written whole: ask for large pages under them.

    The first touch of a small page costs microseconds, and a training step touches tens of thousands of them.
    """
    advise = _advice()
    for buffer in buffers:
        if advise is not None and buffer is not None and buffer.nbytes >= _LARGE:
            at = address(buffer, "buffer")
            start = -(-at // _PAGE) * _PAGE
            size = (at + buffer.nbytes) // _PAGE * _PAGE - start
            advise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


_PAGE, _LARGE = 2**21, 2**22


@cache
def _advice() -> Any:
    """The system's call for advice on memory, where it knows of large pages."""
    return getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None


@cache
def _say_once(reason: str) -> None:
    warnings.warn(
        f"zoneout's compiled loop is not available: {reason}. The same loop runs in torch calls, more slowly.",
        stacklevel=2,
    )


def _call(library: ctypes.CDLL, name: str, loop: Loop, back: Backward | None) -> None:
    kind = "double" if loop.gates.dtype == torch.float64 else "float"
    args = _arguments(loop, back)
    size = getattr(library, f"zoneout_work_size_{kind}")(ctypes.byref(args))
    work = scratch(loop.gates, size + 64, dtype=torch.uint8)
    args.work = (address(work, "work") + 63) // 64 * 64
    getattr(library, f"zoneout_{name}_{kind}")(ctypes.byref(args))
    give_back(work)


_INTEGERS, _BITS = ("counts", "offsets", "lengths", "examples"), ("resets",)
_NUMBERS = (
    "scale_h", "x", "w_ih", "w_hh", "b_x", "b_h", "w_hr", "h0", "c0", "reset_h", "reset_c", "gates", "gh", "y", "c",
    "mean_x", "var_x", "mean_h", "var_h", "mean_c", "var_c",
)  # fmt: skip
_BACKWARD = tuple(field.name for field in fields(Backward))
_NORM = {"norm_x": "scale_x", "norm_h": "scale_h", "norm_c": "scale_c", "norm_c_shift": "shift_c"}


def _arguments(loop: Loop, back: Backward | None) -> native.Loop:
    """The struct of loop.h, which holds only as long as the tensors do; what is not there is left zero."""
    args, norm, numbers = native.Loop(), loop.norm, loop.gates.dtype
    args.cell, args.steps, args.batch = list(CELLS).index(loop.cell), loop.steps, loop.batch
    args.hidden, args.outputs, args.threads = loop.hidden, loop.outputs, torch.get_num_threads()
    args.first_step, args.reverse = loop.first_step, loop.reverse
    args.inputs = 0 if loop.x is None else loop.x.shape[1]
    for name, draw in loop.draws.items():
        setattr(args, f"{name}_noise", stream_of(draw))
    _put(args, loop.__dict__, _INTEGERS, torch.int64)
    _put(args, loop.__dict__, _BITS, torch.bool)
    _put(args, loop.__dict__, _NUMBERS, numbers)
    if norm is not None:
        args.norm, args.norm_given, args.eps = 1 if norm.over == "units" else 2, loop.given, norm.eps
        _put(args, {name: getattr(norm, own) for name, own in _NORM.items()}, _NORM, numbers)
    if back is not None:
        _put(args, back.__dict__, _BACKWARD, numbers)
    return args


def _put(args: native.Loop, tensors: dict[str, Any], names: Iterable[str], dtype: torch.dtype) -> None:
    for name in names:
        if (value := tensors[name]) is not None:
            setattr(args, name, address(value, name, dtype, -1))
