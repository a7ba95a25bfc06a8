"""Cells as definitions: those of torch.nn, published ones, and one step of any cell with its noise.

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
from .with_noise import NOTHING, Held, Keep, drop, same, step, zone

__all__ = [
    "CELLS",
    "NOTHING",
    "PUBLISHED",
    "Held",
    "Keep",
    "capped_lstm",
    "cfc",
    "coupled_lstm",
    "drop",
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
    "same",
    "slstm",
    "sru",
    "step",
    "zone",
]
