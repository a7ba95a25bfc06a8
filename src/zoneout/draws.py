"""Drawing the masks: every mask is a function of its coordinates.

Every Bernoulli draw is a pure function of the seed and of (layer, direction, step, example, unit,
stream). Masks are therefore not stored: any code on any device can draw the same mask again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .definition import Definition
from .fits import check_fits
from .noise import Entry, Noise
from .noise_checks import as_noises
from .philox import as_integer, as_seed, philox
from .rates import in_65536ths, is_zero, rate_of_layer, readable
from .streams import DEPTH, MASKS, OPTIONAL, Rule, bits_of, plane, state_groups
from .torch_state import kept


class Draw(NamedTuple):
    """One stream of one run over time, as a backend needs it."""

    rule: Rule
    rate: Tensor  # float64, a scalar or [units]
    seed: Tensor | None  # None: nothing is drawn, the expectation replaces the mask
    plane: int  # the last word of the counter; see `streams.plane`
    # The mask itself, as numbers [T, B, units] (packed: [N, units]): then nothing else is read. It
    # may have a gradient, and may have other values than 0 and 1.
    given: Tensor | None = None

    @property
    def threshold(self) -> Tensor:
        """The limit for 16 random bits: the old value is kept where the bits are below it."""
        return in_65536ths(self.rate).to(torch.int64)

    @property
    def scale(self) -> Tensor:
        """The factor of inverted scaling, 1 / (1 − rate); 0 at a rate of 1.

        It uses the rate as drawn, a multiple of 1/65536, so the mean is preserved exactly.
        """
        drawn = in_65536ths(self.rate)
        return torch.where(drawn < 65536, 65536 / (65536 - drawn), 0.0)


def widest(device: torch.device) -> torch.dtype:
    """Return the dtype of rates and counts on a device: float64, or float32 on MPS."""
    return torch.float32 if device.type == "mps" else torch.float64


def constant(rule: Rule, rate: float, seed: Tensor, plane: int) -> Draw:
    """Return a `Draw` with the same rate for all units."""
    return Draw(
        rule, torch.full((), rate, dtype=widest(seed.device), device=seed.device), seed, plane
    )


def words(seed: Tensor, steps: Tensor, examples: Tensor, units: int, plane: int) -> Tensor:
    """Return 32 random bits for each coordinate, [steps, examples, units].

    `examples` are the same for all steps, [examples], or given for each step, [steps, examples].
    """
    c0 = torch.arange((units + 3) // 4, device=seed.device)
    c3 = torch.full((), plane, device=seed.device)
    four = philox(seed, c0, examples[..., None], steps[:, None, None], c3)
    return torch.stack(torch.broadcast_tensors(*four), dim=-1).flatten(-2)[..., :units]


def draw_bits(draw: Draw, steps: Tensor, examples: Tensor, units: int) -> Tensor:
    """Return the 16 random bits that a rate is compared with, [steps, examples, units]."""
    assert draw.seed is not None
    found = words(draw.seed, steps, examples, units, draw.plane)
    return found >> 16 if bits_of(draw.rule).half else found & 0xFFFF


_BLOCK = 2**17  # counters per block: enough for several threads, few enough for their caches


def draw_masks(draws: Sequence[Draw], steps: Tensor, examples: Tensor, units: int) -> list[Tensor]:
    """Return the masks of streams that share their plane and mask kind.

    A mask is True where the old value is kept. Each mask is a bool tensor [steps, examples, units].
    Its size is 1 in every dimension that the mask kind does not depend on. `examples` are the same
    for all steps, [examples], or [steps, examples].
    """
    seed, plane = draws[0].seed, draws[0].plane
    assert seed is not None and all(d.plane == plane for d in draws)
    steps, examples, units = seen(draws, steps, examples, units)
    block = max(1, 4 * _BLOCK // max(1, units * examples.shape[-1]))
    parts = []
    for k, block_steps in enumerate(steps.split(block)):
        block_examples = examples if examples.dim() == 1 else examples[k * block : (k + 1) * block]
        bits = words(seed, block_steps, block_examples, units, plane)
        low, high = bits & 0xFFFF, bits >> 16
        halves = (high if bits_of(d.rule).half else low for d in draws)
        parts.append([half < d.threshold for half, d in zip(halves, draws)])
    return [torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True)]


def seen(
    draws: Sequence[Draw], steps: Tensor, examples: Tensor, units: int
) -> tuple[Tensor, Tensor, int]:
    """Return steps, examples and units, each reduced to size 1 if the masks do not depend on it.

    All draws must have the same mask kind.
    """
    sees = MASKS[draws[0].rule.mask]
    return (
        steps if sees.step else steps.new_zeros(1),
        examples if sees.example else examples.new_zeros(1),
        units if sees.unit else 1,
    )


def draw_all(
    draws: Sequence[Draw],
    steps: Tensor,
    examples: Tensor,
    units: dict[str, int],
    draw_masks: Any = draw_masks,
) -> dict[str, Tensor]:
    """Return the mask of every drawn stream, by stream name.

    Streams that use the same random words are drawn together, so these words are computed once.
    """
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
    cell: Definition | None = None,
) -> dict[str, Tensor]:
    """Return the masks that a layer draws from `seed`, one for each stream of the noise.

    Args:
        noise: a noise or a list of noises.
        seed: the seed that is passed to the layer's call.
        steps: the number of time steps.
        batch: the number of rows in the batch.
        hidden: the layer's `hidden_size`.
        proj_size: the layer's `proj_size`.
        input_size: the input size of this layer of the stack; by default `hidden`.
        layer: the index of the layer in the stack.
        direction: 0 for forward, 1 for reverse.
        examples: the ids of the rows: an offset, or one id per row; by default 0, 1, 2, …
        first_step: the number of the first step.
        cell: the definition of the layer's cell.

    Returns:
        A dict from stream name to a bool tensor [steps, batch, units] on the CPU, True where the
        old value (or zero) is used. The streams are cell, hidden, update, input and
        variational_hidden; drop_cell and drop_hidden, what swapout leaves out of new values; and
        depth and drop_depth, for layers above the first. Noise on weights has no entry. With
        `cell`, masks of states have the names of the definition's states in place of cell and
        hidden.

    >>> import zoneout as zo
    >>> noise = zo.Zoneout(cell=0.5, hidden=0.05)
    >>> masks = zo.masks(noise, seed=7, steps=100, batch=32, hidden=1000)
    >>> {name: (tuple(m.shape), round(m.float().mean().item(), 2)) for name, m in masks.items()}
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
    at = torch.arange(first_step, first_step + steps, device="cpu")
    rows = example_ids(examples, batch, torch.device("cpu"))
    noises = as_noises(noise)
    if cell is not None:
        _check_cell(cell, noises)
    out: dict[str, Tensor] = {}
    for one in noises:
        for entry in one.entries(cell):
            stream, zero = entry.stream, is_zero(entry.rate)
            if one.rule(stream).by == "gaussian":
                continue  # it has no mask
            if stream not in units or (zero and (stream in out or stream in OPTIONAL)):
                # Noise on weights has no steps. A rate of 0 does not replace another noise's mask.
                continue
            if stream in DEPTH and layer == 0:
                continue
            draw = _draw_of(one, entry, seed, layer, direction, units[stream])
            if draw.rule.mask == "clock":
                mask = off_beat(draw.rate, at[:, None, None])
            else:
                (mask,) = draw_masks([draw], at, rows, units[stream])
            out[stream] = mask.expand(steps, batch, units[stream]).contiguous()
    return out if cell is None else _by_state(out, cell)


