"""Which layers of a model are sharded and recomputed one by one, and recomputing them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.parallel.sparse_tables import find_sparse_tables

_LAYER_LISTS = (nn.ModuleList, nn.Sequential)
_CONTAINERS_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, names: list[str]) -> list[nn.Module]:
    """The modules of these classes; without names, the layers of the longest list in the model.

    The model itself is none of them, and neither is what has no parameters.
    """
    if names:
        return _find_by_class(model, names)
    lists = [m for m in model.modules() if isinstance(m, _LAYER_LISTS)]
    layers = [[child for child in found.children() if _is_eligible(child)] for found in lists]
    return max(layers, key=len, default=[])


def _find_by_class(model: nn.Module, names: list[str]) -> list[nn.Module]:
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
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters and not isinstance(module, _CONTAINERS_WITHOUT_FORWARD)


def checkpoint_blocks(blocks: list[nn.Module]) -> None:
    """Keep only what goes into each of these; the rest is computed again in the backward pass.

    By the instance's own `forward`, so that parameters keep their names.
    """
    for block in blocks:
        block.forward = partial(_run_checkpointed, block, block.forward)


def _run_checkpointed(
    block: nn.Module, forward: Callable[..., Any], /, *args: Any, **named: Any
) -> Any:
    plain = partial(checkpoint, forward, use_reentrant=False)
    buffers = list(block.buffers())
    if not buffers or torch.compiler.is_compiling():  # which writes buffers once by itself
        return plain(*args, **named)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _BufferGuard(buffers)

    return plain(*args, context_fn=contexts, **named)


class _BufferGuard(AbstractContextManager[None]):
    """Buffers are afterwards what they were: averages of batches count a batch once, though its
    layer is computed twice."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers

    def __enter__(self) -> None:
        self._saved_buffers = [buffer.clone() for buffer in self._buffers]

    def __exit__(self, *_: object) -> None:
        for buffer, was in zip(self._buffers, self._saved_buffers, strict=True):
            buffer.data.copy_(was)  # unseen by autograd, which has them for the backward pass
        self._saved_buffers.clear()


def require_blocks(blocks: list[nn.Module]) -> None:
    if not blocks:
        raise EchelonError(
            Fault(
                "replica.checkpoint=true, but the model has no ModuleList or Sequential whose "
                "layers could be computed again one by one",
                "name the classes of its layers: replica.blocks=[Block]",
            )
        )


def require_shardable(model: nn.Module) -> None:
    faults = [
        Fault(
            f"replica.kind=fsdp, but {name!r} is a table with sparse gradients",
            "build it with sparse=False, or leave replica.kind=fsdp out: tables go by rows then",
        )
        for name in find_sparse_tables(model)
    ]
    faults += [
        Fault(
            f"replica.kind=fsdp, but the parameter {name!r} is a single number without a shape, "
            "which has no rows to share out",
            "give it the shape (1,): torch.zeros(1) instead of torch.tensor(0.0)",
        )
        for name, p in model.named_parameters()
        if p.dim() == 0
    ]
    if isinstance(model, _CONTAINERS_WITHOUT_FORWARD) and type(model).forward is nn.Module.forward:
        faults.append(
            Fault(
                f"replica.kind=fsdp, but the model is a {type(model).__name__}, which has no "
                "forward that its weights could be gathered for",
                "put it into a module with a forward, and let predict call that",
            )
        )
    if faults:
        raise EchelonError(*faults)
