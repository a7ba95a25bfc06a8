"""The backends that tests run over; those to come join by being in `BACKENDS`."""

from typing import NamedTuple

import pytest

from zoneout.ops import BACKENDS


class Backend(NamedTuple):
    name: str
    device: str


EVERY = [
    pytest.param(
        Backend(name, device), id=name, marks=[pytest.mark.gpu] if device == "cuda" else []
    )
    for name in BACKENDS
    for device in ["cuda" if name.startswith("cuda") else "cpu"]
]
