"""What the cache holds, and taking out of it what nobody uses."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from echelon.environments.build import measure_size, remove_environment
from echelon.environments.build_lock import lock_if_unused, try_lock
from echelon.environments.paths import EnvironmentPaths, environments_root, unwritable_error


class CachedEnvironment(NamedTuple):
    """One environment of the cache, or what is left of one."""

    paths: EnvironmentPaths
    marker: dict[str, Any]
    """What its marker says; empty when it was never finished."""
    last_used: float
    """Seconds since 1970; a job that starts and a build that finds it ready set it."""

    @property
    def key(self) -> str:
        return self.paths.folder.name

    def to_dict(self) -> dict[str, Any]:
        names = ("kind", "builder", "source", "files", "made", "took_s", "bytes")
        return {
            "key": self.key,
            "folder": str(self.paths.folder),
            "finished": bool(self.marker),
            "used": self.last_used,
            **{name: self.marker.get(name) for name in names},
        }


def list_cached(environ: Mapping[str, str]) -> list[CachedEnvironment]:
    """The last used first."""
    root = environments_root(environ)
    names = os.listdir(root) if root.is_dir() else []
    keys = sorted({name.partition(".")[0] for name in names})
    return sorted(
        (_inspect_cached(EnvironmentPaths(root / key)) for key in keys if key),
        key=lambda k: -k.last_used,
    )


def clean_cache(
    environ: Mapping[str, str],
    older_days: float,
    everything: bool,
    dry_run: bool,
    print_line: Callable[[str], None],
) -> int:
    """Bytes freed. What is being built or run in stays, whatever was asked for."""
    freed = 0
    for one in list_cached(environ):
        too_old = time.time() - one.last_used > older_days * 86400
        if one.marker and not (everything or too_old):
            continue
        try:
            freed += _remove_if_unused(one, dry_run, print_line)
        except OSError as error:
            raise unwritable_error(Path(error.filename or one.paths.folder), error) from error
    return freed


def _inspect_cached(paths: EnvironmentPaths) -> CachedEnvironment:
    times = [0.0]
    for path in (paths.use_lock, paths.log, paths.folder):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    last = times[1:2] if paths.use_lock.exists() else times
    return CachedEnvironment(paths, paths.read_marker(), max(last))


def _remove_if_unused(
    environment: CachedEnvironment, dry_run: bool, print_line: Callable[[str], None]
) -> int:
    place = environment.paths
    lock = try_lock(place.lock)
    if lock is None:
        print_line(f"kept {environment.key}: it is being built")
        return 0
    try:
        with lock_if_unused(place.use_lock) as alone:
            if not alone:
                print_line(f"kept {environment.key}: a job runs in it")
                return 0
            freed = measure_size(place.folder, skip_hardlinks=True)
            if not dry_run:
                remove_environment(place)
                _remove_side_files(place)
            if environment.marker or freed:
                print_line(
                    f"{'would remove' if dry_run else 'removed'} {environment.key}: {_describe_content(environment)}"
                )
            return freed
    finally:
        lock.release()


def _describe_content(environment: CachedEnvironment) -> str:
    if not environment.marker:
        return "its build broke off"
    return f"{', '.join(environment.marker.get('files', []))} of {environment.marker.get('source', '?')}"


def _remove_side_files(paths: EnvironmentPaths) -> None:
    """The lock last: who waits for it finds that the file is another one, and starts over."""
    shutil.rmtree(paths.inputs, ignore_errors=True)
    for path in (paths.log, paths.building_marker, paths.use_lock, paths.lock):
        path.unlink(missing_ok=True)
