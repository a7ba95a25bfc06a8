"""A cell is a definition: its equation, written once as a plain function. Everything else is
derived.

`cell` is the decorator, `Definition` what it returns. The function is traced when it is decorated;
the trace is checked against the function, and its derivative against finite differences.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .checks import check_derivative, check_trace
from .graph import Graph, Value, from_text, to_text
from .operations import COMPARISONS, MARKS, PRODUCTS, TRACED
from .products import Product, products_of
from .step import RULES, Passes, backward_of, step_of
from .storage import Layout, layout_of
from .torch_calls import compile_step
from .trace import DefinitionError, Symbol, Tracer, candidate, held, product, shown, update
from .untied import with_gate_products

__all__ = [
    "Definition",
    "DefinitionError",
    "candidate",
    "cell",
    "held",
    "product",
    "read",
    "shown",
    "update",
]

RECURRENCES = {  # how h enters the gates, and whether the function takes r
    "dense": True,  # r = W_h h + b_h
    "blocks": True,  # the same with a block-diagonal W_h, one block per head
    "diagonal": False,  # the function multiplies h with a parameter
    "none": False,  # the gates depend on x alone
}
MOST_GATES, MOST_STATES, MOST_PARAMETERS, MOST_MATRICES = 8, 4, 8, 16
Group = str | tuple[str, ...]


class Definition:
    """A cell, as the graph of one step of one unit. Made by `cell`, or read from its text.

    Two definitions are equal if their graphs are equal; names of functions do not count. A
    definition is saved as its text, never as code.
    """

    def __init__(
        self,
        graph: Graph,
        outputs: Sequence[int],
        *,
        gates: int,
        groups: Sequence[tuple[str, ...]],
        parameters: Sequence[str],
        recurrence: str,
        heads: int,
        bounded: bool,
        name: str = "cell",
        function: Callable[..., Any] | None = None,
    ) -> None:
        self._set_graph(graph, outputs)
        self.gates, self.groups, self.parameters = gates, tuple(groups), tuple(parameters)
        self.states = tuple(
            state for group in self.groups for state in group
        )  # the first one is the output
        self.has_r = RECURRENCES.get(
            recurrence, True
        )  # True if h enters the gates through a matrix
        self.recurrence, self.heads, self.bounded = recurrence, heads, bounded
        self.name, self.function = name, function
        if function is not None and function.__doc__:
            self.__doc__ = function.__doc__  # what help() shows
        self._passes: dict[tuple[frozenset[str], bool], Passes] = {}

    def _set_graph(self, graph: Graph, outputs: Sequence[int]) -> None:
        self.graph, self.outputs = graph, tuple(outputs)
        self._step = compile_step(graph, outputs)
        for derived in (
            *("text", "marks", "shows_only_h", "reads_h", "matrices", "vectors", "products"),
            *("storage", "_hash"),
        ):
            self.__dict__.pop(derived, None)

    def group_of(self, state: str) -> str:
        """Return the name of a state's group, which is that of the group's first state."""
        return next(group[0] for group in self.groups if state in group)

    def with_heads(self, heads: int) -> Definition:
        """Return the same cell with W_h in blocks, one per head: a unit sees its own head alone."""
        made = Definition(
            self.graph, self.outputs, gates=self.gates, groups=self.groups,
            parameters=self.parameters, recurrence="blocks" if self.has_r else self.recurrence,
            heads=heads, bounded=self.bounded, name=self.name, function=self.function,
        )  # fmt: skip
        _check_settings(made)
        made.derive()
        return made

    @cached_property
    def marks(self) -> frozenset[str]:
        """The marks that the definition uses, without the candidates, which every definition
        has.
        """
        used = (self.graph.nodes[node].op for node in self.graph.reached(self.outputs))
        return frozenset(used) & {"update", "shown", "held"}

    @cached_property
    def shows_only_h(self) -> bool:
        """True if only h is computed from what `zo.shown` marks."""
        return all(
            self.graph.nodes[node].op != "shown" for node in self.graph.reached(self.outputs[1:])
        )

    @cached_property
    def reads_h(self) -> bool:
        """True if the function reads h itself, and not only its product r."""
        h = self.states[0]
        return any(state == h for _, state in self.graph.leaves(self.outputs, "state"))

    @cached_property
    def matrices(self) -> dict[str, tuple[str, str]]:
        """The rows and columns of the parameters that `zo.product` takes: "H", "4H" or a number."""
        nodes, found = self.graph.nodes, {}
        for node in self.graph.reached(self.outputs):
            op, args, rows = nodes[node]
            if op == "product":
                inner = nodes[args[1]]
                columns = inner.value if inner.op == "product" else "H"
                found[str(nodes[args[0]].value)] = str(rows), str(columns)
        return found

    @cached_property
    def vectors(self) -> tuple[str, ...]:
        """The parameters with one number per unit."""
        return tuple(name for name in self.parameters if name not in self.matrices)

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """The products inside the step, arguments before results."""
        return tuple(products_of(self.graph, self.outputs).values())

    def shape_of(self, parameter: str, hidden: int) -> tuple[int, ...]:
        """Return the shape of a parameter in a layer with so many units."""

        def size(text: str) -> int:
            return int(text[:-1] or 1) * hidden if text.endswith("H") else int(text)

        return tuple(map(size, self.matrices.get(parameter, ("H",))))

    @cached_property
    def text(self) -> str:
        """The canonical text: it names everything but the function."""
        head = {
            "gates": self.gates,
            "recurrence": self.recurrence,
            "heads": self.heads,
            "bounded": int(self.bounded),
            "states": ",".join("+".join(group) for group in self.groups),
            "parameters": ",".join(self.parameters),
        }
        text = (
            " ".join(f"{key}={value}" for key, value in head.items())
            + " "
            + to_text(self.graph, self.outputs)
        )
        _known.setdefault(text, self)
        return text

    @cached_property
    def storage(self) -> Layout:
        """What a loop over time stores of this cell, and how its products meet."""
        return layout_of(self)

    @cached_property
    def untied(self) -> Definition:
        """The cell in which every gate has masks of its own on h."""
        return with_gate_products(self)

    def derive(self) -> None:
        """Compute the cached properties: a compiler cannot."""
        _ = self.text, self.marks, self.shows_only_h, self.reads_h, self.matrices
        _ = self.vectors, self.products, self.storage, self._hash

    def passes(self, rules: frozenset[str] = RULES, split: bool = False) -> Passes:
        """Return the forward and backward pass of one step in one graph (see `step_of`)."""
        if (rules, split) not in self._passes:
            step = step_of(self, rules, split)
            self._passes[rules, split] = step, backward_of(self, step, "sum" in rules)
        return self._passes[rules, split]

    def __call__(self, *args: Any) -> Any:
        """Compute one step on tensors, without noise and norm: the function that was decorated."""
        if self.function is not None:
            return self.function(*args)
        wanted = 1 + self.has_r + len(self.states) + len(self.parameters)
        if len(args) != wanted:
            raise TypeError(f"cell {self.name!r}: expected {wanted} arguments, got {len(args)}")
        new = self.evaluate(self.leaves(*args))
        return tuple(new) if len(new) > 1 else new[0]

    def leaves(self, *args: Any) -> dict[tuple[str, Value], Tensor]:
        """Name the arguments of a call: x, r if there is one, states, parameters."""
        x, rest = args[0], list(args[1:])
        named = {("x", str(q)): v for q, v in enumerate(x)}
        if self.has_r:
            named |= {("r", str(q)): v for q, v in enumerate(rest.pop(0))}
        count = len(self.states)
        named |= {("state", name): v for name, v in zip(self.states, rest[:count], strict=True)}
        return named | {
            ("parameter", name): v for name, v in zip(self.parameters, rest[count:], strict=True)
        }

    def evaluate(
        self,
        leaves: Mapping[tuple[str, Value], Tensor],
        marks: Mapping[str, Callable[[Tensor, Value], Tensor]] | None = None,
    ) -> list[Tensor]:
        """Compute the candidates of all states from the graph; `marks` says what the marks do."""
        return self._step(leaves, marks or {})

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Definition) and self.text == other.text)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> Any:
        return read, (self.text, self.name)

    def __deepcopy__(self, memo: Any) -> Definition:
        return self

    def __repr__(self) -> str:
        states = ", ".join("+".join(group) for group in self.groups)
        more = f", parameters {', '.join(self.parameters)}" if self.parameters else ""
        gates = f"{self.gates} gate{'s' * (self.gates > 1)}"
        return f"<cell {self.name}: {gates}, states {states}{more}, recurrence {self.recurrence}>"

    @classmethod
    def from_text(cls, text: str, name: str = "cell") -> Definition:
        """Read the canonical text of a definition. Nothing in it is executed."""
        words = text.split(" ", 6)
        head = dict(word.partition("=")[::2] for word in words[:6])
        if len(words) != 7 or list(head) != [
            "gates",
            "recurrence",
            "heads",
            "bounded",
            "states",
            "parameters",
        ]:
            raise ValueError(f"definition: expected the text of a cell, got {text[:80]!r}")
        graph, outputs = from_text(words[6])
        found = cls(
            graph,
            outputs,
            gates=int(head["gates"]),
            groups=_groups(
                [g if "+" not in g else tuple(g.split("+")) for g in head["states"].split(",")],
                name,
            ),
            parameters=tuple(head["parameters"].split(",")) if head["parameters"] else (),
            recurrence=head["recurrence"],
            heads=int(head["heads"]),
            bounded=head["bounded"] == "1",
            name=name,
        )
        _check_settings(found)
        _check_graph(found)
        if found.text != text:
            raise ValueError(
                f"definition: expected the canonical text of a cell, got {text[:80]!r}"
            )
        found.derive()
        return found


_known: dict[str, Definition] = {}  # by text


def read(text: str, name: str = "cell") -> Definition:
    """Return the definition with this canonical text, that of the function if this process has
    it.
    """
    if text not in _known:
        _known[text] = Definition.from_text(text, name)
    return _known[text]


torch.serialization.add_safe_globals([read])  # it reads data only


def cell(
    function: Any = None,
    /,
    *,
    gates: int = 0,
    states: Sequence[Group] = ("h",),
    recurrence: str = "dense",
    heads: int = 1,
    bounded: bool = False,
    checked: bool = True,
) -> Callable[[Callable[..., Any]], Definition]:
    """Make a recurrent cell of a function that computes one step.

    The function takes x, r, the states and the parameters, in this order. `x` is W_x x_t + b_x and
    `r` is W_h h_{t−1} + b_h, each a tuple with one entry per gate. Every name after the states is a
    parameter: one number per unit, or a matrix if `product` takes it. The function returns the new
    states.

    Args:
        gates: the number of gates, 1 to 8.
        states: the names of the states, 1 to 4; the first is the output. A tuple inside is a group
            of states that share one rate and one mask.
        recurrence: "dense", "blocks" (block-diagonal, see `heads`), "diagonal" or "none". The last
            two take no `r`.
        heads: the number of blocks of W_h, with `recurrence="blocks"`.
        bounded: True promises that |h| ≤ 1, which lets a GPU exchange h in half precision.
        checked: False leaves out the check of the trace and of the derivative.

    Returns:
        A decorator; it makes a `Definition`, which `Recurrent` and `RecurrentCell` take.

    >>> import zoneout.definition as zo
    >>> @zo.cell(gates=2)
    ... def light_gru(x, r, h):
    ...     z, n = (a + b for a, b in zip(x, r))
    ...     z = z.sigmoid()
    ...     return z * h + zo.update((1 - z) * n.relu())
    >>> light_gru
    <cell light_gru: 2 gates, states h, recurrence dense>
    """

    if function is not None:
        raise DefinitionError(
            "zo.cell: expected the number of gates; write @zo.cell(gates=…) above the function"
        )

    def decorate(function: Callable[..., Any]) -> Definition:
        if not hasattr(function, "__code__"):
            raise DefinitionError(
                f"zo.cell: expected a plain function, got {type(function).__name__}"
            )
        name = getattr(function, "__name__", "cell")
        groups = _groups(states, name)
        made = Definition(
            Graph(), (), gates=gates, groups=groups, parameters=(), recurrence=recurrence,
            heads=heads, bounded=bounded, name=name, function=function,
        )  # fmt: skip
        _check_settings(made)
        made.parameters = _parameters(made, function)
        made._set_graph(*_trace(made, function))
        _check_parameters(made)
        used = {name for _, name in made.graph.leaves(made.outputs, "parameter")}
        if missing := [name for name in made.parameters if name not in used]:
            raise DefinitionError(
                f"cell {name!r}: the parameter {missing[0]} is never used; leave it out"
            )
        _check_graph(made)
        if checked:
            check_trace(made, function)
            check_derivative(made)
        made.derive()
        return made

    return decorate


# --- from a function to a graph
# --------------------------------------------------------------------


def _groups(states: Any, name: str) -> tuple[tuple[str, ...], ...]:
    good = isinstance(states, (tuple, list)) and all(
        isinstance(group, str) or (isinstance(group, (tuple, list)) and group) for group in states
    )
    if not good:
        raise DefinitionError(
            f"cell {name!r}: states: expected a tuple of names such as ('h',), got {states!r}"
        )
    return tuple((group,) if isinstance(group, str) else tuple(group) for group in states)


def _check_settings(d: Definition) -> None:
    def fail(what: str, expected: str, got: Any) -> None:
        raise DefinitionError(f"cell {d.name!r}: {what}: expected {expected}, got {got!r}")

    if isinstance(d.gates, bool) or not isinstance(d.gates, int) or not 1 <= d.gates <= MOST_GATES:
        fail("gates", f"a number from 1 to {MOST_GATES}", d.gates)
    names = d.states
    if not 1 <= len(names) <= MOST_STATES or not all(
        isinstance(n, str) and n.isidentifier() for n in names
    ):
        fail("states", f"1 to {MOST_STATES} names", d.groups)
    if len(set(names)) < len(names):
        fail("states", "different names", names)
    if len(d.groups[0]) > 1:
        fail("states", "an output that is in no group", d.groups[0])
    if d.bounded not in (True, False):
        fail("bounded", "True or False", d.bounded)
    if d.recurrence not in RECURRENCES:
        fail("recurrence", f"one of {', '.join(RECURRENCES)}", d.recurrence)
    if isinstance(d.heads, bool) or not isinstance(d.heads, int) or d.heads < 1:
        fail("heads", "1 or more", d.heads)
    if d.heads > 1 and d.recurrence != "blocks":
        fail("heads", f"1 with recurrence={d.recurrence!r}", d.heads)
    _check_parameters(d)


def _check_parameters(d: Definition) -> None:
    names = d.parameters
    good = all(name.isidentifier() for name in names) and len({*names, *d.states}) == len(
        names
    ) + len(d.states)
    vectors = len(names) - len(d.matrices)
    if vectors > MOST_PARAMETERS or len(d.matrices) > MOST_MATRICES or not good:
        raise DefinitionError(
            f"cell {d.name!r}: expected at most {MOST_PARAMETERS} parameters with names of their "
            f"own and {MOST_MATRICES} matrices, got {len(names)}: {', '.join(names)[:80]}"
        )


def _parameters(d: Definition, function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names after the states, which are parameters."""
    arguments = inspect.signature(function).parameters.values()
    if any(
        a.kind not in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD) or a.default is not a.empty
        for a in arguments
    ):
        raise DefinitionError(
            f"cell {d.name!r}: expected plain arguments without defaults, got {_listed(arguments)}"
        )
    names = [a.name for a in arguments]
    first = 1 + d.has_r
    expected = ["x", *(["r"] if d.has_r else []), *d.states]
    swapped = names[0:1] == ["r"] or names[1:2] == ["x"]
    if swapped or names[first : len(expected)] != list(d.states):
        raise DefinitionError(
            f"cell {d.name!r}: expected the arguments {', '.join(expected)} and then the "
            "parameters, "
            f"got {', '.join(names)}"
        )
    return tuple(names[len(expected) :])


