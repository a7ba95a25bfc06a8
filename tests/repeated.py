"""Run a pass by its plan at once, and compare it with the general code to the bit."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from zoneout.ops import recording

T = TypeVar("T")


def recorded_and_repeated(
    key: Any, tensors: Sequence[Tensor | None], first_step: int, general: Callable[[], T]
) -> T:
    """Return what `general` returns, after its plan has returned the same; keep no plan."""
    if recording.is_recording():
        return general()
    with recording.Recorder(tensors, first_step) as recorder:
        result = general()
    made = recorder.plan(result)
    if (told := os.environ.get("ZONEOUT_PLANS_TOLD")) is not None:
        with Path(told).open("a") as file:
            file.write(f"{key[0].name}: {'planned' if made.run else made.text}\n")
    if made.run is not None:
        copies = [None if v is None else elsewhere(v) for v in tensors]
        at = [0 if v is None else v.data_ptr() for v in copies]
        again = made.run(copies, at, first_step)
        assert same(again, result), made.text
    return result


def elsewhere(v: Tensor) -> Tensor:
    """Return the same tensor in other memory."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(v.shape, v.stride())) if v.numel() else 0
    whole = torch.empty(size, dtype=v.dtype, device=v.device)
    copy = whole.as_strided(v.shape, v.stride())
    whole.copy_(v.detach().as_strided((size,), (1,)) if size else whole)
    return copy


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        a, b = a.detach(), b.detach()
        alike = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        return alike and torch.equal(*(v.nan_to_num(7.0) for v in (a, b)))
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
