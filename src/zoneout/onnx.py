"""Export of a model in evaluation mode to ONNX.

The operator `zoneout::run` becomes ONNX's LSTM, GRU or RNN operator where that computes the same.
ONNX's operators do not support the expectation of a noise, nor norms, resets and projections inside
the step, nor a user's own cell. For these, `zoneout::run` becomes a Scan over time. The body of the
Scan is one step, made from the graph of the cell's definition.

After `import zoneout`, `torch.onnx.export` has these translations. They need the packages of the
extra "onnx": `pip install 'zoneout[onnx]'`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, NamedTuple

import torch
from torch import nn

from . import cells
from .definition import Definition
from .definition.graph import Value
from .definition.onnx import Nodes, Rate, evaluate, gate_sums, less, mix
from .definition.step import HELD
from .extras import install_command
from .noisy import drawn_rules
from .norm import Moments, StepNorm
from .ops import Run, decode, kind_of, unflatten
from .recurrent import RecurrentModule
from .wrap import ZoneoutCell

__all__ = ["export", "translations"]


def export(model: nn.Module, args: tuple[Any, ...] = (), path: Any = None, **options: Any) -> Any:
    """Export a model with zoneout's layers, in evaluation mode, by `torch.onnx.export`.

    The model is checked first: an error names the layer that ONNX cannot represent. The sizes of
    batch and time may both be dynamic.

    Args:
        model: the model, in evaluation mode.
        args: the arguments of the model's call.
        path: the file to write, or None.
        options: further arguments of `torch.onnx.export`, such as `kwargs`, `input_names` or
            `dynamic_shapes`.

    Returns:
        The result of `torch.onnx.export`.

    >>> import torch, zoneout as zo
    >>> layer = zo.LSTM(3, 4, noise=zo.Zoneout(cell=0.25, hidden=0.05)).eval()
    >>> program = zo.onnx.export(layer, (torch.randn(5, 2, 3),), verbose=False)
    >>> [node.op_type for node in program.model.graph if node.op_type in ("LSTM", "Scan")]
    ['Scan']
    """
    _packages()
    _check(model)
    if options.setdefault("dynamo", True) is not True:
        raise ValueError(
            "dynamo: expected True, since the older exporter has no loop over time, got "
            f"{options['dynamo']!r}"
        )
    table = translations() | (options.pop("custom_translation_table", None) or {})
    return torch.onnx.export(model, args, path, custom_translation_table=table, **options)


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ONNX translations of zoneout's operators.

    Returns:
        A dict from operator to translation, the form of the argument `custom_translation_table` of
        `torch.onnx.export`.

    >>> import zoneout as zo
    >>> len(zo.onnx.translations())
    2
    """
    _packages()
    return {torch.ops.zoneout.run.default: _run, torch.ops.zoneout.fresh_seed.default: _fresh_seed}


# --- registration for torch.onnx.export -----------------------------------------------------------


def register() -> None:
    """Register zoneout's operators for plain `torch.onnx.export`, as late as possible.

    torch loads its exporters at the first use, and importing onnxscript takes most of a second. The
    translations are therefore registered right after torch imports its registry, or immediately if
    the registry is already imported.
    """
    waiting = _RegisterOnImport(
        {
            "torch.onnx._internal.exporter._torchlib.ops": _register_translations,
            "torch.onnx": _register_refusal,
        }
    )
    for name in [name for name in waiting.registrations if name in sys.modules]:
        waiting.registered(name)
    if waiting.registrations:
        sys.meta_path.insert(0, waiting)


class _RegisterOnImport(MetaPathFinder):
    """An import hook that calls a function after the module of a certain name is imported."""

    def __init__(self, registrations: dict[str, Callable[[], None]]) -> None:
        self.registrations = registrations

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        if name not in self.registrations:
            return None
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return None
        run = loader.exec_module

        def run_and_register(module: Any) -> None:
            run(module)
            self.registered(name)

        loader.exec_module = run_and_register
        return spec

    def registered(self, name: str) -> None:
        """Call the function of a module, once; an error in it becomes a warning."""
        if (registration := self.registrations.pop(name, None)) is None:
            return
        try:
            registration()
        except Exception as error:
            # This torch has a different registry. The export of other models must still work.
            warnings.warn(
                "torch.onnx.export cannot export zoneout's layers: expected the exporter's "
                f"registry of torch 2.9 to 2.14, got {type(error).__name__}: {error}; try "
                "zoneout.onnx.export",
                stacklevel=2,
            )


