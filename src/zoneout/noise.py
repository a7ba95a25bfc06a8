"""What is randomly replaced, by what, and what the draw may see.

A method of regularising a recurrent network by noise is three answers. *What* is replaced is a stream:
the cell, the hidden state, the update, the input, a weight. *By what* is the stream's previous value or
zero. *What the draw may see* is a mask kind: which coordinates a Bernoulli draw depends on. The classes
here are those answers under the names the literature gave them; `rules()` says them, and the step
functions and kernels know nothing else.

A rate is always the chance that the previous value (or zero) is used: the paper's z.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, SupportsFloat, TypeAlias

import torch
from torch import Tensor

from .philox import as_seed

Rate: TypeAlias = "float | Tensor | Sequence[float | Tensor]"


# --- the coordinates -------------------------------------------------------------------------------


class Sees(NamedTuple):
    """Which coordinates a draw depends on; layer and direction are always seen."""

    stream: bool
    step: bool
    example: bool
    unit: bool


MASKS = {
    "unit": Sees(True, True, True, True),  # zoneout
    "shared": Sees(False, True, True, True),  # one mask for cell and hidden state
    "step": Sees(True, True, True, False),  # stochastic depth through time
    "sequence": Sees(True, False, True, True),  # rnnDrop, variational
    "static": Sees(True, True, False, True),  # static identity connections; the noise brings the seed
}


class Stream(NamedTuple):
    """Where a stream's bits lie: a group is a plane of counters, a half 16 bits of each of its words."""

    group: int
    half: int


STREAMS = {
    "cell": Stream(0, 0),
    "hidden": Stream(0, 1),
    "update": Stream(1, 0),
    "dropout": Stream(1, 1),  # torch's own, between the layers
    "input": Stream(2, 0),
    "variational_hidden": Stream(2, 1),
    "weight": Stream(3, 0),
    "weight_noise": Stream(4, 0),
}

KINDS = {  # the streams that each cell has
    "lstm": ("cell", "hidden", "update", "input", "variational_hidden", "weight", "weight_noise"),
    "gru": ("hidden", "update", "input", "variational_hidden", "weight", "weight_noise"),
    "rnn": ("hidden", "input", "variational_hidden", "weight", "weight_noise"),
}


def plane(stream: str, layer: int, direction: int) -> int:
    """The last word of the counter: everything about a draw that is fixed for one run over time."""
    return 2 * layer + direction + 65536 * STREAMS[stream].group


# --- the methods -----------------------------------------------------------------------------------


class Rule(NamedTuple):
    """One stream of a method: everything about it but the numbers."""

    stream: str
    by: str  # "previous", "zero", "scaled zero" (inverted scaling), or "sum" (noise is added)
    mask: str
    at_eval: str
    holds_gate: bool = False  # the output gate too keeps its previous value where the update is dropped


