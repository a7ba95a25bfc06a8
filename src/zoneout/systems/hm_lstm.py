"""Hierarchical multiscale LSTM: layers that learn where their segments end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..init import orthogonal_
from .output import GatedOutput
from .steps import GateNorm, Loop, Norm, Product, check_sizes, each_norm, normalised

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
        output_size = hidden_size if output_size is None else output_size
        check_sizes(
            input_size=input_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            output_size=output_size,
        )
        if num_layers < 2:
            raise ValueError(f"num_layers: expected at least 2, got {num_layers}")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        width, self.output_size = 4 * hidden_size, output_size
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
        self.output = GatedOutput([hidden_size] * num_layers, self.output_size)
        self.register_buffer("slope", torch.ones(()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise matrices of gates orthogonally, biases and shifts with 0 (forget gates: 1).

        The 1 is in the shift of the norm: the norm would remove it from the bias before.
        """
        for weight in (*self.own, *self.below, *self.above):
            orthogonal_(weight)
        for bias in self.biases:
            bias.zero_()
        norm: Any
        for norm in (*self.norm_gates, *self.norm_c):
            norm.reset_parameters()
        for norm in self.norm_gates:
            norm.bias[1] = 1.0  # of i, f, g, o
        self.output.reset_parameters()

    def begin_epoch(self, epoch: int) -> None:
        """Set the slope of the boundaries' sigmoid: 1 + 0.04 · epoch, at most 5."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch: expected a whole number, 0 or more, got {epoch!r}")
        self.slope.fill_(min(5.0, 1.0 + 0.04 * epoch))

    def initial_state(self, batch: int, like: Tensor) -> State:
        """Return zeros, also for the boundaries."""
        states: list[Tensor] = []
        for layer in range(self.num_layers):
            states += [like.new_zeros(batch, self.hidden_size) for _ in "hc"]
            states += [like.new_zeros(batch, 1)] if layer < self.num_layers - 1 else []
        return tuple(states)

    def forward(
        self,
        input: Tensor,
        hx: State | None = None,
        *,
        seed: int | Tensor | None = None,
        examples: Any = None,
        first_step: int = 0,
    ) -> tuple[Tensor, State]:
        """Return the outputs [T, B, output_size] and the state: h, c and z of each layer.

        Args:
            input: [T, B, input_size], or int64 ids of one-hot rows [T, B].
            hx: the state to start from; by default zeros.
            seed, examples, first_step: as in the other systems; without effect, since nothing is
                drawn.
        """
        x = self.one_hot(input)
        state = self.begins(hx, x)
        steps, batch = x.shape[:2]
        products = []
        for layer, bias in enumerate(self.biases):
            # Each layer has one product: of its own h, and of those of the layers above and below.
            others = [*self.above[layer : layer + 1], *([self.below[layer]] if layer else [])]
            sums = bias.expand(steps, batch, -1) if layer else x @ self.below[0].t() + bias
            weight = torch.cat([self.own[layer], *others], dim=1)
            products.append(Product(weight, sums))
        norms = [each_norm(steps, *both) for both in zip(self.norm_gates, self.norm_c)]
        outputs = []
        for t in range(steps):
            state = self.step(t, state, products, [each[t] for each in norms])
            outputs.append(torch.cat(state[0::3], dim=-1))
        return self.output(torch.stack(outputs)), state

    def step(self, t: int, state: State, products: Any, norms: Any) -> State:
        """Return the state after step t."""
        made: list[Tensor] = []
        inputs, layer_step = self.between(_inputs), self.between(_layer)
        for layer in range(self.num_layers):
            h, c = state[3 * layer : 3 * layer + 2]
            top = layer == self.num_layers - 1
            before, above = (None, None) if top else state[3 * layer + 2 : 3 * layer + 4]
            below, ends = (made[-3], made[-1]) if layer else (None, None)
            sums = products[layer](t, inputs(h, above, before, below, ends))
            made += layer_step(*sums, h, c, before, ends, self.slope, *norms[layer])
        return tuple(made)


def _inputs(
    h: Tensor,
    above: Tensor | None,
    before: Tensor | None,
    below: Tensor | None,
    ends: Tensor | None,
) -> Tensor:
    """Return what a layer sees: its own h, that above after its own segment, that below at its end.

    `before` and `ends` are the boundaries: the layer's own of the step before, and that below.
    """
    parts = [h]
    if above is not None and before is not None:
        parts.append(before * above)
    if below is not None and ends is not None:
        parts.append(ends * below)
    return torch.cat(parts, dim=-1)


def _layer(
    product: Tensor, sums: Tensor, h: Tensor, c: Tensor, before: Tensor | None,
    ends: Tensor | None, slope: Tensor, of_gates: Norm, of_c: Norm,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return h and c of a layer after a step, and its boundary unless it is the last.

    The input of the first layer ends a segment at every step (`ends`: None); the last layer has no
    boundary (`before`: None).
    """
    sums = product + sums
    width = 4 * h.shape[-1]
    i, f, g, o = normalised(sums[:, :width], *of_gates).chunk(4, dim=-1)
    new = i.sigmoid() * g.tanh()
    flushed = sums.new_zeros(()) if before is None else before
    segment = sums.new_ones(()) if ends is None else ends
    copied, updated = (1 - flushed) * (1 - segment), (1 - flushed) * segment
    c = copied * c + flushed * new + updated * (f.sigmoid() * c + new)
    h = copied * h + (1 - copied) * o.sigmoid() * normalised(c, *of_c).tanh()
    if before is None:
        return h, c
    soft = ((slope * sums[:, width:] + 1) / 2).clamp(0, 1)
    return h, c, (soft > 0.5).to(soft.dtype) + (soft - soft.detach())
