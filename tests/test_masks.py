"""The masks that a seed gives: their rates, their independence, and what each kind of mask may
see.
"""

import itertools

import numpy as np
import philox_numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zoneout as zo
from zoneout.draws import Draw, draw_bits, draw_masks
from zoneout.ops.cpu import native
from zoneout.ops.cpu.masks import bits_of, masks_of
from zoneout.streams import Rule, plane

KINDS = ("unit", "shared", "step", "sequence", "static")
# the design's table; layer, direction and seed are always seen (a static mask brings its own seed)
SEES = {
    "unit": {"stream", "step", "example", "unit"},
    "shared": {"step", "example", "unit"},
    "step": {"stream", "step", "example"},
    "sequence": {"stream", "example", "unit"},
    "static": {"stream", "step", "unit"},
}
SIZE = dict(steps=40, batch=50, hidden=64)


def zoneout(mask="unit", cell=0.5, hidden=0.5, seed=99):
    return zo.Zoneout(cell=cell, hidden=hidden, mask=mask, seed=seed if mask == "static" else None)


def every_stream(rate):
    """A noise on each stream that a step has."""
    return [
        zo.Zoneout(cell=rate, hidden=rate),
        zo.RecurrentDropout(rate=rate),
        zo.VariationalDropout(input=rate, hidden=rate),
    ]


def draws_of(mask, kind):
    """The draws behind a mask, each once: a coordinate that the draw does not see is taken at 0."""
    for axis, coordinate in enumerate(("step", "example", "unit")):
        if coordinate not in SEES[kind]:
            mask = mask.narrow(axis, 0, 1)
    return mask.double().flatten()


def assert_independent(a, b, rate):
    """The correlation of two masks lies within five of its standard deviations from zero."""
    a, b = a.double().flatten() - rate, b.double().flatten() - rate
    assert len(a) == len(b) >= 1000
    correlation = (a * b).mean().item() / (rate * (1 - rate))
    assert abs(correlation) < 5 / len(a) ** 0.5


def assert_same_masks(a, b):
    assert a.keys() == b.keys()
    for stream in a:
        assert torch.equal(a[stream], b[stream]), stream


# --- how often ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.85])
def test_rate_of_zoneout(kind, rate):
    """If this fails, a rate is not the chance that the old value is kept (but perhaps that it is
    not).
    """
    sizes = SIZE | {"step": dict(steps=200, batch=200, hidden=2)}.get(kind, {})
    for stream, mask in zo.masks(zoneout(kind, rate, rate), seed=1, **sizes).items():
        draws = draws_of(mask, kind)
        deviation = (rate * (1 - rate) / len(draws)) ** 0.5
        assert abs(draws.mean().item() - rate) < 5 * deviation, stream


def test_rate_of_every_stream():
    """If this fails, some stream compares its bits with the wrong threshold."""
    masks = zo.masks(every_stream(0.3), seed=2, **SIZE)
    assert list(masks) == ["cell", "hidden", "update", "input", "variational_hidden"]
    for stream, mask in masks.items():
        draws = draws_of(mask, "sequence" if stream in ("input", "variational_hidden") else "unit")
        assert abs(draws.mean().item() - 0.3) < 5 * (0.21 / len(draws)) ** 0.5, stream


@pytest.mark.parametrize("kind", KINDS)
def test_rates_zero_and_one_are_exact(kind):
    """If this fails, a state that must never (or always) be replaced once in a while is not (or
    is).
    """
    masks = zo.masks(zoneout(kind, cell=0.0, hidden=1.0), seed=3, **SIZE)
    assert not masks["cell"].any() and masks["hidden"].all()


