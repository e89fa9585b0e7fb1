"""One step of RowAdam on a GPU: three kernels whose work grows with the batch, and no wait for the
host.

The gradients of a row that a batch looks up several times must be added first. Sorting the batch to
find them takes longer than everything else. Instead, every occurrence writes its own number into
the row's slot; one of them stays, and all add to that one's sum. A row that was looked up once
needs no sum. Sums are taken in double precision, so that the order in which the GPU happens to add
does not show in the weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

_BLOCK = 512
"""Elements that one program handles: rows times their width."""

_ROWS_PER_CLAIM = 128
"""Rows that one program claims. Few, so that many programs wait for memory at the same time."""


class RowScratch:
    """Buffers that the kernels need beside the table, kept from step to step."""

    def __init__(self, table: Tensor) -> None:
        self.owners = torch.empty(len(table), dtype=torch.int32, device=table.device)
        self.lookups = torch.zeros_like(self.owners)
        self.sums = torch.empty(0, dtype=torch.float64, device=table.device)

    def get_sums(self, values: Tensor) -> Tensor:
        """Return a buffer of zeros for sums. Whoever uses an element sets it back to zero."""
        if self.sums.numel() < values.numel():
            self.sums = torch.zeros(values.numel(), dtype=torch.float64, device=values.device)
        return self.sums


def step_adam_rows(
    tables: tuple[Tensor, Tensor, Tensor],
    counts: Tensor,
    numbers: Tensor,
    values: Tensor,
    scratch: RowScratch,
    rates: tuple[Tensor, Tensor],
    decay: float,
    eps: float,
) -> None:
    """Updates the rows `numbers` of (weights, mean, square), each of them once.

    `rates` are the learning rate and (log beta1, log beta2, beta1 - 1, beta2 - 1), on the device,
    where a CUDA graph reads them anew in every replay.
    """
    if not len(numbers):
        return
    weights, mean, square = tables
    width = values.numel() // len(values)
    wide = triton.next_power_of_2(width)
    rows = max(1, _BLOCK // wide)
    grid = (triton.cdiv(len(numbers), rows),)
    values = values.reshape(len(values), width)
    stride = values.stride(0)
    if width > 1 and values.stride(1) != 1:
        values, stride = values.contiguous(), width
    sums = scratch.get_sums(values)
    shape = {"WIDTH": width, "WIDE": wide, "ROWS": rows}
    _claim_rows_kernel[(triton.cdiv(len(numbers), _ROWS_PER_CLAIM),)](
        numbers, scratch.owners, scratch.lookups, len(numbers), BLOCK=_ROWS_PER_CLAIM
    )
    claims = (numbers, scratch.owners, scratch.lookups)
    _sum_rows_kernel[grid](*claims, values, stride, sums, len(numbers), **shape)
    _step_rows_kernel[grid](
        *claims,
        values,
        stride,
        sums,
        weights,
        mean,
        square,
        counts,
        *rates,
        len(numbers),
        eps,
        decay,
        **shape,
    )


@triton.jit(do_not_specialize=["count"])
def _claim_rows_kernel(numbers, owners, lookups, count, BLOCK: tl.constexpr):
    """Lets every occurrence claim its row, and counts the lookups of each row."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    present = at < count
    row = tl.load(numbers + at, mask=present, other=0)
    tl.store(owners + row, at, mask=present)
    tl.atomic_add(lookups + row, 1, mask=present, sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def _sum_rows_kernel(
    numbers,
    owners,
    lookups,
    values,
    stride,
    sums,
    count,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds the gradients of rows that were looked up several times, at the owner's position."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = at < count
    row = tl.load(numbers + at, mask=present, other=0)
    several = present & (tl.load(lookups + row, mask=present, other=0) > 1)
    owner = tl.load(owners + row, mask=several, other=0).to(tl.int64)
    lane = tl.arange(0, WIDE)
    mask = several[:, None] & (lane < WIDTH)[None, :]
    from_batch = values + at.to(tl.int64)[:, None] * stride + lane[None, :]
    value = tl.load(from_batch, mask=mask, other=0.0)
    place = sums + owner[:, None] * WIDTH + lane[None, :]
    tl.atomic_add(place, value.to(tl.float64), mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def _step_rows_kernel(
    numbers,
    owners,
    lookups,
    values,
    stride,
    sums,
    weights,
    mean,
    square,
    counts,
    rate,
    betas,
    count,
    eps,
    decay,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Updates every row once, by its owner, and resets the scratch buffers for the next step."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = at < count
    row = tl.load(numbers + at, mask=present, other=0)
    mine = present & (tl.load(owners + row, mask=present, other=-1) == at)
    once = mine & (tl.load(lookups + row, mask=mine, other=1) == 1)
    lane = tl.arange(0, WIDE)
    mask = mine[:, None] & (lane < WIDTH)[None, :]
    alone, summed = mask & once[:, None], mask & (once == 0)[:, None]
    from_batch = values + at.to(tl.int64)[:, None] * stride + lane[None, :]
    place = sums + at.to(tl.int64)[:, None] * WIDTH + lane[None, :]
    grad = tl.load(from_batch, mask=alone, other=0.0).to(tl.float32)
    grad += tl.load(place, mask=summed, other=0.0).to(tl.float32)

    step = tl.load(counts + row, mask=mine, other=0.0) + 1.0
    weight1 = tl.load(betas + 2) / libdevice.expm1(step * tl.load(betas))
    weight2 = tl.load(betas + 3) / libdevice.expm1(step * tl.load(betas + 1))

    here = row[:, None] * WIDTH + lane[None, :]
    m = tl.load(mean + here, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(square + here, mask=mask, other=0.0).to(tl.float32)
    p = tl.load(weights + here, mask=mask, other=0.0).to(tl.float32)
    m += weight1[:, None] * (grad - m)
    s += weight2[:, None] * (grad * grad - s)
    lr = tl.load(rate).to(tl.float32)
    p -= lr * (decay * p + m / (tl.sqrt(s) + eps))
    # Several threads may load the same element: none is overwritten before all have loaded it.
    tl.debug_barrier()
    tl.store(place, tl.zeros([ROWS, WIDE], tl.float64), mask=summed)
    tl.store(lookups + row, tl.zeros([ROWS], tl.int32), mask=mine)
    tl.store(counts + row, step, mask=mine)
    tl.store(mean + here, m, mask=mask)
    tl.store(square + here, s, mask=mask)
    tl.store(weights + here, p, mask=mask)