@dataclass(frozen=True, eq=False, kw_only=True)
class Noise:
    """The common part of all methods; arguments go by keyword. Two noises are equal when all their fields are."""

    fields: ClassVar[dict[str, str]] = {}  # the rate fields, and the stream each is the rate of
    limit: ClassVar[float] = 1.0  # of a rate; that of a standard deviation is infinite
    masks: ClassVar[tuple[str, ...]] = tuple(MASKS)

    def __new__(cls, *positional: Any, **given: Any) -> Self:
        if positional:
            constructor = next(base for base in cls.__mro__ if "__init__" in base.__dict__)
            if "__dataclass_params__" in constructor.__dict__:  # else a constructor that a user wrote
                raise _positional_error(cls, positional, given)
        return super().__new__(cls)

    def rules(self) -> tuple[Rule, ...]:
        """One rule a stream that has a rate other than zero."""
        return tuple(self.rule(field) for field in self.fields if not is_zero(getattr(self, field)))

    def rule(self, field: str) -> Rule:
        raise NotImplementedError

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in self.fields:
            object.__setattr__(self, field, check_rate(getattr(self, field), f"{name}({field}=…)", self.limit))
        mask, seed = getattr(self, "mask", "unit"), getattr(self, "seed", None)
        if mask not in self.masks:
            raise ValueError(f"{name}(mask=…): expected one of {', '.join(self.masks)}, got {mask!r}")
        if mask == "static" and seed is None:
            raise ValueError(
                f"{name}(mask='static'): expected seed=… as well, since a static mask is drawn once "
                "for the whole training; got no seed"
            )
        if mask != "static" and seed is not None:
            raise ValueError(
                f"{name}(seed=…): only mask='static' takes a seed of its own, got mask={mask!r}; "
                "for the others pass seed= to the layer's call"
            )
        if seed is not None:
            as_seed(seed)
        choices = ("expectation", "off", "sample")
        at_eval = getattr(self, "at_eval", "expectation")
        if at_eval not in choices:
            raise ValueError(f"{name}(at_eval=…): expected one of {', '.join(choices)}, got {at_eval!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Noise) and type(self) is type(other) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    def _key(self) -> tuple[Any, ...]:
        return tuple(_plain(getattr(self, field.name)) for field in dataclasses.fields(self))

    def __repr__(self) -> str:
        shown = (
            f"{field.name}={_plain(getattr(self, field.name), short=True)!r}"
            for field in dataclasses.fields(self)
            if _plain(getattr(self, field.name)) != _plain(field.default)
        )
        return f"{type(self).__name__}({', '.join(shown)})"


def _positional_error(cls: type[Noise], positional: tuple[Any, ...], given: dict[str, Any]) -> TypeError:
    """The error for a noise made without keywords: toolkits differ on which state a single number is the rate of."""
    name, free = cls.__name__, [field.name for field in dataclasses.fields(cls) if field.name not in given]
    rates = [field for field in cls.fields if field in free]
    one_for_several = len(positional) == 1 and len(rates) > 1
    keywords = dict.fromkeys(rates, positional[0]) if one_for_several else dict(zip(free, positional))
    written = ", ".join(f"{field}={_written(value)}" for field, value in (keywords | given).items())
    return TypeError(
        f"{name}: expected keywords, got {len(positional)} positional argument{'s' * (len(positional) > 1)} "
        f"({', '.join(map(_written, positional))}); write {name}({written})" + ", or only one of them" * one_for_several
    )


def _written(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str)) else "…"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StateNoise(Noise):
    """The common part of the methods that replace units of the states."""

    cell: Rate = 0.0
    hidden: Rate = 0.0
    mask: str = "unit"
    at_eval: str = "expectation"
    seed: int | None = None

    fields: ClassVar[dict[str, str]] = {"cell": "cell", "hidden": "hidden"}
    by: ClassVar[str]

    def rule(self, field: str) -> Rule:
        return Rule(field, self.by, self.mask, self.at_eval)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Zoneout(StateNoise):
    """Units of the states keep their previous value.

    `cell` and `hidden` are the chances of that. `mask` says what the draws see: `"unit"` is the paper's
    zoneout, `"shared"` one mask for both states, `"step"` stochastic depth through time, `"sequence"` one
    mask a sequence, `"static"` one mask for the whole training (drawn from `seed`).

    >>> Zoneout(cell=0.5, hidden=0.05)
    Zoneout(cell=0.5, hidden=0.05)
    """

    by: ClassVar[str] = "previous"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StateDropout(StateNoise):
    """Units of the states are set to zero: dropout on the recurrent connections.

    h is computed from the masked c. With `mask="sequence"` and a cell rate it is rnnDrop.
    """

    by: ClassVar[str] = "zero"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RecurrentDropout(Noise):
    """The update i ⊙ g of the cell (in a GRU (1 − z) ⊙ n) is set to zero.

    With `hold_output_gate` a unit whose update is dropped also keeps the output gate of the step
    before, so that a cell which was not updated is not exposed (LSTM only).
    """

    rate: Rate = 0.0
    mask: str = "unit"
    hold_output_gate: bool = False
    at_eval: str = "expectation"
    seed: int | None = None

    fields: ClassVar[dict[str, str]] = {"rate": "update"}
    masks: ClassVar[tuple[str, ...]] = ("unit", "step", "sequence", "static")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.hold_output_gate, bool):
            raise TypeError(f"RecurrentDropout(hold_output_gate=…): expected a bool, got {self.hold_output_gate!r}")

    def rule(self, field: str) -> Rule:
        return Rule("update", "zero", self.mask, self.at_eval, self.hold_output_gate)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class VariationalDropout(Noise):
    """One mask a sequence on the layer's input and on h where it enters the gates, with inverted scaling."""

    input: Rate = 0.0
    hidden: Rate = 0.0
    at_eval: str = "expectation"

    fields: ClassVar[dict[str, str]] = {"input": "input", "hidden": "variational_hidden"}

    def rule(self, field: str) -> Rule:
        return Rule(self.fields[field], "scaled zero", "sequence", self.at_eval)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class WeightDrop(Noise):
    """One mask a call on the recurrent matrices, with inverted scaling."""

    rate: Rate = 0.0
    at_eval: str = "expectation"

    fields: ClassVar[dict[str, str]] = {"rate": "weight"}

    def rule(self, field: str) -> Rule:
        return Rule("weight", "scaled zero", "sequence", self.at_eval)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class WeightNoise(Noise):
    """Gaussian noise on every weight matrix, one draw a call; none on biases or initial states."""

    std: Rate = 0.0
    at_eval: str = "expectation"

    fields: ClassVar[dict[str, str]] = {"std": "weight_noise"}
    limit: ClassVar[float] = math.inf

    def rule(self, field: str) -> Rule:
        return Rule("weight_noise", "sum", "sequence", self.at_eval)


