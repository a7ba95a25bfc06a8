"""One step of a cell or a layer takes torch's own cell: it has to be the reference's step, with
the same masks.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.utils import prune

import zoneout as zo
from zoneout import step_cells
from zoneout.ops.cpu import one_step

CELLS = {"lstm": zo.LSTMCell, "gru": zo.GRUCell, "rnn": zo.RNNCell}
LAYERS = {"lstm": zo.LSTM, "gru": zo.GRU, "rnn": zo.RNN}
NOISES = {
    "none": lambda lstm: None,
    **{
        mask: (lambda lstm, mask=mask: zoned(lstm, mask=mask))
        for mask in ("unit", "shared", "step", "sequence")
    },
    "static": lambda lstm: zoned(lstm, mask="static", seed=3),
    "a unit": lambda lstm: zoned(lstm, rate=torch.linspace(0, 1, 7)),
    "sampled": lambda lstm: zoned(lstm, at_eval="sample"),
    "off": lambda lstm: zoned(lstm, at_eval="off"),
}


def zoned(lstm, rate=0.3, **options):
    return zo.Zoneout(hidden=rate, **({"cell": rate} if lstm else {}), **options)


@pytest.fixture
def taken(monkeypatch):
    """The calls that were taken as one step."""
    steps, step = [], one_step.step
    monkeypatch.setattr(one_step, "step", lambda *given: steps.append(given) or step(*given))
    return steps


def results(module, x, states, **call):
    """Outputs, states, and the gradients of everything."""
    x, states = x.clone().requires_grad_(), [s.clone().requires_grad_() for s in states]
    given = tuple(states) if len(states) == 2 else states[0]
    out = module(x, given, **call)
    parts = out if isinstance(out, tuple) else (out,)
    flat = [t for part in parts for t in (part if isinstance(part, tuple) else (part,))]
    torch.manual_seed(1)
    loss = sum((t * torch.randn(t.shape, dtype=torch.float64).to(t)).sum() for t in flat)
    return [*flat, *torch.autograd.grad(loss, [x, *states, *module.parameters()])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("kind", CELLS)
def test_equals_the_reference(kind, noise, training, dtype, taken):
    """A step has other masks, states or gradients than the paper's equations."""
    torch.manual_seed(0)
    x, states = (
        torch.randn(5, 4, dtype=dtype),
        torch.randn(2 if kind == "lstm" else 1, 5, 7, dtype=dtype),
    )
    for makers, given, own in ((CELLS, x, states), (LAYERS, x[None], states[:, None])):
        ours, theirs = (
            makers[kind](
                4, 7, noise=NOISES[noise](kind == "lstm"), dtype=dtype, backend=backend
            ).train(training)
            for backend in (None, "reference")
        )
        theirs.load_state_dict(ours.state_dict())
        at = {"step": 3} if makers is CELLS else {"first_step": 3}
        call = dict(seed=9, examples=torch.tensor([4, 0, 8, 2, 1]), **at)
        for got, want in zip(
            results(ours, given, own, **call), results(theirs, given, own, **call), strict=True
        ):
            torch.testing.assert_close(got, want)
    assert len(taken) == 2


