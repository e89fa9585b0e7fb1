"""Batches of one rank: cut out of tensors in blocks, or fetched from a Dataset sample by sample."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from echelon.data.batch_structure import move_batch
from echelon.data.device_copies import BatchCopier, BatchCopy, pin_batch
from echelon.data.loader_options import describe_loader
from echelon.data.sample_order import count_batches
from echelon.errors import EchelonError, ExitCode, Fault

if TYPE_CHECKING:
    from echelon.data.bad_samples import BadSampleList
    from echelon.data.sample_fetcher import FetchedShare
    from echelon.data.sample_shares import SampleShare

_COLUMN_TYPES = (Tensor, np.ndarray)
_BLOCK_BYTES = 8 << 20
"""Gathering many batches at once makes one batch nearly free; larger blocks would not fit the
cache."""

_BLOCK_BYTES_CUDA = 64 << 20
"""On a GPU the number of calls by the host is what costs, so blocks are larger."""


class Batch(NamedTuple):
    """This rank's share of one global batch."""

    data: Any
    """What `predict` receives; None where this rank has no sample of the batch."""
    sample_count: int
    """The number of samples in it."""


class BlockSlice(NamedTuple):
    """A share that is still part of a block on the GPU; a captured step cuts it out by itself."""

    block: tuple[Tensor, ...]
    start: int
    sample_count: int

    @property
    def data(self) -> tuple[Tensor, ...] | None:
        """The share, cut out of the block; None where this rank has no sample of the batch."""
        if not self.sample_count:
            return None
        return tuple(
            _align_memory(t[self.start : self.start + self.sample_count]) for t in self.block
        )


class BatchOrder(Protocol):
    """Which samples this rank takes, batch by batch: `EpochOrder` to train, `EvalOrder` to
    evaluate."""

    @property
    def seed(self) -> int:
        """Together with the epoch, what the random numbers of a sample depend on."""
        ...

    @property
    def epoch(self) -> int: ...

    def iter_blocks(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]:
        """Yields the samples of several batches, joined, and the number of samples of each."""
        ...

    def iter_draws(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]:
        """Yields the same with the numbers that samples are seeded by: their indices, plus a
        multiple of the size of the data for a sample that comes again."""
        ...


MakeNextOrder = Callable[[BatchOrder], BatchOrder | None]
"""Returns the order of the epoch after this one, or None where there is none."""


