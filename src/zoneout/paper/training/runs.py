"""The folder of a run: reading, writing, checkpoints.

    config.json         the config of the run
    vocabulary.json     for a text: the symbols in the order of their numbers
    data.json           the digest of the data, which shows later whether the data have changed
    metrics.jsonl       all results: one line for every training loss, validation and test
    best.safetensors    the weights with the best validation, as of the latest checkpoint or later
    last/NNNNNNNN/      the two latest checkpoints: weights, optimizer and all else to continue
    summary.json        written when the run is finished

A file with its final name is always complete, even if the process is killed (see `disk`). Nothing
is ever unpickled.
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

from ..console import shown
from ..data.corpora import Vocabulary
from ..disk import (
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
from . import config as configs
from .config import Config
from .measures import LABELS, measure_in
from .models import build, outline

try:
    import fcntl
except ImportError:  # not a Unix system: the folder is not locked against other processes
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
KEEP = 2  # checkpoints
ANYHOW = ("device", "log_every", "save_every")  # fields that do not change what a run computes
LENGTH = ("epochs", "updates", "patience")  # fields that can change to make a run longer
# Fields that may change when a run is continued: where and how long it runs, and its test.
MAY_CHANGE = (
    *LENGTH,
    *ANYHOW,
    *(
        f"evaluation.{name}"
        for name in (
            "test.kind",
            "test.length",
            "test.size",
            "skip_test",
            "statistics",
            "statistics_size",
        )
    ),
)


class InUse(RunError):
    """Another process has locked the folder."""


class Begun(RunError):
    """The folder already contains a run."""


class Run:
    """The folder of a run, locked by one process at a time."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.metrics = self.folder / "metrics.jsonl"
        self.last = self.folder / "last"
        self._lock: Any = None

    # --- opening ---

    def check_free(self) -> None:
        """Raise if the folder already contains something."""
        with explained(self.folder):
            names = {p.name for p in self.folder.iterdir()} if self.folder.exists() else set()
        if (self.folder / "config.json").exists():
            raise Begun(
                f"{self.folder} holds a run already; continue it with --resume, or choose another "
                "folder. Nothing was overwritten."
            )
        # A run that was killed during `create` left a lock and perhaps some of these files, but no
        # config.
        unfinished = {
            "lock",
            "metrics.jsonl",
            "vocabulary.json",
            "data.json",
            *filter(is_side, names),
        }
        foreign = names - unfinished if "lock" in names else names
        if foreign:
            raise RunError(
                f"{self.folder} is not empty and not a run (it holds "
                f"{', '.join(sorted(foreign)[:3])}{', …' if len(foreign) > 3 else ''}); choose "
                "another folder. Nothing was overwritten."
            )

    def create(
        self,
        config: Config,
        vocabulary: Vocabulary | None,
        digest: str | None = None,
        where: Path | str | None = None,
    ) -> None:
        """Start a run in a new or empty folder.

        `digest` is the digest of the run's data. `where` is the place of the data, if the user
        gave it.
        """
        self.check_free()
        with explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.lock()
        self.check_free()  # another process may have started a run before the folder was locked
        with explained(self.folder):
            clear_sides(self.folder)
            self.note_data(vocabulary, digest, where)
            opened(self.metrics, "ab").close()
            # The config is written last, because a folder with a config counts as a run.
            write_json(self.folder / "config.json", {"format": FORMAT, **configs.to_json(config)})

    def note_data(
        self, vocabulary: Vocabulary | None, digest: str | None, where: Path | str | None
    ) -> None:
        """Write the vocabulary and the digest of the data, and their place if the user gave it."""
        if vocabulary is not None:
            write_text(self.folder / "vocabulary.json", vocabulary.to_json() + "\n")
        if digest is not None:
            place = read_place(self.folder) if where is None else str(Path(where).absolute())
            write_json(
                self.folder / "data.json", {"digest": digest} | ({"where": place} if place else {})
            )

    def open(self, config: Config | None = None) -> Config:
        """Lock a run to continue it, and return the config to continue with.

        `config` may differ from the run's config only in where and how long it runs, and in its
        test. Nothing is written until `go_on`.
        """
        own = read_config(self.folder)
        config = config or own
        ours, theirs = configs.to_json(own), configs.to_json(config)
        other = [n for n in configs.names() if configs.at(ours, n) != configs.at(theirs, n)]
        may = set(MAY_CHANGE)
        if own.schedule.kind == "cosine":  # the learning rates depend on the length of the run
            may -= {"epochs", "updates"}
        if different := [n for n in other if n not in may]:
            shown = different[:3]
            expected, got = (
                ", ".join(repr(configs.at(one, n)) for n in shown) for one in (ours, theirs)
            )
            why = "leave that out"
            if set(different) <= set(MAY_CHANGE):
                why = (
                    "with a cosine schedule every learning rate depends on the length of the run; "
                    f"{why}"
                )
            raise RunError(
                f"{', '.join(shown)}: expected {expected} as in {self.folder}, got {got}; {why} or "
                "choose another folder. Nothing was overwritten."
            )
        if other:
            check_length(self.folder, config)
        if (self.folder / "summary.json").exists() and not self.checkpoints():
            raise RunError(
                f"{self.folder} has ended and its checkpoints (last/) are gone, so it cannot be "
                "continued; start a new run in another folder. Nothing was overwritten."
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
        """Write everything that has to change to continue an open run from a checkpoint.

        The summary is deleted, the config is updated, and the data are noted again. Metrics and
        checkpoints after the checkpoint are deleted. `found` is None to continue from the start.
        Call this last: every check that can refuse the run has to come before.
        """
        with explained(self.folder):
            for folder in (self.folder, self.last):
                clear_sides(folder)
            self.note_data(vocabulary, digest, where)
            (self.folder / "summary.json").unlink(missing_ok=True)
            if config != read_config(self.folder):
                write_json(
                    self.folder / "config.json", {"format": FORMAT, **configs.to_json(config)}
                )
            with opened(self.metrics, "ab") as file:
                file.truncate(0 if found is None else found.metrics_bytes)
        for folder in self.checkpoints():  # later checkpoints are no longer part of the run
            if found is None or int(folder.name) > int(found.folder.name):
                shutil.rmtree(folder, ignore_errors=True)

    def lock(self) -> None:
        """Lock the folder until `close`. The system unlocks it when the process ends in any way."""
        with explained(self.folder):
            handle = opened(self.folder / "lock", "ab")
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.close()
            raise InUse(
                f"{self.folder} is in use by another process; wait for it, stop it, or choose "
                "another folder"
            ) from None
        self._lock = handle
        # Old checkpoints in `last` are deleted. In another folder, other things may look like them.
        if self.last.is_symlink():
            self.close()
            raise RunError(
                f"{self.last} is a symbolic link, and nothing is removed or written through one; "
                "remove it"
            )

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # --- metrics ---

    def append(self, row: dict[str, Any]) -> None:
        """Append a line to the metrics."""
        with explained(self.folder), opened(self.metrics, "ab") as file:
            file.write(json.dumps(row, allow_nan=False).encode() + b"\n")

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, which marks the run as finished."""
        with explained(self.folder):
            write_json(self.folder / "summary.json", summary)

    # --- weights and checkpoints ---

    def save_best(self, weights: dict[str, Tensor], info: dict[str, Any]) -> None:
        """Save the weights as the best so far; `info` is stored in the same file."""
        with explained(self.folder):
            weights = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
            sealed = {**info, "sha256": tensor_digest(weights, info)}
            write_tensors(self.folder / "best.safetensors", weights, sealed)

    def save(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write a checkpoint that belongs to the current metrics; delete all but the latest two."""
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
                if target.exists():  # damaged, or written before the run was made longer
                    shutil.rmtree(target)
            for old in self.checkpoints()[KEEP:]:
                shutil.rmtree(old, ignore_errors=True)

    def config_digest(self) -> str:
        """Return the digest of the fields in config.json that may not change, for the checkpoints.

        A version with new fields or new defaults can continue the run (see `configs.identity`).
        """
        own = configs.identity(read_config(self.folder))
        return _page_digest({name: own[name] for name in own if name not in MAY_CHANGE})

    def checkpoints(self) -> list[Path]:
        """Return the folders of the checkpoints, the latest first."""
        paths = self.last.iterdir() if self.last.is_dir() else ()
        return sorted(
            (p for p in paths if re.fullmatch("[0-9]+", p.name)),
            key=lambda p: int(p.name),
            reverse=True,
        )

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the latest intact checkpoint, and a sentence for each later one that is damaged.

        The checkpoint is None if there is none yet. The run then starts again from the beginning,
        which gives the same result. Nothing is written.
        """
        problems = []
        found = None
        for folder in self.checkpoints():
            try:
                found = read_checkpoint(folder, self.metrics, self.config_digest())
                break
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                problems.append(
                    f"the checkpoint {folder} is damaged ({in_words(error)}) and was skipped"
                )
        if found is None and problems:
            raise RunError(
                f"{self.folder} cannot be continued: {'; '.join(problems)}. Start a new run in "
                "another folder; best.safetensors can still be used. Nothing was overwritten."
            )
        return found, problems


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, from which a run can continue."""

    folder: Path
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    metrics_bytes: int


def read_checkpoint(folder: Path, metrics: Path, config: str | None = None) -> Checkpoint:
    """Read a checkpoint and compare all its checksums; raise an error that says what is wrong."""
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
        raise ValueError("tensors.safetensors does not match its recorded checksum")
    if metrics.stat().st_size < page["metrics_bytes"]:
        raise ValueError("metrics.jsonl is shorter than when the checkpoint was written")
    if digest_of(metrics, page["metrics_bytes"]) != page["metrics_sha256"]:
        raise ValueError("metrics.jsonl has been altered since")
    tensors = load_file(folder / "tensors.safetensors")
    return Checkpoint(folder, tensors, page["state"], page["metrics_bytes"])


# --- reading a run --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """A trained model, with its config and its vocabulary."""

    config: Config
    vocabulary: Vocabulary | None
    model: Any
    info: dict[str, Any]  # about the weights: update, epoch, valid


def load(
    folder: Path | str,
    *,
    weights: str = "best",
    device: torch.device | str = "cpu",
    changes: dict[str, Any] | None = None,
) -> Loaded:
    """Load the model of a run in evaluation mode, with its best or its last weights.

    `changes` replaces fields of the config by dotted name, such as evaluation.at_eval or backend,
    that are to differ from training.
    """
    folder = Path(folder)
    config = configs.change(read_config(folder), changes or {})
    vocabulary = read_vocabulary(folder)
    if vocabulary is None and config.task != "images":
        raise RunError(
            f"{folder / 'vocabulary.json'} is missing; it lists the symbols of the run's text"
        )
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
        tensors = {
            n.removeprefix("model."): t
            for n, t in checkpoint.tensors.items()
            if n.startswith("model.")
        }
        info = {"update": checkpoint.state["update"], "epoch": checkpoint.state["epoch"]}
    else:
        raise ValueError(f"weights: expected 'best' or 'last', got {weights!r}")
    symbols = 0 if vocabulary is None else len(vocabulary)
    try:
        # The outline needs no memory for weights: a config that was edited may ask for too much.
        planned = outline(config, symbols)
    except ValueError as error:
        raise RunError(f"{folder / 'config.json'}: {error}") from None
    check_weights(planned, tensors, folder)
    model = build(config, symbols)
    load_weights(model, tensors, folder)
    return Loaded(config, vocabulary, model.to(device).eval(), info)


def read_config(folder: Path | str) -> Config:
    """Read the config of a run."""
    path = Path(folder) / "config.json"
    if not path.exists():
        page = path.with_name("index.html")
        if page.exists() and path.with_name("results.json").exists():
            raise RunError(
                f"{folder} is not a run but a sweep: its page is {page}, and each folder in it is "
                "a run"
            )
        if not path.parent.exists():
            raise ValueError(f"there is no folder {folder}")
        raise RunError(f"{folder} is not a run: there is no config.json in it")
    try:
        values = read_json(path)
        if values.pop("format", FORMAT) != FORMAT:
            raise ValueError(
                f"it was written by another version of zoneout (expected format {FORMAT})"
            )
        return configs.from_json(values)
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path} cannot be read: {reason(error)}") from None


