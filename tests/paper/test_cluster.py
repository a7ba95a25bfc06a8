"""Sweeps on a Ray cluster: two nodes on this machine, of which one is lost, and a worker that is
killed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sweeps import jobs, rows

import zoneout
from zoneout.paper.experiments import sweep
from zoneout.paper.report import sweep_page

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install '.[cluster]'"
)
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `sweeps.py` leaves; Ray has a process of its own, whose warnings are not ours."""
    out = tmp_path_factory.mktemp("ray")
    source = str(Path(zoneout.__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([source, str(HERE)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(HERE / "sweeps.py"), str(out)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def found(out: Path) -> dict[str, Any]:
    page: dict[str, Any] = json.loads((out / "found.json").read_text())
    return page


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same sweep, in this very process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("plain")
    for job in jobs(out, fragile=0):
        assert job() == ""
    yield out
    torch.set_num_threads(threads)


def test_a_killed_worker_and_a_lost_node_change_nothing(
    out: Path, found: dict[str, Any], undisturbed: Path
) -> None:
    """A run is lost or begun anew, or its result depends on where it ran and how often it died."""
    assert found["nodes"] == 2 and found["problems"] == {}
    name = jobs(out / "grid")[0].folder.name
    assert f"{name}: its worker died; another goes on with it" in found["said"]
    starts = [int(line.split()[-1]) for line in (out / "grid" / "starts").read_text().splitlines()]
    assert starts[:2] == [0, 10], (
        "the run that was killed at update 17 did not go on from its checkpoint"
    )
    assert [row.state for row in rows(out / "grid")] == ["finished"] * 4
    assert sweep_page.table(rows(out / "grid")) == sweep_page.table(rows(undisturbed))
    for job in jobs(undisturbed):
        ours, theirs = out / "grid" / job.folder.name, job.folder
        assert (ours / "metrics.jsonl").read_bytes() == (theirs / "metrics.jsonl").read_bytes()
    assert not (out / "grid" / ".ray").exists(), "something is left behind"


def test_a_search_goes_on_where_it_was(out: Path, found: dict[str, Any]) -> None:
    """What was searched is forgotten, or run again; what the scheduler stopped is not marked."""
    if importlib.util.find_spec("optuna") is None:
        pytest.skip("optuna is not installed: pip install optuna")
    first, second = found["search of 3"], found["search of 5"]
    assert len(set(first)) == 3 and len(set(second)) == 5 and set(first) < set(second)
    for name in second:
        folder = out / "search" / name
        assert (folder / "summary.json").exists() or sweep.disk.read_json(folder / "ended.json")[
            "state"
        ] == "stopped"
