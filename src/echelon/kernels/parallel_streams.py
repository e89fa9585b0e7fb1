"""Runs independent work as parallel branches of the CUDA graph that is being captured.

In one stream a graph is a chain, and a chain of small kernels takes as long as all their launches.
Outside a capture the host is the bottleneck, and more streams would only cost it time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch


def run_in_parallel_streams(tasks: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Runs the tasks, in parallel streams during a capture and one after the other otherwise."""
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
    """Return the stream of a branch; the same one for every capture."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
