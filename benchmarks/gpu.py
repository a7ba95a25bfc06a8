"""Measure the layers against cuDNN on an NVIDIA GPU: `python benchmarks/gpu.py`.

A training step (forward and backward with all gradients) with zoneout on, against torch.nn without,
in the same type and the same run: captured in a CUDA graph, and eager. Before a ratio is taken the
layer that is timed is held to the reference in double precision over its first steps. Rows go to
benchmarks/results.csv.

    python benchmarks/gpu.py                    # everything in bf16 and TF32, some ten minutes
    python benchmarks/gpu.py headline memory    # only these groups
    python benchmarks/gpu.py --type fp16        # only this type
    python benchmarks/gpu.py --layer GRU        # only this layer
    python benchmarks/gpu.py --shape 'H 2048*'  # only shapes with such a name
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import bench
import numpy as np
import torch
from bench import LAYERS, ZONEOUT, Row, mixed_lengths

import zoneout as zo
from zoneout.ops import reference
from zoneout.paper.data.corpora import Corpus, Vocabulary
from zoneout.paper.experiments.recipes import RECIPES
from zoneout.paper.training.config import change
from zoneout.paper.training.feeds import make_feed
from zoneout.paper.training.models import build
from zoneout.paper.training.processes import Processes, products_in
from zoneout.paper.training.step import Step

SHAPES = {  # T, B, input, H, layers
    "char-PTB": (100, 32, 50, 1000, 1),
    "text8": (180, 128, 27, 2000, 1),
    "word-PTB": (35, 20, 1500, 1500, 2),
    "pMNIST": (784, 100, 1, 100, 1),
    "speech decoder": (800, 64, 1024, 1024, 1),
    "1024": (100, 32, 1024, 1024, 1),
    "512": (100, 64, 512, 512, 1),
}
TYPES = {"bf16": torch.bfloat16, "tf32": torch.float32, "fp16": torch.float16}
TOLERANCES = {"bf16": 1e-2, "tf32": 1e-3, "fp16": 1e-2}
LIMITS = {  # milliseconds in a graph that a layer has to stay within, in bf16 and TF32
    ("LSTM", "char-PTB"): (1.2, 1.8), ("LSTM", "text8"): (6.4, 14.5),
    ("LSTM", "word-PTB"): (1.6, 2.0), ("LSTM", "pMNIST"): (2.4, 2.4),
    ("LSTM", "speech decoder"): (11, 18), ("LSTM", "1024"): (1.2, 1.9),
    ("LSTM", "512"): (1.1, 1.6), ("GRU", "char-PTB"): (1.2, None),
    ("RNN", "char-PTB"): (1.2, None), ("GRU", "pMNIST"): (2.4, 2.4), ("RNN", "pMNIST"): (1.5, 1.5),
}  # fmt: skip
GRID = [
    (h, b) for h in (64, 128, 256, 512, 768, 1024, 1536, 2048) for b in (1, 8, 32, 64, 128, 256)
]
NOISE = 1.05  # what two runs of the same thing may differ by


class Asked(NamedTuple):
    """What is to be measured."""

    pairs: int
    types: Sequence[str]
    layers: Sequence[str]
    shapes: Sequence[str]  # names, * for anything

    def has(self, shape: str) -> bool:
        return any(fnmatch.fnmatch(shape, pattern) for pattern in self.shapes)


def main() -> None:
    groups: dict[str, Callable[[Asked], Iterator[Row]]] = {
        "headline": headline, "grid": grid, "combinations": combinations, "host": host,
        "memory": memory, "cells": cells, "systems": systems,
    }  # fmt: skip
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "groups", nargs="*", metavar="GROUP", help=f"of {', '.join(groups)}; all by default"
    )
    parser.add_argument("--pairs", type=int, default=15, help="paired runs a ratio (default 15)")
    parser.add_argument(
        "--type", choices=TYPES, action="append", help="only this type; may be given twice"
    )
    parser.add_argument(
        "--layer", choices=LAYERS, action="append", help="in headline and combinations: only this"
    )
    parser.add_argument(
        "--shape", action="append", help="only shapes named so, * for anything; may be given twice"
    )
    args = parser.parse_args()
    if unknown := set(args.groups) - set(groups):
        parser.error(f"expected groups of {', '.join(groups)}; got {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        raise SystemExit("No NVIDIA GPU here; `make bench` measures the CPU.")
    asked = Asked(
        args.pairs, args.type or ["bf16", "tf32"], args.layer or list(LAYERS), args.shape or ["*"]
    )
    rows: list[Row] = []
    for name in args.groups or groups:
        for row in groups[name](asked):
            rows.append(row)
            print(bench.line(row), flush=True)
        bench.write(rows)
    missed = [row for row in rows if not row.ratio <= row.goal]
    print(f"\n{len(rows)} ratios, {len(rows) - len(missed)} within their goal.")


# --- what is measured -----------------------------------------------------------------------------


def headline(asked: Asked) -> Iterator[Row]:
    """The paper's shapes and others that people train."""
    for (name, shape), limits in LIMITS.items():
        for dtype in asked.types if name in asked.layers and asked.has(shape) else ():
            limit = dict(zip(("bf16", "tf32"), limits)).get(dtype)
            yield from compare("gpu", name, shape, SHAPES[shape], dtype, asked.pairs, limit=limit)


