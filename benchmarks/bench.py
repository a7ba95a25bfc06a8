"""Measure the layers against torch.nn on this machine: `make bench`.

Every ratio is the median over paired runs, ours and theirs in turn in one process, ours divided by
theirs: below 1 is faster. Before a ratio is taken, the layer that is timed is held to the reference
backend in double precision, on outputs, final states and every gradient, with the same seed; where
that check fails there is no ratio. Rows are written to benchmarks/results.csv, an older row of the
same measurement on the same device being replaced.

    python benchmarks/bench.py                  # everything, a few minutes
    python benchmarks/bench.py train eval       # only these groups
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import zoneout as zo
from zoneout.ops import TOLERANCES
from zoneout.ops.cpu.native import load

RESULTS = Path(__file__).parent / "results.csv"
SHAPES = {  # (T, B, input, H)
    "char-PTB": (100, 32, 50, 1000),
    "pMNIST": (784, 100, 1, 100),
    "medium": (100, 32, 256, 256),
    "small": (100, 32, 64, 128),
}
LAYERS: dict[str, tuple[Any, Any]] = {
    "LSTM": (zo.LSTM, nn.LSTM),
    "GRU": (zo.GRU, nn.GRU),
    "RNN": (zo.RNN, nn.RNN),
}
ZONEOUT = {
    "LSTM": zo.Zoneout(cell=0.5, hidden=0.05),
    "GRU": zo.Zoneout(hidden=0.1),
    "RNN": zo.Zoneout(hidden=0.1),
}
GOALS = {
    "train": 1.0, "eval": 1.3, "packed": 1.0, "torch calls": 1.8, "combination": 1.5, "norm": 2.0,
    "memory": 1.0, "cell": 2.0,
}  # fmt: skip
CELLS = {
    "LSTM": (zo.LSTMCell, nn.LSTMCell),
    "GRU": (zo.GRUCell, nn.GRUCell),
    "RNN": (zo.RNNCell, nn.RNNCell),
}
STEPS = {"1 row of 64": (1, 64), "32 rows of 256": (32, 256), "64 rows of 512": (64, 512)}  # B, H


@dataclass
class Row:
    """One measurement: what was timed, against what, and what came out."""

    group: str
    layer: str
    what: str
    against: str
    shape: str
    dtype: str
    ours: float  # milliseconds, or MiB
    theirs: float
    ratio: float
    low: float  # the quartiles of the paired ratios
    high: float
    goal: float
    error: float  # relative error against the reference
    backend: str
    device: str
    threads: int
    torch: str
    python: str
    date: str


def main() -> None:
    groups: dict[str, Callable[[int], Iterator[Row]]] = {
        "train": train, "eval": evaluate, "packed": packed, "combinations": combinations,
        "memory": memory, "torch-calls": torch_calls, "bf16": half, "cells": cells,
    }  # fmt: skip
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "groups", nargs="*", metavar="GROUP", help=f"of {', '.join(groups)}; all by default"
    )
    parser.add_argument("--pairs", type=int, default=15, help="paired runs a ratio (default 15)")
    parser.add_argument("--dry-run", action="store_true", help="write nothing to results.csv")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        return print(peak_memory(*args.memory_of.split(",")))
    if unknown := set(args.groups) - set(groups):
        parser.error(f"expected groups of {', '.join(groups)}; got {', '.join(sorted(unknown))}")
    if load() is None:
        print("No compiled loop here: the ratios are those of torch calls.")
    rows: list[Row] = []
    for name in args.groups or groups:
        for row in groups[name](args.pairs):
            rows.append(row)
            print(line(row), flush=True)
        if not args.dry_run:
            write(rows)
    missed = [row for row in rows if not row.ratio <= row.goal]
    print(f"\n{len(rows)} ratios, {len(rows) - len(missed)} within their goal.")
    for row in missed:
        print("missed:", line(row))


# --- what is measured -----------------------------------------------------------------------------


def train(pairs: int) -> Iterator[Row]:
    """Forward and backward, zoneout on, against torch.nn without."""
    for name in LAYERS:
        for shape in SHAPES:
            yield measure("train", name, shape, pairs)


def evaluate(pairs: int) -> Iterator[Row]:
    """Forward in evaluation, the expectation of zoneout in it, against torch.nn without."""
    for name in LAYERS:
        for shape in SHAPES:
            yield measure("eval", name, shape, pairs)


def packed(pairs: int) -> Iterator[Row]:
    """Packed input of mixed lengths against the same batch padded, both ours, and against
    nn.LSTM's packed path.
    """
    for name in LAYERS:
        for shape in SHAPES:
            yield measure("packed", name, shape, pairs, what="packed", against="ours, padded")
    for shape in SHAPES:
        few = 1 if shape == "pMNIST" else min(5, pairs)  # nn.LSTM takes some twenty seconds there
        yield measure("packed", "LSTM", shape, few, what="packed", against="torch.nn, packed")


def combinations(pairs: int) -> Iterator[Row]:
    """Everything else that runs fused, against plain zoneout."""
    shape = "small"
    for name in LAYERS:
        for what in variants(name):
            group = "norm" if "norm" in what else "combination"
            yield measure(group, name, shape, pairs, what=what, against="ours, zoneout")
    for what in ("layer norm", "batch norm"):
        yield measure("norm", "LSTM", "pMNIST", pairs, what=what, against="ours, zoneout")


def torch_calls(pairs: int) -> Iterator[Row]:
    """The loop without a compiler, in a process of its own."""
    command = [sys.executable, __file__, "train", "--dry-run", "--pairs", str(pairs)]
    if load() is None:
        return
    environment = {**os.environ, "ZONEOUT_NATIVE": "0", "ZONEOUT_BENCH_ROWS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    for text in done.stdout.splitlines():
        if text.startswith("row "):
            values = dict(zip((f.name for f in fields(Row)), next(csv.reader([text[4:]]))))
            row = Row(
                **{
                    f.name: {"float": float, "int": int}.get(str(f.type), str)(values[f.name])
                    for f in fields(Row)
                }
            )
            row.group, row.what, row.goal = (
                "torch calls",
                "zoneout, no compiler",
                GOALS["torch calls"],
            )
            yield row


def memory(pairs: int) -> Iterator[Row]:
    """Peak memory of a training step beyond what the process had before, each in a process of
    its own.
    """
    for name in LAYERS:
        for shape in SHAPES:
            ours, theirs = (_peak_of(who, name, shape) for who in ("ours", "torch.nn"))
            yield Row(
                "memory", name, "zoneout, peak MiB", "torch.nn", shape, "float32", ours, theirs,
                ours / theirs, ours / theirs, ours / theirs, GOALS["memory"], 0.0, **here(),
            )  # fmt: skip


def half(pairs: int) -> Iterator[Row]:
    """Under autocast to bfloat16, against nn.LSTM under the same."""
    for shape in SHAPES:
        yield measure("train", "LSTM", shape, pairs, dtype="bfloat16")


def cells(pairs: int) -> Iterator[Row]:
    """One step of a cell, at evaluation and forwards and backwards in training, against
    torch.nn's without noise.
    """
    for name, (ours, theirs) in CELLS.items():
        for shape, (batch, size) in STEPS.items():
            torch.manual_seed(0)
            cell, other = ours(size, size, noise=ZONEOUT[name]), theirs(size, size)
            x, h = torch.randn(batch, size), torch.randn(batch, size)
            state = (h, h) if name == "LSTM" else h
            for what, training in (("zoneout, evaluation", False), ("zoneout, training", True)):
                cell.train(training)
                error = cell_parity(cell, x, state)
                right = held(f"{name} {what} at {shape}", error, TOLERANCES[torch.float32])
                found = summary(cell_times(cell, other, x, state, training, pairs) if right else [])
                yield Row(
                    "cell",
                    name,
                    what,
                    "torch.nn",
                    shape,
                    "float32",
                    *found,
                    GOALS["cell"],
                    error,
                    **here(),
                )


def cell_times(
    cell: Any, other: Any, x: Tensor, state: Any, training: bool, pairs: int
) -> list[tuple[float, float]]:
    """Seconds of a step of both, in turn, each the mean of many."""
    many = 200

    def run(one: Any) -> None:
        with torch.set_grad_enabled(training):
            for _ in range(many):
                out = one(x, state)
                if training:
                    (out[0] if isinstance(out, tuple) else out).sum().backward()
        one.zero_grad()

    run(cell), run(other)
    return [
        (clock(lambda: run(cell)) / many, clock(lambda: run(other)) / many) for _ in range(pairs)
    ]


def cell_parity(cell: Any, x: Tensor, state: Any) -> float:
    """The largest relative error of the states and gradients of a step against the reference in
    double precision.
    """
    exact = copy.deepcopy(cell).double()
    exact.backend = "reference"
    found = []
    for one in (copy.deepcopy(cell), exact):
        dtype = one.weight_ih.dtype
        given = tuple(s.to(dtype) for s in state) if isinstance(state, tuple) else state.to(dtype)
        out = one(x.to(dtype), given, seed=7, step=3)
        states = out if isinstance(out, tuple) else (out,)
        sum(s.square().sum() for s in states).backward()
        found.append([v.detach().double() for v in (*states, *(p.grad for p in one.parameters()))])
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(*found))


def variants(
    name: str, sizes: Sequence[int] = SHAPES["small"], device: str = "cpu"
) -> dict[str, dict[str, Any]]:
    """Constructor and call arguments of each fused combination."""
    steps, batch, _, hidden = sizes
    plain = ZONEOUT[name]
    rates = {"hidden": 0.05} if name != "LSTM" else {"cell": 0.5, "hidden": 0.05}
    out: dict[str, dict[str, Any]] = {
        f"zoneout, mask={mask}": {
            "noise": zo.Zoneout(**rates, mask=mask, seed=3 if mask == "static" else None)
        }
        for mask in ("shared", "step", "sequence", "static")
    }
    out |= {
        "zoneout, rates a unit": {"noise": zo.Zoneout(hidden=torch.linspace(0, 0.1, hidden))},
        "no noise": {"noise": None},
        "state dropout": {"noise": zo.StateDropout(**rates)},
        "variational dropout": {"noise": zo.VariationalDropout(input=0.2, hidden=0.2)},
        "weight drop": {"noise": zo.WeightDrop(rate=0.2)},
        "weight noise": {"noise": zo.WeightNoise(std=0.05)},
        "zoneout, resets": {
            "noise": plain,
            "resets": torch.rand(steps, batch, device=device) < 0.05,
        },
        "zoneout, lengths": {"noise": plain, "lengths": mixed_lengths(steps, batch).to(device)},
        "zoneout, learned initial state": {"noise": plain, "learn_initial_state": True},
        "zoneout, layer norm": {"noise": plain, "norm": "layer"},
        "zoneout, batch norm": {"noise": plain, "norm": zo.RecurrentBatchNorm(steps)},
    }
    if name != "RNN":
        out["recurrent dropout"] = {"noise": zo.RecurrentDropout(rate=0.25)}
    if name == "LSTM":
        out["recurrent dropout, held gate"] = {
            "noise": zo.RecurrentDropout(rate=0.25, hold_output_gate=True)
        }
        out["zoneout, cells returned"] = {"noise": plain, "return_cells": True}
    return out


# --- how it is measured ---------------------------------------------------------------------------


def mixed_lengths(steps: int, batch: int) -> Tensor:
    """Lengths from a tenth of the steps to all of them."""
    return torch.linspace(steps / 10, steps, batch).round().long()[torch.randperm(batch)]


def measure(
    group: str,
    name: str,
    shape: str,
    pairs: int,
    what: str = "zoneout",
    against: str = "torch.nn",
    dtype: str = "float32",
) -> Row:
    """One row: two functions made, one held to the reference, and both timed in turn."""
    torch.manual_seed(0)
    steps, batch, size, hidden = SHAPES[shape]
    ours, theirs = LAYERS[name]
    x = torch.randn(steps, batch, size)
    options = dict(variants(name).get(what, {"noise": ZONEOUT[name]}))
    if what in ("layer norm", "batch norm"):
        options |= {"norm": "layer" if what == "layer norm" else zo.RecurrentBatchNorm(steps)}
    call = {
        key: options.pop(key) for key in ("resets", "lengths", "return_cells") if key in options
    }
    layer = ours(size, hidden, **options)
    input: Any = x
    lengths = mixed_lengths(steps, batch)
    if what == "packed":
        input = pack_padded_sequence(x, lengths, enforce_sorted=False)
    training = group != "eval"
    other_input: Any = x
    if against.startswith("ours"):
        other = ours(size, hidden, noise=ZONEOUT[name])
    else:
        other = theirs(size, hidden)
        other_input = input if against.endswith("packed") else x
    layer.train(training), other.train(training)
    autocast = dtype == "bfloat16"
    error = parity(layer, input, call, autocast)
    limit = TOLERANCES[getattr(torch, dtype)]
    times: list[tuple[float, float]] = []
    if held(f"{name} {what} at {shape}", error, limit):
        pair = (
            lambda: step(layer, input, call, training, autocast),
            lambda: step(other, other_input, {}, training, autocast),
        )
        for run in pair:
            run()
        times = [(clock(pair[0]), clock(pair[1])) for _ in range(pairs)]
    row = Row(
        group, name, what, against, shape, dtype, *summary(times), GOALS[group], error, **here()
    )
    if os.environ.get("ZONEOUT_BENCH_ROWS"):
        print("row", ",".join(f'"{v}"' for v in asdict(row).values()), flush=True)
    return row


def held(what: str, error: float, allowed: float) -> bool:
    """Whether what is timed is right; where it is not there is no ratio, which is said."""
    if not error <= allowed:
        print(
            f"no ratio for {what}: error {error:.1e} against the reference, allowed {allowed:.1e}"
        )
    return error <= allowed


def summary(times: list[tuple[float, float]]) -> tuple[float, float, float, float, float]:
    """Of paired seconds: both medians in milliseconds, the median of the ratios and their
    quartiles.
    """
    times = times or [(float("nan"), float("nan"))]
    ratios = sorted(a / b for a, b in times)
    ours, theirs = (1e3 * statistics.median(side) for side in zip(*times))
    quarter = len(ratios) // 4
    return ours, theirs, statistics.median(ratios), ratios[quarter], ratios[-1 - quarter]


def clock(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def step(
    layer: nn.Module, input: Any, call: dict[str, Any], training: bool, autocast: bool
) -> None:
    """What is timed."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if not training:
            with torch.no_grad():
                layer(input, **call)
            return
        y = layer(input, **call)[0]
    y = y if isinstance(y, Tensor) else y.data
    y.backward(torch.ones_like(y))
    layer.zero_grad()


