"""What a call costs the host: Python functions and files, and microseconds.

    python benchmarks/calls.py
    python benchmarks/calls.py --times

Only functions of this package count. A function that is called twice counts once in the first
number, and twice in the second one. Times are those of the processor, with one thread: the lowest
of 60 means over 50 calls, in turn with those of torch.nn.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import zoneout as zo

PACKAGE = Path(zo.__file__ or "").parent


def functions(call: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """Return how often each function of the package runs in a call, by file and name."""
    found: Counter[tuple[str, str]] = Counter()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found[str(path.relative_to(PACKAGE)), frame.f_code.co_qualname] += 1

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


Case = tuple[str, Any, Any, tuple[Any, ...]]  # a name, torch's module, ours, and what they get


def cases() -> list[Case]:
    """Return small layers, and cells at one row."""
    both, one = zo.Zoneout(cell=0.5, hidden=0.05), zo.Zoneout(hidden=0.05)
    found: list[Case] = []
    for steps, rows, inputs, units in ((5, 2, 4, 4), (24, 32, 1, 32)):
        theirs, ours = torch.nn.LSTM(inputs, units), zo.LSTM(inputs, units, noise=both)
        x = torch.randn(steps, rows, inputs)
        found.append((f"LSTM {steps}, {rows}, {inputs}, {units}", theirs, ours, (x,)))
    for units in (64, 512):
        x, h, c = (torch.randn(1, units) for _ in range(3))
        lstms = torch.nn.LSTMCell(units, units), zo.LSTMCell(units, units, noise=both)
        grus = torch.nn.GRUCell(units, units), zo.GRUCell(units, units, noise=one)
        found.append((f"LSTMCell 1, {units}", *lstms, (x, (h, c))))
        found.append((f"GRUCell 1, {units}", *grus, (x, h)))
    return found


def ways(module: Any, given: tuple[Any, ...]) -> list[Callable[[], Any]]:
    """Return a forward pass in training, forward and backward, and a pass in evaluation."""

    def train() -> None:
        y = module(*given)
        while isinstance(y, tuple):
            y = y[0]
        y.sum().backward()

    def evaluate() -> None:
        module.eval()
        with torch.no_grad():
            module(*given)
        module.train()

    return [lambda: module(*given), train, evaluate]


def microseconds(calls: list[Callable[[], Any]], means: int = 60, each: int = 50) -> list[float]:
    """Return the time of each call."""
    for call in calls:
        for _ in range(each):
            call()
    lowest = [float("inf")] * len(calls)
    for _ in range(means):
        for k, call in enumerate(calls):
            begin = time.process_time()
            for _ in range(each):
                call()
            lowest[k] = min(lowest[k], (time.process_time() - begin) / each)
    return [1e6 * one for one in lowest]


def print_times() -> None:
    """Print a table of the times of all cases."""
    torch.set_num_threads(1)
    print("| | forward: torch.nn | ours | training step | ours | evaluation | ours |")
    print("|---|---|---|---|---|---|---|")
    for name, theirs, ours, given in cases():
        found = microseconds([*ways(theirs, given), *ways(ours, given)])
        pairs = [f"{a:.0f} | {b:.0f} ({b / a:.2f})" for a, b in zip(found, found[3:])]
        print(f"| {name} | {' | '.join(pairs)} |", flush=True)


def main() -> None:
    """Print the counts of a forward call of an LSTM with zoneout, with gradients and without."""
    if "--times" in sys.argv[1:]:
        return print_times()
    layer = zo.LSTM(8, 16, noise=zo.Zoneout(cell=0.5, hidden=0.05))
    x = torch.randn(5, 4, 8, requires_grad=True)
    for _ in range(3):  # the second call of a kind is recorded, and later ones repeat it
        layer(x)
    for name, grad in (("with gradients", True), ("without", False)):
        with torch.set_grad_enabled(grad):
            layer(x), layer(x)
            found = functions(lambda: layer(x))
        # A comprehension or generator belongs to the function that it is in.
        own = {(file, function) for file, function in found if not function.endswith(">")}
        calls = sum(count for key, count in found.items() if key in own)
        files = {file for file, _ in own}
        print(f"{name}: {len(own)} functions in {len(files)} files, {calls} calls")
        for file in sorted(files):
            print(f"  {file}: {', '.join(sorted(f for at, f in own if at == file))}")


if __name__ == "__main__":
    main()
