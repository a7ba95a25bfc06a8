"""docs/coming-from.md: the layers that its code loads compute what the other toolkits compute.

The page's blocks are run one after the other. After each, its layers are compared with the
equations of the toolkit, written out in NumPy from the sources that the page names.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_docs import BLOCK

import zoneout as zo

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"
B, T = 2, 6  # batch, steps
X, H = 3, 4  # those of the page
P = 0.1  # the page's rate of zoneout
INPUT = np.random.default_rng(0).standard_normal((T, B, X))


@cache
def after() -> list[SimpleNamespace]:
    """The names that the page has defined after each of its blocks, with the block's code."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    found = []
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        exec(compile(block["code"], str(PAGE), "exec"), names)
        found.append(SimpleNamespace(**names, code=block["code"]))
    return found


def page(code: str) -> SimpleNamespace:
    """The names after the one block that contains this code."""
    (found,) = (names for names in after() if code in names.code)
    return found


def numpy(*arrays: Any) -> list[Any]:
    return [array.double().numpy() for array in arrays]


def sigmoid(a: Any) -> Any:
    return 1 / (1 + np.exp(-a))


def lstm(gates: Any, c: Any, forget: float = 0.0) -> tuple[Any, Any]:
    """Return the new h and c from the gates i, f, g, o."""
    i, f, g, o = gates
    c = sigmoid(f + forget) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def unroll(step: Any, states: int) -> Any:
    """Return the outputs of a step `(x, *states) -> (output, *states)` from states of zero."""
    state, outputs = [np.zeros((B, H))] * states, []
    for x_t in INPUT:
        output, *state = step(x_t, *state)
        outputs.append(output)
    return np.stack(outputs)


def zoned(step: Any, cell: float = P, hidden: float = P) -> Any:
    """Return the outputs of a step `(x, h, c) -> (h, c)` with the expectation of zoneout."""

    def one(x_t: Any, h: Any, c: Any) -> tuple[Any, Any, Any]:
        new_h, new_c = step(x_t, h, c)
        h, c = hidden * h + (1 - hidden) * new_h, cell * c + (1 - cell) * new_c
        return h, h, c

    return unroll(one, 2)


@torch.no_grad()
def same(layer: Any, theirs: Any, states: int = 2, **call: Any) -> None:
    """Compare a layer, or a cell with so many states, with the outputs of another toolkit."""
    x = torch.tensor(INPUT).float()
    if hasattr(layer, "num_layers"):
        first = getattr(layer, "batch_first", False)
        ours = layer(x.transpose(0, 1) if first else x, **call)[0]
        ours = ours.transpose(0, 1) if first else ours
    else:
        state: Any = tuple(torch.zeros(states, B, H))
        outputs = []
        for x_t in x:
            state = layer(x_t, state if states > 1 else state[0])
            state = state if states > 1 else (state,)
            outputs.append(state[0])
        ours = torch.stack(outputs)
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-4)


