"""Put zoneout into a trained model that somebody else wrote, and go on training it.

The model is made of `torch.nn`, and its training set is small: trained on as it is, it overfits.
`zo.convert` puts zoneout into its LSTM. Weights, optimizer and names in the checkpoint stay.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoneout as zo

SYMBOLS, LENGTH, CLASSES, BATCH = 12, 40, 4, 50


class Classifier(nn.Module):
    """Somebody's model: which of a few processes wrote this sequence?"""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, 32)
        self.encoder = nn.LSTM(32, 64, batch_first=True, bidirectional=True)
        self.output = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # x: [B, T]
        return self.output(self.encoder(self.embedding(x))[0].mean(dim=1))


def sequences(count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences and their classes, which are Markov chains with similar tables."""
    tables = torch.randn(CLASSES, SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(CLASSES, (count,), generator=draw)
    x = torch.randint(SYMBOLS, (count, LENGTH), generator=draw)
    for t in range(1, LENGTH):
        chances = torch.softmax(0.6 * tables, -1)[labels, x[:, t - 1]]
        x[:, t] = torch.multinomial(chances, 1, generator=draw)[:, 0]
    return x, labels


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Train on the 400 sequences, print the results, return the loss on others."""
    draw = torch.Generator().manual_seed(2)
    for _ in range(steps):
        rows = torch.randint(len(FEW[0]), (BATCH,), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(model.train()(FEW[0][rows]), FEW[1][rows]).backward()
        optimizer.step()
    for where, (x, labels) in (("on these 400", FEW), ("on 2,000 others", MANY)):
        with torch.no_grad():
            logits = model.eval()(x)
        right, loss = (logits.argmax(-1) == labels).float().mean(), F.cross_entropy(logits, labels)
        print(f"  {where:16} loss {loss.item():.3f}   right {right.item():.1%}")
    return loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    FEW, MANY = sequences(400, draw), sequences(2000, draw)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    print("Somebody's model, after 100 steps on 400 sequences")
    train(model, optimizer, 100)
    plain, plain_optimizer = copy.deepcopy((model, optimizer))
    weights, names = list(model.parameters()), list(model.state_dict())
    zo.convert(model, zo.Zoneout(cell=0.8, hidden=0.05), report=print)
    assert all(a is b for a, b in zip(weights, model.parameters()))  # the optimizer's parameters
    assert list(model.state_dict()) == names
    print("After 200 more steps as it was")
    without = train(plain, plain_optimizer, 200)
    print("After 200 more steps with zoneout")
    assert train(model, optimizer, 200) < without, "zoneout should help where a model overfits"

    plain.load_state_dict(model.state_dict())  # the checkpoint fits the original class
    zo.revert(model)  # torch.nn's modules are back, which do not know the masks' expectation
    assert type(model.encoder) is nn.LSTM
    torch.testing.assert_close(plain(MANY[0]), model.eval()(MANY[0]))
