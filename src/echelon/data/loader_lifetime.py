"""Loader processes end with the rank that they serve, however that ends.

torch's look for their parent only while they wait for work. One that waits for a lock which a
killed process took with it, or whose rank was killed while it was forked, would stay for ever.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from typing import Any

from echelon.utils.processes import die_with_parent


class LoaderLifetime:
    """The first call in a loader process, made in the rank: a `worker_init_fn`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        context: Any = options.get("multiprocessing_context")
        if context is None or isinstance(context, str):
            method = context or multiprocessing.get_start_method()
        else:
            method = context.get_start_method()
        self._has_fork_server = method == "forkserver"  # it ends with the rank, too
        self._rank_pid = os.getpid()
        self._worker_init_fn = options.get("worker_init_fn")

    def __call__(self, worker: int) -> None:
        die_with_parent(os.getppid() if self._has_fork_server else self._rank_pid)
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)
