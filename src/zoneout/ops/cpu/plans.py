"""Plans of torch calls: what is computed step by step, and what for many steps at once.

Plans are for the loop in torch calls (`fallback.py`). A call costs microseconds however little it
does, so a step should have few calls. Plans are derived from the graphs of the cell.

Forward pass: values that depend neither on h·W_h nor on a state are computed early, for a chunk of
steps at once.

Backward pass: every gradient is a sum of a few other gradients, each times a factor. These are the
gradients of the new states, and sums of them that are used more than once. The factors depend on no
gradient. They are computed for all steps of a chunk before the first step, so a step only
multiplies and adds. Values that no step needs, such as the gradients of parameters, are computed
after the last step.

A plan names the tensors that it reads and writes:

| name | tensor |
|---|---|
| gate*q* | forward: the gate's input, then its stored value; backward: the stored value |
| r*q*, slot*k* | h·W_h of a gate; other stored values |
| old*k*, new*k*, held | the states before and after a step; the held gate of the previous step |
| parameter*k* | a parameter of the cell |
| inner*p*_*k*, in*p* | a part of a product inside the step; what the product is taken of |
| dinner*p*_*k* | the gradient of a part |
| zone*k*, zero*k*, update, hold | masks, by the first state of a group; with _share as numbers |
| dstate*k*, seen*k* | gradients of states, in: new, out: old; the terms that each step adds |
| owed | the gradient of the gate that a step may hold |
| dx*q*, dr*q* | gradients of the gates' inputs; dr is that of h·W_h if it is kept apart |
| dshown, u | the gradient of the norm's result; the input of the projection |
| kept*k*, value*k* | values that one part of a plan passes to the next |

`normalise` and `normalise_back` are the norm of the cell's shown value, and its backward pass.
`product`*p*_*k* computes a part of a product inside the step, and `back`*p*_*k* the part of the
gradient of what the product is taken of that comes from this part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from ...definition import Definition
from ...definition.graph import Graph, Value
from ...definition.step import HELD, RAW, RULES, SHOWN
from ...definition.storage import storage_of
from ...definition.torch_calls import Calls, compile_calls, small_nodes

Terms = dict[int, int | None]  # multiples of nodes: the factors, None for 1


class Case(NamedTuple):
    """The properties that a plan depends on."""

    cell: Definition
    dtype: torch.dtype
    masks: tuple[tuple[str, str], ...]  # name and kind: "drawn", "between" (0 < rate < 1), "rate"
    normed: bool
    projected: bool
    seen: tuple[bool, ...]  # per state: True if every step adds a term to its gradient

    @property
    def split(self) -> bool:
        """True if a norm lies between two parts of the step."""
        return self.normed and "shown" in self.cell.marks

    @property
    def rules(self) -> frozenset[str]:
        """The noise rules of the step, as in a compiled loop: they decide what is stored."""
        zoneout = all(name.startswith("zone") for name, _ in self.masks)
        return frozenset() if zoneout and not self.split else RULES

    @property
    def small(self) -> set[str]:
        """The names of tensors without rows."""
        parameters = {f"parameter{k}" for k in range(len(self.cell.vectors))}
        rates = {name for name, kind in self.masks if kind != "drawn" and name != "hold"}
        return parameters | rates | {f"{name}_share" for name in rates}

    @property
    def gaps(self) -> set[str]:
        """The names of tensors that are columns of wider tensors."""
        gates = range(self.cell.gates if self.cell.gates > 1 else 0)
        found = {f"{name}{q}" for name in ("gate", "r", "dx", "dr") for q in gates}
        several = [part for part in parts_of(self.cell) if self.cell.products[part[0]].parts > 1]
        return found | {f"{name}{p}_{k}" for name in ("inner", "dinner") for p, k in several}


class Forward(NamedTuple):
    """The forward pass of a chunk. The results of `early` are named value0, value1, …"""

    early: Calls
    step: Calls


class Backward(NamedTuple):
    """The backward pass of a chunk. The results of `before` are named value0, value1, …"""

    before: Calls
    step: Calls
    after: Calls
    kept: tuple[str, ...]  # values that `step` passes to `after`
    parameters: tuple[int, ...]  # `after` returns their gradients per row
    passes_h: bool  # a part of the gradient of h bypasses the gates: the step writes it


def parts_of(cell: Definition) -> list[tuple[int, int]]:
    """Return (product, part) for every part of the products inside the step."""
    return [(p, k) for p, one in enumerate(cell.products) for k in range(one.parts)]


# --- the graph of a case --------------------------------------------------------------------------


class _Graph:
    """The step of a cell with only the masks and gradients of one case."""

    def __init__(self, case: Case, back: bool = False) -> None:
        self.case, self.cell = case, case.cell
        self.masks = dict(case.masks)
        self.step, self.backward = case.cell.passes(case.rules, case.split)
        self.storage = storage_of(self.step, self.backward)
        self.source, self.graph = self.step.graph, Graph()
        self.places: dict[int, int | None] = {}  # by node of the source; None: zero
        if self.step.raw is not None:  # the norm's result is computed from its input
            self._call(("state", SHOWN), self.step.raw, "normalise")
            self._call(("gradient", RAW), self.backward.shown, "normalise_back")
        self._back_products() if back else self._products()

    def _products(self) -> None:
        """Compute the products inside the step from what they are taken of."""
        for p, k in parts_of(self.cell):
            self._call(("inner", f"{p}.{k}"), self.step.inputs[p], f"product{p}_{k}")

    def _back_products(self) -> None:
        """Compute the gradients of what they are taken of; the results of products are stored."""
        for p, gradients in reversed([*enumerate(self.backward.inner)]):
            total = None
            for k, node in enumerate(gradients):
                value = None if node is None else self.place(node)
                if value is not None:
                    part = self.graph.add("call", value, value=f"back{p}_{k}")
                    total = self.graph.plus(total, part)
            self.places[self.source.add("gradient", value=f"product {p}")] = total

    def _call(self, leaf: tuple[str, str], of: int | None, name: str) -> None:
        value = None if of is None else self.place(of)
        made = None if value is None else self.graph.add("call", value, value=name)
        self.places[self.source.add(leaf[0], value=leaf[1])] = made

    def place(self, node: int) -> int | None:
        """Return the node for a node of the source; None if it is zero."""
        for n in self.source.reached([node], stop=self.places):
            if n not in self.places:
                self.places[n] = self._place(*self.source.nodes[n])
        return self.places[node]

    def some(self, node: int) -> int:
        """Return the node for a node of the source that is not zero."""
        found = self.place(node)
        assert found is not None
        return found

    def _place(self, op: str, args: tuple[int, ...], value: Value) -> int | None:
        if op == "mask":
            name = self.mask_name(str(value))
            return self.graph.add("mask", value=f"{name}_share") if name in self.masks else None
        if op == "gradient":
            return self._gradient(str(value))
        if op in ("mix", "less"):
            return self._noise(op, *args)
        placed = [self.places[arg] for arg in args]
        some = [node for node in placed if node is not None]
        if len(some) < len(placed):
            return self._without_zeros(op, placed)
        return self.graph.mul(*some) if op == "mul" else self.graph.add(op, *some, value=value)

    def mask_name(self, name: str) -> str:
        """Return the name in a plan (zone1) of a mask of the graph (zone:c)."""
        rule, _, state = name.partition(":")
        return f"{rule}{self.cell.states.index(state)}" if state else rule

    def _gradient(self, name: str) -> int | None:
        if name == HELD:
            return self.graph.add("gradient", value=HELD) if "hold" in self.masks else None
        own = self.graph.add("gradient", value=name)
        if not self.case.seen[self.cell.states.index(name)]:
            return own
        return self.graph.add("add", own, self.graph.add("seen", value=name))

    def _noise(self, op: str, *args: int) -> int | None:
        """Return the node of a noise rule: a choice by a mask, a mixture by a rate, or nothing.

        A mixture is one call, `torch.lerp`, which is not `operations.mix` for infinite numbers.
        """
        graph = self.graph
        *values, share = (self.places[arg] for arg in args)
        if share is None:
            return values[0]
        new, old = (*(graph.number(0.0) if v is None else v for v in values), graph.number(0.0))[:2]
        name = str(graph.nodes[share].value).removesuffix("_share")
        kind = self.masks[name]
        if kind == "drawn":
            return graph.add("where", graph.add("mask", value=name), old, new)
        if kind == "between":
            rest = graph.add("sub", graph.number(1.0), share)
            return graph.add("lerp", new, old, share) if op == "mix" else graph.mul(new, rest)
        return graph.add(op, *((new, old) if op == "mix" else (new,)), share)

    def _without_zeros(self, op: str, args: list[int | None]) -> int | None:
        """Return the node of an operation of which some arguments are zero.

        They are zero because their mask or gradient is off.
        """
        if op in ("mul", "neg") or (op == "div" and args[0] is None) or set(args) == {None}:
            return None
        if op in ("add", "sub") and args[1] is None:
            return args[0]
        if op == "add":
            return args[1]
        numbers = [self.graph.number(0.0) if a is None else a for a in args]
        return self.graph.add(op, *numbers)

    # --- names -----------------------------------------------------------------------------------

    def leaves(self) -> dict[int, str]:
        """Return the names of all leaves except those of the gates."""
        add, states = self.graph.add, self.cell.states
        found = {add("state", value=state): f"old{k}" for k, state in enumerate(states)}
        for k, name in enumerate(self.cell.vectors):
            found[add("parameter", value=name)] = f"parameter{k}"
        for p, k in parts_of(self.cell):
            found[add("inner", value=f"{p}.{k}")] = f"inner{p}_{k}"
        found |= {add("gradient", value=state): f"dstate{k}" for k, state in enumerate(states)}
        found |= {add("seen", value=state): f"seen{k}" for k, state in enumerate(states)}
        for name in self.masks:
            found |= {add("mask", value=each): each for each in (name, f"{name}_share")}
        return found | {add("state", value=HELD): "held", add("gradient", value=HELD): "owed"}

    def inputs(self) -> dict[int, str]:
        """Return the names of the gates' inputs: x and r, or their sum if they are merged."""
        found = {}
        for q, leaves in enumerate(self.step.gates):
            for leaf in leaves:
                placed = self.some(leaf)
                found[placed] = f"{'r' if self.source.nodes[leaf].op == 'r' else 'gate'}{q}"
            if self.step.merged:
                x, r = (self.some(leaf) for leaf in leaves)
                found |= {self.graph.add("add", *order): f"gate{q}" for order in ((x, r), (r, x))}
        return found

    def stored(self) -> list[tuple[str, int]]:
        """Return the values that the forward pass stores, with names."""
        slots = self.cell.storage.slots
        kept = [k for k in range(len(self.storage.slots)) if not self.case.normed or slots[k] < 0]
        gates = [(f"gate{q}", self.some(node)) for q, node in enumerate(self.storage.gates)]
        return gates + [(f"slot{k}", self.some(self.storage.slots[k])) for k in kept]

    def loads(self) -> dict[int, str]:
        """Return the names of the values that the backward pass may read."""
        slots = {self.some(node): f"slot{k}" for k, node in enumerate(self.storage.slots)}
        gates = {self.some(node): f"gate{q}" for q, node in enumerate(self.storage.gates)}
        return self.leaves() | slots | gates

    def compile(
        self,
        loads: Mapping[int, str],
        stores: Iterable[tuple[str, int]],
        returns: Iterable[int] = (),
    ) -> Calls:
        """Return the calls for some nodes of this graph."""
        case = self.case
        return compile_calls(
            self.graph,
            loads,
            list(stores),
            list(returns),
            dtype=case.dtype,
            small=case.small,
            gaps=case.gaps,
        )


