"""Tensors whose numbers are not where their pointer points, and objects that are no tensors at all.

Autograd hands over zeros without storage, a negated view has other numbers in memory than it shows,
wrapper subclasses and functional tensors have no memory of their own. Read by their addresses they
give wrong numbers or end the process.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, grad, vmap
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map_only

import zoneout as zo
from zoneout import cells
from zoneout.draws import draw_masks
from zoneout.ops import memory
from zoneout.ops.cpu.masks import Draw, masks_of
from zoneout.ops.cuda.runtime.arguments import Arguments, Exchange
from zoneout.paper.training.optimizers import apart
from zoneout.streams import Rule

INPUT, HIDDEN, BATCH = 3, 4, 2
NOISE = zo.Zoneout(hidden=0.3)


class Bare(nn.Module):
    """`zo.zoneout` as a module that is called as a cell is; the state is as wide as the input."""

    def forward(self, x: Tensor, state: Tensor, seed: int, step: int) -> Tensor:
        return zo.zoneout(x, state, 0.3, seed=seed, step=step)


class Own(nn.Module):
    """A cell with two states, in torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUT + HIDDEN, HIDDEN)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.linear(torch.cat((x, state[0]), dim=-1)))
        return h, state[1] / 2 + h


LAYERS = {
    "LSTM": zo.LSTM, "GRU": zo.GRU, "RNN": zo.RNN,
    "own": partial(zo.Recurrent, cells.peephole_lstm),
}  # fmt: skip
CELLS = {
    "LSTMCell": lambda: zo.LSTMCell(INPUT, HIDDEN, noise=NOISE),
    "GRUCell": lambda: zo.GRUCell(INPUT, HIDDEN, noise=NOISE),
    "RNNCell": lambda: zo.RNNCell(INPUT, HIDDEN, noise=NOISE),
    "ZoneoutCell": lambda: zo.ZoneoutCell(Own(), 0.3),
    "zoneout": Bare,
}
CASES = [*((name, steps) for name in LAYERS for steps in (1, 3)), *((name, 0) for name in CELLS)]


def make(name: str, steps: int, **options: Any) -> tuple[nn.Module, Tensor, Any, dict[str, int]]:
    """A module, an input, a state, and what fixes its draws."""
    torch.manual_seed(0)
    pair = name in ("LSTM", "own", "LSTMCell", "ZoneoutCell")
    if name in LAYERS:
        shape, size, call = (1, BATCH), HIDDEN, {"seed": 5}
        module: nn.Module = LAYERS[name](INPUT, HIDDEN, **{"noise": NOISE} | options)
        x = torch.randn(steps, BATCH, INPUT)
    else:
        shape, size, call = (BATCH,), INPUT if name == "zoneout" else HIDDEN, {"seed": 5, "step": 1}
        module, x = CELLS[name](), torch.randn(BATCH, INPUT)
    state = torch.randn(*shape, size)
    return module, x, (state, torch.randn(*shape, size)) if pair else state, call


def flat(value: Any) -> list[Tensor]:
    return [v for v in tree_flatten(value)[0] if isinstance(v, Tensor)]


def equal(got: Any, want: Any) -> None:
    torch.testing.assert_close(flat(got), flat(want), rtol=0, atol=0)


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(flat(got), flat(want), rtol=1e-5, atol=1e-6)


def zeros(v: Tensor) -> Tensor:
    return torch._efficientzerotensor(v.shape, dtype=v.dtype)


def negated(v: Tensor) -> Tensor:
    """The same numbers, with the opposite ones in memory."""
    return torch._neg_view(-v)


ODD = {"zeros": zeros, "negated": negated}


