"""The rules that turn records into a finding about a claim: a verdict, and the evidence in words.

There are two kinds of rules.

* Scores are compared by t: the difference of two means over seeds, divided by its standard
  error, sd · √(1/n + 1/m). sd is the standard deviation over seeds, pooled over the rows of the
  task, so that a row with one seed can be compared too. t has to be clear in validation and in the
  test: were one of them enough, every claim would have two chances.
* Other quantities (epochs, steps, training losses) have no pooled deviation. There every run of
  one row must be on the same side of every run of the other, with two seeds of each at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean
from typing import Literal, TypeAlias

from ..training.measures import AT_MOST, DIFFERS, SPREADS, reached, rounded, spread
from ..training.measures import Verdict as Reached
from . import gradient_flow
from .recipes import MEASURES, RECIPES
from .recipes.char_ptb import RATES_EPOCHS
from .results import GRADIENTS, PARTS, Record, as_z, best_within, fitting, scatter_of, z_of

Verdict: TypeAlias = Literal["holds", "does not hold here", "cannot tell"]
VERDICTS: tuple[Verdict, ...] = ("holds", "does not hold here", "cannot tell")
TASKS = ("char-ptb", "word-ptb", "text8-prefix", "pmnist")  # whose scores are compared
NEAREST = 2  # rivals that are named in the evidence
SEVERAL = 2  # seeds of each row that is compared run by run
CLEAR = 2.0  # |t| from which two rows differ
JUMP = 0.2  # bits; more than any run of characters had when this was fixed (0.19)
LIKE = {"text8-prefix": "char-ptb"}  # whose scatter a task takes while it has none of its own
RULES = (  # fixed before the runs that they judge, and the same for all claims
    f"**Better.** A claim that one row is better than another holds if t ≥ {CLEAR:g} in "
    f"validation and in the test. It does not hold here if t ≤ −{CLEAR:g} in both. Otherwise these "
    "runs cannot tell. Where only one of the two scores can be compared, it decides.",
    "**t** is the difference of the means over seeds, divided by sd · √(1/n + 1/m). sd is the "
    "standard deviation over seeds, pooled over the rows of the task that have several (below). A "
    "row with one seed is taken to scatter as they do. A task without such rows takes the sd of "
    "another task with the same score: text8 that of characters of Penn Treebank, in bits.",
    "**Several rows.** A claim about several rows holds if it holds for each, and does not hold if "
    "it fails for one.",
    "**Epochs.** A row counts at its best validation. The evidence has the epochs of training "
    f"where they differ. Rates are compared within the {RATES_EPOCHS} epochs that all of them "
    "have, in validation: records have no test score of an earlier epoch.",
    f"**Numbers.** A number of the paper is reached if {DIFFERS:g} < z ≤ {AT_MOST}, as in the "
    "tables of results. So is a difference of two: there z has sd · √(1/n + 1/m + 2), because the "
    "paper's counts as one more run of each row.".replace("-", "−"),
    "**Order.** Rows stand in the paper's order if each is better than each that follows. Pairs do "
    f"not count whose numbers in the paper, as one run each, are less than t = {CLEAR:g} apart in "
    "one of the two scores.",
    f"**Unstable** is a run whose training loss rises by more than {JUMP:g} bits from one epoch to "
    "the next.",
    "**Run by run.** Epochs, steps and training losses have no pooled sd. All runs of one row must "
    "lie on one side of all runs of the other, with at least two seeds on each side.",
)


@dataclass(frozen=True)
class Finding:
    """What the records say of a claim."""

    verdict: Verdict
    evidence: str
    recipes: tuple[str, ...]  # the rows that were compared


@dataclass(frozen=True)
class Scores:
    """Which scores of two rows are compared."""

    parts: tuple[str, ...] = PARTS
    within: int | None = None  # the best validation of the first epochs; None: of the whole run

    @property
    def words(self) -> str:
        """What the numbers of the evidence are, where they are not validation and test."""
        if len(self.parts) > 1:
            return ""
        part = {"valid": "Validation", "test": "Test"}[self.parts[0]]
        return f"{part} within {self.within} epochs: " if self.within else f"{part}: "


BOTH = Scores()
VALID = Scores(("valid",))
TEST = Scores(("test",))
RATES = Scores(("valid",), RATES_EPOCHS)  # records have no test of an earlier epoch


class Book:
    """All records, and the scatter over seeds of every task."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.records = {name: fitting(r, results)[0] for name, r in RECIPES.items()}

    @cached_property
    def scatter(self) -> dict[str, dict[str, float | None]]:
        """The standard deviation over seeds, pooled over the rows of a task, by task and part."""
        tasks = dict.fromkeys(recipe.task for recipe in RECIPES.values())
        return {
            task: scatter_of([self.records[r.name] for r in RECIPES.values() if r.task == task])
            for task in tasks
        }

    def deviation(self, task: str, part: str) -> float | None:
        """Return the standard deviation of a task's runs: its own, or that of `LIKE`."""
        own = self.scatter[task][part]
        return self.scatter[LIKE[task]][part] if own is None and task in LIKE else own

    def several(self, task: str) -> list[str]:
        """Return the rows from which a task's standard deviation is pooled."""
        return [r.name for r in RECIPES.values() if r.task == task and self.records[r.name][1:]]

    def scores(self, recipe: str, part: str, within: int | None = None) -> list[float]:
        """Return the scores of a recipe's seeds, or the best validation `within` as many epochs."""
        own = self.records[recipe]
        return [best_within(r, within) if within else r[part] for r in own]

    def epochs(self, recipe: str) -> list[float]:
        """Return for how many epochs the recipe's seeds were trained."""
        return [record["epochs"] for record in self.records[recipe]]

    def reach(self, recipe: str, state: str) -> list[int]:
        """Return, for each seed, the number of last steps that hold half of the gradient's norm."""
        found = (self.results / recipe).glob(GRADIENTS.format("*"))
        layers = [gradient_flow.read_record(path)["layers"] for path in sorted(found)]
        return [
            gradient_flow.half_in_last(list(one.values())[-1][state]["share"]) for one in layers
        ]


