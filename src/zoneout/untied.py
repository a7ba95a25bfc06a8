"""Variational dropout with one mask for each gate, on x and on h.

Each gate then has its own dropped copy of x, so x·W_x becomes one product of all copies with the
gates' rows of W_x in blocks. The dropped copies of h differ within the loop. So the cell takes one
product for each gate itself, and the masks come as further gates of x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .definition.untied import with_gate_products
from .draws import Draw
from .given import At
from .hidden_products import with_products
from .ops import Run, dense
from .ops.dropout import drop_units


def with_untied_masks(run: Run, draws: dict[str, Draw], at: At) -> Run:
    """Return a run with a mask for every gate on x, on h, or on both."""
    x, h = draws.get("untied_input"), draws.get("untied_hidden")
    if x is not None:
        run = _with_input(run, x, at)
    return run if h is None else _with_hidden(run, h, at)


def _drop(x: Tensor, draw: Draw, at: At) -> Tensor:
    return drop_units(x, draw, at.examples, counts=at.counts)


def _with_input(run: Run, draw: Draw, at: At) -> Run:
    gates, w_ih = run.cell.gates, run.weights.w_ih
    copies = torch.cat([dense(run.x, w_ih)] * gates, dim=-1)
    blocks = torch.block_diag(*w_ih.chunk(gates))
    return run._replace(x=_drop(copies, draw, at), weights=run.weights._replace(w_ih=blocks))


def _with_hidden(run: Run, draw: Draw, at: At) -> Run:
    w_hh = run.recurrent_weight
    masks = _drop(w_hh.new_ones(*at.shape, run.width), draw, at)
    cell = run.cell.variant(with_gate_products)
    return with_products(run, cell, w_hh.chunk(run.cell.gates), masks)
