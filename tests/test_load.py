"""Weights of other toolkits: a loaded layer computes what that toolkit's equations compute.

The equations stand here in NumPy, each from the sources that docs/coming-from.md names.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import zoneout as zo

X, H, B, T = 3, 4, 2, 6  # input size, hidden size, batch, steps
P = 0.1  # the rate of zoneout


class Draw:
    """Random arrays, one after another."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape):
        return self.rng.standard_normal(shape) * 0.7


x = Draw(1)(T, B, X)


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def unroll(step, states):
    """Return the outputs of a step `(x, *states) -> (output, *states)` from states of zero."""
    state, outputs = [np.zeros((B, H))] * states, []
    for x_t in x:
        output, *state = step(x_t, *state)
        outputs.append(output)
    return np.stack(outputs)


def same(layer, theirs):
    """Compare a layer or a cell in evaluation with the outputs of another toolkit."""
    inputs = torch.tensor(x)
    layer = layer.double().eval()
    with torch.no_grad():
        if hasattr(layer, "num_layers"):
            ours = layer(inputs)[0]
        else:
            states = {zo.ZoneoutCell: 3 if isinstance(getattr(layer, "cell", 0), zo.OutputFirst)
                      else 1}.get(type(layer), 2)  # fmt: skip
            state, outputs = tuple(torch.zeros(states, B, H).double()), []
            for x_t in inputs:
                state = layer(x_t, state[0] if states == 1 else state)
                state = (state,) if states == 1 else state
                outputs.append(state[0])
            ours = torch.stack(outputs)
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-6)


def lstm_step(gates, c, forget=0.0):
    """Return the new h and c from the gates i, f, g, o."""
    i, f, g, o = gates
    c = sigmoid(f + forget) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


# --- Keras ----------------------------------------------------------------------------------------


def keras_lstm(kernel, recurrent, bias=0.0):
    def step(x_t, h, c):
        i, f, g, o = np.split(x_t @ kernel + h @ recurrent + bias, 4, axis=-1)
        h, c = lstm_step((i, f, g, o), c)
        return h, h, c

    return unroll(step, 2)


def test_keras_lstm():
    """A Keras LSTM gives other outputs here: wrong order, a transpose, or a bias counted twice."""
    draw = Draw()
    arrays = [draw(X, 4 * H), draw(H, 4 * H), draw(4 * H)]
    layer = zo.LSTM(X, H).double()
    assert zo.load_keras(layer, arrays) is layer
    same(layer, keras_lstm(*arrays))
    same(zo.load_keras(torch.nn.LSTM(X, H).double(), arrays), keras_lstm(*arrays))
    same(zo.load_keras(zo.LSTMCell(X, H).double(), arrays), keras_lstm(*arrays))
    same(zo.load_keras(zo.LSTM(X, H, bias=False).double(), arrays[:2]), keras_lstm(*arrays[:2]))
    same(zo.load_keras(layer, arrays[:2]), keras_lstm(*arrays[:2]))  # old biases do not stay


def test_keras_bidirectional_and_stacked():
    """The directions are exchanged, or the second layer of a stack is not the one loaded."""
    draw = Draw()
    arrays = [draw(*shape) for shape in ((X, 4 * H), (H, 4 * H), (4 * H,)) * 2]
    layer = zo.load_keras(zo.LSTM(X, H, bidirectional=True).double(), arrays)
    same(zo.load_keras(zo.LSTM(X, H).double(), arrays[:3]), layer(torch.tensor(x))[0][..., :H]
         .detach().numpy())  # fmt: skip
    backward = zo.load_keras(zo.LSTM(X, H).double(), arrays[3:])
    flipped = backward(torch.tensor(x[::-1].copy()))[0].flip(0)
    torch.testing.assert_close(layer(torch.tensor(x))[0][..., H:], flipped)

    stack = zo.LSTM(X, H, 2).double()
    before = stack.weight_ih_l0.clone()
    second = [draw(H, 4 * H), draw(H, 4 * H), draw(4 * H)]
    zo.load_keras(stack, second, index=1)
    assert torch.equal(stack.weight_ih_l0, before)
    np.testing.assert_array_equal(stack.weight_hh_l1.detach().numpy(), second[1].T)


@pytest.mark.parametrize("cell", [zo.GRU, zo.GRUCell])
def test_keras_gru_resets_after(cell):
    """The GRU of Keras's default, `reset_after=True`, gives other outputs here."""
    draw = Draw()
    kernel, recurrent, bias = draw(X, 3 * H), draw(H, 3 * H), draw(2, 3 * H)

    def step(x_t, h):
        xz, xr, xh = np.split(x_t @ kernel + bias[0], 3, axis=-1)
        hz, hr, hh = np.split(h @ recurrent + bias[1], 3, axis=-1)
        z, r = sigmoid(xz + hz), sigmoid(xr + hr)
        h = z * h + (1 - z) * np.tanh(xh + r * hh)
        return h, h

    layer = zo.load_keras(cell(X, H).double(), [kernel, recurrent, bias])
    if cell is zo.GRUCell:  # one state, not a tuple of them
        layer = zo.ZoneoutCell(layer, rates=0.0)
    same(layer, unroll(step, 1))


def test_keras_gru_resets_before():
    """The GRU with `reset_after=False` loads into a layer that computes something else."""
    draw = Draw()
    kernel, recurrent, bias = draw(X, 3 * H), draw(H, 3 * H), draw(3 * H)

    def step(x_t, h):
        xz, xr, xh = np.split(x_t @ kernel + bias, 3, axis=-1)
        uz, ur, uh = np.split(recurrent, 3, axis=-1)
        z, r = sigmoid(xz + h @ uz), sigmoid(xr + h @ ur)
        new = z * h + (1 - z) * np.tanh(xh + (r * h) @ uh)
        h = P * h + (1 - P) * new  # the zoneout that Keras does not have
        return h, h

    cell = zo.load_keras(zo.ResetFirstGRUCell(X, H).double(), [kernel, recurrent, bias])
    same(zo.ZoneoutCell(cell, rates=P), unroll(step, 1))
    with pytest.raises(TypeError, match=r"layer: expected a ResetFirstGRUCell .* got GRU"):
        zo.load_keras(zo.GRU(X, H), [kernel, recurrent, bias])
    with pytest.raises(TypeError, match="layer: expected a GRU or GRUCell"):
        zo.load_keras(zo.ResetFirstGRUCell(X, H), [kernel, recurrent, draw(2, 3 * H)])


def test_keras_rnn():
    """A SimpleRNN gives other outputs here."""
    draw = Draw()
    kernel, recurrent, bias = draw(X, H), draw(H, H), draw(H)

    def step(x_t, h):
        h = np.tanh(x_t @ kernel + h @ recurrent + bias)
        return h, h

    same(zo.load_keras(zo.RNN(X, H).double(), [kernel, recurrent, bias]), unroll(step, 1))


# --- Haste ----------------------------------------------------------------------------------------


def haste_lstm(kernel, recurrent, bias):
    def step(x_t, h, c):
        i, g, f, o = np.split(x_t @ kernel + h @ recurrent + bias, 4, axis=-1)
        new, c = lstm_step((i, f, g, o), c)
        h = P * h + (1 - P) * new
        return h, h, c

    return unroll(step, 2)


@pytest.mark.parametrize("stacked", [False, True], ids=["torch", "tensorflow"])
def test_haste(stacked):
    """An LSTM or GRU of Haste gives other outputs here, from either of its packages."""
    draw = Draw()
    kernel, recurrent, bias = draw(X, 4 * H), draw(H, 4 * H), draw(4 * H)
    saved = {"rnn.kernel": torch.tensor(kernel), "rnn.recurrent_kernel": recurrent}
    if stacked:
        saved = {"rnn.kernel": np.concatenate([kernel, recurrent])}
    layer = zo.LSTM(X, H, noise=zo.Zoneout(hidden=P)).double()
    same(
        zo.load_haste(layer, saved | {"rnn.bias": bias}, prefix="rnn."),
        haste_lstm(kernel, recurrent, bias),
    )

    kernel, recurrent = draw(X, 3 * H), draw(H, 3 * H)
    bias, recurrent_bias = draw(3 * H), draw(3 * H)

    def step(x_t, h):
        xz, xr, xn = np.split(x_t @ kernel + bias, 3, axis=-1)
        hz, hr, hn = np.split(h @ recurrent + recurrent_bias, 3, axis=-1)
        z, r = sigmoid(xz + hz), sigmoid(xr + hr)
        h = P * h + (1 - P) * (z * h + (1 - z) * np.tanh(xn + r * hn))
        return h, h

    saved = {"kernel": kernel, "recurrent_kernel": recurrent, "bias": bias}
    saved |= {"recurrent_bias": recurrent_bias}
    if stacked:
        saved = {"kernel": np.concatenate([kernel, recurrent])}
        saved["bias"] = np.concatenate([bias, recurrent_bias])
    layer = zo.GRU(X, H, noise=zo.Zoneout(hidden=P)).double()
    same(zo.load_haste(layer, saved), unroll(step, 1))


