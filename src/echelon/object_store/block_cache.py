"""Blocks of objects on a local disk, shared by all processes of a machine.

    ECHELON_DATA_CACHE/<object>/<number>     4 MB of an object, the last one shorter
    ECHELON_DATA_CACHE/usage                 the bytes of all blocks; locked while it is changed

An object is named by its address, size and ETag, so one that changed is another one. A block is
complete when it has its name. Whoever fetches it holds a lock on it, so that it is fetched once. If
all together are more than the limit, those that were opened longest ago are removed. A process that
has one open goes on reading it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, Fault
from echelon.object_store.store_errors import ObjectStoreError, StoreProblem
from echelon.object_store.urls import ObjectInfo
from echelon.utils.cache_root import get_cache_root
from echelon.utils.files import replace_file
from echelon.utils.locks import FileLock, LocksUnsupportedError
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.trust import make_trusted_folder

BLOCK_BYTES = 4 << 20
"""As the chunks of files that are read together. A request of less waits more than it transfers."""
WHOLE_OBJECT = -1
"""In the place of the number of a block: for what is mapped into memory as one file."""
FOLDER_VARIABLE = "ECHELON_DATA_CACHE"
LIMIT_VARIABLE = "ECHELON_DATA_CACHE_GB"
_DEFAULT_LIMIT_BYTES = 100_000_000_000
_USAGE_NAME = "usage"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_KEPT_SHARE = 0.9
"""Of the limit, after blocks were removed: not after every block again."""


class BlockCache:
    """The blocks in one folder."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes

    def get_path(self, info: ObjectInfo, number: int) -> Path:
        """Return where a block is, if it is there; of WHOLE_OBJECT, the object in one file."""
        name = "whole" if number == WHOLE_OBJECT else f"{number:06x}"
        return self.folder / _name_object(info) / name

    def store_block(
        self, info: ObjectInfo, number: int, fetch: Callable[[], Iterable[Any]]
    ) -> None:
        """Fetch a block unless it is there; `fetch` returns its parts. While another process
        fetches it, wait for it. Raises ObjectStoreError."""
        path = self.get_path(info, number)
        if path.exists():
            return
        try:
            self._make_folder(path.parent)
            with _claim_block(path, may_wait=True) or contextlib.nullcontext():
                if not path.exists():
                    self._write(path, fetch)
        except OSError as error:
            raise make_cache_error(self, info, error) from error

    def store_neighbours(
        self,
        info: ObjectInfo,
        numbers: Sequence[int],
        fetch: Callable[[int, int], Iterable[Any]],
    ) -> list[int]:
        """Fetch blocks that follow one another, those that are not there, in one piece; `fetch`
        returns the parts of what is between two offsets. Return the blocks that are not stored:
        others fetch them, or the disk is full. Raises ObjectStoreError."""
        paths = {number: self.get_path(info, number) for number in numbers}
        left = [number for number, path in paths.items() if not path.exists()]
        claims: dict[int, contextlib.ExitStack] = {}
        try:
            with contextlib.ExitStack() as cleanup:
                for number in left:
                    self._make_folder(paths[number].parent)
                    if claim := _claim_block(paths[number]):
                        claims[number] = cleanup.enter_context(claim)
                wanted = [number for number in claims if not paths[number].exists()]
                left = [number for number in left if number in wanted or number not in claims]
                for run in split_neighbours(wanted, len(wanted)):
                    begin, end = get_block_range(info, run[0])[0], get_block_range(info, run[-1])[1]
                    parts = _PartStream(fetch(begin, end))
                    for number in run:
                        begin, end = get_block_range(info, number)
                        size = _write_file(paths[number], parts.take(end - begin))
                        left.remove(number)
                        claims[number].close()
                        self._count_block(size)
                    parts.finish()
        except OSError as error:
            if error.errno not in _FULL:
                raise make_cache_error(self, info, error) from error
        return left

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            make_trusted_folder(self.folder, 0o700)
            folder.mkdir(exist_ok=True)

    def _write(self, path: Path, fetch: Callable[[], Iterable[Any]]) -> None:
        try:
            size = _write_file(path, fetch())
        except OSError as error:
            if error.errno not in _FULL:
                raise
            # The disk is shared with others: make room of our own, once.
            with FileLock(self.folder / _USAGE_NAME):
                self._evict(self._measure() // 2)
            self._make_folder(path.parent)
            size = _write_file(path, fetch())
        self._count_block(size)

    def _count_block(self, size: int) -> None:
        """Add a block to what is used, and remove others if it is too much."""
        with FileLock(self.folder / _USAGE_NAME) as lock:
            usage = _read_usage(lock.fileno()) + size
            if usage > self.limit_bytes:
                usage = self._evict(int(self.limit_bytes * _KEPT_SHARE))
            os.pwrite(lock.fileno(), b"%020d" % usage, 0)

    def _measure(self) -> int:
        return sum(size for _, size, _ in self._list_blocks())

    def _evict(self, kept_bytes: int) -> int:
        """Remove the blocks that were opened longest ago, and return the bytes of those left."""
        blocks = sorted(self._list_blocks())
        usage = sum(size for _, size, _ in blocks)
        for _, size, path in blocks:
            if usage <= kept_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            usage -= size
        return usage

    def _list_blocks(self) -> list[tuple[int, int, Path]]:
        """Return the time, the bytes and the path of every block. What a killed process has left is
        listed as well: it is hidden, and old."""
        found = []
        for folder in self.folder.iterdir():
            if not folder.is_dir():
                continue
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):  # removed meanwhile
                        status = entry.stat()
                        if status.st_size:  # locks are empty
                            path = Path(entry.path)
                            found.append((status.st_mtime_ns, status.st_size, path))
        return found


