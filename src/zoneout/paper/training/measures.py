"""Measures (bits, perplexity, error): their names, units and formats.

Also the rule for when a result reaches the paper's number (`z_score` and `reached`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev, variance
from typing import Any, Literal, TypeAlias

from ..data.corpora import Corpus, Images
from ..data.text import Vocabulary

Verdict: TypeAlias = Literal["yes", "no", "differs"]

LABELS = {"bits": "bits per character", "perplexity": "perplexity", "error": "error"}  # in plots
UNITS = LABELS | {"error": "share that is wrong"}  # in tables
DIGITS = {"bits": 3, "perplexity": 1, "error": 3}  # decimal places, as in the paper
# Decimal places of a mean over seeds and of its standard deviation.
SPREADS = {name: digits + 1 for name, digits in DIGITS.items()}
AT_MOST = 1.65  # z of a row that reaches the paper's number
DIFFERS = -2.0  # z below which a row is so much better that it is another experiment
REACHED = (
    "z = (our mean − the paper's number) / (sd · √(1 + 1/n)) is at most "
    f"{AT_MOST}, where n is the number of our seeds, and sd the standard deviation over seeds: the "
    "smaller of the row's own (from three seeds on) and that pooled over the rows of the task"
)
DIFFERENT = (
    "Lower numbers are better, so a negative z is a better result than the paper's. At z ≤ "
    f"{DIFFERS:g}".replace("-", "−")
    + " the row *differs*: it is then another experiment than the paper's, and no success"
)


def measure_of(data: Corpus | Images | Vocabulary) -> str:
    """Return the measure for these data: "bits", "perplexity" or "error"."""
    return "error" if isinstance(data, Images) else "bits" if data.unit == "char" else "perplexity"


def measure_in(row: dict[str, Any]) -> str | None:
    """Return the measure in a line of the metrics, or None if it has none."""
    return next((name for name in LABELS if name in row), None)


def in_measure(nats: float, measure: str) -> float:
    """Convert a loss from nats to bits or perplexity; for the measure "error" it stays in nats.

    The perplexity of a very large loss is limited, so that it is always a finite number.
    """
    if measure == "bits":
        return nats / math.log(2)
    return math.exp(min(nats, 700.0)) if measure == "perplexity" else nats


def figure_of(value: float, measure: str) -> str:
    """Format a value with its unit: bits with 3 decimals, perplexity with 5 digits, error in %."""
    if measure == "error":
        return f"{value:.2%} wrong"
    return f"{value:.3f} bits" if measure == "bits" else f"{value:.5g} ppl"


def rounded(value: float, measure: str, sign: str = "") -> str:
    """Format a value with as many decimals as the paper has.

    >>> rounded(1.36249, "bits"), rounded(-0.31, "perplexity", "+")
    ('1.362', '-0.3')
    """
    return format(value, f"{sign}.{DIGITS[measure]}f")


def spread(values: Sequence[float], measure: str) -> str:
    """Format the value of one seed, or the mean ± standard deviation of several seeds.

    The mean and the standard deviation have one more decimal than a single value.

    >>> spread([82.4], "perplexity"), spread([82.4, 82.71], "perplexity")
    ('82.4', '82.56 ± 0.22')
    """
    if len(values) < 2:
        return rounded(values[0], measure)
    digits = SPREADS[measure]
    return f"{fmean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def pooled(rows: Iterable[Sequence[float]]) -> float | None:
    """Return the standard deviation over seeds, pooled over rows; None if no row has two seeds.

    >>> pooled([[1.0, 3.0], [5.0], [2.0, 2.0]])
    1.0
    """
    several = [values for values in rows if len(values) > 1]
    squares = sum(variance(values) * (len(values) - 1) for values in several)
    degrees = sum(len(values) - 1 for values in several)
    return math.sqrt(squares / degrees) if degrees else None


def z_score(values: Sequence[float], paper: float, pooled: float | None) -> float | None:
    """Return by how many standard deviations the mean over seeds is above the paper's number.

    The paper's number is taken for one more run: so the deviation is sd · √(1 + 1/n). sd is the
    smaller of the row's own, from three seeds on, and that pooled over the rows of its task. The
    result is None if neither is known.

    >>> z_score([1.0, 2.0, 3.0], 1.0, pooled=None)
    0.8660254037844387
    """
    known = [sd for sd in (pooled, stdev(values) if len(values) > 2 else None) if sd is not None]
    if not known:
        return None
    difference, sd = fmean(values) - paper, min(known) * math.sqrt(1 + 1 / len(values))
    return difference / sd if sd else math.copysign(math.inf, difference) if difference else 0.0


def reached(z: float | None) -> Verdict | None:
    """Return whether a row with this z reaches the paper's number; None if it is not known.

    >>> reached(1.65), reached(1.66), reached(-1.9), reached(-2.0)
    ('yes', 'no', 'yes', 'differs')
    """
    return None if z is None else "no" if z > AT_MOST else "differs" if z <= DIFFERS else "yes"
