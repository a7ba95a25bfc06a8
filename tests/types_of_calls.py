"""What a type checker knows of a user's code: `make check` runs mypy over this file.

Here `assert_type` fails if a result has another type, and an unused `type: ignore` if a mistake
goes unseen.
"""

from typing import assert_type

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import zoneout as zo

x, row = torch.randn(5, 2, 3), torch.randn(2, 3)
packs = pack_sequence([x[:, 0], x[:3, 1]])

lstm = zo.LSTM(3, 4, noise=zo.Zoneout(cell=0.5, hidden=0.05))
assert_type(lstm(x), tuple[Tensor, tuple[Tensor, Tensor]])
assert_type(lstm(packs, seed=1), tuple[PackedSequence, tuple[Tensor, Tensor]])
y, (h, c), cells = lstm(x, return_cells=True, rates={"cell": 0.1}, lengths=[5, 3])
assert_type(cells, Tensor)

gru = zo.GRU(3, 4)
assert_type(gru(x, seed=1, first_step=3), tuple[Tensor, Tensor])
assert_type(gru(packs)[0], PackedSequence)
assert_type(zo.RNN(3, 4)(x, h), tuple[Tensor, Tensor])

assert_type(zo.LSTMCell(3, 4)(row, seed=1, step=0), tuple[Tensor, Tensor])
assert_type(zo.GRUCell(3, 4)(row), Tensor)
assert_type(zo.RNNCell(3, 4)(row, torch.zeros(2, 4)), Tensor)


class Tagger(nn.Module):
    """A user's model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.output = nn.LSTM(3, 4), nn.Linear(4, 7)


assert_type(zo.convert(Tagger(), zo.Zoneout(cell=0.1)), Tagger)
assert_type(zo.convert(nn.LSTM(3, 4), zo.Zoneout(cell=0.1)), zo.LSTM)
assert_type(zo.convert(nn.GRUCell(3, 4), None), zo.GRUCell)
assert_type(zo.revert(Tagger()), Tagger)
assert_type(zo.revert(gru), nn.GRU)


def mistakes() -> None:
    """What a type checker refuses; nothing calls this."""
    lstm(x, h)  # type: ignore[call-overload]
    gru(x, sed=1)  # type: ignore[call-arg]
