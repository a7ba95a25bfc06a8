"""The common code of layers and single-step cells: norm, initial state, weights, `Run`s."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from . import ops
from .checks import autocast_on, wrong_shape
from .draws import Draw, stream_units
from .gaussian import with_fast_dropout
from .given import At, is_given, mask_of, mask_of_rate
from .noise import Noise
from .noise_checks import check_options
from .noisy import CallNoise, NoisyModule, rate_name
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
from .streams import UNTIED
from .torch_state import functionalizing
from .untied import with_untied_masks

WEIGHTS = {  # the fields of `ops.Weights`, and the names of the parameters without suffix
    "w_ih": "weight_ih", "w_hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh",
    "w_hr": "weight_hr",
}  # fmt: skip
# Streams of noise that is applied before the loop over time.
PRODUCTS = ("fast_input", "fast_hidden", *UNTIED)  # those that change the products of a run
OUTSIDE = ("input", "weight", "weight_noise", *PRODUCTS)
# Attributes that are fixed as soon as the weights exist: the loops would read out of bounds.
SIZES = ("input_size", "hidden_size", "proj_size", "num_layers", "bidirectional")
NORMS = ("norm_ih", "norm_hh", "norm_cell", "norm_cell_shift")  # three scales and one shift


class RecurrentModule(NoisyModule):
    """A mixin for layers and cells: everything except input and output shapes."""

    keeps_state_type = False  # True: under autocast on the CPU it computes in the type of its state
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

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; raise if it is a size that the weights have already."""
        if name in SIZES and "_weight_table" in self.__dict__ and value != getattr(self, name):
            raise AttributeError(
                f"{name}: expected {getattr(self, name)!r}, since the weights have their shapes, "
                f"got {value!r}; try a new {type(self).__name__}"
            )
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._weight_table = self._find_weights()

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
        self._add_noise(noise)

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
                f"input with input.to({weight.dtype}) or the module with .to({x.dtype})"
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
        cell, wide = self.definition, (self.width,)
        hidden, outputs = self.hidden_size, self.output_size
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
                raise wrong_shape(name, shape, device, value)
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
                raise wrong_shape(name + suffix, (size,), device, value)

    def _noisy_weights(self, weights: ops.Weights, draws: dict[str, Draw]) -> ops.Weights:
        """Return weights with the noise of a call applied to them."""
        w_ih, w_hh, w_hr = weights.w_ih, weights.w_hh, weights.w_hr
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
    shapes = module._weight_shapes(inputs)
    biases = ("b_ih", "b_hh") if getattr(module, "bias", True) else ()
    projection = ("w_hr",) if getattr(module, "proj_size", 0) else ()
    for name in ("w_ih", "w_hh", *biases, *projection, *own):
        if name in shapes:
            weight = torch.empty(shapes[name], device=device, dtype=dtype)
            module.register_parameter(WEIGHTS.get(name, name) + suffix, nn.Parameter(weight))
