"""Check an installed wheel of a platform: its compiled loop is there, runs and is right.

python tools/try_wheel.py        # in an environment with the wheel; needs no compiler
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["PATH"], os.environ["CC"] = "", "none"  # no compiler, whatever is installed


def main() -> int:
    """Return 0 if the loop of the wheel runs, and gives the results of the reference."""
    import torch

    import zoneout as zo
    from zoneout.ops.cpu import native, prebuilt

    library = native.load()
    loaded = Path(library._name) if library is not None else None
    if loaded is None or loaded.parent != prebuilt.FOLDER:
        print(f"zoneout: expected a library in {prebuilt.FOLDER}, got {loaded}: {native.why_not()}")
        return 1
    noise = zo.Zoneout(cell=0.5, hidden=0.05)
    for kind in (zo.LSTM, zo.GRU, zo.RNN):
        layer = kind(30, 40, noise=noise if kind is zo.LSTM else zo.Zoneout(hidden=0.1))
        reference = kind(30, 40, noise=layer.noise, backend="reference")
        reference.load_state_dict(layer.state_dict())
        x = torch.randn(20, 8, 30)
        results = []
        for each in (layer, reference):
            y, _ = each(x, seed=7)
            results.append([y, *torch.autograd.grad(y.square().sum(), list(each.parameters()))])
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    print(f"zoneout {zo.__version__}: {loaded.name} runs and matches the reference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
