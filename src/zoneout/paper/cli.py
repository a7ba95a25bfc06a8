"""The command line: one frozen dataclass a command, whose fields are its options.

Errors are sentences on standard error; the exit code says what kind they are (`CODES`). Results go to standard output,
progress to standard error.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

import zoneout

from . import config as configs
from . import fetch, files, plots, runs
from .config import Config
from .data import Corpus
from .demo import Demo, free_folder
from .evaluate import evaluate, evaluate_text
from .feeds import on_device
from .files import DATASETS, DataError
from .processes import device_of
from .progress import TensorBoard, duration, figure_of, together, watch, worth
from .runs import RunError
from .sample import sample
from .train import Diverged, Summary, load_data, measure_of, train

OK, FAILED, WRONG_USE, BAD_DATA, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 4, 130
CODES = {
    OK: "done",
    FAILED: "the run failed: a folder that is in use, full or damaged",
    WRONG_USE: "wrong use: an option or a value that cannot be",
    BAD_DATA: "data that are missing or not what they should be",
    DIVERGED: "training diverged: a loss that is not a finite number",
    INTERRUPTED: "interrupted (Ctrl-C or a polite kill); the run can be continued",
}

Flag: TypeAlias = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Folder: TypeAlias = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]
RunFolder: TypeAlias = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


@dataclass(frozen=True)
class Train:
    """Train a model on a text, in a folder of its own.

    $ zoneout train --data my.txt --zoneout.cell 0.5 --zoneout.hidden 0.05
    $ zoneout train --data char-ptb --out runs/ptb --model.hidden 1000 --epochs 40
    $ zoneout train --resume --out runs/ptb --epochs 60
    $ torchrun --nproc-per-node 4 -m zoneout train --data text8 --out runs/text8
    """

    data: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE|DIR")] = None
    """A corpus (zoneout data list), a text file, or a folder in which to look for the corpus of --data.name."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """The folder of the run; by default a new one in runs/."""
    resume: Flag = False
    """Continue the run in --out exactly where it was."""
    tensorboard: Flag = False
    """Write the metrics for TensorBoard too, to RUN/tensorboard."""
    json: Flag = False
    """Print how the run ended as JSON."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)

    def __call__(self) -> int:
        config, folder = with_data(self.config, self.data)
        out = self.out or free_folder(Path("runs") / Path(config.data.name).stem)
        first = os.environ.get("RANK", "0") == "0"
        board = TensorBoard(out) if self.tensorboard and first else None
        with watch() if first else nullcontext() as shown:
            listeners: list[Any] = [*([shown.listener()] if shown else []), *([board] if board else [])]
            summary = train(config, out, resume=self.resume, progress=together(*listeners), data=folder)
        if first:
            print(json.dumps(asdict(summary)) if self.json else ending(summary), flush=True)
        return INTERRUPTED if summary.status == "interrupted" else OK


