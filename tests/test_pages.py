"""Documents: links resolve, the index of docs/ is complete, and the citation has the package's
version.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
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


def named_files(text: str) -> list[tuple[str, str]]:
    """The files and folders that the tables of the architecture page name, with their folder."""
    found = []
    for table in re.finditer(r"(?m)^\| in `(?P<folder>[^`]+)` \|.*\n(?P<rows>(?:\|.*\n)+)", text):
        folder = table["folder"].removeprefix("src/zoneout").rstrip("/")
        for row in table["rows"].splitlines():
            first, about = row.split("|")[1:3]
            names = re.findall(r"`([^`]+)`", first)
            found += [(folder, name) for name in names]
            inside = names[0] if names and names[0].endswith("/") else ""
            found += [
                (folder, inside + name)
                for name in re.findall(r"`([^`]+)`", about)
                if re.fullmatch(r"[\w./]+(/|\.\w+)", name) and not name.startswith((".", "torch."))
            ]
    return found


def test_the_files_that_the_architecture_names_are_there():
    """A reader looks for a file of the tables that has been moved or removed."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    names = named_files(text)
    assert ("ops", "autograd/flat.py") in names and ("paper", "disk.py") in names
    package = ROOT / "src" / "zoneout"
    wrong = [(f, name) for f, name in names if not (package / f / name).exists()]
    assert wrong == [] and len(names) > 50


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a page that are neither code, tables, notes, pictures nor generated."""
    text = re.sub(
        r"(?s)<!-- [^>]*: made by .*?<!-- end -->", lambda m: "\n" * m[0].count("\n"), text
    )
    text = FENCED.sub(lambda m: "\n" * m[0].count("\n"), text)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith(("|", "[^", "![", "    ")):
            yield number, line


def test_lines_have_at_most_100_columns():
    """A line of text runs out of the window of whoever edits the page."""
    made = {DOCS / "results.md", DOCS / "holds-up.md"}  # written by `zoneout reproduce --write`
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        if page not in made
        for number, line in prose(page.read_text(encoding="utf-8"))
        if len(line) > 100
    ]
    assert long == []


def imports(path: Path) -> list[tuple[str, str]]:
    """The absolute module and the name of everything that a file of the package imports."""
    package = list(path.relative_to(ROOT / "src").parent.parts)
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *(node.module or "").split(".")]).rstrip(".")
            found += [(module, one.name) for one in node.names]
        elif isinstance(node, ast.Import):
            found += [(one.name, "") for one in node.names]
    return found


def is_public(module: str, name: str) -> bool:
    """Return whether the architecture page lets all files import a name of `ops` from a module."""
    folder = ROOT / "src" / "zoneout" / "ops"
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    if module == "zoneout.ops":
        return name in {*zoneout.ops.__all__, *files, "cuda"}
    if module == "zoneout.ops.cuda":
        return callable(getattr(zoneout.ops.cuda, name)) and not name.startswith("_")
    return module.removeprefix("zoneout.ops.") in files


def test_only_the_public_names_of_ops_are_imported():
    """A file reaches into a folder of `ops`, so that nothing in it can be changed safely."""
    folder = ROOT / "src" / "zoneout"
    seen, wrong = 0, []
    for path in sorted(folder.rglob("*.py")):
        if path.is_relative_to(folder / "ops"):
            continue
        for module, name in imports(path):
            if module == "zoneout.ops" or module.startswith("zoneout.ops."):
                seen += 1
                if not is_public(module, name):
                    wrong.append(f"{path.relative_to(folder)}: {module}, {name}")
    assert wrong == [] and seen > 30
    assert not is_public("zoneout.ops.cpu.masks", "masks_of")
    assert not is_public("zoneout.ops.cpu", "one_step")
    assert not is_public("zoneout.ops.cuda", "side_streams")


def test_the_citation_has_the_version_of_the_package():
    """A citation names a version that the package does not have."""
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    versions = [
        line.partition(":")[2].strip(" \"'") for line in lines if line.startswith("version:")
    ]
    assert versions == [zoneout.__version__]
