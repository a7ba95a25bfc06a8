"""One step at a time: a product and a fused kernel, for every cell, noise, norm and size.

This path supports every loop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....definition import Definition
from ...backend import Loop, LoopGrads
from ...memory import address, is_aligned
from ...sequence.products import pad_columns
from ..runtime.arguments import (
    CELLS,
    EVERYTHING,
    TYPES,
    Arguments,
    Normed,
    Scratch,
    has,
    known,
    loop_arguments,
    modes_of,
)
from ..runtime.blas import batch_invariant, product
from ..runtime.compiler import Kernel, Ready, at_each_step, chip, load, tf32
from .persistent import in_half

THREADS = 64  # per block
MOST_THREADS = 1024  # maximum in a block that processes a whole row
GATES, SHOWS, CARRY = 1, 2, 4  # bits: the parts of a step that a launch computes
_PLAIN_NAMES = ("forward", "backward")
_NAMES = (
    *_PLAIN_NAMES, "enter", "carry", "norm_rows", "norm_columns", "carry_back", "centre", "settle",
    "norm_rows_back", "norm_gates_back", "norm_columns_back", "norm_gate_columns_back", "gather",
)  # fmt: skip

Step = Callable[[int], None]  # runs one operation of step t


def ready(loop: Loop, back: LoopGrads | None, loops: int) -> Ready:
    """Prepare a loop step by step; it always runs on the current stream."""
    return Ready(lambda lane: forward(loop) if back is None else backward(loop, back))


def forward(loop: Loop) -> None:
    """Run the forward pass of a loop."""
    pass_ = _Pass(loop, None)
    shows, norm, w_hr = "shown" in loop.cell.marks, loop.norm, loop.w_hr
    dtype, batch, size = loop.gates.dtype, loop.batch, loop.outputs
    # The carried h needs its own float32 buffer only if y is rounded and the step computes with h,
    # instead of only replacing or keeping it.
    draw = loop.draws.get("hidden")
    if dtype != torch.float32 and (loop.cell.reads_h or (draw is not None and draw.seed is None)):
        pass_.scratch("h", (batch, size))
    enters = loop.resets is not None or loop.scale_h is not None or pass_.apart
    left = [address(loop.h0, "h0"), *pass_.addresses(loop.y)[:-1]]
    w = pad_columns(_halved(loop.recurrent_weight) if pass_.half else loop.recurrent_weight)
    if pass_.half:
        h_in = pad_columns(_halved(loop.h0))
        pass_.own.put("next", h_in)
        left, pass_.own.struct.pitch = [address(h_in, "h_in")] * loop.steps, w.shape[1]
    elif enters or w.shape[1] != size:
        h_in = pass_.scratch("h_in", (batch, w.shape[1]), dtype)
        left, pass_.own.struct.pitch = [address(h_in, "h_in")] * loop.steps, w.shape[1]
        h_in.copy_(pad_columns(loop.h0))
        pass_.own.struct.next = None if enters else address(h_in, "h_in")
    # True: the product is added to x's part of the gates in place.
    added = norm is None and not loop.cell.storage.apart and not pass_.apart
    right, into = pass_.addresses(loop.gates), dtype
    if not added:
        h_w = pass_.scratch("product", (batch, loop.gates.shape[1]))
        right, into = [address(h_w, "h_w")] * loop.steps, torch.float32
    multiply = product(w, batch, into, transposed=True, add=added)

    after: list[Step] = []
    end = SHOWS | CARRY if w_hr is None else SHOWS
    if norm is not None:
        assert loop.gh is not None
        after.append(pass_.normalise(h_w, loop.gh, norm.scale_h, loop.b_h, loop.mean_h, loop.var_h))
    if shows and norm is not None:
        raw = pass_.scratch("raw", (batch, loop.hidden))
        after.append(pass_.step("forward", loop.hidden, GATES))
        if not loop.given:
            after.append(pass_.normalise(raw, None, None, None, loop.mean_c, loop.var_c))
        after.append(pass_.step("forward", loop.hidden, end))
    else:
        after.append(pass_.step("forward", loop.hidden, GATES | end))
    if w_hr is not None:
        u = address(pass_.scratch("u", (batch, loop.hidden), dtype), "u")
        projected = address(pass_.scratch("shown", (batch, size)), "shown")
        project = product(w_hr, batch, torch.float32, transposed=True)
        after.append(lambda t: project(u, projected))
        after.append(pass_.step("carry", size))
    before: list[Step] = [pass_.step("enter", size)] if enters else []
    for t in range(loop.steps):
        for do in before:
            do(t)
        multiply(left[t], right[t])
        for do in after:
            do(t)


def backward(loop: Loop, back: LoopGrads) -> None:
    """Run the backward pass of a loop."""
    pass_ = _Pass(loop, back)
    shows, norm, w_hr = "shown" in loop.cell.marks, loop.norm, loop.w_hr
    narrow, batch, size = loop.gates.dtype, loop.batch, loop.outputs
    if (draw := loop.draws.get("update")) is not None and draw.rule.holds_gate:
        pass_.scratch("owed", (batch, loop.hidden)).zero_()
    pass_.own.put_all(back, ("du", "u"), narrow)
    pass_.own.put_all(back, ("dnc", "chat"), torch.float32)

    before: list[Step] = []
    if w_hr is not None:
        assert back.du is not None
        shown, rows = (
            address(pass_.scratch("shown", (batch, loop.hidden)), "shown"),
            pass_.rows(back.du),
        )
        unproject = product(w_hr, batch, torch.float32, transposed=False)
        before.append(pass_.step("carry_back", size))
        before.append(lambda t: unproject(rows(t), shown))
    if shows and norm is not None:
        assert back.dnc is not None and back.chat is not None
        raw = pass_.scratch("raw", (batch, loop.hidden))
        before.append(pass_.step("backward", loop.hidden, SHOWS))
        before.append(pass_.normalise_back(raw, back.dnc, back.chat, norm.scale_c, loop.var_c))
        before.append(pass_.step("backward", loop.hidden, GATES))
    else:
        before.append(pass_.step("backward", loop.hidden, GATES | SHOWS))
    if norm is not None:
        assert loop.gh is not None
        before.append(pass_.normalise_back(back.dgh, back.dsh, loop.gh, norm.scale_h, loop.var_h))

    settles = loop.resets is not None or loop.scale_h is not None
    depth = loop.recurrent_weight.shape[0]
    if pass_.half:
        w, back_w = _scaled(loop.recurrent_weight)
        w, transposed = pad_columns(w), False
        pass_.own.put("back_w", back_w, torch.float32)
        entering = address(pass_.scratch("d_half", (batch, depth), torch.float16), "d_half")
        back_d = pass_.scratch("back", (batch,))
        d: Callable[[int], int] = lambda t: entering  # noqa: E731
    else:
        w, transposed = for_backward(loop.recurrent_weight)
        d = pass_.rows(back.dgh)
    pitch = w.shape[0] if transposed else w.shape[1]
    parts = parts_of(depth, pitch, batch, w.element_size(), chip(pass_.index).processors)
    rec = pass_.scratch("rec", (parts, batch, pitch))
    pass_.own.struct.pitch, pass_.own.struct.sums, pass_.own.struct.settled = pitch, parts, settles
    multiply, to = product(w, batch, torch.float32, transposed, parts=parts), address(rec, "rec")
    after: list[Step] = [pass_.centre()] if loop.balanced else []
    if settles:
        after.append(pass_.step("settle", max(size, loop.hidden)))
    for t in reversed(range(loop.steps)):
        for do in before:
            do(t)
        multiply(d(t), to)
        for do in after:
            do(t)
    if not settles:
        received = rec.sum(0)[:, :size]
        if pass_.half:
            received = received * back_w * back_d[:, None]
        back.dh.add_(received)


def parts_of(depth: int, columns: int, rows: int, size: int, processors: int) -> int:
    """Return the number of partial sums of the product in the backward pass.

    The product has few columns, so splitting its depth keeps more of the chip busy. The kernel of
    the previous time step adds the partial sums. This costs less than a separate kernel.
    """
    rows = 64 if batch_invariant() else rows  # else the order of a sum depends on them
    tiles = -(-columns // 64) * -(-rows // 128)
    # As measured with cuBLAS 13.0 on an H200.
    blocks = processors if size == 2 or rows > 64 else processors * 6 // 10
    most = max(1, min(blocks // tiles, depth // 128))
    return max(
        n for n in range(1, most + 1) if depth % n == 0 and (n == 1 or depth // n * size % 16 == 0)
    )


def _halved(v: Tensor) -> Tensor:
    """Return a tensor in half precision, clamped to its range; NaN stays NaN."""
    return v.half().clamp_(-65504, 65504)


def _scaled(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return W in half precision, scaled by a power of two, and the factor that undoes the scale.

    The largest scaled magnitude is near 2^14. If a weight is not finite, all results are NaN.
    """
    largest = torch.linalg.vector_norm(w, torch.inf).mul_(2.0**-14).clamp_(min=2.0**-126)
    # Keep the exponent bits only: a power of two.
    back = largest.view(torch.int32).bitwise_and_(0x7F800000).view(torch.float32)
    return torch.div(w, back, out=torch.empty_like(w, dtype=torch.float16)), back


