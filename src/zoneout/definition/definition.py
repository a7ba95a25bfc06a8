"""`Definition`: a cell, as the graph of one step of one unit, and everything derived from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .graph import Graph, Value, from_text, to_text
from .products import Product, products_of
from .rules import RECURRENCES, check_graph, check_settings, groups_of
from .step import RULES, Passes, backward_of, step_of
from .storage import Layout, layout_of
from .torch_calls import compile_step


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
        # The first state, h, is the output. `has_r`: h enters the gates through a matrix.
        self.states = tuple(state for group in self.groups for state in group)
        self.has_r = RECURRENCES.get(recurrence, True)
        self.recurrence, self.heads, self.bounded = recurrence, heads, bounded
        self.name, self.function = name, function
        if function is not None and function.__doc__:
            self.__doc__ = function.__doc__  # what help() shows
        self._passes: dict[tuple[frozenset[str], bool], Passes] = {}
        self._variants: dict[str, Definition] = {}

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
        check_settings(made)
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
        """Return the shape of a parameter in a layer of `hidden` units."""

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

    def variant(self, make: Callable[[Definition], Definition]) -> Definition:
        """Return the cell that `make` makes of this one, made once: a compiler cannot make it."""
        if make.__name__ not in self._variants:
            self._variants[make.__name__] = make(self)
        return self._variants[make.__name__]

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
            groups=groups_of(
                [g if "+" not in g else tuple(g.split("+")) for g in head["states"].split(",")],
                name,
            ),
            parameters=tuple(head["parameters"].split(",")) if head["parameters"] else (),
            recurrence=head["recurrence"],
            heads=int(head["heads"]),
            bounded=head["bounded"] == "1",
            name=name,
        )
        check_settings(found)
        check_graph(found)
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


read.__module__ = "zoneout.definition"  # the name in saved files does not follow this file
torch.serialization.add_safe_globals([read])  # it reads data only
