"""One pass over time and its way back: the large products, and between them the loop of the device.

A pass is written as a generator that stops where its loop is due, so that the loops of several passes can be given to
the device at once, which may run them side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..draws import Draw
from ..norm import Moments, StepNorm
from . import cpu, cuda
from .backend import Backend
from .cuda.rows import Padded
from .interface import Run, Weights
from .loop import GATES, Backward, Loop, by_gate, by_unit
from .products import added_up, padded, parted, product, row_by_row, spare, times, times_and_sum
from .rows import Packed, as_packed

LOOPS: dict[str, Backend] = {"cpu": cpu, "cuda": cuda}

# What has a derivative, in the order of the operator's arguments.
DIFFERENTIABLE = (
    "x", "h0", "c0", "reset_h", "reset_c", "w_ih", "w_hh", "b_ih", "b_hh", "w_hr",
    "scale_x", "scale_h", "scale_c", "shift_c",
)  # fmt: skip
# What of that only h depends on, and no other state.
OF_OUTPUTS = ("w_hr", "scale_c", "shift_c")
# What of that has a row for every gate: of the weights, and of a norm.
OF_GATES = ("w_ih", "w_hh", "b_ih", "b_hh", "scale_x", "scale_h")


class Kept(NamedTuple):
    """What a pass gives, and what its way back needs of it."""

    y: Tensor  # [T, B, outputs], as the rows of x lie
    h: Tensor  # [B, outputs]
    c: Tensor | None  # [B, H]
    cells: Tensor | None  # [T, B, H], in the precision of the states
    gates: Tensor  # [T · B, G]
    gh: Tensor | None
    moments: tuple[Tensor | None, ...]  # mean and variance of x·Wx, h·Wh and c
    rows: Packed | Padded | None = None  # how they lay; None: to be found out again


class Back(NamedTuple):
    """What a way back starts from."""

    r: Run
    kept: Kept
    d: Sequence[Tensor | None]  # what has come back for y, h, c and cells
    needs: Sequence[bool]  # which of `DIFFERENTIABLE` somebody wants to know


def forward(*runs: Run) -> list[Kept]:
    """Run over time: several runs side by side, where the device can."""
    device = LOOPS[runs[0].x.device.type]
    return _together([_forward(device, r) for r in runs], device.forward)


def backward(*backs: Back) -> list[list[Tensor | None]]:
    """The derivatives of `DIFFERENTIABLE` for each run; None where `needs` says no."""
    found = derivatives(*backs)
    dtype = backs[0].r.h0.dtype
    return [[v if v is None or v.dtype == dtype else v.to(dtype) for v in own] for own in found]


def derivatives(*backs: Back) -> list[list[Tensor | None]]:
    """The same in the precision in which they are found: those of states in that of states."""
    kind = backs[0].r.x.device.type
    device = LOOPS[kind]
    # Somebody may ask for derivatives inside of autocast, which would round products that are ours to round.
    mixed = torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if mixed else nullcontext():
        each = _together([_backward(device, back) for back in backs], device.backward)
    return [
        [found.get(name) if needed else None for name, needed in zip(DIFFERENTIABLE, back.needs)]
        for found, back in zip(each, backs)
    ]


def _together(passes: Sequence[Generator[Any, None, Any]], loops: Callable[[list[Any]], None]) -> list[Any]:
    """Each pass up to its loop, the loops, and each pass to its end; what the passes return."""
    loops([next(one) for one in passes])
    return [_end(one) for one in passes]


def _end(one: Generator[Any, None, Any]) -> Any:
    try:
        next(one)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("a pass has one loop")


def reached(steps: int, d: Sequence[Tensor | None], needs: Sequence[bool]) -> list[bool]:
    """Which of `DIFFERENTIABLE` are needed and have a path from the gradients `d` of y, h, c and cells.

    Without one the gradient is None, as in torch.nn: the h of a single step does not enter its c.
    """
    only_c = steps == 1 and d[0] is None and d[1] is None
    return [needed and not (only_c and name in OF_OUTPUTS) for needed, name in zip(needs, DIFFERENTIABLE)]


def as_outputs(cells: Tensor | None, y: Tensor) -> Tensor | None:
    """The cells, which are kept as the states are, in the type of the outputs."""
    return cells if cells is None or cells.dtype == y.dtype else cells.to(y.dtype)


def gives_moments(r: Run) -> bool:
    """Whether somebody wants to know what a batch norm has seen."""
    return r.norm is not None and r.norm.over == "examples" and r.norm.given is None


# --- what both need --------------------------------------------------------------------------------


def wide(value: Tensor | None) -> Tensor | None:
    """A value in the precision that states are kept in: float32 for the half types."""
    return value if value is None or value.dtype in (torch.float32, torch.float64) else value.float()


def state_type(dtype: torch.dtype) -> torch.dtype:
    """The precision that states are kept in."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