# Numbers and words alone: `torch.load` reads them without being told to trust the file.
torch.serialization.add_safe_globals(
    [Zoneout, StateDropout, RecurrentDropout, VariationalDropout, WeightDrop, WeightNoise]
)


# --- rates -----------------------------------------------------------------------------------------


def check_rate(rate: Rate, name: str, limit: float = 1.0, in_call: bool = False) -> Rate:
    """The rate in its plain form (float, float64 tensor, or a tuple of one of these a layer), or an error.

    A tensor given `in_call` stays on its device. Where its values cannot be read at once (on a GPU, in a compiler,
    under torch.func) they are clamped in place of an error.
    """
    if type(rate) is float:  # first, since a compiler has numbers that are nothing else
        _check_range(rate, name, limit)
        if limit == 1:
            warn_if_rounded(rate, name)
        return rate
    if not isinstance(rate, Tensor) and getattr(rate, "ndim", 0) and hasattr(rate, "__array__"):  # type: ignore[arg-type]
        rate = torch.as_tensor(rate, device="cpu")
    if isinstance(rate, Tensor):
        if rate.is_complex() or rate.dtype == torch.bool or rate.dim() > 1 or rate.numel() == 0:
            raise ValueError(
                f"{name}: expected a tensor with one rate a unit, got {rate.dtype} of shape {tuple(rate.shape)}"
            )
        if rate.requires_grad:
            raise ValueError(
                f"{name}: expected rates that are not learned, since their numbers are copied, "
                "got a tensor with requires_grad; pass rate.detach()"
            )
        if rate.is_meta:
            raise ValueError(f"{name}: expected numbers, got a tensor on the meta device, which has none")
        if torch.compiler.is_compiling() or (in_call and not readable(rate)):
            return rate.to(torch.float32 if rate.device.type == "mps" else torch.float64).clamp(0, limit)
        rate = rate.to("cpu", torch.float64, copy=True)
        if rate.dim() == 0:
            return check_rate(rate.item(), name, limit, in_call)
        _check_range(rate.min().item(), name, limit)
        _check_range(rate.max().item(), name, limit)
        rounded = rate[(in_65536ths(rate) % 65536 == 0) & (rate % 1 != 0)]
        if limit == 1 and len(rounded):
            warn_if_rounded(rounded[0].item(), name)
        return rate
    if isinstance(rate, (list, tuple)):
        if not rate:
            raise ValueError(f"{name}: expected one rate a layer, got an empty list")
        if any(isinstance(one, (list, tuple)) for one in rate):
            raise TypeError(f"{name}: expected one rate a layer, got a list inside a list")
        return tuple(check_rate(one, name, limit, in_call) for one in rate)  # type: ignore[misc]
    if isinstance(rate, (bool, str)) or not isinstance(rate, SupportsFloat):  # NumPy's numbers are welcome
        raise TypeError(
            f"{name}: expected a number, a list of one a layer or a tensor of one a unit, got {type(rate).__name__}"
        )
    return check_rate(float(rate), name, limit, in_call)


