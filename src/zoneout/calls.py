"""The types of arguments and results of layers and cells.

`nn.Module.__call__` returns Any. The layers and cells say more to a type checker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypedDict, TypeVar

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .noise import Noise
from .noisy import Rates
from .norm import LayerNorm, RecurrentBatchNorm

Noises: TypeAlias = Noise | Iterable[Noise] | None
Norm: TypeAlias = str | LayerNorm | RecurrentBatchNorm | None
State: TypeAlias = Tensor | tuple[Tensor, ...]
Batch = TypeVar("Batch", Tensor, PackedSequence)  # the outputs have the form of the input


class LayerCall(TypedDict, total=False):
    """The keyword arguments of a layer, which `LSTM.forward` explains."""

    lengths: Tensor | Sequence[int] | None
    resets: Tensor | None
    seed: int | Tensor | None
    examples: int | Tensor | Sequence[int] | None
    first_step: int
    rates: Rates | None


class StepCall(TypedDict, total=False):
    """The keyword arguments of a cell, which `LSTMCell.forward` explains."""

    seed: int | Tensor | None
    step: int | None
    examples: int | Tensor | Sequence[int] | None
    rates: Rates | None
