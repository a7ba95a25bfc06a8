"""Draw masks alone, in C if possible: a single step of a cell has little other work."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...draws import Draw, draw_bits, draw_masks, seen
from ...streams import Rule
from ...torch_state import plain_eager
from ..backend import mask_coordinates
from ..memory import address, addresses, are_memory
from ..recording import step
from . import native


@step
def masks_of(draws: Sequence[Draw], steps: Tensor, examples: Tensor, units: int) -> list[Tensor]:
    """Return the same masks as `draw_masks`, drawn in C if possible."""
    given = (steps, examples, *(v for draw in draws for v in (draw.rate, draw.seed)))
    library = native.load() if steps.is_cpu and plain_eager() and are_memory(given) else None
    if library is None:
        return draw_masks(draws, steps, examples, units)
    steps, examples, width = seen(draws, steps, examples, units)
    batch, each = examples.shape[-1], 0
    if examples.dim() == 2:  # each step has its own examples
        steps, each = steps.expand(len(examples)), batch
    steps, examples = steps.contiguous(), examples.contiguous()
    steps_at = address(steps, "steps", torch.int64, -1)
    examples_at = address(examples, "examples", torch.int64, -1)
    masks = []
    for draw in draws:
        if (
            draw.rate.dtype != torch.float64 or not draw.rate.is_contiguous()
        ):  # C reads contiguous float64
            draw = draw._replace(rate=draw.rate.to(torch.float64).contiguous())
        mask = steps.new_empty(
            len(steps), batch, units if draw.rate.dim() else width, dtype=torch.bool
        )
        threads = torch.get_num_threads() if mask.numel() > _FEW else 1
        library.zoneout_mask(
            ctypes.byref(stream_of(draw)), steps_at, len(steps), examples_at, batch, each,
            mask.shape[-1], threads, address(mask, "mask", torch.bool, -1),
        )  # fmt: skip
        masks.append(mask)
    return masks


@step
def bits_of(draw: Draw, steps: Tensor, examples: Tensor, units: int) -> Tensor:
    """Return the same bits as `draw_bits`, drawn in C if possible."""
    steps, examples, units = seen([draw], steps, examples, units)
    given = (steps, examples, draw.rate, draw.seed)
    library = native.load() if steps.is_cpu and plain_eager() and are_memory(given) else None
    if library is None:
        return draw_bits(draw, steps, examples, units)
    steps, examples = steps.contiguous(), examples.contiguous()
    bits = steps.new_empty(len(steps), len(examples), units, dtype=torch.int32)
    threads = torch.get_num_threads() if bits.numel() > _FEW else 1
    draw = draw._replace(rate=draw.rate.to(torch.float64).contiguous())
    library.zoneout_bits(
        ctypes.byref(stream_of(draw)), address(steps, "steps", torch.int64, -1), len(steps),
        address(examples, "examples", torch.int64, -1), len(examples), units, threads,
        address(bits, "bits", torch.int32, -1),
    )  # fmt: skip
    return bits


def masks_of_step(
    streams: bytes,
    rates: Sequence[Tensor],
    seed: Tensor,
    step: int,
    examples: Tensor,
    units: int,
) -> Sequence[Tensor]:
    """Return the masks of one step, [B, units], of streams that see all coordinates.

    `streams` are their structs, whose addresses are not read.
    """
    library, many = native.load(), len(rates)
    assert library is not None
    masks = examples.new_empty((many, len(examples), units), dtype=torch.bool)
    seed_at, examples_at, masks_at, *rates_at = addresses((seed, examples, masks, *rates))
    structs = (native.Stream * many).from_buffer_copy(streams)
    for stream, at in zip(structs, rates_at):
        stream.rate, stream.seed = at, seed_at
    threads = torch.get_num_threads() if masks.numel() > _FEW else 1
    library.zoneout_step_masks(
        structs, many, step, examples_at, len(examples), units, threads, masks_at
    )
    return masks.unbind(0)


_FEW = 2**15  # one thread draws this many numbers before another thread has woken up


def stream_of(draw: Draw) -> native.Stream:
    """Return the C struct of one noise stream, valid as long as its rate and seed exist."""
    stream = native.Stream.from_buffer_copy(_constants(draw.rule, draw.plane, draw.seed is None))
    stream.rate, stream.stride = address(draw.rate, "rate", torch.float64, -1), draw.rate.dim() > 0
    if draw.seed is not None:
        stream.seed = address(draw.seed, "seed", torch.int64, -1)
    return stream


@lru_cache(256)
def _constants(rule: Rule, plane: int, expectation: bool) -> native.Stream:
    """Return the struct of a stream without rate and seed; it must not be written to."""
    step, example, unit, high = mask_coordinates(rule)
    return native.Stream(
        mode=2 if expectation else 1,
        zero=rule.by == "zero",
        hold=rule.holds_gate,
        sees_step=step,
        sees_example=example,
        sees_unit=unit,
        high=high,
        plane=plane,
    )
