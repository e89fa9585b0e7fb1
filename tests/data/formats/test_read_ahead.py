"""Chunks are read into the system's cache before their samples are asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from sample_files import write_lines, write_photos, write_shard

import echelon
from echelon.data.formats.jsonl_files import find_lines
from echelon.data.formats.read_ahead import _is_cached, read_ahead

MB = 1 << 20
WAIT_S = 30.0


def write_cold(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    drop_from_cache(file)
    return file


def drop_from_cache(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    os.fsync(handle)  # what is not written yet stays
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def is_cached(file: Path, start: int, stop: int) -> bool:
    handle = os.open(file, os.O_RDONLY)
    try:
        return _is_cached(handle, start, stop)
    finally:
        os.close(handle)


def wait_until(holds: Callable[[], bool]) -> bool:
    limit = time.monotonic() + WAIT_S
    while not holds() and time.monotonic() < limit:
        time.sleep(0.01)
    return holds()


@pytest.fixture
def cold_file(tmp_path: Path) -> Path:
    file = write_cold(tmp_path / "data.bin", bytes(16 * MB))
    if is_cached(file, 8 * MB, 9 * MB):
        pytest.skip("this file system keeps its files in memory")
    return file


def test_bytes_are_read_without_being_asked_for(cold_file: Path) -> None:
    read_ahead(cold_file, 8 * MB, 12 * MB)
    assert wait_until(lambda: is_cached(cold_file, 8 * MB, 12 * MB))


def test_what_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    read_ahead(tmp_path / "missing", 0, 10)
    (tmp_path / "empty").touch()
    read_ahead(tmp_path / "empty")
    read_ahead(tmp_path / "empty", 0, 10)


def record_ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the system is asked to read."""
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _, start, length, __: ranges.append((start, start + length))
    )
    return ranges


def refuse(*_: Any) -> int:
    raise BlockingIOError


def count_bytes(ranges: list[tuple[int, int]]) -> int:
    assert all(start < stop for start, stop in ranges)
    return sum(stop - start for start, stop in ranges)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, tuple[Any, int]]:
    """A data set of each format, and the bytes that its samples take in the files, about."""
    rows = np.arange(300_000, dtype=np.int32).reshape(3000, 100)
    np.save(tmp_path / "rows.npy", rows)
    rows.astype(np.uint16).tofile(tmp_path / "tokens.bin")
    table = pa.table({"x": rows[:, 0], "y": rows[:, 1]})
    pa.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=1000)
    pa.feather.write_feather(table, tmp_path / "t.arrow", "uncompressed", chunksize=1000)
    shard = write_shard(tmp_path / "s.tar", 20)
    lines = write_lines(tmp_path / "lines.jsonl", 100)
    photos = write_photos(tmp_path / "photos", "cat", "dog")
    spans = find_lines(lines).spans
    return {
        "npy": (echelon.data.open(tmp_path / "rows.npy"), rows.nbytes),
        "tokens": (echelon.data.open_tokens(tmp_path / "tokens.bin", length=100), 2 * rows.size),
        "parquet": (echelon.data.open(tmp_path / "t.parquet"), table.nbytes),
        "arrow": (echelon.data.open(tmp_path / "t.arrow"), table.nbytes),
        "tar": (echelon.data.open(shard), shard.stat().st_size),
        "jsonl": (echelon.data.open(lines), int(spans.sum())),
        "photos": (
            echelon.data.open(photos),
            sum(file.stat().st_size for file in photos.rglob("*.jpg")),
        ),
    }


def test_every_format_names_the_bytes_of_its_chunks(
    files: dict[str, tuple[Any, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = record_ranges(monkeypatch)
    for name, (dataset, size_bytes) in files.items():
        ranges.clear()
        dataset.prefetch_chunks(range(len(dataset.chunks.sizes_bytes)))
        asked = count_bytes(ranges)
        assert 0.5 * size_bytes < asked < 1.5 * size_bytes + 8192, name


def test_a_file_that_is_gone_is_an_error_of_reading_alone(
    files: dict[str, tuple[Any, int]], tmp_path: Path
) -> None:
    for file in tmp_path.rglob("*"):
        if file.is_file():
            file.unlink()
    for dataset, _ in files.values():
        dataset.prefetch_chunks(range(len(dataset.chunks.sizes_bytes)))
