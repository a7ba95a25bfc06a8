"""Build the loop of a device from a run: precision, layout of rows and gates, buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...draws import Draw
from ...norm import Moments, StepNorm
from .. import cpu, cuda
from ..backend import Backend, Loop, by_unit
from ..cuda.pointwise.rows import Padded
from ..run import GATE_SCALES, GATE_WEIGHTS, Run, Weights
from .products import pad_columns, row_by_row
from .rows import Packed, as_packed
from .saved import Saved, moments_of, stored_slots

LOOPS: dict[str, Backend] = {"cpu": cpu, "cuda": cuda}


def wide(value: Tensor | None) -> Tensor | None:
    """Return a value in the precision of states: float32 for the half types."""
    return (
        value if value is None or value.dtype in (torch.float32, torch.float64) else value.float()
    )


def all_wide(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(v if v.dtype in (torch.float32, torch.float64) else v.float() for v in values)


def wide_weights(w: Weights) -> Weights:
    """Return weights in the precision of states; the cell's parameters are always in it."""
    (w_ih,) = all_wide((w.w_ih,))
    parameters = all_wide(w.parameters)
    return Weights(w_ih, wide(w.w_hh), wide(w.b_ih), wide(w.b_hh), wide(w.w_hr), parameters)


def state_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states for a dtype of the run."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


class Prepared(NamedTuple):
    """A run in the device's precision, with the gates in the device's layout."""

    x: Tensor
    states: tuple[Tensor, ...]
    reset_to: tuple[Tensor, ...]
    w: Weights
    norm: StepNorm | None
    rows: Packed | Padded
    by_unit: bool


def prepare(device: Backend, r: Run, rows: Packed | Padded | None = None) -> Prepared:
    rows = rows or (
        device.ROWS(r.lengths, r.steps, r.batch, r.reverse) if r.counts is None else as_packed(r)
    )
    norm = r.norm
    if norm is not None:
        given = None if norm.given is None else Moments(*map(wide, norm.given))  # type: ignore[arg-type]
        scales = {
            name: contiguous(wide(getattr(norm, name)))
            for name in ("scale_x", "scale_h", "scale_c", "shift_c")
        }
        norm = norm._replace(given=given, **scales)  # type: ignore[arg-type]
    x, states, reset_to, w = r.x, r.states, r.reset_to, r.weights
    if r.h0.dtype != state_type(r.h0.dtype):
        if device.IN_FLOAT32:
            x, w = x.float() if x.is_floating_point() else x, wide_weights(w)
            states, reset_to = all_wide(states), all_wide(reset_to)
        else:  # h enters the products without a cast
            w = w._replace(parameters=all_wide(w.parameters))
            states, reset_to = ((*v[:1], *all_wide(v[1:])) for v in (states, reset_to))
    gates_by_unit = device.by_unit(r)
    if gates_by_unit:
        weights = {name: getattr(w, name) for name in GATE_WEIGHTS}
        w = w._replace(**reorder(by_unit, r.cell.gates, weights))
        if norm is not None:
            of_gates = {name: getattr(norm, name) for name in GATE_SCALES}
            norm = norm._replace(**reorder(by_unit, r.cell.gates, of_gates))
    return Prepared(x, states, reset_to, w, norm, rows, gates_by_unit)


def contiguous(v: Tensor | None) -> Tensor | None:
    """Return a contiguous value, as loops read it; a parameter may be strided or expanded."""
    return None if v is None else v.contiguous()


def reorder(
    change_order: Callable[..., Tensor], gates: int, values: dict[str, Any]
) -> dict[str, Any]:
    """Return values with the gates in another order."""
    return {name: v if v is None else change_order(v, gates) for name, v in values.items()}


def reorder_moments(
    change_order: Callable[..., Tensor], gates: int, moments: Moments | None
) -> Moments | None:
    """Return moments with the gates of x·Wx and h·Wh in another order."""
    if moments is None:
        return None

    def reordered(v: Tensor) -> Tensor:
        return change_order(v, gates, 1)

    return moments._replace(
        mean_x=reordered(moments.mean_x),
        var_x=reordered(moments.var_x),
        mean_h=reordered(moments.mean_h),
        var_h=reordered(moments.var_h),
    )


