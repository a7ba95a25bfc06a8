"""The loop over time on the CPU: in C if a compiler is found, else in torch calls."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...definition import Definition
from ...definition.products import MOST_LINKS, MOST_PARTS, MOST_PRODUCTS
from ...definition.storage import MOST_SLOTS
from ...draws import Draw
from .. import recording
from ..backend import Loop, LoopGrads
from ..memory import address
from ..reference import kept_scale
from ..run import Run, kind_of
from ..sequence.products import register
from ..sequence.rows import rows_of
from . import fallback, native
from .masks import masks_of, stream_of

ROWS = rows_of
IN_FLOAT32 = True  # half types are computed in float32
GATES_AT_ONCE = 2**22  # gate values at once if no backward pass follows


def settings() -> tuple[int]:
    """Return the settings that a pass depends on besides its run."""
    return (torch.get_num_threads(),)


def supports(r: Run) -> bool:
    """Return True if the loop has room for what the cell stores, and for its products."""
    if _fits(r):
        return True
    if not torch.compiler.is_compiling():
        _say_once(f"zoneout: {_too_much(r)}; the reference runs it, more slowly")
    return False


def check(r: Run) -> None:
    """Raise if the loop has no room for what the cell stores, or for its products."""
    if not _fits(r):
        raise ValueError(f"backend: {_too_much(r)}; backend='reference' runs every cell")


def _fits(r: Run) -> bool:
    # The ONNX exporter translates the operator of any cell.
    runs = r.cell.storage.runs(r.w_hr is not None, r.norm is not None) and takes_masks(r)
    runs &= r.extra is None or r.norm is None  # the norm is of x·W_x alone
    return runs or torch.onnx.is_in_onnx_export()


def takes_masks(r: Run) -> bool:
    """Return True if the loop can have the run's given masks.

    Masks of two values, and gradients of masks, take a variant of the step that does not know norm
    and projection, nor a held gate.
    """
    given = [draw for draw in r.draws if draw.given is not None]
    if not given:
        return True
    plain = all(
        (draw.rule.stream == "update" or kind_of(draw.rule)[0] in ("zone", "zero"))
        and not (draw.given is not None and draw.given.requires_grad)
        for draw in given
    )
    room = r.cell.storage.takes_masks and r.norm is None and r.w_hr is None
    holds = any(draw.rule.holds_gate for draw in given)
    # A program that is compiled now may run elsewhere; `forward` raises if there is no compiler.
    compiled = torch.compiler.is_compiling() or native.load() is not None
    return compiled and not holds and (plain or room)


def _too_much(r: Run) -> str:
    if r.extra is not None and r.norm is not None:
        return f"noise on the products of the cell {r.cell.name!r} and a norm of them"
    if not takes_masks(r):
        return (
            f"the masks that are given for the cell {r.cell.name!r} need the compiled loop; with "
            "two masks or a gradient they need a cell without norm, projection and held gate that "
            "stores the same values with and without noise"
        )
    if not r.cell.storage.fits_products:
        return (
            f"the cell {r.cell.name!r} has more products inside its step than the compiled loop "
            f"takes: {MOST_PRODUCTS}, with {MOST_PARTS} parts and {MOST_LINKS} matrices in a row"
        )
    if not r.cell.storage.runs(False, r.norm is not None) and r.cell.storage.runs(False, False):
        return (
            f"the cell {r.cell.name!r} has products inside its step and zo.shown, and the layer a "
            "norm"
        )
    if r.cell.storage.runs(False, False):
        return f"the cell {r.cell.name!r} does not store what proj_size needs"
    return (
        f"the cell {r.cell.name!r} stores {len(r.cell.storage.slots)} values per unit and step "
        f"beside its gates, and the compiled loop has room for {MOST_SLOTS}"
    )


@cache
def narrow_products(dtype: torch.dtype) -> bool:
    """Return True if the large products of the backward pass run in this half type.

    They do if the CPU computes them faster in it.
    """
    return dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def fuse_weight_grads(rows: int, gates: int, outputs: int, inputs: int) -> bool:
    """Return True if one product for dW_h and dW_x saves more than concatenating h and x costs.

    It does so with torch's products alone.
    """
    few = rows * (outputs + inputs) <= 2**20 and gates > outputs + inputs
    return few and native.load() is None


def hidden_scale(draw: Draw, examples: Tensor, units: int, dtype: torch.dtype) -> Tensor:
    """Return [B, units]: the factors of h before it enters the gates, one mask for all steps."""
    (mask,) = masks_of([draw], examples.new_zeros(1), examples, units)
    return kept_scale(draw, mask, dtype)[0].contiguous()


@recording.step
def scratch(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return uninitialised memory for one call: released by an earlier call, or new."""
    if (
        not torch.are_deterministic_algorithms_enabled()
    ):  # deterministic mode fills new memory with NaN, to find errors
        buffer = _spare.take(dtype, math.prod(shape))
        if buffer is not None:
            return buffer.view(shape)
    new = like.new_empty(shape, dtype=dtype)
    prepare(new)
    return new


