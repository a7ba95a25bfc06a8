"""A cell's definition: what it computes, its derivative, its text, its C, and what is refused."""

from __future__ import annotations

import copy
import functools
import operator
import pickle
import subprocess
import sys
from pathlib import Path

import generated
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zoneout.cells import CELLS as CELLS_IN
from zoneout.definition import Definition, DefinitionError, candidate, cell, held, shown, update
from zoneout.definition import shown as shown_as
from zoneout.definition.c import VARIANTS, print_cells, variants_of
from zoneout.definition.operations import COMPARISONS, OPERATIONS, TRACED
from zoneout.definition.step import RULES
from zoneout.definition.storage import MOST_SLOTS, storage_of
from zoneout.definition.torch_calls import evaluate


@cell(gates=4, states=("h", "c"))
def lstm(x, r, h, c):
    i, f, g, o = (a + b for a, b in zip(x, r))
    new = candidate("c", f.sigmoid() * c + update(i.sigmoid() * g.tanh()))
    return held(o.sigmoid()) * shown(new).tanh(), new


@cell(gates=3)
def gru(x, r, h):
    (rx, zx, nx), (rh, zh, nh) = x, r
    reset, z = torch.sigmoid(rx + rh), (zx + zh).sigmoid()
    n = torch.tanh(nx + reset * nh)
    return z * h + update((1 - z) * n)


@cell(gates=4, states=("h", "c"))
def peephole(x, r, h, c, p_i, p_f, p_o):
    i, f, g, o = (a + b for a, b in zip(x, r))
    new = candidate("c", (f + p_f * c).sigmoid() * c + update((i + p_i * c).sigmoid() * g.tanh()))
    return (o + p_o * new).sigmoid() * new.tanh(), new


@cell(gates=1, recurrence="diagonal")
def indrnn(x, h, u):
    return (x[0] + u * h).relu()


@cell(gates=2, states=("h", "shown", "raw"))
def awkward(x, r, h, shown, raw):
    """States with the names of marks; what is stored is not enough to compute the new states
    again.
    """
    new = candidate("raw", x[0] * raw + r[0])
    return shown_as(new).tanh() + h, x[1] * shown + r[1] * torch.where(h > 0, 0.1, -0.3), new


CELLS = [lstm, gru, peephole, indrnn]
HEAD = "gates=1 recurrence=dense heads=1 bounded=0 states=h parameters= "
NAMES = [d.name for d in CELLS]


# --- the trace ------------------------------------------------------------------------------------


def using(name: str):
    """A cell's function that uses one operation."""
    function = torch.nn.functional.softplus if name == "softplus" else getattr(torch, name)
    if name == "where":
        return lambda x, r, h: torch.where(x[0] > r[0], h * 2, x[1] + r[1])
    if name in COMPARISONS:
        return lambda x, r, h: torch.where(function(x[0], r[0]), h, x[1] + r[1])
    if OPERATIONS[name].arguments == 1:
        return lambda x, r, h: function(x[0] + r[0]) + x[1] * h
    return lambda x, r, h: function(x[0] + r[0], x[1] * h)


@pytest.mark.parametrize("name", TRACED)
def test_every_operation_is_traced_as_it_computes(name):
    """An operation computes something else in the graph than on tensors, or has a wrong
    derivative.
    """
    assert name in cell(gates=2)(using(name)).text  # the decorator compares values and derivatives


def test_python_operators_and_numbers():
    """A number in front of an operator, or a reflected operator, is traced in the wrong order."""
    made = cell(gates=1)(lambda x, r, h: 2 - 1 / (3 + abs(x[0] * 0.5 - r[0])) + -h)
    x, r, h = torch.randn(3, 5, dtype=torch.float64)
    (found,) = made.evaluate(made.leaves((x,), (r,), h))
    torch.testing.assert_close(found, 2 - 1 / (3 + (x * 0.5 - r).abs()) - h)


