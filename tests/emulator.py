"""CUDA C++ on the CPU, to hold kernels to the reference where there is no GPU.

The source is compiled by the C++ compiler of the machine. Each thread of a block is a fiber with a
stack of its own; they take turns, and give way where threads wait for each other: at barriers,
shuffles, votes and products of a warp. The blocks of a cluster or of a cooperative launch run side
by side, at speeds that change at random; others one after another. Instructions written in assembly
become calls of functions named after them. What only timing, the order of memory or a special
function unit's rounding would show is not seen here.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zoneout.ops import cuda, recording
from zoneout.ops.cuda.runtime import blas, compiler
from zoneout.ops.memory import address
from zoneout.ops.sequence import packing, passes, products

KERNELS = ("batch", "small", "persistent", "warpgroup", "steps", "cell_steps", "diagonal")
HEADER = Path(__file__).with_name("emulator.h")
# Without the checks of jumps, which take one to another stack for a mistake.
OPTIONS = ["-std=c++17", "-Og", "-w", "-fPIC", "-fno-exceptions"]
OPTIONS += ["-fsanitize=alignment,bounds", "-U_FORTIFY_SOURCE"]
RACES = os.environ.get("ZONEOUT_RACES") == "1"  # in a process that has loaded ThreadSanitizer
if RACES:
    OPTIONS += ["-fsanitize=thread", "-g"]


def translated(text: str) -> str:
    """A kernel's source as the C++ compiler takes it."""
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];",
        r"\1 *\2 = (\1 *)emulated::shared();",
        text,
    )
    text = _each(r"\basm\b(?: volatile)?\s*\(", text, lambda found, inside: _call(inside))
    return _each(r'extern "C" __global__ void[^{};]*?(\w+)\(([^()]*)\)\s*\{', text, _with_entry)


def _each(pattern: str, text: str, new: Callable[[re.Match[str], str], str]) -> str:
    """What begins as the pattern says and ends where its last bracket is closed, made into
    something else.
    """
    out, at = [], 0
    for found in re.finditer(pattern, text):
        if found.start() < at:
            continue
        end = _closing(text, found.end() - 1)
        out += [text[at : found.start()], new(found, text[found.end() : end])]
        at = end + 1
    return "".join([*out, text[at:]])


def _closing(text: str, at: int) -> int:
    """Where the bracket at `at` is closed; brackets in strings do not count."""
    depth, quoted, both = 0, False, text[at] + {"(": ")", "{": "}"}[text[at]]
    for i in range(at, len(text)):
        quoted ^= text[i] == '"'
        if not quoted and text[i] in both:
            depth += 1 if text[i] == both[0] else -1
            if depth == 0:
                return i
    raise AssertionError("a bracket stays open")


def _call(inside: str) -> str:
    """What is between the brackets of an assembly statement, as a call of the function named
    after the instruction.
    """
    if "mma.sync" in inside:
        return "emulated::mma(how, sum, a, b0, b1)"
    if "HOW OUT" in inside:
        return "emulated::wgmma(TYPE == 1, sum, a, b)"
    operands: list[str] = []
    _each(r'"[=+]?[frhln]"\s*\(', inside, lambda _, operand: operands.append(operand) or "")
    instructions = re.findall(r"(?<![\w.])(?!selp)[a-z]\w*(?:(?:\.|::)\w+)+", inside.split('"')[1])
    if not instructions:
        return "(void)0"
    name, lines = re.sub(r"\W+", "_", instructions[-1]), "\n" * inside.count("\n")
    return f"emulated::{name}({', '.join(operands)}{lines})"


def _with_entry(found: re.Match[str], body: str) -> str:
    """A kernel, and after it a function that takes pointers to the kernel's arguments."""
    name, parameters = found.groups()
    kinds = [
        p[: p.rindex("*") + 1] if "*" in p else p.replace("const ", "").split()[0]
        for p in parameters.split(",")
    ]
    given = ", ".join(f"*({kind} *)given[{i}]" for i, kind in enumerate(kinds))
    return (
        f"{found.group()}{body}}}\n"
        f'extern "C" int emulated_{name}(int across, int down, int x, int y, int size, int together, int side,\n'
        f"                               void **given) {{\n"
        "    return emulated::run(across, down, x, y, size, together, side, [&] "
        f"{{ {name}({given}); }});\n}}\n"
    )


