"""LSTM, GRU and RNN layers with noise and norms inside the step.

Constructor, inputs, outputs and `state_dict` are those of `torch.nn`. The layers subclass
`nn.RNNBase` and not `nn.LSTM`, because `torch.compile` refuses to trace `nn.LSTM`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, Unpack, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import handle_torch_function

from . import cells
from .calls import Batch, LayerCall
from .definition import Definition
from .definition.operations import also, less, mix
from .draws import as_integers, check_count, example_ids
from .given import At, StepRate, is_given, mask_of
from .noise import DEPTH, Noise, plane
from .norm import LayerNorm, RecurrentBatchNorm
from .ops import Run, check_counts, packed, packing_of, padded, places
from .ops.dropout import dropout
from .overrides import overriding
from .philox import as_seed, fresh_seed
from .rates import readable, warn_if_rounded
from .recurrent import (
    WEIGHTS,
    CallNoise,
    Rates,
    RecurrentModule,
    autocast_on,
    check_device,
    check_parameter,
    drawn_rules,
    has_features,
    no_tensor,
)
from .repeated import Prepared, prepare, repeated
from .torch_state import plain_eager, zeros

Noises: TypeAlias = "Noise | Iterable[Noise] | None"
Norm: TypeAlias = "str | LayerNorm | RecurrentBatchNorm | None"
State: TypeAlias = "Tensor | tuple[Tensor, ...]"


class Sequences(NamedTuple):
    """An input in the internal layout of the layers, and how to restore the caller's layout."""

    x: Tensor  # [T, B, input]; packed: [N, input], rows sorted by length, longest first
    steps: int
    batch: int
    lengths: Tensor | None  # [B]
    resets: Tensor | None  # [T, B]; packed: [N]
    batched: bool
    outputs: Callable[[Tensor], Any]  # [T, B, ·] -> the layout of the input
    counts: Tensor | None = None  # packed: [T], the number of rows at each step
    order: Tensor | None = None  # [B]: `sorted_indices` of the PackedSequence
    back: Tensor | None = None  # [B]: `unsorted_indices`, the inverse of `order`
    swapped: bool = False  # the caller's layout is [B, T, ·]

    def sort(self, v: Tensor, dim: int = 0) -> Tensor:
        """Return `v`, whose dimension `dim` holds the rows, in the row order of `x`."""
        return v if self.order is None else v.index_select(dim, self.order)


