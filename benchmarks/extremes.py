"""Measure what long sequences and large sizes take on this machine: `python benchmarks/extremes.py
[NAME …]`.

Every measurement is a process of its own, so that its memory is its own: the most that it had at
    any time, less what it
had before; with `--device cuda` that of torch's tensors on the GPU. Each also checks that what came
out is right; a wrong result is an error. The table goes to standard output.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import zoneout as zo
from zoneout.paper.data.corpora import Corpus, Vocabulary
from zoneout.paper.training.config import Batches, Config, Data, Model, Optimizer, Protocol, Zoneout
from zoneout.paper.training.evaluate import evaluate_text
from zoneout.paper.training.feeds import make_feed
from zoneout.paper.training.models import build
from zoneout.paper.training.processes import Processes, products_in
from zoneout.paper.training.step import Step

MiB = 2**20
NOISE = zo.Zoneout(cell=0.5, hidden=0.05)


DEVICE = torch.device("cpu")  # where it is measured; set in every process


def used() -> float:
    """Memory that is in use on the device, whoever has it, in MiB: on the CPU of this process."""
    if DEVICE.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return (total - free) / MiB
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MiB


class Peak:
    """Time, and the most memory above what there was before."""

    def __enter__(self) -> Peak:
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before, self.began = torch.cuda.memory_allocated() / MiB, time.perf_counter()
            return self
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
        self.before, self.began = used(), time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.began
        if DEVICE.type == "cuda":
            self.memory = torch.cuda.max_memory_allocated() / MiB - self.before
            return
        status = Path("/proc/self/status").read_text()
        highest = int(status.split("VmHWM:")[1].split()[0]) / 1024
        self.memory = highest - self.before


Result = tuple[float, float, str]  # seconds, MiB, a note


# --- long -----------------------------------------------------------------------------------------


def streaming(symbols: int) -> Result:
    """Evaluate a text as one sequence, a thousand steps at a time, the state carried."""
    model = (
        build(Config(model=Model(hidden=512), zoneout=Zoneout(cell=0.5, hidden=0.05)), 50)
        .eval()
        .to(DEVICE)
    )
    tokens = torch.randint(
        0, 50, (symbols,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    ).to(DEVICE)
    evaluate_text(
        model, tokens[:2000], Protocol("whole", length=1000)
    )  # scratch memory is there from here on
    with Peak() as peak:
        score = evaluate_text(model, tokens, Protocol("whole", length=1000))
    assert score.predictions == symbols - 1
    if symbols == 10_000:
        other = evaluate_text(model, tokens, Protocol("whole", length=37))
        assert abs(other.nats - score.nats) < 1e-6, "the result depends on how the text is cut"
    return peak.seconds, peak.memory, f"{score.nats:.6f} nats"


def growth(steps: int) -> Result:
    """Train a small model for many updates; what is in use after all of them, less that after
    the first thousand.
    """
    config = Config(
        data=Data("random"),
        batches=Batches(size=8, length=20),
        model=Model(hidden=32),
        zoneout=Zoneout(cell=0.5, hidden=0.05),
        optimizer=Optimizer(clip_gradient=1.0),
    )
    tokens = (
        torch.randint(0, 50, (8 * 20 * 100,), generator=torch.Generator().manual_seed(1))
        .numpy()
        .astype("uint8")
    )
    corpus = Corpus(
        "random", "char", Vocabulary("char", tuple(map(chr, range(50)))), tokens, tokens, tokens, ""
    )
    model = build(config, 50).to(DEVICE)
    feed = make_feed(config, corpus, DEVICE)
    step = Step(model, feed, config, Processes(DEVICE))
    epoch = left = 0
    marks = []
    began = time.perf_counter()
    for number in range(steps):
        if left == 0:
            left = step.begin(epoch, 0, number)
            epoch += 1
            if number == 0:
                step.capture()
        step()
        left -= 1
        if number + 1 in (1000, steps):
            assert step.not_finite() is None
            gc.collect()
            marks.append(used())
    return (
        time.perf_counter() - began,
        marks[-1] - marks[0],
        f"{marks[-1]:.0f} MiB in use at the end",
    )


# --- large ----------------------------------------------------------------------------------------


def layer(
    steps: int,
    batch: int,
    inputs: int,
    hidden: int,
    *,
    train: bool = True,
    lengths: bool = False,
    again: bool = False,
) -> Result:
    """One call and its way back; the first of its rows is held to the reference backend."""
    torch.manual_seed(0)
    ours = zo.LSTM(inputs, hidden, noise=NOISE, device=DEVICE, recompute=again)
    x = torch.randn(steps, batch, inputs).to(DEVICE)
    ends = torch.ones(batch, dtype=torch.int64, device=DEVICE) if lengths else None

    def call() -> torch.Tensor:
        y, _ = ours(x, seed=1, lengths=ends)
        if train:
            ours.zero_grad()
            y.square().mean().backward()
        out: torch.Tensor = y.detach()
        return out

    with torch.set_grad_enabled(train):
        call()
        with Peak() as peak:
            y = call()
    reference = zo.LSTM(inputs, hidden, noise=NOISE, backend="reference", device=DEVICE)
    reference.load_state_dict(ours.state_dict())
    some = ends[:2] if ends is not None else None
    with torch.no_grad():
        expected, _ = reference(x[:, :2], seed=1, lengths=some)
    error = ((y[:, :2] - expected).norm() / expected.norm()).item()
    assert error < 1e-5, f"{error:.1e} from the reference"
    assert not lengths or not y[1:].any()
    return peak.seconds, peak.memory, f"{error:.0e} from the reference"


MEASUREMENTS: dict[str, tuple[str, Callable[[], Result]]] = {
    "long-10k": ("streaming evaluation, LSTM of 512, T = 10,000", lambda: streaming(10_000)),
    "long-100k": ("the same, T = 100,000", lambda: streaming(100_000)),
    "growth": ("growth over 10,000 updates, LSTM of 32", lambda: growth(10_000)),
    "wide": ("H = 4096, T = 20, B = 4, trained", lambda: layer(20, 4, 256, 4096)),
    "wide-eval": (
        "H = 4096, T = 20, B = 4, evaluated",
        lambda: layer(20, 4, 256, 4096, train=False),
    ),
    "long-eval": (
        "T = 4,000, B = 32, H = 256, evaluated",
        lambda: layer(4000, 32, 64, 256, train=False),
    ),
    "long": ("T = 4,000, B = 32, H = 256, trained", lambda: layer(4000, 32, 64, 256)),
    "long-again": ("the same with recompute=True", lambda: layer(4000, 32, 64, 256, again=True)),
    "one-row": ("B = 1, T = 100, H = 256, trained", lambda: layer(100, 1, 64, 256)),
    "many-rows": ("B = 4096, T = 100, H = 64, trained", lambda: layer(100, 4096, 32, 64)),
    "one-step": ("T = 1, B = 64, H = 256, trained", lambda: layer(1, 64, 64, 256)),
    "lengths-1": (
        "lengths all 1 of T = 100, B = 64, H = 256, trained",
        lambda: layer(100, 64, 64, 256, lengths=True),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(MEASUREMENTS)}; all by default"
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="torch's threads; by default as many as it likes"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (cpu)"
    )
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        parser.error("memory is read from /proc, which only Linux has")
    for name in options.names:
        if name not in MEASUREMENTS:
            parser.error(f"there is no {name!r}; expected some of {', '.join(MEASUREMENTS)}")
    threads = options.threads or torch.get_num_threads()
    where = (
        torch.cuda.get_device_name()
        if options.device == "cuda"
        else f"{threads} threads, {platform.machine()}"
    )
    print(f"torch {torch.__version__}, {where}\n")
    print("| | seconds | MiB | |\n|---|---|---|---|")
    # Memory that is given back goes back to the system at once, so that what is measured is not
    # what malloc keeps.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    fresh: Any = multiprocessing.get_context("spawn")
    for name in options.names or MEASUREMENTS:
        with fresh.Pool(1, prepare, (threads, options.device)) as pool:
            seconds, memory, note = pool.apply(measure, (name,))
        print(f"| {MEASUREMENTS[name][0]} | {seconds:.3g} | {memory:.1f} | {note} |", flush=True)
    return 0


def prepare(threads: int, device: str) -> None:
    global DEVICE
    torch.set_num_threads(threads)
    DEVICE = torch.device(device)


def measure(name: str) -> Result:
    with products_in("fp32", DEVICE):
        return MEASUREMENTS[name][1]()


if __name__ == "__main__":
    sys.exit(main())
