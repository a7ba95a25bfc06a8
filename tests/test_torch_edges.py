"""Corners in which torch.nn's layers and cells do something definite, and ours do the same or
say what they do not.
"""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.flop_counter import FlopCounterMode

import zoneout as zo

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

T, B, I, H = 4, 3, 5, 6
LAYERS, CELLS = ("LSTM", "GRU", "RNN"), ("LSTMCell", "GRUCell", "RNNCell")
close = torch.testing.assert_close


def pair(name, *args, ours=None, **options):
    """torch.nn's module and ours, with the same weights."""
    theirs = getattr(nn, name)(*args, **options)
    mine = getattr(zo, name)(*args, **options, **(ours or {}))
    mine.load_state_dict(theirs.state_dict())
    return theirs, mine


def flat(outputs):
    """All tensors of what a module returns."""
    if isinstance(outputs, PackedSequence):
        return [outputs.data]
    return (
        [outputs]
        if isinstance(outputs, torch.Tensor)
        else [v for one in outputs for v in flat(one)]
    )


def gradients(module, loss, *inputs):
    return torch.autograd.grad(loss, [*inputs, *module.parameters()], allow_unused=True)


def state_of(name, batch=B, dtype=torch.float32, units=H):
    """A state for a cell or a layer of that name."""
    shape = (batch, units) if name in CELLS else (1, batch, units)
    states = tuple(torch.randn(shape).to(dtype) for _ in range(2))
    return states if name.startswith("LSTM") else states[0]


# --- sizes of zero --------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("name", CELLS)
def test_cells_without_inputs_or_units(name, sizes):
    """A cell of size 0 is refused where torch.nn's is not, or gives something else."""
    theirs, mine = pair(name, *sizes)
    x, hx = torch.randn(B, sizes[0], requires_grad=True), state_of(name, units=sizes[1])
    for state in (None, hx):
        want, got = flat(theirs(x, state)), flat(mine(x, state))
        close(got, want)
        close(
            gradients(mine, sum(map(torch.sum, got)), x),
            gradients(theirs, sum(map(torch.sum, want)), x),
        )


@pytest.mark.parametrize(
    "norm", [None, "layer", zo.RecurrentBatchNorm(steps=2)], ids=["plain", "layer", "batch"]
)
@pytest.mark.parametrize("name", CELLS)
def test_cells_of_size_0_with_everything(name, norm):
    """A loop reads memory that a cell without inputs does not have."""
    noise = zo.Zoneout(hidden=0.5)
    for (inputs, units), backend in itertools.product([(0, 3), (3, 0)], [None, "cpu"]):
        cell = getattr(zo, name)(inputs, units, noise=noise, norm=norm, backend=backend)
        right = getattr(zo, name)(inputs, units, noise=noise, norm=norm, backend="reference")
        right.load_state_dict(cell.state_dict())
        x = torch.randn(B, inputs, requires_grad=True)
        got, want = flat(cell(x, seed=3, step=0)), flat(right(x, seed=3, step=0))
        close(got, want)
        close(
            gradients(cell, sum(map(torch.sum, got)), x),
            gradients(right, sum(map(torch.sum, want)), x),
        )


@pytest.mark.parametrize("name", CELLS)
def test_negative_sizes(name):
    """A size below zero passes, now that zero does."""
    for sizes in ((-1, 3), (3, -1), (True, 3), (3.0, 3)):
        with pytest.raises(ValueError, match="_size: expected a whole number of at least 0"):
            getattr(zo, name)(*sizes)


# --- complex numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["padded", "packed", "unbatched"])
@pytest.mark.parametrize(
    "name, options",
    [
        ("LSTM", {}),
        ("LSTM", {"proj_size": 2, "bidirectional": True}),
        ("GRU", {"num_layers": 2}),
        ("RNN", {"bias": False, "batch_first": True}),
    ],
)
def test_complex_layers(name, options, form):
    """Complex weights give another result or gradient than torch.nn's."""
    theirs, mine = pair(name, I, H, dtype=torch.complex128, **options)
    x = torch.randn(T, B, I, dtype=torch.complex128, requires_grad=True)
    given = x[:, 0] if form == "unbatched" else x
    if form == "packed":  # torch has no gradient of packing complex rows
        given = pack_padded_sequence(x.detach(), [2, 4, 1], enforce_sorted=False)
        x = given.data.requires_grad_()
    want, got = flat(theirs(given)), flat(mine(given))
    close(got, want)
    loss, right = (sum(v.abs().sum() for v in each) for each in (got, want))
    close(gradients(mine, loss, x), gradients(theirs, right, x))


