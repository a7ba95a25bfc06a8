"""Files and downloads: against a local server that also breaks off, lies, redirects and never
ends.
"""

import contextlib
import gzip
import hashlib
import http.server
import io
import lzma
import os
import socket
import threading
import tracemalloc
import zipfile
import zlib
from dataclasses import replace

import pytest

from zoneout.paper.data import cache, datasets
from zoneout.paper.data.datasets import DATASETS, DataError, Dataset, File, MissingError
from zoneout.paper.data.download import download, fetch

TEXT = bytes(range(256)) * 3000  # 768,000 bytes: some blocks of the download
REAL = os.environ.get("ZONEOUT_DATA")
FILE = File("box/thing.txt", len(TEXT), hashlib.sha256(TEXT).hexdigest())


class Server(http.server.ThreadingHTTPServer):
    """Serves `body` in the way that the path asks for, and remembers what was asked."""

    body = TEXT
    asked: list[tuple[str, str | None]]

    def url(self, way):
        return f"http://127.0.0.1:{self.server_address[1]}/{way}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args):
        pass

    def do_GET(self):
        way = self.path.strip("/")
        wanted = self.headers.get("Range")
        self.server.asked.append((way, wanted))
        with contextlib.suppress(ConnectionError):  # the client may well hang up on the endless one
            getattr(self, way.partition("-")[0])(int(wanted[6:-1]) if wanted else 0)

    def send(self, status, data, *, length=None, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if length is not False:
            self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)

    def good(self, start):
        body = self.server.body
        if start >= len(body):
            self.send(416, b"")
        elif start:
            self.send(206, body[start:], Content_Range=f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send(200, body)

    def breaks(self, start):  # a third of the file at a time, then the connection is gone
        body = self.server.body
        end = start + len(body) // 3 + 1
        headers = {"Content_Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
        self.send(206 if start else 200, body[start:end], length=len(body) - start, **headers)

    def stuck(self, start):  # breaks off at the same place for ever, and knows no ranges
        self.send(200, self.server.body[:1000], length=len(self.server.body))

    def rangeless(self, start):
        self.send(200, self.server.body)

    def elsewhere(self, start):  # another range than it was asked for
        body = self.server.body
        self.send(206 if start else 200, body, Content_Range=f"bytes 0-{len(body) - 1}/{len(body)}")

    def lengthless(self, start):
        self.send(200, self.server.body, length=False)

    def short(self, start):  # closes early and has not said how long the file is
        self.send(200, self.server.body[:-1], length=False)

    def altered(self, start):
        self.send(200, bytes([self.server.body[0] ^ 1]) + self.server.body[1:])

    def page(self, start):
        self.send(200, b"<!DOCTYPE html><html>You have been moved</html>")

    def missing(self, start):
        self.send(404, b"no")

    def moved(self, start):
        self.send(302, b"", Location=self.server.url("good"))

    def endless(self, start):
        self.send(200, b"", length=False)
        while True:
            self.wfile.write(bytes(2**16))

    def huge(self, start):
        self.send(200, b"", length=10**15)

    def silent(self, start):
        self.connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(("127.0.0.1", 0), Handler) as running:
        running.asked = []
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Nothing of the person who runs the tests is read or written."""
    monkeypatch.setenv("ZONEOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ZONEOUT_DATA", raising=False)


def at(server, *ways):
    return replace(FILE, urls=tuple(server.url(way) for way in ways))


def names(folder):
    return sorted(
        path.name for path in folder.rglob("*") if path.is_file() and path.name != ".lock"
    )


def part_of(folder):
    (part,) = folder.rglob("*.part")
    return part


@pytest.mark.parametrize("way", ["good", "moved", "lengthless", "breaks"])
def test_a_file_arrives_whole(server, tmp_path, way):
    """If this fails, a plain, redirected, unannounced or interrupted download does not end with
    the file itself.
    """
    steps = []
    path = download(at(server, way), tmp_path, progress=lambda *step: steps.append(step))
    assert path == tmp_path / "box" / "thing.txt"
    assert path.read_bytes() == TEXT
    assert names(tmp_path) == ["thing.txt"]  # nothing is left beside it
    assert steps[-1] == ("thing.txt", len(TEXT), None if way == "lengthless" else len(TEXT))
    assert [here for _, here, _ in steps] == sorted(here for _, here, _ in steps)


def test_what_broke_off_is_continued(server, tmp_path):
    """If this fails, a broken connection costs all that had come, or the pieces do not meet."""
    download(at(server, "breaks"), tmp_path)
    third = len(TEXT) // 3 + 1
    assert server.asked == [
        ("breaks", None),
        ("breaks", f"bytes={third}-"),
        ("breaks", f"bytes={2 * third}-"),
    ]


@pytest.mark.parametrize("way", ["good", "rangeless", "elsewhere"])
def test_a_later_start_continues_what_an_earlier_one_left(server, tmp_path, way):
    """If this fails, an interrupted download begins anew, or trusts a server that sends another
    range.
    """
    file = at(server, way)
    part_at(file, tmp_path).write_bytes(TEXT[:500_000])
    if way == "elsewhere":
        with pytest.raises(DataError, match="another range"):
            download(file, tmp_path)
    path = download(file, tmp_path)
    assert path.read_bytes() == TEXT
    assert server.asked[0] == (way, "bytes=500000-")


@pytest.mark.parametrize("left", [b"x" * 500_000, TEXT, TEXT[:-1] + b"?", TEXT + b"more"])
def test_a_part_of_something_else_is_not_used(server, tmp_path, left):
    """If this fails, old bytes of another version end up inside the file, or block every later
    download.
    """
    file = at(server, "good")
    part_at(file, tmp_path).write_bytes(left)
    assert download(file, tmp_path).read_bytes() == TEXT
    assert names(tmp_path) == ["thing.txt"]


def part_at(file, folder):
    """Where the part of a download lies."""
    (folder / "box").mkdir(parents=True, exist_ok=True)
    return (
        folder
        / "box"
        / f".{file.name}-{hashlib.sha256(file.urls[0].encode()).hexdigest()[:8]}.part"
    )


def test_an_interrupted_download_looks_unfinished(server, tmp_path):
    """If this fails, Ctrl-C in the middle leaves a file that passes for the whole, or loses what
    had come.
    """

    def interrupt(name, here, total):
        if here > len(TEXT) // 2:
            raise KeyboardInterrupt

    file = at(server, "good")
    with pytest.raises(KeyboardInterrupt):
        download(file, tmp_path, progress=interrupt)
    assert datasets.find_in(tmp_path, file) is None
    part = part_of(tmp_path)
    assert part == part_at(file, tmp_path)
    assert TEXT.startswith(part.read_bytes()) and part.stat().st_size > len(TEXT) // 2
    download(file, tmp_path)
    assert server.asked[-1][1] is not None  # continued
    assert names(tmp_path) == ["thing.txt"]


BAD = {
    "missing": "404 Not Found",
    "altered": "its sha256 is",
    "page": "a web page",
    "short": "it has 767,999 bytes",
    "stuck": "broke off after 1,000 of 768,000 bytes",
    "endless": "far more than expected",
    "huge": "far more than expected",
    "silent": "cannot be reached",
}


@pytest.mark.parametrize("way", BAD)
def test_the_next_home_is_asked(server, tmp_path, way):
    """If this fails, one home that is gone, broken or altered makes the file unreachable."""
    assert download(at(server, way, "good"), tmp_path).read_bytes() == TEXT
    assert [asked for asked, _ in server.asked][-1] == "good"
    assert names(tmp_path) == ["thing.txt"]


@pytest.mark.parametrize("way", BAD)
def test_a_wrong_file_is_named_and_never_kept(server, tmp_path, way):
    """If this fails, bytes that are not the file's are used, or the error does not say what was
    wrong with them.
    """
    file = at(server, way)
    with pytest.raises(DataError) as caught:
        download(file, tmp_path)
    said = str(caught.value)
    assert BAD[way] in said and file.urls[0] in said
    assert FILE.sha256 in said and "768,000 bytes" in said and "ZONEOUT_DATA" in said
    assert datasets.find_in(tmp_path, file) is None
    assert names(tmp_path) == (
        [part_at(file, tmp_path).name] if way == "stuck" else []
    )  # what can be continued


def test_nobody_at_home(tmp_path):
    """If this fails, a refused connection ends in a traceback instead of a sentence."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens here
        file = replace(FILE, urls=(f"http://127.0.0.1:{taken.getsockname()[1]}/",))
        with pytest.raises(DataError, match="cannot be reached"):
            download(file, tmp_path)


def test_a_folder_that_cannot_be_written(server, tmp_path):
    """If this fails, a wrong target folder ends in a traceback."""
    (tmp_path / "box").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="could not be written"):
        download(at(server, "good"), tmp_path)


def test_two_at_once(server, tmp_path):
    """If this fails, two processes that fetch one file spoil each other's parts."""
    found = []
    file = at(server, "breaks")
    threads = [
        threading.Thread(target=lambda: found.append(download(file, tmp_path))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "box" / "thing.txt"] * 4
    assert found[0].read_bytes() == TEXT
    assert len(server.asked) == 3  # one download, in three pieces; the others waited for it


def pack(kind, data, path):
    """The data in a file of that kind, and the file's whole name."""
    path = path.with_name(path.name + kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("thing.txt", data)
    else:
        path.write_bytes({"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}[kind](data))
    return path


@pytest.mark.parametrize("kind", ["", ".xz", ".gz", ".zip"])
def test_packed_or_not(server, tmp_path, kind):
    """If this fails, a packed file is not found, not read, or not recognised when a home sends
    it packed.
    """
    there = pack(kind, TEXT, tmp_path / "there" / "box" / "thing.txt")
    assert datasets.find(FILE, tmp_path / "there") == there
    assert datasets.read(there, FILE) == TEXT
    flat = pack(kind, TEXT, tmp_path / "flat" / "thing.txt")  # straight in the folder
    assert datasets.find(FILE, tmp_path / "flat") == flat
    server.body = there.read_bytes()
    fetched = download(
        at(server, "breaks"), tmp_path / "new"
    )  # the address says nothing of how it is packed
    assert fetched.name == "thing.txt" + kind
    assert datasets.read(fetched, FILE) == TEXT


@pytest.mark.parametrize("kind", ["", ".xz", ".gz", ".zip"])
@pytest.mark.parametrize("harm", ["cut", "flipped", "longer", "other"])
def test_a_harmed_file_is_refused(tmp_path, kind, harm):
    """If this fails, a truncated, altered or wrong file is used, or its error does not say what
    was expected.
    """
    data = {"longer": TEXT + b"!", "other": b"?" * len(TEXT)}.get(harm, TEXT)
    path = pack(kind, data, tmp_path / "thing.txt")
    raw = bytearray(path.read_bytes())
    if harm == "cut":
        path.write_bytes(raw[: len(raw) * 2 // 3])
    if harm == "flipped":
        raw[len(raw) // 2] ^= 0x10
        path.write_bytes(raw)
    with pytest.raises(DataError) as caught:
        datasets.read(path, FILE)
    assert str(path) in str(caught.value)
    assert "768,000 bytes" in str(caught.value) and FILE.sha256 in str(caught.value)


def test_an_archive_writes_nowhere(tmp_path):
    """If this fails, a zip whose member is called ../../x writes outside its folder, or anywhere
    at all.
    """
    path = tmp_path / "a" / "b" / "thing.txt.zip"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../thing.txt", TEXT)
    before = sorted(tmp_path.rglob("*"))
    assert datasets.read(path, FILE) == TEXT
    assert sorted(tmp_path.rglob("*")) == before


def test_a_zip_of_many(tmp_path):
    """If this fails, the wrong member of an archive is taken."""
    path = tmp_path / "thing.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("README", b"no")
        archive.writestr("data/thing.txt", TEXT)
    assert datasets.read(path, FILE) == TEXT
    with pytest.raises(DataError, match="expected a zip with one file in it"):
        datasets.read(path)


def test_a_bomb_is_not_unpacked(tmp_path):
    """If this fails, a small archive of a huge file fills the memory before it is refused."""
    small = replace(FILE, size=1000)
    path = pack(".gz", bytes(30_000_000), tmp_path / "thing.txt")
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="more than 1,000 bytes"):
            datasets.read(path, small)
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


@pytest.fixture
def table(monkeypatch, server):
    """A table of one data set, of two files and a part, all at the local server."""
    start = (1000, hashlib.sha256(TEXT[:1000]).hexdigest())
    whole = File(
        "box/whole", len(TEXT), crc32=zlib.crc32(TEXT), start=start, urls=(server.url("good"),)
    )
    part = File("box/part", *start, part_of=whole)
    small = {
        "things": Dataset("things", "", (at(server, "good"),)),
        "part": Dataset("part", "", (part,)),
    }
    monkeypatch.setattr(datasets, "DATASETS", small)
    monkeypatch.setattr("zoneout.paper.data.download.DATASETS", small)
    return small


def test_fetching_a_data_set(table, server, tmp_path):
    """If this fails, files go to the wrong folder, or are fetched again though they are there."""
    expected = cache.downloads() / "box" / "thing.txt"
    assert fetch("things") == [(expected, True)]
    assert fetch("things") == [(expected, False)]
    assert len(server.asked) == 1
    (tmp_path / "mine").mkdir()
    assert fetch("things", tmp_path / "mine") == [(expected, False)]  # the cache has it already


def test_a_part_comes_with_the_whole(table, server):
    """If this fails, text8-prefix cannot be made from text8, which is the only form that has a
    public home.
    """
    assert fetch("part") == [(cache.downloads() / "box" / "whole", True)]
    path, there = datasets.locate(table["part"].files[0])
    assert (path.name, there.path) == ("whole", "box/whole")
    assert datasets.read(path, there) == TEXT


@pytest.mark.parametrize("change", [-1, 0, 999, 1000])
def test_a_file_known_by_its_crc(table, tmp_path, change):
    """If this fails, text8 (of which no sha256 is published) is taken though a byte of it is
    wrong.
    """
    (whole,) = [table["part"].files[0].part_of]
    data = bytearray(TEXT)
    data[change] ^= 1
    (tmp_path / "whole").write_bytes(data)
    with pytest.raises(DataError, match="its CRC-32 is"):
        datasets.read(tmp_path / "whole", whole)
    with (
        pytest.raises(DataError, match="first 1,000 bytes")
        if 0 <= change < 1000
        else contextlib.nullcontext()
    ):
        datasets.read(tmp_path / "whole", replace(whole, crc32=zlib.crc32(data)))


def test_fetch_mends_a_damaged_file(table, tmp_path):
    """If this fails, a damaged file stays in the way of a good one, or a file of the user's is
    thrown away.
    """
    mine = tmp_path / "mine"
    bad = pack(".gz", b"something else", mine / "thing.txt")
    with pytest.raises(DataError):
        datasets.read(bad, FILE)
    ((path, new),) = fetch("things", mine)
    assert new and datasets.read(path, FILE) == TEXT
    assert datasets.find(FILE, mine) == path
    assert names(mine) == ["thing.txt", "thing.txt.gz.damaged"]


def test_fetch_does_not_touch_zoneout_data(table, tmp_path, monkeypatch):
    """If this fails, a damaged file in ZONEOUT_DATA is hidden by a download that would never be
    used.
    """
    pack("", b"something else", tmp_path / "mine" / "thing.txt")
    monkeypatch.setenv("ZONEOUT_DATA", str(tmp_path / "mine"))
    with pytest.raises(DataError, match=r"mine/thing\.txt is not thing\.txt"):
        fetch("things")


def test_listing_and_verifying(table, tmp_path):
    """If this fails, `zoneout data list` or `verify` calls a file good, damaged or missing when
    it is not.
    """
    mine = tmp_path / "mine"
    assert {s.state for s in datasets.listing(mine)} == {"missing"}
    bad = pack(".gz", b"x", mine / "box" / "thing.txt")
    assert [(s.dataset, s.state) for s in datasets.listing(mine)] == [
        ("things", "present"),
        ("part", "missing"),
    ]
    (status,) = datasets.verify("things", mine)
    assert (status.state, status.path, status.size) == ("damaged", bad, len(TEXT))
    assert "it has 1 bytes" in status.note
    pack(".gz", TEXT, mine / "box" / "thing.txt")
    assert [s.state for s in datasets.verify("things", mine)] == ["good"]
    with pytest.raises(ValueError, match="did you mean things"):
        datasets.verify("thing", mine)


def test_where_files_are_looked_for(tmp_path, monkeypatch):
    """If this fails, a folder that was named is not the first to be looked into, or ZONEOUT_DATA
    is left out for it.
    """
    assert datasets.places() == [tmp_path / "cache" / "data"]
    monkeypatch.setenv("ZONEOUT_DATA", str(tmp_path / "env"))
    assert datasets.places() == [tmp_path / "env", tmp_path / "cache" / "data"]
    all_three = [tmp_path / "given", tmp_path / "env", tmp_path / "cache" / "data"]
    assert datasets.places(tmp_path / "given") == all_three
    assert datasets.places(tmp_path / "env") == all_three[1:]
    monkeypatch.delenv("ZONEOUT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert datasets.places()[-1] == tmp_path / "xdg" / "zoneout" / "data"


def test_a_missing_file_says_how_to_get_it(tmp_path, monkeypatch):
    """If this fails, the error leaves the user without the next thing to try, or says to do what
    was done already.
    """
    with pytest.raises(
        MissingError, match=r"ptb/ptb.train.txt was not found .* `zoneout data fetch char-ptb`"
    ) as error:
        datasets.locate(DATASETS["char-ptb"].files[0], tmp_path / "given")
    assert "; ZONEOUT_DATA may name a folder that has it." in str(error.value)
    monkeypatch.setenv("ZONEOUT_DATA", str(tmp_path / "env"))
    with pytest.raises(MissingError) as error:
        datasets.locate(DATASETS["char-ptb"].files[0], tmp_path / "given")
    assert "ZONEOUT_DATA" not in str(error.value)
    assert f"{tmp_path / 'given'} or {tmp_path / 'env'} or {tmp_path / 'cache'}" in str(error.value)


def test_the_table():
    """If this fails, the table has a file without a way to check it or without several homes."""
    for dataset in DATASETS.values():
        for file in dataset.files:
            assert file.sha256 or (file.crc32 and file.start)
            assert len(file.urls or file.part_of.urls) >= 3
            assert len(set(file.urls)) == len(file.urls)


def test_the_real_files_are_those_of_the_table():
    """If this fails, the table's sizes or checksums are not those of the corpora that people
    have.
    """
    if REAL is None:
        pytest.skip("ZONEOUT_DATA names no folder with the real corpora")
    found = datasets.verify(folder=REAL)
    assert [status for status in found if status.state == "damaged"] == []
    if not any(status.state == "good" for status in found):
        pytest.skip("the folder named by ZONEOUT_DATA has none of the corpora")


def archive_of(data, name="thing.txt"):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


@pytest.mark.parametrize("sent", ["the archive", "another archive", "no archive"])
def test_of_a_file_without_a_strong_sum_only_its_archive_is_taken(
    server, tmp_path, monkeypatch, sent
):
    """If this fails, bytes of text8 that only a CRC guards may be anybody's, packed anew or not
    packed at all.
    """
    good = archive_of(TEXT)
    forged = {
        "the archive": good,
        "another archive": archive_of(TEXT, "other.txt"),
        "no archive": TEXT,
    }
    server.body = forged[sent]
    checked = replace(
        at(server, "good"),
        sha256=None,
        crc32=zlib.crc32(TEXT),
        zip_md5=hashlib.md5(good).hexdigest(),
    )
    if sent == "the archive":
        assert datasets.read(download(checked, tmp_path), checked) == TEXT
        return
    monkeypatch.setattr(
        datasets, "_contents", lambda *args: pytest.fail("it was unpacked before it was checked")
    )
    with pytest.raises(DataError, match=rf"its md5 is .*zip with md5 {checked.zip_md5}"):
        download(checked, tmp_path)
    assert names(tmp_path) == []


def test_an_archive_that_is_there_is_checked_too(tmp_path):
    """If this fails, somebody's text8.zip in a data folder is guarded by a CRC alone."""
    known = replace(FILE, sha256=None, crc32=zlib.crc32(TEXT), zip_md5="0" * 32)
    path = tmp_path / "thing.txt.zip"
    path.write_bytes(archive_of(TEXT))
    with pytest.raises(DataError, match="its md5 is"):
        datasets.read(path, known)


def test_homes_that_nobody_can_listen_in_on_come_first():
    """If this fails, a file is asked for in the clear though it could be had otherwise, or has
    no sum that counts.
    """
    for file in {file for dataset in DATASETS.values() for file in dataset.files}:
        secure = [url.startswith("https://") for url in file.urls]
        assert secure == sorted(secure, reverse=True), file.name
        assert file.sha256 or file.zip_md5, file.name


@pytest.mark.parametrize("name", [".lock", "part"])
def test_a_download_does_not_write_through_a_link(server, tmp_path, name):
    """If this fails, a data folder of somebody else's empties or overwrites a file of the
    user's.
    """
    victim = tmp_path / "victim"
    victim.write_text("precious")
    file = at(server, "rangeless")
    part = part_at(file, tmp_path / "data")
    (part if name == "part" else part.with_name(name)).symlink_to(victim)
    with pytest.raises(
        DataError, match="it is a symbolic link, and no file is written through one"
    ):
        download(file, tmp_path / "data")
    assert victim.read_text() == "precious"
