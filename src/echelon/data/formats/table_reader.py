"""What the readers of Parquet and Arrow have in common: pieces of tables, and rows of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.data.formats.arrow_columns import (
    ColumnValues,
    NumberColumn,
    ObjectColumn,
    make_column,
    make_plain,
)
from echelon.data.formats.packed_rows import (
    TEXT_VIEW,
    FreeRows,
    PackedRows,
    make_aligned,
)
from echelon.data.formats.reader import (
    BadSampleError,
    ChunkTable,
    SamplePlace,
    find_piece,
    group_by_piece,
    split_columns,
    sum_to_starts,
)
from echelon.data.formats.text_views import TextBuffers, TextValues, make_views

CACHE_BYTES = 384 << 20
"""What a process keeps of decoded pieces. A window of the order has 256 MB, and the first samples
of the next one are read while it ends."""
_UNKNOWN_VALUES = (ValueError, OverflowError)
"""What pyarrow raises for dates after the year 9999, and for nanoseconds within lists."""


class LoadedPiece(NamedTuple):
    """A piece that is kept."""

    first: int = 0
    """Of its packed rows."""
    rows: int = 0
    columns: Mapping[str, ColumnValues] = {}
    """Those that are not packed."""
    text_buffers: Sequence[int] = ()


class PieceCache:
    """The pieces that were used last, of at most so many bytes; always the last one."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: OrderedDict[int, tuple[LoadedPiece, int]] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def get(self, piece: int) -> LoadedPiece | None:
        """Return a piece that is kept."""
        if piece not in self._pieces:
            return None
        self._pieces.move_to_end(piece)
        return self._pieces[piece][0]

    def put(self, piece: int, loaded: LoadedPiece, size_bytes: int) -> None:
        """Keeps a piece."""
        self._pieces[piece] = loaded, size_bytes
        self.size_bytes += size_bytes

    @property
    def is_over_full(self) -> bool:
        """Whether more is kept than may be."""
        return self.size_bytes > self._max_bytes and len(self._pieces) > 1

    def pop_oldest(self) -> tuple[int, LoadedPiece]:
        """Drop the piece that was not used for longest, and return it."""
        piece, (loaded, freed) = self._pieces.popitem(last=False)
        self.size_bytes -= freed
        return piece, loaded


