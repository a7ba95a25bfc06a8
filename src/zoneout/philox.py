"""Counter-based random bits: Philox 4×32-10, the same on every device.

A draw is a pure function of a 64-bit seed and a 128-bit counter, so nothing random is ever stored:
whoever knows the coordinates of a draw can make it again. This file is the generator alone; which
coordinates a mask has is said in `noise.py`.

The words are kept in int64 tensors. A product of two 32-bit words wraps around in 64 bits exactly as
an unsigned one would, so its two halves come out right whatever its sign.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

_FOLD = 0x666F6C64  # "fold" in ASCII: a plane of the counter that no mask uses


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words for every counter (c0, c1, c2, c3), which broadcast; `seed` is the 64-bit key."""
    if torch.compiler.is_compiling():
        return torch.ops.zoneout.philox(seed, c0, c1, c2, c3).unbind(0)
    return _philox(seed, c0, c1, c2, c3)


def _philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for number in range(ROUNDS):
        # Only what is multiplied next has to be a word: of the others the upper halves may be anything.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = _mixed(product1, c1, k0, number), _mixed(product0, c3, k1, number)
        c1, c3 = product1, product0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


def _mixed(product: Tensor, word: Tensor, key: Tensor, number: int) -> Tensor:
    """The upper half of a product, with a word and a key; in place once everything has the shape that it ends with."""
    high = product >> 32
    if number < _SPREAD or high.shape != word.shape:
        return (high ^ word ^ key) & WORD
    return high.bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(WORD)


_SPREAD = 4  # rounds until every word hangs on every part of counter and key


# An operator of its own for compiled models: inductor (torch 2.13) gets the bits wrong where two planes are drawn in
# one graph, and would take seconds over the ten rounds.
@torch.library.custom_op("zoneout::philox", mutates_args=())
def _philox_operator(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*_philox(seed, c0, c1, c2, c3)))


@_philox_operator.register_fake
def _(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(*(c.shape for c in (seed, c0, c1, c2, c3)))
    return torch.empty((4, *shape), dtype=torch.int64, device=seed.device)


def fold(seed: int | Tensor, n: int) -> int | Tensor:
    """A new seed from a seed and a number: give each of several modules its own. In a compiled model it is a tensor.

    >>> import zoneout as zo
    >>> zo.fold(7, 0) != zo.fold(7, 1)
    True
    >>> int(zo.fold(torch.tensor(7), 1)) == zo.fold(7, 1)
    True
    """
    key, number = as_seed(seed), as_integer(n)
    if number is None:
        raise TypeError(f"n: expected an int, got {type(n).__name__}")
    low, high = (torch.tensor(part, device=key.device) for part in (number & WORD, (number >> 32) & WORD))
    zero = torch.zeros_like(low)
    w0, w1, _, _ = philox(key, low, high, zero, zero + _FOLD)
    folded = w0 | (w1 << 32)
    return folded if isinstance(seed, Tensor) or torch.compiler.is_compiling() else int(folded)


def as_seed(seed: int | Tensor, device: torch.device | str | None = None, copy: bool = False) -> Tensor:
    """The seed as an int64 scalar on `device`; an int of up to 64 bits, signed or not, is taken.

    `copy` is for what draws again on the way back: a tensor may count on by then.
    """
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.is_floating_point() or seed.is_complex() or seed.dtype == torch.bool:
            raise ValueError(
                f"seed: expected an int or an integer tensor with one element, got {seed.dtype} "
                f"of shape {tuple(seed.shape)}"
            )
        return seed.reshape(()).to(device=device, dtype=torch.int64, copy=copy)
    number = as_integer(seed)
    if number is None:
        raise TypeError(f"seed: expected an int or an integer tensor, got {type(seed).__name__}")
    if torch.compiler.is_compiling() and -(2**63) <= number < 2**63:
        return torch.full(
            (), number, dtype=torch.int64, device=device or "cpu"
        )  # a symbol: other seeds compile nothing anew
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"seed: expected an integer of at most 64 bits, got {number}")
    signed = number - 2**64 if number >= 2**63 else number
    return torch.tensor(signed, dtype=torch.int64, device=device or "cpu")


def as_integer(value: Any) -> int | None:
    """A whole number of any library as an int, or None where it is something else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):  # in a compiled model a symbol, and it stays one
        return value
    try:
        return operator.index(value)
    except TypeError:
        return None


def fresh_seed(like: Tensor) -> Tensor:
    """A seed on the device of `like`, drawn from torch's generator of that device."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return _fresh_seed(like)
    if torch._C._are_functorch_transforms_active():  # which know by this call alone if each of a batch has its own
        return torch.randint(-(2**62), 2**62, (), dtype=torch.int64, device=like.device) + 2**62  # the same bits
    return torch.empty((), dtype=torch.int64, device=like.device).random_()


# An operator of its own, so that a compiled model draws from the same generator, in the same order, as
# an eager one: inductor would otherwise put a generator of its own in the place of torch's.
@torch.library.custom_op("zoneout::fresh_seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _fresh_seed(like: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=like.device).random_()


@_fresh_seed.register_fake
def _(like: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=like.device)