class SequenceLayer(RecurrentModule):
    """The base class of all layers: everything but the names and the construction of the
    parameters.
    """

    input_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    proj_size: int
    weight_ih_l0: Tensor
    _prepared: dict[tuple[bool, bool], Prepared | None]  # by training mode and `hx is None`

    def suffixes(self) -> list[str]:
        ends = ("", "_reverse") if self.bidirectional else ("",)
        return [f"_l{layer}{end}" for layer in range(self.num_layers) for end in ends]

    def input_sizes(self) -> list[int]:
        inner = self.output_size * (2 if self.bidirectional else 1)
        return [self.input_size] + [inner] * (self.num_layers - 1)

    def weight_names(self) -> list[str]:
        """Return the names of weights, biases and parameters of the cell."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise weights and biases as `torch.nn` does, and all other parameters to constants.

        A cell's own parameters are initialised like the weights. Norm scales become the norm's
        `scale`. Norm shifts and learned initial states become 0. Batch-norm statistics become
        mean 0 and variance 1.
        """
        bound = 1 / math.sqrt(self.hidden_size)  # exactly torch's expression: the same bits
        for name in self.weight_names():
            getattr(self, name).uniform_(-bound, bound)
        if hasattr(self, "_norm"):
            self._reset_parts()

    def flatten_parameters(self) -> None:
        """Do nothing: zoneout's layers need no contiguous copy of the weights."""

    def _forward(
        self,
        input: Tensor | PackedSequence,
        hx: State | None,
        lengths: Tensor | Sequence[int] | None,
        resets: Tensor | None,
        seed: int | Tensor | None,
        examples: int | Tensor | Sequence[int] | None,
        first_step: int,
        rates: Rates | None,
        return_states: bool,
        plain: bool,
        key: Tensor | None,
    ) -> tuple[Any, Any, list[Any]]:
        """Return the outputs, the final state, and with `return_states` the states after h at
        every step.

        `plain` and `key` are results of `_repeat`.
        """
        if not isinstance(input, (Tensor, PackedSequence)):
            raise no_tensor(input, "a tensor or a PackedSequence")
        weight = self.weight_ih_l0
        noise = self._call_noise(rates, weight.device)
        # No backend runs packed rows with every kind of masks that are computed before its loop.
        given = bool(noise.steps) or any(map(is_given, noise.rules))
        sequences = self._sequences(input, lengths, resets, pad=given)
        x = sequences.x
        check_parameter(weight)
        check_device("input", x, weight)
        dtype = self._working_dtype(x, hx, weight)
        x = x if x.dtype in (dtype, torch.int64) else x.to(dtype)
        # 0 is always valid. Without a check, an exporter keeps the number of steps symbolic.
        if type(first_step) is not int or first_step:
            first_step = check_count("first_step", first_step, 2**32 - sequences.steps + 1)
        initial = self._initial_states(sequences.batch, dtype)  # all rows are equal: no sorting
        begins = initial if hx is None else self._given_states(hx, initial, sequences)
        if examples is None and sequences.order is not None:
            rows = sequences.order  # the default ids 0, 1, 2, …, in sorted order
        else:
            rows = sequences.sort(example_ids(examples, sequences.batch, x.device))
        if noise.steps:
            noise = noise._replace(steps=self._arranged(noise.steps, sequences))
        key = self._seed(seed, x, noise) if key is None else key

        suffixes = list(self._weight_table)
        all_runs: dict[str, Run] = {}
        ends: list[tuple[Tensor, ...]] = []
        every: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            below = x
            if layer > 0 and self.dropout > 0 and self.training:
                assert key is not None
                x = self._between_layers(layer - 1, x, key, rows, first_step, sequences.counts)
            runs, outputs, directions = {}, [], 2 if self.bidirectional else 1
            at = At(x.shape[:-1], rows, first_step, sequences.counts)
            for direction in range(directions):
                k = layer * directions + direction
                draws = self._draws(noise, layer, direction, key)
                runs[suffixes[k]] = self._build_run(
                    x,
                    [state[k] for state in begins],
                    suffixes[k],
                    self._give_masks(draws, x, layer, at, dtype, noise),
                    rows,
                    first_step,
                    dtype,
                    lengths=sequences.lengths,
                    resets=sequences.resets,
                    reset_to=()
                    if sequences.resets is None
                    else tuple(state[k] for state in initial),
                    reverse=direction == 1,
                    return_states=return_states and layer == self.num_layers - 1,
                    counts=sequences.counts,
                )
            all_runs |= runs
            for y, final, states, _ in self._run(runs):
                outputs.append(y)
                ends.append(final)
                if states:
                    every.append(states)
            if layer > 0:
                outputs = self._over_depth(below, outputs, layer, at, noise, key)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

        form = self.training, hx is None
        usual = plain and sequences.batched and sequences.counts is None
        if usual and has_features(sequences.x) and form not in self._prepared:
            between = self.training and self.dropout > 0 and self.num_layers > 1
            self._prepared[form] = prepare(self, all_runs, 1 + self.bidirectional, between)
        final_states = _stacked(ends)
        if not sequences.batched:
            final_states = [state.squeeze(1) for state in final_states]
        elif sequences.back is not None:
            final_states = [state.index_select(1, sequences.back) for state in final_states]
        state = self._state(final_states)
        seen = [sequences.outputs(torch.cat(each, dim=-1)) for each in zip(*every)]
        return sequences.outputs(x), state, seen

    def _repeat(
        self, input: Any, hx: Any, seed: int | Tensor | None, first_step: int, *others: Any
    ) -> tuple[tuple[Tensor, Any] | None, bool, Tensor | None]:
        """Return the results of a call like an earlier one, or None if the general code has to run.

        Also return whether later calls like this one may be repeated, and the seed if one was
        drawn. `others` are all other arguments; a call with one of them is not repeated.
        """
        plain = not any(v is not None and v is not False for v in others) and plain_eager()
        done, key = repeated(self, input, hx, seed, first_step) if plain else (None, None)
        if done is None:
            return None, plain, key
        y = done.y.transpose(0, 1) if self.batch_first else done.y
        return (y, self._state(_stacked(done.final))), plain, key

    def _state(self, states: list[Tensor]) -> Any:
        """Return the states in the form of `hx`."""
        return tuple(states) if len(states) > 1 else states[0]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; what was prepared for calls depends on all but a few."""
        if name not in _CHANGED_BY_CALLS:
            self.__dict__["_prepared"] = {}
        super().__setattr__(name, value)

    # --- inputs and states ---

    def _sequences(
        self,
        input: Tensor | PackedSequence,
        lengths: Tensor | Sequence[int] | None,
        resets: Tensor | None,
        pad: bool = False,
    ) -> Sequences:
        """Check an input of any form and return it as [T, B, input] or as packed rows.

        Rows of a padded input keep the caller's order. `pad`: do not return packed rows.
        """
        if isinstance(input, PackedSequence):
            if lengths is not None:
                raise ValueError(
                    "lengths: expected None, since a packed input contains its lengths"
                )
            return self._packed(input, resets, pad)
        if input.is_nested:
            raise TypeError(
                "input: expected a padded tensor with lengths=… or a PackedSequence, got a nested "
                "tensor; "
                "try torch.nested.to_padded_tensor"
            )
        if input.layout is not torch.strided:
            raise TypeError(
                f"input: expected a dense tensor, got one with layout {input.layout}; try "
                "input.to_dense()"
            )
        features = has_features(input)
        if not features:
            input = self._check_numbers(input)
        if input.dim() not in (2, 3):
            raise ValueError(
                f"input: expected 2 dimensions (unbatched) or 3 (batched), got {input.dim()}"
            )
        if features:
            self._check_features(input, "input")
        batched = input.dim() == 3
        swap = batched and self.batch_first
        x = input.transpose(0, 1) if swap else input if batched else input.unsqueeze(1)
        steps, batch = x.shape[:2]
        if steps == 0:
            raise ValueError("input: expected at least one step, got a sequence of length 0")
        if resets is not None:
            shape = (batch, steps) if swap else (steps, batch) if batched else (steps,)
            names = "[B, T]" if swap else "[T, B]" if batched else "[T]"
            resets = _check_resets(resets, shape, names, x.device)
            resets = resets.t() if swap else resets if batched else resets.unsqueeze(1)
        if lengths is not None:
            lengths = check_lengths(lengths, steps, batch, batched).to(
                x.device, non_blocking=x.is_cuda
            )

        def outputs(y: Tensor) -> Tensor:
            return y.transpose(0, 1) if swap else y if batched else y.squeeze(1)

        return Sequences(x, steps, batch, lengths, resets, batched, outputs, swapped=swap)

    def _packed(self, input: PackedSequence, resets: Tensor | None, pad: bool) -> Sequences:
        """Check a packed input and return its rows.

        The rows stay packed if the backend supports that, unless `pad` is set. Otherwise they are
        padded, with the longest sequence first.
        """
        x, counts, order, back = input
        features = has_features(x)
        if not features:
            x = self._check_numbers(x)
        if x.dim() != 2:
            raise ValueError(
                f"input.data: expected rows of features, or int64 numbers, got {x.dim()} dimensions"
            )
        if features:
            self._check_features(x, "input.data")
        steps = counts.shape[0]
        if steps == 0:
            raise ValueError("input.batch_sizes: expected one number per step, got none")
        batch: Any = counts[0].item() if order is None else order.shape[0]  # symbolic when exported
        if resets is not None:
            resets = _check_resets(resets, (steps, batch), "of packed rows [T, B]", x.device)
            resets = resets if order is None else resets.index_select(1, order)
        if readable(counts):
            check_counts(counts, batch, x.shape[0])
        if self._packs(x) and not pad:
            if resets is not None:
                resets = resets[places(counts, x.shape[0])]
            return Sequences(
                x, steps, batch, None, resets, True,
                lambda y: PackedSequence(y, counts, order, back), counts, order, back,
            )  # fmt: skip
        packing = packing_of(counts, batch, x)

        def outputs(y: Tensor) -> PackedSequence:
            return PackedSequence(packed(y, packing), counts, order, back)

        return Sequences(
            padded(x, packing),
            steps,
            batch,
            packing.lengths,
            resets,
            True,
            outputs,
            None,
            order,
            back,
        )

    def _check_numbers(self, x: Tensor) -> Tensor:
        """Check that an input holds ids of one-hot rows; return it with a last dimension of 1."""
        if x.dtype != torch.int64 or x.dim() > 2:
            raise ValueError(
                "input: expected floating-point numbers, or int64 [T, B], which is read as ids of "
                "one-hot rows, "
                f"got {x.dtype} with {x.dim()} dimensions; for numbers as features pass "
                "input.float()"
            )
        if x.numel() and readable(x):
            low, high = (int(v) for v in torch.aminmax(x))
            if low < 0 or high >= self.input_size:
                raise ValueError(
                    "input: integer input is read as ids of one-hot rows, expected 0 to "
                    f"{self.input_size - 1} "
                    f"(input_size − 1), got {low} to {high}; for numbers as features pass "
                    "input.float(), for token ids "
                    "put an nn.Embedding before the layer, or make input_size the number of ids"
                )
        return x.unsqueeze(-1)

    def _check_features(self, x: Tensor, name: str) -> None:
        """Raise if the number of features is not `input_size`."""
        if x.shape[-1] != self.input_size:
            raise ValueError(
                f"{name}: expected {self.input_size} features in the last dimension (input_size), "
                f"got {x.shape[-1]}"
            )

    def _initial_states(self, batch: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the initial states, learned or zero, as [layers · directions, B, ·]."""
        weight, count = self.weight_ih_l0, self.num_layers * (2 if self.bidirectional else 1)
        if self.learn_initial_state:
            learned = (getattr(self, name) for name in self.initial_names())
            return [s.to(dtype)[:, None].expand(-1, batch, -1) for s in learned]
        h = zeros(weight, (count, batch, self.proj_size or self.hidden_size), dtype)
        other = zeros(weight, (count, batch, self.hidden_size), dtype) if self.proj_size else h
        return [h, *[other] * (len(self.definition.states) - 1)]

    def _given_states(self, hx: State, initial: list[Tensor], sequences: Sequences) -> list[Tensor]:
        """Return the states that the caller passed, in the internal layout."""
        states = []
        for (name, state), like in zip(as_states(hx, self.definition), initial, strict=True):
            shape = tuple(like.shape) if sequences.batched else (len(like), like.shape[2])
            if tuple(state.shape) != shape:
                raise ValueError(f"{name}: expected shape {shape}, got {tuple(state.shape)}")
            check_device(name, state, like)
            check_state_dtype(name, state, like)
            state = state.to(like.dtype)
            states.append(sequences.sort(state, 1) if sequences.batched else state.unsqueeze(1))
        return states

    def _arranged(
        self, rates: Mapping[str, tuple[StepRate, str]], sequences: Sequences
    ) -> dict[str, tuple[StepRate, str]]:
        """Return rates of each step with their dimensions in the order of the internal layout."""

        def arranged(rate: StepRate, name: str) -> StepRate:
            if not isinstance(rate, Tensor) or rate.dim() < 2:
                return rate
            wanted = 3 if sequences.batched else 2
            if rate.dim() != wanted:
                shape = "[T, B, units]" if sequences.batched else "[T, units]"
                raise ValueError(f"{name}: expected {shape}, got shape {tuple(rate.shape)}")
            if not sequences.batched:
                return rate.unsqueeze(1)
            rate = rate.transpose(0, 1) if sequences.swapped else rate
            return rate if rate.shape[1] == 1 else sequences.sort(rate, 1)

        return {key: (arranged(rate, name), name) for key, (rate, name) in rates.items()}

    def _seed(self, seed: int | Tensor | None, x: Tensor, noise: CallNoise) -> Tensor | None:
        """Return the seed of this call, or None if nothing is drawn.

        torch's generator is used only if a mask needs it.
        """
        if seed is not None:
            return as_seed(seed, x.device, copy=True)
        between = self.training and self.dropout > 0 and self.num_layers > 1
        if between or any(
            rule.mask != "static" for rule in drawn_rules(noise.rules, self.training)
        ):
            return fresh_seed(x)
        return None

    def _between_layers(
        self,
        layer: int,
        x: Tensor,
        key: Tensor,
        rows: Tensor,
        first_step: int,
        counts: Tensor | None,
    ) -> Tensor:
        """Apply the dropout between layers to the outputs of a layer.

        Its mask is a function of seed and coordinates, like all other masks.
        """
        parts = [
            dropout(
                part,
                self.dropout,
                key,
                plane("dropout", layer, direction),
                rows,
                first_step,
                counts,
            )
            for direction, part in enumerate(x.split(self.output_size, dim=-1))
        ]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def _over_depth(
        self,
        below: Tensor,
        outputs: list[Tensor],
        layer: int,
        at: At,
        noise: CallNoise,
        key: Tensor | None,
    ) -> list[Tensor]:
        """Return the outputs of a layer, where noise over depth replaces them by those below it."""
        if all(rule.stream not in DEPTH for rule in noise.rules):
            return outputs
        parts = below.split(self.output_size, dim=-1)
        changed = []
        for direction, (y, old) in enumerate(zip(outputs, parts)):
            draws = self._draws(noise, layer, direction, key, depth=True)
            given = self._give_masks(draws, below, layer, at, y.dtype, noise)
            drops = sorted(given, key=lambda draw: draw.rule.by != "zero")  # what is left out first
            for draw in drops:
                mask = draw.given
                if mask is None:
                    mask = mask_of(draw, self.output_size, at, y.dtype)
                y = _REPLACED[draw.rule.by](y, old, mask)
            changed.append(y)
        return changed


