"""Normal numbers for every step, row and unit, in one kernel."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...memory import address
from ..runtime.arguments import common_defines
from ..runtime.compiler import load

THREADS = 256


class Normal(ctypes.Structure):
    """`Normal` of normals.cu."""

    _fields_ = [
        ("y", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "batch", "units", "first_step")),
        *((name, ctypes.c_void_p) for name in ("examples", "seed")),
        ("plane", ctypes.c_uint32),
    ]


def normals(
    examples: Tensor, seed: Tensor, plane: int, first_step: int, steps: int, units: int
) -> Tensor:
    """Return standard normal numbers, float32 [steps, examples, units]."""
    y = torch.empty(steps, len(examples), units, device=examples.device)
    if y.numel() == 0:
        return y
    device = y.get_device()
    normal = Normal(  # must live until the launch
        address(y, "y"), steps * len(examples), len(examples), units, first_step,
        address(examples, "examples", torch.int64, device),
        address(seed, "seed", torch.int64, device), plane,
    )  # fmt: skip
    defines = common_defines(None, torch.float32)
    with torch.cuda.device(y.device):
        (kernel,) = load(device, "normals.cu", ("normals",), defines)
        blocks = -(-(steps * len(examples) * -(-units // 4)) // THREADS)
        kernel.launch(blocks, THREADS, (normal,))
    return y
