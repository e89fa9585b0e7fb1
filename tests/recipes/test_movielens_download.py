"""`echelon data movielens`: against a server that breaks off, changes its mind and lies, and with
zips that nobody should unpack."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from echelon.cli import run_command
from echelon.errors import EchelonError, ExitCode
from echelon.recipes.movielens.data.data_command import get_data
from echelon.recipes.movielens.data.download import PartialDownload, download
from echelon.recipes.movielens.data.synthetic import make_synthetic, write_csv

RATINGS = b"userId,movieId,rating,timestamp\n1,2,3.0,4\n5,2,4.5,6\n"
SMALL = "ml-latest-small"


def make_zip(members: dict[str, bytes], folder: str = SMALL) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{folder}/{name}" if folder else name, content)
    return made.getvalue()


@pytest.fixture(scope="module")
def make_release_zip(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A set of several pieces, stored as it is so that its size is known to be large."""
    folder = write_csv(make_synthetic(8_000, 300, 200, seed=0), tmp_path_factory.mktemp("made"))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for path in folder.iterdir():
            archive.write(path, f"{SMALL}/{path.name}")
        archive.writestr(f"{SMALL}/README.txt", "The licence.")
    return made.getvalue()


# --- a server -----------------------------------------------------------------------------------


@dataclass
class Shelf:
    """What a server has, and how it behaves."""

    files: dict[str, bytes]
    tag: str = '"one"'
    breaks_after: list[int] = field(default_factory=list)
    """One for each answer to come: so many bytes of its body, then the connection is cut."""
    fails_with: list[int] = field(default_factory=list)
    """Status codes of the answers before that."""
    ranges: bool = True
    tells_length: bool = True
    asked: list[str | None] = field(default_factory=list)
    """The Range of every request for a zip."""
    address: str = ""


