"""Feeds: the training part on the device, and the batch of each update.

`batches.py` defines the order in which a corpus is read. A feed keeps the corpus on the device. It
gathers each batch there from one row of that order, without synchronising with the host. With
several processes, each process takes its share of the columns of every batch.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data import batches
from ..data.corpora import Corpus, Images
from .config import Config


def on_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Copy an array to the device, in a dtype that torch can gather: uint8 or int32."""
    return torch.from_numpy(
        np.array(array, dtype=array.dtype if array.dtype == np.uint8 else np.int32)
    ).to(device)


class Feed:
    """Base class of all feeds; it knows which columns of a batch belong to this process."""

    carried = False  # whether the state is carried from one batch to the next

    def __init__(self, config: Config, rows: int, rank: int, processes: int) -> None:
        if rows % processes:
            raise ValueError(
                f"batches.size: expected a multiple of the {processes} processes, so that all have "
                f"the same number of rows, got a batch of {rows}"
            )
        self.config, self.all_rows = config, rows
        self.rows = rows // processes
        if config.model.norm == "batch" and self.rows < 2:
            raise ValueError(
                "batches.size: expected at least 2 rows of a batch for each process with batch "
                f"norm, got {self.rows}; of a short text, a smaller --batches.length gives more "
                "rows"
            )
        self.first = rank * self.rows  # the example id of this process's first row

    def updates(self) -> int:
        """Return the maximum number of updates in an epoch."""
        return len(self.order(0))

    def total(self) -> int:
        """Return the number of updates in all epochs, at most."""
        return self.config.epochs * self.updates()

    def order(self, epoch: int) -> Tensor:
        """Return the order of an epoch: int64 [updates, columns], on the CPU.

        A row belongs to one update. It holds the starts of the chunks, the numbers of the images,
        or, for streams, the first step.
        """
        raise NotImplementedError

    def lengths(self, epoch: int) -> list[int]:
        """Return the number of steps of each update; 0: as many as a batch always has."""
        return [0] * len(self.order(epoch))

    def batch(self, row: Tensor, length: int = 0) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of one update, from its row of the order.

        `length` is one of `lengths`.
        """
        raise NotImplementedError

    def _cut(self, order: Tensor) -> Tensor:
        return torch.stack(batches.batched(order, self.all_rows))[
            :, self.first : self.first + self.rows
        ]


class ChunkFeed(Feed):
    """Feed of shuffled chunks of a text, each from the initial state."""

    def __init__(self, config: Config, tokens: Tensor, rank: int, processes: int) -> None:
        self.tokens, self.length = tokens, config.batches.length
        # A batch has the same number of rows in every epoch, even if the text is short and the
        # random offset leaves fewer chunks.
        most = len(tokens) // self.length
        fewest = (len(tokens) - self.length + 1) // self.length if config.batches.offset else most
        super().__init__(config, max(1, min(config.batches.size, fewest)), rank, processes)
        self.most = max(1, most // self.all_rows)

    def updates(self) -> int:
        return self.most

    def order(self, epoch: int) -> Tensor:
        offset, seed = self.config.batches.offset, self.config.seed
        return self._cut(
            batches.chunk_starts(
                len(self.tokens), self.length, seed=seed, epoch=epoch, offset=offset
            )
        )

    def batch(self, row: Tensor, length: int = 0) -> tuple[Tensor, Tensor]:
        chunk = batches.chunks(self.tokens, row, self.length)
        return chunk[:-1], chunk[1:]


class StreamFeed(Feed):
    """Feed of parallel streams of a text, with the state carried from batch to batch."""

    carried = True

    def __init__(self, config: Config, tokens: Tensor, rank: int, processes: int) -> None:
        super().__init__(config, config.batches.size, rank, processes)
        streams = batches.streams(tokens, config.batches.size)
        self.streams = streams[:, self.first : self.first + self.rows].contiguous()
        self.length = min(config.batches.length, len(streams) - 1)
        longest = 2 * self.length + 3 * math.ceil(config.batches.spread)
        self.steps = torch.arange(longest, device=tokens.device)

    def updates(self) -> int:
        if not self.config.batches.varied:
            return super().updates()
        return max(self._counts)

    def total(self) -> int:
        return sum(self._counts[:-1]) if self.config.batches.varied else super().total()

    @cached_property
    def _counts(self) -> list[int]:
        """The updates of each epoch with random lengths, and of the one after the last."""
        return [len(self.lengths(epoch)) for epoch in range(self.config.epochs + 1)]

    def lengths(self, epoch: int) -> list[int]:
        steps, cut = len(self.streams) - 1, self.config.batches
        if not cut.varied:
            return [0] * (steps // self.length)
        seed = self.config.seed
        return batches.random_lengths(
            steps, self.length, cut.halved, cut.spread, seed=seed, epoch=epoch
        )

    def order(self, epoch: int) -> Tensor:
        lengths = torch.tensor([length or self.length for length in self.lengths(epoch)])
        return (lengths.cumsum(0) - lengths)[:, None]

    def batch(self, row: Tensor, length: int = 0) -> tuple[Tensor, Tensor]:
        steps = self.steps[: (length or self.length) + 1]
        piece = self.streams.index_select(0, row + steps).to(torch.int64)
        return piece[:-1], piece[1:]


class ImageFeed(Feed):
    """Feed of images, one pixel per time step."""

    def __init__(
        self, config: Config, pixels: Tensor, labels: Tensor, rank: int, processes: int
    ) -> None:
        self.pixels, self.labels = pixels, labels
        super().__init__(config, min(config.batches.size, len(pixels)), rank, processes)

    def order(self, epoch: int) -> Tensor:
        return self._cut(batches.image_order(len(self.pixels), seed=self.config.seed, epoch=epoch))

    def batch(self, row: Tensor, length: int = 0) -> tuple[Tensor, Tensor]:
        return as_sequences(self.pixels.index_select(0, row)), self.labels.index_select(0, row).to(
            torch.int64
        )


def as_sequences(pixels: Tensor) -> Tensor:
    """Convert images of bytes [B, 784] to sequences of numbers from 0 to 1: [784, B, 1]."""
    return (pixels.t().float() / 255).unsqueeze(-1)


def make_feed(
    config: Config, data: Corpus | Images, device: torch.device, rank: int = 0, processes: int = 1
) -> Feed:
    """Return the feed of the training part for a config."""
    if isinstance(data, Images):
        pixels, labels = (on_device(array[: config.data.limit], device) for array in data.train)
        return ImageFeed(config, pixels, labels, rank, processes)
    tokens = on_device(data.train, device)
    kind = ChunkFeed if config.batches.kind == "chunks" else StreamFeed
    return kind(config, tokens, rank, processes)
