"""The layers among PyTorch's own tools: compiler, autocast, export, ONNX, DDP, torch.func,
checkpointing.
"""

import copy
import datetime
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_foreign_tensors import Wrapped
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import zoneout as zo
from zoneout import ops
from zoneout.ops.sequence import rows

STEPS, BATCH, INPUT, HIDDEN = 6, 4, 3, 5
DYNAMIC = torch.export.Dim.DYNAMIC
BOTH = zo.Zoneout(cell=0.5, hidden=0.2)
FUSED = ("cpu", "reference")

# Torch's compiler and its forward mode call what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
inductor = pytest.mark.skipif(
    not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name),
    reason="inductor needs a C++ compiler",
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """No test sees what another has compiled."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def close(got: Any, want: Any, dtype: torch.dtype = torch.float32) -> None:
    """Equal up to what one rounding order or another may change."""
    for g, w in zip(
        torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want), strict=True
    ):
        assert (g - w).norm() <= ops.TOLERANCES[dtype] * w.norm() + 1e-30


def x_of(batch: int = BATCH, **options: Any) -> Tensor:
    return torch.randn(STEPS, batch, INPUT, **options)


# --- a default device -----------------------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch calls"])
@pytest.mark.parametrize("form", ["whole", "lengths", "packed", "cell"])
def test_another_default_device(monkeypatch, form, native):
    """What a loop counts with lies where new tensors go, which need not be where its input is,
    and stays there.
    """
    if not native:
        monkeypatch.setattr("zoneout.ops.cpu.native.load", lambda: None)
        monkeypatch.setattr("zoneout.ops.cpu._say_once", lambda reason: None)
    make = zo.LSTMCell if form == "cell" else zo.LSTM
    layer, x = make(INPUT, HIDDEN, noise=BOTH), x_of()
    given: dict[str, Any] = {
        "cell": {"step": 2},
        "lengths": {"lengths": torch.tensor([6, 2, 5, 1])},
    }.get(form, {})
    inputs: Any = x[0] if form == "cell" else x
    if form == "packed":
        inputs = pack_padded_sequence(x, torch.tensor([6, 2, 5, 1]), enforce_sorted=False)

    def everything() -> list[Tensor]:
        found = torch.utils._pytree.tree_leaves(layer(inputs, seed=3, **given))
        masks = zo.masks(BOTH, 3, STEPS, BATCH, HIDDEN)
        return [
            *found,
            *torch.autograd.grad(found[0].sum(), list(layer.parameters())),
            *masks.values(),
        ]

    rows._same.cache_clear(), rows._multiples.cache_clear()
    with torch.device("meta"):
        there = everything()
    for one, other in zip(there, everything(), strict=True):
        assert torch.equal(one, other)


# --- torch.compile --------------------------------------------------------------------------------


class Tagger(nn.Module):
    """An embedding, all three layers and a linear layer, as people build them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, INPUT)
        self.lstm = zo.LSTM(INPUT, 4, 2, bidirectional=True, dropout=0.2, noise=BOTH)
        self.gru = zo.GRU(
            8, HIDDEN, noise=[zo.Zoneout(hidden=0.3), zo.VariationalDropout(input=0.1, hidden=0.2)]
        )
        self.rnn = zo.RNN(HIDDEN, 6, noise=zo.Zoneout(hidden=0.3))
        self.head = nn.Linear(6, 7)

    def forward(self, ids: Tensor, seed: Tensor) -> Tensor:
        y, _ = self.lstm(self.embedding(ids), seed=seed)
        y, _ = self.gru(y, seed=zo.fold(seed, 1))
        y, _ = self.rnn(y, seed=zo.fold(seed, 2))
        return self.head(y)


def forward_backward(model: nn.Module, call: Any, *args: Any, **options: Any) -> list[Tensor]:
    """The output and every gradient."""
    model.zero_grad()
    y = call(*args, **options)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@inductor
def test_inductor_forward_and_backward():
    """A compiled model, as one graph, draws other masks or has other gradients than the eager
    one.
    """
    model, ids = Tagger(), torch.randint(7, (STEPS, BATCH))
    compiled = torch.compile(model, fullgraph=True)
    seed = torch.tensor(3)
    close(forward_backward(model, compiled, ids, seed), forward_backward(model, model, ids, seed))
    once = graphs()
    model.lstm.noise = zo.Zoneout(cell=0.1, hidden=0.9)
    close(forward_backward(model, compiled, ids, seed), forward_backward(model, model, ids, seed))
    assert graphs() == once, "other numbers in layer.noise have recompiled the model"


