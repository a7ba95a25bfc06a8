"""The paper's figures and the README's, drawn from the records in `results/`.

A figure shows the recipes that have records; the caption names those that have none. Curves of
several seeds share one colour. Gradient flow has its own records (`gradients`); all other figures
use `results`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any, TypeAlias

import numpy as np

from ..disk import RunError
from ..experiments import gradient_flow
from ..experiments.recipes import RECIPES, Recipe
from ..experiments.recipes.char_ptb import RATES_EPOCHS
from ..experiments.results import Record, best_epoch, best_within, fitting, named
from ..training.config import several
from ..training.measures import UNITS, in_measure, rounded
from . import plots
from .plots import COLOURS, DASHED, INK, MARKERS, PAPER, SOFT

Records: TypeAlias = dict[str, list[Record]]  # by recipe; recipes without records are left out


@dataclass(frozen=True)
class Drawn:
    """A figure, its description in words, and the recipes that have no records."""

    name: str
    title: str
    where: str  # in the paper
    figure: Any  # of matplotlib
    text: str
    missing: tuple[str, ...]  # recipes
    recipes: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """How to draw a figure; its arms are recipes."""

    title: str
    where: str
    arms: tuple[str, ...]
    draw: Callable[[Records], tuple[Any, str]]
    read: Callable[[Recipe, Path], list[Record]]
    in_place_of: str = ""  # replaces this figure on the page while that one has no results


def own_records(recipe: Recipe, results: Path) -> list[Record]:
    """Return the records that have the recipe's own settings."""
    return fitting(recipe, results)[0]


def flow_records(recipe: Recipe, results: Path) -> list[Record]:
    """Return the gradient-flow records of a recipe in the order of their seeds."""
    found = map(gradient_flow.read_record, (results / recipe.name).glob("gradients-seed-*.json"))
    return sorted(found, key=lambda record: int(record["seed"]))


def draw(name: str, results: Path | str) -> Drawn:
    """Draw a figure by its name."""
    plans = FIGURES | {OVERVIEW: WITH_AND_WITHOUT} | CLAIMS
    if name not in plans:
        raise ValueError(f"figure: expected one of {', '.join(plans)}, got {name!r}")
    plan, results = plans[name], Path(results)
    found = {arm: plan.read(RECIPES[arm], results) for arm in plan.arms}
    records = {arm: each for arm, each in found.items() if each}
    missing = tuple(arm for arm in plan.arms if arm not in records)
    figure, text = plan.draw(records) if records else (_nothing(), "Nothing to draw yet.")
    if missing:
        note = fill(f"No results yet: {', '.join(missing)}", 78, break_on_hyphens=False)
        figure.supxlabel(note, fontsize=7.5, color=SOFT, x=0.02, ha="left")
    return Drawn(name, plan.title, plan.where, figure, text, missing, plan.arms)


def draw_all(results: Path | str) -> list[Drawn]:
    """Draw the page's figures, without empty ones that another figure replaces."""
    drawn = {name: draw(name, results) for name in FIGURES}
    empty = {name for name, one in drawn.items() if one.missing == one.recipes}
    replaced = {FIGURES[name].in_place_of for name in drawn.keys() - empty}
    return [one for name, one in drawn.items() if name not in empty & replaced]


def caption(drawn: Drawn) -> tuple[str, list[Any]]:
    """Return a caption: the finding, which is the first sentence, and the paragraphs after it."""
    finding, _, details = drawn.text.partition(". ")
    about = f"{drawn.title}; {drawn.where}."
    return finding.removesuffix("."), [details, about] if details else [about]


def save_all(
    results: Path | str, out: Path, kind: str = "svg", names: Sequence[str] = ()
) -> list[tuple[Path, Drawn]]:
    """Write figures to a folder, as svg, pdf or png; all of them by default."""
    made = []
    for name in names or FIGURES:
        drawn = draw(name, results)
        path = out / f"{name}.{kind}"
        try:
            plots.save(drawn.figure, path, drawn.title)
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror or error}") from None
        made.append((path, drawn))
    return made


