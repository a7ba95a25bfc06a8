"""Compile a C library with a compiler of the machine, cache it, and load it.

A tiny library is built first. It shows which flags the compiler accepts, and whether its output can
be loaded. The real library takes seconds and is then compiled once.

A compiler that fails or hangs is not tried again for a day; a note in the cache records the
failure. No note is written if the disk was full or the compiler was killed.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from .. import build_cache

FLAGS = (
    "-O3",
    "-std=gnu11",
    *(() if os.name == "nt" else ("-fPIC",)),  # Windows has no other code
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
TUNED = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())
TIMEOUT = 120  # seconds for one run of a compiler; the longest takes about 5
REMEMBERED = 24 * 60 * 60  # seconds for which a failure is remembered

_PROBE = """
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(_OPENMP) || defined(TORCH_OPENMP)
extern int omp_get_thread_num(void), omp_get_num_threads(void);
#endif
#ifdef TORCH_OPENMP
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned), GOMP_barrier(void);
#endif
static void task(void *x) {
    int64_t n = 1;
#if defined(_OPENMP) || defined(TORCH_OPENMP)
    n += omp_get_thread_num() % omp_get_num_threads();
#endif
#ifdef TORCH_OPENMP
    GOMP_barrier();
#else
#pragma omp barrier
#endif
    memset(x, 0, (size_t)n);
    *(double *)x = tanh(exp(*(double *)x));
}
void zoneout_probe(double *x, int64_t n) {
#ifdef TORCH_OPENMP
    GOMP_parallel(task, x, (unsigned)n, 0);
#else
#pragma omp parallel num_threads((int)n)
    task(x);
#endif
}
"""

T = TypeVar("T")


class CompilerError(Exception):
    """A compiler did not build a library that can be loaded."""


class TimedOut(CompilerError):
    """A compiler did not finish; other flags would not help."""


class Killed(CompilerError):
    """A compiler was killed, usually for lack of memory: the next attempt may succeed."""


class Flags(NamedTuple):
    """The flags of a compiler in addition to FLAGS."""

    tuned: tuple[str, ...] = ()
    openmp: tuple[str, ...] = ()
    link: tuple[str, ...] = ()


# First without linking an OpenMP runtime: torch has already loaded its own, and two runtimes would
# compete for the cores. On Linux clang's calls are for another runtime than torch's: TORCH_OPENMP.
TORCH_OPENMP = Flags(openmp=("-fopenmp-simd", "-DTORCH_OPENMP"))
OPENMP = (
    Flags(openmp=("-fopenmp",)),
    TORCH_OPENMP,
    Flags(openmp=("-fopenmp",), link=("-fopenmp",)),
    Flags(),
)


class Compiler(NamedTuple):
    """An installed compiler."""

    command: tuple[str, ...]
    path: str  # of the program itself, with links resolved
    version: str

    def same_as(self, other: Compiler) -> bool:
        """Return True if the other is the same compiler under another name.

        The version begins with the name, so the name is not compared.
        """
        ours, theirs = ((c.path, c.version.partition(" ")[2], c.command[1:]) for c in (self, other))
        return ours == theirs


def find_compiler(command: Sequence[str]) -> Compiler:
    """Return the compiler that a command calls.

    Raise OSError if it is not found, CompilerError if it does not answer.
    """
    if not command or (program := shutil.which(command[0])) is None:
        raise OSError("not found")
    path = os.path.realpath(program)
    status = os.stat(path)
    key = repr((*command, path, status.st_size, status.st_mtime_ns))
    return Compiler(
        tuple(command), path, _remembering(key, lambda: _output([*command, "--version"]))
    )


Declare = Callable[
    [ctypes.CDLL], ctypes.CDLL
]  # takes a library; raises AttributeError if a function is missing


def library(compiler: Compiler, sources: Sequence[Path], declare: Declare) -> ctypes.CDLL:
    """Load the library that a compiler builds from the first source; from the cache if present."""
    content = b"".join(source.read_bytes() for source in sources)
    return _library(compiler, sources[0].stem, content, lambda scratch: sources[0], declare)


def library_of_text(compiler: Compiler, name: str, text: str, declare: Declare) -> ctypes.CDLL:
    """Load the library that a compiler builds from a C file with this text."""

    def write(scratch: Path) -> Path:
        source = scratch / f"{name}.c"
        source.write_text(text, encoding="utf-8")
        return source

    return _library(compiler, name, text.encode(), write, declare)


def _library(
    compiler: Compiler, stem: str, content: bytes, source: Callable[[Path], Path], declare: Declare
) -> ctypes.CDLL:
    """Load a library from the cache, or build it.

    `source` takes a folder to write to, and returns the file to compile.
    """
    parts = [
        content,
        repr((FLAGS, TUNED, compiler.command)).encode(),
        compiler.version.encode(),
        _processor().encode(),
    ]
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    name = f"{stem}-{digest[:20]}"
    if (cached := build_cache.find(name, ".so")) is not None:
        with suppress(CompilerError):
            return _load(cached, declare)
    content, loaded = _remembering(digest, lambda: _build(compiler.command, source, declare))
    build_cache.keep(name, ".so", content)
    return loaded


def _remembering(key: str, attempt: Callable[[], T]) -> T:
    """Return the result of an attempt; do not repeat one that failed here within a day."""
    digest = hashlib.sha256(
        f"{key} {platform.node()}".encode()
    ).hexdigest()  # several machines may share one cache
    name = f"failed-{digest[:20]}"
    if (note := build_cache.find(name, ".txt", REMEMBERED)) is not None:
        text = note.decode(errors="replace")
        raise CompilerError(
            f"{text} (within the last day; delete {build_cache.cache_folder() / name}-* to try "
            "again now)"
        )
    try:
        return attempt()
    except Killed:
        raise
    except CompilerError as error:
        build_cache.keep(name, ".txt", str(error).encode())
        raise


def _build(
    command: Sequence[str], source: Callable[[Path], Path], declare: Declare
) -> tuple[bytes, ctypes.CDLL]:
    """Build a library; return the bytes of its file, and the loaded library."""
    failure = OSError("no folder to build in")
    for place in build_cache.scratch_places():
        try:
            with tempfile.TemporaryDirectory(
                prefix="zoneout-", dir=place, ignore_cleanup_errors=True
            ) as scratch:
                return _Builder(command, Path(scratch)).build(source(Path(scratch)), declare)
        except OSError as error:  # the place is not writable
            failure = error
    raise failure


class _Builder(NamedTuple):
    """A compiler, and a folder of its own to work in."""

    command: Sequence[str]
    scratch: Path

    def build(self, source: Path, declare: Declare) -> tuple[bytes, ctypes.CDLL]:
        """Build a library with the best flags; raise OSError if the disk was full."""
        try:
            flags = self._best_flags()
            content = self._link(self._compile_tuned(source, flags), flags)
            return content, _load(content, declare)
        except CompilerError as error:
            try:
                (self.scratch / "room").write_bytes(bytes(2**24))
            except OSError as full:
                raise OSError(f"{full.strerror} in {self.scratch.parent}: {error}") from None
            raise

    def _best_flags(self) -> Flags:
        """Return the best flags with which a tiny library can be built.

        Raise if it cannot be built without any flags.
        """
        best = OPENMP[0]._replace(tuned=TUNED[0])
        if self._works(best):
            return best
        self._make_probe(Flags())
        openmp = next(flags for flags in OPENMP if flags == Flags() or self._works(flags))
        tuned = next(tuned for tuned in TUNED if not tuned or self._works(Flags(tuned)))
        return openmp._replace(tuned=tuned)

    def _works(self, flags: Flags) -> bool:
        try:
            self._make_probe(flags)
        except (TimedOut, Killed):
            raise
        except CompilerError:
            return False
        return True

    def _make_probe(self, flags: Flags) -> None:
        source = self.scratch / "probe.c"
        source.write_text(_PROBE)
        _load(self._link(self._compile(source, flags), flags))

    def _compile_tuned(self, source: Path, flags: Flags) -> Path:
        """Compile for this processor.

        If an older assembler does not know its instructions, compile for any processor.
        """
        try:
            return self._compile(source, flags)
        except (TimedOut, Killed):
            raise
        except CompilerError:
            if not flags.tuned:
                raise
            return self._compile(source, flags._replace(tuned=()))

    def _compile(self, source: Path, flags: Flags) -> Path:
        objects = self.scratch / f"{source.stem}.o"
        self._run(*FLAGS, *flags.tuned, *flags.openmp, "-c", str(source), "-o", str(objects))
        return objects

    def _link(self, objects: Path, flags: Flags) -> bytes:
        library = objects.with_suffix(".so")
        self._run("-shared", str(objects), "-o", str(library), *flags.link, "-lm")
        try:
            return library.read_bytes()
        except FileNotFoundError:
            raise CompilerError("exit status 0, but no library") from None

    def _run(self, *arguments: str) -> None:
        _output([*self.command, *arguments], TMPDIR=str(self.scratch))


def _output(command: Sequence[str], **environment: str) -> str:
    """Return what a command prints.

    Raise CompilerError with its error output if it fails or takes too long.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C", **environment},
        start_new_session=True,  # so that its child processes can be killed with it
    )
    with process:
        try:
            printed, errors = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise TimedOut(f"not finished after {TIMEOUT} s: {' '.join(command)[:200]}") from None
        finally:
            if process.returncode is None:
                _kill(process)
    if process.returncode < 0 or "Killed" in errors:
        raise Killed(errors.strip()[:300] or f"killed by signal {-process.returncode}")
    if process.returncode > 0:
        raise CompilerError(errors.strip()[:300] or f"exit status {process.returncode}")
    return printed


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and its child processes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, OSError):  # Windows has no process groups
        process.kill()


