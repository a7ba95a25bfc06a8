"""What the library says of a noise, in the words of a config: its fields in place of arguments.

A layer names a noise as it stands in code, `Zoneout(cell=0.5)`. The same rate is the field
`zoneout.cell` of a config, and the option `--zoneout.cell` of a command.
"""

from __future__ import annotations

import re

from . import config as configs

_NOISE = r"(?P<{0}>[A-Z]\w+)\((?P<{0}_field>\w+)=[^()]*\)"
_SAID = re.compile(
    rf"(?:noise: )?(?P<both>both )?{_NOISE.format('one')}(?: and {_NOISE.format('other')})?:? "
    rf"(?P<rest>.+)",
    re.DOTALL,
)


def in_fields(message: str) -> str:
    """Return a message of the library with the fields of a config at its start, if it is of noises.

    >>> in_fields("noise: Zoneout(cell=0.5) does not apply, a GRU has no cell; expected cell to be "
    ...           "left out")
    'zoneout.cell: does not apply, a GRU has no cell; leave it out'
    """
    said = _SAID.fullmatch(message)
    if said is None:
        return message
    fields = [_field(said[which], said[f"{which}_field"]) for which in ("one", "other")]
    if fields[0] is None or (said["other"] and fields[1] is None):
        return message
    rest = re.sub(rf"expected '?{said['one_field']}'? to be left out", "leave it out", said["rest"])
    return f"{', '.join(filter(None, fields))}: {said['both'] or ''}{rest}"


def _field(kind: str | None, argument: str | None) -> str | None:
    """Return the field of a config that holds an argument of a noise, or None.

    >>> _field("StateDropout", "cell"), _field("WeightDrop", "rate"), _field("Swapout", "at_eval")
    ('state_dropout.cell', 'weight_drop', 'evaluation.at_eval')
    """
    group = re.sub(r"(?<!^)([A-Z])", r"_\1", kind or "").lower()
    places = (f"{group}.{argument}", group, f"evaluation.{argument}")
    known = configs.names()
    return next((place for place in places if place in known), None)
