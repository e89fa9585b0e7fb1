"""The state of a training in the memory of a rank, for the ranks that go on after one was lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echelon.snapshot.staging_buffer import copy_from_file


@dataclass(frozen=True)
class MemorySnapshot:
    """What a snapshot on disk would hold. Its tensors are those of the training itself, or copies
    of them."""

    info: Mapping[str, Any]
    parts: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The step after which it was taken."""
        return int(self.info["step"])

    def load_part(self, part: str) -> Any:
        """Return one part with tensors of its own: the memory of a copy is used again."""
        return copy_from_file(self.parts[part])
