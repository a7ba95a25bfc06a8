"""A single command as a program of its own, which needs only torch, numpy and safetensors.

$ python -m zoneout.paper.reproduce char-ptb zoneout unregularised --seeds 3 --precision bf16
$ python -m zoneout.paper.gradients gradient-flow
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from .. import console, disk
from ..data.datasets import DataError
from ..disk import RunError
from ..training.exit_codes import code_of
from . import options


def run(kind: type[Any], arguments: Sequence[str] | None = None) -> int:
    """Run a command, print its error if it raises one, and return the exit code."""
    name = kind.__name__.lower()
    args = sys.argv[1:] if arguments is None else arguments
    with console.ready():
        try:
            code: int = options.read(kind, f"python -m zoneout.paper.{name}", args)()
            return code
        except (RunError, OSError, ValueError, DataError) as error:
            console.say(f"{name}: {disk.in_words(error)}")
            return code_of(error)
