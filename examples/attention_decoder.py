"""A Tacotron-style decoder: attention between two steps of an `LSTMCell` with zoneout.

What a step reads depends on the step before, so the cell is called step by step.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoneout as zo

SYMBOLS, LETTERS, EACH, BANDS, H, STEPS = 10, 6, 3, 8, 64, 400
FRAMES = LETTERS * EACH
SOUNDS = torch.rand(SYMBOLS, BANDS, generator=torch.Generator().manual_seed(1))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(SYMBOLS, H)
        self.encoder = zo.GRU(H, H // 2, bidirectional=True, noise=zo.Zoneout(hidden=0.1))
        self.prenet = nn.Sequential(nn.Linear(BANDS, H), nn.ReLU())
        self.cell = zo.LSTMCell(2 * H, H, noise=zo.Zoneout(cell=0.1, hidden=0.1))  # Tacotron 2's
        self.query, self.key, self.score = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, 1)
        self.place = nn.Linear(2, H)  # attention so far and at the last step, for each letter
        self.output = nn.Linear(2 * H, BANDS)

    def forward(self, text: Tensor, frames: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return frames [T, B, BANDS] and attention [T, B, L]; steps read true or own frames."""
        memory = self.encoder(self.letters(text))[0].transpose(0, 1)  # [B, L, H]
        keys, rows = self.key(memory), text.shape[1]
        frame, (context, h, c) = torch.zeros(rows, BANDS), torch.zeros(3, rows, H)
        last = F.one_hot(torch.zeros(rows, dtype=torch.long), len(text)).float()
        total, written, looks = last, [], []
        for t in range(FRAMES):
            x = torch.cat([self.prenet(frame), context], -1)
            h, c = self.cell(x, (h, c))  # draws new masks at every step; eval() the expectation
            where = self.place(torch.stack([last, total], -1))
            energy = self.score(torch.tanh(keys + where + self.query(h)[:, None]))[..., 0]
            last = energy.softmax(-1)
            total = total + last
            context = torch.einsum("bl,blh->bh", last, memory)
            written.append(self.output(torch.cat([h, context], -1)))
            looks.append(last)
            frame = written[-1] if frames is None else frames[t]
        return torch.stack(written), torch.stack(looks)


def speech(text: Tensor) -> Tensor:
    """Every letter sounds for three frames: [FRAMES, B, BANDS]."""
    return SOUNDS[text].repeat_interleave(EACH, 0)


def main() -> None:
    torch.manual_seed(0)
    decoder = Decoder()
    optimizer = torch.optim.Adam(decoder.parameters(), 0.003)
    for step in range(1, STEPS + 1):
        text = torch.randint(SYMBOLS, (LETTERS, 32))
        loss = F.mse_loss(decoder(text, speech(text))[0], speech(text))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"  step {step}: mean squared error {loss.item():.4f}")
    text = torch.randint(SYMBOLS, (LETTERS, 100))
    with torch.no_grad():
        frames, looks = decoder.eval()(text)  # it reads its own frames
    error, mean = F.mse_loss(frames, speech(text)).item(), SOUNDS.var(0).mean().item()
    print("\nAttention while it writes: frames from left to right, letters upwards")
    for letter in looks[:, 0].T.flip(0):
        print("  |" + "".join(" .:*#"[int(4 * v)] for v in letter))
    print(f"Mean squared error of new texts {error:.4f}; of an average sound {mean:.4f}")
    assert error < mean / 4


if __name__ == "__main__":
    main()
