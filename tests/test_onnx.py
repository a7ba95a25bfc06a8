"""Export to ONNX: by plain torch.onnx.export, as ONNX's own operators, and of any cell.

What noises, norms and resets become is in test_ecosystem.py.
"""

import importlib.util
import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import generated
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import zoneout as zo
from zoneout import cells, ops
from zoneout.definition import Definition
from zoneout.definition.graph import Graph
from zoneout.definition.onnx import OPERATORS, Nodes, evaluate
from zoneout.definition.operations import COMPARISONS, OPERATIONS, TRACED
from zoneout.definition.torch_calls import evaluate as in_torch
from zoneout.draws import Draw
from zoneout.norm import StepNorm
from zoneout.ops import reference
from zoneout.ops.autograd.flat import encode, flatten
from zoneout.streams import STATE_STREAMS, Rule

STEPS, BATCH, INPUT, HIDDEN = 6, 4, 3, 5
MISSING = [
    name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None
]
needs_onnx = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
# Torch's exporter and the packages behind it warn about each other's future.
pytestmark = pytest.mark.filterwarnings("ignore")

OFF = zo.Zoneout(hidden=0.3, at_eval="off")
TWO_WAYS: dict[str, Any] = dict(num_layers=2, bidirectional=True)


class Together(nn.Module):
    """Several layers in one model, since most of the time goes into starting an export."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, states: list[Any], lengths: Tensor) -> Any:
        bare = [layer(x) for layer in self.layers[1:]]
        return bare, [layer(x, hx, lengths=lengths) for layer, hx in zip(self.layers, states)]


def states_of(layer: Any) -> Any:
    h = torch.randn(len(layer.suffixes()), BATCH, HIDDEN)
    return (h, torch.randn_like(h)) if layer.kind == "lstm" else h


def in_onnxruntime(model: nn.Module, args: tuple[Any, ...], path: Path) -> None:
    """Hold what onnxruntime computes to the model."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = {
        value.name: leaf.numpy()
        for value, leaf in zip(session.get_inputs(), tree_leaves(args), strict=True)
    }
    for got, want in zip(session.run(None, given), tree_leaves(model(*args)), strict=True):
        found = torch.from_numpy(got)
        assert found.shape == want.shape and found.dtype == want.dtype
        assert (found - want).norm() <= ops.TOLERANCES[want.dtype] * want.norm() + 1e-30


def exported(model: nn.Module, args: tuple[Any, ...], path: Path, **options: Any) -> list[str]:
    """Export by torch's own function, compare in onnxruntime, and return the graph's operators."""
    import onnx

    torch.onnx.export(model.eval(), args, path, verbose=False, **options)
    # Every value has a node that computes it, and its type and shape are as declared.
    onnx.checker.check_model(path, full_check=True)
    in_onnxruntime(model, args, path)
    return [node.op_type for node in onnx.load(path).graph.node]


@needs_onnx
def test_a_layer_without_noise_is_onnxs_own_operator(tmp_path):
    """A layer that replaces nothing runs as a Scan, several times slower, or as an operator that
    computes another.
    """
    layers = (
        zo.LSTM(INPUT, HIDDEN, **TWO_WAYS),
        zo.LSTM(INPUT, HIDDEN, bias=False, noise=zo.Zoneout(cell=0.0, hidden=0.0)),
        zo.GRU(
            INPUT,
            HIDDEN,
            noise=[OFF, zo.VariationalDropout(input=0.2, hidden=0.2)],
            bidirectional=True,
        ),
        zo.RNN(INPUT, HIDDEN, noise=zo.WeightDrop(rate=0.2), bidirectional=True),
        zo.RNN(INPUT, HIDDEN, nonlinearity="relu", bias=False),
    )
    states = [states_of(layer) for layer in layers]
    args = torch.randn(STEPS, BATCH, INPUT), states, torch.tensor([6, 0, 3, 1])
    found = exported(Together(*layers), args, tmp_path / "model.onnx")
    assert [found.count(name) for name in ("LSTM", "GRU", "RNN", "Scan")] == [6, 4, 6, 0]


@needs_onnx
def test_own_operators_take_any_batch_and_half_precision(tmp_path):
    """An operator is tied to the sizes it was exported with, or gives float32 where the layer
    gives float16.
    """
    dynamic = torch.export.Dim.DYNAMIC
    layer, path = (
        zo.LSTM(INPUT, HIDDEN, bidirectional=True, dtype=torch.float16).eval(),
        tmp_path / "model.onnx",
    )
    x = torch.randn(STEPS, BATCH, INPUT, dtype=torch.float16)
    assert "Scan" not in exported(layer, (x,), path, dynamic_shapes=({0: dynamic, 1: dynamic},))
    in_onnxruntime(layer, (torch.randn(9, 2, INPUT, dtype=torch.float16),), path)