def torch_cell(saved: Any, prefix: str) -> Any:
    """Return the step of an nn.LSTMCell out of a checkpoint."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    w_ih, w_hh, b_ih, b_hh = numpy(*(saved[prefix + name] for name in names))

    def step(x_t: Any, h: Any, c: Any) -> tuple[Any, Any]:
        gates = np.split(x_t @ w_ih.T + b_ih + h @ w_hh.T + b_hh, 4, axis=-1)
        return lstm(gates, c)

    return step


def arrays_step(kernel: Any, recurrent: Any, bias: Any, order: str, forget: float = 0.0) -> Any:
    """Return the step of an LSTM with matrices [in, 4H] and [H, 4H], whose gates have an order."""

    def step(x_t: Any, h: Any, c: Any) -> tuple[Any, Any]:
        blocks = np.split(x_t @ kernel + h @ recurrent + bias, 4, axis=-1)
        gates = dict(zip(order, blocks, strict=True))
        return lstm([gates[gate] for gate in "ifgo"], c, forget)

    return step


def gru_step(kernel: Any, recurrent: Any, bias: Any, recurrent_bias: Any, kept: float = 0.0) -> Any:
    """Return the outputs of a GRU with blocks z, r, n and the reset gate after the product."""

    def step(x_t: Any, h: Any) -> tuple[Any, Any]:
        xz, xr, xn = np.split(x_t @ kernel + bias, 3, axis=-1)
        hz, hr, hn = np.split(h @ recurrent + recurrent_bias, 3, axis=-1)
        z, r = sigmoid(xz + hz), sigmoid(xr + hr)
        h = kept * h + (1 - kept) * (z * h + (1 - z) * np.tanh(xn + r * hn))
        return h, h

    return unroll(step, 1)


def test_pytorch():
    """A checkpoint of nn.LSTM computes something else in our layer."""
    names = page("zo.convert(model")
    with torch.no_grad():
        theirs = names.theirs(torch.tensor(INPUT).float())[0].numpy()
    same(names.layer.eval(), theirs)


def test_haste():
    """A Haste LSTM or GRU gives other outputs here, or does so in training with the same masks."""
    names = page("zo.load_haste(layer")
    saved = numpy(*(names.checkpoint[f"rnn.{n}"] for n in ("kernel", "recurrent_kernel", "bias")))
    step = arrays_step(*saved, "igfo")
    same(names.layer.eval(), zoned(step, cell=0.0))

    keep = zo.masks(zo.Zoneout(hidden=P), seed=7, steps=T, batch=B, hidden=H)["hidden"]
    updates = iter(1.0 - keep.numpy())

    def training(x_t: Any, h: Any, c: Any) -> tuple[Any, Any, Any]:
        new_h, c = step(x_t, h, c)
        h = (new_h - h) * next(updates) + h
        return h, h, c

    same(names.layer.train(), unroll(training, 2), seed=7)

    gru = names.gru_checkpoint
    every = ("kernel", "recurrent_kernel", "bias", "recurrent_bias")
    same(names.gru.eval(), gru_step(*numpy(*(gru[name] for name in every)), kept=P))


def test_espnet():
    """A decoder cell of ESPnet or fairseq gives other outputs here, loaded or as a wrapped cell."""
    names = page("decoder.load_state_dict(checkpoint)")
    theirs = zoned(torch_cell(names.checkpoint, "lstm.0.cell."))
    same(names.cell.eval(), theirs)
    same(names.wrapped.eval(), theirs)


def test_tacotron():
    """Tacotron-2 gives other outputs here, with the output after zoneout or before it."""
    names = page("zo.load_tensorflow(layer")
    kernel, bias = numpy(names.checkpoint["lstm_cell/kernel"], names.checkpoint["lstm_cell/bias"])
    step = arrays_step(kernel[:-H], kernel[-H:], bias, "igfo", forget=1.0)
    same(names.layer.eval(), zoned(step))

    def output_first(x_t: Any, h: Any, c: Any) -> tuple[Any, Any, Any]:
        new_h, new_c = step(x_t, h, c)
        return new_h, P * h + (1 - P) * new_h, P * c + (1 - P) * new_c

    same(page("zo.OutputFirst(inner)").cell.eval(), unroll(output_first, 2), states=3)

    names = page("zo.load_tensorflow(peephole")
    p_i, p_f, p_o = numpy(*(names.checkpoint[f"lstm_cell/w_{gate}_diag"] for gate in "ifo"))

    def with_peepholes(x_t: Any, h: Any, c: Any) -> tuple[Any, Any]:
        i, g, f, o = np.split(np.concatenate([x_t, h], axis=-1) @ kernel + bias, 4, axis=-1)
        c = sigmoid(f + 1 + p_f * c) * c + sigmoid(i + p_i * c) * np.tanh(g)
        return sigmoid(o + p_o * c) * np.tanh(c), c

    same(names.peephole.eval(), zoned(with_peepholes))


def test_nvidia():
    """A cell of NVIDIA's decoder gives other outputs in evaluation, or in continued training."""
    names = page("layer.weight_hh_l0 /= 1 - p")
    step = torch_cell(names.checkpoint, "decoder.decoder_rnn.")

    def nvidia(factors: Any) -> Any:
        """`factors` are what F.dropout multiplies h by, one array for each step."""
        factors = iter(factors)

        def one(x_t: Any, h: Any, c: Any) -> tuple[Any, Any, Any]:
            h, c = step(x_t, h, c)
            h = h * next(factors)
            return h, h, c

        return unroll(one, 2)

    noise = zo.StateDropout(hidden=P)
    dropped = zo.masks(noise, seed=7, steps=T, batch=B, hidden=H)["hidden"].numpy()
    same(names.layer.train(), nvidia((1.0 - dropped) / (1 - P)) * (1 - P), seed=7)
    same(names.layer.eval(), nvidia(np.ones(T)) * (1 - P))
    same(names.cell.eval(), nvidia(np.ones(T)))


def test_wavernn():
    """At test time fatchord's cell is a plain LSTM, and ours is not."""
    names = page('prefix="res_rnn1."')
    same(names.cell.eval(), zoned(torch_cell(names.checkpoint, "res_rnn1."), 0.0, 0.0))


def test_keras():
    """A Keras LSTM, of one direction or two, gives other outputs here."""
    names = page("zo.load_keras(layer, lstm_weights)")
    forward = zoned(arrays_step(*numpy(*names.lstm_weights), "ifgo"), 0.0, 0.0)
    same(names.layer.eval(), forward)

    names = page("both_weights =")
    with torch.no_grad():
        ours = names.both(torch.tensor(INPUT).float().transpose(0, 1))[0].transpose(0, 1)
    np.testing.assert_allclose(ours[..., :H].numpy(), forward, atol=1e-4)
    back = zo.LSTM(X, H)
    zo.load_keras(back, names.both_weights[3:])
    theirs = zoned(arrays_step(*numpy(*names.both_weights[3:]), "ifgo"), 0.0, 0.0)
    same(back, theirs)
    with torch.no_grad():
        flipped = back(torch.tensor(INPUT).float().flip(0))[0].flip(0)
    np.testing.assert_allclose(ours[..., H:].numpy(), flipped.numpy(), atol=1e-4)


