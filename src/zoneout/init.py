"""The initialisers of the paper's experiments."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .step_cells import LSTMCell


@torch.no_grad()
def block_orthogonal_(weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Cut a matrix into the largest equal squares and make each an independent random orthogonal matrix.

    >>> w = block_orthogonal_(torch.empty(4000, 50))
    >>> block = w[50:100]
    >>> torch.allclose(block @ block.T, torch.eye(50), atol=1e-5)
    True
    """
    _check_matrix(weight)
    side = math.gcd(*weight.shape)
    for rows in weight.split(side, dim=0):
        for block in rows.split(side, dim=1):
            orthogonal_(block, generator)
    return weight


@torch.no_grad()
def orthogonal_(weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One random matrix with orthonormal rows or columns, whichever are fewer."""
    _check_matrix(weight)
    wide = weight if weight.dtype == torch.float64 else torch.empty_like(weight, dtype=torch.float32)
    return weight.copy_(nn.init.orthogonal_(wide, generator=generator))


def uniform_(module: nn.Module, bound: float, generator: torch.Generator | None = None) -> nn.Module:
    """Every weight and bias of a module from U(−bound, bound); norms and initial states stay as they are."""
    norms = {id(own) for part in module.modules() if isinstance(part, _NORMS) for own in part.parameters(False)}
    for name, parameter in module.named_parameters():
        if id(parameter) not in norms and not name.rpartition(".")[2].startswith(("norm_", "h0", "c0")):
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return module


_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


@torch.no_grad()
def forget_bias_(module: nn.Module, value: float = 1.0) -> nn.Module:
    """Set every bias of an LSTM (layer or cell) to zero, but that of the forget gate to `value`."""
    if getattr(module, "mode", "") != "LSTM" and not isinstance(module, (nn.LSTMCell, LSTMCell)):
        raise ValueError(f"module: expected an LSTM or an LSTMCell, got {type(module).__name__}")
    for name, parameter in module.named_parameters(recurse=False):
        if name.startswith("bias_"):
            parameter.zero_()
            if name.startswith("bias_ih"):
                size = len(parameter) // 4
                parameter[size : 2 * size] = value
    return module


def _check_matrix(weight: Tensor) -> None:
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight: expected a matrix, got {type(weight).__name__}")
    if weight.dim() != 2:
        raise ValueError(f"weight: expected a matrix, got shape {tuple(weight.shape)}")
