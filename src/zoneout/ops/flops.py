"""Counts of floating-point operations for `torch.utils.flop_counter.FlopCounterMode`: the matrix products of a run.

Torch has no place for a formula that does not import its counter, and that imports Triton. So the formulas are
registered when the operator first runs under a dispatch mode, which a counter is.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .interface import Run
from .operator import unflatten
from .passes import DIFFERENTIABLE


def forward_flops(r: Run) -> int:
    """2·M·N·K of each product: x·Wx, h·Wh, and that with the projection. Padding is counted, as torch counts it."""
    w_ih, w_hh, _, _, w_hr = r.weights
    inputs = 0 if r.x.dtype == torch.int64 else w_ih.numel()  # one-hot rows by their numbers are looked up
    return 2 * _rows(r) * (inputs + w_hh.numel() + (0 if w_hr is None else w_hr.numel()))


def backward_flops(r: Run, needs: dict[str, bool]) -> int:
    """The same of a backward pass, for the gradients that are needed; recomputing is a forward pass more."""
    w_ih, w_hh, _, _, w_hr = r.weights
    rows = _rows(r)
    inputs = 0 if r.x.dtype == torch.int64 else w_ih.numel()
    products = rows * inputs * (needs["x"] + needs["w_ih"]) + rows * w_hh.numel() * needs["w_hh"]
    products += (rows if needs["h0"] else rows - r.batch) * w_hh.numel()  # from each step to the one before it
    if w_hr is not None:
        products += rows * w_hr.numel() * (1 + needs["w_hr"])
    return 2 * products + (forward_flops(r) if r.recompute else 0)


def _rows(r: Run) -> int:
    return math.prod(r.x.shape[:-1])


def _of_run(*args: Any, **_: Any) -> int:
    return forward_flops(unflatten(*args))


def _of_run_backward(dy: Any, dh: Any, dc: Any, dcells: Any, saved: Any, needs: Any, *args: Any, **_: Any) -> int:
    return backward_flops(unflatten(*args), dict(zip(DIFFERENTIABLE, needs)))


def register() -> None:
    """Give the formulas to torch's counter, if it has been imported."""
    module: Any = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    formulas = {torch.ops.zoneout.run: _of_run, torch.ops.zoneout.run_backward: _of_run_backward}
    active = [getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack()]
    for packet, formula in formulas.items():
        if packet not in module.flop_registry:
            module.register_flop_formula(packet, get_raw=True)(formula)
        for counter in active:  # made earlier, it has copied the formulas that were there then
            if isinstance(counter, module.FlopCounterMode):
                counter.flop_registry.setdefault(packet, formula)
