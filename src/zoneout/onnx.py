"""Export of a model in evaluation mode to ONNX.

The operator `zoneout::run` becomes ONNX's LSTM, GRU or RNN operator where that computes the same.
ONNX's operators do not support the expectation of a noise, nor norms, resets and projections inside
the step. For these, `zoneout::run` becomes a Scan over time. The body of the Scan is the step of
`cells.py`, written with ONNX operators.

After `import zoneout`, `torch.onnx.export` has these translations. They need the packages of the
extra "onnx": `pip install '.[onnx]'` in a clone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from itertools import count
from typing import Any

import torch
from torch import nn

from .draws import Draw
from .ops.loop import GATES
from .ops.operator import decode
from .ops.reference import KEEPS
from .recurrent import Recurrent, drawn_rules
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
    """
    _packages()
    _check(model)
    if options.setdefault("dynamo", True) is not True:
        raise ValueError(
            f"dynamo: expected True, since the older exporter has no loop over time, got {options['dynamo']!r}"
        )
    table = translations() | (options.pop("custom_translation_table", None) or {})
    return torch.onnx.export(model, args, path, custom_translation_table=table, **options)


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ONNX translations of zoneout's operators.

    The dict has the form of the argument `custom_translation_table` of `torch.onnx.export`.
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

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
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
                f"torch.onnx.export cannot export zoneout's layers: expected the exporter's registry of torch 2.9 to "
                f"2.14, got {type(error).__name__}: {error}; try zoneout.onnx.export",
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
        "torch.onnx.export(dynamo=False) cannot export zoneout's layers; leave dynamo at its default, True, "
        "or use zoneout.onnx.export"
    )


def _packages() -> None:
    """Raise if a package that the export needs is not installed."""
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as missing:
        raise ImportError(
            f"export to ONNX needs the packages onnx and onnxscript, and {missing.name} is not installed; "
            "try pip install '.[onnx]' in a clone of the repository"
        ) from missing
    del onnx


def _check(model: nn.Module) -> None:
    """Raise if the model would draw random numbers: an ONNX graph is a function of its inputs."""
    for name, module in model.named_modules():
        if not isinstance(module, (Recurrent, ZoneoutCell)):
            continue
        where = f"model: {name or type(module).__name__}"
        if module.training:
            raise ValueError(f"{where} is in training mode, expected evaluation; call model.eval() first")
        if isinstance(module, Recurrent) and (drawn := drawn_rules(module._rules, module.training)):
            raise ValueError(
                f"{where} draws its {drawn[0].stream} noise in evaluation too (at_eval='sample'), which ONNX does not "
                "support; expected at_eval='expectation' or 'off'"
            )


# --- building an ONNX graph -----------------------------------------------------------------------