def _stacked(ends: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Return each state of all layers and directions as one tensor, from their final states."""
    # In place, so that the state is no view: detach_() must work, as on the states of torch.nn.
    return [torch.stack(each) if len(each) > 1 else each[0].unsqueeze_(0) for each in zip(*ends)]


# Attributes that calls read anew.
_CHANGED_BY_CALLS = {"training", "noise", "_noise", "_numbers", "_copies", "_current"}

_REPLACED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {  # by the `by` of a rule
    "previous": mix,
    "zero": lambda new, old, mask: less(new, mask),
    "added": also,
}


class RecurrentLayer(SequenceLayer, nn.RNNBase):
    """The base class of `LSTM`, `GRU` and `RNN`: torch's names around a definition."""

    kind: str  # "lstm", "gru" or "rnn"
    family: Definition  # the cell, or one with the same states and marks

    def __init__(
        self,
        mode: str,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        proj_size: int,
        device: Any,
        dtype: torch.dtype | None,
        noise: Noises,
        norm: Norm,
        learn_initial_state: bool,
        backend: str | None,
        recompute: bool,
    ) -> None:
        _check_num_layers(num_layers)
        super().__init__(
            mode, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            proj_size, device, dtype,
        )  # fmt: skip
        warn_if_rounded(self.dropout, "dropout")
        self._add_parts(noise, norm, backend, learn_initial_state, recompute)

    @property
    def cell_name(self) -> str:
        return self.kind.upper()

    def weight_names(self) -> list[str]:
        return list(self._flat_weights_names)

    def extra_repr(self) -> str:
        return super().extra_repr() + self._extra()

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: State | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        resets: Tensor | None = None,
        seed: int | Tensor | None = None,
        examples: int | Tensor | Sequence[int] | None = None,
        first_step: int = 0,
        rates: Rates | None = None,
        return_cells: bool = False,
    ) -> Any:
        """Run the layer over a batch of sequences.

        **An int64 input is read as ids, not as features.** Its shape is [T, B] ([B, T] with
        `batch_first`), or [T] unbatched. Each id stands for a one-hot row of `input_size` features,
        and a look-up replaces the matrix product. For token ids, put an `nn.Embedding` before the
        layer. To use whole numbers as features, pass `input.float()`. On the CPU, an id outside of
        0 to `input_size` − 1 is an error.

        Args:
            input: [T, B, input_size], [B, T, input_size] with `batch_first`, [T, input_size]
                unbatched, or a PackedSequence.
            hx: the state before the first step, as in `torch.nn`; by default zero, or the learned
                state.
            lengths: the lengths of the sequences of a padded batch, [B]. Outputs past a length are
                zero, and the final state is the state at the end of each sequence.
            resets: a bool tensor or NumPy array, [T, B]; [B, T] for a padded input with
                `batch_first`, [T] unbatched. True cuts the sequence before that step: the state
                becomes the initial one (zero or learned, not `hx`), and nothing crosses the cut in
                either direction.
            seed: the seed of all masks; by default it is drawn from torch's generator.
            examples: the ids of the rows for the masks: an offset, or one id per row.
            first_step: the number of the first step for the masks. With `examples` and
                `first_step`, a part of a larger batch or of a longer sequence draws the same masks
                as the whole.
            rates: rates that replace those of the layer's noise in this call, by stream, such as
                `{"cell": 0.5, "hidden": 0.05}`. Each is a number, a list with one rate per layer,
                or a tensor with one rate per unit, which `torch.func.vmap` may batch. Rates of
                states and of the update may also change from step to step: a tensor
                [T, B, units] in the layout of the input, in which a size may be 1, or a function
                (a module) that computes it from the input of the layer, [T, B, input_size]. Such a
                rate may have a gradient; see `Zoneout`.
            return_cells: also return c_t of the last layer at every step (LSTM only).

        Returns:
            The outputs and the final state, as in `torch.nn`. The outputs are [T, B, D · H],
            [B, T, D · H] with `batch_first`, or [T, D · H] unbatched, where D is 2 for a
            bidirectional layer and else 1; of a PackedSequence they are one. The state of an LSTM
            is (h, c), that of a GRU or RNN is h; each is [D · num_layers, B, H], without B if
            unbatched. With `proj_size`, H of outputs and h is that size. With `return_cells`, a
            third result holds the cells in the layout of the outputs.
        """
        others = lengths, resets, examples, rates, return_cells
        done, plain, key = self._repeat(input, hx, seed, first_step, *others)
        if done is not None:
            return done
        call: dict[str, Any] = {
            "lengths": lengths,
            "resets": resets,
            "seed": seed,
            "examples": examples,
        }
        call |= {"first_step": first_step, "rates": rates}
        if overriders := overriding(input, hx):
            return handle_torch_function(
                RecurrentLayer.forward,
                overriders,
                self,
                input,
                hx,
                **call,
                return_cells=return_cells,
            )
        y, state, seen = self._forward(
            input, hx, **call, return_states=return_cells, plain=plain, key=key
        )
        if return_cells and not seen:
            raise ValueError(
                f"return_cells: expected False, since a {self.cell_name} has no cell state, got "
                "True"
            )
        return (y, state, *seen)


