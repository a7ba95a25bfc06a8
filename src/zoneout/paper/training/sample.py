"""Sampling: generate text with a trained language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..data.text import Vocabulary
from .evaluate import Diverged
from .runs import Loaded


def sample(
    loaded: Loaded, prompt: str = "", *, length: int = 500, temperature: float = 0.8, seed: int = 0
) -> Iterator[str]:
    """Generate the model's continuation of `prompt` in pieces, `length` symbols in total.

    A temperature of 1 draws from the model's predictions. A lower temperature prefers likely
    symbols, and 0 always takes the likeliest one. The same seed gives the same text. A wrong
    argument raises at the call, before the first piece.
    """
    vocabulary = loaded.vocabulary
    if vocabulary is None:
        raise ValueError(
            "run: expected a language model, got one that classifies images; sample from a run on "
            "text"
        )
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed: expected an integer of at most 64 bits, got {seed}")
    if length < 0:
        raise ValueError(f"length: expected 0 or more symbols, got {length}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: expected a finite number, 0 or more, got {temperature}")
    try:
        numbers: list[int] = vocabulary.encode(prompt).tolist() if prompt else []
    except ValueError as error:
        raise ValueError(f"prompt: {error}") from None
    return _written(loaded.model, vocabulary, numbers, length, temperature, seed)


@torch.no_grad()
def _written(
    model: Any,
    vocabulary: Vocabulary,
    numbers: list[int],
    length: int,
    temperature: float,
    seed: int,
) -> Iterator[str]:
    # Without a prompt, the model continues from the end of a line.
    start = next((vocabulary.number[s] for s in ("\n", "<eos>", " ") if s in vocabulary.number), 0)
    fed = numbers or [start]
    draw = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    state, step = None, 0
    for _ in range(length):
        x = torch.tensor(fed, device=device)[:, None]  # [T, 1]
        output = model(x, state, seed=seed, first_step=step)
        state, step = output.state, step + len(fed)
        logits = output.logits[-1, 0].double().cpu()
        if not logits.isfinite().all():
            raise Diverged(
                "the model's predictions are not finite numbers; its weights cannot be good"
            )
        if vocabulary.unit == "char" and vocabulary.unknown is not None:
            logits[vocabulary.unknown] = -torch.inf  # the training text has no such character
        if temperature == 0:
            number = int(logits.argmax())
        else:
            # Subtract the maximum before the division: a very low temperature must not overflow.
            probabilities = ((logits - logits.max()) / temperature).softmax(-1)
            number = int(torch.multinomial(probabilities, 1, generator=draw))
        before = numbers[-1:]
        numbers, fed = [*before, number], [number]
        # A word is decoded together with the previous one, which adds the space between them.
        yield vocabulary.decode(numbers)[len(vocabulary.decode(before)) :]
