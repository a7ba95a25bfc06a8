"""The interface of a fused backend: what the code around the loop over time asks of a device.

The modules `cpu` and `cuda` are the two backends. The reference needs none of this: it is plain torch code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..draws import Draw
from .interface import Run
from .loop import Backward, Loop


class Backend(Protocol):
    """A device that runs the loop over time."""

    @property
    def ROWS(self) -> Callable[..., Any]:
        """The layout of a padded batch: `Packed` or `Padded`, made of lengths, steps, batch and direction."""

    @property
    def WIDE(self) -> bool:
        """True if half types are computed in float32."""

    @property
    def PIECE(self) -> int:
        """The most numbers of gates at once where no backward pass follows."""

    # --- what it supports ---

    def check(self, r: Run) -> None:
        """Raise if the backend cannot run this."""

    def together(self, runs: Sequence[Run]) -> bool:
        """Return True if the loops of these runs, a layer's directions, should run at the same time."""

    def by_unit(self, r: Run) -> bool:
        """Return True if the gates of a run are stored unit by unit instead of gate by gate."""

    def takes_x(self, w_ih: Tensor) -> bool:
        """Return True if the loop should compute x·W_x itself, step by step."""

    def joins(self, rows: int, gates: int, outputs: int, inputs: int) -> bool:
        """Return True if one product should give the gradients of both weight matrices."""

    def narrow_products(self, dtype: torch.dtype) -> bool:
        """Return True if the large products of the backward pass should run in this half type."""

    # --- memory ---

    def prepare(self, *buffers: Tensor | None) -> None:
        """Prepare new buffers that will be written completely."""

    def scratch(self, like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory for one call."""

    def give_back(self, *buffers: Tensor | None) -> None:
        """Take memory from `scratch` back."""

    def PARTS(self) -> int:
        """Return the number of partial sums of a norm's gradients."""

    # --- work ---

    def scale_of(self, draw: Draw, examples: Tensor, units: int, dtype: torch.dtype) -> Tensor:
        """Return the factors of h under variational dropout, [B, units]."""

    def forward(self, loops: Sequence[Loop]) -> None:
        """Run the forward pass of loops; results are written into each `Loop`."""

    def backward(self, loops: Sequence[tuple[Loop, Backward]]) -> None:
        """Run the backward pass of loops; gradients are written into each `Backward`."""
