"""What threads share of a GPU: loops that fill it take turns; settings and parts last while somebody needs them."""

from __future__ import annotations

import threading

import pytest
import torch

import zoneout as zo
from zoneout.ops import cuda
from zoneout.ops.cuda import compiler
from zoneout.ops.cuda.turns import Turns


class Stream:
    """A stream that keeps what it is told."""

    def __init__(self, name):
        self.name, self.told = name, []

    def record_event(self, event):
        self.told.append("record")
        return f"{self.name}{len(self.told)}"

    def wait_event(self, event):
        self.told.append(f"wait {event}")


@pytest.fixture
def streams(monkeypatch):
    """Two streams, and a function that makes one of them the current one, capturing or not."""

    def enter(stream, capturing=False):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    return Stream("a"), Stream("b"), enter


def launch(turns, stream):
    with turns.take():
        stream.told.append("launch")


def test_another_stream_waits(streams):
    """Two loops are on the chip at once, each with a part of its blocks."""
    a, b, enter = streams
    turns = Turns(0)
    for stream in (a, a, b, a, a, b):
        enter(stream)
        launch(turns, stream)
    assert a.told == ["launch", "record", "launch", "record", "wait b3", "launch", "record", "launch", "record"]
    assert b.told == ["wait a4", "launch", "record", "wait a9", "launch", "record"]


def test_a_launch_that_fails_is_waited_for(streams):
    """What was launched before an error is forgotten, and the next loop does not wait for it."""
    a, b, enter = streams
    turns = Turns(0)
    enter(a)
    with pytest.raises(KeyboardInterrupt), turns.take():
        raise KeyboardInterrupt
    enter(b)
    launch(turns, b)
    assert b.told[0] == "wait a1"


def test_what_is_captured_is_counted(streams):
    """A captured loop waits for something outside of its graph, which CUDA refuses, or is taken for one that runs."""
    a, b, enter = streams
    turns = Turns(0)
    enter(a)
    launch(turns, a)
    enter(b, capturing=True)
    launch(turns, b)
    assert b.told == ["launch"] and turns.captured == 1
    enter(a)
    launch(turns, a)
    assert a.told == ["launch", "record"] * 2


@pytest.mark.gpu
def test_side_by_side():
    """Loops of two streams, each of which fills the GPU, wait for each other for ever."""
    layers = [zo.LSTM(50, 1000, noise=zo.Zoneout(cell=0.5, hidden=0.05), device="cuda", dtype=torch.bfloat16)]
    layers += [zo.LSTM(50, 1500, noise=zo.Zoneout(cell=0.5, hidden=0.05), device="cuda", dtype=torch.bfloat16)]
    inputs = [torch.randn(20, batch, 50, device="cuda", dtype=torch.bfloat16) for batch in (32, 20)]
    want = [layer(x, seed=1)[0].sum().item() for layer, x in zip(layers, inputs)]
    ended = []

    def work(layer, x, sum_of):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                y, _ = layer(x, seed=1)
                y.sum().backward()
            assert y.sum().item() == sum_of
        ended.append(layer)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=of, daemon=True) for of in zip(layers, inputs, want)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(ended) == 2


def test_products_of_two_threads():
    """The first of two who leaves puts the setting back while the other still takes products."""
    flags, x = torch.backends.cuda.matmul, torch.zeros(1)
    before = flags.fp32_precision
    first, second = cuda.products(x), cuda.products(x)
    first.__enter__()
    inside = flags.fp32_precision
    second.__enter__()
    first.__exit__(None, None, None)
    assert flags.fp32_precision == inside == ("tf32" if compiler.tf32() else "ieee") != before
    second.__exit__(None, None, None)
    assert flags.fp32_precision == before


def test_shares_that_overlap(monkeypatch):
    """The first of two who leaves takes the share of the other with it, or leaves its own behind."""
    monkeypatch.setattr(compiler, "chip", lambda device: compiler.Chip(132, 232448, 9))
    first, second = compiler.shared_by(4), compiler.shared_by(2)
    seen = []
    for change in (first.__enter__, second.__enter__, lambda: first.__exit__(None, None, None)):
        change()
        seen.append(compiler.processors(0))
    second.__exit__(None, None, None)
    assert [*seen, compiler.processors(0)] == [33, 33, 66, 132]
