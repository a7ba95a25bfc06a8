"""Rates: a number, one per layer or one per unit, and the checks of what a caller passes.

A rate is always the probability that the previous value (or zero) is used: z in the zoneout paper.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any, SupportsFloat, TypeAlias

import torch
from torch import Tensor

from .torch_state import plain_eager

Rate: TypeAlias = "float | Tensor | Sequence[float | Tensor]"


def check_rate(rate: Rate, name: str, limit: float = 1.0, in_call: bool = False) -> Rate:
    """Return a rate as a float, a float64 tensor, or a tuple of these with one per layer; or raise.

    In a compiler a tensor stays on its device. So does a tensor of a call (`in_call`) whose values
    cannot be read immediately, on a GPU or under torch.func. Their values are not checked but
    clamped to the valid range.
    """
    if type(rate) is float:  # first: the tests below do not work for the floats of a compiler
        _check_range(rate, name, limit)
        if limit == 1:
            warn_if_rounded(rate, name)
        return rate
    if not isinstance(rate, Tensor) and getattr(rate, "ndim", 0) and hasattr(rate, "__array__"):  # type: ignore[arg-type]
        rate = torch.as_tensor(rate, device="cpu")
    if isinstance(rate, Tensor):
        if rate.is_complex() or rate.dtype == torch.bool or rate.dim() > 1 or rate.numel() == 0:
            raise ValueError(
                f"{name}: expected a tensor with one rate a unit, got {rate.dtype} of shape "
                f"{tuple(rate.shape)}"
            )
        if rate.requires_grad:
            raise ValueError(
                f"{name}: expected rates that are not learned, since their values are copied, "
                "got a tensor with requires_grad; pass rate.detach()"
            )
        if rate.is_meta:
            raise ValueError(
                f"{name}: expected numbers, got a tensor on the meta device, which has no values"
            )
        if torch.compiler.is_compiling() or (in_call and not readable(rate)):
            return rate.to(torch.float32 if rate.device.type == "mps" else torch.float64).clamp(
                0, limit
            )
        rate = rate.to("cpu", torch.float64, copy=True)
        if rate.dim() == 0:
            return check_rate(rate.item(), name, limit, in_call)
        _check_range(rate.min().item(), name, limit)
        _check_range(rate.max().item(), name, limit)
        rounded = rate[(in_65536ths(rate) % 65536 == 0) & (rate % 1 != 0)]
        if limit == 1 and len(rounded):
            warn_if_rounded(rounded[0].item(), name)
        return rate
    if isinstance(rate, (list, tuple)):
        if not rate:
            raise ValueError(f"{name}: expected one rate a layer, got an empty list")
        if any(isinstance(one, (list, tuple)) for one in rate):
            raise TypeError(f"{name}: expected one rate a layer, got a list inside a list")
        return tuple(check_rate(one, name, limit, in_call) for one in rate)  # type: ignore[misc]
    if isinstance(rate, (bool, str)) or not isinstance(rate, SupportsFloat):  # NumPy scalars pass
        raise TypeError(
            f"{name}: expected a number, a list with one rate per layer or a tensor with one rate "
            f"per unit, got {type(rate).__name__}"
        )
    return check_rate(float(rate), name, limit, in_call)


def readable(x: Tensor) -> bool:
    """Return True if a tensor's values can be read without waiting: on the CPU, in eager mode."""
    return x.device.type == "cpu" and plain_eager()


def _check_range(value: float, name: str, limit: float) -> None:
    """Raise if a rate is not in [0, limit], or a standard deviation not in [0, ∞)."""
    if limit == math.inf:
        if not 0 <= value < limit:
            raise ValueError(
                f"{name}: expected a standard deviation, finite and not negative, got {value}"
            )
    elif not 0 <= value <= limit:
        raise ValueError(f"{name}: expected a rate between 0 and 1, got {value}")


def warn_if_rounded(rate: float, name: str) -> None:
    """Warn if a rate is drawn as 0 or 1 although it is neither."""
    if torch.compiler.is_compiling() or rate in (0, 1) or round(rate * 65536) not in (0, 65536):
        return
    warnings.warn(
        f"{name}: {rate} rounds to {round(rate)}, since rates are drawn in steps of 1/65536: in "
        f"training the old value (or zero) is {'always' if rate > 0.5 else 'never'} used; expected "
        f"{round(rate)}, or a rate from 1/65536 to 1 − 1/65536",
        stacklevel=outside(),
    )


def outside() -> int:
    """Return the `stacklevel` of the first caller outside of zoneout and torch.

    It is meant for `warnings.warn` in the function that calls this one.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        __package__,
        "torch",
    ):
        level, frame = level + 1, frame.f_back
    return level


def in_65536ths(rate: Tensor) -> Tensor:
    """Return a rate in units of 1/65536, rounded: the resolution of a draw with 16 random bits."""
    return (rate * 65536).round()


def check_periods(periods: Any, name: str) -> Any:
    """Return periods as an int, an int64 tensor, or a tuple of these with one per layer; or raise.

    A tensor has one per unit.
    """
    if isinstance(periods, (list, tuple)) and periods:
        if any(isinstance(one, (list, tuple)) for one in periods):
            raise TypeError(f"{name}: expected one period a layer, got a list inside a list")
        return tuple(check_periods(one, name) for one in periods)
    if isinstance(periods, Tensor):
        if periods.is_floating_point() or periods.dtype == torch.bool or periods.dim() != 1:
            raise ValueError(
                f"{name}: expected a tensor with one whole number a unit, got {periods.dtype} of "
                f"shape {tuple(periods.shape)}"
            )
        periods = periods.to("cpu", torch.int64, copy=True)
        least = int(periods.min()) if periods.numel() else 0
    elif isinstance(periods, int) and not isinstance(periods, bool):
        least = periods
    else:
        raise TypeError(
            f"{name}: expected a whole number, a list with one per layer or a tensor with one per "
            f"unit, got {periods!r}"
        )
    if least < 1:
        raise ValueError(f"{name}: expected periods of at least 1, got {least}")
    return periods


def is_zero(rate: Rate) -> bool:
    """Return True if a rate is the number 0, so that its stream is disabled.

    A tensor of rates never counts as 0, because its values may change during training.
    """
    if isinstance(rate, tuple):
        return all(is_zero(one) for one in rate)
    return not isinstance(rate, Tensor) and rate == 0


def rate_of_layer(rate: Rate, layer: int, layers: int, units: int | None, name: str) -> Tensor:
    """Return the rate of one layer as a float64 tensor, a scalar or [units].

    `units` is the number of units of the stream, or None for noise on weights.
    """
    if isinstance(rate, tuple):
        if len(rate) != layers:
            raise ValueError(
                f"{name}: expected one rate for each of {layers} layers, got {len(rate)}"
            )
        rate = rate[layer]
    if isinstance(rate, Tensor) and rate.dim() == 0:
        return rate
    if isinstance(rate, Tensor) and units is None:
        raise ValueError(
            f"{name}: expected a number or a list with one rate per layer, got a tensor"
        )
    if isinstance(rate, Tensor) and len(rate) != units:
        raise ValueError(f"{name}: expected one rate for each of {units} units, got {len(rate)}")
    if isinstance(rate, Tensor):
        return rate.to(torch.float64)
    return torch.tensor(rate, dtype=torch.float64, device="cpu")
