"""Files with anything in them: what was written, or an error that is a sentence; and none that runs
code.

ZONEOUT_FUZZ=20 tries twenty times as many cases, each time others.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import some
from hypothesis import example, given
from hypothesis import strategies as st

from zoneout.paper.data import cache, datasets
from zoneout.paper.data.corpora import Vocabulary, load, load_images
from zoneout.paper.data.datasets import DATASETS, DataError
from zoneout.paper.disk import RunError
from zoneout.paper.training import runs
from zoneout.paper.training.config import Config, Model, from_json, names, to_json
from zoneout.paper.training.models import build
from zoneout.paper.training.runs import Run

VOCABULARY = Vocabulary("char", tuple("abcü\n"))
CONFIG = Config(model=Model(hidden=4))


def sentence(error: Exception) -> bool:
    return len(str(error).split()) >= 4


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has best weights and two checkpoints, and a text that is in the
    cache.
    """
    home = tmp_path_factory.mktemp("files")
    run, model = Run(home / "run"), build(CONFIG, len(VOCABULARY))
    run.create(CONFIG, VOCABULARY)
    run.save_best(runs.weights_of(model), {"update": 1, "bits": 2.0})
    for update in (1, 2):
        run.append({"kind": "train", "update": update, "epoch": 0.5, "nats": 1.0})
        weights = {f"model.{name}": value for name, value in runs.weights_of(model).items()}
        run.save({**weights, "number": torch.tensor(update)}, {"update": update, "epoch": 0})
    run.close()
    text = home / "text.txt"
    text.write_text("some text or other\n" * 20)
    os.utime(text, (1e9, 1e9))
    return home


@pytest.fixture(autouse=True)
def own_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZONEOUT_CACHE", str(home / "cache"))
    monkeypatch.delenv("ZONEOUT_DATA", raising=False)


class Harm(tuple):  # type: ignore[type-arg]
    """What is done to the bytes of a file, one thing after another."""

    def __call__(self, content: bytes) -> bytes:
        for kind, place, value in self:
            at = int(place * len(content))
            if kind == "flip":
                content = (
                    content[:at] + bytes([content[at] ^ (1 << value % 8)]) + content[at + 1 :]
                    if content
                    else b""
                )
            elif kind == "cut":
                content = content[:at]
            elif kind == "insert":
                content = content[:at] + bytes([value]) * (1 + value % 7) + content[at:]
            elif kind == "zeros":
                content = content[:at] + bytes(len(content[at : at + 64])) + content[at + 64 :]
            elif kind == "digit":  # still good JSON, but another number
                content = content[:at] + content[at:].replace(b"1", b"2", 1)
            elif kind == "swap":
                content = content[at:] + content[:at]
        return content


HARMS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "zeros", "digit", "swap"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=3,
).map(Harm)


# --- runs -----------------------------------------------------------------------------------------


@some(120)
@given(
    HARMS, st.sampled_from(["config.json", "vocabulary.json", "metrics.jsonl", "best.safetensors"])
)
def test_a_run_with_any_file_harmed(home: Path, harm: Harm, name: str) -> None:
    """What is read is not what was written, or what is wrong is not said."""
    path = home / "run" / name
    before = path.read_bytes()
    readers: dict[str, Callable[[Path], Any]] = {
        "config.json": runs.read_config,
        "vocabulary.json": runs.read_vocabulary,
        "metrics.jsonl": runs.read_metrics,
        "best.safetensors": lambda folder: runs.load(folder).model.state_dict(),
    }
    expected = readers[name](home / "run")
    try:
        path.write_bytes(harm(before))
        found = readers[name](home / "run")
    except RunError as error:
        assert sentence(error)
    else:
        if name == "best.safetensors":
            assert all(torch.equal(found[key], value) for key, value in expected.items()), (
                "other weights"
            )
        elif (
            name != "metrics.jsonl"
        ):  # good JSON with other values is another config, and good as such
            assert type(found) is type(expected)
        else:
            assert all(isinstance(row, dict) for row in found)
    finally:
        path.write_bytes(before)


