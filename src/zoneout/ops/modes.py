"""What torch is doing around a call: whether somebody is looking on, and whether derivatives will be asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack


def plain_eager() -> bool:
    """Whether nobody is looking on: no compiler, no tracer, no transform, no dispatch mode."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch.jit.is_tracing()
    )


def functionalizing() -> list[bool]:
    """For each transform of torch.func around this call, the outermost first: whether it is `functionalize`.

    torch has no rule by which it would take a node of our own, unless the node itself does so as the innermost.
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return []
    return [one.key() == TransformType.Functionalize for one in get_interpreter_stack() or ()]


def nobody_derives(tensors: Sequence[Tensor | None]) -> bool:
    """Whether no derivative will be asked for, neither backwards nor in forward mode."""
    if torch.autograd.forward_ad._current_level >= 0:
        return False
    return not torch.is_grad_enabled() or not any(v is not None and v.requires_grad for v in tensors)