# --- forward pass ---------------------------------------------------------------------------------


@lru_cache(256)
def forward_plan(case: Case) -> Forward:
    """Return the forward pass of a chunk."""
    made = _Graph(case)
    graph, loads = made.graph, made.leaves() | made.inputs()
    stores = made.stored() + [(f"new{k}", made.some(node)) for k, node in enumerate(made.step.new)]
    ends = [node for _, node in stores]
    order = graph.reached(ends, stop=loads)
    early = _early(graph, order, loads, made.step.merged)
    late = [node for node in order if node not in early]
    read_late = {arg for node in late if node not in loads for arg in graph.nodes[node].args}
    # What is stored takes the place of the gate's input, which nothing else reads (`storage_of`).
    stored = {node: name for name, node in reversed(stores) if node in early}
    values = [n for n in order if n in early and n not in stored and (n in read_late or n in ends)]
    names = {node: f"value{k}" for k, node in enumerate(values)} | stored
    first = [(name, node) for node, name in stored.items()]
    rest = [(name, node) for name, node in stores if names.get(node) != name]
    return Forward(made.compile(loads, first, values), made.compile(loads | names, rest))


def _early(graph: Graph, order: list[int], loads: Mapping[int, str], merged: bool) -> set[int]:
    """Return the computed nodes that depend on neither h·W_h nor a state."""
    waiting = ("r", "old", "held", *(["gate"] if merged else []))
    late: set[int] = set()
    early: set[int] = set()
    for node in order:
        op, args, _ = graph.nodes[node]
        if node in loads:
            late |= {node} if loads[node].startswith(waiting) else set()
        elif op == "call" or late.intersection(args):  # a norm is computed step by step
            late.add(node)
        elif op != "number":
            early.add(node)
    return early


