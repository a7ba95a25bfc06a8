"""Matrix products by direct calls of cuBLAS and cuBLASLt, the libraries that torch uses.

`times` is a float32 product in the precision of recurrent layers, whatever torch's setting for its
own products is. `product` is the product of a step: it is the same at every step, only the
addresses change. Its algorithm is selected once per shape, and a call creates no other objects.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...memory import address
from .compiler import _wheels, tf32

_KINDS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
_FLOAT = 0
_EXACT, _TF32 = 68, 77  # cublasComputeType_t
_DEFAULT = -1  # cublasGemmAlgo_t
# Attribute of a product: CUBLASLT_MATMUL_DESC_TRANSA.
_TRANSPOSE_FIRST = 3
# Attributes of a layout: CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, …_STRIDED_BATCH_OFFSET.
_COUNT, _DISTANCE = 5, 6
# Attributes of a preference: CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, …_REDUCTION_SCHEME_MASK,
# …_MIN_ALIGNMENT_A_BYTES to D.
_WORKSPACE, _REDUCTION, _ALIGNMENT = 1, 3, (5, 6, 7, 8)
# A separate kernel adds partial sums. In-place addition would make the order depend on timing.
_IN_ORDER = 2 | 4
_MOST_WORKSPACE = 32 * 2**20  # bytes
_ALIGNED = 16  # bytes: the largest alignment requested


def times(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> Tensor:
    """Write a·b to `out`, or add it with `add`, and return `out`: float32 and contiguous."""
    (rows, depth), columns = a.shape, b.shape[1]
    if out.numel() == 0 or (add and depth == 0):
        return out
    if depth == 0:
        return out.zero_()
    device = out.get_device()
    a_turned, a_pitch, a = _lies(a)
    b_turned, b_pitch, b = _lies(b)
    with torch.cuda.device(device) if device != torch.cuda.current_device() else nullcontext():
        # The handle uses the current stream and torch's workspace.
        handle = torch.cuda.current_blas_handle()
        # The handle may be set to TF32. Changing that is safe: the handle belongs to this thread,
        # and torch sets its mode at every call.
        if not tf32():
            _check(library().cublasSetMathMode(ctypes.c_void_p(handle), 0))
        # cuBLAS is column-major, so it computes outᵀ = bᵀ·aᵀ.
        _check(
            _gemm()(
                handle,
                b_turned,
                a_turned,
                columns,
                rows,
                depth,
                _ONE,
                address(b, "b", torch.float32, device, gaps=True),
                _FLOAT,
                b_pitch,
                address(a, "a", torch.float32, device, gaps=True),
                _FLOAT,
                a_pitch,
                _ONE if add else _ZERO,
                address(out, "out", torch.float32, device),
                _FLOAT,
                columns,
                _TF32 if tf32() else _EXACT,
                _DEFAULT,
            )
        )
    return out


def _lies(v: Tensor) -> tuple[int, int, Tensor]:
    """Return the layout of a matrix: (1 if column-major else 0, leading dimension, matrix).

    The matrix is copied if its strides fit neither layout.
    """
    (rows, columns), (down, across) = v.shape, v.stride()
    if across == 1 and (down >= columns or rows == 1):
        return 0, max(down, columns), v
    if down == 1 and (across >= rows or columns == 1):
        return 1, max(across, rows), v
    return 0, columns, v.contiguous()


_ONE, _ZERO = ctypes.pointer(ctypes.c_float(1.0)), ctypes.pointer(ctypes.c_float(0.0))


@cache
def _gemm() -> Any:
    """Return cublasGemmEx, which takes the precision as an argument."""
    _i, _p = ctypes.c_int, ctypes.c_void_p
    gemm = library().cublasGemmEx
    gemm.argtypes = [_p, *[_i] * 5, _p, _p, _i, _i, _p, _i, _i, _p, _p, _i, _i, _i, _i]
    return gemm


def product(
    w: Tensor, rows: int, out: torch.dtype, transposed: bool, add: bool = False, parts: int = 1
) -> Callable[[int, int], None]:
    """Return a function of the addresses of a and b that computes b = a·W, or b += a·W.

    Both are contiguous, [rows, ·]. `transposed`: W is stored as [columns of b, columns of a].
    `parts`: number of partial sums, left unadded in b, [parts, rows, ·]. The function is valid on
    the current stream and for one pass. Within it, addresses must differ by multiples of the size
    of a or b, so that their alignment stays the same.
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
                ctypes.c_void_p(torch.cuda.current_blas_handle()),
                how.product,
                ctypes.byref(one),
                at,
                how.w,
                a,
                how.a,
                ctypes.byref(beta),
                b,
                how.b,
                b,
                how.b,
                ctypes.byref(how.algorithm),
                ctypes.c_void_p(address(memory, "memory")),
                ctypes.c_size_t(how.workspace),
                ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(w.get_device())),
            )
        )

    def take(a_at: int, b_at: int) -> None:
        if not arguments:
            prepare(a_at, b_at)
        a.value, b.value = a_at, b_at
        if status := call(*arguments):
            raise RuntimeError(f"cuBLAS: error {status}")

    return take


