"""The large matrix products; float32 products have the precision of nn.LSTM's.

A GPU needs rows of a multiple of 16 bytes to use its matrix units fully.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

FEW = 16  # columns: smaller products do not use the matrix units anyway
MUCH = 1 << 26  # minimum multiplications of a padded product; at 2²⁷ padding is neutral


@dataclass
class _Registered:
    """Our own products and copies, which the backends register when they are imported."""

    # Of float32, in the requested precision.
    gpu_product: Callable[[Tensor, Tensor, Tensor, bool], Tensor] | None = None
    # Row by row; returns False if not possible.
    cpu_product: Callable[[Tensor, Tensor, Tensor], bool] | None = None
    # aᵀ·b from a and b; returns False if not possible.
    cpu_transposed: Callable[[Tensor, Tensor, Tensor, bool], bool] | None = None
    # The same; returns False if not requested.
    gpu_rows: Callable[[Tensor, Tensor, Tensor], bool] | None = None
    gpu_split: Callable[[Tensor, Sequence[tuple[int, int]]], list[Tensor]] | None = None


_registered = _Registered()


def register(**functions: Any) -> None:
    """Register a backend's own products."""
    for name, function in functions.items():
        setattr(_registered, name, function)


def product(a: Tensor, b: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
    """Return a·b; with `out`, write it there, or add it to `out` (`add`).

    torch has one precision setting for products and another for recurrent layers. Both are global
    to the process.
    """
    if a.is_cuda and a.dtype == torch.float32 and _registered.gpu_product is not None:
        return _registered.gpu_product(
            a, b, a.new_empty(a.shape[0], b.shape[1]) if out is None else out, add
        )
    transposed = _registered.cpu_transposed
    if transposed is not None and not a.is_cuda and a.stride(0) == 1:
        to = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
        if transposed(a.t(), b, to, add):
            return to
    return out.addmm_(a, b) if add and out is not None else torch.mm(a, b, out=out)


def row_by_row(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a·b; on a CPU the bits of a row do not depend on the other rows.

    Every row of a is a row of the batch. This does not hold without a compiled loop, or for half
    types, which torch multiplies. On a GPU it holds if ZONEOUT_BATCH_INVARIANT requests it.
    """
    function = None if not a.is_cuda else _registered.gpu_rows
    if a.device.type == "cpu":
        function = _registered.cpu_product
    if function is not None:
        to = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
        if function(a, b, to):
            return to
        out = to
    return product(a, b, out)


def on_gpu(v: Tensor) -> bool:
    """Return True if a GPU computes products of this tensor."""
    return v.is_cuda


def padding_columns(columns: int, v: Tensor) -> int:
    """Return the number of padding columns that align a row like those of `v` to 16 bytes."""
    return -columns % (16 // v.element_size()) if on_gpu(v) and columns >= FEW else 0


def pad_columns(v: Tensor) -> Tensor:
    """Return a contiguous matrix; on a GPU, zero columns pad rows to a multiple of 16 bytes."""
    extra = padding_columns(v.shape[1], v)
    return functional.pad(v, (0, extra)) if extra else v.contiguous()


def without_padding(v: Tensor, width: int) -> Tensor:
    """Return a matrix without its padding columns."""
    return v if v.shape[1] == width else v[:, :width].contiguous()


def columns_of_ones(columns: int, v: Tensor) -> int:
    """Return the number of columns of ones to append, so that a product also computes a sum."""
    return 1 + padding_columns(columns + 1, v) if on_gpu(v) else 0


def split_columns(v: Tensor, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return ranges of a matrix's columns as separate matrices; on a GPU by one kernel launch.

    Each range is given by its first column and its number of columns.
    """
    if on_gpu(v) and _registered.gpu_split is not None:
        return _registered.gpu_split(v, ranges)
    return [
        v[:, first : first + width].clone(memory_format=torch.contiguous_format)
        for first, width in ranges
    ]


def times_and_sum(a: Tensor, b: Tensor, sums: int) -> tuple[Tensor, list[Tensor]]:
    """Return a·b, and `sums` copies of the row sums of a if they cost nothing extra.

    They cost nothing extra if b has to be padded anyway; otherwise the list is empty.
    """
    width = b.shape[1]
    if not sums or not padding_columns(width, b):
        return times(a, b), []
    both = product(a, functional.pad(b, (0, columns_of_ones(width, b)), value=1.0))
    result, *added = split_columns(both, [(0, width), *[(width, 1)] * sums])
    return result, [v[:, 0] for v in added]


def sum_over_rows(v: Tensor, exactly: bool = False) -> Tensor:
    """Return the sum of the rows of a matrix; on a GPU by a product, which needs no extra memory.

    Use `exactly` if most of the sum cancels. A float32 product may run in TF32, which rounds before
    it adds.
    """
    if exactly or not on_gpu(v):
        return v.sum(0)
    return product(v.t(), v.new_ones(len(v), 16 // v.element_size()))[:, 0].clone()


def times(a: Tensor, b: Tensor, by_row: bool = False) -> Tensor:
    """Return a·b without padding; with `by_row`, as `row_by_row` computes it."""
    return without_padding((row_by_row if by_row else product)(a, pad_columns(b)), b.shape[1])


def block_products(d: Tensor, h: Tensor, gates: int, heads: int) -> Tensor:
    """Return the gradient of a block-diagonal W_h, [G, H / heads].

    It is computed from the gradient of its product, [N, G], and h, [N, H].
    """
    units = h.shape[1] // heads
    by_head = d.view(len(d), gates, heads, units).permute(2, 1, 3, 0).flatten(1, 2)
    # [heads, gates · units, N] · [heads, N, units]
    blocks = torch.bmm(by_head, h.view(len(h), heads, units).transpose(0, 1))
    return blocks.view(heads, gates, -1, blocks.shape[-1]).transpose(0, 1).flatten(0, 2)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return x·Wᵀ + b, as `torch.nn.functional.linear` does, in the dtype of x; differentiable."""
    outputs, inputs = w.shape
    much = x.numel() * outputs >= MUCH
    across, down = (padding_columns(inputs, x), padding_columns(outputs, x)) if much else (0, 0)
    return padded_linear(x, w, b, across, down) if across or down else functional.linear(x, w, b)


def padded_linear(x: Tensor, w: Tensor, b: Tensor, across: int, down: int) -> Tensor:
    """Return the same, with `across` zero columns for x and W and `down` zero rows for W."""
    outputs = len(w)
    w = functional.pad(w.to(x.dtype), (0, across, 0, down))
    b = functional.pad(b.to(x.dtype), (0, down))
    return functional.linear(functional.pad(x, (0, across)), w, b)[..., :outputs]
