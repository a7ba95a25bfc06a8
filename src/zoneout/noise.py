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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, SupportsFloat, TypeAlias

import torch
from torch import Tensor

from .philox import as_seed, philox

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


@dataclass(frozen=True, eq=False)
class Noise:
    """The common part of all methods. Two noises are equal when all their fields are."""

    fields: ClassVar[dict[str, str]] = {}  # the rate fields, and the stream each is the rate of
    masks: ClassVar[tuple[str, ...]] = tuple(MASKS)

    def rules(self) -> tuple[Rule, ...]:
        """One rule a stream that has a rate other than zero."""
        return tuple(self.rule(field) for field in self.fields if not is_zero(getattr(self, field)))

    def rule(self, field: str) -> Rule:
        raise NotImplementedError

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in self.fields:
            object.__setattr__(self, field, check_rate(getattr(self, field), f"{name}({field}=…)"))
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


@dataclass(frozen=True, eq=False, repr=False)
class Zoneout(Noise):
    """Units of the states keep their previous value.

    `cell` and `hidden` are the chances of that. `mask` says what the draws see: `"unit"` is the paper's
    zoneout, `"shared"` one mask for both states, `"step"` stochastic depth through time, `"sequence"` one
    mask a sequence, `"static"` one mask for the whole training (drawn from `seed`).

    >>> Zoneout(cell=0.5, hidden=0.05)
    Zoneout(cell=0.5, hidden=0.05)
    """

    cell: Rate = 0.0
    hidden: Rate = 0.0
    mask: str = "unit"
    at_eval: str = "expectation"
    seed: int | None = None

    fields: ClassVar[dict[str, str]] = {"cell": "cell", "hidden": "hidden"}

    def rule(self, field: str) -> Rule:
        return Rule(field, "previous", self.mask, self.at_eval)


@dataclass(frozen=True, eq=False, repr=False)
class StateDropout(Noise):
    """Units of the states are set to zero: dropout on the recurrent connections.

    h is computed from the masked c. With `mask="sequence"` and a cell rate it is rnnDrop.
    """

    cell: Rate = 0.0
    hidden: Rate = 0.0
    mask: str = "unit"
    at_eval: str = "expectation"
    seed: int | None = None

    fields: ClassVar[dict[str, str]] = {"cell": "cell", "hidden": "hidden"}

    def rule(self, field: str) -> Rule:
        return Rule(field, "zero", self.mask, self.at_eval)


@dataclass(frozen=True, eq=False, repr=False)
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

    def rule(self, field: str) -> Rule:
        return Rule("update", "zero", self.mask, self.at_eval, self.hold_output_gate)


@dataclass(frozen=True, eq=False, repr=False)
class VariationalDropout(Noise):
    """One mask a sequence on the layer's input and on h where it enters the gates, with inverted scaling."""

    input: Rate = 0.0
    hidden: Rate = 0.0
    at_eval: str = "expectation"

    fields: ClassVar[dict[str, str]] = {"input": "input", "hidden": "variational_hidden"}

    def rule(self, field: str) -> Rule:
        return Rule(self.fields[field], "scaled zero", "sequence", self.at_eval)


@dataclass(frozen=True, eq=False, repr=False)
class WeightDrop(Noise):
    """One mask a call on the recurrent matrices, with inverted scaling."""

    rate: Rate = 0.0
    at_eval: str = "expectation"

    fields: ClassVar[dict[str, str]] = {"rate": "weight"}

    def rule(self, field: str) -> Rule:
        return Rule("weight", "scaled zero", "sequence", self.at_eval)


@dataclass(frozen=True, eq=False, repr=False)
class WeightNoise(Noise):
    """Gaussian noise on every weight matrix, one draw a call; none on biases or initial states."""

    std: Rate = 0.0
    at_eval: str = "expectation"

    fields: ClassVar[dict[str, str]] = {"std": "weight_noise"}

    def rule(self, field: str) -> Rule:
        return Rule("weight_noise", "sum", "sequence", self.at_eval)


