"""Runs, texts and options of somebody who means ill: a sentence and an exit code, and nothing
written elsewhere.
"""

from __future__ import annotations

import ast
import hashlib
import json
import lzma
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import SMALL
from safetensors.torch import load_file, save_file

from zoneout.paper import console, disk
from zoneout.paper.cli import commands
from zoneout.paper.data import corpora, datasets
from zoneout.paper.experiments import trials
from zoneout.paper.report import plots
from zoneout.paper.training import models, processes, runs
from zoneout.paper.training import train as training
from zoneout.paper.training.config import Config, Model
from zoneout.paper.training.evaluate import Score
from zoneout.paper.training.exit_codes import BAD_DATA, DIVERGED, FAILED, OK, WRONG_USE
from zoneout.paper.training.progress import Lines
from zoneout.paper.training.runs import Run

Command = Callable[..., tuple[int, str, str]]

pytestmark = [pytest.mark.usefixtures("elsewhere", "one_thread")]


@pytest.fixture
def hostile(trained: Path, tmp_path: Path) -> Path:
    """A copy of a good run, to be made a bad one."""
    return Path(shutil.copytree(trained, tmp_path / "hostile"))


@pytest.fixture
def impatient() -> Iterator[None]:
    """What waits for a pipe fails, instead of waiting for ever."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: pytest.fail("it waited"))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def sentence(result: tuple[int, str, str], code: int, *words: str) -> None:
    """The command ended with a code and one line that has these words, and nothing that commands
    a terminal.
    """
    found, out, err = result
    assert found == code, (found, out, err)
    assert len(err.strip().splitlines()) == 1 and all(word in err for word in words), err
    assert not out and not console.CONTROL.search(err.strip())


def go_on(zoneout: Command, run: Path) -> tuple[int, str, str]:
    return zoneout("train", "--resume", "--out", run, "--updates", "40")


# --- nothing is written elsewhere -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [".summary.json", ".data.json", ".config.json", ".vocabulary.json", "last/.00000040"]
)
def test_a_run_goes_on_beside_links_where_files_were_once_written_to_the_side(
    hostile: Path, zoneout: Command, name: str
) -> None:
    """A link under a name that can be foreseen gets what belongs into the run."""
    victim = Path("victim")
    victim.write_text("precious")
    (hostile / name).symlink_to(victim.absolute())
    assert go_on(zoneout, hostile)[0] == OK
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["metrics.jsonl", "lock"])
def test_a_run_whose_files_are_links_is_refused(hostile: Path, zoneout: Command, name: str) -> None:
    """A text of the user's is cut off or appended to."""
    victim = Path("victim")
    (hostile / name).replace(victim)
    before = victim.read_bytes()
    (hostile / name).symlink_to(victim.absolute())
    sentence(
        go_on(zoneout, hostile),
        FAILED,
        f"{name}: it is a symbolic link, and no file is written through one",
    )
    assert victim.read_bytes() == before


def test_no_checkpoint_is_removed_through_a_link(hostile: Path, zoneout: Command) -> None:
    """Folders of the user's whose names are numbers (photos of 2019) are removed as old
    checkpoints.
    """
    photos = Path("photos")
    (hostile / "last").rename(photos)
    (photos / "2").mkdir()
    (hostile / "last").symlink_to(photos.absolute())
    sentence(go_on(zoneout, hostile), FAILED, "last is a symbolic link, and nothing is removed")
    assert (photos / "2").is_dir() and len(list(photos.iterdir())) == 3