def read_vocabulary(folder: Path | str) -> Vocabulary | None:
    """Read the vocabulary of a run; None for images."""
    path = Path(folder) / "vocabulary.json"
    try:
        return Vocabulary.from_json(read_text(path)) if path.exists() else None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {reason(error)}") from None


def read_summary(folder: Path | str) -> dict[str, Any] | None:
    """Read the summary of a run; None if the run has not finished."""
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
    """Raise if a run has had more training than the config allows: runs can only get longer."""
    update, epochs = trained(folder)
    asked = None
    if epochs > config.epochs:
        asked = f"--epochs {config.epochs}"
    elif 0 < config.updates < update:
        asked = f"--updates {config.updates}"
    elif 0 < config.patience <= (stale := waited(folder)):
        asked = (
            f"--patience {config.patience} (it went on after {stale} validations without a new "
            "best)"
        )
    if asked is not None:
        raise RunError(
            f"{folder} has had {update:,} updates in {epochs:,} epochs already, which is more than "
            f"{asked}: ask for as long or longer, or choose another folder with --out. Nothing was "
            "overwritten."
        )


def waited(folder: Path | str) -> int:
    """Return the most validations without a new best after which a run still went on.

    With that number as its patience, the run would have ended there.
    """
    most = stale = 0
    for row in read_metrics(folder):
        if row["kind"] == "valid":
            most, stale = max(most, stale), 0 if row["best"] else stale + 1
    return most


