"""Batches: the order in which a corpus is read, and how it is cut.

A text can be read in three ways:

* chunks in a random order, each from the initial state (`chunk_starts`, `chunks`);
* parallel streams whose state is carried from batch to batch (`streams`, `pieces`);
* the whole text as one sequence (`whole`).

Orders and offsets are pure functions of (seed, epoch). They come from this library's random
generator (Philox), so they are the same on every machine, with every version of torch and NumPy,
and after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...philox import as_seed, philox

# The last word of the Philox counter ("plane"), one value for each kind of draw. No mask uses
# these values.
_CHUNKS, _OFFSET, _IMAGES = 0x6368756E, 0x6F666673, 0x696D6167
_HALVED, _LENGTHS = 0x68616C76, 0x6C656E67

SHORTEST = 5  # steps of a batch with a random length


def chunk_starts(
    n: int, length: int, *, seed: int = 0, epoch: int = 0, offset: bool = True, shuffle: bool = True
) -> Tensor:
    """Return the start of every chunk of an epoch in a text of n symbols: int64 [chunks].

    A chunk has `length` symbols and makes `length` − 1 predictions. The chunks follow one another
    from a random offset in [0, length), and are then shuffled. Symbols at the end that do not fill
    a chunk are left out. If the text is shorter than two chunks, the offset is limited so that one
    chunk still fits.

    >>> chunk_starts(1000, 300, offset=False, shuffle=False)
    tensor([  0, 300, 600])
    >>> chunk_starts(1000, 300, seed=1, epoch=0) % 300  # all chunks have the same offset
    tensor([169, 169])
    """
    _at_least("length", length, 2)
    if n < length:
        raise ValueError(
            f"batches.length: a chunk of {length} symbols does not fit into a text of {n} symbols; "
            "use a smaller length"
        )
    first = 0
    if offset:
        choices = min(length, n - length + 1)
        first = int(_bits(1, seed=seed, epoch=epoch, plane=_OFFSET) >> 1) % choices
    starts = torch.arange(first, n - length + 1, length)
    return (
        starts[_permutation(len(starts), seed=seed, epoch=epoch, plane=_CHUNKS)]
        if shuffle
        else starts
    )


def image_order(n: int, *, seed: int = 0, epoch: int = 0) -> Tensor:
    """Return a random order of n examples: int64 [n].

    >>> image_order(6, seed=1), image_order(6, seed=1, epoch=1)
    (tensor([4, 1, 5, 2, 0, 3]), tensor([1, 0, 5, 2, 4, 3]))
    """
    _at_least("n", n, 0)
    return _permutation(n, seed=seed, epoch=epoch, plane=_IMAGES)


def batched(order: Tensor, batch: int, *, complete: bool = True) -> tuple[Tensor, ...]:
    """Cut an order into batches: batch k is order[k·batch : (k + 1)·batch].

    The order holds chunk starts or image numbers. With `complete` (training), an incomplete last
    batch is left out, unless it is the only one.

    >>> [len(b) for b in batched(torch.arange(10), 4)]
    [4, 4]
    >>> [len(b) for b in batched(torch.arange(10), 4, complete=False)]
    [4, 4, 2]
    """
    _at_least("batch", batch, 1)
    if complete and len(order) > batch:
        order = order[: len(order) // batch * batch]
    return order.split(batch) if len(order) else ()


def chunks(tokens: Tensor, starts: Tensor, length: int) -> Tensor:
    """Return the chunks that begin at `starts`, time first: int64 [length, len(starts)].

    The result is on the device of `tokens`. All rows but the last are inputs; all rows but the
    first are targets.

    >>> chunks(torch.arange(10), torch.tensor([5, 1]), 3)
    tensor([[5, 1],
            [6, 2],
            [7, 3]])
    """
    starts = starts.to(tokens.device)
    return tokens[starts + torch.arange(length, device=tokens.device)[:, None]].to(torch.int64)


def streams(tokens: Tensor | np.ndarray[Any, Any], batch: int) -> Tensor:
    """Return the text as parallel streams [n // batch, batch].

    Column b holds the b-th of `batch` equal parts of the text, from top to bottom. Symbols at the
    end of the text that do not fill a row are left out. The result is a view of the tokens, in
    their dtype.

    >>> streams(torch.arange(7), 2)
    tensor([[0, 3],
            [1, 4],
            [2, 5]])
    """
    _at_least("batch", batch, 1)
    rows = len(tokens) // batch
    if rows < 2:
        raise ValueError(
            f"batch: {batch} streams need at least {2 * batch} symbols, the text has "
            f"{len(tokens)}; use a smaller batch"
        )
    return torch.as_tensor(tokens)[: rows * batch].view(batch, rows).T


def pieces(rows: Tensor, length: int, *, complete: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut streams into pieces of `length` steps: pairs (inputs, targets), each [steps, batch].

    The pieces are in order, and the caller carries the state from one to the next. Every row after
    the first is a target exactly once. With `complete` (training), a shorter last piece is left
    out, unless it is the only one.

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


def random_lengths(
    steps: int, length: int, halved: float, spread: float, *, seed: int = 0, epoch: int = 0
) -> list[int]:
    """Return the lengths of the batches of an epoch, which together are at most `steps` long.

    Each is about `length`, or half of it with the chance `halved`, plus a normal number with the
    standard deviation `spread`: at most three deviations from there, and at least `SHORTEST`.

    >>> random_lengths(100, 30, 0.2, 2.0, seed=1)
    [10, 33, 16, 30]
    """
    most = max(1, steps // SHORTEST)
    unit = [_bits(most, seed=seed, epoch=epoch, plane=plane) >> 11 for plane in (_HALVED, _LENGTHS)]
    chance, level = ((bits & (2**53 - 1)).double().add(0.5) / 2**53 for bits in unit)
    mean = torch.where(chance < halved, length / 2, float(length))
    normal = torch.special.ndtri(level).clamp(-3, 3)
    drawn = (mean + spread * normal).long().clamp(min=min(SHORTEST, length))
    return drawn[drawn.cumsum(0) <= steps].tolist() or [min(length, steps)]


def whole(tokens: Tensor | np.ndarray[Any, Any], length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut the whole text, as one sequence, into pieces [steps, 1]: n − 1 predictions in total.

    The caller carries the state from one piece to the next.
    """
    return pieces(streams(tokens, 1), length)


def _permutation(n: int, *, seed: int, epoch: int, plane: int) -> Tensor:
    # Sort positions by 64 random bits each. Positions with equal bits (very rare) keep their order.
    return _bits(n, seed=seed, epoch=epoch, plane=plane).argsort(stable=True)


def _bits(count: int, *, seed: int, epoch: int, plane: int) -> Tensor:
    """Return 64 random bits for each of `count` positions, as int64."""
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < 2**32:
        raise ValueError(f"epoch: expected a whole number, 0 or more, got {epoch!r}")
    zero = torch.zeros((), dtype=torch.int64)
    low, high, _, _ = philox(as_seed(seed), torch.arange(count), zero, zero + epoch, zero + plane)
    return low | high << 32


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected a whole number, {least} or more, got {value!r}")
