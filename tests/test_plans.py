"""A plan repeats a pass to the bit; what it cannot repeat, it refuses."""

import ctypes
import subprocess
import sys
import threading
from itertools import pairwise

import pytest
import torch
from torch.nn import Parameter

import zoneout as zo
from zoneout import sequence_layer
from zoneout.ops import cuda, plan, recording
from zoneout.ops.memory import address

X = torch.randn(5, 4, 3)
LAYERS = {
    "lstm": lambda: zo.LSTM(3, 8, noise=zo.Zoneout(cell=0.5, hidden=0.1)),
    "stack": lambda: zo.GRU(3, 8, 2, bidirectional=True, noise=zo.Zoneout(hidden=0.1), dropout=0.2),
    "norm": lambda: zo.LSTM(3, 8, norm="layer", noise=zo.RecurrentDropout(rate=0.2)),
    "batch norm": lambda: zo.LSTM(3, 8, norm=zo.RecurrentBatchNorm(5)),
    "projection": lambda: zo.LSTM(3, 8, proj_size=2, noise=zo.VariationalDropout(hidden=0.3)),
    "float64": lambda: zo.RNN(3, 8, dtype=torch.float64, noise=zo.Zoneout(hidden=0.3)),
    "bfloat16": lambda: zo.LSTM(3, 8, dtype=torch.bfloat16, noise=zo.Zoneout(cell=0.3)),
    "recomputed": lambda: zo.LSTM(3, 8, recompute=True, noise=zo.Zoneout(cell=0.3)),
    "products": lambda: zo.Recurrent(zo.cells.mogrifier_lstm, 3, 8, noise=zo.Zoneout(cell=0.3)),
    "diagonal": lambda: zo.Recurrent(zo.cells.indrnn, 3, 8, noise=zo.Zoneout(hidden=0.3)),
    "heads": lambda: zo.Recurrent(zo.cells.slstm, 3, 8, noise=zo.Zoneout(hidden=0.1)),
}


def results(layer, k: int, seen: bool = False):
    """Return outputs, states and all gradients of call number `k`."""
    x = (X.to(layer.weight_ih_l0.dtype) + k).requires_grad_()
    y, state = layer(x, seed=k, first_step=3 * k)
    final = state if isinstance(state, tuple) else (state,)
    loss = y.float().square().sum() if k % 2 else sum(v.float().sum() for v in final)
    wanted = [x, *layer.parameters()]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        again, _ = layer(x, seed=k)
    return [y, *final, *grads, again]


@pytest.mark.parametrize("name", LAYERS)
def test_repeats_to_the_bit(name):
    """Every call has other inputs, weights, seed, first step and gradients than the recorded."""
    layer = LAYERS[name]()
    by_plan, general = [], []
    for found in (by_plan, general):
        torch.manual_seed(1)
        for p in layer.parameters():
            torch.nn.init.uniform_(p, -0.5, 0.5)
        for buffer in layer.buffers():
            buffer.fill_(1)
        for k in range(8):
            if found is general:
                plan.forget()
            found.append(results(layer, k))
            with torch.no_grad():
                for p in layer.parameters():
                    p.mul_(0.9)
        if found is by_plan:
            made = [one.text for one in plan.plans() if one.run is None]
            assert plan.plans() and not made
    for a, b in zip(by_plan, general):
        assert all(map(torch.equal, a, b))


def test_follows_the_layer():
    """A plan is of shapes and types: other weights, rates, threads or a cast change the result."""
    layer, other = zo.LSTM(3, 8, noise=zo.Zoneout(cell=0.5, hidden=0.1)), zo.LSTM(3, 8)

    def both():
        for _ in range(4):
            found = layer(X.to(layer.weight_ih_l0.dtype), seed=1)[0]
        plan.forget()
        assert torch.equal(found, layer(X.to(layer.weight_ih_l0.dtype), seed=1)[0])
        return found

    first = both()
    layer.noise = zo.Zoneout(cell=0.1, hidden=0.3)
    second = both()
    layer.load_state_dict(other.state_dict())
    third = both()
    layer.weight_hh_l0 = Parameter(torch.randn(8, 32).t())
    fourth = both()
    found = [first, second, third, fourth, both().clone()]
    assert all(not torch.equal(a, b) for a, b in pairwise(found[:4]))
    layer.double()
    assert both().dtype == torch.float64


