"""Run the rows of the paper's tables that have no record yet, one at a time or several at once.

A run's folder is OUT/RECIPE/seed-N. An interrupted run
continues from its last checkpoint. A finished run writes the record RESULTS/RECIPE/seed-N.json (see
`results`).
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import torch

from ...ops.cuda import shared_by
from .. import console, disk
from ..data.datasets import DataError
from ..disk import RunError, write_record
from ..training import config as configs
from ..training import runs
from ..training.config import Config
from ..training.exit_codes import BAD_DATA, DIVERGED, FAILED, INTERRUPTED, OK, WRONG_USE
from ..training.noise_fields import in_fields
from ..training.processes import (
    alone,
    device_of,
    memory_explained,
    obey_the_parent,
    threads_of_each,
)
from ..training.train import Diverged, Progress, Stopped, asked_again, stop_requests, train
from ..training.unused_options import refuse_unread
from .recipes import RECIPES, Recipe, select
from .results import changes, make_record, order, read_record, table

State = Literal[
    "finished", "interrupted", "diverged", "without data", "refused", "failed", "GPU lost"
]
OPTIONS = {
    "seed": "--first-seed",
    "precision": "--precision",
    "device": "--device",
}  # settings that are options
RUNS, RESULTS = Path("runs/reproduce"), Path("results")
SHARED = "at_once.json"  # in a run's folder: how many runs shared the device
CODES: dict[State, int] = {
    "finished": OK,
    "GPU lost": FAILED,
    "failed": FAILED,
    "refused": WRONG_USE,
    "without data": BAD_DATA,
    "diverged": DIVERGED,
    "interrupted": INTERRUPTED,
}


@dataclass(frozen=True)
class Job:
    """One run of a recipe, with its folder and the file of its record."""

    recipe: str
    seed: int
    out: Path
    results: Path
    data: Path | None = None
    precision: str = "fp32"
    device: str = "auto"
    settings: dict[str, Any] = field(default_factory=dict)  # changes to the recipe's settings
    until: float = math.inf  # time.time() at which to stop
    at_once: int = 1

    @property
    def name(self) -> str:
        return f"{self.recipe}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        return self.out / self.recipe / f"seed-{self.seed}"

    @property
    def record(self) -> Path:
        return self.results / self.recipe / f"seed-{self.seed}.json"

    @property
    def config(self) -> Config:
        own = {"seed": self.seed, "precision": self.precision, "device": self.device}
        try:
            return configs.change(RECIPES[self.recipe].make(), self.settings | own)
        except ValueError as error:
            raise ValueError(f"--set {error}") from None

    def missing(self) -> bool:
        """Return True if there is no record yet; raise `RunError` if the record has other
        settings.
        """
        config = self.config  # raises if a setting is invalid
        if not self.record.exists():
            return True
        there = configs.from_json(read_record(self.record)["config"])
        for name, ours, theirs in changes(config, there):
            raise RunError(
                f"{self.record} is of other settings: {name} is {theirs} there and {ours} here. "
                "Move it away, or choose another folder with --results."
            )
        return False

    def most_at_once(self) -> int:
        """Return how many runs shared the device, at most, in this call or an earlier one."""
        path = self.folder / SHARED
        if not path.exists():
            return self.at_once
        try:
            found = disk.read_json(path)
            disk.check_fields(found, {"at_once": "count"})
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read: {disk.reason(error)}") from None
        return max(self.at_once, int(found["at_once"]))

    def __call__(self, progress: Progress | None = None) -> State:
        """Train or resume the run, then write its record."""
        config, folder = self.config, self.folder
        begun = (folder / "config.json").exists()
        if not (
            begun and (folder / "summary.json").exists() and runs.read_config(folder) == config
        ):
            summary = train(
                config,
                folder,
                resume=begun,
                progress=progress,
                data=self.data,
                deadline=deadline_at(self.until),
            )
            write_record(folder / SHARED, {"at_once": self.most_at_once()})
            if summary.status == "interrupted":
                return "interrupted"
        with stop_requests() as asked:

            def tick() -> None:
                if asked() or time.time() >= self.until:
                    raise Stopped

            try:
                record = make_record(
                    folder,
                    self.recipe,
                    data=self.data,
                    device=self.device,
                    at_once=self.most_at_once(),
                    tick=tick,
                )
            except Stopped:
                return "interrupted"
        write_record(self.record, record)
        return "finished"


def reproduce(
    task: str,
    rows: Sequence[str] = (),
    seeds: Iterable[int] | None = None,
    *,
    out: Path | str = RUNS,
    results: Path | str = RESULTS,
    data: Path | str | None = None,
    precision: str | None = None,
    device: str = "auto",
    minutes: float = math.inf,
    parallel: int = 1,
    settings: dict[str, Any] | None = None,
    say: Callable[[str], None] = console.show,
) -> State:
    """Run the rows of a task (see `recipes.select`) that have no record yet; print the table after
    each.

    `seeds` are by default those that each recipe states, and `precision` is the one that the row is
    about, or else fp32. After `minutes` the current runs stop with a checkpoint, and the next call
    resumes them. `parallel` runs share the device: as threads on a GPU, as processes elsewhere. A
    run that diverges or fails does not stop the others, unless the GPU is lost. The runs that are
    left without a record are named at the end. Returns the worst final state of all runs.
    """
    if parallel < 1:
        raise ValueError(f"parallel: expected 1 or more, got {parallel}")
    if seeds is not None and not (seeds := list(seeds)):
        raise ValueError("seeds: expected 1 or more, got none")
    until = end_after(minutes)
    recipes = select(task, rows)
    for recipe in recipes:
        if precision and recipe.precision not in ("", precision):
            raise ValueError(
                f"precision: expected {recipe.precision} for {recipe.name}, got {precision}"
            )
    jobs = [
        Job(
            recipe.name,
            seed,
            Path(out),
            Path(results),
            None if data is None else Path(data),
            precision or recipe.precision or "fp32",
            device,
            settings or {},
            until,
        )
        for recipe, seed in _in_order(recipes, seeds)
    ]
    refuse_unread(settings or {}, [job.config for job in jobs])
    if any(job.config.evaluation.skip_test for job in jobs):
        raise ValueError("evaluation.skip_test: expected false, since every record has a test")
    missing = [job for job in jobs if job.missing()]
    missing = [replace(job, at_once=min(parallel, len(missing))) for job in missing]
    if missing:
        disk.check_writable(Path(results))  # before hours of training
    say(table(results, recipes, details=False))
    if not missing:
        say(
            f"Nothing to run: every record is in {results}.{of_another_precision(jobs)} With other "
            "folders for --results and --out, they run again."
        )
    states: dict[str, State] = {}  # of the runs that were begun
    how = one_by_one if parallel == 1 else together if device_of(device).type == "cuda" else several
    for job, state in how(missing):
        states[job.name] = state
        say(f"{job.name}: {state}")
        if state == "finished":
            say(table(results, recipes, details=False))
    if states and (best_first := order(results, recipes)):
        say(best_first)
    if text := without_record(missing, states):
        say(text)
    if len(states) < len(missing) and "GPU lost" not in states.values():
        return "interrupted"  # there was no time to begin them all
    return max(states.values(), key=lambda state: CODES[state], default="finished")


def end_after(minutes: float) -> float:
    """Return the `time.time()` that comes after some minutes. All processes have this time."""
    if not minutes >= 0:
        raise ValueError(f"minutes: expected 0 or more, got {minutes:g}")
    return time.time() + 60 * minutes


def deadline_at(until: float) -> float:
    """Return a `time.time()` as the deadline of `train`, a `time.monotonic()`."""
    return time.monotonic() + until - time.time()


def without_record(jobs: Sequence[Job], states: dict[str, State]) -> str:
    """Return a sentence that names the jobs without a record, and how they ended; or ""."""
    ended = {job.name: states.get(job.name, "not begun") for job in jobs}
    left = [f"{name} ({state})" for name, state in ended.items() if state != "finished"]
    return f"Without a record: {'; '.join(left)}. The same command tries again." if left else ""


def _in_order(
    recipes: Sequence[Recipe], seeds: Sequence[int] | None
) -> Iterator[tuple[Recipe, int]]:
    """Yield the first seed of every recipe, then the second; of one seed, urgent rows first.

    A recipe without seeds is run with seed 1, since the caller has named it or its task.
    """
    wanted = {r.name: seeds or r.seeds or (1,) for r in sorted(recipes, key=_urgency)}
    for number in range(max(map(len, wanted.values()), default=0)):
        for name, own in wanted.items():
            if number < len(own):
                yield RECIPES[name], own[number]


def of_another_precision(jobs: Sequence[Job]) -> str:
    """Return a sentence that names the records made in another precision than requested, or ""."""
    found = [(job, str(read_record(job.record)["precision"])) for job in jobs]
    others = [f"{job.name} ({there})" for job, there in found if there != job.precision]
    return f" Of another precision than was asked for: {'; '.join(others)}." if others else ""


def _urgency(recipe: Recipe) -> int:
    """Return a sort key: the zoneout and unregularised rows of a task run first."""
    return 0 if recipe.short in ("zoneout", "unregularised") else 1


def one_by_one(jobs: Sequence[Job]) -> Iterable[tuple[Job, State]]:
    """Run the jobs in this process; yield each with its final state. Stop after an interruption,
    at the deadline, or when the GPU is lost.
    """
    for job in jobs:
        if time.time() >= job.until:
            return
        state = attempt(job)
        yield job, state
        if state in ("interrupted", "GPU lost"):
            return


def attempt(job: Job) -> State:
    """Run a job; print an error instead of raising it, so that it ends this job only.

    Of an error that is none of the run's data, settings or files, print the traceback too.
    """
    state: State = "failed"
    try:
        with memory_explained():
            return job(lines(job))
    except (RunError, DataError, OSError, ValueError) as error:
        console.say(f"{job.name}: {in_fields(disk.in_words(error))}")
        kinds: dict[type[Exception], State] = {
            Diverged: "diverged",
            DataError: "without data",
            ValueError: "refused",
        }
        state = next((state for kind, state in kinds.items() if isinstance(error, kind)), state)
    except Exception:
        console.say(f"{job.name}: an unexpected error\n{traceback.format_exc()}")
    return "GPU lost" if state == "failed" and gpu_is_lost(job.device) else state


def gpu_is_lost(device: str) -> bool:
    """Return whether every CUDA call of this process fails, as after a read of a wrong address."""
    if not torch.cuda.is_initialized():
        return False
    try:
        with alone:  # a graph that another run is capturing would break
            torch.cuda.synchronize(device if device.startswith("cuda") else None)
    except RuntimeError:
        return True
    return False


def together(jobs: Sequence[Job]) -> Iterable[tuple[Job, State]]:
    """Run `at_once` jobs at a time, each in a thread with its own CUDA stream; yield each with its
    final state.

    Threads of one process run concurrently on the GPU, while processes would take turns. One
    process suffices: between two validations a run only replays a CUDA graph.
    """

    own, lost = threading.local(), threading.Event()

    def begin(job: Job) -> State | None:
        if asked() or lost.is_set() or time.time() >= job.until:
            return None
        device = device_of(job.device)
        if device.type == "cuda" and not hasattr(
            own, "stream"
        ):  # one per thread: torch reuses streams after 32
            own.stream = torch.cuda.Stream(device)
        with torch.cuda.stream(own.stream) if device.type == "cuda" else nullcontext():
            state = attempt(job)
        if state == "GPU lost":
            lost.set()
        return state

    at_once = max((job.at_once for job in jobs), default=1)
    patience = sys.getswitchinterval()
    sys.setswitchinterval(_GIVES_WAY)
    try:
        with stop_requests() as asked, shared_by(at_once), ThreadPoolExecutor(at_once) as threads:
            begun = {threads.submit(begin, job): job for job in jobs}
            for ended in as_completed(begun):
                if (state := ended.result()) is not None:
                    yield begun[ended], state
    finally:
        sys.setswitchinterval(patience)


# Seconds after which a validating run lets the other threads launch their next update.
_GIVES_WAY = 1e-4


def several(jobs: Sequence[Job]) -> Iterable[tuple[Job, State]]:
    """Run `at_once` jobs at a time, each in a spawned process; yield each with its final state."""
    waiting = list(jobs)
    running: dict[Any, Job] = {}
    fresh = multiprocessing.get_context("spawn")  # CUDA needs spawned processes
    with passing_on(running) as stopping:
        while running or waiting:
            begin = waiting and not stopping and time.time() < waiting[0].until
            if begin and len(running) < waiting[0].at_once:
                job = waiting.pop(0)
                process = fresh.Process(
                    target=_in_process, args=(job, threads_of_each(job.at_once))
                )
                process.start()
                running[process] = job
                if stopping:  # the signal came while the process was being started
                    process.terminate()
                continue
            if not running:
                return
            ended = wait([process.sentinel for process in running])
            for process in [p for p in running if p.sentinel in ended]:
                process.join()
                job = running.pop(process)
                states: dict[int | None, State] = {code: state for state, code in CODES.items()}
                state = states.get(process.exitcode, "failed")
                # A process that is told to stop outside of training ends without a state.
                yield job, "interrupted" if stopping and state == "failed" else state


def _in_process(job: Job, threads: int) -> None:
    obey_the_parent()
    torch.set_num_threads(threads)
    with console.ready():
        sys.exit(CODES[attempt(job)])


@contextmanager
def passing_on(running: dict[Any, Job]) -> Iterator[list[float]]:
    """Forward SIGINT and SIGTERM to the processes; yield a list of the times of these signals.

    The processes ignore these signals from the terminal and obey only their parent
    (`obey_the_parent`). After the first request each process stops with a checkpoint, after the
    second one at once.
    """
    stopping: list[float] = []

    def note(number: int, frame: Any) -> None:
        for process in list(running):
            process.terminate()
        if asked_again(stopping):
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def lines(job: Job) -> Progress:
    """Return a progress callback that prints one line to standard error per validation.

    The milliseconds of an update are those between the two latest lines of training loss, since
    the host waits for the device there, without validations and checkpoints.
    """
    began = time.monotonic()
    since: tuple[int, float] | None = None  # the update and time of a line of training loss
    took = ""

    def tell(event: dict[str, Any]) -> None:
        nonlocal since, took
        kind, text = event["kind"], ""
        if kind == "train":
            update, now = event["update"], time.monotonic()
            if since is not None:
                took = f", {1000 * (now - since[1]) / (update - since[0]):.3g} ms an update"
            since = update, now
        elif kind != "step":
            since = None
        if kind == "start":
            again = f", continued after {event['update']:,}" if event["update"] else ""
            text = f"{event['updates']:,} updates on {event['device']}{again}"
        elif kind in ("valid", "test"):
            measure = RECIPES[job.recipe].measure
            best = ", the best so far" if event.get("best") else ""
            minutes = (time.monotonic() - began) / 60
            text = (
                f"epoch {event['epoch']:g}, {minutes:.1f} min{took}, {kind} "
                f"{event[measure]:.4f}{best}"
            )
        elif kind == "note":
            text = event["text"]
        if text:
            console.say(f"{job.name}: {text}")

    return tell
