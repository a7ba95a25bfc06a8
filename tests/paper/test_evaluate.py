"""Evaluation: each protocol against a slow obvious version, and every prediction counted."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from zoneout.paper.data.corpora import Corpus, Images, Vocabulary
from zoneout.paper.training.config import (
    Config,
    Data,
    Evaluation,
    Model,
    Protocol,
    VariationalDropout,
    Zoneout,
)
from zoneout.paper.training.evaluate import (
    Score,
    estimate_statistics,
    evaluate,
    evaluate_images,
    evaluate_samples,
    evaluate_text,
    evaluation_mode,
    judged,
    predictions,
    sampling_mode,
    slices,
)
from zoneout.paper.training.feeds import ImageFeed, make_feed
from zoneout.paper.training.models import build

SYMBOLS = 7
TEXT = torch.randint(0, SYMBOLS, (107,), generator=torch.Generator().manual_seed(0))
CONFIG = Config(
    model=Model(hidden=8, learn_initial_state=True), zoneout=Zoneout(cell=0.5, hidden=0.05)
)
SAMPLED = Evaluation(at_eval="sample")


@pytest.fixture(scope="module")
def model() -> Any:
    model = build(CONFIG, SYMBOLS).double().eval()
    with torch.no_grad():  # a start that is not zero, so that a reset is seen
        model.recurrent.h0.normal_(generator=torch.Generator().manual_seed(1))
        model.recurrent.c0.normal_(generator=torch.Generator().manual_seed(2))
    return model


def nats_of(model: Any, sequence: Tensor) -> list[float]:
    """The nats of every symbol of a sequence after its first, one step at a time from the
    initial state.
    """
    state, found = None, []
    with torch.no_grad():
        for now, following in pairwise(sequence):
            output = model(now.view(1, 1), state)
            found.append(-output.logits[0, 0].log_softmax(-1)[following].item())
            state = output.state
    return found


def slow(model: Any, text: Tensor, protocol: Protocol) -> tuple[float, int]:
    """The protocol in plain words."""
    n, found = len(text), []
    if protocol.kind == "whole":
        found = nats_of(model, text)
    elif protocol.kind == "chunks":
        for start in range(0, n - protocol.length + 1, protocol.length):
            found += nats_of(model, text[start : start + protocol.length])
    else:
        part = n // protocol.size
        for number in range(protocol.size):
            found += nats_of(model, text[number * part : (number + 1) * part])
    return float(np.mean(found)), len(found)


@pytest.mark.parametrize(
    "protocol, expected",
    [
        (Protocol("whole", length=10), 106),
        (Protocol("whole", length=1000), 106),
        (Protocol("whole", length=1), 106),
        (Protocol("chunks", length=10, size=3), 10 * 9),
        (Protocol("chunks", length=107, size=3), 106),
        (Protocol("chunks", length=2, size=100), 53),
        (Protocol("streams", length=10, size=5), 5 * 20),
        (Protocol("streams", length=3, size=1), 106),
    ],
)
def test_protocols(model: Any, protocol: Protocol, expected: int) -> None:
    """If this fails, a figure stands for another protocol, or for another number of predictions,
    than it says.
    """
    score = evaluate_text(model, TEXT, protocol)
    nats, count = slow(model, TEXT, protocol)
    assert score.predictions == count == expected == predictions(len(TEXT), protocol)
    assert score.nats == pytest.approx(nats, rel=1e-12)


def test_chunks_start_anew_and_the_whole_text_goes_on(model: Any) -> None:
    """The paper's gap between valid and test comes from this difference alone."""
    chunks = evaluate_text(model, TEXT[:100], Protocol("chunks", length=10))
    whole = evaluate_text(model, TEXT[:100], Protocol("whole"))
    assert chunks.nats != whole.nats


def test_a_text_shorter_than_a_chunk_is_one_chunk(model: Any) -> None:
    assert evaluate_text(model, TEXT[:30], Protocol("chunks", length=100)).predictions == 29


def test_too_little_text_is_an_error(model: Any) -> None:
    with pytest.raises(ValueError, match=r"tokens: expected a text of at least 2 symbols, got 1"):
        evaluate_text(model, TEXT[:1], Protocol("whole"))
    with pytest.raises(
        ValueError, match=r"size: 5 streams need a text of at least 10 symbols, got 9"
    ):
        evaluate_text(model, TEXT[:9], Protocol("streams", size=5))


def test_bits_and_perplexity() -> None:
    score = Score(nats=float(np.log(8)), predictions=1)
    assert score.bits == pytest.approx(3) and score.perplexity == pytest.approx(8)
    assert np.isfinite(Score(nats=1e9, predictions=1).perplexity)


def test_somebody_may_stop_it(model: Any) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_text(model, TEXT, Protocol("whole", length=10), tick=stop)


