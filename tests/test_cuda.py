"""The kernels of a GPU against the reference in float64, each way of running them; and how they
live in torch.

The errors allowed are relative: 1e-5 in float32 with TF32 off, 1e-3 with it on, 1e-2 in half types.
"""

import copy
from typing import Any

import pytest
import torch
from test_backends import (
    CALLS,
    CASES,
    INPUT,
    LAYERS,
    NOISES,
    NORMS,
    RAGGED,
    STATES,
    check_rows_that_begin_alike,
    everything,
    of_rows_that_begin_alike,
    outputs_of_rows_alike,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import zoneout as zo
from zoneout.ops import cuda, reference
from zoneout.ops.weight_noise import weight_noise
from zoneout.paper.training.processes import products_in

pytestmark = pytest.mark.gpu

PRECISIONS = {
    "exact": (torch.float32, "ieee", 1e-5),
    "tf32": (torch.float32, "tf32", 1e-3),
    "bf16": (torch.bfloat16, "ieee", 1e-2),
    "fp16": (torch.float16, "ieee", 1e-2),
}
PATHS = {"small": (cuda.batch, cuda.small), "persistent": (cuda.persistent,), "steps": ()}


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """One way of running the loop at a time; what it cannot take goes step by step."""
    monkeypatch.setattr(cuda, "PATHS", (*PATHS[request.param], cuda.steps))
    return request.param


@pytest.fixture
def precision(request, monkeypatch):
    """A type, torch's setting for its products, and how far off it may be."""
    dtype, setting, tolerance = PRECISIONS[request.param]
    before = torch.backends.cudnn.rnn.fp32_precision
    torch.backends.cudnn.rnn.fp32_precision = setting
    yield dtype, tolerance
    torch.backends.cudnn.rnn.fp32_precision = before


every_precision = pytest.mark.parametrize("precision", PRECISIONS, indirect=True)
exact_and_half = pytest.mark.parametrize("precision", ["exact", "bf16"], indirect=True)


def to_gpu(value: Any) -> Any:
    return value.cuda() if isinstance(value, torch.Tensor) else value


def compare(
    name,
    make,
    call,
    training,
    precision,
    sizes=(7, 5, INPUT, 37),
    cells=True,
    device="cuda",
    **options,
):
    """One layer on the GPU and its twin in the reference, the same numbers in float64, same
    seed.
    """
    dtype, tolerance = precision
    steps, batch, input, hidden = sizes
    torch.manual_seed(0)
    ours = LAYERS[name](
        input, hidden, noise=make(STATES[name]), dtype=dtype, backend=device, **options
    )
    if device == "cpu":  # scales that are all alike would hide that a unit has another one's
        some = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for key, p in ours.named_parameters():
                if key.startswith("norm_"):
                    p.sub_(0.05 * torch.rand(p.shape, generator=some).to(dtype))
    theirs = LAYERS[name](
        input, hidden, noise=make(STATES[name]), dtype=torch.float64, backend="reference", **options
    )
    theirs.load_state_dict({key: value.double() for key, value in ours.state_dict().items()})
    ours.train(training), theirs.train(training)
    count = len(ours.suffixes())
    x, h = (
        torch.randn(steps, batch, input).to(dtype),
        torch.randn(count, batch, ours.output_size).to(dtype),
    )
    if name == "relu" and tolerance > 1e-5:
        # A number that rounding takes over zero opens or shuts its whole way back: stay away from
        # the corner. In exact float32 the same cases are run on both sides of it.
        x, h = x.abs(), h.abs()
        with torch.no_grad():
            for key, p in ours.named_parameters():
                p.abs_().div_(hidden**0.5 if key.startswith("weight_hh") else 1)
        theirs.load_state_dict({key: value.double() for key, value in ours.state_dict().items()})
    c = torch.randn(count, batch, hidden).to(dtype)
    ours = ours.to(device)
    want = everything(
        theirs, x.double(), (h.double(), c.double()) if name == "lstm" else h.double(), call, cells
    )
    call = {key: to_gpu(value) if device == "cuda" else value for key, value in call.items()}
    there = x.to(device), (h.to(device), c.to(device)) if name == "lstm" else h.to(device)
    got = everything(ours, *there, call, cells)
    assert want.keys() == got.keys()
    errors = {key: far(got[key], value) for key, value in want.items()}
    if any(not error <= tolerance for error in errors.values()):
        # Where rounding is magnified (a norm over few numbers) torch's own calls in the same type
        # are as far off: twice that has to do. Which gradient it hits is chance (a last bit can
        # make it 0.5 or 1.2 % of dx, docs/log.md), so theirs are taken together.
        ours.backend = "reference"
        products = "tf32" if precision[1] == PRECISIONS["tf32"][2] else "fp32"
        with products_in(products, torch.device(device)), pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "_HALF", ())  # in the type itself, not in float32
            theirs_in_type = everything(ours, *there, call, cells)
        rounding = {key: far(theirs_in_type[key], value) for key, value in want.items()}
        gradients = [error for key, error in rounding.items() if key.startswith("of ")]
        together = (sum(error**2 for error in gradients) / len(gradients)) ** 0.5
        for key, error in errors.items():
            allowed = max(
                tolerance, 2 * rounding[key], 2 * together if key.startswith("of ") else 0
            )
            assert error <= allowed, f"{key}: {error:.1e} from the reference, allowed {allowed:.1e}"


