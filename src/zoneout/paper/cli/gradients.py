"""The command `gradients`: measure the gradient flow of runs, and write its records."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .. import console, disk
from ..data.datasets import unpacking
from ..experiments.gradient_flow import Record, half_in_last, make_record, places
from ..experiments.recipes import RECIPES
from ..report.plots import check_name
from ..training.exit_codes import OK
from ..training.unused_options import refuse_given


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the options; it uses argparse, which needs no other package."""
    found = argparse.ArgumentParser(
        prog=prog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Measure how much of a run's gradient reaches every time step t:\n"
        "the norms of dL/dc_t and dL/dh_t, averaged over the batch and divided by their sum over "
        "t.",
        epilog=f"""examples:

$ {prog} gradient-flow                             # the runs of the paper's figure, after `zoneout reproduce`
$ {prog} runs/plain runs/zoned --picture flow.svg

The results are written to RUN/gradients.json, those of a recipe to RESULTS/RECIPE/gradients-seed-N.json.""",
    )
    add = found.add_argument
    add(
        "what",
        metavar="RUN|RECIPE|TASK",
        nargs="+",
        help="the folder of a run, or a recipe or task that was run",
    )
    add(
        "--batches",
        metavar="N",
        type=int,
        default=10,
        help="number of training batches to average over (10)",
    )
    add(
        "--weights",
        choices=("best", "last"),
        default="best",
        help="best or last weights of the run (best)",
    )
    add("--seed", metavar="N", type=int, default=1, help="recipes only: the seed of the run (1)")
    add(
        "--out",
        metavar="DIR",
        type=Path,
        default=Path("runs/reproduce"),
        help="folder of the runs of recipes (runs/reproduce)",
    )
    add(
        "--results",
        metavar="DIR",
        type=Path,
        default=Path("results"),
        help="folder for the records of recipes (results)",
    )
    add(
        "--data",
        metavar="DIR|FILE",
        type=Path,
        help="if the data have moved: the folder that contains them, or the text file",
    )
    add(
        "--unpacked",
        metavar="MIB",
        type=int,
        help="maximum size of a compressed text after decompression, in MiB (256)",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    add(
        "--picture",
        metavar="FILE",
        type=Path,
        help="save a picture to this file: .svg, .pdf or .png",
    )
    add("--json", action="store_true", help="print the records as JSON")
    return found


def main(arguments: Sequence[str] | None = None, prog: str = "zoneout gradients") -> int:
    """Measure how much of the gradient reaches every time step, in runs or paper recipes."""
    command = parser(prog)
    options = command.parse_args(arguments)
    check_name(options.picture)
    if all((Path(name) / "config.json").exists() for name in options.what):
        why = "it is for recipes, not for the folder of a run; leave it out"
        refuse_given(("seed", "out", "results"), options, command.get_default, why)
    flows: dict[str, Record] = {}
    for folder, path, recipe in places(options.what, options.seed, options.out, options.results):
        with unpacking(options.unpacked):
            record = make_record(
                folder,
                recipe=recipe,
                weights=options.weights,
                batches=options.batches,
                data=options.data,
                device=options.device,
            )
        with disk.explained(path.parent):
            disk.write_record(path, record)
        name = RECIPES[recipe].row if recipe else str(folder)
        flows[name] = record
        if not options.json:
            console.show(described(name, record, path))
    if options.json:
        console.show_json(list(flows.values()))
    if options.picture is not None:
        from ..report.figures import flow_figure
        from ..report.plots import save

        with disk.explained(options.picture):
            save(flow_figure({name: [record] for name, record in flows.items()}), options.picture)
        console.say(f"The picture is in {options.picture}")
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
