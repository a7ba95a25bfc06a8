"""Mutation testing: `make mutants`, or python tests/mutation/run.py --jobs 16.

Change one small thing of the source (`mutants.py` says what), run the tests that reach it, quickest
first, and see whether one fails. First each test is run once on the source as it is, to learn which
lines it runs and how long it takes; tests that fail or are skipped there are not used. Both steps
go on where an earlier call stopped, as long as the files are the same; all is in build/mutants. A
mutant that runs into a timeout counts as not noticed. One that does not compile, or compiles to the
same code, is replaced by the next one.

Every trial is a fork of this process, which has imported torch and pytest but not the package, in a
copy of the tree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests that need no GPU

import mutants
import pytest
import torch
from mutants import AREAS, Mutant

with suppress(ImportError):
    import hypothesis  # noqa: F401 (so that forks have it)

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutants"
NOT_COPIED = ("build", "dist", "runs", "shared", ".*", "__pycache__", "*.egg-info")
NO_COMPILE, SAME = 90, 91  # exit statuses of a fork
NATIVE = tuple(  # what calls the C library
    f"src/zoneout/ops/cpu/{name}.py" for name in ("__init__", "masks", "plans")
)
Outcome = tuple[
    str, str
]  # "passed", "failed", "timeout", "broken", "same" or "invalid", and the test


# --- in a fork -----------------------------------------------------------------------------------


class Report:
    """Tells the parent process, line by line, which test runs, which one fails and, if asked to,
    what each one runs.
    """

    def __init__(self, out: int, ids: list[str], traced: bool) -> None:
        self.out, self.ids, self.traced = out, ids, traced
        self.lines: set[tuple[str, int]] = set()
        self.kernels: set[str] = set()
        self.inside = str(Path.cwd() / "src" / "zoneout")

    def tell(self, **what: Any) -> None:
        os.write(self.out, json.dumps(what).encode() + b"\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_id = {item.nodeid: item for item in items}
        if self.ids:
            items[:] = [by_id[one] for one in self.ids if one in by_id]
        else:
            os.write(self.out, b"".join(json.dumps({"id": one}).encode() + b"\n" for one in by_id))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.tell(start=item.nodeid)
        self.outcomes: list[str] = []
        began = time.monotonic()
        if self.traced:
            self.lines.clear(), self.kernels.clear()
            self.watch_kernels()
        try:
            with self.lines_run() if self.traced else nullcontext():
                return (yield)
        finally:
            masks: dict[str, int] = {}
            for path, line in self.lines if self.traced else ():
                masks[path] = masks.get(path, 0) | 1 << line
            lines = {os.path.relpath(path): f"{mask:x}" for path, mask in masks.items()}
            self.tell(
                id=item.nodeid,
                passed=self.outcomes == ["passed"] * 3,
                seconds=round(time.monotonic() - began, 3),
                **({"lines": lines, "kernels": sorted(self.kernels)} if self.traced else {}),
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes.append(report.outcome)
        if report.failed:
            said = report.longreprtext
            built = "CalledProcessError" in said and "emulated" in said
            self.tell(failed=report.nodeid, why="invalid" if built else "failed", said=said[-300:])

    @contextmanager
    def lines_run(self) -> Iterator[None]:
        """Collect the lines of the package that run; much faster from Python 3.12 on."""
        if sys.version_info < (3, 12):
            sys.settrace(self.called)
            try:
                yield
            finally:
                sys.settrace(None)
            return
        monitoring, tool = sys.monitoring, sys.monitoring.PROFILER_ID
        if monitoring.get_tool(tool) is None:
            monitoring.use_tool_id(tool, "mutants")
            monitoring.register_callback(tool, monitoring.events.LINE, self.reached)
        monitoring.restart_events()
        monitoring.set_events(tool, monitoring.events.LINE)
        try:
            yield
        finally:
            monitoring.set_events(tool, 0)

    def reached(self, code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(self.inside):
            self.lines.add((code.co_filename, line))
        return sys.monitoring.DISABLE  # until the next test

    def called(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self.ran if frame.f_code.co_filename.startswith(self.inside) else None

    def ran(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self.ran

    def watch_kernels(self) -> None:
        """Have the emulator say which source each kernel that is launched comes from."""
        emulator: Any = sys.modules.get("emulator")
        if emulator is None or hasattr(emulator, "watched"):
            return
        emulator.watched, load, launch = True, emulator.load, emulator.Kernel.launch

        def loaded(device: int, source: str, *rest: Any) -> Any:
            kernels = load(device, source, *rest)
            for kernel in kernels:
                kernel.sources = {source, *emulator.compiler.HEADERS.get(source, ())}
            return kernels

        def launched(kernel: Any, *arguments: Any, **named: Any) -> None:
            self.kernels.update(kernel.sources)
            launch(kernel, *arguments, **named)

        emulator.load, emulator.Kernel.launch = loaded, launched


def in_fork(folder: Path, out: int, ids: list[str], traced: bool, mutant: Mutant | None) -> int:
    """Run tests in a copy of the tree."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (40 << 30, 40 << 30))  # a mutant may ask for all memory
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    said = os.open("../said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1), os.dup2(said, 2)
    sys.path[:1] = [str(folder / "src")]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (sys.path[0], os.environ.get("PYTHONPATH")))
    )
    os.environ |= {
        "ZONEOUT_CACHE": str(BUILD / "cache"),
        "ZONEOUT_EMULATED": str(BUILD / "emulated"),
    }
    if mutant is not None and mutant.path.endswith((".c", ".h")):
        compiled = object_of(folder)
        if compiled is None or compiled == (BUILD / "loop.o").read_bytes():
            return NO_COMPILE if compiled is None else SAME
    files = list(dict.fromkeys(one.split("::")[0] for one in ids)) or ["tests", "src/zoneout"]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:benchmark",
        "--basetemp",
        str(folder.parent / "tmp"),
    ]
    options += ["-W", "ignore:Module already imported"] + (["-x"] if mutant else [])
    options += [] if ids else ["--collect-only", "--continue-on-collection-errors"]
    return int(pytest.main([*options, *files], plugins=[Report(out, ids, traced)]))


def object_of(folder: Path) -> bytes | None:
    """The C loop, compiled."""
    out = folder.parent / "loop.o"
    options = ["-std=gnu11", "-O1", "-march=native", "-fopenmp", "-w", "-c", "-o", str(out)]
    made = subprocess.run(
        [os.environ.get("CC", "cc"), *options, "loop.c"], cwd=folder / "src/zoneout/ops/cpu"
    )
    return None if made.returncode else out.read_bytes()


# --- forks, one a copy of the tree ---------------------------------------------------------------


class Slot:
    """A copy of the tree, and the fork that runs in it."""

    def __init__(self, number: int) -> None:
        self.folder = BUILD / f"slot{number}" / "tree"
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        shutil.copytree(ROOT, self.folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
        self.task: Generator[Any, list[dict[str, Any]], None] | None = None
        self.stamp = 10**9

    def start(
        self, ids: list[str], traced: bool, mutant: Mutant | None, limit_of: Callable[[str], float]
    ) -> None:
        self.limit_of, self.mutant, self.said, self.rest = limit_of, mutant, [], b""
        begins = 300 if mutant is None else 120  # seconds for imports and collection
        self.until, self.test, self.late = time.monotonic() + begins, "", False
        if mutant is not None:
            self.path = self.folder / mutant.path
            self.original, self.time = self.path.read_text(), self.path.stat().st_mtime
            self.path.write_text(mutant.apply(self.original))
            self.stamp += 1
            os.utime(
                self.path, (self.stamp, self.stamp)
            )  # never that of another mutant's compiled file
        self.pipe, out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 70
            try:
                status = in_fork(self.folder, out, ids, traced, mutant)
                os.write(
                    out, b'{"over": %d}\n' % status
                )  # a process that a test has started may still have the pipe
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        os.close(out)

    def read(self) -> bool:
        """Take what the fork says; False at its end."""
        got = os.read(self.pipe, 1 << 16)
        *lines, self.rest = (self.rest + got).split(b"\n")
        for line in map(json.loads, lines):
            self.said.append(line)
            if "start" in line:
                self.test = line["start"]
                self.until = time.monotonic() + self.limit_of(self.test)
        return bool(got) and not any("over" in line for line in self.said[-1:])

    def end(self) -> list[dict[str, Any]]:
        """What the fork said, and how it ended."""
        os.close(self.pipe)
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        killed = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])  # or ended by itself
        status = self.said.pop()["over"] if self.said and "over" in self.said[-1] else killed
        if self.mutant is not None:
            self.path.write_text(self.original)
            os.utime(self.path, (self.time, self.time))
        return [*self.said, {"status": status, "late": self.late, "test": self.test}]


