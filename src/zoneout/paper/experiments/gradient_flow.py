"""Gradient flow: how much of the loss's gradient reaches the state at every time step.

dL/dh_t and dL/dc_t are total derivatives of the loss with respect to the state after step t: they
include everything that is computed from this state in later steps. h_t is also the layer's output
at step t, so dL/dh_t includes the loss of that output.

dL/dc_t does not include the path from the cell to h_t inside step t. With zoneout this path does
not exist, because h_t is computed from the candidate cell. Without zoneout the path exists, but is
left out, so that all methods are measured at the same place. Therefore dL/dc of the last step
of a classifier is zero.

`zoneout gradients` measures runs. To measure another model, use `watched` and
`gradients_of`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ...norm import Moments
from ...ops import Result, Run
from ...recurrent import RecurrentModule
from .. import console, disk
from ..data.corpora import Corpus, Images
from ..disk import RunError
from ..training import runs
from ..training.config import Config
from ..training.feeds import make_feed
from ..training.models import loss_of
from ..training.processes import device_of
from ..training.step import as_tuple, update_seeds
from ..training.train import data_of
from .recipes import MEASURES, RECIPES, select
from .results import changes

Record: TypeAlias = dict[str, Any]
Runs: TypeAlias = dict[str, Run]  # the directions of a layer, by parameter name suffix

FORMAT = 1
NAMES = {"h": "hidden", "c": "cell"}


# --- any model ------------------------------------------------------------------------------------


@contextmanager
def watched(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record the state of every zoneout layer in a model after every time step.

    Inside the `with` block the recurrent layers of this package run one step at a time. Their
    states are collected by layer. The results do not change, because the masks of a step depend on
    its position in the sequence, not on the call. Layers of `torch.nn` are not recorded;
    `zoneout.convert` replaces them by layers of this package.

    >>> import torch, zoneout as zo
    >>> layer = zo.LSTM(5, 8, noise=zo.Zoneout(cell=0.5))
    >>> with watched(layer) as states:
    ...     y, _ = layer(torch.randn(20, 3, 5))
    ...     loss = y[-1].square().sum()
    >>> {name: tuple(gradient.shape) for name, gradient in gradients_of(loss, states).items()}
    {'l0.h': (20, 3, 8), 'l0.c': (20, 3, 8)}
    """
    seen: dict[str, list[Tensor]] = {}
    layers = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, RecurrentModule) and not m.one_step
    }
    if not layers:
        raise ValueError(
            "model: expected one with a recurrent layer of zoneout, got none; zoneout.convert "
            "replaces the layers of torch.nn"
        )
    for name, layer in layers.items():
        layer._run = _stepping(layer, f"{name}.".lstrip("."), seen)  # type: ignore[assignment, method-assign]
        layer._packs = lambda x: False  # type: ignore[method-assign]
    try:
        with torch.enable_grad():
            yield seen
    finally:
        for layer in layers.values():
            del layer._run, layer._packs


