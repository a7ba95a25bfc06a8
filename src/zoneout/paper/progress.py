"""Progress: what a person sees while a model trains, and what TensorBoard gets.

`train` tells what happens as dicts (see there); each class here listens to them. A terminal shows a live bar for every
run and a line for every validation; anything else gets plain lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from .disk import own_folder
from .measures import LABELS, figure_of, in_measure, measure_in
from .streams import show, visible

Event: TypeAlias = dict[str, Any]
Listener: TypeAlias = Callable[[Event], None]


def worth(row: Event) -> str:
    """The value of a line of the metrics, with its unit.

    >>> worth({"kind": "valid", "bits": 1.60123, "nats": 1.1099})
    '1.601 bits'
    """
    measure = measure_in(row) or "bits"
    return figure_of(row[measure], measure)


def duration(seconds: float) -> str:
    """A time, as short as it can be said.

    >>> duration(7), duration(75), duration(4000)
    ('0:07', '1:15', '1:06:40')
    """
    whole = max(0, int(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Pace:
    """How fast a run goes now: updates a second, the recent ones counting most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.at, self.update, self.speed = clock(), -1, 0.0

    def __call__(self, update: int) -> float:
        now = self.clock()
        if self.update < 0:
            self.at, self.update = now, update
        elif now - self.at >= 0.5:
            fresh = (update - self.update) / (now - self.at)
            self.speed = fresh if not self.speed else 0.8 * self.speed + 0.2 * fresh
            self.at, self.update = now, update
        return self.speed


