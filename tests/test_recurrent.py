"""Layers of a user's own cell: every path against the reference, and everything that a layer of
torch.nn can do.
"""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import products
import pytest
import torch
from generated import definitions
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

import zoneout as zo
from zoneout import cells
from zoneout.definition import Definition
from zoneout.ops import TOLERANCES, cpu, reference
from zoneout.ops.cpu import native

STEPS, BATCH, INPUT, HIDDEN = 6, 5, 3, 12


@zo.cell(gates=4, states=("h", "c"))
def peephole(x, r, h, c, p_i, p_f, p_o):
    i, f, g, o = (a + b for a, b in zip(x, r))
    new = zo.candidate(
        "c", (f + p_f * c).sigmoid() * c + zo.update((i + p_i * c).sigmoid() * g.tanh())
    )
    return zo.held((o + p_o * new).sigmoid()) * zo.shown(new).tanh(), new


@zo.cell(gates=4, states=("h", ("c", "n", "m")))
def slstm(x, r, h, c, n, m):
    i, f, g, o = (a + b for a, b in zip(x, r))
    stable = zo.candidate("m", torch.maximum(f + m, i))
    keep, put = (f + m - stable).exp(), (i - stable).exp()
    new_c = zo.candidate("c", keep * c + put * g.tanh())
    new_n = zo.candidate("n", keep * n + put)
    return o.sigmoid() * new_c / torch.maximum(new_n, 0.0 * n + 0.01), new_c, new_n, stable


@zo.cell(gates=3, states=("h", "a", "b", "c"))
def four_states(x, r, h, a, b, c):
    z, n, o = (u + v for u, v in zip(x, r))
    a = zo.candidate("a", z.sigmoid() * a + 0.5 * n.tanh())
    b = zo.candidate("b", 0.5 * b + zo.update(a * n.sigmoid()))
    c = zo.candidate("c", torch.where(b > 0, c * 0.3 + a, b))
    return (o + c).tanh(), a, b, c


@zo.cell(gates=2)
def slotted(x, r, h):
    """r meets each gate by itself: it has to be stored."""
    return (x[0] * r[0]).tanh() * h + zo.update((x[1] + x[0].sigmoid() * r[1]).relu() * 0.5)


@zo.cell(gates=1, recurrence="diagonal")
def indrnn(x, h, u):
    return (x[0] + u * h).relu()


@zo.cell(gates=2, recurrence="none")
def mingru(x, h):
    z, n = x[0].sigmoid(), x[1]
    return (1 - z) * h + zo.update(z * n)


@zo.cell(gates=3, states=("h", "c"), recurrence="blocks", heads=3)
def blocks(x, r, h, c):
    f, g, o = (a + b for a, b in zip(x, r))
    c = zo.candidate("c", f.sigmoid() * c + zo.update((1 - f.sigmoid()) * g.tanh()))
    return o.sigmoid() * zo.shown(c).tanh(), c


@zo.cell(gates=8, bounded=True)
def eight_gates(x, r, h):
    total = sum((a + b).tanh() for a, b in zip(x, r))
    return (total * 0.25 + h).tanh()


CELLS = {
    d.name: d for d in (peephole, slstm, four_states, slotted, indrnn, mingru, blocks, eight_gates)
} | products.BY_NAME
every_cell = pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)


def zoneout(cell: Definition, **more: Any) -> zo.Zoneout:
    """Zoneout of every state that may have a rate, in training and evaluation."""
    rates = {group[0]: 0.2 + 0.1 * k for k, group in enumerate(cell.groups)}
    grouped = any(len(group) > 1 for group in cell.groups)
    return zo.Zoneout(states=rates, at_eval="sample" if grouped else "expectation", **more)


def noises(cell: Definition) -> dict[str, Any]:
    found: dict[str, Any] = {
        "none": None,
        "zoneout": zoneout(cell),
        "shared": zoneout(cell, mask="shared"),
    }
    found["zero"] = zo.StateDropout(
        states={group[0]: 0.3 for group in cell.groups},
        at_eval="sample" if any(len(group) > 1 for group in cell.groups) else "expectation",
    )
    if "update" in cell.marks:
        found["update"] = [
            zo.RecurrentDropout(rate=0.4, hold_output_gate="held" in cell.marks),
            zoneout(cell),
        ]
    if cell.has_r:
        found["variational"] = [
            zo.VariationalDropout(input=0.2, hidden=0.3),
            zo.WeightDrop(rate=0.2),
        ]
    return found