def _listed(arguments: Any) -> str:
    return ", ".join(str(a) for a in arguments)


def _trace(d: Definition, function: Callable[..., Any]) -> tuple[Graph, tuple[int, ...]]:
    tracer = Tracer(d.name, function.__code__, d.states)
    args: list[Any] = [tuple(tracer.leaf("x", str(q)) for q in range(d.gates))]
    if d.has_r:
        args.append(tuple(tracer.leaf("r", str(q)) for q in range(d.gates)))
    args += [tracer.leaf("state", state) for state in d.states]
    args += [tracer.leaf("parameter", parameter) for parameter in d.parameters]
    try:
        found = function(*args)
    except DefinitionError:
        raise
    except Exception as error:
        hint = ""
        if "unpack" in str(error) or isinstance(error, IndexError):
            both, each = (" and r", " each") if d.has_r else ("", "")
            hint = f"; gates={d.gates} gives x{both} {d.gates} entries{each}"
        why = f"{type(error).__name__}: {error}{tracer.where(error)}"
        raise DefinitionError(f"cell {d.name!r}: the function failed: {why}{hint}") from error
    new = list(found) if isinstance(found, (tuple, list)) else [found]
    if len(new) != len(d.states) or not all(isinstance(v, Symbol) for v in new):
        got = (
            f"{len(new)} values"
            if len(new) != len(d.states)
            else ", ".join(type(v).__name__ for v in new)
        )
        raise DefinitionError(
            f"cell {d.name!r}: expected the function to return {len(d.states)} values, the new "
            f"{', '.join(d.states)}, got {got}"
        )
    nodes = [v.node for v in new]
    _check_returned(d, tracer.graph, nodes)
    return tracer.graph, _outputs(d, tracer, nodes)


