"""The autograd node of a run in plain eager mode; otherwise the operator is used.

Under a compiler or transform, the operator provides the node. The node here avoids the dispatcher,
which costs a small layer as much time as its work. It can also hold several runs, those of a
layer's directions, whose loops then run concurrently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...torch_state import no_gradient_needed, plain_eager
from .. import plan
from ..memory import are_memory
from ..plan import Kind, planned
from ..run import Result, Run
from ..sequence import checkpointing, passes
from ..sequence.prepare import LOOPS
from ..sequence.saved import (
    BackwardInputs,
    Gradients,
    Saved,
    gives_moments,
    moments_of,
    reached,
    result,
)
from . import operator
from .flat import Flat, Settings, encode, flatten, unflatten
from .operator import call_backward, no_forward_mode
from .second import gradients_with_graph

T = TypeVar("T")


def run(runs: Sequence[Run]) -> list[Result]:
    """Run over time; concurrently and as one node if the device gains by that."""
    device = LOOPS[runs[0].x.device.type]
    for r in runs:
        device.check(r)
    if not plain_eager():
        return [operator.run(r) for r in runs]
    flats = [flatten(r) for r in runs]
    if not all(are_memory(flat.tensors) and are_memory(flat.constants) for flat in flats):
        return [operator.run(r) for r in runs]
    if len(runs) > 1 and not runs[0].recompute and device.side_by_side(runs):
        return _Eager.run(runs, flats)
    return [result for r, flat in zip(runs, flats) for result in _Eager.run((r,), (flat,))]


def can_repeat(runs: Sequence[Run], backend: str | None) -> bool:
    """Return True if runs like these of one layer, in plain eager mode, go by a plan each."""
    kind = runs[0].x.device.type
    if kind not in plan.DEVICES or backend not in (None, kind):
        return False
    device = LOOPS[kind]
    together = len(runs) > 1 and device.side_by_side(runs)
    return not together and all(map(device.supports, runs))


def settings_of(r: Run) -> Settings:
    """Return the settings of a run, with a first step of 0."""
    return flatten(r).settings._replace(first_step=0)


class Found(NamedTuple):
    """The plan of a run for given tensors."""

    run: Callable[..., Any]
    at: Sequence[int]  # the addresses of tensors and constants
    tensors: Sequence[Tensor]
    constants: Sequence[Tensor]
    alone: bool  # no gradient is needed


def find(number: int, tensors: Sequence[Tensor], constants: Sequence[Tensor]) -> Found | None:
    """Return the plan of a run whose settings have this number (`plan.number_of`), if any.

    A plan exists only for shapes, types and devices that passed all checks. The caller has seen
    that torch is in plain eager mode without autocast, and that the device is one of plans.
    """
    given = (*tensors, *constants)
    if not are_memory(given):
        return None
    alone = no_gradient_needed(tensors)
    device = LOOPS[tensors[0].device.type].settings()
    found = plan.find(Kind("results" if alone else "forward", (number,), device, ()), given)
    return None if found is None else Found(*found, tensors, constants, alone)


def repeat(settings: Settings, found: Found, first_step: int) -> Sequence[Tensor]:
    """Return y and the final states of a run by its plan.

    `settings` are those of an earlier run with a first step of 0, which had no norm and returned no
    other states.
    """
    run, at, tensors, constants, alone = found
    given = (*tensors, *constants)
    if alone:
        (done,) = run(given, at, first_step)
        return done.y, *done.final
    settings = settings._replace(first_step=first_step) if first_step else settings
    work = _Work((settings,), (constants,), lambda: run(given, at, first_step))
    return _Eager.apply(work, *tensors)


_CHANGED = (
    "the outputs, input, resets or weights of a zoneout layer have been changed in place since its "
    "call, and its backward pass needs them as they were: write y = y + x for y += x, and "
    "inplace=False."
)


class _Part(NamedTuple):
    """The part of a node that belongs to one run, and its positions in the node's lists."""

    settings: Settings  # without tensors: torch saves those, and detects in-place changes
    rows: Any  # the layout of the rows
    tensors: slice  # of the node's inputs, and of its saved tensors
    constants: slice  # of its saved tensors
    saved: slice  # of its saved tensors
    outputs: slice  # of its outputs


class _Work(NamedTuple):
    """What a node computes besides its tensors."""

    settings: Sequence[Settings]  # of each run
    constants: Sequence[Sequence[Tensor]]  # of each run
    # Returns the results of each run, its tensors for the backward pass, and its row layout.
    passed: Callable[[], Sequence[tuple[Saved, list[Tensor], Any]]]


