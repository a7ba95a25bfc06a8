"""Reverse-mode derivative of a graph, as further nodes of the same graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .graph import Graph
from .operations import COMPARISONS, LEAVES, MARKS, OPERATIONS


def differentiate(
    graph: Graph, outputs: Iterable[tuple[int, int]], wrt: Sequence[int]
) -> list[int | None]:
    """Return nodes for the gradients of `wrt`, given (node, its gradient) pairs; None where
    there is none.
    """
    gradients: dict[int, int] = {}
    pairs = list(outputs)
    for node, gradient in pairs:
        gradients[node] = graph.plus(gradients.get(node), gradient)
    needed = _leading_to(graph, [node for node, _ in pairs], wrt)
    for node in reversed(graph.reached(node for node, _ in pairs)):
        op, args, _ = graph.nodes[node]
        if node not in gradients or op in LEAVES or op in COMPARISONS:
            continue
        if op in MARKS:
            given: tuple[int | None, ...] = (gradients[node],)
        else:
            derivative = OPERATIONS[op].derivative
            assert derivative is not None, op
            given = derivative(graph, args, node, gradients[node])
        for arg, part in zip(args, given, strict=True):
            if part is not None and arg in needed:
                gradients[arg] = graph.plus(gradients.get(arg), part)
    return [gradients.get(node) for node in wrt]


def _leading_to(graph: Graph, outputs: Sequence[int], wrt: Sequence[int]) -> set[int]:
    """Return the nodes that depend on one of `wrt`: only they need a gradient."""
    found = set(wrt)
    for node in graph.reached(outputs):
        if any(arg in found for arg in graph.nodes[node].args):
            found.add(node)
    return found