MISTAKES = (
    "threads wait for each other for ever",
    "an address is not aligned",
    "an index is past its array",
)
launched: list[Any] = []  # the stream of each launch since `emulated` began, None: the current one


class Kernel(compiler.Kernel):
    """In place of the compiler's: called instead of launched."""

    def __init__(self, function: Any, cluster: int) -> None:
        self.function, self.cluster, self.handle = function, cluster, self

    def allow_shared(self, size: int) -> None:
        """Nothing to do: there is enough."""

    def resident_blocks(self, threads: int, shared: int) -> int:
        """As many as a GPU has processors."""
        return 132

    def fits(self, blocks: int, threads: int, shared: int, cluster: int = 1) -> bool:
        """As many as are asked for, in clusters as they were built."""
        assert cluster == self.cluster and not blocks % cluster
        return True

    def start(
        self, across: int, down: int, x: int, y: int, shared: int, cooperative: int, pointers: int,
        stream: Any = None,
    ) -> None:  # fmt: skip
        """Run to the end."""
        launched.append(stream)
        assert min(across, down, x, y) > 0 and max(across, down) < 2**31, (
            "a grid of nothing, or of too much, is an error"
        )
        together = across * down if cooperative else self.cluster
        given = (across, down, x, y, shared, together, self.cluster, ctypes.c_void_p(pointers))
        wrong = self.function(*given)
        assert not wrong, MISTAKES[wrong - 1]


@cache
def load(
    device: int,
    source: str,
    names: tuple[str, ...],
    defines: tuple[tuple[str, int], ...],
    step: str = "",
) -> tuple[Kernel, ...]:
    """As the compiler's `load`."""
    text, _ = compiler.program((9, 0), source, defines, step)
    headers = ("common.cuh", *compiler.HEADERS.get(source, ()))
    for path in (compiler.SOURCES[source], *map(compiler.COMMON.with_name, headers)):
        start = path.read_text()[:200].partition(compiler.STEP)[0]
        text = text.replace(start, f'#line 1 "{path.name}"\n{start}', 1)  # for errors and reports
    found = re.search(r"__cluster_dims__\((\w+)", text)
    cluster = 1 if found is None else dict(defines)[found[1]]
    known = [("__CUDA_ARCH__", 900), *defines]
    shared = re.search(r"(?<!extern )__shared__", text) is not None
    text = "\n".join(
        [
            '#include "emulator.h"',
            f"static bool in_turn = emulated::variables_in_shared = {int(shared)};",
            *(f"#define {name} {value}" for name, value in known),
            translated(text),
        ]
    )
    said = "\n".join((text, HEADER.read_text(), *OPTIONS))
    library = _folder() / f"{hashlib.sha256(said.encode()).hexdigest()[:24]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(
            dir=library.parent
        ) as side:  # another process may build the same
            program, built = Path(side) / "kernel.cpp", Path(side) / "kernel.so"
            if RACES:  # its reports name lines
                program = library.with_suffix(".cpp")
            program.write_text(text)
            where = ["-I", _precompiled(), "-I", HEADER.parent]
            linked = ["-shared", "-Wl,-Bsymbolic", "-o", built]
            subprocess.run([_compiler(), *OPTIONS, *where, *linked, program], check=True)
            os.replace(built, library)
    kernels = ctypes.CDLL(str(library))
    return tuple(Kernel(getattr(kernels, f"emulated_{name}"), cluster) for name in names)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers on the CPU run what a GPU would, of the paths that `cuda.PATHS` has."""
    kept = (
        cuda.batch._kernel,
        cuda.small._kernel,
        cuda.persistent._kernel,
        cuda.warpgroup._kernel,
        cuda.norms._backward_kernels,
    )
    for made in kept:
        made.cache_clear()
    own = [f"ops.cuda.kernels.{name}" for name in KERNELS]
    pointwise = ("norms", "dropout", "weight_noise", "rows", "normals")
    own += [f"ops.cuda.pointwise.{name}" for name in pointwise]
    for name in (*own, "paper.training.optimizer_kernel"):
        monkeypatch.setattr(f"zoneout.{name}.load", load)
    chips = (cuda.batch, cuda.small, cuda.persistent, cuda.warpgroup, cuda.steps, cuda.cell_steps)
    for module in (*chips, compiler):
        monkeypatch.setattr(module, "chip", lambda device: compiler.Chip(132, 232448, 9))
    monkeypatch.setattr(compiler, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=_launch))
    monkeypatch.setattr(cuda.steps, "product", product)
    monkeypatch.setattr(cuda.cell_steps, "product", product)
    monkeypatch.setattr(cuda.cell_steps.step_products, "product", product)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    stream = SimpleNamespace(record_event=lambda event=None: event, wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        cuda.side_streams, "fork", lambda device, count: nullcontext([*range(1, count + 1)])
    )
    launched.clear()
    monkeypatch.setitem(passes.LOOPS, "cpu", cuda)
    monkeypatch.setattr(cuda, "is_available", lambda like: True)
    monkeypatch.setattr(products, "on_gpu", lambda v: True)
    monkeypatch.setattr(
        "zoneout.recurrent.RecurrentModule._packs", lambda self, x: False
    )  # only the CPU's loop packs
    monkeypatch.setattr(
        packing, "has_kernel", lambda v: v.dtype in cuda.TYPES
    )  # the truth, in float64, goes without
    yield
    for made in kept:
        made.cache_clear()


def _launch(at: Any, kernel: Kernel, arguments: Any, extra: None) -> int:
    """In place of the driver's: `at` refers to what a launch is."""
    how = at._obj
    grid = (how.blocks_x, how.blocks_y, how.threads_x, how.threads_y, how.shared, False)
    kernel.start(*grid, ctypes.addressof(arguments))
    return 0


