"""Noise on the states of any cell: their masks, their names, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import philox_numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zoneout as zo
from zoneout.cells import CELLS
from zoneout.definition import Definition, candidate, cell, held, update
from zoneout.draws import draw_all, stream_units
from zoneout.fits import check_fits, misfits, restrict
from zoneout.noise_checks import as_noises
from zoneout.streams import STATE_STREAMS, STREAMS, Rule, plane, streams_of

SIZE: dict[str, int] = dict(steps=6, batch=5, hidden=8)
MASKS = ("unit", "shared", "step", "sequence", "static")


@cell(gates=2, states=("h", "c", "n", "m"), checked=False)
def four(x, r, h, c, n, m):
    a = (x[0] + r[0]).sigmoid()
    return a * h + x[1], a * c + r[1], a * n + 1, a * m - 1


def grouped(*states: Any) -> Definition:
    """A cell like `four` whose states form other groups."""
    made = cell(gates=2, states=states, checked=False)(four.function)
    made.name = "grouped"
    return made


@cell(gates=1, checked=False)
def plain(x, r, h):
    return (x[0] + r[0]).relu()


@cell(gates=1, recurrence="diagonal", checked=False)
def indrnn(x, h, u):
    return (x[0] + u * h).relu()


@cell(gates=4, states=("h", "c"), checked=False)
def peephole(x, r, h, c, p_o):
    i, f, g, o = (a + b for a, b in zip(x, r))
    new = candidate("c", f.sigmoid() * c + update(i.sigmoid() * g.tanh()))
    return (o + p_o * new).sigmoid() * new.tanh(), new


@cell(gates=2, checked=False)
def holding(x, r, h):
    """A cell with one state and a gate that can be held."""
    a, o = (p + q for p, q in zip(x, r))
    return held(o.sigmoid()) * a.tanh()


SLSTM = grouped("h", ("c", "n", "m"))
MATRIX = "input variational_hidden weight weight_noise"  # the other streams, where h meets a matrix


def said(call: Callable[[], Any], error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


# --- the streams ----------------------------------------------------------------------------------


def test_streams_by_position():
    """A backend written from the design draws other bits, or a saved program another stream."""
    bits = {state: STREAMS[stream] for state, stream in zip(four.states, STATE_STREAMS)}
    assert bits == {"h": (0, 1), "c": (0, 0), "n": (5, 0), "m": (5, 1)}
    assert len(set(STREAMS.values())) == len(STREAMS), "two streams with the same bits"
    # Exported programs name a stream by its index, so these stay where they are.
    first = ("cell", "hidden", "update", "dropout", "input", "variational_hidden", "weight")
    assert tuple(STREAMS)[:8] == (*first, "weight_noise")


@pytest.mark.parametrize(
    ("definition", "streams"),
    [
        (CELLS["lstm"], f"hidden cell update {MATRIX}"),
        (CELLS["gru"], f"hidden update {MATRIX}"),
        (CELLS["rnn_tanh"], f"hidden {MATRIX}"),
        (CELLS["rnn_relu"], f"hidden {MATRIX}"),
        (four, f"hidden cell state2 state3 {MATRIX}"),
        (SLSTM, f"hidden cell {MATRIX}"),
        (grouped("h", "c", ("n", "m")), f"hidden cell state2 {MATRIX}"),
        (grouped("h", ("c", "n"), "m"), f"hidden cell state3 {MATRIX}"),
        (indrnn, "hidden input weight_noise"),
        (peephole, f"hidden cell update {MATRIX}"),
    ],
    ids=lambda v: v.name if isinstance(v, Definition) else "",
)
def test_streams_of_a_cell(definition, streams):
    """A cell would accept noise that it has no place for, or refuse noise that it has."""
    states = [s for s in streams.split() if s in STATE_STREAMS]
    rare = (*(f"drop_{s}" for s in states), "depth", "drop_depth", "fast_input")
    few_dense = definition.recurrence == "dense" and definition.gates <= 4
    untied = ("untied_input", "untied_hidden")
    rare = (*rare, "fast_hidden", *untied) if few_dense else (*rare, untied[0])
    assert streams_of(definition) == (*streams.split(), *rare)


def test_definition_of_a_layer():
    """A layer would check its noise against another cell."""
    for make, name in ((zo.LSTM, "lstm"), (zo.GRUCell, "gru"), (zo.RNN, "rnn_tanh")):
        assert make(3, 4).definition is CELLS[name]


def test_plane_of_a_shared_mask():
    """States that share a mask would be drawn from different words."""
    for k, stream in enumerate(STATE_STREAMS):
        shared, own = (Rule(stream, "previous", mask, "off") for mask in ("shared", "unit"))
        assert plane(shared, 3, 1) == 7
        assert plane(own, 3, 1) == plane(stream, 3, 1) == 7 + 65536 * (5 if k > 1 else 0)


def test_units_of_the_states():
    """A projection would change the size of a state that is not projected."""
    units = stream_units(8, 3, 5)
    assert [units[stream] for stream in STATE_STREAMS] == [3, 8, 8, 8]


# --- the masks ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.* rounds to [01]")  # a rate that is drawn as 0 or 1
@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    method=st.sampled_from([zo.Zoneout, zo.StateDropout]),
    kind=st.sampled_from(MASKS),
    rate=st.floats(0, 1) | st.sampled_from([0.0, 1.0, 0.5]),
    per_unit=st.booleans(),
    by_name=st.booleans(),
    seed=st.integers(-(2**63), 2**64 - 1),
    layer=st.integers(0, 32767),
    direction=st.integers(0, 1),
    first_step=st.integers(0, 2**32 - 8),
    examples=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4),
    hidden=st.integers(1, 11),
)
def test_layout(
    method, kind, rate, per_unit, by_name, seed, layer, direction, first_step, examples, hidden
):  # fmt: skip
    """A backend written from the design would draw other masks of a state than `masks()` shows."""
    rates: Any = torch.linspace(0, rate, hidden, dtype=torch.float64) if per_unit else rate
    named = dict.fromkeys("hcnm" if by_name else "nm", rates)
    fields = {} if by_name else {"hidden": rates, "cell": rates}
    own = seed ^ 0xFFFF if kind == "static" else None
    place = dict(layer=layer, direction=direction)
    masks = zo.masks(
        method(**fields, states=named, mask=kind, seed=own), seed, 3, len(examples), hidden,
        examples=torch.tensor(examples), first_step=first_step, cell=four, **place,
    )  # fmt: skip
    assert list(masks) == ["h", "c", "n", "m"]
    steps, key = np.arange(first_step, first_step + 3), seed if own is None else own
    for state, stream in zip("hcnm", ("hidden", "cell", "state2", "state3")):
        expected = philox_numpy.mask(stream, kind, rates, key, steps, examples, hidden, **place)
        np.testing.assert_array_equal(masks[state].numpy(), expected, err_msg=state)


def test_states_share_a_mask_only_if_asked():
    """Two states would be replaced together, or not together although their mask is shared."""
    noise = zo.Zoneout(hidden=0.5, cell=0.5, states={"n": 0.5, "m": 0.5}, mask="shared")
    shared = zo.masks(noise, 3, cell=four, **SIZE)
    assert all(torch.equal(mask, shared["c"]) for mask in shared.values())
    own = zo.masks(dataclasses.replace(noise, mask="unit"), 3, cell=four, **SIZE)
    assert len({mask.numpy().tobytes() for mask in own.values()}) == 4
    assert torch.equal(own["c"], shared["c"])


@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_torch_cells_have_two_names(mask):
    """`masks` would show something else under the definition's names than under the streams'."""
    noise = [
        zo.Zoneout(cell=0.5, hidden=0.25, mask=mask, seed=4 if mask == "static" else None),
        zo.RecurrentDropout(rate=0.5),
        zo.VariationalDropout(input=0.5, hidden=0.5),
        zo.WeightDrop(rate=0.5),
    ]
    streams = zo.masks(noise, 3, **SIZE)
    names = zo.masks(noise, 3, cell=CELLS["lstm"], **SIZE)
    assert list(names) == ["h", "c", "update", "input", "variational_hidden"]
    again = {{"h": "hidden", "c": "cell"}.get(name, name): mask for name, mask in names.items()}
    assert streams.keys() == again.keys()
    assert all(torch.equal(again[stream], mask) for stream, mask in streams.items())


def test_masks_of_a_group():
    """The states of a group would be replaced one without the other."""
    noise = zo.Zoneout(cell=0.5, at_eval="off")
    masks = zo.masks(noise, 3, cell=SLSTM, **SIZE)
    alone = zo.masks(noise, 3, **SIZE)
    assert list(masks) == ["h", "c", "n", "m"] and not masks["h"].any()
    assert all(torch.equal(masks[state], alone["cell"]) for state in "cnm")
    noise = zo.Zoneout(cell=0.5, states={"n": 0.5}, at_eval="off")
    of_two = zo.masks(noise, 3, cell=grouped("h", "c", ("n", "m")), **SIZE)
    single = zo.masks(noise, 3, cell=four, **SIZE)
    assert torch.equal(of_two["n"], single["n"]) and torch.equal(of_two["m"], single["n"])
    assert torch.equal(of_two["c"], single["c"])


def test_a_state_without_a_rate():
    """A state that no rate names would be missing among the masks, or replaced."""
    masks = zo.masks(zo.Zoneout(states={"m": 0.5}), 3, cell=four, **SIZE)
    assert {state: mask.any().item() for state, mask in masks.items()} == {
        "h": False, "c": False, "n": False, "m": True,
    }  # fmt: skip
    assert list(zo.masks(zo.VariationalDropout(input=0.5), 3, cell=four, **SIZE)) == [
        "input", "variational_hidden",
    ]  # fmt: skip


def test_rates_of_a_state_per_layer_and_per_unit():
    """A list or tensor of rates under a state's name would be read in another way."""
    units = torch.linspace(0, 1, 8)
    listed = zo.Zoneout(states={"n": [0.1, units]})
    for layer, rate in enumerate((0.1, units)):
        alone = zo.Zoneout(states={"n": rate})
        a, b = (zo.masks(one, 3, cell=four, layer=layer, **SIZE)["n"] for one in (listed, alone))
        assert torch.equal(a, b)


