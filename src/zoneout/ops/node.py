"""The node of the graph that a run is: the operator's where somebody is looking on, in plain eager mode one of our own.

Ours goes without the dispatcher, which costs a small layer as much as its work, and may have several runs: those of a
layer's directions, whose loops then go side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..draws import Draw
from ..norm import Moments, StepNorm
from . import operator, passes, pieces
from .interface import Result, Run, Weights
from .memory import are_memory
from .modes import nobody_derives, plain_eager
from .operator import call_backward, differentiable, filled, flatten, no_forward_mode
from .passes import DIFFERENTIABLE, LOOPS, Back, Kept, as_outputs, gives_moments, reached

_COUNT = len(DIFFERENTIABLE)


def run(runs: Sequence[Run]) -> list[Result]:
    """Passes over time; side by side, and as one node, where the device gains by that."""
    device = LOOPS[runs[0].x.device.type]
    for r in runs:
        device.check(r)
    if not plain_eager() or not all(are_memory(_tensors(r)) for r in runs):
        return [operator.run(r) for r in runs]
    if len(runs) > 1 and not runs[0].recompute and device.together(runs):
        return _Eager.run(runs)
    return [result for r in runs for result in _Eager.run((r,))]


def _tensors(r: Run) -> Iterable[Tensor | None]:
    """All tensors of a run."""
    return (*differentiable(r), *_undifferentiable(r))


def _undifferentiable(r: Run) -> list[Tensor | None]:
    """The tensors that have no derivative, as `_with_tensors` takes them."""
    drawn = [value for draw in r.draws for value in (draw.rate, draw.seed)]
    given = () if r.norm is None or r.norm.given is None else r.norm.given
    return [r.examples, r.lengths, r.resets, r.counts, *drawn, *given]


_CHANGED = (
    "the outputs, input, resets or weights of a zoneout layer have been changed in place since its call, and its way "
    "back needs them as they were: write y = y + x for y += x, and inplace=False."
)


class _Part(NamedTuple):
    """What a node has of one run, and where."""

    plain: tuple[Any, ...]
    rows: Any  # how they lay
    inputs: slice  # of what goes into the node, and of what it saves
    kept: slice  # of what it saves: what the pass kept
    rest: slice  # of what it saves: examples, lengths and the like
    outputs: slice  # of what comes out


class _Eager(torch.autograd.Function):
    """The node of one run, or several."""

    @staticmethod
    def run(runs: Sequence[Run]) -> list[Result]:
        tensors = [v for r in runs for v in differentiable(r)]
        if nobody_derives(tensors):  # a node is a good part of what a small call costs
            results = pieces.run(*runs)
            return [result._replace(cells=as_outputs(result.cells, result.y)) for result in results]
        given, results = _Eager.apply(runs, *tensors), []
        for r in runs:
            count = 4 + _seen(r)
            (y, h, c, cells, *moments), given = given[:count], given[count:]
            results.append(Result(y, h, c, as_outputs(cells, y), Moments(*moments) if moments else None))
        return results

    @staticmethod
    def forward(ctx: Any, runs: Sequence[Run], *tensors: Tensor | None) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        outputs: tuple[Any, ...] = ()
        saved = tensors
        moments: list[Tensor] = []
        ctx.parts = []
        for k, (r, (result, kept, rows)) in enumerate(zip(runs, _passed(runs))):
            seen = () if result.moments is None else [v for v in result.moments if v is not None]
            moments += seen
            inputs = slice(_COUNT * k, _COUNT * (k + 1))
            begin, middle, at = len(saved), len(saved) + len(kept), len(outputs)
            saved = (*saved, *kept, *_undifferentiable(r))
            places = (inputs, slice(begin, middle), slice(middle, len(saved)), slice(at, at + 4))
            ctx.parts.append(_Part(_plain(r), rows, *places))
            outputs += (*result[:4], *seen)
        ctx.mark_non_differentiable(*moments)
        ctx.save_for_backward(*saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *d: Any) -> tuple[Any, ...]:
        try:
            values = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise RuntimeError(f"{_CHANGED} (torch: {error})") from error
        needs, backs = ctx.needs_input_grad[1:], []
        for part in ctx.parts:
            r = _with_tensors(part.plain, values[part.inputs], values[part.rest])
            backs.append((r, part, values[part.kept], reached(r.steps, d[part.outputs], needs[part.inputs])))
        # A dispatch mode (a counter) sees the operator, and not half of the products that are in it. Or a second
        # derivative is asked for, which the operator refuses with a sentence.
        if torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
            return (None, *_by_operator(backs, d))
        return (None, *_one_by_one(lambda d: (_way_back if are_memory((*d, *values)) else _by_operator)(backs, d), d))

    jvp = staticmethod(no_forward_mode)


def _seen(r: Run) -> int:
    """How many moments a run gives: with batch norm those of x·Wx and h·Wh, and of c where there is one."""
    return 0 if not gives_moments(r) else 6 if r.cell == "lstm" else 4


def _passed(runs: Sequence[Run]) -> list[tuple[Result, tuple[Tensor | None, ...], Any]]:
    """What each run gives, what its way back needs, and how its rows lay."""
    if runs[0].recompute:
        (r,) = runs
        result, states = pieces.forward(r)
        return [(result, tuple(states), None)]
    return [
        (pieces.result(kept, r), (kept.y, kept.cells, kept.gates, kept.gh, *kept.moments), kept.rows)
        for r, kept in zip(runs, passes.forward(*runs))
    ]


def _way_back(backs: Sequence[tuple[Run, _Part, Any, Any]], d: Sequence[Any]) -> list[Tensor | None]:
    """The derivatives of what all runs took, from those of what they gave."""
    if backs[0][0].recompute:
        ((r, part, states, needs),) = backs
        return pieces.backward(r, states, d[part.outputs], needs)
    due = []
    for r, part, (y, cells, gates, gh, *moments), needs in backs:
        kept = Kept(y, r.h0, None, cells, gates, gh, tuple(moments), part.rows)
        due.append(Back(r, kept, d[part.outputs], needs))
    return [v for found in passes.backward(*due) for v in found]


def _by_operator(backs: Sequence[tuple[Run, _Part, Any, Any]], d: Sequence[Any]) -> list[Tensor | None]:
    """The same through the dispatcher."""
    found: list[Tensor | None] = []
    for r, part, kept, needs in backs:
        there = [v is not None and bool(needed) for v, needed in zip(differentiable(r), needs)]
        grads = call_backward(*d[part.outputs], () if r.recompute else filled(r.h0, *kept), there, *flatten(r))
        found += (grad if one else None for grad, one in zip(grads, there))
    return found


def _one_by_one(backward: Callable[[Any], Sequence[Tensor | None]], d: Sequence[Any]) -> Sequence[Tensor | None]:
    """What comes back for `d`. With `is_grads_batched` its tensors have one dimension more, which does not show."""
    many = [v is not None and torch._C._functorch.is_legacy_batchedtensor(v) for v in d]
    if not any(many):
        return backward(d)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    shown = [torch._remove_batch_dim(v, level, 0, 0) if one else v for v, one in zip(d, many)]
    count = next(len(v) for v, one in zip(shown, many) if one)
    found = [backward(tuple(v[k] if one else v for v, one in zip(shown, many))) for k in range(count)]
    return [None if parts[0] is None else torch._add_batch_dim(torch.stack(parts), 0, level) for parts in zip(*found)]


def _plain(r: Run) -> tuple[Any, ...]:
    """What of a run a node may hold itself; tensors are torch's to keep, which sees when somebody changes them."""
    norm = None if r.norm is None else (r.norm.over, r.norm.eps)
    return r.cell, r.first_step, r.reverse, r.recompute, [(draw.rule, draw.plane) for draw in r.draws], norm


def _with_tensors(plain: tuple[Any, ...], tensors: Sequence[Any], rest: Sequence[Any]) -> Run:
    cell, first_step, reverse, recompute, kinds, norm = plain
    examples, lengths, resets, counts = rest[:4]
    x, h0, c0, reset_h, reset_c, *more = tensors
    n = 4 + 2 * len(kinds)
    drawn, given = rest[4:n], rest[n:]
    draws = tuple(Draw(rule, drawn[2 * k], drawn[2 * k + 1], plane) for k, (rule, plane) in enumerate(kinds))
    if norm is not None:
        norm = StepNorm(*norm, *more[5:])._replace(given=Moments(*given) if given else None)
    return Run(
        cell, x, h0, c0, Weights(*more[:5]), draws, examples, first_step, norm, lengths, resets, reset_h, reset_c,
        reverse, False, counts, recompute,
    )  # fmt: skip