class _Ready(NamedTuple):
    """A run with its numbers in the device's precision, and the gates as they lie there."""

    x: Tensor
    h0: Tensor
    c0: Tensor | None
    reset_h: Tensor | None
    reset_c: Tensor | None
    w: Weights
    norm: StepNorm | None
    rows: Packed | Padded
    by_unit: bool


def _ready(device: Backend, r: Run, rows: Packed | Padded | None = None) -> _Ready:
    rows = rows or (device.ROWS(r.lengths, r.steps, r.batch, r.reverse) if r.counts is None else as_packed(r))
    norm = r.norm
    if norm is not None:
        given = None if norm.given is None else Moments(*map(wide, norm.given))  # type: ignore[arg-type]
        scales = {
            name: in_one_piece(wide(getattr(norm, name))) for name in ("scale_x", "scale_h", "scale_c", "shift_c")
        }
        norm = norm._replace(given=given, **scales)  # type: ignore[arg-type]
    x, h0, reset_h, w = r.x, r.h0, r.reset_h, r.weights
    if device.WIDE and h0.dtype != state_type(h0.dtype):
        x, h0, reset_h, w = x.float() if x.is_floating_point() else x, h0.float(), wide(reset_h), Weights(*map(wide, w))  # type: ignore[arg-type]
    turned = device.by_unit(r)
    if turned:
        w = w._replace(**_turned(by_unit, r.cell, {name: getattr(w, name) for name in OF_GATES[:4]}))
        if norm is not None:
            norm = norm._replace(**_turned(by_unit, r.cell, {name: getattr(norm, name) for name in OF_GATES[4:]}))
    return _Ready(x, h0, wide(r.c0), reset_h, wide(r.reset_c), w, norm, rows, turned)


def in_one_piece(v: Tensor | None) -> Tensor | None:
    """As loops read it: a parameter, or what a hook gives back of a node, may be a column of something, or expanded."""
    return None if v is None else v.contiguous()


def _turned(turn: Callable[..., Tensor], cell: str, given: dict[str, Any]) -> dict[str, Any]:
    """Values with the gates in another order."""
    return {name: v if v is None else turn(v, cell) for name, v in given.items()}


