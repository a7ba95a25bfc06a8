"""The packed layout of a batch: longest sequence first, without rows of ended sequences.

Rows are in processing order, and ended sequences cost nothing. A GPU uses the caller's layout
(`cuda/pointwise/rows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..backend import Loop
from ..recording import constant
from ..run import Run
from .products import block_products, product


@dataclass
class Packed:
    """The packing of [T, B, ·], or of rows that were already packed; all indices are on the CPU."""

    lengths: Tensor | None  # [B], in the caller's order
    steps: int
    batch: int
    reverse: bool
    given: Tensor | None = None  # [T]: rows of each step, if the input was packed, [N, ·]

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
        """[T]: the first packed row of each step."""
        if self.full:
            return _multiples(self.steps, self.batch)
        return self.counts.cumsum(0) - self.counts

    @cached_property
    def grid(self) -> tuple[Tensor, Tensor]:
        """The step and the batch row of every packed row."""
        if self.full:
            return _step_of_row(self.steps, self.batch), _row_of_row(self.steps, self.batch)
        return places(self.counts, int(self.counts.sum()))

    @cached_property
    def before(self) -> Tensor:
        """[N]: the packed row of the previous step; undefined for rows of the first step."""
        t, row = self.grid
        return self.starts[(t - 1).clamp(min=0)] + row

    @property
    def full(self) -> bool:
        """True if every step has all rows."""
        return self.lengths is None and self.given is None

    @property
    def whole(self) -> bool:
        """True if the rows are already in the caller's layout, so no packing is needed."""
        return self.lengths is None and not self.reverse

    @cached_property
    def take(self) -> Tensor:
        """[N]: the index of each packed row in the caller's rows."""
        if self.full and self.reverse:
            return _backwards(self.steps, self.batch)
        t, row = self.grid
        if self.reverse:
            t = self.sorted_lengths[row] - 1 - t
        if self.given is not None:
            return self.starts[t] + row
        return t * self.batch + (row if self.order is None else self.order[row])

    def inputs(self, x: Tensor) -> Tensor:
        """Return the input packed, [T, B, ·] -> [N, ·]."""
        return self.pack(x)

    def pack(self, v: Tensor) -> Tensor:
        """Return rows packed, [T, B, ·] -> [N, ·]."""
        flat = v if self.given is not None else v.reshape(self.steps * self.batch, *v.shape[2:])
        return flat.contiguous() if self.whole else flat.index_select(0, self.take)

    def unpack(self, v: Tensor) -> Tensor:
        """Return packed rows unpacked, [N, ·] -> [T, B, ·], zero in the padding."""
        if self.given is not None:
            # Reversing twice restores the order.
            return v if self.whole else v.index_select(0, self.take)
        if self.whole:
            return v.view(self.steps, self.batch, v.shape[-1])
        out = v.new_zeros(self.steps * self.batch, v.shape[-1])
        return out.index_copy_(0, self.take, v).view(self.steps, self.batch, v.shape[-1])

    def sort(self, v: Tensor) -> Tensor:
        """Return the rows of the batch, longest first."""
        return v.contiguous() if self.order is None else v.index_select(0, self.order)

    def unsort(self, v: Tensor) -> Tensor:
        return v if self.order is None else torch.empty_like(v).index_copy_(0, self.order, v)

    def final(self, states: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[Tensor]:
        """Return the final state of every row, cast to `dtype`, in new tensors.

        Each state is given by its values at every step and its initial value.
        """
        return [copied(self._last(v, initial), dtype) for v, initial in states]

    def _last(self, v: Tensor, initial: Tensor) -> Tensor:
        """Return the last state of each sequence, in the caller's order.

        A sequence of length 0 has its initial state.
        """
        if self.full:
            return v[v.shape[0] - self.batch :]
        rows = torch.arange(self.batch, device=self.starts.device)
        last = self.starts[(self.sorted_lengths - 1).clamp(min=0)] + rows
        if len(v) == 0:
            return self.unsort(initial)
        chosen = v.index_select(0, last.clamp(max=len(v) - 1))
        return self.unsort(torch.where(self.sorted_lengths[:, None] > 0, chosen, initial))

    def cuts(self, resets: Tensor | None) -> Tensor | None:
        """Return [N]: True if the state is reset before each packed row."""
        if resets is None:
            return None
        cuts = self.pack(resets)
        # Reversed: the cut belongs to the step above.
        return cuts[self.before] & (self.grid[0] > 0) if self.reverse else cuts

    def recurrent_inputs(self, loop: Loop, out: Tensor) -> Tensor:
        """Write h as it entered the gates at every row, [N, P], to `out`, and return it.

        With `balanced`, h of the first row of the same step is subtracted.
        """
        first = self.batch if self.full else int(self.counts[0])
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
        """Return [N, ·] minus the first row of the same step."""
        return v - self._of_one_row(v)

    def _of_one_row(self, v: Tensor) -> Tensor:
        return v[self.starts[self.grid[0]]]

    def concat_h_and_x(self, loop: Loop, x: Tensor, out: Tensor) -> None:
        """Write the recurrent inputs and x to `out`, side by side."""
        self.recurrent_inputs(loop, out[:, : loop.outputs])
        out[:, loop.outputs :] = x

    def grad_w_hh(self, d: Tensor, loop: Loop) -> Tensor:
        """Return the gradient of W_h, [G, P], from the gradient of its product."""
        several = (
            self.given is not None,
            loop.resets is not None,
            loop.scale_h is not None,
            loop.balanced,
        )
        if loop.cell.heads > 1:
            inputs = self.recurrent_inputs(loop, torch.empty_like(loop.y))
            return block_products(d, inputs, loop.cell.gates, loop.cell.heads)
        if not self.whole or any(several):
            return product(d.t(), self.recurrent_inputs(loop, torch.empty_like(loop.y)))
        first_product = product(d[: self.batch].t(), loop.h0)
        if self.steps == 1:
            return first_product
        return product(
            d[self.batch :].t(), loop.y[: d.shape[0] - self.batch], first_product, add=True
        )


def rows_of(lengths: Tensor | None, steps: int, batch: int, reverse: bool) -> Packed:
    """Return the layout of [T, B, ·]; of a shape whose rows stay in place, always the same one."""
    if lengths is None and not reverse:
        return _in_place(steps, batch)
    return Packed(lengths, steps, batch, reverse)


@lru_cache(64)
def _in_place(steps: int, batch: int) -> Packed:
    return Packed(None, steps, batch, False)


def as_packed(r: Run) -> Packed:
    """Return the layout of a run whose rows were already packed."""
    assert r.counts is not None
    check_counts(r.counts, r.batch, len(r.x))
    return Packed(None, r.steps, r.batch, r.reverse, r.counts)


def check_counts(counts: Tensor, batch: int, total: int) -> None:
    """Raise if `counts` does not describe `total` packed rows.

    A loop would otherwise read out of bounds.
    """
    if counts.dtype != torch.int64:
        raise ValueError(f"input.batch_sizes: expected torch.int64, got {counts.dtype}")
    each = counts.tolist()
    if sum(each) != total or each != sorted(each, reverse=True) or each[0] != batch or each[-1] < 0:
        raise ValueError(
            f"input.batch_sizes: expected numbers that go down from {batch}, the batch, and add up "
            f"to {total}, the rows of input.data, got {each}"
        )


def places(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the step and the batch row of every packed row."""
    t = torch.repeat_interleave(
        torch.arange(counts.shape[0], device=counts.device), counts, output_size=total
    )
    return t, torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[t]


def lengths_of(counts: Tensor, batch: int) -> Tensor:
    """Return [B]: the lengths of packed sequences, longest first, from the rows of each step.

    Row b exists as long as a step has more than b rows. The lengths are found by binary search.
    `repeat_interleave`, or a comparison of all with all, would wake every CPU thread for these few
    numbers.
    """
    return torch.searchsorted(-counts, -torch.arange(batch, device=counts.device))


def copied(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a tensor, cast to `dtype`."""
    return v.clone() if v.dtype == dtype else v.to(dtype)


@constant(64)
def _same(count: int, value: int) -> Tensor:
    """Return one number many times; cached, so it must not be written to."""
    return torch.full((count,), value, device="cpu")


@constant(64)
def _multiples(count: int, of: int) -> Tensor:
    """Return 0, `of`, 2 · `of`, …; cached, so it must not be written to."""
    return torch.arange(count, device="cpu") * of


@constant(64)
def _step_of_row(steps: int, batch: int) -> Tensor:
    """Return the step of every row of a full batch; cached, so it must not be written to."""
    return torch.arange(steps, device="cpu").repeat_interleave(batch)


@constant(64)
def _row_of_row(steps: int, batch: int) -> Tensor:
    """Return the batch row of every row of a full batch; cached as well."""
    return torch.arange(batch, device="cpu").repeat(steps)


@constant(64)
def _backwards(steps: int, batch: int) -> Tensor:
    """Return the rows of a full batch from the last step to the first; cached as well."""
    return torch.arange(steps * batch, device="cpu").view(steps, batch).flip(0).flatten()