FORMS = ("whole", "lengths", "resets", "packed", "both ways")
LENGTHS = torch.tensor([6, 2, 4, 1, 3])


def call(layer: Any, form: str, dtype: torch.dtype, steps: int = STEPS) -> dict[str, Tensor]:
    """Outputs, states and all gradients of one call."""
    layer.zero_grad()
    g = torch.Generator().manual_seed(2)
    x = (
        torch.randn(steps, BATCH, layer.input_size, generator=g)
        .bfloat16()
        .to(dtype)
        .requires_grad_()
    )
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.output_size] + [layer.hidden_size] * (len(layer.definition.states) - 1)
    states = [
        torch.randn(count, BATCH, n, generator=g).bfloat16().to(dtype).mul_(0.5).requires_grad_()
        for n in sizes
    ]
    more: dict[str, Any] = {"lengths": LENGTHS} if form in ("lengths", "both ways") else {}
    if form in ("resets", "both ways"):
        more["resets"] = torch.rand(steps, BATCH, generator=g) < 0.3
    given: Any = pack_padded_sequence(x, LENGTHS, enforce_sorted=False) if form == "packed" else x
    hx = tuple(states) if len(states) > 1 else states[0]
    y, ended, every = layer(given, hx, seed=5, return_states=True, **more)
    ended = ended if isinstance(ended, tuple) else (ended,)
    y, *seen = (v.data if form == "packed" else v for v in (y, *every.values()))
    out = (
        {"y": y}
        | {f"end {k}": v for k, v in enumerate(ended)}
        | {f"all {k}": v for k, v in enumerate(seen)}
    )
    weight = torch.Generator().manual_seed(3)
    loss = sum(
        (
            (v * torch.randn(v.shape, generator=weight).bfloat16().to(dtype)).sum()
            for v in out.values()
        ),
        torch.tensor(0.0),
    )
    if loss.requires_grad:
        wanted = (
            {"x": x}
            | {f"state {k}": v for k, v in enumerate(states)}
            | dict(layer.named_parameters())
        )
        grads = torch.autograd.grad(
            loss, list(wanted.values()), allow_unused=True, materialize_grads=True
        )
        out |= {f"d {name}": grad for name, grad in zip(wanted, grads)}
    return {name: v.detach() for name, v in out.items()}


def compare(
    cell: Definition, noise: Any, form: str, dtype: torch.dtype = torch.float64, **options: Any
) -> None:
    training = options.pop("training", True)
    exact = (
        torch.float32 if dtype == torch.bfloat16 else dtype
    )  # the reference would round after every operation
    ours, theirs = (
        zo.Recurrent(
            cell,
            INPUT,
            HIDDEN,
            noise=noise,
            dtype=kind,
            backend=backend,
            bidirectional=form == "both ways",
            **options,
        ).train(training)
        for kind, backend in ((dtype, "cpu"), (exact, "reference"))
    )
    theirs.load_state_dict(ours.state_dict())
    got, want = call(ours, form, dtype), call(theirs, form, exact)
    for name in want:
        far = (got[name].double() - want[name].double()).norm() / (
            want[name].double().norm() + 1e-30
        )
        assert far <= TOLERANCES[dtype], f"{name}: {far}"


@every_cell
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("noise", ["none", "zoneout", "shared", "zero", "update", "variational"])
def test_equals_the_reference(cell, noise, form):
    """The generated loop computes another output, state or gradient than the definition."""
    if noise not in noises(cell) or (noise in ("shared", "variational") and form in FORMS[1:4]):
        pytest.skip("the cell has no such stream, or the form is tested with other noises")
    compare(cell, noises(cell)[noise], form)


published = pytest.mark.parametrize("cell", cells.PUBLISHED.values(), ids=cells.PUBLISHED)


@published
@pytest.mark.parametrize("form", ["whole", "both ways"])
def test_published_cells_equal_the_reference(cell, form):
    """The compiled loop computes another output, state or gradient than the definition."""
    compare(cell, zoneout(cell), form)


@every_cell
def test_at_evaluation(cell):
    """The expectation, or a sample in its place, differs between the backends."""
    compare(cell, zoneout(cell), "lengths", training=False)


