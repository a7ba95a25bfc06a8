"""Results: one record per finished run, and the tables computed from the records.

A record is a file `results/RECIPE/seed-N.json`. It holds the config, the scores under every
evaluation protocol, a learning curve, the device and the versions. Every number of ours in
`docs/results.md` is computed from these files. The paper's numbers come from `recipes`.
"""

from __future__ import annotations

import json
import math
import platform
import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any, NamedTuple, TypeAlias

import torch

import zoneout as zo

from .. import disk
from ..console import shown
from ..disk import RunError
from ..training import config as configs
from ..training import runs
from ..training.config import Config, Protocol
from ..training.evaluate import evaluate, nothing
from ..training.measures import (
    DIFFERENT,
    REACHED,
    UNITS,
    Verdict,
    measure_of,
    pooled,
    reached,
    rounded,
    spread,
    z_score,
)
from ..training.processes import device_of
from ..training.train import ALSO, data_of, values_of
from .recipes import MEASURES, QUOTED, RECIPES, Recipe

Record: TypeAlias = dict[str, Any]

FORMAT = 1
# Fields that a recipe leaves open.
FREE = (
    "seed",
    "precision",
    "device",
    "backend",
    "log_every",
    "save_every",
    "system.compile",
)
COLUMNS = (
    "paper: valid, test",
    "ours: valid",
    "ours: test",
    "difference",
    "z",
    "reached",
    "seeds",
    "epochs",
    "minutes",
)
GROUPS = {  # groups of recipes, and the line above each group's table
    "table": "",
    "ours": "Beyond the paper, compared with the paper's zoneout row:",
    "systems": "Other systems that the paper names, and models to compare with:",
    "past": "Past the paper ([the plan](past-the-paper.md)), with numbers of their authors:",
    "more": "In the paper's figures and text:",
}
CORPORA = {  # the tasks of the README's table, as its readers know them
    "char-ptb": "PTB characters, bits",
    "word-ptb": "PTB words, perplexity",
    "pmnist": "MNIST (paper's order), error",
}
HEADLINES = (  # the recipes in the README's table
    "char_ptb_unregularised", "char_ptb_recurrent_dropout", "char_ptb_zoneout",
    "word_ptb_nr_dropout", "word_ptb_zoneout",
    "pmnist_unregularised", "pmnist_zoneout", "pmnist_batch_norm_zoneout",
)  # fmt: skip
POINTS = 200  # maximum number of points kept of a learning curve
NUMBER = (int, float)
KINDS: dict[str, Any] = {  # the fields of a record and their types
    "recipe": str, "seed": int, "measure": str, "valid": NUMBER, "test": NUMBER,
    "best_epoch": NUMBER, "epochs": NUMBER, "seconds": NUMBER, "at_once": int, "precision": str,
    "device": str, "versions": dict, "date": str, "command": str, "scores": list, "curve": dict,
    "config": dict,
}  # fmt: skip
GRADIENTS = "gradients-seed-{}.json"  # the file of a gradient flow, beside that of its run
RULE = f"""
Lower is better. `zoneout reproduce --write` makes this page from the records in `results/`;
[Reproducing the paper](reproducing.md) says how to make the records. Our numbers are means over
seeds ± standard deviation, for the weights with the best validation score. *Reached* means that
{REACHED}. {DIFFERENT}. *Minutes* is the time of one run: the mean over the seeds that shared their
GPU with the fewest other runs. Runs with batch norm use each batch's own statistics for validation,
as the paper's runs did. The *by protocol* tables show both parts with the statistics of the test.
"""
PAGE = f"""# Results

{fill(RULE.strip(), 100, break_on_hyphens=False)}
"""
PARTS = ("valid", "test")
BEGIN, END = "<!-- results: made by zoneout reproduce --write -->", "<!-- end -->"


# --- making a record ------------------------------------------------------------------------------


