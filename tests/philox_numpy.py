"""An oracle for the random bits, in NumPy: Philox 4×32-10 as published, and the masks as designed.

Written from the paper by Salmon and others ("Parallel random numbers: as easy as 1, 2, 3", 2011)
and from the project's layout of counters alone; it shares no line with `zoneout`.
"""

import numpy as np

GROUPS = {  # the design's streams: the group, and which half of the word
    "cell": (0, "low"),
    "hidden": (0, "high"),
    "update": (1, "low"),
    "dropout": (1, "high"),
    "input": (2, "low"),
    "variational_hidden": (2, "high"),
    "weight": (3, "low"),
    "weight_noise": (4, "low"),
    "state2": (5, "low"),
    "state3": (5, "high"),
    "drop_cell": (6, "low"),
    "drop_hidden": (6, "high"),
    "drop_state2": (7, "low"),
    "drop_state3": (7, "high"),
    "drop_depth": (8, "low"),
    "depth": (8, "high"),
    "fast_input": (4096, "low"),
    "fast_hidden": (4097, "low"),
    "untied_input": (4098, "low"),
    "untied_hidden": (4098, "high"),
    "wrapped4": (10, "high"),  # the fifth state of a ZoneoutCell
    "wrapped5": (10, "low"),
    "wrapped6": (11, "high"),
}
UNSEEN = {  # the coordinates that each kind of mask does not see
    "unit": (),
    "shared": ("stream",),
    "step": ("unit",),
    "sequence": ("step",),
    "static": ("example",),
}


def philox(counter, key):
    """The four output words [..., 4] of the counters [..., 4] under the key [2], all 32 bits
    wide.
    """
    x0, x1, x2, x3 = np.moveaxis(np.asarray(counter, dtype=np.uint64), -1, 0)
    k0, k1 = (int(word) for word in key)
    for _ in range(10):
        a, b = x0 * np.uint64(0xD2511F53), x2 * np.uint64(0xCD9E8D57)
        low = np.uint64(0xFFFFFFFF)
        x0, x1, x2, x3 = (
            (b >> np.uint64(32)) ^ x1 ^ np.uint64(k0),
            b & low,
            (a >> np.uint64(32)) ^ x3 ^ np.uint64(k1),
            a & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([x0, x1, x2, x3], axis=-1).astype(np.uint32)


def key_of(seed):
    """The two words of a 64-bit seed, low one first; a negative seed is its two's complement."""
    return seed % 2**32, seed // 2**32 % 2**32


def bits(stream, kind, seed, steps, examples, units, layer=0, direction=0):
    """The 16 random bits [steps, examples, units] of each draw."""
    unseen = UNSEEN[kind]
    group, half = (0, "low") if "stream" in unseen else GROUPS[stream]
    step, example, unit = np.meshgrid(
        np.asarray(steps, dtype=np.int64),
        np.asarray(examples, dtype=np.int64),
        np.arange(units),
        indexing="ij",
    )
    step, example, unit = (
        0 * value if name in unseen else value
        for name, value in (("step", step), ("example", example), ("unit", unit))
    )
    last = np.full_like(step, 2 * layer + direction + 65536 * group)
    four = philox(np.stack([unit // 4, example, step, last], axis=-1), key_of(seed))
    word = np.take_along_axis(four, (unit % 4)[..., None], axis=-1)[..., 0]
    return word >> 16 if half == "high" else word & 0xFFFF


def mask(stream, kind, rate, seed, steps, examples, units, layer=0, direction=0):
    """bool [steps, examples, units], True where the old value is kept; `rate` is a number or one
    a unit.
    """
    drawn = bits(stream, kind, seed, steps, examples, units, layer, direction)
    return drawn < np.round(np.asarray(rate, dtype=np.float64) * 65536)


def rates_on_the_edge(stream, kind, seed, units):
    """A rate for each unit, as near as can be to what the first step of row 0 draws; and whether it
    is kept there.

    The draw is k: a rate of k + 0.6 in 65,536ths rounds up to k + 1, and k is below that; one of k
        + 0.4 does not.
    """
    (((*drawn,),),) = bits(stream, kind, seed, [0], [0], units).tolist()
    kept = [unit % 2 == 0 for unit in range(units)]
    return [(k + (0.6 if up else 0.4)) / 65536 for k, up in zip(drawn, kept)], kept
