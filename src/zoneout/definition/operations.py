"""The operations of a cell: for each one its name, torch function, C text and derivative.

This table is the only place that knows an operation. The tracer, the reference, the derivative and
the printers read it. `mix`, `less` and `also` are the rules of noise. At 0 and 1 they select and do
not multiply, so that a NaN never reaches a unit that does not take the value. Their gradients are
products: a gradient that is not finite is lost anyway, and selecting costs a third more time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from .graph import Graph

# (graph, arguments, result, gradient of the result) -> the gradients of the arguments; None for
# none
Derivative = Callable[["Graph", tuple[int, ...], int, int], tuple[int | None, ...]]

# Nodes without arguments. `inner` is a part of a product inside the step, named "product.part".
LEAVES = ("x", "r", "state", "parameter", "inner", "mask", "gradient", "number")
# Nodes with one argument, the identity without noise and norm.
MARKS = ("candidate", "update", "shown", "held")

# A product of a parameter matrix and a vector of values, W · v, and a part of it. They have a
# value: the rows of W ("H", "4H" for four parts, or a number), and the number of the part.
PRODUCTS = {"product": 2, "part": 1}  # with the number of their arguments


@dataclass(frozen=True)
class Operation:
    """One operation on numbers."""

    arguments: int
    torch: Callable[..., Tensor]
    c: str  # with {0}, {1}, … for the arguments; upper-case names are macros of the number type
    derivative: Derivative | None = None  # None: a comparison
    needs: str = "arguments"  # what the derivative reads: "nothing", "result" or "arguments"


def mix(new: Tensor, old: Tensor, keep: Tensor) -> Tensor:
    """Return `old` where `keep` is 1, `new` where it is 0, else (1 − keep) · new + keep · old.

    The difference old − new is not taken: infinite or large values would make it NaN or infinite.
    """
    if keep.dtype == torch.bool:
        return torch.where(keep, old, new)
    fixed, wide = keep.detach(), torch.promote_types(new.dtype, torch.float32)
    share = fixed.to(wide)
    between = torch.addcmul((1 - share) * new.to(wide), share, old.to(wide)).to(new.dtype)
    made = torch.where(fixed == 0, new, torch.where(fixed == 1, old, between))
    return _with_slope(made, keep, old - new) if _is_learned(keep) else made


def less(value: Tensor, drop: Tensor) -> Tensor:
    """Return 0 where `drop` is 1, else value · (1 − drop)."""
    if drop.dtype == torch.bool:
        return value.masked_fill(drop, 0.0)
    fixed = drop.detach()
    made = torch.where(fixed == 1, 0.0, value * (1 - fixed).to(value.dtype))
    return _with_slope(made, drop, -value) if _is_learned(drop) else made


def also(value: Tensor, old: Tensor, share: Tensor) -> Tensor:
    """Return `value` where `share` is 0, else value + share · old."""
    if share.dtype == torch.bool:
        return torch.where(share, value + old, value)
    fixed = share.detach()
    made = torch.where(fixed == 0, value, value + fixed.to(value.dtype) * old)
    return _with_slope(made, share, old) if _is_learned(share) else made


def _is_learned(mask: Tensor) -> bool:
    """Return True if a mask may have a gradient, of reverse or of forward mode."""
    return mask.requires_grad or torch.autograd.forward_ad._current_level >= 0


def _with_slope(made: Tensor, mask: Tensor, slope: Tensor) -> Tensor:
    """Return `made`, whose derivative with respect to `mask` is `slope`, at 0 and 1 too.

    Where the slope is not finite there is no derivative, so that the value stays what it is.
    """
    change = (mask - mask.detach()).to(made.dtype)  # zero
    return made + change * torch.where(slope.isfinite(), slope, 0.0)


def _half_at_ties(wins: str) -> Derivative:
    """The derivative of minimum or maximum: at a tie each argument gets half, as torch has it."""

    def derivative(g: Graph, a: tuple[int, ...], y: int, d: int) -> tuple[int | None, ...]:
        half, tie = g.mul(d, g.number(0.5)), g.add("eq", *a)
        zero = g.number(0.0)
        first = g.add("where", tie, half, g.add("where", g.add(wins, *a), d, zero))
        second = g.add("where", tie, half, g.add("where", g.add(wins, *a), zero, d))
        return first, second

    return derivative


def _rest(g: Graph, share: int) -> int:
    return g.add("sub", g.number(1.0), share)


def _compare(c: str, function: Callable[..., Tensor]) -> Operation:
    return Operation(2, function, f"({{0}} {c} {{1}})")


OPERATIONS: dict[str, Operation] = {
    "add": Operation(2, torch.add, "({0} + {1})", lambda g, a, y, d: (d, d), "nothing"),
    "sub": Operation(
        2, torch.sub, "({0} - {1})", lambda g, a, y, d: (d, g.add("neg", d)), "nothing"
    ),
    "mul": Operation(
        2, torch.mul, "({0} * {1})", lambda g, a, y, d: (g.mul(d, a[1]), g.mul(d, a[0]))
    ),
    "div": Operation(
        2,
        torch.div,
        "({0} / {1})",
        lambda g, a, y, d: (g.add("div", d, a[1]), g.add("neg", g.mul(g.add("div", d, a[1]), y))),
    ),
    "neg": Operation(1, torch.neg, "(-{0})", lambda g, a, y, d: (g.add("neg", d),), "nothing"),
    "sigmoid": Operation(
        1,
        torch.sigmoid,
        "SIGMOID({0})",
        lambda g, a, y, d: (g.mul(d, g.mul(y, g.add("sub", g.number(1.0), y))),),
        "result",
    ),
    "tanh": Operation(
        1,
        torch.tanh,
        "TANH({0})",
        lambda g, a, y, d: (g.mul(d, g.add("sub", g.number(1.0), g.mul(y, y))),),
        "result",
    ),
    "relu": Operation(
        1,
        torch.relu,
        "RELU({0})",
        lambda g, a, y, d: (g.add("where", g.add("gt", y, g.number(0.0)), d, g.number(0.0)),),
        "result",
    ),
    "exp": Operation(1, torch.exp, "EXP({0})", lambda g, a, y, d: (g.mul(d, y),), "result"),
    "log": Operation(1, torch.log, "LOG({0})", lambda g, a, y, d: (g.add("div", d, a[0]),)),
    "sqrt": Operation(
        1,
        torch.sqrt,
        "SQRT({0})",
        lambda g, a, y, d: (g.add("div", g.mul(d, g.number(0.5)), y),),
        "result",
    ),
    "softplus": Operation(
        1, F.softplus, "SOFTPLUS({0})", lambda g, a, y, d: (g.mul(d, g.add("sigmoid", a[0])),)
    ),
    "abs": Operation(1, torch.abs, "ABS({0})", lambda g, a, y, d: (g.mul(d, g.add("sign", a[0])),)),
    "sign": Operation(1, torch.sign, "SIGN({0})"),
    "minimum": Operation(2, torch.minimum, "MINIMUM({0}, {1})", _half_at_ties("lt")),
    "maximum": Operation(2, torch.maximum, "MAXIMUM({0}, {1})", _half_at_ties("gt")),
    "where": Operation(
        3,
        torch.where,
        "({0} ? {1} : {2})",
        lambda g, a, y, d: (
            None,
            g.add("where", a[0], d, g.number(0.0)),
            g.add("where", a[0], g.number(0.0), d),
        ),
    ),
    "lt": _compare("<", torch.lt),
    "le": _compare("<=", torch.le),
    "gt": _compare(">", torch.gt),
    "ge": _compare(">=", torch.ge),
    "eq": _compare("==", torch.eq),
    "ne": _compare("!=", torch.ne),
    "mix": Operation(
        3,
        mix,
        "MIX({0}, {1}, {2})",
        lambda g, a, y, d: (
            g.mul(d, _rest(g, a[2])),
            g.mul(d, a[2]),
            g.mul(d, g.add("sub", a[1], a[0])),
        ),
    ),
    "less": Operation(
        2,
        less,
        "LESS({0}, {1})",
        lambda g, a, y, d: (g.mul(d, _rest(g, a[1])), g.add("neg", g.mul(d, a[0]))),
    ),
    "also": Operation(
        3,
        also,
        "ALSO({0}, {1}, {2})",
        lambda g, a, y, d: (d, g.mul(d, a[2]), g.mul(d, a[1])),
    ),
}
# Those for use in a cell.
TRACED = tuple(name for name in OPERATIONS if name not in ("mix", "less", "also", "sign"))
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
