"""Dropout of a whole sequence in one kernel: reading and writing it once is all that it costs."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...draws import Draw
from .arguments import TYPES, Stream, fill_stream
from .compiler import load, pack

THREADS = 256


class Dropped(ctypes.Structure):
    """`Dropped` of dropout.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "batch", "units", "first_step")),
        ("examples", ctypes.c_void_p),
    ]


def dropout(x: Tensor, draw: Draw, examples: Tensor, first_step: int) -> Tensor:
    """[T, B, units] with the units that the draw names set to zero and the others scaled up."""
    x = x.contiguous()
    y = torch.empty_like(x)
    steps, batch, units = x.shape
    if x.numel() == 0:
        return y
    stream = Stream()
    fill_stream(stream, draw)
    pointers = (x.data_ptr(), y.data_ptr(), steps * batch, batch, units, first_step, examples.data_ptr())
    dropped = Dropped(*pointers)  # which has to live until the launch
    defines = (("CELL", 0), ("TYPE", TYPES[x.dtype]), ("FAST", 1))
    with torch.cuda.device(x.device):
        (kernel,) = load(x.get_device(), "dropout.cu", ("dropout",), defines)
        blocks = -(-(steps * batch * -(-units // 4)) // THREADS)
        kernel.launch(blocks, THREADS, pack((stream, dropped)))
    return y
