"""Where environments are kept, which of them there are, and removing those that nobody uses."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from echelon.environments.build_lock import PrintLine, lock_if_unused, try_lock
from echelon.errors import EchelonError, Fault
from echelon.utils.files import read_json_object
from echelon.utils.os_errors import describe_os_error

MARKER_NAME = ".echelon-env.json"
"""Written last: an environment without it was never finished."""


def cache_root(environ: Mapping[str, str]) -> Path:
    if override := environ.get("ECHELON_CACHE"):
        return Path(override).absolute()
    xdg = environ.get("XDG_CACHE_HOME", "")
    # The specification has relative ones ignored.
    home = Path(xdg) if xdg.startswith("/") else Path(environ.get("HOME") or Path.home(), ".cache")
    return home.absolute() / "echelon"


def environments_root(environ: Mapping[str, str]) -> Path:
    return cache_root(environ) / "envs"


@dataclass(frozen=True)
class EnvironmentPaths:
    """One environment's paths. What is about it stands beside it, as what builds an environment
    wants an empty place."""

    folder: Path

    @property
    def marker(self) -> Path:
        return self.folder / MARKER_NAME

    def _sibling(self, suffix: str) -> Path:
        if self.folder.name == ".venv":
            return self.folder.parent / ".echelon" / f"venv.{suffix}"
        return self.folder.with_name(f"{self.folder.name}.{suffix}")

    @property
    def lock(self) -> Path:
        """Held by who builds or removes it."""
        return self._sibling("lock")

    @property
    def use_lock(self) -> Path:
        """Shared by the jobs that run in it; its time of change is the last use."""
        return self._sibling("use")

    @property
    def log(self) -> Path:
        """What the last build said; kept when it failed."""
        return self._sibling("log")

    @property
    def building_marker(self) -> Path:
        """There while a build is under way, or after one that broke off."""
        return self._sibling("building")

    @property
    def inputs(self) -> Path:
        """A folder for what is given to pip or uv; may hold secrets of the requirements."""
        return self._sibling("inputs")

    def make_parent(self) -> None:
        """The folder that all of these are in."""
        self.lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.lock.parent.name == ".echelon":
            (self.lock.parent / ".gitignore").write_text("*\n", encoding="utf-8")

    def read_marker(self) -> dict[str, Any]:
        """What the marker says; nothing where there is no finished environment."""
        return read_json_object(self.marker) or {}

    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def is_ready(self, key: str) -> bool:
        """Finished, for this key, and its interpreter was not taken away since."""
        return self.read_marker().get("key") == key and os.access(self.python(), os.X_OK)


def unwritable_error(path: Path, error: OSError) -> EchelonError:
    return EchelonError(
        Fault(
            f"{path} cannot be written: {describe_os_error(error)}",
            "free some space or ask for the permission, or set ECHELON_CACHE to another folder",
        )
    )


# --- what the cache holds ---


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
    print_line: PrintLine,
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


def _remove_if_unused(environment: CachedEnvironment, dry_run: bool, print_line: PrintLine) -> int:
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


def measure_size(folder: Path, skip_hardlinks: bool = False) -> int:
    """On the disk, in bytes; `alone` without what uv's cache shares by links."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                state = os.lstat(os.path.join(where, name))
                total += 0 if skip_hardlinks and state.st_nlink > 1 else state.st_blocks * 512
    return total


def remove_environment(place: EnvironmentPaths) -> None:
    """The marker first: killed at any moment, what is left is seen to be no environment."""
    place.marker.unlink(missing_ok=True)
    if place.folder.is_symlink():
        place.folder.unlink()
    elif place.folder.exists():
        shutil.rmtree(place.folder)
