"""Training: one loop.

Everything random is a function of the run's seed and of the place where it is used. Weights depend
on the seed, the order of the data on (seed, epoch), and masks on (seed, update) and the row in the
whole batch. A run that is continued, or shared by several processes, therefore computes the same
as an uninterrupted run in one process. There is no generator state to save.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..console import shown
from ..data import corpora as corpora
from ..data.corpora import Corpus, Images
from ..data.datasets import DataError, MissingError
from ..disk import RunError, check_fields
from . import runs
from .config import Config
from .evaluate import (
    Diverged,
    Score,
    choose_temperature,
    estimate_statistics,
    evaluate,
    predictions,
)
from .feeds import make_feed
from .measures import measure_of
from .models import build, check, parameters_of
from .processes import Processes, join, memory_explained
from .runs import Run
from .step import Step

Progress = Callable[[dict[str, Any]], None]

TRAINING = 10_000  # training images of the training error
LARGE = 5_000  # examples in a batch of `statistics_also`
RUNNING, BY_LARGE = "by_running_averages", "by_large_batches"  # fields of `statistics_also`
ALSO = ("train_error", RUNNING, BY_LARGE)  # other scores in the line of a validation
SAVE_SECONDS = 300.0  # at most this much training is lost with a killed process


class Stopped(Exception):
    """The run was asked to stop."""


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    folder: str
    status: str  # "finished", "patience" (no new best for too long) or "interrupted"
    measure: str  # "bits", "perplexity" or "error"
    update: int
    epoch: float
    best: dict[str, Any] | None  # the metrics line of the best validation
    test: dict[str, Any] | None  # the metrics line of the test with these weights
    parameters: int
    seconds: float


@dataclass
class State:
    """The position of a run: everything in a checkpoint that is not a tensor."""

    digest: str  # of the data
    update: int = 0
    epoch: int = 0  # complete epochs
    done: int = 0  # updates in the current, incomplete epoch
    validated: int = 0  # the update of the latest validation
    stale: int = 0  # validations since the best
    plateaus: int = 0  # how often the schedule "plateau" has divided the learning rate
    waited: int = 0  # validations since the best, or since the rate was divided
    averaging: bool = False  # whether the weights are averaged
    # Losses of validations: the lowest of all but the latest `average_after`, and these.
    losses: list[float] = field(default_factory=list)
    best: dict[str, Any] | None = None
    seconds: float = 0.0

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> State:
        """Read a state that `asdict` wrote; raise a ValueError if it is not valid."""
        counts = dict.fromkeys((f.name for f in fields_of(cls) if f.type == "int"), "count")
        others = {"seconds": "number", "averaging": "flag", "losses": "numbers"}
        check_fields(fields, {"digest": "text"}, counts | others)
        if strange := fields.keys() - vars(cls("")).keys():
            raise ValueError(f"the checkpoint has unknown fields: {shown(sorted(strange))}")
        if fields.get("best") is not None:
            runs.check_line(fields["best"])
        return cls(**fields)


def train(
    config: Config | None,
    folder: Path | str,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    data: Path | str | None = None,
    deadline: float = math.inf,
) -> Summary:
    """Train a model in a new folder, or continue the run in the folder (`resume`).

    `config` may be None with `resume`. `data` is a folder to look for the data in; when a run is
    continued, it may also be the new path of a text that has moved. At `deadline` (a time of
    `time.monotonic`) the run stops as if it had been interrupted: with a checkpoint, from which it
    can be continued.

    `progress` is called with a dict for every event. With several processes, only the first one
    calls it. The "kind" of the event says which other fields it has:

        "start"                   update, updates, epochs, data, parameters, device, measure, folder
        "step"                    update, epoch, and on a CPU nats
        "train", "valid", "test"  the fields of the metrics line
        "save"                    update
        "note"                    text
        "end"                     the fields of the summary
    """
    if config is None and not resume:
        raise ValueError(
            "config: expected a Config, got None; None is for resume=True, which uses the run's "
            "config"
        )
    run = Run(folder)
    processes = join((config or runs.read_config(folder)).device)
    try:
        if resume and processes.first:
            config = run.open(config)
        config = processes.share(config)
        assert config is not None
        tell = progress if progress is not None and processes.first else lambda event: None
        with memory_explained():
            return Training(config, run, resume, tell, data, processes, deadline)()
    finally:
        run.close()


class Training:
    """A run in progress."""

    def __init__(
        self,
        config: Config,
        run: Run,
        resume: bool,
        progress: Progress,
        data: Path | str | None,
        processes: Processes,
        deadline: float,
    ) -> None:
        self.deadline = deadline
        self.began = self.saved = time.monotonic()
        self.changed = False  # since the last checkpoint
        # The best weights and the line of their validation, until they are written.
        self.best: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self.config, self.run, self.tell, self.processes = config, run, progress, processes
        device = processes.device
        if config.precision == "tf32" and device.type != "cuda":
            raise ValueError(
                "precision: tf32 is there on NVIDIA GPUs only; use fp32, bf16 or fp16 on this "
                "device"
            )

        if not resume and processes.first:
            run.check_free()  # before the slow steps
        self.data = data_of(run.folder, config, data) if resume else load_data(config, data)
        check_protocols(config, self.data)
        vocabulary = self.data.vocabulary if isinstance(self.data, Corpus) else None
        self.measure = measure_of(self.data)
        symbols = len(vocabulary) if vocabulary else 0
        check(config, symbols)
        check(config, symbols, device, copies=2)  # at least the weights and their gradients
        self.model = build(config, symbols).to(device)
        self.feed = make_feed(config, self.data, device, processes.rank, processes.size)
        check_statistics(config, self.data)
        self.step = Step(self.model, self.feed, config, processes)
        self.parameters = sum(p.numel() for p in parameters_of(self.model).values())
        self.state = State(self.data.digest)
        found = self.restore() if resume else None
        self.earlier = self.state.seconds
        # `updates` is the number of updates in this epoch.
        self.updates = self.begin_epoch()
        if not self.over():  # a run that lacks only its test needs no graph
            self.step.capture()
        # The folder is changed last, so an error above leaves it as it was.
        if processes.first and resume:
            run.go_on(found, config, vocabulary, self.data.digest, data)
        elif processes.first:
            run.create(config, vocabulary, self.data.digest, data)

    def __call__(self) -> Summary:
        """Train, validate when due, and test; return the summary."""
        state, config, deadline = self.state, self.config, self.deadline
        total = self.feed.total()
        self.tell(
            {
                "kind": "start",
                "update": state.update,
                "updates": min(total, config.updates or total),
                "epochs": config.epochs,
                "data": in_words(config, self.data),
                "parameters": self.parameters,
                "device": str(self.processes.device),
                "measure": self.measure,
                "folder": str(self.run.folder),
            }
        )
        with stop_requests() as interrupted:
            self.asked = lambda: interrupted() or time.monotonic() >= deadline
            try:
                self.loop()
            except Stopped:
                self.save()
                return self.summary("interrupted")
            finally:
                self.step.release()
                self.write_best()
            try:
                test = self.test()
            except Stopped:
                return self.summary("interrupted")
        summary = self.summary("finished" if self.complete() else "patience", test)
        if self.processes.first:
            self.run.finish(asdict(summary))
        return summary

    def loop(self) -> None:
        """Run the training loop, and write a checkpoint of its end."""
        state, config = self.state, self.config
        if self.due():  # the run was stopped before this validation
            self.validate()
        while not self.over():
            self.step()
            self.changed = True
            lr_at = state.done
            state.update += 1
            state.done += 1
            if logging := state.update % config.log_every == 0:
                self.check_finite()
                self.line("train", nats=self.step.mean_loss(), lr=self.step.rates[lr_at].item())
            nats = self.step.nats.item() if self.processes.device.type == "cpu" else None
            self.tell({"kind": "step", "update": state.update, "epoch": self.epoch(), "nats": nats})
            if state.done == self.updates:
                self.check_finite()
                state.epoch, state.done = state.epoch + 1, 0
                self.updates = self.begin_epoch()
            if judged := self.due():
                self.validate()
            by_count = config.save_every and state.update % config.save_every == 0
            if by_count or self.unsaved(together=logging or judged):
                self.save()
            if self.processes.size == 1:
                self.tick()
            elif logging and self.processes.any(self.asked()):  # all stop at the same update
                raise Stopped
        if self.changed:
            self.save()

    def begin_epoch(self) -> int:
        """Begin the epoch, or go on in it, and return the number of its updates."""
        state = self.state
        return self.step.begin(state.epoch, state.done, state.update, state.plateaus)

    # --- the position of the run ---

    def complete(self) -> bool:
        """Return whether all training is done."""
        return (
            self.state.epoch >= self.config.epochs or 0 < self.config.updates <= self.state.update
        )

    def over(self) -> bool:
        """Return whether no update is left: training is complete, or patience is at its end."""
        patience = self.config.patience
        return self.complete() or bool(patience and self.state.stale >= patience)

    def due(self) -> bool:
        """Return whether a validation is due."""
        every = self.config.evaluation.every
        now = self.state.update % every == 0 if every else self.state.done == 0
        return self.state.validated != self.state.update and (now or self.complete())

    def unsaved(self, together: bool) -> bool:
        """Return whether the last checkpoint is `SAVE_SECONDS` old.

        Several processes decide together: when a training loss is logged, or after a validation.
        """
        late = time.monotonic() - self.saved >= SAVE_SECONDS
        return late if self.processes.size == 1 else together and self.processes.any(late)

    def epoch(self) -> float:
        """Return the number of epochs so far, with a fraction for the current one."""
        return round(self.state.epoch + self.state.done / self.updates, 6)

    def tick(self) -> None:
        """Raise `Stopped` if a stop was requested.

        Several processes do nothing here: they stop together when the next training loss is logged.
        """
        if self.processes.size == 1 and self.asked():
            raise Stopped

    # --- validation, test, metrics and checkpoints ---

    def validate(self) -> None:
        """Validate, and keep the weights if they are the best so far.

        They are written with the next checkpoint: early in training nearly every validation is the
        best so far, and writing large weights takes longer than a validation.
        """
        self.check_finite()
        with self.step.average.used() if self.state.averaging else nullcontext():
            self.judge()
        self.changed = True

    def judge(self) -> None:
        """Validate the weights of the model, and keep them if they are the best so far."""
        score = self.score("valid", self.config)
        if not math.isfinite(score.nats):
            raise self.diverged(
                f"the validation loss was {score.nats} after update {self.state.update}"
            )
        also = self.also()  # may be stopped too: until here, nothing of the state has changed
        state, judged = self.state, "error" if self.measure == "error" else "nats"
        best = (
            state.best is None
            or self.config.evaluation.keep == "last"
            or getattr(score, judged) < state.best[judged]
        )
        state.validated, state.stale = state.update, 0 if best else state.stale + 1
        self.check_plateau(best, getattr(score, judged))
        line = self.line("valid", **values_of(score, self.measure), **also, best=best)
        if best:
            state.best = line
            if self.processes.first:
                kept = {name: value.detach().clone() for name, value in self.weights().items()}
                self.best = kept, line

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the model by name."""
        return runs.weights_of(self.model)

    def write_best(self) -> None:
        """Write the best weights, unless they are on disk already."""
        if self.best is not None:
            self.run.save_best(*self.best)
            self.best = None

    def check_plateau(self, best: bool, loss: float) -> None:
        """Divide the learning rate if validation has not improved for as long as the schedule says.

        After that it waits as long again. Averaging of the weights begins by a rule of its own.
        """
        state, schedule = self.state, self.config.schedule
        state.waited = 0 if best else state.waited + 1
        if schedule.kind == "plateau" and state.waited >= schedule.after:
            state.plateaus, state.waited = state.plateaus + 1, 0
            self.begin_epoch()
        after = self.config.optimizer.average_after
        if after and not state.averaging and falls_behind(state.losses, loss, after):
            state.averaging = True
            self.step.average.start()

    def score(self, part: str, config: Config, *, batch_statistics: bool = True) -> Score:
        """Evaluate the current weights on a part of the data."""
        score = evaluate(
            self.model, self.data, part, config, batch_statistics=batch_statistics, tick=self.tick
        )
        return self.processes.share(score)

    def also(self) -> dict[str, float]:
        """Return other scores of the current weights, for the line of a validation.

        For images, the error on the first training images, without noise. With batch norm and
        `statistics_also`, the validation score by other statistics.
        """
        config = self.config
        found: dict[str, float | None] = {}
        if self.measure == "error":
            part = replace(config.data, limit=min(config.data.limit or TRAINING, TRAINING))
            found["train_error"] = self.score("train", replace(config, data=part)).error
        if config.evaluation.statistics_also and config.model.norm == "batch":
            many = replace(config.evaluation.valid, size=LARGE)
            large = replace(config, evaluation=replace(config.evaluation, valid=many))
            for name, score in (
                (RUNNING, self.score("valid", config, batch_statistics=False)),
                (BY_LARGE, self.score("valid", large)),
            ):
                found[name] = getattr(score, self.measure)
        return {n: value for n, value in found.items() if value is not None}

    def test(self) -> dict[str, Any] | None:
        """Evaluate the best weights on the test part and return the metrics line.

        With `skip_test`, do only what has to be done before, and return None.
        """
        if self.processes.first:
            path = self.run.folder / "best.safetensors"
            weights, about = runs.read_tensors(path)
            runs.load_weights(self.model, weights, path)
            if about != self.state.best:  # as after other rounding, on another device
                text = (
                    f"{path.name} has weights of before the run was killed, of update "
                    f"{about.get('update')}; the best validation since then is another"
                )
                self.tell({"kind": "note", "text": text})
        self.processes.share_(list(self.weights().values()))
        if self.config.model.norm == "batch":
            # The statistics for the test are saved with the best weights, for later use.
            how = self.config.evaluation
            estimate_statistics(
                self.model, self.feed, how.statistics, how.statistics_size, self.tick
            )
            if self.processes.first and self.state.best is not None:
                self.run.save_best(self.weights(), self.state.best)
        chosen = {}
        if self.config.evaluation.temperature and isinstance(self.data, Corpus):
            chosen["temperature"] = choose_temperature(
                self.model, self.data, self.config, tick=self.tick
            )
            if self.processes.first and self.state.best is not None:
                self.run.save_best(self.weights(), self.state.best)
        if self.config.evaluation.skip_test:
            return None
        score = self.processes.share(
            evaluate(self.model, self.data, "test", self.config, tick=self.tick)
        )
        score = score.checked("test of the best weights")
        return self.line("test", **values_of(score, self.measure), **chosen)

    def line(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append a line to the metrics, report it to `progress`, and return it."""
        line = {"kind": kind, "update": self.state.update, "epoch": self.epoch(), **values}
        if self.processes.first:
            self.run.append(line)
        self.tell(line)
        return line

    def save(self) -> None:
        """Write a checkpoint; raise if training has diverged: no run should continue from that."""
        self.check_finite()
        self.state.seconds = self.seconds()
        tensors = self.step.tensors()
        floats = [t for t in tensors.values() if t.is_floating_point()]
        if not torch.stack([t.isfinite().all() for t in floats]).all():
            raise self.diverged(f"a weight was not finite after update {self.state.update}")
        if self.processes.first:
            self.write_best()  # before the checkpoint that names them
            self.run.save(tensors, asdict(self.state))
        self.saved, self.changed = time.monotonic(), False
        self.tell({"kind": "save", "update": self.state.update})

    def restore(self) -> runs.Checkpoint | None:
        """Restore the latest intact checkpoint; the first process returns it. Write nothing."""
        found, problems = self.run.latest() if self.processes.first else (None, [])
        if found is not None and found.state.get("best") is not None:
            self.check_best()
        for problem in problems:
            self.tell({"kind": "note", "text": problem})
        saved = self.processes.share(None if found is None else found.state)
        if saved is None:  # stopped before the first checkpoint: the run starts from the beginning
            return None
        try:
            self.state = State.from_json(saved)
            self.check_position()
            self.step.load(None if found is None else found.tensors)
            if self.state.averaging:
                self.step.average.start()
        except ValueError as error:
            raise RunError(f"{self.run.folder}: {error}") from None
        return found

    def check_position(self) -> None:
        """Raise a ValueError if the run can never be at the position of the checkpoint."""
        state, epochs = self.state, self.config.epochs
        past = state.epoch > epochs or state.update > epochs * self.feed.updates()
        if past or (state.done and state.done >= len(self.feed.order(state.epoch))):
            raise ValueError(
                f"the checkpoint does not fit the run: update {state.update:,} of epoch "
                f"{state.epoch:,}"
            )

    def check_best(self) -> None:
        """Raise if the best weights so far cannot be loaded, before more hours of training."""
        path = self.run.folder / "best.safetensors"
        if not path.exists():
            raise RunError(
                f"{self.run.folder} cannot be continued: its best weights so far, {path.name}, are "
                "gone. Start a new run in another folder. Nothing was overwritten."
            )
        runs.check_weights(self.model, runs.read_tensors(path)[0], path)

    def summary(self, status: str, test: dict[str, Any] | None = None) -> Summary:
        """Return the summary of the run, and report it to `progress`."""
        summary = Summary(
            folder=str(self.run.folder),
            status=status,
            measure=self.measure,
            update=self.state.update,
            epoch=self.epoch(),
            best=self.state.best,
            test=test,
            parameters=self.parameters,
            seconds=round(self.seconds(), 3),
        )
        self.tell({"kind": "end", **asdict(summary)})
        return summary

    def seconds(self) -> float:
        """Return the time spent on the run, including the time before it was continued."""
        return self.earlier + time.monotonic() - self.began

    # --- divergence ---

    def check_finite(self) -> None:
        """Raise if the loss of any update so far was not finite."""
        bad = self.step.not_finite()
        if bad is not None:
            raise self.diverged(
                f"the loss was not finite at update {self.state.update - self.state.done + bad + 1}"
            )

    def diverged(self, what: str) -> Diverged:
        """Return the error for a run that has diverged."""
        kept = self.run.checkpoints()
        where = (
            f"the last good checkpoint, of update {int(kept[0].name)}, is kept"
            if kept
            else "it has no checkpoint"
        )
        return Diverged(
            f"{what}: training has diverged; {where}. Try again in another folder, with a smaller "
            "--optimizer.lr, with --optimizer.clip-gradient 1, or with --precision fp32."
        )


def falls_behind(losses: list[float], loss: float, count: int) -> bool:
    """Return whether a loss is above the best of those before it, but for the latest `count`.

    `losses` is what earlier calls left: the best loss of all but the latest `count`, and these.
    The loss is added to it. This is how AWD-LSTM's authors begin to average the weights.

    >>> losses = []
    >>> [falls_behind(losses, loss, 2) for loss in (3.0, 1.0, 4.0, 2.0, 3.5, 1.5)]
    [False, False, False, False, True, True]
    """
    behind = len(losses) > count and loss > losses[0]
    losses.append(loss)
    if len(losses) > count + 1:
        losses[:2] = [min(losses[:2])]
    return behind


def load_data(config: Config, folder: Path | str | None = None) -> Corpus | Images:
    """Load the data of a config; `folder` is a folder to look for them in."""
    wanted = config.data
    if folder is not None and Path(folder).is_file():
        raise DataError(f"{folder} is a file; expected a folder to look for {wanted.name} in")
    if config.task == "images":
        return corpora.load_images(wanted.order, folder=folder)
    return corpora.load(
        wanted.name,
        folder=folder,
        by=wanted.by,
        preparation=wanted.preparation,
        valid=wanted.valid,
        test=wanted.test,
        limit=wanted.limit,
        words=wanted.words,
    )


def data_of(run: Path | str, config: Config, where: Path | str | None = None) -> Corpus | Images:
    """Load the data of an existing run; raise if they are not the data that it was started with.

    `where` is a folder to look for the data in, or the new path of a text that has moved.
    """
    if where is None and (place := runs.read_place(run)) is not None:
        with suppress(DataError, OSError):  # missing, changed or unreadable: try the config's place
            return data_of(run, config, place)
    if where is not None and not Path(where).exists():
        raise DataError(f"{where}: there is no such file or folder")
    if where is not None and Path(where).is_file():
        config = replace(config, data=replace(config.data, name=str(Path(where).absolute())))
        where = None
    try:
        data = load_data(config, where)
    except MissingError as error:
        missing = str(error).rstrip(".")
        raise MissingError(
            f"{missing}. If what {run} was trained on has moved, --data says where it is now."
        ) from None
    if not same_data(run, data):
        name = corpora.absolute_path(config.data.name, where)
        raise DataError(
            f"{run} was trained on other data than {name} is now, and the test part may now "
            "contain data that it was trained on; give the original data with --data, or evaluate "
            "another text with `zoneout eval --text`"
        )
    return data


def same_data(run: Path | str, data: Corpus | Images) -> bool:
    """Return whether a run was started with these data."""
    digest = runs.read_digest(run)
    if digest is not None:
        return data.digest == digest
    # Without a digest, only the vocabulary can be compared: the weights depend on it.
    return isinstance(data, Images) or data.vocabulary == runs.read_vocabulary(run)


def check_protocols(config: Config, data: Corpus | Images) -> None:
    """Raise if a part is too small to be evaluated, before hours of training."""
    if isinstance(data, Corpus):
        parts = [
            ("valid", data.valid, config.evaluation.valid),
            ("test", data.test, config.evaluation.test),
        ]
        for name, part, protocol in parts:
            try:
                predictions(len(part), protocol)
            except ValueError as error:
                raise ValueError(f"evaluation.{name}: {error}") from None


def check_statistics(config: Config, data: Corpus | Images) -> None:
    """Raise if batch norm would be validated with the statistics of single rows.

    A row minus its own mean is zero, so nothing of the row would be left.
    """
    valid, rows = config.evaluation.valid, config.evaluation.valid.size
    if isinstance(data, Images):
        rows = min(rows, len(data.valid[1][: config.data.limit]))
    elif valid.kind == "chunks":
        rows = min(rows, len(data.valid) // valid.length)
    if config.model.norm == "batch" and (valid.kind == "whole" or rows < 2):
        raise ValueError(
            "evaluation.valid: expected at least two rows at once, since batch norm is validated "
            "with their statistics, got one: a whole text, a size of 1, or a text of less than two "
            "chunks"
        )


def in_words(config: Config, data: Corpus | Images) -> str:
    """Describe the training data and their size."""
    if isinstance(data, Images):
        return f"{len(data.train[1][: config.data.limit]):,} images of {config.data.name}"
    return f"{len(data.train):,} {'characters' if data.unit == 'char' else 'words'} of {data.name}"


def values_of(score: Score, measure: str) -> dict[str, Any]:
    """Return the fields of a score for a metrics line."""
    return {measure: getattr(score, measure), "nats": score.nats, "predictions": score.predictions}


AGAIN = 1.0  # seconds: signals that are closer together are one request (`timeout` sends two)
_asked: list[float] = []  # the times of the requests that the runs of this process stop


def asked_again(times: list[float]) -> bool:
    """Note the time of a signal, and return whether it is a second request to stop."""
    times.append(time.monotonic())
    return times[-1] - times[0] > AGAIN


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or SIGTERM has asked to stop.

    A second request stops immediately. Only the main thread receives signals. A run in another
    thread sees the same requests, as long as the main thread is inside this context manager.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: bool(_asked)
        return

    def note(number: int, frame: Any) -> None:
        if asked_again(_asked):
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(_asked)
    finally:
        _asked.clear()
        for number, handler in before.items():
            signal.signal(number, handler)
