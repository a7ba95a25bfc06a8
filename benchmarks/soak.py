"""Train under faults, for as long as is wanted: `python benchmarks/soak.py [--minutes 5 | --hours
8] [--seed 1]`.

Small runs are killed, starved of disk, damaged and crowded at random, and continued each time. Each
is compared at its end with a twin that nobody disturbed: every line of the metrics and every bit of
the weights. The last thing printed is a table of what was done to them and what became of it; the
exit code is 1 if any run was lost, came out otherwise, or ended in anything but a sentence.

A full disk is real where a small tmpfs may be mounted (as root, or in a user namespace, which the
script enters by itself). Elsewhere the size of files is limited instead (RLIMIT_FSIZE), which fails
at the same writes. A clock that jumps is a `time.time` that does, in the process that trains, and
files with times of the past and the future.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zoneout.paper import disk
from zoneout.paper.data.corpora import load
from zoneout.paper.data.datasets import DataError
from zoneout.paper.disk import RunError
from zoneout.paper.training import runs
from zoneout.paper.training.config import (
    Batches,
    Config,
    Data,
    Evaluation,
    Model,
    Optimizer,
    Protocol,
    Zoneout,
)
from zoneout.paper.training.runs import Run
from zoneout.paper.training.train import train

FINISHED, REFUSED, STOPPED, UNTOLD = (
    0,
    1,
    2,
    99,
)  # exit codes of a try; a negative one is the signal that killed it
DISK = 6 * 2**20  # bytes of the small disk
CALM = -1  # updates after which nothing happens


def configs(text: Path) -> dict[str, Config]:
    """Small runs of different kinds, each with several checkpoints."""
    chars = Config(
        data=Data(str(text)),
        batches=Batches(size=8, length=25),
        model=Model(hidden=24, embedding=0, learn_initial_state=True),
        zoneout=Zoneout(cell=0.5, hidden=0.05),
        optimizer=Optimizer(lr=0.01, clip_gradient=1.0),
        evaluation=Evaluation(
            Protocol("chunks", length=25), Protocol("whole", length=200), every=20
        ),
        epochs=3,
        log_every=4,
        save_every=7,
        device="cpu",
    )
    streams = replace(
        chars,
        batches=Batches("streams", size=8, length=20),
        model=Model("gru", hidden=24, layers=2, embedding=0),
    )
    return {
        "LSTM, chunks": chars,
        "GRU, streams": replace(streams, zoneout=Zoneout(hidden=0.1), seed=2),
        "LSTM, batch norm": replace(chars, model=Model(hidden=12, norm="batch"), epochs=1, seed=3),
        "words": replace(
            streams,
            data=replace(chars.data, by="word"),
            model=Model(hidden=16, embedding=16, tied=True),
            seed=4,
        ),
    }


# --- one try --------------------------------------------------------------------------------------


@dataclass
class Trouble:
    """What happens to a process that trains."""

    kill_after: int = CALM  # updates, then SIGKILL from outside
    stop_after: int = CALM  # updates, then SIGTERM from outside
    kill_at_write: int = CALM  # SIGKILL from inside, at so many-th write to the disk
    file_size: int = CALM  # bytes that no file may exceed
    clock: float = 0.0  # seconds that the clock jumps, again and again


def attempt(config: Config, folder: Path, trouble: Trouble) -> tuple[int, str]:
    """Train or go on in a process of its own; how it ended, and what it said."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os._exit(_child(config, folder, trouble, writing))
    os.close(writing)
    seen, said = 0, b""
    while piece := os.read(reading, 4096):
        said += piece.replace(b"\0", b"")
        seen += piece.count(b"\0")
        for limit, number in (
            (trouble.kill_after, signal.SIGKILL),
            (trouble.stop_after, signal.SIGTERM),
        ):
            if 0 <= limit <= seen:
                os.kill(child, number)
                trouble = Trouble()
    os.close(reading)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.decode()


def _child(config: Config, folder: Path, trouble: Trouble, pipe: int) -> int:
    """What a try does; a zero byte for every update and its last words go into the pipe."""
    try:
        if trouble.file_size != CALM:
            resource.setrlimit(resource.RLIMIT_FSIZE, (trouble.file_size, resource.RLIM_INFINITY))
        if trouble.kill_at_write != CALM:
            _kill_at_write(trouble.kill_at_write)
        if trouble.clock:
            _jump(trouble.clock)

        def tell(event: dict[str, Any]) -> None:
            if event["kind"] == "step":
                os.write(pipe, b"\0")

        begun = (folder / "config.json").exists()
        summary = train(config, folder, resume=begun, progress=tell)
        return STOPPED if summary.status == "interrupted" else FINISHED
    except (RunError, DataError, ValueError) as error:
        os.write(pipe, str(error).encode())
        return REFUSED
    except BaseException:
        os.write(pipe, traceback.format_exc().encode()[-3000:])
        return UNTOLD


