"""One plain step on the CPU: torch's own cell and zoneout after it, the least that a decoder has to wait for."""

from __future__ import annotations

import torch

from ..cells import zone
from ..draws import draw_all
from .interface import Result, Run
from .masks import masks_of, plain_eager

_CELLS = {"gru": torch.gru_cell, "rnn_tanh": torch.rnn_tanh_cell, "rnn_relu": torch.rnn_relu_cell}


def takes(r: Run) -> bool:
    """Whether there is one step with nothing but zoneout, whose numbers torch's cell rounds no more than ours do."""
    extra = (r.norm, r.weights.w_hr, r.lengths, r.counts)
    return (
        r.x.shape[0] == 1
        and all(value is None for value in extra)
        and r.x.dtype in (torch.float32, torch.float64)
        and all(draw.rule.by == "previous" for draw in r.draws)
        and plain_eager()
    )


def run(r: Run) -> Result:
    """The step, differentiable by torch itself."""
    x, (w_ih, w_hh, b_ih, b_hh, _), h0, c0, c = r.x[0], r.weights, r.h0, r.c0, None
    if r.resets is not None and not r.reverse:  # backwards nothing lies above the one step
        cut = r.resets[0, :, None]
        assert r.reset_h is not None
        h0 = torch.where(cut, r.reset_h, h0)
        c0 = c0 if c0 is None or r.reset_c is None else torch.where(cut, r.reset_c, c0)
    if r.cell == "lstm":
        assert c0 is not None
        h, c = torch.lstm_cell(x, (h0, c0), w_ih, w_hh, b_ih, b_hh)
    else:
        h = _CELLS[r.cell](x, h0, w_ih, w_hh, b_ih, b_hh)
    keep = {draw.rule.stream: draw.rate for draw in r.draws}  # where nothing is drawn
    if any(draw.seed is not None for draw in r.draws):
        steps, units = r.examples.new_full((1,), r.first_step), dict.fromkeys(("cell", "hidden"), h0.shape[1])
        keep |= {stream: mask[0] for stream, mask in draw_all(r.draws, steps, r.examples, units, masks_of).items()}
    h = zone(h, h0, keep.get("hidden"))
    if c is not None and c0 is not None:
        c = zone(c, c0, keep.get("cell"))
    cells = c[None] if c is not None and r.return_cells else None
    return Result(h.clone()[None], h, c, cells, None)
