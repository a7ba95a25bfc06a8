"""The structs of common.cuh, steps.cu and persistent.cu, and how a `Loop` fills them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..loop import Backward, Loop, sees

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_i64, _p = ctypes.c_int64, ctypes.c_void_p


class Stream(ctypes.Structure):
    """`Stream` of common.cuh."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("mode", "zero", "hold", "sees_step", "sees_example")),
        *((name, ctypes.c_int) for name in ("sees_unit", "high", "plane")),
        ("seed", _p),
        ("rate", _p),
        ("stride", _i64),
    ]


class LoopArguments(ctypes.Structure):
    """`Loop` of common.cuh."""

    _fields_ = [
        *((name, _i64) for name in ("steps", "batch", "hidden", "outputs", "first_step", "reverse")),
        *((name, _p) for name in ("counts", "offsets", "lengths", "examples", "resets")),
        *((name, Stream) for name in ("cell", "hidden_state", "update")),
        *((name, _p) for name in ("scale_h", "w_hh", "b_h", "h0", "reset_h", "c0", "reset_c")),
        *((name, _p) for name in ("gates", "y", "c", "gh")),
        *((name, _p) for name in ("dy", "dcells", "dh", "dc", "dreset_h", "dreset_c", "dgx", "dsh")),
    ]


class Scratch(ctypes.Structure):
    """`Scratch` of steps.cu."""

    _fields_ = [
        *((name, _p) for name in ("product", "h_in", "h", "raw", "u", "shown", "rec", "owed")),
        *((name, _p) for name in ("du", "dgh", "dnc", "chat")),
        *((name, _i64) for name in ("norm", "given", "project")),
        ("eps", ctypes.c_double),
        *((name, _p) for name in ("norm_h", "norm_c", "norm_c_shift")),
        *((name, _p) for name in ("mean_h", "var_h", "mean_c", "var_c")),
    ]


class Exchange(ctypes.Structure):
    """`Exchange` of persistent.cu."""

    _fields_ = [("buffer", _p), ("blocks", _i64)]


class Arguments:
    """A struct that keeps the tensors it points to alive."""

    def __init__(self, struct: type[ctypes.Structure]) -> None:
        self.struct: Any = struct()
        self.alive: list[Tensor] = []

    def put(self, name: str, value: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
        """Set a pointer; the tensor must be contiguous and of `dtype`."""
        if value is None:
            return None
        assert value.is_contiguous() and value.is_cuda and (dtype is None or value.dtype == dtype), name
        self.alive.append(value)
        setattr(self.struct, name, value.data_ptr())
        return value


def whole(loop: Loop) -> bool:
    """Whether no sequence ends before the last step."""
    return loop.steps == 0 or int(loop.counts[-1]) == loop.batch


def loop_arguments(loop: Loop, back: Backward | None) -> Arguments:
    """Everything that all kernels of a loop take."""
    made = Arguments(LoopArguments)
    s, device = made.struct, loop.gates.device
    narrow, wide = loop.gates.dtype, torch.float32
    s.steps, s.batch, s.hidden, s.outputs = loop.steps, loop.batch, loop.hidden, loop.outputs
    s.first_step, s.reverse = loop.first_step, loop.reverse
    if not whole(loop):
        spans = torch.stack((loop.counts, loop.offsets)).to(device)
        made.put("counts", spans[0])
        made.put("offsets", spans[1])
        made.put("lengths", loop.lengths.to(device))
    made.put("examples", loop.examples, torch.int64)
    made.put("resets", loop.resets, torch.bool)
    for field, stream in (("cell", "cell"), ("hidden_state", "hidden"), ("update", "update")):
        _fill_stream(made, getattr(s, field), loop, stream)
    for name in ("scale_h", "w_hh", "b_h", "h0", "reset_h", "gates", "y"):
        made.put(name, getattr(loop, name), narrow)
    for name in ("c0", "reset_c", "c", "gh"):
        made.put(name, getattr(loop, name), wide)
    if back is not None:
        for name in ("dy", "dgx", "dsh"):
            made.put(name, getattr(back, name), narrow)
        for name in ("dcells", "dh", "dc", "dreset_h", "dreset_c"):
            made.put(name, getattr(back, name), wide)
    return made


def _fill_stream(made: Arguments, to: Stream, loop: Loop, name: str) -> None:
    draw = loop.draws.get(name)
    if draw is None:
        return
    to.mode = 2 if draw.seed is None else 1
    to.zero, to.hold = draw.rule.by == "zero", draw.rule.holds_gate
    to.sees_step, to.sees_example, to.sees_unit, to.high = sees(draw)
    to.plane = draw.plane
    assert draw.rate.is_cuda and draw.rate.dtype == torch.float64 and draw.rate.is_contiguous()
    made.alive.append(draw.rate)
    to.rate, to.stride = draw.rate.data_ptr(), int(draw.rate.dim() > 0)
    if draw.seed is not None:
        assert draw.seed.is_cuda and draw.seed.dtype == torch.int64
        made.alive.append(draw.seed)
        to.seed = draw.seed.data_ptr()
