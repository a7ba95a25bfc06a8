"""The command `zoneout`: `--help` answers before torch is imported, which takes a second.

This module is outside the package, since importing anything of the package imports torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

HELP: tuple[list[str], ...] = ([], ["-h"], ["--help"], ["help"])  # these ask for the overview


def main() -> int:
    """Run the command line and return its exit code."""
    answer_help()
    from zoneout.__main__ import main as run

    return run()


def answer_help() -> None:
    """Print the overview and end the process, if the arguments ask for it."""
    if sys.argv[1:] in HELP:
        sys.exit(overview())


def overview() -> int:
    """Print the overview of the commands and return the exit code."""
    spec = importlib.util.find_spec("zoneout")  # finds the package, and does not import it
    assert spec is not None and spec.origin is not None
    overview = Path(spec.origin).parent / "paper" / "cli" / "overview.txt"
    try:
        print(overview.read_text(encoding="ascii"), end="", flush=True)
    except BrokenPipeError:  # the reader of the output (such as `head`) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if sys.argv[1:] else 2
