"""What was compiled, kept on disk from one process to the next.

The name of a file says what it was made from and, by a digest, what is in it: one that a crash or a full disk has cut
short does not fit its name, and is made anew rather than loaded.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """Where built libraries are kept; an OSError where there is no such place."""
    if named := os.environ.get("ZONEOUT_CACHE"):
        return Path(named).absolute()  # a library is looked for elsewhere by its bare name
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zoneout"
    except RuntimeError as error:  # a user without a home
        raise OSError(str(error)) from None


def find(name: str, ending: str) -> Path | None:
    """The file kept under a name, if it is there and whole; one that is damaged is removed."""
    with suppress(OSError):
        for path in cache_folder().glob(f"{name}-*{ending}"):
            if path.name == _full_name(name, ending, path.read_bytes()):
                return path
            path.unlink(missing_ok=True)
    return None


def keep(name: str, ending: str, content: bytes) -> None:
    """Keep it, whole or not at all; where the folder cannot be written to, this process alone has it."""
    with suppress(OSError):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as side, open(Path(side) / "part", "wb") as part:
            part.write(content)
            part.flush()
            os.fsync(part.fileno())
            os.replace(part.name, folder / _full_name(name, ending, content))


def _full_name(name: str, ending: str, content: bytes) -> str:
    return f"{name}-{hashlib.sha256(content).hexdigest()[:20]}{ending}"