class _Eager(torch.autograd.Function):
    """The autograd node of one or several runs."""

    @staticmethod
    def run(runs: Sequence[Run], flats: Sequence[Flat]) -> list[Result]:
        tensors = [v for flat in flats for v in flat.tensors]
        if no_gradient_needed(tensors):  # a node is a large part of the cost of a small call
            return _planned("results", *_given(flats), lambda: checkpointing.run(*runs))
        settings, given = _given(flats)
        work = _Work(
            settings,
            [flat.constants for flat in flats],
            lambda: _planned("forward", settings, given, lambda: _passed(runs)),
        )
        outputs, results = iter(_Eager.apply(work, *tensors)), []
        for r in runs:
            y, *final = (next(outputs) for _ in range(1 + len(r.states)))
            states = tuple(next(outputs) for _ in r.states[1:]) if r.return_states else ()
            moments = _seen(r)
            saved = Saved(
                y, tuple(final), states, moments=moments_of([next(outputs) for _ in range(moments)])
            )
            results.append(result(saved, r))
        return results

    @staticmethod
    def forward(ctx: Any, work: _Work, *tensors: Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        outputs: list[Tensor] = []
        moments: list[Tensor] = []
        saved: list[Tensor] = list(tensors)
        ctx.parts = []
        begin = 0
        passed = work.passed()
        for settings, constants, (results, kept, rows) in zip(
            work.settings, work.constants, passed
        ):
            seen = [] if results.moments is None else [v for v in results.moments if v is not None]
            moments += seen
            at, end = len(outputs), begin + len(settings.names)
            middle = len(saved) + len(constants)
            inside = slice(begin, end), slice(len(saved), middle), slice(middle, middle + len(kept))
            saved += [*constants, *kept]
            outputs += [results.y, *results.final, *results.states]
            ctx.parts.append(_Part(settings, rows, *inside, slice(at, len(outputs))))
            outputs += seen
            begin = end
        ctx.mark_non_differentiable(*moments)
        ctx.save_for_backward(*saved)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *d: Any) -> tuple[Any, ...]:
        try:
            values = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise RuntimeError(f"{_CHANGED} (torch: {error})") from error
        needed = ctx.needs_input_grad[1:]
        # A dispatch mode (such as a FLOP counter) must see the operator, not only some of the
        # products inside it.
        if torch._C._len_torch_dispatch_stack():
            return (None, *_by_operator(_jobs(ctx.parts, values, needed, d), d))
        if torch.is_grad_enabled():  # create_graph=True
            return (None, *_with_graph(ctx.parts, values, needed, d))

        def backward(d: Any) -> list[Tensor | None]:
            by = _by_passes if are_memory((*d, *values)) else _by_operator

            def general() -> list[Tensor | None]:
                return by(_jobs(ctx.parts, values, needed, d), d)

            if by is _by_operator:
                return general()
            settings = [part.settings for part in ctx.parts]
            return _planned("backward", settings, (*values, *d), general, needed)

        return (None, *_one_by_one(backward, d))

    jvp = staticmethod(no_forward_mode)


class _Job(NamedTuple):
    """The backward pass of one run of a node."""

    r: Run
    part: _Part
    saved: Sequence[Tensor]
    needs: frozenset[str]


def _jobs(
    parts: Sequence[_Part], values: Sequence[Tensor], needed: Sequence[bool], d: Sequence[Any]
) -> list[_Job]:
    """Return the backward pass of each run, from the node's saved tensors and gradients."""
    jobs = []
    for part in parts:
        r = unflatten(part.settings, values[part.tensors], values[part.constants])
        needs = frozenset(n for n, need in zip(part.settings.names, needed[part.tensors]) if need)
        needs = reached(r, Gradients.of(r, d[part.outputs]), needs)
        jobs.append(_Job(r, part, values[part.saved], needs))
    return jobs


def _seen(r: Run) -> int:
    """Return the number of moments of a run.

    With batch norm these are the moments of x·Wx and h·Wh, and of c if the cell has one.
    """
    if not gives_moments(r):
        return 0
    return 4 if r.norm is None or r.norm.scale_c is None else 6


