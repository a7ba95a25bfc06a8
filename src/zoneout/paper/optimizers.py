"""Adam, SGD and RMSProp, as the paper's code had them and in their ordinary form.

torch's own cannot be used for the paper's: they change the weights at once, while the update of char-PTB is clipped
before it is applied, and two of the rules differ from torch's in where eps stands. All numbers that change from update
to update are tensors, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from .config import Optimizer as Settings

Tensors = list[Tensor]


def eps_of(settings: Settings) -> float:
    """The small number that keeps a division finite: the one given, or the rule's own."""
    if settings.eps is not None:
        return settings.eps
    return 1e-5 if settings.rule == "rmsprop" and settings.paper else 1e-8


class Optimizer:
    """Changes parameters in place, given their gradients.

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
        slots = {"adam": ("mean", "square"), "sgd": ("momentum",), "rmsprop": ("square", "momentum")}[settings.rule]
        self.slots = {
            slot: [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
            for slot in slots
            if slot != "momentum" or settings.momentum
        }
        device = self.parameters[0].device
        self.count = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the optimizer remembers, by name: saved and loaded with a checkpoint."""
        kept = {"count": self.count}
        for slot, values in self.slots.items():
            kept |= {f"{slot}.{name}": value for name, value in zip(self.names, values)}
        return kept

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: Tensor) -> None:
        """One update. The gradients are used up: what they hold afterwards means nothing."""
        settings, grads = self.settings, list(gradients)
        if settings.clip_gradient:
            by = clipped_factor(lr.new_ones(()), grads, settings.clip_gradient)
            torch._foreach_mul_(grads, by.to(grads[0].dtype))
        self.count += 1
        steps, by = {"adam": self._adam, "sgd": self._sgd, "rmsprop": self._rmsprop}[settings.rule](grads, lr)
        if settings.clip_update:
            by = clipped_factor(by, steps, settings.clip_update)
        if settings.weight_decay:
            matrices = [p for p in self.parameters if p.dim() > 1]
            torch._foreach_mul_(matrices, (1 - settings.weight_decay * lr).to(matrices[0].dtype))
        torch._foreach_mul_(steps, by.to(steps[0].dtype))
        torch._foreach_sub_(self.parameters, steps)

    # Each rule gives steps, which may be changed, and the number that they are multiplied by.

    def _adam(self, grads: Tensors, lr: Tensor) -> tuple[Tensors, Tensor]:
        beta1, beta2 = self.settings.betas
        mean, square = self.slots["mean"], self.slots["square"]
        torch._foreach_lerp_(mean, grads, 1 - beta1)
        torch._foreach_mul_(square, beta2)
        torch._foreach_addcmul_(square, grads, grads, 1 - beta2)
        bias1, bias2 = 1 - beta1**self.count, (1 - beta2**self.count).sqrt()
        eps = eps_of(self.settings)
        # m̂ / (√v̂ + eps), with both corrections in one factor: eps is then √(1 − β₂ᵗ) times itself, which the paper's
        # rule leaves out.
        roots = torch._foreach_sqrt(square)
        if self.settings.paper:
            torch._foreach_add_(roots, eps)
        else:  # as a list, since a single tensor would be read by the host
            torch._foreach_add_(roots, [(eps * bias2).to(roots[0].dtype)] * len(roots))
        return list(torch._foreach_div(mean, roots)), lr * bias2 / bias1

    def _sgd(self, grads: Tensors, lr: Tensor) -> tuple[Tensors, Tensor]:
        return self._with_momentum(grads), lr

    def _rmsprop(self, grads: Tensors, lr: Tensor) -> tuple[Tensors, Tensor]:
        square, eps = self.slots["square"], eps_of(self.settings)
        torch._foreach_mul_(square, self.settings.decay)
        torch._foreach_addcmul_(square, grads, grads, 1 - self.settings.decay)
        rms = torch._foreach_sqrt(square)
        if self.settings.paper:
            torch._foreach_clamp_min_(rms, eps)
        else:
            torch._foreach_add_(rms, eps)
        torch._foreach_div_(grads, rms)
        return self._with_momentum(grads), lr

    def _with_momentum(self, steps: Tensors) -> Tensors:
        if not self.settings.momentum:
            return steps
        momentum = self.slots["momentum"]
        torch._foreach_mul_(momentum, self.settings.momentum)
        torch._foreach_add_(momentum, steps)
        return [m.clone() for m in momentum]


def clipped_factor(by: Tensor, tensors: Tensors, limit: float) -> Tensor:
    """What to multiply the tensors by instead of `by`, so that their global norm is then at most `limit`."""
    return torch.minimum(by, limit / get_total_norm(tensors, foreach=True))
