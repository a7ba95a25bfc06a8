"""C text of a step: functions over a range of units of one row.

The functions take a `Step` (`ops/cpu/step.h`), whose pointers are those of the row. They are
written for one number type: REAL, STEP and the upper-case names are macros, NAME(x) adds the type
to a name.

| function | reads | writes |
|---|---|---|
| forward | x, r, old states | what is stored, new states |
| again | what is stored, old states | new states; only where these can be computed so |
| backward | what is stored, old states, gradients of the new states | gradients of x, r, the old
states, parameters |
| gates | x, r, old states | what is stored, what the norm normalises |
| raw | what is stored, old states | what the norm normalises |
| shows | what is stored, old states, the norm's result | new states |
| back_shows | the same, and gradients of the new states | gradient of the norm's result |
| back_gates | the same, and the gradient of what the norm normalises | as backward |
| enter | x, r, old states, products of lower levels | what the products of a level are taken of |
| inputs | what is stored, old states | what all products are taken of |
| leave | as backward, and gradients of what products of higher levels are taken of | gradients of
the products of a level |

`forward`, `again`, `backward` and the last three have the variants in `VARIANTS`. The others have
all rules whose masks are drawn. `gates` to `back_gates` are those of a step with a norm, and exist
where the definition has `zo.shown`. `enter` and `leave` exist for each level of the products inside
the step. A definition has no functions of the last variant where they would store other values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from .graph import Graph
from .operations import COMPARISONS, OPERATIONS
from .products import levels_of
from .step import GIVEN, HELD, RAW, RULES, SHOWN, Passes
from .storage import MOST_SLOTS, Storage, computable, storage_of
from .trace import DefinitionError

if TYPE_CHECKING:
    from . import Definition

VARIANTS = {  # by the rules of noise that a function has
    "zoneout": frozenset[str](),
    "all": RULES,
    "given": GIVEN,  # with the gradients of the masks
}
PASSES = ("forward", "backward")
NORM_PARTS = ("gates", "raw", "shows", "back_shows", "back_gates")
Stores = list[tuple[str, int]]


def print_step(d: Definition, name: str = "step") -> str:
    """Return the C functions of a definition; their names begin with `name`.

    Raises `DefinitionError` if a step stores more than two values per unit beside its gates.
    """
    texts = []
    for variant in variants_of(d):
        of = Printer(d, d.passes(VARIANTS[variant]))
        texts.append(of.function(f"{name}_forward_{variant}", of.inputs, [*of.stored, *of.new]))
        texts.append(of.function(f"{name}_backward_{variant}", of.loads, of.gradients, of.sums))
        if of.has_again:
            texts.append(of.function(f"{name}_again_{variant}", of.loads, of.new))
        texts += [
            of.function(f"{name}_enter_{variant}_{k}", of.inputs, stores)
            for k, stores in enumerate(of.enters)
        ]
        if of.enters:
            every = [store for stores in of.enters for store in stores]
            texts.append(of.function(f"{name}_inputs_{variant}", of.loads, every))
        texts += [
            of.function(f"{name}_leave_{variant}_{k}", of.loads, stores)
            for k, stores in enumerate(of.leaves)
        ]
    if "shown" in d.marks:
        of = Printer(d, d.passes(RULES, split=True))
        texts += [
            of.function(f"{name}_gates", of.inputs, [*of.stored, *of.raw]),
            of.function(f"{name}_raw", of.loads, of.raw),
            of.function(f"{name}_shows", of.loads, of.new),
            of.function(f"{name}_back_shows", of.loads, of.of_shown),
            of.function(f"{name}_back_gates", of.loads, of.gradients, of.sums),
        ]
    return "\n".join(texts)


def variants_of(d: Definition) -> list[str]:
    """Return the variants that a definition has."""
    return [name for name in VARIANTS if name != "given" or d.storage.takes_masks]


def print_cells(cells: Mapping[str, Definition]) -> str:
    """Return the file `ops/cpu/cells.h`: the functions of the built-in cells, and the table of
    them.
    """
    rows = [f"    {_row(d, name)}, /* {name} */" for name, d in cells.items()]
    functions = "\n".join(print_step(d, name) for name, d in cells.items())
    table = "\n".join(["static const CELL NAME(cells)[] = {", *rows, "};"])
    return (
        "/* Made from cells/built_in.py by `python -m zoneout.ops.cpu`. Included once per type. "
        f"*/\n\n{functions}\n{table}\n"
    )


def print_cell(d: Definition) -> str:
    """Return the C functions of one cell and its entry, `zoneout_own_cell`, to compile alone.
    Included once per type.
    """
    return f"{print_step(d)}\nconst CELL NAME(zoneout_own_cell) = {_row(d, 'step')};\n"


def _row(d: Definition, name: str) -> str:
    """Return a cell's entry in the table, as the struct of `ops/cpu/step.h`."""
    layout, states = d.storage, d.states
    slots = (*layout.slots, -1, -1)[:MOST_SLOTS]
    lead = [states.index(d.group_of(state)) for state in states] + [0] * (4 - len(states))
    numbers = [d.gates, len(states), int(layout.apart), layout.held, len(layout.slots)]

    def listed(values: Iterable[object]) -> str:
        return f"{{{', '.join(map(str, values))}}}"

    fields = [*map(str, numbers), listed(slots), listed(lead), str(len(d.vectors))]
    variants = variants_of(d)  # in C, functions that are left out are NULL
    fields += [listed(f"NAME({name}_{kind}_{variant})" for variant in variants) for kind in PASSES]
    fields.append(
        listed(f"NAME({name}_again_{v})" if _has_again(d, v) else "NULL" for v in variants)
    )
    fields += [f"NAME({name}_{part})" if "shown" in d.marks else "NULL" for part in NORM_PARTS]
    if d.products:  # in C, fields that are left out are zero
        levels = levels_of(*_graph_and_inputs(d))
        names = list(d.matrices)
        fields += [str(len(levels)), str(max(levels) + 1), listed(levels)]
        fields.append(listed(product.parts for product in d.products))
        fields.append(listed(len(product.matrices) for product in d.products))
        fields.append(listed(listed(map(names.index, p.matrices)) for p in d.products))
        for kind in ("enter", "leave"):
            fields.append(
                listed(
                    listed(f"NAME({name}_{kind}_{variant}_{k})" for k in range(max(levels) + 1))
                    for variant in variants
                )
            )
        fields.append(listed(f"NAME({name}_inputs_{variant})" for variant in variants))
    return listed(fields)


