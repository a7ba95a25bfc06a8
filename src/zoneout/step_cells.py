"""LSTMCell, GRUCell, RNNCell and RecurrentCell: single steps of the layers, for example for
decoders.

A cell does not count its steps. With `seed`, `step` and `examples` it draws the masks that the
layer would draw at that step. Without a seed, every call draws new masks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from . import cells
from .calls import Noises, Norm, State, StepCall
from .checks import (
    as_states,
    autocast_on,
    check_definition,
    check_device,
    check_heads,
    check_parameter,
    check_sizes,
    check_state_dtype,
    has_features,
    no_tensor,
)
from .definition import Definition
from .draws import Draw, check_count, example_ids
from .fits import sees_step
from .given import At, StepRate, is_given
from .noisy import CallNoise, Rates, drawn_rules
from .norm import RecurrentBatchNorm
from .ops import one_step
from .overrides import overriding
from .philox import as_seed, fresh_seed
from .recurrent import RecurrentModule, add_weights
from .repeated import PLAIN, Prepared, PreparedStep, form_of, prepare, prepare_step, repeated_step
from .torch_state import plain_eager, zeros

MOST_FORMS = 64  # shapes that a cell remembers


class StepCell(RecurrentModule):
    """The base class of all cells: everything but the construction of the parameters."""

    one_step = True
    input_size: int
    bias: bool
    layer: int
    _prepared: dict[tuple[bool, bool], PreparedStep | Prepared | None]  # by mode and `_is_small`
    weight_ih: Tensor

    def suffixes(self) -> list[str]:
        return [""]

    def input_sizes(self) -> list[int]:
        return [self.input_size]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise weights and biases as `torch.nn` does, and norm parameters to constants."""
        bound = 1 / math.sqrt(self.hidden_size) if self.hidden_size > 0 else 0.0  # same as torch
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith(("weight_", "bias_")) or name in self.definition.parameters:
                parameter.uniform_(-bound, bound)
        if hasattr(self, "_norm"):
            self._reset_parts()

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
        """Run one step.

        Args:
            input: [B, input_size], or [input_size] unbatched.
            hx: the previous state: h, or a tuple such as (h, c) for a cell with several states,
                each [B, hidden_size] or [hidden_size] unbatched; by default zero.
            seed: the seed of the masks; by default it is drawn from torch's generator. Noise that
                is drawn once for a whole sequence needs the same seed at every step.
            step: the number of this step in its sequence. It is required with batch norm, with a
                static mask, and with a seed if the noise draws a new mask at every step.
            examples: the ids of the rows for the masks: an offset, or one id per row.
            rates: rates that replace those of the cell's noise in this call, as in a layer. Those
                of a single step are [B, units], or [units] unbatched; a function computes them
                from the input.

        Returns:
            The next state, h or a tuple such as (h, c), in the shapes of `hx`.
        """
        plain = examples is None and rates is None and hx is not None and plain_eager()
        new = repeated_step(self, input, hx, seed, step) if plain else None
        if new is not None:
            return tuple(new) if len(new) > 1 else new[0]
        if overriders := overriding(input, hx):
            call: dict[str, Any] = {
                "seed": seed,
                "step": step,
                "examples": examples,
                "rates": rates,
            }
            return handle_torch_function(StepCell.forward, overriders, self, input, hx, **call)
        weight = self.weight_ih
        if not isinstance(input, Tensor):
            raise no_tensor(input, "a tensor")
        if input.dim() not in (1, 2):
            raise ValueError(
                f"input: expected 1 dimension (unbatched) or 2 (batched), got {input.dim()}"
            )
        if input.shape[-1] != self.input_size:
            raise ValueError(
                f"input: expected {self.input_size} features in the last dimension (input_size), "
                f"got {input.shape[-1]}"
            )
        if not has_features(input):
            raise ValueError(
                f"input: expected floating-point or complex numbers, got {input.dtype}"
            )
        check_parameter(weight)
        check_device("input", input, weight)
        dtype = self._working_dtype(input, hx, weight)
        batched = input.dim() == 2
        x = input if batched else input[None]
        x = x if x.dtype == dtype else x.to(dtype)
        states = self._states(hx, x, batched)
        noise = self._call_noise(rates, x.device)
        at, key = self._step(seed, step, noise), self._seed(seed, x, noise)
        draws = self._draws(noise, 0, 0, key, self.layer)
        if noise.steps or any(is_given(draw.rule) for draw in draws):
            ids = example_ids(examples, x.shape[0], x.device)
            noise = noise._replace(steps=_of_one_step(noise.steps, x, batched))
            where = At(torch.Size((1, x.shape[0])), ids, at)
            draws = self._give_masks(draws, x[None], 0, where, dtype, noise)
        new = self._plain_step(x, states, draws, examples, at, dtype)
        if new is not None and plain and batched:
            self._prepare(input, states, draws)
        if new is None:
            ids = example_ids(examples, x.shape[0], x.device)
            runs = {"": self._build_run(x[None], states, "", draws, ids, at, dtype)}
            (result,) = self._run(runs)
            new = result.final
            plain = plain and batched and not autocast_on(x.device)
            if plain and (form := (self.training, self._is_small(len(x)))) not in self._prepared:
                self._prepared[form] = prepare(self, runs)
        new = [state if batched else state[0] for state in new]
        return tuple(new) if len(new) > 1 else new[0]

    def _prepare(self, x: Tensor, states: list[Tensor], draws: list[Draw]) -> None:
        """Remember a plain step that was checked, so that a later one is repeated."""
        form = self.training, True
        prepared = self._prepared.get(form)
        if not isinstance(prepared, PreparedStep):
            prepared = self._prepared[form] = prepare_step(self, draws)
        if prepared is not None:
            if len(prepared.checked) >= MOST_FORMS:
                prepared.checked.clear()
            weights = [getattr(self, name, None) for name in PLAIN]
            prepared.checked.add(form_of(x, states, weights))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; what was prepared for calls depends on all but the mode."""
        if name != "training":
            self.__dict__["_prepared"] = {}
        super().__setattr__(name, value)

    def _plain_step(
        self,
        x: Tensor,
        states: list[Tensor],
        draws: list[Draw],
        examples: Any,
        at: int,
        dtype: torch.dtype,
    ) -> Sequence[Tensor] | None:
        """Return the states after a step that torch's own cell can do; None if it cannot."""
        if self.backend is not None or self._norm is not None or self.definition.parameters:
            return None
        weights = [getattr(self, name, None) for name in PLAIN]
        if any(value is not None and value.dtype != dtype for value in weights):
            return None
        if not one_step.is_plain(self.definition, x, (*states, *weights), draws):
            return None
        if not self._is_small(len(x)):
            return None
        drawn = examples is not None or any(draw.seed is not None for draw in draws)
        ids = example_ids(examples, x.shape[0], x.device) if drawn else None
        self._weights("", dtype, x.device)  # raises if a shape is wrong
        return one_step.step(self.definition, x, states, weights, draws, ids, at)

    def _is_small(self, rows: int) -> bool:
        """Return True if a step of these rows is not one for the C loop."""
        gates = self.definition.gates
        return one_step.is_small(rows, self.input_size, self.hidden_size, gates)

    def _states(self, hx: State | None, x: Tensor, batched: bool) -> list[Tensor]:
        """Check `hx` and return the states as [B, hidden_size]; zeros if `hx` is None."""
        shape = (x.shape[0], self.hidden_size)
        if hx is None:
            return [zeros(x, shape, x.dtype)] * len(self.definition.states)
        states = []
        for name, state in as_states(hx, self.definition):
            expected = shape if batched else shape[1:]
            if tuple(state.shape) != expected:
                raise ValueError(f"{name}: expected shape {expected}, got {tuple(state.shape)}")
            check_device(name, state, x)
            check_state_dtype(name, state, x)
            state = state if batched else state[None]
            states.append(state if state.dtype == x.dtype else state.to(x.dtype))
        return states

    def _step(self, seed: int | Tensor | None, step: int | None, noise: CallNoise) -> int:
        """Return the step coordinate; raise if it is missing and a mask or statistic needs it."""
        if step is not None:
            return check_count("step", step, 2**32)
        needs = [rule for rule in drawn_rules(noise.rules, self.training) if sees_step(rule)]
        if any(rule.mask == "clock" for rule in noise.rules):
            raise ValueError(
                "step: expected the number of this step, since a clock tells which units it "
                "updates, got None"
            )
        if any(seed is not None or rule.mask == "static" for rule in needs):
            raise ValueError(
                "step: expected the number of this step, since the masks are drawn from a fixed "
                "seed, got None; without it every step would replace the same units"
            )
        if isinstance(self.norm, RecurrentBatchNorm):
            raise ValueError(
                "step: expected the number of this step, since batch norm has statistics for each "
                "step, got None"
            )
        return 0

    def _seed(self, seed: int | Tensor | None, x: Tensor, noise: CallNoise) -> Tensor | None:
        """Return the seed of this call, None if nothing is drawn; raise if a seed is required."""
        if seed is not None:
            return as_seed(seed, x.device, copy=True)
        drawn = [rule for rule in drawn_rules(noise.rules, self.training) if rule.mask != "static"]
        for rule in drawn:
            if not sees_step(rule):
                raise ValueError(
                    f"seed: expected a seed, since the {rule.stream} noise is drawn once for a "
                    "whole sequence and a cell runs one step of it, got None; pass the same seed "
                    "at every step"
                )
        return fresh_seed(x) if drawn else None


