"""Files as a Dataset: samples by number, decoded and transformed one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset

from echelon.data.chunk_order import DEFAULT_WINDOW_BYTES
from echelon.data.decode import SampleDecoder
from echelon.data.formats.reader import (
    ChunkTable,
    ColumnReader,
    PrefetchingReader,
    SamplePlace,
    SampleReader,
)
from echelon.data.formats.text_views import TextValues


class FileDataset(Dataset[Any]):
    """The samples of files, as `echelon.data.open` returns them: a map-style Dataset whose samples
    are dicts of columns, or what `transform` makes of them.

        dataset[3]          one sample
        len(dataset)        the number of samples
        dataset.column_names
        dataset.locate(3)   the file that has it, and its number there
        dataset.chunks      which samples lie together, for the order in which they are read
        dataset.window_bytes = 1 << 30  how much of them is shuffled together
    """

    def __init__(
        self,
        reader: SampleReader,
        decoder: SampleDecoder | None = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        is_remote: bool = False,
    ) -> None:
        """`is_remote`: the files are objects of a store."""
        self.reader = reader
        self.is_remote = is_remote
        self.window_bytes = DEFAULT_WINDOW_BYTES
        self._decoder = decoder
        self._transform = transform
        self.may_draw = transform is not None or not (decoder is None or decoder.leaves_numbers)
        """Whether finishing a sample may draw random numbers: functions of the user's may."""

        self._has_batches = not self.may_draw and hasattr(reader, "read_columns")
        """Whether batches can be read as columns, as far as is known."""
        self._can_prefetch = hasattr(reader, "prefetch_chunks")

    @property
    def chunks(self) -> ChunkTable:
        """Which samples lie together."""
        return self.reader.chunks

    @property
    def column_names(self) -> list[str]:
        """The columns of a sample, before `transform`."""
        return self.reader.column_names

    def __len__(self) -> int:
        return len(self.reader)

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, row: int) -> Any:
        [sample] = self.__getitems__([row])
        return sample

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        samples = self.read_rows(rows)
        return [self.finish_sample(row, each) for row, each in zip(rows, samples, strict=True)]

    def locate(self, row: int) -> SamplePlace:
        """Return the file that has a sample, and its number there."""
        return self.reader.locate(self._count_from_start(row))

    # --- in steps, for batches ---

    def prefetch_chunks(self, chunks: Sequence[int]) -> None:
        """Say which chunks will be read soon, in this order. A reader may begin to fetch them."""
        if self._can_prefetch:
            cast(PrefetchingReader, self.reader).prefetch_chunks(chunks)

    def read_rows(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return samples as they are stored. This draws no random numbers."""
        return self.reader.read_samples([self._count_from_start(row) for row in rows])

    def finish_sample(self, row: int, sample: dict[str, Any]) -> Any:
        """Return a sample of `read_rows` decoded and transformed. A transform may draw random
        numbers, so this is called once they are seeded for the sample."""
        if self._decoder is not None:
            sample = self._decoder.decode_sample(sample, lambda: self.locate(row))
        return sample if self._transform is None else self._transform(sample)

    def read_batches(
        self, rows: NDArray[np.int64], counts: Sequence[int]
    ) -> Iterator[dict[str, Any]] | None:
        """Return the batches of so many samples that torch's default_collate makes of these rows,
        without taking them apart first; None where that cannot be done. All rows are read at once;
        texts become Python's with their batch."""
        joined = self._read_joined(rows)
        if joined is None:
            return None
        columns = [_split_column(values, counts) for values in joined.values()]
        return (dict(zip(joined, each, strict=True)) for each in zip(*columns, strict=True))

    @property
    def row_bytes(self) -> int:
        """What a sample takes in memory while it is read, on average."""
        return int(self.chunks.sizes_bytes.sum()) // max(1, len(self))

    def _read_joined(self, rows: NDArray[np.int64]) -> dict[str, Any] | None:
        """Return the samples as one batch."""
        if not self._has_batches:
            return None
        batch = {}
        for name, values in cast(ColumnReader, self.reader).read_columns(rows).items():
            if isinstance(values, np.ndarray) and values.dtype.kind in "biufc":
                batch[name] = torch.from_numpy(values)
            elif isinstance(values, Tensor | TextValues) or set(map(type, values)) == {str}:
                batch[name] = values
            else:
                # default_collate may know what to do, or says why it cannot be done.
                self._has_batches = False
                return None
        return batch

    def _count_from_start(self, row: int) -> int:
        """Return the number of a row that may be counted from the end, as in a list."""
        size = len(self.reader)
        if not -size <= row < size:
            raise IndexError(f"there is no sample {row}: the files have {size:,}")
        return row % size


def find_file_dataset(dataset: Any) -> tuple[FileDataset | None, list[Any]]:
    """Return the files that a Dataset, or a Subset of it, reads its samples from, and the indices
    of the Subsets around them, the outermost first."""
    subsets = []
    while type(dataset) is Subset:
        subsets.append(dataset.indices)
        dataset = dataset.dataset
    return (dataset if isinstance(dataset, FileDataset) else None), subsets


def _split_column(values: Any, counts: Sequence[int]) -> Iterable[Any]:
    """Return the values of each batch. Tensors begin at aligned addresses, as if each had been read
    alone: matrix products may round differently depending on that."""
    if isinstance(values, Tensor):
        if len(counts) == 1:
            return [values]
        pieces = torch.split(values, list(counts))
        return [piece if piece.data_ptr() % 64 == 0 else piece.clone() for piece in pieces]
    borders = zip(accumulate(counts), counts, strict=True)
    if isinstance(values, TextValues):
        return (values.to_list(stop - count, stop) for stop, count in borders)
    return [values[stop - count : stop] for stop, count in borders]
