"""Rows of equal size in an object: arrays of `.npy` files and windows of tokens. They are read one
by one, because an object of which a part is on the disk cannot be mapped."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.data.formats.byte_source import list_blocks
from echelon.object_store.remote_file import RemoteFile, fetch_blocks


class RemoteRows:
    """As much of an array as readers use: its type and shape, and rows by number."""

    def __init__(
        self, file: RemoteFile, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        self._file, self._offset = file, offset
        self.dtype, self.shape = dtype, shape
        self._row_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        self._row_stride = self._row_bytes

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def cut_windows(self, length: int) -> RemoteRows:
        """Return a window of so many values from every value on, as numpy's sliding_window_view."""
        shape = (len(self) - length + 1, length)
        windows = RemoteRows(self._file, self._offset, self.dtype, shape)
        windows._row_stride = self.dtype.itemsize
        return windows

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """Return a copy of neighbouring rows."""
        first, stop, step = rows.indices(len(self))
        if step != 1:
            raise ValueError(f"rows of an object are read one after the other, not every {step}th")
        self.fetch_spans(np.array([first]), np.array([max(0, stop - first)]))
        begin = self._offset + first * self._row_stride
        ranges = [(begin, begin + max(0, stop - first) * self._row_bytes)]
        data = bytearray(b"").join(self._file.map_ranges(ranges))
        return np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])

    def fetch_spans(self, firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Bring neighbouring rows, so many from each first one on, to this machine at once."""
        starts = self._offset + firsts * self._row_stride
        fetch_blocks({self._file: list_blocks(starts, starts + counts * self._row_bytes)})

    def gather(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return a copy of these rows."""
        order = np.argsort(rows)  # block by block
        starts = self._offset + rows[order] * self._row_stride
        stops = starts + self._row_bytes
        fetch_blocks({self._file: list_blocks(starts, stops)})
        ranges = zip(starts.tolist(), stops.tolist(), strict=True)
        data = bytearray(b"").join(self._file.map_ranges(ranges))
        gathered = np.empty((len(rows), *self.shape[1:]), self.dtype)
        gathered[order] = np.frombuffer(data, self.dtype).reshape(gathered.shape)
        return gathered


def open_remote_array(file: RemoteFile) -> RemoteRows:
    """Return the array of a `.npy` object. Raises ValueError, as numpy.load does."""
    with file.open() as opened:
        version = np.lib.format.read_magic(opened)
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        if version not in readers:
            raise ValueError(f"format {version} of numpy is read from local files only")
        shape, is_fortran, dtype = readers[version](opened)
        offset = opened.tell()
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded")
    if is_fortran and len(shape) > 1:
        raise ValueError("its columns are stored one after the other; save it in C order")
    missing = offset + dtype.itemsize * int(np.prod(shape, dtype=np.int64)) - file.size
    if missing > 0:
        raise ValueError(f"{missing:,} bytes are missing at its end")
    return RemoteRows(file, offset, dtype, shape)