# --- TensorFlow 1, Lingvo, the paper, Chainer, MXNet ----------------------------------------------


def tensorflow_step(kernel, bias, x_t, h, c):
    i, g, f, o = np.split(np.concatenate([x_t, h], axis=-1) @ kernel + bias, 4, axis=-1)
    return lstm_step((i, f, g, o), c, forget=1.0)


def test_tensorflow_lstm():
    """The forget bias of 1 that is not in the checkpoint is lost, or gates are exchanged."""
    draw = Draw()
    kernel, bias = draw(X + H, 4 * H), draw(4 * H)

    def zoned(x_t, h, c):
        new_h, new_c = tensorflow_step(kernel, bias, x_t, h, c)
        h, c = P * h + (1 - P) * new_h, P * c + (1 - P) * new_c
        return h, h, c

    saved = {"decoder/kernel": kernel, "decoder/bias": bias}
    layer = zo.LSTM(X, H, noise=zo.Zoneout(cell=P, hidden=P)).double()
    same(zo.load_tensorflow(layer, saved, prefix="decoder/"), unroll(zoned, 2))


def test_tensorflow_peepholes():
    """A peephole is lost or in another gate, or the output gate sees the old c."""
    draw = Draw()
    saved = {"kernel": draw(X + H, 4 * H), "bias": draw(4 * H)}
    saved |= {f"w_{gate}_diag": draw(H) for gate in "ifo"}

    def step(x_t, h, c):
        product = np.concatenate([x_t, h], axis=-1) @ saved["kernel"] + saved["bias"]
        i, g, f, o = np.split(product, 4, axis=-1)
        kept = sigmoid(f + 1 + saved["w_f_diag"] * c) * c
        c = kept + sigmoid(i + saved["w_i_diag"] * c) * np.tanh(g)
        h = sigmoid(o + saved["w_o_diag"] * c) * np.tanh(c)
        return h, h, c

    layer = zo.Recurrent(zo.cells.peephole_lstm, X, H).double()
    assert zo.load_tensorflow(layer, saved) is layer
    same(layer, unroll(step, 2))
    same(zo.load_tensorflow(zo.RecurrentCell(zo.cells.peephole_lstm, X, H).double(), saved),
         unroll(step, 2))  # fmt: skip
    before, wrong = layer.weight_ih_l0.clone(), saved | {"w_o_diag": np.ones(H + 1)}
    with pytest.raises(ValueError, match=r"w_o_diag: expected shape"):
        zo.load_tensorflow(layer, wrong | {"kernel": np.zeros((X + H, 4 * H))})
    assert torch.equal(layer.weight_ih_l0, before)  # nothing is loaded by halves
    with pytest.raises(ValueError, match=r"weights: expected an entry 'w_f_diag'"):
        zo.load_tensorflow(layer, {"kernel": saved["kernel"], "w_i_diag": np.ones(H)})
    with pytest.raises(ValueError, match=r"layer: expected no norm"):
        zo.load_tensorflow(zo.Recurrent(zo.cells.peephole_lstm, X, H, norm="layer"), saved)


def test_output_before_zoneout():
    """Tacotron-2's output is h before zoneout; with h after it the checkpoint runs differently."""
    draw = Draw()
    kernel, bias = draw(X + H, 4 * H), draw(4 * H)

    def step(x_t, h, c):
        new_h, new_c = tensorflow_step(kernel, bias, x_t, h, c)
        return new_h, P * h + (1 - P) * new_h, P * c + (1 - P) * new_c

    inner = zo.load_tensorflow(torch.nn.LSTMCell(X, H).double(), {"kernel": kernel, "bias": bias})
    same(zo.ZoneoutCell(zo.OutputFirst(inner), rates=(0.0, P, P)), unroll(step, 2))


