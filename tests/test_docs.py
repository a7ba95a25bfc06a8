"""The code in README.md and docs/ runs as it stands there."""

import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

# A block that is not meant to be run opens with "```python no-run".
BLOCK = re.compile(r"(?ms)^(?P<indent>[ \t]*)```python[ \t]*\n(?P<code>.*?)^(?P=indent)```[ \t]*$")


def blocks(page: Path) -> list[str]:
    """The runnable Python blocks of a page, each moved down to the line where it stands in the
    page.
    """
    text = page.read_text(encoding="utf-8")
    found = []
    for block in BLOCK.finditer(text):
        code = re.sub(rf"^{block['indent']}", "", block["code"], flags=re.MULTILINE)
        found.append("\n" * text.count("\n", 0, block.start("code")) + code)
    return found


def test_readme_has_an_example_to_run():
    """A README whose blocks are all skipped, or are not found, would pass unseen."""
    assert blocks(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page, tmp_path, monkeypatch):
    """Someone who pastes a page's blocks one after the other gets no error."""
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page_under_test")  # a real module: its classes can be pickled
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code in blocks(page):
        exec(compile(code, str(page), "exec"), module.__dict__)
