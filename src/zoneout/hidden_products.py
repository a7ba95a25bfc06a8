"""Runs of a cell whose products with h are replaced (`definition/hidden_products.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .definition import Definition
from .ops import Run, Weights


def with_products(run: Run, cell: Definition, own: Sequence[Tensor], values: Tensor) -> Run:
    """Return a run of `cell`, which computes the products of `run.cell` with h itself.

    `own` are the matrices that it takes in place of W_h, and `values` are its further gates of x.
    """
    w, bias = run.weights, run.weights.b_ih
    parameters = (*w.parameters, *own)
    if run.cell.storage.apart:
        biases = values.new_zeros(run.width) if w.b_hh is None else w.b_hh
        parameters = (*parameters, *biases.chunk(run.cell.gates))
    elif w.b_hh is not None:
        bias = w.b_hh if bias is None else bias + w.b_hh
    if bias is not None:
        bias = torch.cat((bias, torch.zeros_like(bias)))
    w_ih = torch.cat((w.w_ih, torch.zeros_like(w.w_ih)))
    first = torch.zeros_like(values) if run.extra is None else run.extra
    return run._replace(
        cell=cell,
        weights=Weights(w_ih, None, bias, None, None, parameters),
        extra=torch.cat((first, values), dim=-1),
    )
