"""Sweeps: every run once, whatever happens in between, and the same table."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fabricated import Page, shared_look
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import BASE, GRID, jobs, rows

from zoneout.paper.cli import main
from zoneout.paper.console import CONTROL
from zoneout.paper.data.datasets import DataError
from zoneout.paper.disk import RunError
from zoneout.paper.experiments import cluster, sweep
from zoneout.paper.experiments.sweep import run_local
from zoneout.paper.experiments.trials import (
    Row,
    axes_of,
    grid_of,
    part_of,
    read_ended,
    row_of,
    trial_of,
)
from zoneout.paper.report import sweep_page
from zoneout.paper.training import processes, runs
from zoneout.paper.training.config import change, changed, flags
from zoneout.paper.training.train import load_data, train


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep as it should come out, in this very process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("sweep")
    for job in jobs(out, fragile=0):
        assert job() == ""
    torch.set_num_threads(threads)
    return out


# --- what there is to run -------------------------------------------------------------------------


def test_a_grid_is_every_combination_with_every_seed() -> None:
    trials = grid_of(BASE, axes_of(["zoneout.cell=0,0.5", "model.cell=lstm,gru"]), 3)
    found = [(t.config.model.cell, t.config.zoneout.cell, t.config.seed) for t in trials]
    assert found == [
        (cell, rate, seed) for rate in (0.0, 0.5) for cell in ("lstm", "gru") for seed in (1, 2, 3)
    ]
    assert len({t.name for t in trials}) == 12
    assert grid_of(BASE, axes_of(["zoneout.cell=0,0.0,0"]), 1)[0].settings == {
        "zoneout.cell": 0.0,
        "seed": 1,
    }
    assert len(grid_of(BASE, axes_of(["zoneout.cell=0,0.0,0"]), 1)) == 1, (
        "the same run is there twice"
    )
    betas = grid_of(BASE, axes_of(["optimizer.betas=[0.9,0.99],[0.5,0.9]"]))
    assert [t.config.optimizer.betas for t in betas] == [(0.9, 0.99), (0.5, 0.9)]


def test_a_name_is_of_the_run_and_not_of_the_sweep() -> None:
    """A run that another grid had already is found, and one that differs in anything is another."""
    small, large = grid_of(BASE, axes_of(GRID)), grid_of(BASE, axes_of([*GRID, "model.hidden=8,9"]))
    assert small[0].digest == large[0].digest != large[1].digest
    other = change(BASE, {"optimizer.lr": 0.5})
    assert not {t.name for t in grid_of(other, axes_of(GRID))} & {t.name for t in small}
    longer = change(BASE, {"epochs": 99, "device": "auto", "log_every": 3})
    assert [t.name for t in grid_of(longer, axes_of(GRID))] == [t.name for t in small]
    epochs = grid_of(BASE, axes_of(["epochs=1,2"]))
    assert epochs[0].name != epochs[1].name, "runs of two lengths share a folder"


@given(st.text(min_size=1, max_size=300).filter(lambda text: not CONTROL.search(text)))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_any_string_makes_a_name_for_a_folder(text: str) -> None:
    """A corpus called ../../etc, or a name as long as a book, does not lead out of the sweep's
    folder.
    """
    name = trial_of(BASE, {"data.name": json.dumps(text)}).name
    assert (
        "/" not in name
        and "\\" not in name
        and name not in (".", "..")
        and len(name) < 200
        and name.isascii()
    )


@pytest.mark.parametrize(
    ("grid", "seeds", "says"),
    [
        (
            ["zoneout.cell"],
            1,
            (
                "--grid: expected a field and its values, as in zoneout.cell=0,0.1,0.5, got "
                "'zoneout.cell'"
            ),
        ),
        (["zoneout.cel=0"], 1, "zoneout.cel: there is no such field; the nearest are zoneout.cell"),
        (["zoneout.cell=0,2"], 1, "zoneout.cell: expected a rate between 0 and 1, got 2"),
        (["zoneout.cell=0", "zoneout.cell=1"], 1, "--grid: zoneout.cell is there twice"),
        (["seed=1,2"], 1, "--grid: seeds are not part of the grid; --seeds"),
        (
            ["zoneout.cell=0..0.5"],
            1,
            "zoneout.cell is a range, which only a search can draw from; add --search optuna",
        ),
        (["zoneout.cell=0.5..0"], 1, "--grid: expected a range from low to high"),
        (["optimizer.lr=0..1,log"], 1, "--grid: expected a range from low to high, above 0"),
        (["zoneout.cell=0"], 0, "--seeds: expected 1 or more, got 0"),
    ],
)
def test_what_cannot_be_gets_a_sentence(grid: list[str], seeds: int, says: str) -> None:
    with pytest.raises(ValueError) as error:
        grid_of(BASE, axes_of(grid), seeds)
    assert says in str(error.value)


def test_parts_are_all_there_is_and_nothing_twice() -> None:
    trials = grid_of(BASE, {}, 10)
    parts = [part_of(trials, f"{k}/3") for k in (1, 2, 3)]
    assert sorted((t for part in parts for t in part), key=lambda t: t.config.seed) == trials
    for wrong in ("0/3", "4/3", "3", "a/b", "-1/3"):
        with pytest.raises(ValueError, match="--part: expected K/N"):
            part_of(trials, wrong)


# --- running it -----------------------------------------------------------------------------------


def test_a_killed_worker_changes_nothing(undisturbed: Path, tmp_path: Path) -> None:
    """A process is killed with SIGKILL in the middle of a run: the run is lost, or comes out
    otherwise.
    """
    said: list[str] = []
    assert run_local(jobs(tmp_path), parallel=2, say=said.append) == {}
    assert (
        sum("its process died (exit code -9); another goes on with it" in line for line in said)
        == 1
    )
    assert rows(tmp_path) == rows(undisturbed)
    assert sweep_page.table(rows(tmp_path)) == sweep_page.table(rows(undisturbed))
    for job in jobs(tmp_path):
        assert (job.folder / "metrics.jsonl").read_bytes() == (
            undisturbed / job.folder.name / "metrics.jsonl"
        ).read_bytes()
    assert (tmp_path / "starts").read_text().splitlines() == [
        f"{jobs(tmp_path)[0].folder.name} {n}" for n in (0, 10)
    ]


def dead(code: int) -> Any:
    """A process that has ended with a code before it was given anything."""

    class Dead:
        exitcode = code

        def join(self) -> None:
            pass

    def start(*args: Any) -> Any:
        pipe, other = multiprocessing.Pipe()
        other.close()
        return pipe, Dead()

    return start


def test_a_job_that_always_dies_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of the sweep going round for ever."""
    monkeypatch.setattr(sweep, "_start", dead(-9))
    said: list[str] = []
    first, second, *_ = jobs(tmp_path)
    problems = run_local([first, second], parallel=2, say=said.append, retries=3)
    assert problems == dict.fromkeys(
        [first.trial.name, second.trial.name],
        "its process died 4 times, the last with exit code -9",
    )
    assert len(said) == 8


