"""The cache: encoded data, kept as memory-mapped arrays, so that the second start takes no time.

An entry is a folder named by a key that says what was encoded and how; it holds one .npy file an array and a page of
JSON with their checksums. It is written to the side and renamed, so that two processes may make the same one at once;
one that is damaged is not used but made again. Where the folder cannot be written everything works without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..ops.kept import cache_folder, create_cache_folder
from . import disk

Array: TypeAlias = np.ndarray[Any, Any]
_PAGE = "entry.json"


def key_of(*parts: Any) -> str:
    """A name for what is made of these parts (anything that JSON can hold)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load(key: str) -> tuple[dict[str, Array], Any] | None:
    """The arrays and the notes of an entry, or None where it is missing or damaged.

    The arrays are mapped copy-on-write: nothing that is done to them reaches the file.
    """
    folder = _folder("encoded") / key
    try:
        page = disk.read_json(folder / _PAGE)
        if page["key"] != key_of(key, page["arrays"], page["notes"]):
            return None
        arrays: dict[str, Array] = {}
        for name, crc in page["arrays"].items():
            disk.check_plain(folder / f"{name}.npy")
            arrays[name] = np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)
            if zlib.crc32(arrays[name].data) != crc:
                return None
        return arrays, page["notes"]
    except Exception:  # a damaged header makes NumPy raise nearly anything, a TokenError or a MemoryError among it
        return None


def save(key: str, arrays: Mapping[str, Array], notes: Any) -> None:
    """Keep an entry; where that cannot be done (a read-only folder, a full disk) nothing is left, and nothing said."""
    target = _folder("encoded") / key
    try:
        create_folder(target.parent)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent, ignore_cleanup_errors=True) as scratch:
            side = Path(scratch) / "entry"
            side.mkdir()
            sums = {}
            for name, array in arrays.items():
                plain = np.ascontiguousarray(array)
                sums[name] = zlib.crc32(plain.data)
                np.save(side / f"{name}.npy", plain, allow_pickle=False)
            page = {"key": key_of(key, sums, notes), "arrays": sums, "notes": notes}
            disk.write_text(side / _PAGE, json.dumps(page))
            if target.exists():  # a damaged one, or another process was faster with the same: ours is good
                os.replace(target, Path(scratch) / "old")
            os.replace(side, target)
    except OSError:
        return


def recall(path: Path) -> str | None:
    """The digest that `remember` was given for this file, if the file is still as it was then."""
    try:
        stamp = disk.read_json(_stamp(path))
        return str(stamp["digest"]) if stamp["file"] == _state(path) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(path: Path, digest: str) -> None:
    """Note the digest of a file's contents beside its size and time, so that the file need not be read again.

    A file written a moment ago is not noted: it could change once more without its size and time showing it.
    """
    try:
        state = _state(path)
        if time.time_ns() - state["time"] < 2_000_000_000:
            return
        stamp = _stamp(path)
        create_folder(stamp.parent)
        disk.write_json(stamp, {"file": state, "digest": digest})
    except OSError:
        return


def clear() -> None:
    """Remove all that is kept here; downloads stay."""
    for name in ("encoded", "stamps"):
        shutil.rmtree(_folder(name), ignore_errors=True)


def downloads() -> Path:
    """Where fetched files go."""
    return _folder("data")


def create_folder(folder: Path) -> None:
    """Create a folder where it is missing; one in the cache needs the cache folder, which is for the user alone."""
    with suppress(OSError):
        if folder.absolute().is_relative_to(cache_folder()):
            create_cache_folder()
    folder.mkdir(parents=True, exist_ok=True)


def _folder(name: str) -> Path:
    return cache_folder() / name


def _stamp(path: Path) -> Path:
    return _folder("stamps") / f"{key_of(str(path.resolve()))[:32]}.json"


def _state(path: Path) -> dict[str, Any]:
    stat = path.stat()
    changed = stat.st_ctime_ns  # by the system's own clock: a time can be put back, this cannot
    named = {"path": str(path.resolve()), "size": stat.st_size, "inode": stat.st_ino}
    return {**named, "time": stat.st_mtime_ns, "changed": changed}