# --- rules ----------------------------------------------------------------------------------------


def t_of(book: Book, better: str, worse: str, part: str, within: int | None = None) -> float | None:
    """Return t of the difference between two rows of a task; positive if `better` is better.

    None if a row has no records, or if the scatter over seeds is not known.
    """
    ours, theirs = (book.scores(row, part, within) for row in (better, worse))
    sd = book.deviation(RECIPES[better].task, part)
    if not ours or not theirs or sd is None:
        return None
    difference, error = fmean(theirs) - fmean(ours), sd * math.sqrt(1 / len(ours) + 1 / len(theirs))
    return (
        difference / error if error else math.copysign(math.inf, difference) if difference else 0.0
    )


def verdict_of(ts: Sequence[float | None]) -> Verdict:
    """Return the verdict on a comparison from t on each part.

    >>> verdict_of([2.0, 2.1]), verdict_of([9.0, 1.9]), verdict_of([-2.0, -2.1]), verdict_of([-9.0])
    ('holds', 'cannot tell', 'does not hold here', 'does not hold here')
    >>> verdict_of([None, 3.0])
    'cannot tell'
    """
    known = [t for t in ts if t is not None]
    if len(known) < len(ts):
        return "cannot tell"
    if min(known) >= CLEAR:
        return "holds"
    return "does not hold here" if max(known) <= -CLEAR else "cannot tell"


