"""A sweep: runs over a grid of settings and seeds, each an ordinary run in a separate folder.

    OUT/zoneout.cell=0.1,seed=2-5d41402a/  a run (see `runs`); the name ends in a settings digest
    OUT/…/ended.json                       only without a summary: the run diverged or was stopped
    OUT/results.json, OUT/index.html       the results, for programs and for people

The folders are the only state of a sweep: they show which runs are missing. The same command
continues a sweep, on this machine or another one. This module runs trials in plain processes;
`cluster` runs the same trials with Ray.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeAlias

import torch

from .. import console, disk
from ..data.corpora import absolute_path
from ..data.datasets import DataError, MissingError
from ..disk import RunError
from ..training import models
from ..training.config import Config
from ..training.measures import measure_of
from ..training.noise_fields import in_fields
from ..training.processes import cores, obey_the_parent, threads_of_each
from ..training.runs import Begun, InUse
from ..training.train import Diverged, Progress, load_data, same_data, train
from ..training.unused_options import refuse_unread
from .reproduce import deadline_at, end_after, passing_on
from .trials import (
    INTERRUPTED,
    PATHS,
    Row,
    State,
    Trial,
    axes_of,
    folders,
    grid_of,
    known_trials,
    outcome,
    part_of,
    row_of,
    state_of,
    trial_of,
)

Say: TypeAlias = Callable[[str], None]

RETRIES = 10  # how many times a run is given to another process after its process died
WAIT = 120.0  # seconds to wait for a locked folder: the process that locked it may be about to end


@dataclass(frozen=True)
class Job:
    """A trial that has not ended, with its folder and the folder of its data."""

    trial: Trial
    folder: Path
    data: Path | None = None
    until: float = math.inf  # time.time() at which to stop

    def __call__(self, progress: Progress | None = None) -> str:
        """Train or continue the run; return an error message, or "" if there is none.

        If training diverges, that is recorded in the folder, so that it is not repeated.
        """
        until = time.monotonic() + WAIT
        while True:
            try:
                begun = (self.folder / "config.json").exists()
                if begun and state_of(self.trial, self.folder) == "finished":
                    return ""  # another process has finished it in the meantime
                summary = train(
                    self.trial.config,
                    self.folder,
                    resume=begun,
                    progress=progress,
                    data=self.data,
                    deadline=deadline_at(self.until),
                )
                (self.folder / "ended.json").unlink(missing_ok=True)
                return INTERRUPTED if summary.status == "interrupted" else ""
            except (InUse, Begun) as error:  # another process has the run, and may finish it or not
                if time.monotonic() > until:
                    return str(error)
                time.sleep(0.5)
            except Diverged as error:
                mark(self.folder, "diverged", str(error))
                return str(error)
            except (RunError, DataError, ValueError) as error:
                return str(error)
            except Exception as error:  # a failed trial (GPU memory, say) does not end the others
                return f"{type(error).__name__}: {error}"


def mark(folder: Path, state: State, why: str) -> None:
    """Record that a run has ended without a summary, and why."""
    with disk.explained(folder):
        disk.write_json(folder / "ended.json", {"state": state, "why": why})


def run_local(
    jobs: Sequence[Job], *, parallel: int, say: Say, retries: int = RETRIES
) -> dict[str, str]:
    """Run jobs in `parallel` processes; return the error messages, by the name of the trial.

    A process runs one job after another. If a process dies, another one continues its job from the
    checkpoint. Ctrl-C, or the time `until` of a job, stops all runs, each with a checkpoint.
    """
    fresh = multiprocessing.get_context("spawn")  # CUDA does not work in a forked process
    waiting, deaths, problems = deque(jobs), Counter[str](), dict[str, str]()
    busy: dict[Any, tuple[Any, Job]] = {}  # pipe: process and job
    idle: list[tuple[Any, Any]] = []
    numbers = itertools.count()
    processes: dict[Any, Any] = {}
    done = 0
    with passing_on(processes) as stopping, _hanging_up(busy, idle):
        while True:
            while waiting and not stopping and len(busy) < parallel:
                if time.time() >= waiting[0].until:
                    break
                if not idle:
                    idle.append(_start(fresh, next(numbers), threads_of_each(parallel)))
                    processes[idle[-1][1]] = None
                    if stopping:  # the request came before the process could receive it
                        break
                pipe, process = idle.pop()
                busy[pipe] = (process, waiting[0])
                with contextlib.suppress(OSError):  # the process has died; `wait` reports it below
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
                    # Exit code 0: a batch system has asked all processes to stop, this one first.
                    obeyed = stopping or process.exitcode == 0
                    if not obeyed and deaths[name] <= retries:
                        say(
                            f"{name}: its process died (exit code {process.exitcode}); another "
                            "goes on with it"
                        )
                        waiting.appendleft(job)
                        continue
                    died = (
                        f"its process died {deaths[name]} times, the last with exit code "
                        f"{process.exitcode}"
                    )
                    problem = INTERRUPTED if obeyed else died
                done += 1
                if problem:
                    problems[name] = problem
                how = problem or outcome(row_of(job.trial, job.folder))
                say(f"{done}/{len(jobs)} {name}: {how}")
        for pipe, process in idle:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
            process.join()
    return problems | {job.trial.name: INTERRUPTED for job in waiting}


@contextlib.contextmanager
def _hanging_up(busy: dict[Any, Any], idle: list[tuple[Any, Any]]) -> Iterator[None]:
    """Close all pipes if an exception ends the `with` block, so that the processes end too.

    Otherwise they would wait for jobs, and Python, at its end, for them.
    """
    try:
        yield
    except BaseException:
        for pipe in (*busy, *(pipe for pipe, _ in idle)):
            pipe.close()
        raise


def _start(fresh: Any, number: int, threads: int) -> tuple[Any, Any]:
    """Start a process that waits for jobs; return the pipe to it and the process."""
    pipe, other = fresh.Pipe()
    process = fresh.Process(target=_work, args=(number, threads, other))
    process.start()
    other.close()  # then the pipe ends when the process dies
    return pipe, process


def _work(number: int, threads: int, pipe: Any) -> None:
    """Run the jobs that arrive through a pipe. The number of the process selects its GPU."""
    obey_the_parent()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > 1:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = names[number % len(names)]
    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while (job := pipe.recv()) is not None:
            pipe.send(job())


def sweep(
    base: Config,
    grid: Sequence[str],
    seeds: int,
    out: Path,
    *,
    data: Path | None = None,
    say: Say = console.say,
    engine: str | None = None,
    address: str | None = None,
    search: str | None = None,
    scheduler: str | None = None,
    part: str | None = None,
    trials: int | None = None,
    parallel: int = 0,
    cpus: float | None = None,
    gpus: float | None = None,
    minutes: float = math.inf,
) -> list[Row]:
    """Run the missing trials of a grid or a search; return a row for every trial.

    The arguments are the options of the command `zoneout sweep`. After `minutes` the current runs
    stop with a checkpoint, and the next call continues them.
    """
    until = end_after(minutes)
    if parallel < 0 or (trials is not None and trials < 1):
        raise ValueError(
            "--parallel, --trials: expected 0 or more for --parallel and 1 or more for --trials, "
            f"got {parallel} and {trials}"
        )
    with_ray = engine == "ray" or (engine is None and any((address, search, scheduler)))
    of_ray = {
        "address": address,
        "search": search,
        "scheduler": scheduler,
        "cpus": cpus,
        "gpus": gpus,
    }
    if not with_ray and (given := [name for name, value in of_ray.items() if value is not None]):
        raise ValueError(f"--{given[0]}: plain processes have no such thing; use --engine ray")
    if with_ray and until < math.inf:
        raise ValueError("--minutes: Ray's runs have no such limit; use --engine local")
    if trials is not None and search is None:
        raise ValueError(
            "--trials: without --search, every combination of the grid is run; leave it out"
        )
    axes, out, data = axes_of(grid), out.absolute(), data and data.absolute()
    for name in PATHS:
        if isinstance(values := axes.get(name), list):
            axes[name] = [absolute_path(path, data) for path in values]
    asha = scheduler is not None
    if with_ray:
        from . import cluster  # needs the package ray

        room = cluster.Cluster(
            address or "local", 1.0 if cpus is None else cpus, gpus, parallel, asha
        )
    if search is not None:
        if seeds != 1 or part is not None or not axes:
            raise ValueError("--search: expected a --grid to choose from, one seed and no --part")
        first = trial_of(
            base, {name: values[0] for name, values in axes.items() if isinstance(values, list)}
        )
        known = known_trials(base, list(axes), out)
        check_data([first.config], known, folders(known, out), data)
        problems = cluster.search_ray(base, axes, out, trials or 50, room, say, data)
        every = known_trials(base, list(axes), out)
    else:
        every = grid_of(base, axes, seeds)
        refuse_unread(axes, [t.config for t in every])
        places = folders(every, out)
        chosen = part_of(every, part) if part else every
        # The table shows all trials, so the states of all are read, also with --part.
        states = {t.name: state_of(t, places[t.name], scheduled=asha) for t in every}
        jobs = [
            Job(t, places[t.name], data, until)
            for t in chosen
            if states[t.name] in ("missing", "begun")
        ]
        check_models([job.trial for job in jobs])
        there = [t for t in every if states[t.name] != "missing"]
        check_data([job.trial.config for job in jobs], there, places, data)
        if len(jobs) < len(chosen):
            say(f"{len(chosen) - len(jobs)} of {len(chosen)} runs are there already")
        if with_ray:
            problems = cluster.run_ray(jobs, room, say)
        else:
            parallel = parallel or room_here(base)
            if jobs:
                runs = "1 run" if len(jobs) == 1 else f"{len(jobs)} runs"
                together = min(parallel, len(jobs))
                say(f"training {runs}, {together} at a time, in folders of {out}")
            problems = run_local(jobs, parallel=parallel, say=say)
    places = folders(every, out)
    return [row_of(t, places[t.name], problems.get(t.name, ""), scheduled=asha) for t in every]


def check_models(trials: Iterable[Trial]) -> None:
    """Raise if a model of some trial cannot be built, before other trials are trained for hours."""
    for trial in {replace(trial.config, seed=0): trial for trial in trials}.values():
        try:
            models.check(trial.config)
        except ValueError as error:
            raise ValueError(
                f"{trial.name} cannot be: {in_fields(str(error))}. Nothing was run."
            ) from None


def check_data(
    wanted: Iterable[Config], there: Iterable[Trial], places: dict[str, Path], folder: Path | None
) -> None:
    """Raise, before any run starts, if data are missing or differ from the data of earlier runs."""
    loaded: dict[Any, Any] = {}
    for config in wanted:
        if config.data not in loaded:
            loaded[config.data] = load_data(config, folder)
    for trial in there:
        config, run = trial.config, places[trial.name]
        if config.data not in loaded:  # no run will train on these data, so they may be missing
            try:
                loaded[config.data] = load_data(config, folder)
            except MissingError:
                loaded[config.data] = None
        if (data := loaded[config.data]) is not None and not same_data(run, data):
            raise DataError(
                f"{run} was trained on other data than {config.data.name} is now, and one table "
                "would compare the two; choose another folder with --out, or restore the original "
                "data. Nothing was run."
            )
    if len(measures := {measure_of(data) for data in loaded.values() if data is not None}) > 1:
        raise ValueError(
            f"--grid: {' and '.join(sorted(measures))} would stand in one table, but they cannot "
            "be compared; run a sweep for each. Nothing was run."
        )


def room_here(config: Config) -> int:
    """Return how many runs this machine runs in parallel: one per GPU, or one per core."""
    if config.device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return cores()
