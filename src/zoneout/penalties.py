"""Regularisation terms to add to the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsFloat

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from .layers import check_lengths


def norm_stabilizer(
    outputs: Tensor | PackedSequence,
    beta: float,
    *,
    batch_first: bool = False,
    lengths: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Return the norm stabilizer, β · mean of (‖h_t‖ − ‖h_{t−1}‖)² over batch and steps.

    The change from the initial state to the first step is not included.

    Args:
        outputs: the outputs of a layer: [T, B, H], [B, T, H] with `batch_first`, [T, H] unbatched,
            or a PackedSequence.
        beta: the weight β of the term.
        batch_first: True if `outputs` is [B, T, H].
        lengths: the lengths of padded sequences, [B]; steps past a length are not included.

    Returns:
        A scalar to add to the loss.

    >>> import torch, zoneout as zo
    >>> y = torch.tensor([3.0, 5.0, 4.0])[:, None, None] * torch.ones(3, 2, 1)
    >>> zo.norm_stabilizer(y, beta=2.0).item()  # 2 · (2² + 1²) / 2
    5.0
    """
    if isinstance(outputs, PackedSequence):
        if lengths is not None:
            raise ValueError("lengths: expected None, since packed outputs contain their lengths")
        outputs, lengths = pad_packed_sequence(outputs)
        batch_first = False
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        got = outputs.dtype if isinstance(outputs, Tensor) else type(outputs).__name__
        raise TypeError(
            f"outputs: expected a tensor of floating-point numbers or a PackedSequence, got {got}"
        )
    if isinstance(beta, (bool, str)) or not isinstance(beta, SupportsFloat):
        raise TypeError(f"beta: expected a number, got {type(beta).__name__}")
    if outputs.dim() not in (2, 3):
        raise ValueError(f"outputs: expected [T, B, H] or [T, H], got {outputs.dim()} dimensions")
    if outputs.dim() == 2:
        outputs = outputs[:, None]
    elif batch_first:
        outputs = outputs.transpose(0, 1)
    # Sums over many steps can exceed the range of float16, so half types are summed in float32.
    wide = torch.float32 if outputs.dtype in (torch.float16, torch.bfloat16) else None
    norms = torch.linalg.vector_norm(outputs, dim=-1, dtype=wide)  # [T, B]
    changes = (norms[1:] - norms[:-1]).square()
    if lengths is None:
        return beta * changes.sum() / max(1, changes.numel())
    ends = check_lengths(lengths, len(outputs), outputs.shape[1], True).to(outputs.device)
    counts = torch.arange(1, len(norms), device=outputs.device)[:, None] < ends
    return beta * torch.where(counts, changes, 0.0).sum() / counts.sum().clamp(min=1)
