"""One operator, "run this cell over time", and its backends.

`run` takes everything that one layer and direction needs for one pass over a sequence, and passes
it to a backend. The operator does not know modules, and modules do not know kernels.

`reference` is the definition of correct: every other backend is compared with it. The other
backends go through the operator `zoneout::run`, with a loop over time written for their device.

What the rest of the package may use: `__all__`, the modules directly in this folder, and the
functions of `cuda`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from ..torch_state import functionalizing
from . import reference
from .autograd import eager
from .autograd.eager import Settings, can_repeat, find, repeat, settings_of
from .autograd.flat import decode, unflatten
from .cpu import one_step
from .cpu.masks import masks_of
from .reference import dense
from .run import TOLERANCES, Result, Run, Weights, kind_of
from .sequence.packing import packed, packing_of, padded
from .sequence.prepare import LOOPS
from .sequence.products import linear
from .sequence.rows import check_counts, places

__all__ = [
    "BACKENDS",
    "TOLERANCES",
    "Result",
    "Run",
    "Settings",
    "Weights",
    "autocast_on",
    "can_repeat",
    "check_backend",
    "check_counts",
    "decode",
    "dense",
    "find",
    "kind_of",
    "linear",
    "masks_of",
    "one_step",
    "packed",
    "packing_of",
    "padded",
    "places",
    "repeat",
    "run",
    "settings_of",
    "unflatten",
]

BACKENDS: dict[str, Callable[[Sequence[Run]], list[Result]]] = {  # several runs: one per direction
    "reference": lambda runs: [reference.run(r) for r in runs],
    "cpu": eager.run,
    "cuda": eager.run,
}


def check_backend(backend: str | None) -> None:
    """Raise if the name is not the name of a backend."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)} or None, got {backend!r}")


# Queried once at import, so a compiler does not have to trace the query.
_AUTOCAST = {
    kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind)
}


def autocast_on(kind: str) -> bool:
    """Return True if autocast is on for a device type; not every device type supports it."""
    return kind in _AUTOCAST and torch.is_autocast_enabled(kind)


def run(runs: Sequence[Run], backend: str | None = None) -> list[Result]:
    """Run cells over time with the given backend.

    With `backend=None`, the backend of the input's device is used, or the reference if the device
    has none. All runs belong to one layer, on one device and of one dtype.
    """
    kind, complex_ = runs[0].x.device.type, runs[0].x.is_complex()
    if runs[0].weights.w_ih.numel() == 0:  # no inputs or no units: no fused loop supports this
        backend = "reference"
    elif backend is None:
        if kind == "cpu" and runs[0].x.shape[0] == 1 and one_step.supports(runs[0]):
            return [one_step.run(r) for r in runs]
        fused = kind in BACKENDS and not complex_ and LOOPS[kind].supports(runs[0])
        backend = kind if fused else "reference"
    elif backend != "reference" and backend != kind:
        raise ValueError(
            f"backend: {backend!r} takes input on a {backend} device, got {runs[0].x.device}; "
            "backend=None would do"
        )
    elif backend != "reference" and complex_:
        raise TypeError(
            f"backend: {backend!r} takes real numbers, got {runs[0].x.dtype}; backend=None would do"
        )
    if any(
        functionalizing()[:-1]
    ):  # `functionalize` around another transform would receive an autograd node
        backend = "reference"
    if runs[0].x.dtype == torch.int64 and torch.onnx.is_in_onnx_export():
        runs = [r._replace(x=dense(r.x, r.weights.w_ih)) for r in runs]
    with torch.autocast(kind, enabled=False) if autocast_on(kind) else nullcontext():
        return BACKENDS[backend](runs)
