"""Reproducing: what is missing is run once, what was interrupted goes on, and the tables say
what the records say.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fabricated
import numpy as np
import pytest
import torch

from zoneout.paper.cli import main as cli
from zoneout.paper.cli import options
from zoneout.paper.cli.reproduce import Reproduce
from zoneout.paper.data.datasets import DataError
from zoneout.paper.disk import RunError, write_record
from zoneout.paper.experiments import reproduce as module
from zoneout.paper.experiments import results as pages
from zoneout.paper.experiments.recipes import RECIPES, Recipe, select
from zoneout.paper.experiments.recipes.registry import QUOTED
from zoneout.paper.experiments.reproduce import reproduce
from zoneout.paper.experiments.results import FORMAT, command_of, document, read_record, table
from zoneout.paper.training.config import (
    Batches,
    Config,
    Data,
    Evaluation,
    Model,
    Optimizer,
    Protocol,
    Zoneout,
    change,
    to_json,
)
from zoneout.paper.training.evaluate import evaluate
from zoneout.paper.training.exit_codes import BAD_DATA, FAILED, INTERRUPTED
from zoneout.paper.training.measures import pooled, reached, z_score
from zoneout.paper.training.runs import Run, load, read_metrics
from zoneout.paper.training.train import load_data, stop_requests, train

ROOT = Path(__file__).parents[2]
TEXT = str(Path(__file__).parent / "golden" / "text.txt")
TINY = Config(
    data=Data(TEXT),
    batches=Batches(size=16, length=25),
    model=Model(hidden=8, embedding=0, one_bias=True, learn_initial_state=True),
    zoneout=Zoneout(cell=0.5, hidden=0.05),
    optimizer=Optimizer("adam", lr=0.01),
    evaluation=Evaluation(Protocol("chunks", length=25), Protocol("whole", length=100)),
    epochs=2,
    log_every=4,
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row of char-ptb that takes no time, and one that cannot end well."""
    monkeypatch.chdir(tmp_path)
    add("char_ptb_tiny", TINY, valid=9.0, test=1.0)
    add("char_ptb_bad", change(TINY, {"optimizer.rule": "sgd", "optimizer.lr": 1e38}))
    yield
    for name in ("char_ptb_tiny", "char_ptb_bad"):
        del RECIPES[name]


def main(arguments: list[str]) -> int:
    return options.read(Reproduce, "zoneout reproduce", arguments)()


def add(name: str, config: Config, **numbers: Any) -> None:
    paper: dict[str, Any] = {"valid": None, "test": None, "where": "here", "held": True}
    RECIPES[name] = Recipe(name, "char-ptb", "Tiny", lambda: config, **(paper | numbers))


def quiet(text: str) -> None:
    pass


def run(*rows: str, **options: Any) -> str:
    return reproduce(
        "char-ptb",
        rows,
        **({"out": "out", "results": "res", "device": "cpu", "say": quiet} | options),
    )


# --- running --------------------------------------------------------------------------------------


def test_what_is_missing_is_run_and_what_is_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished run would be trained again, or a missing one passed over."""
    said: list[str] = []
    assert run("tiny", seeds=(1, 2), say=said.append) == "finished"
    assert "no run yet" in said[0] and "no run yet" not in said[-1] and "| 1, 2 |" in said[-1]
    before = {p: p.read_bytes() for p in Path("res").rglob("*.json")}
    assert sorted(p.as_posix() for p in before) == [
        f"res/char_ptb_tiny/seed-{n}.json" for n in (1, 2)
    ]
    trained: list[Path] = []
    monkeypatch.setattr(
        module, "train", lambda *args, **kw: trained.append(args[1]) or train(*args, **kw)
    )
    assert run("tiny", seeds=(1, 2, 3)) == "finished"
    assert trained == [Path("out/char_ptb_tiny/seed-3")]
    assert all(path.read_bytes() == content for path, content in before.items())


def test_without_seeds_those_of_the_recipe_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that states three seeds would be run with one, or one with a record again."""
    add("char_ptb_tiny", TINY, seeds=(2, 5), spare=(7,))
    began: list[tuple[str, int]] = []
    monkeypatch.setattr(
        module, "attempt", lambda job: began.append((RECIPES[job.recipe].short, job.seed))
    )
    fabricated.write(Path("res"), fabricated.record("char_ptb_tiny", 2, device="cpu"))
    monkeypatch.setattr(module, "CODES", {None: 0})
    run("tiny", "bad")
    assert began == [("bad", 1), ("tiny", 5)]
    found = pages.missing("res", [RECIPES["char_ptb_tiny"]])
    assert [(one.seeds, one.spare) for one in found] == [((5,), False), ((7,), True)]
    plain, spare = (one.command for one in found)
    assert plain == "zoneout reproduce char_ptb_tiny --precision bf16"
    assert " --first-seed 7 " in spare and "--seeds" not in spare


