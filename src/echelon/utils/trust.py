"""Who else could have written a file from which code is run.

Code that a stranger put into a shared cache, or into a run folder that he made under a name that
was to be expected, would run as the caller. So ownership and modes are looked at before such a
file is used. A file is trusted if its owner is (the caller, root, and those whom ECHELON_TRUST
names) and if nobody else may write it.

Three facts keep honest files from being refused:

* Who cannot enter a folder cannot write what is below it, whatever its modes say.
* Some file systems keep no modes (a mounted Windows disk), or map users to others (NFS maps root
  to nobody). A file that is made there for a moment shows it.
* In a container, root outside of it has no number and appears as the overflow user.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TRUST_VARIABLE = "ECHELON_TRUST"
"""Names or numbers of users whose files may be run, and of groups with an @: ``ann,@lab``."""
_MAX_LINKS = 40
"""As many symbolic links on the way to a file as Linux follows."""
_ROOT = 0


class TrustProblem(NamedTuple):
    """Why a file is not trusted, in words for a fault."""

    what: str
    """Which file, and who owns it or may write it."""
    do: str
    """What to do to use it all the same; it can follow "…, or"."""


class _FileSystemTraits(NamedTuple):
    """What a file that was made in a folder shows about its file system."""

    own_user: int
    """The owner that our files have there."""
    keeps_modes: bool


class _FoundFile(NamedTuple):
    """A file, folder or symbolic link on the way."""

    path: Path
    status: os.stat_result


def find_trust_problem(path: Path, status: os.stat_result | None = None) -> TrustProblem | None:
    """Return why one file or folder is not trusted; None if it is, or if it cannot be reached.

    ``status`` is that of the opened file, if it is open: a name may lead to another file by now.
    The folders above are not looked at, because a file that a stranger puts in place of this one
    has another owner. For what is read again later, ask find_folder_trust_problem() too.
    """
    if status is None:
        try:
            status = path.lstat()
        except OSError:  # whoever uses it is told what is wrong with it
            return None
    return _find_owner_problem(path, status) or _find_mode_problem(path, status)


def find_owner_trust_problem(path: Path) -> TrustProblem | None:
    """Return why the owner of a file or folder is not trusted; None if she is, or without one."""
    try:
        return _find_owner_problem(path, path.lstat())
    except OSError:
        return None


def find_folder_trust_problem(folder: Path) -> TrustProblem | None:
    """Return why a stranger could put something in place of what is in this folder, or None.

    Every folder and every symbolic link that leads there is looked at. In a folder with the sticky
    bit, such as /tmp, nobody replaces files of others; so it may lead there, but it is not trusted
    itself: anybody can make files in it that do not exist yet.
    """
    end = Path(os.path.realpath(folder))
    for path, status in _walk_to(folder):
        is_sticky = bool(status.st_mode & stat.S_ISVTX)
        problem = _find_owner_problem(path, status, is_above=path != end)
        if problem is None and (path == end or not is_sticky):
            problem = _find_mode_problem(path, status)
        if problem is not None:
            return problem
    return None


def find_tree_trust_problem(root: Path) -> TrustProblem | None:
    """Return the first problem of a file or folder, of all that are in a folder, or None."""
    if problem := find_trust_problem(root):
        return problem
    # Most files of a tree agree in these, and a tree may have 50,000 files.
    trusted: set[tuple[int, int, int]] = set()
    for entry in _walk_tree(root):
        with suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            kind = (status.st_uid, status.st_gid, status.st_mode)
            if kind not in trusted:
                if problem := find_trust_problem(Path(entry.path), status):
                    return problem
                if not status.st_mode & 0o022:  # else it depends on where the file is
                    trusted.add(kind)
    return None


def make_trusted_folder(folder: Path, mode: int = 0o755) -> None:
    """Make a folder and those above it that are missing, so that nobody else may write them.

    The umask alone would let a group write them, on machines where groups share all their files.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=mode if path == folder else 0o755, exist_ok=True)


def _walk_to(folder: Path) -> Iterator[_FoundFile]:
    """Yield the folders and the symbolic links that lead to a folder, and the folder itself.

    It ends where nothing exists yet: what is missing will be made by us.
    """
    current, links = Path("/"), 0
    pending = [*reversed(folder.absolute().parts[1:])]
    yield _FoundFile(current, current.lstat())
    while pending:
        name = pending.pop()
        child = current.parent if name == ".." else current / name
        try:
            status = child.lstat()
        except OSError:
            return
        yield _FoundFile(child, status)
        if not stat.S_ISLNK(status.st_mode):
            current = child
            continue
        links += 1
        if links > _MAX_LINKS:
            return
        target = Path(os.readlink(child))
        pending += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        current = Path("/") if target.is_absolute() else current


def _walk_tree(root: Path) -> Iterator[os.DirEntry[str]]:
    """Yield everything in a folder. A folder that disappears meanwhile is empty."""
    pending = [str(root)]
    while pending:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)


# --- owners ---


