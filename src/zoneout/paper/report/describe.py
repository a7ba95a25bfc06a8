"""Descriptions of a run for the user: the message at its end, and its settings and results."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from .. import disk
from ..training import config as configs
from ..training import runs
from ..training.progress import duration, worth
from ..training.train import Summary
from ..training.unused_options import unread


def ending(summary: Summary) -> str:
    """Return the message that is printed when training ends."""
    folder = shlex.quote(str(summary.folder))
    lines = []
    if summary.status == "interrupted":
        lines.append(f"Interrupted at update {summary.update:,}; the run is saved. To continue:")
        lines.append(f"  zoneout train --resume --out {folder}")
        return "\n".join(lines)
    why = (
        ""
        if summary.status == "finished"
        else "; stopped early, since the validation did not improve (--patience)"
    )
    took = f"{summary.update:,} updates ({summary.epoch:.4g} epochs) in {duration(summary.seconds)}"
    lines.append(f"Finished after {took}{why}.")
    if summary.best is not None:
        lines.append(f"  best valid  {worth(summary.best)} (update {summary.best['update']:,})")
    if summary.test is not None:
        lines.append(f"  test        {worth(summary.test)}")
    also = "" if summary.measure == "error" else f"; zoneout sample {folder} generates text"
    lines.append(f"zoneout show {folder} draws the learning curve{also}.")
    return "\n".join(lines)


def describe(folder: Path) -> dict[str, Any]:
    """Return the settings, the status and the results of a run."""
    config, rows = runs.read_config(folder), runs.read_metrics(folder)
    valid = [row for row in rows if row["kind"] == "valid"]
    ended = runs.read_summary(folder)
    if ended and ended["update"] > (rows[-1]["update"] if rows else 0):
        at = Path(folder) / "metrics.jsonl"
        raise disk.RunError(
            f"{at} is damaged: the run ended after {ended['update']:,} updates, but the file ends "
            "earlier"
        )
    return {
        "run": str(folder),
        "status": ended["status"] if ended else "not finished",
        **position(folder, rows),
        "saved": runs.trained(folder)[0],
        "best": next((row for row in reversed(valid) if row["best"]), None),
        "test": next((row for row in reversed(rows) if row["kind"] == "test"), None),
        "parameters": ended and ended["parameters"],
        "seconds": ended and ended["seconds"],
        "changed": {
            name: value
            for name, value in configs.changed(config).items()
            if name not in unread(config)
        },
        "config": configs.to_json(config),
    }


def position(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far a run has come: its last metrics line, or a checkpoint after that line."""
    update, epoch = (rows[-1]["update"], rows[-1]["epoch"]) if rows else (0, 0)
    saved, epochs = runs.trained(folder)
    if saved <= update:
        return {"update": update, "epoch": epoch}
    # All epochs have the same number of updates. Without a line, only whole epochs are known.
    return {"update": saved, "epoch": epoch * saved / update if update else max(0, epochs - 1)}


def described(page: dict[str, Any]) -> str:
    """Return the result of `describe` as text."""
    model = page["config"]["model"]
    size = f", {page['parameters']:,} parameters" if page["parameters"] else ""
    layers = f"{model['layers']} layers" if model["layers"] > 1 else "one layer"
    took = f" in {duration(page['seconds'])}" if page["seconds"] else ""
    saved = f"after {page['saved']:,} updates" if page["saved"] else "none yet"
    behind = "" if page["saved"] >= page["update"] else f"; last checkpoint: {saved}"
    lines = [
        (
            f"{page['run']}: {page['status']}, {page['update']:,} updates ({page['epoch']:.4g} "
            f"epochs){took}{behind}"
        ),
        (
            f"  {model['cell'].upper()}, {layers} of {model['hidden']:,} units{size}, on "
            f"{page['config']['data']['name']}"
        ),
    ]
    if page["best"]:
        lines.append(f"  best valid  {worth(page['best'])} (update {page['best']['update']:,})")
    if page["test"]:
        lines.append(
            f"  test        {worth(page['test'])} ({page['test']['predictions']:,} predictions)"
        )
    if page["changed"]:
        lines.append(f"  {shlex.join(configs.flags(page['changed']))}")
    return "\n".join(lines)
