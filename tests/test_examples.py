"""The scripts in examples/ run as a user runs them, and what they claim about their results
holds.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {  # what `make test-ecosystem` installs
    "hf_trainer": ["transformers", "accelerate"],
    "lightning_module": ["lightning"],
    "pytorch_forecasting_rnn": ["pytorch_forecasting", "lightning"],
    "recurrent_ppo": ["gymnasium"],
}
STRICT = ["-W", "error"]  # a warning is an error, except in packages that warn of themselves
LOOSE = {"hf_trainer", "lightning_module", "pytorch_forecasting_rnn"}
ARGUMENTS = {
    "compile_and_autocast": ["aot_eager"]
}  # inductor's C++ is tested elsewhere, and takes long to build


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_example_runs(script, tmp_path):
    """A newcomer's first script ends in a traceback, warns, leaves files behind, or no longer
    shows what it says.
    """
    for package in NEEDS.get(script.stem, []):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    strict = [] if script.stem in LOOSE else STRICT
    command = [sys.executable, *strict, str(script), *ARGUMENTS.get(script.stem, [])]
    # In the examples' own folder no package is in sight: the one that is tested has to be named.
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    # One thread: these are small, and on a busy machine two would wait for each other.
    environment = os.environ | {
        "PYTHONPATH": path,
        "PYTHONIOENCODING": "utf-8",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) > 5, "there is nothing to read"
    assert not done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_example_is_short(script):
    """An example grew, so that a newcomer can no longer read it in one sitting."""
    assert len(script.read_text(encoding="utf-8").splitlines()) < 80


def test_page_names_every_example():
    """An example is not in docs/examples.md, so readers of the site do not find it."""
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert [script.name for script in EXAMPLES if f"examples/{script.name}" not in page] == []


def test_there_are_examples():
    """The folder is elsewhere, and nothing above was run."""
    assert len(EXAMPLES) >= 4
