"""Progress of training: a live display, plain lines, and TensorBoard files.

`train` reports events as dicts (its docstring lists them), and each class here is a listener.
A terminal shows a live bar for each run and a line for each validation. Files and pipes get
plain lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from ...extras import install_command
from ..console import show, visible
from ..disk import own_folder
from .measures import LABELS, figure_of, in_measure, measure_in

Event: TypeAlias = dict[str, Any]
Listener: TypeAlias = Callable[[Event], None]


def worth(row: Event) -> str:
    """Format the value of a metrics line, with its unit.

    >>> worth({"kind": "valid", "bits": 1.60123, "nats": 1.1099})
    '1.601 bits'
    """
    measure = measure_in(row) or "bits"
    return figure_of(row[measure], measure)


def duration(seconds: float) -> str:
    """Format seconds as minutes and seconds, with hours only if needed.

    >>> duration(7), duration(75), duration(4000)
    ('0:07', '1:15', '1:06:40')
    """
    whole = max(0, int(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Pace:
    """The current speed of a run in updates per second, an average that favours recent updates."""

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
    """What the display knows about a run, collected from the run's events."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.measure, self.update, self.updates, self.pace = "bits", 0, 0, Pace(clock)
        self.valid: Event | None = None
        self.best: Event | None = None
        self.loss: float | None = None  # nats, smoothed

    def hear(self, event: Event) -> None:
        """Record an event of the run."""
        kind = event["kind"]
        if kind == "start":
            self.measure = event["measure"]
            self.updates = event["updates"]
            self.update = event["update"]
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
        """Format the training loss."""
        if self.loss is None:
            return ""
        if self.measure == "error":
            return f"{self.loss:.3f} nats"
        return figure_of(in_measure(self.loss, self.measure), self.measure)

    def left(self) -> str:
        """Format the time that the remaining updates will take at the current speed."""
        return (
            duration((self.updates - self.update) / self.pace.speed) if self.pace.speed else "–:––"
        )


def position(row: Event) -> str:
    """Format the epoch and update of a metrics line."""
    return f"epoch {row['epoch']:6.2f}  update {row['update']:7,}"


def log_line(event: Event) -> str | None:
    """Return the log line for an event; None for events that are too frequent or add nothing."""
    kind = event["kind"]
    if kind == "start":
        again = f", continued after update {event['update']:,}" if event["update"] else ""
        return (
            f"{event['data']}, {event['parameters']:,} parameters, {event['updates']:,} updates on "
            f"{event['device']}{again}; the run is in {event['folder']}"
        )
    if kind == "valid":
        return f"{position(event)}  valid {worth(event)}{'  best so far' if event['best'] else ''}"
    if kind == "test":
        return f"test of the best weights: {worth(event)}"
    return f"note: {event['text']}" if kind == "note" else None


def named(name: str, line: str, names: Iterable[str]) -> str:
    """Put the name of the run before a line, if the run has a name."""
    return f"{name:{max(map(len, names))}}  {line}" if name else line


