"""HyperLSTM: a small LSTM that scales and shifts the gates of a large one at every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..init import orthogonal_
from .steps import GateNorm, Loop, check_dropout


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
        self.input_size, self.hidden_size, self.hyper_size = input_size, hidden_size, hyper_size
        self.embedding_size, self.dropout = embedding_size, check_dropout(dropout, "dropout")
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
        state = self.initial_state(x.shape[1], x) if hx is None else hx
        kept: Any = [None] * len(x)
        if self.training and self.dropout:
            where: dict[str, Any] = {"examples": examples, "first_step": first_step}
            bits = self.bits("update", x, self.hidden_size, seed=seed, **where)
            limit = round(self.dropout * 65536)
            kept = ((bits >= limit) * (65536 / (65536 - limit))).to(x.dtype).unbind(0)
        products = x @ self.weight_ih.t()
        to_hyper = x @ self.hyper_ih[:, : self.input_size].t()
        outputs = []
        for g_x, hyper_x, keep in zip(products, to_hyper, kept):
            state = self.step(g_x, hyper_x, state, keep)
            outputs.append(state[0])
        return torch.stack(outputs), state

    def step(
        self, g_x: Tensor, hyper_x: Tensor, state: tuple[Tensor, ...], keep: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the state after a step, from the products of its input with both matrices."""
        h, c, hyper_h, hyper_c = state
        gates = hyper_x + h @ self.hyper_ih[:, self.input_size :].t() + hyper_h @ self.hyper_hh.t()
        gates = self.hyper_norm_gates(gates)
        hyper_h, hyper_c = _lstm(gates, hyper_c, self.hyper_norm_c)
        scales = self.scale_in(hyper_h).unflatten(-1, (8, -1)).transpose(0, 1)  # [8, B, n]
        scales = torch.bmm(scales, self.scale_out).transpose(0, 1)  # [B, 8, H]
        shift = self.shift_in(hyper_h).unflatten(-1, (4, -1)).transpose(0, 1)
        shift = torch.bmm(shift, self.shift_out).transpose(0, 1).flatten(1)
        of_x, of_h = scales[:, :4].flatten(1), scales[:, 4:].flatten(1)
        gates = of_x * g_x + of_h * (h @ self.weight_hh.t()) + shift + self.bias
        h, c = _lstm(self.norm_gates(gates), c, self.norm_c, keep)
        return h, c, hyper_h, hyper_c


def _lstm(
    gates: Tensor, c: Tensor, norm: GateNorm, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return h and c of an LSTM from its normalised gates (i, f, g, o); 1 is added to f."""
    i, f, g, o = gates.chunk(4, dim=-1)
    update = g.tanh() if keep is None else g.tanh() * keep
    c = (f + 1).sigmoid() * c + i.sigmoid() * update
    return o.sigmoid() * norm(c).tanh(), c
