"""CUDA text of a step: two device functions on the numbers of one unit of one row.

The operations are those of the C text (`c.py`); only the places of numbers differ. `step_forward`
and `step_backward` take a `Unit` (`ops/cuda/kernels/unit.cuh`). Its fields have the names of the C
struct, but hold one number each, in registers. Macros before the functions give the sizes of the
cell.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from .c import VARIANTS, Printer, lines_of

if TYPE_CHECKING:
    from . import Definition


@cache
def print_unit(d: Definition, variant: str = "all") -> str:
    """Return the macros and functions of a definition, with zoneout alone or all rules of noise.

    Raises `DefinitionError` if a step stores more than two values per unit beside its gates.
    """
    passes, layout = d.passes(VARIANTS[variant]), d.storage
    of = Printer(d, passes)
    macros = {
        "GATES": d.gates,
        "STATES": len(d.states),
        "PARAMETERS": len(d.parameters),
        "SLOTS": len(layout.slots),
        "RECURRENT": int(d.has_r),  # h meets a matrix
        "APART": int(layout.apart),
        "HELD": -1 if passes[0].gate is None else layout.held,
    }
    forward = lines_of(of.graph, of.inputs, [*of.stored, *of.new], [])
    backward = lines_of(of.graph, of.loads, of.gradients, of.sums)
    texts = [f"#define {name} ({value})" for name, value in macros.items()]
    texts += [_function("step_forward", forward), _function("step_backward", backward)]
    return "\n".join(texts)


def _function(name: str, lines: list[str]) -> str:
    body = "\n    ".join(map(_in_registers, lines))
    return f"__device__ __forceinline__ void {name}(Unit &s) {{\n    {body}\n}}\n"


def _in_registers(line: str) -> str:
    """Return a statement on the arrays of a row as one on the numbers of a unit.

    `new` is a word of C++.
    """
    return line.replace("s->new[", "s.made[").replace("s->", "s.").replace("[j]", "")