class _Graph:
    """A builder that appends nodes to a graph: that of the model, or the body of a Scan.

    Calling it adds one operator and returns its output, or a list of its outputs.
    """

    names = count()

    def __init__(self, nodes: list[Any], version: int, like: Any) -> None:
        self.nodes, self.version, self.like = nodes, version, like

    def __call__(self, kind: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        import onnxscript.ir as ir

        values = [v if v is None or isinstance(v, ir.Value) else self.constant(v) for v in inputs]
        converted = ir.convenience.convert_attributes(attributes)
        node = ir.Node("", kind, values, converted, num_outputs=outputs, version=self.version)
        for value in node.outputs:
            value.name = self.name()
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else list(node.outputs)

    def name(self) -> str:
        """Return a new, unique name."""
        return f"zoneout_{next(self.names)}"

    def constant(self, value: float | int | list[int]) -> Any:
        """Add a constant: a float in the dtype of the states, anything else as int64."""
        import onnxscript.ir as ir

        kind = self.like if isinstance(value, float) else ir.DataType.INT64
        return self("Constant", value=ir.tensor(value, dtype=kind))

    def linear(self, x: Any, weight: Any) -> Any:
        """x · weightᵀ."""
        return self("MatMul", x, self("Transpose", weight, perm=[1, 0]))

    def column(self, v: Any) -> Any:
        """[…] -> […, 1]."""
        return self("Unsqueeze", v, [-1])

    def zone(self, new: Any, old: Any, rate: Any) -> Any:
        """The expectation of `cells.zone`."""
        if rate is None:
            return new
        return self("Add", self.drop(new, rate), self("Mul", old, rate))

    def drop(self, new: Any, rate: Any) -> Any:
        """The expectation of `cells.drop`."""
        return new if rate is None else self("Mul", new, self("Sub", 1.0, rate))

    def mean(self, v: Any, over: str, alive: Any) -> Any:
        """Mean of […, B, units] over the units, or over the examples where `alive` […, B, 1]."""
        if over == "units":
            return self("ReduceMean", v, [-1], keepdims=1)
        if alive is None:
            return self("ReduceMean", v, [-2], keepdims=1)
        share = self("Cast", alive, to=int(self.like))
        total = self("ReduceSum", self("Where", alive, v, 0.0), [-2], keepdims=1)
        return self("Div", total, self("Max", self("ReduceSum", share, [-2], keepdims=1), 1.0))

    def normalise(self, v: Any, given: Sequence[Any] | None, over: str, eps: float, scale: Any, alive: Any) -> Any:
        """`norm.normalise` with the moments `given`, or with the moments of `v` itself."""
        mean, var = given or (self.mean(v, over, alive), None)
        centred = self("Sub", v, mean)
        if var is None:
            var = self.mean(self("Mul", centred, centred), over, alive)
        deviation = self("Sqrt", self("Add", var, eps))
        return self("Mul", self("Div", centred, deviation), scale)


# --- translation of the operators -----------------------------------------------------------------


def _run(  # type: ignore[no-untyped-def]
    cell, x, h0, c0, reset_h, reset_c, w_ih, w_hh, b_ih, b_hh, w_hr, scale_x, scale_h, scale_c, shift_c, over, eps,
    codes, numbers, lengths, resets, reverse, counts,
):  # fmt: skip
    """Translate `zoneout::run` into nodes of the graph: an ONNX LSTM, GRU or RNN, or a Scan."""
    import onnxscript.ir as ir
    from onnxscript import evaluator

    if counts is not None:
        raise ValueError("input: expected a padded batch with lengths=… for ONNX, got a PackedSequence")
    recorder: Any = evaluator.default()
    narrow, units = x.dtype, w_hh.shape[1]
    wide = ir.DataType.FLOAT if narrow in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else narrow
    op = _Graph(recorder.nodes, recorder.opset.version, wide)

    def cast(v: Any) -> Any:
        return v if v is None or v.dtype == wide else op("Cast", v, to=int(wide))

    x, h, c, reset_h, reset_c = (cast(v) for v in (x, h0, c0, reset_h, reset_c))
    w_ih, w_hh, b_ih, b_hh, w_hr = (cast(v) for v in (w_ih, w_hh, b_ih, b_hh, w_hr))
    scale_x, scale_h, scale_c, shift_c = (cast(v) for v in (scale_x, scale_h, scale_c, shift_c))
    draws, given = decode(codes, numbers)
    given = [cast(v) for v in given]
    # ONNX's operators have no projection and do not return every c_t. Those of onnxruntime do not
    # support float64.
    supported = cell in OWN_OPERATORS and wide == ir.DataType.FLOAT
    if supported and not (draws or over or codes[2]) and resets is None and w_hr is None:
        weights = (w_ih, w_hh, b_ih, b_hh)
        return _outputs(op, narrow, *_own_operator(op, cell, units, x, h, c, weights, lengths, reverse))
    keep, holds = _expectations(op, draws)

    steps = op("Squeeze", op("Shape", x, start=0, end=1), [0])
    at = op("Range", 0, steps, 1)  # [T]: the index of each processed step

    def turn(v: Any) -> Any:
        """Reverse [T, B, ·] over time if the direction is reversed."""
        if not reverse:
            return v
        if lengths is not None:
            return op("ReverseSequence", v, lengths, batch_axis=1, time_axis=0)
        return op("Slice", v, [-1], [-(2**63)], [0], [-1])

    alive = None if lengths is None else op("Less", op.column(at), lengths)  # [T, B]
    cuts = resets
    if resets is not None and reverse:  # a reversed loop meets the cut before step t + 1 at step t
        no_cut = op("And", op("Slice", resets, [0], [1], [0]), op("Cast", 0, to=int(ir.DataType.BOOL)))
        shifted = op("Concat", op("Slice", resets, [1], [2**63 - 1], [0]), no_cut, axis=0)
        cuts = op("And", turn(shifted), op.column(op("Greater", at, 0)))

    gx = turn(op.linear(x, w_ih))  # [T, B, G]
    if over:
        moments = [op("Unsqueeze", v, [1]) for v in given[:2]] or None
        gx = op.normalise(gx, moments, over, eps, scale_x, None if alive is None else op.column(alive))
    separate = bool(over) or cell == "gru"  # True: b_hh is added to h·Wh inside the loop
    for bias in (b_ih,) if separate else (b_ih, b_hh):
        gx = gx if bias is None else op("Add", gx, bias)

    # Values that change from step to step are scan inputs. The body reads all other values from the
    # outer graph.
    lstm = cell == "lstm"
    scans = {"gx": gx, "at": at, "alive": alive, "cuts": cuts}
    scans |= dict(zip(("mean_h", "var_h", "mean_c", "var_c"), given[2:]))
    scans = {name: value for name, value in scans.items() if value is not None}
    states = {"h": h, "c": c, "o": op("Mul", c, 0.0) if holds else None}
    states = {name: value for name, value in states.items() if value is not None}

    body = _Graph([], recorder.opset.version, wide)
    kinds = {"at": ir.DataType.INT64, "alive": ir.DataType.BOOL, "cuts": ir.DataType.BOOL}
    inside = {
        name: ir.Value(name=f"{body.name()}_{name}", type=ir.TensorType(kinds.get(name, wide)))
        for name in (*states, *scans)
    }
    step = _Step(body, cell, w_hh, w_hr, b_hh if separate else None, keep, holds, over, eps, scale_h, scale_c, shift_c)
    ends = step(inside, reset_h, reset_c)
    every = [body("Identity", ends[name]) for name in (("h", "c") if lstm else ("h",))]
    final = [body("Identity", ends[name]) for name in states]
    graph = ir.Graph(list(inside.values()), [*final, *every], nodes=body.nodes, name=body.name())
    results = op(
        "Scan", *states.values(), *scans.values(), outputs=len(final) + len(every), body=graph,
        num_scan_inputs=len(scans),
    )  # fmt: skip

    def over_time(v: Any) -> Any:
        """Outputs of all steps, zero past the lengths, in the order of the input."""
        return turn(v if alive is None else op("Where", op.column(alive), v, 0.0))

    y, h_n = over_time(results[len(final)]), results[0]
    c_n, cells = (results[1], over_time(results[-1])) if lstm else (None, None)
    return _outputs(op, narrow, y, h_n, c_n, cells)


def _outputs(op: _Graph, dtype: Any, y: Any, h_n: Any, c_n: Any, cells: Any = None) -> list[Any]:
    """Return all results of the operator, with outputs and final states cast to `dtype`."""
    import onnxscript.ir as ir

    results = [v if v is None or dtype == op.like else op("Cast", v, to=int(dtype)) for v in (y, h_n, c_n)]
    results += [cells, *(None,) * 8]  # the other results are only used by a backward pass
    return [ir.Value() if v is None else v for v in results]


# For each cell: the ONNX operator, its attributes, and zoneout's gates in the order of ONNX.
OWN_OPERATORS: dict[str, tuple[str, dict[str, Any], Sequence[int]]] = {
    "lstm": ("LSTM", {}, (0, 3, 1, 2)),  # i, o, f, g
    "gru": ("GRU", {"linear_before_reset": 1}, (1, 0, 2)),  # z, r, n
    "rnn_tanh": ("RNN", {"activations": ["Tanh"]}, (0,)),
    "rnn_relu": ("RNN", {"activations": ["Relu"]}, (0,)),
}


def _own_operator(
    op: _Graph, cell: str, units: int, x: Any, h0: Any, c0: Any, weights: Sequence[Any], lengths: Any, reverse: bool
) -> tuple[Any, Any, Any]:
    """Add ONNX's LSTM, GRU or RNN for one direction; return outputs and final states."""
    import onnxscript.ir as ir

    kind, attributes, order = OWN_OPERATORS[cell]

    def reorder(v: Any) -> Any:
        """Return [G, ·] with the gates in ONNX's order."""
        if len(order) == 1:
            return v
        gates = op("Split", v, outputs=len(order), axis=0, num_outputs=len(order))
        return op("Concat", *(gates[k] for k in order), axis=0)

    def add_direction(v: Any) -> Any:
        """[…] -> [1, …]: ONNX's weights and states have a dimension of directions."""
        return None if v is None else op("Unsqueeze", v, [0])

    w_ih, w_hh, b_ih, b_hh = (None if v is None else reorder(v) for v in weights)
    bias = None if b_ih is None else op("Concat", b_ih, b_hh, axis=0)
    ends = None if lengths is None else op("Cast", lengths, to=int(ir.DataType.INT32))
    states = [h0] if c0 is None else [h0, c0]
    y, *final = op(
        kind, x, add_direction(w_ih), add_direction(w_hh), add_direction(bias), ends, *map(add_direction, states),
        outputs=1 + len(states), hidden_size=units, direction="reverse" if reverse else "forward",
        **attributes,
    )  # fmt: skip
    y, *final = op("Squeeze", y, [1]), *(op("Squeeze", v, [0]) for v in final)
    if lengths is not None:
        # ONNX does not define outputs past the end, nor the final state of a sequence of length 0.
        steps = op("Squeeze", op("Shape", x, start=0, end=1), [0])
        alive = op("Less", op.column(op("Range", 0, steps, 1)), lengths)  # [T, B]
        y = op("Where", op.column(alive), y, 0.0)
        not_empty = op.column(op("Greater", lengths, 0))  # [B, 1]
        final = [op("Where", not_empty, new, old) for new, old in zip(final, states)]
    return y, final[0], final[1] if len(final) > 1 else None


def _fresh_seed(x):  # type: ignore[no-untyped-def]
    """Raise: a graph that contains `zoneout::fresh_seed` draws random numbers."""
    raise ValueError(
        "the model draws noise, which ONNX does not support; call model.eval() before the export, and build "
        "noises with at_eval='expectation' or 'off'"
    )


def _expectations(op: _Graph, draws: Sequence[Draw]) -> tuple[dict[str, Any], bool]:
    """Return the rate of each field of `cells.Keep`, and True if the output gate may be held."""
    keep, holds = {}, False
    for draw in draws:
        if draw.seed is not None:
            _fresh_seed(None)
        keep[KEEPS[draw.rule.stream, draw.rule.by]] = op("Cast", draw.rate, to=int(op.like))
        holds = holds or draw.rule.holds_gate
    return keep, holds


class _Step:
    """The body of the Scan: one step of a cell, as in `cells.py`."""

    def __init__(
        self, op: _Graph, cell: str, w_hh: Any, w_hr: Any, b_h: Any, keep: dict[str, Any], holds: bool, over: str,
        eps: float, scale_h: Any, scale_c: Any, shift_c: Any,
    ) -> None:  # fmt: skip
        self.op, self.cell, self.w_hh, self.w_hr, self.b_h = op, cell, w_hh, w_hr, b_h
        self.keep, self.holds, self.over, self.eps = keep, holds, over, eps
        self.scale_h, self.scale_c, self.shift_c = scale_h, scale_c, shift_c

    def __call__(self, now: dict[str, Any], reset_h: Any, reset_c: Any) -> dict[str, Any]:
        """Add one step and return the new states; `now` holds the states and this step's inputs."""
        op, lstm = self.op, self.cell == "lstm"
        alive, cut = (op.column(now[name]) if name in now else None for name in ("alive", "cuts"))
        h, c = now["h"], now.get("c")
        if cut is not None:
            h = op("Where", cut, reset_h, h)
            c = op("Where", cut, reset_c, c) if lstm else None
        gh = op.linear(h, self.w_hh)
        if self.over:
            gh = self.normalise(gh, "h", now, self.scale_h, alive)
        gh = gh if self.b_h is None else op("Add", gh, self.b_h)
        if lstm:
            held = (now["o"], op("Equal", now["at"], 0), cut) if self.holds else None
            new = self.lstm(op("Add", now["gx"], gh), h, c, held, lambda v: self.expose(v, now, alive))
        elif self.cell == "gru":
            new = self.gru(now["gx"], gh, h)
        else:
            new = self.rnn(op("Add", now["gx"], gh), h)
        if alive is not None:  # a sequence that has ended keeps its final state
            for name in ("h", "c") if lstm else ("h",):
                new[name] = op("Where", alive, new[name], now[name])
        return new

    def normalise(self, v: Any, of: str, now: dict[str, Any], scale: Any, alive: Any) -> Any:
        """Normalise h·Wh (`of` = "h") or c (`of` = "c")."""
        given = (now[f"mean_{of}"], now[f"var_{of}"]) if f"mean_{of}" in now else None
        return self.op.normalise(v, given, self.over, self.eps, scale, alive)

    def expose(self, c: Any, now: dict[str, Any], alive: Any) -> Any:
        """Return c as it feeds h: normalised, if there is a norm."""
        return self.op("Add", self.normalise(c, "c", now, self.scale_c, alive), self.shift_c) if self.over else c

    def split(self, gates: Any) -> Sequence[Any]:
        """Split [B, G·H] into one tensor per gate."""
        gate_count = GATES[self.cell]
        return self.op("Split", gates, outputs=gate_count, axis=-1, num_outputs=gate_count)

    def lstm(self, gates: Any, h: Any, c: Any, held: Any, expose: Callable[[Any], Any]) -> dict[str, Any]:
        """Add the step of `cells.lstm`; `held` is (previous gate, first step, cut) or None."""
        op, keep = self.op, self.keep
        i, f, g, o = self.split(gates)
        i, f, g, o = op("Sigmoid", i), op("Sigmoid", f), op("Tanh", g), op("Sigmoid", o)
        c_new = op("Add", op("Mul", f, c), op.drop(op("Mul", i, g), keep.get("update")))
        c_new = op.drop(c_new, keep.get("zero_cell"))
        shown = o
        if held is not None:
            before, first, cut = held
            starts = first if cut is None else op("Or", first, cut)  # no previous gate to hold
            shown = op.zone(o, op("Where", starts, o, before), keep["update"])
        h_new = op("Mul", shown, op("Tanh", expose(c_new)))
        h_new = h_new if self.w_hr is None else op.linear(h_new, self.w_hr)
        h_new = op.drop(h_new, keep.get("zero_hidden"))
        return {"h": op.zone(h_new, h, keep.get("hidden")), "c": op.zone(c_new, c, keep.get("cell")), "o": o}

    def gru(self, gx: Any, gh: Any, h: Any) -> dict[str, Any]:
        """Add the step of `cells.gru`."""
        op, keep = self.op, self.keep
        (rx, zx, nx), (rh, zh, nh) = self.split(gx), self.split(gh)
        r, z = op("Sigmoid", op("Add", rx, rh)), op("Sigmoid", op("Add", zx, zh))
        n = op("Tanh", op("Add", nx, op("Mul", r, nh)))
        update = op.drop(op("Mul", op("Sub", 1.0, z), n), keep.get("update"))
        h_new = op.drop(op("Add", op("Mul", z, h), update), keep.get("zero_hidden"))
        return {"h": op.zone(h_new, h, keep.get("hidden"))}

    def rnn(self, gates: Any, h: Any) -> dict[str, Any]:
        """Add the step of `cells.rnn`."""
        op, keep = self.op, self.keep
        h_new = op("Relu" if self.cell == "rnn_relu" else "Tanh", gates)
        return {"h": op.zone(op.drop(h_new, keep.get("zero_hidden")), h, keep.get("hidden"))}
