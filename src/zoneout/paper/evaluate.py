"""Evaluation: how well a model predicts, by a protocol, with every prediction counted.

Chunks each start from the initial state; streams and the whole text are run in pieces with the state carried, so that
memory does not grow with the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoneout as zo

from . import batches
from .config import Config, Protocol
from .data import Corpus, Images
from .disk import RunError
from .feeds import Feed, as_sequences, on_device
from .measures import in_measure
from .models import at_least_float32
from .processes import products_in


class Diverged(RunError):
    """The loss was no longer a finite number."""


@dataclass(frozen=True)
class Score:
    """What came out: nats a prediction, how many predictions, and of images the share that is wrong.

    >>> score = Score(nats=0.693147, predictions=99)
    >>> round(score.bits, 5), round(score.perplexity, 5)
    (1.0, 2.0)
    """

    nats: float
    predictions: int
    error: float | None = None

    @property
    def bits(self) -> float:
        """Bits a prediction."""
        return in_measure(self.nats, "bits")

    @property
    def perplexity(self) -> float:
        """e to the nats."""
        return in_measure(self.nats, "perplexity")

    def checked(self, what: str) -> Score:
        """The score, or an error where its loss is not a finite number, which no file or JSON can hold."""
        if not math.isfinite(self.nats):
            raise Diverged(f"{what}: the loss is {self.nats}, and no finite number; the weights cannot be good")
        return self


def nothing() -> None:
    """Called between batches where nobody listens."""


@torch.no_grad()
def evaluate_text(
    model: Any, tokens: Tensor, protocol: Protocol, *, seed: int = 0, tick: Callable[[], None] = nothing
) -> Score:
    """How well a language model predicts a text, by a protocol.

    The model should be in evaluation mode. `seed` is for noises with at_eval="sample"; `tick` is called between
    batches, and may raise to stop.
    """
    predictions(len(tokens), protocol)  # whether it can make any
    total = torch.zeros((), dtype=torch.float64, device=tokens.device)
    count = 0
    state, step, first_row = None, 0, 0
    for inputs, targets in _pieces(tokens, protocol):
        output = model(inputs, state, seed=seed, examples=first_row, first_step=step)
        total += nats(output.logits.flatten(0, 1), targets.flatten())
        count += targets.numel()
        if protocol.kind == "chunks":
            first_row += inputs.shape[1]
        else:
            state, step = output.state, step + len(inputs)
        tick()
    return Score(total.item() / count, count)


def predictions(size: int, protocol: Protocol) -> int:
    """How many predictions a protocol makes on a text of so many symbols; an error where it cannot make any.

    >>> predictions(396_412, Protocol("chunks", length=100)), predictions(446_184, Protocol("whole"))
    (392436, 446183)
    """
    if size < 2:
        raise ValueError(f"tokens: expected a text of at least 2 symbols, got {size}")
    if protocol.kind == "chunks":
        length = min(protocol.length, size)
        return size // length * (length - 1)
    streams = 1 if protocol.kind == "whole" else protocol.size
    if size < 2 * streams:
        raise ValueError(f"size: {streams} streams need a text of at least {2 * streams} symbols, got {size}")
    return (size // streams - 1) * streams


def _pieces(tokens: Tensor, protocol: Protocol) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of inputs and targets [T, B]."""
    if protocol.kind == "chunks":
        length = min(protocol.length, len(tokens))
        starts = batches.chunk_starts(len(tokens), length, offset=False, shuffle=False)
        for some in slices(len(starts), protocol.size):
            chunk = batches.chunks(tokens, starts[some], length)
            yield chunk[:-1], chunk[1:]
        return
    rows = batches.streams(tokens, 1 if protocol.kind == "whole" else protocol.size)
    for inputs, targets in batches.pieces(rows, protocol.length):
        yield inputs.to(torch.int64), targets.to(torch.int64)


def slices(count: int, size: int) -> list[slice]:
    """So many at a time; one that would be left over, of which batch norm has no statistics, goes with those before.

    >>> [(s.start, s.stop) for s in slices(9, 4)], [(s.start, s.stop) for s in slices(10, 4)]
    ([(0, 4), (4, 9)], [(0, 4), (4, 8), (8, 10)])
    """
    starts = list(range(0, count, size))
    if len(starts) > 1 and count - starts[-1] == 1 < size:
        starts.pop()
    return [slice(first, end) for first, end in pairwise([*starts, count])]