def trained(folder: Path | str) -> tuple[int, int]:
    """Return the updates and epochs that a run has had; an incomplete epoch counts as one."""
    for checkpoint in Run(folder).checkpoints():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # skip damaged ones
            state = read_json(checkpoint / "state.json")["state"]
            return int(state["update"]), int(state["epoch"]) + (state["done"] > 0)
    ended = read_summary(folder) or {}
    return ended.get("update", 0), math.ceil(ended.get("epoch", 0))


def read_digest(folder: Path | str) -> str | None:
    """Return the digest of the data that a run was started with; None if it is not recorded."""
    path = Path(folder) / "data.json"
    try:
        if path.exists():
            return str(read_json(path)["digest"])
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{path} cannot be read: {reason(error)}") from None
    for checkpoint in Run(folder).checkpoints():  # early versions recorded it only there
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(read_json(checkpoint / "state.json")["state"]["digest"])
    return None


def read_place(folder: Path | str) -> str | None:
    """Return the place of a run's data that the user gave last; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        place = read_json(Path(folder) / "data.json").get("where")
        return place if isinstance(place, str) else None
    return None


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """Read the lines of a run's metrics, without a last line that a crash cut off."""
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
            raise RunError(
                f"{path} is damaged: line {number} is not JSON with named fields"
            ) from None
        try:
            check_line(row)
        except ValueError as error:
            raise RunError(f"{path} is damaged: line {number}: {error}") from None
        rows.append(row)
        measures.update(name for name in LABELS if name in row)
    if len(measures) > 1:
        raise RunError(
            f"{path} is damaged: its lines have different measures, "
            f"{' and '.join(sorted(measures))}"
        )
    return rows


