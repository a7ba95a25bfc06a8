"""The report: one page with the paper's tables beside ours, its figures and the speed; or one that compares runs.

Everything on it is computed from `results/`, `benchmarks/results.csv` or the runs' folders, and every number of ours
leads to the command that makes it again.
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

from . import config as configs
from . import disk, figures, gradients, plots
from .config import at
from .describe import describe
from .disk import RunError
from .measures import REACHED, UNITS, reached, rounded, spread
from .page import Html, code, document, element, figure, join, learning_curves, link, section, table
from .progress import duration
from .recipes import MEASURES, QUOTED, RECIPES, Recipe
from .results import Record, best_epoch, fitting, minutes, seeds_of

NONE = "–"
TASKS = {  # what a table is called, and where in the paper its rows are
    "char-ptb": ("Penn Treebank, characters", "Table 1"),
    "word-ptb": ("Penn Treebank, words", "Table 1"),
    "text8": ("text8", "Table 1"),
    "text8-prefix": ("The first 74 million characters of text8", "not in the paper; as Table 1, on less text"),
    "pmnist": ("Permuted sequential MNIST, in the paper's order", "Table 2"),
    "pmnist-permuted": ("Sequential MNIST, truly permuted", "not in the paper; as Table 2, in another order"),
}
_REACHED = REACHED.replace("'", "’").replace(" %", "\N{NO-BREAK SPACE}%")
RULE = (
    "Lower is better. Ours is the mean over seeds ± their standard deviation, of the weights with the best validation; "
    f"the epoch is that of this validation, the minutes are those of one run. Reached means that {_REACHED}. A run "
    "with batch norm is validated with the statistics of its batches, as the paper’s were."
)


def write(out: Path, page: str) -> None:
    """Write a page to a file, or say why not."""
    with disk.explained(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        disk.write_text(out, page)


# --- the paper -------------------------------------------------------------------------------------


def paper_page(results: Path, benchmarks: Path) -> str:
    """The paper's tables beside ours, its figures, the speed, and how all of it is made."""
    found = {recipe.name: fitting(recipe, results) for recipe in RECIPES.values()}
    own = {name: records for name, (records, _) in found.items()}
    count = sum(len(records) for records in own.values())
    with_any = sum(bool(records) for records in own.values())
    lead = element(
        "p",
        "The paper’s experiments, run again: its tables beside ours, its figures, and the speed of the layers. Made "
        f"from {count} records of {with_any} recipes; {len(own) - with_any} of the {len(own)} recipes have not been "
        "run yet. A number of ours is a link to the command that makes it, and so is a ratio of speed.",
    )
    tables = [task_section(task, own) for task in TASKS]
    strangers = [(name, record) for name, (_, others) in found.items() for record in others]
    notes = [
        element("p", f"Left out, since its settings are not the recipe’s: {name}, seed {record['seed']}.")
        for name, record in strangers
    ]
    drawn = figures.draw_all(results)
    sections = [
        ("tables", "Tables", section("tables", "The paper’s tables and ours", element("p", RULE), *tables, *notes)),
        ("figures", "Figures", section("figures", "Figures", *map(drawn_figure, drawn))),
        ("speed", "Speed", section("speed", "Speed", *speed(benchmarks))),
        ("commands", "Commands", section("commands", "The commands", *commands(own, results))),
    ]
    footer = join(
        ["Made by ", code("zoneout report"), " from ", code(str(results)), " and ", code(str(benchmarks)), "."]
    )
    return document("Zoneout: the paper’s results, run again", lead, sections, element("p", footer))


def task_section(task: str, own: dict[str, list[Record]]) -> Html:
    """A task: the rows of the paper's table, ours, then those of its figures and text."""
    title, where = TASKS[task]
    recipes = [recipe for recipe in RECIPES.values() if recipe.task == task]
    quoted = [row for row in QUOTED if row[0] == task]
    unit = UNITS[MEASURES[task]]
    main, ours, rest = ([r for r in recipes if r.group == group] for group in ("table", "ours", "more"))
    parts = [results_table(f"{title}: {where}. In {unit}.", main, own, quoted, name=task)]
    if ours:
        caption = f"{title}: past the paper, whose zoneout row stands beside. In {unit}."
        parts.append(results_table(caption, ours, own, name=f"{task}-ours"))
    if rest:
        caption = f"{title}: what else the paper has in its figures and its text. In {unit}."
        shown = results_table(caption, rest, own, name=f"{task}-more")
        parts.append(element("details", element("summary", f"{len(rest)} more, of its figures and its text"), shown))
    return section(f"task-{task}", title, *parts, level=3)


