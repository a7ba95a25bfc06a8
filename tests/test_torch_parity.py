"""With no noise the layers and cells are torch.nn's; with noise they still take every form of
input.
"""

import inspect
import itertools
import typing
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import zoneout as zo
from zoneout.ops import BACKENDS

# torch's own word about its own layer, once a process
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

T, B, I, H = 5, 4, 3, 6
LENGTHS = [3, 5, 1, 4]
DTYPES = [torch.float32, torch.float64]
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float64: {"rtol": 1e-9, "atol": 1e-11},
}

LAYERS: dict[str, dict[str, Any]] = {
    "LSTM": {"name": "LSTM"},
    "LSTM-proj": {"name": "LSTM", "proj_size": 2},
    "GRU": {"name": "GRU"},
    "RNN-tanh": {"name": "RNN"},
    "RNN-relu": {"name": "RNN", "nonlinearity": "relu"},
}
CELLS = {key: options for key, options in LAYERS.items() if key != "LSTM-proj"}


def places() -> list[Any]:
    """Every backend with each device it runs on; those of a GPU are left out where there is
    none.
    """
    found = []
    for name in BACKENDS:
        if name == "cuda":  # it has no float64: test_cuda.py holds it to the reference
            continue
        for device in (
            ("cpu", "cuda") if name == "reference" else ("cuda" if "cuda" in name else "cpu",)
        ):
            marks = pytest.mark.gpu if device == "cuda" else ()
            found.append(pytest.param((name, device), id=f"{name}-{device}", marks=marks))
    return found


@pytest.fixture(params=places())
def place(request):
    """Every backend there is, those that come later too, and where it runs."""
    return request.param


@pytest.fixture
def backend(place):
    """The name of the backend."""
    return place[0]


@pytest.fixture
def device(place):
    """The device that the backend runs on."""
    return place[1]


@pytest.fixture(autouse=True)
def same_numbers():
    """Every test starts from the same state of torch's generators, and torch's layers are not
    cuDNN's.

    cuDNN rounds float32 to fewer bits and has no backward in evaluation mode.
    """
    torch.manual_seed(20)
    with torch.backends.cudnn.flags(enabled=False):
        yield


def make(library: Any, layer: str, cell: bool = False, **options: Any) -> Any:
    """A layer or cell by the name that `LAYERS` gives it."""
    given = LAYERS[layer] | options
    return getattr(library, given.pop("name") + ("Cell" if cell else ""))(I, H, **given)


def pair(layer: str, backend: str, cell: bool = False, **options: Any) -> tuple[Any, Any]:
    """torch's layer and ours, with the same weights."""
    theirs = make(nn, layer, cell, **options)
    ours = make(zo, layer, cell, backend=backend, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def leaf(*shape: int, **where: Any) -> Tensor:
    return torch.randn(*shape, **where).requires_grad_()


def state(layer: Any, *batch: int) -> tuple[Tensor, ...] | Tensor:
    """A random initial state for a layer; the leaves are its tensors."""
    like = layer.weight_hh_l0
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = (layer.proj_size or H, H) if layer.mode == "LSTM" else (H,)
    states = tuple(
        leaf(count, *batch, size, dtype=like.dtype, device=like.device) for size in sizes
    )
    return states if layer.mode == "LSTM" else states[0]


def flat(value: Any) -> list[Tensor]:
    """All tensors in a nest of results."""
    if isinstance(value, PackedSequence):
        return [value.data]
    if isinstance(value, Tensor):
        return [value]
    return [] if value is None else [tensor for one in value for tensor in flat(one)]


def gradients(results: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """The gradients of a sum in which every element of every result has a weight of its own."""
    total = torch.zeros((), dtype=results[0].dtype, device=results[0].device)
    for k, result in enumerate(results):
        weights = torch.arange(1, result.numel() + 1, dtype=result.dtype, device=result.device)
        total = total + (result * (weights + k).sin().view_as(result)).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(at) if g is None else g for g, at in zip(grads, leaves, strict=True)]


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(a, b, **TOLERANCES[b.dtype], msg=f"tensor {k}: {{}}".format)


def assert_same(
    ours: Any,
    theirs: Any,
    x: Tensor,
    hx: Any = None,
    prepare: Callable[[Tensor], Any] = lambda x: x,
    run_ours: Callable[..., Any] | None = None,
) -> None:
    """Outputs, final states and the gradients of input, initial state and every parameter are
    the same.
    """
    names = [name for name, _ in theirs.named_parameters()]
    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert set(mine) == set(names)
    expected, got = theirs(prepare(x), hx), (run_ours or ours)(prepare(x), hx)
    assert type(got[0]) is type(expected[0])
    if isinstance(expected[0], PackedSequence):
        for field in ("batch_sizes", "sorted_indices", "unsorted_indices"):
            a, b = getattr(got[0], field), getattr(expected[0], field)
            assert (a is None) == (b is None)
            assert b is None or torch.equal(a, b)
    assert_close(flat(got), flat(expected))
    leaves = [x, *flat(hx)]
    assert_close(
        gradients(flat(got), leaves + [mine[n] for n in names]),
        gradients(flat(expected), leaves + [other[n] for n in names]),
    )


# --- constructor options --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        dict(zip(("num_layers", "bias", "batch_first", "bidirectional"), values, strict=True))
        for values in itertools.product((1, 3), (True, False), (False, True), (False, True))
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()),
)
@pytest.mark.parametrize("layer", LAYERS)
def test_constructor_options(layer, options, dtype, backend, device):
    """A constructor option would mean something else here than in torch.nn."""
    theirs, ours = pair(layer, backend, dtype=dtype, device=device, **options)
    shape = (B, T, I) if options["batch_first"] else (T, B, I)
    assert_same(ours, theirs, leaf(*shape, dtype=dtype, device=device), state(theirs, B))


@pytest.mark.parametrize("layer", LAYERS)
def test_one_step_one_row_one_unit(layer, backend, device):
    """The smallest sizes would go wrong, as a squeezed dimension does."""
    options = LAYERS[layer] | {"num_layers": 2, "bidirectional": True}
    name = options.pop("name")
    if "proj_size" in options:
        options["proj_size"] = 1
    hidden = 2 if "proj_size" in options else 1
    theirs = getattr(nn, name)(1, hidden, **options, device=device)
    ours = getattr(zo, name)(1, hidden, **options, device=device, backend=backend)
    ours.load_state_dict(theirs.state_dict())
    assert_same(ours, theirs, leaf(1, 1, 1, device=device))


