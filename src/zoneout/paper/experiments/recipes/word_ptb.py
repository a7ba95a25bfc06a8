"""Penn Treebank, words."""

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
    Schedule,
    VariationalDropout,
    Zoneout,
)
from .registry import THREE, recipe

# The authors' scripts for this task were never published in working order. This is the large model
# of the 2014 paper on non-recurrent dropout, which the zoneout paper names. The text of the 2014
# paper says lr 1 for 14 epochs; its code divides the rate for the first time after epoch 15, and
# so does this config. Both of torch's biases are trained, as in that code. The loss is summed over
# the 35 steps.
_WORD_PTB = Config(
    data=Data("word-ptb", by="word"),
    batches=Batches("streams", size=20, length=35),
    model=Model(
        hidden=1500,
        layers=2,
        embedding=1500,
        dropout=0.65,
        init="uniform",
        init_bound=0.04,
        forget_bias=0.0,
    ),
    optimizer=Optimizer("sgd", lr=1.0, clip_gradient=10.0),
    schedule=Schedule("divide", after=15, by=1.15),
    loss="sum",
    # The valid numbers are measured on 20 streams, the test numbers on one.
    evaluation=Evaluation(Protocol("streams", length=100, size=20), Protocol("whole", length=1000)),
    epochs=55,
)


def _word_ptb(**changes: Any) -> Config:
    return replace(_WORD_PTB, **changes)


@recipe("word-ptb", "Unregularised LSTM", valid=120.7, test=114.5, seeds=THREE)
def word_ptb_unregularised() -> Config:
    """The small model of the 2014 paper, which is the model of this row's numbers.

    It has 2 × 200 units and 20 steps; after 5 epochs, lr is halved in every epoch. Its published
    settings are said to give a test perplexity of 115. A reader of the zoneout paper would expect
    the large model without dropout here; that one is `word_ptb_unregularised_large`.
    """
    return _word_ptb(
        batches=Batches("streams", size=20, length=20),
        model=replace(_WORD_PTB.model, hidden=200, embedding=200, dropout=0.0, init_bound=0.1),
        optimizer=Optimizer("sgd", lr=1.0, clip_gradient=5.0),
        schedule=Schedule("divide", after=5, by=2.0),
        epochs=13,
    )


@recipe(
    "word-ptb",
    "Recurrent dropout 0.25",
    valid=91.6,
    test=87.0,
    seeds=THREE,
    differs=(
        "the paper gives neither the rate nor whether there was dropout between the layers, as in "
        "this row"
    ),
)
def word_ptb_recurrent_dropout() -> Config:
    """Recurrent dropout in addition to dropout on non-recurrent connections, like the zoneout row.

    The rate was not published. `word_ptb_recurrent_dropout_010` and `_050` search other rates;
    `_only` has no dropout on non-recurrent connections.
    """
    return _word_ptb(recurrent_dropout=RecurrentDropout(rate=0.25))


@recipe("word-ptb", "Zoneout 0.25, 0.025", valid=81.4, test=77.4, seeds=THREE)
def word_ptb_zoneout() -> Config:
    """Zoneout in addition to dropout on non-recurrent connections.

    Zoneout alone was not competitive: see `word_ptb_zoneout_only`.
    """
    return _word_ptb(zoneout=Zoneout(cell=0.25, hidden=0.025))


@recipe("word-ptb", "NR-dropout 0.65", valid=82.2, test=78.4, seeds=THREE)
def word_ptb_nr_dropout() -> Config:
    """Dropout on the embedding, between the layers and before the softmax.

    The zoneout row adds zoneout to this model.
    """
    return _word_ptb()


@recipe(
    "word-ptb",
    "NR-dropout 0.65, final weights",
    beside="word_ptb_nr_dropout",
    where="code",
    seeds=THREE,
)
def word_ptb_nr_dropout_last() -> Config:
    """`word_ptb_nr_dropout`, judged by its final weights, as its source judges."""
    return _word_ptb(evaluation=replace(_WORD_PTB.evaluation, keep="last"))


@recipe(
    "word-ptb",
    "NR-dropout 0.65, in TF32",
    beside="word_ptb_nr_dropout",
    where="precision",
    precision="tf32",
)
def word_ptb_nr_dropout_tf32() -> Config:
    """`word_ptb_nr_dropout` with products in TF32, which asks whether bf16 is why it misses."""
    return _word_ptb()


_VARIATIONAL = _word_ptb(
    model=replace(_WORD_PTB.model, dropout=0.0),
    variational_dropout=VariationalDropout(input=0.5, hidden=0.3),
    optimizer=replace(_WORD_PTB.optimizer, weight_decay=1e-7),
    schedule=Schedule("divide", after=11, by=1.15),
)


