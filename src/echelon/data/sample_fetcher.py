"""Fetches and collates the samples of a share, in the training process or in loader processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, StackDataset, Subset, default_collate, get_worker_info

from echelon.data.bad_samples import (
    BadSample,
    describe_error,
    make_bad_sample_fault,
    make_too_many_fault,
)
from echelon.data.batch_blocks import BatchBlockWriter, PackedBatch, forget_blocks, unpack_batch
from echelon.data.batch_structure import list_tensors
from echelon.data.file_dataset import FileDataset, find_file_dataset
from echelon.data.formats.reader import BadSampleError
from echelon.data.loader_errors import iter_fetched
from echelon.data.loader_lifetime import LoaderLifetime
from echelon.data.loader_options import make_loader_error
from echelon.data.prefetch_depth import FIRST_DEPTH, MAX_DEPTH, PrefetchDepth
from echelon.data.remote_chunks import RemoteChunks
from echelon.data.sample_seeds import (
    derive_collate_seed,
    derive_seeds,
    keep_generators,
    seed_generators,
)
from echelon.data.sample_shares import SampleShare, iter_shares
from echelon.errors import EchelonError, Fault
from echelon.object_store.store_errors import ObjectStoreError

if TYPE_CHECKING:
    from echelon.data.batches import BatchOrder, MakeNextOrder

Collate = Callable[[list[Any]], Any]
_BLOCK_BYTES = 4 << 20
"""So much of files is read at once for several batches: reading many rows of a table costs little
more than reading a few."""
_END_TIMEOUT_S = 30.0
"""So long a loader process may take to end before it is killed."""


class FetchedShare(NamedTuple):
    """What a share became, as a loader process returns it. Faults are values, because torch raises
    an exception of a loader process again as another one."""

    data: Any
    """The collated samples; None where there are faults."""
    bad_samples: tuple[BadSample, ...] = ()
    """Those that were skipped."""
    faults: tuple[Fault, ...] = ()


class SampleFetcher:
    """A Dataset together with how its samples are seeded and collated, and what becomes of those
    that cannot be read.

    To torch's DataLoader it is a Dataset whose `__getitems__` returns a whole batch.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate | None,
        name: str = "the data",
        max_bad_samples: int | None = None,
    ) -> None:
        """`name` is that of the data in faults. `max_bad_samples`: how many samples may be skipped;
        None: an error of a sample is raised."""
        self.dataset = dataset
        self.work_slots: Tensor | None = None
        """In memory that loader processes share, for each of them: a sample that it fetches, and
        how many it fetches together with that one; 0 where it fetches none."""
        self._size = len(dataset)
        self._collate = collate_fn or default_collate
        self._is_fetched_singly = _is_fetched_singly(dataset)
        self._files, self._subsets = find_file_dataset(dataset)
        self.remote_chunks = RemoteChunks(dataset)
        is_plain = self._files is not None and not self._files.may_draw
        self._may_draw = not is_plain or self._collate is not default_collate
        """Whether code of the user may draw random numbers; where none does, nothing is seeded."""
        self._reads_batches = is_plain and self._collate is default_collate
        """Whether files may give batches as they are."""
        self._name, self._max_bad_samples = name, max_bad_samples
        self._slot: Any = None
        self.packer: BatchBlockWriter | None = None
        """Of a loader process whose batches are to cross in blocks."""

    def __len__(self) -> int:
        return self._size

    def __getitems__(self, share: SampleShare) -> FetchedShare:
        """Return the collated samples of a share that is not empty.

        Random numbers are seeded before every sample. A FileDataset reads all samples at once,
        which draws nothing, and then finishes each. A Dataset with a `__getitems__` of its own
        fetches all at once and is seeded once, by the first of them; so is the collation.
        """
        self._prefetch(share)
        if self.packer is None:
            return self._fetch_share(share)
        self.packer.begin_batch()
        fetched = self._fetch_share(share)
        return fetched._replace(data=self.packer.pack_batch(fetched.data))

    def _fetch_share(self, share: SampleShare) -> FetchedShare:
        try:
            return FetchedShare(self._fetch_batch(self._find_rows(share.draws), share))
        except _SampleError as failed:
            # Which sample it was is found out one by one, in every epoch again: what is kept here
            # would not be there in a run that resumes.
            if isinstance(failed.error, EchelonError):
                return FetchedShare(None, faults=failed.error.faults)
            rows = self._find_rows(share.draws).tolist()
            seeds = derive_seeds(share.seed, share.epoch, share.draws)
            if self._max_bad_samples is None:
                if fault := self._explain_error(rows, seeds):
                    return FetchedShare(None, faults=(fault,))
                raise failed.error from None
            return self._fetch_readable(rows, seeds, share)
        finally:
            self._note_work(0, 0)

    def fetch(self, share: SampleShare) -> FetchedShare:
        """Return the same in the training process, whose own random numbers stay untouched."""
        if not self._may_draw:
            return self.__getitems__(share)
        with keep_generators():
            return self.__getitems__(share)

    def iter_fetched(self, shares: Iterator[SampleShare]) -> Iterator[tuple[FetchedShare, int]]:
        """Yields what fetch() returns for these shares, and their sizes. Where files need no more
        than to be read, the samples of many shares are read at once."""
        count = 1
        while block := list(islice(shares, count)):
            together = self._try_block(block) if count > 1 else iter(())
            for share in block:
                if not share.draws:
                    yield FetchedShare(None), 0
                else:
                    yield next(together, None) or self.fetch(share), len(share.draws)
            if self._files is not None and self._reads_batches:
                # The first batch is there as soon as it can be, and the next ones soon enough.
                share_bytes = max(1, self._files.row_bytes * len(block[-1].draws))
                count = max(1, min(4 * count, _BLOCK_BYTES // share_bytes))

    def describe_work(self, process: int) -> str:
        """Return what a loader process is fetching, to name it where it died; empty where it is not
        known."""
        row, count = (0, 0) if self.work_slots is None else self.work_slots[process].tolist()
        if not count:
            return ""
        place = self._locate(row)
        return place if count == 1 else f"{count} samples, the first of them {place}"

    def _prefetch(self, share: SampleShare) -> None:
        """Tell the files which of their chunks will be needed soon."""
        if share.chunks_ahead:
            files = self.remote_chunks if self._files is None else self._files
            files.prefetch_chunks(share.chunks_ahead)

    def _find_rows(self, draws: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the Dataset that are drawn."""
        return np.asarray(draws, np.int64) % self._size

    def _fetch_batch(self, rows: NDArray[np.int64], share: SampleShare) -> Any:
        """Return the collated samples of these rows, with the random numbers of the share's."""
        try:
            batch, seeds = self._read_batch(rows), None
            if batch is None:
                seeds = derive_seeds(share.seed, share.epoch, share.draws)
                samples = self._fetch_samples(rows.tolist(), seeds)
        except MemoryError:
            raise
        except Exception as error:
            raise _SampleError(error) from error
        if seeds is None:
            return batch
        if self._may_draw:
            seed_generators(derive_collate_seed(seeds[0]))
        return self._collate(samples)

    def _read_batch(self, rows: NDArray[np.int64]) -> Any:
        """Return the samples of files that need no more than to be read, as one batch."""
        batches = self._read_batches(rows, [len(rows)])
        return None if batches is None else next(batches)

    def _read_batches(self, rows: NDArray[np.int64], counts: list[int]) -> Iterator[Any] | None:
        """Return the same for several batches of so many samples."""
        if self._files is None or not self._reads_batches:
            return None
        self._note_work(int(rows[0]), len(rows))
        if self._subsets:
            rows = np.asarray(self._map_to_files(rows.tolist()), np.int64)
        return self._files.read_batches(rows, counts)

    def _try_block(self, shares: Sequence[SampleShare]) -> Iterator[FetchedShare]:
        """Yields those of several shares that have samples, read at once; none where that cannot be
        done, nor from where a sample cannot be read: which one is found out share by share. An
        object store that failed is not asked again, as its silence takes minutes."""
        for share in shares:
            self._prefetch(share)
        filled = [share.draws for share in shares if share.draws]
        if not filled:
            return
        rows = self._find_rows(np.concatenate([np.asarray(draws) for draws in filled]))
        try:
            for batch in self._read_batches(rows, list(map(len, filled))) or ():
                yield FetchedShare(batch)
        except MemoryError:
            raise
        except ObjectStoreError as error:
            yield FetchedShare(None, faults=error.faults)
        except Exception:
            return

    def _fetch_samples(self, rows: list[int], seeds: list[int]) -> list[Any]:
        samples: list[Any] = []
        if self._files is not None:
            self._note_work(rows[0], len(rows))
            in_files = self._map_to_files(rows)
            stored = self._files.read_rows(in_files)
            for row, in_file, each, seed in zip(rows, in_files, stored, seeds, strict=True):
                self._note_work(row, 1)
                if self._may_draw:
                    seed_generators(seed)
                samples.append(self._files.finish_sample(in_file, each))
        elif self._is_fetched_singly:
            for row, seed in zip(rows, seeds, strict=True):
                self._note_work(row, 1)
                seed_generators(seed)
                samples.append(self.dataset[row])
        else:
            self._note_work(rows[0], len(rows))
            seed_generators(seeds[0])
            samples = self.dataset.__getitems__(rows)
        return samples

    def _fetch_readable(
        self, rows: list[int], seeds: list[int], share: SampleShare
    ) -> FetchedShare:
        """Return the samples of a share with the next readable one in the place of each that is
        not."""
        assert self._max_bad_samples is not None
        readable: list[int] = []
        skipped: list[BadSample] = []
        for row, seed in zip(rows, seeds, strict=True):
            bad: list[tuple[int, Exception]] = []
            while error := self._try_sample(instead := (row + len(bad)) % self._size, seed):
                bad.append((instead, error))
                if len(bad) > min(self._max_bad_samples, self._size - 1):
                    last = self._describe_bad_sample(instead, error, instead)
                    fault = make_too_many_fault(self._name, self._max_bad_samples, last)
                    return FetchedShare(None, tuple(skipped), (fault,))
            readable.append(instead)
            skipped += [self._describe_bad_sample(*each, instead) for each in bad]
        try:
            rows_read = np.asarray(readable, np.int64)
            return FetchedShare(self._fetch_batch(rows_read, share), tuple(skipped))
        except _SampleError as failed:  # each alone was readable: not a matter of a sample
            raise failed.error from None

    def _explain_error(self, rows: list[int], seeds: list[int]) -> Fault | None:
        """Return the fault of the first sample that cannot be read, if it can be named better than
        by its traceback."""
        for row, seed in zip(rows, seeds, strict=True):
            error = self._try_sample(row, seed)
            if error is None:
                continue
            has_place = self._files is not None or hasattr(self.dataset, "locate")
            if not has_place and not isinstance(error, BadSampleError):
                return None
            bad = self._describe_bad_sample(row, error, row)
            return make_bad_sample_fault(self._name, bad.place, bad.why)
        return None

    def _describe_bad_sample(self, row: int, error: Exception, instead: int) -> BadSample:
        place = str(error.place) if isinstance(error, BadSampleError) else self._locate(row)
        return BadSample(row, place, describe_error(error), instead)

    def _try_sample(self, row: int, seed: int) -> Exception | None:
        """Return the error of fetching a sample alone; None where it is readable."""
        try:
            self._fetch_samples([row], [seed])
        except (MemoryError, EchelonError):
            raise
        except Exception as error:
            return error
        return None

    def _locate(self, row: int) -> str:
        """Return where a sample is, as a message names it."""
        try:
            if self._files is not None:
                return str(self._files.locate(self._map_to_files([row])[0]))
            return str(self.dataset.locate(row))
        except Exception:  # of a Dataset without files, or of one that does not know
            return f"sample {row}"

    def _map_to_files(self, rows: list[int]) -> list[int]:
        """Return the numbers that rows of the Dataset have in the files."""
        for indices in self._subsets:
            rows = [indices[row] for row in rows]
        return rows

    def _note_work(self, row: int, count: int) -> None:
        """Note what this loader process fetches, for the case that it dies of it."""
        if self._slot is None:
            info = get_worker_info()
            if info is None or self.work_slots is None:
                return
            self._slot = self.work_slots[info.id].numpy()  # which takes a tenth of torch's time
        self._slot[0], self._slot[1] = row, count


class _SampleError(Exception):
    """Carries an error of fetching samples past those of collating them."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _is_fetched_singly(dataset: Any) -> bool:
    """Return whether a sample may be fetched by its own call of `__getitem__`.

    torch's own containers have a `__getitems__` that only passes the indices on.
    """
    if type(dataset) is Subset:
        return _is_fetched_singly(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return all(map(_is_fetched_singly, parts.values() if isinstance(parts, dict) else parts))
    return isinstance(dataset, FileDataset) or not hasattr(dataset, "__getitems__")


class LoaderProcesses:
    """torch's loader processes for one source. They are started once and serve every epoch."""

    def __init__(
        self,
        fetcher: SampleFetcher,
        workers: int,
        options: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        chosen = {"persistent_workers": True, "pin_memory": device.type == "cuda", **options}
        depth = chosen.get("prefetch_factor")
        if depth is None and not chosen["persistent_workers"]:
            depth = FIRST_DEPTH  # processes that end with the epoch learn nothing
        self._depth = PrefetchDepth(workers, depth)
        # What is fetched ahead is decided by `_requests`, up to this.
        chosen["prefetch_factor"] = MAX_DEPTH if depth is None else depth
        self._requests = _Requests(self._depth)
        self._workers = workers
        self._fetched: Iterator[Any] = iter(())
        self._begun: deque[BatchOrder] = deque()
        """The orders that the processes were asked for and that are not consumed yet."""
        self._fetcher = fetcher
        slots = torch.zeros(workers, 2, dtype=torch.int64)
        fetcher.work_slots = slots.share_memory_()  # type: ignore[no-untyped-call]
        has_blocks = bool(chosen["persistent_workers"])  # else new ones were made in every epoch
        chosen["worker_init_fn"] = _ProcessInit(LoaderLifetime(options), has_blocks)
        try:
            self._loader: DataLoader[Any] = DataLoader(
                fetcher,  # type: ignore[arg-type]
                batch_sampler=self._requests,
                num_workers=workers,
                collate_fn=return_unchanged,  # the fetcher has collated it
                # The loader draws a seed for its processes when it starts, which would move the
                # generator that the model draws from.
                generator=torch.Generator().manual_seed(0),
                **chosen,
            )
        except (ValueError, TypeError) as error:
            raise make_loader_error(options, error) from error

    def iter_batches(
        self, order: BatchOrder, first: int, make_next: MakeNextOrder | None
    ) -> Iterator[tuple[FetchedShare, int]]:
        """Yields the shares of an order as they were fetched, with their sizes.

        At its end the processes go on with the next order, so that the first batches of an epoch
        are there when it begins. What they fetched ahead is dropped where another order is asked
        for, or where an iteration was left early.
        """
        if not (self._begun and first == 0 and _is_same_order(self._begun[0], order)):
            self._begun = deque()
            upcoming = self._iter_requests(order, first, make_next, self._begun)
            self._requests.begin(upcoming)
            self._fetched = iter_fetched(self._loader, self._workers, self._fetcher.describe_work)
        begun, is_complete = self._begun, False
        try:
            for share in iter_shares(order, first):
                # torch's loader cannot fetch an empty batch.
                fetched = self._take_next() if share.draws else FetchedShare(None)
                yield fetched, len(share.draws)
                del fetched  # which would keep the block of the last batch
            is_complete = True
        finally:
            if is_complete and begun:
                begun.popleft()
            else:
                begun.clear()

    def _take_next(self) -> FetchedShare:
        """Return the next share, and have the processes asked for as many more as they may work
        ahead."""
        asked_at = time.perf_counter()
        fetched: FetchedShare = next(self._fetched)
        waited_s, size_bytes = time.perf_counter() - asked_at, 0
        if isinstance(fetched.data, PackedBatch):
            size_bytes = fetched.data.memory.numel()
            fetched = fetched._replace(data=unpack_batch(fetched.data))
        elif not self._depth.is_fixed:
            size_bytes = sum(t.nbytes for t in list_tensors(fetched.data) or ())
        self._depth.note_batch(waited_s, size_bytes)
        for _ in range(self._requests.count_after_batch()):
            self._loader._iterator._try_put_index()  # type: ignore[union-attr]
        return fetched

    def has_ready_batch(self) -> bool:
        """Return whether a batch has come from the processes that was not asked for yet."""
        iterator: Any = self._loader._iterator
        if iterator is None:
            return False
        is_next = len(iterator._task_info.get(iterator._rcvd_idx, ())) == 2
        return is_next or not iterator._data_queue.empty()

    def _iter_requests(
        self,
        order: BatchOrder,
        first: int,
        make_next: MakeNextOrder | None,
        begun: deque[BatchOrder],
    ) -> Iterator[SampleShare]:
        """Yields what the processes are asked for: this order, and those after it. Every order that
        is begun is noted in `begun`."""
        following: BatchOrder | None = order
        persists = self._loader.persistent_workers  # else they are to end with the epoch
        while following is not None:
            begun.append(following)
            shares = iter_shares(following, first, self._fetcher.remote_chunks)
            yield from (share for share in shares if share.draws)
            first = 0
            try:
                following = make_next(following) if make_next and persists else None
            except Exception:  # of the user's sampler; raised again when that epoch begins
                return

    def close(self) -> None:
        """Ends the processes."""
        self._begun = deque()
        end_loader_processes(self._loader)
        self._fetched = iter(())  # which has batches that nobody has asked for


def end_loader_processes(loader: DataLoader[Any]) -> None:
    """End the processes of a DataLoader, if it has any, and forget their blocks.

    torch asks them to end and does not wait for those that are slow: on a busy machine they would
    still hold the user's files.
    """
    if (iterator := loader._iterator) is None:
        return
    iterator._shutdown_workers()  # type: ignore[attr-defined]
    for process in iterator._workers:  # type: ignore[attr-defined]
        process.join(_END_TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()
    forget_blocks(process.pid for process in iterator._workers)  # type: ignore[attr-defined]
    loader._iterator = None


def _is_same_order(one: BatchOrder, other: BatchOrder) -> bool:
    """Return whether two orders of one source are the same: they differ by kind and epoch alone."""
    return type(one) is type(other) and (one.seed, one.epoch) == (other.seed, other.epoch)


class _Requests:
    """A batch sampler that is given its shares anew for every iteration of the loader.

    While as many batches are under way as there may be, it says that there are no more. torch takes
    that for the end only if none is under way. A number of the user's is kept by torch itself.
    """

    def __init__(self, depth: PrefetchDepth) -> None:
        self._depth = depth
        self._upcoming: Iterator[SampleShare] = iter(())
        self._under_way = 0

    def begin(self, upcoming: Iterator[SampleShare]) -> None:
        """Begin another iteration."""
        self._upcoming, self._under_way = upcoming, 0

    def count_after_batch(self) -> int:
        """Note that a batch has come, and return how many more may be asked for."""
        self._under_way -= 1
        return 0 if self._depth.is_fixed else self._depth.max_batches - self._under_way

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> SampleShare:
        if not self._depth.is_fixed and self._under_way >= self._depth.max_batches:
            raise StopIteration
        share = next(self._upcoming)
        self._under_way += 1
        return share


class _ProcessInit:
    """The first call in a loader process."""

    def __init__(self, worker_init_fn: Callable[[int], None], has_blocks: bool) -> None:
        self._worker_init_fn, self._has_blocks = worker_init_fn, has_blocks

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        if self._has_blocks:
            info.dataset.packer = BatchBlockWriter()
            info.dataset.packer.install()
        # To the user's code the Dataset is the user's own; torch's record is frozen.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        self._worker_init_fn(worker)


def return_unchanged(batch: Any) -> Any:
    """In the place of a collation, for a loader whose processes send what is complete."""
    return batch
