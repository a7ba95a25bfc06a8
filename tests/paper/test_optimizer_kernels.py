"""The optimizers' kernels: on a GPU, and without one on the CPU, thread by thread."""

from __future__ import annotations

import pytest
import torch

from zoneout.paper.training.config import Optimizer as Settings
from zoneout.paper.training.optimizers import Optimizer

SHAPES = [(40, 70), (4096,), (4097,), (1,), (3, 5, 7)]
SETTINGS = [
    Settings("adam", paper=True, lr=0.002, clip_update=1.0),
    Settings("adam", lr=0.01, clip_gradient=1.0, weight_decay=0.1),
    Settings("sgd", lr=1.0, clip_gradient=10.0),
    Settings("sgd", lr=0.1, momentum=0.9, clip_update=1.0, weight_decay=0.1),
    Settings("adam", lr=0.01, clip_gradient=1.0, l2=0.1),
    Settings("sgd", lr=0.1, clip_gradient=1.0, l2=0.1),
    Settings("rmsprop", paper=True, lr=0.001, decay=0.5, clip_gradient=1.0),
    Settings("rmsprop", lr=0.01, decay=0.8, momentum=0.5),
]


def trained(settings: Settings, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    parameters = {
        str(n): torch.randn(shape, generator=generator).to(device) for n, shape in enumerate(SHAPES)
    }
    optimizer = Optimizer(parameters, settings)
    for _ in range(4):
        gradients = [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]
        optimizer.step(gradients, torch.tensor(settings.lr, dtype=torch.float64, device=device))
    return [value.cpu() for value in (*parameters.values(), *optimizer.tensors().values())]


def name(settings: Settings) -> str:
    parts = {"paper": settings.paper, "momentum": settings.momentum, "l2": settings.l2}
    return "-".join([settings.rule, *(part for part, used in parts.items() if used)])


@pytest.mark.parametrize("settings", SETTINGS, ids=name)
def test_the_kernels_take_the_same_steps(
    settings: Settings, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule's kernel is another rule, or forgets numbers at the end of a block."""
    want = trained(settings)
    monkeypatch.setattr(Optimizer, "_fused", lambda *_: True)
    for got, expected in zip(trained(settings), want):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", SETTINGS, ids=name)
def test_a_gpu_takes_the_same_steps(settings: Settings) -> None:
    """The same on a GPU, where the kernels run as what they are."""
    for got, expected in zip(trained(settings, "cuda"), trained(settings)):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