def test_rate_of_each_unit():
    """If this fails, a tensor of rates is not one a unit, or a rate moves the bits it is
    compared with.
    """
    rates = torch.linspace(0, 1, 64)
    mask = zo.masks(zoneout(cell=rates), seed=4, steps=100, batch=100, hidden=64)["cell"]
    deviation = (rates * (1 - rates) / 1e4).sqrt()
    assert ((mask.float().mean((0, 1)) - rates).abs() <= 5 * deviation + 1e-4).all()
    for unit in (0, 13, 62, 63):
        scalar = zo.masks(
            zoneout(cell=rates[unit].item()), seed=4, steps=100, batch=100, hidden=64
        )["cell"]
        assert torch.equal(mask[..., unit], scalar[..., unit])


def test_rate_of_each_layer():
    """If this fails, a list of rates is not one a layer, in the order of the layers."""
    noise = zo.Zoneout(cell=[0.1, 0.9], hidden=[torch.full((64,), 0.9), 0.1])
    for layer, (cell, hidden) in enumerate([(0.1, 0.9), (0.9, 0.1)]):
        given, plain = (
            zo.masks(n, 5, layer=layer, **SIZE) for n in (noise, zoneout("unit", cell, hidden))
        )
        assert_same_masks(given, plain)


# --- independence ---------------------------------------------------------------------------------

RATE = 0.3


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["steps", "examples", "units"])
def test_independent_along(axis, lag):
    """If this fails, neighbouring steps, examples or units share bits of one word, or a whole
    counter.
    """
    for mask in zo.masks(zoneout("unit", RATE, RATE), seed=6, **SIZE).values():
        n = mask.shape[axis]
        assert_independent(mask.narrow(axis, 0, n - lag), mask.narrow(axis, lag, n - lag), RATE)


@pytest.mark.parametrize("kind", KINDS)
def test_independent_layers_directions_and_seeds(kind):
    """If this fails, two layers, directions or calls replace the same units."""
    places = [dict(layer=layer, direction=direction) for layer in (0, 1, 2) for direction in (0, 1)]
    calls = [(7, place) for place in places] + [(seed, places[0]) for seed in (8, -7, 7 + 2**32)]
    drawn = [  # a static mask brings the seed in its noise
        zo.masks(zoneout(kind, RATE, RATE, seed), seed, steps=60, batch=60, hidden=60, **place)
        for seed, place in calls
    ]
    for a, b in itertools.combinations(drawn, 2):
        for stream in ("cell", "hidden"):
            assert_independent(draws_of(a[stream], kind), draws_of(b[stream], kind), RATE)


def test_independent_streams():
    """If this fails, two streams read the same 16 bits."""
    masks = zo.masks(every_stream(RATE), seed=9, steps=4, batch=300, hidden=100)
    for a, b in itertools.combinations(masks, 2):
        assert_independent(masks[a][0], masks[b][0], RATE)


# --- what a mask may see --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_sees(kind):
    """If this fails, a mask varies in a coordinate that it must not see, or ignores one that it
    must.
    """
    masks = zo.masks(zoneout(kind), seed=10, **SIZE)
    for mask in masks.values():
        for axis, coordinate in enumerate(("step", "example", "unit")):
            varies = (mask != mask.narrow(axis, 0, 1)).any().item()
            assert varies == (coordinate in SEES[kind]), coordinate
    assert torch.equal(masks["cell"], masks["hidden"]) == ("stream" not in SEES[kind])


def test_shared_mask_is_nested():
    """If this fails, states with unequal rates do not share one draw: some keep only the rarer
    one.
    """
    masks = zo.masks(zoneout("shared", cell=0.2, hidden=0.6), seed=11, **SIZE)
    assert not (masks["cell"] & ~masks["hidden"]).any()


