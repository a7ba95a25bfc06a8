"""The loop over time in C: from the wheel, or built at first use with a compiler, and cached.

A platform's wheel has the library of the built-in cells (`prebuilt.py`). Otherwise it is built at
first use, never at install time, and cached in a folder of its own (`ZONEOUT_CACHE`, else the
user's cache folder). Its name is made of the sources, the compiler, its flags and the processor, so
a change of any of these triggers a new build. If no compiler can build it, `load` returns None, and
the same loop runs in torch calls.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ...cells import CELLS
from ...definition import Definition
from ...definition.c import print_cell
from ...extras import install_command
from . import build, prebuilt

HERE = Path(__file__).parent
SOURCES = tuple(
    HERE / name for name in ("loop.c", "body.h", "loop.h", "functions.h", "step.h", "cells.h")
)


class Stream(ctypes.Structure):
    """`Stream` of loop.h."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("mode", "zero", "hold", "sees_step", "sees_example", "sees_unit")
        ),
        ("high", ctypes.c_int64),
        ("plane", ctypes.c_int64),
        ("seed", ctypes.c_void_p),
        ("rate", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("given", ctypes.c_void_p),
        ("dgiven", ctypes.c_void_p),
    ]


_number, _pointer = ctypes.c_int64, ctypes.c_void_p
STATES, PARAMETERS, SLOTS, PRODUCTS = 4, 8, 2, 16  # the maximum of a cell


class Sum(ctypes.Structure):
    """`Sum` of body.h."""

    _fields_ = [
        *((name, _number) for name in ("m", "k", "n", "lda", "ldb", "ldc", "add", "threads")),
        *((name, _pointer) for name in ("a", "b", "c", "work")),
    ]


class Loop(ctypes.Structure):
    """`Loop` of loop.h."""

    moving = ("first_step",)
    _fields_ = [
        ("cell", _pointer),
        *((name, _number) for name in ("steps", "batch", "hidden", "outputs", "threads", "heads")),
        *((name, _number) for name in ("first_step", "reverse")),
        *((name, _pointer) for name in ("counts", "offsets", "lengths", "examples", "resets")),
        ("state_noise", Stream * STATES),
        ("update_noise", Stream),
        ("dropped", Stream * STATES),
        ("added", Stream * STATES),
        ("scale_h", _pointer),
        ("norm", _number),
        ("norm_given", _number),
        ("eps", ctypes.c_double),
        ("inputs", _number),
        *((name, _pointer) for name in ("x", "w_ih", "w_hh", "b_x", "b_h", "w_hr")),
        ("parameters", _pointer * PARAMETERS),
        ("matrices", _pointer * PRODUCTS),
        ("matrix_rows", _number * PRODUCTS),
        ("matrix_columns", _number * PRODUCTS),
        *((name, _pointer) for name in ("norm_x", "norm_h", "norm_c", "norm_c_shift")),
        ("initial", _pointer * STATES),
        ("reset_to", _pointer * STATES),
        ("gates", _pointer),
        ("states", _pointer * STATES),
        ("hats", _pointer),
        ("slots", _pointer * SLOTS),
        ("inner", _pointer * PRODUCTS),
        *(
            (name, _pointer)
            for name in ("mean_x", "var_x", "mean_h", "var_h", "mean_c", "var_c", "dy")
        ),
        ("dseen", _pointer * STATES),
        ("dstates", _pointer * STATES),
        ("dreset", _pointer * STATES),
        *((name, _pointer) for name in ("dgx", "dgh", "dsh", "du", "u", "dnc", "chat", "dx")),
        *((name, _pointer) for name in ("dscale_x", "dscale_h", "dscale_c", "dshift_c")),
        ("dparameters", _pointer * PARAMETERS),
        ("dinner", _pointer * PRODUCTS),
        ("ins", _pointer * PRODUCTS),
        ("work", _pointer),
    ]


@cache
def load() -> ctypes.CDLL | None:
    """Return the compiled loop, or None if there is none; `why_not` returns the reason.

    The environment variable ZONEOUT_NATIVE chooses: 0 for no compiled loop, "compile" for one that
    is compiled here although the wheel has one.
    """
    shipped = os.environ.get("ZONEOUT_NATIVE", "1") == "1"
    if shipped and (library := prebuilt.load(SOURCES, _declare)) is not None:
        return library
    return _built(lambda compiler: build.library(compiler, SOURCES, _declare))


def _built(attempt: Callable[[build.Compiler], ctypes.CDLL]) -> ctypes.CDLL | None:
    """Return the library from the first compiler that can build it, or None."""
    if os.environ.get("ZONEOUT_NATIVE", "1") == "0":
        _reasons.append("ZONEOUT_NATIVE=0 is set")
        return None
    failures: dict[str, str] = {}
    tried: list[build.Compiler] = []
    for command in _commands():
        try:
            compiler = build.find_compiler(shlex.split(command))
            if any(map(compiler.same_as, tried)):
                continue
            tried.append(compiler)
            return attempt(compiler)
        except (OSError, ValueError, build.CompilerError) as error:
            failures[command] = str(error)
    _reasons.append(
        "no C compiler built it "
        f"({'; '.join(f'{command}: {why}' for command, why in failures.items())}); $CC names "
        f"another to try first, and {install_command('compiler')} brings one"
    )
    return None


