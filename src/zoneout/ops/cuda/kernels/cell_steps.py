"""Any cell, one step at a time: products and generated kernels. This path supports every loop.

The blocks of a block-diagonal matrix are the parts of one batched product, if their rows are
multiples of 16 bytes. Otherwise the matrix is expanded to a dense one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ...backend import Loop, LoopGrads
from ...memory import address, is_aligned
from ...sequence.products import pad_columns
from ..runtime.arguments import loop_arguments
from ..runtime.blas import product
from ..runtime.compiler import Kernel, Ready, at_each_step, chip, load
from . import step_products
from .own_cell import OwnArguments, defines_of, holds, step_text, with_dense_weight
from .steps import THREADS, Step, for_backward, parts_of

_NAMES = ("enter", "forward", "backward", "leave")
_OF_PRODUCTS = ("enter_level", "leave_level")


def ready(loop: Loop, back: LoopGrads | None, loops: int) -> Ready | None:
    """Prepare a loop; it always runs on the current stream."""
    return Ready(lambda lane: forward(loop) if back is None else backward(loop, back))


def forward(loop: Loop) -> None:
    """Run the forward pass of a loop."""
    pass_ = _Pass(loop, None)
    if loop.gates.dtype != torch.float32:  # y is rounded, the carried h is not
        pass_.scratch("h", (loop.batch, loop.hidden))
    before = [_recurrent_product(pass_)] if loop.cell.has_r else []
    before += step_products.forward(pass_) if loop.cell.products else []
    step = pass_.step("forward")
    if loop.cell.has_r:
        pass_.step("enter")(0)
    for t in range(loop.steps):
        for do in before:
            do(t)
        step(t)


def _recurrent_product(pass_: _Pass) -> Step:
    """Return the product with W_h of the forward pass."""
    loop, own = pass_.loop, pass_.own.struct
    heads, w = weight_of_heads(loop)  # [heads, G, D, D]
    # As [G · D, heads · D], whose parts are the heads.
    w = pad_columns(w.permute(1, 2, 0, 3).reshape(-1, loop.hidden))
    h_in = pass_.scratch("h_in", (loop.batch, w.shape[1]), loop.gates.dtype)
    h_in.zero_()  # the padding
    out = pass_.scratch("product", (loop.batch, loop.width))
    own.h_pitch, own.block = w.shape[1], loop.hidden // heads
    multiply = product(w, loop.batch, torch.float32, transposed=True, parts=heads)
    a, b = address(h_in, "h_in"), address(out, "product")
    return lambda t: multiply(a, b)


def backward(loop: Loop, back: LoopGrads) -> None:
    """Run the backward pass of a loop."""
    pass_ = _Pass(loop, back)
    if holds(loop):
        pass_.scratch("owed", (loop.batch, loop.hidden)).zero_()
    before = step_products.backward(pass_, back) if loop.cell.products else []
    after = [_recurrent_product_back(pass_, back)] if loop.cell.has_r else []
    step = pass_.step("backward")
    for t in reversed(range(loop.steps)):
        for do in before:
            do(t)
        step(t)
        for do in after:
            do(t)
    pass_.step("leave")(0)


def _recurrent_product_back(pass_: _Pass, back: LoopGrads) -> Step:
    """Return the product with W_h of the backward pass."""
    loop, own, batch = pass_.loop, pass_.own, pass_.loop.batch
    heads, w = weight_of_heads(loop)
    w, transposed = for_backward(w.reshape(loop.width, -1))
    pitch = w.shape[0] if transposed else w.shape[1]
    processors = chip(pass_.index).processors
    sums = 1 if heads > 1 else parts_of(loop.width, pitch, batch, w.element_size(), processors)
    parts = heads * sums
    rec = address(pass_.scratch("rec", (parts, batch, pitch)), "rec")
    own.struct.rec_pitch, own.struct.sums, own.struct.block = pitch, sums, loop.hidden // heads
    # Otherwise the rows of a step are adjacent and ordered as the product needs them.
    if heads > 1 or pass_.gathered:
        entering = pass_.scratch("d_in", (batch, loop.width), loop.gates.dtype)
        rows = [address(entering, "d_in")] * loop.steps
    else:
        start, size = address(back.dsh, "dsh"), batch * loop.width * back.dsh.element_size()
        rows = [start + t * size for t in range(loop.steps)]
        rows = rows[::-1] if loop.reverse else rows
    multiply = product(w, batch, torch.float32, transposed, parts=parts)
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

    def __init__(self, loop: Loop, back: LoopGrads | None) -> None:
        self.loop, self.index = loop, loop.gates.get_device()
        self.stream = torch._C._cuda_getCurrentRawStream(self.index)
        self.arguments, self.own = loop_arguments(loop, back), OwnArguments(loop, back)
        self.vector = 4 if loop.hidden % 4 == 0 and self._aligned() else 1
        defines = defines_of(loop.gates.dtype, self.vector)
        defines += (("GIVEN_MASKS", int(bool(loop.masks))),)
        names = (*_NAMES, *(_OF_PRODUCTS if loop.cell.products else ()))
        self.kernels: dict[str, Kernel] = dict(
            zip(names, load(self.index, "cell_steps.cu", names, defines, step_text(loop, back)))
        )

    @property
    def gathered(self) -> bool:
        """True if the rows of a processed step are not adjacent in memory."""
        return self.loop.reverse and self.loop.lengths is not None

    def _aligned(self) -> bool:
        """Return True if four adjacent elements of every tensor can be read at once."""
        numbers = (self.loop.gates.dtype, torch.float32)
        every = (*self.arguments.alive, *self.own.alive)
        return all(is_aligned(v, 4 * v.element_size()) for v in every if v.dtype in numbers)

    def scratch(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return workspace for this pass, and pass it to the kernels as `name`."""
        value = torch.empty(shape, dtype=dtype, device=self.loop.gates.device)
        self.own.put(name, value)
        return value

    def step(self, name: str, after: tuple[Any, ...] = ()) -> Step:
        """Return the launch of a kernel with one thread for one or four units of a row.

        `after`: the kernel's arguments after the step.
        """
        threads = self.loop.batch * (self.loop.hidden // self.vector)
        given = (self.arguments.struct, self.own.struct)
        shape = (-(-threads // THREADS), 1), (THREADS, 1)
        return at_each_step(self.kernels[name], *shape, given, after, self.stream)

    def level(self, name: str, number: int) -> Step:
        """Return the launch of a kernel for a level of the products inside the step."""
        return self.step(name, (ctypes.c_int(number),))
