"""The optimizers against their rules, written out in NumPy, and against torch's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from zoneout.paper.training.config import Optimizer as Settings
from zoneout.paper.training.optimizers import Optimizer, apart, clipped_factor

SHAPES = {"weight": (4, 3), "bias": (4,), "start": (2, 5)}


def gradients(updates: int = 6) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    scales = (1.0, 1e-7, 1e3)  # small enough for eps to count, and large enough to be clipped
    return [
        [
            scale * torch.randn(shape, generator=generator, dtype=torch.float64)
            for scale, shape in zip(scales, SHAPES.values())
        ]
        for _ in range(updates)
    ]


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def run(settings: Settings, updates: int = 6) -> list[Tensor]:
    """Train with ours; the learning rate changes on the way, as a schedule makes it."""
    parameters = start()
    optimizer = Optimizer(parameters, settings)
    for number, grads in enumerate(gradients(updates)):
        optimizer.step(
            [g.clone() for g in grads],
            torch.tensor(settings.lr / (number + 1), dtype=torch.float64),
        )
    return list(parameters.values())


def clipped(values: list[np.ndarray], limit: float) -> list[np.ndarray]:
    norm = np.sqrt(sum((v**2).sum() for v in values))
    return [v * min(1.0, limit / norm) for v in values] if limit else values


def written_out(settings: Settings, rule, updates: int = 6) -> list[np.ndarray]:  # type: ignore[no-untyped-def]
    """The same with a rule in NumPy, which gives the update from (gradient, its memory, number
    of the update, lr).
    """
    parameters = [p.numpy().copy() for p in start().values()]
    memory: list[dict[str, np.ndarray]] = [{} for _ in parameters]
    for number, grads in enumerate(gradients(updates)):
        grads = clipped([g.numpy() for g in grads], settings.clip_gradient)
        lr = settings.lr / (number + 1)
        steps = [rule(g, kept, number + 1, lr) for g, kept in zip(grads, memory)]
        steps = clipped(steps, settings.clip_update)
        parameters = [p - s for p, s in zip(parameters, steps)]
    return parameters


def adam(g, kept, t, lr):  # type: ignore[no-untyped-def]
    """Char-PTB's: eps beside the uncorrected root of v."""
    kept["m"] = 0.9 * kept.get("m", 0) + 0.1 * g
    kept["v"] = 0.999 * kept.get("v", 0) + 0.001 * g**2
    return lr * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * kept["m"] / (np.sqrt(kept["v"]) + 1e-8)


def rmsprop(g, kept, t, lr):  # type: ignore[no-untyped-def]
    """Permuted MNIST's: no momentum, not centred, divided by at least 1e-5."""
    kept["ms"] = 0.5 * kept.get("ms", 0) + 0.5 * g**2
    return lr * g / np.maximum(np.sqrt(kept["ms"]), 1e-5)


def sgd(g, kept, t, lr):  # type: ignore[no-untyped-def]
    return lr * g


@pytest.mark.parametrize(
    "settings, rule",
    [
        (Settings("adam", paper=True, lr=0.002, clip_update=1.0, clip_gradient=0.0), adam),
        (
            Settings("adam", paper=True, lr=5.0, clip_update=1.0, clip_gradient=0.0),
            adam,
        ),  # where the update really is clipped
        (Settings("adam", paper=True, lr=0.001, clip_gradient=1.0), adam),  # text8
        (Settings("rmsprop", paper=True, lr=0.001, decay=0.5, clip_gradient=1.0), rmsprop),
        (Settings("rmsprop", paper=True, lr=0.001, decay=0.5, clip_gradient=0.0), rmsprop),
        (Settings("sgd", lr=1.0, clip_gradient=10.0), sgd),
    ],
)
def test_the_papers_rules(settings: Settings, rule) -> None:  # type: ignore[no-untyped-def]
    """If this fails, a row of the paper is trained with another rule than its own."""
    for ours, theirs in zip(run(settings), written_out(settings, rule)):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "settings, make",
    [
        (Settings("adam", lr=0.01, clip_gradient=0.0), lambda p: torch.optim.Adam(p, lr=0.01)),
        (
            Settings("adam", lr=0.01, eps=1e-3, betas=(0.5, 0.9), clip_gradient=0.0),
            lambda p: torch.optim.Adam(p, 0.01, (0.5, 0.9), 1e-3),
        ),
        (
            Settings("sgd", lr=0.1, momentum=0.9, clip_gradient=0.0),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        ),
        (
            Settings("rmsprop", lr=0.01, decay=0.9, clip_gradient=0.0),
            lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.9),
        ),
        (
            Settings("rmsprop", lr=0.01, decay=0.8, momentum=0.5, clip_gradient=0.0),
            lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.8, momentum=0.5),
        ),
    ],
)
def test_the_ordinary_rules_are_torchs(settings: Settings, make) -> None:  # type: ignore[no-untyped-def]
    parameters = [p.requires_grad_() for p in start().values()]
    optimizer = make(parameters)
    for number, grads in enumerate(gradients()):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr / (number + 1)
        for parameter, grad in zip(parameters, grads):
            parameter.grad = grad
        optimizer.step()
    for ours, theirs in zip(run(settings), parameters):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-10, atol=1e-12)


