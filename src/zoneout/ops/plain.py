"""The loop over time in torch calls, for where there is no compiler: the same equations as in native/body.h."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cells import drop, zone
from ..draws import draw_all, stream_units
from .loop import Backward, Loop

Keep = Tensor | None  # where the old value (or zero) takes the place of the new one: a mask, a rate, or None


class Keeps(NamedTuple):
    """What is replaced, in all rows or in those of one step."""

    cell: Keep = None
    hidden: Keep = None
    update: Keep = None


def forward(loop: Loop) -> None:
    """Run the loop forwards."""
    keeps = _keeps(loop)
    if loop.norm is None:
        loop.gates[: len(loop.y)] += loop.b_x
    for t, (begin, count) in enumerate(_spans(loop)):
        at = slice(begin, begin + count)
        old_h, cut = _before(loop, loop.y, loop.h0, loop.reset_h, t, begin, count)
        h_in = old_h if loop.scale_h is None else old_h * loop.scale_h[:count]
        keep = _of_step(keeps, at)
        gates = loop.gates[at]
        if loop.norm is not None:
            assert loop.mean_x is not None and loop.var_x is not None
            _take_moments(loop, loop.mean_x, loop.var_x, t, at, gates)
            gates.copy_(_hat(loop, loop.mean_x, loop.var_x, t, at, gates) * loop.norm.scale_x + loop.b_x)
        if loop.cell == "gru" or loop.norm is not None:
            product = _with_norm(loop, t, at, torch.mm(h_in, loop.w_hh.t()))
        else:
            gates.addmm_(h_in, loop.w_hh.t())
            product = None
        if loop.cell == "lstm":
            new = _lstm_forward(loop, t, at, gates, product, keep, cut)
        elif loop.cell == "gru":
            assert product is not None
            new = _gru_forward(loop, at, gates, product, old_h, keep)
        else:
            if product is not None:
                gates += product
            new = gates.relu_() if loop.cell == "rnn_relu" else gates.tanh_()
        loop.y[at] = _replace(new, old_h, keep.hidden, _zeroes(loop, "hidden"))


def _lstm_forward(
    loop: Loop, t: int, at: slice, gates: Tensor, product: Tensor | None, keep: Keeps, cut: Tensor | None
) -> Tensor:
    """The candidate h; c and the gates are written."""
    assert loop.c is not None and loop.c0 is not None
    size = loop.hidden
    if product is not None:
        gates += product
    gates[:, : 2 * size].sigmoid_()
    gates[:, 2 * size : 3 * size].tanh_()
    gates[:, 3 * size :].sigmoid_()
    old_c, _ = _before(loop, loop.c, loop.c0, loop.reset_c, t, at.start, at.stop - at.start)
    c = _candidate(loop, gates, old_c, keep)
    gate = _shown_gate(loop, t, at, gates, keep, cut)
    if loop.mean_c is not None and loop.var_c is not None:
        _take_moments(loop, loop.mean_c, loop.var_c, t, at, c)
    shown = gate * _exposed(loop, t, at, c).tanh_()
    loop.c[at] = c if _zeroes(loop, "cell") else zone(c, old_c, keep.cell)
    return shown if loop.w_hr is None else shown @ loop.w_hr.t()


def _candidate(loop: Loop, gates: Tensor, old_c: Tensor, keep: Keeps) -> Tensor:
    i, f, g, _ = gates.chunk(4, dim=-1)
    c = torch.addcmul(drop(i * g, keep.update), f, old_c)
    return drop(c, keep.cell) if _zeroes(loop, "cell") else c


def _gru_forward(loop: Loop, at: slice, gates: Tensor, product: Tensor, old_h: Tensor, keep: Keeps) -> Tensor:
    size = loop.hidden
    if loop.norm is None and loop.gh is not None:
        loop.gh[at] = product[:, 2 * size :]
    gates[:, : 2 * size].add_(product[:, : 2 * size]).sigmoid_()
    r, z, n = gates.chunk(3, dim=-1)
    n.addcmul_(r, product[:, 2 * size :]).tanh_()
    return torch.addcmul(drop((1 - z) * n, keep.update), z, old_h)


def backward(loop: Loop, back: Backward) -> None:
    """Run the loop backwards."""
    keeps = _keeps(loop)
    size, spans = loop.hidden, _spans(loop)
    owed = back.dh.new_zeros(loop.batch, size)  # what a held output gate owes to the step before
    for t in reversed(range(len(spans))):
        begin, count = spans[t]
        at, keep = slice(begin, begin + count), _of_step(keeps, slice(begin, begin + count))
        old_h, cut = _before(loop, loop.y, loop.h0, loop.reset_h, t, begin, count)
        dh = back.dh[:count]
        dh += back.dy[at]
        d, straight = _replace_back(dh, keep.hidden, _zeroes(loop, "hidden"))
        dh.copy_(straight) if straight is not None else dh.zero_()
        if loop.cell == "lstm":
            _lstm_backward(loop, back, t, at, d, keep, cut, owed)
        elif loop.cell == "gru":
            dh.addcmul_(d, loop.gates[at, size : 2 * size])
            _gru_backward(loop, back, at, d, old_h, keep)
        elif loop.cell == "rnn_relu":
            back.dgx[at] = d * (loop.gates[at] > 0)
        else:
            _through_tanh(d, loop.gates[at], out=back.dgx[at])
        if loop.norm is not None:
            _products_back(loop, back, t, at)
        if loop.scale_h is None:
            dh.addmm_(back.dgh[at], loop.w_hh)
        else:
            dh += (back.dgh[at] @ loop.w_hh) * loop.scale_h[:count]
        if cut is not None:
            for d_state, kept in ((back.dh, back.dreset_h), (back.dc, back.dreset_c)):
                if d_state is not None and kept is not None:
                    kept[:count] += torch.where(cut, d_state[:count], 0.0)
                    d_state[:count].masked_fill_(cut, 0.0)


def _products_back(loop: Loop, back: Backward, t: int, at: slice) -> None:
    """Of x·Wx and h·Wh, from those of their normalised forms."""
    assert loop.norm is not None and loop.gh is not None and back.dx is not None
    assert back.dscale_x is not None and back.dscale_h is not None
    assert loop.mean_x is not None and loop.var_x is not None and loop.mean_h is not None and loop.var_h is not None
    xhat = _hat(loop, loop.mean_x, loop.var_x, t, at, back.dx[at])
    back.dscale_x[0] += (back.dgx[at] * xhat).sum(0)
    back.dscale_h[0] += (back.dsh[at] * loop.gh[at]).sum(0)
    _, var_x = _moments(loop, loop.mean_x, loop.var_x, t, at)
    _, var_h = _moments(loop, loop.mean_h, loop.var_h, t, at)
    back.dx[at] = _norm_back(loop, back.dgx[at] * loop.norm.scale_x, xhat, var_x)
    back.dgh[at] = _norm_back(loop, back.dsh[at] * loop.norm.scale_h, loop.gh[at], var_h)


def _lstm_backward(
    loop: Loop, back: Backward, t: int, at: slice, d: Tensor, keep: Keeps, cut: Tensor | None, owed: Tensor
) -> None:
    assert loop.c is not None and loop.c0 is not None and back.dc is not None
    size, count = loop.hidden, at.stop - at.start
    gates = loop.gates[at]
    i, f, g, o = gates.chunk(4, dim=-1)
    old_c, _ = _before(loop, loop.c, loop.c0, loop.reset_c, t, at.start, count)
    raw = _candidate(loop, gates, old_c, keep)
    shows = _exposed(loop, t, at, raw).tanh_()
    gate = _shown_gate(loop, t, at, gates, keep, cut)
    if loop.w_hr is not None:
        assert back.du is not None and back.u is not None
        back.du[at] = d
        back.u[at] = gate * shows
        d = d @ loop.w_hr
    d_gate = d * shows
    dc = torch.ops.aten.tanh_backward(d * gate, shows)
    if loop.norm is not None:
        assert back.dnc is not None and back.chat is not None
        assert loop.norm.scale_c is not None and loop.mean_c is not None and loop.var_c is not None
        _, var = _moments(loop, loop.mean_c, loop.var_c, t, at)
        back.dnc[at] = dc
        back.chat[at] = _hat(loop, loop.mean_c, loop.var_c, t, at, raw)
        assert back.dscale_c is not None and back.dshift_c is not None
        back.dscale_c[0] += (dc * back.chat[at]).sum(0)
        back.dshift_c[0] += dc.sum(0)
        dc = _norm_back(loop, dc * loop.norm.scale_c, back.chat[at], var)
    if "update" in loop.draws and loop.draws["update"].rule.holds_gate:
        assert keep.update is not None
        held = keep.update.to(d.dtype).expand_as(d_gate)
        if t == 0:
            held = torch.zeros_like(d_gate)
        elif cut is not None:
            held = torch.where(cut, 0.0, held)
        mine = d_gate * (1 - held) + owed[:count]
        owed[:count] = d_gate * held
        d_gate = mine
    carried = back.dc[:count] if back.dcells is None else back.dc[:count] + back.dcells[at]
    if _zeroes(loop, "cell"):
        dc, straight = drop(dc + carried, keep.cell), None
    else:
        through, straight = _replace_back(carried, keep.cell, False)
        dc = dc + through
    d_update = drop(dc, keep.update)
    out = back.dgx[at]
    _through_sigmoid(d_update * g, i, out=out[:, :size])
    _through_sigmoid(dc * old_c, f, out=out[:, size : 2 * size])
    _through_tanh(d_update * i, g, out=out[:, 2 * size : 3 * size])
    _through_sigmoid(d_gate, o, out=out[:, 3 * size :])
    torch.mul(dc, f, out=back.dc[:count])
    if straight is not None:
        back.dc[:count] += straight


def _gru_backward(loop: Loop, back: Backward, at: slice, d: Tensor, old_h: Tensor, keep: Keeps) -> None:
    size = loop.hidden
    r, z, n = loop.gates[at].chunk(3, dim=-1)
    assert loop.gh is not None
    if loop.norm is None:
        product = loop.gh[at]
    else:
        product = loop.gh[at, 2 * size :] * loop.norm.scale_h[2 * size :]
        product = product if loop.b_h is None else product + loop.b_h[2 * size :]
    d_update = drop(d, keep.update)
    dn = torch.ops.aten.tanh_backward(d_update * (1 - z), n)
    out = back.dgx[at]
    _through_sigmoid(dn * product, r, out=out[:, :size])
    _through_sigmoid(d * old_h - d_update * n, z, out=out[:, size : 2 * size])
    out[:, 2 * size :] = dn
    back.dsh[at] = out
    torch.mul(dn, r, out=back.dsh[at, 2 * size :])


# --- parts -----------------------------------------------------------------------------------------


def _through_sigmoid(d: Tensor, value: Tensor, out: Tensor) -> None:
    """The derivative through a sigmoid that gave `value`."""
    torch.ops.aten.sigmoid_backward.grad_input(d, value, grad_input=out)


def _through_tanh(d: Tensor, value: Tensor, out: Tensor) -> None:
    torch.ops.aten.tanh_backward.grad_input(d, value, grad_input=out)


def _spans(loop: Loop) -> list[tuple[int, int]]:
    """Where the rows of each step begin and how many there are."""
    assert loop.counts is not None
    return [(b, n) for b, n in zip(loop.offsets.tolist(), loop.counts.tolist()) if n > 0]


def _before(
    loop: Loop, states: Tensor, initial: Tensor, reset: Tensor | None, t: int, begin: int, count: int
) -> tuple[Tensor, Tensor | None]:
    """The state before a step, and where a reset has cut it off from the one before that."""
    previous = initial[:count] if t == 0 else states[int(loop.offsets[t - 1]) :][:count]
    if loop.resets is None or reset is None:
        return previous, None
    cut = loop.resets[begin : begin + count, None]
    return torch.where(cut, reset[:count], previous), cut


def _keeps(loop: Loop) -> Keeps:
    """What is replaced in every row, [N, ·] or a rate."""
    assert loop.counts is not None and loop.lengths is not None
    units = stream_units(loop.hidden, 0 if loop.w_hr is None else loop.outputs, 0)
    steps = torch.arange(loop.first_step, loop.first_step + loop.steps)
    inside = [draw for name, draw in loop.draws.items() if name in Keeps._fields]
    masks = draw_all(inside, steps, loop.examples, units)
    whole = not loop.reverse and int(loop.counts[-1]) == loop.batch
    out: dict[str, Tensor] = {}
    for draw in inside:
        name = draw.rule.stream
        if draw.seed is None:
            out[name] = draw.rate.to(loop.gates.dtype)
            continue
        mask = masks[name].expand(loop.steps, loop.batch, units[name]).reshape(-1, units[name])
        if not whole:
            t = torch.repeat_interleave(torch.arange(loop.steps), loop.counts)
            row = torch.arange(len(t)) - loop.offsets[t]
            mask = mask[(loop.lengths[row] - 1 - t if loop.reverse else t) * loop.batch + row]
        out[name] = mask
    return Keeps(**out)


def _of_step(keeps: Keeps, at: slice) -> Keeps:
    return Keeps(*(keep if keep is None or keep.dtype != torch.bool else keep[at] for keep in keeps))


def _zeroes(loop: Loop, stream: str) -> bool:
    return stream in loop.draws and loop.draws[stream].rule.by == "zero"


def _replace(new: Tensor, old: Tensor, keep: Keep, zero: bool) -> Tensor:
    return drop(new, keep) if zero else zone(new, old, keep)


def _replace_back(d: Tensor, keep: Keep, zero: bool) -> tuple[Tensor, Tensor | None]:
    """Of the new value, and of the old one where there is any."""
    if keep is None:
        return d.clone(), None
    new = drop(d, keep)
    return new, None if zero else d - new


def _shown_gate(loop: Loop, t: int, at: slice, gates: Tensor, keep: Keeps, cut: Tensor | None) -> Tensor:
    """The output gate, or the step before's where it is held."""
    own = gates[:, 3 * loop.hidden :]
    if t == 0 or "update" not in loop.draws or not loop.draws["update"].rule.holds_gate:
        return own
    held = loop.gates[int(loop.offsets[t - 1]) :][: at.stop - at.start, 3 * loop.hidden :]
    return zone(own, held if cut is None else torch.where(cut, own, held), keep.update)


