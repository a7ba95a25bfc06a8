"""Measures (bits, perplexity, error): their names, units and formats.

Also the rule for when a result reaches the paper's number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from ..data.corpora import Corpus, Images
from ..data.text import Vocabulary

LABELS = {"bits": "bits per character", "perplexity": "perplexity", "error": "error"}  # in plots
UNITS = LABELS | {"error": "share that is wrong"}  # in tables
DIGITS = {"bits": 3, "perplexity": 1, "error": 3}  # decimal places, as in the paper
# Decimal places of a mean over seeds and of its standard deviation.
SPREADS = {name: digits + 1 for name, digits in DIGITS.items()}
# Tolerance for a result of a single seed; for perplexity, relative to the paper's number.
SCATTER = {"bits": 0.004, "perplexity": 0.01, "error": 0.005}
REACHED = (
    "the mean is at or below the paper's number plus one standard deviation over our seeds; with "
    "one seed, plus "
    f"{SCATTER['bits']} bits, {SCATTER['perplexity'] * 100:g} % of the perplexity or "
    f"{SCATTER['error']} of error"
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


def reached(values: Sequence[float], paper: float, measure: str) -> bool:
    """Return whether the results reach the paper's number (lower is better).

    The mean over seeds must be at most the paper's number plus one standard deviation. A single
    seed must be at most the paper's number plus the tolerance in `SCATTER`.

    >>> reached([1.3655], 1.362, "bits"), reached([1.367], 1.362, "bits")
    (True, False)
    >>> reached([1.361, 1.367], 1.362, "bits")
    True
    """
    if len(values) > 1:
        return fmean(values) <= paper + stdev(values)
    return values[0] <= paper + SCATTER[measure] * (paper if measure == "perplexity" else 1)
