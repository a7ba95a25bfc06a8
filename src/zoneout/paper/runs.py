"""A run is a folder.

    config.json         what the run is
    vocabulary.json     of a text, the symbols in the order of their numbers
    data.json           the digest of the data, by which they are known again
    metrics.jsonl       the truth: one line for every training loss, validation and test
    best.safetensors    the weights with the best validation
    last/NNNNNNNN/      the two latest checkpoints: weights, optimizer and everything else needed to continue
    summary.json        written when the run is finished

At any moment, whatever happens, what is under its own name is whole (see `disk`). Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from . import config as configs
from .config import Config
from .data import Vocabulary
from .disk import (
    RunError,
    bring_to_disk,
    check_fields,
    check_plain,
    clear_sides,
    digest_of,
    explained,
    fields_of,
    in_words,
    is_side,
    opened,
    own_folder,
    read_bytes,
    read_json,
    read_text,
    reason,
    replacing,
    tensor_digest,
    write_json,
    write_tensors,
    write_text,
)
from .measures import LABELS, measure_in
from .models import build, outline
from .streams import shown

try:
    import fcntl
except ImportError:  # not a Unix: there, nothing keeps two processes out of one folder
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
KEEP = 2  # checkpoints
ANYHOW = ("device", "log_every", "save_every")  # what a run may have otherwise and still be the same
LENGTH = ("epochs", "updates", "patience")  # a run that differs in these alone is the same, to be made longer
# When a run is continued: how long and where it runs, and what comes after training.
MAY_CHANGE = (
    *LENGTH, *ANYHOW,
    *(f"evaluation.{name}" for name in ("test.kind", "test.length", "test.size", "statistics", "statistics_size")),
)  # fmt: skip


class InUse(RunError):
    """Another process holds the folder."""


class Begun(RunError):
    """There is a run in the folder already."""


class Run:
    """The folder of a run, held by one process at a time."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.metrics = self.folder / "metrics.jsonl"
        self.last = self.folder / "last"
        self._lock: Any = None

    # --- opening ---

    def check_free(self) -> None:
        """An error if the folder holds anything already."""
        with explained(self.folder):
            there = {p.name for p in self.folder.iterdir()} if self.folder.exists() else set()
        if (self.folder / "config.json").exists():
            raise Begun(
                f"{self.folder} holds a run already; continue it with --resume, or choose another folder. "
                "Nothing was overwritten."
            )
        # A run that was killed while it was created has its lock and perhaps some of these, but no config yet.
        begun = {"lock", "metrics.jsonl", "vocabulary.json", "data.json", *filter(is_side, there)}
        strangers = there - begun if "lock" in there else there
        if strangers:
            raise RunError(
                f"{self.folder} is not empty and not a run (it holds {', '.join(sorted(strangers)[:3])}"
                f"{', …' if len(strangers) > 3 else ''}); choose another folder. Nothing was overwritten."
            )

    def create(
        self,
        config: Config,
        vocabulary: Vocabulary | None,
        digest: str | None = None,
        where: Path | str | None = None,
    ) -> None:
        """Begin a run in a folder that is not there yet, or is empty; the digest is of its data, found in `where`."""
        self.check_free()
        with explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.lock()
        self.check_free()  # another process may have been here between the two
        with explained(self.folder):
            clear_sides(self.folder)
            self.note_data(vocabulary, digest, where)
            opened(self.metrics, "ab").close()
            # Last: a folder with a config is a run.
            write_json(self.folder / "config.json", {"format": FORMAT, **configs.to_json(config)})

    def note_data(self, vocabulary: Vocabulary | None, digest: str | None, where: Path | str | None) -> None:
        """Write down what the data are: their symbols, their digest, and where somebody said that they lie."""
        if vocabulary is not None:
            write_text(self.folder / "vocabulary.json", vocabulary.to_json() + "\n")
        if digest is not None:
            place = read_place(self.folder) if where is None else str(Path(where).absolute())
            write_json(self.folder / "data.json", {"digest": digest} | ({"where": place} if place else {}))

    def open(self, config: Config | None = None) -> Config:
        """Hold a run to continue it; `config` may differ from its own only in how long and where it runs, and its test.

        Nothing is written before `go_on`.
        """
        own = read_config(self.folder)
        config = config or own
        ours, theirs = configs.to_json(own), configs.to_json(config)
        other = [n for n in configs.names() if configs.at(ours, n) != configs.at(theirs, n)]
        may = set(MAY_CHANGE)
        if own.schedule.kind == "cosine":  # whose learning rates depend on how long the run is
            may -= {"epochs", "updates"}
        if different := [n for n in other if n not in may]:
            shown = "; ".join(
                f"{n} is {configs.at(ours, n)!r} there and {configs.at(theirs, n)!r} here" for n in different[:3]
            )
            if not set(different) - set(MAY_CHANGE):
                shown += ", and with a cosine schedule every learning rate depends on how long the run is"
            raise RunError(
                f"{self.folder} holds another run: {shown}. Continue it without these options, or choose another "
                "folder. Nothing was overwritten."
            )
        if other:
            check_length(self.folder, config)
        if (self.folder / "summary.json").exists() and not self.checkpoints():
            raise RunError(
                f"{self.folder} has ended and its checkpoints (last/) are gone, so that it cannot be continued; begin "
                "it anew in another folder. Nothing was overwritten."
            )
        self.lock()
        return config

    def go_on(
        self,
        found: Checkpoint | None,
        config: Config,
        vocabulary: Vocabulary | None = None,
        digest: str | None = None,
        where: Path | str | None = None,
    ) -> None:
        """Make an open run one that goes on from the checkpoint that was found, or from its start: all that is written.

        It is no longer finished, its config is what it has become, its data are noted again, and what it wrote after
        the checkpoint is cut off. Whatever may still refuse it has to come before.
        """
        with explained(self.folder):
            for folder in (self.folder, self.last):
                clear_sides(folder)
            self.note_data(vocabulary, digest, where)
            (self.folder / "summary.json").unlink(missing_ok=True)
            if config != read_config(self.folder):
                write_json(self.folder / "config.json", {"format": FORMAT, **configs.to_json(config)})
            with opened(self.metrics, "ab") as file:
                file.truncate(0 if found is None else found.metrics_bytes)
        for folder in self.checkpoints():  # those after it would pass for later ones
            if found is None or int(folder.name) > int(found.folder.name):
                shutil.rmtree(folder, ignore_errors=True)

    def lock(self) -> None:
        """Keep other processes out until `close`; the system lets go when the process ends, however it ends."""
        with explained(self.folder):
            handle = opened(self.folder / "lock", "ab")
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.close()
            raise InUse(
                f"{self.folder} is in use by another process; wait for it, stop it, or choose another folder"
            ) from None
        self._lock = handle
        if self.last.is_symlink():  # in which checkpoints are removed, or what looks like some
            self.close()
            raise RunError(f"{self.last} is a symbolic link, and nothing is removed or written through one; remove it")

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # --- metrics ---

    def append(self, row: dict[str, Any]) -> None:
        """Add a line to the metrics."""
        with explained(self.folder), opened(self.metrics, "ab") as file:
            file.write(json.dumps(row, allow_nan=False).encode() + b"\n")

    def finish(self, summary: dict[str, Any]) -> None:
        """Say that the run is finished."""
        with explained(self.folder):
            write_json(self.folder / "summary.json", summary)

    # --- weights and checkpoints ---

    def save_best(self, model: nn.Module, info: dict[str, Any]) -> None:
        """Keep the weights as the best so far; `info` goes into the file."""
        with explained(self.folder):
            weights = {name: value.detach().cpu().contiguous() for name, value in weights_of(model).items()}
            sealed = {**info, "sha256": tensor_digest(weights, info)}
            write_tensors(self.folder / "best.safetensors", weights, sealed)

    def save(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write a checkpoint, which stands for the metrics as they are now, and drop all but the latest two."""
        with explained(self.folder):
            target = own_folder(self.last) / f"{state['update']:08d}"
            with opened(self.metrics, "ab") as file:
                os.fsync(file.fileno())
                length = file.tell()
            with replacing(target) as side:
                side.mkdir()
                write_tensors(side / "tensors.safetensors", tensors)
                page = {
                    "format": FORMAT,
                    "state": state,
                    "config_sha256": self.config_digest(),
                    "metrics_bytes": length,
                    "metrics_sha256": digest_of(self.metrics, length),
                    "tensors_sha256": digest_of(side / "tensors.safetensors"),
                }
                write_json(side / "state.json", page | {"sha256": _page_digest(page)})
                bring_to_disk(side)
                if target.exists():  # of an earlier try, damaged or from before a longer run
                    shutil.rmtree(target)
            for old in self.checkpoints()[KEEP:]:
                shutil.rmtree(old, ignore_errors=True)

    def config_digest(self) -> str:
        """Of the config as it is in the folder, but for what may change: a checkpoint belongs to it.

        Settings that are as they are by default do not count, so that a version with new ones can continue the run.
        """
        plain, usual = configs.to_json(read_config(self.folder)), configs.to_json(Config())
        own = {name: configs.at(plain, name) for name in configs.names() if name not in MAY_CHANGE}
        return _page_digest({name: value for name, value in own.items() if value != configs.at(usual, name)})

    def checkpoints(self) -> list[Path]:
        """The checkpoints that are there, the latest first."""
        found = self.last.iterdir() if self.last.is_dir() else ()
        return sorted((p for p in found if re.fullmatch("[0-9]+", p.name)), key=lambda p: int(p.name), reverse=True)

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The latest whole checkpoint, and a sentence for each damaged one that is later. Nothing is written.

        None where there is no checkpoint yet: the run begins again from the start, which gives the same.
        """
        problems = []
        found = None
        for folder in self.checkpoints():
            try:
                found = read_checkpoint(folder, self.metrics, self.config_digest())
                break
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                problems.append(f"the checkpoint {folder} is damaged ({in_words(error)}) and was passed over")
        if found is None and problems:
            raise RunError(
                f"{self.folder} cannot be continued: {'; '.join(problems)}. Begin it anew in another folder; "
                "best.safetensors can still be used. Nothing was overwritten."
            )
        return found, problems


@dataclass(frozen=True)
class Checkpoint:
    """What a run continues from."""

    folder: Path
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    metrics_bytes: int


def read_checkpoint(folder: Path, metrics: Path, config: str | None = None) -> Checkpoint:
    """A checkpoint, after every checksum has been compared; an error says what is wrong."""
    page = read_json(folder / "state.json")
    if page.get("format") != FORMAT:
        raise ValueError(f"state.json has format {page.get('format')!r}, expected {FORMAT}")
    if page.pop("sha256", None) != _page_digest(page):
        raise ValueError("state.json has been altered")
    check_fields(page, {"metrics_bytes": "count", "state": "fields"})
    check_fields(page["state"], {"update": "count", "epoch": "count"})
    if config is not None and page.get("config_sha256", config) != config:
        raise ValueError("config.json has been altered since")
    if digest_of(folder / "tensors.safetensors") != page["tensors_sha256"]:
        raise ValueError("tensors.safetensors does not have the checksum that was written down")
    if metrics.stat().st_size < page["metrics_bytes"]:
        raise ValueError("metrics.jsonl is shorter than it was then")
    if digest_of(metrics, page["metrics_bytes"]) != page["metrics_sha256"]:
        raise ValueError("metrics.jsonl has been altered since")
    tensors = load_file(folder / "tensors.safetensors")
    return Checkpoint(folder, tensors, page["state"], page["metrics_bytes"])


# --- what others read ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """A trained model and what belongs to it."""

    config: Config
    vocabulary: Vocabulary | None
    model: Any
    info: dict[str, Any]  # of the weights: update, epoch, valid


def load(
    folder: Path | str,
    *,
    weights: str = "best",
    device: torch.device | str = "cpu",
    changes: dict[str, Any] | None = None,
) -> Loaded:
    """The model of a run in evaluation mode, with its best or its last weights.

    `changes` to the config, by dotted name, say what is to be otherwise than in training: evaluation.at_eval, backend.
    """
    folder = Path(folder)
    config = configs.change(read_config(folder), changes or {})
    vocabulary = read_vocabulary(folder)
    if vocabulary is None and config.task != "images":
        raise RunError(f"{folder / 'vocabulary.json'} is missing, which says what the symbols of the run's text are")
    if weights == "best":
        tensors, info = read_tensors(folder / "best.safetensors")
    elif weights == "last":
        run = Run(folder)
        latest = next(iter(run.checkpoints()), None)
        if latest is None:
            raise RunError(f"{folder} has no checkpoint yet")
        try:
            checkpoint = read_checkpoint(latest, run.metrics)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise RunError(f"{latest} is damaged: {in_words(error)}") from None
        tensors = {n.removeprefix("model."): t for n, t in checkpoint.tensors.items() if n.startswith("model.")}
        info = {"update": checkpoint.state["update"], "epoch": checkpoint.state["epoch"]}
    else:
        raise ValueError(f"weights: expected 'best' or 'last', got {weights!r}")
    symbols = 0 if vocabulary is None else len(vocabulary)
    try:
        planned = outline(config, symbols)  # before anything is made for a config that may be absurd
    except ValueError as error:
        raise RunError(f"{folder / 'config.json'}: {error}") from None
    check_weights(planned, tensors, folder)
    model = build(config, symbols)
    load_weights(model, tensors, folder)
    return Loaded(config, vocabulary, model.to(device).eval(), info)


def read_config(folder: Path | str) -> Config:
    """The config of a run."""
    path = Path(folder) / "config.json"
    if not path.exists():
        page = path.with_name("index.html")
        if page.exists() and path.with_name("results.json").exists():
            raise RunError(f"{folder} is not a run but a sweep: its page is {page}, and its runs are the folders in it")
        if not path.parent.exists():
            raise ValueError(f"there is no folder {folder}")
        raise RunError(f"{folder} is not a run: there is no config.json in it")
    try:
        values = read_json(path)
        if values.pop("format", FORMAT) != FORMAT:
            raise ValueError(f"it was written by another version of zoneout (expected format {FORMAT})")
        return configs.from_json(values)
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path} cannot be read: {reason(error)}") from None


