"""One operator, "run this cell over time", and its backends.

`run` takes everything that one layer and direction needs for one pass over a sequence and gives it to a backend. The
operator knows no modules, the modules know no kernels. `reference` is the truth that every other backend is held to;
the others go through the operator `zoneout::run`, with a loop over time made for their device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from . import operator, reference
from .interface import TOLERANCES, Result, Run, Weights

__all__ = ["BACKENDS", "TOLERANCES", "Result", "Run", "Weights", "check_backend", "run"]

BACKENDS: dict[str, Callable[[Run], Result]] = {"reference": reference.run, "cpu": operator.run}


def check_backend(backend: str | None) -> None:
    """An error where the name is not that of a backend."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)} or None, got {backend!r}")


def run(what: Run, backend: str | None = None) -> Result:
    """Run a cell over time, with the backend asked for or, where the input's device has none, the reference."""
    kind = what.x.device.type
    if backend is None:
        backend = kind if kind in BACKENDS else "reference"
    known = torch.amp.is_autocast_available(kind)
    with torch.autocast(kind, enabled=False) if known and torch.is_autocast_enabled(kind) else nullcontext():
        return BACKENDS[backend](what)
