"""Run emulated kernels under ThreadSanitizer: `make test-races`.

    python tests/races.py [PYTEST ARGUMENTS]

To ThreadSanitizer each thread of a kernel is a thread. It knows the kernel's barriers, flags and
fences (`emulator.h`) and reports what two threads do to the same address without one of these
between them, in shared and in global memory, within a block and between blocks. A shuffle or a
product of a warp orders nothing. Copies count as made where they are asked for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
FILES = ("test_cuda_emulated.py", "test_cuda_cells.py", "test_cuda_rows.py", "test_cuda_norms.py")
# Threads of the diagonal kernel that have no unit read values of the last one, and ignore them: of
# its sizes only one has no such threads.
CHOSEN = "not gpu and (not (diagonal or min_gru or ind_rnn or side_by_side) or 10-both)"
OPTIONS = "ignore_noninstrumented_modules=1:history_size=0:exitcode=0"  # the reports decide


@cache
def command() -> tuple[str, ...] | None:
    """What is put before `python` so that it begins with ThreadSanitizer; None without it."""
    compiler, env = shutil.which("c++"), shutil.which("env")
    if compiler is None or env is None or not sys.platform.startswith("linux"):
        return None
    asked = [compiler, "-print-file-name=libtsan.so"]
    library = Path(subprocess.run(asked, capture_output=True, text=True).stdout.strip())
    if not library.is_file():
        return None
    whole: tuple[str, ...] = (env, f"LD_PRELOAD={library.resolve()}")
    if setarch := shutil.which("setarch"):  # it needs addresses that are not drawn from far apart
        whole = (setarch, os.uname().machine, "-R", *whole)
    tried = subprocess.run([*whole, sys.executable, "-c", "print(1)"], capture_output=True)
    return whole if tried.returncode == 0 else None


def reports_of(arguments: Sequence[str]) -> tuple[int, str]:
    """Run python with these arguments; return its exit status and ThreadSanitizer's reports."""
    before = command()
    assert before is not None
    with tempfile.TemporaryDirectory(prefix="zoneout-races-") as folder:
        # Libraries of this kind are not those of the other tests.
        (kernels := Path(folder) / "kernels").mkdir()
        variables = {
            "ZONEOUT_RACES": "1",
            "ZONEOUT_EMULATED": str(kernels),
            "TSAN_OPTIONS": f"{OPTIONS}:log_path={folder}/report",
            "OMP_NUM_THREADS": "1",
        }
        python = [*before, sys.executable, *arguments]
        done = subprocess.run(python, env=os.environ | variables, cwd=TESTS.parent)
        said = [path.read_text(errors="replace") for path in Path(folder).glob("report.*")]
        return done.returncode, re.sub(
            r"<null> <null> \((\S+\.so)\+(0x\w+)\)", _line, "".join(said)
        )


def _line(found: re.Match[str]) -> str:
    """Return the function and line of a place in a library loaded after the first report."""
    library, place = found.groups()
    reader = shutil.which("addr2line")
    if reader is None or not Path(library).is_file():
        return found[0]
    asked = [reader, "-Cfsp", "-e", library, place]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip() or found[0]


def main() -> None:
    """Run the tests of the emulated kernels, or those of the arguments."""
    if command() is None:
        raise SystemExit("tests/races.py: no ThreadSanitizer here; it comes with GCC on Linux")
    asked = sys.argv[1:] or ["-k", CHOSEN, *(str(TESTS / name) for name in FILES)]
    status, said = reports_of(["-m", "pytest", "-q", "-p", "no:cacheprovider", *asked])
    print(said)
    print(f"{said.count('WARNING: ThreadSanitizer')} races reported.")
    sys.exit(status or bool(said))


if __name__ == "__main__":
    main()
