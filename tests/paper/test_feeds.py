"""Feeds: every batch of the same shape, every example in its place, and all of a batch over the
processes.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from zoneout.paper.data.corpora import Corpus, Images, Vocabulary
from zoneout.paper.training.config import Batches, Config, Data
from zoneout.paper.training.feeds import make_feed

CPU = torch.device("cpu")


def corpus(symbols: int) -> Corpus:
    text = np.arange(symbols, dtype=np.int32)  # each symbol is its own place
    return Corpus("test", "char", Vocabulary("char", ("a",)), text, text, text, digest="")


@given(
    symbols=st.integers(20, 400),
    length=st.integers(2, 20),
    size=st.integers(1, 12),
    offset=st.booleans(),
    seed=st.integers(0, 9),
)
def test_chunks(symbols: int, length: int, size: int, offset: bool, seed: int) -> None:
    """A captured step has one shape: if a batch had another, it would read what is not there."""
    config = Config(batches=Batches("chunks", size, length, offset), seed=seed)
    feed = make_feed(config, corpus(symbols), CPU)
    for epoch in range(4):
        order = feed.order(epoch)
        assert 1 <= len(order) <= feed.updates() and order.shape[1] == feed.rows <= size
        assert len(order.unique()) == order.numel(), "a chunk comes twice in an epoch"
        for row in order:
            inputs, targets = feed.batch(row)
            assert inputs.shape == targets.shape == (length - 1, feed.rows)
            assert (
                torch.equal(inputs[0], row)
                and torch.equal(targets, inputs + 1)
                and int(targets.max()) < symbols
            )


@given(symbols=st.integers(20, 400), length=st.integers(1, 20), size=st.integers(1, 10))
def test_streams(symbols: int, length: int, size: int) -> None:
    """Each stream is read in order, without a gap, and a batch goes on where the one before it
    ended.
    """
    feed = make_feed(Config(batches=Batches("streams", size, length)), corpus(symbols), CPU)
    batches = [feed.batch(row) for row in feed.order(0)]
    assert len(batches) == feed.updates() and feed.carried
    inputs = torch.cat([x for x, _ in batches])
    targets = torch.cat([y for _, y in batches])
    part = symbols // size
    assert torch.equal(inputs[0], torch.arange(size) * part)
    assert torch.equal(inputs, inputs[0] + torch.arange(len(inputs))[:, None]) and torch.equal(
        targets, inputs + 1
    )
    assert len(inputs) == (part - 1) // min(length, part - 1) * min(length, part - 1)


def test_images() -> None:
    pixels = np.arange(7, dtype=np.uint8)[:, None].repeat(784, 1)
    part = pixels, np.arange(7, dtype=np.uint8)
    feed = make_feed(
        Config(data=Data("mnist"), batches=Batches(size=3)),
        Images("rows", part, part, part, digest=""),
        CPU,
    )
    order = feed.order(0)
    assert order.shape == (2, 3) and len(order.unique()) == 6
    inputs, targets = feed.batch(order[0])
    assert inputs.shape == (784, 3, 1) and torch.equal(targets, order[0])
    torch.testing.assert_close(inputs[5, :, 0], order[0] / 255)


def test_processes_share_a_batch() -> None:
    for batches in (Batches("chunks", size=6, length=5), Batches("streams", size=6, length=5)):
        config = Config(batches=batches)
        whole = make_feed(config, corpus(300), CPU)
        parts = [make_feed(config, corpus(300), CPU, rank, 3) for rank in range(3)]
        for number in range(whole.updates() - 1):
            inputs = [feed.batch(feed.order(1)[number])[0] for feed in parts]
            assert torch.equal(torch.cat(inputs, dim=1), whole.batch(whole.order(1)[number])[0])
        assert [feed.first for feed in parts] == [0, 2, 4]