def _register_translations() -> None:
    """Register the translations with torch's default exporter (dynamo=True)."""
    from torch.onnx._internal.exporter._torchlib._torchlib_registry import onnx_impl

    for operator, translation in translations().items():
        onnx_impl(operator, no_compile=True)(translation)


def _register_refusal() -> None:
    """Register an error with the older exporter (dynamo=False), which has no loop over time."""
    for name in ("run", "fresh_seed"):
        torch.onnx.register_custom_op_symbolic(f"zoneout::{name}", _refuse, 9)


def _refuse(*args: Any) -> Any:
    """Raise the error of the older exporter."""
    raise NotImplementedError(
        "torch.onnx.export(dynamo=False) cannot export zoneout's layers; leave dynamo at its "
        "default, True, or use zoneout.onnx.export"
    )


def _packages() -> None:
    """Raise if a package that the export needs is not installed."""
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as missing:
        raise ImportError(
            f"export to ONNX needs the packages onnx and onnxscript, and {missing.name} is not "
            f"installed; try {install_command('onnx')}"
        ) from missing
    del onnx


def _check(model: nn.Module) -> None:
    """Raise if the model would draw random numbers: an ONNX graph is a function of its inputs."""
    for name, module in model.named_modules():
        if not isinstance(module, (RecurrentModule, ZoneoutCell)):
            continue
        where = f"model: {name or type(module).__name__}"
        if module.training:
            raise ValueError(
                f"{where} is in training mode, expected evaluation; call model.eval() first"
            )
        if isinstance(module, RecurrentModule) and (
            drawn := drawn_rules(module._rules, module.training)
        ):
            raise ValueError(
                f"{where} draws its {drawn[0].stream} noise in evaluation too (at_eval='sample'), "
                "which ONNX does not support; expected at_eval='expectation' or 'off'"
            )
        if isinstance(module, RecurrentModule) and (
            changing := [r for r in module._rules if r.mask == "clock" or r.by == "added"]
        ):
            raise ValueError(
                f"{where} has a mask of its {changing[0].stream} that the ONNX export does not "
                "support: a clock's, or one of swapout's"
            )


# --- translation of the operators -----------------------------------------------------------------


def _fresh_seed(x):  # type: ignore[no-untyped-def]
    """Raise: a graph that contains `zoneout::fresh_seed` draws random numbers."""
    raise ValueError(
        "the model draws noise, which ONNX does not support; call model.eval() before the export, "
        "and build noises with at_eval='expectation' or 'off'"
    )


def _run(cell, names, codes, eps, tensors, constants):  # type: ignore[no-untyped-def]
    """Translate `zoneout::run` into nodes of the graph: an ONNX LSTM, GRU or RNN, or a Scan.

    The operator's outputs after the returned ones are for a backward pass. The exporter pairs the
    two lists from their start, and no node of an exported graph reads the others.
    """
    from onnxscript import evaluator

    r = unflatten(decode(cell, names, codes, eps), tensors, constants)
    if r.counts is not None:
        raise ValueError(
            "input: expected a padded batch with lengths=… for ONNX, got a PackedSequence"
        )
    recorder: Any = evaluator.default()
    narrow: Any = r.h0.dtype
    op = Nodes(recorder.nodes, recorder.opset.version, _dtype_of_states(narrow))
    r = _cast(op, r)
    y, final, states = _own_operator(op, r) if _has_own_operator(op, r) else _scan(op, r)
    if narrow != op.dtype:
        y, *final = (op("Cast", v, to=int(narrow)) for v in (y, *final))
    return [y, *final, *states]


def _dtype_of_states(dtype: Any) -> Any:
    """Return the dtype that states are computed in: float32 for the half types."""
    import onnxscript.ir as ir

    return ir.DataType.FLOAT if dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else dtype


MATRICES = ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr")
SCALES = ("scale_x", "scale_h", "scale_c", "shift_c")


