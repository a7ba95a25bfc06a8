"""The demo, at a tiny size: both models, the table, the picture and the page."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from fabricated import Page, demo_page, shared_look

from zoneout.paper import disk
from zoneout.paper.cli import demo
from zoneout.paper.cli.demo import PLAIN, ZONED, Result, verdict
from zoneout.paper.cli.main import main
from zoneout.paper.training import runs
from zoneout.paper.training.config import Config, Zoneout
from zoneout.paper.training.exit_codes import FAILED, INTERRUPTED, OK

TINY = ["--updates", "6", "--hidden", "8", "--characters", "4000"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a demo leaves."""
    folder = tmp_path_factory.mktemp("demo") / "<b>demo"
    assert main(["demo", "--out", str(folder), *TINY]) == OK
    return folder


def test_both_are_runs_that_differ_in_zoneout_alone(folder) -> None:
    """The comparison is not fair: another budget, seed, text or size."""
    plain, zoned = (runs.read_config(folder / name) for name in (PLAIN, ZONED))
    assert plain.zoneout == Zoneout() and zoned.zoneout == Zoneout(cell=0.5, hidden=0.05)
    assert plain == Config(**{**vars(zoned), "zoneout": Zoneout()})
    ends = [json.loads((folder / name / "summary.json").read_text()) for name in (PLAIN, ZONED)]
    assert [end["update"] for end in ends] == [6, 6]


def test_the_three_texts_have_nothing_in_common(folder) -> None:
    """A model is judged on what it was trained on."""
    train, valid, test = (
        {
            p
            for p in (folder / "text" / f"{name}.txt").read_text(encoding="utf-8").split("\n\n")
            if len(p) > 80
        }
        for name in ("train", "valid", "test")
    )
    assert len((folder / "text" / "train.txt").read_text(encoding="utf-8")) == 4000
    assert valid and not train & valid and not train & test and not valid & test


def test_the_picture_is_there(folder) -> None:
    """There is nothing to look at."""
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "curves.svg").read_text(encoding="utf-8")


def test_the_page_has_the_shared_look_and_the_numbers_of_the_runs(folder) -> None:
    """The demo writes a page of its own kind, or other numbers; that such a page is a good one
    `test_report` says.
    """
    text = (folder / "index.html").read_text(encoding="utf-8")
    read = Page(text)
    ((_, body),) = read.all("body")
    assert shared_look(text) and "<b>demo" in body and not read.all("b")
    for name in (PLAIN, ZONED):
        best = json.loads((folder / name / "summary.json").read_text())["best"]["bits"]
        assert f"{best:.3f}" in body
    assert "rate 0.5 for the cell state, 0.05 for the hidden state" in body
    assert [text for _, text in read.all("h3")] == ["unregularised", "zoneout 0.5, 0.05"]
    assert len({text for _, text in read.all("pre")}) == 2


def test_what_a_model_writes_is_escaped(tmp_path) -> None:
    """A model that writes markup changes the page."""
    written = "</pre><script>alert(1)</script>&amp;"
    read = Page(demo_page(tmp_path, written))
    assert not read.all("script") and [text for _, text in read.all("pre")] == [written, written]


def test_the_verdict_goes_by_the_numbers() -> None:
    """Whatever came out, zoneout is said to have won."""

    def of(plain: float, zoned: float) -> str:
        return verdict(
            [Result(PLAIN, plain, 1, plain, 1.0, 1.0), Result(ZONED, zoned, 1, zoned, 1.0, 1.0)]
        )

    assert "0.30 bits less" in of(1.9, 1.6)
    assert "unregularised model is better, by 0.30" in of(1.6, 1.9)
    assert "as good as each other" in of(1.6, 1.601)


def test_a_folder_that_is_not_empty_is_left_alone(folder, capsys) -> None:
    """A second demo overwrites the first."""
    before = sorted(folder.rglob("*"))
    assert main(["demo", "--out", str(folder), *TINY]) == FAILED
    assert "not empty" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_each_demo_gets_a_folder(tmp_path) -> None:
    """A second `make demo` fails because of the first."""
    base = tmp_path / "demo"
    assert disk.free_folder(base) == base
    base.mkdir()
    assert disk.free_folder(base) == tmp_path / "demo-2"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["keys", "kill"])
def test_a_demo_that_is_stopped(tmp_path, number) -> None:
    """Its two processes train on to their end, or wait for ever for somebody to read their news."""
    command = [sys.executable, "-m", "zoneout", "demo", "--out", str(tmp_path / "demo")]
    command += ["--updates", "6000", "--hidden", "32", "--characters", "4000"]

    def hears() -> None:  # what a shell starts in the background does not
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hears)
    assert process.stderr is not None
    next(line for line in process.stderr if "updates/s" in line)
    process.send_signal(number)
    said = process.communicate(timeout=120)[1]
    assert (process.returncode, "Each can be continued" in said) == (INTERRUPTED, True), said
    for name in (PLAIN, ZONED):
        with open(tmp_path / "demo" / name / "lock") as lock:  # nobody holds it any more
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_keys_at_the_worst_moment(tmp_path, monkeypatch, capfd) -> None:
    """Ctrl-C between a piece of news and its length: what follows makes no sense, and the demo
    fails or hangs.
    """
    read, pressed = Connection._recv, []

    def recv(self: Connection, size: int, *more: Any) -> Any:
        if not pressed and size != 4:  # which was the length
            pressed.append(size)
            os.kill(os.getpid(), signal.SIGINT)
        return read(self, size, *more)

    monkeypatch.setattr(Connection, "_recv", recv)
    options = ["--updates", "6000", "--hidden", "32", "--characters", "4000"]
    assert main(["demo", "--out", str(tmp_path / "demo"), *options]) == INTERRUPTED
    assert (
        pressed and "can be continued" in capfd.readouterr().err
    )  # both, or the one that had begun


@pytest.mark.parametrize("moment", ["introduction", "watch"])
@pytest.mark.parametrize("there", [False, True])
def test_keys_before_anything_was_begun(moment, there, tmp_path, monkeypatch, capfd) -> None:
    """Runs that were never there are said to be kept, and the same command then refuses what the
    first one left.
    """

    def press(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return before(*arguments)

    keys = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's job in the background has none
    folder, before = tmp_path / "demo", getattr(demo, moment)
    if there:
        folder.mkdir()
    monkeypatch.setattr(demo, moment, press)
    try:
        assert main(["demo", "--out", str(folder), *TINY]) == INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, keys)
    said = capfd.readouterr().err
    assert "nterrupted" in said and "continued" not in said and "kept" not in said
    assert folder.exists() == there and not list(tmp_path.glob("demo/*"))


def test_a_demo_of_which_one_run_had_begun(tmp_path) -> None:
    """A run that is not there is to be continued, by a command that then fails."""
    (tmp_path / ZONED).mkdir()
    (tmp_path / ZONED / "config.json").touch()
    said = demo.interrupted(tmp_path)
    assert (
        "the zoneout run is kept" in said
        and f"--out {tmp_path / ZONED}" in said
        and PLAIN not in said
    )


def test_an_error_in_a_worker_reaches_the_user(tmp_path, capfd) -> None:
    """A model that cannot be trained leaves the demo waiting for ever."""
    config = Config(data=demo.write_text(tmp_path / "text", 4000), device="nothing")
    with pytest.raises(ValueError, match="device: expected auto"):
        demo.side_by_side({"only": config}, tmp_path / "runs")
