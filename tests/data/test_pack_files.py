"""Shards have the samples of their source, always the same bytes, and survive a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from command_runner import until
from pyarrow import parquet
from sample_files import make_jpeg, overwrite, write_lines, write_photos, write_shard

import echelon
from echelon.data.check_files import FileCheck
from echelon.data.pack_files import ShardPacking
from echelon.errors import EchelonError


def pack(source: Path, folder: Path, format: str | None = None, size: int = 5000) -> int:
    """Pack in this process; returns the number of shards that were there before."""
    packing = ShardPacking(str(source), None, folder, format, folder.name, size)
    return sum(shard.is_kept for shard in packing.run(1))


def read_all(folder: Path) -> list[dict[str, Any]]:
    return [make_plain(sample) for sample in echelon.data.open(folder)]


def make_plain(value: Any) -> Any:
    """A value that can be compared: arrays as lists, pictures as their pixels."""
    if isinstance(value, Mapping):
        return {name: make_plain(each) for name, each in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value.tobytes() if hasattr(value, "tobytes") else value


def read_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def refuse(source: Path, folder: Path, format: str | None = None, size: int = 5000) -> str:
    with pytest.raises(EchelonError) as caught:
        pack(source, folder, format, size)
    return str(caught.value)


def test_pictures_of_a_folder(tmp_path: Path) -> None:
    source = write_photos(tmp_path / "photos", "cat", "dog", each=5)
    pack(source, tmp_path / "train")
    packed = read_all(tmp_path / "train")
    assert [(each["jpg"], each["cls"]) for each in packed] == [
        (each["image"], each["label"]) for each in read_all(source)
    ]
    manifest = json.loads((tmp_path / "train" / "shards.json").read_text())
    assert manifest["class_names"] == ["cat", "dog"]
    assert [entry["name"] for entry in manifest["shards"]][:2] == [
        "train-000000.tar",
        "train-000001.tar",
    ]
    assert sum(entry["samples"] for entry in manifest["shards"]) == 10
    with tarfile.open(tmp_path / "train" / "train-000000.tar") as tar:
        first = tar.next()
        assert first is not None
        assert (first.name, first.mtime, first.uid, first.uname) == ("cat/00.jpg", 0, 0, "")


def test_pictures_of_several_formats_and_equal_names(tmp_path: Path) -> None:
    source = write_photos(tmp_path / "photos", "cat", each=2)
    (source / "cat" / "00.png").write_bytes(make_jpeg(8, 8))
    (source / "cat" / "01.b.jpg").write_bytes(make_jpeg(9, 9))
    pack(source, tmp_path / "train", size=10**6)
    assert [each["image"] for each in read_all(tmp_path / "train")] == [
        each["image"] for each in read_all(source)
    ]
    with tarfile.open(tmp_path / "train" / "train-000000.tar") as tar:
        assert tar.getnames()[::2] == [
            "cat/00.image",
            "cat/00-2.image",
            "cat/01_b.image",
            "cat/01.image",
        ]


def test_tars_that_all_begin_at_the_same_key(tmp_path: Path) -> None:
    for name in "ab":
        write_shard(tmp_path / "tars" / f"{name}.tar", 1)
    pack(tmp_path / "tars", tmp_path / "joined", size=10**6)
    assert read_all(tmp_path / "joined") == read_all(tmp_path / "tars")


@pytest.mark.parametrize("format", ["tar", "parquet"])
def test_lines_of_json(tmp_path: Path, format: str) -> None:
    source = write_lines(tmp_path / "lines.jsonl", 40)
    pack(source, tmp_path / "rows", format, size=1000)
    expected = read_all(source)
    if format == "tar":
        expected = [
            {"text": each["text"], "label.json": each["label"], "vector.npy": each["vector"]}
            for each in expected
        ]
    assert read_all(tmp_path / "rows") == expected
    assert len(list((tmp_path / "rows").glob(f"*.{format}"))) > 1


def test_types_that_only_later_lines_show(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"a": None, "b": 1}, {"a": "x", "b": 2.5, "c": [[1, 2], [3, 4]]}]
    source = tmp_path / "lines.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    pack(source, tmp_path / "rows", size=1)
    assert len(list((tmp_path / "rows").glob("*.parquet"))) == 2
    assert read_all(tmp_path / "rows") == [{**lines[0], "c": None}, lines[1]]
    source.write_text('{"a": 1}\n{"a": "x"}\n{"a": 2}\n')
    text = refuse(source, tmp_path / "other")
    assert f"column 'a' from {source}, sample 0 on has values of several types" in text


def test_arrays_and_tables_keep_their_types(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(24, dtype=np.float32).reshape(4, 3, 2))
    pack(tmp_path / "rows.npy", tmp_path / "arrays")
    first = echelon.data.open(tmp_path / "arrays")[0]["data"]
    assert (first.dtype, first.tolist()) == (np.float32, [[0, 1], [2, 3], [4, 5]])
    table = pa.table({"n": pa.array([1, None, 3], pa.int16()), "x": [float("nan"), 0.5, 1.0]})
    (tmp_path / "table" / "year=2024").mkdir(parents=True)
    parquet.write_table(table, tmp_path / "table" / "year=2024" / "a.parquet")
    pack(tmp_path / "table", tmp_path / "tables")
    packed = parquet.read_table(tmp_path / "tables" / "tables-000000.parquet")
    assert packed.schema.names == ["year", "n", "x"]
    assert packed.schema.field("n").type == pa.int16()
    assert packed.column("n").to_pylist() == [1, None, 3]


def test_tars_as_parquet_keep_their_keys(tmp_path: Path) -> None:
    source = write_shard(tmp_path / "a.tar", 3)
    pack(source, tmp_path / "rows", "parquet")
    assert read_all(tmp_path / "rows") == [
        {"__key__": f"n{i:04}", **sample} for i, sample in enumerate(read_all(source))
    ]


@pytest.mark.parametrize("format", ["tar", "parquet"])
def test_the_same_source_gives_the_same_bytes(tmp_path: Path, format: str) -> None:
    source = write_shard(tmp_path / "a.tar", 12)
    for name in ("one", "two"):
        packing = ShardPacking(str(source), None, tmp_path / name, format, "x", 5000)
        assert len(list(packing.run(1))) > 1
    assert read_bytes(tmp_path / "one") == read_bytes(tmp_path / "two")


def test_shards_that_are_whole_are_kept(tmp_path: Path) -> None:
    source, folder = write_shard(tmp_path / "a.tar", 12), tmp_path / "train"
    pack(source, folder)
    before = read_bytes(folder)
    count = len(before) - 1
    assert pack(source, folder) == count
    (folder / "train-000001.tar").unlink()
    overwrite(folder / "train-000000.tar", b"n0000.jpg", b"x", skip=600)
    (folder / ".packing-train-000001.0123.tar").write_bytes(b"of a killed process")
    assert pack(source, folder) == count - 2
    assert read_bytes(folder) == before


def test_check_compares_shards_with_their_list(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    pack(write_shard(tmp_path / "a.tar", 12), folder)
    (folder / "train-000001.tar").unlink()
    overwrite(folder / "train-000000.tar", b"text 0", b"tixt 0")
    found = [str(bad) for each in FileCheck(str(folder), None).run(1) for bad in each.bad]
    assert found == [
        f"{folder}/train-000000.tar: its bytes are others than those of shards.json",
        f"{folder}/train-000001.tar: it is missing, and shards.json lists it",
    ]


def test_folders_of_others_are_not_touched(tmp_path: Path) -> None:
    source, folder = write_shard(tmp_path / "tars" / "a.tar", 3), tmp_path / "train"
    folder.mkdir()
    (folder / "notes.txt").touch()
    assert f"{folder} has other files: notes.txt" in refuse(source, folder)
    assert list(folder.iterdir()) == [folder / "notes.txt"]
    pack(source, tmp_path / "packed")
    assert "shard_bytes was 5000" in refuse(source, tmp_path / "packed", size=6000)
    os.utime(source, ns=(1, 1))
    assert "its source is another one, or changed" in refuse(source, tmp_path / "packed")
    assert "is in the source" in refuse(source.parent, source.parent / "packed")


def test_a_sample_that_cannot_be_read_ends_it(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "lines.jsonl", 6)
    overwrite(source, b'"text 3"', b"?")
    for format in ("tar", "parquet"):
        text = refuse(source, tmp_path / format, format)
        assert f"{source}, sample 3: it is not JSON" in text
        assert "echelon data check" in text
    assert sorted(read_bytes(tmp_path / "tar")) == ["shards.json", "tar-000000.tar"]


def test_a_picture_that_is_gone_is_named(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", "cat")
    (tmp_path / "photos" / "cat" / "x.jpg").symlink_to("nothing.jpg")
    with pytest.raises(EchelonError, match=r"cat/x\.jpg, sample 0: it cannot be read: no such"):
        pack(tmp_path / "photos", tmp_path / "out")


@pytest.mark.slow
def test_a_killed_packing_continues(tmp_path: Path) -> None:
    source, folder = write_shard(tmp_path / "a.tar", 200), tmp_path / "train"
    words = ["data", "pack", str(source), "-o", str(folder), "--shard-size", "1"]
    program = [sys.executable, "-m", "echelon", *words, "--procs", "2", "--json"]
    started = subprocess.Popen(program, stdout=subprocess.PIPE)
    until(lambda: len(list(folder.glob("train-*.tar"))) >= 5, 300, "some shards")
    started.send_signal(signal.SIGKILL)
    started.communicate()
    listed = json.loads((folder / "shards.json").read_text())
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout)["kept"] == len(listed["shards"])
    pack(source, tmp_path / "whole" / "train", size=1)
    assert read_bytes(folder) == read_bytes(tmp_path / "whole" / "train")
    assert read_all(folder) == read_all(source)
