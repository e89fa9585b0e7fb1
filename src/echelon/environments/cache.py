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
from echelon.utils.cache_root import get_cache_root
from echelon.utils.files import read_json_object
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.trust import (
    find_folder_trust_problem,
    find_owner_trust_problem,
    find_tree_trust_problem,
    find_trust_problem,
    make_trusted_folder,
)

MARKER_NAME = ".echelon-env.json"
"""Written last, so an environment without this file was never completed."""


def get_environments_root(environ: Mapping[str, str]) -> Path:
    """Return the folder that holds one folder per environment, named by its cache key."""
    return get_cache_root(environ) / "envs"


@dataclass(frozen=True)
class EnvironmentPaths:
    """The paths that belong to one environment.

    Lock, log and other files are siblings of the folder, not inside it, because uv and conda want
    an empty folder to build in. Those of a .venv are in `.echelon` beside it.
    """

    folder: Path

    @property
    def marker(self) -> Path:
        """The file that certifies a complete environment."""
        return self.folder / MARKER_NAME

    def _make_sibling_path(self, suffix: str) -> Path:
        """Return the path of a file about this environment."""
        if self.folder.name == ".venv":
            return self.folder.parent / ".echelon" / f"venv.{suffix}"
        return self.folder.with_name(f"{self.folder.name}.{suffix}")

    @property
    def lock(self) -> Path:
        """Locked exclusively by the process that builds or removes the environment."""
        return self._make_sibling_path("lock")

    @property
    def use_lock(self) -> Path:
        """Locked shared by every job that runs in the environment; its modification time is the
        last use."""
        return self._make_sibling_path("use")

    @property
    def log(self) -> Path:
        """Output of the last build; kept only if the build failed."""
        return self._make_sibling_path("log")

    @property
    def building_marker(self) -> Path:
        """Exists during a build, and after one that was killed."""
        return self._make_sibling_path("building")

    @property
    def inputs_folder(self) -> Path:
        """The folder of the files given to pip or uv; they may contain passwords."""
        return self._make_sibling_path("inputs")

    def make_parent(self) -> None:
        """Create the folder that holds these files, readable by the owner only."""
        make_trusted_folder(self.lock.parent, mode=0o700)
        if self.lock.parent.name == ".echelon":
            (self.lock.parent / ".gitignore").write_text("*\n", encoding="utf-8")

    def read_marker(self) -> dict[str, Any]:
        """Return the content of the marker; empty if the environment is not complete."""
        return read_json_object(self.marker) or {}

    def python_executable(self) -> Path:
        """Return the path of the environment's interpreter."""
        return self.folder / "bin" / "python"

    def is_ready(self, key: str) -> bool:
        """Return whether the environment is complete, was built for this cache key, and still has
        its interpreter."""
        return self.read_marker().get("key") == key and os.access(self.python_executable(), os.X_OK)


def require_trusted_environment(paths: EnvironmentPaths) -> None:
    """Raise EchelonError if somebody else can have written the environment, or could replace it.

    Whoever writes into an environment, or into a folder that leads to it, decides which code runs
    as the caller. A cache that root made for everybody is trusted, if only root may write it.
    """
    siblings = (paths.lock, paths.use_lock, paths.log, paths.building_marker, paths.inputs_folder)
    if paths.folder.name == ".venv":  # beside the user's own code, which is as safe as its folder
        remedy = "remove it, use --where cache"
        problem = find_trust_problem(paths.lock.parent)
    else:
        remedy = "set ECHELON_CACHE to a folder of your own"
        problem = find_folder_trust_problem(paths.lock.parent)
    problem = problem or find_tree_trust_problem(paths.folder)
    for path in siblings:
        problem = problem or find_owner_trust_problem(path)
    if problem:
        raise EchelonError(
            Fault(
                f"the environment {paths.folder} is not used: {problem.what}",
                f"{remedy}, or {problem.do}",
            )
        )


def make_unwritable_error(path: Path, error: OSError) -> EchelonError:
    """Return the error for a path of the cache that cannot be written."""
    return EchelonError(
        Fault(
            f"{path} cannot be written: {format_os_error_reason(error)}",
            "free some space, get write permission, or set ECHELON_CACHE to another folder",
        )
    )


# --- what the cache holds ---


