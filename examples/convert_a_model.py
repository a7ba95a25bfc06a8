"""Put zoneout into a model that somebody else wrote and trained, and go on training it.

The model knows nothing of this package: it is made of `torch.nn`, and its training set is small.
    Trained on as it is,
it learns that set by heart. `zo.convert` puts zoneout into its LSTM and keeps everything else: the
weights, the optimizer, the names in the checkpoint.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoneout as zo

SYMBOLS, LENGTH, CLASSES = 12, 40, 4
BATCH = 50


class Classifier(nn.Module):
    """Somebody's model: which of a few processes wrote this sequence?"""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, 32)
        self.encoder = nn.LSTM(32, 64, batch_first=True, bidirectional=True)
        self.output = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # x: [B, T]
        y, _ = self.encoder(self.embedding(x))
        return self.output(y.mean(dim=1))


def sequences(count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each class is a Markov chain with its own table of what follows what; the tables are much
    alike.
    """
    tables = torch.softmax(
        0.6 * torch.randn(CLASSES, SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(1)), -1
    )
    labels = torch.randint(CLASSES, (count,), generator=draw)
    x = torch.randint(SYMBOLS, (count, LENGTH), generator=draw)
    for t in range(1, LENGTH):
        x[:, t] = torch.multinomial(tables[labels, x[:, t - 1]], 1, generator=draw)[:, 0]
    return x, labels


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor, steps: int
) -> None:
    model.train()
    draw = torch.Generator().manual_seed(2)
    for _ in range(steps):
        rows = torch.randint(len(x), (BATCH,), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), labels[rows]).backward()
        optimizer.step()


@torch.no_grad()
def show(where: str, model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Print the mean loss and the share of right answers; return the loss."""
    x, labels = data
    logits = model.eval()(x)
    loss, right = (
        F.cross_entropy(logits, labels).item(),
        (logits.argmax(-1) == labels).float().mean().item(),
    )
    print(f"  {where:16} loss {loss:.3f}   right {right:.1%}")
    return loss


def main() -> None:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    few, many = sequences(400, draw), sequences(2000, draw)

    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    train(model, optimizer, *few, steps=100)
    print("Somebody's model, after 100 steps on 400 sequences")
    show("on those 400", model, few)
    show("on 2,000 others", model, many)

    # With no noise, the converted model is the same function.
    x = many[0]
    same = zo.convert(copy.deepcopy(model), None)
    torch.testing.assert_close(same.eval()(x), model.eval()(x))

    plain, plain_optimizer = copy.deepcopy((model, optimizer))
    parameters, names = list(model.parameters()), list(model.state_dict())
    print("\n>>> zo.convert(model, zo.Zoneout(cell=0.8, hidden=0.05), report=print)")
    zo.convert(model, zo.Zoneout(cell=0.8, hidden=0.05), report=print)
    assert all(a is b for a, b in zip(parameters, model.parameters())), (
        "the optimizer holds other parameters now"
    )
    assert list(model.state_dict()) == names

    train(plain, plain_optimizer, *few, steps=200)
    train(model, optimizer, *few, steps=200)
    print("\nAfter 200 more steps as it was")
    show("on those 400", plain, few)
    without = show("on 2,000 others", plain, many)
    print("\nAfter 200 more steps with zoneout")
    show("on those 400", model, few)
    with_zoneout = show("on 2,000 others", model, many)
    assert with_zoneout < without, "zoneout should help where a model overfits"

    # The weights go back to where they came from. There they run without the masks' expectation,
    # which torch.nn does not have, so what they compute is not quite the same any more.
    theirs = Classifier()
    theirs.load_state_dict(model.state_dict())
    zo.revert(model)
    assert type(model.encoder) is nn.LSTM
    torch.testing.assert_close(theirs.eval()(x), model.eval()(x))
    print(
        "\nThe checkpoint loads into the original class, and zo.revert(model) puts torch.nn's "
        "modules back."
    )


if __name__ == "__main__":
    main()
