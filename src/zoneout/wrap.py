"""Zoneout outside of zoneout's layers: the rule as a function, and a wrapper for any cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from .cells import zone
from .draws import Draw, check_count, example_ids, widest
from .noisy import Settable
from .ops import masks_of
from .overrides import overriding
from .philox import as_seed, fresh_seed
from .rates import check_rate, rate_of_layer
from .streams import STATE_STREAMS, STREAMS, Rule, plane

# The fifth and later states of a wrapped cell draw from groups 10, 11, …: this + index // 2.
_MORE_STATES = 8


def zoneout(
    new: Tensor,
    old: Tensor,
    rate: float | Tensor,
    training: bool = True,
    *,
    seed: int | Tensor | None = None,
    step: int = 0,
    examples: int | Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Return `new` with each unit replaced by that of `old` with probability `rate`.

    In evaluation the result is the expectation, (1 − rate) · new + rate · old.

    Args:
        new: the new values, [..., units]. All dimensions but the last are rows.
        old: the old values, in the shape of `new`.
        rate: a number, or a tensor with one rate per unit.
        training: False for the expectation.
        seed: the seed of the mask; by default it is drawn from torch's generator.
        step: the number of the step for the mask.
        examples: the ids of the rows for the mask: an offset, or one id per row.

    Returns:
        A tensor in the shape of `new` and in the wider dtype of `new` and `old`.

    >>> import torch, zoneout as zo
    >>> new, old = torch.ones(4, 1000), torch.zeros(4, 1000)
    >>> zo.zoneout(new, old, rate=0.25, training=False)[0, 0].item()
    0.75
    >>> zo.zoneout(new, old, rate=0.25, seed=7).mean().item() < 0.8
    True
    """
    if overriders := overriding(new, old):
        call: dict[str, Any] = {"seed": seed, "step": step, "examples": examples}
        return handle_torch_function(zoneout, overriders, new, old, rate, training, **call)
    for name, value in (("new", new), ("old", old)):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name}: expected a tensor of floating-point numbers, got {got}")
    wide = torch.promote_types(new.dtype, old.dtype)
    new, old = new.to(wide), old.to(wide)
    if new.shape != old.shape:
        raise ValueError(
            f"old: expected shape {tuple(new.shape)} as new has, got {tuple(old.shape)}"
        )
    if new.dim() == 0:
        raise ValueError("new: expected at least one dimension, the units, got a scalar")
    checked = check_rate(rate, "rate", in_call=True)
    if isinstance(checked, tuple):
        raise TypeError("rate: expected a number, or a tensor with one rate per unit, got a list")
    value = _rate_on(rate_of_layer(checked, 0, 1, new.shape[-1], "rate"), new)
    if not training:
        return zone(new, old, value)
    key = fresh_seed(new) if seed is None else as_seed(seed, new.device)
    steps = torch.full((1,), check_count("step", step, 2**32), device=new.device)
    rows = example_ids(examples, new.shape[:-1].numel(), new.device)
    mask = _mask("hidden", 0, value, key, steps, rows, new.shape[-1])
    return zone(new, old, mask.view(new.shape))


