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
from .hidden_products import with_products
from .ops import Run, autocast_on, dense
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
    w_hh = run.recurrent_weight
    rate = _rate(draw, w_hh)
    mean = w_hh * (1 - rate)
    if draw.seed is None:
        return run._replace(weights=run.weights._replace(w_hh=mean))
    variance = w_hh * w_hh * (rate * (1 - rate))
    normals = normals_at(draw, run.width, at).to(w_hh.dtype)
    return with_products(run, run.cell.variant(with_gaussian_product), (mean, variance), normals)


def _rate(draw: Draw, like: Tensor) -> Tensor:
    """Return a rate in the dtype of the weights: one number, or one per column."""
    return draw.rate.to(like.dtype)
