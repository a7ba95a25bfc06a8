"""The paper's figures: that they show what the records say, and say what is missing. The records
here are invented.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import fabricated
import pytest

from zoneout.paper.cli import main
from zoneout.paper.disk import RunError, write_record
from zoneout.paper.experiments.recipes import RECIPES
from zoneout.paper.report import figures, plots
from zoneout.paper.report.figures import FIGURES, draw, draw_all, limits, save_all
from zoneout.paper.training import exit_codes


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    fabricated.everything(folder)
    return folder


def lines_of(axes: object) -> dict[str, object]:
    return {line.get_label(): line for line in axes.get_lines()}  # type: ignore[attr-defined]


def test_all_of_the_papers_figures_are_there() -> None:
    """A figure of the paper cannot be drawn, or is drawn from recipes that do not exist."""
    assert {
        "rates",
        "methods",
        "char-ptb",
        "text8",
        "pmnist",
        "gradient-flow",
        "static",
    } <= FIGURES.keys()
    assert all(arm in RECIPES for plan in FIGURES.values() for arm in plan.arms)


@pytest.mark.parametrize("name", FIGURES)
def test_without_results_a_figure_names_what_is_missing(name: str, tmp_path: Path) -> None:
    """A clone without results shows an error, or an empty picture that does not say why."""
    drawn = draw(name, tmp_path / "nowhere")
    assert drawn.missing == FIGURES[name].arms and drawn.text == "Nothing to draw yet."
    text = plots.svg(drawn.figure).replace("\n", " ")
    assert all(arm in text for arm in drawn.missing)


def test_a_figure_without_results_gives_way(tmp_path: Path) -> None:
    """A page has an empty figure beside the one that stands in for it, or lacks one that nothing
    stands in for.
    """
    assert [drawn.name for drawn in draw_all(tmp_path)] == [*FIGURES]
    fabricated.write(tmp_path, fabricated.record("text8_prefix_zoneout"))
    assert [drawn.name for drawn in draw_all(tmp_path)] == [
        name for name in FIGURES if name != "text8"
    ]
    fabricated.write(tmp_path, fabricated.record("text8_zoneout"))
    assert [drawn.name for drawn in draw_all(tmp_path)] == [*FIGURES]


def test_curves_are_the_records(tmp_path: Path) -> None:
    """A line has the numbers of another record, training and validation are exchanged, or a unit
    is wrong.
    """
    fabricated.write(
        tmp_path,
        fabricated.record("char_ptb_zoneout"),
        fabricated.record("char_ptb_zoneout", 2, shift=0.1),
    )
    drawn = draw("char-ptb", tmp_path)
    assert drawn.missing == ("char_ptb_unregularised", "char_ptb_recurrent_dropout")
    (axes,) = drawn.figure.axes
    validation, training = axes.get_lines()[:2]
    lowest = RECIPES["char_ptb_zoneout"].valid
    assert lowest is not None
    best = lowest + 0.05  # the mean of the two seeds
    assert list(validation.get_ydata()) == pytest.approx(
        [1.5 * best, 1.1 * best, best, 1.02 * best]
    )
    assert list(validation.get_xdata()) == [1.0, 2.0, 3.0, 4.0]
    assert list(training.get_ydata()) == pytest.approx(
        [best, 0.9 * best, 0.8 * best]
    )  # nats as bits
    seeds = axes.collections[0].get_paths()[0].vertices[:, 1]  # the band between the two seeds
    assert min(seeds) == pytest.approx(lowest)
    assert max(seeds) == pytest.approx(1.5 * (lowest + 0.1))
    assert (
        validation.get_label() == "Zoneout 0.5, 0.05 (2 seeds)" and training.get_linestyle() == "--"
    )
    assert "1.412 at epoch 3" in drawn.text


def test_the_training_error_of_images_is_drawn_where_it_was_recorded(tmp_path: Path) -> None:
    """The paper's figure has the training error, and ours has the loss in its place."""
    record = fabricated.record("pmnist_zoneout")
    fabricated.write(tmp_path, record, fabricated.record("pmnist_unregularised"))
    assert draw("pmnist", tmp_path).figure.axes[1].get_ylabel() == "training loss, nats"
    record["curve"]["train_error"] = [None, 0.3, 0.2, 0.1]
    fabricated.write(tmp_path, record)
    drawn = draw("pmnist", tmp_path)
    (line,) = drawn.figure.axes[1].get_lines()
    assert list(line.get_ydata()) == [0.3, 0.2, 0.1]
    assert drawn.figure.axes[1].get_ylabel() == "share that is wrong, training"
    assert "first 10,000 training images" in drawn.text


