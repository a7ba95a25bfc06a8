"""The forward and backward pass over time: large products, and the device's loop between them.

A pass has three parts: preparation, the loop, and the work on its results. Several passes, those of
a layer's directions, are prepared together. The device can then run their loops concurrently.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backend import Backend, Loop, by_gate
from ..run import Run
from .gradients import BackwardPass
from .prepare import (
    LOOPS,
    Prepared,
    build_loop,
    empty_outputs,
    has_own_bias,
    input_product,
    prepare,
    reorder_moments,
)
from .saved import BackwardInputs, Saved


def forward(*runs: Run) -> list[Saved]:
    """Run over time; several runs concurrently, if the device can."""
    device = LOOPS[runs[0].x.device.type]
    passes = [ForwardPass.prepare(device, r) for r in runs]
    device.forward([pass_.loop for pass_ in passes])
    return [pass_.finish() for pass_ in passes]


def backward(*jobs: BackwardInputs) -> list[dict[str, Tensor]]:
    """Return the gradients that are needed, by name for each run, in the dtype of the run."""
    dtype = jobs[0].r.h0.dtype
    return [
        {name: v if v.dtype == dtype else v.to(dtype) for name, v in gradients.items()}
        for gradients in precise_gradients(*jobs)
    ]


def precise_gradients(*jobs: BackwardInputs) -> list[dict[str, Tensor]]:
    """Return the same gradients in the precision in which they are computed.

    Gradients of states are in the precision of states.
    """
    kind = jobs[0].r.x.device.type
    device = LOOPS[kind]
    # The caller may be inside autocast, which would round products in a way we do not want.
    mixed = torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if mixed else nullcontext():
        passes = [BackwardPass.prepare(device, job) for job in jobs]
        device.backward([(pass_.loop, pass_.grads) for pass_ in passes])
        each = [pass_.finish() for pass_ in passes]
    return [
        {name: gradients[name] for name in gradients if name in job.needs}
        for gradients, job in zip(each, jobs)
    ]


@dataclass
class ForwardPass:
    """A forward pass that is prepared, and whose loop has not run yet."""

    r: Run
    ready: Prepared
    saved: Saved  # the buffers, in the caller's layout
    loop: Loop

    @staticmethod
    def prepare(device: Backend, r: Run) -> ForwardPass:
        ready = prepare(device, r)
        rows, w = ready.rows, ready.w
        saved = empty_outputs(r, ready.states[0].dtype)
        y, gates = saved.y, saved.gates
        assert gates is not None
        device.prepare(y, *saved.states, gates, saved.hats, *saved.slots)
        x = rows.inputs(ready.x)
        n, every = x.shape[0], gates.shape[0]
        added = r.extra is not None
        inside = x.is_floating_point() and not added and device.multiplies_x(w.w_ih)
        if not inside:
            input_product(x, w.w_ih, gates[:n] if n < every else gates)
        if r.extra is not None:
            gates[:n] += rows.inputs(r.extra).to(gates.dtype)
        if n < every:
            for buffer in (gates, saved.hats, *saved.slots):
                if buffer is not None:
                    buffer[
                        n:
                        # rows of ended sequences: never read, but deterministic
                    ].zero_()
        if rows.whole:
            flat = [v.view(-1, v.shape[-1]) for v in (y, *saved.states)]
        else:
            flat = [v.new_empty(n, v.shape[-1]) for v in (y, *saved.states)]
        bias = gates.new_zeros(gates.shape[1]) if w.b_ih is None else w.b_ih
        bias = bias if w.b_hh is None or has_own_bias(r) else bias + w.b_hh
        inner = saved._replace(y=flat[0], states=tuple(flat[1:]))
        return ForwardPass(
            r, ready, saved, build_loop(r, ready, inner, x if inside else None, bias)
        )

    def finish(self) -> Saved:
        rows, saved, loop, narrow = self.ready.rows, self.saved, self.loop, self.r.h0.dtype
        final = rows.final(list(zip(loop.states, loop.initial)), narrow)
        y, states = saved.y, saved.states
        if not rows.whole:
            y, states = rows.unpack(loop.y), tuple(rows.unpack(v) for v in loop.states[1:])
        y = y if y.dtype == narrow else y.to(narrow)
        moments = saved.moments
        if self.ready.by_unit:
            moments = reorder_moments(by_gate, self.r.cell.gates, moments)
        return Saved(y, tuple(final), states, saved.gates, saved.hats, saved.slots, moments, rows)
