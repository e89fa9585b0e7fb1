"""Batches on their way from a loader process, in blocks of shared memory that are used again.

torch shares every tensor of every batch by a file descriptor of its own: a new piece of memory,
whose pages both processes have to map, and a handshake between them. Here a loader process keeps a
few blocks. It collates a batch into one that is free, and sends a pickle without the memory of the
tensors, with the number of the block. A block crosses once, by torch's way; afterwards both
processes have it.

    block:   in use? | tensor | array | tensor …      each at a multiple of 64 bytes

The first byte says whether the block is in use. The loader process sets it, and the training
process clears it when the last tensor of the batch is gone. A batch that somebody keeps thus keeps
its block; where none is free, torch's way is taken.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

_ALIGN_BYTES = 64
"""Also of the header: a matrix product may round differently at another alignment."""
_MAX_BLOCKS = 32
_MAX_IDLE_BLOCKS, _IDLE_BATCHES = 2, 64
"""A block is given back where more than so many were free at each of so many batches."""
_SPARE = 1.25
"""A block is made somewhat larger than the batch for which it is made, as the next may be."""
_MAX_COVERED = 4
"""A tensor that is not dense is sent with the gaps in it, if it covers at most so many times its
own memory; its strides stay as they are in any case."""


class PackedBatch(NamedTuple):
    """A batch, with the memory of its tensors and arrays apart."""

    pickled: bytes
    spans: list[tuple[int, int]]
    """Where the memory of each begins, and how long it is."""
    memory: Any
    """The block: in the loader process what is sent of it, in the training process a tensor."""


# --- in the training process ---

_received: dict[tuple[int, int], NDArray[np.uint8]] = {}
"""The blocks of all loader processes, by process id and number."""
_in_use: dict[int, weakref.ref[Any]] = {}
"""Batches that have a block, by the identity of what says that they are gone."""


def unpack_batch(packed: PackedBatch) -> Any:
    """Return the batch; its tensors and arrays lie in the block."""
    array = packed.memory.numpy()
    buffers = [array[start : start + size] for start, size in packed.spans]
    return pickle.loads(packed.pickled, buffers=buffers)


def forget_blocks(pids: Iterable[int]) -> None:
    """Unmap the blocks of loader processes that have ended, once no batch uses them."""
    gone = set(pids)
    for key in [key for key in _received if key[0] in gone]:
        del _received[key]


def _receive_block(pid: int, number: int, count: int, size: int, block: Tensor | None) -> Tensor:
    """Return the memory of a block that a message names, and forget those that the process has
    given back. This is called where the message is unpickled, which may be in a thread of
    torch's."""
    while _received.pop((pid, count), None) is not None:
        count += 1
    if block is not None:
        _received[pid, number] = block.numpy()
    array = _received[pid, number]
    owner = _make_owner(array, 0, size)
    receiver = os.getpid()

    def release(gone: weakref.ref[Any]) -> None:
        if os.getpid() == receiver:  # a forked process has the same memory, but not the batch
            array[0] = 0
        del _in_use[id(gone)]

    watched = weakref.ref(owner, release)
    _in_use[id(watched)] = watched
    return torch.from_numpy(np.frombuffer(owner, np.uint8))


def _make_owner(array: NDArray[np.uint8], start: int, size: int) -> Any:
    """Return an object that lives as long as any array or tensor that is made of it. A view of an
    array would not do: numpy has views of views refer to the array."""
    return (ctypes.c_ubyte * size).from_address(array.ctypes.data + start)


# --- in a loader process ---


class BatchBlockWriter:
    """Packs the batches of one loader process, one after the other."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._block: _Block | None = None
        self._end = 0
        self._idle_batches = 0

    def install(self) -> None:
        """Have torch's default_collate stack tensors in blocks. Call it in the loader process."""
        default_collate_fn_map[Tensor] = self._stack_tensors

    def begin_batch(self) -> None:
        """Choose a block for the next batch."""
        free = [block for block in self._blocks if block.is_free()]
        self._idle_batches = self._idle_batches + 1 if len(free) > _MAX_IDLE_BLOCKS else 0
        if self._idle_batches >= _IDLE_BATCHES and free[-1] is self._blocks[-1]:
            free.remove(self._blocks.pop())
            self._idle_batches = 0
        self._block = max(free, key=lambda block: block.size_bytes, default=None)
        self._end = _ALIGN_BYTES

    def pack_batch(self, batch: Any) -> Any:
        """Return the batch as it is sent: packed, or as it is where it has no memory to share, no
        block is free, or it cannot be pickled in this way."""
        buffers: list[pickle.PickleBuffer] = []
        pickled = io.BytesIO()
        try:
            _BatchPickler(pickled, protocol=5, buffer_callback=buffers.append).dump(batch)
            views = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
        except Exception:  # torch's pickler knows more types, and has the right to complain
            return batch
        if not views:
            return batch
        spans = self._place(views)
        if spans is None:
            return batch
        assert self._block is not None
        sent = self._block.send(self._end, len(self._blocks))
        self._block = None
        return PackedBatch(pickled.getvalue(), spans, sent)

    def _place(self, views: Sequence[NDArray[np.uint8]]) -> list[tuple[int, int]] | None:
        """Return where the memory of each is in the block, after copying what is not there."""
        new_bytes = sum(_align(view.nbytes) for view in views if self._find(view) is None)
        if self._block is None or self._end + new_bytes > self._block.size_bytes:
            total = _ALIGN_BYTES + sum(_align(view.nbytes) for view in views)
            larger = self._take_block(total)
            if larger is None:
                return None
            self._block, self._end = larger, _ALIGN_BYTES
        spans = []
        for view in views:
            start = self._find(view)
            if start is None:
                start, self._end = self._end, self._end + _align(view.nbytes)
                self._block.array[start : start + view.nbytes] = view
            spans.append((start, view.nbytes))
        return spans

    def _find(self, view: NDArray[np.uint8]) -> int | None:
        """Return where memory begins in the block, None if it is elsewhere."""
        if self._block is None:
            return None
        start = view.ctypes.data - self._block.address
        return start if 0 <= start < self._block.size_bytes else None

    def _take_block(self, size_bytes: int) -> _Block | None:
        """Return a free block of this size, a new one where necessary; None if there are too
        many."""
        free = [block for block in self._blocks if block.is_free()]
        for block in free:
            if block.size_bytes >= size_bytes:
                return block
        if not free and len(self._blocks) == _MAX_BLOCKS:
            return None
        number = free[0].number if free else len(self._blocks)
        made = _Block(number, int(size_bytes * _SPARE))
        self._blocks[number : number + 1] = [made]
        return made

    def _stack_tensors(self, batch: Sequence[Tensor], *, collate_fn_map: Any = None) -> Tensor:
        """Stacks tensors in the block, where there is room, in the place of a new piece of shared
        memory."""
        first, block = batch[0], self._block
        size = len(batch) * first.numel() * first.element_size()
        end = self._end + _align(size)
        if (
            block is None
            or not size
            or end > block.size_bytes
            or not all(_is_plain(each) and _is_like(each, first) for each in batch)
        ):
            return torch.stack(tuple(batch), 0)
        out = block.lend(self._end, size).view(first.dtype).view(len(batch), *first.shape)
        self._end = end
        return torch.stack(tuple(batch), 0, out=out)