# --- backward pass --------------------------------------------------------------------------------


class _Linear:
    """Nodes as sums of multiples of other nodes, the `bases`.

    A gradient depends linearly on the gradients that it is computed from. So a chain of products
    with one gradient in it is that gradient times one factor, and the factor depends on no
    gradient. A sum that is used more than once becomes a base itself.
    """

    def __init__(self, graph: Graph, bases: Iterable[int], results: Iterable[int]) -> None:
        self.graph, self.given = graph, set(bases)
        self.terms: dict[int, Terms] = {base: {base: None} for base in self.given}
        self.parts: dict[int, Terms] = {}  # of the bases that are sums
        self.factors: set[int] = set()  # of the expressions so far, as are the bases in `read`
        self.read: set[int] = set()
        results = list(results)
        order = graph.reached(results, stop=self.given)
        uses = dict.fromkeys(order, 0)
        for node in (
            *results,
            *(a for n in order if n not in self.given for a in graph.nodes[n].args),
        ):
            uses[node] += 1
        for node in order:
            if node in self.given or not any(arg in self.terms for arg in graph.nodes[node].args):
                continue
            terms = self._terms(node)
            if graph.nodes[node].op == "call":
                self.terms[node] = {node: None}
            elif len(terms) > 1 and uses[node] > 1:
                self.terms[node], self.parts[node] = {node: None}, terms
            else:
                self.terms[node] = terms

    def _terms(self, node: int) -> Terms:
        op, args, _ = self.graph.nodes[node]
        each = [self.terms.get(arg, {}) for arg in args]
        if op == "call":
            return {}
        if op == "add":
            return {b: self._plus(each[0], each[1], b) for b in {**each[0], **each[1]}}
        if op == "neg":
            return self._times(each[0], self.graph.number(-1.0))
        if op == "mul":
            return self._times(each[0], args[1]) if each[0] else self._times(each[1], args[0])
        if op == "div":
            return {b: self.graph.add("div", self._factor(f), args[1]) for b, f in each[0].items()}
        assert op == "where", op
        zero = self.graph.number(0.0)
        found: Terms = {}
        for base in {**each[1], **each[2]}:
            choices = (self._factor(e[base]) if base in e else zero for e in each[1:])
            found[base] = self.graph.add("where", args[0], *choices)
        return found

    def _factor(self, factor: int | None) -> int:
        return self.graph.number(1.0) if factor is None else factor

    def _times(self, terms: Terms, by: int) -> Terms:
        return {base: self._product(factor, by) for base, factor in terms.items()}

    def _product(self, a: int | None, b: int) -> int | None:
        """Return a · b, None for 1; two numbers are folded into one."""
        one, other = (self._number(self._factor(node)) for node in (a, b))
        if one is None or other is None:
            return self.graph.mul(self._factor(a), b)
        return None if one * other == 1 else self.graph.number(one * other)

    def _number(self, node: int) -> float | None:
        op, _, value = self.graph.nodes[node]
        return float(str(value)) if op == "number" else None

    def _plus(self, one: Terms, other: Terms, base: int) -> int | None:
        """Return the factor of a base in the sum of two expressions."""
        if base not in one or base not in other:
            return one[base] if base in one else other[base]
        return self.graph.add("add", self._factor(one[base]), self._factor(other[base]))

    def found_bases(self) -> list[int]:
        """Return the bases that were found."""
        return [node for node, terms in self.terms.items() if terms == {node: None}]

    def expression(self, node: int) -> int:
        """Return a node that computes `node` from the given bases and factors."""
        return self._sum(self.terms[node]) if node in self.terms else node

    def _sum(self, terms: Terms) -> int:
        found = None
        for base, factor in sorted(terms.items(), key=lambda term: term[1] is not None):
            self.read.add(base)
            one = self.base(base)
            if factor is not None:
                self.factors.add(factor)
                one = self.graph.add("mul", one, factor)
            found = self.graph.plus(found, one)
        return self.graph.number(0.0) if found is None else found

    def base(self, base: int) -> int:
        """Return a node that computes a base from only the given bases."""
        if base in self.given:
            return base
        if base in self.parts:
            return self._sum(self.parts[base])
        op, (arg,), name = self.graph.nodes[base]
        return self.graph.add(op, self.expression(arg), value=name)


