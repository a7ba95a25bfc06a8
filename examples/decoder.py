"""A decoder that hears itself: one `LSTMCell` with zoneout, stepped as speech synthesis does, then
run as a layer.

The decoder writes the frames of a small made-up spectrogram one by one, each from the frame before
and from the pitch that is asked for. Training knows all the frames beforehand, so the same weights
can run there as one layer: the same masks, the same gradients, one call instead of a loop.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoneout as zo

BANDS, FRAMES, HIDDEN, BATCH, STEPS = 12, 60, 128, 32, 400
NOISE = zo.Zoneout(cell=0.1, hidden=0.1)  # what Tacotron 2 uses


class Decoder(nn.Module):
    """The next frame from the last one and the pitch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = zo.LSTMCell(BANDS + 1, HIDDEN, noise=NOISE)
        self.output = nn.Linear(HIDDEN, BANDS)

    def step_by_step(self, frames: Tensor, pitch: Tensor, seed: int | None = None) -> Tensor:
        """All next frames, one call of the cell each. With a seed, a cell has to be told which
        step this is.
        """
        state, outputs = None, []
        for t, x in enumerate(inputs(frames, pitch)):
            state = self.cell(x, state, seed=seed, step=t)
            outputs.append(self.output(state[0]))
        return torch.stack(outputs)

    def generate(self, pitch: Tensor, frames: int) -> Tensor:
        """Start from silence and feed every frame back in."""
        frame, state, outputs = torch.zeros(len(pitch), BANDS), None, []
        for _ in range(frames):
            state = self.cell(torch.cat([frame, pitch[:, None]], -1), state)
            frame = self.output(state[0])
            outputs.append(frame)
        return torch.stack(outputs)


def inputs(frames: Tensor, pitch: Tensor) -> Tensor:
    """What the decoder sees at each step: the frame before, beginning with silence, and the
    pitch.
    """
    before = torch.cat([torch.zeros_like(frames[:1]), frames[:-1]])  # [T, B, BANDS]
    return torch.cat([before, pitch.expand(len(frames), -1)[..., None]], -1)  # [T, B, BANDS + 1]


def as_layer(cell: zo.LSTMCell) -> zo.LSTM:
    """The cell's weights as a layer. The parameters are shared: training either trains both."""
    layer = zo.LSTM(cell.input_size, cell.hidden_size, noise=cell.noise)
    for name, parameter in cell.named_parameters():
        setattr(layer, f"{name}_l0", parameter)
    return layer


def speech(pitch: Tensor) -> Tensor:
    """A tone that glides up from its pitch, with an overtone, and fades: [FRAMES, B, BANDS]."""
    t = torch.linspace(0, 1, FRAMES)[:, None, None]
    band = torch.arange(BANDS)
    tone = 1 + 3 * pitch[:, None] + 2 * t
    fade = torch.sin(3 * t + 0.1)
    return fade * (torch.exp(-((band - tone) ** 2)) + 0.5 * torch.exp(-((band - 2 * tone) ** 2)))


def picture(frames: Tensor) -> str:
    """A spectrogram in characters, high bands on top."""
    shades = " .:-=+*#%@"
    rows = (frames.clamp(0, 0.99) * len(shades)).int().T.flip(0)  # [BANDS, T]
    return "\n".join("  |" + "".join(shades[int(v)] for v in row) for row in rows)


def milliseconds(run: Callable[[], Tensor], times: int = 5) -> float:
    start = time.perf_counter()
    for _ in range(times):
        run().square().mean().backward()
    return 1000 * (time.perf_counter() - start) / times


def main() -> None:
    torch.manual_seed(0)
    decoder = Decoder()
    layer = as_layer(decoder.cell)
    pitch = torch.rand(BATCH)
    frames = speech(pitch)

    # The same draw, the same masks: stepping the cell and running the layer agree, and so do their
    # gradients.
    stepped = decoder.step_by_step(frames, pitch, seed=7)
    whole = decoder.output(layer(inputs(frames, pitch), seed=7)[0])
    torch.testing.assert_close(stepped, whole)
    weights = list(decoder.parameters())
    for one, other in zip(
        *(torch.autograd.grad(F.mse_loss(y, frames), weights) for y in (stepped, whole))
    ):
        torch.testing.assert_close(one, other)
    print(
        "Stepped as a cell and run as a layer: the same outputs and the same gradients, masks "
        "included."
    )

    cell_time = milliseconds(lambda: decoder.step_by_step(frames, pitch))
    layer_time = milliseconds(lambda: decoder.output(layer(inputs(frames, pitch))[0]))
    print(
        f"Forward and back through {FRAMES} frames: stepped {cell_time:.1f} ms, as a layer "
        f"{layer_time:.1f} ms.\n"
    )

    optimizer = torch.optim.Adam(decoder.parameters(), 0.003)
    for step in range(1, STEPS + 1):
        pitch = torch.rand(BATCH)
        frames = speech(pitch)
        heard = frames + 0.1 * torch.randn_like(
            frames
        )  # it will hear its own mistakes, so let it hear some now
        loss = F.mse_loss(decoder.output(layer(inputs(heard, pitch))[0]), frames)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"  step {step:3d}   mean squared error {loss.item():.4f}")

    decoder.eval()  # generation uses the expectation of the masks
    pitch = torch.tensor([0.35])
    with torch.no_grad():
        written = decoder.generate(pitch, FRAMES)
    error, silence = F.mse_loss(written, speech(pitch)).item(), speech(pitch).square().mean().item()
    print(f"\nWritten by the decoder alone, from silence, at a pitch of {pitch.item():.2f}:")
    print(picture(written[:, 0]))
    print("\nWhat it should be:")
    print(picture(speech(pitch)[:, 0]))
    print(f"\nMean squared error {error:.4f}; silence would have {silence:.4f}.")
    assert error < silence / 4


if __name__ == "__main__":
    main()
