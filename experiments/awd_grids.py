"""The grids of rates of docs/past-the-paper.md, where only torch, numpy and safetensors are.

    python experiments/awd_grids.py words         # also words-only, characters
    python experiments/awd_grids.py words DIR     # with the data in DIR
    python experiments/awd_grids.py words --minutes 9

It runs the plan's `zoneout sweep` command whose --out ends in that name, and prints the validation
scores, the best first. After the minutes it stops with a checkpoint and exit code 130. The same
command goes on where an interrupted one stopped.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

from zoneout.paper.experiments.recipes import RECIPES
from zoneout.paper.experiments.sweep import sweep
from zoneout.paper.experiments.trials import INTERRUPTED
from zoneout.paper.training import exit_codes
from zoneout.paper.training.config import Config, change

PLAN = Path(__file__).resolve().parents[1] / "docs" / "past-the-paper.md"


class Sweep(NamedTuple):
    """A sweep of the plan."""

    config: Config
    grid: list[str]
    out: Path


def planned(name: str) -> Sweep:
    """Return the plan's sweep whose --out ends in this name."""
    commands = PLAN.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    for words in map(shlex.split, filter(lambda line: line.startswith("zoneout sweep"), commands)):
        settings: dict[str, Any] = {}
        grid, options = list[str](), iter(words[3:])
        for option in options:
            field = option.removeprefix("--").replace("-", "_")
            value: Any = True if field == "evaluation.skip_test" else next(options)
            if field == "grid":
                grid.append(value)
            else:
                settings[field] = value
        if (out := Path(settings.pop("out"))).name == f"awd-{name}":
            return Sweep(change(RECIPES[words[2]].make(), settings), grid, out)
    raise ValueError(f"name: expected that of a grid in {PLAN.name}, got {name!r}")


def main(arguments: list[str]) -> int:
    """Run a grid, print its scores, and return the exit code of `zoneout sweep`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", help="words, words-only or characters")
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--minutes", type=float, default=math.inf)
    given = parser.parse_args(arguments)
    config, grid, out = planned(given.name)
    rows = sweep(config, grid, 1, out, data=given.data, minutes=given.minutes)
    for row in sorted(rows, key=lambda row: math.inf if row.valid is None else row.valid):
        print(f"{row.name}: {row.valid} at update {row.update} of {row.updates}; {row.state}")
    if any(row.why == INTERRUPTED for row in rows):
        return exit_codes.INTERRUPTED
    return exit_codes.FAILED if any(row.state == "failed" for row in rows) else exit_codes.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
