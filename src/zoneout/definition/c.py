"""C text of a step: one function for each pass, over a range of units of one row.

The functions take a `Step` (`ops/native/step.h`), whose pointers are those of the row. They are written for
one number type: REAL and the upper-case names are macros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .graph import Graph
from .operations import COMPARISONS, OPERATIONS
from .step import HELD
from .storage import Storage, storage_of

if TYPE_CHECKING:
    from . import Definition


def print_step(definition: Definition) -> str:
    """Return the C functions `step_forward` and `step_backward` of a definition."""
    storage = storage_of(definition)
    return f"{_forward(definition, storage)}\n{_backward(definition, storage)}"


def _forward(d: Definition, storage: Storage) -> str:
    step = d.step
    loads = _leaves(d)
    sums = {node for node in storage.gates if step.graph.nodes[node].op == "add"}
    del sums
    if step.merged:
        users = step.graph.users(step.new)
        for q, leaves in enumerate(step.gates):
            loads[users[leaves[0]][0]] = f"s->gate[{q}][j] + s->bias_x[{q}][j]"
    for q, leaves in enumerate(step.gates):
        for leaf in leaves:
            r = step.graph.nodes[leaf].op == "r"
            loads[leaf] = f"s->r[{q}][j] + s->bias_r[{q}][j]" if r else f"s->gate[{q}][j] + s->bias_x[{q}][j]"
    stores = [(f"s->gate[{q}][j]", node) for q, node in enumerate(storage.gates)]
    stores += [(f"s->slot[{k}][j]", node) for k, node in enumerate(storage.slots)]
    stores += [(f"s->new[{k}][j]", node) for k, node in enumerate(step.new)]
    return _function("step_forward", step.graph, loads, stores)


def _backward(d: Definition, storage: Storage) -> str:
    step, backward, graph = d.step, d.backward, d.step.graph
    loads = _leaves(d)
    loads |= {node: f"s->gate[{q}][j]" for q, node in enumerate(storage.gates)}
    loads |= {node: f"s->slot[{k}][j]" for k, node in enumerate(storage.slots)}
    for k, state in enumerate(d.states):
        loads[graph.add("gradient", value=state)] = f"s->dstate[{k}][j]"
    loads[graph.add("gradient", value=HELD)] = "s->owed[j]"
    stores = [(f"s->dx[{q}][j]", node) for q, node in enumerate(backward.x)]
    if d.has_r and not step.merged:
        stores += [(f"s->dr[{q}][j]", graph.number(0.0) if n is None else n) for q, n in enumerate(backward.r)]
    stores += [
        (f"s->dstate[{k}][j]", graph.number(0.0) if node is None else node)
        for k, node in enumerate(backward.states)
    ]
    stores += [] if backward.gate is None else [("s->owed[j]", backward.gate)]
    added = [(f"s->dparameter[{k}][j]", node) for k, node in enumerate(backward.parameters) if node is not None]
    return _function("step_backward", graph, loads, stores, added)


def _leaves(d: Definition) -> dict[int, str]:
    """Return how the leaves that both passes read are read."""
    graph = d.step.graph
    loads = {graph.add("state", value=state): f"s->old[{k}][j]" for k, state in enumerate(d.states)}
    loads[graph.add("state", value=HELD)] = "s->held[j]"
    loads |= {graph.add("parameter", value=name): f"s->parameter[{k}][j]" for k, name in enumerate(d.parameters)}
    for k, state in enumerate(d.states):
        loads[graph.add("mask", value=f"zero:{state}")] = f"s->zero[{k}][j]"
        loads[graph.add("mask", value=f"zone:{state}")] = f"s->zone[{k}][j]"
    loads[graph.add("mask", value="update")] = "s->update[j]"
    loads[graph.add("mask", value="hold")] = "s->hold[j]"
    return loads


def _function(
    name: str,
    graph: Graph,
    loads: Mapping[int, str],
    stores: Sequence[tuple[str, int]],
    added: Sequence[tuple[str, int]] = (),
) -> str:
    """Return a function that loads, computes and stores; what is stored may be what was loaded."""
    lines, texts = [], {}
    for node in graph.reached([node for _, node in (*stores, *added)], stop=loads):
        op, args, value = graph.nodes[node]
        if node in loads:
            text = loads[node]
        elif op == "number":
            assert isinstance(value, float)
            texts[node] = f"(REAL){value!r}".replace("inf", "INFINITY")
            continue
        else:
            text = OPERATIONS[op].c.format(*(texts[arg] for arg in args))
        if op in COMPARISONS:
            texts[node] = text
            continue
        texts[node] = f"v{node}"
        lines.append(f"REAL v{node} = {text};")
    lines += [f"{place} = {texts[node]};" for place, node in stores]
    lines += [f"{place} += {texts[node]};" for place, node in added]
    body = "\n        ".join(lines)
    return (
        f"static void NAME({name})(const STEP *restrict s, int64_t from, int64_t to) {{\n#pragma omp simd\n"
        f"    for (int64_t j = from; j < to; j++) {{\n        {body}\n    }}\n}}\n"
    )
