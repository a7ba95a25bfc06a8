"""Zoneout on two tasks beyond text, on the CPU: a measured time series, and PPO with hidden state.

    python experiments/past_the_paper.py series     # needs statsmodels; writes results/elnino_…
    python experiments/past_the_paper.py control    # needs gymnasium; writes results/cartpole_…
    python experiments/past_the_paper.py table      # the tables of docs/past-the-paper.md

The plan, written before the first run, is in docs/past-the-paper.md.
"""

from __future__ import annotations

import copy
import datetime
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoneout as zo

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
SEEDS = (11, 12, 13, 14, 15)

# --- the time series ------------------------------------------------------------------------------

AHEAD, PAST, HIDDEN, BATCH, UPDATES, EVERY = 12, 60, 64, 32, 600, 25
TRAIN_END, VALID_END = 480, 600  # months since January 1950: 1990 and 2000
SERIES: dict[str, dict[str, Any]] = {  # the arms: dropout between layers and before the output
    "elnino_lstm": {},
    "elnino_dropout_010": {"dropout": 0.1},
    "elnino_dropout_030": {"dropout": 0.3},
    "elnino_dropout_050": {"dropout": 0.5},
    "elnino_zoneout_010_005": {"cell": 0.1, "hidden": 0.05},
    "elnino_zoneout_025_005": {"cell": 0.25, "hidden": 0.05},
    "elnino_zoneout_025_010": {"cell": 0.25, "hidden": 0.1},
    "elnino_zoneout_050_010": {"cell": 0.5, "hidden": 0.1},
}


def elnino() -> Tensor:
    """Return the monthly sea surface temperatures of 1950 to 2010 in statsmodels, [732]."""
    import statsmodels.api as sm

    table = sm.datasets.elnino.load_pandas().data
    return torch.tensor(table.iloc[:, 1:].to_numpy().reshape(-1), dtype=torch.float32)


def features(values: Tensor) -> Tensor:
    """Return the scaled temperature, and sine and cosine of the month: [732, 3]."""
    train = values[:TRAIN_END]
    angle = torch.arange(len(values)) * (2 * torch.pi / 12)
    return torch.stack([(values - train.mean()) / train.std(), angle.sin(), angle.cos()], -1)