# --- input forms ----------------------------------------------------------------------------------


def packer(lengths: list[int], enforce_sorted: bool) -> Callable[[Tensor], PackedSequence]:
    return lambda x: pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=enforce_sorted)


# How the input is made, from a tensor of what shape.
FORMS: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "batched": (lambda x: x, (T, B, I)),
    "unbatched": (lambda x: x, (T, I)),
    "one row": (lambda x: x, (T, 1, I)),
    "batch 0": (lambda x: x, (T, 0, I)),
    "not contiguous": (lambda x: x.transpose(0, 1), (B, T, I)),
    "packed, sorted": (packer(sorted(LENGTHS, reverse=True), True), (T, B, I)),
    "packed, sorted by torch": (packer(sorted(LENGTHS, reverse=True), False), (T, B, I)),
    "packed, unsorted": (packer(LENGTHS, False), (T, B, I)),
    "packed, equal lengths": (packer([T] * B, True), (T, B, I)),
    "packed, one row": (packer([3], True), (3, 1, I)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["given hx", "default hx"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_input_forms(layer, form, given, dtype, backend, device):
    """A form of input that nn.LSTM takes would be refused, or read in another order."""
    theirs, ours = pair(
        layer, backend, dtype=dtype, device=device, num_layers=2, bidirectional=True
    )
    prepare, shape = FORMS[form]
    x = leaf(*shape, dtype=dtype, device=device)
    batch = () if form == "unbatched" else (shape[0] if form == "not contiguous" else shape[1],)
    assert_same(ours, theirs, x, state(theirs, *batch) if given else None, prepare)


@pytest.mark.parametrize("form", ["unbatched", "batch 0", "packed, unsorted"])
@pytest.mark.parametrize("layer", LAYERS)
def test_input_forms_batch_first(layer, form, backend, device):
    """`batch_first` would turn an input round in which there is no batch to put first, or that
    is packed.
    """
    theirs, ours = pair(layer, backend, device=device, batch_first=True, bidirectional=True)
    prepare, shape = FORMS[form]
    if form == "batch 0":
        shape = (0, T, I)
    assert_same(ours, theirs, leaf(*shape, device=device), None, prepare)


@pytest.mark.parametrize("layer", LAYERS)
def test_state_as_list_and_expanded(layer, backend, device):
    """An initial state that is a list, or an expanded tensor without memory of its own, would be
    refused.
    """
    theirs, ours = pair(layer, backend, device=device)
    one = flat(state(theirs, 1))
    x = torch.randn(T, B, I, device=device)
    wide = [s.expand(-1, B, -1) for s in one]
    expected = flat(theirs(x, tuple(wide) if len(wide) == 2 else wide[0]))
    got = flat(ours(x, wide if len(wide) == 2 else wide[0]))
    assert_close(got, expected)
    assert_close(gradients(got, one), gradients(expected, one))


@pytest.mark.parametrize("layer", LAYERS)
def test_results_are_shaped_as_torchs(layer, backend, device):
    """Code that unpacks the result would break: a tuple of a tensor and a tensor, or of a pair."""
    theirs, ours = pair(layer, backend, device=device)
    x = torch.randn(T, B, I, device=device)
    got, expected = ours(x), theirs(x)
    assert type(got) is type(expected) is tuple
    assert type(got[1]) is type(expected[1])
    assert all(a.requires_grad for a in flat(got))
    with torch.no_grad():
        assert not any(a.requires_grad for a in flat(ours(x)))


@pytest.mark.parametrize("steps", [1, T])
@pytest.mark.parametrize("layer", LAYERS)
def test_states_are_detached_in_place(layer, steps, backend, device):
    """Truncated backpropagation that writes `h.detach_()` would stop at layers of one direction."""
    theirs, ours = pair(layer, backend, device=device)
    x = torch.randn(steps, B, I, device=device)
    (y, states), wanted = ours(x), theirs(x)
    for h in flat(states):
        assert h.requires_grad and not h.detach_().requires_grad
    assert_close([y, *flat(states)], flat(wanted))
    parameters = [
        [one.get_parameter(n) for n, _ in theirs.named_parameters()] for one in (ours, theirs)
    ]
    assert_close(gradients([y], parameters[0]), gradients(flat(wanted)[:1], parameters[1]))


@pytest.mark.parametrize("layer", LAYERS)
def test_frozen_parameters_get_no_gradient(layer, backend, device):
    """A frozen weight would be trained, or its freezing would stop the others."""
    theirs, ours = pair(layer, backend, device=device, num_layers=2)
    for module in (theirs, ours):
        module.weight_hh_l0.requires_grad_(False)
        module.bias_ih_l1.requires_grad_(False)
        results = flat(module(torch.ones(T, B, I, device=device)))
        torch.stack([result.sum() for result in results]).sum().backward()
    for name, parameter in theirs.named_parameters():
        got = dict(ours.named_parameters())[name].grad
        assert (got is None) == (parameter.grad is None), name
        if got is not None:
            assert_close([got], [parameter.grad])


@pytest.mark.parametrize("layer", LAYERS)
def test_backward_in_eval_mode(layer, backend, device):
    """Backward through a layer in evaluation mode (fine-tuning with noise off) would fail or
    differ.
    """
    theirs, ours = pair(layer, backend, device=device, num_layers=2, dropout=0.5)
    ours.noise = zo.Zoneout(hidden=0.3, at_eval="off")
    assert_same(ours.eval(), theirs.eval(), leaf(T, B, I, device=device), state(theirs, B))


# --- construction ---------------------------------------------------------------------------------


EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "noise": {"noise": zo.Zoneout(hidden=0.5)},
    "norm": {"norm": "layer"},
    "learned state": {"learn_initial_state": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("layer", LAYERS)
def test_same_weights_from_the_same_seed(layer, extra, dtype):
    """A run with the same torch.manual_seed would start from other weights than nn.LSTM's."""
    torch.manual_seed(3)
    theirs = make(nn, layer, num_layers=2, bidirectional=True, dtype=dtype)
    after = torch.rand(4)
    torch.manual_seed(3)
    ours = make(zo, layer, num_layers=2, bidirectional=True, dtype=dtype, **EXTRAS[extra])
    assert torch.equal(torch.rand(4), after), "the generator has moved on by another amount"
    for name, parameter in theirs.named_parameters():
        assert torch.equal(getattr(ours, name), parameter), name

    torch.manual_seed(4)
    theirs.reset_parameters()
    torch.manual_seed(4)
    ours.reset_parameters()
    assert all(torch.equal(getattr(ours, n), p) for n, p in theirs.named_parameters())


@pytest.mark.parametrize("layer", CELLS)
def test_cells_same_weights_from_the_same_seed(layer):
    """A run with the same torch.manual_seed would start from other weights than nn.LSTMCell's."""
    torch.manual_seed(3)
    theirs = make(nn, layer, cell=True)
    torch.manual_seed(3)
    ours = make(zo, layer, cell=True, noise=zo.Zoneout(hidden=0.5))
    assert all(torch.equal(getattr(ours, n), p) for n, p in theirs.named_parameters())


@pytest.mark.parametrize("cell", [False, True], ids=["layer", "cell"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_checkpoints_go_both_ways(layer, bias, cell):
    """A checkpoint would not load, strictly, from torch.nn or into it: names, order, shapes."""
    if cell and layer not in CELLS:
        return
    options = {"bias": bias} if cell else {"bias": bias, "num_layers": 2, "bidirectional": True}
    theirs = make(nn, layer, cell, **options)
    ours = make(zo, layer, cell, noise=zo.Zoneout(hidden=0.1), **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(1.0)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


ATTRIBUTES = [
    "mode", "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout",
    "bidirectional", "proj_size", "training", "_flat_weights_names", "_all_weights",
]  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS)
def test_attributes_are_torchs(layer):
    """Code that asks a layer for its sizes, or for its weights in torch's order, would get
    another answer.
    """
    options: dict[str, Any] = {
        "num_layers": 2,
        "bidirectional": True,
        "bias": False,
        "batch_first": True,
    }
    theirs, ours = pair(layer, "reference", dropout=0.25, **options)
    for name in ATTRIBUTES + (["nonlinearity"] if theirs.mode.startswith("RNN") else []):
        assert getattr(ours, name) == getattr(theirs, name), name
    for mine, other in zip(ours.all_weights, theirs.all_weights, strict=True):
        assert_close(mine, other)
        assert all(isinstance(weight, nn.Parameter) for weight in mine)
    named = [getattr(ours, name) for name in ours._flat_weights_names]
    assert all(a is b for a, b in zip(ours._flat_weights, named, strict=True))
    assert isinstance(ours, nn.RNNBase)
    assert ours.__constants__ == theirs.__constants__


@pytest.mark.parametrize("cell", [False, True], ids=["layer", "cell"])
@pytest.mark.parametrize("layer", LAYERS)
def test_no_public_name_of_torchs_is_missing(layer, cell):
    """Code that uses a public method or attribute of nn.LSTM would meet an AttributeError."""
    if cell and layer not in CELLS:
        return
    theirs, ours = make(nn, layer, cell), make(zo, layer, cell)
    assert {name for name in dir(theirs) if not name.startswith("_")} <= set(dir(ours))


@pytest.mark.parametrize("layer", LAYERS)
def test_weights_set_by_hand_are_used(layer, backend, device):
    """A weight assigned after construction (tying, surgery) would not be the one the layer runs
    with.
    """
    theirs, ours = pair(layer, backend, device=device)
    for module in (theirs, ours):
        torch.manual_seed(6)
        module.weight_hh_l0 = nn.Parameter(torch.randn_like(module.weight_hh_l0))
    assert ours.all_weights[0][1] is ours.weight_hh_l0
    assert_same(ours, theirs, leaf(T, B, I, device=device))


@pytest.mark.parametrize("layer", LAYERS)
def test_flatten_parameters(layer, backend, device):
    """`flatten_parameters`, which many models call in forward, would fail or change the result."""
    theirs, ours = pair(layer, backend, device=device)
    assert ours.flatten_parameters() is None
    assert_same(ours, theirs, leaf(T, B, I, device=device))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"num_layers": 2, "dropout": 0.5},
        {"batch_first": True, "bidirectional": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("layer", LAYERS)
def test_printed_as_torchs(layer, options):
    """A printed model would no longer read as it did, or would not say what the noise is."""
    theirs, ours = make(nn, layer, **options), make(zo, layer, **options)
    assert str(ours) == str(theirs)
    assert ours.extra_repr() == theirs.extra_repr()
    ours.noise = zo.Zoneout(hidden=0.25)
    assert str(ours) == str(theirs)[:-1] + ", noise=Zoneout(hidden=0.25))"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", CELLS)
def test_cells_printed_as_torchs(layer, bias):
    """A printed cell would no longer read as it did."""
    ours = make(zo, layer, True, bias=bias)
    assert str(ours) == str(make(nn, layer, True, bias=bias))
    ours.noise = zo.Zoneout(hidden=0.25)
    assert "noise=Zoneout(hidden=0.25)" in str(ours)


POSITIONAL: dict[str, tuple[Any, ...]] = {
    "LSTM": (3, 5, 2, False, True, 0.25, True, 2, "cpu", torch.float64),
    "GRU": (3, 5, 2, False, True, 0.25, True),
    "RNN": (3, 5, 2, "relu", False, True, 0.25, True),
    "LSTMCell": (3, 5, False, "cpu", torch.float64),
    "GRUCell": (3, 5, False, "cpu", torch.float64),
    "RNNCell": (3, 5, False, "relu", "cpu", torch.float64),
}


@pytest.mark.parametrize("name", POSITIONAL)
def test_positional_arguments(name):
    """An argument given by position would land in another parameter than torch's."""
    theirs, ours = getattr(nn, name)(*POSITIONAL[name]), getattr(zo, name)(*POSITIONAL[name])
    assert ours.extra_repr() == theirs.extra_repr()
    for (name_a, a), (name_b, b) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert (name_a, a.shape, a.dtype, a.device) == (name_b, b.shape, b.dtype, b.device)


@pytest.mark.parametrize("name", POSITIONAL)
def test_constructor_signature(name):
    """An argument of torch's constructor would be missing, misplaced, or have another default."""
    theirs = getattr(nn, name).__init__
    documented = (typing.get_overloads(theirs) or [theirs])[
        0
    ]  # nn.LSTM itself takes *args, **kwargs
    expected = list(inspect.signature(documented).parameters.values())
    got = list(inspect.signature(getattr(zo, name).__init__).parameters.values())
    assert [(p.name, p.default) for p in got[: len(expected)]] == [
        (p.name, p.default) for p in expected
    ]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in got[len(expected) :])


@pytest.mark.parametrize("name", POSITIONAL)
def test_forward_signature(name):
    """The call would not take `input` and `hx` by position or by name, as torch's does."""
    got = list(inspect.signature(getattr(zo, name).forward).parameters.values())
    assert [(p.name, p.default) for p in got[1:3]] == [
        ("input", inspect.Parameter.empty),
        ("hx", None),
    ]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in got[3:])


@pytest.mark.parametrize("layer", LAYERS)
def test_dropout_of_one_layer_warns_as_torch(layer):
    """The warning that dropout between the layers needs two of them would be lost."""
    with pytest.warns(UserWarning, match="dropout option adds dropout after all but last"):
        make(zo, layer, dropout=0.5)


# --- cells ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("given", [True, False], ids=["given hx", "default hx"])
@pytest.mark.parametrize(
    "batch", [(B,), (), (0,), (1,)], ids=["batched", "unbatched", "batch 0", "one row"]
)
@pytest.mark.parametrize("layer", CELLS)
def test_cells(layer, batch, given, bias, dtype, backend, device):
    """A cell with no noise would not be torch's."""
    theirs, ours = pair(layer, backend, cell=True, bias=bias, dtype=dtype, device=device)
    x = leaf(*batch, I, dtype=dtype, device=device)
    states = tuple(
        leaf(*batch, H, dtype=dtype, device=device) for _ in range(2 if layer == "LSTM" else 1)
    )
    hx = (states if layer == "LSTM" else states[0]) if given else None
    expected, got = theirs(x, hx), ours(x, hx)
    assert type(got) is type(expected)
    assert_close(flat(got), flat(expected))
    leaves = [x, *flat(hx)]
    assert_close(
        gradients(flat(got), leaves + list(ours.parameters())),
        gradients(flat(expected), leaves + list(theirs.parameters())),
    )


NOISES: dict[str, Any] = {
    "none": None,
    "unit": zo.Zoneout(hidden=0.4),
    "shared": zo.Zoneout(hidden=0.4, mask="shared"),
    "step": zo.Zoneout(hidden=0.4, mask="step"),
    "sequence": zo.Zoneout(hidden=0.4, mask="sequence"),
    "static": zo.Zoneout(hidden=0.4, mask="static", seed=5),
    "state dropout": zo.StateDropout(hidden=0.3),
    "variational": zo.VariationalDropout(input=0.3, hidden=0.4),
    "weight drop": zo.WeightDrop(rate=0.4),
    "weight noise": zo.WeightNoise(std=0.1),
    "several": [
        zo.Zoneout(hidden=0.3),
        zo.VariationalDropout(input=0.2, hidden=0.2),
        zo.WeightDrop(rate=0.1),
        zo.WeightNoise(std=0.05),
    ],
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("layer", CELLS)
def test_stepping_a_cell_equals_the_layer(layer, noise, training, backend, device):
    """A decoder that steps by cells would draw other masks than the layer it was trained as."""
    common: dict[str, Any] = {
        "noise": NOISES[noise], "dtype": torch.float64, "device": device, "backend": backend
    }  # fmt: skip
    whole = make(zo, layer, num_layers=2, **common).train(training)
    options = {k: v for k, v in CELLS[layer].items() if k != "name"}
    cells = []
    for k, size in enumerate((I, H)):
        cell = getattr(zo, CELLS[layer]["name"] + "Cell")(size, H, layer=k, **options, **common)
        cell.train(training)
        cell.load_state_dict({n: getattr(whole, f"{n}_l{k}") for n in cell.state_dict()})
        cells.append(cell)
    x = torch.randn(T, B, I, dtype=torch.float64, device=device)
    where: dict[str, Any] = {"seed": 11, "examples": [7, 0, 3, 9]}
    expected, _ = whole(x, first_step=2, **where)
    states: list[Any] = [None, None]
    for t, row in enumerate(x):
        for k, cell in enumerate(cells):
            states[k] = cell(row, states[k], step=2 + t, **where)
            row = flat(states[k])[0]
        assert_close([row], [expected[t]])


def test_stepping_an_lstm_cell_equals_the_layer_in_every_stream(backend, device):
    """A stream of an LSTM that other cells lack (cell, update) would be drawn elsewhere by the
    cell.
    """
    noise = [
        zo.Zoneout(cell=0.4, hidden=0.2, mask="shared"),
        zo.RecurrentDropout(rate=0.3, mask="step"),
    ]
    whole = zo.LSTM(I, H, noise=noise, device=device, backend=backend)
    cell = zo.LSTMCell(I, H, noise=noise, device=device, backend=backend)
    cell.load_state_dict(
        {name.removesuffix("_l0"): value for name, value in whole.state_dict().items()}
    )
    x = torch.randn(T, B, I, device=device)
    y, (h, c) = whole(x, seed=11)
    hx: Any = None
    for t in range(T):
        hx = cell(x[t], hx, seed=11, step=t)
        assert_close([hx[0]], [y[t]])
    assert_close(list(hx), [h[0], c[0]])


# --- beyond torch: lengths, resets, return_cells --------------------------------------------------


FULL: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "dtype": torch.float64}


def padded(result: Any) -> list[Tensor]:
    """The tensors of a packed result, unpacked."""
    return [
        tensor
        for one in result
        for tensor in (
            [pad_packed_sequence(one)[0]] if isinstance(one, PackedSequence) else flat(one)
        )
    ]


@pytest.mark.parametrize("noise", [None, zo.Zoneout(hidden=0.5)], ids=["no noise", "noise"])
@pytest.mark.parametrize("layer", LAYERS)
def test_lengths_equal_packing(layer, noise, backend, device):
    """A padded batch with `lengths` would not give what packing it gives, masks included."""
    ours = make(zo, layer, noise=noise, backend=backend, device=device, dropout=0.3, **FULL)
    x, hx = leaf(T, B, I, dtype=torch.float64, device=device), state(ours, B)
    cells = {"return_cells": True} if ours.kind == "lstm" else {}
    leaves = [x, *flat(hx), *ours.parameters()]
    packed = ours(packer(LENGTHS, False)(x), hx, seed=4, **cells)
    forms = [
        LENGTHS,
        torch.tensor(LENGTHS),
        torch.tensor(LENGTHS, dtype=torch.int32, device=device),
    ]
    for lengths in (*forms, np.array(LENGTHS, np.uint16), np.array(LENGTHS, np.uint64)):
        given = ours(x, hx, lengths=lengths, seed=4, **cells)
        assert_close(flat(given), padded(packed))
    assert_close(gradients(flat(given), leaves), gradients(padded(packed), leaves))


@pytest.mark.parametrize("layer", LAYERS)
def test_lengths_with_batch_first_and_unbatched(layer, backend, device):
    """`lengths` would be read along the wrong dimension."""
    ours = make(zo, layer, backend=backend, device=device, **FULL)
    x = torch.randn(T, B, I, dtype=torch.float64, device=device)
    expected = flat(ours(x, lengths=LENGTHS))
    ours.batch_first = True
    got = flat(ours(x.transpose(0, 1), lengths=LENGTHS))
    assert_close([got[0].transpose(0, 1), *got[1:]], expected)
    for lengths in ([3], 3, torch.tensor(3)):
        assert_close(flat(ours(x[:, 0], lengths=lengths)), [v[:, 0] for v in expected])


@pytest.mark.parametrize("layer", LAYERS)
def test_an_empty_sequence_keeps_the_initial_state(layer, backend, device):
    """A row of length 0, which packing refuses, would not come back with the state it came with."""
    ours = make(zo, layer, backend=backend, device=device, noise=zo.Zoneout(hidden=0.5), **FULL)
    x, hx = torch.randn(T, B, I, dtype=torch.float64, device=device), state(ours, B)
    y, ended = ours(x, hx, lengths=[2, 0, T, 0])
    assert not y[:, [1, 3]].any()
    for got, given in zip(flat(ended), flat(hx), strict=True):
        assert torch.equal(got[:, [1, 3]], given[:, [1, 3]])


@pytest.mark.parametrize("layer", LAYERS)
def test_batch_0_with_lists(layer, backend, device):
    """An empty batch would be refused where its lengths and ids are empty lists, which have no
    dtype.
    """
    ours = make(zo, layer, backend=backend, device=device, noise=zo.Zoneout(hidden=0.5), **FULL)
    x = torch.randn(T, 0, I, dtype=torch.float64, device=device)
    expected = [tuple(v.shape) for v in flat(ours(x))]
    assert [
        tuple(v.shape) for v in flat(ours(x, lengths=torch.tensor([], dtype=torch.int64)))
    ] == expected
    assert [tuple(v.shape) for v in flat(ours(x, lengths=[]))] == expected
    assert [tuple(v.shape) for v in flat(ours(x, examples=[]))] == expected


@pytest.mark.parametrize("filling", [1e3, float("inf"), float("nan")])
@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_in_the_padding_does_not_matter(layer, filling, backend, device):
    """What stands past a sequence's end would reach a result or a gradient, as it never does
    when packed.
    """
    ours = make(zo, layer, backend=backend, device=device, **FULL)
    past = (torch.arange(T)[:, None] >= torch.tensor(LENGTHS))[..., None].to(device)
    x = torch.randn(T, B, I, dtype=torch.float64, device=device)
    results = []
    for value in (0.0, filling):
        filled = torch.where(past, value, x).requires_grad_()
        got = flat(ours(filled, lengths=LENGTHS))
        results.append((got, gradients(got, [filled, *ours.parameters()])))
    assert_close(results[1][0], results[0][0])
    assert_close(results[1][1], results[0][1])


CUTS = [[0, 2, 4], [3], [], [1, 2, 3, 4]]  # for each row, the steps before which its state is reset


def segments(cuts: list[int]) -> list[tuple[int, int]]:
    ends = sorted({0, *cuts, T})
    return list(itertools.pairwise(ends))


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one direction", "two directions"])
@pytest.mark.parametrize(
    "noise",
    [None, zo.Zoneout(hidden=0.5), zo.VariationalDropout(input=0.2, hidden=0.5)],
    ids=["no noise", "zoneout", "variational"],
)
@pytest.mark.parametrize("layer", LAYERS)
def test_resets_equal_separate_sequences(layer, noise, bidirectional, backend, device):
    """Something would cross a reset, or the state after it would not be the initial one."""
    ours = make(zo, layer, noise=noise, num_layers=2, bidirectional=bidirectional, dropout=0.3,
                dtype=torch.float64, backend=backend, device=device)  # fmt: skip
    x, hx = leaf(T, B, I, dtype=torch.float64, device=device), state(ours, B)
    resets = torch.zeros(T, B, dtype=torch.bool, device=device)
    for row, cuts in enumerate(CUTS):
        resets[cuts, row] = True
    got = flat(ours(x, hx, resets=resets, seed=4))

    rows = []
    for row, cuts in enumerate(CUTS):
        parts = []
        for start, end in segments(cuts):
            # what is given enters where a direction begins, unless a cut is there already
            enters = (float(start == 0 and 0 not in cuts), float(end == T))
            there = torch.tensor(
                enters[: 2 if bidirectional else 1] * 2, dtype=torch.float64, device=device
            )
            given = tuple(s[:, row : row + 1] * there[:, None, None] for s in flat(hx))
            hx_row = given if ours.kind == "lstm" else given[0]
            part = x[start:end, row : row + 1]
            parts.append(flat(ours(part, hx_row, seed=4, first_step=start, examples=row)))
        ys = torch.cat([part[0] for part in parts])
        directions = 2 if bidirectional else 1
        # forwards, a row ends with its last segment; backwards, with its first
        ends = [
            torch.stack([parts[0 if k % directions else -1][n][k] for k in range(2 * directions)])
            for n in range(1, len(parts[0]))
        ]
        rows.append([ys, *ends])
    expected = [torch.cat(some, dim=1) for some in zip(*rows, strict=True)]
    assert_close(got, expected)
    leaves = [x, *flat(hx), *ours.parameters()]
    assert_close(gradients(got, leaves), gradients(expected, leaves))


def test_resets_let_go_of_the_held_output_gate(backend, device):
    """A held output gate would cross a reset."""
    noise = zo.RecurrentDropout(rate=0.7, hold_output_gate=True)
    ours = zo.LSTM(I, H, noise=noise, dtype=torch.float64, backend=backend, device=device)
    x = torch.randn(T, 1, I, dtype=torch.float64, device=device)
    resets = (torch.arange(T, device=device) == 2)[:, None]
    whole = ours(x, seed=1, resets=resets)[0]
    parts = [ours(x[:2], seed=1)[0], ours(x[2:], seed=1, first_step=2)[0]]
    assert_close([whole], [torch.cat(parts)])


@pytest.mark.parametrize("layer", LAYERS)
def test_resets_in_every_form_of_input(layer, backend, device):
    """`resets` would be read in another order than the input beside it."""
    ours = make(zo, layer, backend=backend, device=device, **FULL)
    x = torch.randn(T, B, I, dtype=torch.float64, device=device)
    resets = torch.zeros(T, B, dtype=torch.bool, device=device)
    resets[2, 0] = resets[1, 3] = resets[3, 1] = True
    expected = flat(ours(x, resets=resets))
    assert_close(flat(ours(x, resets=resets.cpu().numpy())), expected)
    short = flat(ours(x, resets=resets, lengths=LENGTHS))
    packed = padded(ours(packer(LENGTHS, False)(x), resets=resets))
    assert_close(packed, short)
    assert_close(flat(ours(x[:, 0], resets=resets[:, 0])), [v[:, 0] for v in expected])
    ours.batch_first = True
    first = flat(ours(x.transpose(0, 1), resets=resets.t()))
    assert_close([first[0].transpose(0, 1), *first[1:]], expected)
    for row, length in enumerate(LENGTHS):  # a row alone, without its padding
        alone = flat(ours(x[:length, row], resets=resets[:length, row]))
        assert_close(alone, [short[0][:length, row], *(v[:, row] for v in short[1:])])


@pytest.mark.parametrize("recompute", [False, True])
def test_resets_of_an_array_that_is_written_to_again(recompute, backend, device):
    """An environment's own array of ends, which it fills anew before the way back, would cut
    other steps there.
    """
    ours = make(zo, "LSTM", backend=backend, device=device, recompute=recompute)
    ends = np.zeros((T, B), bool)
    ends[2, 0] = ends[1, 3] = True
    y, _ = ours(torch.randn(T, B, I, device=device), resets=ends)
    before = torch.autograd.grad(y.sum(), ours.weight_hh_l0, retain_graph=True)
    ends[:] = ~ends
    assert_close(torch.autograd.grad(y.sum(), ours.weight_hh_l0), before)


def test_a_reset_at_the_start_lets_go_of_the_given_state(backend, device):
    """A state carried over from another episode would go on into a new one; or no reset at all
    would do something.
    """
    ours = zo.LSTM(I, H, backend=backend, device=device, num_layers=2, bidirectional=True)
    x, hx = torch.randn(T, B, I, device=device), state(ours, B)
    expected = flat(ours(x, hx))
    resets = torch.zeros(T, B, dtype=torch.bool, device=device)
    assert_close(flat(ours(x, hx, resets=resets)), expected)
    resets[0] = True
    assert_close(flat(ours(x, resets=resets)), flat(ours(x)))
    forwards = zo.LSTM(I, H, backend=backend, device=device, num_layers=2)
    hx = state(forwards, B)
    assert_close(flat(forwards(x, hx, resets=resets)), flat(forwards(x)))


@pytest.mark.parametrize("proj_size", [0, 2])
def test_return_cells_are_the_cells_of_every_step(proj_size, backend, device):
    """`return_cells` would give other cells than nn.LSTM goes through, or gradients that go
    astray.
    """
    theirs = nn.LSTM(I, H, proj_size=proj_size, dtype=torch.float64, device=device)
    ours = zo.LSTM(I, H, proj_size=proj_size, dtype=torch.float64, device=device, backend=backend)
    ours.load_state_dict(theirs.state_dict())
    x, hx = leaf(T, B, I, dtype=torch.float64, device=device), state(theirs, B)
    y, (h, c), cells = ours(x, hx, return_cells=True)
    carried, stepped = hx, []
    for row in x.unbind(0):
        _, carried = theirs(row[None], carried)
        stepped.append(carried[1][0])
    expected = torch.stack(stepped)
    assert_close([cells, cells[-1], y[-1]], [expected, c[0], h[0]])
    leaves = [x, *flat(hx)]
    assert_close(
        gradients([cells], leaves + list(ours.parameters())),
        gradients([expected], leaves + list(theirs.parameters())),
    )


def test_return_cells_of_two_directions(backend, device):
    """The cells of two directions would not lie side by side as outputs do, in the input's form."""
    ours = zo.LSTM(
        I,
        H,
        num_layers=2,
        bidirectional=True,
        proj_size=2,
        batch_first=True,
        device=device,
        backend=backend,
        noise=zo.Zoneout(cell=0.5, hidden=0.5),
    )
    x = torch.randn(B, T, I, device=device)
    y, (h, c), cells = ours(x, lengths=LENGTHS, seed=3, return_cells=True)
    assert cells.shape == (B, T, 2 * H)
    for row, length in enumerate(LENGTHS):
        assert torch.equal(cells[row, length - 1, :H], c[-2, row])
        assert torch.equal(cells[row, 0, H:], c[-1, row])
        assert not cells[row, length:].any()
    packed = pack_padded_sequence(x, torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False)
    again = ours(packed, seed=3, return_cells=True)
    assert isinstance(again[2], PackedSequence)
    assert_close([pad_packed_sequence(again[2], batch_first=True)[0]], [cells])
    assert_close(flat(ours(x, lengths=LENGTHS, seed=3)), [y, h, c])
    y_one, _, cells_one = ours(x[0], return_cells=True)
    assert y_one.shape == (T, 4) and cells_one.shape == (T, 2 * H)


# --- torch's dropout between the layers -----------------------------------------------------------


def see_through(dropout: float, backend: str, device: str, **options: Any) -> Any:
    """A layer whose output is the dropout mask with its scale: all that goes in or out of a unit
    is 1.
    """
    layer: Any = zo.RNN(1, H, 2, "relu", dropout=dropout, backend=backend, device=device, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.bias_ih_l0.fill_(1.0)
        layer.weight_ih_l1.copy_(torch.eye(H))
    return layer


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_dropout_between_layers_has_torchs_rate_and_scale(rate, backend, device):
    """The constructor's `dropout` would drop at another rate than torch's, or not scale what is
    left.
    """
    y, _ = see_through(rate, backend, device)(torch.ones(50, 40, 1, device=device))
    kept = y > 0
    assert_close([y[kept]], [torch.full_like(y[kept], 1 / (1 - rate))])
    deviation = (rate * (1 - rate) / y.numel()) ** 0.5
    assert abs((~kept).double().mean().item() - rate) < 5 * deviation + 2**-17
    for dim in range(3):  # fresh for every step, example and unit
        assert (kept.narrow(dim, 1, 1) != kept.narrow(dim, 0, 1)).any()


def test_dropout_between_layers_follows_the_seed(backend, device):
    """The constructor's `dropout` would ignore `seed`, or see the padding of a batch."""
    layer, x = see_through(0.5, backend, device), torch.ones(T, B, 1, device=device)
    y, _ = layer(x, seed=1)
    assert torch.equal(y, layer(x, seed=1)[0])
    assert not torch.equal(y, layer(x, seed=2)[0])
    assert torch.equal(y[2:, 1:], layer(x[2:, 1:], seed=1, first_step=2, examples=1)[0])
    torch.manual_seed(1)
    y, _ = layer(x)
    torch.manual_seed(1)
    assert torch.equal(y, layer(x)[0])
    assert not torch.equal(y, layer(x)[0])


@pytest.mark.parametrize("layer", LAYERS)
def test_dropout_of_everything_equals_torchs(layer, backend, device):
    """With dropout 1 nothing is left to chance: every layer after the first would see something
    but zeros.
    """
    theirs, ours = pair(
        layer, backend, device=device, num_layers=3, bidirectional=True, dropout=1.0
    )
    assert_same(ours, theirs, leaf(T, B, I, device=device), state(theirs, B))


@pytest.mark.parametrize("layer", LAYERS)
def test_dropout_is_off_at_evaluation(layer, backend, device):
    """Torch's dropout would act at evaluation."""
    theirs, ours = pair(
        layer, backend, device=device, num_layers=2, bidirectional=True, dropout=0.5
    )
    assert_same(ours.eval(), theirs.eval(), leaf(T, B, I, device=device))


# --- randomness -----------------------------------------------------------------------------------


def generator_state(device: str) -> Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


QUIET: dict[
    str, tuple[dict[str, Any], bool, dict[str, Any]]
] = {  # options, training, arguments of the call
    "no noise": ({}, True, {}),
    "noise of rate 0": ({"noise": zo.Zoneout(hidden=0.0)}, True, {}),
    "noise at evaluation": ({"noise": zo.Zoneout(hidden=0.5)}, False, {}),
    "noise with a seed": ({"noise": zo.Zoneout(hidden=0.5)}, True, {"seed": 3}),
    "static noise": ({"noise": zo.Zoneout(hidden=0.5, mask="static", seed=3)}, True, {}),
    "dropout of one layer": ({"dropout": 0.5}, True, {}),
    "dropout at evaluation": ({"dropout": 0.5, "num_layers": 2}, False, {}),
    "dropout with a seed": ({"dropout": 0.5, "num_layers": 2}, True, {"seed": 3}),
}


@pytest.mark.parametrize("case", QUIET)
@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_is_drawn_without_need(layer, case, backend, device):
    """A layer that needs no random numbers would move torch's generator, and so everyone else's
    draws.
    """
    options, training, call = QUIET[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # dropout with one layer
        ours = make(zo, layer, backend=backend, device=device, **options).train(training)
    x = torch.randn(T, B, I, device=device)
    before = generator_state(device)
    ours(x, **call)
    assert torch.equal(generator_state(device), before)


@pytest.mark.parametrize("noise", [key for key in NOISES if key not in ("none", "static")])
def test_manual_seed_decides(noise, backend, device):
    """With noise and no seed=, torch.manual_seed would not decide, or every call would draw the
    same.
    """
    ours = zo.GRU(I, H, noise=NOISES[noise], backend=backend, device=device)
    x, h = torch.randn(20, B, I, device=device), torch.randn(1, B, H, device=device)
    torch.manual_seed(1)
    first, second = ours(x, h)[0], ours(x, h)[0]
    torch.manual_seed(1)
    assert torch.equal(first, ours(x, h)[0])
    assert torch.equal(second, ours(x, h)[0])
    assert not torch.equal(first, second)
    torch.manual_seed(2)
    assert not torch.equal(first, ours(x, h)[0])


@pytest.mark.parametrize("noise", [key for key in NOISES if key not in ("none", "static")])
def test_seed_fixes_the_draw(noise, backend, device):
    """The same seed= would not give the same draw whatever torch's generator says, or seeds
    would collide.
    """
    ours = zo.GRU(I, H, noise=NOISES[noise], backend=backend, device=device)
    x, h = torch.randn(20, B, I, device=device), torch.randn(1, B, H, device=device)
    results = {seed: ours(x, h, seed=seed)[0] for seed in (0, 1, -1, 2**63, 2**32, 2**32 + 1)}
    for seed, y in results.items():
        torch.manual_seed(seed & 0xFFFF)
        assert torch.equal(y, ours(x, h, seed=seed)[0])
    for a, b in itertools.combinations(results, 2):
        assert not torch.equal(results[a], results[b]), (a, b)
    assert torch.equal(results[1], ours(x, h, seed=torch.tensor(1))[0])
    assert torch.equal(results[1], ours(x, h, seed=torch.tensor([1], device=device))[0])
    assert torch.equal(results[-1], ours(x, h, seed=2**64 - 1)[0])  # the same 64 bits


def test_a_static_mask_needs_no_seed_and_follows_none(backend, device):
    """A static mask would change from call to call, or follow the seed of the call."""
    ours = zo.GRU(
        I, H, noise=zo.Zoneout(hidden=0.5, mask="static", seed=9), backend=backend, device=device
    )
    x = torch.randn(T, B, I, device=device)
    y, _ = ours(x)
    assert torch.equal(y, ours(x)[0])
    assert torch.equal(y, ours(x, seed=4)[0])
    ours.noise = zo.Zoneout(hidden=0.5, mask="static", seed=10)
    assert not torch.equal(y, ours(x)[0])


def test_at_eval_sample_draws_at_evaluation(backend, device):
    """`at_eval="sample"` would not sample, or not by torch's generator; "off" would not be off."""
    ours = zo.GRU(
        I, H, noise=zo.Zoneout(hidden=0.5, at_eval="sample"), backend=backend, device=device
    )
    x = torch.randn(T, B, I, device=device)
    sampled = ours(x, seed=3)[0]
    ours.eval()
    assert torch.equal(ours(x, seed=3)[0], sampled)
    assert not torch.equal(ours(x)[0], ours(x)[0])
    ours.noise = zo.Zoneout(hidden=0.5, at_eval="off")
    off = ours(x)[0]
    ours.noise = None
    assert torch.equal(off, ours(x)[0])


# --- rates ----------------------------------------------------------------------------------------


def test_noise_replaced_between_steps_takes_effect(backend, device):
    """A schedule of rates would not reach the layer, or leave something of the noise before."""
    ours = zo.LSTM(I, H, num_layers=2, backend=backend, device=device)
    x, hx = torch.randn(T, B, I, device=device), state(ours, B)
    schedule: list[Any] = [
        None,
        zo.Zoneout(cell=0.1, hidden=0.2),
        zo.Zoneout(cell=0.9, hidden=0.8),
        zo.Zoneout(hidden=[0.5, 0.25]),
        [zo.Zoneout(cell=0.5), zo.VariationalDropout(input=0.5)],
        zo.Zoneout(cell=0.5, mask="static", seed=3),
        zo.StateDropout(cell=torch.linspace(0, 1, H)),
        [],
        None,
    ]
    seen = []
    for noise in schedule:
        ours.noise = noise
        fresh = zo.LSTM(I, H, num_layers=2, backend=backend, device=device, noise=noise)
        fresh.load_state_dict(ours.state_dict())
        for mode in (True, False):
            assert_close(
                flat(ours.train(mode)(x, hx, seed=2)), flat(fresh.train(mode)(x, hx, seed=2))
            )
        seen.append(ours.train()(x, hx, seed=2)[0])
    assert torch.equal(seen[0], seen[-1]) and torch.equal(seen[0], seen[-2])
    for a, b in itertools.combinations(seen[:-2], 2):
        assert not torch.equal(a, b)


def test_noise_replaced_after_forward_does_not_disturb_backward(backend, device):
    """A schedule that moves on between forward and backward would break the gradient."""
    for dtype, mode in itertools.product(DTYPES, (True, False)):
        ours = zo.LSTM(I, H, dtype=dtype, backend=backend, device=device).train(mode)
        ours.noise = zo.Zoneout(cell=0.5, hidden=0.5)
        x = torch.randn(T, B, I, dtype=dtype, device=device)
        parameters = list(ours.parameters())
        expected = torch.autograd.grad(ours(x, seed=1)[0].sum(), parameters)
        loss = ours(x, seed=1)[0].sum()
        ours.noise = zo.Zoneout(cell=0.1, hidden=0.1)
        assert_close(list(torch.autograd.grad(loss, parameters)), list(expected))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_rates_of_zero_and_one_are_certain(training, backend, device):
    """A unit of rate 1 would ever be updated, or one of rate 0 ever be kept."""
    rate = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    ours = zo.GRU(I, H, noise=zo.Zoneout(hidden=rate), backend=backend, device=device).train(
        training
    )
    theirs = nn.GRU(I, H, device=device)
    theirs.load_state_dict(ours.state_dict())
    x, h = torch.randn(40, 20, I, device=device), torch.randn(1, 20, H, device=device)
    y, _ = ours(x, h)
    stuck = rate.bool().to(device)
    assert torch.equal(y[..., stuck], h[..., stuck].expand(40, -1, -1))
    carried = torch.cat((h, y[:-1])).flatten(0, 1)[
        None
    ]  # every step of torch's from our state before it
    expected = theirs(x.flatten(0, 1)[None], carried)[0].view_as(y)
    assert_close([y[..., ~stuck]], [expected[..., ~stuck]])


def test_rates_as_numbers_lists_and_tensors_agree(backend, device):
    """One number for all layers, a list of them and a tensor of them would not be the same
    rates.
    """
    ours = zo.LSTM(I, H, num_layers=2, backend=backend, device=device)
    x = torch.randn(T, B, I, device=device)
    results = []
    each = torch.full((H,), 0.3, dtype=torch.float64)
    rates: list[Any] = [0.3, [0.3, 0.3], (0.3, 0.3), each, [0.3, each], each[0]]
    for rate in rates:
        ours.noise = zo.Zoneout(cell=rate, hidden=rate)
        results.append(flat(ours(x, seed=1)))
    for result in results[1:]:
        assert_close(result, results[0])


def test_a_list_of_rates_is_one_a_layer(backend, device):
    """The rates of a list would go to other layers than theirs."""
    for kept in range(3):
        rates = [1.0 if k == kept else 0.0 for k in range(3)]
        ours = zo.RNN(
            I,
            H,
            num_layers=3,
            bidirectional=True,
            noise=zo.Zoneout(hidden=rates),
            device=device,
            backend=backend,
        )
        h0 = torch.randn(6, B, H, device=device)
        _, h = ours(torch.randn(T, B, I, device=device), h0)
        same = [torch.equal(h[k], h0[k]) for k in range(6)]
        assert same == [k // 2 == kept for k in range(6)]


def test_a_tensor_of_rates_is_copied(backend, device):
    """A tensor of rates changed in place by its owner would change the layer's, behind its back."""
    rate = torch.ones(H, dtype=torch.float64)  # the dtype in which rates are kept
    ours = zo.GRU(I, H, noise=zo.Zoneout(hidden=rate), backend=backend, device=device)
    x, h = torch.randn(T, B, I, device=device), torch.randn(1, B, H, device=device)
    rate.zero_()
    assert torch.equal(ours(x, h)[1], h)
    assert ours.noise.hidden.tolist() == [1.0] * H
    given = zo.Zoneout(hidden=torch.ones(H))
    ours.noise = given
    assert ours.noise is given


def test_rates_with_proj_size_have_the_units_of_the_state(backend, device):
    """With `proj_size`, a tensor of hidden rates would be taken for one a hidden unit."""
    noise = zo.Zoneout(cell=torch.ones(H), hidden=torch.tensor([1.0, 0.0]))
    ours = zo.LSTM(I, H, proj_size=2, noise=noise, backend=backend, device=device)
    hx = torch.randn(1, B, 2, device=device), torch.randn(1, B, H, device=device)
    _, (h, c) = ours(torch.randn(T, B, I, device=device), hx)
    assert torch.equal(c, hx[1])
    assert torch.equal(h[..., 0], hx[0][..., 0]) and not torch.equal(h[..., 1], hx[0][..., 1])
