"""Bad input gets an error that names the argument, says what came, and says what was expected."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import zoneout
from zoneout.ops import cuda

zo: Any = zoneout  # what is given here has wrong types on purpose

T, B, I, H = 4, 3, 5, 6
NOISE = zo.Zoneout(hidden=0.5)


class Bad(NamedTuple):
    """A call that must fail, and what its message must say."""

    call: Callable[[], Any]
    error: type[Exception] | tuple[type[Exception], ...]
    argument: str  # each a regex that is searched for
    came: str = ""
    expected: str = r"expected"


def rate(**options: Any) -> Callable[[], Any]:
    return lambda: zo.Zoneout(**options)


def lstm(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: zo.LSTM(I, H, *args, **options)


def call(*args: Any, layer: Any = None, **options: Any) -> Callable[[], Any]:
    """A layer called with these; the input is a good one where none is given."""
    return lambda: (layer or zo.LSTM(I, H, noise=NOISE))(
        *(args or (torch.randn(T, B, I),)), **options
    )


def gru(*args: Any, **options: Any) -> Callable[[], Any]:
    return call(*args, layer=zo.GRU(I, H, noise=NOISE), **options)


def cell(*args: Any, layer: Any = None, **options: Any) -> Callable[[], Any]:
    return lambda: (layer or zo.LSTMCell(I, H, noise=NOISE))(
        *(args or (torch.randn(B, I),)), **options
    )


def wrapped(*args: Any, inner: Any = None, rates: Any = 0.5, **options: Any) -> Callable[[], Any]:
    return lambda: zo.ZoneoutCell(inner or nn.GRUCell(I, H), rates)(
        *(args or (torch.randn(B, I),)), **options
    )


class Gives(nn.Module):
    """A cell of a user's, by what it makes of its state."""

    def __init__(self, step: Callable[[Any], Any]) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Any, state: Any) -> Any:
        return self.step(state)


X = torch.randn(T, B, I)
STATE = torch.zeros(1, B, H)
META = torch.device("meta")
PACKED = pack_padded_sequence(X, torch.tensor([4, 2, 1]))
FALSE = torch.zeros(T, B, dtype=torch.bool)


class Mine(zo.WeightNoise):
    """As somebody may call it."""


RATES: dict[str, Bad] = {
    "above 1": Bad(rate(cell=1.5), ValueError, r"Zoneout\(cell", r"1\.5", "between 0 and 1"),
    "below 0": Bad(rate(hidden=-0.1), ValueError, r"Zoneout\(hidden", r"-0\.1", "between 0 and 1"),
    "NaN": Bad(rate(cell=math.nan), ValueError, r"Zoneout\(cell", "nan", "between 0 and 1"),
    "infinite": Bad(rate(cell=math.inf), ValueError, r"Zoneout\(cell", "inf", "between 0 and 1"),
    "one of a list": Bad(
        rate(cell=[0.5, 2.0]), ValueError, r"Zoneout\(cell", r"2\.0", "between 0 and 1"
    ),
    "one of a tensor": Bad(
        rate(cell=torch.tensor([0.5, -2.0])), ValueError, r"Zoneout\(cell", r"-2\.0"
    ),
    "NaN in a tensor": Bad(
        rate(cell=torch.tensor([0.5, math.nan])), ValueError, r"Zoneout\(cell", "nan"
    ),
    "None": Bad(rate(cell=None), TypeError, r"Zoneout\(cell", "NoneType", "a number"),
    "a string": Bad(rate(cell="0.5"), TypeError, r"Zoneout\(cell", "str", "a number"),
    "a bool": Bad(rate(cell=True), TypeError, r"Zoneout\(cell", "bool", "a number"),
    "a dict": Bad(rate(cell={0: 0.5}), TypeError, r"Zoneout\(cell", "dict", "a number"),
    "an empty list": Bad(rate(cell=[]), ValueError, r"Zoneout\(cell", "empty", "one rate a layer"),
    "a list of lists": Bad(
        rate(cell=[[0.5]]), TypeError, r"Zoneout\(cell", "list inside", "one rate a layer"
    ),
    "a matrix": Bad(
        rate(cell=torch.ones(2, 3)), ValueError, r"Zoneout\(cell", r"\(2, 3\)", "one rate a unit"
    ),
    "an empty tensor": Bad(rate(cell=torch.ones(0)), ValueError, r"Zoneout\(cell", r"\(0,\)"),
    "bools": Bad(rate(cell=torch.ones(2, dtype=torch.bool)), ValueError, r"Zoneout\(cell", "bool"),
    "complex": Bad(
        rate(cell=torch.ones(2, dtype=torch.cfloat)), ValueError, r"Zoneout\(cell", "complex"
    ),
    "StateDropout": Bad(
        lambda: zo.StateDropout(hidden=2), ValueError, r"StateDropout\(hidden", "2"
    ),
    "RecurrentDropout": Bad(
        lambda: zo.RecurrentDropout(rate=-1), ValueError, r"RecurrentDropout\(rate", "-1"
    ),
    "VariationalDropout": Bad(
        lambda: zo.VariationalDropout(input=3), ValueError, r"VariationalDropout\(input", "3"
    ),
    "WeightDrop": Bad(lambda: zo.WeightDrop(rate=1.1), ValueError, r"WeightDrop\(rate", r"1\.1"),
    "a rate that there is not": Bad(
        lambda: zo.Zoneout(hiden=0.1), TypeError, "Zoneout: expected", "hiden=0.1", "cell, hidden"
    ),
    "WeightNoise of one's own below 0": Bad(
        lambda: Mine(std=-1), ValueError, r"Mine\(std", "-1", "deviation"
    ),
    "WeightNoise below 0": Bad(
        lambda: zo.WeightNoise(std=-1), ValueError, r"WeightNoise\(std", "-1", "deviation"
    ),
    "WeightNoise infinite": Bad(
        lambda: zo.WeightNoise(std=math.inf), ValueError, r"WeightNoise\(std", "inf"
    ),
    "WeightNoise NaN": Bad(
        lambda: zo.WeightNoise(std=math.nan), ValueError, r"WeightNoise\(std", "nan"
    ),
    "on meta": Bad(
        rate(cell=torch.ones(3, device=META)), ValueError, r"Zoneout\(cell", "meta", "numbers"
    ),
    "a scalar on meta": Bad(
        rate(cell=[torch.ones((), device=META)]), ValueError, r"Zoneout\(cell", "meta", "numbers"
    ),
    "learned": Bad(
        rate(cell=nn.Parameter(torch.ones(H))),
        ValueError,
        r"Zoneout\(cell",
        "requires_grad",
        "detach",
    ),
    "one of a list is learned": Bad(
        wrapped(rates=[torch.tensor(0.5, requires_grad=True)]),
        ValueError,
        "rates",
        "requires_grad",
        "detach",
    ),
    "zoneout": Bad(lambda: zo.zoneout(X, X, 2.0), ValueError, "rate", r"2\.0", "between 0 and 1"),
    "zoneout a string": Bad(lambda: zo.zoneout(X, X, "a"), TypeError, "rate", "str", "a number"),
    "ZoneoutCell": Bad(wrapped(rates=2.0), ValueError, "rates", r"2\.0", "between 0 and 1"),
    "ZoneoutCell list": Bad(
        wrapped(rates=[0.5, 2.0]), ValueError, "rates", r"2\.0", "between 0 and 1"
    ),
    "zoneout units": Bad(
        lambda: zo.zoneout(X, X, torch.ones(3)), ValueError, "rate", "3", f"{I} units"
    ),
    "zoneout a list": Bad(
        lambda: zo.zoneout(X, X, [0.1, 0.2]), TypeError, "rate", "list", "a number"
    ),
}