def all_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict on a claim about several rows.

    >>> all_of(["holds", "cannot tell"]), all_of(["cannot tell", "does not hold here"])
    ('cannot tell', 'does not hold here')
    """
    found = set(verdicts)
    if "does not hold here" in found:
        return "does not hold here"
    return "holds" if found == {"holds"} else "cannot tell"


def apart(fewer: Sequence[float], more: Sequence[float]) -> Verdict:
    """Return the verdict on "the first numbers are smaller", number by number.

    >>> apart([1, 2], [3, 4]), apart([1, 4], [3, 4]), apart([5, 6], [3, 4]), apart([1, 2], [3])
    ('holds', 'cannot tell', 'does not hold here', 'cannot tell')
    """
    if min(len(fewer), len(more)) < SEVERAL:
        return "cannot tell"
    if max(fewer) < min(more):
        return "holds"
    return "does not hold here" if min(fewer) > max(more) else "cannot tell"


def too_few(*rows: Sequence[object]) -> str:
    """Say that rows with runs have too few of them to be compared run by run, or return ""."""
    if not 0 < min(map(len, rows)) < SEVERAL:
        return ""
    return " One run shows nothing about seeds: two on each side are needed."


def seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def unequal(book: Book, rows: Iterable[str], scores: Scores) -> bool:
    """Return whether the compared scores are of runs with different numbers of epochs."""
    return not scores.within and len(set(every_epoch(book, rows))) > 1


def numbers_of(book: Book, recipe: str, scores: Scores = BOTH, epochs: bool = False) -> str:
    """Return a row's title, its scores and its number of seeds; or that it has no run.

    `epochs` adds for how many epochs it was trained.
    """
    row, own = RECIPES[recipe], book.records[recipe]
    if not own:
        return f"{row.row}: {'not run' if row.not_run else 'no run yet'}"
    count = seeds(len(own)) + (f", {span(book.epochs(recipe))} epochs" if epochs else "")
    count += f"; left out: {row.left_out}" if row.left_out else ""
    return f"{row.row}: {shown(book, recipe, scores)} ({count})"


def shown(book: Book, recipe: str, scores: Scores) -> str:
    """Return the scores of a row with records, validation before test."""
    measure, within = RECIPES[recipe].measure, scores.within
    return " / ".join(spread(book.scores(recipe, part, within), measure) for part in scores.parts)


Test: TypeAlias = Callable[[Book], Finding]


def better(*pairs: tuple[str, str], on: Scores = BOTH) -> Test:
    """Return the test of "the first row of each pair is better than the second"."""
    rows = tuple(dict.fromkeys(row for pair in pairs for row in pair))
    several = len({RECIPES[row].task for row in rows}) > 1

    def test(book: Book) -> Finding:
        verdict, t = compared(book, pairs, on)
        words = [
            (f"{RECIPES[pair[0]].task}: " if several else "") + against(book, pair, on)
            for pair in pairs
        ]
        return Finding(verdict, f"{on.words}{'; '.join(words)}.{t}", rows)

    return test


def against(book: Book, pair: tuple[str, str], on: Scores) -> str:
    """Return the scores of two rows beside each other."""
    first = RECIPES[pair[0]].row
    if missing := [row for row in pair if not book.records[row]]:
        return f"{first}: no run of {' and '.join(missing)}"
    counts = " and ".join(str(len(book.records[row])) for row in pair)
    if unequal(book, pair, on):
        counts += f"; epochs: {' and '.join(span(book.epochs(row)) for row in pair)}"
    ours, theirs = (shown(book, row, on) for row in pair)
    return f"{first} {ours} against {RECIPES[pair[1]].row} {theirs} (seeds: {counts})"


def beats(winner: str, *others: str, on: Scores = BOTH) -> Test:
    """Return the test of "a row is better than each of the others"."""
    pairs = [(winner, other) for other in others]

    def test(book: Book) -> Finding:
        verdict, t = compared(book, pairs, on)

        ran = [row for row in others if book.records[row]]
        ran.sort(key=lambda row: fmean(book.scores(row, on.parts[0], on.within)))  # best first
        epochs = unequal(book, (winner, *ran), on)
        words = [numbers_of(book, row, on, epochs) for row in (winner, *ran[:NEAREST])]
        if (more := len(ran) - NEAREST) > 0:
            longer = f" ({span(every_epoch(book, ran[NEAREST:]))} epochs)" if epochs else ""
            words.append(f"{more} more {'has' if more == 1 else 'have'} higher scores{longer}")
        if waiting := [RECIPES[row].row for row in others if not book.records[row]]:
            words.append(f"no run of {', '.join(waiting)}")
        return Finding(verdict, f"{on.words}{'; '.join(words)}.{t}", (winner, *others))

    return test


def every_epoch(book: Book, rows: Iterable[str]) -> list[float]:
    return [count for row in rows for count in book.epochs(row)]


def compared(book: Book, pairs: Sequence[tuple[str, str]], scores: Scores) -> tuple[Verdict, str]:
    """Return the verdict on "the first of each pair is better", and the range of t in words."""
    found = [[t_of(book, *pair, part, scores.within) for part in scores.parts] for pair in pairs]
    every = sorted(t for ts in found for t in ts if t is not None)
    words = [f"{t:.1f}".replace("-", "−") for t in every]
    ends = list(dict.fromkeys((words[0], words[-1]))) if words else []
    return all_of(map(verdict_of, found)), f" t {' to '.join(ends)}." if ends else ""


def in_order(*rows: tuple[str, str]) -> Test:
    """Return the test of "these rows stand in the paper's order"; each with its row of the paper.

    Only pairs count that the paper's own numbers, as one run each, tell apart by the same rule.
    """

    def test(book: Book) -> Finding:
        pairs = [pair for pair in combinations(rows, 2) if told_apart(book, *pair)]
        verdict, t = compared(book, [(first[0], second[0]) for first, second in pairs], BOTH)
        names = [own for own, _ in rows]
        ran = [name for name in names if book.records[name]]
        ran.sort(key=lambda name: fmean(book.scores(name, PARTS[0])))
        epochs = unequal(book, ran, BOTH)
        words = [numbers_of(book, name, BOTH, epochs) for name in ran]
        if waiting := [RECIPES[name].row for name in names if name not in ran]:
            words.append(f"no run of {', '.join(waiting)}")
        text = ("Best first: " if ran else "") + f"{'; '.join(words)}.{t}"
        if len(pairs) < (every := math.comb(len(rows), 2)):
            text += f" Of {every} pairs, {len(pairs)} count; the others are close in the paper."
        return Finding(verdict if pairs else "cannot tell", text, tuple(names))

    return test


def told_apart(book: Book, better: tuple[str, str], worse: tuple[str, str]) -> bool:
    """Return whether the paper's numbers of two rows differ clearly in validation and test."""
    ts = []
    for part in PARTS:
        low, high = (getattr(RECIPES[paper], part) for _, paper in (better, worse))
        sd = book.deviation(RECIPES[better[0]].task, part)
        ts.append((high - low) / (sd * math.sqrt(2)) if sd else None)
    return verdict_of(ts) == "holds"


