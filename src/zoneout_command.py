"""The installed command `zoneout`: `--help` answers before torch is imported, which takes a second.

This module is outside the package, since importing anything of the package imports torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def main() -> int:
    """Run the command line and return its exit code."""
    if sys.argv[1:] not in ([], ["-h"], ["--help"], ["help"]):
        from zoneout.__main__ import main as run

        return run()
    spec = importlib.util.find_spec("zoneout")  # finds the package, and does not import it
    assert spec is not None and spec.origin is not None
    overview = Path(spec.origin).parent / "paper" / "cli" / "overview.txt"
    try:
        print(overview.read_text(encoding="ascii"), end="", flush=True)
    except BrokenPipeError:  # the reader of the output (such as `head`) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if sys.argv[1:] else 2
