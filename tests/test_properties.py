"""Shapes of any size, and what must not depend on how a batch was put together."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import zoneout as zo

some = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=120,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}  # float64: only the order of sums differs


@dataclass
class Case:
    """A layer and an input for it, [T, B, input] whatever the layer's `batch_first`."""

    layer: Any
    x: Tensor
    hx: Any
    lengths: Tensor | None
    resets: Tensor | None
    seed: int

    @property
    def directions(self) -> int:
        return 2 if self.layer.bidirectional else 1

    def ends(self) -> list[int]:
        """The length of each row."""
        return [len(self.x)] * self.x.shape[1] if self.lengths is None else self.lengths.tolist()

    def run(self, x: Tensor | None = None, hx: Any = None, **options: Any) -> list[Tensor]:
        """Outputs [T, B, ·] and final states, of this input or another."""
        x = self.x if x is None else x
        swap = self.layer.batch_first and x.dim() == 3
        if swap and options.get("resets") is not None:
            options["resets"] = options["resets"].t()
        y, states, *_ = self.layer(x.transpose(0, 1) if swap else x, hx, seed=self.seed, **options)
        return [
            y.transpose(0, 1) if swap else y,
            *(states if isinstance(states, tuple) else (states,)),
        ]

    def state(self, rows: Any = slice(None)) -> Any:
        """The initial state of some rows."""
        if self.hx is None:
            return None
        states = tuple(s[:, rows] for s in self.hx)
        return states if self.layer.kind == "lstm" else states[0]


rates = st.sampled_from([0.0, 0.1, 0.5, 1.0])
seeds = st.integers(-(2**63), 2**64 - 1)


@st.composite
def noises(draw: st.DrawFn, kind: str, chunks: bool = False) -> Any:
    """None or several noises; with `chunks`, such as a sequence that is cut in pieces can go on
    with.
    """
    mask = draw(st.sampled_from(["unit", "shared", "step", "sequence", "static"]))
    own = {"mask": mask, "seed": 3} if mask == "static" else {"mask": mask}
    cell = draw(rates) if kind == "LSTM" else 0.0
    methods: list[Any] = [
        draw(st.sampled_from([zo.Zoneout, zo.StateDropout]))(cell=cell, hidden=draw(rates), **own),
        zo.VariationalDropout(input=draw(rates), hidden=draw(rates)),
        zo.WeightDrop(rate=draw(rates)),
        zo.WeightNoise(std=draw(rates)),
    ]
    if kind != "RNN":
        hold = kind == "LSTM" and not chunks and draw(st.booleans())
        methods.append(zo.RecurrentDropout(rate=draw(rates), hold_output_gate=hold))
    return draw(st.none() | st.lists(st.sampled_from(methods), unique_by=id))


@st.composite
def cases(
    draw: st.DrawFn,
    rows: int = 0,
    kinds: tuple[str, ...] = ("LSTM", "GRU", "RNN"),
    plain: bool = False,
    chunks: bool = False,
    layers: int = 3,
) -> Case:
    """Any layer and input. `rows`: at least; `plain`: no lengths or resets; `chunks`: one
    direction.
    """
    kind = draw(st.sampled_from(kinds))
    steps, batch = draw(st.integers(1, 6)), draw(st.integers(rows, 5))
    inputs, hidden, layers = (
        draw(st.integers(1, 6)),
        draw(st.integers(1, 9)),
        draw(st.integers(1, layers)),
    )
    options: dict[str, Any] = {
        "num_layers": layers,
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "bidirectional": not chunks and draw(st.booleans()),
        "dropout": draw(rates) if layers > 1 else 0.0,
        "noise": draw(noises(kind, chunks)),
    }
    if kind == "LSTM":
        options["proj_size"] = draw(st.just(0) | st.integers(0, hidden - 1))
    if kind == "RNN":
        options["nonlinearity"] = draw(st.sampled_from(["tanh", "relu"]))
    layer = getattr(zo, kind)(inputs, hidden, dtype=torch.float64, **options)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(numbers(*parameter.shape) * hidden**-0.5)
    count = layers * (2 if layer.bidirectional else 1)
    sizes = (layer.output_size, hidden) if kind == "LSTM" else (hidden,)
    hx = tuple(numbers(count, batch, size) for size in sizes) if draw(st.booleans()) else None
    lengths = resets = None
    if not plain and draw(st.booleans()):
        lengths = torch.tensor(
            draw(st.lists(st.integers(0, steps), min_size=batch, max_size=batch))
        ).long()
    if not plain and draw(st.booleans()):
        resets = torch.rand(steps, batch, generator=generator) < 0.3
    return Case(layer, numbers(steps, batch, inputs), hx, lengths, resets, draw(seeds))


