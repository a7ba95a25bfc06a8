"""The state of torch around a call: tracing, transforms, and whether gradients are needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack


def plain_eager() -> bool:
    """Return True in plain eager mode (no compile, trace, functorch or dispatch mode)."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch.jit.is_tracing()
    )


def functionalizing() -> list[bool]:
    """Return, for each torch.func transform around this call, whether it is `functionalize`.

    The outermost transform comes first. torch has no `functionalize` rule for an autograd node of
    our own. The node can only handle `functionalize` itself, as the innermost transform.
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return []
    return [one.key() == TransformType.Functionalize for one in get_interpreter_stack() or ()]


def nobody_derives(tensors: Sequence[Tensor | None]) -> bool:
    """Return True if no gradient is needed, in reverse mode or in forward mode."""
    if torch.autograd.forward_ad._current_level >= 0:
        return False
    return not torch.is_grad_enabled() or not any(
        v is not None and v.requires_grad for v in tensors
    )
