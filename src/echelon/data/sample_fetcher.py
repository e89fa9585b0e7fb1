"""Fetches and collates the samples of a share, in the training process or in loader processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, StackDataset, Subset, default_collate, get_worker_info

from echelon.data.loader_errors import iter_fetched
from echelon.data.loader_options import make_loader_error
from echelon.data.sample_seeds import (
    derive_collate_seed,
    derive_seeds,
    keep_generators,
    seed_generators,
)

if TYPE_CHECKING:
    from echelon.data.batches import BatchOrder, MakeNextOrder

Collate = Callable[[list[Any]], Any]


class SampleShare(NamedTuple):
    """The samples that a rank takes of one global batch, as a loader process is asked for them."""

    draws: list[int]
    """Their indices in the Dataset, plus a multiple of its length for one that comes again in the
    epoch."""
    seed: int
    epoch: int


def iter_shares(order: BatchOrder, first_batch: int) -> Iterator[SampleShare]:
    """Yields the shares of a rank, batch by batch; some may be empty."""
    for draws, counts in order.iter_draws(first_batch):
        numbers = draws.tolist()
        for stop, count in zip(accumulate(counts), counts, strict=True):
            yield SampleShare(numbers[stop - count : stop], order.seed, order.epoch)


class SampleFetcher:
    """A Dataset together with how its samples are seeded and collated.

    To torch's DataLoader it is a Dataset whose `__getitems__` returns a whole batch.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None) -> None:
        self.dataset = dataset
        self._size = len(dataset)
        self._collate = collate_fn or default_collate
        self._is_fetched_singly = _is_fetched_singly(dataset)

    def __len__(self) -> int:
        return self._size

    def __getitems__(self, share: SampleShare) -> Any:
        """Return the collated samples of a share that is not empty.

        Random numbers are seeded before every sample. A Dataset with a `__getitems__` of its own
        fetches all at once and is seeded once, by the first of them; so is the collation.
        """
        rows = [draw % self._size for draw in share.draws]
        seeds = derive_seeds(share.seed, share.epoch, share.draws)
        if self._is_fetched_singly:
            samples = []
            for row, seed in zip(rows, seeds, strict=True):
                seed_generators(seed)
                samples.append(self.dataset[row])
        else:
            seed_generators(seeds[0])
            samples = self.dataset.__getitems__(rows)
        seed_generators(derive_collate_seed(seeds[0]))
        return self._collate(samples)

    def fetch(self, share: SampleShare) -> Any:
        """Return the same in the training process, whose own random numbers stay untouched."""
        with keep_generators():
            return self.__getitems__(share)


def _is_fetched_singly(dataset: Any) -> bool:
    """Return whether a sample is fetched by its own call of `__getitem__`.

    torch's own containers have a `__getitems__` that only passes the indices on.
    """
    if type(dataset) is Subset:
        return _is_fetched_singly(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return all(map(_is_fetched_singly, parts.values() if isinstance(parts, dict) else parts))
    return not hasattr(dataset, "__getitems__")


class LoaderProcesses:
    """torch's loader processes for one source. They are started once and serve every epoch."""

    def __init__(
        self,
        fetcher: SampleFetcher,
        workers: int,
        options: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self._requests = _Requests()
        self._workers = workers
        self._fetched: Iterator[Any] = iter(())
        self._begun: deque[BatchOrder] = deque()
        """The orders that the processes were asked for and that are not consumed yet."""
        chosen = {"persistent_workers": True, "pin_memory": device.type == "cuda", **options}
        chosen["worker_init_fn"] = _ProcessInit(options.get("worker_init_fn"))
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
    ) -> Iterator[tuple[Any, int]]:
        """Yields the collated shares of an order with their sizes, and None for an empty one.

        At its end the processes go on with the next order, so that the first batches of an epoch
        are there when it begins. What they fetched ahead is dropped where another order is asked
        for, or where an iteration was left early.
        """
        if not (self._begun and first == 0 and _is_same_order(self._begun[0], order)):
            self._begun = deque()
            self._requests.upcoming = self._iter_requests(order, first, make_next, self._begun)
            self._fetched = iter_fetched(self._loader, self._workers)
        begun, is_complete = self._begun, False
        try:
            for share in iter_shares(order, first):
                # torch's loader cannot fetch an empty batch.
                yield next(self._fetched) if share.draws else None, len(share.draws)
            is_complete = True
        finally:
            if is_complete and begun:
                begun.popleft()
            else:
                begun.clear()

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
            yield from (share for share in iter_shares(following, first) if share.draws)
            first = 0
            try:
                following = make_next(following) if make_next and persists else None
            except Exception:  # of the user's sampler; raised again when that epoch begins
                return

    def close(self) -> None:
        """Ends the processes."""
        self._begun = deque()
        if (iterator := self._loader._iterator) is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]
            self._loader._iterator = None


def _is_same_order(one: BatchOrder, other: BatchOrder) -> bool:
    """Return whether two orders of one source are the same: they differ by kind and epoch alone."""
    return type(one) is type(other) and (one.seed, one.epoch) == (other.seed, other.epoch)


class _Requests:
    """A batch sampler that is given its shares anew for every iteration of the loader."""

    def __init__(self) -> None:
        self.upcoming: Iterator[SampleShare] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.upcoming


class _ProcessInit:
    """The first call in a loader process."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        # To the user's code the Dataset is the user's own; torch's record is frozen.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)


def return_unchanged(batch: Any) -> Any:
    """In the place of a collation, for a loader whose processes send what is complete."""
    return batch
