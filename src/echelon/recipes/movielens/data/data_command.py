"""What `echelon data movielens` does: put a release of GroupLens into a folder, verified, unpacked
and prepared."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.recipes.movielens.data.download import (
    RETRY_WAITS_S,
    PartialDownload,
    ProgressDisplay,
    download,
    fetch_text,
    suggest_manual_download,
)
from echelon.recipes.movielens.data.formats import find_ratings_folder, require_ratings_folder
from echelon.recipes.movielens.data.prepared_cache import load_ratings
from echelon.recipes.movielens.data.ratings import Ratings
from echelon.recipes.movielens.data.releases import (
    CITATION,
    RELEASES,
    Release,
    get_folder_name,
    get_zip_url,
)
from echelon.recipes.movielens.data.unpack import copy_folder, read_folder_name, unpack_zip
from echelon.utils.os_errors import format_os_error_reason

DEFAULT_SIZE = "latest-small"
_LINE_INTERVAL_S = 2.0
_DRAW_EVERY_S = 0.1


def get_data(
    size: str | None,
    source: str | None,
    target: Path,
    as_json: bool = False,
    waits_s: Sequence[float] = RETRY_WAITS_S,
) -> int:
    """Download a release, or import it from `source`, into the folder `target`, and print where it
    is."""
    set_size = size or DEFAULT_SIZE
    folder = (
        _import_local(Path(source), size, target)
        if source
        else _fetch_release(set_size, target, waits_s)
    )
    ratings = load_ratings(folder)
    print(json.dumps(_to_dict(folder, ratings)) if as_json else _render_summary(folder, ratings))
    return ExitCode.OK


def _import_local(local: Path, size: str | None, target: Path) -> Path:
    """Copy a folder or unpack a zip file into `target`; return the folder of the data set."""
    if not local.exists():
        raise EchelonError(
            Fault(f"there is no {local}", "give a zip of MovieLens, or its folder"),
            exit=ExitCode.NOT_FOUND,
        )
    source = require_ratings_folder(local) if local.is_dir() else None
    name = source.folder.resolve().name if source else read_folder_name(local)
    folder = target / (get_folder_name(size) if size else name)
    if not _is_present(folder):
        copy_folder(source, folder) if source else unpack_zip(local, folder)
        _require_loadable(folder, source.folder if source else local)
    return folder


def _require_loadable(folder: Path, source: Path) -> None:
    """Raise if the imported data set cannot be used, and remove it.

    It would otherwise be in the way once its source is fixed.
    """
    try:
        load_ratings(folder)
    except EchelonError as error:
        if error.exit == ExitCode.FAILED:  # a full disk, which is not the data set's fault
            raise
        shutil.rmtree(folder, ignore_errors=True)
        faults = [Fault(f.what.replace(str(folder), str(source)), f.do) for f in error.faults]
        raise EchelonError(*faults, exit=error.exit) from error


def _fetch_release(size: str, target: Path, waits_s: Sequence[float]) -> Path:
    """Download, verify and unpack a release; return its folder."""
    folder = target / get_folder_name(size)
    if _is_present(folder):
        return folder
    url = get_zip_url(size)
    part = PartialDownload.locate_in_folder(target, f"{folder.name}.zip")
    _make_folder(target)
    print(f"downloading {url} (about {RELEASES[size].megabytes} MB)", file=sys.stderr)
    try:
        with _open_progress() as progress:
            download(url, part, progress, waits_s)
    except KeyboardInterrupt:
        print(f"stopped; {part.get_size_bytes():,} bytes are kept in {part.data}", file=sys.stderr)
        raise
    except EchelonError:
        with contextlib.suppress(OSError):
            target.rmdir()  # where nothing came, nothing is left
        raise
    _verify_checksum(part, url, RELEASES[size])
    unpack_zip(part.data, folder)
    part.remove()
    return folder


def _make_folder(target: Path) -> None:
    """Create the folder, or raise with the reason."""
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"{target} cannot be created: {format_os_error_reason(error)}"
        raise EchelonError(Fault(what, "choose a writable folder: --to DIR")) from error


def _is_present(folder: Path) -> bool:
    """Return whether the data set is there and can be read; it is then left alone."""
    if not folder.is_dir() or find_ratings_folder(folder) is None:
        return False
    try:
        load_ratings(folder)
    except EchelonError as error:
        what = f"{folder} exists already but cannot be used"
        raise EchelonError(
            *error.faults,
            Fault(what, f"remove it and type this command again: rm -r {shlex.quote(str(folder))}"),
        ) from error
    print(f"{folder} exists already; to get it again, remove it first", file=sys.stderr)
    return True


# --- verification -------------------------------------------------------------------------------


def _verify_checksum(part: PartialDownload, url: str, known: Release) -> None:
    """Raise unless the file has the known checksum, or the one that is published beside it now."""
    found = _compute_digest(part.data, "sha256" if len(known.digest) == 64 else "md5")
    if found == known.digest:
        return
    published = re.search(r"\b[0-9a-fA-F]{32}\b", fetch_text(f"{url}.md5") or "")
    md5 = _compute_digest(part.data, "md5")
    if published and published[0].lower() == md5:
        print(
            f"note: {url} is not the set known here (checksum {found}, known {known.digest}) but "
            "as published beside it: a newer one, whose figures differ",
            file=sys.stderr,
        )
        return
    part.remove()
    details = f"published md5 {published[0]}, found {md5}" if published else f"found {found}"
    raise EchelonError(
        Fault(
            f"{url}: wrong checksum: known {known.digest}, {details}; the file was removed",
            f"type the same command again; if that does not help, {suggest_manual_download(url)}",
        ),
        exit=ExitCode.FAILED,
    )


def _compute_digest(archive: Path, kind: str) -> str:
    """Return the sha256 or md5 of a file."""
    with archive.open("rb") as file:
        digest = hashlib.new(kind, usedforsecurity=False)
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


# --- output -------------------------------------------------------------------------------------


def _to_dict(folder: Path, ratings: Ratings) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "folder": str(folder),
        "ratings": len(ratings.users),
        "users": ratings.num_users,
        "movies": ratings.num_items,
        "fingerprint": ratings.fingerprint,
    }


def _render_summary(folder: Path, ratings: Ratings) -> str:
    """Return the size, licence and citation of the data set, and the next command."""
    readme = next(iter(sorted(folder.glob("README*"))), None)
    where = f"in {readme}" if readme else "at https://grouplens.org/datasets/movielens"
    default = folder == Path("data") / get_folder_name(DEFAULT_SIZE)
    setting = "" if default else f" data={shlex.quote(str(folder))}"
    return (
        f"{folder}: {len(ratings.users):,} ratings of {ratings.num_users:,} users for "
        f"{ratings.num_items:,} movies\n"
        f"licence: GroupLens' own, {where}: for research; ask them for commercial use\n"
        f"cite: {CITATION}\n"
        f"next: echelon train experiment=movielens{setting}"
    )


@contextlib.contextmanager
def _open_progress() -> Iterator[ProgressDisplay]:
    """Yield a progress bar on a terminal, and lines every few seconds elsewhere."""
    if not sys.stderr.isatty():
        yield _ProgressLines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(None), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield _ProgressBar(bar)


class _ProgressLines:
    """Prints a line every two seconds, for logs."""

    def __init__(self) -> None:
        self.next_at = time.monotonic() + _LINE_INTERVAL_S

    def update(self, have: int, total: int | None) -> None:
        now = time.monotonic()
        if now >= self.next_at:
            self.next_at = now + _LINE_INTERVAL_S
            of = f" of {total / 1e6:,.1f}" if total else ""
            self.print_line(f"{have / 1e6:,.1f}{of} MB")

    def print_line(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class _ProgressBar:
    """Draws a bar on a terminal."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar
        self.task = bar.add_task("", total=None)

    def update(self, have: int, total: int | None) -> None:
        self.bar.update(self.task, completed=have, total=total)

    def print_line(self, line: str) -> None:
        self.bar.console.print(line, markup=False, highlight=False)
