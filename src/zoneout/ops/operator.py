"""The operator `zoneout::run`: a whole pass over time as one node of the graph, and its derivative.

What a pass does is in `passes.py`; here is what autograd, `torch.compile` and `torch.func` need to know of it. An
operator takes and gives tensors and plain numbers only, so a `Run` is laid out flat for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI

from ..draws import Draw
from ..noise import MASKS, STREAMS, Rule
from ..norm import Moments, StepNorm
from . import passes, pieces
from .interface import Result, Run, Weights
from .passes import DIFFERENTIABLE, LOOPS, Back, Kept, as_outputs, gives_moments, reached

_STREAMS, _MASKS, _BY = tuple(STREAMS), tuple(MASKS), ("previous", "zero", "scaled zero")
_COUNT = len(DIFFERENTIABLE)


def run(r: Run) -> Result:
    """One pass through the operator."""
    y, h, c, cells, _, _, *seen = _call(*flatten(r))
    lstm = r.cell == "lstm"
    moments = Moments(*(seen if lstm else seen[:4])) if gives_moments(r) else None
    return Result(y, h, c if lstm else None, as_outputs(cells, y) if r.return_cells else None, moments)


# --- a run laid out flat ---------------------------------------------------------------------------


def differentiable(r: Run) -> tuple[Tensor | None, ...]:
    """What has a derivative, as `DIFFERENTIABLE` names it."""
    norm = (None,) * 4 if r.norm is None else (r.norm.scale_x, r.norm.scale_h, r.norm.scale_c, r.norm.shift_c)
    return (r.x, r.h0, r.c0, r.reset_h, r.reset_c, *r.weights, *norm)


def flatten(r: Run) -> tuple[Any, ...]:
    """The operator's arguments."""
    norm = r.norm
    given = [] if norm is None or norm.given is None else [v for v in norm.given if v is not None]
    codes = [r.first_step, int(r.recompute), int(r.return_cells)]
    for draw in r.draws:
        rule = draw.rule
        codes += [_STREAMS.index(rule.stream), _BY.index(rule.by), _MASKS.index(rule.mask)]
        codes += [int(rule.holds_gate), int(draw.seed is not None), draw.plane]
    expected = any(draw.seed is None for draw in r.draws)
    nothing: Any = torch.zeros((), dtype=torch.int64, device=r.x.device) if expected else None
    seeds = [nothing if draw.seed is None else draw.seed for draw in r.draws]
    over, eps = ("", 0.0) if norm is None else (norm.over, norm.eps)
    # Neither list is ever empty: AOTInductor would pass None in the place of it.
    numbers = [r.examples, *(draw.rate for draw in r.draws), *seeds, *given]
    return (r.cell, *differentiable(r), over, eps, codes, numbers, r.lengths, r.resets, r.reverse, r.counts)


def unflatten(cell: str, *args: Any) -> Run:
    """The run that was laid out flat."""
    (x, h0, c0, reset_h, reset_c, *weights), scales, args = args[:10], args[10:_COUNT], args[_COUNT:]
    over, eps, codes, numbers, lengths, resets, reverse, counts = args
    draws, given = decode(codes, numbers)
    norm = StepNorm(over, eps, *scales)._replace(given=Moments(*given) if given else None) if over else None
    return Run(
        cell, x, h0, c0, Weights(*weights), draws, numbers[0], codes[0], norm, lengths, resets, reset_h, reset_c,
        reverse, bool(codes[2]), counts, bool(codes[1]),
    )  # fmt: skip


def decode(codes: Sequence[int], numbers: Sequence[Tensor]) -> tuple[tuple[Draw, ...], Sequence[Tensor]]:
    """The draws, and the moments that a norm was given."""
    codes = codes[3:]
    draws, count = [], len(codes) // 6
    for k, (rate, seed) in enumerate(zip(numbers[1 : 1 + count], numbers[1 + count : 1 + 2 * count])):
        stream, by, mask, holds, drawn, plane = codes[6 * k : 6 * k + 6]
        rule = Rule(_STREAMS[stream], _BY[by], _MASKS[mask], "", bool(holds))
        draws.append(Draw(rule, rate, seed if drawn else None, plane))
    return tuple(draws), numbers[1 + 2 * count :]


# --- the operator and its derivative ---------------------------------------------------------------


