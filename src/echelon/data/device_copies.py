"""Copies batches to a GPU in a stream of their own, while the step before still computes.

A copy in the stream of the training would begin when the step before has ended. In a stream beside
it the copy begins at once, and the training's stream waits for its end alone.

    copies    | batch 1 | batch 2 |
    training            | step 1          | step 2 …

Memory must not be used again too early, on either side. Memory on the GPU is marked as used by the
training's stream, so that no later copy gets it while a step reads it. Memory of the host is kept
until the copy from it has ended: pinned memory is read when the GPU comes to it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from echelon.data.batch_structure import list_tensors, move_batch


def is_on_host(batch: Any) -> bool:
    """Return whether all tensors of a batch are known, and are memory of the host."""
    tensors = list_tensors(batch)
    return tensors is not None and all(t.is_cpu and t.layout is torch.strided for t in tensors)


def pin_batch(batch: Any) -> Any:
    """Return a batch in pinned memory where it can be."""
    return pin_memory(batch) if is_on_host(batch) else batch  # type: ignore[no-untyped-call]


class BatchCopy(NamedTuple):
    """A batch on its way to the device."""

    data: Any
    is_complete: torch.cuda.Event | None
    """None where the copy is in the stream of the training."""


class BatchCopier:
    """Copies the batches of one source to a GPU, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._on_host: deque[tuple[torch.cuda.Event, Any]] = deque()
        """Batches that are still copied from, the oldest first."""

    def begin_copy(self, batch: Any) -> BatchCopy:
        """Begin to copy a batch, preferably from pinned memory."""
        self._drop_copied()
        training = torch.cuda.current_stream(self._device)
        # Objects that move themselves may have tensors that cannot be marked as used. What a sample
        # computes on a GPU is known to be there in the stream of the training alone.
        has_own_stream = is_on_host(batch)
        stream = self.stream if has_own_stream else training
        with torch.cuda.stream(stream):
            moved = move_batch(batch, self._device)
            has_ended = stream.record_event()
        self._on_host.append((has_ended, batch))
        return BatchCopy(moved, has_ended if has_own_stream else None)

    def finish_copy(self, copy: BatchCopy) -> Any:
        """Return the batch on the device; what the training's stream does next waits for it."""
        if copy.is_complete is not None:
            training = torch.cuda.current_stream(self._device)
            training.wait_event(copy.is_complete)
            for tensor in list_tensors(copy.data) or ():
                tensor.record_stream(training)
        return copy.data

    def copy_batch(self, batch: Any) -> Any:
        """Return a batch on the device, as `finish_copy` does."""
        return self.finish_copy(self.begin_copy(batch))

    def _drop_copied(self) -> None:
        while self._on_host and self._on_host[0][0].query():  # type: ignore[no-untyped-call]
            self._on_host.popleft()
