"""Checks of a new definition: the trace against the function, the derivative against finite
differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .graph import Value
from .torch_calls import compile_step, evaluate
from .trace import DefinitionError

if TYPE_CHECKING:
    from . import Definition

Leaves = dict[tuple[str, Value], Tensor]
POINTS, STEP, TOLERANCE = 16, 1e-6, 1e-4


def _samples(d: Definition) -> Iterator[tuple[list[Any], Leaves]]:
    """Yield arguments of the cell at random points: about zero, then positive ones (for log and
    sqrt). The derivative is that of a step which is split at its products, so their results are
    leaves as well.
    """
    generator = torch.Generator().manual_seed(1)
    for positive in (False, True, False):

        def draw(*shape: int, positive: bool = positive) -> Tensor:
            value = torch.randn(
                shape or (POINTS,), generator=generator, dtype=torch.float64, device="cpu"
            )
            return value.abs() + 0.5 if positive else value

        args: list[Any] = [tuple(draw() for _ in range(d.gates))]
        args += [tuple(draw() for _ in range(d.gates))] if d.has_r else []
        args += [draw() for _ in d.states]
        args += [
            draw(*d.shape_of(name, POINTS)) / (4 if name in d.matrices else 1)
            for name in d.parameters
        ]
        inner: Leaves = {
            ("inner", f"{p}.{k}"): draw()
            for p, one in enumerate(d.products)
            for k in range(one.parts)
        }
        yield args, dict(d.leaves(*args)) | inner


def check_trace(d: Definition, function: Callable[..., Any]) -> None:
    """Raise `DefinitionError` if the graph does not compute what the function computes."""
    graph = d.graph
    chosen = [
        graph.nodes[node].args[1:]
        for node in graph.reached(d.outputs)
        if graph.nodes[node].op == "where"
    ]
    rounds = any(graph.nodes[arg].op == "number" for args in chosen for arg in args)
    # torch.where makes float32 of a number, whatever the type of the others.
    tolerance = 1e-6 if rounds else 1e-12
    for args, leaves in _samples(d):
        try:
            found = function(*args)
        except Exception as error:
            raise DefinitionError(
                f"cell {d.name!r}: the function failed on tensors, not on symbols: "
                f"{type(error).__name__}: {error}"
            ) from error
        expected = list(found) if isinstance(found, (tuple, list)) else [found]
        for state, ours, theirs in zip(d.states, d.evaluate(leaves), expected, strict=True):
            theirs = theirs.to(ours.dtype) if isinstance(theirs, Tensor) else theirs
            if not isinstance(theirs, Tensor) or not torch.allclose(
                ours, theirs, tolerance, tolerance, equal_nan=True
            ):
                raise DefinitionError(
                    f"cell {d.name!r}: the function computes another {state} on numbers than on "
                    "symbols; it must not depend on anything but its arguments"
                )


def check_derivative(d: Definition) -> None:
    """Raise `DefinitionError` if the derivative disagrees with finite differences at every
    sampled point.
    """
    worst = ""
    for _, leaves in _samples(d):
        worst = _disagreement(d, leaves)
        if not worst:
            return
    raise DefinitionError(
        f"cell {d.name!r}: the derivative with respect to {worst} disagrees with finite "
        "differences; if numbers in the function are very large, checked=False leaves the check out"
    )


def _disagreement(d: Definition, leaves: Leaves) -> str:
    """Return the name of an argument whose derivative is wrong at most points, or ""."""
    step, backward = d.passes()
    masks = {("mask", value) for _, value in step.graph.leaves(step.new, "mask")}
    like = next(iter(leaves.values()))
    full: Leaves = dict(leaves) | {mask: torch.zeros_like(like) for mask in masks}
    full["state", "held gate"] = torch.zeros_like(like)
    ends = {("gradient", state): torch.full_like(like, 0.5 + k) for k, state in enumerate(d.states)}
    ends["gradient", "held gate"] = torch.zeros_like(like)

    names_of = [*d.states, *(f"product {p}" for p in range(len(step.inputs)))]
    for p in range(len(step.inputs)):
        ends["gradient", f"product {p}"] = torch.full_like(like, 0.3 + 0.1 * p)
    forward = compile_step(step.graph, [*step.new, *step.inputs])

    def loss(at: Leaves) -> Tensor:
        new = forward(at, {})
        return sum(
            (ends["gradient", name] * v for name, v in zip(names_of, new)), torch.zeros_like(like)
        )

    names = [("x", str(q)) for q in range(d.gates)]
    wanted: list[int | None] = [*backward.x]
    names += [("r", str(q)) for q in range(d.gates)] if d.has_r else []
    wanted += backward.r if d.has_r else []
    names += [("state", state) for state in d.states] + [("parameter", name) for name in d.vectors]
    wanted += [*backward.states, *backward.parameters]
    names += [("inner", str(name)) for kind, name in leaves if kind == "inner"]
    wanted += [node for each in backward.inner for node in each]
    for name, node in zip(names, wanted, strict=True):
        above, below = (loss(full | {name: full[name] + by}) for by in (STEP, -STEP))
        slope = (above - below) / (2 * STEP)
        ours = (
            evaluate(step.graph, [node], full | ends)[0]
            if node is not None
            else torch.zeros_like(like)
        )
        good = (ours - slope).abs() <= TOLERANCE * (1 + slope.abs())
        if not (good | ~slope.isfinite()).float().mean() > 0.7 or not slope.isfinite().any():
            return f"{name[0]}[{name[1]}]" if name[0] in ("x", "r", "inner") else str(name[1])
    return ""
