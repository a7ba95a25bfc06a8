"""Noise put into somebody's model, taken out again, or put around somebody's own cell."""

import copy
import functools
import gc
import logging
import pickle
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import zoneout as zo

# torch's own word about its own layer, once a process
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

T, B, I, H = 4, 3, 5, 6
NOISE = zo.Zoneout(hidden=0.5)

MODULES: dict[str, Callable[..., Any]] = {
    "LSTM": lambda **o: nn.LSTM(I, H, **o),
    "LSTM-full": lambda **o: nn.LSTM(I, H, 2, False, True, 0.25, True, 2, **o),
    "GRU": lambda **o: nn.GRU(I, H, **o),
    "GRU-full": lambda **o: nn.GRU(I, H, 2, False, True, 0.25, True, **o),
    "RNN": lambda **o: nn.RNN(I, H, **o),
    "RNN-full": lambda **o: nn.RNN(I, H, 2, "relu", False, True, 0.25, True, **o),
    "LSTMCell": lambda **o: nn.LSTMCell(I, H, **o),
    "LSTMCell-no-bias": lambda **o: nn.LSTMCell(I, H, bias=False, **o),
    "GRUCell": lambda **o: nn.GRUCell(I, H, **o),
    "RNNCell": lambda **o: nn.RNNCell(I, H, **o),
    "RNNCell-relu": lambda **o: nn.RNNCell(I, H, nonlinearity="relu", **o),
}


@pytest.fixture(autouse=True)
def same_numbers():
    """Every test starts from the same state of torch's generator."""
    torch.manual_seed(20)


def quietly(make: Callable[[], Any]) -> Any:
    """What torch has to say about its own old functions is of no interest here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def flat(value: Any) -> list[Tensor]:
    return (
        [value] if isinstance(value, Tensor) else [tensor for one in value for tensor in flat(one)]
    )


def run(module: Any, *state: Any, **options: Any) -> list[Tensor]:
    """All that a layer or cell gives for a fixed input; outputs and states in one list."""
    x = torch.linspace(-1, 1, T * B * I).view(T, B, I).to(next(module.parameters()))
    return flat(module(x if isinstance(module, nn.RNNBase) else x[0], *state, **options))


def assert_close(a: list[Tensor], b: list[Tensor]) -> None:
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other)


class Tagger(nn.Module):
    """A model as somebody might have it: recurrent modules at several depths, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, I)
        self.encoder = nn.ModuleDict({"rnns": nn.ModuleList([nn.LSTM(I, H), nn.GRU(H, H)])})
        self.shared = nn.RNN(H, H)
        self.again = nn.Sequential(self.shared)
        self.decoder = nn.LSTMCell(H, H)
        self.head = nn.Linear(H, 9)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for rnn in [*self.encoder["rnns"], self.shared, self.again]:  # type: ignore[misc]
            x, _ = rnn(x)
        h, _ = self.decoder(x[-1])
        return self.head(h)


WORDS = torch.arange(T * B).view(T, B) % 9


def convert(model: Any, noise: Any = NOISE) -> tuple[Any, list[str]]:
    """The converted model, and the sentences that were reported."""
    said: list[str] = []
    return zo.convert(model, noise, report=said.append), said


# --- what is replaced -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_every_module_becomes_its_twin(name):
    """A recurrent module of torch's would stay as it is, or its twin would have lost an option."""
    before = MODULES[name]()
    state = {key: value.clone() for key, value in before.state_dict().items()}
    expected = run(before.eval())
    parameters = dict(before.named_parameters())
    after, said = convert(before)
    assert type(after) is getattr(zo, type(before).__name__)
    assert after.noise == NOISE
    assert after.extra_repr() == f"{before.extra_repr()}, noise=Zoneout(hidden=0.5)"
    assert said == [f"the model: {type(before).__name__} replaced, with Zoneout(hidden=0.5)"]
    assert list(after.state_dict()) == list(state)
    assert dict(after.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[n] for n, p in after.named_parameters())
    for attribute in (
        "mode",
        "batch_first",
        "dropout",
        "bidirectional",
        "num_layers",
        "proj_size",
        "bias",
    ):
        assert getattr(after, attribute, None) == getattr(before, attribute, None)
    if isinstance(after, nn.RNNBase):
        assert all(a is b for a, b in zip(after._flat_weights, after.parameters(), strict=True))
    after.noise = None
    assert_close(run(after), expected)


def test_nested_models():
    """A recurrent module somewhere inside a model would be missed, or another be touched."""
    model = Tagger().eval()
    expected = model(WORDS)
    others = {
        name: m
        for name, m in model.named_modules()
        if not isinstance(m, (nn.RNNBase, nn.RNNCellBase))
    }
    names = [name for name, _ in model.named_modules()]
    keys, parameters = list(model.state_dict()), dict(model.named_parameters())
    after, said = convert(model)
    assert after is model
    assert [name for name, _ in model.named_modules()] == names
    assert all(model.get_submodule(name) is module for name, module in others.items())
    kinds = [type(m) for m in model.modules() if isinstance(m, (nn.RNNBase, nn.RNNCellBase))]
    assert kinds == [zo.LSTM, zo.GRU, zo.RNN, zo.LSTMCell]
    assert list(model.state_dict()) == keys
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert [sentence.split(":")[0] for sentence in said] == [
        "encoder.rnns.0",
        "encoder.rnns.1",
        "shared",
        "decoder",
    ]
    torch.testing.assert_close(zo.revert(model)(WORDS), expected)


def test_evaluation_with_noise_off_equals_before():
    """A converted model with its noise off would not give what the model gave, gradients
    included.
    """
    model = Tagger().eval()
    expected = model(WORDS)
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
    zo.convert(model, zo.Zoneout(hidden=0.5, at_eval="off"))
    got = model(WORDS)
    torch.testing.assert_close(got, expected)
    assert_close(list(torch.autograd.grad(got.sum(), list(model.parameters()))), list(gradients))
    zo.convert(model, None)
    torch.testing.assert_close(model.train()(WORDS), expected)


def test_noise_acts_after_conversion():
    """A converted model would train without noise."""
    model = Tagger()
    zo.convert(model, zo.Zoneout(hidden=0.5))
    assert not torch.equal(model(WORDS), model(WORDS))
    torch.manual_seed(1)
    first = model(WORDS)
    torch.manual_seed(1)
    assert torch.equal(model(WORDS), first)


def test_a_module_registered_twice_becomes_one():
    """Two names of one module would become two modules, trained apart."""
    model = Tagger()
    before = model.shared
    zo.convert(model, NOISE)
    assert model.shared is model.again[0] and model.shared is not before
    parent = nn.Module()
    parent.a = parent.b = nn.GRU(I, H)  # twice in the same module
    _, said = convert(parent)
    assert parent.a is parent.b and isinstance(parent.a, zo.GRU)
    assert len(said) == 1


def test_the_model_itself_may_be_recurrent():
    """A model that is one recurrent module would be returned as it was."""
    before = nn.LSTM(I, H)
    after = zo.convert(before, NOISE)
    assert isinstance(after, zo.LSTM) and type(before) is nn.LSTM


