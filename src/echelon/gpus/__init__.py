"""The GPUs of this machine and who uses them, from NVML: torch is not needed to look."""

from __future__ import annotations

from echelon.gpus.visible import visible_count

__all__ = ["visible_count"]
