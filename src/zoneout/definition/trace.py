"""Tracing: run a cell's function on symbols instead of tensors, and get its graph.

A `Symbol` takes Python's operators, the methods of a tensor and torch's functions. Everything that
is not in the table of operations is an error that names the operation and its line.
"""

from __future__ import annotations

import linecache
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from .graph import Graph
from .operations import COMPARISONS, OPERATIONS, TRACED
from .products import MOST_PARTS

TRACES: dict[Any, str] = {  # torch's functions, and Python's where a number stands first
    torch.add: "add", torch.sub: "sub", torch.mul: "mul", torch.div: "div", torch.neg: "neg",
    torch.true_divide: "div", torch.sigmoid: "sigmoid", torch.special.expit: "sigmoid",
    F.sigmoid: "sigmoid", torch.tanh: "tanh", F.tanh: "tanh", torch.relu: "relu", F.relu: "relu",
    torch.exp: "exp", torch.log: "log", torch.sqrt: "sqrt", F.softplus: "softplus",
    torch.abs: "abs", torch.minimum: "minimum", torch.maximum: "maximum", torch.where: "where",
    torch.lt: "lt", torch.le: "le", torch.gt: "gt", torch.ge: "ge", torch.eq: "eq", torch.ne: "ne",
}  # fmt: skip


class DefinitionError(ValueError):
    """A cell's function is not a definition; the message says what to change.

    >>> import zoneout as zo
    >>> try:
    ...     zo.cell(gates=1)(lambda x, r, h: x[0].tanh())
    ... except zo.DefinitionError as error:
    ...     print(error)
    cell '<lambda>': r is never used; write recurrence='none' and leave r out
    """