def results_table(
    caption: str, recipes: Sequence[Recipe], own: dict[str, list[Record]], quoted: Sequence[Any] = (), *, name: str
) -> Html:
    """Rows of the paper beside ours; a row that has not been run is there, and says so."""
    head: list[list[Any]] = [
        ["Model", ("Validation", 3), ("Test", 3), "Reached", "Seeds", "Epoch", "Minutes"],
        ["paper", "ours", "difference"] * 2,
    ]
    rows = [[recipe.row, *cells(recipe, own[recipe.name])] for recipe in recipes]
    for _, row, valid, test in quoted:
        numbers = [cell for paper in (valid, test) for cell in (as_paper(paper), NONE, NONE)]
        rows.append([join([row, " ", element("small", "quoted by the paper, not built here")]), *numbers, *[NONE] * 4])
    return table(caption, head, rows, name)


def cells(recipe: Recipe, records: Sequence[Record]) -> list[Any]:
    """What a row of a table says of a recipe."""
    papers = {"valid": recipe.valid, "test": recipe.test}
    where = f"make-{recipe.name}"
    if not records:
        missing = link(where, "no run yet")
        return [cell for paper in papers.values() for cell in (as_paper(paper), missing, NONE)] + [NONE] * 4
    found: list[Any] = []
    verdicts = []
    for part, paper in papers.items():
        values = [record[part] for record in records]
        found += [as_paper(paper), link(where, spread(values, recipe.measure))]
        found.append(NONE if paper is None else rounded(fmean(values) - paper, recipe.measure, "+"))
        if paper is not None and recipe.held:
            verdicts.append("yes" if reached(values, paper, recipe.measure) else "no")
    verdict = verdicts[0] if len(set(verdicts)) == 1 else ", ".join(verdicts)
    mean, at_once = minutes(records)
    return [
        *found,
        verdict or NONE,
        seeds_of(records),
        best_epoch(records),
        join([f"{mean:.1f}", Html("<br>"), element("small", f"{at_once} at once")] if at_once > 1 else [f"{mean:.1f}"]),
    ]


def as_paper(value: float | None) -> str:
    """A number as the paper has it."""
    return NONE if value is None else str(value)


def drawn_figure(drawn: figures.Drawn) -> Html:
    """A figure of the paper on the page, with what it shows and lacks in words."""
    picture = Html(plots.svg(drawn.figure, f"fig-{drawn.name}", drawn.title, drawn.text))
    words: list[Any] = [f"{drawn.where[0].upper()}{drawn.where[1:]}. {drawn.text}"]
    prefix = "flow-" if drawn.name == "gradient-flow" else "make-"
    have = [name for name in drawn.recipes if name not in drawn.missing]
    for what, names in (("Made by the commands of", have), ("No results yet of", drawn.missing)):
        if names:
            to = join((link(f"{prefix}{name}", RECIPES[name].row) for name in names), ", ")
            words.append(element("small", f"{what}: ", to, "."))
    return figure(picture, drawn.title, *words, name=f"figure-{drawn.name}")