NOISES: dict[str, Bad] = {
    "mask name": Bad(
        rate(cell=0.5, mask="units"), ValueError, r"Zoneout\(mask", "'units'", "unit, shared"
    ),
    "mask None": Bad(
        rate(cell=0.5, mask=None), (TypeError, ValueError), r"Zoneout\(mask", "None", "unit, shared"
    ),
    "mask of RecurrentDropout": Bad(
        lambda: zo.RecurrentDropout(rate=0.5, mask="shared"),
        ValueError,
        r"RecurrentDropout\(mask",
        "'shared'",
        "unit",
    ),
    "static without seed": Bad(
        rate(cell=0.5, mask="static"), ValueError, "mask='static'", "no seed", "seed="
    ),
    "seed without static": Bad(
        rate(cell=0.5, seed=3), ValueError, r"Zoneout\(seed", "'unit'", "static"
    ),
    "seed not an int": Bad(rate(mask="static", seed="a"), TypeError, "seed", "str", "an int"),
    "seed too large": Bad(
        rate(mask="static", seed=2**64), ValueError, "seed", str(2**64), "64 bits"
    ),
    "at_eval": Bad(
        rate(at_eval="mean"), ValueError, r"Zoneout\(at_eval", "'mean'", "expectation, off, sample"
    ),
    "not a noise": Bad(lstm(noise=["zoneout"]), TypeError, "noise", "str", "Zoneout"),
    "a number": Bad(lstm(noise=0.5), TypeError, "noise", "got 0.5", "Zoneout"),
    "the class": Bad(lstm(noise=zo.Zoneout), TypeError, "noise", "Zoneout", "Zoneout"),
    "a number, with what to write": Bad(
        lstm(noise=0.3),
        TypeError,
        r"try zo\.Zoneout\(cell=0\.3, hidden=0\.3\), or only one",
        r"got 0\.3",
    ),
    "a method as an argument": Bad(
        lstm(zoneout=0.1),
        TypeError,
        r"^zoneout: expected it in noise=, got zoneout=0\.1; try noise=zo\.Zoneout\(cell=0\.1, h",
    ),
    "a method as an argument of a GRU": Bad(
        lambda: zo.GRU(I, H, zoneout=0.1), TypeError, r"try noise=zo\.Zoneout\(hidden=0\.1\)$"
    ),
    "a method of Keras as an argument": Bad(
        lambda: zo.RNN(I, H, recurrent_dropout=0.25),
        TypeError,
        r"^recurrent_dropout: .*zo\.RecurrentDropout\(rate=0\.25\); what Keras calls so is zo\.Var",
    ),
    "a method as an argument of a cell": Bad(
        lambda: zo.RNNCell(I, H, zoneout_rate=0.1),
        TypeError,
        r"^zoneout_rate: .*try noise=zo\.Zoneout\(hidden=0\.1\)$",
    ),
    "a method as an argument of an equation's layer": Bad(
        lambda: zo.Recurrent(zo.cells.mingru, I, H, weight_dropout=0.5),
        TypeError,
        r"^weight_dropout: .*try noise=zo\.WeightDrop\(rate=0\.5\)$",
    ),
    "a string": Bad(lstm(noise="zoneout"), TypeError, "noise", "str", "Zoneout"),
    "of convert": Bad(
        lambda: zo.convert(nn.LSTM(I, H), 0.5), TypeError, "noise", "got 0.5", "Zoneout"
    ),
    "of masks": Bad(lambda: zo.masks(0.5, 1, 2, 3, 4), TypeError, "noise", "got 0.5", "Zoneout"),
    "twice": Bad(
        lstm(noise=[zo.Zoneout(cell=0.1), zo.Zoneout(cell=0.2)]),
        ValueError,
        "noise",
        "Zoneout is there twice",
        "once",
    ),
    "two on a state": Bad(
        lstm(noise=[zo.Zoneout(cell=0.1), zo.StateDropout(cell=0.2)]),
        ValueError,
        "noise",
        r"Zoneout\(cell=0.1\) and StateDropout\(cell=0.2\)",
        "one method for each state",
    ),
    "cell in a GRU": Bad(
        lambda: zo.GRU(I, H, noise=zo.Zoneout(cell=0.5)),
        ValueError,
        "noise",
        r"Zoneout\(cell=0.5\)",
        "cell to be left",
    ),
    "cell in an RNN": Bad(
        lambda: zo.RNN(I, H, noise=zo.StateDropout(cell=0.5)),
        ValueError,
        "noise",
        r"StateDropout\(cell=0.5\)",
        "cell to be left",
    ),
    "cell tensor in a GRU": Bad(
        lambda: zo.GRU(I, H, noise=zo.Zoneout(cell=torch.zeros(H))),
        ValueError,
        "noise",
        rf"<{H} rates>",
    ),
    "cell in a GRUCell": Bad(
        lambda: zo.GRUCell(I, H, noise=zo.Zoneout(cell=0.5)),
        ValueError,
        "noise",
        r"Zoneout\(cell=0.5\)",
    ),
    "update in an RNN": Bad(
        lambda: zo.RNN(I, H, noise=zo.RecurrentDropout(rate=0.5)),
        ValueError,
        "noise",
        r"RecurrentDropout\(rate=0.5\)",
        "rate to be left",
    ),
    "held gate in a GRU": Bad(
        lambda: zo.GRU(I, H, noise=zo.RecurrentDropout(rate=0.5, hold_output_gate=True)),
        ValueError,
        "noise",
        "hold_output_gate=True",
        "hold_output_gate to be left",
    ),
    "held gate in an LSTMCell": Bad(
        lambda: zo.LSTMCell(I, H, noise=zo.RecurrentDropout(rate=0.5, hold_output_gate=True)),
        ValueError,
        "noise",
        "hold_output_gate=True",
        "left out",
    ),
    "rates for other layers": Bad(
        lstm(2, noise=zo.Zoneout(cell=[0.1, 0.2, 0.3])),
        ValueError,
        r"Zoneout\(cell",
        "got 3",
        "2 layers",
    ),
    "rates for other units": Bad(
        lstm(noise=zo.Zoneout(cell=torch.ones(H + 1))),
        ValueError,
        r"Zoneout\(cell",
        f"got {H + 1}",
        f"{H} units",
    ),
    "rates for the hidden units of a projection": Bad(
        lstm(proj_size=2, noise=zo.Zoneout(hidden=torch.ones(H))),
        ValueError,
        r"Zoneout\(hidden",
        f"got {H}",
        "2 units",
    ),
    "rates for other inputs": Bad(
        lstm(noise=zo.VariationalDropout(input=torch.ones(H))),
        ValueError,
        r"VariationalDropout\(input",
        f"got {H}",
        f"{I} units",
    ),
    "rates a unit for weights": Bad(
        lstm(noise=zo.WeightDrop(rate=torch.ones(H))),
        ValueError,
        r"WeightDrop\(rate",
        "tensor",
        "a number",
    ),
    "ZoneoutCell's number of rates": Bad(
        wrapped(rates=[0.5, 0.5]), ValueError, "rates", "got 2", "each of 1"
    ),
    "ZoneoutCell's units": Bad(
        wrapped(rates=torch.ones(3)), ValueError, "rates", "got 3", f"{H} units"
    ),
}