def grid(asked: Asked) -> Iterator[Row]:
    """Any size: no slower than cuDNN."""
    for hidden, batch in GRID:
        shape = f"H {hidden}, B {batch}"
        for dtype in asked.types if asked.has(shape) else ():
            sizes = (100, batch, hidden, hidden, 1)
            yield from compare("gpu grid", "LSTM", shape, sizes, dtype, min(asked.pairs, 7))


def combinations(asked: Asked) -> Iterator[Row]:
    """Everything else that runs fused, against plain zoneout, in a graph: norms at pMNIST, the
    rest at char-PTB.
    """
    at = {"char-PTB": {"noise", "lengths", "resets"}, "pMNIST": {"norm", "lengths", "resets"}}
    for name, shape in itertools.product(asked.layers, filter(asked.has, at)):
        again = {"zoneout, recomputed": {"noise": ZONEOUT[name], "recompute": True}}
        for what, how in (bench.variants(name, SHAPES[shape][:4], "cuda") | again).items():
            kind = next((kind for kind in ("norm", "lengths", "resets") if kind in how), "noise")
            group, goal = ("gpu norm", 2.0) if kind == "norm" else ("gpu combination", 1.5)
            for dtype in asked.types if kind in at[shape] else ():
                yield from variant(group, name, what, shape, dtype, asked.pairs, how, goal)
        for dtype in asked.types:
            yield from directions(name, shape, dtype, asked.pairs)
            yield from packed(name, shape, dtype, asked.pairs)


def host(asked: Asked) -> Iterator[Row]:
    """What the host needs for a forward pass and for a training step, before the GPU has done
    anything.
    """
    for dtype in asked.types if asked.has("char-PTB") else ():
        layer, other, x, dy = layers("LSTM", SHAPES["char-PTB"], dtype)
        for what, make in (("forward, host", forward), ("training step, host", training)):
            ours, theirs = make(layer, x, dy), make(other, x, dy)
            both = [(on_host(ours), on_host(theirs)) for _ in range(3 * asked.pairs)]
            goal = 0.15 / (1e3 * statistics.median(b for _, b in both))
            yield row("gpu host", "LSTM", what, "torch.nn", "char-PTB", dtype, both, goal, 0.0)


def memory(asked: Asked) -> Iterator[Row]:
    """Peak memory of a training step beyond the layer and its input."""
    for shape, sizes in SHAPES.items():
        for dtype in asked.types if asked.has(shape) else ():
            for what, again in (
                ("zoneout, peak MiB", False),
                ("zoneout, recomputed, peak MiB", True),
            ):
                layer, other, x, dy = layers("LSTM", sizes, dtype, recompute=again)
                ours, theirs = (peak(training(one, x, dy)) for one in (layer, other))
                ratio = ours / theirs
                values = (
                    "gpu memory",
                    "LSTM",
                    what,
                    "torch.nn",
                    shape,
                    dtype,
                    ours,
                    theirs,
                    ratio,
                    ratio,
                    ratio,
                )
                yield Row(*values, 1.0, 0.0, **here())