def read_vocabulary(folder: Path | str) -> Vocabulary | None:
    """The symbols of a run's text; None for images."""
    path = Path(folder) / "vocabulary.json"
    try:
        return Vocabulary.from_json(read_text(path)) if path.exists() else None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {reason(error)}") from None


def read_summary(folder: Path | str) -> dict[str, Any] | None:
    """How a run ended; None where it has not."""
    path = Path(folder) / "summary.json"
    if not path.exists():
        return None
    try:
        summary = read_json(path)
        check_fields(summary, SUMMARY)
        for name in ("best", "test"):
            if summary.setdefault(name, None) is not None:
                check_line(summary[name])
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {reason(error)}") from None
    return summary


def check_length(folder: Path | str, config: Config) -> None:
    """An error where a run has had more training than the config allows: it can be made longer, and never shorter."""
    update, epochs = trained(folder)
    asked = None
    if epochs > config.epochs:
        asked = f"--epochs {config.epochs}"
    elif 0 < config.updates < update:
        asked = f"--updates {config.updates}"
    elif 0 < config.patience <= (stale := waited(folder)):
        asked = f"--patience {config.patience} (it went on after {stale} validations without a new best)"
    if asked is not None:
        raise RunError(
            f"{folder} has had {update:,} updates in {epochs:,} epochs already, which is more than {asked}: ask for as "
            "long or longer, or choose another folder with --out. Nothing was overwritten."
        )


