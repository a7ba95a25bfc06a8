"""Compile a C library with a compiler of the machine, keep it, and load it.

A tiny library is made first, to find out which flags the compiler takes and whether what it makes can be loaded. The
real one, which takes seconds, is then compiled once. A compiler that fails or hangs is not asked again for a day, as a
note in the cache says: nothing of that is noted where the disk was full or the compiler was killed.
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

from .. import kept

FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
TUNED = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())
TIMEOUT = 120  # seconds that one run of a compiler may take; the longest takes about 5
REMEMBERED = 24 * 60 * 60  # seconds for which a failure is

_PROBE = """
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
void zoneout_probe(double *x, int64_t n) {
#pragma omp parallel num_threads((int)n)
    {
#ifdef _OPENMP
        n += omp_get_thread_num() % omp_get_num_threads();
#endif
#pragma omp barrier
        memset(x, 0, (size_t)n);
        x[0] = tanh(exp(x[0]));
    }
}
"""

T = TypeVar("T")


class CompilerError(Exception):
    """A compiler did not make a library that can be loaded."""


class TimedOut(CompilerError):
    """A compiler did not finish: with other flags it would not, either."""


class Killed(CompilerError):
    """A compiler was killed, most often for want of memory: the next attempt may succeed."""


class Flags(NamedTuple):
    """What a compiler is given beside FLAGS."""

    tuned: tuple[str, ...] = ()
    openmp: tuple[str, ...] = ()
    link: tuple[str, ...] = ()


# First without linking an OpenMP runtime: torch has loaded its own for everyone to use, and two of them would fight
# over the cores.
OPENMP = (Flags(openmp=("-fopenmp",)), Flags(openmp=("-fopenmp",), link=("-fopenmp",)), Flags())


class Compiler(NamedTuple):
    """An installed compiler."""

    command: tuple[str, ...]
    path: str  # of the program itself, links followed
    version: str

    def same_as(self, other: Compiler) -> bool:
        """True if the other is this one under another name, which is what its version begins with."""
        ours, theirs = ((c.path, c.version.partition(" ")[2], c.command[1:]) for c in (self, other))
        return ours == theirs


def find_compiler(command: Sequence[str]) -> Compiler:
    """The compiler that a command calls; an OSError where it is not there, a CompilerError where it does not answer."""
    if not command or (found := shutil.which(command[0])) is None:
        raise OSError("not found")
    path = os.path.realpath(found)
    status = os.stat(path)
    key = repr((*command, path, status.st_size, status.st_mtime_ns))
    return Compiler(tuple(command), path, _remembering(key, lambda: _output([*command, "--version"])))


def library(compiler: Compiler, sources: Sequence[Path], declare: Callable[[ctypes.CDLL], ctypes.CDLL]) -> ctypes.CDLL:
    """Load the library that a compiler makes of the first source, from the cache where it is there.

    `declare` is given the library, and raises AttributeError if a function is missing.
    """
    parts = [source.read_bytes() for source in sources]
    parts += [repr((FLAGS, TUNED, compiler.command)).encode(), compiler.version.encode(), _processor().encode()]
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    name = f"{sources[0].stem}-{digest[:20]}"
    if (content := kept.find(name, ".so")) is not None:
        with suppress(CompilerError):
            return _load(content, declare)
    content, made = _remembering(digest, lambda: _build(compiler.command, sources[0], declare))
    kept.keep(name, ".so", content)
    return made


def _remembering(key: str, attempt: Callable[[], T]) -> T:
    """What an attempt gives; one that failed on this machine within a day is not made again."""
    digest = hashlib.sha256(f"{key} {platform.node()}".encode()).hexdigest()  # several machines may share a cache
    name = f"failed-{digest[:20]}"
    if (note := kept.find(name, ".txt", REMEMBERED)) is not None:
        text = note.decode(errors="replace")
        raise CompilerError(f"{text} (within the last day; delete {kept.cache_folder() / name}-* to try again now)")
    try:
        return attempt()
    except Killed:
        raise
    except CompilerError as error:
        kept.keep(name, ".txt", str(error).encode())
        raise


def _build(
    command: Sequence[str], source: Path, declare: Callable[[ctypes.CDLL], ctypes.CDLL]
) -> tuple[bytes, ctypes.CDLL]:
    """Build a library: the bytes of its file, and the library."""
    failure = OSError("no folder to build in")
    for place in kept.scratch_places():
        try:
            with tempfile.TemporaryDirectory(prefix="zoneout-", dir=place, ignore_cleanup_errors=True) as scratch:
                return _Builder(command, Path(scratch)).build(source, declare)
        except OSError as error:  # nothing can be written there
            failure = error
    raise failure


class _Builder(NamedTuple):
    """A compiler, and a folder of its own to work in."""

    command: Sequence[str]
    scratch: Path

    def build(self, source: Path, declare: Callable[[ctypes.CDLL], ctypes.CDLL]) -> tuple[bytes, ctypes.CDLL]:
        """Build a library with the best flags; an OSError where it failed because the folder is full."""
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
        """Return the best flags that a tiny library can be made with; an error where it cannot be made without any."""
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
        """Compile for the processor at hand, or, where an older assembler does not know its instructions, for any."""
        try:
            return self._compile(source, flags)
        except (TimedOut, Killed):
            raise
        except CompilerError:
            if not flags.tuned:
                raise
            return self._compile(source, flags._replace(tuned=()))

    def _compile(self, source: Path, flags: Flags) -> Path:
        made = self.scratch / f"{source.stem}.o"
        self._run(*FLAGS, *flags.tuned, *flags.openmp, "-c", str(source), "-o", str(made))
        return made

    def _link(self, objects: Path, flags: Flags) -> bytes:
        made = objects.with_suffix(".so")
        self._run("-shared", str(objects), "-o", str(made), *flags.link, "-lm")
        try:
            return made.read_bytes()
        except FileNotFoundError:
            raise CompilerError("exit status 0, but no library") from None

    def _run(self, *arguments: str) -> None:
        _output([*self.command, *arguments], TMPDIR=str(self.scratch))


def _output(command: Sequence[str], **environment: str) -> str:
    """What a command prints; a CompilerError with what it said where it fails, or takes too long."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C", **environment},
        start_new_session=True,  # to end with it what it has started
    )
    with process:
        try:
            printed, said = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise TimedOut(f"not finished after {TIMEOUT} s: {' '.join(command)[:200]}") from None
        finally:
            if process.returncode is None:
                _kill(process)
    if process.returncode < 0 or "Killed" in said:
        raise Killed(said.strip()[:300] or f"killed by signal {-process.returncode}")
    if process.returncode > 0:
        raise CompilerError(said.strip()[:300] or f"exit status {process.returncode}")
    return printed


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process and what it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, OSError):  # no groups in Windows
        process.kill()


