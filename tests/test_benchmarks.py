"""What the documents say about speed is what was measured."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("where", ["CPU", "GPU", "CPU and GPU"])
def test_the_documents_show_the_measured_table(where):
    """A speed table in the README or in docs/speed.md is not the one that benchmarks/results.csv
    gives.
    """
    table = load("table")
    assert table.in_document(where) == table.TABLES[where][1](table.rows())


def test_every_row_is_held_to_the_reference():
    """A ratio stands there whose parity check failed."""
    from zoneout.ops import TOLERANCES

    limits = {str(dtype).removeprefix("torch."): limit for dtype, limit in TOLERANCES.items()}
    limits |= {"tf32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}  # as gpu.py has them
    for row in load("table").rows():
        # A norm may divide by little, and a tanh-RNN's weights with noise on them have an
        # eigenvalue of 1.7: both magnify rounding, and gpu.py holds them to torch's own calls in
        # the same type.
        magnifies = row["group"] == "gpu norm" or (row["layer"], row["what"]) == (
            "RNN",
            "weight noise",
        )
        if not (magnifies and row["backend"] == "cuda"):
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


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_every_fused_combination_has_a_row(name, backend):
    """A combination that runs fused is measured by nobody."""
    rows = [
        row for row in load("table").rows() if row["layer"] == name and row["backend"] == backend
    ]
    assert set(load("bench").variants(name)) <= {row["what"] for row in rows}


@pytest.fixture
def step():
    """benchmarks/step.py, which needs those that it imports."""
    for name in ("bench", "gpu"):
        load(name)
    return load("step")


def test_runs_that_share_a_device_end_as_alone(step):
    """A run that shares the device would find other numbers, and the benchmark would say how
    fast.
    """
    symbols, config = step.CONFIGS["demo"]
    small = replace(
        config,
        model=replace(config.model, hidden=8),
        batches=replace(config.batches, size=2, length=9),
    )
    times, others = step.at_once(symbols, small, torch.device("cpu"), 2, 4)
    assert len(times) == 2 and others == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "precision"), [("pMNIST", "tf32"), ("char-PTB", "bf16"), ("word-PTB", "tf32")]
)
def test_runs_that_share_a_gpu_end_as_alone(step, name, precision):
    """Graphs share memory that cuBLAS works in: with each other, or with one that is gone."""
    symbols, config = step.CONFIGS[name]
    _, others = step.at_once(
        symbols, replace(config, precision=precision), torch.device("cuda"), 3, 60
    )
    assert others == 0