def test_a_recurrent_module_inside_a_recurrent_module():
    """A recurrent module that somebody put into another would be missed."""
    inside: Any = nn.Sequential(nn.GRU(I, H))
    inside[0].more = nn.GRU(H, H)
    zo.convert(inside, NOISE)
    assert isinstance(inside[0].more, zo.GRU)
    root: Any = nn.GRU(I, H)
    root.more = nn.GRU(H, H)
    root = zo.convert(root, NOISE)
    assert isinstance(root, zo.GRU) and isinstance(root.more, zo.GRU)


def test_a_model_without_recurrent_modules():
    """A model in which there is nothing to do would be changed or refused, or pass for one with
    noise in it.
    """
    model = nn.Sequential(nn.Linear(2, 3))
    after, said = convert(model)
    assert after is model and said == [
        "the model: there is no LSTM, GRU or RNN in it, and nothing was replaced"
    ]
    with pytest.warns(UserWarning, match="nothing was replaced"):
        zo.convert(model, NOISE)


def test_modules_that_are_held_twice():
    """A model that calls its modules by a list of its own would go on without noise."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(I, H)
            self.listed, self.pair, self.named = [self.cell], (self.cell, 1), {"cell": self.cell}
            self.__dict__["hidden_away"] = self.cell

    model = zo.convert(Holder(), NOISE)
    held = model.listed[0], model.pair[0], model.named["cell"], model.__dict__["hidden_away"]
    assert isinstance(model.cell, zo.LSTMCell) and all(one is model.cell for one in held)


@pytest.mark.parametrize(
    "noise",
    [
        zo.VariationalDropout(input=0.2, hidden=0.2),
        zo.WeightDrop(rate=0.2),
        zo.Zoneout(cell=0.2, mask="static", seed=1),
    ],
)
def test_a_cell_gets_no_noise_that_it_would_have_to_be_told_of(noise):
    """A decoder, whose own code calls its cell without a seed, could no longer be run."""
    model = nn.Sequential(nn.LSTMCell(I, H))
    _, said = convert(model, [noise, zo.RecurrentDropout(rate=0.1)])
    assert model[0].noise == zo.RecurrentDropout(rate=0.1) and "neither seed nor step" in said[0]
    model[0](torch.randn(3, I))


def test_the_cell_of_a_zoneout_cell_is_left_alone():
    """Its zoneout would be applied twice."""
    model = nn.Sequential(zo.ZoneoutCell(nn.GRUCell(I, H), 0.1))
    _, said = convert(model)
    assert type(model[0].cell) is nn.GRUCell and "rates of its own" in said[0]


# --- what is kept ---------------------------------------------------------------------------------


def test_optimizers_stay_valid():
    """An optimizer made before would train weights that the model no longer has."""
    model, twin = Tagger(), Tagger()
    twin.load_state_dict(model.state_dict())
    for one in (model, twin):
        optimizer = torch.optim.Adam(one.parameters(), lr=0.1)
        for step in range(3):
            if step == 1 and one is model:
                zo.convert(one, zo.Zoneout(hidden=0.0))
            optimizer.zero_grad()
            one(WORDS).square().sum().backward()
            optimizer.step()
    for (name, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_tied_weights_stay_tied():
    """A weight shared between modules would come apart."""
    model: Any = nn.Sequential(nn.GRU(H, H), nn.GRU(H, H), nn.Linear(H, H))
    model[1].weight_hh_l0 = model[0].weight_hh_l0
    model[2].weight = nn.Parameter(torch.zeros(H, H))
    zo.convert(model, NOISE)
    assert model[0].weight_hh_l0 is model[1].weight_hh_l0
    assert model[1].all_weights[0][1] is model[0].weight_hh_l0
    assert len(list(model.parameters())) == 4 + 3 + 2


@pytest.mark.parametrize("name", MODULES)
def test_mode_dtype_and_requires_grad_are_kept(name):
    """A frozen, half-precision or evaluated module would be thawed, widened or set to train."""
    before = MODULES[name](dtype=torch.float64).eval()
    next(before.parameters()).requires_grad_(False)
    wanted = {n: (p.dtype, p.requires_grad) for n, p in before.named_parameters()}
    after, _ = convert(before)
    assert not after.training
    assert {n: (p.dtype, p.requires_grad) for n, p in after.named_parameters()} == wanted
    assert run(after)[0].dtype == torch.float64


@pytest.mark.parametrize("name", MODULES)
def test_device_is_kept(name):
    """A module on another device would come back to this one, or its rates would stay behind."""
    after, _ = convert(MODULES[name](device="meta"))
    assert all(v.device.type == "meta" for v in after.parameters())


HOOKS: dict[str, Callable[[Any, Callable[..., None]], Any]] = {
    "forward pre": lambda m, f: m.register_forward_pre_hook(lambda *_: f()),
    "forward pre with kwargs": lambda m, f: m.register_forward_pre_hook(
        lambda *_: f(), with_kwargs=True
    ),
    "forward": lambda m, f: m.register_forward_hook(lambda *_: f()),
    "forward with kwargs": lambda m, f: m.register_forward_hook(lambda *_: f(), with_kwargs=True),
    "forward always": lambda m, f: m.register_forward_hook(lambda *_: f(), always_call=True),
    "full backward pre": lambda m, f: m.register_full_backward_pre_hook(lambda *_: f()),
    "full backward": lambda m, f: m.register_full_backward_hook(lambda *_: f()),
    "state_dict pre": lambda m, f: m.register_state_dict_pre_hook(lambda *_: f()),
    "state_dict post": lambda m, f: m.register_state_dict_post_hook(lambda *_: f()),
    "load_state_dict pre": lambda m, f: m.register_load_state_dict_pre_hook(lambda *_: f()),
    "load_state_dict post": lambda m, f: m.register_load_state_dict_post_hook(lambda *_: f()),
    "parameter": lambda m, f: next(m.parameters()).register_hook(lambda *_: f()),
}


def use(model: Any) -> None:
    """Everything that fires a hook."""
    x = torch.randn(T, B, I, requires_grad=True)
    y, _ = model[0](x)
    y.sum().backward()
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("way", ["convert", "revert"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_still_fire_and_are_still_removed(kind, way):
    """A hook registered before would be lost, fire for a module that is gone, or stay after its
    removal.
    """
    model: Any = nn.Sequential(nn.GRU(I, H) if way == "convert" else zo.GRU(I, H, noise=NOISE))
    fired: list[int] = []
    handle = HOOKS[kind](model[0], lambda: fired.append(1))
    use(model)
    once = len(fired)
    assert once > 0
    model = convert(model)[0] if way == "convert" else zo.revert(model)
    gc.collect()
    fired.clear()
    use(model)
    assert len(fired) == once
    handle.remove()
    fired.clear()
    use(model)
    assert not fired


def test_hooks_get_the_module_that_fires_them():
    """A hook would be called with a module that is no longer in the model."""
    model: Any = nn.Sequential(nn.GRU(I, H))
    got: list[Any] = []
    model[0].register_forward_hook(lambda module, *_: got.append(module))
    model[0].register_load_state_dict_pre_hook(lambda module, *_: got.append(module))
    zo.convert(model, NOISE)
    gc.collect()
    use(model)
    assert got and all(module is model[0] for module in got)


def test_hooks_registered_after_conversion_are_the_models():
    """A hook put on the converted module would not fire."""
    model: Any = zo.convert(nn.Sequential(nn.GRU(I, H)), NOISE)
    fired: list[int] = []
    model[0].register_forward_hook(lambda *_: fired.append(1))
    use(model)
    assert fired == [1]


@pytest.mark.parametrize(
    "attribute", ["tag", "layer", "norm", "backend", "noise_level", "recording", "kind"]
)
def test_attributes_set_on_a_module_survive(attribute):
    """What somebody keeps on a module, under whatever name, would be lost or disturb the layer.

    Under a name that means something to our layers, leaving the module alone is as good.
    """
    module: Any = nn.GRU(I, H).eval()
    expected = run(module)
    setattr(module, attribute, "kept")
    after, _ = convert(module, zo.Zoneout(hidden=0.5, at_eval="off"))
    assert getattr(after, attribute) == "kept"
    assert_close(run(after), expected)
    assert getattr(zo.revert(after), attribute) == "kept"


def test_modules_deep_in_plain_attributes():
    """A model that calls its layers by way of lists of pairs, or by their methods, goes on
    calling the old ones.
    """

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnns = nn.ModuleList(nn.GRU(I, H) for _ in range(2))
            self.blocks = [(rnn, "next") for rnn in self.rnns]
            self.named: dict[str, Any] = {"all": [{"first": ((self.rnns[0],),)}]}
            self.named["itself"] = self.named
            self.call = self.rnns[1].forward

    model = Blocks()
    for change in (lambda: convert(model), lambda: zo.revert(model)):
        change()
        first, second = model.rnns
        assert [rnn for rnn, _ in model.blocks] == [first, second]
        assert model.named["all"][0]["first"][0][0] is first
        assert model.call.__self__ is second and model.call.__func__ is type(second).forward


@pytest.mark.parametrize("name", ["counts", "data_seed", "my_rate_l0"])
@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_set_on_a_module_survive(name, persistent):
    """A buffer that somebody registered on a module, under whatever name, would be lost."""
    module: Any = nn.GRU(I, H)
    module.register_buffer(name, torch.arange(3), persistent=persistent)
    buffer = getattr(module, name)
    model: Any = zo.convert(nn.Sequential(module), NOISE)
    after = model[0]
    assert getattr(after, name) is buffer
    assert (name in after.state_dict()) == persistent
    after.noise = None
    assert getattr(after, name) is buffer
    zo.revert(model)
    back = model[0]
    assert (
        type(back) is nn.GRU
        and getattr(back, name) is buffer
        and (name in back.state_dict()) == persistent
    )


@pytest.mark.parametrize("name", ["extra", "h0"])
def test_parameters_and_modules_set_on_a_module_survive(name):
    """A parameter that somebody put on a module would be lost, or be taken for a learned initial
    state.

    Under a name that means something to our layers, leaving the module alone is as good.
    """
    module: Any = nn.GRU(I, H).eval()
    module.register_parameter(name, nn.Parameter(torch.ones(1, H)))
    module.child = nn.Linear(2, 2)
    expected, parameters = run(module), dict(module.named_parameters())
    after, _ = convert(module, zo.Zoneout(hidden=0.5, at_eval="off"))
    assert dict(after.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[n] for n, p in after.named_parameters())
    assert after.child is module.child
    assert_close(run(after), expected)
    assert type(zo.revert(after)) is nn.GRU


def test_train_and_cast_after_conversion():
    """A converted model could no longer be set to train, cast or moved."""
    model: Any = zo.convert(Tagger(), NOISE)
    assert not model.eval().decoder.training and model.train().decoder.training
    model.double()
    assert model(WORDS).dtype == torch.float64
    assert model.decoder.weight_hh is dict(model.named_parameters())["decoder.weight_hh"]


# --- what is left alone ---------------------------------------------------------------------------


class Subclass(nn.LSTM):
    """Somebody's own LSTM."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:  # type: ignore[override]
        return nn.LSTM.forward(self, input, hx)


