"""The operator `zoneout::run`: a whole pass over time as one node of the graph, and its derivative.

Everything that is the same on every device is here: packing the rows, the large products before and after the loop,
the norm of x's part, and what autograd and `torch.compile` need to know. The loop itself is a device's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..draws import Draw, draw_masks
from ..noise import MASKS, STREAMS, Rule
from ..norm import Moments, StepNorm
from . import cpu
from .interface import Result, Run, Weights
from .loop import GATES, Backward, Loop
from .rows import Rows

LOOPS = {"cpu": cpu}

# The operator's arguments after the first that have a derivative.
_DIFFERENTIABLE = (
    "x", "h0", "c0", "reset_h", "reset_c", "w_ih", "w_hh", "b_ih", "b_hh", "w_hr",
    "scale_x", "scale_h", "scale_c", "shift_c",
)  # fmt: skip

_STREAMS, _MASKS, _BY = tuple(STREAMS), tuple(MASKS), ("previous", "zero", "scaled zero")


def run(r: Run) -> Result:
    """One pass through the operator."""
    if r.x.device.type not in LOOPS:
        raise ValueError(
            f"backend: expected the input on one of {', '.join(LOOPS)}, got {r.x.device}; backend=None would do"
        )
    codes, rates, seeds = _encode(r.draws, r.x)
    norm, w = r.norm, r.weights
    given = [] if norm is None or norm.given is None else [v for v in norm.given if v is not None]
    y, h, c, cells, _, _, *seen = _call(
        r.cell, r.x, r.h0, r.c0, r.reset_h, r.reset_c, w.w_ih, w.w_hh, w.b_ih, w.b_hh, w.w_hr,
        None if norm is None else norm.scale_x,
        None if norm is None else norm.scale_h,
        None if norm is None else norm.scale_c,
        None if norm is None else norm.shift_c,
        "" if norm is None else norm.over, 0.0 if norm is None else norm.eps, given,
        codes, rates, seeds, r.examples, r.first_step, r.lengths, r.resets, r.reverse,
    )  # fmt: skip
    lstm = r.cell == "lstm"
    moments = None
    if norm is not None and norm.over == "examples" and norm.given is None:
        moments = Moments(*(seen if lstm else seen[:4]))
    return Result(y, h, c if lstm else None, cells if r.return_cells else None, moments)


# --- noise as an operator can take it --------------------------------------------------------------


def _encode(draws: Sequence[Draw], x: Tensor) -> tuple[list[int], list[Tensor], list[Tensor]]:
    codes: list[int] = []
    for draw in draws:
        rule = draw.rule
        codes += [_STREAMS.index(rule.stream), _BY.index(rule.by), _MASKS.index(rule.mask)]
        codes += [int(rule.holds_gate), int(draw.seed is not None), draw.plane]
    nothing = torch.zeros((), dtype=torch.int64, device=x.device) if any(d.seed is None for d in draws) else None
    seeds = [nothing if d.seed is None else d.seed for d in draws]
    return codes, [d.rate for d in draws], seeds  # type: ignore[return-value]


def _decode(codes: Sequence[int], rates: Sequence[Tensor], seeds: Sequence[Tensor]) -> dict[str, Draw]:
    draws = {}
    for k, (rate, seed) in enumerate(zip(rates, seeds)):
        stream, by, mask, holds, drawn, plane = codes[6 * k : 6 * k + 6]
        rule = Rule(_STREAMS[stream], _BY[by], _MASKS[mask], "", bool(holds))
        draws[rule.stream] = Draw(rule, rate, seed if drawn else None, plane)
    return draws


# --- forwards --------------------------------------------------------------------------------------


def _wide(*values: Tensor | None) -> list[Tensor | None]:
    """The values in the precision that states are kept in: float32 for the half types."""
    return [v if v is None or v.dtype in (torch.float32, torch.float64) else v.float() for v in values]


def _step_norm(over: str, eps: float, scales: Sequence[Tensor | None], given: Sequence[Tensor]) -> StepNorm | None:
    if not over:
        return None
    scale_x, scale_h, scale_c, shift_c = scales
    assert scale_x is not None and scale_h is not None
    moments = Moments(*_wide(*given)) if given else None  # type: ignore[arg-type]
    return StepNorm(over, eps, scale_x, scale_h, scale_c, shift_c, moments)


def _loop(
    cell: str,
    rows: Rows,
    h0: Tensor,
    c0: Tensor | None,
    reset_h: Tensor | None,
    reset_c: Tensor | None,
    w: Weights,
    draws: dict[str, Draw],
    norm: StepNorm | None,
    examples: Tensor,
    first_step: int,
    resets: Tensor | None,
    gates: Tensor,
    y: Tensor,
    c: Tensor | None,
    gh: Tensor | None,
    moments: Sequence[Tensor | None],
    x: Tensor | None = None,
) -> Loop:
    """The loop as a device gets it."""
    examples = rows.sort(examples)
    scale_h = None
    if (draw := draws.get("variational_hidden")) is not None:
        (mask,) = draw_masks([draw], examples.new_zeros(1), examples, h0.shape[1])
        scale = torch.where(draw.rate < 1, 1 / (1 - draw.rate), 0.0)
        scale_h = torch.where(mask[0], 0.0, scale).to(h0.dtype).contiguous()
    mean_x, var_x, mean_h, var_h, mean_c, var_c = moments
    apart = norm is not None or cell == "gru"  # whether h·Wh has a bias of its own
    bias = h0.new_zeros(len(w.w_hh)) if w.b_ih is None else w.b_ih
    bias = bias if w.b_hh is None or apart else bias + w.b_hh

    def sort(v: Tensor | None) -> Tensor | None:
        return None if v is None else rows.sort(v)

    return Loop(
        cell=cell,
        counts=rows.counts,
        h0=rows.sort(h0),
        c0=sort(c0),
        x=x,
        w_ih=None if x is None else w.w_ih.contiguous(),
        w_hh=w.w_hh.contiguous(),
        b_x=bias,
        b_h=w.b_hh if apart else None,
        w_hr=None if w.w_hr is None else w.w_hr.contiguous(),
        draws=draws,
        scale_h=scale_h,
        norm=norm,
        lengths=rows.sorted_lengths,
        examples=examples,
        first_step=first_step,
        reverse=rows.reverse,
        resets=rows.cuts(resets),
        reset_h=sort(reset_h),
        reset_c=sort(reset_c),
        gates=gates,
        y=y,
        c=c,
        gh=gh,
        mean_x=mean_x,
        var_x=var_x,
        mean_h=mean_h,
        var_h=var_h,
        mean_c=mean_c,
        var_c=var_c,
    )


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
    given: Sequence[Tensor],
    codes: Sequence[int],
    rates: Sequence[Tensor],
    seeds: Sequence[Tensor],
    examples: Tensor,
    first_step: int,
    lengths: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, h, c, cells; then for the way back gates and gh; then the moments of x·Wx, h·Wh and c."""
    narrow = x.dtype
    x_, h0_, c0_, reset_h_, reset_c_, *w_ = _wide(x, h0, c0, reset_h, reset_c, w_ih, w_hh, b_ih, b_hh, w_hr)
    assert x_ is not None and h0_ is not None and w_[0] is not None and w_[1] is not None
    w = Weights(w_[0], w_[1], *w_[2:])
    norm = _step_norm(over, eps, _wide(scale_x, scale_h, scale_c, shift_c), given)
    outputs = _empty_outputs(cell, x_, h0_, w, norm)
    y, c, gates, gh, *moments = outputs
    device = LOOPS[x.device.type]
    device.prepare(*outputs)
    steps, batch, _ = x.shape
    rows = Rows(lengths, steps, batch, reverse)
    packed = rows.pack(x_)
    n = len(packed)
    inside = device.takes_x(w.w_ih)
    if not inside:
        torch.mm(packed, w.w_ih.t(), out=gates[:n])
    for kept in (gates, gh):
        kept[n:].zero_()  # rows of sequences that have ended: nobody looks, but nothing is left to chance

    lstm = cell == "lstm"
    whole = rows.whole
    ys = y.view(steps * batch, y.shape[-1]) if whole else y.new_empty(n, y.shape[-1])
    cs = None if not lstm else c.view(steps * batch, c.shape[-1]) if whole else c.new_empty(n, c.shape[-1])
    stats = _step_moments(norm, moments, lstm)
    loop = _loop(
        cell, rows, h0_, c0_, reset_h_, reset_c_, w, _decode(codes, rates, seeds), norm, examples, first_step, resets,
        gates, ys, cs, gh if gh.numel() else None, stats, packed if inside else None,
    )  # fmt: skip
    device.forward(loop)

    h_n = rows.final(ys, loop.h0)
    c_n = rows.final(cs, loop.c0) if cs is not None and loop.c0 is not None else x_.new_empty(0)
    if not whole:
        y = rows.unpack(ys)
        c = c if cs is None else rows.unpack(cs)
    if narrow != x_.dtype:
        y, h_n, c_n = y.to(narrow), h_n.to(narrow), c_n.to(narrow)
    mean_x, var_x, mean_h, var_h, mean_c, var_c = moments
    return y, h_n, c_n, c, gates, gh, mean_x, var_x, mean_h, var_h, mean_c, var_c


