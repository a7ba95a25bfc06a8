"""Feeds: the training part on the device, and the batch that each update takes from it.

`batches.py` says in which order a corpus is read; a feed keeps the corpus on the device and gathers a batch there from
one row of that order, without the host. Of several processes each takes its own columns of every batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import batches
from .config import Config
from .data import Corpus, Images


def on_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """A copy on the device, in a dtype that torch can index by and gather."""
    return torch.from_numpy(np.array(array, dtype=array.dtype if array.dtype == np.uint8 else np.int32)).to(device)


class Feed:
    """The common part: which columns of a batch are this process's."""

    carried = False  # whether a batch goes on where the one before it ended

    def __init__(self, config: Config, rows: int, rank: int, processes: int) -> None:
        if rows % processes:
            raise ValueError(
                f"batches.size: expected a multiple of the {processes} processes, so that each has as many rows of a "
                f"batch, got a batch of {rows}"
            )
        self.config, self.all_rows = config, rows
        self.rows = rows // processes
        if config.model.norm == "batch" and self.rows < 2:
            raise ValueError(
                "batches.size: expected at least 2 rows of a batch for each process with batch norm, got "
                f"{self.rows}; of a short text, a smaller --batches.length makes more"
            )
        self.first = rank * self.rows  # the example id of the first of them

    def updates(self) -> int:
        """The most updates that an epoch can have."""
        return len(self.order(0))

    def order(self, epoch: int) -> Tensor:
        """What each update of an epoch takes: int64 [updates, columns], on the CPU."""
        raise NotImplementedError

    def batch(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one update."""
        raise NotImplementedError

    def _cut(self, order: Tensor) -> Tensor:
        return torch.stack(batches.batched(order, self.all_rows))[:, self.first : self.first + self.rows]


class ChunkFeed(Feed):
    """Shuffled chunks of a text, each from the initial state."""

    def __init__(self, config: Config, tokens: Tensor, rank: int, processes: int) -> None:
        self.tokens, self.length = tokens, config.batches.length
        # A batch has as many rows in every epoch, even where a short text and its offset leave few chunks.
        most = len(tokens) // self.length
        fewest = (len(tokens) - self.length + 1) // self.length if config.batches.offset else most
        super().__init__(config, max(1, min(config.batches.size, fewest)), rank, processes)
        self.most = max(1, most // self.all_rows)

    def updates(self) -> int:
        return self.most

    def order(self, epoch: int) -> Tensor:
        offset, seed = self.config.batches.offset, self.config.seed
        return self._cut(batches.chunk_starts(len(self.tokens), self.length, seed=seed, epoch=epoch, offset=offset))

    def batch(self, row: Tensor) -> tuple[Tensor, Tensor]:
        chunk = batches.chunks(self.tokens, row, self.length)
        return chunk[:-1], chunk[1:]


class StreamFeed(Feed):
    """Parallel streams of a text, the state carried from batch to batch."""

    carried = True

    def __init__(self, config: Config, tokens: Tensor, rank: int, processes: int) -> None:
        super().__init__(config, config.batches.size, rank, processes)
        streams = batches.streams(tokens, config.batches.size)
        self.streams = streams[:, self.first : self.first + self.rows].contiguous()
        self.length = min(config.batches.length, len(streams) - 1)
        self.steps = torch.arange(self.length + 1, device=tokens.device)

    def order(self, epoch: int) -> Tensor:
        pieces = (len(self.streams) - 1) // self.length
        return torch.arange(pieces)[:, None] * self.length

    def batch(self, row: Tensor) -> tuple[Tensor, Tensor]:
        piece = self.streams.index_select(0, row + self.steps).to(torch.int64)
        return piece[:-1], piece[1:]


class ImageFeed(Feed):
    """Images, one pixel a step."""

    def __init__(self, config: Config, pixels: Tensor, labels: Tensor, rank: int, processes: int) -> None:
        self.pixels, self.labels = pixels, labels
        super().__init__(config, min(config.batches.size, len(pixels)), rank, processes)

    def order(self, epoch: int) -> Tensor:
        return self._cut(batches.image_order(len(self.pixels), seed=self.config.seed, epoch=epoch))

    def batch(self, row: Tensor) -> tuple[Tensor, Tensor]:
        return as_sequences(self.pixels.index_select(0, row)), self.labels.index_select(0, row).to(torch.int64)


def as_sequences(pixels: Tensor) -> Tensor:
    """Images [B, 784] of bytes as sequences [784, B, 1] of numbers from 0 to 1."""
    return (pixels.t().float() / 255).unsqueeze(-1)


def make_feed(config: Config, data: Corpus | Images, device: torch.device, rank: int = 0, processes: int = 1) -> Feed:
    """The feed of a config's training part."""
    if isinstance(data, Images):
        pixels, labels = (on_device(array[: config.data.limit], device) for array in data.train)
        return ImageFeed(config, pixels, labels, rank, processes)
    tokens = on_device(data.train, device)
    kind = ChunkFeed if config.batches.kind == "chunks" else StreamFeed
    return kind(config, tokens, rank, processes)