def test_a_definition_stays_the_function():
    """A decorated function cannot be called any more, or a loaded definition computes something
    else.
    """
    x, r = torch.randn(2, 4, 6).unbind(0)
    h, c = torch.randn(2, 6).unbind(0)
    i, f, g, o = x + r
    c_new = f.sigmoid() * c + i.sigmoid() * g.tanh()
    loaded = Definition.from_text(lstm.text)
    assert loaded.function is None and loaded == lstm and hash(loaded) == hash(lstm)
    for made in (lstm, loaded, pickle.loads(pickle.dumps(lstm)), copy.deepcopy(lstm)):
        new_h, new_c = made(tuple(x), tuple(r), h, c)
        torch.testing.assert_close(new_c, c_new)
        torch.testing.assert_close(new_h, o.sigmoid() * c_new.tanh())
    with pytest.raises(TypeError, match="expected 4 arguments, got 3"):
        loaded(tuple(x), tuple(r), h)


def test_names_do_not_count_but_the_computation_does():
    """Two equal cells are taken for different ones, or two different ones for equal."""
    same = cell(gates=1)(lambda x, r, h: (x[0] + r[0]).tanh())
    again = cell(gates=1)(lambda a, b, h: torch.tanh(a[0] + b[0]))
    other = cell(gates=1)(lambda x, r, h: (x[0] + r[0]).relu())
    assert (
        same == again
        and same != other
        and same != cell(gates=1, bounded=True)(lambda x, r, h: torch.tanh(x[0] + r[0]))
    )


def test_a_pickled_definition_needs_no_source(tmp_path: Path):
    """A layer with a custom cell could be loaded only where its function is known."""
    (tmp_path / "cell.pkl").write_bytes(pickle.dumps(peephole))
    code = (
        "import pickle, torch; d = pickle.load(open('cell.pkl', 'rb')); assert d.function is None\n"
        "x = tuple(torch.ones(4, 3)); one = torch.ones(3)\n"
        "print(float(d(x, x, one, one, *torch.ones(3, 3))[1][0]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    x = tuple(torch.ones(4, 3))
    _, c = peephole(x, x, torch.ones(3), torch.ones(3), *torch.ones(3, 3))
    assert float(found.stdout) == pytest.approx(float(c[0]))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lstm",
        (
            "gates=1 recurrence=dense heads=1 bounded=0 states=h parameters= x:0 r:0 add,0,1 "
            "candidate:h,2|9"
        ),
        (
            "gates=1 recurrence=dense heads=1 bounded=0 states=h parameters= x:0 r:0 sin,0 "
            "candidate:h,2|3"
        ),
        (
            "gates=1 recurrence=dense heads=1 bounded=0 states=h parameters= x:0 r:0 add,0,5 "
            "candidate:h,2|3"
        ),
        (
            "gates=1 recurrence=dense heads=1 bounded=0 states=h parameters= x:1 r:0 add,0,1 "
            "candidate:h,2|3"
        ),
        (
            "gates=1 recurrence=dense heads=1 bounded=0 states=h parameters= x:0 r:0 less,0,1 "
            "candidate:h,2|3"
        ),
        "gates=1 recurrence=dense heads=1 bounded=0 states=h parameters= x:0 r:0 add,0,1|2",
        (
            "gates=99 recurrence=dense heads=1 bounded=0 states=h parameters= x:0 r:0 add,0,1 "
            "candidate:h,2|3"
        ),
        (
            "gates=1 recurrence=dense heads=1 bounded=0 states=h parameters= r:0 x:0 add,1,0 "
            "candidate:h,2|3"
        ),
        HEAD + "x:0 r:0 add,0,1 sign,2 candidate:h,3|4",
        HEAD + "x:0 r:0 lt,0,1 candidate:h,2|3",
        HEAD + "x:0 r:0 where,0,1,0 candidate:h,2|3",
        HEAD + "x:0 shown,0 r:0 shown,2 add,1,3 candidate:h,4|5",
        HEAD + "x:0 candidate:c,0 r:0 add,1,2 candidate:h,3|4",
        HEAD + "x:0 r:0 add,0,1 number:nan add,2,3 candidate:h,4|5",
        HEAD.replace("parameters=", "parameters=a,a") + "x:0 r:0 add,0,1 candidate:h,2|3",
        HEAD.replace("parameters=", "parameters=h") + "x:0 r:0 add,0,1 candidate:h,2|3",
        HEAD.replace("parameters=", "parameters=);system(") + "x:0 r:0 add,0,1 candidate:h,2|3",
        HEAD.replace("parameters=", "parameters=" + ",".join(f"p{k}" for k in range(9)))
        + "x:0 r:0 add,0,1 candidate:h,2|3",
    ],
)
def test_a_text_that_is_not_a_definition_is_refused(text):
    """A damaged or hostile text becomes a cell."""
    with pytest.raises(ValueError, match=r"definition: expected|cell 'cell':"):
        Definition.from_text(text)