CONSTRUCTORS: dict[str, Bad] = {  # what torch itself checks keeps torch's words
    "hidden_size 0": Bad(lambda: zo.LSTM(I, 0), ValueError, "hidden_size", "", "greater than zero"),
    "hidden_size float": Bad(lambda: zo.LSTM(I, 1.5), TypeError, "hidden_size", "float", "int"),
    "noise in its place": Bad(lstm(NOISE), TypeError, "num_layers", "Zoneout", "noise=…"),
    "num_layers 0": Bad(lstm(0), ValueError, "num_layers", "", "greater than zero"),
    "proj_size": Bad(lstm(proj_size=H), ValueError, "proj_size", "", "smaller than hidden_size"),
    "proj_size of a GRU": Bad(lambda: zo.GRU(I, H, proj_size=2), TypeError, "proj_size", "", ""),
    "dropout": Bad(lstm(2, dropout=1.5), ValueError, "dropout", "", r"\[0, 1\]"),
    "nonlinearity": Bad(
        lambda: zo.RNN(I, H, nonlinearity="sigmoid"),
        ValueError,
        "nonlinearity",
        "'sigmoid'",
        "'tanh' or 'relu'",
    ),
    "nonlinearity of a cell": Bad(
        lambda: zo.RNNCell(I, H, nonlinearity="elu"),
        ValueError,
        "nonlinearity",
        "'elu'",
        "'tanh' or 'relu'",
    ),
    "cell input_size": Bad(
        lambda: zo.LSTMCell(-1, H), ValueError, "input_size", "-1", "at least 0"
    ),
    "cell hidden_size": Bad(
        lambda: zo.GRUCell(I, 2.5), ValueError, "hidden_size", r"2\.5", "at least 0"
    ),
    "cell layer": Bad(
        lambda: zo.LSTMCell(I, H, layer=-1), ValueError, "layer", "-1", "below 32768"
    ),
    "ZoneoutCell layer": Bad(
        lambda: zo.ZoneoutCell(nn.GRUCell(I, H), 0.5, layer=-1),
        ValueError,
        "layer",
        "-1",
        "below 32768",
    ),
    "ZoneoutCell's cell": Bad(
        lambda: zo.ZoneoutCell(0.1, nn.GRUCell(I, H)), TypeError, "cell", "float", "a module"
    ),
    "ZoneoutCell's learned rate": Bad(
        lambda: zo.ZoneoutCell(nn.GRUCell(I, H), nn.Parameter(torch.rand(H))),
        ValueError,
        "rates",
        "requires_grad",
    ),
    "noise, a module": Bad(
        lambda: setattr(zo.LSTM(I, H, noise=NOISE), "noise", nn.Dropout(0.5)),
        TypeError,
        "noise",
        "Dropout",
        "Zoneout",
    ),
    "norm, a module": Bad(
        lambda: setattr(zo.GRUCell(I, H), "norm", nn.LayerNorm(H)),
        ValueError,
        "norm",
        "LayerNorm",
        "'layer'",
    ),
    "input, nested": Bad(
        lambda: zo.LSTM(I, H)(
            torch.nested.nested_tensor([torch.randn(3, I), torch.randn(2, I)], layout=torch.jagged)
        ),
        TypeError,
        "input",
        "nested",
        "lengths=",
    ),
    "input, sparse": Bad(
        lambda: zo.LSTM(I, H)(torch.randn(T, B, I).to_sparse()),
        TypeError,
        "input",
        "sparse_coo",
        "dense",
    ),
    "backend": Bad(lstm(backend="tpu"), ValueError, "backend", "'tpu'", "reference"),
    "backend of a cell": Bad(
        lambda: zo.LSTMCell(I, H, backend="tpu"), ValueError, "backend", "'tpu'", "reference"
    ),
    "norm": Bad(lstm(norm="batch"), ValueError, "norm", "'batch'", "'layer', a RecurrentBatchNorm"),
    "norm class": Bad(
        lstm(norm=zo.RecurrentBatchNorm), ValueError, "norm", "RecurrentBatchNorm'>", "'layer'"
    ),
    "batch norm steps": Bad(
        lambda: zo.RecurrentBatchNorm(steps=0),
        ValueError,
        r"RecurrentBatchNorm\(steps",
        "0",
        "number of steps",
    ),
    "batch norm steps float": Bad(
        lambda: zo.RecurrentBatchNorm(steps=2.5), ValueError, r"RecurrentBatchNorm\(steps", r"2\.5"
    ),
    "batch norm momentum": Bad(
        lambda: zo.RecurrentBatchNorm(5, momentum=2),
        ValueError,
        r"RecurrentBatchNorm\(momentum",
        "2",
        "0 to 1",
    ),
    "batch norm momentum None": Bad(
        lambda: zo.RecurrentBatchNorm(5, momentum=None),
        (TypeError, ValueError),
        r"momentum",
        "None",
    ),
    "batch norm eps": Bad(lambda: zo.RecurrentBatchNorm(5, eps=-1.0), ValueError, "eps", r"-1\.0"),
    "batch norm at_eval": Bad(
        lambda: zo.RecurrentBatchNorm(5, at_eval="mean"),
        ValueError,
        r"RecurrentBatchNorm\(at_eval",
        "'mean'",
        "running",
    ),
}

INPUTS: dict[str, Bad] = {
    "no tensor": Bad(call([[1.0]]), TypeError, "input", "list", "a tensor or a PackedSequence"),
    "one dimension": Bad(call(torch.randn(I)), ValueError, "input", "got 1", "2 dimensions"),
    "four dimensions": Bad(call(torch.randn(1, T, B, I)), ValueError, "input", "got 4", "3"),
    "features": Bad(
        call(torch.randn(T, B, I + 1)), ValueError, "input", f"got {I + 1}", f"{I} features"
    ),
    "zero steps": Bad(
        call(torch.randn(0, B, I)), ValueError, "input", "length 0", "at least one step"
    ),
    "zero steps, batch first": Bad(
        call(torch.randn(B, 0, I), layer=zo.GRU(I, H, batch_first=True)),
        ValueError,
        "input",
        "length 0",
        "one step",
    ),
    "zero steps, unbatched": Bad(
        call(torch.randn(0, I)), ValueError, "input", "length 0", "at least one step"
    ),
    "integers": Bad(
        call(torch.ones(T, B, I, dtype=torch.int64)), ValueError, "input", "int64", "float"
    ),
    "dtype": Bad(call(X.double()), ValueError, "input", "float64", "float32"),
    "device": Bad(call(X.to(META)), ValueError, "input", "meta", "cpu"),
    "packed features": Bad(
        call(pack_padded_sequence(torch.randn(T, 1, I + 1), torch.tensor([T]))),
        ValueError,
        "input",
        f"got {I + 1}",
        f"{I} features",
    ),
    "packed dtype": Bad(call(PACKED.to(torch.float64)), ValueError, "input", "float64", "float32"),
    "packed numbers": Bad(
        call(PackedSequence(torch.ones(3, 2, dtype=torch.int64), torch.tensor([2, 1]))),
        ValueError,
        r"input\.data",
        "got 3",
        "int64 numbers",
    ),
    "packed counts of another type": Bad(
        call(PackedSequence(torch.randn(6, I), torch.tensor([3, 2, 1], dtype=torch.int32))),
        ValueError,
        r"input\.batch_sizes",
        "int32",
        "int64",
    ),
    "packed too few rows": Bad(
        call(PackedSequence(torch.randn(6, I), PACKED.batch_sizes)),
        ValueError,
        r"input\.batch_sizes",
        r"\[3, 2, 1, 1\]",
        "add up to 6",
    ),
    "packed shortest first": Bad(
        call(PackedSequence(PACKED.data, torch.tensor([1, 3, 3]))),
        ValueError,
        r"input\.batch_sizes",
        r"\[1, 3, 3\]",
        "go down",
    ),
    "packed nothing": Bad(
        call(PackedSequence(torch.randn(0, I), torch.zeros(0, dtype=torch.int64))),
        ValueError,
        r"input\.batch_sizes",
        "got none",
    ),
    "packed too few rows, with resets": Bad(
        call(
            PackedSequence(torch.randn(6, I), PACKED.batch_sizes),
            resets=torch.zeros(4, 3, dtype=torch.bool),
        ),
        ValueError,
        r"input\.batch_sizes",
        "add up to 6",
    ),
    "packed shortest first, and padded": Bad(
        call(
            PackedSequence(PACKED.data, torch.tensor([1, 3, 3])),
            layer=zo.LSTM(I, H, backend="reference"),
        ),
        ValueError,
        r"input\.batch_sizes",
        r"\[1, 3, 3\]",
        "go down",
    ),
    "cell no tensor": Bad(cell([1.0]), TypeError, "input", "list", "a tensor"),
    "cell dimensions": Bad(cell(X), ValueError, "input", "got 3", "2"),
    "cell features": Bad(
        cell(torch.randn(B, I + 1)), ValueError, "input", f"got {I + 1}", f"{I} features"
    ),
    "cell dtype": Bad(cell(X[0].double()), ValueError, "input", "float64", "float32"),
    "cell integers": Bad(
        cell(torch.ones(B, I, dtype=torch.int64)), ValueError, "input", "int64", "float"
    ),
    "cell device": Bad(cell(X[0].to(META)), ValueError, "input", "meta", "cpu"),
}