class Promised(TorchDispatchMode):
    """Sees whether our operators give what a compiler is told that they give."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        if operator.namespace == "zoneout":
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                given = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, args)
                told = operator(*given, **(kwargs or {}))
            self.seen = getattr(self, "seen", 0) + 1
            for real, fake in zip(
                *map(torch.utils._pytree.tree_leaves, (found, told)), strict=True
            ):
                assert (real.shape, real.dtype, real.device) == (
                    fake.shape,
                    fake.dtype,
                    fake.device,
                )
                assert real.stride() == fake.stride() or real.numel() == 0
        return found


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch looks at it itself
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("features", [None, 7, 300], ids=["dense", "few one-hot", "many one-hot"])
@pytest.mark.parametrize(
    "norm", [None, "layer", zo.RecurrentBatchNorm(STEPS)], ids=["plain", "layer", "batch"]
)
@pytest.mark.parametrize("kind", [zo.LSTM, zo.GRU])
def test_what_a_compiler_is_told(kind, norm, features, device):
    """A compiler that takes our word for how a derivative lies reads another one."""
    for options in (
        {},
        {"bidirectional": True},
        {"recompute": True},
        {"learn_initial_state": True},
    ):
        layer = kind(
            features or INPUT,
            HIDDEN,
            noise=zo.Zoneout(hidden=0.1),
            norm=norm,
            device=device,
            **options,
        )
        x = torch.randn(BATCH, STEPS, INPUT, device=device).transpose(0, 1).requires_grad_()
        x = x if features is None else torch.randint(features, (STEPS, BATCH), device=device)
        call = (
            {"lengths": torch.tensor([6, 3, 1, 5], device=device)} if "recompute" in options else {}
        )
        with Promised() as mode:
            layer(x, seed=1, **call)[0].sum().backward()
        assert mode.seen >= 2


@inductor
def test_inductor_of_many_one_hot_features():
    """The derivative of a large table lies otherwise than the compiler has been told."""
    layer, numbers = zo.LSTM(300, HIDDEN), torch.randint(300, (STEPS, BATCH))
    compiled = torch.compile(layer, fullgraph=True)
    close(
        *(
            forward_backward(layer, lambda x, call=call: call(x)[0], numbers)
            for call in (compiled, layer)
        )
    )


@inductor
def test_inductor_follows_manual_seed():
    """Without a seed, torch.manual_seed gives a compiled model other masks than an eager one."""
    layer = zo.LSTM(INPUT, HIDDEN, noise=BOTH)
    x = x_of()
    compiled = torch.compile(lambda x: layer(x)[0], fullgraph=True)
    results = []
    for call in (compiled, lambda x: layer(x)[0]):
        torch.manual_seed(5)
        results.append([forward_backward(layer, call, x), forward_backward(layer, call, x)])
    close(*results)
    assert not torch.equal(results[0][0][0], results[0][1][0]), (
        "two calls have drawn the same masks"
    )


@pytest.fixture
def both_ways():
    """A small layer that has everything, its outputs alone."""
    layer = zo.LSTM(INPUT, HIDDEN, bidirectional=True, noise=BOTH)
    return layer, lambda x, **call: layer(x, **call)[0]


def test_compiled_lengths_and_resets(both_ways):
    """Lengths in a tensor, or resets, break the graph or are forgotten in it."""
    layer, run = both_ways
    compiled, x = torch.compile(run, fullgraph=True, backend="aot_eager"), x_of()
    for lengths in ([6, 3, 0, 1], [2, 2, 5, 6]):
        call = dict(
            seed=torch.tensor(3),
            lengths=torch.tensor(lengths),
            resets=torch.rand(STEPS, BATCH) < 0.3,
        )
        close(forward_backward(layer, compiled, x, **call), forward_backward(layer, run, x, **call))
    assert graphs() == 1, "other lengths have recompiled the model"


@pytest.mark.parametrize("backend", [None, "reference"], ids=["as it is", "padded"])
def test_compiled_packed_input(backend):
    """A packed batch breaks the graph, or is run in another order in it."""
    noise = [BOTH, zo.VariationalDropout(input=0.1, hidden=0.2)]
    layer = zo.LSTM(INPUT, HIDDEN, 2, bidirectional=True, dropout=0.2, noise=noise, backend=backend)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    packed = pack_padded_sequence(x_of(), torch.tensor([3, 6, 1, 2]), enforce_sorted=False)
    call = dict(seed=torch.tensor(3), resets=torch.rand(STEPS, BATCH) < 0.3)
    results = [
        forward_backward(
            layer, lambda *args, run=run, **call: run(*args, **call)[0].data, packed, **call
        )
        for run in (compiled, layer)
    ]
    close(*results)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's vmap, of index_copy_
def test_transforms_of_packed_input():
    """Where packed rows are padded, forward mode, vmap or a second derivative stops at the way
    there or back.
    """
    layer = zo.LSTM(INPUT, HIDDEN, noise=BOTH, backend="reference", dtype=torch.float64)
    packed = pack_padded_sequence(x_of().double(), torch.tensor([3, 6, 1, 2]), enforce_sorted=False)

    def outputs(rows: Tensor) -> Tensor:
        return layer(packed._replace(data=rows), seed=3)[0].data

    rows = packed.data.clone().requires_grad_()
    assert torch.autograd.gradcheck(outputs, (rows,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(outputs, (rows,))
    both = torch.func.vmap(outputs)(torch.stack((rows, 2 * rows)))
    assert torch.allclose(both, torch.stack((outputs(rows), outputs(2 * rows))))


def test_compiled_for_any_batch(both_ways):
    """Every batch size compiles the model anew, or one is computed with the size of another."""
    layer, run = both_ways
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (4, 5, 9):
        x, seed = x_of(batch), torch.tensor(batch)
        close(
            forward_backward(layer, compiled, x, seed=seed),
            forward_backward(layer, run, x, seed=seed),
        )
    assert graphs() == 1


def test_compiled_for_any_seed():
    """A seed given as a number breaks the graph, or every seed and first step compiles the model
    anew.
    """
    layer, x = zo.GRU(INPUT, HIDDEN, noise=zo.Zoneout(hidden=0.3)), x_of()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in (3, 4, -5, 2**40):
        close(compiled(x, seed=seed), layer(x, seed=seed))
    for first in (7, 8, 100):
        close(compiled(x, seed=3, first_step=first), layer(x, seed=3, first_step=first))
    assert graphs() <= 3  # for one number, for any, and for any first step


def test_compiled_decoding_loop():
    """A cell inside a compiled loop, fed with its own outputs, goes another way than the eager
    one.
    """
    cell = zo.LSTMCell(HIDDEN, HIDDEN, noise=BOTH)

    def decode(h: Tensor, c: Tensor) -> Tensor:
        outputs, state = [], (h, c)
        for t in range(4):
            state = cell(state[0], state, seed=7, step=t)
            outputs.append(state[0])
        return torch.stack(outputs)

    h, c = torch.randn(2, BATCH, HIDDEN).unbind()
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    close(forward_backward(cell, compiled, h, c), forward_backward(cell, decode, h, c))


def test_compiled_state_dict_goes_both_ways(tmp_path):
    """A checkpoint of a compiled model does not fit the plain one."""
    compiled = torch.compile(zo.GRU(INPUT, HIDDEN, noise=zo.Zoneout(hidden=0.1)), backend="eager")
    compiled(x_of())
    torch.save(compiled.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt")
    fresh = torch.compile(zo.GRU(INPUT, HIDDEN, noise=zo.Zoneout(hidden=0.1)), backend="eager")
    fresh.load_state_dict(state)
    nn.GRU(INPUT, HIDDEN).load_state_dict(
        {name.removeprefix("_orig_mod."): value for name, value in state.items()}
    )
    x = x_of()
    close(fresh(x, seed=3)[0], compiled(x, seed=3)[0])


# --- autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [zo.LSTM, zo.GRU, zo.RNN])
def test_autocast(make):
    """Autocast does nothing, loses the result in rounding, or leaves the parameters without
    gradients.
    """
    layer, x = make(INPUT, 33, noise=zo.Zoneout(hidden=0.2)), x_of()
    want, _ = layer(x, seed=3)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x, seed=3)
    dtype = (
        torch.float32 if make is zo.GRU else torch.bfloat16
    )  # a GRU keeps its state's, as torch's does
    assert y.dtype == (state[0] if make is zo.LSTM else state).dtype == dtype
    assert (y.float() - want).norm() <= 0.02 * want.norm()
    y.float().square().sum().backward()
    got = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    want.square().sum().backward()
    for name, p in layer.named_parameters():
        assert got[name].dtype == torch.float32
        assert (got[name] - p.grad).norm() <= 0.05 * p.grad.norm(), name


def test_fold_of_an_int_in_a_compiled_model():
    """A new seed is read back from a tensor, which a compiler cannot."""
    layer, x = zo.LSTM(INPUT, HIDDEN, noise=BOTH), x_of()
    compiled = torch.compile(
        lambda seed, n: layer(x, seed=zo.fold(seed, n))[0], fullgraph=True, backend="eager"
    )
    for n in range(3):
        close(compiled(5, n), layer(x, seed=zo.fold(5, n))[0])


# --- export ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_export(training, tmp_path):
    """An exported program, saved and loaded, gives something else than the model did."""
    layer = zo.LSTM(
        INPUT, HIDDEN, 2, bidirectional=True, dropout=0.3, noise=BOTH, norm="layer"
    ).train(training)
    call = {"seed": torch.tensor(3)} if training else {}
    program = torch.export.export(layer, (x_of(),), call)
    torch.export.save(program, tmp_path / "layer.pt2")
    x = x_of()
    close(torch.export.load(tmp_path / "layer.pt2").module()(x, **call), layer(x, **call))


@inductor
@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")
@pytest.mark.parametrize("noise", [None, BOTH], ids=["plain", "zoneout"])
def test_package(noise, tmp_path):
    """AOTInductor passes None in the place of an empty list."""
    layer, x = zo.GRU(INPUT, HIDDEN, noise=noise and zo.Zoneout(hidden=0.2)).eval(), x_of()
    program = torch.export.export(layer, (x,))
    where = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "layer.pt2")
    )
    close(torch._inductor.aoti_load_package(where)(x), layer(x))


def test_export_of_packed_input():
    """A program is tied to the lengths, or the order of the rows, that it was exported with."""
    layer = zo.LSTM(INPUT, HIDDEN, bidirectional=True, noise=BOTH).eval()
    batches = [
        pack_padded_sequence(x_of(), torch.tensor(lengths), enforce_sorted=False)
        for lengths in ([3, 6, 1, 2], [2, 1, 6, 3])
    ]
    program = torch.export.export(layer, (batches[0],)).module()
    for packed in batches:
        (got, state), (want, ended) = program(packed), layer(packed)
        close((got.data, state), (want.data, ended))


def test_export_of_sorted_packed_input():
    """Rows that were sorted before they were packed cannot be exported: their number is read
    from a tensor.
    """
    layer = zo.GRU(INPUT, HIDDEN, 2, noise=zo.Zoneout(hidden=0.3)).eval()
    batches = [
        pack_padded_sequence(x_of(), torch.tensor(lengths))
        for lengths in ([6, 3, 2, 1], [6, 4, 1, 1])
    ]
    program = torch.export.export(layer, (batches[0],)).module()
    for packed in batches:
        (got, state), (want, ended) = program(packed), layer(packed)
        close((got.data, state), (want.data, ended))


def test_export_for_any_batch_and_time():
    """A program is tied to the number of steps or rows that it was exported with."""
    layer = zo.LSTM(INPUT, HIDDEN, noise=BOTH, norm=zo.RecurrentBatchNorm(4)).eval()
    named = {0: torch.export.Dim("time"), 1: torch.export.Dim("batch")}
    for dynamic in ({0: DYNAMIC, 1: DYNAMIC}, named):
        program = torch.export.export(layer, (x_of(),), dynamic_shapes={"input": dynamic}).module()
        for steps, batch in ((STEPS, BATCH), (9, 2), (3, 7)):
            x = torch.randn(steps, batch, INPUT)
            close(program(x), layer(x))


def test_export_of_a_cell_for_any_batch():
    """A decoder's step is tied to the number of rows that it was exported with."""
    cell = zo.GRUCell(INPUT, HIDDEN, noise=zo.Zoneout(hidden=0.3)).eval()
    rows = {0: DYNAMIC}
    given = torch.randn(BATCH, INPUT), torch.randn(BATCH, HIDDEN)
    step = torch.export.export(cell, given, dynamic_shapes={"input": rows, "hx": rows}).module()
    x, h = torch.randn(7, INPUT), torch.randn(7, HIDDEN)
    close(step(x, h), cell(x, h))


