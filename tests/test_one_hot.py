"""One-hot rows given by their numbers: the same as the rows written out, in every backend and
form of input.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import zoneout as zo

LAYERS = {"lstm": zo.LSTM, "gru": zo.GRU, "rnn": zo.RNN}
FORMS = {
    "whole": {},
    "lengths": dict(lengths=[6, 2, 0, 3]),
    "resets": dict(resets=torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) < 0.3),
}


def results(layer, x, **call):
    layer.zero_grad()
    y, state = layer(x, seed=3, **call)
    (y if isinstance(y, torch.Tensor) else y.data).square().sum().backward()
    states = state if isinstance(state, tuple) else (state,)
    return [
        y if isinstance(y, torch.Tensor) else y.data,
        *states,
        *(p.grad.clone() for p in layer.parameters()),
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("features", [7, 300])
@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_rows_written_out(name, features, form):
    """A number looks up another row than its own, or the way back leaves a row without its part."""
    layer = LAYERS[name](
        features, 9, 2, bidirectional=True, noise=zo.Zoneout(hidden=0.3), dtype=torch.float64
    )
    numbers = torch.randint(0, features, (6, 4))
    rows = F.one_hot(numbers, features).double()
    for backend in ("cpu", "reference"):
        layer.backend = backend
        for a, b in zip(
            results(layer, numbers, **FORMS[form]), results(layer, rows, **FORMS[form])
        ):
            torch.testing.assert_close(a, b)


def test_with_noise_on_the_input():
    """A variational mask on the features does not reach rows given by number."""
    layer = zo.LSTM(5, 4, noise=zo.VariationalDropout(input=0.5, hidden=0.2), norm="layer")
    numbers = torch.randint(0, 5, (6, 3))
    for a, b in zip(results(layer, numbers), results(layer, F.one_hot(numbers, 5).float())):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("noise", [zo.Zoneout(hidden=0.3), zo.VariationalDropout(hidden=0.3)])
def test_rates_in_the_reference(noise):
    """A rate or scale takes the integer type of the numbers, and becomes 0 or 1."""
    layer = zo.GRU(5, 4, noise=noise, backend="reference")
    layer.train(isinstance(noise, zo.VariationalDropout))  # else the rate takes the mask's place
    numbers = torch.randint(0, 5, (6, 3))
    for a, b in zip(results(layer, numbers), results(layer, F.one_hot(numbers, 5).float())):
        torch.testing.assert_close(a, b)


def test_forms_of_input():
    """Unbatched, batch-first, packed or compiled input of numbers is taken for something else."""
    layer = zo.GRU(5, 4, batch_first=True).eval()
    numbers = torch.randint(0, 5, (3, 6))
    want = layer(F.one_hot(numbers, 5).float())[0]
    torch.testing.assert_close(layer(numbers)[0], want)
    torch.testing.assert_close(layer(numbers[0])[0], want[0])
    torch.testing.assert_close(
        torch.compile(layer, fullgraph=True, backend="aot_eager")(numbers)[0], want
    )
    packed = pack_padded_sequence(numbers, torch.tensor([6, 4, 1]), batch_first=True)
    rows = pack_padded_sequence(
        F.one_hot(numbers, 5).float(), torch.tensor([6, 4, 1]), batch_first=True
    )
    torch.testing.assert_close(layer(packed)[0].data, layer(rows)[0].data)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            torch.tensor([[0, 5]]),
            r"expected 0 to 4 \(input_size − 1\), got 0 to 5; .*input\.float\(\).*nn\.Embedding",
        ),
        (
            torch.tensor([[-1, 2]]),
            r"expected 0 to 4 \(input_size − 1\), got -1 to 2; .*input\.float\(\)",
        ),
        (torch.tensor([[0, 1]]).int(), r"got torch\.int32 with 2 dimensions; .*input\.float\(\)"),
        (
            torch.zeros(2, 3, 5, dtype=torch.int64),
            r"got torch\.int64 with 3 dimensions; .*input\.float\(\)",
        ),
    ],
)
def test_wrong_numbers_get_a_sentence(wrong, said):
    """A number that no feature has reads somebody else's memory, or nobody learns that integers
    are ids.
    """
    with pytest.raises(ValueError, match=f"read as ids of one-hot rows, .*{said}"):
        zo.LSTM(5, 4)(wrong)


@pytest.mark.parametrize("features", [5, 300], ids=["a product", "rows added up"])
@pytest.mark.parametrize("wrong", [-1, 2**40], ids=["below", "above"])
def test_wrong_numbers_that_cannot_be_looked_at(wrong, features):
    """Under a transform, where ids are not looked at, one that does not fit reads or writes
    somebody else's memory.
    """
    layer = zo.LSTM(features, 4)
    with pytest.raises((IndexError, RuntimeError), match="index"):
        torch.func.vmap(lambda ids: layer(ids)[0])(torch.tensor([[[0, wrong]]]))