def parity(layer: Any, input: Any, call: dict[str, Any], autocast: bool) -> float:
    """The largest relative error of outputs, final states and gradients against the reference in
    double precision.
    """
    if (
        layer.norm is not None
    ):  # beyond some steps the reference in single precision is as far from itself in double
        input = input[:20]
        call = {name: value[:20] if name == "resets" else value for name, value in call.items()}
    exact = copy.deepcopy(layer).double()
    exact.backend = "reference"
    ours = copy.deepcopy(layer)
    results = []
    for one in (ours, exact):
        double = one is exact
        given = (
            input._replace(data=input.data.double())
            if isinstance(input, PackedSequence)
            else input.double()
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and not double):
            y, state, *_ = one(given if double else input, seed=7, **call)
        y = y.data if isinstance(y, PackedSequence) else y
        states = state if isinstance(state, tuple) else (state,)
        weights = torch.randn(
            y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        (y * weights.to(y.dtype)).sum().backward()
        grads = [p.grad for p in one.parameters() if p.grad is not None]
        results.append([v.detach().double() for v in (y, *states, *grads)])
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(*results))


def _peak_of(who: str, name: str, shape: str) -> float:
    command = [sys.executable, __file__, "--memory-of", f"{who},{name},{shape}"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def peak_memory(who: str, name: str, shape: str) -> float:
    """MiB that three training steps need beyond a process that has run a tiny one."""
    steps, batch, size, hidden = SHAPES[shape]
    ours, theirs = LAYERS[name]

    def make(*sizes: int) -> nn.Module:
        return ours(*sizes, noise=ZONEOUT[name]) if who == "ours" else theirs(*sizes)

    step(make(4, 8), torch.randn(3, 2, 4), {}, True, False)
    layer, x = make(size, hidden), torch.randn(steps, batch, size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, at what is in use now
    before = resident("VmRSS")
    for _ in range(3):
        step(layer, x, {}, True, False)
    return resident("VmHWM") - before


def resident(what: str) -> float:
    """MiB in use now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(text.split()[1]) for text in lines if text.startswith(what)) / 1024


# --- rows -----------------------------------------------------------------------------------------


def here() -> dict[str, Any]:
    """This machine, and these versions."""
    return {
        "backend": "cpu" if load() is not None else "cpu, torch calls",
        "device": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(text.split(":")[1].strip() for text in lines if text.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def line(row: Row) -> str:
    unit = "MiB" if row.group.endswith("memory") else "ms"
    mark = "" if row.ratio <= row.goal else "  over its goal"
    what = f"{row.group:12} {row.layer:5} {row.shape:9} {row.dtype:8} {row.what:28}"
    times = f"{row.ours:9.4g} {unit:3} against {row.against:17} {row.theirs:9.4g} {unit:3}"
    return (
        f"{what} {times}  ratio {row.ratio:5.2f} [{row.low:.2f}, {row.high:.2f}]  goal "
        f"{row.goal:.3g}{mark}"
    )


def write(rows: list[Row]) -> None:
    """Put the rows in the file, in the place of older ones of the same measurement on the same
    device.
    """

    def key(row: dict[str, str]) -> tuple[str, ...]:
        return tuple(
            str(row[name])
            for name in ("group", "layer", "what", "against", "shape", "dtype", "device", "threads")
        )

    names = [f.name for f in fields(Row)]
    kept: dict[tuple[str, ...], dict[str, str]] = {}
    if RESULTS.exists():
        with RESULTS.open() as file:
            kept = {key(row): row for row in csv.DictReader(file)}
    for row in rows:
        values = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in asdict(row).items()}
        kept[key(values)] = values
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept.values())


if __name__ == "__main__":
    main()
