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

from .compiler import check, driver

_APART = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
_UNTIMED = 2  # CU_EVENT_DISABLE_TIMING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Lane(NamedTuple):
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
    begun, lanes = (
        _event(device, current.value, -1),
        [_lane(device, current.value, k) for k in range(count)],
    )
    check(driver().cuEventRecord(begun, current))
    for lane in lanes:
        check(driver().cuStreamWaitEvent(lane.stream, begun, 0))
    try:
        yield [lane.stream for lane in lanes]
    finally:
        for lane in lanes:
            check(driver().cuEventRecord(lane.ended, lane.stream))
            check(driver().cuStreamWaitEvent(current, lane.ended, 0))


@cache
def _lane(device: int, current: int | None, k: int) -> Lane:
    return Lane(_made("cuStreamCreate", _APART), _event(device, current, k))


@cache
def _event(device: int, current: int | None, k: int) -> ctypes.c_void_p:
    return _made("cuEventCreate", _UNTIMED)


def _made(function: str, flags: int) -> ctypes.c_void_p:
    """Create a stream or event with a driver function.

    Without relaxed capture mode the call would end a capture of the current stream.
    """
    made, mode = ctypes.c_void_p(), ctypes.c_int(_RELAXED)
    check(driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    try:
        check(getattr(driver(), function)(ctypes.byref(made), flags))
    finally:
        check(driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    return made
