"""The standard streams of a command: nothing that is only said may end the work that it is about.

Everything that is printed goes through `show` or `say`: what comes from files may hold what commands a terminal, and is
shown by its number instead.
"""

from __future__ import annotations

import io
import json
import os
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

# What commands a terminal, or turns the order of letters round: control characters, and those for directions.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""A text whose control characters, but for new lines and tabs, are shown by their numbers.

    >>> visible("a\tb\n\x1b[31mred\r")
    'a\tb\n\\x1b[31mred\\r'
    """
    return CONTROL.sub(lambda c: c[0] if c[0] in "\n\t" else c[0].encode("unicode_escape").decode(), text)


def shown(value: Any) -> str:
    """A value from a file for a message, whatever its size and depth.

    >>> shown([[[]]]), shown("x" * 1000)
    ('[[[]]]', "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'")
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = 90
    return short.repr(value)


def show(text: object = "", to: Any = None, end: str = "\n") -> None:
    """Print a text, to standard output unless another stream is given."""
    print(visible(str(text)), file=to, end=end, flush=True)


def show_json(value: Any) -> None:
    """Print a value as JSON, a ValueError where it holds what JSON has not: nan and the infinities."""
    show(json.dumps(value, allow_nan=False))


def say(text: object) -> None:
    """Print a text to standard error."""
    show(text, sys.stderr)


class Unheard:
    """A stream that may fail (its reader or terminal goes, its disk is full): what comes after is lost, and no more."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError:
            silence(self.stream)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            silence(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def silence(stream: TextIO) -> None:
    """Send a stream to nowhere, with what it still holds, so that nothing is left to fail when Python ends."""
    with suppress(OSError, ValueError):  # a stream of somebody's own making, or one that is closed, has no number
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


@contextmanager
def ready() -> Iterator[None]:
    """Inside, progress need not be heard, and a letter that the terminal does not have is written by its number."""
    before = sys.stderr
    errors = {s: s.errors for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)}
    for stream in errors:
        stream.reconfigure(errors="backslashreplace")
    sys.stderr = heard(before)
    try:
        yield
    finally:
        sys.stderr = before
        for stream, how in errors.items():
            stream.reconfigure(errors=how)


def heard(stream: Any) -> Any:
    """A stream that may fail; None, which `print` passes over, where there is none from the beginning."""
    return None if stream is None else Unheard(stream)
