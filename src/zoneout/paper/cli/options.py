"""The options of a command: the fields of its dataclass, whose docstrings are the help.

`read` parses them with tyro. Where the extra "tool" is not installed, argparse reads the same
fields. Only the layout of the help differs.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import sys
import types
import typing
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from ..training import config as configs

try:
    import tyro
    from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

    _cli: Any = tyro.cli
except ModuleNotFoundError:  # `plain` is used, and it knows these marks
    _cli = None
    FlagCreatePairsOff, Positional, UseAppendAction = "flag", "positional", "append"
    arg = types.SimpleNamespace


Flag: TypeAlias = Annotated[bool, FlagCreatePairsOff]  # --name, without --no-name
Command = TypeVar("Command")

__all__ = ["Flag", "Positional", "UseAppendAction", "arg", "names", "plain", "read"]


def read(kind: type[Command], prog: str, args: Sequence[str], **more: Any) -> Any:
    """Return the command with the options in `args`; `more` are arguments of `tyro.cli`.

    A value of the wrong type is a `ValueError`; the parser prints other errors, and exits.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return _parsed(kind, prog, args, **more)
    except SystemExit as error:
        if not error.code:  # the help text has been printed
            raise
    check_values(kind, args)
    return _parsed(kind, prog, args, **more)  # prints the error, in colour on a terminal


def _parsed(kind: type[Command], prog: str, args: Sequence[str], **more: Any) -> Any:
    if _cli is None:
        return plain(kind, prog, args)
    _tidy(kind)
    how = [tyro.conf.DisallowNone]  # None is what an option is that was not given
    return _cli(kind, prog=prog, args=args, description=_description(kind), config=how, **more)


def check_values(kind: type, args: Sequence[str]) -> None:
    """Raise if an option in `args` is followed by words that are not of its type.

    >>> from zoneout.paper.training.config import Config
    >>> check_values(Config, ["--zoneout.cell", "high"])
    Traceback (most recent call last):
        ...
    ValueError: --zoneout.cell: expected a number, or several, got 'high'
    """
    hints = {name.removeprefix("config."): hint for name, hint in configs.names(kind).items()}
    for place, word in enumerate(args, 1):
        name, equals, value = word.removeprefix("--").partition("=")
        hint = hints.get(name.replace("-", "_"))
        if not word.startswith("--") or hint is None or hint is bool:
            continue
        after = itertools.takewhile(lambda one: not one.startswith("--"), args[place:])
        words = [value] if equals else list(after)
        expected, right = _expected(hint)
        if not right(words):
            several = tuple in (typing.get_origin(one) for one in (hint, *typing.get_args(hint)))
            got = " ".join(map(repr, words if several else words[:1])) or "nothing"
            raise ValueError(f"--{name}: expected {expected}, got {got}")


