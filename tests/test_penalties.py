"""The norm stabiliser against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence

import zoneout as zo

T, B, H = 5, 3, 4


def by_hand(y, beta, lengths=None):
    """β · mean over batch and steps of (‖h_t‖ − ‖h_{t−1}‖)² of [T, B, H]; h0 is left out."""
    steps, batch, _ = y.shape
    squares = []
    for b in range(batch):
        for t in range(1, steps if lengths is None else lengths[b]):
            before, now = np.sqrt(np.sum(y[t - 1, b] ** 2)), np.sqrt(np.sum(y[t, b] ** 2))
            squares.append((now - before) ** 2)
    return beta * np.mean(squares) if squares else 0.0


def outputs(steps=T, batch=B):
    return np.random.default_rng(4).standard_normal((steps, batch, H))


def test_padded():
    """The penalty is not β times the mean over batch and steps of the squared changes of the
    norm.
    """
    y = outputs()
    np.testing.assert_allclose(
        zo.norm_stabilizer(torch.tensor(y), 50.0).item(), by_hand(y, 50.0), rtol=1e-12
    )


def test_batch_first():
    """With `batch_first` the changes are taken from example to example."""
    y = outputs()
    got = zo.norm_stabilizer(torch.tensor(y).transpose(0, 1), 2.0, batch_first=True)
    np.testing.assert_allclose(got.item(), by_hand(y, 2.0), rtol=1e-12)


@pytest.mark.parametrize("batch_first", [False, True])
def test_unbatched(batch_first):
    """One sequence without a batch dimension is not a batch of one, whatever `batch_first` says."""
    y = outputs(batch=1)
    got = zo.norm_stabilizer(torch.tensor(y[:, 0]), 2.0, batch_first=batch_first)
    np.testing.assert_allclose(got.item(), by_hand(y, 2.0), rtol=1e-12)


@pytest.mark.parametrize("lengths", [[5, 2, 3], [5, 5, 5], [1, 4, 0]])
@pytest.mark.parametrize("form", ["list", "tensor"])
def test_lengths(lengths, form):
    """Padding counts: the norm's drop at a sequence's end is punished, or steps past it lower
    the mean.
    """
    y = outputs()
    given = lengths if form == "list" else torch.tensor(lengths)
    got = zo.norm_stabilizer(torch.tensor(y), 3.0, lengths=given)
    np.testing.assert_allclose(got.item(), by_hand(y, 3.0, lengths), rtol=1e-12)
    first = zo.norm_stabilizer(
        torch.tensor(y).transpose(0, 1), 3.0, lengths=given, batch_first=True
    )
    assert first == got


@pytest.mark.parametrize("batch_first", [False, True])
def test_packed(batch_first):
    """A packed output is read in the wrong order, or its padding counts."""
    y, lengths = outputs(), [2, 5, 3]
    packed = pack_padded_sequence(torch.tensor(y), torch.tensor(lengths), enforce_sorted=False)
    got = zo.norm_stabilizer(packed, 2.0, batch_first=batch_first)
    np.testing.assert_allclose(got.item(), by_hand(y, 2.0, lengths), rtol=1e-12)


@pytest.mark.parametrize("lengths", [None, [5, 2, 0]])
def test_gradient(lengths):
    """The penalty's gradient is wrong, or reaches the padding."""
    y = torch.tensor(outputs(), requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: zo.norm_stabilizer(v, 2.0, lengths=lengths), y)
    zo.norm_stabilizer(y, 2.0, lengths=lengths).backward()
    assert y.grad is not None
    if lengths is not None:
        assert (
            (y.grad[2:, 1] == 0).all() and (y.grad[:, 2] == 0).all() and (y.grad[:, 0] != 0).all()
        )


@pytest.mark.parametrize("lengths", [None, [5, 2, 3]])
def test_zero_norms_have_a_gradient(lengths):
    """A state of zero (a dead ReLU, padding, everything dropped) makes the gradient NaN."""
    y = torch.tensor(outputs())
    y[0], y[2:, 1] = 0.0, 0.0
    y.requires_grad_()
    value = zo.norm_stabilizer(y, 1.0, lengths=lengths)
    value.backward()
    assert value.isfinite() and y.grad is not None and y.grad.isfinite().all()


