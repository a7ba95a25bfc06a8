"""Documents: links resolve, the index of docs/ is complete, and the citation has the package's
version.
"""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

import zoneout

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
NAMES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted(DOCS.glob("**/*.md"))]

FENCED = re.compile(r"(?ms)^[ \t]*(?P<fence>```|~~~).*?^[ \t]*(?P=fence)[ \t]*$")
CODE = re.compile(r"(?s)(?<!`)(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\1(?!`)")  # within a paragraph
HEADING = re.compile(r"(?m)^ {0,3}#{1,6}[ \t]+(?P<text>.*?)(?:[ \t]+#+)?[ \t]*$")
LINK = re.compile(
    r"\]\(\s*<?(?P<inline>[^\s<>()]+)>?(?:\s+\"[^\"]*\")?\s*\)"  # [text](target "title")
    r"|(?m:^ {0,3}\[[^]]+\]:\s*<?(?P<named>\S+?)>?$)"  # [name]: target
)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")  # https:, mailto:


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", heading)  # the text of a link
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    """Return every anchor of a page; GitHub numbers headings that are alike."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    seen: Counter[str] = Counter()
    for heading in HEADING.finditer(text):
        name = slug(heading["text"])
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def links(page: Path) -> list[str]:
    """Return the targets of a page's relative links; those in code are not links."""
    text = CODE.sub("", FENCED.sub("", page.read_text(encoding="utf-8")))
    targets = [link["inline"] or link["named"] for link in LINK.finditer(text)]
    return [unquote(target) for target in targets if not ELSEWHERE.match(target)]


def complaint(page: Path, link: str) -> str:
    """Return what is wrong with a link, or nothing."""
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.is_relative_to(ROOT):
        return "leads out of the repository"
    if not target.exists():
        return "no such file"
    if anchor and (target.suffix != ".md" or anchor not in anchors(target)):
        return "no such heading"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    """A link leads to an error page, or to the top of a long page instead of the section."""
    assert {link: why for link in links(page) if (why := complaint(page, link))} == {}


def test_links_and_anchors_are_found(tmp_path):
    """The test of the links passes because it finds no links, or accepts every link."""
    page = tmp_path / "page.md"
    page.write_text(
        "# `zo.masks`, and *why*?\n## Same ##\n## Same\n~~~sh\n# no heading [no](no.md)\n~~~\n"
        '[one\nlink](a.md#b) ![image](c.png) [`code`](<d.md> "title") `[no](no.md)` [web](https://x.y)\n\n[e]: f.md\n'
    )
    assert links(page) == ["a.md#b", "c.png", "d.md", "f.md"]
    assert anchors(page) == {"zomasks-and-why", "same", "same-1"}
    assert sum(len(links(page)) for page in PAGES) > 50, "no links found in the pages"
    wrong = {
        "none.md": "no such file",
        "README.md#none": "no such heading",
        "LICENSE#a": "no such heading",
    }
    wrong |= {"../..": "leads out of the repository", "README.md": "", "docs": ""}
    assert {link: complaint(ROOT / "README.md", link) for link in wrong} == wrong


def test_the_index_names_every_page():
    """A page in docs/ is missing from the index, so readers of the index do not find it."""
    index = DOCS / "README.md"
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in links(index)}
    assert {
        page.name for page in DOCS.glob("**/*.md") if page != index and page not in linked
    } == set()


def modules() -> list[list[str]]:
    """The modules of the architecture page's first table, row by row."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    table = text[text.index("| in `src/zoneout`") : text.index("| in `ops/`")]
    rows = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    return [
        [name.removesuffix(".py").rstrip("/") for name in re.findall("`(.+?)`", row)]
        for row in rows
    ]


def test_the_architecture_names_every_module():
    """A reader looks for a file in the tree of the architecture page and does not find it."""
    named = {name for row in modules() for name in row}
    folder = ROOT / "src" / "zoneout"
    there = {p.stem for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert there - {"__init__", "__main__"} == named - {"../zoneout_command"}
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    files = [path.name for path in (folder / "ops").glob("*.py")]
    assert [name for name in files if f"`{name}`" not in text] == []


def test_the_architecture_is_in_the_order_of_imports():
    """The page says that a file imports only what stands above it, and that is not so."""
    place = {name: row for row, names in enumerate(modules()) for name in names}
    wrong = []
    for name, row in place.items():
        if name in ("ops", "paper", "systems", "../zoneout_command"):
            continue  # folders; the operator's parts also import what stands above
        path = ROOT / "src" / "zoneout" / name
        files = path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        for file in files:
            dots = r"\.\." if path.is_dir() else r"\."
            text = file.read_text(encoding="utf-8")
            for found in re.findall(
                rf"^from {dots}([a-z_]+)?[a-z_.]* import (.+)", text, re.MULTILINE
            ):
                names = [found[0]] if found[0] else re.findall(r"[a-z_]+", found[1])
                wrong += [f"{file.name} imports {n}" for n in names if place.get(n, row) > row]
    assert wrong == []


def test_the_citation_has_the_version_of_the_package():
    """A citation names a version that the package does not have."""
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    versions = [
        line.partition(":")[2].strip(" \"'") for line in lines if line.startswith("version:")
    ]
    assert versions == [zoneout.__version__]
