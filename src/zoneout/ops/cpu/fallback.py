"""The loop over time in torch calls, for machines without a C compiler. It runs any cell.

The order of a step is that of `body.h`. The operations of a step come from the cell's own graphs
(`plans.py`). Steps are processed in chunks: values that do not depend on the previous step are
computed for many steps at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...definition.operations import less, mix
from ...definition.torch_calls import Calls
from ..backend import Loop, LoopGrads
from .chunks import Chunk, Columns, Rows, chunks_of, masks_by_name
from .plans import Case, backward_plan, forward_plan, parts_of

Multiply = Callable[[Tensor, Tensor, bool], None]  # left operand, result, True to add to the result
Values = dict[str, Any]  # tensors of a chunk by a plan's names, or columns: one per step


def _case(loop: Loop, masks: dict[str, Tensor], grads: LoopGrads | None = None) -> Case:
    """Return the properties of a chunk that its plan depends on."""
    projected, seen = loop.w_hr is not None, [False] * len(loop.initial)
    if grads is not None:
        present = [not projected, *(v is not None for v in grads.dseen)]  # may be short
        seen[: len(present)] = present
    kinds = tuple(sorted((name, _kind(mask)) for name, mask in masks.items()))
    return Case(loop.cell, loop.gates.dtype, kinds, loop.norm is not None, projected, tuple(seen))


def _kind(mask: Tensor) -> str:
    if mask.dtype == torch.bool:
        return "drawn"
    return "between" if bool(((mask > 0) & (mask < 1)).all()) else "rate"


def _run(calls: Calls, values: Values) -> list[Tensor]:
    """Run calls on tensors of a whole chunk."""
    return calls.function(*(values[name] for name in calls.names))


def _columns(calls: Calls, values: Values, rows: Rows) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of each step."""
    if not calls.names:
        return iter([()] * len(rows.counts))
    arguments = (values[name] for name in calls.names)
    return zip(*(rows.cut(v) if isinstance(v, Tensor) else v for v in arguments))


def _split(loop: Loop, v: Tensor, name: str) -> Values:
    """Return the columns of each gate, by name."""
    each = (v,) if loop.cell.gates == 1 else v.split(loop.hidden, dim=1)
    return {f"{name}{q}": part for q, part in enumerate(each)}


def _tensors(loop: Loop, masks: dict[str, Tensor]) -> Values:
    """Return the tensors that both passes read, by name."""
    rates = {f"{name}_share": mask for name, mask in masks.items() if mask.dtype != torch.bool}
    values: Values = {**masks, **rates, **_split(loop, loop.gates, "gate")}
    values |= {f"slot{k}": v for k, v in enumerate(loop.slots)}
    values |= _parts(loop, loop.inner, "inner")
    return values | {f"parameter{k}": v for k, v in enumerate(loop.parameters)}


def _held_place(loop: Loop, of: Loop) -> Tensor | None:
    """Return the tensor that stores the gate that may be held; None if no gate is held."""
    if not any(draw.rule.holds_gate for draw in loop.draws.values()):
        return None
    held, size = loop.cell.storage.held, loop.hidden
    if held >= loop.cell.gates:
        return of.slots[held - loop.cell.gates]
    return of.gates[:, held * size : (held + 1) * size]


def _first_held(chunk: Chunk) -> Tensor:
    """Return the held gate of the step before a chunk; zeros, never selected, for the first."""
    place = _held_place(chunk.loop, chunk.whole)
    if chunk.before is None or place is None:
        return chunk.loop.gates.new_zeros(chunk.rows.counts[0], chunk.loop.hidden)
    return place[chunk.before]


def _cuts(loop: Loop, rows: Rows) -> Columns | None:
    """Return the rows that are reset before each step, [count, 1] per step."""
    return None if loop.resets is None else rows.cut(loop.resets[:, None])


# --- products -------------------------------------------------------------------------------------


