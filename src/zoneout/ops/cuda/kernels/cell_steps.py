"""Any cell with a matrix for h, one step at a time: a product and one generated kernel.

The blocks of a block-diagonal matrix are the parts of one batched product, if their rows are
multiples of 16 bytes. Otherwise the matrix is expanded to a dense one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...backend import Loop, LoopGrads
from ...memory import address, is_aligned
from ...sequence.products import pad_columns
from ..runtime.arguments import loop_arguments
from ..runtime.blas import product
from ..runtime.compiler import Kernel, Ready, at_each_step, chip, load
from .own_cell import OwnArguments, defines_of, holds, step_text, with_dense_weight
from .steps import THREADS, Step, for_backward, parts_of

_NAMES = ("enter", "forward", "backward", "leave")


def ready(loop: Loop, back: LoopGrads | None, loops: int) -> Ready | None:
    """Prepare a loop; it always runs on the current stream."""
    if not loop.cell.has_r:
        return None
    return Ready(lambda lane: forward(loop) if back is None else backward(loop, back))


def forward(loop: Loop) -> None:
    """Run the forward pass of a loop."""
    pass_ = _Pass(loop, None)
    dtype, batch = loop.gates.dtype, loop.batch
    if dtype != torch.float32:  # y is rounded, the carried h is not
        pass_.scratch("h", (batch, loop.hidden))
    heads, w = weight_of_heads(loop)  # [heads, G, D, D]
    # As [G · D, heads · D], whose parts are the heads.
    w = pad_columns(w.permute(1, 2, 0, 3).reshape(-1, loop.hidden))
    h_in = pass_.scratch("h_in", (batch, w.shape[1]), dtype)
    h_in.zero_()  # the padding
    out = pass_.scratch("product", (batch, loop.width))
    own = pass_.own.struct
    own.h_pitch, own.block = w.shape[1], loop.hidden // heads
    multiply = product(w, batch, torch.float32, transposed=True, parts=heads)
    a, b, step = address(h_in, "h_in"), address(out, "product"), pass_.step("forward")
    pass_.step("enter")(0)
    for t in range(loop.steps):
        multiply(a, b)
        step(t)


def backward(loop: Loop, back: LoopGrads) -> None:
    """Run the backward pass of a loop."""
    pass_ = _Pass(loop, back)
    batch, own = loop.batch, pass_.own
    if holds(loop):
        pass_.scratch("owed", (batch, loop.hidden)).zero_()
    heads, w = weight_of_heads(loop)
    w, transposed = for_backward(w.reshape(loop.width, -1))
    pitch = w.shape[0] if transposed else w.shape[1]
    processors = chip(pass_.index).processors
    sums = 1 if heads > 1 else parts_of(loop.width, pitch, batch, w.element_size(), processors)
    parts = heads * sums
    rec = address(pass_.scratch("rec", (parts, batch, pitch)), "rec")
    own.struct.rec_pitch, own.struct.sums, own.struct.block = pitch, sums, loop.hidden // heads
    # Otherwise the rows of a step are adjacent and ordered as the product needs them.
    if heads > 1 or (loop.reverse and loop.lengths is not None):
        entering = pass_.scratch("d_in", (batch, loop.width), loop.gates.dtype)
        rows = [address(entering, "d_in")] * loop.steps
    else:
        start, size = address(back.dsh, "dsh"), batch * loop.width * back.dsh.element_size()
        rows = [start + t * size for t in range(loop.steps)]
        rows = rows[::-1] if loop.reverse else rows
    multiply = product(w, batch, torch.float32, transposed, parts=parts)
    step = pass_.step("backward")
    for t in reversed(range(loop.steps)):
        step(t)
        multiply(rows[t], rec)
    pass_.step("leave")(0)


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
        self.kernels: dict[str, Kernel] = dict(
            zip(_NAMES, load(self.index, "cell_steps.cu", _NAMES, defines, step_text(loop)))
        )

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

    def step(self, name: str) -> Step:
        """Return the launch of a kernel with one thread for one or four units of a row."""
        threads = self.loop.batch * (self.loop.hidden // self.vector)
        given = (self.arguments.struct, self.own.struct)
        blocks = (-(-threads // THREADS), 1)
        return at_each_step(self.kernels[name], blocks, (THREADS, 1), given, stream=self.stream)