def make_record(
    folder: Path,
    recipe: str,
    *,
    data: Path | str | None = None,
    device: str = "auto",
    at_once: int = 1,
    tick: Callable[[], None] = nothing,
) -> Record:
    """Return the record of the finished run in `folder`; `at_once` runs shared the device.

    `tick` is called after every batch that is evaluated, and may raise an exception to stop.
    """
    config, summary = runs.read_config(folder), runs.read_summary(folder) or {}
    where, measure = device_of(device), RECIPES[recipe].measure
    if not all(measure in (summary.get(part) or {}) for part in ("best", "test")):
        raise RunError(
            f"{folder / 'summary.json'} has no validation and test in {measure}, as the recipe has "
            "them"
        )
    return {
        "format": FORMAT,
        "recipe": recipe,
        "seed": config.seed,
        "measure": measure,
        "valid": summary["best"][measure],  # under the protocol that the config names
        "test": summary["test"][measure],
        "best_epoch": summary["best"]["epoch"],
        "epochs": summary["epoch"],
        "updates": summary["update"],
        "status": summary["status"],
        "parameters": summary["parameters"],
        "seconds": round(summary["seconds"], 1),
        "at_once": at_once,
        "precision": config.precision,
        "device": torch.cuda.get_device_name(where)
        if where.type == "cuda"
        else f"CPU ({platform.machine()})",
        "versions": {
            "zoneout": zo.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command_of(recipe, config),
        "scores": scores(folder, config, data, where, RECIPES[recipe].samples, tick),
        "curve": curve(runs.read_metrics(folder), measure),
        "config": configs.to_json(config),
    }


def command_of(recipe: str, config: Config) -> str:
    """Return the command that repeats the run."""
    words = [
        "zoneout",
        "reproduce",
        recipe,
        "--first-seed",
        str(config.seed),
        "--precision",
        config.precision,
    ]
    for name, ours, _ in changes(config, RECIPES[recipe].make()):
        words += ["--set", f"{name}={json.dumps(ours)}"]
    return shlex.join(words)


def changes(config: Config, other: Config) -> list[tuple[str, Any, Any]]:
    """Return the differing fields as (name, value, other value), without the fields in `FREE`."""
    there = configs.to_json(other)
    return [
        (n, here, configs.at(there, n))
        for n, here in configs.changed(config, other).items()
        if n not in FREE
    ]


def protocols(config: Config) -> list[Protocol | None]:
    """Return the evaluation protocols of a run: those of its validation and of its test.

    A long text as one sequence takes minutes, so it is evaluated only where the run asks for it.

    A model with a loop in torch calls would need minutes for that sequence, and is spared.

    >>> [p.kind for p in protocols(RECIPES["word_ptb_zoneout"].make())]
    ['streams', 'whole']
    """
    if config.task == "images":
        return [None]
    own = {named(p): p for p in (config.evaluation.valid, config.evaluation.test)}
    return list(own.values())


def scores(
    folder: Path,
    config: Config,
    data: Path | str | None,
    device: torch.device,
    samples: int = 0,
    tick: Callable[[], None] = nothing,
) -> list[Record]:
    """Evaluate the best weights on both parts under every protocol.

    A model with static masks is evaluated twice: with its training masks and with their
    expectation. With `samples`, the mean of the probabilities of that many passes with dropout is
    judged too, on the test part.
    """
    corpus = data_of(folder, config, data)
    found: list[Record] = []
    ways = (
        ("sample", "expectation")
        if config.zoneout.mask == "static"
        else (config.evaluation.at_eval,)
    )
    for at_eval in ways:
        loaded = runs.load(
            folder, device=device, changes={"evaluation.at_eval": at_eval, "device": str(device)}
        )
        for protocol in protocols(config):
            for part in PARTS:
                score = evaluate(
                    loaded.model, corpus, part, loaded.config, protocol=protocol, tick=tick
                )
                how = {"part": part, "protocol": named(protocol), "at_eval": at_eval}
                found.append(
                    how | values_of(score.checked(f"{folder} on {part}"), measure_of(corpus))
                )
    if samples:
        score = evaluate(loaded.model, corpus, "test", loaded.config, samples=samples, tick=tick)
        cut = named(config.evaluation.test)
        how = {"part": "test", "protocol": cut, "at_eval": f"mean of {samples} passes"}
        found.append(how | values_of(score.checked(f"{folder} on test"), measure_of(corpus)))
    return found


def named(protocol: Protocol | None) -> str:
    """Describe a protocol in words."""
    if protocol is None:
        return "images"
    words = {
        "chunks": f"chunks of {protocol.length}",
        "streams": f"{protocol.size} streams",
        "whole": "one sequence",
    }
    return words[protocol.kind]


def curve(rows: Sequence[Record], measure: str) -> Record:
    """Return validation scores and the mean training loss before each, thinned to about `POINTS`
    points; with the other scores (`ALSO`) that the run has.
    """
    valid = [row for row in rows if row["kind"] == "valid"]
    points, before = [], 0
    for number, row in enumerate(valid):
        lines = [
            r["nats"]
            for r in rows
            if r["kind"] == "train" and before < r["update"] <= row["update"]
        ]
        before = row["update"]
        if (
            (number + 1) % math.ceil(len(valid) / POINTS) == 0
            or row["best"]
            or number == len(valid) - 1
        ):
            points.append(
                (
                    row["epoch"],
                    round(row[measure], 5),
                    round(fmean(lines), 5) if lines else None,
                    *(None if name not in row else round(row[name], 5) for name in ALSO),
                )
            )
    names = ("epoch", "valid", "train_nats", *ALSO)
    columns = dict(zip(names, map(list, zip(*points) if points else [()] * len(names))))
    return {
        name: values
        for name, values in columns.items()
        if name not in ALSO or any(value is not None for value in values)
    }


def read_record(path: Path) -> Record:
    """Read a record; raise `RunError` with the reason if the file is not a valid record."""
    try:
        record = disk.read_json(path)
        if record["format"] != FORMAT:
            raise ValueError(f"it has format {record['format']!r}, expected {FORMAT}")
        for name, kind in KINDS.items():
            value = record.get(name)
            if (
                not isinstance(value, kind)
                or isinstance(value, bool)
                or (kind is NUMBER and not disk.is_number(value))
            ):
                raise ValueError(f"its {name} is {shown(value)}")
        if (record["recipe"], f"seed-{record['seed']}") != (path.parent.name, path.stem):
            raise ValueError(f"it is of {record['recipe']}, seed {record['seed']}")
        configs.from_json(record["config"])
        _check_parts(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is not a record that can be read: {disk.reason(error)}") from None
    return record


def _check_parts(record: Record) -> None:
    """Raise `ValueError` if a nested value cannot be used by the tables and figures."""
    curve, measure = record["curve"], record["measure"]
    if (known := RECIPES.get(record["recipe"])) is not None and measure != known.measure:
        raise ValueError(f"its measure is {measure!r}, expected {known.measure!r}")
    also = [name for name in ALSO if name in curve]
    lengths = [len(curve[name]) for name in ("epoch", "valid", "train_nats", *also)]
    if lengths[0] == 0 or len(set(lengths)) > 1:
        raise ValueError(
            f"its curve has {', '.join(map(str, lengths))} epochs, validations and training losses"
        )
    numbers = [
        *curve["epoch"],
        *curve["valid"],
        *(v for name in ("train_nats", *also) for v in curve[name] if v is not None),
    ]
    numbers += [score[measure] for score in record["scores"] if measure in score]
    if strange := [value for value in numbers if not disk.is_number(value)]:
        raise ValueError(f"a value of its curve or scores is {shown(strange[0])}")
    if not isinstance(record["versions"].get("torch"), str):
        raise ValueError("its versions have none of torch")
    for score in record["scores"]:
        if missing := {"part", "protocol", "at_eval", measure} - set(score):
            raise ValueError(f"one of its scores lacks {', '.join(sorted(missing))}")


def read_records(results: Path, recipe: str) -> list[Record]:
    """Return the records of a recipe in the order of their seeds."""
    return sorted(
        map(read_record, (results / recipe).glob("seed-*.json")),
        key=lambda record: int(record["seed"]),
    )


# --- what is missing ------------------------------------------------------------------------------


class Missing(NamedTuple):
    """Seeds of a recipe that have no record, and the command that runs them."""

    recipe: Recipe
    seeds: tuple[int, ...]
    command: str
    minutes: float | None  # of one run on a GPU, if the recipe has records
    spare: bool  # to be run only if there is time


def missing(results: Path | str, recipes: Sequence[Recipe] | None = None) -> list[Missing]:
    """Return the runs that the recipes state and that have no record; spare seeds last."""
    results = Path(results)
    found: list[Missing] = []
    for recipe in RECIPES.values() if recipes is None else recipes:
        own = fitting(recipe, results)[0]
        ran, took = {record["seed"] for record in own}, minutes(own)[0] if own else None
        run = f"zoneout reproduce {recipe.name}"
        exact = f" --precision {recipe.gpu_precision}"
        if left := tuple(seed for seed in recipe.seeds if seed not in ran):
            found.append(Missing(recipe, left, run + exact, took, False))
        if left := tuple(seed for seed in recipe.spare if seed not in ran):
            run += f" --first-seed {left[0]}" + f" --seeds {len(left)}" * (len(left) > 1)
            found.append(Missing(recipe, left, run + exact, took, True))
        for seed in recipe.seeds if recipe.task == "gradient-flow" else ():
            if not (results / recipe.name / GRADIENTS.format(seed)).exists():
                measured = f"zoneout gradients {recipe.name} --seed {seed}"
                found.append(Missing(recipe, (seed,), measured, None, False))
    return sorted(found, key=lambda one: one.spare)


def missing_text(results: Path | str) -> str:
    """Return the list of missing runs, one command a line."""
    if not (found := missing(results)):
        return "Nothing is missing: every recipe has a record of each of its seeds."
    lines = []
    for spare, title in ((False, "Missing:"), (True, "If there is time:")):
        part = [one for one in found if one.spare == spare]
        lines += ["", title, ""] if part else []
        for one in part:
            seeds = f"seed{'s' * (len(one.seeds) > 1)} {', '.join(map(str, one.seeds))}"
            each = " each" if len(one.seeds) > 1 else ""
            took = f", {one.minutes:.0f} min{each}" if one.minutes and one.minutes >= 1 else ""
            first = f", after {one.recipe.grid}" if one.recipe.grid else ""
            lines.append(f"  {one.command}  # {seeds}{took}{first}")
    left_out = [recipe for recipe in RECIPES.values() if recipe.not_run]
    lines += ["", "Not to be run:", ""] if left_out else []
    lines += [f"  {recipe.name}: {recipe.not_run}" for recipe in left_out]
    return "\n".join(lines[1:])


# --- tables ---------------------------------------------------------------------------------------


def table(
    results: Path | str, recipes: Sequence[Recipe] | None = None, *, details: bool = True
) -> str:
    """Return one Markdown table per task; `details` adds one table by protocol and one of all
    runs.
    """
    results = Path(results)
    chosen = list(RECIPES.values()) if recipes is None else list(recipes)
    parts = []
    for task in MEASURES:
        rows = [r for r in chosen if r.task == task]
        if not rows:
            continue
        own = rows[0].make().evaluation
        cut = (
            ""
            if rows[0].measure == "error"
            else f"\n\nValid: {named(own.valid)}. Test: {named(own.test)}."
        )
        parts.append(f"## {task}{cut}")
        scatter = scatter_of(records_of(task, results))
        for group, words in GROUPS.items():
            if of_group := [r for r in rows if r.group == group]:
                parts += [words] if words else []
                parts.append(
                    _main_table(
                        of_group, results, scatter, quoted=group == "table" and recipes is None
                    )
                )
        parts += _other_tables(rows, results) if details else []
    return "\n\n".join(parts)


def order(results: Path | str, recipes: Sequence[Recipe]) -> str:
    """Return the rows of one task that have records, the best validation first, or ""."""
    found = {r.row: own for r in recipes if (own := fitting(r, Path(results))[0])}
    if len(found) < 2 or len({r.task for r in recipes}) > 1:
        return ""
    means = {row: fmean(record["valid"] for record in own) for row, own in found.items()}
    best_first = sorted(means, key=lambda row: means[row])
    words = [f"{row} ({rounded(means[row], recipes[0].measure)})" for row in best_first]
    return f"Best validation first: {'; '.join(words)}."


def document(results: Path | str) -> str:
    """Return the page docs/results.md."""
    return f"{PAGE}\n{table(results)}\n"


def summary(results: Path | str) -> str:
    """Return the README's table: test scores of the `HEADLINES`, ours beside the paper's."""
    lines = _head("test", "method", "paper", "ours", "seeds")
    for recipe in (RECIPES[name] for name in HEADLINES):
        if not (own := fitting(recipe, Path(results))[0]):
            continue
        scatter = scatter_of(records_of(recipe.task, Path(results)))
        verdict = reached(z_of(recipe, own, "test", scatter))
        missed = {"no": " (missed)", "differs": " (differs)"}.get(verdict or "", "")
        score = spread([record["test"] for record in own], recipe.measure).replace(" ± ", "±")
        lines.append(
            _row(
                CORPORA[recipe.task],
                recipe.row,
                str(recipe.test),
                f"{score}{missed}",
                str(len(own)),
            )
        )
    return "\n".join(lines)


def put_summary(text: str, results: Path | str) -> str:
    """Return `text` with the README's table between its two marks."""
    before, mark, after = text.partition(BEGIN)
    return f"{before}{mark}\n\n{summary(results)}\n\n{END}{after.partition(END)[2]}"


def fitting(recipe: Recipe, results: Path) -> tuple[list[Record], list[Record]]:
    """Return a recipe's records in two lists: with the recipe's settings, and with other
    settings.
    """
    found = read_records(results, recipe.name)
    own = [r for r in found if not changes(configs.from_json(r["config"]), recipe.make())]
    return own, [r for r in found if r not in own]


def records_of(task: str, results: Path) -> list[list[Record]]:
    """Return the records of every row of a task that have the row's own settings."""
    return [fitting(recipe, results)[0] for recipe in RECIPES.values() if recipe.task == task]


def scatter_of(rows: Sequence[Sequence[Record]]) -> dict[str, float | None]:
    """Return the standard deviation over seeds, pooled over the rows of a task, by part."""
    return {part: pooled([record[part] for record in row] for row in rows) for part in PARTS}


def z_of(
    recipe: Recipe, records: Sequence[Record], part: str, scatter: dict[str, float | None]
) -> float | None:
    """Return z of a row on a part; None if it is not held to a number of the paper."""
    paper = getattr(recipe, part)
    if paper is None or not recipe.held:
        return None
    return z_score([record[part] for record in records], paper, scatter[part])


def as_z(z: float | None) -> str:
    """Format z with one decimal and a real minus sign.

    >>> as_z(-2.04), as_z(None)
    ('−2.0', '–')
    """
    return "–" if z is None else f"{z:.1f}".replace("-", "−")


def differing(recipe: Recipe, verdicts: Sequence[Verdict | None]) -> str:
    """Say why a row differs from the paper's, or return "" if it does not."""
    why = recipe.differs or "why is not known"
    return f"`{recipe.name}` differs: {why}." if "differs" in verdicts else ""


def _main_table(
    recipes: Sequence[Recipe],
    results: Path,
    scatter: dict[str, float | None],
    quoted: bool = False,
) -> str:
    lines, notes = _head(UNITS[recipes[0].measure], *COLUMNS), []
    for recipe in recipes:
        own, other = fitting(recipe, results)
        name, paper = f"{recipe.row} `{recipe.name}`", _paper(recipe.valid, recipe.test)
        lines.append(
            _row(name, paper, *(_ours(recipe, own, scatter) if own else _blank(no_run(recipe))))
        )
        verdicts = [reached(z_of(recipe, own, part, scatter)) for part in PARTS if own]
        if why := differing(recipe, verdicts):
            notes.append(f"* {why}")
        if own and recipe.left_out:
            notes.append(f"* Left out of `{recipe.name}`: {recipe.left_out}.")
        for record in other:
            wrong = configs.from_json(record["config"])
            shown = ", ".join(
                f"{n} is {here}, not {there}" for n, here, there in changes(wrong, recipe.make())
            )
            notes.append(
                f"* Left out: `{recipe.name}`, seed {record['seed']}, had other settings ({shown})."
            )
    for one in QUOTED if quoted else ():
        if one.task == recipes[0].task:
            shown = f"see `{one.recipe}`" if one.recipe else one.why
            lines.append(_row(one.row, _paper(one.valid, one.test), *_blank(shown)))
    return "\n".join([*lines, *([""] if notes else []), *notes])


def best_epoch(records: Sequence[Record]) -> str:
    """Return the epoch of the best validation score, averaged over seeds."""
    return f"{round(fmean(record['best_epoch'] for record in records), 1):g}"


def best_within(record: Record, epochs: float) -> float:
    """Return the best validation score of a run's first epochs."""
    curve = record["curve"]
    return min(value for at, value in zip(curve["epoch"], curve["valid"]) if at <= epochs)


def seeds_of(records: Sequence[Record]) -> str:
    """List the seeds; three or more consecutive ones become a range.

    >>> seeds_of([{"seed": seed} for seed in (1, 2, 3, 4, 6, 7)])
    '1–4, 6, 7'
    """
    rows: list[list[int]] = []
    for seed in sorted(record["seed"] for record in records):
        if rows and seed == rows[-1][-1] + 1:
            rows[-1].append(seed)
        else:
            rows.append([seed])
    return ", ".join(
        f"{row[0]}–{row[-1]}" if len(row) > 2 else ", ".join(map(str, row)) for row in rows
    )


def minutes(records: Sequence[Record]) -> tuple[float, int]:
    """Return the mean minutes over the runs that shared their GPU least, and how many runs
    shared it.
    """
    fewest = min(record["at_once"] for record in records)
    return fmean(
        record["seconds"] for record in records if record["at_once"] == fewest
    ) / 60, fewest


def _minutes(records: Sequence[Record]) -> str:
    mean, at_once = minutes(records)
    return f"{mean:.1f}" + (f" ({at_once} at once)" if at_once > 1 else "")


def _ours(recipe: Recipe, records: Sequence[Record], scatter: dict[str, float | None]) -> list[str]:
    differences, cells = [], []
    zs = [z_of(recipe, records, part, scatter) for part in PARTS]
    for part in PARTS:
        values, paper = [record[part] for record in records], getattr(recipe, part)
        cells.append(spread(values, recipe.measure))
        differences.append(
            "–" if paper is None else rounded(fmean(values) - paper, recipe.measure, "+")
        )
    known = any(z is not None for z in zs)
    return [
        *cells,
        "–" if recipe.valid is None and recipe.test is None else ", ".join(differences),
        ", ".join(map(as_z, zs)) if known else "–",
        ", ".join(reached(z) or "–" for z in zs) if known else "–",
        seeds_of(records),
        f"{fmean(record['epochs'] for record in records):.4g} (best {best_epoch(records)})",
        _minutes(records),
    ]


def no_run(recipe: Recipe) -> str:
    """Say that a recipe has no record, and why if none is to be made."""
    return f"not run: {recipe.not_run}" if recipe.not_run else "no run yet"


def _blank(why: str) -> list[str]:
    return [why, *[""] * (len(COLUMNS) - 2)]


def _other_tables(recipes: Sequence[Recipe], results: Path) -> list[str]:
    """Return the table by protocol and the table of all runs; nothing without records."""
    found = [(recipe, own) for recipe in recipes if (own := fitting(recipe, results)[0])]
    if not found:
        return []
    measure = recipes[0].measure
    ways = list(
        dict.fromkeys(
            _way(score) for _, own in found for record in own for score in record["scores"]
        )
    )
    by_protocol = _head("by protocol", *ways)
    runs_of = _head(
        "run",
        "valid",
        "test",
        "best epoch",
        "minutes",
        "precision",
        "device",
        "torch",
        "date",
        "command",
    )
    for recipe, own in found:
        scores = [score for record in own for score in record["scores"]]
        for mask in dict.fromkeys(map(_mask, scores)):
            cells = []
            for way in ways:
                values = [s[measure] for s in scores if (_way(s), _mask(s)) == (way, mask)]
                cells.append(spread(values, measure) if values else "")
            by_protocol.append(_row(f"`{recipe.name}`{mask}", *cells))
        for r in own:
            figures = (
                rounded(r["valid"], measure),
                rounded(r["test"], measure),
                f"{r['best_epoch']:.4g}",
            )
            made = (
                r["precision"],
                r["device"],
                r["versions"]["torch"],
                r["date"],
                f"`{r['command']}`",
            )
            name = f"{recipe.row}, seed {r['seed']}"
            runs_of.append(_row(name, *figures, _minutes([r]), *made))
    return ["\n".join(by_protocol), "\n".join(runs_of)]


def _way(score: Record) -> str:
    return f"{score['part']}, {score['protocol']}"


def _mask(score: Record) -> str:
    at_eval: str = score["at_eval"]
    if at_eval == "sample":
        return ", with the training mask"
    return f", {at_eval}" if at_eval.startswith("mean") else ""


def _head(*cells: str) -> list[str]:
    return [_row(*cells), "|" + "---|" * len(cells)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _paper(valid: float | None, test: float | None) -> str:
    """Format the paper's validation and test numbers."""
    return (
        "–"
        if valid is None and test is None
        else ", ".join("–" if v is None else str(v) for v in (valid, test))
    )
