"""Forecast a noisy time series with a GRU, without and with zoneout, from six weeks of data.

The series is electricity use of a made-up town, hour by hour: a day, a week, weather and noise. The
model reads a week and forecasts the next day. It has too little data not to overfit.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoneout as zo

PAST, AHEAD = 7 * 24, 24
WEEKS, HELD_OUT = 6, 200  # weeks to learn from, days to forecast afterwards
HIDDEN, BATCH, STEPS, EVERY = 64, 32, 240, 40


def series(days: int, draw: torch.Generator) -> Tensor:
    """Return hourly values, about zero on average."""
    hour = torch.arange(24.0 * days)
    day = torch.sin(2 * math.pi * (hour - 9) / 24) + 0.5 * torch.sin(4 * math.pi * (hour - 4) / 24)
    weekend = ((hour // 24) % 7 >= 5).float()
    weather, steps = torch.zeros(len(hour)), torch.randn(len(hour), generator=draw)
    for t in range(1, len(hour)):
        weather[t] = 0.98 * weather[t - 1] + 0.2 * steps[t]
    noise = 0.3 * torch.randn(len(hour), generator=draw)
    return day * (1 - 0.5 * weekend) - 0.5 * weekend + 0.7 * weather + noise


def windows(values: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weeks that begin at these hours, and the day after each hour of them."""
    both = values[first + torch.arange(PAST + AHEAD)[:, None]]  # [PAST + AHEAD, B]
    return both[:PAST, :, None], both[1:].unfold(0, AHEAD, 1)  # [PAST, B, 1], [PAST, B, AHEAD]


class Forecaster(nn.Module):
    def __init__(self, noise: zo.Zoneout | None) -> None:
        super().__init__()
        self.gru = zo.GRU(1, HIDDEN, noise=noise)
        self.output = nn.Linear(HIDDEN, AHEAD)

    def forward(self, past: Tensor) -> Tensor:  # [PAST, B, 1] -> [PAST, B, AHEAD]
        return self.output(self.gru(past)[0])


def train(noise: zo.Zoneout | None, values: Tensor, held_out: tuple[Tensor, ...]) -> list[float]:
    """Train, and return the errors on held-out days as it went."""
    torch.manual_seed(0)  # the same start and the same batches for both
    model, draw, errors = Forecaster(noise), torch.Generator().manual_seed(0), []
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    print(f"\n{noise or 'Without noise'}\n  step   training   held out   (mean squared error)")
    for step in range(1, STEPS + 1):
        first = torch.randint(len(values) - PAST - AHEAD, (BATCH,), generator=draw)
        past, ahead = windows(values, first)
        loss = F.mse_loss(model.train()(past)[24:], ahead[24:])  # the first day is for warming up
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % EVERY == 0:
            with torch.no_grad():
                errors.append(F.mse_loss(model.eval()(held_out[0])[-1], held_out[1][-1]).item())
            print(f"  {step:4d}   {loss.item():8.3f}   {errors[-1]:8.3f}", flush=True)
    return errors


if __name__ == "__main__":
    values = series(7 * WEEKS + HELD_OUT, torch.Generator().manual_seed(0))
    training, later = values[: PAST * WEEKS], values[PAST * WEEKS :]
    held_out = windows(later, torch.arange(0, len(later) - PAST - AHEAD, 13))
    week_ago = F.mse_loss(held_out[0][:AHEAD, :, 0].T, held_out[1][-1]).item()
    plain, zoned = (train(n, training, held_out) for n in (None, zo.Zoneout(hidden=0.25)))
    print(f"\nMean squared error   best   at the end\n  as a week ago     {week_ago:.3f}")
    for name, errors in (("GRU        ", plain), ("zoneout GRU", zoned)):
        print(f"  {name}       {min(errors):.3f}   {errors[-1]:.3f}")
    print("At their best steps both are about as good. Zoneout loses less where training goes on.")
    assert max(min(plain), min(zoned)) < week_ago and zoned[-1] < plain[-1]
