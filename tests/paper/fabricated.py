"""Records that nobody measured: invented curves, to draw figures and pages of (not results); and
how well they show.
"""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from zoneout.paper.cli import demo
from zoneout.paper.disk import write_record
from zoneout.paper.experiments import gradient_flow
from zoneout.paper.experiments.recipes import RECIPES
from zoneout.paper.experiments.results import FORMAT, command_of
from zoneout.paper.experiments.trials import Row
from zoneout.paper.report import html, plots
from zoneout.paper.report import sweep_page as sweep_pages
from zoneout.paper.training.config import Config, change, to_json

VOID = {"meta", "link", "br", "hr", "img", "input"}


def record(recipe: str, seed: int = 1, *, shift: float = 0.0, **settings: Any) -> dict[str, Any]:
    """An invented record of a recipe, its numbers `shift` away from the paper's (or from 1)."""
    row = RECIPES[recipe]
    config = change(row.make(), {"seed": seed} | settings)
    best, test = (row.valid or row.test or 1.0) + shift, (row.test or row.valid or 1.0) + shift
    epochs = [1.0, 2.0, 3.0, 4.0]
    valid = [best * 1.5, best * 1.1, best, best * 1.02]
    nats = {"bits": math.log(2) * best, "perplexity": math.log(best), "error": best}[row.measure]
    scores = [
        {
            "part": part,
            "protocol": "chunks of 100",
            "at_eval": way,
            row.measure: value,
            "nats": 1.0,
            "predictions": 9,
        }
        for part, value in (("valid", best), ("test", test))
        for way in (
            ("sample", "expectation") if config.zoneout.mask == "static" else ("expectation",)
        )
    ]
    return {
        "format": FORMAT,
        "recipe": recipe,
        "seed": seed,
        "measure": row.measure,
        "valid": best,
        "test": test,
        "best_epoch": 3.0,
        "epochs": 4.0,
        "updates": 400,
        "status": "finished",
        "parameters": 1234,
        "seconds": 90.0 * seed,
        "at_once": 1,
        "precision": "bf16",
        "device": "an invented device",
        "versions": {"zoneout": "0", "torch": "0", "cuda": None, "python": "3"},
        "date": "2020-01-02",
        "command": command_of(recipe, config),
        "scores": scores,
        "curve": {
            "epoch": epochs,
            "valid": valid,
            "train_nats": [None, nats, nats * 0.9, nats * 0.8],
        },
        "config": to_json(config),
    }


def flow(recipe: str, seed: int = 1, *, steps: int = 40, fall: float = 0.1) -> dict[str, Any]:
    """An invented gradient flow: shares that fall by a factor for every step back."""
    shares = [math.exp(-fall * (steps - t)) for t in range(steps)]
    share = [value / sum(shares) for value in shares]
    states = {"cell": {"sum": 1.0, "share": share}, "hidden": {"sum": 2.0, "share": share}}
    command = f"zoneout gradients {recipe} --seed {seed}"
    whole = {
        "format": gradient_flow.FORMAT,
        "recipe": recipe,
        "seed": seed,
        "weights": "best",
        "update": 5,
        "epoch": 1.0,
    }
    return whole | {"batches": 10, "rows": 100, "command": command, "layers": {"l0": states}}


def write(results: Path, *records: dict[str, Any]) -> None:
    """Put records where those of their kind belong."""
    for one in records:
        folder = results / one["recipe"]
        write_record(
            folder / f"{'gradients-' if 'layers' in one else ''}seed-{one['seed']}.json", one
        )


def everything(results: Path) -> None:
    """A record of every recipe and a flow of every arm."""
    for number, name in enumerate(RECIPES):
        small = 0.002 if RECIPES[name].measure != "perplexity" else 0.5
        write(results, record(name, shift=small * (number % 4)))
    write(
        results,
        record("char_ptb_zoneout", 2, shift=0.003),
        record("char_ptb_zoneout", 3, shift=-0.001),
    )
    for number, name in enumerate(("unregularised", "zoneout", "dropout")):
        write(results, flow(f"gradient_flow_{name}", fall=0.05 * (number + 1)))


def run_folder(
    folder: Path, name: str, *, best: float, measure: str = "bits", **settings: Any
) -> Path:
    """An invented run of a user's: config, metrics and summary, no weights."""
    path = folder / name
    path.mkdir(parents=True)
    config = change(Config(), settings)
    (path / "config.json").write_text(json.dumps({"format": 1, **to_json(config)}))
    rows: list[dict[str, Any]] = []
    for update, value in ((100, 2 * best), (200, best), (300, 1.1 * best)):
        rows.append(
            {"kind": "train", "update": update, "epoch": update / 100, "nats": best, "lr": 0.1}
        )
        line = {
            "kind": "valid",
            "update": update,
            "epoch": update / 100,
            measure: value,
            "nats": value,
        }
        rows.append(line | {"predictions": 9, "best": value <= 2 * best and update < 300})
    test = {
        "kind": "test",
        "update": 300,
        "epoch": 3.0,
        measure: 0.9 * best,
        "nats": best,
        "predictions": 9,
    }
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, test]))
    summary = {
        "folder": str(path),
        "status": "finished",
        "measure": measure,
        "update": 300,
        "epoch": 3.0,
    }
    summary |= {"best": rows[3], "test": test, "parameters": 1234, "seconds": 75.0}
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def demo_page(folder: Path, written: str = "The end.") -> str:
    """The page of an invented demo."""
    runs = [
        run_folder(folder, name, best=best) for name, best in ((demo.PLAIN, 1.9), (demo.ZONED, 1.7))
    ]
    results = [demo.result(folder, run.name) for run in runs]
    return demo.page(
        demo.Demo(),
        results,
        results[1],
        [plots.read_curve(run) for run in runs],
        dict.fromkeys(demo.LABELS, written),
        folder,
    )


def sweep_page(folder: Path) -> str:
    """The page of an invented sweep: two points with two seeds, one of which has failed, in two
    measures.
    """
    rows = []
    for name, cell, seed, measure in (
        ("a", 0.0, 1, "bits"),
        ("b", 0.0, 2, "bits"),
        ("c", 0.5, 1, "error"),
    ):
        run = run_folder(folder, f"{name}-1", best=1 + cell, measure=measure)
        settings = {"zoneout.cell": cell, "model.hidden": 9, "seed": seed}
        rows.append(
            Row(run.name, str(run), settings, "finished", measure, 1 + cell + 0.1 * seed, 1.5)
        )
    failed = Row(
        "d-1", "", {"zoneout.cell": 0.5, "model.hidden": 9, "seed": 2}, "failed", why="no disk"
    )
    return sweep_pages.page([*rows, failed], "a sweep")


def shared_look(text: str) -> bool:
    """Whether a page has the style sheet that the pages share, and no other (a picture's has a
    type).
    """
    found = [style for attributes, style in Page(text).all("style") if "type" not in attributes]
    return found == [f"\n{html.STYLE}\n{plots.dark_style()}"]


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, as the guidelines for accessible content define it."""

    def light(colour: str) -> float:
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear))

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


class Page(HTMLParser):
    """A page read as a browser would: its elements, their text, and whether every one is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {[name for name, _, _ in self.open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID:
            self.found.append((tag, dict(attrs), ""))
        else:
            self.open.append((tag, dict(attrs), []))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        name, attributes, text = self.open.pop()
        assert name == tag, f"</{tag}> closes <{name}>"
        self.found.append((name, attributes, "".join(text)))

    def handle_data(self, data: str) -> None:
        for _, _, text in self.open:
            text.append(data)

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, text) for name, attributes, text in self.found if name == tag]