class Shown:
    """What is known of a run from what it has told."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.measure, self.update, self.updates, self.pace = "bits", 0, 0, Pace(clock)
        self.valid: Event | None = None
        self.best: Event | None = None
        self.loss: float | None = None  # nats, smoothed

    def hear(self, event: Event) -> None:
        """Take in what a run tells."""
        kind = event["kind"]
        if kind == "start":
            self.measure, self.updates, self.update = event["measure"], event["updates"], event["update"]
        elif kind == "step":
            self.update = event["update"]
            self.pace(self.update)
            if (nats := event.get("nats")) is not None:
                self.loss = nats if self.loss is None else 0.95 * self.loss + 0.05 * nats
        elif kind == "train":
            self.loss = event["nats"]
        elif kind == "valid":
            self.valid, self.best = event, event if event["best"] else self.best

    def training(self) -> str:
        """The loss on the training data."""
        if self.loss is None:
            return ""
        if self.measure == "error":
            return f"{self.loss:.3f} nats"
        return figure_of(in_measure(self.loss, self.measure), self.measure)

    def left(self) -> str:
        """The time that the rest will take at this pace."""
        return duration((self.updates - self.update) / self.pace.speed) if self.pace.speed else "–:––"


def position(row: Event) -> str:
    """Where a run was when it wrote a line of its metrics."""
    return f"epoch {row['epoch']:6.2f}  update {row['update']:7,}"


def said(event: Event) -> str | None:
    """What is written down of an event, as a line; None for those that come too often, or say nothing new."""
    kind = event["kind"]
    if kind == "start":
        again = f", continued after update {event['update']:,}" if event["update"] else ""
        return (
            f"{event['data']}, {event['parameters']:,} parameters, {event['updates']:,} updates on {event['device']}"
            f"{again}; the run is in {event['folder']}"
        )
    if kind == "valid":
        return f"{position(event)}  valid {worth(event)}{'  best so far' if event['best'] else ''}"
    if kind == "test":
        return f"test of the best weights: {worth(event)}"
    return f"note: {event['text']}" if kind == "note" else None


def named(name: str, line: str, names: Iterable[str]) -> str:
    """A line with the name of its run before it, where there are several."""
    return f"{name:{max(map(len, names))}}  {line}" if name else line


class Lines:
    """Plain lines, one for every line of the metrics: for files, pipes and logs.

    `names` are the runs that are shown side by side; `listener(name)` is what to give to the `train` of each.
    """

    def __init__(self, out: IO[str], names: Sequence[str] = ("",), clock: Callable[[], float] = time.monotonic) -> None:
        self.out, self.shown = out, {name: Shown(clock) for name in names}

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def listener(self, name: str = "") -> Listener:
        """What one run tells."""
        return lambda event: self._hear(event, name, self.shown[name])

    def _hear(self, event: Event, name: str, run: Shown) -> None:
        run.hear(event)
        line = said(event)
        if event["kind"] == "train":
            speed = f"  {run.pace.speed:.1f} updates/s  {run.left()} left" if run.pace.speed else ""
            line = f"{position(event)}  train {run.training()}{speed}"
        if line is not None:
            show(named(name, line, self.shown), self.out)


class Live:
    """A live bar for each run, and a line above them for each validation; `names` and `listener` as in `Lines`."""

    def __init__(
        self, console: Console, names: Sequence[str] = ("",), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console, self.shown = console, {name: Shown(clock) for name in names}
        columns: list[ProgressColumn] = [TextColumn("{task.description}", style="bold")] if len(names) > 1 else []
        columns.append(BarColumn(bar_width=None))
        columns.append(_Of(lambda run: f"{run.update:,}/{run.updates:,}" if run.updates else "starting"))
        columns.append(_Of(lambda run: f"train {run.training()}" if run.loss is not None else ""))
        if console.width >= 80:  # what does not fit is left out, the least important first
            columns.append(_Of(lambda run: f"valid {worth(run.valid)}" if run.valid else ""))
        if console.width >= 100:
            columns.append(_Of(lambda run: f"best {worth(run.best)}" if run.best else "", "green"))
        if console.width >= 120:
            columns.append(_Of(lambda run: f"{run.pace.speed:.1f}/s" if run.pace.speed else "", "dim"))
        columns.append(_Of(lambda run: run.left(), "cyan"))
        self.progress = Progress(*columns, console=console, refresh_per_second=5, expand=True)
        self.tasks = {name: self.progress.add_task(name, total=None, shown=run) for name, run in self.shown.items()}

    def __enter__(self) -> Live:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def listener(self, name: str = "") -> Listener:
        """What one run tells."""
        return lambda event: self._hear(event, name, self.shown[name])

    def _hear(self, event: Event, name: str, run: Shown) -> None:
        run.hear(event)
        if event["kind"] in ("start", "step"):
            self.progress.update(self.tasks[name], completed=run.update, total=run.updates or None)
        if event["kind"] == "valid" and len(self.shown) > 1:
            return  # the bars of several runs show it, one below the other
        if (line := said(event)) is not None:
            style = "green" if event.get("best") else "yellow" if event["kind"] == "note" else None
            line = visible(named(name, line, self.shown))
            self.console.print(line, style=style, highlight=False, markup=False)


class _Of(ProgressColumn):
    """A column that asks the task's run."""

    def __init__(self, ask: Callable[[Shown], str], style: str = "") -> None:
        super().__init__()
        self.ask, self.style = ask, style

    def render(self, task: Task) -> Text:
        return Text(self.ask(task.fields["shown"]), style=self.style, no_wrap=True)


def watch(names: Sequence[str] = ("",)) -> Lines | Live:
    """What shows the progress of runs on standard error: live on a terminal, as lines elsewhere."""
    console = Console(stderr=True)
    return Live(console, names) if console.is_terminal else Lines(sys.stderr, names)


class TensorBoard:
    """Writes the metrics for TensorBoard, into the run's folder."""

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "--tensorboard: the package tensorboard is not installed; pip install '.[tensorboard]' in a clone"
            ) from None
        self.make = lambda update: SummaryWriter(str(own_folder(Path(folder) / "tensorboard")), purge_step=update)
        self.writer: Any = None

    def __call__(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "start":  # what was written after the checkpoint that a run is continued from is passed over
            self.writer = self.make(event["update"] + 1 if event["update"] else None)
        if kind in ("train", "valid", "test"):
            for name in ("nats", "lr", *LABELS):
                if name in event:
                    self.writer.add_scalar(f"{kind}/{name}", event[name], event["update"])
        if kind == "valid":
            self.writer.flush()
        if kind == "end":
            self.close()

    def close(self) -> None:
        """Bring everything to the disk."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def together(*listeners: Listener) -> Listener:
    """One listener that tells several."""

    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return tell
