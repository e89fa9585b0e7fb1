"""State of which every rank holds some rows: the shard of one rank, and shards joined again.

The file of a rank holds the whole tree of a part, with the rank's rows in the place of a sharded
tensor. What is not sharded is in the file of rank 0 alone. Of several replicas the first is saved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_ROWS_KEY = "echelon.rows"
_SHARD_NAME = re.compile(r"(.+)\.([0-9]{5,})-of-([0-9]{5,})")


def format_shard_name(part: str, rank: int, size: int) -> str:
    """Return the name of one rank's shard of a part: ``model.00003-of-00008``."""
    return f"{part}.{rank:05d}-of-{size:05d}"


def group_shard_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the parts that these names make, each with its shards by rank. Raises ValueError if
    one is missing."""
    parts: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for name in sorted(names):
        match = _SHARD_NAME.fullmatch(name)
        part, size = (match[1], int(match[3])) if match else (name, 1)
        parts.setdefault(part, []).append(name)
        sizes[part] = size
    for part, found in parts.items():
        size = sizes[part]
        expected = [format_shard_name(part, rank, size) for rank in range(size)]
        if found not in ([part], expected):
            raise ValueError(f"{part}: {len(found)} of {size} pieces")
    return parts


def extract_own_shard(tree: Any, shard: int) -> Any:
    """Return the tree with this rank's rows in the place of sharded tensors; what is not sharded is
    in shard 0 alone. A collective: a tensor that is not cut by rows is gathered."""
    from torch.distributed.tensor import DTensor

    def piece(leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            rows = get_rows_with_start(leaf)
            if rows is not None:
                return {_ROWS_KEY: rows[0], "from": rows[1], "shape": list(leaf.shape)}
            leaf = leaf.full_tensor()
        return leaf if shard == 0 else None

    return _map_leaves(tree, piece)


def get_rows_with_start(tensor: Any) -> tuple[Tensor, int] | None:
    """Return this rank's rows of a sharded tensor and the index of the first; None if it is not
    cut by rows. Other dimensions of its mesh are replicas."""
    from torch.distributed.tensor import Shard

    if tensor.placements[-1] != Shard(0):
        return None
    mesh = tensor.device_mesh
    shards = mesh.ndim - 1
    start, _ = get_row_range(tensor.shape[0], mesh.get_local_rank(shards), mesh.size(shards))
    return tensor.to_local().detach(), start


def get_row_range(rows: int, rank: int, size: int) -> tuple[int, int]:
    """As torch cuts: pieces of equal length, the last ones shorter or empty."""
    rows_per_rank = -(-rows // size)
    return min(rows, rank * rows_per_rank), min(rows, (rank + 1) * rows_per_rank)


def gather_full_tensors(tree: Any, keep: bool) -> Any:
    """Return the tree with full tensors in host memory where ``keep`` is set. A collective."""
    from torch.distributed.tensor import DTensor

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            full = leaf.full_tensor()
            return full.detach().cpu() if keep else None
        return leaf if keep else None

    return _map_leaves(tree, whole)


def join_shards(trees: Sequence[Any]) -> Any:
    """Return the tree that was cut into these, which are in the order of ranks."""
    first = trees[0]
    if all(tree is None for tree in trees[1:]):  # what rank 0 alone has written
        return first
    if isinstance(first, Mapping):
        if _ROWS_KEY in first:
            return _join_rows(trees)
        return {key: join_shards([tree[key] for tree in trees]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(join_shards(column) for column in zip(*trees, strict=True))
    return first


def _join_rows(shards: Sequence[Mapping[str, Any]]) -> Tensor:
    whole = torch.empty(shards[0]["shape"], dtype=shards[0][_ROWS_KEY].dtype)
    for piece in shards:
        rows = piece[_ROWS_KEY]
        whole[piece["from"] : piece["from"] + len(rows)] = rows
    return whole


def _map_leaves(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _map_leaves(value, leaf) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map_leaves(value, leaf) for value in tree)
    return leaf(tree)
