"""Evaluation: the mean loss of a model on a text or on images, over every prediction.

A protocol says how the text is cut. Each chunk starts from the initial state. Streams, and the
whole text, are processed in pieces, with the state carried from piece to piece, so that memory use
does not grow with the length of the text.
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

from ..data import batches
from ..data.corpora import Corpus, Images
from ..disk import RunError
from .config import Config, Protocol
from .feeds import Feed, as_sequences, on_device
from .measures import in_measure
from .models import at_least_float32
from .processes import products_in


class Diverged(RunError):
    """The loss is not a finite number."""


@dataclass(frozen=True)
class Score:
    """The result of an evaluation.

    `nats` is the mean loss per prediction; `predictions` is their number; `error` is the share of
    images that were classified wrongly, or None for a text.

    >>> score = Score(nats=0.693147, predictions=99)
    >>> round(score.bits, 5), round(score.perplexity, 5)
    (1.0, 2.0)
    """

    nats: float
    predictions: int
    error: float | None = None

    @property
    def bits(self) -> float:
        """The mean loss in bits per prediction."""
        return in_measure(self.nats, "bits")

    @property
    def perplexity(self) -> float:
        """The perplexity: e to the power of the mean loss in nats."""
        return in_measure(self.nats, "perplexity")

    def checked(self, what: str) -> Score:
        """Return the score; raise `Diverged` if the loss is not a finite number.

        JSON, and so the files of a run, cannot contain such a number.
        """
        if not math.isfinite(self.nats):
            raise Diverged(
                f"{what}: the loss is {self.nats}, and no finite number; the weights cannot be good"
            )
        return self


def nothing() -> None:
    """Do nothing: the default of `tick`."""


@torch.no_grad()
def evaluate_text(
    model: Any,
    tokens: Tensor,
    protocol: Protocol,
    *,
    seed: int = 0,
    tick: Callable[[], None] = nothing,
) -> Score:
    """Evaluate a language model on a text, by a protocol.

    The model should be in evaluation mode. `seed` is used by noises with at_eval="sample". `tick`
    is called after every batch, and may raise an exception to stop the evaluation.
    """
    total = torch.zeros((), dtype=torch.float64, device=tokens.device)
    count = 0
    for logits, targets in _judged_pieces(model, tokens, protocol, seed):
        total += nats(logits, targets)
        count += len(targets)
        tick()
    return Score(total.item() / count, count)


TEMPERATURES = tuple(0.8 + 0.02 * k for k in range(26))


@torch.no_grad()
def choose_temperature(
    model: Any, data: Corpus, config: Config, *, tick: Callable[[], None] = nothing
) -> float:
    """Set the model's temperature to the one with the lowest loss on the validation part.

    It is one of `TEMPERATURES`. Return it.
    """
    tokens = on_device(data.valid, model.temperature.device)
    totals = torch.zeros(len(TEMPERATURES), dtype=torch.float64, device=tokens.device)
    model.temperature.fill_(1.0)
    with judged(model, config, batch_statistics=False):
        for logits, targets in _judged_pieces(model, tokens, config.evaluation.valid, config.seed):
            totals += torch.stack([nats(logits / t, targets) for t in TEMPERATURES])
            tick()
    chosen = TEMPERATURES[int(totals.argmin())]
    model.temperature.fill_(chosen)
    return round(chosen, 2)


def _judged_pieces(
    model: Any, tokens: Tensor, protocol: Protocol, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits [N, symbols] and targets [N] of every piece of a text."""
    predictions(len(tokens), protocol)  # raises if the text is too short
    state, step, first_row = None, 0, 0
    for inputs, targets in _pieces(tokens, protocol):
        output = model(inputs, state, seed=seed, examples=first_row, first_step=step)
        yield output.logits.flatten(0, 1), targets.flatten()
        if protocol.kind == "chunks":
            first_row += inputs.shape[1]
        else:
            state, step = output.state, step + len(inputs)


@torch.no_grad()
def evaluate_samples(
    model: Any,
    tokens: Tensor,
    protocol: Protocol,
    samples: int,
    *,
    seed: int = 0,
    tick: Callable[[], None] = nothing,
) -> Score:
    """Evaluate a language model by the mean of the probabilities that `samples` passes predict.

    Call it in `sampling_mode`. The passes are rows of one batch. Masks of whole sequences are those
    of the row, and so are fixed for a pass. Pieces of a text are shorter, and batches of chunks
    smaller, so that it needs no more memory than one pass.
    """
    predictions(len(tokens), protocol)  # raises if the text is too short
    name = "size" if protocol.kind == "chunks" else "length"
    small = replace(protocol, **{name: max(1, getattr(protocol, name) // samples)})
    total = torch.zeros((), dtype=torch.float64, device=tokens.device)
    count = 0
    state, step, first_row = None, 0, 0
    for inputs, targets in _pieces(tokens, small):
        wide, wanted = (v.repeat_interleave(samples, 1) for v in (inputs, targets))
        output = model(wide, state, seed=seed, examples=first_row, first_step=step)
        logs = at_least_float32(output.logits).log_softmax(-1).gather(-1, wanted[..., None])
        logs = logs[..., 0].unflatten(1, (-1, samples)).double()
        total -= (logs.logsumexp(-1) - math.log(samples)).sum()
        count += targets.numel()
        if protocol.kind == "chunks":
            first_row += wide.shape[1]
        else:
            state, step = output.state, step + len(inputs)
        tick()
    return Score(total.item() / count, count)


@contextmanager
def sampling_mode(model: Any, config: Config) -> Iterator[None]:
    """Draw dropout and noise inside the `with` block, as in training, but drop no whole symbols."""
    if config.task == "images" or config.model.norm == "batch":
        raise ValueError("samples: expected a run on a text, without batch norm")
    variational, mode = model.variational, model.training
    model.train()
    model.variational = replace(variational, words=0.0)
    try:
        yield
    finally:
        model.variational = variational
        model.train(mode)


def predictions(size: int, protocol: Protocol) -> int:
    """Return the number of predictions on a text of `size` symbols; raise if the text is too short.

    >>> predictions(396_412, Protocol("chunks", length=100))
    392436
    >>> predictions(446_184, Protocol("whole"))
    446183
    """
    if size < 2:
        raise ValueError(f"tokens: expected a text of at least 2 symbols, got {size}")
    if protocol.kind == "chunks":
        length = min(protocol.length, size)
        return size // length * (length - 1)
    streams = 1 if protocol.kind == "whole" else protocol.size
    if size < 2 * streams:
        raise ValueError(
            f"size: {streams} streams need a text of at least {2 * streams} symbols, got {size}"
        )
    return (size // streams - 1) * streams


def _pieces(tokens: Tensor, protocol: Protocol) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of inputs and targets, each [T, B]."""
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
    """Cut `count` rows into slices of `size` rows.

    A last slice of one row is merged into the slice before it, because batch norm cannot compute
    statistics of one row.

    >>> [(s.start, s.stop) for s in slices(9, 4)], [(s.start, s.stop) for s in slices(10, 4)]
    ([(0, 4), (4, 9)], [(0, 4), (4, 8), (8, 10)])
    """
    starts = list(range(0, count, size))
    if len(starts) > 1 and count - starts[-1] == 1 < size:
        starts.pop()
    return [slice(first, end) for first, end in pairwise([*starts, count])]


@torch.no_grad()
def evaluate_images(
    model: Any,
    pixels: Tensor,
    labels: Tensor,
    size: int,
    *,
    seed: int = 0,
    tick: Callable[[], None] = nothing,
) -> Score:
    """Evaluate a classifier on images [N, 784]."""
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
    """Return the sum of all negative log-likelihoods, added in double precision."""
    return F.cross_entropy(at_least_float32(logits), targets, reduction="none").sum(
        dtype=torch.float64
    )


@contextmanager
def evaluation_mode(model: nn.Module, *, batch_statistics: bool = False) -> Iterator[None]:
    """Put the model in evaluation mode inside the `with` block.

    With `batch_statistics`, batch norm uses the statistics of the current batch.
    """
    layers = [
        m for m in model.modules() if isinstance(getattr(m, "norm", None), zo.RecurrentBatchNorm)
    ]
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
    """Put the model in evaluation mode and set the precision of matrix products for a config.

    Evaluation uses fp32; on a GPU, after training in a lower precision, it uses tf32.
    """
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
    samples: int = 0,
    tick: Callable[[], None] = nothing,
) -> Score:
    """Evaluate a model on a part of the data: "train", "valid" or "test".

    By default the protocol is the config's protocol for the test part, or, for the other two parts,
    the one for the validation part. Matrix products are in fp32; on a GPU, after training in a
    lower precision (tf32, bf16, fp16), they are in tf32. With `samples`, probabilities are averaged
    over that number of passes with masks (see `evaluate_samples`).
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
        tokens = on_device(values, device)
        if samples:
            with sampling_mode(model, config):
                return evaluate_samples(model, tokens, chosen, samples, seed=config.seed, tick=tick)
        return evaluate_text(model, tokens, chosen, seed=config.seed, tick=tick)


def estimate_statistics(
    model: nn.Module, feed: Feed, count: int = 0, size: int = 0, tick: Callable[[], None] = nothing
) -> int:
    """Estimate the batch norm statistics again on `count` training batches (0: one epoch).

    Return the number of batches used. `size` is the number of examples in a batch (0: as in
    training). Large batches give better estimates, because in a small batch the normalisation
    depends on the few examples in it.
    """
    device = next(model.parameters()).device
    order: Sequence[Tensor] = list(feed.order(0))
    if size and not feed.carried:
        order = torch.cat(list(order)).split(size)
        # Leave out a smaller last batch, since it would have the same weight as a full batch.
        order = [row for row in order if len(row) == size] or order

    def inputs() -> Iterator[tuple[Tensor]]:
        for row in order[: count or None]:
            yield (feed.batch(row.to(device))[0],)
            tick()

    return zo.estimate_statistics(model, inputs())
