"""What threads share of a GPU: loops that fill it take turns, parts last while somebody needs
them, settings stay.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import zoneout as zo
from zoneout.ops.cuda.runtime import compiler, exclusive
from zoneout.ops.cuda.runtime.exclusive import Turns


class Stream:
    """A stream that keeps what it is told."""

    def __init__(self, name):
        self.name, self.told, self.cuda_stream = name, [], 0

    def record_event(self, event=None):
        self.told.append("record")
        return f"{self.name}{len(self.told)}"

    def wait_event(self, event):
        self.told.append(f"wait {event}")


@pytest.fixture
def streams(monkeypatch):
    """Two streams, and a function that makes one of them the current one, capturing or not."""

    def enter(stream, capture=0):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capture > 0)
        monkeypatch.setattr(exclusive, "capture_of", lambda stream: capture)

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
    assert a.told == [
        "launch",
        "record",
        "launch",
        "record",
        "wait b3",
        "launch",
        "record",
        "launch",
        "record",
    ]
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
    """A captured loop waits for something outside of its graph, which CUDA refuses, or is taken
    for one that runs.
    """
    a, b, enter = streams
    turns = Turns(0)
    enter(a)
    launch(turns, a)
    enter(b, capture=7)
    launch(turns, b)
    assert b.told == ["launch", "record"] and turns.captured == 1
    enter(a)
    launch(turns, a)
    assert a.told == ["launch", "record"] * 2


def test_loops_of_one_capture_are_in_order(streams):
    """A replayed graph has two loops on the chip at once, from two streams of its capture."""
    a, b, enter = streams
    turns = Turns(0)
    for stream, capture in ((a, 7), (a, 7), (b, 7), (a, 7), (b, 8), (a, 9), (b, 9)):
        enter(stream, capture)
        launch(turns, stream)
    both = ["launch", "record"]
    assert a.told == [*both, *both, "wait b3", *both, *both]
    assert b.told == ["wait a4", *both, *both, "wait a9", *both]


def test_a_kernel_is_loaded_during_a_capture(monkeypatch):
    """The first kernel of a kind ends the capture that it is launched in."""
    called = []
    driver = SimpleNamespace(
        cuThreadExchangeStreamCaptureMode=lambda mode: called.append(mode._obj.value) or 0,
        cuModuleLoadData=lambda *given: called.append("load") or 0,
        cuModuleGetFunction=lambda *given: 0,
    )
    monkeypatch.setattr(compiler, "driver", lambda: driver)
    monkeypatch.setattr(compiler, "machine_code", lambda *given: b"")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    compiler.load.__wrapped__(0, "steps.cu", ("forward",), ())
    assert called == [2, "load", 2]


@pytest.mark.gpu
def test_side_by_side():
    """Loops of two streams, each of which fills the GPU, wait for each other for ever."""
    layers = [
        zo.LSTM(
            50, 1000, noise=zo.Zoneout(cell=0.5, hidden=0.05), device="cuda", dtype=torch.bfloat16
        )
    ]
    layers += [
        zo.LSTM(
            50, 1500, noise=zo.Zoneout(cell=0.5, hidden=0.05), device="cuda", dtype=torch.bfloat16
        )
    ]
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
    threads = [
        threading.Thread(target=work, args=of, daemon=True) for of in zip(layers, inputs, want)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(ended) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("own", ["tf32", "ieee"])
def test_products_of_another_thread(own):
    """A layer's precision becomes that of every product that is taken meanwhile, or theirs
    becomes the layer's.
    """
    others = {"tf32": "ieee", "ieee": "tf32"}[own]
    rnn, matmul = torch.backends.cudnn.rnn, torch.backends.cuda.matmul
    before, rnn.fp32_precision, matmul.fp32_precision = (
        (rnn.fp32_precision, matmul.fp32_precision),
        own,
        others,
    )
    try:
        layer, x = zo.LSTM(50, 300, device="cuda"), torch.randn(20, 32, 50, device="cuda")
        a, ended, seen = torch.randn(256, 256, device="cuda"), threading.Event(), []
        want, gradient = a @ a, torch.randn(20, 32, 300, device="cuda")
        grads = torch.autograd.grad(layer(x)[0], layer.parameters(), gradient)

        def multiply():
            while not ended.is_set():
                seen.append((a @ a - want).abs().max())

        thread = threading.Thread(target=multiply)
        thread.start()
        for _ in range(100):
            again = torch.autograd.grad(layer(x)[0], layer.parameters(), gradient)
            assert all(torch.equal(*both) for both in zip(grads, again, strict=True))
        ended.set()
        thread.join()
        assert len(seen) > 100 and not torch.stack(seen).any()
    finally:
        rnn.fp32_precision, matmul.fp32_precision = before


FIRST = """
import threading
import torch
import zoneout as zo
from torch.nn.utils.rnn import pack_padded_sequence
from zoneout.ops.cuda.pointwise import rows
from zoneout.ops.dropout import dropout

