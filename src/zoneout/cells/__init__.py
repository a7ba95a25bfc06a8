"""Cells as definitions: those of torch.nn and published ones.

`zo.Recurrent(zo.cells.peephole_lstm, 64, 256)` is a layer of a published cell.
"""

from .built_in import CELLS, gru, lstm, rnn_relu, rnn_tanh
from .published import (
    PUBLISHED,
    capped_lstm,
    cfc,
    coupled_lstm,
    indrnn,
    janet,
    ligru,
    mgu,
    mingru,
    minlstm,
    mogrifier_lstm,
    peephole_lstm,
    slstm,
    sru,
)

# One step with its noise, for the rest of the package: no public names.
from .with_noise import NOTHING as NOTHING
from .with_noise import Held as Held
from .with_noise import Keep as Keep
from .with_noise import drop as drop
from .with_noise import same as same
from .with_noise import step as step
from .with_noise import zone as zone

__all__ = [
    "CELLS",
    "PUBLISHED",
    "capped_lstm",
    "cfc",
    "coupled_lstm",
    "gru",
    "indrnn",
    "janet",
    "ligru",
    "lstm",
    "mgu",
    "mingru",
    "minlstm",
    "mogrifier_lstm",
    "peephole_lstm",
    "rnn_relu",
    "rnn_tanh",
    "slstm",
    "sru",
]
