"""Columns of Arrow tables as numpy and Python values.

Numbers become numpy scalars and keep their type, lists of numbers become arrays, texts, bytes and
all else Python values. A null is None.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.errors import EchelonError, Fault

MAX_PIECE_BYTES = 128 << 20
"""Larger pieces, such as the row groups of some writers, are cut: a window of the order holds
several."""

ENCODED_TYPE = "struct<bytes: binary, path: string>"
"""Of columns in which Hugging Face stores files, such as pictures."""

_NUMPY_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
"""What numpy calls types that have another name in Arrow."""


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


def stack_if_equal(arrays: list[Any]) -> Any:
    """Return arrays of one shape as one array, others as they are."""
    is_equal = bool(arrays) and all(each.shape == arrays[0].shape for each in arrays)
    return np.stack(arrays) if is_equal else arrays


def make_plain(values: Any) -> Any:
    """Return an Arrow array in one piece, without a dictionary."""
    pa = import_pyarrow()
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
        if isinstance(values, pa.ChunkedArray):  # too long for one array
            values = pa.concat_arrays(values.chunks)
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def make_column(values: Any) -> ColumnValues:
    """Return an Arrow array so that rows of it can be taken."""
    pa = import_pyarrow()
    values = make_plain(values)
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
    # Not to_pandas_dtype(), which imports pandas in most versions of pyarrow.
    name = _NUMPY_NAMES.get(str(kind), str(kind))
    return np.dtype(name) if depth and _is_number(kind) else None


def cut_rows(rows: int, size_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields the first row, the number of rows and the bytes of the parts that rows are cut into,
    each of at most MAX_PIECE_BYTES."""
    count = max(1, -(-size_bytes // MAX_PIECE_BYTES))
    borders = [rows * cut // count for cut in range(count + 1)]
    for first, stop in pairwise(borders):
        if first < stop:
            yield first, stop - first, size_bytes * (stop - first) // rows
