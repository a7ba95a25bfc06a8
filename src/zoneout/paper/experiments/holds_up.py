"""The page docs/holds-up.md: what of the paper holds up, made from the records alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from textwrap import fill

from .claims import GROUPS, Claim, Group
from .evidence import RULES, VERDICTS, Book, Finding, deviations

PICTURES = "pictures"  # beside the page; `zoneout figures` draws them
LEFT_OUT = (
    "Claims about the state of the art of 2016 are left out, since no run checks them. So is "
    "recurrent dropout with a held output gate (section 3.3): the paper does not say how it did."
)
MARKS = dict(zip(VERDICTS, ("✓ holds", "✗ does not hold here", "? cannot tell")))


def judged(book: Book) -> list[tuple[Group, list[tuple[Claim, Finding]]]]:
    """Return every group of claims with its findings."""
    return [(group, [(claim, claim.test(book)) for claim in group.claims]) for group in GROUPS]


def tally(book: Book, findings: list[Finding]) -> str:
    """Return how many claims have each verdict, in words."""
    count = Counter(finding.verdict for finding in findings)
    waiting = sum(waits(book, finding) for finding in findings)
    why = f", {waiting} of them because rows have not been run" if waiting else ""
    return (
        f"Of {len(findings)} claims, {count['holds']} hold here, {count['does not hold here']} do "
        f"not, and of {count['cannot tell']} these runs cannot tell{why}."
    )


def waits(book: Book, finding: Finding) -> bool:
    """Return whether a verdict is open while a row that it compares has no run."""
    return finding.verdict == "cannot tell" and not all(map(book.records.get, finding.recipes))


def mark(book: Book, finding: Finding) -> str:
    """Return a verdict as the page shows it."""
    return MARKS[finding.verdict] + (": not run" if waits(book, finding) else "")


def has_figure(book: Book, group: Group, findings: list[tuple[Claim, Finding]]) -> bool:
    """Return whether any row of a group has a record, so that its figure shows something."""
    return any(book.records[row] for _, finding in findings for row in finding.recipes)


def wrapped(text: str, indent: str = "") -> str:
    return fill(text, 100, break_on_hyphens=False, subsequent_indent=indent)


def bullet(text: str) -> str:
    return wrapped(f"* {text}", "  ")


def sources(book: Book) -> str:
    """Return the table of the standard deviations: their sizes, and the rows they come from."""
    head = ["| task | sd, validation / test | pooled over |", "|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in deviations(book))])


def document(results: Path | str) -> str:
    """Return the page docs/holds-up.md."""
    book = Book(Path(results))
    groups = judged(book)
    every = [finding for _, found in groups for _, finding in found]
    lead = (
        f"{tally(book, every)} Every verdict is computed from the records in `results/`, and "
        "`zoneout reproduce --write` makes this page. Numbers are validation / test means ± "
        "standard deviation over seeds; lower is better. [All results](results.md), [how they are "
        "made](reproducing.md)."
    )
    parts = ["# What of the paper holds up", wrapped(lead)]
    for group, found in groups:
        lines = [f"## {group.title}", ""]
        if has_figure(book, group, found):
            lines += [f"![{group.title}]({PICTURES}/{group.figure}.svg)", ""]
        lines += ["| the paper says | verdict | evidence |", "|---|---|---|"]
        lines += [
            f"| {claim.sentence} ({claim.where}) | {mark(book, finding)} | {finding.evidence} |"
            for claim, finding in found
        ]
        parts.append("\n".join(lines))
    parts += ["## The rules", "\n".join(map(bullet, RULES)), sources(book), wrapped(LEFT_OUT)]
    return "\n\n".join(parts) + "\n"
