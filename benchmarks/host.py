"""Measure what a call costs the host, with plans and without: `python benchmarks/host.py`.

Eager mode, zoneout on, against torch.nn without, the variants in turn in one run. On the CPU the
times are of whole calls, on one thread. On a GPU they are of the host alone: the GPU is waited for
between the parts that are timed, not inside of them.

    python benchmarks/host.py
    python benchmarks/host.py --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zoneout as zo
from zoneout.ops import plan

NOISE = zo.Zoneout(cell=0.5, hidden=0.05)
SHAPES = {  # T, B, input, H, layers
    "tiny": (10, 4, 8, 16, 1),
    "(24, 32, 1, 32)": (24, 32, 1, 32, 1),
    "(100, 32, 128, 128)": (100, 32, 128, 128, 1),
    "char-PTB": (100, 32, 50, 1000, 1),
    "2 × 256": (35, 32, 256, 256, 2),
}
LARGE = ("char-PTB", "2 × 256")  # on the CPU, the host's share of these is nothing
PARTS, SECONDS = 12, 0.02  # of one measurement, and of each part


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    where: dict[str, Any] = {
        "device": torch.device(options.device), "dtype": getattr(torch, options.dtype)
    }  # fmt: skip
    cuda = where["device"].type == "cuda"
    print(f"microseconds on {torch.cuda.get_device_name() if cuda else 'the CPU'}, {options.dtype}")
    print(f"{'':34}{'no plans':>10}{'plans':>10}{'torch.nn':>10}{'ratio':>8}")
    for name, (steps, batch, inputs, hidden, layers) in SHAPES.items():
        if cuda or name not in LARGE:
            x = torch.randn(steps, batch, inputs, **where)
            ours = zo.LSTM(inputs, hidden, layers, noise=NOISE, **where)
            compare(f"LSTM {name}", ours, nn.LSTM(inputs, hidden, layers, **where), x)
    x = torch.randn(32 if cuda else 1, 64, **where)
    compare(
        "LSTMCell 64", zo.LSTMCell(64, 64, noise=NOISE, **where), nn.LSTMCell(64, 64, **where), x
    )


def compare(name: str, ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    """Print a row for a training step and one for an evaluation."""
    for what, run in (("training step", training), ("evaluation", evaluation)):
        ours.train(run is training)
        theirs.train(run is training)
        best = [float("inf")] * 3
        for _ in range(3):
            for k, (module, plans) in enumerate(((ours, False), (ours, True), (theirs, True))):
                plan.DEVICES = {x.device.type} if plans else set()
                best[k] = min(best[k], microseconds(partial(run, module, x), x.is_cuda))
        general, planned, torchs = best
        row = f"{general:10.0f}{planned:10.0f}{torchs:10.0f}{planned / torchs:8.2f}"
        print(f"{f'{name}, {what}':34}{row}", flush=True)


def training(module: nn.Module, x: Tensor) -> None:
    module.zero_grad()
    module(x)[0].sum().backward()


@torch.inference_mode()
def evaluation(module: nn.Module, x: Tensor) -> None:
    module(x)


def microseconds(run: Callable[[], None], cuda: bool) -> float:
    """Return the shortest mean of a part's calls."""

    def part(calls: int) -> float:
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - begin) / calls

    one = min(part(1) for _ in range(4))  # the first calls of a shape record it
    calls = max(1, min(100, int(SECONDS / one)))
    return min(part(calls) for _ in range(PARTS)) * 1e6


if __name__ == "__main__":
    main()
