"""The cells of `cells.py` in a loop over time: the truth that the other backends are held to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import cells
from ..draws import Draw, draw_all, stream_units
from ..norm import Moments, StepNorm, moments, normalise
from .interface import Result, Run

KEEPS = {  # (stream, what takes its place) -> the field of cells.Keep
    ("cell", "previous"): "cell",
    ("hidden", "previous"): "hidden",
    ("cell", "zero"): "zero_cell",
    ("hidden", "zero"): "zero_hidden",
    ("update", "zero"): "update",
}


def run(r: Run) -> Result:
    """One pass over time. The loop always runs forwards: a reversed sequence is turned around first."""
    steps = len(r.x)
    w = r.weights
    turn = turn_around(r.lengths, steps, r.reverse)
    x, resets = turn(r.x), _cuts(r.resets, turn, r.reverse)
    alive = None if r.lengths is None else alive_rows(r.lengths, steps)
    if alive is not None:
        x = torch.where(alive, x, 0.0)  # whatever stands in the padding
    masks = {stream: turn(mask) for stream, mask in _masks(r).items()}
    keeps, scale_h = _keeps(r, masks)
    norm = _Norm(r.norm, alive)

    definition = cells.CELLS[r.cell]
    gx = F.linear(x, w.w_ih, w.b_ih if r.norm is None else None)
    if r.norm is not None:
        gx = norm.x(gx)
        gx = gx if w.b_ih is None else gx + w.b_ih
    holds = any(draw.rule.holds_gate for draw in r.draws)

    def project(v: Tensor) -> Tensor:
        return v if w.w_hr is None else F.linear(v, w.w_hr)

    states = [r.h0] if r.c0 is None else [r.h0, r.c0]
    reset_to = [r.reset_h, r.reset_c]
    gate: Tensor | None = None
    hs: list[Tensor] = []
    cs: list[Tensor] = []
    for t, (g_t, keep) in enumerate(zip(gx.unbind(0), keeps, strict=True)):
        before, cut = states, None if resets is None else resets[t]
        if cut is not None:
            states = [s if to is None else torch.where(cut, to, s) for s, to in zip(states, reset_to)]
        h = states[0]
        gh = F.linear(h if scale_h is None else h * scale_h, w.w_hh, w.b_hh if r.norm is None else None)
        if r.norm is not None:
            gh = norm.h(t, gh)
            gh = gh if w.b_hh is None else gh + w.b_hh
        states, gate = cells.step(
            definition, g_t, gh, states, keep,
            held=cells.Held(gate, cut) if holds else None, expose=partial(norm.c, t), project=project,
        )  # fmt: skip
        if alive is not None:  # a sequence that has ended keeps its final state
            states = [torch.where(alive[t], new, old) for new, old in zip(states, before)]
        hs.append(states[0])
        if r.return_cells and len(states) > 1:
            cs.append(states[1])

    def over_time(states: list[Tensor]) -> Tensor:
        v = torch.stack(states)
        return turn(v if alive is None else torch.where(alive, v, 0.0))

    # Clones: the caller may change the final states in place, and the backward pass needs the originals.
    h, *rest = (state.clone() for state in states)
    return Result(over_time(hs), h, rest[0] if rest else None, over_time(cs) if cs else None, norm.seen())


# --- time: reversal, lengths, resets ---------------------------------------------------------------


def turn_around(lengths: Tensor | None, steps: int, reverse: bool) -> Callable[[Tensor], Tensor]:
    """The function that turns [T, B, ·] into the order of processing, and back: it is its own inverse."""
    if not reverse:
        return cells.same
    if lengths is None:
        return lambda v: v.flip(0) if len(v) > 1 else v
    at = torch.arange(steps, device=lengths.device)[:, None]
    index = torch.where(at < lengths, lengths - 1 - at, at)[..., None]  # [T, B, 1]

    def turn(v: Tensor) -> Tensor:
        if len(v) != steps:
            return v  # a mask that does not see the step
        v = v.expand(-1, len(lengths), -1)
        return v.gather(0, index.expand_as(v))

    return turn


def alive_rows(lengths: Tensor, steps: int) -> Tensor:
    """[T, B, 1]: whether a sequence has not ended, the same in the order of processing of both directions."""
    return (torch.arange(steps, device=lengths.device)[:, None] < lengths)[..., None]


def _cuts(resets: Tensor | None, turn: Callable[[Tensor], Tensor], reverse: bool) -> Tensor | None:
    """[T, B, 1]: whether the state goes back to the initial one before a processed step.

    The cut lies between a step and the one before it. Run backwards, it is met one step later.
    """
    if resets is None:
        return None
    cuts = turn(resets[..., None])
    return torch.cat((torch.zeros_like(cuts[:1]), cuts[:-1])) if reverse else cuts


# --- noise -----------------------------------------------------------------------------------------


def _masks(r: Run) -> dict[str, Tensor]:
    steps = torch.arange(r.first_step, r.first_step + len(r.x), device=r.x.device)
    hidden = len(r.weights.w_hh) // cells.CELLS[r.cell].gates
    units = stream_units(hidden, 0 if r.weights.w_hr is None else len(r.weights.w_hr), r.x.shape[-1])
    return draw_all(r.draws, steps, r.examples, units)


def _keeps(r: Run, masks: dict[str, Tensor]) -> tuple[list[cells.Keep], Tensor | None]:
    """What each step replaces, and what h is multiplied with where it enters the gates."""
    steps = len(r.x)
    over_time: dict[str, list[Tensor]] = {}
    scale_h = None
    for draw in r.draws:
        mask = masks.get(draw.rule.stream)
        if draw.rule.by == "scaled zero":
            scale_h = kept_scale(draw, mask, r.x.dtype)[0]
            continue
        each = [draw.rate.to(r.x.dtype)] if mask is None else list(mask.unbind(0))
        over_time[KEEPS[draw.rule.stream, draw.rule.by]] = each if len(each) == steps else each * steps
    keeps = [cells.Keep(**{field: each[t] for field, each in over_time.items()}) for t in range(steps)]
    return keeps, scale_h


def kept_scale(draw: Draw, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Inverted scaling: zero where the mask says so, `draw.scale` elsewhere."""
    assert mask is not None
    return torch.where(mask, 0.0, draw.scale).to(dtype)