def test_keras_gru_and_rnn():
    """A Keras GRU with the reset gate after the product, or a SimpleRNN, gives other outputs."""
    names = page("gru_weights =")
    kernel, recurrent, bias = numpy(*names.gru_weights)
    same(names.gru, gru_step(kernel, recurrent, *bias))
    kernel, recurrent, bias = numpy(*names.rnn_weights)

    def step(x_t: Any, h: Any) -> tuple[Any, Any]:
        h = np.tanh(x_t @ kernel + h @ recurrent + bias)
        return h, h

    same(names.rnn, unroll(step, 1))


def test_reset_before_the_product():
    """The GRU of older Keras, or TensorFlow's GRUCell, gives other outputs here."""
    names = page("old_weights =")
    kernel, recurrent, bias = numpy(*names.old_weights)

    def old(x_t: Any, h: Any) -> tuple[Any, Any]:
        xz, xr, xn = np.split(x_t @ kernel + bias, 3, axis=-1)
        uz, ur, un = np.split(recurrent, 3, axis=-1)
        z, r = sigmoid(xz + h @ uz), sigmoid(xr + h @ ur)
        h = P * h + (1 - P) * (z * h + (1 - z) * np.tanh(xn + (r * h) @ un))
        return h, h

    same(names.cell.eval(), unroll(old, 1), states=1)

    names = page("gru_cell/gates/kernel")
    places = ("gates/kernel", "gates/bias", "candidate/kernel", "candidate/bias")
    gates, gates_bias, candidate, candidate_bias = numpy(
        *(names.checkpoint[f"gru_cell/{place}"] for place in places)
    )

    def tensorflow(x_t: Any, h: Any) -> tuple[Any, Any]:
        r, u = np.split(sigmoid(np.concatenate([x_t, h], axis=-1) @ gates + gates_bias), 2, axis=-1)
        new = np.tanh(np.concatenate([x_t, r * h], axis=-1) @ candidate + candidate_bias)
        h = u * h + (1 - u) * new
        return h, h

    same(names.tensorflow, unroll(tensorflow, 1), states=1)


def test_awd_lstm():
    """The dropped matrix of an AWD-LSTM is loaded in place of the true one."""
    names = page('prefix="rnns.0."')
    with torch.no_grad():
        theirs = names.plain(torch.tensor(INPUT).float())[0].numpy()
    same(names.first.eval(), theirs)


def test_the_papers_code():
    """The LSTM of the paper's char-PTB code gives other outputs here."""
    names = page("forget_bias=1.0)\n")
    saved = numpy(names.kernel, names.recurrent, names.bias)
    step = arrays_step(*saved, "ifgo", forget=1.0)
    same(names.layer.eval(), zoned(step, cell=1 - names.u, hidden=1 - names.v))


def test_lingvo():
    """An LSTM of Lingvo gives other outputs here."""
    names = page("zo.load_arrays(layer, wm")
    wm, b = numpy(names.wm, names.b)
    plain = arrays_step(wm[:-H], wm[-H:], b, "gifo")

    def clipped(x_t: Any, h: Any, c: Any) -> tuple[Any, Any]:
        new_h, new_c = plain(x_t, h, c)
        assert (abs(new_c) < 10).all()  # where Lingvo would clip
        return new_h, new_c

    same(names.layer.eval(), zoned(clipped))


def test_chainer():
    """Chainer's rows go unit by unit: read gate by gate they are noise."""
    names = page("zo.load_chainer(layer")
    up, up_bias, lateral = numpy(
        *(names.checkpoint[f"l1/{name}"] for name in ("upward/W", "upward/b", "lateral/W"))
    )

    def step(x_t: Any, h: Any, c: Any) -> tuple[Any, Any]:
        rows = (x_t @ up.T + up_bias + h @ lateral.T).reshape(B, H, 4)
        a, i, f, o = np.moveaxis(rows, 2, 0)
        return lstm((i, f, a, o), c)

    same(names.layer.eval(), zoned(step, 0.0, 0.0))


def test_mxnet():
    """An LSTM of MXNet Gluon gives other outputs here, or one of its two biases is dropped."""
    names = page("zo.load_arrays(layer, i2h.T")
    i2h, h2h, bias, recurrent_bias = numpy(names.i2h, names.h2h, names.i2h_bias, names.h2h_bias)
    step = arrays_step(i2h.T, h2h.T, bias + recurrent_bias, "ifgo")
    same(names.layer.eval(), zoned(step, 0.0, 0.0))


def test_every_function_that_loads_is_on_the_page():
    """A reader of the page rewrites by hand what a function does."""
    code = "".join(names.code for names in after())
    missing = [n for n in zo.__all__ if n.startswith("load_") and f"zo.{n}(" not in code]
    assert missing == []
    assert "import numpy" not in code and "load_state_dict(" in code


def test_a_block_is_found_only_by_code_of_its_own():
    """A test passes because it looks at another block's layer."""
    with pytest.raises(ValueError, match="unpack"):
        page("zo.LSTM")
