"""Dropout of a whole sequence in one kernel: the cost is one read and one write of it.

The random bits of its masks, alone, are a kernel too.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ....draws import Draw
from ...memory import address
from ..runtime.arguments import Stream, common_defines, fill_stream
from ..runtime.compiler import load

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
    _launch("dropout", x, y, draw, examples, first_step)
    return y


def random_bits(draw: Draw, examples: Tensor, first_step: int, steps: int, units: int) -> Tensor:
    """Return the 16 random bits that a rate is compared with, int32 [steps, examples, units]."""
    shape = (steps, len(examples), units)
    bits = torch.empty(shape, dtype=torch.int32, device=examples.device)
    _launch("bits", None, bits, draw, examples, first_step)
    return bits


def _launch(
    name: str, x: Tensor | None, y: Tensor, draw: Draw, examples: Tensor, first_step: int
) -> None:
    """Launch a kernel of dropout.cu, which writes to y, [T, B, units]."""
    if y.numel() == 0:
        return
    steps, batch, units = y.shape
    stream = Stream()
    device = y.get_device()
    fill_stream(stream, draw, device)
    dropped = Dropped(  # must live until the launch
        None if x is None else address(x, "x"), address(y, "y"), steps * batch, batch, units,
        first_step, address(examples, "examples", torch.int64, device),
    )  # fmt: skip
    defines = common_defines(None, torch.float32 if x is None else x.dtype)
    with torch.cuda.device(y.device):
        (kernel,) = load(device, "dropout.cu", (name,), defines)
        blocks = -(-(steps * batch * -(-units // 4)) // THREADS)
        kernel.launch(blocks, THREADS, (stream, dropped))