def assert_close(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


# --- shapes ---------------------------------------------------------------------------------------


@some
@given(cases(), st.booleans())
def test_shapes_and_ends(case, training):
    """A result would have another shape than torch's, or a sequence would not end where its
    length says.
    """
    layer, (steps, batch, _) = case.layer.train(training), case.x.shape
    units, count = layer.output_size, layer.num_layers * case.directions
    y, h, *c = case.run(hx=case.state(), lengths=case.lengths, resets=case.resets)
    assert y.shape == (steps, batch, case.directions * units)
    assert h.shape == (count, batch, units)
    assert [tuple(v.shape) for v in c] == [(count, batch, layer.hidden_size)] * (
        layer.kind == "lstm"
    )
    assert all(v.dtype == torch.float64 and torch.isfinite(v).all() for v in (y, h, *c))

    for row, length in enumerate(case.ends()):
        assert not y[length:, row].any(), "an output past the end"
        given = torch.zeros(count, units) if case.hx is None else case.hx[0][:, row]
        ends = [y[length - 1, row, :units], y[0, row, units:]][: case.directions]
        for direction, end in enumerate(ends):
            k = count - case.directions + direction
            assert torch.equal(h[k, row], end if length else given[k].to(y))
        if not length:
            pairs = zip((h, *c), case.hx or (), strict=False)
            assert all(torch.equal(v[:, row], g[:, row]) for v, g in pairs)


@some
@given(cases(rows=1, kinds=("LSTM",)))
def test_cells_have_the_outputs_shape(case):
    """`return_cells` would have another shape, other zeros or other ends than the outputs."""
    case.layer.batch_first = False
    y, (_, c), cells = case.layer(
        case.x,
        case.state(),
        lengths=case.lengths,
        resets=case.resets,
        seed=case.seed,
        return_cells=True,
    )
    hidden = case.layer.hidden_size
    assert cells.shape == (*y.shape[:2], case.directions * hidden)
    for row, length in enumerate(case.ends()):
        assert not cells[length:, row].any()
        if length:
            assert torch.equal(cells[length - 1, row, :hidden], c[-case.directions, row])
            assert case.directions == 1 or torch.equal(cells[0, row, hidden:], c[-1, row])


@some
@given(cases(rows=1, plain=True))
def test_unbatched_is_a_batch_of_one(case):
    """A sequence without a batch would not give what it gives as a batch of one."""
    state = case.state(slice(0, 1))
    alone = (
        None
        if state is None
        else tuple(s[:, 0] for s in state)
        if type(state) is tuple
        else state[:, 0]
    )
    batched, single = case.run(case.x[:, :1], state), case.run(case.x[:, 0], alone)
    assert_close(single, [v[:, 0] for v in batched])


# --- what a row gives does not depend on the others -----------------------------------------------


@some
@given(cases(rows=1), st.integers(0, 4), st.integers(0, 3))
def test_padding_a_batch_changes_no_row(case, more_steps, more_rows):
    """Padding a batch, with steps past the lengths or rows after the others, would change a row."""
    steps, batch, size = case.x.shape
    lengths = case.ends()
    x = torch.full((steps + more_steps, batch + more_rows, size), 9.0, dtype=torch.float64)
    x[:steps, :batch] = case.x
    hx = case.state()
    if hx is not None:
        wide = tuple(
            torch.cat((s, s.new_ones(len(s), more_rows, s.shape[-1])), dim=1) for s in case.hx
        )
        hx = wide if case.layer.kind == "lstm" else wide[0]
    resets = None
    if case.resets is not None:
        resets = torch.ones(x.shape[:2], dtype=torch.bool)
        resets[:steps, :batch] = case.resets
    expected = case.run(hx=case.state(), lengths=lengths, resets=case.resets)
    y, *ends = case.run(x, hx, lengths=lengths + [steps + more_steps] * more_rows, resets=resets)
    assert_close([y[:steps, :batch], *(v[:, :batch] for v in ends)], expected)
    assert not y[steps:, :batch].any()


@some
@given(cases(rows=1), st.data())
def test_a_row_alone_gives_what_it_gives_in_the_batch(case, data):
    """A row of a batch would not be what its own sequence gives, cut to its length, as the
    example it is.
    """
    row = data.draw(st.integers(0, case.x.shape[1] - 1))
    length = case.ends()[row]
    assume(length > 0)
    whole = case.run(hx=case.state(), lengths=case.lengths, resets=case.resets)
    resets = None if case.resets is None else case.resets[:length, row : row + 1]
    rows = slice(row, row + 1)
    alone = case.run(case.x[:length, rows], case.state(rows), resets=resets, examples=row)
    assert_close(alone, [whole[0][:length, rows], *(v[:, rows] for v in whole[1:])])


@some
@given(cases(rows=1), st.data())
def test_reordering_a_batch_with_examples_permutes_the_results(case, data):
    """With `examples` given, another order of the batch would change somebody's masks."""
    batch = case.x.shape[1]
    ids = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=batch, max_size=batch))
    order = data.draw(st.permutations(range(batch)))

    expected = case.run(hx=case.state(), lengths=case.lengths, resets=case.resets, examples=ids)
    lengths = None if case.lengths is None else case.lengths[order]
    resets = None if case.resets is None else case.resets[:, order]
    got = case.run(case.x[:, order], case.state(order), lengths=lengths, resets=resets,
                   examples=torch.tensor(ids)[order])  # fmt: skip
    assert_close(got, [v[:, order] for v in expected])


