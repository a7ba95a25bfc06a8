"""Plans: a pass is recorded once for its shapes, and repeated for every later call.

The general code of a pass chooses paths, tiles and buffers. All of that depends on types, shapes
and flags, not on values. So the second pass of a kind is recorded (`recording.py`), and later
passes of the same kind repeat the recording: a straight list of calls.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .memory import addresses
from .recording import Plan, Recorder, is_recording

T = TypeVar("T")

MOST = 256  # plans that are kept; the oldest goes first
# The devices whose passes run by plans. On a GPU they have only run in the emulator so far:
# ZONEOUT_PLANS=1 turns them on there, and ZONEOUT_PLANS=0 off everywhere.
DEVICES = {"1": {"cpu", "cuda"}, "0": set()}.get(os.environ.get("ZONEOUT_PLANS", ""), {"cpu"})


class Kind(NamedTuple):
    """What a plan depends on besides its tensors: all of it must be hashable."""

    name: str
    runs: tuple[int, ...]  # `number_of` the settings of each run, with a first step of 0
    device: Any  # the settings of the device: `Backend.settings`
    needed: Any = None  # backward: which gradients are needed


@lru_cache(4096)
def number_of(settings: Any) -> int:
    """Return a number that stands for settings, which take longer to hash."""
    return next(_numbers)


_numbers = count()


def planned(
    kind: Kind, tensors: Sequence[Tensor | None], first_step: int, general: Callable[[], T]
) -> T:
    """Return what `general()` returns: by its plan, if there is one.

    `general` must compute from `tensors`, which are in memory, and `kind` alone. `first_step` is
    the only number that may differ between the calls of a plan.
    """
    at = addresses(tensors)
    key = _key(kind, tensors, at)
    plan = _plans.get(key)
    if plan is None:
        return _first_calls(key, tensors, first_step, general)
    return general() if plan.run is None else plan.run(tensors, at, first_step)


def find(
    kind: Kind, tensors: Sequence[Tensor | None]
) -> tuple[Callable[..., Any], Sequence[int]] | None:
    """Return the plan for these tensors, which are in memory, and their addresses, if any."""
    at = addresses(tensors)
    plan = _plans.get(_key(kind, tensors, at))
    return None if plan is None or plan.run is None else (plan.run, at)


def _key(kind: Kind, tensors: Sequence[Tensor | None], at: Sequence[int]) -> Any:
    """Return what a plan holds for; the general code has checked each that has a plan."""
    views = any([v is not None and v.storage_offset() for v in tensors])
    return (
        kind,
        tuple(
            [
                v if v is None else (v.shape, v.stride(), v.dtype, v.get_device(), p & 15)
                for v, p in zip(tensors, at)
            ]
        ),
        tuple(map(at.index, at)),  # which tensors begin at the same address
        _places(tensors, at) if views else None,
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _places(tensors: Sequence[Tensor | None], at: Sequence[int]) -> tuple[int, ...]:
    """Return the distance of each tensor from the first one in the same storage.

    A recording cannot tell whether an address inside two tensors belongs to one or to the other. A
    plan holds as long as they lie in the same way.
    """
    first: dict[int, int] = {}
    storages = [0 if v is None else v.untyped_storage()._cdata for v in tensors]
    return tuple([p - first.setdefault(one, p) for one, p in zip(storages, at)])


_plans: dict[Any, Plan] = {}
_seen: dict[int, None] = {}  # the hashes of kinds that have run once
_lock = threading.Lock()


def plans() -> list[Plan]:
    """Return the plans that are kept."""
    return list(_plans.values())


def forget() -> None:
    """Forget all plans."""
    with _lock:
        _plans.clear()
        _seen.clear()


def _first_calls(
    key: Any, tensors: Sequence[Tensor | None], first_step: int, general: Callable[[], T]
) -> T:
    """Run a kind for the first time; or for the second time, and record it."""
    number = hash(key)
    with _lock:
        again = number in _seen  # a shape that never returns is not recorded
        _keep(_seen, number, None)
    if not again or is_recording():
        return general()
    with Recorder(tensors, first_step) as recorder:
        result = general()
    plan = recorder.plan(result)
    with _lock:
        _keep(_plans, key, plan)
    return result


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    kept[key] = value
    while len(kept) > MOST:
        del kept[next(iter(kept))]
