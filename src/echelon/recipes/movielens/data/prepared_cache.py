"""The prepared form of a data set: arrays made once, stored beside it, and found again by content.

    ml-25m/.echelon/sources.json      size, times and hash of the files it was made from
    ml-25m/.echelon/FINGERPRINT/      users.npy … movies.json, prepared.json written last

Files that look unchanged are not hashed again, so loading from the cache takes milliseconds. A
touched file with the same content has the same fingerprint. All ranks may call `load_ratings` at
once: one prepares and the others wait. If the folder is not writable, the cache is in the user's
cache folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.recipes.movielens.data.formats import (
    RatingsFolder,
    make_unreadable_error,
    require_ratings_folder,
)
from echelon.recipes.movielens.data.prepare import (
    COLUMN_TYPES,
    ID_FILES,
    flush_files_to_disk,
    prepare_ratings,
)
from echelon.recipes.movielens.data.ratings import Ratings
from echelon.utils.files import read_json_object, write_json_atomically
from echelon.utils.locks import FileLock, LocksUnsupportedError
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.text import format_elapsed

_FORMAT_VERSION = 1
"""Version of the prepared form; part of the fingerprint."""
_WRITE_REFUSED_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)


def load_ratings(folder: str | Path) -> Ratings:
    """Return the ratings in a folder made by `echelon data movielens`, or in any of GroupLens'
    formats."""
    source = require_ratings_folder(Path(folder))
    cache_folders = _list_candidate_folders(source.folder)
    try:
        stats = _stat_files(source)
        for home in cache_folders:
            fingerprint = _read_recorded_fingerprint(home, stats)
            if fingerprint and (ratings := _open_prepared(home, fingerprint)):
                return ratings
        return _find_or_prepare(source, cache_folders)
    except PermissionError as error:
        raise make_unreadable_error(error) from error


def _list_candidate_folders(folder: Path) -> list[Path]:
    """Return where the cache may be, the preferred folder first."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    digest = xxhash.xxh3_64_hexdigest(os.fsencode(folder.resolve()))
    homes = [folder / ".echelon"]
    with contextlib.suppress(RuntimeError):  # a user without a home, as in some containers
        homes.append(caches.expanduser() / "echelon" / "movielens" / digest)
    return homes


# --- lookup -------------------------------------------------------------------------------------


def _stat_files(source: RatingsFolder) -> dict[str, list[int]]:
    """Return size and times of the source files; a replaced file has a new ctime."""
    stats = {path.name: path.stat() for path in source.list_files()}
    return {name: [s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in stats.items()}


def _read_recorded_fingerprint(cache_folder: Path, stats: dict[str, list[int]]) -> str | None:
    """Return the fingerprint recorded for files with these sizes and times, or None."""
    known = read_json_object(cache_folder / "sources.json") or {}
    return known.get("fingerprint") if known.get("file_stats") == stats else None


def _open_prepared(cache_folder: Path, fingerprint: str) -> Ratings | None:
    """Return the memory-mapped ratings, or None if they are absent or incomplete."""
    folder = cache_folder / fingerprint
    sizes = (read_json_object(folder / "prepared.json") or {}).get("sizes")
    if not sizes or any(_get_file_size(folder / name) != size for name, size in sizes.items()):
        return None
    arrays = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in (*COLUMN_TYPES, *ID_FILES)
    }
    return Ratings(**arrays, fingerprint=fingerprint, prepared=folder)