def _cast(op: Nodes, r: Run) -> Run:
    """Return a run whose numbers have the dtype of states."""

    def cast(v: Any) -> Any:
        return v if v is None or v.dtype == op.dtype else op("Cast", v, to=int(op.dtype))

    def cast_all(values: Sequence[Any]) -> Any:
        return tuple(map(cast, values))

    norm = r.norm
    if norm is not None:
        given = None if norm.given is None else Moments(*cast_all(norm.given))
        scales = {name: cast(getattr(norm, name)) for name in SCALES}
        norm = norm._replace(given=given, **scales)
    w = r.weights
    matrices = {name: cast(getattr(w, name)) for name in MATRICES}
    return r._replace(
        x=cast(r.x),
        states=cast_all(r.states),
        reset_to=cast_all(r.reset_to),
        weights=w._replace(**matrices, parameters=cast_all(w.parameters)),
        norm=norm,
    )


# --- ONNX's own operators -------------------------------------------------------------------------

# For each cell: the ONNX operator, its attributes, and zoneout's gates in the order of ONNX.
OWN_OPERATORS: dict[Definition, tuple[str, dict[str, Any], Sequence[int]]] = {
    cells.lstm: ("LSTM", {}, (0, 3, 1, 2)),  # i, o, f, g
    cells.gru: ("GRU", {"linear_before_reset": 1}, (1, 0, 2)),  # z, r, n
    cells.rnn_tanh: ("RNN", {"activations": ["Tanh"]}, (0,)),
    cells.rnn_relu: ("RNN", {"activations": ["Relu"]}, (0,)),
}


def _has_own_operator(op: Nodes, r: Run) -> bool:
    """Return True if an operator of ONNX computes the same as a run.

    ONNX's operators have no projection and return the states after h at the last step only. Those
    of onnxruntime do not support float64.
    """
    import onnxscript.ir as ir

    added = (r.norm, r.resets, r.weights.w_hr)
    return (
        r.cell in OWN_OPERATORS
        and op.dtype == ir.DataType.FLOAT
        and not r.draws
        and all(value is None for value in added)
        and not (r.return_states and len(r.states) > 1)
    )


def _own_operator(op: Nodes, r: Run) -> tuple[Any, list[Any], list[Any]]:
    """Add ONNX's LSTM, GRU or RNN; return outputs, final states, and no states of all steps."""
    import onnxscript.ir as ir

    kind, attributes, order = OWN_OPERATORS[r.cell]

    def reorder(v: Any) -> Any:
        """Return [G, ·] with the gates in ONNX's order."""
        if v is None or len(order) == 1:
            return v
        gates = op("Split", v, outputs=len(order), axis=0, num_outputs=len(order))
        return op("Concat", *(gates[k] for k in order), axis=0)

    def add_direction(v: Any) -> Any:
        """[…] -> [1, …]: ONNX's weights and states have a dimension of directions."""
        return None if v is None else op("Unsqueeze", v, [0])

    w_ih, w_hh, b_ih, b_hh = (reorder(v) for v in r.weights.of_gates)
    bias = None if b_ih is None else op("Concat", b_ih, b_hh, axis=0)
    ends = None if r.lengths is None else op("Cast", r.lengths, to=int(ir.DataType.INT32))
    y, *final = op(
        kind, r.x, *map(add_direction, (w_ih, w_hh, bias)), ends, *map(add_direction, r.states),
        outputs=1 + len(r.states), hidden_size=r.hidden,
        direction="reverse" if r.reverse else "forward", **attributes,
    )  # fmt: skip
    y, *final = op("Squeeze", y, [1]), *(op("Squeeze", v, [0]) for v in final)
    if r.lengths is not None:
        # ONNX does not define outputs past the end, nor the final state of a sequence of length 0.
        y = op("Where", _column(op, _Time(op, r).alive), y, 0.0)
        not_empty = _column(op, op("Greater", r.lengths, 0))  # [B, 1]
        final = [op("Where", not_empty, new, old) for new, old in zip(final, r.states)]
    return y, final, []


# --- a Scan over time -----------------------------------------------------------------------------