def test_static_mask_is_part_of_the_noise():
    """If this fails, a mask that is drawn once for the training changes with the call or the
    example.
    """
    masks = zo.masks(zoneout("static"), seed=12, **SIZE)
    assert_same_masks(
        masks, zo.masks(zoneout("static"), seed=13, examples=torch.arange(50).flip(0), **SIZE)
    )
    other = zo.masks(zoneout("static", seed=100), seed=12, **SIZE)
    assert not torch.equal(masks["cell"], other["cell"])


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_sees_alike(kind):
    """If this fails, `mask=` means something else in another method."""
    own = 99 if kind == "static" else None
    dropped = zo.masks(zo.StateDropout(cell=0.5, hidden=0.5, mask=kind, seed=own), seed=10, **SIZE)
    assert_same_masks(dropped, zo.masks(zoneout(kind), seed=10, **SIZE))
    if kind != "shared":  # recurrent dropout has one stream, so nothing to share
        update = zo.masks(zo.RecurrentDropout(rate=0.5, mask=kind, seed=own), seed=10, **SIZE)[
            "update"
        ]
        for axis, coordinate in enumerate(("step", "example", "unit")):
            assert (update != update.narrow(axis, 0, 1)).any().item() == (coordinate in SEES[kind])


@pytest.mark.parametrize("order", [1, -1], ids=["zoneout_first", "dropout_first"])
def test_methods_that_divide_the_states(order):
    """If this fails, a method that leaves a state alone hides the mask of the one that replaces
    it.
    """
    alone = zo.Zoneout(hidden=0.5), zo.StateDropout(cell=0.5)
    masks = zo.masks(alone[::order], seed=19, **SIZE)
    for stream, noise in zip(("hidden", "cell"), alone, strict=True):
        assert torch.equal(masks[stream], zo.masks(noise, seed=19, **SIZE)[stream]), stream


# --- the exact layout -----------------------------------------------------------------------------

RATES = st.floats(0, 1) | st.sampled_from([0.0, 1.0, 0.5, 2**-16, 1 - 2**-16, 0.5 + 2**-17])


@pytest.mark.filterwarnings("ignore:.* rounds to [01]")  # ours, of a rate that is drawn as 0 or 1
@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    rate=RATES,
    per_unit=st.booleans(),
    seed=st.integers(-(2**63), 2**64 - 1),
    layer=st.integers(0, 32767),
    direction=st.integers(0, 1),
    first_step=st.integers(0, 2**32 - 8),
    examples=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5),
    steps=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 11), st.integers(0, 5), st.integers(1, 11)),
)
def test_layout(kind, rate, per_unit, seed, layer, direction, first_step, examples, steps, sizes):
    """If this fails, a backend written from the design draws other masks than `masks()` shows."""
    hidden, proj_size, inputs = sizes
    units = {"cell": hidden, "hidden": proj_size or hidden, "update": hidden, "input": inputs}
    units["variational_hidden"] = units["hidden"]

    def rates(stream):
        return torch.linspace(0, rate, units[stream], dtype=torch.float64) if per_unit else rate

    own = seed ^ 0xFFFF if kind == "static" else None
    update = "unit" if kind == "shared" else kind
    noise = [
        zo.Zoneout(cell=rates("cell"), hidden=rates("hidden"), mask=kind, seed=own),
        zo.RecurrentDropout(
            rate=rates("update"), mask=update, seed=own if update == "static" else None
        ),
        zo.VariationalDropout(input=rates("input"), hidden=rates("variational_hidden")),
    ]
    masks = zo.masks(
        noise,
        seed,
        steps,
        len(examples),
        hidden,
        proj_size=proj_size,
        input_size=inputs,
        layer=layer,
        direction=direction,
        examples=torch.tensor(examples),
        first_step=first_step,
    )
    kinds = {"cell": kind, "hidden": kind, "update": update}
    kinds |= {"input": "sequence", "variational_hidden": "sequence"}
    assert masks.keys() == kinds.keys()
    for stream, its_kind in kinds.items():
        expected = philox_numpy.mask(
            stream,
            its_kind,
            rates(stream),
            own if its_kind == "static" else seed,
            np.arange(first_step, first_step + steps),
            examples,
            units[stream],
            layer,
            direction,
        )
        np.testing.assert_array_equal(masks[stream].numpy(), expected, err_msg=stream)


