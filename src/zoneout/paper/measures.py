"""Measures: what a model is judged by, how values of it are shown, and when a number of the paper is reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from .data import Corpus, Images
from .text import Vocabulary

LABELS = {"bits": "bits per character", "perplexity": "perplexity", "error": "error"}  # of curves
UNITS = LABELS | {"error": "share that is wrong"}  # of tables
DIGITS = {"bits": 3, "perplexity": 1, "error": 3}  # after the point: as many as the paper gives
SPREADS = {name: digits + 1 for name, digits in DIGITS.items()}  # of a mean over seeds, and of their standard deviation
SCATTER = {"bits": 0.004, "perplexity": 0.01, "error": 0.005}  # of single runs; of perplexities the share
REACHED = (
    "the mean is at or below the paper's number plus one standard deviation over our seeds; with one seed, plus "
    f"{SCATTER['bits']} bits, {SCATTER['perplexity'] * 100:g} % of the perplexity or {SCATTER['error']} of error"
)


def measure_of(data: Corpus | Images | Vocabulary) -> str:
    """What the data are judged by."""
    return "error" if isinstance(data, Images) else "bits" if data.unit == "char" else "perplexity"


def measure_in(row: dict[str, Any]) -> str | None:
    """What a line of the metrics is judged by."""
    return next((name for name in LABELS if name in row), None)


def in_measure(nats: float, measure: str) -> float:
    """A loss in nats, in the unit of the measure; a number for every finite loss, however bad. Of images it stays."""
    if measure == "bits":
        return nats / math.log(2)
    return math.exp(min(nats, 700.0)) if measure == "perplexity" else nats


def figure_of(value: float, measure: str) -> str:
    """A value as it is shown: bits to a thousandth, perplexities to five digits, errors in per cent."""
    if measure == "error":
        return f"{value:.2%} wrong"
    return f"{value:.3f} bits" if measure == "bits" else f"{value:.5g} ppl"


def rounded(value: float, measure: str, sign: str = "") -> str:
    """A value beside the paper's, with as many digits.

    >>> rounded(1.36249, "bits"), rounded(-0.31, "perplexity", "+")
    ('1.362', '-0.3')
    """
    return format(value, f"{sign}.{DIGITS[measure]}f")


def spread(values: Sequence[float], measure: str) -> str:
    """The value of one seed, or the mean over seeds and their standard deviation, with a digit more to be judged by.

    >>> spread([82.4], "perplexity"), spread([82.4, 82.71], "perplexity")
    ('82.4', '82.56 ± 0.22')
    """
    if len(values) < 2:
        return rounded(values[0], measure)
    digits = SPREADS[measure]
    return f"{fmean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def reached(values: Sequence[float], paper: float, measure: str) -> bool:
    """Whether the mean over seeds is at or below the paper's number, give or take what single runs scatter by.

    >>> reached([1.3655], 1.362, "bits"), reached([1.367], 1.362, "bits"), reached([1.361, 1.367], 1.362, "bits")
    (True, False, True)
    """
    if len(values) > 1:
        return fmean(values) <= paper + stdev(values)
    return values[0] <= paper + SCATTER[measure] * (paper if measure == "perplexity" else 1)
