"""Optimizers' arithmetic in one kernel for all parameters: each number is read and written once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ..memory import address
from .compiler import load, pack

MOST = 64  # tensors of a launch
CHUNK, THREADS = 4096, 256  # numbers and threads of a block
RULES = ("sgd", "adam", "rmsprop")


class Tensors(ctypes.Structure):
    """`Tensors` of optimizer.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p * MOST) for name in ("p", "g", "first", "second")),
        *((name, ctypes.c_int64 * MOST) for name in ("size", "end")),
        ("decays", ctypes.c_uint64),
    ]


class Rule(ctypes.Structure):
    """`Rule` of optimizer.cu."""

    _fields_ = [
        *((name, ctypes.c_float) for name in ("mean_new", "square_kept", "square_new", "momentum")),
        *((name, ctypes.c_void_p) for name in ("factor", "eps", "by", "keep")),
    ]


def takes(parameters: Sequence[Tensor], steps: Sequence[Tensor]) -> bool:
    """Whether the kernels take parameters and what is to change them."""
    each = (v for values in (parameters, steps) for v in values)
    there = (v.is_cuda and v.dtype == torch.float32 and v.is_contiguous() and v.numel() > 0 for v in each)
    return len(parameters) <= MOST and all(there)


def advance(
    rule: str,
    paper: bool,
    grads: Sequence[Tensor],
    slots: Sequence[Sequence[Tensor]],
    numbers: tuple[float, float, float],
    factor: Tensor | None,
    eps: Tensor,
) -> None:
    """Turn gradients into steps, in place, and move what the rule remembers.

    `numbers` are the share of the gradient in Adam's mean, what is kept of a mean square, and the momentum.
    """
    new, kept, momentum = numbers
    how = Rule(mean_new=new, square_kept=kept, square_new=1 - kept, momentum=momentum)
    _launch("advance", defines_of(RULES.index(rule), paper), _tensors(None, grads, slots), grads, how, factor, eps)


def apply(
    parameters: Sequence[Tensor], steps: Sequence[Tensor], by: Tensor, keep: Tensor | None, decays: Sequence[bool]
) -> None:
    """Take steps, times `by`; parameters that decay are multiplied by `keep` first."""
    given = _tensors(parameters, steps, ())
    given.decays = sum(one << i for i, one in enumerate(decays) if keep is not None)
    _launch("apply", defines_of(0, False), given, steps, Rule(), None, None, by, keep)


def defines_of(rule: int, paper: bool) -> tuple[tuple[str, int], ...]:
    """What the kernels are compiled with."""
    return (("CELL", 0), ("TYPE", 0), ("FAST", 0), ("RULE", rule), ("PAPER", int(paper)))


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
    wide = [None if number is None else number.double() for number in numbers]  # which have to live until the launch
    for field, number in zip(("factor", "eps", "by", "keep"), wide):
        setattr(how, field, None if number is None else address(number, field))
    with torch.cuda.device(steps[0].device):
        kernels = load(steps[0].get_device(), "optimizer.cu", ("advance", "apply"), defines)
        kernels[name == "apply"].launch(given.end[len(steps) - 1], THREADS, pack((given, how)))
