"""The copy of the source that a job runs from, and what git knows about it.

In a git repository the copy has the tracked files with all uncommitted edits, and new files that
.gitignore does not name. Any other folder is copied without caches and environments. Data is not
code: it stays in place and is linked to on request.
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
from echelon.runs.trusted_code import require_trusted_folder
from echelon.utils.files import write_json_atomically
from echelon.utils.ignore import CACHE_FOLDERS, is_ignored
from echelon.utils.os_errors import format_os_error_reason

MAX_SOURCE_BYTES = 256 << 20
"""A larger source has data in it."""
_GIT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class SourceTree:
    """A source folder, and which of its files are copied."""

    folder: Path
    files: tuple[str, ...]
    """The files to copy, relative to the folder."""
    size_bytes: int
    left_out: tuple[str, ...]
    """Names at its top of which nothing is copied."""
    links: tuple[str, ...] = ()
    """Names that the copy has links to."""
    commit: str | None = None
    """None outside of git, or before the first commit."""
    untracked: tuple[str, ...] = ()
    """Files to copy that are in neither a commit nor the diff."""
    secret_files: tuple[str, ...] = ()
    """Files that must not be in the diff, even if git tracks them."""

    def contains(self, path: str) -> bool:
        """Return whether the copy will have something there."""
        parents = {path, *map(str, PurePath(path).parents)}  # one may be a link to a folder
        names = (*self.files, *self.links)
        return any(name in parents or name.startswith(f"{path}/") for name in names)

    def to_dict(self) -> dict[str, Any]:
        """Return what source.json holds."""
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
    folder: Path,
    runs: Path,
    links: Sequence[str] = (),
    secrets: str | None = None,
    too_large_hint: str = "name data in .gitignore and link to it with --link FOLDER, or narrow it "
    "with --source DIR",
) -> SourceTree:
    """Find out what is to be copied: never the folder of all runs, nor the file of secrets."""
    if not folder.is_dir():
        raise EchelonError(
            Fault(f"--source {folder} is not a folder", "name the folder that the commands run in")
        )
    folder = folder.resolve()
    link_names = _drop_nested_links(links)
    secret_files = [Path(os.path.realpath(Path(secrets).expanduser()))] if secrets else []
    skipped = [runs.resolve(), *secret_files, *(folder / link for link in link_names)]
    tracked, untracked = _list_git_files(folder)
    new = [name for name in untracked if _is_source(folder, name)]
    if tracked is None:
        new, tracked = list(_walk_files(folder, skipped)), []
    files = sorted(
        name
        for name in {*tracked, *new}
        if _is_copyable(folder / name) and not _is_inside(folder / name, skipped)
    )
    _require_links_in_folder(folder, link_names)
    size_bytes = sum(os.lstat(folder / name).st_size for name in files)
    _require_small(folder, files, size_bytes, too_large_hint)
    copied_tops = {name.partition("/")[0] for name in (*files, *link_names)}
    all_tops = {p.name for p in folder.iterdir() if os.path.realpath(p) != str(runs.resolve())}
    commit = (_run_git(folder, "rev-parse", "HEAD") or b"").decode().strip() or None
    is_in_git = commit is not None or bool(tracked)
    return SourceTree(
        folder,
        tuple(files),
        size_bytes,
        left_out=tuple(sorted(all_tops - copied_tops - CACHE_FOLDERS)),
        links=link_names,
        commit=commit,
        untracked=tuple(sorted(set(new) & set(files))) if is_in_git else (),
        secret_files=tuple(
            str(file.relative_to(folder)) for file in secret_files if file.is_relative_to(folder)
        ),
    )


def copy_source(source: SourceTree, into: Path) -> Path:
    """Copy the source and what git knows of it, and return the folder of the copy.

    It appears under its name when it is complete, or not at all.
    """
    # Jobs copy it, so it is made by one rename at the end.
    copy, partial = into / "source", into / ".source"
    require_trusted_folder(into)
    try:
        partial.mkdir(parents=True)
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
                f"the source cannot be copied to {copy}: {format_os_error_reason(error)}"
                + (f" ({error.filename})" if error.filename else ""),
                "free some space, fix the file's mode, or give another place with run.dir=PATH",
            )
        ) from error
    return copy


def _read_git_diff(source: SourceTree) -> bytes:
    """Return the uncommitted edits for `git apply`, whatever the user's settings for diffs are."""
    options = ("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
    excluded = (f":(exclude,literal){name}" for name in source.secret_files)
    return (
        _run_git(source.folder, "diff", "--binary", *options, "HEAD", "--", ".", *excluded) or b""
    )


def _copy_file(folder: Path, name: str, into: Path) -> None:
    """Copy a file, or make a link that leads where the original leads."""
    original, copy = folder / name, into / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    if not original.is_symlink():
        with contextlib.suppress(FileNotFoundError):  # a temporary file, gone since it was listed
            shutil.copy2(original, copy)
        return
    target = Path(os.path.realpath(original))  # of a loop of links it is the link itself
    if target.is_relative_to(folder):  # into the copy, even if the original is absolute
        copy.symlink_to(os.path.relpath(target, original.parent.resolve()))
    else:
        copy.symlink_to(target)


def _require_links_in_folder(folder: Path, links: Sequence[str]) -> None:
    """Raise EchelonError unless all links are names of files in the folder."""
    faults = []
    for link in links:
        if os.path.isabs(link) or link.split("/")[0] in ("..", "."):
            faults.append(
                Fault(f"--link {link} is not inside the source", "an absolute path works as it is")
            )
        elif not os.path.lexists(folder / link):
            faults.append(Fault(f"--link {link}: {folder / link} is not there", "fix the name"))
    if faults:
        raise EchelonError(*faults)


def _require_small(folder: Path, files: Sequence[str], size_bytes: int, hint: str) -> None:
    if size_bytes <= MAX_SOURCE_BYTES:
        return
    largest = sorted(files, key=lambda name: os.lstat(folder / name).st_size, reverse=True)[:3]
    shown = ", ".join(f"{n} ({os.lstat(folder / n).st_size >> 20} MB)" for n in largest)
    raise EchelonError(
        Fault(
            f"the source {folder} has {size_bytes >> 20} MB, more than the "
            f"{MAX_SOURCE_BYTES >> 20} MB that are copied for a job; the largest: {shown}",
            hint,
        )
    )


# --- which files ---


def _drop_nested_links(links: Sequence[str]) -> tuple[str, ...]:
    """Return each link once, without those that are inside another."""
    names = list(dict.fromkeys(os.path.normpath(link) for link in links))
    return tuple(n for n in names if not any(n.startswith(f"{other}/") for other in names))


def _is_copyable(path: Path) -> bool:
    """Return whether it is a file or a link; reading a pipe would wait for its writer."""
    with contextlib.suppress(OSError):
        mode = os.lstat(path).st_mode
        return stat.S_ISREG(mode) or stat.S_ISLNK(mode)
    return False


def _is_source(folder: Path, name: str) -> bool:
    """Return whether neither a file of that relative name nor a folder above it is to be
    ignored."""
    parts = PurePath(name).parts
    return not any(is_ignored(folder.joinpath(*parts[:n])) for n in range(1, len(parts) + 1))


def _walk_files(folder: Path, skipped: Sequence[Path]) -> Iterator[str]:
    """Yield all files and links of a folder without git, except ignored and skipped ones."""
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
    """Return tracked and untracked files; None if git does not know the folder."""
    tracked = _run_git(folder, "ls-files", "-z", "--cached")
    others = _run_git(folder, "ls-files", "-z", "--others", "--exclude-standard")
    if tracked is None or others is None or not tracked + others:  # or all of it is ignored
        return None, []
    tracked_names = _expand_submodules(folder, _split_names(tracked))
    return tracked_names, _expand_submodules(folder, _split_names(others))


def _expand_submodules(folder: Path, names: list[str]) -> list[str]:
    """Replace submodules and clones, which git lists by their folders, by their files."""
    files = []
    for name in names:
        inside = folder / name
        if not inside.is_dir() or inside.is_symlink():
            files.append(name)
            continue
        tracked, others = _list_git_files(inside)
        files += [f"{name}/{each}" for each in (*(tracked or ()), *others)]
    return files


def _split_names(listed: bytes) -> list[str]:
    return [os.fsdecode(name).rstrip("/") for name in listed.split(b"\0") if name]


def _is_inside(path: Path, folders: Sequence[Path]) -> bool:
    text = str(path)  # a source may have thousands of files, and paths are compared slowly
    return any(text == str(folder) or text.startswith(f"{folder}/") for folder in folders)


def _run_git(folder: Path, *words: str) -> bytes | None:
    """Return what git prints; None if it is not installed or fails."""
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