CELL_SHAPES = ("char-PTB", "512", "pMNIST", "speech decoder")
LONG = (1024, 16, 1024, 1024, 1)  # for cells without a product in the loop
BEYOND = 0.3  # milliseconds that such a cell may take beyond its input product
SLSTM_SHAPE, SLSTM_LIMIT = (1024, 16, 768, 768, 1), 9.0
MOGRIFIER_SHAPE, MOGRIFIER_RANK = (70, 64, 950, 950, 1), 84
FIRST_CALLS = {"cold cache": 5.0, "warm cache": 0.3}  # seconds


def cells(asked: Asked) -> Iterator[Row]:
    """Cells that are written as equations: kernels are generated from them."""
    for shape, dtype in itertools.product(filter(asked.has, CELL_SHAPES), asked.types):
        ours, against, x, dy = layers("LSTM", SHAPES[shape], dtype)
        peephole = own_layer(zo.cells.peephole_lstm, SHAPES[shape], dtype)
        for what, other, goal in (("ours, zoneout", ours, 1.05), ("torch.nn", against, 1.0)):
            yield from own_row(peephole, other, x, dy, what, shape, dtype, asked.pairs, goal)
    if asked.has("char-PTB") and "bf16" in asked.types:
        x, dy = layers("LSTM", SHAPES["char-PTB"], "bf16")[2:]
        peephole, loop = (
            own_layer(zo.cells.peephole_lstm, SHAPES["char-PTB"], "bf16") for _ in range(2)
        )
        loop.backend = "reference"
        both = timed(training(peephole, x, dy), training(loop, x, dy), min(3, asked.pairs))
        what = ("peephole_lstm", "zoneout, eager", "a Python loop, eager", "char-PTB", "bf16")
        yield row("gpu cells", *what, both, 1 / 20, parity(peephole, x, {}))
    if asked.has("long"):
        for cell in (zo.cells.mingru, zo.cells.indrnn):
            yield from beyond_the_product(cell, asked.pairs)
    if asked.has("sLSTM"):
        _, other, x, dy = layers("LSTM", SLSTM_SHAPE, "bf16")
        layer = own_layer(zo.cells.slstm, SLSTM_SHAPE, "bf16")
        yield from own_row(
            layer, other, x, dy, "torch.nn", "sLSTM", "bf16", asked.pairs, limit=SLSTM_LIMIT
        )
    if asked.has("Mogrifier"):
        other, _, x, dy = layers("LSTM", MOGRIFIER_SHAPE, "bf16")
        layer = own_layer(mogrifier, MOGRIFIER_SHAPE, "bf16")
        yield from own_row(
            layer, other, x, dy, "ours, zoneout", "Mogrifier", "bf16", asked.pairs, 4.0
        )
    if asked.has("first call"):
        yield from first_calls()


@zo.cell(gates=1, states=("h", "c"), recurrence="none", bounded=True, checked=False)
def mogrifier(x, h, c, a1, b1, a2, b2, a3, b3, a4, b4, a5, b5, w, u, b_i, b_f, b_g, b_o):  # type: ignore[no-untyped-def]
    """The Mogrifier LSTM with five rounds, whose matrices are products of two of a lower rank."""
    (x,) = x
    for number, (a, b) in enumerate(((a1, b1), (a2, b2), (a3, b3), (a4, b4), (a5, b5))):
        of, to = (x, h) if number % 2 else (h, x)
        to = 2 * zo.product(a, zo.product(b, of, rank=MOGRIFIER_RANK)).sigmoid() * to
        x, h = (x, to) if number % 2 else (to, h)
    sums = zip(zo.product(w, x, parts=4), zo.product(u, h, parts=4), (b_i, b_f, b_g, b_o))
    i, f, g, o = (a + b + bias for a, b, bias in sums)
    c = zo.candidate("c", f.sigmoid() * c + zo.update(i.sigmoid() * g.tanh()))
    return zo.held(o.sigmoid()) * c.tanh(), c


def own_layer(cell: Any, sizes: tuple[int, ...], dtype: str) -> Any:
    """A layer of a cell, with zoneout on the states that have an expectation."""
    _, _, size, hidden, _ = sizes
    several = len(cell.states) == 2
    noise = zo.Zoneout(cell=0.5, hidden=0.05) if several else zo.Zoneout(hidden=0.05)
    torch.manual_seed(0)
    return zo.Recurrent(cell, size, hidden, noise=noise).to("cuda", TYPES[dtype])