# --- entries and rules ----------------------------------------------------------------------------


def test_entries():
    """A rate would be taken for another stream's, or two rates for one stream."""
    noise: Any = zo.Zoneout(hidden=0.1, states={"m": 0.4, "c": 0.2})
    assert [(e.written(), e.stream, e.rate) for e in noise.entries(four)] == [
        ("states={'c': …}", "cell", 0.2),
        ("hidden=…", "hidden", 0.1),
        ("depth=…", "depth", 0.0),
        ("states={'n': …}", "state2", 0.0),
        ("states={'m': …}", "state3", 0.4),
    ]
    assert [rule.stream for rule in noise.rules(four)] == ["cell", "hidden", "state3"]
    assert [rule.stream for rule in zo.Zoneout(cell=0.5, hidden=0.1).rules()] == ["cell", "hidden"]
    assert [e.stream for e in zo.Zoneout(hidden=0.1).entries(plain)] == ["hidden", "depth"]
    assert [e.stream for e in zo.VariationalDropout().entries(indrnn)] == ["input"]


# --- the noise as a value -------------------------------------------------------------------------

NAMED: Any = zo.Zoneout(states={"n": 0.1, "c": [0.2, torch.tensor([0.5, 0.25])]})


def test_a_noise_with_states_is_a_value(tmp_path):
    """Rates by name would be lost in a copy or a checkpoint, or could not be compared."""
    torch.save(NAMED, tmp_path / "noise.pt")
    units = torch.tensor([0.5, 0.25])
    same = [
        copy.copy(NAMED),
        copy.deepcopy(NAMED),
        pickle.loads(pickle.dumps(NAMED)),
        torch.load(tmp_path / "noise.pt", weights_only=True),
        dataclasses.replace(NAMED),
        zo.Zoneout(states={"c": (0.2, units), "n": np.float64(0.1)}),  # in another order
    ]
    for noise in same:
        assert noise == NAMED and hash(noise) == hash(NAMED) and repr(noise) == repr(NAMED)
        assert noise.rules(four) == NAMED.rules(four)
    others = [zo.Zoneout(), zo.Zoneout(states={"n": 0.1}), zo.StateDropout(states=NAMED.states)]
    assert all(noise != NAMED for noise in others)
    assert dataclasses.replace(NAMED, states={}) == zo.Zoneout()
    assert dict(dataclasses.replace(NAMED, hidden=0.5).states).keys() == {"n", "c"}