def lower_by_as_much(zoned: tuple[str, str], plain: tuple[str, str]) -> Test:
    """Return the test of "the difference of two rows is the paper's"; each with its paper's row.

    The paper's difference counts as that of one more run of each row.
    """

    def test(book: Book) -> Finding:
        names = zoned[0], plain[0]
        if not all(book.records[name] for name in names):
            return Finding("cannot tell", f"{against(book, names, BOTH)}.", names)
        zs, gains, papers = [], [], []
        for part in PARTS:
            gain = fmean(book.scores(names[1], part)) - fmean(book.scores(names[0], part))
            low, high = (getattr(RECIPES[row], part) for row in (zoned[1], plain[1]))
            sd = book.deviation(RECIPES[names[0]].task, part)
            ones = sum(1 / len(book.records[name]) for name in names)
            zs.append((high - low - gain) / (sd * math.sqrt(ones + 2)) if sd else None)
            gains.append(rounded(gain, RECIPES[names[0]].measure))
            papers.append(rounded(high - low, RECIPES[names[0]].measure))
        words = f"lower by {' / '.join(gains)}, in the paper by {' / '.join(papers)}"
        z = ", ".join(map(as_z, zs))
        text = f"{against(book, names, BOTH)}: {words}. z {z}."
        return Finding(numbers_verdict([reached(z) for z in zs]), text, names)

    return test