def test_of_several_seeds_those_with_a_training_error_are_drawn(tmp_path: Path) -> None:
    """Older records are left out of the validation, or their loss is drawn as an error."""
    old = [fabricated.record("pmnist_zoneout", seed, shift=0.1) for seed in (2, 3)]
    new = fabricated.record("pmnist_zoneout")
    new["curve"]["train_error"] = [0.4, 0.3, 0.2, 0.1]
    fabricated.write(tmp_path, new, *old)
    panels = draw("pmnist", tmp_path).figure.axes
    ((validation,), (training,)) = (panel.get_lines() for panel in panels)
    assert list(training.get_ydata()) == [0.4, 0.3, 0.2, 0.1]
    assert validation.get_label().endswith("(3 seeds)")
    mean = sum(record["valid"] for record in (new, *old)) / 3
    assert min(validation.get_ydata()) == pytest.approx(mean)


def test_batch_norm_is_drawn_by_each_kind_of_statistics(tmp_path: Path) -> None:
    """A line has the statistics of another, or the published curve is left out."""
    record = fabricated.record("pmnist_batch_norm_statistics")
    record["curve"] |= {"by_running_averages": [0.3, 0.2, 0.1, 0.09]}
    fabricated.write(tmp_path, record)
    drawn = draw("batch-norm", tmp_path)
    found = lines_of(drawn.figure.axes[0])
    title = RECIPES["pmnist_batch_norm_statistics"].row
    running = found[f"{title}: running averages"]
    assert list(running.get_ydata()) == [0.3, 0.2, 0.1, 0.09]  # type: ignore[attr-defined]
    assert len(found) == 3 and len(found["published"].get_xdata()) == 8  # type: ignore[attr-defined]
    assert (
        "ours at 0.047 by its own batch of 100" in drawn.text and "0.090 by running" in drawn.text
    )


def test_every_arm_has_its_colour_and_its_place(full: Path) -> None:
    """Two methods look alike, or a line leaves the picture where it is at its best."""
    drawn = draw("methods", full)
    (axes,) = drawn.figure.axes
    labelled = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    assert (
        len({line.get_color() for line in labelled})
        == len({line.get_marker() for line in labelled})
        == 6
    )
    low, high = axes.get_ylim()
    assert all(low < min(line.get_ydata()) < high for line in labelled)
    assert len(drawn.figure.axes[0].get_legend().get_texts()) == 6


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_of_a_legend_is_cut_off(name: str, tmp_path: Path) -> None:
    """The names of methods run out of the picture."""
    fabricated.everything(tmp_path)
    fabricated.write(
        tmp_path, *(fabricated.record(arm, seed) for arm in FIGURES[name].arms for seed in (2, 3))
    )
    figure = draw(name, tmp_path).figure
    figure.draw_without_rendering()
    for axes in figure.axes:
        if axes.get_legend() is not None:
            box = axes.get_legend().get_window_extent()
            assert min(box.x0, box.y0) >= 0 and box.x1 <= figure.bbox.width


def test_the_scale_leaves_out_what_is_far_above() -> None:
    """One run that overfits beyond measure presses all others to the bottom."""
    wild = fabricated.record("word_ptb_unregularised")
    wild["curve"]["valid"] = [900.0, 120.0, 4000.0]
    low, high = limits({"word_ptb_unregularised": [wild]}, "perplexity", train=False)
    assert 100 < low < 120 < high < 150