def test_repr_of_states():
    """A printed noise would not be what a user writes."""
    assert repr(NAMED) == "Zoneout(states={'c': [0.2, '<2 rates>'], 'n': 0.1})"
    noise = zo.StateDropout(hidden=0.5, mask="step", states={"n": 0.1})
    assert repr(noise) == "StateDropout(hidden=0.5, mask='step', states={'n': 0.1})"
    assert eval(repr(noise), vars(zo)) == noise
    assert repr(zo.Zoneout(states={})) == "Zoneout()"


def test_states_cannot_be_changed_from_outside():
    """A dict that the caller changes later would change a noise that is in use."""
    rates = {"n": 0.1}
    noise: Any = zo.Zoneout(states=rates)
    rates["n"] = 0.9
    assert noise == zo.Zoneout(states={"n": 0.1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        noise.states = ()
    with pytest.raises(TypeError):
        noise.states["n"] = 0.5


def test_a_noise_of_an_older_version():
    """A noise that was pickled before there was `states` could not be used."""
    noise = zo.Zoneout(cell=0.5)
    del noise.__dict__["states"]
    again = pickle.loads(pickle.dumps(noise))
    assert "states" not in again.__dict__
    assert again == zo.Zoneout(cell=0.5) and repr(again) == "Zoneout(cell=0.5)"
    assert again.rules(four) == zo.Zoneout(cell=0.5).rules()


# --- layers ---------------------------------------------------------------------------------------


def test_layers_know_their_states_by_name():
    """A rate under a state's name would not be the rate of that state in a layer or a cell."""
    x = torch.randn(6, 2, 3)
    layer = zo.LSTM(3, 4, 2, noise=zo.Zoneout(hidden=0.25, cell=0.5))
    expected = layer(x, seed=3)[0]
    by_name = zo.Zoneout(states={"h": 0.25, "c": 0.5})
    for noise in (by_name, zo.Zoneout(hidden=0.25, states={"c": [0.5, 0.5]})):
        layer.noise = noise
        assert torch.equal(layer(x, seed=3)[0], expected)
        layer.noise = dataclasses.replace(noise, hidden=0.0, states={"h": 0.1, "c": 0.1})
        assert torch.equal(layer(x, seed=3, rates={"hidden": 0.25, "cell": 0.5})[0], expected)
    layer.noise = [zo.StateDropout(states={"h": 0.5}), zo.Zoneout(states={"c": 0.5})]
    assert {rule.stream: rule.by for rule in layer._rules} == {"hidden": "zero", "cell": "previous"}
    step: Any = zo.GRUCell(3, 4, noise=zo.Zoneout(states={"h": 1.0}))
    h = torch.randn(2, 4)
    assert torch.equal(step(x[0], h, seed=1, step=0), h)


def test_draws_of_a_layer_with_four_states():
    """A layer would draw other masks of a third or fourth state than `masks()` shows."""

    class Four(zo.LSTM):
        definition = property(lambda self: four)  # type: ignore[assignment]

    seed, steps, rows = torch.tensor(3), torch.arange(6), torch.arange(5)
    for mask in ("unit", "shared"):
        noise = zo.Zoneout(hidden=0.5, cell=0.4, states={"n": 0.3, "m": 0.2}, mask=mask)
        layer: Any = Four(3, 8, 2, noise=noise)
        draws = layer._draws(layer._call_noise(None, torch.device("cpu")), 1, 0, seed)
        drawn = draw_all(draws, steps, rows, stream_units(8, 0, 8))
        expected = zo.masks(noise, 3, layer=1, cell=four, **SIZE)
        for state, stream in zip("hcnm", STATE_STREAMS, strict=True):
            assert torch.equal(drawn[stream], expected[state]), (mask, state)


def test_convert_drops_what_is_not_a_state():
    """A noise by name would fail on a model with another cell, or be dropped without a word."""
    lines: list[str] = []
    noise = zo.Zoneout(states={"h": 0.1, "c": 0.2})
    model = nn.Sequential(nn.LSTM(3, 4), nn.GRU(4, 4))
    zo.convert(model, noise, report=lines.append)
    dropped = "dropped Zoneout's states['c'] (GRU has one state, h)"
    assert lines == [
        "0: LSTM replaced, with Zoneout(states={'c': 0.2, 'h': 0.1})",
        f"1: GRU replaced, with Zoneout(states={{'h': 0.1}}); {dropped}",
    ]
    lines.clear()
    zo.convert(nn.Sequential(nn.RNN(3, 4)), zo.Zoneout(states={"c": 0.2}), report=lines.append)
    nothing = "left alone, no part of the noise applies; dropped Zoneout's"
    assert lines == [f"0: RNN {nothing} states['c'] (RNN has one state, h)"]
    lines.clear()
    model = nn.Sequential(nn.LSTMCell(3, 4))
    noise = zo.Zoneout(hidden=0.1, states={"c": 0.2}, mask="sequence")
    zo.convert(model, noise, report=lines.append)
    why = "drawn once for a whole sequence, and the model passes neither seed nor step to a cell"
    assert lines == [f"0: LSTMCell {nothing} hidden ({why}), Zoneout's states['c'] ({why})"]
    twice = zo.Zoneout(hidden=0.1, states={"h": 0.2})
    message = said(lambda: zo.convert(model, twice))
    assert message.endswith("(in '0', a LSTMCell; nothing was replaced)")


def test_restrict_keeps_what_applies():
    """A rate that applies would be dropped with one that does not."""
    noise = zo.Zoneout(hidden=0.1, cell=0.2, states={"q": 0.5, "n": 0.3, "m": 0.4})
    kept, dropped = restrict((noise, zo.RecurrentDropout(rate=0.5)), four)
    assert kept == (zo.Zoneout(hidden=0.1, cell=0.2, states={"n": 0.3, "m": 0.4}),)
    assert dropped == [
        "Zoneout's states['q'] (four has the states h, c, n, m)",
        "RecurrentDropout's rate (four has no zo.update(…))",
    ]
    kept, dropped = restrict((noise,), SLSTM)
    assert kept == (zo.Zoneout(hidden=0.1),) and len(dropped) == 4


# --- errors ---------------------------------------------------------------------------------------

LSTM_HAS = "LSTM has the states h, c; expected the name of a state, got"
GROUP_OF = "the states c, n, m of grouped form a group, with one rate under 'c'; expected 'c', got"
UNDEFINED = (
    "the expectation of one mask for the states c, n, m of grouped is not defined; "
    "try at_eval='sample' or at_eval='off'"
)  # fmt: skip
NO_MATRIX = "indrnn has no recurrent weight matrix; expected"
FITS: dict[str, tuple[Any, Definition, str, str]] = {  # noise, cell, and what the message says
    "unknown": (
        zo.Zoneout(states={"q": 0.1}),
        four,
        "Zoneout(states={'q': 0.1})",
        "four has the states h, c, n, m; expected the name of a state, got 'q'",
    ),
    "unknown, at 0": (
        zo.StateDropout(states={"q": 0.0}),
        plain,
        "StateDropout(states={'q': 0.0})",
        "plain has one state, h; expected the name of a state, got 'q'",
    ),
    "unknown, with groups": (
        zo.Zoneout(states={"q": torch.zeros(4)}),
        SLSTM,
        "Zoneout(states={'q': '<4 rates>'})",
        "grouped has the states h, (c, n, m); expected the name of a state, got 'q'",
    ),
    "second of a group": (
        zo.Zoneout(states={"n": 0.1}, at_eval="off"),
        SLSTM,
        "Zoneout(states={'n': 0.1})",
        f"{GROUP_OF} 'n'",
    ),
    "cell of one state": (
        zo.Zoneout(cell=0.5),
        plain,
        "Zoneout(cell=0.5)",
        "plain has one state, h; expected cell to be left out",
    ),
    "update": (
        zo.RecurrentDropout(rate=0.5),
        plain,
        "RecurrentDropout(rate=0.5)",
        "plain has no zo.update(…); expected rate to be left out",
    ),
    "held": (
        zo.RecurrentDropout(rate=0.5, hold_output_gate=True),
        peephole,
        "RecurrentDropout(hold_output_gate=True)",
        "peephole has no zo.held(…); expected hold_output_gate to be left out",
    ),
    "h at the gates": (
        zo.VariationalDropout(input=0.1, hidden=0.5),
        indrnn,
        "VariationalDropout(hidden=0.5)",
        f"{NO_MATRIX} hidden to be left out",
    ),
    "weights": (
        zo.WeightDrop(rate=0.5),
        indrnn,
        "WeightDrop(rate=0.5)",
        f"{NO_MATRIX} rate to be left out",
    ),
    "expectation by field": (
        zo.Zoneout(cell=0.5),
        SLSTM,
        "Zoneout(cell=0.5)",
        UNDEFINED,
    ),
    "expectation by name": (
        zo.StateDropout(states={"c": 0.5}),
        SLSTM,
        "StateDropout(states={'c': 0.5})",
        UNDEFINED,
    ),
}


@pytest.mark.parametrize(("noise", "definition", "argument", "why"), FITS.values(), ids=FITS)
def test_what_does_not_apply(noise, definition, argument, why):
    """A noise that has no place in a cell would be taken, or refused without a reason."""
    message = f"noise: {argument} does not apply, {why}"
    assert said(lambda: check_fits((noise,), definition)) == message
    assert said(lambda: zo.masks(noise, 3, cell=definition, **SIZE)) == message
    kept, dropped = restrict((noise,), definition)
    assert len(dropped) == 1 and all(not misfits(one, definition) for one in kept)


@pytest.mark.parametrize(
    "noise",
    [
        zo.Zoneout(cell=0.5, at_eval="sample"),
        zo.StateDropout(states={"c": 0.5}, at_eval="off"),
        zo.Zoneout(hidden=0.5),  # h is alone
        zo.Zoneout(hidden=0.5, states={"c": 0.0}),
        zo.WeightNoise(std=0.1),
    ],
    ids=repr,
)
def test_what_applies_to_a_group(noise):
    """A group could have no noise at all."""
    check_fits((noise,), SLSTM)


def test_what_applies_to_other_cells():
    """A mark or state that a cell has would be overlooked."""
    check_fits((zo.RecurrentDropout(rate=0.5),), peephole)
    check_fits((zo.RecurrentDropout(hold_output_gate=True),), holding)
    check_fits((zo.VariationalDropout(input=0.5), zo.WeightNoise(std=0.1)), indrnn)
    noise = zo.RecurrentDropout(hold_output_gate=True)
    (misfit,) = misfits(noise, holding, one_step=True)
    assert misfit.why == "a cell does not keep the output gate of the previous step"


def test_names_in_torch_layers():
    """A layer would take a name that its cell does not have, or say it in other words."""
    noise = zo.Zoneout(states={"n": 0.1})
    start = "noise: Zoneout(states={'n': 0.1}) does not apply,"
    for make in (zo.LSTM, zo.LSTMCell):
        assert said(lambda make=make: make(3, 4, noise=noise)) == f"{start} {LSTM_HAS} 'n'"
    gru = f"{start} GRU has one state, h; expected the name of a state, got 'n'"
    assert said(lambda: zo.GRU(3, 4, noise=noise)) == gru
    start = "Zoneout(states={'c': …}): expected one rate for each of"
    units = zo.Zoneout(states={"c": torch.zeros(3)})
    assert said(lambda: zo.LSTM(3, 4, noise=units)) == f"{start} 4 units, got 3"
    layers = zo.Zoneout(states={"c": [0.1, 0.2]})
    assert said(lambda: zo.LSTM(3, 4, noise=layers)) == f"{start} 1 layers, got 2"


@pytest.mark.parametrize(
    ("noise", "field", "state"),
    [
        (zo.Zoneout(hidden=0.1, states={"h": 0.2}), "hidden", "h"),
        (zo.StateDropout(cell=torch.zeros(4), states={"c": 0.0}), "cell", "c"),
    ],
)
def test_a_state_that_is_named_twice(noise, field, state):
    """One of two rates for the same state would be ignored."""
    both = f"{field} and states['{state}'] in {noise}"
    message = f"noise: expected one rate for the state {state}, got {both}; leave one of them out"
    for call in (lambda: zo.LSTM(3, 4, noise=noise), lambda: noise.rules(four)):
        assert said(call) == message


def test_two_methods_for_one_state():
    """One of two methods for the same state would be ignored."""
    both: list[Any] = [zo.Zoneout(cell=0.1), zo.StateDropout(states={"c": 0.2})]
    message = "replace the state {}, expected one method for each state"
    assert said(lambda: zo.LSTM(3, 4, noise=both)) == (
        "noise: both Zoneout(cell=0.1) and StateDropout(states={'c': 0.2}) " + message.format("c")
    )
    both = [zo.Zoneout(cell=0.1), zo.StateDropout(cell=0.2)]
    for call in (lambda: zo.LSTM(3, 4, noise=both), lambda: zo.masks(both, 3, **SIZE)):
        assert said(call).endswith("replace the cell state, expected one method for each state")
    both = [zo.Zoneout(states={"n": 0.1}), zo.StateDropout(states={"n": 0.2})]
    assert said(lambda: zo.masks(both, 3, cell=four, **SIZE)).endswith(message.format("n"))
    check_fits(as_noises([zo.Zoneout(cell=0.1), zo.StateDropout(states={"n": 0.2})]), four)


@pytest.mark.parametrize(
    ("states", "error", "message"),
    [
        (0.1, TypeError, "=…): expected a dict such as {'n': 0.1}, got float"),
        ((0.1, 0.2), TypeError, "=…): expected a dict such as {'n': 0.1}, got tuple"),
        (None, TypeError, "=…): expected a dict such as {'n': 0.1}, got NoneType"),
        ({0: 0.1}, ValueError, "=…): expected names of states, got 0"),
        ({"": 0.1}, ValueError, "=…): expected names of states, got ''"),
        ({"n": 1.5}, ValueError, "={'n': …}): expected a rate between 0 and 1, got 1.5"),
        ({"n": []}, ValueError, "={'n': …}): expected one rate a layer, got an empty list"),
    ],
)
def test_bad_states(states, error, message):
    """What is no rate of a state would be taken, or refused somewhere else."""
    assert said(lambda: zo.Zoneout(states=states), error) == f"Zoneout(states{message}"


def test_a_rounded_rate_of_a_state_is_warned_of():
    """A rate too small to be drawn would be no noise at all in training, and nobody would know."""
    expected = r"^StateDropout\(states={'n': …}\): 1e-06 rounds to 0"
    with pytest.warns(UserWarning, match=expected) as caught:
        zo.StateDropout(states={"n": 1e-6})
    assert len(caught) == 1 and caught[0].filename == __file__


def test_states_without_a_definition():
    """A rate by name would be ignored where no definition says which state it means."""
    noise = zo.Zoneout(states={"n": 0.1, "c": 0.2})
    message = (
        "Zoneout(states=…): expected the definition of a cell with the states c, n, got none; "
        "pass cell=…, or use only hidden=… and cell=… for its first two states"
    )
    for call in (noise.rules, noise.entries, lambda: zo.masks(noise, 3, **SIZE)):
        assert said(call) == message
    assert as_noises([noise]) == (noise,), "what the rates belong to is not asked yet"


def test_bad_cells_of_masks():
    """`masks` would show masks under names that mean something else."""
    name: Any = "lstm"
    got = said(lambda: zo.masks(zo.Zoneout(), 3, cell=name, **SIZE), TypeError)
    assert got == "cell: expected the definition of a cell, got str"
    make = cell(gates=1, states=("h", "input"), checked=False)
    odd = make(lambda x, r, h, input: (x[0] + h, r[0] * input))
    noise: Any = [zo.Zoneout(cell=0.5), zo.VariationalDropout(input=0.5)]
    assert said(lambda: zo.masks(noise, 3, cell=odd, **SIZE)) == (
        "cell: expected states with other names than the streams, got input"
    )
    assert list(zo.masks(noise[0], 3, cell=odd, **SIZE)) == ["h", "input"]
    layers = said(lambda: zo.masks(zo.Zoneout(states={"n": [0.1]}), 3, cell=four, layer=1, **SIZE))
    rates = "the number of rates in Zoneout(states={'n': …})"
    assert layers == f"layer: expected a number below 1, {rates}, got 1"
