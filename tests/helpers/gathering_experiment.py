"""A loss that gathers the outputs of all processes, as a contrastive one does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import echelon


@dataclass
class GatherSettings:
    samples: int = 7
    eval_samples: int = 0
    has_table: bool = False
    """Whether the model has a table with sparse gradients."""


class Scorer(nn.Module):
    """Its buffer counts the batches that it was trained with."""

    batches: Tensor

    def __init__(self, cfg: GatherSettings) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=cfg.has_table)
        self.head = nn.Linear(4, 1)
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, row: Tensor) -> Tensor:
        if self.training:
            self.batches += 1
        return self.head(self.table(row)).squeeze(-1)  # type: ignore[no-any-return]


def gathering(cfg: GatherSettings) -> echelon.Experiment:
    model = Scorer(cfg)
    rows = torch.arange(cfg.samples) % 5
    optimizer = echelon.optim.RowAdam(model.parameters(), lr=0.1)
    seen = rows[: cfg.eval_samples]
    return echelon.Experiment(
        model,
        optimizer,
        gathered_loss,
        (rows, rows.float()),
        eval_data=(seen, seen.float()) if cfg.eval_samples else None,
    )


def gathered_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error: what is gathered takes part without weight, so that one process
    gives the same numbers."""
    own = nn.functional.mse_loss(output, target)
    if not dist.is_initialized():
        return own
    others = [torch.empty_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(others, output.detach())
    return own + 0.0 * torch.cat(others).mean()
