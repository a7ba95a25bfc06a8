"""How the rows of a batch lie for the loop.

`Packed`: longest first, ended ones left out, in order of processing; a loop that walks over rows does nothing for
sequences that have ended. `Padded`: as the caller has them; a loop that does all rows at once skips those that have
ended, and nobody waits to learn how long they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .loop import Loop


@dataclass
class Packed:
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
            return _same(self.batch, self.steps)
        return self.lengths[self.order]

    @cached_property
    def counts(self) -> Tensor:
        if self.lengths is None:
            return _same(self.steps, self.batch)
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

    def inputs(self, x: Tensor) -> Tensor:
        """[T, B, ·] -> [N, ·], for the input."""
        return self.pack(x)

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
            return v[v.shape[0] - self.batch :]
        ends = (self.sorted_lengths - 1).clamp(min=0)
        last = (self.counts.cumsum(0) - self.counts)[ends] + torch.arange(self.batch)
        if len(v) == 0:
            return self.unsort(initial)
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

    def entered(self, loop: Loop) -> Tensor:
        """[N, P]: h as it entered the gates at every row."""
        if self.whole and loop.resets is None:
            h_in = torch.cat((loop.h0, loop.y[: loop.y.shape[0] - self.batch]))
        else:
            h_in = self._before(loop.y, loop.h0, loop.reset_h, loop.resets)
        return h_in if loop.scale_h is None else h_in * loop.scale_h[self.grid[1]]

    def times_entered(self, d: Tensor, loop: Loop) -> Tensor:
        """[G, P]: the derivative of the weights of h, from that of the product."""
        if not self.whole or loop.resets is not None or loop.scale_h is not None:
            return d.t() @ self.entered(loop)
        found = d[: self.batch].t() @ loop.h0
        return found if self.steps == 1 else found.addmm_(d[self.batch :].t(), loop.y[: d.shape[0] - self.batch])

    def _before(self, states: Tensor, initial: Tensor, reset: Tensor | None, cuts: Tensor | None) -> Tensor:
        """[N, ·]: the state that each packed row had before."""
        t, row = self.grid
        start = self.counts.cumsum(0) - self.counts
        index = torch.where(t > 0, self.batch + start[(t - 1).clamp(min=0)] + row, row)
        if cuts is None or reset is None:
            return torch.cat((initial, states)).index_select(0, index)
        index = torch.where(cuts, len(states) + self.batch + row, index)
        return torch.cat((initial, states, reset)).index_select(0, index)


@lru_cache(64)
def _same(count: int, value: int) -> Tensor:
    """The same number many times, which nobody writes to."""
    return torch.full((count,), value)


@dataclass
class Padded:
    """The rows of [T, B, ·] left where they are: a loop of this layout looks at lengths and direction itself."""

    lengths: Tensor | None  # [B], on the device of the rows
    steps: int
    batch: int
    reverse: bool

    counts = None
    whole = True

    @property
    def sorted_lengths(self) -> Tensor | None:
        return self.lengths

    @cached_property
    def _at(self) -> Tensor:
        assert self.lengths is not None
        return torch.arange(self.steps, device=self.lengths.device)[:, None]

    def inputs(self, x: Tensor) -> Tensor:
        """[T, B, ·] -> [T · B, ·], zero past the ends, whatever stands in the padding."""
        if self.lengths is not None:
            x = torch.where((self._at < self.lengths)[..., None], x, 0)
        return self.pack(x)

    def pack(self, v: Tensor) -> Tensor:
        """[T, B, ·] -> [T · B, ·]."""
        return v.reshape(self.steps * self.batch, *v.shape[2:]).contiguous()

    def unpack(self, v: Tensor) -> Tensor:
        return v.view(self.steps, self.batch, v.shape[-1])

    def sort(self, v: Tensor) -> Tensor:
        return v.contiguous()

    def unsort(self, v: Tensor) -> Tensor:
        return v

    def final(self, v: Tensor, initial: Tensor) -> Tensor:
        """The last state of each sequence; the initial one of a sequence of length 0."""
        v = self.unpack(v)
        if self.lengths is None:
            return v[0 if self.reverse else -1]
        ends = torch.zeros_like(self.lengths) if self.reverse else (self.lengths - 1).clamp(min=0)
        chosen = v[ends, torch.arange(self.batch, device=v.device)]
        return torch.where(self.lengths[:, None] > 0, chosen, initial)

    def cuts(self, resets: Tensor | None) -> Tensor | None:
        return None if resets is None else resets.contiguous()

    def entered(self, loop: Loop) -> Tensor:
        """[T · B, P]: h as it entered the gates at every row."""
        y, none = self.unpack(loop.y), loop.h0[None]
        h_in = torch.cat((y[1:], none) if self.reverse else (none, y[:-1]))
        first = None if self.lengths is None or not self.reverse else (self._at == self.lengths - 1)[..., None]
        if first is not None:
            h_in = torch.where(first, none, h_in)
        if loop.resets is not None and loop.reset_h is not None:
            cuts = loop.resets[..., None]
            if self.reverse:
                cuts = torch.cat((cuts[1:], torch.zeros_like(cuts[:1])))
                cuts = cuts if first is None else cuts & ~first
            h_in = torch.where(cuts, loop.reset_h, h_in)
        return self.pack(h_in if loop.scale_h is None else h_in * loop.scale_h)

    def times_entered(self, d: Tensor, loop: Loop) -> Tensor:
        """[G, P]: the derivative of the weights of h, from that of the product."""
        several = (self.reverse and self.lengths is not None, loop.resets is not None, loop.scale_h is not None)
        if any(several):
            return d.t() @ self.entered(loop)
        edge = d.shape[0] - self.batch
        first, later, earlier = (
            (d[edge:], d[:edge], loop.y[self.batch :])
            if self.reverse
            else (d[: self.batch], d[self.batch :], loop.y[:edge])
        )
        found = first.t() @ loop.h0
        return found if self.steps == 1 else found.addmm_(later.t(), earlier)
