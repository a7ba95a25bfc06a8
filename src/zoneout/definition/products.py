"""The products inside a step: which matrices they apply, and in what order they can be computed.

A product with `rank` is taken only by another product. So each product of a step is a chain of
matrices, applied to one value per unit, with one value per unit and part as its result. Its input
may depend on other products: products of one level depend only on those of lower levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .graph import Graph, parts_of

MOST_PRODUCTS, MOST_PARTS, MOST_LINKS = 16, 32, 4  # of a step that a fused loop runs


class Product(NamedTuple):
    """A product inside a step."""

    matrices: tuple[str, ...]  # the first is applied first
    parts: int


def products_of(graph: Graph, outputs: Sequence[int]) -> dict[int, Product]:
    """Return the products that the outputs depend on, by node, arguments before results."""
    found: dict[int, Product] = {}
    chains: dict[int, tuple[str, ...]] = {}
    for node in graph.reached(outputs):
        op, args, rows = graph.nodes[node]
        if op != "product":
            continue
        chains[node] = (*chains.get(args[1], ()), str(graph.nodes[args[0]].value))
        if str(rows).endswith("H"):
            found[node] = Product(chains[node], parts_of(graph, node))
    return found


def levels_of(graph: Graph, inputs: Sequence[int]) -> list[int]:
    """Return the level of each product of a step, from the nodes that they are taken of."""
    levels: list[int] = []
    for node in inputs:
        below = {int(str(name).partition(".")[0]) for _, name in graph.leaves([node], "inner")}
        levels.append(max((levels[p] + 1 for p in below), default=0))
    return levels
