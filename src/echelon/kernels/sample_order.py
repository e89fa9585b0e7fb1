"""The order of samples, computed on the GPU by one kernel, without waiting for the host.

torch's operators must ask the device before every walk how many values are still outside. Here each
value walks on its own until it is inside. The arithmetic is that of
`data.sample_order._KeyedPermutation`.

Values are words of 32 bits for up to 2**31 samples. The size itself, 2**31, does not fit such a
word and would become negative, so the kernel is given the last sample and never the size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def map_positions_on_gpu(
    positions: Tensor, keys: Tensor, size: int, domain: int, fold: int, max_walks: int
) -> Tensor:
    """Return the samples at these positions; `keys` are the factor and the term of every round.

    A value that is not inside after `max_walks` walks stays outside.
    """
    samples = torch.empty(positions.shape, dtype=torch.int64, device=positions.device)
    count = positions.numel()
    _map_positions_kernel[(triton.cdiv(count, _BLOCK),)](
        positions,
        samples,
        keys,
        count,
        size - 1,
        domain - 1,
        (domain - 1) >> fold,
        FOLD=fold,
        ROUNDS=len(keys) // 2,
        MAX_WALKS=max_walks,
        BLOCK=_BLOCK,
    )
    return samples


@triton.jit(do_not_specialize=["count", "last", "inside", "folded"])
def _map_positions_kernel(
    positions,
    samples,
    keys,
    count,
    last,
    inside,
    folded,
    FOLD: tl.constexpr,
    ROUNDS: tl.constexpr,
    MAX_WALKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Maps one block of positions."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    present = at < count
    word = keys.dtype.element_ty
    values = tl.load(positions + at, mask=present, other=0).to(word)
    outside = at >= 0  # all of them, before the first walk
    walks = 0
    while (tl.max(outside.to(tl.int32), axis=0) > 0) & (walks < MAX_WALKS):
        mixed = values
        for number in tl.static_range(ROUNDS):
            mixed = mixed * tl.load(keys + 2 * number) + tl.load(keys + 2 * number + 1)
            mixed ^= (mixed >> FOLD) & folded.to(word)
        values = tl.where(outside, mixed & inside.to(word), values)
        outside = present & (values > last.to(word))
        walks += 1
    tl.store(samples + at, values.to(tl.int64), mask=present)
