"""Which noises a cell can have, and what to say of those that do not apply to it."""

from __future__ import annotations

import dataclasses
from typing import Any

from .definition import Definition
from .definition.gaussian import MOST_GATES
from .noise import Entry, Misfit, Noise, misfit_error, no_state, states_of
from .noise_checks import check_claims
from .rates import is_zero
from .streams import DEPTH, MASKS, Rule, state_groups, streams_of


def misfits(
    noise: Noise,
    cell: Definition,
    torch_name: str = "",
    one_step: bool = False,
    told: bool = True,
) -> list[Misfit]:
    """Return the fields of a noise that do not apply to a cell, each with the reason.

    Args:
        noise: the noise.
        cell: the definition of the cell.
        torch_name: torch's name of the cell, such as "LSTM"; "" for a cell that torch does not
            have. A reader knows torch's cells: messages say what they lack.
        one_step: True for a single-step cell.
        told: True if the caller of a single-step cell can pass seed and step to it.
    """
    entries = [*noise.field_entries(), *noise.state_entries(cell)]
    found = [_misfit(noise, entry, cell, torch_name, one_step and not told) for entry in entries]
    wrong = [misfit for misfit in found if misfit is not None]
    for field, stream, rate, _ in noise.field_entries() if one_step else ():
        if stream in DEPTH and not is_zero(rate):
            wrong.append(_left_out(field, "a cell has no layer below it"))
    if getattr(noise, "hold_output_gate", False):
        if "held" not in cell.marks:
            wrong.append(_left_out("hold_output_gate", _no_stream("held", cell, torch_name)))
        elif one_step:
            why = "a cell does not keep the output gate of the previous step"
            wrong.append(_left_out("hold_output_gate", why))
    return wrong


def _left_out(field: str, why: str, state: str = "") -> Misfit:
    """Return a misfit whose remedy is to leave the field out, or the state in `states`."""
    return Misfit(field, why, f"expected {repr(state) if state else field} to be left out", state)


_ONCE = "drawn once for a whole sequence, and the model passes neither seed nor step to a cell"


def _misfit(
    noise: Noise, entry: Entry, cell: Definition, torch_name: str, untold: bool
) -> Misfit | None:
    """Return why a rate does not apply to a cell; None if it applies.

    `untold` is True if a single-step cell is not told seed and step.
    """
    field, stream, rate, state = entry
    name = torch_name or cell.name
    if not stream:
        return no_state(cell, name, state)
    if is_zero(rate):
        return None
    if stream not in streams_of(cell):
        return _left_out(field, _no_stream(stream, cell, torch_name))
    rule = noise.rule(stream)
    if untold and (rule.mask == "static" or not sees_step(rule)):
        return _left_out(field, _ONCE, state)
    group = state_groups(cell).get(stream, ())
    if len(group) > 1 and rule.at_eval == "expectation":
        states = ", ".join(group)
        why = f"the expectation of one mask for the states {states} of {name} is not defined"
        return Misfit(field, why, "try at_eval='sample' or at_eval='off'", state)
    return None


def _no_stream(stream: str, cell: Definition, torch_name: str) -> str:
    """Return a sentence that says that a cell does not have a stream, or a gate to hold."""
    name = torch_name or cell.name
    if stream == "cell":
        return f"a {name} has no cell" if torch_name else states_of(cell, name)
    if stream == "update":
        return (
            f"a plain {name} has no gated update" if torch_name else f"{name} has no zo.update(…)"
        )
    if stream in ("fast_hidden", "untied_hidden") and cell.has_r:
        return f"{name} has more than {MOST_GATES} gates or no dense recurrent matrix"
    if stream == "held":
        return f"a {name} has no output gate" if torch_name else f"{name} has no zo.held(…)"
    return f"{name} has no recurrent weight matrix"


def sees_step(rule: Rule) -> bool:
    """Return True if a rule draws a new mask at every step."""
    return MASKS[rule.mask].step


def check_fits(
    noises: tuple[Noise, ...],
    cell: Definition,
    torch_name: str = "",
    one_step: bool = False,
) -> None:
    """Raise if a noise does not apply to a cell, or if two noises replace one of its states.

    The arguments are those of `misfits`.
    """
    for noise in noises:
        for misfit in misfits(noise, cell, torch_name, one_step):
            raise misfit_error(noise, misfit)
    check_claims(noises, cell)


def restrict(
    noises: tuple[Noise, ...],
    cell: Definition,
    torch_name: str = "",
    one_step: bool = False,
    told: bool = True,
) -> tuple[tuple[Noise, ...], list[str]]:
    """Return the noises without the fields that do not apply, and a phrase for each dropped field.

    The arguments are those of `misfits`.
    """
    kept, dropped = [], []
    for noise in noises:
        wrong = misfits(noise, cell, torch_name, one_step, told)
        for field, why, _, state in wrong:
            what = f"{field}[{state!r}]" if state else field
            dropped.append(f"{type(noise).__name__}'s {what} ({why})")
        if wrong:
            noise = dataclasses.replace(noise, **_without(noise, wrong))
        if noise.rules(cell) or not wrong:
            kept.append(noise)
    return tuple(kept), dropped


def _without(noise: Noise, wrong: list[Misfit]) -> dict[str, Any]:
    """Return new values for the fields that do not apply, which have no effect."""
    changes: dict[str, Any] = {}
    for field, _, _, state in wrong:
        if state:
            rates = changes.get("states", dict(getattr(noise, "states", ())))
            changes["states"] = {other: rate for other, rate in rates.items() if other != state}
        else:
            changes[field] = False if field == "hold_output_gate" else 0.0
    return changes
