"""Many runs: a grid of settings and seeds, each an ordinary run in a folder of its own.

    OUT/zoneout.cell=0.1,seed=2-5d41402a/     a run (see `runs`); its name ends in a digest of its settings
    OUT/…/ended.json                          of a run without a summary: it diverged, or was stopped as hopeless
    OUT/results.json, OUT/index.html          what came out, for programs and for people

The folders are all that is known of a sweep: what is missing is seen from them, and the same command goes on from
there, on this machine or another. Here runs are given to plain processes; `cluster` gives the same runs to Ray.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from . import config as configs
from . import plots, runs
from .config import Config
from .files import DataError
from .progress import figure_of
from .reproduce import passing_on
from .runs import InUse, RunError
from .train import Diverged, Progress, train

State: TypeAlias = Literal["missing", "begun", "finished", "stopped", "diverged", "failed"]
Say: TypeAlias = Callable[[str], None]

NAMES = tuple(configs.names())
DEFAULT = configs.to_json(Config())
ANYHOW = ("device", "log_every", "save_every")  # what a run may have otherwise and still be the same
LENGTH = ("epochs", "updates", "patience")  # a run that differs in these alone is the same, to be made longer
RETRIES = 10  # times that a run is given to another process after its own has died
INTERRUPTED = "interrupted"
WAIT = 120.0  # seconds that a run is waited for whose folder is held: the process that held it may be dying


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
        ours, default = configs.to_json(self.config), DEFAULT
        length = () if self.config.schedule.kind == "cosine" else tuple(n for n in LENGTH if n not in self.fields)
        names = [n for n in NAMES if n not in (*ANYHOW, *length) and configs.at(ours, n) != configs.at(default, n)]
        page = json.dumps({name: configs.at(ours, name) for name in names}, sort_keys=True)
        return hashlib.sha256(page.encode()).hexdigest()[:8]

    @cached_property
    def name(self) -> str:
        """The name of its folder.

        >>> Trial(configs.change(Config(), {"zoneout.cell": 0.5}), ("zoneout.cell", "seed")).name
        'zoneout.cell=0.5,seed=1-e5256b2e'
        """
        said = ",".join(f"{name}={spelled(value)}" for name, value in self.settings.items())
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
    ours, theirs = configs.to_json(trial.config), configs.to_json(runs.read_config(folder))
    other = [n for n in NAMES if n not in ANYHOW and configs.at(ours, n) != configs.at(theirs, n)]
    if other:
        if set(other) <= set(LENGTH):
            return "begun"  # it is to be longer, or shorter
        raise RunError(f"{folder} holds another run ({other[0]} differs); choose another folder with --out")
    if (folder / "summary.json").exists():
        return "finished"
    if (folder / "ended.json").exists():
        state: State = runs.read_json(folder / "ended.json")["state"]
        return state if state == "diverged" or scheduled else "begun"
    return "begun"


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
        why = runs.read_json(folder / "ended.json")["why"]
    lines = runs.read_metrics(folder)
    best = next((line for line in reversed(lines) if line["kind"] == "valid" and line["best"]), None)
    measure = plots.measure_in(best or {}) or ""
    test = next((line for line in reversed(lines) if line["kind"] == "test"), None)
    seconds = runs.read_json(folder / "summary.json")["seconds"] if state == "finished" else None
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


# --- running what is missing -----------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A trial that has not ended, and where it belongs."""

    trial: Trial
    folder: Path
    data: Path | None = None

    def __call__(self, progress: Progress | None = None) -> str:
        """Train, or go on; what went wrong as a sentence, or nothing.

        An error that would come again is written down, so that nothing is trained for it twice.
        """
        until = time.monotonic() + WAIT
        while True:
            try:
                begun = (self.folder / "config.json").exists()
                if begun and state_of(self.trial, self.folder) == "finished":
                    return ""  # by another process, in the meantime
                summary = train(self.trial.config, self.folder, resume=begun, progress=progress, data=self.data)
                (self.folder / "ended.json").unlink(missing_ok=True)
                return INTERRUPTED if summary.status == "interrupted" else ""
            except InUse as error:
                if time.monotonic() > until:
                    return str(error)
                time.sleep(0.5)
            except Diverged as error:
                mark(self.folder, "diverged", str(error))
                return str(error)
            except (RunError, DataError, ValueError) as error:
                return str(error)
            except Exception as error:  # one trial that cannot be (a GPU without room, say) does not end the others
                return f"{type(error).__name__}: {error}"


def mark(folder: Path, state: State, why: str) -> None:
    """Note that a run has ended without a summary."""
    with runs.explained(folder):
        runs.write_json(folder / "ended.json", {"state": state, "why": why})