_slashes = itertools.count(2)


def _load(content: bytes, declare: Declare = lambda library: library) -> ctypes.CDLL:
    """Load exactly these bytes as a library: a file could be replaced before it is loaded."""
    try:
        return declare(_load_from_memory(content) or _load_from_file(content))
    except AttributeError as error:  # what ctypes raises for a missing function
        raise CompilerError(f"a function is missing: {error}") from None


def _load_from_memory(content: bytes) -> ctypes.CDLL | None:
    """Load a library through a file in memory.

    Return None if the system has no such files, or does not execute them.
    """
    try:
        fd = os.memfd_create("zoneout-loop.so")
    except (AttributeError, OSError):
        return None
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        # The loader treats a path that it has loaded before as the same library, and descriptors
        # are reused. A different number of slashes makes each path unique.
        return ctypes.CDLL(f"/proc/self/fd{'/' * next(_slashes)}{fd}")
    except OSError:
        return None
    finally:
        os.close(fd)


def _load_from_file(content: bytes) -> ctypes.CDLL:
    """Load a library through a file in a temporary folder that only the user can enter."""
    failure = OSError("no folder to load it from")
    for place in build_cache.scratch_places():  # the first place may be mounted noexec
        try:
            with tempfile.TemporaryDirectory(
                prefix="zoneout-", dir=place, ignore_cleanup_errors=True
            ) as scratch:
                path = Path(scratch) / "loop.so"
                path.write_bytes(content)
                return ctypes.CDLL(str(path))
        except OSError as error:
            failure = error
    raise CompilerError(f"the library cannot be loaded: {failure}")


def _processor() -> str:
    """Return the processor features that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            (line for line in lines if line.startswith(("flags", "Features"))), platform.machine()
        )
    except OSError:
        return platform.platform() + platform.processor()