# --- the derivative -------------------------------------------------------------------------------


def gradients(made: Definition, leaves, weights, rules=RULES):
    """Autograd's gradients of a weighted sum of the new states and the held gate, by leaf."""
    step, _ = made.passes(rules)
    wanted = {key: v.clone().requires_grad_() for key, v in leaves.items()}
    outputs = [*step.new, *([] if step.gate is None else [step.gate])]
    values = evaluate(step.graph, outputs, {**leaves, **wanted})
    loss = sum((w * v).sum() for w, v in zip(weights, values))
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {
        key: torch.zeros_like(v) if g is None else g for (key, v), g in zip(wanted.items(), found)
    }


def derived(made: Definition, leaves, weights):
    """The same from the derived graph."""
    (step, backward), like = made.passes(), leaves["x", "0"]
    names = [*made.states, *([] if step.gate is None else ["held gate"])]
    full = {**leaves, **{("gradient", name): w for name, w in zip(names, weights)}}
    nodes = {("x", str(q)): node for q, node in enumerate(backward.x)}
    nodes |= {("r", str(q)): node for q, node in enumerate(backward.r)}
    nodes |= {("state", s): node for s, node in zip(made.states, backward.states)}
    nodes |= {("parameter", p): node for p, node in zip(made.parameters, backward.parameters)}
    nodes["state", "held gate"] = backward.gate
    return {
        key: torch.zeros_like(like) if node is None else evaluate(step.graph, [node], full)[0]
        for key, node in nodes.items()
    }


