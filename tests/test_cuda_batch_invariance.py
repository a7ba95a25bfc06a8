"""A row of a batch has the same bits whatever else is in the batch, in the kernels of a GPU.

The loops are compared in the emulator and on a GPU. Products outside of the loops and those of one
step are cuBLAS's, so the tests that have them need a GPU, and ZONEOUT_BATCH_INVARIANT.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_cuda import PRECISIONS
from test_cuda import precision as precision  # a fixture
from torch import Tensor

import zoneout as zo
from zoneout.ops import cuda
from zoneout.ops.cuda.kernels import cell_steps, diagonal, persistent_cell, small_cell
from zoneout.ops.cuda.runtime import blas, compiler
from zoneout.ops.sequence import products

STEPS, ROWS, IDS = 3, 300, 24
LAYERS: dict[str, Any] = {
    "lstm": zo.LSTM,
    "gru": zo.GRU,
    "rnn": zo.RNN,
    **{name: partial(zo.Recurrent, getattr(zo.cells, name)) for name in ("coupled_lstm", "sru")},
}
TWO_STATES = {"lstm", "coupled_lstm", "sru"}
BATCHES = (2, 3, 8, 17, 32, 33, 64, 65, 128)


class Rows:
    """A layer, and rows that it is given in any order and company; they keep their masks."""

    def __init__(
        self, cell: str, hidden: int, inputs: int, dtype: torch.dtype, device: str, **options: Any
    ) -> None:
        torch.manual_seed(0)
        rates = {"cell": 0.3, "hidden": 0.2} if cell in TWO_STATES else {"hidden": 0.2}
        self.layer = LAYERS[cell](
            inputs or IDS, hidden, noise=zo.Zoneout(**rates), dtype=dtype, backend=device, **options
        ).to(device)
        # ids: nothing is multiplied before the loop
        x = torch.randn(STEPS, ROWS, inputs).to(dtype) if inputs else None
        x = torch.randint(IDS, (STEPS, ROWS)) if x is None else x
        states = [torch.randn(1, ROWS, hidden).to(dtype) for _ in rates]
        self.x, self.states = x.to(device), [s.to(device) for s in states]
        self.dy = torch.randn(STEPS, ROWS, hidden).to(dtype).to(device)

    def results(self, rows: list[int], lengths: list[int] | None = None) -> dict[str, Tensor]:
        """Outputs, final states and, with numbers as input, the gradient of x; row by row."""
        x, states = self.x[:, rows], tuple(s[:, rows] for s in self.states)
        grad = x.is_floating_point()
        x.requires_grad_(grad)
        call: dict[str, Any] = {"seed": 7, "examples": torch.tensor(rows, device=x.device)}
        if lengths is not None:
            call["lengths"] = torch.tensor(lengths, device=x.device)
        y, ended = self.layer(x, states if len(states) == 2 else states[0], **call)
        ended = ended if isinstance(ended, tuple) else (ended,)
        found = {"y": y.transpose(0, 1)} | {f"end {k}": v[0] for k, v in enumerate(ended)}
        if grad:
            (dx,) = torch.autograd.grad(y, x, self.dy[:, rows])
            found["dx"] = dx.transpose(0, 1)
        return {name: value.detach() for name, value in found.items()}


def others(batch: int, place: int) -> list[int]:
    """So many rows, with row 5 at a place."""
    rows = [row for row in range(ROWS) if row != 5][: batch - 1]
    return [*rows[:place], 5, *rows[place:]]


def check(rows: Rows, batches: tuple[int, ...] = BATCHES, without: tuple[str, ...] = ()) -> None:
    """Compare row 5 alone with row 5 in batches, at the first, the last and a middle place."""
    wrong = []
    alone = {2: rows.results([5], [2]), STEPS: rows.results([5])}
    for batch in batches:
        for place in {0, batch // 2, batch - 1}:
            for length in (STEPS, 2):
                given = others(batch, place)
                lengths = None if length == STEPS else [1 + row % STEPS for row in given]
                if lengths is not None:
                    lengths[place] = length
                found = rows.results(given, lengths)
                wrong += [
                    (batch, place, length, name)
                    for name, value in alone[length].items()
                    if name not in without and not torch.equal(found[name][place], value[0])
                ]
    assert not wrong, wrong


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How the kernels were compiled."""
    found: list[Any] = []
    for module in (cuda.small, cuda.persistent):
        make = module.defines_of
        monkeypatch.setattr(
            module,
            "defines_of",
            lambda *given, make=make: found.append(make(*given)) or make(*given),
        )
    return found


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("precision", ["tf32"], indirect=True)
@pytest.mark.parametrize(
    ("path", "cell", "hidden", "processors", "batch"),
    [
        # so few processors that a block gets more rows or units in a larger batch
        (cuda.small, "lstm", 20, 2, 30),
        (cuda.persistent, "lstm", 40, 8, 60),
        (cuda.persistent, "gru", 300, 40, 17),
        (cuda.persistent, "rnn", 300, 40, 60),
        (small_cell, "coupled_lstm", 20, 2, 30),
        (persistent_cell, "coupled_lstm", 300, 40, 17),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)).split(".")[-1],
)
def test_other_tiles(
    path: Any,
    cell: str,
    hidden: int,
    processors: int,
    batch: int,
    precision: Any,
    plans: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel adds in another order where a larger batch gives it other tiles."""
    few = compiler.Chip(processors, 232448, 9)
    for module in (cuda.small, cuda.persistent):
        monkeypatch.setattr(module, "chip", lambda device: few)
    monkeypatch.setattr(cuda.small, "processors", lambda device: processors)
    monkeypatch.setattr(cuda, "PATHS", (path,))
    monkeypatch.setattr(cuda, "GENERATED_PATHS", (path,))
    rows = Rows(cell, hidden, 0, precision[0], "cpu")
    alone, among = rows.results([5]), rows.results(others(batch, batch // 2))
    assert not [name for name, v in alone.items() if not torch.equal(among[name][batch // 2], v[0])]
    assert len(set(plans)) > 1, "all batches had the same tiles"


# --- the choice of an algorithm -------------------------------------------------------------------


class Fake:
    """Algorithms that add in several orders; the standard one is the first of many rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried: list[str] = []
        self.capturing = False
        for cache in (blas._plans, blas._selected):
            monkeypatch.setattr(blas, {id(blas._plans): "_plans"}.get(id(cache), "_selected"), {})
        blas._standard.cache_clear()
        monkeypatch.setattr(blas, "_descriptors", lambda of: (None,) * 4)
        monkeypatch.setattr(blas, "_candidates", self.ranked)
        monkeypatch.setattr(blas, "_plan_with", self.checked)
        monkeypatch.setattr(blas, "_run", self.run)
        monkeypatch.setattr(
            blas, "_random_operands", lambda of: (torch.ones(2), torch.ones(2), torch.zeros(2))
        )
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def ranked(self, of: Any, made: Any, reduction: int, most: int) -> list[str]:
        assert reduction == 0
        return ["one row fails", "in order"] if of.shape[3] == 4096 else ["pairs", "in order fast"]

    def checked(self, of: Any, algorithm: str) -> Any:
        takes = of.shape[3] > 1 or algorithm != "one row fails"
        return SimpleNamespace(algorithm=algorithm) if takes else None

    def run(self, plan: Any, w: Tensor, a: Tensor, b: Tensor, add: bool, device: int) -> int:
        self.tried.append(plan.algorithm)
        b.fill_(1.0 if plan.algorithm.startswith("in order") else 1.1)
        return 0


def problem(rows: int) -> Any:
    kind = torch.bfloat16
    return blas._Problem(0, kind, kind, (8, 16, 8, rows, 1), True, True, (16, 16, 16))


def test_an_algorithm_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An algorithm is used that adds in another order, or that was never compared."""
    fake = Fake(monkeypatch)
    fake.capturing = True
    assert blas._invariant_plan(problem(3), False).algorithm == "in order"
    assert not fake.tried  # the capture of a graph allows no comparison
    fake.capturing = False
    for rows in (3, 1, 16):
        assert blas._invariant_plan(problem(rows), False).algorithm == "in order fast"
        assert fake.tried == ["in order", "pairs", "in order fast"]  # once for all three
    assert blas._invariant_plan(problem(17), False).algorithm == "in order fast"
    assert len(fake.tried) == 6


def test_none_takes_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that cannot be the same for all batches is taken in silence."""
    fake = Fake(monkeypatch)
    fake.ranked = lambda *given: ["one row fails"]  # type: ignore[method-assign]
    monkeypatch.setattr(blas, "_candidates", fake.ranked)
    with pytest.raises(RuntimeError, match="unset ZONEOUT_BATCH_INVARIANT"):
        blas._invariant_plan(problem(3), False)


def test_what_is_not_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are slower though nobody asked, or are not taken although somebody did."""
    asked: list[Any] = []
    monkeypatch.setattr(blas, "_run", lambda *given: asked.append(given) or 0)
    monkeypatch.setattr(blas, "_invariant_plan", lambda of, add: of)
    a, b, out = torch.ones(3, 20), torch.ones(20, 8), torch.ones(3, 8)
    monkeypatch.delenv("ZONEOUT_BATCH_INVARIANT", raising=False)
    assert not blas.by_rows(a, b, out) and not asked
    monkeypatch.setenv("ZONEOUT_BATCH_INVARIANT", "1")
    assert not blas.by_rows(a.double(), b.double(), out.double()) and not asked
    assert blas.by_rows(a, b, out)
    assert asked[0][0].shape == (8, 8, 20, 3, 1) and asked[0][0].aligned[1:] == (16, 16)
    shifted = torch.ones(61)[1:].view(3, 20)
    assert blas.by_rows(shifted, b.t().contiguous().t(), out)
    of, _, copied = asked[1][:3]
    assert of.transposed and of.shape[0] == 20 and copied.data_ptr() % 16 == 0
    assert of.aligned[1] == asked[0][0].aligned[1]
    counts = {cuda.steps.depth_splits(4096, 1024, rows, 2, 132) for rows in (1, 64, 200, 1000)}
    monkeypatch.delenv("ZONEOUT_BATCH_INVARIANT")
    before = {cuda.steps.depth_splits(4096, 1024, rows, 2, 132) for rows in (1, 64, 200, 1000)}
    assert len(counts) == 1 < len(before)


def test_products_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of rows of a batch on a GPU never reach the one that is the same for all."""
    assert products._registered.gpu_rows is blas.by_rows


# --- on a GPU -------------------------------------------------------------------------------------

SIZES = {"small": 100, "persistent": 256, "steps": 200, "diagonal": 100}
OWN = {"small": small_cell, "persistent": persistent_cell, "steps": cell_steps}
# float32 without TF32 has only the path step by step
GPU_CASES = [
    (path, cell, kind)
    for path in ("small", "persistent", "steps")
    for cell in ("lstm", "gru", "rnn", "coupled_lstm")
    for kind in ("tf32", "bf16", "fp16", "exact")
    if kind != "exact" or path == "steps"
] + [("diagonal", "sru", kind) for kind in ("exact", "bf16")]


def batches_of(path: str) -> tuple[int, ...]:
    """With one in which a block of `small` has more rows."""
    return (*BATCHES, ROWS) if path == "small" else BATCHES


def only(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another path to fall back to."""
    monkeypatch.setattr(cuda, "PATHS", (getattr(cuda, path, None),))
    monkeypatch.setattr(cuda, "GENERATED_PATHS", (OWN.get(path, diagonal),))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("path", "cell", "precision"),
    [case for case in GPU_CASES if case[0] != "steps"],  # its products are cuBLAS's
    indirect=["precision"],
)
def test_loops_on_a_gpu(
    path: str, cell: str, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop itself adds in an order that the batch decides; without products of cuBLAS."""
    only(path, monkeypatch)
    check(Rows(cell, SIZES[path], 0, precision[0], "cuda"), batches_of(path))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16"], indirect=True)
@pytest.mark.parametrize("cell", ["gru", "rnn"])
def test_more_rows_for_each_block(
    cell: str, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A persistent kernel with several tiles of rows adds in another order than one with one."""
    only("persistent", monkeypatch)
    check(Rows(cell, 1000, 0, precision[0], "cuda"), (16, 33, 65))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"], indirect=True)
def test_many_rows_on_a_gpu(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warpgroups of `warpgroup`, which takes no batch of one row, add in another order."""
    only("warpgroup", monkeypatch)
    rows = Rows("lstm", 1024, 0, precision[0], "cuda")
    found = [
        (rows.results(others(n, at)), at) for n, at in ((65, 0), (65, 64), (100, 3), (128, 99))
    ]
    first, place = found[0]
    for among, at in found[1:]:
        assert all(torch.equal(among[name][at], first[name][place]) for name in first)


@pytest.mark.gpu
@pytest.mark.parametrize(("path", "cell", "precision"), GPU_CASES, indirect=["precision"])
def test_layers_on_a_gpu(
    path: str, cell: str, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ZONEOUT_BATCH_INVARIANT a product gives other bits to a row of another batch.

    The tiles of `persistent` decide how it adds gradients.
    """
    monkeypatch.setenv("ZONEOUT_BATCH_INVARIANT", "1")
    only(path, monkeypatch)
    rows = Rows(cell, SIZES[path], 72, precision[0], "cuda")
    check(rows, batches_of(path), ("dx",) if path == "persistent" else ())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16", "exact"], indirect=True)
@pytest.mark.parametrize("norm", [None, "layer"], ids=str)
def test_large_layers_on_a_gpu(
    norm: str | None, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products for which an algorithm with partial sums would be faster; a norm over units."""
    monkeypatch.setenv("ZONEOUT_BATCH_INVARIANT", "1")
    only("steps", monkeypatch)
    check(Rows("lstm", 1024, 600, precision[0], "cuda", norm=norm), (2, 17, 64, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PRECISIONS)
def test_a_product_by_rows_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large product is wrong, or its rows depend on how many there are."""
    dtype, setting, tolerance = PRECISIONS[kind]
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", setting)
    monkeypatch.setenv("ZONEOUT_BATCH_INVARIANT", "1")
    for depth, columns in ((32, 400), (1000, 4000), (2048, 512)):
        a = torch.randn(5000, depth, device="cuda").to(dtype)
        w = torch.randn(columns, depth, device="cuda").to(dtype)
        for b in (w.t(), w.t().contiguous()):
            outs = []
            for count in (5000, 3200, 513, 100, 17, 1):
                outs.append(torch.full((count, columns), torch.nan, device="cuda").to(dtype))
                assert blas.by_rows(a[-count:], b, outs[-1])
            exact = a.double() @ b.double()
            assert (outs[0] - exact).norm() <= tolerance * exact.norm()
            assert all(torch.equal(out, outs[0][-len(out) :]) for out in outs), (depth, columns)
