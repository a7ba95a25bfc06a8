"""Users' subclasses of torch.nn's recurrent modules, rebuilt as subclasses of zoneout's modules.

`rebased(cls)` returns the class that the user's class statement would create with `zo.LSTM` in
place of `nn.LSTM`. The user's methods are kept, and so are the base classes that are not torch's.
`obstacle(cls)` returns why this is not possible for a class.
"""

from __future__ import annotations

import dis
from abc import ABCMeta
from collections.abc import Iterator
from functools import update_wrapper
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from .layers import GRU, LSTM, RNN
from .step_cells import GRUCell, LSTMCell, RNNCell

TWINS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: RNN,
    nn.LSTMCell: LSTMCell,
    nn.GRUCell: GRUCell,
    nn.RNNCell: RNNCell,
}
BACK = {ours: theirs for theirs, ours in TWINS.items()}

# Attributes that Python writes into every class.
_BOOKKEEPING = {
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__",
    "__annotate__", "__annotate_func__", "__annotations_cache__", "__firstlineno__",
    "__static_attributes__", "__type_params__", "__orig_bases__", "__parameters__",
    "__abstractmethods__", "_abc_impl",
}  # fmt: skip
# Overrides that have no effect on a forward pass of a module that is already built.
_HARMLESS = {
    "__init__",
    "__repr__",
    "extra_repr",
    "reset_parameters",
    "flatten_parameters",
    "__constants__",
}


class Obstacle(NamedTuple):
    """Why a class cannot be rebuilt with zoneout's class as its base."""

    why: str
    # What the user can do. "base": change the base class in the class statement; "layer": replace
    # the module by a plain zoneout layer; "": nothing.
    remedy: str


def base_of(cls: type[Any]) -> type[nn.Module] | None:
    """Return the recurrent class of torch.nn or zoneout that `cls` is or extends, or None."""
    return next((one for one in cls.__mro__ if one in TWINS or one in BACK), None)


def users_class(cls: type[Any]) -> type[Any] | None:
    """Return the user's class from which `rebased` built `cls`, or None."""
    return cls.__dict__.get("_rebased_from")


def obstacle(cls: type[nn.Module]) -> Obstacle | None:
    """Return why `rebased(cls)` cannot be built or could compute another result, or None."""
    base = base_of(cls)
    if base not in TWINS:
        return Obstacle(
            f"{cls.__name__} is a layer of its own: it extends no LSTM, GRU or RNN of torch.nn", ""
        )
    assert base is not None
    ours = TWINS[base]
    if type(cls) not in (type, ABCMeta):
        return Obstacle("rebuilding its class would run code of its metaclass", "base")
    for one in cls.__mro__:
        if one in base.__mro__ or one.__module__ in ("builtins", "abc", "typing"):
            continue
        # If `one` comes after torch's class in the MRO, torch's methods hide those of `one`.
        before = cls.__mro__.index(one) < cls.__mro__.index(base)
        for name, value in vars(one).items():
            if name in _BOOKKEEPING:
                continue
            if hasattr(ours, name) and not hasattr(base, name):
                return Obstacle(
                    f"its {name!r} would replace an attribute of zoneout's layers; rename it and "
                    "convert again",
                    "",
                )
            if name == "forward" and before and not _calls_super(value):
                return Obstacle(
                    "its forward never calls super().forward, which applies the noise", "layer"
                )
            if name not in _HARMLESS | {"forward"} and hasattr(base, name) and before:
                return Obstacle(f"it overrides {name} of nn.{base.__name__}", "base")
            if name != "__init__" and issubclass(one, base) and (why := _belongs(one, name, value)):
                return Obstacle(why, "base")
    try:
        rebased(cls)
    except (TypeError, RecursionError) as error:  # RecursionError: closures that form a cycle
        return Obstacle(f"its class cannot be rebuilt ({error})", "base")
    return None


_rebased: dict[type[Any], type[Any]] = dict(TWINS)


