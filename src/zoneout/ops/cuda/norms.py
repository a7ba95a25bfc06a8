"""The norm of x·Wx, for all steps at once: before the loop, and after it on the way back."""

from __future__ import annotations

import torch
from torch import Tensor

from ...norm import moments, normalise
from ..loop import Backward, Loop
from ..reference import alive_rows, turn_around


def forward(loop: Loop) -> None:
    """Normalise, scale and shift x's part of the gates in place; its moments are written unless they are given."""
    assert loop.norm is not None and loop.mean_x is not None and loop.var_x is not None
    v = _in_order(loop, loop.gates)
    if not loop.given:
        mean, var = moments(v, loop.norm.over, _alive(loop))
        loop.mean_x.copy_(mean.view_as(loop.mean_x))
        loop.var_x.copy_(var.view_as(loop.var_x))
    mean, var = _moments(loop)
    v = normalise(v, mean, var, loop.norm.eps, loop.norm.scale_x) + loop.b_x
    loop.gates.copy_(_back(loop, v))


def backward(loop: Loop, back: Backward) -> None:
    """Of x·Wx, from that of its normalised form; and of all the norms' scales and shifts."""
    assert loop.norm is not None and back.dx is not None and loop.gh is not None
    mean, var = _moments(loop)
    rstd = torch.rsqrt(var + loop.norm.eps)
    hat, d = (_in_order(loop, back.dx) - mean) * rstd, _in_order(loop, back.dgx)
    sums = {"x": (d * hat).sum((0, 1)), "h": (back.dsh * loop.gh).sum(0)}
    for name, total in sums.items():
        getattr(back, f"dscale_{name}").copy_(total)
    if back.dnc is not None and back.chat is not None and back.dscale_c is not None and back.dshift_c is not None:
        back.dscale_c.copy_((back.dnc * back.chat).sum(0))
        back.dshift_c.copy_(back.dnc.sum(0))
    d = d * loop.norm.scale_x
    if loop.norm.over == "units":
        d = d - d.mean(-1, keepdim=True) - hat * (d * hat).mean(-1, keepdim=True)
    elif not loop.given:
        alive = _alive(loop)
        count = loop.batch if alive is None else alive.sum(1, keepdim=True).clamp(min=1)
        d = d - d.sum(1, keepdim=True) / count - hat * ((d * hat).sum(1, keepdim=True) / count)
        d = d if alive is None else d * alive
    back.dx.copy_(_back(loop, d * rstd))


def _in_order(loop: Loop, v: Tensor) -> Tensor:
    """[N, ·] -> [T, B, ·] in float32 and in the order of processing."""
    v = v.view(loop.steps, loop.batch, v.shape[1]).float()
    return turn_around(loop.lengths, loop.steps, loop.reverse)(v)


def _back(loop: Loop, v: Tensor) -> Tensor:
    """As the rows lie."""
    return turn_around(loop.lengths, loop.steps, loop.reverse)(v).view(loop.steps * loop.batch, v.shape[2])


def _alive(loop: Loop) -> Tensor | None:
    return None if loop.lengths is None else alive_rows(loop.lengths, loop.steps)


def _moments(loop: Loop) -> tuple[Tensor, Tensor]:
    """Mean and variance, to be broadcast over [T, B, ·] in the order of processing."""
    assert loop.norm is not None and loop.mean_x is not None and loop.var_x is not None
    shape = (loop.steps, loop.batch, 1) if loop.norm.over == "units" else (loop.steps, 1, loop.gates.shape[1])
    return loop.mean_x.view(shape), loop.var_x.view(shape)
