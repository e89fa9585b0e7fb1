"""A tree of tensors and plain values as one row of bytes, to be sent without a pickle.

The row is the length of a header, the header as JSON, and the bytes of the tensors one after the
other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_LENGTH_BYTES = 8
_PLAIN_TYPES = (bool, int, float, str, type(None))


class UnpackableValueError(Exception):
    """A tree holds something else; the message says what, and where."""


def pack_tree(tree: Any, memory: Tensor | None = None) -> Tensor:
    """Return a tree of dicts, lists, tuples, tensors, numbers, texts and None as a row of bytes, in
    the memory of an earlier row if that is long enough.

    Raises UnpackableValueError where there is anything else in it.
    """
    tensors: list[Tensor] = []
    header = json.dumps(_describe_node(tree, tensors)).encode()
    head = bytearray(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
    pieces = [torch.frombuffer(head, dtype=torch.uint8)]
    pieces += [t.reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
    size = sum(map(len, pieces))
    if memory is not None and memory.untyped_storage().nbytes() >= size:
        row = memory.new_empty(0).set_(memory.untyped_storage())[:size]
    else:
        row = torch.empty(size, dtype=torch.uint8)
    for place, piece in zip(torch.split(row, list(map(len, pieces))), pieces, strict=True):
        place.copy_(piece)
    return row


def unpack_tree(row: Tensor) -> Any:
    """Return the tree that `pack_tree` packed; its tensors are on the CPU."""
    raw = bytearray(row.numpy().tobytes())
    start = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
    return _TreeReader(raw, start).build_node(json.loads(raw[_LENGTH_BYTES:start]))


def to_device(tree: Any, device: torch.device) -> Any:
    """Return the tree with its tensors on a device."""
    if isinstance(tree, Tensor):
        return tree.detach().to(device)
    if type(tree) is dict:
        return {key: to_device(value, device) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(to_device(value, device) for value in tree)
    return tree


def count_tensor_bytes(tree: Any) -> int:
    """Return the size of all tensors in a tree."""
    if isinstance(tree, Tensor):
        return tree.nbytes
    if isinstance(tree, Mapping):
        return sum(map(count_tensor_bytes, tree.values()))
    return sum(map(count_tensor_bytes, tree)) if isinstance(tree, list | tuple) else 0


def _describe_node(node: Any, tensors: list[Tensor]) -> Any:
    """Return JSON for a node. Types are compared exactly: a subclass would come back as its
    base."""
    if isinstance(node, Tensor):
        dense = node.to_dense() if node.layout is not torch.strided else node
        tensors.append(dense.resolve_conj().resolve_neg().contiguous())
        return {"tensor": [str(node.dtype).removeprefix("torch."), list(node.shape)]}
    if type(node) in _PLAIN_TYPES:
        return node
    if type(node) is dict:
        pairs = [[_describe_node(part, tensors) for part in pair] for pair in node.items()]
        return {"dict": pairs}
    if type(node) in (list, tuple):
        return {type(node).__name__: [_describe_node(part, tensors) for part in node]}
    raise UnpackableValueError(f"a {type(node).__module__}.{type(node).__qualname__}")


class _TreeReader:
    """Reads the tensors of a row in the order in which the header names them."""

    def __init__(self, raw: bytearray, start: int) -> None:
        self._raw = raw
        self._position = start

    def build_node(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        [(kind, value)] = node.items()
        if kind == "tensor":
            return self._read_tensor(*value)
        if kind == "dict":
            return {self.build_node(key): self.build_node(part) for key, part in value}
        parts = [self.build_node(part) for part in value]
        return parts if kind == "list" else tuple(parts)

    def _read_tensor(self, dtype_name: str, shape: list[int]) -> Tensor:
        dtype: torch.dtype = getattr(torch, dtype_name)
        end = self._position + torch.Size(shape).numel() * dtype.itemsize
        raw, self._position = self._raw[self._position : end], end
        if not raw:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)
