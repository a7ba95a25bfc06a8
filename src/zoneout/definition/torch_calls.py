"""A graph as one Python function of torch calls: the reference backend runs it at every step.

`graph.evaluate` computes the same, node by node, and is the slower of the two by half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .graph import Graph, Value, apply
from .operations import LEAVES, MARKS, OPERATIONS

Marks = Mapping[str, Callable[[Tensor, Value], Tensor]]
Step = Callable[[Mapping[tuple[str, Value], Tensor], Marks], list[Tensor]]

TEXTS = {  # with tensors, or a tensor and a number in either place
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}",
}  # fmt: skip
METHODS = ("sigmoid", "tanh", "relu", "exp", "log", "sqrt", "abs")  # of one tensor


def _same(value: Tensor, name: Value) -> Tensor:
    return value


def compile_step(graph: Graph, outputs: Sequence[int]) -> Step:
    """Return a function (leaves, marks) -> values of the outputs."""
    lines = [f"{mark} = marks.get({mark!r}, same)" for mark in MARKS]
    texts: dict[int, str] = {}
    for node in graph.reached(outputs):
        op, args, value = graph.nodes[node]
        names = [texts[arg] for arg in args]
        if op == "number":
            texts[node] = f"float({str(value)!r})" if str(value) in ("inf", "-inf", "nan") else repr(value)
            continue
        numbers = [graph.nodes[arg].op == "number" for arg in args]
        if op in LEAVES:
            text = f"leaves[{op!r}, {value!r}]"
        elif op in MARKS and not any(numbers):
            text = f"{op}({names[0]}, {value!r})"
        elif op in METHODS and not any(numbers):
            text = f"{names[0]}.{op}()"
        elif op in TEXTS and not all(numbers):
            text = TEXTS[op].format(*names)
        elif op in MARKS:
            text = f"{op}(filled({names[0]}, leaves), {value!r})"
        else:
            text = f"apply({op!r}, [{', '.join(names)}], like(leaves))"
        texts[node] = f"v{node}"
        lines.append(f"v{node} = {text}")
    results = [f"filled({texts[n]}, leaves)" if graph.nodes[n].op == "number" else texts[n] for n in outputs]
    body = "\n    ".join([*lines, f"return [{', '.join(results)}]"])
    scope: dict[str, Any] = {"apply": apply, "same": _same, "like": _like, "filled": _filled}
    exec(f"def step(leaves, marks):\n    {body}\n", scope)  # of operations from the table, and numbers
    made: Step = scope["step"]
    return made


def _like(leaves: Mapping[Any, Tensor]) -> Tensor:
    return next(iter(leaves.values()))


def _filled(number: float, leaves: Mapping[Any, Tensor]) -> Tensor:
    like = _like(leaves)
    return like.new_full((), number).expand_as(like)


assert set(METHODS) <= set(OPERATIONS) and all(hasattr(torch.Tensor, name) for name in METHODS)