def run_all(tasks: Iterator[Any], slots: list[Slot], deadline: float) -> None:
    """Run generators that yield the arguments of `Slot.start` and get what the fork said, one in
    each slot.
    """
    free, chosen = deque(slots), selectors.DefaultSelector()
    try:
        run_until(tasks, free, chosen, deadline)
    finally:
        for key in chosen.get_map().values():  # what has no result yet begins anew at the next call
            key.data.end()


def run_until(
    tasks: Iterator[Any], free: deque[Slot], chosen: selectors.BaseSelector, deadline: float
) -> None:
    """The loop of `run_all`; what is not done 20 seconds after the deadline is given up."""
    while time.monotonic() < deadline + 20:
        while free and time.monotonic() < deadline and (task := next(tasks, None)) is not None:
            slot = free.popleft()
            slot.task = task
            proceed(slot, None, free, chosen)
        if not chosen.get_map():
            return
        for key, _ in chosen.select(timeout=1):
            slot = key.data
            if not slot.read():
                chosen.unregister(slot.pipe)
                proceed(slot, slot.end(), free, chosen)
        for key in list(chosen.get_map().values()):
            slot = key.data
            if time.monotonic() > slot.until:
                slot.late, slot.until = True, float("inf")
                with suppress(OSError):
                    os.killpg(slot.pid, signal.SIGKILL)


def proceed(slot: Slot, said: Any, free: deque[Slot], chosen: selectors.BaseSelector) -> None:
    """Give a task what its fork said; start the next one it asks for."""
    try:
        slot.start(*slot.task.send(said))  # type: ignore[union-attr]
        chosen.register(slot.pipe, selectors.EVENT_READ, slot)
    except StopIteration:
        free.append(slot)


# --- which test runs which lines -----------------------------------------------------------------


def mapped(slots: list[Slot], deadline: float, only: str) -> list[dict[str, Any]]:
    """What each test runs; of files that are the same as at an earlier call, from there."""
    sources = [
        *(ROOT / "src").rglob("*.[pch]*"),
        *(path for path in (ROOT / "tests").rglob("*.*") if is_helper(path)),
    ]
    known = hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted(sources) if path.suffix != ".pyc")
    )
    ids: list[str] = []

    def collect() -> Any:
        said = yield [], False, None, lambda test: 120
        ids.extend(line["id"] for line in said if "id" in line and re.search(only, line["id"]))

    run_all(iter([collect()]), slots, deadline)
    of_file: dict[str, list[str]] = {}
    for one in ids:
        of_file.setdefault(one.split("::")[0], []).append(one)
    keys = {
        name: hashlib.sha256(known.digest() + (ROOT / name).read_bytes()).hexdigest()[:16]
        for name in of_file
    }
    path = BUILD / "map.jsonl"
    records = {(line["id"], line["key"]): line for line in read_lines(path)}

    def part(name: str, some: list[str]) -> Any:
        while some:
            said = yield some, True, None, lambda test: 300
            done = [line | {"key": keys[name]} for line in said if "seconds" in line]
            if said[-1]["test"] not in [line["id"] for line in done]:  # it ended the process
                done.append(
                    {
                        "id": said[-1]["test"] or some[0],
                        "passed": False,
                        "seconds": 0,
                        "key": keys[name],
                    }
                )
            records.update({(line["id"], line["key"]): line for line in done})
            append(path, *done)
            some = some[max(some.index(line["id"]) for line in done) + 1 :]

    parts = []
    for name, all_of_it in of_file.items():
        some = [one for one in all_of_it if (one, keys[name]) not in records]
        parts += [part(name, some[at : at + 60]) for at in range(0, len(some), 60)]
    if parts:
        print(f"Learning what {len(ids)} tests run ...", flush=True)
    run_all(iter(parts), slots, deadline)
    found = [
        records[one, keys[one.split("::")[0]]]
        for one in ids
        if (one, keys[one.split("::")[0]]) in records
    ]
    for line in found:
        line["lines"] = {name: int(mask, 16) for name, mask in line.get("lines", {}).items()}
    passed = [line for line in found if line["passed"]]
    if not passed:
        raise SystemExit(
            f"No test has been run: {BUILD}/slot0/said.txt says why, or --limit-seconds was too "
            "short."
        )
    print(
        f"{len(passed)} of {len(ids)} tests pass here, in "
        f"{sum(line['seconds'] for line in passed):.0f} seconds."
    )
    return passed


