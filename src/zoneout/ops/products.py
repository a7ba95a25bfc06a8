"""Products whose rows a GPU wants in whole 16 bytes: its matrix units are not used to the full otherwise."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

FEW = 16  # columns: with fewer the product is not taken by the matrix units anyway


def padded(v: Tensor) -> Tensor:
    """A matrix without gaps, on a GPU with zeros to its right up to a multiple of 16 bytes."""
    missing = -v.shape[1] % (16 // v.element_size()) if v.is_cuda and v.shape[1] >= FEW else 0
    return functional.pad(v, (0, missing)) if missing else v.contiguous()


def trimmed(v: Tensor, width: int) -> Tensor:
    """Without the columns that padding has added."""
    return v if v.shape[1] == width else v[:, :width].contiguous()


def times(a: Tensor, b: Tensor) -> Tensor:
    """a·b."""
    return trimmed(a @ padded(b), b.shape[1])
