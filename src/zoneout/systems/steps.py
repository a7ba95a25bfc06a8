"""What the systems with a loop in Python share: masks, matrix products, and layer norm by gate.

Some systems cannot be a cell of one layer: layers exchange values inside a step, or the prediction
of a step enters the next one. They loop over their steps in torch calls. Masks are drawn before the
loop, by the same coordinates as those of the layers.

A loop never reads a value on the host, so it can be captured in a CUDA graph. Its cost is then the
number of kernels. Three things keep it low: a matrix has its gradient from one product over all
steps (`Product`), a parameter from one sum (`each_step`), and what a step computes between its
products may be compiled (`Loop.compiled`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, SupportsFloat, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..checks import check_device, check_state_dtype
from ..draws import check_count, constant, example_ids
from ..ops import autocast_on
from ..ops.dropout import random_units
from ..philox import as_seed, fresh_seed
from ..rates import check_rate, readable
from ..streams import Rule, plane
from ..torch_state import plain_eager

EPS = 1e-3  # of the layer norms, as in the code of the HyperLSTM's authors


class Loop(nn.Module):
    """The base class: one input, one state, and a function for one step.

    With `compiled = True`, what a step computes between its products is compiled by
    `torch.compile`, for each shape anew.
    """

    input_size: int
    hidden_size: int
    compiled: bool = False

    def between(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of a step, compiled if the loop is."""
        return _compile(function) if self.compiled else function

    def one_hot(self, input: Tensor) -> Tensor:
        """Return the input as features; int64 is read as ids of one-hot rows."""
        if not isinstance(input, Tensor):
            raise TypeError(f"input: expected a tensor, got {type(input).__name__}")
        numbers, weights = input.dtype == torch.int64, next(self.parameters()).dtype
        shape = (*input.shape[:2], *(() if numbers else (self.input_size,)))
        if input.shape != shape or input.dim() < 2 or not (numbers or input.is_floating_point()):
            raise ValueError(
                f"input: expected [T, B, {self.input_size}], or int64 ids [T, B], got "
                f"{input.dtype} of shape {tuple(input.shape)}"
            )
        if not len(input):
            raise ValueError("input: expected at least one step, got a sequence of length 0")
        if numbers:
            if input.numel() and readable(input):
                low, high = (int(v) for v in torch.aminmax(input))
                if low < 0 or high >= self.input_size:
                    raise ValueError(
                        f"input: expected ids from 0 to {self.input_size - 1}, got {low} to {high}"
                    )
            ids = torch.arange(self.input_size, device=input.device)
            return (input[..., None] == ids).to(weights)
        if input.dtype != weights and not autocast_on(input.device.type):
            raise ValueError(
                f"input: expected {weights} as the weights have, got {input.dtype}; try "
                f"input.to({weights})"
            )
        return input

    def begins(self, hx: Any, x: Tensor) -> tuple[Tensor, ...]:
        """Return the state to start from: the given one, or the initial one. Raise if it is bad."""
        initial = self.initial_state(x.shape[1], x)
        if hx is None:
            return initial
        check_state(hx)
        want, got = ([tuple(s.shape) for s in state] for state in (initial, hx))
        if want != got:
            raise ValueError(f"hx: expected states of shapes {want}, got {got}")
        for k, state in enumerate(hx):
            check_device(f"hx[{k}]", state, x)
            check_state_dtype(f"hx[{k}]", state, x)
        return tuple(hx)

    def initial_state(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        """Return the initial state for a batch."""
        raise NotImplementedError

    def bits(
        self,
        stream: str,
        like: Tensor,
        units: int,
        *,
        seed: int | Tensor | None,
        examples: Any = None,
        first_step: int = 0,
    ) -> Tensor:
        """Return the random bits of a stream for all steps of `like`, [T, B, units].

        A mask is where they are below its rate · 65536.
        """
        first = check_count("first_step", first_step, 2**32 - len(like) + 1)
        key = fresh_seed(like) if seed is None else as_seed(seed, like.device)
        rule = Rule(stream, "previous", "unit", "expectation")
        draw = constant(rule, 0.0, key, plane(rule, 0, 0))
        return random_units(draw, units, example_ids(examples, like.shape[1], like.device),
                            first, len(like))  # fmt: skip


VARIANTS = 64  # of one function: layers, first and later steps, training and evaluation, shapes


@functools.cache
def _compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # torch's default of 8 is less than three layers of an HM-LSTM need.
    limits: Any = importlib.import_module("torch._dynamo.config")
    limits.recompile_limit = max(limits.recompile_limit, VARIANTS)
    return torch.compile(function, dynamic=False, fullgraph=True, **options)


def each_step(parameter: Tensor, steps: int) -> tuple[Tensor, ...]:
    """Return a parameter once for each step: its gradient is one sum, not an addition per step."""
    return parameter.expand(steps, *parameter.shape).unbind(0)


def in_autocast(v: Tensor) -> Tensor:
    """Return a tensor in the type in which autocast would multiply it."""
    device = v.device.type
    return v.to(torch.get_autocast_dtype(device)) if autocast_on(device) else v


class Product:
    """The products of a matrix with the values of a loop, beside sums known before the loop.

    The matrix's gradient is one product over all steps, and autocast casts the matrix once.
    """

    def __init__(self, weight: Tensor, sums: Tensor) -> None:
        """`weight` is [out, in] and `sums` [T, B, out]."""
        self.seen: list[tuple[Tensor, int]] | None = None  # values, and the version of each
        # Elsewhere (under torch.func or a compiler) the gradient is that of each product.
        if plain_eager() and torch.is_grad_enabled() and weight.requires_grad:
            self.seen = []
            sums = _Late.apply(sums, weight, self.seen)
            weight = weight.detach()
        self.sums, self.weight = sums.unbind(0), in_autocast(weight).t()

    def __call__(self, step: int, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the product of `v`, [B, in], and the sums of this step, which are to be added."""
        v = v.to(self.weight.dtype)
        if self.seen is not None:
            self.seen.append((v.detach(), v._version))
        return v @ self.weight, self.sums[step]


class _Late(torch.autograd.Function):
    """Return sums; where their gradient is known, compute that of the matrix, at the end.

    The gradient of a product is that of the sum it is added to.
    """

    @staticmethod
    def forward(ctx: Any, sums: Tensor, weight: Tensor, seen: list[tuple[Tensor, int]]) -> Tensor:
        ctx.seen, ctx.dtype = seen, weight.dtype
        return sums.view_as(sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        if any(v._version != version for v, version in ctx.seen):
            raise RuntimeError(
                "a state that was given to a system of zoneout, or returned by it, has been "
                "changed in place since the call, and the backward pass needs it as it was: write "
                "h = h * keep for h *= keep"
            )
        seen = torch.stack([v for v, _ in ctx.seen])
        product = grad.to(seen.dtype).flatten(0, 1).t() @ seen.flatten(0, 1)
        return grad, product.to(ctx.dtype), None


class GateNorm(nn.Module):
    """Layer norm of each of several gates by itself, with a scale and a shift per unit."""

    def __init__(self, gates: int, units: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(gates, units))
        self.bias = nn.Parameter(torch.zeros(gates, units))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set all scales to 1 and all shifts to 0."""
        self.weight.fill_(1.0)
        self.bias.zero_()


Norm: TypeAlias = tuple[Tensor, Tensor]  # scale and shift


def each_norm(steps: int, *norms: Any) -> list[tuple[Norm, ...]]:
    """Return, once for each step, the scales and shifts of some norms."""
    each = [zip(each_step(norm.weight, steps), each_step(norm.bias, steps)) for norm in norms]
    return list(zip(*each))


def normalised(v: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return v, [B, gates · units], with each gate normalised by itself."""
    parts = F.layer_norm(v.unflatten(-1, scale.shape), scale.shape[1:], eps=EPS)
    return (parts * scale + shift).flatten(-2)


def check_state(hx: Any) -> None:
    """Raise if a state is not a tuple or list of tensors."""
    if not isinstance(hx, (tuple, list)) or not all(isinstance(s, Tensor) for s in hx):
        raise TypeError(f"hx: expected a tuple of tensors, got {type(hx).__name__}")


def check_sizes(**sizes: int) -> None:
    """Raise if a size is not a whole number above 0."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name}: expected a whole number, got {size!r}")
        if size < 1:
            raise ValueError(f"{name}: expected a number above 0, got {size}")


def check_one_rate(rate: Any, name: str) -> float:
    """Return a rate; raise if it is not a number between 0 and 1."""
    single = isinstance(rate, SupportsFloat) and not isinstance(rate, (bool, str))
    if not single or not isinstance(checked := check_rate(rate, name), float):
        raise TypeError(f"{name}: expected one number, got {type(rate).__name__}")
    return checked