def _kill_at_write(number: int) -> None:
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 2
            if count == number - number % 2:
                if number % 2:
                    function(*args, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    os.fsync, os.replace, os.rename = counted(os.fsync), counted(os.replace), counted(os.rename)


def _jump(seconds: float) -> None:
    """A clock that goes back and forth; the monotonic one does not, on any system."""
    now, now_ns, chance = time.time, time.time_ns, random.Random(int(seconds))
    time.time = lambda: now() + chance.choice((-1, 0, 1)) * seconds
    time.time_ns = lambda: now_ns() + chance.choice((-1, 0, 1)) * int(seconds * 1e9)


# --- a run and its twin ---------------------------------------------------------------------------


def outcome(folder: Path) -> dict[str, Any]:
    """All of a finished run that has to be equal."""
    summary = disk.read_json(folder / "summary.json")
    tensors, info = runs.read_tensors(folder / "best.safetensors")
    latest = runs.read_checkpoint(Run(folder).checkpoints()[0], folder / "metrics.jsonl")
    every = {f"best.{n}": t for n, t in tensors.items()} | latest.tensors
    bits = {
        name: value.reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in every.items()
    }
    metrics = (folder / "metrics.jsonl").read_bytes()
    return bits | {
        "info": info,
        "metrics": metrics,
        "summary": {**summary, "seconds": 0, "folder": ""},
    }


@dataclass
class Counts:
    """What was done, and what became of it."""

    faults: Counter[str] = field(default_factory=Counter)
    died: Counter[str] = field(default_factory=Counter)  # the process was killed
    told: Counter[str] = field(default_factory=Counter)  # it ended with a sentence
    passed: Counter[str] = field(default_factory=Counter)  # it went on as if nothing were
    anew: Counter[str] = field(
        default_factory=Counter
    )  # a sentence, after which the run was begun again from the start
    survived: Counter[str] = field(
        default_factory=Counter
    )  # faults of runs that ended as their twins
    runs: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)


class Soak:
    """Runs in a folder, one after another, with faults."""

    def __init__(self, work: Path, small_disk: bool, seed: int) -> None:
        self.disk, self.small_disk, self.chance = work / "disk", small_disk, random.Random(seed)
        self.text = work / "text.txt"
        corpus = load("python", limit=12_000)
        self.text.write_text(
            "".join(corpus.vocabulary.decode(p) for p in (corpus.train, corpus.valid, corpus.test))
        )
        os.utime(self.text, (1e9, 1e9))  # old enough for the cache to remember
        self.configs = configs(self.text)
        self.twins = {}
        for name, config in self.configs.items():
            code, said = attempt(config, work / "twins" / name, Trouble())
            assert code == FINISHED, said
            self.twins[name] = outcome(work / "twins" / name)
        self.counts = Counts()

    def run(self, number: int) -> None:
        """One run from its beginning to its end, with some faults on the way."""
        name = self.chance.choice(list(self.configs))
        config, folder = self.configs[name], self.disk / f"run-{number}"
        mine: list[str] = []
        for _ in range(self.chance.randint(2, 7)):
            fault = self.chance.choice(FAULTS)
            if fault(self, config, folder):
                mine.append(fault.__name__.replace("_", " "))
                self.counts.faults[mine[-1]] += 1
            if (folder / "summary.json").exists():
                break
        code, said = attempt(config, folder, Trouble())
        where = f"run {number} ({name}) after {', '.join(mine)}"
        self.counts.runs += 1
        if code != FINISHED:
            self.counts.lost.append(f"{where}: exit code {code}: {said}")
            return
        found, expected = outcome(folder), self.twins[name]
        different = [key for key in expected if found.get(key) != expected[key]]
        if different or found.keys() != expected.keys():
            self.counts.wrong.append(f"{where}: {', '.join(different)}")
        else:
            self.counts.survived.update(mine)
        shutil.rmtree(folder)

    def go(self, fault: str, config: Config, folder: Path, trouble: Trouble, says: str = "") -> int:
        """A try with trouble; it may end in any way but without a word, and if it must say
        something, it does.
        """
        code, said = attempt(config, folder, trouble)
        if code == UNTOLD or (says and (code != REFUSED or says not in said)):
            self.counts.untold.append(f"{fault}: exit code {code}: {said or 'nothing'}")
        kind = (
            self.counts.died
            if code < 0
            else self.counts.told
            if code == REFUSED
            else self.counts.passed
        )
        kind[fault] += 1
        return code

    def some(self, most: int = 60) -> int:
        return self.chance.randint(0, most)

    def begun(self, config: Config, folder: Path, checkpoints: int) -> bool:
        """Train until there are so many checkpoints; not if the run ends before."""
        while len(Run(folder).checkpoints()) < checkpoints:
            if attempt(config, folder, Trouble(stop_after=self.some(20) + 8))[0] != STOPPED:
                return False
        return True


