"""The documentation site: it is built without a warning, and has every public name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import zoneout

pytest.importorskip("furo")
pytest.importorskip("myst_parser")
inventory = pytest.importorskip("sphinx.util.inventory")

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the site, as `make docs` builds it."""
    out = tmp_path_factory.mktemp("site")
    source = str(Path(zoneout.__file__).parents[1])  # the same copy as the tests'
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(out)],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_public_name_is_in_the_reference(site):
    """A name that users import is not described on any page."""
    entries = inventory.InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    found = {name for kind, names in entries.items() if kind.startswith("py:") for name in names}
    public = {f"zoneout.{name}" for name in zoneout.__all__}
    for module in (zoneout.init, zoneout.onnx):
        names = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
        ]  # fmt: skip
        public |= {f"{module.__name__}.{name}" for name in names}
    assert public - found == set()


def test_every_public_name_has_an_example():
    """A reader of the reference sees no call of a function or class."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    without = {
        name
        for name in zoneout.__all__
        if ">>>" not in (getattr(zoneout, name).__doc__ or "")
        and f"zo.{name}(" not in pages
        and f"zo.{name} " not in pages
        and not hasattr(getattr(zoneout, name), "__path__")
        and type(getattr(zoneout, name)).__name__ != "module"
    }
    assert without == set()


def test_pages_are_searchable(site):
    """The search of the site finds nothing."""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert '"hardware"' in index and "zoneout" in index
    assert (site / "search.html").is_file()


def test_pages_in_folders_link_to_the_others(site):
    """A link from the reference to a page lost its target, as links to files beside docs/ do."""
    page = (site / "api" / "layers.html").read_text(encoding="utf-8")
    assert 'href="../layers.html"><span' in page
