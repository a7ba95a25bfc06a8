"""The paper's equations in NumPy: what every cell, layer and backend is held to.

Written out from section 3 of the paper and from what its experiments did, not from the package:
    plain loops
over steps and examples, one vector at a time. A mask is called d, as in the paper: d = 1 keeps the
old value (or sets to zero, for the methods that do). The expectation is the same equation with the
rate in d's place.

Only sums, products and analytic functions stand here, so a complex number goes through: the
    derivative of
anything in a direction v is the imaginary part of its value at x + i·10⁻³⁰·v, exact to the last
digits.

`run` is one layer in one direction, `stack` is several. `expected` reads a layer of the package,
takes its masks from `zo.masks` (or, where that has no entry, from `keep`) and says what a call must
return.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from philox_numpy import GROUPS

Array = Any  # an ndarray of floats, or of complex numbers for a derivative

# --- the cells ------------------------------------------------------------------------------------


def sigmoid(a: Array) -> Array:
    return 1 / (1 + np.exp(-a))


def relu(a: Array) -> Array:
    return np.where(np.real(a) > 0, a, 0.0)


def lstm_candidate(gates: Array, c: Array, d: Any) -> tuple[Array, Array]:
    """The candidate c (masked, where it or its update is), and the output gate."""
    hidden = len(c)
    i = sigmoid(gates[:hidden])
    f = sigmoid(gates[hidden : 2 * hidden])
    g = np.tanh(gates[2 * hidden : 3 * hidden])
    o = sigmoid(gates[3 * hidden :])
    update = (1 - d.update) * i * g  # recurrent dropout
    return (1 - d.zero_cell) * (f * c + update), o  # state dropout, rnnDrop


def lstm_exposed(
    o: Array, o_before: Array | None, shown: Array, d: Any, w_hr: Array | None
) -> Array:
    """The candidate h from what is shown of the candidate c. `o_before` None: there is no gate
    to hold.
    """
    if o_before is not None:
        o = d.update * o_before + (1 - d.update) * o
    h = o * np.tanh(shown)
    return (1 - d.zero_hidden) * (h if w_hr is None else w_hr @ h)


def gru_candidate(g_x: Array, g_h: Array, h: Array, d: Any) -> Array:
    """The candidate h of a GRU (gates r, z, n); the products come with their biases."""
    hidden = len(h)
    r = sigmoid(g_x[:hidden] + g_h[:hidden])
    z = sigmoid(g_x[hidden : 2 * hidden] + g_h[hidden : 2 * hidden])
    n = np.tanh(g_x[2 * hidden :] + r * g_h[2 * hidden :])
    return (1 - d.zero_hidden) * (z * h + (1 - d.update) * (1 - z) * n)


def rnn_candidate(gates: Array, d: Any, nonlinearity: Any) -> Array:
    return (1 - d.zero_hidden) * nonlinearity(gates)


def zoned(new: Array, old: Array, d: Array) -> Array:
    """T = d ⊙ identity + (1 − d) ⊙ T̃."""
    return d * old + (1 - d) * new


def swapped(new: Array, old: Array, added: Array, dropped: Array) -> Array:
    """Θ₁ ⊙ old + Θ₂ ⊙ new, where Θ₂ = 1 − `dropped`."""
    return added * old + (1 - dropped) * new


# --- one layer and direction ----------------------------------------------------------------------


class Weights(NamedTuple):
    """The matrices and biases of one layer and direction, gate blocks in torch's order."""

    w_x: Array
    w_h: Array
    b_x: Array | None = None
    b_h: Array | None = None
    w_hr: Array | None = None


@dataclass
class Noise:
    """What every step replaces. Each array is [T, B, units], in the order of the input."""

    cell: Array | None = None  # c keeps its old value
    hidden: Array | None = None  # h keeps its old value
    zero_cell: Array | None = None
    zero_hidden: Array | None = None
    update: Array | None = None
    add_cell: Array | None = None  # swapout: the old c is added
    add_hidden: Array | None = None
    drop_cell: Array | None = None  # swapout: the new c is left out
    drop_hidden: Array | None = None
    hold: bool = False  # the output gate keeps its old value where the update is dropped
    times_input: Array | None = None  # x is multiplied by this
    times_hidden: Array | None = None  # h is multiplied by this where it enters the gates

    def at(self, t: int, b: int) -> Any:
        names = ("cell", "hidden", "zero_cell", "zero_hidden", "update")
        names += ("add_cell", "add_hidden", "drop_cell", "drop_hidden")
        d = {n: getattr(self, n) for n in names}
        return SimpleNamespace(**{n: 0.0 if v is None else v[t, b] for n, v in d.items()})