def corpus(**parts: Tensor) -> Corpus:
    arrays = {
        part: parts.get(part, TEXT).numpy().astype(np.uint8) for part in ("train", "valid", "test")
    }
    return Corpus("test", "char", Vocabulary("char", tuple("abcdefg")), **arrays, digest="")


def test_evaluate_uses_the_protocol_of_the_part_and_leaves_the_model_as_it_was() -> None:
    model = build(CONFIG, SYMBOLS).train()
    data = corpus(valid=TEXT[:50])
    assert (
        evaluate(
            model, data, "valid", replace(CONFIG, evaluation=Evaluation(Protocol(length=10)))
        ).predictions
        == 45
    )
    assert evaluate(model, data, "test", CONFIG).predictions == 106
    assert (
        evaluate(model, data, "test", CONFIG, protocol=Protocol("streams", size=2)).predictions
        == 104
    )
    assert model.training
    with pytest.raises(ValueError, match=r"part: expected 'train', 'valid' or 'test', got 'tset'"):
        evaluate(model, data, "tset", CONFIG)


def test_a_static_mask_can_be_evaluated_as_it_was_trained() -> None:
    """FACTS: the authors' curve used another static mask than training; ours must be able to use
    the same.
    """
    config = Config(model=Model(hidden=8), zoneout=Zoneout(cell=0.5, hidden=0.5, mask="static"))
    sampled = build(replace(config, evaluation=Evaluation(at_eval="sample")), SYMBOLS)
    chunk = TEXT[:100].view(10, 10).T.contiguous()
    trained = sampled.train()(chunk, seed=5).logits
    assert torch.equal(sampled.eval()(chunk).logits, trained)
    expected = build(config, SYMBOLS).eval()
    assert not torch.allclose(expected(chunk).logits, trained)


@pytest.mark.parametrize(
    "kind, length, size", [("whole", 10, 1), ("streams", 7, 5), ("chunks", 10, 3)]
)
def test_masks_at_evaluation_do_not_depend_on_how_a_text_is_cut(
    kind: Any, length: int, size: int
) -> None:
    """With at_eval="sample" every piece, or every batch of chunks, would draw the masks of the
    first one again.
    """
    config = Config(
        model=Model(hidden=8), zoneout=Zoneout(cell=0.5, hidden=0.5), evaluation=SAMPLED
    )
    model = build(config, SYMBOLS).double().eval()
    text = TEXT[:100]
    cut = evaluate_text(model, text, Protocol(kind, length=length, size=size), seed=3)
    uncut = Protocol(
        kind, length=length if kind == "chunks" else 1000, size=100 if kind == "chunks" else size
    )
    assert cut.nats == pytest.approx(evaluate_text(model, text, uncut, seed=3).nats, rel=1e-12)
    assert cut.nats != pytest.approx(evaluate_text(model, text, uncut, seed=4).nats, rel=1e-6), (
        "nothing was drawn"
    )


def test_masks_at_evaluation_do_not_depend_on_the_size_of_a_batch() -> None:
    """With at_eval="sample" the images of every batch would draw the masks of the first one's."""
    config = Config(
        data=Data("mnist"), model=Model(hidden=8), zoneout=Zoneout(hidden=0.5), evaluation=SAMPLED
    )
    model = build(config).eval()
    pixels = torch.randint(
        0, 256, (7, 20), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    labels = torch.arange(7)
    few, at_once = (evaluate_images(model, pixels, labels, size, seed=3).nats for size in (2, 7))
    assert few == pytest.approx(at_once, rel=1e-6)
    assert few != pytest.approx(evaluate_images(model, pixels, labels, 7, seed=4).nats, rel=1e-4), (
        "nothing was drawn"
    )


# --- images and batch norm ------------------------------------------------------------------------


def test_images_are_counted_one_by_one() -> None:
    model = build(Config(data=Data("mnist"), model=Model(hidden=8))).eval()
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (10, 784), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (10,), generator=generator, dtype=torch.uint8)
    with torch.no_grad():
        logits = torch.stack([model(p.float().view(-1, 1, 1) / 255).logits[0] for p in pixels])
    wrong = sum(int(row.argmax()) != int(label) for row, label in zip(logits, labels))
    score = evaluate_images(model, pixels, labels, size=3)
    assert score.error == wrong / 10 and score.predictions == 10
    assert score.nats == pytest.approx(
        -logits.log_softmax(-1)[range(10), labels.long()].mean().item(), rel=1e-5
    )


def test_batch_norm_validates_with_the_batchs_own_statistics() -> None:
    config = Config(model=Model(hidden=8, norm="batch"))
    model = build(config, SYMBOLS)
    with torch.no_grad():
        model.recurrent.mean_hh_l0.fill_(100.0)  # running averages that are of no use
    plain = evaluate(model, corpus(), "valid", config, protocol=Protocol(length=10))
    own = evaluate(
        model, corpus(), "valid", config, protocol=Protocol(length=10), batch_statistics=True
    )
    assert own.nats != plain.nats
    assert model.recurrent.norm.at_eval == "running", "the mode was not put back"
    with torch.no_grad():
        model.recurrent.mean_hh_l0.zero_()
    assert own == evaluate(
        model, corpus(), "valid", config, protocol=Protocol(length=10), batch_statistics=True
    )


