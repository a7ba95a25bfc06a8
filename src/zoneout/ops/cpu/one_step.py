"""One plain, small step on the CPU: torch's own cell, then zoneout.

A call of torch's cell costs the host less than a pass of the C loop. A step with much work is
faster in the C loop. A rate mixes by `torch.lerp`: two calls, as in `operations.mix`, would take a
tenth longer. So infinite states, or their overflowing difference, may give NaN here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import cells
from ...definition import Definition
from ...definition.operations import mix
from ...draws import Draw, draw_all
from ...streams import STATE_STREAMS
from ...torch_state import plain_eager
from ..memory import are_memory
from ..run import Result, Run
from . import native
from .masks import masks_of, masks_of_step, stream_of

_ALWAYS = torch.ones((), dtype=torch.bool, device="cpu")
_CELLS: dict[Definition, Callable[..., Any]] = {
    cells.lstm: torch.lstm_cell,
    cells.gru: torch.gru_cell,
    cells.rnn_tanh: torch.rnn_tanh_cell,
    cells.rnn_relu: torch.rnn_relu_cell,
}
_OWN_RESULT = (cells.rnn_tanh, cells.rnn_relu)  # torch's backward pass reads the returned h


class Repeatable(NamedTuple):
    """A step whose choices are made: torch's cell, and the states that zoneout replaces."""

    function: Callable[..., Any]
    lerps: tuple[tuple[int, float], ...]  # without masks: a state and its rate
    drawn: tuple[int, ...]  # the states with masks
    streams: bytes  # the structs of their streams; bytes can be copied, and hold no addresses
    rates: tuple[Tensor, ...]  # of these states

    def run(
        self,
        x: Tensor,
        states: Sequence[Tensor],
        weights: Sequence[Tensor | None],
        seed: Tensor | None,
        examples: Tensor | None,
        at: int,
    ) -> list[Tensor]:
        """Return the states after step number `at`."""
        masks: Sequence[Tensor] = ()
        if self.drawn:
            assert seed is not None and examples is not None
            units = states[0].shape[1]
            masks = masks_of_step(self.streams, self.rates, seed, at, examples, units)
        return _step(self.function, x, states, weights, self.lerps, zip(self.drawn, masks))


def repeatable(cell: Definition, draws: Sequence[Draw]) -> Repeatable | None:
    """Return a plain step with these draws as it can be repeated; None if it cannot."""
    lerps: list[tuple[int, float]] = []
    drawn: list[tuple[int, bytes, Tensor]] = []  # a state, the struct of its stream, its rate
    for draw in draws:
        k = STATE_STREAMS.index(draw.rule.stream)
        if draw.given is not None or draw.rate.dim() or draw.rate.dtype != torch.float64:
            return None
        if draw.seed is None:
            if (share := float(draw.rate)) == 1:
                return None
            lerps += [(k, share)] if share else []
        elif draw.rule.mask in ("unit", "shared") and native.load() is not None:
            drawn.append((k, bytes(stream_of(draw)), draw.rate))
        else:
            return None
    states, streams, rates = zip(*drawn) if drawn else ((), (), ())
    return Repeatable(_CELLS[cell], tuple(lerps), states, b"".join(streams), rates)


ROWS, MULTIPLICATIONS = 16, 2**23  # from both on, the C loop is faster in training and evaluation


def is_small(rows: int, inputs: int, hidden: int, gates: int) -> bool:
    """Return True if a step of this size is not one for the C loop.

    In plain eager mode only: a compiler would take the number of rows for a constant.
    """
    few = rows < ROWS or rows * gates * hidden * (inputs + hidden) < MULTIPLICATIONS
    return few or native.load() is None or torch.autograd.forward_ad._current_level >= 0


