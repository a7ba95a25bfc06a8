"""The report: a page of the paper's results and ours, or a page that compares runs.

The first page has the paper's tables with our numbers, its figures, and the speed of the layers.
Everything on a page is computed from `results/`, `benchmarks/results.csv` or the runs' folders.
Each of our numbers is a link to the command that reproduces it.
"""

from __future__ import annotations

import csv
import io
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from .. import disk
from ..disk import RunError
from ..experiments import gradient_flow
from ..experiments.evidence import seeds
from ..experiments.recipes import MEASURES, QUOTED, RECIPES, Recipe
from ..experiments.recipes.registry import Quoted
from ..experiments.results import (
    PARTS,
    Record,
    as_z,
    best_epoch,
    best_within,
    differing,
    fitting,
    minutes,
    named,
    no_run,
    scatter_of,
    seeds_of,
    z_of,
)
from ..training import config as configs
from ..training.config import at
from ..training.measures import DIFFERENT, REACHED, UNITS, Verdict, reached, rounded, spread
from ..training.progress import duration
from . import figures, past, plots
from .describe import describe
from .html import Html, code, document, element, figure, join, learning_curves, link, section, table
from .verdicts import verdicts

NONE = "–"
TASKS = {  # the title of each table, and the place of its rows in the paper
    "char-ptb": ("Penn Treebank, characters", "Table 1"),
    "word-ptb": ("Penn Treebank, words", "Table 1"),
    "text8": ("text8", "Table 1"),
    "text8-prefix": (
        "The first 74 million characters of text8",
        "not in the paper; like Table 1, on less text",
    ),
    "pmnist": ("Permuted sequential MNIST, in the paper's order", "Table 2"),
    "pmnist-permuted": (
        "Sequential MNIST, truly permuted",
        "not in the paper; like Table 2, in another order",
    ),
    "quick": (
        "Characters, scaled down to ten minutes on two CPU cores",
        "not in the paper; the order of the methods, not their numbers",
    ),
}
RULE = (
    (
        "Lower is better. Our numbers are the mean over seeds ± the standard deviation, for the "
        "weights with the best validation. “Epoch” is the epoch of that validation. “Minutes” is "
        f"the time of one run. “Reached” means that {REACHED}. {DIFFERENT}. With batch norm, a run "
        "is validated with the statistics of the validation batches, as in the paper."
    )
    .replace("'", "’")
    .replace("*differs*", "“differs”")
)


