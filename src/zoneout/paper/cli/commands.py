"""The commands: one frozen dataclass for each command. Its fields are the command's options.

Results go to standard output, progress to standard error. Calling a command returns its exit code
(see `exit_codes`).
"""

from __future__ import annotations

import math
import os
import shutil
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

from .. import disk
from ..console import say, show, show_json
from ..data import datasets, download
from ..data.corpora import Corpus, absolute_path, check_apart, read_text
from ..data.datasets import DATASETS
from ..experiments import sweep
from ..experiments.trials import PATHS
from ..report import plots, sweep_page
from ..report.describe import describe, described, ending
from ..training import config as configs
from ..training import runs
from ..training.config import Config, Protocol
from ..training.evaluate import estimate_statistics, evaluate, evaluate_text, judged
from ..training.exit_codes import BAD_DATA, FAILED, INTERRUPTED, OK
from ..training.feeds import make_feed, on_device
from ..training.measures import LABELS, figure_of, measure_of
from ..training.processes import device_of
from ..training.progress import TensorBoard, together, watch
from ..training.sample import sample
from ..training.train import data_of, train, values_of
from ..training.unused_options import refuse_given, refuse_unread
from .bench import Bench
from .demo import Demo
from .gradients import Gradients
from .options import Flag
from .reproduce import Reproduce

Folder: TypeAlias = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]
RunFolder: TypeAlias = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


