"""A row's outputs, states and input gradients have the same bits whatever else is in its batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

import zoneout as zo
from zoneout import cells
from zoneout.ops import TOLERANCES
from zoneout.ops.cpu import native, product

STEPS, ROWS = 3, 60  # 180 rows at once are more than a product takes in one block
LAYERS = {
    "lstm": zo.LSTM, "gru": zo.GRU, "rnn": zo.RNN,
    "own lstm": partial(zo.Recurrent, cells.peephole_lstm), "mgu": partial(zo.Recurrent, cells.mgu),
}  # fmt: skip
PAIRS = ("lstm", "own lstm")  # cells with h and c
# cell, input, hidden, options: x·W_x inside of the loop, and before it where W_x is larger than 512
# KB
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "lstm inside": ("lstm", 5, 37, {}),
    "lstm before": ("lstm", 900, 37, {}),
    "gru before": ("gru", 1200, 37, {}),
    "rnn before": ("rnn", 1400, 101, {}),
    "own cell inside": ("own lstm", 5, 37, {}),
    "own cell before": ("own lstm", 900, 37, {}),
    "a product in the step": ("mgu", 5, 37, {}),
    "float64": ("lstm", 450, 37, {"dtype": torch.float64}),
    "bfloat16": ("lstm", 900, 37, {"dtype": torch.bfloat16}),
    "float16": ("gru", 1200, 37, {"dtype": torch.float16}),
    "layer norm": ("lstm", 900, 37, {"norm": "layer"}),
    "projection": ("lstm", 900, 37, {"proj_size": 19}),
    "more than a panel is deep": ("gru", 6, 350, {}),
    "no noise": ("lstm", 900, 37, {"noise": None}),
    "several noises": (
        "lstm",
        5,
        37,
        {"noise": [zo.VariationalDropout(input=0.2, hidden=0.2), zo.RecurrentDropout(rate=0.3)]},
    ),
}
pytestmark = pytest.mark.skipif(
    native.load() is None, reason=f"no compiled loop here: {native.why_not()}"
)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Rows:
    """A layer, and rows that it is given in any order and company; they keep their masks."""

    def __init__(self, cell: str, inputs: int, hidden: int, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        noise = zo.Zoneout(hidden=0.2) if cell not in PAIRS else zo.Zoneout(cell=0.3, hidden=0.2)
        self.layer = LAYERS[cell](inputs, hidden, **{"noise": noise, **options})
        dtype = options.get("dtype", torch.float32)
        self.x = torch.randn(STEPS, ROWS, inputs).to(dtype)
        outputs = options.get("proj_size", hidden)
        self.states = [
            torch.randn(1, ROWS, size).to(dtype)
            for size in ((outputs, hidden) if cell in PAIRS else (hidden,))
        ]
        self.dy = torch.randn(STEPS, ROWS, outputs).to(dtype)

    def results(
        self,
        rows: list[int],
        lengths: Tensor | None = None,
        packed: bool = False,
        grad: bool = True,
    ) -> dict[str, Tensor]:
        """Outputs, final states and the gradient of x of these rows, one after the other."""
        x = self.x[:, rows].requires_grad_(grad)
        states = tuple(s[:, rows] for s in self.states)
        call: dict[str, Any] = {"seed": 7, "examples": torch.tensor(rows)}
        dy = self.dy[:, rows]
        given: Any = x
        if packed and lengths is not None:
            given = pack_padded_sequence(x, lengths, enforce_sorted=False)
            dy = pack_padded_sequence(dy, lengths, enforce_sorted=False).data
        elif lengths is not None:
            call["lengths"] = lengths
        y, ended = self.layer(given, states if len(states) == 2 else states[0], **call)
        ended = ended if isinstance(ended, tuple) else (ended,)
        found = {"h_n": ended[0][0]}
        if grad:
            (dx,) = torch.autograd.grad(y.data if packed else y, x, dy)
            found["dx"] = dx.transpose(0, 1)
        if len(ended) == 2:
            found["c_n"] = ended[1][0]
        if not packed:
            found["y"] = y.transpose(0, 1)
        return {name: value.detach() for name, value in found.items()}


def differing(alone: dict[str, Tensor], among: dict[str, Tensor], at: int) -> list[str]:
    """Names of the results that differ; torch multiplies for the gradient of x in bfloat16."""
    told = {
        name: value
        for name, value in among.items()
        if name != "dx" or value.dtype != torch.bfloat16
    }
    return [name for name, value in told.items() if not torch.equal(value[at], alone[name][0])]


@pytest.mark.parametrize("case", CASES)
def test_the_rest_of_the_batch(case: str) -> None:
    """A prediction changes with the size of the batch, the place in it or the number of threads."""
    rows = Rows(*CASES[case])
    torch.set_num_threads(1)
    alone = rows.results([4])
    for threads, batch in (
        (1, [4, 9]),
        (2, [9, 4, 1]),
        (4, [*range(10, 16), 4]),
        (1, [*range(ROWS)]),
        (3, [*range(ROWS)]),
    ):
        torch.set_num_threads(threads)
        assert not differing(alone, rows.results(batch), batch.index(4)), (threads, len(batch))


@pytest.mark.parametrize("case", ["lstm inside", "lstm before", "gru before", "layer norm"])
def test_one_step(case: str) -> None:
    """The loop in C takes one step of a decoder differently, alone or among others, or than as
    one of several.
    """
    cell, inputs, hidden, options = CASES[case]
    rows = Rows(cell, inputs, hidden, {**options, "backend": "cpu"})
    first = {name: value for name, value in rows.results([4]).items() if name == "y"}
    rows.x, rows.dy = rows.x[:1], rows.dy[:1]
    alone = rows.results([4])
    assert torch.equal(alone["y"], first["y"][:, :1])
    for threads, batch in ((2, [9, 4, 1]), (1, [*range(ROWS)])):
        torch.set_num_threads(threads)
        assert not differing(alone, rows.results(batch), batch.index(4)), (threads, len(batch))


@pytest.mark.parametrize("packed", [False, True], ids=["lengths", "packed"])
@pytest.mark.parametrize("case", ["lstm inside", "lstm before", "gru before"])
def test_padding(case: str, packed: bool) -> None:
    """A row of a batch of several lengths is not what it is alone."""
    rows = Rows(*CASES[case])
    for length in (1, 2, 3):
        lengths = torch.arange(20) % 3 + 1
        lengths[5] = length
        alone, among = (
            rows.results([5], lengths[5:6], packed),
            rows.results([*range(20)], lengths, packed),
        )
        assert not differing(alone, among, 5), length


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (3, 50), (70, 33), (130, 100), (1100, 20)])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_product_by_rows(transposed: bool, depth: int, columns: int, dtype: torch.dtype) -> None:
    """A product in C is wrong, or its rows depend on how many there are."""
    torch.manual_seed(0)
    a, w = torch.randn(300, depth, dtype=dtype), torch.randn(columns, depth, dtype=dtype)
    b = w.t() if transposed else w.t().contiguous()
    outs = []
    for count, threads in ((300, 1), (300, 4), (128, 2), (129, 1), (13, 2), (1, 1)):
        torch.set_num_threads(threads)
        out = torch.full((count, columns), torch.nan, dtype=dtype)
        assert product(a[-count:], b, out)
        outs.append(out)
    exact = a.double() @ b.double()
    assert (outs[0] - exact).norm() <= TOLERANCES[dtype] * exact.norm()
    assert all(torch.equal(out, outs[0][-len(out) :]) for out in outs)


def test_a_product_of_nothing() -> None:
    """The memory of a product without depth is left as it was."""
    out = torch.full((2, 3), torch.nan)
    assert product(torch.empty(2, 0), torch.empty(0, 3), out) and (out == 0).all()
