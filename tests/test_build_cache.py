"""The build cache takes files from nobody else, and a compiler that fails costs little time."""

import ctypes
import os
import re
import select
import shutil
import stat
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import zoneout as zo
from zoneout.ops import build_cache
from zoneout.ops.cpu import native
from zoneout.ops.cpu.native import build
from zoneout.ops.cuda.runtime import compiler as cuda_compiler
from zoneout.paper.data import cache as paper_cache

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and rights as in Unix")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a test, which is not there yet."""
    monkeypatch.setenv("ZONEOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build_cache, "_warned", set())
    return tmp_path / "cache"


def found(match: str) -> bytes | None:
    """What `find` gives, twice, with exactly one warning."""
    with pytest.warns(UserWarning, match=match) as caught:
        result = build_cache.find("name", ".so")
        build_cache.find("name", ".so")
    assert len(caught) == 1
    return result


# --- whose files are taken ------------------------------------------------------------------------


def test_the_folder_is_for_the_user_alone(folder, monkeypatch):
    """With a umask of 002 the folder would be one that is refused from then on."""
    before = os.umask(0)
    try:
        for create in (
            lambda: build_cache.keep("name", ".so", b"content"),
            lambda: paper_cache.save("key", {}, None),
            lambda: paper_cache.create_folder(paper_cache.downloads()),
        ):
            create()
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            shutil.rmtree(folder)
        build_cache.keep("name", ".so", b"content")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]
    assert build_cache.find("name", ".so") == b"content"


@pytest.mark.parametrize("mode", [0o770, 0o757, 0o1777])
def test_a_folder_that_others_can_write_to(mode, folder):
    """Anybody could put a library there, and it would be run."""
    build_cache.keep("name", ".so", b"content")
    folder.chmod(mode)
    assert found(rf"cache folder {folder}: .*\(mode {mode:o}\); run `chmod go-w {folder}`") is None
    build_cache.keep("other", ".so", b"content")
    assert len(list(folder.iterdir())) == 1, "written where others can change it"
    folder.chmod(0o755)  # as an older version has created it
    assert build_cache.find("name", ".so") == b"content"


def test_a_folder_of_somebody_else(folder, monkeypatch):
    """Who owns the folder chooses what is run."""
    build_cache.keep("name", ".so", b"content")
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert (
        found(
            f"cache folder {folder}: .* belongs to user {folder.stat().st_uid}; set ZONEOUT_CACHE"
        )
        is None
    )
    build_cache.keep("other", ".so", b"content")
    assert len(list(folder.iterdir())) == 1


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path: Path) -> None:
    os.replace(path, path.parent.parent / "elsewhere.so")
    path.symlink_to(path.parent.parent / "elsewhere.so")


UNSAFE: dict[str, tuple[Any, str]] = {
    "group": (lambda path: path.chmod(0o620), "others can write to"),
    "world": (lambda path: path.chmod(0o602), "others can write to"),
    "link": (replace_by_link, "a symbolic link"),
    "pipe": (replace_by_pipe, "something else"),
}


@pytest.mark.parametrize("how", UNSAFE)
def test_an_unsafe_file_is_not_used(how, folder):
    """What somebody else has written would be run; or the process would wait for a pipe for
    ever.
    """
    spoil, why = UNSAFE[how]
    build_cache.keep("name", ".so", b"content")
    (path,) = folder.iterdir()
    spoil(path)
    assert found(rf"cache file {path}: .*{why}") is None
    assert not list(folder.iterdir()), "it is in the way of every process"
    build_cache.keep("name", ".so", b"content")
    assert build_cache.find("name", ".so") == b"content"


def test_a_file_of_somebody_else_is_not_used(folder, monkeypatch):
    """In a folder that others could once write to, a file of theirs may lie."""
    build_cache.keep("name", ".so", b"content")
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        status = real(fd)
        return (
            status
            if stat.S_ISDIR(status.st_mode)
            else os.stat_result((*status[:4], status.st_uid + 1, *status[5:]))
        )

    monkeypatch.setattr(os, "fstat", fstat)
    assert found("cache file .* belongs to user") is None