@torch.library.custom_op("zoneout::run", mutates_args=())
def _run(
    cell: str,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    reset_h: Tensor | None,
    reset_c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    scale_x: Tensor | None,
    scale_h: Tensor | None,
    scale_c: Tensor | None,
    shift_c: Tensor | None,
    over: str,
    eps: float,
    codes: Sequence[int],
    numbers: Sequence[Tensor],
    lengths: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, h, c, cells; then for the way back gates and gh; then the moments of x·Wx, h·Wh and c."""
    r = unflatten(
        cell, x, h0, c0, reset_h, reset_c, w_ih, w_hh, b_ih, b_hh, w_hr, scale_x, scale_h, scale_c, shift_c,
        over, eps, codes, numbers, lengths, resets, reverse, counts,
    )  # fmt: skip
    if r.recompute:
        y, h, c, cells, moments = pieces.forward(r).result
        return filled(h0, y, h, c, cells, None, None, *(moments or [None] * 6))  # type: ignore[return-value]
    (kept,) = passes.forward(r)
    return filled(h0, *kept[:6], *kept.moments)  # type: ignore[return-value]


def filled(like: Tensor, *values: Tensor | None) -> tuple[Tensor, ...]:
    """As an operator gives them: an empty tensor where there is none."""
    return tuple(like.new_empty(0) if v is None else v for v in values)


@_run.register_fake
def _(cell: str, *args: Any) -> tuple[Tensor, ...]:
    if torch.autograd.forward_ad._current_level >= 0:  # a compiler would take the layer for a constant
        no_forward_mode(None)
    r = unflatten(cell, *args)
    h0, c0 = r.h0, r.c0
    dtype = passes.state_type(h0.dtype) if LOOPS[h0.device.type].WIDE else h0.dtype
    y, cells, gates, gh, moments = passes.empty_outputs(r, dtype)
    inner = (None, None) if r.recompute else (gates, gh)
    cells = None if r.recompute and not r.return_cells else cells
    moments = [None] * 6 if r.recompute and not gives_moments(r) else moments
    h = torch.empty_like(h0, memory_format=torch.contiguous_format)
    c = None if c0 is None else torch.empty_like(c0, memory_format=torch.contiguous_format)
    return filled(h0, y.to(h0.dtype), h, c, cells, *inner, *moments)


@torch.library.custom_op("zoneout::run_backward", mutates_args=())
def _run_backward(
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    dcells: Tensor | None,
    saved: Sequence[Tensor],
    needs: Sequence[bool],
    cell: str,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    reset_h: Tensor | None,
    reset_c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    scale_x: Tensor | None,
    scale_h: Tensor | None,
    scale_c: Tensor | None,
    shift_c: Tensor | None,
    over: str,
    eps: float,
    codes: Sequence[int],
    numbers: Sequence[Tensor],
    lengths: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    counts: Tensor | None,
) -> list[Tensor]:
    """The derivatives of all that has one; empty where there is none or nobody needs it."""
    r = unflatten(
        cell, x, h0, c0, reset_h, reset_c, w_ih, w_hh, b_ih, b_hh, w_hr, scale_x, scale_h, scale_c, shift_c,
        over, eps, codes, numbers, lengths, resets, reverse, counts,
    )  # fmt: skip
    d = (dy, dh, dc, dcells)
    if r.recompute:
        found = pieces.backward_anew(r, d, needs)
    else:
        (found,) = passes.backward(Back(r, _kept(r, saved), d, needs))
    return [h0.new_empty(0) if grad is None else grad for grad in found]


def _kept(r: Run, saved: Sequence[Tensor]) -> Kept:
    """What the way back needs, from what an operator has given."""
    y, cells, gates, gh, *moments = saved
    lstm, seen = r.cell == "lstm", r.norm is not None and r.norm.given is None
    there = [seen] * 4 + [seen and lstm] * 2
    return Kept(
        y, r.h0, None, cells if lstm else None, gates,
        gh if r.norm is not None or r.cell == "gru" else None,
        tuple(v if is_there else None for v, is_there in zip(moments, there)),
    )  # fmt: skip


@_run_backward.register_fake
def _(dy: Tensor, dh: Tensor, dc: Tensor, dcells: Tensor, saved: list[Tensor], needs: list[bool], *args: Any) -> Any:
    inputs, like = args[1 : 1 + _COUNT], args[2]
    return [
        like.new_empty(0) if v is None or not needed else torch.empty_like(v, memory_format=torch.contiguous_format)
        for v, needed in zip(inputs, needs)
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y, _, _, cells, gates, gh, *moments = output
    cell, tensors, rest = inputs[0], inputs[1 : 1 + _COUNT], inputs[1 + _COUNT :]
    over, eps, codes, numbers, lengths, resets, reverse, counts = rest
    ctx.set_materialize_grads(False)
    ctx.rest = cell, over, eps, codes, len(numbers), reverse
    ctx.present = [value is not None for value in tensors]
    kept = () if codes[1] else (y, cells, gates, gh, *moments)  # nothing, where it is recomputed
    ctx.save_for_backward(*tensors, lengths, resets, counts, *numbers, *kept)


def _backward(ctx: Any, dy: Tensor, dh: Tensor, dc: Tensor, dcells: Tensor, *_: Tensor) -> tuple[Any, ...]:
    cell, over, eps, codes, count, reverse = ctx.rest
    values = iter(ctx.saved_tensors)

    def take(count: int) -> list[Any]:
        return [next(values) for _ in range(count)]

    tensors, (lengths, resets, counts), numbers, saved = take(_COUNT), take(3), take(count), list(values)
    needs = [bool(there and needed) for there, needed in zip(ctx.present, ctx.needs_input_grad[1 : 1 + _COUNT])]
    needs = reached((tensors[0] if counts is None else counts).shape[0], (dy, dh, dc, dcells), needs)
    grads = call_backward(
        dy, dh, dc, dcells, saved, needs, cell, *tensors, over, eps, codes, numbers,
        lengths, resets, reverse, counts,
    )  # fmt: skip
    found = [grad if needed else None for grad, needed in zip(grads, needs)]
    return None, *found, None, None, None, [None] * count, *[None] * 4


torch.library.register_autograd("zoneout::run", _backward, setup_context=_setup)


def _no_second(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "a second derivative through zoneout's fused layers is not there; make the layer with backend='reference'"
    )


def no_forward_mode(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(
        "forward-mode derivatives of zoneout's fused layers are not there; make the layer with backend='reference'"
    )


torch.library.register_autograd("zoneout::run_backward", _no_second)


# --- torch.func ------------------------------------------------------------------------------------
# Its transforms cannot see through the node that torch.library makes of a derivative (pytorch issue 168393), and
# forward mode takes such a node for a constant. So they get nodes of our own.


def _transformed() -> bool:
    return torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()


def _let_count() -> None:
    """Make the operator known to `FlopCounterMode`, which is a dispatch mode."""
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        from . import flops  # that side knows this one

        flops.register()


def _call(*args: Any) -> tuple[Tensor, ...]:
    _let_count()
    return _through_transforms(_Transformed, torch.ops.zoneout.run, args)


def call_backward(*args: Any) -> Sequence[Tensor]:
    _let_count()
    return _through_transforms(_TransformedBackward, torch.ops.zoneout.run_backward, args)


def _through_transforms(node: type[torch.autograd.Function], op: Any, args: tuple[Any, ...]) -> Any:
    """The operator, as the innermost transform takes it.

    Neither operator writes to what it is given or gives it back, so `functionalize` has nothing to do but to unwrap and
    to wrap again; torch has no such rule for a node.
    """
    if not _transformed():
        return op(*args)
    innermost: Any = retrieve_current_functorch_interpreter()
    if innermost.key() != TransformType.Functionalize:
        return node.apply(*args)
    api = FunctorchFunctionalizeAPI(innermost)
    given: Any = api.unwrap_tensors(args)
    with api.redispatch_to_next():
        found = _through_transforms(node, op, given)
    return api.wrap_tensors(found)


def _vmap(op: Callable[..., Any]) -> Callable[..., Any]:
    """The rule for a batch of models: one after another."""

    def pick(value: Any, dim: Any, k: int) -> Any:
        if isinstance(value, (list, tuple)):
            dims = dim if isinstance(dim, (list, tuple)) else [dim] * len(value)
            return [pick(v, d, k) for v, d in zip(value, dims)]
        return value if dim is None else value.select(dim, k)

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        results = [op(*(pick(v, d, k) for v, d in zip(args, in_dims))) for k in range(info.batch_size)]
        stacked = [torch.stack(parts) for parts in zip(*results)]
        out = stacked if isinstance(results[0], list) else tuple(stacked)
        dims = [0] * len(stacked)
        return out, dims if isinstance(out, list) else tuple(dims)

    return rule


class _Transformed(torch.autograd.Function):
    """`zoneout::run` under a transform."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.zoneout.run(*args)

    setup_context = staticmethod(_setup)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return tuple(None if isinstance(grad, list) else grad for grad in _backward(ctx, *grads))

    jvp = staticmethod(no_forward_mode)
    vmap = staticmethod(_vmap(_call))


class _TransformedBackward(torch.autograd.Function):
    """`zoneout::run_backward` under a transform."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return tuple(torch.ops.zoneout.run_backward(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = staticmethod(_no_second)
    jvp = staticmethod(no_forward_mode)
    vmap = staticmethod(_vmap(call_backward))


torch.library.register_vmap("zoneout::run", _vmap(_call))
torch.library.register_vmap("zoneout::run_backward", _vmap(torch.ops.zoneout.run_backward))
