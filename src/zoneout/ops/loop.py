"""The loop over time with everything around it taken away: what a device's code has to do.

Rows lie as the device wants them. Packed (`rows.py`): step t has `counts[t]` rows, longest sequence first, so that the
rows of a step are a prefix of the rows of the step before, and a sequence that has ended costs nothing; a reversed
sequence has been turned around already. Padded (`cuda/rows.py`, `counts` is None): as the caller has them, N = T · B,
lengths and direction looked at by the loop; outputs past a row's end have to be left zero. N is the number of all rows,
G the gates times the hidden size H, P the size of h. Whatever has G of something lies as torch has it, [gate][unit], or
where a device's `by_unit` says so as [unit][gate].
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..cells import CELLS
from ..draws import Draw
from ..noise import MASKS, STREAMS
from ..norm import StepNorm

GATES = {name: definition.gates for name, definition in CELLS.items()}


def by_unit(v: Tensor, cell: str, dim: int = 0) -> Tensor:
    """What lies gate by gate along a dimension, unit by unit."""
    return v.unflatten(dim, (GATES[cell], -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def by_gate(v: Tensor, cell: str, dim: int = 0) -> Tensor:
    """What lies unit by unit along a dimension, gate by gate."""
    return v.unflatten(dim, (-1, GATES[cell])).transpose(dim, dim + 1).flatten(dim, dim + 1)


@dataclass
class Loop:
    """One pass over time. What the forward pass leaves for the backward one is marked with a star."""

    cell: str
    steps: int
    counts: Tensor | None  # packed: [T] int64, on the CPU
    offsets: Tensor | None  # packed: [T] int64, where the rows of each step begin
    h0: Tensor  # [B, P]
    c0: Tensor | None  # [B, H]
    x: Tensor | None  # [N, input]: where the loop is to take x·Wx itself, step by step
    w_ih: Tensor | None  # [G, input]
    w_hh: Tensor  # [G, P]
    b_x: Tensor | None  # [G]: added to x's part; None on the way back, which does not need it
    b_h: Tensor | None  # [G]: added to h·Wh where that is not simply added to x's part (GRU, norms)
    w_hr: Tensor | None  # [P, H]
    draws: dict[str, Draw]  # cell, hidden, update
    scale_h: Tensor | None  # [B, P]: the variational mask on h where it enters the gates
    norm: StepNorm | None
    lengths: Tensor | None  # [B] int64; padded: None where no sequence ends before the last step
    examples: Tensor  # [B] int64
    first_step: int
    reverse: bool
    resets: Tensor | None  # [N] bool
    reset_h: Tensor | None  # [B, P]: the state that a reset goes back to
    reset_c: Tensor | None  # [B, H]
    gates: Tensor  # * [N, G]: in: x·Wx (or nothing); out: activated (plain RNN: the candidate h)
    y: Tensor  # * [N, P]
    c: Tensor | None  # * [N, H]
    gh: Tensor | None  # * norm: [N, G], h·Wh normalised; GRU without: [N, H], the n part of h·Wh + b
    mean_x: Tensor | None  # * [N] (layer norm) or [T, G]; given or written
    var_x: Tensor | None  # *
    mean_h: Tensor | None  # * as those of x
    var_h: Tensor | None  # *
    mean_c: Tensor | None  # * [N] or [T, H]
    var_c: Tensor | None  # *
    by_unit: bool = False

    @property
    def batch(self) -> int:
        return self.h0.shape[0]

    @property
    def hidden(self) -> int:
        return self.w_hh.shape[0] // GATES[self.cell]

    @property
    def outputs(self) -> int:
        return self.h0.shape[1]

    @property
    def given(self) -> bool:
        return self.norm is not None and self.norm.given is not None

    @property
    def balanced(self) -> bool:
        """Whether the derivatives of h·Wh add up to zero over the rows of every step, as behind a batch norm they do.

        Where the rows are nearly alike the norm makes these derivatives very large, and only they would cancel: what
        rounding leaves of their sums would be more than all that is true. So nothing is computed from the sums: the
        derivatives of W_h and W_x are taken from differences of h and x to one row of the step, and what comes back
        through the product has its mean over the rows taken out. Those of the biases are such sums, and nearly cancel:
        they are added up without rounding first, but for half types step by step on a GPU; what three alike steps and
        more have made so large that float32 does not hold the sum is lost.
        """
        return self.norm is not None and self.norm.over == "examples" and not self.given


@dataclass
class Backward:
    """The derivatives of one pass; `dh` and `dc` go in as those of the final states and out as of the initial."""

    dy: Tensor  # [N, P]
    dcells: Tensor | None  # [N, H]
    dh: Tensor  # [B, P]
    dc: Tensor | None  # [B, H]
    dreset_h: Tensor | None  # [B, P]: of what resets go back to; begins at zero
    dreset_c: Tensor | None  # [B, H]
    dgx: Tensor  # [N, G]: of x's part as it meets the gates
    dgh: Tensor  # [N, G]: of h·Wh (may be dgx)
    dsh: Tensor  # [N, G]: of h·Wh once normalised, scaled and shifted (may be dgh or dgx)
    du: Tensor | None  # projection: [N, P] of the candidate h
    u: Tensor | None  # projection: [N, H] what is projected
    dnc: Tensor | None  # norm: [N, H] of c normalised, scaled and shifted; `by_unit`: the loop adds up itself
    chat: Tensor | None  # norm: [N, H] c normalised; `by_unit`: the same
    dx: Tensor | None  # norm: [N, G] in: x·Wx; out: its derivative
    dscale_x: Tensor | None  # norm: [parts, G], begun at zero; their sum is the derivative
    dscale_h: Tensor | None  # norm: [parts, G]
    dscale_c: Tensor | None  # norm: [parts, H]
    dshift_c: Tensor | None  # norm: [parts, H]
    db_x: Tensor | None = None  # [G]: dgx added up, where the loop does that
    db_h: Tensor | None = None  # [G]: dsh added up


def sees(draw: Draw) -> tuple[bool, bool, bool, bool]:
    """Whether a draw sees step, example and unit, and whether it takes the high half of a word."""
    kind = MASKS[draw.rule.mask]
    return kind.step, kind.example, kind.unit, kind.stream and STREAMS[draw.rule.stream].half == 1