class LSTM(RecurrentLayer):
    """`nn.LSTM` with noise: the same arguments, inputs, outputs and `state_dict`.

    The keyword arguments from `noise` on are additional. `forward` has the arguments of the call.

    Args:
        input_size: the number of features of the input.
        hidden_size: the number of units, H.
        num_layers: the number of layers, each of which reads the outputs of the one below.
        bias: False leaves out both biases.
        batch_first: True for inputs and outputs [B, T, ·]; otherwise they are [T, B, ·].
        dropout: the rate of dropout on the outputs of all layers but the last, in training.
        bidirectional: True adds a second direction, from the last step to the first; outputs are
            those of both, side by side.
        proj_size: the size to which h is projected after each step; 0: no projection.
        device, dtype: of the parameters.
        noise: a noise, a list of noises, or None.
        norm: `"layer"`, a `RecurrentBatchNorm`, or None.
        learn_initial_state: True makes h0 and c0 parameters.
        backend: the implementation to use; by default the device of the input decides.
        recompute: True makes the backward pass run the steps again instead of storing their
            intermediate results, which takes less memory and more time.

    >>> import torch, zoneout as zo
    >>> layer = zo.LSTM(50, 100, noise=zo.Zoneout(cell=0.5, hidden=0.05))
    >>> y, (h, c) = layer(torch.randn(20, 8, 50))
    >>> y.shape, h.shape, c.shape
    (torch.Size([20, 8, 100]), torch.Size([1, 8, 100]), torch.Size([1, 8, 100]))
    """

    kind = "lstm"
    family = definition = cells.lstm

    if TYPE_CHECKING:

        @overload
        def __call__(
            self,
            input: Batch,
            hx: tuple[Tensor, ...] | None = None,
            *,
            return_cells: Literal[False] = False,
            **call: Unpack[LayerCall],
        ) -> tuple[Batch, tuple[Tensor, Tensor]]: ...

        @overload
        def __call__(
            self,
            input: Batch,
            hx: tuple[Tensor, ...] | None = None,
            *,
            return_cells: Literal[True],
            **call: Unpack[LayerCall],
        ) -> tuple[Batch, tuple[Tensor, Tensor], Batch]: ...

        def __call__(self, *args: Any, **call: Any) -> Any: ...

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        noise: Noises = None,
        norm: Norm = None,
        learn_initial_state: bool = False,
        backend: str | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__(
            "LSTM", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            proj_size, device, dtype, noise, norm, learn_initial_state, backend, recompute,
        )  # fmt: skip

    get_expected_cell_size = nn.LSTM.get_expected_cell_size
    check_forward_args = nn.LSTM.check_forward_args  # type: ignore[assignment]
    permute_hidden = nn.LSTM.permute_hidden  # type: ignore[assignment]


