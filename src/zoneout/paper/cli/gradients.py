"""The command `gradients`: measure the gradient flow of runs, and write its records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from .. import console, disk
from ..data.datasets import unpacking
from ..experiments.gradient_flow import Record, half_in_last, make_record, places
from ..experiments.recipes import RECIPES
from ..report.plots import check_name
from ..training.exit_codes import OK
from ..training.unused_options import refuse_given
from .options import Flag, Positional, arg


@dataclass(frozen=True)
class Gradients:
    """Measure how much of the gradient reaches every time step.

    These are the norms of dL/dc_t and dL/dh_t, divided by their sum over t.

    $ zoneout gradients gradient-flow
    $ zoneout gradients runs/plain runs/zoneout --picture flow.svg
    """

    what: Annotated[tuple[str, ...], Positional, arg(metavar="RUN|RECIPE|TASK [RUN …]")]
    """Folders of runs, or recipes or tasks that `zoneout reproduce` has run."""
    batches: int = 10
    """Number of training batches to average over."""
    weights: Literal["best", "last"] = "best"
    """best: the weights with the best validation. last: the weights of the latest checkpoint."""
    seed: int = 1
    """Only for recipes: the seed of the run."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/reproduce")
    """Only for recipes: the folder of the runs."""
    results: Annotated[Path, arg(metavar="DIR")] = Path("results")
    """Only for recipes: the folder for the records."""
    data: Annotated[Path | None, arg(metavar="DIR|FILE")] = None
    """If the data have moved: the folder that contains them, or the text file."""
    unpacked: Annotated[int | None, arg(metavar="MIB")] = None
    """Maximum size of a compressed text after decompression, in MiB; by default 256."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    picture: Path | None = None
    """Save a picture in this file: .svg, .pdf or .png."""
    json: Flag = False
    """Print the records as JSON. They are also written to RUN/gradients.json, those of recipes to
    RESULTS/RECIPE/gradients-seed-N.json.
    """

    def __call__(self) -> int:
        if not self.what:
            raise ValueError(
                "expected a run, a recipe or a task, as in `zoneout gradients gradient-flow`"
            )
        check_name(self.picture)
        if all((Path(name) / "config.json").exists() for name in self.what):
            why = "it is for recipes, not for the folder of a run; leave it out"
            refuse_given(
                ("seed", "out", "results"), self, lambda name: getattr(Gradients, name), why
            )
        flows: dict[str, Record] = {}
        for folder, path, recipe in places(self.what, self.seed, self.out, self.results):
            with unpacking(self.unpacked):
                record = make_record(
                    folder,
                    recipe=recipe,
                    weights=self.weights,
                    batches=self.batches,
                    data=self.data,
                    device=self.device,
                )
            with disk.explained(path.parent):
                disk.write_record(path, record)
            name = RECIPES[recipe].row if recipe else str(folder)
            flows[name] = record
            if not self.json:
                console.show(described(name, record, path))
        if self.json:
            console.show_json(list(flows.values()))
        if self.picture is not None:
            from ..report.figures import flow_figure
            from ..report.plots import save

            with disk.explained(self.picture):
                save(flow_figure({name: [record] for name, record in flows.items()}), self.picture)
            console.say(f"The picture is in {self.picture}")
        return OK


def described(name: str, record: Record, path: Path) -> str:
    """Return a description of a record in a few lines."""
    when = "" if record["epoch"] is None else f" of epoch {record['epoch']:.4g}"
    lines = [f"{name}: weights{when}, {record['batches']} batches; record: {path}"]
    for layer, states in record["layers"].items():
        for state, found in states.items():
            steps = len(found["share"])
            half = half_in_last(found["share"])
            lines.append(
                f"  {layer} {state:7} half of the norm lies in the last {half:,} of {steps:,} steps"
            )
    return "\n".join(lines)
