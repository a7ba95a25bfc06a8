"""The wheels that `make wheels` builds. `make test-wheels` builds and tests them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from zoneout.ops.cpu import native, prebuilt

ROOT = Path(__file__).parents[1]
if "ZONEOUT_DIST" not in os.environ:
    pytest.skip("no folder of wheels is named: make test-wheels", allow_module_level=True)
DIST = Path(os.environ["ZONEOUT_DIST"]).absolute()

# What a library begins with, and the processor's number in its header: at this place, these bytes.
FORMATS = {
    "linux-x86_64": (b"\x7fELF", 18, b"\x3e\x00"),
    "linux-aarch64": (b"\x7fELF", 18, b"\xb7\x00"),
    "windows-x86_64": (b"MZ", None, b"\x64\x86"),  # after the signature that 0x3c points to
    "macos-arm64": (b"\xcf\xfa\xed\xfe", 4, b"\x0c\x00\x00\x01"),
}


def load_tool():
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "tools" / "wheels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLATFORMS = load_tool().PLATFORMS


def wheel(tag: str) -> ZipFile:
    (path,) = DIST.glob(f"zoneout-*-py3-none-{tag}.whl")
    return ZipFile(path)


def libraries(archive: ZipFile) -> dict[str, bytes]:
    """Return the compiled libraries of a wheel by name."""
    folder = "zoneout/ops/cpu/prebuilt/"
    names = [name for name in archive.namelist() if name.startswith(folder)]
    return {name.removeprefix(folder): archive.read(name) for name in names}


def digests(archive: ZipFile) -> dict[str, str]:
    """Return the digest of each file, without those that differ between wheels."""
    return {
        name: hashlib.sha256(archive.read(name)).hexdigest()
        for name in archive.namelist()
        if "/prebuilt/" not in name and not name.endswith(("/WHEEL", "/RECORD"))
    }


@pytest.mark.parametrize("name", PLATFORMS)
def test_wheel_of_a_platform(name):
    """A wheel lacks a library, has one of another platform or of other sources, or lacks files."""
    what = PLATFORMS[name]
    archive = wheel(what.tag)
    found = libraries(archive)
    expected = {prebuilt.file_name(level, native.SOURCES) for level in what.processors}
    assert set(found) == expected
    start, place, machine = FORMATS[name]
    for content in found.values():
        at = place
        if at is None:
            at = int.from_bytes(content[0x3C:0x40], "little") + 4
        assert content.startswith(start) and content[at : at + len(machine)] == machine
    assert digests(archive) == digests(wheel("any"))
    (info,) = (n for n in archive.namelist() if n.endswith(".dist-info/WHEEL"))
    assert f"Tag: py3-none-{what.tag}" in archive.read(info).decode()


@pytest.mark.parametrize("name", ["linux-x86_64", "linux-aarch64"])
def test_glibc_is_old_enough(name):
    """The library asks for a newer glibc than the wheel's name promises, and is never loaded."""
    for content in libraries(wheel(PLATFORMS[name].tag)).values():
        wanted = {tuple(map(int, v)) for v in re.findall(rb"GLIBC_(\d+)\.(\d+)", content)}
        assert max(wanted, default=(0, 0)) <= (2, 17)


def test_pure_wheel_has_no_library():
    """The wheel for all other platforms contains code of one platform."""
    assert libraries(wheel("any")) == {}


def test_source_archive():
    """Nobody can build or test the package from the source archive."""
    (path,) = DIST.glob("zoneout-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("pyproject.toml", "Makefile", "tools/wheels.py", "src/zoneout/ops/cpu/loop.c"):
        assert needed in names
    assert any(name.startswith("tests/") for name in names)


@pytest.mark.parametrize("name", ["linux-x86_64", "pure", "sdist"])
def test_same_bytes_twice(name, tmp_path):
    """A user who builds the release again cannot see whether it is the same."""
    command = [sys.executable, str(ROOT / "tools" / "wheels.py"), name, "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    (made,) = tmp_path.iterdir()
    assert made.read_bytes() == (DIST / made.name).read_bytes()


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="not Linux x86-64"
)
@pytest.mark.parametrize(("level", "capability"), [("v2", "default"), ("v3", "avx2"), ("v4", "")])
def test_loop_runs_without_a_compiler(tmp_path, level, capability):
    """On a machine without a compiler, the installed wheel runs the slow loop, or a wrong one, or
    one for another processor.
    """
    if level not in prebuilt.levels():
        pytest.skip(f"this processor has no x86-64-{level}")
    archive = wheel(PLATFORMS["linux-x86_64"].tag)
    archive.extractall(tmp_path)
    elsewhere = [path for path in sys.path if path and not Path(path).is_relative_to(ROOT / "src")]
    tool = str(ROOT / "tools" / "try_wheel.py")
    code = f"import sys, runpy; sys.path[:] = {[str(tmp_path), *elsewhere]!r}\n"
    code += f"runpy.run_path({tool!r}, run_name='__main__')"
    # No PATH and no home: no compiler, and no library that was compiled before.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        env={
            "HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "ATEN_CPU_CAPABILITY": capability,  # what torch takes the processor for
        },
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"loop-{level}-" in done.stdout and "runs and matches the reference" in done.stdout
    assert not (tmp_path / "cache").exists()