def _turned_moments(
    turn: Callable[..., Tensor], cell: str, moments: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The moments, those of x·Wx and h·Wh with the gates in another order."""
    return (*(v if v is None else turn(v, cell, 1) for v in moments[:4]), *moments[4:])


def empty_outputs(
    r: Run, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, list[Tensor | None]]:
    """y, c, gates, gh and the moments, unwritten; None where the cell or the norm has none."""
    at, steps = r.x.shape[:-1], r.steps
    lstm, rows, wide_, w_hh = r.cell == "lstm", math.prod(at), state_type(dtype), r.weights.w_hh
    gates, hidden = w_hh.shape[0], w_hh.shape[0] // GATES[r.cell]
    norm, like = r.norm, r.h0
    moments: list[Tensor | None] = [None] * 6
    if norm is not None and norm.given is None:
        sizes = [(rows,)] * 3 if norm.over == "units" else [(steps, gates), (steps, gates), (steps, hidden)]
        for k, size in enumerate(sizes if lstm else sizes[:2]):
            moments[2 * k : 2 * k + 2] = [like.new_zeros(size, dtype=wide_) for _ in range(2)]
    extra = gates if norm is not None else hidden if r.cell == "gru" else 0
    return (
        like.new_empty(*at, like.shape[1], dtype=dtype),
        like.new_empty(*at, hidden, dtype=wide_) if lstm else None,
        like.new_empty(rows, gates, dtype=dtype),
        like.new_empty(rows, extra, dtype=wide_) if extra else None,
        moments,
    )


def _loop(
    r: Run,
    ready: _Ready,
    gates: Tensor,
    y: Tensor,
    c: Tensor | None,
    gh: Tensor | None,
    moments: Sequence[Tensor | None],
    x: Tensor | None = None,
    b_x: Tensor | None = None,
) -> Loop:
    """The loop as a device gets it."""
    h0, w, norm, rows = ready.h0, ready.w, ready.norm, ready.rows
    draws: dict[str, Draw] = {draw.rule.stream: draw for draw in r.draws}
    examples = rows.sort(r.examples)
    scale_h = None
    if (draw := draws.pop("variational_hidden", None)) is not None:
        scale_h = LOOPS[h0.device.type].scale_of(draw, examples, h0.shape[1], h0.dtype)
    if norm is not None and norm.given is not None:
        moments = [None if v is None else v.contiguous() for v in norm.given]
    mean_x, var_x, mean_h, var_h, mean_c, var_c = moments

    def sort(v: Tensor | None) -> Tensor | None:
        return None if v is None else rows.sort(v)

    return Loop(
        cell=r.cell,
        steps=rows.steps,
        counts=rows.counts,
        offsets=rows.starts,
        h0=rows.sort(h0),
        c0=sort(ready.c0),
        x=x,
        w_ih=None if x is None else w.w_ih.contiguous(),
        w_hh=w.w_hh.contiguous(),
        b_x=in_one_piece(b_x),
        b_h=in_one_piece(w.b_hh) if _apart(r) else None,
        w_hr=in_one_piece(w.w_hr),
        draws=draws,
        scale_h=scale_h,
        norm=norm,
        lengths=rows.sorted_lengths,
        examples=examples,
        first_step=r.first_step,
        reverse=rows.reverse,
        resets=rows.cuts(r.resets),
        reset_h=sort(ready.reset_h),
        reset_c=sort(ready.reset_c),
        gates=gates,
        y=y,
        c=c,
        gh=gh,
        mean_x=mean_x,
        var_x=var_x,
        mean_h=mean_h,
        var_h=var_h,
        mean_c=mean_c,
        var_c=var_c,
        by_unit=ready.by_unit,
    )


def _apart(r: Run) -> bool:
    """Whether h·Wh has a bias of its own."""
    return r.norm is not None or r.cell == "gru"


# --- forwards --------------------------------------------------------------------------------------


def _forward(device: Backend, r: Run) -> Generator[Loop, None, Kept]:
    narrow = r.h0.dtype
    ready = _ready(device, r)
    rows, w = ready.rows, ready.w
    y, c, gates, gh, moments = empty_outputs(r, ready.h0.dtype)
    device.prepare(y, c, gates, gh)
    x = rows.inputs(ready.x)
    n, whole, every = x.shape[0], rows.whole, gates.shape[0]
    inside = x.is_floating_point() and device.takes_x(w.w_ih)
    if not inside:
        _input_product(x, w.w_ih, gates[:n] if n < every else gates)
    if n < every:
        for kept in (gates, gh):
            if kept is not None:
                kept[n:].zero_()  # rows of sequences that have ended: nobody looks, but nothing is left to chance
    ys = y.view(-1, y.shape[-1]) if whole else y.new_empty(n, y.shape[-1])
    cs = None if c is None else c.view(-1, c.shape[-1]) if whole else c.new_empty(n, c.shape[-1])
    bias = gates.new_zeros(gates.shape[1]) if w.b_ih is None else w.b_ih
    bias = bias if w.b_hh is None or _apart(r) else bias + w.b_hh
    loop = _loop(r, ready, gates, ys, cs, gh, moments, x if inside else None, bias)
    yield loop

    states = [(v, v0) for v, v0 in ((ys, loop.h0), (cs, loop.c0)) if v is not None and v0 is not None]
    ended: list[Any] = rows.final(states, narrow)
    h_n, c_n = ended if len(ended) > 1 else (*ended, None)
    if not whole:
        y = rows.unpack(ys)
        c = None if cs is None else rows.unpack(cs)
    y = y if y.dtype == narrow else y.to(narrow)
    found = _turned_moments(by_gate, r.cell, moments) if ready.by_unit else tuple(moments)
    return Kept(y, h_n, c_n, c, gates, gh, found, rows)


def _input_product(x: Tensor, w_ih: Tensor, out: Tensor) -> None:
    """x·Wx; of a one-hot x, given by its numbers, the rows of a table."""
    if x.is_floating_point():
        row_by_row(padded(x), padded(w_ih).t(), out)
    else:
        torch.index_select(w_ih.t().contiguous(), 0, x.view(-1), out=out)


# --- backwards -------------------------------------------------------------------------------------


def _backward(device: Backend, of: Back) -> Generator[tuple[Loop, Backward], None, dict[str, Tensor]]:
    r, kept, (dy, dh, dc, dcells), needs = of.r, of.kept, of.d, dict(zip(DIFFERENTIABLE, of.needs))
    ready = _ready(device, r, kept.rows)
    rows, w, norm = ready.rows, ready.w, ready.norm
    lstm = r.cell == "lstm"
    ys = rows.pack(kept.y if kept.y.dtype == ready.h0.dtype else kept.y.to(ready.h0.dtype))
    cs = None if kept.cells is None else rows.pack(kept.cells)
    n, wide_ = ys.shape[0], w.w_hh.shape[0]
    hidden = wide_ // GATES[r.cell]
    moments = _turned_moments(by_unit, r.cell, kept.moments) if ready.by_unit else kept.moments
    inner = (kept.gates.contiguous(), ys, cs, in_one_piece(kept.gh), [in_one_piece(v) for v in moments])
    loop = _loop(r, ready, *inner)
    states = state_type(ys.dtype)

    def start(d: Tensor | None, like: Tensor) -> Tensor:
        """What has come back for the final states, longest first, in a tensor that may be written to."""
        if d is None:
            return torch.zeros_like(like, dtype=states)
        return rows.sort(d.to(states)).clone(memory_format=torch.contiguous_format)

    def none(like: Tensor | None) -> Tensor | None:
        return None if like is None else torch.zeros_like(like, dtype=states)

    def scratch(width: int, dtype: torch.dtype = ys.dtype, there: bool = True) -> Any:
        return device.scratch(ys, n, width, dtype=dtype) if there else None

    def parts(width: int, there: bool) -> Tensor | None:
        return ys.new_zeros(device.PARTS(), width, dtype=states) if there else None

    normed, normed_c, projected = norm is not None, norm is not None and lstm, w.w_hr is not None
    dgx = scratch(wide_)
    dsh = scratch(wide_) if r.cell == "gru" else dgx
    dgh = scratch(wide_) if normed else dsh
    back = Backward(
        dy=torch.zeros_like(ys) if dy is None else rows.pack(dy if dy.dtype == ys.dtype else dy.to(ys.dtype)),
        dcells=None if cs is None or dcells is None else rows.pack(dcells),
        dh=start(dh, loop.h0),
        dc=None if loop.c0 is None else start(dc, loop.c0),
        dreset_h=none(loop.reset_h),
        dreset_c=none(loop.reset_c),
        dgx=dgx,
        dgh=dgh,
        dsh=dsh,
        du=scratch(ys.shape[1], there=projected),
        u=scratch(hidden, there=projected),
        dnc=scratch(hidden, states, normed_c and not ready.by_unit),
        chat=scratch(hidden, states, normed_c and not ready.by_unit),
        dx=scratch(wide_, there=normed),
        dscale_x=parts(wide_, normed),
        dscale_h=parts(wide_, normed),
        dscale_c=parts(hidden, normed_c),
        dshift_c=parts(hidden, normed_c),
    )
    x = rows.inputs(ready.x)
    if back.dx is not None:
        _input_product(x, w.w_ih, back.dx)
    yield loop, back

    starts = {"h0": back.dh, "c0": back.dc, "reset_h": back.dreset_h, "reset_c": back.dreset_c}
    found = {name: rows.unsort(value) for name, value in starts.items() if value is not None and needs[name]}
    if back.dx is not None:
        dgx = back.dx
        sums = {"scale_x": back.dscale_x, "scale_h": back.dscale_h, "scale_c": back.dscale_c, "shift_c": back.dshift_c}
        found |= {name: total.sum(0) for name, total in sums.items() if total is not None}
    w_ih, du, u, one_hot = w.w_ih, back.du, back.u, not x.is_floating_point()
    biases = [name for name in ("b_ih", "b_hh") if getattr(w, name) is not None and needs[name]]
    alike = biases if back.dsh is back.dgx else [name for name in biases if name == "b_ih"]  # dgx over all rows
    beside = 0 if normed else len(alike)  # so often it is wanted from a product, which may have it on the side
    added: list[Tensor] = []
    if one_hot and needs["w_ih"]:
        differences = rows.differences if loop.balanced else None
        found["w_ih"], added = _rows_of_numbers(dgx, x, w_ih, differences, beside)
    narrow = r.h0.dtype
    if ys.dtype != narrow and device.narrow_products(narrow):  # what is left are large products
        x, w_ih = rows.inputs(r.x), r.weights.w_ih
        together, dgx = dgh is dgx, dgx.to(narrow)
        dgh = dgx if together else dgh.to(narrow)
        du, u = (v if v is None else v.to(narrow) for v in (du, u))
        entering: dict[str, Any] = {name: getattr(loop, name) for name in ("y", "h0", "reset_h", "scale_h")}
        entering = {name: v if v is None else v.to(narrow) for name, v in entering.items()}
        loop = replace(loop, **entering)
    # Of one step h and x lie ready as they are.
    both = r.steps > 1 and needs["w_ih"] and needs["w_hh"] and not one_hot and dgh is dgx
    width = (ys.shape[1], x.shape[-1])
    if both and device.joins(n, wide_, *width):  # one product for both matrices
        ones = spare(sum(width), x)
        h_and_x = device.scratch(ys, n, sum(width) + ones, dtype=dgx.dtype)
        rows.beside(loop, x, h_and_x)
        columns = [(0, width[0]), (width[0], width[1]), *[(sum(width), 1)] * (beside if ones else 0)]
        found["w_hh"], found["w_ih"], *of_ones = parted(product(dgx.t(), h_and_x), columns)
        added = [v[:, 0] for v in of_ones]
        device.give_back(h_and_x)
    else:
        if needs["w_ih"] and not one_hot:
            from_x = rows.differences(x) if loop.balanced else x
            found["w_ih"], added = times_and_sum(dgx.t(), from_x, beside)
        if needs["w_hh"]:
            found["w_hh"] = rows.times_entered(dgh, loop)
    if du is not None and u is not None and needs["w_hr"]:
        found["w_hr"] = product(du.t(), u)
    if needs["x"]:
        found["x"] = rows.unpack(times(dgx, w_ih, by_row=True))
    if alike and not added:
        one = added_up(back.dgx, loop.balanced) if back.db_x is None else back.db_x
        added = [one, *(one.clone() for _ in alike[1:])]
    found |= dict(zip(alike, added))
    if "b_hh" in biases and "b_hh" not in alike:
        found["b_hh"] = added_up(back.dsh, loop.balanced) if back.db_h is None else back.db_h
    device.give_back(back.dgx, back.dgh, back.dsh, back.du, back.u, back.dnc, back.chat, back.dx)
    if ready.by_unit:
        found |= _turned(by_gate, r.cell, {name: v for name, v in found.items() if name in OF_GATES})
    return found


def _rows_of_numbers(
    d: Tensor, x: Tensor, w_ih: Tensor, differences: Callable[[Tensor], Tensor] | None, sums: int
) -> tuple[Tensor, list[Tensor]]:
    """[G, input]: the derivative of the weights of one-hot rows, from that of the product; and sums beside it."""
    numbers, count = x.view(-1), w_ih.shape[1]
    if count <= 256:  # a product with a matrix of so few columns costs less than adding rows in order
        dense = d.new_zeros(len(d), count).scatter_(1, x, 1.0)
        return times_and_sum(d.t(), dense if differences is None else differences(dense), sums)
    if differences is not None:  # a row is one at its own number less one at that of the row it is compared with
        away = differences(x).view(-1)
        d = d.masked_fill((away == 0).unsqueeze(-1), 0.0)
        d, numbers = torch.cat((d, -d)), torch.cat((numbers, numbers - away))
    return sum_rows(d, numbers, count).t().contiguous(), []


def sum_rows(d: Tensor, numbers: Tensor, count: int) -> Tensor:
    """[count, ·]: the rows of `d` that have each number added up, in a fixed order and without waiting for a GPU."""
    return d.new_zeros(count, d.shape[1]).index_put_((numbers,), d, accumulate=True)