def far(value, want):
    """How far from the truth, relative to it."""
    want = want.detach().double()
    return float((value.detach().double().cpu() - want).norm() / want.norm().clamp(min=1e-30))


@exact_and_half
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("name", "noise"), CASES)
def test_equals_the_reference(path, poisoned, name, noise, call, precision):
    """A kernel computes something else than the cells of the paper, or reads what nobody wrote."""
    for training in (True, False):
        compare(name, NOISES[noise], CALLS[call], training, precision)


@pytest.mark.parametrize("precision", ["tf32", "fp16"], indirect=True)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", LAYERS)
def test_other_types(path, name, call, precision):
    """TF32 or half precision has a mistake of its own."""
    for noise in ("zoneout-unit", "variational", "state-dropout"):
        compare(name, NOISES[noise], CALLS[call], True, precision)


@pytest.mark.parametrize("precision", ["exact", "tf32", "bf16"], indirect=True)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("norm", ["layer-norm", "batch-norm"])
@pytest.mark.parametrize(
    ("name", "noise"),
    [
        (name, noise)
        for name in LAYERS
        for noise in ("none", "zoneout-unit", "zoneout-step", "held-gate", "together")
        if noise != "held-gate" or name == "lstm"
    ],
)
def test_norms(path, poisoned, name, noise, norm, call, precision):
    """A norm takes its moments over the wrong numbers, or its way back misses a term."""
    if name == "relu" and precision[1] > 1e-5:
        pytest.skip(
            "what is normalised lies on both sides of the corner; test_sizes has ReLU in these "
            "types"
        )
    given, sizes = given_with(norm, call)
    for training in (True, False):
        compare(name, NOISES[noise], given, training, precision, sizes, norm=NORMS[norm])


def given_with(norm, call):
    """What a layer is called with, and its sizes: for batch norm four of each example, most of them
    to the end.

    The moments of three or four examples magnify rounding ten times: inputs and weights that are
        off by half a rounding
    of bf16 move gradients by up to 5 %, with four times as many by 0.5 %.
    """
    given, batch = dict(CALLS[call]), 5
    if norm != "batch-norm":
        return given, (7, batch, INPUT, 37)
    for key, value in given.items():
        if key in ("lengths", "packed"):
            given[key] = 4 * [7, 6, 7, 0 if key == "lengths" else 6, 7]
        elif key == "examples":
            given[key] = [example + 200 * n for n in range(4) for example in value]
        elif key == "resets":
            given[key] = value.repeat(1, 4)
    return given, (7, 4 * batch, INPUT, 37)


@exact_and_half
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", LAYERS)
def test_directions_and_layers(path, poisoned, name, call, precision):
    """A reversed direction, a second layer, a missing bias or a learned state goes wrong."""
    rich: dict[str, Any] = dict(num_layers=2, bidirectional=True, dropout=0.3)
    for options in (rich, dict(bias=False), dict(learn_initial_state=True, bidirectional=True)):
        compare(name, NOISES["zoneout-unit"], CALLS[call], True, precision, **options)