_slashes = itertools.count(2)


def _load(content: bytes, declare: Callable[[ctypes.CDLL], ctypes.CDLL] = lambda made: made) -> ctypes.CDLL:
    """Load these very bytes as a library: a file could be another by the time it is loaded."""
    try:
        return declare(_load_from_memory(content) or _load_from_file(content))
    except AttributeError as error:  # what ctypes raises for a missing function
        raise CompilerError(f"a function is missing: {error}") from None


def _load_from_memory(content: bytes) -> ctypes.CDLL | None:
    """Load a library through a file in memory; None where the system has none or runs nothing from there."""
    try:
        fd = os.memfd_create("zoneout-loop.so")
    except (AttributeError, OSError):
        return None
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        # A path that was loaded before is taken for the same library, and descriptors are used again.
        return ctypes.CDLL(f"/proc/self/fd{'/' * next(_slashes)}{fd}")
    except OSError:
        return None
    finally:
        os.close(fd)


def _load_from_file(content: bytes) -> ctypes.CDLL:
    """Load a library through a file in a temporary folder that nobody else can enter."""
    failure = OSError("no folder to load it from")
    for place in kept.scratch_places():  # the first may be mounted noexec
        try:
            with tempfile.TemporaryDirectory(prefix="zoneout-", dir=place, ignore_cleanup_errors=True) as scratch:
                path = Path(scratch) / "loop.so"
                path.write_bytes(content)
                return ctypes.CDLL(str(path))
        except OSError as error:
            failure = error
    raise CompilerError(f"the library cannot be loaded: {failure}")


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    except OSError:
        return platform.platform() + platform.processor()