@needs_onnx
def test_what_onnxs_operators_cannot_say_is_a_scan(tmp_path):
    """A projection, every c_t, a norm or float64 goes to an operator that has no place for it."""
    layers = [
        (zo.LSTM(INPUT, HIDDEN, proj_size=2), {}),
        (zo.LSTM(INPUT, HIDDEN), {"return_cells": True}),
        (zo.GRU(INPUT, HIDDEN, norm="layer"), {}),
        (zo.GRU(INPUT, HIDDEN).double(), {}),
    ]
    model = nn.ModuleList(layer for layer, _ in layers)
    model.forward = lambda x: [
        layer(x.to(layer.weight_ih_l0.dtype), **call) for layer, call in layers
    ]
    assert (
        exported(model, (torch.randn(STEPS, BATCH, INPUT),), tmp_path / "model.onnx").count("Scan")
        == 4
    )


# --- any cell -------------------------------------------------------------------------------------


@zo.cell(gates=4, states=("h", "c"))
def peephole(x, r, h, c, p_i, p_f, p_o):
    i, f, g, o = (a + b for a, b in zip(x, r))
    i, f = (i + p_i * c).sigmoid(), (f + p_f * c).sigmoid()
    new = zo.candidate("c", f * c + zo.update(i * g.tanh()))
    return zo.held((o + p_o * new).sigmoid()) * zo.shown(new).tanh(), new


@zo.cell(gates=3, states=("h", ("c", "n")))
def grouped(x, r, h, c, n):
    """sLSTM without its stabiliser; x and r of a gate are not only added."""
    i, z, o = x[0].minimum(r[0] + 1).exp(), (x[1] + r[1]).tanh(), x[2] * r[2]
    new_c, new_n = zo.candidate("c", 0.9 * c + i * z), zo.candidate("n", 0.9 * n + i)
    return o.sigmoid() * new_c / new_n.maximum(1 + 0 * n), new_c, new_n


@zo.cell(gates=1, recurrence="diagonal")
def indrnn(x, h, u):
    return (x[0] + u * h).relu()


@zo.cell(gates=2, recurrence="none")
def mingru(x, h):
    z, n = x
    z = z.sigmoid()
    return (1 - z) * h + zo.update(z * n)


@zo.cell(gates=3, states=("h", "c"), recurrence="blocks", heads=2)
def blocks(x, r, h, c):
    f, g, o = (a + b for a, b in zip(x, r))
    f = f.sigmoid()
    c = zo.candidate("c", f * c + (1 - f) * g.tanh())
    return o.sigmoid() * torch.where(c < 0, 0.1 * c, c), c


@zo.cell(gates=1, states=("h", "fixed", "one"), recurrence="none")
def fixed(x, h, fixed, one, p):
    """States that depend on neither the input nor the step before."""
    return x[0] * p + h, 2 * p, 0 * p + 1


RATES = torch.linspace(0, 1, 6)
ZONEOUT = zo.Zoneout(hidden=0.3)
CELLS: list[tuple[Definition, dict[str, Any]]] = [
    (
        peephole,
        {
            "bidirectional": True,
            "noise": [
                zo.Zoneout(hidden=0.3, cell=RATES),
                zo.RecurrentDropout(rate=0.3, hold_output_gate=True),
            ],
        },
    ),
    (
        peephole,
        {
            "norm": "layer",
            "proj_size": 2,
            "noise": zo.StateDropout(hidden=RATES[:2], cell=0.2),
        },
    ),
    (grouped, {"num_layers": 2, "noise": zo.Zoneout(hidden=0.3, cell=0.5, at_eval="off")}),
    (indrnn, {"bidirectional": True, "noise": ZONEOUT}),
    (mingru, {"noise": [ZONEOUT, zo.RecurrentDropout(rate=0.3)]}),
    (cells.mgu, {"noise": ZONEOUT}),
    (cells.mogrifier_lstm, {}),
    (blocks, {"bidirectional": True, "noise": zo.Zoneout(states={"c": RATES})}),
    (fixed, {"learn_initial_state": True}),
]


