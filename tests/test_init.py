"""The initialisers of the paper's experiments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zoneout as zo
from zoneout import init

SHAPES = [(8, 2), (2, 8), (6, 4), (12, 3), (5, 5), (3, 7), (1, 4)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def empty(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=torch.float64)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(side=st.integers(1, 5), down=st.integers(1, 4), across=st.integers(1, 4))
def test_every_block_is_orthogonal(side, down, across):
    """A block is not orthogonal, or the squares are not the largest: side = gcd of the two
    sizes.
    """
    w = init.block_orthogonal_(empty(side * down, side * across), generator=generator())
    side = math.gcd(*w.shape)
    for rows in w.split(side, dim=0):
        for block in rows.split(side, dim=1):
            assert block.shape == (side, side)
            torch.testing.assert_close(block @ block.T, torch.eye(side, dtype=torch.float64))


def test_blocks_are_independent():
    """Two blocks are the same matrix."""
    w = init.block_orthogonal_(empty(12, 3), generator=generator())
    blocks = w.split(3)
    assert all(not torch.allclose(blocks[a], blocks[b]) for a in range(4) for b in range(a))


@pytest.mark.parametrize("function", [init.block_orthogonal_, init.orthogonal_])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_is_filled_in_place(function, shape):
    """An initialiser returns another tensor, needs one without gradient, or ignores its
    generator.
    """
    parameter = torch.nn.Parameter(empty(*shape))
    assert function(parameter, generator=generator(1)) is parameter
    assert parameter.requires_grad and parameter.grad_fn is None and parameter.isfinite().all()
    assert torch.equal(function(empty(*shape), generator=generator(1)), parameter)
    if shape != (1, 4):  # a block of one is 1 or −1
        assert not torch.equal(function(empty(*shape), generator=generator(2)), parameter)
    torch.manual_seed(5)
    first = function(empty(*shape))
    torch.manual_seed(5)
    assert torch.equal(function(empty(*shape)), first)


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonal(shape):
    """Rows or columns, whichever are fewer, are not orthonormal."""
    w = init.orthogonal_(empty(*shape), generator=generator())
    w = w if w.shape[0] <= w.shape[1] else w.T
    torch.testing.assert_close(w @ w.T, torch.eye(len(w), dtype=torch.float64))


@pytest.mark.parametrize("function", [init.block_orthogonal_, init.orthogonal_])
@pytest.mark.parametrize("shape", [(4,), (2, 2, 2)])
def test_only_matrices(function, shape):
    """A bias or a stack of matrices is accepted, or the error does not name the argument and the
    shape.
    """
    with pytest.raises(ValueError, match=r"weight: expected a matrix, got shape \("):
        function(torch.empty(shape))


def test_orthogonal_signs_are_not_all_alike():
    """The orthogonal matrices are not drawn uniformly: the diagonal of a plain QR has one sign."""
    for function in (init.block_orthogonal_, init.orthogonal_):
        diagonals = torch.stack(
            [function(empty(3, 3), generator=generator(k)).diagonal() for k in range(40)]
        )
        assert ((diagonals > 0).any(0) & (diagonals < 0).any(0)).all()


def test_uniform():
    """A weight or a bias is left out, or does not fill U(−bound, bound)."""
    layer = zo.LSTM(20, 30, num_layers=2, bidirectional=True)
    assert init.uniform_(layer, 0.04, generator=generator()) is layer
    for name, parameter in layer.named_parameters():
        assert parameter.requires_grad
        assert parameter.min() < -0.03 and parameter.max() > 0.03, name
        assert parameter.abs().max() <= 0.04, name
    every = torch.cat([p.detach().flatten() for p in layer.parameters()])
    assert abs(every.mean()) < 4 * 0.04 / math.sqrt(3 * len(every))
    assert abs(every.std() - 0.04 / math.sqrt(3)) < 0.0005
    other = init.uniform_(
        zo.LSTM(20, 30, num_layers=2, bidirectional=True), 0.04, generator=generator()
    )
    assert torch.equal(torch.cat([p.detach().flatten() for p in other.parameters()]), every)


def test_uniform_of_a_model():
    """Parameters inside a model are not reached."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(50, 20), torch.nn.ModuleDict({"rnn": zo.GRU(20, 20)})
    )
    init.uniform_(model, 0.5)
    assert all(p.abs().max() <= 0.5 and p.abs().max() > 0.3 for p in model.parameters())


@pytest.mark.parametrize(
    "norm", [torch.nn.LayerNorm(20), torch.nn.BatchNorm1d(20), torch.nn.GroupNorm(2, 20)], ids=str
)
def test_uniform_leaves_norms(norm):
    """A model's own norm would begin with scales around zero."""
    init.uniform_(torch.nn.Sequential(norm, zo.GRU(20, 20)), 0.5)
    assert torch.equal(norm.weight, torch.ones(20)) and torch.equal(norm.bias, torch.zeros(20))


@pytest.mark.parametrize(
    "options", [{}, dict(num_layers=2, bidirectional=True)], ids=["one", "stack"]
)
def test_forget_bias(options):
    """The forget gate's bias is not 1 altogether, or another bias is not 0, in some layer or
    direction.
    """
    layer = zo.LSTM(3, 4, **options)
    now = dict(layer.named_parameters())
    before = {name: p.clone() for name, p in now.items()}
    assert init.forget_bias_(layer, 2.5) is layer
    assert now["bias_ih_l0"].tolist() == [0.0] * 4 + [2.5] * 4 + [0.0] * 8
    init.forget_bias_(layer)
    for name, parameter in now.items():
        assert parameter.requires_grad
        if name.startswith("weight"):
            assert torch.equal(parameter, before[name])
        elif name.startswith("bias_ih"):
            assert parameter.tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8
        else:
            assert not parameter.any()  # so that the two biases together are 1


@pytest.mark.parametrize("make", [zo.LSTMCell, torch.nn.LSTMCell, torch.nn.LSTM])
def test_forget_bias_of_other_lstms(make):
    """A cell, or torch's own LSTM, is not reached."""
    module = init.forget_bias_(make(3, 4))
    biases: list[torch.Tensor] = [
        p for name, p in module.named_parameters() if name.startswith("bias")
    ]
    assert torch.stack(biases).sum(0).tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8


def test_forget_bias_opens_the_gate():
    """The bias is put on another gate than the one that carries the cell."""
    layer: Any = init.forget_bias_(zo.LSTM(2, 3, dtype=torch.float64), 100.0)
    with torch.no_grad():
        layer.weight_ih_l0.zero_()
        layer.weight_hh_l0.zero_()
    c0 = torch.randn(1, 5, 3, dtype=torch.float64)
    _, (_, c) = layer(torch.zeros(9, 5, 2, dtype=torch.float64), (torch.zeros_like(c0), c0))
    torch.testing.assert_close(c, c0)


def test_forget_bias_with_a_norm():
    """The shifts and scales of a norm are taken for biases."""
    layer: Any = zo.LSTM(3, 4, norm=zo.RecurrentBatchNorm(steps=2), learn_initial_state=True)
    init.forget_bias_(layer)
    assert (layer.norm_hh_l0 == 0.1).all()
    assert layer.bias_ih_l0.sum() == 4


@pytest.mark.parametrize("make", [zo.GRU, zo.RNN, zo.GRUCell])
def test_forget_bias_of_what_has_none(make):
    """A module without a forget gate has some of its biases set to 1 in silence."""
    with pytest.raises((TypeError, ValueError), match=r"module: expected an LSTM"):
        init.forget_bias_(make(3, 4))