# --- faults: each does its worst once, or says that it could not ---


def killed(soak: Soak, config: Config, folder: Path) -> bool:
    soak.go("killed", config, folder, Trouble(kill_after=soak.some()))
    return True


def killed_while_writing(soak: Soak, config: Config, folder: Path) -> bool:
    return (
        soak.go("killed while writing", config, folder, Trouble(kill_at_write=soak.some(70) + 2))
        < 0
    )


def stopped(soak: Soak, config: Config, folder: Path) -> bool:
    soak.go("stopped", config, folder, Trouble(stop_after=soak.some()))
    return True


def disk_full(soak: Soak, config: Config, folder: Path) -> bool:
    """Little or no room is left; what the process says is tested where it could not go on."""
    if not soak.small_disk:
        size = soak.some(40_000)
        return soak.go("disk full", config, folder, Trouble(file_size=size)) == REFUSED
    ballast = soak.disk / "ballast"
    there = os.statvfs(soak.disk)
    with contextlib.suppress(OSError), open(ballast, "wb") as file:
        file.write(b"x" * max(0, there.f_bavail * there.f_frsize - 4096 * soak.some(30)))
    code = soak.go("disk full", config, folder, Trouble())
    ballast.unlink()
    return code == REFUSED


def _damage(soak: Soak, path: Path) -> None:
    content = bytearray(path.read_bytes())
    kind = soak.chance.choice(("flip", "cut", "zeros", "longer", "gone"))
    if kind == "gone":
        path.unlink()
        return
    place = soak.chance.randrange(len(content))
    if kind == "flip":
        content[place] ^= 1 << soak.chance.randrange(8)
    elif kind == "cut":
        content = content[:place]
    elif kind == "zeros":  # a block that never reached the disk
        content[place : place + 512] = bytes(len(content[place : place + 512])) or b"\0"
        if bytes(content) == path.read_bytes():
            content[place] ^= 255
    else:
        content += b"\n{}"
    path.write_bytes(content)


def checkpoint_damaged(soak: Soak, config: Config, folder: Path) -> bool:
    """The latest of two; the one before it is used."""
    if not soak.begun(config, folder, 2):
        return False
    latest = Run(folder).checkpoints()[0]
    _damage(soak, latest / soak.chance.choice(("state.json", "tensors.safetensors")))
    soak.go("checkpoint damaged", config, folder, Trouble(kill_after=soak.some()))
    return True


def best_weights_damaged(soak: Soak, config: Config, folder: Path) -> bool:
    """They are refused, and can be had again only by a new run, if no better ones come after
    them.
    """
    path = folder / "best.safetensors"
    if not soak.begun(config, folder, 1) or not path.exists():
        return False
    before, _ = runs.read_tensors(path)
    _damage(soak, path)
    try:
        found, _ = runs.read_tensors(path)
        if any(not torch.equal(found[name], value) for name, value in before.items()):
            soak.counts.wrong.append(f"other weights were read from a damaged {path.name}")
    except RunError:
        soak.counts.told["best weights damaged"] += 1
    if soak.go("best weights damaged", config, folder, Trouble()) == REFUSED:
        soak.counts.anew["best weights damaged"] += 1
        shutil.rmtree(folder)
    return True


def config_damaged(soak: Soak, config: Config, folder: Path) -> bool:
    if not soak.begun(config, folder, 1):
        return False
    path = folder / "config.json"
    before = path.read_bytes()
    while path.exists() and path.read_bytes().strip() == before.strip():
        _damage(soak, path)
    if not path.exists():
        path.write_bytes(b"")
    soak.go("config damaged", config, folder, Trouble())
    path.write_bytes(before)  # from the command that began the run, say
    return True


def cache_damaged(soak: Soak, config: Config, folder: Path) -> bool:
    """What is kept of the encoded text; it is made again."""
    pages = sorted((Path(os.environ["ZONEOUT_CACHE"]) / "encoded").glob("*/*"))
    if not pages:
        return False
    _damage(soak, soak.chance.choice(pages))
    soak.go("cache damaged", config, folder, Trouble(kill_after=soak.some()))
    return True