# --- rates -----------------------------------------------------------------------------------------


def check_rate(rate: Rate, name: str) -> Rate:
    """The rate in its plain form (float, float64 tensor, or a tuple of one of these a layer), or an error."""
    if getattr(rate, "ndim", 0) and hasattr(rate, "__array__"):
        rate = torch.as_tensor(rate)
    if isinstance(rate, Tensor):
        if rate.is_complex() or rate.dtype == torch.bool or rate.dim() > 1 or rate.numel() == 0:
            raise ValueError(
                f"{name}: expected a tensor with one rate a unit, got {rate.dtype} of shape {tuple(rate.shape)}"
            )
        rate = rate.detach().to("cpu", torch.float64, copy=True)
        if rate.dim() == 0:
            return check_rate(rate.item(), name)
        _check_range(rate.min().item(), name)
        _check_range(rate.max().item(), name)
        return rate
    if isinstance(rate, (list, tuple)):
        if not rate:
            raise ValueError(f"{name}: expected one rate a layer, got an empty list")
        if any(isinstance(one, (list, tuple)) for one in rate):
            raise TypeError(f"{name}: expected one rate a layer, got a list inside a list")
        return tuple(check_rate(one, name) for one in rate)  # type: ignore[misc]
    if isinstance(rate, (bool, str)) or not isinstance(rate, SupportsFloat):  # NumPy's numbers are welcome
        raise TypeError(
            f"{name}: expected a number, a list of one a layer or a tensor of one a unit, got {type(rate).__name__}"
        )
    _check_range(float(rate), name)
    return float(rate)


def _check_range(value: float, name: str) -> None:
    if name.startswith("WeightNoise"):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}: expected a standard deviation, finite and not negative, got {value}")
    elif not 0 <= value <= 1:
        raise ValueError(f"{name}: expected a rate between 0 and 1, got {value}")


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
    if isinstance(rate, Tensor) and units is None:
        raise ValueError(f"{name}: expected a number or a list of one a layer, got a tensor of one a unit")
    if isinstance(rate, Tensor) and len(rate) != units:
        raise ValueError(f"{name}: expected one rate for each of {units} units, got {len(rate)}")
    return torch.as_tensor(rate, dtype=torch.float64)


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


def misfits(noise: Noise, kind: str, one_step: bool = False) -> list[tuple[str, str]]:
    """The fields of a noise that mean nothing in a cell of this kind, each with the reason."""
    name, wrong = kind.upper(), []
    for field, stream in noise.fields.items():
        if stream not in KINDS[kind] and not is_zero(getattr(noise, field)):
            why = f"a {name} has no cell" if stream == "cell" else f"a plain {name} has no gated {stream}"
            wrong.append((field, why))
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


def restrict(noises: tuple[Noise, ...], kind: str, one_step: bool = False) -> tuple[tuple[Noise, ...], list[str]]:
    """What of the noises applies to a cell of this kind, and a phrase for each thing that does not."""
    kept, dropped = [], []
    for noise in noises:
        wrong = misfits(noise, kind, one_step)
        changes: dict[str, Any] = {field: False if field == "hold_output_gate" else 0.0 for field, _ in wrong}
        dropped += [f"{type(noise).__name__}'s {field} ({why})" for field, why in wrong]
        noise = dataclasses.replace(noise, **changes)
        if noise.rules() or not wrong:
            kept.append(noise)
    return tuple(kept), dropped


# --- drawing ---------------------------------------------------------------------------------------


class Draw(NamedTuple):
    """One stream of one run over time, ready for a backend: its rule, its numbers, where its bits are."""

    rule: Rule
    rate: Tensor  # float64, a scalar or one a unit
    seed: Tensor | None  # None: nothing is drawn, the expectation stands in the mask's place
    plane: int

    @property
    def threshold(self) -> Tensor:
        """The old value is kept where 16 random bits are below this."""
        return (self.rate * 65536).round().to(torch.int64)