def _nothing() -> Any:
    fig, (axes,) = plots.canvas(height=1.6)
    axes.set_axis_off()
    axes.text(0.5, 0.5, "Nothing to draw yet.", ha="center", va="center", color=INK)
    return fig


# --- learning curves ------------------------------------------------------------------------------


def curves(records: Records, *, train: bool = True) -> tuple[Any, str]:
    """Draw validation (solid) and optionally training (dashed) over epochs; images get separate
    axes.

    Several seeds are drawn as their mean and a band from the lowest to the highest.
    """
    measure = RECIPES[next(iter(records))].measure
    apart = train and measure == "error"  # the training loss of images is in nats
    known = [r["curve"].get("train_error") for runs in records.values() for r in runs]
    errors = apart and any(known)  # older records have the loss only
    fig, panels = plots.canvas(2 if apart else 1, (6.6 if apart else 3.9) + 0.1 * len(records))
    for number, (arm, runs) in enumerate(records.items()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        lines = [line_of(run, "valid") for run in runs]
        epochs = lines[0][0]
        # Short curves: mark every point. Long curves: spread the marks so that curves do not
        # share them.
        every: Any = 1 if len(epochs) <= 12 else (0.02 + 0.02 * number, 0.12)
        marked = {"marker": marker, "ms": 5, "mec": PAPER, "mew": 0.7, "markevery": every}
        band(panels[0], lines, color=colour, lw=1.8, label=labelled(arm, runs), **marked)
        if train:
            lines = [line_of(run, "train_error" if errors else "train_nats") for run in runs]
            if measure != "error":
                lines = [(e, [in_measure(nats, measure) for nats in v]) for e, v in lines]
            band(panels[-1], [line for line in lines if line[0]], color=colour, lw=1.1, ls=DASHED)
    panels[0].set(
        xlabel="epoch", ylabel=f"{UNITS[measure]}, validation" if apart else UNITS[measure]
    )
    panels[0].set_ylim(*limits(records, measure, train=train and not apart))
    if apart:
        label = f"{UNITS[measure]}, training" if errors else "training loss, nats"
        panels[1].set(xlabel="epoch", ylabel=label, xlim=panels[0].get_xlim())
    elif train:
        panels[0].plot([], [], color=SOFT, lw=1.1, ls=DASHED, label=plots.TRAINING)
    handles, labels = panels[0].get_legend_handles_labels()
    plots.legend(panels[-1], below=True, handles=handles, labels=labels)
    return fig, lowest(records) + (TRAINED if errors else "")


# Validation error of recurrent batch norm on permuted MNIST by epoch, read from the figure of
# Cooijmans and others, "Recurrent Batch Normalization", 2017.
PUBLISHED = {
    1: 0.455, 5: 0.218, 10: 0.153, 20: 0.106, 30: 0.090, 75: 0.062, 100: 0.063, 125: 0.055,
}  # fmt: skip
STATISTICS = {  # the curve of each kind of statistics
    "valid": "its own batch of 100",
    "by_running_averages": "running averages",
    "by_large_batches": "its own batch of 5,000",
}


def by_statistics(records: Records) -> tuple[Any, str]:
    """Draw the validation of batch norm by each kind of statistics, beside the published curve."""
    fig, (axes,) = plots.canvas(height=5.2)
    shown = [(arm, name) for arm in records for name in STATISTICS]
    shown = [(arm, name) for arm, name in shown if line_of(records[arm][0], name)[0]]
    words = []
    for number, (arm, name) in enumerate(shown):
        lines = [line_of(run, name) for run in records[arm]]
        label = f"{RECIPES[arm].row}: {STATISTICS[name]}"
        style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "label": label, "lw": 1.5}
        band(axes, lines, marker=MARKERS[number % len(MARKERS)], markevery=0.13, ms=4, **style)
        at = fmean(float(np.interp(125, *line)) for line in lines)
        words.append(f"{at:.3f} by {STATISTICS[name]} ({RECIPES[arm].row})")
    axes.plot(*zip(*PUBLISHED.items()), "D", mfc=PAPER, mec=INK, ms=6, label="published")
    axes.set(xlabel="epoch", ylabel=f"{UNITS['error']}, validation", ylim=(0.03, 0.3))
    plots.legend(axes, below=True)
    text = f"At epoch 125 the published curve is at {PUBLISHED[125]:.3f}, and ours at"
    return fig, f"{text} {'; '.join(words)}. Which statistics it has is not known."


