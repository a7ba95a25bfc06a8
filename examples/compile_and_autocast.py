"""The same layer under `torch.compile` and under autocast: the same masks, one graph, nothing
compiled twice.
"""

import shutil
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoneout as zo

SYMBOLS, LENGTH, BATCH, STEPS = 30, 64, 32, 60


class Model(nn.Module):
    """Predicts the next symbol. What it is called with decides the masks, and nothing else does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, 64)
        self.lstm = zo.LSTM(64, 128, num_layers=2, noise=zo.Zoneout(cell=0.5, hidden=0.05))
        self.output = nn.Linear(128, SYMBOLS)

    def forward(self, x: Tensor, seed: Tensor) -> Tensor:  # [T, B] -> [T, B, SYMBOLS]
        y, _ = self.lstm(self.embedding(x), seed=seed)
        return self.output(F.gelu(y))


def batch() -> Tensor:
    """Rows that count upwards in steps of their own, with a few mistakes: [T + 1, B]."""
    x = (
        torch.randint(SYMBOLS, (BATCH,))
        + torch.randint(1, 4, (BATCH,)) * torch.arange(LENGTH + 1)[:, None]
    )
    return torch.where(torch.rand(x.shape) < 0.05, torch.randint(SYMBOLS, x.shape), x) % SYMBOLS


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def main(backend: str) -> None:
    torch.manual_seed(0)
    model, x, seed = Model(), batch(), torch.tensor(7)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    start = time.perf_counter()
    y = compiled(x[:-1], seed)
    print(
        f"Compiled with {backend} as one graph, the layers inside it: "
        f"{time.perf_counter() - start:.1f} s."
    )

    eager = model(x[:-1], seed)
    torch.testing.assert_close(y, eager)
    for one, other in zip(gradients(y.sum(), model), gradients(eager.sum(), model)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    print("Eager and compiled agree on outputs and on every gradient, so they drew the same masks.")
    assert not torch.equal(compiled(x[:-1], torch.tensor(8)), y)

    # Seeds and rates are read when the model runs: a schedule of either compiles nothing.
    torch.compiler.set_stance("fail_on_recompile")
    for rate in (0.4, 0.3, 0.2, 0.1):
        model.lstm.noise = zo.Zoneout(cell=rate, hidden=rate / 10)
        torch.testing.assert_close(compiled(x[:-1], seed), model(x[:-1], seed))
    torch.compiler.set_stance("default")
    print("Four other rates: nothing was compiled anew.\n")

    # Autocast: products in bfloat16; states, gates and gradients of the parameters stay in float32.
    with torch.autocast("cpu", torch.bfloat16):
        half = compiled(x[:-1], seed)
    full = model(x[:-1], seed)
    assert half.dtype == torch.bfloat16 and full.dtype == torch.float32
    error, size = (half.float() - full).abs().max().item(), full.abs().max().item()
    print(
        f"Under autocast the outputs are {half.dtype}, off by at most {error:.4f} (the largest is "
        f"{size:.2f}).\n"
    )
    assert error < size / 50

    print("  step   loss, compiled and under autocast")
    optimizer, losses = torch.optim.Adam(model.parameters(), 0.01), []
    for step in range(STEPS):
        x = batch()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(
                compiled(x[:-1], torch.tensor(zo.fold(1, step))).flatten(0, 1), x[1:].flatten()
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 20 == 0:
            print(f"  {step + 1:4d}   {loss.item():.3f}")
    assert (
        model.lstm.weight_hh_l0.grad is not None
        and model.lstm.weight_hh_l0.grad.dtype == torch.float32
    )
    assert losses[-1] < losses[0] / 2


if __name__ == "__main__":
    # inductor, the default of torch.compile, writes C++ and needs a compiler for it; aot_eager
    # traces the same graphs.
    found = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    main(sys.argv[1] if sys.argv[1:] else "inductor" if found else "aot_eager")
