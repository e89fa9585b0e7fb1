"""A function of the user's that changes training batches on the device: mixup, crops, flips."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from echelon.data.batches import Batch, BlockSlice
from echelon.data.sample_seeds import derive_batch_seed, keep_generators, seed_generators
from echelon.errors import EchelonError, Fault

Transform = Callable[[Any], Any]


class BatchTransform:
    """Applies an experiment's `batch_transform` to this rank's share of a batch.

    What it draws from `random`, numpy and torch depends on the seed, the step and the rank alone,
    so that a resumed run draws the same. The generators are then as they were: the model draws its
    own numbers from them.
    """

    def __init__(self, function: Transform, seed: int, rank: int, device: torch.device) -> None:
        self._function = function
        self._seed, self._rank, self._device = seed, rank, device

    def transform(self, batch: Batch | BlockSlice, step: int) -> Batch | BlockSlice:
        """Return the batch of the step after `step`, transformed. A share without samples stays."""
        if not batch.sample_count:
            return batch
        data = self.transform_data(batch.data, batch.sample_count, step)
        if isinstance(batch, BlockSlice) and _has_rows(data, batch.sample_count):
            return BlockSlice(tuple(data), 0, batch.sample_count)  # a captured step can read it
        return Batch(data, batch.sample_count)

    def transform_data(self, data: Any, sample_count: int, step: int) -> Any:
        """Return the same for the data of a share."""
        with self._use_own_numbers(step):
            changed = self._function(data)
        if changed is None:
            raise EchelonError(
                Fault(
                    "the experiment's batch_transform returned nothing",
                    "let it return the batch, also where it changes it in place",
                )
            )
        first = next((part for part in _list_parts(changed) if part.ndim), None)
        if first is not None and isinstance(data, tuple | list) and len(first) != sample_count:
            raise EchelonError(
                Fault(
                    f"the experiment's batch_transform made {len(first)} rows of "
                    f"{sample_count} samples",
                    "let it return as many samples as it is given",
                )
            )
        return changed

    @contextmanager
    def _use_own_numbers(self, step: int) -> Iterator[None]:
        seed = derive_batch_seed(self._seed, step, self._rank)
        if self._device.type != "cuda":
            with keep_generators():
                seed_generators(seed)
                yield
            return
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        on_device = torch.cuda.default_generators[index]
        before = on_device.get_state()
        try:
            with keep_generators():
                seed_generators(seed)
                on_device.manual_seed(seed)
                yield
        finally:
            on_device.set_state(before)


def _list_parts(data: Any) -> list[Tensor]:
    """Return the tensors of a batch that is a tuple or a list."""
    return [p for p in data if isinstance(p, Tensor)] if isinstance(data, tuple | list) else []


def _has_rows(data: Any, count: int) -> bool:
    """Return whether a batch is tensors with a row per sample, as a captured step takes it."""
    parts = _list_parts(data)
    return (
        bool(parts) and len(parts) == len(data) and all(p.ndim and len(p) == count for p in parts)
    )
