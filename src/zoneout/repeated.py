"""Calls of a layer or cell that repeat an earlier one.

The general code of a call checks arguments, collects noise and builds a `Run` for each layer and
direction. What it finds depends on the layer and on the form of the call, not on values. So it is
kept as a `Prepared`, and a later call of the same form only collects its tensors and runs the plans
of `ops/plan.py`. A plan is found by types, shapes, strides and devices. What the general code has
not checked and run before has no plan, and goes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .draws import Draw, example_ids
from .fits import sees_step
from .given import is_given
from .noise import DEPTH
from .ops import Run, Settings, can_repeat, one_step, repeat, settings_of
from .ops.memory import are_memory
from .ops.plan import number_of
from .philox import as_seed, fresh_seed
from .recurrent import OUTSIDE, RecurrentModule, drawn_rules, rate_name, seed_name

if TYPE_CHECKING:
    from .layers import SequenceLayer
    from .step_cells import StepCell


class Part(NamedTuple):
    """One layer and direction: its settings, and where its tensors come from."""

    settings: Settings
    number: int  # of the settings, in plans
    weights: tuple[str, ...]  # parameters, in the order of the settings
    numbers: tuple[str | None, ...]  # rates and static seeds; None: the seed of the call


class Prepared(NamedTuple):
    """A form of call of a layer."""

    parts: tuple[Part, ...]  # layer by layer
    draws: bool  # a call draws a seed
    every_step: bool  # all masks are drawn anew at every step


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
            names[f] if f in names else own[int(f.removeprefix("parameter"))] for f in fields
        ]
        numbers: list[str | None] = []
        for k, draw in enumerate(run.draws):
            numbers.append(rate_name(draw.rule.stream, index))
            if f"seed{k}" in settings.constants:
                static = draw.rule.mask == "static"
                numbers.append(seed_name(draw.rule.stream) if static else None)
        parts.append(Part(settings, number_of(settings), tuple(weights), tuple(numbers)))
    rules = drawn_rules(layer._rules, layer.training)
    draws = between or any(rule.mask != "static" for rule in rules)
    every_step = all(rule.mask != "static" and sees_step(rule) for rule in rules)
    return Prepared(tuple(parts), draws, every_step)


def repeated(
    layer: SequenceLayer, input: Any, hx: Any, seed: int | Tensor | None, first_step: int
) -> tuple[Repeated | None, Tensor | None]:
    """Return the results of a call, or None if the general code has to run, and the seed if drawn.

    The general code must use that seed: a call draws one number from torch's generator. The caller
    has seen that torch is in plain eager mode (`plain_eager`).
    """
    prepared = layer._prepared.get((layer.training, hx is None))
    if prepared is None:
        return None, None
    if type(input) not in _PLAIN or input.dim() != 3 or not input.is_floating_point():
        return None, None
    if type(first_step) is not int:
        return None, None
    x = input.transpose(0, 1) if layer.batch_first else input
    device, parameters, (steps, batch, _) = x.device, layer._parameters, x.shape
    numbers, changing = layer._fixed_on(device)
    limit = 2**32 - steps
    if changing or not 0 <= first_step <= limit or torch.is_autocast_enabled(device.type):
        return None, None
    if steps == 1 and layer.backend is None:  # a step of its own may have another way
        return None, None
    states = _states(layer, hx, batch, x.dtype)
    if states is None:
        return None, None
    key = None
    if seed is not None:
        key = as_seed(seed, device, copy=True)
    elif prepared.draws:
        key = fresh_seed(x)
    rows = example_ids(None, batch, device)
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
            return None, key
        if (found := repeat(part.settings, part.number, tensors, constants, first_step)) is None:
            return None, key
        outputs.append(found[0])
        final.append(tuple(found[1:]))
        if len(outputs) == directions:
            x = outputs[0] if directions == 1 else torch.cat(outputs, dim=-1)
    return Repeated(x, final), key


_PLAIN = {Tensor, Parameter}


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


class PreparedStep(NamedTuple):
    """A form of call of a cell that torch has, on the CPU."""

    step: one_step.Repeatable
    weights: tuple[str, ...]  # parameters in the order of torch's cells
    checked: set[Any]  # shapes and types that the general code has run


def prepare_step(cell: StepCell, draws: Sequence[Draw]) -> PreparedStep | None:
    """Return how to repeat a plain step that had these draws; None if it cannot be."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    step = one_step.repeatable(cell.definition, draws)
    return None if step is None else PreparedStep(step, names if cell.bias else names[:2], set())


