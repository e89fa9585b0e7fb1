"""The prepared form of a set, made once and kept beside it, found again by content.

    ml-25m/.echelon/sources.json      size, times and hash of the files it was made from
    ml-25m/.echelon/FINGERPRINT/      users.npy … movies.json, prepared.json written last

Files that look untouched are not hashed again, so a start from the cache takes milliseconds. A
touched file with the same content finds the same fingerprint. All ranks of a world may call `load`
at once: one prepares and the others wait. A folder that cannot be written has its cache in the
user's cache folder.
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

from echelon.data.movielens.formats import Source, find, unreadable
from echelon.data.movielens.prepare import COLUMN_TYPES, ID_FILES, flush, prepare
from echelon.data.movielens.ratings import Ratings
from echelon.errors import EchelonError, Exit, Fault
from echelon.utils.files import read_json_object, write_json_atomically
from echelon.utils.locks import FileLock, LocksUnsupportedError
from echelon.utils.os_errors import describe_os_error

_VERSION = 1
"""Of the prepared form; part of the fingerprint."""
_CANNOT_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS)


def load(folder: str | Path) -> Ratings:
    """The ratings in a folder that `echelon data movielens` made, or any of GroupLens' formats."""
    source = find(Path(folder))
    homes = _homes(source.folder)
    try:
        looks = _looks(source)
        for home in homes:
            fingerprint = _remembered(home, looks)
            if fingerprint and (ratings := _opened(home, fingerprint)):
                return ratings
        return _prepared(source, homes)
    except PermissionError as error:
        raise unreadable(error) from error


def _homes(folder: Path) -> list[Path]:
    """Where the cache may be, the best place first."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    own = xxhash.xxh3_64_hexdigest(os.fsencode(folder.resolve()))
    homes = [folder / ".echelon"]
    with contextlib.suppress(RuntimeError):  # a user without a home, as in some containers
        homes.append(caches.expanduser() / "echelon" / "movielens" / own)
    return homes


# --- finding ------------------------------------------------------------------------------------


def _looks(source: Source) -> dict[str, list[int]]:
    """What changes when a file does: a file put in place of another has another ctime."""
    stats = {path.name: path.stat() for path in source.files()}
    return {name: [s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in stats.items()}


def _remembered(home: Path, looks: dict[str, list[int]]) -> str | None:
    known = read_json_object(home / "sources.json") or {}
    return known.get("fingerprint") if known.get("looks") == looks else None


def _opened(home: Path, fingerprint: str) -> Ratings | None:
    """None where it is not there, or not whole."""
    folder = home / fingerprint
    sizes = (read_json_object(folder / "prepared.json") or {}).get("sizes")
    if not sizes or any(_size(folder / name) != size for name, size in sizes.items()):
        return None
    arrays = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in (*COLUMN_TYPES, *ID_FILES)
    }
    return Ratings(**arrays, fingerprint=fingerprint, prepared=folder)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return -1


# --- making -------------------------------------------------------------------------------------


def _prepared(source: Source, homes: list[Path]) -> Ratings:
    refused: list[str] = []
    for home in homes:
        try:
            with _locked(home):
                return _found_or_made(source, home)
        except _Refused as error:
            # What others prepared there is as good, such as in the image of a container.
            if ratings := _opened(home, _fingerprint(source)):
                return ratings
            refused.append(str(error))
    raise EchelonError(
        Fault(
            f"the prepared form of {source.folder} cannot be written: {'; '.join(refused)}",
            "let this user write to one of them, or set XDG_CACHE_HOME to a folder that can be",
        )
    )


class _Refused(Exception):
    """This place cannot be written; another may."""


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """One process at a time. Where the file system has no locks two may prepare at once: each
    writes beside, and the first to rename wins."""
    lock = FileLock(home / "lock")
    with contextlib.ExitStack() as held:
        try:
            home.mkdir(parents=True, exist_ok=True)
            lock.path.touch()  # fails where nothing can be written, though a lock may be had
            with contextlib.suppress(LocksUnsupportedError):
                held.enter_context(lock)
        except OSError as error:
            if error.errno in _CANNOT_WRITE:
                raise _Refused(f"{home}: {describe_os_error(error)}") from error
            raise _unwritten(home, error) from error
        yield


def _found_or_made(source: Source, home: Path) -> Ratings:
    looks = _looks(source)
    fingerprint = _remembered(home, looks) or _fingerprint(source)
    ratings = _opened(home, fingerprint)
    if ratings is None:
        ratings = _made(source, home, fingerprint)
    if _looks(source) == looks:  # else it was written to meanwhile, and is hashed again next time
        with contextlib.suppress(OSError):
            content = {"looks": looks, "fingerprint": fingerprint}
            write_json_atomically(home / "sources.json", content)
    return ratings


def _fingerprint(source: Source) -> str:
    whole = xxhash.xxh3_128(f"echelon movielens {_VERSION}".encode())
    for path in source.files():
        one = xxhash.xxh3_128()
        with path.open("rb") as file:
            while data := file.read(1 << 20):
                one.update(data)
        whole.update(f"{path.name} {one.hexdigest()}\n".encode())
    return str(whole.hexdigest())


def _made(source: Source, home: Path, fingerprint: str) -> Ratings:
    began = time.monotonic()
    beside = Path(tempfile.mkdtemp(prefix="making-", dir=home))
    try:
        dropped = prepare(source, beside)
        sizes = {path.name: path.stat().st_size for path in beside.iterdir()}
        (beside / "prepared.json").write_text(
            json.dumps({"dropped": dropped, "sizes": sizes}), encoding="utf-8"
        )
        flush(beside)
        beside.chmod(0o755)  # mkdtemp's own is for this user alone; the data may be shared
        _put(beside, home / fingerprint)
    except OSError as error:
        if isinstance(error, PermissionError):
            raise
        raise _unwritten(home, error) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    ratings = _opened(home, fingerprint)
    if ratings is None:
        raise EchelonError(Fault(f"{home} changed while it was written", "try again"))
    _tell(source, ratings, dropped, time.monotonic() - began)
    return ratings


def _put(beside: Path, place: Path) -> None:
    """What is there already and could not be opened is damaged, and makes room."""
    if place.exists():
        place.rename(beside.with_name(f"{beside.name}-damaged"))
        shutil.rmtree(beside.with_name(f"{beside.name}-damaged"), ignore_errors=True)
    beside.rename(place)


def _tell(source: Source, ratings: Ratings, dropped: int, taken_s: float) -> None:
    print(
        f"prepared {source.folder}: {len(ratings.users):,} ratings of {ratings.num_users:,} users "
        f"for {ratings.num_items:,} movies, in {taken_s:.1f} s",
        file=sys.stderr,
    )
    if dropped:
        print(
            f"warning: {source.ratings} rates {dropped:,} times a movie that the same user rates "
            "again; the newest rating counts",
            file=sys.stderr,
        )


def _unwritten(home: Path, error: OSError) -> EchelonError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EchelonError(
            Fault(
                f"no space left for the prepared form of the ratings in {home}; nothing was kept",
                "make room: it takes 20 bytes a rating",
            ),
            exit=Exit.FAILED,
        )
    return EchelonError(Fault(f"{error.filename or home}: {describe_os_error(error)}", "try again"))
