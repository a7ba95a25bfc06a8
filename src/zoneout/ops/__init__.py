"""One operator, "run this cell over time", and its backends.

`run` takes everything that one layer and direction needs for one pass over a sequence and gives it to a backend. The
operator knows no modules, the modules know no kernels. `reference` is the truth that every other backend is held to;
the others go through the operator `zoneout::run`, with a loop over time made for their device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cuda, node, one_step, reference
from .interface import TOLERANCES, Result, Run, Weights
from .modes import functionalizing

__all__ = ["BACKENDS", "TOLERANCES", "Result", "Run", "Weights", "autocast_on", "check_backend", "dense", "run"]

BACKENDS: dict[str, Callable[[Sequence[Run]], list[Result]]] = {  # several runs: those of both directions
    "reference": lambda runs: [reference.run(r) for r in runs],
    "cpu": node.run,
    "cuda": node.run,
}


def check_backend(backend: str | None) -> None:
    """An error where the name is not that of a backend."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)} or None, got {backend!r}")


# Asked once: a compiler need not be able to ask.
_AUTOCAST = {kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind)}


def autocast_on(kind: str) -> bool:
    """Whether autocast is on for a kind of device; not every one knows of it."""
    return kind in _AUTOCAST and torch.is_autocast_enabled(kind)


def dense(x: Tensor, w_ih: Tensor) -> Tensor:
    """An input as its features: one-hot rows that were given by their numbers, written out."""
    return x if x.dtype != torch.int64 else F.one_hot(x.squeeze(-1), w_ih.shape[1]).to(w_ih.dtype)


def run(runs: Sequence[Run], backend: str | None = None) -> list[Result]:
    """Run cells over time, with the backend asked for or, where the input's device has none, the reference.

    All are of one layer, on one device and of one type.
    """
    kind, complex_ = runs[0].x.device.type, runs[0].x.is_complex()
    if runs[0].weights.w_ih.numel() == 0:  # a cell without inputs or units, for which no loop was written
        backend = "reference"
    elif backend is None:
        if kind == "cpu" and one_step.takes(runs[0]):
            return [one_step.run(r) for r in runs]
        fused = kind in BACKENDS and not complex_ and (kind != "cuda" or cuda.takes(runs[0]))
        backend = kind if fused else "reference"
    elif backend != "reference" and backend != kind:
        raise ValueError(
            f"backend: {backend!r} takes input on a {backend} device, got {runs[0].x.device}; backend=None would do"
        )
    elif backend != "reference" and complex_:
        raise TypeError(f"backend: {backend!r} takes real numbers, got {runs[0].x.dtype}; backend=None would do")
    if any(functionalizing()[:-1]):  # around another transform, which would hand it a node
        backend = "reference"
    if runs[0].x.dtype == torch.int64 and (backend == "reference" or torch.onnx.is_in_onnx_export()):
        runs = [r._replace(x=dense(r.x, r.weights.w_ih)) for r in runs]
    with torch.autocast(kind, enabled=False) if autocast_on(kind) else nullcontext():
        return BACKENDS[backend](runs)