@pytest.mark.parametrize("where", ["x in h0", "h0 in x", "gradients"])
def test_a_tensor_inside_another_one(where):
    """A recording takes the place of one input for a place inside another one.

    In later calls, which have the same shapes, the two lie elsewhere.
    """
    recompute = where != "x in h0"
    layer = zo.GRU(4, 4, recompute=recompute)
    reference = zo.GRU(4, 4, recompute=recompute, backend="reference")
    reference.load_state_dict(layer.state_dict())
    for k in range(6):
        apart = k >= 3
        x, h0, dh = torch.randn(17, 8, 4), torch.randn(1, 8, 4), torch.randn(1, 8, 4)
        dy = torch.randn(17, 8, 4)
        if where == "x in h0":
            x = torch.randn(2, 1, 4) if apart else h0.view(-1)[8:16].view(2, 1, 4)
            h0, dy, dh = h0[:, :1], dy[:2, :1], dh[:, :1]
        elif not apart:
            h0, dh = (x[-1:], dh) if where == "h0 in x" else (h0, dy[-1:])
        found = []
        for one in (layer, reference):
            results = one(x, h0)
            found.append([*results, *torch.autograd.grad(results, [*one.parameters()], [dy, dh])])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


FORMS = {
    "a layer": lambda: (zo.LSTM(3, 8, noise=zo.Zoneout(cell=0.5, hidden=0.1)), False),
    "given states": lambda: (zo.LSTM(3, 8, noise=zo.Zoneout(cell=0.5, hidden=0.1)), True),
    "stack, batch first": lambda: (
        zo.GRU(3, 8, 2, bidirectional=True, batch_first=True, dropout=0.3),
        True,
    ),
    "projection": lambda: (
        zo.LSTM(3, 8, 2, proj_size=2, noise=zo.RecurrentDropout(rate=0.3)),
        True,
    ),
    "static masks": lambda: (
        zo.RNN(3, 8, 2, noise=zo.Zoneout(hidden=0.5, mask="static", seed=3)),
        False,
    ),
    "learned states": lambda: (zo.GRU(3, 8, learn_initial_state=True), False),
    "a rate per unit": lambda: (
        zo.LSTM(3, 8, noise=zo.Zoneout(cell=torch.linspace(0, 1, 8), hidden=0.1)),
        False,
    ),
    "own cell": lambda: (
        zo.Recurrent(zo.cells.peephole_lstm, 3, 8, noise=zo.Zoneout(cell=0.3)),
        True,
    ),
    "several states": lambda: (zo.Recurrent(zo.cells.slstm, 3, 8, 2), True),
    "product": lambda: (zo.Recurrent(zo.cells.mgu, 3, 8, noise=zo.Zoneout(hidden=0.3)), True),
}


