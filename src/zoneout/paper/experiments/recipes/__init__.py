"""The paper's experiments: a function for every row of its tables and every arm of its figures.

Each function returns the frozen config of a run. It is registered with its task and with the
paper's numbers, which are written there and nowhere else. A module holds the rows of one corpus.

The settings that all rows of a task share are defined once, before the rows. The docstring of a
row says what is special about it, and what it follows where the paper, its authors' code and its
sources disagree.

>>> RECIPES["char_ptb_zoneout"].test, char_ptb.char_ptb_zoneout().zoneout.cell
(1.252, 0.5)
"""

from . import char_ptb, systems, word_ptb, text8, pmnist, awd, quick  # isort: skip  # the order of the tables
from .registry import MEASURES, QUOTED, RECIPES, Recipe, recipe, select

__all__ = [
    "MEASURES", "QUOTED", "RECIPES", "Recipe", "awd", "char_ptb", "pmnist", "quick", "recipe",
    "select", "systems", "text8", "word_ptb",
]  # fmt: skip
