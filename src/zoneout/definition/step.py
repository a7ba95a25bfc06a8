"""One time step with its noise, and its backward pass, as graphs: what kernels are printed from.

A `Step` is a definition with its marks replaced by the rules of noise. Each rule reads a mask: 1
takes the old value (or zero), 0 the new one, a number between blends the two. A mask of zeros is no
noise, so three steps serve every combination of noises: one with zoneout alone, the common case,
one with all rules whose masks are drawn, and one with the rules and gradients of masks that the
caller gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .derivative import differentiate
from .graph import Graph, Node
from .products import products_of

if TYPE_CHECKING:
    from . import Definition

RULES = frozenset({"zero", "update", "hold"})  # the rules of a step beside zoneout
# With these the masks have gradients, too, and a state may be the sum of its old and its new value.
GIVEN = RULES | {"sum"}
# The state and gradient name of the gate that a step may take from the step before.
HELD = "held gate"
# The same for the ends of a norm; no state can have such a name.
SHOWN, RAW = "norm's result", "norm's input"


@dataclass(frozen=True)
class Step:
    """The forward pass of a step. Leaves are x, r, state, parameter, inner and mask."""

    graph: Graph
    new: tuple[int, ...]  # the states that are carried on, in the order of the definition
    gate: int | None  # the held gate as this step computed it
    gates: tuple[tuple[int, ...], ...]  # per gate: the leaves of x and, if it is used, of r
    merged: bool  # every gate is used only as x + r
    raw: int | None = None  # what a norm normalises, in a step that is split there
    inputs: tuple[int, ...] = ()  # what each product inside the step is taken of


@dataclass(frozen=True)
class Backward:
    """The backward pass: the gradients of a step's leaves, from those of the new states (leaves
    `gradient`).
    """

    x: tuple[int, ...]
    r: tuple[int | None, ...]
    states: tuple[int | None, ...]
    gate: int | None
    parameters: tuple[int | None, ...]
    shown: int | None = None  # of the norm's result, in a step that is split there
    inner: tuple[tuple[int | None, ...], ...] = ()  # per product inside the step: of each part
    masks: tuple[tuple[str, int], ...] = ()  # of each mask that is used, by name


Passes = tuple[Step, Backward]


def step_of(definition: Definition, rules: frozenset[str] = RULES, split: bool = False) -> Step:
    """Return the step of a definition, with zoneout and these other rules of noise.

    With "sum" a state is Θ₁ · old + Θ₂ · new: `add:` is the mask of the old value, and `drop:` the
    mask of what is left out of the new one.

    A split step has two parts, before and after the norm of what `zo.shown` marks. The second part
    reads the norm's result as a state, and the backward pass of the first part the gradient of the
    norm's input. In the same way a step is split at the products inside it: their results are
    leaves, `inner`, and so are the gradients of what they are taken of.
    """
    graph = Graph()

    def less(value: int, rule: str, mask: str) -> int:
        return graph.add("less", value, graph.add("mask", value=mask)) if rule in rules else value

    places: dict[int, int] = {}
    gate = raw = None
    products = list(products_of(definition.graph, definition.outputs))
    inputs: list[int] = []
    for number in definition.graph.reached(definition.outputs):
        op, args, value = definition.graph.nodes[number]
        new_args = tuple(places[arg] for arg in args)
        if op == "candidate":
            places[number] = less(new_args[0], "zero", f"zero:{definition.group_of(str(value))}")
        elif op == "update":
            places[number] = less(new_args[0], "update", "update")
        elif op == "held" and "hold" in rules:
            gate = new_args[0]
            old = graph.add("state", value=HELD)
            places[number] = graph.add("mix", gate, old, graph.add("mask", value="hold"))
        elif op == "shown" and split:
            (raw,) = new_args
            places[number] = graph.add("state", value=SHOWN)
        elif op in ("held", "shown"):
            (places[number],) = new_args
        elif op == "product":  # one with rank passes its input on to the product that takes it
            places[number] = new_args[1]
            inputs += [new_args[1]] if number in products else []
        elif op == "part":
            places[number] = graph.add("inner", value=f"{products.index(args[0])}.{value}")
        else:
            places[number] = graph.add(op, *new_args, value=value)
    new = []
    for state, output in zip(definition.states, definition.outputs, strict=True):
        group, old = definition.group_of(state), graph.add("state", value=state)
        made = less(places[output], "sum", f"drop:{group}")
        made = graph.add("mix", made, old, graph.add("mask", value=f"zone:{group}"))
        if "sum" in rules:
            made = graph.add("also", made, old, graph.add("mask", value=f"add:{group}"))
        new.append(made)
    ends = [*new, *inputs, *([] if raw is None else [raw])]
    return Step(
        graph,
        tuple(new),
        gate,
        _gates(graph, ends, definition.gates),
        _merged(graph, ends, definition),
        raw,
        tuple(inputs),
    )


def ends_of(step: Step) -> list[int]:
    """Return all results of the forward pass."""
    return [*step.new, *step.inputs, *(node for node in (step.gate, step.raw) if node is not None)]


def _gates(graph: Graph, outputs: list[int], count: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(count)]
    for kind in ("x", "r"):
        for node, name in graph.leaves(outputs, kind):
            found[int(str(name))].append(node)
    return tuple(map(tuple, found))


def _merged(graph: Graph, outputs: list[int], definition: Definition) -> bool:
    """Return True if x and r of every gate are used only as their sum."""
    if not definition.has_r:
        return False
    users = graph.users(outputs)
    for gate in _gates(graph, outputs, definition.gates):
        if len(gate) != 2 or any(users[leaf] != users[gate[0]] for leaf in gate):
            return False
        if len(users[gate[0]]) != 1 or graph.nodes[users[gate[0]][0]] not in (
            Node("add", gate),
            Node("add", gate[::-1]),
        ):
            return False
    return True


def backward_of(definition: Definition, step: Step, of_masks: bool = False) -> Backward:
    """Add the backward pass to the step's graph; `of_masks`: with the gradients of the masks."""
    graph = step.graph
    outputs = [
        (node, graph.add("gradient", value=state))
        for state, node in zip(definition.states, step.new)
    ]
    if step.gate is not None:
        outputs.append((step.gate, graph.add("gradient", value=HELD)))
    if step.raw is not None:
        outputs.append((step.raw, graph.add("gradient", value=RAW)))
    for p, node in enumerate(step.inputs):
        outputs.append((node, graph.add("gradient", value=f"product {p}")))
    products = definition.products
    kinds = {
        "x": [str(q) for q in range(definition.gates)],
        "r": [str(q) for q in range(definition.gates)],
        "state": [*definition.states, HELD, SHOWN],
        "parameter": list(definition.vectors),
        "inner": [f"{p}.{k}" for p, one in enumerate(products) for k in range(one.parts)],
        "mask": [str(name) for _, name in graph.leaves(ends_of(step), "mask")] if of_masks else [],
    }
    leaves = [graph.add(kind, value=name) for kind, names in kinds.items() for name in names]
    found = dict(
        zip(
            ((k, n) for k, names in kinds.items() for n in names),
            differentiate(graph, outputs, leaves),
        )
    )

    def of(kind: str) -> list[int | None]:
        return [found[kind, name] for name in kinds[kind]]

    *states, gate, shown = of("state")
    x = [graph.number(0.0) if d is None else d for d in of("x")]
    inner = tuple(
        tuple(found["inner", f"{p}.{k}"] for k in range(one.parts))
        for p, one in enumerate(products)
    )
    return Backward(
        tuple(x),
        tuple(of("r")),
        tuple(states),
        gate,
        tuple(of("parameter")),
        shown,
        inner,
        tuple((name, d) for name in kinds["mask"] if (d := found["mask", name]) is not None),
    )