def test_what_is_written_takes_the_place_of_a_link(tmp_path: Path) -> None:
    """A page, a picture or a summary is written through a link to where somebody else wants it."""
    victim, link = tmp_path / "victim", tmp_path / "link.svg"
    victim.write_text("precious")
    fig = plots.figure([])
    writers: list[Callable[[], None]] = [
        lambda: disk.write_text(link, "x"),
        lambda: disk.write_tensors(link, {"a": torch.zeros(2)}),
        lambda: plots.save(fig, link),
    ]
    for write in writers:
        link.unlink(missing_ok=True)
        link.symlink_to(victim)
        write()
        assert victim.read_text() == "precious" and not link.is_symlink()
        assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_what_fails_leaves_nothing_on_the_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is filled with halves of files."""

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    run = Run(tmp_path / "run")
    run.create(Config(model=Model(hidden=2)), None)
    monkeypatch.setattr(os, "fsync", full)
    for write in (
        lambda: run.finish({}),
        lambda: run.save({"a": torch.zeros(1)}, {"update": 1, "epoch": 0}),
    ):
        with pytest.raises(disk.RunError, match="the disk is full"):
            write()
    run.close()
    assert [path for path in run.folder.rglob("*") if disk.is_side(path.name)] == []


def test_files_are_opened_in_one_place() -> None:
    """A new place that opens files by itself waits for pipes and follows links; one that prints,
    prints anything.

    What the files of a run are called by others (safetensors, NumPy) is checked before, in these
    functions.
    """
    allowed = {"disk.py": {"open"}, "console.py": {"print"}}
    for path in Path(disk.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = (
                node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            )
            direct = isinstance(node.func, ast.Name) and name in ("open", "print")
            method = name in (
                "write_text",
                "write_bytes",
                "read_text",
                "read_bytes",
                "touch",
            ) and not (
                isinstance(node.func, ast.Name)
                or (
                    isinstance(node.func, ast.Attribute)
                    and getattr(node.func.value, "id", "") == "disk"
                )
            )
            at = f"{path.name}:{node.lineno}"
            assert not direct or name in allowed.get(path.name, ()), at
            assert not method or "/sys/fs/cgroup" in ast.unparse(node), at


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("config.json", "show"),
        ("metrics.jsonl", "show"),
        ("summary.json", "show"),
        ("vocabulary.json", "eval"),
        ("data.json", "eval"),
        ("best.safetensors", "eval"),
        ("last/00000030/state.json", "last"),
        ("last/00000030/tensors.safetensors", "last"),
        ("lock", "train"),
    ],
)
def test_a_pipe_in_a_run_is_not_waited_for(
    hostile: Path, zoneout: Command, name: str, command: str
) -> None:
    """A command that somebody's run is given to hangs."""
    (hostile / name).unlink()
    os.mkfifo(hostile / name)
    options: dict[str, tuple[str | Path, ...]] = {
        "last": ("eval", hostile, "--weights", "last"),
        "train": ("train", "--resume", "--out", hostile),
    }
    sentence(
        zoneout(*options.get(command, (command, hostile))),
        FAILED,
        name,
        "expected a file, got a pipe",
    )


@pytest.mark.usefixtures("impatient")
def test_a_pipe_in_the_place_of_a_text(trained: Path, zoneout: Command) -> None:
    """A text that never comes is waited for; a device that never ends is read."""
    os.mkfifo("pipe")
    sentence(
        zoneout("eval", trained, "--text", "pipe"),
        BAD_DATA,
        "pipe: cannot be read: expected a file, got a pipe",
    )
    sentence(
        zoneout("eval", trained, "--text", "/dev/zero"), BAD_DATA, "expected a file, got a device"
    )
    sentence(
        zoneout("train", "--data", "pipe"),
        BAD_DATA,
        "pipe is a pipe or a device; expected a text file",
    )
    sentence(
        zoneout("train", "--data", "my.txt", "--data.valid", "pipe"),
        BAD_DATA,
        "is a pipe or a device",
    )
    sentence(
        zoneout("eval", trained, "--text", "~nobody-of-this-name/x"),
        BAD_DATA,
        "there is no such home folder",
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("vocabulary.json", '{"unit": [], "symbols": ["a"]}', 'expected "unit" to be char or word'),
        ("vocabulary.json", "[" * 100_000, 'expected JSON with "unit" and "symbols"'),
        (
            "config.json",
            '{"seed": ' + "[" * 500 + "]" * 500 + "}",
            "seed: expected a whole number, got [[[[",
        ),
        (
            "config.json",
            '{"device": "\\u001b[31m"}',
            "device: expected a name without control characters",
        ),
    ],
)
def test_files_of_wrong_types_or_depth(
    hostile: Path, zoneout: Command, name: str, content: str, words: str
) -> None:
    """A file of somebody's ends in a traceback."""
    (hostile / name).write_text(content)
    sentence(zoneout("eval", hostile), FAILED, f"{name} cannot be read", words)