STATES: dict[str, Bad] = {
    "a tensor for an LSTM": Bad(call(X, STATE), TypeError, "hx", "Tensor", "a pair"),
    "three tensors": Bad(
        call(X, (STATE,) * 3), TypeError, "hx", "Tensor, Tensor, Tensor", "a pair"
    ),
    "None in the pair": Bad(call(X, (STATE, None)), TypeError, "hx", "NoneType", "a pair"),
    "nothing in the pair": Bad(call(X, ()), TypeError, "hx", "nothing", "a pair"),
    "a pair for a GRU": Bad(
        gru(X, (STATE, STATE)), TypeError, "hx", "tuple of Tensor, Tensor", "a tensor"
    ),
    "h of another batch": Bad(
        call(X, (STATE[:, :2], STATE)), ValueError, r"hx\[0\]", r"\(1, 2, 6\)", r"\(1, 3, 6\)"
    ),
    "c of another size": Bad(
        call(X, (STATE, STATE[..., :4])), ValueError, r"hx\[1\]", r"\(1, 3, 4\)", r"\(1, 3, 6\)"
    ),
    "another number of layers": Bad(
        gru(X, torch.zeros(2, B, H)), ValueError, "hx", r"\(2, 3, 6\)", r"\(1, 3, 6\)"
    ),
    "unbatched for batched": Bad(
        gru(X, STATE[:, 0]), ValueError, "hx", r"\(1, 6\)", r"\(1, 3, 6\)"
    ),
    "batched for unbatched": Bad(
        gru(X[:, 0], STATE), ValueError, "hx", r"\(1, 3, 6\)", r"\(1, 6\)"
    ),
    "projected": Bad(
        call(X, (STATE, STATE), layer=zo.LSTM(I, H, proj_size=2)),
        ValueError,
        r"hx\[0\]",
        r"\(1, 3, 6\)",
        r"\(1, 3, 2\)",
    ),
    "h on another device": Bad(
        call(X, (STATE.to(META), STATE)), ValueError, r"hx\[0\]", "meta", "cpu"
    ),
    "c on another device": Bad(
        call(X, (STATE, STATE.to(META))), ValueError, r"hx\[1\]", "meta", "cpu"
    ),
    "GRU's on another device": Bad(gru(X, STATE.to(META)), ValueError, "hx", "meta", "cpu"),
    "dtype": Bad(gru(X, STATE.double()), ValueError, "hx", "float64", "float32"),
    "dtype of c": Bad(call(X, (STATE, STATE.half())), ValueError, r"hx\[1\]", "float16", "float32"),
    "cell's not a pair": Bad(cell(X[0], STATE[0]), TypeError, "hx", "Tensor", "a pair"),
    "cell's shape": Bad(
        cell(X[0], (STATE[0], STATE)), ValueError, r"hx\[1\]", r"\(1, 3, 6\)", r"\(3, 6\)"
    ),
    "cell's device": Bad(
        cell(X[0], (STATE[0].to(META), STATE[0])), ValueError, r"hx\[0\]", "meta", "cpu"
    ),
    "cell's dtype": Bad(
        lambda: zo.GRUCell(I, H)(X[0], STATE[0].double()), ValueError, "hx", "float64", "float32"
    ),
    "ZoneoutCell's cell gives more": Bad(
        wrapped(X[0], STATE[0], inner=Gives(lambda h: (h, h))),
        ValueError,
        "state",
        "got 1",
        "2 tensors",
    ),
    "ZoneoutCell's cell gives fewer": Bad(
        wrapped(X[0], (STATE[0], STATE[0]), inner=Gives(lambda s: s[0])),
        ValueError,
        "state",
        "got 2",
        "1 tensors",
    ),
    "ZoneoutCell's cell gives another size": Bad(
        wrapped(X[0], STATE[0], inner=Gives(lambda h: h[:, :2])),
        ValueError,
        "state",
        r"\(3, 6\)",
        r"\(3, 2\)",
    ),
    "ZoneoutCell's cell gives no tensor": Bad(
        wrapped(X[0], STATE[0], inner=Gives(lambda h: {"h": h})),
        TypeError,
        "the wrapped cell's result",
        "dict",
        "a tuple of tensors",
    ),
    "ZoneoutCell's state": Bad(
        wrapped(X[0], {"h": STATE[0]}, inner=Gives(lambda s: s["h"])),
        TypeError,
        "state",
        "dict",
        "a tuple of tensors",
    ),
}

LENGTHS: dict[str, Bad] = {
    "too few": Bad(call(lengths=[1, 2]), ValueError, "lengths", r"\(2,\)", f"each of {B}"),
    "one number": Bad(call(lengths=2), ValueError, "lengths", r"\(\)", f"each of {B}"),
    "too long": Bad(call(lengths=[1, 2, T + 1]), ValueError, "lengths", f"{T + 1}", f"0 to {T}"),
    "below zero": Bad(call(lengths=[1, -2, 3]), ValueError, "lengths", "-2", f"0 to {T}"),
    "floats": Bad(call(lengths=[1.0, 2.0, 3.0]), TypeError, "lengths", "float", "integers"),
    "bools": Bad(
        call(lengths=torch.ones(B, dtype=torch.bool)), TypeError, "lengths", "bool", "integers"
    ),
    "strings": Bad(
        call(lengths=["1", "2", "3"]), (TypeError, ValueError), "lengths", "", "integers"
    ),
    "None inside": Bad(
        call(lengths=[1, None, 3]), (TypeError, ValueError), "lengths", "", "integers"
    ),
    "unbatched": Bad(call(X[:, 0], lengths=[1, 2]), ValueError, "lengths", r"\(2,\)", "each of 1"),
    "packed": Bad(
        call(PACKED, lengths=[1, 2, 3]), ValueError, "lengths", "packed", "expected None"
    ),
    "norm_stabilizer packed": Bad(
        lambda: zo.norm_stabilizer(PACKED, 1.0, lengths=[1, 2, 3]),
        ValueError,
        "lengths",
        "packed",
        "None",
    ),
    "norm_stabilizer": Bad(
        lambda: zo.norm_stabilizer(X, 1.0, lengths=[1]), ValueError, "lengths", r"\(1,\)", "each of"
    ),
}

