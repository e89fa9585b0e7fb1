"""Whether the state of a training is finite: a snapshot with a NaN in it could never be resumed.

The check costs one pass over the state where it lies and one read from the device, and only when a
snapshot is collected or restored; copying the state to the host takes many times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from echelon.experiment.definition import Experiment
from echelon.snapshot.reader import Snapshot

_FAST_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Types of which torch computes the norms of many tensors in one call."""
_MAX_NAMES = 3
"""Names in a message."""


class FiniteCheck:
    """Finds what is not finite in the state of one experiment.

    Parameters and the tensors of the optimizer must be finite. A buffer must not hold a NaN, but it
    may hold infinities, as masks do, unless it is a running average. What was not finite when the
    experiment was built is meant to be so and is never reported.
    """

    def __init__(self, experiment: Experiment) -> None:
        model = experiment.model
        self._buffers = {name for name, _ in model.named_buffers()}
        names = {id(p): name for name, p in model.named_parameters()}
        groups = experiment.optimizer.param_groups
        self._stepped = [names.get(id(p), "?") for group in groups for p in group["params"]]
        """The names of the parameters in the order of the optimizer's state."""
        self._intended: frozenset[str] = frozenset()
        self._intended = frozenset(self.find_nonfinite({"model": model.state_dict()}))

    def find_nonfinite(self, parts: Mapping[str, Any]) -> list[str]:
        """Return the names of the tensors that are not finite among the parts of a snapshot, or of
        this rank's shards of them."""
        named = [pair for part, tree in parts.items() for pair in self._iter_tensors(part, tree)]
        tensors = [(n, t) for n, tensor in named if (t := _as_real_values(tensor)) is not None]
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
        for name, tensor in tensors:
            groups.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
        return [
            name
            for (_, dtype), group in groups.items()
            if not _have_finite_norms([tensor for _, tensor in group], dtype)
            for name, tensor in group
            if name not in self._intended and not self._is_sound(name, tensor)
        ]

    def find_nonfinite_in_snapshot(self, snapshot: Snapshot) -> list[str]:
        """Return the same for a snapshot on disk, file by file."""
        names = (
            name
            for part in ("model", "optimizer")
            for file, tree in snapshot.iter_files(part)
            for name in self.find_nonfinite({file: tree})
        )
        return list(dict.fromkeys(names))

    def _iter_tensors(self, part: str, tree: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of a part, or of a rank's shard of it, with names for a person."""
        kind = part.partition(".")[0]
        if kind == "model":
            for name, leaf in tree.items():
                yield from ((name, tensor) for tensor in _find_tensors(leaf))
        elif kind == "optimizer":
            for index, state in tree["optimizer"]["state"].items():
                owner = self._stepped[index] if index in range(len(self._stepped)) else index
                for key, leaf in state.items() if isinstance(state, Mapping) else ():
                    # A single number may be the best loss so far, which begins with infinity.
                    yield from (
                        (f"the optimizer's {key} of {owner}", tensor)
                        for tensor in _find_tensors(leaf)
                        if tensor.ndim
                    )

    def _is_sound(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor holds nothing that it must not hold."""
        is_running_average = name.rpartition(".")[2].startswith("running_")
        if name in self._buffers and not is_running_average:
            return not bool(tensor.isnan().any())
        return bool(tensor.isfinite().all())


def format_tensor_names(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more}"


def are_all_finite(tensors: list[Tensor]) -> bool:
    """Return whether every number in these tensors is finite."""
    values = [v for tensor in tensors if (v := _as_real_values(tensor)) is not None]
    return all(bool(tensor.isfinite().all()) for tensor in values)


def _have_finite_norms(tensors: list[Tensor], dtype: torch.dtype) -> bool:
    """Return whether all norms are finite, and so every number is. A norm may also overflow over
    finite numbers; then the caller looks at each tensor."""
    if dtype not in _FAST_DTYPES:
        return False
    return bool(torch.stack(torch._foreach_norm(tensors)).isfinite().all())


def _find_tensors(leaf: Any) -> Iterator[Tensor]:
    """Yields a tensor, or the tensors in a mapping, as a shard is with its position."""
    if isinstance(leaf, Tensor):
        yield leaf
    elif isinstance(leaf, Mapping):
        for value in leaf.values():
            yield from _find_tensors(value)


def _as_real_values(tensor: Tensor) -> Tensor | None:
    """Return the numbers of a tensor that can be other than finite; None where there are none."""
    values = tensor.detach()
    if values.layout != torch.strided:
        values = values._values() if values.is_sparse else values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    is_countable = values.is_floating_point() and values.numel() and not values.is_meta
    if not is_countable:
        return None
    return values.float() if values.dtype.itemsize == 1 else values
