"""Normalisation inside the step: layer norm and recurrent batch norm.

Both normalise the same three values:

* the product x·Wx, with a scale;
* the product h·Wh, with a scale (the bias of the cell is the shift of both products);
* in an LSTM the candidate c, with scale and shift, only where it feeds h = o ⊙ tanh(norm(c)).

The candidate c is normalised before zoneout. The next step receives c without the norm.

Layer norm computes mean and variance over the units of one example. Recurrent batch norm computes
them at each processed step over the sequences that have not ended, and keeps statistics per step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class LayerNorm:
    """Layer norm inside the step; `norm="layer"` means `LayerNorm()`."""

    eps: float = 1e-5
    scale: float = 1.0  # the initial value of the scales


@dataclass(frozen=True)
class RecurrentBatchNorm:
    """Batch norm inside the step, with statistics for each time step and scales shared over time.

    As in torch's batch norm, a batch is normalised by its biased variance, the running average is
    that of the unbiased variance, and training needs at least two sequences.

    Args:
        steps: the number of steps with statistics, usually the length of the training sequences.
            Later steps use the statistics of the last one.
        momentum: the weight of a new batch in the running averages.
        eps: a small number that is added to the variance.
        scale: the initial value of the scales.
        at_eval: the statistics used in evaluation: `"running"` for the running averages, `"batch"`
            for those of the batch.

    >>> import zoneout as zo
    >>> layer = zo.LSTM(1, 100, norm=zo.RecurrentBatchNorm(steps=784))
    >>> layer.mean_hh_l0.shape
    torch.Size([784, 400])
    """

    steps: int
    momentum: float = 0.01
    eps: float = 1e-5
    scale: float = 0.1
    at_eval: str = "running"

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(
                f"RecurrentBatchNorm(steps=…): expected a number of steps, got {self.steps!r}"
            )
        for name in ("momentum", "eps", "scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"RecurrentBatchNorm({name}=…): expected a number, got {value!r}")
            if not math.isfinite(value):
                raise ValueError(
                    f"RecurrentBatchNorm({name}=…): expected a finite number, got {value!r}"
                )
        if self.eps <= 0:
            raise ValueError(
                f"RecurrentBatchNorm(eps=…): expected a number above 0, got {self.eps}"
            )
        if not 0 <= self.momentum <= 1:
            raise ValueError(
                "RecurrentBatchNorm(momentum=…): expected a number from 0 to 1, got "
                f"{self.momentum}"
            )
        if self.at_eval not in ("running", "batch"):
            raise ValueError(
                "RecurrentBatchNorm(at_eval=…): expected 'running' or 'batch', got "
                f"{self.at_eval!r}"
            )


def as_norm(
    norm: str | LayerNorm | RecurrentBatchNorm | None,
) -> LayerNorm | RecurrentBatchNorm | None:
    """Return the norm as a dataclass or None; raise if it is anything else."""
    if norm == "layer":
        return LayerNorm()
    if norm is None or isinstance(norm, (LayerNorm, RecurrentBatchNorm)):
        return norm
    raise ValueError(f"norm: expected 'layer', a RecurrentBatchNorm or None, got {norm!r}")


# --- inside the step ------------------------------------------------------------------------------


class Moments(NamedTuple):
    """Mean and variance of the three normalised values at every processed step, each [T, ·]."""

    mean_x: Tensor
    var_x: Tensor
    mean_h: Tensor
    var_h: Tensor
    mean_c: Tensor | None = None
    var_c: Tensor | None = None


class StepNorm(NamedTuple):
    """The normalisation of one run over time, as a backend needs it."""

    over: str  # "units": layer norm; "examples": batch norm
    eps: float
    scale_x: Tensor
    scale_h: Tensor
    scale_c: Tensor | None = None
    shift_c: Tensor | None = None
    given: Moments | None = None  # batch norm: the moments to use; None: those of the batch


def moments(v: Tensor, over: str, alive: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of `v` [..., B, units].

    They are taken over the units, or over the examples where `alive` [..., B, 1] is True.
    """
    if v.numel() == 0:  # torch would warn about the variance of an empty tensor
        zero = v.sum(dim=-1 if over == "units" else -2, keepdim=True)
        return zero, zero
    if over == "units":
        var, mean = torch.var_mean(v, dim=-1, correction=0, keepdim=True)
        return mean, var
    if alive is None:
        var, mean = torch.var_mean(v, dim=-2, correction=0, keepdim=True)
        return mean, var
    share = alive.to(v.dtype) / alive.sum(dim=-2, keepdim=True).clamp(min=1)
    mean = (v * share).sum(dim=-2, keepdim=True)
    return mean, ((v - mean).square() * share).sum(dim=-2, keepdim=True)