layer = zo.LSTM(3, 5, noise=zo.Zoneout(cell=0.5, hidden=0.1), device="cuda")
x, ends = torch.randn(4, 2, 3, device="cuda", requires_grad=True), torch.tensor([4, 2], device="cuda")
of_y, of_packed, done = torch.randn(4, 2, 5, device="cuda"), torch.randn(6, 5, device="cuda"), []
"""
CALLS = {
    "packed": "layer(pack_padded_sequence(x, [4, 2]))[0].data.backward(of_packed)",
    "recomputed": "layer.recompute = True; layer(x, lengths=ends)[0].backward(of_y)",
    "dropout": "dropout(x, 0.5, torch.tensor(1, device='cuda'), 0, ends).backward(of_y[..., :3])",
    "rows": "x = x.detach(); work = threading.Thread(target=lambda: done.append(rows.zero_past_lengths(x, ends))); work.start(); "
    "work.join(); done[0]",
}


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS)
def test_the_first_that_a_thread_does(call):
    """A thread that CUDA has not seen, as autograd's is, has no device yet: a launch of ours is
    an error.
    """
    script = f"{FIRST}\n{CALLS[call]}\ntorch.cuda.synchronize()"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0 and "Error" not in ended.stderr, ended.stderr


def test_a_thread_gets_a_device_where_it_has_none(monkeypatch):
    """A thread keeps the device of another, or is asked about it at every call."""
    called, current = [], []

    class Library:
        def cuCtxGetCurrent(self, context):
            called.append("get")
            context._obj.value = current[0]
            return 0

        def cuDevicePrimaryCtxRetain(self, context, device):
            called.append(f"of {device}")
            context._obj.value = 7
            return 0

        def cuCtxSetCurrent(self, context):
            called.append(f"set {context.value}")
            return 0

    library = Library()
    monkeypatch.setattr(compiler, "library", lambda: library)
    monkeypatch.setattr(compiler, "_thread", compiler._Thread())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for context, wanted in ((None, ["get", "of 3", "set 7"]), (5, ["get"])):
        called.clear()
        current[:] = [context]
        thread = threading.Thread(target=lambda: [compiler.driver() for _ in range(3)])
        thread.start()
        thread.join()
        assert called == wanted


def test_shares_that_overlap(monkeypatch):
    """The first of two who leaves takes the share of the other with it, or leaves its own
    behind.
    """
    monkeypatch.setattr(compiler, "chip", lambda device: compiler.Chip(132, 232448, 9))
    first, second = compiler.shared_by(4), compiler.shared_by(2)
    seen = []
    for change in (first.__enter__, second.__enter__, lambda: first.__exit__(None, None, None)):
        change()
        seen.append(compiler.processors(0))
    second.__exit__(None, None, None)
    assert [*seen, compiler.processors(0)] == [33, 33, 66, 132]
