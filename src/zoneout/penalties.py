"""Regularisation terms to add to the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, SupportsFloat

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from .checks import check_lengths


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
    outputs, counts = _time_first(outputs, batch_first, lengths)
    _check_number(beta, "beta")
    # Sums over many steps can exceed the range of float16, so half types are summed in float32.
    norms = torch.linalg.vector_norm(outputs, dim=-1, dtype=_wide(outputs))  # [T, B]
    return beta * _mean((norms[1:] - norms[:-1]).square(), counts)


def activation_penalty(
    outputs: Tensor | PackedSequence,
    alpha: float = 0.0,
    beta: float = 0.0,
    *,
    dropped: Tensor | PackedSequence | None = None,
    batch_first: bool = False,
    lengths: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Return α · mean of h² + β · mean of (h_t − h_{t−1})², over batch, steps and units.

    These are activation regularization and temporal activation regularization (Merity, McCann and
    Socher, "Revisiting Activation Regularization for Language RNNs", 2017).

    Args:
        outputs: the outputs of a layer, in any form that `norm_stabilizer` takes.
        alpha: the weight α of the squares.
        beta: the weight β of the changes; that from the initial state is not included.
        dropped: the outputs after dropout, for the squares; by default `outputs`.
        batch_first, lengths: as in `norm_stabilizer`.

    Returns:
        A scalar to add to the loss.

    >>> import torch, zoneout as zo
    >>> y = torch.tensor([3.0, 5.0, 4.0])[:, None, None] * torch.ones(3, 2, 1)
    >>> zo.activation_penalty(y, beta=2.0).item()  # 2 · (2² + 1²) / 2
    5.0
    >>> zo.activation_penalty(y, alpha=3.0).item()  # 3 · (3² + 5² + 4²) / 3
    50.0
    """
    _check_number(alpha, "alpha")
    _check_number(beta, "beta")
    found, counts = _time_first(outputs, batch_first, lengths)
    kept = found if dropped is None else _time_first(dropped, batch_first, lengths)[0]
    if kept.shape != found.shape:
        raise ValueError(
            f"dropped: expected the shape of the outputs, got {tuple(kept.shape)} and "
            f"{tuple(found.shape)}"
        )
    wide = _wide(found)
    found, kept = found.to(wide), kept.to(wide)
    squares = _mean(kept.square().mean(-1), counts, first=0)
    return alpha * squares + beta * _mean((found[1:] - found[:-1]).square().mean(-1), counts)


def _time_first(
    outputs: Tensor | PackedSequence, batch_first: bool, lengths: Tensor | Sequence[int] | None
) -> tuple[Tensor, Tensor | None]:
    """Return outputs as [T, B, H], and which steps count, [T, B], or None for all."""
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
    if outputs.dim() not in (2, 3):
        raise ValueError(f"outputs: expected [T, B, H] or [T, H], got {outputs.dim()} dimensions")
    if outputs.dim() == 2:
        outputs = outputs[:, None]
    elif batch_first:
        outputs = outputs.transpose(0, 1)
    if lengths is None:
        return outputs, None
    ends = check_lengths(lengths, len(outputs), outputs.shape[1], True).to(outputs.device)
    return outputs, torch.arange(len(outputs), device=outputs.device)[:, None] < ends


def _mean(values: Tensor, counts: Tensor | None, first: int = 1) -> Tensor:
    """Return the mean of values [T − first, B] over the steps that count."""
    if counts is None:
        return values.sum() / max(1, values.numel())
    counts = counts[first:]
    return torch.where(counts, values, 0.0).sum() / counts.sum().clamp(min=1)


def _wide(outputs: Tensor) -> torch.dtype:
    half = outputs.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half else outputs.dtype


def _check_number(value: Any, name: str) -> None:
    if isinstance(value, (bool, str)) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    # The value of a tensor is not read: that would wait for a GPU.
    if not isinstance(value, Tensor) and not math.isfinite(float(value)):
        raise ValueError(f"{name}: expected a finite number, got {value}")