def commands(own: dict[str, list[Record]], results: Path) -> list[Html]:
    """For every recipe the commands that made its records, or the one that would; and of gradient flow those too."""
    text = "A run whose record is here already, as in a clone of the project, is made anew where it finds none: with "
    parts: list[Html] = [element("p", text, code("--out again --results again/results"), " behind its command.")]
    for task in MEASURES:
        lines = []
        for recipe in (recipe for recipe in RECIPES.values() if recipe.task == task):
            lines.append(element("dt", recipe.row, " ", element("small", recipe.name), id=f"make-{recipe.name}"))
            records = own[recipe.name]
            for record in records:
                made = f"{record['device']}, torch {record['versions']['torch']}, {record['date']}"
                lines.append(element("dd", code(record["command"]), " ", element("small", made)))
            if not records:
                lines.append(
                    element("dd", code(f"zoneout reproduce {recipe.name}"), " ", element("small", "not run yet"))
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


# --- speed -----------------------------------------------------------------------------------------

_GPU = "python benchmarks/gpu.py"
GROUPS = {  # of benchmarks/results.csv: what it is in words, and the command that measures it again
    "train": ("a training step with zoneout against torch.nn without", "python benchmarks/bench.py train"),
    "eval": ("evaluation", "python benchmarks/bench.py eval"),
    "packed": ("sequences of different lengths", "python benchmarks/bench.py packed"),
    "memory": ("peak memory, MiB", "python benchmarks/bench.py memory"),
    "torch calls": ("without a compiler", "python benchmarks/bench.py torch-calls"),
    "combination": ("every combination of noises", "python benchmarks/bench.py combinations"),
    "norm": ("with norms", "python benchmarks/bench.py combinations"),
    "bf16": ("bf16", "python benchmarks/bench.py bf16"),
    "cell": ("one step of a cell", "python benchmarks/bench.py cells"),
    "gpu graph": ("a training step with zoneout against torch.nn without, in a CUDA graph", f"{_GPU} headline"),
    "gpu eager": ("a training step with zoneout against torch.nn without, eager", f"{_GPU} headline"),
    "gpu grid graph": ("a grid of sizes, in a CUDA graph", f"{_GPU} grid"),
    "gpu grid eager": ("a grid of sizes, eager", f"{_GPU} grid"),
    "gpu combination": (
        "other noises, lengths, resets and directions in a CUDA graph, packed input eager",
        f"{_GPU} combinations",
    ),
    "gpu norm": ("with norms, against plain zoneout", f"{_GPU} combinations"),
    "gpu host": ("what the host needs for a call", f"{_GPU} host"),
    "gpu memory": ("peak memory, MiB", f"{_GPU} memory"),
}
WORDS = ("group", "layer", "what", "against", "shape", "dtype", "backend", "device")  # columns
NUMBERS = ("ours", "theirs", "ratio", "goal")
OPEN = ("train", "gpu graph")  # shown at once; the rest is folded


def speed(benchmarks: Path) -> list[Html]:
    """A table for every group of measurements and device."""
    if not benchmarks.is_file():
        return [element("p", "There are no measurements here: ", code(str(benchmarks)), " is not there. ", _bench())]
    try:
        lines = list(csv.DictReader(io.StringIO(disk.read_text(benchmarks), newline="")))
        for line in lines:
            if missing := [name for name in (*WORDS, *NUMBERS) if line.get(name) is None]:
                raise ValueError(f"a line lacks {', '.join(missing)}")
            for name in NUMBERS:
                if not math.isfinite(float(line[name])):
                    raise ValueError(f"{name}: expected a finite number, got {line[name]}")
    except (OSError, ValueError, csv.Error) as error:
        raise RunError(f"{benchmarks} is not a table of measurements: {disk.reason(error)}") from None
    text = "Every ratio is ours divided by theirs, the median of paired runs: below 1 is faster (or smaller). "
    parts = [element("p", text, _bench())]
    groups = dict.fromkeys((line["backend"] == "cuda", line["device"], line["group"]) for line in lines)
    for on_gpu, device, group in sorted(groups, key=lambda key: (key[2] not in OPEN, key[0])):
        rows = [line for line in lines if (line["device"], line["group"]) == (device, group)]
        parts.append(speed_table(group, device, on_gpu, rows))
    return parts


def _bench() -> Html:
    return join(["To measure again: ", code("make bench"), ", on a GPU ", code("python benchmarks/gpu.py"), "."])


def speed_table(group: str, device: str, on_gpu: bool, rows: Sequence[dict[str, str]]) -> Html:
    """One group of measurements on one device."""
    words, command = GROUPS.get(group, (group, _GPU if on_gpu else "python benchmarks/bench.py"))
    unit = "" if group.endswith("memory") else "; times in milliseconds"
    versions, dates = ([*dict.fromkeys(sorted(row.get(key) or "" for row in rows))] for key in ("torch", "date"))
    # Rows that were measured again stand last in the file: those of one layer and shape belong together.
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
    head = [["Layer, shape", "What", "Type", "Ours", "Theirs", "Against", "Ratio", "Goal", "Met"]]
    body = []
    for row in rows:
        ours, theirs, ratio, goal = (float(row[key]) for key in NUMBERS)
        times = [row["what"], row["dtype"], f"{ours:.3g}", f"{theirs:.3g}", row["against"]]
        verdict = [link(f"{name}-command", f"{ratio:.2f}"), f"{goal:.3g}", "yes" if ratio <= goal else "no"]
        body.append([f"{row['layer']}, {row['shape']}", *times, *verdict])
    found = table(caption, head, body, name)
    if group in OPEN:
        return found
    met = sum(line[-1] == "yes" for line in body)
    return element("details", element("summary", f"{device}: {words}: {met} of {len(body)} within their goal"), found)


def slug(text: str) -> str:
    """A text as an id.

    >>> slug("AMD EPYC <9>: train")
    'amd-epyc-9-train'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


# --- runs of the reader's own ----------------------------------------------------------------------


def runs_page(folders: Sequence[Path]) -> str:
    """Runs compared with each other: their results, their curves, and in which options they differ."""
    pages = [describe(folder) for folder in folders]
    curves = [plots.read_curve(folder, str(folder)) for folder in folders]
    parts: list[tuple[str, str, Html]] = []
    tables, pictures = [], learning_curves(curves)
    for measure in dict.fromkeys(curve.measure for curve in curves):
        tables.append(runs_table({n: pages[n] for n, curve in enumerate(curves) if curve.measure == measure}, measure))
    parts.append(("results", "Results", section("results", "Results", *tables)))
    flows = {str(f): gradients.read_record(f / "gradients.json") for f in folders if (f / "gradients.json").exists()}
    if flows:
        title = "Gradient flow"
        text = "How the norm of the loss’s gradient is spread over the steps, in the last layer."
        drawn = figures.flow_figure({name: [record] for name, record in flows.items()})
        picture = Html(plots.svg(drawn, "fig-flow", title, text))
        pictures.append(figure(picture, title, text, code("zoneout gradients"), name="figure-flow"))
    if pictures:
        parts.append(("figures", "Figures", section("figures", "Figures", *pictures)))
    if differing := options_table(pages):
        parts.append(("options", "Options", section("options", "Options in which they differ", differing)))
    parts.append(("commands", "Commands", section("commands", "The commands", run_commands(pages))))
    lead = element("p", f"{len(pages)} runs side by side." if len(pages) > 1 else "One run.")
    footer = join(["Made by ", code("zoneout report"), "."])
    return document("Runs compared" if len(pages) > 1 else f"The run {folders[0]}", lead, parts, element("p", footer))


def runs_table(pages: dict[int, dict[str, Any]], measure: str) -> Html:
    """What came out of every run, and how far its validation is from the best of them."""
    best = min((page["best"][measure] for page in pages.values() if page["best"]), default=None)
    names = ["best validation", "from the best run", "at epoch", "test", "epochs", "parameters", "time", "state"]
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
    return table(f"In {UNITS[measure]}; lower is better.", [["Run", *names]], rows, f"runs-{measure}")


def options_table(pages: Sequence[dict[str, Any]]) -> Html | None:
    """The options that are not the same in all runs."""
    names = [n for n in configs.names() if len({spelled(at(page["config"], n)) for page in pages}) > 1]
    rows = [[code(f"--{n.replace('_', '-')}"), *(spelled(at(page["config"], n)) for page in pages)] for n in names]
    head = [["Option", *(page["run"] for page in pages)]]
    return table("All other options are the same.", head, rows, "options") if rows else None


def spelled(value: Any) -> str:
    """The value of an option, in a table."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def run_commands(pages: Sequence[dict[str, Any]]) -> Html:
    """The command that makes each run again."""
    lines: list[Html] = []
    for which, page in enumerate(pages):
        words = ["zoneout", "train", "--out", page["run"], *configs.flags(page["changed"])]
        lines.append(element("dt", page["run"], id=f"make-run-{which}"))
        lines.append(element("dd", code(shlex.join(words))))
    return element("dl", join(lines, "\n"))