@dataclass
class Norm:
    """Layer norm (`over="units"`) or recurrent batch norm (`over="examples"`)."""

    over: str
    eps: float
    scale_x: Array
    scale_h: Array
    scale_c: Array | None = None
    shift_c: Array | None = None
    given: dict[str, tuple[Array, Array]] | None = (
        None  # {"x": (means, variances), …}, a row a step
    )
    first_step: int = 0

    def __call__(
        self, what: str, p: int, vectors: dict[int, Array], seen: Seen
    ) -> dict[int, Array]:
        """Normalise what the examples alive at the processed step p have: {example: vector}."""
        scale = {"x": self.scale_x, "h": self.scale_h, "c": self.scale_c}[what]
        shift = self.shift_c if what == "c" else 0.0
        out = {}
        for b, v in vectors.items():
            if self.over == "units":
                mean = sum(v) / len(v)
                var = sum((v - mean) ** 2) / len(v)
            elif self.given is not None:
                means, variances = self.given[what]
                row = min(self.first_step + p, len(means) - 1)  # beyond the last, the last again
                mean, var = means[row], variances[row]
            else:
                alive = list(vectors.values())
                mean = sum(alive) / len(alive)
                var = sum((one - mean) ** 2 for one in alive) / len(alive)
                seen[what][p] = (mean, var)
            out[b] = scale * (v - mean) / np.sqrt(var + self.eps) + shift
        return out


Seen = dict[
    str, dict[int, tuple[Array, Array]]
]  # what -> processed step -> mean and variance of the batch


@dataclass
class Result:
    y: Array  # [T, B, outputs], zero past a sequence's length
    h: Array  # [B, outputs]
    c: Array | None  # [B, H]
    cells: Array | None  # [T, B, H]
    seen: Seen = field(default_factory=dict)


def run(
    cell: str,
    x: Array,
    h0: Array,
    c0: Array | None,
    w: Weights,
    noise: Noise | None = None,
    *,
    lengths: Any = None,
    resets: Any = None,
    reverse: bool = False,
    norm: Norm | None = None,
    back_to: tuple[Array, Array | None] | None = None,
) -> Result:
    """One layer in one direction over [T, B, input]. A cut goes back to `back_to`: by default to
    zero.
    """
    steps, batch, _ = x.shape
    noise = noise or Noise()
    back_h, back_c = back_to or (np.zeros_like(h0), None if c0 is None else np.zeros_like(c0))
    ends = [steps] * batch if lengths is None else [int(n) for n in lengths]
    h = [h0[b] for b in range(batch)]
    c = None if c0 is None else [c0[b] for b in range(batch)]
    o: list[Array | None] = [None] * batch  # the output gates of the step before
    ys: dict[tuple[int, int], Array] = {}
    cs: dict[tuple[int, int], Array] = {}
    seen: Seen = {"x": {}, "h": {}, "c": {}}

    for p in range(steps):  # the p-th step that is processed, of the examples that are still alive
        at = {b: ends[b] - 1 - p if reverse else p for b in range(batch) if p < ends[b]}

        # The cut marked at step t lies between t − 1 and t. Backwards it is crossed on the way to t
        # − 1.
        for b, t in at.items():
            crossed = t + 1 if reverse else t
            if resets is not None and not (reverse and p == 0) and resets[crossed][b]:
                h[b], o[b] = back_h[b], None
                if c is not None and back_c is not None:
                    c[b] = back_c[b]

        g_x, g_h = {}, {}
        for b, t in at.items():
            g_x[b] = w.w_x @ (
                x[t, b] if noise.times_input is None else x[t, b] * noise.times_input[t, b]
            )
            g_h[b] = w.w_h @ (
                h[b] if noise.times_hidden is None else h[b] * noise.times_hidden[t, b]
            )
        if norm is not None:
            g_x, g_h = norm("x", p, g_x, seen), norm("h", p, g_h, seen)
        for b in at:
            g_x[b] = g_x[b] if w.b_x is None else g_x[b] + w.b_x
            g_h[b] = g_h[b] if w.b_h is None else g_h[b] + w.b_h

        candidates = {}
        if cell == "lstm":
            assert c is not None
            new_c, new_o = {}, {}
            for b, t in at.items():
                new_c[b], new_o[b] = lstm_candidate(g_x[b] + g_h[b], c[b], noise.at(t, b))
            shown = new_c if norm is None else norm("c", p, new_c, seen)
            for b, t in at.items():
                held = o[b] if noise.hold else None
                candidates[b] = lstm_exposed(new_o[b], held, shown[b], noise.at(t, b), w.w_hr)
                d = noise.at(t, b)
                new = zoned(new_c[b], c[b], d.cell)
                c[b] = swapped(new, c[b], d.add_cell, d.drop_cell)
                o[b] = new_o[b]
                cs[t, b] = c[b]
        for b, t in at.items():
            if cell == "gru":
                candidates[b] = gru_candidate(g_x[b], g_h[b], h[b], noise.at(t, b))
            elif cell in ("rnn_tanh", "rnn_relu"):
                nonlinearity = np.tanh if cell == "rnn_tanh" else relu
                candidates[b] = rnn_candidate(g_x[b] + g_h[b], noise.at(t, b), nonlinearity)
            d = noise.at(t, b)
            h[b] = swapped(zoned(candidates[b], h[b], d.hidden), h[b], d.add_hidden, d.drop_hidden)
            ys[t, b] = h[b]

    def over_time(states: dict[tuple[int, int], Array], units: int) -> Array:
        none = np.zeros(units)
        return np.array([[states.get((t, b), none) for b in range(batch)] for t in range(steps)])

    return Result(
        over_time(ys, h0.shape[-1]),
        np.array(h),
        None if c is None else np.array(c),
        None if c0 is None else over_time(cs, c0.shape[-1]),
        seen,
    )


