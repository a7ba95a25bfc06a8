"""The commands, as a user would run them: good input and bad."""

from __future__ import annotations

import gzip
import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fabricated
import pytest
import torch
from command_line import SMALL, TEXT, environment, process

from zoneout.paper.cli import commands, main
from zoneout.paper.data import datasets, download
from zoneout.paper.experiments.recipes import RECIPES
from zoneout.paper.report.describe import describe
from zoneout.paper.training import config, runs
from zoneout.paper.training.exit_codes import BAD_DATA, DIVERGED, FAILED, INTERRUPTED, OK, WRONG_USE
from zoneout.paper.training.models import build
from zoneout.paper.training.unused_options import refuse_unread, unread

pytestmark = pytest.mark.usefixtures("one_thread", "elsewhere")


# --- train ----------------------------------------------------------------------------------------


def test_train_says_how_it_went(trained, zoneout) -> None:
    """The shortest command does not work, or its run is not the one that was asked for."""
    code, out, err = zoneout(
        "train", "--data", "my.txt", "--updates", "20", *SMALL, "--zoneout.cell", "0.5"
    )
    assert code == OK
    assert (
        "Finished after 20 updates" in out
        and "best valid" in out
        and "zoneout sample runs/my" in out
    )
    assert "update      20  valid" in err
    size = len(TEXT) - 2 * (len(TEXT) * 5 // 100)
    assert err.startswith(
        f"{size:,} characters of my.txt, "
    )  # what it learns from comes before all else
    made = runs.read_config("runs/my")
    assert made.zoneout.cell == 0.5 and made.model.hidden == 16
    assert made.data.name == str(
        Path("my.txt").absolute()
    )  # from another folder the text is still found
    assert zoneout("train", "--data", "my.txt", "--updates", "1", *SMALL)[0] == OK
    assert runs.read_config("runs/my-2").updates == 1  # a second one takes a name of its own


def test_train_ends_in_json(zoneout) -> None:
    """A script that reads the result has to read it out of sentences."""
    code, out, _ = zoneout(
        "train", "--data", "my.txt", "--out", "run", "--updates", "10", *SMALL, "--json"
    )
    summary = json.loads(out)
    assert code == OK
    assert (
        summary["status"] == "finished" and summary["update"] == 10 and summary["best"]["bits"] > 0
    )


def test_train_looks_for_a_corpus_in_a_folder(zoneout, monkeypatch) -> None:
    """--data DIR is taken for a text."""
    Path("there").mkdir()
    shutil.copy("my.txt", "there/bottles.txt")
    file = datasets.File(
        "bottles.txt", len(TEXT), __import__("hashlib").sha256(TEXT.encode()).hexdigest()
    )
    monkeypatch.setitem(
        datasets.DATASETS, "bottles", datasets.Dataset("bottles", "a song", (file,))
    )
    code, _, err = zoneout(
        "train", "--data", "there", "--data.name", "bottles", "--updates", "1", *SMALL
    )
    assert code == OK, err
    assert runs.read_config("runs/bottles").data.name == "bottles"
    code, _, err = zoneout(
        "train", "--data", "there", "--data.name", "bottles.txt", "--updates", "1", *SMALL
    )
    assert code == OK, err  # a text of one's own lies there as well
    assert runs.read_config("runs/bottles-2").data.name == str(Path("there/bottles.txt").absolute())


def test_a_folder_in_use_is_not_touched(trained, zoneout) -> None:
    """A run is overwritten by the next."""
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    code, out, err = zoneout("train", "--data", "my.txt", "--out", trained, *SMALL)
    assert code == FAILED
    assert "--resume" in err and not out
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


def test_divergence_has_a_code_of_its_own(zoneout) -> None:
    """A script cannot tell a run that diverged from one that failed."""
    wild = ["--optimizer.rule", "sgd", "--optimizer.lr", "1e39"]
    code, _, err = zoneout(
        "train", "--data", "my.txt", "--out", "run", "--updates", "50", *SMALL, *wild
    )
    assert code == DIVERGED
    assert "diverged" in err and "--optimizer.lr" in err


def test_resume_goes_on_with_the_options_of_the_run(trained, tmp_path, zoneout) -> None:
    """A run that is continued falls back to the defaults, or starts anew, or ignores what may be
    changed.
    """
    shutil.copytree(trained, "run")
    code, out, err = zoneout("train", "--resume", "--out", "run", "--updates", "40")
    assert code == OK, err
    assert "continued after update 30" in err and "Finished after 40 updates" in out
    lines = runs.read_metrics("run")
    assert [line["update"] for line in lines if line["kind"] == "valid"] == [10, 20, 30, 40]

    # As if it had never stopped:
    arguments = ["--updates", "40", *SMALL, "--zoneout.cell", "0.5", "--optimizer.lr", "0.01"]
    assert (
        zoneout("train", "--data", trained.parent / "my.txt", "--out", "whole", *arguments)[0] == OK
    )
    ours, theirs = (
        runs.read_tensors(Path(run) / "best.safetensors")[0] for run in ("run", "whole")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    code, _, err = zoneout("train", "--resume", "--out", "run", "--model.hidden", "32")
    assert code == FAILED
    assert "zoneout train: --model.hidden: expected 16 as in run, got 32; leave that out" in err


def test_interrupting_keeps_the_run(tmp_path) -> None:
    """Ctrl-C loses what was trained, prints a traceback, or does not say how to go on."""
    arguments = [
        "train",
        "--data",
        "my.txt",
        "--out",
        "run",
        "--updates",
        "1000000",
        "--epochs",
        "1000000",
        *SMALL,
    ]
    command = [sys.executable, "-m", "zoneout", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as running:
        assert running.stderr is not None and running.stdout is not None
        for line in running.stderr:
            if "valid" in line:
                break
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == INTERRUPTED, err
    assert "zoneout train --resume --out run" in out
    assert "Traceback" not in err
    reached = max(int(path.name) for path in Path("run/last").iterdir())
    done = process("train", "--resume", "--out", "run", "--updates", str(reached + 1), "--json")
    assert done.returncode == OK, done.stderr
    assert json.loads(done.stdout)["update"] == reached + 1


def test_torchrun_starts_it(tmp_path) -> None:
    """`torchrun … -m zoneout train` does not find the command, or every process writes the same
    folder.
    """
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [
        "-m",
        "zoneout",
        "train",
        "--data",
        "my.txt",
        "--out",
        "run",
        "--updates",
        "10",
        *SMALL,
        "--json",
    ]
    done = subprocess.run(
        [*start, *arguments], capture_output=True, encoding="utf-8", env=environment()
    )
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert json.loads(said)["update"] == 10


def test_several_processes_have_to_be_told_the_folder(zoneout, monkeypatch) -> None:
    """Each of several processes makes up a folder of its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = zoneout("train", "--data", "my.txt", *SMALL)
    assert code == WRONG_USE and "--out" in err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard's own imports
def test_tensorboard_is_written(zoneout) -> None:
    """--tensorboard does nothing."""
    pytest.importorskip("tensorboard")
    arguments = [
        "train",
        "--data",
        "my.txt",
        "--out",
        "run",
        "--updates",
        "10",
        *SMALL,
        "--tensorboard",
    ]
    code, _, err = zoneout(*arguments)
    assert code == OK, err
    assert list(Path("run/tensorboard").glob("events.*"))


# --- eval, sample, show ---------------------------------------------------------------------------


def test_eval_gives_what_training_gave(trained, zoneout) -> None:
    """The same weights on the same part are worth something else afterwards."""
    rows = runs.read_metrics(trained)
    best = next(row for row in reversed(rows) if row["kind"] == "valid" and row["best"])
    test = next(row for row in rows if row["kind"] == "test")
    for part, row in (("valid", best), ("test", test)):
        code, out, _ = zoneout("eval", trained, "--part", part, "--json", "--device", "cpu")
        result = json.loads(out)
        assert code == OK
        assert result["bits"] == pytest.approx(row["bits"], rel=1e-6)
        assert result["predictions"] == row["predictions"]


def test_eval_counts_every_prediction(trained, zoneout) -> None:
    """A protocol skips symbols, or counts them twice."""
    size = len(TEXT) * 5 // 100
    for arguments, count, how in (
        (["--protocol", "whole"], size - 1, "one sequence"),
        (["--protocol", "chunks", "--length", "10"], size // 10 * 9, "chunks of 10"),
        (["--protocol", "chunks", "--length", "100000"], size - 1, f"chunks of {size:,}"),
        (["--protocol", "streams", "--size", "4"], (size // 4 - 1) * 4, "4 streams"),
    ):
        code, out, _ = zoneout("eval", trained, *arguments, "--device", "cpu")
        assert code == OK
        assert f"{count:,} predictions" in out and how in out


def test_eval_averages_samples(trained, zoneout) -> None:
    """--samples is not used, or its number is taken for an evaluation by expectation."""
    options = (trained, "--protocol", "chunks", "--length", "20", "--device", "cpu")
    own = json.loads(zoneout("eval", *options, "--json")[1])
    code, out, _ = zoneout("eval", *options, "--json", "--samples", "3")
    sampled = json.loads(out)
    assert code == OK and sampled["samples"] == 3 and "samples" not in own
    assert sampled["predictions"] == own["predictions"] and sampled["bits"] != own["bits"]
    assert "averaged over 3 passes" in zoneout("eval", *options, "--samples", "3")[1]
    code, _, err = zoneout("eval", *options[:1], "--samples", "-1")
    assert code == WRONG_USE and "--samples: expected a number of passes" in err


def test_eval_estimates_statistics_anew(trained, zoneout) -> None:
    """Statistics that were asked for are not estimated, or where there are none nobody says so."""
    code, _, err = zoneout("eval", trained, "--statistics", "8", "--device", "cpu")
    assert code != OK and "has no batch norm" in err
    arguments = [
        "--data",
        "my.txt",
        "--out",
        "normalised",
        "--updates",
        "10",
        "--model.norm",
        "batch",
        *SMALL,
    ]
    code, _, err = zoneout("train", *arguments)
    assert code == OK, err
    found = []
    for more in ([], ["--statistics", "0"], ["--statistics", "16"]):
        code, out, err = zoneout("eval", "normalised", *more, "--json", "--device", "cpu")
        assert code == OK, err
        found.append(json.loads(out)["bits"])
    assert found[0] == pytest.approx(
        found[1], rel=1e-4
    )  # training ended with an estimate of its own
    assert found[2] != pytest.approx(found[1], rel=1e-6)
    code, _, err = zoneout("eval", "normalised", "--statistics", "1", "--device", "cpu")
    assert code != OK and "above 1, got 1" in err


def test_eval_reads_another_text(trained, zoneout) -> None:
    """--text evaluates the run's own data, or encodes the text with other numbers."""
    Path("same.txt").write_text(TEXT[-len(TEXT) * 5 // 100 :], encoding="utf-8")
    own = json.loads(zoneout("eval", trained, "--json")[1])
    other = json.loads(zoneout("eval", trained, "--text", "same.txt", "--json")[1])
    assert other["predictions"] == pytest.approx(own["predictions"], abs=1)
    assert other["bits"] == pytest.approx(own["bits"], abs=0.05)
    Path("strange.txt").write_text("Ξ" * 50, encoding="utf-8")
    code, _, err = zoneout("eval", trained, "--text", "strange.txt")
    assert (
        code == BAD_DATA
        and "strange.txt: there are symbols that the vocabulary has not: ['Ξ']" in err
    )
    Path("latin.txt").write_bytes(b"caf\xe9 " * 20)
    code, _, err = zoneout("eval", trained, "--text", "latin.txt")
    assert code == BAD_DATA and "latin.txt: byte 3 (0xe9, line 1) is not UTF-8" in err
    for name, content in (("empty.txt", b""), ("folder", None), ("none.txt", None)):
        Path("folder").mkdir(exist_ok=True)
        if content is not None:
            Path(name).write_bytes(content)
        code, out, err = zoneout("eval", trained, "--text", name)
        assert code == BAD_DATA and name in err and not out


def test_eval_reads_another_text_as_training_would(trained, zoneout) -> None:
    """A text that could be trained on, packed or from another system, cannot be evaluated."""
    plain = TEXT[:2000].encode()
    found = set()
    for content in (plain, gzip.compress(plain), b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n")):
        Path("other.txt").write_bytes(content)
        code, out, err = zoneout("eval", trained, "--text", "other.txt")
        assert code == OK, err
        found.add(out)
    assert len(found) == 1


def test_a_text_is_judged_as_the_same_part_is(zoneout) -> None:
    """Where evaluation draws masks, the same text in a file of its own has another number."""
    Path("end.txt").write_text(TEXT[:1500])
    own = [
        "--data.valid",
        "end.txt",
        "--data.test",
        "end.txt",
        "--zoneout.hidden",
        "0.3",
        "--seed",
        "5",
    ]
    arguments = [
        "--data",
        "my.txt",
        "--out",
        "run",
        "--updates",
        "10",
        "--evaluation.at-eval",
        "sample",
        *own,
        *SMALL,
    ]
    code, _, err = zoneout("train", *arguments)
    assert code == OK, err
    found = [
        json.loads(zoneout("eval", "run", *more, "--json")[1])["bits"]
        for more in ([], ["--text", "end.txt"])
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--text", "my.txt", "--part", "train"],
            "--part: my.txt has no parts, as the run's data have",
        ),
        (
            ["--text", "my.txt", "--data", "my.txt"],
            "--data: the run's data are not needed where --text is evaluated",
        ),
        (
            ["--size", "7"],
            (
                "--size: the whole text is one sequence; leave it out or use --protocol chunks or "
                "streams"
            ),
        ),
        (
            ["--part", "valid", "--protocol", "whole", "--size", "7"],
            "--size: the whole text is one sequence",
        ),
    ],
)
def test_eval_takes_no_option_that_does_nothing(trained, zoneout, options, says) -> None:
    """Somebody takes the number for that of another part, or of another cut, than it is of."""
    code, out, err = zoneout("eval", trained, *options)
    assert code == WRONG_USE and says in err and not out


def test_eval_notices_that_the_text_has_changed(trained, tmp_path, zoneout) -> None:
    """The cut has moved, and what was trained on is called test."""
    assert zoneout("train", "--data", "my.txt", "--out", "run", "--updates", "10", *SMALL)[0] == OK
    before = zoneout("eval", "run")
    shutil.copy("my.txt", "then.txt")
    Path("my.txt").write_text(TEXT + TEXT[:1000], encoding="utf-8")  # the same symbols
    Path("run/last").rename("last")  # a run that is done may be kept without
    for command in (["eval"], ["gradients", "--batches", "1"]):
        code, out, err = zoneout(*command, "run")
        assert code == BAD_DATA and "run was trained on other data" in err and not out
        code, _, err = zoneout(*command, "run", "--data", "then.txt")
        assert code == OK, err
    assert zoneout("eval", "run", "--data", "then.txt") == before
    assert zoneout("eval", "run", "--text", "my.txt")[0] == OK  # on purpose
    Path("last").rename("run/last")
    kept = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    for place in ([], ["--data", "none.txt"], ["--data", "my.txt"]):
        code, _, err = zoneout("train", "--resume", "--out", "run", "--updates", "20", *place)
        assert code == BAD_DATA, err
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == kept
    Path("my.txt").unlink()
    code, _, err = zoneout("eval", "run")
    assert code == BAD_DATA
    assert (
        "mnist. If what run was trained on has moved, --data says where it is now.\n" in err
    )  # after the names known


def test_characters_that_the_model_does_not_know(trained, zoneout) -> None:
    """A text in another script is evaluated as if nothing were the matter."""
    Path("rare.txt").write_text(TEXT + "Ξ", encoding="utf-8")  # which the test part alone has
    Path("other.txt").write_text("Ω" + TEXT[:499], encoding="utf-8")
    assert (
        zoneout("train", "--data", "rare.txt", "--out", "rare", "--updates", "10", *SMALL)[0] == OK
    )
    code, out, err = zoneout("eval", "rare", "--text", "other.txt")
    assert (
        code == OK
        and "1 of 500 characters are unknown to the model" in err
        and "unknown" not in out
    )
    assert (
        "1 of 2 characters are unknown"
        in zoneout("sample", "rare", "--prompt", "aΩ", "--length", "3")[2]
    )
    words = ("--data.by", "word", "--data.words", "3", "--updates", "5", *SMALL)
    assert zoneout("train", "--data", "rare.txt", "--out", "words", *words)[0] == OK
    Path("alien.txt").write_text("ξ " * 300, encoding="utf-8")
    assert (
        "300 of 300 words are unknown to the model"
        in zoneout("eval", "words", "--text", "alien.txt")[2]
    )


def test_a_run_with_a_file_missing_or_damaged(trained, zoneout) -> None:
    """What is wrong is said in the words of whatever stumbles over it."""
    shutil.copytree(trained, "run")
    Path("run/vocabulary.json").unlink()
    Path("run/summary.json").write_text("{", encoding="utf-8")
    for command, name in (
        ("eval", "vocabulary.json"),
        ("sample", "vocabulary.json"),
        ("show", "summary.json"),
    ):
        code, _, err = zoneout(command, "run")
        assert code == FAILED and name in err, err


def test_eval_of_a_run_that_did_not_note_its_text(trained, zoneout) -> None:
    """A run of an early version cannot be evaluated any more, or is on numbers that stand for
    other symbols.
    """
    shutil.copytree(trained, "run")
    Path("run/data.json").unlink()
    Path("other.txt").write_text(TEXT[::-1], encoding="utf-8")
    Path("strange.txt").write_text("ABC" + TEXT, encoding="utf-8")
    own, noted = (json.loads(zoneout("eval", run, "--json")[1])["bits"] for run in ("run", trained))
    assert own == noted
    assert zoneout("eval", "run", "--data", "other.txt")[0] == BAD_DATA  # its checkpoints tell
    shutil.rmtree("run/last")
    assert zoneout("eval", "run")[0] == OK
    assert zoneout("eval", "run", "--data", "other.txt")[0] == OK  # now nothing does
    code, _, err = zoneout("eval", "run", "--data", "strange.txt")
    assert code == BAD_DATA and "was trained on other data" in err
    Path("run/data.json").write_text("{}")
    code, _, err = zoneout("eval", "run")
    assert code == FAILED and "data.json cannot be read" in err


def test_a_text_that_has_moved_is_found_again(tmp_path, zoneout) -> None:
    """A run is stranded: its text is somewhere else now, and nobody can tell it where."""
    for part in ("train", "valid", "test"):
        shutil.copy("my.txt", f"{part}.txt")
    parts = ["--data.valid", "valid.txt", "--data.test", "test.txt"]
    assert zoneout("train", "--data", "my.txt", "--out", "one", "--updates", "10", *SMALL)[0] == OK
    assert (
        zoneout(
            "train", "--data", "train.txt", *parts, "--out", "three", "--updates", "10", *SMALL
        )[0]
        == OK
    )
    before = {run: zoneout("eval", run)[1] for run in ("one", "three")}
    Path("moved").mkdir()
    for name in ("my", "train", "valid", "test"):
        Path(f"{name}.txt").rename(f"moved/{name}.txt")
    Path("other.txt").write_text(TEXT[::-1], encoding="utf-8")
    for run, places in {"one": ["moved/my.txt", "moved"], "three": ["moved"]}.items():
        assert zoneout("eval", run)[0] == BAD_DATA
        for place in places:
            assert zoneout("eval", run, "--data", place)[:2] == (OK, before[run])
        code, _, err = zoneout("eval", run, "--data", "other.txt")
        assert code == BAD_DATA, err
        updates = ["--updates", "20"]
        code, _, err = zoneout("train", "--resume", "--out", run, "--data", "other.txt", *updates)
        assert code == BAD_DATA, err
        code, out, err = zoneout("train", "--resume", "--out", run, "--data", places[0], *updates)
        assert code == OK and "Finished after 20 updates" in out, err
    code, _, err = zoneout("train", "--resume", "--out", "one", "--data", "shakespeare")
    assert code == FAILED and "--data.name: expected" in err


def test_a_recipe_is_not_trained_on_another_text(zoneout) -> None:
    """`reproduce --data FILE` makes a record of a row from a text that is not the row's."""
    code, _, err = zoneout(
        "reproduce", "char-ptb", "zoneout", "--data", "my.txt", "--device", "cpu"
    )
    assert code == BAD_DATA and "my.txt is a file; expected a folder to look for char-ptb in" in err


def test_weights_best_and_last(trained, zoneout) -> None:
    """--weights last is the best, or cannot be read."""
    found = [
        json.loads(zoneout("eval", trained, "--weights", w, "--json")[1])["bits"]
        for w in ("best", "last")
    ]
    assert all(bits > 0 for bits in found)
    shutil.copytree(trained, "run")
    (Path("run") / "best.safetensors").write_bytes(b"not weights")
    code, _, err = zoneout("eval", "run")
    assert code == FAILED and "damaged" in err


def test_sample_writes(trained, zoneout) -> None:
    """Nothing is written, or something else with the same seed."""
    arguments = ["sample", trained, "--prompt", "9 green ", "--length", "40"]
    code, out, _ = zoneout(*arguments)
    assert code == OK
    assert out.startswith("9 green ") and len(out) == len("9 green ") + 40 + 1
    result = json.loads(zoneout(*arguments, "--json")[1])
    assert result["prompt"] + result["text"] + "\n" == out
    for more in ([], ["--json"]):
        code, out, err = zoneout("sample", trained, "--prompt", "Ξ", *more)
        assert (
            code == WRONG_USE
            and "prompt: there are symbols that the vocabulary has not: ['Ξ']" in err
        )
        assert not out


def test_show_describes_a_run(trained, zoneout) -> None:
    """What a run was trained with cannot be seen any more."""
    code, out, _ = zoneout("show", trained)
    assert code == OK
    for part in (
        "finished, 30 updates",
        "LSTM, one layer of 16 units",
        "best valid",
        "test",
        "--zoneout.cell 0.5",
    ):
        assert part in out
    assert "--zoneout.hidden" not in out  # it is at its default
    assert "o valid" in out
    page = json.loads(zoneout("show", trained, "--json")[1])
    assert page["status"] == "finished" and page["changed"]["zoneout.cell"] == 0.5
    assert config.from_json(page["config"]) == runs.read_config(trained)


def test_show_repeats_the_command(trained, tmp_path, zoneout) -> None:
    """The options that show prints do not make the run that they describe."""
    settings = {"data.name": "my text.txt", "model.one_bias": True, "batches.offset": False}
    other = fabricated.run_folder(
        tmp_path, "other", best=1.5, **settings, **{"optimizer.betas": [0.5, 0.9]}
    )
    for run in (trained, other):
        shown = zoneout("show", run)[1]
        (options,) = [shlex.split(line) for line in shown.splitlines() if line.startswith("  --")]
        assert main.parse("train", options).config == runs.read_config(run)


def test_show_compares_and_draws(trained, zoneout) -> None:
    """Two runs cannot be seen in one picture."""
    shutil.copytree(trained, "other")
    code, out, err = zoneout("show", trained, "other", "--picture", "pictures/curves.png")
    assert code == OK
    assert f"o {trained}" in out and "x other" in out
    assert Path("pictures/curves.png").read_bytes().startswith(b"\x89PNG")
    assert zoneout("show", trained, "--picture", "curves.svg")[0] == OK
    assert "<svg" in Path("curves.svg").read_text(encoding="utf-8")
    code, out, err = zoneout("show", trained, "--picture", "curves.bmp")
    assert code == WRONG_USE and ".png" in err and not out  # before the work, and not after


def test_show_says_what_it_does_not_draw(trained, zoneout) -> None:
    """A run that is judged by something else is left out of the picture without a word."""
    words = ["--data", "my.txt", "--data.by", "word", "--batches.length", "5", "--updates", "10"]
    assert zoneout("train", *words, "--out", "words", *SMALL[:2], *SMALL[4:])[0] == OK
    code, out, err = zoneout("show", trained, "words", "--picture", "curves.png")
    assert code == OK and f"o {trained}" in out and "x words" not in out
    assert "words is not drawn: its perplexity does not go with bits per character" in err
    Path("new").mkdir()
    shutil.copy(trained / "config.json", "new")
    Path("new/metrics.jsonl").touch()
    code, out, err = zoneout("show", "new", "words")  # one without any validation yet goes with all
    assert code == OK and "x words" in out and "not drawn" not in err


def test_images_have_no_protocol(zoneout) -> None:
    """An option that does nothing is taken in silence."""
    images = config.change(config.Config(), {"data.name": "mnist", "model.hidden": 4})
    run = runs.Run("digits")
    run.create(images, None)
    run.save_best(runs.weights_of(build(images)), {"update": 1, "epoch": 1.0})
    run.close()
    for option in (["--protocol", "chunks"], ["--length", "10"]):
        code, _, err = zoneout("eval", "digits", *option)
        assert (
            code == WRONG_USE and "digits classifies images, which are not cut as a text is" in err
        )


def test_show_of_a_run_that_has_just_begun(trained, zoneout) -> None:
    """A run without a validation breaks the picture of it."""
    Path("new").mkdir()
    shutil.copy(trained / "config.json", "new")
    Path("new/metrics.jsonl").touch()
    code, out, _ = zoneout("show", "new", "--picture", "new.png")
    assert code == OK
    assert "not finished, 0 updates" in out and "no validation yet" in out


# --- data -----------------------------------------------------------------------------------------


def test_data_list_and_verify(zoneout, monkeypatch, tmp_path) -> None:
    """A damaged file is called good, or a good one missing."""
    sha256 = __import__("hashlib").sha256(TEXT.encode()).hexdigest()
    file = datasets.File("songs/bottles.txt", len(TEXT), sha256)
    monkeypatch.setattr(
        datasets, "DATASETS", {"bottles": datasets.Dataset("bottles", "a song", (file,))}
    )
    monkeypatch.setattr(commands, "DATASETS", datasets.DATASETS)
    monkeypatch.setenv("ZONEOUT_CACHE", str(tmp_path / "cache"))
    assert "bottles       not here  a song" in zoneout("data", "list")[1]
    assert zoneout("data", "verify")[0] == OK  # nothing is there, so nothing is wrong
    code, out, err = zoneout("data", "verify", "bottles")
    assert code == BAD_DATA and "missing" in out and "songs/bottles.txt was not found" in err
    Path("folder/songs").mkdir(parents=True)
    shutil.copy("my.txt", "folder/songs/bottles.txt")
    assert "bottles       here      a song" in zoneout("data", "list", "--data", "folder")[1]
    code, out, _ = zoneout("data", "verify", "--data", "folder")
    assert code == OK and "good" in out
    Path("folder/songs/bottles.txt").write_text(TEXT[:-1])
    code, out, err = zoneout("data", "verify", "--data", "folder")
    assert code == BAD_DATA and "damaged" in out and sha256 in err
    code, out, _ = zoneout("data", "verify", "bottles", "--data", "folder", "--json")
    assert code == BAD_DATA and json.loads(out)[0]["state"] == "damaged"


def test_data_fetch(zoneout, monkeypatch) -> None:
    """fetch downloads what is there already, or says nothing of where it is."""
    asked = []
    monkeypatch.setattr(
        download,
        "fetch",
        lambda name, folder, progress: (
            asked.append((name, folder)) or [(Path("cache/thing"), True)]
        ),
    )
    code, out, _ = zoneout("data", "fetch", "char-ptb", "--data", "folder")
    assert code == OK and asked == [("char-ptb", Path("folder"))]
    assert "char-ptb      fetched   cache/thing" in out
    result = json.loads(zoneout("data", "fetch", "char-ptb", "--json")[1])
    assert result == [{"dataset": "char-ptb", "path": "cache/thing", "fetched": True}]


def test_data_fetch_of_what_is_built_in(zoneout) -> None:
    """The text that needs no download is an error."""
    code, out, _ = zoneout("data", "fetch", "python")
    assert code == OK and "built in" in out


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_shown_of_a_run_makes_it_again(name) -> None:
    """The command on a report's page is refused by the command line, or makes another run."""
    own, run = RECIPES[name].make(), runs.Run("run")
    run.create(own, None)
    run.close()
    shown = describe("run")["changed"]
    refuse_unread(shown, [own])
    again = config.change(config.Config(), shown)
    assert not set(config.changed(own, again)) - set(unread(own))
