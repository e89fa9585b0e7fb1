"""Work that does not depend on each other, as branches of the CUDA graph that is being captured.

In one stream a graph is a chain, and a chain of small kernels takes as long as their starts. Where
nothing is captured, the host is the one that is waited for, and more streams would only cost it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch


def run_in_parallel_streams(tasks: Sequence[Callable[[], None]], device: torch.device) -> None:
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        for work in tasks:
            work()
        return
    trunk = torch.cuda.current_stream(device)
    branches = [_get_stream(device, number) for number in range(len(tasks) - 1)]
    for work, branch in zip(tasks, [*branches, trunk], strict=True):
        if branch is not trunk:
            branch.wait_stream(trunk)
        with torch.cuda.stream(branch):
            work()
    for branch in branches:
        trunk.wait_stream(branch)


@cache
def _get_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
