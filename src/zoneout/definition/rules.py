"""What a definition may be: its settings, its parameters and its graph.

The rules hold for a decorated function and for a definition that is read from its text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .operations import COMPARISONS, MARKS, PRODUCTS, TRACED
from .trace import DefinitionError

if TYPE_CHECKING:
    from .definition import Definition

RECURRENCES = {  # how h enters the gates, and whether the function takes r
    "dense": True,  # r = W_h h + b_h
    "blocks": True,  # the same with a block-diagonal W_h, one block per head
    "diagonal": False,  # the function multiplies h with a parameter
    "none": False,  # the gates depend on x alone
}
MOST_GATES, MOST_STATES, MOST_PARAMETERS, MOST_MATRICES = 8, 4, 8, 16
Group = str | tuple[str, ...]


def groups_of(states: Any, name: str) -> tuple[tuple[str, ...], ...]:
    """Return the groups of states; a state by itself is a group of one."""
    good = isinstance(states, (tuple, list)) and all(
        isinstance(group, str) or (isinstance(group, (tuple, list)) and group) for group in states
    )
    if not good:
        raise DefinitionError(
            f"cell {name!r}: states: expected a tuple of names such as ('h',), got {states!r}"
        )
    return tuple((group,) if isinstance(group, str) else tuple(group) for group in states)


def check_settings(d: Definition) -> None:
    """Raise if a setting of a definition is not one that a cell can have."""

    def fail(what: str, expected: str, got: Any) -> None:
        raise DefinitionError(f"cell {d.name!r}: {what}: expected {expected}, got {got!r}")

    if isinstance(d.gates, bool) or not isinstance(d.gates, int) or not 1 <= d.gates <= MOST_GATES:
        fail("gates", f"a number from 1 to {MOST_GATES}", d.gates)
    names = d.states
    if not 1 <= len(names) <= MOST_STATES or not all(
        isinstance(n, str) and n.isidentifier() for n in names
    ):
        fail("states", f"1 to {MOST_STATES} names", d.groups)
    if len(set(names)) < len(names):
        fail("states", "different names", names)
    if len(d.groups[0]) > 1:
        fail("states", "an output that is in no group", d.groups[0])
    if d.bounded not in (True, False):
        fail("bounded", "True or False", d.bounded)
    if d.recurrence not in RECURRENCES:
        fail("recurrence", f"one of {', '.join(RECURRENCES)}", d.recurrence)
    if isinstance(d.heads, bool) or not isinstance(d.heads, int) or d.heads < 1:
        fail("heads", "1 or more", d.heads)
    if d.heads > 1 and d.recurrence != "blocks":
        fail("heads", f"1 with recurrence={d.recurrence!r}", d.heads)
    check_parameters(d)


def check_parameters(d: Definition) -> None:
    """Raise if there are too many parameters, or a name is taken."""
    names = d.parameters
    good = all(name.isidentifier() for name in names) and len({*names, *d.states}) == len(
        names
    ) + len(d.states)
    vectors = len(names) - len(d.matrices)
    if vectors > MOST_PARAMETERS or len(d.matrices) > MOST_MATRICES or not good:
        raise DefinitionError(
            f"cell {d.name!r}: expected at most {MOST_PARAMETERS} parameters with names of their "
            f"own and {MOST_MATRICES} matrices, got {len(names)}: {', '.join(names)[:80]}"
        )


def _check_products(d: Definition, reached: Sequence[int]) -> None:
    """Check that matrices, products and their parts are used only as such."""
    nodes = d.graph.nodes

    def fail(why: str) -> None:
        raise DefinitionError(f"cell {d.name!r}: {why}")

    for node in reached:
        op, args, value = nodes[node]
        for place, arg in enumerate(args):
            kind, _, name = nodes[arg]
            matrix = kind == "parameter" and name in d.matrices
            if matrix != (op == "product" and place == 0):
                fail(f"the parameter {name} is a matrix, and only zo.product takes it")
            ranked = kind == "product" and not str(name).endswith("H")
            if kind == "product" and (op != "product" if ranked else op != "part"):
                fail(f"{op} of a product with rank={name}; only zo.product takes it")
        if op == "product":
            if not re.fullmatch(r"[1-9]\d{0,8}|([1-9]\d?)?H", str(value)):
                fail(f"product {value} is not part of a cell")
            inner = nodes[args[1]]
            shape = str(value), str(inner.value) if inner.op == "product" else "H"
            if d.matrices[str(nodes[args[0]].value)] != shape:
                fail(f"the matrix {nodes[args[0]].value} is used in two shapes")
        if op == "part":
            product = nodes[args[0]]
            parts = int(str(product.value).removesuffix("H") or 1)
            if product.op != "product" or str(value) not in map(str, range(parts)):
                fail(f"part {value} is not part of a cell")


def check_graph(d: Definition) -> None:
    """Check that the graph is one that a function with these settings can have."""
    graph, known = d.graph, {"state": set(d.states), "parameter": set(d.parameters)}
    known["x"] = {str(q) for q in range(d.gates)}
    known["r"] = known["x"] if d.has_r else set()
    reached = graph.reached(d.outputs)
    for mark in ("shown", "held"):
        if sum(graph.nodes[node].op == mark for node in reached) > 1:
            raise DefinitionError(
                f"cell {d.name!r}: zo.{mark} is used twice; expected it once at most"
            )
    of_state = dict(zip(d.states, d.outputs))
    for node in reached:
        op, args, value = graph.nodes[node]
        if op == "candidate" and of_state.get(str(value)) != node:
            place = (
                f"returned as the new {value}"
                if value in of_state
                else f"one of {', '.join(d.states)}"
            )
            raise DefinitionError(
                f"cell {d.name!r}: zo.candidate({value!r}, …): expected it to be {place}"
            )
        compared = [graph.nodes[arg].op in COMPARISONS for arg in args]
        allowed = (
            op in MARKS
            or op in TRACED
            or (op == "number" and math.isfinite(float(str(value))))
            or op in PRODUCTS
        )
        if (
            not (allowed or value in known.get(op, ()))
            or any(compared) != (op == "where")
            or any(compared[1:])
        ):
            raise DefinitionError(
                f"cell {d.name!r}: {op} {value} is not part of a cell with these settings"
            )
    _check_products(d, reached)
    marked = [graph.nodes[node] for node in d.outputs]
    if [(node.op, node.value) for node in marked] != [("candidate", state) for state in d.states]:
        raise DefinitionError(
            f"cell {d.name!r}: expected one candidate for each of {', '.join(d.states)}"
        )
    used = {str(name) for _, name in graph.leaves(d.outputs, "x")}
    if missing := sorted(known["x"] - used):
        raise DefinitionError(
            f"cell {d.name!r}: gate {missing[0]} of x is never used; gates={d.gates} may be too "
            "many"
        )
    if d.has_r and not list(graph.leaves(d.outputs, "r")):
        raise DefinitionError(
            f"cell {d.name!r}: r is never used; write recurrence='none' and leave r out"
        )