RESETS: dict[str, Bad] = {
    "integers": Bad(call(resets=FALSE.long()), TypeError, "resets", "int64", "bool"),
    "NumPy's integers": Bad(
        call(resets=np.zeros((T, B), int)), TypeError, "resets", "int64", "bool"
    ),
    "a list": Bad(call(resets=[[False] * B] * T), TypeError, "resets", "list", "bool"),
    "turned round": Bad(
        call(resets=FALSE.t()), ValueError, "resets", r"\(3, 4\)", r"\[T, B\] = \(4, 3\)"
    ),
    "batch first": Bad(
        call(X.transpose(0, 1), resets=FALSE, layer=zo.GRU(I, H, batch_first=True)),
        ValueError,
        "resets",
        r"\(4, 3\)",
        r"\[B, T\] = \(3, 4\)",
    ),
    "unbatched": Bad(
        call(X[:, 0], resets=FALSE), ValueError, "resets", r"\(4, 3\)", r"\[T\] = \(4,\)"
    ),
    "packed": Bad(
        call(PACKED, resets=FALSE.t()), ValueError, "resets", r"\(3, 4\)", r"\[T, B\] = \(4, 3\)"
    ),
}

COORDINATES: dict[str, Bad] = {
    "seed a string": Bad(call(seed="7"), TypeError, "seed", "str", "an int"),
    "seed a float": Bad(call(seed=7.0), TypeError, "seed", "float", "an int"),
    "seed a bool": Bad(call(seed=True), TypeError, "seed", "bool", "an int"),
    "seed too large": Bad(call(seed=2**64), ValueError, "seed", str(2**64), "64 bits"),
    "seed too small": Bad(
        call(seed=-(2**63) - 1), ValueError, "seed", str(-(2**63) - 1), "64 bits"
    ),
    "seed of two numbers": Bad(
        call(seed=torch.tensor([1, 2])), ValueError, "seed", r"\(2,\)", "one element"
    ),
    "seed of floats": Bad(call(seed=torch.tensor(1.0)), ValueError, "seed", "float32", "integer"),
    "seed of fold": Bad(lambda: zo.fold("a", 1), TypeError, "seed", "str", "an int"),
    "seed of masks": Bad(
        lambda: zo.masks(NOISE, 1.5, 2, 3, 4), TypeError, "seed", "float", "an int"
    ),
    "examples too few": Bad(
        call(examples=[1, 2]), ValueError, "examples", r"\(2,\)", f"each of {B} rows"
    ),
    "examples floats": Bad(
        call(examples=[1.0, 2.0, 3.0]), TypeError, "examples", "float32", "integer ids"
    ),
    "examples a float": Bad(call(examples=1.5), TypeError, "examples", "float", "integer ids"),
    "examples bools": Bad(call(examples=True), TypeError, "examples", "bool", "integer ids"),
    "examples a string": Bad(
        call(examples="abc"), (TypeError, ValueError), "examples", "", "integer ids"
    ),
    "examples below zero": Bad(call(examples=-1), ValueError, "examples", "-1", "0"),
    "examples of NumPy below zero": Bad(
        call(examples=np.int64(-1)), ValueError, "examples", "-1", "0"
    ),
    "an example below zero": Bad(call(examples=[0, -1, 2]), ValueError, "examples", "-1", "ids"),
    "an example too large": Bad(
        call(examples=[0, 2**32, 2]), ValueError, "examples", str(2**32), "ids"
    ),
    "examples too large": Bad(
        call(examples=2**32 - 1), ValueError, "examples", str(2**32 - 1), "batch"
    ),
    "examples below zero in a tensor": Bad(
        call(examples=torch.tensor(-1)), ValueError, "examples", "-1", "an offset"
    ),
    "examples too large in a tensor": Bad(
        call(examples=torch.tensor(2**32 - 1)),
        ValueError,
        "examples",
        str(2**32 - 1),
        "2³² − batch",
    ),
    "an example below zero in a tensor": Bad(
        call(examples=torch.tensor([0, -1, 2])), ValueError, "examples", "-1 to 2", "ids between"
    ),
    "an example too large in a tensor": Bad(
        call(examples=torch.tensor([0, 2**32, 2])),
        ValueError,
        "examples",
        f"0 to {2**32}",
        "ids between",
    ),
    "an example of 64 bits": Bad(
        call(examples=torch.tensor([0, 2**64 - 1, 2], dtype=torch.uint64)),
        ValueError,
        "examples",
        "-1",
        "ids between",
    ),
    "examples in a tensor of a cell": Bad(
        cell(examples=torch.tensor([0, 2**32, 2])),
        ValueError,
        "examples",
        f"0 to {2**32}",
        "ids between",
    ),
    "examples in a tensor of masks": Bad(
        lambda: zo.masks(NOISE, 1, 2, 3, 4, examples=torch.tensor(-1)),
        ValueError,
        "examples",
        "-1",
        "an offset",
    ),
    "a first step in a tensor": Bad(
        call(first_step=torch.tensor(2**32)), ValueError, "first_step", str(2**32), "whole number"
    ),
    "examples of a cell": Bad(
        cell(examples=[1]), ValueError, "examples", r"\(1,\)", f"each of {B} rows"
    ),
    "first_step below zero": Bad(call(first_step=-1), ValueError, "first_step", "-1", "0 or more"),
    "first_step a bool": Bad(call(first_step=True), ValueError, "first_step", "True", "0 or more"),
    "first_step a string": Bad(
        call(first_step="1"), (TypeError, ValueError), "first_step", "", "0 or more"
    ),
    "first_step None": Bad(
        call(first_step=None), (TypeError, ValueError), "first_step", "", "0 or more"
    ),
    "first_step a float": Bad(
        call(first_step=1.5), (TypeError, ValueError), "first_step", r"1\.5", "0 or more"
    ),
    "step below zero": Bad(cell(seed=1, step=-1), ValueError, "step", "-1", "0 or more"),
    "step a float": Bad(cell(seed=1, step=1.5), ValueError, "step", r"1\.5", "0 or more"),
    "no step with a seed": Bad(
        cell(seed=1), ValueError, "step", "fixed seed", "expected the number"
    ),
    "no step with a static mask": Bad(
        cell(layer=zo.GRUCell(I, H, noise=zo.Zoneout(hidden=0.5, mask="static", seed=1))),
        ValueError,
        "step",
        "fixed seed",
        "expected the number",
    ),
    "no step with batch norm": Bad(
        cell(layer=zo.LSTMCell(I, H, norm=zo.RecurrentBatchNorm(steps=2))),
        ValueError,
        "step",
        "batch norm",
        "expected the number",
    ),
    "no seed for a sequence mask": Bad(
        cell(layer=zo.GRUCell(I, H, noise=zo.Zoneout(hidden=0.5, mask="sequence"))),
        ValueError,
        "seed",
        "hidden",
        "the same seed",
    ),
    "no seed for variational dropout": Bad(
        cell(layer=zo.GRUCell(I, H, noise=zo.VariationalDropout(input=0.5))),
        ValueError,
        "seed",
        "input",
        "the same seed",
    ),
    "no seed for dropped weights": Bad(
        cell(layer=zo.GRUCell(I, H, noise=zo.WeightDrop(rate=0.5))),
        ValueError,
        "seed",
        "weight",
        "the same seed",
    ),
    "ZoneoutCell without step": Bad(
        wrapped(seed=1), ValueError, "step", "fixed seed", "expected the number"
    ),
    "ZoneoutCell's step": Bad(wrapped(seed=1, step=-1), ValueError, "step", "-1", "0 or more"),
    "ZoneoutCell's step a float": Bad(
        wrapped(seed=1, step=1.5), (TypeError, ValueError), "step", r"1\.5"
    ),
    "ZoneoutCell's seed": Bad(wrapped(seed=1.5, step=0), TypeError, "seed", "float", "an int"),
    "ZoneoutCell's examples": Bad(
        wrapped(seed=1, step=0, examples=[1]), ValueError, "examples", r"\(1,\)"
    ),
    "zoneout's step": Bad(
        lambda: zo.zoneout(X, X, 0.5, seed=1, step=-1), ValueError, "step", "-1", "0 or more"
    ),
    "zoneout's seed": Bad(
        lambda: zo.zoneout(X, X, 0.5, seed="a"), TypeError, "seed", "str", "an int"
    ),
    "masks' layer": Bad(lambda: zo.masks(NOISE, 1, 2, 3, 4, layer=-1), ValueError, "layer", "-1"),
    "masks' layer past the last": Bad(
        lambda: zo.masks(NOISE, 1, 2, 3, 4, layer=2**15), ValueError, "layer", "32768"
    ),
    "a norm of another kind": Bad(
        lambda: setattr(zo.LSTM(I, H, norm="layer"), "norm", zo.RecurrentBatchNorm(steps=3)),
        ValueError,
        "norm: expected one like LayerNorm",
        "RecurrentBatchNorm",
    ),
    "masks' direction": Bad(
        lambda: zo.masks(NOISE, 1, 2, 3, 4, direction=2), ValueError, "direction", "2", "0 or 1"
    ),
    "masks' steps": Bad(
        lambda: zo.masks(NOISE, 1, -3, 2, 4), ValueError, "steps", "-3", "0 or more"
    ),
    "masks' batch": Bad(
        lambda: zo.masks(NOISE, 1, 3, 2.5, 4), ValueError, "batch", r"2\.5", "0 or more"
    ),
    "masks' hidden": Bad(
        lambda: zo.masks(NOISE, 1, 3, 2, "4"), ValueError, "hidden", "'4'", "0 or more"
    ),
    "masks' projection": Bad(
        lambda: zo.masks(NOISE, 1, 3, 2, 4, proj_size=-1),
        ValueError,
        "proj_size",
        "-1",
        "0 or more",
    ),
    "masks' input": Bad(
        lambda: zo.masks(NOISE, 1, 3, 2, 4, input_size=1.5),
        ValueError,
        "input_size",
        r"1\.5",
        "0 or more",
    ),
    "n of fold": Bad(lambda: zo.fold(1, 1.5), TypeError, "n", "float", "an int"),
    "masks' layer beyond the rates": Bad(
        lambda: zo.masks(zo.Zoneout(hidden=[0.1, 0.2]), 1, 2, 3, 4, layer=2),
        ValueError,
        "layer|hidden",
        "2",
    ),
}