@pytest.mark.parametrize("name", CELLS)
def test_complex_cells(name):
    """A complex cell gives another result or gradient than torch.nn's."""
    theirs, mine = pair(name, I, H, dtype=torch.complex128)
    x = torch.randn(B, I, dtype=torch.complex128, requires_grad=True)
    hx = state_of(name, dtype=torch.complex128)
    want, got = flat(theirs(x, hx)), flat(mine(x, hx))
    close(got, want)
    close(gradients(mine, got[0].abs().sum(), x), gradients(theirs, want[0].abs().sum(), x))


@pytest.mark.parametrize("training", [True, False])
def test_complex_zoneout(training):
    """Zoneout of a complex state keeps the wrong units, or draws other masks than of a real one."""
    noise = zo.Zoneout(cell=0.5, hidden=[0.25])
    layer = zo.LSTM(I, H, dtype=torch.complex128, noise=noise).train(training)
    real = zo.LSTM(I, H, dtype=torch.float64, noise=noise).train(training)
    layer.load_state_dict(real.state_dict())  # no imaginary part anywhere
    x = torch.randn(T, B, I, dtype=torch.float64)
    close(
        flat(layer(x.to(torch.complex128), seed=3)),
        [v.to(torch.complex128) for v in flat(real(x, seed=3))],
    )


def test_complex_numbers_that_have_no_meaning():
    """A fused loop reads complex numbers as real ones, or a norm takes a variance that is none."""
    x = torch.randn(T, B, I, dtype=torch.complex64)
    with pytest.raises(TypeError, match=r"backend: 'cpu' takes real numbers, got torch\.complex64"):
        zo.LSTM(I, H, dtype=torch.complex64, backend="cpu")(x)
    for options in ({"norm": "layer"}, {"noise": zo.WeightNoise(std=0.1)}):
        with pytest.raises(TypeError, match="expected real numbers for a norm or noise on weights"):
            zo.LSTM(I, H, dtype=torch.complex64, **options)(x)
    with pytest.raises(
        ValueError, match=r"expected torch\.float32 as the weights have, got torch\.complex64"
    ):
        zo.LSTM(I, H)(x)


# --- autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS + CELLS)
def test_autocast_on_the_cpu(name, state_dtype, x_dtype):
    """Outputs and states come in another type than torch.nn's: GRU and two of the cells keep
    that of the state.
    """
    theirs, mine = pair(name, I, H)
    x = torch.randn(*((B, I) if name in CELLS else (T, B, I)), dtype=x_dtype)
    hx = None if state_dtype is None else state_of(name, dtype=state_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = flat(theirs(x, hx)), flat(mine(x, hx))
    assert [v.dtype for v in got] == [v.dtype for v in want]
    for a, b in zip(got, want, strict=True):
        close(a.float(), b.float(), rtol=0.05, atol=0.02)
    got[0].float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in mine.parameters())


def test_autocast_of_numbers():
    """One-hot rows that are given by their numbers come in another type than those that are
    written out.
    """
    layer, x = zo.GRU(I, H), torch.randint(I, (T, B))
    with torch.autocast("cpu", torch.bfloat16):
        got, want = flat(layer(x)), flat(layer(nn.functional.one_hot(x, I).float()))
    close(got, want)


# --- gradients that are None ----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["eager", "operator"])
@pytest.mark.parametrize("steps", [1, 2])
def test_no_gradient_without_a_path(steps, path):
    """A parameter that the loss does not depend on gets zeros, which optimizers with momentum or
    decay act on.
    """
    uses = {
        "y": lambda y, h, c: y,
        "h": lambda y, h, c: h,
        "c": lambda y, h, c: c,
        "first": lambda y, h, c: c[0],
    }
    for layers, (name, use) in itertools.product((1, 2), uses.items()):
        theirs, mine = pair("LSTM", I, H, layers, bidirectional=True, proj_size=2)
        x, found = torch.randn(steps, B, I), []
        for module in (theirs, mine):
            with (
                FlopCounterMode(display=False)
                if path == "operator" and module is mine
                else torch.enable_grad()
            ):
                loss = use(*flat(module(x))).sum()
                found.append([v is None for v in gradients(module, loss)])
        assert found[0] == found[1], (layers, name)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_no_gradient_without_a_path_of_a_norm(steps, recompute):
    """The same of the norm of c, which only h depends on."""
    layer = zo.LSTM(I, H, norm="layer", proj_size=2, recompute=recompute)
    right = zo.LSTM(I, H, norm="layer", proj_size=2, backend="reference")
    for take in (
        lambda y, state, cells: state[1],
        lambda y, state, cells: cells,
        lambda y, state, cells: y,
    ):
        x = torch.randn(steps, B, I)
        got, want = (
            [v is None for v in gradients(m, take(*m(x, return_cells=True)).sum())]
            for m in (layer, right)
        )
        assert got == want


