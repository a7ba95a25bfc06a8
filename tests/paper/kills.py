"""Train a run that is killed again and again; a script that `test_train.py` starts.

    python kills.py CONFIG.json FOLDER SEED KILLS

A process is forked for every try, so that torch is imported once. Each try is killed with SIGKILL,
either from outside after some random number of updates, wherever it then is, or by itself at a
random one of its writes: before a file is brought to the disk, before and after it is renamed. The
last try may finish.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from zoneout.paper.training.config import from_json
from zoneout.paper.training.train import train


def attempt(config: dict[str, Any], folder: Path, pipe: int, write: int) -> None:
    """One try, killed at its `write`-th write; a byte goes into the pipe for every update."""
    torch.set_num_threads(1)
    count = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            for moment in ("before", "after"):
                count += 1
                if count == write:
                    os.kill(os.getpid(), signal.SIGKILL)
                if moment == "before":
                    result = function(*args, **kwargs)
            return result

        return call

    os.fsync, os.replace, os.rename = counted(os.fsync), counted(os.replace), counted(os.rename)
    summary = train(
        from_json(config),
        folder,
        resume=(folder / "config.json").exists(),
        progress=lambda event: os.write(pipe, b".") if event["kind"] == "step" else None,
    )
    print(summary.status, flush=True)


def main() -> None:
    config, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    chance, kills = random.Random(int(sys.argv[3])), int(sys.argv[4])
    for number in range(kills + 1):
        from_outside, last = chance.random() < 0.4, number == kills
        updates = chance.randint(1, 25) if from_outside and not last else 0
        write = chance.randint(1, 60) if not from_outside and not last else 0
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            attempt(config, folder, writing, write)
            os._exit(0)
        os.close(writing)
        seen = 0
        while os.read(reading, 1):
            seen += 1
            if seen == updates:
                os.kill(child, signal.SIGKILL)
        os.close(reading)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        print(f"try {number}: {seen} updates, exit {code}", flush=True)
        if code not in (0, -signal.SIGKILL):
            sys.exit(1)


if __name__ == "__main__":
    main()
