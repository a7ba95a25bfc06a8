"""Downloads of data files.

Every file has several addresses. An interrupted download is continued. A file is used only when it
is complete and its contents have been checked.
"""

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

from .. import disk
from . import cache
from .datasets import (
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
except ImportError:  # Windows has no file locks: two downloads of one file at once only take longer
    fcntl = None  # type: ignore[assignment]

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called during a download with the file's name, the bytes so far, and the total size if known."""

_TIMEOUT = 30.0  # seconds without data until a download is aborted
_BLOCK = 2**18


def fetch(
    name: str, folder: PathLike | None = None, *, progress: Progress | None = None
) -> list[tuple[Path, bool]]:
    """Download the files of a data set that are missing or damaged.

    Return the path of each file, and whether it was downloaded now. Files go to `folder`, or to the
    cache. A file that exists and is good is kept. A damaged file in the same folder is replaced; if
    its name differs from the name of the new file, it is renamed to end in `.damaged`. A damaged
    file in ZONEOUT_DATA is an error, because only the user may remove it.
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
    """Download a file from the first address that sends it complete and unaltered; return its path.

    The data go to a temporary file whose name ends in `.part`. The file is renamed after its
    contents have been checked. An interrupted download is continued. The file is stored as it was
    sent, compressed or not.
    """
    target = folder / file.path
    report = progress or (lambda name, here, total: None)
    troubles = []
    try:
        cache.create_folder(target.parent)
        with _alone(target.parent):
            if (path := find_in(folder, file)) and not damage(path, file):
                return path  # another process has downloaded it while this one waited for the lock
            for url in file.urls:
                # Each address has a separate part file: another server may compress differently.
                part = target.with_name(
                    f".{file.name}-{hashlib.sha256(url.encode()).hexdigest()[:8]}.part"
                )
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
    tried = "".join(troubles) or " no address is known"
    raise DataError(
        f"{file.name} could not be downloaded:{tried}\nExpected {file.wanted()}. If you have the "
        "file, put it into "
        f"{target.parent}, or set ZONEOUT_DATA to the folder that contains it."
    )


def _bring(url: str, part: Path, file: File, report: Progress) -> str:
    """Complete a part file from one address and check it; return "" or an error message.

    If the transfer only broke off, the part file is kept, so that it can be continued.
    """
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
            old = False  # the old part file had other contents: try once more from the start
        elif here <= before:
            return trouble


def _transfer(url: str, part: Path, file: File, report: Progress) -> str | None:
    """Append the missing bytes to the part file; return None if it is complete, else the reason."""
    here = part.stat().st_size if part.exists() else 0
    most = file.size + 2**24  # an archive may contain other files too, but must not fill the disk
    try:
        with _open(url, here) as response:
            status, headers = response.status, response.headers
            if status == 206 and not headers.get("Content-Range", "").startswith(f"bytes {here}-"):
                part.unlink(missing_ok=True)
                return "the server sent another range than requested"
            here = here if status == 206 else 0  # without ranges the server sends the whole file
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
            # 416, range not satisfiable: no bytes are left to send. The part file is complete, or
            # it has other contents.
            return None if error.code == 416 and here else f"{error.code} {error.reason}"
    except _BrokenError as error:
        return str(error)
    if (total or here) > most:
        part.unlink()
        return "the server sends far more than expected"
    return (
        None
        if total is None or here >= total
        else f"the transfer broke off after {here:,} of {total:,} bytes"
    )


class _BrokenError(Exception):
    """The connection failed (not the disk)."""


def _open(url: str, here: int) -> http.client.HTTPResponse:
    headers = {"User-Agent": "zoneout"} | ({"Range": f"bytes={here}-"} if here else {})
    try:
        response = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=_TIMEOUT
        )
        return cast(http.client.HTTPResponse, response)
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise _BrokenError(
            f"the server cannot be reached ({reason or type(error).__name__})"
        ) from None


def _block(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_BLOCK)
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenError(f"the transfer broke off ({error or type(error).__name__})") from None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a folder, so that only one process at a time downloads into it; other processes wait."""
    with disk.opened(folder / ".lock", "ab") as lock:
        # Without file locks (Windows, some file systems) the checksums still protect the files.
        with contextlib.suppress(AttributeError, OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
