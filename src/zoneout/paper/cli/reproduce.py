"""The command `reproduce`: options, and the files that it writes.

It uses argparse, so that `python -m zoneout.paper.reproduce` also runs where only torch, numpy and
safetensors are installed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import console, disk
from ..disk import RunError
from ..experiments import holds_up
from ..experiments.recipes import MEASURES
from ..experiments.reproduce import CODES, OPTIONS, RESULTS, RUNS, State, reproduce
from ..experiments.results import BEGIN, document, missing_text, put_summary, table
from ..training.unused_options import refuse_given

PAGE, README = Path("docs/results.md"), Path("README.md")  # the files that hold the tables
CLAIMS = Path("docs/holds-up.md")
TRIALS = Path("runs/trials")


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the argument parser. It uses `argparse`, so that only torch's dependencies are
    needed.
    """
    found = argparse.ArgumentParser(
        prog=prog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "Run the rows of the paper's tables that have no record yet; print the table after "
            "each."
        ),
        epilog=f"""examples:

$ {prog} char-ptb                                  # the rows of Table 1
$ {prog} char-ptb zoneout unregularised --seeds 3 --precision bf16
$ {prog} pmnist all --parallel 3                   # also figures and text, three runs at a time
$ {prog} char_ptb_zoneout --minutes 8              # stop after 8 minutes; repeat to resume
$ {prog} quick                                     # six methods in ten minutes, without a GPU
$ {prog} char_ptb_gru word_ptb_zoneout             # recipes of any task
$ {prog}                                           # print the tables and what is missing
$ {prog} --write                                   # write the documents' tables

tasks: {", ".join(MEASURES)}""",
    )
    add = found.add_argument
    add("task", metavar="TASK", nargs="?", help="a task, or a recipe by its name")
    add(
        "rows",
        metavar="ROW",
        nargs="*",
        help="rows or recipes (default: the paper's tables); `all` adds figures",
    )
    add("--seeds", metavar="N", type=int, help="number of seeds (those that each recipe states)")
    add("--first-seed", metavar="N", type=int, help="the first seed (1; alone: this seed only)")
    add(
        "--out",
        metavar="DIR",
        type=Path,
        help="folder for the runs (runs/reproduce; with --set runs/trials)",
    )
    add(
        "--results",
        metavar="DIR",
        type=Path,
        help="folder for the records (results; with --set runs/trials/results)",
    )
    precisions = ("fp32", "tf32", "bf16", "fp16")
    add(
        "--precision",
        choices=precisions,
        help="precision of the matrix products in training (fp32, or what the row is about)",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add(
        "--data",
        metavar="DIR",
        type=Path,
        help="folder with the data, searched before ZONEOUT_DATA",
    )
    add(
        "--minutes",
        metavar="M",
        type=float,
        default=math.inf,
        help="stop after M minutes, with a checkpoint",
    )
    add(
        "--parallel",
        metavar="N",
        type=int,
        default=1,
        help="number of runs at the same time on the device (1)",
    )
    add(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="change a setting of the recipe, for a trial",
    )
    add(
        "--write",
        metavar="FILE",
        nargs="?",
        const=PAGE,
        type=Path,
        help=f"write {PAGE}, {CLAIMS} and the table of {README}",
    )
    return found


def _seeds(first: int | None, count: int | None) -> Sequence[int] | None:
    """Return the seeds of the options, or None for those of each recipe."""
    if first is None and count is None:
        return None
    return range(first or 1, (first or 1) + (1 if count is None else count))


def main(arguments: Sequence[str] | None = None, prog: str = "zoneout reproduce") -> int:
    """Reproduce the paper's tables: run missing rows, and compare the results with the paper."""
    command = parser(prog)
    options = command.parse_args(arguments)
    pairs = [setting.partition("=") for setting in options.set]
    for name, equals, _ in pairs:
        if not equals:
            raise ValueError(f"--set: expected a name and a value, as in epochs=1, got {name!r}")
        if name in OPTIONS:
            raise ValueError(
                f"--set: expected a setting of the recipe, got {name}; {OPTIONS[name]} is for that"
            )
    if options.task is None:
        of_runs = (
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
        refuse_given(
            of_runs, options, command.get_default, "without a TASK nothing is run; say which"
        )
    # A trial has its own folders, so that it neither uses nor replaces the recipe's record.
    out = options.out or (TRIALS if pairs else RUNS)
    results = options.results or (TRIALS / "results" if pairs else RESULTS)
    if options.write == PAGE and pairs:
        raise ValueError(
            f"--write: expected a file of its own for trials (--set), since {PAGE} is of the "
            "recipes"
        )
    if (
        options.write is not None
        and options.task is None
        and not any(results.glob("*/seed-*.json"))
    ):
        raise RunError(f"there are no records in {results}, so that --write would empty the tables")
    if options.write is not None and not options.write.parent.is_dir():
        raise ValueError(
            f"--write: there is no folder {options.write.parent} here for {options.write.name}; "
            "--write FILE says "
            "which file to write instead"
        )
    state: State = "finished"
    said = console.heard(sys.stdout)  # the tables shown while running are progress, not the result
    if options.task is not None:
        state = reproduce(
            options.task,
            options.rows,
            _seeds(options.first_seed, options.seeds),
            out=out,
            results=results,
            data=options.data,
            precision=options.precision,
            device=options.device,
            minutes=options.minutes,
            parallel=options.parallel,
            settings={name: value for name, _, value in pairs},
            say=lambda text: console.show(text, said),
        )
    elif options.write is None:
        console.show(f"{table(results)}\n\n{missing_text(results)}")
    if options.write is not None:
        with disk.explained(options.write):
            disk.write_text(options.write, document(results))
            text = disk.read_text(README) if README.exists() else ""
            if BEGIN in text and options.write == PAGE:
                disk.write_text(README, put_summary(text, results))
            if options.write == PAGE:
                disk.write_text(CLAIMS, holds_up.document(results))
    return CODES[state]
