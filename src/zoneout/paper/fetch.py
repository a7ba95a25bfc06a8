"""Downloads: several homes a file, continued where they broke off, and never half used."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias, cast

from . import cache, disk
from .files import (
    DATASETS,
    DataError,
    File,
    MissingError,
    PathLike,
    damage,
    expanded,
    find_in,
    known,
    locate,
    packing,
    read,
)

try:
    import fcntl
except ImportError:  # Windows: two downloads of one file at once only cost time there
    fcntl = None  # type: ignore[assignment]

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Told of a download: the file's name, the bytes that are here, and all its bytes where the server says how many."""

_TIMEOUT = 30.0  # seconds without a byte
_BLOCK = 2**18


def fetch(name: str, folder: PathLike | None = None, *, progress: Progress | None = None) -> list[tuple[Path, bool]]:
    """See to it that all files of a data set are there and good: their paths, and whether each was downloaded now.

    Files go to `folder`, or to the cache. What is there and good is kept. A damaged file in the same folder is replaced
    (and kept with `.damaged` after its name where it would be in the way); one in ZONEOUT_DATA is the user's to remove,
    and an error.
    """
    return [_ensure(file, folder, progress) for file in DATASETS[known(name)].files]


def _ensure(file: File, folder: PathLike | None, progress: Progress | None) -> tuple[Path, bool]:
    target = expanded(folder) if folder else cache.downloads()
    bad = None
    try:
        path, there = locate(file, folder)
        try:
            read(path, there)
            return path, False
        except DataError:
            if path.is_relative_to(target):
                bad = path
            elif not folder:
                raise
    except MissingError:
        pass
    path = download(file.part_of or file, target, progress=progress)
    if bad is not None and bad != path:
        os.replace(bad, bad.with_name(f"{bad.name}.damaged"))
    return path, True


def download(file: File, folder: Path, *, progress: Progress | None = None) -> Path:
    """Fetch one file from the first of its homes that gives it whole and unaltered, and say where it lies.

    It comes to the side, under a name that ends in `.part`, and is renamed when it has been checked; what an
    interrupted download left is continued. It is kept as it came, packed or not.
    """
    target = folder / file.path
    report = progress or (lambda name, here, total: None)
    troubles = []
    try:
        cache.create_folder(target.parent)
        with _alone(target.parent):
            if (path := find_in(folder, file)) and not damage(path, file):
                return path  # another process brought it while this one waited
            for url in file.urls:
                # A part belongs to its home: another may pack the file differently.
                part = target.with_name(f".{file.name}-{hashlib.sha256(url.encode()).hexdigest()[:8]}.part")
                if trouble := _bring(url, part, file, report):
                    troubles.append(f"\n  {url}: {trouble}")
                    continue
                with disk.opened(part) as stream:
                    path = target.with_name(file.name + packing(stream.read(6)))
                os.replace(part, path)
                for left in target.parent.glob(f".{file.name}-*.part"):
                    left.unlink(missing_ok=True)
                return path
    except OSError as error:
        raise DataError(f"{target}: could not be written: {disk.in_words(error)}") from error
    tried = "".join(troubles) or " no home is known"
    raise DataError(
        f"{file.name} could not be fetched:{tried}\nExpected {file.wanted()}. Where you have the file, put it into "
        f"{target.parent}, or name its folder in ZONEOUT_DATA."
    )


def _bring(url: str, part: Path, file: File, report: Progress) -> str:
    """Bring a part to its end and check it: "" or what went wrong. One that only broke off is left to be continued."""
    old = part.exists() and part.stat().st_size > 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        trouble = _transfer(url, part, file, report)
        here = part.stat().st_size if part.exists() else 0
        if trouble is None:
            if not (trouble := damage(part, file, downloaded=True)):
                return ""
            part.unlink()
            if not old:
                return trouble
            old = False  # what was left from another time did not belong to this: once more from the start
        elif here <= before:
            return trouble


def _transfer(url: str, part: Path, file: File, report: Progress) -> str | None:
    """Append to the part what the server still has: None when it says that this is all, else why it stopped."""
    here = part.stat().st_size if part.exists() else 0
    most = file.size + 2**24  # an archive may hold other files too, but no server shall fill the disk
    try:
        with _open(url, here) as response:
            status, headers = response.status, response.headers
            if status == 206 and not headers.get("Content-Range", "").startswith(f"bytes {here}-"):
                part.unlink(missing_ok=True)
                return "it sent another range than it was asked for"
            here = here if status == 206 else 0  # a server that knows no ranges begins again, and so do we
            length = headers.get("Content-Length", "")
            total = here + int(length) if length.isdecimal() else None
            with disk.opened(part, "ab" if here else "wb") as out:
                while (total or here) <= most and (block := _block(response)):
                    out.write(block)
                    here += len(block)
                    report(file.name, here, total)
                out.flush()
                os.fsync(out.fileno())
    except urllib.error.HTTPError as error:
        with error:
            # "Range not satisfiable": nothing is left to send, so the part is whole, or of something else.
            return None if error.code == 416 and here else f"{error.code} {error.reason}"
    except _BrokenError as error:
        return str(error)
    if (total or here) > most:
        part.unlink()
        return "it sends far more than expected"
    return None if total is None or here >= total else f"it broke off after {here:,} of {total:,} bytes"


class _BrokenError(Exception):
    """The connection failed, as against the disk."""


def _open(url: str, here: int) -> http.client.HTTPResponse:
    headers = {"User-Agent": "zoneout"} | ({"Range": f"bytes={here}-"} if here else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
        return cast(http.client.HTTPResponse, response)
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise _BrokenError(f"it cannot be reached ({reason or type(error).__name__})") from None


def _block(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_BLOCK)
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenError(f"it broke off ({error or type(error).__name__})") from None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One download at a time into a folder; whoever comes second waits."""
    with disk.opened(folder / ".lock", "ab") as lock:
        with contextlib.suppress(AttributeError, OSError):  # no such locks here: the checks still hold
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