def _of_one_step(
    rates: Mapping[str, tuple[StepRate, str]], x: Tensor, batched: bool
) -> dict[str, tuple[StepRate, str]]:
    """Return the rates of a step as [1, B, units]; x is [B, input]."""

    def of_step(rate: StepRate, name: str) -> Tensor:
        rate = rate if isinstance(rate, Tensor) else rate(x if batched else x[0])
        if not isinstance(rate, Tensor) or rate.dim() > 1 + batched:
            got = f"shape {tuple(rate.shape)}" if isinstance(rate, Tensor) else repr(rate)
            shape = "[B, units]" if batched else "[units]"
            raise ValueError(f"{name}: expected a tensor {shape}, got {got}")
        return rate

    return {key: (of_step(rate, name), name) for key, (rate, name) in rates.items()}


class TorchCell(StepCell, nn.RNNCellBase):
    """The base class of `LSTMCell`, `GRUCell` and `RNNCell`: torch's names around a definition."""

    kind: str  # "lstm", "gru" or "rnn"
    family: Definition  # the cell, or one with the same states and marks

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
        sizes = {"input_size": input_size, "hidden_size": hidden_size}
        check_sizes(sizes, least={"input_size": 0, "hidden_size": 0})
        self.layer = check_count("layer", layer, 2**15)
        super().__init__(input_size, hidden_size, bias, self.definition.gates, device, dtype)
        self._add_parts(noise, norm, backend)

    @property
    def torch_name(self) -> str:
        return self.kind.upper()

    def extra_repr(self) -> str:
        return (
            super().extra_repr() + self._extra() + (f", layer={self.layer}" if self.layer else "")
        )