def test_weight_decay_is_adamws_on_matrices_alone() -> None:
    """Biases, initial states that are vectors and scales of norms must not be pulled towards
    zero.
    """
    settings = Settings("adam", lr=0.01, weight_decay=0.3, clip_gradient=0.0)
    parameters = [p.requires_grad_() for p in start().values()]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for number, grads in enumerate(gradients()):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (number + 1)
        for parameter, grad in zip(parameters, grads):
            parameter.grad = grad
        optimizer.step()
    for ours, theirs in zip(run(settings), parameters):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-10, atol=1e-12)


def test_weight_decay_leaves_learned_states_alone() -> None:
    """Initial states, which have a row for each layer, are pulled towards zero as if they were
    weights.
    """
    parameters = {
        name: torch.ones(1, 4)
        for name in ("recurrent.h0", "recurrent.c0", "recurrent.weight_hh_l0")
    }
    optimizer = Optimizer(parameters, Settings("sgd", weight_decay=1.0, clip_gradient=0.0))
    optimizer.step([torch.zeros(1, 4) for _ in parameters], torch.tensor(0.1))
    assert [p.mean().item() for p in parameters.values()] == pytest.approx([1, 1, 0.9])
    states = dict(list(parameters.items())[:2])
    Optimizer(states, Settings("sgd", weight_decay=1.0, clip_gradient=0.0)).step(
        [torch.zeros(1, 4)] * 2, torch.tensor(0.1)
    )  # nothing to do


@pytest.mark.parametrize(
    "settings, make",
    [
        (Settings("adam", lr=0.01, l2=0.3), lambda p: torch.optim.Adam(p, weight_decay=0.3)),
        (Settings("sgd", lr=0.1, l2=0.3), lambda p: torch.optim.SGD(p, weight_decay=0.3)),
        (
            Settings("sgd", lr=0.1, l2=0.3, momentum=0.9),
            lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.3),
        ),
        (
            Settings("rmsprop", lr=0.01, l2=0.3),
            lambda p: torch.optim.RMSprop(p, alpha=0.9, weight_decay=0.3),
        ),
    ],
)
@pytest.mark.parametrize("limit", [0.0, 0.25])
def test_an_l2_penalty_is_torchs_weight_decay(settings: Settings, make, limit: float) -> None:  # type: ignore[no-untyped-def]
    """It is clipped with the gradient, is not divided by √v, or leaves biases out."""
    parameters = [p.requires_grad_() for p in start().values()]
    optimizer = make(parameters)
    for number, grads in enumerate(gradients()):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr / (number + 1)
        for parameter, grad in zip(parameters, grads):
            parameter.grad = grad
        if limit:
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        optimizer.step()
    for ours, theirs in zip(run(replace(settings, clip_gradient=limit)), parameters):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-7)


def test_clipping_leaves_small_and_zero_gradients_alone() -> None:
    one = torch.tensor(1.0, dtype=torch.float64)
    assert clipped_factor(one, [torch.tensor([0.3, 0.4]), torch.tensor([0.0])], 1.0).item() == 1
    assert clipped_factor(one, [torch.zeros(3)], 1.0).item() == 1
    assert clipped_factor(one, [torch.tensor([3.0, 4.0])], 1.0).item() == pytest.approx(0.2)
    assert clipped_factor(0.1 * one, [torch.tensor([3.0, 4.0])], 1.0).item() == pytest.approx(
        0.1
    )  # a norm of 0.5 then


@pytest.mark.parametrize("rule", ["adam", "sgd", "rmsprop"])
def test_an_optimizer_goes_on_from_its_tensors(rule: str) -> None:
    """If this fails, a run that is continued differs from one that never stopped."""
    settings = Settings(rule, lr=0.01, momentum=0.0 if rule == "adam" else 0.9, clip_gradient=0.0)  # type: ignore[arg-type]
    whole, lr = run(settings, 6), torch.tensor
    parameters = start()
    first = Optimizer(parameters, settings)
    for number, grads in enumerate(gradients(6)):
        if number == 3:
            saved = {name: value.clone() for name, value in first.tensors().items()}
            first = Optimizer(parameters, settings)
            for name, value in first.tensors().items():
                value.copy_(saved[name])
        first.step(grads, lr(settings.lr / (number + 1), dtype=torch.float64))
    for a, b in zip(parameters.values(), whole):
        assert torch.equal(a, b)


def test_two_gradients_in_the_same_memory() -> None:
    """Two biases have the same gradient, which is then clipped twice."""
    settings = Settings("adam", paper=True, lr=0.01, clip_gradient=1.0)
    found = []
    for make in (lambda g: [g, g], lambda g: [g, g.clone()]):
        parameters = {name: torch.zeros(3, dtype=torch.float64) for name in ("bias_ih", "bias_hh")}
        optimizer = Optimizer(parameters, settings)
        for _ in range(3):
            gradient = torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)
            optimizer.step(make(gradient), torch.tensor(0.01, dtype=torch.float64))
        found.append(list(parameters.values()) + list(optimizer.tensors().values()))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_gradients_that_share_memory_are_taken_apart():
    """Clipping in place multiplies the gradient of biases that share memory once for each of
    them.
    """
    one, other = torch.ones(4), torch.ones(4)
    own = apart([one, one, one, other])
    assert len({gradient.data_ptr() for gradient in own}) == 4
    assert own[0] is one and own[3] is other, "what has memory of its own is copied"


def test_a_model_of_one_parameter():
    """An optimizer looks for a second parameter."""
    parameter = torch.ones(3, requires_grad=True)
    optimizer = Optimizer({"weight": parameter}, Settings("sgd", lr=0.5, clip_gradient=0.0))
    optimizer.step([torch.ones(3)], torch.tensor(0.5))
    assert parameter.tolist() == [0.5] * 3
