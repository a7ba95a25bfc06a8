"""The operator `zoneout::run`: a whole pass over time as one node of the graph, and its gradient.

`passes.py` contains the pass itself. This module contains what autograd, `torch.compile` and
`torch.func` need. An operator takes and returns only tensors and plain numbers, so a `Run` is
flattened for it (`flat.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI

from ..run import Result, Run
from ..sequence import checkpointing, passes
from ..sequence.prepare import LOOPS, empty_outputs, state_type
from ..sequence.saved import BackwardInputs, Gradients, Saved, gives_moments, reached, result
from . import flops
from .flat import decode, encode, flatten, unflatten


def run(r: Run) -> Result:
    """Run one pass through the operator."""
    flat = flatten(r)
    outputs = _call(*encode(flat.settings), flat.tensors, flat.constants)
    return result(Saved.from_list(r, outputs), r)


# --- the operator and its gradient ----------------------------------------------------------------


@torch.library.custom_op("zoneout::run", mutates_args=())
def _run(
    cell: str,
    names: str,
    codes: Sequence[int],
    eps: float,
    tensors: Sequence[Tensor],
    constants: Sequence[Tensor],
) -> list[Tensor]:
    """Return y, the final states, the other states at every step, then the saved tensors.

    The states at every step are those other than h. The backward pass needs the saved tensors.
    """
    r = unflatten(decode(cell, names, codes, eps), tensors, constants)
    saved = checkpointing.forward(r).saved if r.recompute else passes.forward(r)[0]
    return saved.to_list()


@_run.register_fake
def _(
    cell: str,
    names: str,
    codes: Sequence[int],
    eps: float,
    tensors: Sequence[Tensor],
    constants: Sequence[Tensor],
) -> list[Tensor]:
    if (
        torch.autograd.forward_ad._current_level >= 0
    ):  # otherwise a compiler treats the layer as a constant
        no_forward_mode(None)
    r = unflatten(decode(cell, names, codes, eps), tensors, constants)
    dtype = state_type(r.h0.dtype) if LOOPS[r.h0.device.type].IN_FLOAT32 else r.h0.dtype
    saved = empty_outputs(r, dtype)
    final = tuple(torch.empty_like(v, memory_format=torch.contiguous_format) for v in r.states)
    saved = saved._replace(y=saved.y.to(r.h0.dtype), final=final)
    if r.recompute:
        states = saved.states if r.return_states else ()
        saved = Saved(saved.y, final, states, moments=saved.moments if gives_moments(r) else None)
    return saved.to_list()


@torch.library.custom_op("zoneout::run_backward", mutates_args=())
def _run_backward(
    grads: Sequence[Tensor],
    given: Sequence[bool],
    saved: Sequence[Tensor],
    needs: Sequence[bool],
    cell: str,
    names: str,
    codes: Sequence[int],
    eps: float,
    tensors: Sequence[Tensor],
    constants: Sequence[Tensor],
) -> list[Tensor]:
    """Return the gradients of the needed tensors of `tensors`.

    `grads` are the gradients of the outputs for which `given` is True; the others are zero.
    """
    settings = decode(cell, names, codes, eps)
    r = unflatten(settings, tensors, constants)
    each = iter(grads)
    d = Gradients.of(r, [next(each) if has else None for has in given])
    wanted = [name for name, needed in zip(settings.names, needs) if needed]
    if r.recompute:
        gradients = checkpointing.backward_anew(r, d, frozenset(wanted))
    else:
        (gradients,) = passes.backward(
            BackwardInputs(r, Saved.from_list(r, saved, final=False), d, frozenset(wanted))
        )
    return [gradients[name] for name in wanted]


@_run_backward.register_fake
def _(
    grads: Any, given: Any, saved: Any, needs: Sequence[bool], cell: str, names: str, codes: Any,
    eps: float, tensors: Sequence[Tensor], constants: Any,
) -> list[Tensor]:  # fmt: skip
    return [
        torch.empty_like(v, memory_format=torch.contiguous_format)
        for v, needed in zip(tensors, needs)
        if needed
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    *ctx.encoded, tensors, constants = inputs
    settings = decode(*ctx.encoded)
    ctx.set_materialize_grads(False)
    ctx.counts = len(tensors), len(constants)
    states = sum(name.startswith("state") for name in settings.names)
    # To recompute, nothing is saved.
    saved = () if settings.recompute else (output[0], *output[1 + states :])
    ctx.save_for_backward(*tensors, *constants, *saved)


def _gradients(ctx: Any, d: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients of the differentiable tensors, None if not needed."""
    tensors, constants, saved = _split(ctx.saved_tensors, ctx.counts)
    settings = decode(*ctx.encoded)
    r = unflatten(settings, tensors, constants)
    d = d[: 2 * len(r.states) if r.return_states else 1 + len(r.states)]
    names = frozenset(name for name, need in zip(settings.names, needed) if need)
    wanted = reached(r, Gradients.of(r, d), names)
    needs, given = [name in wanted for name in settings.names], [v is not None for v in d]
    grads = [v for v in d if v is not None]
    gradients = iter(call_backward(grads, given, saved, needs, *ctx.encoded, tensors, constants))
    return [next(gradients) if need else None for need in needs]