def patched() -> nn.Module:
    module = nn.GRU(I, H)
    module.forward = lambda *args: args  # type: ignore[method-assign]
    return module


def compiled_in_place() -> nn.Module:
    module = nn.GRU(I, H)
    module.compile(backend="eager")
    return module


def with_pruned(module: nn.Module, name: str) -> nn.Module:
    return prune.l1_unstructured(module, name, amount=0.5)


LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "a subclass": (lambda: Subclass(I, H), "never calls super().forward"),
    "parametrized": (
        lambda: parametrizations.weight_norm(nn.GRU(I, H), "weight_hh_l0"),
        "parametrized",
    ),
    "parametrized cell": (
        lambda: parametrizations.spectral_norm(nn.GRUCell(I, H), "weight_hh"),
        "parametrized",
    ),
    "old weight norm": (lambda: nn.utils.weight_norm(nn.LSTM(I, H), "weight_hh_l0"), "weight norm"),
    "old weight norm of a cell": (
        lambda: nn.utils.weight_norm(nn.LSTMCell(I, H), "weight_ih"),
        "weight norm",
    ),
    "pruned": (lambda: with_pruned(nn.LSTM(I, H), "weight_hh_l0"), "pruning"),
    "pruned bias": (lambda: with_pruned(nn.LSTM(I, H), "bias_hh_l0"), "pruning"),
    "pruned cell": (lambda: with_pruned(nn.GRUCell(I, H), "weight_hh"), "pruning"),
    "pruned bias of a cell": (lambda: with_pruned(nn.GRUCell(I, H), "bias_ih"), "pruning"),
    "scripted": (lambda: torch.jit.script(nn.LSTM(I, H)), "scripted"),
    "scripted cell": (lambda: torch.jit.script(nn.GRUCell(I, H)), "scripted"),
    "traced": (lambda: torch.jit.trace(nn.GRU(I, H), torch.randn(T, B, I)), "scripted"),
    "patched forward": (patched, "forward"),
    "compiled": (lambda: torch.compile(nn.GRU(I, H), backend="eager"), "compiled"),
    "compiled in place": (compiled_in_place, "compiled"),
}


@pytest.mark.parametrize("case", LEFT)
def test_left_alone_and_reported(case):
    """A module that convert does not understand would be replaced all the same, or left without
    a word.
    """
    make, why = LEFT[case]
    module = quietly(make)
    model: Any = nn.Sequential(nn.GRU(I, I), module)
    before = {name: m for name, m in model.named_modules() if name != "0"}
    _, said = convert(model)
    assert isinstance(model[0], zo.GRU)
    assert {name: m for name, m in model.named_modules() if name != "0"} == before
    assert len(said) == 2 and "left alone" in said[1] and why in said[1]
    root, said = convert(module)
    assert root is module and "left alone" in said[0] and why in said[0]


def test_quantized_modules_are_left_alone():
    """A dynamically quantized model would be broken, or what is left alone in it not be
    reported.
    """
    if torch.backends.quantized.engine == "none":
        pytest.skip("this torch cannot quantize")
    model = nn.Sequential(nn.LSTM(I, H), nn.GRU(H, H), nn.LSTMCell(H, H))
    quantized = quietly(
        lambda: torch.ao.quantization.quantize_dynamic(model, {nn.LSTM, nn.GRU, nn.LSTMCell})
    )
    before = list(quantized)
    _, said = convert(quantized)
    assert all(a is b for a, b in zip(quantized, before, strict=True))
    assert [sentence.split(",")[0] for sentence in said] == [
        "0: LSTM left alone", "1: GRU left alone", "2: LSTMCell left alone",
    ]  # fmt: skip
    assert all("quantized" in sentence for sentence in said)


