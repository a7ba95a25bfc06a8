"""The device, the precision and the processes of a run.

With several processes, each computes its own rows of every batch, and all hold the same weights.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..disk import RunError

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """The device, rank and number of processes. With one process, no method communicates."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.rank == 0

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of every tensor over the processes."""
        if self.size == 1:
            return list(tensors)
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat)
        parts = flat.div_(self.size).split([t.numel() for t in tensors])
        return [part.view_as(t) for part, t in zip(parts, tensors)]

    def share(self, value: T) -> T:
        """Return the first process's value in every process."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, device=self.device)
        shared: T = box[0]
        return shared

    def share_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with those of the first process."""
        for tensor in tensors if self.size > 1 else ():
            dist.broadcast(tensor.detach(), 0)

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the tensors of all processes along `dim`."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim)

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this process's part of a tensor from `gather`."""
        return tensor.chunk(self.size, dim)[self.rank]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is True in any process."""
        if self.size == 1:
            return flag
        count = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(count)
        return count.item() > 0


def join(device: str) -> Processes:
    """Join the processes that torchrun started, or run alone; `device` is the config's field."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    where = device_of(device, int(os.environ.get("LOCAL_RANK", "0")) if size > 1 else None)
    if size == 1:
        return Processes(where)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if not dist.is_initialized():
        # The group is kept until the process ends. If a new group were created for each run, a
        # process that is ahead of the others could connect to the store of the old group.
        dist.init_process_group("cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo")
        atexit.register(_leave)
    return Processes(where, rank, size)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Lock for state that all threads of the process share: torch's generator, a CUDA graph capture.
alone = threading.RLock()

# The precision of matrix products is shared by all threads too. Threads that need the same
# precision run at the same time; a thread that needs another one waits.
_turn = threading.Condition()
_inside: list[tuple[int, str]] = []  # (thread, precision) of every active `products_in`
_outside: list[str] = []  # the precisions to restore when the last of them ends


@contextmanager
def products_in(precision: str, device: torch.device) -> Iterator[None]:
    """Inside, compute matrix products in fp32, tf32 (GPU only), bf16 or fp16.

    This applies to the products of recurrent layers and to all others.
    """
    # autocast must not cache cast weights: the cache would outlive a captured graph.
    autocast = torch.autocast(
        device.type, HALF.get(precision), precision in HALF, cache_enabled=False
    )
    if device.type != "cuda":
        with autocast:
            yield
        return
    mine = threading.get_ident(), "tf32" if precision == "tf32" else "ieee"
    with _turn:
        _turn.wait_for(
            lambda: all(thread == mine[0] or setting == mine[1] for thread, setting in _inside)
        )
        if not _inside:
            _outside[:] = [flag.fp32_precision for flag in _flags()]
        _inside.append(mine)
        _set(mine[1])
    try:
        with autocast:
            yield
    finally:
        with _turn:
            _inside.remove(mine)
            _set(*([_inside[-1][1]] if _inside else _outside))
            _turn.notify_all()


def _flags() -> list[Any]:
    return [torch.backends.cuda.matmul, torch.backends.cudnn.rnn]


def _set(*settings: str) -> None:
    for flag, setting in zip(_flags(), settings * 2):
        flag.fp32_precision = setting


def obey_the_parent() -> None:
    """Make this process stop when its parent asks or ends, and ignore Ctrl-C from the terminal.

    Otherwise Ctrl-C would arrive twice, from the terminal and from the parent, and the second one
    stops the process without a checkpoint.
    """
    if hasattr(os, "setsid"):
        os.setsid()

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)  # training then writes a checkpoint and stops

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread.

    Orthogonal matrices are made with LAPACK, whose results depend on the number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of_each(processes: int) -> int:
    """Return the number of threads for each of `processes` processes.

    It is a process's share of the cores, and at most the number of threads of this process. On a
    busy machine, more threads than the user allows (OMP_NUM_THREADS) are many times slower.
    """
    return max(1, min(torch.get_num_threads(), cores() // processes))


def device_of(name: str, number: int | None = None) -> torch.device:
    """Return the device that a config names.

    `number` is the GPU of this process when several processes share a machine.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"device: {name} is not available (torch sees no GPU); use --device cpu"
            )
        if ":" not in name:
            device = torch.device("cuda", torch.cuda.current_device() if number is None else number)
    return device


def memory_of(device: torch.device) -> int | None:
    """Return the total memory of a device in bytes, or a container's limit if that is lower.

    The result is None if neither is known.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = []
    with suppress(AttributeError, ValueError, OSError):  # not a Unix system
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for file in ("memory.max", "memory/memory.limit_in_bytes"):  # a container's; cgroups 2, 1
        with suppress(ValueError, OSError):  # the file says "max" (no limit), or does not exist
            limits.append(int(Path("/sys/fs/cgroup", file).read_text()))
    return min(limits, default=None)


@contextmanager
def memory_explained() -> Iterator[None]:
    """Turn an out-of-memory error of torch, NumPy or Python into a RunError with advice."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise RunError(
            "the memory ran out "
            f"({str(error).strip().splitlines()[0][:200] if str(error).strip() else 'Python'}); "
            "try a smaller --model.hidden, --model.layers, --batches.size or --batches.length, or "
            "a shorter text"
        ) from error


def out_of_memory(error: Exception) -> bool:
    """Return whether an error means out of memory.

    When host memory runs out, torch raises a plain RuntimeError, so its text is searched.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    phrases = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)
