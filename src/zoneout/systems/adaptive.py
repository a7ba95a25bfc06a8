"""Adaptive zoneout: rates that a small network computes at every step, and learns."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import LSTM
from ..noise import Zoneout
from .steps import Loop, check_one_rate, check_sizes, check_state


class AdaptiveLSTM(Loop):
    """An LSTM with zoneout whose rates come from a small LSTM that reads the same input.

    The rate of each unit at each step is σ(A ĥ + a), where ĥ is the output of the small LSTM. The
    zoneout paper proposes this and did not build it: *adaptive, differentiable zoneout*.

    Args:
        input_size: the number of features.
        hidden_size: the number of units.
        hyper_size: the number of units of the small LSTM, which has a layer norm.
        cell, hidden: the rates that it starts with, between 0 and 1.
        mask: `"unit"` draws masks in training, with a straight-through gradient of the rates.
            `"rate"` mixes the old and the new value by the rate in training too; the gradient is
            exact, and nothing is drawn.
        learn_initial_state: True makes h0 and c0 of the layer parameters.

    >>> import torch, zoneout as zo
    >>> layer = zo.systems.AdaptiveLSTM(10, 20, hyper_size=8)
    >>> y, (h, c, *_) = layer(torch.randn(5, 3, 10))
    >>> y.shape, h.shape
    (torch.Size([5, 3, 20]), torch.Size([1, 3, 20]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        hyper_size: int = 128,
        cell: float = 0.5,
        hidden: float = 0.05,
        mask: str = "unit",
        learn_initial_state: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(input_size=input_size, hidden_size=hidden_size, hyper_size=hyper_size)
        self.input_size, self.hidden_size = input_size, hidden_size
        start = {"cell": cell, "hidden": hidden}
        self.start = {name: check_one_rate(rate, name) for name, rate in start.items()}
        for name, rate in self.start.items():
            if not 0 < rate < 1:
                raise ValueError(f"{name}: expected a rate above 0 and below 1, got {rate}")
        self.main = LSTM(
            input_size, hidden_size, noise=Zoneout(cell=cell, hidden=hidden, mask=mask),
            learn_initial_state=learn_initial_state,
        )  # fmt: skip
        self.hyper = LSTM(input_size, hyper_size, norm="layer")
        self.rates = nn.ModuleDict({n: nn.Linear(hyper_size, hidden_size) for n in self.start})
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise both LSTMs, and the rates to those at the start, the same at all steps.

        1 is added to the forget biases of the small LSTM.
        """
        self.main.reset_parameters()
        self.hyper.reset_parameters()
        small: Any = self.hyper
        size = small.hidden_size
        small.bias_ih_l0[size : 2 * size] += 1.0
        for name, rate in self.start.items():
            head: Any = self.rates[name]
            head.weight.zero_()
            head.bias.fill_(math.log(rate / (1 - rate)))

    def computed_rates(self, hyper: Tensor) -> dict[str, Tensor]:
        """Return the rates, [T, B, hidden_size] each, from the outputs of the small LSTM."""
        return {name: head(hyper).sigmoid() for name, head in self.rates.items()}

    def initial_state(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        """Return the initial states of both LSTMs: those of the large one may be learned."""
        sizes = (self.hidden_size, self.hidden_size, *[self.hyper.hidden_size] * 2)
        states = [like.new_zeros(1, batch, size) for size in sizes]
        if self.main.learn_initial_state:
            for k, name in enumerate(self.main.initial_names()):
                states[k] = getattr(self.main, name)[:, None].expand(1, batch, -1)
        return tuple(states)

    def forward(
        self,
        input: Tensor,
        hx: tuple[Tensor, ...] | None = None,
        *,
        seed: int | Tensor | None = None,
        examples: Any = None,
        first_step: int = 0,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the outputs [T, B, hidden_size] and the state (h, c, ĥ, ĉ), each [1, B, ·].

        The arguments are those of `HyperLSTM.forward`.
        """
        if hx is not None:
            check_state(hx)
        if hx is not None and len(hx) != 4:
            raise ValueError(f"hx: expected h, c, ĥ and ĉ, got {len(hx)} tensors")
        main, hyper = (None, None) if hx is None else (hx[:2], hx[2:])
        found, hyper = self.hyper(input, hyper)
        where: dict[str, Any] = {"seed": seed, "examples": examples, "first_step": first_step}
        y, main = self.main(input, main, rates=self.computed_rates(found), **where)
        return y, (*main, *hyper)
