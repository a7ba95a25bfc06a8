"""The loop over time in C: built with whatever compiler there is at first use, and kept.

Nothing is compiled at install. The library is kept in a folder of its own (`ZONEOUT_CACHE`, else the user's cache
folder), under a name made of the sources, the compiler, its flags and the processor, so that a change of any of these
builds anew. Where no compiler makes it `load` gives None, and the same loop runs in torch calls.
"""

from __future__ import annotations

import ctypes
import os
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from . import build

HERE = Path(__file__).parent
SOURCES = tuple(HERE / name for name in ("loop.c", "body.h", "loop.h", "functions.h", "step.h", "cells.h"))


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
        _reasons.append("ZONEOUT_NATIVE=0 is set")
        return None
    said: dict[str, str] = {}
    tried: list[build.Compiler] = []
    for command in dict.fromkeys((os.environ.get("CC") or "cc", "cc", "gcc", "clang")):
        try:
            compiler = build.find_compiler(shlex.split(command))
            if any(map(compiler.same_as, tried)):
                continue
            tried.append(compiler)
            return build.library(compiler, SOURCES, _declare)
        except (OSError, ValueError, build.CompilerError) as error:
            said[command] = str(error)
    _reasons.append(
        f"no C compiler built it ({'; '.join(f'{command}: {why}' for command, why in said.items())}); "
        "$CC names another to try first"
    )
    return None


_reasons: list[str] = []


def why_not() -> str:
    """Why `load` gave None."""
    return _reasons[-1] if _reasons else ""


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    mask: Any = library.zoneout_mask
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    mask.argtypes = [ctypes.POINTER(Stream), pointer, number, pointer, number, number, number, number, pointer]
    mask.restype = None
    for kind in ("float", "double"):
        work: Any = getattr(library, f"zoneout_work_size_{kind}")
        work.argtypes, work.restype = [ctypes.POINTER(Loop)], ctypes.c_int64
        for name in ("forward", "backward"):
            function: Any = getattr(library, f"zoneout_{name}_{kind}")
            function.argtypes, function.restype = [ctypes.POINTER(Loop)], None
        packed: Any = getattr(library, f"zoneout_packed_size_{kind}")
        packed.argtypes, packed.restype = [number] * 3, number
        product: Any = getattr(library, f"zoneout_product_{kind}")
        product.argtypes = [number, number, number, pointer, pointer, number, number, pointer, pointer, number]
        product.restype = None
    return library
