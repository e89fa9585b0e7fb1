"""A tree of tensors and plain values as one row of bytes, to be sent without a pickle.

The row is the length of a header, the header as JSON, and the bytes of the tensors one after the
other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_LENGTH_BYTES = 8
_PLAIN_TYPES = (bool, int, float, str, type(None))


class UnpackableValueError(Exception):
    """A tree holds something else; the message says what, and where."""


def pack_tree(tree: Any) -> Tensor:
    """Return a tree of dicts, lists, tuples, tensors, numbers, texts and None as a row of bytes.

    Raises UnpackableValueError where there is anything else in it.
    """
    tensors: list[Tensor] = []

    def add_tensor(tensor: Tensor) -> list[Any]:
        dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        tensors.append(dense.resolve_conj().resolve_neg().contiguous())
        return [format_dtype(tensor.dtype), list(tensor.shape)]

    header = json.dumps(describe_tree(tree, add_tensor)).encode()
    head = bytearray(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
    rows = [t.cpu().reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
    return torch.cat([torch.frombuffer(head, dtype=torch.uint8), *rows])


def unpack_tree(row: Tensor) -> Any:
    """Return the tree that `pack_tree` packed; its tensors are on the CPU."""
    raw = bytearray(row.numpy().tobytes())
    start = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
    position = start

    def read_tensor(dtype_name: str, shape: list[int]) -> Tensor:
        nonlocal position
        dtype = parse_dtype(dtype_name)
        end = position + torch.Size(shape).numel() * dtype.itemsize
        own, position = raw[position:end], end
        if not own:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(own, dtype=torch.uint8).view(dtype).reshape(shape)

    return build_tree(json.loads(raw[_LENGTH_BYTES:start]), read_tensor)


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


def describe_tree(tree: Any, describe_tensor: Callable[[Tensor], list[Any]]) -> Any:
    """Return JSON for a tree, with what `describe_tensor` returns in the place of each tensor.

    Types are compared exactly: a subclass would come back as its base. Raises UnpackableValueError.
    """
    if isinstance(tree, Tensor):
        return {"tensor": describe_tensor(tree)}
    if type(tree) in _PLAIN_TYPES:
        return tree
    if type(tree) is dict:
        pairs = [[describe_tree(part, describe_tensor) for part in pair] for pair in tree.items()]
        return {"dict": pairs}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [describe_tree(part, describe_tensor) for part in tree]}
    raise UnpackableValueError(f"a {type(tree).__module__}.{type(tree).__qualname__}")


def build_tree(node: Any, build_tensor: Callable[..., Tensor]) -> Any:
    """Return the tree that `describe_tree` described. `build_tensor` is called with what stands in
    the place of each tensor, in the same order."""
    if not isinstance(node, dict):
        return node
    [(kind, value)] = node.items()
    if kind == "tensor":
        return build_tensor(*value)
    if kind == "dict":
        return {build_tree(k, build_tensor): build_tree(v, build_tensor) for k, v in value}
    parts = [build_tree(part, build_tensor) for part in value]
    return parts if kind == "list" else tuple(parts)


def format_dtype(dtype: torch.dtype) -> str:
    """Return the name of a type of numbers: ``float32``."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """Return the type of numbers with this name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype
