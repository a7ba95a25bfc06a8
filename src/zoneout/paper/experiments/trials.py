"""The trials of a sweep: which runs it has, and the state of each run, read from its folder."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from .. import console, disk
from ..disk import RunError
from ..training import config as configs
from ..training import runs
from ..training.config import Config
from ..training.measures import figure_of, measure_in
from ..training.runs import ANYHOW, LENGTH

State: TypeAlias = Literal["missing", "begun", "finished", "stopped", "diverged", "failed"]

NAMES = tuple(configs.names())
PATHS = ("data.name", "data.valid", "data.test")  # fields that may be the path of a file
INTERRUPTED = "interrupted"
MOST = 100_000  # runs in a sweep, at most


# --- the trials of a grid -------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, for a search; with `log`, drawn on a logarithmic scale."""

    low: float
    high: float
    log: bool = False


@dataclass(frozen=True)
class Trial:
    """A run of a sweep: its config, and the names of the fields that the sweep varies."""

    config: Config
    fields: tuple[str, ...]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The values of these fields, by name."""
        plain = configs.to_json(self.config)
        return {name: configs.at(plain, name) for name in self.fields}

    @cached_property
    def digest(self) -> str:
        """The digest of all fields that identify the run.

        Runs with equal digests are equal, except that one may be longer.
        """
        length = (
            ()
            if self.config.schedule.kind == "cosine"
            else tuple(n for n in LENGTH if n not in self.fields)
        )
        own = {
            n: v for n, v in configs.identity(self.config).items() if n not in (*ANYHOW, *length)
        }
        page = json.dumps(own, sort_keys=True)
        return hashlib.sha256(page.encode()).hexdigest()[:8]

    @cached_property
    def name(self) -> str:
        """The name of the run's folder.

        >>> Trial(configs.change(Config(), {"zoneout.cell": 0.5}), ("zoneout.cell", "seed")).name
        'zoneout.cell=0.5,seed=1-...'
        """
        short = {n: Path(v).name if v and n in PATHS else v for n, v in self.settings.items()}
        text = ",".join(f"{name}={spelled(value)}" for name, value in short.items())
        return f"{re.sub(r'[^A-Za-z0-9._=,+-]', '_', text)[:120]}-{self.digest}"


def axes_of(grid: Sequence[str]) -> dict[str, list[Any] | Range]:
    """Parse the --grid options: each is a field with its values, or with a range for a search.

    >>> axes_of(["zoneout.cell=0,0.5", "model.cell=lstm,gru", "optimizer.lr=0.0001..0.01,log"])
    {'zoneout.cell': ['0', '0.5'], 'model.cell': ['lstm', 'gru'],
     'optimizer.lr': Range(low=0.0001, high=0.01, log=True)}
    """
    axes: dict[str, list[Any] | Range] = {}
    for text in grid:
        name, equals, values = text.partition("=")
        name = name.replace("-", "_")
        if not equals or not values:
            raise ValueError(
                "--grid: expected a field and its values, as in zoneout.cell=0,0.1,0.5, got "
                f"{text!r}"
            )
        if name in axes:
            raise ValueError(f"--grid: {name} is there twice; give all of its values in one --grid")
        if name == "seed":
            raise ValueError(
                "--grid: seeds are not part of the grid; --seeds sets the number of seeds for each "
                "point of the grid"
            )
        number = r"[-+0-9.eE]+?"
        span = re.fullmatch(rf"({number})\.\.({number})(,log)?", values)
        axes[name] = _range(text, *span.groups()) if span else _values(values)
    return axes


def _range(text: str, low: str, high: str, log: str | None) -> Range:
    try:
        span = Range(float(low), float(high), bool(log))
    except ValueError:
        raise ValueError(
            f"--grid: expected a range of two numbers, as in zoneout.cell=0..0.5, got {text!r}"
        ) from None
    if not -math.inf < span.low < span.high < math.inf or (log and span.low <= 0):
        raise ValueError(
            f"--grid: expected a range from low to high{', above 0' if log else ''}, got {text!r}"
        )
    return span


def _values(text: str) -> list[Any]:
    # A value may be a list: optimizer.betas=[0.9,0.99],[0.5,0.9].
    with contextlib.suppress(ValueError):
        return [v if isinstance(v, str) else json.dumps(v) for v in json.loads(f"[{text}]")]
    return text.split(",")


def trial_of(base: Config, settings: Mapping[str, Any]) -> Trial:
    """Return the trial of the base config with some fields replaced.

    A string is parsed as the type of its field.
    """
    try:
        config = configs.change(base, dict(settings))
    except ValueError as error:
        raise ValueError(f"--grid {error}") from None
    return Trial(config, tuple(sorted({*settings, "seed"}, key=NAMES.index)))


def grid_of(base: Config, axes: Mapping[str, list[Any] | Range], seeds: int = 1) -> list[Trial]:
    """Return a trial for every combination of values and seeds.

    There are `seeds` seeds, which count up from the seed of the base config.

    >>> [t.settings for t in grid_of(Config(), {"zoneout.cell": ["0", "0.5"]}, 2)][1:3]
    [{'zoneout.cell': 0.0, 'seed': 2}, {'zoneout.cell': 0.5, 'seed': 1}]
    """
    if seeds < 1:
        raise ValueError(f"--seeds: expected 1 or more, got {seeds}")
    for name, values in axes.items():
        if isinstance(values, Range):
            raise ValueError(
                f"--grid: {name} is a range, which only a search can draw from; add --search optuna"
            )
    if (count := seeds * math.prod(map(len, axes.values()))) > MOST:  # type: ignore[arg-type]
        raise ValueError(f"--grid, --seeds: expected at most {MOST:,} runs, got {count:,}")
    points = itertools.product(*axes.values())  # type: ignore[arg-type]
    every = [dict(zip(axes, point)) for point in points]
    trials = [
        trial_of(base, {**point, "seed": base.seed + k}) for point in every for k in range(seeds)
    ]
    return list({trial.name: trial for trial in trials}.values())  # a repeated value counts once


def part_of(trials: Sequence[Trial], part: str) -> list[Trial]:
    """Return share K of N of the trials, for N machines that each run one share.

    >>> len(part_of(grid_of(Config(), {}, 10), "2/3"))
    3
    """
    found = re.fullmatch(r"(\d+)/(\d+)", part)
    k, n = map(int, found.groups()) if found else (0, 0)
    if not 1 <= k <= n:
        raise ValueError(f"--part: expected K/N with K from 1 to N, as in 3/10, got {part!r}")
    return list(trials[k - 1 :: n])


# --- the state of the trials ----------------------------------------------------------------------


def folders(trials: Sequence[Trial], out: Path) -> dict[str, Path]:
    """Return the folder of every trial by name; the same run of another sweep is reused."""
    existing = (
        {p.name.rpartition("-")[2]: p for p in sorted(out.iterdir()) if p.is_dir()}
        if out.is_dir()
        else {}
    )
    return {trial.name: existing.get(trial.digest, out / trial.name) for trial in trials}


def state_of(trial: Trial, folder: Path, *, scheduled: bool = False) -> State:
    """Return the state of a trial.

    A trial that a scheduler stopped counts as stopped only if the sweep has a scheduler
    (`scheduled`); otherwise it is continued.
    """
    if not (folder / "config.json").exists():
        return "missing"
    other = [n for n in configs.changed(trial.config, runs.read_config(folder)) if n not in ANYHOW]
    if other:
        if set(other) <= set(LENGTH):
            runs.check_length(folder, trial.config)
            return "begun"  # the run is to be made longer
        raise RunError(
            f"{other[0]}: expected the value of the run in {folder}; choose another folder with "
            "--out"
        )
    if (folder / "summary.json").exists():
        return "finished"
    if (folder / "ended.json").exists():
        state: State = read_ended(folder)["state"]
        return state if state == "diverged" or scheduled else "begun"
    return "begun"


def read_ended(folder: Path) -> dict[str, Any]:
    """Read why a trial ended without a summary."""
    path = folder / "ended.json"
    try:
        ended = disk.read_json(path)
        disk.check_fields(ended, {"state": "text", "why": "text"})
        if ended["state"] not in ("stopped", "diverged"):
            raise ValueError(
                f"state: expected stopped or diverged, got {console.shown(ended['state'])}"
            )
        return ended
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} cannot be read: {disk.reason(error)}; delete it to continue the trial"
        ) from None


def known_trials(base: Config, fields: Sequence[str], out: Path) -> list[Trial]:
    """Return the trials of earlier searches.

    These are the runs in `out` that differ from the base only in these fields and the seed.
    """
    trials = []
    for folder in sorted(out.iterdir()) if out.is_dir() else ():
        if (folder / "config.json").exists():
            theirs = configs.to_json(runs.read_config(folder))
            trial = trial_of(base, {name: configs.at(theirs, name) for name in (*fields, "seed")})
            if folder.name.endswith(f"-{trial.digest}"):
                trials.append(trial)
    return trials


@dataclass(frozen=True)
class Row:
    """The state and the results of a trial, for the table."""

    name: str
    folder: str
    settings: dict[str, Any]
    state: State
    measure: str = ""
    valid: float | None = None  # the best validation so far
    test: float | None = None
    update: int = 0  # of the best validation
    updates: int = 0  # so far
    epoch: float = 0.0
    seconds: float | None = None
    why: str = ""


def row_of(trial: Trial, folder: Path, why: str = "", *, scheduled: bool = False) -> Row:
    """Read the row of a trial from its folder; `why` is the error message of its run, if any."""
    state = state_of(trial, folder, scheduled=scheduled)
    name, settings = trial.name, trial.settings
    if why and why != INTERRUPTED and state in ("missing", "begun"):
        state = "failed"
    if state == "missing" or not (folder / "metrics.jsonl").exists():
        return Row(name, str(folder), settings, state, why=why)
    if (folder / "ended.json").exists() and state in ("stopped", "diverged"):
        why = read_ended(folder)["why"]
    lines = runs.read_metrics(folder)
    best = next(
        (line for line in reversed(lines) if line["kind"] == "valid" and line["best"]), None
    )
    measure = measure_in(best or {}) or ""
    test = next((line for line in reversed(lines) if line["kind"] == "test"), None)
    summary = runs.read_summary(folder) if state == "finished" else None
    seconds = summary["seconds"] if summary else None
    return Row(
        name,
        str(folder),
        settings,
        state,
        measure,
        best and best[measure],
        test and test[measure],
        best["update"] if best else 0,
        lines[-1]["update"] if lines else 0,
        lines[-1]["epoch"] if lines else 0.0,
        seconds,
        why,
    )


def outcome(row: Row) -> str:
    """Describe how a trial ended, in a few words."""
    values = [
        f"{kind} {figure_of(v, row.measure)}"
        for kind in ("valid", "test")
        if (v := getattr(row, kind)) is not None
    ]
    return ", ".join([row.state, *values])


def spelled(value: Any) -> str:
    """Format a value as --grid accepts it."""
    return value if isinstance(value, str) else json.dumps(value)