def test_what_is_missing_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody can see which runs the tables still wait for, or a row that is left out seems to be
    forgotten.
    """
    assert main([]) == 0
    listed = capsys.readouterr().out.partition("Missing:")[2]
    assert "  zoneout reproduce char_ptb_tiny --precision bf16  # seed 1\n" in listed
    assert "  text8_prefix_batch_norm: about 105 minutes" in listed.partition("Not to be run:")[2]
    assert "# seeds 1, 2, after python experiments/awd_grids.py words\n" in listed


PAGE = ROOT / "docs" / "reproducing.md"


def test_every_missing_run_has_its_place_in_a_use_of_a_gpu() -> None:
    """Minutes of a GPU go to a row that is not there, in a wrong precision, or that cannot end."""
    section = PAGE.read_text(encoding="utf-8").partition("## The missing runs")[2]
    section = section.partition("\n## ")[0]
    uses = re.findall(r"^\| (\d+) \| `.*?` \| (\d+) \|", section, re.M)
    assert len(uses) > 30
    minutes: Counter[int] = Counter()
    for use, took in uses:
        minutes[int(use)] += int(took)
    assert sorted(minutes) == list(range(1, len(minutes) + 1)) and max(minutes.values()) <= 25
    planned: dict[str, set[int]] = {}
    for words in map(str.split, re.findall(r"`zoneout reproduce ([^`]*)`", section)):
        if words[0] in ("ROW", "--write"):
            continue
        given = options.plain(Reproduce, "zoneout reproduce", words)
        if given.results is not None:  # nothing reads records that are elsewhere
            assert f"`cp -r {given.results}/. results/`" in section
        for recipe in select(given.task or "", given.rows):
            assert given.precision == recipe.gpu_precision, recipe.name
            planned.setdefault(recipe.name, set()).update(given.chosen_seeds() or recipe.seeds)
    missing = [one for one in pages.missing(ROOT / "results") if not one.spare]
    for one in missing:
        if one.recipe.where != "here" and "gradients" not in one.command:
            assert planned.get(one.recipe.name, set()) >= set(one.seeds), one.recipe.name


def test_the_page_has_the_epochs_of_the_recipes() -> None:
    """Two places of the page differ, or both from what is run."""
    text = PAGE.read_text(encoding="utf-8")
    costs = re.findall(r"^\| `(\w+)` \|(?: [^|]+ \|){3} (\d+) \| \d+ \|$", text, re.M)
    systems = re.findall(r"^\| surprisal-driven zoneout \|.* for (\d+) epochs", text, re.M)
    assert len(costs) == 4 and len(systems) == 1
    for name, epochs in [*costs, ("char_ptb_surprisal_zoneout", *systems)]:
        assert RECIPES[name].make().epochs == int(epochs), name


def test_a_record_has_a_test() -> None:
    """A run is trained for hours, and then no record can be made of it."""
    with pytest.raises(ValueError, match="skip_test: expected false, since every record has"):
        run("tiny", settings={"evaluation.skip_test": True})
    assert not Path("out").exists()


def test_a_row_about_a_precision_is_run_in_it() -> None:
    """A run in float32 would pass for the row that asks what TF32 changes."""
    add("char_ptb_tiny", TINY, precision="bf16")
    with pytest.raises(ValueError, match="precision: expected bf16 for char_ptb_tiny, got fp32"):
        run("tiny", precision="fp32")
    assert run("tiny") == "finished"
    assert read_record(Path("res/char_ptb_tiny/seed-1.json"))["precision"] == "bf16"


def test_a_record_says_what_the_run_found(tmp_path: Path) -> None:
    run("tiny")
    record = read_record(Path("res/char_ptb_tiny/seed-1.json"))
    rows = read_metrics("out/char_ptb_tiny/seed-1")
    valid = [r for r in rows if r["kind"] == "valid"]
    assert record["valid"] == min(r["bits"] for r in valid) and record["test"] == rows[-1]["bits"]
    found = {(s["part"], s["protocol"]): s for s in record["scores"]}
    assert set(found) == {
        (part, how) for part in ("valid", "test") for how in ("chunks of 25", "one sequence")
    }
    # The weights are judged again from their file, with the same result.
    assert found["valid", "chunks of 25"]["bits"] == pytest.approx(record["valid"], rel=1e-6)
    assert found["test", "one sequence"]["bits"] == pytest.approx(record["test"], rel=1e-6)
    assert record["curve"]["valid"] == [round(r["bits"], 5) for r in valid]
    assert all(nats > 0 for nats in record["curve"]["train_nats"])
    assert record["config"] == to_json(change(TINY, {"device": "cpu"}))
    assert record["command"] == "zoneout reproduce char_ptb_tiny --first-seed 1 --precision fp32"
    assert str(tmp_path) not in json.dumps(record), "a folder of this machine's"
    assert (
        record["epochs"] == 2
        and record["seconds"] > 0
        and record["versions"]["torch"] == torch.__version__
    )


def test_the_time_of_an_update_leaves_validations_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first minute of a run does not show whether it will end in time."""
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    tell = module.lines(module.Job("char_ptb_tiny", 1, Path("out"), Path("res")))
    valid = {"kind": "valid", "epoch": 1.0, "bits": 2.0}
    for kind, seconds in (("train", 1.0), ("valid", 60.0), ("train", 0.5), ("train", 0.2)):
        now += seconds
        tell(valid if kind == "valid" else {"kind": kind, "update": 100 + int(now * 500)})
    tell(valid)
    first, second = capfd.readouterr().err.splitlines()
    assert "ms an update" not in first and "min, 2 ms an update, valid 2.0000" in second


