"""Random cells, and the generated C step of a definition as Python functions, for the tests of
definitions.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from zoneout.definition import Definition
from zoneout.definition.c import print_step
from zoneout.definition.graph import Graph
from zoneout.ops.cpu import native

NATIVE = Path(native.__file__).parent
COMPILER = shutil.which(os.environ.get("CC") or "cc")
PREFIX = """
#define REAL {kind}
#define STEP Step
#define NAME(x) x##_{kind}
"""

UNARY = ("neg", "sigmoid", "tanh", "relu", "exp", "softplus", "abs")
BINARY = ("add", "sub", "mul", "minimum", "maximum")


@st.composite
def definitions(draw: Any) -> Definition:
    """A random cell of 1 to 8 gates and 1 to 4 states; every value is bounded, so that numbers
    stay small.
    """
    gates, count = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    states = [f"s{k}" for k in range(count)]
    parameters = [f"p{k}" for k in range(draw(st.integers(0, 3)))]
    has_r = draw(st.booleans())
    graph = Graph()
    leaves = [graph.add("state", value=s) for s in states] + [
        graph.add("parameter", value=p) for p in parameters
    ]
    leaves.append(graph.number(draw(st.sampled_from([0.5, 1.0, -1.5]))))
    gate_values = []
    for q in range(gates):
        value = graph.add("x", value=str(q))
        if has_r:
            r = graph.add("r", value=str(q))
            if draw(st.booleans()):
                value = graph.add("add", value, r)
            else:
                value = graph.add("add", value, graph.add("mul", draw(st.sampled_from(leaves)), r))
        if draw(st.booleans()):
            value = graph.add(
                draw(st.sampled_from(("sigmoid", "tanh", "relu", "exp", "softplus"))), value
            )
        gate_values.append(value)
    pool = [*leaves, *gate_values]
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(("unary", "binary", "where", "div", "log", "update")))
        a, b, c = (draw(st.sampled_from(pool)) for _ in range(3))
        if kind == "unary":
            pool.append(graph.add(draw(st.sampled_from(UNARY)), graph.add("tanh", a)))
        elif kind == "binary":
            pool.append(graph.add(draw(st.sampled_from(BINARY)), a, b))
        elif kind == "where":
            pool.append(
                graph.add("where", graph.add(draw(st.sampled_from(("lt", "ge"))), a, b), a, c)
            )
        elif kind == "div":
            pool.append(
                graph.add("div", a, graph.add("add", graph.add("abs", b), graph.number(1.0)))
            )
        elif kind == "log":
            pool.append(
                graph.add(
                    "log",
                    graph.add(
                        "add", graph.add("sqrt", graph.add("softplus", a)), graph.number(0.5)
                    ),
                )
            )
        else:
            pool.append(graph.add("update", a))
    outputs = []
    for state in states:
        mixed = graph.add("sub", draw(st.sampled_from(pool)), draw(st.sampled_from(pool)))
        for value in gate_values:  # every gate counts
            mixed = graph.add(
                "add", graph.add("mul", mixed, graph.number(0.75)), graph.add("tanh", value)
            )
        outputs.append(graph.add("candidate", mixed, value=state))
    made = Definition(
        graph, outputs, gates=gates, groups=[(s,) for s in states], parameters=parameters,
        recurrence="dense" if has_r else "none", heads=1, bounded=False, name="random",
    )  # fmt: skip
    return Definition.from_text(made.text, "random")


class Compiled:
    """The generated C functions of a definition, on NumPy arrays of one row."""

    def __init__(
        self, definition: Definition, folder: Path, dtype: type = np.float64, flags: str = "-O1"
    ) -> None:
        self.definition, self.dtype = definition, dtype
        self.kind = "double" if dtype == np.float64 else "float"
        text = f'#include "{NATIVE}/functions.h"\n{PREFIX.format(kind=self.kind)}\n#include "{NATIVE}/step.h"\n'
        text += print_step(definition).replace("static void", "void")
        source, library = folder / "step.c", folder / "step.so"
        source.write_text(text)
        assert COMPILER is not None
        command = [
            COMPILER,
            *flags.split(),
            "-fno-math-errno",
            "-fopenmp-simd",
            "-fPIC",
            "-shared",
            "-w",
        ]
        subprocess.run([*command, str(source), "-o", str(library), "-lm"], check=True)
        self.library = ctypes.CDLL(str(library))

    def run(self, name: str, **arrays: Any) -> None:
        """Call a function; an argument is an array, or a list of arrays for an array of
        pointers.
        """
        sizes = {
            "gate": 8,
            "r": 8,
            "bias_x": 8,
            "bias_r": 8,
            "old": 4,
            "new": 4,
            "zone": 4,
            "zero": 4,
            "drop": 4,
            "add": 4,
            "update": 0,
        }
        sizes |= {"hold": 0, "held": 0, "parameter": 8, "slot": 2, "raw": 0, "shown": 0}
        sizes |= {
            "dstate": 4,
            "dy": 0,
            "owed": 0,
            "dx": 8,
            "dr": 8,
            "dparameter": 8,
            "dshown": 0,
            "draw": 0,
            "dzone": 4,
            "dzero": 4,
            "ddrop": 4,
            "dadd": 4,
            "dupdate": 0,
            "dhold": 0,
        }
        pointers: list[Any] = []
        units = len(arrays["gate"][0])
        for field, size in sizes.items():
            given = arrays.get(field, [])
            given = [given] if isinstance(given, np.ndarray) else list(given)
            assert all(a.dtype == self.dtype and len(a) == units for a in given)
            pointers += [a.ctypes.data for a in given] + [None] * (max(size, 1) - len(given))
        step = (ctypes.c_void_p * len(pointers))(*pointers)
        getattr(self.library, f"{name}_{self.kind}")(step, ctypes.c_int64(0), ctypes.c_int64(units))


def tensors(
    definition: Definition, units: int, generator: np.random.Generator
) -> dict[tuple[str, Any], torch.Tensor]:
    """Random values for every leaf of a definition's step: masks of 0, 1 and between."""

    def values() -> torch.Tensor:
        return torch.from_numpy(generator.standard_normal(units))

    leaves = {("x", str(q)): values() for q in range(definition.gates)}
    leaves |= {("r", str(q)): values() for q in range(definition.gates)}
    leaves |= {("state", s): values() for s in (*definition.states, "held gate")}
    leaves |= {("parameter", p): values() for p in definition.parameters}
    rules = ("zone", "zero", "drop", "add")
    names = [f"{rule}:{state}" for rule in rules for state in definition.states]
    names += ["update", "hold"]
    return leaves | {
        ("mask", n): torch.from_numpy(generator.choice([0.0, 0.0, 1.0, 0.3], units)) for n in names
    }