@recipe(
    "word-ptb",
    "Variational dropout 0.5, 0.3",
    test=73.4,
    held=False,
    seeds=(2, 3, 4),
    left_out="seed 1, which learned nothing: a perplexity of 711 after 10 epochs",
)
def word_ptb_variational() -> Config:
    """Variational dropout: one mask for each piece of 35 steps.

    The rates are 0.5 on each layer's input, 0.3 on h, 0.5 on the softmax's input and 0.3 on words.

    The row is shown with the paper's number but not held to it. That number is of a model with a
    separate mask for every gate (`word_ptb_variational_untied`), averaged over many samples at test
    time. Its source says 75.2 for the same model with the expectation.

    The rates, lr 1 for 11 epochs and the weight decay are those of the source; here the decay is
    multiplied by the learning rate. The source discarded unstable runs. Our run with seed 1 learned
    nothing (docs/log.md), so its seeds begin with 2.
    """
    return replace(
        _VARIATIONAL,
        variational_dropout=VariationalDropout(input=0.5, hidden=0.3, output=0.5, words=0.3),
    )


@recipe(
    "word-ptb",
    "Variational dropout 0.5, 0.3, a mask for each gate",
    beside="word_ptb_variational",
    where="code",
    seeds=(2,),
    samples=100,
)
def word_ptb_variational_untied() -> Config:
    """`word_ptb_variational` with a mask for every gate, as its source has it.

    The row has the expectation, for which the source says 75.2. The paper's 73.4 is averaged over
    2,000 passes. The record has a score of 100, as `zoneout eval RUN --samples 100` has it. The
    73.4 is also a mean over three runs, without the unstable ones.
    """
    config = word_ptb_variational()
    dropout = replace(config.variational_dropout, tied=False)
    # 100 passes read pieces of 50 steps instead of 10: fewer calls, the same numbers.
    test = replace(config.evaluation.test, length=5000)
    return replace(
        config, variational_dropout=dropout, evaluation=replace(config.evaluation, test=test)
    )


@recipe("word-ptb", "Variational dropout 0.5, 0.3, inside the layers alone", where="ablation")
def word_ptb_variational_layers() -> Config:
    """The variational row without the masks on words and on the softmax's input."""
    return _VARIATIONAL


@recipe("word-ptb", "Unregularised, large", where="section 4.1")
def word_ptb_unregularised_large() -> Config:
    """The large model without any dropout. Its best validation comes within a few epochs."""
    return _word_ptb(model=replace(_WORD_PTB.model, dropout=0.0), epochs=20)


@recipe("word-ptb", "Zoneout alone 0.25, 0.025", where="section 4.1")
def word_ptb_zoneout_only() -> Config:
    """Zoneout as the only regularisation, which the paper found not enough for the large model."""
    return _word_ptb(
        model=replace(_WORD_PTB.model, dropout=0.0),
        zoneout=Zoneout(cell=0.25, hidden=0.025),
        epochs=30,
    )


@recipe("word-ptb", "Recurrent dropout 0.1", beside="word_ptb_recurrent_dropout", where="search")
def word_ptb_recurrent_dropout_010() -> Config:
    """Another rate of the recurrent dropout row."""
    return _word_ptb(recurrent_dropout=RecurrentDropout(rate=0.1))


@recipe("word-ptb", "Recurrent dropout 0.5", beside="word_ptb_recurrent_dropout", where="search")
def word_ptb_recurrent_dropout_050() -> Config:
    """Another rate of the recurrent dropout row."""
    return _word_ptb(recurrent_dropout=RecurrentDropout(rate=0.5))


@recipe(
    "word-ptb", "Recurrent dropout alone 0.25", beside="word_ptb_recurrent_dropout", where="search"
)
def word_ptb_recurrent_dropout_only() -> Config:
    """Recurrent dropout as the only regularisation of the large model."""
    return _word_ptb(
        model=replace(_WORD_PTB.model, dropout=0.0),
        recurrent_dropout=RecurrentDropout(rate=0.25),
        epochs=30,
    )


@recipe(
    "word-ptb", "Recurrent dropout alone 0.1", beside="word_ptb_recurrent_dropout", where="search"
)
def word_ptb_recurrent_dropout_only_010() -> Config:
    """Another rate of `word_ptb_recurrent_dropout_only`."""
    config = word_ptb_recurrent_dropout_only()
    return replace(config, recurrent_dropout=RecurrentDropout(rate=0.1))


@recipe(
    "word-ptb", "Recurrent dropout alone 0.5", beside="word_ptb_recurrent_dropout", where="search"
)
def word_ptb_recurrent_dropout_only_050() -> Config:
    """Another rate of `word_ptb_recurrent_dropout_only`."""
    config = word_ptb_recurrent_dropout_only()
    return replace(config, recurrent_dropout=RecurrentDropout(rate=0.5))
