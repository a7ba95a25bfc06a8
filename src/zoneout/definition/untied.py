"""A cell whose gates see h through masks of their own, for untied variational dropout.

The masks of a gate are factors of h in that gate's product. They come as further gates of x.
"""

from __future__ import annotations

from .definition import Definition
from .graph import Graph
from .hidden_products import with_products

MATRIX, BIAS = "untied_weight", "untied_bias"  # parameters of the cell, with the gate's number


def with_gate_products(d: Definition) -> Definition:
    """Return the cell whose gates each take a product of their own dropped copy of h.

    Its further gates of x are the factors of h. Its own parameters are a matrix for each gate.
    """

    def of_gate(graph: Graph, q: int) -> int:
        h = graph.add("state", value=d.states[0])
        dropped = graph.add("mul", h, graph.add("x", value=str(d.gates + q)))
        matrix = graph.add("parameter", value=f"{MATRIX}{q}")
        return graph.add("part", graph.add("product", matrix, dropped, value="H"), value="0")

    return with_products(d, of_gate, [f"{MATRIX}{q}" for q in range(d.gates)], BIAS)
