"""Rows on a GPU: their layout for the loop, and the operations around it, one launch each.

The kernels read lengths and direction on the GPU, so the CPU never waits for the lengths.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...backend import Loop
from ...memory import address
from ...sequence.products import block_products, pad_columns, product, times, without_padding
from ..runtime.arguments import TYPES, common_defines
from ..runtime.compiler import load

THREADS = 256
MOST_ARRAYS = 7  # maximum arrays that one launch clears
BLOCKS = 1024  # maximum blocks that clear rows: as many as a large chip runs at once

MOST_RANGES = 4  # maximum column ranges of one launch of split_columns
_KERNELS = ("move", "clear", "final_states", "recurrent_inputs", "split_columns")
_i64, _p = ctypes.c_int64, ctypes.c_void_p
# Array types, stored because ctypes would build them again at every call.
_Pointers, _Integers = _p * MOST_ARRAYS, _i64 * MOST_ARRAYS
_RangePointers, _RangeIntegers = _p * MOST_RANGES, _i64 * MOST_RANGES


class Side(ctypes.Structure):
    """`Side` of rows.cu."""

    _fields_ = [("start", _p), ("first_rows", _p), ("step_bytes", _i64), ("row_bytes", _i64)]


class Move(ctypes.Structure):
    """`Move` of rows.cu."""

    _fields_ = [
        *((name, Side) for name in ("source", "to")),
        *((name, _i64) for name in ("steps", "batch", "words", "word")),
        ("lengths", _p),
    ]


class Clear(ctypes.Structure):
    """`Clear` of rows.cu."""

    _fields_ = [
        *((name, _i64) for name in ("steps", "batch")),
        ("lengths", _p),
        ("count", _i64),
        ("start", _Pointers),
        *((name, _Integers) for name in ("width", "word")),
    ]


class State(ctypes.Structure):
    """`State` of rows.cu."""

    _fields_ = [
        *((name, _p) for name in ("every", "initial", "last")),
        ("width", _i64),
        ("is_float", _i64),
    ]


class FinalStates(ctypes.Structure):
    """`FinalStates` of rows.cu."""

    _fields_ = [
        *((name, _i64) for name in ("steps", "batch", "reverse")),
        ("lengths", _p),
        ("states", State * 2),
    ]


class RecurrentInputs(ctypes.Structure):
    """`RecurrentInputs` of rows.cu."""

    _fields_ = [
        *((name, _i64) for name in ("steps", "batch", "reverse")),
        *(
            (name, _p)
            for name in ("lengths", "resets", "y", "h0", "reset_h", "scale_h", "x", "out")
        ),
        *((name, _i64) for name in ("h_words", "h_word", "x_words", "x_word", "ones")),
    ]


class SplitColumns(ctypes.Structure):
    """`SplitColumns` of rows.cu."""

    _fields_ = [
        *((name, _i64) for name in ("rows", "pitch")),
        *((name, _RangePointers) for name in ("source", "to")),
        *((name, _RangeIntegers) for name in ("words", "word")),
    ]


# --- the kernels ---


def zero_past_lengths(v: Tensor, lengths: Tensor) -> Tensor:
    """Return v, [T, B, ·], contiguous and with zeros past the lengths, whatever the padding is."""
    return _move(v, None, v.new_empty(v.shape), None, lengths)


def unpacked(rows: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Return packed rows as [T, B, ·], zero past the lengths.

    The rows of step t begin at row starts[t].
    """
    return _move(
        rows,
        starts,
        rows.new_empty(starts.shape[0], lengths.shape[0], rows.shape[1]),
        None,
        lengths,
    )


