"""Checks of what a layer or cell is made of, and of the arguments of its calls."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from . import ops
from .definition import Definition
from .draws import as_integers
from .noise import Noise
from .rates import readable

# --- constructors ---------------------------------------------------------------------------------


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


def check_num_layers(num_layers: Any) -> None:
    if isinstance(num_layers, Noise):
        raise TypeError(
            f"num_layers: expected a whole number, got {num_layers!r}; pass noise by keyword, "
            "noise=…"
        )


def check_dropout(dropout: Any, num_layers: int) -> None:
    """Raise or warn as `nn.LSTM` does."""
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
        raise ValueError(f"dropout: expected a rate between 0 and 1, got {dropout!r}")
    if dropout > 0 and num_layers == 1:
        warnings.warn(
            f"dropout: {dropout} has no effect, since it is applied between layers and num_layers "
            "is 1",
            stacklevel=3,
        )


def check_cell_sizes(cell: Definition, hidden_size: int, proj_size: Any) -> None:
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
            "projection needs a cell that reads h only through r"
        )


def check_heads(cell: Definition, hidden_size: int) -> None:
    """Raise if the units cannot be divided among the heads."""
    if hidden_size % cell.heads:
        raise ValueError(
            f"hidden_size: expected a multiple of {cell.heads}, the heads of the cell "
            f"{cell.name!r}, got {hidden_size}"
        )


# --- calls ----------------------------------------------------------------------------------------


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


def check_resets(resets: Any, shape: tuple[int, ...], names: str, device: torch.device) -> Tensor:
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
            "gradients with torch.func.vmap(torch.func.grad(…)), as docs/ecosystem.md shows"
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


def wrong_shape(
    name: str, shape: tuple[int, ...], device: torch.device, value: Tensor | None
) -> ValueError:
    """Return the error for a weight with a wrong shape or device."""
    if value is None:
        return ValueError(f"{name}: expected shape {shape} on {device}, got None")
    return ValueError(
        f"{name}: expected shape {shape} on {device}, got {tuple(value.shape)} on {value.device}"
    )