def readable(x: Tensor) -> bool:
    """Whether a tensor's values can be read without waiting: on the CPU, in plain eager mode."""
    from .ops.modes import plain_eager  # which imports this module

    return x.device.type == "cpu" and plain_eager()


def _check_range(value: float, name: str, limit: float) -> None:
    if limit == math.inf:
        if not 0 <= value < limit:
            raise ValueError(f"{name}: expected a standard deviation, finite and not negative, got {value}")
    elif not 0 <= value <= limit:
        raise ValueError(f"{name}: expected a rate between 0 and 1, got {value}")


def warn_if_rounded(rate: float, name: str) -> None:
    """Warn of a rate that is drawn as 0 or 1 and is neither."""
    if torch.compiler.is_compiling() or rate in (0, 1) or round(rate * 65536) not in (0, 65536):
        return
    warnings.warn(
        f"{name}: {rate} rounds to {round(rate)}, since rates are drawn in steps of 1/65536: in training the old "
        f"value (or zero) is {'always' if rate > 0.5 else 'never'} used; expected {round(rate)}, or a rate from "
        "1/65536 to 1 − 1/65536",
        stacklevel=_outside(),
    )


def _outside() -> int:
    """The stack level, for who calls this, of the first caller outside of the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (__package__, "torch"):
        level, frame = level + 1, frame.f_back
    return level


def in_65536ths(rate: Tensor) -> Tensor:
    """A rate as it is drawn, by 16 random bits."""
    return (rate * 65536).round()


def is_zero(rate: Rate) -> bool:
    """Whether the stream is off. A tensor of rates never is: what it holds may follow a schedule."""
    if isinstance(rate, tuple):
        return all(is_zero(one) for one in rate)
    return not isinstance(rate, Tensor) and rate == 0


def rate_of_layer(rate: Rate, layer: int, layers: int, units: int | None, name: str) -> Tensor:
    """The rate of one layer as a float64 tensor: a scalar, or one a unit where the stream has units."""
    if isinstance(rate, tuple):
        if len(rate) != layers:
            raise ValueError(f"{name}: expected one rate for each of {layers} layers, got {len(rate)}")
        rate = rate[layer]
    if isinstance(rate, Tensor) and rate.dim() == 0:
        return rate
    if isinstance(rate, Tensor) and units is None:
        raise ValueError(f"{name}: expected a number or a list of one a layer, got a tensor of one a unit")
    if isinstance(rate, Tensor) and len(rate) != units:
        raise ValueError(f"{name}: expected one rate for each of {units} units, got {len(rate)}")
    if isinstance(rate, Tensor):
        return rate.to(torch.float64)
    return torch.tensor(rate, dtype=torch.float64, device="cpu")


def _plain(value: Any, short: bool = False) -> Any:
    if isinstance(value, Tensor):
        return f"<{len(value)} rates>" if short else tuple(value.tolist())
    if isinstance(value, tuple):
        return [_plain(one, short) for one in value] if short else tuple(_plain(one) for one in value)
    return value


# --- several methods together ----------------------------------------------------------------------


def as_noises(noise: Noise | Iterable[Noise] | None) -> tuple[Noise, ...]:
    """The noises as a tuple; each class once, and each stream replaced by one thing."""
    given: Any = (noise,) if isinstance(noise, Noise) or not isinstance(noise, Iterable) else noise
    noises: tuple[Noise, ...] = () if noise is None else tuple(given)
    claimed: dict[str, Noise] = {}
    for index, one in enumerate(noises):
        if not isinstance(one, Noise):
            raise TypeError(
                "noise: expected Zoneout, RecurrentDropout, StateDropout, VariationalDropout, WeightNoise, "
                f"WeightDrop, a list of them or None, got {type(one).__name__}"
            )
        if any(type(one) is type(other) for other in noises[:index]):
            raise ValueError(f"noise: {type(one).__name__} is there twice, expected each method once")
        for rule in one.rules():
            if rule.stream in claimed:
                raise ValueError(
                    f"noise: both {claimed[rule.stream]} and {one} replace the {rule.stream} state, "
                    "expected one method for each state"
                )
            claimed[rule.stream] = one
    return noises


def sees_step(rule: Rule) -> bool:
    """Whether a rule draws anew at every step."""
    return MASKS[rule.mask].step


def misfits(noise: Noise, kind: str, one_step: bool = False, told: bool = True) -> list[tuple[str, str]]:
    """The fields of a noise that mean nothing in a cell of this kind, each with the reason.

    `told` is whether those who call a cell of one step may tell it seed and step.
    """
    name, wrong = kind.upper(), []
    unknown = {rule.stream for rule in noise.rules() if rule.mask == "static" or not sees_step(rule)}
    for field, stream in noise.fields.items():
        if stream not in KINDS[kind] and not is_zero(getattr(noise, field)):
            why = f"a {name} has no cell" if stream == "cell" else f"a plain {name} has no gated {stream}"
            wrong.append((field, why))
        elif one_step and not told and stream in unknown:
            wrong.append((field, "drawn once for a whole sequence, and the model tells a cell neither seed nor step"))
    if kind != "lstm" and getattr(noise, "hold_output_gate", False):
        wrong.append(("hold_output_gate", f"a {name} has no output gate"))
    elif one_step and getattr(noise, "hold_output_gate", False):
        wrong.append(("hold_output_gate", "a cell does not carry the output gate of the step before"))
    return wrong


def check_fits(noises: tuple[Noise, ...], kind: str, one_step: bool = False) -> None:
    """An error where a noise means nothing in a cell of this kind."""
    for noise in noises:
        for field, why in misfits(noise, kind, one_step):
            raise ValueError(
                f"noise: {type(noise).__name__}({field}={_plain(getattr(noise, field), short=True)!r}) "
                f"does not apply, {why}; expected {field} to be left out"
            )


def restrict(
    noises: tuple[Noise, ...], kind: str, one_step: bool = False, told: bool = True
) -> tuple[tuple[Noise, ...], list[str]]:
    """What of the noises applies to a cell of this kind, and a phrase for each thing that does not; see `misfits`."""
    kept, dropped = [], []
    for noise in noises:
        wrong = misfits(noise, kind, one_step, told)
        changes: dict[str, Any] = {field: False if field == "hold_output_gate" else 0.0 for field, _ in wrong}
        dropped += [f"{type(noise).__name__}'s {field} ({why})" for field, why in wrong]
        noise = dataclasses.replace(noise, **changes)
        if noise.rules() or not wrong:
            kept.append(noise)
    return tuple(kept), dropped
