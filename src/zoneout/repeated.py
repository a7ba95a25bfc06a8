"""Calls of a layer or cell that repeat an earlier one.

The general code of a call checks arguments, collects noise and builds a `Run` for each layer and
direction. What it finds depends on the layer and on the form of the call, not on values. So it is
kept as a `Prepared`, and a later call of the same form only collects its tensors and runs the plans
of `ops/plan.py`. A plan is found by types, shapes, strides and devices. What the general code has
not checked and run before has no plan, and goes there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .draws import Draw, first_ids
from .fits import sees_step
from .given import is_given
from .noisy import drawn_rules, rate_name, seed_name
from .ops import Run, Settings, can_repeat, find, one_step, repeat, settings_of
from .ops.memory import are_memory
from .ops.plan import number_of
from .philox import as_seed, draw_seed, empty_seed, fresh_seed
from .recurrent import OUTSIDE, WEIGHTS, RecurrentModule
from .streams import DEPTH

if TYPE_CHECKING:
    from .sequence_layer import SequenceLayer
    from .step_cells import StepCell


class Part(NamedTuple):
    """One layer and direction: its settings, and where its tensors come from."""

    settings: Settings
    number: int  # of the settings, in plans
    weights: tuple[str, ...]  # parameters, in the order of the settings
    absent: tuple[str, ...]  # parameters that the call did not have, such as biases
    numbers: tuple[str | None, ...]  # rates and static seeds; None: the seed of the call


class Prepared(NamedTuple):
    """A form of call of a layer."""

    parts: tuple[Part, ...]  # layer by layer
    draws: bool  # a call draws a seed
    every_step: bool  # all masks are drawn anew at every step
    kind: str  # the type of the device


class Repeated(NamedTuple):
    """The results of a repeated call, in the internal layout."""

    y: Tensor
    final: list[tuple[Tensor, ...]]  # of each layer and direction


def prepare(
    layer: RecurrentModule, runs: dict[str, Run], directions: int = 1, between: bool = False
) -> Prepared | None:
    """Return how to repeat the call that made these runs, by suffix; None if it cannot be.

    The call had neither lengths, resets, packed rows, ids, rates nor other states to return.
    `between`: there is dropout between layers.
    """
    if layer._norm is not None or layer.recompute:
        return None
    if any(rule.stream in (*OUTSIDE, *DEPTH) for rule in layer._rules):
        return None
    parts: list[Part] = []
    every = list(runs.values())
    for k in range(0, len(every), directions):
        if not can_repeat(every[k : k + directions], layer.backend):
            return None
    for suffix, run in runs.items():
        if any(is_given(draw.rule) for draw in run.draws):
            return None
        index, settings = len(parts) // directions, settings_of(run)
        names = {field: name for field, name, _ in layer._weight_table[suffix]}
        own = [names[name] for name in layer.definition.parameters]
        fields = settings.names[1 + len(run.states) :]
        weights = [
            names[field] if field in WEIGHTS else own[int(field.removeprefix("parameter"))]
            for field in fields
        ]
        numbers: list[str | None] = []
        for k, draw in enumerate(run.draws):
            numbers.append(rate_name(draw.rule.stream, index))
            if f"seed{k}" in settings.constants:
                static = draw.rule.mask == "static"
                numbers.append(seed_name(draw.rule.stream) if static else None)
        absent = tuple(name for name in names.values() if name not in weights)
        parts.append(Part(settings, number_of(settings), tuple(weights), absent, tuple(numbers)))
    rules = drawn_rules(layer._rules, layer.training)
    draws = between or any(rule.mask != "static" for rule in rules)
    every_step = all(rule.mask != "static" and sees_step(rule) for rule in rules)
    return Prepared(tuple(parts), draws, every_step, every[0].x.device.type)


def repeated(
    layer: SequenceLayer, input: Any, hx: Any, seed: int | Tensor | None, first_step: int
) -> tuple[Repeated | None, Tensor | None]:
    """Return the results of a call, or None if the general code has to run, and the seed if drawn.

    The general code must use that seed: a call draws one number from torch's generator. The caller
    has seen that torch is in plain eager mode (`plain_eager`).
    """
    prepared = layer._prepared.get((layer.training, hx is None))
    if prepared is None or type(first_step) is not int or not _is_usual(input, 3, prepared.kind):
        return None, None
    x = input.transpose(0, 1) if layer.batch_first else input
    device, parameters, (steps, batch, inputs) = x.device, layer._parameters, x.shape
    numbers, changing = layer._fixed_on(device)
    if changing or inputs != layer.input_size or not 0 <= first_step <= 2**32 - steps:
        return None, None
    if steps == 1 and layer.backend is None and prepared.kind == "cpu":  # see `one_step`
        return None, None
    states = _states(layer, hx, batch, x.dtype)
    if states is None:
        return None, None
    given = None if seed is None else as_seed(seed, device, copy=True)
    key = empty_seed(x) if given is None and prepared.draws else given
    drawn: Tensor | None = None  # as soon as the first plan is found, as the general code would
    rows = first_ids(device, batch)
    directions, final = 2 if layer.bidirectional else 1, []
    dropped = layer.training and layer.dropout > 0
    for k, part in enumerate(prepared.parts):
        if k % directions == 0:
            if k and dropped:
                assert key is not None
                x = layer._between_layers(k // directions - 1, x, key, rows, first_step, None)
            outputs: list[Tensor] = []
        tensors: list[Any] = [x, *[v[k] for v in states]]
        constants: list[Any] = [rows]
        try:
            tensors += [parameters[name] for name in part.weights]
            constants += [key if name is None else numbers[name] for name in part.numbers]
        except KeyError:  # a parametrisation, or a rate that is gone
            return None, drawn
        if _has_one(parameters, part.absent):
            return None, drawn
        if (found := find(part.number, tensors, constants)) is None:
            return None, drawn
        if k == 0 and key is not None and given is None:
            drawn = draw_seed(key)
        y, *ends = repeat(part.settings, found, first_step)
        outputs.append(y)
        final.append(tuple(ends))
        if len(outputs) == directions:
            x = outputs[0] if directions == 1 else torch.cat(outputs, dim=-1)
    return Repeated(x, final), drawn


def _has_one(parameters: Mapping[str, Tensor | None], names: Sequence[str]) -> bool:
    """Return True if a parameter with one of these names has come."""
    return any([parameters.get(name) is not None for name in names])


_PLAIN = {Tensor, Parameter}


def _is_usual(x: Any, dims: int, kind: str) -> bool:
    """Return True for a dense tensor of features on a device of this type, without autocast."""
    return (
        type(x) in _PLAIN
        and x.device.type == kind
        and x.layout is torch.strided
        and not x.is_nested
        and x.dim() == dims
        and x.is_floating_point()
        and not torch.is_autocast_enabled(kind)  # known for both types that have plans
    )


def _states(
    layer: SequenceLayer, hx: Any, batch: int, dtype: torch.dtype
) -> Sequence[Tensor] | None:
    """Return the states before the first step; None if the general code has to check them."""
    if hx is None:
        return layer._initial_states(batch, dtype)
    many = len(layer.definition.states)
    states = (hx,) if many == 1 else hx
    if type(states) not in (tuple, list) or len(states) != many:
        return None
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    if any(type(v) not in _PLAIN or v.dim() != 3 or len(v) != count for v in states):
        return None
    return list(states)


# --- single steps ---------------------------------------------------------------------------------


PLAIN = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")  # in the order of torch's cells


class PreparedStep(NamedTuple):
    """A form of call of a cell that torch has, on the CPU."""

    step: one_step.Repeatable
    checked: set[Any]  # shapes and types that the general code has run
    kind: str = "cpu"


def prepare_step(cell: StepCell, draws: Sequence[Draw]) -> PreparedStep | None:
    """Return how to repeat a plain step that had these draws; None if it cannot be."""
    step = one_step.repeatable(cell.definition, draws)
    return None if step is None else PreparedStep(step, set())


def repeated_step(
    cell: StepCell, input: Any, hx: Any, seed: int | Tensor | None, step: int | None
) -> Sequence[Tensor] | None:
    """Return the states after a step, or None if the general code has to run.

    The caller has seen that torch is in plain eager mode (`plain_eager`).
    """
    if type(input) not in _PLAIN or input.dim() != 2:
        return None
    prepared = cell._prepared.get((cell.training, cell._is_small(len(input))))
    if prepared is None or not _is_usual(input, 2, prepared.kind):
        return None
    states = hx if len(cell.definition.states) > 1 else (hx,)
    if type(states) not in (tuple, list) or any(type(v) not in _PLAIN for v in states):
        return None
    if step is not None and (type(step) is not int or not 0 <= step < 2**32):
        return None
    given = None if seed is None else as_seed(seed, input.device, copy=True)
    if isinstance(prepared, PreparedStep):
        return _plain_step(cell, prepared, input, states, given, step)
    return _step_by_plan(cell, prepared, input, states, given, step)


def _plain_step(
    cell: StepCell,
    prepared: PreparedStep,
    x: Tensor,
    states: Sequence[Tensor],
    seed: Tensor | None,
    step: int | None,
) -> Sequence[Tensor] | None:
    """Return the states after a step of torch's cell, as in `repeated_step`."""
    parameters = cell._parameters
    weights = [parameters.get(name) for name in PLAIN]  # None: no bias, or a parametrisation
    if (
        not are_memory((x, *states, *weights))
        or form_of(x, states, weights) not in prepared.checked
    ):
        return None
    rows: Tensor | None = None
    if prepared.step.drawn:
        if seed is not None and step is None:
            return None
        seed = fresh_seed(x) if seed is None else seed
        rows = first_ids(x.device, len(x))
    return prepared.step.run(x, states, weights, seed, rows, step or 0)


