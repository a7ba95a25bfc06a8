"""The common code of layers and single-step cells: noise, norm, initial state, building a `Run`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from . import ops
from .definition import Definition
from .draws import Draw, stream_units, widest
from .fits import check_fits
from .gaussian import with_fast_dropout
from .given import STREAMS as STEP_STREAMS
from .given import At, StepRate, is_given, is_step_rate, mask_of, mask_of_rate
from .noise import (
    DEPTH,
    DRAWN,
    OPTIONAL,
    STATE_STREAMS,
    UNTIED,
    Entry,
    Noise,
    Rule,
    as_noises,
    check_options,
    plane,
)
from .norm import (
    STATISTICS,
    LayerNorm,
    Moments,
    RecurrentBatchNorm,
    StepNorm,
    as_norm,
    record,
    rows,
)
from .ops.dropout import drop_units
from .ops.weight_noise import add_noise
from .philox import as_seed
from .rates import Rate, check_rate, is_zero, outside, rate_of_layer
from .torch_state import capturing, functionalizing, plain_eager
from .untied import with_untied_masks

WEIGHTS = {  # the fields of `ops.Weights`, and the names of the parameters without suffix
    "w_ih": "weight_ih", "w_hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh",
    "w_hr": "weight_hr",
}  # fmt: skip
# Streams of noise that is applied before the loop over time.
PRODUCTS = ("fast_input", "fast_hidden", *UNTIED)  # those that change the products of a run
OUTSIDE = ("input", "weight", "weight_noise", *PRODUCTS)
NORMS = ("norm_ih", "norm_hh", "norm_cell", "norm_cell_shift")  # three scales and one shift


Rates: TypeAlias = "Mapping[str, Rate]"  # the rates of one call, by stream


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


class RecurrentModule(Settable):
    """A mixin for layers and cells: everything except input and output shapes."""

    definition: Definition  # the cell
    keeps_state_type = False  # True: under autocast on the CPU it computes in the type of its state
    one_step = False  # True if a call is one step of a sequence
    hidden_size: int
    backend: str | None
    recompute = False  # True: the backward pass runs the steps again to save memory
    recording: dict[str, Tensor] | None  # in `estimate_statistics`: the number of batches per step

    def __new__(cls, *args: Any, **options: Any) -> Self:
        check_options(options, cls.__init__, getattr(cls, "family", None))
        return super().__new__(cls)

    def _slow_forward(self, *args: Any, **call: Any) -> Any:
        """Run the forward pass in `torch.jit.trace`; `nn.Module.__call__` calls this only there.

        The trace warns of every check of a shape. A trace holds for other shapes as well.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
            return super()._slow_forward(*args, **call)

    # --- defined by subclasses ---

    def suffixes(self) -> list[str]:
        """Return the suffixes of the parameter names, one for each layer and direction."""
        raise NotImplementedError

    def input_sizes(self) -> list[int]:
        """Return the input size of each layer."""
        raise NotImplementedError

    @property
    def cell_name(self) -> str:
        """The cell's name in messages."""
        return self.definition.name

    @property
    def width(self) -> int:
        """All gates of all units."""
        return self.definition.gates * self.hidden_size

    @property
    def normalises_cell(self) -> bool:
        """True if a norm also normalises what the cell shows of a state (`zo.shown`)."""
        return "shown" in self.definition.marks

    def initial_names(self) -> list[str]:
        """Return the names of the learned initial states."""
        return [f"{state}0" for state in self.definition.states]

    @property
    def output_size(self) -> int:
        """The size of the hidden state: `proj_size` with a projection, else `hidden_size`."""
        return getattr(self, "proj_size", 0) or self.hidden_size

    # --- construction ---

    def _add_parts(
        self,
        noise: Noise | Iterable[Noise] | None,
        norm: str | LayerNorm | RecurrentBatchNorm | None,
        backend: str | None,
        learn_initial_state: bool = False,
        recompute: bool = False,
    ) -> None:
        """Add noise, norm, batch-norm statistics and learned states; constructors call it last."""
        ops.check_backend(backend)
        self.backend = backend
        if recompute:
            self.recompute = True
        self._norm = as_norm(norm)
        self.recording = None
        self._weight_table = self._find_weights()
        if self._norm is not None and self.definition.recurrence != "dense":
            raise ValueError(
                f"norm: expected None for the cell {self.cell_name!r}, whose recurrence is "
                f"{self.definition.recurrence!r}, got {norm!r}"
            )
        like = next(self.parameters())
        wide, units = self.width, self.hidden_size
        for suffix in self.suffixes() if self.norm is not None else ():
            for name, size in self._norm_sizes(suffix, wide, units).items():
                self.register_parameter(name, nn.Parameter(like.new_empty(size)))
            if isinstance(self.norm, RecurrentBatchNorm):
                for name in self._statistics(suffix):
                    size = units if "_cell" in name else wide
                    self.register_buffer(name, like.new_empty(self.norm.steps, size).detach())
        self.learn_initial_state = learn_initial_state
        if learn_initial_state:
            for k, name in enumerate(self.initial_names()):
                size = units if k else self.output_size
                self.register_parameter(
                    name, nn.Parameter(like.new_empty(len(self.suffixes()), size))
                )
        self._reset_parts()
        self._rules: tuple[Rule, ...] = ()
        self._copies: dict[torch.device, dict[str, Tensor]] = {}
        self._current: dict[torch.device, dict[str, Tensor]] = {}
        self.noise = noise
        self._copy_early()

    def _norm_sizes(self, suffix: str, wide: int, units: int) -> dict[str, int]:
        """Return the names and sizes of the norm parameters of one layer and direction."""
        sizes = {f"norm_ih{suffix}": wide, f"norm_hh{suffix}": wide}
        if self.normalises_cell:
            sizes |= {f"norm_cell{suffix}": units, f"norm_cell_shift{suffix}": units}
        return sizes

    def _statistics(self, suffix: str) -> list[str]:
        """Return the names of the batch-norm statistics of one layer and direction."""
        return [
            f"{name}{suffix}" for name in STATISTICS if self.normalises_cell or "_cell" not in name
        ]

    def statistics_names(self) -> list[str]:
        """Return the names of all batch-norm statistics."""
        return [name for suffix in self.suffixes() for name in self._statistics(suffix)]

    @torch.no_grad()
    def _reset_parts(self) -> None:
        """Set scales, shifts, statistics and learned initial states to their initial values."""
        for name, parameter in self.named_parameters(recurse=False):
            if (self.learn_initial_state and name in self.initial_names()) or name.startswith(
                "norm_cell_shift"
            ):
                parameter.zero_()
            elif name.startswith("norm_") and self.norm is not None:
                parameter.fill_(self.norm.scale)
        if isinstance(self.norm, RecurrentBatchNorm):
            for name in self.statistics_names():
                getattr(self, name).fill_(1.0 if name.startswith("var") else 0.0)

    @property
    def norm(self) -> LayerNorm | RecurrentBatchNorm | None:
        """The norm. A norm of the same class may replace it, for example with another `at_eval`.

        A `RecurrentBatchNorm` must have the same `steps`.
        """
        return self._norm

    @norm.setter
    def norm(self, norm: str | LayerNorm | RecurrentBatchNorm | None) -> None:
        new, old = as_norm(norm), self._norm
        if type(new) is not type(old) or getattr(new, "steps", 0) != getattr(old, "steps", 0):
            raise ValueError(f"norm: expected one like {old}, the norm of this layer, got {norm!r}")
        self._norm = new

    # --- noise ---

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
        check_fits(noises, self.definition, self.cell_name, self.one_step)
        self._noise_numbers(noises)
        for one, entry in self._entries(noises):
            if entry.stream in OPTIONAL and not is_zero(entry.rate):
                self._check_sizes(f"{type(one).__name__}({entry.written()})", entry.stream)
        return noises

    def _check_sizes(self, name: str, stream: str) -> None:
        """Raise if the product of a stream cannot be drawn; warn if there is no layer below."""
        if stream.startswith("fast_") and self._norm is not None:
            raise ValueError(f"noise: {name} does not apply to products that are normalised")
        if stream == "untied_hidden" and self._norm is not None:
            raise ValueError(f"noise: {name} does not apply to products that are normalised")
        if stream == "untied_hidden":
            _ = self.definition.untied  # now, since a compiler cannot
        if stream in ("fast_hidden", "untied_hidden") and self.output_size != self.hidden_size:
            raise ValueError(f"noise: {name} does not apply to an h that is projected")
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
                    "the layer once "
                    "before the capture, as in the warm-up of torch.cuda.graph"
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
        self._weight_table = self._find_weights()
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
                    f"({', '.join(sorted(known)) or 'it has none'}), "
                    f"got {key!r}"
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

    # --- one run over time ---

    def _working_dtype(self, x: Tensor, hx: Any, weight: Tensor) -> torch.dtype:
        """Return the dtype to compute in: that of autocast if it is on, else that of the weights.

        Raise if the dtypes of input and weights differ without autocast. Under autocast on the CPU,
        GRU, GRUCell and LSTMCell keep the dtype of the state, as in torch.nn.
        """
        like = weight if x.dtype == torch.int64 else x  # int64: ids of one-hot rows
        if autocast_on(x.device) and like.is_floating_point() and like.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            if x.device.type == "cpu" and self.keeps_state_type:
                state = hx[-1] if isinstance(hx, (tuple, list)) and hx else hx
                dtype = torch.promote_types(
                    dtype, (state if isinstance(state, Tensor) else like).dtype
                )
            return dtype
        if like.dtype != weight.dtype:
            raise ValueError(
                f"input: expected {weight.dtype} as the weights have, got {x.dtype}; convert the "
                "input with "
                f"input.to({weight.dtype}) or the module with .to({x.dtype})"
            )
        return like.dtype

    def _packs(self, x: Tensor) -> bool:
        """Return True if the backend runs packed rows directly; otherwise they are padded first."""
        supported = (
            self.backend in (None, "cpu") and not x.is_complex() and not any(functionalizing())
        )
        projected, normed = bool(getattr(self, "proj_size", 0)), self.norm is not None
        runs = self.definition.storage.runs(projected, normed)
        return x.device.type == "cpu" and supported and runs

    def _build_run(
        self,
        x: Tensor,
        states: Sequence[Tensor],
        suffix: str,
        draws: list[Draw],
        examples: Tensor,
        first_step: int,
        dtype: torch.dtype,
        **options: Any,
    ) -> ops.Run:
        """Return the `Run` of one layer and direction, with noise on its input and weights."""
        by_stream = {draw.rule.stream: draw for draw in draws}
        if dtype.is_complex and (self._norm is not None or "weight_noise" in by_stream):
            raise TypeError(
                f"input: expected real numbers for a norm or noise on weights, got {dtype}"
            )
        weights = self._weights(suffix, dtype, x.device)
        if "weight" in by_stream or "weight_noise" in by_stream:
            weights = self._noisy_weights(weights, by_stream)
        if (draw := by_stream.get("input")) is not None:
            x = drop_units(ops.dense(x, weights.w_ih), draw, examples, counts=options.get("counts"))
        run = ops.Run(
            self.definition,
            self.hidden_size,
            x,
            tuple(states),
            weights,
            tuple(d for d in draws if d.rule.stream not in OUTSIDE),
            examples,
            first_step,
            recompute=self.recompute,
            **options,
        )
        if [stream for stream in PRODUCTS if stream in by_stream]:
            at = At(x.shape[:-1], examples, first_step, options.get("counts"))
            run = with_untied_masks(with_fast_dropout(run, by_stream, at), by_stream, at)
        if self._norm is not None:
            run = run._replace(norm=self._step_norm(suffix, run.steps, first_step, dtype))
        return run

    def _give_masks(
        self,
        draws: list[Draw],
        x: Tensor,
        layer: int,
        at: At,
        dtype: torch.dtype,
        noise: CallNoise,
    ) -> list[Draw]:
        """Return the draws, with the masks that are computed before the loop."""
        if not noise.steps and not any(is_given(draw.rule) for draw in draws):
            return draws
        units = stream_units(self.hidden_size, getattr(self, "proj_size", 0), 0)
        precise = torch.promote_types(dtype, torch.float32)  # that of the states

        def with_mask(draw: Draw) -> Draw:
            stream = draw.rule.stream
            changing = noise.steps.get(rate_name(stream, layer))
            if changing is not None:
                rate, name = changing
                mask = mask_of_rate(draw, rate, x, units[stream], at, precise, name)
            elif is_given(draw.rule):
                mask = mask_of(draw, units[stream], at, precise)
            else:
                return draw
            return draw._replace(given=mask, seed=None)

        return [with_mask(draw) for draw in draws]

    def _run(self, runs: dict[str, ops.Run]) -> list[ops.Result]:
        """Run all directions of one layer (by suffix) and update the batch-norm statistics."""
        learns = isinstance(self._norm, RecurrentBatchNorm) and (
            self.training or self.recording is not None
        )
        directions = list(runs.values())
        if learns and directions[0].batch == 1:
            raise ValueError(
                "input: expected at least 2 sequences for the statistics of batch norm, got 1"
            )
        results = ops.run(directions, self.backend)
        for (suffix, run), result in zip(runs.items(), results):
            if learns and result.moments is not None and run.batch > 0:
                self._record(suffix, result.moments, run)
        return results

    def _weight_shapes(self, inputs: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights, biases and parameters of one layer and direction.

        They are named after the fields of `ops.Weights`, and parameters as in the definition.
        """
        cell, hidden, outputs, wide = (
            self.definition,
            self.hidden_size,
            self.output_size,
            (self.width,),
        )
        shapes: dict[str, tuple[int, ...]] = {
            "w_ih": (*wide, inputs),
            "b_ih": wide,
            "w_hr": (outputs, hidden),
        }
        if cell.has_r:
            shapes |= {"w_hh": (*wide, outputs // cell.heads), "b_hh": wide}
        return shapes | {name: cell.shape_of(name, hidden) for name in cell.parameters}

    def _find_weights(self) -> dict[str, list[tuple[str, str, tuple[int, ...]]]]:
        """Return for each suffix (field, attribute, shape) of everything that `_weight_shapes`
        names.
        """
        suffixes, sizes = self.suffixes(), self.input_sizes()
        each = len(suffixes) // len(sizes)
        return {
            suffix: [
                (field, WEIGHTS.get(field, field) + suffix, shape)
                for field, shape in self._weight_shapes(sizes[k // each]).items()
            ]
            for k, suffix in enumerate(suffixes)
        }

    def _weights(self, suffix: str, dtype: torch.dtype, device: torch.device) -> ops.Weights:
        """Return the weights of one layer and direction in `dtype`.

        Raise if one has a wrong shape or device: the loops would read out of bounds.
        """
        found: dict[str, Any] = dict.fromkeys(WEIGHTS)
        for field, name, shape in self._weight_table[suffix]:
            value = getattr(self, name, None)
            if value is None and field in WEIGHTS:
                continue
            if value is None or value.shape != shape or value.device != device:
                raise _wrong_shape(name, shape, device, value)
            found[field] = value if value.dtype == dtype else value.to(dtype)
        own = tuple(found.pop(name) for name in self.definition.parameters)
        return ops.Weights(**found, parameters=own)

    def _check_norm(self, norm: StepNorm, device: torch.device, suffix: str) -> None:
        """Raise if a norm parameter has a wrong shape or device."""
        values = (norm.scale_x, norm.scale_h, norm.scale_c, norm.shift_c)
        for name, value, size in zip(
            NORMS, values, (self.width, self.width, self.hidden_size, self.hidden_size)
        ):
            if value is not None and (value.shape != (size,) or value.device != device):
                raise _wrong_shape(name + suffix, (size,), device, value)

    def _noisy_weights(self, weights: ops.Weights, draws: dict[str, Draw]) -> ops.Weights:
        """Return weights with the noise of a call applied to them."""
        w_ih, w_hh, _, _, w_hr, _ = weights
        if (draw := draws.get("weight")) is not None:
            assert w_hh is not None
            one = torch.zeros(1, dtype=torch.int64, device=w_hh.device)
            w_hh = drop_units(w_hh.reshape(1, 1, -1), draw, one).view_as(w_hh)
        if (draw := draws.get("weight_noise")) is not None:
            w_ih = add_noise(w_ih, draw, 0)
            w_hh = None if w_hh is None else add_noise(w_hh, draw, 1)
            w_hr = None if w_hr is None else add_noise(w_hr, draw, 2)
        return weights._replace(w_ih=w_ih, w_hh=w_hh, w_hr=w_hr)

    def _step_norm(self, suffix: str, steps: int, first_step: int, dtype: torch.dtype) -> StepNorm:
        """Return the norm of one layer and direction, with the moments to use in evaluation."""
        assert self.norm is not None
        scale_x, scale_h, scale_c, shift_c = (
            None if (value := getattr(self, name + suffix, None)) is None else value.to(dtype)
            for name in NORMS
        )
        assert scale_x is not None and scale_h is not None
        running = None
        if (
            isinstance(self.norm, RecurrentBatchNorm)
            and not self.training
            and self.norm.at_eval == "running"
        ):
            statistics = (getattr(self, name) for name in self._statistics(suffix))
            running = Moments(*(rows(value, first_step, steps).to(dtype) for value in statistics))
        over = "units" if isinstance(self.norm, LayerNorm) else "examples"
        norm = StepNorm(over, self.norm.eps, scale_x, scale_h, scale_c, shift_c, running)
        self._check_norm(norm, getattr(self, f"weight_ih{suffix}").device, suffix)
        return norm

    def _record(self, suffix: str, seen: Moments, run: ops.Run) -> None:
        """Update the running statistics, in training or during `estimate_statistics`.

        As in torch's batch norm, the unbiased variance is stored. A step with fewer than two
        sequences has no unbiased variance, so its statistics are not updated.
        """
        assert isinstance(self.norm, RecurrentBatchNorm)
        first_step = run.first_step
        alive = seen.mean_x.new_full((len(seen.mean_x),), run.batch)
        if run.counts is not None:
            alive = run.counts.to(alive)
        elif run.lengths is not None:
            alive = (
                (torch.arange(run.steps, device=alive.device)[:, None] < run.lengths)
                .sum(1)
                .to(alive)
            )
        counts = (alive > 1).to(alive)
        if self.recording is None:
            weight = counts * self.norm.momentum
        else:  # an average over the batches that reached each step
            batches = self.recording.setdefault(suffix, counts.new_zeros(self.norm.steps))
            reached = batches[first_step : first_step + run.steps]
            reached += counts[: len(reached)]
            weight = counts[: len(reached)] / reached.clamp(min=1)
        unbiased = (alive / (alive - 1).clamp(min=1))[:, None]
        for name, value in zip(self._statistics(suffix), seen):
            assert value is not None
            record(
                getattr(self, name),
                value * unbiased if name.startswith("var") else value,
                first_step,
                weight,
            )

    def _extra(self) -> str:
        """Return the part of `extra_repr` that torch.nn's modules do not have."""
        parts = []
        if self._noise is not None:
            parts.append(
                f"noise={list(self._noise) if isinstance(self._noise, tuple) else self._noise}"
            )
        if self.norm is not None:
            parts.append("norm='layer'" if self.norm == LayerNorm() else f"norm={self.norm}")
        if self.learn_initial_state:
            parts.append("learn_initial_state=True")
        if self.backend is not None:
            parts.append(f"backend={self.backend!r}")
        if self.recompute:
            parts.append("recompute=True")
        return "".join(f", {part}" for part in parts)


def _wrong_shape(
    name: str, shape: tuple[int, ...], device: torch.device, value: Tensor | None
) -> ValueError:
    """Return the error for a weight with a wrong shape or device."""
    if value is None:
        return ValueError(f"{name}: expected shape {shape} on {device}, got None")
    return ValueError(
        f"{name}: expected shape {shape} on {device}, got {tuple(value.shape)} on {value.device}"
    )


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

    The copy is never an inference tensor, because it must be writable later.
    """
    dtype = widest(device) if value.is_floating_point() else None
    with torch.inference_mode(False):
        return value.to(device, dtype)


def has_features(x: Tensor) -> bool:
    """Return True if an input holds features, and False if it holds ids of one-hot rows."""
    return x.is_floating_point() or x.is_complex()


def check_parameter(weight: Tensor) -> None:
    """Raise if a weight is an ExpandedWeight, torch's wrapper for per-sample gradients.

    ExpandedWeight does not support custom operators.
    """
    if type(weight).__name__ == "ExpandedWeight":
        raise NotImplementedError(
            "call_for_per_sample_grads does not support zoneout's modules; compute per-sample "
            "gradients with "
            "torch.func.vmap(torch.func.grad(…)), as docs/ecosystem.md shows"
        )


def autocast_on(device: torch.device) -> bool:
    """Return True if autocast is on for a device; False if the device has no autocast."""
    return ops.autocast_on(device.type)


def check_device(name: str, value: Tensor, weight: Tensor) -> None:
    """Raise if a value is not on the device of the weights."""
    if value.device != weight.device:
        raise ValueError(
            f"{name}: expected a tensor on {weight.device} as the weights are, got {value.device}"
        )


def no_tensor(input: Any, expected: str) -> TypeError:
    """Return the error for an input that is not a tensor."""
    leaf = (
        "; make the layer a leaf of the tracer, as docs/ecosystem.md shows"
        if isinstance(input, fx.Proxy)
        else ""
    )
    return TypeError(f"input: expected {expected}, got {type(input).__name__}{leaf}")


def add_weights(
    module: RecurrentModule, inputs: int, suffix: str, device: Any, dtype: torch.dtype | None
) -> None:
    """Add the weights, biases and parameters of one layer and direction, uninitialised."""
    own = module.definition.parameters
    for name in own:
        # hasattr would call the properties of a module that is not complete yet.
        taken = name + suffix in dir(type(module)) or name + suffix in module.__dict__
        if taken or name in WEIGHTS or name.startswith(("weight_", "bias_", "norm_")):
            raise ValueError(
                "cell: expected parameters whose names are not those of a layer (weight_…, "
                f"bias_…, norm_…), got {name!r}"
            )
    shapes, biases = (
        module._weight_shapes(inputs),
        ("b_ih", "b_hh") if getattr(module, "bias", True) else (),
    )
    projection = ("w_hr",) if getattr(module, "proj_size", 0) else ()
    for name in ("w_ih", "w_hh", *biases, *projection, *own):
        if name in shapes:
            weight = torch.empty(shapes[name], device=device, dtype=dtype)
            module.register_parameter(WEIGHTS.get(name, name) + suffix, nn.Parameter(weight))
