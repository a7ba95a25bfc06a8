"""The structs of common.cuh, steps.cu and persistent.cu, and how a `Loop` fills them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .... import cells
from ....draws import Draw
from ...backend import Loop, LoopGrads, mask_coordinates
from ...memory import address

# The cells that have kernels; the index of a cell is the kernels' macro CELL.
CELLS = tuple(cells.CELLS.values())
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

    moving = ("first_step",)
    _fields_ = [
        *(
            (name, _i64)
            for name in ("steps", "batch", "hidden", "outputs", "first_step", "reverse")
        ),
        *((name, _p) for name in ("lengths", "examples", "resets")),
        *((name, Stream) for name in ("cell", "hidden_state", "update")),
        *(
            (name, _p)
            for name in ("scale_h", "w_hh", "b_x", "b_h", "h0", "reset_h", "c0", "reset_c")
        ),
        *((name, _p) for name in ("gates", "y", "c", "gh")),
        *(
            (name, _p)
            for name in ("dy", "dcells", "dh", "dc", "dreset_h", "dreset_c", "dgx", "dsh")
        ),
    ]


class Norm(ctypes.Structure):
    """`Norm` of common.cuh."""

    _fields_ = [
        ("eps", ctypes.c_double),
        *(
            (name, _p)
            for name in ("scale_h", "scale_c", "shift_c", "mean_h", "var_h", "mean_c", "var_c")
        ),
        *((name, _p) for name in ("dgh", "dnc", "chat", "dscale_c", "dshift_c", "db_x", "db_h")),
    ]


class Scratch(ctypes.Structure):
    """`Scratch` of steps.cu."""

    _fields_ = [
        *(
            (name, _p)
            for name in ("product", "h_in", "next", "h", "raw", "u", "shown", "rec", "owed")
        ),
        *((name, _p) for name in ("du", "dnc", "chat")),
        *((name, _i64) for name in ("norm", "project", "pitch", "sums", "settled")),
        ("eps", ctypes.c_double),
        *((name, _p) for name in ("norm_h", "norm_c", "norm_c_shift", "mean_c", "var_c")),
        *((name, _p) for name in ("d_half", "back", "back_w")),
    ]


class Normed(ctypes.Structure):
    """`Normed` of steps.cu."""

    _fields_ = [
        *((name, _p) for name in ("v", "hat", "scale", "bias", "mean", "var", "dv", "d")),
        *((name, _i64) for name in ("width", "given", "by_row")),
        ("eps", ctypes.c_double),
    ]


class Exchange(ctypes.Structure):
    """`Exchange` of persistent.cu."""

    _fields_ = [("buffer", _p), ("size", _i64), ("blocks", _i64), ("peak", _p)]


class Arguments:
    """A struct that keeps the tensors it points to alive."""

    def __init__(self, struct: type[ctypes.Structure]) -> None:
        self.struct: Any = struct()
        self.alive: list[Tensor] = []

    def put(self, name: str, value: Tensor | None, dtype: torch.dtype | None = None) -> None:
        """Set a pointer to a tensor, if given.

        It must be contiguous, of `dtype`, and on the device of the tensors set before it.
        """
        if value is not None:
            self.alive.append(value)
            setattr(self.struct, name, address(value, name, dtype, self.alive[0].get_device()))

    def put_all(self, values: Any, names: Sequence[str], dtype: torch.dtype) -> None:
        """Set the pointers `names` to the attributes of `values` with the same names."""
        for name in names:
            if (value := getattr(values, name)) is not None:
                self.put(name, value, dtype)


_NARROW = ("scale_h", "w_hh", "b_x", "b_h", "h0", "reset_h", "gates", "y")
_WIDE = ("c0", "reset_c", "c", "gh")
_NARROW_BACK = ("dy", "dgx", "dsh")
_WIDE_BACK = ("dcells", "dh", "dc", "dreset_h", "dreset_c")


def loop_arguments(loop: Loop, back: LoopGrads | None) -> Arguments:
    """Return the arguments that all kernels of a loop share."""
    made = Arguments(LoopArguments)
    s = made.struct
    s.steps, s.batch, s.hidden, s.outputs = loop.steps, loop.batch, loop.hidden, loop.outputs
    s.first_step, s.reverse = loop.first_step, loop.reverse
    made.put_all(loop, ("lengths", "examples"), torch.int64)
    made.put_all(loop, ("resets",), torch.bool)
    made.put_all(loop, _NARROW, loop.gates.dtype)
    made.put_all(loop, _WIDE, torch.float32)
    if back is not None:
        made.put_all(back, _NARROW_BACK, loop.gates.dtype)
        made.put_all(back, _WIDE_BACK, torch.float32)
    for name, draw in loop.draws.items():
        if name in _STREAMS:  # other states have streams in the arguments of kernels of any cell
            fill_stream(getattr(s, _STREAMS[name]), draw, loop.gates.get_device())
    return made


def norm_arguments(loop: Loop, back: LoopGrads | None) -> Arguments:
    """Return the scales and moments of a loop's norm; all null without a norm."""
    made = Arguments(Norm)
    if loop.norm is None:
        return made
    made.struct.eps = loop.norm.eps
    made.put_all(loop.norm, ("scale_h", "scale_c", "shift_c"), torch.float32)
    made.put_all(loop, ("mean_h", "var_h", "mean_c", "var_c"), torch.float32)
    if back is not None:
        made.put("dgh", back.dgh, loop.gates.dtype)
        made.put_all(back, ("dnc", "chat", "dscale_c", "dshift_c"), torch.float32)
    return made


