"""Products whose factors are padded give what they would give without."""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from zoneout.ops.cpu import native, transposed_product
from zoneout.ops.cuda.runtime import blas
from zoneout.ops.run import TOLERANCES
from zoneout.ops.sequence import products
from zoneout.ops.sequence.products import linear, padded_linear, times_and_sum


def with_gradients(
    function: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor
) -> list[torch.Tensor]:
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
def test_sums_beside_a_product(columns: int, with_sum: bool, emulated: None) -> None:
    """Columns of ones are multiplied where there is no room, or end up in the product."""
    a, b = torch.randn(5, 40), torch.randn(40, columns)
    for wanted in range(3):
        product, added = times_and_sum(a, b, wanted)
        torch.testing.assert_close(product, a @ b)
        assert len(added) == (wanted if with_sum else 0)
        for one in added:
            torch.testing.assert_close(one, a.sum(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whose_precision_a_product_has(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of float32 on a GPU follows torch's setting for others, or is not written or
    added where it should.
    """
    asked: list[Any] = []
    monkeypatch.setattr(
        products._registered,
        "gpu_product",
        lambda a, b, out, add=False: asked.append((out, add)) or out,
    )
    monkeypatch.setattr(torch, "mm", lambda a, b, out=None: "torch's")
    new, kept = object(), SimpleNamespace(addmm_=lambda a, b: "torch's")
    a: Any = SimpleNamespace(is_cuda=True, dtype=dtype, shape=(2, 3), new_empty=lambda *shape: new)
    b: Any = SimpleNamespace(shape=(3, 4))
    got = [
        products.product(a, b),
        products.product(a, b, kept),
        products.product(a, b, kept, add=True),
    ]  # type: ignore[arg-type]
    if dtype == torch.float32:
        assert got == [new, kept, kept] and asked == [(new, False), (kept, False), (kept, True)]
    else:
        assert got == ["torch's"] * 3 and not asked


def by_columns(at: int, pitch: int, columns: int) -> Any:
    """Numbers in memory, as a library that counts columns first sees them: [rows, columns], with
    rows to spare.
    """
    numbers = (ctypes.c_float * (pitch * columns)).from_address(at)
    return np.frombuffer(numbers, np.float32).reshape(columns, pitch).T


LIE = {
    "rows": lambda v: v.contiguous(),
    "columns": lambda v: v.t().contiguous().t(),
    "parts of rows": lambda v: F.pad(v, (1, 2), value=float("nan"))[:, 1:-2],
    "parts of columns": lambda v: F.pad(v.t(), (1, 2), value=float("nan"))[:, 1:-2].t(),
    "every second": lambda v: torch.stack((v, v + 1), -1).flatten(1)[:, ::2],
    "all the same": lambda v: v[:1, :1].expand(v.shape),
}


@pytest.mark.parametrize("exact", [False, True], ids=["tf32", "ieee"])
@pytest.mark.parametrize(
    "sizes",
    [(3, 4, 5), (1, 4, 5), (3, 1, 5), (3, 4, 1), (1, 1, 1), (0, 2, 3), (3, 0, 2), (3, 2, 0)],
)
def test_products_of_float32_on_a_gpu(
    sizes: tuple[int, int, int], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix is taken for its transpose, a row for one that is longer, or the precision is
    another's.
    """
    rows, depth, columns = sizes
    modes: list[int] = []

    def gemm(
        handle: int, turn_a: int, turn_b: int, m: int, n: int, k: int, alpha: Any, a: int,
        kind: int, lda: int, b: int, kind_b: int, ldb: int, beta: Any, c: int, kind_c: int,
        ldc: int, compute: int, algorithm: int,
    ) -> int:  # fmt: skip
        assert (kind, kind_b, kind_c, algorithm, compute) == (0, 0, 0, -1, 68 if exact else 77)
        assert lda >= (k if turn_a else m) and ldb >= (n if turn_b else k) and ldc >= m > 0 < n
        first = by_columns(a, lda, m).T[:m, :k] if turn_a else by_columns(a, lda, k)[:m]
        second = by_columns(b, ldb, k).T[:k, :n] if turn_b else by_columns(b, ldb, n)[:k]
        out = by_columns(c, ldc, n)[:m]
        out[:] = alpha.contents.value * first @ second + (
            beta.contents.value * out if beta.contents.value else 0
        )
        return 0

    monkeypatch.setattr(blas, "_gemm", lambda: gemm)
    monkeypatch.setattr(blas, "tf32", lambda: not exact)
    monkeypatch.setattr(
        blas,
        "library",
        lambda: SimpleNamespace(cublasSetMathMode=lambda handle, mode: modes.append(mode) or 0),
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 2**40)
    for one, other in itertools.product(LIE.values(), repeat=2):
        a, b = (
            one(torch.randn(rows, depth)) if depth and rows else torch.randn(rows, depth),
            torch.randn(depth, columns),
        )
        b = other(b) if depth and columns else b
        out = torch.full((rows, columns), float("nan"))
        assert blas.times(a, b, out) is out
        torch.testing.assert_close(out, a @ b)
        more = torch.randn(rows, columns)
        torch.testing.assert_close(blas.times(a, b, more.clone(), add=True), more + a @ b)
    assert set(modes) <= ({0} if exact else set())


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(350, 1500, 1000), (4000, 500, 27)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_softmax_of_large_models_on_a_gpu(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    given = factors(*sizes, device="cuda", dtype=dtype)
    exact = with_gradients(F.linear, *(v.detach().double().requires_grad_() for v in given))
    for ours, theirs in zip(with_gradients(linear, *given), exact, strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5), error


@pytest.mark.skipif(native.load() is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("depth", "rows", "columns"),
    [(1, 1, 4), (5, 9, 16), (193, 40, 17), (192, 63, 49), (400, 200, 75), (1000, 7, 300)],
)
def test_a_sum_of_outer_products(depth: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    """The gradient of a matrix is wrong, depends on the threads, or reaches past its memory."""
    torch.manual_seed(0)
    a = torch.randn(depth, rows + 3, dtype=dtype)[:, 1:-2]
    b = torch.randn(depth, columns + 5, dtype=dtype)[:, 2:-3]
    first = torch.randn(rows, columns, dtype=dtype)
    for add in (False, True):
        exact = a.double().t() @ b.double() + (first.double() if add else 0)
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            memory = torch.full((rows + 2, columns + 2), 3.0, dtype=dtype)
            out = memory[1:-1, 1:-1]
            out.copy_(first if add else torch.full_like(out, torch.nan))
            assert transposed_product(a, b, out, add)
            results.append(out.clone())
            assert (out.double() - exact).norm() <= TOLERANCES[dtype] * exact.norm()
            out.fill_(3.0)
            assert (memory == 3.0).all()
        assert all(torch.equal(one, results[0]) for one in results)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(0, 3), torch.ones(0, 5)),
        (torch.ones(3, 4), torch.ones(3, 2)),
        (torch.ones(4, 3).t(), torch.ones(3, 5)),
        (torch.ones(3, 4).bfloat16(), torch.ones(3, 5).bfloat16()),
    ],
    ids=["no rows", "few columns", "rows with gaps", "half type"],
)
def test_sums_that_torch_computes(a: torch.Tensor, b: torch.Tensor) -> None:
    """The C code takes what it would compute wrongly or slowly."""
    assert not transposed_product(a, b, torch.empty(a.shape[1], b.shape[1], dtype=a.dtype), False)
    both = products.product(a.t(), b, torch.ones(a.shape[1], b.shape[1], dtype=a.dtype), add=True)
    torch.testing.assert_close(both, 1 + a.t() @ b)
