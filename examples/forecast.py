"""Forecast a noisy time series with a GRU, without and with zoneout, when there is little to learn
from.

The series is made here: electricity use of a small town, hour by hour, with a day, a week, weather
    that wanders and a
good deal of noise. The model reads a week and forecasts the next day. It can do no better than know
the pattern; what it learns beyond that is noise that will not come again.
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
    """Hourly values, about zero on average: a day, a week, weather and noise."""
    hour = torch.arange(24.0 * days)
    day = torch.sin(2 * math.pi * (hour - 9) / 24) + 0.5 * torch.sin(4 * math.pi * (hour - 4) / 24)
    weekend = ((hour // 24) % 7 >= 5).float()
    weather, steps = torch.zeros(len(hour)), torch.randn(len(hour), generator=draw)
    for t in range(1, len(hour)):
        weather[t] = 0.98 * weather[t - 1] + 0.2 * steps[t]
    return (
        day * (1 - 0.5 * weekend)
        - 0.5 * weekend
        + 0.7 * weather
        + 0.3 * torch.randn(len(hour), generator=draw)
    )


def windows(values: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """The weeks that begin at these hours, and for each hour of them the day that follows it."""
    both = values[first + torch.arange(PAST + AHEAD)[:, None]]  # [PAST + AHEAD, B]
    return both[:PAST, :, None], both[1:].unfold(0, AHEAD, 1)  # [PAST, B, 1], [PAST, B, AHEAD]


class Forecaster(nn.Module):
    """After every hour, the next 24."""

    def __init__(self, noise: zo.Zoneout | None) -> None:
        super().__init__()
        self.gru = zo.GRU(1, HIDDEN, noise=noise)
        self.output = nn.Linear(HIDDEN, AHEAD)

    def forward(self, past: Tensor) -> Tensor:  # [PAST, B, 1] -> [PAST, B, AHEAD]
        y, _ = self.gru(past)
        return self.output(y)


def train(
    noise: zo.Zoneout | None, values: Tensor, held_out: tuple[Tensor, Tensor]
) -> tuple[list[float], Forecaster]:
    """Train, and return the errors on held-out days as it went, and the model."""
    torch.manual_seed(0)  # the same start and the same batches for both
    model = Forecaster(noise)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    print(f"\n{noise or 'Without noise'}\n  step   training   held out   (mean squared error)")
    draw, total, errors = torch.Generator().manual_seed(0), 0.0, []
    for step in range(1, STEPS + 1):
        past, ahead = windows(
            values, torch.randint(len(values) - PAST - AHEAD, (BATCH,), generator=draw)
        )
        forecast = model.train()(past)
        loss = F.mse_loss(forecast[24:], ahead[24:])  # the first day is for warming up
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
        if step % EVERY == 0:
            with torch.no_grad():
                errors.append(F.mse_loss(model.eval()(held_out[0])[-1], held_out[1][-1]).item())
            print(f"  {step:4d}   {total / EVERY:8.3f}   {errors[-1]:8.3f}", flush=True)
            total = 0.0
    return errors, model


def picture(truth: Tensor, forecast: Tensor, height: int = 11) -> str:
    """The truth (·) and the forecast (o) of one day."""
    low, high = min(truth.min(), forecast.min()), max(truth.max(), forecast.max())
    grid = [[" "] * (2 * AHEAD) for _ in range(height)]
    for values, mark in ((truth, "·"), (forecast, "o")):
        for hour, value in enumerate(((values - low) / (high - low) * (height - 1)).round().int()):
            grid[height - 1 - int(value)][2 * hour] = mark
    return "\n".join("  |" + "".join(row) for row in grid) + "\n  +" + "-" * 2 * AHEAD


def main() -> None:
    values = series(7 * WEEKS + HELD_OUT, torch.Generator().manual_seed(0))
    training, later = values[: PAST * WEEKS], values[PAST * WEEKS :]
    held_out = windows(later, torch.arange(0, len(later) - PAST - AHEAD, 13))
    week_ago = F.mse_loss(held_out[0][:AHEAD, :, 0].T, held_out[1][-1]).item()
    print(f"{WEEKS} weeks to learn from; forecasts are judged on the {HELD_OUT} days after them.")
    print(
        "Saying that a day will be as it was a week ago has a mean squared error of "
        f"{week_ago:.3f}."
    )

    plain, _ = train(None, training, held_out)
    zoned, model = train(zo.Zoneout(hidden=0.25), training, held_out)

    past, ahead = windows(later, torch.tensor([30 * 24]))
    with torch.no_grad():
        forecast = model(past)
    print("\nA held-out day (·) and what the zoneout model forecast (o), hour by hour:")
    print(picture(ahead[-1, 0], forecast[-1, 0]))

    print("\nMean squared error   best   at the end")
    print(f"  as a week ago     {week_ago:.3f}")
    print(f"  GRU               {min(plain):.3f}   {plain[-1]:.3f}")
    print(f"  zoneout GRU       {min(zoned):.3f}   {zoned[-1]:.3f}")
    print(
        "Stopped at the right moment the two are about as good. Without days to spare that would "
        "tell the moment,"
    )
    print("zoneout loses less by going on.")
    assert max(min(plain), min(zoned)) < week_ago
    assert zoned[-1] < plain[-1]


if __name__ == "__main__":
    main()
