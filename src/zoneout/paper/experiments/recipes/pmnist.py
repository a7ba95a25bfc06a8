"""Permuted sequential MNIST, and the gradient flow on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...training.config import (
    Batches,
    Config,
    Data,
    Evaluation,
    Model,
    Optimizer,
    Protocol,
    RecurrentDropout,
    StateDropout,
    Zoneout,
)
from .registry import THREE, recipe

# The authors' "permutation" draws pixels with replacement, so the model sees only 501 of the 784.
# The paper's rows need this order. The authors' LSTM without batch norm has a learned bias inside
# the output's tanh, h = o ⊙ tanh(c + b), which starts at zero; ours has none, except in
# `pmnist_unregularised_output_bias`. The recurrent weights start as one orthogonal matrix, the
# default of the authors' script.
_PMNIST = Config(
    data=Data("mnist", order="paper"),
    batches=Batches(size=100),
    model=Model(
        hidden=100, embedding=0, init="orthogonal", one_bias=True, learn_initial_state=True
    ),
    optimizer=Optimizer("rmsprop", paper=True, lr=0.001, decay=0.5, clip_gradient=1.0),
    evaluation=Evaluation(Protocol(size=1000), Protocol(size=1000)),
    epochs=150,
)
_SHARED = Zoneout(cell=0.15, hidden=0.15, mask="shared")
# Validation uses the statistics of batches as large as in training. For the test they are estimated
# again on the training images, 5,000 at a time, as the authors of recurrent batch norm did.
_NORMALISED: dict[str, Any] = {
    "model": replace(_PMNIST.model, norm="batch", norm_momentum=0.01),
    "evaluation": Evaluation(Protocol(size=100), Protocol(size=1000), statistics_size=5000),
}


def _pmnist(**changes: Any) -> Config:
    return replace(_PMNIST, **changes)


def _permuted(config: Config) -> Config:
    """Return the config with a true permutation, as in the later literature: another task."""
    return replace(config, data=Data("mnist", order="permuted"))


@recipe(
    "pmnist",
    "Unregularised LSTM",
    valid=0.092,
    test=0.102,
    where="Table 2",
    seeds=(1, 2, 3, 4, 5, 6),
)
def pmnist_unregularised() -> Config:
    """No noise."""
    return _pmnist()


@recipe(
    "pmnist",
    "Recurrent dropout 0.5",
    valid=0.083,
    test=0.075,
    where="Table 2",
    seeds=THREE,
    differs=(
        "the authors' script keeps c and h where it drops an update, and the row is the method of "
        "the paper's equation"
    ),
)
def pmnist_recurrent_dropout() -> Config:
    """Rate 0.5, as in the table; the text says 0.15 (`pmnist_recurrent_dropout_015`).

    The authors' published script zones out c and h with the same mask whenever it drops updates.
    In training that is the same as zoneout with a shared mask. This recipe is the method of the
    paper's equation instead.
    """
    return _pmnist(recurrent_dropout=RecurrentDropout(rate=0.5))


@recipe(
    "pmnist", "Zoneout 0.15, shared mask", valid=0.063, test=0.069, where="Table 2", seeds=THREE
)
def pmnist_zoneout() -> Config:
    """One mask for cells and states."""
    return _pmnist(zoneout=_SHARED)


def _as_proposed(config: Config) -> Config:
    """Return the config with the training settings of the authors of recurrent batch norm.

    The recurrent candidate starts from the identity. RMSProp's decay is 0.9, as it was in their
    script when their figure was made; since April 2016 their script has 0.5.
    """
    model = replace(config.model, init="identity")
    return replace(config, model=model, optimizer=replace(config.optimizer, decay=0.9))


@recipe("pmnist", "Recurrent batch norm", test=0.046, where="Table 2", seeds=THREE)
def pmnist_batch_norm() -> Config:
    """Recurrent batch norm with separate statistics for each step, and the settings of its authors.

    The paper quotes its number from the authors of recurrent batch norm. As in their script when
    they made their figure, the recurrent weights of the candidate start at the identity, and
    RMSProp's decay is 0.9; their script has 0.5 since April 2016 (`pmnist_batch_norm_decay_05`,
    with the settings of the other rows). Training takes 150 epochs, as in the other rows; that
    script has 200, which does not explain our higher error (docs/log.md).
    """
    return _as_proposed(_pmnist(**_NORMALISED))


@recipe(
    "pmnist",
    "Recurrent batch norm + zoneout 0.15",
    valid=0.045,
    test=0.041,
    where="Table 2",
    seeds=THREE,
)
def pmnist_batch_norm_zoneout() -> Config:
    """One mask for cells and states. Batch norm is applied to the candidate cell, before zoneout.

    The training settings are those of `pmnist_batch_norm`. On the validation images they are better
    than the settings of the other rows, which are the defaults of the authors' script
    (`pmnist_batch_norm_zoneout_decay_05`).
    """
    return _as_proposed(_pmnist(zoneout=_SHARED, **_NORMALISED))


@recipe("pmnist", "Recurrent batch norm, decay 0.5", beside="pmnist_batch_norm", where="search")
def pmnist_batch_norm_decay_05() -> Config:
    """Batch norm with the settings of the other rows: orthogonal start, decay 0.5, 150 epochs.

    The test uses the statistics of batches of 100, as in training.
    """
    return _pmnist(
        model=_NORMALISED["model"], evaluation=replace(_NORMALISED["evaluation"], statistics_size=0)
    )


@recipe(
    "pmnist",
    "Recurrent batch norm + zoneout 0.15, decay 0.5",
    beside="pmnist_batch_norm_zoneout",
    where="search",
)
def pmnist_batch_norm_zoneout_decay_05() -> Config:
    """Batch norm and zoneout with the settings of the other rows: orthogonal start, decay 0.5."""
    return _pmnist(zoneout=_SHARED, **_NORMALISED)


# Experiments on why the two rows above miss the paper's numbers. Each is shown beside its row.


def _with_statistics(config: Config) -> Config:
    """Return the config with validations by other statistics too."""
    return replace(config, evaluation=replace(config.evaluation, statistics_also=True))


@recipe(
    "pmnist",
    "Recurrent batch norm, other statistics in validation",
    beside="pmnist_batch_norm",
    where="experiment",
)
def pmnist_batch_norm_statistics() -> Config:
    """`pmnist_batch_norm`, validated in each epoch by three kinds of statistics.

    They are those of the batch of 100, the running averages, and those of batches of 5,000. Each
    can be held beside the published curve, of which it is not known which statistics it has.
    """
    return _with_statistics(pmnist_batch_norm())


@recipe(
    "pmnist",
    "Recurrent batch norm, float32",
    beside="pmnist_batch_norm",
    where="experiment",
    precision="fp32",
)
def pmnist_batch_norm_float32() -> Config:
    """`pmnist_batch_norm_statistics` with all products in float32, those of the backward pass too.

    It is validated every two epochs: in float32 that runs step by step, and takes half as long as
    an epoch of training.

    Clipping and RMSProp are in float32 in every precision. They follow the source: the gradient is
    multiplied by min(1, 1 / norm), then divided by max(√mean of squares, 1e-5).
    """
    config = _with_statistics(pmnist_batch_norm())
    return replace(config, evaluation=replace(config.evaluation, every=1000))


@recipe(
    "pmnist",
    "Recurrent batch norm + zoneout 0.15, the authors' defaults",
    beside="pmnist_batch_norm_zoneout",
    where="experiment",
)
def pmnist_batch_norm_zoneout_defaults() -> Config:
    """The defaults of the zoneout authors' own script for this row.

    Learning rate 1e-4, decay 0.5, orthogonal start, 100 epochs.
    """
    optimizer = replace(_PMNIST.optimizer, lr=1e-4)
    return _pmnist(zoneout=_SHARED, optimizer=optimizer, epochs=100, **_NORMALISED)


@recipe(
    "pmnist",
    "Unregularised LSTM, identity start",
    beside="pmnist_unregularised",
    where="experiment",
)
def pmnist_unregularised_identity() -> Config:
    """The candidate's recurrent weights start at the identity, the other option of the script."""
    return _pmnist(model=replace(_PMNIST.model, init="identity"))


