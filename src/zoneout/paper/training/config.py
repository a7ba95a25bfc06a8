"""The configuration of a run: frozen dataclasses.

The command line, `config.json` and the training loop all use these classes. The docstring of a
field is its help text on the command line, with the same line breaks. A rate is always the
probability that the previous value (or zero) is used instead of the new value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ..console import CONTROL, shown

Mask: TypeAlias = Literal["unit", "shared", "step", "sequence", "static"]
Kept: TypeAlias = Literal["unit", "shared", "step", "sequence", "static", "rate", "clock"]
Rate: TypeAlias = float | tuple[float, ...]  # several numbers: one for each layer
Cell: TypeAlias = Literal[
    "lstm", "gru", "rnn", "rnn-relu", "adaptive-lstm", "hyper-lstm", "hm-lstm", "surprisal-lstm"
]
AtEval: TypeAlias = Literal["expectation", "off", "sample"]

IMAGES = ("mnist",)  # corpora for classification; all others are texts for prediction
# Maximum number of layers of a model. Higher planes of the random generator are reserved for the
# draws outside the layers (see `models`).
LAYERS = 2**14
MOST = 2**31 - 1  # maximum of any field that is the size of a tensor


@dataclass(frozen=True)
class Data:
    """The data, and how they are prepared."""

    name: str = "python"
    """A corpus (`zoneout data list` shows the names) or the path of a text file."""
    by: Literal["char", "word"] = "char"
    """Read the text as characters or as words.
    char-ptb is always read as characters, word-ptb always as words.
    """
    preparation: Literal["paper", "stripped"] = "paper"
    """Only for char-ptb. paper: one space at each line break, as in the paper's files.
    stripped: without the spaces at the start and end of lines.
    """
    order: Literal["paper", "permuted", "rows"] = "paper"
    """Only for mnist, the order of the pixels.
    paper: the paper's random draw, which repeats some pixels and omits others.
    permuted: a random permutation. rows: row by row.
    """
    valid: str | None = None
    """A text file for validation, if --data.name is a text file.
    By default the validation part is split off the end of the text.
    """
    test: str | None = None
    """A text file for the test, if --data.name is a text file.
    By default the test part is split off the end of the text.
    """
    limit: int | None = None
    """Use only about this many symbols: the first of the text.
    If the parts are separate files, the first of each part in proportion.
    For mnist: the number of images in each part.
    """
    words: int | None = None
    """Size of the vocabulary, if the text is read as words.
    Only the most frequent words are kept; all others become <unk>.
    """

    def __post_init__(self) -> None:
        _check(
            "data.name",
            self.name,
            self.name != "",
            "the name of a corpus or the path of a text file",
        )
        for name in ("name", "valid", "test"):
            _check_text(f"data.{name}", getattr(self, name))
        for name in ("limit", "words"):
            value = getattr(self, name)
            _check(f"data.{name}", value, value is None or value > 0, "a number above 0, or none")


@dataclass(frozen=True)
class Batches:
    """How training batches are cut from a text; mnist uses only the size."""

    kind: Literal["chunks", "streams"] = "chunks"
    """chunks: shuffled chunks of the text, each from the initial state.
    streams: parallel streams, with the state carried from batch to batch.
    """
    size: int = 32
    """Chunks, streams or images in a batch, summed over all processes."""
    length: int = 100
    """chunks: symbols in a chunk; all but the first are predicted.
    streams: steps in a batch.
    """
    offset: bool = True
    """chunks: start the first chunk at another random offset in every epoch."""
    halved: float = 0.0
    """streams: the chance that a batch has half the length."""
    spread: float = 0.0
    """streams: standard deviation of the length of a batch, in steps.
    Lengths are normal numbers, at most three deviations from the mean and at least 5. With this or
    --batches.halved, the learning rate of a batch is proportional to its length.
    """

    def __post_init__(self) -> None:
        _check_size("batches.size", self.size)
        least = 2 if self.kind == "chunks" else 1
        _check(
            "batches.length", self.length, self.length >= least, f"at least {least} for {self.kind}"
        )
        _check_size("batches.length", self.length)
        _check_rates("batches", self, "halved")
        good = 0 <= self.spread < math.inf
        _check("batches.spread", self.spread, good, "a finite number, 0 or more")

    @property
    def varied(self) -> bool:
        """Whether the batches of streams have different lengths."""
        return self.kind == "streams" and (self.halved > 0 or self.spread > 0)


@dataclass(frozen=True)
class Model:
    """The network: input, recurrent layers, softmax."""

    cell: Cell = "lstm"
    """The recurrent cell, or one of the systems of `zoneout.systems` (see --system)."""
    hidden: int = 256
    """Number of units in a layer."""
    layers: int = 1
    """Number of recurrent layers."""
    embedding: int = 128
    """Size of the embedding of symbols; 0: the input is one-hot, without an embedding."""
    dropout: float = 0.0
    """Rate of non-recurrent dropout: on the embedding, between layers and before the softmax."""
    input_dropout: float | None = None
    """Rate of dropout on the input of the first layer, also if that is one-hot.
    By default --model.dropout for an embedding, and 0 for one-hot input.
    """
    output: int = 0
    """Size of a layer before the softmax, which sees the outputs of all recurrent layers:
    ReLU of a sum of them, each with a matrix and a gate. 0: none, and the softmax sees the last
    layer; with hm-lstm, which always has it, as large as a layer.
    """
    tied: bool = False
    """Use the embedding matrix also as the weight matrix of the softmax."""
    norm: Literal["none", "layer", "batch"] = "none"
    """Normalisation inside the recurrent step."""
    norm_momentum: float = 0.01
    """Weight of a new batch in the running averages of batch norm."""
    init: Literal["torch", "block-orthogonal", "orthogonal", "identity", "uniform"] = "torch"
    """Initial weights.
    torch: as torch.nn initialises them. orthogonal: each weight matrix is orthogonal.
    block-orthogonal: each matrix is made of orthogonal squares.
    identity: orthogonal, but the recurrent matrix of the candidate is the identity matrix.
    The candidate is g in an LSTM, n in a GRU; a plain RNN has only this matrix.
    """
    init_bound: float = 0.04
    """init=uniform: weights and biases are drawn from U(-bound, bound)."""
    forget_bias: float = 1.0
    """Number added to the initial biases of the forget gates (LSTM only)."""
    one_bias: bool = False
    """Use one bias for each gate: torch's second bias (bias_hh) stays at zero."""
    learn_initial_state: bool = False
    """Learn the initial state of a sequence."""
    output_bias: bool = False
    """Learn a bias inside the tanh of the output: h = o ⊙ tanh(c + b) (LSTM only)."""
    sizes: tuple[int, ...] = ()
    """Number of units of each layer, if they differ; then --model.hidden and --model.layers are
    not used.
    """
    embedding_bound: float = 0.0
    """Draw the initial embedding from U(-bound, bound), and set the bias of the softmax to 0.
    0: both as --model.init has them.
    """
    modules: tuple[int, ...] = ()
    """Periods of the modules of a clockwork RNN, such as 1 2 4 8.
    The units are divided into as many modules; a unit is updated at multiples of its period, and
    sees units that are as slow or slower.
    """

    @property
    def units(self) -> tuple[int, ...]:
        """The number of units of each layer."""
        return self.sizes or (self.hidden,) * self.layers

    @property
    def system(self) -> bool:
        """Whether the cell is one of `zoneout.systems` and no layer of its own."""
        return self.cell in SYSTEMS

    @property
    def loops(self) -> bool:
        """Whether the cell is a system that loops over its steps in torch calls."""
        return self.system and self.cell != "adaptive-lstm"

    def __post_init__(self) -> None:
        _check_size("model.hidden", self.hidden)
        _check_size("model.layers", self.layers, LAYERS)
        for size in self.sizes:
            _check_size("model.sizes", size)
        _check("model.sizes", self.sizes, len(self.sizes) <= LAYERS, f"at most {LAYERS:,} layers")
        good = 0 <= self.embedding_bound < math.inf
        _check("model.embedding_bound", self.embedding_bound, good, "a finite number, 0 or more")
        for period in self.modules:
            _check("model.modules", period, period >= 1, "periods of at least 1")
        _check(
            "model.embedding", self.embedding, self.embedding >= 0, "a size, or 0 for one-hot input"
        )
        _check_size("model.embedding", max(self.embedding, 1))
        _check_rates("model", self, "dropout", "norm_momentum")
        if self.input_dropout is not None:
            _check_rates("model", self, "input_dropout")
        _check("model.output", self.output, self.output >= 0, "a size, or 0")
        _check_size("model.output", max(self.output, 1))
        _check(
            "model.init_bound",
            self.init_bound,
            0 < self.init_bound < math.inf,
            "a finite number above 0",
        )
        _check(
            "model.forget_bias",
            self.forget_bias,
            math.isfinite(self.forget_bias),
            "a finite number",
        )
        last = self.output or self.units[-1]
        if self.tied and self.embedding != last:
            _refuse(
                f"model.tied: expected an embedding of the size of the softmax's input ({last}), "
                f"since both share one matrix, got embedding {self.embedding}; try "
                f"--model.embedding {last}"
            )
        one = {"adaptive-lstm", "hyper-lstm", "surprisal-lstm"}
        if self.cell in one and len(self.units) > 1:
            _refuse(f"model.layers: expected 1 with {self.cell}, got {len(self.units)}")
        if self.cell == "surprisal-lstm":
            for name in ("embedding", "dropout", "input_dropout", "output"):
                if value := getattr(self, name):
                    _refuse(
                        f"model.{name}: expected 0 with surprisal-lstm, whose softmax is inside "
                        f"the step, got {value}; try --model.{name.replace('_', '-')} 0"
                    )
        if self.loops and self.init == "identity":
            _refuse(
                f"model.init: expected another with {self.cell}, whose recurrent matrices have "
                "their own initial values, got identity; try --model.init torch"
            )
        if self.cell == "hm-lstm" and (self.sizes or self.layers < 2):
            _refuse(
                "model.layers: expected at least 2 with hm-lstm, of one size, got "
                f"{self.sizes or self.layers}"
            )
        if self.system:
            _check("model.norm", self.norm, self.norm == "none", f"none with {self.cell}")
            _check("model.modules", self.modules, not self.modules, f"none with {self.cell}")
            learns = self.cell == "adaptive-lstm" or not self.learn_initial_state
            _check("model.learn_initial_state", True, learns, f"false with {self.cell}")


