"""Hugging Face's Trainer, save_pretrained, growing rates. Needs transformers, accelerate."""

import tempfile
import warnings
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

import zoneout as zo

SYMBOLS, LENGTH = 16, 32


class ZoneoutConfig(hf.PreTrainedConfig):
    model_type = "zoneout-lstm"  # the rates are here: weights are stored without them

    def __init__(self, cell: float = 0.25, hidden: float = 0.05, **rest: Any) -> None:
        self.cell, self.hidden = cell, hidden
        super().__init__(**rest)


class ZoneoutModel(hf.PreTrainedModel):
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
        loss = None if labels is None else F.cross_entropy(logits.mT, labels)
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


class Warmup(hf.TrainerCallback):
    def on_train_begin(self, *_: Any, model: nn.Module, **rest: Any) -> None:
        self.schedule = zo.RateSchedule(model, lambda update: min(1.0, update / 64))

    def on_step_end(self, *_: Any, **rest: Any) -> None:
        self.schedule.step()  # the rates grow from 0 over the first 64 updates


def rows(count: int) -> list[dict[str, Tensor]]:
    start, step = torch.randint(SYMBOLS, (count, 1)), torch.randint(1, 4, (count, 1))
    x = (start + step * torch.arange(LENGTH + 1)) % SYMBOLS
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in x]  # what comes next?


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # theirs
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = ZoneoutModel(ZoneoutConfig())
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"num_train_epochs": 6, "per_device_train_batch_size": 32}
        settings |= {"learning_rate": 0.01, "report_to": "none", "save_strategy": "no"}
        settings |= {"disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
        arguments = hf.TrainingArguments(folder, **settings)
        trainer = hf.Trainer(model, arguments, train_dataset=rows(1024), eval_dataset=rows(256))
        trainer.add_callback(Warmup)
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
