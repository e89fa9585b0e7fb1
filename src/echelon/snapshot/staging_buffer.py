"""Memory that a state is copied into, so that training can go on while the copy is written.

The copy keeps what ``torch.save`` keeps (which tensors share a storage, strides, offsets) and makes
the tree plain: dict, list, tuple, scalars, tensors. One block of memory holds all of it and is kept
from save to save. A state on a GPU with spare memory is copied there first (`gpu_copy.py`);
otherwise the block is pinned, and the training waits for the copy to the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from echelon.errors import EchelonError, Fault
from echelon.snapshot.gpu_copy import StoredTensor, copy_on_gpu
from echelon.snapshot.manifest import count_cores

_ALIGN_BYTES = 64
# torch.nn.Buffer is there from torch 2.5 on.
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor))

_MADV_WIPEONFORK = 18
"""Of Linux; Python has no name for it."""
_MOVE_BYTES = 8 << 20
_COPY_THREADS = 4
_TOUCH_THREADS = 8

TreePath = tuple[Any, ...]
_MemoryMove = tuple[int, int, int]
"""To, from, bytes."""


@dataclass
class _StorageSlot:
    """A storage, seen as one dtype, and where its copy lies."""

    source: torch.Tensor
    """One of the tensors that use it."""
    users: int = 0
    start: int = 0

    @property
    def is_partial(self) -> bool:
        """One tensor that needs less than its storage: a slice of something larger, which
        ``torch.save`` would write whole."""
        return self.users == 1 and self.source.nbytes < self.source.untyped_storage().nbytes()

    @property
    def nbytes(self) -> int:
        return self.source.nbytes if self.is_partial else self.source.untyped_storage().nbytes()

    def view_source(self) -> torch.Tensor:
        """Return what is copied: the one tensor, or all of the storage as a flat tensor."""
        return self.source if self.is_partial else _view_whole_storage(self.source)


@dataclass
class _StoragePlan:
    """Every storage of one part. Keyed by dtype as well: torch.save refuses one storage seen
    as two dtypes, so those are copied twice."""

    slots: dict[tuple[Any, ...], _StorageSlot] = field(default_factory=dict)

    def add_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        slot = self.slots.setdefault(_make_storage_key(tensor), _StorageSlot(tensor))
        slot.users += 1
        return tensor


class StagingBuffer:
    """The memory of the copy. What :meth:`copy_state` and :meth:`begin_copy` return is valid until
    the next call."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._used_bytes = 0
        self._pinned_at = 0

    @property
    def used_memory(self) -> memoryview:
        """The bytes of the last copy: those of all its tensors."""
        assert self._memory is not None
        return memoryview(self._memory)[: self._used_bytes]

    def copy_state(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return a plain copy of these trees, complete when this returns.

        Raises OSError when there is no memory, EchelonError when a tree holds what a snapshot
        cannot.
        """
        return self._copy(parts, uses_gpu_memory=False)()

    def begin_copy(self, parts: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """Copy these trees so that they may be changed at once, and return a function that returns
        a plain copy of them. It may wait for a GPU, so it is for another thread.

        Raises what copy_state() raises.
        """
        return self._copy(parts, uses_gpu_memory=True)

    def _copy(
        self, parts: Mapping[str, Any], uses_gpu_memory: bool
    ) -> Callable[[], dict[str, Any]]:
        plans = {name: _StoragePlan() for name in parts}
        trees = {
            name: _to_plain_tree(tree, plans[name].add_tensor, (name,))
            for name, tree in parts.items()
        }
        slots = [slot for plan in plans.values() for slot in plan.slots.values()]
        by_device: dict[torch.device, list[_StorageSlot]] = {}
        for slot in slots:
            by_device.setdefault(slot.source.device, []).append(slot)
        # Side by side, as a copy on a GPU is one block.
        self._allocate_slots([slot for group in by_device.values() for slot in group])
        arrivals: list[Callable[[], None]] = []
        for device, group in by_device.items():
            is_on_gpu = device.type == "cuda"
            arrive = self._copy_on_gpu(device, group) if is_on_gpu and uses_gpu_memory else None
            if arrive is not None:
                arrivals.append(arrive)
            else:
                self._copy_to_host(device, group)
        copies = {id(slot): self._view_slot(slot) for slot in slots}

        def make_copy_lookup(plan: _StoragePlan) -> Callable[[torch.Tensor], torch.Tensor]:
            def get_copy(tensor: torch.Tensor) -> torch.Tensor:
                slot = plan.slots[_make_storage_key(tensor)]
                flat = copies[id(slot)]
                if slot.is_partial:
                    return flat.view(tensor.shape)
                return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

            return get_copy

        copied = {
            name: _to_plain_tree(tree, make_copy_lookup(plans[name]), (name,))
            for name, tree in trees.items()
        }

        def finish() -> dict[str, Any]:
            while arrivals:
                arrivals.pop()()
            return copied

        return finish

    def free_memory(self) -> None:
        """Free the memory."""
        if self._pinned_at:
            _get_cudart().cudaHostUnregister(self._pinned_at)
            self._pinned_at = 0
        self._memory = None

    def _allocate_slots(self, slots: list[_StorageSlot]) -> None:
        """Give every storage a place in the memory, which is grown if needed."""
        total = 0
        for slot in slots:
            slot.start = total
            total += -(-slot.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self._used_bytes = total
        if self._memory is None or len(self._memory) < total:
            self.free_memory()
            self._memory = allocate_memory(max(total, _ALIGN_BYTES))

    def _copy_on_gpu(
        self, device: torch.device, slots: list[_StorageSlot]
    ) -> Callable[[], None] | None:
        """Copy slots within their GPU, and return what brings them into the memory; None if there
        is no room on the GPU."""
        assert self._memory is not None
        first, last = slots[0].start, slots[-1]
        tensors = [StoredTensor(slot.view_source(), slot.start - first) for slot in slots]
        copy = copy_on_gpu(device, tensors, last.start + last.nbytes - first)
        if copy is None:
            return None
        return partial(copy.move_to_host, _get_address(self._memory) + first, _move_bytes)

    def _copy_to_host(self, device: torch.device, slots: list[_StorageSlot]) -> None:
        """Copy slots of one device into the memory, which is pinned for those of a GPU. Plain bytes
        on the CPU are copied by threads."""
        assert self._memory is not None
        if device.type == "cuda" and not self._pinned_at:
            self._pinned_at = _pin_memory(self._memory)
        moves: list[_MemoryMove] = []
        for slot in slots:
            source, flat = slot.view_source(), self._view_slot(slot)
            if device.type == "cpu" and source.is_contiguous():
                moves += _split_move(flat.data_ptr(), source.data_ptr(), source.nbytes)
            else:
                flat.view(source.shape).copy_(source, non_blocking=source.is_cuda)
        _run_in_threads(ctypes.memmove, moves, _COPY_THREADS)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def _view_slot(self, slot: _StorageSlot) -> torch.Tensor:
        """Return a storage of its own for each slot: torch.save writes storages whole."""
        count = slot.view_source().numel()
        if count == 0:
            return torch.empty(0, dtype=slot.source.dtype)
        assert self._memory is not None
        return torch.frombuffer(
            self._memory, dtype=slot.source.dtype, count=count, offset=slot.start
        )


def allocate_memory(size: int) -> mmap.mmap:
    """Return memory that is empty in forked processes, such as those of a data loader: otherwise
    every page that is written again would be copied for them. Raises OSError."""
    # Most systems give huge pages to private memory alone.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Not MADV_DONTFORK: a child that frees the object would unmap what it has there by then.
    with contextlib.suppress(OSError):
        memory.madvise(_MADV_WIPEONFORK)
    # A wish, not a need. The first copy of 1 GB, which is mostly page faults: 0.9 s without, 0.2
    # with.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _split_move(target: int, source: int, nbytes: int) -> list[_MemoryMove]:
    return [
        (target + start, source + start, min(_MOVE_BYTES, nbytes - start))
        for start in range(0, nbytes, _MOVE_BYTES)
    ]


def _run_in_threads(call: Callable[..., Any], moves: list[_MemoryMove], max_threads: int) -> None:
    """Call a function on pieces of memory in threads that take the next piece when they are free.

    ctypes releases the GIL during each call. ``Tensor.copy_`` splits every tensor over OpenMP's
    threads and waits for the slowest: for 600 MB in 60 tensors 0.035 s on two idle cores, but 0.07
    to 0.46 s when another process (a data loader) uses one of them. This takes 0.026 s, and 0.05 to
    0.08 s beside another process.
    """
    todo = deque(moves)

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                call(*todo.popleft())

    threads = min(max_threads, count_cores(), 1 + len(moves) // 4)
    helpers = [threading.Thread(target=work, name="stage") for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()


def _move_bytes(target: int, source: int, nbytes: int) -> None:
    """Move bytes from one address to another, in threads."""
    _run_in_threads(ctypes.memmove, _split_move(target, source, nbytes), _COPY_THREADS)


def _get_address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _get_cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _pin_memory(memory: mmap.mmap) -> int:
    """Pin the memory in place, and return its address, or 0 if the system refused: the copy is
    then only slower. torch's own pinned memory would be rounded up to a power of two."""
    address = _get_address(memory)
    # CUDA would find the pages one by one: for 16 GB, 10 s instead of 4.
    pages = [(at, 0, size) for at, _, size in _split_move(address, 0, len(memory))]
    _run_in_threads(ctypes.memset, pages, _TOUCH_THREADS)
    if int(_get_cudart().cudaHostRegister(address, len(memory), 0)) == 0:
        return address
    # CUDA keeps the refusal as "last error" and the next kernel would be blamed for it.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return 0


def _view_whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor's storage as a flat tensor."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def _make_storage_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what two tensors have in common exactly if they share a storage and a dtype."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes(), tensor.dtype


# Trees ---------------------------------------------------------------------------------------


def _to_plain_tree(tree: Any, leaf: Callable[[torch.Tensor], torch.Tensor], path: TreePath) -> Any:
    """Return the same tree in plain types, which ``weights_only=True`` reads, with tensors
    mapped by ``leaf``."""
    if isinstance(tree, torch.Tensor):
        return leaf(_to_plain_tensor(tree, path))
    if isinstance(tree, Mapping):
        return {
            _to_plain_scalar(k, path): _to_plain_tree(v, leaf, (*path, k)) for k, v in tree.items()
        }
    if isinstance(tree, list | tuple):
        kind = list if isinstance(tree, list) else tuple
        return kind(_to_plain_tree(v, leaf, (*path, i)) for i, v in enumerate(tree))
    return _to_plain_scalar(tree, path)


def find_unsavable_values(tree: Any, path: TreePath) -> list[Fault]:
    """Return the fault of the first value in a tree that a file cannot hold, if there is one."""
    try:
        _to_plain_tree(tree, lambda tensor: tensor, path)
    except EchelonError as error:
        return list(error.faults)
    return []


def to_plain_tree(tree: Any, path: TreePath) -> Any:
    """Return the same tree in plain types, with its tensors on the CPU."""
    return _to_plain_tree(tree, lambda tensor: tensor.cpu(), path)


def copy_from_file(tree: Any) -> Any:
    """Return the same tree with tensors of its own. Those of a snapshot are mapped, and would hold
    on to a file that is removed later."""
    return _to_plain_tree(tree, lambda tensor: tensor.clone(), ())


def _to_plain_scalar(value: Any, path: TreePath) -> Any:
    """Return the built-in value of a scalar; a subclass (an IntEnum, a numpy.float64) becomes
    its base."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, str):  # one object for all that are equal: a file is then of its values
        return sys.intern(str.__str__(value))
    if isinstance(value, tuple):
        return tuple(_to_plain_scalar(v, path) for v in value)
    raise _make_unsupported_state_error(
        f"a {type(value).__module__}.{type(value).__qualname__}", path
    )


def _to_plain_tensor(tensor: torch.Tensor, path: TreePath) -> torch.Tensor:
    """Return a detached dense tensor, or raise EchelonError for a kind that a file cannot hold."""
    if type(tensor) not in _PLAIN_TENSORS:
        raise _make_unsupported_state_error(f"a tensor of type {type(tensor).__qualname__}", path)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise _make_unsupported_state_error(
            f"a tensor of {tensor.layout} on {tensor.device} ({tensor.dtype})", path
        )
    return tensor.detach().resolve_conj().resolve_neg()


def _make_unsupported_state_error(what: str, path: TreePath) -> EchelonError:
    return EchelonError(
        Fault(
            f"the state to save holds {what} at {'/'.join(map(str, path))}.",
            "give state as dict, list, tuple, None, bool, int, float, str and dense tensors.",
        )
    )
