"""Unpacking a zip file that somebody else made: nothing outside of the target, limited in size, all
or nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.recipes.movielens.data.formats import FORMATS, RatingsFolder, find_ratings_folder
from echelon.utils.os_errors import format_os_error_reason

MAX_BYTES = 8 << 30
MAX_FILES = 1000
MAX_COMPRESSION_RATIO = 100
"""The limits are several times what the largest release has: 1.2 GB, some 20 files, 5 to 1."""

ZipMember = tuple[zipfile.ZipInfo, str]
"""An entry of the zip file, and the name it gets in the data set's folder."""


def read_folder_name(archive: Path) -> str:
    """Return the name of the data set's folder inside the zip file."""
    with _open_zip(archive) as zip_file:
        return _list_members(archive, zip_file.infolist())[0] or archive.stem


def unpack_zip(archive: Path, folder: Path) -> None:
    """Unpack the data set of a zip file as this folder."""
    with _open_zip(archive) as zip_file:
        members = _list_members(archive, zip_file.infolist())[1]
        size = sum(info.file_size for info, _ in members)
        with open_staging_folder(folder, size) as temporary:
            for info, inside in members:
                target = temporary / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                with zip_file.open(info) as packed, target.open("wb") as plain:
                    shutil.copyfileobj(packed, plain, 1 << 20)


def copy_folder(source: RatingsFolder, folder: Path) -> None:
    """Copy the files of another folder's data set to this one."""
    files = [*source.list_files(), *source.folder.glob("README*")]
    with open_staging_folder(folder, sum(path.stat().st_size for path in files)) as temporary:
        for path in files:
            shutil.copyfile(path, temporary / path.name)


@contextlib.contextmanager
def open_staging_folder(folder: Path, size: int) -> Iterator[Path]:
    """Yield a temporary folder to fill; it is renamed to `folder` if the block succeeds."""
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder.parent).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        temporary = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder.parent))
        temporary.chmod(0o755)
        yield temporary
        _publish(temporary, folder)
    except OSError as error:
        raise _make_unpack_write_error(folder, size, error) from error
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, folder: Path) -> None:
    """Rename the temporary folder; the target may be absent or empty."""
    try:
        temporary.rename(folder)
    except OSError:
        if find_ratings_folder(folder) is None:  # else another process was quicker
            raise


@contextlib.contextmanager
def _open_zip(archive: Path) -> Iterator[zipfile.ZipFile]:
    """Yield the opened zip file; errors of zipfile become faults."""
    do = "get it again: it is at https://grouplens.org/datasets/movielens"
    try:
        with zipfile.ZipFile(archive) as zip_file:
            yield zip_file
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        what = f"{archive} is not a complete zip file: {error or 'it ends too early'}"
        raise EchelonError(Fault(what, do)) from error
    except OSError as error:
        what = f"{archive} cannot be read: {format_os_error_reason(error)}"
        raise EchelonError(Fault(what, do)) from error


def _check_safety(archive: Path, members: list[zipfile.ZipInfo]) -> None:
    """Raise with everything that is wrong with what the zip file declares; zipfile enforces those
    sizes."""
    problems = [
        f"{info.filename!r} {why}" for info in members for why in _find_member_problems(info)
    ]
    size = sum(info.file_size for info in members)
    packed = sum(info.compress_size for info in members)
    if len(members) > MAX_FILES:
        problems.append(f"{len(members):,} files are more than {MAX_FILES:,}")
    if size > MAX_BYTES:
        problems.append(f"{size:,} bytes are more than {MAX_BYTES:,}")
    if size > MAX_COMPRESSION_RATIO * max(packed, 1 << 10):
        problems.append(
            f"{size:,} bytes are more than {MAX_COMPRESSION_RATIO} × the {packed:,} in the zip"
        )
    if problems:
        do = "do not use this file; get GroupLens' own: echelon data movielens"
        descriptions = [f"{archive} is not unpacked: {why}" for why in problems[:5]]
        raise EchelonError(*(Fault(what, do) for what in descriptions))


def _find_member_problems(info: zipfile.ZipInfo) -> Iterator[str]:
    """Yield why an entry is unsafe."""
    path = PurePosixPath(info.filename)
    kind = stat.S_IFMT(info.external_attr >> 16)
    if path.is_absolute() or ".." in path.parts or "\\" in info.filename:
        yield "leads out of the folder"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        yield "is a link or a device, not a file"
    if info.flag_bits & 1:
        yield "is encrypted"


def _list_members(archive: Path, infos: list[zipfile.ZipInfo]) -> tuple[str, list[ZipMember]]:
    """Return the name of the folder with the ratings, and its files; raise if any is unsafe.

    Hidden files are left out: one of them could pose as the prepared form.
    """
    _check_safety(archive, infos)
    names = {format.ratings for format in FORMATS}
    files = [(info, PurePosixPath(info.filename)) for info in infos if not info.is_dir()]
    roots = sorted(
        (path.parent for _, path in files if path.name in names), key=lambda p: len(p.parts)
    )
    if not roots:
        what = f"{archive} has no ratings: looked for {', '.join(sorted(names))}"
        raise EchelonError(Fault(what, "give a zip file of MovieLens"))
    root = roots[0]
    inside = [(i, path.relative_to(root)) for i, path in files if path.is_relative_to(root)]
    plain = [(i, path) for i, path in inside if not any(p.startswith(".") for p in path.parts)]
    return root.name, [(info, str(path)) for info, path in plain]


def _make_unpack_write_error(folder: Path, size: int, error: OSError) -> EchelonError:
    """Return the error for a folder that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"no space left for {folder}, which takes {size:,} bytes; nothing of it was kept"
        return EchelonError(
            Fault(what, "free some space, or choose another folder: --to DIR"), exit=ExitCode.FAILED
        )
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
        what = f"{folder} exists already and is not a MovieLens data set"
        return EchelonError(Fault(what, "move it away, or choose another folder: --to DIR"))
    what = f"{error.filename or folder} cannot be written: {format_os_error_reason(error)}"
    return EchelonError(Fault(what, "choose a writable folder: --to DIR"))
