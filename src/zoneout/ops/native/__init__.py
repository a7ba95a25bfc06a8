"""The loop over time in C: built with whatever compiler there is at first use, and kept.

Nothing is compiled at install. The library is kept in a folder of its own (`ZONEOUT_CACHE`, else the user's cache
folder), under a name made of the sources, the compiler, its flags and the processor, so that a change of any of these
builds anew. Where no compiler is found `load` gives None, and the same loop runs in torch calls.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCES = ("loop.c", "body.h", "loop.h")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
TUNED = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())


class Stream(ctypes.Structure):
    """`Stream` of loop.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("mode", "zero", "hold", "sees_step", "sees_example", "sees_unit")),
        ("high", ctypes.c_int64),
        ("plane", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("rate", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
    ]


class Loop(ctypes.Structure):
    """`Loop` of loop.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("cell", "steps", "batch", "hidden", "outputs", "threads")),
        *((name, ctypes.c_int64) for name in ("first_step", "reverse")),
        *((name, ctypes.c_void_p) for name in ("counts", "offsets", "lengths", "examples", "resets")),
        *((name, Stream) for name in ("cell_noise", "hidden_noise", "update_noise")),
        ("scale_h", ctypes.c_void_p),
        ("norm", ctypes.c_int64),
        ("norm_given", ctypes.c_int64),
        ("eps", ctypes.c_double),
        ("inputs", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("x", "w_ih", "w_hh", "b_x", "b_h", "w_hr", "norm_x", "norm_h")),
        *((name, ctypes.c_void_p) for name in ("norm_c", "norm_c_shift", "h0", "c0", "reset_h", "reset_c")),
        *((name, ctypes.c_void_p) for name in ("gates", "gh", "y", "c", "mean_x", "var_x", "mean_h", "var_h")),
        *((name, ctypes.c_void_p) for name in ("mean_c", "var_c", "dy", "dcells", "dh", "dc", "dreset_h", "dreset_c")),
        *((name, ctypes.c_void_p) for name in ("dgx", "dgh", "dsh", "du", "u", "dnc", "chat", "dx")),
        *((name, ctypes.c_void_p) for name in ("dscale_x", "dscale_h", "dscale_c", "dshift_c", "work")),
    ]


@cache
def load() -> ctypes.CDLL | None:
    """The compiled loop, or None where it cannot be had; `why_not` then says why."""
    if os.environ.get("ZONEOUT_NATIVE", "1") == "0":
        return _none("ZONEOUT_NATIVE=0 is set")
    compiler = _compiler()
    if compiler is None:
        return _none("no C compiler was found (looked for $CC, cc, gcc and clang)")
    try:
        return _build(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        return _none(str(error))


_reasons: list[str] = []


def why_not() -> str:
    """Why `load` gave None."""
    return _reasons[-1] if _reasons else ""


def _none(reason: str) -> ctypes.CDLL | None:
    _reasons.append(reason)
    return None


def _compiler() -> list[str] | None:
    asked = shlex.split(os.environ.get("CC", ""))
    for candidate in [asked] if asked else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(candidate[0]):
            return candidate
    return None


def cache_folder() -> Path:
    """Where built libraries are kept."""
    if named := os.environ.get("ZONEOUT_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zoneout"


def _build(compiler: list[str]) -> ctypes.CDLL | None:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    said = [(HERE / name).read_bytes() for name in SOURCES]
    said += [
        version.encode(),
        " ".join(compiler).encode(),
        _processor().encode(),
        repr((FLAGS, TUNED)).encode(),
    ]
    name = f"loop-{hashlib.sha256(b''.join(said)).hexdigest()[:20]}.so"
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:  # a read-only home: build for this process alone
        folder = Path(tempfile.mkdtemp(prefix="zoneout-"))
    target = folder / name
    if target.exists():
        try:
            return _declare(ctypes.CDLL(str(target)))
        except OSError:
            target.unlink(missing_ok=True)
    errors = ""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for tuned in TUNED:
            for openmp, link in ((["-fopenmp"], []), (["-fopenmp"], ["-fopenmp"]), ([], [])):
                # First without linking an OpenMP runtime: torch has loaded its own for everyone to use, and two of
                # them would fight over the cores.
                made, out = Path(scratch) / "loop.o", Path(scratch) / "loop.so"
                steps = (
                    [*compiler, *FLAGS, *tuned, *openmp, "-c", str(HERE / "loop.c"), "-o", str(made)],
                    [*compiler, "-shared", str(made), "-o", str(out), *link, "-lm"],
                )
                done = [subprocess.run(step, capture_output=True, text=True) for step in steps]
                if all(step.returncode == 0 for step in done):
                    try:
                        _declare(ctypes.CDLL(str(out)))
                    except OSError as error:
                        errors = str(error)
                        continue
                    os.replace(out, target)
                    return _declare(ctypes.CDLL(str(target)))
                errors = next(step.stderr for step in done if step.returncode != 0)
    return _none(f"{' '.join(compiler)} could not build the loop: {errors.strip()[:500]}")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.zoneout_scale.argtypes = [
        ctypes.POINTER(Stream), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    library.zoneout_scale.restype = None
    for kind in ("float", "double"):
        work: Any = getattr(library, f"zoneout_work_size_{kind}")
        work.argtypes, work.restype = [ctypes.POINTER(Loop)], ctypes.c_int64
        for name in ("forward", "backward"):
            function: Any = getattr(library, f"zoneout_{name}_{kind}")
            function.argtypes, function.restype = [ctypes.POINTER(Loop)], None
    return library


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    except OSError:
        return platform.platform() + platform.processor()
