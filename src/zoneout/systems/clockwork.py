"""Clockwork RNNs: units with periods, and no connections from fast units to slow ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..noise import Zoneout
from ..rates import check_periods
from ..sequence_layer import SequenceLayer


def module_periods(hidden_size: int, periods: Sequence[int]) -> Tensor:
    """Return one period per unit, for modules of equal size; the first modules are larger by one.

    Args:
        hidden_size: the number of units.
        periods: one period for each module.

    Returns:
        An int64 tensor [hidden_size].

    >>> module_periods(5, [1, 2])
    tensor([1, 1, 1, 2, 2])
    """
    if not isinstance(periods, (Sequence, Tensor)) or not len(periods):
        got = "none" if hasattr(periods, "__len__") else repr(periods)
        raise ValueError(f"periods: expected one for each module, such as [1, 2, 4, 8], got {got}")
    checked = check_periods(list(periods), "periods")
    if len(checked) > hidden_size:
        raise ValueError(f"periods: expected at most {hidden_size}, one a unit, got {len(checked)}")
    size, larger = divmod(hidden_size, len(checked))
    units = [p for k, p in enumerate(checked) for _ in range(size + (k < larger))]
    return torch.tensor(units, device="cpu")


def clockwork(layer: Any, periods: Sequence[int]) -> Any:
    """Make a clockwork layer of a layer with one direction, in place, and return it.

    The units are divided into modules, one for each period. A unit is updated at the steps that are
    a multiple of its period: `Zoneout(mask="clock")`, beside the noise that the layer has. Of
    `weight_hh`, only entries to units that are as fast or faster are used, as in Koutník et al., "A
    Clockwork RNN", 2014.

    Args:
        layer: an `LSTM`, `GRU`, `RNN` or `Recurrent` with a matrix for h.
        periods: the period of each module, such as 1, 2, 4, 8.

    Returns:
        `layer`.

    >>> import torch, zoneout as zo
    >>> layer = zo.systems.clockwork(zo.RNN(3, 8), [1, 2, 4, 8])
    >>> y, h = layer(torch.randn(5, 2, 3))
    >>> bool((y[1, :, 2:4] == y[0, :, 2:4]).all())  # the second module waits
    True
    """
    if not isinstance(layer, SequenceLayer) or not layer.definition.has_r:
        raise TypeError(f"layer: expected a layer with a matrix for h, got {type(layer).__name__}")
    if layer.bidirectional or layer.definition.heads > 1:
        raise ValueError("layer: expected one direction and a dense matrix for h")
    units = module_periods(layer.hidden_size, periods)
    before = layer.noise
    others = () if before is None else before if isinstance(before, tuple) else (before,)
    layer.noise = (Zoneout(mask="clock", periods=units), *others)
    for k in range(layer.num_layers):
        weight = getattr(layer, f"weight_hh_l{k}")
        slower = _FromSlower(units.to(weight.device), layer.definition.gates)
        parametrize.register_parametrization(layer, f"weight_hh_l{k}", slower)
    return layer


class _FromSlower(nn.Module):
    """Set the entries of `weight_hh` from a faster unit to a slower one to zero."""

    used: Tensor

    def __init__(self, periods: Tensor, gates: int) -> None:
        super().__init__()
        used = periods[None, :] >= periods[:, None]  # [to, from]
        self.register_buffer("used", used.repeat(gates, 1), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.used