@pytest.mark.parametrize("name", FORMS)
def test_repeated_calls(name, monkeypatch):
    """A call that skips the checks has other results, or draws other numbers."""
    layer, given = FORMS[name]()

    def calls():
        torch.manual_seed(1)
        with torch.no_grad():
            for p in layer.parameters():
                p.uniform_(-0.5, 0.5)
        found = []
        for k in range(8):
            x = torch.randn(4, 5, 3).requires_grad_()
            layer.train(k % 4 < 2)
            hx = layer(x, seed=1)[1] if given else None
            y, state = layer(x, hx, first_step=k)
            final = state if isinstance(state, tuple) else (state,)
            loss = sum(v.square().sum() for v in (y, *final))
            wanted = [x, *layer.parameters()]
            grads = torch.autograd.grad(loss, wanted, allow_unused=True)
            with torch.no_grad():
                found += [y, *final, *grads, layer(x)[0]]
        return [*found, torch.rand(1)]

    calls()
    again = []
    own = sequence_layer.repeated
    monkeypatch.setattr(sequence_layer, "repeated", lambda *a: again.append(own(*a)) or again[-1])
    repeated = calls()
    assert sum(done is not None for done, _ in again) >= 16
    monkeypatch.setattr(sequence_layer, "repeated", lambda *a: (None, None))
    for a, b in zip(repeated, calls(), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_what_is_prepared_follows_the_layer():
    """A call after a change runs as the layer was before it."""
    layer, x = zo.LSTM(3, 8, 2, noise=zo.Zoneout(cell=0.5)), torch.randn(5, 4, 3)

    def outputs():
        for _ in range(4):
            y = layer(x, seed=1)[0]
        layer._prepared.clear()
        assert torch.equal(layer(x, seed=1)[0], y)
        return y

    changes = [
        lambda: setattr(layer, "noise", zo.Zoneout(cell=0.1)),
        lambda: setattr(layer, "noise", [zo.Zoneout(hidden=0.3), zo.WeightDrop(rate=0.5)]),
        lambda: setattr(layer, "noise", zo.StateDropout(hidden=0.3)),
        lambda: setattr(layer, "dropout", 0.5),
        lambda: setattr(layer, "weight_hh_l1", Parameter(torch.randn(32, 8))),
        lambda: torch.nn.utils.parametrizations.orthogonal(layer, "weight_hh_l0"),
        lambda: layer.eval(),
    ]
    found = [outputs()]
    for change in changes:
        change()
        found.append(outputs())
    assert all(not torch.equal(a, b) for a, b in pairwise(found))


@pytest.mark.parametrize(
    "call",
    [
        lambda layer: layer(torch.zeros(5, 4, 1, dtype=torch.int64)),
        lambda layer: layer(X[:, :, :2]),
        lambda layer: layer(X.double()),
        lambda layer: layer(X, (torch.zeros(1, 4, 8),)),
        lambda layer: layer(X, torch.zeros(2, 4, 8)),
        lambda layer: layer(X, first_step=-1),
        lambda layer: layer(X, first_step=2**32),
        lambda layer: layer(X, seed="a"),
        lambda layer: layer(X[:0]),
    ],
)
def test_bad_calls_after_good_ones(call):
    """What a first call refuses, a later one accepts."""
    layer = zo.GRU(3, 8, noise=zo.Zoneout(hidden=0.1))
    with pytest.raises((ValueError, TypeError)) as first:
        call(layer)
    ids = zo.GRU(1, 8, noise=zo.Zoneout(hidden=0.1))
    for _ in range(4):
        layer(X), layer(X, torch.zeros(1, 4, 8)), ids(torch.zeros(5, 4, dtype=torch.int64))
    with pytest.raises(type(first.value)) as later:
        call(layer)
    assert str(later.value) == str(first.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse CSR")
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda layer: layer(torch.nested.nested_tensor([X[0], X[0, :2]])),
        lambda layer: layer(X.to_sparse_csr(dense_dim=0)),
        lambda layer: layer(X[:, :, :2]),
        lambda layer: layer(X, torch.zeros(1, 3, 8)),
        lambda layer: layer(X.to("meta")),
        lambda layer: layer(X, torch.zeros(1, 4, 8).double()),
    ],
)
def test_refused_calls_are_as_if_they_were_the_first(call, batch_first):
    """The error is another one, or a number was drawn before it."""
    layer = zo.GRU(3, 8, batch_first=batch_first, noise=zo.Zoneout(hidden=0.1))
    for _ in range(4):
        layer(X)
    found = []
    for clear in (False, True):
        if clear:
            layer._prepared.clear()
        torch.manual_seed(0)
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            call(layer)
        found.append((type(error.value), str(error.value), torch.rand(()).item()))
    assert found[0] == found[1]


LATER = {  # a layer or cell without biases, and its state
    "layer": lambda: (zo.LSTM(3, 8, bias=False), (torch.zeros(1, 4, 8),) * 2),
    "torch's cell": lambda: (zo.GRUCell(3, 8, bias=False), torch.zeros(4, 8)),
    "own cell": lambda: (zo.RecurrentCell(zo.cells.janet, 3, 8, bias=False), torch.zeros(4, 8)),
}


@pytest.mark.parametrize("name", LATER)
def test_a_bias_that_comes_later(name):
    """A repeated call leaves out a bias that earlier calls did not have."""
    module, state = LATER[name]()
    x, suffix = (X, "_l0") if name == "layer" else (X[0], "")
    without = [module(x, state)[0] for _ in range(4)][-1]
    bias = Parameter(torch.ones(8 * module.definition.gates))
    module.register_parameter(f"bias_ih{suffix}", bias)
    found = module(x, state)[0]
    module._prepared.clear()
    assert torch.equal(found, module(x, state)[0]) and not torch.equal(found, without)


def test_plans_of_other_sizes():
    """A layer whose weights were replaced takes the plan of a layer that has such weights."""
    one, other = zo.LSTM(3, 8), zo.LSTM(5, 8)
    for _ in range(4):
        one(X), other(torch.zeros(5, 4, 5))
    one.weight_ih_l0.data = torch.zeros(32, 5)
    with pytest.raises(ValueError, match="expected 3 features"):
        one(torch.zeros(5, 4, 5))


