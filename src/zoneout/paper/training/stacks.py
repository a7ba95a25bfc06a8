"""The recurrent part of a model: one layer, layers of one size, of several sizes, or a system.

All have the interface of a layer: called with an input and a state, they return the outputs of all
steps and the final state, whose tensors are [layers, batch, units].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zoneout as zo

from ... import cells
from ...ops.dropout import dropout
from ...sequence_layer import SequenceLayer
from ...streams import plane
from ...systems.steps import Loop
from .config import Config

# Added to the seed of a layer of a stack, once for each layer below it: the layers draw apart. It
# is added on the device, since a CUDA graph may not copy a number from the host.
_APART = 0x1E3779B97F4A7C15


@zo.cell(gates=4, states=("h", "c"), bounded=True, checked=False)
def biased_lstm(x, r, h, c, out_bias):  # type: ignore[no-untyped-def]
    """An LSTM with a learned bias inside the output's tanh, as in the paper's pMNIST code."""
    i, f, g, o = (a + b for a, b in zip(x, r))
    c = zo.candidate("c", f.sigmoid() * c + zo.update(i.sigmoid() * g.tanh()))
    return zo.held(o.sigmoid()) * (zo.shown(c) + out_bias).tanh(), c


LSTMS = (cells.lstm, biased_lstm)


def recurrent(config: Config, inputs: int, steps: int, noises: Sequence[Any]) -> Any:
    """Return the recurrent part of a model that reads `inputs` features at each of `steps` steps.

    `noises` are those of the config, with a rate for each layer where it has several.
    """
    if config.model.system:
        return System(config, inputs)
    several = len(config.model.units) > 1
    if len(set(config.model.units)) > 1 or (several and config.model.output):
        return Stack(config, inputs, steps, noises)
    return layer_of(config, inputs, config.model.units, steps, noises)


def layer_of(
    config: Config, inputs: int, units: Sequence[int], steps: int, noises: Sequence[Any]
) -> Any:
    """Return a layer of the package, with as many layers inside as `units` has numbers."""
    model = config.model
    norms = {
        "none": None,
        "layer": "layer",
        "batch": zo.RecurrentBatchNorm(steps, model.norm_momentum),
    }
    lstm = partial(zo.Recurrent, biased_lstm) if model.output_bias else zo.LSTM
    kinds: dict[str, Any] = {"lstm": lstm, "gru": zo.GRU, "rnn": zo.RNN, "rnn-relu": zo.RNN}
    layer = kinds[model.cell](
        inputs,
        units[0],
        len(units),
        dropout=model.dropout if len(units) > 1 else 0.0,
        noise=noises,
        norm=norms[model.norm],
        learn_initial_state=model.learn_initial_state,
        backend=config.backend,
        **({"nonlinearity": "relu"} if model.cell == "rnn-relu" else {}),
    )
    return zo.systems.clockwork(layer, model.modules) if model.modules else layer


class Stack(nn.Module):
    """Layers of different sizes, or whose outputs are all seen: each is a layer of its own."""

    def __init__(self, config: Config, inputs: int, steps: int, noises: Sequence[Any]) -> None:
        super().__init__()
        units = config.model.units
        self.dropout, self.every = config.model.dropout, config.model.output > 0
        self.output_size = sum(units) if self.every else units[-1]
        self.layers = nn.ModuleList(
            layer_of(config, below, [size], steps, [of_layer(noise, k) for noise in noises])
            for k, (below, size) in enumerate(zip([inputs, *units], units))
        )

    def initial_state(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        """Return the states of all layers, one after the other."""
        every = (initial_state(layer, batch, like) for layer in self.layers)
        return tuple(s for state in every for s in (state if isinstance(state, tuple) else [state]))

    def forward(
        self, x: Tensor, hx: tuple[Tensor, ...] | None, *, seed: Any, examples: Any, first_step: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the outputs of the last or of all layers, and the states of all layers."""
        each = 0 if hx is None else len(hx) // len(self.layers)
        ends, outputs = list[Tensor](), list[Tensor]()
        for k, layer in enumerate(self.layers):
            key = None if seed is None else seed + (k * _APART + 2**63) % 2**64 - 2**63
            if k and self.training and self.dropout:
                where = plane("dropout", k - 1, 0)
                x = dropout(x, self.dropout, seed, where, examples, first_step)
            begins: Any = None if hx is None else hx[k * each : (k + 1) * each]
            begins = begins[0] if each == 1 else begins
            x, end = layer(x, begins, seed=key, examples=examples, first_step=first_step)
            ends += end if isinstance(end, tuple) else [end]
            outputs.append(x)
        return torch.cat(outputs, dim=-1) if self.every else x, tuple(ends)