def repeated_step(
    cell: StepCell, input: Any, hx: Any, seed: int | Tensor | None, step: int | None
) -> tuple[Sequence[Tensor] | None, Tensor | None]:
    """Return the states after a step, or None if the general code has to run, and a drawn seed.

    The caller has seen that torch is in plain eager mode (`plain_eager`).
    """
    prepared = cell._prepared.get(cell.training)
    if prepared is None or type(input) not in _PLAIN or input.dim() != 2:
        return None, None
    states = hx if len(cell.definition.states) > 1 else (hx,)
    if type(states) not in (tuple, list) or torch.is_autocast_enabled(input.device.type):
        return None, None
    if step is not None and (type(step) is not int or not 0 <= step < 2**32):
        return None, None
    if isinstance(prepared, PreparedStep):
        return _plain_step(cell, prepared, input, states, seed, step)
    return _step_by_plan(cell, prepared, input, states, seed, step)


def _plain_step(
    cell: StepCell,
    prepared: PreparedStep,
    x: Tensor,
    states: Sequence[Tensor],
    seed: int | Tensor | None,
    step: int | None,
) -> tuple[Sequence[Tensor] | None, Tensor | None]:
    """Return the states after a step of torch's cell, as in `repeated_step`."""
    parameters = cell._parameters
    try:
        weights = [parameters[name] for name in prepared.weights]
    except KeyError:  # a parametrisation
        return None, None
    if not are_memory((x, *states, *weights)):
        return None, None
    if form_of(x, states) not in prepared.checked:  # torch's cell checks the weights
        return None, None
    key, rows = None, None
    if prepared.step.drawn:
        if seed is not None and step is None:
            return None, None
        key = fresh_seed(x) if seed is None else as_seed(seed, x.device, copy=True)
        rows = example_ids(None, len(x), x.device)
    return prepared.step.run(x, states, weights, key, rows, step or 0), key


def _step_by_plan(
    cell: StepCell,
    prepared: Prepared,
    x: Tensor,
    states: Sequence[Tensor],
    seed: int | Tensor | None,
    step: int | None,
) -> tuple[Sequence[Tensor] | None, Tensor | None]:
    """Return the states after a step of any cell, as in `repeated_step`."""
    (part,) = prepared.parts
    if (seed is None) != (step is None) or not (prepared.every_step or seed is not None):
        return None, None  # the general code knows what goes together
    numbers, changing = cell._fixed_on(x.device)
    if changing or any(type(v) not in _PLAIN for v in states) or not x.is_floating_point():
        return None, None
    parameters, key = cell._parameters, None
    if seed is not None:
        key = as_seed(seed, x.device, copy=True)
    elif prepared.draws:
        key = fresh_seed(x)
    tensors: list[Any] = [x[None], *states]
    constants: list[Any] = [example_ids(None, len(x), x.device)]
    try:
        tensors += [parameters[name] for name in part.weights]
        constants += [key if name is None else numbers[name] for name in part.numbers]
    except KeyError:  # a parametrisation, or a rate that is gone
        return None, key
    found = repeat(part.settings, part.number, tensors, constants, step or 0)
    return None if found is None else found[1:], key


def form_of(x: Tensor, states: Sequence[Tensor]) -> Any:
    """Return what the checks of a step's input and states depend on."""
    return tuple([(v.shape, v.dtype, v.get_device()) for v in (x, *states)])