def test_a_folder_in_the_way_of_a_file(folder):
    """It cannot be removed, and is no reason to give up."""
    (folder / "name-0.so").mkdir(parents=True)
    folder.chmod(0o700)
    assert found("something else") is None
    build_cache.keep("name", ".so", b"content")
    assert build_cache.find("name", ".so") == b"content"


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_was_checked_is_what_is_read(what, folder, monkeypatch):
    """Somebody who can rename things would swap them between the check and the reading."""
    build_cache.keep("name", ".so", b"content")
    (path,) = folder.iterdir()
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        status = real(fd)
        if stat.S_ISDIR(status.st_mode) == (what == "folder"):
            swapped = folder if what == "folder" else path
            swapped.rename(folder.parent / "old")
            folder.mkdir(exist_ok=True)
            path.write_bytes(b"hostile")
            monkeypatch.setattr(os, "fstat", real)
        return status

    monkeypatch.setattr(os, "fstat", fstat)
    assert build_cache.find("name", ".so") == b"content"
    assert path.read_bytes() == b"hostile", "the test did not swap anything"


def test_kernels_from_a_refused_folder(folder, monkeypatch):
    """The GPU would run what somebody else compiled; or nothing would run at all."""
    made: list[Any] = []
    monkeypatch.setattr(cuda_compiler, "_version", lambda: (13, 0))
    monkeypatch.setattr(cuda_compiler, "architecture", lambda capability: 90)
    monkeypatch.setattr(
        cuda_compiler, "compiled", lambda *source: made.append(source) or (b"machine code", "")
    )

    def machine_code() -> bytes:
        return cuda_compiler.machine_code((9, 0), "dropout.cu", [])

    assert machine_code() == machine_code() == b"machine code" and len(made) == 1
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="cache folder"):
        assert machine_code() == machine_code() == b"machine code" and len(made) == 3


# --- loading --------------------------------------------------------------------------------------

CC = shutil.which("cc")
compiles = pytest.mark.skipif(CC is None, reason="no C compiler here")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A C source with one function."""
    path = tmp_path / "tiny.c"
    path.write_text("int answer(void) { return 1; }\n")
    return path


def declare(made: ctypes.CDLL) -> ctypes.CDLL:
    assert made.answer
    return made


def built(source: Path, *command: str) -> Any:
    return build.library(build.find_compiler(command or ("cc",)), [source], declare)


@compiles
def test_the_bytes_that_were_checked_are_loaded(source, folder, monkeypatch):
    """Between the digest and dlopen somebody would put another library in the file's place."""
    other = source.with_name("other.c")
    other.write_text("int answer(void) { return 2; }\n")
    assert built(source).answer() == 1 and built(other).answer() == 2
    (good,), (bad,) = folder.glob("tiny-*"), folder.glob("other-*")
    find = build_cache.find

    def find_and_swap(*name: Any) -> bytes | None:
        content = find(*name)
        if ".so" in name:
            shutil.copy(bad, good)
        return content

    monkeypatch.setattr(build_cache, "find", find_and_swap)
    monkeypatch.setattr(build, "_build", lambda *how: pytest.fail("built though it was kept"))
    assert built(source).answer() == 1
    assert good.read_bytes() == bad.read_bytes(), "the test did not swap anything"


