"""Ratings from a file, in blocks of columns.

pyarrow's streaming reader, weighed by measurement (benchmarks/reading.py, 20 million rows, ×
pandas): 0.07 of the memory, which does not grow with the file, in 0.38 of the time. polars' blocks
are quicker, 0.23, but take 2.5 times the memory of pyarrow's, and come by a call that polars says
may change at any time. Either one reading the whole file takes four times the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from echelon.data.movielens.formats import AGAIN, COLUMNS, Source
from echelon.data.movielens.ratings import Array
from echelon.data.movielens.rows import LARGEST_ID, faults_after
from echelon.errors import EchelonError, Fault

if TYPE_CHECKING:
    import pyarrow.csv

_BLOCK_BYTES = 1 << 20
"""Half as much takes longer, twice as much takes more memory and no less time."""


class Block(NamedTuple):
    users: Array
    items: Array
    ratings: Array
    times: Array


def blocks(source: Source) -> Iterator[Block]:
    """All rows in order, checked. What is wrong is looked for by a second, slow reading."""
    arrow = _arrow()
    good = 0
    if _has_an_x(source) and (faults := faults_after(source, 0, _names(source))):
        raise EchelonError(*faults)
    try:
        for batch in _open(source):
            block = Block(*(batch.column(name).to_numpy() for name in COLUMNS))
            if not _sound(block):
                raise _at_fault(source, good, "an id or a rating is out of range")
            yield block
            good += len(block.users)
    except arrow.ArrowInvalid as error:
        raise _at_fault(source, good, str(error)) from error
    if not good:
        what = f"{source.ratings} has no ratings: it ends after its header"
        raise EchelonError(Fault(what, AGAIN))


def _has_an_x(source: Source) -> bool:
    """pyarrow takes 0x1 for a number. A look costs a fiftieth of reading, and finds one only in
    what is wrong or has a column of words."""
    with source.ratings.open("rb") as file:
        if source.format.has_header:
            file.readline(1 << 16)
        while data := file.read(_BLOCK_BYTES):
            if b"x" in data or b"X" in data:
                return True
    return False


def _sound(block: Block) -> bool:
    ids = (block.users, block.items)
    in_range = all(column.min() >= 0 and column.max() <= LARGEST_ID for column in ids)
    return in_range and bool(np.isfinite(block.ratings).all())


def _open(source: Source) -> pyarrow.csv.CSVStreamingReader:
    import pyarrow as pa
    from pyarrow import csv

    types = dict(zip(COLUMNS, (pa.int32(), pa.int32(), pa.float32(), pa.int64()), strict=True))
    separator = source.format.separator
    return csv.open_csv(
        source.ratings,
        read_options=csv.ReadOptions(
            block_size=_BLOCK_BYTES,
            column_names=_names(source),
            skip_rows=int(source.format.has_header),
        ),
        parse_options=csv.ParseOptions(
            delimiter=separator[0], quote_char='"' if source.format.has_header else False
        ),
        convert_options=csv.ConvertOptions(
            column_types=types,
            include_columns=list(COLUMNS),
            null_values=[],  # a missing value is a fault, never a gap
        ),
    )


def _names(source: Source) -> list[str]:
    """Of every column. `::` is read as `:` with an empty column between each two."""
    with source.ratings.open("rb") as file:
        first = file.readline(1 << 16)  # a file of one endless line is none of ours
    if not first.strip():
        raise EchelonError(Fault(f"{source.ratings} is empty", AGAIN))
    if source.format.has_header:
        return _header(source, first)
    if source.format.separator == "::":
        return [COLUMNS[0], "", COLUMNS[1], "", COLUMNS[2], "", COLUMNS[3]]
    return list(COLUMNS)


def _header(source: Source, line: bytes) -> list[str]:
    try:
        names = [n.strip().strip('"') for n in line.decode("utf-8-sig").split(",")]
    except UnicodeDecodeError as error:
        what = f"{source.ratings}, line 1 is not UTF-8"
        raise EchelonError(Fault(what, "save the file as UTF-8")) from error
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        what = f"{source.ratings} has no column {', '.join(missing)}: its first line names "
        told = ", ".join(names)
        what += told if len(told) < 200 else told[:200] + " …"
        raise EchelonError(Fault(what, f"the first line has to be {','.join(COLUMNS)}"))
    return names


def _at_fault(source: Source, good: int, otherwise: str) -> EchelonError:
    faults = faults_after(source, good, _names(source))
    unnamed = Fault(f"{source.ratings} cannot be read: {otherwise}", AGAIN)
    return EchelonError(*(faults or [unnamed]))


def _arrow() -> Any:
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        what = "reading ratings needs pyarrow, which is not installed"
        raise EchelonError(Fault(what, "pip install 'echelon[movielens]'")) from error
    return pyarrow
