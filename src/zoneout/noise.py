"""The noise methods: what is replaced at random, by what, and what the mask depends on.

Three choices define a noise method for a recurrent network:

* The stream is the value that is replaced: a state, the update, the input or a weight.
* The replacement is the previous value of the stream, or zero. (Weight noise is added instead.)
* The mask kind is the set of coordinates that a Bernoulli draw depends on.

Each class here is one method, under its name in the literature. `rules()` returns its choices,
which are all that the step functions and kernels know about it. The streams of a cell follow from
its definition (`streams_of`).

A rate is always the probability that the previous value (or zero) is used: z in the zoneout paper.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from .definition import Definition
from .philox import as_seed
from .rates import Rate, check_periods, check_rate, is_zero
from .streams import DEPTH, DRAWN, MASKS, Rule, state_groups, streams_of

Periods: TypeAlias = "int | Tensor | Sequence[int | Tensor]"
StateRates: TypeAlias = "Mapping[str, Rate] | tuple[tuple[str, Rate], ...]"  # by a state's name


class Entry(NamedTuple):
    """One rate of a noise, and the stream that it belongs to."""

    field: str  # the field of the noise that holds the rate
    stream: str
    rate: Rate
    state: str = ""  # the key of the rate if the field is `states`

    def written(self) -> str:
        """Return the entry as an argument in code: "hidden=…" or "states={'n': …}"."""
        return _argument(self.field, self.state, "…")


def _argument(field: str, state: str, value: str) -> str:
    """Return a field as an argument in code; with `state`, the part of `states` for that state."""
    return f"{field}={{{state!r}: {value}}}" if state else f"{field}={value}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Noise:
    """The base class of all noise methods.

    Arguments are keyword-only. Two noises of one class are equal if all their fields are equal.
    """

    fields: ClassVar[dict[str, str]] = {}  # rate field -> stream
    limit: ClassVar[float] = 1.0  # the largest rate; infinite for a standard deviation
    masks: ClassVar[tuple[str, ...]] = DRAWN  # the valid mask kinds

    def __new__(cls, *positional: Any, **given: Any) -> Self:
        constructor = next(base for base in cls.__mro__ if "__init__" in base.__dict__)
        # The constructor of a user's subclass may take other arguments.
        if "__dataclass_params__" in constructor.__dict__:
            names = [field.name for field in dataclasses.fields(cls)]
            if positional:
                raise _positional_error(cls, positional, given)
            if unknown := [name for name in given if name not in names]:
                got = ", ".join(f"{name}={in_code(given[name])}" for name in unknown)
                raise TypeError(f"{cls.__name__}: expected some of {', '.join(names)}; got {got}")
        return super().__new__(cls)

    def field_entries(self) -> list[Entry]:
        """Return one entry for each rate field."""
        return [Entry(field, stream, getattr(self, field)) for field, stream in self.fields.items()]

    def state_entries(self, cell: Definition) -> list[Entry]:
        """Return one entry for each rate in `states`; its stream is "" if no state has its name."""
        return []

    def entries(self, cell: Definition | None = None) -> list[Entry]:
        """Return the rates, one entry for each stream of this method; with a cell, of those it has.

        Rates in `states` need the cell, whose definition says which states they name.
        """
        entries = self.field_entries()
        return entries if cell is None else [e for e in entries if e.stream in streams_of(cell)]

    def rules(self, cell: Definition | None = None) -> tuple[Rule, ...]:
        """Return one rule for each stream with a rate other than zero."""
        return tuple(self.rule(e.stream) for e in self.entries(cell) if not is_zero(e.rate))

    def rule(self, stream: str) -> Rule:
        """Return the rule of a stream of this method."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in self.fields:
            rate = check_rate(getattr(self, field), f"{name}({field}=…)", self.limit)
            object.__setattr__(self, field, rate)
        mask, seed = getattr(self, "mask", "unit"), getattr(self, "seed", None)
        if mask not in self.masks:
            raise ValueError(
                f"{name}(mask=…): expected one of {', '.join(self.masks)}, got {mask!r}"
            )
        if mask == "static" and seed is None:
            raise ValueError(
                f"{name}(mask='static'): expected seed=… as well, since a static mask is drawn "
                "once for the whole training; got no seed"
            )
        if mask != "static" and seed is not None:
            raise ValueError(
                f"{name}(seed=…): expected mask='static' with a seed, got mask={mask!r}; "
                "for other masks pass seed=… to the layer's call"
            )
        if seed is not None:
            as_seed(seed)
        choices = ("expectation", "off", "sample")
        at_eval = getattr(self, "at_eval", "expectation")
        if at_eval not in choices:
            raise ValueError(
                f"{name}(at_eval=…): expected one of {', '.join(choices)}, got {at_eval!r}"
            )
        if mask not in DRAWN and at_eval != "expectation":
            raise ValueError(
                f"{name}(at_eval=…): expected 'expectation', since mask={mask!r} draws nothing and "
                f"is the same in training and evaluation, got {at_eval!r}"
            )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Noise) and type(self) is type(other) and self._key() == other._key()
        )

    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    def _key(self) -> tuple[Any, ...]:
        """Return all fields as hashable values."""
        return tuple(_plain(getattr(self, field.name)) for field in dataclasses.fields(self))

    def __repr__(self) -> str:
        shown = (
            f"{field.name}={self._shown(field.name)!r}"
            for field in dataclasses.fields(self)
            if _plain(getattr(self, field.name)) != _plain(field.default)
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    def _shown(self, field: str) -> Any:
        """Return a field as messages show it, without the values of tensors."""
        return _plain(getattr(self, field), short=True)


def _positional_error(
    cls: type[Noise], positional: tuple[Any, ...], given: dict[str, Any]
) -> TypeError:
    """Return the error for a noise that is built with positional arguments.

    They are not allowed because libraries disagree on which state a single rate belongs to.
    """
    name = cls.__name__
    free = [field.name for field in dataclasses.fields(cls) if field.name not in given]
    rates = [name for name, stream in cls.fields.items() if name in free and stream not in DEPTH]
    one_for_several = len(positional) == 1 and len(rates) > 1
    keywords = dict(zip(free, positional))
    if one_for_several:
        keywords = dict.fromkeys(rates, positional[0])
    written = ", ".join(f"{field}={in_code(value)}" for field, value in (keywords | given).items())
    return TypeError(
        f"{name}: expected keywords, got {len(positional)} positional "
        f"argument{'s' * (len(positional) > 1)} ({', '.join(map(in_code, positional))}); write "
        f"{name}({written})" + ", or only one of them" * one_for_several
    )


def in_code(value: Any) -> str:
    """Return a value as it is written in code, or "…" for anything but a number or string."""
    return repr(value) if isinstance(value, (bool, int, float, str)) else "…"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StateNoise(Noise):
    """The base class of the methods that replace units of the states."""

    cell: Rate = 0.0
    hidden: Rate = 0.0
    mask: str = "unit"
    at_eval: str = "expectation"
    seed: int | None = None
    states: StateRates = ()  # kept as sorted pairs: hashable, and nobody can change them

    fields: ClassVar[dict[str, str]] = {"cell": "cell", "hidden": "hidden"}
    masks: ClassVar[tuple[str, ...]] = (*DRAWN, "rate")
    by: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = _check_states(self.states, type(self).__name__, self.limit)
        object.__setattr__(self, "states", pairs)

    def state_entries(self, cell: Definition) -> list[Entry]:
        streams = {group[0]: stream for stream, group in state_groups(cell).items()}
        rates = dict(self.states).items()
        return [Entry("states", streams.get(state, ""), rate, state) for state, rate in rates]

    def entries(self, cell: Definition | None = None) -> list[Entry]:
        if cell is None:
            self._check_no_states()
            return self.field_entries()
        entries = {entry.stream: entry for entry in super().entries(cell)}
        for stream, group in state_groups(cell).items():
            entries.setdefault(stream, Entry("states", stream, 0.0, group[0]))
        for entry in self.state_entries(cell):
            if not entry.stream:
                raise misfit_error(self, no_state(cell, cell.name, entry.state))
            if not is_zero((other := entries[entry.stream]).rate):
                raise ValueError(
                    f"noise: expected one rate for the state {entry.state}, got {other.field} and "
                    f"states[{entry.state!r}] in {self}; leave one of them out"
                )
            entries[entry.stream] = entry
        return list(entries.values())

    def _check_no_states(self) -> None:
        """Raise if there are rates in `states`, whose streams depend on the cell."""
        if self.states:
            name, states = type(self).__name__, ", ".join(dict(self.states))
            raise ValueError(
                f"{name}(states=…): expected the definition of a cell with the states {states}, "
                "got none; pass cell=…, or use only hidden=… and cell=… for its first two states"
            )

    def rule(self, stream: str) -> Rule:
        return Rule(stream, self.by, self.mask, self.at_eval)

    def _shown(self, field: str) -> Any:
        if field != "states":
            return super()._shown(field)
        return {state: _plain(rate, short=True) for state, rate in dict(self.states).items()}


def _check_states(states: Any, name: str, limit: float) -> tuple[tuple[str, Rate], ...]:
    """Return the rates of states as pairs, sorted by the name of the state; or raise."""
    pairs = tuple(states.items()) if isinstance(states, Mapping) else states
    if not isinstance(pairs, tuple) or not all(_is_pair(pair) for pair in pairs):
        got = type(states).__name__
        raise TypeError(f"{name}(states=…): expected a dict such as {{'n': 0.1}}, got {got}")
    checked = {}
    for state, rate in pairs:
        if not isinstance(state, str) or not state.isidentifier():
            raise ValueError(f"{name}(states=…): expected names of states, got {state!r}")
        checked[state] = check_rate(rate, f"{name}({_argument('states', state, '…')})", limit)
    return tuple((state, checked[state]) for state in sorted(checked))


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Zoneout(StateNoise):
    """Zoneout: random units of the states keep their previous value.

    Args:
        cell: the probability that a unit of c, the second state, keeps its previous value: a
            number, a list with one rate per layer, or a tensor with one rate per unit.
        hidden: the same for h, the first state.
        mask: what the masks depend on. `"unit"` is the zoneout of the paper. `"shared"` uses one
            mask for all states. `"step"` is stochastic depth through time. `"sequence"` uses one
            mask per sequence. `"static"` draws masks from `seed` once for the whole training, the
            same for all examples and calls.
        at_eval: the behaviour in evaluation: `"expectation"` uses the rate in place of the mask,
            `"off"` disables the noise, `"sample"` draws masks as in training.
        seed: the seed of a static mask; only with `mask="static"`.
        states: rates by the names that the definition of a cell gives to its states, as a dict.
            A group of states has one rate, under the name of its first state.
        depth: the probability that a unit of a layer's output is that of the layer below, in all
            layers of a stack but the first (SkipForward, zoneout over depth).
        periods: with `mask="clock"`, in place of rates: a unit is updated at the steps that are a
            multiple of its period, and keeps all its states at the others (clockwork RNN). A whole
            number, a list with one per layer, or a tensor with one per unit.

    Two kinds of masks are not drawn. With `mask="rate"` the rate itself replaces the mask, in
    training too: a rate that is computed or learned has its exact gradient, and a rate of zeros and
    ones is a mask that the caller gives (`rates=` in the layer's call). `mask="clock"` follows from
    the step.

    >>> Zoneout(cell=0.5, hidden=0.05)
    Zoneout(cell=0.5, hidden=0.05)
    >>> Zoneout(hidden=0.05, states={"n": 0.1})
    Zoneout(hidden=0.05, states={'n': 0.1})
    >>> Zoneout(mask="clock", periods=[1, 2, 4])
    Zoneout(mask='clock', periods=[1, 2, 4])
    """

    depth: Rate = 0.0
    periods: Periods = ()

    fields: ClassVar[dict[str, str]] = {"cell": "cell", "hidden": "hidden", "depth": "depth"}
    masks: ClassVar[tuple[str, ...]] = tuple(MASKS)
    by: ClassVar[str] = "previous"

    def __post_init__(self) -> None:
        super().__post_init__()
        ticks = self.mask == "clock"
        if not ticks and not isinstance(self.periods, Tensor) and self.periods == ():
            return
        if not ticks:
            raise ValueError(
                f"Zoneout(periods=…): expected mask='clock' with periods, got mask={self.mask!r}"
            )
        rates = [entry.written() for entry in super().field_entries() if not is_zero(entry.rate)]
        if rates or self.states:
            raise ValueError(
                "Zoneout(mask='clock'): expected periods in place of rates, got "
                f"{', '.join(rates) or 'states=…'}"
            )
        object.__setattr__(self, "periods", check_periods(self.periods, "Zoneout(periods=…)"))

    def field_entries(self) -> list[Entry]:
        if self.mask != "clock":
            return super().field_entries()
        return [Entry("periods", "hidden", self.periods)]

    def entries(self, cell: Definition | None = None) -> list[Entry]:
        if self.mask != "clock" or cell is None:
            return super().entries(cell)
        return [Entry("periods", stream, self.periods) for stream in state_groups(cell)]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Swapout(Noise):
    """Swapout: a state is Θ₁ ⊙ old + Θ₂ ⊙ new, with two masks. The same over depth.

    All rates of 0 are no noise. Dropout of the new value is `hidden_new` alone. A residual
    recurrence, old + new, is `hidden_old=1`. With the same rate for both and `mask="shared"`, the
    old value is added where the new one is left out: that is zoneout.

    Args:
        hidden_old: the probability that the previous value of h is added, P(Θ₁ = 1); a number, a
            list with one rate per layer, or a tensor with one rate per unit.
        hidden_new: the probability that the new value of h is left out, P(Θ₂ = 0).
        cell_old, cell_new: the same for c, the second state.
        depth_old, depth_new: the same for the outputs of a layer of a stack: in all layers but the
            first, the output of the layer below is the old value.
        mask: as in `Zoneout`, for drawn masks. `"shared"` uses one mask for all of them.
        at_eval: as in `Zoneout`.
        seed: as in `Zoneout`.

    >>> import torch, zoneout as zo
    >>> layer = zo.LSTM(3, 5, noise=zo.Swapout(hidden_old=0.2, hidden_new=0.2))
    >>> y, (h, c) = layer(torch.randn(4, 2, 3))
    """

    hidden_old: Rate = 0.0
    hidden_new: Rate = 0.0
    cell_old: Rate = 0.0
    cell_new: Rate = 0.0
    depth_old: Rate = 0.0
    depth_new: Rate = 0.0
    mask: str = "unit"
    at_eval: str = "expectation"
    seed: int | None = None

    fields: ClassVar[dict[str, str]] = {
        f"{what}_{value}": what if value == "old" else f"drop_{what}"
        for what in ("hidden", "cell", "depth")
        for value in ("old", "new")
    }

    def rule(self, stream: str) -> Rule:
        by = "zero" if stream.startswith("drop_") else "added"
        return Rule(stream, by, self.mask, self.at_eval)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StateDropout(StateNoise):
    """Dropout on the recurrent connections: random units of the states are set to zero.

    h is computed from the masked c. With `mask="sequence"` and a cell rate this is rnnDrop.

    Args:
        cell, hidden, states: as in `Zoneout`; a rate is the probability that a unit becomes zero.
        mask, at_eval, seed: as in `Zoneout`.

    >>> import torch, zoneout as zo
    >>> layer = zo.LSTM(3, 5, noise=zo.StateDropout(cell=0.25, mask="sequence"))
    >>> y, (h, c) = layer(torch.randn(4, 2, 3))
    """

    by: ClassVar[str] = "zero"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RecurrentDropout(Noise):
    """Recurrent dropout: random units of the update are set to zero.

    The update is i ⊙ g in an LSTM and (1 − z) ⊙ n in a GRU. A plain RNN has no update. The
    definition of another cell marks its update.

    Args:
        rate: the probability that a unit of the update becomes zero; see `Zoneout` for its forms.
        mask: as in `Zoneout`, except `"shared"`.
        hold_output_gate: True makes a unit with a dropped update also keep its output gate of the
            previous step, so that a cell without an update is not exposed (LSTM, and
            cells whose definition marks such a gate).
        at_eval: as in `Zoneout`.
        seed: as in `Zoneout`.

    >>> import torch, zoneout as zo
    >>> layer = zo.LSTM(3, 5, noise=zo.RecurrentDropout(rate=0.25))
    >>> y, (h, c) = layer(torch.randn(4, 2, 3))
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
            raise TypeError(
                "RecurrentDropout(hold_output_gate=…): expected a bool, got "
                f"{self.hold_output_gate!r}"
            )

    def rule(self, stream: str) -> Rule:
        return Rule(stream, "zero", self.mask, self.at_eval, self.hold_output_gate)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class VariationalDropout(Noise):
    """Variational dropout: one mask per sequence on the input and on h where h enters the gates.

    The units that are kept are scaled by 1 / (1 − rate).

    Args:
        input: the rate for the input of the layer; see `Zoneout` for its forms.
        hidden: the rate for h.
        tied: one mask for all gates. If False, each gate has masks of its own, on x and on h; a
            rate is then a number, or one for each layer, and h needs a dense matrix, at most 4
            gates, no norm and no projection.
        at_eval: `"sample"` draws masks in evaluation too; otherwise evaluation has no noise.

    >>> import torch, zoneout as zo
    >>> layer = zo.GRU(3, 5, noise=zo.VariationalDropout(input=0.4, hidden=0.25))
    >>> y, h = layer(torch.randn(4, 2, 3))
    """

    input: Rate = 0.0
    hidden: Rate = 0.0
    tied: bool = True
    at_eval: str = "expectation"

    fields: ClassVar[dict[str, str]] = {"input": "input", "hidden": "variational_hidden"}

    def field_entries(self) -> list[Entry]:
        entries = super().field_entries()
        return entries if self.tied else [e._replace(stream=f"untied_{e.field}") for e in entries]

    def rule(self, stream: str) -> Rule:
        return Rule(stream, "scaled zero", "sequence", self.at_eval)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FastDropout(Noise):
    """Fast dropout: products are Gaussian numbers, as those with dropped factors nearly are.

    Of a product Σ w x whose factors x are dropped at a rate p, the mean is Σ (1 − p) w x, and the
    variance Σ p (1 − p) w² x². One normal number for each gate of each unit takes the place of a
    mask. In evaluation the products have their mean. Nothing is scaled up.

    Args:
        input: the rate for the product of the layer's input and W_ih; see `Zoneout` for its forms.
        hidden: the rate for the product of h and W_hh, for cells of up to 4 gates with a dense
            matrix. The step then has two products.
        at_eval: as in `Zoneout`; `"off"` uses the products as they are.

    >>> import torch, zoneout as zo
    >>> layer = zo.LSTM(3, 5, noise=zo.FastDropout(input=0.2, hidden=0.1))
    >>> y, (h, c) = layer(torch.randn(4, 2, 3))
    """

    input: Rate = 0.0
    hidden: Rate = 0.0
    at_eval: str = "expectation"

    fields: ClassVar[dict[str, str]] = {"input": "fast_input", "hidden": "fast_hidden"}

    def rule(self, stream: str) -> Rule:
        return Rule(stream, "gaussian", "unit", self.at_eval)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class WeightDrop(Noise):
    """WeightDrop: one mask per call on the recurrent weight matrices.

    The weights that are kept are scaled by 1 / (1 − rate).

    Args:
        rate: the probability that a weight becomes zero: a number, or a list with one per layer.
        at_eval: `"sample"` draws masks in evaluation too; otherwise evaluation has no noise.

    >>> import torch, zoneout as zo
    >>> layer = zo.LSTM(3, 5, noise=zo.WeightDrop(rate=0.5))
    >>> y, (h, c) = layer(torch.randn(4, 2, 3))
    """

    rate: Rate = 0.0
    at_eval: str = "expectation"

    fields: ClassVar[dict[str, str]] = {"rate": "weight"}

    def rule(self, stream: str) -> Rule:
        return Rule(stream, "scaled zero", "sequence", self.at_eval)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class WeightNoise(Noise):
    """Gaussian noise on every weight matrix, drawn once per call.

    Biases and initial states get no noise.

    Args:
        std: the standard deviation: a number, or a list with one per layer.
        at_eval: `"sample"` draws noise in evaluation too; otherwise evaluation has no noise.

    >>> import torch, zoneout as zo
    >>> layer = zo.RNN(3, 5, noise=zo.WeightNoise(std=0.075))
    >>> y, h = layer(torch.randn(4, 2, 3))
    """

    std: Rate = 0.0
    at_eval: str = "expectation"

    fields: ClassVar[dict[str, str]] = {"std": "weight_noise"}
    limit: ClassVar[float] = math.inf

    def rule(self, stream: str) -> Rule:
        return Rule(stream, "sum", "sequence", self.at_eval)


# These classes hold only numbers and strings, so `torch.load(weights_only=True)` may build them.
CLASSES: list[Any] = [Zoneout, Swapout, StateDropout, RecurrentDropout, VariationalDropout]
CLASSES += [FastDropout, WeightDrop, WeightNoise]
torch.serialization.add_safe_globals(CLASSES)


def _plain(value: Any, short: bool = False) -> Any:
    """Return a field as plain numbers; with `short`, show only the number of rates in a tensor."""
    if isinstance(value, Tensor):
        return f"<{len(value)} rates>" if short else tuple(value.tolist())
    if isinstance(value, tuple):
        return (
            [_plain(one, short) for one in value] if short else tuple(_plain(one) for one in value)
        )
    return value


# --- a noise and a cell ---------------------------------------------------------------------------


class Misfit(NamedTuple):
    """A field of a noise that does not apply to a cell; of `states`, one of its rates."""

    field: str
    why: str
    remedy: str
    state: str = ""


def no_state(cell: Definition, name: str, state: str) -> Misfit:
    """Return the misfit for a key of `states` that is not the name of a state or group."""
    if state not in cell.states:
        remedy = f"expected the name of a state, got {state!r}"
        return Misfit("states", states_of(cell, name), remedy, state)
    group = next(group for group in cell.groups if state in group)
    why = f"the states {', '.join(group)} of {name} form a group, with one rate under {group[0]!r}"
    return Misfit("states", why, f"expected {group[0]!r}, got {state!r}", state)


def states_of(cell: Definition, name: str) -> str:
    """Return a sentence with the states of a cell; a group is in parentheses."""
    if len(cell.states) == 1:
        return f"{name} has one state, {cell.states[0]}"
    groups = [group[0] if len(group) == 1 else f"({', '.join(group)})" for group in cell.groups]
    return f"{name} has the states {', '.join(groups)}"


def misfit_error(noise: Noise, misfit: Misfit) -> ValueError:
    """Return the error for a field that does not apply."""
    field, why, remedy, state = misfit
    written = f"{type(noise).__name__}({shown_entry(noise, field, state)})"
    return ValueError(f"noise: {written} does not apply, {why}; {remedy}")


def shown_entry(noise: Noise, field: str, state: str) -> str:
    """Return a rate of a noise as an argument in code, as messages show it."""
    shown = noise._shown(field)[state] if state else noise._shown(field)
    return _argument(field, state, repr(shown))
