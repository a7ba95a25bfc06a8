"""Matrix products by direct calls of cuBLAS and cuBLASLt, the libraries that torch uses.

`times` is a float32 product in the precision of recurrent layers, whatever torch's setting for its
own products is. `product` is the product of a step: it is the same at every step, only the
addresses change. Its algorithm is selected once per shape, and a call creates no other objects.

cuBLAS selects an algorithm by the number of rows, so by default the bits of a row depend on it.
With the environment variable ZONEOUT_BATCH_INVARIANT=1 they do not: see `_invariant_plan`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import recording
from ...memory import address, in_memory
from .compiler import _wheels, tf32

_DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
_FLOAT32 = 0
_EXACT, _TF32 = 68, 77  # cublasComputeType_t
_DEFAULT = -1  # cublasGemmAlgo_t
_NOT_SUPPORTED = 15  # cublasStatus_t
# Attribute of a product: CUBLASLT_MATMUL_DESC_TRANSA.
_TRANSPOSE_FIRST = 3
# Attributes of a layout: CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, …_STRIDED_BATCH_OFFSET.
_COUNT, _DISTANCE = 5, 6
# Attributes of a preference: CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, …_REDUCTION_SCHEME_MASK,
# …_MIN_ALIGNMENT_A_BYTES to D.
_WORKSPACE, _REDUCTION, _ALIGNMENT = 1, 3, (5, 6, 7, 8)
# A separate kernel adds partial sums. In-place addition would make the order depend on timing.
_IN_ORDER = 2 | 4
_NEVER = 0  # no partial sums: one accumulator adds all products of an element
_MOST_WORKSPACE = 32 * 2**20  # bytes
_ALIGNED = 16  # bytes: the largest alignment requested
# Batch invariance: rows for which the standard algorithm is selected; the most rows on which
# another one is compared with it; how many others are tried.
_MANY, _TRIED, _OTHERS = 4096, 512, 16


def batch_invariant() -> bool:
    """Return True if a row of a product must have the same bits for any number of rows.

    The environment variable ZONEOUT_BATCH_INVARIANT=1 requests it.
    """
    return os.environ.get("ZONEOUT_BATCH_INVARIANT", "0") == "1"


@recording.step
def times(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> Tensor:
    """Write a·b to `out`, or add it with `add`, and return `out`: float32 and contiguous."""
    (rows, depth), columns = a.shape, b.shape[1]
    if out.numel() == 0 or (add and depth == 0):
        return out
    if depth == 0:
        return out.zero_()
    device = out.get_device()
    a_transposed, a_pitch, a = _strides_of(a)
    b_transposed, b_pitch, b = _strides_of(b)
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
                b_transposed,
                a_transposed,
                columns,
                rows,
                depth,
                _ONE,
                address(b, "b", torch.float32, device, gaps=True),
                _FLOAT32,
                b_pitch,
                address(a, "a", torch.float32, device, gaps=True),
                _FLOAT32,
                a_pitch,
                _ONE if add else _ZERO,
                address(out, "out", torch.float32, device),
                _FLOAT32,
                columns,
                _TF32 if tf32() else _EXACT,
                _DEFAULT,
            )
        )
    return out


@recording.step
def by_rows(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Write a·b to `out` such that no row depends on the number of rows; False if not requested.

    `out` is contiguous.
    """
    if not batch_invariant() or a.dtype not in _DATA_TYPES or out.numel() == 0 or a.shape[1] == 0:
        return False
    (rows, depth), columns, kind, device = a.shape, b.shape[1], a.dtype, a.get_device()
    is_transposed, pitch, b = _strides_of(b)
    a, each = in_memory(a), a.element_size()
    # The alignment of a row must follow from its length.
    if address(a, "a") % _alignment(depth * each):
        a = a.clone()
    aligned = (
        _alignment(address(b, "b", gaps=True), pitch * each),
        _alignment(depth * each),
        _alignment(columns * out.element_size()),
    )
    shape, exact = (pitch, columns, depth, rows, 1), not (kind == torch.float32 and tf32())
    problem = _Problem(device, kind, out.dtype, shape, bool(is_transposed), exact, aligned)
    _check(_run(_invariant_plan(problem, add=False), b, a, out, False, device))
    return True


