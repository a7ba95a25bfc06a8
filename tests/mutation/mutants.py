"""Which mutants there are: small changes of the source that the tests should notice, drawn by a
fixed seed.

Nothing is mutated that a test cannot be asked to notice: texts for people (docstrings, errors,
    warnings, `repr`), type
annotations, decorators, assertions; in C and CUDA array sizes, assembly, the step of a `for` (which
would not end), and what changes speed or timing alone (barriers, prefetching, hints to the
compiler, the number of a tile or chunk size). Files that only drive a real GPU (compiler, blas,
side_streams) have no place here: the emulator stands in for them.
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

SEED = 29
PACKAGE = "src/zoneout/"
AREAS: dict[str, tuple[int, tuple[str, ...]]] = {  # how many mutants, of which files
    "cells": (10, ("cells/built_in.py", "cells/published.py", "cells/with_noise.py")),
    "draws": (25, ("draws.py",)),
    "noise": (35, ("noise.py", "noise_checks.py", "streams.py")),
    "norm": (25, ("norm.py",)),
    "layers": (
        50,
        (
            "layers.py",
            "sequence_layer.py",
            "checks.py",
            "recurrent.py",
            "noisy.py",
            "step_cells.py",
        ),
    ),
    "definition": (30, ("definition/*.py",)),
    "ops": (65, ("ops/*.py", "ops/autograd/*.py", "ops/sequence/*.py", "ops/cpu/*.py")),
    "native, C": (75, ("ops/cpu/loop.c", "ops/cpu/body.h", "ops/cpu/functions.h")),
    "cuda, kernels": (85, ("ops/cuda/*/*.cu", "ops/cuda/*/*.cuh")),
    "cuda, Python": (35, ("ops/cuda/*.py", "ops/cuda/*/*.py")),
    "paper/train": (20, ("paper/training/train.py",)),
    "paper/evaluate": (15, ("paper/training/evaluate.py",)),
    "paper/optimizers": (15, ("paper/training/optimizers.py", "paper/training/optimizer_kernel.*")),
    "paper/batches": (15, ("paper/data/batches.py",)),
}
LEFT_OUT = {f"ops/cuda/runtime/{name}.py" for name in ("compiler", "blas", "side_streams")}

COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
PYTHON = COMPARED | {
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
    "and": "or",
    "or": "and",
}
PYTHON |= {
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "//": "/",
    "%": "*",
    "**": "*",
    "<<": ">>",
    ">>": "<<",
}
PYTHON |= {
    "&": "|",
    "|": "&",
    "^": "&",
    "+=": "-=",
    "-=": "+=",
    "*=": "/=",
    "/=": "*=",
    "//=": "*=",
    "|=": "&=",
}
C = COMPARED | {
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "%": "/",
    "&&": "||",
    "||": "&&",
    "<<": ">>",
    ">>": "<<",
}
C |= {
    "&": "|",
    "|": "&",
    "^": "|",
    "+=": "=",
    "-=": "+=",
    "*=": "=",
    "/=": "*=",
    "|=": "=",
    "&=": "=",
}

SAID = {
    "__repr__",
    "__str__",
    "extra_repr",
    "warn",
    "cast",
    "TypeVar",
    "overload",
    "Protocol",
    "_say_once",
}
SYNCHRONISED = (
    "barrier|__sync\\w+|meet|await\\w*|expect|between_proxies|commit\\w*|leave|release|"
    "fence\\w*|pass"
)
HINTS = "simplify|brings?|draw_ahead|take_registers|give_registers|rows_apart|begin_words"


@dataclass(frozen=True)
class Mutant:
    """One change: characters [start, end) of a file become `new`."""

    area: str
    path: str  # from the root of the repository
    start: int
    end: int
    new: str
    operator: str
    line: int
    old: str
    reach: tuple[int, int]  # a test that runs any of these lines may notice
    digest: str  # of the file

    @property
    def id(self) -> str:
        """The same for the same change of the same file."""
        return (
            f"{self.path}:{self.line} {self.operator} [{self.start}:{self.end}] {self.new} "
            f"{self.digest}"
        )

    def apply(self, text: str) -> str:
        """The file with the change."""
        return text[: self.start] + self.new + text[self.end :]


def files_of(root: Path, area: str) -> list[Path]:
    """The files of an area."""
    found = {path for pattern in AREAS[area][1] for path in (root / PACKAGE).glob(pattern)}
    return sorted(path for path in found if str(path.relative_to(root / PACKAGE)) not in LEFT_OUT)


def sampled(root: Path) -> list[tuple[int, list[Mutant]]]:
    """For each file how many mutants are wanted, and all there are in the order in which they
    are taken.
    """
    chosen = []
    for area, (wanted, _) in AREAS.items():
        of_files = [shuffled(area, path, root) for path in files_of(root, area)]
        total = sum(map(len, of_files))
        exact = [wanted * len(one) / total for one in of_files]
        counts = [int(share) for share in exact]
        rest = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
        for i in rest[: wanted - sum(counts)]:
            counts[i] += 1
        chosen += zip(counts, of_files, strict=True)
    return chosen


def shuffled(area: str, path: Path, root: Path) -> list[Mutant]:
    """The mutants of a file, one a place, in an order of the seed."""
    text, name = path.read_text(), str(path.relative_to(root))
    changes = list(of_python(text) if path.suffix == ".py" else of_c(text))
    random.Random(f"{SEED} {name}").shuffle(changes)
    digest, out, places = hashlib.sha256(text.encode()).hexdigest()[:8], [], set()
    for start, end, new, operator, reach in changes:
        if start in places:
            continue
        line = text.count("\n", 0, start) + 1
        mutant = Mutant(
            area,
            name,
            start,
            end,
            new,
            operator,
            line,
            text[start:end],
            reach or (line, line),
            digest,
        )
        places.add(start)
        out.append(mutant)
    return out


def same_code(a: CodeType, b: CodeType) -> bool:
    """Whether Python runs the same instructions."""
    if len(a.co_consts) != len(b.co_consts) or (a.co_code, a.co_names) != (b.co_code, b.co_names):
        return False
    if (a.co_varnames, a.co_argcount, a.co_flags) != (b.co_varnames, b.co_argcount, b.co_flags):
        return False
    each = zip(a.co_consts, b.co_consts, strict=True)
    return all(same_code(x, y) if isinstance(x, CodeType) else repr(x) == repr(y) for x, y in each)


Change = tuple[int, int, str, str, tuple[int, int] | None]
IMPORTED = (0, 9999)  # what runs at import may change anything in the file


# --- Python --------------------------------------------------------------------------------------


def of_python(text: str) -> Iterator[Change]:
    """All changes of a Python file."""
    visitor = Changes(text)
    visitor.visit(ast.parse(text))
    return iter(visitor.found)


class Changes(ast.NodeVisitor):
    """Collects them."""

    def __init__(self, text: str) -> None:
        self.text, self.lines = text, text.splitlines(keepends=True)
        self.begins = [0]
        for line in self.lines:
            self.begins.append(self.begins[-1] + len(line))
        self.found: list[Change] = []
        self.reach = IMPORTED
        self.functions = 0  # that the node is in

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node's text is."""
        places = ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))  # type: ignore[attr-defined]
        first, last = (
            self.begins[n - 1] + len(self.lines[n - 1].encode()[:c].decode()) for n, c in places
        )
        return first, last

    def change(self, node: ast.AST, new: str, operator: str) -> None:
        """`new`, where {} is the node's own text, in its place."""
        start, end = self.span(node)
        self.found.append(
            (start, end, new.replace("{}", self.text[start:end]), operator, self.reach)
        )

    def swap(self, left: ast.AST, right: ast.AST, operator: str) -> None:
        """The operator between two nodes becomes another one."""
        start, end = self.span(left)[1], self.span(right)[0]
        between = re.sub(r"#[^\n]*", lambda found: " " * len(found[0]), self.text[start:end])
        found = re.search(r"not\s+in|is\s+not|\b(?:is|in|and|or)\b|[<>=!+\-*/%&|^@]+", between)
        new = PYTHON.get(" ".join(found[0].split())) if found else None
        if found and new:
            at = start + found.start()
            self.found.append((at, at + len(found[0]), new, operator, self.reach))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.arg):
            return
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or 0
            self.reach = (node.lineno, last) if self.functions else IMPORTED
        super().visit(node)

    def visit_body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in SAID or any(named(one) in SAID for one in node.decorator_list):
            return
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        self.functions += 1
        self.visit_body(node.body)
        self.functions -= 1

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not any(named(base) in SAID for base in node.bases):
            self.visit_body(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Name) and (
            target.id == "__all__" or re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", target.id)
        ):
            return  # a type's other name
        if isinstance(target, ast.Attribute | ast.Subscript):
            self.change(node, "pass", "statement removed")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.change(node, "pass", "statement removed")
        self.swap(node.target, node.value, "arithmetic")
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and named(node.value.func) not in SAID:
            self.change(node, "pass", "statement removed")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.change(node, "pass", "statement removed")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                self.change(node.value, "None", "returns None")
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if named(node.test) != "TYPE_CHECKING":
            self.condition(node.test)
            self.visit(node.test)
            self.visit_body(node.body)
            self.visit_body(node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.condition(test)
        self.generic_visit(node)

    def condition(self, test: ast.expr) -> None:
        """Negate it, unless another operator does."""
        alone = isinstance(test, ast.Compare) and isinstance(
            test.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot
        )
        if not alone and not isinstance(test, ast.UnaryOp):
            self.change(test, "not ({})", "condition negated")

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip([node.left, *node.comparators], node.comparators):
            self.swap(left, right, "comparison")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:]):
            self.swap(left, right, "and, or")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(is_text(side) for side in (node.left, node.right)):
            self.swap(node.left, node.right, "arithmetic")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            start, end = self.span(node.operand)
            self.change(node, f"({self.text[start:end]})", "not or minus removed")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if named(node.func) in SAID:
            return
        if len(node.args) >= 2 and not any(isinstance(one, ast.Starred) for one in node.args[:2]):
            (a, b), (c, d) = map(self.span, node.args[:2])
            if (
                named(node.func) not in ("isinstance", "issubclass")
                and self.text[a:b] != self.text[c:d]
            ):
                swapped = self.text[c:d] + self.text[b:c] + self.text[a:b]
                self.found.append((a, d, swapped, "arguments swapped", self.reach))
        self.visit(node.func)
        for one in (
            *node.args,
            *(keyword.value for keyword in node.keywords if keyword.arg != "strict"),
        ):
            self.visit(one)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in filter(None, (node.lower, node.upper)):
            if not isinstance(bound, ast.Constant):
                self.change(bound, "({}) + 1", "slice")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.change(node, str(not node.value), "constant")
        elif isinstance(node.value, int | float):
            self.change(node, "({} + 1)", "constant")
            if node.value:
                self.change(node, "({} - 1)", "constant")


