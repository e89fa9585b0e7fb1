"""Files of tokens, `.bin` or `.npy`: a sample is a window of them, and the one that is shifted by
one token. The files are memory-mapped and never copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from echelon.data.formats.byte_source import DataPath
from echelon.data.formats.column_choice import raise_faults
from echelon.data.formats.mapped_tokens import Tokens, map_tokens
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
from echelon.data.formats.remote_rows import RemoteRows
from echelon.errors import Fault


class TokenReader:
    """Windows of `length` tokens, `stride` tokens apart, within each file. What is left at the end
    of a file is shorter than a window, and is not read."""

    column_names = ["inputs", "targets"]  # noqa: RUF012  the protocol has it as a list

    def __init__(self, files: Sequence[DataFile], length: int, dtype: str, stride: int) -> None:
        self._paths = [file.path for file in files]
        self._length, self._dtype, self._stride = length, dtype, stride
        windows = _map_windows(self._paths, dtype, length)
        counts = [-(-len(each) // stride) for each in windows]
        self._starts = sum_to_starts(counts)
        self._row_bytes = stride * windows[0].itemsize
        self.chunks = cut_files_evenly(counts, min(stride, length) * windows[0].itemsize)
        self._windows: list[Tokens] | None = windows

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        """A pickled array would be copied: every process maps the files itself."""
        return {**self.__dict__, "_windows": None}

    def read_columns(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the windows and the shifted ones, in tensors of int64."""
        windows = self._windows = self._windows or _map_windows(
            self._paths, self._dtype, self._length
        )
        gathered = gather_rows(windows, self._starts, rows, self._stride)
        # Two tensors of their own: a model may call `view` on either.
        return {
            "inputs": torch.from_numpy(gathered[:, :-1].astype(np.int64)),
            "targets": torch.from_numpy(gathered[:, 1:].astype(np.int64)),
        }

    def read_samples(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return windows by number."""
        return split_columns(self.read_columns(np.asarray(rows, np.int64)), len(rows))

    def prefetch_chunks(self, chunks: Sequence[int]) -> None:
        """Have chunks read into the system's cache."""
        for chunk in chunks:
            first, stop = self.chunks.starts[chunk : chunk + 2].tolist()
            read_rows_ahead(self._paths, self._starts, first, stop, self._row_bytes)

    def locate(self, row: int) -> SamplePlace:
        """Return the file, and which window of it."""
        piece, number = find_piece(self._starts, row)
        return SamplePlace(self._paths[piece], number, f"token {number * self._stride:,}")


def _map_windows(paths: Sequence[DataPath], dtype: str, length: int) -> list[Tokens]:
    """Return for every file all its windows of length + 1, as a view."""
    found: list[Tokens] = []
    faults: list[Fault] = []
    for path in paths:
        tokens = map_tokens(path, dtype)
        if isinstance(tokens, Fault):
            faults.append(tokens)
        elif len(tokens) <= length:
            faults.append(
                Fault(
                    f"{path} has {len(tokens):,} tokens, and a sample of length={length} takes "
                    f"{length + 1:,}, with the last target",
                    "give a smaller length, or leave the file out",
                )
            )
        else:
            found.append(_cut_windows(tokens, length + 1))
    raise_faults(faults)
    return found


def _cut_windows(tokens: Tokens, length: int) -> Tokens:
    if isinstance(tokens, RemoteRows):
        return tokens.cut_windows(length)
    return sliding_window_view(tokens, length)
