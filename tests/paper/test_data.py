"""Corpora: what is loaded, how it is encoded, and what the cache does with it."""

import gzip
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoneout.paper.data import cache, corpora, datasets, text
from zoneout.paper.data.corpora import load, load_images
from zoneout.paper.data.datasets import DATASETS, DataError, MissingError
from zoneout.paper.data.text import PARTS, Vocabulary

REAL = os.environ.get("ZONEOUT_DATA")
WORDS = ["a", "rose", "is", "red", "<unk>", "thé", "N"]
quick = settings(deadline=None, max_examples=60, derandomize=True)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Nothing of the person who runs the tests is read or written."""
    monkeypatch.setenv("ZONEOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ZONEOUT_DATA", raising=False)


@pytest.fixture
def real(request):
    """The folder with the real corpora."""
    if REAL is None:
        pytest.skip("ZONEOUT_DATA names no folder with the real corpora")
    return Path(REAL)


def write(path, content, *, age=1000):
    """A file as it would lie there: written some time ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns - age * 10**9))
    return path


def sizes(corpus):
    return tuple(len(getattr(corpus, part)) for part in PARTS)


def parts(corpus):
    return [corpus.vocabulary.decode(getattr(corpus, part)) for part in PARTS]


@pytest.fixture
def makes(monkeypatch):
    """How often something is really encoded."""
    count = []
    for name in ("encode_characters", "encode_words"):
        real = getattr(corpora, name)
        monkeypatch.setattr(corpora, name, lambda *args, real=real: count.append(1) or real(*args))
    return count


# What the paper's corpora must look like


@pytest.mark.parametrize(
    ("name", "preparation", "expected", "symbols"),
    [
        ("word-ptb", "paper", (929_589, 73_760, 82_430), 10_000),
        ("char-ptb", "paper", (5_059_550, 396_412, 446_184), 50),
        ("char-ptb", "stripped", (5_017_482, 393_042, 442_423), 50),
    ],
)
def test_penn_treebank(real, name, preparation, expected, symbols):
    """If this fails, figures on the Penn Treebank are of another text than the paper's."""
    corpus = need(lambda: load(name, folder=real, preparation=preparation))
    assert sizes(corpus) == expected
    assert len(corpus.vocabulary) == symbols
    assert max(int(getattr(corpus, part).max()) for part in PARTS) == symbols - 1
    if name == "word-ptb":
        assert corpus.vocabulary.symbols[:3] == ("the", "<unk>", "<eos>")
        assert corpus.train.dtype == np.uint16
        assert np.count_nonzero(corpus.train == 2) == 42_068  # one a line
    else:
        start = corpus.vocabulary.decode(corpus.train[300:420])
        line = "pierre <unk> N years old will join the board as a nonexecutive director nov. N"
        assert (line + (" \n" if preparation == "paper" else "\n")) in corpus.vocabulary.decode(
            corpus.train[:500]
        ), start
        assert corpus.train.dtype == np.uint8


def test_text8_prefix(real):
    """If this fails, text8-prefix is not split as its name promises, or is called text8."""
    corpus = need(lambda: load("text8-prefix", folder=real))
    assert corpus.name == "text8-prefix"
    assert sizes(corpus) == (64_090_640, 5_000_000, 5_000_000)
    assert "".join(corpus.vocabulary.symbols) == " abcdefghijklmnopqrstuvwxyz"
    assert corpus.vocabulary.decode(corpus.train[:40]) == " anarchism originated as a term of abuse"
    with pytest.raises(MissingError, match="zoneout data fetch text8"):
        load("text8", folder=real)


def test_shakespeare(real):
    """If this fails, the small corpus for quick trials is another."""
    corpus = need(lambda: load("shakespeare", folder=real))
    assert sizes(corpus) == (1_003_856, 55_769, 55_769)
    assert len(corpus.vocabulary) == 65
    assert corpus.vocabulary.decode(corpus.train[:14]) == "First Citizen:"


