"""Finds the parameters of a model that have sparse gradients."""

from __future__ import annotations

from torch import nn


def find_sparse_tables(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters with sparse gradients, by every name that they have in the
    model."""
    sparse = [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    ]
    table_ids = {id(p) for p in sparse if p.requires_grad}
    named = model.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if id(p) in table_ids}
