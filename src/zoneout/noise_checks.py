"""What callers pass as noise: one or several noises, or something that is none."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .definition import Definition
from .noise import CLASSES, Noise, Swapout, WeightDrop, Zoneout, in_code, shown_entry
from .rates import is_zero
from .streams import DEPTH, STATE_STREAMS, STREAMS, state_groups, streams_of

_NAMES = {re.sub(r"(?<!^)([A-Z])", r"_\1", kind.__name__).lower(): kind for kind in CLASSES}
_NAMES |= {"zoneout_rate": Zoneout, "zoneout_prob": Zoneout, "weight_dropout": WeightDrop}


def check_options(options: Mapping[str, Any], call: Any, cell: Definition | None) -> None:
    """Raise if one of the options of a constructor is the name of a method, and is not in `call`.

    >>> check_options({"zoneout": 0.1}, lambda size: ..., None)
    Traceback (most recent call last):
        ...
    TypeError: zoneout: expected it in noise=, got zoneout=0.1; try noise=zo.Zoneout(cell=0.1,
        hidden=0.1), or only one of them
    """
    for name in options.keys() & _NAMES.keys():
        known = inspect.signature(call).parameters.values()
        if any(one.name == name or one.kind is one.VAR_KEYWORD for one in known):
            continue  # a user's subclass has such an argument
        value = options[name]
        keras = f"; what Keras calls so is zo.VariationalDropout(hidden={in_code(value)})"
        raise TypeError(
            f"{name}: expected it in noise=, got {name}={in_code(value)}; try "
            f"noise={_with_rate(_NAMES[name], value, cell)}"
            + (keras if name == "recurrent_dropout" else "")
        )


def _no_noise_error(value: Any) -> TypeError:
    """Return the error for something in `noise=` that is no noise, with what may be meant."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    got = str(value) if number else type(value).__name__
    if isinstance(value, type) and issubclass(value, Noise):
        got = f"the class {value.__name__}"
    meant = _with_rate(Zoneout, value if number and 0 <= value <= 1 else 0.1)
    return TypeError(
        f"noise: expected {', '.join(kind.__name__ for kind in CLASSES)}, a list of them or None, "
        f"got {got}; try {meant}"
    )


def _with_rate(kind: type[Noise], rate: Any, cell: Definition | None = None) -> str:
    """Return a noise as it is written in code, with one rate for all that a cell has."""
    has = [*STREAMS, *STATE_STREAMS] if cell is None else streams_of(cell)
    fields = [field for field, of in kind.fields.items() if of in has and of not in DEPTH]
    # With none that applies: all, and the error of the noise says why.
    fields = fields[:1] if kind is Swapout else fields or [*kind.fields]
    written = ", ".join(f"{field}={in_code(rate)}" for field in fields)
    return f"zo.{kind.__name__}({written})" + ", or only one of them" * (len(fields) > 1)


# --- combining methods ----------------------------------------------------------------------------


def as_noises(noise: Noise | Iterable[Noise] | None) -> tuple[Noise, ...]:
    """Return the noises as a tuple; raise unless each class and each stream occurs only once.

    What rates in `states` belong to is known with a cell only: see `check_fits`.
    """
    listed: Any = (noise,) if isinstance(noise, Noise) or not isinstance(noise, Iterable) else noise
    noises: tuple[Noise, ...] = () if noise is None else tuple(listed)
    for index, one in enumerate(noises):
        if not isinstance(one, Noise):
            raise _no_noise_error(one)
        if any(type(one) is type(other) for other in noises[:index]):
            raise ValueError(
                f"noise: {type(one).__name__} is there twice, expected each method once"
            )
    check_claims(noises)
    return noises


def check_claims(noises: tuple[Noise, ...], cell: Definition | None = None) -> None:
    """Raise if two noises replace the same stream; with a cell, rates in `states` count too."""
    claimed: dict[str, str] = {}
    for one in noises:
        for entry in one.field_entries() if cell is None else one.entries(cell):
            if is_zero(entry.rate):
                continue
            stream = _SAME.get(entry.stream, entry.stream)
            written = f"{type(one).__name__}({shown_entry(one, entry.field, entry.state)})"
            if stream in claimed:
                groups = {} if cell is None else state_groups(cell)
                named = stream in groups
                what = f"state {groups[stream][0]}" if named else f"{stream} state"
                raise ValueError(
                    f"noise: both {claimed[stream]} and {written} replace the {what}, "
                    "expected one method for each state"
                )
            claimed[stream] = written


# Two methods for the same factors of a product.
_SAME = {"fast_input": "input", "fast_hidden": "variational_hidden"}
_SAME |= {"untied_input": "input", "untied_hidden": "variational_hidden"}