def packed(v: Tensor, starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """Return v, [T, B, ·], as packed rows, without the padding: the inverse of `unpacked`."""
    return _move(v, None, v.new_empty(total, v.shape[2]), starts, lengths)


def _move(
    v: Tensor, v_starts: Tensor | None, out: Tensor, out_starts: Tensor | None, lengths: Tensor
) -> Tensor:
    """Copy the rows of `v` to `out` and return `out`; with starts, a side is packed."""
    v = v if v.stride(-1) == 1 else v.contiguous()
    size, (steps, batch, width) = v.element_size(), v.shape if v_starts is None else out.shape
    if steps * batch * width == 0:
        return out
    source, to = _side(v, v_starts, size), _side(out, out_starts, size)
    of_source = (source.start, source.step_bytes, source.row_bytes)
    word = _largest_word(width * size, *of_source, to.start, to.step_bytes, to.row_bytes)
    words = width * size // word
    blocks = -(-(steps * batch * words) // THREADS)
    _launch(
        "move", v, blocks, Move(source, to, steps, batch, words, word, _int64_pointer(lengths, v))
    )
    return out


def _side(v: Tensor, starts: Tensor | None, size: int) -> Side:
    if starts is not None:
        return Side(address(v, "rows", gaps=True), _int64_pointer(starts, v), 0, v.stride(0) * size)
    step, row, _ = v.stride()
    return Side(address(v, "rows", gaps=True), None, step * size, row * size)


def clear(lengths: Tensor, steps: int, *arrays: Tensor | None) -> None:
    """Set arrays [T · B, ·] to zero past the lengths.

    Each must be contiguous. The same array may be given twice.
    """
    arrays_at = {address(v, "array"): v for v in arrays if v is not None}
    batch = lengths.shape[0]
    if steps * batch == 0 or not arrays_at:
        return
    first, *_ = arrays_at.values()
    widths = [v.shape[-1] * v.element_size() for v in arrays_at.values()]
    words = [_largest_word(at, width) for at, width in zip(arrays_at, widths)]
    at = _int64_pointer(lengths, first)
    arguments = Clear(
        steps,
        batch,
        at,
        len(arrays_at),
        _Pointers(*arrays_at),
        _Integers(*widths),
        _Integers(*words),
    )
    _launch("clear", first, min(BLOCKS, -(-(steps * batch) // (THREADS // 32))), arguments)


def final_states(
    states: Sequence[tuple[Tensor, Tensor]],
    steps: int,
    lengths: Tensor | None,
    reverse: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the final state of every row, cast to `dtype`, for one or two states.

    Each state is given as a pair: at every step, [T · B, ·], and the initial state.
    """
    batch = len(states[0][1])
    out = [initial.new_empty(initial.shape, dtype=dtype) for _, initial in states]
    initials = [initial.contiguous() for _, initial in states]
    states_of = [
        State(
            _pointer(every),
            _pointer(initial),
            _pointer(to),
            to.shape[1],
            every.dtype == torch.float32,
        )
        for (every, _), initial, to in zip(states, initials, out)
    ]
    if most := batch * max(to.shape[1] for to in out):
        at = None if lengths is None else _int64_pointer(lengths, out[0])
        ends = FinalStates(steps, batch, reverse, at, (State * 2)(*states_of))
        _launch("final_states", out[0], (-(-most // THREADS), len(out)), ends)
    return out


def recurrent_inputs(
    loop: Loop, lengths: Tensor | None, reverse: bool, x: Tensor | None, out: Tensor
) -> Tensor:
    """Write to `out`, [T · B, ·], the h that entered the gates at every row, and return `out`.

    The columns after h are x, if given, then ones up to the width of `out`.
    """
    size, outputs, inputs = out.element_size(), loop.outputs, 0 if x is None else x.shape[1]
    h, x_bytes, pitch = outputs * size, inputs * size, out.shape[1] * size
    if out.numel() == 0:
        return out
    starts = [at for at in map(_pointer, (loop.y, loop.h0, loop.reset_h, out)) if at is not None]
    h_word = _largest_word(h, pitch, *starts) if loop.scale_h is None else size
    x_word = size if x is None else _largest_word(x_bytes, pitch, address(x, "x"), starts[-1] + h)
    ones = out.shape[1] - outputs - inputs
    resets, reset_h = (loop.resets, loop.reset_h) if loop.reset_h is not None else (None, None)
    arguments = RecurrentInputs(
        loop.steps,
        loop.batch,
        reverse,
        _pointer(lengths),
        _pointer(resets),
        _pointer(loop.y),
        _pointer(loop.h0),
        _pointer(reset_h),
        _pointer(loop.scale_h),
        _pointer(x),
        starts[-1],
        h // h_word,
        h_word,
        x_bytes // x_word,
        x_word,
        ones,
    )
    words = h // h_word + x_bytes // x_word + ones
    _launch("recurrent_inputs", out, -(-(loop.steps * loop.batch * words) // THREADS), arguments)
    return out


def split_columns(v: Tensor, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Split a contiguous matrix by columns into new matrices; a range is (first column, width)."""
    count, size, pitch = len(v), v.element_size(), v.shape[1] * v.element_size()
    out = [v.new_empty(count, width) for _, width in ranges]
    start = address(v, "matrix")
    sources = [start + first * size for first, _ in ranges]
    places = [address(to, "part") for to in out]
    words = [
        _largest_word(width * size, pitch, *at) for (_, width), *at in zip(ranges, sources, places)
    ]
    numbers = [width * size // word for (_, width), word in zip(ranges, words)]
    if most := count * max(numbers):
        arrays = (
            _RangePointers(*sources),
            _RangePointers(*places),
            _RangeIntegers(*numbers),
            _RangeIntegers(*words),
        )
        _launch(
            "split_columns", v, (-(-most // THREADS), len(out)), SplitColumns(count, pitch, *arrays)
        )
    return out


def _pointer(v: Tensor | None) -> int | None:
    return None if v is None else address(v, "rows")


def _int64_pointer(v: Tensor, of: Tensor) -> int:
    """Return the address of an int64 tensor (lengths or starts) on the device of `of`."""
    return address(v, "lengths", torch.int64, of.get_device())


def _largest_word(*addresses: int) -> int:
    """Return the size of the largest word, at most 16 bytes, that divides all arguments."""
    bits = 16
    for value in addresses:
        bits |= value
    return bits & -bits


def _launch(
    name: str, like: Tensor, blocks: int | tuple[int, int], arguments: ctypes.Structure
) -> None:
    device = like.get_device()
    elsewhere = device != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        kernels = load(device, "rows.cu", _KERNELS, defines_of(like.dtype))
        kernels[_KERNELS.index(name)].launch(blocks, THREADS, (arguments,))


def defines_of(dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernels are compiled with.

    Kernels that only copy rows work with any dtype, so an unknown one is allowed.
    """
    return common_defines(None, dtype if dtype in TYPES else torch.float32)


# --- the layout of rows ---


@dataclass
class Padded:
    """The padded layout: rows stay as in [T, B, ·].

    A loop that runs all rows at once skips those that have ended.
    """

    lengths: Tensor | None  # [B], on the device of the rows
    steps: int
    batch: int
    reverse: bool

    counts = starts = None
    whole = True

    @property
    def sorted_lengths(self) -> Tensor | None:
        return self.lengths

    @cached_property
    def _step_numbers(self) -> Tensor:
        assert self.lengths is not None
        return torch.arange(self.steps, device=self.lengths.device)[:, None]

    def inputs(self, x: Tensor) -> Tensor:
        """[T, B, ·] -> [T · B, ·], zero past the lengths, whatever the padding contains."""
        return self.pack(x if self.lengths is None else zero_past_lengths(x, self.lengths))

    def pack(self, v: Tensor) -> Tensor:
        """[T, B, ·] -> [T · B, ·]."""
        return v.reshape(self.steps * self.batch, *v.shape[2:]).contiguous()

    def unpack(self, v: Tensor) -> Tensor:
        return v.view(self.steps, self.batch, v.shape[-1])

    def sort(self, v: Tensor) -> Tensor:
        return v.contiguous()

    def unsort(self, v: Tensor) -> Tensor:
        return v

    def final(self, states: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[Tensor]:
        """Return the final state of every row, cast to `dtype`, in new tensors.

        Each state is given as a pair: at every step, and the initial state.
        """
        pairs = [states[k : k + 2] for k in range(0, len(states), 2)]
        return [
            v
            for two in pairs
            for v in final_states(two, self.steps, self.lengths, self.reverse, dtype)
        ]

    def cuts(self, resets: Tensor | None) -> Tensor | None:
        return None if resets is None else resets.contiguous()

    def recurrent_inputs(self, loop: Loop) -> Tensor:
        """Return the h that entered the gates at every row, [T · B, P].

        If the loop is `balanced`, the h of one row of the same step is subtracted.
        """
        h_in = recurrent_inputs(loop, self.lengths, self.reverse, None, torch.empty_like(loop.y))
        return self.differences(h_in) if loop.balanced else h_in

    def differences(self, v: Tensor) -> Tensor:
        """Return v, [T · B, ·], minus the value of one row of the same step."""
        v = self.unpack(v)
        return self.pack(v - self._of_one_row(v))

    def _of_one_row(self, v: Tensor) -> Tensor:
        """Return, for every row, the value of a longest row at the same processed step."""
        if self.lengths is None or self.batch == 0:
            return v[:, :1]
        of_longest = v.index_select(1, self.lengths.argmax()[None])
        if not self.reverse:
            return of_longest
        # In reverse a row starts at its last step.
        at = self._step_numbers + (self.lengths.max() - self.lengths)
        return of_longest[:, 0][at.clamp(max=self.steps - 1)]

    def concat_h_and_x(self, loop: Loop, x: Tensor, out: Tensor) -> None:
        """Write the h that entered the gates and x, concatenated, to `out`.

        Remaining columns of `out` are set to one.
        """
        recurrent_inputs(loop, self.lengths, self.reverse, x, out)

    def grad_w_hh(self, d: Tensor, loop: Loop) -> Tensor:
        """Return the gradient of W_h, [G, P], from `d`, the gradient of h·Wh."""
        ragged_reverse = self.reverse and self.lengths is not None
        if loop.cell.heads > 1:
            return block_products(d, self.recurrent_inputs(loop), loop.cell.gates, loop.cell.heads)
        if ragged_reverse or loop.resets is not None or loop.scale_h is not None or loop.balanced:
            return times(d.t(), self.recurrent_inputs(loop))
        boundary = d.shape[0] - self.batch
        first, later, earlier = (
            (d[boundary:], d[:boundary], loop.y[self.batch :])
            if self.reverse
            else (d[: self.batch], d[self.batch :], loop.y[:boundary])
        )
        first_product = product(first.t(), pad_columns(loop.h0))
        return without_padding(
            first_product
            if self.steps == 1
            else product(later.t(), pad_columns(earlier), first_product, add=True),
            loop.outputs,
        )
