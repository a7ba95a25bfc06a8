"""What the tests of the command line share: a folder with a text, a run that is finished, and
how to run a command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zoneout as package

SRC = Path(package.__file__).parents[1]
TEXT = "".join(
    f"{n} green bottles, hanging on the wall; and if {n % 7} should fall,\n" for n in range(300)
)
SMALL = [
    "--model.hidden",
    "16",
    "--batches.length",
    "20",
    "--batches.size",
    "8",
    "--log-every",
    "10",
]
SMALL += ["--evaluation.every", "10", "--save-every", "10", "--device", "cpu"]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of one's own to work in, with a text in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZONEOUT_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "200")  # so that no sentence is broken
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    Path("my.txt").write_text(TEXT, encoding="utf-8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is finished."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "my.txt").write_text(TEXT, encoding="utf-8")
    arguments = [
        "train",
        "--data",
        str(folder / "my.txt"),
        "--out",
        str(folder / "run"),
        "--updates",
        "30",
        *SMALL,
    ]
    assert run_here(*arguments, "--zoneout.cell", "0.5", "--optimizer.lr", "0.01") == 0
    return folder / "run"


@pytest.fixture
def zoneout(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command: its exit code, its output and what it said on standard error."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run_here(*arguments)
        out, err = capfd.readouterr()
        assert "Traceback" not in err, err
        return code, out, err

    return run


def run_here(*arguments: str | Path) -> int:
    """A command in this process; what it needs may not be there where other tests run."""
    from zoneout.paper.cli.main import main

    return main([str(argument) for argument in arguments])


def process(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "zoneout", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", env=environment(), **options
    )


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))
    return os.environ | {
        "PYTHONPATH": path,
        "PYTHONIOENCODING": "utf-8",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
