"""The code as it was: a copy of the source beside the job, and what git knows about it.

In a git repository the copy has what git tracks and what it would offer to add, with every edit
that is not committed; what .gitignore names stays where it is. Any other folder is copied without
caches and environments. Data is not code: it stays in place and is linked to on request.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from echelon.errors import EchelonError, Fault
from echelon.utils.files import write_json_atomically
from echelon.utils.ignore import CACHE_FOLDERS, is_ignored
from echelon.utils.os_errors import describe_os_error

MAX_SOURCE_BYTES = 256 << 20
"""A source larger than this has data in it."""
_GIT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class SourceTree:
    folder: Path
    files: tuple[str, ...]
    """What is copied, relative to the folder."""
    size_bytes: int
    left_out: tuple[str, ...]
    """What else is in it, at its top."""
    links: tuple[str, ...] = ()
    commit: str | None = None
    """None outside of git, or before the first commit."""
    untracked: tuple[str, ...] = ()
    """Files among those copied that no commit and no diff knows."""
    secret_files: tuple[str, ...] = ()
    """What git may know, and others may not."""

    def contains(self, path: str) -> bool:
        """Whether the copy will have something there."""
        kept = (*self.files, *self.links)
        above = {path, *map(str, PurePath(path).parents)}  # one may be a link to a folder
        return any(name in above or name.startswith(f"{path}/") for name in kept)

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "commit": self.commit,
            "files": len(self.files),
            "bytes": self.size_bytes,
            "untracked": list(self.untracked),
            "left_out": list(self.left_out),
            "links": list(self.links),
        }


def survey_source(
    folder: Path, runs: Path, links: Sequence[str] = (), secrets: str | None = None
) -> SourceTree:
    """What would be copied; the folder of all runs and a file of secrets never are."""
    if not folder.is_dir():
        raise EchelonError(
            Fault(f"--source {folder} is no folder", "name the folder that the commands run in")
        )
    folder = folder.resolve()
    linked = _drop_nested_links(links)
    own = [Path(os.path.realpath(Path(secrets).expanduser()))] if secrets else []
    skipped = [runs.resolve(), *own, *(folder / link for link in linked)]
    tracked, untracked = _list_git_files(folder)
    loose = [name for name in untracked if _is_source(folder, name)]
    if tracked is None:
        loose, tracked = list(_walk_files(folder, skipped)), []
    files = sorted(
        name
        for name in {*tracked, *loose}
        if _is_copyable(folder / name) and not _is_inside(folder / name, skipped)
    )
    _require_links(folder, linked, files)
    size = sum(os.lstat(folder / name).st_size for name in files)
    _require_small(folder, files, size)
    tops = {name.partition("/")[0] for name in (*files, *linked)}
    there = {p.name for p in folder.iterdir() if os.path.realpath(p) != str(runs.resolve())}
    commit = (_run_git(folder, "rev-parse", "HEAD") or b"").decode().strip() or None
    in_git = commit is not None or bool(tracked)
    return SourceTree(
        folder,
        tuple(files),
        size,
        tuple(sorted(there - tops - CACHE_FOLDERS)),
        linked,
        commit,
        tuple(sorted(set(loose) & set(files))) if in_git else (),
        tuple(str(file.relative_to(folder)) for file in own if file.is_relative_to(folder)),
    )


def copy_source(source: SourceTree, into: Path) -> Path:
    """Copy it, with what git knows; the copy is there as a whole or not at all."""
    copy, partial = into / "source", into / ".source"
    try:
        into.mkdir(parents=True, exist_ok=True)
        for old in (copy, partial):
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir()
        for name in source.files:
            _copy_file(source.folder, name, partial)
        for name in source.links:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).symlink_to(source.folder / name)
        write_json_atomically(into / "source.json", source.to_dict())
        if source.commit:
            (into / "source.diff").write_bytes(_read_git_diff(source))
        partial.rename(copy)
    except OSError as error:
        raise EchelonError(
            Fault(
                f"the source cannot be copied to {copy}: {describe_os_error(error)}"
                + (f" ({error.filename})" if error.filename else ""),
                "free some space, mend the file's mode, or give another place with run.dir=PATH",
            )
        ) from error
    return copy


def _read_git_diff(source: SourceTree) -> bytes:
    """That `git apply` takes, whatever the user likes to see."""
    plain = ("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
    but = (f":(exclude,literal){name}" for name in source.secret_files)
    return _run_git(source.folder, "diff", "--binary", *plain, "HEAD", "--", ".", *but) or b""


def _copy_file(folder: Path, name: str, into: Path) -> None:
    original, copy = folder / name, into / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    if not original.is_symlink():
        with contextlib.suppress(FileNotFoundError):  # an editor's, gone since it was listed
            shutil.copy2(original, copy)
        return
    target = Path(os.path.realpath(original))  # a loop of links stays one
    if target.is_relative_to(folder):  # stays inside the copy, also where it was absolute
        copy.symlink_to(os.path.relpath(target, original.parent.resolve()))
    else:
        copy.symlink_to(target)


def _require_links(folder: Path, links: Sequence[str], files: Sequence[str]) -> None:
    faults = []
    for link in links:
        if os.path.isabs(link) or link.split("/")[0] in ("..", "."):
            faults.append(
                Fault(f"--link {link} is not inside the source", "an absolute path works as it is")
            )
        elif not os.path.lexists(folder / link):
            faults.append(Fault(f"--link {link}: {folder / link} is not there", "mend the name"))
    if faults:
        raise EchelonError(*faults)


def _require_small(folder: Path, files: Sequence[str], size: int) -> None:
    if size <= MAX_SOURCE_BYTES:
        return
    largest = sorted(files, key=lambda name: os.lstat(folder / name).st_size, reverse=True)[:3]
    shown = ", ".join(f"{n} ({os.lstat(folder / n).st_size >> 20} MB)" for n in largest)
    raise EchelonError(
        Fault(
            f"the source {folder} has {size >> 20} MB, more than the {MAX_SOURCE_BYTES >> 20} MB that "
            f"are copied for a job; the largest: {shown}",
            "name data in .gitignore and link to it with --link FOLDER, or narrow it with "
            "--source DIR",
        )
    )


# --- which files ---


def _drop_nested_links(links: Sequence[str]) -> tuple[str, ...]:
    """Each once, and none within another."""
    names = list(dict.fromkeys(os.path.normpath(link) for link in links))
    return tuple(n for n in names if not any(n.startswith(f"{other}/") for other in names))


def _is_copyable(path: Path) -> bool:
    """Files and links. Reading a pipe would wait for who writes to it."""
    with contextlib.suppress(OSError):
        mode = os.lstat(path).st_mode
        return stat.S_ISREG(mode) or stat.S_ISLNK(mode)
    return False


def _is_source(folder: Path, name: str) -> bool:
    """Whether neither a file of that relative name nor a folder above it is to be ignored."""
    parts = PurePath(name).parts
    return not any(is_ignored(folder.joinpath(*parts[:n])) for n in range(1, len(parts) + 1))


def _walk_files(folder: Path, skipped: Sequence[Path]) -> Iterator[str]:
    for at, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(at, name))]
        folders[:] = [
            name
            for name in folders
            if name not in links
            and Path(at, name) not in skipped
            and not is_ignored(Path(at, name))
        ]
        for name in (*names, *links):
            if not is_ignored(Path(at, name)):
                yield os.path.relpath(os.path.join(at, name), folder)


def _list_git_files(folder: Path) -> tuple[list[str] | None, list[str]]:
    """Tracked and untracked; None where git does not know the folder."""
    tracked = _run_git(folder, "ls-files", "-z", "--cached")
    others = _run_git(folder, "ls-files", "-z", "--others", "--exclude-standard")
    if tracked is None or others is None or not tracked + others:  # or all of it is ignored
        return None, []
    return _expand_submodules(folder, _split_names(tracked)), _expand_submodules(
        folder, _split_names(others)
    )


def _expand_submodules(folder: Path, names: list[str]) -> list[str]:
    """Submodules and clones, which git lists by their folder alone."""
    found = []
    for name in names:
        inside = folder / name
        if not inside.is_dir() or inside.is_symlink():
            found.append(name)
            continue
        tracked, others = _list_git_files(inside)
        found += [f"{name}/{each}" for each in (*(tracked or ()), *others)]
    return found


def _split_names(listed: bytes) -> list[str]:
    return [os.fsdecode(name).rstrip("/") for name in listed.split(b"\0") if name]


def _is_inside(path: Path, folders: Sequence[Path]) -> bool:
    return any(path == folder or folder in path.parents for folder in folders)


def _run_git(folder: Path, *words: str) -> bytes | None:
    """None where it is not installed, or does not want to."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_GIT_TIMEOUT_S,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
