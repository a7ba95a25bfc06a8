"""The command `bench`: run a benchmark script of the clone that contains this package."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import zoneout

from ..disk import RunError


def main(args: Sequence[str]) -> int:
    """Compare the speed of the layers with torch.nn (needs a clone of the repository).

    $ zoneout bench                  # on the CPU
    $ zoneout bench gpu              # on the NVIDIA GPU, compared with cuDNN
    $ zoneout bench step             # a whole training step compared with its layers alone
    $ zoneout bench gpu --help
    """
    which, args = (args[0], args[1:]) if args and args[0] in ("gpu", "step") else ("bench", args)
    script = Path(zoneout.__file__).parents[2] / "benchmarks" / f"{which}.py"
    if not script.is_file():
        raise RunError(
            "the installed package does not contain the benchmarks; run `make bench` in a clone of "
            "the repository"
        )
    return subprocess.call([sys.executable, str(script), *args])
