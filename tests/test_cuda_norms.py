"""The kernels that normalise x·Wx: compiled for the H200 with no GPU, and on one held to
autograd in float64.
"""

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from test_cuda_compile import build, setup_module  # noqa: F401
from torch import Tensor

from zoneout.cells import CELLS
from zoneout.norm import Moments, StepNorm, moments, normalise
from zoneout.ops.backend import Loop, LoopGrads
from zoneout.ops.cuda.pointwise import norms
from zoneout.ops.cuda.runtime.arguments import TYPES
from zoneout.ops.reference import alive_rows, turn_around

OVER = {"units": "layer norm", "examples": "batch norm"}
every_norm = pytest.mark.parametrize("over", OVER, ids=OVER.values())
every_type = pytest.mark.parametrize("dtype", TYPES, ids=str)
both_ways = pytest.mark.parametrize("back", [False, True], ids=["forward", "backward"])

# --- without a GPU --------------------------------------------------------------------------------

SHAPES = {"pMNIST": (100, 400), "wide": (1000, 16384), "odd": (9, 513), "large batch": (300, 32)}


def plan_of(over, dtype, batch, width, back):
    vector = 16 // dtype.itemsize
    while width % vector:
        vector //= 2
    return norms.plan(over == "units", dtype.itemsize, width, batch, vector, back)


@both_ways
@every_type
@every_norm
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled(shape, over, dtype, back):
    """A kernel does not compile at some size, or what it is to keep in registers is spilled."""
    batch, width = SHAPES[shape]
    made = plan_of(over, dtype, batch, width, back)
    for everything in (False, True) if shape == "pMNIST" else (True,):
        defines = norms.defines_of(
            dtype,
            made,
            back,
            ragged=everything,
            separate_grads=everything,
            cell=1 if width % 4 else 4,
        )
        _, spilled = build("norms.cu", defines)
        assert max(spilled) == 0


@both_ways
@every_norm
def test_everything_has_a_thread(over, back):
    """Some column or example is left out, a block is larger than it was compiled for, or a
    thread keeps too much.
    """
    sizes = product(
        TYPES, (1, 2, 20, 33, 100, 128, 257, 1000), (1, 3, 30, 400, 513, 2052, 6000, 16384, 40000)
    )
    for dtype, batch, width in sizes:
        made = plan_of(over, dtype, batch, width, back)
        x, y = made.threads
        assert width % made.vector == 0 and x * y <= made.bound <= 1024
        if over == "units":
            assert x % made.team == 0 and made.tiles == 1
            held = made.vectors_per_thread * made.vector
            assert not made.in_registers or 0 <= held * made.team - width < made.team * made.vector
            assert not made.in_registers or held <= norms.MOST_ELEMENTS[back]
        else:
            assert 0 <= made.tiles * x * made.vector - width < x * made.vector
            assert not made.in_registers or 0 <= made.vectors_per_thread * y - batch < y
            assert not made.in_registers or made.vectors_per_thread <= norms.MOST_VECTORS[back]


def test_unaligned():
    """Sixteen bytes are read at once from where that is not allowed."""
    numbers = torch.zeros(64, dtype=torch.bfloat16)
    start = -numbers.data_ptr() // 2 % 8  # from here on aligned
    assert [norms._vector(8, [numbers[start + k :]], 8) for k in range(9)] == [
        8,
        1,
        2,
        1,
        4,
        1,
        2,
        1,
        8,
    ]
    assert [norms._vector(width, [], 8) for width in (400, 300, 6, 7)] == [8, 4, 2, 1]


# --- on a GPU -------------------------------------------------------------------------------------

TOLERANCES = {
    torch.float32: 1e-5,
    torch.bfloat16: 4e-3,
    torch.float16: 5e-4,
}  # of what is written in the type
SIZES = [
    (7, 5, 37),
    (5, 100, 100),
    (3, 4, 1),
    (2, 9, 513),
    (3, 2, 2048),
    (1, 33, 16),
    (3, 300, 8),
    (2, 6, 4099),
]
CALLS: dict[str, dict[str, Any]] = {
    "whole": {},
    "reversed": dict(reverse=True),
    "lengths": dict(lengths=True),
    "all": dict(lengths=True, reverse=True),
}


class Case(NamedTuple):
    """Random numbers for both ways, in the kernels' types, and the same in float64."""

    start: Tensor  # x·Wx
    loop: Loop
    back: LoopGrads
    want: dict[str, Tensor]

    def run(self) -> dict[str, Tensor]:
        """What the kernels make of it, of new copies each time."""
        loop, back = self.loop, self.back
        loop.gates, back.dx = self.start.clone(), self.start.clone()
        norms.forward(loop)
        norms.backward(loop, back)
        found = {"gates": loop.gates, "mean": loop.mean_x, "var": loop.var_x, "dx": back.dx}
        found |= {
            name: getattr(back, name) for name in self.want if name.startswith(("dscale", "dshift"))
        }
        return {name: value.clone() for name, value in found.items() if value is not None}


