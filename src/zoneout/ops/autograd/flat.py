"""Convert a run to plain settings and lists of tensors, and back.

Autograd, compilers and exporters can hold this form. Every tensor has a name (see `run.py`), so
nothing depends on its position in a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...definition import MOST_STATES, Definition, read
from ...draws import Draw
from ...norm import Moments, StepNorm
from ...streams import MASKS, STREAMS, Rule
from ..run import Run, Weights, several

_WEIGHTS = ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr")
_SCALES = ("scale_x", "scale_h", "scale_c", "shift_c")
_STATES = tuple(f"state{k}" for k in range(MOST_STATES))
_CONSTANTS = ("examples", "lengths", "resets", "counts")
_STREAMS, _MASKS = tuple(STREAMS), tuple(MASKS)
_BY = ("previous", "zero", "scaled zero", "added")
_OVER = ("", "units", "examples")


class Settings(NamedTuple):
    """All of a run except its tensors."""

    cell: Definition
    hidden: int
    names: tuple[str, ...]  # names of the tensors that have a gradient
    constants: tuple[str, ...]  # names of the tensors that have no gradient
    draws: tuple[tuple[Rule, int], ...]  # the rule and plane of each draw
    over: str  # what the norm averages over; "": no norm
    eps: float
    first_step: int
    reverse: bool
    return_states: bool
    recompute: bool


class Flat(NamedTuple):
    """A run as settings and lists of tensors."""

    settings: Settings
    tensors: list[Tensor]
    constants: list[Tensor]


def differentiable(r: Run) -> dict[str, Tensor]:
    """Return the tensors of a run that have a gradient, by name."""
    values: dict[str, Tensor | None] = {"x": r.x, **dict(zip(_STATES, r.states))}
    if r.reset_to:
        values |= several("reset", r.reset_to)
    values |= {name: getattr(r.weights, name) for name in _WEIGHTS}
    if r.weights.parameters:
        values |= several("parameter", r.weights.parameters)
    if r.norm is not None:
        values |= {name: getattr(r.norm, name) for name in _SCALES}
    values["extra"] = r.extra
    if r.draws:
        values |= several("mask", (draw.given for draw in r.draws))
    return {name: value for name, value in values.items() if value is not None}


def undifferentiable(r: Run) -> dict[str, Tensor]:
    """Return the tensors of a run that have no gradient, by name."""
    values: dict[str, Tensor | None] = {name: getattr(r, name) for name in _CONSTANTS}
    for k, draw in enumerate(r.draws):
        values |= {f"rate{k}": draw.rate, f"seed{k}": draw.seed}
    if r.norm is not None and r.norm.given is not None:
        values |= several("given", r.norm.given)
    return {name: value for name, value in values.items() if value is not None}


def flatten(r: Run) -> Flat:
    """Return a run as settings and lists of tensors."""
    tensors, constants = differentiable(r), undifferentiable(r)
    over, eps = ("", 0.0) if r.norm is None else (r.norm.over, r.norm.eps)
    rules = tuple((draw.rule, draw.plane) for draw in r.draws)
    settings = Settings(
        r.cell, r.hidden, tuple(tensors), tuple(constants), rules, over, eps,
        r.first_step, r.reverse, r.return_states, r.recompute,
    )  # fmt: skip
    return Flat(settings, list(tensors.values()), list(constants.values()))


def unflatten(settings: Settings, tensors: Sequence[Any], constants: Sequence[Any]) -> Run:
    """Return the run of a `Flat`; the tensors may be replaced by others."""
    of = dict(zip(settings.names, tensors, strict=True))
    also = dict(zip(settings.constants, constants, strict=True))
    draws = [
        Draw(rule, also[f"rate{k}"], also.get(f"seed{k}"), plane, of.get(f"mask{k}"))
        for k, (rule, plane) in enumerate(settings.draws)
    ]
    norm = None
    if settings.over:
        given = _all(also, "given")
        scales: dict[str, Any] = {name: of.get(name) for name in _SCALES}
        norm = StepNorm(
            settings.over, settings.eps, **scales, given=Moments(*given) if given else None
        )
    matrices: dict[str, Any] = {name: of.get(name) for name in _WEIGHTS}
    weights = Weights(**matrices, parameters=_all(of, "parameter"))
    return Run(
        settings.cell,
        settings.hidden,
        of["x"],
        _all(of, "state"),
        weights,
        tuple(draws),
        also["examples"],
        settings.first_step,
        norm,
        also.get("lengths"),
        also.get("resets"),
        _all(of, "reset"),
        settings.reverse,
        settings.return_states,
        also.get("counts"),
        settings.recompute,
        of.get("extra"),
    )


def _all(named: dict[str, Any], name: str) -> tuple[Any, ...]:
    """Return the values of a field that holds several tensors."""
    values: list[Any] = []
    while (value := named.get(f"{name}{len(values)}")) is not None:
        values.append(value)
    return tuple(values)


# --- for the operator, which takes strings and numbers --------------------------------------------


Encoded = tuple[str, str, list[int], float]


def encode(settings: Settings) -> Encoded:
    """Return settings as the cell's text, the tensors' names, integers, and the norm's eps."""
    s = settings
    codes = [
        s.hidden,
        s.first_step,
        int(s.reverse),
        int(s.return_states),
        int(s.recompute),
        _OVER.index(s.over),
    ]
    for rule, plane in s.draws:
        codes += [
            _STREAMS.index(rule.stream),
            _BY.index(rule.by),
            _MASKS.index(rule.mask),
            int(rule.holds_gate),
            plane,
        ]
    return s.cell.text, f"{' '.join(s.names)}|{' '.join(s.constants)}", codes, s.eps


def decode(cell: str, names: str, codes: Sequence[int], eps: float) -> Settings:
    """Return the settings from the result of `encode`."""
    tensors, _, constants = names.partition("|")
    hidden, first_step, reverse, return_states, recompute, over, *rest = codes
    draws = []
    for stream, by, mask, holds, plane in zip(*[iter(rest)] * 5, strict=True):
        draws.append((Rule(_STREAMS[stream], _BY[by], _MASKS[mask], "", bool(holds)), plane))
    return Settings(
        read(cell), hidden, tuple(tensors.split(" ")), tuple(constants.split(" ")), tuple(draws),
        _OVER[over], eps, first_step, bool(reverse), bool(return_states), bool(recompute),
    )  # fmt: skip