SYSTEMS = ("adaptive-lstm", "hyper-lstm", "hm-lstm", "surprisal-lstm")


@dataclass(frozen=True, kw_only=True)
class System:
    """Options of the cells adaptive-lstm, hyper-lstm, hm-lstm and surprisal-lstm.

    The rates that adaptive-lstm starts with are those of --zoneout. The dropout of the update in a
    hyper-lstm is --recurrent-dropout.rate, with inverted scaling.
    """

    hyper: int = 128
    """adaptive-lstm, hyper-lstm: number of units of the small LSTM."""
    scales: int = 4
    """hyper-lstm: how many numbers each scale or shift is computed from."""
    least: float = 0.2
    """surprisal-lstm: the smallest probability of an update."""
    compile: bool = False
    """hyper-lstm, hm-lstm, surprisal-lstm: compile what a step has between its matrix products
    with torch.compile.
    """

    def __post_init__(self) -> None:
        _check_size("system.hyper", self.hyper)
        _check_size("system.scales", self.scales)
        _check_rates("system", self, "least")


@dataclass(frozen=True, kw_only=True)
class Zoneout:
    """Zoneout: units of the state keep their previous value. A rate is the probability of this."""

    cell: Rate = 0.0
    """Rate for the cell state (LSTM only); several numbers: one for each layer."""
    hidden: Rate = 0.0
    """Rate for the hidden state; several numbers: one for each layer."""
    mask: Kept = "unit"
    """Where one random draw applies.
    unit: to one unit, in one step of one sequence (the paper's zoneout).
    shared: to a unit of both the cell and the hidden state.
    step: to all units of a state (stochastic depth through time).
    sequence: to all steps of a sequence.
    static: to all sequences of the whole run.
    rate: nothing is drawn, the rate mixes the old and the new value.
    clock: nothing is drawn, a layer is updated at the multiples of its period (--zoneout.periods).
    """
    depth: Rate = 0.0
    """Rate for the output of a layer after the first, which is then that of the layer below."""
    periods: tuple[int, ...] = ()
    """mask=clock: the period of each layer (a hierarchical RNN).
    Other masks, in place of rates: the units are divided into as many groups, and the rate of a
    group is 1 − 1/period for all states (rates inspired by clockwork RNNs).
    """

    def __post_init__(self) -> None:
        _check_rates("zoneout", self, "cell", "hidden", "depth")
        for period in self.periods:
            _check("zoneout.periods", period, period >= 1, "periods of at least 1")
        if self.mask == "clock" and not self.periods:
            _refuse("zoneout.periods: expected one for each layer with mask clock, got none")
        if self.periods and any_rate(self.cell, self.hidden, self.depth):
            _refuse("zoneout.periods: expected them in place of rates, got both")


