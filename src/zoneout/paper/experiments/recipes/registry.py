"""The registry of recipes: what is known of a row, and how rows are selected by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ...training import config as configs
from ...training.config import Config

MEASURES = {  # the measure of each task; lower is better
    "char-ptb": "bits",
    "word-ptb": "perplexity",
    "text8": "bits",
    "text8-prefix": "bits",
    "pmnist": "error",
    "pmnist-permuted": "error",
    "gradient-flow": "error",
    "quick": "bits",
}

PRECISIONS = {  # of the products in training, where a task's rows are run on a GPU
    "char-ptb": "bf16",
    "word-ptb": "bf16",
    "text8": "bf16",
    "text8-prefix": "bf16",
    "pmnist": "tf32",
    "pmnist-permuted": "tf32",
    "gradient-flow": "tf32",
    "quick": "fp32",
}
THREE = (1, 2, 3)  # the seeds of the rows of Tables 1 and 2, fixed before they were run


@dataclass(frozen=True)
class Recipe:
    """A row of a table or an arm of a figure."""

    name: str
    task: str
    row: str  # the title of the row
    make: Callable[[], Config]
    valid: float | None  # the paper's numbers, in the task's measure
    test: float | None
    where: str  # the place in the paper, or another origin ("ours", "search", …)
    held: bool  # whether our result has to reach the paper's numbers, or is only shown with them
    seeds: tuple[int, ...] = (1,)  # the seeds to run
    spare: tuple[int, ...] = ()  # seeds to run if there is time
    not_run: str = ""  # why no seed is to be run; "" if one is
    differs: str = ""  # why the row may be a better one than the paper's
    precision: str = ""  # of the products, where the row is about it; "" leaves it open
    against: str = ""  # the recipe that the row is compared with in a sentence
    samples: int = 0  # passes with dropout whose probabilities are averaged, for one more score
    grid: str = ""  # the command that chooses settings of the row, which comes first
    left_out: str = ""  # a seed that was run and does not count, and why

    @property
    def measure(self) -> str:
        return MEASURES[self.task]

    @property
    def gpu_precision(self) -> str:
        """The precision of the products in which the row is run on a GPU."""
        norm = self.make().model.norm
        return self.precision or ("tf32" if norm == "batch" else PRECISIONS[self.task])

    @property
    def short(self) -> str:
        """The name without the prefix of the task."""
        return self.name.removeprefix(self.task.replace("-", "_") + "_")

    @property
    def group(self) -> Literal["table", "ours", "systems", "past", "more"]:
        """The kind of row: in the paper's two tables, ours, another system that the paper names,
        a model that came after the paper, or in the paper's figures and text.
        """
        if self.where.startswith("Table"):
            return "table"
        return self.where if self.where in ("ours", "systems", "past") else "more"  # type: ignore[return-value]


RECIPES: dict[str, Recipe] = {}


@dataclass(frozen=True)
class Quoted:
    """A number of other authors that the paper quotes, in its tables or its text."""

    task: str
    row: str
    valid: float | None
    test: float | None
    recipe: str = ""  # the recipe that trains this model
    why: str = ""  # why there is none


QUOTED = (
    Quoted("char-ptb", "HyperLSTM + layer norm", 1.281, 1.250, "char_ptb_hyper_lstm"),
    Quoted("char-ptb", "3-layer HM-LSTM + layer norm", None, 1.24, "char_ptb_hm_lstm"),
    Quoted(
        "char-ptb", "2-layer HyperLSTM + layer norm", 1.245, 1.219,
        why="not run: it takes about twice the minutes of char_ptb_hyper_lstm",
    ),
    Quoted(
        "text8", "3-layer HM-LSTM + layer norm", None, 1.29,
        why="not run: with as many epochs it takes 18 times the minutes of char_ptb_hm_lstm",
    ),
)  # fmt: skip


def recipe(
    task: str,
    row: str,
    *,
    valid: float | None = None,
    test: float | None = None,
    where: str = "Table 1",
    held: bool = True,
    beside: str = "",
    seeds: tuple[int, ...] = (1,),
    spare: tuple[int, ...] = (),
    not_run: str = "",
    differs: str = "",
    precision: str = "",
    against: str = "",
    samples: int = 0,
    grid: str = "",
    left_out: str = "",
) -> Callable[[Callable[[], Config]], Callable[[], Config]]:
    """Return a decorator that registers a function as a recipe, under the function's name.

    `beside` names an earlier recipe. The new recipe is shown with that recipe's numbers of the
    paper, but is not held to them. `against` names the recipe to compare it with. The arguments
    after `beside` are fields of the recipe; with `not_run`, there are no seeds.
    """
    if beside:
        valid, test, held = RECIPES[beside].valid, RECIPES[beside].test, False

    def register(make: Callable[[], Config]) -> Callable[[], Config]:
        name = make.__name__
        RECIPES[name] = Recipe(
            name, task, row, make, valid, test, where, held,
            () if not_run else seeds, spare, not_run, differs, precision, against,
            samples, grid, left_out,
        )  # fmt: skip
        return make

    return register


def select(task: str, rows: Sequence[str] = ()) -> list[Recipe]:
    """Return the selected recipes: recipes by name, or rows of a task.

    Rows are named with or without the prefix of the task. Without `rows`, the result is the rows
    of the paper's tables, or all rows of a task that is in no table. "all" adds the figures, the
    text and our own rows. If `task` is a recipe, `rows` may name more recipes, of any task.

    >>> [r.name for r in select("pmnist", ["zoneout", "pmnist_batch_norm"])]
    ['pmnist_zoneout', 'pmnist_batch_norm']
    >>> [r.name for r in select("gradient-flow")]
    ['gradient_flow_unregularised', 'gradient_flow_zoneout', 'gradient_flow_dropout']
    >>> [r.name for r in select("char_ptb_gru", ["char_ptb_rnn", "word_ptb_zoneout"])]
    ['char_ptb_gru', 'char_ptb_rnn', 'word_ptb_zoneout']
    """
    if task in RECIPES:
        recipes = [row for row in rows if row in RECIPES]
        of_same_task = [row for row in rows if row not in RECIPES]
        first = select(RECIPES[task].task, [task, *of_same_task])
        return list(dict.fromkeys([*first, *(RECIPES[row] for row in recipes)]))
    if task not in MEASURES:
        near = configs.nearest(task, [*MEASURES, *RECIPES])
        raise ValueError(
            f"task: expected one of {', '.join(MEASURES)}, or the name of a recipe, got "
            f"{task!r}{near}"
        )
    of_task = {r.name: r for r in RECIPES.values() if r.task == task}
    if not rows:
        return [r for r in of_task.values() if r.group == "table"] or list(of_task.values())
    short = {r.short: r for r in of_task.values()}
    selected: dict[str, Recipe] = {}
    for row in rows:
        if row == "all":
            selected |= of_task
        elif one := of_task.get(row) or short.get(row.replace("-", "_")):
            selected[one.name] = one
        else:
            raise ValueError(
                f"row: there is no {row!r} of {task}; expected all, or some of {', '.join(short)}"
            )
    return list(selected.values())
