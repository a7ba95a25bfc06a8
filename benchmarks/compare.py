"""Compare the speed of two checkouts: their layers run in turn, in one process each.

    git worktree add ../old COMMIT
    python benchmarks/compare.py ../old . --threads 1 LSTM:pMNIST:train GRU:small:eval
    LSTM:small:train:layer-norm

A case is LAYER:SHAPE:MODE[:NOISE]. Without cases all layers and shapes are compared, in training
and evaluation. The ratio is the median of new / old over pairs that follow each other. With one
thread on the CPU the processor's time counts, so that other processes disturb less.

With `--gpu bf16` (or tf32, fp16) they run on a GPU, in CUDA graphs; without cases, those of the
README. Mode `host` is the host's part of a training step without a graph. `--new NAME=VALUE` sets
an environment variable for the new one, so that a checkout can be compared with itself:

    python benchmarks/compare.py . . --gpu bf16 --new ZONEOUT_BATCH_INVARIANT=1
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SHAPES = {"char-PTB": (100, 32, 50, 1000), "pMNIST": (784, 100, 1, 100)}  # T, B, input, H
SHAPES |= {"medium": (100, 32, 256, 256), "small": (100, 32, 64, 128)}
SHAPES |= {"few-rows": (100, 8, 50, 1000), "large": (100, 128, 512, 1500)}
SHAPES |= {"text8": (180, 128, 27, 2000), "word-PTB": (35, 20, 1500, 1500)}
SHAPES |= {"speech": (800, 64, 1024, 1024), "1024": (100, 32, 1024, 1024)}
SHAPES |= {"512": (100, 64, 512, 512)}
DEPTHS = {"word-PTB": 2}  # layers
REPEATS = {"char-PTB": 1, "pMNIST": 2, "medium": 4, "small": 12}  # calls per measurement
ON_GPU = 5  # the same on a GPU, for every shape
PAUSE = 0.05  # seconds: OpenMP threads of the other process spin for a while after their last loop
LAYERS, MODES = ("LSTM", "GRU", "RNN"), ("train", "eval")
NOISES = ("zoneout", "none", "dropout", "layer-norm", "batch-norm")
GPU_SHAPES = ("char-PTB", "text8", "word-PTB", "pMNIST", "speech", "1024", "512")
GPU_CASES = [f"LSTM:{shape}:train" for shape in GPU_SHAPES]
GPU_CASES += [f"{layer}:{shape}:train" for shape in GPU_SHAPES[::3][:2] for layer in ("GRU", "RNN")]
GPU_CASES += [f"LSTM:{shape}:host" for shape in ("char-PTB", "512")]


def make(case: str, gpu: str) -> Callable[[], Any]:
    """Return a function that runs the case once, on a GPU in the type `gpu`."""
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
    types = {"": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
    to: dict[str, Any] = {
        "device": "cuda" if gpu else "cpu",
        "dtype": types.get(gpu, torch.float16),
    }
    training = mode != "eval"
    module = getattr(zo, layer)(inputs, hidden, DEPTHS.get(shape, 1), **options)
    module = module.to(**to).train(training)
    x = torch.randn(steps, batch, inputs, **to, requires_grad=training)

    call = {} if gpu else {"seed": 3}  # a graph draws its seed on the GPU

    def run() -> None:
        with torch.set_grad_enabled(training):
            y, _ = module(x, **call)
        if training:
            torch.autograd.grad(y, [x, *module.parameters()], dy)

    with torch.no_grad():
        dy = torch.ones_like(module(x)[0])
    run()
    return captured(run) if gpu and mode != "host" else run


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that replays a CUDA graph of a run and waits for its end."""
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(), run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        run()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def serve(gpu: str) -> None:
    """Time the cases that are named on standard input, one at a time."""
    cases: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        case = line.strip()
        if case not in cases:
            cases = {case: make(case, gpu)}
        run = cases[case]
        if not gpu:
            time.sleep(PAUSE)
        run()
        print(seconds_of(run, ON_GPU if gpu else REPEATS[case.split(":")[1]], gpu), flush=True)


def seconds_of(run: Callable[[], Any], repeats: int, gpu: str) -> float:
    """Return the mean time of a run; the GPU has nothing to do when one begins."""
    import torch

    alone = not gpu and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    total = 0.0
    for _ in range(repeats):
        if gpu:
            torch.cuda.synchronize()
        began = clock()
        run()
        total += clock() - began
    return total / repeats


class Checkout:
    """A process that has imported one checkout's package."""

    def __init__(
        self, folder: Path, threads: int, gpu: str = "", variables: Sequence[str] = ()
    ) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(folder.resolve() / "src"),
            "OMP_NUM_THREADS": str(threads),
            **dict(one.split("=", 1) for one in variables),
        }
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", gpu]
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
    parser.add_argument("--gpu", choices=("bf16", "tf32", "fp16"), default="")
    parser.add_argument(
        "--new", dest="variables", action="append", default=[], metavar="NAME=VALUE"
    )
    options = parser.parse_intermixed_args()
    checkouts = [
        Checkout(options.old, options.threads, options.gpu),
        Checkout(options.new, options.threads, options.gpu, options.variables),
    ]
    everything = [
        f"{layer}:{shape}:{mode}" for layer in LAYERS for shape in REPEATS for mode in MODES
    ]
    everything = GPU_CASES if options.gpu else everything
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
    serve(sys.argv[2]) if "--serve" in sys.argv else main()
