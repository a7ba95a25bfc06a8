"""The systems that the paper names, each against its equations in NumPy."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import oracle
import philox_numpy
import pytest
import torch
from torch import nn

import zoneout as zo
from zoneout import noisy
from zoneout.systems import (
    HMLSTM,
    AdaptiveLSTM,
    HyperLSTM,
    SurprisalLSTM,
    clockwork,
    module_periods,
    steps,
)

T, B, I, H = 6, 3, 5, 8


def sigmoid(v: Any) -> Any:
    return 1 / (1 + np.exp(-v))


def arrays(module: nn.Module) -> dict[str, Any]:
    return {n: v.detach().double().numpy() for n, v in module.state_dict().items()}


def normal(v: Any, scale: Any, shift: Any) -> Any:
    """Layer norm of one vector."""
    return (v - v.mean()) / np.sqrt(v.var() + 1e-3) * scale + shift


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def shaken(module: Any) -> Any:
    """A module in float64 none of whose parameters is zero, or equal to its neighbour."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return module.double()


def bits(stream: str, seed: int, first: int, ids: Any, units: int) -> Any:
    return philox_numpy.bits(stream, "unit", seed, range(first, first + T), ids, units)


def test_rates_of_a_call_are_not_copied_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph of adaptive zoneout cannot be captured: its run ends before the first update."""
    other = torch.device("meta")  # in place of a GPU
    numbers = [torch.tensor(0.5, dtype=torch.float64), torch.tensor(-(2**40))]
    kinds = [n.to(other) for n in numbers]
    copied: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda *args: copied.append(args))
    made = [noisy._to_device(number, other) for number in numbers]
    assert not copied
    assert [(m.shape, m.dtype, m.device) for m in made] == [
        (k.shape, k.dtype, k.device) for k in kinds
    ]


# --- HyperLSTM ------------------------------------------------------------------------------------


def numpy_hyper(m: HyperLSTM, x: Any, keep: Any) -> Any:
    a = arrays(m)
    n, out = m.embedding_size, np.zeros((T, B, H))
    for b in range(B):
        h, c, small, small_c = (
            np.zeros(H),
            np.zeros(H),
            np.zeros(m.hyper_size),
            np.zeros(m.hyper_size),
        )
        for t in range(T):
            gates = a["hyper_ih"] @ np.concatenate([x[t, b], h]) + a["hyper_hh"] @ small
            i, f, g, o = (
                normal(v, a["hyper_norm_gates.weight"][k], a["hyper_norm_gates.bias"][k])
                for k, v in enumerate(np.split(gates, 4))
            )
            small_c = sigmoid(f + 1) * small_c + sigmoid(i) * np.tanh(g)
            shown = normal(small_c, a["hyper_norm_c.weight"][0], a["hyper_norm_c.bias"][0])
            small = sigmoid(o) * np.tanh(shown)
            z = (a["scale_in.weight"] @ small + a["scale_in.bias"]).reshape(8, n)
            shift = (a["shift_in.weight"] @ small).reshape(4, n)
            of_x, of_h = np.split(a["weight_ih"] @ x[t, b], 4), np.split(a["weight_hh"] @ h, 4)
            bias = np.split(a["bias"], 4)
            i, f, g, o = (
                normal(
                    (z[k] @ a["scale_out"][k]) * of_x[k]
                    + (z[4 + k] @ a["scale_out"][4 + k]) * of_h[k]
                    + shift[k] @ a["shift_out"][k]
                    + bias[k],
                    a["norm_gates.weight"][k],
                    a["norm_gates.bias"][k],
                )
                for k in range(4)
            )
            c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(g) * keep[t, b]
            h = sigmoid(o) * np.tanh(normal(c, a["norm_c.weight"][0], a["norm_c.bias"][0]))
            out[t, b] = h
    return out


def test_hyper_lstm():
    """A scale or shift belongs to another gate or product, or dropout to another value."""
    model = shaken(HyperLSTM(I, H, hyper_size=4, embedding_size=3, dropout=0.4))
    x, ids = inputs(T, B, I), [4, 0, 9]
    limit = round(0.4 * 65536)
    keep = (bits("update", 5, 2, ids, H) >= limit) * 65536 / (65536 - limit)
    y, state = model(x, seed=5, examples=ids, first_step=2)
    torch.testing.assert_close(y, torch.from_numpy(numpy_hyper(model, x.numpy(), keep)))
    model.eval()
    y, _ = model(x)
    want = numpy_hyper(model, x.numpy(), np.ones((T, B, H)))
    torch.testing.assert_close(y, torch.from_numpy(want))
    first, state = model(x[:2])
    torch.testing.assert_close(torch.cat([first, model(x[2:], state)[0]]), y)


def test_the_start_of_a_hyper_lstm_is_that_of_its_authors():
    """The scales would not start at 0.1, or the shifts not at zero."""
    model = HyperLSTM(I, H, hyper_size=4)
    hyper = torch.randn(2, 4)
    scales = torch.bmm(
        model.scale_in(hyper).unflatten(-1, (8, -1)).transpose(0, 1), model.scale_out
    )
    assert torch.allclose(scales, torch.full_like(scales, 0.1))
    assert not model.shift_out.any() and model.shift_in.weight.std() < 0.02
    gate = model.weight_hh[:H]
    assert torch.allclose(gate @ gate.T, torch.eye(H), atol=1e-5)


@pytest.mark.parametrize("rate", [1.0, 1 - 1e-6])
@pytest.mark.filterwarnings("ignore:dropout. 0.999999 rounds to 1")
def test_a_hyper_lstm_can_drop_every_update(rate):
    """A rate that is drawn as 1 divides by zero; then c, and with it h, stays at zero."""
    model = HyperLSTM(I, H, hyper_size=4, dropout=rate)
    y, state = model(torch.randn(T, B, I), seed=1)
    assert not y.any() and not state[1].any()


def test_the_scale_of_dropout_has_the_precision_of_the_input():
    """In float64 a kept update is off by the rounding of float32."""
    model = HyperLSTM(I, H, hyper_size=4, dropout=0.3).double()
    limit = round(0.3 * 65536)
    keep = (bits("update", 5, 0, [0, 1, 2], H) >= limit) * 65536 / (65536 - limit)
    x = inputs(T, B, I)
    want = torch.from_numpy(numpy_hyper(model, x.numpy(), keep))
    torch.testing.assert_close(model(x, seed=5)[0], want, rtol=1e-12, atol=1e-13)


# --- adaptive zoneout -----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["unit", "rate"])
def test_adaptive_zoneout(mask):
    """A rate is not σ(A ĥ + a), is of another state, or is not drawn as the layer's masks are."""
    model = shaken(AdaptiveLSTM(I, H, hyper_size=4, mask=mask))
    x, ids = inputs(T, B, I), [4, 0, 9]
    hidden = model.hyper(x)[0].detach().numpy()
    a = arrays(model)
    rates = {
        n: sigmoid(hidden @ a[f"rates.{n}.weight"].T + a[f"rates.{n}.bias"])
        for n in ("cell", "hidden")
    }
    d = rates
    if mask == "unit":
        d = {n: (bits(n, 5, 2, ids, H) < np.rint(r * 65536)) * 1.0 for n, r in rates.items()}
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    weights = oracle.Weights(*(a[f"main.{name}"] for name in names))
    zero = np.zeros((B, H))
    y, _ = model(x, seed=5, examples=ids, first_step=2)
    want = oracle.run("lstm", x.numpy(), zero, zero, weights, oracle.Noise(**d)).y
    torch.testing.assert_close(y, torch.from_numpy(want))
    model.eval()
    want = oracle.run("lstm", x.numpy(), zero, zero, weights, oracle.Noise(**rates)).y
    y, _ = model(x)
    torch.testing.assert_close(y, torch.from_numpy(want))
    first, state = model(x[:2])
    torch.testing.assert_close(torch.cat([first, model(x[2:], state)[0]]), y)


