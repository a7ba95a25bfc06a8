"""The state of torch around a call: tracing, transforms, and whether gradients are needed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, wraps

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.nn import Parameter


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


def no_gradient_needed(tensors: Sequence[Tensor | None]) -> bool:
    """Return True if no gradient is needed, in reverse mode or in forward mode."""
    if torch.autograd.forward_ad._current_level >= 0:
        return False
    return not torch.is_grad_enabled() or not any(
        v is not None and v.requires_grad for v in tensors
    )


def capturing(device: torch.device) -> bool:
    """Return True if a CUDA graph is being captured on this device's current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def kept(most: int) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Keep the results of a function that makes a constant tensor on `device`, its first argument.

    The result must not be written to. A tensor that is made inside a trace, a transform, inference
    mode or the capture of a CUDA graph must not outlive it, and a graph must not read one that
    could be dropped: there, each call makes its own.
    """

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        once = lru_cache(most)(function)

        @wraps(function)
        def found(device: torch.device, *args: Hashable) -> Tensor:
            alone = not plain_eager() or torch.is_inference_mode_enabled() or capturing(device)
            return function(device, *args) if alone else once(device, *args)

        return found

    return decorate


def zeros(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros of the kind and on the device of `like`, which must not be written to."""
    if type(like) in (Tensor, Parameter):
        return _zeros(like.device, shape, dtype)
    return like.new_zeros(shape, dtype=dtype)


@kept(32)
def _zeros(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)
