"""The README's speed table, made from benchmarks/results.csv: printed, or with `--write` put into the README."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- speed on the CPU: made by benchmarks/table.py -->", "<!-- end -->"
SHAPES = {"char-PTB": "(100, 32, 50, 1000)", "pMNIST": "(784, 100, 1, 100)", "medium": "(100, 32, 256, 256)"}
SHAPES["small"] = "(100, 32, 64, 128)"


def rows() -> list[dict[str, str]]:
    with (HERE / "results.csv").open() as file:
        return list(csv.DictReader(file))


def cpu_table(results: list[dict[str, str]]) -> str:
    """One row a shape and layer; times in milliseconds, ratios ours / torch.nn."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in results:
        if row["dtype"] == "float32":
            found[row["group"], row["layer"], row["shape"], row["what"], row["against"]] = row

    def ratio(*key: str) -> str:
        row = found.get(key)
        if row is None:
            return ""
        text = f"{float(row['ratio']):.2f}"
        return text if float(row["ratio"]) <= float(row["goal"]) else f"{text} (missed)"

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
    lines.append(f"{one['device']}, {one['threads']} threads, torch {one['torch']}, {one['date']}.")
    return "\n".join(lines)


def in_readme() -> str:
    return README.read_text().split(BEGIN)[1].split(END)[0].strip()


def main() -> None:
    table = cpu_table(rows())
    if "--write" in sys.argv[1:]:
        before, _, rest = README.read_text().partition(BEGIN)
        README.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}")
    else:
        print(table)


if __name__ == "__main__":
    main()
