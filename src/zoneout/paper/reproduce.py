"""`python -m zoneout.paper.reproduce`: the command `zoneout reproduce` without the packages of the
extra `tool`.

    python -m zoneout.paper.reproduce char-ptb zoneout unregularised --seeds 3 --precision bf16
"""

from __future__ import annotations

import sys

from . import console, disk
from .cli.reproduce import main
from .data.datasets import DataError
from .disk import RunError
from .training.exit_codes import code_of

if __name__ == "__main__":
    try:
        with console.ready():
            sys.exit(main(prog="python -m zoneout.paper.reproduce"))
    except (RunError, OSError, ValueError, DataError) as error:
        console.say(f"reproduce: {disk.in_words(error)}")
        sys.exit(code_of(error))
