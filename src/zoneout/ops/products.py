"""The large products, those of float32 in the precision of nn.LSTM's.

A GPU wants rows in whole 16 bytes: its matrix units are not used to the full otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

FEW = 16  # columns: with fewer the product is not taken by the matrix units anyway
MUCH = 1 << 26  # multiplications of a product that is padded; one of 2²⁷ neither gains nor loses by it


def product(a: Tensor, b: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
    """a·b, written to `out` if there is one, or added to it.

    torch has one setting for its products and another for its recurrent layers', and both are the whole process's.
    """
    if a.is_cuda and a.dtype == torch.float32:
        from .cuda.blas import times  # that side knows this one

        return times(a, b, a.new_empty(a.shape[0], b.shape[1]) if out is None else out, add)
    return out.addmm_(a, b) if add and out is not None else torch.mm(a, b, out=out)


def row_by_row(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a·b where every row of a is another row of the batch: on a CPU its bits do not depend on the others.

    Not where there is no compiled loop, nor in half types, which torch multiplies.
    """
    if a.device.type == "cpu":
        from .cpu import product as in_order  # that side knows this one

        to = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
        if in_order(a, b, to):
            return to
    return product(a, b, out)


def on_gpu(v: Tensor) -> bool:
    """Whether a GPU will take products of this."""
    return v.is_cuda


def missing(columns: int, v: Tensor) -> int:
    """How many columns are wanted beside so many of numbers like `v`."""
    return -columns % (16 // v.element_size()) if on_gpu(v) and columns >= FEW else 0


def padded(v: Tensor) -> Tensor:
    """A matrix without gaps, on a GPU with zeros to its right up to a multiple of 16 bytes."""
    extra = missing(v.shape[1], v)
    return functional.pad(v, (0, extra)) if extra else v.contiguous()


def trimmed(v: Tensor, width: int) -> Tensor:
    """Without the columns that padding has added."""
    return v if v.shape[1] == width else v[:, :width].contiguous()


def spare(columns: int, v: Tensor) -> int:
    """How many columns of ones may stand beside so many of numbers like `v`, so that a product adds up, too."""
    return 1 + missing(columns + 1, v) if on_gpu(v) else 0


def parted(v: Tensor, parts: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Columns of a matrix, each part from a first one and so many, in matrices of their own; on a GPU by one launch."""
    if on_gpu(v):
        from .cuda.rows import parted as by_kernel  # that side knows this one

        return by_kernel(v, parts)
    return [v[:, first : first + width].clone(memory_format=torch.contiguous_format) for first, width in parts]


def times_and_sum(a: Tensor, b: Tensor, sums: int) -> tuple[Tensor, list[Tensor]]:
    """a·b; and the columns of a added up, so many times, where that comes with it: where b has to be padded anyway."""
    width = b.shape[1]
    if not sums or not missing(width, b):
        return times(a, b), []
    both = product(a, functional.pad(b, (0, spare(width, b)), value=1.0))
    found, *added = parted(both, [(0, width), *[(width, 1)] * sums])
    return found, [v[:, 0] for v in added]


def added_up(v: Tensor, exactly: bool = False) -> Tensor:
    """The rows of a matrix added up: on a GPU by a product, which needs no memory of its own.

    Exactly: where most of it cancels. A product of float32 may be in TF32, which rounds before it adds.
    """
    if exactly or not on_gpu(v):
        return v.sum(0)
    return product(v.t(), v.new_ones(len(v), 16 // v.element_size()))[:, 0].clone()


def times(a: Tensor, b: Tensor, by_row: bool = False) -> Tensor:
    """a·b; `by_row`: as `row_by_row` takes it."""
    return trimmed((row_by_row if by_row else product)(a, padded(b)), b.shape[1])


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """x·Wᵀ + b, as `torch.nn.functional.linear` has it, in the type of x; differentiable."""
    outputs, inputs = w.shape
    much = x.numel() * outputs >= MUCH
    across, down = (missing(inputs, x), missing(outputs, x)) if much else (0, 0)
    return padded_linear(x, w, b, across, down) if across or down else functional.linear(x, w, b)


def padded_linear(x: Tensor, w: Tensor, b: Tensor, across: int, down: int) -> Tensor:
    """The same with so many zeros beside every row of x and W, and so many rows of zeros below W."""
    outputs = len(w)
    w, b = functional.pad(w.to(x.dtype), (0, across, 0, down)), functional.pad(b.to(x.dtype), (0, down))
    return functional.linear(functional.pad(x, (0, across)), w, b)[..., :outputs]
