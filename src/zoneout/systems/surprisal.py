"""Surprisal-driven zoneout: the better a symbol was predicted, the fewer units are updated."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..init import block_orthogonal_
from .steps import Loop, Product, check_one_rate, check_sizes, each_step, in_autocast


class SurprisalLSTM(Loop):
    """A language model of one LSTM layer, whose units are updated where the prediction was wrong.

    p is what step t − 1 predicted for the symbol x_t. All gates see the surprisal s = −log p(x_t).
    A unit is updated with the probability min(τ + |(p − x_t) W_y|, 1), where W_y is the softmax's
    matrix: c = (1 − f ⊙ Z) ⊙ c + Z ⊙ i ⊙ u. In evaluation Z is that probability. Nothing is
    learned through it.

    Rocki, "Surprisal-Driven Zoneout", 2016.

    Args:
        symbols: the number of symbols.
        hidden_size: the number of units.
        least: τ, the smallest probability of an update.

    >>> import torch, zoneout as zo
    >>> model = zo.systems.SurprisalLSTM(50, 20)
    >>> logits, hidden, state = model(torch.zeros(7, 3, dtype=torch.int64))
    >>> logits.shape, hidden.shape
    (torch.Size([7, 3, 50]), torch.Size([7, 3, 20]))
    """

    def __init__(self, symbols: int, hidden_size: int, least: float = 0.2) -> None:
        super().__init__()
        check_sizes(symbols=symbols, hidden_size=hidden_size)
        self.input_size, self.hidden_size = symbols, hidden_size
        self.least = check_one_rate(least, "least")
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden_size, symbols))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden_size, hidden_size))
        self.weight_surprisal = nn.Parameter(torch.empty(4 * hidden_size))
        self.bias = nn.Parameter(torch.empty(4 * hidden_size))
        self.softmax = nn.Linear(hidden_size, symbols)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise matrices with orthogonal blocks; f, which forgets here, starts at σ(−1)."""
        for weight in (self.weight_ih, self.weight_hh, self.softmax.weight):
            block_orthogonal_(weight)
        self.weight_surprisal.zero_()
        self.softmax.bias.zero_()
        self.bias.zero_()
        self.bias[self.hidden_size : 2 * self.hidden_size] = -1.0

    def initial_state(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        """Return h and c of zeros, and equal log-probabilities of all symbols."""
        zero = like.new_zeros(batch, self.hidden_size)
        equal = like.new_full((batch, self.input_size), -math.log(self.input_size))
        return zero, zero, equal

    def forward(
        self,
        tokens: Tensor,
        hx: tuple[Tensor, ...] | None = None,
        *,
        seed: int | Tensor | None = None,
        examples: Any = None,
        first_step: int = 0,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the logits [T, B, symbols], h at every step, and the state (h, c, log p).

        Args:
            tokens: int64 [T, B].
            hx: the state to start from, with what was predicted for the first symbol.
            seed, examples, first_step: coordinates of the masks, as in the layers.
        """
        if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64:
            got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TypeError(f"tokens: expected int64 ids [T, B], got {got}")
        x = self.one_hot(tokens)
        h, c, predicted = self.begins(hx, x)
        bits: Any = [None] * len(x)
        if self.training:
            where: dict[str, Any] = {"examples": examples, "first_step": first_step}
            bits = self.bits("update", x, self.hidden_size, seed=seed, **where).unbind(0)
        steps, batch = x.shape[:2]
        to_gates = Product(self.weight_hh, x @ self.weight_ih.t() + self.bias)
        to_scores = Product(self.softmax.weight, self.softmax.bias.expand(steps, batch, -1))
        back = in_autocast(self.softmax.weight.detach())
        each = each_step(self.weight_surprisal, steps)
        missed, update = self.between(_missed), self.between(_update)
        predict = self.between(_predict)
        logits, hidden = [], []
        for t, (symbols, drawn) in enumerate(zip(x.unbind(0), bits)):
            error = missed(predicted.detach(), symbols).to(back.dtype) @ back
            sums = to_gates(t, h)
            h, c = update(*sums, predicted, symbols, error, drawn, each[t], c, self.least)
            scores, predicted = predict(*to_scores(t, h))
            logits.append(scores)
            hidden.append(h)
        return torch.stack(logits), torch.stack(hidden), (h, c, predicted)


def _missed(predicted: Tensor, symbols: Tensor) -> Tensor:
    """Return the difference between the predicted probabilities and what came."""
    return predicted.exp() - symbols


def _update(
    product: Tensor, sums: Tensor, predicted: Tensor, symbols: Tensor, error: Tensor,
    bits: Tensor | None, of_surprisal: Tensor, c: Tensor, least: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return h and c after a step; `bits`: None in evaluation."""
    surprisal = -(predicted * symbols).sum(-1, keepdim=True)
    i, f, u, o = (product + sums + surprisal * of_surprisal).chunk(4, dim=-1)
    updated = (least + error.abs()).clamp(max=1)
    if bits is not None:
        updated = (bits < (updated * 65536).round()).to(c.dtype)
    c = (1 - f.sigmoid() * updated) * c + updated * i.sigmoid() * u.tanh()
    return o.sigmoid() * c.tanh(), c


def _predict(product: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of a step, and the logarithms of the probabilities."""
    logits = product + sums
    return logits, logits.log_softmax(-1)
