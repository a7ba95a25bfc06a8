"""Exit codes of the commands, and the exit code of each kind of error."""

from __future__ import annotations

from ..data.datasets import DataError
from .train import Diverged

OK, FAILED, WRONG_USE, BAD_DATA, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 4, 130
CODES = {
    OK: "success",
    FAILED: "the run failed: folder in use or damaged, disk full, out of memory",
    WRONG_USE: "wrong usage: an option or a value is not valid",
    BAD_DATA: "data are missing, or their contents are not as expected",
    DIVERGED: "the loss is not finite: training diverged, or weights are not usable",
    INTERRUPTED: "interrupted (Ctrl-C or SIGTERM); the run can be continued",
}


def code_of(error: Exception) -> int:
    """Return the exit code of an error.

    >>> code_of(ValueError("model.hidden: expected a number above 0, got 0"))
    2
    >>> code_of(OSError("no space left"))
    1
    """
    kinds: dict[type[Exception], int] = {
        Diverged: DIVERGED,
        DataError: BAD_DATA,
        OSError: FAILED,
        ValueError: WRONG_USE,
    }
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), FAILED)