class System(nn.Module):
    """A system of `zoneout.systems`, as a layer."""

    def __init__(self, config: Config, inputs: int) -> None:
        super().__init__()
        model, options, systems = config.model, config.system, zo.systems
        hidden = model.units[0]
        self.output_size = hidden
        self.inner: Any
        if model.cell == "adaptive-lstm":
            zoneout: Any = config.zoneout
            self.inner = systems.AdaptiveLSTM(
                inputs, hidden, options.hyper, zoneout.cell, zoneout.hidden, zoneout.mask,
                model.learn_initial_state,
            )  # fmt: skip
        elif model.cell == "hyper-lstm":
            rate = config.recurrent_dropout.rate
            self.inner = systems.HyperLSTM(inputs, hidden, options.hyper, options.scales, rate)
        elif model.cell == "hm-lstm":
            self.inner = systems.HMLSTM(inputs, hidden, len(model.units), model.output or None)
            self.output_size = self.inner.output_size
        else:
            self.inner = systems.SurprisalLSTM(inputs, hidden, options.least)
            self.softmax = self.inner.softmax
        self.inner.compiled = options.compile

    def initial_state(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        """Return the initial state, each tensor with the rows in its second dimension."""
        return tuple(self._outside(s) for s in self.inner.initial_state(batch, like))

    def forward(
        self, x: Tensor, hx: tuple[Tensor, ...] | None, **where: Any
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the outputs of all steps and the final state."""
        begins = None if hx is None else tuple(s if self._rows else s[0] for s in hx)
        y, *seen, state = self.inner(x, begins, **where)
        return (seen[0] if seen else y), tuple(map(self._outside, state))

    @property
    def _rows(self) -> bool:
        """Whether the rows of the system's own states are in the second dimension."""
        return isinstance(self.inner, zo.systems.AdaptiveLSTM)

    def _outside(self, state: Tensor) -> Tensor:
        return state if self._rows else state[None]


def of_layer(noise: Any, k: int) -> Any:
    """Return a noise with the rates of one layer."""
    fields = {
        name: value[k] for name, value in vars(noise).items() if isinstance(value, tuple) and value
    }
    return replace(noise, **fields)


def initial_state(layer: Any, batch: int, like: Tensor) -> Any:
    """Return the initial state of a recurrent part, learned or zero; a tensor if it is one."""
    if isinstance(layer, (Stack, System)):
        return layer.initial_state(batch, like)
    shape = (layer.num_layers, batch, layer.hidden_size)
    names = layer.initial_names()
    if layer.learn_initial_state:
        states = tuple(getattr(layer, name)[:, None].expand(shape) for name in names)
    else:
        states = tuple(like.new_zeros(shape) for _ in names)
    return states if len(states) > 1 else states[0]


def layers_of(part: nn.Module) -> Iterator[SequenceLayer]:
    """Yield the layers of the package inside a recurrent part that have the config's cell."""
    small = {id(m.hyper) for m in part.modules() if isinstance(m, zo.systems.AdaptiveLSTM)}
    for module in part.modules():
        if isinstance(module, SequenceLayer) and id(module) not in small:
            yield module


def parameters_of_systems(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters that a system initialises itself: all but those of its large LSTM."""
    for module in model.modules():
        if isinstance(module, Loop):
            large = {id(p) for layer in layers_of(module) for p in layer.parameters()}
            yield from (p for p in module.parameters() if id(p) not in large)