class GRU(RecurrentLayer):
    """`nn.GRU` with noise: the same arguments, inputs, outputs and `state_dict`.

    The hidden state is the only state. The keyword arguments from `noise` on are additional.

    Args:
        input_size: the number of features of the input.
        hidden_size: the number of units, H.
        num_layers: the number of layers, each of which reads the outputs of the one below.
        bias: False leaves out both biases.
        batch_first: True for inputs and outputs [B, T, ·]; otherwise they are [T, B, ·].
        dropout: the rate of dropout on the outputs of all layers but the last, in training.
        bidirectional: True adds a second direction, from the last step to the first; outputs are
            those of both, side by side.
        device, dtype: of the parameters.
        noise: a noise, a list of noises, or None.
        norm: `"layer"`, a `RecurrentBatchNorm`, or None.
        learn_initial_state: True makes h0 a parameter.
        backend: the implementation to use; by default the device of the input decides.
        recompute: True makes the backward pass run the steps again instead of storing their
            intermediate results, which takes less memory and more time.

    >>> import torch, zoneout as zo
    >>> layer = zo.GRU(50, 100, noise=zo.Zoneout(hidden=0.1))
    >>> y, h = layer(torch.randn(20, 8, 50))
    """

    kind = "gru"
    family = definition = cells.gru

    if TYPE_CHECKING:

        def __call__(
            self, input: Batch, hx: Tensor | None = None, **call: Unpack[LayerCall]
        ) -> tuple[Batch, Tensor]: ...

    keeps_state_type = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        noise: Noises = None,
        norm: Norm = None,
        learn_initial_state: bool = False,
        backend: str | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__(
            "GRU", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            0, device, dtype, noise, norm, learn_initial_state, backend, recompute,
        )  # fmt: skip


