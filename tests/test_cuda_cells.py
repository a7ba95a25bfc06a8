"""Kernels of any cell against the reference in float64: in the emulator, and on a GPU.

Ten random cells have 1 to 8 gates and 1 to 4 states between them, with every mark and every noise.
"""

from __future__ import annotations

import random
from typing import Any

import emulator
import products
import pytest
import torch
from test_backends import CALLS, INPUT
from test_cuda import PRECISIONS, far, to_gpu
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import zoneout as zo
from zoneout.cells import lstm
from zoneout.definition import Definition
from zoneout.definition.graph import Graph
from zoneout.ops import cuda, reference
from zoneout.ops.cuda.kernels import cell_steps, diagonal, persistent_cell, small_cell

DEVICES = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """The device of the layer: the CPU, which then runs what a GPU would, or a GPU."""
    if request.param == "cuda":
        return "cuda"
    request.getfixturevalue("emulated")
    return "cpu"


SMOOTH = ["exp", "log", "div", "sqrt", "neg"]
CORNERED = ["where", "maximum", "minimum", "abs", "relu"]  # rounding may take a number over these


def random_cell(
    seed: int, gates: int, states: int, recurrence: str, smooth: bool = False
) -> Definition:
    """A cell whose values stay small, with all marks but `shown` and some of the operations."""
    pick = random.Random(seed)
    graph, has_r = Graph(), recurrence in ("dense", "blocks")
    add, names = graph.add, [f"s{k}" for k in range(states)]
    parameters = [f"p{k}" for k in range(pick.randint(1, 3))]
    old = [add("state", value=name) for name in names]
    pool = [*old, *(add("parameter", value=name) for name in parameters)]
    merged, values = pick.random() < 0.5, []
    for q in range(gates):
        value = add("x", value=str(q))
        if has_r:
            r = add("r", value=str(q))
            value = add("add", value, r if merged else add("mul", pick.choice(pool), r))
        values.append(add(pick.choice(("sigmoid", "tanh", "softplus", "sigmoid")), value))
    if seed % 2:
        values[-1] = add("held", values[-1])
    pool += values
    for op in pick.sample(SMOOTH if smooth else SMOOTH + CORNERED, 3):
        a, b, half = pick.choice(pool), add("tanh", pick.choice(pool)), graph.number(0.5)
        positive = add("add", add("abs", b), graph.number(1.0))
        made = {
            "exp": add("exp", b),
            "log": add("log", positive),
            "div": add("div", a, positive),
            "where": add("where", add("gt", a, half), b, a),
            "maximum": add("maximum", b, half),
            "minimum": add("minimum", a, b),
            "abs": add("abs", a),
            "sqrt": add("sqrt", positive),
            "relu": add("relu", a),
            "neg": add("neg", b),
        }
        pool.append(made[op])
    pool.append(add("update", add("mul", pick.choice(values), pick.choice(pool))))
    outputs = []
    for name in names:
        total = add("add", pool[-1], add("mul", graph.number(0.5), pick.choice(old)))
        for value in values:
            term = add("mul", value, pick.choice(pool))
            total = add("add", add("mul", total, graph.number(0.7)), term)
        for name_of in parameters:  # every one counts
            scaled = add("mul", add("parameter", value=name_of), pick.choice(old))
            total = add("add", total, scaled)
        outputs.append(add("candidate", add("tanh", total), value=name))
        pool.append(outputs[-1])
    groups = [(name,) for name in names]
    if states == 4:  # two states with one mask
        groups = [(names[0],), (names[1],), (names[2], names[3])]
    made = Definition(
        graph, outputs, gates=gates, groups=groups, parameters=parameters, recurrence=recurrence,
        heads=3 if recurrence == "blocks" else 1, bounded=False, name=f"random{seed}",
    )  # fmt: skip
    return Definition.from_text(made.text, made.name)


def fitting_cell(seed: int, *sizes: Any) -> Definition:
    """The first random cell from a seed on that stores no more than a loop has room for."""
    found = (random_cell(seed + 10 * n, *sizes) for n in range(100))
    return next(cell for cell in found if cell.storage.fits)


