"""Uncertainty of a forecast: sample masks in evaluation, and look at the spread of the outputs.

The masks of `at_eval="sample"` are drawn in evaluation too. Each sample is one network out of many.
Their spread says where the model has not seen data; it is no measure of the noise in the data.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoneout as zo

PAST, SAMPLES, STEPS = 30, 100, 300


def waves(frequency: Tensor) -> tuple[Tensor, Tensor]:
    """Return 30 steps of a sine of each frequency and any phase [PAST, B, 1], and the next [B]."""
    phase = 6.28 * torch.rand(len(frequency))
    y = torch.sin(frequency * torch.arange(PAST + 1)[:, None] + phase)
    return y[:-1, :, None], y[-1]


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = zo.LSTM(1, 64, noise=zo.Zoneout(cell=0.25, hidden=0.1, at_eval="sample"))
        self.output = nn.Linear(64, 1)

    def forward(self, past: Tensor, seed: int | None = None) -> Tensor:  # [PAST, B, 1] -> [B]
        y, _ = self.lstm(past, seed=seed)
        return self.output(y[-1])[:, 0]


def main() -> None:
    torch.manual_seed(0)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    print("Training on sines of frequency 0.3 to 0.6")
    for step in range(1, STEPS + 1):
        past, ahead = waves(0.3 + 0.3 * torch.rand(32))
        loss = F.mse_loss(model(past), ahead)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"  step {step}: mean squared error {loss.item():.4f}")

    model.eval()
    print(f"\nFrom {SAMPLES} samples in evaluation\n  frequency   spread   error of their mean")
    spreads = {}
    for frequency in (0.35, 0.45, 0.55, 0.9, 1.4, 2.0):
        past, ahead = waves(torch.full((64,), frequency))
        with torch.no_grad():
            samples = torch.stack([model(past, seed=n) for n in range(SAMPLES)])  # [SAMPLES, B]
        spreads[frequency] = samples.std(0).mean().item()
        error = (samples.mean(0) - ahead).abs().mean().item()
        print(f"  {frequency:9.2f}   {spreads[frequency]:6.3f}   {error:.3f}")
    with torch.no_grad():  # a seed makes a sample repeatable
        torch.testing.assert_close(model(past, seed=3), model(past, seed=3), rtol=0, atol=0)
    assert min(spreads[f] for f in (0.9, 1.4, 2.0)) > max(spreads[f] for f in (0.35, 0.45, 0.55))
    print("The spread is larger at frequencies that the model has not seen.")


if __name__ == "__main__":
    main()