@every_cell
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_lower_precision(cell, dtype):
    """float32 has its own functions, and half types are computed in float32."""
    compare(cell, zoneout(cell), "whole", dtype)


@pytest.mark.parametrize(
    "norm", ["layer", zo.RecurrentBatchNorm(steps=STEPS)], ids=["layer", "batch"]
)
@pytest.mark.parametrize("form", ["whole", "both ways"])
@pytest.mark.parametrize(
    "cell",
    [d for d in CELLS.values() if d.recurrence == "dense" and d is not products.marked],
    ids=lambda d: d.name,
)
def test_norms(cell, form, norm):
    """A norm of a user's cell normalises something else than in the reference."""
    compare(cell, zoneout(cell), form, norm=norm)


@pytest.mark.parametrize("form", ["whole", "resets", "packed"])
def test_projection(form):
    """The projected state, its mask or the gradient of the projection is wrong."""
    compare(peephole, noises(peephole)["update"], form, proj_size=5)


@zo.cell(gates=1, states=("h", "c"))
def forgets_x(x, r, h, c):
    c = zo.candidate("c", x[0] * c + r[0])
    return 2 * c, c


def test_projection_of_what_is_not_stored():
    """A projection needs what was projected, which this cell cannot compute again: a crash."""
    assert not forgets_x.storage.again and peephole.storage.again
    ours, theirs = (
        zo.Recurrent(forgets_x, 3, 6, proj_size=4, backend=b) for b in (None, "reference")
    )
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(STEPS, BATCH, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y, _ = ours(pack_padded_sequence(x, LENGTHS, enforce_sorted=False))
    want = pack_padded_sequence(theirs(x, lengths=LENGTHS)[0], LENGTHS, enforce_sorted=False)
    torch.testing.assert_close(y.data, want.data)


@every_cell
def test_recomputing(cell):
    """With `recompute` a gradient differs, or the states between the pieces are rounded."""
    ours, theirs = (
        zo.Recurrent(cell, INPUT, HIDDEN, noise=zoneout(cell), recompute=r) for r in (True, False)
    )
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(40, BATCH, INPUT)
    for layer in (ours, theirs):
        layer(x, seed=1)[0].square().sum().backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=name)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(definition=definitions(), form=st.sampled_from(FORMS[:3]))
def test_random_cells(definition, form):
    """A random cell, with all its rules of noise, is not what its definition says."""
    if definition.storage.fits:
        compare(definition, [zo.Zoneout(hidden=0.3), zo.WeightNoise(std=0.01)], form)


def test_several_threads(monkeypatch):
    """With more threads the sums of parameters, or the rows of a cell without a matrix, are lost
    or counted twice.
    """
    count = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for cell in (peephole, indrnn, blocks):
                compare(cell, zoneout(cell), "both ways", torch.float32)
    finally:
        torch.set_num_threads(count)


# --- the built-in cells are definitions too ------------------------------------------------------


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_a_built_in_cell_gives_the_same_bits(name):
    """`Recurrent` of a built-in cell, or the layer with torch's names around it, is another
    layer.
    """
    noise = zo.Zoneout(cell=0.3, hidden=0.1) if name == "LSTM" else zo.Zoneout(hidden=0.1)
    known = getattr(zo, name)(INPUT, HIDDEN, 2, noise=noise)
    ours = zo.Recurrent(known.definition, INPUT, HIDDEN, 2, noise=noise)
    ours.load_state_dict(known.state_dict())
    x = torch.randn(STEPS, BATCH, INPUT)
    (y, state), (want, want_state) = ours(x, seed=3), known(x, seed=3)
    assert y.equal(want)
    assert all(a.equal(b) for a, b in zip(state, want_state))


# --- paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell", [*CELLS.values(), *cells.PUBLISHED.values()], ids=[*CELLS, *cells.PUBLISHED]
)
def test_takes_the_compiled_loop(cell, monkeypatch):
    """A cell that the compiled loop can run is run by the reference, without a word."""
    if native.load() is None:
        pytest.skip(f"no compiled loop here: {native.why_not()}")
    monkeypatch.setattr(reference, "run", lambda r: pytest.fail("the reference ran"))
    monkeypatch.setattr(
        cpu.fallback, "forward", lambda loop: pytest.fail("the loop in torch calls ran")
    )
    zo.Recurrent(cell, INPUT, HIDDEN, noise=zoneout(cell))(torch.randn(STEPS, BATCH, INPUT))[
        0
    ].sum().backward()


