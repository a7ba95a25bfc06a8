"""The models: what they compute, how they start, and what their draws depend on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zoneout as zo
from zoneout.paper.experiments.recipes import RECIPES
from zoneout.paper.training.config import (
    Config,
    Data,
    Evaluation,
    Model,
    RecurrentDropout,
    StateDropout,
    VariationalDropout,
    Zoneout,
)
from zoneout.paper.training.models import build, loss_of, noises, parameters_of

SYMBOLS = 11
TOKENS = torch.randint(0, SYMBOLS, (7, 4), generator=torch.Generator().manual_seed(0))
IMAGES = Config(data=Data("mnist"), model=Model(hidden=6))


def model_of(**model: Any) -> Any:
    return build(Config(model=Model(**{"hidden": 6, "embedding": 0, **model})), SYMBOLS)


def test_one_hot_input_is_what_torch_computes_from_one_hot_rows() -> None:
    model = model_of(layers=2).eval()
    theirs = nn.LSTM(SYMBOLS, 6, 2)
    theirs.load_state_dict(model.recurrent.state_dict())
    y, _ = theirs(F.one_hot(TOKENS, SYMBOLS).float())
    torch.testing.assert_close(model(TOKENS).logits, model.softmax(y))


def test_a_bias_inside_the_output_starts_at_zero_and_is_added_to_c() -> None:
    """The row with the authors' bias would be another model, or would not begin like the LSTM."""
    plain, biased = model_of().eval(), model_of(output_bias=True).eval()
    layer = biased.recurrent
    assert layer.out_bias_l0.requires_grad and not layer.out_bias_l0.any()
    layer.load_state_dict(plain.recurrent.state_dict(), strict=False)
    y, (h, c) = layer(TOKENS[:1])
    torch.testing.assert_close(y, plain.recurrent(TOKENS[:1])[0])
    with torch.no_grad():
        layer.out_bias_l0.fill_(0.3)
    z, (_, d) = layer(TOKENS[:1])
    o = h / c.tanh()  # the output gate of the one step
    torch.testing.assert_close(d, c)
    torch.testing.assert_close(z, o * (c + 0.3).tanh())


def test_an_embedding_is_looked_up() -> None:
    model = model_of(embedding=5).eval()
    y, _ = model.recurrent(model.embedding(TOKENS))
    torch.testing.assert_close(model(TOKENS).logits, model.softmax(y))


def test_a_tied_softmax_is_the_embedding() -> None:
    model = model_of(embedding=6, tied=True).eval()
    assert model.softmax.weight is model.embedding.weight
    assert "softmax.weight" not in parameters_of(model)
    y, _ = model.recurrent(model.embedding(TOKENS))
    torch.testing.assert_close(
        model(TOKENS).logits, y @ model.embedding.weight.T + model.softmax.bias
    )


def test_the_classifier_sees_the_last_hidden_state() -> None:
    model = build(IMAGES).eval()
    x = torch.rand(20, 3, 1)
    y, _ = model.recurrent(x)
    torch.testing.assert_close(model(x).logits, model.softmax(y[-1]))


def test_a_text_in_pieces_is_the_text() -> None:
    model = model_of(layers=2, learn_initial_state=True).eval()
    whole = model(TOKENS).logits
    first = model(TOKENS[:3])
    second = model(TOKENS[3:], first.state, first_step=3)
    torch.testing.assert_close(torch.cat([first.logits, second.logits]), whole)
    torch.testing.assert_close(model(TOKENS, model.initial_state(4)).logits, whole)


# --- draws ----------------------------------------------------------------------------------------

NOISY = Config(
    model=Model(hidden=6, embedding=5, layers=2, dropout=0.5),
    zoneout=Zoneout(cell=0.5, hidden=0.05),
    weight_noise=0.1,
    variational_dropout=VariationalDropout(input=0.2),
)


