"""Hugging Face's Trainer, save_pretrained and from_pretrained. Needs transformers, accelerate."""

import tempfile
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.utils import logging

import zoneout as zo

SYMBOLS, LENGTH = 16, 32


class ZoneoutConfig(PreTrainedConfig):
    """The rates are in the config: `save_pretrained` stores no rate with the weights."""

    model_type = "zoneout-lstm"

    def __init__(self, cell: float = 0.25, hidden: float = 0.05, **rest: Any) -> None:
        self.cell, self.hidden = cell, hidden
        super().__init__(**rest)


class ZoneoutModel(PreTrainedModel):
    config_class = ZoneoutConfig

    def __init__(self, config: ZoneoutConfig) -> None:
        super().__init__(config)
        noise = zo.Zoneout(cell=config.cell, hidden=config.hidden)
        self.embedding = nn.Embedding(SYMBOLS, 32)
        self.lstm = zo.LSTM(32, 64, batch_first=True, noise=noise)
        self.output = nn.Linear(64, SYMBOLS)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.output(self.lstm(self.embedding(input_ids))[0])  # [B, T, SYMBOLS]
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def rows(count: int) -> list[dict[str, Tensor]]:
    """Rows that count upwards in steps of their own; the labels are the next symbols."""
    start, step = torch.randint(SYMBOLS, (count, 1)), torch.randint(1, 4, (count, 1))
    x = (start + step * torch.arange(LENGTH + 1)) % SYMBOLS
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in x]


def main() -> None:
    warnings.simplefilter("ignore")  # theirs
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = ZoneoutModel(ZoneoutConfig())
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"num_train_epochs": 6, "per_device_train_batch_size": 32}
        settings |= {"learning_rate": 0.01, "report_to": "none", "save_strategy": "no"}
        settings |= {"disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
        arguments = TrainingArguments(folder, **settings)
        trainer = Trainer(model, arguments, train_dataset=rows(1024), eval_dataset=rows(256))
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        print(f"Loss on other rows, before {before:.3f}, after {after:.3f}")

        model.save_pretrained(folder)
        loaded = ZoneoutModel.from_pretrained(folder)
        print(f"Loaded again:\n{loaded}")
    x = rows(4)[0]["input_ids"][None]
    torch.testing.assert_close(loaded.eval()(x)["logits"], model.eval()(x)["logits"])
    assert loaded.lstm.noise == model.lstm.noise and after < before / 4


if __name__ == "__main__":
    main()
