"""Hierarchical multiscale LSTM: layers that learn where their segments end."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..init import orthogonal_
from .steps import GateNorm, Loop

State = tuple[Tensor, ...]  # h, c and z of each layer in turn; the last layer has no z


class HMLSTM(Loop):
    """LSTM layers with boundaries z: a layer copies its state until the one below ends a segment.

    With z′ the layer's own boundary of the step before, and z₀ that of the layer below:

    | | z₀ = 0 | z₀ = 1 |
    |---|---|---|
    | z′ = 0 | copy: c and h are kept | update: f ⊙ c + i ⊙ g |
    | z′ = 1 | flush: i ⊙ g | flush: i ⊙ g |

    Copy is zoneout of a whole layer by a computed mask. The gates see h of the layer itself, of the
    layer below where z₀ = 1, and of the layer above where z′ = 1. A boundary is 1 where a hard
    sigmoid is above ½; its gradient is that of the sigmoid (straight-through), whose `slope` grows
    during training.

    Chung, Ahn and Bengio, "Hierarchical Multiscale Recurrent Neural Networks", 2017. The place of
    the layer norm is our choice: on the sum of the products, by gate, and on c before tanh.

    Args:
        input_size: the number of features.
        hidden_size: the number of units of each layer.
        num_layers: the number of layers.
        output_size: the size of the output, ReLU(Σ g_l W_l h_l), where the gates g_l see all h.

    >>> import torch, zoneout as zo
    >>> layer = zo.systems.HMLSTM(10, 20, num_layers=3)
    >>> y, state = layer(torch.randn(5, 3, 10))
    >>> y.shape, len(state)
    (torch.Size([5, 3, 20]), 8)
    """

    slope: Tensor

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 3,
        output_size: int | None = None,
    ) -> None:
        super().__init__()
        if num_layers < 2:
            raise ValueError(f"num_layers: expected at least 2, got {num_layers}")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        width, self.output_size = 4 * hidden_size, output_size or hidden_size
        below = [input_size] + [hidden_size] * (num_layers - 1)
        tops = [layer == num_layers - 1 for layer in range(num_layers)]
        # The last row of a layer with a boundary computes it.
        rows = [width + (not top) for top in tops]
        self.own = nn.ParameterList(torch.empty(n, hidden_size) for n in rows)
        self.below = nn.ParameterList(torch.empty(n, m) for n, m in zip(rows, below))
        self.above = nn.ParameterList(torch.empty(n, hidden_size) for n in rows[:-1])
        self.biases = nn.ParameterList(torch.empty(n) for n in rows)
        self.norm_gates = nn.ModuleList(GateNorm(4, hidden_size) for _ in rows)
        self.norm_c = nn.ModuleList(GateNorm(1, hidden_size) for _ in rows)
        self.gates_out = nn.Linear(num_layers * hidden_size, num_layers)
        self.out = nn.ModuleList(nn.Linear(hidden_size, self.output_size, False) for _ in rows)
        self.register_buffer("slope", torch.ones(()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise matrices of gates orthogonally, and biases with 0 (forget gates: 1)."""
        for weight in (*self.own, *self.below, *self.above):
            orthogonal_(weight)
        for bias in self.biases:
            bias.zero_()
            bias[self.hidden_size : 2 * self.hidden_size] = 1.0
        for module in (self.gates_out, *self.out):
            module.reset_parameters()

    def begin_epoch(self, epoch: int) -> None:
        """Set the slope of the boundaries' sigmoid: 1 + 0.04 · epoch, at most 5."""
        self.slope.fill_(min(5.0, 1.0 + 0.04 * epoch))

    def initial_state(self, batch: int, like: Tensor) -> State:
        """Return zeros, also for the boundaries."""
        states: list[Tensor] = []
        for layer in range(self.num_layers):
            states += [like.new_zeros(batch, self.hidden_size) for _ in "hc"]
            states += [like.new_zeros(batch, 1)] if layer < self.num_layers - 1 else []
        return tuple(states)

    def forward(self, input: Tensor, hx: State | None = None, **where: Any) -> tuple[Tensor, State]:
        """Return the outputs [T, B, output_size] and the state: h, c and z of each layer.

        Args:
            input: [T, B, input_size], or int64 ids of one-hot rows [T, B].
            hx: the state to start from; by default zeros.
            where: seed, examples and first_step, which have no effect: nothing is drawn.
        """
        x = self.one_hot(input)
        state = self.initial_state(x.shape[1], x) if hx is None else hx
        outputs = []
        for products in x @ self.below[0].t():
            state = self.step(products, state)
            outputs.append(torch.cat(state[0::3], dim=-1))
        return self._output(torch.stack(outputs)), state

    def _output(self, h: Tensor) -> Tensor:
        """Return ReLU(Σ g_l W_l h_l), from the h of all layers side by side."""
        gates, parts = self.gates_out(h).sigmoid(), h.chunk(self.num_layers, dim=-1)
        each = (gates[..., k, None] * out(parts[k]) for k, out in enumerate(self.out))
        return F.relu(sum(each))

    def step(self, products: Tensor, state: State) -> State:
        """Return the state after a step; `products` are those of the input with the first layer."""
        made: list[Tensor] = []
        below = products.new_ones(len(products), 1)  # the input ends a segment at every step
        for layer in range(self.num_layers):
            h, c = state[3 * layer : 3 * layer + 2]
            top = layer == self.num_layers - 1
            before = below.new_zeros(()) if top else state[3 * layer + 2]
            sums = products + h @ self.own[layer].t() + self.biases[layer]
            if not top:
                sums = sums + before * (state[3 * layer + 3] @ self.above[layer].t())
            width = 4 * self.hidden_size
            i, f, g, o = self.norm_gates[layer](sums[:, :width]).chunk(4, dim=-1)
            new = i.sigmoid() * g.tanh()
            copied, flushed = (1 - before) * (1 - below), before
            updated = (1 - before) * below
            c = copied * c + flushed * new + updated * (f.sigmoid() * c + new)
            h = copied * h + (1 - copied) * o.sigmoid() * self.norm_c[layer](c).tanh()
            made += [h, c]
            if top:
                break
            soft = ((self.slope * sums[:, width:] + 1) / 2).clamp(0, 1)
            below = (soft > 0.5).to(soft.dtype) + (soft - soft.detach())
            made.append(below)
            products = below * (h @ self.below[layer + 1].t())
        return tuple(made)