def test_a_process_that_was_asked_to_stop_has_not_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch system signals all processes at once: a worker that obeys before the sweep does
    counts as a failure.
    """
    monkeypatch.setattr(sweep, "_start", dead(0))
    first, *_ = jobs(tmp_path)
    assert run_local([first], parallel=1, say=lambda text: None) == {
        first.trial.name: "interrupted"
    }


def test_two_parts_that_end_at_once_both_write_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part renames the file that the other is still writing, which then fails."""
    others: list[str] = []
    sync = os.fsync

    def meanwhile(file: int) -> None:
        sync(file)
        if len(others) < 2:
            others.append("another part")
            sweep_page.write([], tmp_path, others[-1])

    monkeypatch.setattr(os, "fsync", meanwhile)
    sweep_page.write([], tmp_path, "one part")
    assert others and "one part" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.html", "results.json"]


def test_nothing_is_run_twice(
    undisturbed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The same command again trains nothing, and shows the same."""
    monkeypatch.setattr(
        sweep, "run_local", lambda jobs, **options: {"": "something was run"} if jobs else {}
    )
    before = {p: p.stat().st_mtime_ns for p in undisturbed.glob("*/*")}
    found = sweep.sweep(BASE, GRID, 2, undisturbed, say=lambda line: None)
    assert [dataclasses.replace(row, folder="", seconds=None) for row in found] == rows(undisturbed)
    assert {p: p.stat().st_mtime_ns for p in undisturbed.glob("*/*")} == before
    # Of a larger grid, only what is new.
    asked: list[Any] = []
    monkeypatch.setattr(sweep, "run_local", lambda jobs, **options: asked.extend(jobs) or {})
    said: list[str] = []
    found = sweep.sweep(BASE, ["zoneout.cell=0,0.25,0.5"], 2, undisturbed, say=said.append)
    assert said[0] == "4 of 6 runs are there already"
    assert re.fullmatch(r"training 2 runs, [12] at a time, in folders of .+", said[1])
    assert [job.trial.settings["zoneout.cell"] for job in asked] == [0.25, 0.25]
    assert [row.state for row in found] == ["finished"] * 2 + ["missing"] * 2 + ["finished"] * 2
    asked.clear()
    sweep.sweep(change(BASE, {"epochs": 3}), GRID, 2, undisturbed, say=lambda line: None)
    assert len(asked) == 4, "a longer run is a run to be continued"


def test_divergence_is_written_down_and_not_tried_again(tmp_path: Path) -> None:
    config = change(BASE, {"optimizer.lr": 1e38, "optimizer.rule": "sgd"})
    (trial,) = grid_of(config, {})
    job = sweep.Job(trial, tmp_path / trial.name)
    assert "training has diverged" in job()
    row = row_of(trial, job.folder)
    assert row.state == "diverged" and "training has diverged" in row.why
    said: list[str] = []
    assert [r.state for r in sweep.sweep(config, [], 1, tmp_path, say=said.append)] == ["diverged"]
    assert said == ["1 of 1 runs are there already"]


def test_the_time_that_is_given_is_kept_to(undisturbed: Path, tmp_path: Path) -> None:
    """A sweep runs past its end, or what it had done by then is lost."""
    found = sweep.sweep(BASE, GRID, 2, tmp_path / "none", say=lambda line: None, minutes=0)
    assert [(row.state, row.why) for row in found] == [("missing", "interrupted")] * 4
    assert not (tmp_path / "none").exists()
    job = jobs(tmp_path, fragile=0)[0]
    assert dataclasses.replace(job, until=time.time())() == "interrupted"
    checkpoint, _ = runs.Run(job.folder).latest()
    assert checkpoint is not None and checkpoint.state["update"] == 1
    assert dataclasses.replace(job, until=time.time() + 999)() == ""
    ours, theirs = (out / job.folder.name / "metrics.jsonl" for out in (tmp_path, undisturbed))
    assert ours.read_bytes() == theirs.read_bytes()


def test_every_job_of_a_sweep_has_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The minutes of the command do not reach the runs."""
    made: list[sweep.Job] = []
    monkeypatch.setattr(sweep, "run_local", lambda jobs, **options: made.extend(jobs) or {})
    monkeypatch.setattr(sweep, "end_after", lambda minutes: 60 * minutes)
    command = ["sweep", *flags(changed(BASE)), "--grid", GRID[0], "--out", str(tmp_path)]
    assert main.main([*command, "--minutes", "9"]) == 0
    assert [job.until for job in made] == [540, 540]
    made.clear()
    assert main.main(command) == 0
    assert [job.until for job in made] == [math.inf, math.inf]


def test_what_goes_wrong_with_one_run_is_told(tmp_path: Path) -> None:
    missing = change(BASE, {"data.name": str(tmp_path / "gone.txt")})
    (trial,) = grid_of(missing, {})
    assert "there is no such file" in sweep.Job(trial, tmp_path / trial.name)()
    row = row_of(trial, tmp_path / trial.name, "there is no such file")
    assert row.state == "failed" and "there is no such file" in sweep_page.table([row])


def test_a_folder_that_is_held_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep begun again a moment after its process was killed finds folders that are still
    held.
    """
    job = jobs(tmp_path, fragile=0)[0]
    held = runs.Run(job.folder)
    held.create(job.trial.config, None, load_data(job.trial.config).digest)
    monkeypatch.setattr(sweep, "WAIT", -1.0)
    assert "is in use by another process" in job()
    monkeypatch.setattr(sweep, "WAIT", 60.0)
    monkeypatch.setattr(sweep.time, "sleep", lambda seconds: held.close())
    assert job() == ""


def test_a_run_that_another_process_begins_meanwhile_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two sweeps at once one is told to continue a run with --resume, which the other has
    just ended.
    """
    job = jobs(tmp_path, fragile=0)[0]

    def late(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(sweep, "train", train)  # the other is faster, once
        train(job.trial.config, job.folder)
        return train(*args, **options)

    monkeypatch.setattr(sweep, "train", late)
    monkeypatch.setattr(sweep.time, "sleep", lambda seconds: None)
    assert job() == ""


def test_another_run_under_the_name_is_left_alone(tmp_path: Path) -> None:
    job = jobs(tmp_path, fragile=0)[0]
    run = runs.Run(job.folder)
    run.create(change(BASE, {"model.hidden": 9}), None)
    run.close()
    with pytest.raises(RunError, match=r"^model\.hidden: expected the value of the run in "):
        sweep.sweep(BASE, GRID, 2, tmp_path, say=lambda line: None)


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file in a folder, and what is in it."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("settings", "limit"),
    [({"epochs": 1}, "--epochs 1"), ({"updates": 20}, "--updates 20")],
    ids=["epochs", "updates"],
)
def test_one_table_is_of_one_length(
    undisturbed: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, limit: str
) -> None:
    """Runs that had more training than the new ones are to have stand beside them, as if they
    had had no more.
    """
    monkeypatch.setattr(
        sweep, "run_local", lambda jobs, **options: pytest.fail("something was run")
    )
    before = contents(undisturbed)
    with pytest.raises(RunError) as error:
        sweep.sweep(
            change(BASE, settings),
            ["zoneout.cell=0,0.25,0.5"],
            2,
            undisturbed,
            say=lambda line: None,
        )
    first = jobs(undisturbed)[0].folder
    assert str(error.value).startswith(f"{first} has had ")
    assert f"updates in 2 epochs already, which is more than {limit}" in str(error.value)
    assert "ask for as long or longer, or choose another folder with --out" in str(error.value)
    with pytest.raises(
        RunError, match=r"has had .* already"
    ):  # nor the part that has only what is new
        sweep.sweep(
            change(BASE, settings),
            ["zoneout.cell=0.25,0"],
            1,
            undisturbed,
            part="1/2",
            say=lambda line: None,
        )
    assert contents(undisturbed) == before


def test_one_table_is_of_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on what the text was stand beside runs on what it is now, as if they had learned the
    same.
    """
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_bytes(Path(BASE.data.name).read_bytes())
    base = change(BASE, {"data.name": str(text), "updates": 2})
    for job in [sweep.Job(trial, out / trial.name) for trial in grid_of(base, axes_of(GRID))]:
        assert job() == ""
    before = contents(out)
    monkeypatch.setattr(
        sweep, "run_local", lambda jobs, **options: pytest.fail("something was run") if jobs else {}
    )
    text.write_text(text.read_text(encoding="utf-8")[::-1], encoding="utf-8")
    for config, grid in (
        (base, GRID),
        (base, ["zoneout.cell=0,0.25"]),
        (change(base, {"updates": 3}), GRID),
    ):
        with pytest.raises(
            DataError, match=r"was trained on other data than .*text\.txt is now, and one table"
        ):
            sweep.sweep(config, grid, 1, out, say=lambda line: None)
    text.unlink()
    found = sweep.sweep(base, GRID, 1, out, say=lambda line: None)
    assert [row.state for row in found] == ["finished"] * 2, (
        "a table for which nothing is missing needs the data"
    )
    with pytest.raises(DataError, match="there is no such file"):
        sweep.sweep(base, ["zoneout.cell=0,0.25"], 1, out, say=lambda line: None)
    assert contents(out) == before


def test_a_search_is_of_one_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search learns from runs on what the text was then."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_bytes(Path(BASE.data.name).read_bytes())
    base = change(BASE, {"data.name": str(text), "updates": 2})
    trial = trial_of(base, {"zoneout.cell": "0.5"})
    assert sweep.Job(trial, out / trial.name)() == ""
    text.write_text(text.read_text(encoding="utf-8")[::-1], encoding="utf-8")
    monkeypatch.setattr(cluster, "search_ray", lambda *args: pytest.fail("something was run"))
    with pytest.raises(DataError, match=r"was trained on other data"):
        sweep.sweep(base, GRID, 1, out, search="optuna", say=lambda line: None)


def test_texts_of_a_grid_are_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of a sweep over texts can only be evaluated or continued in the folder that the
    sweep was begun in.
    """
    (tmp_path / "texts").mkdir()
    for name in ("one.txt", "two.txt", "valid.txt", "texts/three.txt"):
        (tmp_path / name).write_bytes(Path(BASE.data.name).read_bytes())
    monkeypatch.chdir(tmp_path)
    made: list[Any] = []
    monkeypatch.setattr(sweep, "run_local", lambda jobs, **options: made.extend(jobs) or {})
    grid = ["data.name=one.txt,texts/three.txt", "data.valid=valid.txt,none"]
    sweep.sweep(BASE, grid, 1, Path("out"), say=lambda line: None)
    texts, valid = [tmp_path / "one.txt", tmp_path / "texts/three.txt"], tmp_path / "valid.txt"
    found = [(job.trial.config.data.name, job.trial.config.data.valid) for job in made]
    assert found == [(str(text), part) for text in texts for part in (str(valid), None)]
    assert made[2].folder.name.startswith("data.name=three.txt,data.valid=valid.txt,seed=1-")
    made.clear()
    sweep.sweep(
        BASE,
        ["data.name=three.txt,python"],
        1,
        Path("out"),
        data=Path("texts"),
        say=lambda line: None,
    )
    assert [job.trial.config.data.name for job in made] == [str(texts[1]), "python"]


def test_a_combination_that_cannot_be_is_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep of many hours ends with half of its runs failed, for a reason that was there from
    the beginning.
    """
    monkeypatch.setattr(
        sweep, "run_local", lambda jobs, **options: pytest.fail("something was run")
    )
    with pytest.raises(
        ValueError,
        match=r"^model\.cell=gru,zoneout\.cell=0\.5,seed=.* cannot be: .*GRU has no cell",
    ):
        sweep.sweep(BASE, ["model.cell=lstm,gru", *GRID], 2, tmp_path, say=lambda line: None)
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C in the middle ends with a checkpoint, and the same command then gives what it would
    have given.
    """
    options = flags(changed(BASE))
    command = [
        sys.executable,
        "-m",
        "zoneout",
        "sweep",
        *options,
        "--grid",
        GRID[0],
        "--seeds",
        "2",
        "--json",
    ]
    environment = os.environ | {
        "PYTHONPATH": str(Path(main.__file__).parents[3]),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "a"), "--parallel", "1"],  # of two, either may be first
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment,
        start_new_session=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("training 4 runs, "), "nothing was told"
    assert process.stderr.readline().startswith("1/4 ")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130 and "interrupted; the same command goes on" in err
    states = [row["state"] for row in json.loads(out)]
    assert states[0] == "finished" and states[-1] != "finished"
    assert main.main([*command[3:], "--out", str(tmp_path / "a"), "--parallel", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in found] == ["finished"] * 4
    assert json.loads((tmp_path / "a" / "results.json").read_text()) == found
    assert main.main(["sweep", "char_ptb_zonout", "--out", str(tmp_path)]) == 2
    assert (
        "there is no recipe 'char_ptb_zonout'; the nearest are char_ptb_zoneout"
        in capsys.readouterr().err
    )


def test_a_signal_for_the_sweep_alone_stops_its_runs(tmp_path: Path) -> None:
    """`kill -INT`, or a notebook that is interrupted: the sweep waits for runs that nobody has
    told.
    """
    options = flags(changed(change(BASE, {"epochs": 10**6})))
    command = [
        sys.executable,
        "-m",
        "zoneout",
        "sweep",
        *options,
        "--grid",
        "updates=10,50000",
        "--parallel",
        "1",
    ]
    environment = os.environ | {
        "PYTHONPATH": str(Path(main.__file__).parents[3]),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("training 2 runs, ")
    assert process.stderr.readline().startswith("1/2 ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted; the same command goes on" in err
    assert "Traceback" not in err and json.loads(out)[0]["state"] == "finished"


def test_a_sweep_that_is_broken_off_ends_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for more jobs, and Python waits for them at its end: nothing ends."""

    class Pipe:
        closed = False

        def send(self, job: Any) -> None: ...

        def close(self) -> None:
            self.closed = True

    pipes = [Pipe(), Pipe()]

    def broken_off(ready: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "_start", lambda fresh, number, threads: (pipes[number], object()))
    monkeypatch.setattr(sweep, "wait", broken_off)
    with pytest.raises(KeyboardInterrupt):
        run_local(jobs(tmp_path), parallel=2, say=lambda text: None)
    assert all(pipe.closed for pipe in pipes)


def test_processes_keep_to_the_threads_that_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With OMP_NUM_THREADS=1 on a machine that is in use, each process takes all processors, and
    ten times as long.
    """
    monkeypatch.setattr(processes, "cores", lambda: 8)
    for allowed, shared_by, each in ((1, 2, 1), (8, 2, 4), (3, 2, 3), (8, 16, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda allowed=allowed: allowed)
        assert processes.threads_of_each(shared_by) == each


def test_the_recipe_is_what_the_options_leave_open() -> None:
    command = main.parse(
        "sweep", ["char_ptb_zoneout", "--grid", "zoneout.cell=0.25,0.5", "--epochs", "3"]
    )
    assert command.config.model.hidden == 1000 and command.config.zoneout.hidden == 0.05
    assert command.config.epochs == 3 and command.grid == ("zoneout.cell=0.25,0.5",)


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    for options, says in (
        (
            {"engine": "local", "search": "optuna"},
            "--search: plain processes have no such thing; use --engine ray",
        ),
        ({"engine": "local", "gpus": 0.5}, "--gpus: plain processes have no such thing"),
        ({"search": "optuna"}, "--search: expected a --grid to choose from"),
        ({"parallel": -1}, "--parallel, --trials: expected 0 or more"),
        ({"engine": "ray", "minutes": 9.0}, "--minutes: Ray's runs have no such limit"),
        ({"minutes": -1.0}, "minutes: expected 0 or more, got -1"),
    ):
        with pytest.raises(ValueError, match=says):
            sweep.sweep(BASE, [], 1, tmp_path, **options)  # type: ignore[arg-type]


def test_without_ray_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        ValueError,
        match=r"ray is not installed; try pip install 'zoneout\[cluster\]' \(in a clone: "
        r"'\.\[cluster\]'\), or use --engine local",
    ):
        sweep.sweep(BASE, GRID, 1, tmp_path, engine="ray")
    with pytest.raises(
        ValueError,
        match=r"--search: the package optuna is not installed; try pip install 'zoneout\[",
    ):
        cluster.search_ray(BASE, axes_of(GRID), tmp_path, 3, cluster.Cluster(), print)


# --- what came out --------------------------------------------------------------------------------


def row(cell: float, seed: int, valid: float | None, state: Any = "finished", why: str = "") -> Row:
    settings = {"zoneout.cell": cell, "seed": seed}
    return Row(
        "name", "", settings, state, "bits" if valid else "", valid, valid and valid + 1, why=why
    )


def test_the_table_has_the_best_first_and_the_spread_over_seeds() -> None:
    found = [row(0.0, 1, 2.0), row(0.0, 2, 4.0), row(0.5, 1, 1.0), row(0.5, 2, None, "missing")]
    found += [row(0.9, 1, None, "failed", "no disk"), row(0.7, 1, 9.0, "stopped")]
    assert (
        sweep_page.table(found)
        == """\
| zoneout.cell | valid            | test             | runs                  |
|--------------|------------------|------------------|-----------------------|
| 0.5          | 1.000 bits       | 2.000 bits       | 1 finished, 1 missing |
| 0.0          | 3.000 bits ± 1.4 | 4.000 bits ± 1.4 | 2                     |
| 0.9          |                  |                  | 1 failed              |
| 0.7          | (9.000 bits)     |                  | 1 stopped             |

name: no disk"""
    )


def test_a_sweep_can_leave_its_tests_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best settings are chosen beside their tests, in the table or on the page."""
    config = change(BASE, {"evaluation.skip_test": True, "epochs": 1})
    arguments = [*flags(changed(config)), "--grid", GRID[0], "--parallel", "1"]
    assert main.main(["sweep", *arguments, "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "| zoneout.cell | valid" in out and "valid 4" in err + out
    for text in (out, err, page):
        assert not re.search(r"\| test|, test \d|>test<", text)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["test"] for row in results] == [None, None]


def test_the_page_has_the_shared_look_and_escapes_every_string(undisturbed: Path) -> None:
    """What somebody calls a corpus, or an error says, becomes markup in the reader's browser; or
    formulas.
    """
    evil = "<script>alert(1)</script>"
    folder = next(p for p in undisturbed.iterdir() if p.is_dir())
    rows = [
        dataclasses.replace(row(0.0, 1, 2.0, why=evil), folder=str(folder), name=f"$x^{evil}$-1"),
        Row(evil, evil, {evil: evil, "seed": 1}, "failed", why=evil),
    ]
    for order in (rows, rows[::-1]):
        page = sweep_page.page(order, f"{evil} & more")
        assert shared_look(page)
        assert "<script" not in page and "&lt;script&gt;" in page and "&amp; more" in page
        texts = [text for _, text in Page(page).all("text")]
        assert any(text.startswith(f"$x^{evil}$, best ") for text in texts), (
            "the legend has another name"
        )


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_an_end_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    """One file that was damaged by hand stops a whole sweep, which does not say where it is."""
    (tmp_path / "ended.json").write_text(text)
    with pytest.raises(RunError, match=r"ended\.json cannot be read"):
        read_ended(tmp_path)