@pytest.mark.parametrize("order", ["paper", "permuted", "rows"])
def test_mnist(real, order):
    """If this fails, the images are split, ordered or labelled otherwise than the paper's."""
    images = need(lambda: load_images(order, folder=real))
    assert [
        (p.shape, p.dtype, l.shape, l.dtype) for p, l in (images.train, images.valid, images.test)
    ] == [((n, 784), np.uint8, (n,), np.uint8) for n in (50_000, 10_000, 10_000)]
    raw = gzip.decompress((real / "mnist" / "train-images-idx3-ubyte.gz").read_bytes())
    pixels = np.frombuffer(raw, np.uint8, offset=16).reshape(60_000, 784)
    places = corpora.pixel_order(order)
    for step in (0, 17, 783):
        np.testing.assert_array_equal(images.train[0][:100, step], pixels[:100, places[step]])
        np.testing.assert_array_equal(images.valid[0][-100:, step], pixels[-100:, places[step]])
    assert images.train[1][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert images.test[1][:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]


def need(call):
    try:
        return call()
    except MissingError as error:
        pytest.skip(f"ZONEOUT_DATA has not all the corpora: {error}")


def test_the_papers_order_of_pixels():
    """If this fails, the permuted task is not the one whose figures the paper shows."""
    order = corpora.pixel_order("paper")
    assert order[:5].tolist() == [37, 235, 72, 767, 715]
    assert len(set(order.tolist())) == 501
    assert (
        sorted(corpora.pixel_order("permuted").tolist())
        == corpora.pixel_order("rows").tolist()
        == list(range(784))
    )
    assert corpora.pixel_order("permuted").tolist() != list(range(784))


# The same on files that the tests make, so that they hold where the corpora are not


@pytest.fixture
def small_table(monkeypatch, tmp_path):
    """A data folder whose files are small, and a table that says so."""

    def lay(name, contents):
        made = []
        for old, content in zip(DATASETS[name].files, contents):
            write(tmp_path / "data" / old.path, content)
            checked = datasets.hashlib.sha256(content).hexdigest()
            made.append(datasets.File(old.path, len(content), checked))
        monkeypatch.setitem(DATASETS, name, datasets.Dataset(name, "", tuple(made)))
        return tmp_path / "data"

    return lay


def test_both_preparations_of_characters(small_table):
    """If this fails, the padding spaces of the Penn Treebank's lines are treated otherwise than
    described.
    """
    lines = b" no it was n't \n black <unk> monday \n"
    folder = small_table("char-ptb", [lines, lines, b" no \n"])
    paper, stripped = (
        load("char-ptb", folder=folder),
        load("char-ptb", folder=folder, preparation="stripped"),
    )
    assert parts(paper) == ["no it was n't \nblack <unk> monday \n"] * 2 + ["no \n"]
    assert parts(stripped) == ["no it was n't\nblack <unk> monday\n"] * 2 + ["no\n"]
    assert paper.digest != stripped.digest


def test_words_with_ends_of_lines(small_table):
    """If this fails, word-ptb has not one <eos> a line, or its words are not numbered by
    frequency.
    """
    folder = small_table("word-ptb", [b" a rose is a rose \n a N \n", b" a \n", b" is \n"])
    corpus = load("word-ptb", folder=folder, by="char")  # word-ptb is words, whatever `by` says
    assert corpus.unit == "word"
    assert corpus.vocabulary.symbols == ("a", "<eos>", "rose", "N", "is", "<unk>")
    assert corpus.train.tolist() == [0, 2, 4, 0, 2, 1, 0, 3, 1]
    assert corpus.valid.tolist() == [0, 1] and corpus.test.tolist() == [4, 1]


def test_images_of_a_small_set(small_table):
    """If this fails, the idx format is misread, or the cache gives back another array than was
    made.
    """

    def idx(array):
        return (
            bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()
        )

    rng = np.random.default_rng(0)
    train, test = (rng.integers(0, 256, (n, 28, 28), dtype=np.uint8) for n in (50_002, 3))
    labels, test_labels = (rng.integers(0, 10, n, dtype=np.uint8) for n in (50_002, 3))
    folder = small_table("mnist", [idx(array) for array in (train, labels, test, test_labels)])
    for _ in range(2):
        images = load_images("paper", folder=folder)
        np.testing.assert_array_equal(
            images.valid[0], train[50_000:].reshape(2, 784)[:, corpora.pixel_order("paper")]
        )
        np.testing.assert_array_equal(images.valid[1], labels[50_000:])
        np.testing.assert_array_equal(images.test[1], test_labels)
        assert isinstance(images.train[0], np.memmap)  # the second time, and the first
        assert (
            torch.from_numpy(images.test[1]).tolist() == test_labels.tolist()
        )  # without a warning
    assert load_images("rows", folder=folder).test[0].tolist() == test.reshape(3, 784).tolist()
    assert load_images("rows", folder=folder).digest != images.digest


def test_the_prefix_of_text8_comes_out_of_text8(monkeypatch, tmp_path):
    """If this fails, who has the whole text8 cannot run the text8-prefix task, or gets another
    digest for it.
    """
    whole = b"abcdefghij" * 30
    start = (200, datasets.hashlib.sha256(whole[:200]).hexdigest())
    text8 = datasets.File("text8/text8", 300, crc32=datasets.zlib.crc32(whole), start=start)
    prefix = datasets.File("text8/prefix", *start, part_of=text8)
    monkeypatch.setitem(DATASETS, "text8", datasets.Dataset("text8", "", (text8,)))
    monkeypatch.setitem(DATASETS, "text8-prefix", datasets.Dataset("text8-prefix", "", (prefix,)))
    with zipfile.ZipFile(write(tmp_path / "whole" / "text8.zip", b""), "w") as archive:
        archive.writestr("text8", whole)
    write(tmp_path / "part" / "prefix", whole[:200])
    os.utime(tmp_path / "whole" / "text8.zip", ns=(0, 0))
    assert sizes(load("text8", folder=tmp_path / "whole")) == (270, 15, 15)
    some = [
        load("text8-prefix", folder=tmp_path / where, limit=150)
        for where in ("whole", "part", "whole")
    ]
    assert [sizes(corpus) for corpus in some] == [(136, 7, 7)] * 3
    assert len({corpus.digest for corpus in some}) == 1


def test_a_damaged_corpus_is_refused(small_table):
    """If this fails, a file that changed after it was first read is used unchecked."""
    folder = small_table("shakespeare", [b"First Citizen: " * 20])
    path = folder / DATASETS["shakespeare"].files[0].path
    before = load("shakespeare", folder=folder)
    write(path, b"First Citizen; " * 20, age=500)
    with pytest.raises(DataError, match=r"tinyshakespeare\.txt is not .* its sha256 is"):
        load("shakespeare", folder=folder)
    write(path, b"First Citizen: " * 20, age=200)
    assert load("shakespeare", folder=folder).digest == before.digest


def test_python_text():
    """If this fails, the default that needs no download is not there, or is not a text."""
    corpus = load()
    assert corpus.name == "python"
    assert len(corpus.train) > 100_000
    assert "expression" in corpus.vocabulary.decode(corpus.train[:20_000])
    small = load("python", limit=40_000)
    assert sizes(small) == (36_000, 2_000, 2_000)
    assert parts(small)[0] == parts(corpus)[0][:36_000]


# Texts of the user's

UTF8 = st.text(
    st.characters(codec="utf-8", exclude_characters="\r\ufeff"), min_size=40, max_size=300
)


@quick
@given(UTF8)
def test_characters_of_any_text(tmp_path_factory, content):
    """If this fails, a text does not come back out of its numbers, or is not cut 90 / 5 / 5."""
    path = write(tmp_path_factory.mktemp("text") / "my.txt", content)
    corpus = load(path)
    n = len(content)
    assert sizes(corpus) == (n - 2 * (n * 5 // 100), n * 5 // 100, n * 5 // 100)
    train, valid, test = parts(corpus)
    assert train == content[: len(train)]
    known = set(train)
    expected = "".join(c if c in known else "\ufffd" for c in content[len(train) :])
    assert valid + test == expected
    assert corpus.vocabulary.symbols[: len(known)] == tuple(sorted(known))
    assert len(corpus.vocabulary) - len(known) == (
        expected != content[len(train) :] and "\ufffd" not in known
    )


@quick
@given(
    st.lists(st.sampled_from([*WORDS, "\n"]), min_size=40, max_size=200),
    st.none() | st.integers(1, 5),
)
def test_words_of_any_text(tmp_path_factory, content, most):
    """If this fails, a text of words does not come back, or other words than the rare ones
    become <unk>.
    """
    path = write(tmp_path_factory.mktemp("text") / "my.txt", " ".join(content))
    corpus = load(path, by="word", words=most)
    said = ["<eos>" if word == "\n" else word for word in content]
    train = said[: len(corpus.train)]
    counts = {word: train.count(word) for word in train}
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    if "<unk>" not in (kept := ranked[:most]):
        kept = [*ranked[: None if most is None else most - 1], "<unk>"]
    assert corpus.vocabulary.symbols == tuple(kept)
    numbers = np.concatenate([getattr(corpus, part) for part in PARTS])
    assert [kept[n] for n in numbers] == [word if word in kept else "<unk>" for word in said]


def test_long_texts_are_read_in_pieces():
    """If this fails, a word or character at the seam of two pieces is lost or cut in two."""
    words = [f"w{n % 700}" for n in range(400_000)]
    for space in (" ", "\n"):
        content = space.join(words)
        assert len(content) > 2**20
        numbers, spelled = text.number_words({"": content})
        assert [spelled[n] for n in numbers[""]] == text.split_words(content)
    long = "añ漢🙂" * (2**21 // 2) + "ab"
    assert len(long) > 2**22
    vocabulary, (codes,) = text.encode_characters([long])
    assert vocabulary.decode(codes[-5:]) == long[-5:]
    np.testing.assert_array_equal(codes[: 4 * 10**5].reshape(-1, 4), np.tile(codes[:4], (10**5, 1)))
    assert len(codes) == len(long)


@pytest.mark.parametrize("given", ["valid", "test", "both"])
def test_parts_of_the_users_own(tmp_path, given):
    """If this fails, a validation or test file that was named is not the one that is used."""
    train = write(tmp_path / "train.txt", "abcde" * 20)
    own = {
        part: write(tmp_path / f"{part}.txt", f"{part}ing aa")
        for part in ("valid", "test")
        if given in (part, "both")
    }
    corpus = load(train, **own)
    rest = 100
    for part in ("test", "valid"):
        got = corpus.vocabulary.decode(getattr(corpus, part))
        if part in own:
            assert got == re.sub("[^abcde]", "\ufffd", f"{part}ing aa")
        else:
            rest -= 5
            assert got == "abcde"
    assert len(corpus.train) == rest


def test_files_of_one_name_in_different_folders(tmp_path):
    """With a folder to look in, validation and test become the training text, and nobody is
    told.
    """
    for part in ("train", "valid", "test", "moved"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "text.txt").write_text(
            f"the text to {part} with, of dilemmas and void\n" * 20
        )
    paths = {part: tmp_path / part / "text.txt" for part in ("valid", "test")}
    corpus = load("text.txt", folder=tmp_path / "train", **paths)
    for part in ("train", "valid", "test"):
        assert corpus.vocabulary.decode(getattr(corpus, part)).startswith(f"the text to {part}")
    for path in paths.values():
        path.unlink()
    with pytest.raises(DataError, match=r"valid.text\.txt are both taken for .*train.text\.txt"):
        load("text.txt", folder=tmp_path / "train", **paths)


def test_a_limit_over_parts_in_files(tmp_path):
    """If this fails, a small trial on a corpus with parts of its own does not shrink them in
    proportion.
    """
    corpus = load(
        write(tmp_path / "a", "ab" * 400),
        valid=write(tmp_path / "b", "a" * 100),
        test=write(tmp_path / "c", "b" * 100),
        limit=100,
    )
    assert sizes(corpus) == (80, 10, 10)


@pytest.mark.parametrize("kind", ["bom", "dos", "mac", "gz"])
def test_forms_of_a_text_file(tmp_path, kind):
    """If this fails, a file from another system has symbols that nobody wrote, or a packed one
    is read as it lies.
    """
    content = "one line\nanother line\n" * 5
    raw = {
        "bom": b"\xef\xbb\xbf" + content.encode(),
        "dos": content.replace("\n", "\r\n").encode(),
        "mac": content.replace("\n", "\r").encode(),
        "gz": gzip.compress(content.encode()),
    }[kind]
    assert "".join(parts(load(write(tmp_path / "my.txt", raw)))) == content


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            "first line\nça va".encode("latin-1") * 9,
            r"my\.txt: byte 11 \(0xe7, line 2\) is not UTF-8.*iconv -f ISO-8859-1",
        ),
        ("a text".encode("utf-16") * 9, r"byte 0 \(0xff, line 1\) is not UTF-8.*iconv -f UTF-16"),
        (b"", "its train part has 0 symbols"),
        (b"short", "its valid part has 0 symbols, and at least 2 are needed"),
    ],
)
def test_texts_that_cannot_be_used(tmp_path, content, says):
    """If this fails, a file that is no UTF-8 text, or too short, gives numbers or a traceback
    instead of a sentence.
    """
    with pytest.raises(DataError, match=says):
        load(write(tmp_path / "my.txt", content))


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (
            {"name": "charptb"},
            MissingError,
            "no such file, nor a corpus of this name; did you mean char-ptb",
        ),
        ({"name": "zzz"}, MissingError, "the names known are python, char-ptb"),
        ({"name": "."}, DataError, "is a folder; expected a text file"),
        ({"name": "mnist"}, ValueError, "mnist is not a text; load_images"),
        ({"name": "char-ptb"}, MissingError, "zoneout data fetch char-ptb"),
        ({"by": "letter"}, ValueError, "by: expected char or word, got 'letter'"),
        ({"preparation": "raw"}, ValueError, "preparation: expected paper or stripped, got 'raw'"),
        ({"limit": 0}, ValueError, "limit: expected a whole number above 0, or None, got 0"),
        ({"limit": 39}, DataError, "valid part has 1 symbols.*or a larger limit"),
        ({"words": 5}, ValueError, "words: a text in characters has no words"),
        ({"valid": "x"}, ValueError, "valid, test: python has parts of its own"),
    ],
)
def test_arguments_that_cannot_be(arguments, error, says):
    """If this fails, a slip of the pen goes through or its error does not help."""
    with pytest.raises(error, match=says):
        load(**arguments)


