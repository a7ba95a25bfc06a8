"""Mutual exclusion of loops that fill a GPU: two at once could deadlock.

Each of the two could have only some of its blocks on the chip, and wait forever for the others. A
cooperative launch requires that all blocks of a grid fit on the chip, but ignores other kernels.
So this module orders the streams of one process. Processes take turns on a GPU anyway, unless a
server (MPS) makes them share it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .compiler import capture_of


class Latest(NamedTuple):
    """The latest loop: its stream, and the event at its end."""

    stream: torch.cuda.Stream
    ended: torch.cuda.Event


class Turns:
    """The order of loops that fill one GPU."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.captured = 0  # loops captured in a graph: they run when the graph is replayed
        self._lock = threading.Lock()
        self._latest: Latest | None = None
        self._captures: dict[int, Latest] = {}  # the same inside the latest capture, by its number

    @contextmanager
    def take(self) -> Iterator[None]:
        """Order the launch inside the `with` block after all earlier ones on this GPU.

        The launch is of a loop, or of a graph that contains one, on the current stream. During
        capture a loop has no position in time yet: it is counted, and ordered after the other loops
        of that capture. The code that replays the graph must take a turn.
        """
        with self._lock:
            stream = torch.cuda.current_stream(self.device)
            if torch.cuda.is_current_stream_capturing():
                self.captured += 1
                number = capture_of(stream.cuda_stream)
                latest = self._captures.get(number) if number else None
                if latest is not None and latest.stream != stream:
                    stream.wait_event(latest.ended)
                yield
                # Another capture has no use for the events of this one.
                self._captures = {number: Latest(stream, stream.record_event())} if number else {}
                return
            latest = self._latest
            if latest is not None and latest.stream != stream:
                stream.wait_event(latest.ended)
            try:
                yield
            # Record now, not at the next turn: by then the stream may be capturing or destroyed.
            finally:
                ended = stream.record_event(None if latest is None else latest.ended)
                self._latest = Latest(stream, ended)


_turns: dict[int, Turns] = {}


def turns(device: int) -> Turns:
    """Return the `Turns` of the GPU with this index."""
    return _turns.setdefault(device, Turns(device))
