"""The runs of a sweep on a Ray cluster, or on a Ray that is started here: `pip install '.[cluster]'` in a clone.

Ray Tune decides what runs where and when; what runs is a job of `sweep`, in its own folder, which every machine has to
see under the same path. A job whose worker or machine dies is begun again by Tune and continues from its checkpoint.
Nothing of Tune's own state is needed to go on with a sweep: the folders say what is missing.
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

from . import config as configs
from .config import Config
from .disk import own_folder
from .measures import measure_in
from .sweep import RETRIES, Job, Say, mark
from .trials import Range, Trial, folders, known_trials, row_of, spelled, state_of, told, trial_of

SCRATCH = ".ray"  # in the sweep's folder, for as long as Tune works
STOPPED = "stopped by the scheduler: others were better after as much training"


@dataclass(frozen=True)
class Cluster:
    """Which Ray, and what of it a run gets."""

    address: str = "local"  # "local" starts one here; "auto" is the one that this machine belongs to; or HOST:PORT
    cpus: float = 1.0  # of each run
    gpus: float | None = None  # of each run, 0.25 for four on one; None is one where there are any
    parallel: int = 0  # runs at a time; 0 is as many as there is room for
    asha: bool = False  # stop runs that fall behind
    grace: float = 10.0  # asha: per cent of its updates before which no run is stopped
    retries: int = RETRIES


def run_ray(jobs: Sequence[Job], cluster: Cluster, say: Say) -> dict[str, str]:
    """Run jobs; what went wrong, by the name of the trial."""
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
    """Let Optuna choose settings until there are `count` trials, those of earlier calls included."""
    try:
        optuna: Any = importlib.import_module("optuna")
    except ImportError:
        raise ValueError("--search: the package optuna is not installed; pip install optuna") from None
    known = known_trials(base, list(axes), out)
    places = folders(known, out)
    ended: list[Trial] = []
    begun: list[Trial] = []
    for trial in known:
        over = state_of(trial, places[trial.name], scheduled=cluster.asha) in ("finished", "stopped", "diverged")
        (ended if over else begun).append(trial)
    if len(ended) >= count:
        return {}

    def point(settings: dict[str, Any]) -> dict[str, Any]:
        return {n: settings[n] if isinstance(axes[n], Range) else spelled(settings[n]) for n in axes}

    def make(settings: dict[str, Any]) -> Job:
        trial = trial_of(base, settings)
        return Job(trial, folders([trial], out)[trial.name], data)

    space: dict[str, Any] = {}
    for name, values in axes.items():
        if isinstance(values, Range):
            whole = configs.names().get(name) is int
            kind: Any = optuna.distributions.IntDistribution if whole else optuna.distributions.FloatDistribution
            ends = (int(values.low), int(values.high)) if whole else (values.low, values.high)
            space[name] = kind(*ends, log=values.log)
        else:
            choices = dict.fromkeys(spelled(trial_of(base, {name: value}).settings[name]) for value in values)
            space[name] = optuna.distributions.CategoricalDistribution(list(choices))
    with _ray(cluster):
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # Another seed after a restart: the first draws would otherwise be those that are there already.
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
    """Give trials to Tune, which keeps its own files in a folder for as long; what went wrong, by the trial's name."""
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    problems: dict[str, str] = {}
    done = 0

    class Notes(tune.Callback):
        """Says how each trial ended, and marks those that the scheduler stopped."""

        def __reduce__(self) -> Any:
            return tune.Callback, ()  # Tune writes it down with all else, to go on by itself, which we do not need

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            job, last = make(trial.config), trial.last_result or {}
            if not last.get("ended"):
                mark(job.folder, "stopped", STOPPED)
            self.say(job, last.get("problem", ""))

        def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            say(f"{make(trial.config).trial.name}: its worker died; another goes on with it")

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            self.say(make(trial.config), f"its worker died more than {cluster.retries} times")

        def say(self, job: Job, problem: str) -> None:
            nonlocal done
            done += 1
            if problem:
                problems[job.trial.name] = problem
            row = row_of(job.trial, job.folder, problem, scheduled=cluster.asha)
            say(f"{done}/{count} {job.trial.name}: {problem or told(row)}")

    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # what it would say is said above, without a traceback
    gpus = cluster.gpus
    if gpus is None:
        gpus = 1.0 if config.device != "cpu" and ray.cluster_resources().get("GPU") else 0.0
    needed = {"CPU": cluster.cpus, "GPU": gpus}
    for name, amount in needed.items():
        if amount > ray.cluster_resources().get(name, 0):
            there = ray.cluster_resources().get(name, 0)
            raise ValueError(f"--{name.lower()}s: a run asks for {amount:g}, and the cluster has {there:g} in all")
    threads = max(1, int(cluster.cpus))

    def trainable(settings: dict[str, Any]) -> None:
        _train(make(settings), threads)

    asha = ASHAScheduler(time_attr="progress", max_t=101, grace_period=cluster.grace, reduction_factor=3)
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
            reuse_actors=True,  # a worker has imported torch once
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
    """A job, in a worker; Tune hears of every validation, and at the end of what went wrong."""
    from ray import tune

    torch.set_num_threads(threads)
    total = 1

    def tell(event: dict[str, Any]) -> None:
        nonlocal total
        if event["kind"] == "start":
            total = max(1, event["updates"])
        if event["kind"] == "valid":
            measure = measure_in(event) or "nats"
            tune.report({"valid": event[measure], "progress": 100 * event["update"] / total, "ended": False})

    problem = job(tell)
    valid = row_of(job.trial, job.folder, problem).valid
    # What went wrong is worse than all that went right; what was trained before it is no result.
    worth = math.inf if problem or valid is None else valid
    tune.report({"valid": worth, "progress": 100.0, "ended": True, "problem": problem})


@contextlib.contextmanager
def _ray(cluster: Cluster) -> Iterator[None]:
    """A Ray to work with: that which is there already, or the one of the address."""
    # Runs are found by absolute paths; Tune's own files (none is needed to go on) are not for the user to read.
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
            "--engine: the package ray is not installed; pip install '.[cluster]' in a clone, or use --engine local"
        ) from None
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise ValueError(
            f"--address: there is no Ray at {cluster.address} ({str(error).splitlines()[0]}); `ray start --head` "
            "starts one, and --address local needs none"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()