class LSTMCell(TorchCell):
    """`nn.LSTMCell` with noise: the same arguments, inputs, outputs and `state_dict`.

    The keyword arguments from `noise` on are additional. `forward` has the arguments of the call.

    Args:
        input_size: the number of features of the input.
        hidden_size: the number of units, H.
        bias: False leaves out both biases.
        device, dtype: of the parameters.
        noise: a noise, a list of noises, or None.
        norm: `"layer"`, a `RecurrentBatchNorm`, or None.
        layer: the index of this cell in a stack. A cell draws the masks of that layer.
        backend: the implementation to use; by default the device of the input decides.

    >>> import torch, zoneout as zo
    >>> cell = zo.LSTMCell(10, 20, noise=zo.Zoneout(cell=0.1, hidden=0.1))
    >>> state = (torch.zeros(4, 20), torch.zeros(4, 20))
    >>> for t, x in enumerate(torch.randn(5, 4, 10)):
    ...     state = cell(x, state, seed=7, step=t)
    """

    kind = "lstm"
    family = definition = cells.lstm
    keeps_state_type = True

    if TYPE_CHECKING:

        def __call__(
            self, input: Tensor, hx: tuple[Tensor, ...] | None = None, **call: Unpack[StepCall]
        ) -> tuple[Tensor, Tensor]: ...

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


