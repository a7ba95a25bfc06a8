"""The README, its pictures and docs/rates.md say what the records say, and the README stays
short.
"""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from zoneout.paper.experiments.recipes import RECIPES
from zoneout.paper.experiments.results import best_epoch, fitting
from zoneout.paper.report import figures, plots
from zoneout.paper.training.measures import rounded

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"


def speed_chart() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import table  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    return table.chart(table.rows())


def figure(name: str) -> Any:
    return speed_chart() if name == "speed" else figures.draw(name, ROOT / "results").figure


def contents(svg: str) -> tuple[list[str], list[float]]:
    """Return the texts and the coordinates of a picture, without its generated ids."""
    svg = svg[svg.index("<g ") :]  # behind the header
    svg = re.sub(r'(?s)<style>.*?</style>|\bid="[^"]*"|#[\w-]+', "", svg)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    return texts, [float(number) for number in re.findall(r"-?\d+\.\d+", svg)]


@pytest.mark.parametrize("name", [path.stem for path in sorted(PICTURES.glob("*.svg"))])
def test_the_pictures_are_drawn_from_the_records(name: str) -> None:
    """A picture in docs/pictures was not drawn again after the records changed."""
    texts, numbers = contents((PICTURES / f"{name}.svg").read_text(encoding="utf-8"))
    new_texts, new_numbers = contents(plots.svg(figure(name)))
    assert texts == new_texts
    assert numbers == pytest.approx(new_numbers, abs=0.05)


def rows_of_rates() -> list[tuple[str, ...]]:
    text = (ROOT / "docs" / "rates.md").read_text(encoding="utf-8")
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in text.splitlines()
        if "`" in line
    ]
    return [row for row in rows if len(row) == 6 and row[2].strip("`") in RECIPES]


def scores(name: str) -> tuple[str, str, str]:
    recipe = RECIPES[name]
    own, _ = fitting(recipe, ROOT / "results")
    epochs = f"{statistics.fmean(record['epochs'] for record in own):.4g}"
    return (
        rounded(statistics.fmean(r["valid"] for r in own), recipe.measure),
        best_epoch(own),
        epochs,
    )


def test_the_rates_page_has_the_numbers_of_the_records() -> None:
    """A number in docs/rates.md is not the one in results/."""
    rows = rows_of_rates()
    assert len(rows) == 17
    for *_, recipe, value, second, third in rows:
        valid, best, epochs = scores(recipe.strip("`"))
        assert value == valid, recipe
        if third.strip("`") in RECIPES:
            assert second == scores(third.strip("`"))[0], recipe
        else:
            assert (second, third) == (best, epochs), recipe


def test_the_readme_can_be_finished() -> None:
    """The README has grown beyond what a visitor reads, or its sentences have."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    prose = re.sub(r"(?s)```.*?```|<!--.*?-->", "", text)
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "#", "!", "    "))]
    sentences = [s.split() for s in re.split(r"(?<=[.!?:])\s+|\n\n", "\n".join(lines))]
    assert statistics.median(len(words) for words in sentences if len(words) > 2) <= 18