@zo.cell(gates=4)
def stores_much(x, r, h):
    """Each r is multiplied with something else and used twice."""
    parts = [(a * b).tanh() * (b * b).sigmoid() for a, b in zip(x, r)]
    return sum(parts) + h * 0.1


def test_a_cell_that_stores_too_much_runs_the_reference():
    """Beyond two slots a cell fails, or nobody is told why it is slow."""
    assert not stores_much.storage.fits
    cpu._say_once.cache_clear()
    with pytest.warns(UserWarning, match=r"the cell 'stores_much' stores .* the reference runs it"):
        zo.Recurrent(stores_much, INPUT, HIDDEN)(torch.randn(STEPS, BATCH, INPUT))
    with pytest.raises(ValueError, match=r"backend: .*'stores_much'"):
        zo.Recurrent(stores_much, INPUT, HIDDEN, backend="cpu")(torch.randn(STEPS, BATCH, INPUT))


def test_packed_rows_of_a_cell_that_stores_too_much():
    """Packed rows reach the reference as they are, and their first dimension is taken for time."""
    layer = zo.Recurrent(stores_much, INPUT, HIDDEN, noise=zo.Zoneout(hidden=0.2))
    x = torch.randn(STEPS, BATCH, INPUT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y, h = layer(pack_padded_sequence(x, LENGTHS, enforce_sorted=False), seed=3)
        want, want_h = layer(x, lengths=LENGTHS, seed=3)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x[:2], seed=3)[0]
    torch.testing.assert_close(
        y.data, pack_padded_sequence(want, LENGTHS, enforce_sorted=False).data
    )
    torch.testing.assert_close(h, want_h)
    torch.testing.assert_close(compiled, layer(x[:2], seed=3)[0])


@zo.cell(gates=1, states=("h", "s"))
def h_feeds(x, r, h, s):
    h = zo.candidate("h", (x[0] + r[0]).tanh())
    return h, 0.5 * s + h


@pytest.mark.parametrize("training", [True, False])
def test_a_dropped_h_that_feeds_another_state(training):
    """StateDropout sets the candidate h to zero in one backend where it is marked, in another
    after the step.
    """
    compare(h_feeds, zo.StateDropout(hidden=0.5), "lengths", training=training)


# --- masks ----------------------------------------------------------------------------------------


@zo.cell(gates=1, states=("h", "a", "b", "c"), recurrence="none")
def counters(x, h, a, b, c):
    """Every state counts up from its own start: where it does not, the old value was kept."""
    return h + 0 * x[0] + 1, a + 1, b + 1, c + 1