def _split(
    values: Sequence[Tensor], counts: tuple[int, int]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    tensors, constants = counts
    listed = list(values)
    return listed[:tensors], listed[tensors : tensors + constants], listed[tensors + constants :]


def _backward(ctx: Any, d: Sequence[Tensor | None]) -> tuple[Any, ...]:
    grads = _gradients(ctx, d, ctx.needs_input_grad[4])
    return None, None, None, None, grads, [None] * ctx.counts[1]


torch.library.register_autograd("zoneout::run", _backward, setup_context=_setup)


def _no_second(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "a second derivative of zoneout's fused layers works in eager mode only, not in "
        "torch.func, a compiled model or a dispatch mode; make the layer with backend='reference'"
    )


def no_forward_mode(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(
        "forward-mode derivatives of zoneout's fused layers are not there; make the layer with "
        "backend='reference'"
    )


torch.library.register_autograd("zoneout::run_backward", _no_second)


# --- torch.func -----------------------------------------------------------------------------------
# Its transforms cannot see through the node that torch.library makes of a backward function
# (pytorch issue 168393). Forward mode treats such a node as a constant. So transforms get nodes of
# our own, whose tensors are not in lists.


def _transformed() -> bool:
    return torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()


def _let_count() -> None:
    """Register the operator with `FlopCounterMode`, which is a dispatch mode."""
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        flops.register()


def _call(*args: Any) -> Sequence[Tensor]:
    _let_count()
    return _through_transforms(_Transformed, torch.ops.zoneout.run, args)


def call_backward(*args: Any) -> Sequence[Tensor]:
    """Return the gradients, through the operator of the backward pass."""
    _let_count()
    return _through_transforms(_TransformedBackward, torch.ops.zoneout.run_backward, args)


def _through_transforms(node: Any, op: Any, args: tuple[Any, ...]) -> Any:
    """Call the operator in the form that the innermost transform supports.

    Neither operator writes to its arguments or returns them. So `functionalize` only has to unwrap
    the arguments and wrap the results; torch has no such rule for a node.
    """
    if not _transformed():
        return op(*args)
    innermost: Any = retrieve_current_functorch_interpreter()
    if innermost.key() != TransformType.Functionalize:
        return node.apply(*_spread(args))
    api = FunctorchFunctionalizeAPI(innermost)
    given: Any = api.unwrap_tensors(args)
    with api.redispatch_to_next():
        outputs = _through_transforms(node, op, given)
    return api.wrap_tensors(outputs)


def _spread(args: Sequence[Any]) -> list[Any]:
    """Return the arguments with the tensors of all lists moved to the end.

    Each list is replaced by its length.
    """
    plain: list[Any] = []
    tensors: list[Tensor] = []
    for arg in args:
        listed = isinstance(arg, (list, tuple)) and (not arg or isinstance(arg[0], Tensor))
        plain.append(_Count(len(arg)) if listed else arg)
        tensors += arg if listed else ()
    return [tuple(plain), *tensors]


def _gather(plain: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """Return the arguments from the result of `_spread`."""
    values = iter(tensors)
    return [[next(values) for _ in range(arg)] if isinstance(arg, _Count) else arg for arg in plain]


class _Count(int):
    """The length of a list of tensors that `_spread` moved."""


def _vmap(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the vmap rule for a batch of models: run them one after another."""

    def pick(value: Any, dim: Any, k: int) -> Any:
        if isinstance(value, (list, tuple)):
            dims = dim if isinstance(dim, (list, tuple)) else [dim] * len(value)
            return [pick(v, d, k) for v, d in zip(value, dims)]
        return value if dim is None else value.select(dim, k)

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        results = [
            op(*(pick(v, d, k) for v, d in zip(args, in_dims))) for k in range(info.batch_size)
        ]
        stacked = [torch.stack(parts) for parts in zip(*results)]
        return stacked, [0] * len(stacked)

    return rule


def _spread_vmap(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same vmap rule for a node with spread tensors."""

    def rule(info: Any, in_dims: tuple[Any, ...], plain: Any, *tensors: Any) -> tuple[Any, Any]:
        def one(k: int) -> Any:
            return [v if d is None else v.select(d, k) for v, d in zip(tensors, in_dims[1:])]

        results = [op(*_gather(plain, one(k))) for k in range(info.batch_size)]
        stacked = tuple(torch.stack(parts) for parts in zip(*results))
        return stacked, (0,) * len(stacked)

    return rule


class _Transformed(torch.autograd.Function):
    """`zoneout::run` under a transform."""

    @staticmethod
    def forward(plain: Any, *tensors: Any) -> Any:
        return tuple(torch.ops.zoneout.run(*_gather(plain, tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        plain, *tensors = inputs
        _setup(ctx, tuple(_gather(plain, tensors)), output)

    @staticmethod
    def backward(ctx: Any, *d: Any) -> tuple[Any, ...]:
        tensors, constants = ctx.counts
        return None, *_gradients(ctx, d, ctx.needs_input_grad[1 : 1 + tensors]), *[None] * constants

    jvp = staticmethod(no_forward_mode)
    vmap = staticmethod(_spread_vmap(_call))


class _TransformedBackward(torch.autograd.Function):
    """`zoneout::run_backward` under a transform."""

    @staticmethod
    def forward(plain: Any, *tensors: Any) -> Any:
        return tuple(torch.ops.zoneout.run_backward(*_gather(plain, tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = staticmethod(_no_second)
    jvp = staticmethod(no_forward_mode)
    vmap = staticmethod(_spread_vmap(call_backward))


torch.library.register_vmap("zoneout::run", _vmap(lambda *args: _call(*args)))
torch.library.register_vmap(
    "zoneout::run_backward", _vmap(lambda *args: torch.ops.zoneout.run_backward(*args))
)
