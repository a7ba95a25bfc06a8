"""What a run is: frozen dataclasses that the command line, `config.json` and the training loop all share.

A field's docstring is its help on the command line. A rate is always the chance that the old value (or zero) is used.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from .streams import CONTROL, shown

Mask: TypeAlias = Literal["unit", "shared", "step", "sequence", "static"]
AtEval: TypeAlias = Literal["expectation", "off", "sample"]

IMAGES = ("mnist",)  # data that are classified; everything else is text to be predicted
LAYERS = 2**14  # of a model, at most: the planes of the generator beyond theirs are drawn from outside the layers
MOST = 2**31 - 1  # of anything that is the size of a tensor
CUT: dict[str, Literal["char", "word"]] = {"char-ptb": "char", "word-ptb": "word"}  # corpora that are cut in one way


@dataclass(frozen=True)
class Data:
    """What is learned from."""

    name: str = "python"
    """A corpus (`zoneout data list` names them) or the path of a text file."""
    by: Literal["char", "word"] = "char"
    """What a text is cut into; char-ptb is always characters and word-ptb words."""
    preparation: Literal["paper", "stripped"] = "paper"
    """Of the Penn Treebank's characters: as the paper's files had them, or without the spaces around lines."""
    order: Literal["paper", "permuted", "rows"] = "paper"
    """Of the pixels of mnist: the paper's draw with repeats, a true permutation, or row by row."""
    valid: str | None = None
    """A text file to validate on, when `name` is a file; by default the end of the text is split off."""
    test: str | None = None
    """A text file to test on, when `name` is a file."""
    limit: int | None = None
    """Use only so many symbols in all, the first of a text or of each part in proportion; of mnist, images a part."""
    words: int | None = None
    """Keep only so many words, the most frequent; the others become <unk>."""

    def __post_init__(self) -> None:
        _check("data.name", self.name, self.name != "", "the name of a corpus or the path of a text file")
        for name in ("name", "valid", "test"):
            _check_text(f"data.{name}", getattr(self, name))
        for name in ("limit", "words"):
            value = getattr(self, name)
            _check(f"data.{name}", value, value is None or value > 0, "a number above 0, or none")


@dataclass(frozen=True)
class Batches:
    """How training examples are cut from a text; mnist uses `size` alone."""

    kind: Literal["chunks", "streams"] = "chunks"
    """Shuffled chunks that each start from the initial state, or parallel streams with the state carried."""
    size: int = 32
    """Chunks, streams or images in a batch, over all processes together."""
    length: int = 100
    """Symbols in a chunk (of which all but the first are predicted), or steps that streams go at a time."""
    offset: bool = True
    """Cut the chunks of every epoch from another random offset."""

    def __post_init__(self) -> None:
        _check_size("batches.size", self.size)
        least = 2 if self.kind == "chunks" else 1
        _check("batches.length", self.length, self.length >= least, f"at least {least} for {self.kind}")
        _check_size("batches.length", self.length)


@dataclass(frozen=True)
class Model:
    """The network: input, recurrent layers, softmax."""

    cell: Literal["lstm", "gru", "rnn", "rnn-relu"] = "lstm"
    """The recurrent cell."""
    hidden: int = 256
    """Units in a layer."""
    layers: int = 1
    """Recurrent layers, one above the other."""
    embedding: int = 0
    """Size of the input's embedding; 0 feeds symbols in as one-hot rows."""
    dropout: float = 0.0
    """Rate of non-recurrent dropout: on the embedding, between layers and before the softmax."""
    tied: bool = False
    """Use the embedding as the softmax's matrix as well."""
    norm: Literal["none", "layer", "batch"] = "none"
    """Normalisation inside the step."""
    norm_momentum: float = 0.01
    """Weight of a new batch in the running averages of batch norm."""
    init: Literal["torch", "block-orthogonal", "orthogonal", "identity", "uniform"] = "torch"
    """How weights start. identity: orthogonal, but the recurrent candidate (g, in a plain RNN all) the identity."""
    init_bound: float = 0.04
    """The bound of init=uniform, which biases are drawn from too."""
    forget_bias: float = 1.0
    """Added to the biases of an LSTM's forget gates at the start."""
    one_bias: bool = False
    """One bias a gate: torch's second (bias_hh) stays at zero."""
    learn_initial_state: bool = False
    """Learn the state that a sequence starts from."""

    def __post_init__(self) -> None:
        _check_size("model.hidden", self.hidden)
        _check_size("model.layers", self.layers, LAYERS)
        _check("model.embedding", self.embedding, self.embedding >= 0, "a size, or 0 for one-hot input")
        _check_size("model.embedding", max(self.embedding, 1))
        _check_rates("model", self, "dropout", "norm_momentum")
        _check("model.init_bound", self.init_bound, 0 < self.init_bound < math.inf, "a finite number above 0")
        _check("model.forget_bias", self.forget_bias, math.isfinite(self.forget_bias), "a finite number")
        if self.tied and self.embedding != self.hidden:
            raise ValueError(
                f"model.tied: expected an embedding of the size of the hidden state ({self.hidden}), since both share "
                f"one matrix, got embedding {self.embedding}; try --model.embedding {self.hidden}"
            )


