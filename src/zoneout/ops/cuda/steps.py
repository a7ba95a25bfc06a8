"""One step at a time: a product and a fused kernel, for every cell, noise, norm and size."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ..loop import Backward, Loop
from .arguments import CELLS, TYPES, Arguments, Normed, Scratch, loop_arguments
from .compiler import Kernel, load, pack

THREADS = 256
GATES, SHOWS, CARRY = 1, 2, 4
_NAMES = (
    "enter", "forward", "carry", "norm_rows", "norm_columns", "backward", "carry_back", "settle",
    "norm_rows_back", "norm_gates_back", "norm_columns_back", "norm_gate_columns_back", "gather",
)  # fmt: skip


def run(loop: Loop, back: Backward | None) -> bool:
    """Run the loop step by step: always possible."""
    if back is None:
        forward(loop)
    else:
        backward(loop, back)
    return True


def forward(loop: Loop) -> None:
    """Run the loop forwards."""
    pass_ = _Pass(loop, None)
    lstm, norm, project = loop.cell == "lstm", loop.norm, loop.w_hr is not None
    product = pass_.product
    size = loop.outputs
    h_in = pass_.scratch("h_in", (loop.batch, size), loop.gates.dtype)
    pass_.scratch("h", (loop.batch, size))
    raw = pass_.scratch("raw", (loop.batch, loop.hidden)) if lstm and norm is not None else None
    u = pass_.scratch("u", (loop.batch, loop.hidden), loop.gates.dtype) if project else None
    projected = pass_.scratch("shown", (loop.batch, size)) if project else None
    enters = loop.resets is not None or loop.scale_h is not None or pass_.apart
    w = loop.w_hh.t()
    for t in range(loop.steps):
        left = loop.h0 if t == 0 else loop.y[pass_.at(t - 1)]
        if enters:
            pass_.run("enter", t, size)
            left = h_in
        multiply(left, w, product)
        if norm is not None:
            assert loop.gh is not None
            pass_.normalise(t, product, loop.gh, norm.scale_h, loop.b_h, loop.mean_h, loop.var_h)
        end = SHOWS if project else SHOWS | CARRY
        if lstm and norm is not None:
            assert raw is not None
            pass_.run("forward", t, loop.hidden, GATES)
            pass_.normalise(t, raw, None, None, None, loop.mean_c, loop.var_c)
            pass_.run("forward", t, loop.hidden, end)
        else:
            pass_.run("forward", t, loop.hidden, GATES | end)
        if project:
            assert u is not None and projected is not None and loop.w_hr is not None
            multiply(u, loop.w_hr.t(), projected)
            pass_.point("product", projected)
            pass_.run("carry", t, size)
            pass_.point("product", product)


def backward(loop: Loop, back: Backward) -> None:
    """Run the loop backwards."""
    pass_ = _Pass(loop, back)
    lstm, norm, project = loop.cell == "lstm", loop.norm, loop.w_hr is not None
    narrow, size = loop.gates.dtype, loop.outputs
    raw = pass_.scratch("raw", (loop.batch, loop.hidden)) if lstm and norm is not None else None
    shown = pass_.scratch("shown", (loop.batch, loop.hidden)) if project else None
    if (draw := loop.draws.get("update")) is not None and draw.rule.holds_gate:
        pass_.scratch("owed", (loop.batch, loop.hidden)).zero_()
    settles = loop.resets is not None or loop.scale_h is not None
    for name in ("du", "dgh", "u"):
        pass_.own.put(name, getattr(back, name), narrow)
    for name in ("dnc", "chat"):
        pass_.own.put(name, getattr(back, name), torch.float32)
    rec = torch.zeros_like(back.dh)
    for t in reversed(range(loop.steps)):
        if project:
            assert shown is not None and back.du is not None and loop.w_hr is not None
            pass_.run("carry_back", t, size)
            multiply(pass_.rows(t, back.du), loop.w_hr, shown)
        if lstm and norm is not None:
            assert raw is not None and back.dnc is not None and back.chat is not None
            pass_.run("backward", t, loop.hidden, SHOWS)
            pass_.normalise_back(t, raw, back.dnc, back.chat, norm.scale_c, loop.var_c)
            pass_.run("backward", t, loop.hidden, GATES)
        else:
            pass_.run("backward", t, loop.hidden, GATES | SHOWS)
        if norm is not None:
            assert loop.gh is not None
            pass_.normalise_back(t, back.dgh, back.dsh, loop.gh, norm.scale_h, loop.var_h)
        multiply(pass_.rows(t, back.dgh), loop.w_hh, rec)
        pass_.point("rec", rec)
        if settles:
            pass_.run("settle", t, max(size, loop.hidden))
            pass_.point("rec", None)
    if not settles:
        back.dh += rec


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """A product with sums in float32, whatever the type of its factors."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


