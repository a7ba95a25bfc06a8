"""Layer norm and recurrent batch norm: what is normalised, and what is remembered of it.

That whole normalised layers compute what the equations say is in `test_oracle.py`; here are the
details, and everything about the statistics.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import zoneout as zo

KINDS = ("lstm", "gru", "rnn")
CLASSES: dict[str, Any] = {"lstm": zo.LSTM, "gru": zo.GRU, "rnn": zo.RNN}
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
T, B, I, H = 4, 5, 3, 2
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, norm: Any, randomise: bool = True, **options: Any) -> Any:
    """A float64 layer; randomised, its statistics too are anything but what they start as."""
    layer = CLASSES[kind](
        I, options.pop("hidden_size", H), norm=norm, dtype=torch.float64, **options
    )
    generator = torch.Generator().manual_seed(31)
    for name, value in layer.state_dict().items() if randomise else ():
        random = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        value.copy_(random.abs() + 0.5 if name.startswith("var_") else random)
    return layer


def data(steps: int = T, batch: int = B, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, batch, I, dtype=torch.float64, generator=generator)


def statistics(layer: Any) -> dict[str, torch.Tensor]:
    return {n: v.clone() for n, v in layer.state_dict().items() if n.startswith(("mean_", "var_"))}


def seen_by_oracle(layer: Any, x: torch.Tensor, **call: Any) -> dict[str, dict[int, np.ndarray]]:
    """What is kept of a batch by name of statistic and processed step: mean and unbiased variance,
    where there is one.

    The layer stands in training mode.
    """
    want = oracle.expected(layer, x.numpy(), **call)
    alive = [
        sum(n > p for n in call.get("lengths") or [len(x)] * x.shape[1]) for p in range(len(x))
    ]
    out = {}
    for suffix, seen in zip(layer.suffixes(), want.seen, strict=True):
        for what, name in (("x", "ih"), ("h", "hh"), ("c", "cell")):
            for which, moment in enumerate(("mean", "var")):
                if seen[what]:
                    out[f"{moment}_{name}{suffix}"] = {
                        p: pair[which] * (alive[p] / (alive[p] - 1) if moment == "var" else 1)
                        for p, pair in seen[what].items()
                        if alive[p] > 1
                    }
    return out


def make_biased(layer: Any, alive: list[int]) -> None:
    """Variances that were kept of steps with so many alive become those that a batch is
    normalised by.
    """
    for name, value in layer.named_buffers():
        if name.startswith("var_"):
            n = torch.tensor(alive, dtype=torch.float64)[:, None]
            value[: len(alive)] *= (n - 1) / n


# --- parameters and how they start ----------------------------------------------------------------


@every_kind
@pytest.mark.parametrize(
    "norm, scale", [("layer", 1.0), (zo.RecurrentBatchNorm(3), 0.1)], ids=["layer", "batch"]
)
def test_scales_and_shifts_start(kind, norm, scale):
    """A scale does not start at 0.1 (layer norm: 1), the cell's shift not at 0, or one is
    missing.
    """
    layer = make(kind, norm, randomise=False, num_layers=2, bidirectional=True)
    for suffix in ("_l0", "_l0_reverse", "_l1", "_l1_reverse"):
        for name in ("norm_ih", "norm_hh"):
            value = layer.get_parameter(name + suffix)
            assert value.shape == (GATES[kind] * H,)
            assert (value == scale).all()
        if kind == "lstm":
            assert layer.get_parameter("norm_cell" + suffix).tolist() == [scale] * H
            assert layer.get_parameter("norm_cell_shift" + suffix).tolist() == [0.0] * H
    assert (kind == "lstm") == any("norm_cell" in name for name, _ in layer.named_parameters())


@every_kind
def test_statistics_start(kind):
    """Statistics are not kept per step, do not start at mean 0 and variance 1, or are trained."""
    layer = make(kind, zo.RecurrentBatchNorm(steps=7), randomise=False)
    kept = statistics(layer)
    names = ["ih", "hh"] + (["cell"] if kind == "lstm" else [])
    assert set(kept) == {f"{moment}_{name}_l0" for moment in ("mean", "var") for name in names}
    for name, value in kept.items():
        assert value.shape == (7, H if "cell" in name else GATES[kind] * H)
        assert (value == (1 if name.startswith("var") else 0)).all()
        assert not getattr(layer, name).requires_grad
        assert name not in dict(layer.named_parameters())


def test_other_settings():
    """`scale` or `eps` of a RecurrentBatchNorm is ignored."""
    layer = make("lstm", zo.RecurrentBatchNorm(steps=2, scale=0.7, eps=0.5), randomise=False)
    assert layer.norm_ih_l0.tolist() == [0.7] * 4 * H
    layer.train()
    want = oracle.expected(layer, data(2).numpy())
    np.testing.assert_allclose(layer(data(2))[0].detach().numpy(), want.y, rtol=1e-11)


@pytest.mark.parametrize("norm", ["layer", zo.RecurrentBatchNorm(steps=3)], ids=["layer", "batch"])
def test_reset_parameters(norm):
    """`reset_parameters` leaves scales, shifts or statistics as training made them."""
    layer, fresh = make("lstm", norm), make("lstm", norm, randomise=False)
    layer.reset_parameters()
    for name, value in fresh.state_dict().items():
        if name.startswith(("norm_", "mean_", "var_")):
            assert torch.equal(layer.state_dict()[name], value), name


@pytest.mark.parametrize(
    "settings, names, came",
    [
        (dict(steps=0), "steps", "0"),
        (dict(steps=-3), "steps", "-3"),
        (dict(steps=2.0), "steps", "2.0"),
        (dict(steps=True), "steps", "True"),
        (dict(steps=3, momentum=-0.1), "momentum", "-0.1"),
        (dict(steps=3, momentum=1.5), "momentum", "1.5"),
        (dict(steps=3, momentum=float("nan")), "momentum", "nan"),
        (dict(steps=3, at_eval="sometimes"), "at_eval", "sometimes"),
    ],
)
def test_bad_settings(settings, names, came):
    """A RecurrentBatchNorm that cannot work is accepted, or the error does not say what is
    wrong.
    """
    with pytest.raises(ValueError, match=rf"{names}.*expected.*got.*{came}"):
        zo.RecurrentBatchNorm(**settings)


@pytest.mark.parametrize(
    "norm", ["batch", "Layer", 3, True, nn.LayerNorm(4), zo.RecurrentBatchNorm]
)
def test_bad_norms(norm):
    """A norm that is none is accepted, or the error does not name the argument."""
    with pytest.raises(ValueError, match=r"norm: expected.*got"):
        zo.LSTM(I, H, norm=norm)


# --- layer norm -----------------------------------------------------------------------------------


@every_kind
def test_layer_norm_knows_one_example(kind):
    """Layer norm takes moments over more than one example: a row's output depends on its batch."""
    layer = make(kind, "layer")
    x = data()
    alone = torch.cat([layer(x[:, b : b + 1])[0] for b in range(B)], dim=1)
    torch.testing.assert_close(alone, layer(x)[0], rtol=1e-12, atol=1e-12)