@dataclass(frozen=True, kw_only=True)
class Zoneout:
    """Units keep their previous value."""

    cell: float = 0.0
    """Rate of the cell (LSTM only)."""
    hidden: float = 0.0
    """Rate of the hidden state."""
    mask: Mask = "unit"
    """What the draws see. step is stochastic depth; static is drawn once for the whole run."""

    def __post_init__(self) -> None:
        _check_rates("zoneout", self, "cell", "hidden")


@dataclass(frozen=True, kw_only=True)
class RecurrentDropout:
    """The update of the state is dropped."""

    rate: float = 0.0
    """Rate of the update (not in a plain RNN)."""
    mask: Literal["unit", "step", "sequence", "static"] = "unit"
    """What the draws see."""
    hold_output_gate: bool = False
    """Where an update is dropped, keep the output gate of the step before (LSTM only)."""

    def __post_init__(self) -> None:
        _check_rates("recurrent_dropout", self, "rate")


@dataclass(frozen=True, kw_only=True)
class StateDropout:
    """Units of the states are set to zero; on cells with mask=sequence it is rnnDrop."""

    cell: float = 0.0
    """Rate of the cell (LSTM only)."""
    hidden: float = 0.0
    """Rate of the hidden state."""
    mask: Mask = "unit"
    """What the draws see."""

    def __post_init__(self) -> None:
        _check_rates("state_dropout", self, "cell", "hidden")


@dataclass(frozen=True, kw_only=True)
class VariationalDropout:
    """One mask a sequence on a layer's input and on h where it enters the gates."""

    input: float = 0.0
    """Rate of the layer's input."""
    hidden: float = 0.0
    """Rate of the hidden state."""
    output: float = 0.0
    """Rate of what the softmax reads."""
    words: float = 0.0
    """Rate of whole symbols, whose embedding is zero wherever they stand in a sequence."""

    def __post_init__(self) -> None:
        _check_rates("variational_dropout", self, "input", "hidden", "output", "words")