def _empty_outputs(cell: str, x: Tensor, h0: Tensor, w: Weights, norm: StepNorm | None) -> list[Tensor]:
    """y, c, gates, gh and six moments, unwritten; empty where the cell or the norm has none."""
    steps, batch, _ = x.shape
    wide, hidden = len(w.w_hh), len(w.w_hh) // GATES[cell]
    lstm, rows = cell == "lstm", steps * batch
    none = (0,)
    gh = (rows, wide) if norm is not None else (rows, hidden) if cell == "gru" else none
    moments: list[tuple[int, ...]] = [none] * 6
    if norm is not None and norm.over == "units":
        every: tuple[int, ...] = (rows,)
        moments = [every] * 4 + [every if lstm else none] * 2
    elif norm is not None and norm.given is None:
        moments = [(steps, wide)] * 4 + [(steps, hidden) if lstm else none] * 2
    shapes = [(steps, batch, h0.shape[1]), (steps, batch, hidden) if lstm else none, (rows, wide), gh]
    return [x.new_empty(shape) for shape in shapes] + [x.new_zeros(shape) for shape in moments]


def _step_moments(norm: StepNorm | None, moments: Sequence[Tensor], lstm: bool) -> list[Tensor | None]:
    """The moments of x·Wx, h·Wh and c: given, to be written, or none."""
    if norm is None:
        return [None] * 6
    if norm.given is not None:
        return [None if v is None else v.contiguous() for v in norm.given]
    return list(moments) if lstm else [*moments[:4], None, None]


