"""The build cache: what was compiled, kept on disk from one process to the next.

The name of a file says what it was made from and, by a digest, what is in it: one that a crash or a full disk has cut
short does not fit its name, and is made anew rather than loaded.

What is kept here is run, so nobody but the user may have written it. The folder and each file must belong to the user
and must not be writable by the group or by others (an access control list that lets somebody write shows in the group's
bits). The digest is no protection: who can write a file can also name it.

The folders above the cache are not checked, and need not be. The cache folder is opened once, that open folder is
checked, and files are looked up in it, never by their path. Who can write to a folder above can put another one in the
cache's place, but it is refused unless it is the user's as well, and then so is what lies in it. A folder of the user's
own inside of /tmp is therefore as good as one at home. A file is opened once too: what is checked is what is returned.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shlex
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_POSIX = os.name == "posix"  # elsewhere files have other rights than these, and folders no descriptors
_SAFELY = sum(
    getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")
)  # no links, no waiting at FIFOs


def cache_folder() -> Path:
    """Where built libraries are kept; an OSError where there is no such place."""
    if named := os.environ.get("ZONEOUT_CACHE"):
        return Path(named).absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zoneout"
    except RuntimeError as error:  # a user without a home
        raise OSError(str(error)) from None


def create_cache_folder() -> None:
    """Create the cache folder, for the user alone, where it is missing."""
    cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)


def find(name: str, ending: str, max_age: float | None = None) -> bytes | None:
    """Return the content kept under a name, or None; a file that is damaged, unsafe or too old (s) is removed."""
    with suppress(OSError), _cache() as folder:
        for entry in folder.entries():
            if entry.startswith(f"{name}-") and entry.endswith(ending):
                content = folder.read(entry, max_age)
                if content is not None and entry == _full_name(name, ending, content):
                    return content
                with suppress(OSError):
                    os.unlink(folder.at(entry), dir_fd=folder.fd)
    return None


def keep(name: str, ending: str, content: bytes) -> None:
    """Keep it, whole or not at all; where the folder cannot be written to, this process alone has it."""
    with suppress(OSError):
        create_cache_folder()
        with _cache() as folder:
            folder.write(_full_name(name, ending, content), content)


def scratch_places() -> Iterator[str | None]:
    """Where a temporary folder can be made, as `tempfile` takes it: where the system says (None), then in the cache.

    The cache is given by its descriptor, for the reason above; where there is no /proc the first has to do.
    """
    yield None
    with suppress(OSError):
        create_cache_folder()
        with _cache() as folder:
            if os.path.isdir(opened := f"/proc/{os.getpid()}/fd/{folder.fd}"):
                yield opened


class _Folder(NamedTuple):
    """An open folder: a path may come to mean another one, a descriptor does not."""

    path: Path
    fd: int | None  # None where folders have no descriptors

    def at(self, entry: str) -> str:
        """What to call a file of this folder, beside `dir_fd`."""
        return entry if self.fd is not None else str(self.path / entry)

    def entries(self) -> list[str]:
        return sorted(os.listdir(self.path if self.fd is None else self.fd))

    def read(self, entry: str, max_age: float | None) -> bytes | None:
        """Read a file that nobody but the user can have written; None, after a warning, if it is anything else."""
        try:
            fd = os.open(self.at(entry), os.O_RDONLY | _SAFELY, dir_fd=self.fd)
        except OSError as error:
            if error.errno == errno.ENOENT:  # somebody empties the folder just now
                return None
            return self._refuse(entry, "a symbolic link" if error.errno == errno.ELOOP else f"an error: {error}")
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return self._refuse(entry, "something else")
            if danger := _danger(status):
                return self._refuse(entry, f"one that {danger}")
            if max_age is not None and not 0 <= time.time() - status.st_mtime < max_age:
                return None
            with open(fd, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(fd)

    def _refuse(self, entry: str, what: str) -> None:
        _warn_once(
            f"cache file {self.path / entry}: expected a regular file of your own that nobody else can write to, "
            f"got {what}; it is not used, and what it was for is compiled anew."
        )

    def write(self, entry: str, content: bytes) -> None:
        part = self.at(f".part-{secrets.token_hex(8)}")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o600, dir_fd=self.fd)
        try:
            with open(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(fd)
            os.replace(part, self.at(entry), src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(part, dir_fd=self.fd)
            raise


@contextmanager
def _cache() -> Iterator[_Folder]:
    """Open the cache folder; an OSError where it is missing, or, after a warning, where others could write to it."""
    path = cache_folder()
    if not _POSIX:
        yield _Folder(path, None)
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        status = os.fstat(fd)
        if danger := _danger(status):
            mine = status.st_uid == os.geteuid()
            _warn_once(
                f"cache folder {path}: expected one of your own that nobody else can write to, got one that {danger}; "
                + (
                    f"run `chmod go-w {shlex.quote(str(path))}`"
                    if mine
                    else "set ZONEOUT_CACHE to a folder of your own"
                )
                + ". Until then every process compiles for itself."
            )
            raise PermissionError(danger)
        yield _Folder(path, fd)
    finally:
        os.close(fd)


def _danger(status: os.stat_result) -> str:
    """Who else could have written a file or folder, as a predicate, or "" if nobody."""
    if not _POSIX:
        return ""
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=2)


def _full_name(name: str, ending: str, content: bytes) -> str:
    return f"{name}-{hashlib.sha256(content).hexdigest()[:20]}{ending}"
