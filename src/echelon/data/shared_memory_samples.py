"""Samples on their way from a loader process, in one block of shared memory.

torch would share every tensor of every sample by a file descriptor of its own, and a batch of a
thousand samples would use up the descriptors of a process.
"""

from __future__ import annotations

import io
import pickle
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_ALIGN_BYTES = 64


class PackedSamples(NamedTuple):
    """A list of samples, with the memory of its tensors and arrays apart."""

    pickled: bytes
    sizes: list[int]
    memory: Tensor


def pack_samples(samples: list[Any]) -> PackedSamples:
    """Return the samples as they are sent."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    _SamplePickler(pickled, protocol=5, buffer_callback=buffers.append).dump(samples)
    views = [buffer.raw() for buffer in buffers]
    sizes = [view.nbytes for view in views]
    *starts, total = _find_starts(sizes)
    memory = torch.empty(total, dtype=torch.uint8)
    array = memory.numpy()
    for start, view in zip(starts, views, strict=True):
        array[start : start + view.nbytes] = view
    return PackedSamples(pickled.getvalue(), sizes, memory)


def unpack_samples(packed: PackedSamples) -> list[Any]:
    """Return the samples; their tensors and arrays lie in the block."""
    array = packed.memory.numpy()
    starts = _find_starts(packed.sizes)
    buffers = [
        array[start : start + size] for start, size in zip(starts, packed.sizes, strict=False)
    ]
    samples: list[Any] = pickle.loads(packed.pickled, buffers=buffers)
    return samples


def _find_starts(sizes: list[int]) -> list[int]:
    aligned = (-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes)
    return list(accumulate(aligned, initial=0))


class _SamplePickler(pickle.Pickler):
    """Leaves the memory of tensors out of the pickle, as pickle does of numpy's arrays."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not value.is_cpu or value.layout is not torch.strided:
            return NotImplemented
        if value.is_quantized:
            return NotImplemented
        dense = value.detach().resolve_conj().resolve_neg().contiguous()
        array = dense.reshape(-1).view(torch.uint8).numpy()
        return _make_tensor, (array, value.dtype, tuple(value.shape), value.requires_grad)


def _make_tensor(
    array: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
) -> Tensor:
    tensor = torch.from_numpy(array).view(dtype).reshape(shape)
    return tensor.requires_grad_(requires_grad)
