"""Models loaded by Hugging Face's transformers and accelerate, the real ones (`make
test-ecosystem` installs them).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoneout as zo

NOISE = zo.Zoneout(cell=0.5, hidden=0.25)


def same_as(model: Any, whole: Any, x: Tensor) -> None:
    """Hold a loaded model to the one that was saved, in training and at evaluation."""
    for training in (True, False):
        torch.testing.assert_close(
            model.train(training)(x, 7), whole.train(training)(x, 7), rtol=0, atol=0
        )
    assert not torch.equal(model.train()(x, 7), model.eval()(x, 7)), "training would never zone out"


class Body(nn.Module):
    """Two layers and a cell with noise, one of them with a rate a unit and static masks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = zo.LSTM(3, 5, 2, noise=NOISE)
        self.second = zo.GRU(
            5, 4, noise=zo.Zoneout(hidden=[torch.tensor([0.1, 0.2, 0.3, 0.4], device="cpu")])
        )
        self.third = zo.RNN(4, 4, noise=zo.Zoneout(hidden=0.5, mask="static", seed=3))
        self.own = zo.Recurrent(zo.cells.peephole_lstm, 4, 4, noise=NOISE)
        self.cell = zo.GRUCell(4, 2, noise=zo.Zoneout(hidden=0.5))

    def forward(self, x: Tensor, seed: int) -> Tensor:
        for layer in (self.first, self.second, self.third, self.own):
            x, _ = layer(x, seed=seed)
        return self.cell(x[-1], torch.ones(x.shape[1], 2), seed=seed, step=0)


@pytest.mark.filterwarnings("ignore")  # theirs
def test_transformers_from_pretrained(tmp_path: Path) -> None:
    """`from_pretrained` builds on the meta device: a rate would come back as whatever lay in
    memory.
    """
    transformers = pytest.importorskip("transformers")

    class Config(transformers.PretrainedConfig):  # type: ignore[misc, name-defined]
        model_type = "zoneout-test"

    class Model(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.body = Body()
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            """Every weight comes from the checkpoint."""

        def forward(self, x: Tensor, seed: int) -> Tensor:
            return self.body(x, seed)

    whole = Model(Config())
    whole.save_pretrained(tmp_path)
    loaded = Model.from_pretrained(tmp_path)
    same_as(loaded, whole, torch.randn(6, 4, 3))
    assert not dict(loaded.named_buffers())


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("buffers", [False, True])
def test_accelerate_empty_weights_and_dispatch(tmp_path: Path, buffers: bool) -> None:
    """`init_empty_weights` and `load_checkpoint_and_dispatch` could not load a layer with noise."""
    accelerate = pytest.importorskip("accelerate")
    whole = Body()
    torch.save(whole.state_dict(), tmp_path / "weights.bin")
    with accelerate.init_empty_weights(include_buffers=buffers):
        model = Body()
    assert all(p.is_meta for p in model.parameters())
    loaded = accelerate.load_checkpoint_and_dispatch(
        model, str(tmp_path / "weights.bin"), device_map={"": "cpu"}
    )
    same_as(loaded, whole, torch.randn(6, 4, 3))


@pytest.mark.filterwarnings("ignore")  # theirs
def test_accelerate_offloads_to_disk(tmp_path: Path) -> None:
    """Weights that are fetched for each call, and are on the meta device between calls, could
    not be used.
    """
    accelerate = pytest.importorskip("accelerate")
    whole = Body()
    x = torch.randn(6, 4, 3)
    wanted = whole(x, 7)
    accelerate.disk_offload(whole, str(tmp_path), execution_device=torch.device("cpu"))
    torch.testing.assert_close(whole(x, 7), wanted, rtol=0, atol=0)
