"""From a file of ratings to arrays by dense id that can be memory-mapped.

Columns are written block by block while the file is read, and renumbered in place by a second pass,
so the memory needed does not grow with the file.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from echelon.recipes.movielens.data.formats import RatingsFolder
from echelon.recipes.movielens.data.movie_titles import read_movies
from echelon.recipes.movielens.data.ratings import MOVIES_FILE, Array
from echelon.recipes.movielens.data.ratings_reader import RatingBlock, read_blocks
from echelon.utils.files import flush_to_disk

COLUMN_TYPES = {"users": np.int32, "items": np.int32, "ratings": np.float32, "times": np.int64}
ID_FILES = ("user_ids", "item_ids")
_BLOCK_ROWS = 1 << 18


@dataclass
class IdScan:
    """What is learned about ids while the blocks pass."""

    users: Array = field(default_factory=lambda: np.zeros(1 << 10, bool))
    items: Array = field(default_factory=lambda: np.zeros(1 << 10, bool))
    """Which original ids occur."""
    rows: int = 0
    is_ascending: bool = True
    """Whether rows are sorted by user and movie, as in newer releases: then no pair occurs twice.
    """
    last_pair: int = -1

    def add(self, block: RatingBlock) -> None:
        """Take a block into account."""
        self.users = _mark_ids(self.users, block.users)
        self.items = _mark_ids(self.items, block.items)
        self.rows += len(block.users)
        if self.is_ascending:
            pairs = block.users.astype(np.int64) << 32 | block.items
            self.is_ascending = bool(pairs[0] > self.last_pair and (pairs[1:] > pairs[:-1]).all())
            self.last_pair = int(pairs[-1])


def _mark_ids(present: Array, ids: Array) -> Array:
    """Return the flags with those of these ids set, enlarged if necessary."""
    largest = int(ids.max())
    if largest >= len(present):
        grown = np.zeros(max(largest + 1, 2 * len(present)), bool)
        grown[: len(present)] = present
        present = grown
    present[ids] = True
    return present


def prepare_ratings(source: RatingsFolder, folder: Path) -> int:
    """Write all files of the prepared form into an empty folder.

    Returns how many ratings were dropped because the user rated the movie again later.
    """
    scan = _write_columns(source, folder)
    for column, present in (("users", scan.users), ("items", scan.items)):
        ids = np.flatnonzero(present)
        np.save(folder / f"{column[:-1]}_ids.npy", ids)
        _renumber(folder / f"{column}.npy", ids)
    dropped = 0 if scan.is_ascending else _drop_repeated_ratings(folder)
    titles = {number: (title, genres) for number, title, genres in read_movies(source)}
    (folder / MOVIES_FILE).write_text(json.dumps(titles, ensure_ascii=False), encoding="utf-8")
    return dropped


def _write_columns(source: RatingsFolder, folder: Path) -> IdScan:
    """Write each column of the file as a .npy file of original ids."""
    scan = IdScan()
    with ExitStack() as stack:
        files = [
            stack.enter_context(_make_column_path(folder, name).open("wb")) for name in COLUMN_TYPES
        ]
        for file, kind in zip(files, COLUMN_TYPES.values(), strict=True):
            file.write(_make_npy_header(kind, 0))
        for block in read_blocks(source):
            scan.add(block)
            for file, column in zip(files, block, strict=True):
                file.write(column.data)
        for file, kind in zip(files, COLUMN_TYPES.values(), strict=True):
            file.seek(0)
            file.write(_make_npy_header(kind, scan.rows))
    return scan


def _make_column_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.npy"


def _make_npy_header(kind: type, rows: int) -> bytes:
    """Return the header of a .npy file. numpy pads it for any number of rows, so it can be
    overwritten at the end."""
    header = io.BytesIO()
    fields = {"descr": np.dtype(kind).str, "fortran_order": False, "shape": (rows,)}
    np.lib.format.write_array_header_1_0(header, fields)
    return header.getvalue()


def _renumber(path: Path, ids: Array) -> None:
    """Replace original ids by dense ones, in place."""
    dense = np.zeros(int(ids[-1]) + 1, np.int32)
    dense[ids] = np.arange(len(ids), dtype=np.int32)
    with path.open("r+b") as file:
        for start, block in _iter_npy_blocks(file):
            file.seek(start)
            file.write(dense[block].data)


def _iter_npy_blocks(file: BinaryIO) -> Iterator[tuple[int, Array]]:
    """Yield offset and content of each block of a .npy file of int32."""
    np.lib.format.read_magic(file)
    np.lib.format.read_array_header_1_0(file)
    start = file.tell()
    while data := file.read(4 * _BLOCK_ROWS):
        yield start, np.frombuffer(data, np.int32)
        start += len(data)
        file.seek(start)


def _drop_repeated_ratings(folder: Path) -> int:
    """Keep the newest rating of every pair of user and movie, or the later line of two equally new;
    return how many were dropped."""
    users, items = (
        np.load(_make_column_path(folder, name), mmap_mode="r") for name in ("users", "items")
    )
    pairs = users * np.int64(items.max() + 1) + items
    ordered = np.sort(pairs)
    if (ordered[1:] != ordered[:-1]).all():
        return 0
    order = np.lexsort(
        (np.load(_make_column_path(folder, "times"), mmap_mode="r"), pairs)
    )  # stable
    newest = np.append(pairs[order[1:]] != pairs[order[:-1]], True)
    kept_rows = np.sort(order[newest])
    for name in COLUMN_TYPES:
        column = np.load(_make_column_path(folder, name), mmap_mode="r")[kept_rows]
        _make_column_path(folder, name).unlink()  # not overwritten: it may still be mapped above
        np.save(_make_column_path(folder, name), column)
    return len(pairs) - len(kept_rows)


def flush_files_to_disk(folder: Path) -> None:
    """Flush all files of a folder to disk: after a power cut, no valid cache may contain zeros."""
    for path in [*folder.iterdir(), folder]:
        flush_to_disk(path)