class RNN(RecurrentLayer):
    """`nn.RNN` with noise: the same arguments, inputs, outputs and `state_dict`.

    The hidden state is the only state. The keyword arguments from `noise` on are additional.

    Args:
        input_size: the number of features of the input.
        hidden_size: the number of units, H.
        num_layers: the number of layers, each of which reads the outputs of the one below.
        nonlinearity: `"tanh"` or `"relu"`.
        bias: False leaves out both biases.
        batch_first: True for inputs and outputs [B, T, ·]; otherwise they are [T, B, ·].
        dropout: the rate of dropout on the outputs of all layers but the last, in training.
        bidirectional: True adds a second direction, from the last step to the first; outputs are
            those of both, side by side.
        device, dtype: of the parameters.
        noise: a noise, a list of noises, or None.
        norm: `"layer"`, a `RecurrentBatchNorm`, or None.
        learn_initial_state: True makes h0 a parameter.
        backend: the implementation to use; by default the device of the input decides.
        recompute: True makes the backward pass run the steps again instead of storing their
            intermediate results, which takes less memory and more time.

    >>> import torch, zoneout as zo
    >>> layer = zo.RNN(50, 100, nonlinearity="relu", noise=zo.Zoneout(hidden=0.1))
    >>> y, h = layer(torch.randn(20, 8, 50))
    """

    kind = "rnn"
    family = cells.rnn_tanh

    if TYPE_CHECKING:

        def __call__(
            self, input: Batch, hx: Tensor | None = None, **call: Unpack[LayerCall]
        ) -> tuple[Batch, Tensor]: ...

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        noise: Noises = None,
        norm: Norm = None,
        learn_initial_state: bool = False,
        backend: str | None = None,
        recompute: bool = False,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"nonlinearity: expected 'tanh' or 'relu', got {nonlinearity!r}")
        self.nonlinearity = nonlinearity
        super().__init__(
            f"RNN_{nonlinearity.upper()}", input_size, hidden_size, num_layers, bias, batch_first,
            dropout, bidirectional, 0, device, dtype, noise, norm, learn_initial_state, backend,
            recompute,
        )  # fmt: skip

    @property
    def definition(self) -> Definition:  # type: ignore[override]
        return cells.rnn_relu if self.nonlinearity == "relu" else cells.rnn_tanh


