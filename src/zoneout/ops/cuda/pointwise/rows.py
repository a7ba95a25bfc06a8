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
from ..runtime.arguments import TYPES
from ..runtime.compiler import load

THREADS = 256
MOST = 7  # maximum arrays that one launch clears
BLOCKS = 1024  # maximum blocks that clear rows: as many as a large chip runs at once

PARTS = 4  # maximum parts of one launch that splits columns
_KERNELS = ("move", "clear", "ends", "entered", "parted")
_i64, _p = ctypes.c_int64, ctypes.c_void_p
# Array types, stored because ctypes would build them again at every call.
_PLACES, _NUMBERS = _p * MOST, _i64 * MOST
_PART_PLACES, _PART_NUMBERS = _p * PARTS, _i64 * PARTS


class Side(ctypes.Structure):
    """`Side` of rows.cu."""

    _fields_ = [("at", _p), ("starts", _p), ("step", _i64), ("row", _i64)]


class Moved(ctypes.Structure):
    """`Moved` of rows.cu."""

    _fields_ = [
        *((name, Side) for name in ("source", "to")),
        *((name, _i64) for name in ("steps", "batch", "words", "word")),
        ("lengths", _p),
    ]


class Cleared(ctypes.Structure):
    """`Cleared` of rows.cu."""

    _fields_ = [
        *((name, _i64) for name in ("steps", "batch")),
        ("lengths", _p),
        ("count", _i64),
        ("at", _PLACES),
        *((name, _NUMBERS) for name in ("width", "word")),
    ]


class State(ctypes.Structure):
    """`State` of rows.cu."""

    _fields_ = [
        *((name, _p) for name in ("every", "initial", "last")),
        ("width", _i64),
        ("wide", _i64),
    ]


class Ends(ctypes.Structure):
    """`Ends` of rows.cu."""

    _fields_ = [
        *((name, _i64) for name in ("steps", "batch", "reverse")),
        ("lengths", _p),
        ("states", State * 2),
    ]


class Entered(ctypes.Structure):
    """`Entered` of rows.cu."""

    _fields_ = [
        *((name, _i64) for name in ("steps", "batch", "reverse")),
        *(
            (name, _p)
            for name in ("lengths", "resets", "y", "h0", "reset_h", "scale_h", "x", "out")
        ),
        *((name, _i64) for name in ("h_words", "h_word", "x_words", "x_word", "ones")),
    ]


class Parted(ctypes.Structure):
    """`Parted` of rows.cu."""

    _fields_ = [
        *((name, _i64) for name in ("rows", "pitch")),
        *((name, _PART_PLACES) for name in ("source", "to")),
        *((name, _PART_NUMBERS) for name in ("words", "word")),
    ]


# --- the kernels ---


def zero_past_lengths(v: Tensor, lengths: Tensor) -> Tensor:
    """Return v, [T, B, ·], contiguous and with zeros past the lengths, whatever the padding is."""
    return _moved(v, None, v.new_empty(v.shape), None, lengths)