@torch.no_grad()
def evaluate_images(
    model: Any, pixels: Tensor, labels: Tensor, size: int, *, seed: int = 0, tick: Callable[[], None] = nothing
) -> Score:
    """How well a classifier does on images [N, 784]."""
    total = torch.zeros(2, dtype=torch.float64, device=pixels.device)
    for some in slices(len(pixels), size):
        truth = labels[some].to(torch.int64)
        logits = model(as_sequences(pixels[some]), seed=seed, examples=some.start).logits
        total[0] += nats(logits, truth)
        total[1] += (logits.argmax(-1) != truth).sum()
        tick()
    mean, wrong = (total / len(pixels)).tolist()
    return Score(mean, len(pixels), wrong)


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of all negative log-likelihoods, added up in double precision."""
    return F.cross_entropy(at_least_float32(logits), targets, reduction="none").sum(dtype=torch.float64)


@contextmanager
def evaluation_mode(model: nn.Module, *, batch_statistics: bool = False) -> Iterator[None]:
    """The model in evaluation mode; batch norm, if asked, with each batch's own statistics."""
    layers = [m for m in model.modules() if isinstance(getattr(m, "norm", None), zo.RecurrentBatchNorm)]
    norms, mode = [layer.norm for layer in layers], model.training
    model.eval()
    try:
        for layer in layers if batch_statistics else ():
            layer.norm = replace(layer.norm, at_eval="batch")  # type: ignore[type-var]
        yield
    finally:
        for layer, norm in zip(layers, norms):
            layer.norm = norm
        model.train(mode)


@contextmanager
def judged(model: nn.Module, config: Config, *, batch_statistics: bool) -> Iterator[None]:
    """The model as it is evaluated after training with a config: its mode, and the precision of products."""
    device = next(model.parameters()).device
    precision = "tf32" if config.precision != "fp32" and device.type == "cuda" else "fp32"
    with evaluation_mode(model, batch_statistics=batch_statistics), products_in(precision, device):
        yield


def evaluate(
    model: nn.Module,
    data: Corpus | Images,
    part: str,
    config: Config,
    *,
    protocol: Protocol | None = None,
    batch_statistics: bool = False,
    tick: Callable[[], None] = nothing,
) -> Score:
    """Evaluate on a part of the data ("train", "valid" or "test"), by the config's protocol for it or another.

    A part without a protocol of its own is evaluated as the validation part is. Products are in fp32, on a GPU after
    training in less (tf32, bf16) in tf32.
    """
    if part not in ("train", "valid", "test"):
        raise ValueError(f"part: expected 'train', 'valid' or 'test', got {part!r}")
    chosen = protocol or (config.evaluation.test if part == "test" else config.evaluation.valid)
    device = next(model.parameters()).device
    with judged(model, config, batch_statistics=batch_statistics):
        values = getattr(data, part)
        if isinstance(data, Images):
            pixels, labels = (on_device(array[: config.data.limit], device) for array in values)
            return evaluate_images(model, pixels, labels, chosen.size, seed=config.seed, tick=tick)
        return evaluate_text(model, on_device(values, device), chosen, seed=config.seed, tick=tick)


def estimate_statistics(
    model: nn.Module, feed: Feed, count: int = 0, size: int = 0, tick: Callable[[], None] = nothing
) -> int:
    """Estimate batch norm's statistics anew on `count` training batches, or a whole epoch; how many it took.

    `size` is how many examples a batch has, if not as many as in training. Large batches are closer to what the
    statistics are for: in small ones every step is normalised by what happens to be in the batch.
    """
    device = next(model.parameters()).device
    order: Sequence[Tensor] = list(feed.order(0))
    if size and not feed.carried:
        order = torch.cat(list(order)).split(size)
        order = [row for row in order if len(row) == size] or order  # what is left over would count as a whole batch

    def inputs() -> Iterator[tuple[Tensor]]:
        for row in order[: count or None]:
            yield (feed.batch(row.to(device))[0],)
            tick()

    return zo.estimate_statistics(model, inputs())
