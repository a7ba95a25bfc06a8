"""The masks as they are used: read back out of outputs and gradients, and compared with `masks()`.

The trick: each unit is wired to one feature of its input and to nothing else, huge biases hold the
    gates
open or shut, and the state is reset before every step. At every step, then, the old value of a unit
is the initial state, which is 0, and its candidate is not 0. So an output is 0 exactly where a mask
says so, and exactly there the gradient that reaches the unit's own feature is 0. A layer above or
below that has no noise passes on both: what is 0 stays 0, and nothing else becomes 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from backends import Backend
from philox_numpy import mask as numpy_mask
from philox_numpy import rates_on_the_edge
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import zoneout as zo

SEED = 2**40 + 7
STEPS, BATCH, UNITS = 6, 5, 7
LENGTHS = torch.tensor([4, 6, 1, 6, 3])
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
LAYERS: dict[str, Any] = {
    "lstm": zo.LSTM,
    "gru": zo.GRU,
    "rnn": zo.RNN,
    "relu": partial(zo.RNN, nonlinearity="relu"),
}
CELLS: dict[str, Any] = {
    "lstm": zo.LSTMCell,
    "gru": zo.GRUCell,
    "rnn": zo.RNNCell,
    "relu": partial(zo.RNNCell, nonlinearity="relu"),
}
TORCH: dict[str, Any] = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn": nn.RNNCell,
    "relu": partial(nn.RNNCell, nonlinearity="relu"),
}

METHODS: dict[
    str, tuple[str, Callable[[Any], Any]]
] = {  # the stream, and the noise on it at a rate
    "zoneout cell": ("cell", lambda rate: zo.Zoneout(cell=rate)),
    "zoneout hidden": ("hidden", lambda rate: zo.Zoneout(hidden=rate)),
    "state dropout cell": ("cell", lambda rate: zo.StateDropout(cell=rate)),
    "state dropout hidden": ("hidden", lambda rate: zo.StateDropout(hidden=rate)),
    "recurrent dropout": ("update", lambda rate: zo.RecurrentDropout(rate=rate)),
    "variational input": ("input", lambda rate: zo.VariationalDropout(input=rate)),
    "variational hidden": ("variational_hidden", lambda rate: zo.VariationalDropout(hidden=rate)),
}
STREAMS = {"lstm": ("cell", "hidden", "update"), "gru": ("hidden", "update")}
CASES = [
    pytest.param(kind, method, id=f"{kind}-{method.replace(' ', '_')}")
    for kind in LAYERS
    for method, (stream, _) in METHODS.items()
    if stream in (*STREAMS.get(kind, ["hidden"]), "input", "variational_hidden")
]
# How the input comes, and which rows and steps of a larger whole it is said to be.
FORMS: dict[str, dict[str, Any]] = {
    "padded": dict(),
    "batch_first": dict(first_step=1),
    "lengths": dict(examples=torch.tensor([9, 2, 2**32 - 1, 0, 4]), first_step=2**20),
    "packed": dict(examples=3),
    "packed_sorted": dict(first_step=5),
}


REFERENCE = Backend("reference", "cpu")


@torch.no_grad()
def wire(module, source="input", at=None):
    """Make unit u of every layer a function of one number alone, and its candidate 0 only where
    that is 0.

    The number is feature u of the input; in the layer `at` it is, by `source`, unit u of h or a
    bias.
    """
    units = module.hidden_size
    candidate = slice(0, units) if module.kind == "rnn" else slice(2 * units, 3 * units)
    gates = {"lstm": (1e3, -1e3, 0, 1e3), "gru": (1e3, -1e3, 0), "rnn": (0,)}[module.kind]
    for suffix in module.suffixes():
        layer = int(suffix[2]) if suffix else 0
        its_source = source if at in (None, layer) else "input"
        w_ih, w_hh, b_ih, _ = (getattr(module, name + suffix).zero_() for name in WEIGHTS)
        b_ih.copy_(torch.tensor(gates, device=b_ih.device).repeat_interleave(units))
        if its_source == "bias":
            b_ih[candidate] = 1.0
        elif its_source == "hidden":
            w_hh[candidate].fill_diagonal_(1.0)
        else:  # in the upper layers each direction listens to its own kind
            first = module.output_size if layer > 0 and suffix.endswith("reverse") else 0
            w_ih[candidate, first:].fill_diagonal_(1.0)
        if getattr(module, "proj_size", 0):
            getattr(module, f"weight_hr{suffix}").zero_().fill_diagonal_(1.0)


def inputs(backend, *shape):
    """Positive numbers, all different."""
    return torch.linspace(0.5, 1.5, torch.Size(shape).numel(), device=backend.device).view(shape)


def build(kind, backend, layers=1, **more):
    """A layer that runs both ways; not wired yet."""
    layer = LAYERS[kind](UNITS, UNITS, layers, bidirectional=True, backend=backend.name, **more)
    return layer.to(backend.device)


def start_from(layer, h0, c0, order=None):
    """Let every sequence, and every step after a reset, begin with these states; `order` is that of
    a packed batch.

    A layer's own initial states are alike in all rows, and not sorted.
    """
    h0, c0 = (v if order is None else v.index_select(1, order) for v in (h0, c0))
    layer._initial_states = lambda batch, dtype: [h0, c0] if layer.kind == "lstm" else [h0]


def run(layer, x, h0, form):
    """Run on x [T, B, ·], given in the form asked for, with a reset at every step.

    Returns the outputs, the last state, every c (of an LSTM), all as [T, B, ·], and which steps are
    alive.
    """
    lengths = LENGTHS.sort(descending=True).values if form == "packed_sorted" else LENGTHS
    if form in ("padded", "batch_first"):
        lengths = torch.full((BATCH,), STEPS)
    alive = (torch.arange(STEPS)[:, None] < lengths).to(x.device)  # [T, B]
    packed, lstm = form.startswith("packed"), layer.kind == "lstm"
    layer.batch_first = form == "batch_first"

    def turn(v):
        return v.transpose(0, 1) if layer.batch_first else v

    given = (
        pack_padded_sequence(x, lengths, enforce_sorted=form == "packed_sorted")
        if packed
        else turn(x)
    )
    start_from(
        layer, h0, h0.new_zeros(len(h0), BATCH, UNITS), given.sorted_indices if packed else None
    )
    y, state, *cells = layer(
        given,
        lengths=lengths if form == "lengths" else None,
        resets=turn(torch.full_like(alive, True)),
        return_cells=lstm,
        seed=SEED,
        **FORMS[form],
    )
    y, *cells = (pad_packed_sequence(v)[0] if packed else turn(v) for v in (y, *cells))
    return y, state, cells[0] if lstm else None, alive


def expected(noise, stream, layer, direction, form="padded", **sizes):
    """The mask of one stream as `masks()` shows it, [T, B, units]."""
    at = dict(layer=layer, direction=direction, **FORMS[form])
    return zo.masks(noise, SEED, STEPS, BATCH, UNITS, **at, **sizes)[stream]


def assert_reads(read, mask, alive=None):
    """What was read is the mask, wherever there is something to read."""
    mask = mask.to(read.device)
    if alive is not None:
        read, mask = read[alive], mask[alive]
    assert mask.any() and not mask.all(), "a mask that is all one value proves nothing"
    assert torch.equal(read, mask)


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("at", [0, 1], ids=["layer0", "layer1"])
@pytest.mark.parametrize(("kind", "method"), CASES)
def test_layer(backend, kind, method, at, form):
    """If this fails, a layer, direction or row of the batch draws other masks than its coordinates
    say: in
    the forward pass if outputs or last states differ, in the backward pass if gradients do."""
    stream, make = METHODS[method]
    by_h = stream == "variational_hidden"
    shown_by_cells = (
        method == "zoneout cell"
    )  # h is made from the candidate c, so y does not show this mask
    depth = at + 1 if shown_by_cells else 2  # cells are returned for the last layer
    noise = make([0.5 if layer == at else 0.0 for layer in range(depth)])
    layer = build(kind, backend, depth, noise=noise)
    wire(layer, "hidden" if by_h else "input", at)
    x = inputs(backend, STEPS, BATCH, UNITS).requires_grad_()
    h0 = torch.full((2 * depth, BATCH, UNITS), float(by_h), device=x.device, requires_grad=True)
    y, state, cells, alive = run(layer, x, h0, form)

    for direction in (0, 1):
        width = UNITS if at == 0 else 2 * UNITS
        mask = expected(noise, stream, at, direction, form, input_size=width)
        if stream == "input" and at == 1:  # the features that this direction listens to
            mask = mask.chunk(2, -1)[direction]

        shown = (cells if shown_by_cells else y).chunk(2, -1)[direction]
        assert_reads(shown == 0, mask, alive)

        last = (state if kind != "lstm" else state[1] if shown_by_cells else state[0])[
            2 * at + direction
        ]
        end = alive.sum(0) - 1 if direction == 0 else torch.zeros_like(alive[0], dtype=torch.int64)
        assert_reads(last == 0, mask.to(x.device)[end, torch.arange(BATCH, device=x.device)])

        if by_h:  # one mask a sequence, and one h0
            (grad,) = torch.autograd.grad(shown.sum(), h0, retain_graph=True)
            assert_reads(grad[2 * at + direction] == 0, mask[0])
        else:
            (grad,) = torch.autograd.grad(shown.sum(), x, retain_graph=True)
            assert_reads(grad == 0, mask, alive)
            assert not grad[~alive].any(), "padding has no gradient"


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("at", [0, 1], ids=["layer0", "layer1"])
@pytest.mark.parametrize(
    ("kind", "method"),
    [case for case in CASES if case.values[1] in ("zoneout cell", "zoneout hidden")],
)
def test_gradient_of_the_old_value(backend, kind, method, at, form):
    """If this fails, the backward pass sends the old value's share to units that were not kept."""
    stream, make = METHODS[method]
    depth = at + 1 if stream == "cell" else 2
    noise = make([0.5 if layer == at else 0.0 for layer in range(depth)])
    layer = build(kind, backend, depth, noise=noise)
    wire(layer)
    x = inputs(backend, STEPS, BATCH, UNITS)
    old = torch.ones(2 * depth, BATCH, UNITS, device=x.device, requires_grad=True)
    alive = (torch.arange(STEPS)[:, None] < LENGTHS).to(x.device) if form == "packed" else None
    given = pack_padded_sequence(x, LENGTHS, enforce_sorted=False) if form == "packed" else x
    order = given.sorted_indices if form == "packed" else None
    start_from(layer, old, old, order)  # the gates do not see h, and the forget gate is shut
    resets = torch.full((STEPS, BATCH), True, device=x.device)
    y, _, *cells = layer(
        given, resets=resets, seed=SEED, return_cells=stream == "cell", **FORMS[form]
    )
    shown = cells[0] if stream == "cell" else y
    shown = pad_packed_sequence(shown)[0] if form == "packed" else shown
    for direction in (0, 1):
        part = shown.chunk(2, -1)[direction]
        each = [torch.autograd.grad(step.sum(), old, retain_graph=True)[0] for step in part]
        read = torch.stack(each)[:, 2 * at + direction] != 0  # [T, B, units]
        assert_reads(read, expected(noise, stream, at, direction, form), alive)