def test_adaptive_zoneout_starts_at_its_rates_and_learns():
    """It would start elsewhere than plain zoneout, or its rates would get no gradient."""
    model = AdaptiveLSTM(I, H, hyper_size=4, cell=0.5, hidden=0.05)
    plain = zo.LSTM(I, H, noise=zo.Zoneout(cell=0.5, hidden=0.05))
    plain.load_state_dict(model.main.state_dict())
    x = inputs(T, B, I).float()
    y = model(x, seed=5)[0]
    assert torch.allclose(y, plain(x, seed=5)[0], atol=1e-6)
    y.square().sum().backward()
    assert all(head.weight.grad.abs().sum() > 0 for head in model.rates.values())


def test_the_small_lstm_of_adaptive_zoneout_remembers_at_the_start():
    """Its forget gates would be half closed, so that the rates see only the last few steps."""
    model = AdaptiveLSTM(I, H, hyper_size=64)
    gates = (model.hyper.bias_ih_l0 + model.hyper.bias_hh_l0).detach().view(4, 64).mean(1)
    torch.testing.assert_close(gates, torch.tensor([0.0, 1.0, 0.0, 0.0]), rtol=0, atol=0.15)


# --- clockwork ------------------------------------------------------------------------------------


def test_clockwork():
    """A slow unit sees a fast one, or ticks at another step; or the clock stops at evaluation."""
    periods = [1, 2, 3]
    units = module_periods(H, periods).numpy()
    assert units.tolist() == [1, 1, 1, 2, 2, 2, 3, 3]
    layer = clockwork(zo.RNN(I, H, norm="layer").double(), periods)
    assert layer.state_dict().keys() >= {"parametrizations.weight_hh_l0.original"}
    used = units[None, :] >= units[:, None]
    assert np.array_equal(layer.weight_hh_l0.detach().numpy() != 0, used)
    a = arrays(layer)
    x, start = inputs(T, B, I), 4
    norm = oracle.Norm("units", layer.norm.eps, a["norm_ih_l0"], a["norm_hh_l0"])
    weights = oracle.Weights(
        a["weight_ih_l0"], a["parametrizations.weight_hh_l0.original"] * used,
        a["bias_ih_l0"], a["bias_hh_l0"],
    )  # fmt: skip
    step = np.arange(start, start + T)[:, None, None]
    held = np.broadcast_to(step % units != 0, (T, B, H)) * 1.0
    want = oracle.run(
        "rnn_tanh", x.numpy(), np.zeros((B, H)), None, weights, oracle.Noise(hidden=held), norm=norm
    ).y
    for training in (True, False):
        y = layer.train(training)(x, first_step=start)[0]
        torch.testing.assert_close(y, torch.from_numpy(want))
    y.sum().backward()
    grad = layer.parametrizations.weight_hh_l0.original.grad
    assert not grad[~torch.from_numpy(used)].any() and grad.any()


