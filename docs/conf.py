"""Settings of the documentation site; `make docs` builds it into build/docs."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

from docutils import nodes

import zoneout
from zoneout.definition import Definition
from zoneout.recurrent import RecurrentModule

project = "zoneout"
author = "the zoneout authors"
copyright = "the zoneout authors"
version = release = zoneout.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
root_doc = "index"
exclude_patterns = ["README.md"]  # the index for readers of the repository; the site has its own

myst_heading_anchors = 4  # links to headings work as on a git host
suppress_warnings = ["myst.strikethrough"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say what an argument may be; signatures stay short
autodoc_preserve_defaults = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"zoneout {release}"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["site.css"]
# The background of the pictures (DARK in paper/report/plots.py): they have no frame.
html_theme_options = {"dark_css_variables": {"color-background-primary": "#1b1b1a"}}
html_show_copyright = False
html_copy_source = False

# Files beside docs/ are no pages of the site. Links to them lead to the repository, if the variable
# names its address (as in https://host/owner/name/blob/main); otherwise the site has a copy of each
# example, and of other links the text stays.
REPOSITORY = os.environ.get("DOCS_REPOSITORY")
_KEPT = "" if REPOSITORY else r"(?!examples/\w+\.py)"
_OUTSIDE = r"\[(?P<text>[^]]*)\]\({up}" + _KEPT + r"(?P<path>[^)\s]+)\)"
_CODE = re.compile(r"(?<![:`\w])`([^`\n]+)`(?!`)")


def _link_outside(app: Any, name: str, source: list[str]) -> None:
    """Replace links that leave docs/."""
    new = rf"[\g<text>]({REPOSITORY}/\g<path>)" if REPOSITORY else r"\g<text>"
    outside = _OUTSIDE.format(up=r"\.\./" * (1 + name.count("/")))
    source[0] = re.sub(outside, new, source[0]).replace("](README.md)", "](index.md)")


def _reformat(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn the Markdown of docstrings into reStructuredText: code spans, and bars as in |h|.

    A cell also gets its equation.
    """
    if isinstance(obj, Definition):  # napoleon reads a colon in its first line as a type
        lines[:] = [*(inspect.getdoc(obj) or "").splitlines(), ""]
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>> ", "... ")):
            pieces = _CODE.split(line)  # text and code in turn
            pieces[::2] = [text.replace("|", r"\|") for text in pieces[::2]]
            pieces[1::2] = [f"``{code}``" for code in pieces[1::2]]
            lines[number] = "".join(pieces)
    if isinstance(obj, Definition) and obj.function is not None:
        lines += ["", ".. code-block:: python", "", *(f"   {one}" for one in _code(obj.function))]


def _code(function: Callable[..., Any]) -> list[str]:
    """Return the source of a function without its docstring."""
    lines = inspect.getsource(function).splitlines()
    (definition,) = ast.parse("\n".join(lines)).body
    text = definition.body[0]
    return lines[: text.lineno - 1] + lines[text.end_lineno :]


def _signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str, result: str
) -> tuple[str, str] | None:
    """Return the arguments of a noise or a layer: its `__new__` only checks them."""
    if not is_dataclass(obj) and not (isinstance(obj, type) and issubclass(obj, RecurrentModule)):
        return None
    found = inspect.signature(obj)
    bare = [one.replace(annotation=one.empty) for one in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty)), result


def _mark_columns(app: Any, tree: nodes.document) -> None:
    """Mark tables with four or more columns, and their columns of text, for site.css."""
    for table in tree.findall(nodes.table):
        rows = [row.children for row in table.findall(nodes.row)][1:]
        if len(rows[0]) > 3:
            table["classes"].append("wide")
            for column in zip(*rows):
                if any(len(cell.astext()) > 24 for cell in column):
                    for cell in column:
                        cell["classes"].append("text")


def setup(app: Any) -> None:
    app.connect("source-read", _link_outside)
    app.connect("doctree-read", _mark_columns)
    app.connect("autodoc-process-docstring", _reformat)
    app.connect("autodoc-process-signature", _signature)
