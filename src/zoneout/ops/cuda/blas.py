"""Products, by the libraries that torch takes its own with, called straight.

`times` is a product of float32 in the precision of recurrent layers, which torch's setting for its own products does
not touch. `product` is that of a step: the same at every step, only its addresses change. How it is best taken is asked
once for a shape, and nothing is made for a call but the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..memory import address
from .compiler import _wheels, tf32

_KINDS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
_FLOAT = 0
_EXACT, _TF32 = 68, 77  # cublasComputeType_t
_DEFAULT = -1  # cublasGemmAlgo_t
_TRANSPOSE_FIRST = 3  # of a product: CUBLASLT_MATMUL_DESC_TRANSA
_COUNT, _DISTANCE = 5, 6  # of a layout: CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, …_STRIDED_BATCH_OFFSET
# Of a preference: CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, …_REDUCTION_SCHEME_MASK, …_MIN_ALIGNMENT_A_BYTES to D.
_WORKSPACE, _REDUCTION, _ALIGNMENT = 1, 3, (5, 6, 7, 8)
_IN_ORDER = 2 | 4  # parts are added in a kernel of their own: not in place, where whoever comes first is first
_MOST_WORKSPACE = 32 * 2**20  # bytes
_ALIGNED = 16  # bytes: more than that is not asked for


def times(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> Tensor:
    """`out`, of float32 and without gaps: a·b, or that added to it."""
    (rows, depth), columns = a.shape, b.shape[1]
    if out.numel() == 0 or (add and depth == 0):
        return out
    if depth == 0:
        return out.zero_()
    device = out.get_device()
    a_turned, a_pitch, a = _lies(a)
    b_turned, b_pitch, b = _lies(b)
    with torch.cuda.device(device) if device != torch.cuda.current_device() else nullcontext():
        handle = torch.cuda.current_blas_handle()  # in the current stream, with torch's memory to work in
        if not tf32():  # the handle may be set to TF32; it is the calling thread's, and torch sets it at every call
            _check(library().cublasSetMathMode(ctypes.c_void_p(handle), 0))
        # The library counts columns first, so it is asked for outᵀ = bᵀ·aᵀ.
        _check(
            _gemm()(
                handle, b_turned, a_turned, columns, rows, depth, _ONE,
                address(b, "b", torch.float32, device, gaps=True), _FLOAT, b_pitch,
                address(a, "a", torch.float32, device, gaps=True), _FLOAT, a_pitch, _ONE if add else _ZERO,
                address(out, "out", torch.float32, device), _FLOAT, columns,
                _TF32 if tf32() else _EXACT, _DEFAULT,
            )
        )  # fmt: skip
    return out


def _lies(v: Tensor) -> tuple[int, int, Tensor]:
    """How a matrix lies: 1 if column by column; numbers from one row, or column, to the next; the matrix, or a copy."""
    (rows, columns), (down, across) = v.shape, v.stride()
    if across == 1 and (down >= columns or rows == 1):
        return 0, max(down, columns), v
    if down == 1 and (across >= rows or columns == 1):
        return 1, max(across, rows), v
    return 0, columns, v.contiguous()


_ONE, _ZERO = ctypes.pointer(ctypes.c_float(1.0)), ctypes.pointer(ctypes.c_float(0.0))


@cache
def _gemm() -> Any:
    """cuBLAS's product with a precision of its own."""
    _i, _p = ctypes.c_int, ctypes.c_void_p
    gemm = library().cublasGemmEx
    gemm.argtypes = [_p, *[_i] * 5, _p, _p, _i, _i, _p, _i, _i, _p, _p, _i, _i, _i, _i]
    return gemm


def product(
    w: Tensor, rows: int, out: torch.dtype, transposed: bool, add: bool = False, parts: int = 1
) -> Callable[[int, int], None]:
    """A function of the addresses of a and b that takes b = a·W, or b += a·W: [rows, ·], without gaps.

    `transposed`: W is kept as [columns of b, columns of a]. `parts`: the sum is left in so many parts, b is
    [parts, rows, ·]. Good for the current stream and the length of one pass, in which addresses are whole numbers of
    such blocks apart.
    """
    columns, depth = w.shape if transposed else (w.shape[1], w.shape[0])
    assert depth % parts == 0
    one, beta = ctypes.c_float(1.0), ctypes.c_float(float(add))
    a, b, at = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(address(w, "W"))
    call = library("Lt").cublasLtMatmul
    arguments: list[Any] = []
    alive: list[Tensor] = []
    exact = not (w.dtype == torch.float32 and tf32())

    def prepare(a_at: int, b_at: int) -> None:
        aligned = (
            _alignment(address(w, "W")),
            _alignment(a_at, rows * depth * w.element_size()),
            _alignment(b_at, rows * columns * out.itemsize),
        )
        shape = (w.shape[1], columns, depth, rows, parts)
        how = _plan(w.get_device(), w.dtype, out, shape, transposed, exact, aligned)
        memory = torch.empty(max(1, how.workspace), dtype=torch.uint8, device=w.device)
        alive.append(memory)
        arguments.extend(
            (
                ctypes.c_void_p(torch.cuda.current_blas_handle()), how.product, ctypes.byref(one), at, how.w, a, how.a,
                ctypes.byref(beta), b, how.b, b, how.b, ctypes.byref(how.algorithm),
                ctypes.c_void_p(address(memory, "memory")), ctypes.c_size_t(how.workspace),
                ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(w.get_device())),
            )
        )  # fmt: skip

    def take(a_at: int, b_at: int) -> None:
        if not arguments:
            prepare(a_at, b_at)
        a.value, b.value = a_at, b_at
        if status := call(*arguments):
            raise RuntimeError(f"cuBLAS: error {status}")

    return take


