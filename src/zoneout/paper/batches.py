"""Batches: in what order a corpus is read, and how it is cut.

Three ways of reading a text: chunks in a random order, each from a fresh state (`chunk_starts`, `chunks`); parallel
streams whose state is carried on (`streams`, `pieces`); the whole text as one sequence (`whole`). Orders and offsets
are pure functions of (seed, epoch), made of the library's own random bits, so that they are the same on every machine,
with every version of torch and NumPy, and after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..philox import as_seed, philox

# Planes of the counter, one for each thing that is drawn; no mask uses them.
_CHUNKS, _OFFSET, _IMAGES = 0x6368756E, 0x6F666673, 0x696D6167


def chunk_starts(
    n: int, length: int, *, seed: int = 0, epoch: int = 0, offset: bool = True, shuffle: bool = True
) -> Tensor:
    """Where the chunks of an epoch begin in a text of n symbols: int64 [chunks].

    Chunks of `length` symbols (`length` − 1 predictions) lie one after another from a random offset in [0, length), and
    are then shuffled. What does not fill a chunk at the end is left out. A text of less than two chunks takes only an
    offset that leaves one.

    >>> chunk_starts(1000, 300, offset=False, shuffle=False)
    tensor([  0, 300, 600])
    >>> chunk_starts(1000, 300, seed=1, epoch=0) % 300  # one offset for all
    tensor([169, 169])
    """
    _at_least("length", length, 2)
    if n < length:
        raise ValueError(
            f"batches.length: a chunk of {length} symbols does not fit into a text of {n}; use a smaller length"
        )
    first = 0
    if offset:
        choices = min(length, n - length + 1)
        first = int(_bits(1, seed=seed, epoch=epoch, plane=_OFFSET) >> 1) % choices
    starts = torch.arange(first, n - length + 1, length)
    return starts[_permutation(len(starts), seed=seed, epoch=epoch, plane=_CHUNKS)] if shuffle else starts


def image_order(n: int, *, seed: int = 0, epoch: int = 0) -> Tensor:
    """A random order of n examples: int64 [n].

    >>> image_order(6, seed=1), image_order(6, seed=1, epoch=1)
    (tensor([4, 1, 5, 2, 0, 3]), tensor([1, 0, 5, 2, 4, 3]))
    """
    _at_least("n", n, 0)
    return _permutation(n, seed=seed, epoch=epoch, plane=_IMAGES)


def batched(order: Tensor, batch: int, *, complete: bool = True) -> tuple[Tensor, ...]:
    """Cut an order (chunk starts, image numbers) into batches: batch k is order[k·batch : (k + 1)·batch].

    With `complete` (training) an incomplete last batch is left out, unless it is the only one.

    >>> [len(b) for b in batched(torch.arange(10), 4)], [len(b) for b in batched(torch.arange(10), 4, complete=False)]
    ([4, 4], [4, 4, 2])
    """
    _at_least("batch", batch, 1)
    if complete and len(order) > batch:
        order = order[: len(order) // batch * batch]
    return order.split(batch) if len(order) else ()


def chunks(tokens: Tensor, starts: Tensor, length: int) -> Tensor:
    """The chunks that begin at `starts`, time first: int64 [length, len(starts)], on the tokens' device.

    Its rows up to the last are inputs, its rows from the second are targets.

    >>> chunks(torch.arange(10), torch.tensor([5, 1]), 3)
    tensor([[5, 1],
            [6, 2],
            [7, 3]])
    """
    starts = starts.to(tokens.device)
    return tokens[starts + torch.arange(length, device=tokens.device)[:, None]].to(torch.int64)


def streams(tokens: Tensor | np.ndarray[Any, Any], batch: int) -> Tensor:
    """The text as parallel streams [n // batch, batch]: column b is the b-th of `batch` equal parts, read downwards.

    What does not fill the streams at the end of the text is left out. A view of the tokens, in their dtype.

    >>> streams(torch.arange(7), 2)
    tensor([[0, 3],
            [1, 4],
            [2, 5]])
    """
    _at_least("batch", batch, 1)
    rows = len(tokens) // batch
    if rows < 2:
        raise ValueError(
            f"batch: {batch} streams need at least {2 * batch} symbols, the text has {len(tokens)}; use a smaller batch"
        )
    return torch.as_tensor(tokens)[: rows * batch].view(batch, rows).T


def pieces(rows: Tensor, length: int, *, complete: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Streams cut into pieces of `length` steps: pairs (inputs, targets), each [steps, batch], in order.

    The state is to be carried from one to the next. Every row after the first is a target exactly once; with `complete`
    (training) a shorter last piece is left out, unless it is the only one.

    >>> [(x[:, 0].tolist(), y[:, 0].tolist()) for x, y in pieces(streams(torch.arange(6), 1), 3)]
    [([0, 1, 2], [1, 2, 3]), ([3, 4], [4, 5])]
    """
    _at_least("length", length, 1)
    steps = len(rows) - 1
    if complete and steps > length:
        steps = steps // length * length
    for start in range(0, steps, length):
        stop = min(start + length, steps)
        yield rows[start:stop], rows[start + 1 : stop + 1]


def whole(tokens: Tensor | np.ndarray[Any, Any], length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The whole text as one sequence, in pieces [steps, 1] with the state to be carried: n − 1 predictions in all."""
    return pieces(streams(tokens, 1), length)


def _permutation(n: int, *, seed: int, epoch: int, plane: int) -> Tensor:
    # Sorting 64 random bits for each place; equal ones, which hardly ever come, keep their order.
    return _bits(n, seed=seed, epoch=epoch, plane=plane).argsort(stable=True)


def _bits(count: int, *, seed: int, epoch: int, plane: int) -> Tensor:
    """64 random bits for each of `count` places, as int64."""
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < 2**32:
        raise ValueError(f"epoch: expected a whole number, 0 or more, got {epoch!r}")
    zero = torch.zeros((), dtype=torch.int64)
    low, high, _, _ = philox(as_seed(seed), torch.arange(count), zero, zero + epoch, zero + plane)
    return low | high << 32


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected a whole number, {least} or more, got {value!r}")
