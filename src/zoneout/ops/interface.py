"""What a backend is given and what it gives back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..draws import Draw
from ..norm import Moments, StepNorm

# How far a backend may be from the reference, ‖a − b‖ / ‖b‖, on outputs, states and every gradient.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


class Weights(NamedTuple):
    """The parameters of one layer and direction, in torch's shapes and gate order."""

    w_ih: Tensor  # [G·H, input]
    w_hh: Tensor  # [G·H, outputs]
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None  # [proj, H]


class Run(NamedTuple):
    """One pass of one layer and direction over a sequence."""

    cell: str  # "lstm", "gru", "rnn_tanh", "rnn_relu"
    x: Tensor  # [T, B, input]; or int64 [T, B, 1]: one-hot rows by their numbers; packed: [N, ·], longest first
    h0: Tensor  # [B, outputs]
    c0: Tensor | None  # [B, H]
    weights: Weights
    draws: tuple[Draw, ...]
    examples: Tensor  # [B] int64: the example coordinate of each row
    first_step: int = 0  # the step coordinate of x[0]
    norm: StepNorm | None = None
    lengths: Tensor | None = None  # [B] int64
    resets: Tensor | None = None  # [T, B] (packed: [N]) bool: nothing crosses the cut before that step
    reset_h: Tensor | None = None  # [B, outputs]: the state after a cut
    reset_c: Tensor | None = None  # [B, H]
    reverse: bool = False
    return_cells: bool = False
    counts: Tensor | None = None  # packed: [T] int64 on the CPU, how many rows each step has
    recompute: bool = False  # whether the way back runs the steps again instead of keeping what they found

    @property
    def steps(self) -> int:
        return (self.x if self.counts is None else self.counts).shape[0]

    @property
    def batch(self) -> int:
        return self.h0.shape[0]

    @property
    def w_hh(self) -> Tensor:
        return self.weights.w_hh

    @property
    def w_hr(self) -> Tensor | None:
        return self.weights.w_hr


class Result(NamedTuple):
    """What a pass gives; positions past a row's length are zero in `y` and `cells`. Of a packed run, packed."""

    y: Tensor  # [T, B, outputs]; packed: [N, outputs]
    h: Tensor  # [B, outputs]; this and c in tensors of their own
    c: Tensor | None  # [B, H]
    cells: Tensor | None  # [T, B, H]; packed: [N, H]
    moments: Moments | None  # batch norm in training: what each processed step saw
