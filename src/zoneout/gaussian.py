"""Fast dropout: a product with dropped factors, replaced by one Gaussian number for each result.

Of a product Σ w x whose factors x are dropped with probability p, the mean is Σ (1 − p) w x and the
variance Σ p (1 − p) w² x². One normal number for each result of the product takes the place of a
mask for each of its factors.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from .definition.gaussian import LEAST, with_gaussian_product
from .draws import Draw
from .given import At
from .ops import Run, Weights, autocast_on, dense
from .ops.normals import normals_at


def with_fast_dropout(run: Run, draws: dict[str, Draw], at: At) -> Run:
    """Return a run whose products with x and h are drawn, or have their mean in evaluation."""
    x, h = draws.get("fast_input"), draws.get("fast_hidden")
    if x is not None:
        run = _with_drawn_input(run, x, at)
    if h is not None:
        run = _with_drawn_hidden(run, h, at)
    return run


def _with_drawn_input(run: Run, draw: Draw, at: At) -> Run:
    """Return a run whose x·W_x has its mean, plus its noise in `Run.extra`."""
    w, rate = run.weights, _rate(draw, run.weights.w_ih)
    scaled = run._replace(weights=w._replace(w_ih=w.w_ih * (1 - rate)))
    if draw.seed is None:
        return scaled
    normals, kind = normals_at(draw, run.width, at), w.w_ih.device.type
    with torch.autocast(kind, enabled=False) if autocast_on(kind) else nullcontext():
        features, w_ih, rate = (_of_squares(v) for v in (dense(run.x, w.w_ih), w.w_ih, rate))
        variance = (features * features * (rate * (1 - rate))) @ (w_ih * w_ih).t()
        noise = (variance + LEAST).sqrt() * normals.to(variance.dtype)
    return scaled._replace(extra=noise.to(w.w_ih.dtype))


def _of_squares(v: Tensor) -> Tensor:
    """Return a value in a type that has room for its square: float16 ends at 65504 and 6e-8."""
    return v.float() if v.dtype == torch.float16 else v


def _with_drawn_hidden(run: Run, draw: Draw, at: At) -> Run:
    """Return a run of the cell that draws its products with h."""
    w, w_hh = run.weights, run.recurrent_weight
    rate = _rate(draw, w_hh)
    mean = w_hh * (1 - rate)
    if draw.seed is None:
        return run._replace(weights=w._replace(w_hh=mean))
    cell, variance = with_gaussian_product(run.cell), w_hh * w_hh * (rate * (1 - rate))
    bias, own = w.b_ih, (*w.parameters, mean, variance)
    if run.cell.storage.apart:
        biases = w_hh.new_zeros(run.width) if w.b_hh is None else w.b_hh
        own = (*own, *biases.chunk(run.cell.gates))
    elif w.b_hh is not None:
        bias = w.b_hh if bias is None else bias + w.b_hh
    if bias is not None:
        bias = torch.cat((bias, torch.zeros_like(bias)))
    w_ih = torch.cat((w.w_ih, torch.zeros_like(w.w_ih)))
    weights = Weights(w_ih, None, bias, None, None, own)
    normals = normals_at(draw, run.width, at).to(w_hh.dtype)
    first = torch.zeros_like(normals) if run.extra is None else run.extra
    return run._replace(cell=cell, weights=weights, extra=torch.cat((first, normals), dim=-1))


def _rate(draw: Draw, like: Tensor) -> Tensor:
    """Return a rate in the dtype of the weights: one number, or one per column."""
    return draw.rate.to(like.dtype)