def text_damaged(soak: Soak, config: Config, folder: Path) -> bool:
    """The run refuses other data than it was trained on, and goes on when they are back."""
    if not soak.begun(config, folder, 1):
        return False
    before = soak.text.read_bytes()
    while soak.text.exists() and soak.text.read_bytes() == before:
        _damage(soak, soak.text)
    soak.go("text damaged", config, folder, Trouble(), says=" ")
    soak.text.write_bytes(before)
    os.utime(soak.text, (1e9, 1e9))
    return True


def clock_jumps(soak: Soak, config: Config, folder: Path) -> bool:
    years = 365 * 86_400 * soak.chance.uniform(0.1, 30)
    for path in folder.rglob("*"):
        os.utime(path, (time.time() + soak.chance.choice((-1, 1)) * years,) * 2)
    soak.go("clock jumps", config, folder, Trouble(clock=years, kill_after=soak.some()))
    return True


def crowd(soak: Soak, config: Config, folder: Path) -> bool:
    """Several processes begin or continue the same run at once: one does, the others say why
    they do not.
    """
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            pipe = os.open(os.devnull, os.O_WRONLY)
            os._exit(_child(config, folder, Trouble(), pipe))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    # One after another may have finished it: the first trained, those after found nothing left to
    # train.
    if FINISHED not in codes or not set(codes) <= {FINISHED, REFUSED}:
        soak.counts.untold.append(f"crowd: exit codes {codes}")
    soak.counts.told["crowd"] += 1
    return True


FAULTS: list[Callable[[Soak, Config, Path], bool]] = [
    killed,
    killed_while_writing,
    stopped,
    disk_full,
    checkpoint_damaged,
    best_weights_damaged,
    config_damaged,
    cache_damaged,
    text_damaged,
    clock_jumps,
    crowd,
]


# --- from the command line ------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A tmpfs of a few megabytes, where that is allowed."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    mounted = sys.platform == "linux" and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=False)


def table(counts: Counts) -> str:
    lines = ["fault                  injected  killed  told  went on  survived", "-" * 65]
    for fault in sorted(counts.faults):
        own = (
            c[fault]
            for c in (counts.faults, counts.died, counts.told, counts.passed, counts.survived)
        )
        lines.append(f"{fault:22}" + "".join(f"{n:{w}}" for n, w in zip(own, (9, 8, 6, 9, 10))))
    total, survived = sum(counts.faults.values()), sum(counts.survived.values())
    lines += ["-" * 65, f"{'all':22}{total:9}{'':23}{survived:10}", ""]
    lines.append(f"{counts.runs} runs; begun anew, as a sentence said: {sum(counts.anew.values())}")
    lines.append(
        f"lost: {len(counts.lost)}, wrong: {len(counts.wrong)}, without a sentence: "
        f"{len(counts.untold)}"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1, help="of the choice of faults")
    options = parser.parse_args()
    inside = "ZONEOUT_SOAK_INSIDE" in os.environ
    if (
        not inside
        and sys.platform == "linux"
        and subprocess.run(["unshare", "-rm", "true"], check=False).returncode == 0
    ):
        os.environ["ZONEOUT_SOAK_INSIDE"] = (
            "1"  # where mounting is allowed, and nobody else sees it
        )
        os.execvp("unshare", ["unshare", "-rm", sys.executable, *sys.argv])
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * options.minutes * (not options.hours) + 3600 * options.hours
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as work,
        small_disk(Path(work) / "disk") as mounted,
    ):
        os.environ["ZONEOUT_CACHE"] = str(Path(work) / "cache")
        print(
            "full disks: "
            + (f"a tmpfs of {DISK:,} bytes" if mounted else "a limit on the size of files"),
            flush=True,
        )
        soak = Soak(Path(work), mounted, options.seed)
        shown = time.monotonic()
        number = 0
        while time.monotonic() < until:
            soak.run(number)
            number += 1
            if time.monotonic() - shown > 30:
                shown = time.monotonic()
                print(f"{number} runs, {sum(soak.counts.faults.values())} faults", flush=True)
        counts = soak.counts
    for kind in ("lost", "wrong", "untold"):
        for text in getattr(counts, kind)[:20]:
            print(f"{kind}: {text}")
    print(table(counts))
    return 1 if counts.lost or counts.wrong or counts.untold else 0


if __name__ == "__main__":
    sys.exit(main())
