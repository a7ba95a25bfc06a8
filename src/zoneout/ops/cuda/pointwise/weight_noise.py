"""Gaussian noise on a weight matrix in one kernel: the cost is one read and one write of it."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...memory import address
from ..runtime.arguments import common_defines
from ..runtime.compiler import load

THREADS = 256


class Noisy(ctypes.Structure):
    """`Noisy` of weight_noise.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("w", "y")),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_uint32) for name in ("matrix", "plane")),
        *((name, ctypes.c_void_p) for name in ("seed", "std")),
    ]


def add_noise(weight: Tensor, std: Tensor, seed: Tensor, matrix: int, plane: int) -> Tensor:
    """Return the weights plus Gaussian noise of standard deviation `std`."""
    weight = weight.contiguous()
    y = torch.empty_like(weight)
    if weight.numel() == 0:
        return y
    device = weight.get_device()
    noisy = Noisy(  # must live until the launch
        address(weight, "weight"), address(y, "y"), weight.numel(), matrix, plane,
        address(seed, "seed", torch.int64, device), address(std, "std", torch.float64, device),
    )  # fmt: skip
    defines = common_defines(None, weight.dtype)
    with torch.cuda.device(weight.device):
        (kernel,) = load(device, "weight_noise.cu", ("weight_noise",), defines)
        kernel.launch(-(-weight.numel() // (4 * THREADS)), THREADS, (noisy,))
    return y
