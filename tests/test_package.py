"""What is published: the wheel, built from the source archive, works without this checkout."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zoneout

pytest.importorskip("build")
pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[1]


def python(*arguments: str) -> str:
    """Run this Python with `arguments`, and return what it printed; what went wrong is shown."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=os.sep)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder that holds the wheel's content and nothing else."""
    folder = tmp_path_factory.mktemp("package")
    python("-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(ROOT))
    (wheel,) = (folder / "dist").glob("*.whl")
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    python(*pip, "--no-deps", "--no-index", "--target", str(folder / "installed"), str(wheel))
    return folder / "installed"


def run_installed(installed: Path, code: str) -> str:
    """Run `code` where `zoneout` can only be the installed copy, beside this environment's
    packages.
    """
    elsewhere = [path for path in sys.path if path and not Path(path).is_relative_to(ROOT / "src")]
    path = [str(installed), *elsewhere]
    return python("-I", "-S", "-c", f"import sys; sys.path[:] = {path!r}\n{code}")


def test_wheel_is_typed(installed):
    """Without the marker file, type checkers ignore every annotation of the package."""
    assert (installed / "zoneout" / "py.typed").is_file()


def test_wheel_holds_every_file(installed):
    """A module or a kernel that is in the checkout and not in the wheel fails, or is slow, for
    users alone.
    """

    def files(package: Path) -> set[str]:
        found = (file.relative_to(package) for file in package.rglob("*") if file.is_file())
        return {str(file) for file in found if "__pycache__" not in file.parts}

    assert files(installed / "zoneout") == files(ROOT / "src" / "zoneout")
    assert (installed / "zoneout_command.py").is_file()  # what the installed command runs


def test_installed_package_works(installed):
    """The installed copy is the one imported, has the version of the source, and runs."""
    code = """
import json, torch, zoneout as zo
layer = zo.LSTM(3, 4, noise=zo.Zoneout(cell=0.5, hidden=0.05))
output, _ = layer(torch.ones(5, 2, 3))
output.sum().backward()
import importlib.metadata
print(json.dumps([zo.__file__, zo.__version__, importlib.metadata.version("zoneout"), list(output.shape)]))
"""
    file, version, metadata, shape = json.loads(run_installed(installed, code))
    assert Path(file).is_relative_to(installed)
    assert version == metadata == zoneout.__version__
    assert shape == [5, 2, 4]


def test_import_needs_torch_and_numpy_only(installed):
    """A user with nothing but torch and numpy can import the package, and waits for nothing
    else.
    """
    code = """
import json, torch, numpy
before = set(sys.modules)
import zoneout
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""
    imported = set(json.loads(run_installed(installed, code)))
    assert "zoneout" in imported
    assert imported - {"zoneout", "torch", "numpy"} <= sys.stdlib_module_names


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_does_not_empty_an_environment_through_a_link(tmp_path):
    """Several clones share an environment by links, and `make` in one of them empties it."""
    clone, shared = tmp_path / "clone", tmp_path / "shared"
    clone.mkdir()
    shared.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, clone)
    (shared / "kept").touch()
    (clone / ".venv").symlink_to(shared)
    command = ["make", ".venv/.installed", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=clone)
    assert done.returncode != 0 and (shared / "kept").exists()
    assert f".venv: expected a folder of this clone, got a link to {shared}" in done.stdout
