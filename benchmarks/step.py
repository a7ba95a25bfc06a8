"""Measure what a training step costs beyond its recurrent layers: `python benchmarks/step.py [NAME
…] [--device cuda]`.

Three things in turn, the median over rounds: the whole step of `zoneout.paper.training.train`
(gather, forward, backward, clipping, optimizer), the recurrent layers alone forward and backward,
and these with the softmax and the loss. The data are random symbols of the right number. On a GPU
each is one CUDA graph, so that kernels are compared with kernels.

`--at-once N` measures instead how long an update takes when N runs share the device as those of
`zoneout reproduce --parallel N` do: on a GPU each in a thread and a stream of its own. Each has to
end where it ends alone, to the bit, though another run has ended after its graph was captured;
where one does not, there is no time.

The goals: on a GPU a step of at most 1.4 times the layers (word-PTB, with 10,000 words in its
    softmax: 1.8), on a CPU
at most 1.15 times layers and softmax.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gpu import captured

from zoneout.ops.cuda.runtime.compiler import shared_by
from zoneout.paper.data.corpora import Corpus, Images, Vocabulary
from zoneout.paper.training.config import Batches, Config, Data, Model, Optimizer, Zoneout
from zoneout.paper.training.feeds import make_feed
from zoneout.paper.training.models import build, loss_of, parameters_of
from zoneout.paper.training.processes import Processes, device_of, products_in
from zoneout.paper.training.step import Step

PAPER = Model(hidden=1000, embedding=0, init="torch", one_bias=True, learn_initial_state=True)
CONFIGS = {
    "char-PTB": (
        50,
        Config(
            batches=Batches(size=32, length=100),
            model=PAPER,
            zoneout=Zoneout(cell=0.5, hidden=0.05),
            optimizer=Optimizer("adam", paper=True, clip_gradient=0.0, clip_update=1.0),
        ),
    ),
    "word-PTB": (
        10_000,
        Config(
            batches=Batches("streams", size=20, length=35),
            model=Model(hidden=1500, layers=2, embedding=1500, dropout=0.65),
            zoneout=Zoneout(cell=0.25, hidden=0.025),
            optimizer=Optimizer("sgd", lr=1.0, clip_gradient=10.0),
            loss="sum",
        ),
    ),
    "text8": (
        27,
        Config(
            batches=Batches(size=128, length=180),
            model=replace(PAPER, hidden=2000),
            zoneout=Zoneout(cell=0.5, hidden=0.05),
            optimizer=Optimizer("adam", paper=True, lr=0.001, clip_gradient=1.0),
        ),
    ),
    "pMNIST": (
        0,
        Config(
            data=Data("mnist"),
            batches=Batches(size=100),
            model=replace(PAPER, hidden=100),
            zoneout=Zoneout(cell=0.15, hidden=0.15, mask="shared"),
            optimizer=Optimizer("rmsprop", paper=True, lr=0.001, decay=0.5, clip_gradient=1.0),
        ),
    ),
    "pMNIST-norm": (
        0,
        Config(
            data=Data("mnist"),
            batches=Batches(size=100),
            model=replace(PAPER, hidden=100, norm="batch", norm_momentum=0.01),
            zoneout=Zoneout(cell=0.15, hidden=0.15, mask="shared"),
            optimizer=Optimizer("rmsprop", paper=True, lr=0.001, decay=0.5, clip_gradient=1.0),
        ),
    ),
    "demo": (
        80,
        Config(
            batches=Batches(size=32, length=100),
            model=Model(hidden=256, embedding=0),
            zoneout=Zoneout(cell=0.5, hidden=0.05),
            optimizer=Optimizer(clip_gradient=0.0),
        ),
    ),
}


@dataclass(frozen=True)
class Times:
    """Milliseconds."""

    step: float
    layers: float
    with_softmax: float


def begun(symbols: int, config: Config, device: torch.device) -> tuple[Step, Callable[[], None]]:
    """A step on random data, captured where that is done, and a call that takes it, epoch after
    epoch.
    """
    generator = np.random.default_rng(0)
    data: Corpus | Images
    if symbols:
        many = 30 * config.batches.size * config.batches.length
        text = generator.integers(0, symbols, many).astype(np.int32)
        data = Corpus("random", "char", Vocabulary("char", ("a",)), text, text, text, digest="")
    else:
        pixels = generator.integers(0, 256, (20 * config.batches.size, 784), dtype=np.uint8)
        part = pixels, generator.integers(0, 10, len(pixels), dtype=np.uint8)
        data = Images("rows", part, part, part, digest="")
    model = build(config, symbols).to(device)
    feed = make_feed(config, data, device)
    step = Step(model, feed, config, Processes(device))
    updates = step.begin(0, 0, 0)
    step.capture()
    done = 0

    def whole() -> None:
        nonlocal done
        if done == updates:
            step.begin(0, 0, 0)
            done = 0
        step()
        done += 1

    return step, whole


def measure(symbols: int, config: Config, device: torch.device, rounds: int) -> Times:
    """The three times of one config."""
    step, whole = begun(symbols, config, device)
    model, feed = step.model, step.feed
    inputs, targets = feed.batch(feed.order(0)[0].to(device))
    seed = torch.tensor(1, device=device)
    layer_weights = [p for p in model.recurrent.parameters() if p.requires_grad]
    seen: dict[str, torch.Tensor] = {}
    hook = model.recurrent.register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    with torch.no_grad():  # nothing of a graph that is captured may hang on one that was not
        model(inputs, seed=seed)
    hook.remove()
    x = seen["x"].detach()
    x.requires_grad_(model.embedding is not None)  # what lies below the layers needs its gradient
    wanted = [*layer_weights, x] if x.requires_grad else layer_weights
    with torch.no_grad():
        down = torch.randn_like(model.recurrent(x, seed=seed)[0])

    def layers() -> None:
        with products_in(config.precision, device):
            y, _ = model.recurrent(x, seed=seed)
            torch.autograd.grad(y, wanted, down)

    def with_softmax() -> None:
        with products_in(config.precision, device):
            loss, _ = loss_of(model(inputs, seed=seed), targets, config)
            torch.autograd.grad(loss, list(parameters_of(model).values()))

    contenders = [whole, layers, with_softmax]
    if device.type == "cuda":
        contenders[1:] = captured(layers), captured(with_softmax)
    times: list[list[float]] = [[], [], []]
    for _ in range(rounds + 2):
        for found, call in zip(times, contenders):
            found.append(timed(call, device))
    return Times(*(1000 * statistics.median(found[2:]) for found in times))


def at_once(
    symbols: int, config: Config, device: torch.device, runs: int, updates: int
) -> tuple[list[float], int]:
    """Milliseconds of an update of each of so many runs that share the device, and how many did
    not end as alone.
    """
    streams: list[Any] = [
        torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(runs)
    ]
    ready = threading.Barrier(runs)

    def some(whole: Callable[[], None], count: int, stream: Any) -> None:
        for _ in range(count):
            whole()
        if stream is not None:
            stream.synchronize()

    def work(run: Any, stream: Any) -> float:
        with torch.cuda.stream(stream):
            some(run[1], 3, stream)
            ready.wait()
            began = time.perf_counter()
            some(run[1], updates, stream)
            return 1000 * (time.perf_counter() - began) / updates

    def begin(number: int, stream: Any) -> tuple[Step, Callable[[], None]]:
        with torch.cuda.stream(stream):
            return begun(symbols, replace(config, seed=number), device)

    def ended(step: Step) -> list[torch.Tensor]:
        return [t.clone() for t in step.tensors().values()]

    with shared_by(runs), ThreadPoolExecutor(runs) as threads:
        alone = []
        for number, stream in enumerate(streams):
            step, whole = begin(number, stream)
            with torch.cuda.stream(stream):
                some(whole, 3 + updates, stream)
                alone.append(ended(step))
        del step, whole
        before = begin(runs, streams[0])
        steps = [begin(number, stream) for number, stream in enumerate(streams)]
        del before  # it ends when the others have been captured, as a run of a longer list does
        times = list(threads.map(work, steps, streams))
        others = [
            not all(map(torch.equal, ended(step), own)) for (step, _), own in zip(steps, alone)
        ]
        return times, sum(others)


def timed(call: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", default=[], help=f"of {', '.join(CONFIGS)}; by default all"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16", "fp16"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--at-once", type=int, metavar="N", help="measure N runs that share the device"
    )
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in CONFIGS]
    if unknown:
        parser.error(f"expected names of {', '.join(CONFIGS)}, got {', '.join(unknown)}")
    device = device_of(options.device)
    print(
        f"device {device}, {options.precision}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}"
    )
    if options.at_once:
        print("| config | runs | ms an update of each | ms an update of all |")
        print("|---|---|---|---|")
        for name in options.names or CONFIGS:
            symbols, config = CONFIGS[name]
            config = replace(config, precision=options.precision)
            times, others = at_once(symbols, config, device, options.at_once, 20 * options.rounds)
            if others:
                print(
                    f"no time for {name}: {others} of {options.at_once} runs ended elsewhere than "
                    "alone",
                    flush=True,
                )
                continue
            each, every = f"{min(times):.3g} to {max(times):.3g}", 1 / sum(1 / t for t in times)
            print(f"| {name} | {options.at_once} | {each} | {every:.3g} |", flush=True)
        return
    print(
        "| config | step ms | layers ms | layers and softmax ms | step / layers | step / layers "
        "and softmax |"
    )
    print("|---|---|---|---|---|---|")
    for name in options.names or CONFIGS:
        symbols, config = CONFIGS[name]
        t = measure(symbols, replace(config, precision=options.precision), device, options.rounds)
        ratios = f"{t.step / t.layers:.2f} | {t.step / t.with_softmax:.2f}"
        print(
            f"| {name} | {t.step:.3g} | {t.layers:.3g} | {t.with_softmax:.3g} | {ratios} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