@_run.register_fake
def _(cell: str, x: Tensor, h0: Tensor, c0: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    if torch.autograd.forward_ad._current_level >= 0:  # a compiler would take the layer for a constant
        _no_forward_mode(None)
    weights, scales, (over, eps, given) = rest[2:7], rest[7:11], rest[11:14]
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    y, c, *kept = _empty_outputs(cell, wide, h0, Weights(*weights), _step_norm(over, eps, scales, given))
    c_n = x.new_empty(0) if c0 is None else torch.empty_like(c0, memory_format=torch.contiguous_format)
    return y.to(x.dtype), torch.empty_like(h0, memory_format=torch.contiguous_format), c_n, c, *kept


# --- backwards -------------------------------------------------------------------------------------


@torch.library.custom_op("zoneout::run_backward", mutates_args=())
def _run_backward(
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    dcells: Tensor | None,
    saved: Sequence[Tensor],
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
    given: Sequence[Tensor],
    codes: Sequence[int],
    rates: Sequence[Tensor],
    seeds: Sequence[Tensor],
    examples: Tensor,
    first_step: int,
    lengths: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    needs_x: bool,
) -> list[Tensor]:
    """The derivatives of x, h0, c0, the five weights and the four of the norm; empty where there is none."""
    x_, h0_, c0_, reset_h_, reset_c_, *w_ = _wide(x, h0, c0, reset_h, reset_c, w_ih, w_hh, b_ih, b_hh, w_hr)
    assert x_ is not None and h0_ is not None and w_[0] is not None and w_[1] is not None
    w = Weights(w_[0], w_[1], *w_[2:])
    norm = _step_norm(over, eps, _wide(scale_x, scale_h, scale_c, shift_c), given)
    y, c, gates, gh, *moments = saved
    steps, batch, _ = x.shape
    rows = Rows(lengths, steps, batch, reverse)
    lstm = cell == "lstm"
    (y_,) = _wide(y)
    assert y_ is not None
    ys, cs = rows.pack(y_), rows.pack(c) if lstm else None
    n, wide, hidden = len(ys), len(w.w_hh), len(w.w_hh) // GATES[cell]
    loop = _loop(
        cell, rows, h0_, c0_, reset_h_, reset_c_, w, _decode(codes, rates, seeds), norm, examples, first_step, resets,
        gates, ys, cs, gh if gh.numel() else None, _step_moments(norm, moments, lstm),
    )  # fmt: skip

    def start(d: Tensor | None, like: Tensor) -> Tensor:
        """What has come back for the final states, longest first, in a tensor that may be written to."""
        if d is None:
            return torch.zeros_like(like)
        return rows.sort(d.to(like.dtype)).clone(memory_format=torch.contiguous_format)

    def over_time(d: Tensor | None, like: Tensor) -> Tensor:
        return torch.zeros_like(like) if d is None else rows.pack(d.to(like.dtype))

    device = LOOPS[x.device.type]
    dgx = device.scratch(ys, n, wide)
    dsh = device.scratch(ys, n, wide) if cell == "gru" else dgx
    dgh = dsh if norm is None else device.scratch(ys, n, wide)
    back = Backward(
        dy=over_time(dy, ys),
        dcells=None if cs is None or dcells is None else rows.pack(dcells),
        dh=start(dh, loop.h0),
        dc=None if loop.c0 is None else start(dc, loop.c0),
        dreset_h=None if loop.reset_h is None else torch.zeros_like(loop.reset_h),
        dreset_c=None if loop.reset_c is None else torch.zeros_like(loop.reset_c),
        dgx=dgx,
        dgh=dgh,
        dsh=dsh,
        du=None if w_hr is None else device.scratch(ys, n, ys.shape[1]),
        u=None if w_hr is None else device.scratch(ys, n, hidden),
        dnc=None if norm is None or not lstm else device.scratch(ys, n, hidden),
        chat=None if norm is None or not lstm else device.scratch(ys, n, hidden),
        dx=None if norm is None else device.scratch(ys, n, wide),
        dscale_x=None if norm is None else ys.new_zeros(device.PARTS(), wide),
        dscale_h=None if norm is None else ys.new_zeros(device.PARTS(), wide),
        dscale_c=None if norm is None or not lstm else ys.new_zeros(device.PARTS(), hidden),
        dshift_c=None if norm is None or not lstm else ys.new_zeros(device.PARTS(), hidden),
    )
    packed = rows.pack(x_)
    if back.dx is not None:
        torch.mm(packed, w.w_ih.t(), out=back.dx)
    device.backward(loop, back)

    found: dict[str, Tensor] = {"h0": rows.unsort(back.dh)}
    states = {"c0": back.dc, "reset_h": back.dreset_h, "reset_c": back.dreset_c}
    found |= {name: rows.unsort(value) for name, value in states.items() if value is not None}
    if b_ih is not None:
        found["b_ih"] = dgx.sum(0)
    if b_hh is not None:
        found["b_hh"] = dsh.sum(0) if dsh is not dgx or b_ih is None else found["b_ih"].clone()
    if back.dx is not None:
        dgx = back.dx
        sums = {"scale_x": back.dscale_x, "scale_h": back.dscale_h, "scale_c": back.dscale_c, "shift_c": back.dshift_c}
        found |= {name: parts.sum(0) for name, parts in sums.items() if parts is not None}
    width = (ys.shape[1], packed.shape[1])
    if dgh is dgx and n * sum(width) <= _SHORT:  # one product for both matrices
        h_and_x = device.scratch(ys, n, sum(width))
        torch.cat((_entered(loop, rows), packed), dim=1, out=h_and_x)
        found["w_hh"], found["w_ih"] = (part.clone() for part in (dgx.t() @ h_and_x).split(width, dim=1))
        device.give_back(h_and_x)
    else:
        found["w_ih"] = dgx.t() @ packed
        if rows.whole and loop.resets is None and loop.scale_h is None:
            found["w_hh"] = dgh[:batch].t() @ loop.h0
            if steps > 1:
                found["w_hh"].addmm_(dgh[batch:].t(), ys[: n - batch])
        else:
            found["w_hh"] = dgh.t() @ _entered(loop, rows)
    if back.du is not None and back.u is not None:
        found["w_hr"] = back.du.t() @ back.u
    if needs_x:
        found["x"] = rows.unpack(dgx @ w.w_ih)
    device.give_back(back.dgx, dgh, dsh, back.du, back.u, back.dnc, back.chat, back.dx)
    return [found[name].to(x.dtype) if name in found else x.new_empty(0) for name in _DIFFERENTIABLE]


_SHORT = 2**20


def _entered(loop: Loop, rows: Rows) -> Tensor:
    """[N, P]: h as it entered the gates at every row."""
    if rows.whole and loop.resets is None:
        h_in = torch.cat((loop.h0, loop.y[: len(loop.y) - rows.batch]))
    else:
        h_in = rows.before(loop.y, loop.h0, loop.reset_h, loop.resets)
    return h_in if loop.scale_h is None else h_in * loop.scale_h[rows.grid[1]]


@_run_backward.register_fake
def _(
    dy: Tensor, dh: Tensor, dc: Tensor, dcells: Tensor, saved: list[Tensor], cell: str, x: Tensor, *rest: Any
) -> list[Tensor]:
    like = (x if rest[-1] else None, *rest[: len(_DIFFERENTIABLE) - 1])
    return [x.new_empty(0) if v is None else torch.empty_like(v, memory_format=torch.contiguous_format) for v in like]


# --- autograd --------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y, _, _, cells, gates, gh, *moments = output
    cell, (*tensors, over, eps, given, codes, rates, seeds, examples, first_step, lengths, resets, reverse) = (
        inputs[0],
        inputs[1:],
    )
    ctx.set_materialize_grads(False)
    ctx.sizes = len(given), len(rates)
    ctx.rest = cell, over, eps, codes, first_step, reverse
    ctx.present = [value is not None for value in tensors]
    ctx.straight = False
    saved = (y, cells, gates, gh, *moments)
    ctx.save_for_backward(*tensors, examples, lengths, resets, *given, *rates, *seeds, *saved)


def _backward(ctx: Any, dy: Tensor, dh: Tensor, dc: Tensor, dcells: Tensor, *_: Tensor) -> tuple[Any, ...]:
    count, (n_given, n_draws) = len(_DIFFERENTIABLE), ctx.sizes
    values = list(ctx.saved_tensors)
    differentiable, (examples, lengths, resets), more = values[:count], values[count : count + 3], values[count + 3 :]
    given, more = more[:n_given], more[n_given:]
    rates, seeds, saved = more[:n_draws], more[n_draws : 2 * n_draws], more[2 * n_draws :]
    cell, over, eps, codes, first_step, reverse = ctx.rest
    # A second derivative goes through the operator, which refuses it; without one, straight to its work.
    grads = (_run_backward._init_fn if ctx.straight and not torch.is_grad_enabled() else _call_backward)(
        dy, dh, dc, dcells, list(saved), cell, *differentiable, over, eps, list(given), codes, list(rates),
        list(seeds), examples, first_step, lengths, resets, reverse, ctx.needs_input_grad[1],
    )  # fmt: skip
    present = [grad if there else None for grad, there in zip(grads, ctx.present)]
    if not ctx.needs_input_grad[1]:
        present[0] = None
    no_codes: list[None] | None = None if codes else []  # torch takes an empty list for one of tensors
    no_draws = [None] * n_draws
    return None, *present, None, None, [None] * n_given, no_codes, no_draws, list(no_draws), *[None] * 5


torch.library.register_autograd("zoneout::run", _backward, setup_context=_setup)


def _no_second(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "a second derivative through zoneout's fused layers is not there; make the layer with backend='reference'"
    )


def _no_forward_mode(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(
        "forward-mode derivatives of zoneout's fused layers are not there; make the layer with backend='reference'"
    )


torch.library.register_autograd("zoneout::run_backward", _no_second)


# --- plain eager mode ------------------------------------------------------------------------------


class _Fused(torch.autograd.Function):
    """The same node without the dispatcher, which costs a small layer as much as its work."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        output = _run._init_fn(*args)
        _setup(ctx, args, output)
        ctx.straight = True
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return tuple(None if isinstance(grad, list) else grad for grad in _backward(ctx, *grads))

    jvp = staticmethod(_no_forward_mode)


def _plain_eager() -> bool:
    """Whether nobody is looking on: no compiler, no tracer, no transform, no dispatch mode."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
    )


# --- torch.func ------------------------------------------------------------------------------------
# Its transforms cannot see through the node that torch.library makes of a derivative (pytorch issue 168393), and
# forward mode takes such a node for a constant. So they get nodes of our own.


def _transformed() -> bool:
    return torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()


def _call(*args: Any) -> tuple[Tensor, ...]:
    if _plain_eager():
        return _Fused.apply(*args)
    return (_Transformed.apply if _transformed() else torch.ops.zoneout.run)(*args)


def _call_backward(*args: Any) -> Sequence[Tensor]:
    return (_TransformedBackward.apply if _transformed() else torch.ops.zoneout.run_backward)(*args)


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
    backward = staticmethod(_Fused.backward)
    jvp = staticmethod(_no_forward_mode)
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
    jvp = staticmethod(_no_forward_mode)
    vmap = staticmethod(_vmap(_call_backward))


torch.library.register_vmap("zoneout::run", _vmap(_call))
torch.library.register_vmap("zoneout::run_backward", _vmap(torch.ops.zoneout.run_backward))
