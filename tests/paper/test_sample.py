"""Sampling: what is drawn is what the model predicts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from zoneout.paper.data.text import Vocabulary
from zoneout.paper.training.config import Config, Data, Model
from zoneout.paper.training.models import Output, build
from zoneout.paper.training.runs import Loaded
from zoneout.paper.training.sample import sample

LETTERS = Vocabulary("char", ("\n", " ", "a", "b", "c"))
WORDS = Vocabulary("word", ("<eos>", "<unk>", "the", "cat", "sat"))


class Fixed(torch.nn.Module):
    """Predicts the same whatever it has read, and remembers what that was."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits, dtype=torch.float32))
        self.read: list[list[int]] = []
        self.steps: list[int] = []

    def forward(self, tokens: Any, state: Any = None, *, seed: int, first_step: int) -> Output:
        self.read.append(tokens[:, 0].tolist())
        self.steps.append(first_step)
        return Output(self.logits.expand(*tokens.shape, -1), self.logits, state)


def loaded(model: torch.nn.Module, vocabulary: Vocabulary | None = LETTERS) -> Loaded:
    return Loaded(Config(), vocabulary, model.eval(), {})


def text(
    model: torch.nn.Module, prompt: str = "", vocabulary: Vocabulary = LETTERS, **options: Any
) -> str:
    return "".join(sample(loaded(model, vocabulary), prompt, **options))


def real() -> torch.nn.Module:
    return build(Config(model=Model(hidden=16)), len(LETTERS))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_symbols_come_as_often_as_predicted(temperature: float) -> None:
    """The temperature divides the wrong thing, or the draw is not the softmax."""
    logits = [0.0, 0.5, 1.0, 1.5, 2.0]
    count, n = Counter(text(Fixed(logits), length=20_000, temperature=temperature)), 20_000
    expected = torch.softmax(torch.tensor(logits) / temperature, 0)
    for symbol, share in zip(LETTERS.symbols, expected.tolist()):
        deviation = (share * (1 - share) / n) ** 0.5
        assert abs(count[symbol] / n - share) < 5 * deviation


def test_temperature_zero_takes_the_likeliest() -> None:
    """A temperature of 0 divides by it."""
    assert text(Fixed([0, 0, 1, 9, 2]), length=5, temperature=0.0) == "bbbbb"
    assert text(Fixed([0, 0, 1, 9, 2]), length=5, temperature=1e-300) == "bbbbb"


def test_each_symbol_is_fed_back_once() -> None:
    """The model reads the prompt again with every symbol, or misses one, or its steps are
    miscounted.
    """
    model = Fixed([0, 0, 0, 9, 0])
    text(model, "a c", length=3, temperature=0.0)
    assert model.read == [[2, 1, 4], [3], [3]]
    assert model.steps == [0, 3, 4]


def test_without_a_prompt_a_line_begins() -> None:
    """An empty prompt is an empty batch."""
    model = Fixed([0, 0, 0, 9, 0])
    assert text(model, length=2, temperature=0.0) == "bb"
    assert model.read[0] == [0]


def test_one_at_a_time_is_what_the_whole_would_predict() -> None:
    """The carried state is not the state that the text so far leads to."""
    model = real()
    written = text(model, "ab", length=30, temperature=0.0)
    numbers = torch.from_numpy(LETTERS.encode("ab" + written)).long()[:, None]
    with torch.no_grad():
        predicted = model.eval()(numbers[:-1]).logits.argmax(-1)
    assert torch.equal(predicted[1:], numbers[2:])


def test_the_seed_decides() -> None:
    """A text cannot be had again, or every text is the same."""
    model = real()
    assert text(model, length=50, seed=1) == text(model, length=50, seed=1)
    assert text(model, length=50, seed=1) != text(model, length=50, seed=2)
    assert text(model, length=5, seed=2**64 - 1)
    with pytest.raises(ValueError, match="seed: expected an integer of at most 64 bits"):
        text(model, length=5, seed=2**64)


def test_words_are_set_apart() -> None:
    """Words run together, or lines begin and end with spaces."""
    pieces = iter([2, 3, 0, 2, 3, 4])

    class Spells(Fixed):
        def forward(self, tokens: Any, state: Any = None, **rest: Any) -> Output:
            logits = torch.full((*tokens.shape, 5), -1e9)
            logits[..., next(pieces)] = 0
            return Output(logits, logits, state)

    assert text(Spells([0.0]), "the cat sat", WORDS, length=6) == " the cat\nthe cat sat"


def test_what_training_never_showed_is_never_drawn() -> None:
    """The sign for unknown characters turns up in a text."""
    vocabulary = Vocabulary("char", ("a", "b", "\ufffd"))
    assert set(text(Fixed([0, 0, 5]), "ax", vocabulary, length=200)) == {"a", "b"}


def test_at_eval_sample_draws_anew_at_every_step() -> None:
    """A model whose masks are drawn in evaluation uses those of the first step for ever."""
    from zoneout.paper.training.config import Evaluation, Zoneout

    config = Config(
        model=Model(hidden=16), zoneout=Zoneout(hidden=0.5), evaluation=Evaluation(at_eval="sample")
    )
    model = build(config, len(LETTERS)).eval()
    written = text(model, "a", length=20, temperature=0.0, seed=3)
    numbers = torch.from_numpy(LETTERS.encode("a" + written)).long()[:, None]
    with torch.no_grad():
        predicted = model(numbers[:-1], seed=3).logits.argmax(-1)
    assert torch.equal(predicted, numbers[1:])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"length": -1}, "length: expected 0 or more"),
        ({"temperature": -0.5}, "temperature: expected a finite number"),
        ({"temperature": float("nan")}, "temperature: expected a finite number"),
        ({"prompt": "x"}, "symbols that the vocabulary has not"),
    ],
)
def test_errors_say_what_was_expected(options: dict[str, Any], says: str) -> None:
    """A wrong option is taken in silence."""
    with pytest.raises(ValueError, match=says):
        text(Fixed([0, 0, 0, 0, 0]), **options)


def test_images_write_nothing() -> None:
    """A classifier is asked for text."""
    model = build(Config(data=Data("mnist"), model=Model(hidden=4)))
    with pytest.raises(ValueError, match="classifies images"):
        "".join(sample(loaded(model, None)))