# --- ONNX -----------------------------------------------------------------------------------------

MISSING = [
    name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None
]
needs_onnx = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
# Torch's exporter and the packages behind it warn about each other's future.
quiet = pytest.mark.filterwarnings("ignore")
LENGTHS, RESETS = (
    torch.tensor([6, 0, 3, 1]),
    torch.rand(STEPS, BATCH, generator=torch.Generator().manual_seed(1)) < 0.3,
)
TWO_WAYS: dict[str, Any] = dict(num_layers=2, bidirectional=True)
ONNX: dict[str, Any] = {
    "lstm": (lambda: zo.LSTM(INPUT, HIDDEN, noise=BOTH, **TWO_WAYS), {}),
    "projection": (
        lambda: zo.LSTM(
            INPUT,
            HIDDEN,
            proj_size=2,
            norm="layer",
            bidirectional=True,
            noise=[
                zo.RecurrentDropout(rate=0.3, hold_output_gate=True),
                zo.Zoneout(cell=0.5, hidden=torch.linspace(0, 1, 2)),
            ],
        ),
        {},
    ),
    "everything": (
        lambda: zo.LSTM(
            INPUT,
            HIDDEN,
            norm=zo.RecurrentBatchNorm(4),
            learn_initial_state=True,
            bidirectional=True,
            noise=[
                zo.StateDropout(cell=0.4),
                zo.Zoneout(hidden=0.5),
                zo.RecurrentDropout(rate=0.3, hold_output_gate=True),
                zo.VariationalDropout(input=0.1, hidden=0.1),
                zo.WeightDrop(rate=0.2),
            ],
        ),
        dict(lengths=LENGTHS, resets=RESETS),
    ),
    "gru": (
        lambda: zo.GRU(
            INPUT,
            HIDDEN,
            norm=zo.RecurrentBatchNorm(4, at_eval="batch"),
            bidirectional=True,
            noise=[zo.RecurrentDropout(rate=0.3), zo.Zoneout(hidden=0.5)],
        ),
        dict(lengths=LENGTHS),
    ),
    "rnn": (
        lambda: zo.RNN(INPUT, HIDDEN, bidirectional=True, noise=zo.Zoneout(hidden=0.5)),
        dict(resets=RESETS),
    ),
    "relu": (
        lambda: zo.RNN(
            INPUT, HIDDEN, nonlinearity="relu", bias=False, noise=zo.StateDropout(hidden=0.5)
        ),
        {},
    ),
}


