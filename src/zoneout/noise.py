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
import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from .definition import Definition
from .definition.gaussian import MOST_GATES
from .philox import as_seed
from .rates import Rate, check_periods, check_rate, is_zero

Periods: TypeAlias = "int | Tensor | Sequence[int | Tensor]"
StateRates: TypeAlias = "Mapping[str, Rate] | tuple[tuple[str, Rate], ...]"  # by a state's name


# --- coordinates of a draw ------------------------------------------------------------------------


class Sees(NamedTuple):
    """The coordinates that a draw depends on, in addition to layer and direction."""

    stream: bool
    step: bool
    example: bool
    unit: bool


MASKS = {  # the mask kinds
    "unit": Sees(True, True, True, True),  # zoneout
    "shared": Sees(False, True, True, True),  # one mask for all states
    "step": Sees(True, True, True, False),  # stochastic depth through time
    "sequence": Sees(True, False, True, True),  # rnnDrop, variational dropout
    "static": Sees(True, True, False, True),  # static identity connections; the noise has the seed
    # Not drawn, and the same in training and evaluation:
    "rate": Sees(True, True, True, True),  # the rate itself: learned, or a mask of zeros and ones
    "clock": Sees(True, True, True, True),  # a unit is updated at the multiples of its period
}
DRAWN = ("unit", "shared", "step", "sequence", "static")


class Stream(NamedTuple):
    """The random bits of a stream: half of each 32-bit word of a group of counters."""

    group: int  # part of the last counter word; see `plane`
    half: int  # 0: the low 16 bits of a word, 1: the high 16 bits


STREAMS = {
    "cell": Stream(0, 0),
    "hidden": Stream(0, 1),
    "update": Stream(1, 0),
    "dropout": Stream(1, 1),  # the `dropout` argument of torch.nn, between the layers
    "input": Stream(2, 0),
    "variational_hidden": Stream(2, 1),
    "weight": Stream(3, 0),
    "weight_noise": Stream(4, 0),
    "state2": Stream(5, 0),
    "state3": Stream(5, 1),
    # What is left out of the new value of a state, where the old value is added to it.
    "drop_cell": Stream(6, 0),
    "drop_hidden": Stream(6, 1),
    "drop_state2": Stream(7, 0),
    "drop_state3": Stream(7, 1),
    # The outputs of a layer of a stack: its input takes their place, or is added to them.
    "drop_depth": Stream(8, 0),
    "depth": Stream(8, 1),
    # Normal numbers, one for each result of a product: all bits of a word.
    "fast_input": Stream(4096, 0),
    "fast_hidden": Stream(4097, 0),
    # One mask for each gate, in the place of one for all gates; units count on over the gates.
    "untied_input": Stream(4098, 0),
    "untied_hidden": Stream(4098, 1),
}
STATE_STREAMS = ("hidden", "cell", "state2", "state3")  # the stream of each state, by position
DROPS = tuple(f"drop_{stream}" for stream in STATE_STREAMS)
DEPTH = ("depth", "drop_depth")
UNTIED = ("untied_input", "untied_hidden")
OPTIONAL = (*DROPS, *DEPTH, "fast_input", "fast_hidden", *UNTIED)  # streams that few models use


class Rule(NamedTuple):
    """One stream of a noise method, without rates and seeds."""

    stream: str
    # "previous", "zero", "scaled zero" (inverted scaling), "added" (the previous value is added to
    # the new one), "sum" (noise is added), or "gaussian" (a product is drawn)
    by: str
    mask: str
    at_eval: str
    holds_gate: bool = False  # units with a dropped update also keep their previous output gate


def bits_of(rule: Rule) -> Stream:
    """Return the random bits that the masks of a rule are drawn from."""
    if MASKS[rule.mask].stream:
        return STREAMS[rule.stream]
    return STREAMS["depth" if rule.stream in DEPTH else "cell"]


def plane(source: str | Rule, layer: int, direction: int) -> int:
    """Return the last word of the counter, which is constant during one run over time.

    `source` is a rule, or the name of a stream whose mask is not shared.
    """
    bits = STREAMS[source] if isinstance(source, str) else bits_of(source)
    return 2 * layer + direction + 65536 * bits.group


# --- the streams of a cell ------------------------------------------------------------------------


def state_groups(cell: Definition) -> dict[str, tuple[str, ...]]:
    """Return the states of each stream of a cell, by stream.

    States that form a group share the stream of the group's first state.
    """
    return {STATE_STREAMS[cell.states.index(group[0])]: group for group in cell.groups}


def streams_of(cell: Definition) -> tuple[str, ...]:
    """Return the streams that a cell has, those of its states first."""
    states = tuple(state_groups(cell))
    update = ("update",) if "update" in cell.marks else ()
    matrix = ("variational_hidden", "weight") if cell.has_r else ()
    drops = (f"drop_{stream}" for stream in states)
    dense = cell.recurrence == "dense" and cell.gates <= MOST_GATES
    fast = ("fast_input", "fast_hidden") if dense else ("fast_input",)
    untied = UNTIED if dense else UNTIED[:1]
    return (*states, *update, "input", *matrix, "weight_noise", *drops, *DEPTH, *fast, *untied)


# --- the methods ----------------------------------------------------------------------------------


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
                got = ", ".join(f"{name}={_written(given[name])}" for name in unknown)
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
    written = ", ".join(f"{field}={_written(value)}" for field, value in (keywords | given).items())
    return TypeError(
        f"{name}: expected keywords, got {len(positional)} positional "
        f"argument{'s' * (len(positional) > 1)} ({', '.join(map(_written, positional))}); write "
        f"{name}({written})" + ", or only one of them" * one_for_several
    )