def test_parameters_named_like_the_places_of_others():
    """A cell's parameters change places once its calls are repeated."""

    @zo.cell(gates=1, recurrence="diagonal")
    def odd(x, h, parameter1, parameter0):
        return (x[0] + parameter1 * h + parameter0).tanh()

    layer = zo.Recurrent(odd, 3, 4)
    found = [layer(X)[0] for _ in range(4)]
    for y in found[1:]:
        torch.testing.assert_close(y, found[0])


@pytest.mark.parametrize("make", [zo.LSTM, lambda *sizes: zo.Recurrent(zo.cells.lstm, *sizes)])
def test_another_device_after_repeated_calls(make):
    """A repeated call asks for what only some devices have."""
    layer = make(3, 8)
    for _ in range(4):
        layer(X)
    weights = {name: p.to("meta") for name, p in layer.named_parameters()}
    y, _ = torch.func.functional_call(layer, weights, (X.to("meta"),))
    assert y.is_meta and y.shape == (5, 4, 8)
    layer.to("meta")
    assert layer(X.to("meta"))[0].is_meta


def test_ids_of_another_form_after_good_ones():
    """A plan for ids takes numbers of three dimensions, which nobody has checked."""
    layer, ids, h0 = zo.GRU(1, 8), torch.zeros(5, 4, dtype=torch.int64), torch.zeros(1, 4, 8)
    for _ in range(4):
        layer(ids, h0), layer(ids[..., None].float(), h0)
    with pytest.raises(ValueError, match="3 dimensions"):
        layer(ids[..., None] + 10**9, h0)


def test_backward_inside_autocast():
    """Autocast would run the products of a plan in half precision."""
    layer = zo.LSTM(3, 8)

    def gradients():
        y, _ = layer(X, seed=1)
        with torch.autocast("cpu", torch.bfloat16):
            return torch.autograd.grad(y.square().sum(), [*layer.parameters()])

    found = [gradients() for _ in range(4)]
    assert all(map(torch.equal, found[0], found[-1]))


def test_number_of_plans_is_bounded(monkeypatch):
    monkeypatch.setattr(plan, "MOST", 8)
    layer = zo.LSTM(3, 4)
    for steps in range(1, 30):
        for _ in range(3):
            layer(X[:1].expand(steps + 1, 4, 3))
    assert len(plan.plans()) == 8
    assert len(plan._seen) == 8


def test_a_shape_that_comes_once_is_not_recorded():
    zo.LSTM(3, 4)(X)
    assert not plan.plans()


@pytest.mark.parametrize("form", ["lengths", "packed"])
def test_values_that_the_cpu_reads_make_no_plan(form):
    layer = zo.LSTM(3, 4)
    for long in (5, 4, 3, 2):
        lengths = torch.tensor([5, long, 1, 1])
        given = torch.nn.utils.rnn.pack_padded_sequence(X, lengths) if form == "packed" else X
        y, _ = layer(given) if form == "packed" else layer(given, lengths=lengths)
        data = y.data if form == "packed" else y
        assert data.isfinite().all()
    assert not plan.plans()


