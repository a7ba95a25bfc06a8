"""Compare the speed of two checkouts: their layers run in turn, in one process each.

    git worktree add ../old COMMIT
    python benchmarks/compare.py ../old . --threads 1 LSTM:pMNIST:train GRU:small:eval
    python benchmarks/compare.py ../old . --device cuda --type bf16
    python benchmarks/compare.py ../old . --device cuda LSTM:char-PTB:train:layer-norm

A case is LAYER:SHAPE:MODE[:NOISE]. Without cases all layers and shapes are compared, on the CPU in
training and evaluation. Modes on a GPU: `graph` and `eager`, a training step in a CUDA graph and
without one, and `host`, the host's part of the second. The ratio is the median of new / old over
pairs that follow each other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPES = {"char-PTB": (100, 32, 50, 1000), "pMNIST": (784, 100, 1, 100)}  # T, B, input, H
SHAPES |= {"medium": (100, 32, 256, 256), "small": (100, 32, 64, 128)}
REPEATS = {"char-PTB": 1, "pMNIST": 2, "medium": 4, "small": 12}  # calls per measurement
GPU_SHAPES = {"char-PTB": (100, 32, 50, 1000), "text8": (180, 128, 27, 2000)}
GPU_SHAPES |= {"word-PTB": (35, 20, 1500, 1500), "pMNIST": (784, 100, 1, 100)}
GPU_SHAPES |= {"speech": (800, 64, 1024, 1024), "1024": (100, 32, 1024, 1024)}
GPU_SHAPES |= {"512": (100, 64, 512, 512)}
GPU_CASES = [f"LSTM:{shape}:graph" for shape in GPU_SHAPES]
GPU_CASES += [
    f"{layer}:{shape}:graph" for layer in ("GRU", "RNN") for shape in ("char-PTB", "pMNIST")
]
GPU_CASES += [f"LSTM:{shape}:host" for shape in ("char-PTB", "512")]
GPU_REPEATS, GPU_WARM_UP = 5, 3
PAUSE = 0.05  # seconds: OpenMP threads of the other process spin for a while after their last loop
LAYERS, MODES = ("LSTM", "GRU", "RNN"), ("train", "eval")
NOISES = ("zoneout", "none", "dropout", "layer-norm", "batch-norm")


def make(case: str) -> Callable[[], Any]:
    """Return a function that runs the case once."""
    import torch

    import zoneout as zo

    layer, shape, mode, noise = (*case.split(":"), "zoneout")[:4]
    steps, batch, inputs, hidden = SHAPES[shape]
    rates = {"hidden": 0.05, "cell": 0.5} if layer == "LSTM" else {"hidden": 0.05}
    options: dict[str, Any] = {"noise": None if noise == "none" else zo.Zoneout(**rates)}
    if noise == "dropout":
        options["noise"] = (
            zo.StateDropout(hidden=0.1) if layer == "RNN" else zo.RecurrentDropout(rate=0.25)
        )
    if noise.endswith("norm"):
        options["norm"] = "layer" if noise == "layer-norm" else zo.RecurrentBatchNorm(steps=steps)
    torch.manual_seed(0)
    module = getattr(zo, layer)(inputs, hidden, **options).train(mode == "train")
    x = torch.randn(steps, batch, inputs, requires_grad=mode == "train")

    def run() -> None:
        with torch.set_grad_enabled(mode == "train"):
            y, _ = module(x, seed=3)
        if mode == "train":
            y.sum().backward()

    run()
    return run


def make_on_gpu(case: str, kind: str) -> Callable[[], float]:
    """Return a function that runs the case a few times and returns the seconds of one run."""
    import torch

    import zoneout as zo

    layer, shape, mode, noise = (*case.split(":"), "zoneout")[:4]
    steps, batch, inputs, hidden = GPU_SHAPES[shape]
    rates = {"hidden": 0.05, "cell": 0.5} if layer == "LSTM" else {"hidden": 0.1}
    options: dict[str, Any] = {"noise": None if noise == "none" else zo.Zoneout(**rates)}
    if noise.endswith("norm"):
        options["norm"] = "layer" if noise == "layer-norm" else zo.RecurrentBatchNorm(steps=steps)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}[kind]
    count = 2 if shape == "word-PTB" else 1
    torch.manual_seed(0)
    module = getattr(zo, layer)(inputs, hidden, count, **options).to("cuda", dtype)
    x = torch.randn(steps, batch, inputs, device="cuda", dtype=dtype, requires_grad=True)
    dy = torch.randn(steps, batch, hidden, device="cuda", dtype=dtype)
    wanted = [x, *module.parameters()]

    def run() -> Any:
        return torch.autograd.grad(module(x)[0], wanted, dy, allow_unused=True)

    if mode == "graph":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run(), run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        replay: Callable[[], Any] = graph.replay
    else:
        replay = run

    def seconds() -> float:
        for _ in range(GPU_WARM_UP):
            replay()
        torch.cuda.synchronize()
        total = 0.0
        for _ in range(GPU_REPEATS):
            began = time.perf_counter()
            replay()
            if mode != "host":
                torch.cuda.synchronize()
            total += time.perf_counter() - began
            torch.cuda.synchronize()
        return total / GPU_REPEATS

    return seconds


def timer_of(case: str) -> Callable[[], float]:
    """Return a function that runs the case on the CPU and returns the seconds of one run."""
    run, repeats = make(case), REPEATS[case.split(":")[1]]

    def seconds() -> float:
        time.sleep(PAUSE)
        run()
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - began) / repeats

    return seconds


def serve(kind: str) -> None:
    """Time the cases that are named on standard input, one at a time; `kind`: "" on the CPU."""
    cases: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        case = line.strip()
        if case not in cases:
            cases.clear()
            cases[case] = make_on_gpu(case, kind) if kind else timer_of(case)
        print(cases[case](), flush=True)


class Checkout:
    """A process that has imported one checkout's package."""

    def __init__(self, folder: Path, threads: int, kind: str = "") -> None:
        environment = os.environ | {
            "PYTHONPATH": str(folder.resolve() / "src"),
            "OMP_NUM_THREADS": str(threads),
        }
        command = [sys.executable, str(Path(__file__).resolve()), f"--serve={kind}"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def seconds(self, case: str) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{case}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"noises: {', '.join(NOISES)}")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--type", choices=("bf16", "fp16", "tf32"), default="bf16", help="on a GPU")
    options = parser.parse_intermixed_args()
    kind = options.type if options.device == "cuda" else ""
    folders = (options.old, options.new)
    checkouts = [Checkout(folder, options.threads, kind) for folder in folders]
    everything = [
        f"{layer}:{shape}:{mode}" for layer in LAYERS for shape in SHAPES for mode in MODES
    ]
    everything = GPU_CASES if kind else everything
    print("case                             old ms    new ms   new / old")
    for case in options.cases or everything:
        pairs: list[tuple[float, float]] = []
        for number in range(options.pairs + 1):
            order = checkouts if number % 2 else checkouts[::-1]
            times = {id(checkout): checkout.seconds(case) for checkout in order}
            pairs.append((times[id(checkouts[0])], times[id(checkouts[1])]))
        old, new = (
            1e3 * statistics.median(column) for column in zip(*pairs[1:])
        )  # the first pair warms up
        ratio = statistics.median(b / a for a, b in pairs[1:])
        print(f"{case:30s} {old:9.3f} {new:9.3f} {ratio:11.3f}", flush=True)


if __name__ == "__main__":
    served = [word for word in sys.argv if word.startswith("--serve=")]
    serve(served[0].removeprefix("--serve=")) if served else main()
