"""C text of a step: one function for each pass, over a range of units of one row.

The functions take a `Step` (`ops/native/step.h`), whose pointers are those of the row. They are written for
one number type: REAL and the upper-case names are macros.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .graph import Graph
from .operations import COMPARISONS, OPERATIONS
from .step import HELD, RULES, Passes
from .storage import Storage, storage_of

if TYPE_CHECKING:
    from . import Definition


VARIANTS = {"zoneout": frozenset[str](), "all": RULES}  # the functions of a definition, by the rules that they have


def print_step(definition: Definition) -> str:
    """Return the C functions of a definition: `forward_zoneout`, `backward_zoneout`, `forward_all`, `backward_all`."""
    texts = []
    for name, rules in VARIANTS.items():
        passes = definition.passes(rules)
        storage = storage_of(*passes)
        texts += [_forward(f"forward_{name}", definition, passes, storage)]
        texts += [_backward(f"backward_{name}", definition, passes, storage)]
    return "\n".join(texts)


def _forward(name: str, d: Definition, passes: Passes, storage: Storage) -> str:
    step, _ = passes
    loads = _leaves(d, step.graph)
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
    return _function(name, step.graph, loads, stores)


def _backward(name: str, d: Definition, passes: Passes, storage: Storage) -> str:
    step, backward = passes
    graph, loads = step.graph, _leaves(d, step.graph)
    loads |= {node: f"s->gate[{q}][j]" for q, node in enumerate(storage.gates)}
    loads |= {node: f"s->slot[{k}][j]" for k, node in enumerate(storage.slots)}
    for k, state in enumerate(d.states):
        loads[graph.add("gradient", value=state)] = f"s->dstate[{k}][j]"
    loads[graph.add("gradient", value=HELD)] = "s->owed[j]"
    stores = [(f"s->dx[{q}][j]", node) for q, node in enumerate(backward.x)]
    if d.has_r and not step.merged:
        stores += [(f"s->dr[{q}][j]", graph.number(0.0) if n is None else n) for q, n in enumerate(backward.r)]
    stores += [
        (f"s->dstate[{k}][j]", graph.number(0.0) if node is None else node) for k, node in enumerate(backward.states)
    ]
    stores += [] if backward.gate is None else [("s->owed[j]", backward.gate)]
    added = [(f"s->dparameter[{k}][j]", node) for k, node in enumerate(backward.parameters) if node is not None]
    return _function(name, graph, loads, stores, added)


def _leaves(d: Definition, graph: Graph) -> dict[int, str]:
    """Return the C text for the leaves that both passes read."""
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
    return _over_units(name, lines)


def _over_units(name: str, lines: Sequence[str]) -> str:
    """Return a function that runs the lines for every unit, with each pointer of the step in a local one.

    A local pointer with `restrict` is what lets compilers keep numbers in registers and vectorise.
    """
    text = "\n        ".join(lines)
    written = set(re.findall(r"(?m)^\s*(s->\w+(?:\[\d\])?)\[j\] \+?=", text))
    pointers = []
    for field in dict.fromkeys(re.findall(r"(s->\w+(?:\[\d\])?)\[j\]", text)):
        local = re.sub(r"\W", "", field.removeprefix("s->").replace("[", "_"))
        pointers.append(f"{'' if field in written else 'const '}REAL *restrict {local} = {field};")
        text = text.replace(f"{field}[j]", f"{local}[j]")
    declared = "\n    ".join(pointers)
    return (
        f"static void NAME({name})(const STEP *s, int64_t from, int64_t to) {{\n    {declared}\n#pragma omp simd\n"
        f"    for (int64_t j = from; j < to; j++) {{\n        {text}\n    }}\n}}\n"
    )