@recipe(
    "pmnist",
    "Unregularised LSTM, bias inside the output's tanh",
    beside="pmnist_unregularised",
    where="experiment",
)
def pmnist_unregularised_output_bias() -> Config:
    """h = o ⊙ tanh(c + b) with a learned b that starts at zero, as in the authors' code."""
    return _pmnist(model=replace(_PMNIST.model, output_bias=True))


@recipe("pmnist", "Recurrent dropout 0.15", where="section 4.3")
def pmnist_recurrent_dropout_015() -> Config:
    """Rate 0.15, as in the paper's text; the table says 0.5."""
    return _pmnist(recurrent_dropout=RecurrentDropout(rate=0.15))


@recipe("pmnist-permuted", "Unregularised LSTM", where="Table 2, other order")
def pmnist_permuted_unregularised() -> Config:
    """`pmnist_unregularised` with a true permutation."""
    return _permuted(pmnist_unregularised())


@recipe("pmnist-permuted", "Recurrent dropout 0.5", where="Table 2, other order")
def pmnist_permuted_recurrent_dropout() -> Config:
    """`pmnist_recurrent_dropout` with a true permutation."""
    return _permuted(pmnist_recurrent_dropout())


@recipe("pmnist-permuted", "Zoneout 0.15, shared mask", where="Table 2, other order")
def pmnist_permuted_zoneout() -> Config:
    """`pmnist_zoneout` with a true permutation."""
    return _permuted(pmnist_zoneout())