def _multiply(loop: Loop) -> Multiply:
    """Return the function that computes h·W_h, plus its own bias if it has one and no norm."""
    if loop.w_hh is None:
        return _nothing
    w, bias = loop.w_hh.t(), None if loop.norm is not None else loop.b_h
    if loop.cell.heads > 1:
        return partial(_block_product, loop, _blocks(loop).transpose(1, 2), bias)

    def multiply(h: Tensor, out: Tensor, add: bool) -> None:
        if add:
            out.addmm_(h, w)
        elif bias is None:
            torch.mm(h, w, out=out)
        else:
            torch.addmm(bias, h, w, out=out)

    return multiply


def _multiply_back(loop: Loop) -> Multiply:
    """Return the function that computes the gradient of h from the gradient of h·W_h."""
    w = loop.w_hh
    if w is None:
        return _nothing
    if loop.cell.heads > 1:
        return partial(_block_product_back, loop, _blocks(loop))

    def multiply(d: Tensor, out: Tensor, add: bool) -> None:
        if add:
            out.addmm_(d, w)
        else:
            torch.mm(d, w, out=out)

    return multiply


def _nothing(left: Tensor, out: Tensor, add: bool) -> None:
    """Write zero to `out`, or add nothing: the cell has no W_h."""
    if not add:
        out.zero_()


def _blocks(loop: Loop) -> Tensor:
    """Return a block-diagonal W_h by head, [heads, gates · H / heads, H / heads]."""
    cell = loop.cell
    assert loop.w_hh is not None
    by_gate = loop.w_hh.view(cell.gates, cell.heads, -1, loop.w_hh.shape[1])
    return by_gate.transpose(0, 1).flatten(1, 2)


def _by_head(loop: Loop, v: Tensor) -> Tensor:
    """Return a view [heads, rows, gates, H / heads] of the gates."""
    cell = loop.cell
    return v.view(len(v), cell.gates, cell.heads, -1).permute(2, 0, 1, 3)


def _block_product(
    loop: Loop,
    w: Tensor,
    bias: Tensor | None,
    h: Tensor,
    out: Tensor,
    add: bool,
) -> None:
    result = torch.bmm(h.view(len(h), loop.cell.heads, -1).transpose(0, 1), w)
    to = _by_head(loop, out)
    (to.add_ if add else to.copy_)(result.view(to.shape))
    if bias is not None:
        out.add_(bias)


def _block_product_back(loop: Loop, w: Tensor, d: Tensor, out: Tensor, add: bool) -> None:
    result = torch.bmm(_by_head(loop, d).flatten(2), w)
    to = out.view(len(out), loop.cell.heads, -1).transpose(0, 1)
    (to.add_ if add else to.copy_)(result)


def _parts(loop: Loop, each: Sequence[Tensor], name: str) -> Values:
    """Return the columns of each part of the products inside the step, by name."""
    size = loop.hidden
    return {f"{name}{p}_{k}": each[p][:, k * size : (k + 1) * size] for p, k in parts_of(loop.cell)}


def _chain(loop: Loop, p: int, k: int) -> list[Tensor]:
    """Return the matrices of a part of a product inside the step, the first one first."""
    by_name = dict(zip(loop.cell.matrices, loop.matrices))
    *first, last = (by_name[name] for name in loop.cell.products[p].matrices)
    return [*first, last[k * loop.hidden : (k + 1) * loop.hidden]]


def _apply(matrices: Sequence[Tensor], out: Tensor, v: Tensor) -> Tensor:
    """Return a part of a product inside the step, and store it in `out`."""
    for w in matrices:
        v = F.linear(v, w)
    out.copy_(v)
    return v


def _apply_back(matrices: Sequence[Tensor], d: Tensor) -> Tensor:
    for w in reversed(matrices):
        d = torch.mm(d, w)
    return d


# --- forward pass ---------------------------------------------------------------------------------


def forward(loop: Loop) -> None:
    """Run the forward pass."""
    multiply = _multiply(loop)
    for chunk in chunks_of(loop):
        _forward(chunk, multiply)


