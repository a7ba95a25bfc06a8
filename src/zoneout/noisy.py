"""The noise of a layer or cell: its rates as plain data, and the draws of a call."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from .definition import Definition
from .definition.gaussian import with_gaussian_product
from .definition.untied import with_gate_products
from .draws import Draw, stream_units, widest
from .fits import check_fits
from .given import STREAMS as STEP_STREAMS
from .given import StepRate, is_step_rate
from .noise import Entry, Noise
from .noise_checks import as_noises
from .philox import as_seed
from .rates import Rate, check_rate, is_zero, outside, rate_of_layer, readable
from .streams import DEPTH, DRAWN, OPTIONAL, STATE_STREAMS, Rule, plane
from .torch_state import capturing, plain_eager

Rates: TypeAlias = "Mapping[str, Rate]"  # the rates of one call, by stream

# Streams that change the products with h, and what they make of the cell.
_CELLS_OF_NOISE = {"fast_hidden": with_gaussian_product, "untied_hidden": with_gate_products}


class CallNoise(NamedTuple):
    """The noise of one call."""

    rules: tuple[Rule, ...]
    numbers: dict[str, Tensor]  # rates by `rate_name`, static seeds by `seed_name`, on the device
    # By `rate_name`: rates that change from step to step, and their names in messages.
    steps: Mapping[str, tuple[StepRate, str]] = {}
    changing: bool = False  # the numbers may be changed in place


def drawn_rules(rules: Iterable[Rule], training: bool) -> list[Rule]:
    """Return the rules that draw masks: all in training, else those with `at_eval="sample"`."""
    return [r for r in rules if r.mask in DRAWN and (training or r.at_eval == "sample")]


def rate_name(stream: str, layer: int) -> str:
    """Return the key of a rate in `CallNoise.numbers`."""
    return f"{stream}_rate_l{layer}"


def seed_name(stream: str) -> str:
    """Return the key of the seed of a static mask in `CallNoise.numbers`."""
    return f"{stream}_seed"


class Settable(nn.Module):
    """A module that calls the setter of a property also for modules and parameters.

    `nn.Module` registers such a value without calling the setter, so no setter could reject it.
    """

    def __prepare_scriptable__(self) -> Any:
        raise NotImplementedError(
            "torch.jit.script does not support zoneout's modules; use torch.export, torch.compile "
            "or torch.jit.trace"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (nn.Module, nn.Parameter)) and isinstance(
            getattr(type(self), name, None), property
        ):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


class NoisyModule(Settable):
    """What a layer or cell knows of its noise."""

    definition: Definition  # the cell
    hidden_size: int
    one_step = False  # True if a call is one step of a sequence

    # --- defined by subclasses ---

    def suffixes(self) -> list[str]:
        """Return the suffixes of the parameter names, one for each layer and direction."""
        raise NotImplementedError

    def input_sizes(self) -> list[int]:
        """Return the input size of each layer."""
        raise NotImplementedError

    @property
    def torch_name(self) -> str:
        """torch's name of the cell, such as "LSTM"; "" for a cell that torch does not have."""
        return ""

    @property
    def cell_name(self) -> str:
        """The cell's name in messages."""
        return self.torch_name or self.definition.name

    @property
    def output_size(self) -> int:
        """The size of the hidden state: `proj_size` with a projection, else `hidden_size`."""
        return getattr(self, "proj_size", 0) or self.hidden_size

    # --- the noise and its rates ---

    def _add_noise(self, noise: Noise | Iterable[Noise] | None) -> None:
        """Set the noise for the first time, and copy its rates to the device of the weights."""
        self._rules: tuple[Rule, ...] = ()
        self._copies: dict[torch.device, dict[str, Tensor]] = {}
        self._current: dict[torch.device, dict[str, Tensor]] = {}
        self.noise = noise
        self._copy_early()

    @property
    def noise(self) -> Any:
        """The noise, a tuple of noises, or None.

        It may be replaced between training steps, for example for a schedule of rates.
        """
        return self._noise

    @noise.setter
    def noise(self, noise: Noise | Iterable[Noise] | None) -> None:
        noises = self.check_noise(noise)
        self._noise = noise if noise is None or isinstance(noise, Noise) else noises
        with _real_tensors():
            self._numbers = {
                name: value.clone() for name, value in self._noise_numbers(noises).items()
            }
        rules = tuple(rule for one in noises for rule in one.rules(self.definition))
        if rules != self._rules:  # a new rate alone keeps the tuple: nothing is recompiled
            self._rules = rules
        self._update_copies()

    def check_noise(self, noise: Noise | Iterable[Noise] | None) -> tuple[Noise, ...]:
        """Return the noise as a tuple; raise if it does not apply to this module."""
        noises = as_noises(noise)
        check_fits(noises, self.definition, self.torch_name, self.one_step)
        self._noise_numbers(noises)
        for one, entry in self._entries(noises):
            if entry.stream in OPTIONAL and not is_zero(entry.rate):
                self._check_sizes(f"{type(one).__name__}({entry.written()})", entry.stream)
        return noises

    def _check_sizes(self, name: str, stream: str) -> None:
        """Raise if the product of a stream cannot be drawn; warn if there is no layer below."""
        if stream.startswith(("fast_", "untied_hidden")) and self._norm is not None:
            raise ValueError(f"noise: {name} does not apply to products that are normalised")
        if (make := _CELLS_OF_NOISE.get(stream)) is not None:
            if self.output_size != self.hidden_size:
                raise ValueError(f"noise: {name} does not apply to an h that is projected")
            self.definition.variant(make)  # now, since a compiler cannot
        if stream in DEPTH and len(self.input_sizes()) == 1:
            warnings.warn(
                f"noise: {name} has no effect, since it is for all layers but the first and "
                "num_layers is 1",
                stacklevel=outside(),
            )

    def _noise_numbers(self, noises: tuple[Noise, ...]) -> dict[str, Tensor]:
        """Return the rate of each stream and layer, and the seeds of static masks, on the CPU."""
        numbers: dict[str, Tensor] = {}
        for one, entry in self._entries(noises):
            stream = entry.stream
            used = rate_name(stream, 0) in numbers  # by another noise
            if is_zero(entry.rate) and (used or stream in OPTIONAL):
                continue
            name = f"{type(one).__name__}({entry.written()})"
            numbers |= self._layer_rates(entry.rate, stream, name)
            if getattr(one, "mask", None) == "static":
                numbers[seed_name(stream)] = as_seed(one.seed)  # type: ignore[attr-defined]
        return numbers

    def _entries(self, noises: Iterable[Noise]) -> list[tuple[Noise, Entry]]:
        """Return the rates of the noises, one for each stream that the cell has."""
        return [(one, entry) for one in noises for entry in one.entries(self.definition)]

    def _layer_rates(self, rates: Rate, stream: str, name: str) -> dict[str, Tensor]:
        """Return the rates of one stream in all layers, by `rate_name`."""
        out, sizes = {}, self.input_sizes()
        for layer, input_size in enumerate(sizes):
            units = stream_units(self.hidden_size, getattr(self, "proj_size", 0), input_size).get(
                stream
            )
            out[rate_name(stream, layer)] = rate_of_layer(rates, layer, len(sizes), units, name)
        return out

    # Rates and static seeds ("the numbers") are plain attributes, not buffers. Loaders that build a
    # model on the meta device fill every buffer that is not in a checkpoint with arbitrary memory.
    # The numbers on the CPU are never changed in place. Their copies on a device are changed in
    # place, so that a captured CUDA graph reads a replaced rate. Eager calls read `_current`, whose
    # tensors are replaced, so that a backward pass still finds the rates of its forward pass.

    def _numbers_on(self, device: torch.device) -> dict[str, Tensor]:
        """Return rates and static seeds on a device; they are copied at the first use."""
        if device.type == "cpu":
            return self._numbers  # no copy
        copies = self._copies.get(device)
        if copies is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "noise: expected its rates on the GPU before a CUDA graph is captured; call "
                    "the layer once before the capture, as in the warm-up of torch.cuda.graph"
                )
            copies = {name: _to_device(value, device) for name, value in self._numbers.items()}
            if plain_eager():  # a tensor made inside a trace or transform must not outlive it
                self._copies[device] = copies
        return copies

    def _fixed_on(self, device: torch.device) -> tuple[dict[str, Tensor], bool]:
        """Return rates and static seeds on a device, and whether they may be changed in place."""
        if device.type == "cpu":
            return self._numbers, False
        if not plain_eager() or capturing(device):
            return self._numbers_on(device), True
        if (found := self._current.get(device)) is None:
            with torch.inference_mode(False):
                found = {name: v.clone() for name, v in self._numbers_on(device).items()}
            self._current[device] = found
        return found, False

    def _update_copies(self) -> None:
        """Write the current numbers into the copies on all devices.

        The copies of removed noises become zero.
        """
        self._current = {}
        for device, copies in self._copies.items():
            for name, old in copies.items():
                if name not in self._numbers:
                    old.zero_()
            for name, value in self._numbers.items():
                if name in copies and copies[name].shape == value.shape:
                    copies[name].copy_(value)
                else:
                    copies[name] = _to_device(value, device)

    def _copy_early(self) -> None:
        """Copy the numbers to the device of the weights before the first call, for compilers."""
        device = getattr(self, f"weight_ih{self.suffixes()[0]}").device
        self._copies = {at: copies for at, copies in self._copies.items() if at == device}
        self._current = {}
        if device.type != "meta":
            self._numbers_on(device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        out = super()._apply(fn, recurse)
        if hasattr(self, "_rules"):  # False while the constructor of torch.nn runs
            self.__dict__["_prepared"] = {}
            self._copy_early()
        return out

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._copy_early()  # with `assign=True` the weights may be on another device now

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the copies on devices, which are made again when needed."""
        return {**super().__getstate__(), "_copies": {}, "_current": {}, "_prepared": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A module that was pickled by an older version has its rates as buffers.
        for name in self.__dict__.pop("_noise_names", ()):
            self._buffers.pop(name, None)
            self._non_persistent_buffers_set.discard(name)
        if "_copies" not in self.__dict__:
            self._copies = {}
            self.noise = self._noise
        self._current = {}

    def _call_noise(self, rates: Rates | None, device: torch.device) -> CallNoise:
        """Return the noise of one call: that of the module, with the rates in `rates` replaced."""
        numbers, in_place = self._fixed_on(device)
        default = CallNoise(self._rules, numbers, changing=in_place)
        if rates is None:
            return default
        if not isinstance(rates, Mapping):
            raise TypeError(
                f"rates: expected a dict such as {{'hidden': 0.1}}, got {type(rates).__name__}"
            )
        known: dict[str, Noise] = {}
        for one, entry in self._entries(as_noises(self._noise)):
            if entry.stream not in known or not is_zero(entry.rate):  # prefer an enabled noise
                known[entry.stream] = one
        rules, numbers = list(self._rules), dict(numbers)
        steps: dict[str, tuple[StepRate, str]] = {}
        named = dict(zip(self.definition.states, STATE_STREAMS))
        for key, rate in rates.items():
            stream = key if key in known else named.get(key, key)
            if stream not in known:
                raise ValueError(
                    "rates: expected streams of the layer's noise "
                    f"({', '.join(sorted(known)) or 'it has none'}), got {key!r}"
                )
            one = known[stream]
            name = f"rates[{key!r}]"
            if getattr(one, "mask", "") == "clock":
                raise ValueError(
                    f"{name}: expected none, since the layer's noise has periods and no rates"
                )
            fixed, changing = self._step_rates(rate, stream, name)
            steps |= changing
            new_rates = self._layer_rates(
                check_rate(fixed, name, one.limit, in_call=True), stream, name
            )
            numbers |= {name: _to_device(value, device) for name, value in new_rates.items()}
            if all(rule.stream != stream for rule in rules):
                rules.append(one.rule(stream))
        return CallNoise(tuple(rules), numbers, steps, in_place)

    def _step_rates(
        self, rate: Any, stream: str, name: str
    ) -> tuple[Any, dict[str, tuple[StepRate, str]]]:
        """Return a rate of a call without those that change from step to step, and these."""
        layers = len(self.input_sizes())
        each = list(rate) if isinstance(rate, (list, tuple)) else [rate] * layers
        found = {
            rate_name(stream, layer): (one, name)
            for layer, one in enumerate(each)
            if is_step_rate(one)
        }
        if not found:
            return rate, found
        if stream not in STEP_STREAMS:
            raise ValueError(
                f"{name}: expected a rate that is the same at all steps, since the masks of "
                f"{stream} are, got one for each step or one with a gradient"
            )
        if len(each) != layers:
            raise ValueError(
                f"{name}: expected one rate for each of {layers} layers, got {len(each)}"
            )
        # 0.5 stands in for these, so that the stream counts as used.
        return tuple(0.5 if is_step_rate(one) else one for one in each), found

    def _draws(
        self,
        noise: CallNoise,
        layer: int,
        direction: int,
        seed: Tensor | None,
        at: int | None = None,
        depth: bool = False,
    ) -> list[Draw]:
        """Return the draws of one layer and direction that have an effect in the current mode.

        `at` is the layer coordinate of the draws; by default it is `layer`. `depth`: the draws of
        the layer's outputs, in place of those inside the layer.
        """
        draws = []
        for rule in noise.rules:
            mode = "sample" if self.training else rule.at_eval
            if rule.mask not in DRAWN:
                mode = "expectation"
            if (rule.stream in DEPTH) != depth or mode == "off":
                continue
            if mode == "expectation" and rule.by in ("scaled zero", "sum"):
                continue
            key, rate = seed, noise.numbers[rate_name(rule.stream, layer)]
            if rule.mask == "static":
                key = noise.numbers[seed_name(rule.stream)]
            if noise.changing:  # perhaps before the backward pass
                rate = rate.clone()
                key = key.clone() if key is not None and rule.mask == "static" else key
            where = plane(rule, layer if at is None else at, direction)
            draws.append(Draw(rule, rate, key if mode == "sample" else None, where))
        return draws


@contextmanager
def _real_tensors() -> Iterator[None]:
    """Create ordinary tensors even inside inference mode or a dispatch mode.

    Autograd cannot save an inference tensor, and a tensor of a FakeTensorMode has no values.
    """
    with (
        torch.inference_mode(False),
        nullcontext() if torch.compiler.is_compiling() else _disable_current_modes(),
    ):
        yield


def _to_device(value: Tensor, device: torch.device) -> Tensor:
    """Return a rate or seed on a device.

    The copy is never an inference tensor, because it must be writable later. One number is not
    copied but written by the device: a call with `rates` may be captured in a CUDA graph, which
    cannot copy from the host.
    """
    dtype = widest(device) if value.is_floating_point() else value.dtype
    with torch.inference_mode(False):
        if device.type != "cpu" and not value.dim() and readable(value):
            return torch.full((), value.item(), dtype=dtype, device=device)
        return value.to(device, dtype)