def test_errors_and_training_loss_have_axes_of_their_own(full: Path) -> None:
    """Shares of images and nats are drawn on one scale."""
    above, below = draw("pmnist", full).figure.axes
    assert (
        above.get_ylabel() == "share that is wrong, validation"
        and below.get_ylabel() == "training loss, nats"
    )
    assert above.get_xlim() == below.get_xlim()
    assert len(above.get_lines()) == len(below.get_lines()) == 5


def test_the_figure_of_the_rates_has_rates_on_its_axis(tmp_path: Path) -> None:
    """A point stands at another rate than its recipe has, or on another line."""
    names = (
        "char_ptb_unregularised",
        "char_ptb_zoneout_cells_025",
        "char_ptb_zoneout_cells_050",
        "char_ptb_zoneout",
    )
    fabricated.write(
        tmp_path, *(fabricated.record(name, shift=0.1 * n) for n, name in enumerate(names))
    )
    fabricated.write(tmp_path, fabricated.record("char_ptb_zoneout_cells_025", 2, shift=0.2))
    long = fabricated.record("char_ptb_zoneout_cells_050", shift=0.2)
    long["curve"] = {key: [*values, values[-1]] for key, values in long["curve"].items()}
    long["curve"]["epoch"][-1], long["curve"]["valid"][-1] = (
        51.0,
        1.0,
    )  # later than the others were trained for
    fabricated.write(tmp_path, long)
    drawn = draw("rates", tmp_path)
    (axes,) = drawn.figure.axes
    found = {c.get_label(): c.lines[0] for c in axes.containers}
    cells = found["zoneout on cells"]
    assert list(cells.get_xdata()) == [0.0, 0.25, 0.5]
    assert list(cells.get_ydata()) == pytest.approx(
        [1.466, 1.15, 1.2]
    )  # without a number of the paper they are near 1
    assert list(found["zoneout on cells, states 0.05"].get_xdata()) == [0.5]
    assert list(found["recurrent dropout"].get_xdata()) == [0.0]
    assert drawn.text.startswith("The best is zoneout on cells, 1.150 at 0.25. The best of the")
    assert "char_ptb_recurrent_dropout" in drawn.missing


def test_the_figure_of_static_masks_has_both_evaluations(tmp_path: Path) -> None:
    """What the static model does without its own masks is not shown."""
    record = fabricated.record("char_ptb_static")
    for score in record["scores"]:
        score["bits"] = {"sample": 1.1, "expectation": 1.4}[score["at_eval"]]
    fabricated.write(tmp_path, record)
    drawn = draw("static", tmp_path)
    line = lines_of(drawn.figure.axes[0])["static, by expectation: 1.400"]
    assert set(line.get_ydata()) == {1.4}  # type: ignore[attr-defined]
    low, high = drawn.figure.axes[0].get_ylim()
    assert low < 1.4 < high
    assert "expectation instead of its masks: 1.400" in drawn.text


def test_gradient_flow_is_drawn_for_cells_and_states(tmp_path: Path) -> None:
    """The panels are exchanged, or a GRU, which has no cell, cannot be drawn."""
    fabricated.write(
        tmp_path,
        fabricated.flow("gradient_flow_zoneout"),
        fabricated.flow("gradient_flow_zoneout", 2),
    )
    drawn = draw("gradient-flow", tmp_path)
    above, below = drawn.figure.axes
    assert "dcₜ" in above.get_ylabel() and "dhₜ" in below.get_ylabel()
    assert len(above.get_lines()) == 2 and list(above.get_lines()[0].get_xdata()) == list(
        range(1, 41)
    )
    assert drawn.missing == ("gradient_flow_unregularised", "gradient_flow_dropout")
    assert "of dL/dc in the last 7" in drawn.text
    record = fabricated.flow("x")
    del record["layers"]["l0"]["cell"]
    record["layers"]["l0"]["hidden"]["share"][-1] = 0.0  # as that of a cell which nothing reads
    (axes,) = figures.flow_figure({"mine": [record]}).axes
    assert axes.get_yscale() == "log" and axes.get_ylim()[0] > 0