def _forward(chunk: Chunk, multiply: Multiply) -> None:
    loop, rows, masks = chunk.loop, chunk.rows, masks_by_name(chunk)
    plan, values = forward_plan(_case(loop, masks)), _tensors(loop, masks)
    values |= {f"new{k}": v for k, v in enumerate(loop.states)}
    _enter_x(loop, rows)
    values |= {f"value{k}": v for k, v in enumerate(_run(plan.early, values))}
    old, enter = _enter(chunk, values, multiply)
    if (held := _held_place(loop, loop)) is not None:
        values["held"] = rows.before(held, _first_held(chunk))
    if loop.norm is not None and loop.norm.scale_c is not None:
        moments = _moments(loop, rows, loop.mean_c, loop.var_c)
        values["normalise"] = [partial(_show, loop, mean, var) for mean, var in moments]
    for p, k in parts_of(loop.cell):
        apply = partial(_apply, _chain(loop, p, k))
        values[f"product{p}_{k}"] = [partial(apply, v) for v in rows.cut(values[f"inner{p}_{k}"])]
    carry = None
    if loop.w_hr is not None:
        values["new0"] = rows.first(loop.gates.new_empty(rows.counts[0], loop.hidden))
        carry = _carry(chunk, values["new0"], old)
    step = plan.step.function
    for t, arguments in enumerate(_columns(plan.step, values, rows)):
        enter(t)
        step(*arguments)
        if carry is not None:
            carry(t)


def _enter_x(loop: Loop, rows: Rows) -> None:
    """Add the bias to x·W_x; a norm normalises and scales x·W_x first."""
    norm = loop.norm
    assert loop.b_x is not None
    if norm is None:
        loop.gates += loop.b_x
        return
    assert loop.mean_x is not None and loop.var_x is not None
    if norm.over == "units":
        hats = [(loop.gates, _hat(loop, loop.gates, loop.mean_x[:, None], loop.var_x[:, None]))]
    else:
        moments = _moments(loop, rows, loop.mean_x, loop.var_x)
        hats = [(v, _hat(loop, v, *m)) for v, m in zip(rows.cut(loop.gates), moments)]
    for v, hat in hats:
        torch.addcmul(loop.b_x, hat, norm.scale_x, out=v)


def _enter(
    chunk: Chunk,
    values: Values,
    multiply: Multiply,
) -> tuple[list[Columns], Callable[[int], None]]:
    """Return the states before each step, and the function that computes them and h·W_h."""
    loop, rows = chunk.loop, chunk.rows
    before = [rows.before(v, initial) for v, initial in zip(loop.states, loop.initial)]
    old = before if loop.resets is None else [rows.first(torch.empty_like(v)) for v in loop.initial]
    values |= {f"old{k}": v for k, v in enumerate(old)}
    product = loop.gates.new_empty(rows.counts[0], loop.width) if loop.apart else None
    if product is not None:
        values |= {name: rows.first(v) for name, v in _split(loop, product, "r").items()}
    products = rows.cut(loop.gates) if product is None else rows.first(product)
    entered = old[0] if loop.scale_h is None else rows.first(torch.empty_like(loop.initial[0]))
    scales = None if loop.scale_h is None else rows.first(loop.scale_h)
    cuts, resets = _cuts(loop, rows), [rows.first(v) for v in loop.reset_to]
    normalise = _normalise_product(loop, rows)

    def enter(t: int) -> None:
        if cuts is not None:
            for k, reset in enumerate(resets):
                torch.where(cuts[t], reset[t], before[k][t], out=old[k][t])
        if scales is not None:
            torch.mul(old[0][t], scales[t], out=entered[t])
        multiply(entered[t], products[t], product is None)
        if normalise is not None:
            normalise(t, products[t])

    return old, enter


def _normalise_product(loop: Loop, rows: Rows) -> Callable[[int, Tensor], None] | None:
    """Return the function that normalises h·W_h of a step, or None without a norm.

    It also adds the result to x·W_x if the cell merges them.
    """
    norm = loop.norm
    if norm is None:
        return None
    hats, gates, added = rows.cut(loop.hats), rows.cut(loop.gates), not loop.cell.storage.apart
    moments = _moments(loop, rows, loop.mean_h, loop.var_h)

    def normalise(t: int, product: Tensor) -> None:
        hat = hats[t].copy_(_hat(loop, product, *moments[t]))
        torch.mul(hat, norm.scale_h, out=product)
        if loop.b_h is not None:
            product.add_(loop.b_h)
        if added:
            gates[t].add_(product)

    return normalise


