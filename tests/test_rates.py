"""Where rates live, and rates given to a call.

A layer keeps its rates as plain data. Loaders that build a model on the meta device (transformers,
accelerate) fill buffers with arbitrary memory, so a rate kept as a buffer would be lost without a
word.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vmap

import zoneout as zo

I, H, T, B = 3, 5, 6, 4
NOISE = zo.Zoneout(cell=0.5, hidden=0.25)
UNITS = torch.linspace(0, 1, H)
MAKES: dict[str, Any] = {
    "LSTM": lambda **options: zo.LSTM(I, H, noise=NOISE, **options),
    "GRU": lambda **options: zo.GRU(I, H, 2, noise=zo.Zoneout(hidden=[0.5, 0.25]), **options),
    "static": lambda **options: zo.RNN(
        I, H, noise=zo.Zoneout(hidden=0.5, mask="static", seed=9), **options
    ),
    "units": lambda **options: zo.GRU(I, H, noise=zo.Zoneout(hidden=UNITS), **options),
    "LSTMCell": lambda **options: zo.LSTMCell(I, H, noise=NOISE, **options),
}


def x_of() -> Tensor:
    return torch.linspace(-2, 2, T * B * I).view(T, B, I)


def run(module: Any, **call: Any) -> Tensor:
    """The outputs of a layer or cell from a fixed seed."""
    if isinstance(module, nn.RNNBase):
        return module(x_of(), seed=7, **call)[0]
    out = module(x_of()[0], seed=7, step=2, **call)
    return out[0] if isinstance(out, tuple) else out


def fill_with_anything(module: nn.Module, state: dict[str, Tensor]) -> None:
    """What transformers and accelerate do to a module on the meta device: weights from the file,
    the rest is memory.
    """
    for name, old in module.named_parameters():
        module.register_parameter(name, nn.Parameter(state[name].clone(), old.requires_grad))
    for name, old in module.named_buffers():
        module._buffers[name] = torch.full(old.shape, 6.9e-310).to(old.dtype)


def empty(make: Any) -> Any:
    with torch.device("meta"):
        return make()


def empty_by_registering(make: Any) -> Any:
    """accelerate's init_empty_weights: what is registered goes to the meta device at once."""
    before = nn.Module.register_parameter

    def register(self: nn.Module, name: str, value: Any) -> None:
        before(self, name, None if value is None else nn.Parameter(value.detach().to("meta")))

    try:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        return make()
    finally:
        nn.Module.register_parameter = before  # type: ignore[method-assign]


@pytest.mark.parametrize("build", [empty, empty_by_registering])
@pytest.mark.parametrize("name", MAKES)
def test_a_loader_that_fills_buffers_leaves_the_rates(name, build):
    """A model loaded by transformers or accelerate would train without noise, or evaluate by
    other rates.
    """
    whole = MAKES[name]()
    module = build(MAKES[name])
    assert all(p.is_meta for p in module.parameters())
    fill_with_anything(module, whole.state_dict())
    for training in (True, False):
        assert torch.equal(run(module.train(training)), run(whole.train(training)))
    assert not torch.equal(run(module.train()), run(module.eval()))


@pytest.mark.parametrize("name", MAKES)
def test_rates_are_no_buffers(name):
    """Whatever walks over a module's buffers (casts, averages, DDP, quantisation, FSDP) would
    change the rates.
    """
    module = MAKES[name]()
    assert not list(module.buffers())
    assert not any(isinstance(value, nn.Parameter) for value in module._numbers.values())


@pytest.mark.parametrize("name", MAKES)
def test_to_empty(name):
    """`to_empty` would empty the rates as it does the weights."""
    whole = MAKES[name]()
    module = MAKES[name](device="meta").to_empty(device="cpu")
    module.load_state_dict(whole.state_dict())
    assert torch.equal(run(module), run(whole))


def test_copies_on_a_device_are_written_in_place():
    """A captured CUDA graph, which knows the copies by their address, would not see a schedule
    move on.
    """
    layer: Any = zo.LSTM(
        I, H, 2, noise=zo.Zoneout(cell=0.5, hidden=torch.full((H,), 0.5)), device="meta"
    )
    device = torch.device("meta")
    before = layer._numbers_on(device)
    assert layer._numbers_on(device) is before and all(v.is_meta for v in before.values())
    kept = dict(before)
    rules = layer._rules
    layer.noise = zo.Zoneout(cell=[0.1, 0.2], hidden=torch.full((H,), 0.25))
    after = layer._numbers_on(device)
    assert after.keys() == kept.keys() and all(after[name] is value for name, value in kept.items())
    assert layer._rules is rules, "compiled code that knows the rules would be compiled again"