def _exposed(loop: Loop, t: int, at: slice, c: Tensor) -> Tensor:
    """c where it feeds h: itself, or normalised."""
    norm = loop.norm
    if norm is None:
        return c.clone()
    assert loop.mean_c is not None and loop.var_c is not None
    assert norm.scale_c is not None and norm.shift_c is not None
    return _hat(loop, loop.mean_c, loop.var_c, t, at, c) * norm.scale_c + norm.shift_c


def _with_norm(loop: Loop, t: int, at: slice, product: Tensor) -> Tensor:
    """h·Wh normalised where there is a norm, and with its bias."""
    norm = loop.norm
    if norm is not None:
        assert loop.mean_h is not None and loop.var_h is not None and loop.gh is not None
        _take_moments(loop, loop.mean_h, loop.var_h, t, at, product)
        loop.gh[at] = _hat(loop, loop.mean_h, loop.var_h, t, at, product)
        product = loop.gh[at] * norm.scale_h
    return product if loop.b_h is None else product.add_(loop.b_h)


def _take_moments(loop: Loop, mean: Tensor, var: Tensor, t: int, at: slice, v: Tensor) -> None:
    """Write down the moments of one step, where they are not given."""
    assert loop.norm is not None
    if loop.norm.over == "units":
        var[at], mean[at] = torch.var_mean(v, dim=-1, correction=0)
    elif not loop.given:
        var[t], mean[t] = torch.var_mean(v, dim=0, correction=0)


def _moments(loop: Loop, mean: Tensor, var: Tensor, t: int, at: slice) -> tuple[Tensor, Tensor]:
    """The moments of one step, in the shape in which they meet its rows."""
    assert loop.norm is not None
    return (mean[at][:, None], var[at][:, None]) if loop.norm.over == "units" else (mean[t], var[t])


def _hat(loop: Loop, mean: Tensor, var: Tensor, t: int, at: slice, v: Tensor) -> Tensor:
    """v of one step, normalised."""
    assert loop.norm is not None
    mean, var = _moments(loop, mean, var, t, at)
    return (v - mean) * torch.rsqrt(var + loop.norm.eps)


def _norm_back(loop: Loop, d: Tensor, hat: Tensor, var: Tensor) -> Tensor:
    """Through a normalisation, from the derivative of its result before scaling."""
    assert loop.norm is not None
    rstd = torch.rsqrt(var + loop.norm.eps)
    if loop.given:
        return d * rstd
    over = -1 if loop.norm.over == "units" else 0
    return (d - d.mean(over, keepdim=True) - hat * (d * hat).mean(over, keepdim=True)) * rstd