def in_onnxruntime(path: Path, *values: Tensor) -> list[Tensor]:
    """What onnxruntime gives."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = [given.name for given in session.get_inputs()]
    return [
        torch.from_numpy(v)
        for v in session.run(None, {n: v.numpy() for n, v in zip(inputs, values, strict=True)})
    ]


def unsettled(layer: nn.Module) -> nn.Module:
    """The layer in evaluation mode, with scales and statistics that are not those it starts
    with.
    """
    for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
        if name.startswith(("var_", "norm_ih", "norm_hh")):
            nn.init.uniform_(value, 0.5, 1.5)
        elif name.startswith(("mean_", "norm_cell", "h0", "c0")):
            nn.init.normal_(value)
    return layer.eval()


@needs_onnx
@quiet
@pytest.mark.parametrize("name", ONNX)
def test_onnx(name, tmp_path):
    """A model in ONNX computes something else than in torch."""
    from zoneout.onnx import export

    make, call = ONNX[name]
    layer, x = unsettled(make()), x_of()
    export(layer, (x,), tmp_path / "layer.onnx", kwargs=call, verbose=False)
    close(in_onnxruntime(tmp_path / "layer.onnx", x, *call.values()), layer(x, **call))


@needs_onnx
@quiet
def test_onnx_for_any_batch_and_time(tmp_path):
    """A model in ONNX is tied to the sizes that it was exported with."""
    from zoneout.onnx import translations

    model = nn.ModuleDict({"layer": zo.LSTM(INPUT, HIDDEN, noise=BOTH, batch_first=True)}).eval()
    model.forward = lambda x: model["layer"](x)[0]
    torch.onnx.export(
        model, (torch.randn(BATCH, STEPS, INPUT),), tmp_path / "model.onnx", dynamo=True,
        verbose=False, custom_translation_table=translations(),
        dynamic_shapes=({0: DYNAMIC, 1: DYNAMIC},),
    )  # fmt: skip
    for batch, steps in ((2, 9), (1, 1), (7, 3)):
        x = torch.randn(batch, steps, INPUT)
        close(in_onnxruntime(tmp_path / "model.onnx", x), [model.forward(x)])


@needs_onnx
def test_onnx_refuses_what_is_drawn(tmp_path):
    """A model that draws is exported as if it did not, or refused with words that help nobody."""
    from zoneout.onnx import export

    layer = zo.GRU(INPUT, HIDDEN, noise=zo.Zoneout(hidden=0.1, at_eval="sample"))
    with pytest.raises(
        ValueError, match=r"model: ZoneoutCell is in training mode.*model\.eval\(\)"
    ):
        export(zo.ZoneoutCell(nn.GRUCell(INPUT, HIDDEN), 0.2), (torch.randn(BATCH, INPUT),))
    with pytest.raises(ValueError, match=r"model: GRU is in training mode.*model\.eval\(\)"):
        export(layer, (x_of(),), tmp_path / "layer.onnx")
    with pytest.raises(ValueError, match="model: 0 draws its hidden noise in evaluation too"):
        export(nn.Sequential(layer).eval(), (x_of(),), tmp_path / "layer.onnx")


def test_onnx_says_what_is_missing(monkeypatch):
    """Whoever lacks the packages gets a bare ModuleNotFoundError."""
    from zoneout.onnx import translations

    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"pip install 'zoneout\[onnx\]' \(in a clone: "):
        translations()


# --- several processes ----------------------------------------------------------------------------


class Both(nn.Module):
    """Two layers, one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, **call: Any) -> tuple[Tensor, Any]:
        for layer in self.layers:
            x, state = layer(x, **call)
        return x, state


