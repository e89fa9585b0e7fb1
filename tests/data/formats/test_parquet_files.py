"""Rows of Parquet files: any of them, of chosen columns, as other readers give them."""

from __future__ import annotations

import pickle
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import default_collate

import echelon
from echelon.data.formats import arrow_columns
from echelon.data.formats.reader import BadSampleError
from echelon.errors import EchelonError

ROWS = 23


def make_table(rows: int = ROWS, first: int = 0) -> pa.Table:
    numbers = range(first, first + rows)
    return pa.table(
        {
            "i": pa.array(numbers, pa.int32()),
            "x": pa.array([n / 2 for n in numbers], pa.float32()),
            "flag": pa.array([n % 3 == 0 for n in numbers]),
            "text": [f"ü{n}" for n in numbers],
            "kind": pa.array([f"k{n % 2}" for n in numbers]).dictionary_encode(),
            "vector": pa.array([[n, n + 1] for n in numbers], pa.list_(pa.int16(), 2)),
            "ragged": pa.array([[n] * (n % 3) for n in numbers], pa.list_(pa.int64())),
            "matrix": pa.array([[[n, 0], [1, 2]] for n in numbers], pa.list_(pa.list_(pa.int8()))),
            "maybe": pa.array([None if n % 5 == 0 else n for n in numbers], pa.int64()),
            "raw": [b"\0%d" % n for n in numbers],
            "inner": [{"a": n, "b": [n]} for n in numbers],
            "day": [date(2024, 1, 1 + n % 28) for n in numbers],
        }
    )


def as_plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def refuse(path: Path, **options: Any) -> list[str]:
    with pytest.raises(EchelonError) as caught:
        echelon.data.open(path, **options)
    return [fault.what for fault in caught.value.faults]


def test_rows_of_several_files_and_groups(tmp_path: Path) -> None:
    pq.write_table(make_table(16), tmp_path / "a.parquet", row_group_size=5)
    pq.write_table(make_table(0), tmp_path / "b.parquet")
    pq.write_table(make_table(ROWS - 16, 16), tmp_path / "c.parquet")
    dataset = echelon.data.open(tmp_path)
    wanted = make_table().to_pylist()
    assert [{name: as_plain(v) for name, v in each.items()} for each in dataset] == wanted
    rows = [22, 3, 3, 0, 17, 9]
    found = dataset.__getitems__(rows)
    assert [as_plain(each["ragged"]) for each in found] == [wanted[n]["ragged"] for n in rows]
    assert dataset.chunks.starts.tolist() == [0, 5, 10, 15, 16, 23]
    assert str(dataset.locate(17)) == f"{tmp_path / 'c.parquet'}, sample 1"
    again = pickle.loads(pickle.dumps(dataset))
    assert as_plain(again[-1]["maybe"]) == 22


def test_types_are_kept_and_batches_are_those_of_default_collate(tmp_path: Path) -> None:
    pq.write_table(make_table(), tmp_path / "a.parquet", row_group_size=7)
    columns = ["x", "i", "flag", "text", "kind", "vector"]
    dataset = echelon.data.open(tmp_path / "a.parquet", columns=columns)
    rows = [22, 0, 13, 14]
    [batch] = dataset.read_batches(np.array(rows), [len(rows)]) or []
    collated = default_collate(dataset.__getitems__(rows))
    assert list(batch) == columns
    for name in columns:
        if isinstance(collated[name], torch.Tensor):
            assert torch.equal(batch[name], collated[name])
            assert batch[name].dtype == collated[name].dtype
        else:
            assert batch[name] == collated[name]
    dtypes = (batch["x"].dtype, batch["i"].dtype, batch["vector"].dtype)
    assert dtypes == (torch.float32, torch.int32, torch.int16)
    sample = echelon.data.open(tmp_path / "a.parquet")[1]
    assert (sample["matrix"].dtype, sample["ragged"].dtype) == (np.int8, np.int64)


def test_a_null_is_none(tmp_path: Path) -> None:
    pq.write_table(make_table(), tmp_path / "a.parquet")
    dataset = echelon.data.open(tmp_path / "a.parquet", columns=["maybe"])
    assert dataset[5]["maybe"] is None
    assert dataset[6]["maybe"].dtype == np.int64
    assert dataset.read_batches(np.array([5, 6]), [2]) is None
    again = echelon.data.open(tmp_path / "a.parquet", columns=["maybe"])
    [batch] = again.read_batches(np.array([7, 6]), [2]) or []
    assert batch is not None
    assert torch.equal(batch["maybe"], torch.tensor([7, 6]))