def _get_file_size(path: Path) -> int:
    """Return the size of a file, or -1 if it is not there."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return -1


# --- preparing ----------------------------------------------------------------------------------


def _find_or_prepare(source: RatingsFolder, cache_folders: list[Path]) -> Ratings:
    """Return the ratings from the first folder that has them or can be written."""
    refused: list[str] = []
    for home in cache_folders:
        try:
            with _lock_folder(home):
                return _find_or_prepare_in(source, home)
        except _FolderNotWritableError as error:
            # What somebody else prepared there will do, such as in the image of a container.
            if ratings := _open_prepared(home, _compute_fingerprint(source)):
                return ratings
            refused.append(str(error))
    raise EchelonError(
        Fault(
            f"the prepared form of {source.folder} cannot be written: {'; '.join(refused)}",
            "make one of them writable, or set XDG_CACHE_HOME to a folder that is",
        )
    )


class _FolderNotWritableError(Exception):
    """This folder cannot be written; another one may be."""


@contextlib.contextmanager
def _lock_folder(cache_folder: Path) -> Iterator[None]:
    """Let one process prepare at a time.

    On a file system without locks two may prepare at once: each writes to a folder of its own, and
    the first to rename it wins.
    """
    lock = FileLock(cache_folder / "lock")
    with contextlib.ExitStack() as held:
        try:
            cache_folder.mkdir(parents=True, exist_ok=True)
            lock.path.touch()  # fails where nothing can be written, though a lock may be had
            with contextlib.suppress(LocksUnsupportedError):
                held.enter_context(lock)
        except OSError as error:
            if error.errno in _WRITE_REFUSED_ERRNOS:
                raise _FolderNotWritableError(
                    f"{cache_folder}: {format_os_error_reason(error)}"
                ) from error
            raise _make_cache_write_error(cache_folder, error) from error
        yield


def _find_or_prepare_in(source: RatingsFolder, cache_folder: Path) -> Ratings:
    """Return the ratings from this cache folder, prepared if necessary, under its lock."""
    stats = _stat_files(source)
    fingerprint = _read_recorded_fingerprint(cache_folder, stats) or _compute_fingerprint(source)
    ratings = _open_prepared(cache_folder, fingerprint)
    if ratings is None:
        ratings = _prepare_in(source, cache_folder, fingerprint)
    if _stat_files(source) == stats:  # else a file changed meanwhile: hash it again next time
        with contextlib.suppress(OSError):
            content = {"file_stats": stats, "fingerprint": fingerprint}
            write_json_atomically(cache_folder / "sources.json", content)
    return ratings


def _compute_fingerprint(source: RatingsFolder) -> str:
    """Return a hash of the names and contents of the source files."""
    whole = xxhash.xxh3_128(f"echelon movielens {_FORMAT_VERSION}".encode())
    for path in source.list_files():
        one = xxhash.xxh3_128()
        with path.open("rb") as file:
            while data := file.read(1 << 20):
                one.update(data)
        whole.update(f"{path.name} {one.hexdigest()}\n".encode())
    return str(whole.hexdigest())


def _prepare_in(source: RatingsFolder, cache_folder: Path, fingerprint: str) -> Ratings:
    """Write the prepared form to a temporary folder, flush it, and rename it into place."""
    began = time.monotonic()
    temporary = Path(tempfile.mkdtemp(prefix="making-", dir=cache_folder))
    try:
        dropped = prepare_ratings(source, temporary)
        sizes = {path.name: path.stat().st_size for path in temporary.iterdir()}
        (temporary / "prepared.json").write_text(
            json.dumps({"dropped": dropped, "sizes": sizes}), encoding="utf-8"
        )
        flush_files_to_disk(temporary)
        temporary.chmod(0o755)  # mkdtemp's own is for this user alone; the data may be shared
        _publish(temporary, cache_folder / fingerprint)
    except OSError as error:
        if isinstance(error, PermissionError):
            raise
        raise _make_cache_write_error(cache_folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    ratings = _open_prepared(cache_folder, fingerprint)
    if ratings is None:
        raise EchelonError(Fault(f"{cache_folder} changed while it was written", "try again"))
    _print_summary(source, ratings, dropped, time.monotonic() - began)
    return ratings


def _publish(temporary: Path, target: Path) -> None:
    """Rename the temporary folder into place. A folder that exists there could not be opened, so it
    is damaged and is removed."""
    if target.exists():
        target.rename(temporary.with_name(f"{temporary.name}-damaged"))
        shutil.rmtree(temporary.with_name(f"{temporary.name}-damaged"), ignore_errors=True)
    temporary.rename(target)


def _print_summary(source: RatingsFolder, ratings: Ratings, dropped: int, taken_s: float) -> None:
    """Print the size of the data set, and a warning about repeated ratings."""
    print(
        f"prepared {source.folder}: {len(ratings.users):,} ratings of {ratings.num_users:,} users "
        f"for {ratings.num_items:,} movies, in {format_elapsed(taken_s)}",
        file=sys.stderr,
    )
    if dropped:
        print(
            f"warning: {source.ratings} rates {dropped:,} times a movie that the same user rates "
            "again; the newest rating counts",
            file=sys.stderr,
        )


def _make_cache_write_error(cache_folder: Path, error: OSError) -> EchelonError:
    """Return the error for a cache that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EchelonError(
            Fault(
                f"no space left for the prepared form of the ratings in {cache_folder}; "
                "nothing was kept",
                "free some space: it takes 20 bytes per rating",
            ),
            exit=ExitCode.FAILED,
        )
    return EchelonError(
        Fault(f"{error.filename or cache_folder}: {format_os_error_reason(error)}", "try again")
    )