@some
@given(cases(rows=2), st.data())
def test_splitting_a_batch_with_examples_equals_the_whole(case, data):
    """With `examples` given, processes that share a batch would draw other masks than one
    process.
    """
    batch = case.x.shape[1]
    cut = data.draw(st.integers(1, batch - 1))
    first = data.draw(st.integers(0, 2**32 - batch))
    expected = case.run(hx=case.state(), lengths=case.lengths, resets=case.resets, examples=first)
    parts = []
    for rows in (slice(0, cut), slice(cut, batch)):
        lengths = None if case.lengths is None else case.lengths[rows]
        resets = None if case.resets is None else case.resets[:, rows]
        start = first + rows.start
        forms = [start, torch.tensor(start), list(range(start, first + rows.stop))]
        options = {
            "lengths": lengths,
            "resets": resets,
            "examples": data.draw(st.sampled_from(forms)),
        }
        parts.append(case.run(case.x[:, rows], case.state(rows), **options))
    assert_close([torch.cat(two, dim=1) for two in zip(*parts, strict=True)], expected)


@pytest.mark.parametrize("first", [0, 5, 2**32 - 4])
def test_examples_as_an_offset_or_as_ids(first):
    """An offset in a tensor would mean other rows than the ids it stands for, near the end of 32
    bits.
    """
    layer = zo.GRU(2, 8, noise=zo.Zoneout(hidden=0.5))
    x = torch.ones(6, 4, 2)
    ids = layer(x, seed=1, examples=torch.arange(first, first + 4))[0]
    assert torch.equal(layer(x, seed=1, examples=torch.tensor(first))[0], ids)


