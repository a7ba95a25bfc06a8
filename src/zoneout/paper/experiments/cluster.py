"""Run a sweep on a Ray cluster, or on a Ray that this process starts.

To install Ray: `pip install 'zoneout[cluster]'`.

Ray Tune decides where and when each job of `sweep` runs. Each job has a folder, which must have the
same path on every machine. If a worker or a machine dies, Tune starts the job again, and the job
continues from its checkpoint. To continue a sweep, only the run folders are needed: they show which
runs are missing. Tune's state files are not needed.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...extras import install_command
from ..disk import own_folder
from ..training import config as configs
from ..training.config import Config
from ..training.measures import measure_in
from .sweep import RETRIES, Job, Say, mark
from .trials import (
    Range,
    Trial,
    folders,
    known_trials,
    outcome,
    row_of,
    spelled,
    state_of,
    trial_of,
)

SCRATCH = ".ray"  # folder for Tune's files inside the sweep's folder; removed when Tune ends
STOPPED = "stopped by the scheduler: other runs were better after the same amount of training"


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster to use, and the resources of each run."""

    # "local" starts Ray on this machine; "auto" uses the cluster of this machine; or HOST:PORT.
    address: str = "local"
    cpus: float = 1.0  # CPU cores per run
    gpus: float | None = None  # GPUs per run; 0.25: four runs share one; None: 1 if there are GPUs
    parallel: int = 0  # number of runs at the same time; 0: as many as fit into the cluster
    asha: bool = False  # stop runs that fall behind the others
    grace: float = 10.0  # with asha: no run is stopped before this percentage of its updates
    retries: int = RETRIES  # how often a run is started again after its worker died


def run_ray(jobs: Sequence[Job], cluster: Cluster, say: Say) -> dict[str, str]:
    """Run jobs on Ray; return the error messages by trial name."""
    if not jobs:
        return {}
    named = {job.trial.name: job for job in jobs}
    with _ray(cluster):
        from ray import tune

        space = {"trial": tune.grid_search(list(named))}
        scratch = jobs[0].folder.parent / SCRATCH
        make = partial(_named, named)
        return _tune(cluster, say, scratch, make, jobs[0].trial.config, len(jobs), space)


def _named(jobs: Mapping[str, Job], settings: Mapping[str, Any]) -> Job:
    return jobs[settings["trial"]]


def search_ray(
    base: Config,
    axes: Mapping[str, list[Any] | Range],
    out: Path,
    count: int,
    cluster: Cluster,
    say: Say,
    data: Path | None = None,
) -> dict[str, str]:
    """Let Optuna choose settings until there are `count` trials, including those of earlier calls.

    Return the error messages by trial name.
    """
    try:
        optuna: Any = importlib.import_module("optuna")
    except ImportError:
        raise ValueError(
            f"--search: the package optuna is not installed; try {install_command('cluster')}"
        ) from None
    known = known_trials(base, list(axes), out)
    places = folders(known, out)
    ended: list[Trial] = []
    begun: list[Trial] = []
    for trial in known:
        over = state_of(trial, places[trial.name], scheduled=cluster.asha) in (
            "finished",
            "stopped",
            "diverged",
        )
        (ended if over else begun).append(trial)
    if len(ended) >= count:
        return {}

    def point(settings: dict[str, Any]) -> dict[str, Any]:
        return {
            n: settings[n] if isinstance(axes[n], Range) else spelled(settings[n]) for n in axes
        }

    def make(settings: dict[str, Any]) -> Job:
        trial = trial_of(base, settings)
        return Job(trial, folders([trial], out)[trial.name], data)

    space: dict[str, Any] = {}
    for name, values in axes.items():
        if isinstance(values, Range):
            whole = configs.names().get(name) is int
            kind: Any = (
                optuna.distributions.IntDistribution
                if whole
                else optuna.distributions.FloatDistribution
            )
            ends = (int(values.low), int(values.high)) if whole else (values.low, values.high)
            space[name] = kind(*ends, log=values.log)
        else:
            choices = dict.fromkeys(
                spelled(trial_of(base, {name: value}).settings[name]) for value in values
            )
            space[name] = optuna.distributions.CategoricalDistribution(list(choices))
    with _ray(cluster):
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # Use another seed after a restart. With the same seed, the first draws would repeat the
        # known trials.
        searcher = OptunaSearch(
            space,
            metric="valid",
            mode="min",
            points_to_evaluate=[point(trial.settings) for trial in begun] or None,
            seed=(base.seed + len(known)) % 2**32,
        )
        for trial in ended:
            row = row_of(trial, places[trial.name], scheduled=cluster.asha)
            if row.valid is not None and row.state != "diverged":
                searcher.add_evaluated_point(point(trial.settings), row.valid)
        return _tune(cluster, say, out / SCRATCH, make, base, count - len(ended), None, searcher)