def _scan(op: Nodes, r: Run) -> tuple[Any, list[Any], list[Any]]:
    """Add a Scan; return outputs, final states, and the states after h of all steps if asked for.

    Values that change from step to step are inputs of the Scan. Its body reads all other values
    from the outer graph.
    """
    import onnxscript.ir as ir

    time, step = _Time(op, r), _Step(op, r)
    inputs = {"gx": step.input_product(op, time), "alive": time.alive, "cut": time.cuts}
    inputs |= {"at": time.at if step.rates.holds else None, **step.moments}
    inputs = {name: value for name, value in inputs.items() if value is not None}
    carried = dict(zip(r.cell.states, r.states))
    if step.rates.holds:
        carried[HELD] = op("Expand", 0.0, step.shape)

    body = Nodes([], op.version, op.dtype)
    dtypes = {"at": ir.DataType.INT64, "alive": ir.DataType.BOOL, "cut": ir.DataType.BOOL}
    before = {name: _input(body, op.dtype) for name in carried}
    now = {name: _input(body, dtypes.get(name, op.dtype)) for name in inputs}
    after = step.nodes(body, before, now)

    seen = r.cell.states if r.return_states else r.cell.states[:1]
    outputs = [body("Identity", after[name]) for name in (*carried, *seen)]  # each by itself
    given = [*before.values(), *now.values()]
    graph = ir.Graph(given, outputs, nodes=body.nodes, name=body.new_name())
    results = op(
        "Scan", *carried.values(), *inputs.values(), outputs=len(outputs), body=graph,
        num_scan_inputs=len(inputs),
    )  # fmt: skip
    y, *states = (time.outputs(v) for v in results[len(carried) :])
    return y, results[: len(r.states)], states


def _input(body: Nodes, dtype: Any) -> Any:
    """Return a new input for the body of a Scan."""
    import onnxscript.ir as ir

    return ir.Value(name=body.new_name(), type=ir.TensorType(dtype))


def _column(op: Nodes, v: Any) -> Any:
    """[…] -> […, 1]."""
    return op("Unsqueeze", v, [-1])


class _Time:
    """The order of processing: reversal, lengths and resets, as in `ops/reference.py`."""

    def __init__(self, op: Nodes, r: Run) -> None:
        self.op, self.reverse, self.lengths = op, r.reverse, r.lengths
        steps = op("Squeeze", op("Shape", r.x, start=0, end=1), [0])
        self.at = op("Range", 0, steps, 1)  # [T]: the index of each processed step
        # [T, B]: True for sequences that have not ended
        self.alive = None if r.lengths is None else op("Less", _column(op, self.at), r.lengths)
        self.cuts = None if r.resets is None else self._cuts(r.resets)  # [T, B]

    def turn(self, v: Any) -> Any:
        """Reverse [T, B, ·] over time if the direction is reversed."""
        if not self.reverse:
            return v
        if self.lengths is not None:
            return self.op("ReverseSequence", v, self.lengths, batch_axis=1, time_axis=0)
        return self.op("Slice", v, [-1], [-(2**63)], [0], [-1])

    def _cuts(self, resets: Any) -> Any:
        """Return the resets before each processed step.

        A reversed loop meets the cut before step t + 1 at step t, and none at its first step.
        """
        import onnxscript.ir as ir

        op = self.op
        if not self.reverse:
            return resets
        false = op("Cast", 0, to=int(ir.DataType.BOOL))
        no_cut = op("And", op("Slice", resets, [0], [1], [0]), false)
        shifted = op("Concat", op("Slice", resets, [1], [2**63 - 1], [0]), no_cut, axis=0)
        return op("And", self.turn(shifted), _column(op, op("Greater", self.at, 0)))

    def outputs(self, v: Any) -> Any:
        """Return the values of all steps in the order of the input, zero past the lengths."""
        op = self.op
        return self.turn(v if self.alive is None else op("Where", _column(op, self.alive), v, 0.0))


class _Rates(NamedTuple):
    """The rates of a run, as `cells.Keep` has them."""

    zone: dict[str, Rate]
    zero: dict[str, Rate]
    update: Rate | None
    holds: bool  # True if the definition's `zo.held` gate may keep its previous value

    @staticmethod
    def of(op: Nodes, r: Run) -> _Rates:
        zone: dict[str, Rate] = {}
        zero: dict[str, Rate] = {}
        update: Rate | None = None
        for draw in r.draws:
            if draw.given is not None:
                raise ValueError(
                    "the model has masks that are given (a clock's, swapout's, or those of rates "
                    "of each step), which the ONNX export does not support"
                )
            if draw.seed is not None:
                _fresh_seed(None)
            rate = Rate.of(op, draw.rate)
            if draw.rule.stream == "update":
                update = rate
            else:
                kind, k = kind_of(draw.rule)
                (zone if kind == "zone" else zero)[r.cell.states[k]] = rate
        holds = "held" in r.cell.marks and any(draw.rule.holds_gate for draw in r.draws)
        return _Rates(zone, zero, update, holds)


