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
from pathlib import Path
from typing import Any

import tyro

import zoneout

from .. import console
from ..data.datasets import DataError, unpacking
from ..disk import RunError
from ..experiments.recipes import RECIPES
from ..training import runs
from ..training.exit_codes import INTERRUPTED, OK, WRONG_USE, code_of
from ..training.processes import memory_explained
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
        return complain(name, error, code_of(error))


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
    if not isinstance(COMMANDS[name], type):
        return int(COMMANDS[name](args[1:]))
    command = parse(name, args[1:])
    with unpacking(getattr(command, "unpacked", None)):
        code: int = command()
    return code


def parse(name: str, args: Sequence[str]) -> Any:
    """Return the command with its options.

    With --resume, the options that are not given have the values of the run's config.
    """
    prog = f"zoneout {name}"
    command, unknown = tyro.cli(COMMANDS[name], prog=prog, args=args, return_unknown_args=True)
    if unknown and isinstance(command, Train) and not unknown[0].startswith("-"):
        what = unknown[0]
        meant = f"zoneout reproduce {what}" if what in RECIPES else f"--data {what}"
        raise ValueError(f"expected options only, got {what!r}; did you mean {meant}?")
    if unknown:
        tyro.cli(COMMANDS[name], prog=prog, args=args)  # prints the error and similar options
    if isinstance(command, Sweep) and command.recipe is not None:
        if command.recipe not in RECIPES:
            if Path(command.recipe).exists():
                raise ValueError(
                    f"there is no recipe {command.recipe!r}; did you mean --data {command.recipe}?"
                )
            near = ", ".join(difflib.get_close_matches(command.recipe, RECIPES, n=3, cutoff=0.3))
            raise ValueError(
                f"there is no recipe {command.recipe!r}; the nearest are "
                f"{near or ', '.join(RECIPES)}"
            )
        return tyro.cli(
            Sweep, prog=prog, args=args, default=Sweep(config=RECIPES[command.recipe].make())
        )
    if not isinstance(command, Train):
        return command
    if command.resume and command.out is None:
        raise ValueError(
            "--resume: say which run to continue, as in `zoneout train --resume --out runs/ptb`"
        )
    if command.resume and command.out is not None:
        command = tyro.cli(
            Train, prog=prog, args=args, default=Train(config=runs.read_config(command.out))
        )
    if command.out is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--out: expected the folder of the run, since several processes share it")
    return command


def overview() -> str:
    """Return the text of `zoneout --help`, which `zoneout_command` also shows without torch."""
    text = pkgutil.get_data(__package__, "overview.txt")
    assert text is not None  # it is packed with the module
    return text.decode("ascii").rstrip()
