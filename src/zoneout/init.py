"""The weight initialisers that the experiments of the zoneout paper use."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .layers import LSTM
from .step_cells import LSTMCell


@torch.no_grad()
def block_orthogonal_(weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill a matrix in place with independent random orthogonal blocks.

    The blocks are the largest equal squares that the matrix can be divided into.

    Args:
        weight: a tensor with two dimensions.
        generator: the random generator; by default torch's.

    Returns:
        `weight`.

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
    """Fill a matrix in place with a random matrix whose rows or columns are orthonormal.

    The rows are orthonormal if there are fewer rows than columns, otherwise the columns are. Half
    types are computed in float32.

    Args:
        weight: a tensor with two dimensions.
        generator: the random generator; by default torch's.

    Returns:
        `weight`.

    >>> import torch, zoneout as zo
    >>> w = zo.init.orthogonal_(torch.empty(20, 50))
    >>> torch.allclose(w @ w.T, torch.eye(20), atol=1e-5)
    True
    """
    _check_matrix(weight)
    wide = (
        weight if weight.dtype == torch.float64 else torch.empty_like(weight, dtype=torch.float32)
    )
    return weight.copy_(nn.init.orthogonal_(wide, generator=generator))


def uniform_(
    module: nn.Module, bound: float, generator: torch.Generator | None = None
) -> nn.Module:
    """Fill every weight and bias of a module in place from U(−bound, bound).

    Parameters of norms and learned initial states are unchanged.

    Args:
        module: the module, with all its submodules.
        bound: the largest absolute value.
        generator: the random generator; by default torch's.

    Returns:
        `module`.

    >>> import zoneout as zo
    >>> layer = zo.init.uniform_(zo.LSTM(10, 20), 0.05)
    >>> bool(layer.weight_ih_l0.abs().max() <= 0.05)
    True
    """
    norms = {
        id(param)
        for part in module.modules()
        if isinstance(part, _NORMS)
        for param in part.parameters(False)
    }
    for name, parameter in module.named_parameters():
        if id(parameter) not in norms and not name.rpartition(".")[2].startswith(
            ("norm_", "h0", "c0")
        ):
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return module


_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


@torch.no_grad()
def forget_bias_(module: nn.Module, value: float = 1.0) -> nn.Module:
    """Set the forget-gate bias of an LSTM to `value` and all other biases to zero, in place.

    Of the two bias vectors, `bias_ih` gets the value and `bias_hh` is zero.

    Args:
        module: an LSTM layer or LSTM cell, of zoneout or of `torch.nn`.
        value: the bias of the forget gate.

    Returns:
        `module`.

    >>> import zoneout as zo
    >>> layer = zo.init.forget_bias_(zo.LSTM(10, 2), 1.0)
    >>> layer.bias_ih_l0.tolist()  # two units; the gates are input, forget, cell, output
    [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    if not isinstance(module, (nn.LSTM, LSTM, nn.LSTMCell, LSTMCell)):
        raise ValueError(f"module: expected an LSTM or an LSTMCell, got {type(module).__name__}")
    for name, parameter in module.named_parameters(recurse=False):
        if name.startswith("bias_"):
            parameter.zero_()
            if name.startswith("bias_ih"):
                size = len(parameter) // 4
                parameter[size : 2 * size] = value
    return module


def _check_matrix(weight: Tensor) -> None:
    """Raise unless `weight` is a tensor with two dimensions."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight: expected a matrix, got {type(weight).__name__}")
    if weight.dim() != 2:
        raise ValueError(f"weight: expected a matrix, got shape {tuple(weight.shape)}")
