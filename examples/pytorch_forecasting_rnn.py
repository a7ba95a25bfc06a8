"""Zoneout inside a model of pytorch-forecasting. Needs pytorch-forecasting and lightning."""

import logging
import warnings
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import torch

import zoneout as zo

warnings.simplefilter("ignore")  # theirs
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

from pytorch_forecasting import RecurrentNetwork, TimeSeriesDataSet  # noqa: E402

PAST, AHEAD, STEPS = 48, 12, 400


def main() -> None:
    L.seed_everything(0, verbose=False)
    t, draw = np.arange(STEPS), np.random.default_rng(0)
    tables = []
    for name in ("a", "b", "c", "d"):
        y = np.sin(2 * np.pi * t / 24 + draw.uniform(0, 6)) + 0.2 * draw.standard_normal(STEPS)
        tables.append(pd.DataFrame({"time": t, "series": name, "y": y.astype("float32")}))
    table = pd.concat(tables, ignore_index=True)
    columns: dict[str, Any] = {"time_idx": "time", "target": "y", "group_ids": ["series"]}
    columns |= {"max_encoder_length": PAST, "min_encoder_length": PAST}
    columns |= {"max_prediction_length": AHEAD, "time_varying_unknown_reals": ["y"]}
    training = TimeSeriesDataSet(table[table.time < 300], **columns)
    later = TimeSeriesDataSet.from_dataset(training, table, min_prediction_idx=300)

    model = RecurrentNetwork.from_dataset(
        training, cell_type="LSTM", hidden_size=32, rnn_layers=1, learning_rate=0.01
    )
    zo.convert(model, zo.Zoneout(cell=0.25, hidden=0.1), report=print)
    assert isinstance(model.rnn, zo.LSTM)

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=3, gradient_clip_val=1.0, **quiet)
    loaders: dict[str, Any] = {"batch_size": 64, "num_workers": 0}
    trainer.fit(model, training.to_dataloader(train=True, **loaders))

    model.eval()
    errors, naive = [], []
    with torch.no_grad():
        for x, (y, _) in later.to_dataloader(train=False, **loaders):
            errors.append((model(x)["prediction"][..., 0] - y).square())
            naive.append((x["encoder_target"][:, -24 : AHEAD - 24] - y).square())
    error, as_before = torch.cat(errors).mean().item(), torch.cat(naive).mean().item()
    print(f"\n{len(later)} forecasts of {AHEAD} steps after the training data, mean squared error")
    print(f"  as a day before      {as_before:.3f}")
    print(f"  LSTM with zoneout    {error:.3f}")
    print("  the noise itself     0.040")
    assert error < as_before


if __name__ == "__main__":
    main()