@dataclass(frozen=True)
class EvalOrder:
    """Every world_size-th batch, complete and not shuffled.

    A batch is never split between ranks, because a matrix product may round differently for another
    number of rows, and an evaluation is to give the same bits at any world size.
    """

    size: int
    batch_size: int
    rank: int
    world_size: int
    seed: int = 0
    epoch: int = -1
    """Of no training epoch: a sample draws the same random numbers in every evaluation."""

    @property
    def max_batches(self) -> int:
        """Batches of the rank that has most; other ranks have as many or one less."""
        return -(-count_batches(self.size, self.batch_size) // self.world_size)

    def iter_blocks(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]:
        """Yields this rank's batches one by one."""
        last = count_batches(self.size, self.batch_size)
        for number in range(first_batch + self.rank, last, self.world_size):
            start = number * self.batch_size
            stop = min(start + self.batch_size, self.size)
            yield torch.arange(start, stop), [stop - start]

    def iter_draws(self, first_batch: int = 0) -> Iterator[tuple[Tensor, list[int]]]:
        """Yields the same: every sample comes once."""
        return self.iter_blocks(first_batch)


class BatchSource(Protocol):
    """Where samples come from."""

    def __len__(self) -> int: ...

    storage_device: torch.device
    """The device on which the samples lie, and on which an order is best drawn."""

    def iter_batches(
        self,
        order: BatchOrder,
        first: int,
        device: torch.device,
        make_next: MakeNextOrder | None = None,
    ) -> Iterator[Batch | BlockSlice]:
        """Yields this rank's share of every global batch from number `first` on. Samples of the
        order that `make_next` returns may be fetched before it is asked for."""
        ...

    def fetch_batch(
        self, order: BatchOrder, number: int, device: torch.device
    ) -> Batch | BlockSlice:
        """Return this rank's share of one global batch, also while others are iterated."""
        ...

    def close(self) -> None:
        """Ends what serves the source, such as loader processes. A second call does nothing."""
        ...


def make_source(
    data: Any,
    name: str,
    workers: int,
    device: torch.device,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    options: Mapping[str, Any] | None = None,
    bad_samples: BadSampleList | None = None,
) -> BatchSource:
    """Return the source for the data of an experiment; `name` is the field that an error names.

    `collate_fn` makes a batch of a list of samples, which rows of tensors then are too. `options`
    are DataLoader's, for the loader processes. Samples that cannot be read are skipped and listed
    in `bad_samples`; without, the first one raises.
    """
    if (columns := get_columns(data)) is not None:
        if not all(t.ndim for t in columns):
            raise _make_data_error(
                f"{name} has a tensor without rows", "give each one row per sample"
            )
        sizes = [len(t) for t in columns]
        if len(set(sizes)) > 1:
            raise _make_data_error(
                f"the tensors of {name} have {sizes} rows", "give each one row per sample"
            )
        tensors = tuple(_as_tensor(t, name) for t in columns)
        if collate_fn is None:
            source: BatchSource = TensorSource(tensors, device)
        else:
            from torch.utils.data import TensorDataset

            rows = TensorDataset(*tensors)
            source = DatasetSource(rows, workers, device, collate_fn, options, name)
    elif _is_indexable(data):
        source = DatasetSource(data, workers, device, collate_fn, options, name, bad_samples)
    else:
        raise _make_not_indexable_error(data, name)
    if len(source) == 0:
        raise _make_data_error(f"{name} has no samples", "give at least one")
    return source


def get_columns(data: Any) -> tuple[Any, ...] | None:
    """Return the tensors or arrays that the data consists of, or None where it is something
    else."""
    if isinstance(data, _COLUMN_TYPES):
        return (data,)
    is_columns = (
        isinstance(data, Sequence) and data and all(isinstance(t, _COLUMN_TYPES) for t in data)
    )
    return tuple(data) if is_columns else None


def _as_tensor(column: Any, name: str) -> Tensor:
    """Return a column as a tensor; it shares memory with a numpy array where that is possible."""
    if isinstance(column, Tensor):
        return column
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about read-only arrays, such as a memory-mapped file
        try:
            return torch.from_numpy(column.copy() if min(column.strides) < 0 else column)
        except (TypeError, ValueError) as error:
            raise _make_data_error(
                f"{name} has a numpy array of dtype {column.dtype}, which torch does not support",
                "give numbers: array.astype('float32')",
            ) from error


def _make_not_indexable_error(data: Any, name: str) -> EchelonError:
    """Return the error for data that has no length or no samples by index."""
    from torch.utils.data import DataLoader

    if isinstance(data, Mapping):
        return _make_data_error(
            f"{name} is a {type(data).__name__} with {', '.join(map(repr, list(data)[:5]))}",
            "give a tuple of its tensors, (*inputs, target), or a Dataset whose samples are dicts, "
            "with predict",
        )
    if isinstance(data, DataLoader):
        return _make_data_error(
            f"{name} is a DataLoader, but every process makes its own share of each batch here",
            describe_loader(data, name),
        )
    return _make_data_error(
        f"{name} is of type {type(data).__name__}, which has no length or no samples by index",
        "give a tuple of tensors, or a Dataset with __len__ and __getitem__"
        + ("" if name == "eval_data" else "; a stream is what can be iterated over"),
    )


def _is_indexable(data: Any) -> bool:
    """Return whether samples can be taken by index.

    torch's IterableDataset inherits a `__getitem__` that only raises, so it is excluded by its
    class. A dict of columns has names where samples have numbers.
    """
    from torch.utils.data import IterableDataset

    streams = isinstance(data, IterableDataset)
    has_names = isinstance(data, Mapping) and 0 not in data
    return (
        hasattr(data, "__getitem__") and hasattr(data, "__len__") and not streams and not has_names
    )


class TensorSource:
    """Tensors with one row per sample, kept on the GPU when they fit with room to spare."""

    def __init__(self, tensors: tuple[Tensor, ...], device: torch.device) -> None:
        self.row_bytes = sum(t[:1].numel() * t.element_size() for t in tensors)
        self.tensors = tensors
        if device.type == "cuda" and self._fits_on_device(device):
            self.tensors = tuple(t.to(device) for t in tensors)
        self.storage_device = self.tensors[0].device
        self._block_bytes = _BLOCK_BYTES if self.storage_device.type == "cpu" else _BLOCK_BYTES_CUDA

    def _fits_on_device(self, device: torch.device) -> bool:
        """Return whether the data takes less than a quarter of the GPU's free memory."""
        free, _ = torch.cuda.mem_get_info(device)
        return self.row_bytes * len(self) < free // 4

    def __len__(self) -> int:
        return len(self.tensors[0])

    def compute_block_rows(self, batch_rows: int) -> int:
        """Return the rows of the largest block of complete batches of `batch_rows` rows."""
        return max(
            batch_rows, self._block_bytes // max(1, self.row_bytes) // batch_rows * batch_rows
        )

    def iter_batches(
        self,
        order: BatchOrder,
        first: int,
        device: torch.device,
        make_next: MakeNextOrder | None = None,
    ) -> Iterator[Batch | BlockSlice]:
        """Yields this rank's shares; there is nothing to fetch ahead. On a GPU these are slices of
        blocks, which a CUDA graph can cut out."""
        for indices, counts in order.iter_blocks(first):
            rows_at_once = max(1, self._block_bytes // max(1, self.row_bytes))
            for rows, sizes in _split_at_max_rows(
                indices.to(self.storage_device), counts, rows_at_once
            ):
                gathered = tuple(t.index_select(0, rows).to(device) for t in self.tensors)
                if self.storage_device.type != "cpu":
                    starts = accumulate(sizes, initial=0)
                    for start, count in zip(starts, sizes, strict=False):
                        yield BlockSlice(gathered, start, count)
                    continue
                pieces = zip(*(torch.split(t, sizes) for t in gathered), strict=True)
                for data, count in zip(pieces, sizes, strict=True):
                    yield Batch(tuple(map(_align_memory, data)) if count else None, count)

    def fetch_batch(
        self, order: BatchOrder, number: int, device: torch.device
    ) -> Batch | BlockSlice:
        """Return this rank's share of one global batch."""
        return next(self.iter_batches(order, number, device))

    def close(self) -> None:
        """Does nothing: tensors need no processes."""


def _align_memory(piece: Tensor) -> Tensor:
    """Return the tensor at an aligned address, copied where necessary.

    Matrix products may round differently depending on the alignment of their rows, and a resumed
    run gathers other blocks: every batch is aligned as if it had been gathered alone.
    """
    return piece if piece.storage_offset() * piece.element_size() % 64 == 0 else piece.clone()


def _split_at_max_rows(
    indices: Tensor, counts: list[int], max_rows: int
) -> Iterator[tuple[Tensor, list[int]]]:
    """Yields runs of complete batches of at most `max_rows` rows, or one batch where it is
    larger."""
    begin, size = 0, 0
    run: list[int] = []
    for count in counts:
        if run and size + count > max_rows:
            yield indices[begin : begin + size], run
            begin, size, run = begin + size, 0, []
        size += count
        run.append(count)
    if run:
        yield indices[begin : begin + size], run


class DatasetSource:
    """Any Dataset with a length, fetched in this process or ahead of time by torch's loader
    processes."""

    def __init__(
        self,
        dataset: Any,
        workers: int,
        device: torch.device | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        options: Mapping[str, Any] | None = None,
        name: str = "the data",
        bad_samples: BadSampleList | None = None,
    ) -> None:
        from echelon.data.sample_fetcher import LoaderProcesses, SampleFetcher

        self.dataset = dataset
        self.storage_device = torch.device("cpu")
        self._name, self._bad_samples = name, bad_samples
        max_bad_samples = None if bad_samples is None else bad_samples.max_count
        self._fetcher = SampleFetcher(dataset, collate_fn, name, max_bad_samples)
        self._processes = (
            LoaderProcesses(self._fetcher, workers, options or {}, device or self.storage_device)
            if workers
            else None
        )
        on_gpu = device is not None and device.type == "cuda"
        self._copier = BatchCopier(device) if on_gpu and device is not None else None
        may_pin = bool((options or {}).get("pin_memory", True))
        self._must_pin = on_gpu and may_pin and not workers  # loader processes have it done

    def __len__(self) -> int:
        return len(self.dataset)

    def iter_batches(
        self,
        order: BatchOrder,
        first: int,
        device: torch.device,
        make_next: MakeNextOrder | None = None,
    ) -> Iterator[Batch]:
        """Yields this rank's shares on the device."""
        shares = self._iter_fetched(order, first, make_next)
        if self._copier is not None and device.type == "cuda":
            yield from self._iter_copied(self._copier, shares)
            return
        for fetched, count in shares:
            data = self._take_data(fetched)
            yield Batch(move_batch(data, device) if count else None, count)

    def _iter_fetched(
        self, order: BatchOrder, first: int, make_next: MakeNextOrder | None
    ) -> Iterator[tuple[FetchedShare, int]]:
        """Return this rank's shares as they are fetched, with their sizes."""
        from echelon.data.sample_shares import iter_shares

        if self._processes is not None:
            return self._processes.iter_batches(order, first, make_next)
        shares = iter_shares(order, first, self._fetcher.remote_chunks)
        return self._fetcher.iter_fetched(shares)

    def _iter_copied(
        self, copier: BatchCopier, shares: Iterator[tuple[FetchedShare, int]]
    ) -> Iterator[Batch]:
        """Yields shares on a GPU. The next one is copied before this one is given away, if loader
        processes have it ready: to wait for it would delay the step of this one."""
        ahead: deque[tuple[FetchedShare, int, BatchCopy | None]] = deque()
        failure: Exception | None = None
        while True:
            while not ahead or (len(ahead) == 1 and self._has_ready_batch()):
                try:
                    following = next(shares, None)
                except Exception as error:  # raised when its turn comes
                    failure, following = error, None
                if following is None:
                    break
                fetched, count = following
                copy = None
                if count and not fetched.faults:
                    data = pin_batch(fetched.data) if self._must_pin else fetched.data
                    copy = copier.begin_copy(data)
                ahead.append((fetched, count, copy))
            if not ahead:
                if failure is not None:
                    raise failure
                return
            fetched, count, copy = ahead.popleft()
            self._take_data(fetched)
            yield Batch(None if copy is None else copier.finish_copy(copy), count)

    def _has_ready_batch(self) -> bool:
        return self._processes is not None and self._processes.has_ready_batch()

    def fetch_batch(self, order: BatchOrder, number: int, device: torch.device) -> Batch:
        """Return this rank's share of one batch. Loader processes that work on others are left
        alone."""
        from echelon.data.sample_shares import iter_shares

        return self._fetch_share(next(iter_shares(order, number)), device)

    def close(self) -> None:
        """Ends the loader processes."""
        if self._processes is not None:
            self._processes.close()

    def _fetch_share(self, share: SampleShare, device: torch.device) -> Batch:
        """Fetches a share in this process."""
        if not share.draws:
            return Batch(None, 0)
        data = self._take_data(self._fetcher.fetch(share))
        return Batch(move_batch(data, device), len(share.draws))

    def _take_data(self, fetched: FetchedShare) -> Any:
        """Return the samples of a share; list those that were skipped, and raise its faults."""
        if fetched.bad_samples and self._bad_samples is not None:
            self._bad_samples.add(self._name, fetched.bad_samples)
        if fetched.faults:
            raise EchelonError(*fetched.faults, exit=ExitCode.FAILED)
        return fetched.data


def _make_data_error(what: str, do: str) -> EchelonError:
    """Return an error with one fault about the data."""
    return EchelonError(Fault(what, do))
