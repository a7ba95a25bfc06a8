"""The kernels of a GPU without one: on the CPU, thread by thread, against the reference."""

from __future__ import annotations

import emulator
import philox_numpy
import pytest
import torch
from philox_numpy import rates_on_the_edge
from test_backends import (
    CALLS,
    LAYERS,
    NOISES,
    NORMS,
    RAGGED,
    check_mixed_ends,
    check_rows_that_begin_alike,
    of_rows_that_begin_alike,
    outputs_of_rows_alike,
)
from test_cuda import compare, given_with, precision  # noqa: F401 (a fixture)
from test_readback import wire

import zoneout as zo
from zoneout.cells import CELLS
from zoneout.draws import Draw
from zoneout.ops import cuda
from zoneout.ops.cuda.pointwise.dropout import dropout as fused_dropout
from zoneout.ops.cuda.pointwise.dropout import random_bits
from zoneout.ops.cuda.pointwise.weight_noise import add_noise as fused_noise
from zoneout.ops.cuda.runtime.compiler import Chip
from zoneout.ops.dropout import dropout
from zoneout.ops.weight_noise import add_noise, weight_noise
from zoneout.streams import Rule

KERNELS = {
    "small": (cuda.small, "plain"),
    "small-layer-norm": (cuda.small, "layer-norm"),
    "batch-norm": (cuda.batch, "batch-norm"),
    "persistent": (cuda.persistent, "plain"),
    "steps": (cuda.steps, "plain"),
    "steps-layer-norm": (cuda.steps, "layer-norm"),
    "steps-batch-norm": (cuda.steps, "batch-norm"),
}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("rate", [0.3, 0.5])
def test_mixed_ends(rate):
    """The expectation of an infinite or a very large value is NaN or infinite on a GPU."""
    check_mixed_ends(rate, "cpu")