def with_weight(layer: Any, name: str, value: Any) -> Callable[[], Any]:
    """A call of a layer, one of whose parameters somebody has replaced."""
    setattr(layer, name, nn.Parameter(value))
    return lambda: layer(torch.randn(T, B, I) if name[-3:-1] == "_l" else torch.randn(B, I))


WEIGHTS: dict[str, Bad] = {
    "too few columns": Bad(
        with_weight(zo.GRU(I, H), "weight_hh_l0", torch.randn(3 * H, 2)),
        ValueError,
        "weight_hh_l0",
        r"\(18, 2\)",
    ),
    "of another size": Bad(
        with_weight(zo.LSTM(I, H), "weight_ih_l0", torch.randn(8, I)),
        ValueError,
        "weight_ih_l0",
        r"\(8, 5\)",
    ),
    "of a cell": Bad(
        with_weight(zo.GRUCell(I, H), "weight_hh", torch.randn(9, 3)),
        ValueError,
        "weight_hh",
        r"\(9, 3\)",
    ),
    "of a norm": Bad(
        with_weight(zo.LSTM(I, H, norm="layer"), "norm_cell_l0", torch.ones(2)),
        ValueError,
        "norm_cell_l0",
        r"\(2,\)",
    ),
    "a short bias": Bad(
        with_weight(zo.RNN(I, H), "bias_hh_l0", torch.ones(5)), ValueError, "bias_hh_l0", r"\(5,\)"
    ),
    "rates of no device": Bad(
        lambda: zo.GRU(I, H, noise=NOISE)(X, rates={"hidden": torch.empty((), device="meta")}),
        ValueError,
        r"rates\['hidden'\]",
        "meta",
    ),
    "too few rates": Bad(
        lambda: zo.GRU(I, H, noise=NOISE)(X, rates={"hidden": torch.full((2,), 0.5)}),
        ValueError,
        r"rates\['hidden'\]: expected one rate for each of 6 units, got 2",
    ),
    "too few rates of a cell": Bad(
        lambda: zo.GRUCell(I, H, noise=NOISE)(X[0], rates={"hidden": torch.full((2,), 0.5)}),
        ValueError,
        r"rates\['hidden'\]: expected one rate for each of 6 units, got 2",
    ),
    "a rate of a call": Bad(
        lambda: zo.GRU(I, H, noise=NOISE)(X, rates={"hidden": torch.tensor(1.5)}),
        ValueError,
        "hidden",
        "1.5",
    ),
    "a stream that the noise has not": Bad(
        lambda: zo.GRU(I, H, noise=NOISE)(X, rates={"cell": 0.5}),
        ValueError,
        r"rates: .*\(depth, hidden\), got 'cell'",
    ),
    "rates without a noise": Bad(
        lambda: zo.GRU(I, H)(X, rates={"hidden": 0.5}),
        ValueError,
        r"rates: .*it has none.*got 'hidden'",
    ),
    "a bare rate of a call": Bad(
        lambda: zo.GRU(I, H, noise=NOISE)(X, rates=0.5),
        TypeError,
        r"rates: expected a dict .*, got float",
    ),
    "learned rates": Bad(
        lambda: zo.GRU(I, H, noise=zo.VariationalDropout(input=0.5))(
            X, rates={"input": torch.tensor(0.5, requires_grad=True)}
        ),
        ValueError,
        r"rates\['input'\]",
        "one for each step or one with a gradient",
        "the same at all steps",
    ),
    "of no device": Bad(
        with_weight(zo.LSTM(I, H), "weight_hh_l0", torch.empty(4 * H, H, device="meta")),
        ValueError,
        "weight_hh_l0",
        "on meta",
        "on cpu",
    ),
}