def _carry(chunk: Chunk, new: Columns, old: list[Columns]) -> Callable[[int], None]:
    """Return the function that projects the h of a step, and applies the noise of h."""
    loop, rows = chunk.loop, chunk.rows
    assert loop.w_hr is not None
    w, masks, y = loop.w_hr.t(), rows.cut(chunk.masks.get("hidden")), rows.cut(loop.states[0])
    zeroes = _zeroes_h(loop)

    def carry(t: int) -> None:
        h, mask = torch.mm(new[t], w), masks[t]
        if mask is not None:
            h = less(h, mask) if zeroes else mix(h, old[0][t], mask)
        y[t].copy_(h)

    return carry


def _zeroes_h(loop: Loop) -> bool:
    return "hidden" in loop.draws and loop.draws["hidden"].rule.by == "zero"


# --- backward pass --------------------------------------------------------------------------------

_OF_ROWS = ("dy", "dgx", "dgh", "dsh", "du", "u", "dnc", "chat", "dx")


def backward(loop: Loop, grads: LoopGrads) -> None:
    """Run the backward pass."""
    multiply, owed = _multiply_back(loop), loop.gates.new_zeros(loop.batch, loop.hidden)
    for chunk in chunks_of(loop, backward=True):
        rows: Values = {name: getattr(grads, name) for name in _OF_ROWS}
        rows = {name: None if v is None else v[chunk.at] for name, v in rows.items()}
        seen = tuple(None if v is None else v[chunk.at] for v in grads.dseen)
        dinner, ins = (tuple(v[chunk.at] for v in each) for each in (grads.dinner, grads.ins))
        part = replace(grads, dseen=seen, dinner=dinner, ins=ins, **rows)
        _backward(chunk, part, multiply, owed)


def _backward(chunk: Chunk, grads: LoopGrads, multiply: Multiply, owed: Tensor) -> None:
    """Run the backward pass of a chunk.

    `owed` is the gradient of the held gate, from the next step.
    """
    loop, rows, masks = chunk.loop, chunk.rows, masks_by_name(chunk)
    plan = backward_plan(_case(loop, masks, grads))
    values = _tensors(loop, masks) | _split(loop, grads.dgx, "dx") | _split(loop, grads.dsh, "dr")
    values |= {f"{name}_share": v.to(loop.gates.dtype) for name, v in masks.items()}
    values |= _parts(loop, grads.dinner, "dinner") | {f"in{p}": v for p, v in enumerate(grads.ins)}
    names = {*plan.before.names, *plan.step.names, *plan.after.names}
    values |= _before(chunk, names) | {
        "u": grads.u,
        "normalise": partial(_show_again, loop, grads, rows),
    }
    values |= {f"value{k}": v for k, v in enumerate(_run(plan.before, values))}

    values |= {f"dstate{k}": rows.first(v) for k, v in enumerate(grads.dstates)}
    values |= {f"seen{k}": v for k, v in enumerate((grads.dy, *grads.dseen))}
    values |= {"owed": rows.first(owed), "dshown": grads.dnc}
    values |= {name: loop.gates.new_empty(rows.total, loop.hidden) for name in plan.kept}
    if loop.norm is not None and loop.norm.scale_c is not None:
        values["normalise_back"] = _show_back(loop, grads, rows)
    for p, k in parts_of(loop.cell):
        values[f"back{p}_{k}"] = [partial(_apply_back, _chain(loop, p, k))] * len(rows.counts)
    project = None
    if loop.w_hr is not None:
        project = _project_back(chunk, grads, values)
    leave = _leave(chunk, grads, multiply, plan.passes_h or project is not None)
    step, columns = plan.step.function, list(_columns(plan.step, values, rows))
    for t in reversed(range(len(columns))):
        if project is not None:
            project(t)
        step(*columns[t])
        leave(t)
    for k, gradient in zip(plan.parameters, _run(plan.after, values)):
        grads.dparameters[k][0] += gradient.sum(0)
    if loop.norm is not None:
        _norms_after(loop, grads, rows)


