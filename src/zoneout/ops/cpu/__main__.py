"""Write `cells.h`, the C functions of the built-in cells, from their definitions.

Run it as `python -m zoneout.ops.cpu`.
"""

from ...cells import CELLS
from ...definition.c import print_cells
from .native import HERE

if __name__ == "__main__":
    (HERE / "cells.h").write_text(print_cells(CELLS), encoding="utf-8")