def is_helper(path: Path) -> bool:
    return (
        path.suffix in (".py", ".h")
        and not path.name.startswith("test_")
        and path.parent.name != "mutation"
    )


def reaching(
    mutant: Mutant, tests: list[dict[str, Any]], kills: Counter[tuple[str, str]]
) -> list[dict[str, Any]]:
    """The tests that may notice, those that are quick and have noticed much in this area first."""
    name = mutant.path.rsplit("/", 1)[1]
    first, last = mutant.reach
    lines = (1 << last + 1) - (1 << first)
    if name.endswith((".cu", ".cuh")):
        found = [
            one
            for one in tests
            if name in one["kernels"] or (one["kernels"] and name == "common.cuh")
        ]
    elif name.endswith((".c", ".h")):
        found = [one for one in tests if any(one["lines"].get(path) for path in NATIVE)]
    else:
        found = [one for one in tests if one["lines"].get(mutant.path, 0) & lines]
    reached = {one["id"] for one in found}
    if not found or "/definition/" in mutant.path or "/cells/" in mutant.path:
        # What an import runs, such as the trace of a cell, any test may notice.
        found = tests
    seen: Counter[str] = Counter()
    worth = {}
    for one in sorted(found, key=lambda one: one["seconds"]):
        function = one["id"].split("[")[0]
        seen[function] += 1
        worth[one["id"]] = (
            (one["seconds"] + 0.02) * seen[function] / (1 + 5 * kills[mutant.area, function])
        )
        worth[one["id"]] *= 1 if one["id"] in reached else 3
    return sorted(found, key=lambda one: worth[one["id"]])


# --- mutants -------------------------------------------------------------------------------------