def test_tensorflow_gru():
    """TensorFlow's GRUCell, with its two kernels, gives other outputs here."""
    draw = Draw()
    gates, gates_bias = draw(X + H, 2 * H), draw(2 * H)
    candidate, candidate_bias = draw(X + H, H), draw(H)

    def step(x_t, h):
        both = np.concatenate([x_t, h], axis=-1) @ gates + gates_bias
        r, u = np.split(sigmoid(both), 2, axis=-1)
        c = np.tanh(np.concatenate([x_t, r * h], axis=-1) @ candidate + candidate_bias)
        h = u * h + (1 - u) * c
        return h, h

    saved = {"gates/kernel": gates, "gates/bias": gates_bias}
    saved |= {"candidate/kernel": candidate, "candidate/bias": candidate_bias}
    cell = zo.load_tensorflow(zo.ResetFirstGRUCell(X, H).double(), saved)
    same(zo.ZoneoutCell(cell, rates=0.0), unroll(step, 1))
    with pytest.raises(TypeError, match="layer: expected a ResetFirstGRUCell for TensorFlow's"):
        zo.load_tensorflow(zo.GRUCell(X, H), saved)


@pytest.mark.parametrize("order, forget", [("gifo", 0.0), ("ifgo", 1.0), ("gfio", 0.0)])
def test_arrays(order, forget):
    """Lingvo and the paper's two programs: an order is read backwards, or a forget bias is lost."""
    draw = Draw()
    kernel, recurrent, bias = draw(X, 4 * H), draw(H, 4 * H), draw(4 * H)

    def step(x_t, h, c):
        parts = np.split(x_t @ kernel + h @ recurrent + bias, 4, axis=-1)
        named = dict(zip(order, parts))
        h, c = lstm_step([named[gate] for gate in "ifgo"], c, forget)
        return h, h, c

    layer = zo.LSTM(X, H).double()
    given = {"order": order, "forget_bias": forget}
    same(zo.load_arrays(layer, kernel, recurrent, bias, **given), unroll(step, 2))
    both = np.concatenate([kernel, recurrent])
    same(zo.load_arrays(zo.LSTM(X, H).double(), both, bias=bias, **given), unroll(step, 2))


def test_arrays_with_two_biases():
    """MXNet stores torch's matrices and both biases: one of the two is dropped."""
    draw = Draw()
    i2h, h2h, i2h_bias, h2h_bias = draw(4 * H, X), draw(4 * H, H), draw(4 * H), draw(4 * H)

    def step(x_t, h, c):
        gates = np.split(x_t @ i2h.T + i2h_bias + h @ h2h.T + h2h_bias, 4, axis=-1)
        h, c = lstm_step(gates, c)
        return h, h, c

    layer = zo.LSTM(X, H).double()
    same(zo.load_arrays(layer, i2h.T, h2h.T, i2h_bias, h2h_bias, order="ifgo"), unroll(step, 2))


def test_chainer():
    """Chainer's rows go unit by unit: read gate by gate they are noise."""
    draw = Draw()
    up, up_bias, lateral = draw(4 * H, X), draw(4 * H), draw(4 * H, H)

    def step(x_t, h, c):
        rows = (x_t @ up.T + up_bias + h @ lateral.T).reshape(B, H, 4)
        a, i, f, o = np.moveaxis(rows, 2, 0)
        h, c = lstm_step((i, f, a, o), c)
        return h, h, c

    saved = {"l1/upward/W": up, "l1/upward/b": up_bias, "l1/lateral/W": lateral}
    layer = zo.LSTM(X, H, noise=zo.Zoneout(cell=0.5, hidden=0.5, at_eval="off")).double()
    same(zo.load_chainer(layer, saved, prefix="l1/"), unroll(step, 2))


# --- PyTorch --------------------------------------------------------------------------------------