class LoadedRows:
    """The rows of the pieces that a process keeps, packed as far as they can be."""

    def __init__(
        self, piece_rows: NDArray[np.int64], packed: Mapping[str, np.dtype[Any]], row_bytes: int
    ) -> None:
        """`packed` says what columns are packed as; `row_bytes` is what a row takes, about."""
        self._given = piece_rows, packed, row_bytes
        total = int(piece_rows.sum())
        largest = int(piece_rows.max()) if len(piece_rows) else 0
        self.max_rows = min(total, max(CACHE_BYTES // max(1, row_bytes), 2 * largest))
        """Of all pieces together."""
        self._is_whole = self.max_rows == total
        """Whether all rows fit, each at the place of its number."""
        self._starts = sum_to_starts(piece_rows)
        self._full_count = int(np.count_nonzero(piece_rows))
        self._packed = packed
        self._cache = PieceCache(CACHE_BYTES)
        self._rows = PackedRows(packed, self.max_rows) if packed else None
        self._free = FreeRows(self.max_rows)
        self._buffers = TextBuffers()
        self._shifts = np.zeros(0 if self._is_whole else len(piece_rows), np.int64)
        """By piece: what is added to the number of a row to find it among the packed ones."""
        self.nulls: dict[int, Mapping[str, NDArray[np.bool_]]] = {}
        """Of the pieces that have any, where their packed columns have nulls."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process begins with none."""
        return LoadedRows, self._given

    @property
    def is_complete(self) -> bool:
        """Whether all pieces are kept."""
        return len(self._cache) == self._full_count

    def get(self, piece: int) -> LoadedPiece | None:
        """Return a piece that is kept."""
        return self._cache.get(piece)

    def put(self, piece: int, columns: Mapping[str, Any], unpacked_bytes: int) -> None:
        """Keeps the columns of a piece, Arrow arrays, in the place of pieces that were not used for
        longest. `unpacked_bytes` is what those take that are not packed."""
        start, stop = self._starts[piece : piece + 2].tolist()
        size_bytes, text_buffers = unpacked_bytes, []
        packed, others = {}, {}
        for name, array in columns.items():
            if self._packed.get(name) == TEXT_VIEW:
                packed[name], numbers, buffer_bytes = make_views(make_plain(array), self._buffers)
                text_buffers += numbers
                size_bytes += buffer_bytes
            elif isinstance(column := make_column(array), NumberColumn) and name in self._packed:
                packed[name] = column
            else:
                others[name] = column
        first = self._make_room(start, stop - start)
        if self._rows is not None:
            size_bytes += (stop - start) * self._rows.row_bytes
            for name, column in packed.items():
                self._rows.write(first, name, column.values)
        nulls = {name: each.is_null for name, each in packed.items() if each.is_null is not None}
        if nulls:
            self.nulls[piece] = nulls
            size_bytes += len(nulls) * (stop - start)
        if not self._is_whole:
            self._shifts[piece] = first - start
        self._cache.put(piece, LoadedPiece(first, stop - start, others, text_buffers), size_bytes)
        while self._cache.is_over_full:
            self._drop_oldest()

    def _make_room(self, start: int, rows: int) -> int:
        """Return the first of so many packed rows that are free, for a piece that begins at row
        `start` of the data."""
        if self._rows is None or self._is_whole:
            return start
        while (first := self._free.find(rows)) is None:
            self._drop_oldest()
        return first

    def _drop_oldest(self) -> None:
        piece, loaded = self._cache.pop_oldest()
        self.nulls.pop(piece, None)
        for number in loaded.text_buffers:
            self._buffers.release(number)
        if self._rows is not None and not self._is_whole:
            self._free.release(loaded.first, loaded.rows)

    def take_packed(
        self,
        rows: NDArray[np.int64],
        pieces: NDArray[np.int64] | None,
        check_rows: Callable[[int, int], None],
    ) -> dict[str, Any]:
        """Return the packed columns of rows whose pieces are kept; what nulls are says nothing.
        `pieces` may be None where all are. For `check_rows` see TextValues."""
        if self._rows is None:
            return {}
        if not self._is_whole:
            assert pieces is not None
            rows = rows + self._shifts[pieces]
        taken: dict[str, Any] = self._rows.take(rows)
        for name, dtype in self._packed.items():
            if dtype == TEXT_VIEW:
                taken[name] = TextValues(taken[name], self._buffers.list_all(), check_rows)
        return taken


class TableReader:
    """Rows of pieces of tables. A piece is loaded when a row of it is asked for."""

    column_names: list[str]
    chunks: ChunkTable
    encoded_columns: list[str]
    """Those with files in them, as Hugging Face stores pictures and sounds."""

    def __init__(
        self,
        piece_rows: Sequence[int],
        packed: Mapping[str, np.dtype[Any]],
        row_bytes: int,
    ) -> None:
        """`packed` says what columns are packed as; `row_bytes` is what a row takes, about."""
        self._piece_rows = np.asarray(piece_rows, np.int64)
        self._piece_starts = sum_to_starts(piece_rows)
        self._packed = packed
        self._loaded = LoadedRows(self._piece_rows, packed, row_bytes)

    def __len__(self) -> int:
        return int(self._piece_starts[-1])

    def load_piece(self, piece: int) -> tuple[Mapping[str, Any], int]:
        """Return the columns of a piece, Arrow arrays, and the bytes that those take which are not
        packed."""
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

    def read_samples(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows by number."""
        return split_columns(self.read_columns(np.asarray(rows, np.int64)), len(rows))

    def _take_rows(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        if not len(rows):
            return {name: [] for name in self.column_names}
        pieces = None
        if not self._loaded.is_complete:
            pieces = self._piece_starts.searchsorted(rows, side="right") - 1
            if not self._load_pieces(pieces):
                half = len(rows) // 2
                return _join_columns(self._take_rows(rows[:half]), self._take_rows(rows[half:]))
            if self._loaded.is_complete:
                pieces = None

        def check_rows(first: int, stop: int) -> None:
            self._raise_bad_row(rows[first:stop])

        found = self._loaded.take_packed(rows, pieces, check_rows)
        if self._loaded.nulls or len(found) < len(self.column_names):
            groups = list(group_by_piece(self._piece_starts, rows))
            found = {**self._put_nulls(found, groups), **self._take_others(groups)}
        return {name: found[name] for name in self.column_names}

    def _load_pieces(self, pieces: NDArray[np.int64]) -> bool:
        """Have pieces loaded, and return whether all of them are kept at once. One always is."""
        low = pieces.min()
        needed = np.flatnonzero(np.bincount(pieces - low)) + low
        is_one = len(needed) == 1
        rows = int(self._piece_rows[needed].sum()) if self._packed else 0
        if not is_one and rows > self._loaded.max_rows:
            return False
        missing = [each for each in needed.tolist() if self._loaded.get(each) is None]
        for piece in missing:
            self._loaded.put(piece, *self.load_piece(piece))
        return is_one or not missing or all(map(self._loaded.get, needed.tolist()))

    def _put_nulls(self, found: dict[str, Any], groups: Sequence[Any]) -> dict[str, Any]:
        """Return packed columns with None for nulls, as lists where there are any."""
        nulls = self._loaded.nulls
        for name in {name for each in nulls.values() for name in each}:
            missing = np.zeros(len(found[name]), np.bool_)
            for piece, places, within in groups:
                if name in nulls.get(piece, ()):
                    missing[places] = nulls[piece][name][within]
            if missing.any():
                pairs = zip(found[name], missing.tolist(), strict=True)
                found[name] = [None if is_null else value for value, is_null in pairs]
        return found

    def _take_others(self, groups: Sequence[Any]) -> dict[str, Any]:
        """Return the columns that are not packed."""
        pieces = [self._loaded.get(piece) for piece, _, _ in groups]
        inverse = None
        if len(groups) > 1:
            places = np.concatenate([places for _, places, _ in groups])
            inverse = np.empty(len(places), np.int64)
            inverse[places] = np.arange(len(places))
        others = {}
        for name in self.column_names:
            if name not in self._packed:
                parts = [
                    loaded.columns[name].take(within)
                    for loaded, (_, _, within) in zip(pieces, groups, strict=True)
                    if loaded is not None
                ]
                others[name] = _join_parts(parts, inverse)
        return others

    def _raise_bad_row(self, rows: NDArray[np.int64]) -> None:
        """Raises for the first of some rows that has a value which Python cannot have."""
        for row in rows.tolist():
            piece, within = find_piece(self._piece_starts, row)
            place = np.array([piece])
            self._load_pieces(place)
            loaded = self._loaded.get(piece)
            assert loaded is not None
            found = self._loaded.take_packed(np.array([row]), place, lambda first, stop: None)
            for name in self.column_names:
                try:
                    if name in found:
                        list(found[name])
                    else:
                        _join_parts([loaded.columns[name].take(np.array([within]))], None)
                except _UNKNOWN_VALUES as error:
                    why = f"{name} cannot be read: {' '.join(str(error).split())}"
                    raise BadSampleError(self.locate_stored(row), why) from error


def _join_columns(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of rows that were taken in two parts."""
    return {name: _join_values([one[name], other[name]]) for name in one}


def _join_values(parts: list[Any]) -> Any:
    kinds = {
        (part.dtype, part.shape[1:]) if isinstance(part, np.ndarray) else None for part in parts
    }
    if len(kinds) == 1 and None not in kinds:
        joined = make_aligned((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
        return np.concatenate(parts, out=joined)
    return [value for part in parts for value in part]


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
