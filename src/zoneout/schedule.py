"""Rates that change during training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from .noise import Noise, StateNoise
from .noise_checks import as_noises
from .rates import check_rate
from .recurrent import RecurrentModule
from .wrap import ZoneoutCell


class RateSchedule:
    """Multiply all rates of a model by a factor that depends on the update.

    It is used like a scheduler of learning rates: call `step` after each update of the weights. The
    rates at construction are those of factor 1. Layers with `noise=None` are left alone, and so are
    rates that the call of a layer passes.

    Args:
        model: a module with layers or cells of this package, at any depth.
        factor: the factor of update n, from n = 0, for example `lambda n: min(1.0, n / 1000)`.

    A compiled model is compiled again when a rate becomes 0 or stops being 0; other rates compile
    nothing. Standard deviations of `WeightNoise` are multiplied too.

    >>> import zoneout as zo
    >>> layer = zo.LSTM(3, 4, noise=zo.Zoneout(cell=0.5, hidden=0.05))
    >>> schedule = zo.RateSchedule(layer, lambda n: min(1.0, n / 2))
    >>> for update in range(2):
    ...     schedule.step()
    ...     print(layer.noise)
    Zoneout(cell=0.25, hidden=0.025)
    Zoneout(cell=0.5, hidden=0.05)
    """

    def __init__(self, model: nn.Module, factor: Callable[[int], float]) -> None:
        self.factor, self.updates = factor, 0
        self._layers = [
            (module, module.noise)
            for module in model.modules()
            if isinstance(module, RecurrentModule) and as_noises(module.noise)
        ]
        self._cells = [(m, m.rates) for m in model.modules() if isinstance(m, ZoneoutCell)]
        if not self._layers and not self._cells:
            raise ValueError(
                f"model: expected a layer with noise or a ZoneoutCell inside, got none in "
                f"{type(model).__name__}; try noise=zo.Zoneout(…) or zo.convert"
            )
        self._apply(0)

    def step(self) -> None:
        """Count one update and set the rates."""
        self._apply(self.updates + 1)

    def state_dict(self) -> dict[str, int]:
        """Return the number of updates, for a checkpoint."""
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set the number of updates, and the rates of that update."""
        self._apply(state["updates"])

    def _apply(self, updates: int) -> None:
        """Set the rates of an update; if one is refused, nothing changes."""
        factor = float(self.factor(updates))
        if not 0 <= factor < float("inf"):
            raise ValueError(f"factor: expected a number of at least 0, got {factor}")
        # All new rates are checked before the first one changes.
        noises = [
            tuple(_scaled_noise(one, factor) for one in as_noises(noise))
            for _, noise in self._layers
        ]
        scaled = [_scaled(rates, factor) for _, rates in self._cells]
        for rates in scaled:
            check_rate(rates, "rates")
        for (layer, noise), new in zip(self._layers, noises):
            layer.noise = new[0] if isinstance(noise, Noise) else new
        for (cell, _), rates in zip(self._cells, scaled):
            cell.rates = rates
        self.updates = updates


def _scaled(rate: Any, factor: float) -> Any:
    """Return a rate, or each of a sequence, times the factor."""
    if isinstance(rate, (int, float, Tensor)):
        return rate * factor
    return [_scaled(one, factor) for one in rate]


def _scaled_noise(noise: Noise, factor: float) -> Noise:
    """Return the noise with all its rates times the factor."""
    rates = {field: _scaled(getattr(noise, field), factor) for field in noise.fields}
    if isinstance(noise, StateNoise):
        rates["states"] = {s: _scaled(rate, factor) for s, rate in dict(noise.states).items()}
    return dataclasses.replace(noise, **rates)