@some(120)
@given(HARMS, st.sampled_from(["state.json", "tensors.safetensors"]), st.booleans())
def test_a_checkpoint_with_any_harm_is_passed_over(
    home: Path, harm: Harm, name: str, both: bool
) -> None:
    """A run goes on from something else than a checkpoint that it wrote."""
    copy = home / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(home / "run", copy)
    paths = [copy / "last" / number / name for number in ("00000002", "00000001")[: 1 + both]]
    before = [path.read_bytes() for path in paths]
    for path, content in zip(paths, before):
        path.write_bytes(harm(content))
    harmed = [path.read_bytes() != content for path, content in zip(paths, before)]
    try:
        found, problems = Run(copy).latest()
    except RunError as error:
        assert both and all(harmed) and sentence(error)
        return
    assert found is not None
    update = 1 if problems else 2  # a space more or less harms nothing
    assert found.state == {"update": update, "epoch": 0} and found.tensors["number"] == update


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@some(150)
@given(st.lists(st.tuples(st.sampled_from(sorted(names())), JSON), max_size=4), JSON)
@example([], [[[]]])
def test_any_json_as_a_config(values: list[tuple[str, Any]], other: Any) -> None:
    """A field takes what it cannot be, or an error comes out of the depths."""
    plain: Any = to_json(Config())
    for name, value in values:
        inner = plain
        *outer, last = name.split(".")
        for part in outer:
            inner = inner[part]
        inner[last] = value
    for candidate in (plain, other):
        try:
            config = from_json(candidate)
        except ValueError as error:
            assert sentence(error)
        else:
            assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize("name", ["config.json", "vocabulary.json", "metrics.jsonl"])
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b"",
        b"null",
        b"3\n",
        b'"x"\n',
        b"[]\n",
        b'{"seed": 1e999}\n',
        b"NaN\n",
    ],
    ids=lambda content: repr(content[:12]),
)
def test_json_that_is_meant_ill(home: Path, name: str, content: bytes) -> None:
    """Brackets without end, no text at all, or a page that is not an object: an error out of the
    depths.
    """
    folder = home / "ill"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(home / "run", folder)
    (folder / name).write_bytes(content)
    read: Any = {
        "config.json": runs.read_config,
        "vocabulary.json": runs.read_vocabulary,
        "metrics.jsonl": runs.read_metrics,
    }[name]
    cut_off = (
        name == "metrics.jsonl" and b"\n" not in content
    )  # half a line is what a crash leaves, and is left out
    if cut_off:
        assert read(folder) == []
        return
    with pytest.raises(RunError) as error:
        read(folder)
    assert sentence(error.value)


# --- data -----------------------------------------------------------------------------------------


def packed(text: bytes, how: str) -> bytes:
    if how == "zip":
        buffer = BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("text.txt", text)
        return buffer.getvalue()
    return {"plain": lambda b: b, "gz": lambda b: gzip.compress(b, mtime=0), "xz": lzma.compress}[
        how
    ](text)


@some(150)
@given(HARMS, st.sampled_from(["plain", "gz", "xz", "zip"]), st.sampled_from(["char", "word"]))
def test_a_text_with_any_harm(home: Path, harm: Harm, how: str, by: Any) -> None:
    """A harmed text or archive ends in something else than the text, another text or a sentence."""
    path = home / "harmed.txt"
    path.write_bytes(harm(packed("etwas Text, größer als klein\n".encode() * 20, how)))
    try:
        corpus = load(path, by=by)
    except DataError as error:
        assert sentence(error) and str(path) in str(error)
        return
    size = len(corpus.vocabulary)
    assert all(
        part.ndim == 1 and len(part) >= 2 and part.max() < size
        for part in (corpus.train, corpus.valid, corpus.test)
    )


