"""The graph of a cell's step: operations on one unit's numbers, equal ones shared, with a
canonical text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .operations import LEAVES, MARKS, OPERATIONS, PRODUCTS

Value = float | str | None


class Node(NamedTuple):
    """An operation on earlier nodes, or a leaf; `value` is a leaf's name or number, a candidate's
    state, a product's rows or a part's number.
    """

    op: str
    args: tuple[int, ...] = ()
    value: Value = None


class Graph:
    """A growing list of nodes. A node's number is its place; equal nodes are one node."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes: list[Node] = []
        self._places: dict[tuple[Node, float], int] = {}
        for node in nodes:
            self._put(node)

    def add(self, op: str, *args: int, value: Value = None) -> int:
        """Return the node with this operation, made if it is new."""
        return self._put(Node(op, args, value))

    def _put(self, node: Node) -> int:
        # 0.0 and -0.0 are equal and different numbers.
        sign = math.copysign(1.0, node.value) if isinstance(node.value, float) else 0.0
        place = self._places.setdefault((node, sign), len(self.nodes))
        if place == len(self.nodes):
            self.nodes.append(node)
        return place

    def number(self, value: float) -> int:
        return self.add("number", value=float(value))

    def mul(self, a: int, b: int) -> int:
        """Return a · b; a factor of 1 is left out."""
        one = Node("number", (), 1.0)
        if self.nodes[a] == one:
            return b
        return a if self.nodes[b] == one else self.add("mul", a, b)

    def plus(self, a: int | None, b: int) -> int:
        """Return a + b, or b where there is no a."""
        return b if a is None else self.add("add", a, b)

    def reached(self, outputs: Iterable[int], stop: Iterable[int] = ()) -> list[int]:
        """Return the nodes that the outputs depend on, arguments first; nodes in `stop` count as
        leaves.
        """
        stopped, seen, order = set(stop), set(), []
        stack = [(node, False) for node in reversed(list(outputs))]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                if node not in stopped:
                    stack += [
                        (arg, False) for arg in reversed(self.nodes[node].args) if arg not in seen
                    ]
        return order

    def users(self, outputs: Iterable[int]) -> dict[int, list[int]]:
        """Return, for every node that the outputs depend on, the nodes that use it."""
        found: dict[int, list[int]] = {}
        for node in self.reached(outputs):
            found.setdefault(node, [])
            for arg in dict.fromkeys(self.nodes[node].args):
                found[arg].append(node)
        return found

    def leaves(self, outputs: Iterable[int], op: str) -> Iterator[tuple[int, Value]]:
        """Yield the leaves of one kind that the outputs depend on, with their names."""
        for node in self.reached(outputs):
            if self.nodes[node].op == op:
                yield node, self.nodes[node].value


def parts_of(graph: Graph, product: int) -> int:
    """Return the number of parts of a product whose rows are "H" or "4H"."""
    return int(str(graph.nodes[product].value).removesuffix("H") or 1)


# --- text -----------------------------------------------------------------------------------------


def to_text(graph: Graph, outputs: Sequence[int]) -> str:
    """Return the canonical text of some outputs: the same computation has the same text.

    >>> g = Graph()
    >>> to_text(g, [g.add("tanh", g.add("add", g.add("x", value="0"), g.number(0.5)))])
    'x:0 number:0.5 add,0,1 tanh,2|3'
    """
    order = graph.reached(outputs)
    place = {node: k for k, node in enumerate(order)}
    words = []
    for node in order:
        op, args, value = graph.nodes[node]
        name = "" if value is None else f":{value!r}" if isinstance(value, float) else f":{value}"
        words.append(op + name + "".join(f",{place[arg]}" for arg in args))
    return " ".join(words) + "|" + ",".join(str(place[node]) for node in outputs)


def from_text(text: str) -> tuple[Graph, list[int]]:
    """Read a canonical text. It is data: operations come from the table, and nothing is
    executed.
    """
    graph = Graph()
    try:
        body, _, ends = text.partition("|")
        for k, word in enumerate(body.split(" ")):
            head, *args = word.split(",")
            op, colon, name = head.partition(":")
            places = tuple(int(arg) for arg in args)
            named = op in LEAVES or op in PRODUCTS or op == "candidate"
            count = 0 if op in LEAVES else 1 if op in MARKS else PRODUCTS.get(op, -1)
            count = OPERATIONS[op].arguments if count < 0 else count
            if len(places) != count or not all(0 <= p < k for p in places) or bool(colon) != named:
                raise ValueError(f"{word!r} is not an operation on earlier ones")
            value: Value = float(name) if op == "number" else name if named else None
            if graph.add(op, *places, value=value) != k:
                raise ValueError(f"{word!r} is there twice")
        outputs = [int(end) for end in ends.split(",")]
        if not all(0 <= end < len(graph.nodes) for end in outputs):
            raise ValueError(f"outputs {ends!r} are not nodes")
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"definition: expected the text of a cell, got {text[:80]!r} ({error})"
        ) from None
    return graph, outputs
