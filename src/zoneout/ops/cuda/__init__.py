"""The loop over time on NVIDIA GPUs: all steps in one launch where the weights fit on the chip, else step by step.

The weights, biases, h0, `gates`, `y` and the derivatives of the gates are in the input's type; sums, c, `gh`, moments,
dh and dc are in float32. Norms are not there yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..loop import Backward, Loop
from . import persistent, steps


def PARTS() -> int:
    """How many parts the sums of a norm's derivatives come in."""
    return 1


def prepare(*tensors: Tensor | None) -> None:
    """Nothing to do: a GPU's memory needs no first touch."""


def takes_x(w_ih: Tensor) -> bool:
    """Whether the loop takes x·Wx itself: never, one large product before it is faster."""
    return False


def forward(loop: Loop) -> None:
    """Run the loop forwards: gates, states and what the way back needs are written into `loop`."""
    _check(loop)
    if loop.steps == 0 or loop.batch == 0:
        return
    with torch.cuda.device(loop.gates.device):
        loop.gates[: len(loop.y)] += loop.b_x
        if not persistent.run(loop, None):
            steps.forward(loop)


def backward(loop: Loop, back: Backward) -> None:
    """Run the loop backwards: the derivatives are written into `back`."""
    _check(loop)
    if loop.steps == 0 or loop.batch == 0:
        return
    with torch.cuda.device(loop.gates.device):
        if not persistent.run(loop, back):
            steps.backward(loop, back)


def _check(loop: Loop) -> None:
    if loop.norm is not None:
        raise NotImplementedError("backend: norms do not run on a GPU's kernels yet; backend='reference' would do")
