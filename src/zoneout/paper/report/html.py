"""HTML pages: functions that build escaped HTML, and the style sheet of all pages.

A page is a single file and needs no network and no scripts. It follows the light or dark mode of
the reader's system, fits narrow and wide screens, and works with a keyboard and a screen reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from ..training.measures import LABELS
from . import plots


class Html(str):
    """A string that is HTML already and is not escaped again."""


def element(name: str, *children: Any, **attributes: Any) -> Html:
    """Return an HTML element. Children that are not `Html` are escaped.

    In the name of an attribute, `_` becomes `-`, and a `_` at the end is removed.

    >>> element("p", "1 < 2 ", element("b", "&"), class_="a b")
    '<p class="a b">1 &lt; 2 <b>&amp;</b></p>'
    """
    pairs = (
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{''.join(pairs)}>{join(children)}</{name}>")


def join(parts: Iterable[Any], between: str = "") -> Html:
    """Concatenate parts, with `between` between them. A part that is not `Html` is escaped."""
    return Html(
        between.join(part if isinstance(part, Html) else escape(str(part)) for part in parts)
    )


def code(text: str) -> Html:
    """Return a command as a code element. An option under 30 characters stays on one line."""
    words = text.split(" ")
    return element(
        "code",
        join((element("span", w) if w.startswith("--") and len(w) < 30 else w for w in words), " "),
    )


def link(to: str, text: Any) -> Html:
    """Return a link to an id on the same page."""
    return element("a", text, href=f"#{to}")


def table(
    caption: Any, head: Sequence[Sequence[Any]], rows: Sequence[Sequence[Any]], name: str
) -> Html:
    """Return a table that scrolls sideways on a narrow screen.

    The first cell of a row is its heading. A cell of `head` is a text, or a pair of a text and the
    number of columns that it spans.
    """
    lines = []
    for number, line in enumerate(head):
        cells = []
        for cell in line:
            text, span = cell if isinstance(cell, tuple) else (cell, 1)
            wide: dict[str, Any] = (
                {"scope": "colgroup", "colspan": span} if span > 1 else {"scope": "col"}
            )
            if number == 0 and span == 1 and len(head) > 1:
                wide["rowspan"] = len(head)
            cells.append(element("th", text, **wide))
        lines.append(element("tr", *cells))
    body = [
        element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in rest))
        for first, *rest in rows
    ]
    return element(
        "div",
        element(
            "table",
            element("caption", element("span", caption), id=f"{name}-caption"),
            element("thead", join(lines, "\n")),
            "\n",
            element("tbody", join(body, "\n")),
        ),
        class_="scroll",
        role="region",
        aria_labelledby=f"{name}-caption",
        tabindex=0,
    )


def figure(picture: Html, title: str, *words: Any, name: str) -> Html:
    """Return a figure: a picture (an svg element), a title, and a caption in paragraphs."""
    caption = element(
        "figcaption",
        element("p", element("strong", f"{title}.")),
        *(element("p", w) for w in words),
    )
    return element("figure", element("div", picture, class_="picture"), caption, id=name)


def learning_curves(curves: Sequence[plots.Curve], *words: Any) -> list[Html]:
    """Return a figure for each measure, with all curves that have a validation.

    The caption is `words`, then the best validation of each curve.
    """
    figures = []
    for measure in dict.fromkeys(curve.measure for curve in curves if curve.valid):
        shown = [curve for curve in curves if curve.valid and curve.measure == measure]
        title = f"Learning curves, {LABELS[measure]}"
        text = "Best validation: " + "; ".join(
            f"{c.name} {c.best[1]:.4g} at update {c.best[0]:,}" for c in shown
        )
        picture = Html(plots.svg(plots.figure(shown), f"fig-{measure}", title, text))
        figures.append(figure(picture, title, *words, f"{text}.", name=f"figure-{measure}"))
    return figures


def beside(*parts: Any) -> Html:
    """Return parts that stand beside each other on a wide screen, below each other on a phone."""
    return element("div", *(element("div", part) for part in parts), class_="beside")


def after(first: Any, second: Any) -> Html:
    """Return two parts: the second fills the room after the first, or stands below it."""
    return element("div", element("div", first), element("div", second), class_="after")


def section(name: str, title: str, *children: Any, level: int = 2) -> Html:
    """Return a section with a heading."""
    heading = element(f"h{level}", title, id=f"{name}-title")
    return element(
        "section", heading, "\n", join(children, "\n"), id=name, aria_labelledby=f"{name}-title"
    )


def document(title: str, lead: Any, sections: Sequence[tuple[str, str, Html]], footer: Any) -> str:
    """Return a whole page. Each section is (id, label in the table of contents, HTML)."""
    contents = element("ul", *(element("li", link(name, label)) for name, label, _ in sections))
    body = join(
        [
            element("a", "Skip to the results", class_="skip", href="#main"),
            element("header", element("h1", title), lead),
            element("nav", contents, aria_label="Contents"),
            element("main", join((each for _, _, each in sections), "\n"), id="main", tabindex=-1),
            element("footer", footer),
        ],
        "\n",
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{STYLE}
{plots.dark_style()}</style>
</head>
<body>
{body}
</body>
</html>
"""