@pytest.mark.parametrize("mask", ["unit", "shared", "step", "sequence"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_masks_of_all_states_read_back(mask, backend):
    """A state is zoned out by another mask than `zo.masks` says."""
    noise = zo.Zoneout(hidden=0.5, cell=0.3, states={"b": 0.4, "c": 0.6}, mask=mask)
    layer = zo.Recurrent(counters, 1, 40, noise=noise, backend=backend)
    _, _, states = layer(torch.zeros(STEPS, BATCH, 1), seed=11, examples=3, return_states=True)
    want = zo.masks(noise, 11, STEPS, BATCH, 40, examples=3, cell=counters)
    assert list(want) == ["h", "a", "b", "c"]
    for name, every in states.items():
        before = torch.cat((torch.zeros_like(every[:1]), every[:-1]))
        assert (every == before).equal(want[name]), name


# --- the same in one step -------------------------------------------------------------------------


@every_cell
def test_cells_step_like_layers(cell):
    """`RecurrentCell` draws other masks than the layer, or steps in another way."""
    layer, one = (
        zo.Recurrent(cell, INPUT, HIDDEN, noise=zoneout(cell)),
        zo.RecurrentCell(cell, INPUT, HIDDEN, noise=zoneout(cell)),
    )
    one.load_state_dict({name.removesuffix("_l0"): v for name, v in layer.state_dict().items()})
    x = torch.randn(STEPS, BATCH, INPUT)
    y, final = layer(x, seed=9)
    state = None
    for t in range(STEPS):
        state = one(x[t], state, seed=9, step=t)
        h = state[0] if isinstance(state, tuple) else state
        torch.testing.assert_close(h, y[t], rtol=1e-4, atol=1e-5)
    for a, b in zip(
        state if isinstance(state, tuple) else (state,),
        final if isinstance(final, tuple) else (final,),
    ):
        torch.testing.assert_close(a, b[0], rtol=1e-4, atol=1e-5)


# --- other people's tools -------------------------------------------------------------------------


def made(cell: Definition = peephole, **options: Any) -> tuple[zo.Recurrent, Tensor]:
    torch.manual_seed(0)
    return zo.Recurrent(cell, INPUT, HIDDEN, noise=zoneout(cell), **options), torch.randn(
        STEPS, BATCH, INPUT
    )


def test_another_process_loads_a_layer(tmp_path):
    """A layer with a user's cell needs the user's function to be loaded, or computes something
    else without it.
    """
    layer, x = made(norm="layer", learn_initial_state=True)
    torch.save({"layer": layer, "x": x}, tmp_path / "layer.pt")
    script = (
        "import sys, torch, zoneout\n"
        "given = torch.load(sys.argv[1], weights_only=False)\n"
        "y = given['layer'](given['x'], seed=3)[0]; y.sum().backward()\n"
        "torch.save([y] + [p.grad for p in given['layer'].parameters()], sys.argv[2])\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, tmp_path / "layer.pt", tmp_path / "found.pt"], check=True
    )
    y = layer(x, seed=3)[0]
    y.sum().backward()
    for a, b in zip(torch.load(tmp_path / "found.pt"), [y, *(p.grad for p in layer.parameters())]):
        torch.testing.assert_close(a, b)


def test_definitions_and_noise_load_without_code():
    """`torch.load(weights_only=True)` refuses a checkpoint with a definition in it."""
    buffer = io.BytesIO()
    torch.save({"cell": peephole, "noise": zoneout(slstm)}, buffer)
    buffer.seek(0)
    found = torch.load(buffer, weights_only=True)
    assert found["cell"] == peephole and found["noise"] == zoneout(slstm)


def test_copies():
    """A copy or a pickled layer draws other masks, shares weights, or forgets the cell."""
    layer, x = made()
    want = layer(x, seed=3)[0]
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied(x, seed=3)[0].equal(want)
        assert copied.p_i_l0 is not layer.p_i_l0


@pytest.mark.parametrize(
    "cell", [peephole, four_states, indrnn, products.shared], ids=lambda d: d.name
)
def test_compile(cell):
    """The compiler breaks the graph, or compiled code gives other outputs or gradients."""
    layer, x = made(cell)
    grads = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        y = run(x, seed=3)[0]
        y.square().sum().backward()
        grads.append([y.detach(), *(p.grad for p in layer.parameters())])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("cell", [mingru, products.lem], ids=lambda d: d.name)
def test_export(cell):
    """An exported program needs the user's function, or computes something else."""
    layer, x = made(cell)
    layer.eval()
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,), {"seed": torch.tensor(3)}), buffer)
    buffer.seek(0)
    program = torch.export.load(buffer).module()
    torch.testing.assert_close(program(x, seed=torch.tensor(3))[0], layer(x, seed=3)[0])


@pytest.mark.parametrize("cell", [peephole, products.shared], ids=lambda d: d.name)
def test_functional_transforms(cell):
    """torch.func does not see the parameters of a user's cell."""
    layer, x = made(cell)
    parameters = dict(layer.named_parameters())

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, p, (x,), {"seed": 3})[0].square().sum()

    found = torch.func.grad(loss)(parameters, x)
    loss(parameters, x).backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(found[name], p.grad)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(
        parameters, torch.stack((x, 2 * x))
    )
    for name, p in layer.named_parameters():
        torch.testing.assert_close(each[name][0], p.grad)


@pytest.mark.parametrize("batch", [2, 9, 64])
def test_threads_share_the_products_of_a_step(batch):
    """Threads read a product before it is there, or add up gradients of others' rows."""
    found, threads = [], torch.get_num_threads()
    layer, x = made(products.marked)[0], torch.randn(STEPS, batch, INPUT)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            layer.zero_grad()
            y = layer(x, seed=3)[0]
            y.square().sum().backward()
            found.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*found):
        torch.testing.assert_close(one, other)
    assert found[0][0].equal(found[1][0])