class Tracer:
    """The graph under construction, and the function that it is made from."""

    def __init__(self, name: str, code: CodeType, states: Sequence[str]) -> None:
        self.graph, self.name, self.code, self.states = Graph(), name, code, tuple(states)
        self.with_gradients = torch.is_grad_enabled()

    def leaf(self, kind: str, name: str) -> Symbol:
        return Symbol(self, self.graph.add(kind, value=name))

    def fail(self, why: str) -> NoReturn:
        """Raise an error that names the line of the function that is being run."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and not self.is_own(frame.f_code):
            frame = frame.f_back
        where = "" if frame is None else line_of(self.code, frame.f_lineno)
        raise DefinitionError(f"cell {self.name!r}: {why}{where}")

    def is_own(self, code: CodeType) -> bool:
        """Return True for the function's code; a comprehension inside the function has code of
        its own.
        """
        return code is self.code or code in self.code.co_consts

    def where(self, error: BaseException) -> str:
        """Return the line of the function that raised an error."""
        lines = [at for frame, at in walk_tb(error.__traceback__) if self.is_own(frame.f_code)]
        return line_of(self.code, lines[-1]) if lines else ""

    def apply(self, op: str, args: Sequence[Any]) -> Symbol:
        if torch.is_grad_enabled() != self.with_gradients:
            self.fail(
                "torch.no_grad and torch.enable_grad have no effect in a definition; leave them out"
            )
        if len(args) != OPERATIONS[op].arguments:
            self.fail(f"{op}: expected {OPERATIONS[op].arguments} arguments, got {len(args)}")
        nodes = tuple(self.node(op, arg) for arg in args)
        kinds = [self.graph.nodes[node].op in COMPARISONS for node in nodes]
        if any(kinds) != (op == "where") or any(kinds[1:]):
            self.fail(
                f"{op} was given a comparison"
                if any(kinds)
                else "where: expected a comparison of numbers first"
            )
        return Symbol(self, self.graph.add(op, *nodes))

    def node(self, op: str, value: Any) -> int:
        if isinstance(value, Symbol):
            if value.tracer is not self:
                self.fail(f"{op} was given a value of another cell")
            if self.graph.nodes[value.node].op == "product" and op != "product":
                self.fail(f"{op} was given a product with rank=; only zo.product takes it")
            return value.node
        if isinstance(value, bool) or not isinstance(value, Real):  # NumPy's numbers are Real
            if isinstance(value, tuple) and any(_symbols(value)):
                self.fail(
                    f"{op} was given a tuple of {len(value)} values; take one of them: x, r and "
                    "products with parts= are tuples"
                )
            what = (
                "a tensor that is not an argument of the cell"
                if isinstance(value, Tensor)
                else repr(value)
            )
            self.fail(f"{op} was given {what}; expected the cell's arguments and plain numbers")
        if not math.isfinite(value):
            self.fail(f"{op} was given {value}; expected a finite number")
        return self.graph.number(float(value))


class Symbol:
    """A number per unit, in a cell that is being traced."""

    __slots__ = ("node", "tracer")

    def __init__(self, tracer: Tracer, node: int) -> None:
        self.tracer, self.node = tracer, node

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Symbol:
        kwargs = dict(kwargs or {})
        tracer = next(symbol.tracer for symbol in _symbols((args, kwargs)))
        name = getattr(func, "__name__", func)
        if any(isinstance(arg, Tensor) for arg in args):
            tracer.fail(
                f"{name} was given a tensor that is not an argument of the cell; expected plain "
                "numbers"
            )
        op = TRACES.get(func)
        args = _without_defaults(op, args, kwargs)
        if op is None or kwargs:
            extra = f" with {', '.join(kwargs)}" if kwargs and op else ""
            hint = PRODUCT if name in PRODUCTS else allowed()
            tracer.fail(f"{name}{extra} is not an operation of a cell; {hint}")
        return tracer.apply(op, args)

    def __getattr__(self, name: str) -> Callable[..., Symbol]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in TRACED or not hasattr(Tensor, name):
            if name in TRACED:
                self.tracer.fail(
                    f".{name} is not a method of tensors; write torch.nn.functional.{name}(v)"
                )
            hint = PRODUCT if name in PRODUCTS else allowed()
            self.tracer.fail(f".{name} is not an operation of a cell; {hint}")
        return lambda *args: self.tracer.apply(name, (self, *args))

    def __bool__(self) -> bool:
        self.tracer.fail(
            "a Python condition depends on a value; write torch.where(condition, a, b)"
        )

    def __float__(self) -> float:
        self.tracer.fail("a value was converted to a number; a definition works on symbols")

    __int__ = __index__ = __float__

    def __getitem__(self, index: Any) -> NoReturn:
        self.tracer.fail(
            "a single value was indexed; x and r are tuples with one entry per gate, states are not"
        )

    def __iter__(self) -> NoReturn:
        self.tracer.fail(
            "a single value was unpacked; x and r are tuples with one entry per gate, states are "
            "not"
        )

    def __neg__(self) -> Symbol:
        return self.tracer.apply("neg", (self,))

    def __abs__(self) -> Symbol:
        return self.tracer.apply("abs", (self,))

    __hash__ = object.__hash__


def _binary(op: str, swapped: bool) -> Callable[[Symbol, Any], Symbol]:
    def method(self: Symbol, other: Any) -> Symbol:
        return self.tracer.apply(op, (other, self) if swapped else (self, other))

    return method


for _name, _op in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("truediv", "div")):
    setattr(Symbol, f"__{_name}__", _binary(_op, swapped=False))
    setattr(Symbol, f"__r{_name}__", _binary(_op, swapped=True))
for _op in COMPARISONS:
    setattr(Symbol, f"__{_op}__", _binary(_op, swapped=False))
for _function in (
    operator.pow,
    operator.floordiv,
    operator.mod,
    operator.matmul,
    operator.and_,
    operator.or_,
):
    _name = _function.__name__.strip("_")

    def _refuse(self: Symbol, other: Any, name: str = _name) -> NoReturn:
        hint = PRODUCT if name in PRODUCTS else allowed()
        self.tracer.fail(f"{name} is not an operation of a cell; {hint}")

    setattr(Symbol, f"__{_name}__", _refuse)
    setattr(Symbol, f"__r{_name}__", _refuse)


for _name in ("add", "sub", "mul", "truediv"):

    def _in_place(self: Symbol, other: Any) -> NoReturn:
        self.tracer.fail("a value was changed in place; write a = a + b for a += b")

    setattr(Symbol, f"__i{_name}__", _in_place)


def _symbols(value: Any) -> Iterator[Symbol]:
    """Yield the symbols in nested arguments."""
    if isinstance(value, Symbol):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _symbols(one)


DEFAULTS: dict[str, dict[str, Any]] = {
    "relu": {"inplace": False},
    "softplus": {"beta": 1, "threshold": 20},
}
PRODUCTS = ("linear", "matmul", "mm", "bmm", "einsum", "addmm")
PRODUCT = (
    "the products with W_x and W_h are computed before the step, and x and r hold them; write "
    "zo.product(W, v) for another one, where W is a parameter"
)


def _without_defaults(
    op: str | None, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Return the positional arguments without those that repeat torch's defaults; remove them
    from `kwargs` too.
    """
    defaults = DEFAULTS.get(op or "", {})
    for name, value in defaults.items():
        if not isinstance(kwargs.get(name, value), Symbol) and kwargs.get(name, value) == value:
            kwargs.pop(name, None)
    count = 1 if defaults else len(args)
    given, rest = tuple(args[:count]), tuple(args[count:])
    return given if rest == tuple(defaults.values())[: len(rest)] else tuple(args)


