"""A Lightning module with a zoneout LSTM whose rates grow from zero. Needs lightning."""

import logging
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import zoneout as zo

NOISE = zo.Zoneout(cell=0.25, hidden=0.05)
LENGTH, EPOCHS = 40, 5


class Counter(L.LightningModule):
    """Says of every step whether the sum of the numbers so far is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = zo.LSTM(1, 64, batch_first=True, noise=NOISE)
        self.output = nn.Linear(64, 1)

    def forward(self, x: Tensor, **masks: Any) -> Tensor:  # [B, T, 1] -> [B, T]
        return self.output(self.lstm(x, **masks)[0])[..., 0]

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, target = batch
        # A seed of its own for every update: a resumed run draws what it would have drawn.
        logits = self(x, seed=zo.fold(1, self.global_step))
        return F.binary_cross_entropy_with_logits(logits, target)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        x, target = batch  # Lightning has called eval(): nothing is drawn
        right = ((self(x) > 0) == (target > 0)).float().mean().item()
        print(f"  update {self.global_step:3d}: {right:.1%} right in validation")
        self.right = right

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


class Warmup(L.Callback):
    """The rates grow from 0 to their full value over the first 32 updates."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.schedule = zo.RateSchedule(module, lambda update: min(1.0, update / 32))

    def on_train_batch_end(self, *_: Any) -> None:
        self.schedule.step()


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    L.seed_everything(0, verbose=False)
    x = torch.randn(1280, LENGTH, 1)
    data = TensorDataset(x, (x.cumsum(1)[..., 0] > 0).float())
    train, valid = torch.utils.data.random_split(data, [1024, 256])
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    module, warmup = Counter(), Warmup()
    trainer = L.Trainer(max_epochs=EPOCHS, callbacks=[warmup], **quiet)
    print(f"Is the sum of all numbers so far positive? {EPOCHS} epochs, {NOISE}")
    loaders = DataLoader(train, 64, shuffle=True), DataLoader(valid, 256)
    trainer.fit(module, *loaders)
    print(f"{warmup.schedule.updates} updates, rates at the end: {module.lstm.noise}")
    assert module.lstm.noise == NOISE and module.right > 0.9


if __name__ == "__main__":
    main()