@pytest.mark.parametrize("precision", ["tf32", "exact"], indirect=True)
@pytest.mark.parametrize("lengths", [None, [12] * 40 + [7] * 24], ids=["whole", "ragged"])
def test_batch_norm_of_rows_that_begin_alike(path, lengths, precision):
    """W_h's derivative or a learned state's is what rounding leaves of sums over rows that
    should cancel.
    """
    want = of_rows_that_begin_alike("reference", "cpu", torch.float64, lengths)
    got = of_rows_that_begin_alike("cuda", "cuda", precision[0], lengths)
    check_rows_that_begin_alike(got, want, 0.05)


@pytest.mark.parametrize("precision", ["tf32", "exact"], indirect=True)
@pytest.mark.parametrize("lengths", [None, RAGGED], ids=["whole", "ragged"])
def test_the_mean_of_rows_that_are_alike_is_that_row(path, lengths, precision):
    """What is left of c less its mean grows a hundred times a step."""
    want = outputs_of_rows_alike("reference", "cpu", torch.float64, lengths)
    got = outputs_of_rows_alike("cuda", "cuda", precision[0], lengths)
    assert (got - want).norm() <= precision[1] * want.norm()


@exact_and_half
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("noise", ["zoneout-unit", "together", "held-gate", "state-dropout"])
def test_projections(poisoned, noise, norm, call, precision):
    """With `proj_size` a gradient misses the projection, or a mask its size."""
    options: dict[str, Any] = dict(norm=NORMS[norm], proj_size=5, bidirectional=True)
    given, sizes = given_with(norm, call)
    compare("lstm", NOISES[noise], given, True, precision, sizes, **options)


SIZES = [
    (1, 1, 1, 1),
    (2, 1, 3, 50),
    (3, 9, 1, 300),
    (1, 33, 2, 16),
    (4, 2, 5, 513),
    (9, 100, 1, 100),
    (5, 70, 7, 129),
]


LARGE = [
    (3, 32, 50, 1000),
    (3, 130, 3, 260),
    (2, 20, 4, 1500),
    (3, 32, 8, 768),
    (3, 128, 5, 512),
    (3, 64, 5, 1024),
    # the last block has places past the depth
    (4, 48, 5, 512),
    (3, 9, 2, 1280),
    (3, 40, 2, 1024),
    (3, 20, 2, 640),
]


@every_precision
@pytest.mark.parametrize("sizes", [*SIZES, *LARGE])
@pytest.mark.parametrize("name", LAYERS)
def test_sizes(path, name, sizes, precision):
    """A size that is no multiple of a tile is wrong at its edge, or a kernel for one size is
    compiled wrongly.

    Without what `return_cells` asks for, since a call without it has kernels of its own.
    """
    compare(name, NOISES["zoneout-unit"], {}, True, precision, sizes=sizes, cells=False)


@pytest.mark.parametrize("precision", ["tf32", "bf16"], indirect=True)
@pytest.mark.parametrize(
    "sizes", [(3, 21, 2, 8), (5, 100, 1, 100), (3, 128, 2, 128), (3, 33, 2, 129), (3, 64, 2, 256)]
)
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_sizes_with_batch_norm(name, sizes, precision):
    """A block, a band of rows or the second part of a block's units is forgotten where the
    blocks exchange.
    """
    compare(
        name,
        NOISES["zoneout-unit"],
        {},
        True,
        precision,
        sizes=sizes,
        cells=False,
        norm=NORMS["batch-norm"],
    )


@pytest.mark.parametrize("precision", ["tf32", "bf16"], indirect=True)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_one_mask_for_both_states(name, norm, precision):
    """A kernel for plain zoneout gives the hidden state bits of its own where it should have the
    cell's.
    """
    sizes = (5, 100, 1, 100)
    compare(
        name,
        NOISES["zoneout-shared"],
        {},
        True,
        precision,
        sizes=sizes,
        cells=False,
        norm=NORMS[norm],
    )


