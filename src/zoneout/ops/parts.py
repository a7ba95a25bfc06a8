"""A loop in parts: which rows each step has, and what noise replaces in them.

For the loop in torch calls (`plain.py`). A part is a loop itself: some steps, that begin where those before them ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..draws import Draw, draw_all, stream_units
from .loop import Loop
from .rows import places

Keep = Tensor | None  # where the old value (or zero) takes the place of the new one: a mask, a rate, or None


class Keeps(NamedTuple):
    """What is replaced, in every row."""

    cell: Keep = None
    hidden: Keep = None
    update: Keep = None


class Rows:
    """The rows of each step."""

    def __init__(self, loop: Loop) -> None:
        assert loop.counts is not None
        self.all = loop.counts
        self.counts = [count for count in loop.counts.tolist() if count > 0]
        self.starts = list(accumulate(self.counts, initial=0))
        self.total = self.starts[-1]

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Step and row of the batch of every row."""
        return places(self.all, self.total)

    def cut(self, v: Tensor | None) -> Sequence[Any]:
        """What a step has of `v`: its rows, or all of what has no rows."""
        if v is None or v.dim() < 2:
            return [v] * len(self.counts)
        return v[: self.total].split(self.counts)

    def before(self, loop: Loop, states: Tensor, initial: Tensor, reset: Tensor | None) -> Tensor:
        """The state before every row."""
        first = self.counts[0]
        if self.counts[-1] == first:
            later = states[: self.total - first]
        else:
            t, row = self.places
            later = states[torch.tensor(self.starts, device=t.device)[t[first:] - 1] + row[first:]]
        found = torch.cat((initial[:first], later))
        if loop.resets is None or reset is None:
            return found
        return torch.where(loop.resets[:, None], reset[self.places[1]], found)


@dataclass
class Part:
    """Some steps of a loop: a loop itself, that begins where the steps before it ended."""

    loop: Loop
    keeps: Keeps
    at: slice  # its rows
    gate: Tensor | None  # the output gates of the step before

    @cached_property
    def rows(self) -> Rows:
        return Rows(self.loop)


_NUMBERS = 2**17  # of a state, in the steps that are taken at once


def parts_of(loop: Loop, back: bool = False) -> Iterator[Part]:
    """The loop in parts, each with what is replaced in it; on the way back the last comes first."""
    rows, keeps = Rows(loop), _keeps(loop, back)
    steps = max(1, _NUMBERS // max(1, loop.batch * loop.hidden))
    starts = range(0, len(rows.counts), steps)
    for t in reversed(starts) if back else starts:
        yield _part(loop, rows, keeps, t, min(t + steps, len(rows.counts)))


def _part(loop: Loop, rows: Rows, keeps: Keeps, t: int, end: int) -> Part:
    at = slice(rows.starts[t], rows.starts[end])
    before = slice(rows.starts[t - 1], rows.starts[t]) if t else None

    def of_rows(v: Tensor | None) -> Tensor | None:
        return None if v is None else v[at]

    def of_moments(v: Tensor | None) -> Tensor | None:
        return None if v is None or loop.norm is None else v[at] if loop.norm.over == "units" else v[t:end]

    def start(states: Tensor | None, initial: Tensor | None) -> Any:
        return initial if before is None or states is None else states[before]

    def kept(keep: Keep) -> Keep:
        # Between numbers one chooses faster by numbers than by bits.
        return keep if keep is None or keep.dtype != torch.bool else keep[at].to(loop.gates.dtype)

    assert loop.counts is not None
    moments: dict[str, Any] = {name: of_moments(getattr(loop, name)) for name in _MOMENTS}
    some = replace(
        loop,
        steps=end - t,
        counts=loop.counts[t:end],
        offsets=None,
        h0=start(loop.y, loop.h0),
        c0=start(loop.c, loop.c0),
        gates=loop.gates[at],
        y=loop.y[at],
        c=of_rows(loop.c),
        gh=of_rows(loop.gh),
        resets=of_rows(loop.resets),
        **moments,
    )
    gate = loop.gates[before, 3 * loop.hidden :] if before is not None and holds(loop) else None
    return Part(some, Keeps(*map(kept, keeps)), at, gate)


_MOMENTS = ("mean_x", "var_x", "mean_h", "var_h", "mean_c", "var_c")


# --- noise ----------------------------------------------------------------------------------------


def _keeps(loop: Loop, back: bool) -> Keeps:
    """What is replaced in every row, [N, ·] or a rate; on the way back as on the way there."""
    assert loop.counts is not None and loop.lengths is not None
    out = {name: draw.rate.to(loop.gates.dtype) for name, draw in loop.draws.items() if draw.seed is None}
    drawn = [draw for draw in loop.draws.values() if draw.seed is not None]
    if not drawn:
        return Keeps(**out)
    numbers = [loop.counts, loop.lengths, loop.examples, *(v for d in drawn for v in (d.seed, d.rate) if v is not None)]
    key = (
        *((draw.rule, draw.plane) for draw in drawn),
        *(v.numpy().tobytes() for v in numbers),
        *(loop.first_step, loop.reverse, loop.hidden, loop.outputs),
    )
    masks = _drawn.pop(key, None) if back else None
    if masks is None:
        masks = _masks(loop, drawn)
    if not back:
        if sum(mask.nbytes for kept in list(_drawn.values()) for mask in kept.values()) > _MOST:
            _drawn.clear()
        _drawn[key] = masks
    return Keeps(**out, **masks)


_drawn: dict[Any, dict[str, Tensor]] = {}  # masks whose way back has not come yet: drawing them takes longest of all
_MOST = 2**26  # bytes


def _masks(loop: Loop, draws: Sequence[Draw]) -> dict[str, Tensor]:
    """The masks of every row, [N, ·]."""
    assert loop.counts is not None and loop.lengths is not None
    units = stream_units(loop.hidden, 0 if loop.w_hr is None else loop.outputs, 0)
    steps = torch.arange(loop.first_step, loop.first_step + loop.steps, device=loop.examples.device)
    masks = draw_all(draws, steps, loop.examples, units)
    whole = not loop.reverse and int(loop.counts[-1]) == loop.batch
    for name, mask in masks.items():
        mask = mask.expand(loop.steps, loop.batch, units[name]).reshape(-1, units[name])
        if not whole:
            t, row = places(loop.counts, int(loop.counts.sum()))
            mask = mask[(loop.lengths[row] - 1 - t if loop.reverse else t) * loop.batch + row]
        masks[name] = mask
    return masks


def zeroes(loop: Loop, stream: str) -> bool:
    return stream in loop.draws and loop.draws[stream].rule.by == "zero"


def holds(loop: Loop) -> bool:
    return "update" in loop.draws and loop.draws["update"].rule.holds_gate