def _check_returned(d: Definition, graph: Graph, new: list[int]) -> None:
    """Raise if a returned value cannot be the new value of a state."""
    first: dict[int, str] = {}
    for state, node in zip(d.states, new):
        op, args, _ = graph.nodes[node]
        if op in COMPARISONS:
            raise DefinitionError(
                f"cell {d.name!r}: the new {state} is a comparison; write torch.where(…, a, b)"
            )
        if op == "shown" and graph.nodes[args[0]].op == "candidate":
            raise DefinitionError(
                f"cell {d.name!r}: the new {state} is zo.shown(…) of a candidate; return the "
                "candidate itself, and use "
                "zo.shown only where another state is computed from it"
            )
        if node in first and op != "state":
            other = first[node]
            raise DefinitionError(
                f"cell {d.name!r}: {other} and {state} are the same value; "
                f"return zo.candidate({other!r}, …) of it for {other}"
            )
        first.setdefault(node, state)


def _outputs(d: Definition, tracer: Tracer, new: list[int]) -> tuple[int, ...]:
    """Mark the candidates that feed no other state; raise if one that does is not marked."""
    graph = tracer.graph
    of_state = dict(zip(d.states, new))
    for state, node in of_state.items():
        others = [other for name, other in of_state.items() if name != state]
        if graph.nodes[node].op not in ("candidate", "state") and node in graph.reached(others):
            raise DefinitionError(
                f"cell {d.name!r}: the new {state} is used to compute another state; "
                f"mark it: zo.candidate({state!r}, …)"
            )
    return tuple(
        node if graph.nodes[node].op == "candidate" else graph.add("candidate", node, value=state)
        for state, node in of_state.items()
    )