TRAINED = (
    " The training error is that of the first 10,000 training images, without noise; runs made "
    "before it was recorded are left out of it."
)
Line: TypeAlias = tuple[list[float], list[float]]  # epochs and values


def line_of(record: Record, name: str) -> Line:
    """Return the points of a curve that have a value."""
    values = record["curve"].get(name) or []
    points = [(e, v) for e, v in zip(record["curve"]["epoch"], values) if v is not None]
    return [e for e, _ in points], [v for _, v in points]


def band(axes: Any, lines: Sequence[Line], *, color: str, **style: Any) -> None:
    """Draw the mean of the curves, and the range from the lowest to the highest as a band."""
    if not lines:
        return
    last = min(epochs[-1] for epochs, _ in lines)
    epochs = [epoch for epoch in lines[0][0] if epoch <= last]
    values = np.array([np.interp(epochs, *line) for line in lines])
    axes.plot(epochs, values.mean(0), color=color, **style)
    if len(lines) > 1:
        axes.fill_between(epochs, values.min(0), values.max(0), color=color, alpha=0.2, lw=0)


def lowest(records: Records) -> str:
    """Return a caption: which arm has the lowest validation, then the best of all others."""
    means = {arm: fmean(record["valid"] for record in runs) for arm, runs in records.items()}
    first, *others = sorted(records, key=lambda arm: means[arm])
    text = f"{best_of(first, records[first])}"
    if not others:
        return f"{text} is the best validation."
    rest = "; ".join(best_of(arm, records[arm]) for arm in others)
    return f"{text} is the lowest validation. Then follow {rest}."


def limits(records: Records, measure: str, *, train: bool) -> tuple[float, float]:
    """Return y limits from the lowest value to well above every arm's best."""
    best = [min(record["curve"]["valid"]) for runs in records.values() for record in runs]
    low, worst = min(best), max(best)
    every = [low]
    for record in (record for runs in records.values() for record in runs) if train else ():
        every += [
            in_measure(nats, measure) for nats in record["curve"]["train_nats"] if nats is not None
        ]
    top = worst + max(worst - low, 0.15 * low)
    return min(every) - 0.04 * (top - min(every)), top


def labelled(arm: str, runs: Sequence[Record]) -> str:
    return RECIPES[arm].row + (f" ({len(runs)} seeds)" if len(runs) > 1 else "")


def best_of(arm: str, runs: Sequence[Record]) -> str:
    """Return an arm's best validation score in words, with the paper's."""
    recipe, value = RECIPES[arm], fmean(record["valid"] for record in runs)
    found = f"{labelled(arm, runs)} {rounded(value, recipe.measure)} at epoch {best_epoch(runs)}"
    return found if recipe.valid is None else f"{found} (paper {recipe.valid})"


def validation_curves(records: Records) -> tuple[Any, str]:
    return curves(records, train=False)


def static_curves(records: Records) -> tuple[Any, str]:
    """Draw learning curves, and the score of the static-mask model evaluated with the
    expectation.
    """
    fig, text = curves(records)
    for arm, runs in records.items():
        if runs[0]["config"]["zoneout"]["mask"] != "static":
            continue
        way = named(RECIPES[arm].make().evaluation.valid)
        found = [
            score[record["measure"]]
            for record in runs
            for score in record["scores"]
            if (score["part"], score["protocol"], score["at_eval"]) == ("valid", way, "expectation")
        ]
        if found:
            value, axes = fmean(found), fig.axes[0]
            shown = rounded(value, runs[0]["measure"])
            axes.axhline(value, color=INK, lw=1, ls=":", label=f"static, by expectation: {shown}")
            low, high = axes.get_ylim()
            axes.set_ylim(low, max(high, value + 0.04 * (high - low)))
            plots.legend(axes, below=True)
            text += (
                " The static masks' model evaluated with the expectation instead of its masks: "
                f"{shown}."
            )
    return fig, text


