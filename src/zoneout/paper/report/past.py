"""The section "Past the paper": regularised LSTMs of later years, and two tasks beyond text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from .. import disk
from ..experiments.recipes import RECIPES
from ..experiments.results import Record
from ..training.measures import rounded
from .html import Html, code, element, section, table

PAIRS = (("word_ptb_awd", "word_ptb_awd_zoneout"), ("char_ptb_awd", "char_ptb_awd_zoneout"))
CORPORA = {
    "word_ptb_awd": "word-level Penn Treebank",
    "char_ptb_awd": "character-level Penn Treebank",
}
TUNING = 100  # seeds from here on chose rates, and are not part of the answer
TASKS = {  # folders of the records: the caption, and the names of their numbers with the decimals
    "elnino": (
        "El Niño: root mean squared error of forecasts, in degrees; lower is better",
        {"valid": ("validation", 3), "test": ("test", 3)},
    ),
    "cartpole": (
        "CartPole with hidden velocities: mean return; higher is better",
        {"training": ("in training", 1), "test": ("in evaluation", 1)},
    ),
}


def past_section(results: Path, own: dict[str, list[Record]], tables: Sequence[Html]) -> Html:
    """Return the section: the answer, the tables of recipes, and those of the other two tasks."""
    others = [task_table(results, name) for name in TASKS]
    plan = element(
        "p",
        "The plan of these runs was written before the first of them: ",
        code("docs/past-the-paper.md"),
        ".",
    )
    answer = element("p", " ".join(map(sentence, PAIRS, [own] * len(PAIRS))))
    return section("past", "Past the paper", answer, plan, *tables, *others)


def sentence(pair: tuple[str, str], own: dict[str, list[Record]]) -> str:
    """Return what zoneout on top of a published model changes, or that it was not run."""
    plain, noisy = pair
    if not (own[plain] and own[noisy]):
        return f"Whether zoneout helps on top of AWD-LSTM is not measured yet for {CORPORA[plain]}."
    before, after = (fmean(r["test"] for r in own[name]) for name in pair)
    measure = RECIPES[plain].measure
    verb = "lowers" if after < before else "raises"
    return (
        f"On {CORPORA[plain]}, zoneout on top of AWD-LSTM {verb} the test score from "
        f"{rounded(before, measure)} to {rounded(after, measure)} ({len(own[plain])} and "
        f"{len(own[noisy])} runs)."
    )


def task_table(results: Path, task: str) -> Html:
    """Return the table of a task beyond text, made from its records."""
    caption, numbers = TASKS[task]
    arms: dict[tuple[str, bool], list[Any]] = {}
    for path in sorted(results.glob(f"{task}_*/seed-*.json")):
        record = disk.read_json(path)
        arms.setdefault((record["arm"], record["seed"] > TUNING), []).append(record)
    rows = []
    for (arm, tuning), found in sorted(arms.items(), key=lambda item: (item[0][1], item[0][0])):
        cells = [spread([r[name] for r in found], digits) for name, (_, digits) in numbers.items()]
        seeds = f"{len(found)}{', to choose rates' if tuning else ''}"
        rows.append([code(arm), *cells, seeds])
    head = [["Arm", *(title for title, _ in numbers.values()), "Seeds"]]
    if not rows:
        return element("p", f"{caption}: no records.")
    made = sorted({record["command"] for found in arms.values() for record in found})
    shown = table(f"{caption}. Made by {', '.join(made)}.", head, rows, f"past-{task}")
    return shown


def spread(values: Sequence[float], digits: int) -> str:
    """Format the mean, with the standard deviation of several values."""
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {stdev(values):.{digits}f}"