_STREAMS = {"cell": "cell", "hidden": "hidden_state", "update": "update"}


def fill_stream(to: Stream, draw: Draw, device: int) -> None:
    """Fill the kernels' struct of a noise stream from a `Draw`."""
    to.mode = 4 if draw.given is not None else 2 if draw.seed is None else 1
    to.zero, to.hold = draw.rule.by == "zero", draw.rule.holds_gate
    to.sees_step, to.sees_example, to.sees_unit, to.high = mask_coordinates(draw.rule)
    to.plane = draw.plane
    to.rate, to.stride = address(draw.rate, "rate", torch.float64, device), int(draw.rate.dim() > 0)
    if draw.seed is not None:
        to.seed = address(draw.seed, "seed", torch.int64, device)


# --- compile-time options of kernels ---


Defines = tuple[tuple[str, int], ...]  # macros that a kernel is compiled with
EVERYTHING = 127  # all bits of `has`


def has(loop: Loop, back: LoopGrads | None) -> int:
    """Return the bit mask HAS of common.cuh: the optional features that a loop uses.

    The base case, 0, is zoneout of rows of full length, forward in time.
    """
    found = (
        loop.lengths is not None,
        loop.resets is not None,
        loop.scale_h is not None,
        back is not None and any(d is not None for d in back.dseen),
        loop.reverse,
        "update" in loop.draws,
        any(draw.rule.by == "zero" for name, draw in loop.draws.items() if name != "update"),
    )
    return sum(bool(there) << bit for bit, there in enumerate(found))


def known(modes: tuple[int, int] | None) -> Defines:
    """Return the macros for the modes of both states' streams; none if `modes` is None."""
    return () if modes is None else (("CELL_MODE", modes[0]), ("HIDDEN_MODE", modes[1]))


def modes_of(draws: dict[str, Draw]) -> tuple[int, int] | None:
    """Return the modes of both states' streams if the only noise is zoneout per unit, else None."""
    modes = {"cell": 0, "hidden": 0}
    for name, draw in draws.items():
        if (
            name not in modes
            or draw.rule.by != "previous"
            or draw.rule.mask not in ("unit", "shared")
        ):
            return None
        shared = name == "hidden" and draw.rule.mask == "shared"
        modes[name] = 2 if draw.seed is None else 3 if shared else 1
    seeds = {address(draw.seed) for draw in draws.values() if draw.seed is not None}
    # The kernels use one draw for both states, so both need the same seed.
    return (modes["cell"], modes["hidden"]) if len(seeds) < 2 else None