class _Pass:
    """The kernels of one pass, and what is the same in all their launches."""

    def __init__(self, loop: Loop, back: Backward | None) -> None:
        narrow = loop.gates.dtype
        self.loop, self.device = loop, loop.gates.device
        self.arguments, self.own = loop_arguments(loop, back), Arguments(Scratch)
        defines = (("CELL", CELLS.index(loop.cell)), ("TYPE", TYPES[narrow]), ("FAST", int(narrow != torch.float32)))
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        self.kernels: dict[str, Kernel] = dict(zip(_NAMES, load(index, "steps.cu", _NAMES, defines), strict=True))
        self.apart = loop.reverse and loop.lengths is not None  # whether the rows of a step lie apart
        self.t, self.parts = ctypes.c_int(), ctypes.c_int()
        self.packed = pack((self.arguments.struct, self.own.struct, self.t, self.parts))
        self.product = self.scratch("product", (loop.batch, loop.gates.shape[1]))
        self._norm()

    def _norm(self) -> None:
        loop, s = self.loop, self.own.struct
        s.project = loop.w_hr is not None
        if loop.norm is None:
            return
        s.norm, s.given, s.eps = 1 if loop.norm.over == "units" else 2, loop.given, loop.norm.eps
        tensors = {"norm_h": loop.norm.scale_h, "norm_c": loop.norm.scale_c, "norm_c_shift": loop.norm.shift_c}
        tensors |= {name: getattr(loop, name) for name in ("mean_h", "var_h", "mean_c", "var_c")}
        for name, value in tensors.items():
            self.own.put(name, value, torch.float32)

    def scratch(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for this pass, known to the kernels under `name`."""
        value = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        self.own.put(name, value)
        return value

    def point(self, name: str, value: Tensor | None) -> None:
        setattr(self.own.struct, name, None if value is None else value.data_ptr())

    def at(self, t: int) -> slice:
        """Where the rows of a processed step lie, if they lie together."""
        begin = (self.loop.steps - 1 - t if self.loop.reverse else t) * self.loop.batch
        return slice(begin, begin + self.loop.batch)

    def rows(self, t: int, values: Tensor) -> Tensor:
        """The rows of a processed step of [N, ·]."""
        if not self.apart:
            return values[self.at(t)]
        to = values.new_empty(self.loop.batch, values.shape[1])
        width = values.shape[1]
        arguments = (self.arguments.struct, _pointer(values), _pointer(to), ctypes.c_int64(width), ctypes.c_int(t))
        self.kernels["gather"].launch((self.loop.batch, -(-width // THREADS)), THREADS, pack(arguments))
        return to

    def run(self, name: str, t: int, units: int, parts: int = 0) -> None:
        """One thread for each unit of each row of a step."""
        self.t.value, self.parts.value = t, parts
        self.kernels[name].launch((self.loop.batch, -(-units // THREADS)), THREADS, self.packed)

    def normalise(
        self,
        t: int,
        v: Tensor,
        hat: Tensor | None,
        scale: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
    ) -> None:
        """Moments of a step, and where `hat` is given also the normalised and, in place, the scaled and shifted."""
        assert self.loop.norm is not None
        if hat is None and self.loop.given:
            return
        tensors = {"v": v, "hat": hat, "scale": scale, "bias": bias, "mean": mean, "var": var}
        self._launch_norm("norm_rows", "norm_columns", t, v.shape[1], **tensors)

    def normalise_back(
        self, t: int, dv: Tensor, d: Tensor, hat: Tensor, scale: Tensor | None, var: Tensor | None
    ) -> None:
        """Through a normalisation, from the derivative of its scaled result."""
        wide = d.dtype == torch.float32
        rows, columns = (
            ("norm_rows_back", "norm_columns_back") if wide else ("norm_gates_back", "norm_gate_columns_back")
        )
        self._launch_norm(rows, columns, t, dv.shape[1], dv=dv, d=d, hat=hat, scale=scale, var=var)

    def _launch_norm(self, rows: str, columns: str, t: int, width: int, **tensors: Tensor | None) -> None:
        loop, own = self.loop, Arguments(Normed)
        assert loop.norm is not None
        for name, value in tensors.items():
            own.put(name, value)
        dv = tensors.get("dv")
        own.struct.width, own.struct.given, own.struct.eps = width, loop.given, loop.norm.eps
        own.struct.by_row = dv is not None and len(dv) != len(loop.gates)
        self.t.value = t
        packed = pack((self.arguments.struct, own.struct, self.t))
        if loop.norm.over == "units":
            self.kernels[rows].launch(loop.batch, THREADS, packed)
        else:
            self.kernels[columns].launch((width + 31) // 32, (32, 8), packed)


def _pointer(value: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(value.data_ptr())
