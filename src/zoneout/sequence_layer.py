"""The base class of all layers: inputs of every form, states, the call, dropout between layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .calls import State
from .checks import (
    as_states,
    check_device,
    check_lengths,
    check_parameter,
    check_resets,
    check_state_dtype,
    has_features,
    no_tensor,
)
from .definition.operations import also, less, mix
from .draws import check_count, example_ids
from .given import At, StepRate, is_given, mask_of
from .noisy import CallNoise, Rates, drawn_rules
from .ops import Run, check_counts, packed, packing_of, padded, places
from .ops.dropout import dropout
from .philox import as_seed, fresh_seed
from .rates import readable
from .recurrent import RecurrentModule
from .repeated import Prepared, prepare, repeated
from .streams import DEPTH, plane
from .torch_state import plain_eager, zeros


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


class Call(NamedTuple):
    """What all layers and directions of a call have in common."""

    sequences: Sequences
    begins: list[Tensor]  # the states before the first step, [layers · directions, B, ·] each
    initial: list[Tensor]  # the states after a reset, as `begins`
    rows: Tensor  # [B]: the ids of the rows, in the order of the input
    first_step: int
    dtype: torch.dtype  # of the computation
    noise: CallNoise
    key: Tensor | None  # the seed; None: nothing is drawn
    return_states: bool


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
        *,
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
        noise = self._call_noise(rates, self.weight_ih_l0.device)
        # No backend runs packed rows with every kind of masks that are computed before its loop.
        given = len(noise.steps) > 0 or any(map(is_given, noise.rules))
        sequences = self._sequences(input, lengths, resets, pad=given)
        call = self._call(sequences, hx, noise, seed, examples, first_step, return_states, key)
        sequences, x = call.sequences, call.sequences.x

        all_runs: dict[str, Run] = {}
        ends: list[tuple[Tensor, ...]] = []
        every: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            below = x
            if layer > 0 and self.dropout > 0 and self.training:
                assert call.key is not None
                x = self._between_layers(
                    layer - 1, x, call.key, call.rows, call.first_step, sequences.counts
                )
            at = At(x.shape[:-1], call.rows, call.first_step, sequences.counts)
            runs, outputs = self._runs(call, layer, x, at), []
            all_runs |= runs
            for y, final, states, _ in self._run(runs):
                outputs.append(y)
                ends.append(final)
                if states:
                    every.append(states)
            if layer > 0:
                outputs = self._over_depth(below, outputs, layer, at, call.noise, call.key)
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

    def _call(
        self,
        sequences: Sequences,
        hx: State | None,
        noise: CallNoise,
        seed: int | Tensor | None,
        examples: int | Tensor | Sequence[int] | None,
        first_step: int,
        return_states: bool,
        key: Tensor | None,
    ) -> Call:
        """Check the arguments of a call, and return what all layers and directions need of them."""
        weight, x = self.weight_ih_l0, sequences.x
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
        sequences = sequences._replace(x=x)
        return Call(sequences, begins, initial, rows, first_step, dtype, noise, key, return_states)

    def _runs(self, call: Call, layer: int, x: Tensor, at: At) -> dict[str, Run]:
        """Return the runs of one layer, one for each direction, by suffix."""
        runs, directions = {}, 2 if self.bidirectional else 1
        suffixes, resets = list(self._weight_table), call.sequences.resets
        for direction in range(directions):
            k = layer * directions + direction
            draws = self._draws(call.noise, layer, direction, call.key)
            runs[suffixes[k]] = self._build_run(
                x,
                [state[k] for state in call.begins],
                suffixes[k],
                self._give_masks(draws, x, layer, at, call.dtype, call.noise),
                call.rows,
                call.first_step,
                call.dtype,
                lengths=call.sequences.lengths,
                resets=resets,
                reset_to=() if resets is None else tuple(state[k] for state in call.initial),
                reverse=direction == 1,
                return_states=call.return_states and layer == self.num_layers - 1,
                counts=call.sequences.counts,
            )
        return runs

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
                "tensor; try torch.nested.to_padded_tensor"
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
            resets = check_resets(resets, shape, names, x.device)
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
            resets = check_resets(resets, (steps, batch), "of packed rows [T, B]", x.device)
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
                f"one-hot rows, got {x.dtype} with {x.dim()} dimensions; for numbers as features "
                "pass input.float()"
            )
        if x.numel() and readable(x):
            low, high = (int(v) for v in torch.aminmax(x))
            if low < 0 or high >= self.input_size:
                raise ValueError(
                    "input: integer input is read as ids of one-hot rows, expected 0 to "
                    f"{self.input_size - 1} (input_size − 1), got {low} to {high}; for numbers as "
                    "features pass input.float(), for token ids put an nn.Embedding before the "
                    "layer, or make input_size the number of ids"
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
