"""The command line: which command is meant, what is said to bad input, and what a process of its
own does.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import SMALL, environment, process

import zoneout as package
import zoneout_command
from zoneout.paper import console
from zoneout.paper.cli import bench, main, options
from zoneout.paper.cli.bench import Bench
from zoneout.paper.cli.gradients import Gradients
from zoneout.paper.cli.reproduce import Reproduce
from zoneout.paper.data import datasets
from zoneout.paper.training import config as configs
from zoneout.paper.training import models, runs
from zoneout.paper.training.config import Config
from zoneout.paper.training.exit_codes import (
    BAD_DATA,
    CODES,
    FAILED,
    INTERRUPTED,
    OK,
    WRONG_USE,
)

pytestmark = pytest.mark.usefixtures("one_thread", "elsewhere")


# --- finding one's way ----------------------------------------------------------------------------


def test_help_names_every_command_and_exit_code(zoneout) -> None:
    """A command is there that nobody can find, or a code that nobody can look up. The text is a
    file, so nothing else keeps it true.
    """
    code, out, _ = zoneout("--help")
    assert code == OK
    lines = out.splitlines()
    commands = [
        f"  {name:9} {(kind.__doc__ or '').splitlines()[0]}" for name, kind in main.COMMANDS.items()
    ]
    first = lines.index("commands (for the options: zoneout COMMAND --help):") + 1
    assert lines[first : lines.index("", first)] == commands
    codes = [f"  {code:<9} {meaning}" for code, meaning in CODES.items()]
    assert lines[lines.index("exit codes:") + 1 :] == codes
    assert max(map(len, lines)) <= 80
    assert zoneout()[0] == WRONG_USE


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_has_help_with_an_example(name, zoneout) -> None:
    """The examples are missing, or run into one line."""
    code, out, _ = zoneout(name, "--help")
    assert code == OK
    assert f"\n\nExamples:\n$ zoneout {name}" in out
    assert not re.search(r"default: (None|False|\))|\{None\}", out), "a default that says nothing"
    types = re.findall(r"\b(?:INT|FLOAT|STR|PATH)\b", out)
    assert types == [], "the values of options have other names than in other commands"


def test_version(zoneout) -> None:
    """A report of a bug cannot say of which version."""
    import zoneout as package

    assert zoneout("--version") == (OK, f"zoneout {package.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["trian"], WRONG_USE, "there is no command 'trian'; did you mean train"),
        (["xyzzy"], WRONG_USE, "the commands are demo, train"),
        (["reproduce", "char_ptb_zoneot"], WRONG_USE, "the nearest are char_ptb_zoneout"),
        (["train", "--zoneout.cel", "0.5"], WRONG_USE, "--zoneout.cell"),
        (["train", "--hidden", "10"], WRONG_USE, "--model.hidden"),
        (["train", "--model.cell", "lstn"], WRONG_USE, "lstm"),
        (["train", "--epochs", "many"], WRONG_USE, "many"),
        (
            ["train", "--zoneout.cell", "1.5"],
            WRONG_USE,
            "zoneout.cell: expected a rate between 0 and 1, got 1.5",
        ),
        (["train", "--data", "char-bpt"], BAD_DATA, "did you mean char-ptb"),
        (["train", "--data", "no-such.txt"], BAD_DATA, "no-such.txt: there is no such file"),
        (["train", "--data", "shakespeare"], BAD_DATA, "zoneout data fetch shakespeare"),
        (
            ["train", "--data", "my.txt", "--data.name", "python2"],
            WRONG_USE,
            "--data: my.txt is not what --data.name",
        ),
        (
            ["train", "--data", "."],
            WRONG_USE,
            "--data: . is a folder; say which corpus of it is meant",
        ),
        (["sweep", "--data", "."], WRONG_USE, "as in --data.name char-ptb (python is built in"),
        (
            ["train", "--data", "my.txt", "--batches.length", "99999"],
            WRONG_USE,
            "does not fit into a text",
        ),
        (
            ["train", "--data", "my.txt", "--device", "gpu"],
            WRONG_USE,
            "device: expected auto, cpu, cuda",
        ),
        (
            ["train", "my.txt"],
            WRONG_USE,
            "expected options only, got 'my.txt'; did you mean --data my.txt?",
        ),
        (["train", "--epochs", "3", "my.txt"], WRONG_USE, "did you mean --data my.txt?"),
        (
            ["train", "char_ptb_zoneout"],
            WRONG_USE,
            "did you mean zoneout reproduce char_ptb_zoneout?",
        ),
        (["sweep", __file__], WRONG_USE, f"did you mean --data {__file__}?"),
        (["sweep", "--data", "no-such.txt"], BAD_DATA, "no-such.txt: there is no such file"),
        (["sweep", "char_ptb_zoneout", "--data", "."], BAD_DATA, "ptb/ptb.train.txt was not found"),
        (["reproduce", "char-ptb", "--seeds", "0"], WRONG_USE, "seeds: expected 1 or more"),
        (
            ["reproduce", "char-ptb", "--minutes", "-1"],
            WRONG_USE,
            "minutes: expected 0 or more, got -1",
        ),
        (
            ["reproduce", "char-ptb", "--set", "epoch=1"],
            WRONG_USE,
            "epoch: there is no such field; the nearest",
        ),
        (
            ["report", "--results", "nowhere"],
            WRONG_USE,
            "--results: there is no folder nowhere with records",
        ),
        (["figures"], WRONG_USE, "--results: there is no folder results with records"),
        (["train", "--resume"], WRONG_USE, "--resume: say which run"),
        (["train", "--resume", "--out", "nowhere"], WRONG_USE, "there is no folder nowhere"),
        (["eval"], WRONG_USE, "RUN"),
        (["eval", "nowhere"], WRONG_USE, "there is no folder nowhere"),
        (["sample", "nowhere"], WRONG_USE, "there is no folder nowhere"),
        (["show", "nowhere"], WRONG_USE, "there is no folder nowhere"),
        (["show"], WRONG_USE, "folder of a run"),
        (["data"], WRONG_USE, "list"),
        (["data", "lst"], WRONG_USE, "list"),
        (["data", "fetch"], WRONG_USE, "expected the name of a corpus"),
        (["data", "fetch", "char-pbt"], WRONG_USE, "did you mean char-ptb"),
        (
            ["train", "--data", "my.txt", "--schedule.by", "2"],
            WRONG_USE,
            "--schedule.by: it would do nothing here",
        ),
        (
            ["train", "--data", "char-ptb", "--data.by", "word"],
            WRONG_USE,
            "this corpus is cut in one way only",
        ),
        (
            ["train", "--data", "mnist", "--loss", "sum"],
            WRONG_USE,
            "images are not cut as a text is",
        ),
        (
            ["train", "--data", "my.txt", "--model.forget-bias", "nan"],
            WRONG_USE,
            "train: --model.forget-bias: expected a",
        ),
        (
            ["sweep", "--data", "my.txt", "--grid", "optimizer.decay=0.5,0.9"],
            WRONG_USE,
            "(only rmsprop has it)",
        ),
        (
            ["sweep", "--data", "my.txt", "--grid", "data.by=char,word"],
            WRONG_USE,
            "bits and perplexity would stand in",
        ),
        (
            ["sweep", "--data", "my.txt", "--cpus", "4"],
            WRONG_USE,
            "--cpus: plain processes have no such thing",
        ),
        (["sweep", "--data", "my.txt", "--trials", "3"], WRONG_USE, "--trials: without --search"),
        (["reproduce", "--seeds", "3"], WRONG_USE, "--seeds: without a TASK nothing is run"),
        (
            ["reproduce", "char_ptb_gru", "--set", "schedule.by=2"],
            WRONG_USE,
            "--schedule.by: it would do nothing",
        ),
        (["demo", "--characters", "10"], WRONG_USE, "--characters: expected at least 2,000"),
        (["demo", "--updates", "0"], WRONG_USE, "--updates: expected a number above 0"),
        (["demo", "--characters", "99999999"], WRONG_USE, "--characters: expected at most"),
        (["train", "--zoneout.cell", "2"], WRONG_USE, "zoneout train: --zoneout.cell: expected a"),
        (
            ["train", "--evaluation.valid.length", "1"],
            WRONG_USE,
            "train: --evaluation.valid.length: expected at least 2 for chunks, got 1",
        ),
        (
            ["sweep", "--grid", "zoneout.cell=2"],
            WRONG_USE,
            "sweep: --grid zoneout.cell: expected a rate",
        ),
        (
            ["reproduce", "char-ptb", "--set", "zoneout.cell=2"],
            WRONG_USE,
            "reproduce: --set zoneout.cell: expected a rate",
        ),
        (
            ["train", "--model.cell", "gru", "--zoneout.cell", "0.5"],
            WRONG_USE,
            "train: --zoneout.cell: does not apply, a GRU has no cell; leave it out\n",
        ),
        (
            ["train", "--zoneout.cell", "0.5", "--zoneout.hidden", "1", "--state-dropout.cell=0.1"],
            WRONG_USE,
            "train: --zoneout.cell, --state-dropout.cell: both replace the cell state, expected",
        ),
        (
            ["train", "--model.cell", "hm-lstm", "--model.layers", "2", "--swapout.depth-old=0.1"],
            WRONG_USE,
            "train: --swapout.depth-old: expected no such noise with hm-lstm",
        ),
        (
            ["train", "--model.cell", "surprisal-lstm"],
            WRONG_USE,
            "train: --model.embedding: expected 0 with surprisal-lstm",
        ),
        (
            ["sweep", "--grid", "model.cell=lstm,gru", "--zoneout.cell", "0.5"],
            WRONG_USE,
            "cannot be: zoneout.cell: does not apply, a GRU has no cell; leave it out. Nothing",
        ),
        (
            ["train", "--zoneout.depth", "0.5"],
            WRONG_USE,
            "train: --zoneout.depth: it would do nothing here (it is for layers after the first",
        ),
        (
            ["train", "--zoneout.cell", "abc"],
            WRONG_USE,
            "zoneout train: --zoneout.cell: expected a number, or several, got 'abc'\n",
        ),
        (
            ["train", "--optimizer.betas", "0.9"],
            WRONG_USE,
            "zoneout train: --optimizer.betas: expected 2 numbers, got '0.9'\n",
        ),
        (
            ["eval", "--part", "tests", "run"],
            WRONG_USE,
            "zoneout eval: --part: expected one of train, valid, test, got 'tests'\n",
        ),
        (
            ["reproduce", "char-ptb", "--seeds"],
            WRONG_USE,
            "zoneout reproduce: --seeds: expected a whole number, got nothing\n",
        ),
    ],
)
def test_wrong_use_gets_a_sentence_and_a_code(
    arguments, code, says, zoneout, monkeypatch, tmp_path
) -> None:
    """A mistake ends in a traceback, in a code that scripts cannot tell apart, or leaves a
    folder behind.
    """
    monkeypatch.setattr(datasets, "places", lambda folder=None: [tmp_path / "nothing"])
    found, out, err = zoneout(*arguments)
    assert found == code, err
    assert says in err
    assert not out
    assert {path.name for path in Path.cwd().iterdir()} <= {"my.txt", "nothing"}


RATES = [
    name
    for name in configs.names()
    if name.partition(".")[0] in {key.partition(".")[0] for key in configs.NOISES}
    and name.rpartition(".")[2] not in ("mask", "tied", "periods", "output", "words")
]


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_every_noise_that_does_not_apply_is_named_as_an_option(cell) -> None:
    """A message names a class of the library, such as Swapout, where the user typed an option."""
    refused = []
    for name, norm in itertools.product(RATES, ("none", "layer")):
        values = {"model.cell": cell, "model.norm": norm, "model.layers": 3, name: 0.5}
        if name.endswith("hold_output_gate"):
            values |= {name: True, "recurrent_dropout.rate": 0.5}
        config = configs.change(Config(), values)
        try:
            models.check(config)
        except ValueError as error:
            option = "--" + name.replace("_", "-")
            said = main.in_options("train", error)
            assert said.startswith((f"{option}: ", "--recurrent-dropout.rate: ")), said
            assert not re.search(r"noise|[A-Z]\w+\(|_", said.partition(": ")[2]), said
            refused.append(name)
    assert len(refused) >= {"lstm": 2, "gru": 6, "rnn": 8}[cell], refused


def test_noises_that_exclude_each_other_are_named_as_options() -> None:
    """Of two methods for one state, a message does not say with which options they were set."""
    refused = 0
    for one, other in itertools.combinations([name for name in RATES if "hold" not in name], 2):
        config = configs.change(Config(), {"model.layers": 2, one: 0.5, other: 0.5})
        try:
            models.check(config)
        except ValueError as error:
            refused += 1
            said = main.in_options("train", error)
            start = said.partition(": both replace the ")[0].replace("-", "_")
            assert set(start.split(", ")) == {f"__{one}", f"__{other}"}, said
    assert refused >= 8


def test_a_missing_package_is_named(tmp_path) -> None:
    """Somebody who installed the layers alone gets a traceback from the command."""
    hide = (
        "import sys; sys.modules['tyro'] = None; from zoneout.__main__ import main; "
        "sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 1
    assert "try pip install 'zoneout[tool]' (in a clone: '.[tool]')" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["help"], 0), ([], 2)])
def test_help_does_not_wait_for_torch(arguments: list[str], code: int) -> None:
    """`zoneout --help` takes seconds."""
    installed = "import sys, zoneout_command; sys.argv[0] = 'zoneout'; zoneout_command.main()"
    for how in (["-c", installed], ["-m", "zoneout"]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *how, *arguments],
            capture_output=True,
            text=True,
            env=environment(),
        )
        assert done.returncode == code, done.stderr
        assert done.stdout == main.overview() + "\n"
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "zoneout_command" in imported
        assert not imported & {"torch", "numpy", "tyro", "zoneout.layers"}


def test_options_do_not_wait_for_their_help_texts() -> None:
    """Before a run starts, its modules are parsed again for every class that has options."""
    counted = (
        "import ast, sys; from zoneout.paper.cli import main; parse, seen = ast.parse, []; "
        "ast.parse = lambda *a, **b: (seen.append(1), parse(*a, **b))[1]; "
        "main.parse('train', ['--epochs', '3']); print(len(seen))"
    )
    done = subprocess.run(
        [sys.executable, "-c", counted], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 3  # the commands, the config


def test_the_command_runs_the_others(capfd, monkeypatch) -> None:
    """The installed command shows its help and does nothing else."""
    monkeypatch.setattr(sys, "argv", ["zoneout", "--version"])
    assert zoneout_command.main() == OK
    assert capfd.readouterr().out == f"zoneout {package.__version__}\n"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Reproduce, ""),
        (Reproduce, "pmnist all zoneout --seeds 3 --precision bf16 --minutes 0.5 --out x --write"),
        (Reproduce, "a --set epochs=1 --set data.name=x"),
        (Gradients, "a b --batches 3 --weights last --json --unpacked 5"),
        (Bench, "gpu headline --type bf16 --type fp32 --at-once 2 --dry-run"),
    ],
)
def test_a_command_without_tyro_is_the_same(kind, words, capsys) -> None:
    """On a machine without tyro an option is missing, or it means something else."""
    assert options.plain(kind, "z", words.split()) == options.read(kind, "z", words.split())
    shown = []
    for parse in (options.plain, options.read):
        with pytest.raises(SystemExit):
            parse(kind, "z", ["--help"])
        shown.append(set(re.findall(r"--[a-z][a-z-]*|\w{5,}", capsys.readouterr().out)))
    ours, theirs = (words - {"show", "message", "program"} for words in shown)
    assert len(ours) > 50 and theirs - ours <= {"OPTIONS", "False", "repeatable"}, theirs - ours


def test_bench_runs_that_of_the_clone(zoneout, monkeypatch, tmp_path) -> None:
    """`zoneout bench` starts something else, or swallows its options."""
    monkeypatch.setattr(
        bench.zoneout, "__file__", str(tmp_path / "src" / "zoneout" / "__init__.py")
    )
    code, _, err = zoneout("bench")
    assert code == FAILED and "make bench" in err
    Path("benchmarks").mkdir()
    Path("benchmarks/bench.py").write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    Path("benchmarks/gpu.py").write_text("import sys; print('gpu', sys.argv[1:]); sys.exit(5)")
    assert zoneout("bench", "gpu", "headline")[:2] == (5, "gpu ['headline']\n")
    code, out, _ = zoneout("bench", "train", "--dry-run", "--pairs", "3")
    assert code == 7 and out == "['train', '--pairs', '3', '--dry-run']\n"
    out = zoneout("bench", "gpu", "--type", "bf16", "--type", "fp32", "--pairs", "2")[1]
    assert out == "gpu ['--pairs', '2', '--type', 'bf16', '--type', 'fp32']\n"
    code, _, err = zoneout("bench", "gpu", "--at-once", "2")
    assert code == WRONG_USE and "--at-once: only `zoneout bench step` can use it" in err


# --- as a process ---------------------------------------------------------------------------------


def test_a_process_of_its_own(trained) -> None:
    """What holds inside Python does not hold in a shell."""
    done = process("train", "--data", "my.txt", "--out", "run", "--updates", "10", *SMALL)
    assert done.returncode == OK, done.stderr
    assert "\x1b" not in done.stdout + done.stderr  # nothing live where there is no terminal
    done = process("traine")
    assert done.returncode == WRONG_USE and "did you mean train" in done.stderr


def test_a_reader_that_has_enough(trained) -> None:
    """`zoneout sample … | head` ends in a traceback."""
    command = [sys.executable, "-m", "zoneout", "sample", str(trained), "--length", "3000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as writer:
        assert writer.stdout is not None and writer.stderr is not None
        writer.stdout.read(10)
        writer.stdout.close()
        assert writer.wait(timeout=60) == OK
        assert not writer.stderr.read()


def test_progress_that_nobody_reads_any_more(trained) -> None:
    """`zoneout train … |& head -1` ends the training, and with the code of one that is done."""
    arguments = ["train", "--data", "my.txt", "--out", "run", "--updates", "60", *SMALL]
    command = [sys.executable, "-m", "zoneout", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()
    ) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.stdout.close()
        assert running.wait(timeout=60) == OK
    assert runs.read_summary("run")["update"] == 60
    whole = process("train", "--data", "my.txt", "--out", "whole", "--updates", "60", *SMALL)
    assert (
        whole.returncode == OK
        and Path("run/metrics.jsonl").read_bytes() == Path("whole/metrics.jsonl").read_bytes()
    )


def test_progress_that_cannot_be_written(tmp_path) -> None:
    """`zoneout train … 2>log` ends without a word, and without a checkpoint, when the disk of
    its log is full.
    """
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here to write to")
    arguments = ["train", "--data", "my.txt", "--out", "run", "--updates", "20", *SMALL]
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "zoneout", *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, env=environment())
    assert done.returncode == OK and b"Finished after 20 updates" in done.stdout
    assert runs.read_summary("run")["update"] == 20


def test_a_terminal_that_goes_away(tmp_path) -> None:
    """A run that was kept from the hangup of its terminal (nohup, disown) ends at its next sign
    of life there.
    """
    arguments = ["train", "--data", "my.txt", "--out", "run", "--updates", "60", *SMALL]
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "zoneout", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, env=environment()
    ) as running:
        os.close(theirs)
        assert b"\x1b" in os.read(ours, 1000), "it is not the live display"
        os.close(ours)
        assert b"Finished after 60 updates" in running.communicate(timeout=60)[0]
    assert running.returncode == OK and runs.read_summary("run")["update"] == 60


def test_a_stream_of_somebodys_own_that_fails() -> None:
    """In a notebook, whose streams have no number of the system's, progress that cannot be
    written ends the run.
    """

    class Failing(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    stream = console.Forgiving(Failing())
    assert stream.write("words") == 5
    stream.flush()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_a_terminal_does_not_have(encoding, tmp_path) -> None:
    """The help breaks off at the first β, with a code that says wrong use."""
    command = [sys.executable, "-m", "zoneout", "train", "--help"]
    done = subprocess.run(
        command, capture_output=True, env=environment() | {"PYTHONIOENCODING": encoding}
    )
    assert done.returncode == OK, done.stderr
    assert b"--norm-stabilizer" in done.stdout and b"--save-every" in done.stdout


def test_streams_that_are_closed(tmp_path) -> None:
    """`zoneout train … 2>&-`, as some services start it, ends without a word."""
    words = " ".join(["train", "--data", "my.txt", "--out", "run", "--updates", "10", *SMALL])
    assert (
        subprocess.run(
            f"{sys.executable} -m zoneout {words} 2>&-", shell=True, env=environment()
        ).returncode
        == OK
    )
    lost = f"{sys.executable} -m zoneout show {tmp_path / 'nothing'} 2>&-"
    ended = subprocess.run(lost, shell=True, env=environment(), capture_output=True, text=True)
    assert ended.returncode != OK and ended.stdout == "", "an error went to standard output"
    assert runs.read_summary("run")["update"] == 10
    command = f"{sys.executable} -m zoneout reproduce char_ptb_gru --minutes 0 >&-"
    assert subprocess.run(command, shell=True, env=environment()).returncode == INTERRUPTED


def test_a_program_that_calls_it_has_its_streams_back(monkeypatch) -> None:
    """After a command, what the rest of a program writes is spelled otherwise, or goes past its
    own stream.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert main.main(["--version"]) == OK
    assert (sys.stdout, sys.stderr) == (out, err) and out.errors == err.errors == "strict"
