"""The interface of a fused backend: what the code around the loop over time needs of a device.

`cpu` and `cuda` are the two backends. The reference needs none of this: it is plain torch code.

A `Loop` is one pass over time, without the work before and after it. Its rows have one of two
layouts, as the device needs.

Packed (`sequence/rows.py`): step t has `counts[t]` rows, longest sequence first. The rows of a step
are then a prefix of the rows of the previous step, and a sequence that has ended costs nothing. A
reversed sequence has already been reversed.

Padded (`cuda/pointwise/rows.py`, `counts` is None): rows are in the caller's layout, N = T · B. The
loop handles lengths and direction, and leaves outputs past the end of a row zero.

N is the number of all rows. G is the number of gates times the hidden size H. P is the size of h. A
dimension of size G is ordered [gate][unit], as in torch, or [unit][gate] if the device's `by_unit`
returns True.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..definition import Definition
from ..draws import Draw
from ..norm import StepNorm
from ..streams import MASKS, Rule, bits_of
from .run import Run


def by_unit(v: Tensor, gates: int, dim: int = 0) -> Tensor:
    """Return a tensor reordered along a dimension from [gate][unit] to [unit][gate]."""
    return v.unflatten(dim, (gates, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def by_gate(v: Tensor, gates: int, dim: int = 0) -> Tensor:
    """Return a tensor reordered along a dimension from [unit][gate] to [gate][unit]."""
    return v.unflatten(dim, (-1, gates)).transpose(dim, dim + 1).flatten(dim, dim + 1)


@dataclass
class Loop:
    """One pass over time. A star marks what the forward pass saves for the backward pass."""

    cell: Definition
    hidden: int  # H
    steps: int
    counts: Tensor | None  # packed: [T] int64, on the CPU
    offsets: Tensor | None  # packed: [T] int64, where the rows of each step begin
    initial: tuple[Tensor, ...]  # the states before the first step: [B, P], then [B, H] each
    x: Tensor | None  # [N, input]: if the loop computes x·Wx itself, step by step
    w_ih: Tensor | None  # [G, input]
    w_hh: Tensor | None  # [G, P]; block-diagonal: [G, H / heads]
    b_x: Tensor | None  # [G]: added to x·Wx; None in the backward pass
    b_h: Tensor | None  # [G]: added to h·Wh if that is kept apart from x·Wx (`apart`)
    w_hr: Tensor | None  # [P, H]
    parameters: tuple[Tensor, ...]  # [H] each, as `cell.vectors`
    draws: dict[str, Draw]  # by stream: those of the states and of the update
    scale_h: Tensor | None  # [B, P]: the variational mask on h where it enters the gates
    norm: StepNorm | None
    lengths: Tensor | None  # [B] int64; padded: None if no sequence ends before the last step
    examples: Tensor  # [B] int64
    first_step: int
    reverse: bool
    resets: Tensor | None  # [N] bool
    reset_to: tuple[Tensor, ...]  # the states after a reset, as `initial`
    gates: Tensor  # * [N, G]: in: x·Wx (or uninitialised); out: the stored value of each gate
    states: tuple[Tensor, ...]  # * at every step: y [N, P], then [N, H] each
    hats: Tensor | None  # * norm: [N, G], h·Wh normalised
    slots: tuple[Tensor | None, ...]  # * [N, H] each: other stored values; None: read from `hats`
    mean_x: Tensor | None  # * [N] (layer norm) or [T, G]; input if given, else output
    var_x: Tensor | None  # *
    mean_h: Tensor | None  # * as for x
    var_h: Tensor | None  # *
    mean_c: Tensor | None  # * [N] or [T, H]
    var_c: Tensor | None  # *
    by_unit: bool = False
    matrices: tuple[Tensor, ...] = ()  # of the products inside the step, as `cell.matrices`
    inner: tuple[Tensor, ...] = ()  # * their results: [N, parts · H] each
    masks: dict[str, Tensor] = field(default_factory=dict)  # given, by stream of `draws`: [N, ·]

    @property
    def batch(self) -> int:
        return self.initial[0].shape[0]

    @property
    def outputs(self) -> int:
        return self.initial[0].shape[1]

    @property
    def width(self) -> int:
        """G: the number of gates times the number of units."""
        return self.cell.gates * self.hidden

    @property
    def apart(self) -> bool:
        """True if h·Wh is not simply added to x·Wx."""
        return self.norm is not None or self.cell.storage.apart

    @property
    def recurrent_weight(self) -> Tensor:
        """W_h; the cell must have one."""
        assert self.w_hh is not None
        return self.w_hh

    # Names for h and c, for kernels of cells without other states.

    @property
    def h0(self) -> Tensor:
        return self.initial[0]

    @property
    def c0(self) -> Tensor | None:
        return self.initial[1] if len(self.initial) > 1 else None

    @property
    def reset_h(self) -> Tensor | None:
        return self.reset_to[0] if self.reset_to else None

    @property
    def reset_c(self) -> Tensor | None:
        return self.reset_to[1] if len(self.reset_to) > 1 else None

    @property
    def y(self) -> Tensor:
        return self.states[0]

    @property
    def c(self) -> Tensor | None:
        return self.states[1] if len(self.states) > 1 else None

    @property
    def gh(self) -> Tensor | None:
        """The stored h·Wh: of all gates with a norm, else of the gate in the first slot."""
        return self.hats if self.hats is not None else self.slots[0] if self.slots else None

    @property
    def given(self) -> bool:
        return self.norm is not None and self.norm.given is not None

    @property
    def balanced(self) -> bool:
        """True if the gradients of h·Wh sum to zero over the rows of each step (batch norm).

        If the rows are nearly equal, the norm makes these gradients very large, and they should
        cancel exactly. Rounding errors in their sums would then be larger than the true result. So
        no result is computed from such sums. The gradients of W_h and W_x use differences of h and
        x to one row of the step. The gradient through the product has its mean over the rows
        subtracted.

        The gradients of the biases are such sums, and they nearly cancel. They are summed without
        rounding the terms first, except for half types in the step-by-step loop on a GPU. If three
        or more equal steps make the terms so large that float32 cannot hold the sum, it is lost.
        """
        return self.norm is not None and self.norm.over == "examples" and not self.given


@dataclass
class LoopGrads:
    """The gradients of one pass.

    `dstates` holds the gradients of the final states on input, and of the initial states on output.
    """

    dy: Tensor  # [N, P]
    dseen: tuple[Tensor | None, ...]  # of the states other than h at every step: [N, H] each
    dstates: tuple[Tensor, ...]  # [B, P], then [B, H] each
    dreset: tuple[Tensor, ...]  # of the states after a reset, as `dstates`; starts at zero
    dgx: Tensor  # [N, G]: of x·Wx as it enters the gates
    dgh: Tensor  # [N, G]: of h·Wh (may be dgx)
    dsh: Tensor  # [N, G]: of h·Wh after norm, scale and shift (may be dgh or dgx)
    du: Tensor | None  # projection: [N, P] of the candidate h
    u: Tensor | None  # projection: [N, H], its input
    # norm: [N, H] of c after norm, scale and shift; `by_unit`: None, the loop sums.
    dnc: Tensor | None
    chat: Tensor | None  # norm: [N, H] c normalised; `by_unit`: None
    dx: Tensor | None  # norm: [N, G] in: x·Wx; out: its gradient
    dscale_x: Tensor | None  # norm: [parts, G], starts at zero; the sum over parts is the gradient
    dscale_h: Tensor | None  # norm: [parts, G]
    dscale_c: Tensor | None  # norm: [parts, H]
    dshift_c: Tensor | None  # norm: [parts, H]
    dparameters: tuple[
        Tensor, ...
    ] = ()  # [parts, H] each, starts at zero; the sum over parts is the gradient
    db_x: Tensor | None = None  # [G]: the sum of dgx, if the loop computes it
    db_h: Tensor | None = None  # [G]: the sum of dsh, if the loop computes it
    dinner: tuple[Tensor, ...] = ()  # of the products inside the step: [N, parts · H] each
    ins: tuple[Tensor, ...] = ()  # the inputs of these products: [N, H] each
    dmasks: dict[str, Tensor] = field(default_factory=dict)  # of given masks that need one: [N, ·]

    @property
    def dh(self) -> Tensor:
        return self.dstates[0]

    @property
    def dc(self) -> Tensor | None:
        return self.dstates[1] if len(self.dstates) > 1 else None

    @property
    def dcells(self) -> Tensor | None:
        return self.dseen[0] if self.dseen else None

    @property
    def dreset_h(self) -> Tensor | None:
        return self.dreset[0] if self.dreset else None

    @property
    def dreset_c(self) -> Tensor | None:
        return self.dreset[1] if len(self.dreset) > 1 else None


def mask_coordinates(rule: Rule) -> tuple[bool, bool, bool, bool]:
    """Return four flags: the mask depends on step, example, unit; it uses a word's high half."""
    kind = MASKS[rule.mask]
    return kind.step, kind.example, kind.unit, bits_of(rule).half == 1


