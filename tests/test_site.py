"""The documentation site: it is built without a warning, and has every public name."""

import inspect
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import browsing
import matplotlib.image
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


def test_classes_show_their_arguments(site):
    """The head of a class is (*positional, **given), which says nothing."""
    for name, argument in (("noises", "at_eval"), ("layers", "proj_size"), ("step-cells", "bias")):
        page = (site / "api" / f"{name}.html").read_text(encoding="utf-8")
        heads = "".join(re.findall(r"(?s)<dt class=\"sig.*?</dt>", page))
        assert f'<span class="pre">{argument}</span>' in heads
        assert not re.search(r'<span class="pre">(positional|args|options|given)</span>', heads)


def test_no_argument_is_explained_elsewhere():
    """A reader of the reference is sent to another place to learn what an argument is."""
    for name, value in PUBLIC.items():
        text = inspect.getdoc(value) or ""
        assert "as in `nn." not in text and not re.search(r"^ +\w+: see `", text, re.M), name


def test_every_cell_has_words_and_its_equation(site):
    """A published cell is a bare name in the reference."""
    page = (site / "api" / "cells.html").read_text(encoding="utf-8")
    assert "<p>The gates also see c: i and f the old one, o the new one.</p>" in page
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


def test_the_menu_leads_from_the_first_step_to_the_details(site):
    """A reader meets details before the next step, or one name twice and has to guess the page."""
    page = (site / "index.html").read_text(encoding="utf-8")
    menu = page[page.index('class="sidebar-tree"') :].partition("</aside>")[0]
    names = re.findall(r'<a class="reference internal" href="[^"]+">([^<]+)</a>', menu)
    assert names[:14] == [
        *("Get started", "Which rates", "Layers", "Methods", "Your own cell", "Training tool"),
        *("Reproducing the paper", "What of the paper holds up", "Coming from another toolkit"),
        *("Speed", "Hardware", "Architecture", "Reliability", "Log"),
    ]
    assert len(names) > 25 and len(names) == len(set(names))


def test_the_first_page_shows_code_and_not_the_menu_again(site):
    """A visitor reads a list of pages, and has not seen what the package is like."""
    page = (site / "index.html").read_text(encoding="utf-8")
    body = page[page.index('<article role="main"') :].partition("</article>")[0]
    assert '<span class="n">zo</span>' in body and "Zoneout" in body
    assert "toctree-l1" not in body


def test_the_site_has_the_examples(site):
    """A reader of the site sees the name of a script and cannot get it."""
    page = (site / "examples.html").read_text(encoding="utf-8")
    copies = {found.name for found in (site / "_downloads").rglob("*.py")}
    for script in (DOCS.parent / "examples").glob("*.py"):
        assert script.name in copies and f'/{script.name}">' in page


# --- in a browser (make test-browser) -------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing.started() as found:
        yield found


@pytest.fixture(scope="module")
def address(browser: Any, site: Path) -> Iterator[str]:
    """The address of the site on a server of this machine, since a search loads its index."""
    handler = partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Write nothing."""


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Any]:
    opened: list[browsing.Visit] = []

    def go(page: str, size: str = "desktop", scheme: str = "light") -> browsing.Visit:
        opened.append(browsing.Visit(browser, f"{address}/{page}", size, scheme))
        return opened[-1]

    yield go
    for one in opened:
        one.context.close()


@pytest.mark.parametrize("size", browsing.SIZES)
def test_pages_load_and_fit(site: Path, address: str, visit: Any, size: str) -> None:
    """A page asks another server for something, complains, or is wider than the screen."""
    pages = sorted(page.relative_to(site).as_posix() for page in site.glob("**/*.html"))
    assert len(pages) > 25
    seen = visit("index.html", size)
    wide = []
    for page in pages:
        seen.page.goto(f"{address}/{page}")
        if seen.page.evaluate("document.documentElement.scrollWidth") > browsing.SIZES[size][0]:
            wide.append(page)
    assert wide == []
    trouble = [one for one in seen.trouble if not one.endswith("/icon.svg")]  # cut by the next page
    assert trouble == [] and all(url.startswith(address) for url in seen.asked)


def test_the_answer_of_a_wide_table_is_on_the_screen_of_a_phone(visit: Any) -> None:
    """Somebody with a phone sees the rates of other toolkits, and not what they are here."""
    page = visit("coming-from.html", "phone").page
    table = page.locator("#at-a-glance table")
    for row in table.locator("tbody tr").all():
        box = row.locator("td").nth(1).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    assert table.locator("th").nth(1).inner_text() == "ours"


@pytest.mark.parametrize("size", browsing.SIZES)
def test_the_rows_of_a_wide_table_are_low(visit: Any, size: str) -> None:
    """The words of a cell stand one below the other, so that a table is ten screens long."""
    rows = visit("speed.html", size).page.locator("#gpu table").first.locator("tbody tr").all()
    assert len(rows) > 10
    assert max(row.bounding_box()["height"] for row in rows) < 100  # three lines and the padding


def test_search_finds_pages_and_names(visit: Any) -> None:
    """A reader types a word or a name into the search, and its page is not offered."""
    page = visit("index.html").page
    for words, found in (("orthogonal", "api/modules.html"), ("padded batches", "layers.html")):
        page.locator("input[name=q]").first.fill(words)
        page.locator("input[name=q]").first.press("Enter")
        page.wait_for_selector("#search-results li a")
        links = page.locator("#search-results li a").evaluate_all("all => all.map(a => a.href)")
        assert any(found in link for link in links), (words, links)


def test_the_menu_opens_on_a_phone(visit: Any) -> None:
    """On a phone no other page can be reached."""
    page = visit("start.html", "phone").page
    entry = page.locator(".sidebar-tree a", has_text="Which rates")
    assert not entry.is_visible() or entry.bounding_box()["x"] < 0
    page.locator(".mobile-header label[for=__navigation]").click()
    entry.click()
    page.wait_for_url("**/rates.html")


@pytest.mark.parametrize(("system", "theme"), [("dark", "auto"), ("light", "dark")])
def test_pictures_are_dark_in_the_dark(visit: Any, system: str, theme: str) -> None:
    """A picture is a white field at night, whether the system or the reader chose the dark."""
    page = visit("index.html", "desktop", system).page
    page.evaluate(f"localStorage.setItem('theme', '{theme}')")
    page.reload()
    picture = page.locator("article img")
    picture.evaluate("e => e.decode()")
    image = matplotlib.image.imread(io.BytesIO(picture.screenshot()))[..., :3]
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert abs(image[2, 2] * 255 - [int(n) for n in re.findall(r"\d+", ground)]).max() < 3
    assert image.mean() < 0.3