def test_what_is_left_alone_still_works():
    """A model with a subclass or a pruned layer in it would no longer run after convert."""
    model: Any = nn.Sequential(with_pruned(nn.GRU(I, H), "weight_hh_l0"), Subclass(H, H))
    convert(model)
    y, _ = model[1](model[0](torch.randn(T, B, I))[0])
    assert y.shape == (T, B, H)


# --- subclasses -----------------------------------------------------------------------------------


class ZeroLengths(ABC, nn.RNNBase):
    """A mixin as pytorch-forecasting has it: it adds methods, and its forward goes on to
    torch's.
    """

    @abstractmethod
    def first_state(self, x: Tensor) -> Any: ...

    def forward(self, x: Any, hx: Any = None, lengths: Tensor | None = None) -> Any:  # type: ignore[override]
        if lengths is None:
            return super().forward(x, hx=hx)  # type: ignore[misc]
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.clamp(min=1), enforce_sorted=False)
        y, state = super().forward(packed, hx=hx)  # type: ignore[misc]
        return nn.utils.rnn.pad_packed_sequence(y)[0], state


class Forecaster(ZeroLengths, nn.LSTM):
    def __init__(self, inputs: int, units: int, scale: float) -> None:
        super().__init__(inputs, units, num_layers=2)
        self.scale, self.head = scale, nn.Linear(units, 1)

    def first_state(self, x: Tensor) -> Any:
        h = x.new_zeros(2, x.shape[1], self.hidden_size)
        return h, h

    @property
    def doubled(self) -> float:
        return 2 * self.scale

    def extra_repr(self) -> str:
        return super().extra_repr() + f", scale={self.scale}"


class Decoder(nn.GRUCell):
    @torch.no_grad()
    def greedy(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_subclass_that_adds_methods_is_converted():
    """A user's subclass is left without noise, or loses its methods, attributes, mixins or
    weights.
    """
    layer = Forecaster(I, H, 3.0).eval()
    model, x, lengths = (
        nn.Sequential(layer, nn.Linear(H, 1)),
        torch.randn(T, B, I),
        torch.tensor([4, 0, 2]),
    )
    want = [*flat(layer(x)), *flat(layer(x, lengths=lengths))]
    _, said = convert(model, zo.Zoneout(cell=0.5, hidden=0.5, at_eval="off"))
    twin: Any = model[0]
    assert said == [
        (
            "0: Forecaster replaced by the same class on zo.LSTM, with Zoneout(cell=0.5, "
            "hidden=0.5, "
            "at_eval='off')"
        )
    ]
    assert isinstance(twin, zo.LSTM) and isinstance(twin, ZeroLengths) and not twin.training
    assert twin.weight_ih_l0 is layer.weight_ih_l0 and twin.head is layer.head
    assert twin.doubled == 6.0 and twin.first_state(x)[0].shape == (2, B, H)
    assert "scale=3.0" in repr(twin) and "noise=" in repr(twin)
    assert_close([*flat(twin(x)), *flat(twin(x, lengths=lengths))], want)
    twin.train()
    assert not torch.equal(twin(x)[0], want[0]), "the noise does not reach the user's forward"
    assert type(type(twin)(I, H, 1.0)) is type(twin), "its own constructor no longer works"
    zo.revert(model)
    assert type(model[0]) is Forecaster and model[0].head is layer.head
    assert_close(flat(model.eval()[0](x)), want[:3])


def test_a_converted_subclass_is_copied_and_pickled():
    """A class that has no name of its own cannot be pickled, or comes back as the user's without
    noise.
    """
    model = zo.convert(nn.Sequential(Forecaster(I, H, 3.0), Decoder(I, H)), NOISE)
    for again in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        pickle.loads(pickle.dumps(model, 0)),
    ):
        assert [type(one) for one in again] == [type(one) for one in model]
        assert again[0].noise == NOISE and again[0].doubled == 6.0
        assert_close(
            flat(again.eval()[0](torch.ones(T, B, I))), flat(model.eval()[0](torch.ones(T, B, I)))
        )
    assert model[1].greedy(torch.randn(B, I)).shape == (B, H)  # super() inside a decorator
    assert zo.convert(nn.Sequential(Decoder(I, H)), NOISE)[0].__class__ is model[1].__class__


# Each is a class statement, what is wrong with it, and the class that convert's lines give it.
NOT_SIMPLE = {
    "a call": (
        "class Mine(nn.LSTM):\n    def __call__(self, x): return super().__call__(x)",
        "overrides __call__",
    ),
    "its name": (
        "class Mine(nn.LSTM):\n    def forward(self, x): return super(Mine, self).forward(x)",
        "'forward' names Mine itself",
    ),
    "a metaclass": (
        "class Meta(type): pass\nclass Mine(nn.LSTM, metaclass=Meta):\n    pass",
        "metaclass",
    ),
    "a descriptor": (
        "class Mine(nn.LSTM):\n    @functools.cached_property\n    def two(self): return 2",
        "'two' is a cached_property",
    ),
    "a base": (
        "class Base(nn.LSTM):\n    def _apply(self, fn): return super()._apply(fn)\nclass "
        "Mine(Base):\n    pass",
        "overrides _apply",
    ),
    "init_subclass": (
        "class Mix:\n    def __init_subclass__(cls): pass\nclass Mine(Mix, nn.LSTM):\n    pass",
        "overrides __init_subclass__",
    ),
}


@pytest.mark.parametrize("case", NOT_SIMPLE)
def test_the_lines_for_a_subclass_work_when_pasted(case):
    """What a user is told to write for a subclass that cannot be converted gives a class without
    noise, or an error.
    """
    source, why = NOT_SIMPLE[case]
    names: dict[str, Any] = {"nn": nn, "functools": functools, "__name__": __name__}
    exec(source, names)
    model = nn.Sequential(names["Mine"](I, H))
    _, said = convert(model)
    (sentence,) = said
    first, *lines = sentence.splitlines()
    assert type(model[0]) is names["Mine"] and why in first
    old = first.rpartition("in place of  ")[2].removesuffix("  and convert again:")
    assert len(lines) == 2 and old in source
    exec("\n".join([lines[0].strip(), source.replace(old, lines[1].strip())]), names)
    model = nn.Sequential(names["Mine"](I, H))
    convert(model)
    assert isinstance(model[0], zo.LSTM) and model[0].noise == NOISE
    assert model(torch.randn(T, B, I))[0].shape == (T, B, H)