def test_rows_draw_the_same_in_any_batch() -> None:
    """If this fails, two processes with half a batch each do not train what one does with the
    whole.
    """
    model = build(NOISY, SYMBOLS)
    whole = model(TOKENS, seed=3).logits
    parts = [
        model(TOKENS[:, rows], seed=3, examples=rows.start).logits
        for rows in (slice(0, 2), slice(2, 4))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def test_the_seed_decides_every_draw() -> None:
    model = build(NOISY, SYMBOLS)
    once = model(TOKENS, seed=torch.tensor(3)).logits
    state = torch.get_rng_state()
    assert torch.equal(model(TOKENS, seed=3).logits, once)
    assert torch.equal(torch.get_rng_state(), state), "something was drawn from torch's generator"
    assert not torch.equal(model(TOKENS, seed=4).logits, once)


def test_training_without_a_seed_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"seed: expected one in training"):
        build(NOISY, SYMBOLS)(TOKENS)


def test_dropout_is_on_the_embedding_and_before_the_softmax_and_between_layers() -> None:
    model = model_of(dropout=0.5, layers=2, embedding=400, hidden=400)
    tokens = TOKENS[:2]
    with torch.no_grad():
        model.embedding.weight.fill_(1.0)
    seen: dict[str, torch.Tensor] = {}
    model.recurrent.register_forward_pre_hook(lambda m, args: seen.update(input=args[0]))
    assert model.recurrent.dropout == 0.5
    output = model(tokens, seed=1)
    assert set(seen["input"].unique().tolist()) == {0.0, 2.0}
    assert seen["input"].eq(0).float().mean().item() == pytest.approx(0.5, abs=0.05)
    # Before the softmax: with the identity as its matrix the logits are the hidden state, half of
    # it gone.
    model.softmax = nn.Linear(400, 400)
    with torch.no_grad():
        model.softmax.weight.copy_(torch.eye(400))
        model.softmax.bias.zero_()
    output = model(tokens, seed=1)
    gone = output.logits == 0
    assert gone.float().mean().item() == pytest.approx(0.5, abs=0.05)
    torch.testing.assert_close(output.logits[~gone], 2 * output.hidden[~gone])
    assert not torch.equal(gone, seen["input"] == 0), "two places share one mask"
    assert model.eval()(tokens).logits.count_nonzero() == output.logits.numel()


def test_dropout_of_the_input_is_of_its_own() -> None:
    """One-hot input is never dropped, or an embedding has the rate of other places."""
    model, seen = model_of(embedding=0, input_dropout=0.5, dropout=0.25), dict[str, torch.Tensor]()
    model.recurrent.register_forward_pre_hook(lambda m, args: seen.update(input=args[0]))
    tokens = torch.randint(0, SYMBOLS, (200, 3))
    model(tokens, seed=1)
    x, rows = seen["input"], nn.functional.one_hot(tokens, SYMBOLS)
    kept = x.sum(-1) > 0
    assert torch.equal(x, 2.0 * rows * kept[..., None])
    assert kept.float().mean().item() == pytest.approx(0.5, abs=0.1)
    model.eval()(tokens)
    assert seen["input"] is tokens
    for rate, want in ((None, 0.25), (0.0, 0.0), (0.5, 0.5)):
        model = model_of(embedding=400, dropout=0.25, input_dropout=rate)
        model.recurrent.register_forward_pre_hook(lambda m, args: seen.update(input=args[0]))
        model(tokens, seed=1)
        gone = seen["input"].eq(0).float().mean().item()
        assert gone == pytest.approx(want, abs=0.02)


def test_weight_noise_is_on_every_matrix_and_on_no_bias() -> None:
    """The output matrix too has its noise, of the standard deviation that is asked for."""
    model = build(replace(NOISY, weight_noise=0.5, model=Model(hidden=100, embedding=5)), SYMBOLS)
    matrix = model.noisy(model.softmax.weight, 7, torch.tensor(1)) - model.softmax.weight
    assert matrix.std().item() == pytest.approx(0.5, rel=0.1) and abs(matrix.mean().item()) < 0.05
    with torch.no_grad():
        model.recurrent.weight_ih_l0.zero_()
        model.recurrent.weight_hh_l0.zero_()
        for name in ("bias_ih_l0", "bias_hh_l0"):
            getattr(model.recurrent, name).zero_()
    assert model(TOKENS, seed=1).hidden.abs().max() > 0  # noise on the layer's matrices
    assert model.eval()(TOKENS).hidden.abs().max() == 0  # and none in evaluation


