"""A layer under `torch.compile` and autocast: the same masks, one graph, nothing compiled twice."""

import shutil
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoneout as zo

SYMBOLS, LENGTH, BATCH, STEPS = 30, 64, 32, 60


class Model(nn.Module):
    """Predicts the next symbol. The seed decides the masks, and nothing else does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, 64)
        self.lstm = zo.LSTM(64, 128, num_layers=2, noise=zo.Zoneout(cell=0.5, hidden=0.05))
        self.output = nn.Linear(128, SYMBOLS)

    def forward(self, x: Tensor, seed: Tensor) -> Tensor:  # [T, B] -> [T, B, SYMBOLS]
        return self.output(F.gelu(self.lstm(self.embedding(x), seed=seed)[0]))


def batch() -> Tensor:
    """Return rows that count upwards in steps of their own, with a few mistakes: [T + 1, B]."""
    start, step = torch.randint(SYMBOLS, (BATCH,)), torch.randint(1, 4, (BATCH,))
    x = start + step * torch.arange(LENGTH + 1)[:, None]
    return torch.where(torch.rand(x.shape) < 0.05, torch.randint(SYMBOLS, x.shape), x) % SYMBOLS


def main(backend: str) -> None:
    torch.manual_seed(0)
    model, x, seed = Model(), batch()[:-1], torch.tensor(7)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    outputs = compiled(x, seed), model(x, seed)
    torch.testing.assert_close(*outputs)
    grads = (torch.autograd.grad(y.sum(), list(model.parameters())) for y in outputs)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    assert not torch.equal(compiled(x, torch.tensor(8)), outputs[0])
    print(f"Eager and {backend} agree on outputs and gradients, so they drew the same masks.")

    # Seeds and rates are read when the model runs: a schedule of either compiles nothing.
    torch.compiler.set_stance("fail_on_recompile")
    for rate in (0.4, 0.3, 0.2, 0.1):
        model.lstm.noise = zo.Zoneout(cell=rate, hidden=rate / 10)
        torch.testing.assert_close(compiled(x, seed), model(x, seed))
    torch.compiler.set_stance("default")
    print("Four other rates: nothing was compiled again.")

    # Autocast: products in bfloat16; states, gates and gradients of the parameters in float32.
    with torch.autocast("cpu", torch.bfloat16):
        half = compiled(x, seed)
    full = model(x, seed)
    error, size = (half.float() - full).abs().max().item(), full.abs().max().item()
    print(f"Autocast: {half.dtype}, off by at most {error:.4f} (the largest is {size:.2f}).")
    assert half.dtype == torch.bfloat16 and error < size / 50
    optimizer, losses = torch.optim.Adam(model.parameters(), 0.01), []
    for step in range(STEPS):
        x = batch()
        with torch.autocast("cpu", torch.bfloat16):
            y = compiled(x[:-1], torch.tensor(zo.fold(1, step)))
            loss = F.cross_entropy(y.flatten(0, 1), x[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 19:
            print(f"  step {step + 1}: loss {loss.item():.3f}, compiled and under autocast")
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
    assert losses[-1] < losses[0] / 2


if __name__ == "__main__":
    # inductor, the default, needs a C++ compiler; aot_eager traces the same graphs.
    main(sys.argv[1] if sys.argv[1:] else "inductor" if shutil.which("c++") else "aot_eager")