@dataclass(frozen=True, kw_only=True)
class Swapout:
    """Swapout: a state is the old value, the new one, both or neither, at random.

    Rates of 0 for the old value leave it out; those for the new one keep it.
    """

    hidden_old: float = 0.0
    """Probability that the old hidden state is added."""
    hidden_new: float = 0.0
    """Probability that the new hidden state is left out."""
    cell_old: float = 0.0
    """Probability that the old cell state is added (LSTM only)."""
    cell_new: float = 0.0
    """Probability that the new cell state is left out (LSTM only)."""
    depth_old: float = 0.0
    """Probability that the output of the layer below is added, in layers after the first."""
    depth_new: float = 0.0
    """Probability that the output of the layer itself is left out, in layers after the first."""
    mask: Mask = "unit"
    """Where one random draw applies; see --zoneout.mask."""

    def __post_init__(self) -> None:
        _check_rates("swapout", self, *(name for name in vars(self) if name != "mask"))


@dataclass(frozen=True, kw_only=True)
class FastDropout:
    """Fast dropout: matrix products are Gaussian numbers, as sums with dropped terms nearly are."""

    input: float = 0.0
    """Rate for the product with the input of each layer."""
    hidden: float = 0.0
    """Rate for the product with the hidden state."""

    def __post_init__(self) -> None:
        _check_rates("fast_dropout", self, "input", "hidden")