class Lines:
    """Plain progress lines, one for each line of the metrics: for files, pipes and logs.

    `names` are the runs to show. Pass `listener(name)` to `train` as the `progress` of that run.
    """

    def __init__(
        self,
        out: IO[str],
        names: Sequence[str] = ("",),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out, self.shown = out, {name: Shown(clock) for name in names}

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def listener(self, name: str = "") -> Listener:
        """Return the listener for one run."""
        return lambda event: self._hear(event, name, self.shown[name])

    def _hear(self, event: Event, name: str, run: Shown) -> None:
        run.hear(event)
        line = log_line(event)
        if event["kind"] == "train":
            speed = f"  {run.pace.speed:.1f} updates/s  {run.left()} left" if run.pace.speed else ""
            line = f"{position(event)}  train {run.training()}{speed}"
        if line is not None:
            show(named(name, line, self.shown), self.out)


class Live:
    """A live bar for each run; with one run, also a line above the bar for each validation.

    `names` and `listener` are the same as in `Lines`.
    """

    def __init__(
        self,
        console: Console,
        names: Sequence[str] = ("",),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.shown = console, {name: Shown(clock) for name in names}
        several = len(names) > 1
        name = [TextColumn("{task.description}", style="bold", table_column=_fixed())] * several
        optional = [  # in the order of the screen; the lowest rank stays longest
            _Of(0, lambda run: f"{run.update:,}/{run.updates:,}" if run.updates else "starting"),
            _Of(3, lambda run: f"train {run.training()}" if run.loss is not None else ""),
            _Of(4, lambda run: f"valid {worth(run.valid)}" if run.valid else ""),
            _Of(5, lambda run: f"best {worth(run.best)}" if run.best else "", "green"),
            _Of(1, lambda run: f"{run.pace.speed:.1f}/s" if run.pace.speed else "", "dim"),
            _Of(2, lambda run: run.left(), "cyan"),
        ]
        self.progress = _Fitting([*name, BarColumn(bar_width=None)], optional, console)
        self.tasks = {
            name: self.progress.add_task(name, total=None, shown=run)
            for name, run in self.shown.items()
        }

    def __enter__(self) -> Live:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def listener(self, name: str = "") -> Listener:
        """Return the listener for one run."""
        return lambda event: self._hear(event, name, self.shown[name])

    def _hear(self, event: Event, name: str, run: Shown) -> None:
        run.hear(event)
        if event["kind"] in ("start", "step"):
            self.progress.update(self.tasks[name], completed=run.update, total=run.updates or None)
        if event["kind"] == "valid" and len(self.shown) > 1:
            return  # with several runs, only the bars show validations
        if (line := log_line(event)) is not None:
            style = "green" if event.get("best") else "yellow" if event["kind"] == "note" else None
            line = visible(named(name, line, self.shown))
            self.console.print(line, style=style, highlight=False, markup=False)


def _fixed() -> Column:
    """Return a table column that keeps its width: only the bar shrinks."""
    return Column(no_wrap=True)


class _Of(ProgressColumn):
    """A column whose text is computed from the run of the task."""

    def __init__(self, rank: int, ask: Callable[[Shown], str], style: str = "") -> None:
        super().__init__(_fixed())
        self.rank, self.ask, self.style = rank, ask, style

    def render(self, task: Task) -> Text:
        return Text(self.ask(task.fields["shown"]), style=self.style, no_wrap=True)


class _Fitting(Progress):
    """A progress display that leaves out the columns for which the terminal has no room."""

    BAR = 6  # the least width of the bar
    ECHO = 2  # free columns at the right: there the terminal shows ^C, without breaking the line

    def __init__(
        self, always: Sequence[ProgressColumn], optional: Sequence[_Of], console: Console
    ) -> None:
        self.always, self.optional, self.screen = always, optional, console
        super().__init__(*always, *optional, console=console, refresh_per_second=5, expand=True)

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        """Return the table of the tasks, with the columns of the lowest ranks that fit."""
        tasks = list(tasks)
        names = max((cell_len(task.description) for task in tasks), default=0)
        width = self.screen.width - self.ECHO
        room = width - self.BAR - (names + 1) * (len(self.always) > 1)
        shown = set()
        for column in sorted(self.optional, key=lambda column: column.rank):
            room -= 1 + max((column.render(task).cell_len for task in tasks), default=0)
            if room < 0:
                break
            shown.add(column)
        self.columns = (*self.always, *(column for column in self.optional if column in shown))
        table = super().make_tasks_table(tasks)
        table.width = width
        return table


def watch(names: Sequence[str] = ("",)) -> Lines | Live:
    """Return a progress display on standard error: live on a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    return Live(console, names) if console.is_terminal else Lines(sys.stderr, names)


class TensorBoard:
    """A listener that writes the metrics for TensorBoard into the run's folder."""

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "--tensorboard: the package tensorboard is not installed; try "
                f"{install_command('tensorboard')}"
            ) from None
        self.make = lambda update: SummaryWriter(
            str(own_folder(Path(folder) / "tensorboard")), purge_step=update
        )
        self.writer: Any = None

    def __call__(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "start":  # in a continued run, TensorBoard drops the values after the checkpoint
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
        """Write everything to disk and close the file."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def together(*listeners: Listener) -> Listener:
    """Return one listener that passes each event to several listeners."""

    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return tell