def _planned(
    name: str,
    settings: Sequence[Settings],
    tensors: Sequence[Tensor | None],
    general: Callable[[], T],
    needed: tuple[bool, ...] = (),
) -> T:
    """Return what `general` computes from the tensors of these runs, by a plan if possible."""
    kind = tensors[0].device.type  # type: ignore[union-attr]
    if kind not in plan.DEVICES or any(_depends_on_values(one, kind) for one in settings):
        return general()
    runs = tuple([plan.number_of(one._replace(first_step=0)) for one in settings])
    what = Kind(name, runs, LOOPS[kind].settings(), needed)
    # A backward pass may run inside autocast, which would round products of a plan.
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        return planned(what, tensors, settings[0].first_step, general)


def _depends_on_values(settings: Settings, kind: str) -> bool:
    """Return True if the CPU reads lengths or counts of a run, so that it cannot have a plan."""
    of = settings.constants
    return "counts" in of or (kind == "cpu" and "lengths" in of)


def _given(flats: Sequence[Flat]) -> tuple[list[Settings], list[Tensor]]:
    """Return the settings and all tensors of runs."""
    tensors = [v for flat in flats for v in (*flat.tensors, *flat.constants)]
    return [flat.settings for flat in flats], tensors


def _passed(runs: Sequence[Run]) -> list[tuple[Saved, list[Tensor], Any]]:
    """Return the results of each run, its tensors for the backward pass, and its row layout."""
    if runs[0].recompute:
        (r,) = runs
        saved, begins = checkpointing.forward(r)
        return [(saved, [v for states in begins for v in states], None)]
    reads = _depends_on_values(flatten(runs[0]).settings, runs[0].x.device.type)
    return [
        (
            checkpointing.results_of(saved, r),
            saved.for_backward(),
            saved.rows if reads else None,  # cheap to make again, and no part of a plan
        )
        for r, saved in zip(runs, passes.forward(*runs))
    ]


def _by_passes(jobs: Sequence[_Job], d: Sequence[Any]) -> list[Tensor | None]:
    """Return the gradients of the inputs of all runs from the gradients of their outputs."""
    if jobs[0].r.recompute:
        (job,) = jobs
        begins = list(zip(*[iter(job.saved)] * len(job.r.states)))
        found = [
            checkpointing.backward(
                job.r, begins, Gradients.of(job.r, d[job.part.outputs]), job.needs
            )
        ]
    else:
        inputs = [
            BackwardInputs(
                r,
                Saved.from_list(r, saved, False, part.rows),
                Gradients.of(r, d[part.outputs]),
                needs,
            )
            for r, part, saved, needs in jobs
        ]
        found = passes.backward(*inputs)
    return [grads.get(name) for job, grads in zip(jobs, found) for name in job.part.settings.names]


def _with_graph(
    parts: Sequence[_Part], values: Sequence[Tensor], needed: Sequence[bool], d: Sequence[Any]
) -> list[Tensor | None]:
    """Return the same gradients as `_by_passes`, so that they can be derived again."""
    kind = values[0].device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        return [
            grad
            for part in parts
            for grad in gradients_with_graph(
                part.settings,
                values[part.tensors],
                values[part.constants],
                needed[part.tensors],
                d[part.outputs],
            )
        ]


def _by_operator(jobs: Sequence[_Job], d: Sequence[Any]) -> list[Tensor | None]:
    """Return the same gradients as `_by_passes`, through the dispatcher."""
    found: list[Tensor | None] = []
    for r, part, saved, needs in jobs:
        names, own = part.settings.names, d[part.outputs]
        flat = flatten(r)
        wanted = [name in needs for name in names]
        grads = [v for v in own if v is not None]
        kept = [] if r.recompute else list(saved)
        given = [v is not None for v in own]
        each = iter(
            call_backward(
                grads, given, kept, wanted, *encode(part.settings), flat.tensors, flat.constants
            )
        )
        found += [next(each) if one else None for one in wanted]
    return found


def _one_by_one(
    backward: Callable[[Any], Sequence[Tensor | None]], d: Sequence[Any]
) -> Sequence[Tensor | None]:
    """Return the gradients for `d`, one batch entry at a time.

    With `is_grads_batched` the tensors of `d` have one more dimension, which torch hides.
    """
    many = [v is not None and torch._C._functorch.is_legacy_batchedtensor(v) for v in d]
    if not any(many):
        return backward(d)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    shown = [torch._remove_batch_dim(v, level, 0, 0) if one else v for v, one in zip(d, many)]
    count = next(len(v) for v, one in zip(shown, many) if one)
    found = [
        backward(tuple(v[k] if one else v for v, one in zip(shown, many))) for k in range(count)
    ]
    return [
        None if parts[0] is None else torch._add_batch_dim(torch.stack(parts), 0, level)
        for parts in zip(*found)
    ]