def test_records_with_other_settings_are_left_out(tmp_path: Path) -> None:
    """A trial of a few epochs is drawn as if it were the recipe."""
    fabricated.write(tmp_path, fabricated.record("char_ptb_zoneout", epochs=2))
    assert "char_ptb_zoneout" in draw("char-ptb", tmp_path).missing


def test_pictures_in_every_format(full: Path, tmp_path: Path) -> None:
    """A figure cannot be printed, is not the same twice, or cannot be parsed."""
    for kind, begins in (("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")):
        ((path, _),) = save_all(full, tmp_path, kind, ["static"])
        first = path.read_bytes()
        assert first.startswith(begins)
        save_all(full, tmp_path, kind, ["static"])
        assert path.read_bytes() == first
    root = ElementTree.parse(tmp_path / "static.svg").getroot()
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "epoch" in texts and "Unregularised LSTM" in texts  # letters, not outlines of letters
    assert root.find("{http://www.w3.org/2000/svg}title").text == FIGURES["static"].title  # type: ignore[union-attr]


def test_the_command(full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command draws something else, or does not say what is missing."""
    arguments = ["figures", "text8", "--results", str(full), "--out", str(tmp_path)]
    assert main.main(arguments) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "text8.svg")
    assert (
        main.main(
            ["figures", "text8", "--results", str(tmp_path), "--out", str(tmp_path), "--json"]
        )
        == 0
    )
    (said,) = json.loads(capsys.readouterr().out)
    assert said["missing"] == ["text8_unregularised", "text8_zoneout", "text8_recurrent_dropout"]
    assert main.main(["figures", "nonsense", "--results", str(full)]) == exit_codes.WRONG_USE
    assert "expected one of rates" in capsys.readouterr().err


def test_a_damaged_record_is_a_sentence(tmp_path: Path) -> None:
    """A record that was cut off shows as a traceback."""
    (tmp_path / "char_ptb_zoneout").mkdir()
    (tmp_path / "char_ptb_zoneout" / "seed-1.json").write_text('{"format": 1')
    with pytest.raises(RunError, match="not a record that can be read"):
        draw("methods", tmp_path)


# --- colours --------------------------------------------------------------------------------------


def test_texts_and_lines_stand_out_on_both_grounds() -> None:
    """A curve or its number is hard to see on paper or in the dark."""
    for colour in (*plots.COLOURS, plots.INK, plots.SOFT):
        assert fabricated.contrast(colour, plots.PAPER) >= 4.5
        assert fabricated.contrast(plots.DARK[colour], plots.DARK[plots.PAPER]) >= 4.5


def test_every_colour_has_one_for_the_dark(full: Path) -> None:
    """Something is drawn in a colour that stays as it is in the dark, such as black on black."""
    for name in FIGURES:
        drawn = plots.svg(draw(name, full).figure)
        used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawn))
        assert used <= plots.DARK.keys(), name
        assert "fill: black" not in drawn and not re.search(r"<text(?![^>]*fill: #)", drawn), name


@pytest.mark.parametrize(
    "wrong",
    [
        {"curve": {}},
        {"curve": {"epoch": [], "valid": [], "train_nats": []}},
        {"versions": {}},
        {"scores": [{}]},
        {"scores": [1]},
        {"measure": "points"},
        {"curve": {"epoch": [1.0], "valid": [], "train_nats": []}},
    ],
    ids=str,
)
def test_a_record_with_other_parts(wrong: dict[str, Any], tmp_path: Path) -> None:
    """A record that was changed by hand ends in a traceback, and nobody knows in which file it
    is.
    """
    path = tmp_path / "char_ptb_zoneout" / "seed-1.json"
    write_record(path, fabricated.record("char_ptb_zoneout") | wrong)
    with pytest.raises(RunError, match=r"seed-1\.json is not a record that can be read: "):
        draw("methods", tmp_path)