def test_derivatives_of_products_by_differences():
    """A gradient of a matrix, of x or of a state is not the slope; or a second one is wrong."""
    for cell in (products.shared, products.low_rank):
        fast, exact = (
            zo.Recurrent(cell, 2, 3, dtype=torch.float64, backend=backend)
            for backend in (None, "reference")
        )
        exact.load_state_dict(fast.state_dict())
        x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
        for layer, check in (
            (fast, torch.autograd.gradcheck),
            (exact, torch.autograd.gradgradcheck),
        ):
            names = [name for name, _ in layer.named_parameters()]

            def call(x: Tensor, *values: Tensor, layer: Any = layer, names: Any = names) -> Tensor:
                given = dict(zip(names, values))
                return torch.func.functional_call(layer, given, (x,))[0]

            assert check(call, (x, *layer.parameters()))


def test_convert_and_revert():
    """`convert` passes over a user's cell without a word, or `revert` calls it something that it
    is not.
    """
    model, said = torch.nn.Sequential(zo.Recurrent(four_states, 3, 4)), []
    zo.convert(model, zo.Zoneout(hidden=0.3, cell=0.2), report=said.append)
    assert model[0].noise == zo.Zoneout(hidden=0.3, cell=0.2)
    zo.revert(model, report=said.append)
    assert "torch.nn has no layer of the cell 'four_states'" in str(said)


def test_rates_of_a_call_by_the_names_of_states():
    """The rate of a third state can be given for one call under a name that users never see
    only.
    """
    layer = zo.Recurrent(counters, 1, 40, noise=zo.Zoneout(hidden=0.5, states={"b": 0.4}))
    x = torch.zeros(STEPS, BATCH, 1)
    by_name, by_stream = (
        layer(x, seed=1, rates={name: 1.0}, return_states=True)[2]["b"] for name in ("b", "state2")
    )
    assert by_name.equal(by_stream) and not by_name.any()


def test_autocast():
    """Under autocast a user's cell runs in another type than an LSTM, or fails."""
    layer, x = made()
    with torch.autocast("cpu", torch.bfloat16):
        y, (h, c) = layer(x, seed=3)
    assert y.dtype == h.dtype == c.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x, seed=3)[0], rtol=0.05, atol=0.05)


def test_forms_of_input():
    """batch_first, an unbatched input or one-hot ids give other numbers than the plain form."""
    layer, x = made()
    want, _ = layer(x, seed=3)
    layer.batch_first = True
    assert layer(x.transpose(0, 1), seed=3)[0].transpose(0, 1).equal(want)
    layer.batch_first = False
    alone, (h_alone, _) = layer(x[:, 2], seed=3, examples=2)
    torch.testing.assert_close(alone, want[:, 2])
    assert h_alone.shape == (1, HIDDEN)
    ids = torch.randint(INPUT, (STEPS, BATCH))
    torch.testing.assert_close(
        layer(ids, seed=3)[0], layer(torch.nn.functional.one_hot(ids, INPUT).float(), seed=3)[0]
    )


def test_initial_states_and_parameters():
    """Learned states have other names or shapes, or `reset_parameters` misses a parameter."""
    layer, x = made(four_states, learn_initial_state=True, bidirectional=True, num_layers=2)
    assert {"h0", "a0", "b0", "c0"} <= dict(layer.named_parameters()).keys()
    layer(x)[0].sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())
    peep, _ = made()
    assert list(peep.state_dict()) == [
        "weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "p_i_l0", "p_f_l0", "p_o_l0",
    ]  # fmt: skip
    for p in peep.parameters():
        p.data.fill_(7.0)
    peep.reset_parameters()
    assert all(p.abs().max() <= HIDDEN**-0.5 for p in peep.parameters())
    assert len(peep.all_weights[0]) == 7
    assert [*made(mingru, bias=False)[0].state_dict()] == ["weight_ih_l0"]


