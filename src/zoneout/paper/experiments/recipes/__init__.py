"""The paper's experiments: a function for every row of its tables and every arm of its figures.

Each function returns the frozen config of a run. It is registered with its task and with the
paper's numbers, which are written there and nowhere else. A module holds the rows of one corpus.

The settings that all rows of a task share are defined once, before the rows. The docstring of a
row says what is special about it, and what it follows where the paper, its authors' code and its
sources disagree.

>>> RECIPES["char_ptb_zoneout"].test, char_ptb.char_ptb_zoneout().zoneout
(1.252, Zoneout(cell=0.5, hidden=0.05, mask='unit'))
"""

from . import char_ptb, word_ptb, text8, pmnist, quick  # isort: skip  # the order of the tables
from .registry import MEASURES, QUOTED, RECIPES, Recipe, recipe, select

__all__ = [
    "MEASURES", "QUOTED", "RECIPES", "Recipe", "char_ptb", "pmnist", "quick", "recipe",
    "select", "text8", "word_ptb",
]  # fmt: skip