SUMMARY = {
    "status": "text",
    "update": "count",
    "epoch": "number",
    "parameters": "count",
    "seconds": "number",
}
LINE = {"kind": "text", "update": "count", "epoch": "number"}
NUMBERS = dict.fromkeys((*LABELS, "nats", "lr"), "number")


def check_line(row: Any) -> None:
    """Raise a ValueError if `row` is not a valid line of the metrics."""
    if not isinstance(row, dict):
        raise ValueError(f"expected named fields in braces, got {type(row).__name__}")
    judged = row.get("kind") in ("valid", "test")
    also = (
        {"best": "flag"}
        if row.get("kind") == "valid"
        else {"nats": "number"}
        if row.get("kind") == "train"
        else {}
    )
    check_fields(row, LINE | also, NUMBERS | {"predictions": "count"})
    if judged and measure_in(row) is None:
        raise ValueError(f"there is no field {' or '.join(map(repr, LABELS))} in it")
    for name, value in row.items():
        if isinstance(value, (list, dict)):
            raise ValueError(f"{shown(name)}: expected a number or a text, got {shown(value)}")


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read weights and the information stored with them."""
    if not path.exists():
        lost = (path.parent / "summary.json").exists()
        why = "it existed when the run ended" if lost else "the run has no best weights yet"
        raise RunError(f"{path} does not exist: {why}")
    try:
        from safetensors import safe_open

        check_plain(path)
        with safe_open(path, "pt") as file:
            info = fields_of((file.metadata() or {}).get("info", "{}"))
        check_fields(info, {}, {"update": "count", "epoch": "number"})
        tensors, sealed = load_file(path), info.pop("sha256", None)
        if sealed is not None and sealed != tensor_digest(tensors, info):
            raise ValueError("it does not match its recorded checksum")
        return tensors, info
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise RunError(
            f"{path} is damaged: {reason(error)}; only a new run, in another folder, can give "
            "these weights"
        ) from None


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and statistics by name, each tensor once.

    A tied softmax and the embedding are one tensor.
    """
    seen: dict[int, str] = {}
    return {
        name: value.detach()
        for name, value in model.state_dict(keep_vars=True).items()
        if seen.setdefault(id(value), name) == name
    }


def load_weights(model: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """Copy weights into a model; raise an error that says what does not fit."""
    check_weights(model, tensors, where)
    own = weights_of(model)
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(value)


def check_weights(model: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """Raise if weights do not fit a model, or are not finite."""
    own = weights_of(model)
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    both = sorted(own.keys() & tensors.keys())
    shapes = [n for n in both if own[n].shape != tensors[n].shape]
    types = [n for n in both if own[n].dtype != tensors[n].dtype]
    wrong = {"missing": missing, "unknown": extra, "other shape": shapes, "other type": types}
    if any(wrong.values()):
        details = ", ".join(f"{what}: {shown(names)}" for what, names in wrong.items())
        raise RunError(f"the weights in {where} do not fit its config ({details})")
    check_finite(tensors, where)


def check_finite(tensors: dict[str, Tensor], where: Path) -> None:
    """Raise if a weight is not finite: training never saves such weights, so it is damage."""
    if bad := [name for name, value in tensors.items() if not value.isfinite().all()]:
        raise RunError(
            f"the weights in {where} are damaged: {shown(sorted(bad))} contain numbers that are "
            "not finite"
        )


def _page_digest(page: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(page, sort_keys=True).encode()).hexdigest()
