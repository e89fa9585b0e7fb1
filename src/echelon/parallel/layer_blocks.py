"""Selects the layers that are sharded or checkpointed one by one, and checkpoints their
activations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.experiment.sparse_parameters import find_sparse_tables

SHARDING = "replica.kind=fsdp or replica.shards"
"""The settings that shard a model."""
_LAYER_LISTS = (nn.ModuleList, nn.Sequential)
_CONTAINERS_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, names: list[str]) -> list[nn.Module]:
    """Return the modules of the named classes; without names, the layers of the longest list in
    the model.

    The model itself is never a block, and neither is a module without parameters.
    """
    if names:
        return _find_by_class(model, names)
    lists = [m for m in model.modules() if isinstance(m, _LAYER_LISTS)]
    layers = [[child for child in found.children() if _is_eligible(child)] for found in lists]
    return max(layers, key=len, default=[])


def _find_by_class(model: nn.Module, names: list[str]) -> list[nn.Module]:
    """Return the modules whose class has one of these names; raise for names that match
    nothing."""
    candidates = [m for m in model.modules() if m is not model and _is_eligible(m)]
    known = {type(m).__name__ for m in candidates}
    faults = [
        Fault(
            f"replica.blocks names {name!r}, but no layer with parameters is of that class",
            suggest_nearest(name, known) if known else "leave replica.blocks out",
        )
        for name in names
        if name not in known
    ]
    if faults:
        raise EchelonError(*faults)
    return [m for m in candidates if type(m).__name__ in names]


def _is_eligible(module: nn.Module) -> bool:
    """Return whether a module can be a block: it has parameters and a `forward`."""
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters and not isinstance(module, _CONTAINERS_WITHOUT_FORWARD)


def checkpoint_blocks(blocks: list[nn.Module]) -> None:
    """Makes each block keep only its inputs and recompute the rest in the backward pass.

    It replaces `forward` of the instance instead of wrapping the module, so that parameters keep
    their names and snapshots fit with and without checkpointing.
    """
    for block in blocks:
        if getattr(block.forward, "func", None) is not _run_checkpointed:  # in an earlier round
            block.forward = partial(_run_checkpointed, block, block.forward)


def _run_checkpointed(
    block: nn.Module, forward: Callable[..., Any], /, *args: Any, **named: Any
) -> Any:
    """Runs a block's forward under activation checkpointing."""
    plain = partial(checkpoint, forward, use_reentrant=False)
    buffers = list(block.buffers())
    if not buffers or torch.compiler.is_compiling():  # a compiled graph writes buffers only once
        return plain(*args, **named)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _BufferGuard(buffers)

    return plain(*args, context_fn=contexts, **named)


class _BufferGuard(AbstractContextManager[None]):
    """Restores buffers at exit, so that running averages count a batch once although its layer runs
    twice."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers

    def __enter__(self) -> None:
        self._saved_buffers = [buffer.clone() for buffer in self._buffers]

    def __exit__(self, *_: object) -> None:
        for buffer, was in zip(self._buffers, self._saved_buffers, strict=True):
            buffer.data.copy_(was)  # through .data: autograd has saved them for the backward pass
        self._saved_buffers.clear()


def require_checkpoint_blocks(blocks: list[nn.Module]) -> None:
    """Raises where `replica.checkpoint=true` finds no blocks."""
    if not blocks:
        raise EchelonError(
            Fault(
                "replica.checkpoint=true, but the model has no ModuleList or Sequential whose "
                "layers could be recomputed one by one",
                "name the classes of its layers: replica.blocks=[Block]",
            )
        )


def require_shardable(model: nn.Module) -> None:
    """Raises a fault for every part of the model that FSDP cannot shard."""
    faults = [
        Fault(
            f"the model is to be sharded, but {name!r} is a table with sparse gradients",
            f"build it with sparse=False, or leave {SHARDING} out: tables are then exchanged by "
            "rows",
        )
        for name in find_sparse_tables(model)
    ]
    faults += [
        Fault(
            f"the model is to be sharded, but the parameter {name!r} is a single number without a "
            "shape, which has no rows to shard",
            "give it the shape (1,): torch.zeros(1) instead of torch.tensor(0.0)",
        )
        for name, p in model.named_parameters()
        if p.dim() == 0
    ]
    if isinstance(model, _CONTAINERS_WITHOUT_FORWARD) and type(model).forward is nn.Module.forward:
        faults.append(
            Fault(
                f"the model is to be sharded, but it is a {type(model).__name__}, which has no "
                "forward to gather its weights for",
                "put it into a module with a forward, and let predict call that",
            )
        )
    if faults:
        raise EchelonError(*faults)
