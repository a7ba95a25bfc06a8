"""Optimizer updates in one kernel for all parameters: each element is read and written once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...ops.cuda import add_source, common_defines, load
from ...ops.memory import address

SOURCE = add_source(Path(__file__).with_suffix(".cu"))
MOST = 64  # maximum tensors in a launch
CHUNK, THREADS = 4096, 256  # elements and threads of a block
RULES = ("sgd", "adam", "rmsprop")


class Tensors(ctypes.Structure):
    """`Tensors` of optimizer_kernel.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p * MOST) for name in ("p", "g", "first", "second")),
        *((name, ctypes.c_int64 * MOST) for name in ("size", "end")),
        ("decays", ctypes.c_uint64),
    ]


class Rule(ctypes.Structure):
    """`Rule` of optimizer_kernel.cu."""

    _fields_ = [
        *(
            (name, ctypes.c_float)
            for name in ("mean_new", "square_kept", "square_new", "momentum", "l2")
        ),
        *((name, ctypes.c_void_p) for name in ("factor", "eps", "by", "keep")),
    ]


def supports(parameters: Sequence[Tensor], steps: Sequence[Tensor]) -> bool:
    """Return True if the kernels support these parameters and their update steps.

    All tensors must be contiguous, non-empty, float32 and on a GPU, at most 64 parameters.
    """
    each = (v for values in (parameters, steps) for v in values)
    suitable = (
        v.is_cuda and v.dtype == torch.float32 and v.is_contiguous() and v.numel() > 0 for v in each
    )
    return len(parameters) <= MOST and all(suitable)


def advance(
    rule: str,
    paper: bool,
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    slots: Sequence[Sequence[Tensor]],
    numbers: tuple[float, float, float],
    l2: float,
    factor: Tensor | None,
    eps: Tensor,
) -> None:
    """Turn gradients into update steps, in place, and update the optimizer state in `slots`.

    `numbers` are the weight of the gradient in Adam's mean, the decay of the mean square, and the
    momentum. `l2` times the parameters is added to the gradients.
    """
    new, kept, momentum = numbers
    how = Rule(mean_new=new, square_kept=kept, square_new=1 - kept, momentum=momentum, l2=l2)
    _launch(
        "advance",
        defines_of(RULES.index(rule), paper),
        _tensors(parameters if l2 else None, grads, slots),
        grads,
        how,
        factor,
        eps,
    )


def apply(
    parameters: Sequence[Tensor],
    steps: Sequence[Tensor],
    by: Tensor,
    keep: Tensor | None,
    decays: Sequence[bool],
) -> None:
    """Subtract update steps, times `by`, from the parameters.

    Parameters with weight decay are multiplied by `keep` first.
    """
    given = _tensors(parameters, steps, ())
    given.decays = sum(one << i for i, one in enumerate(decays) if keep is not None)
    _launch("apply", defines_of(0, False), given, steps, Rule(), None, None, by, keep)


def defines_of(rule: int, paper: bool) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernels are compiled with."""
    common = common_defines(None, torch.float32, fast=False)
    return (*common, ("RULE", rule), ("PAPER", int(paper)))


def _tensors(
    parameters: Sequence[Tensor] | None, grads: Sequence[Tensor], slots: Sequence[Sequence[Tensor]]
) -> Tensors:
    given, end, device = Tensors(), 0, grads[0].get_device()

    def at(v: Tensor) -> int:
        return address(v, "parameter", torch.float32, device)

    for i, grad in enumerate(grads):
        end += -(-grad.numel() // CHUNK)
        given.g[i], given.size[i], given.end[i] = at(grad), grad.numel(), end
        if parameters is not None:
            given.p[i] = at(parameters[i])
        for name, slot in zip(("first", "second"), slots):
            getattr(given, name)[i] = at(slot[i])
    return given


def _launch(
    name: str,
    defines: tuple[tuple[str, int], ...],
    given: Tensors,
    steps: Sequence[Tensor],
    how: Rule,
    *numbers: Tensor | None,
) -> None:
    # These float64 copies must live until the launch.
    wide = [None if number is None else number.double() for number in numbers]
    for field, number in zip(("factor", "eps", "by", "keep"), wide):
        setattr(how, field, None if number is None else address(number, field))
    with torch.cuda.device(steps[0].device):
        kernels = load(steps[0].get_device(), SOURCE, ("advance", "apply"), defines)
        kernels[name == "apply"].launch(given.end[len(steps) - 1], THREADS, (given, how))
