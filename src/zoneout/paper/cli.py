"""The command line: parse the arguments, run the command, and report its errors.

An error is printed on standard error as a sentence. The exit code gives the kind of error (see
`codes`).
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

import zoneout

from . import gradients, reproduce, runs, streams
from .codes import CODES, INTERRUPTED, OK, WRONG_USE, code_of
from .commands import COMMANDS, Sweep, Train, complain
from .disk import RunError
from .files import DataError, unpacking
from .processes import memory_explained
from .recipes import RECIPES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    with streams.ready():
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
        streams.silence(sys.stdout)
        return OK
    except (RunError, DataError, OSError, ValueError) as error:
        return complain(name, error, code_of(error))


def do(name: str, args: Sequence[str]) -> int:
    """Run the command with this name and return its exit code."""
    if name in ("", "-h", "--help", "help"):
        streams.show(overview())
        return OK if name else WRONG_USE
    if name == "--version":
        streams.show(f"zoneout {zoneout.__version__}")
        return OK
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=2, cutoff=0.4)
        hint = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"the commands are {', '.join(COMMANDS)}."
        )
        return complain("", f"there is no command {name!r}; {hint}", WRONG_USE)
    if name == "bench":
        return bench(args[1:])
    # reproduce and gradients use argparse: their modules also run where only torch is installed.
    if name == "reproduce":
        return reproduce.main(args[1:], "zoneout reproduce")
    if name == "gradients":
        return gradients.main(args[1:], "zoneout gradients")
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
    """Return the text of `zoneout --help`."""
    lines = [
        f"  {name:9} {(kind.__doc__ or '').splitlines()[0]}" for name, kind in COMMANDS.items()
    ]
    codes = [f"  {code:<9} {meaning}" for code, meaning in CODES.items()]
    return "\n".join(
        [
            "usage: zoneout COMMAND [OPTIONS]",
            "",
            "Train recurrent models with zoneout on a text, evaluate them and sample from them.",
            "",
            "commands (for the options: zoneout COMMAND --help):",
            *lines,
            "",
            "examples:",
            "  zoneout demo",
            (
                "  zoneout train --data my.txt --out runs/mine --zoneout.cell 0.5 --zoneout.hidden "
                "0.05"
            ),
            '  zoneout sample runs/mine --prompt "The "',
            "",
            "exit codes:",
            *codes,
        ]
    )


def bench(args: Sequence[str]) -> int:
    """Run a benchmark script of the repository clone that contains this package."""
    which, args = (args[0], args[1:]) if args and args[0] in ("gpu", "step") else ("bench", args)
    script = Path(zoneout.__file__).parents[2] / "benchmarks" / f"{which}.py"
    if not script.is_file():
        raise RunError(
            "the installed package does not contain the benchmarks; run `make bench` in a clone of "
            "the repository"
        )
    return subprocess.call([sys.executable, str(script), *args])
