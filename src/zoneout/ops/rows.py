"""How the rows of a batch are packed for the loop: longest first, ended ones left out, in order of processing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class Rows:
    """The packing of [T, B, ·]; indices are on the device of the rows, `counts` on the CPU."""

    lengths: Tensor | None  # [B], as the caller has them
    steps: int
    batch: int
    reverse: bool

    @cached_property
    def order(self) -> Tensor | None:
        return None if self.lengths is None else self.lengths.argsort(descending=True, stable=True)

    @cached_property
    def sorted_lengths(self) -> Tensor:
        if self.lengths is None or self.order is None:
            return torch.full((self.batch,), self.steps)
        return self.lengths[self.order]

    @cached_property
    def counts(self) -> Tensor:
        if self.lengths is None:
            return torch.full((self.steps,), self.batch)
        at = torch.arange(self.steps)
        return (self.sorted_lengths.cpu() > at[:, None]).sum(1)

    @cached_property
    def grid(self) -> tuple[Tensor, Tensor]:
        """Step and row of every packed row."""
        t = torch.repeat_interleave(torch.arange(self.steps), self.counts)
        start = self.counts.cumsum(0) - self.counts
        return t, torch.arange(len(t)) - start[t]

    @property
    def whole(self) -> bool:
        """Whether the rows are as they came: nothing to pack."""
        return self.lengths is None and not self.reverse

    @cached_property
    def take(self) -> Tensor:
        """[N]: where in the caller's [T · B] rows each packed row is."""
        t, row = self.grid
        if self.reverse:
            t = self.sorted_lengths.cpu()[row] - 1 - t
        return t * self.batch + (row if self.order is None else self.order.cpu()[row])

    def pack(self, v: Tensor) -> Tensor:
        """[T, B, ·] -> [N, ·]."""
        flat = v.reshape(self.steps * self.batch, *v.shape[2:])
        return flat.contiguous() if self.whole else flat.index_select(0, self.take)

    def unpack(self, v: Tensor) -> Tensor:
        """[N, ·] -> [T, B, ·], zero where there is no row."""
        if self.whole:
            return v.view(self.steps, self.batch, v.shape[-1])
        out = v.new_zeros(self.steps * self.batch, v.shape[-1])
        return out.index_copy_(0, self.take, v).view(self.steps, self.batch, v.shape[-1])

    def sort(self, v: Tensor) -> Tensor:
        """Rows of the batch, longest first."""
        return v.contiguous() if self.order is None else v.index_select(0, self.order)

    def unsort(self, v: Tensor) -> Tensor:
        return v if self.order is None else torch.empty_like(v).index_copy_(0, self.order, v)

    def final(self, v: Tensor, initial: Tensor) -> Tensor:
        """The last state of each sequence, in the caller's order; the initial one of a sequence of length 0."""
        if self.order is None:
            return v[len(v) - self.batch :].clone()
        ends = (self.sorted_lengths - 1).clamp(min=0)
        last = (self.counts.cumsum(0) - self.counts)[ends] + torch.arange(self.batch)
        if len(v) == 0:
            return self.unsort(initial.clone())
        chosen = v.index_select(0, last.clamp(max=len(v) - 1))
        return self.unsort(torch.where(self.sorted_lengths[:, None] > 0, chosen, initial))

    def cuts(self, resets: Tensor | None) -> Tensor | None:
        """[N]: whether the state goes back to the initial one before each packed row."""
        if resets is None:
            return None
        if not self.reverse:
            return self.pack(resets)
        below = torch.cat((resets[1:], torch.zeros_like(resets[:1])))  # the cut above a step, met on the way down
        t, _ = self.grid
        return self.pack(below) & (t > 0)

    def before(self, states: Tensor, initial: Tensor, reset: Tensor | None, cuts: Tensor | None) -> Tensor:
        """[N, ·]: the state that each packed row had before."""
        t, row = self.grid
        start = self.counts.cumsum(0) - self.counts
        index = torch.where(t > 0, self.batch + start[(t - 1).clamp(min=0)] + row, row)
        if cuts is None or reset is None:
            return torch.cat((initial, states)).index_select(0, index)
        index = torch.where(cuts, len(states) + self.batch + row, index)
        return torch.cat((initial, states, reset)).index_select(0, index)
