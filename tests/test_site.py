"""The documentation site: it is built without a warning, and has every public name."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zoneout
from zoneout.definition import Definition
from zoneout.recurrent import RecurrentModule

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


def public() -> dict[str, Any]:
    """Everything that users import, by its name after `zoneout.`."""
    found: dict[str, Any] = {}
    for name in zoneout.__all__:
        value = getattr(zoneout, name)
        if not inspect.ismodule(value):
            found[name] = value
            continue
        inside = getattr(value, "__all__", None) or [
            key for key, own in vars(value).items()
            if getattr(own, "__module__", "") == value.__name__ and not key.startswith("_")
        ]  # fmt: skip
        found |= {f"{name}.{key}": getattr(value, key) for key in inside}
    return found


PUBLIC = public()


def documented(value: Any) -> set[str]:
    """Return the names of the arguments that a docstring describes."""
    lines = re.findall(r"^ {4,}(\w[\w, ]*):(?: |$)", inspect.getdoc(value) or "", re.MULTILINE)
    return {name.strip() for line in lines for name in line.split(",")}


def arguments(value: Any) -> set[str]:
    """Return the names of the arguments of a call that are not positional only."""
    given = inspect.signature(value).parameters.values()
    return {one.name for one in given if one.kind is not one.POSITIONAL_ONLY} - {"self"}


def test_every_public_name_is_in_the_reference(site):
    """A name that users import is not described on any page."""
    entries = inventory.InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    found = {name for kind, names in entries.items() if kind.startswith("py:") for name in names}
    assert {f"zoneout.{name}" for name in PUBLIC} - found == set()


def test_arguments_returns_and_examples():
    """A reader of the reference does not learn what to pass, what returns, or how a call looks."""
    missing = {}
    for name, value in PUBLIC.items():
        if not inspect.isclass(value) and not inspect.isfunction(value):
            continue
        doc = inspect.getdoc(value) or ""
        gaps = [] if ">>>" in doc else ["example"]
        if not (inspect.isclass(value) and issubclass(value, Exception)):
            gaps += sorted(arguments(value) - documented(value))
        if inspect.isfunction(value) and "Returns:" not in doc:
            gaps.append("Returns")
        if gaps:
            missing[name] = gaps
    assert missing == {}


def test_calls_are_described():
    """A layer's page shows its construction, and neither the arguments nor the result of a call."""
    for name, value in PUBLIC.items():
        if issubclass(value if inspect.isclass(value) else object, RecurrentModule):
            assert arguments(value.forward) - documented(value.forward) == set(), name
            assert "Returns:" in inspect.getdoc(value.forward), name


def test_calls_are_on_the_page(site):
    """The method that describes a call is not in the reference."""
    pages = (site / "api" / "layers.html", site / "api" / "step-cells.html")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    names = ("LSTM", "GRU", "RNN", "Recurrent")
    for name in (*names, *(f"{name}Cell" for name in names), "ZoneoutCell"):
        assert f'id="zoneout.{name}.forward"' in text


def test_every_cell_has_words_and_its_equation(site):
    """A published cell is a bare name in the reference."""
    page = (site / "api" / "cells.html").read_text(encoding="utf-8")
    assert "An LSTM with a forget gate only" in page
    for name, cell in PUBLIC.items():
        if isinstance(cell, Definition):
            assert f'id="zoneout.{name}"' in page and cell.function.__doc__, name
            assert f'<span class="nf">{cell.function.__name__}</span>' in page, name


def test_pages_are_searchable(site):
    """The search of the site finds nothing."""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert '"hardware"' in index and "zoneout" in index
    assert (site / "search.html").is_file()


def test_pages_in_folders_link_to_the_others(site):
    """A link from the reference to a page lost its target, as links to files beside docs/ do."""
    page = (site / "api" / "layers.html").read_text(encoding="utf-8")
    assert 'href="../layers.html"><span' in page