def test_wrong_order_of_images():
    """If this fails, a misspelt order of pixels falls back to some other order."""
    with pytest.raises(ValueError, match="order: expected paper or permuted or rows, got 'random'"):
        load_images("random")


# Vocabularies


@quick
@given(st.lists(st.sampled_from(["a", "b", "<eos>", "<unk>"]), max_size=30))
def test_words_come_back(said):
    """If this fails, a sampled text does not read as the numbers that were sampled."""
    vocabulary = Vocabulary("word", ("b", "<eos>", "a", "<unk>"))
    numbers = [vocabulary.number[word] for word in said]
    assert vocabulary.encode(vocabulary.decode(numbers)).tolist() == numbers


def test_unknown_symbols():
    """If this fails, a prompt with strange symbols is quietly changed, or refused though there
    is an unknown symbol.
    """
    with pytest.raises(
        ValueError, match=r"symbols that the vocabulary has not: \['q', 'ß'\]; it knows 'ab'"
    ):
        Vocabulary("char", ("a", "b")).encode("aqßq")
    assert Vocabulary("char", ("a", "\ufffd")).encode("aqa").tolist() == [0, 1, 0]
    assert Vocabulary("word", ("<unk>", "a")).encode("a rose").tolist() == [1, 0]


@quick
@given(
    st.sampled_from(["char", "word"]),
    st.lists(st.text(st.characters(codec="utf-8")), min_size=1, unique=True),
)
def test_vocabularies_as_json(unit, symbols):
    """If this fails, a model's own copy of its vocabulary is not the one that it was trained
    with.
    """
    vocabulary = Vocabulary(unit, tuple(symbols))
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary


@pytest.mark.parametrize(
    "page",
    [
        "",
        "[]",
        "{}",
        '{"unit": "char"}',
        '{"unit": "byte", "symbols": ["a"]}',
        '{"unit": "char", "symbols": "ab"}',
        '{"unit": "char", "symbols": ["a", "a"]}',
        '{"unit": "char", "symbols": [1]}',
        '{"unit": "char", "symbols": []}',
    ],
)
def test_json_that_is_no_vocabulary(page):
    """If this fails, a damaged vocabulary is taken, and every number means another symbol."""
    with pytest.raises(ValueError, match="vocabulary: expected"):
        Vocabulary.from_json(page)


@pytest.mark.parametrize(
    ("count", "dtype"), [(256, np.uint8), (257, np.uint16), (65_536, np.uint16), (65_537, np.int32)]
)
def test_the_smallest_integers_that_hold_all(count, dtype):
    """If this fails, numbers wrap around, or take more room than they need."""
    vocabulary, (numbers,) = text.encode_characters(
        ["".join(map(chr, range(0x10000, 0x10000 + count)))]
    )
    assert numbers.dtype == vocabulary.dtype == dtype
    assert numbers.tolist() == list(range(count))


# The cache


def test_the_second_start_reads_nothing(tmp_path, makes, monkeypatch):
    """If this fails, every start reads or encodes the text anew."""
    path = write(tmp_path / "my.txt", "some text " * 50)
    first = load(path)
    monkeypatch.setattr(datasets, "read", lambda *args: pytest.fail("the file was read again"))
    second = load(path)
    assert len(makes) == 1
    assert isinstance(second.train, np.memmap) and second.train.filename
    assert (
        parts(second) == parts(first)
        and second.digest == first.digest
        and second.vocabulary == first.vocabulary
    )


