"""Counter-based random bits: Philox 4×32-10, identical on every device.

A draw is a pure function of a 64-bit seed and a 128-bit counter. Random bits are therefore never
stored: the same counter gives the same bits again. This file contains only the generator;
`streams.py` defines the counter of each mask.

The 32-bit words are stored in int64 tensors. The product of two words wraps around in 64 bits
exactly like an unsigned product, so both of its halves are correct even if the int64 value is
negative.
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

_FOLD = 0x666F6C64  # "fold" in ASCII; no mask uses this value as its last counter word


def philox(
    seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four tensors of 32-bit words for the counters (c0, c1, c2, c3).

    The counter words are broadcast against each other. `seed` is the 64-bit key.
    """
    if torch.compiler.is_compiling():
        return torch.ops.zoneout.philox(seed, c0, c1, c2, c3).unbind(0)
    return _philox(seed, c0, c1, c2, c3)


def _philox(
    seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the ten rounds of Philox in torch operations."""
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for number in range(ROUNDS):
        # Only the factors of the next product must be 32-bit words. The upper halves of c1 and c3
        # are arbitrary until the end.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = _mixed(product1, c1, k0, number), _mixed(product0, c3, k1, number)
        c1, c3 = product1, product0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


def _mixed(product: Tensor, word: Tensor, key: Tensor, number: int) -> Tensor:
    """Return (upper half of `product`) xor `word` xor `key`.

    After `_SPREAD` rounds every tensor has its final shape, and the operations run in place.
    """
    high = product >> 32
    if number < _SPREAD or high.shape != word.shape:
        return (high ^ word ^ key) & WORD
    return high.bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(WORD)


_SPREAD = 4  # rounds until every word depends on every word of the counter and the key


# A custom operator for compiled models. Inductor (torch 2.13) computes wrong bits where two planes
# are drawn in one graph, and it would take seconds to compile the ten rounds.
@torch.library.custom_op("zoneout::philox", mutates_args=())
def _philox_operator(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*_philox(seed, c0, c1, c2, c3)))


@_philox_operator.register_fake
def _(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(*(c.shape for c in (seed, c0, c1, c2, c3)))
    return torch.empty((4, *shape), dtype=torch.int64, device=seed.device)


def fold(seed: int | Tensor, n: int) -> int | Tensor:
    """Return a new seed, computed from a seed and a number.

    Use it to give each of several modules its own seed.

    Args:
        seed: an int of up to 64 bits, or an integer tensor with one element.
        n: the number, for example the index of the module.

    Returns:
        An int; a tensor if `seed` is a tensor, or in a compiled model.

    >>> import zoneout as zo
    >>> zo.fold(7, 0) != zo.fold(7, 1)
    True
    >>> int(zo.fold(torch.tensor(7), 1)) == zo.fold(7, 1)
    True
    """
    key, number = as_seed(seed), as_integer(n)
    if number is None:
        raise TypeError(f"n: expected an int, got {type(n).__name__}")
    low, high = (
        torch.tensor(part, device=key.device) for part in (number & WORD, (number >> 32) & WORD)
    )
    zero = torch.zeros_like(low)
    w0, w1, _, _ = philox(key, low, high, zero, zero + _FOLD)
    folded = w0 | (w1 << 32)
    return folded if isinstance(seed, Tensor) or torch.compiler.is_compiling() else int(folded)


def as_seed(
    seed: int | Tensor, device: torch.device | str | None = None, copy: bool = False
) -> Tensor:
    """Return the seed as an int64 scalar on `device`.

    Args:
        seed: an int of up to 64 bits, signed or unsigned, or an integer tensor with one element.
        device: the device of the result.
        copy: True copies a tensor. Needed where the backward pass draws again, because the caller
            may have changed the tensor by then.
    """
    if isinstance(seed, Tensor):
        if (
            seed.numel() != 1
            or seed.is_floating_point()
            or seed.is_complex()
            or seed.dtype == torch.bool
        ):
            raise ValueError(
                f"seed: expected an int or an integer tensor with one element, got {seed.dtype} "
                f"of shape {tuple(seed.shape)}"
            )
        return seed.reshape(()).to(device=device, dtype=torch.int64, copy=copy)
    number = as_integer(seed)
    if number is None:
        raise TypeError(f"seed: expected an int or an integer tensor, got {type(seed).__name__}")
    if torch.compiler.is_compiling() and -(2**63) <= number < 2**63:
        # `full` keeps a symbolic seed, so that another seed does not compile the model again.
        return torch.full((), number, dtype=torch.int64, device=device or "cpu")
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"seed: expected an integer of at most 64 bits, got {number}")
    signed = number - 2**64 if number >= 2**63 else number
    return torch.tensor(signed, dtype=torch.int64, device=device or "cpu")


def as_integer(value: Any) -> int | None:
    """Return an integer of any library as an int, or None for any other value."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):  # in a compiled model it may be symbolic, and stays so
        return value
    try:
        return operator.index(value)
    except TypeError:
        return None


def fresh_seed(like: Tensor) -> Tensor:
    """Return a seed on the device of `like`, drawn from torch's generator of that device."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return _fresh_seed(like)
    if torch._C._are_functorch_transforms_active():
        # The same bits by randint: vmap(randomness="different") refuses random_() here.
        return torch.randint(-(2**62), 2**62, (), dtype=torch.int64, device=like.device) + 2**62
    return draw_seed(empty_seed(like))


def empty_seed(like: Tensor) -> Tensor:
    """Return the memory of a seed, for plain eager mode: what does not depend on it comes first."""
    return torch.empty((), dtype=torch.int64, device=like.device)


def draw_seed(seed: Tensor) -> Tensor:
    """Fill the memory of a seed from torch's generator, and return it."""
    return seed.random_()


# A custom operator, so that a compiled model draws from the same generator, in the same order, as
# an eager model. Inductor would otherwise replace torch's generator by its own.
@torch.library.custom_op(
    "zoneout::fresh_seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _fresh_seed(like: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=like.device).random_()


@_fresh_seed.register_fake
def _(like: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=like.device)