def line_of(code: CodeType, number: int) -> str:
    """Return a line of a function for a message."""
    line = linecache.getline(code.co_filename, number).strip()
    return f" (line {number}: {line})" if line else f" (line {number})"


def allowed() -> str:
    names = [
        name for name in TRACED if name not in ("add", "sub", "mul", "div", "neg", *COMPARISONS)
    ]
    return f"expected + − × ÷, comparisons, {', '.join(names)}"


# --- marks ----------------------------------------------------------------------------------------


def _mark(op: str, value: Any, name: Any = None) -> Any:
    inside = next(_symbols((name, value)), None)
    if inside is None:
        return value
    tracer = inside.tracer
    if op == "candidate" and (not isinstance(name, str) or name not in tracer.states):
        got = "a value" if isinstance(name, Symbol) else repr(name)
        tracer.fail(
            "zo.candidate: expected the name of a state first, "
            f"{' or '.join(map(repr, tracer.states))}, got {got}"
        )
    if not isinstance(value, Symbol):
        tracer.fail(
            f"zo.{op}: expected one value, got {type(value).__name__}; mark one value at a time"
        )
    if tracer.graph.nodes[value.node].op in COMPARISONS:
        tracer.fail(f"{op} was given a comparison")
    return Symbol(tracer, tracer.graph.add(op, tracer.node(op, value), value=name))


def product(
    matrix: Any, value: Any, /, *, parts: int | None = None, rank: int | None = None
) -> Any:
    """Return W · v inside a step, where W is a parameter of the cell and v one value per unit.

    A parameter that is used so is a matrix. By default it is [H, H].

    Args:
        matrix: the parameter.
        value: a value, or a product with `rank`.
        parts: W is [parts · H, …], and the result a tuple with `parts` values: one product for
            several gates.
        rank: W is [rank, …]. The result has `rank` numbers, and only another product takes it:
            `product(A, product(B, v, rank=40))` has a matrix A · B of rank 40.

    Returns:
        A value; with `parts`, a tuple of values.

    >>> import zoneout as zo
    >>> @zo.cell(gates=1, recurrence="none")
    ... def low_rank(x, h, a, b):
    ...     return (x[0] + zo.product(a, zo.product(b, h, rank=4))).tanh()
    >>> layer = zo.Recurrent(low_rank, 10, 20)
    >>> layer.a_l0.shape, layer.b_l0.shape
    (torch.Size([20, 4]), torch.Size([4, 20]))
    """
    size = rank if parts is None else parts
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise DefinitionError(f"zo.product: parts, rank: expected a number from 1, got {size!r}")
    if parts is not None and parts > MOST_PARTS:
        raise DefinitionError(
            f"zo.product: parts: expected at most {MOST_PARTS}, got {parts}; try several matrices"
        )
    if parts is not None and rank is not None:
        raise DefinitionError("zo.product: expected parts or rank, got both")
    inside = next(_symbols((matrix, value)), None)
    if inside is None:
        found = F.linear(value, matrix)
        return found if parts is None else tuple(found.chunk(parts, -1))
    tracer, graph = inside.tracer, inside.tracer.graph
    if not isinstance(matrix, Symbol) or graph.nodes[matrix.node].op != "parameter":
        tracer.fail(
            "zo.product: expected a parameter of the cell first, "
            f"got {_described(graph, matrix)}; make it an argument of the function after the states"
        )
    if not isinstance(value, Symbol) or graph.nodes[value.node].op in COMPARISONS:
        tracer.fail(
            f"zo.product: expected one value second, got {_described(graph, value)}; "
            "x and r are tuples with one value per gate"
        )
    rows = str(rank) if rank is not None else "H" if parts is None else f"{parts}H"
    made = graph.add("product", matrix.node, tracer.node("product", value), value=rows)
    if rank is not None:
        return Symbol(tracer, made)
    each = [Symbol(tracer, graph.add("part", made, value=str(k))) for k in range(parts or 1)]
    return each[0] if parts is None else tuple(each)