def _expected(hint: Any) -> tuple[str, Callable[[list[str]], bool]]:
    """Return the words for the values of a type, and whether given words begin with such a value.

    More words may follow one value: they are arguments of the command.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(inner)}", lambda words: words[:1] != [] and words[0] in inner
    if origin in (types.UnionType, typing.Union):
        one, *other = (_expected(each) for each in inner if each is not type(None))
        return (f"{one[0]}, or several", other[0][1]) if other else one  # one, or a tuple of such
    if origin is tuple:
        fits = _expected(inner[0])[1]
        least = 0 if inner[-1] is ... else len(inner)
        text = f"{least} numbers" if least else "numbers"
        return text, lambda words: len(words) >= least and all(fits([word]) for word in words)
    if hint not in (int, float):
        return "a value", lambda words: words != []
    text = "a whole number" if hint is int else "a number"
    return text, lambda words: words != [] and _converts(hint, words[0])


def _converts(kind: type, word: str) -> bool:
    try:
        kind(word)
    except ValueError:
        return False
    return True


_TIDY: set[Any] = set()  # classes that `_tidy` has changed


def _tidy(kind: Any) -> None:
    """Let tyro's help leave out defaults that say nothing, and give it the texts of the fields.

    tyro would parse the module again for every class, which takes longer than all the rest.
    """
    if kind in _TIDY:
        return
    _TIDY.add(kind)
    texts = help_texts(kind)
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        bare, *_ = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        if dataclasses.is_dataclass(bare):
            _tidy(bare)
            told = arg(help=texts.get(name) or inspect.getdoc(bare))
        else:
            told = arg(help=texts.get(name), help_behavior_hint=_default, metavar=_metavar(hint))
        kind.__annotations__[name] = Annotated[hint, told]


def _metavar(hint: Any) -> str | None:
    """Return what stands for the value of an option in the help, or None where its parser decides.

    >>> _metavar(int | None), _metavar(float | tuple[float, ...]), _metavar(tuple[float, float])
    ('N', 'X [X …]', 'X X')
    """
    kind, *marks = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    for mark in marks:
        if getattr(mark, "metavar", None):
            return str(mark.metavar)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = [part for part in typing.get_args(kind) if part is not type(None)][-1]
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        one = _metavar(inner[0])
        return f"{one} [{one} …]" if inner[-1] is ... else " ".join([str(one)] * len(inner))
    return {int: "N", float: "X", str: "NAME", Path: "FILE"}.get(kind)


def _description(kind: type) -> str:
    return (inspect.getdoc(kind) or "").replace("\n\n$", "\n\nExamples:\n$")


def _default(value: str) -> str:
    return "" if value in ("None", "False", "", "''") else f"(default: {value})"


def plain(kind: type[Command], prog: str, args: Sequence[str]) -> Command:
    """Return the command with the options in `args`, read with argparse."""
    parser = argparse.ArgumentParser(
        prog, description=_description(kind), formatter_class=argparse.RawTextHelpFormatter
    )
    hints, texts = typing.get_type_hints(kind, include_extras=True), help_texts(kind)
    for one in dataclasses.fields(typing.cast(Any, kind)):
        _add(parser, one, hints[one.name], texts[one.name])
    found = vars(parser.parse_args(args))
    return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in found.items()})


def names(kind: type) -> list[str]:
    """Return the options of a command, as dotted names of fields without dashes.

    The fields of the config, whose own name is empty, are options like the others.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    return [
        name.removeprefix("config.")
        for name in configs.names(kind)
        if Positional not in typing.get_args(hints[name.partition(".")[0]])
    ]


def help_texts(kind: type) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass."""
    tree = _classes(kind.__module__)[kind.__name__]
    return {
        ast.unparse(one.target): inspect.cleandoc(after.value.value)
        for one, after in zip(tree.body, tree.body[1:])
        if isinstance(one, ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
    }


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module, as they are written."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {one.name: one for one in body if isinstance(one, ast.ClassDef)}


def _add(parser: Any, one: Any, hint: Any, text: str) -> None:
    """Add an option to a parser of argparse."""
    kind, *marks = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):  # X | None
        (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
    several = typing.get_origin(kind) is tuple
    if several:
        kind = typing.get_args(kind)[0]
    optional = one.default is not dataclasses.MISSING
    if optional and not several and (default := _default(str(one.default))):
        text += f" {default}"
    settings: dict[str, Any] = {"help": text.replace("%", "%%")}
    settings |= {"default": one.default} if optional else {}
    if kind is bool:
        settings["action"] = "store_true"
    elif typing.get_origin(kind) is Literal:
        settings["choices"] = typing.get_args(kind)
    else:
        settings |= {"type": kind, "metavar": _metavar(hint)}
    if Positional in marks:
        nargs = ("*" if optional else "+") if several else "?" if optional else None
        parser.add_argument(one.name, nargs=nargs, **settings)
        return
    if several:
        settings |= {"action": "append"} if UseAppendAction in marks else {"nargs": "*"}
        settings["default"] = list(one.default)  # argparse appends to a copy of it
    parser.add_argument(f"--{one.name.replace('_', '-')}", **settings)