@dataclass(frozen=True)
class Optimizer:
    """How gradients become updates."""

    rule: Literal["adam", "sgd", "rmsprop"] = "adam"
    """The update rule."""
    paper: bool = False
    """The rule as the paper's code had it: Adam adds eps to the uncorrected √v, RMSProp divides by max(rms, eps)."""
    lr: float = 0.002
    """The learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decays."""
    eps: float | None = None
    """By default 1e-8, and 1e-5 in the paper's RMSProp."""
    decay: float = 0.9
    """RMSProp's decay; the paper's is 0.5."""
    momentum: float = 0.0
    """Of SGD and RMSProp."""
    weight_decay: float = 0.0
    """Shrink weight matrices by this times the learning rate at each update (decoupled, as in AdamW)."""
    clip_gradient: float = 0.0
    """Clip the gradient to this global norm; 0 does not."""
    clip_update: float = 0.0
    """Clip the update, learning rate included, to this global norm; 0 does not."""

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "clip_gradient", "clip_update"):
            value = getattr(self, name)
            _check(f"optimizer.{name}", value, 0 <= value < math.inf, "a finite number, 0 or more")
        for name, value in (("betas", self.betas[0]), ("betas", self.betas[1]), ("decay", self.decay)):
            _check(f"optimizer.{name}", value, 0 <= value < 1, "a number from 0 to below 1")
        _check("optimizer.momentum", self.momentum, 0 <= self.momentum < 1, "a number from 0 to below 1")
        _check("optimizer.eps", self.eps, self.eps is None or 0 < self.eps < math.inf, "a number above 0")
        if self.momentum and self.rule == "adam":
            raise ValueError("optimizer.momentum: expected 0 with rule adam, whose momentum is the first of its betas")


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes."""

    kind: Literal["constant", "divide", "cosine"] = "constant"
    """divide: after some epochs, divide after every epoch; cosine: down to zero at the end of the run."""
    after: int = 14
    """divide: epochs at the full rate."""
    by: float = 1.15
    """divide: what the rate is divided by."""

    def __post_init__(self) -> None:
        _check("schedule.after", self.after, self.after >= 0, "a number of epochs")
        _check("schedule.by", self.by, 0 < self.by < math.inf, "a finite number above 0")


@dataclass(frozen=True)
class Protocol:
    """How a text is cut for evaluation; mnist uses `size` alone."""

    kind: Literal["chunks", "streams", "whole"] = "chunks"
    """Chunks that each start from the initial state, parallel streams, or the whole text as one sequence."""
    length: int = 100
    """Symbols in a chunk; for streams and the whole text, steps to run at a time, which changes nothing but memory."""
    size: int = 100
    """Chunks (or images) in a batch (memory alone; in validations batch norm's statistics too), or how many streams."""

    def __post_init__(self) -> None:
        least = 2 if self.kind == "chunks" else 1
        _check("length", self.length, self.length >= least, f"at least {least} for {self.kind}")
        _check_size("length", self.length)
        _check_size("size", self.size)


@dataclass(frozen=True)
class Evaluation:
    """When and how a run is judged."""

    valid: Protocol = field(default_factory=Protocol)
    """The validation part, while training."""
    test: Protocol = field(default_factory=lambda: Protocol("whole", length=1000))
    """The test part, after training, with the best weights."""
    every: int = 0
    """Updates from one validation to the next; 0 is after every epoch."""
    at_eval: AtEval = "expectation"
    """What stands in the place of the recurrent layers' masks; dropout around them is off in any case."""
    statistics: int = 0
    """Training batches on which batch norm's statistics are estimated anew for the test; 0 is a whole epoch."""
    statistics_size: int = 0
    """Examples in each of these batches, where they are independent; 0 is as many as in training."""

    def __post_init__(self) -> None:
        _check("evaluation.every", self.every, self.every >= 0, "a number of updates, or 0")
        _check("evaluation.statistics", self.statistics, self.statistics >= 0, "a number of batches, or 0")
        size = self.statistics_size
        _check("evaluation.statistics_size", size, size == 0 or size >= 2, "a number of examples above 1, or 0")


@dataclass(frozen=True)
class Config:
    """Everything that decides what a run computes.

    >>> config = Config(zoneout=Zoneout(cell=0.5, hidden=0.05))
    >>> from_json(to_json(config)) == config
    True
    >>> change(config, {"model.hidden": 1000, "zoneout.cell": 0.25}).model.hidden
    1000
    """

    data: Data = field(default_factory=Data)
    batches: Batches = field(default_factory=Batches)
    model: Model = field(default_factory=Model)
    zoneout: Zoneout = field(default_factory=Zoneout)
    recurrent_dropout: RecurrentDropout = field(default_factory=RecurrentDropout)
    state_dropout: StateDropout = field(default_factory=StateDropout)
    variational_dropout: VariationalDropout = field(default_factory=VariationalDropout)
    weight_noise: float = 0.0
    """Standard deviation of Gaussian noise on the weight matrices, drawn for each batch."""
    weight_drop: float = 0.0
    """Rate of dropping entries of the recurrent matrices, drawn for each batch."""
    norm_stabilizer: float = 0.0
    """β of the penalty on changes of the norm of h."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    evaluation: Evaluation = field(default_factory=Evaluation)
    loss: Literal["mean", "sum"] = "mean"
    """Over time; over the batch it is always the mean."""
    epochs: int = 20
    """Passes over the training part."""
    updates: int = 0
    """Stop after so many updates even in the middle of an epoch, unless the epochs end before; 0 is no limit."""
    patience: int = 0
    """Stop after so many validations without a new best; 0 never does."""
    seed: int = 1
    """Of weights, order and masks: all that is random is a function of it."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Of the products in training. Evaluation is in fp32 or, on a GPU after training in a lower precision, in tf32."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda or cuda:1."""
    backend: str | None = None
    """Of the recurrent layers: reference, cpu, cuda; by default the device decides."""
    log_every: int = 100
    """Updates from one line of training loss to the next."""
    save_every: int = 0
    """Updates from one checkpoint to the next; 0 is after every validation, where there is one anyway."""

    def __post_init__(self) -> None:
        for name in ("weight_noise", "norm_stabilizer"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "a finite number, 0 or more")
        _check("weight_drop", self.weight_drop, 0 <= self.weight_drop < 1, "a rate from 0 to below 1")
        for name in ("updates", "patience", "save_every"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        for name in ("epochs", "log_every"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "a number above 0")
        for name in ("device", "backend"):
            _check_text(name, getattr(self, name))
        _check("seed", self.seed, -(2**63) <= self.seed < 2**64, "an integer of at most 64 bits")
        if self.model.norm == "batch":
            _check("batches.size", self.batches.size, self.batches.size >= 2, "at least 2 with batch norm")
        if self.variational_dropout.words and not self.model.embedding:
            raise ValueError("variational_dropout.words: expected 0 without an embedding (--model.embedding)")
        if self.task == "images" and self.model.embedding:
            raise ValueError("model.embedding: expected 0, since a pixel is a number and not a symbol")

    @property
    def task(self) -> Literal["language", "images"]:
        """What the model does: predict the next symbol, or classify."""
        return "images" if self.data.name in IMAGES else "language"


# --- to and from JSON ------------------------------------------------------------------------------


def to_json(config: Config) -> dict[str, Any]:
    """The config as plain dicts, lists, strings, numbers and None."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def from_json(values: Any) -> Config:
    """The config that `to_json` gave; fields that are left out have their defaults."""
    config = _build(Config, values, "")
    assert isinstance(config, Config)
    return config


def names(kind: type = Config, prefix: str = "") -> dict[str, Any]:
    """Every field that holds a value, by its dotted name, with its type.

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
    """What a config as JSON has under a dotted name.

    >>> at(to_json(Config()), "model.cell")
    'lstm'
    """
    for part in name.split("."):
        values = values[part]
    return values


def change(config: Config, values: dict[str, Any]) -> Config:
    """The config with some fields replaced, by dotted name; a string is read as the field's type.

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
    """The fields that a config has otherwise than another, or than the default: by dotted name, as JSON has them.

    >>> changed(Config(model=Model(one_bias=True), optimizer=Optimizer(betas=(0.5, 0.9))))
    {'model.one_bias': True, 'optimizer.betas': [0.5, 0.9]}
    """
    ours, theirs = to_json(config), to_json(other or Config())
    return {name: at(ours, name) for name in names() if at(ours, name) != at(theirs, name)}


def flags(settings: dict[str, Any]) -> list[str]:
    """Settings, as JSON has them, in the words that the command line takes.

    >>> " ".join(flags({"model.one_bias": True, "batches.offset": False, "optimizer.betas": [0.5, 0.9]}))
    '--model.one-bias --batches.no-offset --optimizer.betas 0.5 0.9'
    """
    words: list[str] = []
    for name, value in settings.items():
        group, dot, last = name.replace("_", "-").rpartition(".")
        if isinstance(value, bool):
            words.append(f"--{group}{dot}{'' if value else 'no-'}{last}")
            continue
        first, *rest = map(str, value if isinstance(value, list) else [value])
        option = f"--{group}{dot}{last}"
        words += [f"{option}={first}"] if first.startswith("-") else [option, first]  # which is not an option itself
        words += rest
    return words


def _parse(text: str, hint: Any) -> Any:
    """A string as the JSON it spells, where the field is not itself a string."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = {"none": None, "true": True, "false": False}.get(text.lower(), text)
    if isinstance(_fit(value, hint), _Misfit) and not isinstance(_fit(text, hint), _Misfit):
        return text
    return value


def _build(kind: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{prefix[:-1] or 'config'}: expected named fields in braces, got {shown(values)}")
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
    return kind(**given)


@dataclass(frozen=True)
class _Misfit:
    expected: str


def _fit(value: Any, hint: Any) -> Any:
    """The value as the field's type, where nothing is lost by it; otherwise what was expected."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        choices = ", ".join(map(str, arguments))
        return value if isinstance(value, str) and value in arguments else _Misfit(f"one of {choices}")
    if origin is types.UnionType:
        (inner,) = (a for a in arguments if a is not type(None))
        fitted = None if value is None else _fit(value, inner)
        return _Misfit(f"{fitted.expected} or null") if isinstance(fitted, _Misfit) else fitted
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
        return _Misfit("a number that a float can be")


def nearest(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; the nearest are {', '.join(close)}" if close else ""


def _check(name: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        raise ValueError(f"{name}: expected {expected}, got {shown(value)}")


def _check_size(name: str, value: int, most: int = MOST) -> None:
    _check(name, value, value > 0, "a number above 0")
    _check(name, value, value <= most, f"at most {most:,}")


def _check_text(name: str, value: str | None) -> None:
    good = value is None or not CONTROL.search(value)
    _check(name, value, good, "a name without control characters")


def _check_rates(group: str, fields: Any, *rates: str) -> None:
    for name in rates:
        value = getattr(fields, name)
        _check(f"{group}.{name}", value, 0 <= value <= 1, "a rate between 0 and 1")