class Cells(nn.Module):
    """Layers of cells that torch does not have, one call for all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(zo.Recurrent(c, INPUT, 6, **more) for c, more in CELLS)
        self.step = zo.RecurrentCell(blocks, INPUT, 6, noise=ZONEOUT)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0, 0.5)

    def forward(self, x: Tensor, lengths: Tensor, resets: Tensor) -> Any:
        ends, cuts = {"lengths": lengths}, {"resets": resets}
        calls = itertools.cycle([ends, cuts, {}, ends | cuts])
        every = [layer(x, **call, return_states=True) for layer, call in zip(self.layers, calls)]
        return every, self.step(x[0])


@needs_onnx
def test_a_cell_of_ones_own_is_exported(tmp_path):
    """A cell that is not one of torch's cannot be exported, or computes something else in ONNX."""
    torch.manual_seed(0)
    dynamic, path = torch.export.Dim.DYNAMIC, tmp_path / "model.onnx"
    sizes = {0: dynamic, 1: dynamic}

    def arguments(steps: int, lengths: list[int]) -> tuple[Tensor, ...]:
        x = torch.randn(steps, len(lengths), INPUT)
        return x, torch.tensor(lengths), torch.rand(x.shape[:2]) < 0.3

    model = Cells().eval()
    shapes = {"x": sizes, "lengths": {0: dynamic}, "resets": sizes}
    found = exported(model, arguments(6, [6, 0, 3, 1]), path, dynamic_shapes=shapes)
    assert found.count("Scan") == 14
    in_onnxruntime(model, arguments(9, [4, 9]), path)


@needs_onnx
def test_the_operator_is_chosen_by_what_a_cell_computes(tmp_path):
    """A GRU by another name becomes a Scan, or another cell by torch's name becomes torch's."""
    twin = Definition.from_text(cells.gru.text, "twin")

    @zo.cell(gates=3, bounded=True)
    def gru(x, r, h):
        return x[0] * h + x[1] * r[1] + (x[2] + r[2]).tanh()

    layers = nn.ModuleList(zo.Recurrent(cell, INPUT, HIDDEN) for cell in (twin, gru))
    layers.forward = lambda x: [layer(x, return_states=True) for layer in layers]
    found = exported(layers, (torch.randn(STEPS, BATCH, INPUT),), tmp_path / "model.onnx")
    assert [name for name in found if name in ("GRU", "Scan")] == ["GRU", "Scan"]


@needs_onnx
def test_a_cell_of_ones_own_in_half_precision(tmp_path):
    """The body of a Scan computes in float16, or needs shapes that a cast does not keep."""
    layer = zo.Recurrent(blocks, INPUT, 6, dtype=torch.float16, noise=ZONEOUT)
    x = torch.randn(STEPS, BATCH, INPUT, dtype=torch.float16)
    assert "Scan" in exported(layer, (x,), tmp_path / "model.onnx")


# --- the translation without an export ------------------------------------------------------------


def computed(build: Any, given: list[Tensor]) -> list[Tensor]:
    """What onnxruntime computes: `build` adds nodes to a list and returns the outputs."""
    import onnxruntime
    import onnxscript.ir as ir

    inputs = []
    for k, v in enumerate(given):
        kind = ir.TensorType(ir.DataType.from_numpy(v.numpy().dtype))
        inputs.append(ir.Value(name=f"input{k}", type=kind, shape=ir.Shape(v.shape)))
    nodes: list[Any] = []
    outputs = build(nodes, inputs)
    graph = ir.Graph(inputs, outputs, nodes=nodes, name="graph", opset_imports={"": 18})
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    found = session.run(None, {value.name: v.numpy() for value, v in zip(inputs, given)})
    return [torch.from_numpy(v) for v in found]


def every_operation(graph: Graph) -> list[int]:
    """Add every operation on the states a and b; a comparison as 1 or 0."""
    a, b = (graph.add("state", value=name) for name in "ab")
    one, zero, less = graph.number(1.0), graph.number(0.0), graph.add("lt", a, b)
    outputs = []
    for name in TRACED:
        arguments = (less, a, b) if name == "where" else (a, b)[: OPERATIONS[name].arguments]
        node = graph.add(name, *arguments)
        outputs.append(graph.add("where", node, one, zero) if name in COMPARISONS else node)
    return outputs


NUMBERS = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-30, 19, -19, 21, 800, -800]