@dataclass(frozen=True, kw_only=True)
class RecurrentDropout:
    """Recurrent dropout: with probability `rate`, the update of a unit's state is set to zero."""

    rate: float = 0.0
    """Rate for the update (LSTM and GRU only)."""
    mask: Literal["unit", "step", "sequence", "static"] = "unit"
    """Where one random draw applies; see --zoneout.mask."""
    hold_output_gate: bool = False
    """If the update of a unit is dropped, also keep its previous output gate (LSTM only)."""

    def __post_init__(self) -> None:
        _check_rates("recurrent_dropout", self, "rate")


@dataclass(frozen=True, kw_only=True)
class StateDropout:
    """State dropout: units of the state are set to zero. A rate is the probability of this.

    With a cell rate and mask=sequence, the method is rnnDrop.
    """

    cell: float = 0.0
    """Rate for the cell state (LSTM only)."""
    hidden: float = 0.0
    """Rate for the hidden state."""
    mask: Mask = "unit"
    """Where one random draw applies; see --zoneout.mask."""

    def __post_init__(self) -> None:
        _check_rates("state_dropout", self, "cell", "hidden")


@dataclass(frozen=True, kw_only=True)
class VariationalDropout:
    """Variational dropout: one mask for all steps of a sequence.

    The masks apply to a layer's input and to the hidden state before the gates.
    """

    input: Rate = 0.0
    """Rate for the input of each layer; several numbers: one for each layer."""
    hidden: Rate = 0.0
    """Rate for the hidden state before the gates; several numbers: one for each layer."""
    output: float = 0.0
    """Rate for the input of the softmax."""
    words: float = 0.0
    """Rate for whole symbols: a dropped symbol has a zero embedding everywhere in its sequence."""
    tied: bool = True
    """One mask for all gates, instead of one for each gate, on the layer's input and on h."""

    def __post_init__(self) -> None:
        _check_rates("variational_dropout", self, "input", "hidden", "output", "words")