class CachedEnvironment(NamedTuple):
    """One environment in the cache, or the remains of one that was never completed."""

    paths: EnvironmentPaths
    marker: dict[str, Any]
    """Content of its marker; empty if the build never finished."""
    last_used: float
    """Seconds since 1970, updated when a job starts in it and when a build finds it ready."""

    @property
    def key(self) -> str:
        """The cache key, which is the folder's name."""
        return self.paths.folder.name

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that `echelon env show --json` prints."""
        names = ("kind", "builder", "source", "files", "made", "took_s", "bytes")
        return {
            "key": self.key,
            "folder": str(self.paths.folder),
            "finished": bool(self.marker),
            "used": self.last_used,
            **{name: self.marker.get(name) for name in names},
        }


def list_cached_environments(environ: Mapping[str, str]) -> list[CachedEnvironment]:
    """Return everything in the cache, the most recently used first."""
    root = get_environments_root(environ)
    names = os.listdir(root) if root.is_dir() else []
    keys = sorted({name.partition(".")[0] for name in names})
    return sorted(
        (_inspect_cached_environment(EnvironmentPaths(root / key)) for key in keys if key),
        key=lambda k: -k.last_used,
    )


def clean_cache(
    environ: Mapping[str, str],
    older_days: float,
    everything: bool,
    dry_run: bool,
    print_line: PrintLine,
) -> int:
    """Remove environments that were not used for `older_days`, or `everything`, and unfinished
    ones.

    Environments that are being built or that a job runs in are always kept. Returns the bytes
    freed; files that uv's own cache shares by hard links do not count.
    """
    freed = 0
    for environment in list_cached_environments(environ):
        is_too_old = time.time() - environment.last_used > older_days * 86400
        if environment.marker and not (everything or is_too_old):
            continue
        try:
            freed += _remove_if_unused(environment, dry_run, print_line)
        except OSError as error:
            raise make_unwritable_error(
                Path(error.filename or environment.paths.folder), error
            ) from error
    return freed


def _inspect_cached_environment(paths: EnvironmentPaths) -> CachedEnvironment:
    """Read the marker and the time of the last use.

    Without a use lock, the newest of the other files tells when the environment was last touched.
    """
    times = [0.0]
    for path in (paths.use_lock, paths.log, paths.folder):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    last = times[1:2] if paths.use_lock.exists() else times
    return CachedEnvironment(paths, paths.read_marker(), max(last))


def _remove_if_unused(environment: CachedEnvironment, dry_run: bool, print_line: PrintLine) -> int:
    """Remove one environment unless it is being built or used; return the bytes freed."""
    paths = environment.paths
    lock = try_lock(paths.lock)
    if lock is None:
        print_line(f"kept {environment.key}: it is being built")
        return 0
    try:
        with lock_if_unused(paths.use_lock) as is_unused:
            if not is_unused:
                print_line(f"kept {environment.key}: a job is running in it")
                return 0
            freed = measure_size(paths.folder, skip_hardlinks=True)
            if not dry_run:
                remove_environment(paths)
                _remove_side_files(paths)
            if environment.marker or freed:
                action = "would remove" if dry_run else "removed"
                print_line(f"{action} {environment.key}: {_describe_origin(environment)}")
            return freed
    finally:
        lock.release()


def _describe_origin(environment: CachedEnvironment) -> str:
    """Return which files of which source the environment was built from."""
    if not environment.marker:
        return "its build did not finish"
    files = ", ".join(environment.marker.get("files", []))
    return f"{files} of {environment.marker.get('source', '?')}"


def _remove_side_files(paths: EnvironmentPaths) -> None:
    """Remove lock, log and inputs.

    The lock file goes last: a process that waits for it then notices that the file was replaced,
    and starts over.
    """
    shutil.rmtree(paths.inputs_folder, ignore_errors=True)
    for path in (paths.log, paths.building_marker, paths.use_lock, paths.lock):
        path.unlink(missing_ok=True)


def measure_size(folder: Path, skip_hardlinks: bool = False) -> int:
    """Return the bytes on disk; `skip_hardlinks` leaves out files that uv's cache shares by hard
    links."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                state = os.lstat(os.path.join(parent, name))
                total += 0 if skip_hardlinks and state.st_nlink > 1 else state.st_blocks * 512
    return total


def remove_environment(paths: EnvironmentPaths) -> None:
    """Delete the environment, its marker first.

    If this is killed halfway, the remains have no marker and so do not count as an environment.
    """
    paths.marker.unlink(missing_ok=True)
    if paths.folder.is_symlink():
        paths.folder.unlink()
    elif paths.folder.exists():
        shutil.rmtree(paths.folder)