# --- counts of operations -------------------------------------------------------------------------


def flops(module, x, hx=None):
    """What torch counts for a forward pass, and for it and the backward pass."""
    with FlopCounterMode(display=False) as counter:
        outputs = flat(module(x, hx))
        forward = counter.get_total_flops()
        outputs[0].sum().backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("needs", [False, True], ids=["weights", "all"])
@pytest.mark.parametrize(
    "name, options",
    [
        ("LSTM", {"bidirectional": True, "num_layers": 2}),
        ("LSTM", {"proj_size": 2}),
        ("GRU", {"norm": "layer"}),
        ("RNN", {}),
        ("LSTMCell", {}),
        ("GRUCell", {}),
    ],
)
def test_flops_are_those_of_the_reference(name, options, needs):
    """A profiler is told another number of operations than the loop of torch calls has."""
    noise = zo.Zoneout(hidden=0.3)
    found = []
    for backend in (None, "reference"):
        module = getattr(zo, name)(I, H, noise=noise, backend=backend, **options)
        shape = (B, I) if name in CELLS else (T, B, I)
        count = 1 if name in CELLS else len(module.suffixes())
        lead = () if name in CELLS else (count,)
        h = torch.zeros(*lead, B, module.output_size, requires_grad=needs)
        c = torch.zeros(*lead, B, H, requires_grad=needs)
        found.append(
            flops(module, torch.randn(shape, requires_grad=needs), (h, c) if "LSTM" in name else h)
        )
    assert found[0] == found[1]
    assert found[0][1] > found[0][0] > 0


def test_flops_of_other_forms():
    """A packed batch is counted as if padded, one-hot numbers as a product, or recomputing as
    nothing.
    """
    layer, x = zo.LSTM(I, H), torch.randn(T, B, I)
    packed = pack_padded_sequence(x, [4, 2, 1])
    assert flops(layer, packed)[0] == 2 * 7 * 4 * H * (I + H)
    assert flops(layer, torch.randint(I, (T, B)))[0] == 2 * T * B * 4 * H * H
    forward, both = flops(layer, x)
    assert flops(zo.LSTM(I, H, recompute=True), x) == (forward, both + forward)
    y, _ = layer(x)  # uncounted
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == both - forward


# --- gradients of single examples -----------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS + CELLS)
def test_expanded_weights(name):
    """torch's wrapper of weights ends in an error that does not say what to do."""
    x = torch.randn(B, I) if name in CELLS else torch.randn(T, B, I)
    with pytest.raises(NotImplementedError, match=r"torch\.func\.vmap\(torch\.func\.grad"):
        call_for_per_sample_grads(getattr(zo, name)(I, H), batch_size=B)(x)


@pytest.mark.parametrize("name", ["LSTM", "GRUCell"])
def test_gradients_of_single_examples(name):
    """What the error points at gives other gradients than a loop over the examples."""
    module = getattr(zo, name)(I, H, noise=zo.Zoneout(hidden=0.5))
    call = {"step": 2} if name in CELLS else {}
    x, ids = torch.randn(T, B, I), torch.arange(B)

    def loss(parameters, x, example):
        given = (x[0] if name in CELLS else x).unsqueeze(-2)
        outputs = torch.func.functional_call(
            module, parameters, (given,), {"seed": 7, "examples": example.unsqueeze(0), **call}
        )
        return flat(outputs)[0].square().sum()

    parameters = dict(module.named_parameters())
    got = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 1, 0))(parameters, x, ids)
    for b in range(B):
        want = torch.autograd.grad(loss(parameters, x[:, b], ids[b]), list(parameters.values()))
        close([got[key][b] for key in parameters], list(want))


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", (*LAYERS, *CELLS))
def test_sizes_are_fixed_at_construction(name):
    """A layer with another size than its weights have would read out of bounds."""
    module = getattr(zo, name)(I, H)
    x = torch.randn(T, B, I)[0] if name in CELLS else torch.randn(T, B, I)
    want = flat(module(x))
    sizes = {"input_size": I + 1, "hidden_size": 2 * H}
    if name in LAYERS:
        sizes |= {"num_layers": 2, "bidirectional": True, "proj_size": 2}
    for attribute, value in sizes.items():
        old = getattr(module, attribute)
        with pytest.raises(AttributeError, match=rf"^{attribute}: expected {old}, .* try a new"):
            setattr(module, attribute, value)
        setattr(module, attribute, old)  # as a subclass does after its base's constructor
    for again in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        close(flat(again(x)), want)
