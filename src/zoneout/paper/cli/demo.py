"""The demo: train two models, without and with zoneout, on a small text and compare them.

Both models are ordinary runs (see `runs`) that differ only in zoneout. A separate process trains
each model, and the progress of both is shown live. At the end the folder contains both runs, the
text, a picture of the learning curves, and an HTML page with all results.
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
from itertools import zip_longest
from pathlib import Path
from textwrap import fill, wrap
from typing import Annotated, Any, Literal

import torch
import tyro

from .. import disk
from ..console import say, show
from ..data import corpora
from ..disk import RunError
from ..report import plots
from ..report.html import beside, code, document, element, join, learning_curves, section, table
from ..training import runs
from ..training.config import Batches, Config, Data, Evaluation, Model, Optimizer, Protocol, Zoneout
from ..training.exit_codes import INTERRUPTED
from ..training.measures import in_measure
from ..training.processes import obey_the_parent, threads_of_each
from ..training.progress import duration, watch
from ..training.sample import sample
from ..training.train import stop_requests, train

PLAIN, ZONED = "unregularised", "zoneout"  # the names of the runs and of their folders
RATES = Zoneout(cell=0.5, hidden=0.05)
LABELS = {PLAIN: PLAIN, ZONED: f"zoneout {RATES.cell:g}, {RATES.hidden:g}"}
LEAST = 2_000  # minimum number of characters to train on
HELD_OUT = 10_000  # number of characters in the validation part, and also in the test part
PROMPT = "The "


@dataclass(frozen=True)
class Demo:
    """Train an LSTM without and with zoneout, and compare the two.

    $ zoneout demo
    $ zoneout demo --characters 250000 --out runs/more-text
    """

    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """The folder for both runs and the results; by default a new folder in runs/."""
    characters: int = 37_000
    """Number of characters to train on. The text is the manual that comes with Python."""
    updates: int = 1500
    """Number of training updates for each model."""
    hidden: int = 256
    """Number of hidden units of each model."""
    seed: int = 1
    """Seed of the initial weights, the order of the batches and the masks, for both models."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the matrix products in training."""

    def __call__(self) -> int:
        for name in ("characters", "updates", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}: expected a number above 0, got {getattr(self, name)}")
        if self.characters < LEAST:
            raise ValueError(f"--characters: expected at least {LEAST:,}, got {self.characters}")
        folder = self.out or disk.free_folder(Path("runs") / "demo")
        if folder.exists() and any(folder.iterdir()):
            raise RunError(
                f"{folder} is not empty; choose another folder with --out. Nothing was overwritten."
            )
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
        """Write the text and train both models on it; return the final status of each run."""
        text = write_text(folder / "text", self.characters)
        # Twenty streams give almost the same result as one sequence, and are twenty times as fast.
        streams = Protocol("streams", size=20, length=500)
        plain = Config(
            data=text,
            batches=Batches(length=50),
            model=Model(hidden=self.hidden, embedding=0),
            optimizer=Optimizer(lr=0.006, clip_gradient=1.0),
            evaluation=Evaluation(valid=streams, test=streams, every=max(1, self.updates // 30)),
            epochs=self.updates,  # never reached: `updates` ends the run first
            updates=self.updates,
            log_every=max(1, self.updates // 30),
            seed=self.seed,
            precision=self.precision,
            device="cpu",
        )
        configs = {PLAIN: plain, ZONED: replace(plain, zoneout=RATES)}
        say(fill(introduction(self, folder), columns()) + "\n")
        return side_by_side(configs, folder)


def begun(folder: Path) -> list[Path]:
    """Return the folders of the runs that have been started."""
    return [folder / name for name in (PLAIN, ZONED) if (folder / name / "config.json").exists()]


def clear(folder: Path, made: bool) -> None:
    """Remove the files of a demo that started no run; also remove its folder if the demo `made` it.

    Otherwise the same command would later refuse the folder, or choose another one.
    """
    for name in ("text", PLAIN, ZONED):
        shutil.rmtree(folder / name, ignore_errors=True)
    if made:
        with suppress(OSError):  # the folder does not exist, or contains other files
            folder.rmdir()


def interrupted(folder: Path) -> str:
    """Return the message after an interrupted demo: which runs can be continued, and how."""
    kept = begun(folder)
    if not kept:
        return "Interrupted before a run was started; all files of the demo were removed."
    both = len(kept) > 1
    what = (
        "both runs are kept. Each"
        if both
        else f"the {kept[0].name} run is kept, the other was not started. It"
    )
    again = "\n".join(f"  zoneout train --resume --out {shlex.quote(str(run))}" for run in kept)
    return f"Interrupted; {what} can be continued:\n{again}"


def write_text(folder: Path, characters: int) -> Data:
    """Cut training, validation and test text from Python's manual, and write them to files.

    Every paragraph is used once, in a random order: the three parts then have the same topics but
    no paragraph in common. Tables, underlined headings and very long paragraphs are left out: a
    single one would be a large share of such a small text.
    """
    corpus = corpora.load("python")
    whole = "".join(
        corpus.vocabulary.decode(part) for part in (corpus.train, corpus.valid, corpus.test)
    )
    ruled = re.compile(r"([^\w\s])\1{3}")
    paragraphs = sorted(
        {p for p in whole.split("\n\n") if 80 < len(p) < 1000 and not ruled.search(p)}
    )
    random.Random(0).shuffle(paragraphs)
    text = "\n\n".join(paragraphs)
    if characters > len(text) - 2 * HELD_OUT:
        raise ValueError(
            f"--characters: expected at most {len(text) - 2 * HELD_OUT:,} (all of the text), got "
            f"{characters:,}"
        )
    valid = text[:HELD_OUT]
    test = text[HELD_OUT : 2 * HELD_OUT]
    train_ = text[2 * HELD_OUT :][:characters]
    with disk.explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in (("train", train_), ("valid", valid), ("test", test)):
            disk.write_text(folder / f"{name}.txt", part)
    train_file, valid_file, test_file = (
        str((folder / f"{n}.txt").absolute()) for n in ("train", "valid", "test")
    )
    return Data(name=train_file, valid=valid_file, test=test_file)


def introduction(demo: Demo, folder: Path) -> str:
    """Return the paragraph that explains the experiment."""
    return (
        f"Two LSTMs of {demo.hidden} units learn to predict the next character of Python's manual: "
        f"one without regularisation, one with zoneout (rate {RATES.cell:g} for the cell state, "
        f"{RATES.hidden:g} for the hidden state). Both train for {demo.updates:,} updates on the "
        f"same {demo.characters:,} characters, with the same initial weights and the same order of "
        f"batches. Both are evaluated on {HELD_OUT:,} other characters. All files go to {folder}."
    )


# --- training both models -------------------------------------------------------------------------


def side_by_side(configs: dict[str, Config], folder: Path) -> dict[str, str]:
    """Train all models at the same time and show their progress; return the final status of each.

    Each model has a process, not a thread: so each has its own torch threads and signal handlers.
    """
    context = multiprocessing.get_context("spawn")
    events: Any = context.Queue()
    threads = threads_of_each(len(configs))
    workers = {
        name: context.Process(
            target=work, args=(name, config, str(folder / name), threads, events), name=name
        )
        for name, config in configs.items()
    }
    ended: dict[str, str] = {}
    # While `stop_requests` is active, Ctrl-C raises no exception, so no event is read only in part.
    with stop_requests() as stopped:
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
                    worker.terminate()  # SIGTERM: the worker writes a checkpoint before it ends
            # A worker ends only when all its events have been read from the queue.
            while any(worker.is_alive() for worker in workers.values()):
                with suppress(queue.Empty):
                    events.get(timeout=0.1)
    return {name: ended.get(name, "interrupted") for name in configs}


def work(name: str, config: Config, folder: str, threads: int, events: Any) -> None:
    """Train one model; runs in a worker process."""
    obey_the_parent()
    torch.set_num_threads(threads)
    # `train` handles signals only while it runs. Before and after that, a signal must not interrupt
    # the writing of an event either.
    with stop_requests():
        try:
            train(config, folder, progress=lambda event: events.put((name, event)))
        except KeyboardInterrupt:
            pass
        except Exception as error:
            events.put((name, error))


def check_alive(workers: dict[str, Any], ended: dict[str, str]) -> None:
    """Raise if a worker process died without reporting an error (out of memory, for example)."""
    for name, worker in workers.items():
        if name not in ended and worker.exitcode is not None:
            raise RunError(
                f"the process that trained the {name} model ended early, with exit code "
                f"{worker.exitcode}"
            )


# --- results --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The results of one model, in bits per character."""

    name: str
    best: float  # best validation
    at: int  # update of the best validation
    test: float
    train: float  # last training loss
    seconds: float


def result(folder: Path, name: str) -> Result:
    """Read the results of a run from its files."""
    rows, ended = runs.read_metrics(folder / name), disk.read_json(folder / name / "summary.json")
    trained = [in_measure(row["nats"], "bits") for row in rows if row["kind"] == "train"]
    best, test = ended["best"], ended["test"]
    return Result(name, best["bits"], best["update"], test["bits"], trained[-1], ended["seconds"])


ROWS: list[tuple[str, Callable[[Result], str]]] = [
    ("best validation", lambda r: f"{r.best:.3f}"),
    ("… at update", lambda r: f"{r.at:,}"),
    ("test with these weights", lambda r: f"{r.test:.3f}"),
    ("final training loss", lambda r: f"{r.train:.3f}"),
    ("time", lambda r: duration(r.seconds)),
]


def report(demo: Demo, folder: Path) -> None:
    """Print the table and a sample, and write the picture and the page."""
    results = [result(folder, name) for name in (PLAIN, ZONED)]
    better = min(results, key=lambda r: r.best)
    curves = [plots.read_curve(folder / name, LABELS[name]) for name in (PLAIN, ZONED)]
    fig = plots.figure(
        curves, "Bits per character on unseen text (solid) and on the training text (dashed)"
    )
    for suffix in ("png", "svg"):
        plots.save(fig, folder / f"curves.{suffix}")
    written = {
        name: PROMPT
        + "".join(sample(runs.load(folder / name), PROMPT, length=400, temperature=0.6, seed=1))
        for name in (PLAIN, ZONED)
    }
    html = page(demo, results, better, curves, written, folder)
    disk.write_text(folder / "index.html", html)

    show(f"\n{'bits per character':26}{LABELS[PLAIN]:>20}{LABELS[ZONED]:>20}")
    for label, value in ROWS:
        show(f"{label:26}{value(results[0]):>20}{value(results[1]):>20}")
    screen = shutil.get_terminal_size((100, 24)).columns
    show(f"\n{plots.ascii_curves(curves, min(screen, 160), 12)}")
    show(f"\n{fill(verdict(results), columns())}")
    show(f"\nText generated after {PROMPT!r}:\n")
    show(samples({LABELS[name]: text for name, text in written.items()}, screen))
    show(f"\nCommands to try next{where_it_is()}:")
    for command, why in suggestions(folder, better):
        show(f"  {command}\n      {why}")
    show(
        f"\nLearning curves: {folder / 'curves.png'}\nAll results on one page: "
        f"{folder / 'index.html'}"
    )


def samples(texts: dict[str, str], width: int) -> str:
    """Return the texts under their names: beside each other if the terminal is wide enough.

    >>> print(samples({"one": "a b", "two": "c"}, 20))
      one:
      a b
    <BLANKLINE>
      two:
      c
    """
    room = min(width // 2, 80) if width >= 120 else min(width, 100)
    blocks = [
        [
            f"  {name}:",
            *(
                part
                for line in text.splitlines()
                for part in wrap(line, room - 2, initial_indent="  ", subsequent_indent="  ")
                or [""]
            ),
        ]
        for name, text in texts.items()
    ]
    if width < 120:
        return "\n\n".join("\n".join(block) for block in blocks)
    return "\n".join(
        "".join(f"{line:{room}}" for line in lines).rstrip()
        for lines in zip_longest(*blocks, fillvalue="")
    )


def where_it_is() -> str:
    """Return a note with the path of the command `zoneout` if it is not on PATH, otherwise "".

    `make demo` runs the command from a virtual environment, which is usually not on PATH.
    """
    script = Path(sys.executable).parent / "zoneout"
    if shutil.which("zoneout") or not script.exists():
        return ""
    return (
        " (zoneout is "
        f"{script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script})"
    )


def columns() -> int:
    """Return the width of printed paragraphs, in characters."""
    return min(shutil.get_terminal_size((100, 24)).columns, 100)


def verdict(results: list[Result]) -> str:
    """Return a paragraph that compares the best validations of the two models."""
    plain, zoned = results
    gap = plain.best - zoned.best
    if gap > 0.01:
        return (
            f"At its best validation, the zoneout model needs {gap:.2f} bits less per character of "
            "unseen text. The unregularised model soon memorises such a small text, and then gets "
            "worse on other text. Zoneout prevents this. With several times as much text, the "
            "unregularised model is still better after the same number of updates: it has no time "
            "to memorise the text, and zoneout learns more slowly."
        )
    found = "Here the two models are as good as each other."
    if gap < -0.01:
        found = f"Here the unregularised model is better, by {-gap:.2f} bits per character."
    return found + (
        " Zoneout learns more slowly. It helps when training is long enough for a model to "
        "memorise its text: with more updates than here, or with less text."
    )


def suggestions(folder: Path, better: Result) -> list[tuple[str, str]]:
    """Return commands to try next, each with its purpose."""
    run = shlex.quote(str(folder / better.name))
    return [
        (f'zoneout sample {run} --prompt "If " --temperature 0.5', "generate more text"),
        (
            "zoneout demo --characters 250000",
            "the same comparison with more text, where zoneout does not win",
        ),
        (
            "zoneout train --data my.txt --zoneout.cell 0.5 --zoneout.hidden 0.05",
            "train on your text file my.txt",
        ),
        ("zoneout train --help", "show all training options"),
    ]


def page(
    demo: Demo,
    results: list[Result],
    better: Result,
    curves: Sequence[plots.Curve],
    written: dict[str, str],
    folder: Path,
) -> str:
    """Return the HTML page with all results; it needs no other file."""
    rows = [[label, *(value(r) for r in results)] for label, value in ROWS]
    numbers = table(
        "In bits per character; lower is better.",
        [["Measure", *(LABELS[r.name] for r in results)]],
        rows,
        "models",
    )
    parts = beside(
        join([numbers, element("p", verdict(results))]),
        join(learning_curves(curves, "On unseen text (solid) and on the training text (dashed).")),
    )
    texts = beside(
        *(
            join([element("h3", LABELS[name]), element("pre", text)])
            for name, text in written.items()
        )
    )
    heading = f"Text generated after “{PROMPT}”"
    tries = [
        join([element("dt", code(what)), element("dd", why)])
        for what, why in suggestions(folder, better)
    ]
    sections = [
        ("results", "Results", section("results", "Results", parts)),
        ("sample", "Generated text", section("sample", heading, texts)),
        ("next", "Next steps", section("next", "Commands to try next", element("dl", *tries))),
    ]
    lead = element("p", introduction(demo, folder), class_="columns")
    footer = element("p", "Made by ", code("zoneout demo"), ".")
    return document("An LSTM without and with zoneout", lead, sections, footer)