def test_statistics_are_estimated_on_the_training_part() -> None:
    data = Images("rows", *[(np.zeros((6, 784), np.uint8), np.zeros(6, np.uint8))] * 3, digest="")
    generator = np.random.default_rng(0)
    data = replace(
        data, train=(generator.integers(0, 256, (6, 784), dtype=np.uint8), np.zeros(6, np.uint8))
    )
    config = Config(data=Data("mnist"), model=Model(hidden=4, norm="batch", init="orthogonal"))
    config = replace(config, batches=replace(config.batches, size=2))
    model = build(config)
    feed = make_feed(config, data, torch.device("cpu"))
    assert isinstance(feed, ImageFeed)
    assert estimate_statistics(model, feed, 2) == 2
    assert estimate_statistics(model, feed) == 3
    # The mean of x·Wx over all images, whatever the batches: the product is linear.
    x = torch.from_numpy(data.train[0].copy()).float().T[..., None] / 255  # [784, 6, 1]
    expected = (x @ model.recurrent.weight_ih_l0.T).mean(1)
    torch.testing.assert_close(model.recurrent.mean_ih_l0, expected.detach(), rtol=1e-4, atol=1e-5)
    # In larger batches: all six are one, of four and two the whole one counts, and of more than
    # there are, all.
    for size in (6, 4, 100):
        assert estimate_statistics(model, feed, size=size) == 1
    variance = (x @ model.recurrent.weight_ih_l0.T).var(1)
    torch.testing.assert_close(model.recurrent.var_ih_l0, variance.detach(), rtol=1e-4, atol=1e-6)


def test_evaluation_mode_is_left_after_an_error() -> None:
    model = build(Config(model=Model(hidden=8, norm="batch")), SYMBOLS).train()
    with pytest.raises(RuntimeError), evaluation_mode(model, batch_statistics=True):
        raise RuntimeError
    assert model.training and model.recurrent.norm.at_eval == "running"


def test_what_is_left_over_goes_with_those_before() -> None:
    """Batch norm has no statistics of a chunk or an image by itself."""
    found = {
        case: [s.stop - s.start for s in slices(*case)]
        for case in ((9, 4), (10, 4), (3, 1), (1, 4), (0, 4))
    }
    assert list(found.values()) == [[4, 5], [4, 4, 2], [1, 1, 1], [1], []]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_on_the_cpu_are_evaluated_in_float32(
    precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model on the CPU is evaluated in another precision than its record says."""
    asked: list[str] = []

    def products_in(name: str, device: torch.device) -> Any:
        asked.append(name)
        return nullcontext()

    monkeypatch.setattr("zoneout.paper.training.evaluate.products_in", products_in)
    config = Config(model=Model(hidden=4), precision=precision)
    with judged(build(config, 5), config, batch_statistics=False):
        pass
    assert asked == ["fp32"]


def test_the_shortest_text_has_one_prediction() -> None:
    """A text of two symbols is refused, or one of a single symbol is not."""
    assert predictions(2, Protocol("whole")) == 1
    with pytest.raises(ValueError, match="at least 2 symbols, got 1"):
        predictions(1, Protocol("whole"))


def test_samples_are_averaged_as_probabilities() -> None:
    """Logarithms are averaged instead, a mask changes within a pass, or words are dropped."""
    config = Config(
        model=Model(hidden=5, embedding=4, layers=2),
        variational_dropout=VariationalDropout(
            input=0.4, hidden=0.3, output=0.5, words=0.9, tied=False
        ),
    )
    model = build(config, 7).eval()
    tokens = torch.arange(41) ** 2 % 7
    with sampling_mode(model, config):
        found = evaluate_samples(model, tokens, Protocol("whole", length=12), 4, seed=3)
    assert not model.training and model.variational.words == 0.9
    model.train()
    model.variational = replace(model.variational, words=0.0)
    passes = [
        model(tokens[:-1, None], seed=3, examples=n).logits[:, 0].softmax(-1) for n in range(4)
    ]
    mean = torch.stack(passes).mean(0)[torch.arange(40), tokens[1:]]
    assert found.nats == pytest.approx(-mean.log().mean().item(), rel=1e-5)
    assert found.predictions == 40
    chunks = Protocol("chunks", length=10, size=9)
    with sampling_mode(model, config):
        one = evaluate_samples(model, tokens, chunks, 3, seed=3)
    assert one.predictions == 36 and one.nats != found.nats
    images = Config(data=Data("mnist"))
    with pytest.raises(ValueError, match="samples: expected"), sampling_mode(model, images):
        pass