def test_torch_prefix_between_cells_and_layers():
    """A cell of a decoder cannot be run as a layer, or the weights of another module are taken."""
    model = torch.nn.ModuleDict(
        {"lstm": torch.nn.LSTMCell(X, H), "other": torch.nn.LSTMCell(X, H)}
    ).double()
    layer = zo.load_torch(zo.LSTM(X, H).double(), model.state_dict(), prefix="lstm.")
    cell = zo.load_torch(zo.LSTMCell(X, H).double(), layer.state_dict())
    theirs = layer(torch.tensor(x))[0].detach().numpy()
    same(cell, theirs)
    same(model["lstm"], theirs)

    both = torch.nn.LSTM(X, H, 2, bidirectional=True).double()
    ours = zo.load_torch(
        zo.LSTM(X, H, 2, bidirectional=True).double(),
        {f"encoder.{name}": value for name, value in both.state_dict().items()},
        prefix="encoder.",
    )
    same(ours, both(torch.tensor(x))[0].detach().numpy())


@pytest.mark.parametrize("raw", ["rnns.0.module.weight_hh_l0_raw", "rnns.0.weight_hh_l0_raw"])
def test_torch_takes_the_true_matrix_of_weight_drop(raw):
    """The matrix with dropped entries, left over from a forward pass, is loaded."""
    plain = torch.nn.LSTM(X, H).double()
    saved = {f"rnns.0.module.{name}": value for name, value in plain.state_dict().items()}
    saved[raw] = saved["rnns.0.module.weight_hh_l0"]
    saved["rnns.0.module.weight_hh_l0"] = torch.zeros(4 * H, H).double()
    layer = zo.load_torch(zo.LSTM(X, H).double(), saved, prefix="rnns.0.")
    same(layer, plain(torch.tensor(x))[0].detach().numpy())


# --- errors ---------------------------------------------------------------------------------------

KERNELS = [np.ones((X, 4 * H)), np.ones((H, 4 * H)), np.ones(4 * H)]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: zo.load_keras(zo.LSTM(X, H), KERNELS[:1]), "weights: expected 3 arrays"),
        (lambda: zo.load_keras(torch.nn.Linear(X, H), KERNELS), "layer: expected an LSTM, GRU"),
        (lambda: zo.load_keras(zo.LSTM(X, H, norm="layer"), KERNELS), "layer: expected no norm"),
        (lambda: zo.load_keras(zo.LSTM(X, H, proj_size=2), KERNELS), "no proj_size"),
        (lambda: zo.load_keras(zo.LSTM(X, H), KERNELS, index=1), "index, reverse: expected a"),
        (lambda: zo.load_keras(zo.LSTM(X, H, bias=False), KERNELS), "try a layer with bias=True"),
        (
            lambda: zo.load_keras(zo.LSTM(X, H), [KERNELS[0].T, *KERNELS[1:]]),
            r"kernel: expected shape \(3, 16\), got \(16, 3\); try its transpose",
        ),
        (
            lambda: zo.load_arrays(zo.LSTM(X, H), *KERNELS, order="ifco"),
            "order: expected the gates ifgo in any order, got 'ifco'",
        ),
        (
            lambda: zo.load_arrays(zo.RNN(X, H), *KERNELS, order="n", forget_bias=1.0),
            "forget_bias: expected 0 for a RNN, got 1.0",
        ),
        (
            lambda: zo.load_haste(zo.LSTM(X, H), {"rnn.kernel": 1}),
            "weights: expected an entry 'bias', got rnn.kernel; try prefix=…",
        ),
        (lambda: zo.load_haste(zo.RNN(X, H), {}), "layer: expected an LSTM or GRU"),
        (lambda: zo.load_chainer(zo.GRU(X, H), {}), "layer: expected an LSTM, got a GRU"),
        (
            lambda: zo.load_torch(zo.LSTM(X, H), zo.LSTM(X, H + 1).state_dict()),
            r"weight_ih_l0: expected shape \(16, 3\), got \(20, 3\)",
        ),
        (
            lambda: zo.load_torch(zo.LSTM(X, H, 2), zo.LSTMCell(X, H).state_dict()),
            "weights: expected an entry 'weight_ih_l0'",
        ),
    ],
)
def test_errors(call, message):
    """A mistake loads without an error, or its message does not say what is wrong."""
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_failed_load_changes_nothing():
    """After an error the layer has half of the new weights."""
    layer = zo.LSTM(X, H)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(ValueError, match="bias: expected shape"):
        zo.load_keras(layer, [*KERNELS[:2], np.ones(3)])
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