def _draw_of(
    noise: Noise, entry: Entry, seed: int | Tensor, layer: int, direction: int, units: int
) -> Draw:
    """Return the draw of one stream of a noise; raise if it has no mask without a layer."""
    rates, rule = entry.rate, noise.rule(entry.stream)
    name = f"{type(noise).__name__}({entry.written()})"
    if isinstance(rates, tuple) and layer >= len(rates):
        raise ValueError(
            f"layer: expected a number below {len(rates)}, the number of rates in {name}, "
            f"got {layer}"
        )
    count = len(rates) if isinstance(rates, tuple) else 1
    rate = rate_of_layer(rates, layer, count, units, name)
    static_seed = getattr(noise, "seed", None)
    key = as_seed(seed if static_seed is None else static_seed, "cpu")
    if rule.mask == "rate":
        raise ValueError(
            f"noise: expected masks that are drawn or follow a clock, got {noise}, whose mask is "
            "the rate itself"
        )
    return Draw(rule, rate, key, plane(rule, layer, direction))


def off_beat(periods: Tensor, step: Tensor) -> Tensor:
    """Return True where a unit keeps its value: the step is no multiple of its period."""
    return step % periods.to(step.device, torch.int64) != 0


def _check_cell(cell: Any, noises: tuple[Noise, ...]) -> None:
    """Raise if `cell` is not a definition, or if a noise does not apply to it."""
    if not isinstance(cell, Definition):
        raise TypeError(f"cell: expected the definition of a cell, got {type(cell).__name__}")
    check_fits(noises, cell)