def words(seed: Tensor, steps: Tensor, examples: Tensor, units: int, plane: int) -> Tensor:
    """32 random bits for each coordinate, [steps, examples, units]."""
    c0 = torch.arange((units + 3) // 4, device=seed.device)
    c3 = torch.full((), plane, device=seed.device)
    four = philox(seed, c0, examples[:, None], steps[:, None, None], c3)
    return torch.stack(torch.broadcast_tensors(*four), dim=-1).flatten(-2)[..., :units]


_BLOCK = 2**15  # counters at a time: the ten rounds then stay in the cache, and memory stays small


def draw_masks(draws: Sequence[Draw], steps: Tensor, examples: Tensor, units: int) -> list[Tensor]:
    """The masks of streams that share their group and mask kind, True where the old value is kept.

    Each is a bool tensor [steps, examples, units], of size 1 wherever the draw does not see.
    """
    seed, plane = draws[0].seed, draws[0].plane
    sees = MASKS[draws[0].rule.mask]
    assert seed is not None and all(d.plane == plane for d in draws)
    steps = steps if sees.step else steps.new_zeros(1)
    examples = examples if sees.example else examples.new_zeros(1)
    units = units if sees.unit else 1
    block = max(1, 4 * _BLOCK // max(1, units * len(examples)))
    parts = []
    for some in steps.split(block):
        bits = words(seed, some, examples, units, plane)
        low, high = bits & 0xFFFF, bits >> 16
        halves = (high if sees.stream and STREAMS[d.rule.stream].half else low for d in draws)
        parts.append([half < d.threshold for half, d in zip(halves, draws)])
    return [torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True)]


def draw_all(draws: Sequence[Draw], steps: Tensor, examples: Tensor, units: dict[str, int]) -> dict[str, Tensor]:
    """The mask of every stream that is drawn, by name; streams that share their bits draw them once."""
    groups: dict[tuple[Any, ...], list[Draw]] = {}
    for draw in draws:
        if draw.seed is not None:
            key = (draw.plane, draw.rule.mask, draw.rule.by, units[draw.rule.stream])
            groups.setdefault(key, []).append(draw)
    masks = {}
    for (_, _, _, count), group in groups.items():
        for draw, mask in zip(group, draw_masks(group, steps, examples, count), strict=True):
            masks[draw.rule.stream] = mask
    return masks


def normals(seed: Tensor, count: int, matrix: int, plane: int) -> Tensor:
    """Standard normal numbers, one for each element of a weight matrix (Box and Muller's method)."""
    wide = torch.float32 if seed.device.type == "mps" else torch.float64
    index = torch.arange((count + 3) // 4, device=seed.device)
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    w = [(word.to(wide) + 0.5) / 2**32 for word in philox(seed, index, zero + matrix, zero, zero + plane)]
    pairs = [
        ((-2 * a.log()).sqrt() * turn(2 * math.pi * b))
        for a, b in ((w[0], w[1]), (w[2], w[3]))
        for turn in (torch.cos, torch.sin)
    ]
    return torch.stack(pairs, dim=-1).flatten()[:count]


def masks(
    noise: Noise | Iterable[Noise],
    seed: int | Tensor,
    steps: int,
    batch: int,
    hidden: int,
    *,
    proj_size: int = 0,
    input_size: int | None = None,
    layer: int = 0,
    direction: int = 0,
    examples: int | Tensor | Sequence[int] | None = None,
    first_step: int = 0,
) -> dict[str, Tensor]:
    """The very masks that a layer draws from a seed: bool [steps, batch, units], True keeps the old value.

    One entry a stream of the noise: cell, hidden, update, input, variational_hidden. The input's mask has
    `input_size` units (`hidden` when not given): what the layer asked about has as its input.

    >>> m = masks(Zoneout(cell=0.5, hidden=0.05), seed=7, steps=100, batch=32, hidden=1000)
    >>> {stream: (tuple(mask.shape), round(mask.float().mean().item(), 2)) for stream, mask in m.items()}
    {'cell': ((100, 32, 1000), 0.5), 'hidden': ((100, 32, 1000), 0.05)}
    """
    units = stream_units(hidden, proj_size, hidden if input_size is None else input_size)
    where = plane("cell", check_count("layer", layer, 2**15), check_count("direction", direction, 2))
    check_count("first_step", first_step, 2**32 - steps)
    at = torch.arange(first_step, first_step + steps)
    rows = example_ids(examples, batch, torch.device("cpu"))
    out: dict[str, Tensor] = {}
    for one in as_noises(noise):
        for field, stream in one.fields.items():
            rates = getattr(one, field)
            if stream not in units or (stream in out and is_zero(rates)):
                continue  # a weight has no step and no example; another method has the stream
            name = f"{type(one).__name__}({field}=…)"
            if isinstance(rates, tuple) and layer >= len(rates):
                raise ValueError(
                    f"layer: expected one of the {len(rates)} layers that {name} has rates for, got {layer}"
                )
            count = len(rates) if isinstance(rates, tuple) else 1
            rate = rate_of_layer(rates, layer, count, units[stream], name)
            own = getattr(one, "seed", None)
            key = as_seed(seed if own is None else own, "cpu")
            draw = Draw(one.rule(field), rate, key, where + plane(stream, 0, 0))
            (mask,) = draw_masks([draw], at, rows, units[stream])
            out[stream] = mask.expand(steps, batch, units[stream]).contiguous()
    return out


def as_integers(name: str, values: Any, expected: str = "integers") -> Tensor:
    """A tensor of the values (an empty list has no dtype of its own), or an error."""
    empty = isinstance(values, (list, tuple)) and not values
    try:
        integers = torch.as_tensor(values, dtype=torch.int64 if empty else None)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: expected {expected}, got {values!r}") from None
    if integers.dtype == torch.bool or integers.is_floating_point() or integers.is_complex():
        raise TypeError(f"{name}: expected {expected}, got {integers.dtype}")
    return integers


def check_count(name: str, value: int, limit: int) -> int:
    """A whole number from 0 to below `limit`, or an error."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
        which = "0 or 1" if limit == 2 else f"a whole number, 0 or more and below {limit}"
        raise ValueError(f"{name}: expected {which}, got {value!r}")
    return value


def stream_units(hidden: int, proj_size: int, input_size: int) -> dict[str, int]:
    """How many units the state or input behind each stream has."""
    outputs = proj_size or hidden
    return {
        "cell": hidden,
        "hidden": outputs,
        "update": hidden,
        "input": input_size,
        "variational_hidden": outputs,
    }


def example_ids(examples: int | Tensor | Sequence[int] | None, batch: int, device: torch.device) -> Tensor:
    """The example coordinate of each row of the batch: an offset, or one id a row."""
    if examples is None:
        return torch.arange(batch, device=device)
    if isinstance(examples, int) and not isinstance(examples, bool):
        if not 0 <= examples <= 2**32 - max(batch, 1):
            raise ValueError(f"examples: expected an offset between 0 and 2³² − batch, got {examples}")
        return torch.arange(examples, examples + batch, device=device)
    ids = as_integers("examples", examples, "an offset or integer ids")
    if ids.dim() == 0:
        return (torch.arange(batch, device=device) + ids.to(device)) & 0xFFFFFFFF
    if ids.shape != (batch,):
        raise ValueError(f"examples: expected one id for each of {batch} rows, got shape {tuple(ids.shape)}")
    return ids.to(device=device, dtype=torch.int64) & 0xFFFFFFFF