def test_clockwork_keeps_the_noise_of_a_layer():
    """The layer's own noise would be lost."""
    layer = clockwork(zo.LSTM(I, H, noise=zo.RecurrentDropout(rate=0.5)), [1, 4])
    assert [type(one).__name__ for one in layer.noise] == ["Zoneout", "RecurrentDropout"]
    assert layer(torch.randn(T, B, I))[0].shape == (T, B, H)


# --- HM-LSTM --------------------------------------------------------------------------------------


def numpy_hm(m: HMLSTM, x: Any, slope: float) -> tuple[Any, Any]:
    a, layers = arrays(m), m.num_layers
    out, ends = np.zeros((T, B, m.output_size)), np.zeros((T, B, layers - 1))
    for b in range(B):
        h, c, z = np.zeros((layers, H)), np.zeros((layers, H)), np.zeros(layers)
        for t in range(T):
            below, z_below, old = x[t, b], 1.0, (h.copy(), z.copy())
            for k in range(layers):
                sums = (
                    a[f"own.{k}"] @ old[0][k]
                    + z_below * (a[f"below.{k}"] @ below)
                    + a[f"biases.{k}"]
                )
                if k < layers - 1:
                    sums = sums + old[1][k] * (a[f"above.{k}"] @ old[0][k + 1])
                i, f, g, o = (
                    normal(v, a[f"norm_gates.{k}.weight"][q], a[f"norm_gates.{k}.bias"][q])
                    for q, v in enumerate(np.split(sums[: 4 * H], 4))
                )
                before = old[1][k] if k < layers - 1 else 0.0
                if before == 1:
                    c[k] = sigmoid(i) * np.tanh(g)  # flush
                elif z_below == 1:
                    c[k] = sigmoid(f) * c[k] + sigmoid(i) * np.tanh(g)  # update
                if before == 1 or z_below == 1:
                    shown = normal(c[k], a[f"norm_c.{k}.weight"][0], a[f"norm_c.{k}.bias"][0])
                    h[k] = sigmoid(o) * np.tanh(shown)
                if k < layers - 1:
                    z[k] = float(np.clip((slope * sums[4 * H] + 1) / 2, 0, 1) > 0.5)
                    ends[t, b, k] = z[k]
                below, z_below = h[k], z[k]
            gates = sigmoid(a["output.gates.weight"] @ h.reshape(-1))
            out[t, b] = np.maximum(
                sum(gates[k] * (a[f"output.layers.{k}.weight"] @ h[k]) for k in range(layers)), 0
            )
    return out, ends