REST: dict[str, Bad] = {
    "return_cells of a GRU": Bad(
        gru(return_cells=True), ValueError, "return_cells", "GRU", "expected False"
    ),
    "return_cells of an RNN": Bad(
        call(return_cells=True, layer=zo.RNN(I, H)),
        ValueError,
        "return_cells",
        "RNN",
        "expected False",
    ),
    "convert no module": Bad(
        lambda: zo.convert("model", NOISE), TypeError, "model", "str", "Module"
    ),
    "revert no module": Bad(
        lambda: zo.revert([nn.LSTM(I, H)]), TypeError, "model", "list", "Module"
    ),
    "convert rates": Bad(
        lambda: zo.convert(nn.Sequential(nn.LSTM(I, H)), zo.Zoneout(cell=[0.1, 0.2])),
        ValueError,
        r"Zoneout\(cell",
        "got 2",
        "1 layers.*in '0'.*nothing was replaced",
    ),
    "zoneout shapes": Bad(
        lambda: zo.zoneout(X, X[0], 0.5), ValueError, "old", r"\(3, 5\)", r"\(4, 3, 5\)"
    ),
    "zoneout scalar": Bad(
        lambda: zo.zoneout(torch.ones(()), torch.ones(()), 0.5),
        ValueError,
        "new",
        "scalar",
        "at least one dimension",
    ),
    "zoneout no tensor": Bad(
        lambda: zo.zoneout(1.0, X, 0.5), TypeError, "new", "float", "a tensor"
    ),
    "norm_stabilizer dimensions": Bad(
        lambda: zo.norm_stabilizer(torch.ones(3), 1.0),
        ValueError,
        "outputs",
        "1 dimension",
        r"\[T, B, H\]",
    ),
    "norm_stabilizer no tensor": Bad(
        lambda: zo.norm_stabilizer([1], 50),
        TypeError,
        "outputs",
        "list",
        "a tensor of floating-point",
    ),
    "norm_stabilizer integers": Bad(
        lambda: zo.norm_stabilizer(X.long(), 50),
        TypeError,
        "outputs",
        "int64",
        "a tensor of floating-point",
    ),
    "norm_stabilizer's beta": Bad(
        lambda: zo.norm_stabilizer(X, "50"), TypeError, "beta", "str", "a number"
    ),
    "estimate_statistics without norm": Bad(
        lambda: zo.estimate_statistics(zo.LSTM(I, H), [X]),
        ValueError,
        "model",
        "none",
        "RecurrentBatchNorm",
    ),
    "estimate_statistics without data": Bad(
        lambda: zo.estimate_statistics(zo.LSTM(I, H, norm=zo.RecurrentBatchNorm(2)), []),
        ValueError,
        "batches",
        "none",
        "at least one batch",
    ),
    "block_orthogonal_": Bad(
        lambda: zo.init.block_orthogonal_(torch.ones(3)), ValueError, "weight", r"\(3,\)", "matrix"
    ),
    "block_orthogonal_ of a layer": Bad(
        lambda: zo.init.block_orthogonal_(zo.GRU(I, H)), TypeError, "weight", "GRU", "matrix"
    ),
    "orthogonal_": Bad(
        lambda: zo.init.orthogonal_(torch.ones(2, 2, 2)),
        ValueError,
        "weight",
        r"\(2, 2, 2\)",
        "matrix",
    ),
}

TABLE = {
    f"{part}: {name}": bad
    for part, table in {
        "rates": RATES,
        "noises": NOISES,
        "constructors": CONSTRUCTORS,
        "inputs": INPUTS,
        "states": STATES,
        "lengths": LENGTHS,
        "resets": RESETS,
        "coordinates": COORDINATES,
        "weights": WEIGHTS,
        "rest": REST,
    }.items()
    for name, bad in table.items()
}


@pytest.mark.parametrize("name", TABLE)
def test_message(name):
    """Someone who gives this would get no error, or one that does not say what to change."""
    bad = TABLE[name]
    with pytest.raises(bad.error) as caught:
        bad.call()
    message = str(caught.value)
    for what, pattern in (
        ("argument", bad.argument),
        ("came", bad.came),
        ("expected", bad.expected),
    ):
        assert re.search(pattern, message), f"{what}: {pattern!r} is not in {message!r}"


def test_integers_of_other_libraries():
    """A step, size or seed that NumPy counted would be refused, or draw something else than the
    same int.
    """
    three, layer = np.int64(3), zo.LSTM(I, H, noise=NOISE)
    assert torch.equal(layer(X, seed=three, first_step=three)[0], layer(X, seed=3, first_step=3)[0])
    ours = zo.LSTMCell(I, H, noise=NOISE, layer=three)
    assert torch.equal(ours(X[0], seed=three, step=three)[0], ours(X[0], seed=3, step=3)[0])
    theirs = zo.ZoneoutCell(nn.GRUCell(I, H), 0.5, layer=three)
    assert torch.equal(theirs(X[0], seed=three, step=three), theirs(X[0], seed=3, step=3))
    assert zo.fold(three, three) == zo.fold(3, 3)
    of_numpy, of_ints = (zo.masks(NOISE, n, n, n, n, first_step=n)["hidden"] for n in (three, 3))
    assert torch.equal(of_numpy, of_ints)


# --- an error leaves everything as it was ---------------------------------------------------------


def test_a_refused_noise_leaves_the_old_one():
    """A layer that refused a noise would be left with half of it."""
    layer: Any = zo.LSTM(I, H, noise=zo.Zoneout(cell=0.5, hidden=0.25))
    expected = layer(X, seed=1)[0]
    refused: list[Any] = [
        zo.Zoneout(cell=[0.1, 0.2]),
        zo.Zoneout(hidden=torch.ones(3)),
        [zo.WeightDrop(rate=0.1), "a"],
    ]
    for noise in refused:
        with pytest.raises((TypeError, ValueError)):
            layer.noise = noise
        assert layer.noise == zo.Zoneout(cell=0.5, hidden=0.25)
        assert torch.equal(layer(X, seed=1)[0], expected)


def test_refused_rates_leave_the_old_ones():
    """A ZoneoutCell that refused its rates would be left without any."""
    cell = zo.ZoneoutCell(nn.GRUCell(I, H), 0.5)
    with pytest.raises(ValueError, match="rates"):
        cell.rates = 2.0
    assert cell.rates == 0.5


def test_a_refused_call_draws_nothing():
    """A call that fails would move torch's generator, and with it all that a program draws
    later.
    """
    layer = zo.LSTM(I, H, noise=NOISE)
    before = torch.get_rng_state()
    bad: list[dict[str, Any]] = [
        {"lengths": [1]},
        {"resets": FALSE.t()},
        {"hx": (STATE, STATE[..., :2])},
        {"examples": [1]},
        {"first_step": -1},
    ]
    for options in bad:
        with pytest.raises((TypeError, ValueError)):
            layer(X, **options)
        assert torch.equal(torch.get_rng_state(), before), options


# --- messages for whatever comes ------------------------------------------------------------------

fuzz = settings(deadline=None, derandomize=True, database=None, max_examples=60)
numbers = st.floats(allow_nan=True, allow_infinity=True)
things = st.one_of(
    st.none(),
    st.text(max_size=3),
    st.binary(max_size=2),
    st.booleans(),
    st.dictionaries(st.integers(), st.integers()),
    st.complex_numbers(),
    st.sets(st.integers(), max_size=2),
)


