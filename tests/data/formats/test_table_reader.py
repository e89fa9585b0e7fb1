"""Rows of tables that are packed, kept and dropped are those that pyarrow reads."""

from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import echelon
from echelon.data.formats import arrow_files, table_reader
from echelon.data.formats.reader import BadSampleError
from echelon.data.formats.table_reader import LoadedPiece, PieceCache, TableReader

ROWS = 160


def make_table(rows: int = ROWS) -> pa.Table:
    rng = np.random.default_rng(0)
    texts = ["ä" * int(count) for count in rng.integers(0, 20, rows)]
    return pa.table(
        {
            "flag": rng.integers(0, 2, rows) == 1,
            "small": rng.integers(-9, 9, rows).astype(np.int8),
            "half": rng.standard_normal(rows).astype(np.float16),
            "x": rng.standard_normal(rows),
            "unsigned": rng.integers(0, 1 << 63, rows).astype(np.uint64),
            "text": texts,
            "large": pa.array(texts[::-1], pa.large_string()),
            "kind": pa.array([text[:3] for text in texts]).dictionary_encode(),
            "maybe": pa.array([None if 40 < n < 60 else n for n in range(rows)], pa.int32()),
            "perhaps": [None if n == 70 else f"text number {n}" for n in range(rows)],
            "list": [[n] * (n % 3) for n in range(rows)],
            "wide": pa.array([[n, 2, 3] for n in range(rows)], pa.list_(pa.float32(), 3)),
        }
    )


def as_plain(values: Any) -> list[Any]:
    return [each.tolist() if isinstance(each, np.ndarray | np.generic) else each for each in values]


def read_plain(dataset: Any, rows: Any) -> dict[str, list[Any]]:
    columns = dataset.reader.read_columns(np.asarray(rows, np.int64))
    return {name: as_plain(values) for name, values in columns.items()}


@pytest.mark.parametrize("kind", ["parquet", "uncompressed", "lz4"])
def test_any_rows_of_all_kinds_of_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    table = make_table()
    if kind == "parquet":
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=30)
    else:
        pyarrow.feather.write_feather(table, tmp_path / "a.arrow", kind, chunksize=30)
    rng = np.random.default_rng(1)
    for cache_bytes in (table_reader.CACHE_BYTES, 12_000, 1):
        monkeypatch.setattr(table_reader, "CACHE_BYTES", cache_bytes)
        dataset = echelon.data.open(tmp_path)
        for rows in (range(ROWS), rng.integers(0, ROWS, 24), [69, 70], []):
            found = read_plain(dataset, rows)
            assert found == table.take(pa.array(rows, pa.int64())).to_pydict(), cache_bytes
        again = pickle.loads(pickle.dumps(dataset))
        assert read_plain(again, [3, 150]) == table.take([3, 150]).to_pydict()


def test_what_is_kept_of_packed_rows_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_reader, "CACHE_BYTES", 3_000)
    table = make_table().select(["x", "unsigned", "text", "small"])
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    dataset = echelon.data.open(tmp_path)
    assert isinstance(dataset.reader, TableReader)
    loaded, order = dataset.reader._loaded, np.random.default_rng(0)
    for first in (*range(0, ROWS, 20), *range(ROWS - 40, 0, -20)):
        rows = order.permutation(np.arange(first, first + 20))
        assert read_plain(dataset, rows) == table.take(pa.array(rows)).to_pydict()
        assert loaded._cache.size_bytes <= 3_000
        assert not loaded.is_complete
    assert loaded.max_rows < ROWS
    assert len(loaded._buffers.list_all()) <= len(loaded._cache) + 1, "numbers are used again"


def test_the_last_used_pieces_are_kept() -> None:
    cache = PieceCache(max_bytes=100)
    for piece in range(3):
        cache.put(piece, LoadedPiece(), 40)
        assert cache.get(0) is not None
    assert (cache.size_bytes, cache.is_over_full) == (120, True)
    assert [cache.pop_oldest()[0], cache.size_bytes, cache.is_over_full] == [1, 80, False]
    assert [piece for piece in range(3) if cache.get(piece) is not None] == [0, 2]
    cache.put(9, LoadedPiece(), 1000)
    assert [cache.pop_oldest()[0], cache.pop_oldest()[0]] == [0, 2]
    assert not cache.is_over_full, "one that is larger than all is kept alone"
    assert (len(cache), cache.size_bytes) == (1, 1000)


def test_the_memory_of_a_reader_goes_with_it(tmp_path: Path) -> None:
    pq.write_table(make_table(), tmp_path / "a.parquet")
    dataset = echelon.data.open(tmp_path)
    batches = dataset.read_batches(np.arange(20), [10, 10])
    reader = weakref.ref(dataset.reader)
    gc.disable()
    try:
        del dataset, batches
        assert reader() is None, "without a look for circles, which may come late"
    finally:
        gc.enable()


def test_a_file_without_values_of_a_column(tmp_path: Path) -> None:
    """Its column has a type of its own, and fits any other."""
    pq.write_table(pa.table({"i": [1, 2], "text": ["a", "b"]}), tmp_path / "a.parquet")
    pq.write_table(
        pa.table({"i": [3], "text": pa.nulls(1)}), tmp_path / "b.parquet", store_schema=True
    )
    dataset = echelon.data.open(tmp_path)
    assert read_plain(dataset, [2, 0, 1]) == {"i": [3, 1, 2], "text": [None, "a", "b"]}


def test_mapped_files_are_packed_where_all_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table().select(["x", "unsigned"])
    for kind, packed in (("uncompressed", set()), ("lz4", {"x", "unsigned"})):
        path = tmp_path / f"{kind}.arrow"
        pyarrow.feather.write_feather(table, path, kind, chunksize=40)
        assert set(get_reader(path)._packed) == {"x", "unsigned"}
        with monkeypatch.context() as patch:
            patch.setattr(arrow_files, "CACHE_BYTES", 2000)
            assert set(get_reader(path)._packed) == packed
            patch.setattr(arrow_files, "MAX_PIECE_BYTES", 500)
            assert not get_reader(path)._packed


def get_reader(path: Path) -> TableReader:
    reader = echelon.data.open(path).reader
    assert isinstance(reader, TableReader)
    return reader


def test_bytes_that_are_no_text_are_a_bad_sample(tmp_path: Path) -> None:
    data = pa.array([b"an ordinary text", b"\xff\xfe is no text at all", b"and one more of them"])
    texts = pa.Array.from_buffers(pa.string(), 3, data.buffers())
    pq.write_table(pa.table({"i": [0, 1, 2], "text": texts}), tmp_path / "a.parquet")
    dataset = echelon.data.open(tmp_path)
    assert dataset[2]["text"] == "and one more of them"
    batches = dataset.read_batches(np.array([0, 2, 1]), [2, 1])
    assert batches is not None
    assert next(batches)["text"] == ["an ordinary text", "and one more of them"]
    with pytest.raises(BadSampleError, match=r"a\.parquet, sample 1: text cannot be read: 'utf-8'"):
        next(batches)
    with pytest.raises(BadSampleError, match=r"a\.parquet, sample 1: text cannot be read: 'utf-8'"):
        dataset.read_rows([2, 1, 0])