def is_plain(
    cell: Definition, x: Tensor, others: Sequence[Tensor | None], draws: Sequence[Draw]
) -> bool:
    """Return True if torch has this cell, zoneout is the only noise, and the precision suffices.

    The precision suffices if torch's cell rounds no more than ours does. `others` are the states
    and weights. The C loop has no forward-mode derivative.

    Tensors that are not in memory go through the operator, as they do with several steps. torch's
    cell writes to a sum in place. This is wrong for zeros without storage, and for a subclass that
    is added to a plain tensor.
    """
    return (
        x.is_cpu
        and cell in _CELLS
        and x.dtype in (torch.float32, torch.float64)
        and all(draw.rule.by == "previous" for draw in draws)
        and plain_eager()
        and not torch.is_autocast_enabled("cpu")
        and are_memory((x, *others))
    )


def supports(r: Run) -> bool:
    """Return True if a run is one such step."""
    extra = (r.norm, r.weights.w_hr, r.lengths, r.counts, r.extra)
    others = (*r.states, *r.reset_to, r.resets, *r.weights.of_gates)
    return (
        r.x.shape[0] == 1
        and all(value is None for value in extra)
        and is_plain(r.cell, r.x, others, r.draws)
        and is_small(r.batch, r.x.shape[2], r.hidden, r.cell.gates)
    )


def run(r: Run) -> Result:
    """Run the step, differentiable by torch itself."""
    states = r.states
    if r.resets is not None and not r.reverse:  # reversed: no step lies above this one
        cut = r.resets[0, :, None]
        states = tuple(torch.where(cut, to, v) for to, v in zip(r.reset_to, states, strict=True))
    h, *others = step(r.cell, r.x[0], states, r.weights.of_gates, r.draws, r.examples, r.first_step)
    seen = tuple(v.clone()[None] for v in others) if r.return_states else ()
    y = h.clone()[None]
    if not r.draws and r.cell in _OWN_RESULT:
        h = h.clone()
    return Result(y, (h, *others), seen, None)


def step(
    cell: Definition,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    draws: Sequence[Draw],
    examples: Tensor | None,
    at: int,
) -> list[Tensor]:
    """Return the states after step number `at`; `examples` may be None if nothing is drawn."""
    drawn: dict[str, Tensor] = {}
    if examples is not None and any(draw.seed is not None for draw in draws):
        units = dict.fromkeys(("cell", "hidden"), states[0].shape[1])
        drawn = draw_all(draws, examples.new_full((1,), at), examples, units, masks_of)
    lerps: list[tuple[int, float]] = []
    masks: list[tuple[int, Tensor]] = []
    given: list[tuple[int, Tensor]] = []
    for draw in draws:
        k, rate = STATE_STREAMS.index(draw.rule.stream), draw.rate
        if draw.given is not None:
            given.append((k, draw.given[0]))
        elif (mask := drawn.get(draw.rule.stream)) is not None:
            masks.append((k, mask[0]))
        elif rate.dim():
            given.append((k, rate.to(x.dtype, copy=True)))
        elif (share := float(rate)) == 1:  # keeps the gradient of the new value zero, not None
            masks.append((k, _ALWAYS))
        elif share:
            lerps.append((k, share))
    return _step(_CELLS[cell], x, states, weights, lerps, masks, given)


def _step(
    function: Callable[..., Any],
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    lerps: Iterable[tuple[int, float]],
    masks: Iterable[tuple[int, Tensor]],
    given: Iterable[tuple[int, Tensor]] = (),
) -> list[Tensor]:
    """Return the states after a step of torch's cell and zoneout.

    Each state to replace comes with one rate in `lerps`, with a bool mask in `masks`, or with a
    rate per unit or a mask of numbers in `given`.
    """
    if len(states) > 1:
        new = list(function(x, tuple(states), *weights))
    else:
        new = [function(x, states[0], *weights)]
    for k, share in lerps:
        new[k] = torch.lerp(new[k], states[k], share)
    for k, mask in masks:
        new[k] = torch.where(mask, states[k], new[k])
    for k, keep in given:
        new[k] = mix(new[k], states[k], keep)
    return new
