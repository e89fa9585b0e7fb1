"""The rows of all ranks as one tensor, through which gradients flow back to each of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.errors import EchelonError, ExitCode, Fault

_KIND_BYTES = 120
"""Of the text that names the shape and the dtype of rows."""


def gather_rows(rows: Tensor, world_size: int) -> Tensor:
    """Return the rows of all ranks, in the order of the ranks; ranks may have unequal numbers.

    A gradient of the result is summed over all ranks and returned to the rank of each row.
    """
    if world_size == 1:
        return rows
    kind = f"{tuple(rows.shape[1:])} of {rows.dtype}"
    header = torch.tensor([len(rows), zlib.crc32(kind.encode())], device=rows.device)
    headers = [torch.empty_like(header) for _ in range(world_size)]
    dist.all_gather(headers, header)
    counts, checksums = zip(*(h.tolist() for h in headers), strict=True)
    if len(set(checksums)) > 1:
        raise _make_kind_error(kind, rows.device, world_size)
    gathered: Tensor = _GatherRows.apply(rows, counts)  # type: ignore[no-untyped-call]
    return gathered


def _make_kind_error(kind: str, device: torch.device, world_size: int) -> EchelonError:
    """Return the error of ranks whose rows differ. All of them know it, so they can say how."""
    text = torch.tensor(list(kind.encode()[:_KIND_BYTES].ljust(_KIND_BYTES)), device=device)
    texts = [torch.empty_like(text) for _ in range(world_size)]
    dist.all_gather(texts, text)
    kinds = [bytes(t.tolist()).decode().strip() for t in texts]
    rank = next(r for r, other in enumerate(kinds) if other != kinds[0])
    return EchelonError(
        Fault(
            f"rows of different kinds are gathered: {kinds[0]} on rank 0, {kinds[rank]} on rank "
            f"{rank}",
            "give rows of one shape and dtype on every rank; only their number may differ",
        ),
        exit=ExitCode.FAILED,
    )


class _GatherRows(torch.autograd.Function):
    """Sends rows padded to the longest share, as collectives need equal sizes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Sequence[int]) -> Tensor:
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
