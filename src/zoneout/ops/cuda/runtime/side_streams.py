"""Side streams for concurrent loops: each forks from torch's current stream and joins it again.

Only kernel launches use side streams. Memory is allocated and freed on the current stream, which
waits for all side streams before it continues. So no other code needs to know about them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

from .compiler import check, driver, relaxed_capture

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
_UNTIMED = 2  # CU_EVENT_DISABLE_TIMING


class SideStream(NamedTuple):
    """A side stream, and the event that marks its end."""

    stream: ctypes.c_void_p
    ended: ctypes.c_void_p


@contextmanager
def fork(device: int, count: int) -> Iterator[Sequence[ctypes.c_void_p]]:
    """Yield `count` streams that start after the work queued on the current stream.

    On exit the current stream waits for all of them.
    """
    current = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device))
    # Each current stream has its own side streams, because its capture also captures them.
    begun = _event(device, current.value, -1)
    sides = [_side_stream(device, current.value, k) for k in range(count)]
    check(driver().cuEventRecord(begun, current))
    for side in sides:
        check(driver().cuStreamWaitEvent(side.stream, begun, 0))
    try:
        yield [side.stream for side in sides]
    finally:
        for side in sides:
            check(driver().cuEventRecord(side.ended, side.stream))
            check(driver().cuStreamWaitEvent(current, side.ended, 0))


@cache
def _side_stream(device: int, current: int | None, k: int) -> SideStream:
    return SideStream(_create("cuStreamCreate", _NON_BLOCKING), _event(device, current, k))


@cache
def _event(device: int, current: int | None, k: int) -> ctypes.c_void_p:
    return _create("cuEventCreate", _UNTIMED)


def _create(function: str, flags: int) -> ctypes.c_void_p:
    """Create a stream or event with a driver function."""
    created = ctypes.c_void_p()
    with relaxed_capture():
        check(getattr(driver(), function)(ctypes.byref(created), flags))
    return created
