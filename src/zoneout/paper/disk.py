"""Files that are whole at any moment: written to the side, brought to the disk and renamed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


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
            why = text
        raise RunError(f"{folder}: {why}. What was written before is whole.") from error


def check_writable(folder: Path) -> None:
    """An error where nothing can be written in a folder, which need not be there yet; nothing is left of the try."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    with explained(folder), tempfile.TemporaryDirectory(dir=there):
        pass


def write_json(path: Path, value: Any, shared: bool = False) -> None:
    write_text(path, json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n", shared)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON: a line for every part of it, so that changes to it can be read."""
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in record.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def write_text(path: Path, text: str, shared: bool = False) -> None:
    """Write a text to the side and rename it; what is `shared` several processes may write at once."""
    side = path.with_name(f".{path.name}" + (f".{secrets.token_hex(4)}" if shared else ""))
    with open(side, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    side.replace(path)
    bring_to_disk(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    return fields_of(path.read_text(encoding="utf-8"))


def fields_of(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("expected named fields in braces, got brackets without end") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected named fields in braces, got {type(value).__name__}")
    return value


def write_tensors(path: Path, tensors: dict[str, Tensor], info: dict[str, Any] | None = None) -> None:
    """Write tensors to the side and rename them."""
    side = path.with_name(f".{path.name}")
    plain = {name: value.detach().contiguous() for name, value in tensors.items()}
    save_file(plain, side, {"info": json.dumps(info or {}, allow_nan=False)})
    side.chmod(0o644)  # safetensors lets nobody else read them
    with open(side, "rb+") as file:
        os.fsync(file.fileno())
    side.replace(path)
    bring_to_disk(path.parent)


def bring_to_disk(folder: Path) -> None:
    """Bring a folder's names to the disk, so that a rename is not lost."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest_of(path: Path, length: float = math.inf) -> str:
    """The SHA-256 of a file's first `length` bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
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