@pytest.mark.parametrize("learned", [False, True], ids=["zero", "learned"])
@pytest.mark.parametrize("both", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("kind", CELLS)
def test_a_reset_before_the_step_equals_the_reference(kind, both, learned, taken):
    """An agent that takes one step at a time would go on with the state of the episode before."""
    torch.manual_seed(0)
    x, states = (
        torch.randn(1, 5, 4),
        torch.randn(2 if kind == "lstm" else 1, 2 if both else 1, 5, 7),
    )
    noise = NOISES["unit"](kind == "lstm")
    ours, theirs = (
        LAYERS[kind](
            4, 7, noise=noise, bidirectional=both, learn_initial_state=learned, backend=backend
        )
        for backend in (None, "reference")
    )
    if learned:
        torch.nn.init.normal_(ours.h0)
    theirs.load_state_dict(ours.state_dict())
    call = dict(seed=9, resets=torch.tensor([[True, False, True, False, False]]))
    found = [results(module, x, states, **call) for module in (ours, theirs)]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
    assert len(taken) == (2 if both else 1)


@pytest.mark.parametrize(
    "options",
    [
        {"noise": zo.StateDropout(cell=0.3)},
        {"noise": zo.RecurrentDropout(rate=0.3)},
        {"norm": "layer"},
        {"backend": "cpu"},
        {"dtype": torch.bfloat16},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_more_is_left_to_the_loop(options, taken):
    """A method that is not zoneout, a norm or a type that torch's cell rounds goes the way that
    leaves it out.
    """
    cell = zo.LSTMCell(4, 7, **options)
    cell(torch.randn(5, 4, dtype=options.get("dtype")))
    assert not taken


def test_parameters_of_several_types_are_converted():
    """A bias in another type is an error of torch's own cell, where a loop takes it."""
    ours, theirs = (zo.LSTMCell(4, 7, backend=backend) for backend in (None, "reference"))
    theirs.load_state_dict(ours.state_dict())
    ours.bias_hh = torch.nn.Parameter(ours.bias_hh.double())
    x = torch.randn(5, 4)
    for got, want in zip(ours(x), theirs(x), strict=True):
        torch.testing.assert_close(got, want)


def test_nothing_is_shared(taken):
    """Writing to the outputs of a layer changes the state that it gave beside them."""
    y, (h, _) = zo.LSTM(4, 7)(torch.randn(1, 5, 4))
    before = h.clone()
    with torch.no_grad():
        y.zero_()
    assert taken and torch.equal(h, before)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", [zo.LSTM, zo.GRU, zo.RNN])
def test_a_final_state_may_be_changed_in_place(kind, steps):
    """A policy that clears the states of ended episodes cannot go back through the step before."""
    layer, x = kind(3, 4), torch.randn(steps, 2, 3)
    y, state = layer(x)
    h = state[0] if kind is zo.LSTM else state
    h.mul_(torch.tensor([[[0.0], [1.0]]]))
    (y.sum() + layer(x, state)[0].sum()).backward()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_rate_of_1_keeps_the_old_value_whatever_the_new_one_is(steps):
    """One step with an infinite input makes nan of what was to be kept; or what is kept is the
    caller's own tensor.
    """
    layer = zo.RNN(3, 2, nonlinearity="relu", noise=zo.Zoneout(hidden=1.0)).eval()
    with torch.no_grad():
        for p in layer.parameters():
            p.abs_()
        h0 = torch.full((1, 1, 2), 0.5)
        y, h = layer(torch.full((steps, 1, 3), torch.inf), h0)
        assert (y == 0.5).all() and (h == 0.5).all()
        h.add_(1)
    assert (h0 == 0.5).all() and h0.shape == (1, 1, 2)


def test_rates_that_lie_apart():
    """Every second number of a tensor is read as if they stood side by side."""
    cell = zo.ZoneoutCell(
        torch.nn.GRUCell(3, 4),
        rates=torch.tensor([0, 1, 1, 0, 0, 1, 1, 0], dtype=torch.float64)[::2],
    )
    h = torch.randn(5, 4)
    assert ((cell(torch.randn(5, 3), h) == h) == torch.tensor([False, True, False, True])).all()


def test_memory_of_inference_mode():
    """A way back in inference mode leaves memory to the next layer that this may not write to."""
    layer, x = zo.LSTM(3, 5, backend="cpu"), torch.randn(4, 3, 3)
    loss = layer(x)[0].sum()
    with torch.inference_mode():
        torch.autograd.grad(loss, list(layer.parameters()))
    zo.LSTM(3, 5, backend="cpu")(x)[0].sum().backward()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("kind", CELLS)
def test_repeated_steps(kind, noise, bias, training, monkeypatch):
    """A step that skips the checks has other results, or draws other numbers."""
    cell = CELLS[kind](4, 7, bias=bias, noise=NOISES[noise](kind == "lstm")).train(training)
    call = {"seed": 5, "step": 3} if noise in ("sequence", "static", "sampled") else {}
    own = step_cells.repeated_step

    def steps():
        torch.manual_seed(0)
        found = []
        for k in range(4):
            x, states = torch.randn(5, 4), [torch.randn(5, 7) for _ in range(1 + (kind == "lstm"))]
            found += results(cell, x, states, **call)
            found += results(cell, x, states, seed=k, step=k)
        return [*found, torch.rand(1)]

    steps()
    again = []
    monkeypatch.setattr(step_cells, "repeated_step", lambda *a: again.append(own(*a)) or again[-1])
    repeated = steps()
    drawn = training or noise == "sampled"
    plain = noise in ("none", "unit", "shared", "off", "sampled")
    plain |= noise in ("step", "sequence", "static") and not drawn
    assert sum(new is not None for new in again) == (8 if plain else 0)
    monkeypatch.setattr(step_cells, "repeated_step", lambda *a: None)
    assert all(map(torch.equal, repeated, steps()))


OTHERS = {
    "own cell": lambda noise: zo.RecurrentCell(zo.cells.peephole_lstm, 4, 7, noise=noise),
    "product": lambda noise: zo.RecurrentCell(zo.cells.mgu, 4, 7, noise=noise),
    "half": lambda noise: zo.GRUCell(4, 7, dtype=torch.bfloat16, noise=noise),
    "in C": lambda noise: zo.LSTMCell(4, 7, backend="cpu", noise=noise),
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("kind", OTHERS)
def test_repeated_steps_of_other_cells(kind, noise, monkeypatch):
    """The same, of cells that torch does not have."""
    cell = OTHERS[kind](NOISES[noise](False))
    drawn = noise in ("sequence", "static")
    own, dtype = step_cells.repeated_step, cell.weight_ih.dtype

    def steps():
        torch.manual_seed(0)
        found = []
        for k in range(6):
            cell.train(k % 2 == 0 or noise == "sampled")
            x = torch.randn(5, 4).to(dtype)
            states = [torch.randn(5, 7).to(dtype) for _ in cell.definition.states]
            if not drawn:
                found += results(cell, x, states)
            found += results(cell, x, states, seed=k, step=k)
        return [*found, torch.rand(1)]

    for _ in range(2):
        steps()
    again = []
    monkeypatch.setattr(step_cells, "repeated_step", lambda *a: again.append(own(*a)) or again[-1])
    repeated = steps()
    assert all(new is not None for new in again)
    monkeypatch.setattr(step_cells, "repeated_step", lambda *a: None)
    assert all(map(torch.equal, repeated, steps()))


@pytest.mark.parametrize(
    "change",
    [
        lambda cell: setattr(cell, "noise", zo.Zoneout(hidden=0.9)),
        lambda cell: setattr(cell, "noise", zo.StateDropout(hidden=0.9)),
        lambda cell: setattr(cell, "bias_hh", torch.nn.Parameter(torch.ones(21))),
        lambda cell: setattr(cell, "bias_hh", None),
        lambda cell: torch.nn.utils.parametrize.register_parametrization(
            cell, "bias_hh", torch.nn.Tanh()
        ),
        lambda cell: prune.random_unstructured(cell, "weight_hh", 0.5),
        lambda cell: cell.load_state_dict(zo.GRUCell(4, 7).state_dict()),
    ],
)
def test_repeated_steps_follow_the_cell(change):
    """A step after a change runs as the cell was before it."""
    cell, x, h = (
        zo.GRUCell(4, 7, noise=zo.Zoneout(hidden=0.2)),
        torch.randn(5, 4),
        torch.randn(5, 7),
    )

    def step():
        for _ in range(3):
            new = cell(x, h, seed=1, step=0)
        cell._prepared.clear()
        assert torch.equal(new, cell(x, h, seed=1, step=0))
        return new

    before = step()
    change(cell)
    assert not torch.equal(before, step())


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda cell: cell(torch.zeros(5, 3), torch.zeros(5, 7)), "4 features"),
        (lambda cell: cell(torch.zeros(5, 4), torch.zeros(4, 7)), r"shape \(5, 7\)"),
        (lambda cell: cell(torch.zeros(5, 4), torch.zeros(1, 7)), r"shape \(5, 7\)"),
        (lambda cell: cell(torch.zeros(5, 4), (torch.zeros(5, 7),)), "a tensor"),
        (lambda cell: cell(torch.zeros(5, 4), torch.zeros(5, 7).double()), "float32"),
        (
            lambda cell: cell(torch.zeros(5, 4), torch.zeros(5, 7), seed=1),
            "the number of this step",
        ),
        (lambda cell: cell(torch.zeros(5, 4), torch.zeros(5, 7), step=-1), "step: expected"),
        (lambda cell: cell(torch.zeros(5, 4), torch.zeros(5, 7), step=2**32), "step: expected"),
        (lambda cell: cell(torch.zeros(5, 4), torch.zeros(5, 7), seed="a", step=1), "seed"),
        (lambda cell: cell(torch.zeros(5, 4), torch.zeros(5, 7), seed=2**70, step=1), "seed"),
    ],
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_bad_steps_after_good_ones(call, error, training):
    """What a first step refuses, a later one accepts."""
    cell = zo.GRUCell(4, 7, noise=zo.Zoneout(hidden=0.2)).train(training)
    if "number of this step" in error and not training:
        pytest.skip("nothing is drawn")
    for _ in range(3):
        cell(torch.zeros(5, 4), torch.zeros(5, 7))
    with pytest.raises((ValueError, TypeError), match=error):
        call(cell)


@pytest.mark.parametrize("shape", [(1,), (), (1, 21), (5, 21)], ids=str)
def test_a_bias_of_another_shape(shape):
    """torch's cell adds a bias of any shape that can be broadcast."""
    cell, x, h = zo.GRUCell(4, 7), torch.zeros(5, 4), torch.zeros(5, 7)
    for _ in range(3):
        cell(x, h)
    cell.bias_hh.data = torch.ones(shape)
    with pytest.raises(ValueError, match="bias_hh: expected shape"):
        cell(x, h)


@pytest.mark.parametrize("name", ["weight_hh", "bias_hh"])
def test_a_weight_of_another_type(name):
    """A first step converts it, and a later one raises."""
    cell, x, h = zo.GRUCell(4, 7), torch.zeros(5, 4), torch.zeros(5, 7)
    for _ in range(3):
        before = cell(x, h)
    getattr(cell, name).data = getattr(cell, name).data.double()
    torch.testing.assert_close(cell(x, h), before)


def test_another_default_device():
    """The masks of a step are on the device of what is made next."""
    cell, x, h = (
        zo.GRUCell(4, 7, noise=zo.Zoneout(hidden=0.2)),
        torch.zeros(5, 4),
        torch.zeros(5, 7),
    )
    before = [cell(x, h, seed=1, step=2) for _ in range(3)]
    with torch.device("meta"):
        assert torch.equal(cell(x, h, seed=1, step=2), before[0])


def test_copies_of_a_cell_that_was_called():
    """A copy cannot be made, or reads the rates of the cell that it was copied from."""
    cell = zo.GRUCell(4, 7, noise=zo.Zoneout(hidden=0.5))
    torch.nn.utils.parametrizations.weight_norm(cell, "weight_hh")
    plain = zo.GRUCell(4, 7, noise=zo.Zoneout(hidden=0.5))
    x, h = torch.randn(5, 4), torch.randn(5, 7)
    for one in (cell, plain):
        for _ in range(3):
            before = one(x, h, seed=1, step=2)
        copied = copy.deepcopy(one)
        one.noise = None
        gc.collect()
        for _ in range(3):
            assert torch.equal(copied(x, h, seed=1, step=2), before)


# --- steps with much work -------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", CELLS)
def test_much_work_goes_to_the_loop(kind, training, taken):
    """A step with much work has other masks, states or gradients, or stays with torch's cell."""
    torch.manual_seed(0)
    rows, units = one_step.ROWS, 768
    states = torch.randn(2 if kind == "lstm" else 1, rows, units)
    ours, theirs = (
        CELLS[kind](8, units, noise=NOISES["unit"](kind == "lstm"), backend=backend).train(training)
        for backend in (None, "reference")
    )
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(rows, 8)
    want = results(theirs, x, states, seed=9, step=3)
    for _ in range(3):  # by the general code, while it is recorded, and by its plan
        for got, expected in zip(results(ours, x, states, seed=9, step=3), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert not taken


def test_rows_that_change_from_step_to_step(taken):
    """Steps of few rows and of many, in turn, take the way of the other, or are prepared anew."""
    cell = zo.GRUCell(8, 512, noise=zo.Zoneout(hidden=0.3))
    for _ in range(3):
        for rows in (1, one_step.ROWS):
            cell(torch.randn(rows, 8), torch.zeros(rows, 512), seed=1, step=0)
    assert len(taken) == 1 and len(cell._prepared) == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, of forward mode
def test_much_work_has_second_and_forward_derivatives():
    """A step with much work loses derivatives that a small one has."""
    cell = zo.RNNCell(2, 1024, dtype=torch.float64)
    assert not cell._is_small(64)
    x = torch.randn(64, 2, dtype=torch.float64, requires_grad=True)
    h = torch.zeros(64, 1024, dtype=torch.float64)
    (slope,) = torch.autograd.grad(cell(x, h).sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert x.grad.any()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        along = forward_ad.unpack_dual(cell(dual, h)).tangent
    few = torch.cat([cell(v, h[:1]) for v in (x + 1e-6).split(1)]) - torch.cat(
        [cell(v, h[:1]) for v in (x - 1e-6).split(1)]
    )
    torch.testing.assert_close(along, few.detach() / 2e-6, rtol=1e-4, atol=1e-6)
