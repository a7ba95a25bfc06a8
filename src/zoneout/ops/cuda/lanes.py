"""Loops side by side: each in a stream of its own that leaves torch's current one and comes back to it.

Only launches go there. Memory is taken and given back in the current stream, which waits for all of its lanes before
it goes on, so that nobody else has to know of them.
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
    """A stream, and the event that says how far it has come."""

    stream: ctypes.c_void_p
    ended: ctypes.c_void_p


@contextmanager
def beside(device: int, count: int) -> Iterator[Sequence[ctypes.c_void_p]]:
    """So many streams that begin where the current one is; after this the current one waits for them."""
    current = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device))
    # Those of one stream are no other's: while it is captured they are, too.
    begun, lanes = _event(device, current.value, -1), [_lane(device, current.value, k) for k in range(count)]
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
    """What a function of the driver makes; where the current stream is being captured that would end the capture."""
    made, mode = ctypes.c_void_p(), ctypes.c_int(_RELAXED)
    check(driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    try:
        check(getattr(driver(), function)(ctypes.byref(made), flags))
    finally:
        check(driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    return made
