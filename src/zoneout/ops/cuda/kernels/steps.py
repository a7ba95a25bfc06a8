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
from ... import recording
from ...backend import Loop, LoopGrads
from ...memory import address, is_aligned
from ...sequence.products import pad_columns
from ..runtime.arguments import (
    ALL_FEATURES,
    Arguments,
    NormStep,
    Scratch,
    common_defines,
    features_of,
    loop_arguments,
    mode_defines,
    modes_of,
)
from ..runtime.blas import batch_invariant, product
from ..runtime.compiler import Kernel, Ready, at_each_step, chip, load, tf32
from .persistent import in_half

THREADS = 64  # per block
MOST_THREADS = 1024  # maximum in a block that processes a whole row
PART_GATES, PART_SHOWN, PART_CARRY = 1, 2, 4  # bits: what a launch computes of a step
_PLAIN_NAMES = ("forward", "backward")
_NAMES = (
    *_PLAIN_NAMES, "enter", "carry", "norm_rows", "norm_columns", "carry_back", "centre", "settle",
    "norm_rows_back", "norm_gates_back", "norm_columns_back", "norm_gate_columns_back", "gather",
)  # fmt: skip

Step = Callable[[int], None]  # runs one operation of step t


def ready(loop: Loop, grads: LoopGrads | None, concurrent: int) -> Ready:
    """Prepare a loop step by step; it always runs on the current stream."""
    recording.refuse_many(loop.steps)
    return Ready(lambda side_stream: forward(loop) if grads is None else backward(loop, grads))


def forward(loop: Loop) -> None:
    """Run the forward pass of a loop."""
    pass_ = _Pass(loop, None)
    has_shown, norm, w_hr = "shown" in loop.cell.marks, loop.norm, loop.w_hr
    dtype, batch, size = loop.gates.dtype, loop.batch, loop.outputs
    # The carried h needs its own float32 buffer only if y is rounded and the step computes with h,
    # instead of only replacing or keeping it.
    draw = loop.draws.get("hidden")
    computes = loop.cell.reads_h or (draw is not None and draw.seed is None)
    if dtype != torch.float32 and computes and loop.steps > 1:
        pass_.scratch("h", (batch, size))
    enters = loop.resets is not None or loop.scale_h is not None or pass_.gathered
    h_addresses = [address(loop.h0, "h0"), *pass_.addresses(loop.y)[:-1]]
    w = pad_columns(_halved(loop.recurrent_weight) if pass_.half else loop.recurrent_weight)
    if pass_.half:
        h_in = pad_columns(_halved(loop.h0))
        pass_.extra.put("h_next", h_in)
        h_addresses, pass_.extra.struct.pitch = [address(h_in, "h_in")] * loop.steps, w.shape[1]
    elif enters or w.shape[1] != size:
        h_in = pass_.scratch("h_in", (batch, w.shape[1]), dtype)
        h_addresses, pass_.extra.struct.pitch = [address(h_in, "h_in")] * loop.steps, w.shape[1]
        h_in.copy_(pad_columns(loop.h0))
        pass_.extra.struct.h_next = None if enters else address(h_in, "h_in")
    # True: the product is added to x's part of the gates in place.
    in_place = norm is None and not loop.cell.storage.apart and not pass_.gathered
    out_addresses, out_dtype = pass_.addresses(loop.gates), dtype
    if not in_place:
        h_w = pass_.scratch("product", (batch, loop.gates.shape[1]))
        out_addresses, out_dtype = [address(h_w, "h_w")] * loop.steps, torch.float32
    multiply = product(w, batch, out_dtype, transposed=True, add=in_place)

    after_product: list[Step] = []
    end = PART_SHOWN | PART_CARRY if w_hr is None else PART_SHOWN
    if norm is not None:
        assert loop.gh is not None
        after_product.append(
            pass_.normalise(h_w, loop.gh, norm.scale_h, loop.b_h, loop.mean_h, loop.var_h)
        )
    if has_shown and norm is not None:
        candidate = pass_.scratch("candidate_c", (batch, loop.hidden))
        after_product.append(pass_.step("forward", loop.hidden, PART_GATES))
        if not loop.given:
            after_product.append(
                pass_.normalise(candidate, None, None, None, loop.mean_c, loop.var_c)
            )
        after_product.append(pass_.step("forward", loop.hidden, end))
    else:
        after_product.append(pass_.step("forward", loop.hidden, PART_GATES | end))
    if w_hr is not None:
        u = address(pass_.scratch("u", (batch, loop.hidden), dtype), "u")
        projected = address(pass_.scratch("projected", (batch, size)), "projected")
        project = product(w_hr, batch, torch.float32, transposed=True)
        after_product.append(lambda t: project(u, projected))
        after_product.append(pass_.step("carry", size))
    before_product: list[Step] = [pass_.step("enter", size)] if enters else []
    for t in range(loop.steps):
        for do in before_product:
            do(t)
        multiply(h_addresses[t], out_addresses[t])
        for do in after_product:
            do(t)


