"""All steps in one launch with recurrent batch norm.

A block owns a few units for the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ....definition import Definition
from ...backend import Loop, LoopGrads
from ...memory import is_aligned
from ...run import Run
from ..runtime.arguments import (
    common_defines,
    features_of,
    loop_arguments,
    mode_defines,
    modes_of,
    norm_arguments,
)
from ..runtime.compiler import Kernel, Ready, chip, load, tf32
from .small import MOST_NUMBERS

MOST_BLOCKS = 16  # maximum in a cluster
MOST_WARPS = 8  # maximum in a block: with more, a thread has too few registers
# Fragments (weights of one k-step and tile) that fit in registers, by (backward pass, no optional
# features).
MOST_FRAGMENTS = {(False, True): 52, (False, False): 16, (True, True): 26, (True, False): 0}


@dataclass(frozen=True)
class Plan:
    """The tiles of a launch: see batch.cu."""

    hidden: int
    blocks: int  # blocks in the only cluster
    unit_groups: int  # groups of 8 units in a block
    bands: int  # bands of 16 rows
    resident: int  # fragments in registers
    shared: int  # shared memory of a block, bytes

    @property
    def threads(self) -> int:
        return 32 * self.unit_groups * self.bands


@lru_cache(1024)
def plan(
    cell: Definition,
    size: int,
    hidden: int,
    batch: int,
    backward: bool,
    plain: bool,
    most_shared: int,
) -> Plan | None:
    """Return the tiles for a shape and device, or None if the loop does not fit.

    `size` is the size of an element, `most_shared` that of shared memory, in bytes. `plain`: the
    loop uses no optional features.
    """
    unit_groups, bands = 1 if hidden <= 8 * MOST_BLOCKS else 2, -(-batch // 16)
    if hidden > 16 * MOST_BLOCKS or unit_groups * bands > MOST_WARPS:
        return None
    blocks, threads = -(-hidden // (8 * unit_groups)), 32 * unit_groups * bands
    # Blocks then exchange half-precision values, scaled by powers of two.
    scaled = backward and size == 4 and unit_groups == 1
    if scaled or (not backward and cell.bounded):
        size = 2
    values_per_word = 4 // size
    values_per_unit = 1 if not backward else cell.gates + cell.storage.apart
    words = -(-2 * values_per_unit // values_per_word)  # 4-byte words of two units of a row
    k_steps_per_group = -(-words // 2)
    k_steps = unit_groups * k_steps_per_group if backward else -(-blocks * unit_groups * words // 2)
    fragments = k_steps * (blocks if backward else cell.gates)
    resident = min(fragments, MOST_FRAGMENTS[backward, plain])
    shared = 2 * blocks * threads * (8 if size == 2 else 16)  # values sent between blocks
    shared += 16 * (k_steps_per_group * threads if backward and unit_groups > 1 else 1)
    shared += 128 * (bands if scaled else 1)
    # Sums, lengths and counters.
    shared += (24 if backward else 16) * threads + 64 * bands + 16 * unit_groups * bands
    shared += unit_groups * (fragments - resident) * 256
    return (
        Plan(hidden, blocks, unit_groups, bands, resident, shared)
        if shared <= most_shared
        else None
    )


def fits(r: Run) -> bool:
    """Return True if both passes of a layer with batch norm fit these kernels, with any noise."""
    gpu, size = chip(r.h0.get_device()), r.h0.element_size()
    if r.weights.w_hr is not None or gpu.major < 9 or r.steps * r.batch * r.width >= MOST_NUMBERS:
        return False
    variants = ((backward, plain) for backward in (False, True) for plain in (False, True))
    return all(
        plan(r.cell, size, r.hidden, r.batch, *variant, gpu.shared) is not None
        for variant in variants
    )


def plan_for(loop: Loop, backward: bool, plain: bool) -> Plan | None:
    """Return the plan of a loop, or None if this kernel does not support it."""
    if loop.gates.dtype == torch.float32 and not tf32():
        return None
    most_shared = chip(loop.gates.get_device()).shared
    return plan(
        loop.cell, loop.gates.element_size(), loop.hidden, loop.batch, backward, plain, most_shared
    )


def ready(loop: Loop, grads: LoopGrads | None, concurrent: int) -> Ready | None:
    """Prepare a loop as one launch, with `concurrent` at once; None if it does not fit."""
    features, modes = features_of(loop, grads), modes_of(loop.draws)
    tiles = plan_for(loop, grads is not None, not features and modes is not None)
    if tiles is None:
        return None
    arguments, norm = loop_arguments(loop, grads), norm_arguments(loop, grads)
    aligned_pairs = pairs_are_aligned(loop, [*arguments.alive, *norm.alive])
    kernel = _kernel(
        loop.gates.get_device(),
        loop.cell,
        loop.gates.dtype,
        grads is not None,
        tiles,
        aligned_pairs,
        features,
        modes,
    )
    if kernel is None:
        return None
    if grads is not None:
        grads.db_x = loop.recurrent_weight.new_empty(
            len(loop.recurrent_weight), dtype=torch.float32
        )
        grads.db_h = torch.empty_like(grads.db_x) if loop.cell.storage.apart else grads.db_x
        norm.put_all(grads, ("db_x", "db_h"), torch.float32)

    def start(side_stream: Any) -> None:
        kernel.launch(
            tiles.blocks,
            tiles.threads,
            (arguments.struct, norm.struct),
            tiles.shared,
            stream=side_stream,
        )

    return Ready(start)


def pairs_are_aligned(loop: Loop, tensors: list[Tensor]) -> bool:
    """Return True if alignment allows reading two adjacent units, and all their gates, at once."""
    dtypes = (loop.gates.dtype, torch.float32)
    read_in_pairs = (value for value in tensors if value.dtype in dtypes)
    return loop.hidden % 2 == 0 and all(is_aligned(value, 16) for value in read_in_pairs)


def defines_of(
    cell: Definition,
    dtype: torch.dtype,
    backward: bool,
    tiles: Plan,
    aligned_pairs: bool,
    features: int,
    modes: tuple[int, int] | None,
) -> tuple[tuple[str, int], ...]:
    """Return the macros that the kernel is compiled with."""
    return (
        *common_defines(cell, dtype),
        ("BACKWARD", int(backward)),
        ("HIDDEN", tiles.hidden),
        ("BLOCKS", tiles.blocks),
        ("UNIT_GROUPS", tiles.unit_groups),
        ("BANDS", tiles.bands),
        ("RESIDENT", tiles.resident),
        ("ALIGNED_PAIRS", int(aligned_pairs)),
        ("FEATURES", features),
        *mode_defines(modes),
    )


@lru_cache(1024)
def _kernel(
    device: int,
    cell: Definition,
    dtype: torch.dtype,
    backward: bool,
    tiles: Plan,
    aligned_pairs: bool,
    features: int,
    modes: tuple[int, int] | None,
) -> Kernel | None:
    """Return the compiled kernel, or None if its cluster does not fit on the device."""
    defines = defines_of(cell, dtype, backward, tiles, aligned_pairs, features, modes)
    (kernel,) = load(device, "batch.cu", ("backward" if backward else "forward",), defines)
    with torch.cuda.device(device):
        kernel.allow_shared(tiles.shared)
        return (
            kernel if kernel.fits(tiles.blocks, tiles.threads, tiles.shared, tiles.blocks) else None
        )
