"""A loop in chunks of several steps: the rows of each step, and the masks of every row.

This is for the loop in torch calls (`fallback.py`). A chunk is itself a loop, which begins where
the previous chunk ended. It has few enough steps that the values computed for all of them stay in
the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...draws import Draw, draw_all, stream_units
from ...streams import STATE_STREAMS
from ..backend import Loop
from ..sequence.rows import places

Columns = Sequence[Any]  # one entry per step


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
        """The step and the batch row of every row."""
        return places(self.all, self.total)

    def cut(self, v: Tensor | None) -> Columns:
        """Return the rows of each step; a tensor without rows is repeated for each step."""
        if v is None or v.dim() < 2:
            return [v] * len(self.counts)
        return v[: self.total].split(self.counts)

    def first(self, v: Tensor) -> Columns:
        """Return, for each step, as many first rows of a tensor as the step has."""
        views = {count: v if len(v) == count else v[:count] for count in set(self.counts)}
        return [views[count] for count in self.counts]

    def before(self, v: Tensor, initial: Tensor) -> Columns:
        """Return, for each step, the rows of `v` at the previous step; `v` has all steps."""
        counts = self.counts
        shifted = [initial[: counts[0]], *self.cut(v)[:-1]]
        return [v if len(v) == count else v[:count] for v, count in zip(shifted, counts)]

    def all_before(self, v: Tensor, initial: Tensor) -> Tensor:
        """Return the same for all steps, in one tensor."""
        first = self.counts[0]
        if self.counts[-1] == first:
            later = v[: self.total - first]
        else:
            t, row = self.places
            later = v[torch.tensor(self.starts, device=t.device)[t[first:] - 1] + row[first:]]
        return torch.cat((initial[:first], later))


@dataclass
class Chunk:
    """Some steps of a loop."""

    loop: Loop  # of only these steps
    whole: Loop
    at: slice  # its rows
    before: slice | None  # the rows of the previous step; None for the first chunk
    masks: dict[str, Tensor]  # by stream: a mask [N, ·], or a rate

    @cached_property
    def rows(self) -> Rows:
        return Rows(self.loop)

    def all_before(self, k: int) -> Tensor:
        """Return state `k` before every row; a view if the row layout allows it."""
        loop, rows = self.loop, self.rows
        reset = loop.reset_to[k] if loop.resets is not None else None
        same = self.before is not None and self.before.stop - self.before.start == rows.counts[-1]
        if same and self.before is not None and reset is None:
            return self.whole.states[k][self.before.start : self.at.stop - rows.counts[-1]]
        previous = rows.all_before(loop.states[k], loop.initial[k])
        if loop.resets is None or reset is None:
            return previous
        return torch.where(loop.resets[:, None], reset[rows.places[1]], previous)


_NUMBERS = 2**17  # values of a state, in the steps of a chunk
_MOMENTS = ("mean_x", "var_x", "mean_h", "var_h", "mean_c", "var_c")


def chunks_of(loop: Loop, backward: bool = False) -> Iterator[Chunk]:
    """Yield the chunks of a loop; a backward pass begins with the last."""
    rows, masks = Rows(loop), _masks_of(loop, backward)
    steps = max(1, _NUMBERS // max(1, loop.batch * loop.hidden))
    starts = range(0, len(rows.counts), steps)
    for t in reversed(starts) if backward else starts:
        yield _chunk(loop, rows, masks, t, min(t + steps, len(rows.counts)))


def _chunk(loop: Loop, rows: Rows, masks: dict[str, Tensor], t: int, end: int) -> Chunk:
    at = slice(rows.starts[t], rows.starts[end])
    before = slice(rows.starts[t - 1], rows.starts[t]) if t else None

    def of_rows(v: Tensor | None) -> Any:
        return None if v is None else v[at]

    def of_moments(v: Tensor | None) -> Any:
        by_row = loop.norm is not None and loop.norm.over == "units"
        return None if v is None else v[at] if by_row else v[t:end]

    assert loop.counts is not None
    moments = {name: of_moments(getattr(loop, name)) for name in _MOMENTS}
    part = replace(
        loop,
        steps=end - t,
        counts=loop.counts[t:end],
        offsets=None,
        initial=loop.initial if before is None else tuple(v[before] for v in loop.states),
        gates=loop.gates[at],
        states=tuple(map(of_rows, loop.states)),
        hats=of_rows(loop.hats),
        slots=tuple(map(of_rows, loop.slots)),
        inner=tuple(map(of_rows, loop.inner)),
        resets=of_rows(loop.resets),
        **moments,
    )
    masks = {name: v[at] if v.dtype == torch.bool else v for name, v in masks.items()}
    return Chunk(part, loop, at, before, masks)


# --- masks ----------------------------------------------------------------------------------------


def _masks_of(loop: Loop, backward: bool) -> dict[str, Tensor]:
    """Return the mask [N, ·] or rate of every stream; backward reuses the masks of forward."""
    assert loop.counts is not None and loop.lengths is not None
    rates, drawn = dict[str, Tensor](), list[Draw]()
    for name, draw in loop.draws.items():
        if draw.seed is None:
            rates[name] = draw.rate.to(loop.gates.dtype)
        else:
            drawn.append(draw)
    if not drawn:
        return rates
    seeds = [v for draw in drawn for v in (draw.seed, draw.rate) if v is not None]
    key = (
        *((draw.rule, draw.plane) for draw in drawn),
        *(v.numpy().tobytes() for v in (loop.counts, loop.lengths, loop.examples, *seeds)),
        *(loop.first_step, loop.reverse, loop.hidden, loop.outputs),
    )
    masks = _cache.pop(key, None) if backward else None
    if masks is None:
        masks = _draw(loop, drawn)
    if not backward:
        if sum(v.nbytes for cached in list(_cache.values()) for v in cached.values()) > _MOST:
            _cache.clear()
        _cache[key] = masks
    return rates | masks


# Masks for backward passes to come: drawing masks takes longer than anything else.
_cache: dict[Any, dict[str, Tensor]] = {}
_MOST = 2**26  # bytes


def _draw(loop: Loop, draws: Sequence[Draw]) -> dict[str, Tensor]:
    """Return the masks of every row, [N, ·]."""
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


def masks_by_name(chunk: Chunk) -> dict[str, Tensor]:
    """Return masks and rates by their names in a plan; a plan has none for a projected h."""
    loop, masks = chunk.loop, dict[str, Tensor]()
    for stream, mask in chunk.masks.items():
        rule = loop.draws[stream].rule
        if stream == "update":
            masks["update"] = mask
            if rule.holds_gate:
                masks["hold"] = _hold(chunk, mask)
        elif not (stream == "hidden" and loop.w_hr is not None):
            masks[f"{'zero' if rule.by == 'zero' else 'zone'}{STATE_STREAMS.index(stream)}"] = mask
    return masks


def _hold(chunk: Chunk, mask: Tensor) -> Tensor:
    """Return the mask of held gates: where the update is dropped and a previous step exists."""
    loop, rows = chunk.loop, chunk.rows
    hold = mask.expand(rows.total, loop.hidden).clone()
    if chunk.before is None:
        hold[: rows.counts[0]] = 0
    if loop.resets is not None:
        hold.masked_fill_(loop.resets[:, None], 0)
    return hold
