"""Gaussian noise on weights: a function of its coordinates, like masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..draws import Draw, constant, widest
from ..philox import philox
from ..streams import Rule
from . import cuda
from .cuda.pointwise.weight_noise import add_noise as fused
from .normals import box_muller

_RULE = Rule("weight_noise", "sum", "sequence", "expectation")


def weight_noise(weight: Tensor, std: float, seed: Tensor, plane: int) -> Tensor:
    """Return a matrix plus noise of a standard deviation; `plane` identifies its owner."""
    return add_noise(weight, constant(_RULE, std, seed, plane))


def add_noise(weight: Tensor, draw: Draw, matrix: int = 0) -> Tensor:
    """Return a weight plus noise from a layer's draw; `matrix` is its number in the layer."""
    std, seed = draw.rate, draw.seed
    assert seed is not None
    if cuda.has_kernel(weight):
        return torch.ops.zoneout.weight_noise(weight, std, seed, matrix, draw.plane)
    noise = std * normals(seed, weight.numel(), matrix, draw.plane)
    return weight + noise.to(weight.dtype).view_as(weight)


def normals(seed: Tensor, count: int, matrix: int, plane: int) -> Tensor:
    """Return standard normal numbers, one per element of a matrix (Box-Muller method)."""
    index = torch.arange((count + 3) // 4, device=seed.device)
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    words = philox(seed, index, zero + matrix, zero, zero + plane)
    return box_muller(words, widest(seed.device)).flatten()[:count]


@torch.library.custom_op("zoneout::weight_noise", mutates_args=(), device_types="cuda")
def _weight_noise(weight: Tensor, std: Tensor, seed: Tensor, matrix: int, plane: int) -> Tensor:
    return fused(weight, std, seed, matrix, plane)


@_weight_noise.register_fake
def _(weight: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return dy, *[None] * 4


torch.library.register_autograd("zoneout::weight_noise", _backward)
