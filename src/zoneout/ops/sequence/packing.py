"""Convert packed rows to a padded batch and back, for code that cannot use packed rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...torch_state import functionalizing, no_gradient_needed, plain_eager
from .. import cuda
from ..cuda.pointwise import rows as fused
from ..memory import are_memory
from .rows import lengths_of


class Packing(NamedTuple):
    """The positions of packed rows, longest first, in [T, B, ·]; all on the device of the rows."""

    starts: Tensor  # [T]: the first packed row of each step
    lengths: Tensor  # [B]
    total: int  # number of packed rows


def packing_of(counts: Tensor, batch: int, rows: Tensor) -> Packing:
    """Return the packing of rows from the number of rows of each step.

    It needs one copy to the device of the rows. The CPU does not wait for the GPU.
    """
    if rows.is_cuda and plain_eager() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "input: a packed batch brings its sizes on the CPU, from where a CUDA graph cannot "
            "take them; capture the layer with a padded batch and lengths=… on the GPU instead"
        )
    steps = counts.shape[0]
    on_device = torch.cat((counts.cumsum(0) - counts, lengths_of(counts, batch))).to(
        rows.device, non_blocking=True
    )
    starts, lengths = on_device.split_with_sizes((steps, batch))
    return Packing(starts, lengths, rows.shape[0])


def padded(rows: Tensor, packing: Packing) -> Tensor:
    """Return packed rows as a padded batch, [N, ·] -> [T, B, ·], zero past the ends."""
    return _move(rows, *packing, False)


def packed(v: Tensor, packing: Packing) -> Tensor:
    """Return a padded batch as packed rows, [T, B, ·] -> [N, ·]."""
    return _move(v, *packing, True)


def _move(v: Tensor, starts: Tensor, lengths: Tensor, total: int, pack: bool) -> Tensor:
    """Return rows packed (`pack`), or padded."""
    if not has_kernel(v):
        move: Any = _by_torch
    elif not (plain_eager() and are_memory((v, starts, lengths))):
        move = torch.ops.zoneout.move_rows
    else:
        move = _fused if no_gradient_needed((v,)) else _Move.apply
    return move(v, starts, lengths, total, pack)


def has_kernel(v: Tensor) -> bool:
    """Return True if one kernel can move the rows; it supports every dtype."""
    return v.is_cuda and cuda.is_available(v) and not _transformed(v)


def _transformed(v: Tensor) -> bool:
    """Return True inside torch.func transforms or batched gradients (`is_grads_batched`)."""
    if torch._C._are_functorch_transforms_active():
        return True
    return not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(v)


def _by_torch(v: Tensor, starts: Tensor, lengths: Tensor, total: int, pack: bool) -> Tensor:
    steps, batch, width = starts.shape[0], lengths.shape[0], v.shape[-1]
    row = torch.arange(total, device=v.device)
    step = torch.searchsorted(starts, row, right=True) - 1
    at = step * batch + row - starts[step]
    if not pack:
        return v.new_zeros(steps * batch, width).index_copy_(0, at, v).view(steps, batch, width)
    v = v.reshape(steps * batch, width)
    # Neither of these supports an autograd function with a forward-mode derivative.
    if torch.compiler.is_compiling() or any(functionalizing()):
        return v.index_select(0, at)
    return _Picked.apply(v, at)


class _Picked(torch.autograd.Function):
    """Select the rows `at`; all are distinct, so the backward pass needs no summation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(v: Tensor, at: Tensor) -> Tensor:
        return v.index_select(0, at)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])
        ctx.rows = inputs[0].shape[0]

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        (at,) = ctx.saved_tensors
        return d.new_zeros(ctx.rows, *d.shape[1:]).index_copy_(0, at, d), None

    @staticmethod
    def jvp(ctx: Any, v: Tensor, at: None) -> Tensor:
        return v.index_select(0, ctx.saved_tensors[0])


# --- one kernel -----------------------------------------------------------------------------------


def _fused(v: Tensor, starts: Tensor, lengths: Tensor, total: int, pack: bool) -> Tensor:
    return fused.packed(v, starts, lengths, total) if pack else fused.unpacked(v, starts, lengths)


@torch.library.custom_op("zoneout::move_rows", mutates_args=())
def _move_rows(v: Tensor, starts: Tensor, lengths: Tensor, total: int, pack: bool) -> Tensor:
    return _fused(v, starts, lengths, total, pack)


@_move_rows.register_fake
def _(v: Tensor, starts: Tensor, lengths: Tensor, total: int, pack: bool) -> Tensor:
    shape = (total,) if pack else (starts.shape[0], lengths.shape[0])
    return v.new_empty(*shape, v.shape[-1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, starts, lengths, ctx.total, ctx.pack = inputs
    ctx.save_for_backward(starts, lengths)
    ctx.save_for_forward(starts, lengths)


def _backward(ctx: Any, d: Tensor) -> tuple[Any, ...]:
    starts, lengths = ctx.saved_tensors
    return _move(d, starts, lengths, ctx.total, not ctx.pack), *[None] * 4


torch.library.register_autograd("zoneout::move_rows", _backward, setup_context=_setup)


class _Move(torch.autograd.Function):
    """The same node without the dispatcher, and with a forward-mode derivative."""

    @staticmethod
    def forward(
        ctx: Any, *inputs: Any
    ) -> Tensor:  # with `setup_context`, torch looks up default arguments: 19 µs
        out = _fused(*inputs)
        _setup(ctx, inputs, out)
        return out

    backward = staticmethod(_backward)

    @staticmethod
    def jvp(ctx: Any, v: Tensor, *_: None) -> Tensor:
        starts, lengths = ctx.saved_tensors
        return _move(v, starts, lengths, ctx.total, ctx.pack)