def numbers_verdict(found: Sequence[Reached | None]) -> Verdict:
    """Return the verdict on numbers of the paper, from whether each was reached.

    >>> numbers_verdict(["yes", "yes"]), numbers_verdict(["yes", None])
    ('holds', 'cannot tell')
    >>> numbers_verdict(["differs", None]), numbers_verdict(["no", "yes"])
    ('does not hold here', 'does not hold here')
    """
    if {"no", "differs"} & set(found):
        return "does not hold here"
    return "cannot tell" if None in found else "holds"


def as_printed(*rows: str) -> Test:
    """Return the test of "these rows reach the paper's numbers": neither missed nor far below."""

    def test(book: Book) -> Finding:
        verdicts: list[Reached | None] = []
        words = []
        for name in rows:
            recipe, own = RECIPES[name], book.records[name]
            zs = [z_of(recipe, own, part, book.scatter[recipe.task]) for part in PARTS if own]
            ones = [reached(z) for z in zs if z is not None] or [None]
            verdicts += ones
            paper = " / ".join(str(getattr(recipe, part) or "–") for part in PARTS)
            if set(ones) != {"yes"} or len(rows) < 3:
                words.append(f"{numbers_of(book, name)}, paper {paper}")
        if left := len(rows) - len(words):
            words.append(f"{left} other {'row has' if left == 1 else 'rows have'} the paper's")
        return Finding(numbers_verdict(verdicts), "; ".join(words) + ".", rows)

    return test


def epochs_to(record: Record, level: float) -> float:
    """Return the first epoch whose validation is at the level or below; infinity if none is."""
    points = zip(record["curve"]["epoch"], record["curve"]["valid"])
    return next((epoch for epoch, value in points if value <= level), math.inf)


def trains(zoned: str, plain: str, *, faster: bool) -> Test:
    """Return the test of "zoneout takes fewer (or more) epochs to a validation score".

    The score is one that every unregularised run reaches: the worst of their best scores.
    """

    def test(book: Book) -> Finding:
        ours, theirs = book.records[zoned], book.records[plain]
        if not ours or not theirs:
            return Finding("cannot tell", "No runs to compare.", (zoned, plain))
        level = max(min(record["curve"]["valid"]) for record in theirs)
        with_it, without = ([epochs_to(r, level) for r in rows] for rows in (ours, theirs))
        verdict = apart(with_it, without) if faster else apart(without, with_it)
        later = fmean(r["best_epoch"] for r in ours), fmean(r["best_epoch"] for r in theirs)
        goal = rounded(level, RECIPES[plain].measure)
        text = (
            f"Epochs to a validation of {goal}: {span(with_it)} with zoneout "
            f"({seeds(len(ours))}), {span(without)} without ({seeds(len(theirs))}). Their own best "
            f"comes at epoch {later[0]:.0f} and {later[1]:.0f}.{too_few(ours, theirs)}"
        )
        return Finding(verdict, text, (zoned, plain))

    return test


