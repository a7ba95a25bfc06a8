"""Standard output and standard error: printing is safe, and a failed write does not end a run.

All output goes through `show` or `say`. Text from files may contain control characters, which can
command a terminal. They are printed as escape codes instead.
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

# Control characters, which can command a terminal, and characters that change the text direction.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""Return the text with escape codes for all control characters except new lines and tabs.

    >>> visible("a\tb\n\x1b[31mred\r")
    'a\tb\n\\x1b[31mred\\r'
    """
    return CONTROL.sub(
        lambda c: c[0] if c[0] in "\n\t" else c[0].encode("unicode_escape").decode(), text
    )


def shown(value: Any) -> str:
    """Format a value from a file for a message, shortened if it is long or deeply nested.

    >>> shown([[[]]]), shown("x" * 1000)
    ('[[[]]]',
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'")
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = 90
    return short.repr(value)


def show(text: object = "", to: Any = None, end: str = "\n") -> None:
    """Print a text to standard output, or to the stream `to`."""
    print(visible(str(text)), file=to, end=end, flush=True)


def show_json(value: Any) -> None:
    """Print a value as JSON. Raise a ValueError for nan and infinity, which JSON does not have."""
    show(json.dumps(value, allow_nan=False))


def say(text: object) -> None:
    """Print a text to standard error; nothing if the process was started without one."""
    if sys.stderr is not None:  # print(file=None) would use standard output
        show(text, sys.stderr)


class Forgiving:
    """A stream whose failures are ignored: its reader or terminal is gone, or the disk is full.

    After a failure, all further output to the stream is lost.
    """

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
    """Redirect a stream and its buffer to the null device, so that Python can exit cleanly."""
    with suppress(OSError, ValueError):  # a custom or closed stream has no file descriptor
        number = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)


@contextmanager
def ready() -> Iterator[None]:
    """Inside, failures of standard error are ignored.

    A character that the terminal's encoding does not have is printed as an escape code.
    """
    before = sys.stderr
    errors = {s: s.errors for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)}
    for stream in errors:
        stream.reconfigure(errors="backslashreplace")
    sys.stderr = forgiving(before)
    try:
        yield
    finally:
        sys.stderr = before
        for stream, how in errors.items():
            stream.reconfigure(errors=how)


def forgiving(stream: Any) -> Any:
    """Return the stream with failures ignored; None if the process has no such stream."""
    return None if stream is None else Forgiving(stream)