def _graph_and_inputs(d: Definition) -> tuple[Graph, tuple[int, ...]]:
    step, _ = d.passes()
    return step.graph, step.inputs


def _has_again(d: Definition, variant: str) -> bool:
    return Printer(d, d.passes(VARIANTS[variant])).has_again


class Printer:
    """How the values of a step are read and written in C."""

    def __init__(self, d: Definition, passes: Passes) -> None:
        step, backward = passes
        storage = storage_of(step, backward)
        if len(storage.slots) > MOST_SLOTS:
            raise DefinitionError(
                f"cell {d.name!r}: expected at most {MOST_SLOTS} values per unit to store beside "
                f"the gates, got {len(storage.slots)}; the reference runs it"
            )
        self.graph = graph = step.graph
        self.has_again = all(computable(graph, node, set(storage.nodes)) for node in step.new)
        leaves = self._leaves(d)
        self.inputs = leaves | self._gates(passes)
        self.loads = leaves | {node: f"s->gate[{q}][j]" for q, node in enumerate(storage.gates)}
        self.loads |= {node: f"s->slot[{k}][j]" for k, node in enumerate(storage.slots)}
        self.stored = self._stored(storage)
        self.new: Stores = [(f"s->new[{k}][j]", node) for k, node in enumerate(step.new)]
        self.raw: Stores = [] if step.raw is None else [("s->raw[j]", step.raw)]
        self.of_shown: Stores = [] if backward.shown is None else [("s->dshown[j]", backward.shown)]
        zero = graph.number(0.0)
        grads = {f"dx[{q}]": node for q, node in enumerate(backward.x)}
        if d.has_r and not step.merged:
            grads |= {
                f"dr[{q}]": zero if node is None else node for q, node in enumerate(backward.r)
            }
        grads |= {
            f"dstate[{k}]": zero if node is None else node for k, node in enumerate(backward.states)
        }
        grads |= {} if backward.gate is None else {"owed": backward.gate}
        masks = {name: f"d{field}" for name, field in _mask_fields(d).items()}
        grads |= {masks[name]: node for name, node in backward.masks}
        self.gradients: Stores = [(f"s->{field}[j]", node) for field, node in grads.items()]
        self.sums: Stores = [
            (f"s->dparameter[{k}][j]", node)
            for k, node in enumerate(backward.parameters)
            if node is not None
        ]
        levels = levels_of(graph, step.inputs)
        firsts = _first_parts(d)
        self.enters: list[Stores] = [[] for _ in range(max(levels, default=-1) + 1)]
        self.leaves: list[Stores] = [[] for _ in self.enters]
        for p, level in enumerate(levels):
            self.enters[level].append((f"s->in[{p}][j]", step.inputs[p]))
            for k, node in enumerate(backward.inner[p]):
                of_part = zero if node is None else node
                self.leaves[level].append((f"s->dinner[{firsts[p] + k}][j]", of_part))

    def _leaves(self, d: Definition) -> dict[int, str]:
        """Return the C text of all leaves but those of the gates."""
        add = self.graph.add
        loads = {add("state", value=state): f"s->old[{k}][j]" for k, state in enumerate(d.states)}
        loads |= {
            add("parameter", value=name): f"s->parameter[{k}][j]"
            for k, name in enumerate(d.vectors)
        }
        for p, (product, first) in enumerate(zip(d.products, _first_parts(d))):
            loads[add("gradient", value=f"product {p}")] = f"s->din[{p}][j]"
            for k in range(product.parts):
                loads[add("inner", value=f"{p}.{k}")] = f"s->inner[{first + k}][j]"
        for k, state in enumerate(d.states):
            loads[add("gradient", value=state)] = f"s->dstate[{k}][j]" + (
                " + s->dy[j]" if k == 0 else ""
            )
        names = {("state", HELD): "held", ("state", SHOWN): "shown"}
        names |= {("gradient", HELD): "owed", ("gradient", RAW): "draw"}
        names |= {("mask", name): field for name, field in _mask_fields(d).items()}
        return loads | {
            add(kind, value=name): f"s->{field}[j]" for (kind, name), field in names.items()
        }

    def _gates(self, passes: Passes) -> dict[int, str]:
        """Return the C text of the gates' inputs: x and r, or their sum where they are merged."""
        step, _ = passes
        loads = {}
        for q, leaves in enumerate(step.gates):
            for leaf in leaves:
                r = self.graph.nodes[leaf].op == "r"
                loads[leaf] = (
                    f"s->r[{q}][j] + s->bias_r[{q}][j]"
                    if r
                    else f"s->gate[{q}][j] + s->bias_x[{q}][j]"
                )
            if step.merged:
                loads[self.graph.add("add", *leaves)] = f"s->gate[{q}][j] + s->bias_x[{q}][j]"
        return loads

    def _stored(self, storage: Storage) -> Stores:
        gates = [(f"s->gate[{q}][j]", node) for q, node in enumerate(storage.gates)]
        return gates + [(f"s->slot[{k}][j]", node) for k, node in enumerate(storage.slots)]

    def function(
        self, name: str, loads: Mapping[int, str], stores: Stores, sums: Stores | None = None
    ) -> str:
        """Return a function that loads, computes, stores, and adds to sums. It may store where
        it loads.
        """
        return _function(name, self.graph, loads, stores, sums or [])


