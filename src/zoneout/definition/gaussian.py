"""A cell whose product with h is a Gaussian number: what fast dropout of h makes of a definition.

The product of a matrix W and h, of which units are dropped with a probability p, is nearly
Gaussian. Its mean is U h with U = (1 − p) W, and its variance V h² with V = p (1 − p) W². So r of a
gate is U h + √(V h²) · ε, plus its bias. The normal numbers ε come as further gates of x.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from .graph import Graph

if TYPE_CHECKING:
    from . import Definition

MOST_GATES = 4  # each becomes two, and a cell has at most eight
MEAN, VARIANCE = "fast_mean", "fast_variance"  # the matrices U and V
LEAST = 1e-12  # added to a variance, so that its root has a derivative at zero


@cache
def with_gaussian_product(d: Definition) -> Definition:
    """Return the cell that draws its product with h, without a matrix of its own.

    Its gates of x are those of `d`, and as many normal numbers. Its parameters are those of `d`,
    the two matrices, and one vector per gate for the biases of r, if they are kept apart.
    """
    from . import Definition

    assert d.recurrence == "dense" and d.gates <= MOST_GATES
    graph, places = Graph(), {}
    h = graph.add("state", value=d.states[0])
    rows = "H" if d.gates == 1 else f"{d.gates}H"
    mean = graph.add("product", graph.add("parameter", value=MEAN), h, value=rows)
    square = graph.add("mul", h, h)
    variance = graph.add("product", graph.add("parameter", value=VARIANCE), square, value=rows)

    def gaussian(q: int) -> int:
        least = graph.add("abs", graph.add("part", variance, value=str(q)))
        root = graph.add("sqrt", graph.add("add", least, graph.number(LEAST)))
        normal = graph.add("mul", root, graph.add("x", value=str(d.gates + q)))
        r = graph.add("add", graph.add("part", mean, value=str(q)), normal)
        if not d.storage.apart:
            return r
        return graph.add("add", r, graph.add("parameter", value=f"fast_bias{q}"))

    for node in d.graph.reached(d.outputs):
        op, args, value = d.graph.nodes[node]
        if op == "r":
            places[node] = gaussian(int(str(value)))
        else:
            places[node] = graph.add(op, *(places[arg] for arg in args), value=value)
    biases = [f"fast_bias{q}" for q in range(d.gates)] if d.storage.apart else []
    made = Definition(
        graph, [places[node] for node in d.outputs], gates=2 * d.gates, groups=d.groups,
        parameters=(*d.parameters, MEAN, VARIANCE, *biases), recurrence="none", heads=1,
        bounded=d.bounded, name=d.name,
    )  # fmt: skip
    return Definition.from_text(made.text, d.name)