class Peephole(nn.LSTM):
    """Computes without torch's forward: noise would not reach it."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return x, None


class OwnCell(nn.GRUCell):
    def __init__(self) -> None:
        super().__init__(I, H, bias=False)
        self.extra = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x


@pytest.mark.parametrize("root", [False, True], ids=["inside", "root"])
@pytest.mark.parametrize(
    "make", [lambda: Peephole(I, H, 2, batch_first=True, dropout=0.5).double(), OwnCell]
)
def test_the_lines_for_a_forward_of_its_own_work_when_pasted(make, root):
    """What a user is told to write in place of a layer with a forward of its own does not run,
    or loses the weights.
    """
    model = make().eval() if root else nn.ModuleDict({"a": nn.Sequential(make())}).eval()
    old = model if root else model["a"][0]
    _, said = convert(model)
    first, *lines = said[0].splitlines()
    assert "never calls super().forward" in first and len(lines) == 2
    names: dict[str, Any] = {"zo": zo, "model": model}
    exec("\n".join(line.strip() for line in lines), names)
    model = zo.convert(names["model"], NOISE)
    new = model if root else model["a"][0]
    assert isinstance(new, (zo.LSTM, zo.GRUCell)) and new.noise == NOISE and not new.training
    kept = new.state_dict()
    assert all(torch.equal(old.state_dict()[name], value) for name, value in kept.items())
    assert getattr(new, "dropout", None) == getattr(old, "dropout", None)


def test_a_subclass_with_a_name_of_ours_or_other_weights_is_left_alone():
    """A method of a user's takes the place of one that our layers call, or weights of other
    sizes are read.
    """

    class Noisy(nn.LSTM):
        def noise(self) -> None: ...

    class Wide(nn.LSTM):
        def __init__(self) -> None:
            super().__init__(I, H)
            self.weight_ih_l0 = nn.Parameter(torch.randn(4 * H, I + 1))

    class Own(nn.RNNBase):
        """On none of torch's layers."""

    for module, why in (
        (Noisy(I, H), "rename it"),
        (Wide(), "weights"),
        (Own("LSTM", I, H), "of its own"),
    ):
        _, said = convert(nn.Sequential(module))
        assert "left alone" in said[0] and why in said[0]


# --- which noise ----------------------------------------------------------------------------------


def test_what_does_not_apply_is_dropped_and_reported():
    """A cell rate would reach a GRU, or be dropped from it without a word."""
    model: Any = nn.Sequential(nn.LSTM(I, H), nn.GRU(I, H), nn.RNN(I, H), nn.GRUCell(I, H))
    _, said = convert(model, zo.Zoneout(cell=0.5, hidden=0.25))
    assert model[0].noise == zo.Zoneout(cell=0.5, hidden=0.25)
    assert all(m.noise == zo.Zoneout(hidden=0.25) for m in model[1:])
    assert "dropped" not in said[0]
    assert all(
        "dropped Zoneout's cell" in sentence and "no cell" in sentence for sentence in said[1:]
    )


def test_recurrent_dropout_means_nothing_to_a_plain_rnn():
    """Recurrent dropout would reach a plain RNN, or its held gate a GRU or a cell, without a
    word.
    """
    model: Any = nn.Sequential(nn.LSTM(I, H), nn.GRU(I, H), nn.RNN(I, H), nn.RNNCell(I, H))
    rnn = model[2]
    noise = zo.RecurrentDropout(rate=0.5, hold_output_gate=True)
    _, said = convert(model, noise)
    assert model[0].noise == noise
    assert model[1].noise == zo.RecurrentDropout(rate=0.5)
    assert "hold_output_gate" in said[1] and "no output gate" in said[1]
    assert model[2] is rnn and type(model[3]) is nn.RNNCell
    assert all(
        "left alone" in sentence and "RecurrentDropout's rate" in sentence for sentence in said[2:]
    )
    _, said = convert(model, [zo.RecurrentDropout(rate=0.5), zo.Zoneout(hidden=0.1)])
    assert model[2].noise == zo.Zoneout(hidden=0.1) and "dropped RecurrentDropout's rate" in said[2]


def test_held_output_gate_in_a_model_with_an_lstm_cell():
    """One LSTMCell in a model would keep the LSTMs beside it from being converted."""
    model: Any = nn.Sequential(nn.LSTM(I, H), nn.LSTMCell(I, H))
    _, said = convert(model, zo.RecurrentDropout(rate=0.5, hold_output_gate=True))
    assert model[0].noise.hold_output_gate and not model[1].noise.hold_output_gate
    assert "hold_output_gate" in said[1]


def test_our_own_layers_get_the_new_noise():
    """Converting twice would wrap a layer in another, or leave it with the noise of the first
    time.
    """
    model: Any = quietly(lambda: zo.convert(Tagger(), zo.Zoneout(cell=0.5, hidden=0.25)))
    before = list(model.modules())
    _, said = convert(model, zo.StateDropout(hidden=0.75))
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))
    ours = [m for m in model.modules() if hasattr(m, "noise")]
    assert len(ours) == 4 and all(m.noise == zo.StateDropout(hidden=0.75) for m in ours)
    assert all(
        "already" in sentence and "StateDropout(hidden=0.75)" in sentence for sentence in said
    )
    zo.convert(model, None)
    assert all(m.noise is None for m in ours)


def test_norms_and_learned_states_of_our_own_layers_stay():
    """New noise for a layer of ours would cost it its norm, its initial state or its backend."""
    model: Any = nn.Sequential(
        zo.LSTM(I, H, norm="layer", learn_initial_state=True, backend="reference")
    )
    layer = model[0]
    zo.convert(model, NOISE)
    assert model[0] is layer and layer.norm is not None and "h0" in dict(layer.named_parameters())
    assert layer.backend == "reference" and layer.noise == NOISE


def test_a_list_of_noises_and_rates_a_layer():
    """A list of noises, or an iterator over them, would reach only some of the modules."""
    noises = [zo.Zoneout(cell=[0.1, 0.2]), zo.WeightDrop(rate=0.5)]
    for given in (noises, iter(noises), tuple(noises)):
        model: Any = zo.convert(nn.Sequential(nn.LSTM(I, H, 2), nn.LSTM(I, H, 2)), given)
        assert all(list(m.noise) == noises for m in model)
    assert model[0]._numbers["cell_rate_l1"].item() == 0.2


