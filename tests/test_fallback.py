"""The loop in torch calls against the reference, for cells that are none of torch's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import generated
import products
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import zoneout as zo
from zoneout import cells
from zoneout.definition.graph import Graph
from zoneout.definition.torch_calls import compile_calls
from zoneout.ops import TOLERANCES
from zoneout.ops.cpu.plans import Case, backward_plan, forward_plan

STEPS, BATCH, INPUT, HIDDEN = 5, 4, 3, 6


@zo.cell(gates=4, states=("h", "c"), checked=False)
def peephole(x, r, h, c, p_i, p_f, p_o):
    i, f, g, o = (a + b for a, b in zip(x, r))
    i, f = (i + p_i * c).sigmoid(), (f + p_f * c).sigmoid()
    new = zo.candidate("c", f * c + zo.update(i * g.tanh()))
    return zo.held((o + p_o * new).sigmoid()) * zo.shown(new).tanh(), new


@zo.cell(gates=3, states=("h", ("c", "n")), checked=False)
def grouped(x, r, h, c, n):
    """c and n have one rate and one mask, and the output is their quotient."""
    i, f, v = (a + b for a, b in zip(x, r))
    i, f = i.sigmoid(), f.sigmoid()
    new_c = zo.candidate("c", f * c + zo.update(i * v.tanh()))
    new_n = zo.candidate("n", f * n + i)
    return new_c / (1 + abs(new_n)), new_c, new_n


@zo.cell(gates=1, recurrence="diagonal", checked=False)
def indrnn(x, h, u):
    return (x[0] + u * h).relu()


@zo.cell(gates=2, recurrence="none", checked=False)
def mingru(x, h):
    z, n = x
    z = z.sigmoid()
    return (1 - z) * h + zo.update(z * n)


@zo.cell(gates=3, recurrence="blocks", heads=2, states=("h", "c"), checked=False)
def blocks(x, r, h, c):
    f, g, o = (a + b for a, b in zip(x, r))
    f = f.sigmoid()
    c = zo.candidate("c", f * c + zo.update((1 - f) * g.tanh()))
    return zo.held(o.sigmoid()) * c.tanh(), c


@zo.cell(gates=2, recurrence="blocks", heads=2, checked=False)
def apart_blocks(x, r, h):
    """A block-diagonal W_h whose product stands apart from x's."""
    return (x[0] * r[0].sigmoid() + x[1] * r[1]).tanh()


@zo.cell(gates=3, checked=False)
def slotted(x, r, h):
    """One slot has h·W_h of a gate, the other one another value."""
    z = (x[0] + r[0]).sigmoid()
    n = (x[1] + (h * x[2]).tanh() * r[1]).tanh() + r[2].exp().log()
    return z * h + zo.update((1 - z) * n)


@zo.cell(gates=2, states=("h", "a", "b", "c"), checked=False)
def exchanging(x, r, h, a, b, c):
    """Two states change places, and one has no past: gradients go crosswise."""
    new = zo.candidate("c", x[1] - r[1])
    return (x[0] + r[0]).tanh() * b - new, b, a, new


@zo.cell(gates=2, states=("h", "c"), checked=False)
def awkward(x, r, h, c):
    """The gate that is held has a slot, and c cannot be computed again from what is stored."""
    new = zo.candidate("c", x[0] * c + zo.update(r[0]))
    return zo.held((x[1] + r[1]).sigmoid() * h.tanh()) * zo.shown(new).tanh(), new


@zo.cell(gates=3, states=("h", "c"), checked=False)
def sharing(x, r, h, c, p):
    """Two gradients have one factor, and a norm normalises what depends on x alone."""
    y = (x[0] + r[0]).tanh()
    slope = 1 - y * y
    return (x[1] + r[1]) * slope + zo.shown(x[2].tanh()), zo.candidate("c", c + p * slope)


CELLS = [peephole, grouped, indrnn, mingru, blocks, apart_blocks, slotted, exchanging, awkward]
CELLS += [sharing, *products.BY_NAME.values(), cells.mogrifier_lstm]
BY_NAME = {d.name: d for d in CELLS}
DENSE = [d.name for d in CELLS if d.recurrence == "dense" and d is not products.marked]
RESETS = torch.zeros(STEPS, BATCH, dtype=torch.bool)
RESETS[range(STEPS), [1, 3, 0, 1, 2]] = True  # one row at every step: all chunks have some
CALLS: dict[str, dict[str, Any]] = {
    "whole": {},
    "lengths": dict(lengths=[3, 5, 0, 4]),
    "resets": dict(resets=RESETS),
    "both": dict(lengths=[3, 5, 0, 4], resets=RESETS),
}


