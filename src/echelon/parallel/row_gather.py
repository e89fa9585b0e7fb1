"""The rows of all ranks as one tensor, through which gradients flow back to each of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_rows(rows: Tensor, world_size: int) -> Tensor:
    """Return the rows of all ranks, in the order of the ranks; ranks may have unequal numbers.

    A gradient of the result is summed over all ranks and returned to the rank of each row.
    """
    if world_size == 1:
        return rows
    count = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.empty_like(count) for _ in range(world_size)]
    dist.all_gather(counts, count)
    gathered: Tensor = _GatherRows.apply(rows, [int(n) for n in counts])  # type: ignore[no-untyped-call]
    return gathered


class _GatherRows(torch.autograd.Function):
    """Sends rows padded to the longest share, as collectives need equal sizes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        shares = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(shares, padded)
        return torch.cat([share[:n] for share, n in zip(shares, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        rank = dist.get_rank()
        start = sum(ctx.counts[:rank])
        return total[start : start + ctx.counts[rank]], None