def _find_owner_problem(
    path: Path, status: os.stat_result, is_above: bool = False
) -> TrustProblem | None:
    owner = status.st_uid
    if owner in (_ROOT, os.geteuid()) or _is_user_named(owner):
        return None
    if is_above and owner in _list_unknown_users():
        return None
    traits = _probe_file_system(path if stat.S_ISDIR(status.st_mode) else path.parent)
    if traits and traits.own_user == owner:
        return None
    name = _get_user_name(owner)
    return TrustProblem(
        f"{path} belongs to {name}, who could make you run any code with it",
        f"set {TRUST_VARIABLE}={name} if you trust {name}",
    )


def _is_user_named(user: int) -> bool:
    """Return whether ECHELON_TRUST names a user, or a group of hers."""
    users, groups = _read_trust_variable()
    if str(user) in users or (users and _get_user_name(user) in users):
        return True
    return any(user in _list_members(group) for group in groups)


def _read_trust_variable() -> tuple[set[str], set[str]]:
    """Return the users and the groups of ECHELON_TRUST, as they are written."""
    words = {word.strip() for word in os.environ.get(TRUST_VARIABLE, "").split(",")}
    groups = {word for word in words if word.startswith("@")}
    return words - groups - {""}, {word.removeprefix("@") for word in groups}


def _list_members(group: str) -> set[int]:
    """Return the users of a group, by its name or number: those that are listed as members, and
    those whose own group it is."""
    try:
        found = grp.getgrgid(int(group)) if group.isdecimal() else grp.getgrnam(group)
    except KeyError:
        return set()
    members = {user.pw_uid for user in pwd.getpwall() if user.pw_gid == found.gr_gid}
    for name in found.gr_mem:
        with suppress(KeyError):
            members.add(pwd.getpwnam(name).pw_uid)
    return members


def _get_user_name(user: int) -> str:
    """Return the name of a user, or the number of one without a name."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


@functools.cache
def _list_unknown_users() -> frozenset[int]:
    """Return the number by which a container shows users outside of it, root among them."""
    with suppress(OSError, ValueError):
        first, outside, count = map(int, Path("/proc/self/uid_map").read_text("utf-8").split()[:3])
        if (first, outside) != (0, 0) or count < 1 << 16:
            overflow = Path("/proc/sys/kernel/overflowuid").read_text("utf-8")
            return frozenset([int(overflow)])
    return frozenset()


# --- modes ---


def _find_mode_problem(path: Path, status: os.stat_result) -> TrustProblem | None:
    if stat.S_ISLNK(status.st_mode):
        return None  # a symbolic link has no modes of its own
    writers = _describe_foreign_writers(status)
    if writers is None or _is_closed_to_others(path):
        return None
    traits = _probe_file_system(path if stat.S_ISDIR(status.st_mode) else path.parent)
    if traits and not traits.keeps_modes:
        return None
    mode = stat.S_IMODE(status.st_mode)
    do = f"look at what is there and `chmod go-w {path}`"
    if writers.startswith("@"):
        do += f", or set {TRUST_VARIABLE}={writers} if you trust all of them"
        writers = f"the group {writers[1:]}"
    return TrustProblem(
        f"{path} may be written by {writers} (mode {mode:04o}), who could make you run any code "
        "with it",
        do,
    )


def _describe_foreign_writers(status: os.stat_result) -> str | None:
    """Return who else may write a file: None for nobody, ``everybody``, ``@GROUP``."""
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if not status.st_mode & stat.S_IWGRP or _is_private_group(status.st_gid, status.st_uid):
        return None
    try:
        name = grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        name = str(status.st_gid)
    return None if {name, str(status.st_gid)} & _read_trust_variable()[1] else f"@{name}"


def _is_private_group(group: int, owner: int) -> bool:
    """Return whether the owner of a file is the only member of its group.

    Such a group has the user's own name. Users whose group it is without being listed in it cannot
    be asked for at a reasonable price, where a directory service has 50,000 of them.
    """
    try:
        found = grp.getgrgid(group)
    except KeyError:
        return group == owner
    name = _get_user_name(owner)
    return (found.gr_name == name or group == owner == _ROOT) and set(found.gr_mem) <= {name}


def _is_closed_to_others(path: Path) -> bool:
    """Return whether a folder above this path lets nobody in but its owner, whom we trust."""
    folder = Path(os.path.realpath(path.parent))
    for parent in (folder, *folder.parents):
        status = parent.stat()
        lets_group_in = bool(status.st_mode & stat.S_IXGRP)
        if lets_group_in and not _is_private_group(status.st_gid, status.st_uid):
            continue
        if not status.st_mode & stat.S_IXOTH and _find_owner_problem(parent, status) is None:
            return True
    return False


def _probe_file_system(folder: Path) -> _FileSystemTraits | None:
    """Return how the file system of a folder shows files of ours; None where none can be made."""
    import tempfile  # which takes milliseconds, and is rarely needed

    try:
        handle, name = tempfile.mkstemp(prefix=".echelon-", dir=folder)
    except OSError:
        return None
    try:
        os.fchmod(handle, 0o600)
        status = os.fstat(handle)
        return _FileSystemTraits(status.st_uid, stat.S_IMODE(status.st_mode) == 0o600)
    except OSError:
        return None
    finally:
        os.close(handle)
        os.unlink(name)