@pytest.mark.parametrize(
    "given", [torch.tensor([3, 2**32 + 5, -1, 7]), torch.tensor(2**32 - 2)], ids=["ids", "offset"]
)
def test_examples_that_cannot_be_looked_at(given):
    """Where nobody can look at a tensor, an id would be a counter of more than 32 bits, which no
    kernel has.
    """
    layer = zo.GRU(2, 8, noise=zo.Zoneout(hidden=0.5))
    x = torch.ones(6, 4, 2)
    (y,) = torch.func.vmap(lambda ids: layer(x, seed=1, examples=ids)[0])(given[None])
    ids = given if given.dim() else given + torch.arange(4)
    assert torch.equal(y, layer(x, seed=1, examples=ids & 0xFFFFFFFF)[0])


@some
@given(cases(rows=1, plain=True, chunks=True), st.data())
def test_chunks_equal_the_whole(case, data):
    """A text run in pieces, with the state carried and `first_step` counted on, would draw other
    masks.
    """
    steps = len(case.x)
    offset = data.draw(st.integers(0, 1000))
    cuts = sorted(data.draw(st.sets(st.integers(1, steps - 1)))) if steps > 1 else []
    expected = case.run(hx=case.state(), first_step=offset)
    hx, ys, ends = case.state(), [], []
    for start, end in zip([0, *cuts], [*cuts, steps], strict=True):
        y, *ends = case.run(case.x[start:end], hx, first_step=offset + start)
        ys.append(y)
        hx = tuple(ends) if case.layer.kind == "lstm" else ends[0]
    assert_close([torch.cat(ys), *ends], expected)


@pytest.mark.parametrize("training", [True, False])
@some
@given(case=cases(rows=1, plain=True, chunks=True, layers=1))
def test_cells_are_layers_of_one_step(training, case):
    """A cell would not take the step that its layer takes, whatever the noise."""
    layer = case.layer.train(training)
    assume(layer.output_size == layer.hidden_size)  # torch's cells have no projection
    options: dict[str, Any] = {"nonlinearity": layer.nonlinearity} if layer.kind == "rnn" else {}
    cell = {"lstm": zo.LSTMCell, "gru": zo.GRUCell, "rnn": zo.RNNCell}[layer.kind](
        layer.input_size,
        layer.hidden_size,
        layer.bias,
        noise=layer.noise,
        dtype=torch.float64,
        **options,
    ).train(training)
    cell.load_state_dict(
        {name.removesuffix("_l0"): value for name, value in layer.state_dict().items()}
    )
    y, *_ = case.run(hx=case.state())
    state = None if case.hx is None else tuple(s[0] for s in case.hx)
    hx = state if layer.kind == "lstm" or state is None else state[0]
    for t, row in enumerate(case.x):
        hx = cell(row, hx, seed=case.seed, step=t)
        torch.testing.assert_close(hx[0] if layer.kind == "lstm" else hx, y[t], **CLOSE)


# --- masks of any size ----------------------------------------------------------------------------


@some
@given(
    kind=st.sampled_from(["unit", "shared", "step", "sequence", "static"]),
    sizes=st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(1, 11)),
    more=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 5)),
    seed=seeds,
    layer=st.integers(0, 40),
    direction=st.integers(0, 1),
)
def test_masks_of_a_larger_whole_contain_those_of_a_part(kind, sizes, more, seed, layer, direction):
    """A mask would depend on how many steps, rows or units there are besides its own."""
    noise = zo.Zoneout(cell=0.5, hidden=0.5, mask=kind, seed=8 if kind == "static" else None)
    where = {"layer": layer, "direction": direction}
    (t, b, h), (dt, db, dh) = sizes, more
    part = zo.masks(noise, seed, t, b, h, first_step=dt, examples=db, **where)
    whole = zo.masks(noise, seed, t + dt, b + db, h + dh, **where)
    for stream in ("cell", "hidden"):
        assert part[stream].shape == (t, b, h) and part[stream].dtype == torch.bool
        assert torch.equal(part[stream], whole[stream][dt:, db:, :h])