def gradients_of(loss: Tensor, states: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """Return the gradient of a loss with respect to every recorded state, each [T, B, units]."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            "loss: expected one number with a gradient, computed inside `with watched(model)`"
        )
    every = [state for each in states.values() for state in each]
    found = iter(torch.autograd.grad(loss, every, allow_unused=True, materialize_grads=True))
    return {name: torch.stack([next(found) for _ in each]) for name, each in states.items()}


def mean_norms(gradient: Tensor) -> Tensor:
    """Return the L2 norm over units, averaged over the batch: [T, B, units] to [T]."""
    return gradient.double().norm(dim=-1).mean(dim=-1)


def _stepping(
    layer: RecurrentModule, prefix: str, seen: dict[str, list[Tensor]]
) -> Callable[[Runs], list[Result]]:
    """Return a replacement for `layer._run` that runs one step per call and records the states."""
    whole = layer._run  # the method of the class; it is hidden only while the layer is watched

    def run(runs: Runs) -> list[Result]:
        return [stepped(suffix, r) for suffix, r in runs.items()]

    def stepped(suffix: str, r: Run) -> Result:
        if any(draw.rule.holds_gate for draw in r.draws):
            raise ValueError(
                "model: expected no recurrent dropout with hold_output_gate, since the held output "
                "gate is not a state that can be watched"
            )
        no_batch_norm = r.norm is None or r.norm.over == "units"
        if r.reverse and not (r.lengths is None and r.resets is None and no_batch_norm):
            raise ValueError(
                "model: expected no lengths, resets or batch norm together with a bidirectional "
                "layer"
            )
        now = list(r.states)
        if not now[
            0
        ].requires_grad:  # so that the states have gradients even if all weights are frozen
            now[0] = now[0].detach().requires_grad_()
        states: dict[str, dict[int, Tensor]] = {name: {} for name in r.cell.states}
        shown: dict[str, dict[int, Tensor]] = {name: {} for name in r.cell.states}
        for t in range(r.steps)[:: -1 if r.reverse else 1]:
            own = _step(r, t, now)
            (step,) = whole({suffix: own})
            # Separate views of the states: a path from one to another inside the step is not
            # counted.
            now = [state.view_as(state) for state in step.final]
            for name, state in zip(r.cell.states, now):
                alive = own.lengths
                states[name][t] = state
                shown[name][t] = (
                    state if alive is None else torch.where(alive[:, None] > 0, state, 0.0)
                )
        for name, each in states.items():
            in_time = [each[t] for t in range(r.steps)]
            seen.setdefault(f"{prefix}{suffix.removeprefix('_')}.{name}", []).extend(in_time)
        y, *others = (torch.stack([each[t] for t in range(r.steps)]) for each in shown.values())
        return Result(
            y, tuple(v.clone() for v in now), tuple(others) if r.return_states else (), None
        )

    return run


def _step(r: Run, t: int, states: list[Tensor]) -> Run:
    """Return the run of the single step t from these states on."""
    here, norm = slice(t, t + 1), r.norm
    if norm is not None and norm.given is not None:
        norm = norm._replace(given=Moments(*(v if v is None else v[here] for v in norm.given)))  # type: ignore[arg-type]
    return r._replace(
        x=r.x[here], states=tuple(states), first_step=r.first_step + t, norm=norm, reverse=False,
        lengths=None if r.lengths is None else (r.lengths - t).clamp(0, 1),
        resets=None if r.resets is None else r.resets[here],
    )  # fmt: skip


# --- runs -----------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """Mean gradient norms, and the number of batches and rows in the mean."""

    norms: dict[str, Tensor]  # by layer and state, each [T]
    batches: int
    rows: int  # rows of one batch


def measure(model: Any, config: Config, data: Corpus | Images, *, batches: int = 10) -> Measured:
    """Return the mean gradient norms of a trained model.

    The model is in training mode, so masks are drawn. The batches are those that training would use
    next: at most `batches`, and at most one epoch. The mean is over all sequences of these batches.
    """
    if batches < 1:
        raise ValueError(f"batches: expected 1 or more, got {batches}")
    device = next(model.parameters()).device
    feed = make_feed(config, data, device)
    order = feed.order(config.epochs)[:batches]
    seeds = update_seeds(config.seed, config.epochs * feed.updates(), len(order)).to(device)
    model.train()
    norms: dict[str, Tensor] = {}
    state: Any = None
    for row, seed in zip(order, seeds):
        inputs, targets = feed.batch(row.to(device))
        with watched(model) as watching:
            output = model(inputs, state, seed=seed, examples=feed.first)
            loss, _ = loss_of(output, targets, config)
        for name, gradient in gradients_of(loss, watching).items():
            norms[name] = norms.get(name, 0.0) + mean_norms(gradient).cpu() / len(order)
        if feed.carried:
            states = tuple(s.detach() for s in as_tuple(output.state))
            state = states if len(states) > 1 else states[0]
    return Measured(norms, len(order), feed.all_rows)


def make_record(
    folder: Path,
    *,
    recipe: str | None = None,
    weights: str = "best",
    batches: int = 10,
    data: Path | None = None,
    device: str = "auto",
) -> Record:
    """Measure the gradient flow of the run in a folder, and return its record.

    For every layer and state, it has the sum of the norms over all steps and each step's share.
    """
    where = device_of(device)
    loaded = runs.load(
        folder, weights=weights, device=where, changes={"device": str(where), "precision": "fp32"}
    )
    config = loaded.config
    loaded.model.requires_grad_(False)  # the gradients of the weights are not needed
    measured = measure(loaded.model, config, data_of(folder, config, data), batches=batches)
    made: dict[str, dict[str, Any]] = {}
    for name, each in measured.norms.items():
        layer, _, state = name.removeprefix("recurrent.").rpartition(".")
        made.setdefault(layer, {})[NAMES[state]] = flow(each)
    of_recipe = f"{recipe} --seed {config.seed}" if recipe else shlex.quote(str(folder))
    return {
        "format": FORMAT,
        "recipe": recipe,
        "seed": config.seed,
        "weights": weights,
        "update": loaded.info.get("update"),
        "epoch": loaded.info.get("epoch"),
        "batches": measured.batches,
        "rows": measured.rows,
        "command": f"zoneout gradients {of_recipe} --weights {weights} --batches {batches}",
        "layers": made,
    }


def flow(norms: Tensor) -> dict[str, Any]:
    """Return the sum of the norms of all steps, and the share of each step, with six digits.

    >>> flow(torch.tensor([1.0, 1.0, 2.0]))
    {'sum': 4.0, 'share': [0.25, 0.25, 0.5]}
    """
    total = norms.sum().item()
    if not math.isfinite(total):
        raise RunError(
            "the gradients are not finite numbers; the weights of the run are not usable"
        )
    shares = norms / total if total > 0 else norms
    return {
        "sum": float(f"{total:.6g}"),
        "share": [float(f"{share:.6g}") for share in shares.tolist()],
    }


def half_in_last(share: Sequence[float]) -> int:
    """Return how many of the last steps have half of the norm; few if gradients vanish.

    >>> half_in_last([0.25, 0.25, 0.25, 0.25]), half_in_last([0.0, 0.0, 0.1, 0.9])
    (2, 1)
    """
    seen, steps = 0.0, 0
    while steps < len(share) and seen < 0.5 * sum(share):
        steps += 1
        seen += share[-steps]
    return steps


def read_record(path: Path) -> Record:
    """Read the record of a gradient flow; raise `RunError` if it is not valid."""
    try:
        record = disk.read_json(path)
        if record["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {console.shown(record['format'])}")
        disk.check_fields(record, {"command": "text"}, {"seed": "number"})
        if not record["layers"] or not all(record["layers"].values()):
            raise ValueError("it has no layers, or one without states")
        for layer in record["layers"].values():
            for name, state in layer.items():
                if name not in NAMES.values():
                    raise ValueError(f"there is no state {console.shown(name)}")
                if not all(map(disk.is_number, state["share"])):
                    raise ValueError("a share is not a number")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path} is not a gradient flow that can be read: {disk.reason(error)}"
        ) from None
    return record


# --- folders and records --------------------------------------------------------------------------


def places(
    what: Sequence[str], seed: int, out: Path, results: Path
) -> list[tuple[Path, Path, str | None]]:
    """Return for every run its folder, the path of its record, and its recipe (or None)."""
    found: list[tuple[Path, Path, str | None]] = []
    for name in what:
        if (Path(name) / "config.json").exists():
            found.append((Path(name), Path(name) / "gradients.json", None))
        elif name in MEASURES or name in RECIPES:
            for recipe in select(name):
                folder = out / recipe.name / f"seed-{seed}"
                if not (folder / "config.json").exists():
                    raise RunError(
                        f"{recipe.name} has not been run: {folder} does not exist. `zoneout "
                        f"reproduce {recipe.name} --first-seed {seed} --out "
                        f"{shlex.quote(str(out))} --results {shlex.quote(str(out / 'results'))}` "
                        "runs it."
                    )
                for name, ours, theirs in changes(runs.read_config(folder), recipe.make()):
                    raise RunError(
                        f"{folder} is a trial of {recipe.name} with another setting ({name} is "
                        f"{ours}, not {theirs}); to measure it as a single run, use `zoneout "
                        f"gradients {shlex.quote(str(folder))}`"
                    )
                found.append(
                    (folder, results / recipe.name / f"gradients-seed-{seed}.json", recipe.name)
                )
        else:
            raise ValueError(
                f"expected the folder of a run, a recipe or a task, got {name!r}; the tasks are "
                f"{', '.join(MEASURES)}"
            )
    return found