# --- without memory, or with other numbers in it --------------------------------------------------


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize("what", ["input", "state", "weights"])
@pytest.mark.parametrize("name, steps", CASES)
def test_given_to_a_call(name, steps, what, odd):
    """A loop reads address 0, or the numbers before the negation: outputs and gradients are
    those of another input.
    """

    def run(change):
        module, x, state, call = make(name, steps)
        if what == "weights":
            for holder in module.modules():
                for own, weight in list(holder.named_parameters(recurse=False)):
                    setattr(holder, own, nn.Parameter(change(weight.detach())))
        leaves = [x, *flat(state)]
        if what != "weights":
            leaves = [
                change(v) if (what == "input") == (k == 0) else v for k, v in enumerate(leaves)
            ]
        leaves = [v.requires_grad_() for v in leaves]
        x, state = leaves[0], leaves[1] if isinstance(state, Tensor) else tuple(leaves[1:])
        results = flat(module(x, state, **call))
        weights = [torch.ones_like(v) * (k + 1) for k, v in enumerate(results)]
        parameters = list(module.parameters())
        return results, torch.autograd.grad(
            results, [*leaves, *parameters], weights, allow_unused=True
        )

    with torch.no_grad():
        for given, want in zip(
            *(flat(f(torch.ones(2, 3))) for f in (odd, lambda v: odd(v).clone()))
        ):
            assert given.is_neg() or given._is_zerotensor()
            equal(given, want)
    close(
        run(odd), run(lambda v: odd(v).clone())
    )  # at one step by another path, which rounds elsewhere


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize("name, steps", CASES)
def test_given_to_the_backward_pass(name, steps, odd):
    """A gradient of zeros has no storage: a segmentation fault. Each output gets one in its
    turn.
    """
    module, x, state, call = make(name, steps)
    leaves = [x.requires_grad_(), *(v.requires_grad_() for v in flat(state)), *module.parameters()]
    results = flat(module(x, state, **call))
    for which in range(len(results)):
        given = [
            odd(torch.ones_like(v)) if k == which else torch.ones_like(v)
            for k, v in enumerate(results)
        ]
        got = torch.autograd.grad(results, leaves, given, retain_graph=True, allow_unused=True)
        plain = [v.clone() for v in given]
        equal(
            got, torch.autograd.grad(results, leaves, plain, retain_graph=True, allow_unused=True)
        )


def test_a_gradient_that_is_zero():
    """torch hands over a gradient without storage by itself, and keeps one for an optimizer."""
    layer, x, _, _ = make("LSTM", 3)
    torch.sgn(layer(x)[0]).sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in layer.parameters())
    w = torch.randn(3, requires_grad=True)
    torch.sgn(w).sum().backward()
    assert w.grad._is_zerotensor()
    first, second = apart([w.grad, w.grad])
    first.add_(1)  # zeros without storage cannot be written to
    assert first.tolist() == [1, 1, 1] and second.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "options", [{"recompute": True}, {"bidirectional": True}, {"norm": "layer"}], ids=str
)
def test_in_every_kind_of_backward_pass(options):
    layer, x, _, call = make("LSTM", 3, **options)
    y = layer(x, **call)[0]
    for odd in ODD.values():
        given = odd(torch.ones_like(y))
        equal(
            *(
                torch.autograd.grad(y, list(layer.parameters()), d, retain_graph=True)
                for d in (given, given.clone())
            )
        )


def test_many_gradients_of_zeros_at_once():
    """One dimension more hides that there is no storage."""
    layer, x, _, call = make("GRU", 3)
    y, leaves = layer(x, **call)[0], list(layer.parameters())
    given = torch._efficientzerotensor(2, *y.shape)
    for got, leaf in zip(torch.autograd.grad(y, leaves, given, is_grads_batched=True), leaves):
        assert torch.equal(got, torch.zeros(2, *leaf.shape))


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_given_back_by_a_hook(odd):
    """What a node has saved comes back as a hook makes it."""
    layer, x, _, call = make("LSTM", 3)

    def gradients(change):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda v: v, lambda v: change(v) if v.is_floating_point() else v
        ):
            y = layer(x, **call)[0]
        return torch.autograd.grad(y.sum(), list(layer.parameters()))

    equal(gradients(odd), gradients(lambda v: odd(v).clone()))


