"""Reading ratings from a file in blocks of columns.

pyarrow's streaming reader was chosen by measurement (benchmarks, 20 million rows, relative to
pandas): 0.07 of the memory, independent of the size of the file, in 0.38 of the time. polars in
blocks is faster (0.23) but takes 2.5 times the memory of pyarrow, by a call that polars declares
unstable. Reading the whole file with either takes four times the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from echelon.errors import EchelonError, Fault
from echelon.recipes.movielens.data.formats import FIX_FILE_HINT, RATING_COLUMNS, RatingsFolder
from echelon.recipes.movielens.data.ratings import Array
from echelon.recipes.movielens.data.row_errors import LARGEST_ID, find_bad_rows

if TYPE_CHECKING:
    import pyarrow.csv

_BLOCK_BYTES = 1 << 20
"""Half of it takes longer; twice as much takes more memory and no less time."""


class RatingBlock(NamedTuple):
    """Consecutive ratings as columns, by original ids."""

    users: Array
    items: Array
    ratings: Array
    times: Array


def read_blocks(source: RatingsFolder) -> Iterator[RatingBlock]:
    """Yield all rows in order, checked; if one is wrong, a second, slow pass finds it."""
    arrow = _import_pyarrow()
    good = 0
    if _can_contain_hex(source) and (
        faults := find_bad_rows(source, 0, _list_column_names(source))
    ):
        raise EchelonError(*faults)
    try:
        for batch in _open_reader(source):
            block = RatingBlock(*(batch.column(name).to_numpy() for name in RATING_COLUMNS))
            if not _is_in_range(block):
                raise _make_bad_rows_error(source, good, "an id or a rating is out of range")
            yield block
            good += len(block.users)
    except arrow.ArrowInvalid as error:
        raise _make_bad_rows_error(source, good, str(error)) from error
    if not good:
        what = f"{source.ratings} has no ratings: it ends after its header"
        raise EchelonError(Fault(what, FIX_FILE_HINT))


def _can_contain_hex(source: RatingsFolder) -> bool:
    """Return whether there is an x in the file: pyarrow takes 0x1 for a number.

    This takes a fiftieth of the time of reading, and finds one only if something is wrong or a
    column contains words.
    """
    with source.ratings.open("rb") as file:
        if source.format.has_header:
            file.readline(1 << 16)
        while data := file.read(_BLOCK_BYTES):
            if b"x" in data or b"X" in data:
                return True
    return False


def _is_in_range(block: RatingBlock) -> bool:
    """Return whether all ids and ratings of a block are valid."""
    ids = (block.users, block.items)
    in_range = all(column.min() >= 0 and column.max() <= LARGEST_ID for column in ids)
    return in_range and bool(np.isfinite(block.ratings).all())


def _open_reader(source: RatingsFolder) -> pyarrow.csv.CSVStreamingReader:
    """Return pyarrow's streaming reader for the file."""
    import pyarrow as pa
    from pyarrow import csv

    types = dict(
        zip(RATING_COLUMNS, (pa.int32(), pa.int32(), pa.float32(), pa.int64()), strict=True)
    )
    separator = source.format.separator
    return csv.open_csv(
        source.ratings,
        read_options=csv.ReadOptions(
            block_size=_BLOCK_BYTES,
            column_names=_list_column_names(source),
            skip_rows=int(source.format.has_header),
        ),
        parse_options=csv.ParseOptions(
            delimiter=separator[0], quote_char='"' if source.format.has_header else False
        ),
        convert_options=csv.ConvertOptions(
            column_types=types,
            include_columns=list(RATING_COLUMNS),
            null_values=[],  # a missing value is an error
        ),
    )


def _list_column_names(source: RatingsFolder) -> list[str]:
    """Return the name of every column. `::` is read as `:` with an empty column in between."""
    with source.ratings.open("rb") as file:
        first = file.readline(1 << 16)  # bounded: the file may be one endless line
    if not first.strip():
        raise EchelonError(Fault(f"{source.ratings} is empty", FIX_FILE_HINT))
    if source.format.has_header:
        return _parse_header(source, first)
    if source.format.separator == "::":
        return [
            RATING_COLUMNS[0],
            "",
            RATING_COLUMNS[1],
            "",
            RATING_COLUMNS[2],
            "",
            RATING_COLUMNS[3],
        ]
    return list(RATING_COLUMNS)


def _parse_header(source: RatingsFolder, line: bytes) -> list[str]:
    """Return the column names in the header, or raise if one is missing."""
    try:
        names = [n.strip().strip('"') for n in line.decode("utf-8-sig").split(",")]
    except UnicodeDecodeError as error:
        what = f"{source.ratings}, line 1 is not UTF-8"
        raise EchelonError(Fault(what, "save the file as UTF-8")) from error
    missing = [name for name in RATING_COLUMNS if name not in names]
    if missing:
        what = f"{source.ratings} has no column {', '.join(missing)}: its first line names "
        listed = ", ".join(names)
        what += listed if len(listed) < 200 else listed[:200] + " …"
        raise EchelonError(Fault(what, f"the first line has to be {','.join(RATING_COLUMNS)}"))
    return names


def _make_bad_rows_error(source: RatingsFolder, good: int, otherwise: str) -> EchelonError:
    """Return the error with the lines that are wrong, or with pyarrow's own reason."""
    faults = find_bad_rows(source, good, _list_column_names(source))
    unnamed = Fault(f"{source.ratings} cannot be read: {otherwise}", FIX_FILE_HINT)
    return EchelonError(*(faults or [unnamed]))


def _import_pyarrow() -> Any:
    """Return pyarrow, or raise with how to install it."""
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        what = "reading ratings needs pyarrow, which is not installed"
        raise EchelonError(Fault(what, "pip install 'echelon[movielens]'")) from error
    return pyarrow
