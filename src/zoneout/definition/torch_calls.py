"""A graph as one Python function of torch calls.

`compile_step` is for the reference backend, which runs it at every step; computing node by node
would take it 1.3 to 1.6 times as long. `compile_calls` is for the loop without a C compiler
(`ops/fallback.py`): it writes to given tensors and makes as few calls as it can.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .graph import Graph, Value, parts_of
from .operations import COMPARISONS, LEAVES, MARKS, OPERATIONS

Marks = Mapping[str, Callable[[Tensor, Value], Tensor]]
Step = Callable[[Mapping[tuple[str, Value], Tensor], Marks], list[Tensor]]

TEXTS = {  # with tensors, or a tensor and a number in either place
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}",
}  # fmt: skip
METHODS = ("sigmoid", "tanh", "relu", "exp", "log", "sqrt", "abs")  # of one tensor


def _same(value: Tensor, name: Value) -> Tensor:
    return value


def evaluate(
    graph: Graph, outputs: Sequence[int], leaves: Mapping[tuple[str, Value], Tensor]
) -> list[Tensor]:
    """Compute nodes once, with marks as the identity."""
    return compile_step(graph, outputs)(leaves, {})


def compile_step(graph: Graph, outputs: Sequence[int]) -> Step:
    """Return a function (leaves, marks) -> values of the outputs.

    `leaves` has a tensor for every leaf but the numbers, by kind and name. `marks` says what a mark
    does with its value; a mark that is not named is the identity.
    """
    lines = [f"{mark} = marks.get({mark!r}, same)" for mark in MARKS]
    texts: dict[int, str] = {}
    for node in graph.reached(outputs):
        op, args, value = graph.nodes[node]
        names = [texts[arg] for arg in args]
        if op == "number":
            texts[node] = (
                f"float({str(value)!r})" if str(value) in ("inf", "-inf", "nan") else repr(value)
            )
            continue
        numbers = [graph.nodes[arg].op == "number" for arg in args]
        if op in LEAVES:
            text = f"leaves[{op!r}, {value!r}]"
        elif op == "product":
            text = f"linear({names[1]}, {names[0]})"
        elif op == "part":
            parts = parts_of(graph, args[0])
            text = names[0] if parts == 1 else f"{names[0]}.chunk({parts}, -1)[{value}]"
        elif op in MARKS and not any(numbers):
            text = f"{op}({names[0]}, {value!r})"
        elif op in METHODS and not any(numbers):
            text = f"{names[0]}.{op}()"
        elif op in TEXTS and not all(numbers):
            text = TEXTS[op].format(*names)
        elif op in MARKS:
            text = f"{op}(filled({names[0]}, leaves), {value!r})"
        else:
            text = f"apply({op!r}, [{', '.join(names)}], like(leaves))"
        texts[node] = f"v{node}"
        lines.append(f"v{node} = {text}")
    results = [
        f"filled({texts[n]}, leaves)" if graph.nodes[n].op == "number" else texts[n]
        for n in outputs
    ]
    body = "\n    ".join([*lines, f"return [{', '.join(results)}]"])
    scope: dict[str, Any] = {"apply": apply, "same": _same, "like": _like, "filled": _filled}
    scope["linear"] = F.linear
    # The body has only operations from the table, and numbers.
    exec(f"def step(leaves, marks):\n    {body}\n", scope)
    made: Step = scope["step"]
    return made


def apply(op: str, args: list[Tensor | float], like: Tensor) -> Tensor:
    """Apply an operation. torch takes a number in any place of some operations, in no place of
    others.
    """
    first = args[0] if isinstance(args[0], Tensor) else like.new_full((), args[0])
    rest = [
        a if isinstance(a, Tensor) or op in _TAKE_NUMBERS else like.new_full((), a)
        for a in args[1:]
    ]
    return OPERATIONS[op].torch(first, *rest)


# where(…, number, …) would have float32's precision.
_TAKE_NUMBERS = ("add", "sub", "mul", "div", *COMPARISONS)


def _like(leaves: Mapping[Any, Tensor]) -> Tensor:
    return next(iter(leaves.values()))


def _filled(number: float, leaves: Mapping[Any, Tensor]) -> Tensor:
    like = _like(leaves)
    return like.new_full((), number).expand_as(like)


# --- parts of a graph, with results in given tensors ----------------------------------------------


class Calls(NamedTuple):
    """Some nodes of a graph as one function, which takes tensors by position."""

    function: Callable[..., list[Tensor]]
    names: tuple[str, ...]  # of its arguments
    text: str


class _Form(NamedTuple):
    """How a node is computed: by one call."""

    call: str  # {0}, {1}, … are the arguments; {out} is ", out=…" or nothing
    args: tuple[int, ...]
    own: str = ""  # the same in place of the first argument
    swaps: bool = False  # the first two arguments may be exchanged
    literal: int = -1  # which argument may be a plain number


_IN_ROWS = ("tanh", "exp", "log")  # half as fast or worse on columns of something wider
_UNARY = ("neg", "sigmoid", "tanh", "exp", "log", "sqrt", "abs", "sign")
_BINARY = {
    "add": True,
    "sub": False,
    "mul": True,
    "div": False,
}  # whether the arguments may be exchanged


def compile_calls(
    graph: Graph,
    loads: Mapping[int, str],
    stores: Sequence[tuple[str, int]],
    returns: Sequence[int] = (),
    *,
    dtype: torch.dtype,
    small: Collection[str] = (),
    gaps: Collection[str] = (),
) -> Calls:
    """Return a function that computes nodes from those in `loads`, whose values are its arguments.

    Args:
        graph: the graph.
        loads: the argument that has the value of a node.
        stores: pairs of an argument and the node that is written to it. An argument may be both
            loaded and stored to, and one node may be stored to several.
        returns: the nodes whose values are returned.
        dtype: of all numbers.
        small: the arguments with one number per unit, or only one. All others have one per row
            and unit.
        gaps: the arguments that are columns of something wider.

    A node `call` is the result of the function that is given as the argument with the node's name.
    It has to return a tensor of its own.
    """
    return _Printer(graph, loads, stores, returns, dtype, small, gaps).print()


def small_nodes(
    graph: Graph,
    order: Sequence[int],
    loads: Mapping[int, str],
    small: Collection[str],
) -> set[int]:
    """Return the nodes whose values have no rows; `order` has arguments before results."""
    found: set[int] = set()
    for node in order:
        op, args, _ = graph.nodes[node]
        without_rows = op == "number" or (len(args) > 0 and found.issuperset(args))
        if loads[node] in small if node in loads else without_rows:
            found.add(node)
    return found


class _Printer:
    """The text of a function, line by line. Memory of values that are needed no more is reused."""

    def __init__(
        self,
        graph: Graph,
        loads: Mapping[int, str],
        stores: Sequence[tuple[str, int]],
        returns: Sequence[int],
        dtype: torch.dtype,
        small: Collection[str],
        gaps: Collection[str],
    ) -> None:
        self.graph, self.loads, self.stores, self.returns = graph, loads, stores, returns
        self.dtype, self.gaps = dtype, gaps
        ends = [*(node for _, node in stores), *returns]
        self.order = graph.reached(ends, stop=loads)
        self.users = self._users(ends)
        self.forms = self._forms(ends)
        self.small = small_nodes(graph, self.order, loads, small)
        self.left = dict.fromkeys(self.order, 0)  # number of later calls that read a node
        for form in self.forms.values():
            for arg in form.args:
                self.left[arg] += 1
        for node in (*returns, *(node for _, node in stores if node not in self.forms)):
            self.left[node] += 1
        self.texts = dict(loads)
        self.lines: list[str] = []
        self.late: list[str] = []
        self.made: set[str] = set()  # variables with memory of their own
        self.spare: list[str] = []  # those of them that are free
        self.scope: dict[str, Any] = {"torch": torch, **_FUNCTIONS}

    def _users(self, ends: Sequence[int]) -> dict[int, int]:
        users = dict.fromkeys(self.order, 0)
        for node in self.order:
            for arg in () if node in self.loads else self.graph.nodes[node].args:
                users[arg] += 1
        for node in ends:
            users[node] += 1
        return users

    # --- which calls -----------------------------------------------------------------------------

    def _forms(self, ends: Sequence[int]) -> dict[int, _Form]:
        """Return the call for each node that needs one; some compute several nodes at once."""
        wanted, forms = set(ends), {}
        for node in reversed(self.order):
            if node in wanted and node not in self.loads and self._number(node) is None:
                forms[node] = self._form(node)
                wanted.update(forms[node].args)
        return {node: forms[node] for node in self.order if node in forms}

    def _form(self, node: int) -> _Form:
        op, args, value = self.graph.nodes[node]
        fused = {"add": self._sum, "sub": self._difference, "mul": self._slope}.get(op)
        if fused is not None and (form := fused(*args)) is not None:
            return form
        places = ", ".join(f"{{{k}}}" for k in range(len(args)))
        if op in _BINARY:
            swaps = _BINARY[op]
            if swaps and self._number(args[0]) is not None:
                args = args[::-1]
            own = f"{{0}}.{op}_({{1}})"
            return _Form(f"torch.{op}({places}{{out}})", args, own, swaps, literal=1)
        if op in _UNARY:
            return _Form(f"torch.{op}({places}{{out}})", args, f"{{0}}.{op}_()")
        if op in ("minimum", "maximum", "where", "lerp"):
            return _Form(f"torch.{op}({places}{{out}})", args)
        if op == "relu":
            return _Form("torch.relu({0})", args, "{0}.relu_()")
        if op in COMPARISONS:
            return _Form(f"torch.{op}({places})", args, literal=1)
        if not args:
            raise ValueError(f"calls: expected a tensor for {op} {value}, got none")
        return _Form(f"{value}({places})" if op == "call" else f"{op}({places})", args)

    def _sum(self, a: int, b: int) -> _Form | None:
        orders = ((a, b), (b, a))
        blends = (self._blend(*order) for order in orders)
        products = (self._plus_product(*order) for order in orders)
        return next((form for form in (*blends, *products) if form is not None), None)

    def _blend(self, one: int, other: int) -> _Form | None:
        """Return z · a + (1 − z) · b as one call."""
        if not (self._is_inner(one, "mul") and self._is_inner(other, "mul")):
            return None
        for rest, b in self._orders(other):
            z = self._one_less(rest)
            for same, a in self._orders(one):
                if same == z and self._number(a) is None and self._number(b) is None:
                    call = "torch.lerp({0}, {1}, {2}{out})"
                    return _Form(call, (b, a, same), "{0}.lerp_({1}, {2})")
        return None

    def _plus_product(self, one: int, other: int, sign: int = 1) -> _Form | None:
        """Return one ± a · b as one call."""
        if not self._is_inner(other, "mul") or self._number(one) is not None:
            return None
        a, b = self.graph.nodes[other].args
        if self._number(a) is not None:
            a, b = b, a
        if self._number(a) is not None:
            return None
        if (number := self._number(b)) is not None:
            by = f"alpha={sign * number!r}"
            call = f"torch.add({{0}}, {{1}}, {by}{{out}})"
            return _Form(call, (one, a), f"{{0}}.add_({{1}}, {by})")
        by = "" if sign == 1 else ", value=-1"
        call = f"torch.addcmul({{0}}, {{1}}, {{2}}{by}{{out}})"
        return _Form(call, (one, a, b), f"{{0}}.addcmul_({{1}}, {{2}}{by})")

    def _difference(self, one: int, other: int) -> _Form | None:
        return self._plus_product(one, other, -1)

    def _slope(self, a: int, b: int) -> _Form | None:
        """Return d · y · (1 − y) or d · (1 − y · y), through sigmoid or tanh, as one call."""
        for d, slope in ((a, b), (b, a)):
            if self._number(d) is not None:
                continue
            if self._is_inner(slope, "mul"):
                for y, rest in self._orders(slope):
                    if self._one_less(rest) == y:
                        return _Form("sigmoid_back({0}, {1}{out})", (d, y))
            square = self._one_less(slope) if self._is_inner(slope, "sub") else None
            if square is not None and self._is_inner(square, "mul"):
                y, same = self.graph.nodes[square].args
                if y == same:
                    return _Form("tanh_back({0}, {1}{out})", (d, y))
        return None

    def _is_inner(self, node: int, op: str) -> bool:
        """Return True if a node has this operation, and one user, whose call may include it."""
        return self.graph.nodes[node].op == op and node not in self.loads and self.users[node] == 1

    def _orders(self, node: int) -> Iterator[tuple[int, int]]:
        a, b = self.graph.nodes[node].args
        return iter(((a, b), (b, a)))

    def _one_less(self, node: int) -> int | None:
        """Return z of a node 1 − z that is computed here."""
        op, args, _ = self.graph.nodes[node]
        is_rest = op == "sub" and node not in self.loads and self._number(args[0]) == 1
        return args[1] if is_rest else None

    def _number(self, node: int) -> float | None:
        op, _, value = self.graph.nodes[node]
        return float(str(value)) if op == "number" else None

    # --- the text --------------------------------------------------------------------------------

    def print(self) -> Calls:
        places: dict[int, list[str]] = {}
        for place, node in self.stores:
            places.setdefault(node, []).append(place)
        for node, wanted in places.items():
            if node not in self.forms:
                self._copy_load(node, wanted)
        for node, form in self.forms.items():
            self._compute(node, form, places.get(node, []))
        results = ", ".join(self.texts.get(n) or self._constant(n) for n in self.returns)
        nodes = [self.graph.nodes[n] for n in self.forms]
        functions = [str(node.value) for node in nodes if node.op == "call"]
        read = [self.loads[n] for n in self.order if n in self.loads]
        names = tuple(dict.fromkeys([*read, *(place for place, _ in self.stores), *functions]))
        body = "\n    ".join([*self.lines, *self.late, f"return [{results}]"])
        text = f"def calls({', '.join(names)}):\n    {body}\n"
        exec(text, self.scope)  # of operations from the table, and numbers
        return Calls(self.scope["calls"], names, text)

    def _copy_load(self, node: int, places: Sequence[str]) -> None:
        """Store what is there already: a number, or the value of an argument."""
        value = self.texts.get(node)
        if value is None:
            self.late += [f"{place}.fill_({self._number(node)!r})" for place in places]
            return
        for place in places:
            if place == value:
                continue  # it stays there
            self.left[node] -= 1
            if self._is_free(place):
                self.lines.append(f"{place}.copy_({value})")
            else:  # its own place may be taken until then
                self.lines.append(f"copy{len(self.lines)} = {value}.clone()")
                self.late.append(f"{place}.copy_(copy{len(self.lines) - 1})")

    def _compute(self, node: int, form: _Form, places: Sequence[str]) -> None:
        for arg in form.args:
            self.left[arg] -= 1
        freed = [self.texts[arg] for arg in dict.fromkeys(form.args) if self._is_dead(arg)]
        in_rows = self.graph.nodes[node].op in _IN_ROWS
        good = [p for p in places if self._is_free(p) and not (in_rows and p in self.gaps)]
        target = good[0] if good else next(iter([*freed, *self.spare]), None)
        if node in self.small or not ("{out}" in form.call or form.own):
            target = None
        self.texts[node] = self._call(node, form, target)
        free = dict.fromkeys([*freed, *self.spare])
        self.spare = [name for name in free if name != self.texts[node]]
        for place in places:
            if place == self.texts[node]:
                continue
            copy = f"{place}.copy_({self.texts[node]})"
            if self._is_free(place):
                self.lines.append(copy)
            else:
                self.late.append(copy)
                self.left[node] += 1
        if self._is_dead(node):
            self.spare.append(self.texts[node])

    def _call(self, node: int, form: _Form, target: str | None) -> str:
        """Print the call and return the variable with its result: `target`, or a new one."""
        args = [self._argument(form, k) for k in range(len(form.args))]
        if form.swaps and len(args) == 2 and args[1] == target:
            args = args[::-1]
        op = self.graph.nodes[node].op
        if op in _IN_ROWS and args[0] in self.gaps:
            args[0] = f"{args[0]}.contiguous()"
        if form.own and args[0] == target:
            self.lines.append(form.own.format(*args))
            return target
        if target is not None and "{out}" in form.call:
            self.lines.append(form.call.format(*args, out=f", out={target}"))
            return target
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {form.call.format(*args, out='')}")
        if node not in self.small and op not in COMPARISONS:
            self.made.add(name)
        return name

    def _argument(self, form: _Form, k: int) -> str:
        node = form.args[k]
        if (number := self._number(node)) is not None:
            return repr(number) if k == form.literal else self._constant(node)
        return self.texts[node]

    def _constant(self, node: int) -> str:
        """Return the name of a tensor with the number of a node."""
        self.scope[f"k{node}"] = torch.tensor(self._number(node), dtype=self.dtype, device="cpu")
        return f"k{node}"

    def _is_dead(self, node: int) -> bool:
        """Return True if the memory of a value is free."""
        return self.texts.get(node) in self.made and self.left[node] == 0

    def _is_free(self, place: str) -> bool:
        """Return True if what an argument had before is needed no more."""
        loads = (n for n, name in self.loads.items() if name == place)
        return all(self.left.get(n, 0) == 0 for n in loads)


def _sigmoid_back(d: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    if out is None:
        return torch.ops.aten.sigmoid_backward(d, y)
    return torch.ops.aten.sigmoid_backward.grad_input(d, y, grad_input=out)


def _tanh_back(d: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    if out is None:
        return torch.ops.aten.tanh_backward(d, y)
    return torch.ops.aten.tanh_backward.grad_input(d, y, grad_input=out)


_FUNCTIONS: dict[str, Any] = {op: OPERATIONS[op].torch for op in ("softplus", "mix", "less")}
_FUNCTIONS |= {"sigmoid_back": _sigmoid_back, "tanh_back": _tanh_back}