@needs_onnx
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operations_have_torchs_values(dtype):
    """An operation has no ONNX operator, or one with other results for NaN, infinity or ties."""
    import onnxscript.ir as ir

    assert set(OPERATORS) == set(TRACED)
    graph = Graph()
    outputs, names = every_operation(graph), [("state", "a"), ("state", "b")]
    pairs = torch.tensor(list(itertools.product(NUMBERS, NUMBERS)), dtype=dtype)
    a, b = pairs.T.contiguous()

    def build(nodes: list[Any], inputs: list[Any]) -> list[Any]:
        op = Nodes(nodes, 18, ir.DataType.from_numpy(a.numpy().dtype))
        return evaluate(op, graph, outputs, dict(zip(names, inputs)), {}, shape=None)

    expected = in_torch(graph, outputs, dict(zip(names, (a, b))))
    for name, got, want in zip(TRACED, computed(build, [a, b]), expected, strict=True):
        assert torch.allclose(got, want, rtol=1e-5, equal_nan=True), name


def translated(run: ops.Run) -> list[Tensor]:
    """What onnxruntime computes from a run: y, the final states, the states of all steps."""
    from onnxscript import evaluator

    flat = flatten(run)
    count = len(flat.tensors)

    def build(nodes: list[Any], inputs: list[Any]) -> Any:
        recorder: Any = SimpleNamespace(nodes=nodes, opset=SimpleNamespace(version=18))
        with evaluator.default_as(recorder):
            return zo.onnx._run(*encode(flat.settings), inputs[:count], inputs[count:])

    return computed(build, [v.contiguous() for v in (*flat.tensors, *flat.constants)])


def held_to_the_reference(run: ops.Run, finite: bool = True) -> None:
    """Hold the translation of a run to the reference."""
    result = reference.run(run)
    expected = [result.y, *result.final, *result.states]
    # Where states grow without bound, one rounding gives infinity, another one NaN.
    assume(not finite or all(v.isfinite().all() for v in expected))
    for got, want in zip(translated(run), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)


