"""From a text to numbers: vocabularies, the split into three parts, and encoding.

The vocabulary is that of the training part. A word outside it becomes `<unk>`. Characters that
only the validation or test part has become one symbol, U+FFFD. The model never sees this symbol in
training, so it predicts such characters badly; they still count in the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np

from ..disk import fields_of
from .cache import Array
from .datasets import DataError

Unit: TypeAlias = Literal["char", "word"]

UNKNOWN = {"char": "\ufffd", "word": "<unk>"}
EOS = "<eos>"  # the end of a line, in a text of words
PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class Vocabulary:
    """The symbols of a corpus, characters or words. The number of a symbol is its index.

    >>> v = Vocabulary("word", ("<eos>", "<unk>", "a", "rose", "is"))
    >>> v.encode("a rose is\\nred"), v.decode([2, 3, 0, 4])
    (array([2, 3, 4, 0, 1], dtype=uint8), 'a rose\\nis')
    """

    unit: Unit
    symbols: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.symbols)

    @cached_property
    def number(self) -> dict[str, int]:
        """The number of each symbol."""
        return {symbol: number for number, symbol in enumerate(self.symbols)}

    @property
    def unknown(self) -> int | None:
        """The number of the symbol for everything outside the vocabulary; None without one."""
        return self.number.get(UNKNOWN[self.unit])

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16] | type[np.int32]:
        """The smallest integer type that holds all numbers."""
        return np.uint8 if len(self) <= 2**8 else np.uint16 if len(self) <= 2**16 else np.int32

    def encode(self, text: str) -> Array:
        """Return the numbers of a text.

        A symbol outside the vocabulary becomes the unknown symbol; without one, it is an error.
        """
        symbols = text if self.unit == "char" else split_words(text)
        numbers = [self.number.get(symbol, self.unknown) for symbol in symbols]
        if None in numbers:
            strange = sorted({symbol for symbol in symbols if symbol not in self.number})
            known = "".join(self.symbols) if self.unit == "char" else f"{len(self)} words"
            raise ValueError(
                f"there are symbols that the vocabulary has not: {strange[:10]}; it knows {known!r}"
            )
        return np.array(numbers, dtype=self.dtype)

    def strangers(self, numbers: Array) -> str:
        """Return a sentence with the number of unknown symbols in a text; "" if there are none."""
        count = 0 if self.unknown is None else int((numbers == self.unknown).sum())
        symbols = "characters" if self.unit == "char" else "words"
        return f"{count:,} of {len(numbers):,} {symbols} are unknown to the model" if count else ""

    def decode(self, numbers: Iterable[int]) -> str:
        """Return the text of numbers. Words are joined by spaces, and `<eos>` is a new line."""
        symbols = [self.symbols[int(number)] for number in numbers]
        return (
            "".join(symbols)
            if self.unit == "char"
            else re.sub(f" ?{EOS} ?", "\n", " ".join(symbols))
        )

    def to_json(self) -> str:
        """Return the vocabulary as JSON, to be stored with the weights of a model."""
        return json.dumps({"unit": self.unit, "symbols": self.symbols}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        """Read a vocabulary that `to_json` wrote."""
        try:
            page = fields_of(text)
            unit, symbols = page["unit"], page["symbols"]
        except (ValueError, KeyError, TypeError):
            raise ValueError('vocabulary: expected JSON with "unit" and "symbols"') from None
        good = isinstance(symbols, list) and all(isinstance(text, str) for text in (unit, *symbols))
        if not good or unit not in UNKNOWN or len(set(symbols)) != len(symbols) or not symbols:
            raise ValueError(
                'vocabulary: expected "unit" to be char or word and "symbols" to be a list of '
                "different strings"
            )
        return cls(unit, tuple(symbols))


def split_words(text: str) -> list[str]:
    """Split a text into words at white space. Each new line becomes the word `<eos>`."""
    return text.replace("\n", f" {EOS} ").split()


def cut(
    parts: Mapping[str, Any],
    *,
    limit: int | None = None,
    tail: int | None = None,
    name: str = "text",
) -> list[Any]:
    """Return the training, validation and test part of a text, or of any other sequence.

    `parts` has the whole text under the key "", or the parts by name. A part that is not given is
    cut from the end: 5 in 100 symbols, or `tail` symbols. `limit` keeps about `limit` symbols in
    total, the first ones of each piece.

    >>> cut({"": "x" * 90 + "v" * 5 + "t" * 5}, limit=None)[1:]
    ['vvvvv', 'ttttt']
    """
    total = sum(len(symbols) for symbols in parts.values())
    if limit is not None and limit < total:
        parts = {part: symbols[: len(symbols) * limit // total] for part, symbols in parts.items()}
    rest: Any = parts["" if "" in parts else "train"]
    share = len(rest) * 5 // 100 if tail is None else tail
    found: dict[str, Any] = {}
    for part in ("test", "valid"):  # from the end
        if part in parts:
            found[part] = parts[part]
        else:
            rest, found[part] = rest[: len(rest) - share], rest[len(rest) - share :]
    found["train"] = rest
    for part in PARTS:
        if len(found[part]) < 2:
            raise DataError(
                f"{name}: its {part} part has {len(found[part])} symbols, and at least 2 are "
                "needed (a text in one piece needs 40: it is split 90 / 5 / 5). Use a longer "
                f"text{' or a larger limit' if limit else ''}."
            )
    return [found[part] for part in PARTS]


def encode_characters(texts: Sequence[str]) -> tuple[Vocabulary, list[Array]]:
    """Return the vocabulary of the first text, sorted by code point, and all texts encoded."""
    seen = [
        np.unique(np.concatenate([np.unique(codes) for codes in _codes(text)])) for text in texts
    ]
    symbols = [chr(code) for code in seen[0]]
    strange = not np.isin(np.concatenate(seen), seen[0]).all()
    if strange and UNKNOWN["char"] not in symbols:
        symbols.append(UNKNOWN["char"])
    vocabulary = Vocabulary("char", tuple(symbols))
    table = np.full(
        max(int(codes[-1]) for codes in seen) + 1, vocabulary.unknown or 0, dtype=vocabulary.dtype
    )
    table[seen[0]] = np.arange(len(seen[0]))
    return vocabulary, [np.concatenate([table[codes] for codes in _codes(text)]) for text in texts]


def _codes(text: str) -> Iterator[Array]:
    """Yield the code points of a text, 2**22 (about 4 million) at a time."""
    for start in range(0, len(text), 2**22):
        yield np.frombuffer(text[start : start + 2**22].encode("utf-32-le"), dtype="<u4")


def number_words(texts: Mapping[str, str]) -> tuple[dict[str, Array], list[str]]:
    """Return each text as word numbers, and the words in the order of their first appearance."""
    number: dict[str, int] = {}
    out = {
        part: np.concatenate([np.zeros(0, np.int32), *_numbers(text, number)])
        for part, text in texts.items()
    }
    return out, list(number)


def _numbers(text: str, number: dict[str, int]) -> Iterator[Array]:
    # A million characters at a time: a list of all words needs many times the memory of the text.
    space, start = re.compile(r"\s"), 0
    while start < len(text):
        found = space.search(text, start + 2**20)
        stop = found.start() if found else len(text)
        words = split_words(text[start:stop])
        yield np.array([number.setdefault(word, len(number)) for word in words], dtype=np.int32)
        start = stop


def encode_words(
    numbers: Sequence[Array], spelled: Sequence[str], most: int | None
) -> tuple[Vocabulary, list[Array]]:
    """Return the vocabulary of the first text, and all texts encoded.

    The vocabulary has at most `most` words, the most frequent first. `<unk>` is always one of
    them, so that other texts can be encoded later.
    """
    counts = np.bincount(numbers[0], minlength=len(spelled))
    common = sorted(
        np.flatnonzero(counts).tolist(), key=lambda word: (-counts[word], spelled[word])
    )[:most]
    unknown = UNKNOWN["word"]
    if unknown not in (symbols := [spelled[word] for word in common]):
        common = common[: None if most is None else most - 1]
        symbols = [*symbols[: len(common)], unknown]
    vocabulary = Vocabulary("word", tuple(symbols))
    table = np.full(len(spelled), vocabulary.number[unknown], dtype=vocabulary.dtype)
    table[common] = np.arange(len(common))
    return vocabulary, [table[text] for text in numbers]
