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

import torch


class Turns:
    """The order of loops that fill one GPU."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.captured = 0  # loops captured in a graph: they run when the graph is replayed
        self._lock = threading.Lock()
        # The stream of the latest loop, and the event at its end.
        self._latest: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    @contextmanager
    def take(self) -> Iterator[None]:
        """Order the launch inside the `with` block after all earlier ones on this GPU.

        The launch is of a loop, or of a graph that contains one, on the current stream. During
        capture a loop is only counted, because it has no position in time yet. The code that
        replays the graph must take a turn.
        """
        with self._lock:
            if torch.cuda.is_current_stream_capturing():
                self.captured += 1
                yield
                return
            stream = torch.cuda.current_stream(self.device)
            before, ended = self._latest or (stream, None)
            if ended is not None and before != stream:
                stream.wait_event(ended)
            try:
                yield
            # Record now, not at the next turn: by then the stream may be capturing or destroyed.
            finally:
                self._latest = stream, stream.record_event(ended)


_turns: dict[int, Turns] = {}


def turns(device: int) -> Turns:
    """Return the `Turns` of the GPU with this index."""
    return _turns.setdefault(device, Turns(device))
