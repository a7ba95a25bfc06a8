"""Loops that fill a GPU, one after another: of two at once each may have a part of its blocks there, and wait for ever.

A cooperative launch asks that all blocks of a grid fit on the chip, which says nothing of what else is there. Streams
of one process are therefore put in order here; processes take turns on a GPU anyway, unless a server makes them share.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Turns:
    """Of one GPU."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.captured = 0  # loops that went into a graph, to run when that is replayed
        self._lock = threading.Lock()
        self._latest: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None  # where it was, and its end

    @contextmanager
    def take(self) -> Iterator[None]:
        """While such a loop, or a graph with one in it, is launched in the current stream: after all those before.

        What a stream captures has no place in time yet: it is only counted, and whoever replays it takes a turn.
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
            finally:  # at once, and not when another comes: by then the stream may capture, or be gone
                self._latest = stream, stream.record_event(ended)


_turns: dict[int, Turns] = {}


def turns(device: int) -> Turns:
    """Those of the GPU with this number."""
    return _turns.setdefault(device, Turns(device))