def normalise(v: Tensor, mean: Tensor, var: Tensor, eps: float, scale: Tensor) -> Tensor:
    """Return `v`, normalised by mean and variance, times `scale`."""
    return (v - mean) * torch.rsqrt(var + eps) * scale


# --- statistics of each step ----------------------------------------------------------------------

STATISTICS = tuple(f"{what}_{of}" for of in ("ih", "hh", "cell") for what in ("mean", "var"))


def rows(statistics: Tensor, first_step: int, steps: int) -> Tensor:
    """Return the statistics of `steps` steps from `first_step` on.

    Steps beyond the last one with statistics get those of the last one.
    """
    index = torch.arange(first_step, first_step + steps, device=statistics.device)
    return statistics[index.clamp(max=len(statistics) - 1)]


@torch.no_grad()
def record(statistics: Tensor, seen: Tensor, first_step: int, weight: Tensor) -> None:
    """Update the running `statistics` in place with the statistics of a batch, `seen` [T, ·].

    `weight` [T] is the weight of the batch at each step.
    """
    count = max(0, min(len(seen), len(statistics) - first_step))
    running = statistics[first_step : first_step + count]
    running.lerp_(seen[:count].to(running.dtype), weight[:count, None].to(running.dtype))


def _unpacked(model: nn.Module, batch: Sequence[Any]) -> None:
    """Call the model with the elements of a batch; add a hint about labels to its errors."""
    try:
        model(*batch)
    except (TypeError, ValueError) as error:
        error.add_note(
            f"zoneout.estimate_statistics called the model with all {len(batch)} values of a "
            "batch; if some are labels, leave them out with (x for x, _ in batches)"
        )
        raise


@torch.no_grad()
def estimate_statistics(model: nn.Module, batches: Iterable[Any]) -> int:
    """Replace the statistics of every recurrent batch norm in `model` by averages over `batches`.

    The model runs in evaluation mode, and each batch is normalised by its own statistics. The
    statistics of a step are averaged over the batches that reach this step. Afterwards the training
    modes are restored. If an error is raised, the statistics are unchanged.

    Args:
        model: the model.
        batches: an iterable over the arguments of the model's calls. A tuple or list is unpacked, a
            dict gives keyword arguments. Leave out labels: `(x for x, _ in loader)`.

    Returns:
        The number of batches used.

    >>> import torch, zoneout as zo
    >>> layer = zo.LSTM(3, 5, norm=zo.RecurrentBatchNorm(steps=4))
    >>> zo.estimate_statistics(layer, [torch.randn(4, 8, 3) for _ in range(10)])
    10
    """
    modules = list(model.modules())
    layers: list[Any] = [
        m
        for m in modules
        if isinstance(getattr(m, "norm", None), RecurrentBatchNorm)
        and hasattr(m, "statistics_names")
    ]
    if not layers:
        raise ValueError(
            "model: expected at least one layer with norm=RecurrentBatchNorm(…), found none"
        )
    modes = [(m, m.training) for m in modules]
    norms = [layer.norm for layer in layers]
    before = [{n: getattr(layer, n).clone() for n in layer.statistics_names()} for layer in layers]
    count, done = 0, False
    try:
        model.eval()
        for layer, norm in zip(layers, norms):
            layer.norm, layer.recording = replace(norm, at_eval="batch"), {}
        for batch in batches:
            count += 1
            if isinstance(batch, dict):
                model(**batch)
            elif isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence):
                _unpacked(model, batch)
            else:
                model(batch)
        done = count > 0
    finally:
        for layer, norm, old in zip(layers, norms, before):
            layer.norm, layer.recording = norm, None
            for name, value in ({} if done else old).items():
                getattr(layer, name).copy_(value)
        for module, mode in modes:
            module.training = mode
    if not count:
        raise ValueError(
            "batches: expected at least one batch, got none; the statistics are unchanged"
        )
    return count
