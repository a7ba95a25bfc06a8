"""Any cell: what its kernels have in common on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....definition.cuda import print_unit
from ....definition.products import MOST_PRODUCTS
from ....definition.storage import MOST_SLOTS
from ....streams import STATE_STREAMS
from ...backend import Loop, LoopGrads, mask_coordinates
from ...memory import address
from ...run import Run, kind_of
from ..runtime.arguments import Arguments, Defines, Stream, common_defines, fill_stream
from ..runtime.compiler import tf32

_i64, _p = ctypes.c_int64, ctypes.c_void_p


class CellArguments(ctypes.Structure):
    """`CellArguments` of unit.cuh."""

    _fields_ = [
        *((name, Stream) for name in ("state0", "state1", "state2", "state3", "update")),
        *((f"{name}{k}", _p) for name in ("initial", "reset", "states") for k in range(4)),
        *((f"slot{k}", _p) for k in range(2)),
        *((f"parameter{k}", _p) for k in range(8)),
        *((f"{name}{k}", _p) for name in ("dseen", "dstate", "dreset") for k in range(4)),
        *((f"dparameter{k}", _p) for k in range(8)),
        *((name, _p) for name in ("h", "h_in", "product", "owed", "d_in", "rec")),
        *((name, _i64) for name in ("head_units", "h_pitch", "rec_pitch", "splits")),
        *(
            (f"{name}{k}", _p)
            for name in ("in", "inner", "part", "din", "dinner", "d_part", "ins")
            for k in range(MOST_PRODUCTS)
        ),
        *((name, _i64) for name in ("in_pitch", "din_pitch", "gathered")),
        *((f"matrix{k}", _p) for k in range(MOST_PRODUCTS)),
        *((f"given{k}", _p) for k in range(5)),
        *((f"{name}{k}", _p) for name in ("dropped", "added") for k in range(4)),
        *((f"dgiven{k}", _p) for k in range(5)),
        *((f"{name}{k}", _p) for name in ("ddropped", "dadded") for k in range(4)),
    ]


def supports(r: Run) -> bool:
    """Return True if the kernels of any cell can run this."""
    storage = r.cell.storage
    fits = storage.fits_products if r.cell.products else storage.fits
    masks = [draw.rule for draw in r.draws if draw.given is not None]
    masks_fit = not masks or (storage.takes_masks and not any(rule.holds_gate for rule in masks))
    plain = r.norm is None and r.w_hr is None
    return fits and masks_fit and len(storage.slots) <= MOST_SLOTS and plain


_GIVEN = {"drop": "dropped", "add": "added"}  # fields of masks that are always given, by kind


class AnyCellArguments(Arguments):
    """The struct `CellArguments` of a loop."""

    def __init__(self, loop: Loop, grads: LoopGrads | None) -> None:
        super().__init__(CellArguments)
        device = loop.gates.get_device()
        self.alive.append(loop.gates)
        # h has the dtype of the input, and is in `Loop`.
        self._put_each("initial", loop.initial, first=1)
        self._put_each("reset", loop.reset_to, first=1)
        self._put_each("states", loop.states, first=1)
        self._put_each("slot", loop.slots)
        self._put_each("parameter", loop.parameters)
        if grads is not None:
            # One partial sum for each row: the caller adds them.
            count = len(loop.parameters)
            sums = loop.h0.new_zeros(count, *loop.h0.shape, dtype=torch.float32)
            grads.dparameters = sums.unbind()
            self._put_each("dseen", (None, *grads.dseen))
            self._put_each("dstate", grads.dstates)
            self._put_each("dreset", grads.dreset)
            self._put_each("dparameter", grads.dparameters)
        for stream, draw in loop.draws.items():
            kind, k = ("", 4) if stream == "update" else kind_of(draw.rule)
            if stream in loop.masks:
                self._give(stream, f"{_GIVEN.get(kind, 'given')}{k}", loop, grads)
            if kind not in _GIVEN:
                fill_stream(getattr(self.struct, f"state{k}" if kind else stream), draw, device)

    def _give(self, stream: str, field: str, loop: Loop, grads: LoopGrads | None) -> None:
        """Put the mask of a stream, and its gradient if it needs one."""
        self.put(field, loop.masks[stream], torch.float32)
        if grads is not None:
            self.put(f"d{field}", grads.dmasks.get(stream), torch.float32)

    def _put_each(self, name: str, values: Sequence[Tensor | None], first: int = 0) -> None:
        for k, value in enumerate(values):
            if k >= first:
                self.put(f"{name}{k}", value, torch.float32)


def with_dense_weight(loop: Loop) -> Loop:
    """Return a loop whose W_h is a dense matrix: blocks of a block-diagonal one among zeros.

    All steps in one launch wait for each other, not for the products with the zeros.
    """
    heads, gates = loop.cell.heads, loop.cell.gates
    if heads == 1:
        return loop
    w = loop.recurrent_weight
    size = w.shape[1]
    dense = w.new_zeros(gates, heads, size, heads, size)
    dense.diagonal(dim1=1, dim2=3).copy_(w.view(gates, heads, size, size).permute(0, 2, 3, 1))
    return replace(loop, w_hh=dense.view(gates * loop.hidden, loop.hidden))


def holds_gate(loop: Loop) -> bool:
    """Return True if a noise keeps the old value of a gate."""
    draw = loop.draws.get("update")
    return draw is not None and draw.rule.holds_gate


def step_text(loop: Loop, grads: LoopGrads | None = None) -> str:
    """Return the generated step, with the rules of noise that the loop needs."""
    kinds = {kind_of(draw.rule)[0] for name, draw in loop.draws.items() if name != "update"}
    if kinds & {*_GIVEN} or (grads is not None and grads.dmasks):
        return print_unit(loop.cell, "given")
    drop_or_zero = any(
        name == "update" or draw.rule.by != "previous" for name, draw in loop.draws.items()
    )
    return print_unit(loop.cell, "all" if drop_or_zero else "zoneout")


def noise_defines(loop: Loop) -> Defines:
    """Return macros of unit.cuh for what is known about the noise when the kernel is compiled.

    There are none unless the only noise is zoneout whose masks see step, example and unit, with one
    seed.
    """
    if any(name not in STATE_STREAMS for name in loop.draws):
        return ()
    draws = [loop.draws.get(name) for name in STATE_STREAMS]
    noise, previous = [0] * len(STATE_STREAMS), None
    for k, draw in enumerate(draws):
        if draw is not None:
            *coordinates, high = mask_coordinates(draw.rule)
            if draw.rule.by != "previous" or not all(coordinates):
                return ()
            shares = previous is not None and draw.seed is not None and previous.plane == draw.plane
            noise[k] = (2 if draw.seed is None else 1) + 4 * high + 8 * shares
        previous = None if draw is None or draw.seed is None else draw
    seeds = {address(draw.seed) for draw in draws if draw is not None and draw.seed is not None}
    return tuple((f"STREAM{k}", v) for k, v in enumerate(noise)) if len(seeds) < 2 else ()


def defines_of(dtype: torch.dtype, vector: int = 1) -> Defines:
    """Return the macros that the kernels are compiled with."""
    fast = dtype != torch.float32 or tf32()
    return (*common_defines(None, dtype, fast), ("VECTOR", vector))
