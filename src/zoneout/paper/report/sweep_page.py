"""The results of a sweep: a table for the terminal, and an HTML page."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from .. import disk
from ..experiments.trials import Row, spelled
from ..training.measures import figure_of
from . import plots
from .html import after, code, document, element, join, learning_curves, section
from .html import table as html_table


@dataclass(frozen=True)
class Point:
    """One point of the grid: its trials differ only in their seeds."""

    settings: dict[str, Any]
    rows: list[Row]

    @property
    def ended(self) -> list[Row]:
        """The finished trials, over which the mean is taken."""
        return [row for row in self.rows if row.state == "finished"]

    def mean(self, part: str) -> float | None:
        """Return the mean over the finished trials; `part` is "valid" or "test"."""
        values = [v for row in self.ended if (v := getattr(row, part)) is not None]
        return fmean(values) if values else None

    def shown(self, part: str) -> str:
        """Format the mean and standard deviation over seeds.

        If no trial has finished, it is the best validation of the stopped trials, in parentheses.
        """
        values = [v for row in self.ended if (v := getattr(row, part)) is not None]
        if not values:
            stopped = [
                row.valid for row in self.rows if row.state == "stopped" and row.valid is not None
            ]
            return (
                f"({figure_of(min(stopped), self.rows[0].measure)})"
                if stopped and part == "valid"
                else ""
            )
        spread = f" ± {stdev(values):.2g}" if len(values) > 1 else ""
        return figure_of(fmean(values), self.ended[0].measure) + spread

    def states(self) -> str:
        """Format the number of finished trials, or the number in each state if not all finished."""
        counts = Counter(row.state for row in self.rows)
        return (
            str(counts["finished"])
            if set(counts) == {"finished"}
            else ", ".join(f"{n} {s}" for s, n in counts.items())
        )


def points_of(rows: Sequence[Row]) -> list[Point]:
    """Return the points of the grid, the best mean validation first, points without one last."""
    grouped: dict[str, Point] = {}
    for row in rows:
        settings = {name: value for name, value in row.settings.items() if name != "seed"}
        grouped.setdefault(json.dumps(settings), Point(settings, [])).rows.append(row)
    none = math.inf
    return sorted(
        grouped.values(), key=lambda p: none if (value := p.mean("valid")) is None else value
    )


def cells_of(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table: a line of headings, and a line for every point of the grid."""
    points = points_of(rows)
    names = list(points[0].settings) if points else []
    parts = ["valid", "test"] if tested(rows) else ["valid"]
    body = [[*map(spelled, p.settings.values()), *map(p.shown, parts), p.states()] for p in points]
    return [[*names, *parts, "runs"], *body]


def tested(rows: Sequence[Row]) -> bool:
    """Return whether the table has tests: not where all runs left theirs out."""
    ended = [row for row in rows if row.state == "finished"]
    return not ended or any(row.test is not None for row in ended)


def table(rows: Sequence[Row]) -> str:
    """Format the table in Markdown, with aligned columns for the terminal."""
    lines = cells_of(rows)
    widths = [max(map(len, column)) for column in zip(*lines)]
    head, *body = (
        "| " + " | ".join(f"{cell:{w}}" for cell, w in zip(line, widths)) + " |" for line in lines
    )
    notes = [f"{row.name}: {row.why}" for row in rows if row.why]
    return "\n".join(
        [
            head,
            "|" + "|".join("-" * (w + 2) for w in widths) + "|",
            *body,
            *([""] if notes else []),
            *notes,
        ]
    )


def ending(rows: Sequence[Row], out: Path) -> str:
    """Return the last lines of a sweep: its best run, how to look at it, and the page."""
    page = f"All results on one page: {out / 'index.html'}"
    judged = [row for row in rows if row.state == "finished" and row.valid is not None]
    if not judged:
        return page
    best = min(judged, key=lambda row: math.inf if row.valid is None else row.valid)
    test = "" if best.test is None else f", test {figure_of(best.test, best.measure)}"
    return (
        f"Best run: {best.name}, valid {figure_of(best.valid or 0.0, best.measure)}{test}\n"
        f"  zoneout show {shlex.quote(str(best.folder))}\n{page}"
    )


def write(rows: Sequence[Row], out: Path, title: str) -> None:
    """Write results.json and index.html; other parts of a sweep may do so at the same time."""
    with disk.explained(out):
        out.mkdir(parents=True, exist_ok=True)
        disk.write_json(out / "results.json", [asdict(row) for row in rows])
        disk.write_text(out / "index.html", page(rows, title))


def page(rows: Sequence[Row], title: str) -> str:
    """Return one self-contained page with the table and the learning curves of the best points."""
    head, *body = cells_of(rows)
    caption = (
        "The best validation first. Each number is the mean ± the standard deviation over runs "
        "that differ only in their seeds. A number in parentheses is the best validation of a run "
        "that was stopped early."
    )
    numbers = html_table(caption, [head], body, "points")
    best = [p.ended[0] for p in points_of(rows) if p.ended][: len(plots.COLOURS)]
    figures = learning_curves(
        [plots.read_curve(row.folder, row.name.rpartition("-")[0]) for row in best],
        "The best points of the table.",
    )
    parts = [after(numbers, join(figures)) if figures else numbers]
    sections = [("results", "Results", section("results", "Results", *parts))]
    if notes := [element("li", f"{row.name}: {row.why}") for row in rows if row.why]:
        whole = section("notes", "Runs that did not finish", element("ul", *notes))
        sections.append(("notes", "Runs that did not finish", whole))
    return document(title, "", sections, element("p", "Made by ", code("zoneout sweep"), "."))
