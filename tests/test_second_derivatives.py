"""Gradients of fused layers that are derived again, such as those of a gradient penalty."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

import zoneout as zo

T, B, I, H = 4, 3, 2, 3
ZONEOUT = zo.Zoneout(cell=0.5, hidden=0.1)
HIDDEN = zo.Zoneout(hidden=0.3)
STREAMS = [ZONEOUT, zo.VariationalDropout(input=0.2, hidden=0.3), zo.RecurrentDropout(rate=0.2)]
LAYERS = {
    "stack of both directions": (zo.LSTM, dict(noise=STREAMS, num_layers=2, bidirectional=True)),
    "projection": (zo.LSTM, dict(noise=ZONEOUT, proj_size=2)),
    "layer norm": (zo.GRU, dict(noise=HIDDEN, norm="layer")),
    "batch norm": (zo.RNN, dict(noise=HIDDEN, norm=zo.RecurrentBatchNorm(steps=T))),
    "recompute": (zo.LSTM, dict(noise=ZONEOUT, recompute=True)),
    "masks of gates": (zo.LSTM, dict(noise=zo.VariationalDropout(hidden=0.3, tied=False))),
    "fast dropout": (zo.GRU, dict(noise=zo.FastDropout(input=0.2, hidden=0.2))),
}
RESETS = torch.tensor([[0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0]]).bool()
CALLS = {
    "padded": {},
    "lengths": {"lengths": [4, 2, 3]},
    "resets": {"resets": RESETS},
    "packed": {},
    "packed, resets": {"resets": RESETS},
}


def penalised(layer: torch.nn.Module, x: Tensor, call: str, steps: int = 2) -> list[Tensor]:
    """Return gradients, and the gradients of their squares; the last of several equal calls."""
    wanted = [x, *layer.parameters()]
    for _ in range(steps):  # a later call goes by its plan
        sequences = x
        if call.startswith("packed"):
            sequences = pack_padded_sequence(x, [4, 2, 3], enforce_sorted=False)
        y, state = layer(sequences, seed=5, **CALLS[call])
        ends = state if isinstance(state, tuple) else (state,)
        loss = (y if sequences is x else y.data).square().sum() + sum(v.sum() for v in ends)
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
    return [*first, *second]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", LAYERS)
def test_gradient_penalty(name, call):
    """The gradient of a gradient differs from the reference's, or is refused."""
    make, arguments = LAYERS[name]
    torch.manual_seed(1)
    layer = make(I, H, dtype=torch.float64, **arguments)
    reference = copy.deepcopy(layer)
    reference.backend = "reference"
    x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
    for got, want in zip(penalised(layer, x, call), penalised(reference, x, call, 1), strict=True):
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-11)


def test_third_derivative_and_hessian():
    """A further derivative is wrong, or the columns of a Hessian differ when taken at once."""
    layer = zo.GRU(I, H, dtype=torch.float64, noise=HIDDEN)
    x = torch.randn(2, 1, I, dtype=torch.float64, requires_grad=True)

    def slope(x: Tensor) -> Tensor:
        y = layer(x, seed=5)[0].pow(3).sum()
        return torch.autograd.grad(y, x, create_graph=True)[0]

    assert torch.autograd.gradgradcheck(slope, (x,))
    hessian = torch.autograd.functional.hessian
    columns = [hessian(lambda x: layer(x, seed=5)[0].sum(), x, vectorize=v) for v in (False, True)]
    assert torch.allclose(*columns)


def test_input_that_depends_on_a_weight():
    """The gradient of a weight contains the paths through the input, and so counts them twice."""
    layer = zo.RNN(I, H, dtype=torch.float64)
    weight, x = layer.weight_ih_l0, torch.randn(T, B, I, dtype=torch.float64)
    want = torch.autograd.grad(layer(x * weight.sum())[0].sum(), weight)[0]
    got = torch.autograd.grad(layer(x * weight.sum())[0].sum(), weight, create_graph=True)[0]
    assert torch.allclose(got, want)


@pytest.mark.parametrize("pack", [False, True], ids=["padded", "packed"])
def test_cells_of_every_step(pack):
    """The gradient of a cell state in the middle is lost, or put at another step."""
    layer = zo.LSTM(I, H, dtype=torch.float64, noise=ZONEOUT)
    x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
    sequences = pack_padded_sequence(x, [4, 2, 3], enforce_sorted=False) if pack else x
    cells = layer(sequences, seed=5, return_cells=True)[2]
    (cells.data if pack else cells)[1].sum().backward(retain_graph=True)
    want, x.grad = x.grad, None
    loss = (cells.data if pack else cells)[1].sum()
    (got,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.allclose(got, want) and got.requires_grad


def test_ids_and_half_types():
    """Ids have no gradient, and stop the others; or gradients have another type than weights."""
    layer = zo.LSTM(I, H, noise=ZONEOUT).bfloat16()
    wanted = list(layer.parameters())
    loss = layer(torch.tensor([[0, 1], [1, 0]]))[0].sum()
    grads = torch.autograd.grad(loss, wanted, create_graph=True)
    assert all(g.dtype == torch.bfloat16 and g.requires_grad for g in grads)
    sum(g.square().sum() for g in grads).backward()
    assert all(w.grad is not None and w.grad.isfinite().all() for w in wanted)


def test_outputs_without_a_gradient():
    """A loss of the outputs alone, or of none that needs a gradient, fails."""
    layer, x = zo.LSTM(I, H), torch.randn(T, B, I, requires_grad=True)
    _, (_, c) = layer(x)
    (d,) = torch.autograd.grad(c.sum(), x, create_graph=True)
    assert d.requires_grad and torch.autograd.grad(d.square().sum(), layer.weight_hh_l0)[0].any()
    layer.requires_grad_(False)
    (d,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    d.square().sum().backward()
    assert x.grad is not None and layer.weight_hh_l0.grad is None
