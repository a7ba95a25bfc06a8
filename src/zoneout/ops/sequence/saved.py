"""The results of a pass over time, and the inputs of its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...norm import Moments
from ..cuda.pointwise.rows import Padded
from ..run import OF_OUTPUTS, Result, Run
from .rows import Packed


class Saved(NamedTuple):
    """The values that a forward pass computes: its results, and those for the backward pass."""

    y: Tensor  # [T, B, outputs], in the layout of x
    final: tuple[Tensor, ...]  # the states after the last step of every row
    states: tuple[
        Tensor, ...
    ]  # [T, B, H] each: the states other than h, in the precision of states
    gates: Tensor | None = None  # [N, G]; None if steps are recomputed, like all fields below
    hats: Tensor | None = None  # norm: [N, G]
    slots: tuple[Tensor | None, ...] = ()  # [N, H] each, or [N, parts · H]: `stored_slots`
    moments: Moments | None = None  # of a norm
    rows: Packed | Padded | None = None  # the row layout; None: to be computed again

    def to_list(self) -> list[Tensor]:
        """Return all tensors in a list; `from_list` is the inverse."""
        return [self.y, *self.final, *self.for_backward()[1:]]

    def for_backward(self) -> list[Tensor]:
        """Return the tensors that the backward pass needs.

        These are all except the final states, which belong to the caller.
        """
        listed = [self.y, *self.states, self.gates, self.hats, *self.slots, *(self.moments or ())]
        return [v for v in listed if v is not None]

    @staticmethod
    def from_list(
        r: Run, tensors: Sequence[Tensor], final: bool = True, rows: Packed | Padded | None = None
    ) -> Saved:
        """Return the results of a run from a list, with or without the final states."""
        values, stored = iter(tensors), not r.recompute
        y = next(values)
        ends = tuple(next(values) for _ in r.states) if final else ()
        states = tuple(next(values) for _ in r.states[1:]) if stored or r.return_states else ()
        if not stored:
            return Saved(y, ends, states, moments=moments_of(list(values)))
        gates, hats = next(values), next(values) if r.norm is not None else None
        slots = tuple(next(values) if has else None for has in stored_slots(r))
        return Saved(y, ends, states, gates, hats, slots, moments_of(list(values)), rows)


def moments_of(found: Sequence[Tensor]) -> Moments | None:
    return Moments(*found) if found else None


class Gradients(NamedTuple):
    """The gradients of a run's results; None means zero."""

    y: Tensor | None
    final: Sequence[Tensor | None]
    states: Sequence[Tensor | None]  # of the states other than h at every step

    @staticmethod
    def of(r: Run, each: Sequence[Tensor | None]) -> Gradients:
        """Return the gradients from a list."""
        count = len(r.states)
        return Gradients(each[0], each[1 : 1 + count], each[1 + count : 2 * count])


class BackwardInputs(NamedTuple):
    """The inputs of a backward pass."""

    r: Run
    saved: Saved
    d: Gradients
    needs: frozenset[str]  # names of the tensors whose gradient is needed, as in `flat`


def stored_slots(r: Run) -> list[int]:
    """Return the width of each slot of the cell in units: 0 if it has no tensor of its own.

    A norm stores h·Wh of every gate anyway. The results of products inside the step follow.
    """
    layout = r.cell.storage
    return [int(r.norm is None or gate < 0) for gate in layout.slots] + [*layout.products]


def reached(r: Run, d: Gradients, needs: frozenset[str]) -> frozenset[str]:
    """Return the tensors of `needs` that have a path from the gradients `d`.

    Without a path the gradient is None, as in torch.nn: the h of a single step does not enter its
    c.
    """
    only_others = r.steps == 1 and d.y is None and d.final[0] is None and r.cell.shows_only_h
    return needs - {*OF_OUTPUTS} if only_others else needs


def result(saved: Saved, r: Run) -> Result:
    """Return the result of a run from the values of a pass.

    States over time are cast to the dtype of the outputs.
    """
    states = saved.states if r.return_states else ()
    moments = saved.moments if gives_moments(r) else None
    return Result(saved.y, saved.final, tuple(v.to(saved.y.dtype) for v in states), moments)


def gives_moments(r: Run) -> bool:
    """Return True if a run returns the moments of a batch norm."""
    return r.norm is not None and r.norm.over == "examples" and r.norm.given is None
