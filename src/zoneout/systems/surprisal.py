"""Surprisal-driven zoneout: the better a symbol was predicted, the fewer units are updated."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..init import block_orthogonal_
from .steps import Loop


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
        if not 0 <= least <= 1:
            raise ValueError(f"least: expected a rate between 0 and 1, got {least}")
        self.input_size, self.hidden_size, self.least = symbols, hidden_size, least
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
        x = self.one_hot(tokens)
        state = self.initial_state(x.shape[1], x) if hx is None else hx
        bits: Any = [None] * len(x)
        if self.training:
            where: dict[str, Any] = {"examples": examples, "first_step": first_step}
            bits = self.bits("update", x, self.hidden_size, seed=seed, **where).unbind(0)
        products = F.embedding(tokens, self.weight_ih.t())
        logits, hidden = [], []
        for g_x, symbols, drawn in zip(products, x, bits):
            scores, state = self.step(g_x, symbols, state, drawn)
            logits.append(scores)
            hidden.append(state[0])
        return torch.stack(logits), torch.stack(hidden), state

    def step(
        self, g_x: Tensor, symbols: Tensor, state: tuple[Tensor, ...], bits: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the logits of a step and the state after it; `bits`: None in evaluation."""
        h, c, predicted = state
        surprisal = -(predicted * symbols).sum(-1, keepdim=True)
        gates = g_x + h @ self.weight_hh.t() + surprisal * self.weight_surprisal + self.bias
        i, f, u, o = gates.chunk(4, dim=-1)
        with torch.no_grad():
            error = (predicted.exp() - symbols) @ self.softmax.weight
            updated = (self.least + error.abs()).clamp(max=1)
            if bits is not None:
                updated = (bits < (updated * 65536).round()).to(c.dtype)
        c = (1 - f.sigmoid() * updated) * c + updated * i.sigmoid() * u.tanh()
        h = o.sigmoid() * c.tanh()
        logits = self.softmax(h)
        return logits, (h, c, logits.log_softmax(-1))