def windows(x: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return the months up to each in `last` [PAST, B, 3], and those after it [B, AHEAD]."""
    past = x[last - torch.arange(PAST - 1, -1, -1)[:, None]]
    return past, x[last[:, None] + torch.arange(1, AHEAD + 1), 0]


class Forecaster(nn.Module):
    """Two recurrent layers; their last output gives the next 12 months."""

    def __init__(self, dropout: float = 0.0, cell: float = 0.0, hidden: float = 0.0) -> None:
        super().__init__()
        noise = zo.Zoneout(cell=cell, hidden=hidden)
        self.core: nn.Module = (
            zo.LSTM(3, HIDDEN, 2, noise=noise)
            if cell or hidden
            else nn.LSTM(3, HIDDEN, 2, dropout=dropout)
        )
        self.dropout, self.output = nn.Dropout(dropout), nn.Linear(HIDDEN, AHEAD)

    def forward(self, past: Tensor) -> Tensor:
        return self.output(self.dropout(self.core(past)[0][-1]))


def run_series(arm: str, seed: int, x: Tensor, scale: float) -> dict[str, Any]:
    """Train one model; return its errors in degrees at its best validation and at the end."""
    torch.manual_seed(seed)
    model = Forecaster(**SERIES[arm])
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    origins = {
        "valid": torch.arange(TRAIN_END - 1, VALID_END - AHEAD),
        "test": torch.arange(VALID_END - 1, len(x) - AHEAD),
    }

    def error(part: str) -> float:
        past, ahead = windows(x, origins[part])
        with torch.no_grad():
            return scale * F.mse_loss(model.eval()(past), ahead).sqrt().item()

    curve, best = [], copy.deepcopy(model.state_dict())
    for update in range(1, UPDATES + 1):
        last = torch.randint(PAST - 1, TRAIN_END - AHEAD, (BATCH,))
        past, ahead = windows(x, last)
        loss = F.mse_loss(model.train()(past), ahead)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if update % EVERY == 0:
            curve.append(error("valid"))
            if curve[-1] == min(curve):
                best = copy.deepcopy(model.state_dict())
    last_scores = {"valid_at_end": curve[-1], "test_at_end": error("test")}
    model.load_state_dict(best)
    scores = {"measure": "rmse", "valid": min(curve), "test": error("test"), **last_scores}
    return {**scores, "best_update": EVERY * (curve.index(min(curve)) + 1), "curve": curve}


def series() -> None:
    values = elnino()
    x, scale = features(values), values[:TRAIN_END].std().item()
    parts = {"valid": (TRAIN_END, VALID_END), "test": (VALID_END, len(values))}
    errors = {}
    for part, (first, end) in parts.items():
        last = torch.arange(first - 1, end - AHEAD)
        ahead = last[:, None] + torch.arange(1, AHEAD + 1)
        errors[part] = (values[ahead - 12] - values[ahead]).square().mean().sqrt().item()
    write("elnino_seasonal_naive", 0, {"measure": "rmse", **errors}, {}, 0.0)
    for arm, settings in SERIES.items():
        for seed in SEEDS:
            start = time.perf_counter()
            scores = run_series(arm, seed, x, scale)
            write(arm, seed, scores, settings, time.perf_counter() - start)


# --- reinforcement learning -----------------------------------------------------------------------

ROLLOUTS, EPISODES, TUNING = 100, 20, (101, 102)
CONTROL: dict[str, dict[str, Any]] = {
    "cartpole_lstm": {},
    "cartpole_zoneout_005_0025": {"cell": 0.05, "hidden": 0.025},
    "cartpole_zoneout_010_005": {"cell": 0.1, "hidden": 0.05},
    "cartpole_zoneout_025_005": {"cell": 0.25, "hidden": 0.05},
}


def run_control(arm: str, seed: int) -> dict[str, Any]:
    """Train one policy; return its mean return in training and in evaluation."""
    sys.path.insert(0, str(ROOT / "examples"))
    import gymnasium as gym
    import recurrent_ppo

    settings = CONTROL[arm]
    noise = zo.Zoneout(**settings) if settings else None
    policy, returns = recurrent_ppo.train(noise, seed, ROLLOUTS)
    policy.eval()
    env, scores = gym.make("CartPole-v1"), []
    for episode in range(EPISODES):
        observation, _ = env.reset(seed=100_000 * seed + episode)
        state, total, over = None, 0.0, False
        while not over:
            with torch.no_grad():
                x = recurrent_ppo.seen(observation[None])
                pi, _, state = policy(x[None], state)
            action = int(pi.sample())
            observation, reward, ended, cut, _ = env.step(action)
            total, over = total + float(reward), ended or cut
        scores.append(total)
    tenth = len(returns) // 10
    return {
        "measure": "return",
        "training": statistics.mean(returns),
        "test": statistics.mean(scores),
        "episodes": len(returns),
        "curve": [statistics.mean(returns[k * tenth : (k + 1) * tenth]) for k in range(10)],
    }


def control() -> None:
    """Run two tuning seeds of each rate, then five other seeds of the chosen rates and of none."""
    rated = [arm for arm in CONTROL if CONTROL[arm]]
    tuning = {}
    for arm in rated:
        for seed in TUNING:
            tuning[arm, seed] = timed_control(arm, seed)["training"]
    means = {arm: statistics.mean(tuning[arm, seed] for seed in TUNING) for arm in rated}
    best = max(means, key=lambda arm: means[arm])
    print("chosen by the tuning seeds:", best, means)
    for seed in SEEDS:
        for arm in ("cartpole_lstm", best):
            timed_control(arm, seed)


def timed_control(arm: str, seed: int) -> dict[str, Any]:
    start = time.perf_counter()
    scores = run_control(arm, seed)
    write(arm, seed, scores, CONTROL[arm], time.perf_counter() - start)
    return scores


# --- records --------------------------------------------------------------------------------------


def write(arm: str, seed: int, scores: dict[str, Any], settings: Any, seconds: float) -> None:
    """Write results/ARM/seed-N.json."""
    record = {"format": 1, "arm": arm, "seed": seed, **scores, "settings": settings}
    record |= {"seconds": round(seconds, 1), "device": "CPU, one thread"}
    record["versions"] = {
        "zoneout": zo.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    record["date"] = datetime.date.today().isoformat()
    task = "series" if arm.startswith("elnino") else "control"
    record["command"] = f"python experiments/past_the_paper.py {task}"
    folder = RESULTS / arm
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in record.items())
    (folder / f"seed-{seed}.json").write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    print(arm, seed, {k: v for k, v in scores.items() if isinstance(v, float)}, flush=True)


def records(arm: str, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the records of an arm for these seeds, those that exist."""
    paths = [RESULTS / arm / f"seed-{seed}.json" for seed in seeds]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def spread(found: list[dict[str, Any]], key: str, digits: int) -> str:
    """Return the mean and the standard deviation of one number over seeds."""
    numbers = [record[key] for record in found if key in record]
    if not numbers:
        return ""
    mean = f"{statistics.mean(numbers):.{digits}f}"
    return f"{mean}±{statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else mean


def chosen(arms: list[str], key: str, seeds: tuple[int, ...], sign: int) -> str:
    """Return the arm with the lowest mean (sign 1), or the highest (sign -1)."""
    return min(arms, key=lambda arm: sign * statistics.mean(r[key] for r in records(arm, seeds)))


def difference(arm: str, other: str, key: str, digits: int) -> str:
    """Return a row of Markdown: means of two arms over SEEDS, their difference, and Welch's t."""
    both = [[record[key] for record in records(name, SEEDS)] for name in (arm, other)]
    means = [statistics.mean(numbers) for numbers in both]
    error = sum(statistics.variance(numbers) / len(numbers) for numbers in both) ** 0.5
    gap = means[0] - means[1]
    wins = sum(a < b for a, b in zip(*both))
    numbers = f"{gap:+.{digits}f} | {error:.{digits}f} | {gap / error:+.1f}"
    return f"| `{arm}` | `{other}` | {key} | {numbers} | {wins} of {len(both[0])} |"


def table() -> None:
    """Print all tables of docs/past-the-paper.md as Markdown."""
    columns = ("valid", "test", "valid_at_end", "test_at_end")
    print("| arm | validation | test | validation, last update | test, last update | seeds |")
    print("|---|---|---|---|---|---|")
    for arm in ("elnino_seasonal_naive", *SERIES):
        found = records(arm, (0, *SEEDS))
        cells = " | ".join(spread(found, key, 3) for key in columns)
        print(f"| `{arm}` | {cells} | {len(found)} |")
    print("\n| arm | seeds | mean return in training | mean return in evaluation |")
    print("|---|---|---|---|")
    for arm in CONTROL:
        for name, seeds in (("tuning", TUNING), ("final", SEEDS)):
            if found := records(arm, seeds):
                cells = " | ".join(spread(found, key, 1) for key in ("training", "test"))
                print(f"| `{arm}` | {name}, {len(found)} | {cells} |")
    dropout, zoneout = (
        chosen([arm for arm in SERIES if name in arm], "valid", SEEDS, 1)
        for name in ("dropout", "zoneout")
    )
    policy = chosen([arm for arm in CONTROL if CONTROL[arm]], "training", TUNING, -1)
    print("\n| arm | against | score | difference | standard error | t | seeds below |")
    print("|---|---|---|---|---|---|---|")
    for other in ("elnino_lstm", dropout):
        for key in columns:
            print(difference(zoneout, other, key, 3))
    for key in ("training", "test"):
        print(difference(policy, "cartpole_lstm", key, 1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    commands = {"series": series, "control": control, "table": table}
    commands[sys.argv[1] if len(sys.argv) == 2 and sys.argv[1] in commands else "table"]()
