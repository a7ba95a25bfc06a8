"""CUDA text of a step: two device functions on the numbers of one unit of one row.

The operations are those of the C text (`c.py`); only the places of numbers differ. `step_forward`
and `step_backward` take a `Unit` (`ops/cuda/kernels/unit.cuh`). Its fields have the names of the C
struct, but hold one number each, in registers. Macros before the functions give the sizes of the
cell. With products inside the step there are `step_enter`, `step_inputs` and `step_leave` too, for
a level that is known at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

from .c import VARIANTS, Printer, lines_of
from .products import levels_of

if TYPE_CHECKING:
    from . import Definition


@cache
def print_unit(d: Definition, variant: str = "all") -> str:
    """Return the macros and functions of a definition, in one of the variants of `c.VARIANTS`.

    Raises `DefinitionError` if a step stores more than two values per unit beside its gates.
    """
    passes, layout = d.passes(VARIANTS[variant]), d.storage
    of = Printer(d, passes)
    macros = {
        "GATES": d.gates,
        "STATES": len(d.states),
        "PARAMETERS": len(d.vectors),
        "SLOTS": len(layout.slots),
        "RECURRENT": int(d.has_r),  # h meets a matrix
        "APART": int(layout.apart),
        "HELD": -1 if passes[0].gate is None else layout.held,
        "MASKS": int(variant == "given"),
    }
    forward = lines_of(of.graph, of.inputs, [*of.stored, *of.new], [])
    backward = lines_of(of.graph, of.loads, of.gradients, of.sums)
    if d.products:
        levels = levels_of(of.graph, passes[0].inputs)
        macros |= {"PRODUCTS": len(levels), "LEVELS": max(levels) + 1}
    texts = [f"#define {name} ({value})" for name, value in macros.items()]
    texts += [_function("step_forward", forward), _function("step_backward", backward)]
    if d.products:
        parts = [product.parts for product in d.products]
        texts.append(_table("product_level", levels) + _table("product_parts", parts))
        texts.append(_table("product_first", [0, *accumulate(parts)][:-1]))
        enters = [lines_of(of.graph, of.inputs, stores, []) for stores in of.enters]
        every = [store for stores in of.enters for store in stores]
        leaves = [lines_of(of.graph, of.loads, stores, []) for stores in of.leaves]
        texts += [_by_level("step_enter", enters), _by_level("step_leave", leaves)]
        texts.append(_function("step_inputs", lines_of(of.graph, of.loads, every, [])))
    return "\n".join(texts)


def _table(name: str, values: Sequence[int]) -> str:
    """Return a function of a product's number, known when the kernel is compiled."""
    listed = ", ".join(map(str, values))
    return (
        f"__device__ __forceinline__ constexpr int {name}(int p) "
        f"{{ const int of[] = {{{listed}}}; return of[p]; }}\n"
    )


def _by_level(name: str, levels: Sequence[list[str]]) -> str:
    """Return a function that runs the lines of one level."""
    cases = [
        f"if (level == {k}) {{ {' '.join(map(_in_registers, lines))} }}"
        for k, lines in enumerate(levels)
    ]
    body = "\n    ".join(cases)
    return f"__device__ __forceinline__ void {name}(Unit &s, int level) {{\n    {body}\n}}\n"


def _function(name: str, lines: list[str]) -> str:
    body = "\n    ".join(map(_in_registers, lines))
    return f"__device__ __forceinline__ void {name}(Unit &s) {{\n    {body}\n}}\n"


def _in_registers(line: str) -> str:
    """Return a statement on the arrays of a row as one on the numbers of a unit.

    `new` is a word of C++.
    """
    return line.replace("s->new[", "s.made[").replace("s->", "s.").replace("[j]", "")