@dataclass(frozen=True)
class Optimizer:
    """The optimizer."""

    rule: Literal["adam", "sgd", "rmsprop"] = "adam"
    """The update rule."""
    paper: bool = False
    """Use the rule as in the paper's code.
    Adam adds eps to √v without bias correction. RMSProp divides by max(rms, eps).
    """
    lr: float = 0.003
    """The learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """adam: decay rates of the running averages of the gradient and of its square."""
    eps: float | None = None
    """adam, rmsprop: term in the denominator against division by zero.
    By default 1e-8, or 1e-5 for rmsprop with --optimizer.paper.
    """
    decay: float = 0.9
    """rmsprop: decay rate of the running average of the squared gradient; 0.5 in the paper."""
    momentum: float = 0.0
    """sgd, rmsprop: the momentum."""
    weight_decay: float = 0.0
    """Decoupled weight decay, as in AdamW.
    Each update shrinks the weight matrices by this number times the learning rate.
    """
    l2: float = 0.0
    """L2 penalty, as torch's Adam and SGD call weight decay.
    After clipping, this number times each parameter is added to its gradient.
    """
    clip_gradient: float = 1.0
    """Clip the gradient to this global norm; 0: no clipping."""
    clip_update: float = 0.0
    """Clip the update, which includes the learning rate, to this global norm; 0: no clipping."""
    average_after: int = 0
    """Average the weights of all updates once a validation is worse than the best of those before
    it, without counting the latest of them, which are this many.
    Validation and test then use the averages. 0: never.
    """

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "l2", "clip_gradient", "clip_update"):
            value = getattr(self, name)
            _check(f"optimizer.{name}", value, 0 <= value < math.inf, "a finite number, 0 or more")
        good = self.average_after >= 0
        _check("optimizer.average_after", self.average_after, good, "a number of validations, or 0")
        for name, value in (
            ("betas", self.betas[0]),
            ("betas", self.betas[1]),
            ("decay", self.decay),
        ):
            _check(f"optimizer.{name}", value, 0 <= value < 1, "a number from 0 to below 1")
        _check(
            "optimizer.momentum",
            self.momentum,
            0 <= self.momentum < 1,
            "a number from 0 to below 1",
        )
        _check(
            "optimizer.eps",
            self.eps,
            self.eps is None or 0 < self.eps < math.inf,
            "a number above 0",
        )
        if self.momentum and self.rule == "adam":
            _refuse(
                "optimizer.momentum: expected 0 with rule adam; its momentum is the first of the "
                "betas"
            )


@dataclass(frozen=True)
class Schedule:
    """The schedule of the learning rate."""

    kind: Literal["constant", "divide", "cosine", "plateau", "milestones"] = "constant"
    """constant: the same rate in all epochs.
    divide: the full rate for some epochs, then divided again before every epoch.
    cosine: a cosine curve from the full rate to zero at the end of the run.
    plateau: divided whenever some validations in a row had no new best.
    milestones: divided again at each of some epochs (--schedule.at).
    """
    after: int = 14
    """divide: number of epochs at the full rate.
    plateau: number of validations in a row without a new best.
    """
    by: float = 1.15
    """divide, plateau, milestones: the divisor of the rate."""
    at: tuple[int, ...] = ()
    """milestones: the numbers of epochs after which the rate is divided."""

    def __post_init__(self) -> None:
        _check("schedule.after", self.after, self.after >= 0, "a number of epochs, 0 or more")
        _check("schedule.by", self.by, 0 < self.by < math.inf, "a finite number above 0")
        if self.kind == "plateau":
            _check("schedule.after", self.after, self.after >= 1, "at least 1 with plateau")
        if self.kind == "milestones" and not self.at:
            _refuse("schedule.at: expected the numbers of some epochs with milestones, got none")
        for epoch in self.at:
            _check("schedule.at", epoch, epoch >= 1, "numbers of epochs, 1 or more")


@dataclass(frozen=True)
class Protocol:
    """How a text is cut for evaluation; mnist uses only `size`."""

    kind: Literal["chunks", "streams", "whole"] = "chunks"
    """chunks: chunks of the text, each from the initial state.
    streams: parallel streams, with the state carried from batch to batch.
    whole: the whole text as one sequence.
    """
    length: int = 100
    """chunks: symbols in a chunk.
    streams, whole: steps per forward pass; affects only the memory use.
    """
    size: int = 100
    """streams: number of streams. chunks: chunks in a batch. mnist: images in a batch.
    A batch size affects only the memory use and, in validations, the batch norm statistics.
    """

    def __post_init__(self) -> None:
        least = 2 if self.kind == "chunks" else 1
        _check("length", self.length, self.length >= least, f"at least {least} for {self.kind}")
        _check_size("length", self.length)
        _check_size("size", self.size)


@dataclass(frozen=True)
class Evaluation:
    """When and how a run is evaluated."""

    valid: Protocol = field(default_factory=Protocol)
    """Evaluation on the validation part, during training."""
    test: Protocol = field(default_factory=lambda: Protocol("whole", length=1000))
    """Evaluation on the test part, after training, with the best weights."""
    every: int = 0
    """Number of updates between validations; 0: one validation after every epoch."""
    at_eval: AtEval = "expectation"
    """The noise inside the recurrent layers during evaluation. Other dropout is then off.
    expectation: each mask is replaced by its expected value.
    off: no noise. sample: masks are drawn, as in training.
    """
    temperature: bool = False
    """After training, choose a temperature of the softmax on the validation part, for the test."""
    statistics: int = 0
    """Only with batch norm: after training, estimate its statistics again for the test,
    on this many training batches; 0: on all batches of one epoch.
    """
    statistics_size: int = 0
    """Number of examples in each of these batches; 0: as many as in training.
    Not for streams, whose batches depend on each other.
    """
    statistics_also: bool = False
    """Only with batch norm: in each validation, also record the score with running averages,
    and with the statistics of batches of 5,000 examples.
    """
    keep: Literal["best", "last"] = "best"
    """The weights to keep and to test: of the best validation, or of the last one."""
    skip_test: bool = False
    """Do not evaluate the test part: for runs that choose settings on the validation part."""

    def __post_init__(self) -> None:
        _check("evaluation.every", self.every, self.every >= 0, "a number of updates, or 0")
        _check(
            "evaluation.statistics",
            self.statistics,
            self.statistics >= 0,
            "a number of batches, or 0",
        )
        size = self.statistics_size
        _check(
            "evaluation.statistics_size",
            size,
            size == 0 or size >= 2,
            "a number of examples above 1, or 0",
        )


@dataclass(frozen=True)
class Config:
    """All settings that determine what a run computes.

    >>> config = Config(zoneout=Zoneout(cell=0.5, hidden=0.05))
    >>> from_json(to_json(config)) == config
    True
    >>> change(config, {"model.hidden": 1000, "zoneout.cell": 0.25}).model.hidden
    1000
    """

    data: Data = field(default_factory=Data)
    batches: Batches = field(default_factory=Batches)
    model: Model = field(default_factory=Model)
    system: System = field(default_factory=System)
    zoneout: Zoneout = field(default_factory=Zoneout)
    recurrent_dropout: RecurrentDropout = field(default_factory=RecurrentDropout)
    state_dropout: StateDropout = field(default_factory=StateDropout)
    variational_dropout: VariationalDropout = field(default_factory=VariationalDropout)
    swapout: Swapout = field(default_factory=Swapout)
    fast_dropout: FastDropout = field(default_factory=FastDropout)
    weight_noise: float = 0.0
    """Standard deviation of Gaussian noise on the weight matrices, drawn for each batch."""
    weight_drop: Rate = 0.0
    """Rate of dropout on the entries of the recurrent matrices, drawn for each batch.
    Several numbers: one for each layer.
    """
    norm_stabilizer: float = 0.0
    """Factor β of the norm stabilizer: a penalty on changes of the norm of the hidden state."""
    activation_penalty: float = 0.0
    """Factor of a penalty on the squares of the last layer's outputs, after dropout."""
    change_penalty: float = 0.0
    """Factor of a penalty on the squares of their changes from step to step, before dropout."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    evaluation: Evaluation = field(default_factory=Evaluation)
    loss: Literal["mean", "sum"] = "mean"
    """Mean or sum of the loss over time steps. Over the batch it is always the mean."""
    epochs: int = 20
    """Maximum number of passes over the training part."""
    updates: int = 0
    """Maximum number of updates, even in the middle of an epoch; 0: only --epochs is the limit."""
    patience: int = 0
    """Stop after this many validations in a row without a new best; 0: never."""
    seed: int = 1
    """Seed of everything random: initial weights, order of the data, and masks."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Precision of the matrix products in training. Evaluation uses fp32;
    on a GPU, after training in a lower precision, it uses tf32.
    """
    device: str = "auto"
    """auto (a GPU if there is one, otherwise the CPU), cpu, cuda or cuda:N."""
    backend: str | None = None
    """Backend of the recurrent layers: reference, cpu or cuda; by default chosen by the device."""
    log_every: int = 100
    """Number of updates between lines of training loss."""
    save_every: int = 0
    """Number of updates between checkpoints; 0: no fixed number.
    In any case there is a checkpoint every 5 minutes, at Ctrl-C and at the end.
    """

    def __post_init__(self) -> None:
        for name in ("weight_noise", "norm_stabilizer", "activation_penalty", "change_penalty"):
            _check(
                name,
                getattr(self, name),
                0 <= getattr(self, name) < math.inf,
                "a finite number, 0 or more",
            )
        for rate in several(self.weight_drop):
            _check("weight_drop", rate, 0 <= rate < 1, "a rate from 0 to below 1")
        self._check_layers()
        for name in ("updates", "patience", "save_every"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        for name in ("epochs", "log_every"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "a number above 0")
        for name in ("device", "backend"):
            _check_text(name, getattr(self, name))
        _check("seed", self.seed, -(2**63) <= self.seed < 2**64, "an integer of at most 64 bits")
        if self.model.norm == "batch":
            _check(
                "batches.size",
                self.batches.size,
                self.batches.size >= 2,
                "at least 2 with batch norm",
            )
        embedding = self.model.embedding if self.task == "language" else 0
        for name, uses in (
            ("variational_dropout.words", self.variational_dropout.words),
            ("model.tied", self.model.tied),
        ):
            if uses and not embedding:
                _refuse(
                    f"{name}: expected none without an embedding of symbols (--model.embedding)"
                )

    def _check_layers(self) -> None:
        """Raise if there are rates for another number of layers, or a noise that has no place."""
        layers = len(self.model.units)
        zoneout, variational = self.zoneout, self.variational_dropout
        for name, rate in {
            "zoneout.cell": zoneout.cell,
            "zoneout.hidden": zoneout.hidden,
            "zoneout.depth": zoneout.depth,
            "zoneout.periods": zoneout.periods if zoneout.mask == "clock" else 1,
            "variational_dropout.input": variational.input,
            "variational_dropout.hidden": variational.hidden,
            "weight_drop": self.weight_drop,
        }.items():
            if isinstance(rate, tuple) and len(rate) != layers:
                several = f" or {layers}, one for each layer" if layers > 1 else ""
                _refuse(f"{name}: expected one number{several}, got {len(rate) or 'none'}")
        depth = any_rate(zoneout.depth, self.swapout.depth_old, self.swapout.depth_new)
        if depth and len(set(self.model.units)) > 1:
            _refuse(
                "model.sizes: expected layers of one size with noise over depth, where the output "
                f"of one takes the place of another's, got {list(self.model.units)}"
            )
        cell, output = self.model.cell, self.model.output
        if depth and output:
            _refuse(f"model.output: expected 0 with noise over depth, got {output}")
        if output and (self.task == "images" or self.weight_noise):
            other = "for images" if self.task == "images" else "with noise on weights"
            _refuse(f"model.output: expected 0 {other}, got {output}")
        if self.model.system and self.task == "images":
            _refuse(f"model.cell: expected lstm, gru, rnn or rnn-relu, got {cell}")
        if cell == "adaptive-lstm":
            for name in ("cell", "hidden"):
                rate = getattr(zoneout, name)
                good = isinstance(rate, float) and 0 < rate < 1
                _check(f"zoneout.{name}", rate, good, f"a rate above 0 and below 1 with {cell}")
            _check("zoneout.mask", zoneout.mask, zoneout.mask in ("unit", "rate"),
                   f"unit or rate with {cell}")  # fmt: skip
        if self.model.system:
            used = {"adaptive-lstm": "zoneout", "hyper-lstm": "recurrent_dropout"}.get(cell)
            for name, of in NOISES.items():
                if name != used and of(self):
                    _refuse(f"{name}: expected no such noise with {cell}")
        dropout = self.recurrent_dropout
        if cell == "hyper-lstm" and dropout.rate:
            _check("recurrent_dropout.mask", dropout.mask, dropout.mask == "unit",
                   f"unit with {cell}")  # fmt: skip
            _check("recurrent_dropout.hold_output_gate", True, not dropout.hold_output_gate,
                   f"false with {cell}")  # fmt: skip
        self._check_clock()

    def _check_clock(self) -> None:
        """Raise if training on streams would begin a clock anew inside a period."""
        batches, zoneout = self.batches, self.zoneout
        periods = (*self.model.modules, *(zoneout.periods if zoneout.mask == "clock" else ()))
        every = math.lcm(*(period for period in periods if period > 0))
        if self.task == "images" or batches.kind == "chunks" or every == 1:
            return
        if batches.varied:
            _refuse(
                "batches.halved, batches.spread: expected 0 with a clock, which begins anew in "
                f"each batch, got {batches.halved} and {batches.spread}"
            )
        if batches.length % every:
            fitting = max(1, batches.length // every) * every
            _refuse(
                f"batches.length: expected a multiple of {every}, and so of all periods, since the "
                f"clock begins anew in each batch of streams, got {batches.length}; try {fitting}"
            )

    @property
    def task(self) -> Literal["language", "images"]:
        """The task of the model: "language" predicts the next symbol, "images" classifies."""
        return "images" if self.data.name in IMAGES else "language"


def several(rate: Rate) -> tuple[float, ...]:
    """Return the rates of a field as a tuple: one number, or one for each layer."""
    return rate if isinstance(rate, tuple) else (rate,)


def any_rate(*rates: Rate) -> bool:
    """Return whether one of the rates is not 0."""
    return any(one for rate in rates for one in several(rate))


# The noises inside the recurrent layers, and whether a config has them.
NOISES: dict[str, Callable[[Config], bool]] = {
    "zoneout": lambda c: (
        any_rate(c.zoneout.cell, c.zoneout.hidden, c.zoneout.depth) or bool(c.zoneout.periods)
    ),
    "recurrent_dropout": lambda c: c.recurrent_dropout.rate > 0,
    "state_dropout": lambda c: c.state_dropout.cell > 0 or c.state_dropout.hidden > 0,
    "variational_dropout.input": lambda c: any_rate(c.variational_dropout.input),
    "variational_dropout.hidden": lambda c: any_rate(c.variational_dropout.hidden),
    "swapout": lambda c: any(v for v in vars(c.swapout).values() if not isinstance(v, str)),
    "fast_dropout": lambda c: c.fast_dropout.input > 0 or c.fast_dropout.hidden > 0,
    "weight_drop": lambda c: any_rate(c.weight_drop),
    "weight_noise": lambda c: c.weight_noise > 0,
}


# --- to and from JSON -----------------------------------------------------------------------------


def to_json(config: Config) -> dict[str, Any]:
    """Return the config as plain dicts, lists, strings, numbers and None."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def from_json(values: Any) -> Config:
    """Return the config of a value from `to_json`; fields that are missing have their defaults."""
    config = _build(Config, values, "")
    assert isinstance(config, Config)
    return config


