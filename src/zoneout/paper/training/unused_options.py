"""Options without effect: fields that a config has but does not use.

A user who sets such an option expects an effect, so the option is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..data.datasets import CUT
from .config import NOISES, Config, any_rate

_Read = Callable[[Config], bool]

# Fields, the condition under which they are used, and the reason to show when they are not.
_RULES: tuple[tuple[tuple[str, ...], _Read, str], ...] = (
    (
        ("schedule.after",),
        lambda c: c.schedule.kind in ("divide", "plateau"),
        "only the schedules divide and plateau have it",
    ),
    (
        ("schedule.by",),
        lambda c: c.schedule.kind in ("divide", "plateau", "milestones"),
        "only the schedules divide, plateau and milestones have it",
    ),
    (
        ("schedule.at",),
        lambda c: max(c.schedule.at, default=0) < c.epochs,
        "one of these epochs is not before the end of the run",
    ),
    (("schedule.at",), lambda c: c.schedule.kind == "milestones", "only milestones have it"),
    (
        ("model.init",),
        lambda c: c.model.cell != "surprisal-lstm" or c.model.init == "uniform",
        "a surprisal-lstm has its own initial values",
    ),
    (
        ("model.hidden", "model.layers"),
        lambda c: not c.model.sizes,
        "model.sizes are those of the layers",
    ),
    (
        ("model.one_bias",),
        lambda c: not c.model.loops,
        "this cell has one bias",
    ),
    (
        ("system.hyper",),
        lambda c: c.model.cell in ("adaptive-lstm", "hyper-lstm"),
        "only adaptive-lstm and hyper-lstm have it",
    ),
    (("system.scales",), lambda c: c.model.cell == "hyper-lstm", "only hyper-lstm has them"),
    (("system.least",), lambda c: c.model.cell == "surprisal-lstm", "only surprisal-lstm has it"),
    (
        ("system.compile",),
        lambda c: c.model.loops,
        "only hyper-lstm, hm-lstm and surprisal-lstm have a loop in torch calls",
    ),
    (("swapout.mask",), NOISES["swapout"], "its rates are 0"),
    (
        ("zoneout.depth", "swapout.depth_old", "swapout.depth_new"),
        lambda c: len(c.model.units) > 1,
        "it is for layers after the first, and there is one",
    ),
    (("optimizer.decay",), lambda c: c.optimizer.rule == "rmsprop", "only rmsprop has it"),
    (("optimizer.betas",), lambda c: c.optimizer.rule == "adam", "only adam has them"),
    (("optimizer.eps", "optimizer.paper"), lambda c: c.optimizer.rule != "sgd", "sgd has none"),
    (("model.init_bound",), lambda c: c.model.init == "uniform", "only init uniform has it"),
    (
        ("model.forget_bias",),
        lambda c: c.model.cell in ("lstm", "adaptive-lstm"),
        "only an LSTM has it",
    ),
    (("model.output_bias",), lambda c: c.model.cell == "lstm", "only an LSTM has a cell state"),
    (("model.norm_momentum",), lambda c: c.model.norm == "batch", "only batch norm has it"),
    (("zoneout.mask",), NOISES["zoneout"], "its rates are 0"),
    (
        ("recurrent_dropout.mask", "recurrent_dropout.hold_output_gate"),
        lambda c: c.recurrent_dropout.rate > 0,
        "recurrent_dropout.rate is 0",
    ),
    (
        ("state_dropout.mask",),
        lambda c: c.state_dropout.cell > 0 or c.state_dropout.hidden > 0,
        "its rates are 0",
    ),
    (
        ("variational_dropout.tied",),
        lambda c: any_rate(c.variational_dropout.input, c.variational_dropout.hidden),
        "its rates for input and h are 0",
    ),
    (
        ("batches.offset",),
        lambda c: c.batches.kind == "chunks" and c.task == "language",
        "only a text that is cut into chunks has it",
    ),
    (
        ("evaluation.statistics", "evaluation.statistics_also"),
        lambda c: c.model.norm == "batch",
        "only batch norm has statistics",
    ),
    (
        ("evaluation.statistics_size",),
        lambda c: c.model.norm == "batch" and (c.batches.kind == "chunks" or c.task == "images"),
        "only batch norm has statistics, and with streams the batches are as large as in training",
    ),
    (
        ("model.embedding",),
        lambda c: c.task == "language",
        "a pixel is a number and not a symbol, so images have no embedding",
    ),
    (
        ("batches.halved", "batches.spread"),
        lambda c: c.batches.kind == "streams" and c.task == "language",
        "only streams have pieces of different lengths",
    ),
    (
        ("model.input_dropout", "model.output"),
        lambda c: c.task == "language",
        "only a model of a text has it",
    ),
    (("model.embedding_bound",), lambda c: c.model.embedding > 0, "there is no embedding"),
    (("evaluation.temperature",), lambda c: c.task == "language", "only a text is judged so"),
    (("data.order",), lambda c: c.task == "images", "only the pixels of mnist have an order"),
    (("data.preparation",), lambda c: c.data.name == "char-ptb", "only char-ptb has it"),
    (
        ("data.by",),
        lambda c: c.task == "language" and CUT.get(c.data.name, c.data.by) == c.data.by,
        "this corpus is cut in one way only",
    ),
    (
        (
            *("batches.length", "batches.kind", "loss", "data.words", "data.valid", "data.test"),
            *(
                "evaluation.valid.kind",
                "evaluation.valid.length",
                "evaluation.test.kind",
                "evaluation.test.length",
            ),
        ),
        lambda c: c.task == "language",
        "images are not cut as a text is",
    ),
)


def unread(config: Config) -> dict[str, str]:
    """Return the fields that have no effect in this config, each with the reason.

    >>> unread(Config())["schedule.by"]
    'only the schedules divide, plateau and milestones have it'
    """
    return {name: why for names, read, why in _RULES if not read(config) for name in names}


def refuse_unread(given: Iterable[str], configs: Sequence[Config]) -> None:
    """Raise if an option that the user gave has no effect in any of the configs.

    >>> refuse_unread(["schedule.by"], [Config()])
    Traceback (most recent call last):
        ...
    ValueError: --schedule.by: it would do nothing here (only the schedules divide, plateau and
        milestones have it); leave it out
    """
    for name in given:
        reasons = [unread(config).get(name) for config in configs]
        if reasons and all(reasons):
            raise ValueError(
                f"--{name.replace('_', '-')}: it would do nothing here ({reasons[0]}); leave it out"
            )


def refuse_given(
    names: Iterable[str], options: Any, default: Callable[[str], Any], why: str
) -> None:
    """Raise if an option without effect differs from its default; `why` is the message."""
    for name in names:
        if getattr(options, name) != default(name):
            raise ValueError(f"--{name.replace('_', '-')}: {why}")
