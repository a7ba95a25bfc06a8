"""The command `reproduce`: options, and the files that it writes."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from .. import console, disk
from ..disk import RunError
from ..experiments import holds_up
from ..experiments.reproduce import CODES, OPTIONS, RESULTS, RUNS, State, reproduce
from ..experiments.results import BEGIN, document, missing_text, put_summary, table
from ..training.unused_options import refuse_given
from .options import Flag, Positional, UseAppendAction, arg

PAGE, README = Path("docs/results.md"), Path("README.md")  # the files that hold the tables
CLAIMS = Path("docs/holds-up.md")
TRIALS = Path("runs/trials")
OF_RUNS = (
    "seeds",
    "first_seed",
    "out",
    "precision",
    "device",
    "data",
    "minutes",
    "parallel",
    "set",
)


@dataclass(frozen=True)
class Reproduce:
    """Reproduce the paper's tables: run missing rows, compare the results.

    A run that was interrupted is continued. The table is printed after each run.

    $ zoneout reproduce char-ptb
    $ zoneout reproduce char-ptb zoneout unregularised --seeds 3 --precision bf16
    $ zoneout reproduce pmnist all --parallel 3
    $ zoneout reproduce quick
    $ zoneout reproduce char_ptb_gru word_ptb_zoneout --minutes 8
    $ zoneout reproduce --write
    """

    task: Annotated[str | None, Positional, arg(metavar="[TASK]")] = None
    """A recipe, or a task. Without it nothing is run: the tables and what is missing are printed.
    tasks: char-ptb, word-ptb, text8, text8-prefix, pmnist, pmnist-permuted, gradient-flow.
    quick: six methods on char-ptb in ten minutes, without a GPU.
    """
    rows: Annotated[tuple[str, ...], Positional, arg(metavar="[ROW …]")] = ()
    """Rows of the task, or more recipes; by default the rows of the paper's tables.
    all: also those of the paper's figures and text.
    """
    seeds: int | None = None
    """Number of seeds of each row; by default those that its recipe states."""
    first_seed: int | None = None
    """The first seed, by default 1; without --seeds, this seed alone."""
    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """The folder for the runs; by default runs/reproduce, with --set runs/trials."""
    results: Annotated[Path | None, arg(metavar="DIR")] = None
    """The folder for the records; by default results, with --set runs/trials/results."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = None
    """Precision of the matrix products in training; by default fp32, or what the row is about."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    data: Annotated[Path | None, arg(metavar="DIR")] = None
    """A folder with the data, searched before ZONEOUT_DATA."""
    minutes: Annotated[float | None, arg(metavar="M")] = None
    """Stop after this many minutes, with a checkpoint; the same command goes on."""
    parallel: int = 1
    """Number of runs at the same time on the device."""
    set: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="NAME=VALUE")] = ()
    """Change a setting of the recipe, for a trial, which has its own folders."""
    write: Flag = False
    """Write the tables to --page, the verdicts to docs/holds-up.md and a table to README.md."""
    page: Path = PAGE
    """Only with --write: the page for the tables. For another page, the others are left alone."""

    def __call__(self) -> int:
        pairs = [setting.partition("=") for setting in self.set]
        for name, equals, _ in pairs:
            if not equals:
                raise ValueError(
                    f"--set: expected a name and a value, as in epochs=1, got {name!r}"
                )
            if name in OPTIONS:
                raise ValueError(
                    f"--set: expected a setting of the recipe, got {name}; {OPTIONS[name]} is for "
                    "that"
                )
        if self.task is None:
            why = "without a TASK nothing is run; say which"
            refuse_given(OF_RUNS, self, lambda name: getattr(Reproduce, name), why)
        # A trial has its own folders, so that it neither uses nor replaces the recipe's record.
        out = self.out or (TRIALS if pairs else RUNS)
        results = self.results or (TRIALS / "results" if pairs else RESULTS)
        if self.write:
            self.check_page(results)
        else:
            refuse_given(["page"], self, lambda name: PAGE, "only --write writes it; add --write")
        state: State = "finished"
        # The tables that are shown while running are progress, not the result.
        screen = console.forgiving(sys.stdout)
        if self.task is not None:
            state = reproduce(
                self.task,
                self.rows,
                self.chosen_seeds(),
                out=out,
                results=results,
                data=self.data,
                precision=self.precision,
                device=self.device,
                minutes=math.inf if self.minutes is None else self.minutes,
                parallel=self.parallel,
                settings={name: value for name, _, value in pairs},
                say=lambda text: console.show(text, screen),
            )
        elif not self.write:
            console.show(f"{table(results)}\n\n{missing_text(results)}")
        if self.write:
            with disk.explained(self.page):
                disk.write_text(self.page, document(results))
                text = disk.read_text(README) if README.exists() else ""
                if BEGIN in text and self.page == PAGE:
                    disk.write_text(README, put_summary(text, results))
                if self.page == PAGE:
                    disk.write_text(CLAIMS, holds_up.document(results))
        return CODES[state]

    def chosen_seeds(self) -> Sequence[int] | None:
        """Return the seeds of the options, or None for those of each recipe."""
        if self.first_seed is None and self.seeds is None:
            return None
        first = self.first_seed or 1
        return range(first, first + (1 if self.seeds is None else self.seeds))

    def check_page(self, results: Path) -> None:
        """Raise if the tables cannot be written, before hours of training."""
        if self.page == PAGE and self.set:
            raise ValueError(
                f"--write: expected a --page of its own for trials (--set), since {PAGE} is of the "
                "recipes"
            )
        if self.task is None and not any(results.glob("*/seed-*.json")):
            raise RunError(
                f"there are no records in {results}, so that --write would empty the tables"
            )
        if not self.page.parent.is_dir():
            raise ValueError(
                f"--write: there is no folder {self.page.parent} here for {self.page.name}; "
                "--page FILE says which file to write instead"
            )