def names(kind: type = Config, prefix: str = "") -> dict[str, Any]:
    """Return the type of every field that holds a value, by its dotted name.

    >>> "zoneout.cell" in names(), "zoneout" in names()
    (True, False)
    """
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            found |= names(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            found[prefix + name] = hint
    return found


def at(values: Any, name: str) -> Any:
    """Return the value with this dotted name from a config in JSON form.

    >>> at(to_json(Config()), "model.cell")
    'lstm'
    """
    for part in name.split("."):
        values = values[part]
    return values


def change(config: Config, values: dict[str, Any]) -> Config:
    """Return the config with the fields of these dotted names replaced.

    A string is converted to the field's type.

    >>> change(Config(), {"zoneout.cell": "0.5", "model.tied": "false"}).zoneout.cell
    0.5
    """
    plain = to_json(config)
    known = names()
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{name}: there is no such field{nearest(name, known)}")
        if isinstance(value, str):
            value = _parse(value, known[name])
        inner = plain
        *outer, last = name.split(".")
        for part in outer:
            inner = inner[part]
        inner[last] = value
    return from_json(plain)


def changed(config: Config, other: Config | None = None) -> dict[str, Any]:
    """Return the fields in which a config differs from another one, or from the defaults.

    The result has dotted names and JSON values.

    >>> changed(Config(model=Model(one_bias=True), optimizer=Optimizer(betas=(0.5, 0.9))))
    {'model.one_bias': True, 'optimizer.betas': [0.5, 0.9]}
    """
    ours, theirs = to_json(config), to_json(other or Config())
    return {name: at(ours, name) for name in names() if at(ours, name) != at(theirs, name)}


# The first default of every field whose default has changed since.
FIRST_DEFAULTS = {"model.embedding": 0, "optimizer.lr": 0.002, "optimizer.clip_gradient": 0.0}


def identity(config: Config) -> dict[str, Any]:
    """Return the fields whose values identify a config, for digests.

    These are the fields that differ from their first defaults. New fields, and new defaults of old
    fields, therefore do not change the digest of an existing run.
    """
    return changed(config, change(Config(), FIRST_DEFAULTS))


def flags(settings: dict[str, Any]) -> list[str]:
    """Return settings (dotted names and JSON values) as command-line arguments.

    >>> " ".join(flags({"model.one_bias": True, "batches.offset": False}))
    '--model.one-bias --batches.no-offset'
    >>> " ".join(flags({"optimizer.betas": [0.5, 0.9]}))
    '--optimizer.betas 0.5 0.9'
    """
    words: list[str] = []
    for name, value in settings.items():
        group, dot, last = name.replace("_", "-").rpartition(".")
        if isinstance(value, bool):
            words.append(f"--{group}{dot}{'' if value else 'no-'}{last}")
            continue
        option = f"--{group}{dot}{last}"
        if value == []:
            words.append(option)
            continue
        first, *rest = map(str, value if isinstance(value, list) else [value])
        # A value that starts with "-" would be read as another option.
        words += [f"{option}={first}"] if first.startswith("-") else [option, first]
        words += rest
    return words


def _parse(text: str, hint: Any) -> Any:
    """Parse a string as JSON, unless only the string itself fits the field's type."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = {"none": None, "true": True, "false": False}.get(text.lower(), text)
    if isinstance(_fit(value, hint), _Misfit) and not isinstance(_fit(text, hint), _Misfit):
        return text
    return value


def _build(kind: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(
            f"{prefix[:-1] or 'config'}: expected named fields in braces, got {shown(values)}"
        )
    hints = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            raise ValueError(f"{prefix}{name}: there is no such field{nearest(str(name), hints)}")
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            given[name] = _build(typing.cast(type, hint), value, f"{prefix}{name}.")
            continue
        fitted = _fit(value, hint)
        if isinstance(fitted, _Misfit):
            raise ValueError(f"{prefix}{name}: expected {fitted.expected}, got {shown(value)}")
        given[name] = fitted
    try:
        return kind(**given)
    except ValueError as error:  # the fields of a protocol do not name their place
        text = str(error)
        raise ValueError(text if text.startswith(prefix) else prefix + text) from None


@dataclass(frozen=True)
class _Misfit:
    """The value does not fit the field's type; `expected` describes the values that do."""

    expected: str


def _fit(value: Any, hint: Any) -> Any:
    """Return the value converted to the field's type without loss, or a `_Misfit`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        choices = ", ".join(map(str, arguments))
        return (
            value if isinstance(value, str) and value in arguments else _Misfit(f"one of {choices}")
        )
    if origin is types.UnionType:
        inner = [a for a in arguments if a is not type(None)]
        if value is None and len(inner) < len(arguments):
            return None
        found = [_fit(value, a) for a in inner]
        expected = " or ".join(f.expected for f in found if isinstance(f, _Misfit))
        null = " or null" * (len(inner) < len(arguments))
        return next((f for f in found if not isinstance(f, _Misfit)), _Misfit(expected + null))
    if origin is tuple and arguments[-1] is ...:
        if not isinstance(value, (list, tuple)):
            return _Misfit("a list of numbers")
        parts = tuple(_fit(v, arguments[0]) for v in value)
        return next((_Misfit("a list of numbers") for p in parts if isinstance(p, _Misfit)), parts)
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or len(value) != len(arguments):
            return _Misfit(f"{len(arguments)} numbers")
        parts = tuple(_fit(v, a) for v, a in zip(value, arguments))
        return next((p for p in parts if isinstance(p, _Misfit)), parts)
    if hint is bool:
        return value if isinstance(value, bool) else _Misfit("true or false")
    if hint is str:
        return value if isinstance(value, str) else _Misfit("a string")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _Misfit("a whole number" if hint is int else "a number")
    if hint is int:
        return value if isinstance(value, int) else _Misfit("a whole number")
    try:
        return float(value)
    except OverflowError:
        return _Misfit("a number that fits in a float")


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """Return the end of an error message that suggests similar names, or ""."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; the nearest are {', '.join(close)}" if close else ""


_CHECKING = ContextVar("checking", default=True)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Inside, configs are built without checks; call `checked` on them afterwards.

    For parsers that would put their own names before the message of a check.
    """
    token = _CHECKING.set(False)
    try:
        yield
    finally:
        _CHECKING.reset(token)


def checked(config: Config) -> Config:
    """Return the config, or raise if a value in it is not valid."""
    return from_json(to_json(config))


def _refuse(message: str) -> None:
    if _CHECKING.get():
        raise ValueError(message)


def _check(name: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        _refuse(f"{name}: expected {expected}, got {shown(value)}")


def _check_size(name: str, value: int, most: int = MOST) -> None:
    _check(name, value, value > 0, "a number above 0")
    _check(name, value, value <= most, f"at most {most:,}")


def _check_text(name: str, value: str | None) -> None:
    good = value is None or not CONTROL.search(value)
    _check(name, value, good, "a name without control characters")


def _check_rates(group: str, fields: Any, *rates: str) -> None:
    for name in rates:
        for value in several(getattr(fields, name)):
            _check(f"{group}.{name}", value, 0 <= value <= 1, "a rate between 0 and 1")
