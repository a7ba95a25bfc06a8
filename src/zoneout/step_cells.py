"""LSTMCell, GRUCell and RNNCell: the layers one step at a time, for decoders that feed themselves.

A cell keeps no counter. Given `seed`, `step` and `examples` it draws what the layer would draw there;
without a seed every call draws afresh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from .draws import check_count, example_ids
from .layers import Noises, Norm, State, as_states, check_state_dtype
from .noise import sees_step
from .norm import RecurrentBatchNorm
from .ops import Weights, one_step
from .overrides import overriding
from .philox import as_seed, fresh_seed
from .recurrent import (
    GATES,
    CallNoise,
    Rates,
    Recurrent,
    check_device,
    check_parameter,
    drawn_rules,
    has_features,
    no_tensor,
)


class RecurrentCell(Recurrent, nn.RNNCellBase):
    """The common part of `LSTMCell`, `GRUCell` and `RNNCell`."""

    one_step = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool,
        device: Any,
        dtype: torch.dtype | None,
        noise: Noises,
        norm: Norm,
        layer: int,
        backend: str | None,
    ) -> None:
        for name, value in (("input_size", input_size), ("hidden_size", hidden_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}: expected a whole number of at least 0, got {value!r}")
        self.layer = check_count("layer", layer, 2**15)
        super().__init__(input_size, hidden_size, bias, GATES[self.kind], device, dtype)
        self._add_parts(noise, norm, backend)

    def suffixes(self) -> list[str]:
        return [""]

    def input_sizes(self) -> list[int]:
        return [self.input_size]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights and biases as torch.nn starts them, scales and shifts as they start."""
        bound = 1 / math.sqrt(self.hidden_size) if self.hidden_size > 0 else 0.0  # as torch has it, to the bit
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith(("weight_", "bias_")):
                parameter.uniform_(-bound, bound)
        if hasattr(self, "_norm"):
            self._reset_parts()

    def extra_repr(self) -> str:
        return super().extra_repr() + self._extra() + (f", layer={self.layer}" if self.layer else "")

    def forward(
        self,
        input: Tensor,
        hx: State | None = None,
        *,
        seed: int | Tensor | None = None,
        step: int | None = None,
        examples: int | Tensor | Sequence[int] | None = None,
        rates: Rates | None = None,
    ) -> Any:
        """The next state. `seed`, `step` and `examples` say which draw this is: see the module's text.

        `rates` replaces rates of the cell's noise for this call, as in a layer.
        """
        if given := overriding(input, hx):
            call: dict[str, Any] = {"seed": seed, "step": step, "examples": examples, "rates": rates}
            return handle_torch_function(RecurrentCell.forward, given, self, input, hx, **call)
        weight = self.weight_ih
        if not isinstance(input, Tensor):
            raise no_tensor(input, "a tensor")
        if input.dim() not in (1, 2):
            raise ValueError(f"input: expected 1 dimension (unbatched) or 2 (batched), got {input.dim()}")
        if input.shape[-1] != self.input_size:
            raise ValueError(
                f"input: expected {self.input_size} features in the last dimension (input_size), got {input.shape[-1]}"
            )
        if not has_features(input):
            raise ValueError(f"input: expected floating-point or complex numbers, got {input.dtype}")
        check_parameter(weight)
        check_device("input", input, weight)
        dtype = self._working_dtype(input, hx, weight)
        batched = input.dim() == 2
        x = input if batched else input[None]
        x = x if x.dtype == dtype else x.to(dtype)
        h, c = self._state(hx, x, batched)
        noise = self._call_noise(rates, x.device)
        at, key = self._step(seed, step, noise), self._seed(seed, x, noise)
        draws = self._draws(noise, 0, 0, key, self.layer)
        weights = Weights(weight, self.weight_hh, self.bias_ih, self.bias_hh, None)
        alike = self._norm is None and all(value is None or value.dtype == dtype for value in weights)
        if self.backend is None and alike and one_step.is_plain(x, (h, c, *weights), draws):
            drawn = examples is not None or any(draw.seed is not None for draw in draws)
            ids = example_ids(examples, x.shape[0], x.device) if drawn else None
            self._check_weights(weights, self.input_size, x.device, "")
            h, c = one_step.step(self._cell_name(), x, h, c, weights[:4], draws, ids, at)
        else:
            ids = example_ids(examples, x.shape[0], x.device)
            (result,) = self._run({"": self._made(self._cell_name(), x[None], h, c, "", draws, ids, at, dtype)})
            h, c = result.h, result.c
        states = [s if batched else s[0] for s in (h, c) if s is not None]
        return tuple(states) if self.kind == "lstm" else states[0]

    def _cell_name(self) -> str:
        return self.kind

    def _state(self, hx: State | None, x: Tensor, batched: bool) -> tuple[Tensor, Tensor | None]:
        lstm, shape = self.kind == "lstm", (x.shape[0], self.hidden_size)
        if hx is None:
            zero = x.new_zeros(shape)
            return zero, zero if lstm else None
        states = []
        given = as_states(hx, lstm)
        for name, state in zip(("hx[0]", "hx[1]") if lstm else ("hx",), given, strict=True):
            expected = shape if batched else shape[1:]
            if tuple(state.shape) != expected:
                raise ValueError(f"{name}: expected shape {expected}, got {tuple(state.shape)}")
            check_device(name, state, x)
            check_state_dtype(name, state, x)
            state = state if batched else state[None]
            states.append(state if state.dtype == x.dtype else state.to(x.dtype))
        return states[0], states[1] if lstm else None

    def _step(self, seed: int | Tensor | None, step: int | None, noise: CallNoise) -> int:
        """The step coordinate, which may be left out only where no draw and no statistic depends on it."""
        if step is not None:
            return check_count("step", step, 2**32)
        needs = [rule for rule in drawn_rules(noise.rules, self.training) if sees_step(rule)]
        if any(seed is not None or rule.mask == "static" for rule in needs):
            raise ValueError(
                "step: expected the number of this step, since the masks are drawn from a fixed seed; "
                "without it every step would replace the same units"
            )
        if isinstance(self.norm, RecurrentBatchNorm):
            raise ValueError("step: expected the number of this step, since batch norm keeps each apart")
        return 0

    def _seed(self, seed: int | Tensor | None, x: Tensor, noise: CallNoise) -> Tensor | None:
        if seed is not None:
            return as_seed(seed, x.device, copy=True)
        drawn = [rule for rule in drawn_rules(noise.rules, self.training) if rule.mask != "static"]
        for rule in drawn:
            if not sees_step(rule):
                raise ValueError(
                    f"seed: expected a seed, since the {rule.stream} noise is drawn once for a whole "
                    "sequence and a cell sees one step of it; pass the same seed at every step"
                )
        return fresh_seed(x) if drawn else None


