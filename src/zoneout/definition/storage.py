"""What the forward pass of a step stores for the backward pass.

Each gate stores one number per unit, in place of its input. The number is the gate's input (x, or x
+ r where the gate is used only so), carried through the operations above it as long as the
derivative needs nothing below: for an LSTM that gives the activated gates. Values that the backward
pass needs and cannot compute from these get a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .graph import Graph, to_text
from .operations import COMPARISONS, OPERATIONS
from .products import MOST_LINKS, MOST_PARTS, MOST_PRODUCTS
from .step import GIVEN, RULES, ends_of

if TYPE_CHECKING:
    from . import Definition
    from .step import Backward, Step

MOST_SLOTS = 2


@dataclass(frozen=True)
class Storage:
    """Nodes of the step's graph."""

    gates: tuple[int, ...]  # what each gate stores
    slots: tuple[int, ...]  # what else is stored
    held: int | None  # the held gate's place: a gate's number, or `gates` + a slot's number

    @property
    def nodes(self) -> tuple[int, ...]:
        return (*self.gates, *self.slots)


@dataclass(frozen=True)
class Layout:
    """What a loop over time needs to know of a cell's step, whatever its noise and norm."""

    apart: bool  # h·W_h is not simply added to x·W_x: the two have biases of their own
    # where the held gate is stored: a gate's number, or `gates` + a slot's number; −1: nowhere
    held: int
    again: bool  # the new states can be computed from what is stored, which a projection needs
    slots: tuple[int, ...]  # per slot: the gate whose h·W_h it stores, −1: another value
    products: tuple[int, ...] = ()  # the parts of each product inside the step, stored beside it
    links: int = 0  # the most matrices that one of them applies
    shown: bool = False  # a norm splits the step
    # masks may be given, and have gradients: the step with these stores no more than the others
    takes_masks: bool = True

    @property
    def fits(self) -> bool:
        """True if a loop without products inside the step has room for the slots."""
        return len(self.slots) <= MOST_SLOTS and not self.products

    @property
    def fits_products(self) -> bool:
        """True if a loop that has products inside the step has room for those of the cell."""
        count, parts = len(self.products), sum(self.products)
        return count <= MOST_PRODUCTS and parts <= MOST_PARTS and self.links <= MOST_LINKS

    def runs(self, projected: bool, normed: bool) -> bool:
        """Return True if a loop that has products inside the step can run the cell.

        A norm and products would split the step twice.
        """
        room = len(self.slots) <= MOST_SLOTS and self.fits_products
        twice = normed and self.shown and len(self.products) > 0
        return room and (self.again or not projected) and not twice


def layout_of(d: Definition) -> Layout:
    """Return the layout that serves all variants of a cell's step."""
    variants = [(frozenset[str](), False), (RULES, False)]
    variants += [(RULES, True)] if "shown" in d.marks else []
    slots: list[set[int]] = []
    held: set[int] = set()
    again = True
    for rules, split in variants:
        step, backward = d.passes(rules, split)
        storage = storage_of(step, backward)
        held |= set() if storage.held is None else {storage.held}
        again &= all(computable(step.graph, node, set(storage.nodes)) for node in step.new)
        for k, node in enumerate(storage.slots):
            kind, _, name = step.graph.nodes[node]
            slots += [set()] if k == len(slots) else []
            slots[k].add(int(str(name)) if kind == "r" else -1)
    apart = d.has_r and not d.passes()[0].merged
    if len(held) > 1:  # a loop looks for the gate of the step before in one place
        slots += [{-1}] * (MOST_SLOTS + 1)
    return Layout(
        apart,
        max(held, default=-1),
        again,
        tuple(min(gates) if len(gates) == 1 else -1 for gates in slots),
        tuple(product.parts for product in d.products),
        max((len(product.matrices) for product in d.products), default=0),
        "shown" in d.marks,
        _stores_the_same(d),
    )


def _stores_the_same(d: Definition) -> bool:
    """Return True if the gradients of masks need no other stored values than the steps without.

    A forward pass does not know yet whether a mask needs a gradient, and runs one of those.
    """
    texts, stored = [], []
    for rules in (frozenset[str](), RULES, GIVEN):
        step, backward = d.passes(rules)
        storage, nodes = storage_of(step, backward), step.graph.nodes
        texts.append((to_text(step.graph, storage.nodes), len(storage.gates), storage.held))
        # Below these operations, the step without RULES lacks what they compute.
        stored.append([nodes[node].op for node in storage.nodes])
    return texts[1] == texts[2] and stored[0] == stored[1]


def storage_of(step: Step, backward: Backward) -> Storage:
    """Return what a step stores."""
    outputs = ends_of(step)
    users = step.graph.users(outputs)
    gates = tuple(_climb(step.graph, users, leaves) for leaves in step.gates)
    slots: list[int] = []
    for node in (*needed(step, backward), *step.inputs):
        if not computable(step.graph, node, {*gates, *slots}):
            slots.append(node)
    if (
        step.raw is not None
    ):  # the second part of a split step computes the new states from what is stored
        for node in step.graph.reached(step.new, stop={*gates, *slots}):
            if step.graph.nodes[node].op in ("x", "r") and node not in gates:
                slots.append(node)
    held = None
    if step.gate is not None:
        if step.gate not in (*gates, *slots):
            slots.append(step.gate)
        held = (*gates, *slots).index(step.gate)
    return Storage(gates, tuple(slots), held)


def needed(step: Step, backward: Backward) -> list[int]:
    """Return the nodes of the forward pass that the backward pass reads, arguments before
    results.
    """
    graph = step.graph
    forward = graph.reached(ends_of(step))
    inside = set(forward)
    ends = [
        node
        for node in (*backward.x, *backward.r, *backward.states, *backward.parameters)
        if node is not None
    ]
    ends += [node for node in (backward.gate, backward.shown) if node is not None]
    ends += [node for _, node in backward.masks]
    ends += [node for each in backward.inner for node in each if node is not None]
    found = {end for end in ends if end in inside}
    for node in graph.reached(ends, stop=forward):
        if node not in inside:
            found |= {arg for arg in graph.nodes[node].args if arg in inside}
    # The condition of a where is computed again from the numbers that it compares.
    found |= {
        arg
        for node in found
        if graph.nodes[node].op in COMPARISONS
        for arg in graph.nodes[node].args
    }
    found = {node for node in found if graph.nodes[node].op not in COMPARISONS}
    return [node for node in forward if node in found]


def computable(graph: Graph, node: int, stored: set[int]) -> bool:
    """Return True if a node can be computed from stored nodes, old states, results of products,
    parameters, masks and numbers.
    """
    return all(
        at in stored or graph.nodes[at].op not in ("x", "r")
        for at in graph.reached([node], stop=stored)
    )


def _climb(graph: Graph, users: dict[int, list[int]], leaves: tuple[int, ...]) -> int:
    """Return the last node above a gate's input whose storing makes the nodes below it
    unnecessary.
    """
    node = leaves[0]
    if len(leaves) == 2:
        above = users[leaves[0]]
        if len(above) == 1 and users[leaves[1]] == above and graph.nodes[above[0]].op == "add":
            node = above[0]  # the gate is used only as x + r
    while len(users[node]) == 1:
        (above_it,) = users[node]
        operation = OPERATIONS[graph.nodes[above_it].op]
        if operation.needs == "arguments":
            break
        node = above_it
        if operation.needs == "result":
            break
    return node
