"""A small case of every kernel, for compute-sanitizer on a GPU:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/every_kernel.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/every_kernel.py

Names of paths after it, `rows`, `optimizers` or `cells`, run those alone. Without torch's cache of
memory every tensor has an allocation of its own, so that a step over its end is seen.
"""

import sys
from functools import partial

import torch
from products import authors_gru, low_rank
from test_cuda_cells import SIZES, fitting_cell
from torch.nn.utils.rnn import pack_padded_sequence

import zoneout as zo
from zoneout.ops import cuda
from zoneout.ops.cuda.runtime.compiler import Chip
from zoneout.paper.training.config import Optimizer as Settings
from zoneout.paper.training.optimizers import Optimizer

PATHS = {
    "small": (cuda.batch, cuda.small),
    "persistent": (cuda.persistent,),
    "warpgroup": (cuda.warpgroup,),
    "steps": (),
}
STEPS, BATCH, INPUT, HIDDEN = 4, 9, 5, 19


def main() -> None:
    """Run them all, forwards and backwards."""
    torch.backends.cudnn.rnn.fp32_precision = "tf32"
    for path in sys.argv[1:] or (*PATHS, *OTHERS):
        if path in OTHERS:
            OTHERS[path]()
            continue
        cuda.PATHS = (*PATHS[path], cuda.steps)
        if path == "warpgroup":  # it takes little else
            cuda.warpgroup.persistent_plan = lambda *_, **__: None  # though it would be faster
            for hidden, processors in ((24, 132), (200, 13)):  # two groups, and two turns
                cuda.warpgroup.chip = lambda device, processors=processors: Chip(
                    processors, 232448, 9
                )
                run(zo.LSTM, torch.bfloat16, None, plain=True, batch=70, hidden=hidden)
            print(path, zo.LSTM.__name__, flush=True)
            continue
        for kind in (zo.LSTM, zo.GRU, zo.RNN):
            for norm in (
                (None,) if path == "persistent" else (None, "layer", zo.RecurrentBatchNorm(STEPS))
            ):
                for dtype in (torch.bfloat16, torch.float32):
                    run(kind, dtype, norm, plain=True)
                    run(
                        kind,
                        dtype,
                        norm,
                        plain=True,
                        lengths=torch.arange(BATCH, device="cuda") % STEPS + 1,
                    )
                run(kind, torch.bfloat16, norm, plain=False)
            print(path, kind.__name__, flush=True)
        if (
            path == "persistent"
        ):  # its last block has places past the depth, and h goes in half precision
            for dtype in (torch.bfloat16, torch.float32):
                run(zo.LSTM, dtype, None, plain=True, batch=48, hidden=512)
            print(path, "wide", flush=True)


def run(kind, dtype, norm, plain, batch=BATCH, hidden=HIDDEN, lengths=None):
    """One training step; kernels are built for what it has: nothing but zoneout and these
    lengths, or everything.
    """
    has_update, has_matrix = kind is not zo.RNN, True
    if isinstance(kind, partial):
        (cell,) = kind.args
        has_update, has_matrix = "update" in cell.marks, cell.has_r
    noise = [zo.Zoneout(cell=0.5, hidden=0.1) if kind is zo.LSTM else zo.Zoneout(hidden=0.1)]
    if not plain:
        noise += [zo.WeightNoise(std=0.05)]
        noise += [zo.VariationalDropout(hidden=0.2)] if has_matrix else []
        noise += [zo.RecurrentDropout(rate=0.1)] if has_update else []
    options = {} if plain else {"num_layers": 2, "dropout": 0.2}
    layer = kind(
        INPUT, hidden, noise=noise, norm=norm, dtype=dtype, device="cuda", backend="cuda", **options
    )
    x = torch.randn(STEPS, batch, INPUT, dtype=dtype, device="cuda", requires_grad=True)
    lengths = lengths if plain else torch.arange(batch, device="cuda") % STEPS + 1
    resets = None if plain else torch.rand(STEPS, batch, device="cuda") < 0.3
    y, _ = layer(x, lengths=lengths, resets=resets)
    y.float().square().sum().backward()
    torch.cuda.synchronize()


def optimizers():
    """A few steps of every rule, on parameters of odd sizes."""
    rate = torch.tensor(0.1, dtype=torch.float64, device="cuda")
    for rule in ("sgd", "rmsprop", "adam"):
        for paper in (False, True):
            parameters = {str(n): torch.randn(n, 7, device="cuda") for n in (1, 33, 600)}
            optimizer = Optimizer(
                parameters, Settings(rule, paper=paper, momentum=0 if rule == "adam" else 0.9)
            )
            for _ in range(3):
                optimizer.step([torch.randn_like(p) for p in parameters.values()], rate)
        torch.cuda.synchronize()
        print("optimizers", rule, flush=True)