class LSTMCell(RecurrentCell):
    """`nn.LSTMCell` with noise. `layer` says which layer of a stack this is, for its draws.

    >>> import torch, zoneout as zo
    >>> cell = zo.LSTMCell(10, 20, noise=zo.Zoneout(cell=0.1, hidden=0.1))
    >>> state = (torch.zeros(4, 20), torch.zeros(4, 20))
    >>> for t, x in enumerate(torch.randn(5, 4, 10)):
    ...     state = cell(x, state, seed=7, step=t)
    """

    kind = "lstm"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        noise: Noises = None,
        norm: Norm = None,
        layer: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device, dtype, noise, norm, layer, backend)


class GRUCell(RecurrentCell):
    """`nn.GRUCell` with noise; see `LSTMCell`.

    >>> import torch, zoneout as zo
    >>> cell = zo.GRUCell(10, 20, noise=zo.Zoneout(hidden=0.1))
    >>> h = cell(torch.randn(4, 10))
    """

    kind = "gru"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        noise: Noises = None,
        norm: Norm = None,
        layer: int = 0,
        backend: str | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device, dtype, noise, norm, layer, backend)


class RNNCell(RecurrentCell):
    """`nn.RNNCell` with noise; see `LSTMCell`.

    >>> import torch, zoneout as zo
    >>> cell = zo.RNNCell(10, 20, nonlinearity="relu", noise=zo.Zoneout(hidden=0.1))
    >>> h = cell(torch.randn(4, 10))
    """

    kind = "rnn"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        noise: Noises = None,
        norm: Norm = None,
        layer: int = 0,
        backend: str | None = None,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"nonlinearity: expected 'tanh' or 'relu', got {nonlinearity!r}")
        self.nonlinearity = nonlinearity
        super().__init__(input_size, hidden_size, bias, device, dtype, noise, norm, layer, backend)

    def _cell_name(self) -> str:
        return f"rnn_{self.nonlinearity}"
