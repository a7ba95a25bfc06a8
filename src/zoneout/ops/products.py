"""Products whose rows a GPU wants in whole 16 bytes: its matrix units are not used to the full otherwise."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

FEW = 16  # columns: with fewer the product is not taken by the matrix units anyway
MUCH = 1 << 26  # multiplications of a product that is padded; one of 2²⁷ neither gains nor loses by it


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


def times_and_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor | None]:
    """a·b; and the columns of a added up, where that comes with it at no cost: where b has to be padded anyway."""
    width = b.shape[1]
    if not missing(width, b):
        return times(a, b), None
    both = a @ functional.pad(b, (0, spare(width, b)), value=1.0)
    return both[:, :width].contiguous(), both[:, width].clone()


def added_up(v: Tensor, exactly: bool = False) -> Tensor:
    """The rows of a matrix added up: on a GPU by a product, which needs no memory of its own.

    Exactly: where most of it cancels. A product of float32 may be in TF32, which rounds before it adds.
    """
    if exactly or not on_gpu(v):
        return v.sum(0)
    return (v.t() @ v.new_ones(len(v), 16 // v.element_size()))[:, 0].clone()


def times(a: Tensor, b: Tensor) -> Tensor:
    """a·b."""
    return trimmed(a @ padded(b), b.shape[1])


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