@pytest.mark.parametrize(
    "values",
    [
        '"update": "x"',
        f'"update": {10**400}',
        '"epoch": null',
        '"nats": "\\u001b"',
        '"bits": [1]',
        '"bits": NaN',
        '"bits": 1e999',
        '"best": "x"',
        '"kind": []',
        '"predictions": "x"',
        '"more": 1e999',
        '"perplexity": 2',
        f'"deep": {"[" * 500}{"]" * 500}',
        '"bits": null',
    ],
)
def test_metrics_of_wrong_types(hostile: Path, zoneout: Command, values: str) -> None:
    """What is shown of a run, as a text or as JSON, ends in a traceback, or is not JSON."""
    path = hostile / "metrics.jsonl"
    lines = path.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if json.loads(line)["kind"] == "valid")
    lines[at] = f"{lines[at][:-1]}, {values}}}"
    path.write_text("\n".join(lines) + "\n")
    for option in ([], ["--json"]):
        sentence(zoneout("show", hostile, *option), FAILED, "metrics.jsonl is damaged")


@pytest.mark.parametrize(
    "values",
    [
        {"update": "x"},
        {"seconds": None},
        {"parameters": []},
        {"epoch": True},
        {"best": 3},
        {"test": {}},
    ],
)
def test_a_summary_of_wrong_types(hostile: Path, zoneout: Command, values: dict[str, Any]) -> None:
    """The end of a run ends in a traceback when it is shown."""
    edit(hostile / "summary.json", **values)
    sentence(zoneout("show", hostile), FAILED, "summary.json cannot be read")


@pytest.mark.parametrize(
    "info", ["[]", "3", "[" * 100_000, '{"epoch": "x"}', '{"epoch": NaN}', '{"sha256": []}']
)
def test_what_is_noted_beside_weights_of_wrong_types(
    hostile: Path, zoneout: Command, info: str
) -> None:
    """A file of weights ends in a traceback."""
    path = hostile / "best.safetensors"
    save_file(load_file(path), path, {"info": info})
    sentence(zoneout("eval", hostile), FAILED, "best.safetensors is damaged")


def with_weights(run: Path, **values: torch.Tensor) -> None:
    path = run / "best.safetensors"
    save_file(
        load_file(path) | {name.replace("__", "."): value for name, value in values.items()}, path
    )


def test_weights_that_are_no_numbers(hostile: Path, zoneout: Command) -> None:
    """A model with nan, imaginary or whole numbers is taken for the one that was trained."""
    bias = load_file(hostile / "best.safetensors")["softmax.bias"]
    for value, word in (
        (bias * torch.nan, "not finite"),
        (bias.to(torch.complex64), "other type: ['softmax.bias']"),
    ):
        with_weights(hostile, softmax__bias=value)
        for command in (("eval", hostile), ("eval", hostile, "--json"), ("sample", hostile)):
            sentence(zoneout(*command), FAILED, word)
        sentence(go_on(zoneout, hostile), FAILED, word)


def test_a_loss_that_is_not_finite_is_an_error(hostile: Path, zoneout: Command) -> None:
    """`eval` succeeds with nan, which is no JSON; `sample` ends in a traceback."""
    with_weights(
        hostile,
        softmax__weight=torch.full_like(
            load_file(hostile / "best.safetensors")["softmax.weight"], 3e38
        ),
    )
    for command in (
        ("eval", hostile),
        ("eval", hostile, "--json"),
        ("eval", hostile, "--text", "my.txt"),
    ):
        sentence(zoneout(*command), DIVERGED, "and no finite number; the weights cannot be good")
    code, _, err = zoneout("sample", hostile, "--length", "3")
    assert code == DIVERGED and "are not finite numbers" in err


