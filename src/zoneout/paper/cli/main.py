"""The command line: parse the arguments, run the command, and report its errors.

An error is printed on standard error as a sentence. The exit code gives the kind of error (see
`exit_codes`).
"""

from __future__ import annotations

import difflib
import os
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import zoneout

from .. import console, disk
from ..data.datasets import DataError, unpacking
from ..disk import RunError
from ..experiments.recipes import RECIPES
from ..training import config as configs
from ..training import runs
from ..training.exit_codes import INTERRUPTED, OK, WRONG_USE, code_of
from ..training.noise_fields import in_fields
from ..training.processes import memory_explained
from . import options
from .commands import COMMANDS, Sweep, Train, complain


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    with console.ready():
        return run(list(sys.argv[1:] if arguments is None else arguments))


def run(args: Sequence[str]) -> int:
    """Run a command, print its error if it raises one, and return the exit code."""
    name = args[0] if args else ""
    try:
        with memory_explained():
            return do(name, args)
    except SystemExit as error:  # tyro has already printed an error or the help text
        return error.code if isinstance(error.code, int) else WRONG_USE
    except KeyboardInterrupt:
        return complain(name, "interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of the output (such as `head`) has closed the pipe
        console.silence(sys.stdout)
        return OK
    except (RunError, DataError, OSError, ValueError) as error:
        return complain(name, in_options(name, error, args), code_of(error))


def do(name: str, args: Sequence[str]) -> int:
    """Run the command with this name and return its exit code."""
    if name in ("", "-h", "--help", "help"):
        console.show(overview())
        return OK if name else WRONG_USE
    if name == "--version":
        console.show(f"zoneout {zoneout.__version__}")
        return OK
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=2, cutoff=0.4)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"the commands are {', '.join(COMMANDS)}."
        )
        return complain("", f"there is no command {name!r}; {hint}", WRONG_USE)
    command = parse(name, args[1:])
    with unpacking(getattr(command, "unpacked", None)):
        code: int = command()
    return code


def parse(name: str, args: Sequence[str]) -> Any:
    """Return the command with its options.

    With --resume, the options that are not given have the values of the run's config; with a
    recipe of `sweep`, they have the values of the recipe.
    """
    command, unknown = _read(COMMANDS[name], name, args, return_unknown_args=True)
    if unknown and isinstance(command, Train) and not unknown[0].startswith("-"):
        what = unknown[0]
        meant = f"zoneout reproduce {what}" if what in RECIPES else f"--data {what}"
        raise ValueError(f"expected options only, got {what!r}; did you mean {meant}?")
    if unknown:
        _read(COMMANDS[name], name, args)  # prints the error and similar options
    if isinstance(command, Sweep) and command.recipe is not None:
        command = _read(Sweep, name, args, default=Sweep(config=config_of(command.recipe)))
    if isinstance(command, Train):
        if command.resume and command.out is None:
            raise ValueError(
                "--resume: say which run to continue, as in `zoneout train --resume --out runs/ptb`"
            )
        if command.resume and command.out is not None:
            default = Train(config=runs.read_config(command.out))
            command = _read(Train, name, args, default=default)
        if command.out is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "--out: expected the folder of the run, since several processes share it"
            )
    if isinstance(command, (Train, Sweep)):
        command = replace(command, config=configs.checked(command.config))
    return command


def _read(kind: type[Any], name: str, args: Sequence[str], **more: Any) -> Any:
    with configs.unchecked():  # tyro would name a field of the command in the message of a check
        return options.read(kind, f"zoneout {name}", args, **more)


def config_of(recipe: str) -> configs.Config:
    """Return the config of the recipe of a sweep."""
    if recipe in RECIPES:
        return RECIPES[recipe].make()
    if Path(recipe).exists():
        raise ValueError(f"there is no recipe {recipe!r}; did you mean --data {recipe}?")
    near = ", ".join(difflib.get_close_matches(recipe, RECIPES, n=3, cutoff=0.3))
    raise ValueError(f"there is no recipe {recipe!r}; the nearest are {near or ', '.join(RECIPES)}")


def in_options(name: str, error: Exception, args: Sequence[str] = ()) -> str:
    """Return the message of an error, which begins with the options as the user types them.

    What applies to a whole group of options begins with those of the group in `args`.

    >>> in_options("train", ValueError("weight_noise: expected a finite number"))
    '--weight-noise: expected a finite number'
    >>> noise = ValueError("zoneout: expected no such noise with hm-lstm")
    >>> in_options("train", noise, ["--zoneout.cell", "0.5"])
    '--zoneout.cell: expected no such noise with hm-lstm'
    """
    message = in_fields(disk.in_words(error))
    start, colon, rest = message.partition(": ")
    if not colon or name not in COMMANDS:
        return message
    known, fields = options.names(COMMANDS[name]), start.split(", ")
    if start in configs.NOISES and start not in known:
        typed = (arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args)
        fields = [field for field in typed if field.startswith(f"{start}.")] or fields
    if not all(field in known for field in fields):
        return message
    return f"{', '.join('--' + field.replace('_', '-') for field in fields)}: {rest}"


def overview() -> str:
    """Return the text of `zoneout --help`, which `zoneout_command` also shows without torch."""
    text = pkgutil.get_data(__package__, "overview.txt")
    assert text is not None  # it is packed with the module
    return text.decode("ascii").rstrip()