class _Block:
    """A block of a loader process."""

    def __init__(self, number: int, size_bytes: int) -> None:
        self.number, self.size_bytes = number, size_bytes
        self._tensor = torch.empty(size_bytes, dtype=torch.uint8)
        self._tensor.share_memory_()  # type: ignore[no-untyped-call]
        self.array: NDArray[np.uint8] = self._tensor.numpy()
        self.array[0] = 0
        self.address = self.array.ctypes.data
        self._is_sent = False
        self._lent: list[weakref.ref[Any]] = []

    def is_free(self) -> bool:
        """Return whether neither the training process nor code of the user here has memory of
        it."""
        self._lent = [each for each in self._lent if each() is not None]
        return not self.array[0] and not self._lent

    def lend(self, start: int, size: int) -> Tensor:
        """Return a part of the block, which is not used again as long as somebody has it: a Dataset
        may keep what it was given."""
        owner = _make_owner(self.array, start, size)
        self._lent.append(weakref.ref(owner))
        return torch.from_numpy(np.frombuffer(owner, np.uint8))

    def send(self, size: int, count: int) -> _SentBlock:
        """Return what the training process is sent of the block, which is in use from now on, and
        of which there are so many."""
        self.array[0] = 1
        block = None if self._is_sent else self._tensor
        self._is_sent = True
        return _SentBlock(os.getpid(), self.number, count, size, block)


class _SentBlock(NamedTuple):
    """A block in a message; it is unpickled as its memory."""

    pid: int
    number: int
    block_count: int
    size: int
    block: Tensor | None

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_block, tuple(self)


class _BatchPickler(pickle.Pickler):
    """Leaves the memory of tensors out of the pickle, as pickle does of numpy's arrays."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor:
            return NotImplemented
        # torch's own way would lose that a tensor is conjugated.
        value = value.resolve_conj().resolve_neg()
        if not _is_plain(value, may_require_grad=True):
            raise pickle.PicklingError("a tensor that torch shares by its own way")
        covered = _count_covered(value)
        if not covered:
            return _make_empty, (value.dtype, tuple(value.shape), value.requires_grad)
        detached, layout = value.detach(), (tuple(value.shape), value.stride(), value.requires_grad)
        if covered > _MAX_COVERED * value.numel():
            dense = detached.contiguous().view(-1)
            return _make_tensor_with_gaps, (_get_bytes(dense), value.dtype, *layout)
        covering = detached.as_strided((covered,), (1,))
        return _make_tensor, (_get_bytes(covering), value.dtype, *layout)


def _is_plain(value: Tensor, may_require_grad: bool = False) -> bool:
    """Return whether a tensor is no more than memory, a type and strides."""
    return (
        type(value) is Tensor
        and value.is_cpu
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_nested
        and not value.is_conj()
        and not value.is_neg()
        and (may_require_grad or not value.requires_grad)
    )


def _is_like(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape


def _count_covered(value: Tensor) -> int:
    """Return the elements of memory from the first of a tensor to its last."""
    if not value.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))


def _make_tensor(
    array: NDArray[np.uint8],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Tensor:
    tensor = torch.from_numpy(array).view(dtype).as_strided(shape, stride)
    return tensor.requires_grad_(requires_grad)


def _make_tensor_with_gaps(
    array: NDArray[np.uint8],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype)
    tensor.copy_(torch.from_numpy(array).view(dtype).view(shape))
    return tensor.requires_grad_(requires_grad)


def _make_empty(dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    return torch.empty(shape, dtype=dtype).requires_grad_(requires_grad)


def _get_bytes(flat: Tensor) -> NDArray[np.uint8]:
    return flat.view(torch.uint8).numpy()


def _align(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