@lru_cache(256)
def backward_plan(case: Case) -> Backward:
    """Return the backward pass of a chunk."""
    return _BackwardPlan(case).compile()


class _BackwardPlan:
    def __init__(self, case: Case) -> None:
        self.case, self.made = case, _Graph(case, back=True)
        made, back, cell = self.made, self.made.backward, case.cell
        self.graph = made.graph
        apart, first = cell.has_r and not made.step.merged, 1 if case.projected else 0
        x, r = (self._named(name, nodes) for name, nodes in (("dx", back.x), ("dr", back.r)))
        # A step needs the gradients of h·W_h, of the states and of the held gate.
        self.gates = r if apart else x if cell.has_r else []
        self.later = x if apart or not cell.has_r else []
        states = self._named("dstate", back.states)[first:]
        self.passes_h = not first and states[0][1] != self.zero
        self.states = states if self.passes_h or first else states[1:]
        self.states += [("owed", self._gradient(back.gate))] if "hold" in made.masks else []
        self.shown = [("dshown", self._gradient(back.shown))] if case.split else []
        self.inner = [
            (f"dinner{p}_{k}", self._gradient(back.inner[p][k])) for p, k in parts_of(cell)
        ]
        parameters = [(k, made.place(n)) for k, n in enumerate(back.parameters) if n is not None]
        self.parameters = [(k, node) for k, node in parameters if node is not None]

    @property
    def zero(self) -> int:
        return self.graph.number(0.0)

    def _gradient(self, node: int | None) -> int:
        """Return the node for a gradient of the source; the number zero if it has none."""
        placed = None if node is None else self.made.place(node)
        return self.zero if placed is None else placed

    def _named(self, name: str, nodes: Iterable[int | None]) -> list[tuple[str, int]]:
        return [(f"{name}{k}", self._gradient(node)) for k, node in enumerate(nodes)]

    def compile(self) -> Backward:
        made, graph = self.made, self.graph
        inside = [*self.gates, *self.shown, *self.inner, *self.states]
        inner = _Linear(graph, self._gradients(), [node for _, node in inside])
        steps = [(name, inner.expression(node)) for name, node in inside if node != self.zero]
        steps += [(name, node) for name, node in self.states if node == self.zero]
        # Values that the steps compute need not be computed again after the steps.
        at_hand = {node: name for name, node in reversed(self.gates) if node != self.zero}
        known = {*inner.given, *inner.found_bases(), *at_hand, *self._calls()}
        outside = [node for _, node in self.later] + [node for _, node in self.parameters]
        outer = _Linear(graph, known, outside)
        after = [(name, outer.expression(node)) for name, node in self.later if node != self.zero]
        returns = [outer.expression(node) for _, node in self.parameters]
        left = sorted(outer.read & known - set(at_hand))
        kept = {node: f"kept{k}" for k, node in enumerate(left)}
        steps = [(name, inner.base(node)) for node, name in kept.items()] + steps

        loads = made.loads()
        places = self._places(inner, outer, loads)
        factors = sorted(f for f in inner.factors | outer.factors if not self._is_there(f, loads))
        values = [factor for factor in factors if factor not in places]
        stores = [(name, factor) for factor, name in places.items()]
        gates = [*self.gates, *self.later, *self.inner]
        stores += [(f"in{p}", made.some(node)) for p, node in enumerate(made.step.inputs)]
        stores += [(name, self.zero) for name, node in gates if node == self.zero]
        if self.case.projected:
            stores.append(("u", made.some(made.step.new[0])))
        # The norm is taken again even if no factor needs it: its own gradients do.
        before = made.compile(loads, stores, [*values, *self._norm()])
        loads |= places | {factor: f"value{k}" for k, factor in enumerate(values)}
        return Backward(
            before,
            made.compile(loads, steps),
            made.compile(loads | at_hand | kept, after, returns),
            tuple(kept.values()),
            tuple(k for k, _ in self.parameters),
            self.passes_h,
        )

    def _norm(self) -> list[int]:
        """Return what the norm makes of what the cell shows, if there is a norm."""
        made = self.made
        return [made.some(made.source.add("state", value=SHOWN))] if self.case.split else []

    def _calls(self) -> list[int]:
        """Return the gradients of what a norm or a product is taken of.

        They are computed step by step.
        """
        nodes = enumerate(self.graph.nodes)
        return [n for n, (op, _, name) in nodes if op == "call" and "back" in str(name)]

    def _gradients(self) -> list[int]:
        """Return the gradients that are the inputs of a step."""
        made = self.made
        names = [*self.case.cell.states, *([HELD] if "hold" in made.masks else [])]
        return [made.some(made.source.add("gradient", value=name)) for name in names]

    def _is_there(self, factor: int, loads: Mapping[int, str]) -> bool:
        return factor in loads or self.graph.nodes[factor].op == "number"

    def _places(self, inner: _Linear, outer: _Linear, loads: Mapping[int, str]) -> dict[int, str]:
        """Return the factors that can be stored in the tensor of a gradient until it is computed.

        Such a factor is the only factor of its gradient. A factor that is read after the gradient
        has been written is not included.
        """
        graph, found = self.graph, dict[int, str]()
        every = graph.reached([*inner.factors, *outer.factors], stop=loads)
        small = small_nodes(graph, every, loads, self.case.small)
        for linear, gates, taken in (
            (outer, self.later, set[int]()),
            (inner, self.gates, outer.factors),
        ):
            for name, node in gates:
                terms = linear.terms.get(node, {})
                factor = next(iter(terms.values())) if len(terms) == 1 else None
                if factor is None or factor in small or self._is_there(factor, loads):
                    continue
                if factor not in found and factor not in taken:
                    found[factor] = name
        return found