def test_hm_lstm():
    """One of the three operations is chosen or computed wrongly, or a layer sees another h."""
    model = shaken(HMLSTM(I, H, 3, output_size=7))
    with torch.no_grad():
        for layer in range(2):  # boundaries at about half of the steps
            model.biases[layer][-1] = 0.1
    model.begin_epoch(10)
    assert model.slope.item() == pytest.approx(1.4)
    x = inputs(T, B, I)
    y, state = model(x)
    want, ends = numpy_hm(model, x.numpy(), 1.4)
    assert 0.2 < ends.mean() < 0.8, "all operations would not be seen"
    torch.testing.assert_close(y, torch.from_numpy(want))
    first, state = model(x[:2])
    torch.testing.assert_close(torch.cat([first, model(x[2:], state)[0]]), y)
    y.square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
    assert all(model.own[k].grad[-1].abs().sum() > 0 for k in range(2)), "straight-through"
    model.begin_epoch(1000)
    assert model.slope.item() == 5.0


def test_an_hm_lstm_remembers_at_the_start():
    """The layer norm takes a bias of the forget gate away: c would be halved at every step."""
    model = HMLSTM(I, 64)
    with torch.no_grad():
        for weight in (*model.own, *model.below, *model.above):
            weight.zero_()  # so that a gate is what its start makes of it
        for norm in model.norm_gates:
            norm.bias[2] = 0.0  # nothing new enters c
    c = torch.ones(1, 64)
    states = [torch.zeros(1, 64), c, torch.zeros(1, 1)] * 2 + [torch.zeros(1, 64), c]
    _, state = model(torch.zeros(1, 1, I), tuple(states))
    torch.testing.assert_close(state[1], torch.full((1, 64), torch.tensor(1.0).sigmoid().item()))


# --- surprisal ------------------------------------------------------------------------------------


def numpy_surprisal(m: SurprisalLSTM, tokens: Any, drawn: Any) -> Any:
    a, symbols = arrays(m), m.input_size
    out = np.zeros((T, B, symbols))
    for b in range(B):
        h, c, p = np.zeros(H), np.zeros(H), np.full(symbols, 1 / symbols)
        for t in range(T):
            x = np.eye(symbols)[tokens[t, b]]
            s = -np.log(p[tokens[t, b]])
            gates = a["weight_ih"] @ x + a["weight_hh"] @ h + s * a["weight_surprisal"] + a["bias"]
            i, f, u, o = np.split(gates, 4)
            z = np.minimum(m.least + np.abs((p - x) @ a["softmax.weight"]), 1)
            if drawn is not None:
                z = (drawn[t, b] < np.rint(z * 65536)) * 1.0
            c = (1 - sigmoid(f) * z) * c + z * sigmoid(i) * np.tanh(u)
            h = sigmoid(o) * np.tanh(c)
            y = a["softmax.weight"] @ h + a["softmax.bias"]
            p = np.exp(y - y.max()) / np.exp(y - y.max()).sum()
            out[t, b] = y
    return out


