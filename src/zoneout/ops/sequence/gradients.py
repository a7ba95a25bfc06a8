"""The backward pass around its loop.

Buffers are allocated before the loop. After the loop, the gradients of weights, biases and x are
computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...norm import Moments
from ..backend import Backend, Loop, LoopGrads, by_gate, by_unit
from ..run import OF_GATES
from .prepare import (
    Prepared,
    build_loop,
    contiguous,
    input_product,
    prepare,
    reorder,
    reorder_moments,
    state_type,
)
from .products import columns_of_ones, product, split_columns, sum_over_rows, times, times_and_sum
from .saved import BackwardInputs, Saved


@dataclass
class BackwardPass:
    """A backward pass that is prepared, and whose loop has not run yet."""

    device: Backend
    job: BackwardInputs
    ready: Prepared
    x: Tensor  # [N, input]
    loop: Loop
    grads: LoopGrads

    @staticmethod
    def prepare(device: Backend, job: BackwardInputs) -> BackwardPass:
        r, saved = job.r, job.saved
        ready = prepare(device, r, saved.rows)
        rows, h0 = ready.rows, ready.states[0]
        moments = (
            reorder_moments(by_unit, r.cell.gates, saved.moments)
            if ready.by_unit
            else saved.moments
        )
        assert saved.gates is not None
        inner = Saved(
            y=rows.pack(saved.y if saved.y.dtype == h0.dtype else saved.y.to(h0.dtype)),
            final=(),
            states=tuple(rows.pack(v) for v in saved.states),
            gates=saved.gates.contiguous(),
            hats=contiguous(saved.hats),
            slots=tuple(contiguous(v) for v in saved.slots),
            moments=None if moments is None else Moments(*map(contiguous, moments)),  # type: ignore[arg-type]
        )
        loop = build_loop(r, ready, inner)
        x = rows.inputs(ready.x)
        grads = _allocate(device, job, ready, loop)
        if grads.dx is not None:
            input_product(x, ready.w.w_ih, grads.dx)
        return BackwardPass(device, job, ready, x, loop, grads)

    def finish(self) -> dict[str, Tensor]:
        """Return all gradients that are needed, and possibly others."""
        r, grads = self.job.r, self.grads
        gradients = self._of_states() | self._of_norm() | self._of_parameters() | self._of_masks()
        weights, sums = _WeightGradients(self).all()
        gradients |= weights
        gradients |= self._of_biases(sums)
        self.device.release(
            *(grads.dgx, grads.dgh, grads.dsh, grads.du, grads.u, grads.dnc, grads.chat, grads.dx),
            *(*grads.dinner, *grads.ins),
        )
        if self.ready.by_unit:
            gradients |= reorder(
                by_gate,
                r.cell.gates,
                {name: v for name, v in gradients.items() if name in OF_GATES},
            )
        return gradients

    def _of_states(self) -> dict[str, Tensor]:
        rows, needs = self.ready.rows, self.job.needs
        each = {f"state{k}": v for k, v in enumerate(self.grads.dstates)}
        each |= {f"reset{k}": v for k, v in enumerate(self.grads.dreset)}
        return {name: rows.unsort(value) for name, value in each.items() if name in needs}

    def _of_masks(self) -> dict[str, Tensor]:
        rows, masks = self.ready.rows, self.grads.dmasks
        streams = [draw.rule.stream for draw in self.job.r.draws]
        gradients = {f"mask{streams.index(s)}": rows.unpack(v) for s, v in masks.items()}
        if "extra" in self.job.needs:
            gradients["extra"] = rows.unpack(self.grads.dgx.clone())
        return gradients

    def _of_norm(self) -> dict[str, Tensor]:
        b = self.grads
        sums = {
            "scale_x": b.dscale_x,
            "scale_h": b.dscale_h,
            "scale_c": b.dscale_c,
            "shift_c": b.dshift_c,
        }
        return {name: total.sum(0) for name, total in sums.items() if total is not None}

    def _of_parameters(self) -> dict[str, Tensor]:
        cell = self.loop.cell
        gradients = {name: v.sum(0) for name, v in zip(cell.vectors, self.grads.dparameters)}
        gradients |= self._of_matrices()
        return {f"parameter{cell.parameters.index(name)}": v for name, v in gradients.items()}

    def _of_matrices(self) -> dict[str, Tensor]:
        """Return the gradients of the matrices of the products inside the step, by name.

        Values between two matrices of a product, and their gradients, are computed again.
        """
        gradients: dict[str, Tensor] = {}
        by_name = dict(zip(self.loop.cell.matrices, self.loop.matrices))
        for inner_product, v, d in zip(self.loop.cell.products, self.grads.ins, self.grads.dinner):
            between = [v]
            for name in inner_product.matrices[:-1]:
                between.append(times(between[-1], by_name[name].t()))
            for name, left in zip(reversed(inner_product.matrices), reversed(between)):
                term = product(d.t(), left)
                gradients[name] = gradients[name] + term if name in gradients else term
                d = times(d, by_name[name]) if left is not v else d
        return gradients

    def biases(self) -> tuple[list[str], list[str]]:
        """Return the biases whose gradient is the sum of `dgx`, and those of `dsh`.

        The second list is empty if `dsh` and `dgx` are the same tensor.
        """
        both: tuple[str, ...] = ("b_ih", "b_hh")
        needed = [
            name
            for name in both
            if getattr(self.ready.w, name) is not None and name in self.job.needs
        ]
        if self.grads.dsh is self.grads.dgx:
            return needed, []
        return [name for name in needed if name == "b_ih"], [
            name for name in needed if name == "b_hh"
        ]

    def _of_biases(self, sums: list[Tensor]) -> dict[str, Tensor]:
        """Return the gradients of the biases.

        `sums` holds the sum of `dgx` over its rows, once per bias that needs it. It is empty if no
        product computed the sum.
        """
        of_x, of_h = self.biases()
        grads, balanced = self.grads, self.loop.balanced
        if of_x and not sums:
            total = sum_over_rows(grads.dgx, balanced) if grads.db_x is None else grads.db_x
            sums = [total, *(total.clone() for _ in of_x[1:])]
        gradients = dict(zip(of_x, sums))
        if of_h:
            gradients["b_hh"] = (
                sum_over_rows(grads.dsh, balanced) if grads.db_h is None else grads.db_h
            )
        return gradients


def _allocate(device: Backend, job: BackwardInputs, ready: Prepared, loop: Loop) -> LoopGrads:
    """Return the buffers of a backward pass."""
    r, d, rows, ys = job.r, job.d, ready.rows, loop.y
    n, width, hidden, states = ys.shape[0], r.width, r.hidden, state_type(ys.dtype)
    normed, projected = ready.norm is not None, ready.w.w_hr is not None
    normed_c = ready.norm is not None and ready.norm.scale_c is not None

    def start(gradient: Tensor | None, like: Tensor) -> Tensor:
        """Return the gradient of a final state, longest row first, in writable memory."""
        if gradient is None:
            return torch.zeros_like(like, dtype=states)
        return rows.sort(gradient.to(states)).clone(memory_format=torch.contiguous_format)

    def scratch(width: int, dtype: torch.dtype = ys.dtype, needed: bool = True) -> Any:
        return device.scratch(ys, n, width, dtype=dtype) if needed else None

    def sums(width: int) -> Tensor:
        return ys.new_zeros(device.partial_sums(), width, dtype=states)

    dgx = scratch(width)
    dsh = scratch(width) if r.cell.storage.apart else dgx
    dgh = scratch(width) if normed else dsh
    return LoopGrads(
        dy=torch.zeros_like(ys)
        if d.y is None
        else rows.pack(d.y if d.y.dtype == ys.dtype else d.y.to(ys.dtype)),
        dseen=tuple(None if v is None else rows.pack(v.to(states)) for v in d.states),
        dstates=tuple(start(v, like) for v, like in zip(d.final, loop.initial)),
        dreset=tuple(torch.zeros_like(v, dtype=states) for v in loop.reset_to),
        dgx=dgx,
        dgh=dgh,
        dsh=dsh,
        du=scratch(ys.shape[1], needed=projected),
        u=scratch(hidden, needed=projected),
        dnc=scratch(hidden, states, normed_c and not ready.by_unit),
        chat=scratch(hidden, states, normed_c and not ready.by_unit),
        dx=scratch(width, needed=normed),
        dscale_x=sums(width) if normed else None,
        dscale_h=sums(width) if normed else None,
        dscale_c=sums(hidden) if normed_c else None,
        dshift_c=sums(hidden) if normed_c else None,
        dparameters=tuple(sums(hidden) for _ in loop.parameters),
        dinner=tuple(scratch(v.shape[1]) for v in loop.inner),
        ins=tuple(scratch(hidden) for _ in loop.inner),
        dmasks={
            draw.rule.stream: torch.zeros_like(loop.masks[draw.rule.stream])
            for k, draw in enumerate(r.draws)
            if f"mask{k}" in job.needs
        },
    )


class _WeightGradients:
    """The gradients of the weights and of x: large products of the results of the loop."""

    def __init__(self, of: BackwardPass) -> None:
        self.of, self.device, self.rows, self.needs = of, of.device, of.ready.rows, of.job.needs
        self.loop, self.x, self.w_ih = of.loop, of.x, of.ready.w.w_ih
        self.du, self.u = of.grads.du, of.grads.u
        # With a norm between the gates and x·Wx the two have gradients of their own.
        self.dgx = of.grads.dgx if of.grads.dx is None else of.grads.dx
        self.dgh = of.grads.dgh
        self.one_hot = not self.x.is_floating_point()
        # How many copies of the sum of dgx are needed; a product may compute it as an extra column.
        self.sums = 0 if of.grads.dx is not None else len(of.biases()[0])

    def all(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the gradients, and the sums of `dgx` if a product computed them."""
        gradients: dict[str, Tensor] = {}
        added: list[Tensor] = []
        needs, loop = self.needs, self.loop
        if self.one_hot and "w_ih" in needs:
            differences = self.rows.differences if loop.balanced else None
            gradients["w_ih"], added = _one_hot_gradient(
                self.dgx, self.x, self.w_ih, differences, self.sums
            )
        self._narrow()
        if self._fused():
            joint, added = self._both()
            gradients |= joint
        else:
            if "w_ih" in needs and not self.one_hot:
                from_x = self.rows.differences(self.x) if self.loop.balanced else self.x
                gradients["w_ih"], added = times_and_sum(self.dgx.t(), from_x, self.sums)
            if "w_hh" in needs:
                gradients["w_hh"] = self.rows.grad_w_hh(self.dgh, self.loop)
        if self.du is not None and self.u is not None and "w_hr" in needs:
            gradients["w_hr"] = product(self.du.t(), self.u)
        if "x" in needs:
            gradients["x"] = self.rows.unpack(times(self.dgx, self.w_ih, by_row=True))
        return gradients, added

    def _narrow(self) -> None:
        """Convert the operands to a half type, if the device multiplies that faster."""
        r, narrow = self.of.job.r, self.of.job.r.h0.dtype
        if self.loop.y.dtype == narrow or not self.device.narrow_products(narrow):
            return
        self.x, self.w_ih = self.rows.inputs(r.x), r.weights.w_ih
        together, self.dgx = self.dgh is self.dgx, self.dgx.to(narrow)
        self.dgh = self.dgx if together else self.dgh.to(narrow)
        self.du, self.u = (v if v is None else v.to(narrow) for v in (self.du, self.u))
        loop = self.loop
        self.loop = replace(
            loop,
            states=(loop.y.to(narrow), *loop.states[1:]),
            initial=(loop.h0.to(narrow), *loop.initial[1:]),
            reset_to=tuple(v.to(narrow) for v in loop.reset_to),
            scale_h=None if loop.scale_h is None else loop.scale_h.to(narrow),
        )

    def _fused(self) -> bool:
        """Return True if one product should compute the gradients of both weight matrices."""
        r = self.of.job.r
        # With one step, two products need no concatenation of h and x.
        both = (
            r.steps > 1
            and {"w_ih", "w_hh"} <= self.needs
            and not self.one_hot
            and self.dgh is self.dgx
        )
        sizes = len(self.dgx), r.width, self.loop.outputs, self.x.shape[-1]
        return both and r.cell.recurrence == "dense" and self.device.fuse_weight_grads(*sizes)

    def _both(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        outputs, inputs = self.loop.outputs, self.x.shape[-1]
        ones = columns_of_ones(outputs + inputs, self.x)
        h_and_x = self.device.scratch(
            self.loop.y, len(self.dgx), outputs + inputs + ones, dtype=self.dgx.dtype
        )
        self.rows.concat_h_and_x(self.loop, self.x, h_and_x)
        columns = [
            (0, outputs),
            (outputs, inputs),
            *[(outputs + inputs, 1)] * (self.sums if ones else 0),
        ]
        w_hh, w_ih, *of_ones = split_columns(product(self.dgx.t(), h_and_x), columns)
        self.device.release(h_and_x)
        return {"w_hh": w_hh, "w_ih": w_ih}, [v[:, 0] for v in of_ones]


def _one_hot_gradient(
    d: Tensor, x: Tensor, w_ih: Tensor, differences: Callable[[Tensor], Tensor] | None, sums: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the weight gradient of one-hot rows, [G, input], and possibly sums of `d`."""
    ids, count = x.view(-1), w_ih.shape[1]
    if count <= 256:  # few columns: a product costs less than adding rows in order
        dense = d.new_zeros(len(d), count).scatter_(1, x, 1.0)
        return times_and_sum(d.t(), dense if differences is None else differences(dense), sums)
    if (
        differences is not None
    ):  # a difference row is +1 at its own id and −1 at the id of the row it is compared with
        away = differences(x).view(-1)
        d = d.masked_fill((away == 0).unsqueeze(-1), 0.0)
        d, ids = torch.cat((d, -d)), torch.cat((ids, ids - away))
    return sum_rows(d, ids, count).t().contiguous(), []


def sum_rows(d: Tensor, numbers: Tensor, count: int) -> Tensor:
    """Return [count, ·]: the sum of the rows of `d` that have each number.

    The order of summation is fixed, and the CPU does not wait for the GPU.
    """
    return d.new_zeros(count, d.shape[1]).index_put_((numbers,), d, accumulate=True)