def unpacked(rows: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Return packed rows as [T, B, ·], zero past the lengths.

    The rows of step t begin at row starts[t].
    """
    return _moved(
        rows,
        starts,
        rows.new_empty(starts.shape[0], lengths.shape[0], rows.shape[1]),
        None,
        lengths,
    )


def packed(v: Tensor, starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """Return v, [T, B, ·], as packed rows, without the padding: the inverse of `unpacked`."""
    return _moved(v, None, v.new_empty(total, v.shape[2]), starts, lengths)


def _moved(
    v: Tensor, v_starts: Tensor | None, out: Tensor, out_starts: Tensor | None, lengths: Tensor
) -> Tensor:
    """Copy the rows of `v` to `out` and return `out`; with starts, a side is packed."""
    v = v if v.stride(-1) == 1 else v.contiguous()
    size, (steps, batch, width) = v.element_size(), v.shape if v_starts is None else out.shape
    if steps * batch * width == 0:
        return out
    source, to = _side(v, v_starts, size), _side(out, out_starts, size)
    word = _word(width * size, source.at, source.step, source.row, to.at, to.step, to.row)
    words = width * size // word
    blocks = -(-(steps * batch * words) // THREADS)
    _launch("move", v, blocks, Moved(source, to, steps, batch, words, word, _index(lengths, v)))
    return out


def _side(v: Tensor, starts: Tensor | None, size: int) -> Side:
    if starts is not None:
        return Side(address(v, "rows", gaps=True), _index(starts, v), 0, v.stride(0) * size)
    step, row, _ = v.stride()
    return Side(address(v, "rows", gaps=True), None, step * size, row * size)


def clear(lengths: Tensor, steps: int, *arrays: Tensor | None) -> None:
    """Set arrays [T · B, ·] to zero past the lengths.

    Each must be contiguous. The same array may be given twice.
    """
    there = {address(v, "array"): v for v in arrays if v is not None}
    batch = lengths.shape[0]
    if steps * batch == 0 or not there:
        return
    first, *_ = there.values()
    widths = [v.shape[-1] * v.element_size() for v in there.values()]
    words = [_word(at, width) for at, width in zip(there, widths)]
    at = _index(lengths, first)
    given = Cleared(
        steps, batch, at, len(there), _PLACES(*there), _NUMBERS(*widths), _NUMBERS(*words)
    )
    _launch("clear", first, min(BLOCKS, -(-(steps * batch) // (THREADS // 32))), given)


def last(
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
    given = [
        State(_at(every), _at(initial), _at(to), to.shape[1], every.dtype == torch.float32)
        for (every, _), initial, to in zip(states, initials, out)
    ]
    if most := batch * max(to.shape[1] for to in out):
        at = None if lengths is None else _index(lengths, out[0])
        ends = Ends(steps, batch, reverse, at, (State * 2)(*given))
        _launch("ends", out[0], (-(-most // THREADS), len(out)), ends)
    return out


def recurrent_inputs(
    loop: Loop, lengths: Tensor | None, reverse: bool, x: Tensor | None, out: Tensor
) -> Tensor:
    """Write to `out`, [T · B, ·], the h that entered the gates at every row, and return `out`.

    The columns after h are x, if given, then ones up to the width of `out`.
    """
    size, outputs, inputs = out.element_size(), loop.outputs, 0 if x is None else x.shape[1]
    h, beside, pitch = outputs * size, inputs * size, out.shape[1] * size
    if out.numel() == 0:
        return out
    starts = [at for at in map(_at, (loop.y, loop.h0, loop.reset_h, out)) if at is not None]
    h_word = _word(h, pitch, *starts) if loop.scale_h is None else size
    x_word = size if x is None else _word(beside, pitch, address(x, "x"), starts[-1] + h)
    ones = out.shape[1] - outputs - inputs
    resets, reset_h = (loop.resets, loop.reset_h) if loop.reset_h is not None else (None, None)
    given = Entered(
        loop.steps, loop.batch, reverse, _at(lengths), _at(resets), _at(loop.y), _at(loop.h0),
        _at(reset_h), _at(loop.scale_h), _at(x), starts[-1], h // h_word, h_word, beside // x_word,
        x_word, ones,
    )  # fmt: skip
    words = h // h_word + beside // x_word + ones
    _launch("entered", out, -(-(loop.steps * loop.batch * words) // THREADS), given)
    return out


def split_columns(v: Tensor, parts: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Split a contiguous matrix by columns into new matrices; a part is (first column, width)."""
    count, size, pitch = len(v), v.element_size(), v.shape[1] * v.element_size()
    out = [v.new_empty(count, width) for _, width in parts]
    start = address(v, "matrix")
    sources = [start + first * size for first, _ in parts]
    places = [address(to, "part") for to in out]
    words = [_word(width * size, pitch, *at) for (_, width), *at in zip(parts, sources, places)]
    numbers = [width * size // word for (_, width), word in zip(parts, words)]
    if most := count * max(numbers):
        of = (
            _PART_PLACES(*sources),
            _PART_PLACES(*places),
            _PART_NUMBERS(*numbers),
            _PART_NUMBERS(*words),
        )
        _launch("parted", v, (-(-most // THREADS), len(out)), Parted(count, pitch, *of))
    return out


def _at(v: Tensor | None) -> int | None:
    return None if v is None else address(v, "rows")


def _index(v: Tensor, of: Tensor) -> int:
    """Return the address of an int64 tensor (lengths or starts) on the device of `of`."""
    return address(v, "lengths", torch.int64, of.get_device())


def _word(*addresses: int) -> int:
    """Return the size of the largest word, at most 16 bytes, that divides all arguments."""
    every = 16
    for one in addresses:
        every |= one
    return every & -every


def _launch(
    name: str, like: Tensor, blocks: int | tuple[int, int], given: ctypes.Structure
) -> None:
    device = like.get_device()
    elsewhere = device != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else nullcontext():
        kernels = load(device, "rows.cu", _KERNELS, defines_of(like.dtype))
        kernels[_KERNELS.index(name)].launch(blocks, THREADS, (given,))


def defines_of(dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernels are compiled with.

    Kernels that only copy rows work with any dtype, so an unknown one is allowed.
    """
    return (("CELL", 0), ("TYPE", TYPES.get(dtype, 0)), ("FAST", 1))


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
    def _at(self) -> Tensor:
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
            v for two in pairs for v in last(two, self.steps, self.lengths, self.reverse, dtype)
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
        at = self._at + (self.lengths.max() - self.lengths)
        return of_longest[:, 0][at.clamp(max=self.steps - 1)]

    def concat_h_and_x(self, loop: Loop, x: Tensor, out: Tensor) -> None:
        """Write the h that entered the gates and x, concatenated, to `out`.

        Remaining columns of `out` are set to one.
        """
        recurrent_inputs(loop, self.lengths, self.reverse, x, out)

    def grad_w_hh(self, d: Tensor, loop: Loop) -> Tensor:
        """Return the gradient of W_h, [G, P], from `d`, the gradient of h·Wh."""
        turned = self.reverse and self.lengths is not None
        if loop.cell.heads > 1:
            return block_products(d, self.recurrent_inputs(loop), loop.cell.gates, loop.cell.heads)
        if turned or loop.resets is not None or loop.scale_h is not None or loop.balanced:
            return times(d.t(), self.recurrent_inputs(loop))
        edge = d.shape[0] - self.batch
        first, later, earlier = (
            (d[edge:], d[:edge], loop.y[self.batch :])
            if self.reverse
            else (d[: self.batch], d[self.batch :], loop.y[:edge])
        )
        found = product(first.t(), pad_columns(loop.h0))
        return without_padding(
            found if self.steps == 1 else product(later.t(), pad_columns(earlier), found, add=True),
            loop.outputs,
        )
