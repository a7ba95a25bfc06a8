"""LSTM, GRU, RNN and Recurrent: layers with noise and norms inside the step.

Constructor, inputs, outputs and `state_dict` are those of `torch.nn`. The layers subclass
`nn.RNNBase` and not `nn.LSTM`, because `torch.compile` refuses to trace `nn.LSTM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import handle_torch_function

from . import cells
from .calls import Batch, LayerCall, Noises, Norm, State
from .checks import (
    check_cell_sizes,
    check_definition,
    check_dropout,
    check_num_layers,
    check_sizes,
)
from .definition import Definition
from .noisy import Rates
from .overrides import overriding
from .rates import warn_if_rounded
from .recurrent import WEIGHTS, add_weights
from .sequence_layer import SequenceLayer


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
        check_num_layers(num_layers)
        super().__init__(
            mode, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            proj_size, device, dtype,
        )  # fmt: skip
        warn_if_rounded(self.dropout, "dropout")
        self._add_parts(noise, norm, backend, learn_initial_state, recompute)

    @property
    def torch_name(self) -> str:
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
        check_num_layers(num_layers)
        sizes = {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers}
        check_sizes(sizes, least={"input_size": 0, "hidden_size": 1, "num_layers": 1})
        check_cell_sizes(cell, hidden_size, proj_size)
        check_dropout(dropout, num_layers)
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
