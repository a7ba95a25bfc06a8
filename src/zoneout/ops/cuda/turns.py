"""Loops that fill a GPU, one after another: of two at once each may have a part of its blocks there, and wait for ever.

A cooperative launch asks that all blocks of a grid fit on the chip, which says nothing of what else is there. Streams
of one process are therefore put in order here; processes take turns on a GPU anyway.
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
        self._stream: torch.cuda.Stream | None = None  # of the latest
        self._ended: torch.cuda.Event | None = None  # of the latest, once there is more than one stream

    @contextmanager
    def take(self) -> Iterator[None]:
        """While such a loop, or a graph with one in it, is launched in the current stream: after all those before.

        What a stream captures has no place in time yet: it is only counted, and whoever replays it takes a turn.
        """
        if torch.cuda.is_current_stream_capturing():
            self.captured += 1
            yield
            return
        with self._lock:
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None and self._stream != stream:
                if self._ended is None:
                    self._ended = self._stream.record_event()
                stream.wait_event(self._ended)
            yield
            self._stream = stream
            if self._ended is not None:
                self._ended = stream.record_event()


_turns: dict[int, Turns] = {}


def turns(device: int) -> Turns:
    """Those of the GPU with this number."""
    return _turns.setdefault(device, Turns(device))
