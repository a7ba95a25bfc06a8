"""How the rows of a batch lie for a loop that walks over them: longest first, ended ones left out.

They lie in order of processing, and nothing is done for sequences that have ended. A GPU has them as the caller does
(`cuda/rows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .interface import Run
from .loop import Loop


@dataclass
class Packed:
    """The packing of [T, B, ·], or of rows that came packed; all indices are on the CPU."""

    lengths: Tensor | None  # [B], as the caller has them
    steps: int
    batch: int
    reverse: bool
    given: Tensor | None = None  # [T]: the rows came packed, [N, ·], and each step has so many

    @cached_property
    def order(self) -> Tensor | None:
        return None if self.lengths is None else self.lengths.argsort(descending=True, stable=True)

    @cached_property
    def sorted_lengths(self) -> Tensor:
        if self.given is not None:
            return lengths_of(self.given, self.batch)
        if self.lengths is None or self.order is None:
            return _same(self.batch, self.steps)
        return self.lengths[self.order]

    @cached_property
    def counts(self) -> Tensor:
        if self.given is not None:
            return self.given
        if self.lengths is None:
            return _same(self.steps, self.batch)
        ends = self.sorted_lengths
        return (ends > torch.arange(self.steps, device=ends.device)[:, None]).sum(1)

    @cached_property
    def starts(self) -> Tensor:
        """[T]: where the packed rows of each step begin."""
        if self.given is None and self.lengths is None:
            return _multiples(self.steps, self.batch)
        return self.counts.cumsum(0) - self.counts

    @cached_property
    def grid(self) -> tuple[Tensor, Tensor]:
        """Step and row of every packed row."""
        return places(self.counts, int(self.counts.sum()))

    @cached_property
    def before(self) -> Tensor:
        """[N]: where the packed row of the step before is; of no use for those of the first step."""
        t, row = self.grid
        return self.starts[(t - 1).clamp(min=0)] + row

    @property
    def whole(self) -> bool:
        """Whether the rows are as they came: nothing to pack."""
        return self.lengths is None and not self.reverse

    @cached_property
    def take(self) -> Tensor:
        """[N]: where in the caller's rows each packed row is."""
        t, row = self.grid
        if self.reverse:
            t = self.sorted_lengths[row] - 1 - t
        if self.given is not None:
            return self.starts[t] + row
        return t * self.batch + (row if self.order is None else self.order[row])

    def inputs(self, x: Tensor) -> Tensor:
        """[T, B, ·] -> [N, ·], for the input."""
        return self.pack(x)

    def pack(self, v: Tensor) -> Tensor:
        """[T, B, ·] -> [N, ·]."""
        flat = v if self.given is not None else v.reshape(self.steps * self.batch, *v.shape[2:])
        return flat.contiguous() if self.whole else flat.index_select(0, self.take)

    def unpack(self, v: Tensor) -> Tensor:
        """[N, ·] -> [T, B, ·], zero where there is no row."""
        if self.given is not None:
            return v if self.whole else v.index_select(0, self.take)  # turned around twice
        if self.whole:
            return v.view(self.steps, self.batch, v.shape[-1])
        out = v.new_zeros(self.steps * self.batch, v.shape[-1])
        return out.index_copy_(0, self.take, v).view(self.steps, self.batch, v.shape[-1])

    def sort(self, v: Tensor) -> Tensor:
        """Rows of the batch, longest first."""
        return v.contiguous() if self.order is None else v.index_select(0, self.order)

    def unsort(self, v: Tensor) -> Tensor:
        return v if self.order is None else torch.empty_like(v).index_copy_(0, self.order, v)

    def final(self, states: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[Tensor]:
        """Of each state, given at every step and as it began, the last of every sequence, in tensors of their own."""
        return [copied(self._last(v, initial), dtype) for v, initial in states]

    def _last(self, v: Tensor, initial: Tensor) -> Tensor:
        """The last state of each sequence, in the caller's order; the initial one of a sequence of length 0."""
        if self.lengths is None and self.given is None:
            return v[v.shape[0] - self.batch :]
        rows = torch.arange(self.batch, device=self.starts.device)
        last = self.starts[(self.sorted_lengths - 1).clamp(min=0)] + rows
        if len(v) == 0:
            return self.unsort(initial)
        chosen = v.index_select(0, last.clamp(max=len(v) - 1))
        return self.unsort(torch.where(self.sorted_lengths[:, None] > 0, chosen, initial))

    def cuts(self, resets: Tensor | None) -> Tensor | None:
        """[N]: whether the state goes back to the initial one before each packed row."""
        if resets is None:
            return None
        cuts = self.pack(resets)
        return cuts[self.before] & (self.grid[0] > 0) if self.reverse else cuts  # the cut above a step, on the way down

    def entered(self, loop: Loop, out: Tensor) -> Tensor:
        """[N, P]: h as it entered the gates at every row, in `out`; `balanced`: less that of the first of its step."""
        first = int(self.counts[0])
        out[:first] = loop.h0[:first]
        if self.whole and self.given is None:
            out[first:] = loop.y[: len(out) - first]
        else:
            torch.index_select(loop.y, 0, self.before[first:], out=out[first:])
        if loop.resets is not None and loop.reset_h is not None:
            out[loop.resets] = loop.reset_h[self.grid[1][loop.resets]]
        if loop.scale_h is not None:
            out.mul_(loop.scale_h[self.grid[1]])
        return out.sub_(self._of_one_row(out)) if loop.balanced else out

    def differences(self, v: Tensor) -> Tensor:
        """[N, ·], less that of the first row of the same step."""
        return v - self._of_one_row(v)

    def _of_one_row(self, v: Tensor) -> Tensor:
        return v[self.starts[self.grid[0]]]

    def beside(self, loop: Loop, x: Tensor, out: Tensor) -> None:
        """That and x, side by side."""
        self.entered(loop, out[:, : loop.outputs])
        out[:, loop.outputs :] = x

    def times_entered(self, d: Tensor, loop: Loop) -> Tensor:
        """[G, P]: the derivative of the weights of h, from that of the product."""
        several = (self.given is not None, loop.resets is not None, loop.scale_h is not None, loop.balanced)
        if not self.whole or any(several):
            return d.t() @ self.entered(loop, torch.empty_like(loop.y))
        found = d[: self.batch].t() @ loop.h0
        return found if self.steps == 1 else found.addmm_(d[self.batch :].t(), loop.y[: d.shape[0] - self.batch])


def as_packed(r: Run) -> Packed:
    """The rows of a run that came packed."""
    assert r.counts is not None
    check_counts(r.counts, r.batch, len(r.x))
    return Packed(None, r.steps, r.batch, r.reverse, r.counts)


def check_counts(counts: Tensor, batch: int, total: int) -> None:
    """An error where each step cannot have so many of packed rows: a loop would read what is not there."""
    if counts.dtype != torch.int64:
        raise ValueError(f"input.batch_sizes: expected torch.int64, got {counts.dtype}")
    each = counts.tolist()
    if sum(each) != total or each != sorted(each, reverse=True) or each[0] != batch or each[-1] < 0:
        raise ValueError(
            f"input.batch_sizes: expected numbers that go down from {batch}, the batch, and add up to {total}, "
            f"the rows of input.data, got {each}"
        )


def places(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Step and row of every one of packed rows, of which each step has so many."""
    t = torch.repeat_interleave(torch.arange(counts.shape[0], device=counts.device), counts, output_size=total)
    return t, torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[t]


def lengths_of(counts: Tensor, batch: int) -> Tensor:
    """[B]: the lengths of packed rows, longest first, of which each step has so many.

    A row is there while a step has more rows than come before it. Looked up, since `repeat_interleave` and a comparison
    of all with all wake every thread of a CPU for these few numbers.
    """
    return torch.searchsorted(-counts, -torch.arange(batch, device=counts.device))


def copied(v: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of its own, in a type."""
    return v.clone() if v.dtype == dtype else v.to(dtype)


@lru_cache(64)
def _same(count: int, value: int) -> Tensor:
    """The same number many times, which nobody writes to."""
    return torch.full((count,), value, device="cpu")


@lru_cache(64)
def _multiples(count: int, of: int) -> Tensor:
    """0, `of`, twice `of` and so on, which nobody writes to."""
    return torch.arange(count, device="cpu") * of