def make_cache_error(cache: BlockCache, info: ObjectInfo, error: OSError) -> ObjectStoreError:
    return ObjectStoreError(
        StoreProblem.LOCAL_DISK,
        f"{info.url} cannot be kept in {cache.folder}: {format_os_error_reason(error)}",
        f"free some space there, or set {FOLDER_VARIABLE} to another folder and {LIMIT_VARIABLE} "
        "to how much of it may be used",
    )


def open_cache(environ: Mapping[str, str]) -> BlockCache:
    """Return the cache that the environment sets. Raises EchelonError."""
    text = environ.get(FOLDER_VARIABLE, "")
    try:
        folder = Path(text).absolute() if text else get_cache_root(environ) / "objects"
    except RuntimeError as error:
        what = "there is no folder for a cache: this user has no home"
        raise EchelonError(Fault(what, f"set {FOLDER_VARIABLE} to a folder")) from error
    if text := environ.get(LIMIT_VARIABLE, ""):
        try:
            limit = float(text)
            if not 0 < limit < 1e9:
                raise ValueError
        except ValueError:
            what = f"{LIMIT_VARIABLE}={text}"
            raise EchelonError(Fault(what, "give gigabytes, such as 200")) from None
        return BlockCache(folder, int(limit * 1e9))
    return BlockCache(folder, min(_DEFAULT_LIMIT_BYTES, _find_half_of_disk(folder)))


def _find_half_of_disk(folder: Path) -> int:
    """Return half of what the disk of a folder has, which may not exist yet."""
    existing = next(each for each in (folder, *folder.parents) if each.is_dir())
    disk = os.statvfs(existing)  # shutil takes longer to import than to ask
    return disk.f_blocks * disk.f_frsize // 2


def count_blocks(info: ObjectInfo) -> int:
    return -(-info.size // BLOCK_BYTES)


def get_block_range(info: ObjectInfo, number: int) -> tuple[int, int]:
    """Return where a block begins and ends in its object."""
    if number == WHOLE_OBJECT:
        return 0, info.size
    begin = number * BLOCK_BYTES
    return begin, min(begin + BLOCK_BYTES, info.size)


def split_neighbours(numbers: Iterable[int], max_blocks: int) -> list[list[int]]:
    """Return ascending numbers of blocks in runs of blocks that follow one another."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1 and len(runs[-1]) < max_blocks:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _claim_block(path: Path, *, may_wait: bool = False) -> contextlib.ExitStack | None:
    """Return what to leave when a block is stored; None where another process stores it."""
    claim = contextlib.ExitStack()
    with contextlib.suppress(LocksUnsupportedError):  # then several fetch the same
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        if may_wait:
            lock.acquire()
        elif not lock.try_acquire():
            return None
        claim.callback(lock.release)
        claim.callback(lock.path.unlink, missing_ok=True)
    return claim


class _PartStream:
    """Bytes that come in parts, to be cut elsewhere."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self._parts = iter(parts)
        self._rest = memoryview(b"")

    def take(self, size: int) -> Iterator[memoryview]:
        """Yield the next bytes, fewer only where they end."""
        while size:
            if not len(self._rest):
                part = next(self._parts, None)
                if part is None:
                    return
                self._rest = memoryview(part)
            piece, self._rest = self._rest[:size], self._rest[size:]
            size -= len(piece)
            yield piece

    def finish(self) -> None:
        """Take what is left, so that the connection can be used again."""
        for _ in self._parts:
            pass


@functools.lru_cache(4096)
def _name_object(info: ObjectInfo) -> str:
    return hashlib.sha256("\n".join(map(str, info)).encode()).hexdigest()[:32]


def _write_file(path: Path, parts: Iterable[Any]) -> int:
    size = 0
    with replace_file(path) as temporary, temporary.open("wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part)
            size += len(view)
            while len(view):
                view = view[file.write(view) :]
    return size


def _read_usage(handle: int) -> int:
    text = os.pread(handle, 20, 0)
    return int(text) if text.isdigit() else 0