def waited(folder: Path | str) -> int:
    """After how many validations without a new best a run went on, at most: with such patience it had ended there."""
    most = stale = 0
    for row in read_metrics(folder):
        if row["kind"] == "valid":
            most, stale = max(most, stale), 0 if row["best"] else stale + 1
    return most


def trained(folder: Path | str) -> tuple[int, int]:
    """How many updates a run that is continued has had, and in how many epochs, the last of them complete or not."""
    for checkpoint in Run(folder).checkpoints():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # damaged: it is passed over
            state = read_json(checkpoint / "state.json")["state"]
            return int(state["update"]), int(state["epoch"]) + (state["done"] > 0)
    ended = read_summary(folder) or {}
    return ended.get("update", 0), math.ceil(ended.get("epoch", 0))


def read_digest(folder: Path | str) -> str | None:
    """The digest of the data that a run was begun with; None where nothing tells it any more."""
    path = Path(folder) / "data.json"
    try:
        if path.exists():
            return str(read_json(path)["digest"])
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{path} cannot be read: {reason(error)}") from None
    for checkpoint in Run(folder).checkpoints():  # where alone early versions noted it
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(read_json(checkpoint / "state.json")["state"]["digest"])
    return None


def read_place(folder: Path | str) -> str | None:
    """Where a run's data were when somebody last said so."""
    with contextlib.suppress(OSError, ValueError):
        place = read_json(Path(folder) / "data.json").get("where")
        return place if isinstance(place, str) else None
    return None


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """The lines of a run's metrics; one that was cut off by a crash is left out."""
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        raise RunError(f"{folder} is not a run: there is no metrics.jsonl in it")
    try:
        lines = read_bytes(path).split(b"\n")[:-1]
    except OSError as error:
        raise RunError(f"{path} cannot be read: {reason(error)}") from None
    rows: list[dict[str, Any]] = []
    measures: set[str] = set()
    for number, line in enumerate(lines, 1):
        try:
            row = fields_of(line.decode())
        except ValueError:
            raise RunError(f"{path} is damaged: line {number} is not JSON with named fields") from None
        try:
            check_line(row)
        except ValueError as error:
            raise RunError(f"{path} is damaged: line {number}: {error}") from None
        rows.append(row)
        measures.update(name for name in LABELS if name in row)
    if len(measures) > 1:
        raise RunError(f"{path} is damaged: its lines are in {' and '.join(sorted(measures))}")
    return rows


