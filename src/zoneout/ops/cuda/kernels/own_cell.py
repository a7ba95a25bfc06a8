"""Any cell: the arguments of its kernels, for `cell_steps` and `diagonal`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ....definition.cuda import print_unit
from ....noise import STATE_STREAMS
from ...backend import Loop, LoopGrads
from ...run import Run
from ..runtime.arguments import TYPES, Arguments, Stream, fill_stream
from ..runtime.compiler import tf32

_i64, _p = ctypes.c_int64, ctypes.c_void_p


class Own(ctypes.Structure):
    """`Own` of unit.cuh."""

    _fields_ = [
        *((name, Stream) for name in ("state0", "state1", "state2", "state3", "update")),
        *((f"{name}{k}", _p) for name in ("initial", "reset", "states") for k in range(4)),
        *((f"slot{k}", _p) for k in range(2)),
        *((f"parameter{k}", _p) for k in range(8)),
        *((f"{name}{k}", _p) for name in ("dseen", "dstate", "dreset") for k in range(4)),
        *((f"dparameter{k}", _p) for k in range(8)),
        *((name, _p) for name in ("h", "h_in", "product", "owed", "d_in", "rec")),
        *((name, _i64) for name in ("block", "h_pitch", "rec_pitch", "sums")),
    ]


def supports(r: Run) -> bool:
    """Return True if the kernels of any cell can run this."""
    return r.cell.storage.fits and r.norm is None and r.w_hr is None


class OwnArguments(Arguments):
    """The struct `Own` of a loop."""

    def __init__(self, loop: Loop, back: LoopGrads | None) -> None:
        super().__init__(Own)
        device = loop.gates.get_device()
        self.alive.append(loop.gates)
        # h has the dtype of the input, and is in `Loop`.
        self._put_each("initial", loop.initial, first=1)
        self._put_each("reset", loop.reset_to, first=1)
        self._put_each("states", loop.states, first=1)
        self._put_each("slot", loop.slots)
        self._put_each("parameter", loop.parameters)
        if back is not None:
            # One partial sum for each row: the caller adds them.
            back.dparameters = tuple(
                torch.zeros_like(loop.h0, dtype=torch.float32) for _ in loop.parameters
            )
            self._put_each("dseen", (None, *back.dseen))
            self._put_each("dstate", back.dstates)
            self._put_each("dreset", back.dreset)
            self._put_each("dparameter", back.dparameters)
        streams = {f"state{k}": stream for k, stream in enumerate(STATE_STREAMS)}
        for field, stream in (streams | {"update": "update"}).items():
            if (draw := loop.draws.get(stream)) is not None:
                fill_stream(getattr(self.struct, field), draw, device)

    def _put_each(self, name: str, values: Sequence[Tensor | None], first: int = 0) -> None:
        for k, value in enumerate(values):
            if k >= first:
                self.put(f"{name}{k}", value, torch.float32)


def holds(loop: Loop) -> bool:
    """Return True if a noise holds a gate."""
    draw = loop.draws.get("update")
    return draw is not None and draw.rule.holds_gate


def step_text(loop: Loop) -> str:
    """Return the generated step, with the rules of noise that the loop needs."""
    others = any(
        name == "update" or draw.rule.by != "previous" for name, draw in loop.draws.items()
    )
    return print_unit(loop.cell, "all" if others else "zoneout")


def defines_of(dtype: torch.dtype, vector: int = 1) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernels are compiled with."""
    fast = int(dtype != torch.float32 or tf32())
    return (("CELL", 0), ("TYPE", TYPES[dtype]), ("FAST", fast), ("V", vector))
