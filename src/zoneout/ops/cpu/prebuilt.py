"""Libraries of the loop that come with a wheel, so that no compiler is needed.

A wheel for one platform has a folder `prebuilt` beside this file, filled by `tools/wheels.py`. A
file is named after the processor level that it needs and after a digest of the sources. A library
of other sources is therefore never loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "prebuilt"
X86 = {"x86_64", "amd64"}  # Linux and macOS, Windows
LEVELS = {"AVX512": ("v4", "v3", "v2"), "AVX2": ("v3", "v2")}  # best first, by torch's name


def file_name(level: str, sources: Sequence[Path]) -> str:
    """Return the name of the library of these sources for a processor level."""
    # Lines may end differently in a checkout on Windows.
    content = b"".join(path.read_bytes().replace(b"\r\n", b"\n") for path in sources)
    return f"loop-{level}-{hashlib.sha256(content).hexdigest()[:20]}.so"


def levels() -> tuple[str, ...]:
    """Return the levels that this processor can run, best first.

    Levels of x86-64 are those of its psABI. torch has found the same instructions: AVX2 with FMA
    for v3, AVX-512 F, BW, CD, DQ and VL for v4.
    """
    machine = platform.machine().lower()
    if machine in X86:
        return LEVELS.get(torch.backends.cpu.get_cpu_capability(), ("v2",))
    return (machine,)  # aarch64, arm64


def load(
    sources: Sequence[Path], declare: Callable[[ctypes.CDLL], ctypes.CDLL]
) -> ctypes.CDLL | None:
    """Return the best library that fits this processor and these sources, or None."""
    for path in _fitting(sources):
        with suppress(OSError, AttributeError):  # no OpenMP runtime, another platform
            return declare(ctypes.CDLL(str(path)))
    return None


def _fitting(sources: Sequence[Path]) -> Iterator[Path]:
    for level in levels():
        path = FOLDER / file_name(level, sources)
        if path.is_file():
            yield path
