"""One plain step on the CPU: torch's own cell and zoneout after it, the least that a decoder has to wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cells import zone
from ..draws import Draw, draw_all
from .interface import Result, Run
from .masks import masks_of
from .memory import are_memory
from .modes import plain_eager

_ALWAYS = torch.ones((), dtype=torch.bool, device="cpu")
_CELLS = {"gru": torch.gru_cell, "rnn_tanh": torch.rnn_tanh_cell, "rnn_relu": torch.rnn_relu_cell}


def is_plain(x: Tensor, others: Sequence[Tensor | None], draws: Sequence[Draw]) -> bool:
    """Whether there is nothing but zoneout, of numbers that torch's cell rounds no more than ours does.

    What is not in memory goes through the operator, as it does in more steps: torch's cell writes to a sum in place,
    which is wrong for zeros without storage and for a subclass that is added to a plain tensor. `others` are the states
    and weights.
    """
    return (
        x.is_cpu
        and x.dtype in (torch.float32, torch.float64)
        and all(draw.rule.by == "previous" for draw in draws)
        and plain_eager()
        and not torch.is_autocast_enabled("cpu")
        and are_memory((x, *others))
    )


def takes(r: Run) -> bool:
    """Whether a run is one such step."""
    extra = (r.norm, r.weights.w_hr, r.lengths, r.counts)
    others = (r.h0, r.c0, r.reset_h, r.reset_c, r.resets, *r.weights)
    return r.x.shape[0] == 1 and all(value is None for value in extra) and is_plain(r.x, others, r.draws)


def run(r: Run) -> Result:
    """The step, differentiable by torch itself."""
    h0, c0 = r.h0, r.c0
    if r.resets is not None and not r.reverse:  # backwards nothing lies above the one step
        cut = r.resets[0, :, None]
        assert r.reset_h is not None
        h0 = torch.where(cut, r.reset_h, h0)
        c0 = c0 if c0 is None or r.reset_c is None else torch.where(cut, r.reset_c, c0)
    h, c = step(r.cell, r.x[0], h0, c0, r.weights[:4], r.draws, r.examples, r.first_step)
    cells = c.clone()[None] if c is not None and r.return_cells else None
    y = h.clone()[None]
    if r.cell.startswith("rnn") and not r.draws:  # its nonlinearity needs this h as it is on the way back
        h = h.clone()
    return Result(y, h, c, cells, None)


def step(
    cell: str,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: Sequence[Tensor | None],
    draws: Sequence[Draw],
    examples: Tensor | None,
    at: int,
) -> tuple[Tensor, Tensor | None]:
    """h and c after the step numbered `at`; `examples` may be left out where nothing is drawn."""
    c = None
    if c0 is not None:
        h, c = torch.lstm_cell(x, (h0, c0), *weights)  # type: ignore[arg-type]
    else:
        h = _CELLS[cell](x, h0, *weights)  # type: ignore[arg-type]
    masks: dict[str, Tensor] = {}
    if examples is not None and any(draw.seed is not None for draw in draws):
        units = dict.fromkeys(("cell", "hidden"), h0.shape[1])
        masks = draw_all(draws, examples.new_full((1,), at), examples, units, masks_of)
    for draw in draws:
        stream, rate, mask = draw.rule.stream, draw.rate, masks.get(draw.rule.stream)
        new, old = (h, h0) if stream == "hidden" else (c, c0)
        assert new is not None and old is not None
        if mask is not None:
            new = zone(new, old, mask[0])
        elif rate.dim():
            new = zone(new, old, rate.to(new.dtype, copy=True))
        else:
            share = float(rate)
            # Of a rate of 1 too the derivative of the new value is zero, not missing.
            new = new if share == 0 else torch.where(_ALWAYS, old, new) if share == 1 else torch.lerp(new, old, share)
        h, c = (new, c) if stream == "hidden" else (h, new)
    return h, c