@pytest.mark.parametrize("mask", ["unit", "shared", "step", "sequence", "static"])
@pytest.mark.parametrize("kind", LAYERS)
def test_kinds_of_masks(backend, kind, mask):
    """If this fails, a layer's mask of this kind is not the one shown, or its two states mix
    theirs up.
    """
    streams = ("hidden", "cell") if kind == "lstm" else ("hidden",)
    cell = 0.4 if kind == "lstm" else 0.0
    noise = zo.Zoneout(cell=cell, hidden=0.6, mask=mask, seed=99 if mask == "static" else None)
    layer = build(kind, backend, 2, noise=noise)
    wire(layer, "bias", at=1)
    x = inputs(backend, STEPS, BATCH, UNITS)
    y, _, cells, alive = run(layer, x, torch.zeros(4, BATCH, UNITS, device=x.device), "lengths")
    for direction in (0, 1):
        for stream, shown in zip(streams, (y, cells), strict=False):
            read = shown.chunk(2, -1)[direction] == 0
            assert_reads(read, expected(noise, stream, 1, direction, "lengths"), alive)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("method", METHODS)
def test_rates_are_rounded(backend, method, dtype):
    """If this fails, a backend compares its bits with something else than round(rate · 65536):
    truncated, say.
    """
    if backend.device == "cuda" and dtype == torch.float64:
        pytest.skip("the kernels compute in float32")
    stream, make = METHODS[method]
    by_h = stream == "variational_hidden"
    kind = "sequence" if stream in ("input", "variational_hidden") else "unit"
    rates, kept = rates_on_the_edge(stream, kind, SEED, UNITS)
    layer = zo.LSTM(UNITS, UNITS, backend=backend.name, device=backend.device, dtype=dtype)
    wire(layer, "hidden" if by_h else "input")
    x = inputs(backend, 2, 1, UNITS).to(dtype)  # of one step a layer would take torch's own cell
    h0 = torch.full((1, 1, UNITS), float(by_h), dtype=dtype, device=x.device)

    def read(rate):
        """Which units of the first step keep their old value, which is 0, or are dropped."""
        layer.noise = make(rate)
        y, _, cells = layer(x, (h0, torch.zeros_like(h0)), seed=SEED, return_cells=True)
        return ((cells if method == "zoneout cell" else y)[0, 0] == 0).tolist()

    assert read(torch.tensor(rates, dtype=torch.float64)) == kept
    for unit in (0, 1):  # the same rate for all units
        assert read(rates[unit])[unit] == kept[unit]


