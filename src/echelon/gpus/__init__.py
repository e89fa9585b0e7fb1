"""The GPUs of this machine and who uses them, from NVML: torch is not needed to look."""

from __future__ import annotations

from echelon.gpus.visible_devices import count_visible_gpus

__all__ = ["count_visible_gpus"]
