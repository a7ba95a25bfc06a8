"""The output of several layers as one: a gated sum of what each of them shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .steps import check_sizes


class GatedOutput(nn.Module):
    """ReLU(Σ g_l W_l h_l), where h_l is the output of layer l and g_l = σ(w_l · [h_1 … h_L]).

    Chung, Ahn and Bengio, "Hierarchical Multiscale Recurrent Neural Networks", 2017, where it
    stands between the layers and the softmax.

    Args:
        sizes: the number of units of each layer.
        output_size: the size of the output.

    >>> import torch
    >>> GatedOutput([3, 4], 6)(torch.randn(5, 2, 7)).shape
    torch.Size([5, 2, 6])
    """

    def __init__(self, sizes: Sequence[int], output_size: int) -> None:
        super().__init__()
        check_sizes(output_size=output_size)
        self.sizes = list(sizes)
        self.gates = nn.Linear(sum(sizes), len(self.sizes), bias=False)
        self.layers = nn.ModuleList(nn.Linear(size, output_size, bias=False) for size in sizes)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise all matrices as `torch.nn` does."""
        for module in self.children():
            for linear in module if isinstance(module, nn.ModuleList) else [module]:
                assert isinstance(linear, nn.Linear)
                linear.reset_parameters()

    def forward(self, h: Tensor) -> Tensor:
        """Return the output, [T, B, output_size], of the layers' outputs side by side."""
        gates, parts = self.gates(h).sigmoid(), h.split(self.sizes, dim=-1)
        each = (gates[..., k, None] * layer(parts[k]) for k, layer in enumerate(self.layers))
        return F.relu(sum(each))
