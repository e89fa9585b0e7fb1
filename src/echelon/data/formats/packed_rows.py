"""Rows of tables, packed: the numbers of a row lie side by side in memory, and those of any rows of
many pieces are taken at once. A random row is one place to look at then, and not ten.

A text is packed as Arrow's view of it: 16 bytes, which have all of it, or where it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TEXT_VIEW = np.dtype(np.complex128)
"""Copied as what numpy copies fast of so many bytes; nothing is computed with it."""
_NUMBER_TYPES = {
    "bool": np.dtype(np.bool_),
    "halffloat": np.dtype(np.float16),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64")},
    **{name: np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64")},
}
_TAKEN_BYTES = 256 << 10
"""So much is taken before it is unpacked: it is still in the processor's cache then."""


def choose_packed(
    types: Sequence[Mapping[str, str]], columns: Sequence[str], row_bytes: int, may_view: bool
) -> dict[str, np.dtype[Any]]:
    """Return what columns are packed as: numbers, and texts where their views take little of
    `row_bytes`, the bytes of a row. `types` has Arrow's types of every file."""
    names = [n for n in columns if all(own.get(n) == types[0].get(n) for own in types)]
    numbers = {n: _NUMBER_TYPES[types[0][n]] for n in names if types[0].get(n) in _NUMBER_TYPES}
    texts = [name for name in names if types[0].get(name) == "string"] if may_view else []
    # Arrow's own texts take 12 bytes less. A window of the order has to fit what is kept.
    if 12 * len(texts) > row_bytes // 4:
        texts = []
    return {**numbers, **dict.fromkeys(texts, TEXT_VIEW)}


class PackedRows:
    """Room for so many packed rows. Memory is taken as rows are written."""

    def __init__(self, dtypes: Mapping[str, np.dtype[Any]], rows: int) -> None:
        self._dtypes = dict(sorted(dtypes.items(), key=lambda each: -each[1].itemsize))
        sizes = [dtype.itemsize for dtype in self._dtypes.values()]
        self.row_bytes, widest = sum(sizes), max(sizes, default=1)
        padding = -self.row_bytes % widest
        if 8 * padding <= self.row_bytes:  # aligned rows are read faster
            self.row_bytes += padding
        self._packed = np.empty((rows, self.row_bytes), np.uint8)
        self._fields = self._view_fields(self._packed)
        at_once = max(1, _TAKEN_BYTES // self.row_bytes)
        self._taken = np.empty((at_once, self.row_bytes), np.uint8)
        self._taken_fields = self._view_fields(self._taken)

    def _view_fields(self, packed: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Return each column of packed rows."""
        fields, begin = {}, 0
        for name, dtype in self._dtypes.items():
            fields[name] = packed[:, begin : begin + dtype.itemsize].view(dtype)[:, 0]
            begin += dtype.itemsize
        return fields

    def write(self, first: int, name: str, values: NDArray[Any]) -> None:
        """Pack the values of a column from this row on."""
        self._fields[name][first : first + len(values)] = values

    def take(self, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the columns of these rows, each by itself in memory."""
        columns = {name: make_aligned((len(rows),), each) for name, each in self._dtypes.items()}
        for begin in range(0, len(rows), len(self._taken)):
            part = rows[begin : begin + len(self._taken)]
            # "clip" is quicker, as it needs no copy in case that a row does not exist.
            self._packed.take(part, 0, self._taken[: len(part)], "clip")
            for name, field in self._taken_fields.items():
                columns[name][begin : begin + len(part)] = field[: len(part)]
        return columns


def make_aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array of any values at an address that is a multiple of 64: batches that are cut
    out of it need not be copied to be aligned."""
    size = int(np.prod(shape)) * dtype.itemsize
    room = np.empty(size + 64, np.uint8)
    begin = -room.ctypes.data % 64
    return room[begin : begin + size].view(dtype).reshape(shape)


class FreeRows:
    """Which of so many rows are free."""

    def __init__(self, rows: int) -> None:
        self._spans = [(0, rows)] if rows else []

    def find(self, rows: int) -> int | None:
        """Take the first place where so many rows are free one after the other, and return its
        first row; None where there is none."""
        for number, (first, stop) in enumerate(self._spans):
            if stop - first >= rows:
                self._spans[number : number + 1] = (
                    [(first + rows, stop)] if first + rows < stop else []
                )
                return first
        return None

    def release(self, first: int, rows: int) -> None:
        """Have rows free again."""
        stop = first + rows
        place = bisect_left(self._spans, (first, stop))
        begin, end = place, place
        if place < len(self._spans) and self._spans[place][0] == stop:
            stop, end = self._spans[place][1], place + 1
        if place and self._spans[place - 1][1] == first:
            first, begin = self._spans[place - 1][0], place - 1
        self._spans[begin:end] = [(first, stop)]
