"""Which layers of a model are sharded and recomputed one by one, and recomputing them."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from echelon.errors import EchelonError, Fault, nearest
from echelon.train.tables import tables_of

_LISTS = (nn.ModuleList, nn.Sequential)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


def blocks_of(model: nn.Module, names: list[str]) -> list[nn.Module]:
    """The modules of these classes; without names, the layers of the longest list in the model.

    The model itself is none of them, and neither is what has no parameters.
    """
    if names:
        return _named(model, names)
    lists = [m for m in model.modules() if isinstance(m, _LISTS)]
    layers = [[child for child in found.children() if _can_be_one(child)] for found in lists]
    return max(layers, key=len, default=[])


def _named(model: nn.Module, names: list[str]) -> list[nn.Module]:
    inside = [m for m in model.modules() if m is not model and _can_be_one(m)]
    known = {type(m).__name__ for m in inside}
    faults = [
        Fault(
            f"replica.blocks names {name!r}, but no layer with parameters is of that class",
            nearest(name, known) if known else "leave replica.blocks out",
        )
        for name in names
        if name not in known
    ]
    if faults:
        raise EchelonError(*faults)
    return [m for m in inside if type(m).__name__ in names]


def _can_be_one(module: nn.Module) -> bool:
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters and not isinstance(module, _WITHOUT_FORWARD)


def recompute(blocks: list[nn.Module]) -> None:
    """Keep only what goes into each of these; the rest is computed again in the backward pass.

    By the instance's own `forward`, so that parameters keep their names.
    """
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


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
        for name in tables_of(model)
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
    if isinstance(model, _WITHOUT_FORWARD) and type(model).forward is nn.Module.forward:
        faults.append(
            Fault(
                f"replica.kind=fsdp, but the model is a {type(model).__name__}, which has no "
                "forward that its weights could be gathered for",
                "put it into a module with a forward, and let predict call that",
            )
        )
    if faults:
        raise EchelonError(*faults)
