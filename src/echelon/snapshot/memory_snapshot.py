"""The state of a training in the memory of a rank, for the ranks that go on after one was lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.parallel.packed_tree import build_tree, describe_tree, format_dtype, parse_dtype
from echelon.snapshot.staging_buffer import StagingBuffer, copy_from_file


@dataclass(frozen=True)
class MemorySnapshot:
    """What a snapshot on disk would hold. Its tensors are those of the training itself, or copies
    of them."""

    info: Mapping[str, Any]
    parts: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The step after which it was taken."""
        return int(self.info["step"])

    def load_part(self, part: str) -> Any:
        """Return one part with tensors of its own: the memory of a copy is used again."""
        return copy_from_file(self.parts[part])


@dataclass(frozen=True)
class FlatSnapshot:
    """The same as data of JSON and one block of memory, which can be sent to another rank."""

    info: Mapping[str, Any]
    layout: Any
    """The trees of the parts, with a place in the memory for each tensor."""
    memory: memoryview

    @classmethod
    def stage(
        cls, info: Mapping[str, Any], parts: Mapping[str, Any], buffer: StagingBuffer
    ) -> FlatSnapshot:
        """Copy a state into a buffer. Raises OSError when there is no memory."""
        copied = buffer.copy_state(parts)
        start = _view_numbers(buffer.used_memory, torch.uint8).data_ptr()

        def locate(tensor: Tensor) -> list[Any]:
            offset = tensor.data_ptr() - start if tensor.numel() else 0
            return [format_dtype(tensor.dtype), list(tensor.shape), list(tensor.stride()), offset]

        return cls(info, describe_tree(copied, locate), buffer.used_memory)

    def open(self) -> MemorySnapshot:
        """Return the snapshot, whose tensors are this memory."""

        def find_tensor(
            dtype_name: str, shape: list[int], strides: list[int], offset: int
        ) -> Tensor:
            dtype = parse_dtype(dtype_name)
            if 0 in shape:
                return torch.empty(shape, dtype=dtype)
            return _view_numbers(self.memory[offset:], dtype).as_strided(shape, strides)

        return MemorySnapshot(self.info, build_tree(self.layout, find_tensor))


def _view_numbers(memory: memoryview, dtype: torch.dtype) -> Tensor:
    """Return as many numbers as the memory has room for."""
    count = len(memory) // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count) if count else torch.empty(0)