@every_precision
@pytest.mark.parametrize("norm", ["plain", "batch-norm"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_same_bits_twice(path, name, norm, precision):
    """The same seed gives other numbers the second time: sums are taken in no fixed order."""
    torch.manual_seed(0)
    noise = zo.Zoneout(**STATES[name])
    layer = LAYERS[name](INPUT, 100, noise=noise, norm=NORMS[norm]).to("cuda", precision[0])
    x, h = (
        torch.randn(*shape, device="cuda", dtype=precision[0])
        for shape in ((20, 40, INPUT), (1, 40, 100))
    )
    hx = (h, h.clone()) if name == "lstm" else h
    first, second = (everything(copy.deepcopy(layer), x, hx, {}) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("precision", ["exact", "tf32", "bf16"], indirect=True)
@pytest.mark.parametrize("mask", ["unit", "shared", "step", "sequence", "static"])
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_masks_are_those_of_the_cpu(path, name, mask, precision):
    """A kernel draws other bits than `zo.masks` shows: read back with a candidate of 1 and an
    old value of 0.
    """
    own = dict(seed=3) if mask == "static" else {}
    noise = zo.Zoneout(hidden=0.4, mask=mask, **own)
    layer = LAYERS[name](1, 101, noise=noise, device="cuda", dtype=precision[0])
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.bias_ih_l0.fill_(40.0)  # every gate and candidate is 1
        if name == "gru":
            layer.bias_ih_l0[101:202] = -40.0  # but the gate that keeps the old value
    x = torch.zeros(6, 9, 1, device="cuda", dtype=precision[0])
    first = layer(x, seed=11, examples=5)[0][0] < 0.5
    want = zo.masks(noise, seed=11, steps=6, batch=9, hidden=101, examples=5)["hidden"]
    assert torch.equal(first.cpu(), want[0])
    steps = torch.cat(
        [layer(x[t : t + 1], seed=11, examples=5, first_step=t)[0] < 0.5 for t in range(6)]
    )
    assert torch.equal(steps.cpu(), want)


@exact_and_half
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (400, 1000)], ids=str)
def test_weight_noise_is_that_of_the_cpu(shape, precision):
    """Noise on weights is drawn from other bits on a GPU, has another width, or does not let
    derivatives through.
    """
    weight = torch.randn(shape, dtype=precision[0])
    there = weight.cuda().requires_grad_()
    want = weight_noise(weight, 0.075, torch.tensor(11), 5)
    got = weight_noise(there, 0.075, torch.tensor(11, device="cuda"), 5)
    torch.testing.assert_close(
        got.detach().cpu(), want, rtol=1e-2 if precision[0] == torch.bfloat16 else 0, atol=1e-6
    )
    assert torch.equal(torch.autograd.grad(got.sum(), there)[0], torch.ones_like(there))


def test_a_side_stream():
    """The kernels run on another stream than the one they are called on, and read what is not
    there yet.
    """
    layer = zo.LSTM(50, 300, noise=zo.Zoneout(cell=0.5, hidden=0.05), device="cuda")
    x = torch.randn(50, 16, 50, device="cuda")
    want = layer(x, seed=1)[0]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = x * 0
        for _ in range(200):
            late = late + x / 200
        got = layer(late, seed=1)[0]
    stream.synchronize()
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("hidden", [100, 500])
def test_cuda_graph_draws_afresh(name, hidden):
    """A replayed graph repeats its first masks, or differs from eager mode."""
    layer = LAYERS[name](8, hidden, noise=zo.Zoneout(**STATES[name]), device="cuda")
    x = torch.randn(30, 16, 8, device="cuda", requires_grad=True)

    def step():
        y = layer(x)[0]
        return (y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append([v.clone() for v in out])
    assert not torch.equal(seen[0][0], seen[1][0]) and not torch.equal(seen[1][0], seen[2][0])

    seed = torch.zeros((), dtype=torch.int64, device="cuda")

    def seeded():
        y = layer(x, seed=seed)[0]
        return (y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = seeded()
    for value in (3, 4):
        seed.fill_(value)
        graph.replay()
        got = [v.clone() for v in out]
        assert all(torch.equal(a, b) for a, b in zip(got, seeded()))


def test_cuda_graph_reads_a_replaced_rate():
    """A captured graph goes on with the rates that it was captured with."""
    layer: Any = zo.GRU(8, 100, noise=zo.Zoneout(hidden=0.25), device="cuda").eval()
    x = torch.randn(30, 16, 8, device="cuda")
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)[0]
        for noise in (zo.Zoneout(hidden=0.9), None):
            layer.noise = noise
            graph.replay()
            torch.testing.assert_close(out, layer(x)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rate", [0.25, lambda x: torch.full_like(x[..., :1], 0.25)])
def test_a_call_with_rates_can_be_captured(rate):
    """Adaptive zoneout cannot be trained: its rates are copied from the host in every call."""
    layer: Any = zo.LSTM(8, 100, noise=zo.Zoneout(cell=0.5, hidden=0.05), device="cuda")
    x = torch.randn(30, 16, 8, device="cuda")
    seed = torch.zeros((), dtype=torch.int64, device="cuda")

    def step():
        return layer(x, seed=seed, rates={"cell": rate})[0]

    want = step().detach().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_rates_of_a_layer_loaded_from_the_meta_device():
    """Weights that are put on the GPU one by one come without their rates."""
    whole: Any = zo.LSTM(8, 100, noise=zo.Zoneout(cell=0.5, hidden=0.1), device="cuda")
    layer: Any = zo.LSTM(8, 100, noise=zo.Zoneout(cell=0.5, hidden=0.1), device="meta")
    for name, value in whole.named_parameters():
        layer.register_parameter(name, torch.nn.Parameter(value.detach()))
    x = torch.randn(30, 16, 8, device="cuda")
    with (
        pytest.raises(RuntimeError, match="call the layer once"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        layer(x, seed=torch.zeros((), dtype=torch.int64, device="cuda"))
    assert torch.equal(layer(x, seed=3)[0], whole(x, seed=3)[0])


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize(
    ("hidden", "norm"), [(100, None), (100, "layer"), (100, "batch"), (512, None)]
)
@pytest.mark.parametrize("precision", ["tf32", "bf16"], indirect=True)
def test_directions_side_by_side(hidden, norm, precision, monkeypatch):
    """A direction begins before its input is there, or is not waited for: alone, in a stream and
    in a graph.
    """
    norm = zo.RecurrentBatchNorm(200) if norm == "batch" else norm
    noise, dtype = zo.Zoneout(cell=0.5, hidden=0.05), precision[0]
    layer = zo.LSTM(
        8, hidden, bidirectional=True, noise=noise, norm=norm, device="cuda", dtype=dtype
    )
    x = torch.randn(200, 50, 8, device="cuda", dtype=dtype, requires_grad=True)
    seed = torch.tensor(5, device="cuda")

    def step(x):
        late = x * 1  # which is only just there
        y, (h, c) = layer(late, seed=seed)
        late = y * 2 - y  # what is behind it begins at once
        grads = torch.autograd.grad(late.square().sum(), [x, *layer.parameters()])
        return [
            v.detach() for v in (late, h, c, *grads)
        ]  # of what lives on, nothing may go into a graph

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "side_by_side", lambda runs: False)
        apart = step(x)
    asked, whether = [], cuda.side_by_side
    monkeypatch.setattr(cuda, "side_by_side", lambda runs: asked.append(whether(runs)) or asked[-1])
    want = step(x)
    for one, other in zip(want, apart, strict=True):
        assert (one - other).norm() <= precision[1] * other.norm()
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(step(x), want))
    assert asked == [True] * 5
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got = step(x)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(x)
    for _ in range(3):
        for value in got:
            value.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_lengths_and_packed_input_do_not_wait(path):
    """Lengths on the GPU are read by the host, which then waits for all that was asked of it
    before.
    """
    layer = zo.LSTM(
        5, 64, bidirectional=True, noise=zo.Zoneout(cell=0.5, hidden=0.05), device="cuda"
    )
    x, lengths = torch.randn(9, 4, 5, device="cuda"), torch.tensor([9, 3, 7, 1], device="cuda")
    packed = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
    layer(x, lengths=lengths)[0].sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, lengths=lengths)[0].sum().backward()
        layer(x, lengths=[9, 3, 7, 1])[0].sum().backward()
        layer(packed)[0].data.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    y, (h, c) = layer(packed, seed=3)
    want, (h_want, c_want) = layer(x, seed=3, lengths=lengths)
    for a, b in ((pad_packed_sequence(y)[0], want), (h, h_want), (c, c_want)):
        torch.testing.assert_close(a, b)


@every_precision
@pytest.mark.parametrize("sorted_first", [True, False])
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_packed_input_is_the_padded_batch(path, poisoned, name, sorted_first, precision):
    """Packed rows give other outputs, states or gradients than the same rows in a padded batch
    with lengths.
    """
    dtype, tolerance = precision
    layer = LAYERS[name](
        INPUT, 37, bidirectional=True, noise=zo.Zoneout(**STATES[name]), dtype=dtype, device="cuda"
    )
    lengths = torch.tensor([7, 5, 5, 2, 1] if sorted_first else [2, 7, 5, 1, 5])
    x = torch.randn(7, 5, INPUT, device="cuda", dtype=dtype, requires_grad=True)
    h = torch.randn(2, 5, 37, device="cuda", dtype=dtype, requires_grad=True)
    dy, found = torch.randn(7, 5, 74, device="cuda", dtype=dtype), []
    wanted = [x, h, *layer.parameters()]
    for packed in (True, False):
        hx = (h, h) if name == "lstm" else h
        if packed:
            given = pack_padded_sequence(x, lengths, enforce_sorted=sorted_first)
            y, state = layer(given, hx, seed=3)
            y = pad_packed_sequence(y)[0]
        else:
            y, state = layer(x, hx, seed=3, lengths=lengths.cuda())
        states = state if name == "lstm" else (state,)
        total = (y * dy).sum() + sum(s.square().sum() for s in states)
        found.append([y, *states, *torch.autograd.grad(total, wanted)])
    for a, b in zip(*found):
        assert (
            far(a, b.cpu()) <= tolerance
        )  # the rows lie in another order: sums over them are rounded otherwise


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_packed_input_cannot_be_captured():
    """A CUDA graph is captured with the sizes of one batch, or the error speaks of pinned
    memory.
    """
    layer = zo.LSTM(3, 8, device="cuda")
    packed = pack_padded_sequence(torch.randn(4, 2, 3, device="cuda"), torch.tensor([4, 2]))
    layer(packed)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="lengths=… on the GPU instead"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        layer(packed)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # the compiler's own, both
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_compiled_equals_eager():
    """torch.compile breaks the graph, or draws other masks."""
    model = nn.Sequential(
        nn.Linear(8, 8), zo.LSTM(8, 128, 2, noise=zo.Zoneout(cell=0.5, hidden=0.05))
    ).cuda()

    def run(x, seed):
        return model[1](model[0](x), seed=seed)[0].square().mean()

    x, seed = torch.randn(12, 6, 8, device="cuda"), torch.tensor(5, device="cuda")
    run(x, seed).backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compile(run, fullgraph=True)(x, seed).backward()
    for p, grad in zip(model.parameters(), want):
        torch.testing.assert_close(p.grad, grad, rtol=1e-3, atol=1e-5)


def test_autocast():
    """Autocast runs the layer in float32 as if it were not there."""
    layer, x = zo.LSTM(8, 64, device="cuda"), torch.randn(5, 3, 8, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = layer(x)[0]
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight_hh_l0.grad.dtype == torch.float32
    torch.testing.assert_close(y.float(), layer(x)[0], rtol=2e-2, atol=2e-2)


def test_float64_goes_to_the_reference(monkeypatch):
    """Double precision is rounded by a kernel that does not have it."""
    layer = zo.LSTM(3, 4, device="cuda", dtype=torch.float64)
    x = torch.randn(5, 2, 3, device="cuda", dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], copy.deepcopy(layer).cpu()(x.cpu())[0].cuda())
    layer.backend = "cuda"
    with pytest.raises(ValueError, match="backend='reference' takes every type"):
        layer(x)


def test_never_falls_back(monkeypatch):
    """backend="cuda" would run the slow reference without saying so."""
    monkeypatch.setattr(reference, "run", lambda r: pytest.fail("the reference was run"))
    for name, make in LAYERS.items():
        layer = make(
            INPUT, 8, noise=zo.Zoneout(**STATES[name]), norm="layer", backend="cuda", device="cuda"
        )
        layer(torch.randn(3, 2, INPUT, device="cuda"))
    with pytest.raises(ValueError, match="'cuda' takes input on a cuda device"):
        zo.LSTM(2, 3, backend="cuda")(torch.randn(4, 1, 2))


def test_a_grid_that_does_not_fit_goes_step_by_step(monkeypatch):
    """A grid that is not wholly on the GPU waits for blocks that never come."""
    from zoneout.ops.cuda import persistent
    from zoneout.ops.cuda.runtime.compiler import Kernel

    monkeypatch.setattr(Kernel, "resident_blocks", lambda *_: 1)
    persistent._kernel.cache_clear()
    try:
        compare(
            "lstm", NOISES["zoneout-unit"], {}, True, (torch.bfloat16, 1e-2), sizes=(3, 40, 4, 600)
        )
    finally:
        persistent._kernel.cache_clear()


def test_more_than_two_to_the_31_numbers():
    """An offset of 32 bits overflows: the last steps land on the first."""
    if torch.cuda.get_device_properties(0).total_memory < 100 * 2**30:
        pytest.skip("needs 100 GiB of GPU memory")
    steps, batch, hidden = 1100, 512, 1024  # times 4 gates: 2.3e9
    layer = zo.LSTM(
        4, hidden, noise=zo.Zoneout(cell=0.5, hidden=0.05), device="cuda", dtype=torch.bfloat16
    )
    x = torch.randn(steps, batch, 4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y, state = layer(x, seed=3)
    (dx,) = torch.autograd.grad(y[-20:].float().sum(), x)
    cut = steps - 40
    with torch.no_grad():
        middle = layer(x[:cut], seed=3)[1]
    tail = x[cut:].detach().requires_grad_()
    y_tail, state_tail = layer(tail, middle, seed=3, first_step=cut)
    (d_tail,) = torch.autograd.grad(y_tail[-20:].float().sum(), tail)
    assert (
        torch.equal(y[cut:], y_tail)
        or (y[cut:].float() - y_tail.float()).norm() < 1e-2 * y_tail.float().norm()
    )
    assert (dx[cut:].float() - d_tail.float()).norm() < 1e-2 * d_tail.float().norm()
    assert (state[1].float() - state_tail[1].float()).norm() < 1e-2 * state_tail[1].float().norm()


@exact_and_half
@pytest.mark.parametrize("features", [50, 400])
def test_one_hot_rows_by_number(precision, features):
    """A look-up gives other numbers than the product with one-hot rows, or its way back forgets
    a row.
    """
    dtype, tolerance = precision
    layer = zo.LSTM(
        features, 70, noise=zo.Zoneout(cell=0.5, hidden=0.05), device="cuda", dtype=dtype
    )
    numbers = torch.randint(0, features, (9, 6), device="cuda")
    found = []
    for x in (numbers, nn.functional.one_hot(numbers, features).to(dtype)):
        layer.zero_grad()
        y = layer(x, seed=1, lengths=[9, 9, 4, 1, 7, 2])[0]
        y.square().sum().backward()
        found.append([y, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found):
        assert far(a, b.double().cpu()) <= tolerance


def test_parameters_that_lie_anywhere(path):
    """Four units are read at once from where they are not aligned: a bias that is a view into
    something else.
    """
    layer = zo.LSTM(8, 64, noise=zo.Zoneout(cell=0.5, hidden=0.05), device="cuda")
    x = torch.randn(5, 6, 8, device="cuda")
    want = layer(x, seed=1)[0]
    for name in ("bias_ih_l0", "bias_hh_l0"):
        odd = torch.empty(257, device="cuda")[1:].copy_(getattr(layer, name).detach())
        setattr(layer, name, nn.Parameter(odd))
    got = layer(x, torch.zeros(2, 1, 6, 64, device="cuda").unbind(0), seed=1)[0]
    assert far(got, want.detach().cpu()) < 1e-5
    got.sum().backward()