def test_variational_dropout_outside_the_layers() -> None:
    """A word would come back within its sequence, or a unit of the softmax's input with every
    step.
    """
    rate = VariationalDropout(words=0.4, output=0.5)
    model = build(Config(model=Model(hidden=600, embedding=5), variational_dropout=rate), SYMBOLS)
    assert not model.recurrent.noise
    rows, key = torch.arange(50), model.seed(3)
    tokens = torch.randint(SYMBOLS, (40, 50), generator=torch.Generator().manual_seed(0))
    kept = model.drop_words(torch.ones(40, 50, 5), tokens, key, rows)
    assert set(kept.unique().tolist()) == {
        0.0,
        torch.tensor(65536 / (65536 - round(0.4 * 65536))).item(),
    }
    found = torch.full((50, SYMBOLS), -1.0).scatter(1, tokens.t(), kept[..., 0].t())
    assert torch.equal(found.gather(1, tokens.t()).t()[..., None].expand_as(kept), kept), (
        "each word one fate a sequence"
    )
    assert (
        not torch.equal(found[0], found[1])
        and abs((found[found >= 0] == 0).float().mean() - 0.4) < 0.05
    )
    assert not torch.equal(
        kept, model.drop_words(torch.ones(40, 50, 5), tokens, model.seed(4), rows)
    )

    with torch.no_grad():
        model.softmax.weight.copy_(torch.eye(SYMBOLS, 600))
        model.softmax.bias.zero_()
    shown = model.logits(model.dropped(torch.ones(7, 50, 600), key, rows, 0), key)
    assert torch.equal(shown, shown[:1].expand_as(shown)) and set(shown.unique().tolist()) == {
        0.0,
        2.0,
    }
    model.eval()
    assert (model.drop_words(torch.ones(40, 50, 5), tokens, key, rows) == 1).all()
    assert (model.logits(model.dropped(torch.ones(7, 50, 600), key, rows, 0), key) == 1).all()
    with pytest.raises(ValueError, match="without an embedding"):
        Config(model=Model(embedding=0), variational_dropout=rate)


def test_noises_are_those_of_the_config() -> None:
    assert noises(Config()) == []
    config = Config(
        zoneout=Zoneout(hidden=0.05),
        recurrent_dropout=RecurrentDropout(rate=0.25, mask="step", hold_output_gate=True),
        state_dropout=StateDropout(cell=0.2, mask="sequence"),
        variational_dropout=VariationalDropout(input=0.1, hidden=0.2),
        weight_drop=0.3,
        weight_noise=0.075,
        evaluation=Evaluation(at_eval="off"),
    )
    assert noises(config) == [
        zo.Zoneout(hidden=0.05, at_eval="off"),
        zo.RecurrentDropout(rate=0.25, mask="step", hold_output_gate=True, at_eval="off"),
        zo.StateDropout(cell=0.2, mask="sequence", at_eval="off"),
        zo.VariationalDropout(input=0.1, hidden=0.2, at_eval="off"),
        zo.WeightDrop(rate=0.3, at_eval="off"),
        zo.WeightNoise(std=0.075, at_eval="off"),
    ]


def test_a_static_mask_is_the_runs_own_and_stays() -> None:
    config = Config(model=Model(hidden=6), zoneout=Zoneout(cell=0.5, mask="static"))
    model, other = build(config, SYMBOLS), build(replace(config, seed=2), SYMBOLS)
    assert torch.equal(model(TOKENS, seed=1).logits, model(TOKENS, seed=2).logits)
    assert model.recurrent.noise[0].seed != other.recurrent.noise[0].seed


# --- how weights start ----------------------------------------------------------------------------


def test_weights_are_a_function_of_the_seed_alone() -> None:
    state = torch.get_rng_state()
    one, two, other = (
        build(Config(seed=seed, model=Model(hidden=6)), SYMBOLS) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state), "building a model moved torch's generator"
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    assert not torch.equal(one.softmax.weight, other.softmax.weight)


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn", "rnn-relu"])
@pytest.mark.parametrize("init", ["torch", "block-orthogonal", "orthogonal", "identity", "uniform"])
def test_every_start_runs(cell: str, init: str) -> None:
    norm = {"torch": "none", "identity": "layer", "orthogonal": "batch"}.get(init, "none")
    model = model_of(
        cell=cell, init=init, norm=norm, layers=2, learn_initial_state=True, one_bias=True
    )
    output = model(TOKENS, seed=1)
    loss, _ = loss_of(output, TOKENS, Config())
    gradients = torch.autograd.grad(loss, list(parameters_of(model).values()))
    assert all(g.isfinite().all() for g in gradients)