def test_surprisal_driven_zoneout():
    """A unit is updated with another probability, or the surprisal is of another step."""
    model = shaken(SurprisalLSTM(I, H, least=0.1))
    tokens, ids = torch.randint(0, I, (T, B)), [4, 0, 9]
    logits, hidden, state = model(tokens, seed=5, examples=ids, first_step=2)
    want = numpy_surprisal(model, tokens.numpy(), bits("update", 5, 2, ids, H))
    torch.testing.assert_close(logits, torch.from_numpy(want))
    assert hidden.shape == (T, B, H)
    model.eval()
    logits, _, _ = model(tokens)
    torch.testing.assert_close(
        logits, torch.from_numpy(numpy_surprisal(model, tokens.numpy(), None))
    )
    first, _, state = model(tokens[:2])
    torch.testing.assert_close(torch.cat([first, model(tokens[2:], state)[0]]), logits)


# --- all ------------------------------------------------------------------------------------------

MAKES: dict[str, Any] = {
    "hyper": lambda: HyperLSTM(I, H, hyper_size=4, dropout=0.2),
    "adaptive": lambda: AdaptiveLSTM(I, H, hyper_size=4),
    "hm": lambda: HMLSTM(I, H),
    "surprisal": lambda: SurprisalLSTM(I, H),
}


@pytest.mark.parametrize("name", MAKES)
def test_ids_and_copies(name):
    """Ids are not the one-hot rows they stand for, or a copy draws something else."""
    model = MAKES[name]()
    tokens = torch.randint(0, I, (T, B))
    y = model(tokens, seed=3)[0]
    assert torch.equal(copy.deepcopy(model)(tokens, seed=3)[0], y)
    if name != "surprisal":
        one_hot = torch.nn.functional.one_hot(tokens, I).float()
        assert torch.allclose(model(one_hot, seed=3)[0], y, atol=1e-6)
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


