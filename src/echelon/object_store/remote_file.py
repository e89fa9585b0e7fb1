"""An object as a file that is read at any place, through blocks that are kept on a local disk."""

from __future__ import annotations

import contextlib
import functools
import io
import mmap
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from echelon.errors import EchelonError
from echelon.object_store.block_cache import (
    BLOCK_BYTES,
    FOLDER_VARIABLE,
    LIMIT_VARIABLE,
    WHOLE_OBJECT,
    BlockCache,
    get_block_range,
    make_cache_error,
    open_cache,
)
from echelon.object_store.client import send_request
from echelon.object_store.store_errors import ObjectStoreError, StoreProblem
from echelon.object_store.urls import ObjectInfo, parse_url

_OPEN_BLOCKS = 160
"""That a process keeps mapped: the blocks of two windows of the order, and some."""
_OPEN_TRIES = 5
_READ_BYTES = 1 << 20
_STREAM_AHEAD_BYTES = 64 << 20


@dataclass(frozen=True)
class RemoteFile:
    """An object, with as much of a Path as readers of files use.

    It holds no connection: it can be pickled, forked and compared. All that reads raises
    ObjectStoreError, also where the object is another one by now.
    """

    info: ObjectInfo

    def __str__(self) -> str:
        return self.info.url

    def __lt__(self, other: RemoteFile) -> bool:
        return self.info < other.info

    @property
    def size(self) -> int:
        return self.info.size

    @property
    def name(self) -> str:
        return parse_url(self.info.url).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def relative_to(self, folder: os.PathLike[str] | str) -> PurePosixPath:
        """Return the path from a folder of the bucket, which is named by its key, to here."""
        return PurePosixPath(parse_url(self.info.url).key).relative_to(folder)

    def is_dir(self) -> bool:
        return False

    def open(self, mode: str = "rb", buffering: int = _READ_BYTES) -> io.BufferedReader:
        """Return a file object."""
        assert mode == "rb"
        return io.BufferedReader(_RemoteStream(self), max(buffering, 1))

    def read_bytes(self) -> bytes:
        return self.read_at(0, self.size)

    def read_at(self, offset: int, size: int) -> bytes:
        """Return bytes from an offset on, fewer only where the object ends."""
        return b"".join(self._read_pieces(offset, size))

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill a buffer with bytes from an offset on, and return how many there were."""
        done = 0
        for piece in self._read_pieces(offset, len(buffer)):
            buffer[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def _read_pieces(self, offset: int, size: int) -> Iterator[memoryview]:
        stop = min(offset + size, self.size)
        if offset < stop and offset // BLOCK_BYTES < (stop - 1) // BLOCK_BYTES:
            self.fetch_ranges([(offset, stop)])
        return self.map_ranges([(offset, stop)])

    def map_ranges(self, ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Yield the bytes between offsets, each in as many pieces as it has blocks. They are valid
        until the next ones are asked for."""
        cache = _get_cache()
        number, view = -1, memoryview(b"")
        for offset, stop in ranges:
            while offset < stop:
                if offset // BLOCK_BYTES != number:
                    number = offset // BLOCK_BYTES
                    view = memoryview(_open_block(cache, self.info, number).content)
                low = offset - number * BLOCK_BYTES
                piece = view[low : low + stop - offset]
                offset += len(piece)
                yield piece

    def prefetch_after(self, offset: int) -> None:
        """Have what follows an offset brought to the disk, for a reader that goes through all."""
        self.prefetch(offset, offset + _STREAM_AHEAD_BYTES)

    def fetch_whole(self) -> Path:
        """Return a file on the local disk with all of the object, to be opened at once: it may be
        removed later, which does not hurt those who have it open."""
        path = _get_cache().get_path(self.info, WHOLE_OBJECT)
        _open_block(_get_cache(), self.info, WHOLE_OBJECT)
        return path

    def fetch_ranges(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Wait until the bytes between some offsets are on the disk; several blocks are fetched at
        once."""
        fetch_blocks({self: _list_blocks(self.info, ranges)})

    def prefetch(self, start: int = 0, stop: int | None = None) -> None:
        """Have bytes brought to the disk, without waiting for them. Raises nothing: where they
        cannot be fetched, reading says why."""
        with contextlib.suppress(EchelonError):
            stop = self.size if stop is None else stop
            if missing := _list_missing(self.info, _list_blocks(self.info, [(start, stop)])):
                send_request("prefetch", *self.info, missing)


@dataclass(frozen=True)
class RemoteFolder(RemoteFile):
    """All objects below an address, as they were listed."""

    files: tuple[RemoteFile, ...] = ()

    def is_dir(self) -> bool:
        return True


def fetch_blocks(wanted: Mapping[RemoteFile, Iterable[int]]) -> None:
    """Wait until blocks of objects are on the disk; all that are missing are fetched at once."""
    missing = {file: _list_missing(file.info, numbers) for file, numbers in wanted.items()}
    if sum(map(len, missing.values())) > 1:  # one is fetched when it is opened
        _request_blocks([[*file.info, numbers] for file, numbers in missing.items()])


def _request_blocks(wanted: list[Any]) -> None:
    try:
        send_request("fetch", wanted)
    except ObjectStoreError as error:
        if error.problem is not StoreProblem.LOCAL_DISK or not _open_blocks:
            raise
        # Blocks that were removed keep their place on the disk while they are mapped.
        _open_blocks.clear()
        send_request("fetch", wanted)


def _list_blocks(info: ObjectInfo, ranges: Iterable[tuple[int, int]]) -> set[int]:
    numbers: set[int] = set()
    for start, stop in ranges:
        if start < min(stop, info.size):
            last = (min(stop, info.size) - 1) // BLOCK_BYTES
            numbers.update(range(start // BLOCK_BYTES, last + 1))
    return numbers


def _list_missing(info: ObjectInfo, numbers: Iterable[int]) -> list[int]:
    """Return the blocks that are not on the disk, in their order."""
    cache = _get_cache()
    return [
        number
        for number in sorted(numbers)
        if (cache, info, number) not in _open_blocks
        and not os.path.exists(cache.get_path(info, number))
    ]


class _OpenBlock(NamedTuple):
    """A block in memory. It is unmapped when nobody uses it any more, and can be read after it was
    removed from the disk."""

    content: mmap.mmap


_open_blocks: OrderedDict[tuple[BlockCache, ObjectInfo, int], _OpenBlock] = OrderedDict()
"""Those that were used last, with the last one at the end."""


def _get_cache() -> BlockCache:
    return _find_cache(os.environ.get(FOLDER_VARIABLE, ""), os.environ.get("ECHELON_CACHE", ""))


@functools.lru_cache(4)
def _find_cache(*_: str) -> BlockCache:
    return open_cache(os.environ)


def _open_block(cache: BlockCache, info: ObjectInfo, number: int) -> _OpenBlock:
    """Return a block, which is fetched if it is not there."""
    key = (cache, info, number)
    if block := _open_blocks.get(key):
        with contextlib.suppress(KeyError):  # another thread has dropped it
            _open_blocks.move_to_end(key)
        return block
    block = _map_block(cache, info, number)
    _open_blocks[key] = block
    if len(_open_blocks) > _OPEN_BLOCKS:
        with contextlib.suppress(KeyError):
            _open_blocks.popitem(last=False)
    return block


def _map_block(cache: BlockCache, info: ObjectInfo, number: int) -> _OpenBlock:
    path = cache.get_path(info, number)
    begin, end = get_block_range(info, number)
    for _ in range(_OPEN_TRIES):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            _request_blocks([[*info, [number]]])
            continue
        except OSError as error:
            raise make_cache_error(cache, info, error) from error
        try:
            if os.fstat(handle).st_size == end - begin:
                with contextlib.suppress(OSError):  # a cache of somebody else
                    os.utime(handle)
                return _OpenBlock(mmap.mmap(handle, end - begin, prot=mmap.PROT_READ))
        finally:
            os.close(handle)
        with contextlib.suppress(OSError):
            path.unlink()  # what a power cut has left
    what = f"{info.url} cannot be kept in {cache.folder}: blocks are removed as soon as they come"
    raise ObjectStoreError(StoreProblem.LOCAL_DISK, what, f"set {LIMIT_VARIABLE} to more")


class _RemoteStream(io.RawIOBase):
    """A RemoteFile with a position."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = self._file.read_into(view, self._position)
        self._position += count
        return count