def orthogonal(matrix: torch.Tensor) -> bool:
    small = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    return torch.allclose(small @ small.T, torch.eye(len(small)), atol=1e-5)


def test_block_orthogonal() -> None:
    model = model_of(init="block-orthogonal", hidden=22, one_bias=True)
    recurrent = model.recurrent.weight_hh_l0
    assert all(orthogonal(block) for block in recurrent.split(22))
    assert all(orthogonal(block) for block in model.recurrent.weight_ih_l0.split(11))  # 88 × 11
    assert not model.softmax.bias.any()


def test_orthogonal_is_one_matrix_and_a_unit_row_for_a_single_input() -> None:
    model = build(replace(IMAGES, model=Model(hidden=6, init="orthogonal")))
    assert orthogonal(model.recurrent.weight_hh_l0)
    assert model.recurrent.weight_ih_l0.norm().item() == pytest.approx(1)


@pytest.mark.parametrize("cell, gates", [("lstm", 4), ("gru", 3), ("rnn", 1)])
def test_identity_is_on_the_candidate(cell: str, gates: int) -> None:
    """g of an LSTM and n of a GRU are the third block; the others are one orthogonal matrix."""
    blocks = model_of(cell=cell, init="identity").recurrent.weight_hh_l0.split(6)
    candidate = 2 if gates > 1 else 0
    assert torch.equal(blocks[candidate], torch.eye(6))
    if gates > 1:
        assert orthogonal(torch.cat([b for n, b in enumerate(blocks) if n != candidate]))


def test_uniform_is_on_weights_and_biases() -> None:
    model = model_of(
        init="uniform", init_bound=0.04, forget_bias=0.0, embedding=50, hidden=50, norm="layer"
    )
    for name, parameter in model.named_parameters():
        if "norm_" not in name:
            assert parameter.abs().max() <= 0.04 and parameter.std().item() == pytest.approx(
                0.04 / 3**0.5, rel=0.3
            ), name
    assert model.recurrent.norm_ih_l0.eq(1).all()


def test_forget_bias_is_added_and_one_bias_stays_zero() -> None:
    """Two biases that are both trained double an adaptive optimizer's step on their sum."""
    model = model_of(init="orthogonal", one_bias=True)
    assert model.recurrent.bias_ih_l0.tolist() == [0.0] * 6 + [1.0] * 6 + [0.0] * 12
    assert not model.recurrent.bias_hh_l0.any() and not model.recurrent.bias_hh_l0.requires_grad
    assert "recurrent.bias_hh_l0" not in parameters_of(model)
    plain, raised = model_of(forget_bias=0.0), model_of(forget_bias=2.0)
    change = raised.recurrent.bias_ih_l0 - plain.recurrent.bias_ih_l0
    torch.testing.assert_close(change, torch.tensor([0.0] * 6 + [2.0] * 6 + [0.0] * 12))


# --- the loss -------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_or_the_sum_over_time() -> None:
    output = model_of().eval()(TOKENS)
    nats = -output.logits.log_softmax(-1).gather(-1, TOKENS[..., None]).mean()
    mean, shown = loss_of(output, TOKENS, Config())
    total, also = loss_of(output, TOKENS, Config(loss="sum"))
    torch.testing.assert_close(mean, nats)
    torch.testing.assert_close(total, 7 * nats)
    torch.testing.assert_close(shown, also)


def test_the_norm_stabiliser_is_added_but_not_shown() -> None:
    output = model_of().eval()(TOKENS)
    plain, nats = loss_of(output, TOKENS, Config())
    loss, shown = loss_of(output, TOKENS, Config(norm_stabilizer=50.0))
    torch.testing.assert_close(loss, plain + zo.norm_stabilizer(output.hidden, 50.0))
    torch.testing.assert_close(shown, nats)


def test_start_weights_do_not_depend_on_threads() -> None:
    """The same seed starts elsewhere where several runs share a machine."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(build(RECIPES["pmnist_zoneout"].make()).state_dict())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
