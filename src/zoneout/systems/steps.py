"""What the systems with a loop in Python share: masks of all steps, and layer norm by gate.

Some systems cannot be a cell of one layer: layers exchange values inside a step, or the prediction
of a step enters the next one. They loop over their steps in torch calls. Masks are drawn before the
loop, by the same coordinates as those of the layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..draws import constant, example_ids
from ..noise import Rule, plane
from ..ops.dropout import random_units
from ..philox import as_seed, fresh_seed
from ..rates import check_rate

EPS = 1e-3  # of the layer norms, as in the code of the HyperLSTM's authors


class Loop(nn.Module):
    """The base class: one input, one state, and a function for one step."""

    input_size: int
    hidden_size: int

    def one_hot(self, input: Tensor) -> Tensor:
        """Return the input as features; int64 is read as ids of one-hot rows."""
        if input.dtype == torch.int64:
            return F.one_hot(input, self.input_size).to(next(self.parameters()).dtype)
        return input

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
        key = fresh_seed(like) if seed is None else as_seed(seed, like.device)
        rule = Rule(stream, "previous", "unit", "expectation")
        draw = constant(rule, 0.0, key, plane(rule, 0, 0))
        return random_units(draw, units, example_ids(examples, like.shape[1], like.device),
                            first_step, len(like))  # fmt: skip


class GateNorm(nn.Module):
    """Layer norm of each of several gates by itself, with a scale and a shift per unit."""

    def __init__(self, gates: int, units: int, shift: bool = True) -> None:
        super().__init__()
        self.gates = gates
        self.weight = nn.Parameter(torch.ones(gates, units))
        self.bias = nn.Parameter(torch.zeros(gates, units)) if shift else None

    def forward(self, v: Tensor) -> Tensor:
        """Return v, [B, gates · units], normalised."""
        parts = F.layer_norm(v.unflatten(-1, (self.gates, -1)), self.weight.shape[1:], eps=EPS)
        parts = parts * self.weight
        return (parts if self.bias is None else parts + self.bias).flatten(-2)


def check_dropout(rate: float, name: str) -> float:
    """Return a rate; raise if it is not a number between 0 and 1."""
    checked = check_rate(rate, name)
    if not isinstance(checked, float):
        raise TypeError(f"{name}: expected a number, got {type(rate).__name__}")
    return checked
