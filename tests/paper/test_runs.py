"""The folder of a run: whole at every moment, held by one process, never another run's."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from zoneout.paper import disk
from zoneout.paper.data.corpora import Vocabulary
from zoneout.paper.disk import RunError
from zoneout.paper.report.describe import describe
from zoneout.paper.training import config as configs
from zoneout.paper.training import runs
from zoneout.paper.training.config import Config, Data, Model, Schedule
from zoneout.paper.training.models import build
from zoneout.paper.training.runs import Run, load, read_metrics

VOCABULARY = Vocabulary("char", tuple("abcü\n"))
CONFIG = Config(model=Model(hidden=4, embedding=4, tied=True))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    run = Run(tmp_path / "run")
    run.create(CONFIG, VOCABULARY)
    yield run
    run.close()


def checkpoint(run: Run, update: int) -> dict[str, torch.Tensor]:
    """A line of metrics and a checkpoint after it."""
    run.append({"kind": "train", "update": update, "epoch": 0.5, "nats": 1.0})
    tensors = {"model.a": torch.full((3,), float(update)), "loop.count": torch.tensor(update)}
    run.save(tensors, {"update": update, "epoch": 0})
    return tensors


def test_a_run_is_created_and_read(run: Run) -> None:
    assert runs.read_config(run.folder) == CONFIG
    assert runs.read_vocabulary(run.folder) == VOCABULARY
    assert read_metrics(run.folder) == []


def test_a_run_is_never_overwritten(run: Run) -> None:
    run.close()
    before = {p.name: p.read_bytes() for p in run.folder.iterdir()}
    with pytest.raises(
        RunError, match=r"holds a run already; continue it with --resume, or choose another folder"
    ):
        Run(run.folder).create(CONFIG, VOCABULARY)
    other = replace(CONFIG, seed=9, epochs=3)
    with pytest.raises(RunError, match=r"^seed: expected 1 as in .+, got 9; leave that out"):
        Run(run.folder).open(other)
    assert {p.name: p.read_bytes() for p in run.folder.iterdir()} == before


def test_a_run_may_be_made_longer(run: Run) -> None:
    run.close()
    longer = replace(CONFIG, epochs=99)
    assert run.open(longer) == longer
    run.go_on(None, longer)
    assert runs.read_config(run.folder) == longer


def test_a_run_whose_schedule_knows_its_length_keeps_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    config = replace(CONFIG, schedule=Schedule("cosine"))
    run.create(config, VOCABULARY)
    run.close()
    with pytest.raises(
        RunError, match=r"^epochs: expected 20 as in .+, got 99; with a cosine schedule every"
    ):
        run.open(replace(config, epochs=99))
    with pytest.raises(
        RunError, match=r"^epochs, seed: expected 20, 1 as in .+, got 99, 2; leave that out"
    ):
        run.open(replace(config, epochs=99, seed=2))


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match=r"is not empty and not a run \(it holds thesis\.tex\)"):
        Run(tmp_path).create(CONFIG, None)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(RunError, match=r"is not a run: there is no config\.json"):
        Run(tmp_path).open()


def test_a_sweep_is_not_a_run(tmp_path: Path) -> None:
    """Somebody who asks for a sweep is told that a file is missing, and not where its page is."""
    for name in ("results.json", "index.html"):
        (tmp_path / name).write_text("x")
    with pytest.raises(RunError, match=r"is not a run but a sweep: its page is .*index\.html"):
        runs.read_config(tmp_path)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(RunError, match=r"it is not a folder; choose another name"):
        Run(tmp_path / "run").create(CONFIG, None)


def test_a_folder_is_held_by_one_process(run: Run) -> None:
    with pytest.raises(RunError, match=r"is in use by another process"):
        Run(run.folder).open()
    run.close()
    run.open()


def test_a_run_killed_while_it_was_created_can_be_created(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.create(CONFIG, VOCABULARY, "of one text")
    run.close()
    (tmp_path / "config.json").rename(disk.side_of(tmp_path / "config.json"))
    run.create(CONFIG, VOCABULARY, "of another")
    run.close()
    assert runs.read_digest(tmp_path) == "of another"
    assert not any(disk.is_side(path.name) for path in tmp_path.iterdir()), (
        "something is left of the first try"
    )
    (tmp_path / "lock").unlink()
    (tmp_path / "config.json").unlink()
    with pytest.raises(
        RunError, match=r"is not empty and not a run"
    ):  # somebody else's vocabulary.json, perhaps
        run.create(CONFIG, VOCABULARY)


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(
        RunError, match=r"it may not be written to; choose another folder or change its permissions"
    ):
        Run(tmp_path / "run").create(CONFIG, None)


# --- checkpoints ----------------------------------------------------------------------------------


def test_the_latest_two_checkpoints_are_kept(run: Run) -> None:
    for update in (5, 10, 100, 1000):
        tensors = checkpoint(run, update)
    assert [p.name for p in run.checkpoints()] == ["00001000", "00000100"]
    found, problems = run.latest()
    assert found is not None and not problems and found.state["update"] == 1000
    assert found.tensors.keys() == tensors.keys() and all(
        torch.equal(found.tensors[n], t) for n, t in tensors.items()
    )


def test_metrics_are_cut_back_to_the_checkpoint(run: Run) -> None:
    """Lines after it come again when the run goes on, and half a line is what a crash leaves."""
    checkpoint(run, 1)
    run.append({"kind": "train", "update": 2, "epoch": 0.5, "nats": 1.0})
    with open(run.metrics, "a") as file:
        file.write('{"kind": "tr')
    assert [row["update"] for row in read_metrics(run.folder)] == [1, 2]
    run.go_on(run.latest()[0], CONFIG)
    assert run.metrics.read_text() == '{"kind": "train", "update": 1, "epoch": 0.5, "nats": 1.0}\n'


def test_an_ended_run_without_checkpoints_is_not_begun_again(run: Run) -> None:
    """Somebody who has thrown away what takes most room, and asks for more of a run, loses what
    it had.
    """
    run.append({"kind": "valid", "update": 1, "epoch": 0.5, "bits": 2.0, "best": True})
    run.finish({"status": "finished"})
    run.close()
    with pytest.raises(RunError, match=r"checkpoints .* are gone"):
        Run(run.folder).open()
    assert runs.read_metrics(run.folder) and (run.folder / "summary.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "lacks"),
    [
        ("metrics.jsonl", '{"update": 1, "epoch": 1}', "line 1: there is no field 'kind'"),
        (
            "metrics.jsonl",
            '{"kind": "valid", "update": 1, "epoch": 1}',
            "line 1: there is no field 'best'",
        ),
        ("summary.json", "{}", "there is no field 'status'"),
        (
            "summary.json",
            '{"status": "finished", "update": 1, "epoch": 1}',
            "there is no field 'parameters'",
        ),
    ],
)
def test_good_json_without_what_is_needed_is_a_sentence(
    run: Run, name: str, content: str, lacks: str
) -> None:
    """`zoneout show` of a run that somebody has edited ends in a KeyError."""
    (run.folder / name).write_text(content + "\n")
    with pytest.raises(RunError, match=lacks):
        describe(run.folder)


def test_without_a_checkpoint_a_run_begins_again(run: Run) -> None:
    run.append({"kind": "train", "update": 1, "epoch": 0.5, "nats": 1.0})
    assert run.latest() == (None, [])
    run.go_on(None, CONFIG)
    assert read_metrics(run.folder) == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def nonsense(path: Path) -> None:
    path.write_text("[1, 2]")


@pytest.mark.parametrize("damage", [truncate, flip, nonsense, Path.unlink])
@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
def test_a_damaged_checkpoint_is_passed_over(run: Run, damage: Any, name: str) -> None:
    checkpoint(run, 1)
    checkpoint(run, 2)
    damage(run.last / "00000002" / name)
    found, problems = run.latest()
    assert found is not None and found.state["update"] == 1
    assert len(problems) == 1 and "00000002 is damaged" in problems[0]
    run.go_on(found, CONFIG)
    assert [row["update"] for row in read_metrics(run.folder)] == [1]
    assert [p.name for p in run.checkpoints()] == ["00000001"], (
        "a later one would pass for the latest next time"
    )


def test_a_number_changed_in_the_state_is_seen(run: Run) -> None:
    checkpoint(run, 1)
    path = run.last / "00000001" / "state.json"
    path.write_text(path.read_text().replace('"epoch": 0', '"epoch": 7'))
    with pytest.raises(
        RunError,
        match=r"cannot be continued: the checkpoint .* is damaged \(state\.json has been altered\)",
    ):
        run.latest()


def test_metrics_that_were_altered_are_seen(run: Run) -> None:
    """The metrics are the truth: a run does not go on from others than it wrote."""
    checkpoint(run, 1)
    run.metrics.write_text(run.metrics.read_text().replace("train", "tRain"))
    with pytest.raises(RunError, match=r"metrics\.jsonl has been altered since"):
        run.latest()


@pytest.mark.parametrize("call", range(1, 9))
def test_a_full_disk_leaves_the_checkpoint_before(
    run: Run, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """At whichever write the disk is full, what stood before is whole."""
    tensors = checkpoint(run, 1)
    calls = 0
    fsync = os.fsync

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    try:
        run.save({name: value + 1 for name, value in tensors.items()}, {"update": 2, "epoch": 0})
    except RunError as error:
        assert "the disk is full; free some space and continue with --resume" in str(error)
    else:
        assert calls < call, "an error was swallowed"
    monkeypatch.undo()
    found, problems = run.latest()
    assert found is not None and not problems
    value = float(found.state["update"])
    assert found.tensors["model.a"].tolist() == [value] * 3


def test_a_full_disk_while_metrics_are_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here to write to")
    monkeypatch.setattr(runs, "opened", lambda path, mode: full.open(mode))
    with pytest.raises(RunError, match=r"the disk is full"):
        run.append({"kind": "train"})


# --- what others read -----------------------------------------------------------------------------


def test_best_weights_come_back_as_a_model(run: Run) -> None:
    model = build(replace(CONFIG, seed=5), len(VOCABULARY))
    run.save_best(runs.weights_of(model), {"update": 3, "bits": 1.5})
    found = load(run.folder)
    assert (
        found.config == CONFIG
        and found.vocabulary == VOCABULARY
        and found.info == {"update": 3, "bits": 1.5}
    )
    assert not found.model.training
    assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), model.parameters()))
    assert found.model.softmax.weight is found.model.embedding.weight


def test_last_weights_come_back_as_a_model(run: Run) -> None:
    model = build(replace(CONFIG, seed=5), len(VOCABULARY))
    run.save(
        {f"model.{n}": t for n, t in runs.weights_of(model).items()}, {"update": 3, "epoch": 1}
    )
    found = load(run.folder, weights="last")
    assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), model.parameters()))
    truncate(run.last / "00000003" / "tensors.safetensors")
    with pytest.raises(RunError, match=r"00000003 is damaged"):
        load(run.folder, weights="last")


def test_weights_that_are_missing_damaged_or_anothers(run: Run) -> None:
    with pytest.raises(RunError, match=r"the run has no best weights yet"):
        load(run.folder)
    with pytest.raises(RunError, match=r"has no checkpoint yet"):
        load(run.folder, weights="last")
    other = build(replace(CONFIG, model=Model(hidden=5, embedding=0)), len(VOCABULARY))
    run.save_best(runs.weights_of(other), {})
    with pytest.raises(RunError, match=r"do not fit its config \(missing: \['embedding\.weight'\]"):
        load(run.folder)
    truncate(run.folder / "best.safetensors")
    with pytest.raises(RunError, match=r"best\.safetensors is damaged"):
        load(run.folder)
    with pytest.raises(ValueError, match=r"weights: expected 'best' or 'last', got 'first'"):
        load(run.folder, weights="first")


def test_a_config_of_somebody_elses_hand(run: Run) -> None:
    path = run.folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"sead": 3}))
    with pytest.raises(
        RunError,
        match=r"config\.json cannot be read: sead: there is no such field; the nearest are seed",
    ):
        runs.read_config(run.folder)
    path.write_text(json.dumps(values | {"format": 99}))
    with pytest.raises(RunError, match=r"written by another version of zoneout"):
        runs.read_config(run.folder)
    path.write_text("{")
    with pytest.raises(RunError, match=r"config\.json cannot be read"):
        runs.read_config(run.folder)


def test_images_have_no_vocabulary(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.create(Config(data=Data("mnist")), None)
    assert runs.read_vocabulary(tmp_path) is None
    run.close()


# --- damage that would not show -------------------------------------------------------------------


@pytest.mark.parametrize("place", [0.2, 0.5, -2])
def test_a_flipped_bit_in_the_best_weights_is_seen(run: Run, place: float) -> None:
    """In the notes or in a number: safetensors alone would give back other weights, and the test
    another result.
    """
    run.save_best(runs.weights_of(build(CONFIG, len(VOCABULARY))), {"update": 3, "bits": 1.5})
    path = run.folder / "best.safetensors"
    content = bytearray(path.read_bytes())
    content[int(len(content) * place) if place > 0 else int(place)] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        RunError, match=r"best\.safetensors is damaged: .*only a new run, in another folder"
    ):
        load(run.folder)


def test_best_weights_without_a_checksum_are_read(run: Run) -> None:
    """As they were written before there was one."""
    model = build(CONFIG, len(VOCABULARY))
    disk.write_tensors(run.folder / "best.safetensors", runs.weights_of(model), {"update": 3})
    assert load(run.folder).info == {"update": 3}


def test_a_config_that_was_altered_is_not_gone_on_with(run: Run) -> None:
    """A digit that changed in config.json would otherwise train the rest of the run with another
    learning rate.
    """
    checkpoint(run, 1)
    path = run.folder / "config.json"
    path.write_text(path.read_text().replace('"lr": 0.003', '"lr": 0.002'))
    with pytest.raises(
        RunError,
        match=r"cannot be continued: .* is damaged \(config\.json has been altered since\)",
    ):
        run.latest()
    path.write_text(
        path.read_text()
        .replace('"lr": 0.002', '"lr": 0.003')
        .replace('"epochs": 20', '"epochs": 30')
    )
    found, problems = run.latest()
    assert found is not None and not problems, "how long a run is may change"


def test_a_run_of_a_version_with_fewer_settings_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new setting, as it is by default, makes every run before it look altered."""
    names = configs.names()
    with monkeypatch.context() as before:
        before.setattr(configs, "names", lambda: [name for name in names if name != "weight_drop"])
        checkpoint(run, 1)
    path = run.folder / "config.json"
    page = json.loads(path.read_text())
    del page["weight_drop"]
    path.write_text(json.dumps(page))
    found, problems = run.latest()
    assert found is not None and not problems


def test_what_comes_after_training_may_change(run: Run) -> None:
    """A run has to be made again because its test was cut otherwise."""
    checkpoint(run, 1)
    run.close()
    other = configs.change(CONFIG, {"evaluation.test.length": 50, "evaluation.statistics_size": 7})
    again = Run(run.folder)
    assert again.open(other) == other
    again.go_on(again.latest()[0], other)
    found, problems = again.latest()
    again.close()
    assert found is not None and not problems


def test_a_folder_taken_between_two_looks_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process creates, and even finishes, a run there just before this one has the lock."""
    run, lock = Run(tmp_path), Run.lock

    def late(self: Run) -> None:
        monkeypatch.undo()
        other = Run(tmp_path)
        other.create(CONFIG, VOCABULARY)
        other.close()
        lock(self)

    monkeypatch.setattr(Run, "lock", late)
    with pytest.raises(RunError, match=r"holds a run already"):
        run.create(replace(CONFIG, seed=9), VOCABULARY)
    run.close()
    assert runs.read_config(tmp_path) == CONFIG