STYLE = """\
:root { --ink: #222222; --soft: #5c5c5a; --paper: #ffffff; --wash: #f5f5f2; --line: #d9d9d5; --link: #0060a0;
  --good: #00694f; --bad: #b04000;
  color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e6e3; --soft: #b3b1ac; --paper: #1b1b1a; --wash: #262624; --line: #454542; --link: #7cc4f5;
    --good: #3ccba0; --bad: #ff9459; } }
* { box-sizing: border-box; }
html { scroll-padding-top: 1rem; }
body { font: 1rem/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 76rem; padding: 1rem; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 1rem 0 .5rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .5rem; padding-top: .5rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.08rem; margin: 2rem 0 .5rem; }
p, li, figcaption, dd, pre { max-width: 44rem; }
a { color: var(--link); text-underline-offset: .15em; }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; border-radius: 2px; }
main:focus { outline: none; }
.skip { position: absolute; left: -100rem; }
.skip:focus { left: 1rem; top: .5rem; background: var(--paper); padding: .5rem; z-index: 2; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; }
nav a { display: inline-block; padding: .3rem 0; }
.scroll { overflow-x: auto; margin: 1rem 0 1.5rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
caption { text-align: left; padding-bottom: .5rem; color: var(--soft); }
caption > span { position: sticky; left: 0; display: inline-block; max-width: min(44rem, 100vw - 2rem); }
th, td { padding: .3rem .6rem; text-align: right; vertical-align: top; white-space: nowrap; }
tbody tr, thead { border-bottom: 1px solid var(--line); }
thead th { vertical-align: bottom; font-weight: 600; white-space: normal; }
thead th[scope=colgroup] { text-align: center; }
th:first-child, tbody th { text-align: left; }
tbody th { font-weight: normal; white-space: normal; min-width: 8.5rem; position: sticky; left: 0;
  background: var(--paper); background-clip: padding-box; }
@media (min-width: 60rem) { tbody th { min-width: 13rem; } }
td a { display: inline-block; }
small { color: var(--soft); font-size: .85em; }
#figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(32rem, 100%), 1fr)); gap: 0 3rem; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(32rem, 100%), 1fr)); gap: 0 3rem; }
.after { display: flex; flex-wrap: wrap; gap: 0 3rem; }
.after > :first-child { max-width: 100%; } .after > :last-child { flex: 1 1 min(24rem, 100%); display: grid;
  grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 0 3rem; }
.after figure { margin: 0 0 2rem; } .after tbody th { min-width: 8.5rem; }
@media (min-width: 60rem) { p.columns { max-width: none; columns: 2; column-gap: 3rem; } }
.beside > div { min-width: 0; } .beside figure { margin: 0 0 2rem; }
#figures > h2 { grid-column: 1 / -1; }
figure { margin: 2rem 0; min-width: 0; }
.picture svg { display: block; width: 100%; height: auto; max-width: 40rem; }
.picture svg text { font-family: system-ui, sans-serif !important; }
figcaption { margin-top: .5rem; font-size: .95rem; } figcaption p { margin: .4rem 0; }
code { font: .88em/1.5 ui-monospace, monospace; background: var(--wash); padding: .1em .3em; border-radius: 3px;
  overflow-wrap: anywhere; white-space: normal; }
code span { white-space: nowrap; }
pre { background: var(--wash); padding: 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.claims { list-style: none; padding: 0; margin: 0; }
@media (min-width: 60rem) { .group { display: grid; grid-template-columns: 1fr 1fr; gap: 0 2.5rem; } }
.group figure { margin: 0 0 1rem; }
.claims li { margin: .9rem 0; padding-left: .8rem; border-left: 3px solid var(--line); }
.claims small { display: block; margin-top: .15rem; }
.verdict { font-weight: 600; margin-right: .5rem; white-space: nowrap; }
.holds { color: var(--good); } .does { color: var(--bad); } .cannot { color: var(--soft); }
dt { margin-top: .8rem; } dd { margin: 0 0 0 1rem; }
details { margin: 1rem 0; } summary { cursor: pointer; padding: .3rem 0; }
dt:target, figure:target { background: var(--wash); outline: .4rem solid var(--wash); }
footer { margin-top: 4rem; border-top: 1px solid var(--line); color: var(--soft); font-size: .9rem; }
@media print { nav, .skip { display: none; } .scroll { overflow: visible; } figure { break-inside: avoid; } }
"""
