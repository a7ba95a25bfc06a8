"""Normal numbers that are a function of their coordinates, like masks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..draws import Draw, widest
from ..philox import philox
from . import cuda
from .cuda.pointwise.normals import normals as fused
from .sequence.rows import places


def box_muller(words: tuple[Tensor, ...], wide: torch.dtype) -> Tensor:
    """Return four standard normal numbers for every four random words, in a last dimension."""
    w = [(word.to(wide) + 0.5) / 2**32 for word in words]
    pairs = [
        ((-2 * a.log()).sqrt() * turn(2 * math.pi * b))
        for a, b in ((w[0], w[1]), (w[2], w[3]))
        for turn in (torch.cos, torch.sin)
    ]
    return torch.stack(pairs, dim=-1)


def normals_at(draw: Draw, units: int, at: Any) -> Tensor:
    """Return normal numbers for the rows of a layer (`given.At`), [T, B, units] or [N, units].

    Four neighbouring units share the words of a counter.
    """
    assert draw.seed is not None
    examples, first, steps = at.examples, at.first_step, at.shape[0]
    if at.counts is None and cuda.draws_bits(examples):
        stream, seed, plane = draw.rule.stream, draw.seed, draw.plane
        return torch.ops.zoneout.normals(examples, stream, seed, plane, first, steps, units)
    if at.counts is None:
        t: Tensor = torch.arange(first, first + steps, device=examples.device)[:, None, None]
        rows = examples[:, None]
    else:
        step, row = places(at.counts, steps)
        t, rows = first + step[:, None], examples[row, None]
    c0 = torch.arange((units + 3) // 4, device=examples.device)
    c3 = torch.full((), draw.plane, device=examples.device)
    words = torch.broadcast_tensors(*philox(draw.seed, c0, rows, t, c3))
    return box_muller(words, widest(examples.device)).flatten(-2)[..., :units]


@torch.library.custom_op("zoneout::normals", mutates_args=(), device_types="cuda")
def _normals(
    examples: Tensor, stream: str, seed: Tensor, plane: int, first_step: int, steps: int, units: int
) -> Tensor:
    return fused(examples, seed, plane, first_step, steps, units)


@_normals.register_fake
def _(examples: Tensor, *arguments: Any) -> Tensor:
    *_, steps, units = arguments
    return examples.new_empty(steps, len(examples), units, dtype=torch.float32)
