"""`python -m zoneout.paper.reproduce`: the command `zoneout reproduce` (see `cli.alone`)."""

import sys

from .cli.alone import run
from .cli.reproduce import Reproduce

if __name__ == "__main__":
    sys.exit(run(Reproduce))
