"""Drawing: a mask is a function of its coordinates.

Every Bernoulli draw is a pure function of the seed and of (layer, direction, step, example, unit, stream), so that
nothing random is stored: whoever needs a mask, on whatever device, draws it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .noise import MASKS, STREAMS, Noise, Rule, as_noises, in_65536ths, is_zero, plane, rate_of_layer, readable
from .philox import as_integer, as_seed, philox


class Draw(NamedTuple):
    """One stream of one run over time, ready for a backend: its rule, its numbers, where its bits are."""

    rule: Rule
    rate: Tensor  # float64, a scalar or one a unit
    seed: Tensor | None  # None: nothing is drawn, the expectation stands in the mask's place
    plane: int

    @property
    def threshold(self) -> Tensor:
        """The old value is kept where 16 random bits are below this."""
        return in_65536ths(self.rate).to(torch.int64)

    @property
    def scale(self) -> Tensor:
        """Inverted scaling: 1 / (1 − the rate as it is drawn), so that the mean is kept exactly; 0 at a rate of 1."""
        drawn = in_65536ths(self.rate)
        return torch.where(drawn < 65536, 65536 / (65536 - drawn), 0.0)


def widest(device: torch.device) -> torch.dtype:
    """The type of rates and of what is counted: float64, where a device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def constant(rule: Rule, rate: float, seed: Tensor, plane: int) -> Draw:
    """A draw whose rate is one number."""
    return Draw(rule, torch.full((), rate, dtype=widest(seed.device), device=seed.device), seed, plane)


def words(seed: Tensor, steps: Tensor, examples: Tensor, units: int, plane: int) -> Tensor:
    """32 random bits for each coordinate, [steps, examples, units]; a step may have examples of its own."""
    c0 = torch.arange((units + 3) // 4, device=seed.device)
    c3 = torch.full((), plane, device=seed.device)
    four = philox(seed, c0, examples[..., None], steps[:, None, None], c3)
    return torch.stack(torch.broadcast_tensors(*four), dim=-1).flatten(-2)[..., :units]


_BLOCK = 2**17  # counters at a time: enough for several threads, few enough to stay in their caches


def draw_masks(draws: Sequence[Draw], steps: Tensor, examples: Tensor, units: int) -> list[Tensor]:
    """The masks of streams that share their group and mask kind, True where the old value is kept.

    Each is a bool tensor [steps, examples, units], of size 1 wherever the draw does not see. `examples` are the same
    at every step, or [steps, examples].
    """
    seed, plane = draws[0].seed, draws[0].plane
    sees = MASKS[draws[0].rule.mask]
    assert seed is not None and all(d.plane == plane for d in draws)
    steps, examples, units = seen(draws, steps, examples, units)
    block = max(1, 4 * _BLOCK // max(1, units * examples.shape[-1]))
    parts = []
    for k, some in enumerate(steps.split(block)):
        theirs = examples if examples.dim() == 1 else examples[k * block : (k + 1) * block]
        bits = words(seed, some, theirs, units, plane)
        low, high = bits & 0xFFFF, bits >> 16
        halves = (high if sees.stream and STREAMS[d.rule.stream].half else low for d in draws)
        parts.append([half < d.threshold for half, d in zip(halves, draws)])
    return [torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True)]


def seen(draws: Sequence[Draw], steps: Tensor, examples: Tensor, units: int) -> tuple[Tensor, Tensor, int]:
    """The coordinates that the draws, all of one mask kind, depend on; one of each of the others."""
    sees = MASKS[draws[0].rule.mask]
    return (
        steps if sees.step else steps.new_zeros(1),
        examples if sees.example else examples.new_zeros(1),
        units if sees.unit else 1,
    )


def draw_all(
    draws: Sequence[Draw], steps: Tensor, examples: Tensor, units: dict[str, int], draw_masks: Any = draw_masks
) -> dict[str, Tensor]:
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

    >>> import zoneout as zo
    >>> m = zo.masks(zo.Zoneout(cell=0.5, hidden=0.05), seed=7, steps=100, batch=32, hidden=1000)
    >>> {stream: (tuple(mask.shape), round(mask.float().mean().item(), 2)) for stream, mask in m.items()}
    {'cell': ((100, 32, 1000), 0.5), 'hidden': ((100, 32, 1000), 0.05)}
    """
    steps, batch, hidden, proj_size, inputs = (
        check_count(name, value, 2**32)
        for name, value in {
            "steps": steps,
            "batch": batch,
            "hidden": hidden,
            "proj_size": proj_size,
            "input_size": hidden if input_size is None else input_size,
        }.items()
    )
    layer, direction = check_count("layer", layer, 2**15), check_count("direction", direction, 2)
    first_step = check_count("first_step", first_step, 2**32 - steps + 1)
    units = stream_units(hidden, proj_size, inputs)
    where = plane("cell", layer, direction)
    at = torch.arange(first_step, first_step + steps, device="cpu")
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
        given = isinstance(values, Tensor)
        integers = values if given else torch.as_tensor(values, dtype=torch.int64 if empty else None, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: expected {expected}, got {values!r}") from None
    if integers.dtype == torch.bool or integers.is_floating_point() or integers.is_complex():
        raise TypeError(f"{name}: expected {expected}, got {integers.dtype}")
    return integers.to(torch.int64)  # of the unsigned ones torch has not even the smallest


def check_count(name: str, value: int, limit: int) -> int:
    """A whole number from 0 to below `limit`, or an error."""
    number = as_integer(value)
    if number is None or not 0 <= number < limit:
        which = "0 or 1" if limit == 2 else f"a whole number, 0 or more and below {limit}"
        raise ValueError(f"{name}: expected {which}, got {value!r}")
    return number


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
    """The example coordinate of each row of the batch: an offset, or one id a row.

    A tensor that is not `readable` is taken modulo 2³²: looking at it would wait for the device.
    """
    if examples is None:
        return torch.arange(batch, device=device)
    first = None if isinstance(examples, Tensor) else as_integer(examples)
    if first is not None:
        _check_ids(first, first, batch)
        return torch.arange(first, first + batch, device=device)
    ids = as_integers("examples", examples, "an offset or integer ids")
    offset = ids.dim() == 0
    if not offset and ids.shape != (batch,):
        raise ValueError(f"examples: expected one id for each of {batch} rows, got shape {tuple(ids.shape)}")
    if ids.numel() and (readable(ids) or not isinstance(examples, Tensor)):
        _check_ids(int(ids.min()), int(ids.max()), batch if offset else None)
    ids = ids.to(device)
    return (torch.arange(batch, device=device) + ids if offset else ids) & 0xFFFFFFFF


def _check_ids(low: int, high: int, batch: int | None) -> None:
    """Raise if ids, or the offset of a batch, leave the 32 bits that an example has."""
    if batch is not None and not 0 <= low <= 2**32 - max(batch, 1):
        raise ValueError(f"examples: expected an offset between 0 and 2³² − batch, got {low}")
    if batch is None and not 0 <= low <= high < 2**32:
        raise ValueError(f"examples: expected ids between 0 and 2³² − 1, got {low} to {high}")