def _tune(
    cluster: Cluster,
    say: Say,
    scratch: Path,
    make: Callable[[dict[str, Any]], Job],
    config: Config,
    count: int,
    space: dict[str, Any] | None,
    searcher: Any = None,
) -> dict[str, str]:
    """Run trials with Tune; return the error messages by trial name.

    Tune writes its files to `scratch`, which is removed at the end.
    """
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    problems: dict[str, str] = {}
    done = 0

    class Notes(tune.Callback):
        """Prints how each trial ended, and marks the trials that the scheduler stopped."""

        def __reduce__(self) -> Any:
            # Tune pickles callbacks with its state, so that it can resume. A sweep does not use
            # that state, so an empty callback is pickled instead.
            return tune.Callback, ()

        def on_trial_complete(
            self, iteration: int, trials: list[Any], trial: Any, **info: Any
        ) -> None:
            job, last = make(trial.config), trial.last_result or {}
            if not last.get("ended"):
                mark(job.folder, "stopped", STOPPED)
            self.say(job, last.get("problem", ""))

        def on_trial_recover(
            self, iteration: int, trials: list[Any], trial: Any, **info: Any
        ) -> None:
            say(f"{make(trial.config).trial.name}: its worker died; another goes on with it")

        def on_trial_error(
            self, iteration: int, trials: list[Any], trial: Any, **info: Any
        ) -> None:
            self.say(make(trial.config), f"its worker died more than {cluster.retries} times")

        def say(self, job: Job, problem: str) -> None:
            nonlocal done
            done += 1
            if problem:
                problems[job.trial.name] = problem
            row = row_of(job.trial, job.folder, problem, scheduled=cluster.asha)
            say(f"{done}/{count} {job.trial.name}: {problem or outcome(row)}")

    # Silence Tune's log: `Notes` prints the same facts without tracebacks.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    gpus = cluster.gpus
    if gpus is None:
        gpus = 1.0 if config.device != "cpu" and ray.cluster_resources().get("GPU") else 0.0
    needed = {"CPU": cluster.cpus, "GPU": gpus}
    for name, amount in needed.items():
        if amount > ray.cluster_resources().get(name, 0):
            total = ray.cluster_resources().get(name, 0)
            raise ValueError(
                f"--{name.lower()}s: expected at most {total:g} for each run, which is all that "
                f"the cluster has, got {amount:g}"
            )
    threads = max(1, int(cluster.cpus))

    def trainable(settings: dict[str, Any]) -> None:
        _train(make(settings), threads)

    asha = ASHAScheduler(
        time_attr="progress", max_t=101, grace_period=cluster.grace, reduction_factor=3
    )
    tuner = tune.Tuner(
        tune.with_resources(trainable, {name: amount for name, amount in needed.items() if amount}),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="valid",
            mode="min",
            scheduler=asha if cluster.asha else None,
            search_alg=searcher,
            num_samples=count if searcher else 1,
            max_concurrent_trials=cluster.parallel or None,
            reuse_actors=True,  # so that a worker imports torch only once
        ),
        run_config=tune.RunConfig(
            storage_path=str(own_folder(scratch).absolute()),
            failure_config=tune.FailureConfig(max_failures=cluster.retries),
            verbose=0,
            callbacks=[Notes()],
        ),
    )
    try:
        tuner.fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return problems


def _train(job: Job, threads: int) -> None:
    """Run a job in a worker; report every validation, and at the end any error, to Tune."""
    from ray import tune

    torch.set_num_threads(threads)
    total = 1

    def tell(event: dict[str, Any]) -> None:
        nonlocal total
        if event["kind"] == "start":
            total = max(1, event["updates"])
        if event["kind"] == "valid":
            measure = measure_in(event) or "nats"
            tune.report(
                {"valid": event[measure], "progress": 100 * event["update"] / total, "ended": False}
            )

    problem = job(tell)
    valid = row_of(job.trial, job.folder, problem).valid
    # A failed run counts as infinitely bad, even if it had finite validations before.
    worth = math.inf if problem or valid is None else valid
    tune.report({"valid": worth, "progress": 100.0, "ended": True, "problem": problem})


@contextlib.contextmanager
def _ray(cluster: Cluster) -> Iterator[None]:
    """Connect to Ray, or use the Ray that is already initialised in this process."""
    # Run folders have absolute paths, so Ray must not change the working directory. Tune's log
    # files and messages are turned off: no run needs them, and users do not read them.
    quiet = {
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
        "RAY_AIR_NEW_OUTPUT": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        from ray import tune  # noqa: F401
    except ImportError:
        raise ValueError(
            f"--engine: the package ray is not installed; try {install_command('cluster')}, or use "
            "--engine local"
        ) from None
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise ValueError(
            f"--address: there is no Ray at {cluster.address} ({str(error).splitlines()[0]}); "
            "start it with `ray start --head`, or use --address local"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()
