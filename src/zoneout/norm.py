"""Normalisation inside the step: layer norm and recurrent batch norm.

Both normalise the same three things: the product x·Wx (scale only), the product h·Wh (scale; the cell's
bias is the shift of both), and in an LSTM the candidate c, only where it feeds h = o ⊙ tanh(norm(c)), before
zoning out; the raw c is carried. Layer norm takes its moments over the units of one example, recurrent
batch norm over the examples that are still alive at one processed step, with statistics kept for each step.
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
    """What `norm="layer"` stands for."""

    eps: float = 1e-5
    scale: float = 1.0  # what the scales start at


@dataclass(frozen=True)
class RecurrentBatchNorm:
    """Batch norm with statistics for each time step, shared scales, and the last step's beyond `steps`.

    `steps` is the length of the training sequences: statistics are kept for so many. `momentum` is the weight of a new
    batch in the running averages. At evaluation these are used, or with `at_eval="batch"` the batch's own. As in
    torch's batch norm a batch is normalised by its biased variance, the unbiased one is kept, and one is not enough.

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
            raise ValueError(f"RecurrentBatchNorm(steps=…): expected a number of steps, got {self.steps!r}")
        for name in ("momentum", "eps", "scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"RecurrentBatchNorm({name}=…): expected a number, got {value!r}")
            if not math.isfinite(value):
                raise ValueError(f"RecurrentBatchNorm({name}=…): expected a finite number, got {value!r}")
        if self.eps <= 0:
            raise ValueError(f"RecurrentBatchNorm(eps=…): expected a number above 0, got {self.eps}")
        if not 0 <= self.momentum <= 1:
            raise ValueError(f"RecurrentBatchNorm(momentum=…): expected a number from 0 to 1, got {self.momentum}")
        if self.at_eval not in ("running", "batch"):
            raise ValueError(f"RecurrentBatchNorm(at_eval=…): expected 'running' or 'batch', got {self.at_eval!r}")


def as_norm(norm: str | LayerNorm | RecurrentBatchNorm | None) -> LayerNorm | RecurrentBatchNorm | None:
    """The norm as its dataclass, or an error."""
    if norm == "layer":
        return LayerNorm()
    if norm is None or isinstance(norm, (LayerNorm, RecurrentBatchNorm)):
        return norm
    raise ValueError(f"norm: expected 'layer', a RecurrentBatchNorm or None, got {norm!r}")


# --- inside the step -------------------------------------------------------------------------------


class Moments(NamedTuple):
    """Mean and variance of the three normalised things at every processed step, [T, ·] each."""

    mean_x: Tensor
    var_x: Tensor
    mean_h: Tensor
    var_h: Tensor
    mean_c: Tensor | None = None
    var_c: Tensor | None = None


class StepNorm(NamedTuple):
    """The normalisation of one run over time, ready for a backend."""

    over: str  # "units": layer norm; "examples": batch norm
    eps: float
    scale_x: Tensor
    scale_h: Tensor
    scale_c: Tensor | None = None
    shift_c: Tensor | None = None
    given: Moments | None = None  # batch norm: moments to use; None: the batch's own


def moments(v: Tensor, over: str, alive: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of [..., B, units], over the units or the examples alive ([..., B, 1])."""
    if v.numel() == 0:  # of nothing, which torch would warn of
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
    return (v - mean) * torch.rsqrt(var + eps) * scale


# --- statistics over time --------------------------------------------------------------------------

STATISTICS = tuple(f"{what}_{of}" for of in ("ih", "hh", "cell") for what in ("mean", "var"))


def rows(statistics: Tensor, first_step: int, steps: int) -> Tensor:
    """The statistics of `steps` steps from `first_step` on; beyond the last one kept, that one again."""
    index = torch.arange(first_step, first_step + steps, device=statistics.device)
    return statistics[index.clamp(max=len(statistics) - 1)]


@torch.no_grad()
def record(statistics: Tensor, seen: Tensor, first_step: int, weight: Tensor) -> None:
    """Move the running `statistics` towards what a batch has `seen` [T, ·], each step by its `weight` [T]."""
    kept = max(0, min(len(seen), len(statistics) - first_step))
    where = statistics[first_step : first_step + kept]
    where.lerp_(seen[:kept].to(where.dtype), weight[:kept, None].to(where.dtype))


def _unpacked(model: nn.Module, batch: Sequence[Any]) -> None:
    try:
        model(*batch)
    except (TypeError, ValueError) as error:
        error.add_note(
            f"zoneout.estimate_statistics called the model with all {len(batch)} values of a batch: leave out what is "
            "not its input, as labels, by (x for x, _ in batches)"
        )
        raise


@torch.no_grad()
def estimate_statistics(model: nn.Module, batches: Iterable[Any]) -> int:
    """Estimate anew the statistics of every recurrent batch norm in `model`, as averages over `batches`.

    Each batch is what `model` is called with (a tuple or list is unpacked, a dict gives keyword arguments; leave out
    labels: `(x for x, _ in loader)`). The model runs in evaluation mode with each batch's own statistics, and a step's
    statistics are averaged over the batches that reach it; modes are put back afterwards. Returns the number of batches
    used. If anything fails, the statistics are as they were.

    >>> import torch, zoneout as zo
    >>> layer = zo.LSTM(3, 5, norm=zo.RecurrentBatchNorm(steps=4))
    >>> zo.estimate_statistics(layer, [torch.randn(4, 8, 3) for _ in range(10)])
    10
    """
    modules = list(model.modules())
    layers: list[Any] = [
        m
        for m in modules
        if isinstance(getattr(m, "norm", None), RecurrentBatchNorm) and hasattr(m, "statistics_names")
    ]
    if not layers:
        raise ValueError("model: expected at least one layer with norm=RecurrentBatchNorm(…), found none")
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
        raise ValueError("batches: expected at least one batch, got none; the statistics are as they were")
    return count