# gates, states, recurrence, hidden size (odd ones are read one unit at a time)
SIZES = [
    (1, 1, "dense", 37),
    (2, 2, "dense", 12),
    (3, 3, "blocks", 12),
    (4, 4, "dense", 9),
    (6, 2, "dense", 8),
    (8, 4, "blocks", 15),
    (1, 1, "diagonal", 70),
    (2, 3, "none", 9),
    (5, 4, "diagonal", 37),
    (8, 2, "none", 12),
    (2, 2, "diagonal", 64),  # no thread is without a unit
]


def noises(cell: Definition, kind: str) -> Any:
    """A noise of every stream of a cell."""
    names = dict(zip(("hidden", "cell"), (0.3, 0.5)[: len(cell.groups)]))
    more = {group[0]: 0.4 for group in cell.groups[2:]}
    states: dict[str, Any] = {**names, **({"states": more} if more else {})}
    if len(cell.groups) < len(cell.states):  # a mask of several states has no expectation
        states["at_eval"] = "sample"
    variational = [zo.VariationalDropout(input=0.1, hidden=0.3)] if cell.has_r else []
    holds = "held" in cell.marks
    return {
        "zoneout": lambda: zo.Zoneout(**states),
        "shared": lambda: zo.Zoneout(**states, mask="shared"),
        "sequence": lambda: [zo.Zoneout(**states, mask="sequence"), *variational],
        "static": lambda: zo.Zoneout(**states, mask="static", seed=3),
        "step": lambda: zo.StateDropout(**states, mask="step"),
        "all": lambda: [
            zo.StateDropout(**states),
            zo.RecurrentDropout(rate=0.4, hold_output_gate=holds),
            *variational,
        ],
        "both": lambda: [zo.Zoneout(**states), zo.RecurrentDropout(rate=0.4), *variational],
    }[kind]()


CASES = [
    # seed of the cell and place in SIZES, noise, call, precision, training, options
    (0, "all", "all", "exact", True, {"learn_initial_state": True}),
    (1, "zoneout", "whole", "bf16", True, {"bidirectional": True}),
    (2, "both", "lengths", "exact", True, {"bidirectional": True, "seen": True}),
    (3, "all", "resets", "tf32", True, {"learn_initial_state": True, "seen": True}),
    (4, "shared", "packed", "exact", True, {"bidirectional": True, "seen": True}),
    (5, "sequence", "all", "bf16", True, {}),
    (6, "zoneout", "whole", "exact", True, {"bidirectional": True, "num_layers": 2}),
    (7, "all", "all", "exact", True, {"bidirectional": True, "seen": True}),
    (8, "static", "resets", "bf16", True, {"learn_initial_state": True, "seen": True}),
    (9, "both", "lengths", "exact", False, {}),
    (10, "both", "resets", "bf16", True, {"bidirectional": True}),
    # with all steps in one launch, which takes no exact float32
    (0, "all", "all", "bf16", True, {"learn_initial_state": True}),
    (1, "zoneout", "whole", "tf32", True, {"bidirectional": True, "seen": True}),
    (3, "all", "resets", "bf16", True, {"learn_initial_state": True, "seen": True}),
    (4, "both", "packed", "tf32", True, {"bidirectional": True}),
    (4, "both", "lengths", "bf16", True, {"seen": True}),
    (2, "zoneout", "lengths", "tf32", True, {}),
    (5, "all", "all", "bf16", True, {"learn_initial_state": True}),
]
AT_ONCE = CASES[len(SIZES) :]
CASES = [
    *((cell_steps if SIZES[case[0]][2] in ("dense", "blocks") else diagonal, *case)
      for case in CASES[: len(SIZES)]),
    *((path, *case) for path in (small_cell, persistent_cell) for case in AT_ONCE),
]  # fmt: skip