def write(out: Path, page: str) -> None:
    """Write a page to a file; if that fails, raise an error that says why."""
    with disk.explained(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        disk.write_text(out, page)


# --- the paper ------------------------------------------------------------------------------------


def paper_page(results: Path, benchmarks: Path) -> str:
    """Return the page of the paper: its tables with our numbers, figures, speed and commands."""
    found = {recipe.name: fitting(recipe, results) for recipe in RECIPES.values()}
    own = {name: records for name, (records, _) in found.items()}  # our records
    count = sum(len(records) for records in own.values())
    with_any = sum(bool(records) for records in own.values())
    lead = element(
        "p",
        "The paper’s experiments, reproduced: what of it holds up, its tables with our numbers, "
        f"its figures, and the speed of the layers. Made from {count} records of {with_any} "
        f"recipes; {len(own) - with_any} of the {len(own)} recipes have not been run yet. Each of "
        "our numbers, and each speed ratio, is a link to the command that reproduces it.",
    )
    tables = [task_section(task, own) for task in TASKS]
    others = [(name, record) for name, (_, unfit) in found.items() for record in unfit]
    notes = [
        element(
            "p",
            f"Left out because its settings differ from the recipe: {name}, seed {record['seed']}.",
        )
        for name, record in others
    ]
    drawn = figures.draw_all(results)
    sections = [
        ("verdicts", "What holds up", verdicts(results)),
        (
            "tables",
            "Tables",
            section("tables", "The paper’s numbers and ours", element("p", RULE), *tables, *notes),
        ),
        ("figures", "Figures", section("figures", "Figures", *map(drawn_figure, drawn))),
        ("past", "Past the paper", past.past_section(results, own, past_tables(own))),
        ("speed", "Speed", section("speed", "Speed", *speed(benchmarks))),
        ("commands", "Commands", section("commands", "The commands", *commands(own, results))),
    ]
    footer = join(
        [
            "Made by ",
            code("zoneout report"),
            " from ",
            code(str(results)),
            " and ",
            code(str(benchmarks)),
            ".",
        ]
    )
    return document(
        "Zoneout: the paper’s results, reproduced", lead, sections, element("p", footer)
    )


def task_section(task: str, own: dict[str, list[Record]]) -> Html:
    """Return the section of a task: the rows of the paper's table, our rows, then all others."""
    title, where = TASKS[task]
    recipes = [recipe for recipe in RECIPES.values() if recipe.task == task]
    quoted = [row for row in QUOTED if row.task == task]
    unit = UNITS[MEASURES[task]]
    main, ours, systems, rest = (
        [r for r in recipes if r.group == group] for group in ("table", "ours", "systems", "more")
    )
    parts = [results_table(f"{title}: {where}. In {unit}.", main, own, quoted, name=task)]
    if ours:
        caption = f"{title}: beyond the paper, compared with the paper’s zoneout row. In {unit}."
        parts.append(results_table(caption, ours, own, name=f"{task}-ours"))
    if systems:
        caption = (
            f"{title}: other systems that the paper names, with numbers of their authors, and "
            f"models to compare with. In {unit}."
        )
        parts.append(results_table(caption, systems, own, name=f"{task}-systems"))
        parts.append(element("ul", join(map(comparison, systems, [own] * len(systems)))))
    if rest:
        caption = f"{title}: other rows, for the paper’s figures and text. In {unit}."
        shown = results_table(caption, rest, own, name=f"{task}-more")
        summary = element("summary", f"{len(rest)} more rows, for the paper’s figures and text")
        parts.append(element("details", summary, shown))
    return section(f"task-{task}", title, *parts, level=3)


def comparison(recipe: Recipe, own: dict[str, list[Record]]) -> Html:
    """Return a list item that compares a recipe with the one it is held against.

    The difference is that of the best validation within as many epochs as both had. The test
    scores, which exist for the whole runs alone, stand beside it with the epochs of each.
    """
    if not (recipe.against and own[recipe.name] and own[recipe.against]):
        return Html("")
    pair, cut = (recipe, RECIPES[recipe.against]), named(recipe.make().evaluation.test)
    epochs = [min(record["epochs"] for record in own[one.name]) for one in pair]
    valid = [fmean(best_within(r, min(epochs)) for r in own[one.name]) for one in pair]
    tests = [fmean(test_of(r, cut) for r in own[one.name]) for one in pair]
    first, second = (
        f"{one.row} {rounded(value, recipe.measure)} ({seeds(len(own[one.name]))})"
        for one, value in zip(pair, valid)
    )
    digits = " and ".join(rounded(value, recipe.measure) for value in tests)
    also = "" if all(has_test(r, cut) for r in own[recipe.against]) else ", by other protocols"
    text = (
        f"Best validation within {min(epochs):g} epochs: {first}, {second}. The difference is "
        f"{rounded(valid[0] - valid[1], recipe.measure, '+')}. In the test, after "
        f"{epochs[0]:g} and {epochs[1]:g} epochs{also}: {digits}."
    )
    return element("li", text.replace("-0.", "−0."))


def test_of(record: Record, cut: str) -> float:
    """Return the test score of a record by a protocol; by its own protocol if there is none."""
    for score in record["scores"]:
        if (score["part"], score["protocol"]) == ("test", cut):
            return float(score[record["measure"]])
    return float(record["test"])


def has_test(record: Record, cut: str) -> bool:
    """Return whether a record has a test score by a protocol."""
    return ("test", cut) in {(score["part"], score["protocol"]) for score in record["scores"]}


def past_tables(own: dict[str, list[Record]]) -> list[Html]:
    """Return a table of each task's models that came after the paper."""
    tables = []
    for task in TASKS:
        rows = [r for r in RECIPES.values() if r.task == task and r.group == "past"]
        if rows:
            caption = (
                f"{TASKS[task][0]}: models that came after the paper, with numbers of their "
                f"authors. In {UNITS[MEASURES[task]]}."
            )
            tables.append(results_table(caption, rows, own, name=f"{task}-past"))
    return tables


def results_table(
    caption: str,
    recipes: Sequence[Recipe],
    own: dict[str, list[Record]],
    quoted: Sequence[Any] = (),
    *,
    name: str,
) -> Html:
    """Return a table of the paper's numbers and ours; rows without a run are folded below it."""
    scatter = scatter_of([own[r.name] for r in RECIPES.values() if r.task == recipes[0].task])
    ran = [recipe for recipe in recipes if own[recipe.name]]
    parts: list[Html] = []
    if ran:
        rows = [[recipe.row, *cells(recipe, own[recipe.name], scatter)] for recipe in ran]
        parts.append(table(caption, *without_dashes(rows), name))
    notes = [differing(r, verdicts_of(r, own[r.name], scatter)).replace("`", "") for r in ran]
    notes += [f"Left out of {r.name}: {r.left_out}." for r in ran if r.left_out]
    parts += [element("p", note) for note in notes if note]
    absent = [
        [r.row, *map(as_paper, (r.valid, r.test)), link(f"make-{r.name}", no_run(r))]
        for r in recipes
        if r not in ran
    ]
    absent += [
        [
            one.row,
            as_paper(one.valid),
            as_paper(one.test),
            join(["quoted by the paper; ", why_quoted(one)]),
        ]
        for one in quoted
    ]
    if absent:
        head = [["Model", "Paper: validation", "Test", "Ours"]]
        title = f"{caption} Rows without a run"
        count = f"{len(absent)} row{'s' * (len(absent) > 1)} without a run"
        parts.append(
            element(
                "details", element("summary", count), table(title, head, absent, f"{name}-none")
            )
        )
    return join(parts)


def why_quoted(one: Quoted) -> Any:
    """Say where our row of a quoted system is, or why there is none."""
    why = join(["see ", link(f"make-{one.recipe}", "the systems")]) if one.recipe else one.why
    return join(["quoted by the paper; ", why])


COLUMNS = (  # of a table of results: heading, and heading below it
    *(
        (part, which)
        for part in ("Validation", "Test")
        for which in ("paper", "ours", "difference")
    ),
    *((name, "") for name in ("z", "Reached", "Seeds", "Epoch", "Minutes")),
)


def without_dashes(rows: Sequence[Sequence[Any]]) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return the head and the rows of a table of results, without columns that have only dashes."""
    kept = [n for n in range(len(COLUMNS)) if any(row[n + 1] != NONE for row in rows)]
    above: list[Any] = ["Model"]
    below: list[Any] = []
    for group in dict.fromkeys(COLUMNS[n][0] for n in kept):
        under = [COLUMNS[n][1] for n in kept if COLUMNS[n][0] == group]
        if len(under) > 1:
            above.append((group, len(under)))
            below += under
        else:
            above.append(f"{group}, {under[0]}" if under[0] else group)
    return [above, below] if below else [above], [
        [row[0], *(row[n + 1] for n in kept)] for row in rows
    ]


def verdicts_of(
    recipe: Recipe, records: Sequence[Record], scatter: dict[str, float | None]
) -> list[Verdict | None]:
    """Return whether a row with records reaches the paper's two numbers."""
    return [reached(z_of(recipe, records, part, scatter)) for part in PARTS if records]


def cells(recipe: Recipe, records: Sequence[Record], scatter: dict[str, float | None]) -> list[Any]:
    """Return the cells of a recipe's row, without the title."""
    papers = {"valid": recipe.valid, "test": recipe.test}
    where = f"make-{recipe.name}"
    numbers: list[Any] = []
    for part, paper in papers.items():
        values = [record[part] for record in records]
        numbers += [as_paper(paper), link(where, spread(values, recipe.measure))]
        numbers.append(
            NONE if paper is None else rounded(fmean(values) - paper, recipe.measure, "+")
        )
    zs = [z for part in PARTS if (z := z_of(recipe, records, part, scatter)) is not None]
    verdicts = [reached(z) or NONE for z in zs]
    verdict = verdicts[0] if len(set(verdicts)) == 1 else ", ".join(verdicts)
    mean, at_once = minutes(records)
    return [
        *numbers,
        ", ".join(map(as_z, zs)) or NONE,
        verdict or NONE,
        seeds_of(records),
        best_epoch(records),
        join(
            [f"{mean:.1f}", Html("<br>"), element("small", f"{at_once} at once")]
            if at_once > 1
            else [f"{mean:.1f}"]
        ),
    ]


def as_paper(value: float | None) -> str:
    """Format a number as the paper prints it."""
    return NONE if value is None else str(value)


def drawn_figure(drawn: figures.Drawn) -> Html:
    """Return a figure of the paper. The caption says what it shows and which results it lacks."""
    picture = Html(plots.svg(drawn.figure, f"fig-{drawn.name}", drawn.title, drawn.text))
    finding, words = figures.caption(drawn)
    prefix = "flow-" if drawn.name == "gradient-flow" else "make-"
    have = [name for name in drawn.recipes if name not in drawn.missing]
    for what, names in (("Made by the commands of", have), ("No results yet of", drawn.missing)):
        if names:
            to = join((link(f"{prefix}{name}", RECIPES[name].row) for name in names), ", ")
            words.append(element("small", f"{what}: ", to, "."))
    return figure(picture, finding, *words, name=f"figure-{drawn.name}")


def commands(own: dict[str, list[Record]], results: Path) -> list[Html]:
    """Return the commands of every recipe: those that made its records, or the one to run.

    The recipes of gradient flow also have the commands that measure the gradients.
    """
    text = (
        "A command skips a run whose record already exists; a clone of the project contains "
        "records. To run it again, add "
    )
    parts: list[Html] = [
        element("p", text, code("--out again --results again/results"), " to the command.")
    ]
    for task in MEASURES:
        lines = []
        for recipe in (recipe for recipe in RECIPES.values() if recipe.task == task):
            lines.append(
                element(
                    "dt", recipe.row, " ", element("small", recipe.name), id=f"make-{recipe.name}"
                )
            )
            records = own[recipe.name]
            for record in records:
                made = f"{record['device']}, torch {record['versions']['torch']}, {record['date']}"
                lines.append(element("dd", code(record["command"]), " ", element("small", made)))
            if not records:
                lines.append(
                    element(
                        "dd",
                        code(f"zoneout reproduce {recipe.name}"),
                        " ",
                        element("small", no_run(recipe)),
                    )
                )
            if task == "gradient-flow":
                lines.append(element("dt", recipe.row, ", the gradients", id=f"flow-{recipe.name}"))
                flows = figures.flow_records(recipe, results)
                lines += [element("dd", code(flow["command"])) for flow in flows]
                if not flows:
                    to_do = code(f"zoneout gradients {recipe.name}")
                    lines.append(element("dd", to_do, " ", element("small", "not measured yet")))
        parts.append(element("h3", TASKS[task][0] if task in TASKS else "Gradient flow"))
        parts.append(element("dl", join(lines, "\n")))
    return parts


# --- speed ----------------------------------------------------------------------------------------

_GPU = "python benchmarks/gpu.py"
GROUPS = {  # groups of benchmarks/results.csv: description, and the command that measures it again
    "train": (
        "a training step with zoneout, compared with torch.nn without",
        "python benchmarks/bench.py train",
    ),
    "eval": ("evaluation", "python benchmarks/bench.py eval"),
    "packed": ("sequences of different lengths", "python benchmarks/bench.py packed"),
    "memory": ("peak memory, MiB", "python benchmarks/bench.py memory"),
    "torch calls": ("without a compiler", "python benchmarks/bench.py torch-calls"),
    "combination": ("every combination of noises", "python benchmarks/bench.py combinations"),
    "norm": ("with norms", "python benchmarks/bench.py combinations"),
    "bf16": ("bf16", "python benchmarks/bench.py bf16"),
    "cell": ("one step of a cell", "python benchmarks/bench.py cells"),
    "gpu graph": (
        "a training step with zoneout, compared with torch.nn without, in a CUDA graph",
        f"{_GPU} headline",
    ),
    "gpu eager": (
        "a training step with zoneout, compared with torch.nn without, eager",
        f"{_GPU} headline",
    ),
    "gpu grid graph": ("a grid of sizes, in a CUDA graph", f"{_GPU} grid"),
    "gpu grid eager": ("a grid of sizes, eager", f"{_GPU} grid"),
    "gpu combination": (
        "other noises, lengths, resets and directions in a CUDA graph, packed input eager",
        f"{_GPU} combinations",
    ),
    "gpu norm": ("with norms, compared with plain zoneout", f"{_GPU} combinations"),
    "gpu host": ("host time per call", f"{_GPU} host"),
    "gpu systems": ("an update of a system with a loop in torch calls", f"{_GPU} systems"),
    "gpu memory": ("peak memory, MiB", f"{_GPU} memory"),
}
# Columns of text, and columns of numbers.
WORDS = ("group", "layer", "what", "against", "shape", "dtype", "backend", "device")
NUMBERS = ("ours", "theirs", "ratio", "goal")
OPEN = ("train", "gpu graph")  # groups that are shown unfolded; the reader unfolds the others


def speed(benchmarks: Path) -> list[Html]:
    """Return a table for each group of measurements and each device."""
    if not benchmarks.is_file():
        return [
            element(
                "p",
                "No measurements: the file ",
                code(str(benchmarks)),
                " is not there. ",
                _bench(),
            )
        ]
    try:
        lines = list(csv.DictReader(io.StringIO(disk.read_text(benchmarks), newline="")))
        for line in lines:
            if missing := [name for name in (*WORDS, *NUMBERS) if line.get(name) is None]:
                raise ValueError(f"a line has no value for {', '.join(missing)}")
            for name in NUMBERS:
                if not math.isfinite(float(line[name])):
                    raise ValueError(f"{name}: expected a finite number, got {line[name]}")
    except (OSError, ValueError, csv.Error) as error:
        raise RunError(
            f"{benchmarks} is not a table of measurements: {disk.reason(error)}"
        ) from None
    text = (
        "A ratio is our value divided by theirs, the median of paired runs. Below 1, ours is "
        "faster (or needs less memory). "
    )
    parts = [element("p", text, _bench())]
    groups = dict.fromkeys(
        (line["backend"] == "cuda", line["device"], line["group"]) for line in lines
    )
    for on_gpu, device, group in sorted(groups, key=lambda key: (key[2] not in OPEN, key[0])):
        rows = [line for line in lines if (line["device"], line["group"]) == (device, group)]
        parts.append(speed_table(group, device, on_gpu, rows))
    return parts


def _bench() -> Html:
    return join(
        [
            "To measure, run ",
            code("make bench"),
            ", on a GPU ",
            code("python benchmarks/gpu.py"),
            ".",
        ]
    )


def speed_table(group: str, device: str, on_gpu: bool, rows: Sequence[dict[str, str]]) -> Html:
    """Return the table of one group of measurements on one device."""
    words, command = GROUPS.get(group, (group, _GPU if on_gpu else "python benchmarks/bench.py"))
    unit = "" if group.endswith("memory") else "; times in milliseconds"
    versions, dates = (
        [*dict.fromkeys(sorted(row.get(key) or "" for row in rows))] for key in ("torch", "date")
    )
    # Rows that were measured again are last in the file. Group the rows by layer and shape.
    places = [*dict.fromkeys((row["layer"], row["shape"]) for row in rows)]
    rows = sorted(rows, key=lambda row: (places.index((row["layer"], row["shape"])), row["dtype"]))
    name = slug(f"speed-{device}-{group}")
    caption = join(
        [
            f"{device}: {words}{unit}. ",
            element("small", f"torch {', '.join(versions)}; {' and '.join(dates)}"),
            " ",
            element("span", code(command), id=f"{name}-command"),
        ]
    )
    head = [
        ["Layer, shape", "What", "Type", "Ours", "Theirs", "Compared with", "Ratio", "Goal", "Met"]
    ]
    body = []
    for row in rows:
        ours, theirs, ratio, goal = (float(row[key]) for key in NUMBERS)
        times = [row["what"], row["dtype"], f"{ours:.3g}", f"{theirs:.3g}", row["against"]]
        verdict = [
            link(f"{name}-command", f"{ratio:.2f}"),
            f"{goal:.3g}",
            "yes" if ratio <= goal else "no",
        ]
        body.append([f"{row['layer']}, {row['shape']}", *times, *verdict])
    shown = table(caption, head, body, name)
    if group in OPEN:
        return shown
    met = sum(line[-1] == "yes" for line in body)
    return element(
        "details",
        element("summary", f"{device}: {words}: {met} of {len(body)} within their goal"),
        shown,
    )


def slug(text: str) -> str:
    """Turn a text into an id for HTML.

    >>> slug("AMD EPYC <9>: train")
    'amd-epyc-9-train'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


# --- the user's runs ------------------------------------------------------------------------------


def runs_page(folders: Sequence[Path]) -> str:
    """Return a page that compares runs: results, curves, and the options in which they differ."""
    pages = [describe(folder) for folder in folders]
    curves = [plots.read_curve(folder, str(folder)) for folder in folders]
    parts: list[tuple[str, str, Html]] = []
    tables, pictures = [], learning_curves(curves)
    for measure in dict.fromkeys(curve.measure for curve in curves):
        tables.append(
            runs_table(
                {n: pages[n] for n, curve in enumerate(curves) if curve.measure == measure}, measure
            )
        )
    parts.append(("results", "Results", section("results", "Results", *tables)))
    flows = {
        str(f): gradient_flow.read_record(f / "gradients.json")
        for f in folders
        if (f / "gradients.json").exists()
    }
    if flows:
        title = "Gradient flow"
        text = (
            "How the norm of the loss’s gradient is distributed over the time steps, in the last "
            "layer."
        )
        drawn = figures.flow_figure({name: [record] for name, record in flows.items()})
        picture = Html(plots.svg(drawn, "fig-flow", title, text))
        pictures.append(figure(picture, title, text, code("zoneout gradients"), name="figure-flow"))
    if pictures:
        parts.append(("figures", "Figures", section("figures", "Figures", *pictures)))
    if differing := options_table(pages):
        parts.append(
            (
                "options",
                "Options",
                section("options", "Options in which the runs differ", differing),
            )
        )
    parts.append(("commands", "Commands", section("commands", "The commands", run_commands(pages))))
    lead = element("p", f"A comparison of {len(pages)} runs." if len(pages) > 1 else "One run.")
    footer = join(["Made by ", code("zoneout report"), "."])
    return document(
        "Runs compared" if len(pages) > 1 else f"The run {folders[0]}",
        lead,
        parts,
        element("p", footer),
    )


def runs_table(pages: dict[int, dict[str, Any]], measure: str) -> Html:
    """Return a table of the results of every run, and how far its validation is from the best."""
    best = min((page["best"][measure] for page in pages.values() if page["best"]), default=None)
    names = [
        "best validation",
        "above the best run",
        "at epoch",
        "test",
        "epochs",
        "parameters",
        "time",
        "state",
    ]
    rows = []
    for which, page in pages.items():
        valid, test, where = page["best"], page["test"], f"make-run-{which}"
        rows.append(
            [
                page["run"],
                link(where, f"{valid[measure]:.4f}") if valid else NONE,
                f"{valid[measure] - best:+.4f}" if valid and best is not None else NONE,
                f"{valid['epoch']:.4g}" if valid else NONE,
                link(where, f"{test[measure]:.4f}") if test else NONE,
                f"{page['epoch']:.4g}",
                f"{page['parameters']:,}" if page["parameters"] else NONE,
                duration(page["seconds"]) if page["seconds"] else NONE,
                page["status"],
            ]
        )
    return table(
        f"In {UNITS[measure]}; lower is better.", [["Run", *names]], rows, f"runs-{measure}"
    )


def options_table(pages: Sequence[dict[str, Any]]) -> Html | None:
    """Return a table of the options that differ between the runs, or None if there are none."""
    names = [
        n for n in configs.names() if len({spelled(at(page["config"], n)) for page in pages}) > 1
    ]
    rows = [
        [code(f"--{n.replace('_', '-')}"), *(spelled(at(page["config"], n)) for page in pages)]
        for n in names
    ]
    head = [["Option", *(page["run"] for page in pages)]]
    return table("All other options are the same.", head, rows, "options") if rows else None


def spelled(value: Any) -> str:
    """Format the value of an option for a table."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def run_commands(pages: Sequence[dict[str, Any]]) -> Html:
    """Return a list of the commands that repeat the runs."""
    lines: list[Html] = []
    for which, page in enumerate(pages):
        words = ["zoneout", "train", "--out", page["run"], *configs.flags(page["changed"])]
        lines.append(element("dt", page["run"], id=f"make-run-{which}"))
        lines.append(element("dd", code(shlex.join(words))))
    return element("dl", join(lines, "\n"))
