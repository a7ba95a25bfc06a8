"""The time of ONNX's own LSTM, GRU and RNN in onnxruntime against that of the Scan that noise and
norms need.

    python benchmarks/onnx_operators.py

Both forms hold the same layer without noise, in evaluation mode: `return_cells=True` asks an LSTM
    for what ONNX's
operator cannot give, and the others get `resets` that reset nothing. One thread; the runs of both
forms alternate, and the times are the least of 30 runs, since other work on the machine only adds
to them.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import nn

import zoneout as zo

SHAPES = ((100, 32, 64, 128), (100, 1, 64, 256), (100, 32, 50, 512))  # steps, rows, input, units
RUNS = 30


class Outputs(nn.Module):
    """The outputs alone of a layer, called with fixed options."""

    def __init__(self, layer: nn.Module, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = layer, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, **self.options)[0]


def session(model: nn.Module, x: torch.Tensor, folder: Path) -> Any:
    path = folder / "model.onnx"
    torch.onnx.export(model.eval(), (x,), path, input_names=["x"], verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print("cell   T    B    I    H    own ms  Scan ms  Scan / own")
    for kind in ("LSTM", "GRU", "RNN"):
        for steps, rows, inputs, units in SHAPES:
            layer, x = getattr(zo, kind)(inputs, units), torch.randn(steps, rows, inputs)
            never = torch.zeros(steps, rows, dtype=torch.bool)
            scan: dict[str, Any] = {"return_cells": True} if kind == "LSTM" else {"resets": never}
            with tempfile.TemporaryDirectory() as folder:
                sessions = [
                    session(Outputs(layer, **options), x, Path(folder)) for options in ({}, scan)
                ]
            times: list[list[float]] = [[], []]
            for _ in range(RUNS):
                for one, taken in zip(sessions, times):
                    start = time.perf_counter()
                    one.run(None, {"x": x.numpy()})
                    taken.append(time.perf_counter() - start)
            own, other = (1000 * min(taken) for taken in times)
            print(
                f"{kind:5} {steps:4} {rows:4} {inputs:4} {units:4} {own:8.2f} {other:8.2f} "
                f"{other / own:8.1f}"
            )


if __name__ == "__main__":
    main()
