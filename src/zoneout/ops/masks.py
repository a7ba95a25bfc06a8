"""Masks by themselves, drawn in C where that can be: a cell that takes one step has little else to wait for."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ..draws import Draw, draw_masks, seen
from . import native
from .loop import sees
from .memory import address, are_memory
from .modes import plain_eager


def masks_of(draws: Sequence[Draw], steps: Tensor, examples: Tensor, units: int) -> list[Tensor]:
    """The same as `draw_masks`."""
    given = (steps, examples, *(v for draw in draws for v in (draw.rate, draw.seed)))
    library = native.load() if steps.is_cpu and plain_eager() and are_memory(given) else None
    if library is None:
        return draw_masks(draws, steps, examples, units)
    steps, examples, width = seen(draws, steps, examples, units)
    batch, each = examples.shape[-1], 0
    if examples.dim() == 2:  # each step has its own
        steps, each = steps.expand(len(examples)), batch
    steps, examples = steps.contiguous(), examples.contiguous()
    steps_at, examples_at = address(steps, "steps", torch.int64, -1), address(examples, "examples", torch.int64, -1)
    masks = []
    for draw in draws:
        if draw.rate.dtype != torch.float64 or not draw.rate.is_contiguous():  # as it is read
            draw = draw._replace(rate=draw.rate.to(torch.float64).contiguous())
        mask = steps.new_empty(len(steps), batch, units if draw.rate.dim() else width, dtype=torch.bool)
        threads = torch.get_num_threads() if mask.numel() > _FEW else 1
        library.zoneout_mask(
            ctypes.byref(stream_of(draw)), steps_at, len(steps), examples_at, batch, each, mask.shape[-1], threads,
            address(mask, "mask", torch.bool, -1),
        )  # fmt: skip
        masks.append(mask)
    return masks


_FEW = 2**15  # numbers that one thread draws before another has woken up


def stream_of(draw: Draw) -> native.Stream:
    """The struct of one stream of noise, which holds only as long as the rate does."""
    step, example, unit, high = sees(draw)
    return native.Stream(
        mode=2 if draw.seed is None else 1,
        zero=draw.rule.by == "zero",
        hold=draw.rule.holds_gate,
        sees_step=step,
        sees_example=example,
        sees_unit=unit,
        high=high,
        plane=draw.plane,
        seed=0 if draw.seed is None else int(draw.seed) & (2**64 - 1),
        rate=address(draw.rate, "rate", torch.float64, -1),
        stride=int(draw.rate.dim() > 0),
    )
