"""One update: gather the batch, forward pass, backward pass, clipping, optimizer.

Before an epoch, the examples, seeds and learning rates of all its updates are copied to the
device. An update then needs nothing from the host, and returns nothing to it unless asked. On a
GPU the whole update is therefore one CUDA graph. Elsewhere the same function runs eagerly.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...draws import widest
from ...ops.cuda import turns
from ...philox import WORD, as_seed, philox
from .config import Config
from .feeds import Feed
from .models import loss_of, loss_scale, parameters_of
from .optimizers import Average, Optimizer
from .processes import Processes, alone, products_in
from .runs import weights_of

_UPDATES = 0x75706474  # counter word of the generator for the seeds of updates; no mask uses it


def update_seeds(seed: int, first: int, count: int) -> Tensor:
    """Return the seeds of `count` updates from number `first` on, int64 [count].

    Each is a function of (seed, update).
    """
    number = torch.arange(first, first + count)
    zero = torch.zeros((), dtype=torch.int64)
    low, high, _, _ = philox(as_seed(seed), number & WORD, number >> 32, zero, zero + _UPDATES)
    return low | high << 32


def learning_rates(config: Config, epoch: int, first: int, count: int, plateaus: int = 0) -> Tensor:
    """Return the learning rates of an epoch whose first update is number `first`, float64 [count].

    `plateaus` is how often the schedule "plateau" has divided the rate so far.

    >>> from .config import Optimizer, Schedule
    >>> config = Config(optimizer=Optimizer(lr=1.0), schedule=Schedule("divide", after=2, by=2.0))
    >>> [learning_rates(config, epoch, 0, 1).item() for epoch in range(4)]
    [1.0, 1.0, 0.5, 0.25]
    """
    lr, schedule = config.optimizer.lr, config.schedule
    within = torch.arange(count, dtype=torch.float64)
    if schedule.kind == "divide":
        lr /= schedule.by ** max(0, epoch + 1 - schedule.after)
    if schedule.kind == "milestones":
        lr /= schedule.by ** sum(epoch >= passed for passed in schedule.at)
    if schedule.kind == "plateau":
        lr /= schedule.by**plateaus
    if schedule.kind == "cosine":
        done = (epoch + within / count) / config.epochs
        if config.updates:  # the run ends at the earlier limit; epochs may differ in length
            done = torch.maximum(done, (first + within) / config.updates)
        return lr * (1 + torch.cos(math.pi * done.clamp(max=1))) / 2
    return torch.full((count,), lr, dtype=torch.float64)


class Step:
    """The update of a run, and all tensors that it changes."""

    def __init__(self, model: Any, feed: Feed, config: Config, processes: Processes) -> None:
        self.model, self.feed, self.config, self.processes = model.train(), feed, config, processes
        parameters = parameters_of(model)
        self.parameters = list(parameters.values())
        self.optimizer = Optimizer(parameters, config.optimizer)
        self.average = Average(parameters if config.optimizer.average_after else {})
        # A graph for each length of a batch, with and without averages of the weights, and whether
        # it contains a kernel that needs the whole GPU. Without `capture` there is none.
        self.captures, self.graphs = False, dict[tuple[int, bool], tuple[Any, bool]]()
        self.lengths: list[int] = []  # of the epoch's updates
        self.next = 0  # the next update of the epoch, as `position` on the device
        device, rows = self.parameters[0].device, feed.updates()
        wide = widest(device)

        # One row for each update of the epoch, and the position of the next update.
        self.order = torch.zeros(rows, feed.order(0).shape[1], dtype=torch.int64, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.rates = torch.zeros(rows, dtype=wide, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        # Results: the loss of the latest update in nats, the sum and count of these losses since
        # they were last read, and the first position at which the loss was not finite.
        self.nats = torch.zeros((), device=device)
        self.total = torch.zeros((), dtype=wide, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.bad = torch.full((1,), -1, dtype=torch.int64, device=device)
        # The recurrent state that streams carry from one update to the next.
        self.carried: list[Tensor] = []
        if feed.carried:
            self.carried = [s.detach().clone() for s in as_tuple(model.initial_state(feed.rows))]

    # --- the epoch ---

    def begin(self, epoch: int, done: int, update: int, plateaus: int = 0) -> int:
        """Copy the table of an epoch to the device and return the number of its updates.

        `done` of them are already done, and the next one is number `update` of the run. `plateaus`
        is how often the schedule "plateau" has divided the learning rate.
        """
        order = self.feed.order(epoch)
        self.lengths, self.next = self.feed.lengths(epoch), done
        first, count = update - done, len(order)
        self.order[:count].copy_(order)
        self.seeds[:count].copy_(update_seeds(self.config.seed, first, count))
        rates = learning_rates(self.config, epoch, first, count, plateaus)
        if self.config.batches.varied:
            rates = rates * (torch.tensor(self.lengths) / self.config.batches.length)
        self.rates[:count].copy_(rates)
        self.position.fill_(done)
        self.model.begin_epoch(epoch)
        return count

    # --- the update ---

    def __call__(self) -> None:
        """Run one update."""
        length = self.lengths[min(self.next, len(self.lengths) - 1)]
        self.next += 1
        if not self.captures:
            self._update(length)
            return
        if (kind := (length, self.average.begun)) not in self.graphs:
            self._capture(length)
        graph, fills = self.graphs[kind]
        with turns(self.nats.get_device()).take() if fills else nullcontext():
            graph.replay()

    def _update(self, length: int) -> None:
        row, seed, lr = (
            table.index_select(0, self.position)[0]
            for table in (self.order, self.seeds, self.rates)
        )
        inputs, targets = self.feed.batch(row, length)
        with products_in(self.config.precision, inputs.device):
            output = self.model(inputs, self._start(), seed=seed, examples=self.feed.first)
            loss, nats = loss_of(output, targets, self.config)
            scale = loss_scale(targets, self.config)
            own = torch.autograd.grad(loss * scale, self.parameters)
        if scale != 1:
            own = torch._foreach_div(own, scale)
        *gradients, nats = self.processes.mean([*own, nats])
        self.optimizer.step(gradients, lr)
        self.average.step()
        for carried, state in zip(self.carried, as_tuple(output.state)):
            carried.copy_(state.detach())
        self.nats.copy_(nats)
        self.total += nats
        self.count += 1
        good = nats.isfinite() | (self.bad >= 0)
        self.bad.copy_(torch.where(good, self.bad, self.position))
        self.position += 1

    def _start(self) -> Any:
        """Return the state that this update starts from; None is the initial state."""
        if not self.carried:
            return None
        initial = as_tuple(self.model.initial_state(self.feed.rows))
        states = [
            torch.where(self.position == 0, new, old) for new, old in zip(initial, self.carried)
        ]
        return tuple(states) if len(states) > 1 else states[0]

    def capture(self) -> None:
        """Capture updates in CUDA graphs; without a GPU, do nothing. Call `begin` before.

        Updates of another length are captured when the first of them is due.
        """
        self.captures = self.parameters[0].device.type == "cuda"
        if self.captures:
            self._capture(self.lengths[min(self.next, len(self.lengths) - 1)])

    def release(self) -> None:
        """Drop the graphs with their memory, so that they do not outlive the run's training."""
        self.graphs.clear()

    def _capture(self, length: int) -> None:
        changed = [
            *weights_of(self.model).values(),
            *self._own().values(),
            self.position,
            self.nats,
        ]
        before = [t.detach().clone() for t in changed]
        # cuBLAS has a workspace for each stream, and a graph keeps the address of the workspace.
        # Graphs captured in the same stream may therefore neither run at the same time nor outlive
        # each other (pytorch issue 193402). So each run captures in its own stream.
        here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream() if here == torch.cuda.default_stream() else here
        with alone:
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                # Warm-up: load kernels and allocate memory. The changes are undone below.
                for _ in range(3):
                    self.position.zero_()
                    self._update(length)
            here.wait_stream(stream)
            with torch.no_grad():
                for tensor, value in zip(changed, before):
                    tensor.copy_(value)
            # thread_local: other threads may use their own streams during the capture.
            filled = turns(self.nats.get_device()).captured
            # Only one graph runs at a time, and none leaves anything in its memory: they share it.
            pool = next((graph.pool() for graph, _ in self.graphs.values()), None)
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                self._update(length)
            fills = turns(self.nats.get_device()).captured > filled
        self.graphs[length, self.average.begun] = graph, fills

    # --- results ---

    def mean_loss(self) -> float:
        """Return the mean loss in nats since the last call."""
        mean = self.total.item() / max(1, int(self.count))
        self.total.zero_()
        self.count.zero_()
        return mean

    def not_finite(self) -> int | None:
        """Return the position in the epoch of the first loss that was not finite, or None."""
        bad = int(self.bad)
        return None if bad < 0 else bad

    # --- checkpoints ---

    def _own(self) -> dict[str, Tensor]:
        own = {f"optimizer.{name}": value for name, value in self.optimizer.tensors().items()}
        own |= {f"average.{name}": value for name, value in self.average.tensors().items()}
        own |= {"loop.total": self.total, "loop.count": self.count, "loop.bad": self.bad}
        return own | {f"carried.{number}": value for number, value in enumerate(self.carried)}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors needed to continue; carried states have the rows of all processes."""
        tensors = {
            f"model.{name}": value for name, value in weights_of(self.model).items()
        } | self._own()
        return {
            n: self.processes.gather(t, 1) if n.startswith("carried.") else t
            for n, t in tensors.items()
        }

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor] | None) -> None:
        """Restore the tensors that `tensors` returned; only the first process has to pass them."""
        own = {
            f"model.{name}": value for name, value in weights_of(self.model).items()
        } | self._own()
        whole = self.tensors()  # the shapes of the carried rows of all processes
        if tensors is not None:
            kinds = {name: (value.shape, value.dtype) for name, value in whole.items()}
            if kinds != {name: (value.shape, value.dtype) for name, value in tensors.items()}:
                raise ValueError("the checkpoint does not fit the run's config")
            whole = {name: tensors[name].to(value.device) for name, value in whole.items()}
        self.processes.share_(list(whole.values()))
        for name, value in own.items():
            value.copy_(
                self.processes.own(whole[name], 1) if name.startswith("carried.") else whole[name]
            )


def as_tuple(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)