def _before(chunk: Chunk, names: set[str]) -> Values:
    """Return the named states before each row, and the named slots that a norm stores."""
    loop, rows = chunk.loop, chunk.rows
    states = range(len(loop.states))
    values: Values = {f"old{k}": chunk.all_before(k) for k in states if f"old{k}" in names}
    held = _held_place(loop, loop)
    if "held" in names and held is not None:
        values["held"] = rows.all_before(held, _first_held(chunk))
    for k, gate in enumerate(loop.cell.storage.slots):
        if loop.slots[k] is None and f"slot{k}" in names:
            assert loop.hats is not None and loop.norm is not None
            of = slice(gate * loop.hidden, (gate + 1) * loop.hidden)
            slot = loop.hats[:, of] * loop.norm.scale_h[of]
            values[f"slot{k}"] = slot if loop.b_h is None else slot.add_(loop.b_h[of])
    return values


def _project_back(chunk: Chunk, grads: LoopGrads, values: Values) -> Callable[[int], None]:
    """Return the function that propagates the gradient of h through the projection.

    The gradient of kept units is passed to the previous step.
    """
    loop, rows, w = chunk.loop, chunk.rows, chunk.loop.w_hr
    assert w is not None
    wide = rows.first(loop.gates.new_empty(rows.counts[0], loop.hidden))
    values["dstate0"] = wide
    mask, zeroes = chunk.masks.get("hidden"), _zeroes_h(loop)
    shares = rows.cut(None if mask is None else mask.to(loop.gates.dtype))
    dh, dy, du = rows.first(grads.dstates[0]), rows.cut(grads.dy), rows.cut(grads.du)

    def project(t: int) -> None:
        dh[t].add_(dy[t])
        if shares[t] is None:
            du[t].copy_(dh[t])
        else:
            torch.mul(dh[t], 1 - shares[t], out=du[t])
        if shares[t] is None or zeroes:
            dh[t].zero_()
        else:
            dh[t].mul_(shares[t])
        torch.mm(du[t], w, out=wide[t])

    return project


def _leave(chunk: Chunk, grads: LoopGrads, multiply: Multiply, add: bool) -> Callable[[int], None]:
    """Return the function that propagates gradients through h·W_h and resets.

    `add` is True if a part of the gradient of h does not pass through the gates.
    """
    loop, rows, norm = chunk.loop, chunk.rows, chunk.loop.norm
    dh, dgh, dsh, hats = (
        rows.first(grads.dstates[0]),
        *map(rows.cut, (grads.dgh, grads.dsh, loop.hats)),
    )
    moments = None if norm is None else _moments(loop, rows, loop.mean_h, loop.var_h)
    scales = None if loop.scale_h is None else rows.first(loop.scale_h)
    cuts, states = _cuts(loop, rows), [rows.first(v) for v in grads.dstates]
    resets = [rows.first(v) for v in grads.dreset]

    def leave(t: int) -> None:
        if norm is not None and moments is not None:
            dgh[t].copy_(_hat_back(loop, dsh[t] * norm.scale_h, hats[t], moments[t][1]))
        centred = loop.balanced and chunk.before is None and t == 0 and scales is None
        if scales is not None or centred:
            d_h = torch.empty_like(dh[t])
            multiply(dgh[t], d_h, False)
            d_h = d_h - d_h.mean(0) if scales is None else d_h.mul_(scales[t])
            dh[t].add_(d_h) if add else dh[t].copy_(d_h)
        else:
            multiply(dgh[t], dh[t], add)
        for d, of_reset in zip(states, resets) if cuts is not None else ():
            of_reset[t].add_(torch.where(cuts[t], d[t], 0.0))  # type: ignore[index]
            d[t].masked_fill_(cuts[t], 0.0)  # type: ignore[index]

    return leave


# --- norms ----------------------------------------------------------------------------------------


def _moments(
    loop: Loop,
    rows: Rows,
    mean: Tensor | None,
    var: Tensor | None,
) -> list[tuple[Tensor, Tensor]]:
    """Return mean and variance of each step, in a shape that broadcasts with its rows."""
    assert loop.norm is not None and mean is not None and var is not None
    if loop.norm.over == "units":
        return list(zip(rows.cut(mean[:, None]), rows.cut(var[:, None])))
    return list(zip(mean.unbind(0), var.unbind(0)))


