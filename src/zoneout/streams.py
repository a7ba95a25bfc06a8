"""The streams of noise: what a draw depends on, its random bits, and the streams of a cell.

The stream is the value that is replaced: a state, the update, the input or a weight. The mask kind
is the set of coordinates that a draw depends on. A `Rule` has all that the step functions and
kernels know about a noise.
"""

from __future__ import annotations

from typing import NamedTuple

from .definition import Definition
from .definition.gaussian import MOST_GATES


class Sees(NamedTuple):
    """The coordinates that a draw depends on, in addition to layer and direction."""

    stream: bool
    step: bool
    example: bool
    unit: bool


MASKS = {  # the mask kinds
    "unit": Sees(True, True, True, True),  # zoneout
    "shared": Sees(False, True, True, True),  # one mask for all states
    "step": Sees(True, True, True, False),  # stochastic depth through time
    "sequence": Sees(True, False, True, True),  # rnnDrop, variational dropout
    "static": Sees(True, True, False, True),  # static identity connections; the noise has the seed
    # Not drawn, and the same in training and evaluation:
    "rate": Sees(True, True, True, True),  # the rate itself: learned, or a mask of zeros and ones
    "clock": Sees(True, True, True, True),  # a unit is updated at the multiples of its period
}
DRAWN = ("unit", "shared", "step", "sequence", "static")


class Stream(NamedTuple):
    """The random bits of a stream: half of each 32-bit word of a group of counters."""

    group: int  # part of the last counter word; see `plane`
    half: int  # 0: the low 16 bits of a word, 1: the high 16 bits


STREAMS = {
    "cell": Stream(0, 0),
    "hidden": Stream(0, 1),
    "update": Stream(1, 0),
    "dropout": Stream(1, 1),  # the `dropout` argument of torch.nn, between the layers
    "input": Stream(2, 0),
    "variational_hidden": Stream(2, 1),
    "weight": Stream(3, 0),
    "weight_noise": Stream(4, 0),
    "state2": Stream(5, 0),
    "state3": Stream(5, 1),
    # What is left out of the new value of a state, where the old value is added to it.
    "drop_cell": Stream(6, 0),
    "drop_hidden": Stream(6, 1),
    "drop_state2": Stream(7, 0),
    "drop_state3": Stream(7, 1),
    # The outputs of a layer of a stack: its input takes their place, or is added to them.
    "drop_depth": Stream(8, 0),
    "depth": Stream(8, 1),
    # Normal numbers, one for each result of a product: all bits of a word.
    "fast_input": Stream(4096, 0),
    "fast_hidden": Stream(4097, 0),
    # One mask for each gate, in the place of one for all gates; units count on over the gates.
    "untied_input": Stream(4098, 0),
    "untied_hidden": Stream(4098, 1),
}
STATE_STREAMS = ("hidden", "cell", "state2", "state3")  # the stream of each state, by position
DROPS = tuple(f"drop_{stream}" for stream in STATE_STREAMS)
DEPTH = ("depth", "drop_depth")
UNTIED = ("untied_input", "untied_hidden")
OPTIONAL = (*DROPS, *DEPTH, "fast_input", "fast_hidden", *UNTIED)  # streams that few models use


class Rule(NamedTuple):
    """One stream of a noise method, without rates and seeds."""

    stream: str
    # "previous", "zero", "scaled zero" (inverted scaling), "added" (the previous value is added to
    # the new one), "sum" (noise is added), or "gaussian" (a product is drawn)
    by: str
    mask: str
    at_eval: str
    holds_gate: bool = False  # units with a dropped update also keep their previous output gate


def bits_of(rule: Rule) -> Stream:
    """Return the random bits that the masks of a rule are drawn from."""
    if MASKS[rule.mask].stream:
        return STREAMS[rule.stream]
    return STREAMS["depth" if rule.stream in DEPTH else "cell"]


def plane(source: str | Rule, layer: int, direction: int) -> int:
    """Return the last word of the counter, which is constant during one run over time.

    `source` is a rule, or the name of a stream whose mask is not shared.
    """
    bits = STREAMS[source] if isinstance(source, str) else bits_of(source)
    return 2 * layer + direction + 65536 * bits.group


# --- the streams of a cell ------------------------------------------------------------------------


def state_groups(cell: Definition) -> dict[str, tuple[str, ...]]:
    """Return the states of each stream of a cell, by stream.

    States that form a group share the stream of the group's first state.
    """
    return {STATE_STREAMS[cell.states.index(group[0])]: group for group in cell.groups}


def streams_of(cell: Definition) -> tuple[str, ...]:
    """Return the streams that a cell has, those of its states first."""
    states = tuple(state_groups(cell))
    update = ("update",) if "update" in cell.marks else ()
    matrix = ("variational_hidden", "weight") if cell.has_r else ()
    drops = (f"drop_{stream}" for stream in states)
    dense = cell.recurrence == "dense" and cell.gates <= MOST_GATES
    fast = ("fast_input", "fast_hidden") if dense else ("fast_input",)
    untied = UNTIED if dense else UNTIED[:1]
    return (*states, *update, "input", *matrix, "weight_noise", *drops, *DEPTH, *fast, *untied)
