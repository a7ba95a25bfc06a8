"""Learning curves: that they show what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoneout.paper.report.plots import (
    COLOURS,
    MARKS,
    Curve,
    ascii_curves,
    figure,
    read_curve,
    save,
    svg,
)

FALLING = Curve("plain", "bits", ((50, 4.0), (100, 1.0)), ((100, 3.0), (200, 2.0), (300, 2.5)))


def write(folder: Path, *rows: dict[str, object]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("measure", "train"), [("bits", [(5, 1.0)]), ("perplexity", [(5, 2.0)]), ("error", [])]
)
def test_training_loss_is_shown_in_the_unit_of_the_validation(measure, train, tmp_path) -> None:
    """Two lines of one picture have different units."""
    folder = write(
        tmp_path / "run",
        {"kind": "train", "update": 5, "epoch": 1.0, "nats": math.log(2), "lr": 0.1},
        {
            "kind": "valid",
            "update": 10,
            "epoch": 2.0,
            measure: 0.5,
            "nats": 0.9,
            "predictions": 9,
            "best": True,
        },
        {"kind": "test", "update": 10, "epoch": 2.0, measure: 0.4, "nats": 0.9, "predictions": 9},
    )
    curve = read_curve(folder)
    assert (curve.name, curve.measure, curve.valid) == ("run", measure, ((10, 0.5),))
    assert [(update, round(value, 12)) for update, value in curve.train] == train
    assert curve.best == (10, 0.5)


numbers = st.floats(-1e6, 1e6) | st.just(math.inf)
points = st.lists(st.tuples(st.integers(0, 10**7), numbers), max_size=20).map(tuple)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.lists(points, min_size=1, max_size=7), st.integers(1, 150), st.integers(1, 30))
def test_every_point_has_a_place(all_points, width, height) -> None:
    """A curve of one point, a flat one or a very steep one breaks the drawing, or runs out of
    it.
    """
    curves = [Curve("x", "bits", (), found) for found in all_points]
    drawn = ascii_curves(curves, width, height)
    finite = {value for found in all_points for _, value in found if math.isfinite(value)}
    if not finite:
        assert drawn == "(no validation yet)"
        return
    *rows, _ = drawn.splitlines()
    columns = max(width - 9, 10)
    assert all(len(row.partition("|")[2]) <= columns for row in rows)
    assert len(rows) == (max(height, 2) if len(finite) > 1 else 1) + 2


def test_high_is_up_and_late_is_right() -> None:
    """The curve is upside down."""
    rows = [row.partition("|")[2] for row in ascii_curves([FALLING], 29, 3).splitlines()[:3]]
    assert [row.find("o") for row in rows] == [0, 19, 10]


def test_the_picture_shows_both_curves_and_the_best() -> None:
    """The legend names another run than the line, or the mark is not at the best."""
    fig = figure([FALLING, Curve("zoneout", "bits", (), ((100, 3.5), (200, 1.5)))], "a title")
    (axes,) = fig.axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    plain, zoneout = lines["plain, best 2"], lines["zoneout, best 1.5"]
    assert list(plain.get_ydata()) == [3.0, 2.0, 2.5] and plain.get_color() == COLOURS[0]
    assert list(zoneout.get_ydata()) == [3.5, 1.5] and zoneout.get_color() == COLOURS[1]
    marks = [line for line in axes.get_lines() if line.get_marker() == "o"]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in marks] == [(200, 2.0), (200, 1.5)]
    assert axes.get_ylabel() == "bits per character"
    low, high = axes.get_ylim()
    assert low < 1.0 and high > 3.5


def test_pictures_are_the_same_twice(tmp_path) -> None:
    """A picture that is made again from the same numbers is another file, with another date or
    other names in it.
    """
    for name in ("one.svg", "two.svg"):
        save(figure([FALLING]), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert svg(figure([FALLING])).startswith("<svg")


def test_more_runs_than_colours() -> None:
    """The seventh run is left out."""
    curves = [
        Curve(str(n), "bits", (), ((1, float(n)), (2, float(n)))) for n in range(len(MARKS) + 2)
    ]
    assert len(
        [line for line in figure(curves).axes[0].get_lines() if "best" in line.get_label()]
    ) == len(curves)
    assert ascii_curves(curves).splitlines()[-1].split()[-1] == str(len(curves) - 1)
