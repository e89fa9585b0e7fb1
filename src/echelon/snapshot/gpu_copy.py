"""A copy of a state in spare memory of its GPU, from which it goes to the host in the background.

A copy within a GPU takes milliseconds where one to the host takes a third of a second, and seconds
the first time, as the host's memory has to be found. It is enqueued behind the step that made the
state, so the training may change the state at once without waiting for anything.

Only memory that the training has never used is taken: an allocation that fails later would be of
the training, and not of the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch

_CHUNK_BYTES = 128 << 20
_CHUNKS = 2
"""In pinned memory: one is filled while the other is emptied."""
_LEFT_SHARE = 0.1
"""Of a GPU's memory, which is left free."""

_peak_bytes: dict[torch.device, int] = {}
"""The most that the training had in use on a GPU until its last copy was made. torch counts anew
afterwards, without the copy."""

Move = Callable[[int, int, int], None]
"""Move bytes within the host's memory: to, from, how many."""


class StoredTensor(NamedTuple):
    """A tensor and where its bytes are in the copy."""

    tensor: torch.Tensor
    start: int


class GpuCopy:
    """A copy of tensors in spare memory of their GPU `device`."""

    def __init__(self, device: torch.device, tensors: Sequence[StoredTensor], size: int) -> None:
        """Enqueue the copy in the current stream. Raises torch's OutOfMemoryError."""
        self.device = device
        self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        for tensor, start in tensors:
            place = self._buffer[start : start + tensor.nbytes].view(tensor.dtype)
            place.view(tensor.shape).copy_(tensor)
        self._is_made = torch.cuda.current_stream(device).record_event()
        _copies_under_way.add(self)

    def move_to_host(self, address: int, move: Move) -> None:
        """Wait for the copy, move it to the host's memory at this address, and free it."""
        self._move_chunks(address, move)
        # Every read of it is over, so the training's stream may have its memory now.
        del self._buffer
        torch.cuda.reset_peak_memory_stats(self.device)
        _copies_under_way.discard(self)

    def _move_chunks(self, address: int, move: Move) -> None:
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_event(self._is_made)
        size = self._buffer.nbytes
        arriving: deque[tuple[torch.cuda.Event, torch.Tensor, int]] = deque()

        def land() -> None:
            has_arrived, chunk, start = arriving.popleft()
            has_arrived.synchronize()
            move(address + start, chunk.data_ptr(), chunk.nbytes)

        with torch.cuda.stream(stream):  # pinned memory is of the GPU that is current
            chunks = [_allocate_chunk(min(_CHUNK_BYTES, size)) for _ in range(_CHUNKS)]
            for number, start in enumerate(range(0, size, _CHUNK_BYTES)):
                if len(arriving) == _CHUNKS:
                    land()
                source = self._buffer[start : start + _CHUNK_BYTES]
                chunk = chunks[number % _CHUNKS][: source.nbytes]
                chunk.copy_(source, non_blocking=True)
                arriving.append((stream.record_event(), chunk, start))
            while arriving:
                land()


_copies_under_way: WeakSet[GpuCopy] = WeakSet()


def read_peak_bytes(device: torch.device) -> int:
    """Return the most that this process ever had in use on a GPU, without copies of a state."""
    known = _peak_bytes.get(device, 0)
    if any(copy.device == device for copy in _copies_under_way):
        return known
    return max(known, torch.cuda.max_memory_allocated(device))


def copy_on_gpu(device: torch.device, tensors: Sequence[StoredTensor], size: int) -> GpuCopy | None:
    """Return a copy of tensors on one GPU in memory of that GPU; None if there is no room to spare
    for its `size` bytes."""
    free, total = torch.cuda.mem_get_info(device)
    peak = read_peak_bytes(device)
    # What torch has cached beyond the peak counts as free, since the copy before was in it. The
    # first must not be: torch would give back all that it has cached to find memory in one piece.
    spare = free + torch.cuda.memory_reserved(device) - peak - int(_LEFT_SHARE * total)
    if spare < size or (device not in _peak_bytes and free < size):
        return None
    try:
        copy = GpuCopy(device, tensors, size)
    except torch.cuda.OutOfMemoryError:
        return None
    _peak_bytes[device] = peak
    return copy


def _allocate_chunk(size: int) -> torch.Tensor:
    """Return memory for a chunk, which is pinned if the system allows that; without, copies are
    only slower."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(size, dtype=torch.uint8)