def test_threads_share_plans():
    layer = zo.LSTM(3, 8, noise=zo.Zoneout(cell=0.5, hidden=0.1))
    expected = [layer(X, seed=k)[0] for k in range(20)]
    wrong = []

    def work():
        wrong.extend(k for k in range(20) if not torch.equal(layer(X, seed=k)[0], expected[k]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def recorded(general, *tensors):
    """Return the plan of a function of these tensors."""
    with recording.Recorder(tensors, 0) as recorder:
        result = general(*tensors)
    return recorder.plan(result)


class Struct(ctypes.Structure):
    moving = ("first_step",)
    _fields_ = [("first_step", ctypes.c_int64), ("at", ctypes.c_void_p)]


HIDDEN = torch.ones(3)


def with_address(v):
    recording.call(lambda at: None, Struct(0, v.data_ptr()))
    return v


def on_hidden_memory(v):
    recording.call(lambda at: None, Struct(0, address(HIDDEN)))
    return v


@pytest.mark.parametrize(
    ("general", "reason"),
    [
        (lambda v: v + v.sum().item(), "depends on values"),
        (lambda v: v[v > 0], "depends on values"),
        (lambda v: v + torch.rand(3), "depends on values"),
        (lambda v: v + HIDDEN, "unknown memory"),
        (lambda v: HIDDEN, "unknown memory"),
        (with_address, "an address of unknown memory"),
        (on_hidden_memory, "unknown memory"),
        (lambda v: v.view(torch.int32) + 1, "a view of another type"),
        (lambda v: object(), "a object between calls"),
    ],
)
def test_refuses(general, reason):
    made = recorded(general, torch.randn(3))
    assert made.run is None and reason in made.text


def test_fields_follow_the_inputs():
    """Addresses and the first step of a struct are those of the call, also inside a tensor."""
    seen = []

    def function(at):
        found = Struct.from_address(at)
        seen.append((found.first_step, found.at))

    def general(v):
        recording.call(function, Struct(7, address(v) + 4))
        return v

    a, b = torch.randn(3), torch.randn(3)
    with recording.Recorder([a], 5) as recorder:
        made = recorder.plan(general(a))
    assert made.run([b], [b.data_ptr()], 20) is b
    assert seen == [(7, a.data_ptr() + 4), (22, b.data_ptr() + 4)]


def test_unneeded_lines_go():
    made = recorded(lambda v: (v + 1, v * 2)[0], torch.randn(3))
    assert "mul" not in str(made.text) and made.text.count("\n") == 4


@pytest.mark.usefixtures("emulated")
def test_of_kernels(monkeypatch):
    """Both directions of a layer, on side streams, with the structs of the kernels."""
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "tf32")
    layer = zo.LSTM(3, 9, bidirectional=True, noise=zo.Zoneout(cell=0.5, hidden=0.1))
    by_plan = [results(layer, k) for k in range(5)]
    assert len(plan.plans()) == 4  # forward, two kinds of backward passes, evaluation
    assert all("with" in one.text and one.run for one in plan.plans())
    for k, found in enumerate(by_plan):
        plan.forget()
        assert all(map(torch.equal, found, results(layer, k)))


BOTH = dict(noise=zo.Zoneout(cell=0.5, hidden=0.1))
CELLS = {  # which the kernels run one step at a time
    "lstm": lambda **like: zo.LSTMCell(8, 12, **BOTH, **like),
    "gru": lambda **like: zo.GRUCell(8, 12, noise=zo.Zoneout(hidden=0.1), **like),
    "odd": lambda **like: zo.LSTMCell(3, 5, **BOTH, **like),
    "norm": lambda **like: zo.LSTMCell(8, 12, norm="layer", **BOTH, **like),
    "dropped": lambda **like: zo.LSTMCell(
        8, 12, noise=zo.VariationalDropout(hidden=0.3), norm="layer", **like
    ),
    "peephole": lambda **like: zo.RecurrentCell(zo.cells.peephole_lstm, 8, 12, **BOTH, **like),
    "odd peephole": lambda **like: zo.RecurrentCell(zo.cells.peephole_lstm, 3, 5, **BOTH, **like),
    "dropped peephole": lambda **like: zo.RecurrentCell(
        zo.cells.peephole_lstm, 8, 12, noise=zo.VariationalDropout(hidden=0.3), **like
    ),
    "heads": lambda **like: zo.RecurrentCell(
        zo.cells.slstm, 8, 16, noise=zo.Zoneout(hidden=0.1), **like
    ),
    "products": lambda **like: zo.RecurrentCell(zo.cells.mogrifier_lstm, 8, 12, **BOTH, **like),
    "odd products": lambda **like: zo.RecurrentCell(
        zo.cells.mgu, 3, 5, noise=zo.Zoneout(hidden=0.1), **like
    ),
}


def step_results(cell, k: int):
    """Return the states after step `k` and all gradients, and the states in evaluation."""
    size, dtype = cell.hidden_size, cell.weight_ih.dtype
    shape = torch.Generator().manual_seed(k)
    x = torch.randn(4, cell.input_size, generator=shape).to(cell.weight_ih).requires_grad_()
    many = len(cell.definition.states)
    states = [
        torch.rand(4, size, generator=shape).to(x).add(0.5).requires_grad_() for _ in range(many)
    ]
    hx = states[0] if many == 1 else tuple(states)
    new = cell(x, hx, seed=k, step=3 * k)
    new = new if isinstance(new, tuple) else (new,)
    weights = [torch.rand(4, size, generator=shape).to(dtype).to(x) for _ in new]
    loss = sum((a * w).sum() for a, w in zip(new, weights))
    wanted = [x, *states, *cell.parameters()]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        again = cell.eval()(x, hx)
    cell.train()
    return [*new, *grads, *(again if many > 1 else [again])]


def check_steps(cell, theirs, tolerance):
    """Steps by plans have the bits of the general code, and are near the reference."""
    by_plan = [step_results(cell, k) for k in range(4)]
    assert len(plan.plans()) == 3, len(plan.plans())  # forward, backward, evaluation
    assert all(one.run for one in plan.plans()), [one.text for one in plan.plans()]
    for k, found in enumerate(by_plan):
        plan.forget()
        assert all(map(torch.equal, found, step_results(cell, k)))
        for ours, true in zip(found, step_results(theirs, k)):
            assert (ours.double() - true).norm() <= tolerance * true.norm().clamp(min=1)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, (torch.float32, torch.bfloat16)[k % 2]) for k, name in enumerate(CELLS)],
)
def test_single_steps_of_kernels(name, dtype, monkeypatch):
    """A plan of products and kernels has an address of an earlier call, or another step's masks."""
    monkeypatch.setattr(cuda, "PATHS", (cuda.persistent, cuda.steps))
    monkeypatch.setattr(cuda, "GENERATED_PATHS", (cuda.persistent_cell, cuda.cell_steps))
    cell = CELLS[name](dtype=dtype, backend="cpu")
    theirs = CELLS[name](dtype=torch.float64, backend="reference")
    theirs.load_state_dict({key: v.double() for key, v in cell.state_dict().items()})
    check_steps(cell, theirs, 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.usefixtures("emulated")
def test_loops_of_many_steps_have_no_plan(monkeypatch):
    """A pass with a launch for each of its steps becomes a plan of as many lines."""
    monkeypatch.setattr(cuda, "PATHS", (cuda.steps,))
    layer = zo.LSTM(3, 8, noise=zo.Zoneout(cell=0.5, hidden=0.1))
    for k in range(3):
        results(layer, k)
    assert {one.text for one in plan.plans()} == {"calls for each of many steps"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CELLS)
def test_single_steps_on_the_gpu(name, dtype, monkeypatch):
    """A plan of a single step gives the same as the general code, and as the reference."""
    monkeypatch.setattr(plan, "DEVICES", {"cuda"})
    cell = CELLS[name](dtype=dtype, device="cuda")
    theirs = CELLS[name](dtype=torch.float64, device="cuda", backend="reference")
    theirs.load_state_dict({key: v.double() for key, v in cell.state_dict().items()})
    check_steps(cell, theirs, 1e-3 if dtype == torch.float32 else 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [32, 256])
def test_on_the_gpu(hidden, dtype, monkeypatch):
    """A plan gives the same as the general code, alone and in a graph; lengths stay on the GPU."""
    monkeypatch.setattr(plan, "DEVICES", {"cuda"})
    options = dict(device="cuda", dtype=dtype, noise=zo.Zoneout(cell=0.5, hidden=0.1))
    layer = zo.LSTM(3, hidden, 2, bidirectional=True, **options)
    x = torch.randn(7, 5, 3, device="cuda", dtype=dtype, requires_grad=True)
    lengths, seed = torch.tensor([7, 5, 5, 2, 1]), torch.tensor(3, device="cuda")

    def found():
        y, (h, c) = layer(x, lengths=lengths, seed=seed)
        loss = y.float().square().sum() + h.float().sum() + c.float().sum()
        return [y, h, c, *torch.autograd.grad(loss, [x, *layer.parameters()])]

    first = found()
    for _ in range(3):
        again = found()
    assert plan.plans() and all(one.run for one in plan.plans()), [p.text for p in plan.plans()]
    assert all(map(torch.equal, first, again))
    lengths = lengths.cuda()
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            found()
    with torch.cuda.graph(graph):
        inside = found()
    seed.fill_(4)
    graph.replay()
    plan.forget()
    assert all(map(torch.equal, inside, found()))


def test_training_does_not_import_torchs_compiler():
    """A process that never compiles holds torch's compiler: 150 MiB, and 0.8 seconds to import."""
    code = """
import sys, torch, zoneout as zo, zoneout.ops.plan
layer, cell = zo.LSTM(3, 4, noise=zo.Zoneout(cell=0.5)), zo.GRUCell(3, 1024)
for _ in range(4):
    layer(torch.randn(5, 2, 3))[0].sum().backward()
    cell(torch.randn(512, 3), torch.zeros(512, 1024)).sum().backward()
assert zo.ops.plan.plans()
found = {"torch._dynamo", "sympy"} & set(sys.modules)
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