def _alignment(*addresses: int) -> int:
    """The largest power of two up to 16 that all are multiples of.

    >>> _alignment(512, 24), _alignment(6)
    (8, 2)
    """
    at = _ALIGNED
    while any(address % at for address in addresses):
        at //= 2
    return at


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and what it needs."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class _Plan(NamedTuple):
    """How a product is taken."""

    product: Any
    w: Any
    a: Any
    b: Any
    algorithm: _Algorithm
    workspace: int


@cache
def _plan(
    device: int,
    kind: torch.dtype,
    out: torch.dtype,
    shape: tuple[int, int, int, int, int],
    transposed: bool,
    exact: bool,
    aligned: tuple[int, int, int],
) -> _Plan:
    """Ask for the way to take a product of this shape: a row of W, columns, depth, rows and parts."""
    pitch, columns, depth, rows, parts = shape
    each = depth // parts
    # The library counts columns first, so it is asked for bᵀ = Wᵀ·aᵀ.
    product = _made("cublasLtMatmulDescCreate", ctypes.c_int(_EXACT if exact else _TF32), ctypes.c_int(_FLOAT))
    _set("cublasLtMatmulDescSetAttribute", product, _TRANSPOSE_FIRST, ctypes.c_int(transposed))
    of_w = (each, columns, pitch, each) if transposed else (columns, each, pitch, each * columns)
    w = _layout(kind, *of_w, parts)
    a, b = _layout(kind, each, rows, depth, each, parts), _layout(out, columns, rows, columns, rows * columns, parts)
    wish = _made("cublasLtMatmulPreferenceCreate")
    _set("cublasLtMatmulPreferenceSetAttribute", wish, _WORKSPACE, ctypes.c_size_t(_MOST_WORKSPACE))
    _set("cublasLtMatmulPreferenceSetAttribute", wish, _REDUCTION, ctypes.c_uint32(_IN_ORDER))
    for name, value in zip(_ALIGNMENT, (*aligned, aligned[-1])):
        _set("cublasLtMatmulPreferenceSetAttribute", wish, name, ctypes.c_uint32(value))
    best, count = _Algorithm(), ctypes.c_int()
    with torch.cuda.device(device):
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        given = (handle, product, w, a, b, b, wish, ctypes.c_int(1), ctypes.byref(best), ctypes.byref(count))
        _check(library("Lt").cublasLtMatmulAlgoGetHeuristic(*given))
    if not count.value:
        raise RuntimeError(f"cuBLAS knows no way to take a product of {rows} × {depth} by {depth} × {columns}")
    return _Plan(product, w, a, b, best, best.workspace)


def _layout(kind: torch.dtype, down: int, across: int, pitch: int, distance: int, count: int) -> Any:
    """How a matrix lies, counted column by column; `count` of them, `distance` numbers from one to the next."""
    sizes = (ctypes.c_uint64(down), ctypes.c_uint64(across), ctypes.c_int64(pitch))
    made = _made("cublasLtMatrixLayoutCreate", ctypes.c_int(_KINDS[kind]), *sizes)
    if count > 1:
        _set("cublasLtMatrixLayoutSetAttribute", made, _COUNT, ctypes.c_int32(count))
        _set("cublasLtMatrixLayoutSetAttribute", made, _DISTANCE, ctypes.c_int64(distance))
    return made


def _made(function: str, *arguments: Any) -> Any:
    made = ctypes.c_void_p()
    _check(getattr(library("Lt"), function)(ctypes.byref(made), *arguments))
    return made


def _set(function: str, of: Any, name: int, value: Any) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _check(getattr(library("Lt"), function)(of, ctypes.c_int(name), ctypes.byref(value), size))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS: error {status}")


@cache
def library(kind: str = "") -> ctypes.CDLL:
    """cuBLAS, or of its kind cuBLASLt, which torch has loaded already; a handle of cuBLAS is one of both."""
    major = (torch.version.cuda or "12").split(".")[0]
    names = [f"libcublas{kind}.so.{major}", f"cublas{kind}64_{major}.dll"]
    for name in (*names, *map(str, _wheels(names))):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"torch's library for products was not found (looked for {', '.join(names)})")