def _strides_of(v: Tensor) -> tuple[int, int, Tensor]:
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
    i, p = ctypes.c_int, ctypes.c_void_p
    gemm = library().cublasGemmEx
    gemm.argtypes = [p, *[i] * 5, p, p, i, i, p, i, i, p, p, i, i, i, i]
    return gemm


class Operands(ctypes.Structure):
    """The addresses of W, a and b of a product."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("w", "a", "b")]


def product(
    w: Tensor, rows: int, out: torch.dtype, transposed: bool, add: bool = False, splits: int = 1
) -> Callable[[int, int], None]:
    """Return a function of the addresses of a and b that computes b = a·W, or b += a·W.

    Both are contiguous, [rows, ·]. `transposed`: W is stored as [columns of b, columns of a].
    `splits`: the depth is split into that many sums. They are left unadded in b, [splits, rows, ·].
    The function is valid on the current stream and for one pass. Within it, addresses must differ
    by multiples of the size of a or b, so that their alignment stays the same.
    """
    columns, depth = w.shape if transposed else (w.shape[1], w.shape[0])
    assert depth % splits == 0
    one, beta = ctypes.c_float(1.0), ctypes.c_float(float(add))
    a, b, at = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(address(w, "W"))
    call = library("Lt").cublasLtMatmul
    arguments: list[Any] = []
    alive: list[Tensor] = []
    exact = not (w.dtype == torch.float32 and tf32())

    def select(a_at: int, b_at: int) -> _Plan:
        invariant = batch_invariant()
        times_rows = 1 if invariant else rows
        aligned = (
            _alignment(address(w, "W")),
            _alignment(a_at, times_rows * depth * w.element_size()),
            _alignment(b_at, times_rows * columns * out.itemsize),
        )
        shape = (w.shape[1], columns, depth, rows, splits)
        problem = _Problem(w.get_device(), w.dtype, out, shape, transposed, exact, aligned)
        return _invariant_plan(problem, add) if invariant else _plan(problem)

    if recording.is_recording():
        return lambda a_at, b_at: recording.call(
            partial(_run_at, select(a_at, b_at), add, w.get_device()),
            Operands(address(w, "W"), a_at, b_at),
        )

    def prepare(a_at: int, b_at: int) -> None:
        plan = select(a_at, b_at)
        memory = torch.empty(max(1, plan.workspace), dtype=torch.uint8, device=w.device)
        alive.append(memory)
        arguments.extend(
            (
                ctypes.c_void_p(torch.cuda.current_blas_handle()),
                plan.product,
                ctypes.byref(one),
                at,
                plan.w,
                a,
                plan.a,
                ctypes.byref(beta),
                b,
                plan.b,
                b,
                plan.b,
                ctypes.byref(plan.algorithm),
                ctypes.c_void_p(address(memory, "memory")),
                ctypes.c_size_t(plan.workspace),
                ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(w.get_device())),
            )
        )

    def multiply(a_at: int, b_at: int) -> None:
        if not arguments:
            prepare(a_at, b_at)
        a.value, b.value = a_at, b_at
        if status := call(*arguments):
            raise RuntimeError(f"cuBLAS: error {status}")

    return multiply


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


class _Problem(NamedTuple):
    """What an algorithm is selected for."""

    device: int
    kind: torch.dtype  # of the operands
    out: torch.dtype
    shape: tuple[int, int, int, int, int]  # row length of W, columns, depth, rows, splits
    transposed: bool
    exact: bool
    aligned: tuple[int, int, int]  # W, a and b, bytes

    def with_rows(self, rows: int) -> _Problem:
        return self._replace(shape=(*self.shape[:3], rows, self.shape[4]))


@cache
def _plan(problem: _Problem) -> _Plan:
    """Select the algorithm of a product."""
    descriptors = _descriptors(problem)
    best = next(_candidates(problem, descriptors, _IN_ORDER, 1), None)
    if best is None:
        _, columns, depth, rows, _ = problem.shape
        raise RuntimeError(
            f"cuBLAS has no algorithm for a product of {rows} × {depth} by {depth} × {columns}"
        )
    return _Plan(*descriptors, best, best.workspace)


def _descriptors(problem: _Problem) -> tuple[Any, Any, Any, Any]:
    """Create the descriptors of a product and of the layouts of W, a and b."""
    pitch, columns, depth, rows, splits = problem.shape
    each = depth // splits
    # cuBLASLt is column-major, so it computes bᵀ = Wᵀ·aᵀ.
    product = _create(
        "cublasLtMatmulDescCreate",
        ctypes.c_int(_EXACT if problem.exact else _TF32),
        ctypes.c_int(_FLOAT32),
    )
    _set(
        "cublasLtMatmulDescSetAttribute",
        product,
        _TRANSPOSE_FIRST,
        ctypes.c_int(problem.transposed),
    )
    w_layout = (
        (each, columns, pitch, each) if problem.transposed else (columns, each, pitch, each * pitch)
    )
    w = _layout(problem.kind, *w_layout, splits)
    a = _layout(problem.kind, each, rows, depth, each, splits)
    b = _layout(problem.out, columns, rows, columns, rows * columns, splits)
    return product, w, a, b


def _candidates(
    problem: _Problem, descriptors: tuple[Any, Any, Any, Any], reduction: int, most: int
) -> Iterator[_Algorithm]:
    """Yield at most `most` algorithms, the presumably fastest first."""
    product, w, a, b = descriptors
    preference = _create("cublasLtMatmulPreferenceCreate")
    _set(
        "cublasLtMatmulPreferenceSetAttribute",
        preference,
        _WORKSPACE,
        ctypes.c_size_t(_MOST_WORKSPACE),
    )
    _set("cublasLtMatmulPreferenceSetAttribute", preference, _REDUCTION, ctypes.c_uint32(reduction))
    for name, value in zip(_ALIGNMENT, (*problem.aligned, problem.aligned[-1])):
        _set("cublasLtMatmulPreferenceSetAttribute", preference, name, ctypes.c_uint32(value))
    results, count = (_Algorithm * most)(), ctypes.c_int()
    with torch.cuda.device(problem.device):
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        arguments = (
            handle,
            product,
            w,
            a,
            b,
            b,
            preference,
            ctypes.c_int(most),
            results,
            ctypes.byref(count),
        )
        status = library("Lt").cublasLtMatmulAlgoGetHeuristic(*arguments)
    if status != _NOT_SUPPORTED:  # else there is none
        _check(status)
        yield from (result for result in results[: count.value] if result.state == 0)


_plans: dict[tuple[_Problem, bool], _Plan] = {}
_selected: dict[tuple[_Problem, bool], _Algorithm] = {}


def _invariant_plan(problem: _Problem, add: bool) -> _Plan:
    """Select an algorithm such that the bits of a row do not depend on the number of rows.

    One standard algorithm is selected for all numbers of rows: one without partial sums. For few
    rows others are much faster. Such an algorithm is used if it gives the same bits as the standard
    one for random numbers of this shape, which is tried once per shape and range of rows. Nothing
    is tried during the capture of a CUDA graph, and the standard algorithm is used there.
    """
    if (cached := _plans.get((problem, add))) is not None:
        return cached
    rows = problem.shape[3]
    rounded = problem.with_rows(min(max(16, 1 << (rows - 1).bit_length()), _MANY))
    standard = _standard(problem.with_rows(_MANY))
    capturing = torch.cuda.is_current_stream_capturing()
    if (rounded, add) not in _selected and not capturing:
        _selected[rounded, add] = _fastest_equal(rounded, standard, add)
    for algorithm in (_selected.get((rounded, add), standard), standard):
        if (plan := _plan_with(problem, algorithm)) is not None:
            if (rounded, add) in _selected:
                _plans[problem, add] = plan
            return plan
    raise _without_algorithm(problem)


def _without_algorithm(problem: _Problem) -> RuntimeError:
    return RuntimeError(
        "cuBLAS has no algorithm that takes any number of rows for (row length of W, columns, "
        f"depth, rows, splits) = {problem.shape} in {problem.kind}; unset ZONEOUT_BATCH_INVARIANT"
    )


@cache
def _standard(problem: _Problem) -> _Algorithm:
    """Return the presumably fastest algorithm for many rows that also takes one row."""
    for algorithm in _candidates(problem, _descriptors(problem), _NEVER, _OTHERS):
        if _plan_with(problem.with_rows(1), algorithm) and _plan_with(
            problem.with_rows(16), algorithm
        ):
            return algorithm
    raise _without_algorithm(problem)


def _plan_with(problem: _Problem, algorithm: _Algorithm) -> _Plan | None:
    """Return the plan of a product with this algorithm, or None if it does not take the shape."""
    descriptors, checked = _descriptors(problem), _Algorithm()
    product, w, a, b = descriptors
    with torch.cuda.device(problem.device):
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        arguments = (handle, product, w, a, b, b, ctypes.byref(algorithm), ctypes.byref(checked))
        status = library("Lt").cublasLtMatmulAlgoCheck(*arguments)
    if status or checked.workspace > _MOST_WORKSPACE:
        return None
    return _Plan(*descriptors, algorithm, checked.workspace)


def _fastest_equal(problem: _Problem, standard: _Algorithm, add: bool) -> _Algorithm:
    """Return the presumably fastest algorithm with the bits of the standard one."""
    tried = problem.with_rows(min(problem.shape[3], _TRIED))
    w, a, before = _random_operands(tried)

    def result(algorithm: _Algorithm) -> Tensor | None:
        plan, b = _plan_with(tried, algorithm), before.clone()
        return b if plan is not None and _run(plan, w, a, b, add, problem.device) == 0 else None

    expected = result(standard)
    for algorithm in _candidates(problem, _descriptors(problem), _NEVER, _OTHERS):
        output = result(algorithm)
        if expected is not None and output is not None and torch.equal(expected, output):
            return algorithm
    return standard


def _random_operands(problem: _Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return W, a and what is in b before the product; torch's own generator is not used."""
    pitch, columns, depth, rows, splits = problem.shape
    device = torch.device("cuda", problem.device)
    generator = torch.Generator(device).manual_seed(0)
    shapes = (
        (columns if problem.transposed else depth, pitch),
        (rows, depth),
        (splits, rows, columns),
    )
    w, a, b = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    return w.to(problem.kind), a.to(problem.kind), b.to(problem.out)