@dataclass(frozen=True)
class Train:
    """Train a model on a text or on MNIST, and write the run to a folder.

    $ zoneout train --data my.txt --zoneout.cell 0.5 --zoneout.hidden 0.05
    $ zoneout train --data char-ptb --out runs/ptb --model.hidden 1000 --epochs 40
    $ zoneout train --resume --out runs/ptb --epochs 60
    $ torchrun --nproc-per-node 4 -m zoneout train --data text8 --out runs/text8
    """

    data: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE|DIR")] = None
    """A corpus (`zoneout data list` shows the names), a text file, or a data folder.
    In a data folder, the corpus or text of --data.name is used.
    With --resume, if the run's data have moved: the folder that contains them, or the text file.
    """
    out: Annotated[Path | None, tyro.conf.arg(metavar="RUN")] = None
    """The folder of the run; by default a new folder in runs/."""
    resume: Flag = False
    """Continue the run in --out exactly where it stopped."""
    unpacked: Annotated[int | None, tyro.conf.arg(metavar="MIB")] = None
    """Maximum size of a compressed text after decompression, in MiB; by default 256."""
    tensorboard: Flag = False
    """Also write the metrics for TensorBoard, to RUN/tensorboard."""
    json: Flag = False
    """Print the summary of the run as JSON."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)

    def __call__(self) -> int:
        config, where = with_data(self.config, self.data, begun=self.resume)
        if not self.resume:
            refuse_unread(configs.changed(config), [config])
        out = self.out or disk.free_folder(Path("runs") / Path(config.data.name).stem)
        first = os.environ.get("RANK", "0") == "0"
        board = TensorBoard(out) if self.tensorboard and first else None
        with watch() if first else nullcontext() as shown:
            listeners: list[Any] = [
                *([shown.listener()] if shown else []),
                *([board] if board else []),
            ]
            summary = train(
                config, out, resume=self.resume, progress=together(*listeners), data=where
            )
        if first:
            if self.json:
                show_json(asdict(summary))
            else:
                show(ending(summary))
        return INTERRUPTED if summary.status == "interrupted" else OK


@dataclass(frozen=True)
class Eval:
    """Evaluate a trained model.

    $ zoneout eval runs/ptb
    $ zoneout eval runs/ptb --part valid --protocol chunks --length 100
    $ zoneout eval runs/ptb --text another.txt --json
    $ zoneout eval runs/words --samples 100
    """

    run: RunFolder
    """The folder of the run."""
    part: Literal["train", "valid", "test"] | None = None
    """The part of the run's data to evaluate on; by default test."""
    text: Path | None = None
    """Evaluate on this text file instead of the run's data."""
    protocol: Literal["chunks", "streams", "whole"] | None = None
    """How to cut the text; by default as in the run's config.
    chunks: chunks of the text, each from the initial state.
    streams: parallel streams, with the state carried from batch to batch.
    whole: the whole text as one sequence.
    """
    length: int | None = None
    """chunks: symbols in a chunk. streams, whole: steps per forward pass.
    By default as in the run's config.
    """
    size: int | None = None
    """chunks: chunks in a batch. streams: number of streams. mnist: images in a batch.
    By default as in the run's config.
    """
    weights: Literal["best", "last"] = "best"
    """best: the weights with the best validation. last: the weights of the latest checkpoint."""
    samples: int = 0
    """Average the predicted probabilities over this many passes with the dropout of training.
    Masks of whole sequences are fixed for a pass, and no whole symbols are dropped.
    """
    statistics: int | None = None
    """Only with batch norm: first estimate the batch norm statistics again on the training part.
    The value is the number of training examples in a batch (0: as many as in training).
    """
    data: Annotated[Path | None, tyro.conf.arg(metavar="DIR|FILE")] = None
    """If the run's data have moved: the folder that contains them, or the text file."""
    unpacked: Annotated[int | None, tyro.conf.arg(metavar="MIB")] = None
    """Maximum size of a compressed text after decompression, in MiB; by default 256."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: Flag = False
    """Print the result as JSON."""

    def __call__(self) -> int:
        if self.text is not None and self.part is not None:
            raise ValueError(
                f"--part: {self.text} has no parts, as the run's data have; give either --text or "
                "--part"
            )
        if self.text is not None and self.data is not None and self.statistics is None:
            raise ValueError(
                "--data: the run's data are not needed where --text is evaluated; give only one of "
                "the two"
            )
        if self.samples < 0 or (self.samples and self.text is not None):
            raise ValueError(
                f"--samples: expected a number of passes over the run's data, got {self.samples}"
                + (" with --text" if self.text else "")
            )
        part = self.part or "test"
        loaded = runs.load(self.run, weights=self.weights, device=device_of(self.device))
        if self.statistics is not None:
            if self.statistics < 0 or self.statistics == 1:
                raise ValueError(
                    "--statistics: expected 0, or a number of examples above 1, got "
                    f"{self.statistics}"
                )
            if loaded.config.model.norm != "batch":
                raise ValueError(
                    f"--statistics: expected a run with batch norm, but {self.run} has no batch "
                    "norm"
                )
            data = data_of(self.run, loaded.config, self.data)
            feed = make_feed(loaded.config, data, device_of(self.device))
            estimate_statistics(loaded.model, feed, size=self.statistics)
        own = loaded.config.evaluation.test if part == "test" else loaded.config.evaluation.valid
        given: dict[str, Any] = {"kind": self.protocol, "length": self.length, "size": self.size}
        if loaded.config.task == "images" and (self.protocol or self.length):
            raise ValueError(
                f"--protocol, --length: {self.run} classifies images, which are not cut as a text "
                "is; leave them out"
            )
        protocol = replace(
            own, **{name: value for name, value in given.items() if value is not None}
        )
        if protocol.kind == "whole" and self.size is not None and loaded.config.task == "language":
            raise ValueError(
                "--size: the whole text is one sequence; leave it out or use --protocol chunks or "
                "streams"
            )
        if self.text is not None:
            if loaded.vocabulary is None:
                raise ValueError(f"--text: {self.run} classifies images and cannot read a text")
            measure = measure_of(loaded.vocabulary)
            numbers = read_text(self.text, loaded.vocabulary)
            if strangers := loaded.vocabulary.strangers(numbers):
                say(f"{self.text}: {strangers}")
            symbols = on_device(numbers, device_of(self.device))
            protocol = fitted(protocol, len(numbers))
            with judged(loaded.model, loaded.config, batch_statistics=False):
                score = evaluate_text(loaded.model, symbols, protocol, seed=loaded.config.seed)
        else:
            data = data_of(self.run, loaded.config, self.data)
            measure = measure_of(data)
            if isinstance(data, Corpus):
                protocol = fitted(protocol, len(getattr(data, part)))
            score = evaluate(
                loaded.model, data, part, loaded.config, protocol=protocol, samples=self.samples
            )
        where = str(self.text) if self.text else part
        score = score.checked(f"{self.run} on {where}")
        if self.json:
            page: dict[str, Any] = {"run": str(self.run), "part": where}
            page["protocol"] = asdict(protocol)
            page |= {"samples": self.samples} if self.samples else {}
            show_json(page | values_of(score, measure))
            return OK
        how = {
            "chunks": f"chunks of {protocol.length:,}, each from the initial state",
            "streams": f"{protocol.size:,} streams in parallel, with the state carried",
            "whole": "one sequence, with the state carried",
        }[protocol.kind]
        cut = "" if measure == "error" else f", as {how}"
        cut += f", averaged over {self.samples:,} passes" if self.samples else ""
        show(
            f"{figure_of(getattr(score, measure), measure)} on {where}: {score.predictions:,} "
            f"predictions{cut}"
        )
        return OK


@dataclass(frozen=True)
class Sample:
    """Generate text with a trained model.

    $ zoneout sample runs/ptb --prompt "the company " --length 500 --temperature 0.8
    """

    run: RunFolder
    """The folder of the run."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """The beginning of the text, which the model continues."""
    length: int = 500
    """Number of symbols to generate."""
    temperature: float = 0.8
    """1: sample from the predicted distribution. Below 1: prefer likely symbols.
    0: always take the most likely symbol.
    """
    seed: int = 0
    """Seed of the sampling; another seed generates another text."""
    weights: Literal["best", "last"] = "best"
    """best: the weights with the best validation. last: the weights of the latest checkpoint."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: Flag = False
    """Print the text as JSON."""

    def __call__(self) -> int:
        loaded = runs.load(self.run, weights=self.weights, device=device_of(self.device))
        pieces = sample(
            loaded, self.prompt, length=self.length, temperature=self.temperature, seed=self.seed
        )
        if loaded.vocabulary and (
            strangers := loaded.vocabulary.strangers(loaded.vocabulary.encode(self.prompt))
        ):
            say(f"--prompt: {strangers}")
        if self.json:
            text = "".join(pieces)
            show_json(
                {"run": str(self.run), "prompt": self.prompt, "text": text, "seed": self.seed}
            )
            return OK
        show(self.prompt, end="")
        for piece in pieces:
            show(piece, end="")
        show()
        return OK


