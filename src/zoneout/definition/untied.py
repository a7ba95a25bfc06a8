"""A cell whose gates see h through masks of their own, for untied variational dropout.

The masks of a gate are factors of h in that gate's product. They come as further gates of x.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .graph import Graph

if TYPE_CHECKING:
    from . import Definition

MATRIX, BIAS = "untied_weight", "untied_bias"  # parameters of the cell, with the gate's number


def with_gate_products(d: Definition) -> Definition:
    """Return the cell whose gates each take a product of their own dropped copy of h.

    Its gates of x are those of `d`, and as many factors of h. Its parameters are those of `d`, a
    matrix for each gate, and a vector for each gate's bias of r, if that is kept apart.
    """
    from . import Definition

    assert d.recurrence == "dense"
    graph, places = Graph(), {}
    h = graph.add("state", value=d.states[0])

    def of_gate(q: int) -> int:
        dropped = graph.add("mul", h, graph.add("x", value=str(d.gates + q)))
        matrix = graph.add("parameter", value=f"{MATRIX}{q}")
        r = graph.add("part", graph.add("product", matrix, dropped, value="H"), value="0")
        if not d.storage.apart:
            return r
        return graph.add("add", r, graph.add("parameter", value=f"{BIAS}{q}"))

    for node in d.graph.reached(d.outputs):
        op, args, value = d.graph.nodes[node]
        if op == "r":
            places[node] = of_gate(int(str(value)))
        else:
            places[node] = graph.add(op, *(places[arg] for arg in args), value=value)
    own = [f"{MATRIX}{q}" for q in range(d.gates)]
    own += [f"{BIAS}{q}" for q in range(d.gates)] if d.storage.apart else []
    made = Definition(
        graph, [places[node] for node in d.outputs], gates=2 * d.gates, groups=d.groups,
        parameters=(*d.parameters, *own), recurrence="none", heads=1,
        bounded=d.bounded, name=d.name,
    )  # fmt: skip
    found = Definition.from_text(made.text, d.name)
    found.derive()
    return found
