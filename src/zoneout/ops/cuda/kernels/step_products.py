"""The products inside the step of any cell, one step at a time: cuBLAS between generated kernels.

Products of one level are computed after one launch, which writes what they are taken of. In the
backward pass it is the other way round, from the highest level down. Rows of matrices are padded to
multiples of 16 bytes, and so are the values between two matrices of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ....definition import Definition
from ....definition.products import Product, levels_of
from ...backend import Loop, LoopGrads
from ...memory import address
from ...sequence.products import pad_columns
from ..runtime.blas import product
from .own_cell import OwnArguments
from .steps import Step, for_backward

Multiply = Callable[[int, int], None]


class Pass(Protocol):
    """A pass of `cell_steps`, as far as products inside the step need it."""

    loop: Loop
    own: OwnArguments

    @property
    def gathered(self) -> bool:
        """True if the rows of a processed step are not adjacent in memory."""

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = ...) -> Tensor:
        """Return workspace for this pass, and pass it to the kernels as `name`."""

    def level(self, name: str, number: int) -> Step:
        """Return the launch of a kernel for a level of the products."""


def forward(pass_: Pass) -> list[Step]:
    """Return what happens at each step of the forward pass before the gates are computed."""
    loop, dtype = pass_.loop, pass_.loop.gates.dtype
    width = pad_columns(loop.gates.new_empty(0, loop.hidden)).shape[1]
    pass_.own.struct.in_pitch, pass_.own.struct.gathered = width, pass_.gathered
    muls: list[Step] = []
    for k, (one, inner) in enumerate(zip(loop.cell.products, loop.inner)):
        entered = pass_.scratch(f"in{k}", (loop.batch, width), dtype)
        entered.zero_()  # the padding
        pass_.own.put(f"inner{k}", inner)
        to = _rows(pass_, f"part{k}", inner)
        matrices = [pad_columns(w) for w in _padded_between(loop, one)]
        rows = _always(address(entered, "in"))
        muls.append(_chain(pass_, rows, [(w, True) for w in matrices], to))
    return _by_level(loop.cell, "enter_level", pass_, muls, first=True)


def backward(pass_: Pass, back: LoopGrads) -> list[Step]:
    """Return what happens at each step of the backward pass before the gates' gradients."""
    loop = pass_.loop
    pass_.own.struct.gathered = pass_.gathered
    muls: list[Step] = []
    for k, (one, inner) in enumerate(zip(loop.cell.products, loop.inner)):
        matrices = [for_backward(w) for w in reversed(_padded_between(loop, one))]
        last, transposed = matrices[-1]
        width = last.shape[0] if transposed else last.shape[1]
        found = pass_.scratch(f"din{k}", (loop.batch, width))
        found.zero_()  # read before it is computed, in vain
        pass_.own.struct.din_pitch = width
        pass_.own.put(f"inner{k}", inner)
        pass_.own.put(f"dinner{k}", back.dinner[k])
        pass_.own.put(f"ins{k}", back.ins[k])
        rows, to = _rows(pass_, f"d_part{k}", back.dinner[k]), _always(address(found, "din"))
        muls.append(_chain(pass_, rows, matrices, to))
    return _by_level(loop.cell, "leave_level", pass_, muls, first=False)


def _by_level(
    cell: Definition, kernel: str, pass_: Pass, muls: Sequence[Step], first: bool
) -> list[Step]:
    """Return the launches of all levels, each with the products of the level after it."""
    step, _ = cell.passes()
    levels = levels_of(step.graph, step.inputs)
    order = sorted(set(levels), reverse=not first)
    steps: list[Step] = []
    for level in order:
        steps.append(pass_.level(kernel, level))
        steps += [mul for mul, own in zip(muls, levels) if own == level]
    return steps


def _padded_between(loop: Loop, one: Product) -> list[Tensor]:
    """Return the matrices of a product, with zeros where values between them are padded."""
    given = dict(zip(loop.cell.matrices, loop.matrices))
    matrices = [given[name] for name in one.matrices]
    for k in range(1, len(matrices)):
        matrices[k] = pad_columns(matrices[k])
        rows = matrices[k].shape[1] - len(matrices[k - 1])
        matrices[k - 1] = functional.pad(matrices[k - 1], (0, 0, 0, rows))
    return matrices


def _rows(pass_: Pass, name: str, values: Tensor) -> Callable[[int], int]:
    """Return the address of the rows of a processed step of [N, ·]; `name`: where not adjacent."""
    loop, width = pass_.loop, values.shape[1]
    if pass_.gathered:
        return _always(address(pass_.scratch(name, (loop.batch, width), values.dtype), name))
    start, size = address(values, name), loop.batch * width * values.element_size()
    last = loop.steps - 1
    return lambda t: start + (last - t if loop.reverse else t) * size


def _always(at: int) -> Callable[[int], int]:
    return lambda t: at


def _chain(
    pass_: Pass,
    rows: Callable[[int], int],
    matrices: Sequence[tuple[Tensor, bool]],
    to: Callable[[int], int],
) -> Step:
    """Return the product of the rows of a step with matrices, one after the other.

    Each matrix comes with True if it is stored transposed, as `blas.product` takes it.
    """
    loop, dtype = pass_.loop, pass_.loop.gates.dtype
    muls: list[Multiply] = []
    between: list[int] = []
    for k, (w, transposed) in enumerate(matrices):
        last = k == len(matrices) - 1
        muls.append(product(w, loop.batch, torch.float32 if last else dtype, transposed))
        if not last:
            columns = w.shape[0] if transposed else w.shape[1]
            made = loop.gates.new_empty(loop.batch, columns)
            pass_.own.alive.append(made)
            between.append(address(made, "between"))
    pass_.own.alive.extend(w for w, _ in matrices)

    def multiply(t: int) -> None:
        a = rows(t)
        for mul, b in zip(muls, (*between, to(t))):
            mul(a, b)
            a = b

    return multiply
