"""`cell`, the decorator that makes a definition of a function.

The function is traced when it is decorated. The trace is checked against the function, and its
derivative against finite differences.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .checks import check_derivative, check_trace
from .definition import Definition
from .graph import Graph
from .operations import COMPARISONS
from .rules import Group, check_graph, check_parameters, check_settings, groups_of
from .trace import DefinitionError, Symbol, Tracer


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
        groups = groups_of(states, name)
        made = Definition(
            Graph(), (), gates=gates, groups=groups, parameters=(), recurrence=recurrence,
            heads=heads, bounded=bounded, name=name, function=function,
        )  # fmt: skip
        check_settings(made)
        made.parameters = _parameters(made, function)
        made._set_graph(*_trace(made, function))
        check_parameters(made)
        used = {name for _, name in made.graph.leaves(made.outputs, "parameter")}
        if missing := [name for name in made.parameters if name not in used]:
            raise DefinitionError(
                f"cell {name!r}: the parameter {missing[0]} is never used; leave it out"
            )
        check_graph(made)
        if checked:
            check_trace(made, function)
            check_derivative(made)
        made.derive()
        return made

    return decorate


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
            f"parameters, got {', '.join(names)}"
        )
    return tuple(names[len(expected) :])


def _listed(arguments: Any) -> str:
    return ", ".join(str(a) for a in arguments)


def _trace(d: Definition, function: Callable[..., Any]) -> tuple[Graph, tuple[int, ...]]:
    """Return the graph of the function, and the candidate of each state in it."""
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
                "candidate itself, and use zo.shown only where another state is computed from it"
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