BROKEN: dict[str, tuple[Any, type[Exception]]] = {
    "rates for other layers": (zo.Zoneout(hidden=[0.1, 0.2]), ValueError),
    "rates for other units": (zo.Zoneout(hidden=torch.ones(H + 1)), ValueError),
    "no noise": ("zoneout", TypeError),
    "a noise twice": ([NOISE, NOISE], ValueError),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_error_changes_nothing(case):
    """A noise that one module cannot have would leave the model half converted."""
    noise, error = BROKEN[case]
    last = nn.GRU(I, H) if case != "rates for other layers" else nn.GRU(I, H, 3)
    first = nn.GRU(I, H + 1) if case == "rates for other units" else nn.GRU(I, H, 2)
    model: Any = nn.Sequential(first, zo.GRU(I, H, 2, noise=zo.Zoneout(hidden=0.75)), last)
    first.register_forward_hook(lambda *_: None)
    before, keys = list(model), [set(vars(m)) for m in model]
    with pytest.raises(error):
        zo.convert(model, noise)
    assert all(a is b for a, b in zip(model, before, strict=True))
    assert model[1].noise == zo.Zoneout(hidden=0.75)
    assert [set(vars(m)) for m in model] == keys
    assert_close(run(first), run(first))


# --- what is said ---------------------------------------------------------------------------------


def test_report_is_called_for_every_recurrent_module(caplog):
    """`report` would miss a module, or what it got would be logged and warned about as well."""
    model = nn.Sequential(nn.GRU(I, H), nn.Linear(2, 2), Subclass(I, H))
    with caplog.at_level(logging.INFO, "zoneout"):
        _, said = convert(model)  # a warning would be an error here
    assert said[0] == "0: GRU replaced, with Zoneout(hidden=0.5)"
    assert len(said) == 2 and said[1].startswith(
        "2: Subclass left alone, its forward never calls super().forward"
    )
    assert not caplog.records


def test_without_report_it_logs_and_warns(caplog):
    """Without `report` nobody would learn what was replaced, or what could not be."""
    model = nn.Sequential(nn.GRU(I, H), Subclass(I, H))
    with caplog.at_level(logging.INFO, "zoneout"), pytest.warns(UserWarning) as caught:
        zo.convert(model, NOISE)
    assert [record.getMessage() for record in caplog.records] == [
        "0: GRU replaced, with Zoneout(hidden=0.5)"
    ]
    assert len(caught) == 1 and str(caught[0].message).startswith("1: Subclass left alone")
    assert caught[0].filename == __file__, "the warning does not point at the caller"


def test_a_dropped_rate_is_warned_about():
    """A rate that was asked for and dropped would only be seen by those who turn on logging."""
    with pytest.warns(UserWarning, match="dropped Zoneout's cell"):
        zo.convert(nn.Sequential(nn.GRU(I, H)), zo.Zoneout(cell=0.5, hidden=0.5))


def test_nothing_is_said_when_all_is_well(recwarn):
    """A plain conversion would warn, as torch does when a one-layer module with dropout is made
    again.
    """
    module = quietly(lambda: nn.GRU(I, H, dropout=0.5))
    zo.revert(zo.convert(nn.Sequential(module), NOISE))
    assert not recwarn.list


# --- back again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_there_and_back(name):
    """Reverting would not give torch's module back as it was: class, options, parameters,
    outputs.
    """
    before = MODULES[name]().eval()
    expected, parameters = run(before), dict(before.named_parameters())
    converted, _ = convert(before)
    said: list[str] = []
    after = zo.revert(converted, report=said.append)
    assert type(after) is type(before) and str(after) == str(before)
    assert said == [f"the model: {type(before).__name__} replaced by torch.nn's"]
    assert all(p is parameters[n] for n, p in after.named_parameters())
    assert list(after.state_dict()) == list(before.state_dict())
    assert not list(after.buffers())
    assert set(vars(after)) == set(vars(before)), "something of ours stayed behind"
    assert_close(run(after), expected)
    run(after.train())[0].sum().backward()


def test_revert_leaves_what_torch_cannot_do():
    """A layer with a norm or a learned state would be reverted to one that computes something
    else.
    """

    class Mine(zo.GRU):
        pass

    model: Any = nn.Sequential(
        zo.LSTM(I, H, norm="layer"),
        zo.GRU(I, H, learn_initial_state=True),
        Mine(I, H),
        zo.RNN(I, H),
    )
    before = list(model)
    said: list[str] = []
    returned: Any = zo.revert(model, report=said.append)
    assert returned is model
    assert [a is b for a, b in zip(model, before, strict=True)] == [True, True, True, False]
    assert ["left alone" in sentence for sentence in said] == [True, True, True, False]
    assert type(model[3]) is nn.RNN
    with pytest.warns(UserWarning, match="left alone"):
        zo.revert(model)


def test_revert_of_shared_modules_and_torchs_own():
    """Reverting would split a shared module, or touch what was torch's already."""
    model: Any = Tagger()
    zo.convert(model, NOISE)
    zo.revert(model)
    assert model.shared is model.again[0] and type(model.shared) is nn.RNN
    before = list(model.modules())
    zo.revert(model)
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_a_converted_model_can_be_copied(how):
    """A converted model would not survive a copy, or share its weights with it."""
    model: Any = zo.convert(Tagger(), NOISE)
    after = how(model)
    assert str(after) == str(model) and after.shared is after.again[0]
    assert torch.equal(after.eval()(WORDS), model.eval()(WORDS))
    assert not {id(p) for p in after.parameters()} & {id(p) for p in model.parameters()}
    zo.revert(after)
    after(WORDS).sum().backward()


def test_checkpoints_from_before_load_afterwards():
    """A checkpoint of the model before would not load into the converted one, or the other way
    round.
    """
    before, after = Tagger(), Tagger()
    zo.convert(after, zo.Zoneout(hidden=0.5, at_eval="off"))
    assert list(after.state_dict()) == list(before.state_dict())
    after.load_state_dict(before.state_dict(), strict=True)
    torch.testing.assert_close(after.eval()(WORDS), before.eval()(WORDS))
    before.load_state_dict(after.state_dict(), strict=True)


# --- a user's own cell ----------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_wrapped_lstm_cell_equals_ours(training):
    """A ZoneoutCell around nn.LSTMCell would draw other masks than zo.LSTMCell, or mix h and c."""
    inner = nn.LSTMCell(I, H)
    wrapped = zo.ZoneoutCell(inner, rates=[0.2, 0.7], layer=3).train(training)
    ours = zo.LSTMCell(I, H, noise=zo.Zoneout(hidden=0.2, cell=0.7), layer=3).train(training)
    ours.load_state_dict(inner.state_dict())
    state = other = (torch.randn(B, H), torch.randn(B, H))
    for t in range(T):
        x = torch.randn(B, I)
        state = wrapped(x, state, seed=5, step=t, examples=9)
        other = ours(x, other, seed=5, step=t, examples=9)
        assert type(state) is tuple
        assert_close(list(state), list(other))
    grads, others = (
        torch.autograd.grad(torch.stack(end).sum(), list(module.parameters()))
        for end, module in ((state, inner), (other, ours))
    )
    assert_close(list(grads), list(others))


@pytest.mark.parametrize("name", ["GRUCell", "RNNCell"])
def test_wrapped_cells_with_one_state(name):
    """A ZoneoutCell around a cell with one state would not draw what our own cell draws."""
    inner = getattr(nn, name)(I, H)
    wrapped, ours = zo.ZoneoutCell(inner, rates=0.5), getattr(zo, name)(I, H, noise=NOISE)
    ours.load_state_dict(inner.state_dict())
    x, h = torch.randn(B, I), torch.randn(B, H)
    torch.testing.assert_close(wrapped(x, h, seed=1, step=4), ours(x, h, seed=1, step=4))
    torch.testing.assert_close(
        wrapped(x[0], h[0], seed=1, step=4), ours(x[0], h[0], seed=1, step=4)
    )
    torch.testing.assert_close(wrapped(x, seed=1, step=4), ours(x, seed=1, step=4))
    torch.manual_seed(1)
    first = wrapped(x, h)
    torch.manual_seed(1)
    torch.testing.assert_close(first, ours(x, h))


class Counter(nn.Module):
    """A user's own cell with three states of different sizes: every unit of each goes up by one."""

    sizes = (32, 48, 64)

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(s + 1 for s in state)


def three(value: float = 0.0) -> tuple[Tensor, ...]:
    return tuple(torch.full((20, size), value) for size in Counter.sizes)


def test_a_cell_with_three_states_has_a_mask_for_each():
    """The states of a user's own cell would share a mask, or a rate would go to another state."""
    cell = zo.ZoneoutCell(Counter(), rates=[0.5, 0.5, 0.5])
    kept = [s == 0 for s in cell(torch.zeros(20), three(), seed=1, step=0)]
    for mask in kept:
        assert 0.4 < mask.double().mean() < 0.6
    assert not torch.equal(kept[0], kept[1][:, :32])
    assert not torch.equal(kept[0], kept[2][:, :32])
    assert not torch.equal(kept[1], kept[2][:, :48])
    for k in range(3):
        cell.rates = [1.0 if n == k else 0.0 for n in range(3)]
        assert [bool((s == 0).all()) for s in cell(torch.zeros(20), three())] == [
            n == k for n in range(3)
        ]


def test_a_cell_with_many_states_has_independent_masks():
    """Two of many states would draw from the same bits, or from those of another layer's."""
    masks = {}
    for layer in range(3):
        cell = zo.ZoneoutCell(Counter(), rates=0.5, layer=layer)
        state = tuple(torch.zeros(50, 64) for _ in range(7))
        for k, s in enumerate(cell(torch.zeros(50), state, seed=1, step=0)):
            masks[layer, k] = s == 0
    for a in masks:
        for b in masks:
            if a != b:
                agree = (masks[a] == masks[b]).double().mean().item()
                assert abs(agree - 0.5) < 5 * 0.5 / 3200**0.5, (a, b)


def test_rates_of_a_wrapped_cell():
    """One rate for all, one a state and one a unit would not be told apart, or could not be
    replaced.
    """
    cell = zo.ZoneoutCell(Counter(), rates=0.25).eval()
    x = torch.zeros(20)
    for s in cell(x, three()):
        torch.testing.assert_close(s, torch.full_like(s, 0.75))
    each = torch.linspace(0, 1, 48)
    cell.rates = [0.5, each, 1.0]
    a, b, c = cell(x, three())
    assert (a == 0.5).all() and (c == 0).all()
    torch.testing.assert_close(b[0], 1 - each)
    assert "rates" in cell.extra_repr()


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_rate_of_0_or_1_takes_one_value_whatever_the_other_is(training):
    """Weights in the log domain, which begin at −∞, would become nan at evaluation though
    nothing is done to them.
    """
    infinite, cell = (
        torch.full((20, 4), -torch.inf),
        zo.ZoneoutCell(Counter(), rates=[0.0, 1.0, 0.5]).train(training),
    )
    new, kept, _ = cell(torch.zeros(20), (infinite, torch.ones(20, 4), torch.zeros(20, 4)))
    assert (new == -torch.inf).all() and (kept == 1).all()
    for new, old in ((infinite, torch.ones(20, 4)), (torch.ones(20, 4), infinite)):
        assert torch.equal(zo.zoneout(new, old, 0.0, training=training), new)
        assert torch.equal(zo.zoneout(new, old, 1.0, training=training), old)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_state_of_integers(training):
    """A counter in the state of a user's own cell, at rate 0, would stop it at evaluation; or be
    mixed like numbers.
    """
    state = (torch.zeros(20, 4), torch.arange(20)[:, None])
    cell = zo.ZoneoutCell(Counter(), rates=[0.5, 0.0]).train(training)
    assert torch.equal(cell(torch.zeros(20), state)[1], state[1] + 1)
    cell.rates = 0.5
    with pytest.raises(
        TypeError,
        match=r"state: expected floating-point .* where a rate is not 0, got torch\.int64",
    ):
        cell(torch.zeros(20), state)


class Named(NamedTuple):
    """A state whose tensors have names."""

    h: Tensor
    c: Tensor


class UsesNames(nn.Module):
    """A user's own cell that asks its state for them."""

    def forward(self, x: Tensor, state: Named) -> Named:
        return Named(h=state.h + x, c=state.c - x)


def test_a_state_with_names_keeps_them():
    """A cell whose state is a named tuple would be given a plain one at its second step."""
    cell, state = zo.ZoneoutCell(UsesNames(), 0.5), Named(torch.zeros(4), torch.zeros(4))
    for t in range(2):
        state = cell(torch.ones(4), state, seed=1, step=t)
    assert isinstance(state, Named)


def test_a_wrapped_cell_draws_by_its_coordinates():
    """A wrapped cell would draw the same at every step, or other masks when its batch is split."""
    cell = zo.ZoneoutCell(Counter(), rates=0.5)
    x = torch.zeros(20)
    first = cell(x, three(), seed=1, step=0)
    assert_close(list(cell(x, three(), seed=1, step=0)), list(first))
    assert not torch.equal(cell(x, three(), seed=1, step=1)[0], first[0])
    part = cell(x, tuple(s[5:9] for s in three()), seed=1, step=0, examples=5)
    assert_close(list(part), [s[5:9] for s in first])
    assert not torch.equal(cell(x, three())[0], cell(x, three())[0])
    before = torch.get_rng_state()
    cell.eval()(x, three())
    assert torch.equal(torch.get_rng_state(), before)


# --- the bare rule --------------------------------------------------------------------------------


def test_zoneout_takes_new_or_old():
    """The bare rule would mix values, scale them, or keep the old at another rate than given."""
    new, old = torch.randn(200, 50), torch.randn(200, 50)
    out = zo.zoneout(new, old, 0.25)
    kept = out == old
    assert torch.equal(out, torch.where(kept, old, new))
    assert abs(kept.double().mean().item() - 0.25) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    assert torch.equal(zo.zoneout(new, old, 0.0), new)
    assert torch.equal(zo.zoneout(new, old, 1.0), old)
    for training in (True, False):  # as a cell under autocast gives them
        assert zo.zoneout(new.bfloat16(), old, 0.25, training, seed=1).dtype == torch.float32


def test_zoneout_draws_what_masks_says():
    """The bare rule would not draw the mask that `masks` shows for its seed and step."""
    new, old = torch.ones(20, 30), torch.zeros(20, 30)
    (mask,) = (m[3] for n, m in zo.masks(NOISE, 7, 4, 20, 30).items() if n == "hidden")
    assert torch.equal(zo.zoneout(new, old, 0.5, seed=7, step=3) == 0, mask)
    assert torch.equal(zo.zoneout(new[0], old[0], 0.5, seed=7, step=3) == 0, mask[0])
    nested = zo.zoneout(new.view(4, 5, 30), old.view(4, 5, 30), 0.5, seed=7, step=3)
    assert torch.equal(nested.view(20, 30) == 0, mask)


def test_zoneout_at_evaluation_is_the_expectation():
    """At evaluation the bare rule would draw, or weigh new and old the wrong way round."""
    new, old = torch.randn(20, 30, dtype=torch.float64), torch.randn(20, 30, dtype=torch.float64)
    before = torch.get_rng_state()
    out = zo.zoneout(new, old, 0.25, training=False)
    torch.testing.assert_close(out, 0.75 * new + 0.25 * old)
    each = torch.linspace(0, 1, 30, dtype=torch.float64)
    torch.testing.assert_close(
        zo.zoneout(new, old, each, training=False), (1 - each) * new + each * old
    )
    assert torch.equal(torch.get_rng_state(), before)
    mean = torch.stack([zo.zoneout(new, old, 0.25, seed=k) for k in range(400)]).mean(0)
    assert (mean - out).abs().max() < 0.2 * (new - old).abs().max()


def test_zoneout_follows_generator_and_seed():
    """The bare rule would not follow torch.manual_seed, or not its own seed."""
    new, old = torch.ones(20, 30), torch.zeros(20, 30)
    torch.manual_seed(1)
    first = zo.zoneout(new, old, 0.5)
    assert not torch.equal(zo.zoneout(new, old, 0.5), first)
    torch.manual_seed(1)
    assert torch.equal(zo.zoneout(new, old, 0.5), first)
    assert torch.equal(
        zo.zoneout(new, old, 0.5, seed=3), zo.zoneout(new, old, 0.5, seed=torch.tensor(3))
    )
    assert not torch.equal(
        zo.zoneout(new, old, 0.5, seed=3), zo.zoneout(new, old, 0.5, seed=3, step=1)
    )


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_zoneout_gradients(training):
    """Gradients would reach the value that was not taken, or be scaled."""
    new, old = (torch.randn(6, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = zo.zoneout(new, old, 0.25, training, seed=3)
    g_new, g_old = torch.autograd.grad(out.sum(), (new, old))
    if training:
        kept = out == old
        assert kept.any() and not kept.all()
        assert torch.equal(g_old, kept.double()) and torch.equal(g_new, (~kept).double())
    else:
        assert (g_old == 0.25).all() and (g_new == 0.75).all()
    assert torch.autograd.gradcheck(
        lambda a, b: zo.zoneout(a, b, 0.25, training, seed=3), (new, old)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_zoneout_keeps_the_dtype(training, dtype):
    """The bare rule would widen a state of a smaller dtype."""
    new, old = torch.ones(3, 4, dtype=dtype), torch.zeros(3, 4, dtype=dtype)
    assert zo.zoneout(new, old, 0.5, training).dtype == dtype
    assert zo.zoneout(new, old, torch.full((4,), 0.5), training).dtype == dtype


@pytest.mark.parametrize("rates", [0.5, torch.rand(50)], ids=["one", "a unit"])
def test_a_wrapped_state_of_more_dimensions_has_one_example_a_row(rates):
    """In a ConvLSTM the masks of an example would hang on which others are beside it."""

    class Takes(nn.Module):
        def forward(self, x, h):
            return x

    cell = zo.ZoneoutCell(Takes(), rates)
    x, h = torch.ones(4, 2, 5, 5), torch.zeros(4, 2, 5, 5)
    whole = cell(x, h, seed=1, step=0)
    parts = [cell(x[k : k + 2], h[k : k + 2], seed=1, step=0, examples=k) for k in (0, 2)]
    assert whole.shape == x.shape and torch.equal(whole, torch.cat(parts))
    assert torch.equal(whole.flatten(1), cell(x.flatten(1), h.flatten(1), seed=1, step=0))
    expected = cell.eval()(x, h)
    assert torch.allclose(
        expected, (1 - torch.as_tensor(rates)).expand(50).view(2, 5, 5).expand(4, 2, 5, 5).float()
    )


class Held(NamedTuple):
    """A container with names."""

    layer: nn.Module
    name: str


HOLDERS: dict[str, Callable[[nn.Module], Any]] = {
    "partial": lambda m: functools.partial(m),
    "partial of a method": lambda m: functools.partial(m.forward),
    "argument of a partial": lambda m: functools.partial(lambda layer, x: layer(x), m),
    "deque": lambda m: deque([m]),
    "set": lambda m: {m},
    "frozenset": lambda m: frozenset([m]),
    "named tuple": lambda m: Held(m, "it"),
    "deep": lambda m: {"a": [(Held(m, "it"),)]},
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_modules_in_other_containers_are_replaced_too(holder: str) -> None:
    """A model goes on with the layer that was replaced, and nothing tells: its weights are the
    same.
    """
    model = nn.Sequential(nn.GRU(I, H))
    model.held = HOLDERS[holder](model[0])

    def found(value: Any) -> list[nn.Module]:
        if isinstance(value, nn.Module):
            return [value]
        if isinstance(value, MethodType):
            return found(value.__self__)
        if isinstance(value, functools.partial):
            return [*found(value.func), *found(value.args)]
        if isinstance(value, dict):
            value = list(value.values())
        return (
            [m for one in value for m in found(one)]
            if isinstance(value, (list, tuple, set, frozenset, deque))
            else []
        )

    zo.convert(model, zo.Zoneout(hidden=0.5))
    assert isinstance(model[0], zo.GRU) and found(model.held) == [model[0]]
    assert type(model.held) is type(HOLDERS[holder](model[0]))
    zo.revert(model)
    assert type(model[0]) is nn.GRU and found(model.held) == [model[0]]


@pytest.mark.parametrize("how", ["parametrized", "pruned", "compiled", "subclass"])
def test_our_own_layers_get_new_noise_whatever_was_done_to_them(how: str) -> None:
    """A rate is not changed though nothing has to be replaced for it."""

    class Sub(zo.LSTM):
        """Somebody's own."""

    layer = (Sub if how == "subclass" else zo.LSTM)(I, H, noise=zo.Zoneout(cell=0.5, hidden=0.1))
    if how == "parametrized":
        parametrizations.weight_norm(layer, "weight_hh_l0")
    if how == "pruned":
        prune.l1_unstructured(layer, "weight_hh_l0", 0.5)
    if how == "compiled":
        layer.compile(backend="eager")
    said: list[str] = []
    zo.convert(nn.Sequential(layer), zo.Zoneout(cell=0.2, hidden=0.05), report=said.append)
    assert layer.noise == zo.Zoneout(cell=0.2, hidden=0.05) and "already" in said[0]
    assert float(layer._numbers["cell_rate_l0"]) == 0.2
    if how == "parametrized":
        zo.revert(nn.Sequential(layer), report=said.append)
        assert "it is parametrized" in said[1]


def test_a_layer_that_recomputes_goes_there_and_back():
    """What our own class has set passes for something of the user's, and the layer is left
    alone.
    """
    model = nn.Sequential(zo.LSTM(I, H, recompute=True))
    zo.revert(model)
    assert type(model[0]) is nn.LSTM and not hasattr(model[0], "recompute")
    zo.convert(model, zo.Zoneout(hidden=0.1))
    assert type(model[0]) is zo.LSTM


def test_parameters_that_are_swapped():
    """The module that was replaced still looks at the parameters, which torch then cannot swap."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = nn.Sequential(nn.LSTM(I, H))
        zo.convert(model, zo.Zoneout(cell=0.1, hidden=0.1))
        assert model.double()[0].weight_ih_l0.dtype == torch.float64
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_the_module_that_was_converted_still_runs():
    """Who has kept a reference to the old module gets an error of torch's about zip()."""
    module, x = nn.LSTM(I, H), torch.randn(3, 2, I)
    wanted = module(x)[0]
    zo.convert(module, zo.Zoneout(hidden=0.5))
    assert torch.equal(module(x)[0], wanted)


def test_a_forward_that_only_names_super_and_forward_is_left_alone():
    """A class whose forward computes by itself is reported as converted, and has no noise."""

    class Named(nn.LSTM):
        def forward(self, x, hx=None):
            super().train(self.training)
            self.flatten_parameters()
            print(x.shape, self.all_weights[0][0].shape, sep=", ", end="")
            return self.linear.forward(x), None

    said: list[str] = []
    model = zo.convert(nn.Sequential(Named(I, H)), zo.Zoneout(hidden=0.5), report=said.append)
    assert type(model[0]) is Named and "super().forward" in said[0]


def test_a_decorator_whose_functions_hold_each_other_is_left_alone():
    """A class that cannot be made again ends the conversion of a whole model."""

    def decorated(function):
        def one(*args, **options):
            return other(*args, **options)

        def other(*args, **options):
            return function(*args, **options) if args else one()

        return one

    class Mutual(nn.LSTM):
        @decorated
        def forward(self, x, hx=None):
            return super().forward(x, hx)

    said: list[str] = []
    model = zo.convert(nn.Sequential(Mutual(I, H)), zo.Zoneout(hidden=0.5), report=said.append)
    assert type(model[0]) is Mutual and "left alone" in said[0]
