"""The structs of common.cuh, steps.cu and exchange.cuh, and how a `Loop` fills them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .... import cells
from ....definition import Definition
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
            for name in (
                "product",
                "h_in",
                "h_next",
                "h",
                "candidate_c",
                "u",
                "projected",
                "rec",
                "owed",
            )
        ),
        *((name, _p) for name in ("du", "dnc", "chat")),
        *((name, _i64) for name in ("norm", "project", "pitch", "splits", "settled")),
        ("eps", ctypes.c_double),
        *((name, _p) for name in ("norm_h", "norm_c", "norm_c_shift", "mean_c", "var_c")),
        *((name, _p) for name in ("d_half", "unscale", "unscale_w")),
    ]


class NormStep(ctypes.Structure):
    """`NormStep` of steps.cu."""

    _fields_ = [
        *((name, _p) for name in ("v", "hat", "scale", "bias", "mean", "var", "dv", "d")),
        *((name, _i64) for name in ("width", "given", "by_row")),
        ("eps", ctypes.c_double),
    ]


class Exchange(ctypes.Structure):
    """`Exchange` of exchange.cuh and warpgroup.cu."""

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


_IN_INPUT_DTYPE = ("scale_h", "w_hh", "b_x", "b_h", "h0", "reset_h", "gates", "y")
_IN_FLOAT32 = ("c0", "reset_c", "c", "gh")
_GRADS_IN_INPUT_DTYPE = ("dy", "dgx", "dsh")
_GRADS_IN_FLOAT32 = ("dcells", "dh", "dc", "dreset_h", "dreset_c")


def loop_arguments(loop: Loop, grads: LoopGrads | None) -> Arguments:
    """Return the arguments that all kernels of a loop share."""
    arguments = Arguments(LoopArguments)
    s = arguments.struct
    s.steps, s.batch, s.hidden, s.outputs = loop.steps, loop.batch, loop.hidden, loop.outputs
    s.first_step, s.reverse = loop.first_step, loop.reverse
    arguments.put_all(loop, ("lengths", "examples"), torch.int64)
    arguments.put_all(loop, ("resets",), torch.bool)
    arguments.put_all(loop, _IN_INPUT_DTYPE, loop.gates.dtype)
    arguments.put_all(loop, _IN_FLOAT32, torch.float32)
    if grads is not None:
        arguments.put_all(grads, _GRADS_IN_INPUT_DTYPE, loop.gates.dtype)
        arguments.put_all(grads, _GRADS_IN_FLOAT32, torch.float32)
    for name, draw in loop.draws.items():
        if name in _STREAMS:  # other states have streams in the arguments of kernels of any cell
            fill_stream(getattr(s, _STREAMS[name]), draw, loop.gates.get_device())
    return arguments


def norm_arguments(loop: Loop, grads: LoopGrads | None) -> Arguments:
    """Return the scales and moments of a loop's norm; all null without a norm."""
    arguments = Arguments(Norm)
    if loop.norm is None:
        return arguments
    arguments.struct.eps = loop.norm.eps
    arguments.put_all(loop.norm, ("scale_h", "scale_c", "shift_c"), torch.float32)
    arguments.put_all(loop, ("mean_h", "var_h", "mean_c", "var_c"), torch.float32)
    if grads is not None:
        arguments.put("dgh", grads.dgh, loop.gates.dtype)
        arguments.put_all(grads, ("dnc", "chat", "dscale_c", "dshift_c"), torch.float32)
    return arguments


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
ALL_FEATURES = 127  # all bits of `features_of`


def features_of(loop: Loop, grads: LoopGrads | None) -> int:
    """Return the bit mask FEATURES of common.cuh: the optional features that a loop uses.

    The base case, 0, is zoneout of rows of full length, forward in time.
    """
    features = (
        loop.lengths is not None,
        loop.resets is not None,
        loop.scale_h is not None,
        grads is not None and any(d is not None for d in grads.dseen),
        loop.reverse,
        "update" in loop.draws,
        any(draw.rule.by == "zero" for name, draw in loop.draws.items() if name != "update"),
    )
    return sum(bool(present) << bit for bit, present in enumerate(features))


@lru_cache(64)
def common_defines(cell: Definition | None, dtype: torch.dtype, fast: bool = True) -> Defines:
    """Return the macros of common.cuh.

    It contains the step of a built-in cell. Kernels of other cells, or of none, do not use it.
    """
    cell = cell if cell in CELLS else CELLS[0]
    return (
        ("CELL", CELLS.index(cell)),
        ("GATES", cell.gates),
        ("TYPE", TYPES[dtype]),
        ("FAST", int(fast)),
    )


def mode_defines(modes: tuple[int, int] | None) -> Defines:
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