def with_and_without(records: Records) -> tuple[Any, str]:
    """Draw the README's picture: training and validation with and without zoneout, labelled in
    place.
    """
    fig, (axes,) = plots.canvas(height=3.3, width=7.4)
    _, text = curves(records)
    epochs = max(record["epochs"] for runs in records.values() for record in runs)
    for colour, (arm, runs) in zip(COLOURS, records.items()):
        name = "with zoneout" if RECIPES[arm].make().zoneout.hidden else "without zoneout"
        for number, record in enumerate(runs):
            curve, style = record["curve"], {"color": colour, "alpha": 1.0 if number == 0 else 0.6}
            training = [nats / math.log(2) for nats in curve["train_nats"]]
            axes.plot(curve["epoch"], curve["valid"], lw=2.0 if number == 0 else 1.0, **style)
            axes.plot(curve["epoch"], training, lw=1.0, ls=DASHED, **style)
            if number == 0:
                # A label stands right of its curve, or above the end of a curve that fills the
                # width.
                full = curve["epoch"][-1] == epochs
                place: Any = {"ha": "right", "va": "bottom"} if full else {"va": "center"}
                for part, values in (("validation", curve["valid"]), ("training", training)):
                    at = (curve["epoch"][-1], values[-1])
                    apart = {"xytext": (0, 5) if full else (6, 0), "textcoords": "offset points"}
                    axes.annotate(
                        f"{part}, {name}", at, color=colour, fontsize=10, **apart, **place
                    )
    axes.set(xlabel="epoch", ylabel=UNITS["bits"], xlim=(0, 1.01 * epochs))
    axes.set_ylim(*limits(records, "bits", train=True))
    return fig, text


# --- rates ----------------------------------------------------------------------------------------

_PLAIN = "char_ptb_unregularised"
SERIES = {  # the lines of the rates figure: recipes in the order of their rates
    "zoneout on cells": (
        _PLAIN,
        "char_ptb_zoneout_cells_005",
        "char_ptb_zoneout_cells_025",
        "char_ptb_zoneout_cells_050",
    ),
    "zoneout on states": (
        _PLAIN,
        "char_ptb_zoneout_states_005",
        "char_ptb_zoneout_states_025",
        "char_ptb_zoneout_states_050",
    ),
    "zoneout on cells, states 0.05": (
        "char_ptb_zoneout_states_005",
        "char_ptb_zoneout_both_005_005",
        "char_ptb_zoneout_both_025_005",
        "char_ptb_zoneout",
    ),
    "zoneout on both alike": (
        _PLAIN,
        "char_ptb_zoneout_both_005_005",
        "char_ptb_zoneout_both_050_050",
    ),
    "recurrent dropout": (
        _PLAIN,
        "char_ptb_recurrent_dropout_005",
        "char_ptb_recurrent_dropout_020",
        "char_ptb_recurrent_dropout",
        "char_ptb_recurrent_dropout_050",
        "char_ptb_recurrent_dropout_070",
    ),
}
RATES = tuple(dict.fromkeys(arm for arms in SERIES.values() for arm in arms))


def rate_of(series: str, arm: str) -> float:
    """Return an arm's position on the rate axis of a line.

    >>> rate_of("zoneout on states", "char_ptb_zoneout_states_025")
    0.25
    >>> rate_of("recurrent dropout", _PLAIN)
    0.0
    """
    config = RECIPES[arm].make()
    if series == "recurrent dropout":
        return config.recurrent_dropout.rate
    zoneout = config.zoneout
    return several(zoneout.hidden if series == "zoneout on states" else zoneout.cell)[0]


