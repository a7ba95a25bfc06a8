"""The loop over time in torch calls, for where there is no compiler: the same equations as in native/body.h.

A call of torch costs microseconds however little it does. So whatever does not hang on the step before is done for many
steps at once, before or after the loop over them, and a step has about ten calls. For many, not all: so that what is
made on the way stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cells import drop, zone
from .loop import Backward, Loop
from .parts import Keep, Part, Rows, holds, parts_of, zeroes

Advance = Callable[[int, Tensor | None, Tensor], Tensor]  # step, h·Wh where it stands apart, the h before: the new h


# --- forwards --------------------------------------------------------------------------------------


def forward(loop: Loop) -> None:
    """Run the loop forwards."""
    for part in parts_of(loop):
        _forward(part)


def _forward(part: Part) -> None:
    loop, rows = part.loop, part.rows
    assert loop.b_x is not None
    if loop.norm is None:
        loop.gates += loop.b_x
    gates, y, cuts = rows.cut(loop.gates), rows.cut(loop.y), _cuts(loop, rows)
    through, straight = map(rows.cut, _shares(loop, "hidden", part.keeps.hidden))
    advance = {"lstm": _lstm, "gru": _gru}.get(loop.cell, _rnn)(part)
    apart = loop.cell == "gru" or loop.norm is not None
    w, old_h = loop.w_hh.t(), loop.h0
    for t, count in enumerate(rows.counts):
        old_h = _before(old_h, count, cuts[t], loop.reset_h)
        h_in = old_h if loop.scale_h is None else old_h * loop.scale_h[:count]
        if loop.norm is not None:
            assert loop.mean_x is not None and loop.var_x is not None
            hat = _take_hat(loop, rows, loop.mean_x, loop.var_x, t, gates[t])
            gates[t].copy_(hat.mul_(loop.norm.scale_x).add_(loop.b_x))
        product = _with_norm(loop, rows, t, torch.mm(h_in, w)) if apart else None
        if product is None:
            gates[t].addmm_(h_in, w)
        new = advance(t, product, old_h)
        old_h = _carried(new, old_h, through[t], straight[t], out=y[t])


def _rnn(part: Part) -> Advance:
    loop, rows = part.loop, part.rows
    gates, relu = rows.cut(loop.gates), loop.cell == "rnn_relu"

    def advance(t: int, product: Tensor | None, old_h: Tensor) -> Tensor:
        if product is not None:
            gates[t].add_(product)
        return gates[t].relu_() if relu else gates[t].tanh_()

    return advance


def _gru(part: Part) -> Advance:
    loop, rows, keeps = part.loop, part.rows, part.keeps
    size = loop.hidden
    both, n = rows.cut(loop.gates[:, : 2 * size]), rows.cut(loop.gates[:, 2 * size :])
    r, z = rows.cut(loop.gates[:, :size]), rows.cut(loop.gates[:, size : 2 * size])
    kept, update = rows.cut(loop.gh), rows.cut(keeps.update)

    def advance(t: int, product: Tensor | None, old_h: Tensor) -> Tensor:
        assert product is not None
        if loop.norm is None and loop.gh is not None:
            kept[t].copy_(product[:, 2 * size :])
        both[t].add_(product[:, : 2 * size]).sigmoid_()
        n[t].addcmul_(r[t], product[:, 2 * size :]).tanh_()
        return torch.addcmul(drop((1 - z[t]).mul_(n[t]), update[t]), z[t], old_h)

    return advance


def _lstm(part: Part) -> Advance:
    loop, rows, keeps = part.loop, part.rows, part.keeps
    assert loop.c is not None and loop.c0 is not None
    norm, holding = loop.norm, holds(loop)
    gates, c = rows.cut(loop.gates), rows.cut(loop.c)
    i, f, g, o = (rows.cut(part) for part in loop.gates.chunk(4, dim=-1))
    cell, update, cuts = rows.cut(keeps.cell), rows.cut(keeps.update), _cuts(loop, rows)
    through, straight = map(rows.cut, _shares(loop, "cell", keeps.cell))
    zero, old_c, spare = zeroes(loop, "cell"), loop.c0, torch.empty_like(loop.c0)

    def advance(t: int, product: Tensor | None, old_h: Tensor) -> Tensor:
        nonlocal old_c
        if product is not None:
            gates[t].add_(product)
        # On numbers that lie side by side these are several times faster: g goes elsewhere and comes back.
        count = rows.counts[t]
        own = spare[:count].copy_(g[t])
        gates[t].sigmoid_()
        g[t].copy_(own.tanh_())
        old = _before(old_c, count, cuts[t], loop.reset_c)
        new = own.mul_(i[t])
        if update[t] is not None:
            new = drop(new, update[t])
        new = new.addcmul_(f[t], old)
        if zero:
            new = drop(new, cell[t])
        if norm is None:
            shown = new.tanh()
        else:
            assert loop.mean_c is not None and loop.var_c is not None
            assert norm.scale_c is not None and norm.shift_c is not None
            hat = _take_hat(loop, rows, loop.mean_c, loop.var_c, t, new)
            shown = hat.mul_(norm.scale_c).add_(norm.shift_c).tanh_()
        old_c = c[t].copy_(new) if zero else _carried(new, old, through[t], straight[t], out=c[t])
        gate = o[t]
        held = o[t - 1] if t > 0 else part.gate
        if holding and held is not None:
            held = held[:count]
            gate = zone(gate, held if cuts[t] is None else torch.where(cuts[t], gate, held), update[t])
        shown.mul_(gate)
        return shown if loop.w_hr is None else shown @ loop.w_hr.t()

    return advance


# --- backwards -------------------------------------------------------------------------------------


class Factors(NamedTuple):
    """What comes back at a row, as multiples of the derivative of the h that was carried on.

    Those of the gates lie where the gates' derivatives will be.
    """

    straight: Keep  # of the h before, past the gates; None is nothing
    cell: Callable[[int, Tensor], None] | None = None  # an LSTM's way back through c, which adds up over the steps


def backward(loop: Loop, back: Backward) -> None:
    """Run the loop backwards."""
    owed = torch.zeros_like(loop.h0 if loop.c0 is None else loop.c0)
    for part in parts_of(loop, back=True):
        rows: dict[str, Any] = {name: getattr(back, name) for name in _OF_ROWS}
        rows = {name: None if v is None else v[part.at] for name, v in rows.items()}
        _backward(part, replace(back, **rows), back.dsh is not back.dgx, owed)


_OF_ROWS = ("dy", "dcells", "dgx", "dgh", "dsh", "du", "u", "dnc", "chat", "dx")


def _backward(part: Part, back: Backward, both: bool, owed: Tensor) -> None:
    """`both`: the derivatives of x's part and of h's differ; `owed`: what a held gate owes to the step before."""
    loop, rows = part.loop, part.rows
    find = {"lstm": _lstm_back, "gru": _gru_back}.get(loop.cell, _rnn_back)
    factors = find(part, back, owed)
    dy, dgx, dsh, dgh, straight = map(rows.cut, (back.dy, back.dgx, back.dsh, back.dgh, factors.straight))
    cuts, gates, hats = _cuts(loop, rows), len(loop.w_hh) // loop.hidden, rows.cut(loop.gh)
    for t in reversed(range(len(rows.counts))):
        count = rows.counts[t]
        dh = back.dh[:count].add_(dy[t])
        if factors.cell is not None:
            factors.cell(t, dh)
        else:
            for d in (dgx[t], dsh[t]) if both else (dgx[t],):
                d.view(count, gates, loop.hidden).mul_(dh[:, None])
        if loop.norm is not None:
            assert loop.var_h is not None and loop.gh is not None
            dgh[t].copy_(_norm_back(loop, rows, t, dsh[t] * loop.norm.scale_h, hats[t], loop.var_h))
        if straight[t] is None:
            dh.zero_()
        else:
            dh.mul_(straight[t])
        if loop.scale_h is None:
            received = dgh[t] @ loop.w_hh
            dh += received - received.mean(0) if loop.balanced else received
        else:
            dh += (dgh[t] @ loop.w_hh).mul_(loop.scale_h[:count])
        if cuts[t] is not None:
            for d_state, kept in ((back.dh, back.dreset_h), (back.dc, back.dreset_c)):
                if d_state is not None and kept is not None:
                    kept[:count] += torch.where(cuts[t], d_state[:count], 0.0)
                    d_state[:count].masked_fill_(cuts[t], 0.0)
    if loop.norm is not None:
        _norms_after(loop, back, rows)


def _rnn_back(part: Part, back: Backward, owed: Tensor) -> Factors:
    loop, keeps = part.loop, part.keeps
    value, d = loop.gates, back.dgx
    through, straight = _shares(loop, "hidden", keeps.hidden)
    if loop.cell == "rnn_relu":
        torch.mul(value > 0, through, out=d)
    else:
        _through_tanh(through, value, out=d)
    return Factors(straight)


def _gru_back(part: Part, back: Backward, owed: Tensor) -> Factors:
    loop, rows, keeps = part.loop, part.rows, part.keeps
    assert loop.gh is not None
    size = loop.hidden
    r, z, n = loop.gates.chunk(3, dim=-1)
    product = loop.gh[:, -size:]
    if loop.norm is not None:
        product = product * loop.norm.scale_h[2 * size :]
        product = product if loop.b_h is None else product + loop.b_h[2 * size :]
    through, straight = _shares(loop, "hidden", keeps.hidden)
    d = back.dgx
    dn = d[:, 2 * size :]
    _through_tanh(drop((1 - z) * through, keeps.update), n, out=dn)
    _through_sigmoid(dn * product, r, out=d[:, :size])
    old_h = rows.before(loop, loop.y, loop.h0, loop.reset_h)
    _through_sigmoid((old_h - drop(n, keeps.update)) * through, z, out=d[:, size : 2 * size])
    back.dsh.copy_(d)
    back.dsh[:, 2 * size :].mul_(r)
    gate = z * through
    return Factors(gate if straight is None else gate + straight)


def _lstm_back(part: Part, back: Backward, owed: Tensor) -> Factors:
    loop, rows, keeps = part.loop, part.rows, part.keeps
    assert loop.c is not None and loop.c0 is not None and back.dc is not None
    size, norm = loop.hidden, loop.norm
    i, f, g, o = loop.gates.chunk(4, dim=-1)
    old_c = rows.before(loop, loop.c, loop.c0, loop.reset_c)
    c = drop(i * g, keeps.update).addcmul_(f, old_c)
    if zero := zeroes(loop, "cell"):
        c = drop(c, keeps.cell)
    if norm is not None:
        assert back.chat is not None and loop.mean_c is not None and loop.var_c is not None
        assert norm.scale_c is not None and norm.shift_c is not None
        back.chat.copy_(_hat(loop, rows, loop.mean_c, loop.var_c, c))
        c = back.chat * norm.scale_c + norm.shift_c
    shown, gate, held = c.tanh_(), o, None
    if holds(loop):
        assert keeps.update is not None
        held = torch.zeros_like(o) + keeps.update
        if part.gate is None:
            held[: rows.counts[0]] = 0.0
        if loop.resets is not None:
            held.masked_fill_(loop.resets[:, None], 0.0)
        gate = zone(o, rows.before(loop, o, o if part.gate is None else part.gate, None), held)
    if back.u is not None:
        torch.mul(gate, shown, out=back.u)

    # Multiples of d, the derivative of the candidate h, and of that of the candidate c.
    d = back.dgx
    d_i, d_f, d_g, d_o = d.chunk(4, dim=-1)
    _through_sigmoid(drop(g, keeps.update), i, out=d_i)
    _through_sigmoid(old_c, f, out=d_f)
    _through_tanh(drop(i, keeps.update), g, out=d_g)
    through, straight = _shares(loop, "hidden", keeps.hidden)
    to_c = torch.ops.aten.tanh_backward(gate, shown)
    if loop.w_hr is None and keeps.hidden is not None:  # a projection lies between h and what is shown of c
        shown, to_c = shown.mul_(through), to_c.mul_(through)
    owes = slope = None
    if held is not None:
        owes, slope = shown * held, o * (1 - o)
        shown = shown - owes
    _through_sigmoid(shown, o, out=d_o)
    through_c, past_c = _shares(loop, "cell", keeps.cell)

    d_ifgs, d_os, to_cs, fs = map(rows.cut, (d[:, : 3 * size], d_o, to_c, f))
    throughs, pasts, debts, slopes = map(rows.cut, (through_c, past_c, owes, slope))
    dcells, dnc, chat, du, hidden = map(rows.cut, (back.dcells, back.dnc, back.chat, back.du, keeps.hidden))

    def cell(t: int, dh: Tensor) -> None:
        assert back.dc is not None
        count = rows.counts[t]
        if loop.w_hr is not None:
            dh = torch.mm(du[t].copy_(drop(dh, hidden[t])), loop.w_hr)
        dc = back.dc[:count]
        if dcells[t] is not None:
            dc.add_(dcells[t])
        new = dh * to_cs[t]
        if norm is not None:
            assert norm.scale_c is not None and loop.var_c is not None
            dnc[t].copy_(new)
            new = _norm_back(loop, rows, t, new.mul_(norm.scale_c), chat[t], loop.var_c)
        if zero:
            new.add_(dc).mul_(throughs[t])
        else:
            new.addcmul_(dc, throughs[t])
        d_ifgs[t].unflatten(1, (3, size)).mul_(new[:, None])
        d_os[t].mul_(dh)
        if debts[t] is not None:
            d_os[t].addcmul_(owed[:count], slopes[t])
            torch.mul(dh, debts[t], out=owed[:count])
        if pasts[t] is None:
            torch.mul(new, fs[t], out=dc)
        else:
            dc.mul_(pasts[t]).addcmul_(new, fs[t])

    return Factors(straight, cell)


def _norms_after(loop: Loop, back: Backward, rows: Rows) -> None:
    """The derivatives of the scales and of x·Wx, of all rows at once as far as they go."""
    norm = loop.norm
    assert norm is not None and loop.gh is not None and back.dx is not None
    assert back.dscale_x is not None and back.dscale_h is not None
    assert loop.mean_x is not None and loop.var_x is not None
    hat = _hat(loop, rows, loop.mean_x, loop.var_x, back.dx)
    back.dscale_x[0] += (back.dgx * hat).sum(0)
    back.dscale_h[0] += (back.dsh * loop.gh).sum(0)
    if back.dnc is not None and back.chat is not None:
        assert back.dscale_c is not None and back.dshift_c is not None
        back.dscale_c[0] += (back.dnc * back.chat).sum(0)
        back.dshift_c[0] += back.dnc.sum(0)
    dx, d = rows.cut(back.dx), rows.cut(back.dgx * norm.scale_x)
    for t, one in enumerate(rows.cut(hat)):
        dx[t].copy_(_norm_back(loop, rows, t, d[t], one, loop.var_x))


# --- parts -----------------------------------------------------------------------------------------


def _through_sigmoid(d: Tensor, value: Tensor, out: Tensor) -> None:
    """The derivative through a sigmoid that gave `value`."""
    torch.ops.aten.sigmoid_backward.grad_input(d, value, grad_input=out)


def _through_tanh(d: Tensor, value: Tensor, out: Tensor) -> None:
    torch.ops.aten.tanh_backward.grad_input(d, value, grad_input=out)


def _shares(loop: Loop, stream: str, keep: Keep) -> tuple[Tensor, Tensor | None]:
    """How much of a state that is carried on is its new value and how much its old one; None is nothing."""
    if keep is None:
        return loop.h0.new_ones(()), None
    return 1 - keep, None if zeroes(loop, stream) else keep


def _cuts(loop: Loop, rows: Rows) -> Sequence[Any]:
    """Where a reset has cut the rows of each step off from the step before: [count, 1], or None."""
    return rows.cut(None if loop.resets is None else loop.resets[:, None])


def _before(states: Tensor, count: int, cut: Tensor | None, reset: Tensor | None) -> Tensor:
    """The state before a step, from that of the step before."""
    states = states if len(states) == count else states[:count]
    return states if cut is None or reset is None else torch.where(cut, reset[:count], states)


def _carried(new: Tensor, old: Tensor, through: Tensor, straight: Tensor | None, out: Tensor) -> Tensor:
    """The state that is carried on: of finite numbers exact where a mask has 0 or 1; faster than lerp and where."""
    torch.mul(new, through, out=out)
    return out if straight is None else out.addcmul_(old, straight)


# --- norms -----------------------------------------------------------------------------------------


def _with_norm(loop: Loop, rows: Rows, t: int, product: Tensor) -> Tensor:
    """h·Wh normalised where there is a norm, and with its bias."""
    norm = loop.norm
    if norm is not None:
        assert loop.mean_h is not None and loop.var_h is not None and loop.gh is not None
        hat = _take_hat(loop, rows, loop.mean_h, loop.var_h, t, product)
        loop.gh[rows.starts[t] : rows.starts[t + 1]] = hat
        product = hat.mul_(norm.scale_h)
    return product if loop.b_h is None else product.add_(loop.b_h)


def _moments(loop: Loop, rows: Rows, t: int, *moments: Tensor) -> list[Tensor]:
    """Moments of one step, in the shape in which they meet its rows."""
    assert loop.norm is not None
    at = slice(rows.starts[t], rows.starts[t + 1])
    return [v[at, None] if loop.norm.over == "units" else v[t] for v in moments]


def _take_hat(loop: Loop, rows: Rows, mean: Tensor, var: Tensor, t: int, v: Tensor) -> Tensor:
    """v of one step, normalised; its moments are written down, where they are not given."""
    assert loop.norm is not None
    own_mean, own_var = _moments(loop, rows, t, mean, var)
    if loop.norm.over == "units" or not loop.given:
        over = -1 if loop.norm.over == "units" else 0
        found = torch.var_mean(v, dim=over, correction=0, keepdim=loop.norm.over == "units")
        own_var.copy_(found[0]), own_mean.copy_(found[1])
    return (v - own_mean) * torch.rsqrt(own_var + loop.norm.eps)


def _hat(loop: Loop, rows: Rows, mean: Tensor, var: Tensor, v: Tensor) -> Tensor:
    """v of all rows, normalised."""
    assert loop.norm is not None
    mean, var = (m[:, None] if loop.norm.over == "units" else m[rows.places[0]] for m in (mean, var))
    return (v - mean) * torch.rsqrt(var + loop.norm.eps)


def _norm_back(loop: Loop, rows: Rows, t: int, d: Tensor, hat: Tensor, var: Tensor) -> Tensor:
    """Through a normalisation of one step, from the derivative of its result before scaling."""
    assert loop.norm is not None
    (own_var,) = _moments(loop, rows, t, var)
    rstd = torch.rsqrt(own_var + loop.norm.eps)
    if loop.given:
        return d * rstd
    over = -1 if loop.norm.over == "units" else 0
    return (d - d.mean(over, keepdim=True) - hat * (d * hat).mean(over, keepdim=True)) * rstd