@compiles
@pytest.mark.parametrize("noexec", [False, True], ids=["temporary", "noexec"])
def test_without_files_in_memory(noexec, source, folder, tmp_path, monkeypatch):
    """macOS has none; and where /tmp is mounted noexec, a library has to be loaded from the
    cache.
    """
    loaded: list[str] = []
    cdll = ctypes.CDLL
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def load(path: str) -> ctypes.CDLL:
        if noexec and path.startswith(str(temporary)):
            raise OSError("failed to map segment from shared object")
        loaded.append(os.path.realpath(path))
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
        return cdll(path)

    def refused(name: str) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "memfd_create", refused, raising=False)
    monkeypatch.setattr(build.tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(ctypes, "CDLL", load)
    for _ in range(2):
        assert built(source).answer() == 1
        assert loaded[-1].startswith(str(folder if noexec else temporary))
    assert not list(temporary.iterdir()) and len(list(folder.iterdir())) == 1, (
        "something was left behind"
    )


@compiles
def test_with_a_read_only_home(source, folder, monkeypatch):
    """The cache cannot be created: each process builds for itself, without a word."""
    folder.touch()
    monkeypatch.setenv("ZONEOUT_CACHE", str(folder / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert built(source).answer() == 1


@compiles
def test_with_a_refused_folder(source, folder):
    """A folder that others can write to would mean no library, or one of theirs."""
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="cache folder") as caught:
        assert built(source).answer() == 1
    assert len(caught) == 1 and not list(folder.iterdir())


@compiles
def test_whatever_visibility_the_compiler_is_told(monkeypatch):
    """`CC="gcc -fvisibility=hidden"` would make a library in which nothing is found."""
    monkeypatch.setattr(build, "FLAGS", ("-O0", "-std=gnu11", "-fPIC"))
    build.library(
        build.find_compiler(["cc", "-fvisibility=hidden"]), native.SOURCES, native._declare
    )


# --- compilers that fail --------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path) -> Any:
    """Make a compiler that writes down how it is called and, before it calls the real one, does
    something else.
    """

    def make(first: str, name: str = "fake") -> tuple[str, Any]:
        path, log = tmp_path / name, tmp_path / f"{name}.log"
        path.write_text(f'#!/bin/sh\necho "$*" >> {log}\n{first}\nexec {CC} "$@"\n')
        path.chmod(0o700)
        return str(path), lambda: log.read_text().splitlines() if log.exists() else []

    return make


def notes(folder: Path) -> list[Path]:
    return list(folder.glob("failed-*"))


@compiles
def test_where_linking_fails(source, fake):
    """Every combination of flags would be compiled, in every process: minutes."""
    command, runs = fake('case "$*" in *-shared*) echo cannot link >&2; exit 1;; esac')
    with pytest.raises(build.CompilerError, match=r"^cannot link$"):
        built(source, command)
    assert len(runs()) == 5, (
        "the version, and an object and a library with the best flags and with none"
    )
    assert not any("tiny.c" in run for run in runs()), "compiled though it cannot be linked"
    with pytest.raises(build.CompilerError, match=r"cannot link .*delete .*failed-"):
        built(source, command)
    assert len(runs()) == 6, "only the version is asked for again"


@compiles
def test_where_only_this_library_cannot_be_linked(source, fake):
    """The same object would be compiled again for another way to link it."""
    command, runs = fake('case "$*" in *-shared*tiny.o*) exit 1;; esac')
    with pytest.raises(build.CompilerError, match=r"^exit status 1$"):
        built(source, command)
    assert sum("tiny.c" in run for run in runs()) == sum("tiny.o -o" in run for run in runs()) == 1


@compiles
@pytest.mark.parametrize(
    "refused, compilations, last",
    [
        ("-mprefer-vector-width=512", 1, "-march=native"),
        ("-march=native*", 1, "-fopenmp"),
        ("-fopenmp", 1, "-march=native"),
        (
            "-march=native*tiny.c",
            2,
            "-fopenmp",
        ),  # an assembler that does not know the processor's instructions
    ],
)
def test_flags_that_a_compiler_does_not_take(refused, compilations, last, source, fake):
    """An older compiler would not do, or would be asked for the same thing many times."""
    command, runs = fake(f'case "$*" in *{refused}*) exit 1;; esac')
    assert built(source, command).answer() == 1
    compiled = [run for run in runs() if "tiny.c" in run]
    assert len(compiled) == compilations and last in compiled[-1]
    assert not any(flag in compiled[-1] for flag in refused.split("*")[:1])


@pytest.fixture
def hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """What a fake compiler does to hang for ever, and a descriptor that ends when it and its
    children have ended.

    The time limit is over as soon as the compiler hangs, however slow the machine is.
    """
    os.mkfifo(tmp_path / "alive")
    os.mkfifo(tmp_path / "never")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    hang = f"exec 3> {tmp_path}/alive; echo hangs >&3; (read x < {tmp_path}/never); exit"

    class Impatient(subprocess.Popen):  # type: ignore[type-arg]
        def communicate(self, *given: Any, timeout: float | None = None) -> Any:
            assert timeout == build.TIMEOUT
            said = b""
            while not said and self.poll() is None:
                with suppress(BlockingIOError):
                    said = os.read(alive, 99)
            return super().communicate(*given, timeout=0.01 if said else timeout)

    monkeypatch.setattr(subprocess, "Popen", Impatient)
    yield hang, alive
    os.close(alive)


@compiles
def test_a_compiler_that_hangs(source, fake, hangs):
    """The process would hang with it; or what the compiler has started would run for ever."""
    hang, alive = hangs
    command, runs = fake(f'case "$*" in *--version*) echo fake 1; exit;; esac; {hang}')
    with pytest.raises(build.TimedOut, match=r"not finished after 120 s: .*/fake "):
        built(source, command)
    assert len(runs()) == 2, "asked again with other flags"
    assert select.select([alive], [], [], 10)[0] and os.read(alive, 1) == b"", (
        "something still runs"
    )
    with pytest.raises(build.CompilerError, match="not finished"):
        built(source, command)
    assert len(runs()) == 3, "waited for again"


def test_a_compiler_that_does_not_say_its_version(folder, fake, hangs):
    """The name of what is remembered holds the version, which would be waited for in every
    process.
    """
    command, runs = fake(hangs[0])
    for _ in range(2):
        with pytest.raises(build.CompilerError, match="not finished"):
            build.find_compiler([command])
    assert len(runs()) == 1 and len(notes(folder)) == 1


@compiles
def test_a_failure_is_forgotten(source, folder, fake, monkeypatch):
    """A compiler that works again, or another source, would not be tried."""
    command, runs = fake(f'case "$*" in *-c*) [ -e {source.parent}/repaired ] || exit 1;; esac')

    def fails() -> bool:
        before = len(runs())
        with pytest.raises(build.CompilerError):
            built(source, command)
        return len(runs()) > before + 1

    assert fails() and not fails()
    (note,) = notes(folder)
    for age in (
        build.REMEMBERED + 60,
        -60,
    ):  # a day ago; and in the future, which only a wrong clock can have written
        os.utime(note, (note.stat().st_mtime - age,) * 2)
        assert fails() and not fails()
        (note,) = notes(folder)
    monkeypatch.setattr(build.platform, "node", lambda: "another machine with the same cache")
    assert fails() and not fails()
    monkeypatch.undo()
    monkeypatch.setenv("ZONEOUT_CACHE", str(folder))
    source.write_text(source.read_text() + "\n")
    assert fails() and not fails()
    (source.parent / "repaired").touch()
    for note in notes(folder):
        note.unlink()
    assert built(source, command).answer() == 1


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk have no room for another 16 MB."""
    write = Path.write_bytes

    def write_bytes(path: Path, content: bytes) -> int:
        if len(content) >= 2**24:
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)


@compiles
@pytest.mark.parametrize("why", ["killed", "child killed", "full"])
def test_what_passes_is_not_remembered(why, source, folder, fake, monkeypatch):
    """A full disk or memory that ran out once would mean the slow loop for a day."""
    fail = {
        "killed": "kill -9 $$",
        "child killed": "echo Killed signal terminated program cc1 >&2; exit 1",
    }
    command, runs = fake(f'case "$*" in *-c*) {fail.get(why, "exit 1")};; esac')
    if why == "full":
        fill_disk(monkeypatch)
    for _ in range(2):
        before = len(runs())
        with pytest.raises(
            (build.Killed, OSError), match="No space left" if why == "full" else "(?i)killed"
        ):
            built(source, command)
        assert len(runs()) == before + (5 if why == "full" else 2), (
            "another place, or flags, tried for no reason"
        )
    assert not notes(folder)


@compiles
def test_a_full_folder_is_left_for_another(source, folder, fake, monkeypatch):
    """With /tmp full, there is room in the cache."""
    command, _ = fake('case "$TMPDIR" in /proc/*) ;; *) case "$*" in *-c*) exit 1;; esac;; esac')
    if not os.path.isdir(f"/proc/{os.getpid()}/fd"):
        pytest.skip("no /proc here")
    fill_disk(monkeypatch)
    assert built(source, command).answer() == 1
    assert len(list(folder.iterdir())) == 1


def test_without_a_compiler_the_message_names_the_extra(monkeypatch):
    """A user without a compiler gets a slow layer, and does not learn the one line that helps."""
    monkeypatch.setattr(native, "_reasons", [])
    monkeypatch.setattr(native, "_commands", lambda: [])
    monkeypatch.setenv("ZONEOUT_NATIVE", "compile")
    assert native.load.__wrapped__() is None
    assert "pip install 'zoneout[compiler]'" in native.why_not()


@compiles
def test_without_a_compiler_only_the_own_cell_is_slow(monkeypatch):
    """Because of one cell, a user of a wheel without a compiler reads that nothing is compiled."""

    @zo.cell(gates=1, states=("h",), checked=False)
    def leaky(x, r, h):
        """A cell that no other test compiles."""
        (n,) = (a + b for a, b in zip(x, r, strict=True))
        return zo.candidate("h", 0.8125 * h + 0.1875 * n.tanh())

    if native.load() is None:
        pytest.skip(f"no compiled loop here: {native.why_not()}")
    monkeypatch.setattr(native, "_reasons", [])
    monkeypatch.setattr(native, "_commands", lambda: [])
    x = torch.zeros(3, 2, 4)
    layer = zo.Recurrent(leaky, 4, 5)
    with pytest.warns(UserWarning) as said:
        layer(x)
    assert re.fullmatch(
        r"the cell 'leaky' is not compiled \(LSTM, GRU and RNN are\): .*"
        r"pip install 'zoneout\[compiler\]'.* It runs in torch calls, more slowly\.",
        str(said[0].message),
    )
    with warnings.catch_warnings(action="error"):
        zo.LSTM(4, 5)(x)
    drops = zo.Recurrent(leaky, 4, 5, noise=zo.Swapout(hidden_old=0.5), backend="cpu")
    with pytest.raises(RuntimeError, match="need compiled code: the cell 'leaky' is not compiled"):
        drops(x)


@compiles
def test_the_next_compiler_is_tried(fake, monkeypatch, tmp_path):
    """A library in which a function is missing would be an AttributeError at every call."""
    sources = tmp_path / "loop.c", tmp_path / "body.h"
    for source in sources:
        source.write_text("int answer(void) { return 1; }\n")
    same, same_runs = fake("", "cc")
    (tmp_path / "gcc").symlink_to(same)
    hidden, hidden_runs = fake('[ "$1" = --version ] || set -- "$@" -fvisibility=hidden', "clang")
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setattr(native, "_declare", declare)
    monkeypatch.setattr(native, "_reasons", [])
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CC", hidden)
    library = native.load.__wrapped__()
    assert library is not None and library.answer() == 1
    assert hidden_runs() and same_runs()

    monkeypatch.setattr(native, "_declare", lambda made: made.no_such_function)
    assert native.load.__wrapped__() is None
    assert "a function is missing: " in native.why_not() and "undefined symbol" in native.why_not()
    assert sum("loop.c" in run for run in same_runs()) == 2, (
        "the same compiler was asked twice, by two names"
    )
