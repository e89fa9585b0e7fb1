"""The state of a training in the memory of a rank, for the ranks that go on after one was lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MemorySnapshot:
    """What a snapshot on disk would hold. Its tensors are those of the training itself."""

    info: Mapping[str, Any]
    parts: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The step after which it was taken."""
        return int(self.info["step"])