def trial(
    mutant: Mutant,
    tests: list[dict[str, Any]],
    kills: Counter[tuple[str, str]],
    budget: float,
    end: Any,
) -> Any:
    """Run tests until one notices the mutant, or for `budget` seconds."""
    text = (ROOT / mutant.path).read_text()
    if mutant.path.endswith(".py") and mutants.same_code(
        compile(text, "", "exec"), compile(mutant.apply(text), "", "exec")
    ):
        return end(mutant, "same", "", 0, 0, 0)
    left = reaching(mutant, tests, kills)
    of, began, late, tried, room = len(left), time.monotonic(), [], 0, 4.0
    expected = {one["id"]: one["seconds"] for one in left}
    while left and time.monotonic() - began < budget:
        some = []
        while left and (not some or sum(expected[one] for one in some) < room):
            some.append(left.pop(0)["id"])
        room *= 4
        said = yield some, False, mutant, lambda test: 30 + 10 * expected[test]
        ended = said[-1]
        done = [line["id"] for line in said if "seconds" in line]
        tried += len(done)
        failed = [line for line in said if "failed" in line]
        seconds = time.monotonic() - began
        if ended["status"] in (NO_COMPILE, SAME):
            return end(
                mutant, "same" if ended["status"] == SAME else "invalid", "", tried, of, seconds
            )
        if failed:
            by = failed[0]["failed"]
            kills[mutant.area, by.split("[")[0]] += 1
            result = "invalid" if failed[0]["why"] == "invalid" else "killed"
            return end(mutant, result, by, tried, of, seconds, said=failed[0]["said"])
        if ended["late"] or ended["status"] == -signal.SIGKILL:  # for want of memory, perhaps
            late.append(ended["test"])
            if len(late) == 2 or not ended["test"]:
                return end(mutant, "timeout", ended["test"], tried, of, seconds)
            left = [one for one in left if one["id"] not in late]
            left += [{"id": one} for one in some if one not in done and one not in late]
        elif ended["status"]:
            by = ended["test"] if ended["status"] < 0 else "import"
            return end(
                mutant, "killed", by, tried, of, seconds, said=f"exit status {ended['status']}"
            )
    return end(mutant, "timeout" if late else "survived", "", tried, of, time.monotonic() - began)


def mutate(
    tests: list[dict[str, Any]], slots: list[Slot], deadline: float, options: argparse.Namespace
) -> None:
    """Try the mutants that have not been tried."""
    path = BUILD / "results.jsonl"
    results = {line["id"]: line for line in read_lines(path)}
    sample = mutants.sampled(ROOT)
    shard, shards = map(int, options.shard.split("/"))
    kills: Counter[tuple[str, str]] = Counter()
    for line in results.values():
        if line["result"] == "killed":
            kills[line["area"], line["by"].split("[")[0]] += 1
    started = {
        name
        for name, line in results.items()
        if not (options.again and line["result"] in ("survived", "timeout"))
    }

    def end(
        mutant: Mutant, result: str, by: str, tried: int, of: int, seconds: float, said: str = ""
    ) -> None:
        line = {
            "id": mutant.id,
            "area": mutant.area,
            "result": result,
            "by": by,
            "tried": tried,
            "of": of,
        }
        line |= {
            "seconds": round(seconds, 1),
            "path": mutant.path,
            "line": mutant.line,
            "old": mutant.old,
        }
        line |= {"new": mutant.new, "said": said}
        results[mutant.id] = line
        append(path, line)
        done = sum(one.id in results for one in wanted(sample, results))
        print(
            f"{done:4} {result:8} {seconds:5.0f} s  {mutant.path}:{mutant.line} {short(mutant)}  "
            f"{by}",
            flush=True,
        )

    def tasks() -> Iterator[Any]:
        while True:
            all_ = [
                one
                for one in wanted(sample, results)
                if options.only in one.path and options.area in one.area
            ]
            new = [
                one
                for n, one in enumerate(all_, 1)
                if n % shards == shard % shards and one.id not in started
            ]
            if not new:
                return
            started.add(new[0].id)
            yield trial(new[0], tests, kills, options.budget, end)

    class Again:  # asks anew after its end: one that was not useful is replaced by another
        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            return next(tasks())

    run_all(Again(), slots, deadline)
    print(table(sample, results))


def control(slots: list[Slot], deadline: float) -> None:
    """Run the tests that killed a mutant on the source as it is, in another order: none may
    fail.
    """
    killers = Counter(
        line["by"] for line in read_lines(BUILD / "results.jsonl") if line["result"] == "killed"
    )
    tests = sorted(
        (one for one in killers if "::" in one),
        key=lambda one: hashlib.sha256(one.encode()).digest(),
    )
    failed: list[str] = []

    def part(some: list[str]) -> Any:
        said = yield some, False, None, lambda test: 300
        done = [line["id"] for line in said if line.get("passed")]
        failed.extend(one for one in some if one not in done)

    run_all((part(tests[at : at + 20]) for at in range(0, len(tests), 20)), slots, deadline)
    print(
        f"Without a mutant {len(failed)} of the {len(tests)} tests that killed one fail.",
        *failed,
        sep="\n",
    )