@pytest.mark.parametrize(("stream", "shift"), [("cell", 0), ("hidden", 16)])
def test_threshold(stream, shift):
    """If this fails, the bits are not compared with round(rate · 65536), or not by "below"."""
    for seed in range(20):
        word = int(philox_numpy.philox([0, 0, 0, 0], philox_numpy.key_of(seed))[0])
        bits = word >> shift & 0xFFFF
        for beyond, kept in ((0.0, False), (0.4, False), (0.6, True), (1.0, True)):
            noise = zo.Zoneout(**{stream: (bits + beyond) / 65536})
            assert zo.masks(noise, seed, 1, 1, 1)[stream].item() == kept


# --- the promises ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nobodys_mask(kind):
    """If this fails, what a sequence draws depends on how long, wide or full the batch is that
    it came in.
    """
    noise = [zoneout(kind), *every_stream(0.5)[1:]]
    small = zo.masks(noise, seed=14, steps=5, batch=3, hidden=7)
    large = zo.masks(noise, seed=14, steps=90, batch=50, hidden=130)  # several blocks of counters
    assert_same_masks(small, {stream: mask[:5, :3, :7] for stream, mask in large.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_reordering_and_splitting_change_nobodys_mask(kind):
    """If this fails, data-parallel processes, or a shuffled batch, draw other masks than one
    process.
    """
    noise = [zoneout(kind), *every_stream(0.5)[1:]]

    def masks(batch, examples=None):
        return zo.masks(noise, seed=15, steps=6, batch=batch, hidden=9, examples=examples)

    whole, order = masks(8), torch.tensor([5, 0, 7, 2, 2, 6])
    assert_same_masks(masks(6, order), {stream: mask[:, order] for stream, mask in whole.items()})
    assert_same_masks(masks(6, order.tolist()), masks(6, order))
    for offset in (3, torch.tensor(3)):
        parts = masks(3, 0), masks(5, offset)
        joined = {stream: torch.cat([part[stream] for part in parts], dim=1) for stream in whole}
        assert_same_masks(joined, whole)


@pytest.mark.parametrize("offset", [0, 5, 2**32 - 4], ids=["zero", "five", "last"])
def test_offset_in_a_tensor_is_an_offset(offset):
    """If this fails, an offset on the device makes a counter wider than 32 bits, which no kernel
    has.
    """
    noise, sizes = zoneout(), dict(seed=18, steps=20, batch=4, hidden=9)
    ids = torch.arange(offset, offset + 4)
    assert_same_masks(
        zo.masks(noise, **sizes, examples=torch.tensor(offset)),
        zo.masks(noise, **sizes, examples=ids),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_first_step_goes_on_counting(kind):
    """If this fails, a text evaluated in pieces draws other masks than in one piece."""
    noise = [zoneout(kind), *every_stream(0.5)[1:]]
    whole = zo.masks(noise, seed=16, steps=10, batch=3, hidden=9)
    later = zo.masks(noise, seed=16, steps=6, batch=3, hidden=9, first_step=4)
    assert_same_masks(later, {stream: mask[4:] for stream, mask in whole.items()})


def test_units_of_a_projection():
    """If this fails, the mask of a projected h has the cell's units, or other bits than an h
    that wide.
    """
    masks = zo.masks(
        every_stream(0.5), seed=17, steps=3, batch=2, hidden=12, proj_size=5, input_size=7
    )
    units = {stream: mask.shape[-1] for stream, mask in masks.items()}
    assert units == {"cell": 12, "hidden": 5, "update": 12, "input": 7, "variational_hidden": 5}
    wide = zo.masks(every_stream(0.5), seed=17, steps=3, batch=2, hidden=12)
    assert_same_masks(masks, {stream: mask[..., : units[stream]] for stream, mask in wide.items()})


def test_seed_as_tensor_and_empty_batch():
    """If this fails, a seed kept in a tensor is another seed, or a batch without rows has no
    masks.
    """
    noise = every_stream(0.5)
    a, b = (zo.masks(noise, seed, steps=3, batch=2, hidden=5) for seed in (-7, torch.tensor(-7)))
    assert_same_masks(a, b)
    for mask in zo.masks(noise, 1, steps=3, batch=0, hidden=5).values():
        assert (mask.shape, mask.dtype) == ((3, 0, 5), torch.bool)


# --- masks by themselves, drawn in C --------------------------------------------------------------


@pytest.mark.parametrize("units", [1, 6, 1024, 2051])
@pytest.mark.parametrize("stream", ["cell", "hidden", "dropout", "state2", "state3"])
@pytest.mark.parametrize("mask", KINDS)
def test_masks_in_c_are_those_of_the_torch_calls(mask, stream, units):
    """The compiled loop draws other bits than the generator that everything is held to, or into
    other places.
    """
    draw = Draw(
        Rule(stream, "previous", mask, ""),
        torch.tensor(0.3).double(),
        torch.tensor(-7),
        65536 * 9 + 3,
    )
    each = draw._replace(rate=torch.linspace(0, 1, units).double())
    steps, examples = torch.tensor([2**32 - 1, 0, 5]), torch.tensor([9, 2**32 - 1])
    for rows in (examples, examples + torch.arange(3)[:, None]):
        for got, want in zip(
            masks_of([draw, each], steps, rows, units), draw_masks([draw, each], steps, rows, units)
        ):
            assert got.shape == want.shape and torch.equal(got, want)


def test_masks_in_c_are_the_same_with_any_number_of_threads(monkeypatch):
    """Threads that share a mask would write over each other's part, or leave some out."""
    draw = Draw(
        Rule("hidden", "previous", "unit", ""), torch.tensor(0.3).double(), torch.tensor(7), 0
    )
    steps, examples = torch.arange(5), torch.arange(3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr("zoneout.ops.cpu.masks._FEW", 0)
    assert torch.equal(
        masks_of([draw], steps, examples, 1500)[0], draw_masks([draw], steps, examples, 1500)[0]
    )


def test_one_step_draws_in_c(monkeypatch):
    """A wrapped cell on the CPU would spend most of its time in torch calls that draw its masks."""
    if native.load() is None:
        pytest.skip(f"no compiled loop here: {native.why_not()}")
    monkeypatch.setattr("zoneout.draws.philox", lambda *words: pytest.fail("drawn in torch calls"))
    zo.ZoneoutCell(torch.nn.LSTMCell(3, 4), 0.5)(torch.ones(2, 3))
    zo.zoneout(torch.ones(2, 3), torch.zeros(2, 3), 0.5)
    zo.LSTM(3, 4, 2, dropout=0.5, noise=zo.VariationalDropout(input=0.5, hidden=0.5))(
        torch.ones(2, 1, 3)
    )


def test_the_last_example_of_all():
    """The largest id is refused, or as an offset of a batch of one."""
    last = [
        zo.masks(zo.Zoneout(hidden=0.5), 1, 2, 1, 40, examples=ids)
        for ids in (2**32 - 1, [2**32 - 1])
    ]
    assert torch.equal(last[0]["hidden"], last[1]["hidden"])


@pytest.mark.parametrize("draw_them", [draw_bits, bits_of], ids=["torch calls", "C"])
@pytest.mark.parametrize("stream", ["cell", "hidden", "update"])
def test_bits_that_a_loop_compares(stream, draw_them):
    """A system's loop compares its rates with the bits of another stream, or with more than 16."""
    rate = torch.tensor(0.5, dtype=torch.float64)
    rule = Rule(stream, "previous" if stream != "update" else "zero", "unit", "expectation")
    draw = Draw(rule, rate, torch.tensor(2**40 + 7), plane(stream, 1, 0))
    steps, examples = torch.arange(2, 7), torch.tensor([3, 0, 8])
    found = draw_them(draw, steps, examples, 9)
    want = philox_numpy.bits(stream, "unit", 2**40 + 7, range(2, 7), [3, 0, 8], 9, layer=1)
    assert found.tolist() == want.tolist()
