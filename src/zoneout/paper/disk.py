"""The one place where files are opened: those of runs, sweeps, data and reports, which may come from anybody.

What is read is a plain file: a pipe or a device is refused, never waited for. What is written is whole at any moment
(written to the side, brought to the disk and renamed), and never goes through a symbolic link: the names on the side
cannot be foreseen. Folders are followed, since users move them; those in which runs remove things are not.
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

from .streams import shown


class RunError(Exception):
    """Something about a run that its user should know, as a sentence."""


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn what the system says about a file into a sentence."""
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
        raise RunError(f"{folder}: {why}. What was written before is whole.") from error


def check_writable(folder: Path) -> None:
    """An error where nothing can be written in a folder, which need not be there yet; nothing is left of the try."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    with explained(folder), tempfile.TemporaryDirectory(dir=there):
        pass


def in_words(error: Exception) -> str:
    """What an error says; of one of the system's, the file and what is wrong with it."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def reason(error: Exception) -> str:
    """What is wrong with a file whose name is said already."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


# --- opening ---------------------------------------------------------------------------------------

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}


def opened(path: Path, mode: str = "rb") -> IO[bytes]:
    """Open a plain file; anything else, and for writing a symbolic link, is an OSError at once."""
    return open(path, mode, opener=_open_plain)


def _open_plain(path: str, flags: int) -> int:
    writing = flags & (os.O_WRONLY | os.O_RDWR)
    # Without blocking: a pipe would be waited for. Windows has neither flag.
    flags |= getattr(os, "O_NONBLOCK", 0) | (getattr(os, "O_NOFOLLOW", 0) if writing else 0)
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if writing and os.path.islink(path):
            raise OSError(error.errno, "it is a symbolic link, and no file is written through one", path) from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, a socket
            raise OSError(errno.EINVAL, "expected a file, got a pipe or a socket", path) from None
        raise
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        found = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise OSError(errno.EINVAL, f"expected a file, got {found}", path)
    return handle


def check_plain(path: Path) -> None:
    """An OSError where something is not a plain file, for files that others open by their names."""
    opened(path).close()


def own_folder(path: Path) -> Path:
    """A folder, made if it is not there, in which things are removed: an OSError where it is a symbolic link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link, and nothing is removed or written through one", str(path))
    path.mkdir(parents=True, exist_ok=True)
    return path


# --- writing ---------------------------------------------------------------------------------------

_SIDE = re.compile(r"\..+\.[0-9a-f]{16}")


def side_of(path: Path) -> Path:
    """A name beside a path that nobody can foresee."""
    return path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}")


def is_side(name: str) -> bool:
    """Whether a name is one of `side_of`: what a process that was killed leaves."""
    return _SIDE.fullmatch(name) is not None


def clear_sides(folder: Path) -> None:
    """Remove what processes that were killed have left in a folder, which nobody else may be writing in."""
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
    """A path to write to, which then takes the place of `path`; after an error nothing is left of it."""
    side = side_of(path)
    try:
        yield side
        os.replace(side, path)
    except BaseException:
        _remove(side)
        raise
    bring_to_disk(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file to the side and rename it."""
    with replacing(path) as side, opened(side, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON: a line for every part of it, so that changes to it can be read."""
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in record.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def write_tensors(path: Path, tensors: dict[str, Tensor], info: dict[str, Any] | None = None) -> None:
    """Write tensors to the side and rename them."""
    plain = {name: value.detach().contiguous() for name, value in tensors.items()}
    with replacing(path) as side:
        opened(side, "xb").close()  # safetensors itself would follow a link
        save_file(plain, side, {"info": json.dumps(info or {}, allow_nan=False)})
        side.chmod(0o644)  # safetensors lets nobody else read them
        with opened(side, "rb+") as file:
            os.fsync(file.fileno())


def bring_to_disk(folder: Path) -> None:
    """Bring a folder's names to the disk, so that a rename is not lost."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- reading ---------------------------------------------------------------------------------------


def read_bytes(path: Path) -> bytes:
    """What is in a plain file."""
    with opened(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """The text in a plain file in UTF-8."""
    return read_bytes(path).decode()


def read_json(path: Path) -> dict[str, Any]:
    """The named fields in a file."""
    return fields_of(read_text(path))


def fields_of(text: str) -> dict[str, Any]:
    """The named fields of a JSON text, all of whose numbers are finite, or a ValueError."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected named fields in braces, got {type(value).__name__}")
    return value


def parse_json(text: str) -> Any:
    """The value of a JSON text, or a ValueError; NaN and infinite numbers, which JSON has not, are refused."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("expected a few brackets, got brackets without end") from None


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"expected finite numbers, got {text[:20]}")
    return value


def is_number(value: Any) -> bool:
    """Whether a value is a number that a float can be."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


FIELDS: dict[str, tuple[str, Any]] = {  # what a field of a file can be: in words, and whether a value is that
    "count": ("a whole number", lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**63),
    "number": ("a finite number", is_number),
    "text": ("a text", lambda v: isinstance(v, str)),
    "flag": ("true or false", lambda v: isinstance(v, bool)),
    "fields": ("named fields in braces", lambda v: isinstance(v, dict)),
}


def check_fields(fields: dict[str, Any], kinds: dict[str, str], optional: dict[str, str] | None = None) -> None:
    """A ValueError where a field is missing, or is not what it has to be (see `FIELDS`)."""
    if missing := [name for name in kinds if name not in fields]:
        raise ValueError(f"there is no field {missing[0]!r} in it")
    for name, kind in (*kinds.items(), *(optional or {}).items()):
        expected, good = FIELDS[kind]
        if name in fields and not good(fields[name]):
            raise ValueError(f"{name}: expected {expected}, got {shown(fields[name])}")


def digest_of(path: Path, length: float = math.inf) -> str:
    """The SHA-256 of a file's first `length` bytes."""
    digest = hashlib.sha256()
    with opened(path) as file:
        while length > 0 and (block := file.read(int(min(length, 2**20)))):
            digest.update(block)
            length -= len(block)
    return digest.hexdigest()


def tensor_digest(tensors: dict[str, Tensor], info: dict[str, Any]) -> str:
    """The SHA-256 of tensors and what is noted beside them: safetensors has none of its own."""
    digest = hashlib.sha256(json.dumps(info, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
