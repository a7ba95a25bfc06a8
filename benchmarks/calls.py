"""Count the Python functions that one call of a layer runs, and the files that they are in.

    python benchmarks/calls.py

Only functions of this package count. A function that is called twice counts once in the first
number, and twice in the second one.
"""

from __future__ import annotations

import sys
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


def main() -> None:
    """Print the counts of a forward call of an LSTM with zoneout, with gradients and without."""
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
