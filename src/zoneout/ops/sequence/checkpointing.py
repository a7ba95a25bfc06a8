"""A pass in pieces of a few steps, to limit the memory that the backward pass needs.

What the backward pass needs of every step is then never in memory all at once. Without gradients
nothing is stored (`run`). With gradients (`recompute`) the states before every piece are stored,
and the backward pass runs each piece again. Masks are functions of their coordinates, so the
results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..run import Result, Run, several
from . import passes
from .prepare import LOOPS, all_wide, state_type, wide, wide_weights
from .saved import BackwardInputs, Gradients, Saved, gives_moments, result

LEAST = 8  # minimum steps of a piece: the preparation they share is then a small part of the cost
FEW = 8  # pieces of a pass that is recomputed


def run(*runs: Run) -> list[Result]:
    """Run over time without a backward pass, in pieces.

    `GATES_AT_ONCE` of the device limits the number of steps of a piece.
    """
    if all(r.steps <= _most(r) or not _divisible(r) for r in runs):
        return [result(saved, r) for saved, r in zip(passes.forward(*runs), runs)]
    return [result(forward(r, _most(r)).saved, r) for r in runs]


class Passed(NamedTuple):
    """The results of a pass in pieces, and the states before each piece in processing order."""

    saved: Saved  # only the results
    begins: list[tuple[Tensor, ...]]


def forward(r: Run, steps: int | None = None) -> Passed:
    """Run over time, `steps` at a time; by default few enough to save memory in backward."""
    steps = _steps_to_recompute(r) if steps is None else steps
    dtype = r.h0.dtype
    if steps >= r.steps:
        (saved,) = passes.forward(r)
        return Passed(results_of(saved, r), [r.states])
    y = r.h0.new_empty(r.steps, *r.h0.shape)
    wanted = r.states[1:] if r.return_states else ()
    every = tuple(v.new_empty(r.steps, *v.shape, dtype=state_type(dtype)) for v in wanted)
    r = _prepare(r)
    states, begins = r.states, []
    for at in _cuts(r, steps):
        begins.append(states)
        piece = _piece(r, at, states)
        (saved,) = passes.forward(piece)
        y[at] = saved.y
        states = _precise_final(saved, piece)
        for of_run, of_piece in zip(every, saved.states):
            of_run[at] = of_piece
        del saved  # free the memory before the next piece allocates as much
    return Passed(Saved(y, tuple(v.to(dtype) for v in states), every), begins)


def results_of(saved: Saved, r: Run) -> Saved:
    """Return only the results of a run, from all that a pass computes."""
    moments = saved.moments if gives_moments(r) else None
    return Saved(saved.y, saved.final, saved.states if r.return_states else (), moments=moments)


def backward(
    r: Run, begins: Sequence[tuple[Tensor, ...]], d: Gradients, needs: frozenset[str]
) -> dict[str, Tensor]:
    """Return the gradients, as `passes.backward` does; each piece is run forwards again."""
    if len(begins) <= 1:
        return passes.backward(BackwardInputs(r, passes.forward(r)[0], d, needs))[0]
    narrow, final = r.h0.dtype, d.final
    by_step = {name: v for name, v in _by_step(r).items() if name in needs}
    gradients_by_step = {
        name: torch.empty_like(v, memory_format=torch.contiguous_format)
        for name, v in by_step.items()
    }
    total: dict[str, Tensor] = {}
    ready, of_states = _prepare(r), frozenset(several("state", r.states))
    for k, at in reversed([*enumerate(_cuts(r, _steps_to_recompute(r)))]):
        piece = _piece(ready, at, begins[k])
        of_piece = Gradients(
            None if d.y is None else d.y[at],
            final,
            [None if v is None else v[at] for v in d.states],
        )
        job = BackwardInputs(
            piece, passes.forward(piece)[0], of_piece, needs | of_states if k else needs
        )
        (gradients,) = passes.precise_gradients(job)
        final = [gradients.pop(f"state{n}", None) for n in range(len(r.states))]
        for name, value in gradients_by_step.items():
            value[at] = gradients.pop(name)
        for name, value in gradients.items():  # many terms: summed in the precision of states
            total[name] = total[name].add_(value) if name in total else _wide(value)
    total |= {
        name: v for name, v in several("state", final).items() if v is not None and name in needs
    }
    return gradients_by_step | {name: v.to(narrow) for name, v in total.items()}


def _by_step(r: Run) -> dict[str, Tensor]:
    """Return the tensors of a run that have values for each step, by name."""
    masks = several("mask", (draw.given for draw in r.draws))
    tensors = {"x": r.x, "extra": r.extra, **masks}
    return {name: v for name, v in tensors.items() if v is not None}


def _wide(v: Tensor) -> Tensor:
    converted = wide(v)
    assert converted is not None
    return converted


def backward_anew(r: Run, d: Gradients, needs: frozenset[str]) -> dict[str, Tensor]:
    """Return the gradients if the states before each piece were not stored either.

    An extra forward pass computes them.
    """
    r = r._replace(return_states=False)
    return backward(r, () if _steps_to_recompute(r) >= r.steps else forward(r).begins, d, needs)


# --- pieces ---------------------------------------------------------------------------------------


def _most(r: Run) -> int:
    """Return the maximum number of steps of a piece, from the device's `GATES_AT_ONCE`."""
    return max(LEAST, LOOPS[r.x.device.type].GATES_AT_ONCE // max(1, r.batch * r.width))


def _steps_to_recompute(r: Run) -> int:
    """Return the number of steps that are recomputed at once.

    Return all steps if the pass has less than twice as many rows as the weights have columns. Every
    piece adds a term to the weight gradients. These terms would then take more memory than the
    pieces save.
    """
    columns = r.weights.w_ih.shape[1] + (0 if r.weights.w_hh is None else r.weights.w_hh.shape[1])
    few = not _divisible(r) or r.steps * r.batch < 2 * columns
    return r.steps if few else max(LEAST, min(_most(r), -(-r.steps // FEW)))


def _divisible(r: Run) -> bool:
    """Return True if a step depends on the others only through the states.

    This is False in four cases: a batch norm has moments of every step; packed rows of different
    steps have no fixed stride; in a reversed run a reset belongs to the step above; a held gate is
    not part of the states.
    """
    by_units = r.norm is None or r.norm.over == "units"
    holds = any(draw.rule.holds_gate for draw in r.draws)
    return by_units and not holds and r.counts is None and not (r.reverse and r.resets is not None)


def _cuts(r: Run, steps: int) -> Iterator[slice]:
    """Yield the pieces, in processing order."""
    begins = range(0, r.steps, steps)
    return (slice(begin, begin + steps) for begin in (reversed(begins) if r.reverse else begins))


def _prepare(r: Run) -> Run:
    """Return a run prepared once for all pieces.

    The states also keep their precision between pieces.
    """
    w, states, reset_to = r.weights, r.states, r.reset_to
    if LOOPS[r.x.device.type].IN_FLOAT32:
        w, states, reset_to = wide_weights(w), all_wide(states), all_wide(reset_to)
    else:
        states, reset_to = ((*v[:1], *all_wide(v[1:])) for v in (states, reset_to))
    if not r.x.is_floating_point():
        w = w._replace(w_ih=w.w_ih.t().contiguous().t())  # table of rows, indexed by id
    return r._replace(weights=w, states=states, reset_to=reset_to)


def _piece(r: Run, at: slice, states: tuple[Tensor, ...]) -> Run:
    """Return the run of one piece, starting from the given states."""
    x = r.x[at]
    return r._replace(
        x=x.to(states[0].dtype) if x.is_floating_point() else x,
        states=states,
        first_step=r.first_step + at.start,
        lengths=None if r.lengths is None else (r.lengths - at.start).clamp(0, len(x)),
        resets=None if r.resets is None else r.resets[at],
        draws=tuple(
            draw if draw.given is None else draw._replace(given=draw.given[at]) for draw in r.draws
        ),
        extra=None if r.extra is None else r.extra[at],
    )


def _precise_final(saved: Saved, piece: Run) -> tuple[Tensor, ...]:
    """Return the states after a piece; those other than h in the precision of states."""
    pairs = [
        (every.flatten(0, 1), initial)
        for last, every, initial in zip(saved.final[1:], saved.states, piece.states[1:])
        if last.dtype != every.dtype
    ]
    if not pairs:
        return saved.final
    assert saved.rows is not None
    return saved.final[0], *saved.rows.final(pairs, pairs[0][0].dtype)
