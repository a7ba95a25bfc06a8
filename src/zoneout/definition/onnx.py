"""A graph as nodes of an ONNX graph, and the rules of noise in evaluation.

Values are those of `onnxscript.ir`. onnxscript is imported where it is needed only: it is not a
dependency of zoneout, and importing it takes most of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from .graph import Graph, Value, parts_of
from .operations import MARKS


class Nodes:
    """A builder that appends nodes to a list: the graph of a model, or the body of a Scan.

    Calling it adds one ONNX operator and returns its output, or a list of its outputs. Inputs are
    values, numbers, lists of whole numbers, or None for an input that is left out.
    """

    _names = count()

    def __init__(self, nodes: list[Any], version: int, dtype: Any) -> None:
        self.nodes, self.version = nodes, version
        self.dtype = dtype  # of floats

    def __call__(self, kind: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        import onnxscript.ir as ir

        values = [v if v is None or isinstance(v, ir.Value) else self.constant(v) for v in inputs]
        converted = ir.convenience.convert_attributes(attributes)
        node = ir.Node("", kind, values, converted, num_outputs=outputs, version=self.version)
        for value in node.outputs:
            value.name = self.new_name()
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else list(node.outputs)

    def new_name(self) -> str:
        """Return a name that no other value has."""
        return f"zoneout_{next(self._names)}"

    def constant(self, value: float | int | list[int]) -> Any:
        """Add a constant: a float in the dtype of floats, anything else as int64."""
        import onnxscript.ir as ir

        dtype = self.dtype if isinstance(value, float) else ir.DataType.INT64
        return self("Constant", value=ir.tensor(value, dtype=dtype))


# --- operations -----------------------------------------------------------------------------------


def _not_equal(op: Nodes, a: Any, b: Any) -> Any:
    return op("Not", op("Equal", a, b))


def _softplus(op: Nodes, x: Any) -> Any:
    """Add torch's softplus. ONNX's is log(exp(x) + 1), which a runtime may let overflow."""
    return op("Where", op("Greater", x, 20.0), x, op("Softplus", x))


# For each operation of a cell: an ONNX operator, or a function that adds several. NaN, infinities
# and ties are those of torch, where a runtime's Min, Max and Relu propagate NaN: onnxruntime's do.
OPERATORS: dict[str, str | Callable[..., Any]] = {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "neg": "Neg",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "relu": "Relu",
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "softplus": _softplus,
    "abs": "Abs",
    "minimum": "Min",
    "maximum": "Max",
    "where": "Where",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "eq": "Equal",
    "ne": _not_equal,
}


# --- a graph --------------------------------------------------------------------------------------


def evaluate(
    op: Nodes,
    graph: Graph,
    outputs: Sequence[int],
    leaves: Mapping[tuple[str, Value], Any],
    marks: Mapping[str, Callable[[Any, Value], Any]],
    *,
    shape: Any,
    known: Mapping[int, Any] | None = None,
) -> list[Any]:
    """Add the nodes of a graph and return the values of the outputs.

    Args:
        op: the builder.
        graph, outputs: the graph, and its nodes to return.
        leaves: a value for every leaf but the numbers, by kind and name. Parameters are [H], all
            others [B, H].
        marks: what a mark does with its value; a mark that is not named is the identity.
        shape: the shape [B, H] as a value. A mark gets a value of this shape, also where it is
            computed from parameters and numbers alone.
        known: values of nodes that need not be computed, by node.
    """
    values: dict[int, Any] = dict(known or {})
    full = set(values)  # the nodes whose values are [B, H], and not numbers or [H]
    for node in graph.reached(outputs, stop=values):
        if node in values:
            continue
        kind, args, name = graph.nodes[node]
        if kind in ("x", "r", "state") or any(arg in full for arg in args):
            full.add(node)
        if kind == "number":
            values[node] = op.constant(float(str(name)))
        elif kind in MARKS:
            value = values[args[0]] if node in full else op("Expand", values[args[0]], shape)
            values[node] = marks[kind](value, name) if kind in marks else value
            full.add(node)
        elif kind == "product":
            values[node] = op("MatMul", values[args[1]], op("Transpose", values[args[0]]))
        elif kind == "part":
            parts = parts_of(graph, args[0])
            each = [values[args[0]]]
            if parts > 1:
                each = op("Split", values[args[0]], outputs=parts, axis=-1, num_outputs=parts)
            values[node] = each[int(str(name))]
        elif kind in OPERATORS:
            recipe, inputs = OPERATORS[kind], [values[arg] for arg in args]
            values[node] = op(recipe, *inputs) if isinstance(recipe, str) else recipe(op, *inputs)
        else:
            values[node] = leaves[kind, name]
    return [values[node] for node in outputs]


def gate_sums(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield the nodes that add x and r, with the number of the gate.

    They are all there is of x and r in a cell whose `storage.apart` is False.
    """
    for node, (op, args, _) in enumerate(graph.nodes):
        leaves = [graph.nodes[arg] for arg in args]
        if op == "add" and {leaf.op for leaf in leaves} == {"x", "r"}:
            yield node, int(str(leaves[0].value))


# --- noise ----------------------------------------------------------------------------------------


class Rate(NamedTuple):
    """A rate, a scalar or [H], and what the two rules need of it at every step."""

    rate: Any
    rest: Any  # 1 − rate
    is_zero: Any
    is_one: Any

    @staticmethod
    def of(op: Nodes, rate: Any) -> Rate:
        """Add the nodes of a rate, outside of the loop over time."""
        rate = op("Cast", rate, to=int(op.dtype))
        return Rate(rate, op("Sub", 1.0, rate), op("Equal", rate, 0.0), op("Equal", rate, 1.0))


def mix(op: Nodes, new: Any, old: Any, keep: Rate | None) -> Any:
    """Add `operations.mix` with a rate: it selects at 0 and 1, where a product would spread NaN."""
    if keep is None:
        return new
    between = op("Add", op("Mul", keep.rest, new), op("Mul", keep.rate, old))
    return op("Where", keep.is_zero, new, op("Where", keep.is_one, old, between))


def less(op: Nodes, value: Any, drop: Rate | None) -> Any:
    """Add `operations.less` with a rate: it gives 0 at 1, whatever the value is."""
    if drop is None:
        return value
    return op("Where", drop.is_one, 0.0, op("Mul", value, drop.rest))