@st.composite
def runs(draw: Any) -> ops.Run:
    """A run of a random cell, with rates of 0, 1 and between."""
    cell, units, rows = draw(generated.definitions()), 4, 3
    if cell.has_r and draw(st.booleans()):
        text = cell.text.replace("recurrence=dense heads=1", "recurrence=blocks heads=2")
        cell = Definition.from_text(text)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def expectation(stream: str, by: str) -> Draw:
        rates = torch.tensor([0.0, 1.0, 0.3, 0.75], dtype=torch.float64)
        rate = rates if draw(st.booleans()) else rates[draw(st.integers(0, 3))]
        return Draw(Rule(stream, by, "unit", ""), rate, None, 0)

    gates, states = cell.gates * units, len(cell.states)
    every = [numbers(rows, units) for _ in range(2 * states)]
    replaced = [stream for stream in STATE_STREAMS[:states] if draw(st.booleans())]
    draws = [expectation(s, draw(st.sampled_from(("previous", "zero")))) for s in replaced]
    if "update" in cell.marks:
        draws.append(expectation("update", "zero"))
    w_hh = numbers(gates, units // cell.heads) if cell.has_r else None
    bias = draw(st.booleans())
    b_ih, b_hh = (numbers(gates) if bias and has else None for has in (True, cell.has_r))
    own = tuple(numbers(units) for _ in cell.parameters)
    norm = StepNorm("units", 1e-5, numbers(gates), numbers(gates))
    resets = torch.rand(STEPS, rows, generator=generator) < 0.3
    resets[2] = True  # after the end of the last row
    resets = resets if draw(st.booleans()) else None
    return ops.Run(
        cell,
        units,
        numbers(STEPS, rows, INPUT),
        tuple(every[:states]),
        ops.Weights(numbers(gates, INPUT), w_hh, b_ih, b_hh, None, own),
        tuple(draws),
        torch.arange(rows),
        norm=norm if cell.has_r and draw(st.booleans()) else None,
        lengths=torch.tensor([STEPS, 0, 2]) if draw(st.booleans()) else None,
        resets=resets,
        reset_to=() if resets is None else tuple(every[states:]),
        reverse=draw(st.booleans()),
        return_states=draw(st.booleans()),
    )


@needs_onnx
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(runs())
def test_random_cells(run):
    """Some cell, with some noise, norm, lengths or resets, computes something else in ONNX."""
    held_to_the_reference(run)


@needs_onnx
def test_rates_of_zero_and_one_select():
    """A value that is not finite reaches units that do not take it: 0 · ∞ is NaN."""
    rates = torch.tensor([0.0, 1.0, 0.25], dtype=torch.float64)
    bad = torch.tensor([[math.inf] * 3, [math.nan] * 3, [1.0] * 3], dtype=torch.float64)
    good = torch.full_like(bad, 2.0)

    @zo.cell(gates=1, states=("h", "c"), recurrence="none")
    def plain(x, h, c):
        c = zo.candidate("c", zo.update(x[0]))
        return 2 * x[0] + 3 * c, c

    def run(x: Tensor, state: Tensor, by: str, *streams: str) -> ops.Run:
        weights = ops.Weights(torch.eye(3, dtype=torch.float64), None, None, None, None)
        draws = tuple(Draw(Rule(stream, by, "unit", ""), rates, None, 0) for stream in streams)
        return ops.Run(plain, 3, x[None], (state, state), weights, draws, torch.arange(3))

    _, h, c = translated(run(good, bad, "previous", "hidden", "cell"))
    assert (h[:, 0] == 10).all() and (c[:, 0] == 2).all()  # rate 0: the new value
    torch.testing.assert_close(h[:, 1], bad[:, 1], equal_nan=True)
    _, h, c = translated(run(bad, good, "previous", "hidden", "cell"))
    assert (h[:, 1] == 2).all() and (c[:, 1] == 2).all()  # rate 1: the old value
    for streams in (("hidden", "cell"), ("update",)):
        case = run(bad, good, "zero", *streams)
        *_, c = translated(case)
        assert (c[:, 1] == 0).all()
        held_to_the_reference(case, finite=False)


@needs_onnx
def test_mixed_ends():
    """The expectation of an infinite or a very large value is NaN or infinite."""
    largest = 1.5e308
    new = torch.tensor([[0.0], [math.inf], [math.inf], [largest]], dtype=torch.float64)
    old = torch.tensor([[math.inf], [0.0], [math.inf], [-largest]], dtype=torch.float64)

    @zo.cell(gates=1, recurrence="none")
    def passing(x, h):
        return x[0]

    for rate in (0.25, 0.5):
        rule = Rule("hidden", "previous", "unit", "")
        draw = Draw(rule, torch.tensor(rate, dtype=torch.float64), None, 0)
        weights = ops.Weights(torch.ones(1, 1, dtype=torch.float64), None, None, None, None)
        run = ops.Run(passing, 1, new[None], (old,), weights, (draw,), torch.arange(4))
        y, *_ = translated(run)
        want = torch.tensor([math.inf] * 3 + [largest * (1 - 2 * rate)], dtype=torch.float64)
        torch.testing.assert_close(y.flatten(), want)
        held_to_the_reference(run, finite=False)


# --- plain torch.onnx.export ----------------------------------------------------------------------


@needs_onnx
def test_plain_export_says_what_cannot_be_exported(tmp_path):
    """A model that draws, or the older exporter, ends in torch's words about a missing operator."""
    layer, x = zo.GRU(INPUT, HIDDEN, noise=zo.Zoneout(hidden=0.1)), torch.randn(STEPS, BATCH, INPUT)
    with pytest.raises(
        torch.onnx.OnnxExporterError, match=r"model draws noise.*call model\.eval\(\)"
    ):
        torch.onnx.export(layer, (x,), tmp_path / "layer.onnx", verbose=False)
    with pytest.raises(NotImplementedError, match=r"dynamo=False.*zoneout\.onnx\.export"):
        torch.onnx.export(nn.Sequential(layer).eval(), (x,), tmp_path / "layer.onnx", dynamo=False)


def test_an_exporter_that_is_loaded_already_is_registered_with(monkeypatch):
    """A program that imports torch.onnx before zoneout cannot export."""
    assert torch.onnx.__name__ in sys.modules
    called = []
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(zo.onnx, "_register_refusal", lambda: called.append("torch.onnx"))
    monkeypatch.setattr(zo.onnx, "_register_translations", lambda: None)
    zo.onnx.register()
    assert called == ["torch.onnx"]


def test_a_torch_with_another_registry_still_exports():
    """A change of torch's internals makes zoneout break the export of models that have nothing
    to do with it.
    """
    from zoneout.onnx import _RegisterOnImport

    def fails() -> None:
        raise TypeError("onnx_impl() got an unexpected keyword argument")

    with pytest.warns(UserWarning, match=r"unexpected keyword.*try zoneout\.onnx\.export"):
        _RegisterOnImport({"torch.onnx": fails}).registered("torch.onnx")