def _written(value: Any) -> str:
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
_CLASSES: list[Any] = [Zoneout, Swapout, StateDropout, RecurrentDropout, VariationalDropout]
_CLASSES += [FastDropout, WeightDrop, WeightNoise]
torch.serialization.add_safe_globals(_CLASSES)


def _plain(value: Any, short: bool = False) -> Any:
    """Return a field as plain numbers; with `short`, show only the number of rates in a tensor."""
    if isinstance(value, Tensor):
        return f"<{len(value)} rates>" if short else tuple(value.tolist())
    if isinstance(value, tuple):
        return (
            [_plain(one, short) for one in value] if short else tuple(_plain(one) for one in value)
        )
    return value


# --- arguments that are no noises -----------------------------------------------------------------

_NAMES = {re.sub(r"(?<!^)([A-Z])", r"_\1", kind.__name__).lower(): kind for kind in _CLASSES}
_NAMES |= {"zoneout_rate": Zoneout, "zoneout_prob": Zoneout, "weight_dropout": WeightDrop}


def check_options(options: Mapping[str, Any], call: Any, cell: Definition | None) -> None:
    """Raise if one of the options of a constructor is the name of a method, and is not in `call`.

    >>> check_options({"zoneout": 0.1}, lambda size: ..., None)
    Traceback (most recent call last):
        ...
    TypeError: zoneout: expected it in noise=, got zoneout=0.1; try noise=zo.Zoneout(cell=0.1,
        hidden=0.1), or only one of them
    """
    for name in options.keys() & _NAMES.keys():
        known = inspect.signature(call).parameters.values()
        if any(one.name == name or one.kind is one.VAR_KEYWORD for one in known):
            continue  # a user's subclass has such an argument
        value = options[name]
        keras = f"; what Keras calls so is zo.VariationalDropout(hidden={_written(value)})"
        raise TypeError(
            f"{name}: expected it in noise=, got {name}={_written(value)}; try "
            f"noise={_with_rate(_NAMES[name], value, cell)}"
            + (keras if name == "recurrent_dropout" else "")
        )


def _no_noise_error(value: Any) -> TypeError:
    """Return the error for something in `noise=` that is no noise, with what may be meant."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    got = str(value) if number else type(value).__name__
    if isinstance(value, type) and issubclass(value, Noise):
        got = f"the class {value.__name__}"
    meant = _with_rate(Zoneout, value if number and 0 <= value <= 1 else 0.1)
    return TypeError(
        f"noise: expected {', '.join(kind.__name__ for kind in _CLASSES)}, a list of them or None, "
        f"got {got}; try {meant}"
    )


def _with_rate(kind: type[Noise], rate: Any, cell: Definition | None = None) -> str:
    """Return a noise as it is written in code, with one rate for all that a cell has."""
    has = [*STREAMS, *STATE_STREAMS] if cell is None else streams_of(cell)
    fields = [field for field, of in kind.fields.items() if of in has and of not in DEPTH]
    # With none that applies: all, and the error of the noise says why.
    fields = fields[:1] if kind is Swapout else fields or [*kind.fields]
    written = ", ".join(f"{field}={_written(rate)}" for field in fields)
    return f"zo.{kind.__name__}({written})" + ", or only one of them" * (len(fields) > 1)


# --- combining methods ----------------------------------------------------------------------------


def as_noises(noise: Noise | Iterable[Noise] | None) -> tuple[Noise, ...]:
    """Return the noises as a tuple; raise unless each class and each stream occurs only once.

    What rates in `states` belong to is known with a cell only: see `check_fits`.
    """
    listed: Any = (noise,) if isinstance(noise, Noise) or not isinstance(noise, Iterable) else noise
    noises: tuple[Noise, ...] = () if noise is None else tuple(listed)
    for index, one in enumerate(noises):
        if not isinstance(one, Noise):
            raise _no_noise_error(one)
        if any(type(one) is type(other) for other in noises[:index]):
            raise ValueError(
                f"noise: {type(one).__name__} is there twice, expected each method once"
            )
    check_claims(noises)
    return noises


def check_claims(noises: tuple[Noise, ...], cell: Definition | None = None) -> None:
    """Raise if two noises replace the same stream; with a cell, rates in `states` count too."""
    claimed: dict[str, str] = {}
    for one in noises:
        for entry in one.field_entries() if cell is None else one.entries(cell):
            if is_zero(entry.rate):
                continue
            stream = _SAME.get(entry.stream, entry.stream)
            written = f"{type(one).__name__}({_shown_entry(one, entry.field, entry.state)})"
            if stream in claimed:
                groups = {} if cell is None else state_groups(cell)
                named = stream in groups
                what = f"state {groups[stream][0]}" if named else f"{stream} state"
                raise ValueError(
                    f"noise: both {claimed[stream]} and {written} replace the {what}, "
                    "expected one method for each state"
                )
            claimed[stream] = written


# Two methods for the same factors of a product.
_SAME = {"fast_input": "input", "fast_hidden": "variational_hidden"}
_SAME |= {"untied_input": "input", "untied_hidden": "variational_hidden"}


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
    written = f"{type(noise).__name__}({_shown_entry(noise, field, state)})"
    return ValueError(f"noise: {written} does not apply, {why}; {remedy}")


def _shown_entry(noise: Noise, field: str, state: str) -> str:
    """Return a rate of a noise as an argument in code, as messages show it."""
    shown = noise._shown(field)[state] if state else noise._shown(field)
    return _argument(field, state, repr(shown))
