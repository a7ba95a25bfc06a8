"""Adam, SGD and RMSProp, both in the form of the paper's code and in the ordinary form.

torch's optimizers cannot compute the paper's rules, for two reasons. They change the weights
immediately, but the update of char-PTB is clipped before it is applied. And two of the paper's
rules use eps in another place than torch does.

All numbers that change between updates are tensors, so a step can be captured in a CUDA graph.
On a GPU, each rule is one kernel for all parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ...draws import widest
from ...ops import cuda
from ...ops.memory import in_memory
from . import optimizer_kernel as fused
from .config import Optimizer as Settings

Tensors = list[Tensor]
STATES = ("h0", "c0")  # learned initial states: not weights, although they have two dimensions


def eps_of(settings: Settings) -> float:
    """Return eps, which keeps divisions finite: the configured value, or the rule's default."""
    if settings.eps is not None:
        return settings.eps
    return 1e-5 if settings.rule == "rmsprop" and settings.paper else 1e-8


class Optimizer:
    """Updates parameters in place from their gradients.

    >>> weight = torch.ones(3)
    >>> sgd = Optimizer({"weight": weight}, Settings(rule="sgd", clip_gradient=1.0))
    >>> sgd.step([torch.tensor([3.0, 0.0, 4.0])], lr=torch.tensor(0.5))
    >>> weight
    tensor([0.7000, 1.0000, 0.6000])
    """

    def __init__(self, parameters: dict[str, Tensor], settings: Settings) -> None:
        self.settings = settings
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.decays = [
            p.dim() > 1 and name.rpartition(".")[2] not in STATES for name, p in parameters.items()
        ]
        slots = {
            "adam": ("mean", "square"),
            "sgd": ("momentum",),
            "rmsprop": ("square", "momentum"),
        }[settings.rule]
        self.slots = {
            slot: [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
            for slot in slots
            if slot != "momentum" or settings.momentum
        }
        device = self.parameters[0].device
        self.count = torch.zeros((), dtype=widest(device), device=device)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the optimizer by name, which a checkpoint saves and restores."""
        state = {"count": self.count}
        for slot, values in self.slots.items():
            state |= {f"{slot}.{name}": value for name, value in zip(self.names, values)}
        return state

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: Tensor) -> None:
        """Apply one update. The gradients are used as workspace and are undefined afterwards."""
        settings, steps = self.settings, apart(gradients)
        factor = (
            clipped_factor(lr.new_ones(()), steps, settings.clip_gradient)
            if settings.clip_gradient
            else None
        )
        self.count += 1
        by, eps = lr, lr.new_full((), eps_of(settings))
        if settings.rule == "adam":
            # m̂ / (√v̂ + eps), with both bias corrections in one factor. eps is therefore
            # multiplied by √(1 − β₂ᵗ); the paper's rule leaves this multiplication out.
            bias1 = 1 - settings.betas[0] ** self.count
            bias2 = (1 - settings.betas[1] ** self.count).sqrt()
            by, eps = lr * bias2 / bias1, eps if settings.paper else eps * bias2
        if self.slots or settings.l2:
            steps = self._advance(steps, factor, eps)
        elif factor is not None:  # SGD without momentum: the steps are the gradients
            by = by * factor
        if settings.clip_update:
            by = clipped_factor(by, steps, settings.clip_update)
        self._apply(steps, by, 1 - settings.weight_decay * lr if settings.weight_decay else None)

    def _fused(self, steps: Tensors) -> bool:
        first = self.parameters[0]
        return first.is_cuda and cuda.is_available(first) and fused.supports(self.parameters, steps)

    def _advance(self, grads: Tensors, factor: Tensor | None, eps: Tensor) -> Tensors:
        """Return the steps, and update the optimizer's state.

        The gradients are multiplied by `factor`, and the L2 penalty is added to them.
        """
        settings = self.settings
        if self._fused(grads):
            kept = settings.betas[1] if settings.rule == "adam" else settings.decay
            numbers = (1 - settings.betas[0], kept, settings.momentum)
            fused.advance(
                settings.rule,
                settings.paper,
                self.parameters,
                grads,
                list(self.slots.values()),
                numbers,
                settings.l2,
                factor,
                eps,
            )
            return grads
        if factor is not None:
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))
        if settings.l2:
            torch._foreach_add_(grads, self.parameters, alpha=settings.l2)
        if settings.rule == "adam":
            return self._adam(grads, eps)
        if settings.rule == "rmsprop":
            self._over_rms(grads, eps)
        return self._with_momentum(grads)

    def _apply(self, steps: Tensors, by: Tensor, keep: Tensor | None) -> None:
        """Subtract `by` times the steps from the parameters, after weight decay.

        Weight decay multiplies the weight matrices by `keep`; None is no decay.
        """
        if self._fused(steps):
            fused.apply(self.parameters, steps, by, keep, self.decays)
            return
        if keep is not None and (
            matrices := [p for p, decays in zip(self.parameters, self.decays) if decays]
        ):
            torch._foreach_mul_(matrices, keep.to(matrices[0].dtype))
        torch._foreach_mul_(steps, by.to(steps[0].dtype))
        torch._foreach_sub_(self.parameters, steps)

    def _adam(self, grads: Tensors, eps: Tensor) -> Tensors:
        beta1, beta2 = self.settings.betas
        mean, square = self.slots["mean"], self.slots["square"]
        torch._foreach_lerp_(mean, grads, 1 - beta1)
        torch._foreach_mul_(square, beta2)
        torch._foreach_addcmul_(square, grads, grads, 1 - beta2)
        return list(torch._foreach_div(mean, added(torch._foreach_sqrt(square), eps)))

    def _over_rms(self, grads: Tensors, eps: Tensor) -> None:
        square = self.slots["square"]
        torch._foreach_mul_(square, self.settings.decay)
        torch._foreach_addcmul_(square, grads, grads, 1 - self.settings.decay)
        rms = torch._foreach_sqrt(square)
        if self.settings.paper:
            torch._foreach_clamp_min_(rms, eps_of(self.settings))
        else:
            added(rms, eps)
        torch._foreach_div_(grads, rms)

    def _with_momentum(self, steps: Tensors) -> Tensors:
        if not self.settings.momentum:
            return steps
        momentum = self.slots["momentum"]
        torch._foreach_mul_(momentum, self.settings.momentum)
        torch._foreach_add_(momentum, steps)
        return [m.clone() for m in momentum]


class Average:
    """The averages of parameters over all updates since `start`.

    It computes what torch's `AveragedModel` does. That one reads on the host how many updates it
    has seen, which a CUDA graph cannot do.

    >>> weight = torch.zeros(1)
    >>> average = Average({"weight": weight})
    >>> average.start()
    >>> for value in (1.0, 2.0, 6.0):
    ...     average.step(weight.fill_(value))
    >>> with average.used():
    ...     print(weight)
    tensor([3.])
    """

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        """Average these parameters; without any, all methods do nothing."""
        self.parameters = parameters
        self.values = {name: p.detach().clone() for name, p in parameters.items()}
        device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self.begun = False  # not on the device: before `start`, an update costs nothing
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages and the counts by name, for a checkpoint."""
        if not self.parameters:
            return {}
        return {"count": self.count, **self.values}

    def start(self) -> None:
        """Begin to average with the next update."""
        self.begun = bool(self.parameters)

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        """Add the parameters to the averages, which the first time become the parameters."""
        if not self.begun:
            return
        self.count += 1
        for name, parameter in self.parameters.items():
            value = self.values[name]
            value.lerp_(parameter.detach(), self.count.reciprocal().to(value.dtype))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Put the averages in place of the parameters inside the `with` block."""
        with torch.no_grad():
            kept = {name: p.detach().clone() for name, p in self.parameters.items()}
            for name, parameter in self.parameters.items():
                parameter.copy_(self.values[name])
            try:
                yield
            finally:
                for name, parameter in self.parameters.items():
                    parameter.copy_(kept[name])


def apart(gradients: Sequence[Tensor]) -> Tensors:
    """Return the gradients as contiguous tensors that share no memory.

    The gradients of two biases may be the same tensor.
    """
    taken: set[int] = set()
    separate = []
    for gradient in map(in_memory, gradients):
        separate.append(gradient.clone() if gradient.data_ptr() in taken else gradient)
        taken.add(gradient.data_ptr())
    return separate


def added(tensors: Any, number: Tensor) -> Any:
    """Add a number to the tensors in place and return them.

    The number is passed as a list, because torch copies a single tensor to the host.
    """
    torch._foreach_add_(tensors, [number.to(tensors[0].dtype)] * len(tensors))
    return tensors


def clipped_factor(by: Tensor, tensors: Tensors, limit: float) -> Tensor:
    """Return `by`, or the smaller factor that reduces the tensors' global norm to `limit`."""
    return torch.minimum(by, limit / get_total_norm(tensors, foreach=True))