def _alignment(*addresses: int) -> int:
    """Return the largest power of two, at most 16, that divides all addresses.

    >>> _alignment(512, 24), _alignment(6)
    (8, 2)
    """
    at = _ALIGNED
    while any(address % at for address in addresses):
        at //= 2
    return at


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and the workspace that it needs."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class _Plan(NamedTuple):
    """The cuBLASLt descriptors, algorithm and workspace size (bytes) of a product."""

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
    """Select the algorithm of a product; `shape`: row length of W, columns, depth, rows, parts."""
    pitch, columns, depth, rows, parts = shape
    each = depth // parts
    # cuBLASLt is column-major, so it computes bᵀ = Wᵀ·aᵀ.
    product = _made(
        "cublasLtMatmulDescCreate", ctypes.c_int(_EXACT if exact else _TF32), ctypes.c_int(_FLOAT)
    )
    _set("cublasLtMatmulDescSetAttribute", product, _TRANSPOSE_FIRST, ctypes.c_int(transposed))
    of_w = (each, columns, pitch, each) if transposed else (columns, each, pitch, each * columns)
    w = _layout(kind, *of_w, parts)
    a, b = (
        _layout(kind, each, rows, depth, each, parts),
        _layout(out, columns, rows, columns, rows * columns, parts),
    )
    wish = _made("cublasLtMatmulPreferenceCreate")
    _set("cublasLtMatmulPreferenceSetAttribute", wish, _WORKSPACE, ctypes.c_size_t(_MOST_WORKSPACE))
    _set("cublasLtMatmulPreferenceSetAttribute", wish, _REDUCTION, ctypes.c_uint32(_IN_ORDER))
    for name, value in zip(_ALIGNMENT, (*aligned, aligned[-1])):
        _set("cublasLtMatmulPreferenceSetAttribute", wish, name, ctypes.c_uint32(value))
    best, count = _Algorithm(), ctypes.c_int()
    with torch.cuda.device(device):
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        given = (
            handle,
            product,
            w,
            a,
            b,
            b,
            wish,
            ctypes.c_int(1),
            ctypes.byref(best),
            ctypes.byref(count),
        )
        _check(library("Lt").cublasLtMatmulAlgoGetHeuristic(*given))
    if not count.value:
        raise RuntimeError(
            f"cuBLAS knows no way to take a product of {rows} × {depth} by {depth} × {columns}"
        )
    return _Plan(product, w, a, b, best, best.workspace)


def _layout(
    kind: torch.dtype, down: int, across: int, pitch: int, distance: int, count: int
) -> Any:
    """Create the column-major layout of a matrix, or of `count`, `distance` elements apart."""
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
    """Return the cuBLAS library, or cuBLASLt with `kind="Lt"`; torch has loaded both already.

    A cuBLAS handle is also valid for cuBLASLt.
    """
    major = (torch.version.cuda or "12").split(".")[0]
    names = [f"libcublas{kind}.so.{major}", f"cublas{kind}64_{major}.dll"]
    for name in (*names, *map(str, _wheels(names))):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(
        f"torch's library for products was not found (looked for {', '.join(names)})"
    )
