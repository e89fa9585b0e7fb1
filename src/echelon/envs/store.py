"""What the cache holds, and taking out of it what nobody uses."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from echelon.envs.build import remove, size
from echelon.envs.lock import lock_if_unused, try_lock
from echelon.envs.places import Place, environments, unwritable


class Kept(NamedTuple):
    """One environment of the cache, or what is left of one."""

    place: Place
    made: dict[str, Any]
    """What its marker says; empty when it was never finished."""
    used: float
    """Seconds since 1970; a job that starts and a build that finds it ready set it."""

    @property
    def key(self) -> str:
        return self.place.folder.name

    def to_dict(self) -> dict[str, Any]:
        names = ("kind", "builder", "source", "files", "made", "took_s", "bytes")
        return {
            "key": self.key,
            "folder": str(self.place.folder),
            "finished": bool(self.made),
            "used": self.used,
            **{name: self.made.get(name) for name in names},
        }


def kept(environ: Mapping[str, str]) -> list[Kept]:
    """The last used first."""
    root = environments(environ)
    names = os.listdir(root) if root.is_dir() else []
    keys = sorted({name.partition(".")[0] for name in names})
    return sorted((_kept(Place(root / key)) for key in keys if key), key=lambda k: -k.used)


def clean(
    environ: Mapping[str, str],
    older_days: float,
    everything: bool,
    dry_run: bool,
    say: Callable[[str], None],
) -> int:
    """Bytes freed. What is being built or run in stays, whatever was asked for."""
    freed = 0
    for one in kept(environ):
        too_old = time.time() - one.used > older_days * 86400
        if one.made and not (everything or too_old):
            continue
        try:
            freed += _removed(one, dry_run, say)
        except OSError as error:
            raise unwritable(Path(error.filename or one.place.folder), error) from error
    return freed


def _kept(place: Place) -> Kept:
    times = [0.0]
    for path in (place.use, place.log, place.folder):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    last = times[1:2] if place.use.exists() else times
    return Kept(place, place.made(), max(last))


def _removed(one: Kept, dry_run: bool, say: Callable[[str], None]) -> int:
    place = one.place
    lock = try_lock(place.lock)
    if lock is None:
        say(f"kept {one.key}: it is being built")
        return 0
    try:
        with lock_if_unused(place.use) as alone:
            if not alone:
                say(f"kept {one.key}: a job runs in it")
                return 0
            freed = size(place.folder, alone=True)
            if not dry_run:
                remove(place)
                _remove_beside(place)
            if one.made or freed:
                say(f"{'would remove' if dry_run else 'removed'} {one.key}: {_told(one)}")
            return freed
    finally:
        lock.release()


def _told(one: Kept) -> str:
    if not one.made:
        return "its build broke off"
    return f"{', '.join(one.made.get('files', []))} of {one.made.get('source', '?')}"


def _remove_beside(place: Place) -> None:
    """The lock last: who waits for it finds that the file is another one, and starts over."""
    shutil.rmtree(place.inputs, ignore_errors=True)
    for path in (place.log, place.building, place.use, place.lock):
        path.unlink(missing_ok=True)
