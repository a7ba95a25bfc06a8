"""Every kind of page in a real browser, at the width of a desktop and of a phone, in light and in
dark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browsing
import fabricated
import pytest
from browsing import SIZES, Visit

from zoneout.paper.disk import write_record
from zoneout.paper.report.figures import CLAIMS, FIGURES, draw, draw_all
from zoneout.paper.report.pages import paper_page, runs_page

ROOT = Path(__file__).parents[2]
BENCHMARKS, RESULTS = ROOT / "benchmarks" / "results.csv", ROOT / "results"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing.started() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of the paper with our results, with invented ones, without any; one of runs, of a
    demo and of a sweep.
    """
    folder = tmp_path_factory.mktemp("pages")
    fabricated.everything(folder / "results")
    plain = fabricated.run_folder(folder, "plain", best=1.9)
    zoned = fabricated.run_folder(folder, "zoned", best=1.7, **{"zoneout.cell": 0.5})
    write_record(plain / "gradients.json", fabricated.flow("x"))
    texts = {
        "ours": paper_page(RESULTS, BENCHMARKS),
        "paper": paper_page(folder / "results", BENCHMARKS),
        "nothing": paper_page(folder / "none", BENCHMARKS),
        "runs": runs_page([plain, zoned]),
        "demo": fabricated.demo_page(folder / "demos", "a_name_that_goes_on" * 9),
        "sweep": fabricated.sweep_page(folder / "sweep"),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


def figure_is_empty(name: str) -> bool:
    drawn = draw(name, RESULTS)
    return drawn.missing == drawn.recipes


@pytest.fixture
def visit(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    opened: list[Visit] = []

    def go(name: str, size: str, scheme: str = "light") -> Visit:
        opened.append(Visit(browser, pages[name].as_uri(), size, scheme))
        return opened[-1]

    yield go
    for one in opened:
        one.context.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["ours", "paper", "nothing", "runs", "demo", "sweep"])
def test_everything_is_there_and_nothing_fails(
    name: str, size: str, visit: Any, pages: dict[str, Path]
) -> None:
    """A table or a figure is empty in a browser, something is fetched, or the browser complains."""
    seen = visit(name, size)
    page = seen.page
    assert not seen.trouble and seen.asked == [pages[name].as_uri()]
    tables, figures = page.locator("main table"), page.locator("figure svg")
    of_claims = sum(not figure_is_empty(name) for name in CLAIMS)
    expected = {
        "ours": len(draw_all(RESULTS)) + of_claims,
        "paper": len(FIGURES) + len(CLAIMS),
        "nothing": len(FIGURES),
        "runs": 2,
        "demo": 1,
        "sweep": 2,
    }[name]
    assert figures.count() == expected and tables.count() >= (1 if name in ("demo", "sweep") else 2)
    for number in range(expected):
        box = figures.nth(number).bounding_box()
        assert box["width"] > 250 and box["height"] > 60
        assert figures.nth(number).locator("text").count() > 0
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    for number in range(tables.count()):
        assert (
            tables.nth(number).is_visible() and tables.nth(number).locator("tbody tr").count() > 0
        )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["ours", "paper", "demo", "sweep"])
def test_the_page_fits_the_screen(name: str, size: str, visit: Any) -> None:
    """On a phone the whole page has to be pushed from side to side, or a text is too small to
    read.
    """
    page = visit(name, size).page
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    smallest = page.evaluate(
        """() => Math.min(...[...document.querySelectorAll('main *')]
             .filter(e => e.children.length === 0 && e.textContent.trim() && e.closest('svg') === null)
             .map(e => parseFloat(getComputedStyle(e).fontSize)))"""
    )
    assert smallest >= 12
    ticks = page.evaluate(
        """() => Math.min(...[...document.querySelectorAll('figure svg text')]
             .map(e => e.getBoundingClientRect().height).filter(h => h > 0))"""
    )
    assert ticks >= 7


def test_a_narrow_table_scrolls_by_keyboard_with_its_headings_in_sight(visit: Any) -> None:
    """On a phone the last columns cannot be reached without a finger, or nobody knows of which
    row they are.
    """
    page = visit("paper", "phone").page
    region = page.locator(".scroll").first
    region.focus()
    assert region.evaluate("e => e.scrollWidth > e.clientWidth")
    heading = region.locator("tbody th").first
    left = heading.bounding_box()["x"]
    region.evaluate("e => e.scrollLeft = 200")
    assert region.evaluate("e => e.scrollLeft") > 0 and abs(heading.bounding_box()["x"] - left) < 1


def test_both_models_of_the_demo_are_on_the_screen_of_a_phone(visit: Any) -> None:
    """The column of zoneout is beyond the edge, so that nothing is compared."""
    region = visit("demo", "phone").page.locator(".scroll").first
    assert region.evaluate("e => e.scrollWidth <= e.clientWidth")


def test_the_first_key_leads_past_the_contents(visit: Any) -> None:
    """Somebody with a keyboard walks through all links before the results."""
    page = visit("paper", "desktop").page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_a_number_leads_to_its_command(visit: Any) -> None:
    """The link of a number is not one."""
    page = visit("paper", "desktop").page
    page.locator('a[href="#make-char_ptb_zoneout"]').first.click()
    page.wait_for_function("location.hash === '#make-char_ptb_zoneout'")
    assert page.locator("#make-char_ptb_zoneout").evaluate(
        "e => e.getBoundingClientRect().top < innerHeight"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["paper", "demo", "sweep"])
def test_it_is_dark_in_the_dark(name: str, scheme: str, visit: Any) -> None:
    """The page or a figure is a white field at night, or its letters vanish."""
    page = visit(name, "desktop", scheme).page
    look = page.evaluate(
        """() => {
          const grey = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number); return (r + g + b) / 3 };
          const svg = document.querySelector('figure svg');
          return { page: grey(getComputedStyle(document.body).backgroundColor),
                   ink: grey(getComputedStyle(document.body).color),
                   picture: grey(getComputedStyle(svg.querySelector('[id$=patch_1] path')).fill),
                   letters: [...svg.querySelectorAll('text')].map(t => grey(getComputedStyle(t).fill)) } }"""
    )
    grounds, inks = (look["page"], look["picture"]), (look["ink"], *look["letters"])
    assert all(g < 60 for g in grounds) if scheme == "dark" else all(g > 240 for g in grounds)
    assert all(abs(ink - look["page"]) > 100 for ink in inks)


def test_the_width_of_a_desktop_is_used(visit: Any) -> None:
    """Half of a page is empty, and what belongs together is far apart."""
    right = "all => Math.max(...all.map(e => e.getBoundingClientRect().right))"
    page = visit("demo", "desktop").page
    assert page.locator("header p").bounding_box()["width"] > 1100
    page = visit("sweep", "desktop").page
    table, pictures = page.locator("table").bounding_box(), page.locator("figure svg")
    assert pictures.evaluate_all(right) > 1200
    assert pictures.first.bounding_box()["y"] < table["y"] + table["height"]
