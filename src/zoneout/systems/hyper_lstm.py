"""HyperLSTM: a small LSTM that scales and shifts the gates of a large one at every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..init import orthogonal_
from .steps import (
    GateNorm,
    Loop,
    Norm,
    Product,
    check_one_rate,
    check_sizes,
    each_norm,
    each_step,
    in_autocast,
    normalised,
)


class HyperLSTM(Loop):
    """An LSTM whose products are scaled, and whose gates are shifted, by a second, small LSTM.

    The small LSTM reads the input and the previous h of the large one. From its output ĥ come, for
    each gate, a scale of x's product, a scale of h's product and a shift, each through
    `embedding_size` numbers. All gates and c have a layer norm.

    Ha, Dai and Le, "HyperNetworks", 2017; the details are those of the authors' code (layer norm of
    each gate, eps 1e-3, a scale that starts at 0.1).

    Args:
        input_size: the number of features.
        hidden_size: the number of units.
        hyper_size: the number of units of the small LSTM.
        embedding_size: the numbers that each scale or shift is computed from.
        dropout: rate of dropout on tanh(g), with inverted scaling, as in the authors' code.

    >>> import torch, zoneout as zo
    >>> layer = zo.systems.HyperLSTM(10, 20, hyper_size=8)
    >>> y, state = layer(torch.randn(5, 3, 10))
    >>> y.shape, [tuple(s.shape) for s in state]
    (torch.Size([5, 3, 20]), [(3, 20), (3, 20), (3, 8), (3, 8)])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        hyper_size: int = 128,
        embedding_size: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(
            input_size=input_size,
            hidden_size=hidden_size,
            hyper_size=hyper_size,
            embedding_size=embedding_size,
        )
        self.input_size, self.hidden_size, self.hyper_size = input_size, hidden_size, hyper_size
        self.embedding_size, self.dropout = embedding_size, check_one_rate(dropout, "dropout")
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(4 * hidden_size))
        self.norm_gates, self.norm_c = GateNorm(4, hidden_size), GateNorm(1, hidden_size)
        self.hyper_ih = nn.Parameter(torch.empty(4 * hyper_size, input_size + hidden_size))
        self.hyper_hh = nn.Parameter(torch.empty(4 * hyper_size, hyper_size))
        self.hyper_norm_gates, self.hyper_norm_c = GateNorm(4, hyper_size), GateNorm(1, hyper_size)
        # Two scales (of x's and of h's product) and one shift for each of the four gates.
        self.scale_in = nn.Linear(hyper_size, 8 * embedding_size)
        self.scale_out = nn.Parameter(torch.empty(8, embedding_size, hidden_size))
        self.shift_in = nn.Linear(hyper_size, 4 * embedding_size, bias=False)
        self.shift_out = nn.Parameter(torch.empty(4, embedding_size, hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise as the authors do: orthogonal h matrices, scales of 0.1, no shift."""
        for weight in (self.weight_ih, self.hyper_ih):
            nn.init.xavier_uniform_(weight)
        for weight in (self.weight_hh, self.hyper_hh):
            for gate in weight.chunk(4):
                orthogonal_(gate)
        self.bias.zero_()
        self.scale_in.weight.zero_()
        self.scale_in.bias.fill_(1.0)
        self.scale_out.fill_(0.1 / self.embedding_size)
        self.shift_in.weight.normal_(0.0, 0.01)
        self.shift_out.zero_()

    def initial_state(self, batch: int, like: Tensor) -> tuple[Tensor, ...]:
        """Return zeros: h and c of the large and of the small LSTM."""
        sizes = (self.hidden_size, self.hidden_size, self.hyper_size, self.hyper_size)
        return tuple(like.new_zeros(batch, size) for size in sizes)

    def forward(
        self,
        input: Tensor,
        hx: tuple[Tensor, ...] | None = None,
        *,
        seed: int | Tensor | None = None,
        examples: Any = None,
        first_step: int = 0,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the outputs [T, B, hidden_size] and the state (h, c, ĥ, ĉ).

        Args:
            input: [T, B, input_size], or int64 ids of one-hot rows [T, B].
            hx: the state to start from; by default zeros.
            seed, examples, first_step: coordinates of the masks, as in the layers.
        """
        x = self.one_hot(input)
        h, c, hyper_h, hyper_c = self.begins(hx, x)
        kept: Any = [None] * len(x)
        if self.training and self.dropout:
            where: dict[str, Any] = {"examples": examples, "first_step": first_step}
            bits = self.bits("update", x, self.hidden_size, seed=seed, **where)
            limit = round(self.dropout * 65536)
            # A rate that is drawn as 1 drops everything, and leaves nothing to scale.
            scale = 65536 / (65536 - limit) if limit < 65536 else 0.0
            kept = ((bits >= limit).to(x.dtype) * scale).unbind(0)
        steps, batch = x.shape[:2]
        of_x, of_h = self.hyper_ih.split([self.input_size, self.hidden_size], dim=1)
        to_hyper = Product(torch.cat([of_h, self.hyper_hh], dim=1), x @ of_x.t())
        heads = torch.cat([self.scale_in.weight, self.shift_in.weight])
        none = self.bias.new_zeros(len(self.shift_in.weight))
        to_heads = Product(heads, torch.cat([self.scale_in.bias, none]).expand(steps, batch, -1))
        to_gates = Product(self.weight_hh, x.new_zeros(()).expand(steps, batch, len(self.bias)))
        tables = each_step(in_autocast(torch.cat([self.scale_out, self.shift_out])), steps)
        biases, products = each_step(self.bias, steps), (x @ self.weight_ih.t()).unbind(0)
        small = each_norm(steps, self.hyper_norm_gates, self.hyper_norm_c)
        large = each_norm(steps, self.norm_gates, self.norm_c)
        step_small, step_large = self.between(_small), self.between(_large)
        outputs = []
        for t in range(steps):
            sums = to_hyper(t, torch.cat([h, hyper_h], dim=1))
            hyper_h, hyper_c = step_small(*sums, hyper_c, *small[t])
            product, bias = to_heads(t, hyper_h)
            numbers = (product + bias).unflatten(-1, (12, -1)).transpose(0, 1)  # [12, B, n]
            scales = torch.bmm(numbers, tables[t])  # [12, B, H]: of x's and h's products, shifts
            sums = to_gates(t, h)
            h, c = step_large(*sums, products[t], scales, biases[t], c, kept[t], *large[t])
            outputs.append(h)
        return torch.stack(outputs), (h, c, hyper_h, hyper_c)


def _small(
    product: Tensor, sums: Tensor, c: Tensor, of_gates: Norm, of_c: Norm
) -> tuple[Tensor, Tensor]:
    """Return h and c of the small LSTM."""
    return _lstm(product + sums, c, None, of_gates, of_c)


def _large(
    product: Tensor, sums: Tensor, of_x: Tensor, scales: Tensor, bias: Tensor, c: Tensor,
    keep: Tensor | None, of_gates: Norm, of_c: Norm,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return h and c of the large LSTM, whose products are scaled and whose gates are shifted."""
    x, h, shift = (part.transpose(0, 1).flatten(1) for part in scales.split(4))
    gates = x * of_x + h * (product + sums) + shift + bias
    return _lstm(gates, c, keep, of_gates, of_c)


def _lstm(
    gates: Tensor, c: Tensor, keep: Tensor | None, of_gates: Norm, of_c: Norm
) -> tuple[Tensor, Tensor]:
    """Return h and c of an LSTM with the gates i, f, g, o, normalised; 1 is added to f."""
    i, f, g, o = normalised(gates, *of_gates).chunk(4, dim=-1)
    update = g.tanh() if keep is None else g.tanh() * keep
    c = (f + 1).sigmoid() * c + i.sigmoid() * update
    return o.sigmoid() * normalised(c, *of_c).tanh(), c
