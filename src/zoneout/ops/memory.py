"""From a tensor to the address of its numbers: the one gate to the C loop and the CUDA kernels.

Not every tensor has its numbers in memory. Autograd hands over zeros without storage (`torch.sgn`'s derivative), a
negated view has the numbers before the negation behind its pointer, and DTensor, FakeTensor and functional tensors wrap
others. Code that works on addresses asks `are_memory` first. Where the answer is no, the call goes through torch's
dispatcher, which materialises the first two and hands the others to their own rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_PLAIN = {Tensor, Parameter}


def are_memory(tensors: Iterable[Any]) -> bool:
    """Whether what lies behind the pointer of each tensor are its numbers; None is skipped."""
    try:
        for v in tensors:
            if v is not None and (type(v) not in _PLAIN or v.is_neg() or not _has_memory(v, v.data_ptr())):
                return False
    except RuntimeError:  # that of a sparse tensor, or inside of vmap, has no pointer to ask for
        return False
    return True


def _has_memory(v: Tensor, at: int) -> bool:
    """Whether there is memory at a tensor's pointer: without it the pointer is the tensor's offset in its storage."""
    # No offset is as large as the first number: one comparison will do for nearly all tensors.
    return at > 1 << 40 or at != v.storage_offset() * v.element_size() or not v.numel()


def in_memory(v: Tensor) -> Tensor:
    """The tensor without gaps: itself, or a copy where its numbers lie apart or are not in memory."""
    return v.contiguous() if are_memory((v,)) else v.clone(memory_format=torch.contiguous_format)


def address(
    v: Tensor, name: str = "tensor", dtype: torch.dtype | None = None, device: int | None = None, gaps: bool = False
) -> int:
    """The address of the first number, or an error where code that reads there would not find the tensor's numbers.

    `device` is the index of a GPU, −1 for the CPU; `gaps` allows any strides.
    """
    at = v.data_ptr()
    if (
        not _has_memory(v, at)
        or v.is_neg()
        or not (gaps or v.is_contiguous())
        or (dtype is not None and v.dtype != dtype)
        or (device is not None and v.get_device() != device)
    ):
        raise RuntimeError(
            f"{name}: expected {'' if gaps else 'contiguous '}memory of {dtype or 'any type'} on "
            f"{_described(device)}, got {_described_tensor(v)}; please report this as a bug of zoneout"
        )
    return at


def is_aligned(v: Tensor, size: int) -> bool:
    """Whether the first number is aligned to `size` bytes."""
    return v.data_ptr() % size == 0


def _described(device: int | None) -> str:
    return "any device" if device is None else "the CPU" if device < 0 else f"cuda:{device}"


def _described_tensor(v: Tensor) -> str:
    empty = not _has_memory(v, v.data_ptr())
    lies = "no memory" if empty else "a negated view" if v.is_neg() else f"strides {tuple(v.stride())}"
    return f"{v.dtype} of shape {tuple(v.shape)} on {v.device} with {lies}"
