"""What the documents say about speed is what was measured."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("where", ["CPU", "GPU"])
def test_the_readme_shows_the_measured_table(where):
    """A speed table in the README is not the one that benchmarks/results.csv gives."""
    table = load("table")
    assert table.in_readme(where) == table.TABLES[where](table.rows())


def test_every_row_is_held_to_the_reference():
    """A ratio stands there whose parity check failed."""
    from zoneout.ops import TOLERANCES

    limits = {str(dtype).removeprefix("torch."): limit for dtype, limit in TOLERANCES.items()}
    limits |= {"tf32": 1e-3, "bf16": 1e-2}  # as gpu.py has them
    for row in load("table").rows():
        if row["group"] != "gpu norm":  # these are held to torch's own calls in the same type
            assert float(row["error"]) <= limits[row["dtype"]], row


def test_a_wrong_layer_gets_no_ratio(monkeypatch, capsys):
    """The benchmark would report how fast a wrong result is."""
    bench = load("bench")
    monkeypatch.setattr(bench, "SHAPES", {"small": (3, 2, 4, 5)})
    right = bench.measure("train", "LSTM", "small", 1)
    assert right.ratio > 0 and right.error < 1e-5
    monkeypatch.setattr(bench, "parity", lambda *args: 0.5)
    wrong = bench.measure("train", "LSTM", "small", 1)
    assert not wrong.ratio > 0 and "no ratio" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_every_fused_combination_has_a_row(name):
    """A combination that runs fused is measured by nobody."""
    measured = {row["what"] for row in load("table").rows() if row["layer"] == name}
    assert set(load("bench").variants(name)) <= measured
