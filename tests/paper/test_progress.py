"""What is shown while a model trains: live, as lines, and in TensorBoard."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest
from rich.console import Console

from zoneout.paper.training.measures import figure_of
from zoneout.paper.training.progress import Lines, Live, Pace, TensorBoard, together

Event = dict[str, Any]


def events(measure: str = "bits", updates: int = 20, start: int = 0) -> list[Event]:
    """What a short run tells; its validation is best in the middle."""
    told: list[Event] = [
        {
            "kind": "start",
            "update": start,
            "updates": updates,
            "data": "36,000 characters of my.txt",
            "parameters": 12345,
            "device": "cpu",
            "measure": measure,
            "folder": "runs/[b]x",
        }
    ]
    for update in range(start + 1, updates + 1):
        where = {"update": update, "epoch": update / 8}
        told.append({"kind": "step", **where, "nats": math.log(2) * 3})
        if update % 5 == 0:
            told.append({"kind": "train", **where, "nats": math.log(2) * 2, "lr": 0.002})
        if update % 10 == 0:
            value = {"bits": 2.5, "perplexity": 123.456, "error": 0.125}[measure] + update / 1000
            told.append(
                {
                    "kind": "valid",
                    **where,
                    measure: value,
                    "nats": 1.7,
                    "predictions": 99,
                    "best": update == 10,
                }
            )
            told.append({"kind": "save", "update": update})
    told.append({"kind": "note", "text": "a checkpoint [of old] was damaged"})
    told.append(
        {
            "kind": "test",
            "update": updates,
            "epoch": 2.5,
            measure: 0.5,
            "nats": 1.6,
            "predictions": 99,
        }
    )
    told.append({"kind": "end", "status": "finished"})
    return told


class Clock:
    """A second goes by with every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_lines_say_what_a_log_needs() -> None:
    """A run in the background leaves a log from which nobody can tell how it went."""
    out = io.StringIO()
    with Lines(out, clock=Clock()) as lines:
        for event in events():
            lines.listener()(event)
    assert out.getvalue().splitlines() == [
        (
            "36,000 characters of my.txt, 12,345 parameters, 20 updates on cpu; the run is in "
            "runs/[b]x"
        ),
        "epoch   0.62  update       5  train 2.000 bits  1.0 updates/s  0:15 left",
        "epoch   1.25  update      10  train 2.000 bits  1.0 updates/s  0:10 left",
        "epoch   1.25  update      10  valid 2.510 bits  best so far",
        "epoch   1.88  update      15  train 2.000 bits  1.0 updates/s  0:05 left",
        "epoch   2.50  update      20  train 2.000 bits  1.0 updates/s  0:00 left",
        "epoch   2.50  update      20  valid 2.520 bits",
        "note: a checkpoint [of old] was damaged",
        "test of the best weights: 0.500 bits",
    ]


def test_lines_of_several_runs_say_whose_they_are() -> None:
    """Two runs in one log cannot be told apart."""
    out = io.StringIO()
    lines = Lines(out, ("plain", "zoneout"), clock=Clock())
    for event in events(start=10):
        lines.listener("plain")(event)
        lines.listener("zoneout")(event)
    said = out.getvalue().splitlines()
    start = (
        "36,000 characters of my.txt, 12,345 parameters, 20 updates on cpu, continued after update "
        "10"
    )
    assert said[0] == f"plain    {start}; the run is in runs/[b]x"
    assert [line.split()[0] for line in said] == ["plain", "zoneout"] * (len(said) // 2)


@pytest.mark.parametrize(
    ("measure", "shown"),
    [("bits", "2.510 bits"), ("perplexity", "123.47 ppl"), ("error", "13.50% wrong")],
)
def test_each_measure_has_its_form(measure: str, shown: str) -> None:
    """A perplexity is shown as bits, or an error as a loss."""
    out = io.StringIO()
    lines = Lines(out, clock=Clock())
    for event in events(measure):
        lines.listener()(event)
    assert f"valid {shown}  best so far" in out.getvalue()


def screen(width: int, names: tuple[str, ...] = ("",), measure: str = "bits") -> list[str]:
    """What stands on a terminal of this width in the end; a line may not be wider than it."""
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        color_system=None,
        legacy_windows=False,
    )
    with Live(console, names, clock=Clock()) as live:
        for event in events(measure):
            for name in names:
                live.listener(name)(event)
    lines, at = [""], 0
    for part in re.split(r"(\x1b\[[0-9?]*[A-Za-z]|\r|\n)", console.file.getvalue()):  # type: ignore[attr-defined]
        if part == "\x1b[1A":
            at -= 1
        elif part == "\x1b[2K":
            lines[at] = ""
        elif part == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        elif not part.startswith(("\x1b", "\r")):
            lines[at] += part
            assert len(lines[at]) <= width
            assert "━" not in lines[at] or len(lines[at]) <= width - len("^C"), "Ctrl-C breaks it"
    return [line.rstrip() for line in lines if line]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 140])