def backward(loop: Loop, grads: LoopGrads) -> None:
    """Run the backward pass of a loop."""
    pass_ = _Pass(loop, grads)
    has_shown, norm, w_hr = "shown" in loop.cell.marks, loop.norm, loop.w_hr
    dtype, batch, size = loop.gates.dtype, loop.batch, loop.outputs
    if (draw := loop.draws.get("update")) is not None and draw.rule.holds_gate:
        pass_.scratch("owed", (batch, loop.hidden)).zero_()
    pass_.extra.put_all(grads, ("du", "u"), dtype)
    pass_.extra.put_all(grads, ("dnc", "chat"), torch.float32)

    before_product: list[Step] = []
    if w_hr is not None:
        assert grads.du is not None
        projected = address(pass_.scratch("projected", (batch, loop.hidden)), "projected")
        rows = pass_.rows(grads.du)
        unproject = product(w_hr, batch, torch.float32, transposed=False)
        before_product.append(pass_.step("carry_back", size))
        before_product.append(lambda t: unproject(rows(t), projected))
    if has_shown and norm is not None:
        assert grads.dnc is not None and grads.chat is not None
        candidate = pass_.scratch("candidate_c", (batch, loop.hidden))
        before_product.append(pass_.step("backward", loop.hidden, PART_SHOWN))
        before_product.append(
            pass_.normalise_back(candidate, grads.dnc, grads.chat, norm.scale_c, loop.var_c)
        )
        before_product.append(pass_.step("backward", loop.hidden, PART_GATES))
    else:
        before_product.append(pass_.step("backward", loop.hidden, PART_GATES | PART_SHOWN))
    if norm is not None:
        assert loop.gh is not None
        before_product.append(
            pass_.normalise_back(grads.dgh, grads.dsh, loop.gh, norm.scale_h, loop.var_h)
        )

    settled = loop.resets is not None or loop.scale_h is not None
    depth = loop.recurrent_weight.shape[0]
    if pass_.half:
        w, unscale_w = _scaled(loop.recurrent_weight)
        w, transposed = pad_columns(w), False
        pass_.extra.put("unscale_w", unscale_w, torch.float32)
        d_half = address(pass_.scratch("d_half", (batch, depth), torch.float16), "d_half")
        unscale = pass_.scratch("unscale", (batch,))
        operand_at: Callable[[int], int] = lambda t: d_half  # noqa: E731
    else:
        w, transposed = for_backward(loop.recurrent_weight)
        operand_at = pass_.rows(grads.dgh)
    pitch = w.shape[0] if transposed else w.shape[1]
    splits = depth_splits(depth, pitch, batch, w.element_size(), chip(pass_.index).processors)
    rec = pass_.scratch("rec", (splits, batch, pitch))
    pass_.extra.struct.pitch = pitch
    pass_.extra.struct.splits = splits
    pass_.extra.struct.settled = settled
    multiply, to = product(w, batch, torch.float32, transposed, splits=splits), address(rec, "rec")
    after_product: list[Step] = [pass_.centre()] if loop.balanced else []
    if settled:
        after_product.append(pass_.step("settle", max(size, loop.hidden)))
    for t in reversed(range(loop.steps)):
        for do in before_product:
            do(t)
        multiply(operand_at(t), to)
        for do in after_product:
            do(t)
    if not settled:
        received = rec.sum(0)[:, :size]
        if pass_.half:
            received = received * unscale_w * unscale[:, None]
        grads.dh.add_(received)