def _step_by_plan(
    cell: StepCell,
    prepared: Prepared,
    x: Tensor,
    states: Sequence[Tensor],
    seed: Tensor | None,
    step: int | None,
) -> Sequence[Tensor] | None:
    """Return the states after a step of any cell, as in `repeated_step`."""
    (part,) = prepared.parts
    if (seed is None) != (step is None) or not (prepared.every_step or seed is not None):
        return None  # the general code knows what goes together
    numbers, changing = cell._fixed_on(x.device)
    if changing or x.shape[1] != cell.input_size:
        return None
    parameters = cell._parameters
    key = empty_seed(x) if seed is None and prepared.draws else seed
    tensors: list[Any] = [x[None], *states]
    constants: list[Any] = [first_ids(x.device, len(x))]
    try:
        tensors += [parameters[name] for name in part.weights]
        constants += [key if name is None else numbers[name] for name in part.numbers]
    except KeyError:  # a parametrisation, or a rate that is gone
        return None
    if _has_one(parameters, part.absent):
        return None
    if (found := find(part.number, tensors, constants)) is None:
        return None
    if key is not None and seed is None:
        draw_seed(key)
    return repeat(part.settings, found, step or 0)[1:]


def form_of(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor | None]) -> Any:
    """Return what the checks of a step's tensors depend on."""
    every = (x, *states, *weights)
    return tuple([v if v is None else (v.shape, v.dtype, v.get_device()) for v in every])