def rates(records: Records) -> tuple[Any, str]:
    """Draw the best validation score within `RATES_EPOCHS`; several seeds give a mean and a
    min–max bar.
    """
    fig, (axes,) = plots.canvas(height=4.2)
    words = []
    for number, (series, arms) in enumerate(SERIES.items()):
        points = [
            (rate_of(series, arm), [best_within(r, RATES_EPOCHS) for r in records[arm]])
            for arm in arms
            if arm in records
        ]
        if not points:
            continue
        colour, marker = COLOURS[number], MARKERS[number]
        means = [fmean(values) for _, values in points]
        spread = [
            [mean - min(values) for mean, (_, values) in zip(means, points)],
            [max(values) - mean for mean, (_, values) in zip(means, points)],
        ]
        axes.errorbar(
            [rate for rate, _ in points], means, spread, color=colour, marker=marker, ms=6,
            mec=PAPER, lw=1.6, capsize=2, label=series,
        )  # fmt: skip
        rate, value = min(
            ((rate, mean) for (rate, _), mean in zip(points, means)), key=lambda pair: pair[1]
        )
        words.append((value, f"{series}, {rounded(value, 'bits')} at {rate:g}"))
    axes.set(xlabel="rate", ylabel=f"{UNITS['bits']}, best validation")
    plots.legend(axes, below=True)
    first, *others = [text for _, text in sorted(words)]
    rest = f" The best of the other lines: {'; '.join(others)}." if others else ""
    return fig, f"The best is {first}.{rest}"


# --- gradient flow --------------------------------------------------------------------------------

SHOWN = 1e-7  # fraction of the largest share below which nothing is drawn
STATES = {"cell": "share of ‖dL/dcₜ‖", "hidden": "share of ‖dL/dhₜ‖"}