def test_hive_partitions_are_columns(tmp_path: Path) -> None:
    for year in (2023, 2024):
        for name in ("a%20b", "__HIVE_DEFAULT_PARTITION__"):
            folder = tmp_path / f"year={year}" / f"name={name}"
            folder.mkdir(parents=True)
            pq.write_table(pa.table({"i": [year, year + 1]}), folder / "0.parquet")
    samples = list(echelon.data.open(tmp_path))
    assert [int(each["year"]) for each in samples] == [2023] * 4 + [2024] * 4
    assert [each["name"] for each in samples] == [None, None, "a b", "a b"] * 2
    assert list(echelon.data.open(tmp_path, columns=["year"])[0]) == ["year"]
    one = echelon.data.open(f"{tmp_path}/year=*/name=a%20b/*.parquet")
    assert sorted(one.column_names) == ["i", "name", "year"]
    assert list(echelon.data.open(tmp_path / "year=2023" / "name=a%20b")[0]) == ["i"]
    pq.write_table(pa.table({"i": [1]}), tmp_path / "other.parquet")
    assert "is in partitions by" in refuse(tmp_path)[0]


def test_large_row_groups_are_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_columns, "MAX_PIECE_BYTES", 300)
    table = pa.table({"i": range(200), "text": [str(n) for n in range(200)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=150)
    dataset = echelon.data.open(tmp_path)
    assert len(dataset.chunks.sizes_bytes) > 8
    assert dataset.chunks.sizes_bytes.max() <= 320
    assert [(int(each["i"]), each["text"]) for each in dataset] == [(n, str(n)) for n in range(200)]


def test_all_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    pq.write_table(make_table(), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-30])
    (tmp_path / "c.parquet").touch()
    (tmp_path / "d.parquet").write_text("no table at all, but a text")
    cut, empty, text = refuse(tmp_path)
    assert cut.startswith(f"{tmp_path / 'b.parquet'} is not a complete Parquet file: ")
    assert empty == f"{tmp_path / 'c.parquet'} is empty (0 bytes)"
    assert text.startswith(f"{tmp_path / 'd.parquet'} is not a complete Parquet file: ")


def test_files_with_other_columns_or_types(tmp_path: Path) -> None:
    a, b, c = (tmp_path / f"{name}.parquet" for name in "abc")
    pq.write_table(pa.table({"i": [1], "x": [1.0]}), a)
    pq.write_table(pa.table({"i": [1], "y": [1.0]}), b)
    pq.write_table(pa.table({"i": ["1"], "x": [1.0]}), c)
    assert refuse(tmp_path) == [f"{b} has other columns than {a}: it has no 'x', it has 'y'"]
    assert refuse(tmp_path, columns=["x"]) == [f"columns has 'x', which {b} does not have"]
    assert refuse(tmp_path, columns=["i"]) == [f"column 'i' is string in {c} and int64 in {a}"]
    assert len(echelon.data.open([a, c], columns=["x"])) == 2


def test_a_damaged_row_group_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"i": range(1000)}), path, compression="zstd", row_group_size=500)
    dataset = echelon.data.open(path)
    data = bytearray(path.read_bytes())
    data[40:60] = bytes(20)
    path.write_bytes(bytes(data))
    with pytest.raises(BadSampleError, match=r"a\.parquet, sample 0: its row group 0 cannot be"):
        dataset[3]
    assert int(dataset[700]["i"]) == 700


def test_page_checksums_are_compared_where_a_file_has_them(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"i": range(1000)})
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(table, path, **options)
    data = bytearray(path.read_bytes())
    data[4000] ^= 1  # within the numbers: nothing but a checksum can see it
    path.write_bytes(bytes(data))
    with pytest.raises(BadSampleError, match=r"a\.parquet, sample 0: its row group 0 .*CRC"):
        echelon.data.open(path)[3]


def test_nanoseconds_are_kept(tmp_path: Path) -> None:
    moment = 1_700_000_000_123_456_789
    table = pa.table(
        {
            "at": pa.array([moment, None], pa.timestamp("ns")),
            "took": pa.array([7, 8], pa.duration("ns")),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    first, second = echelon.data.open(tmp_path)
    assert first == {"at": np.datetime64(moment, "ns"), "took": np.timedelta64(7, "ns")}
    assert second["at"] is None


def test_a_value_that_python_cannot_have_is_a_bad_sample(tmp_path: Path) -> None:
    days = pa.array([0, 10**7, 1], pa.int32()).cast(pa.date32())  # the second is in the year 29349
    pq.write_table(pa.table({"i": [0, 1, 2], "day": days}), tmp_path / "a.parquet")
    dataset = echelon.data.open(tmp_path)
    assert dataset[2]["day"] == date(1970, 1, 2)
    with pytest.raises(BadSampleError, match=r"a\.parquet, sample 1: day cannot be read: "):
        dataset.read_rows([2, 1, 0])


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    assert refuse(path) == [f"{path} has two columns 'a'"]
