"""The product of a step: the library that torch takes its products with, called straight.

The same product is taken at every step, only its addresses change. Called so, nothing is made for a call but the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .compiler import _wheels, tf32

_KINDS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
_EXACT, _TF32 = 68, 77  # cublasComputeType_t
_AS_IT_IS, _TRANSPOSED = 0, 1
_BY_SHAPE = -1  # the library chooses how


def product(
    w: Tensor, rows: int, out: torch.dtype, transposed: bool, add: bool = False, parts: int = 1
) -> Callable[[int, int], None]:
    """A function of the addresses of a and b that takes b = a·W, or b += a·W: [rows, ·], without gaps.

    `transposed`: W is kept as [columns of b, columns of a]. `parts`: the sum is left in so many parts, b is
    [parts, rows, ·]. Good for the current stream and the length of one pass.
    """
    columns, depth = w.shape if transposed else (w.shape[1], w.shape[0])
    assert w.is_contiguous() and depth % parts == 0
    int_, long = ctypes.c_int, ctypes.c_longlong
    kind, wide, each = int_(_KINDS[w.dtype]), int_(columns), depth // parts
    how = _TF32 if w.dtype == torch.float32 and tf32() else _EXACT
    one, beta = ctypes.c_float(1.0), ctypes.c_float(float(add))
    a, b, call = ctypes.c_void_p(), ctypes.c_void_p(), _library().cublasGemmStridedBatchedEx
    # The library counts columns first, so it is asked for bᵀ = Wᵀ·aᵀ.
    arguments: tuple[Any, ...] = (
        ctypes.c_void_p(torch.cuda.current_blas_handle()),
        int_(_TRANSPOSED if transposed else _AS_IT_IS), int_(_AS_IT_IS), wide, int_(rows), int_(each),
        ctypes.byref(one),
        ctypes.c_void_p(w.data_ptr()), kind, int_(w.shape[1]), long(each if transposed else each * columns),
        a, kind, int_(depth), long(each), ctypes.byref(beta),
        b, int_(_KINDS[out]), wide, long(rows * columns), int_(parts), int_(how), int_(_BY_SHAPE),
    )  # fmt: skip

    def take(a_at: int, b_at: int) -> None:
        a.value, b.value = a_at, b_at
        if status := call(*arguments):
            raise RuntimeError(f"cuBLAS: error {status}")

    return take


def padded(w: Tensor) -> Tensor:
    """W with zeros to its right, up to a multiple of 16 bytes: the matrix units are not used to the full otherwise."""
    return functional.pad(w, (0, -w.shape[1] % (16 // w.element_size()))).contiguous()


@cache
def _library() -> ctypes.CDLL:
    """cuBLAS, which torch has loaded already."""
    major = (torch.version.cuda or "12").split(".")[0]
    names = [f"libcublas.so.{major}", f"cublas64_{major}.dll"]
    for name in (*names, *map(str, _wheels(names))):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"torch's library for products was not found (looked for {', '.join(names)})")
