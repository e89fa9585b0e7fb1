"""Columns of Arrow tables as numpy and Python values, any rows of many pieces at once.

Numbers become numpy scalars and keep their type, lists of numbers become arrays, texts, bytes and
all else Python values. A null is None.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.data.formats.reader import (
    BadSampleError,
    ChunkTable,
    SamplePlace,
    find_piece,
    group_by_piece,
    split_columns,
    sum_to_starts,
)
from echelon.errors import EchelonError, Fault

MAX_PIECE_BYTES = 128 << 20
"""Larger pieces, such as the row groups of some writers, are cut: a window of the order holds
several."""
CACHE_BYTES = 384 << 20
"""What a process keeps of decoded pieces. A window of the order has 256 MB, and the first samples
of the next one are read while it ends."""

ENCODED_TYPE = "struct<bytes: binary, path: string>"
"""Of columns in which Hugging Face stores files, such as pictures."""
_UNKNOWN_VALUES = (ValueError, OverflowError)
"""What pyarrow raises for dates after the year 9999, and for nanoseconds within lists."""


def import_pyarrow(module: str = "pyarrow") -> Any:
    """Return pyarrow or one of its modules, or raise with how to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        what = "reading Parquet and Arrow files needs pyarrow, which is not installed"
        raise EchelonError(Fault(what, "pip install 'echelon[data]'")) from error


class NumberColumn:
    """Numbers, or rows of equally many of them."""

    def __init__(self, values: NDArray[Any], is_null: NDArray[np.bool_] | None = None) -> None:
        self.values, self.is_null = values, is_null

    def take(self, rows: NDArray[np.int64]) -> Any:
        """Return an array of these rows, or a list with None for nulls."""
        taken = self.values.take(rows, 0)
        if self.is_null is None or not (missing := self.is_null[rows]).any():
            return taken
        return [None if gap else each for each, gap in zip(taken, missing, strict=True)]


class NumberBlock:
    """Columns of numbers of one type, a row beside the other: any row of all of them is in one
    place of memory, and is taken at once."""

    def __init__(self, columns: Sequence[NDArray[Any]]) -> None:
        self._values = np.stack(columns, axis=1)

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return an array with a column for each."""
        taken: NDArray[Any] = self._values.take(rows, 0)
        return taken


class ListColumn:
    """Lists of numbers of any length."""

    def __init__(self, values: NDArray[Any], borders: NDArray[Any]) -> None:
        self._values, self._borders = values, borders

    def take(self, rows: NDArray[np.int64]) -> Any:
        """Return an array where the lists are equally long, or a list of arrays."""
        begins, ends = self._borders[rows].tolist(), self._borders[rows + 1].tolist()
        lists = [self._values[a:b].copy() for a, b in zip(begins, ends, strict=True)]
        return stack_if_equal(lists)


class ObjectColumn:
    """Texts, bytes, structs, and lists with nulls."""

    def __init__(self, values: Any, leaf: Any) -> None:
        self._values, self._leaf = values, leaf

    def take(self, rows: NDArray[np.int64]) -> ObjectColumn:
        """Return a column of these rows. It stays Arrow's until all rows of a batch are together:
        moving Python's objects costs several times as much."""
        return ObjectColumn(self._values.take(import_pyarrow().array(rows)), self._leaf)

    def join(self, others: Sequence[ObjectColumn]) -> ObjectColumn | None:
        """Return this column with others after it; None where they are of other types."""
        parts = [self._values, *(other._values for other in others)]
        if any(part.type != parts[0].type for part in parts):
            return None
        return ObjectColumn(import_pyarrow().concat_arrays(parts), self._leaf)

    def to_list(self) -> list[Any]:
        """Return Python values. Lists of numbers, also nested ones, are arrays where they are
        regular."""
        values: list[Any] = self._values.to_pylist()
        if self._leaf is None:
            return values
        return [self._make_array(value) for value in values]

    def _make_array(self, value: Any) -> Any:
        try:
            return value if value is None else np.array(value, self._leaf)
        except (ValueError, TypeError):  # of different lengths, or with nulls
            return value


ColumnValues = NumberColumn | ListColumn | ObjectColumn
Piece = Mapping[tuple[str, ...], ColumnValues | NumberBlock]
"""Columns by name. A block has the names of all its columns."""


def stack_if_equal(arrays: list[Any]) -> Any:
    """Return arrays of one shape as one array, others as they are."""
    is_equal = bool(arrays) and all(each.shape == arrays[0].shape for each in arrays)
    return np.stack(arrays) if is_equal else arrays