def values(
    layer: Any, x: torch.Tensor, states: list[torch.Tensor], call: dict[str, Any], seen: bool
) -> Any:
    """Outputs, states and every gradient of a call, by name."""
    x = x.clone().requires_grad_()
    states = [s.clone().requires_grad_() for s in states]
    call = dict(call)
    lengths = call.pop("packed", None)
    given: Any = x
    if lengths is not None:
        given = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    hx = tuple(states) if len(states) > 1 else states[0]
    y, ended, *every = layer(given, hx, seed=5, return_states=seen, **call)
    out = {"y": y, **(every[0] if every else {})}
    out |= {f"end {k}": s for k, s in enumerate(ended if len(states) > 1 else [ended])}
    out = {name: v.data if isinstance(v, PackedSequence) else v for name, v in out.items()}
    weights = torch.Generator().manual_seed(1)
    loss = sum(
        (v * torch.randn(v.shape, generator=weights, dtype=torch.float64).to(v)).sum()
        for v in out.values()
    )
    layer.zero_grad()
    loss.backward()
    grads = {"x": x.grad} | {f"state {k}": s.grad for k, s in enumerate(states)}
    grads |= {name: p.grad for name, p in layer.named_parameters()}
    return out | {f"of {name}": grad for name, grad in grads.items()}


def compare(
    cell, noise, call, precision, training, hidden, device, seen=False, above_zero=False, **options
) -> None:
    """One layer on the device and its twin in the reference, in float64 with the same seed.

    `above_zero`: the states before the first step are, as a cell needs that divides by one.
    """
    dtype, _, tolerance = PRECISIONS[precision]
    ours = zo.Recurrent(cell, INPUT, hidden, noise=noise, dtype=dtype, backend=device, **options)
    theirs = zo.Recurrent(
        cell, INPUT, hidden, noise=noise, dtype=torch.float64, backend="reference", **options
    )
    with torch.no_grad():  # every parameter of a unit differs from its neighbour's
        for p in ours.parameters():
            p.copy_(torch.rand_like(p) - 0.5 if p.dim() == 1 else p)
    theirs.load_state_dict({key: value.double() for key, value in ours.state_dict().items()})
    ours.train(training), theirs.train(training)
    count = len(ours.suffixes())
    x = torch.randn(7, 5, INPUT).to(dtype)
    states = [torch.randn(count, 5, hidden).to(dtype) for _ in cell.states]
    if above_zero:
        states = [state.abs() + 0.5 for state in states]
    want = values(theirs, x.double(), [s.double() for s in states], call, seen)
    if device == "cuda":
        call = {key: to_gpu(value) for key, value in call.items()}
    got = values(ours.to(device), x.to(device), [s.to(device) for s in states], call, seen)
    assert want.keys() == got.keys()
    wrong = {
        key: error
        for key, value in want.items()
        if not (error := far(got[key], value)) <= tolerance
    }
    assert not wrong, wrong


@pytest.fixture
def launched(monkeypatch):
    """The paths that have run a loop."""
    found: list[Any] = []
    for path in (cell_steps, diagonal, persistent_cell, small_cell):
        whole = path.ready

        def ready(*given, path=path, whole=whole):
            made = whole(*given)
            found.extend([path] if made is not None else [])
            return made

        monkeypatch.setattr(path, "ready", ready)
    return found


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("path", "number", "noise", "call", "precision", "training", "options"),
    CASES,
    ids=lambda value: getattr(value, "__name__", str(value)).split(".")[-1],
)
def test_random_cells(
    path, number, noise, call, precision, training, options, device, launched, monkeypatch
):
    """A generated step, its derivative, its masks or what lies around it is wrong."""
    gates, states, recurrence, hidden = SIZES[number]
    cell = fitting_cell(number, gates, states, recurrence, precision != "exact")
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", PRECISIONS[precision][1])
    monkeypatch.setattr(cuda, "GENERATED_PATHS", (path,))
    if number > 6:  # more steps than loads are issued ahead
        monkeypatch.setattr(diagonal, "AHEAD", 4)
    compare(cell, noises(cell, noise), CALLS[call], precision, training, hidden, device, **options)
    assert launched and set(launched) == {path}


@zo.cell(gates=2, recurrence="none", bounded=True)
def low_rank(x, h, a, b, u, p):
    """One product after two others of which one is of two matrices; a matrix is used twice."""
    z = (x[0] + zo.product(a, zo.product(b, h, rank=5))).sigmoid()
    n = zo.product(u, z * h)
    g = (x[1] + p * n + zo.product(u, n.tanh())).tanh()
    return z * h + zo.update((1 - z) * g)


