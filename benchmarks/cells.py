"""Compare layers of user-defined cells on the CPU with zo.LSTM and with torch.nn's layers, and time
the first call.

    python benchmarks/cells.py --threads 1

Each line is the median over pairs of training steps that follow each other, in one process. The
first call of a new definition is timed in new processes: with an empty cache of compiled code, and
with the code on disk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import zoneout as zo

SHAPES = {"char-PTB": (100, 32, 50, 1000), "pMNIST": (784, 100, 1, 100)}  # T, B, input, H
SHAPES |= {"medium": (100, 32, 256, 256), "small": (100, 32, 64, 128)}


@zo.cell(gates=4, states=("h", "c"))
def peephole(x, r, h, c, p_i, p_f, p_o):  # type: ignore[no-untyped-def]
    i, f, g, o = (a + b for a, b in zip(x, r))
    new = zo.candidate(
        "c", (f + p_f * c).sigmoid() * c + zo.update((i + p_i * c).sigmoid() * g.tanh())
    )
    return (o + p_o * new).sigmoid() * new.tanh(), new


@zo.cell(gates=1, recurrence="diagonal")
def indrnn(x, h, u):  # type: ignore[no-untyped-def]
    return (x[0] + u * h).relu()


@zo.cell(gates=2, recurrence="none")
def mingru(x, h):  # type: ignore[no-untyped-def]
    z = x[0].sigmoid()
    return (1 - z) * h + zo.update(z * x[1])


BOTH, HIDDEN = zo.Zoneout(cell=0.5, hidden=0.05), zo.Zoneout(hidden=0.05)
PAIRS: dict[str, tuple[Callable[[int, int], nn.Module], Callable[[int, int], nn.Module]]] = {
    "peephole / zo.LSTM": (
        lambda i, h: zo.Recurrent(peephole, i, h, noise=BOTH),
        lambda i, h: zo.LSTM(i, h, noise=BOTH),
    ),
    "peephole / nn.LSTM": (lambda i, h: zo.Recurrent(peephole, i, h, noise=BOTH), nn.LSTM),
    "indrnn / nn.RNN": (lambda i, h: zo.Recurrent(indrnn, i, h, noise=HIDDEN), nn.RNN),
    "mingru / nn.GRU": (lambda i, h: zo.Recurrent(mingru, i, h, noise=HIDDEN), nn.GRU),
}


def step(layer: nn.Module, x: torch.Tensor) -> float:
    """Return the seconds of one training step."""
    layer.zero_grad()
    began = time.perf_counter()
    y, _ = layer(x)
    y.sum().backward()
    return time.perf_counter() - began


def compare(pair: str, shape: str, count: int) -> tuple[float, float, float]:
    """Return the medians of both layers in ms, and of their ratio."""
    steps, batch, inputs, hidden = SHAPES[shape]
    layers = [make(inputs, hidden) for make in PAIRS[pair]]
    x = torch.randn(steps, batch, inputs, requires_grad=True)
    for layer in layers:
        step(layer, x)
    times = [[step(layer, x) for layer in layers] for _ in range(count)]
    ours, theirs = (1e3 * statistics.median(column) for column in zip(*times))
    return ours, theirs, statistics.median(a / b for a, b in times)


FIRST_CALL = """
import time, torch, zoneout as zo
zo.LSTM(3, 8)(torch.randn(2, 2, 3))  # the loop itself is compiled once per machine
@zo.cell(gates=2)
def light(x, r, h):
    z, n = (a + b for a, b in zip(x, r))
    z = z.sigmoid()
    return z * h + zo.update((1 - z) * n.relu())
layer, x = zo.Recurrent(light, 3, 8), torch.randn(5, 2, 3)
began = time.perf_counter()
layer(x)[0].sum().backward()
print(time.perf_counter() - began)
"""


def first_call(cache: str) -> float:
    """Return the seconds of a definition's first training step in a new process."""
    environment = os.environ | {"ZONEOUT_CACHE": cache}
    # From a file: the tracer names the line of an error, and `-c` has no lines.
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(FIRST_CALL)
        script.flush()
        made = subprocess.run(
            [sys.executable, script.name],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
    return float(made.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=int, default=9)
    options: Any = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"{'layers':22s} {'shape':10s} {'ours ms':>9s} {'theirs ms':>9s} {'ratio':>7s}   "
        f"({options.threads} threads)"
    )
    for pair in PAIRS:
        for shape in SHAPES:
            ours, theirs, ratio = compare(pair, shape, options.pairs)
            print(f"{pair:22s} {shape:10s} {ours:9.1f} {theirs:9.1f} {ratio:7.3f}", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = first_call(cache), first_call(cache)
    print(f"first call of a definition: {cold:.2f} s cold, {warm:.2f} s with the code on disk")


if __name__ == "__main__":
    main()