@dataclass(frozen=True)
class Eval:
    """Evaluate a trained model.

    $ zoneout eval runs/ptb
    $ zoneout eval runs/ptb --part valid --protocol chunks --length 100
    $ zoneout eval runs/ptb --text another.txt --json
    """

    run: RunFolder
    """The folder of the run."""
    part: Literal["train", "valid", "test"] = "test"
    """Which part of the run's data."""
    text: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Another text, instead of the run's data."""
    protocol: Literal["chunks", "streams", "whole"] | None = None
    """Chunks from the initial state, parallel streams, or the whole text as one; by default as the run has it."""
    length: int | None = None
    """Symbols in a chunk; otherwise steps to run at a time."""
    size: int | None = None
    """Chunks in a batch, or how many streams."""
    weights: Literal["best", "last"] = "best"
    """The best weights, or those of the latest checkpoint."""
    data: Folder = None
    """A folder in which to look for the run's corpus."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: Flag = False
    """Print the result as JSON."""

    def __call__(self) -> int:
        loaded = runs.load(self.run, weights=self.weights, device=device_of(self.device))
        own = loaded.config.evaluation.test if self.part == "test" or self.text else loaded.config.evaluation.valid
        given = {"kind": self.protocol, "length": self.length, "size": self.size}
        protocol = replace(own, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
        if self.text is not None:
            if loaded.vocabulary is None:
                raise ValueError(f"--text: {self.run} classifies images and cannot read a text")
            measure = "bits" if loaded.vocabulary.unit == "char" else "perplexity"
            numbers = loaded.vocabulary.encode(read_text(self.text))
            score = evaluate_text(loaded.model, on_device(numbers, device_of(self.device)), protocol)
        else:
            data = load_data(loaded.config, self.data)
            measure = measure_of(data)
            if isinstance(data, Corpus) and data.vocabulary != loaded.vocabulary:
                raise DataError(
                    f"{loaded.config.data.name} is not the text that {self.run} was trained on: its symbols are others"
                )
            score = evaluate(loaded.model, data, self.part, loaded.config, protocol=protocol)
        where = str(self.text) if self.text else self.part
        if self.json:
            values = {measure: getattr(score, measure), "nats": score.nats, "predictions": score.predictions}
            print(json.dumps({"run": str(self.run), "part": where, "protocol": asdict(protocol), **values}))
            return OK
        how = {
            "chunks": f"chunks of {protocol.length:,}, each from the initial state",
            "streams": f"{protocol.size:,} streams, the state carried",
            "whole": "one sequence, the state carried",
        }[protocol.kind]
        cut = "" if measure == "error" else f", as {how}"
        print(f"{figure_of(getattr(score, measure), measure)} on {where}: {score.predictions:,} predictions{cut}")
        return OK


@dataclass(frozen=True)
class Sample:
    """Let a trained model write.

    $ zoneout sample runs/ptb --prompt "the company " --length 500 --temperature 0.8
    """

    run: RunFolder
    """The folder of the run."""
    prompt: str = ""
    """What the text begins with."""
    length: int = 500
    """How many symbols to write."""
    temperature: float = 0.8
    """1 draws from what the model predicts; lower prefers what is likely; 0 always takes the likeliest."""
    seed: int = 0
    """Another seed writes another text."""
    weights: Literal["best", "last"] = "best"
    """The best weights, or those of the latest checkpoint."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: Flag = False
    """Print the text as JSON."""

    def __call__(self) -> int:
        loaded = runs.load(self.run, weights=self.weights, device=device_of(self.device))
        pieces = sample(loaded, self.prompt, length=self.length, temperature=self.temperature, seed=self.seed)
        if self.json:
            text = "".join(pieces)
            print(json.dumps({"run": str(self.run), "prompt": self.prompt, "text": text, "seed": self.seed}))
            return OK
        print(self.prompt, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        return OK


@dataclass(frozen=True)
class Show:
    """Show what a run is and how it went; several runs are compared.

    $ zoneout show runs/ptb
    $ zoneout show runs/plain runs/zoneout --picture curves.png
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN …]")]
    """The folders of the runs."""
    picture: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the learning curves to this file: .png, .svg or .pdf."""
    json: Flag = False
    """Print everything as JSON."""

    def __call__(self) -> int:
        if not self.runs:
            raise ValueError("expected the folder of a run, as in `zoneout show runs/ptb`")
        pages = [describe(folder) for folder in self.runs]
        names = [str(folder) for folder in self.runs] if len(self.runs) > 1 else ["valid"]
        curves = [plots.read_curve(folder, name) for folder, name in zip(self.runs, names)]
        curves = [curve for curve in curves if curve.measure == curves[0].measure]
        if self.json:
            print(json.dumps(pages if len(pages) > 1 else pages[0]))
        else:
            print("\n\n".join(described(page) for page in pages))
            width = min(shutil.get_terminal_size((80, 24)).columns, 100)
            print(f"\n{plots.UNITS[curves[0].measure]}, validation:\n{plots.ascii_curves(curves, width)}")
        if self.picture is not None:
            plots.save(plots.figure(curves), self.picture)
            print(f"The picture is in {self.picture}", file=sys.stderr)
        return OK


@dataclass(frozen=True)
class Data:
    """List, fetch or verify the corpora.

    $ zoneout data list
    $ zoneout data fetch char-ptb
    $ zoneout data verify --data my-folder
    """

    action: Annotated[Literal["list", "fetch", "verify"], tyro.conf.Positional]
    """list says what there is; fetch downloads; verify reads every file and compares checksums."""
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME …]")] = ()
    """The corpora meant; for list and verify, all by default."""
    data: Folder = None
    """A folder to look in, or to download to; by default ZONEOUT_DATA, and the cache."""
    json: Flag = False
    """Print the result as JSON."""

    def __call__(self) -> int:
        for name in self.names:
            files.known(name)
        return {"list": self.list, "fetch": self.fetch, "verify": self.verify}[self.action]()

    def list(self) -> int:
        found = [status for status in files.listing(self.data) if status.dataset in (self.names or DATASETS)]
        if self.json:
            return self.as_json(found)
        for name in self.names or DATASETS:
            states = {status.state for status in found if status.dataset == name}
            here = "built in" if "built in" in states else "not here" if "missing" in states else "here"
            print(f"{name:13} {here:9} {DATASETS[name].about}")
        return OK

    def verify(self) -> int:
        found = [status for name in self.names or DATASETS for status in files.verify(name, self.data)]
        # Without names it is a question about what is there; with names, whether it is there too.
        bad = [s for s in found if s.state == "damaged" or (s.state == "missing" and self.names)]
        if self.json:
            self.as_json(found)
        else:
            for status in found:
                print(f"{status.dataset:13} {status.state:9} {status.path or status.file}")
            for status in bad:
                print(f"zoneout data: {status.note}", file=sys.stderr)
        return BAD_DATA if bad else OK

    def fetch(self) -> int:
        if not self.names:
            raise ValueError(f"fetch: expected the name of a corpus, one of {', '.join(DATASETS)}")
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        got = []
        with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
            tasks: dict[str, Any] = {}

            def progress(name: str, here: int, total: int | None) -> None:
                if name not in tasks:
                    tasks[name] = bars.add_task(name, total=total)
                bars.update(tasks[name], completed=here, total=total)

            for name in self.names:
                got += [(name, *one) for one in fetch.fetch(name, self.data, progress=progress)]
        if self.json:
            print(json.dumps([{"dataset": name, "path": str(path), "fetched": new} for name, path, new in got]))
            return OK
        for name, path, new in got:
            print(f"{name:13} {'fetched' if new else 'was here':9} {path}")
        for name in self.names:
            if not DATASETS[name].files:
                print(f"{name:13} built in")
        return OK

    def as_json(self, found: Sequence[files.Status]) -> int:
        print(json.dumps([{**asdict(one), "path": one.path and str(one.path)} for one in found]))
        return OK