def rebased(cls: type[Any]) -> type[Any]:
    """Return `cls` rebuilt with zoneout's class in place of torch's; the result is cached."""
    if cls in _rebased:
        return _rebased[cls]
    if not issubclass(cls, tuple(TWINS)):
        return cls
    names = {
        name: value
        for name, value in vars(cls).items()
        if name not in ("__dict__", "__weakref__", "_abc_impl")
    }
    meta: Any = type(cls)
    new = meta(cls.__name__, tuple(rebased(one) for one in cls.__bases__), names)
    for name, value in names.items():
        if (moved := _moved(value, cls, new)) is not value:
            setattr(new, name, moved)

    def reduce(self: Any, protocol: Any) -> Any:
        """Pickle the user's class, which has an importable name; loading rebuilds this class."""
        _, _, *rest = super(new, self).__reduce_ex__(max(protocol, 2))
        return _blank, (cls,), *rest

    new._rebased_from, new.__reduce_ex__ = cls, reduce
    _rebased[cls] = new
    return new


def _blank(cls: type[Any]) -> Any:
    """Return an empty instance of `rebased(cls)`, for pickle and copy."""
    return object.__new__(rebased(cls))


def statement(cls: type[nn.Module]) -> tuple[str, str]:
    """Return the class statement that names torch's class, and the same with zoneout's class."""
    base = base_of(cls)
    assert base is not None
    cls = next(one for one in cls.__mro__ if base in one.__bases__)

    def write(module: str) -> str:
        bases = (
            f"{module}.{base.__name__}" if one is base else one.__name__ for one in cls.__bases__
        )
        meta = (
            []
            if type(cls) is type or any(type(one) is type(cls) for one in cls.__bases__)
            else [type(cls).__name__]
        )
        return (
            f"class {cls.__name__}({', '.join([*bases, *(f'metaclass={one}' for one in meta)])}):"
        )

    return write("nn"), write("zo")


# --- attributes of a class ------------------------------------------------------------------------


def _codes(value: Any) -> Iterator[CodeType]:
    """Yield the code of a function, of its inner functions, and of functions in its closure.

    A decorated function is in the closure of its wrapper.
    """
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    todo: list[Any] = (
        [value.fget, value.fset, value.fdel] if isinstance(value, property) else [value]
    )
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType):
            todo += [
                one.__code__,
                *(cell.cell_contents for cell in one.__closure__ or () if _filled(cell)),
            ]
        elif isinstance(one, CodeType):
            yield one
            todo += one.co_consts


def _filled(cell: CellType) -> bool:
    """Return True if a closure cell has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _calls_super(value: Any) -> bool:
    """Return True if a method contains a call of `super().forward`, on any of its paths."""
    for code in _codes(value):
        after = 0  # instructions since `super`; the longest form is `super(Class, self).forward`
        for one in dis.get_instructions(code):
            after = 1 if one.argval == "super" else after + 1 if after else 0
            if one.argval == "forward" and one.opname.startswith("LOAD") and 1 < after <= 7:
                return True
    return False


def _belongs(cls: type[Any], name: str, value: Any) -> str | None:
    """Return why an attribute works only in this class and cannot be moved to another; or None."""
    plain = (FunctionType, property, staticmethod, classmethod)
    if hasattr(type(value), "__get__") and not isinstance(value, plain):
        return f"its {name!r} is a {type(value).__name__}, which cannot be moved to another class"
    for code in _codes(value):
        if any(
            one.opname == "LOAD_GLOBAL" and one.argval == cls.__name__
            for one in dis.get_instructions(code)
        ):
            return f"its {name!r} names {cls.__name__} itself"
    return None


def _moved(value: Any, old: type[Any], new: type[Any]) -> Any:
    """Return a method of class `old` as a method of class `new`.

    `super()` reads its class from the closure of the function, so `old` is replaced by `new` there.
    """
    if isinstance(value, (staticmethod, classmethod)):
        return type(value)(_moved(value.__func__, old, new))
    if isinstance(value, property):
        fget, fset, fdel = (_moved(one, old, new) for one in (value.fget, value.fset, value.fdel))
        return property(fget, fset, fdel, value.__doc__)
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    cells = []
    for cell in value.__closure__:
        content = cell.cell_contents if _filled(cell) else None
        moved = (
            new if content is old else content if content is value else _moved(content, old, new)
        )
        cells.append(cell if moved is content else CellType(moved))
    if all(one is other for one, other in zip(cells, value.__closure__)):
        return value
    function = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells)
    )
    function.__kwdefaults__ = value.__kwdefaults__
    return update_wrapper(function, value, updated=["__dict__"])