def ddp_case() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """The same model, inputs, targets and example ids in every process."""
    torch.manual_seed(0)
    noise = [BOTH, zo.VariationalDropout(input=0.1, hidden=0.2)]
    layers = (
        zo.LSTM(INPUT, HIDDEN, 2, dropout=0.3, noise=noise),
        zo.Recurrent(zo.cells.peephole_lstm, HIDDEN, HIDDEN, noise=BOTH),
    )
    return Both(*layers), x_of(), torch.randn(STEPS, BATCH, HIDDEN), torch.tensor([10, 7, 30, 2])


def ddp_worker(rank: int, folder: Path) -> None:
    """One of two processes: its half of the batch, and the gradients that all have agreed on."""
    limit = datetime.timedelta(seconds=60)
    torch.distributed.init_process_group(
        "gloo", f"file://{folder / 'rendezvous'}", timeout=limit, rank=rank, world_size=2
    )
    layer, x, target, ids = ddp_case()
    mine = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
    model = nn.parallel.DistributedDataParallel(layer)
    y, _ = model(x[:, mine], seed=3, examples=ids[mine])
    (y - target[:, mine]).square().mean().backward()
    torch.save((y.detach(), [p.grad for p in layer.parameters()]), folder / f"{rank}.pt")
    torch.distributed.barrier()  # gloo may abort where the other process has gone first
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
def test_two_processes_are_as_one(tmp_path):
    """With example ids, two processes draw other masks or find other gradients than one with the
    whole batch.
    """
    paths = os.pathsep.join([str(Path(zo.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": paths,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, str(tmp_path)]
    workers = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    try:
        for worker in workers:
            _, said = worker.communicate(timeout=120)
            assert worker.returncode == 0, said.decode()
    finally:
        for worker in workers:
            worker.kill()
    layer, x, target, ids = ddp_case()
    y, _ = layer(x, seed=3, examples=ids)
    (y - target).square().mean().backward()
    halves = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    close(torch.cat([half for half, _ in halves], dim=1), y)
    for _, grads in halves:
        close(grads, [p.grad for p in layer.parameters()])


# --- torch.func -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", FUSED)
def test_functional_call_and_grad(backend):
    """Parameters given from outside are not those that are used, or torch.func.grad differs from
    backward().
    """
    layer, other = (
        zo.LSTM(INPUT, HIDDEN, noise=BOTH, norm="layer", backend=backend) for _ in range(2)
    )
    x = x_of()
    given = dict(other.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, parameters, (x,), {"seed": 3})[0].square().sum()

    want = other(x, seed=3)[0].square().sum()
    close(loss(given, x), want)
    want.backward()
    close(
        grad(loss)({k: v.detach() for k, v in given.items()}, x),
        {k: v.grad for k, v in given.items()},
    )


@pytest.mark.parametrize("backend", FUSED)
def test_many_derivatives_at_once(backend):
    """A Jacobian taken with `is_grads_batched` fails, or is not that of one derivative after
    another.
    """
    layer, x = zo.LSTM(INPUT, HIDDEN, noise=BOTH, backend=backend), x_of()[:2]

    def ended(x: Tensor) -> Tensor:
        y, (_, c) = layer(x, seed=3)
        return y[-1] + c[0]

    jacobian = torch.autograd.functional.jacobian
    close(jacobian(ended, x, vectorize=True), jacobian(ended, x))


def test_weights_given_to_a_layer_of_no_device():
    """A layer made on the meta device gets its weights and not its rates."""
    whole = zo.LSTM(INPUT, HIDDEN, noise=BOTH)
    with torch.device("meta"):
        layer = zo.LSTM(INPUT, HIDDEN, noise=BOTH)
    layer.load_state_dict(whole.state_dict(), assign=True)
    x = x_of()
    close(layer(x, seed=3)[0], whole(x, seed=3)[0])


@pytest.mark.parametrize("backend", FUSED)
def test_vmap_over_models(backend):
    """An ensemble run by vmap gives other outputs or gradients than its models one by one."""
    models = [
        zo.GRU(INPUT, HIDDEN, noise=zo.Zoneout(hidden=0.3), backend=backend) for _ in range(3)
    ]
    x = x_of()
    parameters, buffers = stack_module_state(models)

    def loss(parameters: Any, buffers: Any) -> tuple[Tensor, Tensor]:
        y, _ = functional_call(models[0], (parameters, buffers), (x,), {"seed": 3})
        return y.square().sum(), y

    grads, y = vmap(grad(loss, has_aux=True))(parameters, buffers)
    for k, model in enumerate(models):
        want, _ = model(x, seed=3)
        want.square().sum().backward()
        close(y[k], want)
        close([g[k] for g in grads.values()], [p.grad for p in model.parameters()])
    together = grad(lambda p: vmap(loss)(p, buffers)[0].sum())(parameters)
    close(together, grads)


@pytest.mark.parametrize("backend", FUSED)
def test_gradients_of_each_example(backend):
    """Per-example gradients, as differential privacy needs them, are not those of the examples
    alone.
    """
    layer, x = zo.LSTM(INPUT, HIDDEN, noise=BOTH, backend=backend), x_of()
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, example: Tensor) -> Tensor:
        call = {"seed": 3, "examples": example[None]}
        return functional_call(layer, parameters, (x[:, None],), call)[0].square().sum()

    each = vmap(grad(loss), in_dims=(None, 1, 0))(parameters, x, torch.arange(BATCH))
    layer(x, seed=3)[0].square().sum().backward()
    close(
        {name: g.sum(0) for name, g in each.items()},
        {name: p.grad for name, p in layer.named_parameters()},
    )


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("backend", FUSED)
def test_vmap_without_a_seed(backend, randomness):
    """Nobody may draw afresh under vmap, its rows share masks that are to differ, or
    torch.manual_seed gives others.
    """
    layer, x = (
        zo.GRU(INPUT, HIDDEN, noise=zo.Zoneout(hidden=0.5), backend=backend),
        x_of()[:, 0].expand(3, -1, -1),
    )
    for run in (lambda x: layer(x)[0], lambda x: zo.zoneout(x, -x, 0.5)):
        torch.manual_seed(0)
        got = vmap(run, randomness=randomness)(x)
        torch.manual_seed(0)
        want = [run(row) for row in x]
        close(got, torch.stack(want if randomness == "different" else want[:1] * 3))
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(layer)(x)


def test_torch_func_draws_what_eager_mode_draws():
    """torch.func.grad, after the same torch.manual_seed, gives the gradients of other masks."""
    layer, x = zo.LSTM(INPUT, HIDDEN, noise=BOTH), x_of()
    for seed in range(8):
        torch.manual_seed(seed)
        got = grad(lambda x: layer(x)[0].sum())(x)
        torch.manual_seed(seed)
        close(got, torch.autograd.grad(layer(x.requires_grad_())[0].sum(), x)[0])


@pytest.mark.parametrize("backend", FUSED)
def test_vmap_over_numbers(backend):
    """What checks numbers and lengths would look at those of a whole batch of calls, which torch
    refuses.
    """
    layer = zo.LSTM(INPUT, HIDDEN, noise=BOTH, backend=backend)
    numbers = torch.randint(0, INPUT, (3, STEPS, BATCH))
    lengths = torch.randint(0, STEPS + 1, (3, BATCH))
    got = vmap(lambda x, ends: layer(x, lengths=ends, seed=3)[0])(numbers, lengths)
    close(
        got, torch.stack([layer(x, lengths=ends, seed=3)[0] for x, ends in zip(numbers, lengths)])
    )


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # the compiler's own look at it
def test_forward_mode():
    """Forward mode is wrong in the reference, or silently wrong in a fused backend, where it is
    not there.
    """
    layer = zo.LSTM(INPUT, HIDDEN, noise=BOTH, backend="reference", dtype=torch.float64)
    x, direction = x_of(dtype=torch.float64), x_of(dtype=torch.float64)
    _, tangent = jvp(lambda x: layer(x, seed=3)[0], (x,), (direction,))
    step = 1e-6 * direction
    slope = (layer(x + step, seed=3)[0] - layer(x - step, seed=3)[0]) / 2e-6
    assert (tangent - slope).norm() <= 1e-7 * slope.norm()

    fused = zo.LSTM(INPUT, HIDDEN, noise=BOTH, backend="cpu", dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"forward-mode .* backend='reference'"):
        jvp(lambda x: fused(x, seed=3)[0], (x,), (direction,))
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="backend='reference'"),
    ):
        fused(torch.autograd.forward_ad.make_dual(x, direction), seed=3)

    def tangent_of(x: Tensor) -> Tensor:
        return jvp(lambda x: fused(x, seed=torch.tensor(3))[0], (x,), (direction,))[1]

    with pytest.raises(NotImplementedError, match="backend='reference'"):
        torch.compile(tangent_of, backend="aot_eager")(x)


@pytest.mark.parametrize("make", [zo.LSTM, zo.GRU, zo.RNN])
def test_second_derivative_of_the_reference(make):
    """A second derivative through the reference (gradient penalties) differs from finite
    differences.
    """
    layer = make(2, 2, noise=zo.Zoneout(hidden=0.4), backend="reference", dtype=torch.float64)
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    names, values = zip(*layer.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, values)), (x,), {"seed": 3})[0]

    assert torch.autograd.gradgradcheck(run, (x, *values), fast_mode=True)