def check_derivative(made: Definition, seed: int) -> None:
    rng = np.random.default_rng(seed)
    leaves = generated.tensors(made, 5, rng)
    weights = [torch.from_numpy(rng.standard_normal(5)) for _ in range(5)]
    expected = gradients(made, leaves, weights)
    for key, ours in derived(made, leaves, weights).items():
        torch.testing.assert_close(
            ours, expected[key], rtol=1e-9, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("made", CELLS, ids=NAMES)
def test_the_derivative_is_autograds(made):
    """A gradient of a cell is wrong, with or without noise."""
    check_derivative(made, 3)


@given(generated.definitions(), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_derivative_of_any_cell_is_autograds(made, seed):
    """Some graph of allowed operations has a wrong gradient, or its text is not canonical."""
    assert Definition.from_text(made.text) == made
    check_derivative(made, seed)


def test_ties_are_torchs():
    """At a tie the gradient is not the one that torch gives."""
    made = cell(gates=2)(
        lambda x, r, h: torch.minimum(x[0], r[0]) + torch.maximum(x[1], r[1]) + h.abs() + h.relu()
    )
    leaves = {
        key: torch.zeros(1, dtype=torch.float64)
        for key in generated.tensors(made, 1, np.random.default_rng(0))
    }
    weights = [torch.ones(1, dtype=torch.float64)]
    expected = gradients(made, leaves, weights)
    assert expected["x", "0"].item() == 0.5
    for key, ours in derived(made, leaves, weights).items():
        assert torch.equal(ours, expected[key]), key


def test_noise_selects_and_does_not_multiply():
    """A NaN reaches a unit that keeps its value, or whose value is dropped."""
    made = cell(gates=1)(lambda x, r, h: update(x[0] + r[0]))
    nan, one = torch.tensor([float("nan")]), torch.ones(1)
    leaves = {("x", "0"): nan, ("r", "0"): one, ("state", "h"): one * 3}
    masks = {("mask", name): torch.zeros(1) for name in ("zone:h", "zero:h", "update")}
    for name, expected in (("zone:h", 3.0), ("zero:h", 0.0), ("update", 0.0)):
        step, _ = made.passes()
        (h,) = evaluate(step.graph, step.new, {**leaves, **masks, ("mask", name): one})
        assert h.item() == expected


# --- storage and C --------------------------------------------------------------------------------


def test_what_is_stored_is_what_hand_written_kernels_store():
    """A built-in cell would need more memory than it does today."""
    kinds, slots = {}, {}
    for made in CELLS:
        step, backward = made.passes()
        storage = storage_of(step, backward)
        kinds[made.name] = [step.graph.nodes[node].op for node in storage.gates]
        slots[made.name] = [
            (step.graph.nodes[node].op, step.graph.nodes[node].value) for node in storage.slots
        ]
    assert kinds["lstm"] == ["sigmoid", "sigmoid", "tanh", "sigmoid"] == kinds["peephole"]
    assert kinds["gru"] == ["sigmoid", "sigmoid", "tanh"] and kinds["indrnn"] == ["relu"]
    assert slots == {"lstm": [], "peephole": [], "indrnn": [], "gru": [("r", "2")]}
    assert storage_of(*lstm.passes()).held == 3
    assert [made.passes()[0].merged for made in CELLS] == [True, False, True, False]


MASKS = ("zone", "zero", "drop", "add")


def check_compiled(made, compiled, seed, tolerance) -> None:
    """Both variants, the one with zoneout alone without the masks of the others."""
    for variant in variants_of(made):
        rules = VARIANTS[variant]
        check_variant(made, compiled, variant, rules, seed, tolerance)


def check_variant(made, compiled, variant, rules, seed, tolerance) -> None:
    rng = np.random.default_rng(seed)
    units, (step, backward) = 37, made.passes(rules)
    storage = storage_of(step, backward)
    leaves = generated.tensors(made, units, rng)
    for key in leaves if not rules else ():
        if key[0] == "mask" and not str(key[1]).startswith("zone"):
            leaves[key] = torch.zeros_like(leaves[key])
    weights = [torch.from_numpy(rng.standard_normal(units)) for _ in range(5)]
    dtype = compiled.dtype

    def numpy(v):
        return v.numpy().astype(dtype)

    def of(kind, names):
        return [numpy(leaves[kind, name]) for name in names]

    numbers = [str(q) for q in range(made.gates)]
    bias = [rng.standard_normal(units).astype(dtype) for _ in range(2 * made.gates)]
    gate = [x - b for x, b in zip(of("x", numbers), bias)]
    r = [v - b for v, b in zip(of("r", numbers), bias[made.gates :])]
    if step.merged:  # the loop adds h·W_h to x's part, and both biases are one
        gate = [g + v for g, v in zip(gate, of("r", numbers))]
    fields = {
        "gate": gate, "r": r, "bias_x": bias[: made.gates], "bias_r": bias[made.gates :],
        "old": of("state", made.states), "new": [np.empty(units, dtype) for _ in made.states],
        "zone": of("mask", [f"zone:{s}" for s in made.states]),
        "zero": of("mask", [f"zero:{s}" for s in made.states]),
        "drop": of("mask", [f"drop:{s}" for s in made.states]),
        "add": of("mask", [f"add:{s}" for s in made.states]),
        "update": numpy(leaves["mask", "update"]), "hold": numpy(leaves["mask", "hold"]),
        "held": numpy(leaves["state", "held gate"]), "parameter": of("parameter", made.parameters),
        "slot": [np.empty(units, dtype) for _ in storage.slots],
    }  # fmt: skip
    compiled.run(f"step_forward_{variant}", **fields)

    def same(ours, expected, what):
        scale = 1 + expected.abs().numpy()
        assert (np.abs(ours - expected.numpy()) <= tolerance * scale).all(), what

    for name, ours, expected in zip(
        made.states, fields["new"], evaluate(step.graph, step.new, leaves)
    ):
        same(ours, expected, name)
    back = {
        "dstate": [numpy(w) for w in weights[: len(made.states)]],
        "owed": numpy(weights[len(made.states)])
        if step.gate is not None
        else np.zeros(units, dtype),
        "dx": [np.empty(units, dtype) for _ in numbers],
        "dr": [np.empty(units, dtype) for _ in numbers],
        "dparameter": [np.ones(units, dtype) for _ in made.parameters],
        "dy": np.zeros(units, dtype),
        **{f"d{rule}": [np.empty(units, dtype) for _ in made.states] for rule in MASKS},
        "dupdate": np.empty(units, dtype),
        "dhold": np.empty(units, dtype),
    }
    compiled.run(f"step_backward_{variant}", **fields, **back)
    expected = gradients(made, leaves, weights, rules)
    for q in numbers:
        same(back["dx"][int(q)], expected["x", q], f"dx {q}")
        if made.has_r and not step.merged:
            same(back["dr"][int(q)], expected["r", q], f"dr {q}")
    for k, state in enumerate(made.states):
        same(back["dstate"][k], expected["state", state], f"d{state}")
    for k, name in enumerate(made.parameters):
        same(back["dparameter"][k] - 1, expected["parameter", name], f"d{name}")
    if step.gate is not None:
        same(back["owed"], expected["state", "held gate"], "owed")
    for name, _ in backward.masks:
        rule, _, state = name.partition(":")
        ours = back[f"d{rule}"][made.states.index(state)] if state else back[f"d{rule}"]
        same(ours, expected["mask", name], f"gradient of the mask {name}")


needs_compiler = pytest.mark.skipif(generated.COMPILER is None, reason="no C compiler")


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["double", "float"])
@pytest.mark.parametrize("made", [*CELLS, awkward], ids=lambda made: getattr(made, "name", None))
def test_the_c_step_is_the_definition(made, dtype, tmp_path):
    """Generated C computes another step, or another gradient, than the graph."""
    compiled = generated.Compiled(made, tmp_path, dtype, "-O3")
    check_compiled(made, compiled, 5, 1e-12 if dtype == np.float64 else 2e-5)


@needs_compiler
@pytest.mark.parametrize("made", [lstm, awkward], ids=["lstm", "awkward"])
def test_the_two_parts_of_a_split_step_are_the_step(made, tmp_path):
    """With a norm that changes nothing, the parts around it compute another step or gradient
    than the whole.
    """
    compiled, units = generated.Compiled(made, tmp_path), 19
    storage = storage_of(*made.passes(split=True))

    def fields():
        draws = np.random.default_rng(11)
        sizes = {
            "gate": 8,
            "r": 8,
            "bias_x": 8,
            "bias_r": 8,
            "old": 4,
            "new": 4,
            "zone": 4,
            "zero": 4,
        }
        sizes |= {"slot": len(storage.slots), "dstate": 4, "dx": 8, "dr": 8}
        found = {
            name: [draws.standard_normal(units) for _ in range(count)]
            for name, count in sizes.items()
        }
        for name in ("zone", "zero"):
            found[name] = [draws.choice([0.0, 1.0, 0.3], units) for _ in range(4)]
        names = ("update", "hold", "held", "raw", "shown", "dy", "owed", "dshown", "draw")
        return found | {name: draws.random(units) for name in names}

    whole, parts = fields(), fields()
    compiled.run("step_forward_all", **whole)
    compiled.run("step_gates", **parts)
    raw = parts["raw"].copy()
    compiled.run("step_raw", **parts)  # once more, from what was stored
    np.testing.assert_allclose(parts["raw"], raw, rtol=1e-12)
    parts["shown"] = raw
    compiled.run("step_shows", **parts)
    compiled.run("step_backward_all", **whole)
    compiled.run("step_back_shows", **parts)
    parts["draw"] = parts["dshown"]
    compiled.run("step_back_gates", **parts)
    for name in ("new", "dstate", "dx", "dr"):
        for ours, expected in zip(parts[name], whole[name], strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-12, err_msg=name)


@needs_compiler
@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_c_step_of_any_cell_is_the_definition(data, tmp_path_factory):
    """Generated C of some graph of allowed operations is wrong, in what is stored too."""
    made = data.draw(generated.definitions())
    if len(storage_of(*made.passes()).slots) <= MOST_SLOTS:
        compiled = generated.Compiled(made, tmp_path_factory.mktemp("cell"))
        check_compiled(made, compiled, data.draw(st.integers(0, 2**31)), 1e-9)


def test_the_c_of_the_built_in_cells_is_up_to_date():
    """The library would be compiled from other equations than those of cells/built_in.py."""
    assert (generated.NATIVE / "cells.h").read_text(encoding="utf-8") == print_cells(CELLS_IN)


# --- what is refused ------------------------------------------------------------------------------

BAD = {
    "gates": (
        dict(gates=3, states=("h", "c")),
        lstm.function,
        r"not enough values .* gates=3 gives x and r 3",
    ),
    "no gates": (dict(gates=0), indrnn.function, "gates: expected a number from 1 to 8, got 0"),
    "states": (
        dict(gates=1, states="h"),
        gru.function,
        "states: expected a tuple of names such as",
    ),
    "same states": (
        dict(gates=1, states=("h", "h")),
        gru.function,
        "states: expected different names",
    ),
    "recurrence": (
        dict(gates=1, recurrence="full"),
        gru.function,
        "recurrence: expected one of dense, blocks",
    ),
    "heads": (
        dict(gates=1, heads=2),
        gru.function,
        "heads: expected 1 with recurrence='dense', got 2",
    ),
    "if": (
        dict(gates=1),
        lambda x, r, h: x[0] if x[0] > 0 else r[0],
        r"write torch\.where\(condition, a, b\) \(line",
    ),
    "operation": (
        dict(gates=1),
        lambda x, r, h: torch.sin(x[0] + r[0]),
        "sin is not an operation of a cell",
    ),
    "method": (
        dict(gates=1),
        lambda x, r, h: (x[0] + r[0]).cos(),
        "cos is not an operation of a cell",
    ),
    "power": (
        dict(gates=1),
        lambda x, r, h: (x[0] + r[0]) ** 2,
        "pow is not an operation of a cell",
    ),
    "option": (
        dict(gates=1),
        lambda x, r, h: torch.add(x[0], r[0], alpha=2),
        "add with alpha is not an operation",
    ),
    "tensor": (
        dict(gates=1),
        lambda x, r, h: x[0] + r[0] * torch.ones(3),
        "a tensor that is not an argument",
    ),
    "number": (
        dict(gates=1),
        lambda x, r, h: float(x[0]) + r[0],
        "a value was converted to a number",
    ),
    "comparison": (dict(gates=1), lambda x, r, h: (x[0] > r[0]) + h, "add was given a comparison"),
    "one state": (
        dict(gates=1, states=("h", "c")),
        lambda x, r, h, c: x[0] + r[0],
        "to return 2 values, the new h, c",
    ),
    "unmarked": (
        dict(gates=1, states=("h", "c")),
        lambda x, r, h, c: ((v := x[0] + r[0] * c).tanh(), v),
        r"the new c is used to compute another state; mark it: zo\.candidate\('c', …\)",
    ),
    "lost candidate": (
        dict(gates=1),
        lambda x, r, h: candidate("h", x[0] + r[0]).tanh(),
        "expected it to be returned as the new h",
    ),
    "unknown state": (
        dict(gates=1),
        lambda x, r, h: candidate("c", x[0] + r[0]),
        "expected the name of a state first, .h., got .c.",
    ),
    "two marks": (dict(gates=1), lambda x, r, h: held(x[0]) + held(r[0]), "zo.held is used twice"),
    "arity": (
        dict(gates=1),
        lambda x, r, h: (x[0] + r[0]).relu(h),
        "relu: expected 1 arguments, got 2",
    ),
    "infinity": (
        dict(gates=1),
        lambda x, r, h: x[0] + r[0] * float("inf"),
        "expected a finite number",
    ),
    "partial": (
        dict(gates=1),
        functools.partial(lambda p, x, r, h: x[0], 1),
        "expected a plain function, got partial",
    ),
    "parameters": (
        dict(gates=1),
        lambda x, r, h, a, b, c, d, e, f, g, i, j: x[0] + r[0] * a,
        "at most 8 parameters",
    ),
    "unused gate": (
        dict(gates=2),
        lambda x, r, h: x[0] + r[0],
        "gate 1 of x is never used; gates=2 may be too many",
    ),
    "unused r": (
        dict(gates=1),
        lambda x, r, h: x[0] + h,
        "r is never used; write recurrence='none'",
    ),
    "arguments": (
        dict(gates=1),
        lambda x, r, c: x[0] + r[0],
        "expected the arguments x, r, h and then the parameters",
    ),
    "default": (
        dict(gates=1),
        lambda x, r, h, p=1: x[0] + r[0],
        "plain arguments without defaults",
    ),
    "random": (
        dict(gates=1),
        lambda x, r, h: x[0] + r[0] * torch.rand(()).item(),
        "must not depend on anything but",
    ),
    "swapped": (
        dict(gates=1),
        lambda r, x, h: x[0] + r[0],
        "expected the arguments x, r, h .* got r, x, h",
    ),
    "no_grad": (
        dict(gates=1),
        lambda x, r, h: frozen(x[0]) + r[0],
        "torch.no_grad .* no effect in a definition",
    ),
    "name": (
        dict(gates=1),
        lambda x, r, h: candidate(h, x[0] + r[0]),
        "expected the name of a state first, 'h'",
    ),
    "stack": (
        dict(gates=1),
        lambda x, r, h: torch.stack([x[0], r[0]]).sum(0),
        "stack is not an operation of a cell",
    ),
    "tensor first": (
        dict(gates=1),
        lambda x, r, h: torch.ones(3) * x[0] + r[0],
        "tensor that is not an argument",
    ),
    "in place": (
        dict(gates=1),
        lambda x, r, h: operator.iadd(h, x[0] + r[0]),
        "changed in place; write a = a",
    ),
    "index": (dict(gates=1), lambda x, r, h: h[0] + x[0] + r[0], "a single value was indexed"),
    "product": (
        dict(gates=1),
        lambda x, r, h: torch.nn.functional.linear(h, x[0]) + r[0],
        "write zo.product",
    ),
    "no method": (
        dict(gates=1),
        lambda x, r, h: (x[0] + r[0]).softplus(),
        r"write torch.nn.functional.softplus\(v\)",
    ),
    "on tensors": (
        dict(gates=1),
        lambda x, r, h: (x[0] + r[0]).maximum(0),
        "the function failed on tensors",
    ),
    "a name": (
        dict(gates=1),
        lambda x, r, h: x[0] + r[0] + missing,  # noqa: F821
        "NameError: name 'missing' .* .line",
    ),
    "same value": (
        dict(gates=1, states=("h", "c")),
        lambda x, r, h, c: (x[0] + r[0],) * 2,
        "are the same value",
    ),
    "new comparison": (dict(gates=1), lambda x, r, h: x[0] > r[0], "the new h is a comparison"),
    "shown candidate": (
        dict(gates=1, states=("h", "c")),
        lambda x, r, h, c: (x[0], shown(candidate("c", r[0] + c))),
        "return the candidate itself",
    ),
    "unused": (dict(gates=1), lambda x, r, h, p: x[0] + r[0], "the parameter p is never used"),
    "marked tuple": (
        dict(gates=1),
        lambda x, r, h: update(x)[0] + r[0],
        "zo.update: expected one value, got tuple",
    ),
    "empty group": (
        dict(gates=1, states=("h", ())),
        lambda x, r, h: x[0] + r[0],
        "states: expected a tuple of names",
    ),
    "no states": (
        dict(gates=1, states=None),
        lambda x, r, h: x[0] + r[0],
        "states: expected a tuple of names",
    ),
    "bounded": (
        dict(gates=1, bounded="yes"),
        lambda x, r, h: x[0] + r[0],
        "bounded: expected True or False",
    ),
    "built in": (dict(gates=1), torch.tanh, "zo.cell: expected a plain function, got builtin"),
}


def frozen(v):
    with torch.no_grad():
        return v * 2


def test_the_decorator_without_its_arguments():
    """`@zo.cell` without parentheses gives an error about positional arguments."""
    with pytest.raises(DefinitionError, match=r"write @zo\.cell\(gates=…\) above the function"):
        cell(lambda x, r, h: h)


def test_other_ways_to_write_an_operation():
    """A function of torch.nn, or one of NumPy's numbers, is refused though it is an operation of
    cells.
    """
    import numpy as np

    relu, softplus = torch.nn.ReLU(), torch.nn.Softplus()
    made = cell(gates=1)(
        lambda x, r, h: relu(x[0]) + softplus(r[0]) * np.float32(0.5) + F.relu(h) * np.int64(2)
    )
    same = cell(gates=1)(lambda x, r, h: x[0].relu() + F.softplus(r[0]) * 0.5 + h.relu() * 2)
    assert made == same


@pytest.mark.parametrize("case", BAD)
def test_a_bad_definition_gets_a_sentence(case):
    """A function that is not a definition gives a wrong cell, or an error that does not help."""
    options, function, sentence = BAD[case]
    with pytest.raises(DefinitionError, match=sentence):
        cell(**options)(function)


def test_a_wrong_derivative_is_found(monkeypatch):
    """The check of a new definition passes whatever the derivative is."""
    from dataclasses import replace

    wrong = replace(OPERATIONS["tanh"], derivative=lambda g, a, y, d: (g.mul(d, y),))
    monkeypatch.setitem(OPERATIONS, "tanh", wrong)
    with pytest.raises(
        DefinitionError, match=r"with respect to x\[0\] disagrees with finite differences"
    ):
        cell(gates=1)(lambda x, r, h: (x[0] + r[0]).tanh())
