"""The training loop: golden curves, exact resume, and what happens when something goes wrong.

The golden curves are written anew with `python tests/paper/test_train.py`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from zoneout.paper.data.corpora import Images
from zoneout.paper.data.datasets import DataError
from zoneout.paper.disk import RunError
from zoneout.paper.experiments import results
from zoneout.paper.report.describe import describe
from zoneout.paper.training import processes, runs
from zoneout.paper.training import train as module
from zoneout.paper.training.config import (
    Batches,
    Config,
    Data,
    Evaluation,
    Model,
    Optimizer,
    Protocol,
    RecurrentDropout,
    Schedule,
    VariationalDropout,
    Zoneout,
    change,
    to_json,
)
from zoneout.paper.training.evaluate import evaluate
from zoneout.paper.training.processes import products_in
from zoneout.paper.training.runs import load, read_metrics
from zoneout.paper.training.step import Step, learning_rates, update_seeds
from zoneout.paper.training.train import Diverged, Summary, Training, load_data, train

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
TEXT = Data(str(GOLDEN / "text.txt"))

CHARS = Config(
    data=TEXT,
    batches=Batches("chunks", size=16, length=25),
    model=Model(
        hidden=24, embedding=0, init="block-orthogonal", one_bias=True, learn_initial_state=True
    ),
    zoneout=Zoneout(cell=0.5, hidden=0.05),
    optimizer=Optimizer("adam", paper=True, lr=0.01, clip_gradient=0.0, clip_update=1.0),
    evaluation=Evaluation(Protocol("chunks", length=25), Protocol("whole", length=100)),
    epochs=2,
    log_every=4,
    device="cpu",
)
WORDS = Config(
    data=replace(TEXT, by="word"),
    batches=Batches("streams", size=4, length=10),
    model=Model(
        hidden=16,
        layers=2,
        embedding=16,
        dropout=0.2,
        init="uniform",
        init_bound=0.1,
        forget_bias=0.0,
    ),
    zoneout=Zoneout(cell=0.25, hidden=0.025),
    optimizer=Optimizer("sgd", lr=1.0, clip_gradient=5.0),
    schedule=Schedule("divide", after=1, by=1.15),
    evaluation=Evaluation(Protocol("streams", length=10, size=4), Protocol("whole", length=50)),
    loss="sum",
    epochs=2,
    log_every=9,
    device="cpu",
)
CURVES = {
    "char-lstm-zoneout": CHARS,
    "word-lstm-streams": WORDS,
    "char-gru-layer-norm": replace(
        CHARS,
        model=Model("gru", hidden=24, embedding=0, norm="layer", init="orthogonal"),
        zoneout=Zoneout(hidden=0.1),
        optimizer=Optimizer("rmsprop", paper=True, lr=0.005, decay=0.5, clip_gradient=1.0),
        norm_stabilizer=1.0,
    ),
    "char-lstm-batch-norm": replace(
        CHARS,
        model=Model(hidden=12, embedding=0, norm="batch", norm_momentum=0.05, init="identity"),
        zoneout=Zoneout(cell=0.15, hidden=0.15, mask="shared"),
        weight_noise=0.01,
        schedule=Schedule("cosine"),
        epochs=1,
    ),
    "char-rnn-tied": replace(
        CHARS,
        model=Model("rnn", hidden=16, embedding=16, tied=True),
        zoneout=Zoneout(hidden=0.05, mask="step"),
        optimizer=Optimizer("adam", lr=0.005, weight_decay=0.01, clip_gradient=0.0),
    ),
}
# Like AWD-LSTM: batches of random lengths, and a rate at which a validation soon is worse than the
# best, so that the weights are averaged.
AWD = replace(
    WORDS,
    batches=Batches("streams", size=4, length=12, halved=0.3, spread=2.0),
    model=Model(sizes=(16, 8), embedding=8, tied=True, embedding_bound=0.1, forget_bias=0.0),
    variational_dropout=VariationalDropout(input=(0.2, 0.4), output=0.2, words=0.1),
    weight_drop=0.5,
    activation_penalty=2.0,
    change_penalty=1.0,
    optimizer=Optimizer("sgd", lr=30.0, clip_gradient=0.25, l2=1e-6, average_after=1),
    schedule=Schedule(),
    evaluation=replace(WORDS.evaluation, every=4),
    loss="mean",
)


pytestmark = pytest.mark.usefixtures("one_thread")


def curve(folder: Path) -> list[tuple[str, int, float]]:
    return [(row["kind"], row["update"], row["nats"]) for row in read_metrics(folder)]


@pytest.mark.parametrize("name", CURVES)
def test_golden_curves(name: str, tmp_path: Path) -> None:
    """If this fails, the same config no longer trains as it did: data order, weights, masks or a
    rule have changed.

    Kernels and compilers round differently, which some tens of updates do not make larger than
    this.
    """
    train(CURVES[name], tmp_path / "run")
    lines = (GOLDEN / f"{name}.txt").read_text().splitlines()
    expected = [(kind, int(update), float(nats)) for kind, update, nats in map(str.split, lines)]
    found = curve(tmp_path / "run")
    assert [line[:2] for line in found] == [line[:2] for line in expected]
    assert [line[2] for line in found] == pytest.approx([line[2] for line in expected], rel=1e-4)


# --- what a run is --------------------------------------------------------------------------------


def test_a_run_from_beginning_to_end(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    summary = train(CHARS, tmp_path / "run", progress=events.append)
    rows = read_metrics(tmp_path / "run")
    steps = [e["update"] for e in events if e["kind"] == "step"]
    assert steps == list(range(1, summary.update + 1))
    assert [e for e in events if e["kind"] in ("train", "valid", "test")] == rows
    assert (
        events[0]["kind"] == "start"
        and events[0]["updates"] == summary.update
        and events[-1]["kind"] == "end"
    )
    assert summary.status == "finished" and summary.epoch == 2 and summary.measure == "bits"
    assert rows[0]["nats"] > summary.best["nats"] > 0, "nothing was learned"  # type: ignore[index]
    assert summary.best == min((r for r in rows if r["kind"] == "valid"), key=lambda r: r["nats"])
    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["test"]
        == rows[-1]
        == summary.test
    )
    assert runs.read_digest(tmp_path / "run") == load_data(CHARS).digest
    found = runs.load(tmp_path / "run")
    assert (
        found.info == summary.best
        and sum(p.numel() for p in found.model.parameters() if p.requires_grad)
        == summary.parameters
    )


def test_the_best_weights_are_kept_and_tested(tmp_path: Path) -> None:
    """With a learning rate so high that the loss goes up and down the last weights are not the
    best.
    """
    config = replace(
        CHARS,
        epochs=3,
        optimizer=Optimizer("adam", lr=3.0, clip_gradient=0.0),
        evaluation=replace(CHARS.evaluation, every=2),
    )
    summary = train(config, tmp_path / "run")
    rows = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "valid"]
    assert (
        summary.best is not None
        and summary.best["update"] < rows[-1]["update"]
        and not rows[-1]["best"]
    )
    from zoneout.paper.training.evaluate import evaluate

    found = runs.load(tmp_path / "run")
    score = evaluate(found.model, load_data(config), "test", config)
    assert summary.test is not None and score.nats == summary.test["nats"]


def test_batch_norms_statistics_are_estimated_anew_and_kept(tmp_path: Path) -> None:
    """Whoever loads the best weights gets what the test had; running averages of a short run are
    of little use.
    """
    from zoneout.paper.training.evaluate import evaluate

    config = CURVES["char-lstm-batch-norm"]
    summary = train(config, tmp_path / "run")
    found = runs.load(tmp_path / "run")
    assert summary.test is not None
    assert evaluate(found.model, load_data(config), "test", config).nats == summary.test["nats"]
    last = runs.load(
        tmp_path / "run", weights="last"
    )  # the same weights here, with the averages of training
    assert torch.equal(found.model.softmax.weight, last.model.softmax.weight)
    assert not torch.allclose(found.model.recurrent.mean_hh_l0, last.model.recurrent.mean_hh_l0)


@pytest.mark.parametrize(
    ("epoch", "update", "updates", "complete"),
    [(2, 10, 0, True), (1, 9, 0, False), (1, 9, 9, True), (1, 8, 9, False), (2, 8, 9, True)],
)
def test_a_run_is_complete_by_its_epochs_or_its_updates(
    epoch: int, update: int, updates: int, complete: bool
) -> None:
    """A run goes on for ever, or ends before it has done what was asked."""
    given: Any = SimpleNamespace(
        state=SimpleNamespace(epoch=epoch, update=update),
        config=SimpleNamespace(epochs=2, updates=updates),
    )
    assert Training.complete(given) is complete


@pytest.mark.parametrize(
    ("epoch", "update", "done", "fits"),
    [
        (0, 0, 0, True),
        (1, 5, 2, True),
        (1, 6, 3, False),
        (2, 6, 0, True),
        (3, 6, 0, False),
        (1, 7, 0, False),
    ],
)
def test_a_checkpoint_of_a_moment_that_cannot_be(
    epoch: int, update: int, done: int, fits: bool
) -> None:
    """Training goes on from a checkpoint past the end of an epoch, or of the run."""
    feed = SimpleNamespace(updates=lambda: 3, order=lambda epoch: range(3))
    state = SimpleNamespace(epoch=epoch, update=update, done=done)
    given: Any = SimpleNamespace(state=state, config=SimpleNamespace(epochs=2), feed=feed)
    if fits:
        Training.check_position(given)
        return
    with pytest.raises(ValueError, match="does not fit the run"):
        Training.check_position(given)


def test_of_weights_that_are_equally_good_the_first_are_the_best(tmp_path: Path) -> None:
    """Without a new best the run would neither lose patience nor keep the weights that had the
    least training.
    """
    config = replace(CHARS, epochs=9, patience=2, optimizer=Optimizer("sgd", lr=0.0))
    summary = train(config, tmp_path / "run")
    rows = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "valid"]
    assert [r["best"] for r in rows] == [True, False, False] and len({r["nats"] for r in rows}) == 1
    assert (
        summary.status == "patience" and summary.best == rows[0] == runs.load(tmp_path / "run").info
    )


def test_the_learning_rate_of_a_line_is_that_of_its_update(tmp_path: Path) -> None:
    """A curve shows rates that belong to the update before or after, or to another epoch."""
    from zoneout.paper.training.feeds import make_feed

    config = replace(CHARS, schedule=Schedule("cosine"), log_every=1)
    train(config, tmp_path / "run")
    feed, first, rates = make_feed(config, load_data(config), torch.device("cpu")), 0, []
    for epoch in range(config.epochs):
        count = len(feed.order(epoch))
        rates += learning_rates(config, epoch, first, count).tolist()
        first += count
    assert [r["lr"] for r in read_metrics(tmp_path / "run") if r["kind"] == "train"] == rates
    assert len(set(rates)) == len(rates)


def test_patience(tmp_path: Path) -> None:
    config = replace(
        CHARS, epochs=50, patience=2, optimizer=Optimizer("adam", lr=3.0, clip_gradient=0.0)
    )
    summary = train(config, tmp_path / "run")
    flags = [r["best"] for r in read_metrics(tmp_path / "run") if r["kind"] == "valid"]
    assert summary.status == "patience" and flags[-3:] == [True, False, False] and len(flags) < 50
    assert all(a or b for a, b in pairwise(flags[:-1])), "it went on after two that were no better"
    train(
        replace(config, epochs=51), tmp_path / "run", resume=True
    )  # which had no less patience than is asked for


def test_updates_end_a_run_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    summary = train(replace(CHARS, updates=7), tmp_path / "run")
    assert summary.update == 7 and summary.status == "finished" and 0 < summary.epoch < 1
    assert [
        r["update"] for r in read_metrics(tmp_path / "run") if r["kind"] in ("valid", "test")
    ] == [7, 7]


def test_schedules() -> None:
    divide = replace(
        CHARS,
        optimizer=Optimizer(lr=1.0),
        schedule=Schedule("divide", after=14, by=1.15),
        epochs=55,
    )
    rates = [learning_rates(divide, epoch, 0, 3).tolist() for epoch in range(17)]
    assert rates[0] == rates[13] == [1.0] * 3
    assert rates[14] == pytest.approx([1 / 1.15] * 3) and rates[16] == pytest.approx([1.15**-3] * 3)
    cosine = replace(CHARS, optimizer=Optimizer(lr=2.0), schedule=Schedule("cosine"), epochs=2)
    both = torch.cat([learning_rates(cosine, 0, 0, 4), learning_rates(cosine, 1, 4, 4)])
    assert both[0] == 2 and both[4] == pytest.approx(1) and (both.diff() < 0).all()
    by_updates = learning_rates(replace(cosine, updates=8), 0, 0, 8)
    torch.testing.assert_close(by_updates, both)
    beyond = torch.cat(
        [learning_rates(replace(cosine, updates=99), epoch, 4 * epoch, 4) for epoch in (0, 1)]
    )
    torch.testing.assert_close(
        beyond, both
    )  # the epochs end before, and there the rate is to be zero


def test_cosine_of_epochs_that_are_not_equally_long() -> None:
    """A text read from a random offset has a chunk less in some epochs: the rate jumps, or does
    not end at zero.
    """
    cosine = replace(CHARS, optimizer=Optimizer(lr=2.0), schedule=Schedule("cosine"), epochs=2)
    for counts in ((4, 3), (3, 4)):
        for updates in (0, 5, 6, 7, 8):
            config = replace(cosine, updates=updates)
            both = [learning_rates(config, 0, 0, counts[0]), learning_rates(config, 1, *counts)]
            by_epochs = [
                number / counts[epoch] / 2 + epoch / 2
                for epoch in (0, 1)
                for number in range(counts[epoch])
            ]
            done = [max(share, n / updates if updates else 0) for n, share in enumerate(by_epochs)]
            expected = 1 + torch.cos(
                torch.pi * torch.tensor(done, dtype=torch.float64).clamp(max=1)
            )
            torch.testing.assert_close(torch.cat(both), expected)
            assert (torch.cat(both)[: updates or None].diff() < 0).all()


def test_the_seed_of_an_update_is_its_own() -> None:
    seeds = update_seeds(7, 0, 1000)
    assert len(seeds.unique()) == 1000
    assert torch.equal(update_seeds(7, 400, 5), seeds[400:405])
    assert not torch.equal(update_seeds(8, 0, 1000), seeds)


def test_two_runs_of_one_config_are_one_run_and_another_seed_is_another(tmp_path: Path) -> None:
    torch.manual_seed(1)
    train(CHARS, tmp_path / "a")
    torch.manual_seed(2)  # torch's generator has no say
    train(CHARS, tmp_path / "b")
    train(replace(CHARS, seed=2), tmp_path / "c")
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b") != outcome(tmp_path / "c")


def test_streams_carry_their_state_and_begin_each_epoch_anew(tmp_path: Path) -> None:
    """An update by hand: the second starts from where the first ended, the first of an epoch
    from the initial state.
    """
    from zoneout.paper.training.feeds import make_feed
    from zoneout.paper.training.models import build
    from zoneout.paper.training.processes import Processes

    config = replace(
        WORDS,
        model=replace(WORDS.model, learn_initial_state=True),
        optimizer=Optimizer("sgd", lr=0.0),
    )
    corpus = load_data(config)
    model = build(config, len(corpus.vocabulary))
    cpu = torch.device("cpu")
    feed = make_feed(config, corpus, cpu)
    step = Step(model, feed, config, Processes(cpu))
    with torch.no_grad():
        model.recurrent.h0.fill_(0.5)
    for epoch in range(2):
        count = step.begin(epoch, 0, epoch * feed.updates())
        seeds = update_seeds(config.seed, epoch * feed.updates(), count)
        state = None
        for number, row in enumerate(feed.order(epoch)[:3]):
            step()
            inputs, targets = feed.batch(row)
            with torch.no_grad():
                output = model.train()(inputs, state, seed=seeds[number])
            state = output.state
            nats = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
            torch.testing.assert_close(step.nats, nats)
    assert config.batches.length == len(inputs)


def test_every_row_of_streams_is_trained_once() -> None:
    from zoneout.paper.training.feeds import make_feed

    corpus = load_data(WORDS)
    feed = make_feed(WORDS, corpus, torch.device("cpu"))
    pieces = [feed.batch(row) for row in feed.order(0)]
    inputs = torch.cat([x for x, _ in pieces]).T.flatten()
    targets = torch.cat([y for _, y in pieces]).T.flatten()
    rows = len(corpus.train) // 4
    taken = (rows - 1) // 10 * 10
    expected = torch.from_numpy(corpus.train[: 4 * rows].astype("int64")).view(4, rows)
    assert torch.equal(inputs.view(4, -1), expected[:, :taken]) and torch.equal(
        targets.view(4, -1), expected[:, 1 : taken + 1]
    )


# --- resume ---------------------------------------------------------------------------------------


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run computes: metrics and weights, byte for byte."""
    last = runs.Run(folder).checkpoints()[0]
    return {
        "metrics": (folder / "metrics.jsonl").read_bytes(),
        "best": (folder / "best.safetensors").read_bytes(),
        "update": last.name,
        "last": (last / "tensors.safetensors").read_bytes(),
    }


