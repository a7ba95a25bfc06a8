"""Order and cutting of batches, held against slow and obvious versions."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoneout.paper.data import batches

SEED = st.integers(-(2**63), 2**64 - 1)
EPOCH = st.integers(0, 2**32 - 1)
quick = settings(deadline=None, max_examples=60, derandomize=True)


def obvious_chunks(text, first, length):
    """Every whole chunk from `first` on, in order."""
    found = []
    while first + length <= len(text):
        found.append(text[first : first + length])
        first += length
    return found


@quick
@given(SEED, EPOCH, st.integers(2, 40), st.integers(0, 400), st.booleans(), st.booleans())
def test_chunks_are_the_obvious_ones(seed, epoch, length, more, offset, shuffle):
    """If this fails, an epoch does not see each chunk of the cut text exactly once."""
    n = length + more
    starts = batches.chunk_starts(n, length, seed=seed, epoch=epoch, offset=offset, shuffle=shuffle)
    first = int(starts.min())
    assert starts.dtype == torch.int64
    assert first < length and (offset or first == 0)
    got = batches.chunks(torch.arange(n), starts, length)
    assert got.shape == (length, len(starts))
    columns = got.T.tolist()
    assert (sorted(columns) if shuffle else columns) == obvious_chunks(
        list(range(n)), first, length
    )


def test_every_offset_comes():
    """If this fails, some characters of the text are always the first of a chunk, and never
    predicted.
    """
    firsts = [int(batches.chunk_starts(1000, 10, epoch=epoch).min()) for epoch in range(300)]
    counts = np.bincount(firsts, minlength=10)
    assert len(counts) == 10
    assert counts.min() >= 10  # 30 are expected; fewer than 10 come in one of 100,000 such draws


def test_a_short_text_always_has_a_chunk():
    """If this fails, an epoch of a small trial can be empty because its offset is larger than
    what is left.
    """
    assert {len(batches.chunk_starts(12, 10, epoch=epoch)) for epoch in range(50)} == {1}
    assert {int(batches.chunk_starts(12, 10, epoch=epoch)) for epoch in range(50)} == {0, 1, 2}


@quick
@given(SEED, EPOCH, st.integers(0, 300))
def test_image_order_is_a_permutation_of_seed_and_epoch(seed, epoch, n):
    """If this fails, an epoch leaves out an image or shows one twice, or a resumed run sees
    another order.
    """
    order = batches.image_order(n, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(n))
    torch.manual_seed(n)  # the order must not know of it
    assert order.equal(batches.image_order(n, seed=seed, epoch=epoch))


def test_epochs_and_seeds_and_purposes_differ():
    """If this fails, two epochs, two runs or two kinds of data share one order."""
    orders = [batches.image_order(50, seed=s, epoch=e) for s in (0, 1) for e in (0, 1)]
    assert batches.image_order(50).equal(orders[0])
    orders.append(batches.chunk_starts(100, 2, offset=False) // 2)
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)


def test_shuffling_is_even():
    """If this fails, the shuffle prefers some places: example 0 should stand at each of 8 places
    equally often.
    """
    places = [batches.image_order(8, epoch=epoch).tolist().index(0) for epoch in range(800)]
    counts = np.bincount(places, minlength=8)
    assert ((counts - 100) ** 2 / 100).sum() < 24.3  # chi-squared, 7 degrees of freedom, 1 in 1,000


def test_the_same_order_in_another_process():
    """If this fails, order depends on more than seed and epoch, so that a resumed run is another
    run.
    """
    code = (
        "import json; from zoneout.paper.data import batches as b;"
        "print(json.dumps([b.chunk_starts(5000, 100, seed=3, epoch=7).tolist(), b.image_order(40, "
        "seed=3).tolist()]))"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = [
        batches.chunk_starts(5000, 100, seed=3, epoch=7).tolist(),
        batches.image_order(40, seed=3).tolist(),
    ]
    assert json.loads(there.stdout) == here


def test_order_is_what_it_was():
    """If this fails, runs that were made before cannot be made again: the numbers of an order
    must never change.
    """
    chunks = [537, 637, 437, 337, 737, 837, 37, 237, 137]
    assert batches.chunk_starts(1000, 100, seed=1, epoch=2).tolist() == chunks
    assert batches.image_order(10, seed=1, epoch=2).tolist() == [5, 1, 4, 0, 2, 6, 3, 9, 7, 8]


@quick
@given(st.integers(0, 50), st.integers(1, 12), st.booleans())
def test_batches_of_an_order(n, batch, complete):
    """If this fails, a batch is not order[k·B:(k+1)·B], or the rule for the last one does not
    hold.
    """
    order = torch.arange(n)
    expected = [order[i : i + batch].tolist() for i in range(0, n, batch)]
    if complete and len(expected) > 1 and len(expected[-1]) < batch:
        expected.pop()
    assert [b.tolist() for b in batches.batched(order, batch, complete=complete)] == expected


@quick
@given(st.integers(1, 6), st.integers(2, 30), st.integers(0, 5), st.integers(1, 9), st.booleans())
def test_streams_and_their_pieces(batch, rows, more, length, complete):
    """If this fails, a stream is not a contiguous part of the text, or a symbol is predicted
    twice or never.
    """
    n = batch * rows + min(more, batch - 1)
    cut = batches.streams(torch.arange(n), batch)
    assert cut.T.tolist() == [list(range(b * rows, (b + 1) * rows)) for b in range(batch)]
    found = list(batches.pieces(cut, length, complete=complete))
    for b in range(batch):
        inputs = [int(x) for piece, _ in found for x in piece[:, b]]
        targets = [int(y) for _, piece in found for y in piece[:, b]]
        kept = rows - 1 if not complete or rows - 1 <= length else (rows - 1) // length * length
        assert inputs == list(range(b * rows, b * rows + kept))
        assert targets == [symbol + 1 for symbol in inputs]
    assert all(len(x) == length for x, _ in found[:-1])
    assert not complete or len({len(x) for x, _ in found}) == 1


@quick
@given(st.integers(2, 200), st.integers(1, 250))
def test_the_whole_text_in_pieces(n, length):
    """If this fails, whole-text evaluation leaves out or repeats a prediction when it is cut."""
    found = list(batches.whole(np.arange(n, dtype=np.uint8), length))
    assert [int(x) for inputs, _ in found for x in inputs] == list(range(n - 1))
    assert [int(y) for _, targets in found for y in targets] == list(range(1, n))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_every_dtype_of_a_corpus(dtype):
    """If this fails, a corpus with many symbols cannot be cut: its numbers are in a dtype that
    torch half supports.
    """
    tokens = np.arange(200, 212).astype(dtype)
    got = batches.chunks(torch.from_numpy(tokens), torch.tensor([3, 0]), 4)
    assert got.dtype == torch.int64
    assert got.tolist() == [[203, 200], [204, 201], [205, 202], [206, 203]]
    assert batches.streams(tokens, 3).T.reshape(-1).tolist() == list(range(200, 212))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: batches.chunk_starts(50, 100),
            "length: a chunk of 100 symbols does not fit into a text of 50",
        ),
        (lambda: batches.chunk_starts(50, 1), "length: expected a whole number, 2 or more, got 1"),
        (
            lambda: batches.chunk_starts(50, 5, epoch=-1),
            "epoch: expected a whole number, 0 or more, got -1",
        ),
        (
            lambda: batches.batched(torch.arange(3), 0),
            "batch: expected a whole number, 1 or more, got 0",
        ),
        (
            lambda: batches.streams(torch.arange(7), 0),
            "batch: expected a whole number, 1 or more, got 0",
        ),
        (
            lambda: batches.streams(torch.arange(7), 4),
            "batch: 4 streams need at least 8 symbols, the text has 7",
        ),
        (
            lambda: list(batches.whole(torch.arange(7), 0)),
            "length: expected a whole number, 1 or more, got 0",
        ),
    ],
)
def test_errors_say_what_was_expected(call, says):
    """If this fails, a wrong number goes through or its error does not name the argument."""
    with pytest.raises(ValueError, match=says):
        call()