def _check_products(d: Definition, reached: Sequence[int]) -> None:
    """Check that matrices, products and their parts are used only as such."""
    nodes = d.graph.nodes

    def fail(why: str) -> None:
        raise DefinitionError(f"cell {d.name!r}: {why}")

    for node in reached:
        op, args, value = nodes[node]
        for place, arg in enumerate(args):
            kind, _, name = nodes[arg]
            matrix = kind == "parameter" and name in d.matrices
            if matrix != (op == "product" and place == 0):
                fail(f"the parameter {name} is a matrix, and only zo.product takes it")
            ranked = kind == "product" and not str(name).endswith("H")
            if kind == "product" and (op != "product" if ranked else op != "part"):
                fail(f"{op} of a product with rank={name}; only zo.product takes it")
        if op == "product":
            if not re.fullmatch(r"[1-9]\d{0,8}|([1-9]\d?)?H", str(value)):
                fail(f"product {value} is not part of a cell")
            inner = nodes[args[1]]
            shape = str(value), str(inner.value) if inner.op == "product" else "H"
            if d.matrices[str(nodes[args[0]].value)] != shape:
                fail(f"the matrix {nodes[args[0]].value} is used in two shapes")
        if op == "part":
            product = nodes[args[0]]
            parts = int(str(product.value).removesuffix("H") or 1)
            if product.op != "product" or str(value) not in map(str, range(parts)):
                fail(f"part {value} is not part of a cell")


