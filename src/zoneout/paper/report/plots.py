"""Learning curves as pictures and as characters for a terminal, and the style of all pictures.

Pictures are drawn in light colours. An SVG also has a style sheet with colours for a browser in
dark mode. Its labels are text, so they can be searched, selected and read aloud.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..disk import write_bytes, write_text
from ..training.measures import LABELS, in_measure, measure_in
from ..training.runs import read_metrics

MARKS = "ox+*#@"
DARK = {  # every colour in use, and its replacement in dark mode
    "#0072b2": "#5cb8f0",
    "#c04d00": "#ff9459",
    "#00785a": "#3ccba0",
    "#a8427a": "#ee9cc8",
    "#7a5c00": "#e6bb45",
    "#5b5b66": "#b9b9c6",
    "#222222": "#e8e6e3",
    "#666666": "#a9a7a2",
    "#e4e4e2": "#3b3b39",
    "#ffffff": "#1b1b1a",
}
*_COLOURS, INK, SOFT, GRID, PAPER = DARK
COLOURS = tuple(_COLOURS)  # of curves; distinguishable with colour blindness
MARKERS = "osD^vP"  # for black-and-white print
DASHED: Any = (0, (4, 2))
TRAINING = "on the training text, with its noise"  # the label of dashed lines


@dataclass(frozen=True)
class Curve:
    """The learning curve of a run: points (update, value), in the run's measure."""

    name: str
    measure: str
    train: tuple[tuple[float, float], ...]
    valid: tuple[tuple[float, float], ...]

    @property
    def best(self) -> tuple[float, float]:
        """Return the point with the best validation score."""
        return min(self.valid, key=lambda point: point[1])


def read_curve(folder: Path | str, name: str | None = None) -> Curve:
    """Read the learning curve of a run."""
    rows = read_metrics(folder)
    valid = [row for row in rows if row["kind"] == "valid"]
    measure = next((found for row in valid if (found := measure_in(row))), "bits")
    train = [
        (row["update"], in_measure(row["nats"], measure)) for row in rows if row["kind"] == "train"
    ]
    points = tuple((row["update"], row[measure]) for row in valid)
    return Curve(
        name or Path(folder).name, measure, tuple(train) if measure != "error" else (), points
    )


