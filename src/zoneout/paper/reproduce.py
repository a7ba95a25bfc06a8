"""Run the paper's rows: what is missing, from where it was interrupted, one after another or several at once.

    python -m zoneout.paper.reproduce char-ptb zoneout unregularised --seeds 3 --precision bf16

`zoneout reproduce` is the same. A run's folder is OUT/RECIPE/seed-N; its record, once it is finished, is
RESULTS/RECIPE/seed-N.json (see `results`).
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import torch

from ..ops.cuda.compiler import shared_by
from . import config as configs
from . import disk, runs, streams
from .codes import BAD_DATA, DIVERGED, FAILED, INTERRUPTED, OK, WRONG_USE, code_of
from .config import Config
from .disk import RunError, write_record
from .files import DataError
from .processes import device_of, obey_the_parent, threads_of_each
from .recipes import MEASURES, RECIPES, Recipe, select
from .results import BEGIN, changes, document, make_record, put_summary, read_record, table
from .train import Diverged, Progress, stop_requests, train
from .unread import refuse_given, refuse_unread

State = Literal["finished", "interrupted", "diverged", "without data", "refused", "failed"]
PAGE, README = Path("docs/results.md"), Path("README.md")  # where the tables stand
OPTIONS = {"seed": "--first-seed", "precision": "--precision", "device": "--device"}  # of settings that have their own
SHARED = "at_once.json"  # in a run's folder: with how many others it has been trained
RUNS, RESULTS, TRIALS = Path("runs/reproduce"), Path("results"), Path("runs/trials")
CODES: dict[State, int] = {
    "finished": OK,
    "failed": FAILED,
    "refused": WRONG_USE,
    "without data": BAD_DATA,
    "diverged": DIVERGED,
    "interrupted": INTERRUPTED,
}


@dataclass(frozen=True)
class Job:
    """One run of a recipe, and where it belongs."""

    recipe: str
    seed: int
    out: Path
    results: Path
    data: Path | None = None
    precision: str = "fp32"
    device: str = "auto"
    settings: dict[str, Any] = field(default_factory=dict)  # what is to be otherwise than in the recipe
    until: float = math.inf  # time.time() at which to stop
    at_once: int = 1

    @property
    def folder(self) -> Path:
        return self.out / self.recipe / f"seed-{self.seed}"

    @property
    def record(self) -> Path:
        return self.results / self.recipe / f"seed-{self.seed}.json"

    @property
    def config(self) -> Config:
        own = {"seed": self.seed, "precision": self.precision, "device": self.device}
        return configs.change(RECIPES[self.recipe].make(), self.settings | own)

    def missing(self) -> bool:
        """Whether there is no record yet; an error if there is one of something else."""
        config = self.config  # which says so where a setting cannot be
        if not self.record.exists():
            return True
        there = configs.from_json(read_record(self.record)["config"])
        for name, ours, theirs in changes(config, there):
            raise RunError(
                f"{self.record} is of other settings: {name} is {theirs} there and {ours} here. Move it away, or "
                "choose another folder with --results."
            )
        return False

    def most_at_once(self) -> int:
        """How many runs shared the device, in this call or in one before it: the minutes are of all of them."""
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
        """Train, or go on, and write the record."""
        config, folder = self.config, self.folder
        begun = (folder / "config.json").exists()
        if not (begun and (folder / "summary.json").exists() and runs.read_config(folder) == config):
            deadline = time.monotonic() + self.until - time.time()
            summary = train(config, folder, resume=begun, progress=progress, data=self.data, deadline=deadline)
            write_record(folder / SHARED, {"at_once": self.most_at_once()})
            if summary.status == "interrupted":
                return "interrupted"
        record = make_record(folder, self.recipe, data=self.data, device=self.device, at_once=self.most_at_once())
        write_record(self.record, record)
        return "finished"


def reproduce(
    task: str,
    rows: Sequence[str] = (),
    seeds: Iterable[int] = (1,),
    *,
    out: Path | str = RUNS,
    results: Path | str = RESULTS,
    data: Path | str | None = None,
    precision: str = "fp32",
    device: str = "auto",
    minutes: float = math.inf,
    parallel: int = 1,
    settings: dict[str, Any] | None = None,
    say: Callable[[str], None] = streams.show,
) -> State:
    """Run the rows of a task (see `recipes.select`) that have no record yet, and say the table after each.

    After `minutes` the runs that are under way stop with a checkpoint; the next call goes on. `parallel` runs share the
    device, each in a process of its own, or on a GPU in a thread. A run that diverges does not keep the others from
    running; how the worst of them ended is returned.
    """
    if parallel < 1:
        raise ValueError(f"parallel: expected 1 or more, got {parallel}")
    if not (seeds := list(seeds)):
        raise ValueError("seeds: expected 1 or more, got none")
    if not minutes >= 0:
        raise ValueError(f"minutes: expected 0 or more, got {minutes:g}")
    recipes = select(task, rows)
    until = time.time() + 60 * minutes
    jobs = [
        Job(
            recipe.name,
            seed,
            Path(out),
            Path(results),
            None if data is None else Path(data),
            precision,
            device,
            settings or {},
            until,
        )
        for seed in seeds
        for recipe in sorted(recipes, key=_urgency)
    ]
    refuse_unread(settings or {}, [job.config for job in jobs])
    missing = [job for job in jobs if job.missing()]
    missing = [replace(job, at_once=min(parallel, len(missing))) for job in missing]
    if missing:
        disk.check_writable(Path(results))  # before hours have gone into training
    say(table(results, recipes, details=False))
    if not missing:
        say(
            f"Nothing to run: every record is in {results}.{of_another_precision(jobs)} With --results and --out of "
            "their own, runs are made anew."
        )
    states: list[State] = []
    how = one_by_one if parallel == 1 else together if device_of(device).type == "cuda" else several
    for job, state in how(missing):
        states.append(state)
        say(f"{job.recipe}, seed {job.seed}: {state}")
        if state == "finished":
            say(table(results, recipes, details=False))
    if len(states) < len(missing):  # there was no time to begin them
        states.append("interrupted")
    return max(states, key=lambda state: CODES[state], default="finished")


def of_another_precision(jobs: Sequence[Job]) -> str:
    """A sentence for whoever asks for a precision and finds records of another, which stand for the recipe as well."""
    found = [(job, str(read_record(job.record)["precision"])) for job in jobs]
    others = [f"{job.recipe}, seed {job.seed} ({there})" for job, there in found if there != job.precision]
    return (
        f" Of another precision than {jobs[0].precision}, which was asked for: {'; '.join(others)}." if others else ""
    )


def _urgency(recipe: Recipe) -> int:
    """The zoneout and the unregularised row of a task come before the others."""
    return 0 if recipe.short in ("zoneout", "unregularised") else 1


def one_by_one(jobs: Sequence[Job]) -> Iterable[tuple[Job, State]]:
    """Each job and how it ended, in this process; none is begun after one that was interrupted, or too late."""
    for job in jobs:
        if time.time() >= job.until:
            return
        state = attempt(job)
        yield job, state
        if state == "interrupted":
            return


def attempt(job: Job) -> State:
    """Do a job; what went wrong with the run is said, and is not an error."""
    try:
        return job(lines(job))
    except Diverged as error:
        streams.say(f"{job.recipe}, seed {job.seed}: {error}")
        return "diverged"
    except RunError as error:
        streams.say(f"{job.recipe}, seed {job.seed}: {error}")
        return "failed"


def together(jobs: Sequence[Job]) -> Iterable[tuple[Job, State]]:
    """Each job and how it ended, as many at a time as they say, each in a thread and a stream of the GPU of its own.

    What a run asks of the host between two validations is to replay a graph, so that one process serves many; processes
    of their own would take turns on the GPU, a thread's work runs beside that of the others.
    """

    own = threading.local()

    def begin(job: Job) -> State | None:
        if asked() or time.time() >= job.until:
            return None
        device = device_of(job.device)
        if device.type == "cuda" and not hasattr(own, "stream"):  # one a thread: torch has 32 and then begins again
            own.stream = torch.cuda.Stream(device)
        with torch.cuda.stream(own.stream) if device.type == "cuda" else nullcontext():
            return attempt_beside_others(job)

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


_GIVES_WAY = 1e-4  # seconds after which a run that validates lets the others ask for their next update


def several(jobs: Sequence[Job]) -> Iterable[tuple[Job, State]]:
    """Each job and how it ended, as many at a time as they say, each in a process that is its own from the start."""
    waiting = list(jobs)
    running: dict[Any, Job] = {}
    fresh = multiprocessing.get_context("spawn")  # what CUDA needs
    with passing_on(running) as stopping:
        while running or waiting:
            begin = waiting and not stopping and time.time() < waiting[0].until
            if begin and len(running) < waiting[0].at_once:
                job = waiting.pop(0)
                process = fresh.Process(target=_in_process, args=(job, threads_of_each(job.at_once)))
                process.start()
                running[process] = job
                if stopping:  # since it was asked, and before it was there to be told
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
                # A process that was asked to stop where it does not train has ended without a word.
                yield job, "interrupted" if stopping and state == "failed" else state


def _in_process(job: Job, threads: int) -> None:
    obey_the_parent()
    torch.set_num_threads(threads)
    with streams.ready():
        sys.exit(CODES[attempt_beside_others(job)])


def attempt_beside_others(job: Job) -> State:
    """Do a job; what is wrong with its data or settings, which alone would end everything, ends this one."""
    try:
        return attempt(job)
    except (DataError, ValueError) as error:
        streams.say(f"{job.recipe}, seed {job.seed}: {error}")
        return "without data" if isinstance(error, DataError) else "refused"


@contextmanager
def passing_on(running: dict[Any, Job]) -> Iterator[list[int]]:
    """A list that is no longer empty once somebody has asked to stop, which is passed on to the processes.

    They hear of it from here alone (`obey_the_parent`), whoever it was that Ctrl-C or the polite kill was sent to; each
    then stops with a checkpoint, and as everywhere at once when it is asked a second time.
    """
    stopping: list[int] = []

    def note(number: int, frame: Any) -> None:
        for process in list(running):
            process.terminate()
        if stopping:
            raise KeyboardInterrupt
        stopping.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def lines(job: Job) -> Progress:
    """A line on standard error for every validation."""
    began = time.monotonic()
    name = f"{job.recipe}, seed {job.seed}"

    def tell(event: dict[str, Any]) -> None:
        kind, text = event["kind"], ""
        if kind == "start":
            again = f", continued after {event['update']:,}" if event["update"] else ""
            text = f"{event['updates']:,} updates on {event['device']}{again}"
        elif kind in ("valid", "test"):
            measure = RECIPES[job.recipe].measure
            best = ", the best so far" if event.get("best") else ""
            minutes = (time.monotonic() - began) / 60
            text = f"epoch {event['epoch']:g}, {minutes:.1f} min, {kind} {event[measure]:.4f}{best}"
        elif kind == "note":
            text = event["text"]
        if text:
            streams.say(f"{name}: {text}")

    return tell


# --- from the command line -------------------------------------------------------------------------


def parser(prog: str) -> argparse.ArgumentParser:
    """The options, without any package that torch does not bring."""
    found = argparse.ArgumentParser(
        prog=prog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run the paper's rows that have no record yet, and show the table as it fills.",
        epilog=f"""examples:

$ {prog} char-ptb                                  # the rows of Table 1
$ {prog} char-ptb zoneout unregularised --seeds 3 --precision bf16
$ {prog} pmnist all --parallel 3                   # figures and text too, three runs at a time
$ {prog} char_ptb_zoneout --minutes 8              # stops after 8 minutes; the same command goes on
$ {prog} char_ptb_gru word_ptb_zoneout             # recipes of any task
$ {prog}                                           # only the tables of what there is
$ {prog} --write                                   # put them into docs/results.md and README.md

tasks: {", ".join(MEASURES)}""",
    )
    add = found.add_argument
    add("task", metavar="TASK", nargs="?", help="a task, or a recipe by its name")
    add("rows", metavar="ROW", nargs="*", help="rows of it, or recipes; by default the paper's tables, `all` is all")
    add("--seeds", metavar="N", type=int, default=1, help="how many seeds (1)")
    add("--first-seed", metavar="N", type=int, default=1, help="the first of them (1)")
    add("--out", metavar="DIR", type=Path, help="where the runs go (runs/reproduce; with --set runs/trials)")
    add("--results", metavar="DIR", type=Path, help="where the records go (results; with --set runs/trials/results)")
    precisions = ("fp32", "tf32", "bf16", "fp16")
    add("--precision", choices=precisions, default="fp32", help="of the products in training (fp32)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--data", metavar="DIR", type=Path, help="a folder to look for the data in, before ZONEOUT_DATA")
    add("--minutes", metavar="M", type=float, default=math.inf, help="stop after so long, to be continued")
    add("--parallel", metavar="N", type=int, default=1, help="so many runs at once on the device (1)")
    add("--set", metavar="NAME=VALUE", action="append", default=[], help="a setting that is to be otherwise")
    add("--write", metavar="FILE", nargs="?", const=PAGE, type=Path, help=f"write {PAGE} and the table of {README}")
    return found


def main(arguments: Sequence[str] | None = None, prog: str = "python -m zoneout.paper.reproduce") -> int:
    """Run the command; its exit code."""
    command = parser(prog)
    options = command.parse_args(arguments)
    pairs = [setting.partition("=") for setting in options.set]
    for name, equals, _ in pairs:
        if not equals:
            raise ValueError(f"--set: expected a name and a value, as in epochs=1, got {name!r}")
        if name in OPTIONS:
            raise ValueError(f"--set: expected a setting of the recipe, got {name}; {OPTIONS[name]} is for that")
    if options.task is None:
        of_runs = ("seeds", "first_seed", "out", "precision", "device", "data", "minutes", "parallel", "set")
        refuse_given(of_runs, options, command.get_default, "without a TASK nothing is run; say which")
    # A trial neither finds the recipe's own record nor stands in its way.
    out = options.out or (TRIALS if pairs else RUNS)
    results = options.results or (TRIALS / "results" if pairs else RESULTS)
    if options.write == PAGE and pairs:
        raise ValueError(f"--write: expected a file of its own for trials (--set), since {PAGE} is of the recipes")
    if options.write is not None and options.task is None and not any(results.glob("*/seed-*.json")):
        raise RunError(f"there are no records in {results}, so that --write would leave nothing of the tables")
    if options.write is not None and not options.write.parent.is_dir():
        raise ValueError(
            f"--write: there is no folder {options.write.parent} here for {options.write.name}; --write FILE says "
            "where else the tables go"
        )
    state: State = "finished"
    said = streams.heard(sys.stdout)  # what is shown on the way is not what the command is for
    if options.task is not None:
        state = reproduce(
            options.task,
            options.rows,
            range(options.first_seed, options.first_seed + options.seeds),
            out=out,
            results=results,
            data=options.data,
            precision=options.precision,
            device=options.device,
            minutes=options.minutes,
            parallel=options.parallel,
            settings={name: value for name, _, value in pairs},
            say=lambda text: streams.show(text, said),
        )
    elif options.write is None:
        streams.show(table(results))
    if options.write is not None:
        with disk.explained(options.write):
            disk.write_text(options.write, document(results))
            text = disk.read_text(README) if README.exists() else ""
            if BEGIN in text and options.write == PAGE:
                disk.write_text(README, put_summary(text, results))
    return CODES[state]


if __name__ == "__main__":
    try:
        with streams.ready():
            sys.exit(main())
    except (RunError, OSError, ValueError, DataError) as error:
        streams.say(f"reproduce: {disk.in_words(error)}")
        sys.exit(code_of(error))
