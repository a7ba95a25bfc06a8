"""Masks that are computed before the loop over time, and given to it as numbers.

The loop draws all other masks itself. A mask is given where its rate changes from step to step
(`rates=` in a call), where it follows from a clock, and for the two masks of swapout. A given mask
may have a gradient: then the rate it comes from is learned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .draws import Draw, off_beat
from .ops import places
from .ops.dropout import drawn_units
from .rates import in_65536ths, readable
from .streams import DROPS, OPTIONAL, STATE_STREAMS, UNTIED, Rule

# A rate for each step and row, [T, B, units] where any size may be 1; or a function that computes
# it from the input of the layer, [T, B, input].
StepRate: TypeAlias = "Tensor | Callable[[Tensor], Tensor]"

# The streams that may have such rates.
STREAMS = (*STATE_STREAMS, "update", *(s for s in OPTIONAL if s not in UNTIED))


class At(NamedTuple):
    """Where masks are needed: the coordinates of a layer's rows."""

    shape: torch.Size  # [T, B], or [N] of packed rows
    examples: Tensor  # [B]
    first_step: int
    counts: Tensor | None = None  # packed: [T], the number of rows of each step


def is_step_rate(rate: Any) -> bool:
    """Return True for a rate that may change from step to step, or has a gradient."""
    if isinstance(rate, Tensor):
        return rate.dim() > 1 or rate.requires_grad
    return callable(rate)


def is_given(rule: Rule) -> bool:
    """Return True if a mask is computed before the loop, even if its rate is fixed."""
    return rule.mask == "clock" or rule.by == "added" or rule.stream in DROPS


def mask_of(draw: Draw, units: int, at: At, dtype: torch.dtype) -> Tensor:
    """Return the mask of a draw whose rate is fixed, [T, B, units]; packed: [N, units]."""
    if draw.rule.mask == "clock":
        mask = off_beat(draw.rate, _steps(at))
    elif draw.seed is None:
        mask = draw.rate
    else:
        mask = drawn_units(draw, units, at.examples, at.first_step, at.shape[0], at.counts)
    return mask.to(dtype).expand(*at.shape, units)


def _steps(at: At) -> Tensor:
    """Return the step of each row, [T, 1, 1]; packed: [N, 1]."""
    if at.counts is not None:
        return at.first_step + places(at.counts, at.shape[0])[0][:, None]
    first = at.first_step
    return torch.arange(first, first + at.shape[0], device=at.examples.device)[:, None, None]


def mask_of_rate(
    draw: Draw, rate: StepRate, x: Tensor, units: int, at: At, dtype: torch.dtype, name: str
) -> Tensor:
    """Return the mask of a rate that changes from step to step, [T, B, units].

    Where the mask is the rate itself, its gradient is exact. A drawn mask passes its gradient on to
    the rate as if it were the rate (straight-through).
    """
    if not isinstance(rate, Tensor):
        rate = rate(x)
        if not isinstance(rate, Tensor):
            raise TypeError(f"{name}: expected a function that returns a tensor, got {rate!r}")
    rate = _check(rate, (*at.shape, units), x.device, name).to(dtype)
    if draw.seed is None:
        return rate.expand(*at.shape, units)
    limits = in_65536ths(rate.detach()).to(torch.int64)
    drawn = drawn_units(draw, units, at.examples, at.first_step, at.shape[0], None, limits)
    mask = drawn.to(dtype).expand(*at.shape, units)
    if rate.requires_grad or torch.autograd.forward_ad._current_level >= 0:
        mask = mask + (rate - rate.detach())  # exactly the mask, with the gradient of the rate
    return mask


def _check(rate: Tensor, shape: tuple[int, ...], device: torch.device, name: str) -> Tensor:
    """Return a rate with as many dimensions as `shape`; raise if it does not fit or is no rate."""
    if not rate.is_floating_point() and rate.dtype != torch.bool:
        raise ValueError(f"{name}: expected floating-point numbers or a mask, got {rate.dtype}")
    if rate.dim() < len(shape):
        rate = rate.view(*(1,) * (len(shape) - rate.dim()), *rate.shape)
    if rate.dim() > len(shape) or any(n not in (1, m) for n, m in zip(rate.shape, shape)):
        raise ValueError(
            f"{name}: expected a tensor [T, B, units] = {shape}, or with 1 in place of a size, got "
            f"shape {tuple(rate.shape)}"
        )
    if rate.device != device:
        raise ValueError(
            f"{name}: expected a tensor on {device}, as the input is, got {rate.device}"
        )
    if rate.dtype == torch.bool:
        return rate.to(torch.get_default_dtype())
    if not readable(rate):
        return rate.clamp(0, 1)
    low, high = (float(v) for v in torch.aminmax(rate.detach())) if rate.numel() else (0.0, 0.0)
    if not (low >= 0 and high <= 1):
        raise ValueError(f"{name}: expected rates between 0 and 1, got {low} to {high}")
    return rate
