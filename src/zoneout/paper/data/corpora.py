"""Corpora: the paper's texts and images, and the user's text files, as arrays of small integers.

`load` and `load_images` find the files (see `files`), check them, encode them once and store the
result in the cache.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from . import cache, datasets
from .cache import Array
from .datasets import CUT, DATASETS, DataError, File, PathLike
from .text import PARTS, Unit, Vocabulary, cut, encode_characters, encode_words, number_words

Order: TypeAlias = Literal["paper", "permuted", "rows"]

_FORMAT = 1  # format of cache entries; a new number makes all old entries invalid


@dataclass(frozen=True)
class Corpus:
    """An encoded text: a vocabulary, and three parts as arrays of numbers (1-D, memory-mapped)."""

    name: str
    unit: Unit
    vocabulary: Vocabulary
    train: Array
    valid: Array
    test: Array
    digest: str
    """Hash of the source files and of the preparation: equal digests mean equal numbers."""


@dataclass(frozen=True)
class Images:
    """MNIST as sequences: for each part the pixels uint8 [N, 784] and the labels uint8 [N].

    The pixels of an image are in the order `order`.
    """

    order: Order
    train: tuple[Array, Array]
    valid: tuple[Array, Array]
    test: tuple[Array, Array]
    digest: str


def load(
    name: PathLike = "python",
    *,
    folder: PathLike | None = None,
    by: Unit = "char",
    preparation: Literal["paper", "stripped"] = "paper",
    valid: PathLike | None = None,
    test: PathLike | None = None,
    limit: int | None = None,
    words: int | None = None,
) -> Corpus:
    """Load a text as characters or words.

    `name` is a corpus (`zoneout data list` shows the names) or the path of a UTF-8 text file.
    `folder` is searched first: for the files of the corpus, or for a text file with the same name.

    A text in one file is split 90 / 5 / 5 into training, validation and test part. In text8-prefix
    the last two parts have 5,000,000 characters each. For a text file of the user, `valid` and
    `test` name separate files for these parts.

    `preparation` applies only to char-ptb: "paper" keeps one of the two spaces around each line, as
    in the paper's files; "stripped" removes both. `limit` uses only about that many symbols in
    total: the first of the text, or of each part in proportion. `words` is the size of the
    vocabulary: only the most frequent words are kept, and all others become `<unk>`.

    >>> corpus = load("python", limit=40_000)
    >>> len(corpus.train), len(corpus.valid), len(corpus.test), corpus.train.dtype
    (36000, 2000, 2000, dtype('uint8'))
    """
    name = os.fspath(name)
    _one_of("by", by, ("char", "word"))
    _one_of("preparation", preparation, ("paper", "stripped"))
    for argument, value in (("limit", limit), ("words", words)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ValueError(f"{argument}: expected a whole number above 0, or None, got {value!r}")
    if name in DATASETS and (valid or test):
        raise ValueError(
            f"valid, test: {name} has parts of its own; use these options only with a text file"
        )
    unit: Unit = CUT.get(name, by)
    if words is not None and unit == "char":
        raise ValueError(
            "words: a text in characters has no words; use by='word' to read the text as words"
        )
    sources = _sources(name, folder, valid, test)
    prepared = preparation if name == "char-ptb" else None
    tail = 5_000_000 if name == "text8-prefix" and limit is None else None
    how = [_FORMAT, unit, limit, words, prepared, tail, [source.part for source in sources]]

    def make(contents: Sequence[bytes]) -> tuple[dict[str, Array], Any]:
        texts = {source.part: _decode(data, source) for source, data in zip(sources, contents)}
        if prepared:
            texts = {part: _ptb_characters(text, prepared) for part, text in texts.items()}
        if unit == "char":
            vocabulary, arrays = encode_characters(cut(texts, limit=limit, tail=tail, name=name))
        else:
            numbers, spelled = number_words(texts)
            vocabulary, arrays = encode_words(
                cut(numbers, limit=limit, tail=tail, name=name), spelled, words
            )
        return dict(zip(PARTS, arrays)), vocabulary.to_json()

    arrays, notes, digest = _cached(how, sources, make)
    label = name if name in DATASETS else Path(name).name
    vocabulary = Vocabulary.from_json(notes)
    return Corpus(label, unit, vocabulary, arrays["train"], arrays["valid"], arrays["test"], digest)


def load_images(order: Order = "paper", *, folder: PathLike | None = None) -> Images:
    """Load MNIST, one pixel per time step.

    The training part is the first 50,000 training images, the validation part is the last 10,000.
    The test part is all test images.
    """
    _one_of("order", order, ("paper", "permuted", "rows"))
    sources = [Source("", *datasets.locate(file, folder), file) for file in DATASETS["mnist"].files]

    def make(contents: Sequence[bytes]) -> tuple[dict[str, Array], Any]:
        images, labels, test_images, test_labels = map(_idx, contents)
        images, test_images = (
            np.take(a.reshape(-1, 784), pixel_order(order), axis=1) for a in (images, test_images)
        )
        arrays = {"train": images[:50_000], "train-labels": labels[:50_000]}
        arrays |= {"valid": images[50_000:], "valid-labels": labels[50_000:]}
        return arrays | {"test": test_images, "test-labels": test_labels}, None

    arrays, _, digest = _cached([_FORMAT, order], sources, make)
    train, valid, test = ((arrays[part], arrays[f"{part}-labels"]) for part in PARTS)
    return Images(order, train, valid, test, digest)


def pixel_order(order: Order) -> Array:
    """Return the number of the pixel (0 to 783) that each time step reads.

    "paper" is the authors' draw **with** replacement, which is needed to reproduce their results:
    it has 501 different pixels, some of them repeated. "permuted" is a permutation of all pixels.
    "rows" reads the image row by row.

    >>> pixel_order("paper")[:5], len(set(pixel_order("paper"))), len(set(pixel_order("permuted")))
    (array([ 37, 235,  72, 767, 715]), 501, 784)
    """
    legacy = np.random.RandomState(1)  # the authors' generator; NumPy guarantees its numbers
    if order == "paper":
        return legacy.randint(0, 784, 784)
    return legacy.permutation(784) if order == "permuted" else np.arange(784)


@dataclass(frozen=True)
class Source:
    """A part of a corpus ("" if the text is not divided into parts) and its file."""

    part: str
    path: Path | None = None  # None: the text that comes with Python
    there: File | None = None  # the table's entry for the file at `path`
    file: File | None = None  # the table's entry for the wanted file: the same, or its beginning

    def known_digest(self) -> str | None:
        """Return the digest of the contents if it is known without reading them, otherwise None."""
        known = cache.recall(self.path) if self.path else None
        if self.file is None or self.there is None:
            return known
        return self.file.digest if known == self.there.digest else None

    def read(self) -> tuple[bytes, str]:
        """Return the contents, decompressed and checked, and their digest."""
        if self.path is None:
            data = _python_text().encode()
            return data, hashlib.sha256(data).hexdigest()
        data = datasets.read(self.path, self.there)
        if self.file is None or self.there is None:
            digest = hashlib.sha256(data).hexdigest()
            cache.remember(self.path, digest)
            return data, digest
        cache.remember(self.path, self.there.digest)
        return data[: self.file.size], self.file.digest


def _sources(
    name: str, folder: PathLike | None, valid: PathLike | None, test: PathLike | None
) -> list[Source]:
    if name == "mnist":
        raise ValueError("name: mnist is not a text; load_images loads it")
    if name == "python":
        return [Source("")]
    if name in DATASETS:
        wanted = DATASETS[name].files
        parts = PARTS if len(wanted) == 3 else ("",)
        return [
            Source(part, *datasets.locate(file, folder), file) for part, file in zip(parts, wanted)
        ]
    named = {"train" if valid or test else "": name, "valid": valid, "test": test}
    given = {part: path for part, path in named.items() if path}
    found = {part: _text_file(path, folder) for part, path in given.items()}
    check_apart(given.values(), found.values())
    return [Source(part, path) for part, path in found.items()]


def text_path(path: PathLike, folder: PathLike | None = None) -> Path:
    """Return the path of a user's text file.

    If `folder` contains a file with the same name, that file is used instead of `path`. Exception:
    if `path` includes a folder and the file exists there, `path` is used.
    """
    own = datasets.expanded(path)
    inside = None if folder is None else datasets.expanded(folder) / own.name
    if inside is None or not inside.is_file() or (own.parent != Path() and own.is_file()):
        return own
    return inside


def check_apart(given: Iterable[PathLike], found: Iterable[PathLike]) -> None:
    """Raise if two different names were resolved to the same file.

    Otherwise a model could be tested on its training text.
    """
    named: dict[Path, Path] = {}
    for name, path in zip(map(Path, given), map(Path, found)):
        if (other := named.setdefault(path, name)) != name:
            raise DataError(
                f"{other} and {name} are both taken for {path}, the only file of that name in the "
                "folder of --data"
            )


def absolute_path(name: str, folder: PathLike | None = None) -> str:
    """Return the absolute path of a text file; return the name of a corpus unchanged."""
    found = text_path(name, folder)
    return str(found.absolute()) if name not in DATASETS and found.exists() else name


def _text_file(path: PathLike, folder: PathLike | None) -> Path:
    found = text_path(path, folder)
    if found.is_file():
        return found
    if found.is_dir():
        raise DataError(
            f"{found} is a folder; expected a text file, or one of {', '.join(DATASETS)}"
        )
    if found.exists():
        raise DataError(
            f"{found} is a pipe or a device; expected a text file, or one of {', '.join(DATASETS)}"
        )
    hint = datasets.nearest(os.fspath(path))
    inside = f", nor a file of this name in {folder}" if folder else ""
    raise datasets.MissingError(
        f"{path}: there is no such file{inside}, nor a corpus of this name; {hint}"
    )


def _cached(
    how: Sequence[Any],
    sources: Sequence[Source],
    make: Callable[[Sequence[bytes]], tuple[dict[str, Array], Any]],
) -> tuple[dict[str, Array], Any, str]:
    """Return the arrays and notes that `make` returns for the sources' contents, and their digest.

    If the cache has them, `make` is not called.
    """
    known = [source.known_digest() for source in sources]
    if None not in known and (kept := cache.load(key := cache.key_of(how, known))):
        return *kept, key
    contents, digests = zip(*(source.read() for source in sources))
    key = cache.key_of(how, digests)
    if kept := cache.load(key):
        return *kept, key
    arrays, notes = make(contents)
    cache.save(key, arrays, notes)
    return *(cache.load(key) or (arrays, notes)), key


def _python_text() -> str:
    """Return Python's help texts (`pydoc_data`), which differ slightly between Python versions."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "this Python comes without pydoc_data; give a text file instead, with --data"
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(path: PathLike, vocabulary: Vocabulary) -> Array:
    """Read a user's text file and encode it with a vocabulary.

    The file can be compressed. Line ends are converted to "\\n", as in `load`.
    """
    file = datasets.expanded(path)
    text = _decode(datasets.read(file), Source("", file))
    try:
        numbers = vocabulary.encode(text)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    if len(numbers) < 2:
        raise DataError(f"{path}: expected a text of at least 2 symbols, got {len(numbers)}")
    return numbers


def _decode(data: bytes, source: Source) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        guess = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "ISO-8859-1"
        raise DataError(
            f"{source.path}: byte {error.start:,} (0x{data[error.start]:02x}, line {line:,}) is "
            f"not UTF-8. Expected a text in UTF-8; if the file is {guess}, for example, `iconv -f "
            f"{guess} -t UTF-8` converts it."
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _ptb_characters(text: str, preparation: str) -> str:
    # Every line of the files is " words \n". The lines of the paper's files had one of the two
    # spaces. It does not matter which one: either way each newline comes with exactly one space.
    return re.sub("^ | $" if preparation == "stripped" else "^ ", "", text, flags=re.MULTILINE)


def _idx(data: bytes) -> Array:
    """Parse an array of bytes in the IDX format of MNIST.

    The header has two zero bytes, the data type, the number of dimensions and the dimensions.
    """
    dimensions = data[3]
    shape = np.frombuffer(data, ">i4", dimensions, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()


def _one_of(argument: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{argument}: expected {' or '.join(known)}, got {value!r}")