def empty_outputs(r: Run, dtype: torch.dtype) -> Saved:
    """Return the buffers of a pass, uninitialised; `final` is empty."""
    at, like, norm, wide_ = r.x.shape[:-1], r.h0, r.norm, state_type(dtype)
    rows, hidden, gates = math.prod(at), r.hidden, r.width
    moments: list[Tensor] = []
    if norm is not None and norm.given is None:
        sizes = (
            [(rows,)] * 3
            if norm.over == "units"
            else [(r.steps, gates), (r.steps, gates), (r.steps, hidden)]
        )
        for size in sizes if norm.scale_c is not None else sizes[:2]:
            moments += [like.new_zeros(size, dtype=wide_) for _ in range(2)]

    def of_rows(width: int) -> Tensor:
        return like.new_empty(rows, width, dtype=wide_)

    return Saved(
        y=like.new_empty(*at, like.shape[1], dtype=dtype),
        final=(),
        states=tuple(like.new_empty(*at, hidden, dtype=wide_) for _ in r.states[1:]),
        gates=like.new_empty(rows, gates, dtype=dtype),
        hats=of_rows(gates) if norm is not None else None,
        slots=tuple(of_rows(hidden * n) if n else None for n in stored_slots(r)),
        moments=moments_of(moments),
    )


def build_loop(
    r: Run, ready: Prepared, saved: Saved, x: Tensor | None = None, b_x: Tensor | None = None
) -> Loop:
    """Return the loop for a device; y and states of `saved` are in the layout of its rows."""
    w, norm, rows = ready.w, ready.norm, ready.rows
    draws: dict[str, Draw] = {draw.rule.stream: draw for draw in r.draws}
    examples, h0 = rows.sort(r.examples), ready.states[0]
    scale_h = None
    if (draw := draws.pop("variational_hidden", None)) is not None:
        scale_h = LOOPS[h0.device.type].hidden_scale(draw, examples, h0.shape[1], h0.dtype)
    moments: Sequence[Tensor | None] = saved.moments or (None,) * 6
    if norm is not None and norm.given is not None:
        moments = [None if v is None else v.contiguous() for v in norm.given]
    mean_x, var_x, mean_h, var_h, mean_c, var_c = moments
    assert saved.gates is not None
    parameters = {name: v.contiguous() for name, v in zip(r.cell.parameters, w.parameters)}
    plain = len(r.cell.storage.slots)
    return Loop(
        cell=r.cell,
        hidden=r.hidden,
        steps=rows.steps,
        counts=rows.counts,
        offsets=rows.starts,
        initial=tuple(rows.sort(v) for v in ready.states),
        x=x,
        w_ih=None if x is None else w.w_ih.contiguous(),
        w_hh=contiguous(w.w_hh),
        b_x=contiguous(b_x),
        b_h=contiguous(w.b_hh) if has_own_bias(r) else None,
        w_hr=contiguous(w.w_hr),
        parameters=tuple(parameters[name] for name in r.cell.vectors),
        matrices=tuple(parameters[name].to(saved.gates.dtype) for name in r.cell.matrices),
        draws=draws,
        masks={
            stream: rows.pack(draw.given.to(state_type(h0.dtype)))
            for stream, draw in draws.items()
            if draw.given is not None
        },
        scale_h=scale_h,
        norm=norm,
        lengths=rows.sorted_lengths,
        examples=examples,
        first_step=r.first_step,
        reverse=rows.reverse,
        resets=rows.cuts(r.resets),
        reset_to=tuple(rows.sort(v) for v in ready.reset_to),
        gates=saved.gates,
        states=(saved.y, *saved.states),
        hats=saved.hats,
        slots=saved.slots[:plain],
        inner=tuple(v for v in saved.slots[plain:] if v is not None),
        mean_x=mean_x,
        var_x=var_x,
        mean_h=mean_h,
        var_h=var_h,
        mean_c=mean_c,
        var_c=var_c,
        by_unit=ready.by_unit,
    )


def has_own_bias(r: Run) -> bool:
    """Return True if h·Wh has a bias of its own."""
    return r.norm is not None or r.cell.storage.apart


def input_product(x: Tensor, w_ih: Tensor, out: Tensor) -> None:
    """Write x·Wx to `out`; for ids of one-hot rows, look up rows of a table."""
    if x.is_floating_point():
        row_by_row(pad_columns(x), pad_columns(w_ih).t(), out)
    else:
        torch.index_select(w_ih.t().contiguous(), 0, x.view(-1), out=out)