@pytest.mark.parametrize("kind", ["zeros", "negated"])
@pytest.mark.parametrize("steps", [1, 3])
def test_numbers_that_a_draw_depends_on(steps, kind):
    """Lengths, resets, examples and the seed are read by their addresses too."""
    layer, x, state, _ = make("LSTM", steps)
    one, some = torch.tensor(-3), torch.tensor([1, steps])
    odd = ODD[kind]
    given: dict[str, Tensor] = {"seed": odd(one), "lengths": odd(some), "examples": odd(some)}
    if kind == "zeros":
        given["resets"] = zeros(torch.ones(steps, BATCH, dtype=torch.bool))
    for name, value in given.items():
        call = {"seed": 5, name: value}
        close(layer(x, state, **call), layer(x, state, **call | {name: value.clone()}))


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_masks_by_themselves(odd):
    rate, ids, steps = (
        torch.full((6,), 0.5, dtype=torch.float64),
        torch.tensor([3, 4]),
        torch.arange(3),
    )
    seed, rule = torch.tensor(7), Rule("cell", "previous", "unit", "expectation")
    for given in (
        (odd(rate), ids, steps, seed),
        (rate, odd(ids), steps, seed),
        (rate, ids, odd(steps), seed),
    ):
        rates, examples, at, key = given
        got = masks_of([Draw(rule, rates, key, 0)], at, examples, 6)
        rates, examples, at, key = (v.clone() for v in given)
        equal(got, draw_masks([Draw(rule, rates, key, 0)], at, examples, 6))


def test_the_gate_refuses():
    """An address is given of nothing but the numbers that the reader expects."""
    good = torch.ones(2, 3)
    assert memory.address(good, "x", torch.float32, -1) == good.data_ptr()
    assert memory.address(torch.ones(0, 3), "x", torch.float32, -1) == 0
    bare = [
        zeros(good),
        zeros(torch.ones(3, 2, 3))[1],
        negated(good),
        torch.ones(2, 3, device="meta"),
    ]
    for bad in (
        *bare,
        torch._to_functional_tensor(torch.ones(3, 2, 3))[1],
        good.double(),
        good.t(),
    ):
        with pytest.raises(
            RuntimeError, match=r"x: expected contiguous memory of torch\.float32 on the CPU, got"
        ):
            memory.address(bad, "x", torch.float32, -1)
        assert memory.are_memory((None, good, bad)) == (
            bad.dtype == torch.float64 or bad.stride() == (1, 3)
        )
        held = Arguments(Exchange)
        held.put("peak", good)
        with pytest.raises(RuntimeError, match="buffer: expected contiguous memory"):
            held.put("buffer", bad, torch.float32)


def test_there_is_one_gate():
    """An address that is taken elsewhere is taken unchecked; a plan's tensors were checked when
    it was recorded.
    """
    folder = Path(zo.__file__).parent / "ops"
    found = {path.name for path in folder.rglob("*.py") if "data_ptr(" in path.read_text("utf-8")}
    assert found == {"memory.py", "recording.py"}


# --- a rate of 1 at evaluation --------------------------------------------------------------------


@pytest.mark.parametrize("name, steps", CASES)
def test_gradients_of_a_rate_of_one(name, steps):
    """The weights' gradients are zero, not missing; those of the state pass through."""
    pair = name.startswith("LSTM") or name == "own"
    everything = zo.Zoneout(hidden=1.0, cell=1.0) if pair else zo.Zoneout(hidden=1.0)
    module, x, state, _ = make(name, steps)
    if name == "ZoneoutCell":
        module.rates = 1.0
    elif name == "zoneout":
        pytest.skip("has no weights")
    else:
        module.noise = everything
    module.eval()
    states = [v.requires_grad_() for v in flat(state)]
    results = flat(module(x, state))
    found = torch.autograd.grad(
        results, [*states, *module.parameters()], [torch.ones_like(v) for v in results]
    )
    times = (
        max(steps, 1) + 1 if name in LAYERS else 1
    )  # y at every step and h_n are all the initial h
    assert torch.equal(found[0], torch.full_like(found[0], times))
    assert all(torch.equal(v, torch.ones_like(v)) for v in found[1 : len(states)])
    assert all(torch.equal(v, torch.zeros_like(v)) for v in found[len(states) :])
    equal(results[-len(states) :], states)


# --- objects that are no tensors ------------------------------------------------------------------


class Duck:
    """No tensor, but takes over the functions that get it: unwraps, calls, and wraps the
    results.
    """

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda duck: duck.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, function(*args, **kwargs))


