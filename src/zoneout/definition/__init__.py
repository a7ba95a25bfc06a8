"""A cell is a definition: its equation, written once as a plain function. Everything else is
derived.

`cell` is the decorator, `Definition` what it returns.
"""

from .decorator import cell
from .definition import Definition, read
from .rules import MOST_STATES
from .trace import DefinitionError, candidate, held, product, shown, update

__all__ = [
    "MOST_STATES",
    "Definition",
    "DefinitionError",
    "candidate",
    "cell",
    "held",
    "product",
    "read",
    "shown",
    "update",
]
