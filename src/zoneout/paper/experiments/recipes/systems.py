"""Penn Treebank, characters: the other systems that the paper names, and models to compare with.

The paper quotes numbers of some of them; for others it says only that they exist. Settings that we
could not read in a paper or in code are marked as ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...training.config import (
    Batches,
    Config,
    Evaluation,
    FastDropout,
    Model,
    Optimizer,
    Protocol,
    RecurrentDropout,
    Schedule,
    Swapout,
    Zoneout,
)
from .char_ptb import char_ptb_unregularised
from .registry import recipe

# What all rows of the paper's character task share. A model with a loop in torch calls is tested on
# 20 streams: one long sequence would take it minutes.
_BASE = replace(char_ptb_unregularised(), epochs=110)
_STREAMS = Evaluation(
    Protocol("streams", length=100, size=100), Protocol("streams", length=100, size=20)
)
_PATIENCE = 10  # epochs without a new best, after which the rows whose source trains on are ended


def _base(model: Model = _BASE.model, **changes: Any) -> Config:
    return replace(_BASE, model=model, **changes)


# --- adaptive


@recipe(
    "char-ptb",
    "Adaptive zoneout, masks drawn",
    beside="char_ptb_zoneout",
    where="systems",
    against="char_ptb_zoneout",
)
def char_ptb_adaptive_zoneout() -> Config:
    """Zoneout whose rates a small LSTM computes at every step; the paper proposes it.

    Training is that of `char_ptb_zoneout`, whose rates are the first ones here. The LSTM has 950
    units, not 1000, so that the model has no more parameters. (With 952 there would be blocks of 2
    instead of 50 in the initial matrices, and so a first loss of 11 nats instead of 4.)
    """
    return _base(
        replace(_BASE.model, cell="adaptive-lstm", hidden=950),
        zoneout=Zoneout(cell=0.5, hidden=0.05),
    )


@recipe(
    "char-ptb",
    "Adaptive zoneout, rates mixed",
    beside="char_ptb_zoneout",
    where="systems",
    against="char_ptb_zoneout",
)
def char_ptb_adaptive_zoneout_rate() -> Config:
    """`char_ptb_adaptive_zoneout` without masks: the rate mixes the old and the new value.

    It starts at smaller rates, since a rate of 0.5 at every step forgets within a few steps.
    """
    return _base(
        replace(_BASE.model, cell="adaptive-lstm", hidden=950),
        zoneout=Zoneout(cell=0.05, hidden=0.05, mask="rate"),
    )


# Sizes, batch, length, learning rate, clipping and dropout (of the input, the output and the
# update) are those of the source, in its section 4.3 and appendix A.3.3. That the state is carried,
# the number of epochs and the patience are ours: by our estimate that takes 25 minutes.
_HYPER = _base(
    Model("hyper-lstm", hidden=1000, embedding=0, dropout=0.1, input_dropout=0.1),
    batches=Batches("streams", size=128, length=100),
    recurrent_dropout=RecurrentDropout(rate=0.1),
    optimizer=Optimizer("adam", lr=0.001, clip_gradient=1.0),
    evaluation=_STREAMS,
    epochs=80,
    patience=_PATIENCE,
)


@recipe(
    "char-ptb",
    "HyperLSTM + layer norm",
    valid=1.281,
    test=1.250,
    where="systems",
    against="char_ptb_layer_norm",
)
def char_ptb_hyper_lstm() -> Config:
    """A small LSTM scales and shifts the gates of a large one at every step.

    1000 and 128 units, 4 numbers a scale, dropout 0.1 of the input, the output and the update.

    A step of its loop is about 140 calls of torch, forward and backward (docs/reproducing.md).
    """
    return _HYPER


@recipe(
    "char-ptb",
    "LSTM + layer norm, recurrent dropout 0.1",
    valid=1.300,
    test=1.267,
    where="systems",
)
def char_ptb_layer_norm() -> Config:
    """The large LSTM of `char_ptb_hyper_lstm` alone, trained in the same way.

    The number is that of the same source, which starts all weights orthogonal. The layer norm is
    that of this library: one for all gates, on each product.
    """
    model = replace(_HYPER.model, cell="lstm", norm="layer", init="orthogonal")
    return replace(_HYPER, model=model)


# --- hierarchical multiscale

# Sizes, batch, length, learning rate, clipping and the division by 50 are those of the source. How
# long a plateau is, the number of epochs and the patience are ours.
_MULTISCALE = _base(
    Model("hm-lstm", hidden=512, layers=3, embedding=128, output=512),
    batches=Batches("streams", size=64, length=100),
    optimizer=Optimizer("adam", lr=0.002, clip_gradient=1.0),
    schedule=Schedule("plateau", after=4, by=50.0),
    evaluation=_STREAMS,
    epochs=100,
    patience=_PATIENCE,
)


@recipe(
    "char-ptb",
    "3-layer HM-LSTM + layer norm",
    test=1.24,
    where="systems",
    against="char_ptb_stacked_layer_norm",
)
def char_ptb_hm_lstm() -> Config:
    """Layers that copy their state until the layer below ends a segment.

    A step of its loop is about 330 calls of torch, forward and backward (docs/reproducing.md).
    """
    return _MULTISCALE


@recipe("char-ptb", "3-layer LSTM + layer norm", test=1.29, where="systems")
def char_ptb_stacked_layer_norm() -> Config:
    """The layers of `char_ptb_hm_lstm` without boundaries, trained in the same way.

    The number is that of the same source, for an LSTM with the same layer before the softmax. It
    does not give the size; that of `char_ptb_hm_lstm` is ours.
    """
    model = replace(_MULTISCALE.model, cell="lstm", norm="layer", init="orthogonal")
    return replace(_MULTISCALE, model=model)


# --- surprisal


@recipe(
    "char-ptb",
    "Surprisal-driven zoneout",
    beside="char_ptb_zoneout",
    where="systems",
    against="char_ptb_zoneout",
)
def char_ptb_surprisal_zoneout() -> Config:
    """The better a symbol was predicted, the fewer units are updated.

    It is compared with `char_ptb_zoneout`, whose width and training it has, but for fewer epochs:
    by our estimate they take 25 minutes. The source has no number for this corpus.

    A step of its loop is about 70 calls of torch, forward and backward (docs/reproducing.md).
    """
    return _base(
        Model("surprisal-lstm", hidden=1000, embedding=0),
        evaluation=replace(_BASE.evaluation, test=_STREAMS.test),
        epochs=40,
    )


# --- periodic

# A batch of 96 steps is a multiple of all periods, so that the clock goes on from batch to batch.
_CLOCKWORK = replace(
    _MULTISCALE,
    model=Model(
        "rnn",
        hidden=1000,
        embedding=128,
        norm="layer",
        init="orthogonal",
        output=512,
        modules=(1, 2, 4, 8, 16),
    ),
    batches=Batches("streams", size=64, length=96),
    epochs=80,
)


@recipe(
    "char-ptb",
    "Clockwork RNN + layer norm",
    test=1.40,
    where="systems",
    against="char_ptb_layer_norm_rnn",
)
def char_ptb_clockwork_rnn() -> Config:
    """Five modules with the periods 1, 2, 4, 8 and 16.

    The number is that of the authors of HM-LSTM, who trained it with the embedding of their model
    and its layer before the softmax, and so does this row; the training is that of
    `char_ptb_hm_lstm`. They do not give the size and the periods, which are ours.

    No fused kernel has both a layer norm and a clock, so that on a GPU a step is about 60 calls of
    torch, forward and backward (docs/reproducing.md).
    """
    return _CLOCKWORK


@recipe("char-ptb", "tanh-RNN + layer norm", where="systems")
def char_ptb_layer_norm_rnn() -> Config:
    """The RNN of `char_ptb_clockwork_rnn` without a clock, trained in the same way."""
    return replace(_CLOCKWORK, model=replace(_CLOCKWORK.model, modules=()))


# Three layers with about as many parameters as the paper's one of 1000 units.
_LAYERS = replace(_BASE.model, hidden=450, layers=3)


@recipe(
    "char-ptb",
    "Hierarchical RNN, periods 1, 2, 4",
    beside="char_ptb_zoneout",
    where="systems",
    against="char_ptb_zoneout_3_layers",
)
def char_ptb_hierarchical_rnn() -> Config:
    """Three LSTM layers; the second is updated at every second step, the third at every fourth.

    The paper names hierarchical RNNs without a size. Training is that of `char_ptb_zoneout`.
    """
    return _base(_LAYERS, zoneout=Zoneout(mask="clock", periods=(1, 2, 4)))


@recipe("char-ptb", "3 layers, zoneout 0.5, 0.05", beside="char_ptb_zoneout", where="systems")
def char_ptb_zoneout_3_layers() -> Config:
    """The layers of `char_ptb_hierarchical_rnn` with zoneout instead of periods."""
    return _base(_LAYERS, zoneout=Zoneout(cell=0.5, hidden=0.05))


@recipe(
    "char-ptb",
    "Zoneout, rates 1 − 1/period",
    beside="char_ptb_zoneout",
    where="systems",
    against="char_ptb_zoneout",
)
def char_ptb_clockwork_rates() -> Config:
    """Rates of 0, 1/2, 3/4 and 7/8 for four groups of units, both of c and of h.

    The paper tried rates inspired by clockwork RNNs and found no gain; it does not say which.
    """
    return _base(zoneout=Zoneout(periods=(1, 2, 4, 8)))


# --- two masks, and Gaussian products


@recipe(
    "char-ptb",
    "Swapout over time",
    beside="char_ptb_zoneout",
    where="systems",
    against="char_ptb_zoneout",
)
def char_ptb_swapout() -> Config:
    """Two masks per state: one adds the old value, the other leaves out the new one.

    The rates are those of zoneout, which is the case in which both masks are the same.
    """
    noise = Swapout(cell_old=0.5, cell_new=0.5, hidden_old=0.05, hidden_new=0.05)
    return _base(swapout=noise)


@recipe(
    "char-ptb",
    "Residual recurrence",
    beside="char_ptb_unregularised",
    where="systems",
    against="char_ptb_zoneout",
    spare=(2,),
)
def char_ptb_residual() -> Config:
    """The old h is added to the new one at every step, which the paper found unstable.

    h grows with every step, so the test is of chunks, as the validation: over the whole text as one
    sequence h, and with it the score, would grow without bound.
    """
    evaluation = replace(_BASE.evaluation, test=_BASE.evaluation.valid)
    return _base(swapout=Swapout(hidden_old=1.0), evaluation=evaluation, epochs=25)


@recipe(
    "char-ptb",
    "Fast dropout 0.25",
    beside="char_ptb_recurrent_dropout",
    where="systems",
    against="char_ptb_zoneout",
)
def char_ptb_fast_dropout() -> Config:
    """The product with h is a Gaussian number; the rate is that of the best recurrent dropout."""
    return _base(fast_dropout=FastDropout(hidden=0.25))