@some(150)
@given(HARMS, st.integers(0, 3))
@example(Harm([("zeros", 0.0, 0)]), 1)
@example(
    Harm([("zeros", 0.1, 0)]), 1
)  # a header that ends in the middle made NumPy raise a TokenError
def test_a_cache_with_any_harm_is_made_again(home: Path, harm: Harm, number: int) -> None:
    """A harmed entry is trained on, or is in the way."""
    expected = load(home / "text.txt")
    entry = home / "cache" / "encoded" / expected.digest
    path = sorted(entry.iterdir())[number]
    content = path.read_bytes()
    path.unlink()  # not in place: `expected` has it mapped
    path.write_bytes(harm(content))
    found = load(home / "text.txt")
    assert found.vocabulary == expected.vocabulary and found.digest == expected.digest
    assert all(
        np.array_equal(getattr(found, part), getattr(expected, part))
        for part in ("train", "valid", "test")
    )


@some(60)
@given(HARMS, st.integers(0, 3), st.booleans())
def test_images_with_any_harm_are_refused(home: Path, harm: Harm, number: int, pack: bool) -> None:
    """Images that are not those of the table are trained on."""
    file = DATASETS["mnist"].files[number]
    content = bytes([0, 0, 8, 1]) + (file.size - 8).to_bytes(4, "big")
    path = home / "images" / (file.name + (".gz" if pack else ""))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(harm(gzip.compress(content * 3, mtime=0) if pack else content * 3))
    with pytest.raises(DataError) as error:
        datasets.read(path, file)
    assert sentence(error.value)


# --- nothing runs code ----------------------------------------------------------------------------


class Evil:
    """Leaves a file behind wherever it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def evil_files(trap: Path) -> dict[str, bytes]:
    """The same, in every form that torch, NumPy and Python would unpickle."""
    torchs, numpys = BytesIO(), BytesIO()
    torch.save({"weight": Evil(trap)}, torchs)
    np.save(numpys, np.array([Evil(trap)], dtype=object), allow_pickle=True)
    return {
        "pickle": pickle.dumps(Evil(trap)),
        "torch": torchs.getvalue(),
        "numpy": numpys.getvalue(),
    }


@pytest.mark.parametrize("form", ["pickle", "torch", "numpy"])
def test_a_pickle_is_refused_wherever_it_is_offered(home: Path, tmp_path: Path, form: str) -> None:
    """Somebody's checkpoint, weights, images or text run code when they are opened."""
    trap = tmp_path / "trap"
    evil = evil_files(trap)[form]
    folder = tmp_path / "run"
    shutil.copytree(home / "run", folder)

    for name in ("best.safetensors", "config.json", "vocabulary.json", "metrics.jsonl"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(evil)
        with pytest.raises(RunError):
            runs.load(folder)
            Run(folder).latest()
        (folder / name).write_bytes(before)
    for number in ("00000001", "00000002"):
        for name in ("state.json", "tensors.safetensors"):
            (folder / "last" / number / name).write_bytes(evil)
    with pytest.raises(RunError, match="is damaged"):
        Run(folder).latest()
    with pytest.raises(RunError, match="is damaged"):
        runs.load(folder, weights="last")

    for pack in ("plain", "gz", "xz"):
        data = tmp_path / f"data-{pack}"
        data.mkdir()
        suffix = "" if pack == "plain" else f".{pack}"
        for file in DATASETS["mnist"].files:
            (data / f"{file.name}{suffix}").write_bytes(packed(evil, pack))
        with pytest.raises(DataError, match="train-images"):
            load_images(folder=data)
    (tmp_path / "text.txt").write_bytes(evil)
    with pytest.raises(DataError):
        load(tmp_path / "text.txt")

    corpus = load(home / "text.txt")
    entry = home / "cache" / "encoded" / corpus.digest
    shutil.rmtree(entry)
    entry.mkdir()
    for name in ("train.npy", "valid.npy", "test.npy", "entry.json"):
        (entry / name).write_bytes(evil)
    assert cache.load(corpus.digest) is None
    assert not trap.exists(), "code was run"
    pickle.loads(pickle.dumps(Evil(trap))).close()
    assert trap.exists(), "the trap does not work, and nothing above was tested"
