"""Penn Treebank, characters, scaled down: six methods in ten minutes on two CPU cores.

The table shows the order of the methods, not the paper's numbers. The text is short, so that a
small LSTM overfits it within a few epochs, as the large one overfits the whole text. The sizes, the
learning rate and the number of epochs were chosen in one pilot on the validation part, with another
seed; rates and weights are those of `char_ptb`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...training.config import Config, RecurrentDropout, Zoneout
from .char_ptb import char_ptb_unregularised
from .registry import recipe

_CHAR_PTB = char_ptb_unregularised()
_QUICK = replace(
    _CHAR_PTB,
    data=replace(_CHAR_PTB.data, limit=150_000),
    batches=replace(_CHAR_PTB.batches, size=16),
    model=replace(_CHAR_PTB.model, hidden=200),
    optimizer=replace(_CHAR_PTB.optimizer, lr=0.004),
    epochs=50,
)


def _quick(**changes: Any) -> Config:
    return replace(_QUICK, **changes)


@recipe("quick", "Unregularised LSTM", where="Table 1, scaled down")
def quick_unregularised() -> Config:
    """No noise."""
    return _quick()


@recipe("quick", "Weight noise 0.075", where="Table 1, scaled down")
def quick_weight_noise() -> Config:
    """Gaussian noise on every weight matrix."""
    return _quick(weight_noise=0.075)


@recipe("quick", "Norm stabiliser 50", where="Table 1, scaled down")
def quick_norm_stabiliser() -> Config:
    """A penalty on changes of the norm of h."""
    return _quick(norm_stabilizer=50.0)


@recipe("quick", "Stochastic depth 0.5, 0.05", where="Table 1, scaled down")
def quick_stochastic_depth() -> Config:
    """Zoneout with one draw per step for all units."""
    return _quick(zoneout=Zoneout(cell=0.5, hidden=0.05, mask="step"))


@recipe("quick", "Recurrent dropout 0.25", where="Table 1, scaled down")
def quick_recurrent_dropout() -> Config:
    """Updates are dropped."""
    return _quick(recurrent_dropout=RecurrentDropout(rate=0.25))


@recipe("quick", "Zoneout 0.5, 0.05", where="Table 1, scaled down")
def quick_zoneout() -> Config:
    """Cells 0.5, states 0.05."""
    return _quick(zoneout=Zoneout(cell=0.5, hidden=0.05))
