"""Options of models after the paper: averages, penalties, lengths, temperature."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import zoneout as zo
from zoneout.paper.data import batches
from zoneout.paper.training.config import (
    Batches,
    Config,
    Data,
    Evaluation,
    Model,
    Optimizer,
    Protocol,
    VariationalDropout,
)
from zoneout.paper.training.evaluate import TEMPERATURES, evaluate
from zoneout.paper.training.feeds import make_feed
from zoneout.paper.training.models import build, loss_of
from zoneout.paper.training.optimizers import Average
from zoneout.paper.training.processes import Processes
from zoneout.paper.training.runs import load, read_metrics
from zoneout.paper.training.step import Step, learning_rates
from zoneout.paper.training.train import falls_behind, load_data, train

CPU = torch.device("cpu")
SYMBOLS = 7
TOKENS = torch.randint(0, SYMBOLS, (6, 3), generator=torch.Generator().manual_seed(0))
TINY = Config(
    data=Data(str(Path(__file__).parent / "golden" / "text.txt"), limit=1200),
    batches=Batches("streams", size=4, length=12),
    model=Model(hidden=4, embedding=0),
    evaluation=Evaluation(Protocol("streams", length=20, size=2), Protocol("whole", length=50)),
    device="cpu",
    log_every=1,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def step_of(config: Config) -> Step:
    data: Any = load_data(config)
    model = build(config, len(data.vocabulary))
    return Step(model, make_feed(config, data, CPU), config, Processes(CPU))


# --- averages


def test_averages_are_those_of_torch() -> None:
    """An update is left out, has another weight, or counts before averaging began."""
    module, generator = nn.Linear(3, 2), torch.Generator().manual_seed(0)
    average, theirs = Average(dict(module.named_parameters())), AveragedModel(module)
    for number in range(6):
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        if number == 2:
            average.start()
        average.step()
        if number >= 2:
            theirs.update_parameters(module)
    last = module.weight.detach().clone()
    with average.used():
        torch.testing.assert_close(module.weight, theirs.module.weight)
        torch.testing.assert_close(module.bias, theirs.module.bias)
    assert torch.equal(module.weight, last), "the weights of training were lost"


def test_a_run_is_judged_by_its_averages_after_a_plateau(tmp_path: Path) -> None:
    """Averages are not used, or a continued run begins them anew."""
    # At this rate the loss jumps about, differently on every machine: twelve epochs have a plateau.
    config = replace(TINY, optimizer=Optimizer("sgd", lr=100.0, average_after=1), epochs=12)
    train(config, tmp_path / "run")
    train(replace(config, epochs=11), tmp_path / "parts")
    train(config, tmp_path / "parts", resume=True)
    train(replace(config, optimizer=Optimizer("sgd", lr=100.0)), tmp_path / "plain")
    lines = {
        name: [r["nats"] for r in read_metrics(tmp_path / name) if r["kind"] == "valid"]
        for name in ("run", "parts", "plain")
    }
    assert lines["run"] == lines["parts"]
    worse = [b > min(lines["plain"][: k + 1]) for k, b in enumerate(lines["plain"][2:])]
    first = worse.index(True) + 3  # the validation after the first that fell behind
    assert first < 11, "the run that was continued had no averages yet"
    assert lines["run"][:first] == lines["plain"][:first] and lines["run"] != lines["plain"]
    train_lines = [
        [r["nats"] for r in read_metrics(tmp_path / name) if r["kind"] == "train"]
        for name in ("run", "plain")
    ]
    assert train_lines[0] == train_lines[1], "training went on from the averages"


def test_averaging_begins_where_the_authors_of_awd_lstm_begin_it() -> None:
    """It begins only after some bad validations in a row, or counts the latest of them."""
    chance = np.random.default_rng(0)
    for count in (1, 2, 5):
        losses: list[float] = []
        series = (10 - 0.02 * np.arange(200) + 0.05 * chance.standard_normal(200)).tolist()
        for number, loss in enumerate(series):
            before = series[: max(0, number - count)]
            assert falls_behind(losses, loss, count) == bool(before and loss > min(before))
            assert len(losses) <= count + 1


def test_weights_are_averaged_from_their_start_on_and_not_before() -> None:
    """Every update costs a pass over all weights, long before any is averaged."""
    weight = torch.zeros(2)
    average = Average({"weight": weight})
    average.step(weight.fill_(5.0))
    assert not average.values["weight"].any() and not average.count
    average.start()
    average.step(weight.fill_(1.0))
    average.step(weight.fill_(2.0))
    assert average.values["weight"].tolist() == [1.5, 1.5] and int(average.count) == 2


# --- penalties


def test_activation_penalties_are_added_to_the_loss() -> None:
    """A penalty is of the wrong outputs: squares are of those after dropout, changes before."""
    config = Config(
        model=Model(hidden=5, embedding=0),
        variational_dropout=VariationalDropout(output=0.5),
        activation_penalty=2.0,
        change_penalty=3.0,
    )
    output = build(config, SYMBOLS)(TOKENS, seed=1)
    h, dropped = (v.detach().double().numpy() for v in (output.hidden, output.dropped))
    assert (dropped == 0).any() and not (h == 0).any()
    want = 2 * np.mean(dropped**2) + 3 * np.mean((h[1:] - h[:-1]) ** 2)
    loss, nats = loss_of(output, TOKENS, config)
    assert (loss - nats).item() == pytest.approx(want, rel=1e-4)


# --- lengths


def test_random_lengths_fill_the_text_and_are_spread_as_asked() -> None:
    """Batches overlap or leave the text, or their lengths have another mean or deviation."""
    lengths = np.array(batches.random_lengths(100_000, 70, 0.05, 5.0, seed=3))
    assert 100_000 - 90 < lengths.sum() <= 100_000
    short = lengths < 53
    assert short.mean() == pytest.approx(0.05, abs=0.02)
    assert lengths[~short].mean() == pytest.approx(69.5, abs=0.5)  # rounded down
    assert lengths[~short].std() == pytest.approx(5, abs=0.4)
    assert lengths.max() <= 85 and lengths[short].max() <= 50 and lengths.min() >= 20
    assert batches.random_lengths(100, 70, 0.05, 5.0, seed=3, epoch=1) != lengths.tolist()
    assert batches.random_lengths(40, 6, 0.0, 9.0) and batches.random_lengths(3, 6, 0, 1) == [3]


def test_streams_with_random_lengths_are_the_text_in_order() -> None:
    """A step is left out or read twice; or a long batch has the learning rate of a short one."""
    cut = Batches("streams", size=4, length=12, halved=0.3, spread=2.0)
    step = step_of(replace(TINY, batches=cut, epochs=3))
    feed: Any = step.feed
    lengths, order = feed.lengths(1), feed.order(1)
    pieces = [feed.batch(row, length) for row, length in zip(order, lengths)]
    assert [len(x) for x, _ in pieces] == lengths and len(set(lengths)) > 3
    assert torch.equal(torch.cat([x for x, _ in pieces]), feed.streams[: sum(lengths)].long())
    assert torch.equal(torch.cat([y for _, y in pieces]), feed.streams[1 : sum(lengths) + 1].long())
    count = step.begin(1, 0, 20)
    assert count == len(lengths) <= feed.updates()
    assert feed.total() == sum(len(feed.order(epoch)) for epoch in range(3)) < 3 * feed.updates()
    plain = learning_rates(step.config, 1, 20, count)
    torch.testing.assert_close(step.rates[:count], plain * torch.tensor(lengths) / 12)
    for _ in range(2):
        step()
    assert step.nats.isfinite() and int(step.position) == step.next == 2


# --- at evaluation


def test_the_temperature_is_chosen_on_validation_and_kept(tmp_path: Path) -> None:
    """Another temperature is better on validation, or the run forgets the chosen one."""
    evaluation = replace(TINY.evaluation, temperature=True)
    config = replace(TINY, evaluation=evaluation, epochs=1, optimizer=Optimizer(lr=0.05))
    summary = train(config, tmp_path / "run")
    loaded: Any = load(tmp_path / "run")
    data = load_data(config)
    assert summary.test is not None

    def nats(temperature: float) -> float:
        loaded.model.temperature.fill_(temperature)
        return evaluate(loaded.model, data, "valid", config).nats

    chosen: Tensor = loaded.model.temperature.clone()
    assert summary.test["temperature"] == pytest.approx(chosen.item())
    losses = [nats(t) for t in TEMPERATURES]
    assert TEMPERATURES[int(np.argmin(losses))] == pytest.approx(chosen.item())
    loaded.model.temperature.copy_(chosen)
    assert evaluate(loaded.model, data, "test", config).nats == pytest.approx(summary.test["nats"])


def test_a_small_embedding_and_no_bias_at_the_start() -> None:
    """A tied softmax would start with logits of the size of a normal number's."""
    model: Any = build(Config(model=Model(embedding=6, embedding_bound=0.1)), SYMBOLS)
    weight = model.embedding.weight
    assert 0.05 < weight.abs().max() <= 0.1 and not model.softmax.bias.any()
    assert isinstance(model.recurrent, zo.LSTM)
