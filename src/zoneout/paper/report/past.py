"""The section "Past the paper": regularised LSTMs of later years, and two tasks beyond text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from .. import disk
from ..experiments.recipes import RECIPES
from ..experiments.results import Record
from ..training.measures import SPREADS
from .html import Html, code, element, section, table

ON_TOP, IN_PLACE = "on top of AWD-LSTM", "in place of DropConnect in AWD-LSTM"
ARMS = (  # as published, with zoneout, and how: the arms of the plan
    ("word_ptb_awd", "word_ptb_awd_zoneout", ON_TOP),
    ("word_ptb_awd", "word_ptb_awd_zoneout_only", IN_PLACE),
    ("char_ptb_awd", "char_ptb_awd_zoneout", ON_TOP),
)
CORPORA = {
    "word_ptb_awd": "word-level Penn Treebank",
    "char_ptb_awd": "character-level Penn Treebank",
}
# By the plan, two seeds on each side decide by their sides; one seed by more than this difference.
LEAST_BITS, LEAST_SHARE = 0.005, 0.01
ROUNDING = 1e-9  # of a difference of exactly that much, which does not count
GRID = (
    "The rates were chosen by short runs, which favours weak ones: a bias against zoneout that the "
    "plan names."
)
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
        "The plan of these runs, with the rule for what counts as a difference, was written before "
        "the first of them: ",
        code("docs/past-the-paper.md"),
        ".",
    )
    said = [sentence(*arm, own) for arm in ARMS]
    answer = element("p", " ".join([*said, GRID] if any(own[arm] for _, arm, _ in ARMS) else said))
    return section("past", "Past the paper", answer, plan, *tables, *others)


def sentence(plain: str, noisy: str, how: str, own: dict[str, list[Record]]) -> str:
    """Return what zoneout changes in a published model by the plan's rule, or what is missing."""
    planned = {name: RECIPES[name].seeds for name in (plain, noisy)}
    ran = {name: [r for r in own[name] if r["seed"] in planned[name]] for name in planned}
    if any(len(ran[name]) < len(planned[name]) for name in planned):
        return f"Whether zoneout helps {how} is not measured yet for {CORPORA[plain]}."
    before, after = ([record["test"] for record in ran[name]] for name in (plain, noisy))
    measure, config = RECIPES[plain].measure, RECIPES[noisy].make()
    digits = SPREADS[measure]
    rates = f"{config.zoneout.cell:g}, {config.zoneout.hidden:g}"
    gain = fmean(after) - fmean(before)
    numbers = (
        f"{spread(after, digits)} with it ({count(after)}), {spread(before, digits)} without "
        f"({count(before)}), a difference of {gain:+.{digits}f}".replace("-", "−")
    )
    found = effect(before, after, measure)
    return f"On {CORPORA[plain]}, zoneout at {rates} {how} {found}: {numbers}."


def effect(before: Sequence[float], after: Sequence[float], measure: str) -> str:
    """Return what the plan's rule says of two lists of test scores.

    >>> effect([58.8, 58.9], [58.6, 58.7], "perplexity")
    'lowers the test score'
    >>> effect([58.8, 58.9], [58.6, 58.8], "perplexity")
    'makes no difference in the test that two seeds can show'
    >>> effect([1.175], [1.18], "bits"), effect([1.175], [1.181], "bits")
    ('makes no difference in the test above 0.005 bits', 'raises the test score')
    """
    if min(len(before), len(after)) > 1:
        lower, higher = max(after) < min(before), min(after) > max(before)
        none = "that two seeds can show"
    else:
        gain = fmean(after) - fmean(before)
        least = LEAST_BITS if measure == "bits" else LEAST_SHARE * fmean(before)
        lower, higher = gain < -least - ROUNDING, gain > least + ROUNDING
        none = f"above {LEAST_BITS:g} bits" if measure == "bits" else f"above {LEAST_SHARE:.0%}"
    if lower or higher:
        return f"{'lowers' if lower else 'raises'} the test score"
    return f"makes no difference in the test {none}"


def count(values: Sequence[float]) -> str:
    return f"{len(values)} seed{'s' * (len(values) > 1)}"


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