def span(values: Sequence[float]) -> str:
    """Format the range of some numbers.

    >>> span([7.0, 7.0]), span([7, 9])
    ('7', '7 to 9')
    """
    low, high = (f"{value:g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def further(state: Literal["cell", "hidden"]) -> Test:
    """Return the test of "with zoneout, gradients reach more steps back than in the other arms"."""
    arms = [f"gradient_flow_{arm}" for arm in ("zoneout", "unregularised", "dropout")]

    def test(book: Book) -> Finding:
        steps = {arm: book.reach(arm, state) for arm in arms}
        verdict = all_of(apart(steps[arm], steps[arms[0]]) for arm in arms[1:])
        words = [
            f"{RECIPES[arm].row} {span(found)} ({seeds(len(found))})" if found else f"{arm}: no run"
            for arm, found in steps.items()
        ]
        text = f"Half of the norm lies in this many last steps of 784: {'; '.join(words)}."
        text += too_few(*steps.values()) + machines([r for arm in arms for r in book.records[arm]])
        return Finding(verdict, text, tuple(arms))

    return test


def machines(records: Sequence[Record]) -> str:
    """Say which seeds were trained on what and in which precision, or "" if all were alike."""
    made: dict[str, set[int]] = {}
    for record in records:
        made.setdefault(f"on {record['device']} in {record['precision']}", set()).add(
            record["seed"]
        )
    words = [
        f"seed{'s' * (len(own) > 1)} {', '.join(map(str, sorted(own)))} {where}"
        for where, own in made.items()
    ]
    return f" Machines differ: {'; '.join(words)}." if len(made) > 1 else ""


def trains_lower(low: str, high: str) -> Test:
    """Return the test of "one row ends with a lower training loss", at the last common epoch."""

    def test(book: Book) -> Finding:
        both = [book.records[low], book.records[high]]
        if not all(both):
            return Finding("cannot tell", "No runs to compare.", (low, high))
        last = min(record["epochs"] for rows in both for record in rows)
        found = [[training_bits(record, last) for record in rows] for rows in both]
        words = [
            f"{RECIPES[name].row} {fmean(values):.3f} ({seeds(len(values))})"
            for name, values in zip((low, high), found)
        ]
        text = f"Training loss in bits at epoch {last:g}, with noise: {'; '.join(words)}."
        text += too_few(*both)
        return Finding(apart(*found), text, (low, high))

    return test


def unstable(row: str, steady: str) -> Test:
    """Return the test of "one row's training jumps, and the other's does not".

    A run that diverges ends without a record, and so is not seen here.
    """

    def test(book: Book) -> Finding:
        both = [book.records[row], book.records[steady]]
        if not all(both):
            return Finding("cannot tell", f"{against(book, (row, steady), BOTH)}.", (row, steady))
        rises = [[largest_rise(record) for record in own] for own in both]
        jumps, calm = ({rise > JUMP for rise in own} for own in rises)
        verdict: Verdict = "cannot tell"
        if min(map(len, both)) >= SEVERAL and calm == {False} and len(jumps) == 1:
            verdict = "holds" if jumps == {True} else "does not hold here"
        words = [
            f"{RECIPES[name].row} {span([round(rise, 3) for rise in own])} ({seeds(len(own))})"
            for name, own in zip((row, steady), rises)
        ]
        text = "Largest rise of the training loss from one epoch to the next, in bits: "
        return Finding(verdict, f"{text}{'; '.join(words)}.{too_few(*both)}", (row, steady))

    return test


def largest_rise(record: Record) -> float:
    """Return the largest rise of the training loss from one recorded epoch to the next, in bits."""
    nats = [value for value in record["curve"]["train_nats"] if value is not None]
    return max((after - before for before, after in pairwise(nats)), default=0.0) / math.log(2)


def training_bits(record: Record, epoch: float) -> float:
    """Return the training loss of the last recorded epoch up to this one."""
    points = zip(record["curve"]["epoch"], record["curve"]["train_nats"])
    nats = [value for at, value in points if at <= epoch and value is not None]
    return float(nats[-1]) / math.log(2) if nats else math.inf


def deviations(book: Book) -> list[tuple[str, str, str]]:
    """Return, for the tasks whose scores are compared, the sd of both parts and its rows."""
    found = []
    for task in dict.fromkeys(r.task for r in RECIPES.values() if r.task in TASKS):
        rows = book.several(task)
        known = [book.deviation(task, part) for part in PARTS]
        digits = SPREADS[MEASURES[task]] + 1
        words = " / ".join("not known" if sd is None else f"{sd:.{digits}f}" for sd in known)
        named = [f"{RECIPES[row].row} ({seeds(len(book.records[row]))})" for row in rows]
        of = "; ".join(named) or (f"no row of its own: sd of {LIKE[task]}" if task in LIKE else "–")
        found.append((task, words, of))
    return found