def _by_state(masks: dict[str, Tensor], cell: Definition) -> dict[str, Tensor]:
    """Return masks under the names of a cell's states; the states of a group share one mask."""
    groups = state_groups(cell)
    drawn = [(stream, group) for stream, group in groups.items() if stream in masks]
    states = {state: masks[stream] for stream, group in drawn for state in group}
    others = {stream: mask for stream, mask in masks.items() if stream not in groups}
    if both := ", ".join(sorted(states.keys() & others.keys())):
        raise ValueError(f"cell: expected states with other names than the streams, got {both}")
    return states | others


def as_integers(name: str, values: Any, expected: str = "integers") -> Tensor:
    """Return the values as an int64 tensor; raise if they are not integers."""
    empty = isinstance(values, (list, tuple)) and not values  # torch would make it a float tensor
    try:
        is_tensor = isinstance(values, Tensor)
        integers = (
            values
            if is_tensor
            else torch.as_tensor(values, dtype=torch.int64 if empty else None, device="cpu")
        )
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: expected {expected}, got {values!r}") from None
    if integers.dtype == torch.bool or integers.is_floating_point() or integers.is_complex():
        raise TypeError(f"{name}: expected {expected}, got {integers.dtype}")
    return integers.to(torch.int64)  # torch has no `min` for most unsigned types


def check_count(name: str, value: int, limit: int) -> int:
    """Return a whole number as an int; raise unless it is at least 0 and below `limit`."""
    number = as_integer(value)
    if number is None or not 0 <= number < limit:
        which = "0 or 1" if limit == 2 else f"a whole number, 0 or more and below {limit}"
        raise ValueError(f"{name}: expected {which}, got {value!r}")
    return number


def stream_units(hidden: int, proj_size: int, input_size: int) -> dict[str, int]:
    """Return the number of units of each stream."""
    outputs = proj_size or hidden
    return {
        "cell": hidden,
        "hidden": outputs,
        "update": hidden,
        "input": input_size,
        "variational_hidden": outputs,
        "state2": hidden,
        "state3": hidden,
        "drop_cell": hidden,
        "drop_hidden": outputs,
        "drop_state2": hidden,
        "drop_state3": hidden,
        "depth": outputs,
        "drop_depth": outputs,
        "fast_input": input_size,
        "fast_hidden": outputs,
    }


def example_ids(
    examples: int | Tensor | Sequence[int] | None, batch: int, device: torch.device
) -> Tensor:
    """Return the example coordinate of each row of the batch, [batch].

    `examples` is an offset or one id per row. The values of a tensor that is not `readable` are not
    checked, because that would wait for the device. They are taken modulo 2³² instead.
    """
    if examples is None:
        return first_ids(device, batch)
    first = None if isinstance(examples, Tensor) else as_integer(examples)
    if first is not None:
        _check_ids(first, first, batch)
        return torch.arange(first, first + batch, device=device)
    ids = as_integers("examples", examples, "an offset or integer ids")
    offset = ids.dim() == 0
    if not offset and ids.shape != (batch,):
        raise ValueError(
            f"examples: expected one id for each of {batch} rows, got shape {tuple(ids.shape)}"
        )
    if ids.numel() and (readable(ids) or not isinstance(examples, Tensor)):
        _check_ids(int(ids.min()), int(ids.max()), batch if offset else None)
    ids = ids.to(device)
    return (torch.arange(batch, device=device) + ids if offset else ids) & 0xFFFFFFFF


@kept(64)
def first_ids(device: torch.device, batch: int) -> Tensor:
    """Return the ids of rows that have none given: 0, 1, 2, …"""
    return torch.arange(batch, device=device)


def _check_ids(low: int, high: int, batch: int | None) -> None:
    """Raise if ids from `low` to `high` do not fit into 32 bits.

    With `batch`, `low` is the offset of that many consecutive ids.
    """
    if batch is not None and not 0 <= low <= 2**32 - max(batch, 1):
        raise ValueError(f"examples: expected an offset between 0 and 2³² − batch, got {low}")
    if batch is None and not 0 <= low <= high < 2**32:
        raise ValueError(f"examples: expected ids between 0 and 2³² − 1, got {low} to {high}")