def test_a_gradient_against_numpy():
    """The whole chain, from the decorated function to the gradient of a parameter, against
    finite differences.
    """
    layer = zo.Recurrent(indrnn, 1, 3, dtype=torch.float64, bias=False)
    x = torch.randn(4, 1, 1, dtype=torch.float64)

    def loss(u: np.ndarray) -> float:
        h, total = np.zeros(3), 0.0
        for t in range(4):
            h = np.maximum(layer.weight_ih_l0.detach().numpy() @ x[t, 0].numpy() + u * h, 0.0)
            total += h.sum()
        return total

    layer(x)[0].sum().backward()
    u = layer.u_l0.detach().numpy()
    slopes = [(loss(u + d) - loss(u - d)) / 2e-6 for d in 1e-6 * np.eye(3)]
    np.testing.assert_allclose(layer.u_l0.grad.numpy(), slopes, rtol=1e-6, atol=1e-8)


# --- errors ---------------------------------------------------------------------------------------


def named(parameter: str) -> Definition:
    scope: dict[str, Any] = {}
    exec(f"def f(x, h, {parameter}): return x[0] + h * {parameter}", scope)
    return zo.cell(gates=1, recurrence="diagonal")(scope["f"])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: zo.Recurrent(lambda x, r, h: h, 3, 4),
            "cell: expected a definition made by zo.cell, got function",
        ),
        (
            lambda: zo.Recurrent("lstm", 3, 4),
            "cell: expected a definition made by zo.cell, got str",
        ),
        (
            lambda: zo.Recurrent(blocks, 3, 4),
            "hidden_size: expected a multiple of 3, the heads of the cell 'blocks'",
        ),
        (
            lambda: zo.Recurrent(slotted, 3, 4, proj_size=2),
            "proj_size: expected 0 for the cell 'slotted', which reads h",
        ),
        (
            lambda: zo.Recurrent(indrnn, 3, 4, norm="layer"),
            "norm: expected None for the cell 'indrnn'",
        ),
        (
            lambda: zo.Recurrent(peephole, 3, 4, zo.Zoneout(hidden=0.1)),
            "num_layers: expected a whole number",
        ),
        (
            lambda: zo.Recurrent(peephole, 3, 0),
            "hidden_size: expected a whole number of at least 1, got 0",
        ),
        (
            lambda: zo.Recurrent(peephole, 3, 4, dropout=2.0),
            "dropout: expected a rate between 0 and 1, got 2.0",
        ),
        (lambda: zo.Recurrent(indrnn, 3, 4, noise=zo.Zoneout(cell=0.1)), "indrnn has one state, h"),
        (lambda: zo.Recurrent(slstm, 3, 4, noise=zo.Zoneout(cell=0.1)), "at_eval"),
        (
            lambda: zo.Recurrent(named("bias_hh"), 3, 4),
            "cell: expected parameters whose names .* got 'bias_hh'",
        ),
        (
            lambda: zo.RecurrentCell(named("noise"), 3, 4),
            "cell: expected parameters whose names .* got 'noise'",
        ),
        (
            lambda: zo.Recurrent(slstm, 3, 4)(torch.ones(2, 1, 3), torch.ones(1, 1, 4)),
            r"a tuple of 4 tensors \(h, c, n, m\)",
        ),
        (
            lambda: zo.Recurrent(indrnn, 3, 4)(torch.ones(2, 1, 3), (torch.ones(1, 1, 4),)),
            "hx: expected a tensor",
        ),
    ],
)
def test_errors(make, sentence):
    """A mistake of the user's gets no sentence that says what to do."""
    with pytest.raises((TypeError, ValueError), match=sentence):
        make()


def test_dropout_of_one_layer_is_said():
    """As in torch.nn: a dropout that has no effect is silent."""
    with pytest.warns(UserWarning, match="dropout: 0.5 has no effect"):
        zo.Recurrent(peephole, 3, 4, dropout=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zo.Recurrent(peephole, 3, 4, 2, dropout=0.5)


def test_the_text_of_a_layer():
    """`repr` does not name the cell or an option."""
    layer = zo.Recurrent(
        peephole, 3, 4, 2, batch_first=True, noise=zo.Zoneout(hidden=0.1), backend="cpu"
    )
    text = (
        "Recurrent(peephole, 3, 4, num_layers=2, batch_first=True, noise=Zoneout(hidden=0.1), "
        "backend='cpu')"
    )
    assert repr(layer) == text
    assert (
        repr(zo.RecurrentCell(indrnn, 3, 4, bias=False))
        == "RecurrentCell(indrnn, 3, 4, bias=False)"
    )
    assert layer.definition is peephole and cells.lstm != peephole