def make_column(values: Any) -> ColumnValues:
    """Return an Arrow array so that rows of it can be taken."""
    pa = import_pyarrow()
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
        if isinstance(values, pa.ChunkedArray):  # too long for one array
            values = pa.concat_arrays(values.chunks)
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    kind = values.type
    if pa.types.is_dictionary(kind):
        values = values.dictionary_decode()
        kind = values.type
    if _is_time_in_ns(kind):
        # datetime has microseconds, and pandas, which need not be installed, a class of its own.
        is_null = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
        return NumberColumn(values.to_numpy(zero_copy_only=False), is_null)
    if _is_number(kind):
        numbers = values.to_numpy(zero_copy_only=False) if not values.null_count else None
        if numbers is None:
            filled = values.fill_null(False if pa.types.is_boolean(kind) else 0)
            is_null = values.is_null().to_numpy(zero_copy_only=False)
            return NumberColumn(filled.to_numpy(zero_copy_only=False), is_null)
        return NumberColumn(numbers)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    is_fixed = pa.types.is_fixed_size_list(kind)
    if (is_list or is_fixed) and not values.null_count and _is_number(kind.value_type):
        inner = values.flatten()
        if not inner.null_count:
            numbers = inner.to_numpy(zero_copy_only=False)
            if is_fixed:
                return NumberColumn(numbers.reshape(len(values), kind.list_size))
            borders = values.offsets.to_numpy()
            return ListColumn(numbers, borders - borders[0])
    return ObjectColumn(values, _find_leaf(kind))


def name_type(kind: Any) -> str:
    """Return the name of an Arrow type, the same for types whose values are read as the same.
    That of a column with nulls alone is empty: it fits any other."""
    types = import_pyarrow().types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return "" if types.is_null(kind) else str(kind).replace("large_", "")


def make_types(schema: Any) -> dict[str, str]:
    """Return the names of the types of all columns. Raises ValueError where two columns have the
    same name."""
    types = {field.name: name_type(field.type) for field in schema}
    if len(types) < len(schema):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise ValueError(f"has two columns {twice!r}")
    return types


def merge_numbers(columns: Mapping[str, ColumnValues]) -> Piece:
    """Return columns with those that are plain numbers of one type in blocks."""
    by_type: dict[np.dtype[Any], list[str]] = {}
    for name, column in columns.items():
        if isinstance(column, NumberColumn) and column.values.ndim == 1 and column.is_null is None:
            by_type.setdefault(column.values.dtype, []).append(name)
    merged: dict[tuple[str, ...], ColumnValues | NumberBlock] = {}
    for names in by_type.values():
        if len(names) > 1:
            values = [columns[name].values for name in names]  # type: ignore[union-attr]
            merged[tuple(names)] = NumberBlock(values)
    in_blocks = {name for names in merged for name in names}
    for name, column in columns.items():
        if name not in in_blocks:
            merged[name,] = column
    return merged


def _is_number(kind: Any) -> bool:
    types = import_pyarrow().types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_time_in_ns(kind: Any) -> bool:
    types = import_pyarrow().types
    return bool((types.is_timestamp(kind) or types.is_duration(kind)) and kind.unit == "ns")


def _find_leaf(kind: Any) -> Any:
    """Return numpy's type of the numbers in lists of any depth, or None for what is no list of
    numbers."""
    types = import_pyarrow().types
    depth = 0
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind, depth = kind.value_type, depth + 1
    return np.dtype(kind.to_pandas_dtype()) if depth and _is_number(kind) else None


class PieceCache:
    """The pieces that were used last, as columns, of at most so many bytes; always the last one."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pieces: OrderedDict[int, tuple[Piece, int]] = OrderedDict()
        self.size_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process begins with an empty one."""
        return PieceCache, (self._max_bytes,)

    def get(self, piece: int) -> Piece | None:
        """Return a piece that is kept."""
        if piece not in self._pieces:
            return None
        self._pieces.move_to_end(piece)
        return self._pieces[piece][0]

    def put(self, piece: int, columns: Piece, size_bytes: int) -> None:
        """Keeps a piece in the place of those that were not used for longest."""
        self._pieces[piece] = columns, size_bytes
        self.size_bytes += size_bytes
        while self.size_bytes > self._max_bytes and len(self._pieces) > 1:
            _, (_, freed) = self._pieces.popitem(last=False)
            self.size_bytes -= freed


