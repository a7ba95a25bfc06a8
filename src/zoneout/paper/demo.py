"""The demo: one small text, two models that differ in zoneout alone, trained side by side and compared.

Both are ordinary runs (see `runs`), each trained by a process of its own; what they tell is shown live. At the end a
folder holds both runs, the text, the learning curves as a picture and a page that shows it all.
"""

from __future__ import annotations

import multiprocessing
import queue
import random
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Literal

import torch
import tyro

from . import data, disk, plots, runs
from .codes import INTERRUPTED
from .config import Batches, Config, Data, Evaluation, Model, Optimizer, Protocol, Zoneout
from .disk import RunError
from .measures import in_measure
from .page import code, document, element, join, learning_curves, section, table
from .processes import obey_the_parent, threads_of_each
from .progress import duration, watch
from .sample import sample
from .streams import say, show
from .train import stop_requests, train

PLAIN, ZONED = "unregularised", "zoneout"
LEAST = 2_000  # characters to train on
HELD_OUT = 10_000  # characters to validate on, and as many to test on
PROMPT = "The "


@dataclass(frozen=True)
class Demo:
    """Train an LSTM without and with zoneout, side by side on a small text, and compare them.

    $ zoneout demo
    $ zoneout demo --characters 250000 --out runs/more-text
    """

    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """The folder for both runs, the curves and the page; by default a new one in runs/."""
    characters: int = 37_000
    """How much of the text that comes with Python to train on."""
    updates: int = 1500
    """Updates of each model."""
    hidden: int = 256
    """Units of each model."""
    seed: int = 1
    """Of the weights, the order of the batches and the masks, for both."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the products in training."""

    def __call__(self) -> int:
        for name in ("characters", "updates", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}: expected a number above 0, got {getattr(self, name)}")
        if self.characters < LEAST:
            raise ValueError(f"--characters: expected at least {LEAST:,}, to have a text, got {self.characters}")
        folder = self.out or free_folder(Path("runs") / "demo")
        if folder.exists() and any(folder.iterdir()):
            raise RunError(f"{folder} is not empty; choose another folder with --out. Nothing was overwritten.")
        made = not folder.exists()
        try:
            statuses = self.run(folder)
        finally:
            if not begun(folder):
                clear(folder, made)
        if "interrupted" in statuses.values():
            say(f"\n{interrupted(folder)}")
            return INTERRUPTED
        report(self, folder)
        return 0

    def run(self, folder: Path) -> dict[str, str]:
        """Write the text and train both on it; how each ended."""
        text = write_text(folder / "text", self.characters)
        streams = Protocol("streams", size=20, length=500)  # almost as one sequence, and twenty times as fast
        plain = Config(
            data=text,
            batches=Batches(length=50),
            model=Model(hidden=self.hidden),
            optimizer=Optimizer(lr=0.006, clip_gradient=1.0),
            evaluation=Evaluation(valid=streams, test=streams, every=max(1, self.updates // 30)),
            epochs=self.updates,  # more than there will be: the updates are what is limited
            updates=self.updates,
            log_every=max(1, self.updates // 30),
            seed=self.seed,
            precision=self.precision,
            device="cpu",
        )
        configs = {PLAIN: plain, ZONED: replace(plain, zoneout=Zoneout(cell=0.5, hidden=0.05))}
        say(fill(introduction(self, folder), columns()) + "\n")
        return side_by_side(configs, folder)


def free_folder(base: Path) -> Path:
    """The folder itself, or with the first number after its name that makes it new."""
    number, folder = 1, base
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def begun(folder: Path) -> list[Path]:
    """The runs that there are."""
    return [folder / name for name in (PLAIN, ZONED) if (folder / name / "config.json").exists()]


def clear(folder: Path, made: bool) -> None:
    """Remove what a demo without a run leaves, and its folder where it was `made` by it.

    The same command would refuse the folder, or take another one.
    """
    for name in ("text", PLAIN, ZONED):
        shutil.rmtree(folder / name, ignore_errors=True)
    if made:
        with suppress(OSError):  # it was not made after all, or somebody has put something there
            folder.rmdir()


def interrupted(folder: Path) -> str:
    """What is said when a demo was stopped: which runs can be continued, and how."""
    kept = begun(folder)
    if not kept:
        return "Interrupted before a run was begun; nothing is left of it."
    both = len(kept) > 1
    what = "both runs are kept. Each" if both else f"the {kept[0].name} run is kept, the other had not begun. It"
    again = "\n".join(f"  zoneout train --resume --out {shlex.quote(str(run))}" for run in kept)
    return f"Interrupted; {what} can be continued:\n{again}"


def write_text(folder: Path, characters: int) -> Data:
    """Cut training, validation and test text from what comes with Python, and write them to files.

    Its paragraphs, each once, in a random order: then the three are about the same things, and have none in common.
    Without tables, underlined headings and the longest: one of them would be a good part of a text this small.
    """
    corpus = data.load("python")
    whole = "".join(corpus.vocabulary.decode(part) for part in (corpus.train, corpus.valid, corpus.test))
    ruled = re.compile(r"([^\w\s])\1{3}")
    paragraphs = sorted({p for p in whole.split("\n\n") if 80 < len(p) < 1000 and not ruled.search(p)})
    random.Random(0).shuffle(paragraphs)
    text = "\n\n".join(paragraphs)
    if characters > len(text) - 2 * HELD_OUT:
        raise ValueError(f"--characters: expected at most {len(text) - 2 * HELD_OUT:,} (there is no more text)")
    valid, test, train_ = text[:HELD_OUT], text[HELD_OUT : 2 * HELD_OUT], text[2 * HELD_OUT :][:characters]
    with disk.explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in (("train", train_), ("valid", valid), ("test", test)):
            disk.write_text(folder / f"{name}.txt", part)
    train_file, valid_file, test_file = (str((folder / f"{n}.txt").absolute()) for n in ("train", "valid", "test"))
    return Data(name=train_file, valid=valid_file, test=test_file)


def introduction(demo: Demo, folder: Path) -> str:
    """What is going to happen."""
    return (
        f"Two LSTMs of {demo.hidden} units learn to predict the next character of Python's own manual, one as it is, "
        f"one with zoneout. Each gets {demo.updates:,} updates on the same {demo.characters:,} characters, from the "
        f"same weights and in the same order, and is judged on {HELD_OUT:,} others. Everything goes to {folder}."
    )


# --- training both ---------------------------------------------------------------------------------


def side_by_side(configs: dict[str, Config], folder: Path) -> dict[str, str]:
    """Train all at once, a process each, and show them live; how each ended."""
    # A process each, and not a thread: each has torch's threads and signals to itself.
    context = multiprocessing.get_context("spawn")
    events: Any = context.Queue()
    threads = threads_of_each(len(configs))
    workers = {
        name: context.Process(target=work, args=(name, config, str(folder / name), threads, events), name=name)
        for name, config in configs.items()
    }
    ended: dict[str, str] = {}
    with stop_requests() as stopped:  # and nothing is raised here, where it would leave half a piece of news unread
        for worker in workers.values():
            worker.start()
        try:
            with watch(list(configs)) as shown:
                tell = {name: shown.listener(name) for name in configs}
                while len(ended) < len(workers) and not stopped():
                    try:
                        name, event = events.get(timeout=0.2)
                    except queue.Empty:
                        check_alive(workers, ended)
                        continue
                    if isinstance(event, Exception):
                        raise event
                    tell[name](event)
                    if event["kind"] == "end":
                        ended[name] = event["status"]
        finally:
            for name, worker in workers.items():
                if worker.is_alive() and name not in ended:
                    worker.terminate()  # politely: it writes a checkpoint first
            while any(worker.is_alive() for worker in workers.values()):  # which do not end before their news are read
                with suppress(queue.Empty):
                    events.get(timeout=0.1)
    return {name: ended.get(name, "interrupted") for name in configs}


def work(name: str, config: Config, folder: str, threads: int, events: Any) -> None:
    """Train one, in a process of its own."""
    obey_the_parent()
    torch.set_num_threads(threads)
    with stop_requests():  # before and after those of the run: nobody goes in the middle of a word
        try:
            train(config, folder, progress=lambda event: events.put((name, event)))
        except KeyboardInterrupt:
            pass
        except Exception as error:
            events.put((name, error))


def check_alive(workers: dict[str, Any], ended: dict[str, str]) -> None:
    """An error if a process has gone without a word (for want of memory, say)."""
    for name, worker in workers.items():
        if name not in ended and worker.exitcode is not None:
            raise RunError(f"the process that trained the {name} model ended early, with code {worker.exitcode}")


# --- what came out ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """How one of the models did."""

    name: str
    best: float
    at: int
    test: float
    train: float
    seconds: float


def result(folder: Path, name: str) -> Result:
    """What a run's files say of it."""
    rows, ended = runs.read_metrics(folder / name), disk.read_json(folder / name / "summary.json")
    trained = [in_measure(row["nats"], "bits") for row in rows if row["kind"] == "train"]
    best, test = ended["best"], ended["test"]
    return Result(name, best["bits"], best["update"], test["bits"], trained[-1], ended["seconds"])


ROWS: list[tuple[str, Callable[[Result], str]]] = [
    ("best validation", lambda r: f"{r.best:.3f}"),
    ("… at update", lambda r: f"{r.at:,}"),
    ("test, with those weights", lambda r: f"{r.test:.3f}"),
    ("training loss at the end", lambda r: f"{r.train:.3f}"),
    ("time", lambda r: duration(r.seconds)),
]


def report(demo: Demo, folder: Path) -> None:
    """Print the table and a sample, and write the picture and the page."""
    results = [result(folder, name) for name in (PLAIN, ZONED)]
    better = min(results, key=lambda r: r.best)
    curves = [plots.read_curve(folder / name) for name in (PLAIN, ZONED)]
    fig = plots.figure(curves, "Bits per character on text that the models have not seen; dashed: on their own")
    for suffix in ("png", "svg"):
        plots.save(fig, folder / f"curves.{suffix}")
    written = PROMPT + "".join(sample(runs.load(folder / better.name), PROMPT, length=400, temperature=0.6, seed=1))
    html = page(demo, results, better, curves, written, folder)
    disk.write_text(folder / "index.html", html)

    show(f"\n{'bits per character':26}{PLAIN:>14}{ZONED:>14}")
    for label, value in ROWS:
        show(f"{label:26}{value(results[0]):>14}{value(results[1]):>14}")
    width = columns()
    show(f"\n{plots.ascii_curves(curves, min(width, 80), 12)}\n\n{fill(verdict(results), width)}")
    show(f"\nWhat the {better.name} model writes after {PROMPT!r}:\n")
    show("\n".join(fill(line, width, initial_indent="  ", subsequent_indent="  ") for line in written.splitlines()))
    show(f"\nTo try next{where_it_is()}:")
    for command, why in suggestions(folder, better):
        show(f"  {command}\n      {why}")
    show(f"\nThe curves are in {folder / 'curves.png'}, everything on one page in {folder / 'index.html'}")


def where_it_is() -> str:
    """Where the command is, for whoever has not got it on the path: `make demo` runs it from a folder of its own."""
    script = Path(sys.executable).parent / "zoneout"
    if shutil.which("zoneout") or not script.exists():
        return ""
    return f" (zoneout is {script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script})"


def columns() -> int:
    """How wide a paragraph is printed."""
    return min(shutil.get_terminal_size((100, 24)).columns, 100)


def verdict(results: list[Result]) -> str:
    """What the numbers say, whichever way they came out."""
    plain, zoned = results
    gap = plain.best - zoned.best
    if gap > 0.01:
        return (
            f"At its best the zoneout model needs {gap:.2f} bits less for a character that it has not seen. The other "
            "soon knows so small a text by heart, and then gets worse on everything else; zoneout keeps it from that. "
            "On several times the text the unregularised model still wins in as many updates: it has no time to learn "
            "it by heart, and zoneout learns more slowly."
        )
    found = "Here the two are as good as each other."
    if gap < -0.01:
        found = f"Here the unregularised model is better, by {-gap:.2f} bits a character."
    return found + (
        " Zoneout learns more slowly, and pays off where training goes on until a model knows its text by heart: with "
        "more updates than these, or less text."
    )


def suggestions(folder: Path, better: Result) -> list[tuple[str, str]]:
    """Commands to go on with, and what each is for."""
    run = shlex.quote(str(folder / better.name))
    return [
        (f'zoneout sample {run} --prompt "If " --temperature 0.5', "lets it write more"),
        ("zoneout demo --characters 250000", "the same with more text: zoneout does not win there"),
        ("zoneout train --data my.txt --zoneout.cell 0.5 --zoneout.hidden 0.05", "trains on a text of yours"),
        ("zoneout train --help", "says all that can be changed"),
    ]


def page(
    demo: Demo, results: list[Result], better: Result, curves: Sequence[plots.Curve], written: str, folder: Path
) -> str:
    """Everything on one page that needs nothing else."""
    rows = [[label, *(value(r) for r in results)] for label, value in ROWS]
    parts = [
        table("In bits per character; lower is better.", [["Measure", *(r.name for r in results)]], rows, "models"),
        *learning_curves(curves, "On text that the models have not seen; dashed: on their own."),
        element("p", verdict(results)),
    ]
    heading = f"What the {better.name} model writes after “{PROMPT}”"
    tries = [join([element("dt", code(what)), element("dd", why)]) for what, why in suggestions(folder, better)]
    sections = [
        ("results", "Results", section("results", "Results", *parts)),
        ("sample", "What it writes", section("sample", heading, element("pre", written))),
        ("next", "To try next", section("next", "To try next", element("dl", *tries))),
    ]
    lead, footer = element("p", introduction(demo, folder)), element("p", "Made by ", code("zoneout demo"), ".")
    return document("An LSTM without and with zoneout", lead, sections, footer)
