"""The first section of the report: what of the paper holds up, with a figure for each group."""

from __future__ import annotations

from pathlib import Path

from ..experiments.claims import Claim
from ..experiments.evidence import RULES, Book, Finding, deviations
from ..experiments.holds_up import LEFT_OUT, has_figure, judged, mark, tally
from . import figures, plots
from .html import Html, element, figure, join, link, section, table

TITLE = "What of the paper holds up"


def verdicts(results: Path) -> Html:
    """Return the section of the claims."""
    book = Book(results)
    groups = judged(book)
    every = [finding for _, found in groups for _, finding in found]
    parts = [element("p", element("strong", tally(book, every)), " Each verdict is computed.")]
    for group, found in groups:
        claims = [claim_item(book, claim, finding) for claim, finding in found]
        inside: list[Html] = [element("ul", *claims, class_="claims")]
        if has_figure(book, group, found):
            drawn = figures.draw(group.figure, results)
            picture = plots.svg(drawn.figure, f"fig-{drawn.name}", drawn.title, drawn.text)
            finding, words = figures.caption(drawn)
            inside.append(figure(Html(picture), finding, *words, name=f"figure-{drawn.name}"))
        beside = element("div", *inside, class_="group")
        parts.append(section(f"claims-{group.name}", group.title, beside, level=3))
    return section("verdicts", TITLE, *parts, rules(book))


def rules(book: Book) -> Html:
    """Return the rules of the verdicts, folded, with the standard deviations that they use."""
    items = [element("li", text.replace("**", "")) for text in RULES]
    head = [["Task", "sd, validation / test", "Pooled over"]]
    scatter = table("Standard deviations over seeds", head, deviations(book), "deviations")
    inside = (element("ul", *items), scatter, element("p", LEFT_OUT))
    return element("details", element("summary", "The rules"), *inside)


def claim_item(book: Book, claim: Claim, finding: Finding) -> Html:
    """Return a claim as an item of a list: verdict, sentence, evidence and links to commands."""
    shown = mark(book, finding)
    verdict = element("span", shown, class_=f"verdict {finding.verdict.split()[0]}")
    made = [link(f"make-{name}", number + 1) for number, name in enumerate(finding.recipes)]
    commands = [" Made by: ", join(made, ", "), "."] if made else []
    evidence = element("small", finding.evidence, *commands)
    return element(
        "li", verdict, element("span", f"{claim.sentence} "), f"({claim.where}) ", evidence
    )