def test_a_record_has_the_mean_of_many_passes() -> None:
    """The paper's 73.4 is such a mean, and a run on another machine leaves its record alone."""
    variational = {"hidden": 0.3, "output": 0.3, "words": 0.3}
    fields = {f"variational_dropout.{name}": rate for name, rate in variational.items()}
    add("char_ptb_tiny", change(TINY, {**fields, "model.embedding": 8}), samples=3)
    run("tiny")
    *others, mean = read_record(Path("res/char_ptb_tiny/seed-1.json"))["scores"]
    assert (mean["part"], mean["protocol"], mean["at_eval"]) == (
        "test", "one sequence", "mean of 3 passes",
    )  # fmt: skip
    loaded = load("out/char_ptb_tiny/seed-1")
    data = load_data(loaded.config)
    assert mean["bits"] == evaluate(loaded.model, data, "test", loaded.config, samples=3).bits
    assert [s["at_eval"] for s in others] == ["expectation"] * 4
    shown = pages.table("res", [RECIPES["char_ptb_tiny"]])
    assert f"| `char_ptb_tiny`, mean of 3 passes |  |  |  | {mean['bits']:.3f} |" in shown


def interrupted_at(update: int) -> Any:
    def listener(job: Any) -> Any:
        def tell(event: dict[str, Any]) -> None:
            if event["kind"] == "step" and event["update"] == update:
                os.kill(os.getpid(), signal.SIGINT)

        return tell

    return listener


def test_an_interrupted_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C would lose a run, or the next call would begin it anew."""
    assert run("tiny", out="whole", results="whole-res") == "finished"
    with monkeypatch.context() as patch:
        patch.setattr(module, "lines", interrupted_at(7))
        assert run("tiny", seeds=(1, 2)) == "interrupted"
    assert not Path("res").exists() and not Path("out/char_ptb_tiny/seed-2").exists(), (
        "it went on to the next run"
    )
    assert Run("out/char_ptb_tiny/seed-1").checkpoints()[0].name == "00000007"
    write_record(
        Path("out/char_ptb_tiny/seed-1/at_once.json"), {"at_once": 3}
    )  # as if two had been beside it
    assert run("tiny") == "finished"
    assert read_record(Path("res/char_ptb_tiny/seed-1.json"))["at_once"] == 3, (
        "its minutes are those of one by itself"
    )
    ours, theirs = (
        read_record(Path(f"{f}/char_ptb_tiny/seed-1.json")) for f in ("res", "whole-res")
    )
    same = ("valid", "test", "scores", "curve", "updates")
    assert [ours[name] for name in same] == [theirs[name] for name in same]


def test_the_time_that_is_given_is_kept_to(tmp_path: Path) -> None:
    """A call would run past its end; or what it had done by then would be lost."""
    assert run("tiny", minutes=0) == "interrupted" and not Path("out").exists()
    config = change(TINY, {"device": "cpu"})
    summary = train(config, "stopped", deadline=time.monotonic())
    assert summary.status == "interrupted" and summary.update == 1
    assert train(None, "stopped", resume=True, deadline=time.monotonic() + 999).status == "finished"
    train(config, "whole")
    assert Path("stopped/metrics.jsonl").read_bytes() == Path("whole/metrics.jsonl").read_bytes()


def test_a_finished_run_without_a_record_is_only_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine went away between the training and the record: the training would be done
    again.
    """
    run("tiny")
    before = Path("res/char_ptb_tiny/seed-1.json").read_text()
    Path("res/char_ptb_tiny/seed-1.json").unlink()
    monkeypatch.setattr(module, "train", None)
    assert run("tiny") == "finished"
    assert Path("res/char_ptb_tiny/seed-1.json").read_text() == before


def test_a_run_that_diverges_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bad", "tiny") == "diverged"
    assert (
        "char_ptb_bad, seed 1:" in (err := capsys.readouterr().err)
        and "training has diverged" in err
    )
    assert Path("res/char_ptb_tiny/seed-1.json").exists() and not Path("res/char_ptb_bad").exists()


