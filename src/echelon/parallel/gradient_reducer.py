"""Sums gradients over all ranks for a loop of the user's own, where DDP cannot wrap the model.

A loop of one's own calls backward and the optimizers in any order: twice before a step, for two
models in turn, for one half of the parameters. So the model stays as it is, and the gradients of an
optimizer are summed when it is about to step. Nothing leaves while the backward pass still runs:
the loop may change gradients until it steps, and ranks could not agree on what to send again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET_BYTES = 25 << 20


class GradientReducer:
    """Sums the gradients of some parameters over all ranks, in buckets of neighbours.

    A few numbers of each rank, the `control` values, are summed with them, at no cost. All ranks
    call `reduce` equally often; whether a parameter has a gradient may differ between them.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        control_size: int,
        check_gradient: Callable[[], None],
    ) -> None:
        """`check_gradient` is called for every gradient that is computed, and may refuse it."""
        self._buckets = _make_buckets(parameters, control_size)
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda _: check_gradient())  # type: ignore[no-untyped-call]
            for p in parameters
        ]

    def close(self) -> None:
        """Check no gradient any more."""
        for hook in self._hooks:
            hook.remove()

    def reduce(self, control: Tensor | None) -> Tensor:
        """Replace every gradient by its sum over all ranks, and return the sums of `control`, on
        the device: reading them there would make a GPU wait. None is as zeros.

        A parameter without a gradient on any rank stays without one.
        """
        if control is None:
            self._buckets[-1].control.zero_()
        else:
            self._buckets[-1].control.copy_(control)
        for bucket in self._buckets:
            bucket.send()
        for bucket in self._buckets:
            bucket.receive()
        return self._buckets[-1].control.clone()


class _Bucket:
    """Gradients of one dtype and device as one row: their numbers, for each of them whether it is
    there, and on the last bucket the control values."""

    def __init__(self, params: list[nn.Parameter], control_size: int) -> None:
        self.params = params
        first = params[0]
        numbers = sum(p.numel() for p in params)
        self._row = torch.zeros(
            numbers + len(params) + control_size, dtype=first.dtype, device=first.device
        )
        pieces = torch.split(self._row[:numbers], [p.numel() for p in params])
        self._views = [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)]
        self._is_there = self._row[numbers : numbers + len(params)]
        self.control = self._row[numbers + len(params) :]
        self._work: Any = None
        self._has_all = False

    def send(self) -> None:
        """Copy the gradients and begin to sum them; the gradients themselves are left alone."""
        there = [p.grad is not None for p in self.params]
        views = [v for v, has in zip(self._views, there, strict=True) if has]
        if views:
            torch._foreach_copy_(views, [p.grad for p in self.params if p.grad is not None])
        if len(views) < len(there):
            torch._foreach_zero_([v for v, has in zip(self._views, there, strict=True) if not has])
        self._has_all = len(views) == len(self._views)
        if self._has_all:
            self._is_there.fill_(1.0)
        else:
            self._is_there.copy_(torch.tensor(there, dtype=self._row.dtype))
        self._work = dist.all_reduce(self._row, async_op=True)

    def receive(self) -> None:
        """Give every parameter its summed gradient."""
        self._work.wait()
        # Where this rank has them all nobody need look, which a GPU would have to wait for.
        are_there = [True] * len(self.params) if self._has_all else (self._is_there > 0).tolist()
        for p, view, is_there in zip(self.params, self._views, are_there, strict=True):
            p.grad = view if is_there else None


def _make_buckets(parameters: Sequence[nn.Parameter], control_size: int) -> list[_Bucket]:
    """Return buckets in the order in which a backward pass computes: last parameters first."""
    groups: list[list[nn.Parameter]] = []
    kind, size = None, 0
    for p in reversed(parameters):
        if (p.dtype, p.device) != kind or size > _BUCKET_BYTES:
            groups.append([])
            kind, size = (p.dtype, p.device), 0
        groups[-1].append(p)
        size += p.numel() * p.element_size()
    final = len(groups) - 1
    return [_Bucket(g, control_size if i == final else 0) for i, g in enumerate(groups)]