def reseal(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the checkpoints of a run, with checksums that are right again."""
    (run / "summary.json").unlink(missing_ok=True)
    for path in run.glob("last/*/state.json"):
        page = json.loads(path.read_text())
        del page["sha256"]
        change(page)
        page["sha256"] = hashlib.sha256(json.dumps(page, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(page))


@pytest.mark.parametrize(
    "change",
    [
        lambda page: page.update(state=[]),
        lambda page: page.update(metrics_bytes=float(page["metrics_bytes"])),
        lambda page: page["state"].update(update="x"),
        lambda page: page["state"].update(more=1),
        lambda page: page["state"].update(best=[3]),
        lambda page: page["state"].update(seconds="x"),
        lambda page: page["state"].update(done=10**9),
        lambda page: page["state"].update(epoch=10**9),
    ],
)
def test_a_checkpoint_that_cannot_be(hostile: Path, zoneout: Command, change: Any) -> None:
    """A run that somebody has altered with care is continued into a traceback."""
    reseal(hostile, change)
    sentence(go_on(zoneout, hostile), FAILED, str(hostile))


def test_a_checkpoint_of_other_types(hostile: Path, zoneout: Command) -> None:
    """Imaginary weights are continued from."""
    for path in hostile.glob("last/*/tensors.safetensors"):
        save_file(
            {name: value.to(torch.complex64) for name, value in load_file(path).items()}, path
        )

    def seal(page: dict[str, Any]) -> None:
        update = page["state"]["update"]
        page["tensors_sha256"] = disk.digest_of(
            hostile / "last" / f"{update:08d}" / "tensors.safetensors"
        )

    reseal(hostile, seal)
    sentence(go_on(zoneout, hostile), FAILED, "the checkpoint does not fit the run's config")


def test_names_of_checkpoints_are_plain_digits(hostile: Path) -> None:
    """A superscript two, which Python calls a digit, is no number."""
    (hostile / "last" / "²").mkdir()
    assert [path.name for path in Run(hostile).checkpoints()] == ["00000030", "00000020"]


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("model.hidden", 1_000_000, "GiB of memory, got one that needs at least"),
        ("model.hidden", 2**31 - 1, "expected sizes that a tensor can have"),
        ("model.hidden", 10**30, "expected at most 2,147,483,647"),
        ("model.layers", 10**7, "expected at most 16,384"),
        ("model.embedding", 2**31 - 1, "GiB of memory, got one that needs at least"),
        ("batches.length", 10**15, "expected at most 2,147,483,647"),
    ],
)
def test_absurd_sizes(hostile: Path, zoneout: Command, option: str, value: int, words: str) -> None:
    """A slip of the hand, or somebody's config, ends in a traceback, or fills the memory until
    the system kills.
    """
    code, out, err = zoneout(
        "train", "--data", "my.txt", "--out", "run", *SMALL, f"--{option}", str(value)
    )
    assert code == WRONG_USE and words in " ".join(err.replace("│", " ").split()) and not out
    assert not Path("run").exists()
    config = json.loads((hostile / "config.json").read_text())
    group, name = option.split(".")
    config[group][name] = value
    (hostile / "config.json").write_text(json.dumps(config))
    if group == "model":
        sentence(zoneout("eval", hostile), FAILED, "config.json", words)


def test_a_model_is_held_against_its_weights_before_it_is_made(
    hostile: Path, zoneout: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config that asks for gigabytes, beside a few weights, gets them."""
    config = json.loads((hostile / "config.json").read_text())
    config["model"]["hidden"] = 4000
    (hostile / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(runs, "build", lambda *args: pytest.fail("the model was made"))
    sentence(zoneout("eval", hostile), FAILED, "do not fit its config")


def test_the_size_of_a_model_is_known_before_it_is_made() -> None:
    """The memory that a model needs is counted wrongly, and it is refused or made for nothing."""
    config = Config(
        model=Model(
            hidden=5, layers=4, embedding=5, tied=True, norm="batch", learn_initial_state=True
        )
    )
    model = models.build(config, 11)
    assert models._size(config, 11) == sum(
        t.numel() for t in (*model.parameters(), *model.buffers())
    )


def test_memory_is_that_of_the_machine_or_its_container() -> None:
    """Everything is refused, or nothing."""
    found = processes.memory_of(torch.device("cpu"))
    assert found is None or 2**26 < found < 2**60


EXHAUST = {
    "torch": lambda: torch.empty(2**55),
    "numpy": lambda: np.empty(2**55),
    "python": lambda: bytearray(2**55),
}


@pytest.mark.parametrize("exhaust", EXHAUST.values(), ids=EXHAUST)
def test_memory_that_runs_out(
    zoneout: Command, trained: Path, monkeypatch: pytest.MonkeyPatch, exhaust: Any
) -> None:
    """The end of the memory is a traceback."""
    for module, name in ((training, "make_feed"), (commands, "data_of")):
        monkeypatch.setattr(module, name, lambda *args: exhaust())
    sentence(
        zoneout("train", "--data", "my.txt", *SMALL),
        FAILED,
        "the memory ran out",
        "try a smaller --model.hidden",
    )
    sentence(zoneout("eval", trained), FAILED, "the memory ran out")


def test_another_error_is_not_taken_for_the_end_of_the_memory() -> None:
    """A mistake of ours is hidden behind advice to buy memory."""
    with pytest.raises(RuntimeError, match="shapes"), processes.memory_explained():
        raise RuntimeError("the shapes do not fit")


def test_a_sweep_of_too_many_runs() -> None:
    """A number with a few zeros too many builds a list of runs for hours."""
    with pytest.raises(ValueError, match="expected at most 100,000 runs, got 2,000,000,000"):
        trials.grid_of(Config(), {"zoneout.cell": ["0", "0.5"]}, 10**9)


def test_a_small_archive_of_a_large_text(
    trained: Path, zoneout: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes fill the memory."""
    monkeypatch.setattr(commands, "evaluate_text", lambda *args, **options: Score(1.0, 1))
    Path("bomb.xz").write_bytes(lzma.compress(b"green " * 2**18, preset=0))
    command = ("eval", trained, "--text", "bomb.xz")
    sentence(
        zoneout(*command, "--unpacked", "1"),
        BAD_DATA,
        "unpacks to more than 1 MiB",
        "--unpacked MIB",
    )
    assert zoneout(*command, "--unpacked", "2")[0] == OK
    assert "ZONEOUT_UNPACKED" not in os.environ
    sentence(
        zoneout(*command, "--unpacked", "0"), WRONG_USE, "--unpacked: expected 1 MiB or more, got 0"
    )


def test_the_limit_of_packed_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is none unless somebody asks for it, or texts that are not packed have one."""
    monkeypatch.setattr(datasets, "UNPACKED_MIB", 1)
    for name, content in (
        ("packed.xz", lzma.compress(bytes(2**20 + 1), preset=0)),
        ("plain.txt", b"a b" * 2**19),
    ):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(datasets.DataError, match="unpacks to more than 1 MiB"):
        datasets.read(tmp_path / "packed.xz")
    assert len(datasets.read(tmp_path / "plain.txt")) == 3 * 2**19
    for more in (2, 10**30):
        with datasets.unpacking(more):
            assert len(datasets.read(tmp_path / "packed.xz")) == 2**20 + 1
    monkeypatch.setenv("ZONEOUT_UNPACKED", "much")
    with pytest.raises(ValueError, match="ZONEOUT_UNPACKED: expected a number of MiB, got 'much'"):
        corpora.load(tmp_path / "packed.xz")


# --- what is shown --------------------------------------------------------------------------------


def test_nothing_from_a_file_commands_the_terminal(hostile: Path, zoneout: Command) -> None:
    """A run of somebody's clears the screen, or forges what stands on it."""
    edit(hostile / "summary.json", status="\x1b[2Jgood\r\x9b31m\u202e")
    code, out, _ = zoneout("show", hostile)
    assert code == OK and r"\x1b[2Jgood\r\x9b31m\u202e" in out
    page = json.loads((hostile / "vocabulary.json").read_text())
    page["symbols"] = [f"\x1b[{n}m" for n in range(len(page["symbols"]))]
    (hostile / "vocabulary.json").write_text(json.dumps(page))
    code, text, _ = zoneout("sample", hostile, "--length", "5")
    assert code == OK and r"\x1b[" in text
    named = hostile.rename(hostile.with_name("run\x1b[31m"))
    for command in (
        ("eval", named, "--weights", "worst"),
        ("train", "--resume", "--out", named, "--seed", "9"),
    ):
        out += "".join(map(str, zoneout(*command)[1:]))
    (named / "metrics.jsonl").write_text('{"kind": "\x1b"}\n')
    out += "".join(map(str, zoneout("show", named)[1:])) + text
    assert not console.CONTROL.search(out.replace("\n", "").replace("\t", ""))
    assert json.loads(zoneout("sample", named, "--length", "5", "--json")[1])["text"].startswith(
        "\x1b["
    )


def test_progress_does_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A note about a damaged file, which names it, is printed as it is."""
    Lines(sys.stderr).listener()({"kind": "note", "text": "the checkpoint \x1b[2J is damaged"})
    assert capsys.readouterr().err == "note: the checkpoint \\x1b[2J is damaged\n"


def test_json_is_json_or_nothing() -> None:
    """A number that JSON has not is printed as a name that only some readers know."""
    with pytest.raises(ValueError):
        console.show_json({"bits": float("nan")})


def test_files_are_made_for_those_who_may_read_them(tmp_path: Path) -> None:
    """What is written on the side, under a name of its own, can be read by nobody else any more."""
    before = os.umask(0o022)
    try:
        disk.write_text(tmp_path / "a.json", "{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o644