@pytest.mark.parametrize("measure", ["bits", "perplexity", "error"])
def test_live_fits_every_width(width: int, measure: str) -> None:
    """In a narrow window a bar breaks into two lines, which then pile up."""
    for names in (("",), ("unregularised", "zoneout")):
        lines = screen(width, names, measure)
        assert sum("━" in line for line in lines) == len(names), lines
        assert width < 40 or "20/20" in lines[-1]
        assert width < 40 or "/s " in lines[-1]
        assert not any("…" in line for line in lines), lines


def test_live_shows_loss_best_speed_and_text_as_it_is() -> None:
    """The bar has lost something it promises, or takes brackets in a path for markup."""
    lines = screen(140)
    bar = lines[-1]
    for part in (
        "20/20",
        "train 2.000 bits",
        "valid 2.520 bits",
        "best 2.510 bits",
        "1.0/s",
        "0:00",
    ):
        assert part in bar, bar
    assert any("runs/[b]x" in line for line in lines)
    assert any("note: a checkpoint [of old] was damaged" in line for line in lines)
    assert any(
        line.startswith("epoch   1.25  update      10  valid 2.510 bits  best so far")
        for line in lines
    )


def test_pace_follows_a_change() -> None:
    """The time left would be computed from how fast a run was an hour ago."""
    now = [0.0]
    pace = Pace(lambda: now[0])
    for update in range(100):
        now[0] += 1.0
        pace(update)
    assert pace.speed == pytest.approx(1.0)
    for update in range(100, 200):
        now[0] += 10.0
        pace(update)
    assert pace.speed == pytest.approx(0.1, rel=1e-3)


def test_large_losses_have_a_form() -> None:
    """A loss beyond every float stops the run that wanted to show it."""
    assert figure_of(math.exp(700), "perplexity") == "1.0142e+304 ppl"
    out = io.StringIO()
    lines = Lines(out, clock=Clock())
    lines.listener()(events("perplexity")[0])
    lines.listener()({"kind": "train", "update": 1, "epoch": 0.1, "nats": 5000.0, "lr": 1.0})
    assert "ppl" in out.getvalue()


def test_all_listeners_hear() -> None:
    """With TensorBoard on, the bar stands still."""
    heard: list[tuple[int, str]] = []
    tell = together(
        lambda event: heard.append((1, event["kind"])),
        lambda event: heard.append((2, event["kind"])),
    )
    tell({"kind": "start"})
    assert heard == [(1, "start"), (2, "start")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard's own imports
def test_tensorboard_gets_the_metrics(tmp_path) -> None:
    """TensorBoard shows other numbers than the run has, or after a resume those of the part that
    was lost.
    """
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    for event in events(updates=20)[:-1]:  # killed before its end
        board(event)
    board.close()
    board = TensorBoard(tmp_path)
    for event in events(updates=30, start=10):
        board(event)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {
        "train/nats",
        "train/lr",
        "valid/bits",
        "valid/nats",
        "test/bits",
        "test/nats",
    }
    assert [point.step for point in found.Scalars("valid/bits")] == [10, 20, 30]
    assert [point.value for point in found.Scalars("valid/bits")] == pytest.approx(
        [2.51, 2.52, 2.53]
    )


def test_tensorboard_that_is_not_there_is_named(tmp_path, monkeypatch) -> None:
    """Somebody without TensorBoard gets a traceback from inside torch."""
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"try pip install 'zoneout\[tensorboard\]'"):
        TensorBoard(tmp_path)
