"""Feed the package bytes that a coverage-guided fuzzer makes: `python benchmarks/fuzz.py [TARGET …]
[--runs 20000]`.

Needs atheris (`pip install atheris`, on Linux) and what the tests need. `layers`, `noises` and
`settings` are the tests in `tests/test_fuzz.py` and `tests/paper/test_fuzz_files.py`, their choices
made by the fuzzer; the others read files of its making. A target fails when anything but the
documented errors comes out; the bytes that did it are left in the folder that is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "paper")]
FILES = ("config", "vocabulary", "metrics", "weights", "checkpoint", "text", "packed")
TARGETS = ("layers", "noises", "settings", *FILES)


def target(name: str, work: Path) -> Callable[[bytes], Any]:
    """What is done with the bytes."""
    if name in ("layers", "noises", "settings"):
        import test_fuzz
        import test_fuzz_files

        tests: dict[str, Any] = {
            "layers": test_fuzz.test_any_layer_gives_the_right_result_or_a_sentence,
            "noises": test_fuzz.test_any_noise_is_made_or_refused,
            "settings": test_fuzz_files.test_any_json_as_a_config,
        }
        call: Callable[[bytes], Any] = tests[name].hypothesis.fuzz_one_input
        return call

    from zoneout.paper.data import datasets
    from zoneout.paper.data.corpora import load
    from zoneout.paper.data.datasets import DataError
    from zoneout.paper.disk import RunError
    from zoneout.paper.training import runs

    path = work / {
        "config": "config.json",
        "vocabulary": "vocabulary.json",
        "metrics": "metrics.jsonl",
        "weights": "best.safetensors",
        "checkpoint": "state.json",
    }.get(name, "text.txt")
    read: dict[str, Callable[[], Any]] = {
        "config": lambda: runs.read_config(work),
        "vocabulary": lambda: runs.read_vocabulary(work),
        "metrics": lambda: runs.read_metrics(work),
        "weights": lambda: runs.read_tensors(path),
        "checkpoint": lambda: runs.read_checkpoint(work, work / "metrics.jsonl"),
        "text": lambda: load(path),
        "packed": lambda: datasets.read(path),
    }
    allowed: tuple[type[Exception], ...] = (RunError, DataError)
    if name == "checkpoint":  # whoever reads one expects these, and passes it over
        allowed = (OSError, ValueError, KeyError, TypeError)
    heads = (
        b"\xfd7zXZ\x00",
        b"\x1f\x8b\x08",
        b"PK\x03\x04",
    )  # otherwise hardly one input in a million is packed

    def one(content: bytes) -> None:
        if name == "packed":
            content = heads[len(content) % 3] + content
        path.write_bytes(content)
        try:
            read[name]()
        except allowed as error:
            assert str(error), "an error without a word"

    return one


def fuzz(name: str, runs: int) -> None:
    """Fuzz one target, in a process of its own: the fuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=["zoneout"], enable_loader_override=False):
        import zoneout.paper.data.corpora
        import zoneout.paper.training.runs  # noqa: F401
    work = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    arguments = [
        sys.argv[0],
        f"-runs={runs}",
        f"-artifact_prefix={work}/",
        "-verbosity=0",
        "-max_len=4096",
    ]
    atheris.Setup(arguments, target(name, work))
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)}; all by default"
    )
    parser.add_argument(
        "--runs", type=int, default=20_000, help="inputs for each; a twentieth for the layers"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        parser.error(
            "atheris is not installed; pip install atheris (ZONEOUT_FUZZ=20 pytest needs only "
            "hypothesis)"
        )
    if options.one:
        fuzz(options.one, options.runs)
    failed = []
    for name in options.targets or TARGETS:
        if name not in TARGETS:
            parser.error(f"there is no target {name!r}; expected some of {', '.join(TARGETS)}")
        runs = options.runs // 20 if name == "layers" else options.runs
        command = [sys.executable, __file__, "--one", name, "--runs", str(runs)]
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
        print(
            f"{name:12} {runs:8,} inputs  {'good' if done.returncode == 0 else 'FAILED'}",
            flush=True,
        )
        if done.returncode:
            failed.append(name)
            print(done.stdout[-3000:] + done.stderr[-3000:])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
