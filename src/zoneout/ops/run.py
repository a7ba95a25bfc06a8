"""The input and the result of a backend.

Every tensor of a run has a name, and its gradient has the same name. The name is that of the field,
with a number if the field holds several tensors. `state0` is the initial h, `reset1` the c after a
reset, `parameter0` the first parameter of the cell.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..definition import Definition
from ..draws import Draw
from ..norm import Moments, StepNorm
from ..streams import DROPS, STATE_STREAMS, Rule

# The largest allowed distance of a backend from the reference, ‖a − b‖ / ‖b‖, for outputs, states
# and every gradient.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}

# What has a row for every gate: weights, and scales of a norm.
GATE_WEIGHTS, GATE_SCALES = ("w_ih", "w_hh", "b_ih", "b_hh"), ("scale_x", "scale_h")
OF_GATES = (*GATE_WEIGHTS, *GATE_SCALES)
OF_OUTPUTS = ("w_hr", "scale_c", "shift_c")  # only h depends on them, no other state


def kind_of(rule: Rule) -> tuple[str, int]:
    """Return what a rule does with a state, and the number of that state.

    "zone" keeps the old value, "zero" sets the candidate to zero, "drop" leaves the new value out,
    and "add" adds the old one.
    """
    if rule.stream in DROPS:
        return "drop", DROPS.index(rule.stream)
    kind = {"previous": "zone", "zero": "zero", "added": "add"}[rule.by]
    return kind, STATE_STREAMS.index(rule.stream)


def several(name: str, values: Iterable[Tensor | None]) -> dict[str, Tensor | None]:
    """Return the values of a field that holds several tensors, by name."""
    return {f"{name}{k}": value for k, value in enumerate(values)}


class Weights(NamedTuple):
    """The parameters of one layer and direction, in torch's shapes and gate order."""

    w_ih: Tensor  # [G·H, input]
    w_hh: Tensor | None  # [G·H, outputs]; block-diagonal: [G·H, H / heads]; None: no matrix for h
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None  # [proj, H]
    parameters: tuple[Tensor, ...] = ()  # the cell's own: [H] each, or a matrix of `zo.product`

    @property
    def of_gates(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """What torch's cells take, in their order: `GATE_WEIGHTS`."""
        return self.w_ih, self.w_hh, self.b_ih, self.b_hh


class Run(NamedTuple):
    """One pass of one layer and direction over a sequence."""

    cell: Definition
    hidden: int  # H, the number of units of the cell
    # [T, B, input]; or int64 [T, B, 1]: ids of one-hot rows; packed: [N, ·], longest first
    x: Tensor
    states: tuple[Tensor, ...]  # before the first step: h [B, outputs], then [B, H] each
    weights: Weights
    draws: tuple[Draw, ...]
    examples: Tensor  # [B] int64: the example coordinate of each row
    first_step: int = 0  # the step coordinate of x[0]
    norm: StepNorm | None = None
    lengths: Tensor | None = None  # [B] int64
    resets: Tensor | None = None  # [T, B] (packed: [N]) bool: the states are reset before that step
    reset_to: tuple[Tensor, ...] = ()  # with resets: the states after a cut, as `states`
    reverse: bool = False
    return_states: bool = False  # also return the states other than h at every step
    counts: Tensor | None = None  # packed: [T] int64 on the CPU, the number of rows of each step
    # The backward pass recomputes the steps instead of storing their results.
    recompute: bool = False
    extra: Tensor | None = None  # [T, B, G]; packed: [N, G]: added to x·W_x + b

    @property
    def steps(self) -> int:
        return (self.x if self.counts is None else self.counts).shape[0]

    @property
    def h0(self) -> Tensor:
        return self.states[0]

    @property
    def batch(self) -> int:
        return self.states[0].shape[0]

    @property
    def recurrent_weight(self) -> Tensor:
        """W_h; the cell must have one."""
        assert self.weights.w_hh is not None
        return self.weights.w_hh

    @property
    def w_hr(self) -> Tensor | None:
        return self.weights.w_hr

    @property
    def width(self) -> int:
        """The number of gates times the number of units."""
        return self.cell.gates * self.hidden


class Result(NamedTuple):
    """The result of a pass; packed for a packed run.

    Positions past a row's length are zero in `y` and `states`.
    """

    y: Tensor  # [T, B, outputs]; packed: [N, outputs]
    final: tuple[Tensor, ...]  # the final states; these tensors share no memory with others
    states: tuple[
        Tensor, ...
    ]  # with `return_states`: the states other than h at every step, [T, B, H]; packed: [N, H]
    moments: Moments | None  # batch norm in training: the moments of each processed step
