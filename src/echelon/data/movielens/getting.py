"""`echelon data movielens`: a set of GroupLens' into a folder, checked, unpacked and prepared."""

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

from echelon.data.movielens.cache import load
from echelon.data.movielens.download import WAITS_S, Part, Shown, download, elsewhere, text_at
from echelon.data.movielens.formats import find, found_in
from echelon.data.movielens.ratings import Ratings
from echelon.data.movielens.sets import CITE, SETS, Known, address, folder_name
from echelon.data.movielens.unpack import copy, name_in, unpack
from echelon.errors import EchelonError, Exit, Fault
from echelon.utils.os_errors import describe_os_error

DEFAULT_SIZE = "latest-small"
_LINE_EVERY_S = 2.0
_DRAW_EVERY_S = 0.1


def get(
    size: str | None,
    given: str | None,
    to: Path,
    as_json: bool = False,
    waits_s: Sequence[float] = WAITS_S,
) -> int:
    set_size = size or DEFAULT_SIZE
    folder = _from(Path(given), size, to) if given else _fetched(set_size, to, waits_s)
    ratings = load(folder)
    print(json.dumps(_told(folder, ratings)) if as_json else _summary(folder, ratings))
    return Exit.OK


def _from(given: Path, size: str | None, to: Path) -> Path:
    if not given.exists():
        raise EchelonError(
            Fault(f"there is no {given}", "give a zip of MovieLens, or its folder"),
            exit=Exit.NOT_FOUND,
        )
    source = find(given) if given.is_dir() else None
    name = source.folder.resolve().name if source else name_in(given)
    folder = to / (folder_name(size) if size else name)
    if not _present(folder):
        copy(source, folder) if source else unpack(given, folder)
        _require_sound(folder, source.folder if source else given)
    return folder


def _require_sound(folder: Path, given: Path) -> None:
    """What cannot be used does not stay: it would stand in the way once its source is mended."""
    try:
        load(folder)
    except EchelonError as error:
        if error.exit == Exit.FAILED:  # a full disk, for which the set can do nothing
            raise
        shutil.rmtree(folder, ignore_errors=True)
        faults = [Fault(f.what.replace(str(folder), str(given)), f.do) for f in error.faults]
        raise EchelonError(*faults, exit=error.exit) from error


def _fetched(size: str, to: Path, waits_s: Sequence[float]) -> Path:
    folder = to / folder_name(size)
    if _present(folder):
        return folder
    url = address(size)
    part = Part.of(to, f"{folder.name}.zip")
    _make(to)
    print(f"downloading {url} (about {SETS[size].megabytes} MB)", file=sys.stderr)
    try:
        with _screen() as shown:
            download(url, part, shown, waits_s)
    except KeyboardInterrupt:
        print(f"stopped; {part.size():,} bytes are kept in {part.data}", file=sys.stderr)
        raise
    except EchelonError:
        with contextlib.suppress(OSError):
            to.rmdir()  # where nothing came, nothing is left
        raise
    _verify(part, url, SETS[size])
    unpack(part.data, folder)
    part.remove()
    return folder


def _make(to: Path) -> None:
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"{to} cannot be made: {describe_os_error(error)}"
        raise EchelonError(Fault(what, "give a folder that can be written: --to DIR")) from error


def _present(folder: Path) -> bool:
    """What is there and can be read is left alone."""
    if not folder.is_dir() or found_in(folder) is None:
        return False
    try:
        load(folder)
    except EchelonError as error:
        what = f"{folder} is there already and cannot be used"
        raise EchelonError(
            *error.faults,
            Fault(what, f"remove it and type this again: rm -r {shlex.quote(str(folder))}"),
        ) from error
    print(f"{folder} is there already; to take it anew, remove it first", file=sys.stderr)
    return True


# --- is it what GroupLens publishes -------------------------------------------------------------


def _verify(part: Part, url: str, known: Known) -> None:
    """As known when this was written, or else by the checksum that is published beside it now."""
    found = _digest(part.data, "sha256" if len(known.digest) == 64 else "md5")
    if found == known.digest:
        return
    published = re.search(r"\b[0-9a-fA-F]{32}\b", text_at(f"{url}.md5") or "")
    md5 = _digest(part.data, "md5")
    if published and published[0].lower() == md5:
        print(
            f"note: {url} is not the set known here (checksum {found}, known {known.digest}) but "
            "as published beside it: a newer one, whose figures differ",
            file=sys.stderr,
        )
        return
    part.remove()
    told = f"published md5 {published[0]}, found {md5}" if published else f"found {found}"
    raise EchelonError(
        Fault(
            f"{url}: wrong checksum: known {known.digest}, {told}; the file was removed",
            f"type the same again; if that does not help, {elsewhere(url)}",
        ),
        exit=Exit.FAILED,
    )


def _digest(archive: Path, kind: str) -> str:
    with archive.open("rb") as file:
        digest = hashlib.new(kind, usedforsecurity=False)
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


# --- what a person sees -------------------------------------------------------------------------


def _told(folder: Path, ratings: Ratings) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "ratings": len(ratings.users),
        "users": ratings.num_users,
        "movies": ratings.num_items,
        "fingerprint": ratings.fingerprint,
    }


def _summary(folder: Path, ratings: Ratings) -> str:
    readme = next(iter(sorted(folder.glob("README*"))), None)
    where = f"in {readme}" if readme else "at https://grouplens.org/datasets/movielens"
    default = folder == Path("data") / folder_name(DEFAULT_SIZE)
    setting = "" if default else f" data={shlex.quote(str(folder))}"
    return (
        f"{folder}: {len(ratings.users):,} ratings of {ratings.num_users:,} users for "
        f"{ratings.num_items:,} movies\n"
        f"licence: GroupLens' own, {where}: for research; ask them for commercial use\n"
        f"cite: {CITE}\n"
        f"next: echelon train experiment=movielens{setting}"
    )


@contextlib.contextmanager
def _screen() -> Iterator[Shown]:
    if not sys.stderr.isatty():
        yield _Lines()
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
        yield _Bar(bar)


class _Lines:
    def __init__(self) -> None:
        self.next_at = time.monotonic() + _LINE_EVERY_S

    def moved(self, have: int, total: int | None) -> None:
        now = time.monotonic()
        if now >= self.next_at:
            self.next_at = now + _LINE_EVERY_S
            of = f" of {total / 1e6:,.1f}" if total else ""
            self.note(f"{have / 1e6:,.1f}{of} MB")

    def note(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class _Bar:
    def __init__(self, bar: Any) -> None:
        self.bar = bar
        self.task = bar.add_task("", total=None)

    def moved(self, have: int, total: int | None) -> None:
        self.bar.update(self.task, completed=have, total=total)

    def note(self, line: str) -> None:
        self.bar.console.print(line, markup=False, highlight=False)