# --- stacked layers and directions ----------------------------------------------------------------


class Part(NamedTuple):
    """One layer and direction of a stack."""

    weights: Weights
    noise: Noise | None = None
    norm: Norm | None = None


@dataclass
class StackResult:
    y: Array  # [T, B, directions · outputs]
    h: Array  # [layers · directions, B, outputs]
    c: Array | None
    cells: Array | None  # [T, B, directions · H], of the last layer
    seen: list[Seen]  # one a layer and direction


def stack(
    cell: str,
    x: Array,
    h0: Array,
    c0: Array | None,
    layers: list[list[Part]],
    between: list[Array] | None = None,
    *,
    lengths: Any = None,
    resets: Any = None,
    back_to: tuple[Array, Array | None] | None = None,
) -> StackResult:
    """Layers of one direction (forwards) or two. `between[k]` multiplies the outputs of layer k."""
    results: list[Result] = []
    last: list[Result] = []
    for k, directions in enumerate(layers):
        if k > 0 and between is not None:
            x = x * between[k - 1]
        last = []
        for direction, part in enumerate(directions):
            at = len(results)
            one = run(
                cell,
                x,
                h0[at],
                None if c0 is None else c0[at],
                part.weights,
                part.noise,
                lengths=lengths,
                resets=resets,
                reverse=direction == 1,
                norm=part.norm,
                back_to=None
                if back_to is None
                else (back_to[0][at], None if back_to[1] is None else back_to[1][at]),
            )
            results.append(one)
            last.append(one)
        x = np.concatenate([one.y for one in last], axis=-1)
    return StackResult(
        x,
        np.array([one.h for one in results]),
        None if c0 is None else np.array([one.c for one in results]),
        None if c0 is None else np.concatenate([one.cells for one in last], axis=-1),
        [one.seen for one in results],
    )


# --- random bits, by the design's layout ----------------------------------------------------------