@every_kind
def test_layer_norm_is_over_all_gates_together(kind):
    """Layer norm is taken gate by gate: what is done to one gate of x·Wx alone would be undone."""
    hidden = 4
    layer = make(kind, "layer", hidden_size=hidden)
    x = data()
    with torch.no_grad():
        layer.weight_ih_l0.mul_(1e6)  # so that eps does not count
        before = layer(x)[0]
        layer.weight_ih_l0.mul_(3.0).add_(
            1e6 * data(1, 1, seed=2)[0]
        )  # the same for every row of Wx
        torch.testing.assert_close(layer(x)[0], before, rtol=0, atol=1e-9)
        layer.weight_ih_l0[: hidden if kind != "rnn" else 2].mul_(3.0)  # one gate alone
        assert not torch.allclose(layer(x)[0], before, rtol=0, atol=1e-3)


def test_layer_norm_shift_of_the_gates_is_the_bias():
    """The products are shifted by something else than the LSTM's bias, or the bias is normalised
    away.
    """
    layer = make("lstm", "layer")
    with torch.no_grad():
        for name in ("norm_ih_l0", "norm_hh_l0", "bias_hh_l0", "norm_cell_l0"):
            getattr(layer, name).zero_()
        layer.norm_cell_shift_l0.copy_(torch.tensor([0.3, -0.2]))
        _, (h, c) = layer(data(1))
    i, _, g, o = layer.bias_ih_l0.detach().chunk(4)
    torch.testing.assert_close(c[0], (i.sigmoid() * g.tanh()).expand(B, H))
    shown = torch.tensor([0.3, -0.2], dtype=torch.float64).tanh()  # all that is left of c in h
    torch.testing.assert_close(h[0], (o.sigmoid() * shown).expand(B, H))