# What a call may have, together, in both types for the LSTM. Each call and each type once for the
# others, which share most of its code, and one for ReLU, which differs from tanh in one function.
CASES = [
    (name, call, noise, kind)
    for name in LAYERS
    for call, noise, own in (("whole", "zoneout-unit", "tf32"), ("all", "together", "bf16"))
    for kind in (("tf32", "bf16") if name == "lstm" and call == "all" else (own,))
    if name != "relu" or call == "all"
]


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize(("name", "call", "noise", "precision"), CASES, indirect=["precision"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_equals_the_reference(kernel, name, call, noise, precision, monkeypatch):  # noqa: F811
    """A kernel computes something else than the cells of the paper, or its threads wait for each
    other for ever.
    """
    path, norm = KERNELS[kernel]
    if name == "relu" and norm != "plain":
        pytest.skip("what is normalised lies on both sides of the corner")
    monkeypatch.setattr(cuda, "PATHS", (path,))
    given, sizes = given_with(norm, call)
    compare(name, NOISES[noise], given, True, precision, sizes, device="cpu", norm=NORMS[norm])


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize("precision", ["tf32"], indirect=True)
@pytest.mark.parametrize(
    ("kernel", "noise", "call", "options"),
    [
        ("small", "zoneout-unit", "lengths", {}),
        ("small", "zoneout-unit", "resets", {}),
        ("small", "zoneout-unit", "whole", {"bidirectional": True}),
        ("small", "variational", "whole", {}),
        ("small", "state-dropout", "whole", {}),
        ("small", "held-gate", "whole", {}),
        ("persistent", "zoneout-unit", "lengths", {}),
        ("persistent", "zoneout-unit", "whole", {"bidirectional": True}),
        ("batch-norm", "zoneout-unit", "lengths", {}),
        ("batch-norm", "zoneout-unit", "resets", {}),
        ("batch-norm", "held-gate", "whole", {}),
    ],
    ids=lambda value: "both directions" if value == {"bidirectional": True} else str(value or ""),
)
def test_compiled_for_one_thing(kernel, noise, call, options, precision, monkeypatch):  # noqa: F811
    """A kernel is compiled without something that its loop has."""
    path, norm = KERNELS[kernel]
    monkeypatch.setattr(cuda, "PATHS", (path,))
    given, sizes = given_with(norm, call)
    compare(
        "lstm",
        NOISES[noise],
        given,
        True,
        precision,
        sizes,
        device="cpu",
        cells=False,
        norm=NORMS[norm],
        **options,
    )


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize("precision", ["tf32"], indirect=True)
@pytest.mark.parametrize(
    ("path", "registers"),
    [
        (cuda.small, {"OTHER_REGISTERS": 225}),
        (cuda.persistent, {"ALL_RESIDENT": 0, "SOME_IN_SHARED": 36, "MOST_RESIDENT": 0}),
    ],
)
def test_weights_in_shared_memory(path, registers, precision, monkeypatch):  # noqa: F811
    """Weights that do not fit in registers are read from another place of shared memory than
    they are written to.
    """
    monkeypatch.setattr(cuda, "PATHS", (path,))
    for name, value in registers.items():
        monkeypatch.setattr(path, name, value)
    plans, plan = [], path.plan.__wrapped__  # which remembers nothing
    monkeypatch.setattr(path, "plan", lambda *given: plans.append(plan(*given)) or plans[-1])
    compare("lstm", NOISES["zoneout-unit"], {}, True, precision, device="cpu", cells=False)
    assert any(made.k_steps > getattr(made, "layout", made).resident for made in plans)


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize("precision", ["tf32"], indirect=True)
@pytest.mark.parametrize("kernel", ["small", "steps"])
def test_batch_norm_at_evaluation(kernel, precision, monkeypatch):  # noqa: F811
    """With the moments of training a unit has another one's, or rates are taken for chances to
    draw.
    """
    monkeypatch.setattr(cuda, "PATHS", (KERNELS[kernel][0],))
    noise, norm = NOISES["zoneout-unit"], NORMS["batch-norm"]
    compare("lstm", noise, {}, False, precision, device="cpu", cells=False, norm=norm)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("precision", ["tf32"], indirect=True)
@pytest.mark.parametrize("kernel", ["small", "small-layer-norm", "batch-norm", "persistent"])
def test_directions_go_side_by_side(kernel, precision, monkeypatch):  # noqa: F811
    """Both directions wait for each other on the chip, or what only one of them gives is lost on
    the way back.
    """
    path, norm = KERNELS[kernel]
    monkeypatch.setattr(cuda, "PATHS", (path, cuda.small))  # which has batch norm at evaluation
    if path is cuda.persistent:  # which is asked second whether there is room
        monkeypatch.setattr(cuda.small, "fits", lambda r, concurrent: False)
    layer = zo.LSTM(
        3,
        9,
        num_layers=2,
        bidirectional=True,
        noise=zo.Zoneout(cell=0.5, hidden=0.05),
        norm=NORMS[norm],
    )
    x = torch.randn(5, 20, 3, requires_grad=True)
    wanted = [x, *layer.parameters()]

    def found(of: slice | None):
        """What a loss of one direction's final state, or of all outputs, gives."""
        emulator.launched.clear()
        y, (h, _) = layer(x, seed=3)
        loss = y.square().sum() if of is None else h[of].square().sum()
        return [y, *torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)]

    # Of all outputs, of one direction, of the other; and of all at evaluation, where each has
    # statistics of its own.
    for of, training in ((None, True), (slice(2, 3), True), (slice(3, 4), True), (None, False)):
        layer.train(training)
        together = found(of)
        aside = [stream for stream in emulator.launched if stream is not None]
        assert aside == [1] * 4  # of two layers, there and back
        with monkeypatch.context() as patch:
            patch.setattr(cuda, "side_by_side", lambda runs: False)
            apart = found(of)
        assert all(stream is None for stream in emulator.launched)
        assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("precision", ["tf32"], indirect=True)
def test_both_directions_as_one_node(precision, monkeypatch):  # noqa: F811
    """A node of two runs takes several derivatives at once wrongly, or second ones, or weights
    changed in place.
    """
    monkeypatch.setattr(cuda, "PATHS", (cuda.small,))
    layer, x = zo.LSTM(3, 9, bidirectional=True), torch.randn(5, 4, 3, requires_grad=True)
    with torch.no_grad():
        want = layer(x)
    y, (h, c) = layer(x)
    assert torch.equal(y, want[0]) and torch.equal(h, want[1][0]) and torch.equal(c, want[1][1])
    several = torch.randn(3, *y.shape)
    (at_once,) = torch.autograd.grad(y, x, several, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(y, x, d, retain_graph=True)[0] for d in several]
    assert torch.allclose(at_once, torch.stack(one_by_one), rtol=1e-6, atol=1e-7)
    (want,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert torch.allclose(dx, want, rtol=1e-4, atol=1e-5) and dx.requires_grad
    with torch.no_grad():
        layer.weight_hh_l0_reverse.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize(
    ("sizes", "precision"),
    [((7, 40, 2, 22), "bf16"), ((3, 18, 2, 132), "tf32")],
    ids=["pairs", "two parts"],
    indirect=["precision"],
)
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_sizes_with_batch_norm(name, sizes, precision, monkeypatch):  # noqa: F811
    """Numbers that lie even are read together, or a block has two parts: one is forgotten or
    comes too late.
    """
    monkeypatch.setattr(cuda, "PATHS", (cuda.batch,))
    noise, norm = NOISES["zoneout-unit"], NORMS["batch-norm"]
    compare(name, noise, {}, True, precision, sizes, device="cpu", cells=False, norm=norm)


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize("precision", ["tf32"], indirect=True)
@pytest.mark.parametrize("hidden", [37, 131], ids=["one part", "two parts"])
def test_both_directions_with_batch_norm(hidden, precision, monkeypatch):  # noqa: F811
    """Rows that end, or begin anew, are taken into the moments of a reversed direction or of a
    second part.
    """
    monkeypatch.setattr(cuda, "PATHS", (cuda.batch,))
    given, (steps, batch, size, _) = given_with("batch-norm", "all")
    sizes, norm = (steps, batch, size, hidden), NORMS["batch-norm"]
    noise = NOISES["zoneout-unit"]
    compare(
        "lstm", noise, given, True, precision, sizes, False, "cpu", norm=norm, bidirectional=True
    )


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize("precision", ["tf32"], indirect=True)
@pytest.mark.parametrize("lengths", [None, [12] * 40 + [7] * 24], ids=["whole", "ragged"])
@pytest.mark.parametrize("path", [cuda.batch, cuda.steps], ids=["batch", "steps"])
def test_batch_norm_of_rows_that_begin_alike(path, lengths, precision, monkeypatch):  # noqa: F811
    """A derivative is what rounding leaves of sums over rows that should cancel."""
    want = of_rows_that_begin_alike("reference", "cpu", torch.float64, lengths)
    monkeypatch.setattr(cuda, "PATHS", (path,))
    got = of_rows_that_begin_alike("cpu", "cpu", precision[0], lengths)
    check_rows_that_begin_alike(got, want, 0.02)


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize(
    ("path", "precision"), [(cuda.batch, "tf32"), (cuda.steps, "exact")], indirect=["precision"]
)
@pytest.mark.parametrize("lengths", [None, RAGGED], ids=["whole", "ragged"])
def test_the_mean_of_rows_that_are_alike_is_that_row(path, lengths, precision, monkeypatch):  # noqa: F811
    """What is left of c less its mean grows a hundred times a step."""
    want = outputs_of_rows_alike("reference", "cpu", torch.float64, lengths)
    monkeypatch.setattr(cuda, "PATHS", (path,))
    got = outputs_of_rows_alike("cpu", "cpu", precision[0], lengths)
    assert (got - want).norm() <= precision[1] * want.norm()


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize("precision", ["bf16"], indirect=True)
def test_biases_of_rows_that_begin_alike(precision, monkeypatch):  # noqa: F811
    """In half types the derivatives of the gates are rounded before those of the biases are
    added up.
    """
    want = of_rows_that_begin_alike("reference", "cpu", torch.float64, None)
    monkeypatch.setattr(cuda, "PATHS", (cuda.batch,))
    got = of_rows_that_begin_alike("cpu", "cpu", precision[0], None)
    for name in ("norm_cell_l0", "norm_cell_shift_l0", "bias_ih_l0"):
        assert (got[name] - want[name]).norm() <= 0.3 * want[name].norm(), name


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize("precision", ["tf32", "bf16"], indirect=True)
@pytest.mark.parametrize(
    "path", [cuda.small, cuda.persistent, cuda.steps], ids=["small", "persistent", "steps"]
)
def test_directions_and_layers(path, precision, monkeypatch):  # noqa: F811
    """A reversed direction, a second layer or a learned state goes wrong."""
    monkeypatch.setattr(cuda, "PATHS", (path,))
    options = dict(num_layers=2, bidirectional=True, dropout=0.3, learn_initial_state=True)
    compare(
        "lstm", NOISES["zoneout-unit"], CALLS["packed"], True, precision, device="cpu", **options
    )


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize("precision", ["exact", "bf16"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"proj_size": 9}], ids=["plain", "projection"])
def test_steps(options, precision, monkeypatch):  # noqa: F811
    """A projection, or float32 without TF32, which goes step by step alone."""
    monkeypatch.setattr(cuda, "PATHS", (cuda.steps,))
    for noise, call in (("held-gate", "whole"), ("state-dropout", "all")):
        sizes = (7, 5, 3, 40 if options else 37)  # h of a projection cannot be read in fours, c can
        compare("lstm", NOISES[noise], CALLS[call], True, precision, sizes, device="cpu", **options)


@pytest.mark.usefixtures("emulated")
def test_a_carried_h_is_not_rounded(monkeypatch):
    """In half types h stays where it is: what a step adds to it is less than its last bit."""
    monkeypatch.setattr(cuda, "PATHS", (cuda.steps,))
    layer = zo.GRU(1, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.bias_ih_l0[4:8], layer.bias_ih_l0[8:] = 6, 2
    _, h = layer(
        torch.zeros(50, 1, 1, dtype=torch.bfloat16),
        torch.full((1, 1, 4), 0.5, dtype=torch.bfloat16),
    )
    z, n = torch.sigmoid(torch.tensor(6.0)), torch.tanh(torch.tensor(2.0))
    torch.testing.assert_close(
        h.float(), (n + (0.5 - n) * z**50).expand(1, 1, 4), rtol=0.01, atol=0
    )


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize("precision", ["tf32"], indirect=True)
@pytest.mark.parametrize("path", [cuda.small, cuda.persistent], ids=["small", "persistent"])
def test_older_gpus_take_all_steps_at_once(path, precision, monkeypatch):  # noqa: F811
    """A GPU of compute capability 8 gets none of the kernels that it can run."""
    monkeypatch.setattr(cuda, "PATHS", (path,))
    monkeypatch.setattr(path, "chip", lambda device: Chip(132, 232448, 8))
    compare("lstm", NOISES["zoneout-unit"], {}, True, precision, device="cpu", cells=False)


def test_all_shared_memory_may_be_used():
    """Batch norm's cluster is given up where it just fits, or launched where a byte is missing."""
    how = (CELLS["lstm"], 2, 100, 20, True, False)
    made = cuda.batch.plan(*how, 2**20)
    assert (
        cuda.batch.plan(*how, made.shared) == made
        and cuda.batch.plan(*how, made.shared - 1) is None
    )


@pytest.mark.usefixtures("emulated", "poisoned")
@pytest.mark.parametrize("precision", ["bf16"], indirect=True)
def test_no_room_for_a_cluster(precision, monkeypatch):  # noqa: F811
    """A GPU on which batch norm's cluster does not fit gets an error instead of the kernels step
    by step.
    """
    monkeypatch.setattr(emulator.Kernel, "fits", lambda *_: False)
    monkeypatch.setattr(cuda, "PATHS", (cuda.batch, cuda.steps))
    given, sizes = given_with("batch-norm", "whole")
    compare(
        "lstm",
        NOISES["zoneout-unit"],
        given,
        True,
        precision,
        sizes,
        device="cpu",
        norm=NORMS["batch-norm"],
    )


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_before_the_loop(dtype):
    """Dropout or noise on weights draws other numbers in a kernel than elsewhere, or scales by a
    rate not drawn.
    """
    x, w, rows = (
        torch.randn(3, 5, 37).to(dtype),
        torch.randn(37, 21).to(dtype),
        torch.tensor([4, 1, 9, 0, 7]),
    )
    seed, rate = torch.tensor(3), torch.tensor(0.4, dtype=torch.float64)
    for mask in ("unit", "sequence", "step", "shared"):
        draw = Draw(Rule("hidden", "added", mask, "expectation"), rate, seed, 2)
        bits = random_bits(draw, rows, 4, 3, 37)
        want = philox_numpy.bits("hidden", mask, 3, range(4, 7), rows.numpy(), 37, layer=1)
        assert torch.equal(bits, torch.from_numpy(want.astype("int32")))
    for mask in ("unit", "sequence"):
        rule = Rule("dropout", "scaled zero", mask, "expectation")
        dropped = fused_dropout(x, Draw(rule, rate, seed, 1), rows, 2)
        torch.testing.assert_close(dropped, dropout(x, 0.4, seed, 1, rows, 2, mask=mask))
        ones = torch.ones(8, 20, 100, dtype=dtype)
        high = torch.tensor(0.999, dtype=torch.float64)  # as drawn, 65470 / 65536
        dropped = fused_dropout(ones, Draw(rule, high, seed, 1), torch.arange(20), 0)
        assert dropped.unique().tolist() == [0, torch.tensor(65536 / 66).to(dtype)]
        rates, kept = rates_on_the_edge("dropout", mask, 3, 100)
        edge = fused_dropout(
            ones,
            Draw(rule, torch.tensor(rates, dtype=torch.float64), seed, 65536),
            torch.arange(20),
            0,
        )
        assert (edge[0, 0] == 0).tolist() == kept
        assert not fused_dropout(
            ones, Draw(rule, torch.ones_like(high), seed, 1), torch.arange(20), 0
        ).any()
    torch.testing.assert_close(fused_noise(w, rate, seed, 0, 4), weight_noise(w, 0.4, seed, 4))
    draw = Draw(Rule("weight_noise", "sum", "sequence", "expectation"), rate, seed, 4)
    for matrix in (
        15707670,
        15873843,
    ):  # whose first words are 39 and 2³² - 24: the ends of the distribution
        zero = torch.zeros(1, dtype=dtype)
        got, want = fused_noise(zero, rate, seed, matrix, 4), add_noise(zero, draw, matrix)
        torch.testing.assert_close(got, want, rtol=1e-5 if dtype == torch.float32 else 0.01, atol=0)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("precision", ["tf32"], indirect=True)
def test_rates_are_rounded(precision, monkeypatch):  # noqa: F811
    """The kernels compare their bits with something else than round(rate · 65536): truncated,
    say.
    """
    monkeypatch.setattr(cuda, "PATHS", (cuda.small,))  # all have the same lines for it
    units, seed = 9, 2**40 + 7
    rates, kept = {}, {}
    for stream in ("cell", "hidden"):
        rates[stream], kept[stream] = rates_on_the_edge(stream, "unit", seed, units)
    layer = zo.LSTM(units, units)
    wire(layer)
    x = 0.5 + torch.rand(2, 1, units)

    def read(**noise):
        """Which units of the first step keep their old value, which is 0."""
        layer.noise = zo.Zoneout(**noise)
        y, _, cells = layer(x, seed=seed, return_cells=True)
        return {"cell": (cells[0, 0] == 0).tolist(), "hidden": (y[0, 0] == 0).tolist()}

    assert (
        read(**{stream: torch.tensor(rate, dtype=torch.float64) for stream, rate in rates.items()})
        == kept
    )
    for unit in (0, 1):  # the same rate for all units
        found = read(**{stream: rate[unit] for stream, rate in rates.items()})
        assert all(found[stream][unit] == kept[stream][unit] for stream in rates)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("exponent", [-60, 40])
def test_derivatives_of_any_size_with_batch_norm(exponent, monkeypatch):
    """In TF32 derivatives go around in half precision: a power of two is not undone, or they are
    cut off.
    """
    monkeypatch.setattr(cuda, "PATHS", (cuda.batch,))
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "tf32")
    torch.manual_seed(0)
    layer = zo.LSTM(2, 20, norm=NORMS["batch-norm"])
    x, dy = torch.randn(7, 18, 2), torch.randn(7, 18, 20)
    found = []
    for by in (1.0, 2.0**exponent):
        y = layer(x, seed=1)[0]
        found.append([d / by for d in torch.autograd.grad(y, [*layer.parameters()], dy * by)])
    for one, other in zip(*found):
        assert torch.equal(one, other)