@dataclass(frozen=True)
class Show:
    """Show the settings, results and learning curves of one or more runs.

    $ zoneout show runs/ptb
    $ zoneout show runs/plain runs/zoneout --picture curves.png
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN …]")]
    """The folders of the runs."""
    picture: Path | None = None
    """Save the learning curves as a picture in this file: .png, .svg or .pdf."""
    json: Flag = False
    """Print settings and results as JSON."""

    def __call__(self) -> int:
        if not self.runs:
            raise ValueError("expected the folder of a run, as in `zoneout show runs/ptb`")
        plots.check_name(self.picture)
        pages = [describe(folder) for folder in self.runs]
        names = [str(folder) for folder in self.runs] if len(self.runs) > 1 else ["valid"]
        curves = [plots.read_curve(folder, name) for folder, name in zip(self.runs, names)]
        measure = next((curve.measure for curve in curves if curve.valid), "bits")
        strangers = [curve for curve in curves if curve.valid and curve.measure != measure]
        curves = [curve for curve in curves if curve not in strangers]
        for curve in strangers:
            unit, other = LABELS[measure], LABELS[curve.measure]
            say(
                f"{curve.name} is not drawn: its {other} does not go with {unit}, the unit of the "
                "other curves"
            )
        if self.json:
            show_json(pages if len(pages) > 1 else pages[0])
        else:
            show("\n\n".join(described(page) for page in pages))
            width = min(shutil.get_terminal_size((80, 24)).columns, 100)
            show(f"\n{LABELS[measure]}, validation:\n{plots.ascii_curves(curves, width)}")
        if self.picture is not None:
            with disk.explained(self.picture):
                plots.save(plots.figure(curves), self.picture)
            say(f"The picture is in {self.picture}")
        return OK


@dataclass(frozen=True)
class Data:
    """List, download or verify the corpora.

    $ zoneout data list
    $ zoneout data fetch char-ptb
    $ zoneout data verify --data my-folder
    """

    action: Annotated[Literal["list", "fetch", "verify"], tyro.conf.Positional]
    """list: show the corpora, and whether their files are on this machine.
    fetch: download the files that are missing or damaged.
    verify: read every file and compare its checksum.
    """
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME …]")] = ()
    """The names of the corpora. Without a name, list and verify apply to all corpora."""
    data: Folder = None
    """Search this folder first, then ZONEOUT_DATA and the cache.
    fetch: download to this folder instead of the cache.
    """
    json: Flag = False
    """Print the result as JSON."""

    def __call__(self) -> int:
        for name in self.names:
            datasets.known(name)
        return {"list": self.list, "fetch": self.fetch, "verify": self.verify}[self.action]()

    def list(self) -> int:
        """Print whether the files of each corpus are on this machine."""
        found = [
            status
            for status in datasets.listing(self.data)
            if status.dataset in (self.names or DATASETS)
        ]
        if self.json:
            return self.as_json(found)
        for name in self.names or DATASETS:
            states = {status.state for status in found if status.dataset == name}
            here = (
                "built in"
                if "built in" in states
                else "not here"
                if "missing" in states
                else "here"
            )
            show(f"{name:13} {here:9} {DATASETS[name].about}")
        return OK

    def verify(self) -> int:
        """Read the files of each corpus and print whether their contents are right."""
        found = [
            status for name in self.names or DATASETS for status in datasets.verify(name, self.data)
        ]
        # A missing file is an error only if its corpus was named.
        bad = [s for s in found if s.state == "damaged" or (s.state == "missing" and self.names)]
        if self.json:
            self.as_json(found)
        else:
            for status in found:
                show(f"{status.dataset:13} {status.state:9} {status.path or status.file}")
            for status in bad:
                say(f"zoneout data: {status.note}")
        return BAD_DATA if bad else OK

    def fetch(self) -> int:
        """Download the files that are missing or damaged."""
        if not self.names:
            raise ValueError(f"fetch: expected the name of a corpus, one of {', '.join(DATASETS)}")
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
        )
        got = []
        with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
            tasks: dict[str, Any] = {}

            def progress(name: str, here: int, total: int | None) -> None:
                if name not in tasks:
                    tasks[name] = bars.add_task(name, total=total)
                bars.update(tasks[name], completed=here, total=total)

            for name in self.names:
                got += [(name, *one) for one in download.fetch(name, self.data, progress=progress)]
        if self.json:
            show_json(
                [{"dataset": name, "path": str(path), "fetched": new} for name, path, new in got]
            )
            return OK
        for name, path, new in got:
            show(f"{name:13} {'fetched' if new else 'present':9} {path}")
        for name in self.names:
            if not DATASETS[name].files:
                show(f"{name:13} built in")
        return OK

    def as_json(self, found: Sequence[datasets.Status]) -> int:
        """Print the states of files as JSON."""
        show_json([{**asdict(one), "path": one.path and str(one.path)} for one in found])
        return OK


@dataclass(frozen=True)
class Sweep:
    """Train a grid of settings and seeds, here or on a Ray cluster.

    To continue an interrupted sweep, run the same command again.

    $ zoneout sweep --data my.txt --grid zoneout.cell=0,0.25,0.5 --seeds 3 --epochs 5
    $ zoneout sweep char_ptb_zoneout --grid zoneout.cell=0.25,0.5 --engine ray --gpus 0.25
    $ zoneout sweep --grid optimizer.lr=0.0001..0.01,log --search optuna --scheduler asha
    """

    recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RECIPE]")] = None
    """A recipe of `zoneout reproduce`, such as char_ptb_zoneout.
    Options that are not given have the recipe's values.
    """
    grid: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=A,B,…")
    ] = ()
    """A config field and its values. Every combination of the values of all --grid options is run.
    With --search also a range: NAME=LOW..HIGH, or NAME=LOW..HIGH,log for a logarithmic scale.
    """
    seeds: int = 1
    """Number of seeds for each combination; the first is --seed."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs/sweep")
    """The folder for the runs, the results and the HTML page.
    Runs that it already contains are not repeated.
    """
    engine: Literal["local", "ray"] | None = None
    """local: processes on this machine. ray: Ray, on this machine or on a cluster.
    By default ray if --address, --search or --scheduler is given, otherwise local.
    """
    address: Annotated[str | None, tyro.conf.arg(metavar="local|auto|HOST:PORT")] = None
    """local (the default): start Ray on this machine.
    auto: use the Ray cluster that this machine belongs to.
    HOST:PORT: use the Ray cluster at this address.
    """
    search: Literal["optuna"] | None = None
    """Let Optuna choose from the values and ranges of --grid, instead of running all of them."""
    scheduler: Literal["asha"] | None = None
    """Stop runs early if they are worse than others after the same amount of training."""
    trials: int | None = None
    """Only with --search: number of runs; by default 50."""
    parallel: int = 0
    """Number of runs at the same time; 0: one per GPU, or without a GPU one per CPU core.
    With Ray, 0: as many as fit into the cluster.
    """
    cpus: float | None = None
    """Only with Ray: number of CPU cores per run; by default 1."""
    gpus: float | None = None
    """Only with Ray: number of GPUs per run. With 0.25, four runs share one GPU.
    By default 1 if the cluster has GPUs and --device is not cpu, otherwise 0.
    """
    part: Annotated[str | None, tyro.conf.arg(metavar="K/N")] = None
    """Divide the runs into N parts and run only part K, so that N machines can share a sweep."""
    minutes: Annotated[float | None, tyro.conf.arg(metavar="M")] = None
    """Stop after this many minutes, with a checkpoint; the same command goes on. Not with Ray."""
    data: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE|DIR")] = None
    """A corpus (`zoneout data list` shows the names), a text file, or a data folder.
    In a data folder, the corpus or text of --data.name is used.
    """
    unpacked: Annotated[int | None, tyro.conf.arg(metavar="MIB")] = None
    """Maximum size of a compressed text after decompression, in MiB; by default 256."""
    json: Flag = False
    """Print the result of every run as JSON."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)

    def __call__(self) -> int:
        config, data = with_data(self.config, self.data)
        options = {
            name: getattr(self, name)
            for name in ("engine", "address", "search", "scheduler", "part")
        }
        options |= {name: getattr(self, name) for name in ("trials", "parallel", "cpus", "gpus")}
        options["minutes"] = math.inf if self.minutes is None else self.minutes
        rows = sweep.sweep(config, self.grid, self.seeds, self.out, data=data, say=say, **options)
        seeds = "1 seed" if self.seeds == 1 else f"{self.seeds} seeds"
        title = f"{self.recipe or config.data.name}: {', '.join(self.grid) or 'no grid'}, {seeds}"
        sweep_page.write(rows, self.out, title)
        if self.json:
            show_json([asdict(row) for row in rows])
        else:
            show(f"{sweep_page.table(rows)}\n\n{sweep_page.ending(rows, self.out)}")
        if any(row.why == "interrupted" for row in rows):
            return complain(
                "sweep", "interrupted; the same command goes on where this one stopped", INTERRUPTED
            )
        return FAILED if any(row.state == "failed" for row in rows) else OK


@dataclass(frozen=True)
class Figures:
    """Draw the paper's figures from the records of `zoneout reproduce`.

    $ zoneout figures
    $ zoneout figures rates gradient-flow --format pdf --out paper/figures
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME …]")] = ()
    """The names of the figures; by default all."""
    results: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results")
    """The folder with the records of `zoneout reproduce`."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("figures")
    """The folder for the figures."""
    format: Literal["svg", "pdf", "png"] = "svg"
    """svg: vector graphics for web pages. pdf: vector graphics for print. png: pixel graphics."""
    json: Flag = False
    """Print the files and the missing results as JSON."""

    def __call__(self) -> int:
        from ..report import figures  # needs matplotlib, whose import takes about a second

        made = figures.save_all(records_in(self.results), self.out, self.format, self.names)
        if self.json:
            show_json(
                [{"file": str(path), "text": d.text, "missing": d.missing} for path, d in made]
            )
            return OK
        for path, drawn in made:
            show(f"{path} (no results yet: {', '.join(drawn.missing)})" if drawn.missing else path)
        return OK


@dataclass(frozen=True)
class Report:
    """Write an HTML page: our results and the paper's, or several runs.

    $ zoneout report --out report.html
    $ zoneout report runs/plain runs/zoneout --out compared.html
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN …]")] = ()
    """The folders of the runs to compare.
    Without a run, the page compares our results with the paper's tables and figures.
    """
    out: Path = Path("report.html")
    """The HTML page. It needs no other file."""
    results: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results")
    """The folder with the records of `zoneout reproduce`."""
    benchmarks: Path = Path("benchmarks/results.csv")
    """The file with the speed measurements."""

    def __call__(self) -> int:
        from ..report import pages  # needs matplotlib, whose import takes about a second

        if self.out.suffix != ".html":  # so that a typing mistake cannot overwrite another file
            raise ValueError(f"--out: expected a name that ends in .html, got {self.out}")
        if self.runs:
            why = "a comparison of runs does not use it; leave it out"
            refuse_given(("results", "benchmarks"), self, lambda name: getattr(Report, name), why)
            page = pages.runs_page(self.runs)
        else:
            page = pages.paper_page(records_in(self.results), self.benchmarks)
        pages.write(self.out, page)
        show(f"The page is in {self.out}")
        return OK