def _check_graph(d: Definition) -> None:
    """Check that the graph is one that a function with these settings can have."""
    graph, known = d.graph, {"state": set(d.states), "parameter": set(d.parameters)}
    known["x"] = {str(q) for q in range(d.gates)}
    known["r"] = known["x"] if d.has_r else set()
    reached = graph.reached(d.outputs)
    for mark in ("shown", "held"):
        if sum(graph.nodes[node].op == mark for node in reached) > 1:
            raise DefinitionError(
                f"cell {d.name!r}: zo.{mark} is used twice; expected it once at most"
            )
    of_state = dict(zip(d.states, d.outputs))
    for node in reached:
        op, args, value = graph.nodes[node]
        if op == "candidate" and of_state.get(str(value)) != node:
            place = (
                f"returned as the new {value}"
                if value in of_state
                else f"one of {', '.join(d.states)}"
            )
            raise DefinitionError(
                f"cell {d.name!r}: zo.candidate({value!r}, …): expected it to be {place}"
            )
        compared = [graph.nodes[arg].op in COMPARISONS for arg in args]
        allowed = (
            op in MARKS
            or op in TRACED
            or (op == "number" and math.isfinite(float(str(value))))
            or op in PRODUCTS
        )
        if (
            not (allowed or value in known.get(op, ()))
            or any(compared) != (op == "where")
            or any(compared[1:])
        ):
            raise DefinitionError(
                f"cell {d.name!r}: {op} {value} is not part of a cell with these settings"
            )
    _check_products(d, reached)
    marked = [graph.nodes[node] for node in d.outputs]
    if [(node.op, node.value) for node in marked] != [("candidate", state) for state in d.states]:
        raise DefinitionError(
            f"cell {d.name!r}: expected one candidate for each of {', '.join(d.states)}"
        )
    used = {str(name) for _, name in graph.leaves(d.outputs, "x")}
    if missing := sorted(known["x"] - used):
        raise DefinitionError(
            f"cell {d.name!r}: gate {missing[0]} of x is never used; gates={d.gates} may be too "
            "many"
        )
    if d.has_r and not list(graph.leaves(d.outputs, "r")):
        raise DefinitionError(
            f"cell {d.name!r}: r is never used; write recurrence='none' and leave r out"
        )