def rows():
    """Packed input in every type, with rows of odd widths and addresses, and the states at the
    ends.
    """
    lengths = torch.tensor([3, 3, 2, 0], device="cuda")
    starts, total = torch.tensor([0, 3, 6], device="cuda"), 8
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool):
        for width in (1, 3, 8, 37):
            whole = torch.ones(4, 4, width + 1, dtype=dtype, device="cuda")
            for v in (
                whole[:3, :, :width].contiguous(),
                whole[:3, :, 1:],
                whole[:, :3, 1:].transpose(0, 1),
            ):
                packed = cuda.rows.packed(v, starts, lengths, total)
                cuda.rows.unpacked(packed, starts, lengths), cuda.rows.zero_past_lengths(v, lengths)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        h, c = torch.ones(12, 37, dtype=dtype, device="cuda"), torch.ones(12, 51, device="cuda")
        cuda.rows.clear(lengths, 3, h, c)
        for reverse in (False, True):
            for ends in (lengths, None):
                cuda.rows.final_states([(h, h[:4]), (c, c[:4])], 3, ends, reverse, dtype)
        for width in (1, 3, 8, 37):
            cuda.rows.split_columns(
                torch.ones(5, width + 9, dtype=dtype, device="cuda"),
                [(0, width), (width, 8), (width, 1)],
            )
        layer = zo.LSTM(
            INPUT,
            HIDDEN,
            bidirectional=True,
            noise=zo.Zoneout(cell=0.5, hidden=0.1),
            dtype=dtype,
            device="cuda",
        )
        x = torch.randn(STEPS, BATCH, INPUT, dtype=dtype, device="cuda", requires_grad=True)
        packed = pack_padded_sequence(x, torch.arange(BATCH) % STEPS + 1, enforce_sorted=False)
        layer(packed)[0].data.float().square().sum().backward()
    torch.cuda.synchronize()
    print("rows", flush=True)


@zo.cell(gates=2, states=("h", "c"))
def with_matrix(x, r, h, c, p):
    new = zo.candidate("c", (x[0] + p * r[0]).sigmoid() * c + zo.update((x[1] + r[1]).tanh()))
    return new.tanh(), new


@zo.cell(gates=2, recurrence="blocks", heads=2)
def with_heads(x, r, h):
    z = (x[0] + r[0]).sigmoid()
    return z * h + (1 - z) * (x[1] + r[1]).tanh()


@zo.cell(gates=1, recurrence="diagonal")
def without_matrix(x, h, u):
    return (x[0] + u * h).tanh()


# 8 gates and 4 states with a value stored beside the gates, a gate that is held, and 6 gates.
RANDOM = [fitting_cell(number, *SIZES[number][:3]) for number in (3, 4, 5)]


def cells():
    """Generated kernels: a matrix for h, heads, none, and products inside the step; sizes that are
    read in fours or not.
    """
    for cell in (with_matrix, with_heads, without_matrix, authors_gru, low_rank, *RANDOM):
        for dtype in (torch.bfloat16, torch.float32):
            for hidden in (18, 33) if cell.heads == 3 else (18, 32):
                for path in cuda.GENERATED_PATHS:  # what it cannot run goes step by step
                    every, cuda.GENERATED_PATHS = (
                        cuda.GENERATED_PATHS,
                        (path, cuda.cell_steps, cuda.diagonal),
                    )
                    kind = partial(zo.Recurrent, cell)
                    run(kind, dtype, None, plain=True, hidden=hidden)
                    run(kind, dtype, None, plain=False, hidden=hidden)
                    cuda.GENERATED_PATHS = every
        print("cells", cell.name, flush=True)
    for hidden in (18, 32):  # masks that are computed, with gradients
        noise = zo.Zoneout(hidden=0.1, mask="rate")
        layer = zo.Recurrent(with_matrix, INPUT, hidden, noise=noise, device="cuda")
        rates = torch.rand(STEPS, BATCH, hidden, device="cuda", requires_grad=True)
        layer(torch.randn(STEPS, BATCH, INPUT, device="cuda"), rates={"hidden": rates})[
            0
        ].sum().backward()
    torch.cuda.synchronize()
    print("cells", "given masks", flush=True)


OTHERS = {"rows": rows, "optimizers": optimizers, "cells": cells}

if __name__ == "__main__":
    main()