COMMANDS: dict[str, type[Any]] = {
    "demo": Demo,
    "train": Train,
    "eval": Eval,
    "sample": Sample,
    "show": Show,
    "data": Data,
    "sweep": Sweep,
    "reproduce": Reproduce,
    "gradients": Gradients,
    "figures": Figures,
    "report": Report,
    "bench": Bench,
}


# --- shared by the commands -----------------------------------------------------------------------


def fitted(protocol: Protocol, size: int) -> Protocol:
    """Return the protocol for a text of `size` symbols: a chunk is at most as long as the text."""
    return (
        replace(protocol, length=min(protocol.length, size))
        if protocol.kind == "chunks"
        else protocol
    )


def with_data(
    config: Config, data: str | None, *, begun: bool = False
) -> tuple[Config, Path | None]:
    """Return the config with the corpus of --data, and the folder or file with the data (or None).

    Paths of texts are made absolute, so that a run can be continued from any working directory.
    `begun` is True when a run is continued. Its config already names its data, so another file in
    --data does not change the config: it is where the data are now.
    """
    path = None if data is None or data in DATASETS else datasets.expanded(data)
    if begun and path is not None and str(path.absolute()) != config.data.name:
        return _absolute_paths(config), path
    folder = None
    if path is not None and path.is_dir():
        folder, data = path, None
        if config.data.name in DATASETS and not DATASETS[config.data.name].files:
            raise ValueError(
                f"--data: {folder} is a folder; say which corpus of it is meant, as in --data.name "
                f"char-ptb ({config.data.name} is built in, and needs no folder)"
            )
    if data is not None:
        if not begun and config.data.name not in (Config().data.name, data, absolute_path(data)):
            raise ValueError(
                f"--data: {data} is not what --data.name says ({config.data.name}); give only one"
            )
        config = configs.change(config, {"data.name": data})
    return _absolute_paths(config, folder), folder


def _absolute_paths(config: Config, folder: Path | None = None) -> Config:
    plain = configs.to_json(config)
    given = {name: value for name in PATHS if (value := configs.at(plain, name)) is not None}
    found = {name: absolute_path(value, folder) for name, value in given.items()}
    check_apart(given.values(), found.values())
    return configs.change(config, found)


def records_in(results: Path) -> Path:
    """Return the folder `results`, or raise if it does not exist."""
    if not results.is_dir():
        raise ValueError(
            f"--results: there is no folder {results} with records of the paper's rows; use the "
            "folder results of a clone of the repository, or make records with `zoneout reproduce`"
        )
    return results


def complain(name: str, what: object, code: int) -> int:
    """Print an error of the command `name` on standard error and return the exit code."""
    if os.environ.get("ZONEOUT_TRACEBACK") and sys.exc_info()[0] is not None:
        say(traceback.format_exc().rstrip())
    say(
        f"zoneout{f' {name}' if name else ''}: "
        f"{disk.in_words(what) if isinstance(what, Exception) else what}"
    )
    return code
