"""The command `bench`: run a benchmark script of the clone that contains this package."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import zoneout

from ..disk import RunError
from ..training.unused_options import refuse_given
from .options import Flag, Positional, UseAppendAction, arg

OPTIONS = {  # of each benchmark
    "bench": ("pairs", "dry_run"),
    "bench gpu": ("pairs", "type", "layer", "shape"),
    "bench step": ("device", "precision", "rounds", "at_once"),
}


@dataclass(frozen=True)
class Bench:
    """Compare the speed of the layers with torch.nn (only in a clone).

    Without gpu or step it measures the layers on the CPU.

    $ zoneout bench
    $ zoneout bench train eval
    $ zoneout bench gpu headline --type bf16
    $ zoneout bench step --device cuda
    """

    what: Annotated[tuple[str, ...], Positional, arg(metavar="[gpu|step] [GROUP …]")] = ()
    """gpu: the layers on an NVIDIA GPU, compared with cuDNN.
    step: a whole training step of the tool, compared with its layers alone.
    Then names of groups of measurements; by default all. A wrong name lists them.
    """
    pairs: int | None = None
    """CPU and gpu: number of paired runs for each ratio; by default 15."""
    dry_run: Flag = False
    """CPU: write nothing to benchmarks/results.csv."""
    type: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="TYPE")] = ()
    """gpu: only this type, such as bf16; can be repeated."""
    layer: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="LAYER")] = ()
    """gpu: only this layer, such as LSTM; can be repeated."""
    shape: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="SHAPE")] = ()
    """gpu: only this shape, where * stands for anything; can be repeated."""
    device: str | None = None
    """step: auto, cpu, cuda or cuda:N; by default auto."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = None
    """step: precision of the matrix products; by default fp32."""
    rounds: int | None = None
    """step: number of rounds; by default 15."""
    at_once: int | None = None
    """step: measure this many runs that share the device."""

    def __call__(self) -> int:
        named = self.what[:1] if self.what[:1] in (("gpu",), ("step",)) else ()
        for option in sorted({name for names in OPTIONS.values() for name in names}):
            has = [f"`zoneout {one}`" for one, names in OPTIONS.items() if option in names]
            if option not in OPTIONS[" ".join(("bench", *named))]:
                why = f"only {' and '.join(has)} can use it; leave it out"
                refuse_given([option], self, lambda name: getattr(Bench, name), why)
        script = Path(zoneout.__file__).parents[2] / "benchmarks" / f"{(*named, 'bench')[0]}.py"
        if not script.is_file():
            raise RunError(
                "the installed package does not contain the benchmarks; run `make bench` in a "
                "clone of the repository"
            )
        words = [*self.what[len(named) :], *self.given()]
        return subprocess.call([sys.executable, str(script), *words])

    def given(self) -> list[str]:
        """Return the options that differ from their defaults, as words of a command line."""
        words: list[str] = []
        for one in fields(self):
            value, option = getattr(self, one.name), f"--{one.name.replace('_', '-')}"
            if one.name == "what" or one.default is MISSING or value == one.default:
                continue
            if value is True:
                words.append(option)
            else:
                for each in value if isinstance(value, tuple) else (value,):
                    words += [option, str(each)]
        return words