def test_copies_of_a_removed_noise_become_zero():
    """A captured graph would go on zoning out after `layer.noise = None`."""
    layer: Any = zo.GRU(I, H, noise=zo.Zoneout(hidden=0.5))
    elsewhere = {name: value.clone() for name, value in layer._numbers.items()}
    layer._copies[torch.device("cuda", 0)] = elsewhere  # stands in for a GPU's
    rate = elsewhere["hidden_rate_l0"]
    layer.noise = zo.Zoneout(hidden=0.125)
    assert rate.item() == 0.125
    layer.noise = None
    assert rate.item() == 0 and elsewhere["hidden_rate_l0"] is rate


def test_moving_a_layer_drops_the_copies_of_other_devices():
    """A layer that visits many GPUs would leave its rates on each of them."""
    layer: Any = zo.GRU(I, H, noise=zo.Zoneout(hidden=0.5), device="meta")
    layer._numbers_on(torch.device("meta"))
    assert layer._copies
    assert not layer.to_empty(device="cpu")._copies


def test_rates_of_a_layer_made_under_fake_tensors():
    """A layer built under a FakeTensorMode, or given its noise there, would have no rates
    outside of it.
    """
    whole: Any = zo.LSTM(I, H, noise=NOISE)
    with FakeTensorMode():
        layer: Any = zo.LSTM(I, H, noise=zo.Zoneout(cell=0.1))
        layer.noise = NOISE
    layer.load_state_dict(whole.state_dict(), assign=True)
    assert torch.equal(run(layer), run(whole))


def test_numbers_on_the_cpu_are_never_changed_in_place():
    """A backward pass after a schedule has moved on would use the next rate."""
    layer: Any = zo.GRU(I, H, noise=zo.Zoneout(hidden=0.5)).eval()
    x = x_of().requires_grad_()
    (wanted,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    y = layer(x)[0].square().sum()
    layer.noise = zo.Zoneout(hidden=0.9)
    assert torch.equal(torch.autograd.grad(y, x)[0], wanted)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_leaves_the_devices_copies_behind(copied):
    """A pickled layer would carry tensors of a device that the reader may not have."""
    layer: Any = zo.GRU(I, H, noise=zo.Zoneout(hidden=0.5))
    layer._copies[torch.device("meta")] = {"hidden_rate_l0": torch.empty((), device="meta")}
    other = copied(layer)
    assert not other._copies and layer._copies
    assert torch.equal(run(other), run(layer))


def test_a_layer_saved_by_a_version_whose_rates_were_buffers():
    """A module pickled whole by an older version would keep rates as buffers, or fail at its
    next call.
    """
    layer: Any = zo.GRU(I, H, noise=zo.Zoneout(hidden=0.5))
    wanted = run(layer)
    state = copy.deepcopy(layer.__getstate__())
    del state["_copies"], state["_numbers"]
    state["_noise_names"] = ("hidden_rate_l0",)
    state["_buffers"]["hidden_rate_l0"] = torch.tensor(0.1)
    state["_non_persistent_buffers_set"].add("hidden_rate_l0")
    old: Any = zo.GRU.__new__(zo.GRU)
    old.__setstate__(state)
    assert torch.equal(run(old), wanted) and not list(old.buffers())


def test_compiled_before_its_first_call_and_after_a_schedule():
    """A compiled layer would be compiled again for every rate, or go on with its first one."""
    layer: Any = zo.LSTM(I, H, noise=NOISE)
    graphs = []
    compiled = torch.compile(
        layer, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True
    )
    for rate in (0.5, 0.1, 0.9):
        layer.noise = zo.Zoneout(cell=rate, hidden=rate / 2)
        torch.testing.assert_close(compiled(x_of(), seed=7)[0], layer(x_of(), seed=7)[0])
    assert len(graphs) == 1


# --- rates given to a call ------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["LSTM", "LSTMCell"])
def test_rates_of_a_call_override_the_layers(name, training):
    """`rates=` would be ignored, change the layer, or leave out a stream that the noise has at
    zero.
    """
    module = MAKES[name]().train(training)
    before = run(module)
    other = MAKES[name]().train(training)
    other.load_state_dict(module.state_dict())
    for given in (
        {"cell": 0.9, "hidden": 0.1},
        {"cell": torch.tensor(0.9), "hidden": UNITS},
        {"cell": 0.0, "hidden": UNITS.numpy()},
    ):
        other.noise = zo.Zoneout(**given)
        assert torch.equal(run(module, rates=given), run(other))
    other.noise = zo.Zoneout(cell=0.5, hidden=0.75)
    assert torch.equal(run(module, rates={"hidden": 0.75}), run(other))
    module.noise = zo.Zoneout(hidden=0.75)  # the cell's rate is zero: it has no rule of its own
    assert torch.equal(run(module, rates={"cell": 0.5}), run(other))
    module.noise = NOISE
    assert torch.equal(run(module), before)


def test_rates_of_a_call_for_each_layer_and_method():
    """A rate would reach every layer, or another method than the one that has the stream."""
    noise = [
        zo.StateDropout(cell=0.3),
        zo.Zoneout(hidden=0.2),
        zo.VariationalDropout(input=0.1),
        zo.WeightDrop(rate=0.1),
    ]
    layer = zo.LSTM(I, H, 2, noise=noise)
    other = zo.LSTM(I, H, 2)
    other.noise = [
        zo.StateDropout(cell=[0.5, 0.1]),
        zo.Zoneout(hidden=0.4),
        zo.VariationalDropout(input=0.6),
        zo.WeightDrop(rate=0.7),
    ]
    other.load_state_dict(layer.state_dict())
    given: Any = {"cell": [0.5, 0.1], "hidden": 0.4, "input": 0.6, "weight": 0.7}
    assert torch.equal(run(layer, rates=given), run(other))


def test_a_stream_at_zero_in_two_methods_is_the_one_that_is_on():
    """`rates={"hidden": …}` would zero the state where the layer's method for it is zoneout."""
    both = zo.LSTM(I, H, noise=[zo.StateDropout(cell=0.3), zo.Zoneout(hidden=0.2)])
    h = torch.randn(1, B, H)
    _, (ended, _) = both(x_of(), (h, h), rates={"hidden": 1.0})
    assert torch.equal(ended, h)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_vmap_over_rates(backend):
    """A sweep over rates by `vmap` would run every member with one rate."""
    layer: Any = zo.LSTM(I, H, noise=NOISE, backend=backend)
    x, rates = x_of(), torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    units = torch.rand(3, H)

    def one(rate: Tensor, unit: Tensor) -> Tensor:
        return layer(x, seed=7, rates={"cell": rate, "hidden": unit})[0]

    got = vmap(one)(rates, units)
    torch.testing.assert_close(
        got, torch.stack([one(rate, unit) for rate, unit in zip(rates, units)])
    )
    assert not torch.equal(got[0], got[2])
    beyond = vmap(lambda rate: layer(x, seed=7, rates={"cell": rate})[0])(torch.tensor([-1.0, 2.0]))
    torch.testing.assert_close(
        beyond[1], layer(x, seed=7, rates={"cell": 1.0})[0]
    )  # unread, so clamped


def test_rates_that_cannot_be_read_keep_their_precision():
    """Under `vmap` a rate would be rounded to float32."""
    layer: Any = zo.GRU(I, H, noise=zo.Zoneout(hidden=0.5), dtype=torch.float64).eval()
    x, rate = x_of().double(), torch.tensor([0.1], dtype=torch.float64)
    got = vmap(lambda rate: layer(x, rates={"hidden": rate})[0])(rate)[0]
    torch.testing.assert_close(got, layer(x, rates={"hidden": 0.1})[0], rtol=0, atol=1e-13)


def test_rates_of_a_call_under_a_compiler():
    """A tensor of rates would be compiled in as a number, and the next one compiled again."""
    layer: Any = zo.GRU(I, H, noise=zo.Zoneout(hidden=0.5))
    graphs = []
    compiled = torch.compile(
        layer, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True
    )
    for rate in (0.25, 0.75):
        given = {"hidden": torch.tensor(rate)}
        torch.testing.assert_close(
            compiled(x_of(), seed=7, rates=given)[0],
            layer(x_of(), seed=7, rates={"hidden": rate})[0],
        )
    assert len(graphs) == 1


def test_rates_of_a_wrapped_cell():
    """`ZoneoutCell` would not take a call's rates, or not under `vmap`."""
    cell = zo.ZoneoutCell(nn.GRUCell(I, H), rates=0.0)
    x, h = x_of()[0], torch.randn(B, H)
    assert torch.equal(cell(x, h, seed=7, step=0, rates=1.0), h)
    new = cell(x, h)
    for call in (
        lambda rate: cell(x, h, seed=7, step=0, rates=rate),
        lambda rate: zo.zoneout(new, h, rate, seed=7),
    ):
        got = vmap(call)(torch.tensor([0.0, 1.0]))
        assert torch.equal(got[1], h) and torch.equal(got[0], new)