class Handler(BaseHTTPRequestHandler):
    shelf: Shelf

    def do_GET(self) -> None:
        shelf = self.shelf
        name = self.path.rpartition("/")[2]
        if name.endswith(".zip"):
            shelf.asked.append(self.headers["Range"])
            if shelf.fails_with:
                return self.send_error(shelf.fails_with.pop(0))
        if name not in shelf.files:
            return self.send_error(404)
        content, start = shelf.files[name], 0
        wanted = self.headers["Range"]
        if shelf.ranges and wanted and self.headers["If-Range"] == shelf.tag:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                return self.end_headers()
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("ETag", shelf.tag)
        if shelf.tells_length:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        stop = shelf.breaks_after.pop(0) if name.endswith(".zip") and shelf.breaks_after else None
        self.wfile.write(content[start:] if stop is None else content[start : start + stop])
        return None

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def serving(shelf: Shelf) -> Iterator[Shelf]:
    class Own(Handler):
        pass

    Own.shelf = shelf
    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    shelf.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield shelf
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def shelf(make_release_zip: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    md5 = f"MD5 ({SMALL}.zip) = {hashlib.md5(make_release_zip).hexdigest()}\n".encode()
    with serving(Shelf({f"{SMALL}.zip": make_release_zip, f"{SMALL}.zip.md5": md5})) as shelf:
        monkeypatch.setenv("ECHELON_MOVIELENS_URL", shelf.address)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield shelf


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class SilentProgress:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.seen: list[tuple[int, int | None]] = []

    def update(self, have: int, total: int | None) -> None:
        self.seen.append((have, total))

    def print_line(self, line: str) -> None:
        self.notes.append(line)


def get_release(shelf: Shelf, waits_s: tuple[float, ...] = (0.0,)) -> tuple[bytes, SilentProgress]:
    part, shown = PartialDownload.locate_in_folder(Path(), "file.zip"), SilentProgress()
    download(f"{shelf.address}/{SMALL}.zip", part, shown, waits_s)
    return part.data.read_bytes(), shown


# --- downloading --------------------------------------------------------------------------------


def test_a_release_is_downloaded_verified_unpacked_and_reported(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["data", "movielens"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("data/ml-latest-small: 8,000 ratings of 300 users for ")
    assert "licence: GroupLens' own, in data/ml-latest-small/README.txt" in out
    assert "Harper and J. A. Konstan" in out
    assert out.splitlines()[-1] == "next: echelon train experiment=movielens"
    assert "note: " in err
    assert "known 4412bda2958b" in err, "it is not the set of 2018, and that is said"
    assert sorted(path.name for path in Path("data").iterdir()) == [SMALL]
    assert run_command(["data", "movielens", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ratings"] == 8_000
    assert err == "data/ml-latest-small exists already; to get it again, remove it first\n"
    assert len(shelf.asked) == 1


def test_a_connection_that_breaks_again_and_again(shelf: Shelf, make_release_zip: bytes) -> None:
    shelf.breaks_after = [70_000, 10, 0, 50_000]
    content, shown = get_release(shelf, waits_s=(0.0, 0.0))
    assert content == make_release_zip
    assert shelf.asked == [
        None,
        "bytes=70000-",
        "bytes=70010-",
        "bytes=70010-",
        "bytes=120010-",
    ]
    assert len(shown.notes) == 4
    assert f"broke after 70,000 of {len(make_release_zip):,} bytes" in shown.notes[0]
    assert shown.seen[-1] == (len(make_release_zip), len(make_release_zip))


def test_received_bytes_are_kept_for_the_next_call(shelf: Shelf, make_release_zip: bytes) -> None:
    shelf.breaks_after = [70_000, 0]
    with pytest.raises(EchelonError, match=r"70,000 bytes are kept in file.zip.part") as caught:
        get_release(shelf)
    assert "type the same command again" in caught.value.faults[0].do
    assert get_release(shelf)[0] == make_release_zip
    assert shelf.asked[-1] == "bytes=70000-"
    assert get_release(shelf)[0] == make_release_zip
    assert shelf.asked[-1] == f"bytes={len(make_release_zip)}-", "all of it was here"


def test_a_file_that_changed_meanwhile_is_downloaded_again(
    shelf: Shelf, make_release_zip: bytes
) -> None:
    shelf.breaks_after = [70_000, 0]
    with pytest.raises(EchelonError):
        get_release(shelf)
    changed = make_release_zip[::-1] + b"more"
    shelf.files[f"{SMALL}.zip"], shelf.tag = changed, '"two"'
    assert get_release(shelf)[0] == changed


@pytest.mark.parametrize("unsure", ["weak tag", "no ranges", "another address"])
def test_a_part_of_unknown_version_is_not_used(
    shelf: Shelf, make_release_zip: bytes, unsure: str
) -> None:
    if unsure == "weak tag":
        shelf.tag = 'W/"one"'
    shelf.ranges = unsure != "no ranges"
    shelf.breaks_after = [70_000, 0]
    with pytest.raises(EchelonError):
        get_release(shelf)
    if unsure == "another address":
        about = Path("file.zip.part.json")
        about.write_text(json.dumps({"url": "http://elsewhere", "version": shelf.tag}))
        Path("file.zip.part").write_bytes(b"x" * 70_000)
    assert get_release(shelf)[0] == make_release_zip


def test_an_overloaded_server_is_retried(shelf: Shelf, make_release_zip: bytes) -> None:
    shelf.fails_with = [503, 429]
    content, shown = get_release(shelf, waits_s=(0.0, 0.0))
    assert content == make_release_zip
    assert "503" in shown.notes[0]


def test_not_found_is_not_retried(shelf: Shelf) -> None:
    del shelf.files[f"{SMALL}.zip"]
    with pytest.raises(EchelonError, match="answered 404") as caught:
        run_command(["data", "movielens"])
    assert len(shelf.asked) == 1
    assert caught.value.exit == ExitCode.NOT_FOUND
    assert not Path("data").exists()


def test_a_wrong_checksum_is_not_unpacked(shelf: Shelf, make_release_zip: bytes) -> None:
    wrong = bytearray(make_release_zip)
    wrong[len(wrong) // 2] ^= 1
    shelf.files[f"{SMALL}.zip"] = bytes(wrong)
    with pytest.raises(EchelonError, match="wrong checksum") as caught:
        run_command(["data", "movielens"])
    assert hashlib.md5(wrong).hexdigest() in str(caught.value)
    assert not any(Path("data").iterdir())
    shelf.files[f"{SMALL}.zip"] = make_release_zip
    assert run_command(["data", "movielens"]) == 0


def test_a_newer_release_needs_a_published_checksum(shelf: Shelf) -> None:
    del shelf.files[f"{SMALL}.zip.md5"]
    with pytest.raises(EchelonError, match="wrong checksum: known 4412bda2958b"):
        run_command(["data", "movielens"])


def test_no_internet_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("ECHELON_MOVIELENS_URL", address)
    with pytest.raises(EchelonError) as caught:
        get_data("25m", None, Path("data"), waits_s=(0.0,))
    [fault] = caught.value.faults
    assert fault.what == f"{address}/ml-25m.zip cannot be reached: connection refused"
    assert f"download {address}/ml-25m.zip on a machine with internet access" in fault.do
    assert "echelon data movielens --from ml-25m.zip" in fault.do
    assert not Path("data").exists()


def test_an_invalid_mirror_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_MOVIELENS_URL", "file:///etc")
    with pytest.raises(EchelonError, match="ECHELON_MOVIELENS_URL is 'file:///etc'"):
        run_command(["data", "movielens"])


def test_two_downloads_at_once(shelf: Shelf) -> None:
    with Path("file.zip.part").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(EchelonError, match="another process is downloading"):
            get_release(shelf)


# --- from a file --------------------------------------------------------------------------------


def test_from_a_zip_or_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = {"ratings.csv": RATINGS, "README.txt": b"licence", ".echelon/lock": b"hidden"}
    Path("given.zip").write_bytes(make_zip(members))
    assert run_command(["data", "movielens", "--from", "given.zip"]) == 0
    assert Path(f"data/{SMALL}/ratings.csv").read_bytes() == RATINGS
    assert Path(f"data/{SMALL}/.echelon/lock").read_bytes() == b"", "ours, not the zip's"
    assert run_command(["data", "movielens", "--from", f"data/{SMALL}", "--to", "other"]) == 0
    assert Path(f"other/{SMALL}/README.txt").exists()
    printed = capsys.readouterr().out
    assert f"next: echelon train experiment=movielens data=other/{SMALL}" in printed
    assert run_command(["data", "movielens", "--from", f"other/{SMALL}", "--to", "other"]) == 0
    assert "exists already" in capsys.readouterr().err


def test_the_folder_is_named_after_the_zip_or_the_size() -> None:
    Path("flat.zip").write_bytes(make_zip({"u.data": b"1\t2\t3\t4\n"}, folder=""))
    assert run_command(["data", "movielens", "--from", "flat.zip"]) == 0
    assert run_command(["data", "movielens", "--from", "flat.zip", "--size", "100k"]) == 0
    assert sorted(path.name for path in Path("data").iterdir()) == ["flat", "ml-100k"]


def import_fault_texts(content: bytes) -> list[str]:
    Path("given.zip").write_bytes(content)
    with pytest.raises(EchelonError) as caught:
        run_command(["data", "movielens", "--from", "given.zip", "--to", "inside/data"])
    assert not list(Path().rglob("ratings.csv"))
    assert not list(Path().rglob(".unpacking-*"))
    return [fault.what for fault in caught.value.faults]


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", "..\\evil"])
def test_paths_out_of_the_folder_are_refused(name: str) -> None:
    made = make_zip({f"{SMALL}/ratings.csv": RATINGS, name: b"!"}, folder="")
    assert import_fault_texts(made) == [
        f"given.zip is not unpacked: {name!r} leads out of the folder"
    ]
    assert not list(Path().rglob("evil"))


def test_links_are_not_unpacked() -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        link = zipfile.ZipInfo("ml/ratings.csv")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    assert "'ml/ratings.csv' is a link or a device" in import_fault_texts(made.getvalue())[0]


def test_a_zip_bomb_is_not_unpacked() -> None:
    [what] = import_fault_texts(make_zip({"ratings.csv": RATINGS + b"0" * 20_000_000}))
    assert "more than 100 × the" in what
    [what] = import_fault_texts(
        make_zip({"ratings.csv": RATINGS} | {f"{i}": b"x" for i in range(1000)})
    )
    assert "1,001 files are more than 1,000" in what


def test_damaged_zip_files_are_reported(make_release_zip: bytes) -> None:
    assert (
        "given.zip is not a complete zip file"
        in import_fault_texts(make_release_zip[: len(make_release_zip) // 2])[0]
    )
    damaged = bytearray(make_release_zip)
    damaged[5_000] ^= 1
    assert "Bad CRC-32" in import_fault_texts(bytes(damaged))[0]
    assert (
        "given.zip is not a complete zip file" in import_fault_texts(b"<html>not found</html>")[0]
    )
    assert "given.zip is not a complete zip file" in import_fault_texts(b"")[0]
    no_utf8 = make_zip({"ratings.csv": RATINGS, "é": b""}).replace("é".encode(), b"\xff\xff")
    assert "given.zip is not a complete zip file" in import_fault_texts(no_utf8)[0]
    assert import_fault_texts(make_zip({"names.csv": b"a,b\n"})) == [
        "given.zip has no ratings: looked for ratings.csv, ratings.dat, u.data"
    ]


def test_an_existing_folder_is_not_touched() -> None:
    Path("given.zip").write_bytes(make_zip({"ratings.csv": RATINGS}))
    in_the_way = Path(f"data/{SMALL}/thesis.txt")
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("mine")
    with pytest.raises(EchelonError, match="exists already and is not a MovieLens data set"):
        run_command(["data", "movielens", "--from", "given.zip"])
    assert in_the_way.read_text() == "mine"
    in_the_way.unlink()
    assert run_command(["data", "movielens", "--from", "given.zip"]) == 0, "an empty one is used"


def test_a_damaged_existing_data_set_is_reported() -> None:
    folder = Path(f"data/{SMALL}")
    folder.mkdir(parents=True)
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,x,4\n")
    with pytest.raises(EchelonError) as caught:
        run_command(["data", "movielens"])
    printed = [str(fault) for fault in caught.value.faults]
    assert "line 2: rating is 'x', not a number" in printed[0]
    assert f"rm -r data/{SMALL}" in printed[1]


@pytest.mark.parametrize("kind", ["zip", "folder"])
def test_a_bad_data_set_is_removed_after_import(kind: str, tmp_path: Path) -> None:
    given = tmp_path / "given" / (f"{SMALL}.zip" if kind == "zip" else SMALL)

    def make(ratings: bytes) -> None:
        given.parent.mkdir(exist_ok=True)
        if kind == "zip":
            given.write_bytes(make_zip({"ratings.csv": ratings}))
        else:
            given.mkdir(exist_ok=True)
            (given / "ratings.csv").write_bytes(ratings)

    make(RATINGS + b"1,2,x,4\n")
    with pytest.raises(EchelonError) as caught:
        run_command(["data", "movielens", "--from", str(given)])
    [fault] = caught.value.faults
    assert fault.what == f"{given}/ratings.csv, line 4: rating is 'x', not a number"
    make(RATINGS)
    assert run_command(["data", "movielens", "--from", str(given)]) == 0


def test_a_missing_file() -> None:
    with pytest.raises(EchelonError, match=r"there is no nothing.zip"):
        run_command(["data", "movielens", "--from", "nothing.zip"])


# --- no space -----------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A disk of 128 kB."""
    place = tmp_path / "tiny"
    place.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)  # a neighbour may look into it


def test_no_space_to_download(shelf: Shelf, tiny: Path) -> None:
    with pytest.raises(EchelonError, match=f"no space left in {tiny}") as caught:
        run_command(["data", "movielens", "--to", str(tiny)])
    assert caught.value.exit == ExitCode.FAILED
    assert not any(tiny.iterdir())


def test_no_space_halfway(shelf: Shelf, tiny: Path) -> None:
    shelf.tells_length = False
    with pytest.raises(EchelonError, match=r"no space left for .*zip.part; the .* bytes that came"):
        run_command(["data", "movielens", "--to", str(tiny)])
    assert [path.name for path in tiny.iterdir() if path.suffix == ".part"] == [f"{SMALL}.zip.part"]


def test_no_space_to_unpack(tiny: Path) -> None:
    Path("given.zip").write_bytes(make_zip({"ratings.csv": RATINGS + os.urandom(200_000)}))
    with pytest.raises(EchelonError, match=r"no space left for .*; nothing of it was kept"):
        run_command(["data", "movielens", "--from", "given.zip", "--to", str(tiny)])
    assert not any(tiny.iterdir())


def test_no_space_to_prepare(tiny: Path) -> None:
    lines = b"".join(b"%d,3,1,1\n" % i for i in range(8_000))
    Path("given.zip").write_bytes(
        make_zip({"ratings.csv": RATINGS.splitlines()[0] + b"\n" + lines})
    )
    with pytest.raises(EchelonError, match="no space left for the prepared form"):
        run_command(["data", "movielens", "--from", "given.zip", "--to", str(tiny)])
    assert not list(tiny.rglob("making-*"))


# --- as it is typed -----------------------------------------------------------------------------


def test_the_command_line(shelf: Shelf) -> None:
    words = [sys.executable, "-m", "echelon", "data", "movielens"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == (f"downloading {shelf.address}/{SMALL}.zip (about 1 MB)")
    assert "\x1b" not in done.stderr + done.stdout


@pytest.mark.skipif("ECHELON_MOVIELENS_ZIP" not in os.environ, reason="the real set is not here")
def test_the_real_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["data", "movielens", "--from", os.environ["ECHELON_MOVIELENS_ZIP"]]) == 0
    assert "100,836 ratings of 610 users for 9,724 movies" in capsys.readouterr().out
