"""Products whose factors are padded give what they would give without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from zoneout.ops import products
from zoneout.ops.products import linear, padded_linear, times_and_sum


def with_gradients(function: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    y = function(x, w, b)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, (x, w, b), dy)]


def factors(*sizes: int, **kind: Any) -> list[torch.Tensor]:
    rows, inputs, outputs = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, 2, inputs), (outputs, inputs), (outputs,))
    return [torch.randn(shape, generator=generator).to(**kind).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("across", "down"), [(3, 0), (0, 5), (3, 5)])
def test_a_padded_product_is_the_product(across: int, down: int) -> None:
    given = factors(3, 21, 19, dtype=torch.float64)
    ours = with_gradients(lambda *v: padded_linear(*v, across, down), *given)
    for one, theirs in zip(ours, with_gradients(F.linear, *given), strict=True):
        torch.testing.assert_close(one, theirs)


@pytest.mark.parametrize(("columns", "with_sum"), [(21, True), (32, False), (3, False)])
def test_sums_beside_a_product(columns: int, with_sum: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of ones are multiplied where there is no room, or end up in the product."""
    monkeypatch.setattr(products, "on_gpu", lambda v: True)
    a, b = torch.randn(5, 40, dtype=torch.float64), torch.randn(40, columns, dtype=torch.float64)
    product, added = times_and_sum(a, b)
    torch.testing.assert_close(product, a @ b)
    assert (added is not None) == with_sum
    if added is not None:
        torch.testing.assert_close(added, a.sum(1))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(350, 1500, 1000), (4000, 500, 27)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_softmax_of_large_models_on_a_gpu(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    given = factors(*sizes, device="cuda", dtype=dtype)
    exact = with_gradients(F.linear, *(v.detach().double().requires_grad_() for v in given))
    for ours, theirs in zip(with_gradients(linear, *given), exact, strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5), error
