"""Collectives that the user's own code calls in a forward pass, such as a gather of all processes'
embeddings for a contrastive loss.

The share of a process may be one sample smaller than another's, or empty. A backend ends the
process where tensors of different shapes meet in a collective, so shapes are compared before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.errors import EchelonError, ExitCode, Fault

_INPUT_POSITIONS = {
    "allgather_": 1,
    "_allgather_base_": 1,
    "allreduce_": 0,
    "reduce_": 0,
    "gather_": 1,
    "broadcast_": 0,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
}
"""Collectives whose tensors must have the same shape on all ranks, and which argument they are."""

_MAX_DIMENSIONS = 15


def count_collectives() -> int:
    """Return how many collectives this process has called on the default process group."""
    group: Any = dist.GroupMember.WORLD
    return 0 if group is None else int(group._get_sequence_number_for_group())


class ShapeMismatchError(EchelonError):
    """Ranks would exchange tensors of different shapes."""


class ShapeComparison(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, every collective compares the shapes of all ranks first, and raises a
    fault where they differ. All ranks must use it in the same step."""

    def __init__(self, total: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._total = total

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name.startswith("c10d::") and name.removeprefix("c10d::") in _INPUT_POSITIONS:
            given = args[_INPUT_POSITIONS[name.removeprefix("c10d::")]]
            group = _find_process_group(args)
            if group is not None:
                self._require_equal_shapes(given if isinstance(given, Tensor) else given[0], group)
        return func(*args, **(kwargs or {}))

    def _require_equal_shapes(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Raises where this tensor has another shape on another rank. A collective."""
        own = torch.full((_MAX_DIMENSIONS + 1,), -1, dtype=torch.int64, device=tensor.device)
        own[: tensor.dim()] = torch.tensor(tensor.shape)
        all_shapes = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(all_shapes, own, group=group)
        shapes = [tuple(n for n in row.tolist() if n >= 0) for row in all_shapes]
        if len(set(shapes)) == 1:
            return
        other = next(rank for rank, shape in enumerate(shapes) if shape != shapes[0])
        raise ShapeMismatchError(
            Fault(
                f"the experiment exchanges tensors of different shapes between its processes: "
                f"{shapes[0]} on rank 0 and {shapes[other]} on rank {other}, as a batch of "
                f"{self._total} samples cannot be shared evenly by {group.size()} processes",
                "pad them to one shape before they are exchanged, or choose a trainer.batch_size "
                "and a number of samples that the processes can share evenly",
            ),
            exit=ExitCode.FAILED,
        )


def _find_process_group(args: Sequence[Any]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments of a collective."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:  # the operation of a reduction is such an object as well
                continue
    return None
