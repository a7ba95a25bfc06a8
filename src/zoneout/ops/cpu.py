"""The loop over time on the CPU: in C where a compiler is found, else in torch calls."""

from __future__ import annotations

import ctypes
import math
import warnings
from contextlib import nullcontext, suppress
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import native, plain
from .interface import Run
from .loop import Backward, Loop, sees
from .rows import Packed

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


ROWS = Packed
WIDE = True  # half types are worked on in float32


def check(r: Run) -> None:
    """Everything runs here."""


products = nullcontext  # the precision of float32 products is not ours to choose


def scratch(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Unwritten memory for the length of one call: what an earlier call gave back, or new."""
    kept = _kept.get((dtype, math.prod(shape)))
    if kept and not torch.are_deterministic_algorithms_enabled():  # those fill new memory with NaN, to find mistakes
        with suppress(IndexError):  # another thread was first
            return kept.pop().view(shape)
    new = like.new_empty(shape, dtype=dtype)
    prepare(new)
    return new


def give_back(*buffers: Tensor | None) -> None:
    """Keep scratch memory for the next call: its pages have been touched, which is half of what a small call costs."""
    for buffer in {id(b): b for b in buffers if b is not None}.values():
        _kept.setdefault((buffer.dtype, buffer.numel()), []).append(buffer.view(-1))
    if sum(b.nbytes for same in _kept.values() for b in same) > _MOST:
        _kept.clear()


_kept: dict[tuple[torch.dtype, int], list[Tensor]] = {}
_MOST = 2**26


def takes_x(w_ih: Tensor) -> bool:
    """Whether x·Wx is better taken inside the loop: where the weights stay in the cache beside those of h."""
    return native.load() is not None and w_ih.nbytes <= 2**19


PARTS = torch.get_num_threads  # how many partial sums the way back makes


def forward(loop: Loop) -> None:
    """Run the loop forwards: gates, states and what the way back needs are written into `loop`."""
    library = native.load()
    if library is None:
        _say_once(native.why_not())
        return plain.forward(loop)
    _call(library, "forward", loop, None)


def backward(loop: Loop, back: Backward) -> None:
    """Run the loop backwards: the derivatives are written into `back`."""
    library = native.load()
    if library is None:
        return plain.backward(loop, back)
    _call(library, "backward", loop, back)


def prepare(*buffers: Tensor | None) -> None:
    """Make ready buffers that were just allocated and will be written whole."""
    library = native.load()
    for buffer in buffers:
        if library is not None and buffer is not None and buffer.nbytes >= _LARGE:
            library.zoneout_large_pages(buffer.data_ptr(), buffer.nbytes)


_LARGE = 2**22


@cache
def _say_once(reason: str) -> None:
    warnings.warn(
        f"zoneout's compiled loop is not available: {reason}. The same loop runs in torch calls, more slowly.",
        stacklevel=2,
    )


def _call(library: ctypes.CDLL, name: str, loop: Loop, back: Backward | None) -> None:
    kind = "double" if loop.gates.dtype == torch.float64 else "float"
    args, alive = _arguments(loop, back)
    size = getattr(library, f"zoneout_work_size_{kind}")(ctypes.byref(args))
    work = scratch(loop.gates, size + 64, dtype=torch.uint8)
    args.work = (work.data_ptr() + 63) // 64 * 64
    getattr(library, f"zoneout_{name}_{kind}")(ctypes.byref(args))
    give_back(work)
    del alive


def _arguments(loop: Loop, back: Backward | None) -> tuple[native.Loop, list[Tensor]]:
    """The struct of loop.h, and the tensors that must live as long as it is used."""
    alive: list[Tensor] = []

    def pointer(value: Tensor | None) -> int | None:
        if value is None:
            return None
        assert value.is_contiguous()
        alive.append(value)
        return value.data_ptr()

    def stream(name: str) -> native.Stream:
        draw = loop.draws.get(name)
        if draw is None:
            return native.Stream()
        step, example, unit, high = sees(draw)
        return native.Stream(
            mode=2 if draw.seed is None else 1,
            zero=draw.rule.by == "zero",
            hold=draw.rule.holds_gate,
            sees_step=step,
            sees_example=example,
            sees_unit=unit,
            high=high,
            plane=draw.plane,
            seed=0 if draw.seed is None else int(draw.seed) & (2**64 - 1),
            rate=pointer(draw.rate),
            stride=int(draw.rate.dim() > 0),
        )

    norm = loop.norm
    args: dict[str, Any] = {
        "cell": CELLS.index(loop.cell),
        "steps": loop.steps,
        "batch": loop.batch,
        "hidden": loop.hidden,
        "outputs": loop.outputs,
        "inputs": 0 if loop.x is None else loop.x.shape[1],
        "threads": torch.get_num_threads(),
        "first_step": loop.first_step,
        "reverse": loop.reverse,
        "counts": pointer(loop.counts),
        "offsets": pointer(loop.offsets),
        "lengths": pointer(loop.lengths),
        "examples": pointer(loop.examples),
        "resets": pointer(loop.resets),
        "cell_noise": stream("cell"),
        "hidden_noise": stream("hidden"),
        "update_noise": stream("update"),
        "norm": 0 if norm is None else 1 if norm.over == "units" else 2,
        "norm_given": loop.given,
        "eps": 0.0 if norm is None else norm.eps,
    }
    names = ("scale_h", "x", "w_ih", "w_hh", "b_x", "b_h", "w_hr", "h0", "c0", "gates", "gh")
    tensors = {name: getattr(loop, name) for name in names}
    tensors |= {
        name: getattr(loop, name)
        for name in ("y", "c", "reset_h", "reset_c", "mean_x", "var_x", "mean_h", "var_h", "mean_c", "var_c")
    }
    if norm is not None:
        tensors |= {"norm_x": norm.scale_x, "norm_h": norm.scale_h}
        tensors |= {"norm_c": norm.scale_c, "norm_c_shift": norm.shift_c}
    if back is not None:
        more = [field.name for field in fields(back)]
        tensors |= {name: getattr(back, name) for name in more}
    args |= {name: pointer(value) for name, value in tensors.items()}
    return native.Loop(**args), alive