@recording.step
def release(*buffers: Tensor | None) -> None:
    """Keep scratch memory for the next call.

    Its pages have been touched already, which is half of the cost of a small call.
    """
    for buffer in {id(b): b for b in buffers if b is not None}.values():
        if (
            not buffer.is_inference()
        ):  # an inference tensor can only be written to in inference mode
            _spare.keep(buffer.view(-1))


class _Spare:
    """Free scratch memory between calls, by dtype and size; above `most` bytes all is freed."""

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
    """Return False: the gates are always stored gate by gate."""
    return False


def multiplies_x(w_ih: Tensor) -> bool:
    """Return True if the loop should compute x·Wx itself, step by step.

    It should if W_x stays in the cache together with W_h.
    """
    return native.load() is not None and w_ih.nbytes <= 2**19


partial_sums = torch.get_num_threads  # the number of partial sums of the backward pass


def side_by_side(runs: Sequence[Run]) -> bool:
    """Return False: loops do not gain by running concurrently, since one uses all threads."""
    return False


def forward(loops: Sequence[Loop]) -> None:
    """Run the forward pass of loops; results are written into each `Loop`."""
    for loop in loops:
        if (cell := _cell_of(loop)) is None:
            if loop.masks:
                raise RuntimeError(
                    f"masks that are given need compiled code: {_uncompiled(loop.cell)}; try "
                    "backend='reference'"
                )
            _say_once(f"{_uncompiled(loop.cell)}. It runs in torch calls, more slowly.")
            recording.refuse("the loop runs in torch calls")
            fallback.forward(loop)
        else:
            _call(cell, "forward", loop, None)


def backward(loops: Sequence[tuple[Loop, LoopGrads]]) -> None:
    """Run the backward pass of loops; gradients are written into each `LoopGrads`."""
    for loop, grads in loops:
        if (cell := _cell_of(loop)) is None:
            recording.refuse("the loop runs in torch calls")
            fallback.backward(loop, grads)
        else:
            _call(cell, "backward", loop, grads)


def _cell_of(loop: Loop) -> native.Cell | None:
    """Return the compiled functions of a loop's cell; None if there is no compiler."""
    return native.cell(loop.cell) if native.load() is not None else None


