"""File access: all files of runs, sweeps, data and reports are opened here.

The files may come from an untrusted source, so these rules hold:

* Only regular files are read. A pipe or a device is refused immediately, so nothing waits for it.
* A written file is complete at every moment: the content goes to a temporary file, which is flushed
  to disk (fsync) and then renamed.
* No file is written through a symbolic link. The names of temporary files are random, so that an
  attacker cannot predict them.
* Symbolic links to folders are followed, because users move folders. Exception: folders in which a
  run removes files (see `own_folder`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .console import shown


class RunError(Exception):
    """An error of a run, with a message for the user."""


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Replace errors of the operating system about files by a `RunError` with a clear message."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else None
        text = str(error)
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text:
            why = "the disk is full; free some space and continue with --resume"
        elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
            why = "it may not be written to; choose another folder or change its permissions"
        elif number in (errno.ENOTDIR, errno.EEXIST):
            why = "it is not a folder; choose another name"
        else:
            why = in_words(error)
        raise RunError(f"{folder}: {why}. Files that were written before are complete.") from error


def check_writable(folder: Path) -> None:
    """Raise if a folder is not writable; the folder need not exist yet. The test leaves no file."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    with explained(folder), tempfile.TemporaryDirectory(dir=existing):
        pass


def in_words(error: Exception) -> str:
    """Return the message of an error; for an OSError, the file and the reason."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def reason(error: Exception) -> str:
    """Return the reason of an error, for a message that already has the file name."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


# --- opening --------------------------------------------------------------------------------------

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}


def opened(path: Path, mode: str = "rb") -> IO[bytes]:
    """Open a regular file; raise OSError for anything else, and for writing to a symbolic link."""
    return open(path, mode, opener=_open_plain)


def _open_plain(path: str, flags: int) -> int:
    writing = flags & (os.O_WRONLY | os.O_RDWR)
    # O_NONBLOCK: opening a pipe would otherwise wait for the other end. Windows has neither flag.
    flags |= getattr(os, "O_NONBLOCK", 0) | (getattr(os, "O_NOFOLLOW", 0) if writing else 0)
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if writing and os.path.islink(path):
            raise OSError(
                error.errno, "it is a symbolic link, and no file is written through one", path
            ) from None
        if error.errno == errno.ENXIO:  # a pipe without a reader, or a socket
            raise OSError(errno.EINVAL, "expected a file, got a pipe or a socket", path) from None
        raise
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        found = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise OSError(errno.EINVAL, f"expected a file, got {found}", path)
    return handle


def check_plain(path: Path) -> None:
    """Raise OSError if a file, which another library will open, is not a regular file."""
    opened(path).close()


def own_folder(path: Path) -> Path:
    """Create a folder if it is missing, and return it; raise OSError if it is a symbolic link.

    For folders in which files are removed.
    """
    if path.is_symlink():
        raise OSError(
            errno.ELOOP,
            "it is a symbolic link, and nothing is removed or written through one",
            str(path),
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


# --- writing --------------------------------------------------------------------------------------

_SIDE = re.compile(r"\..+\.[0-9a-f]{16}")


def side_of(path: Path) -> Path:
    """Return a path with a random name in the same folder, for a temporary file."""
    return path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}")


def is_side(name: str) -> bool:
    """Return whether a name is from `side_of`: a temporary file, left by a killed process."""
    return _SIDE.fullmatch(name) is not None


def clear_sides(folder: Path) -> None:
    """Remove the temporary files of killed processes from a folder.

    No other process may be writing to the folder at the same time.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if is_side(path.name):
            _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Provide a temporary path to write to, and rename it to `path` at the end.

    After an error the temporary file is removed.
    """
    side = side_of(path)
    try:
        yield side
        os.replace(side, path)
    except BaseException:
        _remove(side)
        raise
    bring_to_disk(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file: to a temporary file first, which is then renamed."""
    with replacing(path) as side, opened(side, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a value to a JSON file."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record to a JSON file, with one line per field, so that diffs are easy to read."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}"
        for name, value in record.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def write_tensors(
    path: Path, tensors: dict[str, Tensor], info: dict[str, Any] | None = None
) -> None:
    """Write tensors in the safetensors format: to a temporary file first, which is then renamed."""
    plain = {name: value.detach().contiguous() for name, value in tensors.items()}
    with replacing(path) as side:
        opened(side, "xb").close()  # create the file here, since safetensors would follow a link
        save_file(plain, side, {"info": json.dumps(info or {}, allow_nan=False)})
        side.chmod(0o644)  # safetensors creates files that only the owner can read
        with opened(side, "rb+") as file:
            os.fsync(file.fileno())


def bring_to_disk(folder: Path) -> None:
    """Flush a folder's entries to disk (fsync), so that a rename is not lost in a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- reading --------------------------------------------------------------------------------------


def read_bytes(path: Path) -> bytes:
    """Return the contents of a regular file."""
    with opened(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Return the text of a regular file in UTF-8."""
    return read_bytes(path).decode()


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    return fields_of(read_text(path))


def fields_of(text: str) -> dict[str, Any]:
    """Parse a JSON object; raise ValueError if it is not one, or if a number is not finite."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected named fields in braces, got {type(value).__name__}")
    return value


def parse_json(text: str) -> Any:
    """Parse JSON; raise ValueError if it is not valid, or has NaN or an infinite number."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("expected a few levels of brackets, got too many levels") from None


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"expected finite numbers, got {text[:20]}")
    return value


def is_number(value: Any) -> bool:
    """Return whether a value is a number that fits in a finite float."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


# The kinds of fields in a file: the description for error messages, and the test for a value.
FIELDS: dict[str, tuple[str, Any]] = {
    "count": (
        "a whole number",
        lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**63,
    ),
    "number": ("a finite number", is_number),
    "numbers": (
        "a list of finite numbers",
        lambda v: isinstance(v, list) and all(map(is_number, v)),
    ),
    "text": ("a string", lambda v: isinstance(v, str)),
    "flag": ("true or false", lambda v: isinstance(v, bool)),
    "fields": ("named fields in braces", lambda v: isinstance(v, dict)),
}


def check_fields(
    fields: dict[str, Any], kinds: dict[str, str], optional: dict[str, str] | None = None
) -> None:
    """Raise ValueError if a field is missing or has a value of the wrong kind (see `FIELDS`)."""
    if missing := [name for name in kinds if name not in fields]:
        raise ValueError(f"there is no field {missing[0]!r} in it")
    for name, kind in (*kinds.items(), *(optional or {}).items()):
        expected, good = FIELDS[kind]
        if name in fields and not good(fields[name]):
            raise ValueError(f"{name}: expected {expected}, got {shown(fields[name])}")


def digest_of(path: Path, length: float = math.inf) -> str:
    """Return the SHA-256 of the first `length` bytes of a file."""
    digest = hashlib.sha256()
    with opened(path) as file:
        while length > 0 and (block := file.read(int(min(length, 2**20)))):
            digest.update(block)
            length -= len(block)
    return digest.hexdigest()


def tensor_digest(tensors: dict[str, Tensor], info: dict[str, Any]) -> str:
    """Return the SHA-256 of tensors and their notes. The safetensors format has no checksum."""
    digest = hashlib.sha256(json.dumps(info, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def free_folder(base: Path) -> Path:
    """Return a folder that does not exist yet: `base`, or `base`-2, `base`-3 and so on."""
    number, folder = 1, base
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder
