"""What a layer is survives being copied, pickled, saved, moved and called functionally."""

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zoneout as zo

T, B, I, H = 4, 3, 5, 6

LAYERS: dict[str, Callable[..., Any]] = {
    "LSTM": lambda **o: zo.LSTM(I, H, 2, bidirectional=True, **o),
    "LSTM-proj": lambda **o: zo.LSTM(I, H, proj_size=2, **o),
    "GRU": lambda **o: zo.GRU(I, H, 2, **o),
    "RNN": lambda **o: zo.RNN(I, H, nonlinearity="relu", **o),
    "LSTMCell": lambda **o: zo.LSTMCell(I, H, **o),
    "GRUCell": lambda **o: zo.GRUCell(I, H, **o),
    "RNNCell": lambda **o: zo.RNNCell(I, H, nonlinearity="relu", **o),
}
NOISES: dict[str, Any] = {
    "none": None,
    "zoneout": zo.Zoneout(hidden=0.3),
    "shared": zo.Zoneout(hidden=0.3, mask="shared", at_eval="off"),
    "static": zo.Zoneout(hidden=0.3, mask="static", seed=2**64 - 1),
    "several": [
        zo.StateDropout(hidden=0.1),
        zo.VariationalDropout(input=0.3),
        zo.WeightNoise(std=0.1),
    ],
}
ODD = 1 / 3  # a rate that no smaller dtype holds


@pytest.fixture(autouse=True)
def same_numbers():
    """Every test starts from the same state of torch's generator."""
    torch.manual_seed(20)


def run(layer: Any, seed: int = 7, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What a layer or cell gives for a fixed input and seed."""
    x = torch.linspace(-1, 1, T * B * I).view(T, B, I).to(dtype)
    if isinstance(layer, nn.RNNBase):
        y, state = layer(x, seed=seed)
        return [y, *(state if isinstance(state, tuple) else (state,))]
    state = layer(x[0], seed=seed, step=3)
    return list(state) if isinstance(state, tuple) else [state]


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def through_pickle(layer: Any) -> Any:
    return pickle.loads(pickle.dumps(layer))


def through_save(layer: Any) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_save,
}


def numbers_of(layer: Any) -> dict[str, list[float]]:
    """The rates and static seeds that a layer draws with, by name."""
    return {name: value.flatten().tolist() for name, value in layer._numbers.items()}


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_copy_is_the_same_layer(layer, noise, how):
    """A copied layer would have lost its noise, its masks, its mode or its weights."""
    before = LAYERS[layer](noise=NOISES[noise])
    after = COPIES[how](before)
    assert type(after) is type(before)
    assert str(after) == str(before)
    assert after.noise == before.noise
    assert numbers_of(after) == numbers_of(before)
    assert list(after.state_dict()) == list(before.state_dict())
    assert_equal(run(after), run(before))
    assert_equal(run(COPIES[how](before.eval())), run(before.eval()))
    assert not COPIES[how](before.eval()).training


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_copy_shares_nothing(layer, how):
    """Replacing the noise or the weights of a copy would change the original."""
    before = LAYERS[layer](noise=zo.Zoneout(hidden=torch.full((2 if "proj" in layer else H,), 0.5)))
    expected = run(before)
    after = COPIES[how](before)
    after.noise = dataclasses.replace(before.noise, hidden=after.noise.hidden * 0 + 1)
    assert set(before.noise.hidden.tolist()) == {0.5}
    assert {
        v
        for name, values in numbers_of(before).items()
        if name.startswith("hidden")
        for v in values
    } == {0.5}
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.zero_()
    assert_equal(run(before), expected)
    after.noise = None
    assert before.noise is not None and numbers_of(before)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_trained_layer_with_everything(how):
    """A copy would lose norms, running statistics or learned states, or be unable to train on."""
    layer = zo.LSTM(I, H, 2, noise=zo.Zoneout(cell=[0.1, 0.2]), norm=zo.RecurrentBatchNorm(steps=3),
                    learn_initial_state=True, backend="reference")  # fmt: skip
    run(layer)[0].sum().backward()  # moves the statistics
    after = COPIES[how](layer)
    assert after.norm == layer.norm and after.backend == "reference" and str(after) == str(layer)
    for name, value in layer.state_dict().items():
        assert torch.equal(after.state_dict()[name], value), name
    assert_equal(run(after.eval()), run(layer.eval()))
    run(after.train())[0].sum().backward()
    assert after.all_weights[0][0] is after.weight_ih_l0, (
        "the copy holds weights that are not its own"
    )


def test_tied_layers_stay_tied_in_a_copy():
    """Two names of one layer in a model would become two layers in its copy."""
    model = nn.ModuleDict({"a": zo.GRU(I, H, noise=zo.Zoneout(hidden=0.5))})
    model["b"] = model["a"]
    for how in COPIES.values():
        after = how(model)
        assert after["a"] is after["b"]


def test_zoneout_cell_round_trips():
    """A wrapped cell would lose its rates or its cell when copied, pickled or saved."""
    each = torch.full((H,), ODD, dtype=torch.float64)
    cell = zo.ZoneoutCell(nn.LSTMCell(I, H), rates=[0.25, each], layer=2)
    x = torch.randn(B, I)
    for how in COPIES.values():
        after = how(cell)
        assert after.layer == 2
        assert_equal(list(after(x, seed=1, step=2)), list(cell(x, seed=1, step=2)))
        after.rates = 1.0
        assert cell.rates[0] == 0.25
    assert list(cell.state_dict()) == [f"cell.{name}" for name in nn.LSTMCell(I, H).state_dict()]
    cell.rates = nn.Parameter(each.clone(), requires_grad=False)
    assert list(cell.state_dict()) == [f"cell.{name}" for name in nn.LSTMCell(I, H).state_dict()]
    cell.rates = 0.5


# --- state_dict -----------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("layer", LAYERS)
def test_state_dict_holds_weights_only(layer, noise):
    """Rates or seeds would be in the checkpoint, which would then not load into a layer without
    noise.
    """
    ours, plain = LAYERS[layer](noise=NOISES[noise]), LAYERS[layer]()
    assert (
        list(ours.state_dict())
        == list(plain.state_dict())
        == [n for n, _ in plain.named_parameters()]
    )
    plain.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(plain.state_dict(), strict=True)


@pytest.mark.parametrize("layer", LAYERS)
def test_state_dict_through_a_file(layer):
    """A checkpoint would hold something that torch.load refuses to read safely."""
    before, after = (LAYERS[layer](noise=zo.Zoneout(hidden=0.3)) for _ in range(2))
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert_equal(run(after), run(before))


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_reaches_the_weights_in_use(assign):
    """Loaded weights would not be the ones a layer runs with, or their loading would undo the
    noise.
    """
    before, after = (zo.LSTM(I, H, 2, noise=zo.Zoneout(cell=0.5)) for _ in range(2))
    after.load_state_dict(before.state_dict(), assign=assign)
    assert after.all_weights[1][0] is after.weight_ih_l1
    assert_equal(run(after), run(before))


def test_state_dict_of_norms_and_learned_states():
    """Scales, running statistics or learned states would be missing from a checkpoint, or
    changed by it.
    """
    options: dict[str, Any] = {"norm": zo.RecurrentBatchNorm(steps=3), "learn_initial_state": True}
    before, after = (zo.LSTM(I, H, **options) for _ in range(2))
    run(before)
    state = before.state_dict()
    assert {"h0", "c0", "norm_hh_l0", "norm_cell_l0", "mean_hh_l0", "var_cell_l0"} <= set(state)
    after.load_state_dict(state, strict=True)
    assert_equal(run(after.eval()), run(before.eval()))


# --- dtypes and devices ---------------------------------------------------------------------------


CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to dtype": lambda m: m.to(torch.float16),
    "to device and dtype": lambda m: m.to("cpu", torch.bfloat16),
    "there and back": lambda m: m.half().float(),
    "type": lambda m: m.type(torch.float16),
    "apply": lambda m: m._apply(lambda t: t.half() if t.is_floating_point() else t),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_casting_a_layer_keeps_its_rates_exact(layer, cast):
    """A layer in half precision would have other rates, and so other masks, than it had before."""
    units = 2 if "proj" in layer else H
    noise = [
        zo.Zoneout(
            hidden=torch.full((units,), ODD, dtype=torch.float64), mask="static", seed=2**63 - 25
        ),
        zo.WeightNoise(std=ODD),
    ]
    layer = LAYERS[layer](noise=noise)
    before = numbers_of(layer)
    CASTS[cast](layer)
    assert numbers_of(layer) == before
    assert before["hidden_seed"] == [2**63 - 25] and set(before["hidden_rate_l0"]) == {ODD}
    assert all(v.dtype in (torch.float64, torch.int64) for v in layer._numbers.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_cast_layer_draws_the_same_masks(dtype):
    """The masks of a seed would depend on the layer's dtype."""
    layer = zo.GRU(I, H, noise=zo.Zoneout(hidden=0.5))
    before = run(layer)[0][0] == 0  # kept at the initial zero
    after = run(layer.to(dtype), dtype=dtype)[0]
    assert after.dtype == dtype
    assert torch.equal(after[0] == 0, before)


@pytest.mark.parametrize("name", LAYERS)
def test_meta_and_back(name):
    """A layer could not be made or moved to the meta device, or would come back without its
    rates.
    """
    layer = LAYERS[name](noise=zo.Zoneout(hidden=ODD), device="meta")
    assert all(v.device.type == "meta" for v in layer.parameters())
    layer.noise = zo.Zoneout(hidden=2 * ODD)
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    same = LAYERS[name](noise=zo.Zoneout(hidden=2 * ODD))
    same.load_state_dict(layer.state_dict())
    assert_equal(run(layer), run(same))


@pytest.mark.parametrize("layer", LAYERS)
def test_runs_on_the_meta_device(layer):
    """Shapes could not be worked out without memory, as nn.LSTM can on the meta device."""
    layer = LAYERS[layer](noise=zo.Zoneout(hidden=ODD))
    expected = [v.shape for v in run(layer)]
    layer = layer.to("meta")
    x = torch.empty(T, B, I, device="meta")
    got = layer(x) if isinstance(layer, nn.RNNBase) else layer(x[0])
    results: list[Any] = []
    for one in got if isinstance(got, tuple) else (got,):
        results += one if isinstance(one, tuple) else (one,)
    assert [v.shape for v in results] == expected and all(v.is_meta for v in results)


def test_skip_init():
    """`nn.utils.skip_init`, which builds a module without initialising it, would lose the rates."""
    layer = nn.utils.skip_init(zo.LSTM, I, H, noise=zo.Zoneout(cell=ODD))
    assert numbers_of(layer) == {"cell_rate_l0": [ODD], "hidden_rate_l0": [0.0]}
    assert all(v.device.type == "cpu" for v in layer.parameters())


def test_noise_of_a_layer_made_in_inference_mode():
    """A layer loaded under torch.inference_mode could not get another noise outside it."""
    with torch.inference_mode():
        layer: Any = zo.LSTM(I, H, noise=zo.Zoneout(cell=0.5))
    layer.noise = zo.Zoneout(cell=0.25)
    assert numbers_of(layer)["cell_rate_l0"] == [0.25]
    assert not any(value.is_inference() for value in layer._numbers.values())


def test_shared_memory():
    """A layer whose memory processes share would stop working."""
    layer = zo.GRU(I, H, noise=zo.Zoneout(hidden=0.5))
    expected = run(layer)
    layer.share_memory()
    assert all(v.is_shared() for v in layer.parameters())
    assert_equal(run(layer), expected)


# --- functional use -------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_functional_call(layer):
    """`functional_call` would run with the layer's own weights in the place of those given."""
    ours, other = (LAYERS[layer](noise=zo.Zoneout(hidden=0.3)) for _ in range(2))
    given = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}
    x = torch.linspace(-1, 1, T * B * I).view(T, B, I)
    is_layer = isinstance(ours, nn.RNNBase)
    call = {"seed": 7} if is_layer else {"seed": 7, "step": 3}
    state = torch.ones(B, H)
    inputs = (x,) if is_layer else (x[0], (state, state) if ours.kind == "lstm" else state)
    got, expected = torch.func.functional_call(ours, given, inputs, call), other(*inputs, **call)
    first = got[0] if isinstance(got, tuple) else got
    assert torch.equal(first, expected[0] if isinstance(got, tuple) else expected)
    grads = torch.autograd.grad(first.sum(), list(given.values()))
    assert all(grad.abs().sum() > 0 for grad in grads)
    assert all(p.grad is None for p in ours.parameters())


def test_vmap_over_stacked_models():
    """An ensemble by `torch.func.vmap` would not run, or not give what its members give."""
    layers: Any = [zo.GRU(I, H, noise=zo.Zoneout(hidden=0.3)) for _ in range(3)]
    x = torch.randn(T, B, I)
    params, buffers = torch.func.stack_module_state(layers)

    def one(params: Any, buffers: Any, x: Tensor) -> Tensor:
        y, _ = torch.func.functional_call(layers[0], (params, buffers), (x,), {"seed": 7})
        return y

    stacked = torch.func.vmap(one, in_dims=(0, 0, None))(params, buffers, x)
    torch.testing.assert_close(stacked, torch.stack([layer(x, seed=7)[0] for layer in layers]))


# --- what optimizers and DDP see ------------------------------------------------------------------


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("layer", LAYERS)
def test_parameters_are_torchs(layer, noise):
    """The noise would add something that an optimizer trains or a parameter count includes."""
    ours = LAYERS[layer](noise=NOISES[noise])
    options = (
        {"nonlinearity": "relu"} if "RNN" in layer else {"proj_size": 2} if "proj" in layer else {}
    )
    if layer in ("LSTM", "GRU"):
        options = {"num_layers": 2, "bidirectional": layer == "LSTM"}
    theirs = getattr(nn, layer.removesuffix("-proj"))(I, H, **options)
    assert [(n, p.shape) for n, p in ours.named_parameters()] == [
        (n, p.shape) for n, p in theirs.named_parameters()
    ]
    assert not list(ours.buffers())
    run(ours)[0].sum().backward()
    if isinstance(ours, nn.RNNBase):
        assert all(p.grad is not None for p in ours.parameters()), (
            "DDP would wait for a gradient in vain"
        )


def test_distributed_data_parallel():
    """DDP would refuse the layer, move its rates, or lack a gradient."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")

    def no_reduction(_, bucket):  # DDP reads the annotations, and would not take Any
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    noise = [zo.Zoneout(cell=ODD), zo.WeightDrop(rate=0.1)]
    layer: Any = zo.LSTM(I, H, 2, noise=noise, learn_initial_state=True)
    expected = torch.autograd.grad(run(layer)[0].sum(), list(layer.parameters()))
    distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(layer)
        wrapped.register_comm_hook(None, no_reduction)
        wrapped(torch.linspace(-1, 1, T * B * I).view(T, B, I), seed=7)[0].sum().backward()
    finally:
        distributed.destroy_process_group()
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert numbers_of(layer)["cell_rate_l0"] == [ODD]


# --- the noises themselves ------------------------------------------------------------------------


EACH: list[Any] = [
    zo.Zoneout(cell=0.5, hidden=0.05),
    zo.Zoneout(cell=[0.5, 0.25], hidden=0.05, mask="shared", at_eval="off"),
    zo.Zoneout(hidden=torch.tensor([0.5, 0.25]), mask="static", seed=3),
    zo.Zoneout(cell=[0.5, torch.tensor([0.5, 0.25])], mask="step"),
    zo.StateDropout(cell=0.5, mask="sequence", at_eval="sample"),
    zo.StateDropout(hidden=0.5, states={"n": 0.1, "c": [0.5, 0.25]}),
    zo.Zoneout(states={"n": torch.tensor([0.5, 0.25])}),
    zo.RecurrentDropout(rate=0.25, hold_output_gate=True),
    zo.VariationalDropout(input=0.5, hidden=0.25),
    zo.WeightDrop(rate=0.5),
    zo.WeightNoise(std=0.075),
]


@pytest.mark.parametrize("noise", EACH, ids=repr)
def test_noises_are_values(noise):
    """Two noises with the same fields would not be equal, or could not be keys of a dict."""
    for same in (
        copy.copy(noise),
        copy.deepcopy(noise),
        through_pickle(noise),
        dataclasses.replace(noise),
    ):
        assert same == noise and hash(same) == hash(noise) and repr(same) == repr(noise)
    assert len({noise, copy.deepcopy(noise)}) == 1
    others = [one for one in EACH if one is not noise]
    assert all(one != noise for one in others)
    assert noise != "a noise" and noise != dataclasses.asdict(noise)


def test_a_layer_has_rates_of_its_own():
    """Who changes a noise's tensor would change the layer too, but only at its next cast or
    load.
    """
    noise = zo.Zoneout(hidden=torch.full((4,), 0.1, dtype=torch.float64))
    layer = zo.GRU(3, 4, noise=noise)
    noise.hidden.fill_(0.9)
    layer.load_state_dict(layer.state_dict())
    assert numbers_of(layer.double()) == {"hidden_rate_l0": [0.1] * 4}


def test_a_noise_is_loaded_without_trust(tmp_path):
    """A checkpoint with the rates beside the weights cannot be read as torch reads by default."""
    given = [
        zo.Zoneout(cell=0.3, hidden=torch.linspace(0, 0.2, 4)), zo.StateDropout(hidden=0.1),
        zo.RecurrentDropout(rate=0.2), zo.VariationalDropout(hidden=0.2),
        zo.WeightDrop(rate=(0.1, 0.2)), zo.WeightNoise(std=0.05),
        zo.Zoneout(hidden=0.1, states={"n": torch.linspace(0, 0.2, 4), "m": (0.1, 0.2)}),
    ]  # fmt: skip
    torch.save(given, tmp_path / "noise.pt")
    assert torch.load(tmp_path / "noise.pt", weights_only=True) == given


def test_noises_of_other_classes_differ():
    """A Zoneout and a StateDropout of the same rates would be taken for the same noise."""
    assert zo.Zoneout(cell=0.5) != zo.StateDropout(cell=0.5)
    assert zo.WeightDrop(rate=0.5) != zo.WeightNoise(std=0.5)


def test_numbers_of_any_kind_make_the_same_noise():
    """A rate as an int, a NumPy number or a scalar tensor would not be the float it stands for."""
    kinds: list[Any] = [0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5)]
    for half in kinds:
        assert zo.Zoneout(cell=half) == zo.Zoneout(cell=0.5)
        assert repr(zo.Zoneout(cell=half)) == "Zoneout(cell=0.5)"
    assert zo.Zoneout(cell=1) == zo.Zoneout(cell=1.0) and type(zo.Zoneout(cell=1).cell) is float
    assert zo.Zoneout(cell=[0.5, 1]) == zo.Zoneout(cell=(0.5, 1.0))
    assert zo.Zoneout(cell=torch.tensor([0.5], dtype=torch.float64)) == zo.Zoneout(
        cell=torch.tensor([0.5])
    )


@pytest.mark.parametrize("noise", EACH, ids=repr)
def test_noises_are_frozen(noise):
    """A noise that is in use could be changed behind the layer's back."""
    for field in dataclasses.fields(noise):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(noise, field.name, 0.1)


def test_replace_makes_another_noise():
    """`dataclasses.replace`, as a schedule uses it, would skip the checks or change the
    original.
    """
    noise: Any = zo.Zoneout(cell=0.5, hidden=torch.tensor([0.5, 0.25]), mask="static", seed=3)
    other = dataclasses.replace(noise, cell=0.25)
    assert (other.cell, other.mask, other.seed) == (0.25, "static", 3)
    assert torch.equal(other.hidden, noise.hidden) and noise.cell == 0.5
    with pytest.raises(ValueError, match="cell"):
        dataclasses.replace(noise, cell=2.0)


def test_repr_says_what_is_not_the_default():
    """A printed noise would hide a field or drown it in defaults; the plain ones evaluate to
    themselves.
    """
    assert repr(zo.Zoneout()) == "Zoneout()"
    assert repr(zo.Zoneout(hidden=0.5, mask="step")) == "Zoneout(hidden=0.5, mask='step')"
    for noise in EACH:
        if not any(isinstance(v, Tensor) for v in vars(noise).values()) and "rates>" not in repr(
            noise
        ):
            assert eval(repr(noise), vars(zo)) == noise
    assert "1000 rates" in repr(zo.Zoneout(hidden=torch.rand(1000))), "a repr of a thousand numbers"


def test_norms_are_values():
    """A RecurrentBatchNorm would not be a plain frozen value, as the noises are."""
    norm = zo.RecurrentBatchNorm(steps=5)
    assert norm == zo.RecurrentBatchNorm(5) and hash(norm) == hash(zo.RecurrentBatchNorm(5))
    assert through_pickle(norm) == norm and dataclasses.replace(norm, momentum=0.05) != norm
    with pytest.raises(dataclasses.FrozenInstanceError):
        norm.steps = 3  # type: ignore[misc]