def test_func_second_derivative_is_refused():
    """torch.func's second derivative through a fused layer is wrong, or refused without saying
    what to do.
    """
    layer = zo.GRU(INPUT, HIDDEN, backend="cpu")
    slope = grad(lambda x: layer(x)[0].square().sum())
    with pytest.raises(RuntimeError, match=r"second derivative .* backend='reference'"):
        grad(lambda x: slope(x).sum())(x_of())


# --- determinism and devices ----------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True], ids=["as usual", "deterministic algorithms"])
@pytest.mark.parametrize("backend", FUSED)
def test_same_seed_same_bits(backend, strict):
    """One seed gives two results, or a layer refuses torch.use_deterministic_algorithms."""
    layer = zo.LSTM(
        INPUT, HIDDEN, 2, bidirectional=True, dropout=0.2, noise=BOTH, norm="layer", backend=backend
    )
    x, lengths = x_of(), torch.tensor([6, 2, 0, 4])
    torch.use_deterministic_algorithms(strict)
    try:
        twice = [
            forward_backward(layer, lambda x: layer(x, lengths=lengths, seed=3)[0], x.clone())
            for _ in range(2)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))


def test_a_device_without_a_backend_runs_the_reference(monkeypatch):
    """On a device that we have no kernels for (mps, xpu) the layers do not run."""
    ran = []

    def watched(runs: list[ops.Run]) -> list[ops.Result]:
        ran.append(runs[0].x.device.type)
        return reference(runs)

    reference = ops.BACKENDS["reference"]
    monkeypatch.setitem(ops.BACKENDS, "reference", watched)
    y, _ = zo.GRU(INPUT, HIDDEN, noise=zo.Zoneout(hidden=0.1), device="meta")(x_of(device="meta"))
    assert ran == ["meta"] and y.shape == (STEPS, BATCH, HIDDEN)
    layer, x = zo.GRU(INPUT, HIDDEN, noise=zo.Zoneout(hidden=0.1)), x_of()
    want = layer(x, seed=3)
    monkeypatch.delitem(ops.BACKENDS, "cpu")
    close(layer(x, seed=3), want)
    assert ran == ["meta", "cpu"]