@pytest.mark.parametrize("lengths", [None, [1, 1, 0]])
def test_one_step_has_no_change(lengths):
    """One step alone, or sequences no longer than that, give NaN instead of zero."""
    y = torch.tensor(outputs(steps=1), requires_grad=True)
    value = zo.norm_stabilizer(y, 50.0, lengths=lengths)
    assert value == 0
    value.backward()
    assert y.grad is not None and (y.grad == 0).all()


def test_no_examples():
    """A batch of nobody gives NaN."""
    assert zo.norm_stabilizer(torch.zeros(T, 0, H), 1.0) == 0


def test_of_a_layer():
    """The penalty does not take what a layer returns, in each of its forms, or cannot be trained
    on.
    """
    layer = zo.LSTM(2, H, dtype=torch.float64, batch_first=True)
    x, lengths = torch.tensor(outputs()[..., :2]).transpose(0, 1), torch.tensor([5, 2, 3])
    padded = zo.norm_stabilizer(
        layer(x, lengths=lengths)[0], 2.0, batch_first=True, lengths=lengths
    )
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    torch.testing.assert_close(zo.norm_stabilizer(layer(packed)[0], 2.0), padded)
    padded.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(steps=st.integers(1, 5), data=st.data(), beta=st.sampled_from([0.0, 0.5, 500.0]))
def test_any_shape(steps, data, beta):
    """Some shape or set of lengths has another mean than the one by hand."""
    lengths = data.draw(st.none() | st.lists(st.integers(0, steps), min_size=1, max_size=4))
    y = outputs(steps, 2 if lengths is None else len(lengths))
    got = zo.norm_stabilizer(torch.tensor(y), beta, lengths=lengths)
    np.testing.assert_allclose(got.item(), by_hand(y, beta, lengths), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "shape, lengths, message",
    [
        ((H,), None, r"outputs: expected .*got 1 dim"),
        ((T, B, H, 1), None, r"outputs: expected .*got 4 dim"),
        ((T, B, H), [5, 5], r"lengths: expected one for each of 3 sequences, got shape \(2,\)"),
        ((T, B, H), 5, r"lengths: expected one for each of 3 sequences, got shape \(\)"),
    ],
)
def test_errors(shape, lengths, message):
    """Outputs or lengths of the wrong shape are accepted, or the error does not say which and
    what.
    """
    with pytest.raises(ValueError, match=message):
        zo.norm_stabilizer(torch.zeros(shape), 1.0, lengths=lengths)


@pytest.mark.parametrize("ends", [None, [700, 784, 1]])
def test_half_types(ends):
    """What many steps add up to is more than float16 holds, and the loss is infinite."""
    y = torch.randn(784, 3, 100)
    want = zo.norm_stabilizer(y.half().float(), 5000.0, lengths=ends)
    torch.testing.assert_close(
        zo.norm_stabilizer(y.half(), 5000.0, lengths=ends), want, rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("lengths", [None, [5, 2, 3], [1, 4, 0]])
def test_activation_penalty(lengths):
    """Squares or changes are of padding, of other outputs, or have the other factor."""
    y, dropped = outputs(), outputs()[::-1].copy()
    ends = lengths or [T] * B
    squares = [np.mean(dropped[t, b] ** 2) for b in range(B) for t in range(ends[b])]
    changes = [np.mean((y[t, b] - y[t - 1, b]) ** 2) for b in range(B) for t in range(1, ends[b])]
    found = zo.activation_penalty(
        torch.tensor(y), 2.0, 3.0, dropped=torch.tensor(dropped), lengths=lengths
    )
    want = 2 * np.mean(squares) + 3 * np.mean(changes)
    np.testing.assert_allclose(found.item(), want, rtol=1e-12)
    if lengths is None:
        half = zo.activation_penalty(torch.full((300, 2, 300), 200.0, dtype=torch.float16), 1.0)
        assert half.item() == 40000.0
        with pytest.raises(ValueError, match="dropped: expected the shape of the outputs"):
            zo.activation_penalty(torch.tensor(y), 1.0, dropped=torch.tensor(y[1:]))
        with pytest.raises(TypeError, match="alpha: expected a number, got str"):
            zo.activation_penalty(torch.tensor(y), "1")
        with pytest.raises(ValueError, match="beta: expected a finite number, got nan"):
            zo.activation_penalty(torch.tensor(y), 1.0, float("nan"))
