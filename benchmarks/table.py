"""The README's speed tables, made from benchmarks/results.csv: printed, or with `--write` put into the README."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- speed on the {}: made by benchmarks/table.py -->", "<!-- end -->"
SHAPES = {"char-PTB": "(100, 32, 50, 1000)", "pMNIST": "(784, 100, 1, 100)", "medium": "(100, 32, 256, 256)"}
SHAPES["small"] = "(100, 32, 64, 128)"
NOISE = 1.05  # the goal of a ratio that has no other: what two runs of the same thing may differ by


def dates(results: list[dict[str, str]]) -> str:
    """When they were measured: a day, or the first and the last."""
    first, last = (choose(r["date"] for r in results) for choose in (min, max))
    return first if first == last else f"{first} to {last}"


def rows() -> list[dict[str, str]]:
    with (HERE / "results.csv").open() as file:
        return list(csv.DictReader(file))


def held(row: dict[str, str]) -> str:
    """A ratio, and whether it is above its goal."""
    return f"{float(row['ratio']):.2f}" + ("" if float(row["ratio"]) <= float(row["goal"]) else " (missed)")


def cpu_table(results: list[dict[str, str]]) -> str:
    """One row a shape and layer; times in milliseconds, ratios ours / torch.nn."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in results:
        if row["dtype"] == "float32":
            found[row["group"], row["layer"], row["shape"], row["what"], row["against"]] = row

    def ratio(*key: str) -> str:
        row = found.get(key)
        return "" if row is None else held(row)

    lines = [
        "| T, B, input, H | layer | `torch.nn` ms | ours with zoneout ms | **training** | evaluation | packed / padded "
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


def gpu_table(results: list[dict[str, str]]) -> str:
    """One row a shape and layer; milliseconds in a CUDA graph, ours / cuDNN, and the ratio in eager mode."""
    found = {(r["group"], r["layer"], r["shape"], r["dtype"]): r for r in results if r["backend"] == "cuda"}
    lines = [
        "| T, B, input, H | layer | bf16: ours / cuDNN ms (at most) | **ratio** | eager "
        "| TF32: ours / cuDNN ms (at most) | **ratio** | eager |",
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
                limit = "" if goal == NOISE else f" ({goal * theirs:.3g})"  # of milliseconds, where there is one
                cells.append(f"{float(graph['ours']):.3g} / {theirs:.3g}{limit}")
                cells += [f"**{held(graph)}**", held(eager)]
            if any(cells[2:]):
                lines.append("| " + " | ".join(cells) + " |")
    grid = [r for r in results if r["group"].startswith("gpu grid")]
    measured = [r for r in results if r["backend"] == "cuda"]
    lines += ["", f"{measured[0]['device']}, torch {measured[0]['torch']}, {dates(measured)}."]
    if grid:
        by_mode = [(mode, [r for r in grid if r["group"].endswith(mode)]) for mode in ("graph", "eager")]
        ratios = {mode: [(float(r["ratio"]), float(r["goal"])) for r in rows] for mode, rows in by_mode}
        within = [f"{sum(r <= goal for r, goal in v)} of {len(v)} {mode}" for mode, v in ratios.items()]
        faster = [f"{sum(r <= 1 for r, _ in v)} {mode}" for mode, v in ratios.items()]
        lines[-1] += (
            " On a grid of sizes (H 64 to 2048, B 1 to 256, T 100) no slower than cuDNN, 5 % allowed for noise, at "
            f"{', '.join(within)}; without that allowance at {', '.join(faster)}."
        )
    return "\n".join(lines)


TABLES = {"CPU": cpu_table, "GPU": gpu_table}


def in_readme(where: str) -> str:
    return README.read_text().split(BEGIN.format(where))[1].split(END)[0].strip()


def main() -> None:
    for where, make in TABLES.items():
        table, begin = make(rows()), BEGIN.format(where)
        if "--write" in sys.argv[1:]:
            before, _, rest = README.read_text().partition(begin)
            README.write_text(f"{before}{begin}\n\n{table}\n\n{END}{rest.partition(END)[2]}")
        else:
            print(f"{where}\n\n{table}\n")


if __name__ == "__main__":
    main()
