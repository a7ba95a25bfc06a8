"""The data cache: encoded corpora as memory-mapped arrays, so that they are encoded only once.

A cache entry is a folder. Its name is a hash of what was encoded and how. The folder holds one
.npy file for each array, and a JSON file with the checksums.

An entry is written to a temporary folder and then renamed, so two processes can write the same
entry at the same time. A damaged entry is not used; it is written again. If the cache folder is
not writable, everything works without the cache.
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

from ...ops.build_cache import cache_folder, create_cache_folder
from .. import disk

Array: TypeAlias = np.ndarray[Any, Any]
_PAGE = "entry.json"


def key_of(*parts: Any) -> str:
    """Return the SHA-256 of these parts (any values that JSON can represent), as a cache key."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load(key: str) -> tuple[dict[str, Array], Any] | None:
    """Return the arrays and notes of an entry, or None if it is missing or damaged.

    The arrays are mapped copy-on-write: changes to them never reach the file.
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
    except Exception:
        # A damaged .npy header can make NumPy raise almost any exception, such as TokenError or
        # MemoryError.
        return None


def save(key: str, arrays: Mapping[str, Array], notes: Any) -> None:
    """Write an entry.

    If that fails (read-only folder, full disk), remove the partial entry and raise no error.
    """
    target = _folder("encoded") / key
    try:
        create_folder(target.parent)
        with tempfile.TemporaryDirectory(
            prefix=".making-", dir=target.parent, ignore_cleanup_errors=True
        ) as scratch:
            side = Path(scratch) / "entry"
            side.mkdir()
            sums = {}
            for name, array in arrays.items():
                plain = np.ascontiguousarray(array)
                sums[name] = zlib.crc32(plain.data)
                np.save(side / f"{name}.npy", plain, allow_pickle=False)
            page = {"key": key_of(key, sums, notes), "arrays": sums, "notes": notes}
            disk.write_text(side / _PAGE, json.dumps(page))
            if target.exists():
                # The old entry is damaged, or another process has just written the same data.
                # Either way the new entry can replace it.
                os.replace(target, Path(scratch) / "old")
            os.replace(side, target)
    except OSError:
        return


def recall(path: Path) -> str | None:
    """Return the digest that `remember` stored for this file, or None if the file has changed."""
    try:
        stamp = disk.read_json(_stamp(path))
        return str(stamp["digest"]) if stamp["file"] == _state(path) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(path: Path, digest: str) -> None:
    """Store the digest of a file's contents, so that the file need not be read again.

    The digest is stored together with the file's size and times, which `recall` compares. The
    digest of a file that was modified less than two seconds ago is not stored: the file could
    change again without a change of its size or its times.
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
    """Remove all cache entries and stored digests; downloaded files stay."""
    for name in ("encoded", "stamps"):
        shutil.rmtree(_folder(name), ignore_errors=True)


def downloads() -> Path:
    """Return the folder for downloaded files."""
    return _folder("data")


def create_folder(folder: Path) -> None:
    """Create a folder if it is missing.

    If it is inside the cache, the cache folder is created first, with access for the user only.
    """
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
    changed = stat.st_ctime_ns  # set by the system: a program can set mtime back, but not ctime
    named = {"path": str(path.resolve()), "size": stat.st_size, "inode": stat.st_ino}
    return {**named, "time": stat.st_mtime_ns, "changed": changed}