def product(
    w: Tensor, rows: int, out: torch.dtype, transposed: bool, add: bool = False, splits: int = 1
) -> Callable[[int, int], None]:
    """As that of `blas`: a function of the addresses of a and b that takes b = a·W, or b += a·W."""
    columns, depth = w.shape if transposed else (w.shape[1], w.shape[0])
    shape, dtype = tuple(w.shape), w.dtype

    def take(at: int) -> None:
        at_w, at_a, at_b = (getattr(blas.Operands.from_address(at), name) for name in "wab")
        right = _at(at_w, shape, dtype).double()
        right = (right.t() if transposed else right).reshape(splits, depth // splits, columns)
        a = _at(at_a, (rows, splits, depth // splits), dtype).double().transpose(0, 1)
        b = _at(at_b, (splits, rows, columns), out)
        b.copy_(a @ right + b if add else a @ right)

    return lambda a_at, b_at: recording.call(take, blas.Operands(address(w, "W"), a_at, b_at))


def _at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What lies at an address."""
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _compiler() -> str:
    found = shutil.which("c++")
    if found is None:
        pytest.skip("there is no C++ compiler")
    return found


@cache
def _precompiled() -> Path:
    """A folder with the header in the form that GCC reads quickest; other compilers pass it
    over.
    """
    said = HEADER.read_text() + " ".join(OPTIONS)
    folder = _folder() / hashlib.sha256(said.encode()).hexdigest()[:24]
    folder.mkdir(exist_ok=True)
    made = folder / f"{HEADER.name}.gch"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=folder) as side:
            built = Path(side) / made.name
            subprocess.run(
                [_compiler(), *OPTIONS, "-x", "c++-header", "-o", built, HEADER], check=True
            )
            os.replace(built, made)
    return folder


def _folder() -> Path:
    """Where kernels are kept while the tests run: `conftest.py` makes it, for all processes."""
    return Path(os.environ["ZONEOUT_EMULATED"])
