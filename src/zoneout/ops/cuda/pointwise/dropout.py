"""Dropout of a whole sequence in one kernel: the cost is one read and one write of it."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ....draws import Draw
from ...memory import address
from ..runtime.arguments import TYPES, Stream, fill_stream
from ..runtime.compiler import load, pack

THREADS = 256


class Dropped(ctypes.Structure):
    """`Dropped` of dropout.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "batch", "units", "first_step")),
        ("examples", ctypes.c_void_p),
    ]


def dropout(x: Tensor, draw: Draw, examples: Tensor, first_step: int) -> Tensor:
    """Return x, [T, B, units], with drawn units set to zero and the others scaled up."""
    x = x.contiguous()
    y = torch.empty_like(x)
    steps, batch, units = x.shape
    if x.numel() == 0:
        return y
    stream = Stream()
    device = x.get_device()
    fill_stream(stream, draw, device)
    dropped = Dropped(  # must live until the launch
        address(x, "x"), address(y, "y"), steps * batch, batch, units, first_step,
        address(examples, "examples", torch.int64, device),
    )  # fmt: skip
    defines = (("CELL", 0), ("TYPE", TYPES[x.dtype]), ("FAST", 1))
    with torch.cuda.device(x.device):
        (kernel,) = load(device, "dropout.cu", ("dropout",), defines)
        blocks = -(-(steps * batch * -(-units // 4)) // THREADS)
        kernel.launch(blocks, THREADS, pack((stream, dropped)))
    return y
