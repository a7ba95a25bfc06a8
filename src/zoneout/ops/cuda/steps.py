"""One step at a time: a product and a fused kernel, for every cell, noise, norm and size."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ..loop import Backward, Loop
from .arguments import CELLS, TYPES, Arguments, Scratch, loop_arguments
from .compiler import Kernel, load, pack

THREADS = 256
GATES, SHOWS, CARRY = 1, 2, 4
_NAMES = (
    "enter", "forward", "carry", "norm_rows", "norm_columns", "backward", "carry_back", "settle",
    "norm_rows_back", "norm_gates_back", "norm_columns_back", "norm_gate_columns_back",
)  # fmt: skip


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
    enters = loop.resets is not None or loop.scale_h is not None
    w, previous = loop.w_hh.t(), 0
    for t, (begin, count) in enumerate(pass_.spans):
        left = loop.h0 if t == 0 else loop.y[previous : previous + loop.batch]
        if enters:
            pass_.run("enter", t, count, size)
            left = h_in
        multiply(left[:count], w, product[:count])
        if norm is not None:
            assert loop.gh is not None
            pass_.normalise(product, loop.gh[begin:], norm.scale_h, loop.b_h, loop.mean_h, loop.var_h, t, begin, count)
        end = SHOWS if project else SHOWS | CARRY
        if lstm and norm is not None:
            assert raw is not None
            pass_.run("forward", t, count, loop.hidden, GATES)
            pass_.normalise(raw, None, None, None, loop.mean_c, loop.var_c, t, begin, count)
            pass_.run("forward", t, count, loop.hidden, end)
        else:
            pass_.run("forward", t, count, loop.hidden, GATES | end)
        if project:
            assert u is not None and projected is not None and loop.w_hr is not None
            multiply(u[:count], loop.w_hr.t(), projected[:count])
            pass_.point("product", projected)
            pass_.run("carry", t, count, size)
            pass_.point("product", product)
        previous = begin


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
    for t, (begin, count) in reversed(list(enumerate(pass_.spans))):
        at = slice(begin, begin + count)
        if project:
            assert shown is not None and back.du is not None and loop.w_hr is not None
            pass_.run("carry_back", t, count, size)
            multiply(back.du[at], loop.w_hr, shown[:count])
        if lstm and norm is not None:
            assert raw is not None and back.dnc is not None and back.chat is not None
            pass_.run("backward", t, count, loop.hidden, SHOWS)
            pass_.normalise_back(raw, back.dnc[at], back.chat[at], norm.scale_c, loop.var_c, t, begin, count)
            pass_.run("backward", t, count, loop.hidden, GATES)
        else:
            pass_.run("backward", t, count, loop.hidden, GATES | SHOWS)
        if norm is not None:
            assert loop.gh is not None
            pass_.normalise_back(back.dgh[at], back.dsh[at], loop.gh[at], norm.scale_h, loop.var_h, t, begin, count)
        multiply(back.dgh[at], loop.w_hh, rec[:count])
        pass_.point("rec", rec)
        if settles:
            pass_.run("settle", t, count, max(size, loop.hidden))
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
        self.spans = [(b, n) for b, n in zip(loop.offsets.tolist(), loop.counts.tolist(), strict=True) if n > 0]
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

    def run(self, name: str, t: int, count: int, units: int, parts: int = 0) -> None:
        """One thread for each unit of each row of a step."""
        self.t.value, self.parts.value = t, parts
        self.kernels[name].launch((count, (units + THREADS - 1) // THREADS), THREADS, self.packed)

    def normalise(
        self,
        v: Tensor,
        hat: Tensor | None,
        scale: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        t: int,
        begin: int,
        count: int,
    ) -> None:
        """Moments of a step, and where `hat` is given also the normalised and, in place, the scaled and shifted."""
        assert self.loop.norm is not None and mean is not None and var is not None
        width, eps = v.shape[1], ctypes.c_double(self.loop.norm.eps)
        fixed = [_pointer(v), _pointer(hat), _pointer(scale), _pointer(bias)]
        if self.loop.norm.over == "units":
            values = [*fixed, _pointer(mean[begin:]), _pointer(var[begin:]), ctypes.c_int64(width), eps]
            self.kernels["norm_rows"].launch(count, THREADS, pack(values))
        elif hat is not None or not self.loop.given:
            values = [*fixed, _pointer(mean[t]), _pointer(var[t]), ctypes.c_int64(count), ctypes.c_int64(width), eps]
            values.append(ctypes.c_int(self.loop.given))
            self.kernels["norm_columns"].launch((width + 31) // 32, (32, 8), pack(values))

    def normalise_back(
        self,
        dv: Tensor,
        d: Tensor,
        hat: Tensor,
        scale: Tensor | None,
        var: Tensor | None,
        t: int,
        begin: int,
        count: int,
    ) -> None:
        """Through a normalisation, from the derivative of its scaled result."""
        assert self.loop.norm is not None and var is not None
        width, eps = dv.shape[1], ctypes.c_double(self.loop.norm.eps)
        gates = width == self.loop.gates.shape[1] and dv.data_ptr() != self.own.struct.raw
        fixed = [_pointer(dv), _pointer(d), _pointer(hat), _pointer(scale)]
        if self.loop.norm.over == "units":
            values = [*fixed, _pointer(var[begin:]), ctypes.c_int64(width), eps]
            self.kernels["norm_gates_back" if gates else "norm_rows_back"].launch(count, THREADS, pack(values))
        else:
            values = [*fixed, _pointer(var[t]), ctypes.c_int64(count), ctypes.c_int64(width), eps]
            values.append(ctypes.c_int(self.loop.given))
            name = "norm_gate_columns_back" if gates else "norm_columns_back"
            self.kernels[name].launch((width + 31) // 32, (32, 8), pack(values))


def _pointer(value: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if value is None else value.data_ptr())