def test_what_is_done_to_the_numbers_stays_here(tmp_path, makes):
    """If this fails, a program that writes into its corpus changes everybody's, or torch warns
    of read-only memory.
    """
    path = write(tmp_path / "my.txt", "some text " * 50)
    tokens = torch.from_numpy(load(path).train)
    tokens.zero_()
    assert load(path).train.any()
    assert len(makes) == 1


def test_everything_that_matters_is_in_the_key(tmp_path, makes):
    """If this fails, one preparation of a text is given out for another."""
    path, other = (
        write(tmp_path / "my.txt", "one two\n" * 50),
        write(tmp_path / "other.txt", "two one\n" * 50),
    )
    ways = [
        {},
        {"by": "word"},
        {"limit": 200},
        {"by": "word", "words": 2},
        {"valid": other},
        {"test": other},
    ]
    digests = {load(path, **way).digest for way in ways} | {load(other).digest}
    assert len(digests) == len(makes) == 7
    packed = write(tmp_path / "packed.gz", gzip.compress(path.read_bytes()))
    assert load(packed).digest == load(path).digest  # the same text, however it lies there


@pytest.mark.parametrize("age", [1000, 0])
def test_a_changed_text_is_encoded_anew(tmp_path, age):
    """If this fails, a text is used as it was before it was edited, if only when edited at once
    to the same size.
    """
    path = write(tmp_path / "my.txt", "some text " * 50, age=age)
    assert parts(load(path))[0].startswith("some text")
    stamp = path.stat()
    write(path, "xome text " * 50, age=age)
    os.utime(
        path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns)
    )  # as `rsync --times` and `touch -r` do
    assert parts(load(path))[0].startswith("xome text")


