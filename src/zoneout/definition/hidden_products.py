"""A cell whose products with h are replaced: it computes r of each gate itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .definition import Definition
from .graph import Graph


def with_products(
    d: Definition, of_gate: Callable[[Graph, int], int], own: Sequence[str], bias: str
) -> Definition:
    """Return the cell in which r of gate q is `of_gate(graph, q)`, plus its bias if kept apart.

    Its gates of x are those of `d`, and as many that `of_gate` may read. Its parameters are those
    of `d`, those in `own`, and for each bias of r that is kept apart `bias` with the gate's number.
    """
    assert d.recurrence == "dense"
    graph, places = Graph(), {}

    def r_of(q: int) -> int:
        r = of_gate(graph, q)
        if not d.storage.apart:
            return r
        return graph.add("add", r, graph.add("parameter", value=f"{bias}{q}"))

    for node in d.graph.reached(d.outputs):
        op, args, value = d.graph.nodes[node]
        if op == "r":
            places[node] = r_of(int(str(value)))
        else:
            places[node] = graph.add(op, *(places[arg] for arg in args), value=value)
    biases = [f"{bias}{q}" for q in range(d.gates)] if d.storage.apart else []
    made = Definition(
        graph, [places[node] for node in d.outputs], gates=2 * d.gates, groups=d.groups,
        parameters=(*d.parameters, *own, *biases), recurrence="none", heads=1,
        bounded=d.bounded, name=d.name,
    )  # fmt: skip
    return Definition.from_text(made.text, d.name)
