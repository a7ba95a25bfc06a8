"""Gradients of fused runs that can be derived again (`create_graph=True`).

The fused backward passes compute numbers without a graph. So the gradients that may need a
derivative are those of the reference, which draws the same masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ..run import Result, Run
from ..sequence.packing import packed, packing_of, padded
from .flat import Settings, unflatten


def gradients_with_graph(
    settings: Settings,
    tensors: Sequence[Tensor],
    constants: Sequence[Tensor],
    needed: Sequence[bool],
    d: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return the gradients of a run's tensors from those of its outputs; None if not needed."""
    # Aliases: a gradient must not contain paths through the history of another tensor.
    own = [v.view_as(v) if need else v for v, need in zip(tensors, needed, strict=True)]
    done = _by_reference(unflatten(settings, own, constants))
    outputs = done.y, *done.final, *done.states
    pairs = [(y, dy) for y, dy in zip(outputs, d) if dy is not None and y.requires_grad]
    wanted = [v for v, need in zip(own, needed) if need]
    if not pairs or not wanted:
        return [None] * len(own)
    given = [dy.to(y.dtype) for y, dy in pairs]
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs], wanted, given, create_graph=True, allow_unused=True
        )
    )
    return [next(found) if need else None for need in needed]


def _by_reference(r: Run) -> Result:
    """Return the results of a run; packed rows are padded for it, and its outputs packed."""
    if r.counts is None:
        return reference.run(r)
    packing = packing_of(r.counts, len(r.states[0]), r.x)

    def pad(v: Tensor | None) -> Tensor | None:
        return None if v is None else padded(v, packing)

    done = reference.run(
        r._replace(
            x=padded(r.x, packing),
            extra=pad(r.extra),
            resets=None if r.resets is None else padded(r.resets[:, None], packing)[..., 0],
            lengths=packing.lengths,
            counts=None,
        )
    )
    states = tuple(packed(v, packing) for v in done.states)
    return done._replace(y=packed(done.y, packing), states=states)