class ZoneoutCell(Settable):
    """Zoneout around any cell, a module (x, state) -> state.

    The state is a tensor or a tuple of tensors. Each is [units] or [B, …], where all values of an
    example are its units. As in an `LSTMCell`, the first state counts as the hidden state and the
    second as the cell state. Around an `nn.LSTMCell`, the wrapper draws the same masks as
    `zoneout.LSTMCell`. Around a cell of up to four states, without groups, they are those of a
    `RecurrentCell` with the same states.

    Args:
        cell: the module to wrap.
        rates: one rate for all states, or a list with one for each state, in the order of the
            tuple. Each is a number or a tensor with one rate per unit.
        layer: the index of the cell in a stack. The wrapper draws the masks of that layer.

    >>> import torch, zoneout as zo
    >>> cell = zo.ZoneoutCell(torch.nn.GRUCell(10, 20), rates=0.1)
    >>> h = torch.zeros(4, 20)
    >>> for t, x in enumerate(torch.randn(5, 4, 10)):
    ...     h = cell(x, h, seed=7, step=t)
    """

    def __init__(
        self, cell: nn.Module, rates: float | Tensor | Sequence[float | Tensor], *, layer: int = 0
    ):
        super().__init__()
        if not callable(cell):
            raise TypeError(
                f"cell: expected a module (x, state) -> state, got {type(cell).__name__}"
            )
        self.cell = cell
        self.layer = check_count("layer", layer, 2**15)
        self.rates = rates

    @property
    def rates(self) -> Any:
        """The rates, as the caller passed them. They may be replaced between training steps."""
        return self._rates

    @rates.setter
    def rates(self, rates: float | Tensor | Sequence[float | Tensor]) -> None:
        checked = check_rate(rates, "rates")
        each = checked if isinstance(checked, tuple) else (checked,)
        # Tensors, so that a compiled model is not compiled again for another rate.
        numbers = tuple(torch.as_tensor(rate, dtype=torch.float64, device="cpu") for rate in each)
        self._checked: Any = numbers if isinstance(checked, tuple) else numbers[0]
        self._rates = rates.detach() if isinstance(rates, nn.Parameter) else rates

    def extra_repr(self) -> str:
        return f"rates={self._rates}"

    def forward(
        self,
        input: Any,
        state: Any = None,
        *,
        seed: int | Tensor | None = None,
        step: int | None = None,
        examples: int | Tensor | Sequence[int] | None = None,
        rates: float | Tensor | Sequence[float | Tensor] | None = None,
    ) -> Any:
        """Run the cell for one step, then apply zoneout to its state.

        Args:
            input: the input of the wrapped cell.
            state: the previous state. With None, the cell receives None, and zeros are the old
                values for zoneout.
            seed: the seed of the masks; by default it is drawn from torch's generator.
            step: the number of this step in its sequence; in training required with a seed.
            examples: the ids of the rows for the masks: an offset, or one id per row.
            rates: rates that replace those of the wrapper in this call.

        Returns:
            The next state, in the form that the wrapped cell returns.
        """
        if overriders := overriding(input, state):
            call: dict[str, Any] = {
                "seed": seed,
                "step": step,
                "examples": examples,
                "rates": rates,
            }
            return handle_torch_function(
                ZoneoutCell.forward, overriders, self, input, state, **call
            )
        checked = self._checked if rates is None else check_rate(rates, "rates", in_call=True)
        new = self.cell(input, state)
        new_states = _as_tuple(new, "the wrapped cell's result")
        old_states = (
            tuple(torch.zeros_like(s) for s in new_states)
            if state is None
            else _as_tuple(state, "state")
        )
        if len(old_states) != len(new_states):
            raise ValueError(
                f"state: expected {len(new_states)} tensors as the wrapped cell returns, got "
                f"{len(old_states)}"
            )
        at = 0 if step is None else check_count("step", step, 2**32)
        if self.training and seed is not None and step is None:
            raise ValueError(
                "step: expected the number of this step, since the masks are drawn from a fixed "
                "seed, got None; without it every step would replace the same units"
            )
        if self.training:
            key = fresh_seed(new_states[0]) if seed is None else as_seed(seed, new_states[0].device)
        out = []
        for k, (fresh, old) in enumerate(zip(new_states, old_states, strict=True)):
            if fresh.shape != old.shape:
                raise ValueError(
                    f"state: expected shape {tuple(fresh.shape)}, got {tuple(old.shape)}"
                )
            if isinstance(checked, tuple) and len(checked) != len(new_states):
                raise ValueError(
                    f"rates: expected one for each of {len(new_states)} states, got {len(checked)}"
                )
            shape = fresh.shape
            if fresh.dim() > 2:
                fresh, old = fresh.flatten(1), old.flatten(1)
            units = fresh.shape[-1]
            rate = rate_of_layer(checked, k, len(new_states), units, "rates")
            if not fresh.is_floating_point():
                if rate.any():
                    raise TypeError(
                        "state: expected floating-point numbers where a rate is not 0, got "
                        f"{fresh.dtype}; pass rates=(…) with one rate for each tensor of the state"
                    )
                out.append(fresh.view(shape))
                continue
            keep = rate = _rate_on(rate, fresh)
            if self.training:
                rows = example_ids(examples, fresh.shape[:-1].numel(), fresh.device)
                steps = torch.full((1,), at, device=fresh.device)
                keep = self._keep(k, rate, key, steps, rows, units).view(fresh.shape)
            out.append(zone(fresh, old, keep).view(shape))
        if isinstance(new, Tensor):
            return out[0]
        return type(new)(*out) if hasattr(new, "_fields") else tuple(out)

    def _keep(
        self, k: int, rate: Tensor, key: Tensor, steps: Tensor, rows: Tensor, units: int
    ) -> Tensor:
        """Return the mask of the state with index `k`."""
        named = k < len(STATE_STREAMS)
        stream = STATE_STREAMS[k if named else k % 2]
        more = 0 if named else 65536 * (_MORE_STATES + k // 2)
        return _mask(stream, plane(stream, self.layer, 0) + more, rate, key, steps, rows, units)


def _mask(
    stream: str, plane: int, rate: Tensor, key: Tensor, steps: Tensor, rows: Tensor, units: int
) -> Tensor:
    """Return the zoneout mask of one step, [rows, units], True where the old value is kept."""
    draw = Draw(Rule(stream, "previous", "unit", "expectation"), rate, key, plane)
    return masks_of([draw], steps, rows, units)[0][0]


def _rate_on(rate: Tensor, like: Tensor) -> Tensor:
    """Return the rate on the device of `like`.

    A single number is written by `torch.full` and not copied, because the capture of a CUDA graph
    does not allow the copy.
    """
    dtype = widest(like.device)
    if (
        rate.dim() == 0
        and rate.device.type == "cpu" != like.device.type
        and not torch.compiler.is_compiling()
    ):
        return torch.full((), rate.item(), dtype=dtype, device=like.device)
    return rate.to(like.device, dtype)


def _as_tuple(state: Any, name: str) -> tuple[Tensor, ...]:
    """Return a state as a tuple of tensors; raise if it is anything else."""
    states = (state,) if isinstance(state, Tensor) else state
    if (
        not isinstance(states, (tuple, list))
        or not states
        or not all(isinstance(s, Tensor) for s in states)
    ):
        inside = (
            f" of {', '.join(type(s).__name__ for s in states)}"
            if isinstance(states, (tuple, list))
            else ""
        )
        raise TypeError(
            f"{name}: expected a tensor or a tuple of tensors, got {type(state).__name__}{inside}"
        )
    return tuple(states)


# Groups from 10 on are those of further states here; streams of products have those from 4096 on.
assert all(s.group <= _MORE_STATES or s.group >= 4096 for s in STREAMS.values())
