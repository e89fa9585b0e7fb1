"""`echelon data look`, `check` and `pack`, as they are typed."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from pathlib import Path

import numpy as np
import pytest
from run_folders import echelon
from sample_files import overwrite, write_lines, write_photos, write_shard

from echelon.commands.arguments import parse_size_bytes

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_look_at_tars(capsys: Capture) -> None:
    write_shard(Path("data/a.tar"), 4)
    write_shard(Path("data/b.tar"), 2)
    code, out, _ = echelon(capsys, "data", "look", "data", "-n", "1")
    size = (Path("data/a.tar").stat().st_size + Path("data/b.tar").stat().st_size) / 1000
    assert code == 0
    assert out.splitlines()[0] == f"6 samples in 2 files (tar), {size:.3g} kB"
    words = [line.split() for line in out.splitlines()]
    assert ["cls", "int", "1", "B", "1", "B", "6"] in words
    assert ["txt", "text", "6", "B", "6", "B", "6"] in words
    [jpg, *_] = [line for line in words if line[:1] == ["jpg"]]
    assert jpg[1:3] == ["JPEG", "16×12"]
    assert out.splitlines()[-4] == "data/a.tar, sample 0 (n0000)"
    assert out.splitlines()[-1] == '  txt  "text 0"'


def test_look_as_json(capsys: Capture) -> None:
    write_photos(Path("photos"), "cat", "dog")
    code, out, _ = echelon(capsys, "data", "look", "photos", "--json")
    found = json.loads(out)
    assert (code, found["samples"], found["class_names"]) == (0, 6, ["cat", "dog"])
    assert found["columns"][0]["type"] == "JPEG 16–18×12"
    assert [each["file"] for each in found["first_samples"]] == [
        "photos/cat/00.jpg",
        "photos/cat/01.jpg",
        "photos/cat/02.jpg",
    ]
    assert found["first_samples"][0]["values"]["label"] == "0"


def test_look_at_tokens(capsys: Capture) -> None:
    Path("tokens").mkdir()
    np.arange(20_000, dtype=np.uint16).tofile("tokens/a.bin")
    np.arange(5, dtype=np.uint16).tofile("tokens/b.bin")
    code, out, _ = echelon(capsys, "data", "look", "tokens")
    lines = out.splitlines()
    assert code == 0
    assert lines[:2] == [
        "20,005 tokens in 2 files, 40 kB",
        "read as uint16: the files do not say it, --dtype does",
    ]
    assert [line.split() for line in lines[5:9]] == [
        [],
        ["tokens/a.bin,", "sample", "0", "(token", "0)"],
        ["tokens", "20,000"],
        ["first", *map(str, range(16)), "…"],
    ]
    assert lines[-2:] == ["  first    0 1 2 3 4", "  largest  4 in 3 places"]


def test_tokens_of_another_type(capsys: Capture) -> None:
    np.arange(1, 200, dtype=np.uint32).tofile("a.bin")
    _, out, _ = echelon(capsys, "data", "look", "a.bin")
    assert "  note     every second one is 0, as if they were uint32: see --dtype" in out
    _, out, _ = echelon(capsys, "data", "look", "a.bin", "--dtype", "uint32", "--json")
    found = json.loads(out)
    assert (found["format"], found["samples"], found["size_bytes"]) == ("tokens", 199, 796)
    assert "note" not in found["first_samples"][0]["values"]
    Path("b.bin").write_bytes(b"123")
    code, _, err = echelon(capsys, "data", "look", "a.bin", "b.bin")
    assert code == 2
    assert "b.bin has 3 bytes, which are no whole number of uint16 tokens" in err
    write_shard(Path("c.tar"), 1)
    code, _, err = echelon(capsys, "data", "look", "a.bin", "c.tar")
    assert code == 2
    assert "a.bin has no ending of a known format" in err


def test_long_and_strange_values_are_one_line_each(capsys: Capture) -> None:
    line = {"text": "a\x1b[31m\n" + "x" * 5000, "object": {"a": [1, None]}, "none": None}
    Path("lines.jsonl").write_text(json.dumps(line) + "\n")
    np.save("rows.npy", np.arange(40, dtype=np.int16).reshape(2, 20))
    _, out, _ = echelon(capsys, "data", "look", "lines.jsonl", "--json")
    values = json.loads(out)["first_samples"][0]["values"]
    assert values["text"].startswith('"a\\u001b[31m\\nxxx')
    assert values["text"].endswith('xxx" … (5,007 characters)')
    assert (values["object"], values["none"]) == ('{"a": [1, null]}', "null")
    _, out, _ = echelon(capsys, "data", "look", "rows.npy", "--json")
    found = json.loads(out)
    assert found["columns"][0]["type"] == "int16 (20)"
    assert found["first_samples"][1]["values"] == {"data": "int16 (20,): 20 21 22 23 24 25 26 27 …"}


def test_a_sample_that_cannot_be_read_does_not_end_the_look(capsys: Capture) -> None:
    tar = write_shard(Path("a.tar"), 3)
    overwrite(tar, b"n0001.cls", b"x", skip=512)
    code, out, _ = echelon(capsys, "data", "look", "a.tar")
    assert code == 0
    assert "  cls cannot be decoded: invalid literal" in out
    assert '  txt  "text 2"' in out


def test_a_page_with_pictures(capsys: Capture) -> None:
    write_photos(Path("</script>"), "cat", each=2)
    code, _, err = echelon(capsys, "data", "look", "</script>", "--html", "page.html")
    page = Path("page.html").read_text()
    assert (code, err) == (0, "the page is page.html\n")
    text = page.partition('id="data">')[2].partition("</script>")[0]
    [first, second] = json.loads(text)["samples"]
    assert first["place"] == "</script>/cat/00.jpg, sample 0"
    assert first["values"][0]["picture"].startswith("data:image/jpeg;base64,/9j/")
    assert first["values"][0]["picture"] != second["values"][0]["picture"]
    assert "http" not in page, "it needs no network"


def test_check_says_which_samples(capsys: Capture) -> None:
    write_shard(Path("data/a.tar"), 3)
    code, out, err = echelon(capsys, "data", "check", "data", "--procs", "1")
    assert (code, out) == (0, "")
    assert err.startswith("3 samples in 1 file: all can be read (")
    overwrite(Path("data/a.tar"), b"n0001.cls", b"x", skip=512)
    Path("data/b.tar").touch()
    code, out, err = echelon(capsys, "data", "check", "data", "--procs", "1")
    bad_file, bad_sample = (line.split("\t") for line in out.splitlines())
    assert code == 1
    assert bad_file[:3] == ["data/b.tar", "", ""]
    assert bad_sample[:3] == ["data/a.tar", "1", "n0001"]
    assert err.startswith("3 samples in 2 files: 1 cannot be read, 1 fault of whole files (")
    code, out, _ = echelon(capsys, "data", "check", "data", "--procs", "1", "--json")
    found = json.loads(out)
    assert (code, found["bad_samples"], found["bad_files"]) == (1, 1, 1)
    assert found["bad"][1]["key"] == "n0001"


@pytest.mark.slow
def test_check_in_several_processes(capsys: Capture) -> None:
    for name in "abc":
        write_shard(Path(f"data/{name}.tar"), 3)
        overwrite(Path(f"data/{name}.tar"), b"n0001.cls", b"x", skip=512)
    code, out, _ = echelon(capsys, "data", "check", "data", "--procs", "2")
    assert code == 1
    assert [line.split("\t")[0] for line in out.splitlines()] == [
        "data/a.tar",
        "data/b.tar",
        "data/c.tar",
    ], "in order"


def test_what_cannot_be_done(capsys: Capture) -> None:
    code, _, err = echelon(capsys, "data", "check", "nothing.tar")
    assert (code, err.splitlines()[0]) == (2, "error: nothing.tar does not exist")
    write_lines(Path("lines.jsonl"), 1)
    code, _, err = echelon(capsys, "data", "look", "lines.jsonl", "--html", "no/page.html")
    assert (code, err.splitlines()[0]) == (
        2,
        "error: no/page.html cannot be written: no such file or directory",
    )
    with pytest.raises(SystemExit) as caught:
        echelon(capsys, "data", "lok", "lines.jsonl")
    assert caught.value.code == 2


def test_pack_then_look(capsys: Capture) -> None:
    write_photos(Path("photos"), "cat", "dog")
    code, out, _ = echelon(capsys, "data", "pack", "photos", "-o", "data/train", "--procs", "1")
    assert (code, out.partition(", in ")[0].partition(",")[0]) == (0, "6 samples in 1 shard (tar)")
    words = ("data", "pack", "photos", "-o", "data/train", "--procs", "1", "--json")
    code, out, _ = echelon(capsys, *words)
    assert (code, json.loads(out)["kept"]) == (0, 1)
    code, out, _ = echelon(capsys, "data", "look", "data/train", "-n", "0")
    assert (code, out.startswith("6 samples in 1 file (tar), ")) == (0, True)
    code, _, err = echelon(capsys, *words, "--shard-size", "1GB")
    assert (code, "data/train has shards that were packed otherwise" in err) == (2, True)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("256MB", 256_000_000), ("1.5 kB", 1500), ("2KiB", 2048), ("1G", 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "MB", "1XB", "1e3", "nan"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        parse_size_bytes(text)