class GRUCell(TorchCell):
    """`nn.GRUCell` with noise: the same arguments, inputs, outputs and `state_dict`.

    The keyword arguments from `noise` on are additional. `forward` has the arguments of the call.

    Args:
        input_size: the number of features of the input.
        hidden_size: the number of units, H.
        bias: False leaves out both biases.
        device, dtype: of the parameters.
        noise: a noise, a list of noises, or None.
        norm: `"layer"`, a `RecurrentBatchNorm`, or None.
        layer: the index of this cell in a stack. A cell draws the masks of that layer.
        backend: the implementation to use; by default the device of the input decides.

    >>> import torch, zoneout as zo
    >>> cell = zo.GRUCell(10, 20, noise=zo.Zoneout(hidden=0.1))
    >>> h = cell(torch.randn(4, 10))
    """

    kind = "gru"
    family = definition = cells.gru
    keeps_state_type = True

    if TYPE_CHECKING:

        def __call__(
            self, input: Tensor, hx: Tensor | None = None, **call: Unpack[StepCall]
        ) -> Tensor: ...

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


class RNNCell(TorchCell):
    """`nn.RNNCell` with noise: the same arguments, inputs, outputs and `state_dict`.

    The keyword arguments from `noise` on are additional. `forward` has the arguments of the call.

    Args:
        input_size: the number of features of the input.
        hidden_size: the number of units, H.
        nonlinearity: `"tanh"` or `"relu"`.
        bias: False leaves out both biases.
        device, dtype: of the parameters.
        noise: a noise, a list of noises, or None.
        norm: `"layer"`, a `RecurrentBatchNorm`, or None.
        layer: the index of this cell in a stack. A cell draws the masks of that layer.
        backend: the implementation to use; by default the device of the input decides.

    >>> import torch, zoneout as zo
    >>> cell = zo.RNNCell(10, 20, nonlinearity="relu", noise=zo.Zoneout(hidden=0.1))
    >>> h = cell(torch.randn(4, 10))
    """

    kind = "rnn"
    family = cells.rnn_tanh

    if TYPE_CHECKING:

        def __call__(
            self, input: Tensor, hx: Tensor | None = None, **call: Unpack[StepCall]
        ) -> Tensor: ...

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

    @property
    def definition(self) -> Definition:  # type: ignore[override]
        return cells.rnn_relu if self.nonlinearity == "relu" else cells.rnn_tanh


class RecurrentCell(StepCell):
    """One step of any cell that is written as an equation (`zo.cell`).

    The parameters are those of a `Recurrent` layer without the suffix `_l0`.

    Args:
        cell: the definition of the cell.
        input_size, hidden_size, bias, device, dtype: as in `LSTMCell`.
        noise, norm, layer, backend: as in `LSTMCell`.

    >>> import torch, zoneout as zo
    >>> @zo.cell(gates=1, recurrence="diagonal")
    ... def indrnn(x, h, u):
    ...     return (x[0] + u * h).relu()
    >>> step = zo.RecurrentCell(indrnn, 10, 20, noise=zo.Zoneout(hidden=0.1))
    >>> h = step(torch.randn(4, 10))
    """

    def __init__(
        self,
        cell: Definition,
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
        check_definition(cell)
        sizes = {"input_size": input_size, "hidden_size": hidden_size}
        check_sizes(sizes, least={"input_size": 0, "hidden_size": 1})
        check_heads(cell, hidden_size)
        super().__init__()
        self.layer = check_count("layer", layer, 2**15)
        self.definition = cell
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        add_weights(self, input_size, "", device, dtype)
        self.reset_parameters()
        self._add_parts(noise, norm, backend)

    def extra_repr(self) -> str:
        shown = f"{self.definition.name}, {self.input_size}, {self.hidden_size}"
        shown += "" if self.bias else ", bias=False"
        return shown + self._extra() + (f", layer={self.layer}" if self.layer else "")