def wanted(sample: list[tuple[int, list[Mutant]]], results: dict[str, Any]) -> list[Mutant]:
    """The mutants of the sample: of each file the first ones that are of use."""
    chosen = []
    for count, of_file in sample:
        useful = (
            one
            for one in of_file
            if results.get(one.id, {}).get("result") not in ("invalid", "same")
        )
        chosen += [one for one, _ in zip(useful, range(count))]
    return chosen


def table(sample: list[tuple[int, list[Mutant]]], results: dict[str, Any]) -> str:
    """How many were noticed, and which were not."""
    chosen = wanted(sample, results)
    rows, missed = [], []
    for area in (*AREAS, "all"):
        some = [
            results.get(one.id, {}).get("result") for one in chosen if area in (one.area, "all")
        ]
        counts = [some.count(kind) for kind in ("killed", "survived", "timeout", None)]
        rows.append(f"| {area} | {len(some)} | {' | '.join(map(str, counts))} |")
    for one in chosen:
        found = results.get(one.id, {})
        if found.get("result") in ("survived", "timeout"):
            missed.append(
                f"{found['result']:8} {one.path}:{one.line} {short(one)} ({found['tried']} of "
                f"{found['of']} tests)"
            )
    replaced = Counter(line["result"] for line in results.values())
    broken = sum(results.get(one.id, {}).get("by") == "import" for one in chosen)
    said = (
        f"Replaced: {replaced['invalid']} that did not compile, {replaced['same']} of the same "
        "code. "
    )
    said += f"Of those killed, {broken} ended the import of the package."
    heading = (
        "| area | mutants | killed | survived | timed out | not tried |\n|---|---|---|---|---|---|"
    )
    return "\n".join(["", heading, *rows, "", said, "", *missed])


def short(mutant: Mutant) -> str:
    old, new = (" ".join(text.split()) for text in (mutant.old, mutant.new))
    return f"{old[:50]} → {new[:50] or 'nothing'}"


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument(
        "--limit-seconds", type=float, default=float("inf"), help="end then, to be called again"
    )
    parser.add_argument("--budget", type=float, default=120, help="seconds of tests for a mutant")
    parser.add_argument(
        "--again", action="store_true", help="try those that survived or timed out once more"
    )
    parser.add_argument("--only", default="", help="only files whose path has this in it")
    parser.add_argument(
        "--area", default="", help="only areas whose name has this in it, as in kernels"
    )
    parser.add_argument("--shard", default="1/1", help="which part of the mutants, as in 2/3")
    parser.add_argument(
        "--tests", default="", help="only tests whose id matches this regular expression"
    )
    parser.add_argument(
        "--control", action="store_true", help="run the tests that killed on the source as it is"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the sample, run nothing")
    parser.add_argument(
        "--table", action="store_true", help="print the results so far, run nothing"
    )
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit_seconds
    if options.dry_run or options.table:
        sample = mutants.sampled(ROOT)
        results = {line["id"]: line for line in read_lines(BUILD / "results.jsonl")}
        for one in wanted(sample, {}) if options.dry_run else ():
            print(f"{one.area:16} {one.path}:{one.line} {one.operator}: {short(one)}")
        print(table(sample, results))
        return
    torch.set_num_threads(1)
    for name in ("cache", "emulated"):
        (BUILD / name).mkdir(parents=True, exist_ok=True, mode=0o700)
    shutil.copytree(ROOT / "src", BUILD / "clean" / "tree" / "src", dirs_exist_ok=True)
    (BUILD / "loop.o").write_bytes(object_of(BUILD / "clean" / "tree") or b"")
    slots = [Slot(n) for n in range(options.jobs)]
    if options.control:
        return control(slots, deadline)
    mutate(mapped(slots, deadline, options.tests), slots, deadline, options)


if __name__ == "__main__":
    main()
