"""Recording a pass: the calls that it makes, printed as a Python function without branches.

The calls are torch operators, steps of our own (`step`), and C functions and kernels that get
structs of addresses (`call`, `launch`). A tensor of a recording is an input, the result of a
recorded call, a constant, or a strided view of one of these. An address in a struct is the address
of one of them plus a fixed distance. Anything else ends the recording, and the reason is kept. So
a plan is either complete or absent.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

P = ParamSpec("P")
T = TypeVar("T")


class Plan(NamedTuple):
    """A recorded pass."""

    # Called with the tensors, their addresses and the first step; None: the general code runs.
    run: Callable[[Sequence[Tensor | None], Sequence[int], int], Any] | None
    text: str  # the source of `run`, or the reason why there is none


class _Thread(threading.local):
    recorder: Recorder | None = None  # of the pass that this thread is recording


_thread = _Thread()


def is_recording() -> bool:
    """Return True if this thread is recording a pass."""
    return _thread.recorder is not None


# --- what the general code says of itself ---------------------------------------------------------


def step(function: Callable[P, T]) -> Callable[P, T]:
    """Let a plan repeat this function as one call, instead of what it does inside.

    The memory that it returns is new, unless it belongs to an argument.
    """

    @wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> T:
        if (recorder := _thread.recorder) is None:
            return function(*args, **kwargs)
        return recorder.step(function, args, kwargs)

    return recorded


_constants: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by storage


def constant(most: int) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Keep the results of a function, which are constant tensors that a plan may hold."""

    def decorate(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
        @lru_cache(most)
        @wraps(function)
        def kept(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            found = function(*args, **kwargs)
            _constants[_storage(found)] = found
            return found

        return kept  # type: ignore[return-value]

    return decorate


def call(function: Any, struct: ctypes.Structure, fixed: Sequence[str] = ()) -> None:
    """Call a function with the address of a struct: one in C, or one that calls C.

    Every pointer of the struct is an address that `memory.address` returned, but for the fields
    `fixed`, which always have the same value. A struct's class may name fields in `moving`: numbers
    that follow the first step of a pass.
    """
    if (recorder := _thread.recorder) is None:
        function(ctypes.addressof(struct))
    else:
        recorder.call(function, struct, fixed)
        with recorder.paused():
            function(ctypes.addressof(struct))


def launch(
    start: Callable[..., None],
    how: Sequence[int],
    values: Sequence[Any],
    pointers: int,
    stream: Any = None,
) -> None:
    """Call `start(*how, pointers, stream)`: a kernel with the addresses of its arguments `values`.

    `stream` is None or one that a context of `within` returned in a list.
    """
    if (recorder := _thread.recorder) is not None:
        recorder.launch(start, how, values, stream)
    start(*how, pointers, stream)


@contextmanager
def within(enter: Callable[[], AbstractContextManager[T]]) -> Iterator[T]:
    """Run a block inside the context that `enter` returns; a plan does the same."""
    with enter() as value:
        if (recorder := _thread.recorder) is None:
            yield value
        else:
            with recorder.block(enter, value):
                yield value


def refuse_many(steps: int) -> None:
    """Say that a pass with calls for each of its steps cannot become a plan, but for one step.

    A plan would only be longer: such a pass prepares its calls once for all steps.
    """
    if steps > 1:
        refuse("calls for each of many steps")


def note(at: int, v: Tensor) -> None:
    """Remember that this address leads to a tensor."""
    if (recorder := _thread.recorder) is not None:
        recorder.addresses[at] = v


def refuse(reason: str) -> None:
    """Say that the running pass cannot become a plan."""
    if (recorder := _thread.recorder) is not None:
        recorder.refuse(reason)


# --- recording ------------------------------------------------------------------------------------


class _Refused(Exception):
    """The reason why a pass cannot become a plan."""


class _Root(NamedTuple):
    """A tensor with memory of its own: an input, a constant, or the result of a call."""

    name: str
    tensor: Tensor  # kept alive, so that no other tensor of the recording has its memory


class _Line(NamedTuple):
    """One call of a plan."""

    text: str
    reads: frozenset[str]
    makes: tuple[str, ...]
    needed: bool  # it does more than make its results
    depth: int = 1


class Recorder(TorchDispatchMode):
    """Records the calls of one pass, while they run as always."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler, 150 MiB, to keep it out of this class."""
        return False  # a recording never runs in a compiled model

    def __init__(self, tensors: Sequence[Tensor | None], first_step: int) -> None:
        super().__init__()
        self.first_step = first_step
        self.reason = ""
        self.addresses: dict[int, Tensor] = {}
        self._streams: dict[int, str] = {}  # the text of each side stream, by its id
        self._depth = 1
        self.lines: list[_Line] = []
        self.names: dict[str, Any] = {
            "Tensor": Tensor, "array": array, "as_strided": torch.as_strided, "empty": torch.empty,
        }  # fmt: skip
        self._known: dict[Any, str] = {}  # the name of an object of `names`
        self._roots: dict[int, list[_Root]] = {}  # by storage; the latest last
        self._views: dict[Any, str] = {}
        self._reads: set[str] = set()  # of the line that is being written
        self._inputs: list[str] = []
        for k, v in enumerate(tensors):
            self._inputs.append(f"i{k}")
            if v is not None:
                self._add(f"i{k}", v)

    def __enter__(self) -> Recorder:
        self._outer, _thread.recorder = _thread.recorder, self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _thread.recorder = self._outer

    @contextmanager
    def paused(self) -> Iterator[None]:
        _thread.recorder = None
        try:
            with _disable_current_modes():
                yield
        finally:
            _thread.recorder = self

    def refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    # --- the three kinds of calls ---

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.reason:
            try:
                self._operator(func, args, kwargs, result)
            except _Refused as refused:
                self.refuse(str(refused))
        return result

    def _operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if _UNPLANNED & set(func.tags) and not _is_plain_index(func, args):
            raise _Refused(f"{func} depends on values")
        writes = func._schema.is_mutable
        made = [v for v in _tensors(result) if not self._find(v)]
        if not writes and not made:
            return  # a view of known memory: named where it is read
        if func in _EMPTY:
            (v,) = made
            if not v.is_contiguous():
                raise _Refused("empty memory with gaps")
            self._write(
                f"empty({tuple(v.shape)}, dtype={self._name(v.dtype)}, "
                f"device={self._name(v.device)})",
                [v],
                needed=False,
            )
            return
        self._call(func, args, kwargs, result, made, needed=writes)

    def step(self, function: Any, args: Any, kwargs: Any) -> Any:
        with self.paused():
            result = function(*args, **kwargs)
        if not self.reason:
            try:
                given = {_storage(v) for v in _tensors((args, kwargs))}
                made = [v for v in _tensors(result) if _storage(v) not in given]
                self._call(function, args, kwargs, result, made, needed=True)
            except _Refused as refused:
                self.refuse(str(refused))
        return result

    def call(self, function: Any, struct: ctypes.Structure, fixed: Sequence[str]) -> None:
        if not self.reason:
            try:
                text = self._filled([struct], fixed)
                self._line(f"{text}{self._name(function)}(a.buffer_info()[0])", [], needed=True)
            except _Refused as refused:
                self.refuse(str(refused))

    @contextmanager
    def block(self, enter: Any, value: Any) -> Iterator[None]:
        name = f"w{len(self.lines)}"
        self._line(f"with {self._name(enter)}() as {name}:", [], needed=True)
        if isinstance(value, list):
            self._streams |= {id(one): f"{name}[{k}]" for k, one in enumerate(value)}
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def launch(self, start: Any, how: Sequence[int], values: Sequence[Any], stream: Any) -> None:
        if not self.reason:
            try:
                text, places, at = self._filled(values), [], 0
                for value in values:
                    places.append(f"b + {at}")
                    at += _padded(ctypes.sizeof(value))
                text += f"b = a.buffer_info()[0]; p = array('Q', ({', '.join(places)},)); "
                given = "".join(f"{int(one)}, " for one in how)
                on = None if stream is None else self._streams[id(stream)]
                text += f"{self._name(start)}({given}p.buffer_info()[0], {on})"
                self._line(text, [], needed=True)
            except _Refused as refused:
                self.refuse(str(refused))

    def _filled(self, values: Sequence[Any], fixed: Sequence[str] = ()) -> str:
        """Return the text that puts a copy of C values into `a`, with this call's addresses."""
        image, lines = array("Q"), []
        for value in values:
            first, raw = len(image), bytes(value)
            image.frombytes(raw + bytes(_padded(len(raw)) - len(raw)))
            for name, at in _pointers(type(value)):
                if image[first + at // 8] and name not in fixed:
                    at = first + at // 8
                    lines.append(f"a[{at}] = {self._address(image[at])}; ")
            for name in getattr(type(value), "moving", ()):
                at = first + getattr(type(value), name).offset // 8
                away = getattr(value, name) - self.first_step
                lines.append(f"a[{at}] = first_step + {away}; ")
        return f"a = {self._name(image)}[:]; {''.join(lines)}"

    def _address(self, at: int) -> str:
        v = self.addresses.get(at)
        if v is None:
            inside = (v for begin, v in self.addresses.items() if begin < at < begin + _span(v))
            if (v := next(inside, None)) is None:
                raise _Refused("an address of unknown memory")
        root = self._root(v)
        self._reads.add(root.name)
        away = at - root.tensor.data_ptr()
        if root.name[0] == "c":
            return str(at)  # a constant stays where it is
        begins = f"at[{root.name[1:]}]" if root.name[0] == "i" else f"{root.name}.data_ptr()"
        return f"{begins} + {away}" if away else begins

    # --- names ---

    def _add(self, name: str, v: Tensor) -> None:
        self._roots.setdefault(_storage(v), []).append(_Root(name, v))

    def _find(self, v: Tensor) -> _Root | None:
        """Return the latest root whose memory contains that of `v`."""
        if type(v) is not Tensor and type(v) is not torch.nn.Parameter:
            raise _Refused(f"a {type(v).__name__}")
        begin, end = _extent(v)
        for root in reversed(self._roots.get(_storage(v), ())):
            first, last = _extent(root.tensor)
            if first <= begin and end <= last:
                return root
        if (found := _constants.get(_storage(v))) is not None:
            self._add(self._name(found, "c"), found)
            return self._roots[_storage(v)][-1]
        return None

    def _root(self, v: Tensor) -> _Root:
        if (root := self._find(v)) is None:
            raise _Refused(f"unknown memory: {v.dtype} of shape {tuple(v.shape)}")
        return root

    def _name(self, value: Any, kind: str = "k") -> str:
        """Return the name under which a plan knows an object."""
        key = (type(value), id(value))
        if key not in self._known:
            self._known[key] = name = f"{kind}{len(self.names)}"
            self.names[name] = value
        return self._known[key]

    def _tensor(self, v: Tensor) -> str:
        """Return the name of a tensor, and write the line that makes it, if it is a view."""
        root = self._root(v)
        like = root.tensor
        if v.is_neg() or v.is_conj() or v.dtype != like.dtype:
            raise _Refused("a view of another type")
        same = v.shape == like.shape and v.stride() == like.stride()
        away = v.storage_offset() - like.storage_offset()
        if same and not away:
            self._reads.add(root.name)
            return root.name
        key = (root.name, v.shape, v.stride(), away)
        if key not in self._views:
            begins = f"{root.name}.storage_offset() + {away}"
            name = f"v{len(self._views)}_{root.name}"
            self.lines.append(
                _Line(
                    f"{name} = as_strided({root.name}, {tuple(v.shape)}, {v.stride()}, {begins})",
                    frozenset([root.name]),
                    (name,),
                    False,
                    self._depth,
                )
            )
            self._views[key] = name
        self._reads.add(self._views[key])
        return self._views[key]

    def _text(self, value: Any) -> str:
        """Return the text of an argument or result."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if value is None or type(value) in (int, bool, str):
            return repr(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self._name(type(value))}({', '.join(map(self._text, value))})"
        if type(value) in (tuple, torch.Size):
            return f"({''.join(self._text(v) + ', ' for v in value)})"
        if type(value) is list:
            return f"[{', '.join(map(self._text, value))}]"
        if type(value) is dict:
            return f"{{{', '.join(f'{key!r}: {self._text(v)}' for key, v in value.items())}}}"
        if type(value) in _PLAIN:
            return self._name(value)
        raise _Refused(f"a {type(value).__name__} between calls")

    # --- lines ---

    def _call(
        self, function: Any, args: Any, kwargs: Any, result: Any, made: list[Tensor], needed: bool
    ) -> None:
        given = [*map(self._text, args)]
        given += [f"{key}={self._text(value)}" for key, value in kwargs.items()]
        named = f"{self._name(function)}({', '.join(given)})"
        self._write(named, made, needed, result)

    def _write(self, text: str, made: list[Tensor], needed: bool, result: Any = None) -> None:
        """Write a line that makes tensors; `result` is what the call returns, if not just one."""
        names = [f"t{len(self.lines)}_{k}" for k in range(len(made))]
        whole = f"r{len(self.lines)}"
        if not names:
            return self._line(text, (), needed)
        if len(made) == 1 and (result is None or isinstance(result, Tensor)):
            self._line(f"{names[0]} = {text}", names, needed)
        else:
            places = dict(_places(result))
            parts = [
                f"{name} = {whole}{next(at for at, one in places.items() if one is v)}"
                for name, v in zip(names, made)
            ]
            self._line("; ".join([f"{whole} = {text}", *parts, f"del {whole}"]), names, needed)
        for name, v in zip(names, made):
            self._add(name, v)

    def _line(self, text: str, makes: Sequence[str], needed: bool) -> None:
        self.lines.append(_Line(text, frozenset(self._reads), tuple(makes), needed, self._depth))
        self._reads = set()

    # --- the plan ---

    def plan(self, result: Any) -> Plan:
        """Return the plan of the calls so far, which returns `result`."""
        if not self.reason:
            try:
                returned, reads = self._text(result), frozenset(self._reads)
            except _Refused as refused:
                self.refuse(str(refused))
        if self.reason:
            return Plan(None, self.reason)
        text = self._printed(returned, reads)
        exec(compile(text, "<zoneout plan>", "exec"), self.names)
        run = self.names["run"]
        return Plan(run, text)

    def _printed(self, returned: str, reads: frozenset[str]) -> str:
        """Return the source of the plan, without lines that nothing needs."""
        wanted, kept = set(reads), []
        for line in reversed(self.lines):
            if line.needed or wanted & {*line.makes}:
                gone = [name for name in {*line.reads, *line.makes} - wanted if name[0] in "tv"]
                ends = f"; del {', '.join(sorted(gone))}" if gone else ""
                kept.append(f"{'    ' * line.depth}{line.text}{ends}\n")
                wanted |= line.reads
        inputs = f"    {', '.join(self._inputs)}, = tensors\n"
        body = "".join(reversed(kept))
        return f"def run(tensors, at, first_step):\n{inputs}{body}    return {returned}\n"


_UNPLANNED = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
_aten = torch.ops.aten


def _is_plain_index(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True for an indexed read whose shape does not depend on values."""
    return func is _aten.index.Tensor and all(v.dtype == torch.int64 for v in _tensors(args[1]))


_EMPTY = {
    _aten.empty.memory_format,
    _aten.new_empty.default,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty_strided.default,
}
_PLAIN = {float, torch.dtype, torch.device, torch.layout, torch.memory_format}


def _storage(v: Tensor) -> int:
    return v.untyped_storage()._cdata


def _extent(v: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after its last."""
    size, begin = v.element_size(), int(v.storage_offset())
    if not v.numel():
        return begin * size, begin * size
    last = begin + sum((n - 1) * stride for n, stride in zip(v.shape, v.stride()))
    return begin * size, (last + 1) * size


def _span(v: Tensor) -> int:
    """Return the bytes from a tensor's first value to the end of its last."""
    begin, end = _extent(v)
    return end - begin


def _tensors(value: Any) -> list[Tensor]:
    return [v for _, v in _places(value)]


def _places(value: Any, at: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors in nested tuples, lists and dicts, and the text that leads to each."""
    if isinstance(value, Tensor):
        return [(at, value)]
    if isinstance(value, tuple | list):
        return [one for k, v in enumerate(value) for one in _places(v, f"{at}[{k}]")]
    if isinstance(value, dict):
        return [one for key, v in value.items() for one in _places(v, f"{at}[{key!r}]")]
    return []


def _padded(size: int) -> int:
    """Return the bytes that a C value takes in an image: a multiple of 16."""
    return -(-size // 16) * 16


def _pointers(struct: type[Any]) -> list[tuple[str, int]]:
    """Return the name and place of every pointer of a struct, nested ones included."""
    if struct not in _places_of:
        _places_of[struct] = _found_pointers(struct)
    return _places_of[struct]


_places_of: dict[type[Any], list[tuple[str, int]]] = {}


def _found_pointers(struct: Any, begin: int = 0, name: str = "") -> list[tuple[str, int]]:
    if struct is ctypes.c_void_p:
        return [(name, begin)]
    if issubclass(struct, ctypes.Array):
        size = ctypes.sizeof(struct._type_)
        each = [
            _found_pointers(struct._type_, begin + k * size, name) for k in range(struct._length_)
        ]
        return [one for found in each for one in found]
    if issubclass(struct, ctypes.Structure):
        fields: Sequence[Any] = struct._fields_
        each = [_found_pointers(of, begin + getattr(struct, own).offset, own) for own, of in fields]
        return [one for found in each for one in found]
    return []
