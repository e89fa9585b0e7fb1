"""Arrays in `.npy` files: memory-mapped, a row is a sample, several files have the rows of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.data.formats.byte_source import DataPath, get_size
from echelon.data.formats.column_choice import choose_columns, raise_faults
from echelon.data.formats.reader import (
    DataFile,
    SamplePlace,
    cut_files_evenly,
    find_piece,
    gather_rows,
    read_rows_ahead,
    split_columns,
    sum_to_starts,
)
from echelon.data.formats.remote_rows import RemoteRows, open_remote_array
from echelon.errors import Fault
from echelon.object_store.remote_file import RemoteFile
from echelon.utils.os_errors import format_os_error_reason

ARRAY_COLUMN = "data"
"""The column of an array without names of its own."""


class NumpyReader:
    """The rows of arrays. A structured array has a column for every field, any other one column,
    `data`."""

    def __init__(self, files: Sequence[DataFile], columns: Sequence[str] | None) -> None:
        self._paths = [file.path for file in files]
        arrays = _map_arrays(self._paths)
        first = arrays[0]
        names = list(first.dtype.names or [ARRAY_COLUMN])
        types = dict.fromkeys(names, "")
        self.column_names = choose_columns(self._paths[:1], [types], columns)
        row_bytes = first.dtype.itemsize * int(np.prod(first.shape[1:], dtype=np.int64))
        self._row_bytes = row_bytes
        self._starts = sum_to_starts([len(array) for array in arrays])
        self.chunks = cut_files_evenly([len(array) for array in arrays], row_bytes)
        self._arrays: list[NDArray[Any] | RemoteRows] | None = arrays

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        """A pickled array would be copied: every process maps the files itself."""
        return {**self.__dict__, "_arrays": None}

    def read_columns(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """Return the chosen fields of these rows."""
        arrays = self._arrays = self._arrays or _map_arrays(self._paths)
        gathered = gather_rows(arrays, self._starts, rows)
        if gathered.dtype.names is None:
            return {ARRAY_COLUMN: _make_collatable(gathered)}
        return {name: _make_collatable(gathered[name]) for name in self.column_names}

    def read_samples(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows by number."""
        return split_columns(self.read_columns(np.asarray(rows, np.int64)), len(rows))

    def prefetch_chunks(self, chunks: Sequence[int]) -> None:
        """Have chunks read into the system's cache."""
        for chunk in chunks:
            first, stop = self.chunks.starts[chunk : chunk + 2].tolist()
            read_rows_ahead(self._paths, self._starts, first, stop, self._row_bytes)

    def locate(self, row: int) -> SamplePlace:
        """Return the file and the row in it."""
        piece, number = find_piece(self._starts, row)
        return SamplePlace(self._paths[piece], number)


def map_array(path: DataPath) -> NDArray[Any] | RemoteRows:
    """Return the array of a `.npy` file, memory-mapped; of an object, its rows."""
    if isinstance(path, RemoteFile):
        return open_remote_array(path)
    # numpy.memmap does more than an array at every index, which a plain view of it does not.
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _map_arrays(paths: Sequence[DataPath]) -> list[NDArray[Any] | RemoteRows]:
    """Return the arrays of all files. Raises the faults of all that cannot be read, and of those
    whose rows are not like the first one's."""
    arrays: list[NDArray[Any] | RemoteRows] = []
    faults: list[Fault] = []
    for path in paths:
        try:
            array = map_array(path)
        except (OSError, ValueError, EOFError) as error:
            faults.append(_make_unreadable_fault(path, error))
            continue
        if not array.ndim:
            faults.append(Fault(f"{path} has one number, not rows", "give an array of rows"))
            continue
        first = arrays[0] if arrays else array
        if (array.dtype, array.shape[1:]) != (first.dtype, first.shape[1:]):
            faults.append(
                Fault(
                    f"a row of {path} is {array.dtype} of shape {array.shape[1:]}, and one of "
                    f"{paths[0]} {first.dtype} of shape {first.shape[1:]}",
                    "open files with the same kind of rows, or write them anew",
                )
            )
        arrays.append(array)
    raise_faults(faults)
    return arrays


def _make_unreadable_fault(path: DataPath, error: Exception) -> Fault:
    if isinstance(error, OSError):
        return Fault(f"{path} cannot be read: {format_os_error_reason(error)}", "check the file")
    if not get_size(path):
        return Fault(f"{path} is empty (0 bytes)", "write it again, or leave it out")
    if "allow_pickle" in str(error) or "Object" in str(error) or "object" in str(error):
        return Fault(
            f"{path} has Python objects, and reading them could run code",
            "save an array of numbers: numpy.save(path, array.astype('float32'))",
        )
    return Fault(f"{path} is not a complete .npy file: {error}", "write it again with numpy.save")


def _make_collatable(array: NDArray[Any]) -> Any:
    """Return numbers in this machine's byte order, the only one that torch knows, and without the
    gaps between the fields of a structured array; texts and bytes as a list."""
    if array.dtype.kind in "SU":
        return array.tolist()
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