class Recurrent(SequenceLayer):
    """A layer of any cell that is written as an equation (`zo.cell`).

    Arguments, inputs and outputs are those of `LSTM`, except that the cell comes first. A cell with
    several states has a tuple of them as its state, a cell with one state that state. Parameters
    are named as in `torch.nn`; each parameter of the cell has its own name and a suffix, such as
    `p_i_l0`.

    Args:
        cell: the definition of the cell.
        input_size, hidden_size, num_layers, bias, batch_first, dropout: as in `LSTM`.
        bidirectional, proj_size, device, dtype: as in `LSTM`. `proj_size` needs a cell that reads h
            only through `r`.
        noise, norm, learn_initial_state, backend, recompute: as in `LSTM`. A norm needs a cell
            whose recurrence is "dense".

    >>> import torch, zoneout as zo
    >>> @zo.cell(gates=2)
    ... def light_gru(x, r, h):
    ...     z, n = (a + b for a, b in zip(x, r))
    ...     z = z.sigmoid()
    ...     return z * h + zo.update((1 - z) * n.relu())
    >>> layer = zo.Recurrent(light_gru, 10, 20, noise=zo.Zoneout(hidden=0.1))
    >>> y, h = layer(torch.randn(5, 4, 10))
    """

    def __init__(
        self,
        cell: Definition,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        noise: Noises = None,
        norm: Norm = None,
        learn_initial_state: bool = False,
        backend: str | None = None,
        recompute: bool = False,
    ) -> None:
        check_definition(cell)
        _check_num_layers(num_layers)
        sizes = {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers}
        check_sizes(sizes, least={"input_size": 0, "hidden_size": 1, "num_layers": 1})
        _check_cell_sizes(cell, hidden_size, proj_size)
        _check_dropout(dropout, num_layers)
        super().__init__()
        self.definition = cell
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, float(dropout)
        self.bidirectional, self.proj_size = bidirectional, proj_size
        inputs = [size for size in self.input_sizes() for _ in range(2 if bidirectional else 1)]
        for suffix, size in zip(self.suffixes(), inputs, strict=True):
            add_weights(self, size, suffix, device, dtype)
        warn_if_rounded(self.dropout, "dropout")
        self.reset_parameters()
        self._add_parts(noise, norm, backend, learn_initial_state, recompute)

    def weight_names(self) -> list[str]:
        names = (*WEIGHTS.values(), *self.definition.parameters)
        every = (f"{name}{suffix}" for suffix in self.suffixes() for name in names)
        return [name for name in every if name in self._parameters]

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        """The parameters of each layer and direction."""
        names = (*WEIGHTS.values(), *self.definition.parameters)
        return [
            [p for n in names if (p := self._parameters.get(n + suffix)) is not None]
            for suffix in self.suffixes()
        ]

    def extra_repr(self) -> str:
        shown = f"{self.definition.name}, {self.input_size}, {self.hidden_size}"
        if self.proj_size:
            shown += f", proj_size={self.proj_size}"
        for name, default in (
            ("num_layers", 1),
            ("bias", True),
            ("batch_first", False),
            ("dropout", 0.0),
        ):
            if getattr(self, name) != default:
                shown += f", {name}={getattr(self, name)}"
        return shown + (", bidirectional=True" if self.bidirectional else "") + self._extra()

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: State | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        resets: Tensor | None = None,
        seed: int | Tensor | None = None,
        examples: int | Tensor | Sequence[int] | None = None,
        first_step: int = 0,
        rates: Rates | None = None,
        return_states: bool = False,
    ) -> Any:
        """Run the layer over a batch of sequences.

        Args:
            input, lengths, resets, seed, examples, first_step, rates: as in `LSTM.forward`.
            hx: the states before the first step: a tuple of them, or the state itself if the cell
                has one.
            return_states: also return all states of the last layer at every step.

        Returns:
            The outputs and the final state. With `return_states`, a third result is a dict from the
            name of each state to its values in the layout of the outputs.
        """
        others = lengths, resets, examples, rates, return_states
        done, plain, key = self._repeat(input, hx, seed, first_step, *others)
        if done is not None:
            return done
        call: dict[str, Any] = {
            "lengths": lengths,
            "resets": resets,
            "seed": seed,
            "examples": examples,
        }
        call |= {"first_step": first_step, "rates": rates, "return_states": return_states}
        if overriders := overriding(input, hx):
            return handle_torch_function(Recurrent.forward, overriders, self, input, hx, **call)
        y, state, seen = self._forward(input, hx, **call, plain=plain, key=key)
        return (
            (y, state, dict(zip(self.definition.states, (y, *seen))))
            if return_states
            else (y, state)
        )


# --- checks ---------------------------------------------------------------------------------------


def check_definition(cell: Any) -> None:
    """Raise if `cell` is not a definition."""
    if not isinstance(cell, Definition):
        function = callable(cell) and not isinstance(cell, type)
        hint = "; decorate the function with zo.cell(gates=…)" if function else ""
        raise TypeError(
            f"cell: expected a definition made by zo.cell, got {type(cell).__name__}{hint}"
        )