# --- habits of training loops ---------------------------------------------------------------------


def test_checkpointing_draws_the_same_masks_again():
    """What is computed a second time on the way back is computed with other masks."""
    layer, x = zo.LSTM(INPUT, HIDDEN, 2, dropout=0.2, noise=BOTH), x_of(requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return layer(x)[0]

    results = []
    for call in (run, lambda x: torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)):
        torch.manual_seed(1)
        results.append(forward_backward(layer, call, x))
    close(*results)


def test_parametrized_weight():
    """A weight made by torch.nn.utils.parametrize is not the one that runs, or gets no gradient."""
    layer, x = zo.GRU(INPUT, HIDDEN, noise=zo.Zoneout(hidden=0.3)), x_of()
    plain = copy.deepcopy(layer)

    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    nn.utils.parametrize.register_parametrization(layer, "weight_hh_l0", Double())
    with torch.no_grad():
        plain.weight_hh_l0 *= 2
    (got, _), (want, _) = layer(x, seed=3), plain(x, seed=3)
    close(got, want)
    got.sum().backward(), want.sum().backward()
    close(layer.parametrizations.weight_hh_l0.original.grad, 2 * plain.weight_hh_l0.grad)


def test_gradient_accumulation():
    """A batch in two parts, with example ids, does not add up to the gradients of the whole."""
    layer, x = zo.RNN(INPUT, HIDDEN, noise=zo.Zoneout(hidden=0.3)), x_of()
    layer(x, seed=3)[0].square().sum().backward()
    whole = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    for start in (0, 2):
        layer(x[:, start : start + 2], seed=3, examples=start)[0].square().sum().backward()
    close([p.grad for p in layer.parameters()], whole)


@pytest.mark.parametrize("model", [zo.LSTM(INPUT, HIDDEN), zo.GRUCell(INPUT, HIDDEN)], ids=str)
def test_fx_says_what_to_do(model):
    """Someone who traces a model symbolically would be told of a Proxy, and nothing about
    leaves.
    """
    with pytest.raises(
        TypeError,
        match=r"got Proxy; make the layer a leaf of the tracer, as docs/ecosystem\.md shows",
    ):
        torch.fx.symbolic_trace(model)


