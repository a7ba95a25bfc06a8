"""Any cell, one step at a time: products and generated kernels. This path supports every loop.

The blocks of a block-diagonal matrix are multiplied in one batched product, if their rows are
multiples of 16 bytes. Otherwise the matrix is expanded to a dense one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ... import recording
from ...backend import Loop, LoopGrads
from ...memory import address, is_aligned
from ...sequence.products import pad_columns
from ..runtime.arguments import loop_arguments
from ..runtime.blas import product
from ..runtime.compiler import Kernel, Ready, at_each_step, chip, load
from . import step_products
from .any_cell import AnyCellArguments, defines_of, holds_gate, step_text, with_dense_weight
from .steps import THREADS, Step, depth_splits, for_backward

_NAMES = ("enter", "forward", "backward", "leave")
_OF_PRODUCTS = ("enter_level", "leave_level")


def ready(loop: Loop, grads: LoopGrads | None, concurrent: int) -> Ready | None:
    """Prepare a loop; it always runs on the current stream."""
    recording.refuse_many(loop.steps)
    return Ready(lambda side_stream: forward(loop) if grads is None else backward(loop, grads))


def forward(loop: Loop) -> None:
    """Run the forward pass of a loop."""
    pass_ = _Pass(loop, None)
    if loop.gates.dtype != torch.float32 and loop.steps > 1:  # y is rounded, the carried h is not
        pass_.scratch("h", (loop.batch, loop.hidden))
    before_step = [_recurrent_product(pass_)] if loop.cell.has_r else []
    before_step += step_products.forward(pass_) if loop.cell.products else []
    step = pass_.step("forward")
    for t in range(loop.steps):
        for do in before_step:
            do(t)
        step(t)


def _recurrent_product(pass_: _Pass) -> Step:
    """Return the product with W_h of the forward pass."""
    loop, extra = pass_.loop, pass_.extra.struct
    heads, w = weight_of_heads(loop)  # [heads, G, D, D]
    # As [G · D, heads · D]: the depth is split by heads.
    w = pad_columns(w.permute(1, 2, 0, 3).reshape(-1, loop.hidden))
    h_in, pitch = loop.h0, w.shape[1]
    extra.h_pitch, extra.head_units = pitch, loop.hidden // heads
    changed = loop.resets is not None or loop.scale_h is not None or pitch > loop.hidden
    if loop.steps > 1 or changed:
        h_in = pass_.scratch("h_in", (loop.batch, pitch), loop.gates.dtype)
        if pitch > loop.hidden:
            h_in.zero_()  # the padding
        pass_.step("enter")(0)
    out = pass_.scratch("product", (loop.batch, loop.width))
    multiply = product(w, loop.batch, torch.float32, transposed=True, splits=heads)
    a, b = address(h_in, "h_in"), address(out, "product")
    return lambda t: multiply(a, b)


def backward(loop: Loop, grads: LoopGrads) -> None:
    """Run the backward pass of a loop."""
    pass_ = _Pass(loop, grads)
    if holds_gate(loop):
        pass_.scratch("owed", (loop.batch, loop.hidden)).zero_()
    before_step = step_products.backward(pass_, grads) if loop.cell.products else []
    after_step = [_recurrent_product_back(pass_, grads)] if loop.cell.has_r else []
    step = pass_.step("backward")
    for t in reversed(range(loop.steps)):
        for do in before_step:
            do(t)
        step(t)
        for do in after_step:
            do(t)
    pass_.step("leave")(0)


def _recurrent_product_back(pass_: _Pass, grads: LoopGrads) -> Step:
    """Return the product with W_h of the backward pass."""
    loop, extra, batch = pass_.loop, pass_.extra, pass_.loop.batch
    heads, w = weight_of_heads(loop)
    w, transposed = for_backward(w.reshape(loop.width, -1))
    pitch = w.shape[0] if transposed else w.shape[1]
    processors = chip(pass_.index).processors
    splits = (
        1 if heads > 1 else depth_splits(loop.width, pitch, batch, w.element_size(), processors)
    )
    groups = heads * splits
    rec = address(pass_.scratch("rec", (groups, batch, pitch)), "rec")
    extra.struct.rec_pitch = pitch
    extra.struct.splits = splits
    extra.struct.head_units = loop.hidden // heads
    # Otherwise the rows of a step are adjacent and ordered as the product needs them.
    if heads > 1 or pass_.gathered:
        entering = pass_.scratch("d_in", (batch, loop.width), loop.gates.dtype)
        rows = [address(entering, "d_in")] * loop.steps
    else:
        start, size = address(grads.dsh, "dsh"), batch * loop.width * grads.dsh.element_size()
        rows = [start + t * size for t in range(loop.steps)]
        rows = rows[::-1] if loop.reverse else rows
    multiply = product(w, batch, torch.float32, transposed, splits=groups)
    return lambda t: multiply(rows[t], rec)


def weight_of_heads(loop: Loop) -> tuple[int, Tensor]:
    """Return the number of heads and W_h as [heads, G, D, D]: a dense matrix has one head."""
    w, gates, heads = loop.recurrent_weight, loop.cell.gates, loop.cell.heads
    size = w.shape[1]
    blocks = w.view(gates, heads, size, size).transpose(0, 1)
    if heads == 1 or size * w.element_size() % 16 == 0:
        return heads, blocks
    return 1, with_dense_weight(loop).recurrent_weight.view(1, gates, loop.hidden, loop.hidden)


class _Pass:
    """The kernels of one pass, and the arguments that all their launches share."""

    def __init__(self, loop: Loop, grads: LoopGrads | None) -> None:
        self.loop, self.index = loop, loop.gates.get_device()
        self.stream = torch._C._cuda_getCurrentRawStream(self.index)
        self.arguments, self.extra = loop_arguments(loop, grads), AnyCellArguments(loop, grads)
        self.vector = 4 if loop.hidden % 4 == 0 and self._aligned() else 1
        defines = defines_of(loop.gates.dtype, self.vector)
        defines += (("GIVEN_MASKS", int(bool(loop.masks))),)
        names = (*_NAMES, *(_OF_PRODUCTS if loop.cell.products else ()))
        self.kernels: dict[str, Kernel] = dict(
            zip(names, load(self.index, "cell_steps.cu", names, defines, step_text(loop, grads)))
        )

    @property
    def gathered(self) -> bool:
        """True if the rows of a processed step are not adjacent in memory."""
        return self.loop.reverse and self.loop.lengths is not None

    def _aligned(self) -> bool:
        """Return True if four adjacent elements of every tensor can be read at once."""
        dtypes = (self.loop.gates.dtype, torch.float32)
        tensors = (*self.arguments.alive, *self.extra.alive)
        return all(is_aligned(v, 4 * v.element_size()) for v in tensors if v.dtype in dtypes)

    def scratch(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return workspace for this pass, and pass it to the kernels as `name`."""
        value = torch.empty(shape, dtype=dtype, device=self.loop.gates.device)
        self.extra.put(name, value)
        return value

    def step(self, name: str, after: tuple[Any, ...] = ()) -> Step:
        """Return the launch of a kernel with one thread for one or four units of a row.

        `after`: the kernel's arguments after the step.
        """
        threads = self.loop.batch * (self.loop.hidden // self.vector)
        structs = (self.arguments.struct, self.extra.struct)
        shape = (-(-threads // THREADS), 1), (THREADS, 1)
        return at_each_step(self.kernels[name], *shape, structs, after, self.stream)

    def level(self, name: str, number: int) -> Step:
        """Return the launch of a kernel for a level of the products inside the step."""
        return self.step(name, (ctypes.c_int(number),))