@pytest.mark.parametrize("how", ["Ctrl-C", "deadline"])
def test_the_scores_of_a_record_can_be_stopped(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call runs past its end by minutes of tests, or ends with a traceback."""
    assert run("tiny", out="whole", results="whole-res") == "finished"
    clock = SimpleNamespace(time=lambda: 1000.0, monotonic=time.monotonic)

    def stop(*args: Any, **options: Any) -> Any:
        if how == "Ctrl-C":
            os.kill(os.getpid(), signal.SIGINT)
        clock.time = lambda: 1061.0
        return evaluate(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, "time", clock)
        patch.setattr(pages, "evaluate", stop)
        assert run("tiny", minutes=math.inf if how == "Ctrl-C" else 1) == "interrupted"
    assert not Path("res").exists()
    monkeypatch.setattr(module, "train", None)  # training is over
    assert run("tiny") == "finished"
    ours, theirs = (
        read_record(Path(f"{f}/char_ptb_tiny/seed-1.json")) for f in ("res", "whole-res")
    )
    assert ours["scores"] == theirs["scores"]


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception, *rows: str, **options: Any) -> str:
    """Run rows of which the bad one raises the error when it is to be trained."""

    def begin(config: Config, folder: Path, **others: Any) -> Any:
        if "bad" in str(folder):
            raise error
        return train(config, folder, **others)

    monkeypatch.setattr(module, "train", begin)
    return run(*rows, **options)


@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize(
    ("error", "state", "traced"),
    [
        (RuntimeError("a capture failed"), "failed", True),
        (KeyError("a wrong name"), "failed", True),
        (RuntimeError("CUDA out of memory"), "failed", False),
        (OSError("no space left"), "failed", False),
        (RunError("the folder is in use"), "failed", False),
        (DataError("there are no data"), "without data", False),
        (ValueError("hidden: expected a number"), "refused", False),
    ],
    ids=str,
)
def test_an_error_ends_its_row_only(
    parallel: int,
    error: Exception,
    state: str,
    traced: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One row ends the command, and the GPU is idle; or the command does not say which row."""
    said: list[str] = []
    monkeypatch.setattr(module, "several", module.together)
    options: dict[str, Any] = {"parallel": parallel, "say": said.append}
    assert failing(monkeypatch, error, "bad", "tiny", **options) == state
    assert Path("res/char_ptb_tiny/seed-1.json").exists()
    assert said[-1] == (
        f"Without a record: char_ptb_bad, seed 1 ({state}). The same command tries again."
    )
    err = capfd.readouterr().err
    assert str(error) in err and ("Traceback" in err and "raise error" in err) == traced


def test_an_error_in_a_process_ends_its_row_only(capfd: pytest.CaptureFixture[str]) -> None:
    """As above, where the rows are processes of their own."""
    seeds = (1, 2, 3)
    Path("out/char_ptb_zoneout/seed-2").mkdir(parents=True)
    Path("out/char_ptb_zoneout/seed-2/config.json").write_text("{")  # cannot be read
    said: list[str] = []
    found = run("zoneout", seeds=seeds, parallel=2, settings=SMALL, say=said.append)
    assert found == "failed" and "char_ptb_zoneout, seed 2 (failed)." in said[-1]
    assert [Path(f"res/char_ptb_zoneout/seed-{n}.json").exists() for n in seeds] == [1, 0, 1]


@pytest.mark.parametrize("how", ["one_by_one", "together"])
def test_no_row_is_begun_on_a_gpu_that_is_lost(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All later rows fail too, or the command says that there was no time for them."""
    error, said = RuntimeError("an illegal memory access was encountered"), list[str]()

    def synchronize(device: object) -> None:
        raise error

    monkeypatch.setattr(module, "one_by_one", getattr(module, how))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert failing(monkeypatch, error, "bad", "tiny", parallel=1, say=said.append) == "GPU lost"
    assert said[-1] == (
        "Without a record: char_ptb_bad, seed 1 (GPU lost); char_ptb_tiny, seed 1 (not begun). "
        "The same command tries again."
    )
    assert not Path("out/char_ptb_tiny").exists() and module.CODES["GPU lost"] == FAILED
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert failing(monkeypatch, error, "bad", "tiny", parallel=1) == "failed"
    assert Path("res/char_ptb_tiny/seed-1.json").exists()


def test_zoneout_and_unregularised_come_first_and_seeds_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began: list[tuple[str, int]] = []
    monkeypatch.setattr(
        module,
        "attempt",
        lambda job: began.append((RECIPES[job.recipe].short, job.seed)) or "failed",
    )
    assert run("weight_noise", "zoneout", "gru_zoneout", "unregularised", seeds=(1, 2)) == "failed"
    first = [("zoneout", 1), ("unregularised", 1), ("weight_noise", 1), ("gru_zoneout", 1)]
    assert began == first + [(row, 2) for row, _ in first]


SMALL = {
    "data.name": TEXT,
    "model.hidden": 8,
    "batches.length": 25,
    "epochs": 1,
    "evaluation.valid.length": 25,
    "evaluation.test.length": 100,
}


def test_several_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Runs in processes of their own find what they would have found alone."""
    assert run("zoneout", seeds=(1, 2), parallel=2, settings=SMALL) == "finished"
    assert "char_ptb_zoneout, seed 2: epoch 1" in capfd.readouterr().err
    run("zoneout", seeds=(2,), settings=SMALL, out="alone", results="alone-res")
    ours, theirs = (
        read_record(Path(f"{f}/char_ptb_zoneout/seed-2.json")) for f in ("res", "alone-res")
    )
    assert (
        ours["at_once"] == 2
        and ours["valid"] == theirs["valid"]
        and ours["scores"] == theirs["scores"]
    )
    run("zoneout", seeds=(3,), parallel=4, settings=SMALL)
    assert read_record(Path("res/char_ptb_zoneout/seed-3.json"))["at_once"] == 1, (
        "nobody was beside it"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whoever_stops_the_parent_stops_its_runs(number: int, tmp_path: Path) -> None:
    """A signal for the parent alone, from a notebook or a supervisor: its runs train on, or lose
    what they have.
    """
    settings = [f"--set={name}={value}" for name, value in (SMALL | {"epochs": 10**6}).items()]
    command = [
        sys.executable,
        "-m",
        "zoneout",
        "reproduce",
        "char_ptb_zoneout",
        "--seeds",
        "2",
        "--parallel",
        "2",
    ]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [
            *command,
            "--device",
            "cpu",
            "--out",
            "out",
            "--results",
            "res",
            "--minutes",
            "2",
            *settings,
        ],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seeds = {1, 2}
    while seeds:  # until both have validated
        line = process.stderr.readline()
        seeds -= {
            seed for seed in seeds if line.startswith(f"char_ptb_zoneout, seed {seed}: epoch")
        }
        assert line
    process.send_signal(number)
    out, err = process.communicate(
        timeout=60
    )  # which waits for the runs too: they write to the same pipe
    assert "Traceback" not in err, err
    assert process.returncode == (-number if number == signal.SIGKILL else INTERRUPTED)
    assert number == signal.SIGKILL or [
        out.count(f"seed {seed}: interrupted") for seed in (1, 2)
    ] == [1, 1]
    for seed in (1, 2):
        folder = Path(f"out/char_ptb_zoneout/seed-{seed}")
        found, problems = Run(folder).latest()
        last = [row["update"] for row in read_metrics(folder)][-1]
        assert found is not None and not problems and found.state["update"] >= last
        assert found.metrics_bytes == (folder / "metrics.jsonl").stat().st_size, (
            "it stopped without a checkpoint"
        )


def test_a_run_that_ended_while_all_were_stopped_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has its record already is called interrupted, or one that never began is called
    failed.
    """

    class Ended:
        def __init__(self, target: Any, args: tuple[Any, ...]) -> None:
            self.exitcode = {1: 0, 2: -signal.SIGTERM, 3: 4}[args[0].seed]
            self.sentinel, self.other = os.pipe()
            os.close(self.other)

        def start(self) -> None:
            if self.exitcode == 4:
                os.kill(os.getpid(), signal.SIGINT)

        def terminate(self) -> None:
            pass

        def join(self) -> None:
            os.close(self.sentinel)

    class Context:
        Process = Ended

    monkeypatch.setattr(module.multiprocessing, "get_context", lambda kind: Context)
    jobs = [
        module.Job("char_ptb_tiny", seed, Path("out"), Path("res"), at_once=3) for seed in (1, 2, 3)
    ]
    found = {job.seed: state for job, state in module.several(jobs)}
    assert found == {1: "finished", 2: "interrupted", 3: "diverged"}


def test_what_went_wrong_has_one_code_alone_and_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A script cannot tell missing data from a run that failed where several run at once."""
    monkeypatch.setenv("ZONEOUT_CACHE", "nothing")
    monkeypatch.delenv("ZONEOUT_DATA", raising=False)
    arguments = [
        "reproduce",
        "text8_zoneout",
        "text8_unregularised",
        "--set",
        "epochs=1",
        "--device",
        "cpu",
    ]
    assert cli.main(arguments) == cli.main([*arguments, "--parallel", "2"]) == BAD_DATA


def in_threads(monkeypatch: pytest.MonkeyPatch, **options: str) -> tuple[Any, Any]:
    """The record of seed 2 out of three runs at once in one process, and that of the same run
    alone.
    """
    monkeypatch.setattr(module, "several", module.together)
    assert run("zoneout", seeds=(1, 2, 3), parallel=2, settings=SMALL, **options) == "finished"
    run("zoneout", seeds=(2,), settings=SMALL, out="alone", results="alone-res", **options)
    ours, theirs = (
        read_record(Path(f"{f}/char_ptb_zoneout/seed-2.json")) for f in ("res", "alone-res")
    )
    return ours, theirs


def test_several_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, runs that share a process disturb each other: by torch's generator, its
    settings or their data.
    """
    ours, theirs = in_threads(monkeypatch)
    assert (
        ours["at_once"] == 2
        and ours["curve"] == theirs["curve"]
        and ours["scores"] == theirs["scores"]
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "precision"), [(100, "tf32"), (1000, "bf16"), (1200, "tf32")])
def test_several_on_one_gpu(monkeypatch: pytest.MonkeyPatch, hidden: int, precision: str) -> None:
    """If this fails, a run finds other numbers when others share the GPU: a buffer is theirs too,
    or sums change order.

    Each size takes another kernel.
    """
    monkeypatch.setitem(SMALL, "model.hidden", hidden)
    ours, theirs = in_threads(monkeypatch, device="cuda", precision=precision)
    assert ours["curve"] == theirs["curve"] and ours["scores"] == theirs["scores"]


def test_ctrl_c_reaches_runs_in_threads() -> None:
    """If this fails, Ctrl-C leaves runs that share a process without a checkpoint, or does not
    stop them.
    """
    with stop_requests() as asked, ThreadPoolExecutor(1) as thread:

        def listening() -> bool:
            with stop_requests() as asked_there:
                return asked_there()

        assert not thread.submit(listening).result() and not asked()
        os.kill(os.getpid(), signal.SIGINT)
        assert thread.submit(listening).result() and asked()
    with stop_requests() as asked:
        assert not asked()


def test_the_command_of_a_record_makes_the_run_again() -> None:
    """A shell takes the command apart, or it makes another run."""
    recipe = RECIPES["char_ptb_zoneout"]
    settings = {
        "optimizer.betas": [0.5, 0.9],
        "data.name": "it's my text",
        "data.limit": None,
        "batches.offset": False,
    }
    config = change(recipe.make(), {"seed": 3, "precision": "bf16"} | settings)
    _, _, *words = shlex.split(command_of(recipe.name, config))
    command = options.read(Reproduce, "zoneout reproduce", words)
    made = dict(setting.split("=", 1) for setting in command.set)
    own = {"seed": command.first_seed, "precision": command.precision}
    assert command.task == recipe.name and change(recipe.make(), made | own) == config


def test_settings_of_ones_own_do_not_pass_for_the_recipe() -> None:
    """A short trial would stand in the table as the paper's row, or would be gone on with as if
    it were.
    """
    run("tiny", settings={"epochs": 1})
    record = read_record(Path("res/char_ptb_tiny/seed-1.json"))
    assert record["command"].endswith(" --set epochs=1")
    shown = table("res", [RECIPES["char_ptb_tiny"]])
    assert (
        "no run yet" in shown
        and "Left out: `char_ptb_tiny`, seed 1, had other settings (epochs is 1, not 2)" in shown
    )
    with pytest.raises(
        RunError, match=r"seed-1\.json is of other settings: epochs is 1 there and 2 here"
    ):
        run("tiny")
    with pytest.raises(ValueError, match=r"epoch: there is no such field"):
        run("tiny", settings={"epoch": 1}, results="other")
    with pytest.raises(ValueError, match=r"parallel: expected 1 or more, got 0"):
        run("tiny", parallel=0)


# --- the tables -----------------------------------------------------------------------------------


def test_z_is_what_numpy_computes() -> None:
    """A row with more scatter, or with fewer seeds, would be held to less than another."""
    draw = np.random.default_rng(3)
    rows = [draw.normal(1.4, sd, n) for sd, n in ((0.01, 3), (0.05, 4), (0.03, 2), (0.9, 1))]
    centred = np.concatenate([row - row.mean() for row in rows])
    own_sd = math.sqrt((centred**2).sum() / (len(centred) - len(rows)))
    scatter = pooled([row.tolist() for row in rows])
    assert scatter == pytest.approx(own_sd)
    for row in rows:
        sd = min(own_sd, np.std(row, ddof=1)) if len(row) > 2 else own_sd
        expected = (row.mean() - 1.38) / (sd * math.sqrt(1 + 1 / len(row)))
        assert z_score(row.tolist(), 1.38, scatter) == pytest.approx(expected)
    assert {sd < own_sd for sd in (np.std(rows[0], ddof=1), np.std(rows[1], ddof=1))} == {
        True,
        False,
    }
    assert z_score([1.4, 1.5], 1.38, None) is None and z_score([1.0, 1.0, 1.0], 1.0, None) == 0.0


@pytest.mark.parametrize(
    ("z", "verdict"),
    [
        (1.65, "yes"),
        (1.66, "no"),
        (-1.99, "yes"),
        (-2.0, "differs"),
        (None, None),
        (math.inf, "no"),
    ],
)
def test_what_reached_means(z: float | None, verdict: str | None) -> None:
    """A row that misses passes, or one that is far too good counts as a success."""
    assert reached(z) == verdict


def made_up(name: str, seed: int, valid: float, test: float, **other: Any) -> None:
    recipe = RECIPES[name]
    score = {"at_eval": "expectation", "nats": 1.0, "predictions": 9}
    record = {
        "format": FORMAT,
        "recipe": name,
        "seed": seed,
        "measure": recipe.measure,
        "valid": valid,
        "test": test,
        "best_epoch": 100.0,
        "epochs": 110.0,
        "seconds": 300.0,
        "at_once": 1,
        "precision": "bf16",
        "device": "a GPU",
        "versions": {"torch": "2.13.0"},
        "date": "2026-11-15",
        "command": f"zoneout reproduce {name} --first-seed {seed} --precision bf16",
        "scores": [
            {"part": "valid", "protocol": "chunks of 100", recipe.measure: valid, **score},
            {"part": "test", "protocol": "one sequence", recipe.measure: test, **score},
        ],
        "curve": {"epoch": [1.0], "valid": [valid], "train_nats": [1.0]},
        "config": to_json(
            change(recipe.make(), {"seed": seed, "precision": "bf16", "device": "cuda"})
        ),
    }
    write_record(Path("res") / name / f"seed-{seed}.json", record | other)


def row_of(text: str, start: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return line


def test_the_table_of_records() -> None:
    made_up("char_ptb_zoneout", 1, 1.360, 1.250)
    made_up("char_ptb_zoneout", 2, 1.364, 1.262)
    made_up("char_ptb_zoneout", 10, 1.362, 1.262, seconds=600.0)
    made_up("char_ptb_recurrent_dropout", 1, 1.390, 1.280, at_once=2)
    made_up("char_ptb_recurrent_dropout", 2, 1.390, 1.280, at_once=3, seconds=6000.0)
    made_up("char_ptb_unregularised", 1, 1.471, 1.350, at_once=3)
    made_up("char_ptb_batch_norm", 1, 1.400, 1.330)
    made_up("word_ptb_variational", 1, 80.0, 76.04)
    shown = table("res")
    assert row_of(shown, "Zoneout 0.5, 0.05 `char_ptb") == (
        "| Zoneout 0.5, 0.05 `char_ptb_zoneout` | 1.362, 1.252 | 1.3620 ± 0.0020 | 1.2580 ± 0.0069 "
        "| +0.000, +0.006 "
        "| 0.0, 0.9 | yes, yes | 1, 2, 10 | 110 (best 100) | 6.7 |"
    )
    assert row_of(shown, "Unregularised LSTM `char_ptb") == (
        "| Unregularised LSTM `char_ptb_unregularised` | 1.466, 1.356 | 1.471 | 1.350 | +0.005, "
        "-0.006 | 2.2, −0.8 | no, yes | 1 "
        "| 110 (best 100) | 5.0 (3 at once) |"
    )
    alone_most = row_of(shown, "Recurrent dropout 0.25 `char_ptb")
    assert alone_most.endswith("| 5.0 (2 at once) |"), (
        "minutes with more beside are another measure"
    )
    assert "| 100.0 (3 at once) | bf16" in row_of(shown, "Recurrent dropout 0.25, seed 2")
    assert "| –, 1.32 | 1.400 | 1.330 | –, +0.010 | –, 1.2 | –, yes |" in row_of(
        shown, "Recurrent batch norm `char_ptb"
    )
    assert "| –, 73.4 | 80.0 | 76.0 | –, +2.6 | – | – |" in row_of(
        shown, "Variational dropout 0.5, 0.3 `"
    ), "it is only to be shown"
    assert "no run yet" in row_of(shown, "Weight noise 0.075 `char_ptb")
    assert (
        row_of(shown, "`char_ptb_zoneout`")
        == "| `char_ptb_zoneout` | 1.3620 ± 0.0020 | 1.2580 ± 0.0069 |"
    )
    assert (
        "| 2026-11-15 | `zoneout reproduce char_ptb_zoneout --first-seed 10 --precision bf16` |"
        in row_of(shown, "Zoneout 0.5, 0.05, seed 10")
    )
    short = pages.summary("res")
    assert "| 1.356 | 1.350 | 1 |" in row_of(short, "PTB characters, bits | Unregularised LSTM"), (
        "by the test alone"
    )
    assert "| 1.252 | 1.2580±0.0069 | 3 |" in row_of(
        short, "PTB characters, bits | Zoneout 0.5, 0.05"
    )
    made_up("word_ptb_nr_dropout", 1, 82.0, 79.8)
    made_up("word_ptb_nr_dropout", 2, 82.0, 80.0)
    assert "| 78.4 | 79.90±0.14 (missed) | 2 |" in row_of(
        pages.summary("res"), "PTB words, perplexity | NR-dropout 0.65"
    )


def test_without_records_every_row_says_so() -> None:
    """A row would be missing from the page until somebody ran it."""
    shown = document("nothing")
    left_out = [r for r in RECIPES.values() if r.not_run]
    assert shown.count("no run yet") == len(RECIPES) - len(left_out)
    assert all(f"`{name}`" in shown for name in RECIPES)
    quoted = [one for one in QUOTED if one.why.startswith("not run: ")]
    assert (len(left_out), len(quoted)) == (8, 2)
    assert shown.count("| not run: ") == len(left_out) + len(quoted)


def test_a_record_that_cannot_be_read_is_named() -> None:
    path = Path("res/char_ptb_tiny/seed-1.json")
    path.parent.mkdir(parents=True)
    for text in (
        "{",
        "[]",
        '{"format": 99}',
        '{"format": 1}',
        '{"format": 1, "config": {"hiden": 1}}',
    ):
        path.write_text(text)
        with pytest.raises(RunError, match=r"seed-1\.json is not a record that can be read"):
            table("res", [RECIPES["char_ptb_tiny"]])
    made_up("char_ptb_zoneout", 1, 1.360, 1.250)
    good = read_record(Path("res/char_ptb_zoneout/seed-1.json"))
    wrong: list[dict[str, Any]] = [
        {"valid": None},
        {"test": math.nan},
        {"seed": 2},
        {"recipe": "char_ptb_gru"},
    ]
    wrong += [
        {"curve": good["curve"] | {"valid": ["x"] * len(good["curve"]["valid"])}},
        {"valid": 10**400},
    ]
    for other in [*wrong, *({"curve": kind} for kind in (None, []))]:
        Path("res/char_ptb_zoneout/seed-1.json").write_text(json.dumps(good | other))
        with pytest.raises(
            RunError, match=r"seed-1\.json is not a record that can be read: (it|a value|expected)"
        ):
            table("res", [RECIPES["char_ptb_zoneout"]])


def test_long_curves_are_thinned_and_keep_the_best_and_the_last() -> None:
    rows: list[dict[str, Any]] = []
    for n in range(1, 1001):
        rows.append({"kind": "train", "update": n, "epoch": n / 10, "nats": float(n)})
        rows.append(
            {
                "kind": "valid",
                "update": n,
                "epoch": n / 10,
                "bits": abs(n - 501.0),
                "best": n == 501,
            }
        )
    found = pages.curve(rows, "bits")
    assert len(found["epoch"]) == 201 and found["epoch"][-1] == 100.0 and 0.0 in found["valid"]
    assert found["train_nats"][0] == 5.0


def test_the_pages_are_what_the_records_say() -> None:
    """docs/results.md and the README are not what `zoneout reproduce --write` makes of results/."""
    own = {name: RECIPES.pop(name) for name in ("char_ptb_tiny", "char_ptb_bad")}
    try:
        assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == document(
            ROOT / "results"
        )
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        assert pages.BEGIN in readme and readme == pages.put_summary(readme, ROOT / "results")
    finally:
        RECIPES.update(own)


# --- from the command line ------------------------------------------------------------------------


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "char_ptb_tiny",
        "--seeds",
        "2",
        "--first-seed",
        "4",
        "--out",
        "out",
        "--results",
        "res",
    ]
    assert (
        main(
            [
                *arguments,
                "--device",
                "cpu",
                "--precision",
                "bf16",
                "--set",
                "epochs=1",
                "--minutes",
                "9",
            ]
        )
        == 0
    )
    assert sorted(p.name for p in Path("res/char_ptb_tiny").iterdir()) == [
        "seed-4.json",
        "seed-5.json",
    ]
    assert read_record(Path("res/char_ptb_tiny/seed-4.json"))["config"]["precision"] == "bf16"
    assert main([*arguments, "--minutes", "0", "--set", "epochs=1", "--first-seed", "6"]) == 130
    assert main(["--results", "res"]) == 0 and "char_ptb_tiny" in capsys.readouterr().out
    Path("README.md").write_text(
        f"mine\n{pages.BEGIN}\nold\n{pages.END}\nmine too\n", encoding="utf-8"
    )
    assert main(["--results", "res", "--write", "--page", "page.md"]) == 0
    assert Path("page.md").read_text(encoding="utf-8") == document("res")
    assert "old" in Path("README.md").read_text(encoding="utf-8")
    Path("docs").mkdir()
    assert main(["--results", "res", "--write"]) == 0
    text = Path("README.md").read_text(encoding="utf-8")
    assert "old" not in text and text.startswith("mine\n") and text.endswith("mine too\n")
    assert Path("docs/results.md").read_text(encoding="utf-8") == document("res")
    with pytest.raises(
        ValueError, match=r"--set: expected a name and a value, as in epochs=1, got 'epochs'"
    ):
        main([*arguments, "--set", "epochs"])
    with pytest.raises(
        ValueError,
        match=r"--set: expected a setting of the recipe, got seed; --first-seed is for that",
    ):
        main([*arguments, "--set", "seed=5"])


def test_the_tables_are_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """A trial, or a folder that is not there, takes the place of all records in the tables."""
    with pytest.raises(ValueError, match=r"--write: expected a --page of its own for trials"):
        main(["char_ptb_tiny", "--set", "epochs=1", "--write"])
    with pytest.raises(RunError, match="there are no records in nothere"):
        main(["--results", "nothere", "--write"])
    made_up("char_ptb_zoneout", 1, 1.360, 1.250)
    assert main(["char_ptb_zoneout", "--first-seed", "1", "--results", "res"]) == 0
    assert "Nothing to run: every record is in res." in capsys.readouterr().out


def test_records_of_another_precision_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody who asks for a row in one precision takes the numbers of another for it."""
    made_up("char_ptb_zoneout", 1, 1.360, 1.250)
    asked = ["char_ptb_zoneout", "--results", "res", "--seeds", "1"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert " Of another precision than was asked for: char_ptb_zoneout, seed 1 (bf16). With" in said
    assert main([*asked, "--precision", "bf16"]) == 0
    assert "Nothing to run: every record is in res. With" in capsys.readouterr().out


def test_tables_without_a_place_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a clone `reproduce --write` trains for hours, and then says that a file of its
    own is not there.
    """
    made_up("char_ptb_zoneout", 1, 1.360, 1.250)
    monkeypatch.setattr(module, "train", None)
    for task in ([], ["char_ptb_tiny"]):
        with pytest.raises(
            ValueError,
            match=r"--write: there is no folder docs here for results\.md; --page FILE says",
        ):
            main([*task, "--results", "res", "--write"])
    with pytest.raises(RunError, match="Is a directory"):
        main(["--results", "res", "--write", "--page", "res"])


def test_a_trial_has_its_own_place() -> None:
    """A trial finds the recipe's own record, which is of other settings, or stands in its way."""
    for setting in ([], ["--set", "epochs=1"]):
        assert main(["char_ptb_tiny", "--device", "cpu", *setting]) == 0
    of = [
        read_record(Path(folder, "char_ptb_tiny/seed-1.json"))
        for folder in ("results", "runs/trials/results")
    ]
    assert [record["config"]["epochs"] for record in of] == [2, 1]


def test_it_runs_where_the_command_lines_packages_are_not() -> None:
    """A machine with torch and safetensors alone could not reproduce anything."""
    code = (
        "import runpy, sys\n"
        "for name in ('tyro', 'rich', 'matplotlib'): sys.modules[name] = None\n"
        "import zoneout.paper.gradients\n"
        "sys.argv[1:] = ['--results', 'nothing']\n"
        "runpy.run_module('zoneout.paper.reproduce', run_name='__main__')"
    )
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "`char_ptb_zoneout`" in done.stdout, done.stderr


def test_zoneout_reproduce_is_the_same_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`zoneout reproduce` is not there, or its errors are not sentences with a code."""
    from zoneout.paper.training import exit_codes

    monkeypatch.setenv("ZONEOUT_CACHE", "nothing")
    monkeypatch.delenv("ZONEOUT_DATA", raising=False)
    assert (
        cli.main(["reproduce", "--help"]) == exit_codes.OK
        and "\n$ zoneout reproduce char-ptb" in capsys.readouterr().out
    )
    assert cli.main(["reproduce", "pmnist", "zonout"]) == exit_codes.WRONG_USE
    assert "zoneout reproduce: row: there is no 'zonout' of pmnist" in capsys.readouterr().err
    assert (
        cli.main(["reproduce", "char-ptb", "zoneout", "--data", "nowhere", "--device", "cpu"])
        == exit_codes.BAD_DATA
    )


def test_records_that_could_not_be_written_are_told_of_first(tmp_path):
    """Hours of training go by before it is said that its record cannot be written."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file.*: it is not a folder"):
        reproduce(
            "char_ptb_zoneout",
            results=tmp_path / "file" / "results",
            out=tmp_path / "runs",
            say=lambda _: None,
        )
    assert not (tmp_path / "runs").exists()