def depth_splits(depth: int, columns: int, rows: int, size: int, processors: int) -> int:
    """Return into how many sums the depth of the product in the backward pass is split.

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

    def __init__(self, loop: Loop, grads: LoopGrads | None) -> None:
        self.loop, self.device = loop, loop.gates.device
        self.arguments, self.extra = loop_arguments(loop, grads), Arguments(Scratch)
        self.index = loop.gates.get_device()
        # True: the rows of one processed step are not adjacent in memory.
        self.gathered = loop.reverse and loop.lengths is not None
        self.plain = loop.norm is None and loop.w_hr is None and not features_of(loop, grads)
        self.stream = torch._C._cuda_getCurrentRawStream(self.index)
        self._norm()
        self.vector = 4 if self._aligned() else 1
        self.half = self._half(grads is not None)
        names: tuple[str, ...] = _PLAIN_NAMES if self.plain else _NAMES
        if self.half:  # the other pass may have no half-precision kernel
            names = ("forward" if grads is None else "backward",)
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
        loop, s = self.loop, self.extra.struct
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
            self.extra.put(name, value, torch.float32)

    def _aligned(self) -> bool:
        """Return True if sizes and alignment allow reading four adjacent elements at once."""
        if self.loop.hidden % 4 or self.loop.outputs % 4:
            return False
        dtypes = (self.loop.gates.dtype, torch.float32)
        tensors = (*self.arguments.alive, *self.extra.alive)
        return all(is_aligned(v, 4 * v.element_size()) for v in tensors if v.dtype in dtypes)

    def _half(self, backward: bool) -> bool:
        """Return True if TF32 operands are passed in half precision, which has as many bits.

        In the backward pass a row must fit in a block. Its size in half precision must be a
        multiple of 16 bytes, as it is in float32.
        """
        loop = self.loop
        supported = self.plain and tf32() and chip(self.index).major >= 8
        fits = loop.hidden <= MOST_THREADS * self.vector and loop.recurrent_weight.shape[0] % 8 == 0
        return (
            supported
            and in_half(loop.cell, loop.gates.dtype, loop.hidden, backward)
            and (fits or not backward)
        )

    def scratch(
        self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return workspace for this pass, and pass it to the kernels as `name`."""
        value = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self.extra.put(name, value)
        return value

    def addresses(self, values: Tensor) -> list[int]:
        """Return the address of the rows of each processed step of [N, ·].

        The rows of a step must be adjacent in memory.
        """
        start = address(values, "values")
        size = self.loop.batch * values.shape[1] * values.element_size()
        addresses = [start + t * size for t in range(self.loop.steps)]
        return addresses[::-1] if self.loop.reverse else addresses

    def rows(self, values: Tensor) -> Callable[[int], int]:
        """Return a function from a processed step to the address of its rows of [N, ·].

        The function gathers the rows first if they are not adjacent in memory.
        """
        if not self.gathered:
            return self.addresses(values).__getitem__
        width = values.shape[1]
        rows = values.new_empty(self.loop.batch, width)
        self.extra.alive.append(rows)
        start = address(rows, "rows")
        structs = (
            self.arguments.struct,
            ctypes.c_void_p(address(values, "values")),
            ctypes.c_void_p(start),
        )
        blocks = (self.loop.batch, -(-width // THREADS))
        gather = self._at_step("gather", blocks, (THREADS, 1), (*structs, ctypes.c_int64(width)))

        def gather_rows(t: int) -> int:
            gather(t)
            return start

        return gather_rows

    def step(self, name: str, units: int, work: int = 0) -> Step:
        """Return the launch of a kernel with one thread for one or four units of a row of a step.

        `work`: the bits of PART_GATES, PART_SHOWN and PART_CARRY to compute.
        """
        blocks, threads = -(-self.loop.batch * (units // self.vector) // THREADS), THREADS
        if self.half and name == "backward":  # a block processes a whole row
            blocks, threads = self.loop.batch, self.threads
        structs = (self.arguments.struct, self.extra.struct)
        return self._at_step(name, (blocks, 1), (threads, 1), structs, (ctypes.c_int(work),))

    def centre(self) -> Step:
        """Return the launch that subtracts the mean over the rows of a step from `rec`.

        `rec` is the gradient that the product has passed back.
        """
        structs = (self.arguments.struct, self.extra.struct)
        return self._at_step("centre", (-(-self.loop.outputs // 32), 1), (32, 8), structs)

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
        is_float = d.dtype == torch.float32
        rows, columns = (
            ("norm_rows_back", "norm_columns_back")
            if is_float
            else ("norm_gates_back", "norm_gate_columns_back")
        )
        return self._norm_step(
            rows, columns, dv.shape[1], dv=dv, d=d, hat=hat, scale=scale, var=var
        )

    def _norm_step(self, rows: str, columns: str, width: int, **tensors: Tensor | None) -> Step:
        loop, extra = self.loop, Arguments(NormStep)
        assert loop.norm is not None
        for name, value in tensors.items():
            extra.put(name, value)
        dv = tensors.get("dv")
        extra.struct.width, extra.struct.given, extra.struct.eps = width, loop.given, loop.norm.eps
        extra.struct.by_row = dv is not None and len(dv) != len(loop.gates)
        structs = (self.arguments.struct, extra.struct)
        if loop.norm.over == "units":
            return self._at_step(rows, (loop.batch, 1), (256, 1), structs)
        return self._at_step(columns, ((width + 31) // 32, 1), (32, 8), structs)


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
        *common_defines(cell, dtype, fast=dtype != torch.float32 or tf32()),
        ("VECTOR", vector),
        ("PLAIN", int(plain)),
        ("FEATURES", 0 if plain else ALL_FEATURES),
        ("HALF", int(block > 0)),
        ("MOST_THREADS", block),
        ("ONE_RATE", int(one_rate)),
        *mode_defines(modes),
    )