def _mask_fields(d: Definition) -> dict[str, str]:
    """Return the field of the struct for each mask of a step."""
    rules = ("zone", "zero", "drop", "add")
    fields = {f"{rule}:{s}": f"{rule}[{k}]" for rule in rules for k, s in enumerate(d.states)}
    return fields | {"update": "update", "hold": "hold"}


def _first_parts(d: Definition) -> list[int]:
    """Return the number of the first part of each product, among the parts of all."""
    return [0, *accumulate(product.parts for product in d.products)][:-1]


def _function(
    name: str, graph: Graph, loads: Mapping[int, str], stores: Stores, sums: Stores
) -> str:
    return _over_units(name, lines_of(graph, loads, stores, sums))


def lines_of(graph: Graph, loads: Mapping[int, str], stores: Stores, sums: Stores) -> list[str]:
    """Return C statements for one unit: one per operation, then the stores and sums."""
    lines: list[str] = []
    texts: dict[int, str] = {}
    for node in graph.reached([node for _, node in (*stores, *sums)], stop=loads):
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
        texts[node] = f"v{len(lines)}"
        lines.append(f"REAL {texts[node]} = {text};")
    lines += [f"{place} = {texts[node]};" for place, node in stores]
    return lines + [f"{place} += {texts[node]};" for place, node in sums]


def _over_units(name: str, lines: Sequence[str]) -> str:
    """Return a function that runs the lines for every unit, with each pointer of the step in a
    local one.

    A local pointer with `restrict` is what lets compilers keep numbers in registers and vectorise.
    """
    text = "\n        ".join(lines)
    written = set(re.findall(r"(?m)^\s*(s->\w+(?:\[\d+\])?)\[j\] \+?=", text))
    pointers = []
    for field in dict.fromkeys(re.findall(r"(s->\w+(?:\[\d+\])?)\[j\]", text)):
        local = re.sub(r"\W", "", field.removeprefix("s->").replace("[", "_"))
        pointers.append(f"{'' if field in written else 'const '}REAL *restrict {local} = {field};")
        text = text.replace(f"{field}[j]", f"{local}[j]")
    declared = "\n    ".join(pointers)
    return (
        f"static void NAME({name})(const STEP *s, int64_t from, int64_t to) "
        f"{{\n    {declared}\n#pragma omp simd\n"
        f"    for (int64_t j = from; j < to; j++) {{\n        {text}\n    }}\n}}\n"
    )