def named(node: ast.AST) -> str:
    """The last part of a name."""
    if isinstance(node, ast.Call):
        return named(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


# --- C and CUDA ----------------------------------------------------------------------------------


def of_c(text: str) -> Iterator[Change]:
    """All changes of a C or CUDA file, whose binary operators stand between spaces."""
    code = blanked(text)
    for found in re.finditer(
        r"(?<= )(?:[-+*/|&]=|[<>=!]=|&&|\|\||<<|>>|[-<>+*/%&|^])(?=[ \n\\])", code
    ):
        if found[0] in C:
            yield (*found.span(), C[found[0]], "operator", None)
    for found in re.finditer(
        r"(?<![\w.])(?:0x[0-9A-Fa-f]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?)[uUlLfF]*(?![\w.])", code
    ):
        yield (*found.span(), f"({found[0]} + 1)", "constant", None)
        if found[0] != "0":
            yield (*found.span(), f"({found[0]} - 1)", "constant", None)
    for found in re.finditer(r"\bif \(", code):
        end = closing(code, found.end() - 1)
        yield found.end(), end, f"!({text[found.end() : end]})", "condition negated", None
    for found in re.finditer(r"(?<=\(|,)(\w[\w.>-]*)(?= \? )|(?<== )(\w[\w.>-]*)(?= \? )", code):
        yield (*found.span(), f"!{found[0]}", "condition negated", None)
    for found in re.finditer(r"(?<=\w)\[", code):
        end = closing(code, found.start())
        if code[found.end() : end].strip():
            yield found.end(), end, f"({text[found.end() : end]}) + 1", "index", None
    place = r"\*?[A-Za-z_][\w.]*(?:->\w+|\.\w+|\[[^\]\n]*\])*"
    for found in re.finditer(
        rf"^[ \t]*({place} [-+*/|&^]?= [^;{{}}\n]*|(\w+)\([^;{{}}\n]*\));[ \\]*$", code, re.M
    ):
        if not re.fullmatch(f"{SYNCHRONISED}|{HINTS}|return", found[2] or ""):
            yield (*found.span(1), "", "statement removed", None)


def blanked(text: str) -> str:
    """The text with spaces for what is not mutated."""
    for pattern in (r"/\*.*?\*/", r"//[^\n]*", r'"(?:[^"\\\n]|\\.)*"', r"'(?:[^'\\\n]|\\.)+'"):
        text = re.sub(pattern, spaces, text, flags=re.S)
    text = re.sub(r"^[ \t]*#(?![ \t]*define)(?:[^\n]*\\\n)*[^\n]*", spaces, text, flags=re.M)
    text = re.sub(r"^[ \t]*#[ \t]*define \w+ \(*\d+\)*[ \t]*$", spaces, text, flags=re.M)
    text = re.sub(r"^[ \t]*#[ \t]*define \w+(?:\([^)]*\))?", spaces, text, flags=re.M)
    text = without(
        text,
        r"\b(?:asm(?: volatile)?|__attribute__|__launch_bounds__|__align__|static_assert)\s*\(",
    )
    text = without(text, rf"\b(?:{HINTS})\([^;{{}}]*\) \{{")
    for found in reversed(list(re.finditer(r"\bfor \(", text))):
        end = closing(text, found.end() - 1)
        step = text.rfind(";", found.end(), end)
        text = text[:step] + spaces(text[step:end]) + text[end:]
    declared = r"^[ \t]*(?!return|else|case|goto)(?:\w+ )+\**\w+\[[^;=]*[;=]"
    return re.sub(declared, lambda found: re.sub(r"\[[^\]]*\]", spaces, found[0]), text, flags=re.M)


def spaces(found: re.Match[str] | str) -> str:
    """As long, and on as many lines."""
    return re.sub(r"[^\n]", " ", found if isinstance(found, str) else found[0])


def without(text: str, pattern: str) -> str:
    """The text with spaces for what begins as a pattern says and ends where its last bracket is
    closed.
    """
    for found in re.finditer(pattern, text):
        end = closing(text, found.end() - 1)
        text = text[: found.start()] + spaces(text[found.start() : end]) + text[end:]
    return text


def closing(text: str, at: int) -> int:
    """Where the bracket at `at` is closed."""
    both, depth = text[at] + {"(": ")", "{": "}", "[": "]"}[text[at]], 0
    for i in range(at, len(text)):
        if text[i] in both:
            depth += 1 if text[i] == both[0] else -1
            if depth == 0:
                return i
    raise ValueError(f"a bracket stays open: {text[at : at + 60]}")
