"""Build the wheels, one for each platform with the compiled loop in it, a pure one, and the sdist.

    python tools/wheels.py                       # all, into dist/
    python tools/wheels.py linux-x86_64 pure     # some of them

zig (PyPI's `ziglang`) compiles for every platform from any other. hatchling builds the wheel, and
imports this file as its build hook: a plain `python -m build` makes the pure wheel.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.build import build_sdist, build_wheel
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parents[1]
CPU = Path("src/zoneout/ops/cpu")
CHOICE = "ZONEOUT_WHEEL"  # the environment variable that tells the hook which wheel to build


class Platform(NamedTuple):
    """What a wheel is built for."""

    tag: str  # of the wheel's file name
    target: str  # zig's name
    processors: dict[str, str]  # zig's processor, by level as in prebuilt.py
    flags: tuple[str, ...] = ()


_X86 = {level: f"x86_64_{level}" for level in ("v2", "v3", "v4")}
# torch's OpenMP runtime is gcc's on Linux only; elsewhere the loop runs in one thread.
_LINUX = ("-fPIC", "-fopenmp-simd", "-DTORCH_OPENMP", "-lm")
# Without a name of its own, a library on macOS has the path that it was built at.
_MACOS = ("-fPIC", "-fopenmp-simd", "-Wl,-install_name,loop.so")
PLATFORMS = {
    "linux-x86_64": Platform("manylinux_2_17_x86_64", "x86_64-linux-gnu.2.17", _X86, _LINUX),
    "linux-aarch64": Platform(
        "manylinux_2_17_aarch64", "aarch64-linux-gnu.2.17", {"aarch64": "generic"}, _LINUX
    ),
    "windows-x86_64": Platform("win_amd64", "x86_64-windows-gnu", _X86, ("-fopenmp-simd",)),
    "macos-arm64": Platform(
        "macosx_11_0_arm64", "aarch64-macos.11.0", {"arm64": "apple_m1"}, _MACOS
    ),
}


def compile_loop(platform: Platform, folder: Path) -> list[Path]:
    """Compile the loop for every processor level of a platform; return the files."""
    sources, file_name, flags = _package()
    made = []
    for level, processor in platform.processors.items():
        path = folder / file_name(level, sources)
        command = [sys.executable, "-m", "ziglang", "cc", "-target", platform.target]
        command += [*flags, f"-mcpu={processor}", "-g0", "-s", "-shared"]
        if level == "v4":  # zig's default for v4 splits vectors of 512 bits
            command.append("-mprefer-vector-width=512")
        command += [str(CPU / "loop.c"), "-o", str(path), *platform.flags]
        subprocess.run(command, cwd=ROOT, check=True)  # relative paths: the same bytes anywhere
        made.append(path)
    return made


def _package() -> tuple[Any, Any, list[str]]:
    """Return the sources, the function that names a library, and the flags of every build."""
    sys.path.insert(0, str(ROOT / "src"))
    try:
        native = importlib.import_module("zoneout.ops.cpu.native")
    finally:
        sys.path.pop(0)
    flags = [flag for flag in native.build.FLAGS if flag != "-fPIC"]
    return native.SOURCES, native.prebuilt.file_name, flags


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Put the compiled loop into the wheel of the platform that CHOICE names."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        name = os.environ.get(CHOICE, "pure")
        if name == "pure" or version == "editable":
            return
        platform = PLATFORMS[name]
        folder = tempfile.TemporaryDirectory(prefix="zoneout-wheel-")
        self.finalize = lambda *done: folder.cleanup()  # type: ignore[method-assign]
        build_data["tag"], build_data["pure_python"] = f"py3-none-{platform.tag}", False
        for path in compile_loop(platform, Path(folder.name)):
            build_data["force_include"][str(path)] = f"zoneout/ops/cpu/prebuilt/{path.name}"


def main() -> None:
    """Build what is named on the command line."""
    known = (*PLATFORMS, "pure", "sdist")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", nargs="*", help=f"some of {', '.join(known)}; else all")
    parser.add_argument("--out", default="dist", help="the folder to write to (dist)")
    arguments = parser.parse_args()
    out = Path(arguments.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    for name in arguments.name or known:
        if name not in known:
            parser.error(f"name: expected one of {', '.join(known)}, got {name!r}")
        os.environ[CHOICE] = name
        print(out / (build_sdist if name == "sdist" else build_wheel)(str(out)))


if __name__ == "__main__":
    main()
