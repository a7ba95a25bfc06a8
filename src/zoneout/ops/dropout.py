"""Dropout whose mask is a function of its coordinates.

It drops units of a sequence (between layers or around them), or of weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..draws import Draw, constant
from ..streams import MASKS, Rule
from . import cuda
from .cpu.masks import bits_of, masks_of
from .cuda.pointwise.dropout import dropout as fused
from .cuda.pointwise.dropout import random_bits
from .reference import kept_scale
from .sequence.rows import places

_RULE = Rule("dropout", "scaled zero", "unit", "expectation")


def dropout(
    x: Tensor,
    rate: float,
    seed: Tensor,
    plane: int,
    examples: Tensor,
    first_step: int = 0,
    counts: Tensor | None = None,
    mask: str = "unit",
) -> Tensor:
    """Return x, [T, B, units], with units dropped at a rate and the others scaled up.

    `plane` identifies the owner of the mask. For packed rows, [N, units], `counts` is the number of
    rows of each step.
    """
    return drop_units(
        x, constant(_RULE._replace(mask=mask), rate, seed, plane), examples, first_step, counts
    )


def drop_units(
    x: Tensor, draw: Draw, examples: Tensor, first_step: int = 0, counts: Tensor | None = None
) -> Tensor:
    """Return x with units dropped by any draw; its mask may depend on fewer coordinates."""
    if cuda.has_kernel(x):
        rule = draw.rule
        return torch.ops.zoneout.dropout(
            x, rule.stream, rule.mask, draw.rate, draw.seed, draw.plane, examples, first_step
        )
    mask = drawn_units(draw, x.shape[-1], examples, first_step, x.shape[0], counts)
    return x * kept_scale(draw, mask, x.dtype)


def drawn_units(
    draw: Draw,
    units: int,
    examples: Tensor,
    first_step: int,
    steps: int,
    counts: Tensor | None = None,
    limits: Tensor | None = None,
) -> Tensor:
    """Return the mask of a draw, [T, B, units] or, for packed rows, [N, units].

    A size may be 1 where the mask does not depend on a coordinate. For packed rows, `steps` is
    their number N. `limits` replaces the rate of the draw: for padded rows, in units of 1/65536 and
    for each step and row.
    """
    if limits is not None:
        return random_units(draw, units, examples, first_step, steps) < limits
    if counts is None and cuda.draws_bits(examples):
        return random_units(draw, units, examples, first_step, steps) < draw.threshold
    if counts is None:
        at = torch.arange(first_step, first_step + steps, device=examples.device)
        return masks_of([draw], at, examples, units)[0]
    t, row = places(counts, steps)
    if not MASKS[draw.rule.mask].step:  # one mask for all steps: draw it once, then index it
        (mask,) = masks_of([draw], examples.new_zeros(1), examples, units)
        return mask[0].expand(len(examples), -1)[row]
    (mask,) = masks_of([draw], first_step + t, examples[row, None], units)
    return mask.reshape(len(row), -1)


def random_units(draw: Draw, units: int, examples: Tensor, first_step: int, steps: int) -> Tensor:
    """Return the 16 random bits that rates are compared with, [T, B, units]."""
    if cuda.draws_bits(examples):
        rule, place = draw.rule, (first_step, steps, units)
        return torch.ops.zoneout.random_bits(
            examples, rule.stream, rule.mask, draw.rate, draw.seed, draw.plane, *place
        )
    at = torch.arange(first_step, first_step + steps, device=examples.device)
    return bits_of(draw, at, examples, units)


@torch.library.custom_op("zoneout::random_bits", mutates_args=(), device_types="cuda")
def _random_bits(
    examples: Tensor,
    stream: str,
    mask: str,
    rate: Tensor,
    seed: Tensor,
    plane: int,
    first_step: int,
    steps: int,
    units: int,
) -> Tensor:
    draw = Draw(_RULE._replace(stream=stream, mask=mask), rate, seed, plane)
    return random_bits(draw, examples, first_step, steps, units)


@_random_bits.register_fake
def _(examples: Tensor, *arguments: Any) -> Tensor:
    *_, steps, units = arguments
    return examples.new_empty(steps, len(examples), units, dtype=torch.int32)


@torch.library.custom_op("zoneout::dropout", mutates_args=(), device_types="cuda")
def _dropout(
    x: Tensor,
    stream: str,
    mask: str,
    rate: Tensor,
    seed: Tensor,
    plane: int,
    examples: Tensor,
    first_step: int,
) -> Tensor:
    return fused(
        x, Draw(_RULE._replace(stream=stream, mask=mask), rate, seed, plane), examples, first_step
    )


@_dropout.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.stream, ctx.mask, rate, seed, ctx.plane, examples, ctx.first_step = inputs
    ctx.save_for_backward(rate, seed, examples)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    rate, seed, examples = ctx.saved_tensors
    arguments = (dy, ctx.stream, ctx.mask, rate, seed, ctx.plane, examples, ctx.first_step)
    return torch.ops.zoneout.dropout(*arguments), *[None] * 7


torch.library.register_autograd("zoneout::dropout", _backward, setup_context=_setup)
