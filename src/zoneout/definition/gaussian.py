"""A cell whose product with h is a Gaussian number: what fast dropout of h makes of a definition.

The product of a matrix W and h, of which units are dropped with a probability p, is nearly
Gaussian. Its mean is U h with U = (1 − p) W, and its variance V h² with V = p (1 − p) W². So r of a
gate is U h + √(V h²) · ε, plus its bias. The normal numbers ε come as further gates of x.
"""

from __future__ import annotations

from .definition import Definition
from .graph import Graph
from .hidden_products import with_products

MOST_GATES = 4  # each becomes two, and a cell has at most eight
MEAN, VARIANCE, BIAS = "fast_mean", "fast_variance", "fast_bias"  # the matrices U and V; of a gate
LEAST = 1e-12  # added to a variance, so that its root has a derivative at zero


def with_gaussian_product(d: Definition) -> Definition:
    """Return the cell that draws its product with h, without a matrix of its own.

    Its further gates of x are the normal numbers. Its own parameters are the two matrices.
    """
    assert d.gates <= MOST_GATES
    rows = "H" if d.gates == 1 else f"{d.gates}H"

    def of_gate(graph: Graph, q: int) -> int:
        h = graph.add("state", value=d.states[0])
        mean = graph.add("product", graph.add("parameter", value=MEAN), h, value=rows)
        square, matrix = graph.add("mul", h, h), graph.add("parameter", value=VARIANCE)
        variance = graph.add("product", matrix, square, value=rows)
        least = graph.add("abs", graph.add("part", variance, value=str(q)))
        root = graph.add("sqrt", graph.add("add", least, graph.number(LEAST)))
        normal = graph.add("mul", root, graph.add("x", value=str(d.gates + q)))
        return graph.add("add", graph.add("part", mean, value=str(q)), normal)

    return with_products(d, of_gate, (MEAN, VARIANCE), BIAS)
