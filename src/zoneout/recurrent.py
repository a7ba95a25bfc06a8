"""What layers and single-step cells share: noise, norm, initial state, and making a `Run` of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from . import ops
from .draws import Draw, stream_units, widest
from .noise import KINDS, Noise, Rate, Rule, as_noises, check_fits, check_rate, is_zero, plane, rate_of_layer
from .norm import STATISTICS, LayerNorm, Moments, RecurrentBatchNorm, StepNorm, as_norm, record, rows
from .ops.dropout import drop_units
from .ops.modes import functionalizing, plain_eager
from .ops.weight_noise import add_noise
from .philox import as_seed

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")  # as `ops.Weights` has them
NORMS = ("norm_ih", "norm_hh", "norm_cell", "norm_cell_shift")  # scales and shift


Rates: TypeAlias = "Mapping[str, Rate]"  # the rates of one call, by stream


class CallNoise(NamedTuple):
    """What one call draws with."""

    rules: tuple[Rule, ...]
    numbers: dict[str, Tensor]  # rates and static seeds on the call's device, by `rate_name` and `seed_name`


def drawn_rules(rules: Iterable[Rule], training: bool) -> list[Rule]:
    """The rules that draw in training, or at evaluation."""
    return [rule for rule in rules if training or rule.at_eval == "sample"]


def rate_name(stream: str, layer: int) -> str:
    return f"{stream}_rate_l{layer}"


def seed_name(stream: str) -> str:
    return f"{stream}_seed"


class Settable(nn.Module):
    """A module whose properties are asked first: torch takes a module or a parameter for itself, unseen."""

    def __prepare_scriptable__(self) -> Any:
        raise NotImplementedError(
            "torch.jit.script cannot take zoneout's modules; use torch.export, torch.compile or torch.jit.trace"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (nn.Module, nn.Parameter)) and isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


class Recurrent(Settable):
    """Mixed into the layers and cells: everything about them that is not a matter of shapes."""

    kind: str  # "lstm", "gru" or "rnn"
    one_step = False  # whether a call is one step of a sequence
    hidden_size: int
    backend: str | None
    recompute = False  # whether a way back runs the steps again instead of keeping what they found
    recording: dict[str, Tensor] | None  # while statistics are estimated anew: batches seen at each step

    # --- what a subclass says about itself ---

    def suffixes(self) -> list[str]:
        """The endings of parameter names, one for each layer and direction."""
        raise NotImplementedError

    def input_sizes(self) -> list[int]:
        """The input size of each layer."""
        raise NotImplementedError

    @property
    def output_size(self) -> int:
        """The size of the hidden state: of the projection where there is one."""
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
        ops.check_backend(backend)
        self.backend = backend
        if recompute:
            self.recompute = True
        self._norm = as_norm(norm)
        self.recording = None
        like = next(self.parameters())
        wide, units = GATES[self.kind] * self.hidden_size, self.hidden_size
        for suffix in self.suffixes() if self.norm is not None else ():
            for name, size in self._norm_sizes(suffix, wide, units).items():
                self.register_parameter(name, nn.Parameter(like.new_empty(size)))
            if isinstance(self.norm, RecurrentBatchNorm):
                for name in self._statistics(suffix):
                    size = units if "_cell" in name else wide
                    self.register_buffer(name, like.new_empty(self.norm.steps, size).detach())
        self.learn_initial_state = learn_initial_state
        if learn_initial_state:
            count = len(self.suffixes())
            self.h0 = nn.Parameter(like.new_empty(count, self.output_size))
            if self.kind == "lstm":
                self.c0 = nn.Parameter(like.new_empty(count, units))
        self._reset_parts()
        self._rules: tuple[Rule, ...] = ()
        self._copies: dict[torch.device, dict[str, Tensor]] = {}
        self.noise = noise
        self._copy_early()

    def _norm_sizes(self, suffix: str, wide: int, units: int) -> dict[str, int]:
        sizes = {f"norm_ih{suffix}": wide, f"norm_hh{suffix}": wide}
        if self.kind == "lstm":
            sizes |= {f"norm_cell{suffix}": units, f"norm_cell_shift{suffix}": units}
        return sizes

    def _statistics(self, suffix: str) -> list[str]:
        return [f"{name}{suffix}" for name in STATISTICS if self.kind == "lstm" or "_cell" not in name]

    def statistics_names(self) -> list[str]:
        """The names of the batch-norm statistics."""
        return [name for suffix in self.suffixes() for name in self._statistics(suffix)]

    @torch.no_grad()
    def _reset_parts(self) -> None:
        """Scales, shifts, statistics and initial states as they start."""
        for name, parameter in self.named_parameters(recurse=False):
            if (name in ("h0", "c0") and self.learn_initial_state) or name.startswith("norm_cell_shift"):
                parameter.zero_()
            elif name.startswith("norm_") and self.norm is not None:
                parameter.fill_(self.norm.scale)
        if isinstance(self.norm, RecurrentBatchNorm):
            for name in self.statistics_names():
                getattr(self, name).fill_(1.0 if name.startswith("var") else 0.0)

    @property
    def norm(self) -> LayerNorm | RecurrentBatchNorm | None:
        """The norm; another of the same kind (`at_eval`, `momentum`) may take its place."""
        return self._norm

    @norm.setter
    def norm(self, norm: str | LayerNorm | RecurrentBatchNorm | None) -> None:
        new, old = as_norm(norm), self._norm
        if type(new) is not type(old) or getattr(new, "steps", 0) != getattr(old, "steps", 0):
            raise ValueError(f"norm: expected one like {old}, which this layer was made with, got {norm!r}")
        self._norm = new

    # --- noise ---

    @property
    def noise(self) -> Any:
        """The noise, a tuple of them, or None; it may be replaced between steps, so that rates follow a schedule."""
        return self._noise

    @noise.setter
    def noise(self, noise: Noise | Iterable[Noise] | None) -> None:
        noises = self.check_noise(noise)
        self._noise = noise if noise is None or isinstance(noise, Noise) else noises
        with _real_tensors():
            self._numbers = {name: value.clone() for name, value in self._noise_numbers(noises).items()}
        rules = tuple(rule for one in noises for rule in one.rules())
        if rules != self._rules:  # the same tuple as long as only numbers change: nothing to recompile
            self._rules = rules
        self._update_copies()

    def check_noise(self, noise: Noise | Iterable[Noise] | None) -> tuple[Noise, ...]:
        """The noise as a tuple, or an error where this module cannot have it."""
        noises = as_noises(noise)
        check_fits(noises, self.kind, self.one_step)
        self._noise_numbers(noises)
        return noises

    def _noise_numbers(self, noises: tuple[Noise, ...]) -> dict[str, Tensor]:
        """The numbers of the noises on the CPU: a rate for each stream and layer, and the seeds of static masks."""
        numbers: dict[str, Tensor] = {}
        for one, field, stream in self._fields(noises):
            rates = getattr(one, field)
            if is_zero(rates) and rate_name(stream, 0) in numbers:
                continue  # another method has the stream
            numbers |= self._layer_rates(rates, stream, f"{type(one).__name__}({field}=…)")
            if getattr(one, "mask", None) == "static":
                numbers[seed_name(stream)] = as_seed(one.seed)  # type: ignore[attr-defined]
        return numbers

    def _fields(self, noises: Iterable[Noise]) -> list[tuple[Noise, str, str]]:
        """Every noise, rate field and stream that a cell of this kind has."""
        fields = ((one, field, stream) for one in noises for field, stream in one.fields.items())
        return [found for found in fields if found[2] in KINDS[self.kind]]

    def _layer_rates(self, rates: Rate, stream: str, name: str) -> dict[str, Tensor]:
        """The rate of one stream in each layer, by its name."""
        out, sizes = {}, self.input_sizes()
        for layer, input_size in enumerate(sizes):
            units = stream_units(self.hidden_size, getattr(self, "proj_size", 0), input_size).get(stream)
            out[rate_name(stream, layer)] = rate_of_layer(rates, layer, len(sizes), units, name)
        return out

    # Rates and static seeds are plain attributes, not buffers: loaders that build a model on the meta device fill
    # every buffer that is not in a checkpoint with arbitrary memory. The CPU numbers are never changed in place. A
    # device's copies are, so that a captured CUDA graph reads a replaced rate.

    def _numbers_on(self, device: torch.device) -> dict[str, Tensor]:
        """The numbers on a device, copied at its first use."""
        if device.type == "cpu":
            return self._numbers
        copies = self._copies.get(device)
        if copies is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "noise: expected its rates on the GPU before a graph is captured; call the layer once, "
                    "as torch.cuda.graph's warm-up does"
                )
            copies = {name: _to_device(value, device) for name, value in self._numbers.items()}
            if plain_eager():  # what is made inside a trace or transform must not outlive it
                self._copies[device] = copies
        return copies

    def _update_copies(self) -> None:
        """Write the present numbers into the copies that devices have; copies of removed noises become zero."""
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
        """Copy the numbers to the weights' device before the first call, so that a compiler finds them there."""
        device = getattr(self, f"weight_ih{self.suffixes()[0]}").device
        self._copies = {at: copies for at, copies in self._copies.items() if at == device}
        if device.type != "meta":
            self._numbers_on(device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        out = super()._apply(fn, recurse)
        if hasattr(self, "_rules"):  # not while torch's constructor runs
            self._copy_early()
        return out

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._copy_early()  # `assign=True` may have brought weights of another device

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the devices' copies, which are made anew."""
        return {**super().__getstate__(), "_copies": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in self.__dict__.pop("_noise_names", ()):  # saved whole by a version whose rates were buffers
            self._buffers.pop(name, None)
            self._non_persistent_buffers_set.discard(name)
        if "_copies" not in self.__dict__:
            self._copies = {}
            self.noise = self._noise

    def _call_noise(self, rates: Rates | None, device: torch.device) -> CallNoise:
        """The layer's rules and numbers, those of the streams that `rates` names replaced."""
        own = CallNoise(self._rules, self._numbers_on(device))
        if rates is None:
            return own
        if not isinstance(rates, Mapping):
            raise TypeError(f"rates: expected a dict such as {{'hidden': 0.1}}, got {type(rates).__name__}")
        known: dict[str, tuple[Noise, str]] = {}
        for one, field, stream in self._fields(as_noises(self._noise)):
            if stream not in known or not is_zero(getattr(one, field)):  # of two methods, the one that is on
                known[stream] = one, field
        rules, numbers = list(self._rules), dict(own.numbers)
        for stream, rate in rates.items():
            if stream not in known:
                raise ValueError(
                    f"rates: expected streams of the layer's noise ({', '.join(sorted(known)) or 'it has none'}), "
                    f"got {stream!r}"
                )
            one, field = known[stream]
            name = f"rates[{stream!r}]"
            given = self._layer_rates(check_rate(rate, name, one.limit, in_call=True), stream, name)
            numbers |= {key: _to_device(value, device) for key, value in given.items()}
            if all(rule.stream != stream for rule in rules):
                rules.append(one.rule(field))
        return CallNoise(tuple(rules), numbers)

    def _draws(
        self, noise: CallNoise, layer: int, direction: int, seed: Tensor | None, at: int | None = None
    ) -> list[Draw]:
        """The streams that have an effect in the present mode. `at` is the layer coordinate if not `layer`."""
        draws = []
        for rule in noise.rules:
            mode = "sample" if self.training else rule.at_eval
            if mode == "off" or (mode == "expectation" and rule.by in ("scaled zero", "sum")):
                continue
            key, rate = seed, noise.numbers[rate_name(rule.stream, layer)]
            if rule.mask == "static":
                key = noise.numbers[seed_name(rule.stream)]
            if not rate.is_cpu:  # a device's copies may be written to before the backward pass
                rate = rate.clone()
                key = key.clone() if key is not None and rule.mask == "static" else key
            where = plane(rule.stream, layer if at is None else at, direction)
            draws.append(Draw(rule, rate, key if mode == "sample" else None, where))
        return draws

    # --- one run over time ---

    def _working_dtype(self, x: Tensor, hx: Any, weight: Tensor) -> torch.dtype:
        """The dtype to compute in: autocast's where it is on, else the weights'; an error where they differ.

        On the CPU torch.nn's GRU, GRUCell and LSTMCell leave the state in its own type under autocast. So do ours.
        """
        like = weight if x.dtype == torch.int64 else x  # int64: one-hot rows by their numbers
        if autocast_on(x.device) and like.is_floating_point() and like.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            if x.device.type == "cpu" and (self.kind == "gru" or (self.kind == "lstm" and self.one_step)):
                state = hx[-1] if isinstance(hx, (tuple, list)) and hx else hx
                dtype = torch.promote_types(dtype, (state if isinstance(state, Tensor) else like).dtype)
            return dtype
        if like.dtype != weight.dtype:
            raise ValueError(
                f"input: expected {weight.dtype} as the weights have, got {x.dtype}; convert the input with "
                f"input.to({weight.dtype}) or the module with .to({x.dtype})"
            )
        return like.dtype

    def _packs(self, x: Tensor) -> bool:
        """Whether packed rows are run as they are; elsewhere they are padded first."""
        takes = self.backend in (None, "cpu") and not x.is_complex() and not any(functionalizing())
        return x.device.type == "cpu" and takes

    def _made(
        self,
        cell: str,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        suffix: str,
        draws: list[Draw],
        examples: Tensor,
        first_step: int,
        dtype: torch.dtype,
        **options: Any,
    ) -> ops.Run:
        """The run of one layer and direction, noise on its input and weights already there."""
        by_stream = {draw.rule.stream: draw for draw in draws}
        if dtype.is_complex and (self.norm is not None or "weight_noise" in by_stream):
            raise TypeError(f"input: expected real numbers for a norm or noise on weights, got {dtype}")
        weights = self._noisy_weights(suffix, by_stream, dtype)
        if (draw := by_stream.get("input")) is not None:
            x = drop_units(ops.dense(x, weights.w_ih), draw, examples, counts=options.get("counts"))
        inside = tuple(d for d in draws if d.rule.stream not in ("input", "weight", "weight_noise"))
        what = ops.Run(cell, x, h0, c0, weights, inside, examples, first_step, recompute=self.recompute, **options)
        if self.norm is not None:
            what = what._replace(norm=self._step_norm(suffix, what.steps, first_step, dtype))
        self._check_run(what, suffix)
        return what

    def _run(self, runs: dict[str, ops.Run]) -> list[ops.Result]:
        """Run the directions of one layer, given by their suffixes."""
        learns = isinstance(self.norm, RecurrentBatchNorm) and (self.training or self.recording is not None)
        made = list(runs.values())
        if learns and made[0].batch == 1:
            raise ValueError("input: expected at least 2 sequences for batch norm to learn from, got 1")
        results = ops.run(made, self.backend)
        for (suffix, run), result in zip(runs.items(), results):
            if learns and result.moments is not None and run.batch > 0:
                self._record(suffix, result.moments, run)
        return results

    def _check_weights(self, weights: ops.Weights, inputs: int, device: torch.device, suffix: str) -> None:
        """An error where one is not what a loop would take it for: it would read what is not there."""
        wide, hidden, outputs = GATES[self.kind] * self.hidden_size, self.hidden_size, self.output_size
        shapes = ((wide, inputs), (wide, outputs), (wide,), (wide,), (outputs, hidden))
        _check_shapes(WEIGHTS, weights, shapes, device, suffix)

    def _check_run(self, what: ops.Run, suffix: str) -> None:
        """The same of all parameters of a run."""
        norm, hidden, device = what.norm, self.hidden_size, what.x.device
        inputs = what.x.shape[-1] if has_features(what.x) else what.weights.w_ih.shape[-1]
        self._check_weights(what.weights, inputs, device, suffix)
        if norm is not None:
            values = (norm.scale_x, norm.scale_h, norm.scale_c, norm.shift_c)
            wide = (GATES[self.kind] * hidden,)
            _check_shapes(NORMS, values, (wide, wide, (hidden,), (hidden,)), device, suffix)

    def _noisy_weights(self, suffix: str, draws: dict[str, Draw], dtype: torch.dtype) -> ops.Weights:
        w_ih, w_hh, b_ih, b_hh, w_hr = (
            value if (value := getattr(self, name + suffix, None)) is None or value.dtype == dtype else value.to(dtype)
            for name in WEIGHTS
        )
        assert w_ih is not None and w_hh is not None
        if (draw := draws.get("weight")) is not None:
            one = torch.zeros(1, dtype=torch.int64, device=w_hh.device)
            w_hh = drop_units(w_hh.reshape(1, 1, -1), draw, one).view_as(w_hh)
        if (draw := draws.get("weight_noise")) is not None:
            w_ih, w_hh = add_noise(w_ih, draw, 0), add_noise(w_hh, draw, 1)
            w_hr = None if w_hr is None else add_noise(w_hr, draw, 2)
        return ops.Weights(w_ih, w_hh, b_ih, b_hh, w_hr)

    def _step_norm(self, suffix: str, steps: int, first_step: int, dtype: torch.dtype) -> StepNorm:
        assert self.norm is not None
        scale_x, scale_h, scale_c, shift_c = (
            None if (value := getattr(self, name + suffix, None)) is None else value.to(dtype) for name in NORMS
        )
        assert scale_x is not None and scale_h is not None
        given = None
        if isinstance(self.norm, RecurrentBatchNorm) and not self.training and self.norm.at_eval == "running":
            kept = (getattr(self, name) for name in self._statistics(suffix))
            given = Moments(*(rows(value, first_step, steps).to(dtype) for value in kept))
        over = "units" if isinstance(self.norm, LayerNorm) else "examples"
        return StepNorm(over, self.norm.eps, scale_x, scale_h, scale_c, shift_c, given)

    def _record(self, suffix: str, seen: Moments, run: ops.Run) -> None:
        """Move the running statistics, in training or while they are estimated anew.

        As torch's batch norm keeps it the variance is the unbiased one; a step with one sequence left has none.
        """
        assert isinstance(self.norm, RecurrentBatchNorm)
        first_step = run.first_step
        alive = seen.mean_x.new_full((len(seen.mean_x),), run.batch)
        if run.counts is not None:
            alive = run.counts.to(alive)
        elif run.lengths is not None:
            alive = (torch.arange(run.steps, device=alive.device)[:, None] < run.lengths).sum(1).to(alive)
        counts = (alive > 1).to(alive)
        if self.recording is None:
            weight = counts * self.norm.momentum
        else:  # an average: each step counts the batches that have reached it
            reached = self.recording.setdefault(suffix, counts.new_zeros(self.norm.steps))
            part = reached[first_step : first_step + run.steps]
            part += counts[: len(part)]
            weight = counts[: len(part)] / part.clamp(min=1)
        unbiased = (alive / (alive - 1).clamp(min=1))[:, None]
        for name, value in zip(self._statistics(suffix), seen):
            assert value is not None
            record(getattr(self, name), value * unbiased if name.startswith("var") else value, first_step, weight)

    def _extra(self) -> str:
        """What a printed layer says beyond torch's."""
        parts = []
        if self._noise is not None:
            parts.append(f"noise={list(self._noise) if isinstance(self._noise, tuple) else self._noise}")
        if self.norm is not None:
            parts.append("norm='layer'" if self.norm == LayerNorm() else f"norm={self.norm}")
        if self.learn_initial_state:
            parts.append("learn_initial_state=True")
        if self.backend is not None:
            parts.append(f"backend={self.backend!r}")
        if self.recompute:
            parts.append("recompute=True")
        return "".join(f", {part}" for part in parts)


def _check_shapes(
    names: Sequence[str],
    values: Sequence[Tensor | None],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    suffix: str,
) -> None:
    for name, value, shape in zip(names, values, shapes):
        if value is not None and (value.shape != shape or value.device != device):
            raise ValueError(
                f"{name}{suffix}: expected shape {shape} on {device}, got {tuple(value.shape)} on {value.device}"
            )


@contextmanager
def _real_tensors() -> Iterator[None]:
    """Make tensors that outlast the modes around: inference mode's cannot be saved, a FakeTensorMode's hold nothing."""
    with torch.inference_mode(False), nullcontext() if torch.compiler.is_compiling() else _disable_current_modes():
        yield


def _to_device(value: Tensor, device: torch.device) -> Tensor:
    """A rate or seed on a device; never an inference tensor, which could not be written to later."""
    dtype = widest(device) if value.is_floating_point() else None
    with torch.inference_mode(False):
        return value.to(device, dtype)


def has_features(x: Tensor) -> bool:
    """Whether an input is given by its features, and not by the numbers of one-hot rows."""
    return x.is_floating_point() or x.is_complex()


def check_parameter(weight: Tensor) -> None:
    """Raise if a weight is torch's wrapper for gradients of single examples, which takes no operators of others."""
    if type(weight).__name__ == "ExpandedWeight":
        raise NotImplementedError(
            "call_for_per_sample_grads cannot take zoneout's modules; take the gradients of single examples with "
            "torch.func.vmap(torch.func.grad(…)), as docs/ecosystem.md shows"
        )


def autocast_on(device: torch.device) -> bool:
    """Whether autocast is on for a device; not every device knows of it."""
    return ops.autocast_on(device.type)


def check_device(name: str, value: Tensor, weight: Tensor) -> None:
    if value.device != weight.device:
        raise ValueError(f"{name}: expected it on {weight.device} as the weights are, got {value.device}")


def no_tensor(input: Any, expected: str) -> TypeError:
    """The error for an input that is no tensor."""
    leaf = "; make the layer a leaf of the tracer, as docs/ecosystem.md shows" if isinstance(input, fx.Proxy) else ""
    return TypeError(f"input: expected {expected}, got {type(input).__name__}{leaf}")