def _commands() -> list[str]:
    """Return the compilers to try, in this order; the last is that of the extra `compiler`."""
    commands = [os.environ.get("CC") or "cc", "cc", "gcc", "clang"]
    if importlib.util.find_spec("ziglang") is not None:
        commands.append(shlex.join([sys.executable, "-m", "ziglang", "cc"]))
    return list(dict.fromkeys(commands))


# --- cells ----------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """The addresses of a cell's functions, for each number type."""

    float: int
    double: int
    library: ctypes.CDLL | None  # contains the functions; must stay loaded


@cache
def cell(definition: Definition) -> Cell | None:
    """Return the compiled functions of a cell, or None if they cannot be built.

    A cell that is not built in is compiled into a library of its own.
    """
    loop = load()
    if loop is None:
        return None
    for number, known in enumerate(CELLS.values()):
        if known == definition:
            return Cell(loop.zoneout_cell_float(number), loop.zoneout_cell_double(number), None)
    text = cell_text(definition)
    library = _built(lambda compiler: build.library_of_text(compiler, "cell", text, _declare_cell))
    if library is None:
        return None
    single, double = (
        ctypes.c_char.in_dll(library, f"zoneout_own_cell_{kind}") for kind in ("float", "double")
    )
    return Cell(ctypes.addressof(single), ctypes.addressof(double), library)


def cell_text(definition: Definition) -> str:
    """Return a C file with the functions of one cell, for both types.

    It includes no headers of ours.
    """
    step, body = (HERE / "step.h").read_text(), print_cell(definition)
    parts = [
        (HERE / "functions.h").read_text(),
        "#include <stddef.h>",
        "#pragma GCC visibility push(default)",
    ]
    for kind in ("float", "double"):
        macros = {
            "REAL": kind,
            "NAME(x)": f"x##_{kind}",
            "STEP": "NAME(Step)",
            "CELL": "NAME(Cell)",
        }
        macros |= {"FUNCTION": "NAME(Function)"}
        parts += [f"#define {name} {value}" for name, value in macros.items()]
        parts += [step, body]
        parts += [f"#undef {name.partition('(')[0]}" for name in macros]
    return "\n".join(parts) + "\n"


def _declare_cell(library: ctypes.CDLL) -> ctypes.CDLL:
    try:
        for kind in ("float", "double"):
            ctypes.c_char.in_dll(library, f"zoneout_own_cell_{kind}")
    except ValueError as error:  # ctypes raises it for a missing variable
        raise AttributeError(str(error)) from None
    return library


_reasons: list[str] = []


def why_not() -> str:
    """Return the reason why `load` returned None."""
    return _reasons[-1] if _reasons else ""


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    mask: Any = library.zoneout_mask
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    mask.argtypes = [
        ctypes.POINTER(Stream),
        pointer,
        number,
        pointer,
        number,
        number,
        number,
        number,
        pointer,
    ]
    mask.restype = None
    step: Any = library.zoneout_step_masks
    step.argtypes = [
        ctypes.POINTER(Stream), number, number, pointer, number, number, number, pointer,
    ]  # fmt: skip
    step.restype = None
    bits: Any = library.zoneout_bits
    bits.argtypes = [
        ctypes.POINTER(Stream),
        pointer,
        number,
        pointer,
        number,
        number,
        number,
        pointer,
    ]
    bits.restype = None
    for kind in ("float", "double"):
        cell: Any = getattr(library, f"zoneout_cell_{kind}")
        cell.argtypes, cell.restype = [number], pointer
        work: Any = getattr(library, f"zoneout_work_size_{kind}")
        work.argtypes, work.restype = [ctypes.POINTER(Loop)], ctypes.c_int64
        for name in ("forward", "backward"):
            function: Any = getattr(library, f"zoneout_{name}_{kind}")
            function.argtypes, function.restype = [pointer], None  # the address of a `Loop`
        packed: Any = getattr(library, f"zoneout_packed_size_{kind}")
        packed.argtypes, packed.restype = [number] * 3, number
        product: Any = getattr(library, f"zoneout_product_{kind}")
        product.argtypes = [
            number,
            number,
            number,
            pointer,
            pointer,
            number,
            number,
            pointer,
            pointer,
            number,
        ]
        product.restype = None
        of_sum: Any = getattr(library, f"zoneout_sum_size_{kind}")
        of_sum.argtypes, of_sum.restype = [number], number
        summed: Any = getattr(library, f"zoneout_sum_{kind}")
        summed.argtypes, summed.restype = [pointer], None  # the address of a `Sum`
    return library
