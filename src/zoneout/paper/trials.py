"""The runs of a sweep: which there are, and how it stands with each, as its folder says."""

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

from . import config as configs
from . import disk, runs, streams
from .config import Config
from .disk import RunError
from .measures import figure_of, measure_in
from .runs import ANYHOW, LENGTH

State: TypeAlias = Literal["missing", "begun", "finished", "stopped", "diverged", "failed"]

NAMES = tuple(configs.names())
PATHS = ("data.name", "data.valid", "data.test")  # what may be a file
INTERRUPTED = "interrupted"
MOST = 100_000  # runs of a sweep


# --- what there is to run --------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, for a search; `log` where their orders of magnitude are alike."""

    low: float
    high: float
    log: bool = False


@dataclass(frozen=True)
class Trial:
    """A run of a sweep: its config, and which settings of it the sweep is about."""

    config: Config
    fields: tuple[str, ...]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The values of those settings, by name."""
        plain = configs.to_json(self.config)
        return {name: configs.at(plain, name) for name in self.fields}

    @cached_property
    def digest(self) -> str:
        """Of all that makes the run what it is: equal digests, equal runs, though one may be longer."""
        length = () if self.config.schedule.kind == "cosine" else tuple(n for n in LENGTH if n not in self.fields)
        own = {n: v for n, v in configs.changed(self.config).items() if n not in (*ANYHOW, *length)}
        page = json.dumps(own, sort_keys=True)
        return hashlib.sha256(page.encode()).hexdigest()[:8]

    @cached_property
    def name(self) -> str:
        """The name of its folder.

        >>> Trial(configs.change(Config(), {"zoneout.cell": 0.5}), ("zoneout.cell", "seed")).name
        'zoneout.cell=0.5,seed=1-e5256b2e'
        """
        short = {n: Path(v).name if v and n in PATHS else v for n, v in self.settings.items()}
        said = ",".join(f"{name}={spelled(value)}" for name, value in short.items())
        return f"{re.sub(r'[^A-Za-z0-9._=,+-]', '_', said)[:120]}-{self.digest}"


def axes_of(grid: Sequence[str]) -> dict[str, list[Any] | Range]:
    """What each --grid says: a field and its values, or for a search the range that they come from.

    >>> axes_of(["zoneout.cell=0,0.5", "model.cell=lstm,gru", "optimizer.lr=0.0001..0.01,log"])
    {'zoneout.cell': ['0', '0.5'], 'model.cell': ['lstm', 'gru'],
     'optimizer.lr': Range(low=0.0001, high=0.01, log=True)}
    """
    axes: dict[str, list[Any] | Range] = {}
    for text in grid:
        name, equals, values = text.partition("=")
        name = name.replace("-", "_")
        if not equals or not values:
            raise ValueError(f"--grid: expected a field and its values, as in zoneout.cell=0,0.1,0.5, got {text!r}")
        if name in axes:
            raise ValueError(f"--grid: {name} is there twice; give all of its values at once")
        if name == "seed":
            raise ValueError(
                "--grid: seeds are not part of the grid; --seeds says how many there are for each point of it"
            )
        number = r"[-+0-9.eE]+?"
        span = re.fullmatch(rf"({number})\.\.({number})(,log)?", values)
        axes[name] = _range(text, *span.groups()) if span else _values(values)
    return axes


def _range(text: str, low: str, high: str, log: str | None) -> Range:
    try:
        span = Range(float(low), float(high), bool(log))
    except ValueError:
        raise ValueError(f"--grid: expected a range of two numbers, as in zoneout.cell=0..0.5, got {text!r}") from None
    if not -math.inf < span.low < span.high < math.inf or (log and span.low <= 0):
        raise ValueError(f"--grid: expected a range from low to high{', above 0' if log else ''}, got {text!r}")
    return span


def _values(text: str) -> list[Any]:
    with contextlib.suppress(ValueError):  # lists among them: optimizer.betas=[0.9,0.99],[0.5,0.9]
        return [v if isinstance(v, str) else json.dumps(v) for v in json.loads(f"[{text}]")]
    return text.split(",")


def trial_of(base: Config, settings: Mapping[str, Any]) -> Trial:
    """The base with some settings otherwise; strings are read as their fields' types."""
    config = configs.change(base, dict(settings))  # which says so where there is no such field
    return Trial(config, tuple(sorted({*settings, "seed"}, key=NAMES.index)))