def case(
    over,
    dtype,
    sizes,
    cell="lstm",
    given=False,
    lengths=False,
    reverse=False,
    device="cuda",
    aligned=True,
) -> Case:
    steps, batch, hidden = sizes
    width, rows = CELLS[cell].gates * hidden, steps * batch
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int, like: torch.dtype = torch.float32) -> Tensor:
        """Random numbers; unaligned: one further than torch would put them."""
        room = torch.randn(1 + int(torch.tensor(shape).prod()), generator=random).to(device, like)
        return room[:-1].view(shape) if aligned else room[1:].view(shape)

    ends = None
    if (
        lengths
    ):  # zero, and else two different ones: the spread of very few examples is mostly rounding
        ends = torch.tensor(
            [0 if b % 5 == 3 else steps - b % 2 for b in range(batch)], device=device
        )
    turn = turn_around(ends, steps, reverse)
    alive = None if ends is None else alive_rows(ends, steps)
    there = torch.ones(rows, 1, device=device) if alive is None else alive.view(rows, 1).float()
    v, d, d_h = (draw(rows, width, like=dtype).mul_(there) for _ in range(3))
    gh, dnc, chat = (draw(rows, n).mul_(there) for n in (width, hidden, hidden))
    d_h = d_h if cell == "gru" else d
    scale, scale_h, bias = draw(width), draw(width), draw(width, like=dtype)
    size = (rows,) if over == "units" else (steps, width)
    mean, var = (
        (draw(*size), draw(*size).abs() + 0.5) if given else (draw(*size) * 0, draw(*size) * 0)
    )
    norm = StepNorm(
        over, 1e-5, scale, scale_h, given=Moments(mean, var, mean, var) if given else None
    )
    h0, w_hh = (
        torch.zeros(batch, hidden, device=device, dtype=dtype),
        torch.empty(width, hidden, device="meta"),
    )
    loop = Loop(
        CELLS[cell], hidden, steps, None, None, (h0,), None, None, w_hh, bias, None, None, (), {},
        None, norm, ends, h0, 0, reverse, None, (), v, (h0,), gh, (), mean, var, None, None, None,
        None,
    )  # fmt: skip
    c = (dnc, chat) if cell == "lstm" else (None, None)
    sums = [torch.zeros(1, n, device=device) for n in (width, width, hidden, hidden)]
    sums = sums if cell == "lstm" else [*sums[:2], None, None]  # type: ignore[list-item]
    back = LoopGrads(h0, (), (h0,), (), d, d, d_h, None, None, *c, v, *sums)

    # The same in float64, its derivatives by autograd.
    wide, of_scale = v.double().requires_grad_(), scale.double().requires_grad_()
    ordered = turn(wide.view(steps, batch, width))
    found = (
        (mean[:, None].double(), var[:, None].double()) if given else moments(ordered, over, alive)
    )
    gates = turn(normalise(ordered, *found, norm.eps, of_scale) + bias.double()).reshape(
        rows, width
    )
    dx, dscale_x = torch.autograd.grad(gates, (wide, of_scale), d.double())
    gates = torch.where(there > 0, gates, wide)  # past the ends nothing is done
    lie = turn if over == "units" else torch.Tensor.clone
    mean, var = (
        lie(value.detach().expand(-1, batch if over == "units" else 1, -1)).reshape(size)
        for value in found
    )
    mean, var = (mean * there[:, 0], var * there[:, 0]) if over == "units" else (mean, var)
    want = dict(gates=gates.detach(), mean=mean, var=var, dx=dx, dscale_x=dscale_x)
    want["dscale_h"] = (d_h.double() * gh.double()).sum(0)
    if cell == "lstm":
        want |= dict(dscale_c=(dnc.double() * chat.double()).sum(0), dshift_c=dnc.double().sum(0))
    return Case(v, loop, back, want)


def check(made: Case) -> None:
    got, tolerance = made.run(), TOLERANCES[made.loop.gates.dtype]
    for name, want in made.want.items():
        error = float(
            (got[name].double().view_as(want) - want).norm() / want.norm().clamp(min=1e-30)
        )
        allowed = tolerance if name in ("gates", "dx") else 1e-5
        assert error <= allowed, f"{name}: {error:.1e}, allowed {allowed:.0e}"
    if made.loop.lengths is not None:
        alive = alive_rows(made.loop.lengths, made.loop.steps).view(-1)
        assert not got["dx"][~alive].any()


@pytest.mark.gpu
@every_type
@every_norm
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("sizes", SIZES)
def test_equal_to_autograd(poisoned, sizes, call, over, dtype):
    """Moments over the wrong numbers, a missing term of a derivative, a size that is wrong at
    its edge.
    """
    check(case(over, dtype, sizes, **CALLS[call]))


@pytest.mark.gpu
@every_type
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("cell", CELLS)
def test_given_moments_and_cells(poisoned, cell, call, dtype):
    """Given moments are not used or have derivatives; a cell whose dsh is not dgx, or that has
    no c, goes wrong.
    """
    for sizes in ((7, 5, 36), (4, 70, 129)):
        check(case("examples", dtype, sizes, cell, given=True, **CALLS[call]))
        for over in OVER:
            check(case(over, dtype, sizes, cell, **CALLS[call]))


@pytest.mark.gpu
@every_type
@every_norm
def test_unaligned_numbers(over, dtype):
    """Numbers that begin anywhere are read as if they were aligned."""
    check(case(over, dtype, (5, 20, 40), aligned=False))


@pytest.mark.gpu
@every_type
@every_norm
def test_the_same_bits_twice(over, dtype):
    """Sums are taken in no fixed order."""
    made = case(over, dtype, (50, 100, 100))
    first, second = made.run(), made.run()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
@every_norm
def test_in_a_graph(over):
    """The host has to wait for something, or a replay reads what is no longer there."""
    made = case(over, torch.bfloat16, (6, 30, 40))
    want = made.run()  # and the kernels are loaded
    loop, back = made.loop, made.back
    assert back.dx is not None and back.dscale_x is not None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.gates.copy_(made.start)
        back.dx.copy_(made.start)
        norms.forward(loop)
        norms.backward(loop, back)
    for _ in range(2):
        back.dscale_x.fill_(7.0)
        graph.replay()
        found = {
            "gates": loop.gates,
            "dx": back.dx,
            "dscale_x": back.dscale_x,
            "dshift_c": back.dshift_c,
        }
        assert all(torch.equal(value, want[name]) for name, value in found.items())