def own_row(
    layer: Any,
    other: Any,
    x: Any,
    dy: Any,
    against: str,
    shape: str,
    dtype: str,
    pairs: int,
    goal: float = 0.0,
    limit: float | None = None,
) -> Iterator[Row]:
    """A layer of a cell against another layer, in a graph; `limit`: milliseconds."""
    error, name = parity(layer, x, {}), layer.definition.name
    if not bench.held(f"{name} at {shape} in {dtype}", error, TOLERANCES[dtype]):
        return
    both = timed(captured(training(layer, x, dy)), captured(training(other, x, dy)), pairs)
    if limit is not None:
        goal = limit / (1e3 * statistics.median(b for _, b in both))
    yield row("gpu cells", name, "zoneout", against, shape, dtype, both, goal, error)


def beyond_the_product(cell: Any, pairs: int) -> Iterator[Row]:
    """A layer without a product in its loop against its input product and the gradients of it."""
    layer = own_layer(cell, LONG, "bf16")
    steps, batch, size, hidden, _ = LONG
    x = torch.randn(steps, batch, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(steps, batch, hidden, device="cuda", dtype=torch.bfloat16)
    weights = [layer.weight_ih_l0, layer.bias_ih_l0]
    gates = torch.randn(steps, batch, cell.gates * hidden, device="cuda", dtype=torch.bfloat16)

    def product() -> Any:
        return torch.autograd.grad(torch.nn.functional.linear(x, *weights), [x, *weights], gates)

    error = parity(layer, x, {})
    if not bench.held(f"{cell.name}, long, in bf16", error, TOLERANCES["bf16"]):
        return
    both = timed(captured(training(layer, x, dy)), captured(product), pairs)
    goal = 1 + BEYOND / (1e3 * statistics.median(b for _, b in both))
    against = "its input product"
    yield row("gpu cells", cell.name, "zoneout", against, "long", "bf16", both, goal, error)


FIRST_CALL = """
import os, time, torch, zoneout as zo
x = torch.randn(35, 20, 200, device="cuda", dtype=torch.bfloat16)
@zo.cell(gates=2)
def light(x, r, h):
    z, n = (a + b for a, b in zip(x, r))
    z = z.sigmoid()
    return z * h + zo.update((1 - z) * n.relu())
zo.LSTM(200, 200, device="cuda", dtype=torch.bfloat16)(x)[0].sum().backward()
layer = zo.Recurrent(light, 200, 200, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
began = time.perf_counter()
layer(x)[0].sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - began)
"""


def first_calls() -> Iterator[Row]:
    """A definition's first training step, in new processes, without and with its code on disk."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "first.py"
        script.write_text(FIRST_CALL)
        for what, limit in FIRST_CALLS.items():
            done = subprocess.run(
                [sys.executable, script],
                env=os.environ | {"ZONEOUT_CACHE": str(Path(folder) / "cache")},
                check=True,
                capture_output=True,
                text=True,
            )
            seconds = float(done.stdout)
            yield row(
                "gpu cells", "light", what, "the goal", "first call", "bf16",
                [(seconds, limit)], 1.0, 0.0,
            )  # fmt: skip


SYSTEMS = ("char_ptb_hyper_lstm", "char_ptb_hm_lstm", "char_ptb_surprisal_zoneout")
CAPTURED = 1 / 20  # of the eager loop's time


def systems(asked: Asked) -> Iterator[Row]:
    """An update of the systems that loop in torch calls, captured, against the eager loop.

    It is the training tool's own update, with the optimizer. The first compiled update of a system
    takes some ten seconds.
    """
    for name, dtype in itertools.product(filter(asked.has, SYSTEMS), asked.types):
        cell = RECIPES[name].make().model.cell
        eager = step_of(name, dtype, compiled=False)
        want = loss_of_first(eager)
        for what, compiled in (("update, graph", False), ("update, graph, compiled", True)):
            step = step_of(name, dtype, compiled=compiled)
            step.capture()
            error = abs(loss_of_first(step) / want - 1)
            if not bench.held(f"{name}, {what} in {dtype}", error, TOLERANCES[dtype]):
                continue
            both = timed(step_again(step), step_again(eager), min(3, asked.pairs))
            yield row(
                "gpu systems", cell, what, "the loop, eager", name, dtype, both, CAPTURED, error
            )


def step_of(name: str, dtype: str, compiled: bool, **changes: Any) -> Step:
    """The update of a recipe on a made-up text of four batches."""
    changes = {"precision": dtype, "device": "cuda", "system.compile": compiled} | changes
    config = change(RECIPES[name].make(), changes)
    device = torch.device(config.device)
    size = 4 * config.batches.size * (config.batches.length + 1)
    text = np.random.default_rng(0).integers(0, 50, size).astype(np.uint8)
    data = Corpus(
        name, "char", Vocabulary("char", tuple(map(chr, range(65, 115)))), text, text, text, ""
    )
    step = Step(
        build(config, 50).to(device), make_feed(config, data, device), config, Processes(device)
    )
    step.begin(0, 0, 0)
    return step


def step_again(step: Step) -> Callable[[], Any]:
    """A run of the update, always on the first batch."""

    def run() -> None:
        step.position.zero_()
        step()

    return run


def loss_of_first(step: Step) -> float:
    step_again(step)()
    return float(step.nats)


# --- how it is measured ---------------------------------------------------------------------------


def layers(
    name: str, sizes: tuple[int, ...], dtype: str, **options: Any
) -> tuple[Any, Any, Any, Any]:
    """Ours and theirs, an input, and the derivative of the output."""
    torch.manual_seed(0)
    steps, batch, size, hidden, count = sizes
    ours, theirs = LAYERS[name]
    layer = ours(size, hidden, count, **{"noise": ZONEOUT[name], **options}).to(
        "cuda", TYPES[dtype]
    )
    other = theirs(size, hidden, count, bidirectional=layer.bidirectional).to("cuda", TYPES[dtype])
    other.flatten_parameters()
    x = torch.randn(steps, batch, size, device="cuda", dtype=TYPES[dtype], requires_grad=True)
    outputs = 2 * hidden if layer.bidirectional else hidden
    return layer, other, x, torch.randn(steps, batch, outputs, device="cuda", dtype=TYPES[dtype])


def training(layer: Any, x: Any, dy: Any, **call: Any) -> Callable[[], Any]:
    wanted = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x, **call)[0], wanted, dy, allow_unused=True)


def forward(layer: Any, x: Any, dy: Any) -> Callable[[], Any]:
    return lambda: layer(x)


def compare(
    group: str,
    name: str,
    shape: str,
    sizes: tuple[int, ...],
    dtype: str,
    pairs: int,
    limit: float | None = None,
) -> Iterator[Row]:
    """A layer against torch.nn's: in a graph and eager."""
    layer, other, x, dy = layers(name, sizes, dtype)
    error = parity(layer, x, {})
    ours, theirs = training(layer, x, dy), training(other, x, dy)
    if not bench.held(f"{name} at {shape} in {dtype}", error, TOLERANCES[dtype]):
        return
    for mode in ("graph", "eager"):
        pair = (captured(ours), captured(theirs)) if mode == "graph" else (ours, theirs)
        both = timed(*pair, pairs)
        goal = NOISE
        if limit is not None and mode == "graph":
            goal = limit / (1e3 * statistics.median(b for _, b in both))
        yield row(f"{group} {mode}", name, "zoneout", "torch.nn", shape, dtype, both, goal, error)


def variant(
    group: str,
    name: str,
    what: str,
    shape: str,
    dtype: str,
    pairs: int,
    how: dict[str, Any],
    goal: float,
) -> Iterator[Row]:
    """A layer against one with plain zoneout, in a graph."""
    how = dict(how)
    call = {key: how.pop(key) for key in ("lengths", "resets", "return_cells") if key in how}
    layer, _, x, dy = layers(name, SHAPES[shape], dtype, **how)
    plain = layers(name, SHAPES[shape], dtype)[0]
    error = parity(layer, x, call)
    allowed = TOLERANCES[dtype]
    if (
        not error <= allowed
    ):  # something magnifies rounding: twice what torch's own calls in that type are off by
        same = copy.deepcopy(layer)
        same.backend = "reference"
        own_type = patch.object(reference, "_HALF", ())  # in that type itself, not in float32
        with products_in("tf32" if dtype == "tf32" else "fp32", x.device), own_type:
            allowed = max(allowed, 2 * parity(same, x, call))
    if not bench.held(f"{name}, {what} in {dtype}", error, allowed):
        return
    both = timed(captured(training(layer, x, dy, **call)), captured(training(plain, x, dy)), pairs)
    yield row(group, name, what, "ours, zoneout", shape, dtype, both, goal, error)


def directions(name: str, shape: str, dtype: str, pairs: int) -> Iterator[Row]:
    """A layer with both directions against one with plain zoneout, and against torch.nn's with
    both, in a graph.
    """
    layer, other, x, dy = layers(name, SHAPES[shape], dtype, bidirectional=True)
    error = parity(layer, x, {})
    if not bench.held(f"{name}, both directions at {shape} in {dtype}", error, TOLERANCES[dtype]):
        return
    plain, _, _, of_one = layers(name, SHAPES[shape], dtype)
    for against, theirs, goal in (
        ("ours, zoneout", training(plain, x, of_one), 1.5),
        ("torch.nn, both directions", training(other, x, dy), NOISE),
    ):
        both = timed(captured(training(layer, x, dy)), captured(theirs), pairs)
        yield row(
            "gpu combination",
            name,
            "zoneout, both directions",
            against,
            shape,
            dtype,
            both,
            goal,
            error,
        )


def packed(name: str, shape: str, dtype: str, pairs: int) -> Iterator[Row]:
    """A packed batch against its padded form, and against torch.nn's, eager: its sizes are on
    the host.
    """
    layer, other, x, dy = layers(name, SHAPES[shape], dtype)
    lengths = mixed_lengths(*SHAPES[shape][:2])
    error = parity(layer, x, {"lengths": lengths.cuda()})
    if not bench.held(f"{name}, packed input at {shape} in {dtype}", error, TOLERANCES[dtype]):
        return
    given, d = (
        torch.nn.utils.rnn.pack_padded_sequence(v.detach(), lengths, enforce_sorted=False)
        for v in (x, dy)
    )
    given.data.requires_grad_()

    def of(one: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(
            one(given)[0].data, [given.data, *one.parameters()], d.data
        )

    for against, theirs in (
        ("ours, with lengths", training(layer, x, dy, lengths=lengths.cuda())),
        ("torch.nn, packed", of(other)),
    ):
        both = timed(of(layer), theirs, pairs)
        yield row(
            "gpu combination", name, "zoneout, packed", against, shape, dtype, both, NOISE, error
        )


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """A run as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def timed(
    ours: Callable[[], Any], theirs: Callable[[], Any], pairs: int
) -> list[tuple[float, float]]:
    """Seconds of both, in turn."""
    for run in (ours, theirs, ours, theirs):
        run()
    return [(clock(ours), clock(theirs)) for _ in range(pairs)]


def clock(run: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def on_host(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def peak(run: Callable[[], Any]) -> float:
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def parity(layer: Any, x: Any, call: dict[str, Any], steps: int = 12) -> float:
    """The largest relative error over the first steps, against the reference in double
    precision.
    """
    x = x.detach()[:steps]
    call = dict(call)
    if "resets" in call:
        call["resets"] = call["resets"][:steps]
    if "lengths" in call:
        call["lengths"] = call["lengths"].clamp(max=steps)
    exact = copy.deepcopy(layer).double()
    exact.backend = "reference"
    results = []
    for one in (layer, exact):
        given = x.to(one.weight_ih_l0.dtype).requires_grad_()
        y, state, *_ = one(given, seed=7, **call)
        states = state if isinstance(state, tuple) else (state,)
        weights = torch.randn(
            y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        wanted = [given, *one.parameters()]
        grads = torch.autograd.grad((y * weights.to(y)).sum(), wanted, allow_unused=True)
        results.append([v.detach().double() for v in (y, *states, *grads) if v is not None])
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(*results))


def row(
    group: str,
    layer: str,
    what: str,
    against: str,
    shape: str,
    dtype: str,
    times: Any,
    goal: float,
    error: float,
) -> Row:
    return Row(
        group, layer, what, against, shape, dtype, *bench.summary(times), goal, error, **here()
    )


def here() -> dict[str, Any]:
    return bench.here() | {"backend": "cuda", "device": torch.cuda.get_device_name(), "threads": 0}


if __name__ == "__main__":
    main()
