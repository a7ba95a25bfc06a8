"""One step of any cell with its noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ..definition import Definition
from ..definition.graph import Value
from ..definition.operations import also, less, mix


class Keep(NamedTuple):
    """The units to replace in one step: bool masks, or rates (evaluation). States are named as in
    the definition.

    A group of states is named after its first one.
    """

    zone: Mapping[str, Tensor] = {}  # the state keeps its previous value
    zero: Mapping[str, Tensor] = {}  # the candidate becomes zero
    update: Tensor | None = None  # the update becomes zero
    drop: Mapping[str, Tensor] = {}  # the new value is left out
    add: Mapping[str, Tensor] = {}  # the previous value is added


NOTHING = Keep()


def zone(new: Tensor, old: Tensor, keep: Tensor | None) -> Tensor:
    """Return d ⊙ old + (1 − d) ⊙ new, where d is the mask or rate `keep`; `new` if `keep` is
    None.
    """
    return new if keep is None else mix(new, old, keep)


def drop(new: Tensor, zero: Tensor | None) -> Tensor:
    """Return (1 − d) ⊙ new, where d is the mask or rate `zero`; `new` if `zero` is None."""
    return new if zero is None else less(new, zero)


def same(x: Tensor) -> Tensor:
    """Return `x`."""
    return x


class Held(NamedTuple):
    """The gate of the step before, for a step that may hold it; None at the first step."""

    gate: Tensor | None
    cut: Tensor | None = None  # [B, 1] bool: rows that were reset hold nothing


def step(
    definition: Definition,
    x: Tensor,  # [B, gates · H]
    r: Tensor | None,  # [B, gates · H]
    states: Sequence[Tensor],
    parameters: Sequence[Tensor] = (),
    keep: Keep = NOTHING,
    *,
    held: Held | None = None,
    expose: Callable[[Tensor], Tensor] = same,
    project: Callable[[Tensor], Tensor] | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """Compute one step of a cell with its noise.

    Args:
        definition: the cell.
        x, r: the products of the input and of h with the weights, gates side by side; r is None if
            h meets no matrix.
        states: the states before the step; the first is h.
        parameters: the cell's own parameters, [H] each, or a matrix of `zo.product`.
        keep: the units to replace.
        held: the gate that a unit shows where its update was dropped; None holds nothing.
        expose: normalises what the cell shows of c (`zo.shown`).
        project: the projection W_hr of the candidate h; None if there is none.

    Returns:
        The new states, and the gate that the next step may hold (None if nothing is held).
    """
    gate: Tensor | None = None
    h, *_ = definition.states

    def set_zero(v: Tensor, state: Value) -> Tensor:
        if state == h and project is not None:  # it becomes zero after its projection
            return v
        return drop(v, keep.zero.get(definition.group_of(str(state))))

    def hold(own: Tensor, _: Value) -> Tensor:
        nonlocal gate
        if held is None:
            return own
        gate = own
        if held.gate is None:
            return own
        before = held.gate if held.cut is None else mix(held.gate, own, held.cut)
        return zone(own, before, keep.update)

    marks = {
        "candidate": set_zero,
        "update": lambda v, _: drop(v, keep.update),
        "shown": lambda v, _: expose(v),
        "held": hold,
    }
    gates = [_split(definition, v) for v in (x, r) if v is not None]
    leaves = definition.leaves(*gates, *states, *parameters)
    new = definition.evaluate(leaves, marks)
    if project is not None:
        new[0] = drop(project(new[0]), keep.zero.get(h))

    def carried(state: str, value: Tensor, old: Tensor) -> Tensor:
        group = definition.group_of(state)
        # A state that is computed from parameters alone has no rows yet.
        value = zone(drop(value.expand_as(old), keep.drop.get(group)), old, keep.zone.get(group))
        share = keep.add.get(group)
        return value if share is None else also(value, old, share)

    return [carried(*each) for each in zip(definition.states, new, states)], gate


def _split(definition: Definition, v: Tensor) -> tuple[Tensor, ...]:
    """Return the gates of a product."""
    return (v,) if definition.gates == 1 else v.chunk(definition.gates, dim=-1)
