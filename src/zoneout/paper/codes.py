"""Exit codes: what a command gives back, and which error has which."""

from __future__ import annotations

from .files import DataError
from .train import Diverged

OK, FAILED, WRONG_USE, BAD_DATA, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 4, 130
CODES = {
    OK: "done",
    FAILED: "the run failed: a folder that is in use, full or damaged, or no memory left",
    WRONG_USE: "wrong use: an option or a value that cannot be",
    BAD_DATA: "data that are missing or not what they should be",
    DIVERGED: "a loss that is not a finite number: training diverged, or the weights cannot be good",
    INTERRUPTED: "interrupted (Ctrl-C or a polite kill); the run can be continued",
}


def code_of(error: Exception) -> int:
    """The exit code of an error.

    >>> code_of(ValueError("model.hidden: expected a number above 0, got 0")), code_of(OSError("no space left"))
    (2, 1)
    """
    kinds: dict[type[Exception], int] = {
        Diverged: DIVERGED,
        DataError: BAD_DATA,
        OSError: FAILED,
        ValueError: WRONG_USE,
    }
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), FAILED)
