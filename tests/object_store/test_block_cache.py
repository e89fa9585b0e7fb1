from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.errors import EchelonError
from echelon.object_store.block_cache import (
    BLOCK_BYTES,
    BlockCache,
    open_cache,
    split_neighbours,
)
from echelon.object_store.urls import ObjectInfo

INFO = ObjectInfo("s3://bucket/a.tar", 100, '"etag"')


def test_a_block_is_fetched_once_by_many(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "blocks", 1000)
    fetched = []

    def fetch() -> list[bytes]:
        fetched.append(1)
        return [b"ab", b"c"]

    threads = [threading.Thread(target=cache.store_block, args=(INFO, 0, fetch)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == [1]
    assert cache.get_path(INFO, 0).read_bytes() == b"abc"
    assert cache.get_path(INFO._replace(etag='"other"'), 0) != cache.get_path(INFO, 0)
    assert not list(tmp_path.rglob("*.lock"))


def test_the_blocks_that_were_opened_longest_ago_are_removed(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "blocks", 50)
    for number in range(5):
        cache.store_block(INFO, number, lambda: [bytes(10)])
        os.utime(cache.get_path(INFO, number), (number, number))
    os.utime(cache.get_path(INFO, 0), (9, 9))
    cache.store_block(INFO, 5, lambda: [bytes(10)])
    kept = [number for number in range(6) if cache.get_path(INFO, number).exists()]
    assert kept == [0, 3, 4, 5]


def test_a_full_disk_is_made_room_on_once_and_then_said(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "blocks", 1000)
    for number in range(4):
        cache.store_block(INFO, number, lambda: [bytes(10)])
    failures = 1

    def fetch() -> Iterator[bytes]:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        yield bytes(10)

    cache.store_block(INFO, 4, fetch)
    assert cache.get_path(INFO, 4).exists()
    assert sum(cache.get_path(INFO, number).exists() for number in range(4)) == 2
    failures = 2
    with pytest.raises(EchelonError) as raised:
        cache.store_block(INFO, 5, fetch)
    what = f"s3://bucket/a.tar cannot be kept in {tmp_path}/blocks: no space left on device"
    assert raised.value.faults[0].what == what
    assert not cache.get_path(INFO, 5).exists()


def test_neighbours_are_fetched_in_one_piece(tmp_path: Path) -> None:
    content = os.urandom(4 * BLOCK_BYTES + 5)
    info = INFO._replace(size=len(content))
    cache = BlockCache(tmp_path / "blocks", 1 << 30)
    asked: list[tuple[int, int]] = []

    def fetch(begin: int, end: int) -> Iterator[bytes]:
        asked.append((begin, end))
        for at in range(begin, end, 1_000_003):
            yield content[at : min(at + 1_000_003, end)]

    cache.store_block(info, 2, lambda: [content[2 * BLOCK_BYTES : 3 * BLOCK_BYTES]])
    assert cache.store_neighbours(info, range(5), fetch) == []
    assert asked == [(0, 2 * BLOCK_BYTES), (3 * BLOCK_BYTES, len(content))]
    assert b"".join(cache.get_path(info, n).read_bytes() for n in range(5)) == content
    assert not list(tmp_path.rglob("*.lock"))
    assert cache.store_neighbours(info, range(5), fetch) == []
    assert len(asked) == 2


def test_neighbours_that_others_fetch_or_that_do_not_fit_are_left(tmp_path: Path) -> None:
    info = INFO._replace(size=3 * BLOCK_BYTES)
    cache = BlockCache(tmp_path / "blocks", 1 << 30)
    held, released = threading.Event(), threading.Event()

    def fetch_slowly() -> list[bytes]:
        held.set()
        assert released.wait(60)
        return [bytes(BLOCK_BYTES)]

    other = threading.Thread(target=cache.store_block, args=(info, 0, fetch_slowly))
    other.start()
    assert held.wait(60)

    def fetch(begin: int, end: int) -> Iterator[bytes]:
        yield bytes(BLOCK_BYTES + 7)
        raise OSError(errno.ENOSPC, "No space left on device")

    assert cache.store_neighbours(info, [0, 1, 2], fetch) == [0, 2]
    released.set()
    other.join()
    kept = [number for number in range(3) if cache.get_path(info, number).exists()]
    assert kept == [0, 1]
    assert not list(tmp_path.rglob("*.lock"))


def test_blocks_are_split_where_they_do_not_follow_one_another() -> None:
    assert split_neighbours([0, 1, 2, 4, 7, 8], 2) == [[0, 1], [2], [4], [7, 8]]


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    default = open_cache({"ECHELON_CACHE": str(tmp_path)})
    assert default.folder == tmp_path / "objects"
    assert 0 < default.limit_bytes <= 100_000_000_000
    set_cache = open_cache({"ECHELON_DATA_CACHE": "/scratch/me", "ECHELON_DATA_CACHE_GB": "0.5"})
    assert (set_cache.folder, set_cache.limit_bytes) == (Path("/scratch/me"), 500_000_000)
    with pytest.raises(EchelonError, match="ECHELON_DATA_CACHE_GB=much"):
        open_cache({"ECHELON_CACHE": str(tmp_path), "ECHELON_DATA_CACHE_GB": "much"})