def _hat(loop: Loop, v: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Return v normalised; unless moments are given, write them to `mean` and `var`."""
    norm = loop.norm
    assert norm is not None
    if not loop.given:
        by_row = norm.over == "units"
        moments = torch.var_mean(v, dim=-1 if by_row else 0, correction=0, keepdim=by_row)
        var.copy_(moments[0]), mean.copy_(moments[1])
    return (v - mean).mul_(torch.rsqrt(var + norm.eps))


def _hat_again(
    loop: Loop,
    rows: Rows,
    v: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
) -> Tensor:
    """Return v of all rows, normalised with the moments of the forward pass."""
    assert loop.norm is not None and mean is not None and var is not None
    at = (slice(None), None) if loop.norm.over == "units" else rows.places[0]
    mean, var = mean[at], var[at]
    return (v - mean).mul_(torch.rsqrt(var + loop.norm.eps))


def _hat_back(loop: Loop, d: Tensor, hat: Tensor, var: Tensor) -> Tensor:
    """Return the gradient of v of one step from the gradient of `hat`, v normalised."""
    assert loop.norm is not None
    rstd = torch.rsqrt(var + loop.norm.eps)
    if loop.given:
        return d * rstd
    over = -1 if loop.norm.over == "units" else 0
    return (d - d.mean(over, keepdim=True) - hat * (d * hat).mean(over, keepdim=True)) * rstd


def _show(loop: Loop, mean: Tensor, var: Tensor, raw: Tensor) -> Tensor:
    """Return the shown value of the cell at a step, normalised, scaled and shifted."""
    norm = loop.norm
    assert norm is not None and norm.scale_c is not None and norm.shift_c is not None
    return torch.addcmul(norm.shift_c, _hat(loop, raw, mean, var), norm.scale_c)


def _show_again(loop: Loop, grads: LoopGrads, rows: Rows, raw: Tensor) -> Tensor:
    """Return the same for all rows; write the normalised value to `back.chat`."""
    norm = loop.norm
    assert norm is not None and norm.scale_c is not None and norm.shift_c is not None
    assert grads.chat is not None
    hat = grads.chat.copy_(_hat_again(loop, rows, raw, loop.mean_c, loop.var_c))
    return torch.addcmul(norm.shift_c, hat, norm.scale_c)


def _show_back(loop: Loop, grads: LoopGrads, rows: Rows) -> list[Callable[[Tensor], Tensor]]:
    """Return, for each step, the backward function of the norm of the shown value."""
    assert loop.norm is not None and loop.norm.scale_c is not None
    scale = loop.norm.scale_c

    def show_back(hat: Tensor, var: Tensor, d: Tensor) -> Tensor:
        return _hat_back(loop, d * scale, hat, var)

    moments = _moments(loop, rows, loop.mean_c, loop.var_c)
    return [partial(show_back, hat, var) for hat, (_, var) in zip(rows.cut(grads.chat), moments)]


def _norms_after(loop: Loop, grads: LoopGrads, rows: Rows) -> None:
    """Add up the gradients of the scales, and compute the gradient of x·W_x."""
    norm = loop.norm
    assert norm is not None and grads.dx is not None and loop.hats is not None
    assert grads.dscale_x is not None and grads.dscale_h is not None
    hat = _hat_again(loop, rows, grads.dx, loop.mean_x, loop.var_x)
    grads.dscale_x[0] += (grads.dgx * hat).sum(0)
    grads.dscale_h[0] += (grads.dsh * loop.hats).sum(0)
    if grads.dnc is not None and grads.chat is not None:
        assert grads.dscale_c is not None and grads.dshift_c is not None
        grads.dscale_c[0] += (grads.dnc * grads.chat).sum(0)
        grads.dshift_c[0] += grads.dnc.sum(0)
    d, dx = rows.cut(grads.dgx * norm.scale_x), rows.cut(grads.dx)
    moments = _moments(loop, rows, loop.mean_x, loop.var_x)
    for t, (one, (_, var)) in enumerate(zip(rows.cut(hat), moments)):
        dx[t].copy_(_hat_back(loop, d[t], one, var))