@zo.cell(gates=3, states=("h", "c"))
def both_products(x, r, h, c, u, w):
    """A matrix for h in the gates, and products of the new c and of h."""
    i, f = (x[0] + r[0]).sigmoid(), (x[1] * r[1]).tanh()
    new = zo.candidate("c", 0.5 * c + zo.update(i * (x[2] + r[2] + zo.product(w, c)).tanh()))
    s, t = zo.product(u, new * h, parts=2)
    return zo.held((f + s).sigmoid()) * (new + t).tanh(), new


PRODUCTS = [
    (zo.cells.mgu, 12, "zoneout", "all", "exact", {"bidirectional": True}),
    (zo.cells.mgu, 37, "both", "lengths", "bf16", {"bidirectional": True}),
    (low_rank, 37, "both", "packed", "exact", {"bidirectional": True, "num_layers": 2}),
    (low_rank, 40, "sequence", "resets", "tf32", {"learn_initial_state": True}),
    (both_products, 9, "all", "all", "exact", {"learn_initial_state": True, "seen": True}),
    (both_products, 36, "both", "resets", "exact", {"bidirectional": True, "seen": True}),
    (both_products, 36, "zoneout", "lengths", "bf16", {"bidirectional": True}),
    (zo.cells.mogrifier_lstm, 20, "all", "lengths", "exact", {"bidirectional": True}),
    (zo.cells.mogrifier_lstm, 24, "zoneout", "all", "bf16", {"learn_initial_state": True}),
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("path", [cell_steps, small_cell], ids=["cell_steps", "small_cell"])
@pytest.mark.parametrize(
    ("cell", "hidden", "noise", "call", "precision", "options"),
    PRODUCTS,
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_products_inside_the_step(
    cell, hidden, noise, call, precision, options, path, device, launched, monkeypatch
):
    """A product is taken of other numbers, at another level, of another row; or its gradient."""
    if path is small_cell and precision == "exact":  # all steps in one launch take no exact float32
        precision = "tf32"
        if device == "cpu" and "bidirectional" in options:
            pytest.skip("the emulator takes long, and half types have both directions too")
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", PRECISIONS[precision][1])
    monkeypatch.setattr(cuda, "GENERATED_PATHS", (path,))
    given = noises(cell, noise)
    compare(cell, given, CALLS[call], precision, True, hidden, device, **options)
    assert launched and set(launched) == {path}


@zo.cell(gates=4, states=("h", "c"))
def peephole(x, r, h, c, p_i, p_f, p_o):
    i, f, g, o = (a + b for a, b in zip(x, r))
    kept = (f + p_f * c).sigmoid() * c
    new = zo.candidate("c", kept + zo.update((i + p_i * c).sigmoid() * g.tanh()))
    return (o + p_o * new).sigmoid() * new.tanh(), new


@zo.cell(gates=2, bounded=True)
def light_gru(x, r, h):
    z = (x[0] + r[0]).sigmoid()
    return z * h + (1 - z) * (x[1] + r[1]).tanh()


@zo.cell(gates=2, recurrence="none")
def min_gru(x, h):
    z = x[0].sigmoid()
    return (1 - z) * h + z * x[1]


@zo.cell(gates=1, recurrence="diagonal")
def ind_rnn(x, h, u):
    return (x[0] + u * h).relu()


OF_PAPERS = [*zo.cells.PUBLISHED.values(), products.authors_gru, products.lem, products.cornn]


def default_path(cell: Definition) -> Any:
    """The path that a small layer of a cell takes."""
    return small_cell if cell.has_r or cell.products else diagonal


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("cell", OF_PAPERS, ids=lambda cell: cell.name)
def test_published_cells(cell, device, launched, monkeypatch):
    """A published cell is wrong, or takes a slower path than it could."""
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "tf32")
    call = CALLS["whole" if cell == zo.cells.slstm else "all"]
    both = "update" in cell.marks and cell != zo.cells.slstm
    noise = noises(cell, "both" if both else "zoneout")
    compare(cell, noise, call, "tf32", True, 12, device, above_zero=cell == zo.cells.slstm)
    assert launched and set(launched) == {default_path(cell)}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("cell", [peephole, light_gru], ids=lambda cell: cell.name)
def test_exchange_in_half_precision(cell, device, launched, monkeypatch):
    """What goes around in half precision, and the factors of its gradients, are of other units."""
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "tf32")
    monkeypatch.setattr(cuda, "GENERATED_PATHS", (persistent_cell,))
    compare(cell, noises(cell, "zoneout"), CALLS["lengths"], "tf32", True, 37, device)
    assert set(launched) == {persistent_cell}


