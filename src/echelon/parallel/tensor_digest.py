"""Tensors as numbers of 64 bits, by which ranks compare what they have computed to the bit."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
import xxhash
from torch import Tensor

_WORD_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By the bytes of an element."""
_COLUMNS = 1024
_ODD_FACTOR = 0x1E37_79B9_7F4A_7C15


def digest_tensors(tensors: Iterable[Tensor | None]) -> int:
    """Return a number of 63 bits that stands for all bits of some tensors; None is one of them.

    Sums of integers are exact in any order, so equal bits give equal numbers on every device. They
    are computed where the tensors are, and read in one transfer.
    """
    sums = [part for tensor in tensors for part in _sum_bits(tensor)]
    if not sums:
        return 0
    row = torch.stack([part.to(sums[0].device) for part in sums]).cpu()
    return int(xxhash.xxh3_64_intdigest(row.numpy().tobytes()) >> 1)


@torch.no_grad()
def _sum_bits(tensor: Tensor | None) -> list[Tensor]:
    """Return a sum of a tensor's bits; of a sparse one, those of its indices and values.

    Words are added up in columns, and each column has an odd factor of its own. So one bit that
    differs is always seen, and words that have changed places nearly always are.
    """
    if tensor is None:
        return [torch.zeros((), dtype=torch.int64)]
    if tensor.layout is not torch.strided:
        return [*_sum_bits(tensor._indices()), *_sum_bits(tensor._values())]
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    words = plain.view(_WORD_DTYPES[plain.element_size()])
    whole = words.numel() // _COLUMNS * _COLUMNS
    sums = words[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    sums[: words.numel() - whole] += words[whole:]
    return [(sums * _make_factors(sums.device)).sum()]


@cache
def _make_factors(device: torch.device) -> Tensor:
    """Return an odd number for each column. Products wrap around, which is as good here."""
    return (torch.arange(_COLUMNS) * 2 + 1).mul_(_ODD_FACTOR).to(device)