def test_jit():
    """A traced layer gives other numbers than the layer, for this shape or another one, a trace
    warns of zoneout's own checks, or scripting fails with words that help nobody.
    """
    layer, x = zo.LSTM(INPUT, HIDDEN, 2, noise=BOTH).eval(), x_of()
    traced = torch.jit.trace(layer, (x,))
    close(traced(x), layer(x))
    close(traced(x[:2, :1]), layer(x[:2, :1]))
    cell = zo.GRUCell(3, 4)
    torch.jit.trace(cell, (torch.randn(2, 3),))
    with pytest.raises(NotImplementedError, match=r"use torch\.export"):
        torch.jit.script(layer)
    for cell in (zo.GRUCell(3, 4), zo.ZoneoutCell(torch.nn.GRUCell(3, 4), 0.1)):
        with pytest.raises(NotImplementedError, match=r"use torch\.export"):
            torch.jit.script(torch.nn.Sequential(cell))


if __name__ == "__main__":
    ddp_worker(int(sys.argv[2]), Path(sys.argv[1]))


def test_averages_of_weights_with_rates_that_change():
    """An average of weights cannot be taken where a rate becomes zero, or no longer is."""
    layer = zo.LSTM(3, 4, noise=zo.Zoneout(cell=0.5, hidden=0.05))
    average = torch.optim.swa_utils.AveragedModel(layer)
    for cell in (0.0, 0.1, 0.2):
        layer.noise = zo.Zoneout(cell=cell, hidden=0.05)
        average.update_parameters(layer)
    average.module.noise = layer.noise
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(average.eval()(x)[0], layer.eval()(x)[0])


def test_other_rates_of_a_wrapped_cell_or_of_the_bare_rule_compile_nothing_again():
    """A schedule would end in torch's limit of graphs, or compile a model at every step."""
    torch._dynamo.reset()
    x = torch.randn(BATCH, 6)
    cell = zo.ZoneoutCell(nn.LSTMCell(6, 9), rates=(0.1, 0.2))
    compiled = torch.compile(cell, fullgraph=True, backend="aot_eager")
    rule = torch.compile(
        lambda new, old, rate: zo.zoneout(new, old, rate, seed=3),
        fullgraph=True,
        backend="aot_eager",
    )
    counts = []
    for rate in (0.1, 0.2, 0.3):
        cell.rates = (rate, 0.5)
        close(compiled(x, seed=3, step=1), cell(x, seed=3, step=1))
        for own in (torch.tensor(rate), torch.full((6,), rate), rate):
            close([rule(x, 2 * x, own)], [zo.zoneout(x, 2 * x, own, seed=3)])
        counts.append(graphs())
    assert counts[2] - counts[1] <= 1, (
        "only a number given as such is compiled in, as torch does with any"
    )


@pytest.mark.parametrize("kind", [zo.LSTM, zo.GRU, zo.RNN])
def test_outputs_changed_in_place(kind):
    """An error that names neither the layer nor what is to be done."""
    y, _ = kind(3, 4)(torch.randn(5, 2, 3))
    with pytest.raises(RuntimeError, match=r"zoneout layer have been changed in place.*y = y \+ x"):
        y.relu_().sum().backward()


# --- tensors that wrap others, and sharding -------------------------------------------------------


@pytest.mark.parametrize("what", ["input", "weights", "state"])
@pytest.mark.parametrize("kind", [zo.LSTM, zo.GRU])
def test_tensors_that_wrap_others(kind, what):
    """A loop in C reads from address 0, or memory that is nobody's."""
    layer, x = kind(INPUT, HIDDEN, noise=zo.Zoneout(hidden=0.3)), x_of()
    h = torch.randn(1, BATCH, HIDDEN)
    state = (h, h.clone()) if kind is zo.LSTM else h
    want = layer(x, state, seed=1)
    if what == "weights":
        for name, weight in list(layer.named_parameters()):
            del layer._parameters[name]
            setattr(layer, name, Wrapped(weight.detach()))
    x = Wrapped(x) if what == "input" else x
    state = torch.utils._pytree.tree_map_only(Tensor, Wrapped, state) if what == "state" else state
    got = layer(x, state, seed=1)
    close(torch.utils._pytree.tree_map_only(Wrapped, lambda v: v.inner, got), want)


@pytest.fixture
def one_process():
    """A group of one process."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sharded_models(one_process):
    """FSDP goes on with the modules that were replaced: what is trained is not what is run; or a
    schedule ends it.
    """
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    cpu = torch.device("cpu")
    said = []
    for old in (True, False):
        for make, change in ((nn.LSTM, lambda m: zo.convert(m, BOTH, report=said.append)),
                             (zo.LSTM, lambda m: zo.revert(m, report=said.append))):  # fmt: skip
            model = nn.Sequential(make(INPUT, HIDDEN))
            whole = fsdp.FullyShardedDataParallel(model, device_id=cpu, use_orig_params=old)
            change(whole)
            assert type(model[0]) is make and "left alone" in said[-1]
    model = nn.Sequential(zo.LSTM(INPUT, HIDDEN, noise=BOTH))
    whole = fsdp.FullyShardedDataParallel(model, device_id=cpu)
    model[0].noise = zo.Zoneout(cell=0.1, hidden=0.1)  # a schedule
    whole(x_of())[0].sum().backward()
    model = nn.Sequential(nn.LSTM(INPUT, HIDDEN))
    fsdp.fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    zo.convert(model, BOTH, report=said.append)
    assert type(model[0]) is nn.LSTM and "sharding" in said[-1]
    zo.convert(
        model[0], BOTH, report=said.append
    )  # its parent is not to be seen, its parameters are
    assert "left alone" in said[-1]