@pytest.mark.parametrize("cell", [peephole, min_gru, ind_rnn], ids=lambda cell: cell.name)
def test_a_nan_stays_in_its_row(cell, device):
    """A value that is not finite reaches a unit that keeps its value, or another row."""
    layer = zo.Recurrent(cell, 3, 9, noise=zo.Zoneout(hidden=1.0), backend=device, device=device)
    x = torch.randn(5, 4, 3, device=device)
    x[2, 1] = float("nan")
    start = torch.randn(1, 4, 9, device=device)
    hx = start if len(cell.states) == 1 else (start, torch.zeros_like(start))
    y, _ = layer(x, hx, seed=1)
    assert torch.equal(y, start.expand_as(y))  # all units keep h
    layer.noise = None
    y, _ = layer(x, hx, seed=1)
    assert y[:, [0, 2, 3]].isfinite().all() and y[:2].isfinite().all() and y[2:, 1].isnan().all()


def test_equal_graphs_have_the_same_kernels(device, launched):
    """A cell is known by its name: a built-in equation under another name loses its kernels."""
    same = Definition.from_text(lstm.text, "mine")
    layer = zo.Recurrent(same, 3, 9, backend=device, device=device)
    layer(torch.randn(2, 4, 3, device=device))
    assert not launched


def test_directions_go_side_by_side(device, launched, monkeypatch):
    """Both directions of a cell without a matrix wait for each other, or mix their results."""
    layer = zo.Recurrent(ind_rnn, 3, 9, bidirectional=True, backend=device, device=device)
    x = torch.randn(5, 4, 3, device=device)

    def found():
        y, _ = layer(x, seed=3)
        return [y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))]

    emulator.launched.clear()
    together = found()
    assert device == "cuda" or emulator.launched.count(1) == 2  # the second one, in both passes
    monkeypatch.setattr(cuda, "side_by_side", lambda runs: False)
    assert all(torch.equal(a, b) for a, b in zip(together, found(), strict=True))
    assert set(launched) == {diagonal}


@zo.cell(gates=1, states=("h", "c"))
def with_shown(x, r, h, c):
    new = zo.candidate("c", 0.5 * c + (x[0] + r[0]).tanh())
    return zo.shown(new).tanh(), new


@pytest.mark.parametrize("options", [{"norm": "layer"}, {"proj_size": 4}], ids=str)
def test_what_has_no_kernels_runs_in_the_reference(options, device, launched):
    """A norm or a projection of such a cell fails, or is left out."""
    x = torch.randn(5, 4, 3, device=device)
    with pytest.raises(
        ValueError, match=r"backend: 'cuda' has no kernels for the cell 'with_shown'"
    ):
        cuda.check(_run_of(with_shown, x, options))
    layer = zo.Recurrent(with_shown, 3, 9, device=device, **options)
    theirs = zo.Recurrent(with_shown, 3, 9, device=device, backend="reference", **options)
    theirs.load_state_dict(layer.state_dict())
    with pytest.warns(UserWarning, match=r"no kernels .* with a norm, a projection"):
        cuda._warn_slow.cache_clear()
        y, _ = layer(x, seed=1)
    torch.testing.assert_close(y, theirs(x, seed=1)[0])
    assert not launched


def _run_of(cell, x, options):
    """The run that a layer asks a backend for."""
    found: list[Any] = []
    layer = zo.Recurrent(cell, 3, 9, device=x.device, backend="reference", **options)
    whole = reference.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "run", lambda r: found.append(r) or whole(r))
        layer(x, seed=1)
    return found[0]