def _run(plan: _Plan, w: Tensor, a: Tensor, b: Tensor, add: bool, device: int) -> int:
    """Compute b = a·W, or b += a·W, on the current stream; return cuBLAS's status."""
    operands = Operands(address(w, "W", gaps=True), address(a, "a"), address(b, "b"))
    with torch.cuda.device(device) if device != torch.cuda.current_device() else nullcontext():
        return _multiply(plan, operands, add, device)


def _run_at(plan: _Plan, add: bool, device: int, at: int) -> None:
    """Compute a product whose `Operands` are at an address."""
    _check(_multiply(plan, Operands.from_address(at), add, device))


def _multiply(plan: _Plan, operands: Operands, add: bool, device: int) -> int:
    """Compute a product on the current stream of the current GPU; return cuBLAS's status."""
    memory = None
    if plan.workspace:
        place = torch.device("cuda", device)
        memory = torch.empty(plan.workspace, dtype=torch.uint8, device=place)
    status = library("Lt").cublasLtMatmul(
        ctypes.c_void_p(torch.cuda.current_blas_handle()),
        plan.product,
        _ONE,
        ctypes.c_void_p(operands.w),
        plan.w,
        ctypes.c_void_p(operands.a),
        plan.a,
        _ONE if add else _ZERO,
        ctypes.c_void_p(operands.b),
        plan.b,
        ctypes.c_void_p(operands.b),
        plan.b,
        ctypes.byref(plan.algorithm),
        None if memory is None else ctypes.c_void_p(address(memory, "memory")),
        ctypes.c_size_t(plan.workspace),
        ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device)),
    )
    return int(status)


def _layout(
    kind: torch.dtype, down: int, across: int, pitch: int, distance: int, count: int
) -> Any:
    """Create the column-major layout of a matrix, or of `count`, `distance` elements apart."""
    sizes = (ctypes.c_uint64(down), ctypes.c_uint64(across), ctypes.c_int64(pitch))
    descriptor = _create("cublasLtMatrixLayoutCreate", ctypes.c_int(_DATA_TYPES[kind]), *sizes)
    if count > 1:
        _set("cublasLtMatrixLayoutSetAttribute", descriptor, _COUNT, ctypes.c_int32(count))
        _set("cublasLtMatrixLayoutSetAttribute", descriptor, _DISTANCE, ctypes.c_int64(distance))
    return descriptor


def _create(function: str, *arguments: Any) -> Any:
    descriptor = ctypes.c_void_p()
    _check(getattr(library("Lt"), function)(ctypes.byref(descriptor), *arguments))
    return descriptor


def _set(function: str, descriptor: Any, name: int, value: Any) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _check(
        getattr(library("Lt"), function)(descriptor, ctypes.c_int(name), ctypes.byref(value), size)
    )


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