def philox(seed: int, c0: int, c1: int, c2: int, c3: int) -> list[int]:
    """Philox 4×32-10 in Python's integers: four 32-bit words."""
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def word(
    seed: int, stream: str, unit: int, example: int, step: int, layer: int, direction: int
) -> int:
    """The 32 bits of a coordinate."""
    plane = 2 * layer + direction + 65536 * GROUPS[stream][0]
    return philox(seed, unit // 4, example, step, plane)[unit % 4]


def as_drawn(rate: Any) -> Any:
    """A rate as 16 random bits have it."""
    return np.round(np.asarray(rate) * 65536) / 65536


def keep(seed: int, stream: str, rate: float, **coordinates: int) -> bool:
    """Whether the old value is kept there."""
    bits = word(seed, stream, **coordinates)
    bits = bits & 0xFFFF if GROUPS[stream][1] == "low" else bits >> 16
    return bits < round(rate * 65536)


def keeps(
    seed: int,
    stream: str,
    rate: float,
    steps: Any,
    examples: Any,
    units: int,
    layer: int,
    direction: int,
) -> Array:
    """The mask [T, B, units] of a draw that sees every coordinate."""
    return np.array(
        [
            [
                [
                    keep(
                        seed,
                        stream,
                        rate,
                        unit=u,
                        example=e,
                        step=s,
                        layer=layer,
                        direction=direction,
                    )
                    for u in range(units)
                ]
                for e in examples
            ]
            for s in steps
        ]
    )


def normal_numbers(seed: int, count: int, matrix: int, layer: int, direction: int) -> Array:
    """Standard normal numbers, Box and Muller's: each pair of words is a radius and an angle."""
    out = []
    for first in range(0, count, 4):
        words = philox(
            seed, first // 4, matrix, 0, 2 * layer + direction + 65536 * GROUPS["weight_noise"][0]
        )
        u = [(one + 0.5) / 2**32 for one in words]
        for a, b in ((u[0], u[1]), (u[2], u[3])):
            radius, angle = np.sqrt(-2 * np.log(a)), 2 * np.pi * b
            out += [radius * np.cos(angle), radius * np.sin(angle)]
    return np.array(out[:count])


# --- what a layer of the package must return ------------------------------------------------------


def values(module: Any) -> dict[str, Array]:
    """The parameters and persistent buffers as arrays."""
    return {name: v.detach().cpu().numpy() for name, v in module.state_dict().items()}


def expected(
    layer: Any,
    x: Array,  # [T, B, input], whatever the layer's batch_first says
    hx: Any = None,  # arrays: (h0, c0) for an LSTM, h0 for the others
    *,
    lengths: Any = None,
    resets: Any = None,  # [T, B]
    seed: int = 0,
    examples: Any = None,
    first_step: int = 0,
    arrays: dict[str, Array] | None = None,
) -> StackResult:
    """What `layer(x, hx, …, seed=seed)` must return in its present mode, in NumPy.

    `arrays` stand in the place of the layer's parameters and statistics.
    """
    from zoneout import RecurrentBatchNorm

    a = values(layer) if arrays is None else arrays
    steps, batch, _ = x.shape
    directions = 2 if layer.bidirectional else 1
    lstm = layer.mode == "LSTM"
    outputs = layer.proj_size or layer.hidden_size
    start: tuple[Array, Array | None]  # of a sequence, and of what comes after a cut
    if layer.learn_initial_state:
        every = np.ones((1, batch, 1))
        start = a["h0"][:, None] * every, a["c0"][:, None] * every if lstm else None
    else:
        count = layer.num_layers * directions
        start = (
            np.zeros((count, batch, outputs)),
            np.zeros((count, batch, layer.hidden_size)) if lstm else None,
        )
    h0, c0 = start if hx is None else hx if lstm else (hx, None)

    ids = (
        np.arange(batch) + (examples or 0)
        if examples is None or np.ndim(examples) == 0
        else examples
    )
    ids = [int(one) for one in ids]
    layers: list[list[Part]] = []
    for k in range(layer.num_layers):
        input_size = x.shape[-1] if k == 0 else outputs * directions
        layers.append([])
        for direction in range(directions):
            suffix = f"_l{k}" + ("_reverse" if direction else "")
            noise = _noise(layer, k, direction, x, input_size, seed, ids, first_step)
            norm = None
            if layer.norm is not None:
                batch_norm = isinstance(layer.norm, RecurrentBatchNorm)
                given = None
                if batch_norm and not layer.training and layer.norm.at_eval == "running":
                    given = {
                        what: (a[f"mean_{name}{suffix}"], a[f"var_{name}{suffix}"])
                        for what, name in (("x", "ih"), ("h", "hh"), ("c", "cell"))
                        if lstm or what != "c"
                    }
                norm = Norm(
                    "examples" if batch_norm else "units",
                    layer.norm.eps,
                    a[f"norm_ih{suffix}"],
                    a[f"norm_hh{suffix}"],
                    a[f"norm_cell{suffix}"] if lstm else None,
                    a[f"norm_cell_shift{suffix}"] if lstm else None,
                    given,
                    first_step,
                )
            layers[-1].append(Part(_weights(layer, a, suffix, seed, k, direction), noise, norm))

    between = None
    if layer.dropout > 0 and layer.training:
        at = range(first_step, first_step + steps)
        between = [
            np.concatenate(
                [
                    (1 - keeps(seed, "dropout", layer.dropout, at, ids, outputs, k, direction))
                    / (1 - as_drawn(layer.dropout))
                    for direction in range(directions)
                ],
                axis=-1,
            )
            for k in range(layer.num_layers - 1)
        ]
    return stack(
        layer.mode.lower(),
        x,
        h0,
        c0,
        layers,
        between,
        lengths=lengths,
        resets=resets,
        back_to=start,
    )


def _noises(layer: Any) -> dict[str, Any]:
    """The layer's noises by the name of their class."""
    noise = layer.noise
    every = [] if noise is None else list(noise) if isinstance(noise, (tuple, list)) else [noise]
    return {type(one).__name__: one for one in every}


def _of_layer(rate: Any, layer: int) -> Any:
    """A rate as a number, or an array of one a unit."""
    rate = rate[layer] if isinstance(rate, (tuple, list)) else rate
    return np.asarray(rate, dtype=np.float64)


def _noise(
    layer: Any, k: int, direction: int, x: Array, input_size: int, seed: int, ids: Any, first: int
) -> Noise:
    """What the noises of a layer are in its present mode: masks, rates in their place, or
    nothing.
    """
    import torch

    import zoneout as zo

    out = Noise()
    steps, batch, _ = x.shape
    where: dict[str, Any] = dict(
        layer=k, direction=direction, examples=torch.tensor(ids), first_step=first
    )
    sizes: dict[str, Any] = dict(
        hidden=layer.hidden_size, proj_size=layer.proj_size, input_size=input_size
    )
    fields = {
        "Zoneout": {"cell": ("cell", "cell"), "hidden": ("hidden", "hidden")},
        "StateDropout": {"cell": ("cell", "zero_cell"), "hidden": ("hidden", "zero_hidden")},
        "RecurrentDropout": {"rate": ("update", "update")},
        "VariationalDropout": {
            "input": ("input", "times_input"),
            "hidden": ("variational_hidden", "times_hidden"),
        },
    }
    for name, noise in _noises(layer).items():
        drawn = layer.training or noise.at_eval == "sample"
        if name not in fields or (not drawn and noise.at_eval == "off"):
            continue
        masks = zo.masks(noise, seed, steps, batch, **sizes, **where) if drawn else {}
        for of, (stream, term) in fields[name].items():
            rate = _of_layer(getattr(noise, of), k)
            d = masks[stream].numpy() * 1.0 if drawn else np.ones((steps, batch, 1)) * rate
            if not np.any(rate):
                continue
            if term.startswith("times"):
                if not drawn:
                    continue  # inverted scaling: the expectation is 1
                with np.errstate(divide="ignore", invalid="ignore"):
                    d = np.where(d == 1, 0.0, 1 / (1 - as_drawn(rate)))
            setattr(out, term, d)
            out.hold = out.hold or (name == "RecurrentDropout" and noise.hold_output_gate)
    return out


def _weights(
    module: Any, a: dict[str, Array], suffix: str, seed: int, layer: int, direction: int
) -> Weights:
    """The matrices as one call sees them: with weight drop, then weight noise."""
    where = dict(layer=layer, direction=direction)
    w_x, w_h, w_hr = a["weight_ih" + suffix], a["weight_hh" + suffix], a.get("weight_hr" + suffix)
    noises = _noises(module)
    for name in ("WeightDrop", "WeightNoise"):
        noise = noises.get(name)
        if noise is None or not (module.training or noise.at_eval == "sample"):
            continue
        if name == "WeightDrop":
            rate = float(_of_layer(noise.rate, layer))
            dropped = keeps(
                seed, "weight", rate, [0], [0], w_h.size, **where
            )  # a unit is an element
            w_h = w_h * (1 - dropped.reshape(w_h.shape)) / (1 - as_drawn(rate))
        else:
            std = float(_of_layer(noise.std, layer))
            w_x, w_h, w_hr = (
                w
                if w is None
                else w + std * normal_numbers(seed, w.size, matrix, **where).reshape(w.shape)
                for matrix, w in enumerate((w_x, w_h, w_hr))
            )
    return Weights(w_x, w_h, a.get("bias_ih" + suffix), a.get("bias_hh" + suffix), w_hr)
