"""The speed tables of the documents and the README's chart, made from benchmarks/results.csv.

`python benchmarks/table.py` prints the tables. With `--write` it puts them into README.md and
docs/speed.md, and draws docs/pictures/speed.svg.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README, PAGE = HERE.parent / "README.md", HERE.parent / "docs" / "speed.md"
CHART = HERE.parent / "docs" / "pictures" / "speed.svg"
BEGIN, END = "<!-- speed on the {}: made by benchmarks/table.py -->", "<!-- end -->"
SHAPES = {
    "char-PTB": "(100, 32, 50, 1000)",
    "pMNIST": "(784, 100, 1, 100)",
    "medium": "(100, 32, 256, 256)",
}
SHAPES["small"] = "(100, 32, 64, 128)"
# the goal of a ratio that has no other goal: two measurements of the same code may differ by this
# much
NOISE = 1.05
Rows = list[dict[str, str]]


def dates(results: Rows) -> str:
    """Return the date of the measurements: one day, or the first and the last."""
    first, last = (choose(r["date"] for r in results) for choose in (min, max))
    return first if first == last else f"{first} to {last}"


def rows() -> Rows:
    with (HERE / "results.csv").open() as file:
        return list(csv.DictReader(file))


def held(row: dict[str, str]) -> str:
    """Format a ratio, with a mark if it is above its goal."""
    return f"{float(row['ratio']):.2f}" + (
        "" if float(row["ratio"]) <= float(row["goal"]) else " (missed)"
    )


def cpu_table(results: Rows) -> str:
    """Return one row per shape and layer; times in milliseconds, ratios ours / torch.nn."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in results:
        if row["dtype"] == "float32":
            found[row["group"], row["layer"], row["shape"], row["what"], row["against"]] = row

    def ratio(*key: str) -> str:
        row = found.get(key)
        return "" if row is None else held(row)

    lines = [
        "| T, B, input, H | layer | `torch.nn` ms | ours with zoneout ms | **training** | "
        "evaluation | packed / padded "
        "| packed / `torch.nn` packed | peak memory | no compiler |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for shape, sizes in SHAPES.items():
        for layer in ("LSTM", "GRU", "RNN"):
            train = found.get(("train", layer, shape, "zoneout", "torch.nn"))
            if train is None:
                continue
            cells = [
                sizes,
                layer,
                f"{float(train['theirs']):.3g}",
                f"{float(train['ours']):.3g}",
                f"**{ratio('train', layer, shape, 'zoneout', 'torch.nn')}**",
                ratio("eval", layer, shape, "zoneout", "torch.nn"),
                ratio("packed", layer, shape, "packed", "ours, padded"),
                ratio("packed", layer, shape, "packed", "torch.nn, packed"),
                ratio("memory", layer, shape, "zoneout, peak MiB", "torch.nn"),
                ratio("torch calls", layer, shape, "zoneout, no compiler", "torch.nn"),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    one = next(row for row in results if row["group"] == "train")
    lines.append("")
    when = dates([row for row in found.values() if row["shape"] in SHAPES])
    lines.append(f"{one['device']}, {one['threads']} threads, torch {one['torch']}, {when}.")
    return "\n".join(lines)


GPU_SHAPES = {
    "char-PTB": "char-PTB (100, 32, 50, 1000)",
    "text8": "text8 (180, 128, 27, 2000)",
    "word-PTB": "word-PTB (35, 20, 1500, 2 × 1500)",
    "pMNIST": "pMNIST (784, 100, 1, 100)",
    "speech decoder": "speech decoder (800, 64, 1024, 1024)",
    "1024": "(100, 32, 1024, 1024)",
    "512": "(100, 64, 512, 512)",
}


def gpu_table(results: Rows) -> str:
    """Return one row per shape and layer: milliseconds in a CUDA graph, ratios ours / cuDNN, and
    the eager ratio.
    """
    found = {
        (r["group"], r["layer"], r["shape"], r["dtype"]): r
        for r in results
        if r["backend"] == "cuda"
    }
    lines = [
        "| T, B, input, H | layer | bf16: ours / cuDNN ms (budget) | **ratio** | eager "
        "| TF32: ours / cuDNN ms (budget) | **ratio** | eager |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for layer in ("LSTM", "GRU", "RNN"):
        for shape, sizes in GPU_SHAPES.items():
            cells = [sizes, layer]
            for dtype in ("bf16", "tf32"):
                graph = found.get(("gpu graph", layer, shape, dtype))
                eager = found.get(("gpu eager", layer, shape, dtype))
                if graph is None or eager is None:
                    cells += ["", "", ""]
                    continue
                goal, theirs = float(graph["goal"]), float(graph["theirs"])
                budget = "" if goal == NOISE else f" ({goal * theirs:.3g})"
                cells.append(f"{float(graph['ours']):.3g} / {theirs:.3g}{budget}")
                cells += [f"**{held(graph)}**", held(eager)]
            if any(cells[2:]):
                lines.append("| " + " | ".join(cells) + " |")
    grid = [r for r in results if r["group"].startswith("gpu grid")]
    measured = [r for r in results if r["backend"] == "cuda"]
    lines += ["", f"{measured[0]['device']}, torch {measured[0]['torch']}, {dates(measured)}."]
    if grid:
        by_mode = [
            (mode, [r for r in grid if r["group"].endswith(mode)]) for mode in ("graph", "eager")
        ]
        ratios = {
            mode: [(float(r["ratio"]), float(r["goal"])) for r in rows] for mode, rows in by_mode
        }
        within = {mode: sum(r <= goal for r, goal in v) for mode, v in ratios.items()}
        faster = {mode: sum(r <= 1 for r, _ in v) for mode, v in ratios.items()}
        lines += [
            "",
            f"On a grid of {len(ratios['graph'])} points (H 64 to 2048, B 1 to 256, T 100, bf16 "
            "and TF32), our LSTM is "
            f"no slower than cuDNN's at {within['graph']} points in a graph and at "
            f"{within['eager']} in eager mode. "
            f"That allows 5 % for noise; without it the counts are {faster['graph']} and "
            f"{faster['eager']}.",
        ]
    return "\n".join(lines)


UNITS = {"char-PTB": "1000", "word-PTB": "2 × 1500", "pMNIST": "100", "speech decoder": "1024"}
HEADLINES = (  # the rows of the README: layer, shape, type on the GPU or "cpu"
    ("LSTM", "char-PTB", "bf16"),
    ("LSTM", "word-PTB", "bf16"),
    ("LSTM", "pMNIST", "tf32"),
    ("LSTM", "speech decoder", "bf16"),
    ("LSTM", "char-PTB", "cpu"),
    ("GRU", "char-PTB", "cpu"),
)


def headlines(results: Rows) -> list[tuple[str, str, dict[str, str], dict[str, str] | None]]:
    """Return the README's rows: device, layer, measurement, eager measurement on a GPU."""
    found = {(r["group"], r["layer"], r["shape"], r["dtype"]): r for r in results}
    made = []
    for layer, shape, kind in HEADLINES:
        name = {"cpu": "CPU", "bf16": "H200, bf16", "tf32": "H200, TF32"}[kind]
        what = f"{layer} {shape}, {UNITS[shape]}"
        if kind == "cpu":
            made.append((name, what, found["train", layer, shape, "float32"], None))
        else:
            graph, eager = (found[f"gpu {mode}", layer, shape, kind] for mode in ("graph", "eager"))
            made.append((name, what, graph, eager))
    return made


def short_table(results: Rows) -> str:
    """Return the README's table: a training step in milliseconds, and the ratios."""
    lines = [
        "| device | layer, units | `torch.nn` ms | ours ms | ratio | eager |",
        "|---|---|---|---|---|---|",
    ]
    for name, layer, graph, eager in headlines(results):
        times = [f"{float(graph[key]):.3g}" for key in ("theirs", "ours")]
        ratios = (held(graph), "" if eager is None else held(eager))
        lines.append("| " + " | ".join([name, layer, *times, *ratios]) + " |")
    return "\n".join(lines)


def chart(results: Rows) -> Any:
    """Draw the README's chart: the time of a training step, the unregularised torch.nn layer
    being 1.
    """
    from zoneout.paper.report import plots

    entries = headlines(results)
    fig, (axes,) = plots.canvas(height=0.4 * len(entries) + 1.1, width=7.4)
    labels = [f"{layer.rpartition(',')[0]}, {name}" for name, layer, _, _ in entries]
    values = [float(row["ratio"]) for _, _, row, _ in entries]
    places = range(len(entries), 0, -1)
    axes.barh(places, values, color=plots.COLOURS[1], height=0.62)
    for place, value, (_, _, row, _) in zip(places, values, entries):
        times = f"{float(row['ours']):.3g} ms instead of {float(row['theirs']):.3g}"
        inside = value > 0.6
        where = {
            "xytext": (-6 if inside else 6, 0),
            "textcoords": "offset points",
            "ha": "right" if inside else "left",
        }
        axes.annotate(
            times, (value, place), color=plots.PAPER if inside else plots.INK, va="center", **where
        )
    axes.axvline(1, color=plots.INK, lw=1.2)
    of_one = {"xytext": (-6, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
    axes.annotate(
        "1 is torch.nn without zoneout (cuDNN, oneDNN)",
        (1, len(entries) + 0.85),
        color=plots.SOFT,
        **of_one,
    )
    axes.set_yticks(list(places), labels)
    axes.grid(visible=False)
    axes.set(
        xlim=(0, 1.08),
        ylim=(0.5, len(entries) + 1.2),
        xlabel="training step with zoneout, relative to torch.nn",
    )
    return fig


TABLES = {"CPU": (PAGE, cpu_table), "GPU": (PAGE, gpu_table), "CPU and GPU": (README, short_table)}


def in_document(where: str) -> str:
    """Return the table that stands in the document."""
    return TABLES[where][0].read_text().split(BEGIN.format(where))[1].split(END)[0].strip()


def main() -> None:
    write = "--write" in sys.argv[1:]
    for where, (path, make) in TABLES.items():
        table, begin = make(rows()), BEGIN.format(where)
        if write:
            before, _, rest = path.read_text().partition(begin)
            path.write_text(f"{before}{begin}\n\n{table}\n\n{END}{rest.partition(END)[2]}")
        else:
            print(f"{where}\n\n{table}\n")
    if write:
        from zoneout.paper.report import plots

        plots.save(
            chart(rows()),
            CHART,
            "Time of a training step with zoneout, relative to torch.nn without",
        )


if __name__ == "__main__":
    main()