class TableReader:
    """What the readers of Parquet and Arrow have in common: pieces of tables, and rows of them."""

    column_names: list[str]
    chunks: ChunkTable
    encoded_columns: list[str]
    """Those with files in them, as Hugging Face stores pictures and sounds."""

    def __init__(self, piece_rows: Sequence[int]) -> None:
        self._piece_starts = sum_to_starts(piece_rows)
        self._cache = PieceCache()

    def __len__(self) -> int:
        return int(self._piece_starts[-1])

    def load_piece(self, piece: int) -> tuple[Piece, int]:
        """Return the columns of a piece, and the bytes they take."""
        raise NotImplementedError

    def locate_stored(self, row: int) -> SamplePlace:
        """Return where a row is, of all that the files have."""
        raise NotImplementedError

    def read_columns(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """Return the columns of these rows."""
        try:
            return self._take_rows(rows)
        except _UNKNOWN_VALUES:
            self._raise_bad_row(rows)
            raise

    def _take_rows(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        places: list[Any] = []
        parts = []
        for piece, place, within in group_by_piece(self._piece_starts, rows):
            places.append(place)
            columns = self._get_piece(piece)
            parts.append({names: column.take(within) for names, column in columns.items()})
        if any(part.keys() != parts[0].keys() for part in parts):  # some have nulls
            parts = [_split_blocks(part) for part in parts]
        inverse = None
        if len(parts) > 1:
            inverse = np.empty(len(rows), np.int64)
            inverse[np.concatenate(places)] = np.arange(len(rows))
        joined = {
            names: _join_parts([part[names] for part in parts], inverse)
            for names in (parts[0] if parts else ())
        }
        found = _split_blocks(joined)
        return {name: found.get((name,), []) for name in self.column_names}

    def _get_piece(self, piece: int) -> Piece:
        columns = self._cache.get(piece)
        if columns is None:
            columns, size_bytes = self.load_piece(piece)
            self._cache.put(piece, columns, size_bytes)
        return columns

    def _raise_bad_row(self, rows: NDArray[np.int64]) -> None:
        """Raises for the first of some rows that has a value which Python cannot have."""
        for row in rows.tolist():
            piece, within = find_piece(self._piece_starts, row)
            for names, column in self._get_piece(piece).items():
                try:
                    _join_parts([column.take(np.array([within]))], None)
                except _UNKNOWN_VALUES as error:
                    why = f"{names[0]} cannot be read: {' '.join(str(error).split())}"
                    raise BadSampleError(self.locate_stored(row), why) from error

    def read_samples(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows by number."""
        return split_columns(self.read_columns(np.asarray(rows, np.int64)), len(rows))


def _split_blocks(taken: Mapping[tuple[str, ...], Any]) -> dict[tuple[str, ...], Any]:
    """Return what was taken of blocks as columns, each by itself in memory."""
    split: dict[tuple[str, ...], Any] = {}
    for names, values in taken.items():
        if len(names) == 1:
            split[names] = values
        else:
            columns = make_aligned(values.T.shape, values.dtype)
            np.copyto(columns, values.T)
            split.update({(name,): column for name, column in zip(names, columns, strict=True)})
    return split


def make_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array of any values at an address that is a multiple of 64: batches that are cut
    out of it need not be copied to be aligned."""
    size = int(np.prod(shape)) * dtype.itemsize
    room = np.empty(size + 64, np.uint8)
    begin = -room.ctypes.data % 64
    return room[begin : begin + size].view(dtype).reshape(shape)


def cut_rows(rows: int, size_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields the first row, the number of rows and the bytes of the parts that rows are cut into,
    each of at most MAX_PIECE_BYTES."""
    count = max(1, -(-size_bytes // MAX_PIECE_BYTES))
    borders = [rows * cut // count for cut in range(count + 1)]
    for first, stop in pairwise(borders):
        if first < stop:
            yield first, stop - first, size_bytes * (stop - first) // rows


def _join_parts(parts: list[Any], inverse: NDArray[np.int64] | None) -> Any:
    """Return the values of several pieces in the order in which they were asked for. `inverse` has
    the place of each among the joined parts; None for one part."""
    if all(isinstance(part, ObjectColumn) for part in parts):
        joined = parts[0].join(parts[1:]) if inverse is not None else parts[0]
        if joined is not None:
            return (joined if inverse is None else joined.take(inverse)).to_list()
    if inverse is None:
        return parts[0]
    if all(isinstance(part, np.ndarray) and part.shape[1:] == parts[0].shape[1:] for part in parts):
        # To take is several times as fast in numpy as to assign to places. "clip" is quicker, as
        # it needs no copy in case that a place does not exist.
        joined = np.concatenate(parts)
        out = make_aligned((len(inverse), *joined.shape[1:]), joined.dtype)
        return joined.take(inverse, 0, out, "clip")
    lists = [part.to_list() if isinstance(part, ObjectColumn) else part for part in parts]
    values = [value for part in lists for value in part]
    return [values[place] for place in inverse.tolist()]