def grid_of(base: Config, axes: Mapping[str, list[Any] | Range], seeds: int = 1) -> list[Trial]:
    """Every combination of the values, with so many seeds each, from the base's on.

    >>> [t.settings for t in grid_of(Config(), {"zoneout.cell": ["0", "0.5"]}, 2)][1:3]
    [{'zoneout.cell': 0.0, 'seed': 2}, {'zoneout.cell': 0.5, 'seed': 1}]
    """
    if seeds < 1:
        raise ValueError(f"--seeds: expected 1 or more, got {seeds}")
    for name, values in axes.items():
        if isinstance(values, Range):
            raise ValueError(f"--grid: {name} is a range, which only a search can draw from; add --search optuna")
    if (count := seeds * math.prod(map(len, axes.values()))) > MOST:  # type: ignore[arg-type]
        raise ValueError(f"--grid, --seeds: expected at most {MOST:,} runs, got {count:,}")
    points = itertools.product(*axes.values())  # type: ignore[arg-type]
    every = [dict(zip(axes, point)) for point in points]
    trials = [trial_of(base, {**point, "seed": base.seed + k}) for point in every for k in range(seeds)]
    return list({trial.name: trial for trial in trials}.values())  # a value that is there twice is one


def part_of(trials: Sequence[Trial], part: str) -> list[Trial]:
    """The share K/N of the trials, for N machines that each take theirs.

    >>> len(part_of(grid_of(Config(), {}, 10), "2/3"))
    3
    """
    found = re.fullmatch(r"(\d+)/(\d+)", part)
    k, n = map(int, found.groups()) if found else (0, 0)
    if not 1 <= k <= n:
        raise ValueError(f"--part: expected K/N with K from 1 to N, as in 3/10, got {part!r}")
    return list(trials[k - 1 :: n])


# --- what there is already -------------------------------------------------------------------------


def folders(trials: Sequence[Trial], out: Path) -> dict[str, Path]:
    """The folder of every trial, by name; one that another sweep made for the same run is used."""
    there = {p.name.rpartition("-")[2]: p for p in sorted(out.iterdir()) if p.is_dir()} if out.is_dir() else {}
    return {trial.name: there.get(trial.digest, out / trial.name) for trial in trials}


def state_of(trial: Trial, folder: Path, *, scheduled: bool = False) -> State:
    """How it stands with a trial. What a scheduler stopped is only ended where there is a scheduler."""
    if not (folder / "config.json").exists():
        return "missing"
    other = [n for n in configs.changed(trial.config, runs.read_config(folder)) if n not in ANYHOW]
    if other:
        if set(other) <= set(LENGTH):
            runs.check_length(folder, trial.config)
            return "begun"  # it is to be longer
        raise RunError(f"{folder} holds another run ({other[0]} differs); choose another folder with --out")
    if (folder / "summary.json").exists():
        return "finished"
    if (folder / "ended.json").exists():
        state: State = read_ended(folder)["state"]
        return state if state == "diverged" or scheduled else "begun"
    return "begun"


def read_ended(folder: Path) -> dict[str, Any]:
    """How a trial ended that did not finish."""
    path = folder / "ended.json"
    try:
        found = disk.read_json(path)
        disk.check_fields(found, {"state": "text", "why": "text"})
        if found["state"] not in ("stopped", "diverged"):
            raise ValueError(f"state: expected stopped or diverged, got {streams.shown(found['state'])}")
        return found
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {disk.reason(error)}; without it the trial goes on") from None


def known_trials(base: Config, fields: Sequence[str], out: Path) -> list[Trial]:
    """The trials of earlier searches: runs in `out` that differ from the base in these fields (and the seed) alone."""
    found = []
    for folder in sorted(out.iterdir()) if out.is_dir() else ():
        if (folder / "config.json").exists():
            theirs = configs.to_json(runs.read_config(folder))
            trial = trial_of(base, {name: configs.at(theirs, name) for name in (*fields, "seed")})
            if folder.name.endswith(f"-{trial.digest}"):
                found.append(trial)
    return found


@dataclass(frozen=True)
class Row:
    """What is known of a trial."""

    name: str
    folder: str
    settings: dict[str, Any]
    state: State
    measure: str = ""
    valid: float | None = None  # the best so far
    test: float | None = None
    update: int = 0  # of the best
    updates: int = 0
    epoch: float = 0.0
    seconds: float | None = None
    why: str = ""


def row_of(trial: Trial, folder: Path, why: str = "", *, scheduled: bool = False) -> Row:
    """What a trial's folder says of it; `why` is what went wrong, if anything."""
    state = state_of(trial, folder, scheduled=scheduled)
    name, settings = trial.name, trial.settings
    if why and why != INTERRUPTED and state in ("missing", "begun"):
        state = "failed"
    if state == "missing" or not (folder / "metrics.jsonl").exists():
        return Row(name, str(folder), settings, state, why=why)
    if (folder / "ended.json").exists() and state in ("stopped", "diverged"):
        why = read_ended(folder)["why"]
    lines = runs.read_metrics(folder)
    best = next((line for line in reversed(lines) if line["kind"] == "valid" and line["best"]), None)
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


def told(row: Row) -> str:
    """How a trial ended, in a few words."""
    values = [
        f"{kind} {figure_of(v, row.measure)}" for kind in ("valid", "test") if (v := getattr(row, kind)) is not None
    ]
    return ", ".join([row.state, *values])


def spelled(value: Any) -> str:
    """A value as --grid takes it."""
    return value if isinstance(value, str) else json.dumps(value)