@pytest.fixture
def in_torch_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the loop in torch calls, two steps at once."""
    monkeypatch.setattr("zoneout.ops.cpu.native.load", lambda: None)
    monkeypatch.setattr("zoneout.ops.cpu._say_once", lambda reason: None)
    monkeypatch.setattr("zoneout.ops.cpu.chunks._NUMBERS", 2 * BATCH * HIDDEN)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waking another one takes longer than products as small as these
    yield
    torch.set_num_threads(threads)


def noises(d: Any) -> dict[str, Any]:
    """The noises that a cell can have."""
    groups = {group[0]: 0.3 + 0.1 * k for k, group in enumerate(d.groups)}
    ends = "sample" if any(len(group) > 1 for group in d.groups) else "expectation"
    found: dict[str, Any] = {
        "none": None,
        "zoneout": zo.Zoneout(states=groups, at_eval=ends),
        "state-dropout": zo.StateDropout(states=groups, at_eval=ends),
    }
    if "update" in d.marks:
        found["recurrent-dropout"] = zo.RecurrentDropout(rate=0.4)
        found["together"] = [zo.RecurrentDropout(rate=0.4), zo.Zoneout(states=groups, at_eval=ends)]
    if "held" in d.marks:
        found["held-gate"] = zo.RecurrentDropout(rate=0.4, hold_output_gate=True)
    if d.has_r:
        found["variational"] = zo.VariationalDropout(input=0.2, hidden=0.3)
    return found


def everything(
    layer: Any,
    x: Tensor,
    states: list[Tensor],
    call: dict[str, Any],
) -> dict[str, Any]:
    """All that a call and its backward pass give, by name."""
    x, states = x.clone().requires_grad_(), [s.clone().requires_grad_() for s in states]
    one = len(states) == 1
    more = {} if one else {"return_states": True}
    y, ended, *seen = layer(x, states[0] if one else tuple(states), seed=5, **more, **call)
    out = {"y": y, **{f"end {k}": s for k, s in enumerate([ended] if one else ended)}}
    out |= {f"seen {name}": v for name, v in (seen[0].items() if seen else ()) if v is not y}
    torch.manual_seed(1)
    layer.zero_grad()
    sum((v * torch.randn_like(v)).sum() for v in out.values()).backward()
    out |= {"of x": x.grad} | {f"of state {k}": s.grad for k, s in enumerate(states)}
    return out | {f"of {name}": p.grad for name, p in layer.named_parameters()}


def compare(
    d: Any,
    noise: Any,
    call: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> None:
    """Run a cell in the loop and in the reference, training and evaluating, and compare."""
    torch.manual_seed(0)
    layers = [
        zo.Recurrent(d, INPUT, HIDDEN, noise=noise, dtype=dtype, backend=backend, **options)
        for backend in ("cpu", "reference")
    ]
    with torch.no_grad():
        for p in layers[0].parameters():
            p.normal_(std=0.5)
    layers[1].load_state_dict(layers[0].state_dict())
    x, count = torch.randn(STEPS, BATCH, INPUT, dtype=dtype), len(layers[0].suffixes())
    sizes = [layers[0].output_size] + [HIDDEN] * (len(d.states) - 1)
    states = [torch.randn(count, BATCH, size, dtype=dtype) for size in sizes]
    for training in (True, False):
        got, want = (everything(layer.train(training), x, states, call) for layer in layers)
        assert got.keys() == want.keys()
        if not all(value is None or value.isfinite().all() for value in want.values()):
            assert d.name == "random"  # numbers of such a cell may grow without bound
            return
        for key, value in want.items():
            if value is None:
                assert got[key] is None or not got[key].any(), key
                continue
            error = (got[key] - value).norm() / value.norm().clamp(min=1e-30)
            # A random cell may make a difference in rounding larger at every step.
            most = 1e-6 if d.name == "random" else TOLERANCES[dtype]
            assert error <= most, f"{key}: {error:.1e} from the reference"


@pytest.mark.usefixtures("in_torch_calls", "poisoned")
class TestCells:
    """Every cell against the reference: outputs, states, and every gradient."""

    @pytest.mark.parametrize("call", CALLS)
    @pytest.mark.parametrize("name", BY_NAME)
    def test_noises(self, name, call):
        """A cell computes something else than its equation says, with noise or without."""
        for noise in noises(BY_NAME[name]).values():
            compare(BY_NAME[name], noise, CALLS[call])

    @pytest.mark.parametrize("norm", ["layer", "batch"])
    @pytest.mark.parametrize("name", DENSE)
    def test_norms(self, name, norm):
        """A norm normalises something else, or the gradient of a slot or of `shown` misses it."""
        for noise, call in zip(noises(BY_NAME[name]).values(), cycle(reversed(CALLS.values()))):
            made = norm if norm == "layer" else zo.RecurrentBatchNorm(4)
            compare(BY_NAME[name], noise, call, norm=made)

    @pytest.mark.parametrize("call", ["whole", "both"])
    @pytest.mark.parametrize("name", BY_NAME)
    def test_directions(self, name, call):
        """A reversed direction, a second layer or a missing bias goes wrong."""
        d = BY_NAME[name]
        for options in (dict(num_layers=2, bidirectional=True), dict(bias=False)):
            compare(d, noises(d)["zoneout"], CALLS[call], **options)

    @pytest.mark.parametrize("norm", [None, "layer"])
    def test_projections(self, norm):
        """What is projected is not what the cell returned, or a mask has its size."""
        for noise in noises(peephole).values():
            compare(peephole, noise, CALLS["both"], norm=norm, proj_size=4)

    @pytest.mark.parametrize("name", BY_NAME)
    def test_float32(self, name):
        """A number of the equation has another precision than the states."""
        compare(BY_NAME[name], noises(BY_NAME[name])["zoneout"], CALLS["both"], torch.float32)


@given(data=st.data(), d=generated.definitions(), call=st.sampled_from(list(CALLS)))
@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_random_cells(in_torch_calls, data, d, call):
    """Some combination of operations is put together wrongly."""
    assume(d.storage.fits)
    noise = data.draw(st.sampled_from(list(noises(d))), "noise")
    norm = data.draw(st.sampled_from([None, "layer"] if d.has_r else [None]), "norm")
    compare(d, noises(d)[noise], CALLS[call], norm=norm)


@pytest.mark.parametrize(
    ("rate", "x", "h", "want"),
    [(1 / 65536, 0, math.inf, 0), (1, math.inf, 3, 3)],
)
@pytest.mark.usefixtures("in_torch_calls")
def test_what_is_not_chosen_is_not_seen(rate, x, h, want):
    """An infinite value that zoneout does not choose turns the other one into NaN."""
    noise = zo.Zoneout(hidden=rate)
    layer = zo.RNN(1, 1, nonlinearity="relu", bias=False, noise=noise, backend="cpu")
    with torch.no_grad():
        layer.weight_ih_l0.fill_(1), layer.weight_hh_l0.fill_(-1)
    y, _ = layer(torch.full((2, 1, 1), float(x)), torch.full((1, 1, 1), float(h)), seed=1)
    assert y.flatten().tolist() == [want, want]


# --- the plan -------------------------------------------------------------------------------------


def case(d: Any, *masks: str) -> Case:
    drawn = tuple((name, "drawn") for name in masks)
    return Case(d, torch.float32, drawn, False, False, (True, *[False] * (len(d.states) - 1)))


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()[1:-1]]


def test_a_step_has_few_calls():
    """A change of the plan would make every step slower, and no other test would tell."""
    lstm = case(zo.cells.lstm, "zone0", "zone1")
    assert len(lines(forward_plan(lstm).step.text)) <= 11
    assert "tanh(gate2.contiguous())" in forward_plan(lstm).step.text  # faster than on columns
    plan = backward_plan(lstm)
    assert len(lines(plan.step.text)) <= 10 and not plan.after.names
    assert not any("_back" in line for line in lines(plan.step.text))
    without_noise = backward_plan(case(zo.cells.lstm))
    assert len(lines(without_noise.before.text)) <= 8 and len(lines(without_noise.step.text)) <= 8
    gru = case(zo.cells.gru, "zone0")
    assert len(lines(forward_plan(gru).step.text)) <= 10
    assert len(lines(backward_plan(gru).step.text)) <= 5


def test_what_needs_no_step_is_computed_for_all():
    """Gates without h, and gradients that no step reads, would be computed step by step."""
    forward, backward = forward_plan(case(mingru)), backward_plan(case(mingru))
    assert len(lines(forward.early.text)) == 3 and lines(forward.step.text) == [
        "torch.addcmul(value1, value0, old0, out=new0)"
    ]
    assert len(lines(backward.step.text)) == 2
    assert not any("dx" in line for line in lines(backward.step.text))
    of_peephole = backward_plan(case(peephole))  # its parameters need the gates' gradients alone
    assert of_peephole.parameters == (0, 1, 2) and not of_peephole.kept


# --- the printer ----------------------------------------------------------------------------------


def run(
    graph: Graph,
    loads: dict[int, str],
    stores: Any,
    returns: Any = (),
    **given: Tensor,
) -> Any:
    """Compile and run; return the values that are returned, and the text."""
    made = compile_calls(graph, loads, stores, returns, dtype=torch.float64, small=("p",))
    return made.function(*(given[name] for name in made.names)), made.text


def test_fused_calls():
    """A call that stands for several operations computes something else."""
    g = Graph()
    a, b, z = (g.add("state", value=name) for name in "abz")
    loads = {a: "a", b: "b", z: "z"}
    values = dict(zip("abz", torch.rand(3, 2, 5, dtype=torch.float64)))
    va, vb, vz = values.values()
    one, two = g.number(1.0), g.number(2.0)
    ab, rest, square = g.add("mul", a, b), g.add("sub", one, z), g.add("mul", z, z)
    expected = {
        g.add("add", z, ab): (vz + va * vb, "addcmul"),
        g.add("add", ab, z): (vz + va * vb, "addcmul"),
        g.add("sub", z, ab): (vz - va * vb, "addcmul"),
        g.add("sub", ab, z): (va * vb - vz, ".sub_("),
        g.add("add", z, g.add("mul", two, a)): (vz + 2 * va, "alpha"),
        g.add("sub", z, g.add("mul", a, two)): (vz - 2 * va, "alpha"),
        g.add("add", g.add("mul", rest, a), g.add("mul", b, z)): (torch.lerp(va, vb, vz), "lerp"),
        g.add("mul", a, g.add("mul", rest, z)): (va * vz * (1 - vz), "sigmoid_back"),
        g.add("mul", g.add("sub", one, square), a): (va * (1 - vz * vz), "tanh_back"),
    }
    for node, (value, call) in expected.items():
        (found,), text = run(g, loads, [], [node], **values)
        torch.testing.assert_close(found, value)
        assert call in text and (call == ".sub_(" or len(lines(text)) == 1), text
    less = g.add("sub", two, z)  # 2 − z is not 1 − z
    for node, value in (
        (g.add("add", g.add("mul", less, a), g.add("mul", b, z)), (2 - vz) * va + vb * vz),
        (g.add("mul", a, g.add("mul", less, z)), va * vz * (2 - vz)),
        (g.add("mul", g.add("sub", two, square), a), va * (2 - vz * vz)),
    ):
        torch.testing.assert_close(run(g, loads, [], [node], **values)[0], [value])


def test_arguments_that_change_places():
    """A value is overwritten that is still to be read."""
    g = Graph()
    a, b = (g.add("state", value=name) for name in "ab")
    total = g.add("add", a, b)
    for stores in (
        [("a", b), ("b", a)],
        [("a", total), ("b", a)],
        [("a", g.add("mul", total, b)), ("b", g.add("mul", total, a))],
        [("a", g.add("tanh", b)), ("b", g.add("tanh", a))],
        [("a", g.number(3.0)), ("b", g.add("neg", a))],
        [("a", total), ("b", total)],
    ):
        va, vb = torch.rand(2, 2, 5, dtype=torch.float64)
        both = {a: va.clone(), b: vb.clone(), total: va + vb, g.number(3.0): torch.full_like(va, 3)}
        both |= {g.add("tanh", n): both[n].tanh() for n in (a, b)} | {g.add("neg", a): -va}
        both |= {g.add("mul", total, n): both[total] * both[n] for n in (a, b)}
        run(g, {a: "a", b: "b"}, stores, a=va, b=vb)
        for place, value in zip((va, vb), (both[node] for _, node in stores)):
            torch.testing.assert_close(place, value)


def test_values_without_rows():
    """What depends on parameters alone is given the memory of something that has rows."""
    g = Graph()
    p, a = g.add("parameter", value="p"), g.add("state", value="a")
    s = g.add("sigmoid", p)
    node = g.add("mul", g.add("tanh", g.add("mul", s, a)), g.add("exp", s))
    vp, va, out = (
        torch.rand(5, dtype=torch.float64),
        torch.rand(2, 5, dtype=torch.float64),
        torch.zeros(2, 5).double(),
    )
    run(g, {p: "p", a: "a"}, [("out", node)], p=vp, a=va, out=out)
    torch.testing.assert_close(out, (vp.sigmoid() * va).tanh() * vp.sigmoid().exp())
    run(g, {p: "p", a: "a"}, [("out", s)], p=vp, a=va, out=out)
    torch.testing.assert_close(out, vp.sigmoid().expand(2, 5))
