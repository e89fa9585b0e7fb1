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
import shutil
from collections.abc import Callable, Iterable, Mapping
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
        self,
        info: ObjectInfo,
        number: int,
        fetch: Callable[[], Iterable[Any]],
        *,
        may_wait: bool = True,
    ) -> None:
        """Fetch a block unless it is there; `fetch` returns its parts. While another process
        fetches it, wait for it, or leave it to that one. Raises ObjectStoreError."""
        path = self.get_path(info, number)
        if path.exists():
            return
        try:
            self._make_folder(path.parent)
            with contextlib.ExitStack() as cleanup:
                with contextlib.suppress(LocksUnsupportedError):  # then several fetch the same
                    lock = FileLock(path.with_name(f".{path.name}.lock"))
                    if not lock.try_acquire():
                        if not may_wait:
                            return
                        lock.acquire()
                    cleanup.callback(lock.release)
                    cleanup.callback(lock.path.unlink, missing_ok=True)
                if not path.exists():
                    self._write(path, fetch)
        except OSError as error:
            raise make_cache_error(self, info, error) from error

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            make_trusted_folder(self.folder, 0o700)
            folder.mkdir(exist_ok=True)

    def _write(self, path: Path, fetch: Callable[[], Iterable[Any]]) -> None:
        try:
            size = _write_file(path, fetch())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # The disk is shared with others: make room of our own, once.
            with FileLock(self.folder / _USAGE_NAME):
                self._evict(self._measure() // 2)
            self._make_folder(path.parent)
            size = _write_file(path, fetch())
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
    return shutil.disk_usage(existing).total // 2


def count_blocks(info: ObjectInfo) -> int:
    return -(-info.size // BLOCK_BYTES)


def get_block_range(info: ObjectInfo, number: int) -> tuple[int, int]:
    """Return where a block begins and ends in its object."""
    if number == WHOLE_OBJECT:
        return 0, info.size
    begin = number * BLOCK_BYTES
    return begin, min(begin + BLOCK_BYTES, info.size)


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
