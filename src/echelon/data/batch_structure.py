"""Batches of any type: moving them to a device, and cutting them into microbatches.

A batch is what a collate_fn makes: tensors, dicts, tuples, NamedTuples, dataclasses, Hugging Face's
BatchEncoding, a graph of PyG. An object with a method `to(device)` moves itself. What can be cut is
what holds tensors with the batch dimension first; all else is refused with a sentence, because
half of a batch with the wrong samples would train in silence.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from echelon.errors import EchelonError, ExitCode, Fault

_PLAIN_TYPES = (str, bytes, int, float, complex, type(None))
_ROW_TYPES = (Tensor, np.ndarray)
_CUT_REMEDY = (
    "set trainer.accumulate=1 and a smaller trainer.batch_size, or give tensors with one row per "
    "sample, in a tuple, a dict or a dataclass"
)


# --- moving ---


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return the batch with all its tensors on a device, in containers of the same types.

    On the CPU it is the same object.
    """
    return batch if device.type == "cpu" else _move(batch, device, "a batch")


def _move(node: Any, device: torch.device, title: str) -> Any:
    if isinstance(node, Tensor):
        return node.to(device, non_blocking=True)
    if callable(getattr(node, "to", None)) and not isinstance(node, type):
        moved = node.to(device)
        return node if moved is None else moved  # it may have moved itself, as a module does
    if is_container(node):
        return rebuild(
            node, {key: _move(value, device, f"{title}: {key}") for key, value in iter_items(node)}
        )
    hidden = [k for k, v in getattr(node, "__dict__", {}).items() if isinstance(v, Tensor)]
    if hidden:
        raise EchelonError(
            Fault(
                f"{title} is a {type(node).__name__} with a tensor in {hidden[0]!r}, which cannot "
                f"be moved to {device}",
                "give it a method to(device) that returns it there, or make it a dataclass",
            ),
            exit=ExitCode.FAILED,
        )
    return node


def list_tensors(batch: Any) -> list[Tensor] | None:
    """Return all tensors of a batch; None where some are in an object that is no container, such as
    one that moves itself."""
    if isinstance(batch, Tensor):
        return [batch] if type(batch) is Tensor else None
    if isinstance(batch, (*_PLAIN_TYPES, np.ndarray)):
        return []
    if not is_container(batch) or callable(getattr(batch, "to", None)):
        return None
    found: list[Tensor] = []
    for _, value in iter_items(batch):
        tensors = list_tensors(value)
        if tensors is None:
            return None
        found += tensors
    return found


# --- cutting ---


def cut_batch(
    batch: Any, sample_count: int, start: int, stop: int, is_default_collated: bool
) -> Any:
    """Return the samples `[start, stop)` of a batch of `sample_count`, in containers of the same
    types. What is no tensor, list or container belongs to every piece.

    A list holds columns, or one item per sample. Where both would fit, lists of torch's
    default_collate and the batch itself hold columns; another list is refused.
    """
    cutter = _Cutter(sample_count, start, stop, is_default_collated)
    return cutter.cut(batch, "a batch", is_root=True)


@dataclasses.dataclass(frozen=True)
class _Cutter:
    """Cuts one piece out of a batch."""

    sample_count: int
    start: int
    stop: int
    is_default_collated: bool

    def cut(self, node: Any, title: str, is_root: bool = False) -> Any:
        """Return this piece of a part of the batch, which an error calls `title`."""
        if isinstance(node, _PLAIN_TYPES):
            return node
        if isinstance(node, _ROW_TYPES):
            if not self._has_rows(node):
                raise self._make_error(f"{title} is of shape {tuple(node.shape)}")
            return node[self.start : self.stop]
        if isinstance(node, PackedSequence) or not is_container(node):
            raise self._make_error(f"{title} is a {type(node).__name__}")
        if type(node) in (list, tuple) and self._is_per_sample(node, title, is_root):
            return node[self.start : self.stop]
        return rebuild(
            node, {key: self.cut(value, f"{title}: {key}") for key, value in iter_items(node)}
        )

    def _is_per_sample(self, node: Any, title: str, is_root: bool) -> bool:
        """Return whether a list has one item per sample, not one per column."""
        if not node:
            return False
        are_columns = self._are_columns(node)
        if len(node) != self.sample_count:
            if not are_columns and all(isinstance(item, _PLAIN_TYPES) for item in node):
                raise self._make_error(f"{title} is a {type(node).__name__} of {len(node)} values")
            return False
        if are_columns and not is_root and not self.is_default_collated:
            raise self._make_error(
                f"{title} is a {type(node).__name__} of {len(node)}, which may be columns or "
                "samples"
            )
        return not are_columns

    def _are_columns(self, items: Any) -> bool:
        """Return whether the items of a list can be columns."""
        are_plain = all(isinstance(item, _PLAIN_TYPES) for item in items)
        return not are_plain and all(map(self._can_cut, items))

    def _can_cut(self, node: Any) -> bool:
        """Return whether something has one row per sample, or belongs to every piece."""
        if isinstance(node, _ROW_TYPES):
            return self._has_rows(node)
        if not is_container(node):
            return isinstance(node, _PLAIN_TYPES)
        if type(node) in (list, tuple):
            return len(node) == self.sample_count or self._are_columns(node)
        return all(self._can_cut(value) for _, value in iter_items(node))

    def _has_rows(self, node: Any) -> bool:
        return bool(node.ndim) and len(node) == self.sample_count

    def _make_error(self, what: str) -> EchelonError:
        return EchelonError(
            Fault(
                f"{what}, which cannot be cut into pieces of its {self.sample_count} samples for "
                "trainer.accumulate",
                _CUT_REMEDY,
            ),
            exit=ExitCode.FAILED,
        )


# --- containers ---


def is_container(node: Any) -> bool:
    """Return whether a node is a tuple, list, mapping or dataclass object."""
    is_dataclass = dataclasses.is_dataclass(node) and not isinstance(node, type)
    return isinstance(node, list | tuple | Mapping) or is_dataclass


def iter_items(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yields what a container holds, with its keys, field names or positions."""
    if isinstance(node, Mapping):
        yield from ((key, node[key]) for key in node)
    elif isinstance(node, list | tuple):
        yield from enumerate(node)
    else:
        yield from ((f.name, getattr(node, f.name)) for f in dataclasses.fields(node))


def rebuild(node: Any, values: Mapping[Any, Any]) -> Any:
    """Return a container of the same type with other values under the same keys."""
    if isinstance(node, list | tuple):
        is_named = hasattr(node, "_fields")
        return type(node)(*values.values()) if is_named else type(node)(values.values())
    if isinstance(node, Mapping) and (type(node) is dict or not isinstance(node, MutableMapping)):
        return dict(values)
    # What else a class keeps is copied with it. Fields may be frozen, and need not be arguments of
    # its __init__.
    rebuilt = copy.copy(node)
    for key, value in values.items():
        if isinstance(node, Mapping):
            rebuilt[key] = value
        else:
            object.__setattr__(rebuilt, key, value)
    return rebuilt
