"""Looks every few seconds whether a GPU of this node has met an error that nothing corrected."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from echelon.gpus.error_counts import GpuErrorCounts
from echelon.gpus.nvml import NvmlError

_INTERVAL_S = 5.0


class GpuWatch:
    """A thread of its own: a call of a driver whose GPU is broken may take long, or for ever."""

    def __init__(self, env: Mapping[str, str], device_count: int) -> None:
        """Watch the first GPUs that ranks with these variables see; nothing where there is none."""
        self.fault = ""
        """What is wrong with a GPU, for a person, once something is."""
        self._is_closed = threading.Event()
        threading.Thread(
            target=self._watch, args=(dict(env), device_count), daemon=True, name="gpu watch"
        ).start()

    def close(self) -> None:
        """End the thread soon."""
        self._is_closed.set()

    def _watch(self, env: Mapping[str, str], device_count: int) -> None:
        try:
            counts = GpuErrorCounts(env, device_count)
        except NvmlError:
            return
        while not counts.is_empty and not self.fault and not self._is_closed.wait(_INTERVAL_S):
            self.fault = counts.find_new_errors()
        counts.close()