# --- what batch norm normalises -------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["layer", zo.RecurrentBatchNorm(steps=1)], ids=["layer", "batch"])
def test_the_raw_cell_is_carried(norm):
    """The normalised c is carried instead of the raw one: its scale then enters c itself."""
    layer = make("lstm", norm)
    x = data(1)
    _, (h, c), cells = layer(x, return_cells=True)
    with torch.no_grad():
        layer.norm_cell_l0.mul_(5)
        layer.norm_cell_shift_l0.add_(1)
    _, (h_other, c_other), cells_other = layer(x, return_cells=True)
    assert torch.equal(c, c_other) and torch.equal(cells, cells_other)
    assert not torch.allclose(h, h_other)


@pytest.mark.parametrize("hidden", [0.0, 0.3])
def test_the_candidate_cell_is_normalised_before_zoning_out(hidden):
    """Batch norm sees the zoned c, not the candidate: its statistics and h are then those of the
    old c.
    """
    layer = make("lstm", zo.RecurrentBatchNorm(steps=1, momentum=1.0))
    x, h0 = (
        data(1),
        torch.randn(1, B, H, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    c0 = 3 + h0.flip(1)
    y, _, candidate = layer(x, (h0, c0), return_cells=True)  # without noise c is the candidate
    mean, var = candidate[0].mean(0), candidate[0].var(0)
    torch.testing.assert_close(layer.mean_cell_l0[0], mean)

    layer.noise = zo.Zoneout(cell=1.0, hidden=hidden)  # now every unit of c keeps c0
    zoned, (_, c) = layer(x, (h0, c0), seed=5)
    assert torch.equal(c, c0)
    torch.testing.assert_close(layer.mean_cell_l0[0], mean)
    torch.testing.assert_close(layer.var_cell_l0[0], var)
    kept = zo.masks(layer.noise, 5, 1, B, H)["hidden"]
    torch.testing.assert_close(zoned, torch.where(kept, h0, y))

    layer.noise = zo.StateDropout(cell=1.0)  # but a candidate that is set to zero is seen as zero
    layer(x, (h0, c0), seed=5)
    assert (layer.mean_cell_l0 == 0).all() and (layer.var_cell_l0 == 0).all()


@every_kind
def test_one_example_alone(kind):
    """Batch norm learns from one example, all of whose numbers become zero, or a step that one
    is left at fails.
    """
    layer = make(kind, zo.RecurrentBatchNorm(steps=T))
    for x in (data(batch=1), data()[:, 0]):
        with pytest.raises(ValueError, match=r"input: expected at least 2 sequences .* got 1"):
            layer(x)
    with pytest.raises(ValueError, match=r"input: expected at least 2 sequences .* got 1"):
        zo.estimate_statistics(layer, [data(batch=1)])
    assert layer.training and layer.eval()(data(batch=1))[0].isfinite().all()
    layer.train()
    x = data(batch=2).requires_grad_()
    y, _ = layer(x, lengths=[T, 1])
    y.sum().backward()
    assert y.isfinite().all() and x.grad is not None and x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@every_kind
def test_nobody_at_all(kind):
    """A batch of no examples, or of sequences of length 0, fails or moves the statistics."""
    layer = make(kind, zo.RecurrentBatchNorm(steps=T, momentum=0.5))
    before = statistics(layer)
    assert layer(data(batch=0))[0].shape == (T, 0, H)
    y, _ = layer(data(), lengths=[0] * B)
    assert (y == 0).all()
    for name, value in statistics(layer).items():
        assert torch.equal(value, before[name]), name


# --- running averages -----------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("first_step", [0, 2])
@pytest.mark.parametrize(
    "options", [{}, dict(num_layers=2, bidirectional=True)], ids=["one", "stack"]
)
@pytest.mark.parametrize("lengths", [None, [2, 4, 1, 3, 0]], ids=["full", "ragged"])
def test_running_averages(kind, lengths, options, first_step):
    """Running averages miss a step, do not move by the momentum, or take a biased variance or
    that of one example.
    """
    momentum, steps = 0.25, 5
    layer = make(kind, zo.RecurrentBatchNorm(steps=steps, momentum=momentum), **options)
    call: dict[str, Any] = dict(lengths=lengths, first_step=first_step)
    seen = seen_by_oracle(layer, data(), **call)
    want = statistics(layer)
    assert set(seen) == set(want)
    for name, by_step in seen.items():
        for (
            p,
            value,
        ) in by_step.items():  # only where two are alive; beyond the rows that are kept, nowhere
            if first_step + p < steps:
                row = want[name][first_step + p]
                row.copy_((1 - momentum) * row + momentum * torch.as_tensor(value))
    layer(data(), **call)
    for name, moved in statistics(layer).items():
        torch.testing.assert_close(moved, want[name], rtol=1e-11, atol=1e-12, msg=name)


def test_variance_is_unbiased_by_hand():
    """The variance that is kept divides by n, or what a batch is normalised by does not."""
    layer = make("rnn", zo.RecurrentBatchNorm(steps=2, momentum=1.0))
    x = data(2)
    layer(x)
    products = (x @ layer.weight_ih_l0.T).detach()
    torch.testing.assert_close(layer.mean_ih_l0, products.mean(1))
    torch.testing.assert_close(layer.var_ih_l0, products.var(1))


def test_statistics_of_few_and_ragged_examples_are_those_of_all():
    """Batches in which few are alive pull the running variance down: evaluation would not be
    what was trained.
    """
    layer = make("rnn", zo.RecurrentBatchNorm(steps=T, momentum=0.02), randomise=False)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _ in range(600):
            lengths = torch.randint(1, T + 1, (3,), generator=generator)
            lengths[0] = T
            layer(torch.randn(T, 3, I, dtype=torch.float64, generator=generator), lengths=lengths)
    true = layer.weight_ih_l0.detach().square().sum(1)
    torch.testing.assert_close(
        layer.var_ih_l0 / true, torch.ones(T, H, dtype=torch.float64), rtol=0.27, atol=0
    )


def test_only_the_living_are_counted():
    """Padding enters the moments of a step."""
    layer = make("lstm", zo.RecurrentBatchNorm(steps=T, momentum=1.0), bidirectional=True)
    other, before = copy.deepcopy(layer), statistics(layer)
    lengths = torch.tensor([4, 2, 1, 3, 2])
    x = data()
    dead = torch.arange(T)[:, None] >= lengths
    torch.testing.assert_close(
        layer(x, lengths=lengths)[0],
        other(x.masked_fill(dead[..., None], 50.0), lengths=lengths)[0],
    )
    for name, value in statistics(layer).items():
        torch.testing.assert_close(value, statistics(other)[name], rtol=1e-11, atol=1e-12, msg=name)
    for name, value in statistics(layer).items():  # one example alive at the last step
        assert torch.equal(value[3], before[name][3]) and not torch.equal(value[2], before[name][2])


def test_reverse_statistics_are_of_processed_steps():
    """The backward direction's statistics are indexed by position, not by what is processed
    together.
    """
    layer = make("lstm", zo.RecurrentBatchNorm(steps=T, momentum=1.0), bidirectional=True)
    x, lengths = data(), [4, 2, 1, 3, 2]
    layer(x, lengths=lengths)
    first = torch.stack([x[n - 1, b] for b, n in enumerate(lengths)])  # processed first: the ends
    products = (first @ layer.weight_ih_l0_reverse.T).detach()
    torch.testing.assert_close(layer.mean_ih_l0_reverse[0], products.mean(0))
    second = torch.stack([x[n - 2, b] for b, n in enumerate(lengths) if n > 1])
    products = (second @ layer.weight_ih_l0_reverse.T).detach()
    torch.testing.assert_close(layer.mean_ih_l0_reverse[1], products.mean(0))
    torch.testing.assert_close(layer.var_ih_l0_reverse[1], products.var(0))


@every_kind
def test_evaluation_moves_nothing(kind):
    """Statistics move in evaluation mode, with the running statistics or with the batch's own."""
    for at_eval in ("running", "batch"):
        layer = make(kind, zo.RecurrentBatchNorm(steps=T, at_eval=at_eval)).eval()
        before = statistics(layer)
        layer(data())
        for name, value in statistics(layer).items():
            assert torch.equal(value, before[name])


@every_kind
def test_batch_statistics_at_evaluation(kind):
    """`at_eval="batch"` uses something else than the batch's own statistics, as training does."""
    layer = make(kind, zo.RecurrentBatchNorm(steps=T, at_eval="batch"))
    before = statistics(layer)
    trained = layer(data())[0]
    layer.load_state_dict(layer.state_dict() | before)
    assert torch.equal(layer.eval()(data())[0], trained)
    layer.norm = zo.RecurrentBatchNorm(steps=T)
    assert not torch.allclose(layer(data())[0], trained)


@every_kind
def test_converged_statistics_are_the_batch_s(kind):
    """Evaluation with the statistics of a batch is not what training computed on it."""
    layer = make(kind, zo.RecurrentBatchNorm(steps=T, momentum=1.0), bidirectional=True)
    lengths = [4, 4, 1, 3, 2]
    y, _ = layer(data(), lengths=lengths)
    make_biased(layer, [5, 4, 3, 2])
    torch.testing.assert_close(layer.eval()(data(), lengths=lengths)[0], y, rtol=1e-11, atol=1e-12)


@every_kind
def test_last_statistics_are_used_again_beyond_the_trained_length(kind):
    """Past the last step whose statistics are kept, others are used than that step's."""
    short = make(kind, zo.RecurrentBatchNorm(steps=2)).eval()
    long = make(kind, zo.RecurrentBatchNorm(steps=6)).eval()
    state = short.state_dict()
    for name, value in statistics(short).items():
        state[name] = value[torch.tensor([0, 1, 1, 1, 1, 1])]
    long.load_state_dict(state)
    assert torch.equal(short(data(6))[0], long(data(6))[0])
    assert torch.equal(short(data(), first_step=9)[0], long(data(), first_step=5)[0])


@every_kind
def test_a_text_in_pieces(kind):
    """`first_step` does not choose the statistics: a text evaluated in pieces gives other
    numbers.
    """
    layer = make(kind, zo.RecurrentBatchNorm(steps=5)).eval()
    x = data(6)
    whole, _ = layer(x)
    first, state = layer(x[:2])
    second, _ = layer(x[2:], state, first_step=2)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-12, atol=1e-12)


def test_training_beyond_the_last_kept_step():
    """A training sequence longer than `steps` fails, or its later steps move the last
    statistics.
    """
    layer = make("gru", zo.RecurrentBatchNorm(steps=2, momentum=0.5))
    other = copy.deepcopy(layer)
    layer(data(T))
    other(data(T)[:2])
    for name, value in statistics(layer).items():
        torch.testing.assert_close(value, statistics(other)[name], rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_cells_have_statistics_of_their_step(kind):
    """A cell moves or uses the statistics of another step than it is told, or does not need to
    be told.
    """
    classes: dict[str, Any] = {"lstm": zo.LSTMCell, "gru": zo.GRUCell, "rnn": zo.RNNCell}
    norm = zo.RecurrentBatchNorm(steps=T, momentum=0.5)
    layer = make(kind, norm)
    cell = classes[kind](I, H, norm=norm, dtype=torch.float64)
    cell.load_state_dict(
        {name.removesuffix("_l0"): value for name, value in layer.state_dict().items()}
    )
    for module in (layer, cell):
        module.train()
    for _ in range(2):
        y, _ = layer(data())
        state, outputs = None, []
        for t, x_t in enumerate(data()):
            state = cell(x_t, state, step=t)
            outputs.append(state[0] if kind == "lstm" else state)
        torch.testing.assert_close(torch.stack(outputs), y, rtol=1e-12, atol=1e-12)
        for name, value in statistics(layer).items():
            torch.testing.assert_close(cell.get_buffer(name.removesuffix("_l0")), value)
        layer.eval()
        cell.eval()
    with pytest.raises(ValueError, match=r"step: expected"):
        cell(data()[0])


# --- estimating anew ------------------------------------------------------------------------------


class Model(nn.Module):
    """Something around two layers, in mixed modes, as a user might have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = make(
            "lstm", zo.RecurrentBatchNorm(steps=T), noise=zo.Zoneout(cell=0.3, hidden=0.3)
        )
        self.bridge = nn.Sequential(nn.Linear(H, I, dtype=torch.float64), nn.Dropout(0.5))
        self.second = make("gru", zo.RecurrentBatchNorm(steps=T + 1, momentum=0.3, at_eval="batch"))
        self.plain = make("rnn", "layer")
        self.bridge.eval()
        self.second.eval()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = self.second(self.bridge(self.first(x * scale)[0]))[0]
        return y


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    """Everything that must be as it was."""
    modes = [m.training for m in model.modules()]
    norms = [getattr(m, "norm", None) for m in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    others = [getattr(m, "recording", None) for m in model.modules()]
    return modes, norms, others, state


def check_same(model: nn.Module, before: tuple[Any, ...], but_statistics: bool = False) -> None:
    now = snapshot(model)
    assert now[:3] == before[:3]
    for name, value in now[3].items():
        statistic = name.split(".")[-1].startswith(("mean_", "var_"))
        assert (but_statistics and statistic) or torch.equal(value, before[3][name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_estimate_is_the_average(kind):
    """Estimated statistics are not the plain average over the batches, or remember the old ones."""
    layer = make(kind, zo.RecurrentBatchNorm(steps=T, momentum=0.01), bidirectional=True).eval()
    batches = [data(seed=s) for s in range(5)]
    layer.train()
    seen = [seen_by_oracle(layer, x) for x in batches]
    layer.eval()
    assert zo.estimate_statistics(layer, batches) == 5
    for name, value in statistics(layer).items():
        want = np.mean([[one[name][p] for p in range(T)] for one in seen], axis=0)
        np.testing.assert_allclose(value.numpy(), want, rtol=1e-11, atol=1e-12, err_msg=name)


def test_estimate_of_one_batch_makes_evaluation_its_own():
    """Evaluation after an estimate from one batch is not what the batch's own statistics give."""
    model = Model()
    model.second.norm = zo.RecurrentBatchNorm(steps=T + 1)
    zo.estimate_statistics(model, [data()])
    model.eval()
    for layer in (model.first, model.second):
        make_biased(layer, [B] * T)
    running = model(data())
    model.first.norm = zo.RecurrentBatchNorm(steps=T, at_eval="batch")
    model.second.norm = zo.RecurrentBatchNorm(steps=T + 1, at_eval="batch")
    torch.testing.assert_close(model(data()), running, rtol=1e-10, atol=1e-11)


def test_estimate_says_what_labels_are_taken_for():
    """A loader of pairs gives an error of states, and nobody knows which."""
    layer = zo.GRU(3, 4, norm=zo.RecurrentBatchNorm(5))
    with pytest.raises(ValueError, match="hx") as caught:
        zo.estimate_statistics(layer, [(torch.randn(5, 4, 3), torch.zeros(4))])
    assert "(x for x, _ in batches)" in caught.value.__notes__[0]


def test_estimate_puts_everything_back():
    """An estimate leaves another mode or norm behind, moves a parameter, or records gradients."""
    model = Model()
    before = snapshot(model)
    random = torch.get_rng_state()
    assert (
        zo.estimate_statistics(model, iter([(data(seed=1), 0.5), [data(seed=2)], data(seed=3)]))
        == 3
    )
    check_same(model, before, but_statistics=True)
    assert torch.equal(torch.get_rng_state(), random)  # evaluation: no noise is drawn
    assert not torch.equal(model.first.mean_ih_l0, before[3]["first.mean_ih_l0"])
    assert all(p.grad is None for p in model.parameters())
    assert not any(v.requires_grad for v in statistics(model.first).values())
    model.first(data())  # and training goes on as before
    assert model.first.recording is None


def test_estimate_unpacks_tuples():
    """A batch that is a tuple does not become the model's arguments."""
    one = Model()
    two = copy.deepcopy(one)
    zo.estimate_statistics(one, [(data(), 2.0)])
    zo.estimate_statistics(two, [2.0 * data()])
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


@pytest.mark.parametrize("where", ["iterator", "model", "interrupt"])
def test_estimate_that_fails_changes_nothing(where):
    """After an error in data or model, statistics are half estimated, or a mode or norm is lost."""
    model = Model()
    before = snapshot(model)

    def batches() -> Iterator[torch.Tensor]:
        yield data(seed=1)
        yield data(seed=2)
        if where == "iterator":
            raise OSError("disk")
        if where == "interrupt":
            raise KeyboardInterrupt
        yield data(seed=3)[..., :-1]

    error = {"iterator": OSError, "model": ValueError, "interrupt": KeyboardInterrupt}[where]
    with pytest.raises(error):
        zo.estimate_statistics(model, batches())
    check_same(model, before)


def test_estimate_from_nothing():
    """No batches at all is not an error, or it wipes the statistics."""
    model = Model()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"batches: expected at least one batch, got none"):
        zo.estimate_statistics(model, [])
    check_same(model, before)


def test_estimate_without_batch_norm():
    """A model without a recurrent batch norm is taken in silence."""
    with pytest.raises(ValueError, match=r"model: expected.*RecurrentBatchNorm.*found none"):
        zo.estimate_statistics(nn.Sequential(zo.LSTM(I, H, norm="layer")), [data()])


def test_estimate_over_batches_of_several_lengths():
    """A step that a batch did not reach keeps something of the old statistics in its average."""
    layer = make("rnn", zo.RecurrentBatchNorm(steps=T))
    batches = [data(2, seed=1), data(T, seed=2), data(3, seed=3)]
    zo.estimate_statistics(layer, batches)
    for p in range(T):
        reached = [x[p] @ layer.weight_ih_l0.T.detach() for x in batches if len(x) > p]
        want = torch.stack([v.mean(0) for v in reached]).mean(0)
        torch.testing.assert_close(layer.mean_ih_l0[p], want, msg=f"step {p}")


def test_estimate_over_ragged_batches():
    """A step at which nobody in a batch was alive keeps something of the old statistics in its
    average.
    """

    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make("rnn", zo.RecurrentBatchNorm(steps=T))

        def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
            return self.layer(x, lengths=lengths)[0]

    model = Ragged()
    x = data()
    zo.estimate_statistics(model, [(x, [1, 2, 2, 1, 1]), (x, [4, 4, 4, 4, 4])])
    products = (x @ model.layer.weight_ih_l0.T).detach()
    torch.testing.assert_close(model.layer.mean_ih_l0[2:], products[2:].mean(1))
    torch.testing.assert_close(model.layer.var_ih_l0[2:], products[2:].var(1))


def test_estimate_of_a_layer_that_is_used_twice():
    """A layer called twice for a batch counts only one of the calls in its average."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make("rnn", zo.RecurrentBatchNorm(steps=T))

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.layer(a)[0] + self.layer(b)[0]

    model = Twice()
    pairs = [(data(seed=1), data(seed=2)), (data(seed=3), data(seed=4))]
    zo.estimate_statistics(model, pairs)
    means = [(x @ model.layer.weight_ih_l0.T).detach().mean(1) for pair in pairs for x in pair]
    torch.testing.assert_close(model.layer.mean_ih_l0, torch.stack(means).mean(0))


def test_estimate_over_packed_batches():
    """A PackedSequence, which is a tuple to Python, is torn apart instead of being given to the
    model.
    """
    layer, padded = (make("rnn", zo.RecurrentBatchNorm(steps=T)) for _ in range(2))
    lengths = torch.tensor([4, 2, 1, 3, 2])
    packed = pack_padded_sequence(data(), lengths, enforce_sorted=False)
    assert zo.estimate_statistics(layer, [packed]) == 1
    padded.norm = zo.RecurrentBatchNorm(steps=T, momentum=1.0)
    padded(data(), lengths=lengths)
    torch.testing.assert_close(layer.mean_ih_l0, padded.mean_ih_l0)


# --- round trips ----------------------------------------------------------------------------------


@every_kind
def test_state_dict_carries_the_statistics(kind):
    """Statistics are lost on the way through a file: a restored model evaluates with others."""
    norm = zo.RecurrentBatchNorm(steps=T)
    layer = make(kind, norm, num_layers=2, bidirectional=True)
    layer(data())
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    restored = make(kind, norm, randomise=False, num_layers=2, bidirectional=True)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(restored.eval()(data())[0], layer.eval()(data())[0])


def test_copies_have_statistics_of_their_own():
    """A deep copy goes on moving its original's statistics."""
    layer = make("lstm", zo.RecurrentBatchNorm(steps=T))
    twin = copy.deepcopy(layer)
    before = statistics(layer)
    twin(data())
    for name, value in statistics(layer).items():
        assert torch.equal(value, before[name])
        assert not torch.equal(value, statistics(twin)[name])


@pytest.mark.parametrize("norm", ["layer", zo.RecurrentBatchNorm(steps=T)], ids=["layer", "batch"])
def test_dtype_moves_with_the_layer(norm):
    """Scales or statistics stay behind when a layer changes its dtype."""
    layer = make("lstm", norm)
    y = layer.eval()(data())[0]
    single = copy.deepcopy(layer).float()
    assert {v.dtype for v in single.state_dict().values()} == {torch.float32}
    torch.testing.assert_close(single(data().float())[0], y.float(), rtol=1e-4, atol=1e-4)


def test_statistics_of_a_model_that_keeps_its_norm():
    """A model that has the setting as an attribute of its own passes for a layer."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = zo.RecurrentBatchNorm(4)
            self.rnn = zo.GRU(3, 5, norm=self.norm)

        def forward(self, x):
            return self.rnn(x)[0]

    assert zo.estimate_statistics(Model(), [torch.randn(4, 8, 3)]) == 1


def test_statistics_of_batches_with_names():
    """A batch in a dict, as tokenizers give it, is counted and not run."""
    layer = zo.LSTM(3, 5, norm=zo.RecurrentBatchNorm(steps=4))
    other = zo.LSTM(3, 5, norm=zo.RecurrentBatchNorm(steps=4))
    other.load_state_dict(layer.state_dict())
    batches = [torch.randn(4, 8, 3) for _ in range(2)]
    assert zo.estimate_statistics(layer, [{"input": x} for x in batches]) == 2
    zo.estimate_statistics(other, batches)
    for name, value in layer.named_buffers():
        assert torch.equal(value, other.get_buffer(name)) and value.any(), name