ERRORS: dict[str, Any] = {
    "dropout: expected a rate between 0 and 1": lambda: HyperLSTM(I, H, dropout=1.5),
    "cell: expected a rate above 0 and below 1": lambda: AdaptiveLSTM(I, H, cell=0.0),
    "hyper_size: expected a number above 0, got 0": lambda: HyperLSTM(I, H, hyper_size=0),
    "embedding_size: expected a number above 0": lambda: HyperLSTM(I, H, embedding_size=0),
    "hidden_size: expected a number above 0, got 0": lambda: HMLSTM(I, 0),
    "output_size: expected a number above 0, got 0": lambda: HMLSTM(I, H, output_size=0),
    "symbols: expected a number above 0, got -1": lambda: SurprisalLSTM(-1, H),
    "hyper_size: expected a whole number, got 2.5": lambda: AdaptiveLSTM(I, H, hyper_size=2.5),
    "expected [T, B, 5], or int64 ids [T, B], got torch.float32 of shape (4, 5)": (
        lambda: HyperLSTM(I, H)(torch.randn(4, I))
    ),
    "got torch.float32 of shape (4, 2, 3)": lambda: HMLSTM(I, H)(torch.randn(4, 2, 3)),
    "got torch.int64 of shape (4,)": lambda: HMLSTM(I, H)(torch.zeros(4, dtype=torch.int64)),
    "got torch.int32 of shape (4, 2, 5)": (
        lambda: HyperLSTM(I, H)(torch.zeros(4, 2, I, dtype=torch.int32))
    ),
    "input: expected 5 features": lambda: AdaptiveLSTM(I, H)(torch.randn(4, 2, 3)),
    "expected at least one step": lambda: HyperLSTM(I, H)(torch.randn(0, 2, I)),
    "expected ids from 0 to 4, got 0 to 5": lambda: HyperLSTM(I, H)(torch.tensor([[0, 5]])),
    "tokens: expected int64 ids [T, B]": lambda: SurprisalLSTM(I, H)(torch.randn(4, 2, I)),
    "hx: expected states of shapes [(2, 8), (2, 8), (2, 5)], got [(2, 8)]": (
        lambda: SurprisalLSTM(I, H)(torch.zeros(4, 2, dtype=torch.int64), (torch.zeros(2, H),))
    ),
    "hx: expected h, c, ĥ and ĉ, got 2 tensors": (
        lambda: AdaptiveLSTM(I, H)(torch.randn(4, 2, I), (torch.zeros(1, 2, H),) * 2)
    ),
    "rates: expected streams of the layer's noise": lambda: zo.LSTM(I, H)(
        torch.randn(4, 2, I), rates={"foo": 0.5}
    ),
    "hold_output_gate=True) does not apply": lambda: zo.GRU(
        I, H, noise=zo.RecurrentDropout(rate=0.5, hold_output_gate=True)
    ),
    "hidden_old=…): expected a rate between 0 and 1, got 1.5": lambda: zo.Swapout(hidden_old=1.5),
    "input=…): expected a rate between 0 and 1, got -1": lambda: zo.FastDropout(input=-1.0),
    "expected periods of at least 1, got 0": lambda: zo.Zoneout(mask="clock", periods=0),
    "num_layers: expected a whole number, got 2.5": lambda: HMLSTM(I, H, 2.5),
    "epoch: expected a whole number, 0 or more, got -100": lambda: HMLSTM(I, H).begin_epoch(-100),
    "unexpected keyword argument 'nonsense'": (
        lambda: HMLSTM(I, H)(torch.randn(4, 2, I), nonsense=3)
    ),
    "least: expected one number, got str": lambda: SurprisalLSTM(I, H, least="a"),
    "least: expected one number, got list": lambda: SurprisalLSTM(I, H, least=[0.5]),
    "tokens: expected int64 ids [T, B], got list": lambda: SurprisalLSTM(I, H)([[1]]),
    "cell: expected one number, got str": lambda: AdaptiveLSTM(I, H, cell="a"),
    "cell: expected one number, got list": lambda: AdaptiveLSTM(I, H, cell=[0.5]),
    "hx: expected a tuple of tensors, got int": (
        lambda: AdaptiveLSTM(I, H)(torch.randn(4, 2, I), 5)
    ),
    "hx: expected a tuple of tensors, got Tensor": (
        lambda: HyperLSTM(I, H)(torch.randn(4, 2, I), torch.zeros(2, H))
    ),
    "expected one for each module, such as [1, 2, 4, 8], got 4": lambda: clockwork(zo.RNN(I, H), 4),
    "expected one for each module, such as [1, 2, 4, 8], got none": (
        lambda: clockwork(zo.RNN(I, H), [])
    ),
    "input: expected torch.float32 as the weights have, got torch.float64; try": (
        lambda: HyperLSTM(I, H)(inputs(4, 2, I))
    ),
    "first_step: expected a whole number, 0 or more and below 4294967293, got -1": (
        lambda: HyperLSTM(I, H, dropout=0.5)(torch.randn(4, 2, I), first_step=-1)
    ),
    "hx[0]: expected torch.float32 as the input has, got torch.float64": (
        lambda: HyperLSTM(I, H)(torch.randn(4, 2, I), HyperLSTM(I, H).double()(inputs(4, 2, I))[1])
    ),
    "hx[0]: expected a tensor on cpu": (
        lambda: SurprisalLSTM(I, H)(
            torch.zeros(4, 2, dtype=torch.int64),
            [torch.zeros(2, n, device="meta") for n in (H, H, I)],
        )
    ),
    "num_layers: expected at least 2": lambda: HMLSTM(I, H, 1),
    "least: expected a rate between 0 and 1": lambda: SurprisalLSTM(I, H, least=-1.0),
    "expected periods of at least 1": lambda: clockwork(zo.RNN(I, H), [0, 1]),
    "expected at most 8, one a unit": lambda: clockwork(zo.RNN(I, H), range(1, 20)),
    "expected one direction": lambda: clockwork(zo.RNN(I, H, bidirectional=True), [1, 2]),
    "expected a layer with a matrix": lambda: clockwork(nn.RNN(I, H), [1, 2]),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_arguments(message):
    """A bad argument runs, or is refused without saying what was expected."""
    with pytest.raises((ValueError, TypeError)) as error:
        ERRORS[message]()
    assert message in str(error.value)


# --- loops in torch calls -------------------------------------------------------------------------

LOOPS = [name for name in MAKES if name != "adaptive"]


def gradients(model: Any, tokens: torch.Tensor) -> Any:
    y = model(tokens, seed=3)[0]
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return torch.autograd.grad((y * weights).sum(), list(model.parameters()))


@pytest.mark.parametrize("name", LOOPS)
def test_one_product_for_all_steps_has_the_gradient_of_every_step(name, monkeypatch):
    """The gradient of a matrix is of other values, of some steps only, or counted twice."""
    model, tokens = shaken(MAKES[name]()), torch.randint(0, I, (T, B))
    y = model(tokens, seed=3)[0]
    twice = [torch.autograd.grad(y.square().sum(), model.parameters(), retain_graph=True)
             for _ in range(2)]  # fmt: skip
    torch.testing.assert_close(*twice)
    found = gradients(model, tokens)
    monkeypatch.setattr("zoneout.systems.steps.plain_eager", lambda: False)
    torch.testing.assert_close(found, gradients(model, tokens))


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (MAKES["hyper"], lambda given, returned: given[0]),
        (MAKES["surprisal"], lambda given, returned: given[0]),
        (MAKES["surprisal"], lambda given, returned: returned[0]),
    ],
)
def test_a_state_changed_in_place_before_the_backward_pass(make, change):
    """The gradient of a matrix is that of other values than the forward pass saw."""
    model, tokens = make(), torch.zeros(T, B, dtype=torch.int64)
    *_, state = model(tokens)
    given = [s.detach().clone() for s in state]
    y, *_, returned = model(tokens, given)
    change(given, returned).detach().zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_reads_nothing_on_the_host(name):
    """A CUDA graph could not hold the loop: a value of a tensor decides what is computed."""
    with torch.device("meta"):
        model = MAKES[name]()
        tokens = torch.zeros(T, B, dtype=torch.int64)
        seed = torch.zeros((), dtype=torch.int64)
    y, *_ = model(tokens, seed=seed)
    assert y.is_meta
    torch.autograd.grad(y.sum(), list(model.parameters()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own
@pytest.mark.parametrize("name", LOOPS)
def test_a_step_can_be_compiled(name, monkeypatch):
    """What lies between the products cannot be traced whole, or computes something else."""
    eager = functools.partial(steps._compile, backend="eager")
    monkeypatch.setattr(steps, "_compile", eager)
    model, tokens = MAKES[name](), torch.randint(0, I, (2, B))
    want = model(tokens, seed=3)[0]
    model.compiled = True
    torch.testing.assert_close(model(tokens, seed=3)[0], want)
    model.eval()
    with torch.no_grad():  # more variants of each function than torch compiles by default
        assert model(tokens)[0].isfinite().all()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own
@pytest.mark.parametrize("name", LOOPS)
def test_a_step_is_compiled_once_for_all_lengths(name, monkeypatch):
    """Every batch of another length would be compiled anew, which takes longer than its steps."""
    compiled: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        compiled.append(module)
        return module.forward

    monkeypatch.setattr(steps, "_compile", functools.partial(steps._compile, backend=backend))
    model = MAKES[name]()
    model.compiled = True
    counts = []
    for length in (3, 5, 4):
        model(torch.randint(0, I, (length, B)), seed=3)
        counts.append(len(compiled))
    assert counts[0] > 0 and counts == counts[:1] * 3
