"""A cell (`cells.step`) in a loop over time: the reference for all other backends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import cells
from ..definition import Definition
from ..draws import Draw, draw_all, stream_units
from ..norm import Moments, StepNorm, moments, normalise
from .run import Result, Run, kind_of

_HALF = (torch.float16, torch.bfloat16)


def run(r: Run) -> Result:
    """Run one pass over time; half types are computed in float32, as in the fused loops."""
    dtype = r.h0.dtype
    if dtype not in _HALF:
        return _run(r)
    done = _run(_widened(r))
    final, states = (tuple(v.to(dtype) for v in group) for group in (done.final, done.states))
    return done._replace(y=done.y.to(dtype), final=final, states=states)


def _widened(value: Any) -> Any:
    """Return a tensor of a half type in float32; a tuple with all of its tensors so."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    if not isinstance(value, tuple):
        return value
    items = [_widened(v) for v in value]
    return value._make(items) if hasattr(value, "_make") else tuple(items)


def _run(r: Run) -> Result:
    """Run one pass over time.

    The loop always runs forwards: a reversed sequence is reversed before the loop.
    """
    if r.counts is not None:
        raise RuntimeError("input: the reference got packed rows; please report this as a bug")
    steps = len(r.x)
    w = r.weights
    r = r._replace(x=dense(r.x, w.w_ih))  # rates and scales take the type of x
    turn = turn_around(r.lengths, steps, r.reverse)
    x, resets = turn(r.x), _cuts(r.resets, turn, r.reverse)
    alive = None if r.lengths is None else alive_rows(r.lengths, steps)
    if alive is not None:
        x = torch.where(alive, x, 0.0)  # the padding may contain anything
    masks = {stream: turn(mask) for stream, mask in _masks(r).items()}
    keeps, scale_h = _keeps(r, masks)
    norm = _Norm(r.norm, alive)

    gx = F.linear(x, w.w_ih, w.b_ih if r.norm is None else None)
    if r.norm is not None:
        gx = norm.x(gx)
        gx = gx if w.b_ih is None else gx + w.b_ih
    if r.extra is not None:
        gx = gx + (turn(r.extra) if alive is None else torch.where(alive, turn(r.extra), 0.0))
    holds = any(draw.rule.holds_gate for draw in r.draws)

    def project(v: Tensor) -> Tensor:
        return F.linear(v, w.w_hr)  # type: ignore[arg-type]

    states = list(r.states)
    gate: Tensor | None = None
    every: list[list[Tensor]] = []
    for t, (g_t, keep) in enumerate(zip(gx.unbind(0), keeps, strict=True)):
        before, cut = states, None if resets is None else resets[t]
        if cut is not None:
            states = [torch.where(cut, to, s) for s, to in zip(states, r.reset_to, strict=True)]
        gh = None
        if w.w_hh is not None:
            h_in = states[0] if scale_h is None else states[0] * scale_h
            gh = recurrent_product(r.cell, h_in, w.w_hh, w.b_hh if r.norm is None else None)
            if r.norm is not None:
                gh = norm.h(t, gh)
                gh = gh if w.b_hh is None else gh + w.b_hh
        states, gate = cells.step(
            r.cell, g_t, gh, states, w.parameters, keep,
            held=cells.Held(gate, cut) if holds else None, expose=partial(norm.c, t),
            project=None if w.w_hr is None else project,
        )  # fmt: skip
        if alive is not None:  # a sequence that has ended keeps its final state
            states = [torch.where(alive[t], new, old) for new, old in zip(states, before)]
        every.append(states)

    def over_time(k: int) -> Tensor:
        v = torch.stack([states[k] for states in every])
        return turn(v if alive is None else torch.where(alive, v, 0.0))

    # Clones: the caller may change the final states in place, and the backward pass needs the
    # original values.
    final = tuple(state.clone() for state in states)
    seen = tuple(over_time(k) for k in range(1, len(states))) if r.return_states else ()
    return Result(over_time(0), final, seen, norm.seen())


def dense(x: Tensor, w_ih: Tensor) -> Tensor:
    """Return the input as features; ids of one-hot rows are expanded to one-hot vectors."""
    return x if x.dtype != torch.int64 else F.one_hot(x.squeeze(-1), w_ih.shape[1]).to(w_ih.dtype)


def recurrent_product(cell: Definition, h: Tensor, w_hh: Tensor, bias: Tensor | None) -> Tensor:
    """Return h·Wh + bias, [B, gates · H].

    A block-diagonal W_h has one block per gate and head, [gates · H, H / heads].
    """
    if cell.heads == 1:
        return F.linear(h, w_hh, bias)
    blocks = w_hh.view(cell.gates, cell.heads, -1, w_hh.shape[1])
    product = torch.einsum("bki,qkji->bqkj", h.unflatten(1, (cell.heads, -1)), blocks).flatten(1)
    return product if bias is None else product + bias


# --- time: reversal, lengths, resets --------------------------------------------------------------


def turn_around(lengths: Tensor | None, steps: int, reverse: bool) -> Callable[[Tensor], Tensor]:
    """Return the function that maps [T, B, ·] to processing order and back.

    It is its own inverse.
    """
    if not reverse:
        return cells.same
    if lengths is None:
        return lambda v: v.flip(0) if len(v) > 1 else v
    at = torch.arange(steps, device=lengths.device)[:, None]
    index = torch.where(at < lengths, lengths - 1 - at, at)[..., None]  # [T, B, 1]

    def turn(v: Tensor) -> Tensor:
        if len(v) != steps:
            return v  # a mask that does not depend on the step
        v = v.expand(-1, len(lengths), -1)
        return v.gather(0, index.expand_as(v))

    return turn


