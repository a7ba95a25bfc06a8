"""The kernel for many rows: W_h over the whole chip, products by warpgroups.

On a GPU where there is one, else on the CPU, thread by thread; against the reference in float64.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_backends import NOISES
from test_cuda import compare, precision  # noqa: F401 (a fixture)

import zoneout as zo
from zoneout.ops import cuda
from zoneout.ops.cuda.kernels import warpgroup
from zoneout.ops.cuda.runtime import compiler

ON = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if ON == "cuda" else []
half_types = pytest.mark.parametrize("precision", ["bf16", "fp16"], indirect=True)


@pytest.fixture
def ran(request, poisoned, monkeypatch):
    """Loops go forwards by this kernel, wherever it fits, and back step by step; those that it
    took.
    """
    if ON == "cpu":
        request.getfixturevalue("emulated")
    taken, ready = [], warpgroup.ready

    def and_count(loop, grads, concurrent):
        found = ready(loop, grads, concurrent)
        taken.extend([] if found is None else [loop])
        return found

    monkeypatch.setattr(warpgroup, "persistent_plan", lambda *_, **__: None)
    monkeypatch.setattr(warpgroup, "ready", and_count)
    monkeypatch.setattr(cuda, "PATHS", (warpgroup, cuda.steps))
    yield taken
    warpgroup.plan.cache_clear()


SHARED = 232448
# Fewer weights in registers, smaller chunks, a smaller chip: so that small layers have all that
# large ones do. Sizes; k-steps in registers and of a chunk, processors, bytes of shared memory; and
# the turns, groups and stages of it.
SIZES = {
    "one block": ((3, 5, 2, 8), (1, 2, 132, SHARED), (1, 1, 2)),
    "an odd end": ((5, 9, 3, 40), (2, 4, 132, SHARED), (1, 1, 2)),
    "two turns": ((4, 70, 3, 72), (2, 4, 5, SHARED), (2, 1, 4)),
    "two whole turns": ((3, 128, 2, 24), (2, 4, 2, SHARED), (2, 1, 2)),
    "groups": ((3, 200, 2, 24), (2, 4, 132, SHARED), (1, 4, 2)),
    "groups of two turns, the last of one": ((3, 170, 2, 24), (2, 4, 4, SHARED), (2, 2, 2)),
    "weights in shared memory": ((3, 70, 2, 200), (4, 8, 132, SHARED), (1, 2, 4)),
    "more chunks than stages": ((4, 100, 2, 200), (2, 4, 13, 80000), (2, 1, 2)),
}


@pytest.mark.parametrize(("sizes", "given", "found"), SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    ("ragged", "precision"), [(False, "bf16"), (True, "fp16")], indirect=["precision"]
)
def test_sizes(ragged, sizes, given, found, precision, ran, monkeypatch):  # noqa: F811
    """A block, a turn, a group, a chunk, a stage that is used again, or rows and units past the
    last go wrong.

    And of rows that end early: something is written past their ends, or their last state is not
        that of the end.
    """
    resident, chunk, processors, shared = given
    monkeypatch.setattr(warpgroup, "MOST_RESIDENT", resident)
    monkeypatch.setattr(warpgroup, "K_STEPS_PER_CHUNK", chunk)
    monkeypatch.setattr(warpgroup, "chip", lambda device: compiler.Chip(processors, shared, 9))
    warpgroup.plan.cache_clear()
    lengths = [(5 * row + 1) % (sizes[0] + 1) for row in range(sizes[1])]
    call = {"lengths": lengths} if ragged else {}
    compare("lstm", NOISES["zoneout-unit"], call, True, precision, sizes, device=ON)
    tiles = warpgroup.plan_for(ran[0])
    assert (tiles.slabs, tiles.groups, tiles.stages) == found


@pytest.mark.parametrize("precision", ["bf16"], indirect=True)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("make", ["unit", "shared", "cells", "states", "by unit", "none"])
def test_noises(make, training, precision, ran, monkeypatch):  # noqa: F811
    """A kernel for some of the masks draws others, or takes their rates for those of another
    unit.
    """
    monkeypatch.setattr(warpgroup, "chip", lambda device: compiler.Chip(2, SHARED, 9))  # two turns
    rates = torch.linspace(0, 1, 24, dtype=torch.float64)
    noise = {
        "unit": zo.Zoneout(cell=0.5, hidden=0.2),
        "shared": zo.Zoneout(cell=0.4, hidden=0.2, mask="shared"), "cells": zo.Zoneout(cell=0.5),
        "states": zo.Zoneout(hidden=0.5), "none": None,
        "by unit": zo.Zoneout(cell=rates, hidden=rates.flip(0)),
    }[make]  # fmt: skip
    call = {"examples": list(range(2**32 - 70, 2**32)), "first_step": 2**32 - 5}
    options = dict(num_layers=2, learn_initial_state=True)
    compare(
        "lstm",
        lambda states: noise,
        call,
        training,
        precision,
        (4, 70, 3, 24),
        device=ON,
        **options,
    )
    assert len(ran) == 2  # both layers


@pytest.mark.parametrize("mask", ["unit", "shared"])
def test_masks_are_those_of_the_cpu(mask, ran):
    """Its bits are not those that `zo.masks` shows: read back with a candidate of 1 and an old
    value of 0.
    """
    noise = zo.Zoneout(cell=0.3, hidden=0.4, mask=mask)
    layer = zo.LSTM(1, 40, noise=noise, dtype=torch.bfloat16, device=ON)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.bias_ih_l0.fill_(40.0)  # every gate and candidate is 1
    x = torch.zeros(6, 70, 1, dtype=torch.bfloat16, device=ON)
    want = zo.masks(noise, seed=11, steps=6, batch=70, hidden=40, examples=5)
    for t in range(6):
        y, _, c = layer(x[t : t + 1], seed=11, examples=5, first_step=t, return_cells=True)
        assert torch.equal(y[0].cpu() < 0.5, want["hidden"][t])
        assert torch.equal(c[0].cpu() < 0.5, want["cell"][t])
    assert len(ran) == 6


def test_what_it_leaves_to_others(ran):
    """It takes a loop that it cannot run: other cells, noises and norms, resets, odd sizes, the
    way back.
    """
    x = torch.randn(2, 70, 3, dtype=torch.bfloat16, device=ON)
    for layer, call in (
        (zo.GRU(3, 40), {}),
        (zo.LSTM(3, 41), {}),
        (zo.LSTM(3, 40, proj_size=8), {}),
        (zo.LSTM(3, 40, norm="layer"), {}),
        (zo.LSTM(3, 40, noise=zo.RecurrentDropout(rate=0.5)), {}),
        (zo.LSTM(3, 40, noise=zo.Zoneout(cell=0.5, hidden=0.5, mask="step")), {}),
        (zo.LSTM(3, 40), {"resets": torch.ones(2, 70, dtype=torch.bool, device=ON)}),
        (zo.LSTM(3, 40, noise=zo.VariationalDropout(hidden=0.5)), {}),
    ):
        layer.to(ON, torch.bfloat16)(x, **call)
    zo.LSTM(3, 40, device=ON)(x.float())
    assert not ran
    y = zo.LSTM(3, 40, dtype=torch.bfloat16, device=ON)(x.requires_grad_())[0]
    assert len(ran) == 1
    y.sum().backward()
    assert len(ran) == 1


def test_states_that_lie_oddly(ran):
    """It reads 16 bytes at once where none begin."""
    layer = zo.LSTM(3, 40, dtype=torch.bfloat16, device=ON)
    x, numbers = (
        torch.randn(2, 70, 3, device=ON).bfloat16(),
        torch.randn(70 * 40 + 1, device=ON).bfloat16(),
    )
    h, c = numbers[1:].view(1, 70, 40), torch.zeros(1, 70, 40, device=ON).bfloat16()
    got = layer(x, (h, c))[0]
    assert not ran
    assert (got - layer(x, (h.clone(), c))[0]).norm() <= 1e-2 * got.norm() and ran


def test_the_same_bits_twice(ran):
    """The same seed gives other numbers the second time."""
    layer = zo.LSTM(3, 72, noise=zo.Zoneout(cell=0.5, hidden=0.05), dtype=torch.bfloat16, device=ON)
    x = torch.randn(5, 128, 3, dtype=torch.bfloat16, device=ON)
    assert torch.equal(layer(x, seed=1)[0], layer(x, seed=1)[0]) and len(ran) == 2


def test_two_loops_side_by_side_are_left_to_others():
    """The kernel takes the whole chip though another one is to run at the same time."""
    loop = SimpleNamespace(reverse=False, resets=None, scale_h=None)
    assert warpgroup.ready(loop, None, 2) is None