def for_backward(w: Tensor) -> tuple[Tensor, bool]:
    """Return W for the backward pass, and True if it is transposed.

    Tensor cores take TF32 only if both operands are contiguous along the summed dimension.
    """
    if w.dtype == torch.float32 and tf32():
        return w.t().contiguous(), True
    return pad_columns(w), False


class _Pass:
    """The kernels of one pass, and the arguments that all their launches share."""

    def __init__(self, loop: Loop, back: LoopGrads | None) -> None:
        self.loop, self.device = loop, loop.gates.device
        self.arguments, self.own = loop_arguments(loop, back), Arguments(Scratch)
        self.index = loop.gates.get_device()
        # True: the rows of one processed step are not adjacent in memory.
        self.apart = loop.reverse and loop.lengths is not None
        self.plain = loop.norm is None and loop.w_hr is None and not has(loop, back)
        self.stream = torch._C._cuda_getCurrentRawStream(self.index)
        self._norm()
        self.vector = 4 if self._aligned() else 1
        self.half = self._half(back is not None)
        names: tuple[str, ...] = _PLAIN_NAMES if self.plain else _NAMES
        if self.half:  # the other pass may have no half-precision kernel
            names = ("forward" if back is None else "backward",)
        modes = modes_of(loop.draws) if self.plain else None
        one_rate = all(draw.rate.dim() == 0 for draw in loop.draws.values())
        # Threads of a block that processes a whole row.
        self.threads = -(-loop.hidden // self.vector // 32) * 32
        block = MOST_THREADS if self.threads > MOST_THREADS // 2 else MOST_THREADS // 2
        defines = defines_of(
            loop.cell, loop.gates.dtype, self.vector, self.plain, block * self.half, modes, one_rate
        )
        self.kernels: dict[str, Kernel] = dict(
            zip(names, load(self.index, "steps.cu", names, defines), strict=True)
        )

    def _norm(self) -> None:
        loop, s = self.loop, self.own.struct
        s.project = loop.w_hr is not None
        if loop.norm is None:
            return
        s.norm, s.eps = 1 if loop.norm.over == "units" else 2, loop.norm.eps
        tensors = {
            "norm_h": loop.norm.scale_h,
            "norm_c": loop.norm.scale_c,
            "norm_c_shift": loop.norm.shift_c,
        }
        tensors |= {name: getattr(loop, name) for name in ("mean_c", "var_c")}
        for name, value in tensors.items():
            self.own.put(name, value, torch.float32)

    def _aligned(self) -> bool:
        """Return True if sizes and alignment allow reading four adjacent elements at once."""
        if self.loop.hidden % 4 or self.loop.outputs % 4:
            return False
        numbers = (self.loop.gates.dtype, torch.float32)
        given = [
            value for value in (*self.arguments.alive, *self.own.alive) if value.dtype in numbers
        ]
        return all(is_aligned(value, 4 * value.element_size()) for value in given)

    def _half(self, back: bool) -> bool:
        """Return True if TF32 operands are passed in half precision, which has as many bits.

        In the backward pass a row must fit in a block. Its size in half precision must be a
        multiple of 16 bytes, as it is in float32.
        """
        loop = self.loop
        can = self.plain and tf32() and chip(self.index).major >= 8
        fits = loop.hidden <= MOST_THREADS * self.vector and loop.recurrent_weight.shape[0] % 8 == 0
        return (
            can and in_half(loop.cell, loop.gates.dtype, loop.hidden, back) and (fits or not back)
        )

    def scratch(
        self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return workspace for this pass, and pass it to the kernels as `name`."""
        value = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self.own.put(name, value)
        return value

    def addresses(self, values: Tensor) -> list[int]:
        """Return the address of the rows of each processed step of [N, ·].

        The rows of a step must be adjacent in memory.
        """
        start, size = (
            address(values, "values"),
            self.loop.batch * values.shape[1] * values.element_size(),
        )
        found = [start + t * size for t in range(self.loop.steps)]
        return found[::-1] if self.loop.reverse else found

    def rows(self, values: Tensor) -> Callable[[int], int]:
        """Return a function from a processed step to the address of its rows of [N, ·].

        The function gathers the rows first if they are not adjacent in memory.
        """
        if not self.apart:
            return self.addresses(values).__getitem__
        width = values.shape[1]
        to = values.new_empty(self.loop.batch, width)
        self.own.alive.append(to)
        start = address(to, "to")
        given = (
            self.arguments.struct,
            ctypes.c_void_p(address(values, "values")),
            ctypes.c_void_p(start),
        )
        blocks = (self.loop.batch, -(-width // THREADS))
        gather = self._at_step("gather", blocks, (THREADS, 1), (*given, ctypes.c_int64(width)))

        def gathered(t: int) -> int:
            gather(t)
            return start

        return gathered

    def step(self, name: str, units: int, parts: int = 0) -> Step:
        """Return the launch of a kernel with one thread for one or four units of a row of a step.

        `parts`: the bits of GATES, SHOWS and CARRY to compute.
        """
        blocks, threads = -(-self.loop.batch * (units // self.vector) // THREADS), THREADS
        if self.half and name == "backward":  # a block processes a whole row
            blocks, threads = self.loop.batch, self.threads
        given = (self.arguments.struct, self.own.struct)
        return self._at_step(name, (blocks, 1), (threads, 1), given, (ctypes.c_int(parts),))

    def centre(self) -> Step:
        """Return the launch that subtracts the mean over the rows of a step from `rec`.

        `rec` is the gradient that the product has passed back.
        """
        given = (self.arguments.struct, self.own.struct)
        return self._at_step("centre", (-(-self.loop.outputs // 32), 1), (32, 8), given)

    def _at_step(
        self,
        name: str,
        blocks: tuple[int, int],
        threads: tuple[int, int],
        before: tuple[Any, ...],
        after: tuple[Any, ...] = (),
    ) -> Step:
        """Return a prepared launch of a kernel; see `at_each_step`."""
        return at_each_step(self.kernels[name], blocks, threads, before, after, self.stream)

    def normalise(
        self,
        v: Tensor,
        hat: Tensor | None,
        scale: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
    ) -> Step:
        """Return the launch that computes the moments of `v` at a step.

        With `hat` it also writes the normalised values there, and scales and shifts `v` in place.
        """
        tensors = {"v": v, "hat": hat, "scale": scale, "bias": bias, "mean": mean, "var": var}
        return self._norm_step("norm_rows", "norm_columns", v.shape[1], **tensors)

    def normalise_back(
        self, dv: Tensor, d: Tensor, hat: Tensor, scale: Tensor | None, var: Tensor | None
    ) -> Step:
        """Return the launch for the backward pass of a norm.

        It writes `dv`, the gradient of the norm's input, from `d`, that of its scaled result.
        """
        wide = d.dtype == torch.float32
        rows, columns = (
            ("norm_rows_back", "norm_columns_back")
            if wide
            else ("norm_gates_back", "norm_gate_columns_back")
        )
        return self._norm_step(
            rows, columns, dv.shape[1], dv=dv, d=d, hat=hat, scale=scale, var=var
        )

    def _norm_step(self, rows: str, columns: str, width: int, **tensors: Tensor | None) -> Step:
        loop, own = self.loop, Arguments(Normed)
        assert loop.norm is not None
        for name, value in tensors.items():
            own.put(name, value)
        dv = tensors.get("dv")
        own.struct.width, own.struct.given, own.struct.eps = width, loop.given, loop.norm.eps
        own.struct.by_row = dv is not None and len(dv) != len(loop.gates)
        given = (self.arguments.struct, own.struct)
        if loop.norm.over == "units":
            return self._at_step(rows, (loop.batch, 1), (256, 1), given)
        return self._at_step(columns, ((width + 31) // 32, 1), (32, 8), given)


def defines_of(
    cell: Definition,
    dtype: torch.dtype,
    vector: int,
    plain: bool,
    block: int = 0,
    modes: tuple[int, int] | None = None,
    one_rate: bool = False,
) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernels are compiled with.

    `block`: maximum threads of a block that processes a whole row, for products in half precision;
    0 without them.
    """
    return (
        ("CELL", CELLS.index(cell)), ("TYPE", TYPES[dtype]),
        ("FAST", int(dtype != torch.float32 or tf32())), ("V", vector), ("PLAIN", int(plain)),
        ("HAS", 0 if plain else EVERYTHING), ("HALF", int(block > 0)), ("BLOCK", block),
        ("ONE_RATE", int(one_rate)), *known(modes),
    )  # fmt: skip
