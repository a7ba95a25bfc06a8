"""Where a run is computed: on which device, in which precision, and in how many processes.

Of several processes each has its rows of every batch, and all have the same weights.
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

from .disk import RunError

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """Which of how many processes this is; alone, nothing here does anything."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The mean of every tensor over the processes."""
        if self.size == 1:
            return list(tensors)
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat)
        parts = flat.div_(self.size).split([t.numel() for t in tensors])
        return [part.view_as(t) for part, t in zip(parts, tensors)]

    def share(self, value: T) -> T:
        """What the first process has, in all of them."""
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
        """The parts of all processes, one after another."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim)

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """This process's part of what `gather` gave."""
        return tensor.chunk(self.size, dim)[self.rank]

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process."""
        if self.size == 1:
            return flag
        count = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(count)
        return count.item() > 0


def join(device: str) -> Processes:
    """The processes that torchrun started, or this one alone; `device` as the config has it."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    where = device_of(device, int(os.environ.get("LOCAL_RANK", "0")) if size > 1 else None)
    if size == 1:
        return Processes(where)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if not dist.is_initialized():
        # Until the process ends: who is ahead of the others when a new group is made would find the old one's store.
        dist.init_process_group("cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo")
        atexit.register(_leave)
    return Processes(where, rank, size)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Runs that share a process take turns at what all of it sees: torch's generator, a graph that is being captured.
alone = threading.RLock()

# Its settings for products are seen by all too; those who want the same ones are inside together.
_turn = threading.Condition()
_inside: list[tuple[int, str]] = []  # thread and setting
_outside: list[str] = []  # the settings that are put back when the last one leaves


@contextmanager
def products_in(precision: str, device: torch.device) -> Iterator[None]:
    """Matrix products in fp32, tf32 (on a GPU), bf16 or fp16, those of recurrent layers and all others."""
    # Without the cache of cast weights, which would outlive a captured graph.
    autocast = torch.autocast(device.type, HALF.get(precision), precision in HALF, cache_enabled=False)
    if device.type != "cuda":
        with autocast:
            yield
        return
    mine = threading.get_ident(), "tf32" if precision == "tf32" else "ieee"
    with _turn:
        _turn.wait_for(lambda: all(thread == mine[0] or setting == mine[1] for thread, setting in _inside))
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
    """From now on this process stops when the one that started it asks, or is gone; the terminal's keys are not for it.

    Otherwise Ctrl-C would come twice, by the terminal and from the parent, and the second stops without a checkpoint.
    """
    if hasattr(os, "setsid"):
        os.setsid()

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)  # a checkpoint is written first

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def one_thread() -> Iterator[None]:
    """As one thread computes: LAPACK's factors, of which orthogonal matrices are made, differ by how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of_each(processes: int) -> int:
    """How many threads each of so many processes has: its share of the processors, and no more than this one may have.

    More than somebody has allowed (OMP_NUM_THREADS), on a machine with much else to do, take many times as long.
    """
    return max(1, min(torch.get_num_threads(), cores() // processes))


def device_of(name: str, number: int | None = None) -> torch.device:
    """The device that a config names; `number` is this process's GPU where several share a machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device: {name} is not there (torch sees no GPU); use --device cpu")
        if ":" not in name:
            device = torch.device("cuda", torch.cuda.current_device() if number is None else number)
    return device


def memory_of(device: torch.device) -> int | None:
    """The bytes that a device has in all, or that a container leaves of them; None where nothing tells."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    found = []
    with suppress(AttributeError, ValueError, OSError):  # not a Unix
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # of a container, by either version of cgroups
        with suppress(ValueError, OSError):  # "max", or none
            found.append(int(Path("/sys/fs/cgroup", limit).read_text()))
    return min(found, default=None)


@contextmanager
def memory_explained() -> Iterator[None]:
    """Turn what torch, NumPy and Python say when there is no memory left into a sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise RunError(
            f"the memory ran out ({str(error).strip().splitlines()[0][:200] if str(error).strip() else 'Python'}); try "
            "a smaller --model.hidden, --model.layers, --batches.size or --batches.length, or a shorter text"
        ) from error


def out_of_memory(error: Exception) -> bool:
    """Whether an error means that there is no memory left; torch has no kind of its own for that of the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    said = ("can't allocate memory", "not enough memory", "std::bad_alloc", "out of memory")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in said)
