"""The build cache: compiled libraries, kept on disk from one process to the next.

A file name contains a digest of what the file was built from and a digest of its content. A file
that a crash or a full disk has truncated does not match its name. It is built again and not loaded.

The content of the cache is executed, so only the user may have written it. The folder and each file
must belong to the user and must not be writable by the group or by others. An access control list
that allows writing is visible in the group's bits. The digest is no protection: an attacker who can
write a file can also name it.

The folders above the cache are not checked, and this is safe. The cache folder is opened once, the
open folder is checked, and files are looked up in it, never by path. An attacker who can write to a
parent folder can replace the cache folder. The replacement is refused unless it also belongs to the
user, and then its content does too. A user's own folder inside /tmp is therefore as safe as one at
home. A file is also opened only once: the checked content is the returned content.
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

_POSIX = os.name == "posix"  # other systems have other file permissions and no folder descriptors
# Follow no links, do not block on FIFOs.
_SAFELY = sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))


def cache_folder() -> Path:
    """Return the folder for built libraries; raise OSError if the user has no such folder."""
    if named := os.environ.get("ZONEOUT_CACHE"):
        return Path(named).absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zoneout"
    except RuntimeError as error:  # the user has no home folder
        raise OSError(str(error)) from None


def create_cache_folder() -> None:
    """Create the cache folder if it is missing, accessible only to the user."""
    cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)


def find(name: str, ending: str, max_age: float | None = None) -> bytes | None:
    """Return the content stored under a name, or None.

    A file that is damaged, unsafe or older than `max_age` seconds is removed.
    """
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
    """Store content under a name, atomically.

    If the folder cannot be written to, nothing is stored and only this process has the content.
    """
    with suppress(OSError):
        create_cache_folder()
        with _cache() as folder:
            folder.write(_full_name(name, ending, content), content)


def scratch_places() -> Iterator[str | None]:
    """Yield places for a temporary folder, as `tempfile` takes them.

    The first is the system's default (None), the second is the cache. The cache is given by its
    descriptor, for the reason above. Without /proc only the first is available.
    """
    yield None
    with suppress(OSError):
        create_cache_folder()
        with _cache() as folder:
            if os.path.isdir(opened := f"/proc/{os.getpid()}/fd/{folder.fd}"):
                yield opened


class _Folder(NamedTuple):
    """An open folder: its path can be redirected to another folder, its descriptor cannot."""

    path: Path
    fd: int | None  # None if the system has no folder descriptors

    def at(self, entry: str) -> str:
        """Return the name of a file in this folder, for use with `dir_fd`."""
        return entry if self.fd is not None else str(self.path / entry)

    def entries(self) -> list[str]:
        return sorted(os.listdir(self.path if self.fd is None else self.fd))

    def read(self, entry: str, max_age: float | None) -> bytes | None:
        """Return the content of a file that only the user can have written.

        Warn and return None if it is anything else.
        """
        try:
            fd = os.open(self.at(entry), os.O_RDONLY | _SAFELY, dir_fd=self.fd)
        except OSError as error:
            if error.errno == errno.ENOENT:  # deleted by another process in the meantime
                return None
            return self._refuse(
                entry, "a symbolic link" if error.errno == errno.ELOOP else f"an error: {error}"
            )
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
            f"cache file {self.path / entry}: expected a regular file of your own that nobody else "
            f"can write to, got {what}; it is not used, and what it was for is compiled anew."
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
    """Open the cache folder; raise OSError if it is missing.

    If others could write to it, warn and raise PermissionError.
    """
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
                f"cache folder {path}: expected one of your own that nobody else can write to, got "
                f"one that {danger}; "
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
    """Return a predicate that says who else could have written this, or "" if no one could."""
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
