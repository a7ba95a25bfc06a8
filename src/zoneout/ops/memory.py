"""From a tensor to its memory address: the only way to the C loop and the CUDA kernels.

Not every tensor has its values in memory. Autograd passes zeros without storage (the gradient of
`torch.sgn`). The pointer of a negated view leads to the values before the negation. DTensor,
FakeTensor and functional tensors wrap other tensors.

Code that works on addresses calls `are_memory` first. If it returns False, the call goes through
torch's dispatcher. The dispatcher materialises the first two kinds and applies the rules of the
others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .recording import note

_PLAIN = {Tensor, Parameter}
_NO_OFFSET = 1 << 40  # no offset is as large: for nearly all tensors one comparison decides


def are_memory(tensors: Iterable[Any]) -> bool:
    """Return True if each tensor's pointer leads to its values; None is skipped."""
    try:
        for v in tensors:
            if v is not None and (
                type(v) not in _PLAIN
                or v.is_neg()
                or not ((at := v.data_ptr()) > _NO_OFFSET or _has_memory(v, at))
            ):
                return False
    except RuntimeError:  # a sparse tensor, or a tensor inside vmap, has no pointer
        return False
    return True


def _has_memory(v: Tensor, at: int) -> bool:
    """Return True if there is memory at a tensor's pointer.

    Without memory, the pointer equals the tensor's offset in its storage.
    """
    return at > _NO_OFFSET or at != v.storage_offset() * v.element_size() or not v.numel()


def in_memory(v: Tensor) -> Tensor:
    """Return a contiguous tensor: itself, or a copy if it has gaps or is not in memory."""
    return v.contiguous() if are_memory((v,)) else v.clone(memory_format=torch.contiguous_format)


def address(
    v: Tensor,
    name: str = "tensor",
    dtype: torch.dtype | None = None,
    device: int | None = None,
    gaps: bool = False,
) -> int:
    """Return the address of the first value; raise if the tensor's values are not there.

    `device` is the index of a GPU, −1 for the CPU. `gaps` allows any strides.
    """
    at = v.data_ptr()
    if (
        not (at > _NO_OFFSET or _has_memory(v, at))
        or v.is_neg()
        or not (gaps or v.is_contiguous())
        or (dtype is not None and v.dtype != dtype)
        or (device is not None and v.get_device() != device)
    ):
        raise RuntimeError(
            f"{name}: expected {'' if gaps else 'contiguous '}memory of {dtype or 'any type'} on "
            f"{_described(device)}, got {_described_tensor(v)}; please report this as a bug of "
            "zoneout"
        )
    note(at, v)
    return at


def addresses(tensors: Iterable[Tensor | None]) -> list[int]:
    """Return the address of the first value of tensors for which `are_memory` is True; None: 0."""
    return [0 if v is None else v.data_ptr() for v in tensors]


def is_aligned(v: Tensor, size: int) -> bool:
    """Return True if the first value is aligned to `size` bytes."""
    return v.data_ptr() % size == 0


def _described(device: int | None) -> str:
    return "any device" if device is None else "the CPU" if device < 0 else f"cuda:{device}"


def _described_tensor(v: Tensor) -> str:
    empty = not _has_memory(v, v.data_ptr())
    lies = (
        "no memory" if empty else "a negated view" if v.is_neg() else f"strides {tuple(v.stride())}"
    )
    return f"{v.dtype} of shape {tuple(v.shape)} on {v.device} with {lies}"