# --- norms -----------------------------------------------------------------------------------------


class _Norm:
    """The three normalisers over time, and the moments they saw."""

    def __init__(self, norm: StepNorm | None, alive: Tensor | None) -> None:
        self.norm, self.alive = norm, alive
        self.recorded: dict[str, list[tuple[Tensor, Tensor]]] = {"x": [], "h": [], "c": []}

    def x(self, v: Tensor) -> Tensor:
        """x·Wx of all steps at once, [T, B, ·]."""
        n = self.norm
        assert n is not None
        if n.given is not None:
            mean, var = n.given.mean_x[:, None], n.given.var_x[:, None]
        else:
            mean, var = moments(v, n.over, self.alive)
            self.recorded["x"] = list(zip(mean.detach().unbind(0), var.detach().unbind(0), strict=True))
        return normalise(v, mean, var, n.eps, n.scale_x)

    def h(self, t: int, v: Tensor) -> Tensor:
        """h·Wh of one step, [B, ·]."""
        n = self.norm
        assert n is not None
        given = None if n.given is None else (n.given.mean_h[t], n.given.var_h[t])
        return self._step("h", v, t, given, n.scale_h)

    def c(self, t: int, v: Tensor) -> Tensor:
        """The candidate c of one step, [B, H]."""
        n = self.norm
        if n is None:
            return v
        assert n.scale_c is not None and n.shift_c is not None
        given = None
        if n.given is not None:
            assert n.given.mean_c is not None and n.given.var_c is not None
            given = n.given.mean_c[t], n.given.var_c[t]
        return self._step("c", v, t, given, n.scale_c) + n.shift_c

    def _step(self, what: str, v: Tensor, t: int, given: tuple[Tensor, Tensor] | None, scale: Tensor) -> Tensor:
        assert self.norm is not None
        if given is None:
            given = moments(v, self.norm.over, None if self.alive is None else self.alive[t])
            self.recorded[what].append((given[0].detach(), given[1].detach()))
        return normalise(v, *given, self.norm.eps, scale)

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
