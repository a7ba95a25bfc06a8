"""Sweeps to be disturbed, for `test_sweep.py` and `test_cluster.py`.

    python sweeps.py OUT

runs one on a Ray cluster of two nodes: a worker of it is killed with SIGKILL in the middle of a
    run, and after the
first run has ended one of the nodes goes, with whatever it was doing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zoneout.paper.experiments.sweep import Job
from zoneout.paper.experiments.trials import Row, axes_of, folders, grid_of, known_trials, row_of
from zoneout.paper.training.config import Batches, Config, Data, Evaluation, Model, Protocol

BASE = Config(
    data=Data(str(Path(__file__).parent / "golden" / "text.txt")),
    batches=Batches(size=16, length=25),
    model=Model(hidden=8, embedding=0),
    evaluation=Evaluation(Protocol("chunks", length=25), Protocol("whole", length=100), every=10),
    epochs=2,
    save_every=10,
    device="cpu",
)
GRID = ["zoneout.cell=0,0.5"]


@dataclass(frozen=True)
class Fragile(Job):
    """A job whose process is killed with SIGKILL, the first time, at an update that is not the
    last of a checkpoint.
    """

    def __call__(self, progress: Any = None) -> str:
        def tell(event: dict[str, Any]) -> None:
            if progress is not None:
                progress(event)
            if event["kind"] == "start":
                with open(self.folder.parent / "starts", "a") as file:
                    file.write(f"{self.folder.name} {event['update']}\n")
            flag = self.folder.parent / f"killed-{self.folder.name}"
            if event["kind"] == "step" and event["update"] == 17 and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        return super().__call__(tell)


def jobs(out: Path, fragile: int = 1) -> list[Job]:
    """Four runs, of which the first so many are fragile."""
    trials = grid_of(BASE, axes_of(GRID), 2)
    places = folders(trials, out)
    kinds = [Fragile] * fragile + [Job] * (len(trials) - fragile)
    return [kind(trial, places[trial.name]) for kind, trial in zip(kinds, trials)]


def rows(out: Path) -> list[Row]:
    """What is known of the four, without what may differ: where they are, and how long they
    took.
    """
    trials = grid_of(BASE, axes_of(GRID), 2)
    places = folders(trials, out)
    return [replace(row_of(t, places[t.name]), folder="", seconds=None) for t in trials]


def main(out: Path) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    from zoneout.paper.experiments.cluster import Cluster as Room
    from zoneout.paper.experiments.cluster import run_ray, search_ray

    node: dict[str, Any] = {
        "num_cpus": 1,
        "include_dashboard": False,
        "object_store_memory": 80 * 2**20,
    }
    nodes = Cluster(initialize_head=True, connect=False, head_node_args=node)
    second = [nodes.add_node(num_cpus=1, object_store_memory=80 * 2**20)]
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    room = Room(address=nodes.address)
    found: dict[str, Any] = {"nodes": len([n for n in ray.nodes() if n["Alive"]]), "said": []}

    if importlib.util.find_spec("optuna"):
        axes = axes_of(["optimizer.lr=0.0001..1,log", "model.cell=lstm,gru"])
        scheduled = replace(room, asha=True)
        for trials in (3, 5):  # as if it had been interrupted in between
            search_ray(BASE, axes, out / "search", trials, scheduled, lambda line: None)
            known = known_trials(BASE, list(axes), out / "search")
            found[f"search of {trials}"] = sorted(trial.name for trial in known)

    def say(line: str) -> None:
        found["said"].append(line)
        if second and "finished" in line:
            nodes.remove_node(second.pop(), allow_graceful=False)

    found["problems"] = run_ray(jobs(out / "grid"), room, say)
    (out / "found.json").write_text(json.dumps(found))
    ray.shutdown()
    nodes.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