SUMMARY = {"status": "text", "update": "count", "epoch": "number", "parameters": "count", "seconds": "number"}
LINE = {"kind": "text", "update": "count", "epoch": "number"}
NUMBERS = dict.fromkeys((*LABELS, "nats", "lr"), "number")


def check_line(row: Any) -> None:
    """A ValueError where a line of the metrics is not one."""
    if not isinstance(row, dict):
        raise ValueError(f"expected named fields in braces, got {type(row).__name__}")
    judged = row.get("kind") in ("valid", "test")
    also = {"best": "flag"} if row.get("kind") == "valid" else {"nats": "number"} if row.get("kind") == "train" else {}
    check_fields(row, LINE | also, NUMBERS | {"predictions": "count"})
    if judged and measure_in(row) is None:
        raise ValueError(f"there is no field {' or '.join(map(repr, LABELS))} in it")
    for name, value in row.items():
        if isinstance(value, (list, dict)):
            raise ValueError(f"{shown(name)}: expected a number or a text, got {shown(value)}")


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and what was written beside them."""
    if not path.exists():
        lost = (path.parent / "summary.json").exists()
        why = "they were there when the run ended" if lost else "the run has no best weights yet"
        raise RunError(f"{path} is not there: {why}")
    try:
        from safetensors import safe_open

        check_plain(path)
        with safe_open(path, "pt") as file:
            info = fields_of((file.metadata() or {}).get("info", "{}"))
        check_fields(info, {}, {"update": "count", "epoch": "number"})
        tensors, sealed = load_file(path), info.pop("sha256", None)
        if sealed is not None and sealed != tensor_digest(tensors, info):
            raise ValueError("it does not have the checksum that was written down")
        return tensors, info
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise RunError(
            f"{path} is damaged: {reason(error)}; only a new run, in another folder, can give these weights"
        ) from None


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and statistics by name, each tensor once (a tied softmax shares the embedding's)."""
    seen: dict[int, str] = {}
    return {
        name: value.detach()
        for name, value in model.state_dict(keep_vars=True).items()
        if seen.setdefault(id(value), name) == name
    }


def load_weights(model: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """Put weights into a model, or say what does not fit."""
    check_weights(model, tensors, where)
    own = weights_of(model)
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(value)


def check_weights(model: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """An error where weights are not a model's, or not numbers."""
    own = weights_of(model)
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    both = sorted(own.keys() & tensors.keys())
    shapes = [n for n in both if own[n].shape != tensors[n].shape]
    types = [n for n in both if own[n].dtype != tensors[n].dtype]
    wrong = {"missing": missing, "not known": extra, "other shape": shapes, "other type": types}
    if any(wrong.values()):
        said = ", ".join(f"{what}: {shown(names)}" for what, names in wrong.items())
        raise RunError(f"the weights in {where} do not fit its config ({said})")
    check_finite(tensors, where)


def check_finite(tensors: dict[str, Tensor], where: Path) -> None:
    """An error where a weight is not a finite number: nothing that is saved has any."""
    if bad := [name for name, value in tensors.items() if not value.isfinite().all()]:
        raise RunError(f"the weights in {where} are damaged: {shown(sorted(bad))} have numbers that are not finite")


def _page_digest(page: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(page, sort_keys=True).encode()).hexdigest()
