"""The products inside the step of any cell, one step at a time: cuBLAS between generated kernels.

Products of one level are computed after one launch, which writes their inputs. In the
backward pass the order is reversed, from the highest level down. Rows of matrices are padded to
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
from .any_cell import AnyCellArguments
from .steps import Step, for_backward

Multiply = Callable[[int, int], None]


class Pass(Protocol):
    """A pass of `cell_steps`, as far as products inside the step need it."""

    loop: Loop
    extra: AnyCellArguments

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
    pass_.extra.struct.in_pitch, pass_.extra.struct.gathered = width, pass_.gathered
    multiplications: list[Step] = []
    for k, (inner_product, inner) in enumerate(zip(loop.cell.products, loop.inner)):
        inputs = pass_.scratch(f"in{k}", (loop.batch, width), dtype)
        inputs.zero_()  # the padding
        pass_.extra.put(f"inner{k}", inner)
        to = _rows(pass_, f"part{k}", inner)
        matrices = [pad_columns(w) for w in _aligned_matrices(loop, inner_product)]
        rows = _always(address(inputs, "in"))
        multiplications.append(_chain(pass_, rows, [(w, True) for w in matrices], to))
    return _by_level(loop.cell, "enter_level", pass_, multiplications, first=True)


def backward(pass_: Pass, grads: LoopGrads) -> list[Step]:
    """Return what happens at each step of the backward pass before the gates' gradients."""
    loop = pass_.loop
    pass_.extra.struct.gathered = pass_.gathered
    multiplications: list[Step] = []
    for k, (inner_product, inner) in enumerate(zip(loop.cell.products, loop.inner)):
        matrices = [for_backward(w) for w in reversed(_aligned_matrices(loop, inner_product))]
        last, transposed = matrices[-1]
        width = last.shape[0] if transposed else last.shape[1]
        d_inputs = pass_.scratch(f"din{k}", (loop.batch, width))
        d_inputs.zero_()  # a launch reads it before it is computed, and ignores the value
        pass_.extra.struct.din_pitch = width
        pass_.extra.put(f"inner{k}", inner)
        pass_.extra.put(f"dinner{k}", grads.dinner[k])
        pass_.extra.put(f"ins{k}", grads.ins[k])
        rows, to = _rows(pass_, f"d_part{k}", grads.dinner[k]), _always(address(d_inputs, "din"))
        multiplications.append(_chain(pass_, rows, matrices, to))
    return _by_level(loop.cell, "leave_level", pass_, multiplications, first=False)


def _by_level(
    cell: Definition, kernel: str, pass_: Pass, multiplications: Sequence[Step], first: bool
) -> list[Step]:
    """Return the launches of all levels, each with the products of the level after it."""
    step, _ = cell.passes()
    levels = levels_of(step.graph, step.inputs)
    order = sorted(set(levels), reverse=not first)
    steps: list[Step] = []
    for level in order:
        steps.append(pass_.level(kernel, level))
        steps += [
            multiply for multiply, of_level in zip(multiplications, levels) if of_level == level
        ]
    return steps


def _aligned_matrices(loop: Loop, inner_product: Product) -> list[Tensor]:
    """Return the matrices of a product, with zeros where values between them are padded."""
    by_name = dict(zip(loop.cell.matrices, loop.matrices))
    matrices = [by_name[name] for name in inner_product.matrices]
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
    multiplications: list[Multiply] = []
    between: list[int] = []
    for k, (w, transposed) in enumerate(matrices):
        last = k == len(matrices) - 1
        multiplications.append(product(w, loop.batch, torch.float32 if last else dtype, transposed))
        if not last:
            columns = w.shape[0] if transposed else w.shape[1]
            intermediate = loop.gates.new_empty(loop.batch, columns)
            pass_.extra.alive.append(intermediate)
            between.append(address(intermediate, "between"))
    pass_.extra.alive.extend(w for w, _ in matrices)

    def multiply(t: int) -> None:
        a = rows(t)
        for apply, b in zip(multiplications, (*between, to(t))):
            apply(a, b)
            a = b

    return multiply