def alive_rows(lengths: Tensor, steps: int) -> Tensor:
    """Return [T, B, 1]: True while a sequence has not ended.

    In processing order it is the same for both directions.
    """
    return (torch.arange(steps, device=lengths.device)[:, None] < lengths)[..., None]


def _cuts(resets: Tensor | None, turn: Callable[[Tensor], Tensor], reverse: bool) -> Tensor | None:
    """Return [T, B, 1]: True if the state is reset before a processed step.

    The cut lies between a step and the previous one. A reversed run reaches it one step later.
    """
    if resets is None:
        return None
    cuts = turn(resets[..., None])
    return torch.cat((torch.zeros_like(cuts[:1]), cuts[:-1])) if reverse else cuts


# --- noise ----------------------------------------------------------------------------------------


def _masks(r: Run) -> dict[str, Tensor]:
    steps = torch.arange(r.first_step, r.first_step + len(r.x), device=r.x.device)
    units = stream_units(
        r.hidden, 0 if r.weights.w_hr is None else len(r.weights.w_hr), r.x.shape[-1]
    )
    drawn = draw_all(r.draws, steps, r.examples, units)
    return drawn | {d.rule.stream: d.given for d in r.draws if d.given is not None}


def _keeps(r: Run, masks: dict[str, Tensor]) -> tuple[list[cells.Keep], Tensor | None]:
    """Return what noise replaces at each step, and the factors of h where it enters the gates."""
    steps, scale_h, update = len(r.x), None, None
    kinds: dict[str, dict[str, list[Tensor]]] = {"zone": {}, "zero": {}, "drop": {}, "add": {}}
    for draw in r.draws:
        rule, mask = draw.rule, masks.get(draw.rule.stream)
        if rule.by == "scaled zero":
            scale_h = kept_scale(draw, mask, r.x.dtype)[0]
            continue
        each = [draw.rate.to(r.x.dtype)] if mask is None else list(mask.unbind(0))
        each = each if len(each) == steps else each * steps
        if rule.stream == "update":
            update = each
        else:
            kind, k = kind_of(rule)
            kinds[kind][r.cell.states[k]] = each

    def at(t: int) -> cells.Keep:
        of_states = {
            kind: {state: each[t] for state, each in masks.items()} for kind, masks in kinds.items()
        }
        return cells.Keep(**of_states, update=None if update is None else update[t])

    return [at(t) for t in range(steps)], scale_h


def kept_scale(draw: Draw, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the inverted-dropout factors: zero where the mask is set, else `draw.scale`."""
    assert mask is not None
    return torch.where(mask, 0.0, draw.scale).to(dtype)


# --- norms ----------------------------------------------------------------------------------------


class _Norm:
    """The three norms over time, and the moments they computed."""

    def __init__(self, norm: StepNorm | None, alive: Tensor | None) -> None:
        self.norm, self.alive = norm, alive
        self.recorded: dict[str, list[tuple[Tensor, Tensor]]] = {"x": [], "h": [], "c": []}

    def x(self, v: Tensor) -> Tensor:
        """Return x·Wx of all steps, [T, B, ·], normalised."""
        n = self.norm
        assert n is not None
        if n.given is not None:
            mean, var = n.given.mean_x[:, None], n.given.var_x[:, None]
        else:
            mean, var = moments(v, n.over, self.alive)
            self.recorded["x"] = list(
                zip(mean.detach().unbind(0), var.detach().unbind(0), strict=True)
            )
        return normalise(v, mean, var, n.eps, n.scale_x)

    def h(self, t: int, v: Tensor) -> Tensor:
        """Return h·Wh of one step, [B, ·], normalised."""
        n = self.norm
        assert n is not None
        pair = None if n.given is None else (n.given.mean_h[t], n.given.var_h[t])
        return self._step("h", v, t, pair, n.scale_h)

    def c(self, t: int, v: Tensor) -> Tensor:
        """Return the candidate c of one step, [B, H], normalised."""
        n = self.norm
        if n is None:
            return v
        assert n.scale_c is not None and n.shift_c is not None
        pair = None
        if n.given is not None:
            assert n.given.mean_c is not None and n.given.var_c is not None
            pair = n.given.mean_c[t], n.given.var_c[t]
        return self._step("c", v, t, pair, n.scale_c) + n.shift_c

    def _step(
        self, what: str, v: Tensor, t: int, pair: tuple[Tensor, Tensor] | None, scale: Tensor
    ) -> Tensor:
        assert self.norm is not None
        if pair is None:
            pair = moments(v, self.norm.over, None if self.alive is None else self.alive[t])
            self.recorded[what].append((pair[0].detach(), pair[1].detach()))
        return normalise(v, *pair, self.norm.eps, scale)

    def seen(self) -> Moments | None:
        if self.norm is None or self.norm.over == "units" or self.norm.given is not None:
            return None
        stacked = [
            torch.cat([pair[which] for pair in self.recorded[what]])
            for what in ("x", "h", "c")
            if self.recorded[what]
            for which in (0, 1)
        ]
        return Moments(*stacked)