def _described(graph: Graph, value: Any) -> str:
    """Return what an argument is, for a message."""
    if isinstance(value, Symbol):
        op, _, name = graph.nodes[value.node]
        return f"the {op} {name}" if op in ("state", "parameter") else f"the result of {op}"
    return f"a {type(value).__name__}"


def candidate(state: str, value: Any) -> Any:
    """Mark the new value of a state, before noise. `StateDropout` sets it to zero here.

    Zoneout is applied after the step. A state that is used to compute another state must be marked.

    Args:
        state: the name of the state.
        value: its new value.

    Returns:
        The value to compute with, after `StateDropout`. On tensors, `value` itself.

    >>> import zoneout as zo
    >>> @zo.cell(gates=3, states=("h", "c"))
    ... def coupled(x, r, h, c):
    ...     f, g, o = (a + b for a, b in zip(x, r))
    ...     c = zo.candidate("c", f.sigmoid() * c + (1 - f.sigmoid()) * g.tanh())
    ...     return o.sigmoid() * c.tanh(), c  # h is computed from c without zoneout
    >>> layer = zo.Recurrent(coupled, 10, 20, noise=zo.Zoneout(cell=0.25, hidden=0.05))
    """
    return _mark("candidate", value, state)


def update(value: Any) -> Any:
    """Mark what `RecurrentDropout` drops. All marks of a step share one mask.

    Args:
        value: the term that adds new content to a state, such as i ⊙ g of an LSTM.

    Returns:
        The value to compute with. On tensors, `value` itself.

    >>> import zoneout as zo
    >>> @zo.cell(gates=1, recurrence="none")
    ... def leaky(x, h):
    ...     return 0.9 * h + zo.update(0.1 * x[0].tanh())
    >>> layer = zo.Recurrent(leaky, 10, 20, noise=zo.RecurrentDropout(rate=0.25))
    """
    return _mark("update", value)


def shown(value: Any) -> Any:
    """Mark where a norm normalises a state that feeds the output; at most once in a cell.

    The state itself stays as it is. In an LSTM this is the c of o ⊙ tanh(c).

    Args:
        value: the state, or the candidate of it.

    Returns:
        The value to compute with, normalised if the layer has a norm. On tensors, `value` itself.

    >>> import zoneout as zo
    >>> @zo.cell(gates=3, states=("h", "c"))
    ... def coupled(x, r, h, c):
    ...     f, g, o = (a + b for a, b in zip(x, r))
    ...     c = zo.candidate("c", f.sigmoid() * c + (1 - f.sigmoid()) * g.tanh())
    ...     return o.sigmoid() * zo.shown(c).tanh(), c
    >>> layer = zo.Recurrent(coupled, 10, 20, norm="layer")
    """
    return _mark("shown", value)


def held(value: Any) -> Any:
    """Mark the gate that `RecurrentDropout(hold_output_gate=True)` holds; at most once in a cell.

    A unit whose update is dropped keeps this gate of the previous step.

    Args:
        value: the gate, such as the output gate of an LSTM.

    Returns:
        The value to compute with. On tensors, `value` itself.

    >>> import zoneout as zo
    >>> @zo.cell(gates=3, states=("h", "c"))
    ... def coupled(x, r, h, c):
    ...     f, g, o = (a + b for a, b in zip(x, r))
    ...     c = zo.candidate("c", f.sigmoid() * c + zo.update((1 - f.sigmoid()) * g.tanh()))
    ...     return zo.held(o.sigmoid()) * c.tanh(), c
    >>> noise = zo.RecurrentDropout(rate=0.25, hold_output_gate=True)
    >>> layer = zo.Recurrent(coupled, 10, 20, noise=noise)
    """
    return _mark("held", value)