@pytest.mark.parametrize("kind", LAYERS)
def test_last_states_of_every_layer(backend, kind):
    """If this fails, with noise in all layers at once some layer's states keep the units of
    another.
    """
    noise = zo.Zoneout(cell=[0.3, 0.6] if kind == "lstm" else 0.0, hidden=[0.7, 0.4])
    layer = build(kind, backend, 2, noise=noise)
    wire(layer, "bias")
    x = inputs(backend, STEPS, BATCH, UNITS)
    ended = [layer(x[t : t + 1], seed=SEED, first_step=t)[1] for t in range(STEPS)]
    states = [torch.stack(h) for h in zip(*ended)] if kind == "lstm" else [torch.stack(ended)]
    for stream, state in zip(("hidden", "cell"), states):  # [T, layer and direction, B, units]
        for place in range(4):
            assert_reads(state[:, place] == 0, expected(noise, stream, place // 2, place % 2))


@pytest.mark.parametrize(
    "method", ["zoneout cell", "zoneout hidden", "state dropout hidden", "variational hidden"]
)
def test_projection(backend, method):
    """If this fails, with `proj_size` the masks of h run over the cell's units, or those of c
    over h's.
    """
    stream, make = METHODS[method]
    noise, by_h = make(0.5), stream == "variational_hidden"
    layer = build("lstm", backend, noise=noise, proj_size=5)
    wire(layer, "hidden" if by_h else "input")
    x = inputs(backend, STEPS, BATCH, UNITS).requires_grad_()
    h0 = torch.full((2, BATCH, 5), float(by_h), device=x.device, requires_grad=True)
    y, _, cells, _ = run(layer, x, h0, "padded")
    for direction in (0, 1):
        mask = expected(noise, stream, 0, direction, proj_size=5)
        shown = (cells if stream == "cell" else y).chunk(2, -1)[direction]
        assert_reads(shown == 0, mask)
        (grad,) = torch.autograd.grad(shown.sum(), h0 if by_h else x, retain_graph=True)
        if by_h:
            assert_reads(grad[direction] == 0, mask[0])
        else:
            assert_reads(grad[..., : shown.shape[-1]] == 0, mask)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_between_layers(backend, kind, form):
    """If this fails, torch's own dropout is not drawn by coordinates: reordering a batch would
    change it.
    """
    layer = build(kind, backend, 3, dropout=0.5)
    wire(layer)
    x = inputs(backend, STEPS, BATCH, UNITS).requires_grad_()
    y, _, _, alive = run(layer, x, torch.zeros(6, BATCH, UNITS, device=x.device), form)
    rows, first = FORMS[form].get("examples", 0), FORMS[form].get("first_step", 0)
    rows = rows.tolist() if isinstance(rows, torch.Tensor) else range(rows, rows + BATCH)
    for direction in (0, 1):
        mask = torch.zeros(STEPS, BATCH, UNITS, dtype=torch.bool)
        for below in (0, 1):  # the outputs of the first and of the second layer
            steps = range(first, first + STEPS)
            drawn = numpy_mask("dropout", "unit", 0.5, SEED, steps, rows, UNITS, below, direction)
            mask |= torch.from_numpy(drawn)
        shown = y.chunk(2, -1)[direction]
        (grad,) = torch.autograd.grad(shown.sum(), x, retain_graph=True)
        assert_reads(shown == 0, mask, alive)
        assert_reads(grad == 0, mask, alive)


@pytest.mark.parametrize("kind", LAYERS)
def test_methods_together(backend, kind):
    """If this fails, a method in company draws other masks than it draws alone, or one is
    forgotten.
    """
    noise = [zo.Zoneout(hidden=0.3), zo.VariationalDropout(input=0.2)]
    noise += [zo.RecurrentDropout(rate=0.2)] if kind in ("lstm", "gru") else []
    noise += [zo.StateDropout(cell=0.2)] if kind == "lstm" else []
    layer = build(kind, backend, noise=noise)
    wire(layer)
    x = inputs(backend, STEPS, BATCH, UNITS).requires_grad_()
    y, _, _, alive = run(layer, x, torch.zeros(2, BATCH, UNITS, device=x.device), "lengths")
    for direction in (0, 1):
        masks = zo.masks(noise, SEED, STEPS, BATCH, UNITS, direction=direction, **FORMS["lengths"])
        masks = {stream: mask for stream, mask in masks.items() if mask.any()}
        assert len(masks) == len(noise), "not every method has its mask"
        mask = torch.stack(list(masks.values())).any(0)
        shown = y.chunk(2, -1)[direction]
        (grad,) = torch.autograd.grad(shown.sum(), x, retain_graph=True)
        assert_reads(shown == 0, mask, alive)
        assert_reads(grad == 0, mask, alive)


@torch.no_grad()
def test_held_output_gate(backend):
    """If this fails, the output gate is held by another mask than the one that drops the update."""
    noise = zo.RecurrentDropout(rate=0.5, hold_output_gate=True)
    layer = build("lstm", backend, noise=noise)
    for (
        suffix
    ) in layer.suffixes():  # c stays what it is, and unit u shows it by the gate σ(feature u)
        for name in WEIGHTS:
            getattr(layer, name + suffix).zero_()
        getattr(layer, f"bias_ih{suffix}")[: 2 * UNITS] = torch.tensor(
            [-1e3, 1e3]
        ).repeat_interleave(UNITS)
        getattr(layer, f"weight_ih{suffix}")[3 * UNITS :].fill_diagonal_(1.0)
    x = inputs(backend, STEPS, BATCH, UNITS)
    state = torch.ones(2, BATCH, UNITS, device=x.device)
    y, _ = layer(x, (state, state), seed=SEED)
    gate = y / torch.ones((), device=x.device).tanh()
    for direction, before in ((0, x[:-1]), (1, x[1:])):  # the steps that have one before them
        now = slice(1, None) if direction == 0 else slice(None, -1)
        shown = gate[now].chunk(2, -1)[direction]
        held = (shown - before.sigmoid()).abs() < (shown - x[now].sigmoid()).abs()
        assert_reads(held, expected(noise, "update", 0, direction)[now])


@pytest.mark.parametrize("kind", LAYERS)
def test_sample_at_evaluation(backend, kind):
    """If this fails, `at_eval="sample"` draws other masks than training, or the other settings
    draw any.
    """
    x = inputs(backend, STEPS, BATCH, UNITS)

    def outputs(training, at_eval):
        noise = zo.Zoneout(hidden=0.5, at_eval=at_eval)
        layer = build(kind, backend, noise=noise).train(training)
        wire(layer)
        return run(layer, x, torch.zeros(2, BATCH, UNITS, device=x.device), "padded")[0].chunk(
            2, -1
        )[0]

    drawn = outputs(True, "sample")
    assert_reads(drawn == 0, expected(zo.Zoneout(hidden=0.5), "hidden", 0, 0))
    assert torch.equal(outputs(False, "sample"), drawn)
    off = outputs(False, "off")
    torch.testing.assert_close(outputs(False, "expectation"), off / 2)
    assert (off != 0).all()


# --- one step at a time ---------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_cell(backend, kind, method):
    """If this fails, a cell at step t draws other masks than the layer would draw there."""
    stream, make = METHODS[method]
    noise, by_h = make(0.5), stream == "variational_hidden"
    cell = CELLS[kind](UNITS, UNITS, noise=noise, layer=3, backend=backend.name).to(backend.device)
    wire(cell, "hidden" if by_h else "input")
    examples = torch.tensor([9, 2, 2**32 - 1, 0, 4])
    read, read_grad = [], []
    for t, x in enumerate(inputs(backend, STEPS, BATCH, UNITS)):
        source = (torch.ones_like(x) if by_h else x).requires_grad_()
        h = source if by_h else torch.zeros_like(x)
        hx = (h, torch.zeros_like(x)) if kind == "lstm" else h
        state = cell(x, hx, seed=SEED, step=t + 2**20, examples=examples)
        shown = state if kind != "lstm" else state[1] if method == "zoneout cell" else state[0]
        read.append(shown == 0)
        read_grad.append(torch.autograd.grad(shown.sum(), source)[0] == 0)
    mask = expected(noise, stream, 3, 0, "lengths")
    assert_reads(torch.stack(read), mask)
    assert_reads(torch.stack(read_grad), mask)


@zo.cell(gates=1, states=("h", "c", "n", "m"), checked=False)
def four_states(x, r, h, c, n, m):
    return x[0] + r[0], c + x[0], n + x[0], m + x[0]


class Wires(nn.Module):
    """Somebody's own cell: each of its states becomes the input."""

    def forward(self, x, state):
        return x.clone() if isinstance(state, torch.Tensor) else tuple(x.clone() for _ in state)


@pytest.mark.parametrize(
    "examples", [None, 3, [9, 2, 2**32 - 1, 0, 4]], ids=["rows", "offset", "ids"]
)
@pytest.mark.parametrize("states", [1, 2, 3, 7])
def test_zoneout_cell(states, examples):
    """If this fails, a wrapped cell draws other masks than a `RecurrentCell` of the same states."""
    rates = [0.4, 0.6, 0.5, 0.4, 0.6, 0.5, 0.3][:states]
    wrapped = zo.ZoneoutCell(Wires(), rates[0] if states == 1 else rates, layer=2)
    read: list[list[torch.Tensor]] = [[] for _ in rates]
    for t, x in enumerate(inputs(REFERENCE, STEPS, BATCH, UNITS)):
        x.requires_grad_()
        old = tuple(torch.zeros_like(x).requires_grad_() for _ in rates)
        out = wrapped(x, old[0] if states == 1 else old, seed=SEED, step=t, examples=examples)
        for k, new in enumerate((out,) if states == 1 else out):
            to_new, to_old = torch.autograd.grad(new.sum(), (x, old[k]))
            assert torch.equal(new == 0, to_new == 0) and torch.equal(new == 0, to_old == 1)
            read[k].append(new == 0)
    masks = [torch.stack(mask) for mask in read]
    noise = zo.Zoneout(states=dict(zip("hcnm", rates)))
    given = torch.tensor(examples) if isinstance(examples, list) else examples
    place: dict[str, Any] = dict(examples=given, layer=2, cell=four_states)
    for mask, ours in zip(masks, zo.masks(noise, SEED, STEPS, BATCH, UNITS, **place).values()):
        assert_reads(mask, ours)
    rows = examples if isinstance(examples, list) else range(examples or 0, (examples or 0) + BATCH)
    for k in range(4, states):
        last = numpy_mask(f"wrapped{k}", "unit", rates[k], SEED, range(STEPS), rows, UNITS, layer=2)
        assert_reads(masks[k], torch.from_numpy(last))


@pytest.mark.parametrize("kind", LAYERS)
def test_zoneout_cell_around_torchs_cell_is_ours(kind):
    """If this fails, torch's cell in the wrapper is not our cell with the same weights and seed."""
    torch.manual_seed(0)
    theirs = TORCH[kind](UNITS, UNITS)
    noise = zo.Zoneout(hidden=0.3, cell=0.6) if kind == "lstm" else zo.Zoneout(hidden=0.3)
    ours = CELLS[kind](UNITS, UNITS, noise=noise)
    ours.load_state_dict(theirs.state_dict())
    wrapped = zo.ZoneoutCell(theirs, [0.3, 0.6] if kind == "lstm" else 0.3)
    a = b = None
    for t, x in enumerate(torch.randn(STEPS, BATCH, UNITS)):
        a, b = ours(x, a, seed=SEED, step=t), wrapped(x, b, seed=SEED, step=t)
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("in_c", [True, False], ids=["C", "torch"])
def test_rates_of_one_step_are_rounded(in_c, monkeypatch):
    """If this fails, masks that are drawn by themselves are compared with a rate that is not
    rounded.
    """
    if not in_c:
        monkeypatch.setattr("zoneout.ops.cpu.masks.native.load", lambda: None)
    rates, kept = rates_on_the_edge("hidden", "unit", SEED, UNITS)
    new, old = torch.ones(1, UNITS), torch.zeros(1, UNITS)
    assert (zo.zoneout(new, old, torch.tensor(rates, dtype=torch.float64), seed=SEED) == 0)[
        0
    ].tolist() == kept
    for unit in (0, 1):
        assert (zo.zoneout(new, old, rates[unit], seed=SEED)[0, unit] == 0) == kept[unit]


def test_bare_rule():
    """If this fails, `zoneout()` keeps other units than a layer's h does, or sends gradients
    elsewhere.
    """
    noise = zo.Zoneout(hidden=0.5)
    mask = zo.masks(noise, SEED, 1, 6, UNITS, first_step=4)["hidden"].view(
        2, 3, UNITS
    )  # rows are counted on
    new, old = (
        torch.ones(2, 3, UNITS, requires_grad=True),
        torch.zeros(2, 3, UNITS, requires_grad=True),
    )
    out = zo.zoneout(new, old, 0.5, seed=SEED, step=4)
    out.sum().backward()
    assert_reads(out == 0, mask)
    assert_reads(new.grad == 0, mask)
    assert_reads(old.grad == 1, mask)
