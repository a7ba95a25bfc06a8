"""Train one small character model twice, without and with zoneout, and compare them on text neither has seen.

The text is the manual that ships inside Python. It is short, so a plain LSTM soon knows it by heart.
"""

import copy
import math
import random
import time
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoneout as zo

HIDDEN, EMBEDDING = 192, 32
STEPS, BATCH, LENGTH = 600, 32, 50
LEARNING_RATE = 0.01
TRAIN, VALID = 40_000, 10_000  # characters
SEED = 0


class Model(nn.Module):
    """Predicts the next character. Only the line that makes the LSTM knows about zoneout."""

    def __init__(self, symbols: int, noise: zo.Zoneout | None):
        super().__init__()
        self.embedding = nn.Embedding(symbols, EMBEDDING)
        self.lstm = zo.LSTM(EMBEDDING, HIDDEN, noise=noise)
        self.output = nn.Linear(HIDDEN, symbols)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None):  # x: [T, B]
        y, state = self.lstm(self.embedding(x), state)
        return self.output(y), state


def manual() -> str:
    """The paragraphs of Python's manual in a random order, so that both parts are about the same things."""
    paragraphs = [p for _, topic in sorted(topics.items()) for p in topic.split("\n\n")]
    random.Random(SEED).shuffle(paragraphs)
    return "\n\n".join(paragraphs)[: TRAIN + VALID]


def bits(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean bits per character."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / math.log(2)


@torch.no_grad()
def evaluate(model: Model, text: Tensor) -> float:
    """Bits per character on a text, cut into 20 pieces that are read side by side."""
    pieces = text[: len(text) // 20 * 20].view(20, -1).t()  # [T, 20]
    model.eval()
    logits, _ = model(pieces[:-1])
    model.train()
    return bits(logits, pieces[1:]).item()


def train(name: str, noise: zo.Zoneout | None, train_text: Tensor, valid_text: Tensor, symbols: int):
    """Train one model and return its best validation bits, and the model as it was then."""
    print(f"\n{name}\n  step   training   validation   (bits per character)")
    torch.manual_seed(SEED)  # the same initial weights for both models ...
    model = Model(symbols, noise)
    draw = torch.Generator().manual_seed(SEED)  # ... and the same batches
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    best, best_model, start = math.inf, model, time.perf_counter()
    for step in range(1, STEPS + 1):
        first = torch.randint(len(train_text) - LENGTH, (BATCH,), generator=draw)
        batch = train_text[first + torch.arange(LENGTH + 1)[:, None]]  # [T + 1, B]
        logits, _ = model(batch[:-1])
        loss = bits(logits, batch[1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            valid = evaluate(model, valid_text)
            mark = ""
            if valid < best:
                best, best_model, mark = valid, copy.deepcopy(model), "  best so far"
            print(f"  {step:4d}   {loss.item():8.3f}   {valid:10.3f}{mark}", flush=True)
    print(f"  {time.perf_counter() - start:.0f} seconds")
    return best, best_model


@torch.no_grad()
def sample(model: Model, characters: list[str], prompt: str, length: int = 300) -> str:
    """Let the model go on from `prompt`, one character at a time."""
    torch.manual_seed(SEED)
    model.eval()
    text = prompt
    x, state = torch.tensor([[characters.index(c)] for c in prompt]), None  # [T, 1]
    for _ in range(length):
        logits, state = model(x, state)
        x = torch.multinomial((logits[-1] / 0.6).softmax(-1), 1).t()  # [1, 1]
        text += characters[int(x)]
    return text


def main() -> None:
    torch.set_num_threads(1)  # such small matrices gain little from a second, and wait long for a busy one
    text = manual()
    characters = sorted(set(text))
    number = {c: n for n, c in enumerate(characters)}
    encoded = torch.tensor([number[c] for c in text])
    train_text, valid_text = encoded[:TRAIN], encoded[TRAIN:]

    print(f"Two LSTMs of {HIDDEN} units learn to predict the next character of Python's own manual.")
    print(f"Each gets {STEPS} steps on the same {TRAIN:,} characters, from the same initial weights, and is")
    print(f"measured on {len(valid_text):,} other characters, on which its best moment counts.")

    plain, _ = train("Without noise", None, train_text, valid_text, len(characters))
    noise = zo.Zoneout(cell=0.5, hidden=0.05)
    zoned, model = train(f"With {noise}", noise, train_text, valid_text, len(characters))

    print("\nBest validation bits per character (lower is better)")
    print(f"  without noise  {plain:.3f}")
    print(f"  with zoneout   {zoned:.3f}")
    print("\nWhat the zoneout model writes when it is given 'The ':\n")
    print("  " + sample(model, characters, "The ").replace("\n", "\n  "))


if __name__ == "__main__":
    main()