@recipe("pmnist-permuted", "Recurrent batch norm", where="Table 2, other order")
def pmnist_permuted_batch_norm() -> Config:
    """`pmnist_batch_norm` with a true permutation."""
    return _permuted(pmnist_batch_norm())


@recipe("pmnist-permuted", "Recurrent batch norm + zoneout 0.15", where="Table 2, other order")
def pmnist_permuted_batch_norm_zoneout() -> Config:
    """`pmnist_batch_norm_zoneout` with a true permutation."""
    return _permuted(pmnist_batch_norm_zoneout())


@recipe(
    "pmnist-permuted", "Recurrent batch norm + zoneout 0.15, decay 0.5", where="search, other order"
)
def pmnist_permuted_batch_norm_zoneout_decay_05() -> Config:
    """`pmnist_batch_norm_zoneout_decay_05` with a true permutation."""
    return _permuted(pmnist_batch_norm_zoneout_decay_05())


@recipe("pmnist-permuted", "Recurrent batch norm, decay 0.5", where="search, other order")
def pmnist_permuted_batch_norm_decay_05() -> Config:
    """`pmnist_batch_norm_decay_05` with a true permutation."""
    return _permuted(pmnist_batch_norm_decay_05())


@recipe("pmnist-permuted", "Recurrent dropout 0.15", where="section 4.3, other order")
def pmnist_permuted_recurrent_dropout_015() -> Config:
    """`pmnist_recurrent_dropout_015` with a true permutation."""
    return _permuted(pmnist_recurrent_dropout_015())


# --- gradient flow, after one epoch ---------------------------------------------------------------


@recipe("gradient-flow", "Unregularised LSTM", where="figure of the gradients", seeds=THREE)
def gradient_flow_unregularised() -> Config:
    """No noise."""
    return _pmnist(epochs=1)


@recipe("gradient-flow", "Zoneout, cells 0.5", where="figure of the gradients", seeds=THREE)
def gradient_flow_zoneout() -> Config:
    """Cells only."""
    return _pmnist(zoneout=Zoneout(cell=0.5), epochs=1)


@recipe("gradient-flow", "Dropout, cells 0.5", where="figure of the gradients", seeds=THREE)
def gradient_flow_dropout() -> Config:
    """Cells are set to zero instead of kept; h is computed from the masked cell."""
    return _pmnist(state_dropout=StateDropout(cell=0.5), epochs=1)