@dataclass(frozen=True)
class Bench:
    """Measure the speed of the layers against torch.nn's, with benchmarks/bench.py of a clone of the repository.

    $ zoneout bench --help
    """


COMMANDS: dict[str, Any] = {
    "demo": Demo,
    "train": Train,
    "eval": Eval,
    "sample": Sample,
    "show": Show,
    "data": Data,
    "bench": Bench,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    name = args[0] if args else ""
    if name in ("", "-h", "--help", "help"):
        print(overview())
        return OK if name else WRONG_USE
    if name == "--version":
        print(f"zoneout {zoneout.__version__}")
        return OK
    try:
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=2, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else f"the commands are {', '.join(COMMANDS)}."
            return _complain("", f"there is no command {name!r}; {hint}", WRONG_USE)
        if name == "bench":
            return bench(args[1:])
        code: int = parse(name, args[1:])()
        return code
    except SystemExit as error:  # tyro has said what is wrong, or helped
        return error.code if isinstance(error.code, int) else WRONG_USE
    except KeyboardInterrupt:
        return _complain(name, "interrupted", INTERRUPTED)
    except Diverged as error:
        return _complain(name, error, DIVERGED)
    except DataError as error:
        return _complain(name, error, BAD_DATA)
    except (RunError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # whoever read the output has enough of it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return OK
        return _complain(name, error, FAILED)
    except ValueError as error:
        return _complain(name, error, WRONG_USE)


def parse(name: str, args: Sequence[str]) -> Any:
    """The command with its options. Those of a run that is continued are, where nothing else is said, its own."""
    prog = f"zoneout {name}"
    command = tyro.cli(COMMANDS[name], prog=prog, args=args)
    if not isinstance(command, Train):
        return command
    if command.resume and command.out is None:
        raise ValueError("--resume: say which run, as in `zoneout train --resume --out runs/ptb`")
    if command.resume and command.out is not None:
        command = tyro.cli(Train, prog=prog, args=args, default=Train(config=runs.read_config(command.out)))
    if command.out is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--out: several processes have to be told the folder of their run")
    return command


def overview() -> str:
    """What `zoneout --help` says."""
    lines = [f"  {name:7} {(kind.__doc__ or '').splitlines()[0]}" for name, kind in COMMANDS.items()]
    codes = [f"  {code:<7} {meaning}" for code, meaning in CODES.items()]
    return "\n".join(
        [
            "usage: zoneout COMMAND [OPTIONS]",
            "",
            "Recurrent models with zoneout: from a text to a trained model.",
            "",
            "commands (zoneout COMMAND --help says more):",
            *lines,
            "",
            "examples:",
            "  zoneout demo",
            "  zoneout train --data my.txt --out runs/mine --zoneout.cell 0.5 --zoneout.hidden 0.05",
            '  zoneout sample runs/mine --prompt "The "',
            "",
            "exit codes:",
            *codes,
        ]
    )


def bench(args: Sequence[str]) -> int:
    """Run the benchmark of the clone that this package is used from."""
    script = Path(zoneout.__file__).parents[2] / "benchmarks" / "bench.py"
    if not script.is_file():
        raise RunError(
            "the benchmark is not part of the installed package: in a clone of the repository, `make bench` runs it"
        )
    return subprocess.call([sys.executable, str(script), *args])


# --- what the commands share -----------------------------------------------------------------------


def with_data(config: Config, data: str | None) -> tuple[Config, Path | None]:
    """The config with what --data says, and the folder to look for corpora in.

    Paths of texts are made absolute, so that a run can be continued from anywhere.
    """
    folder = None
    if data is not None and data not in DATASETS and Path(data).expanduser().is_dir():
        folder, data = Path(data).expanduser(), None
    if data is not None:
        if config.data.name not in (Config().data.name, data, _absolute(data)):
            raise ValueError(f"--data: {data} is not what --data.name says ({config.data.name}); give one of the two")
        config = configs.change(config, {"data.name": data})
    paths = {"data.name": config.data.name, "data.valid": config.data.valid, "data.test": config.data.test}
    found = {name: _absolute(value) for name, value in paths.items() if value is not None and value not in DATASETS}
    return configs.change(config, found), folder


def _absolute(path: str) -> str:
    found = Path(path).expanduser()
    return str(found.absolute()) if found.exists() else path


def read_text(path: Path) -> str:
    """A text file of the user's."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start:,} is not UTF-8; expected a text in UTF-8") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def ending(summary: Summary) -> str:
    """What is said when training ends."""
    folder = summary.folder
    lines = []
    if summary.status == "interrupted":
        lines.append(f"Interrupted at update {summary.update:,}; everything is kept. To continue:")
        lines.append(f"  zoneout train --resume --out {folder}")
        return "\n".join(lines)
    why = "" if summary.status == "finished" else ", since the validation had not improved for long enough"
    lines.append(f"Finished after {summary.update:,} updates in {duration(summary.seconds)}{why}.")
    if summary.best is not None:
        lines.append(f"  best valid  {worth(summary.best)} (update {summary.best['update']:,})")
    if summary.test is not None:
        lines.append(f"  test        {worth(summary.test)}")
    also = "" if summary.measure == "error" else f"; zoneout sample {folder} writes"
    lines.append(f"zoneout show {folder} draws the learning curve{also}.")
    return "\n".join(lines)


def describe(folder: Path) -> dict[str, Any]:
    """What a run is and how it went."""
    config, rows = runs.read_config(folder), runs.read_metrics(folder)
    valid = [row for row in rows if row["kind"] == "valid"]
    ended = runs.read_json(folder / "summary.json") if (folder / "summary.json").exists() else None
    default, own = configs.to_json(Config()), configs.to_json(config)
    return {
        "run": str(folder),
        "status": ended["status"] if ended else "not finished",
        "update": rows[-1]["update"] if rows else 0,
        "epoch": rows[-1]["epoch"] if rows else 0,
        "best": next((row for row in reversed(valid) if row["best"]), None),
        "test": next((row for row in reversed(rows) if row["kind"] == "test"), None),
        "parameters": ended and ended["parameters"],
        "seconds": ended and ended["seconds"],
        "changed": {n: at(own, n) for n in configs.names() if at(own, n) != at(default, n)},
        "config": own,
    }


def described(page: dict[str, Any]) -> str:
    """A page of `describe`, to be read."""
    model = page["config"]["model"]
    size = f", {page['parameters']:,} parameters" if page["parameters"] else ""
    layers = f"{model['layers']} layers" if model["layers"] > 1 else "one layer"
    took = f" in {duration(page['seconds'])}" if page["seconds"] else ""
    lines = [
        f"{page['run']}: {page['status']}, {page['update']:,} updates ({page['epoch']:.4g} epochs){took}",
        f"  {model['cell'].upper()}, {layers} of {model['hidden']:,} units{size}, on {page['config']['data']['name']}",
    ]
    if page["best"]:
        lines.append(f"  best valid  {worth(page['best'])} (update {page['best']['update']:,})")
    if page["test"]:
        lines.append(f"  test        {worth(page['test'])} ({page['test']['predictions']:,} predictions)")
    if page["changed"]:
        lines.append("  " + " ".join(f"--{n.replace('_', '-')} {spelled(v)}" for n, v in page["changed"].items()))
    return "\n".join(lines)


def at(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values[part]
    return values


def spelled(value: Any) -> str:
    """A value as the command line takes it."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _complain(name: str, what: object, code: int) -> int:
    if os.environ.get("ZONEOUT_TRACEBACK") and sys.exc_info()[0] is not None:
        traceback.print_exc()
    print(f"zoneout{f' {name}' if name else ''}: {what}", file=sys.stderr)
    return code