def run_local(jobs: Sequence[Job], *, parallel: int, say: Say, retries: int = RETRIES) -> dict[str, str]:
    """Run jobs in so many processes; what went wrong, by the name of the trial. Ctrl-C stops with checkpoints.

    A process runs one job after another. When one dies its job goes to another, which continues from the checkpoint.
    """
    fresh = multiprocessing.get_context("spawn")  # what CUDA needs
    waiting, deaths, problems = deque(jobs), Counter[str](), dict[str, str]()
    busy: dict[Any, tuple[Any, Job]] = {}  # by the pipe
    idle: list[tuple[Any, Any]] = []
    numbers = itertools.count()
    processes: dict[Any, Any] = {}
    done = 0
    with passing_on(processes) as stopping:
        while True:
            while waiting and not stopping and len(busy) < parallel:
                if not idle:
                    idle.append(_start(fresh, next(numbers), parallel))
                    processes[idle[-1][1]] = None
                pipe, process = idle.pop()
                busy[pipe] = (process, waiting[0])
                with contextlib.suppress(OSError):  # it has died: as if it had died after
                    pipe.send(waiting[0])
                waiting.popleft()
            if not busy:
                break
            ready: list[Any] = wait(list(busy))
            for pipe in ready:
                process, job = busy.pop(pipe)
                name = job.trial.name
                try:
                    problem = pipe.recv()
                    idle.append((pipe, process))
                except (EOFError, OSError):
                    process.join()
                    del processes[process]
                    deaths[name] += 1
                    obeyed = stopping or process.exitcode == 0  # a batch system asks all processes to stop at once
                    if not obeyed and deaths[name] <= retries:
                        say(f"{name}: its process died (exit code {process.exitcode}); another goes on with it")
                        waiting.appendleft(job)
                        continue
                    died = f"its process died {deaths[name]} times, the last with exit code {process.exitcode}"
                    problem = INTERRUPTED if obeyed else died
                done += 1
                if problem:
                    problems[name] = problem
                say(f"{done}/{len(jobs)} {name}: {problem or told(row_of(job.trial, job.folder))}")
        for pipe, process in idle:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
            process.join()
    return problems | {job.trial.name: INTERRUPTED for job in waiting}


def _start(fresh: Any, number: int, processes: int) -> tuple[Any, Any]:
    """A process that waits for jobs, and the pipe to it."""
    pipe, other = fresh.Pipe()
    process = fresh.Process(target=_work, args=(number, processes, other))
    process.start()
    other.close()  # so that its death is seen as the end of the pipe
    return pipe, process


def _work(number: int, processes: int, pipe: Any) -> None:
    """Do the jobs that come through a pipe, one after another, on the GPU that is this process's turn."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > 1:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = names[number % len(names)]
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    threading.Thread(target=_stop_with_the_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while (job := pipe.recv()) is not None:
            pipe.send(job())


def _stop_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)  # politely: a checkpoint is written first


def told(row: Row) -> str:
    """How a trial ended, in a few words."""
    values = [
        f"{kind} {figure_of(v, row.measure)}" for kind in ("valid", "test") if (v := getattr(row, kind)) is not None
    ]
    return ", ".join([row.state, *values])


def sweep(
    base: Config,
    grid: Sequence[str],
    seeds: int,
    out: Path,
    *,
    data: Path | None = None,
    say: Say = print,
    engine: str | None = None,
    address: str | None = None,
    search: str | None = None,
    scheduler: str | None = None,
    part: str | None = None,
    trials: int = 50,
    parallel: int = 0,
    cpus: float = 1.0,
    gpus: float | None = None,
) -> list[Row]:
    """Run what is missing of a grid or a search; what is known of every trial then. The options are the command's."""
    if parallel < 0 or trials < 1:
        raise ValueError(f"--parallel, --trials: expected 0 or more, and 1 or more, got {parallel} and {trials}")
    with_ray = engine == "ray" or (engine is None and any((address, search, scheduler)))
    for name, value in (("address", address), ("search", search), ("scheduler", scheduler), ("gpus", gpus)):
        if value is not None and not with_ray:
            raise ValueError(f"--{name}: plain processes have no such thing; use --engine ray")
    axes, out, data = axes_of(grid), out.absolute(), data and data.absolute()
    asha = scheduler is not None
    if with_ray:
        from . import cluster  # which needs another package

        room = cluster.Cluster(address or "local", cpus, gpus, parallel, asha)
    if search is not None:
        if seeds != 1 or part is not None or not axes:
            raise ValueError("--search: expected a --grid to choose from, one seed and no --part")
        trial_of(base, {name: values[0] for name, values in axes.items() if isinstance(values, list)})
        problems = cluster.search_ray(base, axes, out, trials, room, say, data)
        every = known_trials(base, list(axes), out)
    else:
        every = grid_of(base, axes, seeds)
        places = folders(every, out)
        chosen = part_of(every, part) if part else every
        states = {t.name: state_of(t, places[t.name], scheduled=asha) for t in chosen}
        jobs = [Job(t, places[t.name], data) for t in chosen if states[t.name] in ("missing", "begun")]
        if len(jobs) < len(chosen):
            say(f"{len(chosen) - len(jobs)} of {len(chosen)} runs are there already")
        if with_ray:
            problems = cluster.run_ray(jobs, room, say)
        else:
            problems = run_local(jobs, parallel=parallel or room_here(base), say=say)
    places = folders(every, out)
    return [row_of(t, places[t.name], problems.get(t.name, ""), scheduled=asha) for t in every]


def room_here(config: Config) -> int:
    """How many runs this machine has room for: one a GPU, or one a core."""
    if config.device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spelled(value: Any) -> str:
    """A value as --grid takes it."""
    return value if isinstance(value, str) else json.dumps(value)