@recording.step
def product(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Write a·b to `out`; return False if this is not possible here.

    Every row is computed by itself. Its bits do not depend on the number of rows or threads.
    torch's product uses different methods for one row, a few rows and many rows, and these round
    differently.
    """
    library = native.load()
    if library is None or a.dtype not in (torch.float32, torch.float64):
        return False
    kind = "double" if a.dtype == torch.float64 else "float"
    (rows, depth), columns = a.shape, b.shape[1]
    if depth == 0 or out.numel() == 0:
        out.zero_()
        return True
    size = getattr(library, f"zoneout_packed_size_{kind}")(rows, depth, columns)
    packed = scratch(a, size + 64 // a.element_size(), dtype=a.dtype) if size else None
    at = 0 if packed is None else (address(packed, "packed") + 63) // 64 * 64
    left, right = address(a, "a", a.dtype, -1), address(b, "b", a.dtype, -1, gaps=True)
    getattr(library, f"zoneout_product_{kind}")(
        rows,
        depth,
        columns,
        left,
        right,
        *b.stride(),
        address(out, "out", a.dtype, -1),
        at,
        torch.get_num_threads(),
    )
    release(packed)
    return True


def transposed_product(a: Tensor, b: Tensor, out: Tensor, add: bool) -> bool:
    """Write aᵀ·b to `out`, or add it there; return False if this is not possible here.

    The rows of a and b are those of all steps, so the gradient of every matrix is such a product.
    torch's (MKL) takes twice as long on AMD's processors. A sum has the same bits for any number of
    threads.
    """
    library = native.load()
    if library is None or a.dtype not in (torch.float32, torch.float64) or not len(a):
        return False
    if b.shape[1] < _MANY_COLUMNS:  # memory is what limits these, and a vector would be half empty
        return False
    if any(v.stride(1) != 1 for v in (a, b, out)):
        return False
    if len(b) != len(a) or out.shape != (a.shape[1], b.shape[1]):
        return False  # torch raises
    kind = "double" if a.dtype == torch.float64 else "float"
    threads = torch.get_num_threads()
    work = scratch(a, getattr(library, f"zoneout_sum_size_{kind}")(threads), dtype=a.dtype)
    each = {"a": a, "b": b, "out": out}
    args = native.Sum(
        a.shape[1], len(a), b.shape[1], a.stride(0), b.stride(0), out.stride(0), int(add), threads,
        *(address(v, name, a.dtype, -1, gaps=True) for name, v in each.items()),
        address(work, "work"),
    )  # fmt: skip
    recording.call(getattr(library, f"zoneout_sum_{kind}"), args)
    release(work)
    return True


_MANY_COLUMNS = 4


def prepare(*buffers: Tensor | None) -> None:
    """Request huge pages for new buffers that will be overwritten completely.

    The first touch of a small page costs microseconds, and a training step touches tens of
    thousands of pages.
    """
    large = [v for v in buffers if v is not None and v.nbytes >= _LARGE]
    if large and _advice() is not None:
        _use_huge_pages(large)


@recording.step
def _use_huge_pages(buffers: list[Tensor]) -> None:
    for buffer in buffers:
        at = address(buffer, "buffer")
        start = -(-at // _PAGE) * _PAGE
        size = (at + buffer.nbytes) // _PAGE * _PAGE - start
        _advice()(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


_PAGE, _LARGE = 2**21, 2**22


@cache
def _advice() -> Any:
    """Return the system's `madvise` function, or None if it has no huge pages."""
    return getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None


@cache
def _say_once(what: str) -> None:
    warnings.warn(what, stacklevel=2)


def _uncompiled(cell: Definition) -> str:
    """Return a sentence that says what has no compiled functions, and why."""
    if native.load() is None:
        return f"zoneout's compiled loop is not available: {native.why_not()}"
    return f"the cell {cell.name!r} is not compiled (LSTM, GRU and RNN are): {native.why_not()}"


def _call(cell: native.Cell, name: str, loop: Loop, grads: LoopGrads | None) -> None:
    library = native.load()
    kind = "double" if loop.gates.dtype == torch.float64 else "float"
    args = _arguments(loop, grads)
    args.cell = getattr(cell, kind)
    size = getattr(library, f"zoneout_work_size_{kind}")(ctypes.byref(args))
    work = scratch(loop.gates, size + 64, dtype=torch.uint8)
    args.work = address(work, "work")
    recording.call(getattr(library, f"zoneout_{name}_{kind}"), args, fixed=("cell",))
    release(work)


_INTEGERS, _BITS = ("counts", "offsets", "lengths", "examples"), ("resets",)
_NUMBERS = (
    "scale_h", "x", "w_ih", "w_hh", "b_x", "b_h", "w_hr", "gates", "hats",
    "mean_x", "var_x", "mean_h", "var_h", "mean_c", "var_c",
)  # fmt: skip
_SEVERAL = ("parameters", "matrices", "initial", "reset_to", "states", "slots", "inner")
_SEVERAL_BACK = ("dstates", "dreset", "dparameters", "dinner", "ins")
_BACKWARD = (
    "dy",
    "dgx",
    "dgh",
    "dsh",
    "du",
    "u",
    "dnc",
    "chat",
    "dx",
    "dscale_x",
    "dscale_h",
    "dscale_c",
    "dshift_c",
)
_NORM = {"norm_x": "scale_x", "norm_h": "scale_h", "norm_c": "scale_c", "norm_c_shift": "shift_c"}


def _arguments(loop: Loop, grads: LoopGrads | None) -> native.Loop:
    """Return the struct of loop.h; missing fields are zero.

    The struct is valid only as long as the tensors exist.
    """
    args, norm, numbers = native.Loop(), loop.norm, loop.gates.dtype
    args.steps, args.batch, args.threads = loop.steps, loop.batch, torch.get_num_threads()
    args.hidden, args.outputs = loop.hidden, loop.outputs
    args.heads = loop.cell.heads if loop.cell.has_r else 0
    args.first_step, args.reverse = loop.first_step, loop.reverse
    args.inputs = 0 if loop.x is None else loop.x.shape[1]
    for name, draw in loop.draws.items():
        stream = _given(loop, grads, name) if name in loop.masks else stream_of(draw)
        if name == "update":
            args.update_noise = stream
        else:
            kind, k = kind_of(draw.rule)
            {"drop": args.dropped, "add": args.added}.get(kind, args.state_noise)[k] = stream
    _put(args, loop.__dict__, _INTEGERS, torch.int64)
    _put(args, loop.__dict__, _BITS, torch.bool)
    _put(args, loop.__dict__, _NUMBERS, numbers)
    _put_several(args, loop.__dict__, _SEVERAL, numbers)
    for k, matrix in enumerate(loop.matrices):
        args.matrix_rows[k], args.matrix_columns[k] = matrix.shape
    if norm is not None:
        args.norm = 1 if norm.over == "units" else 2
        args.norm_given, args.eps = loop.given, norm.eps
        _put(args, {name: getattr(norm, own) for name, own in _NORM.items()}, _NORM, numbers)
    if grads is not None:
        _put(args, grads.__dict__, _BACKWARD, numbers)
        _put_several(args, grads.__dict__, _SEVERAL_BACK, numbers)
        _put_several(args, {"dseen": (None, *grads.dseen)}, ("dseen",), numbers)
    return args


def _given(loop: Loop, grads: LoopGrads | None, name: str) -> native.Stream:
    """Return the C struct of a stream whose mask is given."""
    rule, mask = loop.draws[name].rule, loop.masks[name]
    gradient = None if grads is None else grads.dmasks.get(name)
    return native.Stream(
        mode=3,
        zero=rule.by == "zero",
        hold=rule.holds_gate,
        given=address(mask, "mask", loop.gates.dtype, -1),
        dgiven=None if gradient is None else address(gradient, "mask", loop.gates.dtype, -1),
    )


def _put(
    args: native.Loop, tensors: dict[str, Any], names: Iterable[str], dtype: torch.dtype
) -> None:
    for name in names:
        if (value := tensors[name]) is not None:
            setattr(args, name, address(value, name, dtype, -1))


def _put_several(
    args: native.Loop, tensors: dict[str, Any], names: Iterable[str], dtype: torch.dtype
) -> None:
    for name in names:
        array = getattr(args, name)
        for k, value in enumerate(tensors[name]):
            if value is not None:
                array[k] = address(value, name, dtype, -1)


register(cpu_product=product, cpu_transposed=transposed_product)