def canvas(panels: int = 1, height: float = 3.7, width: float = 5.6) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, stacked vertically. The default width fits a phone without
    scaling.
    """
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    coloured = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
    style: Any = dict.fromkeys(coloured, INK) | {"font.size": 10}
    with matplotlib.rc_context(style):
        fig = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
        found = list(fig.subplots(panels, 1, squeeze=False)[:, 0])
        for axes in found:
            axes.set_facecolor(PAPER)
            axes.grid(axis="y", color=GRID, lw=0.8)
            axes.set_axisbelow(True)
            for side in ("top", "right", "left"):
                axes.spines[side].set_visible(False)
            axes.tick_params(length=0, which="both")
    return fig, found


def legend(axes: Any, below: bool = False, **options: Any) -> None:
    """Add a legend without a frame; `below` puts it under the axes, in two columns if they fit."""
    look = {"frameon": False, "labelcolor": INK, "fontsize": 9} | options
    if below:
        look |= {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17)}
        wide = axes.legend(**look, ncols=2).get_window_extent().width
        look["ncols"] = 2 if wide < axes.figure.bbox.width else 1
    axes.legend(**look)


def figure(curves: Sequence[Curve], title: str = "") -> Any:
    """Draw the curves: validation solid, training thin and dashed, the best point of each
    marked.
    """
    fig, (axes,) = canvas()
    for curve, colour in zip(curves, COLOURS * len(curves)):
        if curve.train:
            axes.plot(*zip(*curve.train), color=colour, lw=1, ls=DASHED, alpha=0.7)
        if not curve.valid:
            continue
        name = curve.name.replace("$", r"\$")  # matplotlib reads text between dollars as a formula
        at, value = curve.best  # in the legend, since labels at the points would overlap
        axes.plot(*zip(*curve.valid), color=colour, lw=2, label=f"{name}, best {value:.4g}")
        axes.plot([at], [value], "o", color=colour, ms=6, mec=PAPER, mew=1, zorder=3)
    unit = LABELS[curves[0].measure] if curves else ""
    axes.set(xlabel="update", ylabel=unit)
    # Training values before the first validation are far above the rest: leave them out of the
    # range.
    seen = [value for curve in curves for _, value in curve.valid]
    low = [value for curve in curves for _, value in (*curve.valid, *curve.train)]
    if seen:
        margin = 0.08 * (max(seen) - min(low)) or 0.1
        axes.set_ylim(min(low) - margin, max(seen) + margin)
    if any(curve.train for curve in curves):
        axes.plot([], [], color=SOFT, lw=1, ls=DASHED, label=TRAINING)
    if any(curve.valid for curve in curves):
        legend(axes)
    if title:
        axes.set_title(title, loc="left", fontsize="medium", color=INK, wrap=True)
    return fig


def check_name(path: Path | None) -> None:
    """Raise `ValueError` if a picture cannot have this name; called before the work starts."""
    if path is not None and path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"{path}: expected a name that ends in .png, .svg or .pdf")


def save(fig: Any, path: Path, title: str = "") -> None:
    """Write a figure to a file; the suffix (.png, .svg or .pdf) gives the format."""
    check_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        text = _svg(fig, title)
        at = text.index(">", text.index("<svg")) + 1
        write_text(path, f"{text[:at]}\n <style>\n{dark_style()}</style>{text[at:]}")
    else:
        content = io.BytesIO()
        metadata = {"CreationDate": None} if path.suffix == ".pdf" else None
        fig.savefig(content, format=path.suffix[1:], dpi=150, metadata=metadata)
        write_bytes(path, content.getvalue())


def svg(fig: Any, name: str = "", title: str = "", description: str = "") -> str:
    """Return a figure as an svg element for a page; `name` makes its ids unique within the page.

    With `dark_style` in the page, the figure follows the page's dark mode.
    """
    text = _svg(fig, title)
    text = text[text.index("<svg") :]
    if description:
        at = text.index("</title>") + len("</title>") if title else text.index(">") + 1
        text = f"{text[:at]}\n <desc>{escape(description)}</desc>{text[at:]}"
    if name:
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace("<svg ", '<svg role="img" ', 1) if title else text


def dark_style() -> str:
    """Return the style sheet that gives figures their dark-mode colours."""
    rules = [
        f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    ]
    return "@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}\n"


def _svg(fig: Any, title: str = "") -> str:
    import matplotlib

    buffer = io.StringIO()
    # No dates and no random ids, so that the same numbers give the same file.
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type")) | (
        {"Title": title} if title else {}
    )
    with matplotlib.rc_context({"svg.hashsalt": "zoneout", "svg.fonttype": "none"}):
        fig.savefig(buffer, format="svg", metadata=metadata)
    return buffer.getvalue()


def ascii_curves(curves: Sequence[Curve], width: int = 72, height: int = 14) -> str:
    """Return the validation curves as text for a terminal.

    >>> points = ((100, 3.0), (200, 2.0), (300, 1.5), (400, 1.25), (500, 1.2))
    >>> falling = Curve("a", "bits", (), points)
    >>> print(ascii_curves([falling], width=40, height=5))
          3 |o
       2.55 |
        2.1 |       o
       1.65 |               o
        1.2 |                      o       o
            +-------------------------------
             100                         500
                                    o a
    """
    points = [point for curve in curves for point in curve.valid if math.isfinite(point[1])]
    if not points:
        return "(no validation yet)"
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    columns, rows = max(width - 9, 10), max(height, 2) if high > low else 1
    across, up = (right - left) or 1.0, (high - low) or 1.0
    grid = [[" "] * columns for _ in range(rows)]
    for curve, mark in zip(curves, MARKS * len(curves)):
        for x, y in curve.valid:
            if math.isfinite(y):
                row = round((high - y) / up * (rows - 1))
                column = round((x - left) / across * (columns - 1))
                grid[row][column] = mark
    lines = []
    for number, row_of_marks in enumerate(grid):
        label = f"{high - up * number / max(rows - 1, 1):7.4g}"
        lines.append(f"{label} |{''.join(row_of_marks)}".rstrip())
    ends = f"{left:,.0f}", f"{right:,.0f}"
    legend = "   ".join(f"{mark} {curve.name}" for curve, mark in zip(curves, MARKS * len(curves)))
    lines.append(f"{'':7} +{'-' * columns}")
    lines.append(f"{'':9}{ends[0]}{ends[1]:>{columns - len(ends[0])}}")
    lines.append(f"{'':9}{legend:^{columns}}".rstrip())
    return "\n".join(lines)
