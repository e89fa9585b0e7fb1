"""Fetches and collates the samples of a share, in the training process or in loader processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, StackDataset, Subset, default_collate, get_worker_info

from echelon.data.loader_errors import iter_fetched
from echelon.data.sample_seeds import (
    derive_collate_seed,
    keep_generators,
    seed_generators,
)
from echelon.errors import EchelonError, Fault

Collate = Callable[[list[Any]], Any]


class SampleShare(NamedTuple):
    """The samples that a rank takes of one global batch."""

    rows: list[int]
    """Their indices in the Dataset."""
    seeds: list[int]
    """For each, what its random numbers are seeded with."""


class SampleFetcher:
    """A Dataset together with how its samples are seeded and collated.

    To torch's DataLoader it is a Dataset whose `__getitems__` returns a whole batch.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None) -> None:
        self.dataset = dataset
        self._collate = collate_fn or default_collate
        self._is_fetched_singly = _is_fetched_singly(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, share: SampleShare) -> Any:
        """Return the collated samples of a share that is not empty.

        Random numbers are seeded before every sample. A Dataset with a `__getitems__` of its own
        fetches all at once and is seeded once, by the first of them; so is the collation.
        """
        if self._is_fetched_singly:
            samples = []
            for row, seed in zip(share.rows, share.seeds, strict=True):
                seed_generators(seed)
                samples.append(self.dataset[row])
        else:
            seed_generators(share.seeds[0])
            samples = self.dataset.__getitems__(share.rows)
        seed_generators(derive_collate_seed(share.seeds[0]))
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
        self._shares = _CurrentShares()
        self._workers = workers
        chosen = {"persistent_workers": True, "pin_memory": device.type == "cuda", **options}
        chosen["worker_init_fn"] = _ProcessInit(options.get("worker_init_fn"))
        try:
            self._loader: DataLoader[Any] = DataLoader(
                fetcher,  # type: ignore[arg-type]
                batch_sampler=self._shares,
                num_workers=workers,
                collate_fn=_return_unchanged,  # the fetcher has collated it
                # The loader draws a seed for its processes when it starts, which would move the
                # generator that the model draws from.
                generator=torch.Generator().manual_seed(0),
                **chosen,
            )
        except (ValueError, TypeError) as error:
            raise EchelonError(
                Fault(
                    f"the experiment's loader is {dict(options)}, which DataLoader refuses: "
                    f"{error}",
                    "change or leave out that option",
                )
            ) from error

    def iter_batches(self, shares: Iterator[SampleShare]) -> Iterator[Any]:
        """Yields the collated shares, which are not empty: torch cannot fetch an empty batch.

        Batches of an iteration that was left early are dropped.
        """
        self._shares.upcoming = shares
        return iter_fetched(self._loader, self._workers)

    def close(self) -> None:
        """Ends the processes."""
        if (iterator := self._loader._iterator) is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]
            self._loader._iterator = None


class _CurrentShares:
    """A batch sampler that is given its shares anew for every iteration."""

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


def _return_unchanged(batch: Any) -> Any:
    return batch