class _Step:
    """The body of the Scan: one step of a cell, as in `cells.step` and `ops/reference.py`.

    What does not change from step to step is computed by the constructor, outside of the body.
    """

    def __init__(self, op: Nodes, r: Run) -> None:
        self.r, self.rates = r, _Rates.of(op, r)
        rows = op("Shape", r.h0, start=0, end=1)
        self.shape = op("Concat", rows, [r.hidden], axis=0)  # [B, H]
        w = r.weights
        self.w_hh = None if w.w_hh is None else _recurrent_matrix(op, r, w.w_hh)
        self.w_hr = None if w.w_hr is None else op("Transpose", w.w_hr, perm=[1, 0])
        self.apart = r.cell.storage.apart  # False: x·Wx and h·Wh are only used as their sum
        given = () if r.norm is None or r.norm.given is None else r.norm.given
        moments = dict(zip(Moments._fields, given))
        self.moments = {name: v for name, v in moments.items() if name not in ("mean_x", "var_x")}

    def input_product(self, op: Nodes, time: _Time) -> Any:
        """Add x·Wx of all steps, [T, B, G], with its norm and all biases that can be added here."""
        r, w = self.r, self.r.weights
        gx = time.turn(op("MatMul", r.x, op("Transpose", w.w_ih, perm=[1, 0])))
        if r.norm is not None:
            given, means = r.norm.given, None
            if given is not None:
                means = [op("Unsqueeze", v, [1]) for v in (given.mean_x, given.var_x)]
            alive = None if time.alive is None else _column(op, time.alive)
            gx = _normalise(op, gx, r.norm, r.norm.scale_x, means, alive)
        for bias in (w.b_ih,) if self.apart else (w.b_ih, w.b_hh):
            gx = gx if bias is None else op("Add", gx, bias)
        return gx

    def nodes(self, op: Nodes, before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
        """Add the step; return the new states, and the gate that the next step may hold.

        Args:
            op: the body.
            before: the states before the step, and the held gate of the step before.
            now: the inputs of this step.
        """
        r, cell, rates = self.r, self.r.cell, self.rates
        alive, cut = (_column(op, now[name]) if name in now else None for name in ("alive", "cut"))
        states = [before[name] for name in cell.states]
        if cut is not None:
            states = [op("Where", cut, to, old) for to, old in zip(r.reset_to, states, strict=True)]
        after: dict[str, Any] = {}

        def set_zero(v: Any, state: Value) -> Any:
            # h becomes zero after its projection
            return v if state == cell.states[0] else less(op, v, self._of(rates.zero, str(state)))

        def hold(own: Any, _: Value) -> Any:
            if not rates.holds:
                return own
            after[HELD] = own
            old = before[HELD] if cut is None else op("Where", cut, own, before[HELD])
            first = op("Equal", now["at"], 0)  # there is no previous gate to hold
            return op("Where", first, own, mix(op, own, old, rates.update))

        marks = {
            "candidate": set_zero,
            "update": lambda v, _: less(op, v, rates.update),
            "shown": lambda v, _: self._expose(op, v, now, alive),
            "held": hold,
        }
        gh = self._recurrent_product(op, states[0], now, alive)
        h, *others = self._evaluate(op, now["gx"], gh, states, marks)
        h = h if self.w_hr is None else op("MatMul", h, self.w_hr)
        new = [less(op, h, self._of(rates.zero, cell.states[0])), *others]
        for state, value, old in zip(cell.states, new, states, strict=True):
            value = mix(op, value, old, self._of(rates.zone, state))
            # A sequence that has ended keeps its final state.
            after[state] = value if alive is None else op("Where", alive, value, before[state])
        return after

    def _of(self, rates: dict[str, Rate], state: str) -> Rate | None:
        return rates.get(self.r.cell.group_of(state))

    def _evaluate(self, op: Nodes, gx: Any, gh: Any, states: list[Any], marks: Any) -> list[Any]:
        """Add the definition's graph; return the candidates."""
        cell = self.r.cell
        known: dict[int, Any] = {}
        if gh is None:
            gates = [_split(op, cell, gx)]
        elif self.apart:
            gates = [_split(op, cell, gx), _split(op, cell, gh)]
        else:  # one sum of all gates in place of one per gate
            sums = _split(op, cell, op("Add", gx, gh))
            known = {node: sums[gate] for node, gate in gate_sums(cell.graph)}
            gates = [(), ()]
        leaves = cell.leaves(*gates, *states, *self.r.weights.parameters)
        return evaluate(op, cell.graph, cell.outputs, leaves, marks, shape=self.shape, known=known)

    def _recurrent_product(self, op: Nodes, h: Any, now: dict[str, Any], alive: Any) -> Any:
        """Add h·Wh, [B, G], with its norm and bias; None if h meets no matrix."""
        r = self.r
        if self.w_hh is None:
            return None
        if r.cell.heads == 1:
            gh = op("MatMul", h, self.w_hh)
        else:
            heads, size = r.cell.heads, r.hidden // r.cell.heads
            by_head = op("Transpose", op("Reshape", h, [-1, heads, size]), perm=[1, 0, 2])
            product = op("MatMul", by_head, self.w_hh)  # [heads, B, gates · H / heads]
            product = op("Reshape", product, [heads, -1, r.cell.gates, size])
            product = op("Transpose", product, perm=[1, 2, 0, 3])  # [B, gates, heads, H / heads]
            gh = op("Reshape", product, [-1, r.width])
        if r.norm is not None:
            gh = _normalise(op, gh, r.norm, r.norm.scale_h, _given(now, "h"), alive)
        bias = r.weights.b_hh if self.apart else None
        return gh if bias is None else op("Add", gh, bias)

    def _expose(self, op: Nodes, v: Any, now: dict[str, Any], alive: Any) -> Any:
        """Return what `zo.shown` marks: normalised, if there is a norm."""
        norm = self.r.norm
        if norm is None:
            return v
        normalised = _normalise(op, v, norm, norm.scale_c, _given(now, "c"), alive)
        return op("Add", normalised, norm.shift_c)


def _recurrent_matrix(op: Nodes, r: Run, w_hh: Any) -> Any:
    """Return Wh as the right factor of a product: [outputs, G], or [heads, H / heads, ·]."""
    if r.cell.heads == 1:
        return op("Transpose", w_hh, perm=[1, 0])
    heads, size = r.cell.heads, r.hidden // r.cell.heads
    blocks = op("Reshape", w_hh, [r.cell.gates, heads, size, size])  # gates, heads, to, from
    return op("Reshape", op("Transpose", blocks, perm=[1, 3, 0, 2]), [heads, size, -1])


def _split(op: Nodes, cell: Definition, v: Any) -> Sequence[Any]:
    """Return the gates of [B, gates · H], [B, H] each."""
    if cell.gates == 1:
        return [v]
    gates: list[Any] = op("Split", v, outputs=cell.gates, axis=-1, num_outputs=cell.gates)
    return gates


# --- norms ----------------------------------------------------------------------------------------


def _given(now: dict[str, Any], of: str) -> list[Any] | None:
    """Return the moments of h·Wh (`of` = "h") or c (`of` = "c") that a step is given."""
    return [now[f"mean_{of}"], now[f"var_{of}"]] if f"mean_{of}" in now else None


def _normalise(op: Nodes, v: Any, norm: StepNorm, scale: Any, given: Any, alive: Any) -> Any:
    """Add `norm.normalise` with the moments `given`, or with the moments of `v` itself."""
    mean, var = given or (_mean(op, v, norm.over, alive), None)
    centred = op("Sub", v, mean)
    if var is None:
        var = _mean(op, op("Mul", centred, centred), norm.over, alive)
    deviation = op("Sqrt", op("Add", var, norm.eps))
    return op("Mul", op("Div", centred, deviation), scale)


def _mean(op: Nodes, v: Any, over: str, alive: Any) -> Any:
    """Add the mean of […, B, units] over the units, or over the rows where `alive` […, B, 1]."""
    if over == "units":
        return op("ReduceMean", v, [-1], keepdims=1)
    if alive is None:
        return op("ReduceMean", v, [-2], keepdims=1)
    rows = op("ReduceSum", op("Cast", alive, to=int(op.dtype)), [-2], keepdims=1)
    total = op("ReduceSum", op("Where", alive, v, 0.0), [-2], keepdims=1)
    return op("Div", total, op("Max", rows, 1.0))
