"""A decoder that reads its own output: stepped as one `LSTMCell`, and trained as a layer.

Each frame of a made-up spectrogram is written from the frame before and the pitch. Training knows
all frames, so the same weights run there as one layer: same masks, same gradients, one call.
"""

import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoneout as zo

BANDS, FRAMES, HIDDEN, BATCH, STEPS = 12, 60, 128, 32, 200


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = zo.LSTMCell(BANDS + 1, HIDDEN, noise=zo.Zoneout(cell=0.1, hidden=0.1))
        self.output = nn.Linear(HIDDEN, BANDS)
        # The cell's weights as a layer. The parameters are shared: training either trains both.
        self.layer = zo.LSTM(BANDS + 1, HIDDEN, noise=self.cell.noise)
        for name, parameter in self.cell.named_parameters():
            setattr(self.layer, f"{name}_l0", parameter)

    def forward(self, frames: Tensor, pitch: Tensor, seed: int | None = None) -> Tensor:
        return self.output(self.layer(inputs(frames, pitch), seed=seed)[0])

    def step_by_step(self, frames: Tensor, pitch: Tensor, seed: int | None = None) -> Tensor:
        state, outputs = None, []
        for t, x in enumerate(inputs(frames, pitch)):
            state = self.cell(x, state, seed=seed, step=t)  # a seed needs the number of the step
            outputs.append(self.output(state[0]))
        return torch.stack(outputs)

    def generate(self, pitch: Tensor) -> Tensor:
        written, state = [torch.zeros(len(pitch), BANDS)], None
        for _ in range(FRAMES):
            state = self.cell(torch.cat([written[-1], pitch[:, None]], -1), state)
            written.append(self.output(state[0]))
        return torch.stack(written[1:])


def inputs(frames: Tensor, pitch: Tensor) -> Tensor:  # [T, B, BANDS + 1]
    before = torch.cat([torch.zeros_like(frames[:1]), frames[:-1]])  # silence, then each frame
    return torch.cat([before, pitch.expand(len(frames), -1)[..., None]], -1)


def speech(pitch: Tensor) -> Tensor:  # a tone that glides up and fades: [FRAMES, B, BANDS]
    t, band = torch.linspace(0, 1, FRAMES)[:, None, None], torch.arange(BANDS)
    tone = 1 + 3 * pitch[:, None] + 2 * t
    return torch.sin(3 * t + 0.1) * torch.exp(-((band - tone) ** 2))


if __name__ == "__main__":
    torch.manual_seed(0)
    decoder, pitch, found = Decoder(), torch.rand(BATCH), []
    for run in (decoder.step_by_step, decoder):
        start, y = time.perf_counter(), run(speech(pitch), pitch, seed=7)
        found.append([y, *torch.autograd.grad(y.square().mean(), list(decoder.parameters()))])
        print(f"{FRAMES} frames, forward and back: {1000 * (time.perf_counter() - start):.0f} ms")
    torch.testing.assert_close(*found)  # the same outputs and gradients, masks included
    optimizer = torch.optim.Adam(decoder.parameters(), 0.003)
    for step in range(1, STEPS + 1):
        frames = speech(pitch := torch.rand(BATCH))
        heard = frames + 0.1 * torch.randn_like(frames)  # it will read its own mistakes
        loss = F.mse_loss(decoder(heard, pitch), frames)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"  step {step}: mean squared error {loss.item():.4f}")
    truth = speech(pitch := torch.tensor([0.35]))
    with torch.no_grad():
        error = F.mse_loss(decoder.eval().generate(pitch), truth).item()  # expectation of masks
    print(f"Alone, from silence: {error:.4f}; silence has {truth.square().mean().item():.4f}")
    assert error < truth.square().mean() / 4
