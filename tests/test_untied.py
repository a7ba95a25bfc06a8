"""Variational dropout with a mask for each gate, against the same written in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import philox_numpy
import pytest
import torch
from test_given_masks import close, uniform

import zoneout as zo

T, B, I, H = 4, 3, 5, 6
GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1}


def sigmoid(v: Any) -> Any:
    return 1 / (1 + np.exp(-v))


def numpy_layer(layer: Any, x: Any, p_x: float, p_h: float, seed: int, ids: Any) -> Any:
    """One layer in NumPy: gate k sees x and h through masks of its own, for the whole sequence."""
    a = {n: v.detach().double().numpy() for n, v in layer.state_dict().items()}
    gates = GATES[layer.mode]

    def factors(stream: str, rate: float, units: int) -> Any:
        dropped = philox_numpy.mask(stream, "sequence", rate, seed, [0], ids, gates * units)[0]
        scale = 1 / (1 - round(rate * 65536) / 65536)
        return ((1 - dropped) * scale).reshape(len(ids), gates, units)

    m_x, m_h = factors("untied_input", p_x, I), factors("untied_hidden", p_h, H)
    w_x, w_h = (a[n].reshape(gates, H, -1) for n in ("weight_ih_l0", "weight_hh_l0"))
    b_x, b_h = (a[n].reshape(gates, H) for n in ("bias_ih_l0", "bias_hh_l0"))
    h, c, y = np.zeros((B, H)), np.zeros((B, H)), []
    for x_t in x:
        g_x = np.einsum("bgi,ghi->bgh", m_x * x_t[:, None], w_x) + b_x
        g_h = np.einsum("bgi,ghi->bgh", m_h * h[:, None], w_h) + b_h
        g = np.moveaxis(g_x + g_h, 1, 0)
        if layer.mode == "LSTM":
            c = sigmoid(g[1]) * c + sigmoid(g[0]) * np.tanh(g[2])
            h = sigmoid(g[3]) * np.tanh(c)
        elif layer.mode == "GRU":
            z = sigmoid(g[1])
            h = z * h + (1 - z) * np.tanh(g_x[:, 2] + sigmoid(g[0]) * g_h[:, 2])
        else:
            h = np.tanh(g[0])
        y.append(h)
    return np.stack(y)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", [zo.LSTM, zo.GRU, zo.RNN], ids=["lstm", "gru", "rnn"])
def test_each_gate_has_its_own_masks(kind: Any, backend: str) -> None:
    """Two gates share a mask, a mask changes within a sequence, or x has that of h."""
    for p_x, p_h in ((0.4, 0.0), (0.0, 0.3), (0.4, 0.3)):
        noise = zo.VariationalDropout(input=p_x, hidden=p_h, tied=False)
        layer, ids = kind(I, H, noise=noise, backend=backend).double(), [7, 0, 100]
        x = uniform(T, B, I)
        found = layer(x, seed=5, examples=ids)[0]
        close(found, numpy_layer(layer, x.numpy(), p_x, p_h, 5, ids), 1e-9)
    plain = kind(I, H).double()
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer.eval()(x)[0], plain(x)[0])  # nothing in evaluation
    layer.noise = zo.VariationalDropout(input=0.4, hidden=0.3, tied=False, at_eval="sample")
    torch.testing.assert_close(layer(x, seed=5, examples=ids)[0], found)


def test_gradients_with_masks_of_gates() -> None:
    """A derivative is not that of finite differences."""
    noise = zo.VariationalDropout(input=0.4, hidden=0.3, tied=False)
    layer = zo.LSTM(2, 3, noise=noise, backend="cpu").double()
    x = (uniform(3, 2, 2) + 0.5).requires_grad_()
    names, values = zip(*layer.named_parameters())

    def call(x: Any, *values: Any) -> Any:
        given = dict(zip(names, values))
        return torch.func.functional_call(layer, given, (x,), {"seed": 5})[0]

    assert torch.autograd.gradcheck(call, (x, *values))


def test_a_packed_batch_and_a_single_step_draw_the_same() -> None:
    """A row of a packed batch, or a text that is read in pieces, has other masks."""
    noise = zo.VariationalDropout(input=0.4, hidden=0.3, tied=False)
    layer, x = zo.LSTM(I, H, 2, noise=noise).double(), uniform(T, B, I)
    whole, _ = layer(x, seed=5)
    first, state = layer(x[:1], seed=5)
    rest, _ = layer(x[1:], state, seed=5, first_step=1)
    torch.testing.assert_close(torch.cat((first, rest)), whole)
    lengths = torch.tensor([2, 4, 1])
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    y, found = torch.nn.utils.rnn.pad_packed_sequence(layer(packed, seed=5)[0])
    assert found.tolist() == lengths.tolist()
    for row, length in enumerate(lengths):
        torch.testing.assert_close(y[:length, row], whole[:length, row])


def test_masks_of_gates_in_a_compiled_layer() -> None:
    """torch.compile cannot trace the layer, or draws other masks."""
    noise = zo.VariationalDropout(input=0.4, hidden=0.3, tied=False)
    layer, x = zo.LSTM(I, H, noise=noise).double(), uniform(T, B, I)
    seed = torch.tensor(5)
    want = layer(x, seed=seed)[0]
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, seed=seed)[0], want)


WRONG = {
    "normalised": lambda: zo.LSTM(
        I, H, norm="layer", noise=zo.VariationalDropout(hidden=0.1, tied=False)
    ),
    "projected": lambda: zo.LSTM(
        I, H, proj_size=2, noise=zo.VariationalDropout(hidden=0.1, tied=False)
    ),
    "does not apply": lambda: zo.Recurrent(
        zo.cells.mingru, I, H, noise=zo.VariationalDropout(hidden=0.1, tied=False)
    ),
    "both": lambda: zo.LSTM(
        I,
        H,
        noise=[zo.VariationalDropout(input=0.1, tied=False), zo.FastDropout(input=0.1)],
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_where_gates_cannot_have_masks(words: str) -> None:
    """Masks are left out without a word."""
    with pytest.raises(ValueError, match=words):
        WRONG[words]()
