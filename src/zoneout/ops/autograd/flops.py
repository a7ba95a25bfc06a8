"""FLOP formulas for `torch.utils.flop_counter.FlopCounterMode`: a run's matrix products.

A formula can only be registered by importing torch's counter, which imports Triton. So the formulas
are registered when the operator first runs under a dispatch mode. A counter is such a mode.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..run import Run
from .flat import decode, unflatten


def forward_flops(r: Run) -> int:
    """Return the sum of 2·M·N·K over the products x·Wx, h·Wh, inside the step, and the projection.

    Padding is counted, as in torch.
    """
    return 2 * _rows(r) * sum(_sizes(r))


def backward_flops(r: Run, needs: set[str]) -> int:
    """Return the FLOPs of a backward pass, for the gradients that are needed.

    Recomputing adds the FLOPs of one forward pass.
    """
    rows, (inputs, recurrent, projection, inner) = _rows(r), _sizes(r)
    products = rows * inputs * (("x" in needs) + ("w_ih" in needs)) + rows * recurrent * (
        "w_hh" in needs
    )
    products += (
        rows if "state0" in needs else rows - r.batch
    ) * recurrent  # from each step to the previous one
    products += rows * projection * (1 + ("w_hr" in needs))
    products += rows * inner * 2  # of their inputs and of their matrices
    return 2 * products + (forward_flops(r) if r.recompute else 0)


def _sizes(r: Run) -> tuple[int, int, int, int]:
    """Return the sizes of the matrices for x, for h, for the projection, and inside the step."""
    w = r.weights
    # Ids of one-hot rows: a table lookup, no product.
    inputs = 0 if r.x.dtype == torch.int64 else w.w_ih.numel()
    recurrent, projection = (0 if v is None else v.numel() for v in (w.w_hh, w.w_hr))
    sizes = dict(zip(r.cell.parameters, (v.numel() for v in w.parameters)))
    inner = sum(sizes[name] for product in r.cell.products for name in product.matrices)
    return inputs, recurrent, projection, inner


def _rows(r: Run) -> int:
    return math.prod(r.x.shape[:-1])


def _of_run(*args: Any, **_: Any) -> int:
    *encoded, tensors, constants = args
    return forward_flops(unflatten(decode(*encoded), tensors, constants))


def _of_run_backward(grads: Any, given: Any, saved: Any, needs: Any, *args: Any, **_: Any) -> int:
    *encoded, tensors, constants = args
    settings = decode(*encoded)
    needed = {name for name, need in zip(settings.names, needs) if need}
    return backward_flops(unflatten(settings, tensors, constants), needed)


def register() -> None:
    """Register the formulas with torch's counter, if it has been imported."""
    module: Any = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    formulas = {torch.ops.zoneout.run: _of_run, torch.ops.zoneout.run_backward: _of_run_backward}
    active = [getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack()]
    for packet, formula in formulas.items():
        if packet not in module.flop_registry:
            module.register_flop_formula(packet, get_raw=True)(formula)
        for counter in active:  # an active counter copied the registry when it was created
            if isinstance(counter, module.FlopCounterMode):
                counter.flop_registry.setdefault(packet, formula)