@pytest.mark.parametrize(
    ("make", "got", "write"),
    [
        (
            lambda: zo.Zoneout(0.1),
            "1 positional argument (0.1)",
            "Zoneout(cell=0.1, hidden=0.1), or only one of them",
        ),
        (
            lambda: zo.StateDropout(0.1, 0.2),
            "2 positional arguments (0.1, 0.2)",
            "StateDropout(cell=0.1, hidden=0.2)",
        ),
        (
            lambda: zo.VariationalDropout(0.1, input=0.2),
            "(0.1)",
            "VariationalDropout(hidden=0.1, input=0.2)",
        ),
        (
            lambda: zo.Zoneout(torch.ones(3)),
            "(…)",
            "Zoneout(cell=…, hidden=…), or only one of them",
        ),
        (
            lambda: zo.RecurrentDropout(0.1, "step"),
            "(0.1, 'step')",
            "RecurrentDropout(rate=0.1, mask='step')",
        ),
        (lambda: zo.WeightDrop(0.1), "1 positional argument (0.1)", "WeightDrop(rate=0.1)"),
        (lambda: Mine(0.1), "1 positional argument (0.1)", "Mine(std=0.1)"),
    ],
)
def test_noises_take_keywords(make, got, write):
    """A single number would be the rate of the cell alone, where other toolkits mean both
    states.
    """
    with pytest.raises(TypeError) as caught:
        make()
    name = write.partition("(")[0]
    said = str(caught.value)
    assert said.startswith(f"{name}: expected keywords, got ") and said.endswith(
        f"{got}; write {write}"
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: zo.Zoneout(cell=0.4 / 65536, hidden=0.0),
            r"Zoneout\(cell=…\): 6\.1\d+e-06 rounds to 0, .* never used",
        ),
        (
            lambda: zo.WeightDrop(rate=[0.5, 0.999999]),
            r"WeightDrop\(rate=…\): 0\.999999 rounds to 1, .* always used",
        ),
        (
            lambda: zo.Zoneout(hidden=torch.tensor([0.0, 1e-6, 1.0])),
            r"Zoneout\(hidden=…\): 9.99\d+e-07 rounds to 0",
        ),
        (
            lambda: zo.Zoneout(hidden=torch.tensor([0.5, 0.999999])),
            r"Zoneout\(hidden=…\): 0.99999\d+ rounds to 1",
        ),
        (lambda: zo.zoneout(X, X, 1e-6), "rate: 1e-06 rounds to 0"),
        (wrapped(rates=0.999999), "rates: 0.999999 rounds to 1"),
        (lstm(2, dropout=1e-6), "dropout: 1e-06 rounds to 0"),
    ],
)
def test_a_rate_that_is_drawn_as_none_or_all_is_warned_of(make, said):
    """A rate too small to be drawn would be no noise at all in training, and nobody would know."""
    with pytest.warns(UserWarning, match=said) as caught:
        make()
    assert len(caught) == 1 and caught[0].filename == __file__


def test_rates_that_are_drawn_are_not_warned_of():
    """A rate that is exactly 0 or 1, or one of 65,536ths between, would be warned of."""
    for rate in (
        0.0,
        1.0,
        0.6 / 65536,
        1 - 0.6 / 65536,
        torch.tensor([0.0, 1.0, 0.5]),
    ):  # warnings are errors here
        zo.Zoneout(cell=rate)
    zo.WeightNoise(std=1e-6)  # not a rate


def test_a_noise_with_a_constructor_of_its_own():
    """A user's subclass could not take a number without a keyword, as any class may."""

    class Both(zo.Zoneout):
        def __init__(self, rate: float) -> None:
            super().__init__(cell=rate, hidden=rate)

    assert (Both(0.1).cell, Both(0.1).hidden) == (0.1, 0.1)


@fuzz
@given(st.sampled_from(["cell", "hidden"]), numbers.filter(lambda v: not 0 <= v <= 1))
def test_any_bad_rate(field, value):
    """A number that is no chance would be taken as a rate, or its message would not show the
    number.
    """
    with pytest.raises(ValueError) as caught:
        zo.Zoneout(**{field: value})
    assert str(value) in str(caught.value) and f"Zoneout({field}" in str(caught.value)


@fuzz
@given(st.sampled_from([zo.Zoneout, zo.StateDropout, zo.VariationalDropout]), things)
def test_any_thing_as_a_rate(method, value):
    """A thing that is no number would be taken as a rate, or its message would not name its
    type.
    """
    with pytest.raises(TypeError) as caught:
        method(hidden=value)
    message = str(caught.value)
    assert (
        f"{method.__name__}(hidden" in message
        and type(value).__name__ in message
        and "expected" in message
    )


@fuzz
@given(things | st.floats())
def test_any_thing_as_a_seed(value):
    """A thing that is no integer would be taken as a seed, or fail somewhere deep inside."""
    if value is None:
        return
    layer = zo.GRU(I, H, noise=NOISE)
    with pytest.raises(TypeError) as caught:
        layer(X, seed=value)
    assert str(caught.value).startswith("seed: expected") and type(value).__name__ in str(
        caught.value
    )


@fuzz
@given(things.filter(lambda value: value is not None))
def test_any_thing_as_noise(value):
    """A thing that is no noise would be taken as one, or fail somewhere deep inside."""
    if isinstance(value, (str, bytes, dict, set)) and not value:
        return  # an empty collection is a list of no noises
    with pytest.raises(TypeError, match="noise: expected Zoneout"):
        zo.LSTM(I, H, noise=value)


@fuzz
@given(st.lists(st.integers(0, 7), max_size=4).filter(lambda shape: shape != [T, B, I]))
def test_any_shape_of_input(shape):
    """An input of a wrong shape would pass, or its message would not hold the number that is
    wrong.
    """
    layer = zo.GRU(I, H)
    good = len(shape) in (2, 3) and shape[-1] == I and shape[0] > 0
    if good:
        layer(torch.zeros(shape))
        return
    with pytest.raises(ValueError) as caught:
        layer(torch.zeros(shape))
    message = str(caught.value)
    wrong = len(shape) if len(shape) not in (2, 3) else shape[-1] if shape[-1] != I else 0
    assert message.startswith("input: expected") and re.search(rf"\b{wrong}\b", message)


@fuzz
@given(st.lists(st.integers(0, 4), max_size=4).filter(lambda shape: shape != [2, B, H]))
def test_any_shape_of_state(shape):
    """A state of a wrong shape would pass, be broadcast, or its message would not hold both
    shapes.
    """
    layer = zo.GRU(I, H, bidirectional=True)
    with pytest.raises(ValueError) as caught:
        layer(X, torch.zeros(shape))
    message = str(caught.value)
    assert (
        message.startswith("hx: expected")
        and str(tuple(shape)) in message
        and str((2, B, H)) in message
    )


@fuzz
@given(st.lists(st.integers(-3, T + 3), min_size=B, max_size=B))
def test_any_lengths(lengths):
    """Lengths that do not fit would pass, or ones that do would not."""
    layer = zo.GRU(I, H)
    if all(0 <= length <= T for length in lengths):
        assert layer(X, lengths=lengths)[0].shape == (T, B, H)
        return
    with pytest.raises(ValueError) as caught:
        layer(X, lengths=lengths)
    wrong = min(lengths) if min(lengths) < 0 else max(lengths)
    assert f"0 to {T}" in str(caught.value) and str(wrong) in str(caught.value)


@fuzz
@given(st.text(max_size=8).filter(lambda text: text not in zo.Zoneout.masks))
def test_any_mask_name(name):
    """A misspelt mask would be taken for another, or the names that exist would not be shown."""
    with pytest.raises(ValueError) as caught:
        zo.Zoneout(cell=0.5, mask=name)
    assert repr(name) in str(caught.value) and "unit, shared, step, sequence, static" in str(
        caught.value
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the libraries are there")
def test_without_the_libraries_of_the_kernels_the_reference_runs(monkeypatch):
    """Where torch knows a GPU but its driver or compiler is missing, every call is an error."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cuda._complete.cache_clear()
    with pytest.warns(
        UserWarning, match=r"was not found .*; the layers run in a loop of torch calls instead"
    ):
        assert not cuda.is_available(X)
    assert not cuda.is_available(X), "said twice"
    cuda._complete.cache_clear()