@pytest.mark.parametrize(
    "harm", ["flip", "cut", "empty", "gone", "page", "json", "symbols", "pickle"]
)
def test_a_damaged_entry_is_made_again(tmp_path, makes, harm):
    """If this fails, a damaged cache is trained on, or stays damaged, or is in the way for ever."""
    path = write(tmp_path / "my.txt", "some text " * 50)
    before = load(path)
    expected = parts(before)
    (entry,) = (tmp_path / "cache" / "encoded").iterdir()
    del before
    array, page = entry / "train.npy", entry / "entry.json"
    raw = bytearray(array.read_bytes())
    raw[-3] ^= 1
    if harm == "symbols":
        said = json.loads(page.read_text())
        said["notes"] = said["notes"].replace('"s"', '"z"')
        page.write_text(json.dumps(said))
    elif harm in ("page", "json"):
        page.write_text({"page": "{", "json": "[1]"}[harm])
    elif harm == "gone":
        array.unlink()
    elif harm == "pickle":
        np.save(array, np.array([print], dtype=object), allow_pickle=True)
    else:
        array.write_bytes({"flip": raw, "cut": raw[: len(raw) // 2], "empty": b""}[harm])
    assert parts(load(path)) == expected
    assert parts(load(path)) == expected
    assert len(makes) == 2  # made again once, and good from then on


@pytest.mark.parametrize("blocked", ["cache", "cache/encoded", "cache/stamps"])
def test_without_a_cache(tmp_path, blocked):
    """If this fails, nothing can be loaded where the cache folder cannot be written."""
    write(
        tmp_path / blocked,
        "a file where the folder should be: nobody, root neither, can write below it",
    )
    path = write(tmp_path / "my.txt", "some text " * 50)
    for _ in range(2):
        corpus = load(path)
        assert "".join(parts(corpus)) == "some text " * 50
        assert corpus.train.flags.writeable
    assert len(load("python", limit=1000).train) == 900


def test_two_processes_at_once(tmp_path):
    """If this fails, processes that encode the same text at once trip over each other."""
    path = write(tmp_path / "my.txt", "some text " * 5000)
    code = (
        "import sys; from zoneout.paper.data.corpora import load; c = load(sys.argv[1]); "
        "print(c.digest, len(c.train))"
    )
    command = [sys.executable, "-c", code, str(path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = [process.communicate()[0] for process in running]
    corpus = load(path)
    assert told == [f"{corpus.digest} 45000\n"] * 3
    assert [p.name for p in (tmp_path / "cache" / "encoded").iterdir()] == [
        corpus.digest
    ]  # nothing left to the side


def test_clearing(tmp_path, makes):
    """If this fails, the cache cannot be emptied, or downloads go with it."""
    path = write(tmp_path / "my.txt", "some text " * 50)
    load(path)
    kept = write(cache.downloads() / "ptb" / "x", "fetched")
    cache.clear()
    load(path)
    assert len(makes) == 2
    assert kept.exists()


def test_nothing_is_pickled(tmp_path):
    """If this fails, the cache holds something that runs code when it is opened."""
    load(write(tmp_path / "my.txt", "some text " * 50))
    for file in (tmp_path / "cache").rglob("*"):
        if file.suffix == ".json":
            json.loads(file.read_text())
        elif file.is_file():
            np.load(file, allow_pickle=False)