def interrupted_at(update: int) -> Any:
    def tell(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["update"] == update:
            os.kill(os.getpid(), signal.SIGINT)

    return tell


def test_signals_sent_together_are_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timeout`, which sends two, ends a run without a checkpoint."""

    def twice(event: dict[str, Any]) -> None:
        for _ in range(2):
            interrupted_at(3)(event)

    summary = train(CHARS, tmp_path / "run", progress=twice)
    assert summary.status == "interrupted"
    assert [p.name for p in runs.Run(tmp_path / "run").checkpoints()] == ["00000003"]
    monkeypatch.setattr(module, "AGAIN", -1.0)
    with pytest.raises(KeyboardInterrupt):
        train(CHARS, tmp_path / "other", progress=interrupted_at(3))


@pytest.mark.parametrize(
    "config",
    [CHARS, WORDS, CURVES["char-lstm-batch-norm"]],
    ids=["chunks", "streams", "batch norm"],
)
def test_a_run_interrupted_with_ctrl_c_goes_on_as_if_it_had_not_been(
    config: Config, tmp_path: Path
) -> None:
    whole = train(config, tmp_path / "whole")
    handler = signal.getsignal(signal.SIGINT)
    folder, resume = tmp_path / "run", False
    for update in (1, 5, whole.update - 1, whole.update):  # the last one: while it validates
        summary = train(
            config if not resume else None, folder, resume=resume, progress=interrupted_at(update)
        )
        assert summary.status == "interrupted" and summary.update == update
        assert not (folder / "summary.json").exists()
        resume = True
    assert signal.getsignal(signal.SIGINT) is handler
    summary = train(None, folder, resume=True)
    assert summary.status == "finished" and summary.test == whole.test
    assert outcome(folder) == outcome(tmp_path / "whole")


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    train(CHARS, tmp_path / "run")
    train(replace(CHARS, epochs=3), tmp_path / "run", resume=True)
    train(replace(CHARS, epochs=3), tmp_path / "whole")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes to kill them")
@pytest.mark.parametrize(
    "name, config, seed", [("chunks", CHARS, 1), ("chunks", CHARS, 2), ("streams", WORDS, 3)]
)
def test_kill_9_at_random_moments(name: str, config: Config, seed: int, tmp_path: Path) -> None:
    """Metrics and weights are those of a run that was never killed, bit for bit."""
    config = replace(config, save_every=4, evaluation=replace(config.evaluation, every=6))
    config = replace(config, updates=30, epochs=9)
    train(config, tmp_path / "whole")
    (tmp_path / "config.json").write_text(json.dumps(to_json(config)))
    arguments = [
        sys.executable,
        str(HERE / "kills.py"),
        str(tmp_path / "config.json"),
        str(tmp_path / "run"),
    ]
    done = subprocess.run([*arguments, str(seed), "8"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exit -9" in done.stdout and "finished" in done.stdout, done.stdout
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole"), done.stdout


def test_a_killed_epoch_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed in a long epoch, before any validation, starts again."""

    config = replace(CHARS, updates=8)

    class Killed(BaseException):
        pass

    def kill(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["update"] == 5:
            raise Killed

    monkeypatch.setattr("zoneout.paper.training.train.SAVE_SECONDS", 0.0)
    with pytest.raises(Killed):
        train(config, tmp_path / "run", progress=kill)
    page = describe(tmp_path / "run")
    assert (page["update"], page["saved"], page["best"]) == (4, 4, None)
    assert config.save_every == 0 == config.evaluation.every
    train(config, tmp_path / "whole")
    train(None, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_validation_is_no_reason_for_a_checkpoint(tmp_path: Path) -> None:
    """A large model spends more time on writing checkpoints than on training."""
    config = replace(CHARS, updates=30, epochs=9, evaluation=replace(CHARS.evaluation, every=3))
    events: list[dict[str, Any]] = []
    train(config, tmp_path / "run", progress=events.append)
    assert [e["update"] for e in events if e["kind"] == "save"] == [30]
    assert sum(e["kind"] == "valid" for e in events) == 10
    events.clear()
    train(replace(config, save_every=6), tmp_path / "more", progress=events.append)
    assert [e["update"] for e in events if e["kind"] == "save"] == [6, 12, 18, 24, 30]


def test_the_best_weights_are_written_with_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large weights are written after each of hundreds of validations, while the GPU waits."""
    config = replace(CHARS, updates=24, epochs=9, save_every=12)
    config = replace(config, evaluation=replace(config.evaluation, every=3))
    written: list[int] = []
    original = runs.Run.save_best

    def counted(run: Any, weights: Any, info: dict[str, Any]) -> None:
        written.append(info["update"])
        original(run, weights, info)

    monkeypatch.setattr(runs.Run, "save_best", counted)
    summary = train(config, tmp_path / "run")
    valid = [row for row in read_metrics(tmp_path / "run") if row["kind"] == "valid"]
    best = [row["update"] for row in valid if row["best"]]
    last_of_each = [max(u for u in best if u <= 12), max(best)]
    assert len(best) > 2 and written == last_of_each
    assert summary.best is not None and runs.load(tmp_path / "run").info["update"] == max(best)


def test_a_run_killed_between_a_new_best_and_the_next_checkpoint(tmp_path: Path) -> None:
    """The best weights are those of a later update than the checkpoint: the end is another."""
    config = replace(CHARS, updates=16, save_every=4)
    config = replace(config, evaluation=replace(config.evaluation, every=6))
    train(config, tmp_path / "whole")

    class Killed(BaseException):
        pass

    def kill(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["update"] == 7:
            raise Killed

    with pytest.raises(Killed):
        train(config, tmp_path / "run", progress=kill)
    assert runs.load(tmp_path / "run").info["update"] == 6
    assert runs.Run(tmp_path / "run").checkpoints()[0].name == "00000004"
    events: list[dict[str, Any]] = []
    train(None, tmp_path / "run", resume=True, progress=events.append)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    assert not [e for e in events if e["kind"] == "note"]


def test_best_weights_of_a_killed_try_that_did_not_come_again_are_told(tmp_path: Path) -> None:
    """The score of a run is shown as that of weights which have another."""
    config = replace(CHARS, updates=6)
    train(config, tmp_path / "run")
    best = tmp_path / "run" / "best.safetensors"
    weights, about = runs.read_tensors(best)
    module.runs.write_tensors(best, weights, {**about, "nats": about["nats"] / 2})
    events: list[dict[str, Any]] = []
    train(None, tmp_path / "run", resume=True, progress=events.append)
    (note,) = [e["text"] for e in events if e["kind"] == "note"]
    assert note.startswith("best.safetensors has weights of before the run was killed, of update 6")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps of all runs that capture a graph; on a CPU, something that is never replayed."""
    steps: list[Step] = []

    def capture(step: Step) -> None:
        steps.append(step)
        step.graphs[0, False] = object(), False

    monkeypatch.setattr(Step, "capture", capture)
    return steps


@pytest.mark.parametrize("how", ["finished", "interrupted", "failed"])
def test_graphs_are_gone_when_training_ends(how: str, captures: list[Step], tmp_path: Path) -> None:
    """The next run in the process captures beside graphs of an earlier one."""

    def tell(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["update"] == 3 and how != "finished":
            if how == "failed":
                raise OSError
            raise module.Stopped
        if event["kind"] == "test":
            assert not captures[0].graphs, "they take memory while the run is tested"

    config = replace(CHARS, updates=6)
    if how == "failed":
        with pytest.raises(OSError):
            train(config, tmp_path / "run", progress=tell)
    else:
        assert train(config, tmp_path / "run", progress=tell).status == how
    assert [step.graphs for step in captures] == [{}]


def test_a_run_that_lacks_only_its_test_captures_no_graph(
    captures: list[Step], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes of a GPU go to a graph that is never replayed."""

    def stopped(self: Training) -> None:
        raise module.Stopped

    still = replace(CHARS, optimizer=Optimizer("sgd", lr=0.0), epochs=9, patience=1)
    for name, config in (("complete", replace(CHARS, updates=6)), ("patience", still)):
        with monkeypatch.context() as patch:
            patch.setattr(Training, "test", stopped)
            assert train(config, tmp_path / name).status == "interrupted"
        captures.clear()
        assert train(None, tmp_path / name, resume=True).test is not None
        assert not captures
    train(replace(CHARS, updates=8), tmp_path / "complete", resume=True)
    assert len(captures) == 1, "a run that is made longer has updates left"


def test_a_run_can_leave_its_test_out(tmp_path: Path) -> None:
    """Settings are chosen by runs whose tests everybody has seen."""
    evaluation = replace(CHARS.evaluation, skip_test=True, temperature=True)
    summary = train(replace(CHARS, evaluation=evaluation), tmp_path / "run")
    whole = train(replace(CHARS, evaluation=replace(evaluation, skip_test=False)), tmp_path / "all")
    assert summary.status == "finished" and summary.test is None and whole.test is not None
    kinds = {row["kind"] for row in read_metrics(tmp_path / "run")}
    assert kinds == {"train", "valid"} and summary.best == whole.best
    both = [runs.read_tensors(tmp_path / name / "best.safetensors")[0] for name in ("run", "all")]
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[1]), "as with a test"
    assert "test" not in describe(tmp_path / "run") or describe(tmp_path / "run")["test"] is None
    later = replace(CHARS, evaluation=replace(evaluation, skip_test=False))
    assert train(later, tmp_path / "run", resume=True).test == whole.test


def test_a_run_cannot_be_made_shorter(tmp_path: Path) -> None:
    """The config says that a run had less training than what its weights come from."""
    done = train(CHARS, tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    sentence = rf"run has had {done.update} updates in 2 epochs already, which is more than "
    for settings, asked in (
        ({"epochs": 1}, "--epochs 1:"),
        ({"updates": done.update - 1}, "--updates "),
    ):
        with pytest.raises(RunError, match=sentence + asked):
            train(change(CHARS, settings), tmp_path / "run", resume=True)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    assert (
        train(change(CHARS, {"updates": done.update}), tmp_path / "run", resume=True).update
        == done.update
    )

    # The weights do not change, so no validation after the first is better.
    stubborn = replace(CHARS, epochs=6, optimizer=Optimizer("adam", lr=1e-30))
    train(stubborn, tmp_path / "stubborn")
    flags = [r["best"] for r in read_metrics(tmp_path / "stubborn") if r["kind"] == "valid"]
    assert flags == [True] + [False] * 5
    stale = 4  # without the last validation, after which the run ended
    with pytest.raises(
        RunError, match=rf"which is more than --patience {stale} \(it went on after {stale} "
    ):  # with which it would have ended
        train(replace(stubborn, patience=stale), tmp_path / "stubborn", resume=True)

    part = train(
        change(CHARS, {"updates": done.update // 2 + 1}), tmp_path / "part"
    )  # into the second epoch
    assert 1 < part.epoch < 2
    with pytest.raises(
        RunError, match=rf"part has had {part.update} updates in 2 epochs already, .* --epochs 1:"
    ):
        train(change(CHARS, {"epochs": 1}), tmp_path / "part", resume=True)


def test_batch_norm_needs_two_rows_from_the_beginning(tmp_path: Path) -> None:
    """A run that cannot make its first update leaves a folder that can be neither continued nor
    begun again.
    """
    text = tmp_path / "short.txt"
    text.write_text("a short text, " * 4, encoding="utf-8")
    short = replace(CURVES["char-lstm-batch-norm"], data=Data(str(text)))
    with pytest.raises(
        ValueError, match=r"batches\.size: expected at least 2 rows .* with batch norm, got 1; of a"
    ):
        train(short, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_is_passed_over_and_the_run_is_the_same(tmp_path: Path) -> None:
    config = replace(CHARS, save_every=3)
    train(config, tmp_path / "whole")
    train(config, tmp_path / "run", progress=interrupted_at(8))
    latest = runs.Run(tmp_path / "run").checkpoints()[0]
    (latest / "tensors.safetensors").write_bytes(b"")
    notes: list[str] = []
    train(
        None,
        tmp_path / "run",
        resume=True,
        progress=lambda e: notes.append(e["text"]) if e["kind"] == "note" else None,
    )
    assert len(notes) == 1 and "00000008 is damaged" in notes[0]
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


# --- when something goes wrong --------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    """The message has the very update, though the loss is only read now and then."""
    config = replace(CHARS, log_every=5, save_every=5, epochs=9)
    train(replace(config, updates=5), tmp_path / "run")

    from zoneout.paper.training import step

    original, calls = step.loss_of, 0

    def spoiled(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        loss, nats = original(*args)
        return loss, nats * float("inf") if calls == 3 else nats

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "loss_of", spoiled)
        with pytest.raises(
            Diverged,
            match=r"not finite at update 8.* last good checkpoint, of update 5, is kept.* Try",
        ):
            train(config, tmp_path / "run", resume=True)
    assert [p.name for p in runs.Run(tmp_path / "run").checkpoints()] == ["00000005"]
    assert (
        train(config, tmp_path / "run", resume=True).status == "finished"
    )  # it can be gone on from


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    config = replace(CHARS, optimizer=Optimizer("sgd", lr=1e38, clip_gradient=0.0), save_every=1)
    with pytest.raises(Diverged, match=r"training has diverged; there is none to keep|not finite"):
        train(config, tmp_path / "run")
    for kept in runs.Run(tmp_path / "run").checkpoints():
        tensors = runs.read_checkpoint(kept, tmp_path / "run" / "metrics.jsonl").tensors
        assert all(t.isfinite().all() for t in tensors.values() if t.is_floating_point())


def test_folders_of_other_runs_are_not_touched(tmp_path: Path) -> None:
    train(replace(CHARS, updates=2), tmp_path / "run")
    before = outcome(tmp_path / "run")
    with pytest.raises(RunError, match=r"holds a run already"):
        train(CHARS, tmp_path / "run")
    with pytest.raises(RunError, match=r"^model\.hidden: expected 24 as in .+run, got 25"):
        train(change(CHARS, {"model.hidden": 25}), tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match=r"there is no folder"):
        train(CHARS, tmp_path / "nothing", resume=True)
    assert outcome(tmp_path / "run") == before


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "best weights": (
        lambda run: (run / "best.safetensors").write_bytes(b"x"),
        r"best\.safetensors is damaged",
    ),
    "no best weights": (
        lambda run: (run / "best.safetensors").unlink(),
        r"best\.safetensors, are gone",
    ),
    "checkpoints": (
        lambda run: [(c / "state.json").unlink() for c in (run / "last").iterdir()],
        r"is damaged",
    ),
    "config": (
        lambda run: edit(run / "config.json", '"lr": 0.01', '"lr": 0.02'),
        r"config\.json has been altered",
    ),
    "metrics": (
        lambda run: edit(run / "metrics.jsonl", "train", "tRain"),
        r"metrics\.jsonl has been altered",
    ),
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), r"cannot be continued"),
}


def edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("what", REFUSED)
def test_a_run_that_cannot_go_on_is_left_as_it_was(what: str, tmp_path: Path) -> None:
    """A finished run loses its summary, and its test with it, to a --resume that then goes
    wrong.
    """
    config, folder = replace(CHARS, updates=10, save_every=3), tmp_path / "run"
    train(config, folder)
    harm, says = REFUSED[what]
    harm(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=says):
        train(None, folder, resume=True)
    if what != "no metrics":
        with pytest.raises(RunError, match=says):
            train(replace(runs.read_config(folder), updates=12), folder, resume=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_text_that_has_changed_is_seen(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((GOLDEN / "text.txt").read_text())
    config = replace(CHARS, data=Data(str(text)), updates=2)
    train(config, tmp_path / "run")
    text.write_text((GOLDEN / "text.txt").read_text().replace("heron", "stork"))
    with pytest.raises(DataError, match=r"was trained on other data"):
        train(None, tmp_path / "run", resume=True)


def test_a_run_knows_where_its_data_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that is shown for going on finds no data, since only the first one said where
    they are.
    """
    text, moved = tmp_path / "text.txt", tmp_path / "moved.txt"
    text.write_text((GOLDEN / "text.txt").read_text())
    config = replace(CHARS, data=Data(str(text)), updates=2)
    train(config, tmp_path / "run")
    text.rename(moved)
    with pytest.raises(DataError, match=r"text\.txt: there is no such file"):
        train(change(config, {"updates": 3}), tmp_path / "run", resume=True)
    (tmp_path / "run" / "vocabulary.json").write_text("{")  # which the data can mend
    train(change(config, {"updates": 3}), tmp_path / "run", resume=True, data=moved)
    assert runs.read_vocabulary(tmp_path / "run") is not None
    assert train(change(config, {"updates": 4}), tmp_path / "run", resume=True).update == 4
    text.write_text(moved.read_text())
    moved.write_text("something else altogether")  # there, but no longer what it was
    assert train(change(config, {"updates": 5}), tmp_path / "run", resume=True).update == 5
    exists = Path.exists

    def not_ours(path: Path, **options: Any) -> bool:
        if path == moved:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path, **options)

    monkeypatch.setattr(Path, "exists", not_ours)  # as where another user's folders are
    assert train(change(config, {"updates": 6}), tmp_path / "run", resume=True).update == 6


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config: expected a Config"):
        train(None, tmp_path / "run")
    with pytest.raises(ValueError, match=r"precision: tf32 is there on NVIDIA GPUs only"):
        train(replace(CHARS, precision="tf32"), tmp_path / "run")
    with pytest.raises(ValueError, match=r"device: expected auto, cpu, cuda or cuda:N, got 'gpu'"):
        train(replace(CHARS, device="gpu"), tmp_path / "run")
    with pytest.raises(ValueError, match=r"a plain RNN has no gated update"):
        train(
            replace(
                CHARS,
                model=Model("rnn"),
                zoneout=Zoneout(),
                recurrent_dropout=RecurrentDropout(rate=0.5),
            ),
            tmp_path / "run",
        )
    with pytest.raises(
        ValueError,
        match=r"evaluation\.valid: size: 999 streams need a text of at least 1998 symbols",
    ):
        train(
            replace(CHARS, evaluation=Evaluation(Protocol("streams", size=999))), tmp_path / "run"
        )
    assert not (tmp_path / "run").exists(), "a folder was made for a run that cannot be"


@pytest.mark.parametrize("config", [CHARS, WORDS], ids=["one-hot", "embedding"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(config: Config, precision: Any, tmp_path: Path) -> None:
    """Products in 16 bits; weights, losses and evaluation in float32, near enough to what
    float32 learns.
    """
    config = replace(config, precision=precision, epochs=1)
    rough, fine = (
        train(config, tmp_path / "a"),
        train(replace(config, precision="fp32"), tmp_path / "b"),
    )
    assert (
        rough.best is not None and fine.best is not None and rough.best["nats"] != fine.best["nats"]
    )
    assert rough.best["nats"] == pytest.approx(fine.best["nats"], rel=0.02)
    assert all(p.dtype == torch.float32 for p in runs.load(tmp_path / "a").model.parameters())


# --- several processes ----------------------------------------------------------------------------

TWO = """
import json, sys, torch
from zoneout.paper.training.config import from_json
from zoneout.paper.training.train import train
torch.set_num_threads(1)
config = from_json(json.load(open(sys.argv[1])))
train(config, sys.argv[2])
longer = from_json(json.load(open(sys.argv[1])) | {"updates": 0})
train(longer, sys.argv[2], resume=True)
"""


@pytest.mark.parametrize("config", [CHARS, WORDS], ids=["chunks", "streams"])
def test_two_processes_train_what_one_does(config: Config, tmp_path: Path) -> None:
    """Order and masks are those of the whole batch, and a run that two share can be continued by
    them.
    """
    config = replace(config, epochs=1, updates=5)
    (tmp_path / "config.json").write_text(json.dumps(to_json(config)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, str(tmp_path / "config.json"), str(tmp_path / "two")],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate()[1] for process in started]
    assert all(process.returncode == 0 for process in started), "\n".join(errors)
    train(config, tmp_path / "one")
    train(replace(config, updates=0), tmp_path / "one", resume=True)
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert [line[:2] for line in one] == [line[:2] for line in two]
    assert [line[2] for line in two] == pytest.approx([line[2] for line in one], rel=1e-5)
    for a, b in zip(
        runs.load(tmp_path / "one").model.parameters(),
        runs.load(tmp_path / "two").model.parameters(),
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_batch_that_cannot_be_shared_is_an_error() -> None:
    from zoneout.paper.training.feeds import make_feed

    with pytest.raises(ValueError, match=r"batches\.size: expected a multiple of the 3 processes"):
        make_feed(CHARS, load_data(CHARS), torch.device("cpu"), rank=0, processes=3)


def test_runs_in_one_process_take_turns_at_how_products_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If this fails, a run that shares its process has its products in the precision of another
    one.
    """
    gpu, both, kept_out = torch.device("cuda"), threading.Barrier(2), threading.Event()
    wait_for, seen = processes._turn.wait_for, []

    def watched(welcome: Callable[[], bool]) -> bool:
        if not welcome():
            kept_out.set()
        return wait_for(welcome)

    def run(precision: str) -> None:
        with products_in(precision, gpu):
            if precision == "tf32":
                both.wait(10)  # who wants the same is let in
                assert kept_out.wait(10)  # who does not has to wait
            seen.append((precision, torch.backends.cuda.matmul.fp32_precision))

    monkeypatch.setattr(processes._turn, "wait_for", watched)
    before = torch.backends.cuda.matmul.fp32_precision
    with ThreadPoolExecutor(3) as threads:
        first = [threads.submit(run, "tf32") for _ in range(2)]
        while len(processes._inside) < 2 and not any(each.done() for each in first):
            pass
        for each in (*first, threads.submit(run, "fp32")):
            each.result()
    assert sorted(seen) == [("fp32", "ieee"), ("tf32", "tf32"), ("tf32", "tf32")]
    with products_in("tf32", gpu):
        with products_in("fp32", gpu):  # nobody waits for himself
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", CURVES)
def test_a_gpu_trains_what_a_cpu_does(name: str, tmp_path: Path) -> None:
    """The captured step draws the same masks in the same order; only rounding differs."""
    train(replace(CURVES[name], device="cuda"), tmp_path / "run")
    lines = (GOLDEN / f"{name}.txt").read_text().splitlines()
    found = curve(tmp_path / "run")
    assert [line[2] for line in found] == pytest.approx(
        [float(line.split()[2]) for line in lines], rel=1e-3
    )


@pytest.mark.parametrize("config", [CHARS, WORDS, AWD], ids=["chunks", "streams", "awd"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_device_goes_on_exactly(config: Config, device: str, tmp_path: Path) -> None:
    """A graph that is captured anew, of another length or with averages, is another update."""
    averaged = config.optimizer.average_after > 0
    config = replace(config, device=device)
    whole = train(config, tmp_path / "whole")
    for number, update in enumerate((7, whole.update * 3 // 4)):
        tell = interrupted_at(update)
        summary = train(config, tmp_path / "run", resume=number > 0, progress=tell)
        assert (summary.status, summary.update) == ("interrupted", update)
    found, _ = runs.Run(tmp_path / "run").latest()
    assert found is not None and found.state["averaging"] is averaged
    train(None, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.gpu
def test_the_captured_step_is_the_eager_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, something in the step is decided when it is captured and should be decided
    at every update.
    """
    for name in ("char-lstm-zoneout", "word-lstm-streams"):
        config = replace(CURVES[name], device="cuda")
        train(config, tmp_path / f"captured {name}")
        with monkeypatch.context() as patch:
            patch.setattr(Step, "capture", lambda self: None)
            train(config, tmp_path / f"eager {name}")
        a, b = curve(tmp_path / f"captured {name}"), curve(tmp_path / f"eager {name}")
        assert [line[2] for line in a] == pytest.approx([line[2] for line in b], rel=1e-5)


# --- the real thing, small ------------------------------------------------------------------------


@pytest.mark.skipif(
    "ZONEOUT_DATA" not in os.environ, reason="ZONEOUT_DATA does not say where the paper's data are"
)
def test_char_ptb_trains_at_reduced_size(tmp_path: Path) -> None:
    config = Config(
        data=Data("char-ptb", limit=200_000),
        batches=Batches("chunks", size=32, length=50),
        model=Model(hidden=64, init="block-orthogonal", one_bias=True, learn_initial_state=True),
        zoneout=Zoneout(cell=0.25, hidden=0.05),
        optimizer=Optimizer("adam", paper=True, lr=0.01, clip_gradient=0.0, clip_update=1.0),
        evaluation=Evaluation(Protocol("chunks", length=50), Protocol("whole", length=500)),
        epochs=1,
        device="cpu",
    )
    summary: Summary = train(config, tmp_path / "run")
    assert summary.best is not None and summary.best["bits"] < 3.6, (
        "char-PTB's letter frequencies alone give about 4.2"
    )
    assert summary.test is not None and summary.test["bits"] < 3.6


@pytest.mark.skipif(
    "ZONEOUT_DATA" not in os.environ, reason="ZONEOUT_DATA does not say where the paper's data are"
)
def test_permuted_mnist_trains_with_batch_norm_and_zoneout(tmp_path: Path) -> None:
    config = Config(
        data=Data("mnist", limit=40),
        batches=Batches(size=20),
        model=Model(
            hidden=8, norm="batch", init="identity", one_bias=True, learn_initial_state=True
        ),
        zoneout=Zoneout(cell=0.15, hidden=0.15, mask="shared"),
        optimizer=Optimizer("rmsprop", paper=True, lr=0.001, decay=0.5, clip_gradient=1.0),
        epochs=1,
        device="cpu",
    )
    summary = train(config, tmp_path / "run")
    assert (
        summary.measure == "error"
        and summary.test is not None
        and summary.test["predictions"] == 40
    )
    assert 0 <= summary.test["error"] <= 1 and summary.update == 2


def some_images(monkeypatch: pytest.MonkeyPatch) -> Images:
    """Let every run train on 30 images of noise, and return them."""
    pixels = np.random.default_rng(0).integers(0, 256, (30, 784)).astype(np.uint8)
    labels = (np.arange(30) % 10).astype(np.uint8)
    images = Images(
        "paper", (pixels, labels), (pixels[::-1][:12], labels[:12]), (pixels, labels), ""
    )
    monkeypatch.setattr(module, "load_data", lambda *_: images)
    return images


def test_other_scores_stand_in_the_line_of_a_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training error is of other images, or what is called running averages is something else:
    the experiments on batch norm would compare nothing.
    """
    images = some_images(monkeypatch)
    monkeypatch.setattr(module, "TRAINING", 20)
    monkeypatch.setattr(module, "LARGE", 12)
    config = Config(
        data=Data("mnist"),
        batches=Batches(size=15),
        model=Model(hidden=3, norm="batch"),
        optimizer=Optimizer("rmsprop", lr=0.01),
        evaluation=Evaluation(Protocol(size=3), statistics_also=True, keep="last"),
        epochs=1,
        device="cpu",
    )
    train(config, tmp_path)
    line = next(row for row in read_metrics(tmp_path) if row["kind"] == "valid")
    model = load(tmp_path, weights="last").model
    for name, part, size, batch in (
        ("error", "valid", 3, True),
        (module.RUNNING, "valid", 3, False),
        (module.BY_LARGE, "valid", 12, True),
        ("train_error", "train", 3, True),
    ):
        own = replace(config, data=Data("mnist", limit=20))
        score = evaluate(
            model, images, part, own, protocol=Protocol(size=size), batch_statistics=batch
        )
        assert line[name] == score.error, name
    made = results.curve(read_metrics(tmp_path), "error")
    assert [made[name] for name in module.ALSO] == [[round(line[n], 5)] for n in module.ALSO]


@pytest.mark.parametrize("number", range(3))
def test_a_run_stopped_between_the_scores_of_a_validation_goes_on(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation is not repeated: its line is missing, and its weights are lost as the best."""
    some_images(monkeypatch)
    config = Config(
        data=Data("mnist"),
        batches=Batches(size=15),
        model=Model(hidden=3),
        schedule=Schedule("plateau", after=1, by=2.0),
        epochs=3,
        patience=2,
        device="cpu",
    )
    train(config, tmp_path / "whole")
    own, calls = Training.also, 0

    def also(self: Training) -> dict[str, float]:
        nonlocal calls
        calls += 1
        if calls == number + 1:
            raise module.Stopped
        return own(self)

    monkeypatch.setattr(Training, "also", also)
    assert train(config, tmp_path / "run").status == "interrupted"
    train(None, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_the_last_weights_can_be_the_ones_to_keep(tmp_path: Path) -> None:
    """A row that its source judges by its final weights would be judged by the best."""
    still = replace(CHARS, optimizer=Optimizer("sgd", lr=0.0))  # every validation is equally good
    for keep, epoch in (("best", 1), ("last", 2)):
        config = replace(still, evaluation=replace(still.evaluation, keep=keep))
        best = train(config, tmp_path / keep).best
        assert best is not None and best["epoch"] == epoch


def test_dropping_in_another_backend_changes_nothing_but_rounding(tmp_path: Path) -> None:
    config = replace(CHARS, epochs=1)
    for backend in ("reference", "cpu"):
        train(replace(config, backend=backend), tmp_path / backend)
    a, b = curve(tmp_path / "reference"), curve(tmp_path / "cpu")
    assert [line[2] for line in a] == pytest.approx([line[2] for line in b], rel=1e-4)


if __name__ == "__main__":
    import tempfile

    for name, config in CURVES.items():
        with tempfile.TemporaryDirectory() as folder:
            train(config, Path(folder) / "run")
            lines = [
                f"{kind} {update} {nats:.6f}\n"
                for kind, update, nats in curve(Path(folder) / "run")
            ]
            (GOLDEN / f"{name}.txt").write_text("".join(lines))


@pytest.mark.parametrize(
    "protocol", [Protocol("whole"), Protocol("chunks", length=20, size=1)], ids=["whole", "one"]
)
def test_batch_norm_is_not_validated_by_single_rows(protocol: Protocol, tmp_path: Path) -> None:
    """Nothing is left of a row that is normalised by itself: the validation means nothing, and
    chooses the weights.
    """
    config = CURVES["char-lstm-batch-norm"]
    config = replace(config, evaluation=replace(config.evaluation, valid=protocol))
    with pytest.raises(ValueError, match=r"evaluation\.valid: expected at least two rows at once"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