class Backend(Protocol):
    """A device that runs the loop over time."""

    @property
    def ROWS(self) -> Callable[..., Any]:
        """The layout of a padded batch: `Packed` or `Padded`.

        It is called with lengths, steps, batch and direction.
        """

    @property
    def IN_FLOAT32(self) -> bool:
        """True if half types are computed in float32."""

    @property
    def GATES_AT_ONCE(self) -> int:
        """The maximum number of gate values in memory at once if no backward pass follows."""

    def settings(self) -> tuple[Any, ...]:
        """Return the settings that a pass depends on besides its run; they are hashable."""

    # --- supported runs ---

    def supports(self, r: Run) -> bool:
        """Return True if the backend can run this; otherwise the reference runs it."""

    def check(self, r: Run) -> None:
        """Raise if the backend was requested and cannot run this."""

    def side_by_side(self, runs: Sequence[Run]) -> bool:
        """Return True if the loops of these runs (a layer's directions) should run concurrently."""

    def by_unit(self, r: Run) -> bool:
        """Return True if the gates of a run are stored unit by unit instead of gate by gate."""

    def multiplies_x(self, w_ih: Tensor) -> bool:
        """Return True if the loop should compute x·W_x itself, step by step."""

    def fuse_weight_grads(self, rows: int, gates: int, outputs: int, inputs: int) -> bool:
        """Return True if one product should compute the gradients of both weight matrices."""

    def narrow_products(self, dtype: torch.dtype) -> bool:
        """Return True if the large products of the backward pass should run in this half type."""

    # --- memory ---

    def prepare(self, *buffers: Tensor | None) -> None:
        """Prepare new buffers that will be overwritten completely."""

    def scratch(self, like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory for one call."""

    def release(self, *buffers: Tensor | None) -> None:
        """Return memory from `scratch` to the backend."""

    def partial_sums(self) -> int:
        """Return the number of partial sums of a norm's gradients."""

    # --- work ---

    def hidden_scale(self, draw: Draw, examples: Tensor, units: int, dtype: torch.dtype) -> Tensor:
        """Return the factors of h under variational dropout, [B, units]."""

    def forward(self, loops: Sequence[Loop]) -> None:
        """Run the forward pass of loops; results are written into each `Loop`."""

    def backward(self, loops: Sequence[tuple[Loop, LoopGrads]]) -> None:
        """Run the backward pass of loops; gradients are written into each `LoopGrads`."""