def flow_figure(flows: dict[str, list[Record]]) -> Any:
    """Draw the last layer's gradient flow over time, one colour per arm: cells above, hidden
    states below.
    """
    found = {name: [_last_layer(record) for record in runs] for name, runs in flows.items()}
    states = [
        state
        for state in STATES
        if any(state in layer for runs in found.values() for layer in runs)
    ]
    fig, panels = plots.canvas(len(states), 2.9 * len(states) + 0.6)
    for axes, state in zip(panels, states):
        for number, (name, runs) in enumerate(found.items()):
            colour = COLOURS[number % len(COLOURS)]
            for which, layer in enumerate(layer for layer in runs if state in layer):
                share = [value if value > 0 else math.nan for value in layer[state]["share"]]
                apart = max(1, len(share) // 9)
                marked = {
                    "marker": MARKERS[number % len(MARKERS)],
                    "ms": 5,
                    "mec": PAPER,
                    "mew": 0.7,
                }
                marked |= {
                    "markevery": (apart * number // len(found), apart),
                    "label": name,
                    "lw": 1.6,
                }
                line = marked if which == 0 else {"lw": 0.9, "alpha": 0.7}
                axes.plot(range(1, len(share) + 1), share, color=colour, **line)
        axes.set(xlabel="step t", ylabel=STATES[state], yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.minorticks_off()
        bottom, top = axes.get_ylim()
        axes.set_ylim(max(bottom, top * SHOWN), top)
    plots.legend(panels[-1], below=True)
    return fig


def flows(records: Records) -> tuple[Any, str]:
    words: list[tuple[float, str]] = []
    for arm, runs in records.items():
        layers = [_last_layer(record) for record in runs]
        parts = []
        for state in (state for state in STATES if all(state in layer for layer in layers)):
            steps = fmean(gradient_flow.half_in_last(layer[state]["share"]) for layer in layers)
            parts.append(f"of dL/d{state[0]} in the last {steps:.0f}")
        words.append((steps, f"{labelled(arm, runs)}, {', '.join(parts)}"))
    every = len(next(iter(_last_layer(next(iter(records.values()))[0]).values()))["share"])
    furthest = "; ".join(text for _, text in sorted(words, reverse=True))
    text = (
        f"{max(words)[1].partition(',')[0]} reaches furthest back. Half of the norm lies in the "
        f"last steps of {every}: {furthest}."
    )
    return flow_figure({labelled(arm, runs): runs for arm, runs in records.items()}), text


def _last_layer(record: Record) -> dict[str, Any]:
    layers: dict[str, Any] = record["layers"]
    return list(layers.values())[-1]


# --- the figures of the claims --------------------------------------------------------------------


def dots(
    rows: Sequence[tuple[str, Sequence[float], float | None]], label: str, marked: Sequence[int]
) -> Any:
    """Draw the values of each row as dots on a line, their mean, and the paper's number.

    Rows come from top to bottom. Those in `marked` have another colour.
    """
    fig, (axes,) = plots.canvas(height=1.3 + 0.3 * len(rows))
    for number, (_, values, paper) in enumerate(rows):
        colour, height = COLOURS[number in marked], -number
        axes.plot(values, [height] * len(values), "o", color=colour, ms=7, mec=PAPER, mew=0.8)
        axes.plot([fmean(values)] * 2, [height - 0.32, height + 0.32], color=colour, lw=2)
        if paper is not None:
            axes.plot([paper], [height], "D", mfc=PAPER, mec=INK, ms=6, mew=1.2, zorder=3)
    axes.set_yticks([-n for n in range(len(rows))], [name for name, _, _ in rows])
    axes.grid(axis="x", color=plots.GRID, lw=0.8)
    axes.set(xlabel=label, ylim=(-len(rows) + 0.4, 0.6))
    axes.plot([], [], "o", color=SOFT, ms=7, label="ours, one dot a seed")
    if any(paper is not None for _, _, paper in rows):
        axes.plot([], [], "D", mfc=PAPER, mec=INK, ms=6, label="the paper")
    fig.legend(loc="outside upper left", ncols=2, frameon=False, labelcolor=INK, fontsize=9)
    return fig


def scores(part: str) -> Callable[[Records], tuple[Any, str]]:
    """Return the drawing of a task's scores on a part, the best first."""

    def draw(records: Records) -> tuple[Any, str]:
        means = {arm: fmean(record[part] for record in runs) for arm, runs in records.items()}
        arms = sorted(records, key=lambda arm: means[arm])
        measure = RECIPES[arms[0]].measure
        rows = [
            (
                RECIPES[arm].row,
                [record[part] for record in records[arm]],
                getattr(RECIPES[arm], part),
            )
            for arm in arms
        ]
        marked = [number for number, arm in enumerate(arms) if "zoneout" in arm]
        named = {"valid": "validation", "test": "test"}[part]
        text = (
            f"{RECIPES[arms[0]].row} is best, {rounded(means[arms[0]], measure)}; last is "
            f"{RECIPES[arms[-1]].row}, {rounded(means[arms[-1]], measure)}. Lower is better. "
            "Rows with zoneout are orange."
        )
        return dots(rows, f"{UNITS[measure]}, {named}", marked), text

    return draw


def training_time(records: Records) -> tuple[Any, str]:
    """Draw the validation of every cell with and without zoneout, over epochs on a log scale."""
    fig, _ = curves(records, train=False)
    fig.axes[0].set_xscale("log")
    fig.axes[0].xaxis.set_major_formatter("{x:g}")
    words = "; ".join(f"{labelled(arm, runs)} {best_epoch(runs)}" for arm, runs in records.items())
    arms = list(records)
    pairs = [(records[PAIRS[arm]], records[arm]) for arm in arms if PAIRS.get(arm) in records]
    later, lower = (
        sum(fmean(r[what] for r in zoned) * sign > fmean(r[what] for r in plain) * sign
            for plain, zoned in pairs)
        for what, sign in (("best_epoch", 1), ("valid", -1))
    )  # fmt: skip
    finding = f"the best validation comes later in {later} of {len(pairs)} cells, and is lower in "
    return fig, f"With zoneout, {finding}{lower}. Its epoch: {words}."


def reach(records: Records) -> tuple[Any, str]:
    """Draw how many last steps hold half of the gradient's norm, by arm and state."""
    found = [
        (f"{RECIPES[arm].row}, {words}", arm, [
            float(gradient_flow.half_in_last(_last_layer(record)[state]["share"]))
            for record in runs if state in _last_layer(record)
        ])
        for state, words in (("cell", "dL/dc"), ("hidden", "dL/dh"))
        for arm, runs in records.items()
    ]  # fmt: skip
    rows = [(name, values, None) for name, _, values in found if values]
    marked = [n for n, (_, arm, values) in enumerate(found) if values and arm.endswith("zoneout")]
    name, values, _ = max(rows, key=lambda row: fmean(row[1]))
    text = (
        f"{name} reaches furthest: half of the gradient’s norm lies in the last "
        f"{fmean(values):.0f} steps of 784. More steps means further back."
    )
    return dots(rows, "last steps with half of the gradient’s norm", marked), text


def gains(records: Records) -> tuple[Any, str]:
    """Draw by how much zoneout lowers the validation score, in percent, for every pair of rows."""
    rows = []
    for arm, plain in PAIRS.items():
        if arm in records and plain in records:
            base = fmean(record["valid"] for record in records[plain])
            gain = [100 * (1 - record["valid"] / base) for record in records[arm]]
            rows.append((f"{RECIPES[arm].task}: {RECIPES[arm].row}", gain, None))
    if not rows:
        return _nothing(), "Nothing to draw yet."
    rows.sort(key=lambda row: -fmean(row[1]))
    low, high = (f"{fmean(row[1]):.1f}" for row in (rows[-1], rows[0]))
    text = (
        f"Zoneout lowers the validation score in {sum(fmean(gain) > 0 for _, gain, _ in rows)} of "
        f"{len(rows)} pairs, by {low} to {high} %, in the measure of each task."
    )
    return dots(rows, "validation score, lower by %", range(len(rows))), text


# --- the figures ----------------------------------------------------------------------------------


def _arms(task: str, *rows: str) -> tuple[str, ...]:
    return tuple(f"{task}_{row}" for row in rows)


_COMPARED = (
    "unregularised",
    "zoneout",
    "recurrent_dropout",
    "stochastic_depth",
    "norm_stabiliser",
    "weight_noise",
)
_VARIANTS = ("zoneout_cells_050", "zoneout_states_005", "zoneout_shared", "static")
_WORDS = (
    *("zoneout", "nr_dropout", "recurrent_dropout", "variational"),
    *("zoneout_only", "recurrent_dropout_only"),
)
_TEXT8 = ("unregularised", "zoneout", "recurrent_dropout")
_PMNIST = ("unregularised", "zoneout", "recurrent_dropout", "batch_norm", "batch_norm_zoneout")

OVERVIEW = "with-and-without"  # for the README; the page has the figures of the paper
WITH_AND_WITHOUT = Plan(
    "Character-level Penn Treebank with and without zoneout",
    "not a figure of the paper",
    _arms("char_ptb", "unregularised", "zoneout"),
    with_and_without,
    own_records,
)

FIGURES = {
    "rates": Plan(
        "Validation on character-level Penn Treebank over the rates of zoneout",
        (
            f"Figure 3, left: there each rate is a curve, here a point, the best of {RATES_EPOCHS} "
            "epochs"
        ),
        RATES,
        rates,
        own_records,
    ),
    "methods": Plan(
        "Validation on character-level Penn Treebank, method by method",
        "Figure 3, right",
        _arms("char_ptb", *_COMPARED),
        validation_curves,
        own_records,
    ),
    "char-ptb": Plan(
        "Training and validation on character-level Penn Treebank",
        "Figure 4, left",
        _arms("char_ptb", "unregularised", "zoneout", "recurrent_dropout"),
        curves,
        own_records,
    ),
    "text8": Plan(
        "Training and validation on text8",
        "Figure 4, right",
        _arms("text8", *_TEXT8),
        curves,
        own_records,
    ),
    "text8-prefix": Plan(
        "Training and validation on the first 74 million characters of text8",
        "as Figure 4, right, on less text",
        _arms("text8_prefix", *_TEXT8),
        curves,
        own_records,
        in_place_of="text8",
    ),
    "word-ptb": Plan(
        "Training and validation on word-level Penn Treebank",
        "not a figure of the paper",
        _arms("word_ptb", "unregularised", "zoneout", "recurrent_dropout", "nr_dropout"),
        curves,
        own_records,
    ),
    "pmnist": Plan(
        "Validation and training on permuted sequential MNIST, in the paper's order",
        "Figure 5",
        _arms("pmnist", *_PMNIST),
        curves,
        own_records,
    ),
    "batch-norm": Plan(
        "Validation of recurrent batch norm on permuted sequential MNIST, by statistics",
        "not a figure of the paper; the published curve is that of the authors of the method",
        _arms("pmnist", "batch_norm", "batch_norm_statistics", "batch_norm_float32"),
        by_statistics,
        own_records,
    ),
    "pmnist-permuted": Plan(
        "Validation and training on sequential MNIST, truly permuted",
        "as Figure 5, in another order",
        _arms("pmnist_permuted", *_PMNIST),
        curves,
        own_records,
    ),
    "gradient-flow": Plan(
        "Gradient flow on permuted sequential MNIST after one epoch",
        "Figure 6",
        _arms("gradient_flow", "unregularised", "zoneout", "dropout"),
        flows,
        flow_records,
    ),
    "static": Plan(
        "Static identity connections on character-level Penn Treebank",
        "Figure 7, in the appendix",
        _arms("char_ptb", "unregularised", "zoneout", "static"),
        static_curves,
        own_records,
    ),
}

PAIRS = {  # rows with zoneout, and the same without
    "char_ptb_zoneout": "char_ptb_unregularised",
    "char_ptb_zoneout_states_005": "char_ptb_unregularised",
    "char_ptb_gru_zoneout": "char_ptb_gru",
    "char_ptb_gru_zoneout_020": "char_ptb_gru",
    "char_ptb_rnn_zoneout": "char_ptb_rnn",
    "word_ptb_zoneout": "word_ptb_nr_dropout",
    "text8_prefix_zoneout": "text8_prefix_unregularised",
    "pmnist_zoneout": "pmnist_unregularised",
    "pmnist_batch_norm_zoneout": "pmnist_batch_norm",
}
CLAIMS = {  # the figures of the page on the paper's claims
    "scores-char-ptb": Plan(
        "Validation on characters of Penn Treebank",
        "Table 1 and Figure 3",
        _arms("char_ptb", *_COMPARED, *_VARIANTS),
        scores("valid"),
        own_records,
    ),
    "training-time": Plan(
        "Validation with and without zoneout, by cell",
        "section 4.1",
        _arms(
            "char_ptb", "unregularised", "zoneout", "gru", "gru_zoneout_020", "rnn", "rnn_zoneout"
        ),
        training_time,
        own_records,
    ),
    "scores-word-ptb": Plan(
        "Test on words of Penn Treebank",
        "Table 1",
        _arms("word_ptb", *_WORDS),
        scores("test"),
        own_records,
    ),
    "scores-text8-prefix": Plan(
        "Validation on the first 74 million characters of text8",
        "as Table 1, on less text",
        _arms("text8_prefix", *_COMPARED),
        scores("valid"),
        own_records,
    ),
    "scores-pmnist": Plan(
        "Test on permuted sequential MNIST",
        "Table 2",
        _arms("pmnist", *_PMNIST),
        scores("test"),
        own_records,
    ),
    "reach": Plan(
        "How far back gradients reach",
        "Figure 6",
        _arms("gradient_flow", "unregularised", "zoneout", "dropout"),
        reach,
        flow_records,
    ),
    "gains": Plan(
        "What zoneout gains, in every pair of rows",
        "all tables",
        tuple(dict.fromkeys((*PAIRS, *PAIRS.values()))),
        gains,
        own_records,
    ),
}
