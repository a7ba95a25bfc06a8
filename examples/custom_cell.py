"""A cell of your own: write its equation; zoneout, gradients and the fast loop come with it.

The cell here is a minimal gated unit: one gate forgets and resets. It is compared with a GRU.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoneout as zo

LENGTH, BATCH, STEPS = 12, 64, 400


@zo.cell(gates=2, states=("h",))
def gated(x, r, h):
    """x = W_x x_t + b_x and r = W_h h_{t-1} + b_h, one entry per gate; h is the state."""
    f = (x[0] + r[0]).sigmoid()
    return (1 - f) * h + f * (x[1] + f * r[1]).tanh()


class Recall(nn.Module):
    """Says the symbol that came first, at the end of the sequence."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layer, self.output = nn.Embedding(8, 16), layer, nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:  # [T, B] -> [B, 8]
        return self.output(self.layer(self.embedding(x))[0][-1])


def train(name: str, layer: nn.Module) -> float:
    torch.manual_seed(0)
    model = Recall(layer)
    optimizer = torch.optim.Adam(model.parameters(), 0.005)
    for _ in range(STEPS):
        x = torch.randint(8, (LENGTH, BATCH))
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[0]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        x = torch.randint(8, (LENGTH, 1000))
        right = (model.eval()(x).argmax(-1) == x[0]).float().mean().item()
    count = sum(parameter.numel() for parameter in layer.parameters())
    print(f"  {name:22} {count:6d} parameters   right {right:.1%}")
    return right


def main() -> None:
    noise = zo.Zoneout(hidden=0.1)
    layer = zo.Recurrent(gated, 16, 64, noise=noise)
    print("The equation in a Python loop and the compiled loop agree, masks included:")
    x = torch.randn(LENGTH, BATCH, 16)
    reference = zo.Recurrent(gated, 16, 64, noise=noise, backend="reference")
    reference.load_state_dict(layer.state_dict())
    ys = [module(x, seed=7)[0] for module in (layer, reference)]
    torch.testing.assert_close(*ys)
    print(f"  largest difference {(ys[0] - ys[1]).abs().max().item():.1e}")

    print(f"\nWhich symbol came first, {LENGTH} steps ago? {STEPS} updates, {noise}")
    own = train("the cell above", layer)
    gru = train("GRU", zo.GRU(16, 64, noise=noise))
    print(f"Guessing would be right in {1 / 8:.1%}.")
    assert min(own, gru) > 0.9


if __name__ == "__main__":
    main()
