"""`python -m zoneout.paper.gradients`: the command `zoneout gradients` (see `cli.alone`)."""

import sys

from .cli.alone import run
from .cli.gradients import Gradients

if __name__ == "__main__":
    sys.exit(run(Gradients))