@pytest.mark.parametrize("name, steps", CASES)
def test_objects_with_torch_function(name, steps):
    """torch.nn's layers take them; ours said that they want a tensor."""
    module, x, state, call = make(name, steps)
    want = module(x, state, **call)
    for given in ((Duck(x), state), (x, tree_map_only(Tensor, Duck, state))):
        got = module(*given, **call)
        assert all(isinstance(v, Duck) for v in tree_flatten(got)[0])
        equal(tree_map_only(Duck, lambda duck: duck.inner, got), want)
    with pytest.raises(TypeError, match="expected"):
        module("x", state, **call)


# --- tensors that wrap others ---------------------------------------------------------------------


class Wrapped(Tensor):
    """A tensor without memory of its own, as DTensor is one."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Wrapped, lambda v: v.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapped, function(*args, **kwargs))


@pytest.mark.parametrize("name, steps", CASES)
def test_wrappers_stay_wrapped(name, steps):
    """At one step the results were plain tensors: torch's cells add to a plain tensor in place."""
    module, x, state, call = make(name, steps)
    results = []
    for given in (x.clone().requires_grad_(), Wrapped(x).requires_grad_()):
        out = flat(module(given, state, **call))
        results.append((out, torch.autograd.grad(sum(v.sum() for v in out), given)))
    assert all(isinstance(v, Wrapped) for v in flat(results[1]))
    close(tree_map_only(Wrapped, lambda v: v.inner, results[1]), results[0])


@pytest.mark.parametrize("steps", [1, 3])
def test_wrappers_of_numbers_that_a_draw_depends_on(steps):
    layer, x, state, _ = make("LSTM", steps)
    for name, value in {
        "examples": torch.tensor([3, 4]),
        "lengths": torch.tensor([1, steps]),
    }.items():
        got = layer(x, state, **{"seed": 5, name: Wrapped(value)})
        equal(
            tree_map_only(Wrapped, lambda v: v.inner, got),
            layer(x, state, **{"seed": 5, name: value}),
        )


@pytest.mark.parametrize("name, steps", CASES)
def test_tensors_that_only_have_a_shape(name, steps):
    module, x, state, call = make(name, steps)
    want = flat(module(x, state, **call))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        got = flat(module(*tree_map_only(Tensor, mode.from_tensor, (x, state)), **call))
    assert [(v.shape, v.dtype) for v in got] == [(v.shape, v.dtype) for v in want]


# --- functionalize --------------------------------------------------------------------------------


@pytest.mark.parametrize("name, steps", CASES)
def test_functionalize(name, steps):
    """torch has no rule for nodes of our own; in both orders with another transform the result
    is the same.
    """
    module, x, state, call = make(name, steps)

    def f(x):
        return module(x, state, **call)

    def loss(x):
        return sum((k + 1) * v.sum() for k, v in enumerate(flat(f(x))))

    want = grad(loss)(x)
    close(functionalize(f)(x), f(x))
    close(functionalize(grad(loss))(x), want)
    close(grad(functionalize(loss))(x), want)
    close(functionalize(vmap(loss))(torch.stack((x, x)))[1], loss(x))
    leaf = x.clone().requires_grad_()
    functionalize(loss)(leaf).backward()
    close(leaf.grad, want)


def test_functionalize_of_packed_rows():
    layer, x, _, call = make("LSTM", 3)
    rows, counts = x.flatten(0, 1)[:5], torch.tensor([2, 2, 1])

    def loss(rows):
        return layer(PackedSequence(rows, counts), **call)[0].data.square().sum()

    close(functionalize(loss)(rows), loss(rows))
    close(functionalize(grad(loss))(rows), grad(loss)(rows))
    close(grad(functionalize(loss))(rows), grad(loss)(rows))


def test_functional_tensors_outside_of_functionalize():
    """They have no memory, and no mode says that they are there."""
    layer, x, state, call = make("GRU", 3)
    got = layer(torch._to_functional_tensor(x), state, **call)
    equal(tree_map_only(Tensor, torch._from_functional_tensor, got), layer(x, state, **call))