def check_sizes(sizes: dict[str, Any], least: dict[str, int]) -> None:
    """Raise if a size is not a whole number, or too small."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least[name]:
            raise ValueError(
                f"{name}: expected a whole number of at least {least[name]}, got {value!r}"
            )


def _check_num_layers(num_layers: Any) -> None:
    if isinstance(num_layers, Noise):
        raise TypeError(
            f"num_layers: expected a whole number, got {num_layers!r}; pass noise by keyword, "
            "noise=…"
        )


def _check_dropout(dropout: Any, num_layers: int) -> None:
    """Raise or warn as `nn.LSTM` does."""
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
        raise ValueError(f"dropout: expected a rate between 0 and 1, got {dropout!r}")
    if dropout > 0 and num_layers == 1:
        warnings.warn(
            f"dropout: {dropout} has no effect, since it is applied between layers and num_layers "
            "is 1",
            stacklevel=3,
        )


def _check_cell_sizes(cell: Definition, hidden_size: int, proj_size: Any) -> None:
    """Raise if a cell cannot have these sizes."""
    check_heads(cell, hidden_size)
    if (
        isinstance(proj_size, bool)
        or not isinstance(proj_size, int)
        or not 0 <= proj_size < hidden_size
    ):
        raise ValueError(
            f"proj_size: expected a whole number from 0 to hidden_size − 1, got {proj_size!r}"
        )
    if proj_size and (cell.reads_h or cell.recurrence != "dense"):
        why = "reads h itself" if cell.reads_h else f"has recurrence={cell.recurrence!r}"
        raise ValueError(
            f"proj_size: expected 0 for the cell {cell.name!r}, which {why}, got {proj_size}; a "
            "projection needs a cell "
            "that reads h only through r"
        )


def check_heads(cell: Definition, hidden_size: int) -> None:
    """Raise if the units cannot be divided among the heads."""
    if hidden_size % cell.heads:
        raise ValueError(
            f"hidden_size: expected a multiple of {cell.heads}, the heads of the cell "
            f"{cell.name!r}, got {hidden_size}"
        )


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


def as_states(hx: Any, cell: Definition) -> list[tuple[str, Tensor]]:
    """Return `hx` as its states, each with a name for messages; raise if it is anything else."""
    states = cell.states
    if len(states) > 1:
        if (
            not isinstance(hx, (tuple, list))
            or len(hx) != len(states)
            or not all(isinstance(s, Tensor) for s in hx)
        ):
            many = "a pair of tensors" if len(states) == 2 else f"a tuple of {len(states)} tensors"
            raise TypeError(f"hx: expected {many} ({', '.join(states)}), got {_describe(hx)}")
        return [(f"hx[{k}]", state) for k, state in enumerate(hx)]
    if not isinstance(hx, Tensor):
        raise TypeError(f"hx: expected a tensor, got {_describe(hx)}")
    return [("hx", hx)]


def _describe(value: Any) -> str:
    """Return the type of a value, and those of the elements of a tuple or list, for a message."""
    if isinstance(value, (tuple, list)):
        return (
            f"a {type(value).__name__} of "
            f"{', '.join(type(one).__name__ for one in value) or 'nothing'}"
        )
    return type(value).__name__


def check_state_dtype(name: str, state: Tensor, x: Tensor) -> None:
    """Raise if a state has another dtype than `x`, unless autocast is on."""
    if state.dtype != x.dtype and not autocast_on(x.device):
        raise ValueError(f"{name}: expected {x.dtype} as the input has, got {state.dtype}")


def _check_resets(resets: Any, shape: tuple[int, ...], names: str, device: torch.device) -> Tensor:
    """Return `resets` as a bool tensor on `device`; raise if its type or shape is wrong."""
    if not isinstance(resets, Tensor) and hasattr(resets, "__array__"):
        # A copy of a NumPy array: its owner may write to it before the backward pass.
        resets = torch.as_tensor(resets, device="cpu").clone()
    if not isinstance(resets, Tensor) or resets.dtype != torch.bool:
        got = resets.dtype if isinstance(resets, Tensor) else type(resets).__name__
        raise TypeError(f"resets: expected a bool tensor {names}, got {got}")
    if tuple(resets.shape) != shape:
        raise ValueError(f"resets: expected shape {names} = {shape}, got {tuple(resets.shape)}")
    return resets.to(device)


def check_lengths(lengths: Tensor | Sequence[int], steps: int, batch: int, batched: bool) -> Tensor:
    """Return `lengths` as an int64 tensor [B]; raise if the shape or a value is wrong.

    Values must be from 0 to `steps`. On a device they are clamped, because reading them would wait.
    """
    ends = as_integers("lengths", lengths)
    if not batched and ends.dim() == 0:
        ends = ends[None]
    if tuple(ends.shape) != (batch,):
        raise ValueError(
            f"lengths: expected one for each of {batch} sequences, got shape {tuple(ends.shape)}"
        )
    if batch and readable(ends) and (int(ends.min()) < 0 or int(ends.max()) > steps):
        raise ValueError(
            f"lengths: expected numbers from 0 to {steps}, the steps of the input, "
            f"got {int(ends.min())} to {int(ends.max())}"
        )
    return ends.to(torch.int64).clamp(0, steps)
